/* What Python may call. build_ffi.py reads it, and so does native.h, so that the C compiler checks it. What Python may
 * call of an extension (native.h) is in the cdef.h of its folder.
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

/* The kinds of records, with the fields that they use. Records come in the order in which UCX told of things. Python
 * reads the fields as unsigned 64-bit integers. */
#define TU_RECORD_FIELDS 6
#define TU_RECORD_OPERATION 0  /* id, status, length, tag: an operation is over */
#define TU_RECORD_MESSAGE 1    /* length, tag, pointer: a Connection's message arrived; `pointer` is UCX's handle */
#define TU_RECORD_FAILURE 2    /* id, status: an endpoint failed */
#define TU_RECORD_REQUEST 3    /* id, pointer: a listener got a connection request */
#define TU_RECORD_AM 4         /* id: a queue of active messages is no longer empty */
#define TU_RECORD_STREAM 5     /* id, length, pointer: an endpoint received a piece of its stream */
#define TU_RECORD_PACKED 6     /* id, status, length, tag, pointer: packed messages of a Connection arrived, or one
                                  that could not be received (status). They are `id` messages of `length` bytes each,
                                  one after the other, from the offset `pointer` of the arena on, until the worker is
                                  progressed again */
#define TU_RECORD_UNUSED 7     /* memory that was withdrawn from peers is no longer in use */
#define TU_RECORD_CONCLUDED 8  /* id, status: what came of an operation is known, but UCX still has some of its memory.
                                  The operation's own record follows */
#define TU_RECORD_NOTE 10      /* id, length, pointer: a notification; id: this side's endpoint to its sender, or 0 */
#define TU_RECORD_TAKEN 11     /* id: so many packed messages arrived that C code has taken (link/) */
#define TU_RECORD_DROPS 9      /* id: a queue of active messages drops some; at most one record a minute for each */

#define TU_SMALL_MESSAGE 1024  /* the longest message that is packed */
#define TU_ARENA 65536         /* bytes of the arena, where packed messages are */
#define TU_CONTROL_QUEUE 0x80000000 /* the tag queue of control frames */
#define TU_BATCH_QUEUE 0x80000002 /* the tag queue of batches: several small messages sent as one (wire.md) */
#define TU_LONGEST_BATCH 4096
#define TU_GROUP_HEAD 8        /* bytes before each group of a batch: queue (4), length of a message (2), number (2) */
#define TU_LONG_QUEUE 0x80000003 /* the tag queue of announcements of long messages */
#define TU_PIECE_QUEUES 0xc0000000 /* these bits are set in the tag queues of pieces of long messages */
#define TU_LONG 1048576        /* longer messages of Connections go in pieces */
#define TU_LONGEST_THRESHOLD 66560 /* with a larger rendezvous threshold there are no pieces: they are not much longer */

/* The longest time, in nanoseconds, for which one call from Python progresses, or goes on with sequences (chains).
 * Other tasks wait meanwhile. */
#define TU_SLICE 60000
#define TU_SEQUENCE_SLICE 100000

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

#define TU_KEY 32              /* bytes of a key that opens the ports of UCX's TCP transport, and of a code made with it */
#define TU_WAKE_FOLDER 86      /* room for the path of the folder of wake-up sockets: a socket's has at most 107 bytes */
#define TU_DATA_PORTS 128      /* the most ports of a worker: UCX's limit for its transports */

typedef struct tu_pair tu_pair_t;

/* The range of ports that a worker's TCP transport may take; 0: any. */
typedef struct tu_port_range {
    unsigned lowest, highest;
    bool used_up;              /* out: no port was free */
} tu_port_range_t;

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
    uint64_t strangers;        /* connections to its data ports without a proof of a key */
} tu_counts_t;

typedef struct tu_address {
    int family;
    char ip[48];
    unsigned port;
    unsigned scope;
    char device[16]; /* the network device that has it; empty: not looked up */
} tu_address_t;

/* What the key gate knows of a peer. */
typedef struct tu_peer {
    const tu_address_t *addresses; /* where it listens */
    size_t count;
    uint64_t uid;              /* of its worker; 0: not known */
    bool is_here;              /* it is on this host, in this network namespace */
    bool lasting;              /* the keys are in the address of its worker */
} tu_peer_t;

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
bool tu_keep_segments_private(void);
bool tu_keep_wakes_private(void);
int tu_probe_thread(void);
int tu_descriptors_left(int wanted);
bool tu_readable(int fd);
void tu_test_refuse_memory(int64_t allowed);

/* close_on_exec.c */
void tu_close_on_exec(void);

/* routes.c */
void tu_follow_routes(void);

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
bool tu_log_can_write(unsigned reader, int fd);
void tu_log_print(const tu_log_line_t *line);

/* context.c */
int tu_context_create(const char **names, const char **values, size_t count, uint64_t features, const char *name,
                      tu_context_t **out, size_t *rejected);
void tu_context_destroy(tu_context_t *context);
char *tu_context_config_text(tu_context_t *context);
char *tu_context_info_text(tu_context_t *context);
void tu_text_free(char *text);

/* worker.c */
int tu_worker_create(tu_context_t *context, const char *name, uint64_t client_id, tu_port_range_t *range,
                     const char *wake_folder, tu_worker_t **out);
void tu_worker_destroy(tu_worker_t *worker);
int tu_worker_efd(tu_worker_t *worker);
const char *tu_worker_wake_folder(tu_worker_t *worker);
uint64_t tu_worker_memory_types(tu_worker_t *worker);
int tu_worker_address(tu_worker_t *worker, bool net_only, char *out, size_t *size);
void tu_worker_counts(tu_worker_t *worker, tu_counts_t *out);
int64_t tu_worker_flush(tu_worker_t *worker);

/* tag_inbox.c */
char *tu_worker_arena(tu_worker_t *worker);
void tu_worker_claim_messages(tu_worker_t *worker, uint64_t tag_bit);
bool tu_worker_reserve_scratch(tu_worker_t *worker);

/* progress.c */
unsigned tu_worker_progress(tu_worker_t *worker);
uint64_t tu_worker_moved(const tu_worker_t *worker);

/* arming.c */
int tu_worker_progress_and_arm(tu_worker_t *worker, tu_record_t *out, size_t max, bool arm, bool once, int *armed);
int tu_worker_look(tu_worker_t *worker, tu_record_t *out, size_t max);
int tu_worker_look_unsignalled(int efd, tu_worker_t *worker, tu_record_t *out, size_t max);
bool tu_worker_submit(tu_worker_t *worker, bool arm);
int tu_worker_signal(tu_worker_t *worker);

/* key_gate.c */
const char *tu_gate_missing(void);
bool tu_gate_port(tu_worker_t *worker, unsigned number, tu_address_t *out);
bool tu_gate_lost(tu_worker_t *worker);
tu_pair_t *tu_gate_add(tu_worker_t *worker, const char *ours, const char *theirs, uint64_t epoch, const tu_peer_t *peer);
void tu_gate_use_by_default(tu_pair_t *pair);
void tu_gate_know(tu_pair_t *pair);
bool tu_gate_remove(tu_pair_t *pair);
bool tu_gate_admit(tu_worker_t *worker, const tu_address_t *ip, unsigned prefix);
bool tu_gate_shut_ended(tu_worker_t *worker);
void tu_test_most_nonces(size_t count);

/* blake2s.c */
void tu_blake2s(const char *key, const char *data, size_t size, char *out);

/* adaptive_poll.c */
void tu_poll_bound(tu_worker_t *worker, uint64_t nanoseconds);
bool tu_poll_begin(tu_worker_t *worker);
int tu_poll(tu_worker_t *worker, tu_record_t *out, size_t max);
bool tu_poll_goes_on(const tu_worker_t *worker);
bool tu_poll_continues(const tu_worker_t *worker);
void tu_poll_pause(tu_worker_t *worker);
int tu_poll_at_once(tu_worker_t *worker, tu_record_t *out, size_t max);

/* operation.c */
bool tu_operation_cancel(tu_worker_t *worker, uint64_t id);

/* sockaddr.c */
bool tu_is_own_address(const tu_address_t *address);
#define TU_ACTIVE -1 /* all interfaces that are up and have a carrier */

int tu_interface_with(const tu_address_t *address);
int tu_interface_between(const tu_address_t *from, const tu_address_t *to);
bool tu_leads_to(const tu_address_t *own, const tu_address_t *to);
int tu_interface_addresses(int index, tu_address_t *out, int size);

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
int64_t tu_endpoint_flush_ucx(tu_endpoint_t *endpoint);
int64_t tu_endpoint_flush(tu_endpoint_t *endpoint);

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
int64_t tu_tag_wait(tu_worker_t *worker, uint64_t tag, uint64_t mask);

/* pacing.c */
typedef struct tu_pacing {
    unsigned window;           /* how many pieces may be under way */
    size_t piece;              /* the length of the next ones */
    uint64_t shrunk;           /* when the window became smaller */
    unsigned sampled;          /* pieces that have ended since it was adapted */
    uint64_t samples[7];       /* nanoseconds that they took */
    uint64_t unqueued;         /* nanoseconds that a piece takes with the least window, as measured */
    unsigned measurements;     /* how many there were since that was set */
    uint64_t lowest;           /* the lowest of those */
    bool measuring;            /* whether a measurement goes on */
    unsigned usual;            /* the window to restore after it */
    uint64_t next;             /* when the next one is due */
    uint64_t others;           /* the count of other messages when a piece ended, */
    uint64_t changed;          /* and when that was last another one than before */
} tu_pacing_t;

void tu_pacing_open(tu_pacing_t *pacing);
void tu_pacing_piece_ended(tu_pacing_t *pacing, uint64_t now, uint64_t posted, uint64_t others);

/* long_messages.c */
bool tu_long_lingers(const tu_worker_t *worker);
int64_t tu_long_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, size_t length, uint64_t tag);

/* active_messages.c */
int tu_am_open(tu_worker_t *worker, uint64_t id, unsigned am_id, size_t max_messages, size_t max_bytes, bool refuse,
               tu_am_queue_t **out);
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

/* strided.c: strides in bytes, outermost dimension first. Pack and unpack return how many bytes they copied. */
int tu_strided_create(void *address, size_t item, size_t dimensions, const size_t *shape, const ptrdiff_t *strides,
                      tu_strided_t **out);
size_t tu_strided_pack(const tu_strided_t *strided, size_t offset, void *out, size_t length);
size_t tu_strided_unpack(const tu_strided_t *strided, size_t offset, const void *data, size_t length);

void free(void *memory);
