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

/* A flag of a get: the answer shall be a rendezvous. */
#define TU_REMOTE_RENDEZVOUS 1

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

_Static_assert(sizeof(tu_remote_operands_t) == 16, "docs/wire.md");
_Static_assert(sizeof(tu_remote_request_t) == 48, "docs/wire.md");
_Static_assert(sizeof(tu_remote_answer_t) == 16, "docs/wire.md");

typedef enum tu_transfer_state {
    TU_TRANSFER_WAITING,
    TU_TRANSFER_COPYING,
    TU_TRANSFER_SENT,
    TU_TRANSFER_OVER,          /* it has happened, or failed; UCX may still have the buffer */
} tu_transfer_state_t;

/* How a transfer is carried out. */
typedef struct tu_transfer_method {
    void (*begin)(tu_transfer_t *transfer);
    void (*end)(tu_transfer_t *transfer); /* of one that has begun, and not happened: forgets it */
} tu_transfer_method_t;

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
    char *buffer;
    uint64_t length;
    int memory;
    const tu_transfer_method_t *method; /* of a flush and a WHOLE: NULL */
    char *local;               /* the memory's address in this process; NULL: by messages */
    uint64_t copied;
    ucs_status_t status;
    uint64_t scope;
    uint64_t parts;            /* of a WHOLE: those that are not over */
    tu_atomic_terms_t atomic;
    uint64_t id;               /* of its request */
    tu_remote_request_t request; /* UCX sends it from here */
    tu_remote_operands_t operands; /* an atomic's; the same */
};

/* An endpoint's transfers (puts and gets without UCX's own, atomics) and flushes, in the order of their posting. */
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
    tu_hook_t unused_hook;     /* withdrawn memory is no longer in use: a record is due */
    bool unfenced;             /* UCX has had puts or gets since the last fence */
} tu_rma_t;

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
#define TU_MAPPED_PIECE (1024 * 1024)
void tu_mapped_open(tu_rma_t *rma);
void tu_mapped_close(tu_rma_t *rma);
void tu_mapped_copy(bool put, char *buffer, char *local, uint64_t length);
void tu_mapped_store(char *to, const void *data, uint64_t length);
uint64_t tu_mapped_atomic(const tu_atomic_terms_t *atomic, char *at, uint64_t length);
extern const tu_transfer_method_t tu_mapped_method;

/* requester.c */
extern const tu_transfer_method_t tu_requester_method;
void tu_requester_prepare(tu_transfer_t *transfer, const tu_access_path_t *path, uint64_t offset);
void tu_requester_answered(tu_rma_t *rma, const tu_remote_answer_t *answer, void *data, size_t length,
                           bool rendezvous);

/* owner.c */
ucs_status_t tu_owner_open(tu_rma_t *rma);
void tu_owner_close(tu_rma_t *rma);

#endif
