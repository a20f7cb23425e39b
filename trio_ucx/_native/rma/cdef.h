/* What Python may call of remote memory: see ../cdef.h. */

typedef struct ucp_mem *ucp_mem_h;     /* UCX's */
typedef struct ucp_rkey *ucp_rkey_h;   /* UCX's */
typedef struct tu_served tu_served_t;  /* memory that peers may get and put by messages: owner.c */

/* memory.c */
int tu_memory_map(tu_context_t *context, void *address, size_t length, int memory_type, unsigned protection,
                  ucp_mem_h *out);
int tu_memory_query(ucp_mem_h memory, uint64_t *address, size_t *length, int *memory_type);
int tu_memory_unmap(tu_context_t *context, ucp_mem_h memory);
int tu_memory_pack(tu_context_t *context, ucp_mem_h memory, char *out, size_t *size);
int tu_rkey_unpack(tu_endpoint_t *endpoint, const char *packed, ucp_rkey_h *out);
void tu_rkey_destroy(ucp_rkey_h rkey);
int tu_rkey_pointer(ucp_rkey_h rkey, uint64_t remote, uint64_t *local);
int64_t tu_put(tu_endpoint_t *endpoint, void *address, size_t length, int memory, uint64_t remote, ucp_rkey_h rkey);
int64_t tu_get(tu_endpoint_t *endpoint, void *address, size_t length, int memory, uint64_t remote, ucp_rkey_h rkey);

/* transfer.c: atomics; puts and gets without UCX's own; fences, which are about these and UCX's */
#define TU_TOKEN_SIZE 16
#define TU_TOKEN_ALIGNMENT 64  /* bytes; of the token behind allocated memory: a cache line that nobody writes */
#define TU_LONGEST_NOTE 4096   /* bytes of a notification */
#define TU_MOST_NOTES 1024     /* notifications about one memory that nobody has taken */
#define TU_REMOTE_AM_ID 4095   /* the id of the active messages by which they ask the memory's owner */
#define TU_ATOMIC_ADD 0
#define TU_ATOMIC_SWAP 1
#define TU_ATOMIC_COMPARE_SWAP 2
#define TU_ATOMIC_AND 3
#define TU_ATOMIC_OR 4
#define TU_ATOMIC_XOR 5

/* How far a mapping of remote memory has been prepared: mapped.c. */
typedef struct tu_preparation {
    uint64_t copied;           /* bytes copied since its last step */
    uint64_t left;             /* bytes, from the beginning of the memory */
} tu_preparation_t;

/* How to reach remote memory. */
typedef struct tu_access_path {
    char *local;               /* its address in this process; NULL: it is not mapped */
    const char *local_token;   /* the token in this mapping; NULL: not mapped, or without one */
    tu_preparation_t *preparation; /* of the mapping; NULL: there is none */
    bool messages;             /* whether messages to its owner, with the token, reach it */
    char token[16];
    uint64_t length;
    uint64_t part;             /* longer transfers go as several messages of so many bytes; 0: never */
    int pid;                   /* of its owner, whose memory this process may read; 0: it may not */
    uint64_t address;          /* of the memory in its owner */
    uint64_t token_address;    /* where its owner has the token */
    ucp_rkey_h rkey;           /* for UCX's own puts and gets, which nothing of the above replaces; NULL: none */
} tu_access_path_t;

int64_t tu_transfer(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, bool put, void *address,
                    size_t length, int memory, uint64_t offset);
int64_t tu_transfer_atomic(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, int operation,
                           uint64_t length, uint64_t operand, uint64_t swapped, void *old, uint64_t offset);
int64_t tu_transfer_blocks(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, bool put,
                           void *buffer, int memory, const int64_t *local, uint64_t offset, const int64_t *remote,
                           size_t count, uint64_t size, uint64_t *progress);
int64_t tu_transfer_buffers(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, bool put,
                            const tu_buffers_t *buffers, const uint64_t *offsets, uint64_t *progress);
int64_t tu_transfer_note(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, void *data,
                         size_t length);
int tu_transfers_status(tu_endpoint_t *endpoint, uint64_t scope);
int tu_worker_fence(tu_worker_t *worker);

/* mapped.c */
bool tu_can_read(const void *address);
bool tu_mapped_has_token(const char *at, const char *token);

/* direct.c */
bool tu_direct_allowed(const tu_access_path_t *path);

/* ranges.c */
size_t tu_blocks_beyond(const int64_t *blocks, size_t count, uint64_t limit);
size_t tu_blocks_repeated(const int64_t *blocks, size_t count, uint64_t limit);

/* owner.c */
#define TU_ACCESS_READ 1
#define TU_ACCESS_WRITE 2
#define TU_ACCESS_ATOMIC 4
tu_served_t *tu_memory_serve(tu_context_t *context, ucp_mem_h memory, const char *token, uint64_t address,
                             uint64_t length, unsigned access, bool shared);
uint64_t tu_memory_token_address(const tu_served_t *served);
void tu_note_take(uint64_t note, char *token, char *data);
void tu_memory_note_taken(tu_served_t *served);
unsigned tu_memory_withdraw(tu_served_t *served);
tu_served_t *tu_memory_hold(const char *token);
void tu_memory_let_go(tu_served_t *served);
bool tu_memory_unused(tu_served_t *served);
void tu_worker_stop_serving(tu_worker_t *worker);
