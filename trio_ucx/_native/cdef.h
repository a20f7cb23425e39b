/* What Python may call. build_ffi.py reads it, and so does native.h, so that the C compiler checks it.
 *
 * A function that posts an operation returns a verdict (int64_t): 0 if the operation completed at once; the id of the
 * pending operation, whose record will come, if it is positive; a ucs_status_t if it is negative. An `int` that a
 * function returns is a ucs_status_t, unless a comment says otherwise.
 */

typedef struct tu_context tu_context_t;
typedef struct tu_worker tu_worker_t;
typedef struct tu_endpoint tu_endpoint_t;
typedef struct tu_listener tu_listener_t;
typedef struct tu_am_queue tu_am_queue_t;
typedef struct ucp_mem *ucp_mem_h;     /* UCX's */
typedef struct ucp_rkey *ucp_rkey_h;   /* UCX's */
typedef struct tu_served tu_served_t;  /* memory that peers may get and put by messages: rma/owner.c */

/* The kinds of records, with the fields that they use. Records come in the order in which UCX told of things. Python
 * reads the fields as unsigned 64-bit integers. */
#define TU_RECORD_FIELDS 6
#define TU_RECORD_OPERATION 0  /* id, status, length, tag: an operation is over */
#define TU_RECORD_MESSAGE 1    /* length, tag, pointer: a Connection's message arrived; `pointer` is UCX's handle */
#define TU_RECORD_FAILURE 2    /* id, status: an endpoint failed */
#define TU_RECORD_REQUEST 3    /* id, pointer: a listener got a connection request */
#define TU_RECORD_AM 4         /* id: a queue of active messages is no longer empty */
#define TU_RECORD_STREAM 5     /* id, length, pointer: an endpoint received a piece of its stream */
#define TU_RECORD_CUT 6        /* id, status: an endpoint must be closed because of what its peer sent */
#define TU_RECORD_PACKED 7     /* id, status, length, tag, pointer: packed messages of a Connection arrived, or one
                                  that could not be received (status). They are `id` messages of `length` bytes each,
                                  one after the other, from the offset `pointer` of the arena on, until the worker is
                                  progressed again */
#define TU_RECORD_UNUSED 8     /* peers' requests no longer use some memory that was withdrawn */
#define TU_RECORD_RUN_OVER 9   /* id, status: a chain's run is over, but UCX still has requests of it. The operation's own
                                  record follows when it has none */

#define TU_SMALL_MESSAGE 1024  /* the longest message that is packed */
#define TU_ARENA 65536         /* bytes of the arena, where packed messages are */
#define TU_CONTROL_QUEUE 0x80000000 /* the tag queue of control frames */
#define TU_BATCH_QUEUE 0x80000002 /* the tag queue of batches: several small messages sent as one (docs/wire.md) */
#define TU_LONGEST_BATCH 4096
#define TU_GROUP_HEAD 8        /* bytes before each group of a batch: queue (4), length of a message (2), number (2) */
#define TU_LONG_QUEUE 0x80000003 /* the tag queue of announcements of long messages */
#define TU_LONG_HEAD 16        /* bytes of such: queue (4), queue of the pieces (4), length of the message (8) */
#define TU_PIECE_QUEUES 0xc0000000 /* these bits are set in the tag queues of pieces of long messages */
#define TU_LONG 1048576        /* longer messages of Connections go in pieces */
#define TU_PIECE 262144        /* the longest piece */
#define TU_PIECES_AHEAD 6      /* the most pieces of a message that its sender has posted and that are not received */

/* Nanoseconds for which progress, and sequences, may go on in one call from Python: other tasks wait meanwhile. */
#define TU_SLICE 300000

typedef struct tu_record {
    uint64_t kind;
    uint64_t id;
    uint64_t status;           /* minus the ucs_status_t, so 0 is success and errors are positive */
    uint64_t length;
    uint64_t tag;
    uint64_t pointer;
} tu_record_t;

/* An array in host memory whose elements are not contiguous. */
typedef struct tu_strided tu_strided_t;

#define TU_STRIDED_DIMENSIONS 64 /* the most that Python's buffer protocol allows */

/* The kind of memory: 1 + ucs_memory_type_t. With 0, which is also a field that was left out, UCX finds out. */
#define TU_MEMORY_UNKNOWN 0
#define TU_MEMORY_HOST 1

/* One contiguous buffer, or (count > 1) a gather/scatter list of them, all of one kind of memory; or, if `strided` is
 * set, that array. */
typedef struct tu_buffers {
    size_t count;
    void **addresses;
    size_t *lengths;
    int memory;
    const tu_strided_t *strided;
} tu_buffers_t;

#define TU_DATA_PORTS 64       /* more than any machine has network devices */

/* Where UCX listens for the TCP transport of one worker. */
typedef struct tu_data_ports {
    unsigned lowest, highest;  /* in: the range of ports that it may take; 0: any */
    int error;                 /* errno of a filter that the kernel refused; 0: it refused none */
    bool used_up;              /* whether no port was free */
    int count;
    int fds[TU_DATA_PORTS];
} tu_data_ports_t;

typedef struct tu_received {
    uint64_t length;
    uint64_t tag;
} tu_received_t;

/* Where the data of an active message is. */
#define TU_AM_COPIED 0         /* in the message itself */
#define TU_AM_BORROWED 1           /* in UCX's memory, until tu_am_release */
#define TU_AM_RENDEZVOUS 2     /* with the sender, until tu_am_receive */

typedef struct tu_am_message {
    int kind;
    uint64_t endpoint;         /* id of the endpoint to reply to; 0: none was asked for, or it is UCX's own */
    uint64_t length;
    size_t header_length;
    char *header;
    void *data;
} tu_am_message_t;

typedef struct tu_am_counts {
    uint64_t messages;
    uint64_t bytes;
    uint64_t dropped;
    uint64_t refused;
} tu_am_counts_t;

#define TU_AM_SEND_AUTO 0
#define TU_AM_SEND_EAGER 1
#define TU_AM_SEND_RENDEZVOUS 2

typedef struct tu_counts {
    uint64_t progress_calls;
    uint64_t arm_busy;
    uint64_t records;
    uint64_t ring_capacity;
    uint64_t operations;
    uint64_t polls;            /* waits that polled */
    uint64_t polls_paid;       /* polls that found something */
    uint64_t poll_nanoseconds; /* spent polling */
    uint64_t poll_limit;       /* how long the next poll may take, in nanoseconds */
    uint64_t chain_requests;   /* posted by request chains */
} tu_counts_t;

typedef struct tu_address {
    int family;
    char ip[48];
    unsigned port;
    unsigned scope;
} tu_address_t;

#define TU_NAME_SIZE 32        /* UCX's UCP_ENTITY_NAME_MAX, the null character included */

/* Options of an endpoint, whatever it connects to. */
typedef struct tu_endpoint_options {
    int error_mode;            /* UCX's ucp_err_handling_mode_t */
    bool send_client_id;       /* tell a listener the worker's client id */
    char name[TU_NAME_SIZE];   /* "": UCX makes one up */
} tu_endpoint_options_t;

typedef struct tu_context_attributes {
    size_t request_size;
    int thread_mode;
    uint64_t memory_types;     /* bit n: UCX's ucs_memory_type_t n */
    char name[TU_NAME_SIZE];
} tu_context_attributes_t;

typedef struct tu_worker_attributes {
    int thread_mode;
    size_t max_am_header;
    size_t max_debug_string;
    char name[TU_NAME_SIZE];
} tu_worker_attributes_t;

/* The state in which tu_worker_progress_and_arm leaves the worker. */
#define TU_MORE 0
#define TU_ARMED 1
#define TU_BUSY 2

/* library.c */
const char *tu_library_file(void);
void tu_library_version(unsigned *major, unsigned *minor, unsigned *release);
void tu_compiled_version(unsigned *major, unsigned *minor);
const char *tu_status_text(int status);
void tu_prefer_huge_pages(void *address, size_t length);
int tu_timer_create(void);
int tu_timer_set(int fd, uint64_t nanoseconds, bool repeat);
bool tu_timer_ended(int fd);
int tu_wait_create(int efd, int timer);
int tu_probe_sysv(size_t one, size_t other);
int tu_descriptors_left(int wanted);
bool tu_readable(int fd);
void tu_test_refuse_memory(int64_t allowed);

/* sockets.c */
unsigned tu_sockets_make_room(int efd);

/* log.c */
typedef struct tu_log_line {
    int level;                 /* a ucs_log_level_t */
    unsigned number;           /* the line in UCX's source file */
    const char *file;
    const char *function;
    const char *text;
} tu_log_line_t;

void tu_log_begin(void);
unsigned tu_log_open(void);
void tu_log_close(void);
const tu_log_line_t *tu_log_take(unsigned reader, const tu_log_line_t *before, uint64_t *lost);
void tu_log_print(const tu_log_line_t *line);

/* context.c */
int tu_context_create(const char **names, const char **values, size_t count, uint64_t features, const char *name,
                      tu_context_t **out, size_t *rejected);
void tu_context_destroy(tu_context_t *context);
char *tu_context_config_text(tu_context_t *context);
char *tu_context_info_text(tu_context_t *context);
void tu_text_free(char *text);

/* worker.c */
int tu_worker_create(tu_context_t *context, const char *name, uint64_t client_id, tu_data_ports_t *ports,
                     tu_worker_t **out);
void tu_worker_destroy(tu_worker_t *worker);
int tu_worker_efd(tu_worker_t *worker);
uint64_t tu_worker_memory_types(tu_worker_t *worker);
int tu_worker_address(tu_worker_t *worker, bool net_only, char *out, size_t *size);
char *tu_worker_arena(tu_worker_t *worker);
void tu_worker_claim_messages(tu_worker_t *worker, uint64_t tag_bit, size_t small);
bool tu_worker_reserve_scratch(tu_worker_t *worker);
int tu_worker_progress_and_arm(tu_worker_t *worker, tu_record_t *out, size_t max, bool arm, int *armed);
int tu_worker_look(tu_worker_t *worker, tu_record_t *out, size_t max);
int tu_worker_look_unsignalled(int efd, tu_worker_t *worker, tu_record_t *out, size_t max);
unsigned tu_worker_progress(tu_worker_t *worker);
int tu_worker_signal(tu_worker_t *worker);
void tu_worker_counts(tu_worker_t *worker, tu_counts_t *out);
int64_t tu_worker_flush(tu_worker_t *worker);

/* adaptive_poll.c */
void tu_poll_bound(tu_worker_t *worker, uint64_t nanoseconds);
bool tu_poll_begin(tu_worker_t *worker);
int tu_poll(tu_worker_t *worker, tu_record_t *out, size_t max);
bool tu_poll_goes_on(const tu_worker_t *worker);
bool tu_poll_continues(const tu_worker_t *worker);
int tu_poll_at_once(tu_worker_t *worker, tu_record_t *out, size_t max);

/* operation.c */
bool tu_operation_cancel(tu_worker_t *worker, uint64_t id);

/* sockaddr.c */
int tu_is_interface_address(const tu_address_t *address);

/* endpoint.c */
int tu_endpoint_connect(tu_worker_t *worker, uint64_t id, const tu_address_t *remote, const tu_address_t *local,
                        const tu_endpoint_options_t *options, tu_endpoint_t **out);
int tu_endpoint_to_worker(tu_worker_t *worker, uint64_t id, const void *address, const tu_endpoint_options_t *options,
                          tu_endpoint_t **out);
int tu_endpoint_from_request(tu_worker_t *worker, uint64_t id, uint64_t request, const tu_endpoint_options_t *options,
                             bool *answered, tu_endpoint_t **out);
#define TU_CLOSE 0
#define TU_CLOSE_EXACT 1
#define TU_CLOSE_STOP 2
int64_t tu_endpoint_close(tu_endpoint_t *endpoint, int how);
void tu_endpoint_free(tu_endpoint_t *endpoint);

/* listener.c */
int tu_listener_create(tu_worker_t *worker, uint64_t id, int family, const char *ip, unsigned port, unsigned scope,
                       tu_listener_t **out);
int tu_listener_sockaddr(tu_listener_t *listener, char *host, size_t size, unsigned *port);
void tu_listener_destroy(tu_listener_t *listener);
int tu_request_client(uint64_t request, char *host, size_t size, unsigned *port);
int tu_request_client_id(uint64_t request, uint64_t *client_id);
int tu_request_reject(tu_listener_t *listener, uint64_t request);

/* query.c */
int tu_library_thread_mode(int *mode);
int tu_context_attributes(tu_context_t *context, tu_context_attributes_t *out);
int tu_worker_attributes(tu_worker_t *worker, tu_worker_attributes_t *out);
int tu_address_uid(void *address, uint64_t *uid);
int tu_endpoint_sockaddr(tu_endpoint_t *endpoint, bool remote, char *host, size_t size, unsigned *port);
int tu_endpoint_transports(tu_endpoint_t *endpoint, char *out, size_t size);
int tu_endpoint_name(tu_endpoint_t *endpoint, char *out, size_t size);
int tu_endpoint_evaluate(tu_endpoint_t *endpoint, size_t bytes, double *seconds);
int tu_operation_describe(tu_worker_t *worker, uint64_t id, char *out, size_t size);

/* tag.c */
int64_t tu_tag_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t tag, bool sync);
int64_t tu_tag_send_one(tu_endpoint_t *endpoint, const void *address, size_t length, int memory, uint64_t tag);
int64_t tu_tag_receive(tu_worker_t *worker, const tu_buffers_t *buffers, uint64_t tag, uint64_t mask,
                       tu_received_t *received);
int64_t tu_tag_receive_one(tu_worker_t *worker, void *address, size_t length, int memory, uint64_t tag, uint64_t mask,
                           tu_received_t *received);
int64_t tu_message_receive(tu_worker_t *worker, uint64_t message, const tu_buffers_t *buffers,
                           tu_received_t *received);
int64_t tu_message_receive_one(tu_worker_t *worker, uint64_t message, void *address, size_t length, int memory,
                               tu_received_t *received);
uint64_t tu_tag_probe(tu_worker_t *worker, uint64_t tag, uint64_t mask, bool remove, tu_received_t *received);

/* long_messages.c */
int64_t tu_long_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, size_t length, uint64_t tag);

/* active_messages.c */
int tu_am_open(tu_worker_t *worker, uint64_t id, unsigned am_id, size_t max_messages, size_t max_bytes, bool refuse,
               bool cut, tu_am_queue_t **out);
tu_am_message_t *tu_am_next(tu_am_queue_t *queue);
void tu_am_counts(tu_am_queue_t *queue, tu_am_counts_t *out);
void tu_am_close(tu_am_queue_t *queue);
int64_t tu_am_receive(tu_worker_t *worker, tu_am_message_t *message, const tu_buffers_t *buffers);
void tu_am_forget(tu_am_message_t *message);
void tu_am_release(tu_worker_t *worker, tu_am_message_t *message);
int64_t tu_am_send(tu_endpoint_t *endpoint, unsigned am_id, const char *header, size_t header_length,
                   const tu_buffers_t *buffers, bool reply, int protocol);

/* stream.c */
int64_t tu_stream_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers);
void tu_stream_release(tu_worker_t *worker, uint64_t data);

/* rma/memory.c */
int tu_memory_map(tu_context_t *context, void *address, size_t length, int memory_type, unsigned protection,
                  ucp_mem_h *out);
int tu_memory_query(ucp_mem_h memory, uint64_t *address, size_t *length, int *memory_type);
int tu_memory_unmap(tu_context_t *context, ucp_mem_h memory);
int tu_memory_pack(tu_context_t *context, ucp_mem_h memory, char *out, size_t *size);
int tu_rkey_unpack(tu_endpoint_t *endpoint, const char *packed, ucp_rkey_h *out);
void tu_rkey_destroy(ucp_rkey_h rkey);
int tu_rkey_pointer(ucp_rkey_h rkey, uint64_t remote, uint64_t *local);
int64_t tu_put(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t remote, ucp_rkey_h rkey);
int64_t tu_get(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t remote, ucp_rkey_h rkey);

/* rma/transfer.c: atomics; puts and gets without UCX's own; fences and flushes, which are about these and UCX's */
#define TU_TOKEN_SIZE 16
#define TU_REMOTE_AM_ID 4095   /* the id of the active messages by which they ask the memory's owner */
#define TU_ATOMIC_ADD 0
#define TU_ATOMIC_SWAP 1
#define TU_ATOMIC_COMPARE_SWAP 2
#define TU_ATOMIC_AND 3
#define TU_ATOMIC_OR 4
#define TU_ATOMIC_XOR 5
#define TU_EAGER_GET 98304     /* the data of longer gets stays with the owner until it is fetched */

/* How to reach remote memory. */
typedef struct tu_way {
    char *local;               /* its address in this process; NULL: it is not mapped */
    bool messages;             /* whether messages to its owner, with the token, reach it */
    char token[16];
    uint64_t length;
    uint64_t part;             /* longer transfers go as several messages of so many bytes; 0: never */
} tu_way_t;

int64_t tu_transfer(tu_endpoint_t *endpoint, const tu_way_t *way, bool put, const tu_buffers_t *buffers,
                    uint64_t offset);
int64_t tu_transfer_atomic(tu_endpoint_t *endpoint, const tu_way_t *way, int operation, uint64_t length,
                           uint64_t operand, uint64_t swapped, void *old, uint64_t offset);
int tu_transfers_status(tu_endpoint_t *endpoint);
int64_t tu_endpoint_flush_ucx(tu_endpoint_t *endpoint);
int64_t tu_endpoint_flush(tu_endpoint_t *endpoint);
int tu_worker_fence(tu_worker_t *worker);

/* rma/owner.c */
#define TU_ACCESS_READ 1
#define TU_ACCESS_WRITE 2
#define TU_ACCESS_ATOMIC 4
tu_served_t *tu_memory_serve(tu_context_t *context, ucp_mem_h memory, const char *token, uint64_t address,
                             uint64_t length, unsigned access);
unsigned tu_memory_withdraw(tu_served_t *served);
bool tu_memory_unused(tu_served_t *served);
void tu_worker_stop_serving(tu_worker_t *worker);

/* strided.c: strides in bytes, outermost dimension first. Pack and unpack return how many bytes they copied. */
int tu_strided_create(void *address, size_t item, size_t dimensions, const size_t *shape, const ptrdiff_t *strides,
                      tu_strided_t **out);
size_t tu_strided_pack(const tu_strided_t *strided, size_t offset, void *out, size_t length);
size_t tu_strided_unpack(const tu_strided_t *strided, size_t offset, const void *data, size_t length);

/* chain/expressions.c: expressions over results, in postfix notation, of integers of 128 bits. Terms name a request by
 * its index. A comparison gives 0 or 1. The operations called "unsigned" are for unsigned integers of 128 bits; the
 * others are signed, which holds every narrower integer. */
#define TU_TERM_CONSTANT 0     /* low, high: its halves */
#define TU_TERM_LOAD 1         /* request, low: offset in its result, high: width in bytes, extra: TU_LOAD_... */
#define TU_TERM_OFFSET 2        /* request: the offset in its region that it read last */
#define TU_TERM_CRC32C 3       /* request, low: offset, high: length */
#define TU_TERM_SAME 4         /* request, low: offset, high: address of a local buffer, extra: length */
#define TU_TERM_LOCAL 5        /* low: address, high and extra: as of a load */
#define TU_TERM_ADD 6
#define TU_TERM_SUBTRACT 7
#define TU_TERM_MULTIPLY 8
#define TU_TERM_AND 9
#define TU_TERM_OR 10
#define TU_TERM_XOR 11
#define TU_TERM_LEFT 12
#define TU_TERM_RIGHT 13
#define TU_TERM_RIGHT_UNSIGNED 14
#define TU_TERM_EQUAL 15
#define TU_TERM_NOT_EQUAL 16
#define TU_TERM_LESS 17
#define TU_TERM_LESS_EQUAL 18
#define TU_TERM_LESS_UNSIGNED 19
#define TU_TERM_LESS_EQUAL_UNSIGNED 20
#define TU_TERM_NOT 21         /* of a condition */
#define TU_TERM_DEPTH 32       /* values on the stack at once */
#define TU_LOAD_SIGNED 1
#define TU_LOAD_BIG 2          /* most significant byte first */

typedef struct tu_term {
    int32_t code;
    uint32_t request;
    uint64_t low;
    uint64_t high;
    uint64_t extra;
} tu_term_t;

typedef struct tu_terms {
    const tu_term_t *terms;
    size_t count;              /* 0: it was not given */
} tu_terms_t;

/* chain/build.c */
typedef struct tu_chain tu_chain_t;

#define TU_CHAIN_CHECK 0       /* evaluates its condition, and does nothing else */
#define TU_CHAIN_GET 1
#define TU_CHAIN_PUT 2
#define TU_CHAIN_ATOMIC 3
#define TU_CHAIN_TAG_SEND 4
#define TU_CHAIN_AM_SEND 5
#define TU_CHAIN_FOLLOW 6

/* What a false condition does. */
#define TU_FALSE_ERROR 0
#define TU_FALSE_SKIP 1
#define TU_FALSE_STOP 2

/* What became of a request. */
#define TU_CHAIN_WAITING 0     /* it has not begun */
#define TU_CHAIN_POSTED 1      /* UCX has it, or a flush after it */
#define TU_CHAIN_DONE 2
#define TU_CHAIN_SKIPPED 3     /* the states after this one are errors */
#define TU_CHAIN_FALSE 4
#define TU_CHAIN_NOT_EVALUATED 5
#define TU_CHAIN_OUT_OF_BOUNDS 6
#define TU_CHAIN_NO_RESULT 7   /* it refers to bytes that a result does not have */
#define TU_CHAIN_FAILED 8      /* status says why */
#define TU_CHAIN_CANCELLED 9   /* before it was begun */
/* The length of the result of a request that was skipped: see tu_chain_values. */
#define TU_CHAIN_NO_VALUE 0xFFFFFFFFFFFFFFFF

/* A part of a payload: the user's memory, a piece of a result, or an integer. */
#define TU_PART_MEMORY 0
#define TU_PART_RESULT 1
#define TU_PART_INTEGER 2

typedef struct tu_part {
    int kind;
    uint32_t request;
    void *address;
    uint64_t offset;
    uint64_t length;           /* of an integer: its width, up to 16 */
    bool big;
    tu_terms_t value;
} tu_part_t;

/* A request, as Python describes it; tu_chain_add copies all but the user's memory. */
typedef struct tu_chain_request {
    int kind;
    int atomic;                /* TU_ATOMIC_... */
    size_t size;               /* of the result: the most that a get or a node has; the width of an atomic */
    void *into;                /* where the result of a get goes; NULL: to memory of the chain */
    int memory;                /* the kind of memory of `into`, or of the payload */
    int on_false;
    uint64_t retries;          /* how often a false condition is tried again first */
    uint64_t delay;            /* nanoseconds before each retry */
    uint64_t tag;              /* or the id of an active message */
    bool reply;
    const char *header;
    size_t header_length;
    const uint32_t *targets;   /* one of them is chosen by `choice` */
    size_t target_count;
    const uint32_t *after;     /* the requests that it depends on: if one fails, it fails, ... */
    size_t after_count;
    const uint32_t *behind;    /* ... and those that it only waits for */
    size_t behind_count;
    const uint32_t *again;     /* the requests that a retry runs again first */
    size_t again_count;
    const tu_part_t *parts;
    size_t part_count;
    tu_terms_t condition;
    tu_terms_t choice;
    tu_terms_t offset;         /* in the target */
    tu_terms_t length;         /* how much is got, or how much of the payload is put or sent */
    tu_terms_t operand;        /* of an atomic */
    tu_terms_t swapped;        /* what a compare-and-swap stores */
    tu_terms_t next;           /* of a node: the offset of the next node ... */
    tu_terms_t until;          /* ... unless this is true */
    bool has_end;
    uint64_t end;              /* the offset that means that there is no next node */
    uint64_t limit;            /* of nodes */
} tu_chain_request_t;

typedef struct tu_chain_report {
    int state;
    int status;
    uint32_t culprit;          /* the request that failed before it, or whose result was too short */
    uint64_t length;           /* of the result */
    uint64_t offset;           /* that was read or written last */
    uint64_t steps;            /* nodes of a list that were read */
    uint64_t retries;
    uint32_t target;           /* the one that was chosen */
    const char *result;        /* NULL: none */
} tu_chain_report_t;

int tu_chain_create(tu_worker_t *worker, tu_chain_t **out);
void tu_chain_free(tu_chain_t *chain);
int tu_chain_target(tu_chain_t *chain, uint64_t address, uint64_t length);
void tu_chain_bind(tu_chain_t *chain, uint32_t target, tu_endpoint_t *endpoint, ucp_rkey_h rkey,
                   const tu_way_t *way);
int tu_chain_add(tu_chain_t *chain, const tu_chain_request_t *request);
void tu_chain_timer(tu_worker_t *worker, int fd);
/* chain/run.c */
int64_t tu_chain_run(tu_chain_t *chain);
bool tu_chains_in_flight(tu_endpoint_t *endpoint);
void tu_chain_forget(tu_chain_t *chain, uint32_t target);
void tu_chain_cancel(tu_chain_t *chain);
/* chain/report.c */
bool tu_chain_busy(const tu_chain_t *chain);
void tu_chain_report(const tu_chain_t *chain, uint32_t request, tu_chain_report_t *out);
uint64_t tu_chain_reports(const tu_chain_t *chain, uint32_t count, tu_chain_report_t *out, char *results,
                          uint32_t *failed);
uint32_t tu_chain_errors(const tu_chain_t *chain);
int64_t tu_chain_values(const tu_chain_t *chain, uint32_t count, uint64_t *lengths, char *results);
void tu_chain_restart(tu_chain_t *chain, int state);
size_t tu_chain_memory(const tu_chain_t *chain);

void free(void *memory);
