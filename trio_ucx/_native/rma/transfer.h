/* What the files of remote memory share: the messages, a transfer, and the state of a worker. */
#ifndef TRIO_UCX_TRANSFER_H
#define TRIO_UCX_TRANSFER_H

#include "little_endian.h"
#include "rma/rma.h"

#define TU_AWAITING_BUCKETS 256 /* of the transfers that wait for an answer, by id */

#define TU_REMOTE_GET 1
#define TU_REMOTE_PUT 2
#define TU_REMOTE_ANSWER 3
#define TU_REMOTE_ATOMIC 4
#define TU_REMOTE_GET_LIST 5
#define TU_REMOTE_PUT_LIST 6
#define TU_REMOTE_NOTE 7

/* Ranges of one request, at most. */
#define TU_MOST_RANGES 512

/* A flag of a get: the answer shall be a rendezvous. */
#define TU_REMOTE_RENDEZVOUS 1

/* Maximum bytes of one range in one message. Messages in flight are carried out when the memory has been closed. */
#define TU_LONGEST_PART (1024 * 1024)

/* Requests of one endpoint in flight, at most. */
#define TU_REMOTE_WINDOW 64
#define TU_MOST_REFUSALS 256 /* that are kept for a flush to report */

/* The heads of the active messages, as they go over the wire. */
typedef struct tu_remote_request {
    uint8_t kind;
    uint8_t flags;             /* of an atomic: TU_ATOMIC_... */
    uint8_t reserved[6];
    tu_le64_t id;
    tu_le64_t offset;
    tu_le64_t length;
    char token[TU_TOKEN_SIZE];
} tu_remote_request_t;

typedef struct tu_remote_answer {
    uint8_t kind;
    uint8_t status;            /* minus the ucs_status_t */
    uint8_t reserved[6];
    tu_le64_t id;
} tu_remote_answer_t;

/* The data of an atomic's request. The data of its answer is the old value, as a tu_le64_t. */
typedef struct tu_remote_operands {
    tu_le64_t operand;
    tu_le64_t swapped;
} tu_remote_operands_t;

/* The data of a request with a list begins with one of these for each range. */
typedef struct tu_remote_range {
    tu_le64_t offset;
    tu_le64_t length;
} tu_remote_range_t;

_Static_assert(sizeof(tu_remote_operands_t) == 16, "wire.md");
_Static_assert(sizeof(tu_remote_range_t) == 16, "wire.md");
_Static_assert(sizeof(tu_remote_request_t) == 48, "wire.md");
_Static_assert(sizeof(tu_remote_answer_t) == 16, "wire.md");

typedef enum tu_transfer_state {
    TU_TRANSFER_WAITING,
    TU_TRANSFER_COPYING,
    TU_TRANSFER_SENT,
    TU_TRANSFER_OVER,          /* it has happened, or failed; UCX may still have the buffer */
} tu_transfer_state_t;

/* How a transfer is carried out. */
typedef struct tu_transfer_method {
    bool sends;                /* it needs room in the window */
    void (*begin)(tu_transfer_t *transfer);
    void (*end)(tu_transfer_t *transfer); /* of one that has begun, and not happened: forgets it */
} tu_transfer_method_t;

/* How far a transfer of several ranges has come. */
typedef struct tu_cursor {
    size_t range;
    uint64_t in_range;         /* bytes of that range */
    uint64_t total;            /* bytes of all ranges */
} tu_cursor_t;

struct tu_transfer {
    tu_worker_t *worker;
    tu_endpoint_t *endpoint;   /* NULL when it is in no endpoint's list */
    tu_list_t link;            /* in a list of its endpoint */
    tu_list_t all_link;        /* in the list of its worker */
    tu_list_t awaiting_link;   /* in the bucket of those that wait for an answer */
    tu_list_t copy_link;       /* in the list of copies that go on */
    tu_transfer_kind_t kind;
    tu_transfer_state_t state;
    bool fenced;               /* begins when all before it have happened */
    bool late;
    bool sending;              /* UCX is sending the request, or the put's data, or flushes */
    bool receiving;            /* UCX is filling the buffer */
    tu_transfer_done_t done;   /* NULL: it was called */
    void *owner;
    ucs_status_t *verdict;     /* of a transfer that completes before its begin returns */
    char *buffer;              /* of the first range */
    uint64_t offset;           /* of the first range */
    uint64_t length;           /* of all ranges */
    int memory;
    const tu_transfer_method_t *method; /* of a flush: NULL */
    tu_access_path_t path;
    tu_range_t one;            /* the range of a transfer that has only one */
    tu_range_t *many;          /* else: its ranges, which it owns */
    size_t range_count;
    tu_cursor_t cursor;        /* what was copied, or of which parts have begun */
    uint64_t *progress;        /* bytes, from the beginning, that are done; NULL: nobody asks */
    ucs_status_t status;
    uint64_t scope;
    tu_list_t parts;           /* those that are not over: parts.c */
    uint64_t failed_at;        /* the first byte of the first part that failed */
    bool held;                 /* a part of it is being posted: it does not end now */
    tu_transfer_t *whole;      /* of a part */
    tu_list_t part_link;       /* in the list of its whole */
    uint64_t position;         /* of its first byte, in its whole */
    tu_remote_range_t *wire_ranges; /* of a request with a list; UCX sends it from here */
    ucp_dt_iov_t *iov;         /* of a put with a list: the ranges, then the data; the same */
    tu_atomic_terms_t atomic;
    uint64_t id;               /* of its request */
    tu_remote_request_t request; /* UCX sends it from here */
    tu_remote_operands_t operands; /* an atomic's; the same */
};

/* An endpoint's transfers and flushes, in the order of their posting. */
typedef struct tu_transfers {
    tu_list_t list;
    tu_list_t refused;         /* transfers that had completed before their owner refused them; one of each scope */
    unsigned refusals;         /* how many those are */
    tu_transfer_t *waiting;    /* the first one that has not begun */
    unsigned begun;            /* requests that the owner has not answered */
    bool fence;                /* the next transfer waits for all before it */
    bool advancing;            /* transfers are being begun; what completes meanwhile begins no others */
} tu_transfers_t;

/* A worker's remote memory, both sides. */
typedef struct tu_rma {
    tu_worker_t *worker;
    tu_list_t transfers;       /* of all endpoints, and of those that were closed */
    tu_list_t awaiting[TU_AWAITING_BUCKETS];
    uint64_t last_id;          /* of a request */
    tu_list_t copies;          /* that go on with the worker's progress */
    tu_hook_t copy_hook;
    tu_list_t services;        /* requests of peers that are being answered: owner.c */
    tu_list_t notes;           /* notifications that Python has not taken: owner.c */
    tu_hook_t unused_hook;     /* withdrawn memory is no longer in use: a record is due */
    bool unfenced;             /* UCX has had puts or gets since the last fence */
} tu_rma_t;

static inline const tu_range_t *tu_ranges_of(const tu_transfer_t *transfer)
{
    return transfer->many != NULL ? transfer->many : &transfer->one;
}

/* Takes the next bytes of a range, at most `most`. Returns false at their end. */
static inline bool tu_cursor_next(tu_cursor_t *cursor, const tu_range_t *ranges, size_t count, uint64_t most,
                                  tu_range_t *piece)
{
    const tu_range_t *range = &ranges[cursor->range];

    if (cursor->range == count) {
        return false;
    }
    piece->buffer = range->buffer + cursor->in_range;
    piece->offset = range->offset + cursor->in_range;
    piece->length = range->length - cursor->in_range < most ? range->length - cursor->in_range : most;
    cursor->total += piece->length;
    cursor->in_range += piece->length;
    if (cursor->in_range == range->length) {
        cursor->range++;
        cursor->in_range = 0;
    }
    return true;
}

static inline tu_rma_t *tu_rma_of(tu_worker_t *worker)
{
    return worker->extensions[TU_INDEX_rma];
}

/* NULL: it has had no transfer. */
static inline tu_transfers_t *tu_transfers_of(tu_endpoint_t *endpoint)
{
    return endpoint->extensions[TU_INDEX_rma];
}

/* order.c. Enter adds a new transfer to its endpoint's list, leave takes it out, advance begins those that may begin.
 * Conclude: the owner has finished with a transfer; its `done` is called when UCX has finished with it, too. Tell calls
 * `done` now. Refused: the transfer of a scope that failed after its `done` was called; NULL: none. */
void tu_transfer_conclude(tu_transfer_t *transfer, ucs_status_t status);
void tu_transfer_tell(tu_transfer_t *transfer, ucs_status_t status);
void tu_transfer_store_integer(char *to, uint64_t value, uint64_t length);
tu_transfer_t *tu_order_first(const tu_transfers_t *transfers);
tu_transfer_t *tu_order_allocate(tu_worker_t *worker, tu_transfer_kind_t kind, tu_transfer_done_t done, void *owner);
tu_transfer_t *tu_order_enter(tu_endpoint_t *endpoint, tu_transfer_kind_t kind, tu_transfer_done_t done, void *owner);
tu_transfer_t *tu_order_refused(tu_transfers_t *transfers, uint64_t scope);
void tu_order_leave(tu_transfer_t *transfer);
void tu_order_advance(tu_endpoint_t *endpoint);
void tu_order_dispose(tu_transfer_t *transfer);

/* mapped.c */
bool tu_mapped_is_open(const tu_access_path_t *path);
void tu_mapped_prepare(const tu_access_path_t *path, uint64_t length);
void tu_mapped_copy(bool put, char *buffer, char *local, uint64_t length);
uint64_t tu_mapped_atomic(const tu_atomic_terms_t *atomic, char *at, uint64_t length);

/* direct.c */
bool tu_direct_takes(const tu_access_path_t *path, tu_transfer_kind_t kind, uint64_t shortest);
bool tu_direct_read(const tu_access_path_t *path, const tu_range_t *pieces, size_t count);

/* copies.c */
#define TU_COPIED_AT_ONCE (1024 * 1024) /* bytes */
void tu_copies_open(tu_rma_t *rma);
void tu_copies_close(tu_rma_t *rma);
ucs_status_t tu_copies_step(const tu_access_path_t *path, bool put, const tu_range_t *ranges, size_t count,
                            tu_cursor_t *cursor);
extern const tu_transfer_method_t tu_copies_method;

/* requester.c */
extern const tu_transfer_method_t tu_requester_method;
void tu_requester_prepare(tu_transfer_t *transfer);
void tu_requester_answered(tu_rma_t *rma, const tu_remote_answer_t *answer, void *data, size_t length,
                           bool rendezvous);

/* memory.c */
extern const tu_transfer_method_t tu_ucx_method;

/* gathered.c */
bool tu_gathered_prepare(tu_transfer_t *part);
void tu_gathered_scatter(const tu_range_t *ranges, size_t count, const char *data);
bool tu_gathered_check(const tu_remote_range_t *ranges, size_t count, uint64_t limit, uint64_t length);

/* parts.c */
extern const tu_transfer_method_t tu_parts_method;
void tu_parts_cancel(tu_transfer_t *whole);

/* ranges.c */
tu_range_t *tu_ranges_of_blocks(char *buffer, const int64_t *local, uint64_t offset, const int64_t *remote,
                                size_t count, uint64_t size, size_t *range_count);
tu_range_t *tu_ranges_of_buffers(const tu_buffers_t *buffers, const uint64_t *offsets);

/* owner.c */
ucs_status_t tu_owner_open(tu_rma_t *rma);
void tu_owner_close(tu_rma_t *rma);

#endif
