/* The C half of the UCX-Trio joint.
 *
 * Every callback that UCX makes is one of ours, in C; it appends a record to its worker's ring and returns. No Python
 * runs inside UCX. Python asks for the records with tu_worker_turn(), which progresses, collects, drains and arms in
 * one call.
 *
 * Room in the ring is reserved when something is posted or opened (one record for each pending operation and each
 * endpoint), so that a callback never has to allocate. Callbacks for which nothing can be reserved (a stranger's
 * connection request) use the slack, and turn the stranger away when there is none.
 *
 * A worker and all that hangs on it is used by one thread. Nothing here checks that, Python does.
 */
#ifndef TRIO_UCX_NATIVE_H
#define TRIO_UCX_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

#include <ucp/api/ucp.h>

#include "cdef.h"
#include "list.h"
#include "newer.h"

/* Records that may arrive without a reservation, between two turns. */
#define TU_RING_SLACK 256
/* A turn ends when it has delivered so many bytes that stay in UCX's buffers until Python takes them. */
#define TU_BATCH_BYTES (512 * 1024)
/* A message counts as at least so many bytes. UCX has 256 spare buffers for messages in shared memory; when they are
 * used up it needs more memory, and where there is none, messages are lost (uct_mm_iface_process_recv). */
#define TU_BUFFER 4096
/* Raw tag messages that a worker with Connections keeps, until the program first asks for such messages. */
#define TU_RAW_KEPT 64
#define TU_RAW_BYTES (16 * 1024 * 1024)
/* For so many nanoseconds sequences may go on in one call of Python's. */
#define TU_SLICE 500000

/* Nanoseconds, of a clock that never goes back. */
static inline uint64_t tu_now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* ---- memory (library.c) ---- */

extern int64_t tu_allocations_left; /* see tu_test_refuse_memory; -1: without limit */

static inline bool tu_may_allocate(void)
{
    if (tu_allocations_left > 0) {
        tu_allocations_left--;
        return true;
    }
    return tu_allocations_left < 0;
}

static inline void *tu_malloc(size_t size)
{
    return tu_may_allocate() ? malloc(size) : NULL;
}

static inline void *tu_aligned_alloc(size_t alignment, size_t size)
{
    return tu_may_allocate() ? aligned_alloc(alignment, size) : NULL;
}

static inline void *tu_calloc(size_t count, size_t size)
{
    return tu_may_allocate() ? calloc(count, size) : NULL;
}

static inline void *tu_realloc(void *memory, size_t size)
{
    return tu_may_allocate() ? realloc(memory, size) : NULL;
}

/* ---- a worker and what hangs on it ---- */

struct tu_context {
    ucp_context_h context;
    uint64_t features;
    ucp_config_t *config;      /* kept for `python -m trio_ucx info` */
};

typedef struct tu_transfer tu_transfer_t;
typedef struct tu_rma tu_rma_t;       /* a worker's remote memory: rma/ */
typedef struct tu_chains tu_chains_t; /* a worker's request chains: chain/ */

/* ---- what the parts of the library that work beside UCX (remote memory, request chains) have to do with the rest ----
 *
 * The rest calls them through these structures, and knows nothing else of them. */

/* Called after each progress of UCX's while it is in the worker's list, which is where it has something to do. Returns
 * how much it did. It may add and remove hooks, itself included. */
typedef struct tu_hook {
    tu_list_t link;
    unsigned (*function)(struct tu_hook *hook);
} tu_hook_t;

/* Called as long as the worker lives. */
typedef struct tu_extension {
    tu_list_t link;
    void (*endpoint_closing)(tu_endpoint_t *endpoint); /* UCX has the endpoint still; nothing more is posted to it */
    void (*worker_destroyed)(tu_worker_t *worker);     /* UCX's worker is gone, and with it all that UCX had of it */
} tu_extension_t;

/* Work that goes on with the worker's progress, without Python. A sequence is a series of operations of which each is
 * posted when C code has seen the one before complete, and so is a wait that polling may shorten. A copy needs nothing
 * but time. */
typedef struct tu_background {
    unsigned sequences;        /* that have begun and not ended */
    unsigned ready;            /* of these, the ones that can go on at once */
    uint64_t steps;            /* operations that they have posted */
    uint64_t slice_end;        /* when they must have done enough for this call of Python's; 0: begins with the first */
    unsigned copies;           /* each progress does a piece of one */
} tu_background_t;

typedef struct tu_operation {
    tu_worker_t *worker;
    uint64_t id;               /* generation << 32 | slot; 0 while the slot is free */
    void *request;             /* UCX's handle; NULL when it completed inside the call that posted it */
    void *described;           /* the list or strided array that UCX reads until the operation completes */
    void (*cancel)(void *owner); /* cancels it, if whoever carries it out is not UCX; else NULL */
    void *owner;
    uint32_t slot;
    uint32_t generation;
    struct tu_operation *next_free;
} tu_operation_t;

/* A raw tag message that was taken off UCX's queue, and is kept until the program asks for it. */
typedef struct tu_kept {
    ucp_tag_message_h message;
    uint64_t tag;
    size_t length;
} tu_kept_t;

/* How long a task that waits polls before it parks: adaptive_poll.c. Times are in nanoseconds. */
typedef struct tu_poll {
    uint64_t bound;            /* the user's: never longer; 0: never */
    uint64_t limit;            /* what has been paying lately */
    uint64_t began;            /* when the wait began whose end is to be learnt from; 0: none */
    unsigned misses;           /* polls that found nothing, and were not made up for */
    unsigned skip;             /* waits that do not poll before the next try */
    bool goes_on;              /* a sequence did, in the last one */
    uint64_t last;             /* when it began, or a sequence posted something in it */
    uint64_t steps;            /* of sequences, when the wait began */
    unsigned penalty;          /* log2 of how many that will be after the next failure */
} tu_poll_t;

/* An endpoint's puts and gets that do not use UCX's own, in the order of posting: rma/transfer.c. */
typedef struct tu_transfers {
    tu_list_t list;
    tu_transfer_t *waiting;    /* the first that has not begun */
    unsigned begun;            /* requests that the owner has not answered */
    bool fence;                /* the next transfer waits for all before it */
    bool advancing;
    ucs_status_t put_status;   /* of a put that had returned before the owner refused it */
    uint64_t nonce;            /* in our requests; 0: none yet */
} tu_transfers_t;

struct tu_worker {
    ucp_worker_h worker;
    const tu_context_t *context;
    int efd;
    bool knows_user_data;      /* UCX 1.18 can be asked for an endpoint's */
    bool loses_info;           /* UCX 1.13 does not say what was received when a receive completes at once */
    uint64_t memory_types;     /* bits by ucs_memory_type_t: what its transports reach */
    uint64_t claimed_bit;      /* tags with this bit are Connections'; 0: none, leave all messages to UCX */

    bool raw_used;             /* the program has asked for raw messages: then UCX keeps them, however many */
    tu_kept_t kept[TU_RAW_KEPT];
    size_t kept_count;
    size_t kept_bytes;

    size_t collected;          /* bytes of the messages in the ring, which UCX still has */
    size_t small;              /* claimed messages of up to so many bytes are received as they come, to the arena */
    char *scratch;             /* TU_LONGEST_BATCH bytes */
    size_t arena_used;         /* begins anew when the ring is empty */
    char arena[TU_ARENA];

    tu_record_t *ring;
    size_t capacity;           /* a power of two */
    size_t first;
    size_t used;
    size_t reserved;

    tu_operation_t **blocks;   /* slots, in blocks that never move: UCX holds pointers to them */
    size_t block_count;
    tu_operation_t *free_slots;
    ucp_datatype_t strided;    /* 0 until it is needed */

    bool streams;              /* whether endpoints may have stream data */
    bool unread;               /* some still have, because there was no room for a record */
    ucp_ep_h spare;            /* to give stream data back when there is no endpoint: stream.c */

    tu_poll_t poll;
    tu_background_t background;
    tu_list_t hooks;
    tu_list_t extensions;
    tu_rma_t *rma;
    tu_chains_t *chains;
    bool unfenced;             /* UCX has had puts, gets or atomics since the last fence */

    tu_list_t endpoints;
    tu_list_t closed;          /* endpoints that UCX may still name: endpoint.c */
    tu_counts_t counts;
};

struct tu_endpoint {
    tu_worker_t *worker;
    ucp_ep_h ep;               /* NULL once closing began */
    uint64_t id;
    bool error_handling;
    bool unread;               /* it has stream data for which there was no room */
    bool failed;               /* its record is in the ring, no longer reserved */
    unsigned atomics;          /* under way, of those whose number is limited */
    tu_transfers_t transfers;
    tu_list_t link;            /* in the worker's endpoints, or closed ones */
};

struct tu_listener {
    tu_worker_t *worker;
    ucp_listener_h listener;
    uint64_t id;
};

/* ---- the ring of records (ring.c) ----
 *
 * Reserve takes room for one record, which a callback may append later, with slack to spare. Unreserve gives it back,
 * right before the append or because there will be none. What appends without a reservation asks first: has_slack
 * allocates nothing; find_room lets the ring grow to keep the slack, and uses the slack if there is no memory; make_room
 * lets it grow for `count` records at once. While find_room fails the ring is not empty, so Python's next call takes
 * records, and there is room again.
 *
 * An append that did none of that is a fault of ours. Development builds (TRIO_UCX_WERROR=1) abort. Others let the ring
 * grow, and abort when there is no memory: a record that is lost or overwritten would leave a task waiting for ever, or
 * free a buffer that UCX still uses. */
bool tu_ring_create(tu_worker_t *worker);
bool tu_ring_reserve(tu_worker_t *worker);
void tu_ring_unreserve(tu_worker_t *worker);
bool tu_ring_has_slack(const tu_worker_t *worker);
bool tu_ring_find_room(tu_worker_t *worker);
bool tu_ring_make_room(tu_worker_t *worker, size_t count);
void tu_ring_append(tu_worker_t *worker, uint64_t kind, uint64_t id, ucs_status_t status, uint64_t length,
                    uint64_t tag, uint64_t pointer);
tu_record_t *tu_ring_last(tu_worker_t *worker); /* the newest one; NULL when the ring is empty */
size_t tu_ring_take(tu_worker_t *worker, tu_record_t *out, size_t max);

/* The Connections' messages (tag_inbox.c). */
void tu_inbox_collect(tu_worker_t *worker);
/* Whether messages may have been left with UCX because there was no memory to receive them. */
bool tu_inbox_lacks_memory(const tu_worker_t *worker);
/* Polling (adaptive_poll.c): something arrived, not by polling. */
void tu_poll_ended(tu_worker_t *worker);
/* A turn is about to arm. Whether not to, because sequences go on. */
bool tu_poll_sequences(tu_worker_t *worker, uint64_t steps);

/* Hooks (worker.c). Adding one that is added already does nothing. */
void tu_hook_init(tu_hook_t *hook, unsigned (*function)(tu_hook_t *hook));
void tu_hook_add(tu_worker_t *worker, tu_hook_t *hook);
void tu_hook_remove(tu_hook_t *hook);

/* Operations (operation.c). A post is an operation on its way to UCX: begin takes a slot, reserves its record and fills
 * in `param` for a send of `buffers` (NULL: none), end turns UCX's answer into a verdict. Begin answers 0, or the verdict
 * of what could not begin. Done is what a completion callback calls. */
typedef struct tu_post {
    tu_operation_t *operation;
    uint64_t id;
    ucp_request_param_t param;
    void *address;             /* what UCX's calls name "buffer" */
    size_t count;
} tu_post_t;

int64_t tu_post_begin(tu_post_t *post, tu_worker_t *worker, const tu_buffers_t *buffers);
int64_t tu_post_end(tu_post_t *post, ucs_status_ptr_t answer);
tu_operation_t *tu_operation_find(tu_worker_t *worker, uint64_t id); /* NULL when it is over */
void tu_operation_done(tu_operation_t *operation, void *request, ucs_status_t status, uint64_t length, uint64_t tag);
void tu_operation_sent(void *request, ucs_status_t status, void *user_data);
void tu_operation_received(void *request, ucs_status_t status, size_t length, void *user_data);
void tu_operations_free(tu_worker_t *worker);

/* Active messages (active_messages.c): a handler for an id, and which of our endpoints a message came from (0: none, or unknown). */
ucs_status_t tu_am_handle(tu_worker_t *worker, unsigned am_id, ucp_am_recv_callback_t callback, void *arg);
uint64_t tu_am_sender(tu_worker_t *worker, const ucp_am_recv_param_t *param);

/* Streams (stream.c). */
void tu_stream_collect(tu_worker_t *worker);
/* Strided arrays (strided.c): to be posted as one element of the datatype, at the address of its description. */
ucs_status_t tu_strided_datatype(ucp_datatype_t *out);
tu_strided_t *tu_strided_copy(const tu_strided_t *strided);

/* Socket addresses (sockaddr.c). */
bool tu_sockaddr_make(struct sockaddr_storage *out, socklen_t *length, int family, const char *ip, unsigned port,
                     unsigned scope);
int tu_sockaddr_text(const struct sockaddr_storage *address, char *host, size_t size, unsigned *port);

#endif
