/* Remote memory between two trio_ucx peers, without UCX's emulation: rma/transfer.c is the side that reads and writes,
 * rma/owner.c the memory's owner. docs/wire.md describes the messages. */
#ifndef TRIO_UCX_RMA_H
#define TRIO_UCX_RMA_H

#include "native.h"

#define TU_REMOTE_GET 1
#define TU_REMOTE_PUT 2
#define TU_REMOTE_ANSWER 3

/* A flag of a get: the answer shall be a rendezvous. */
#define TU_REMOTE_RENDEZVOUS 1

/* Requests of one endpoint in flight, at most. An owner does not answer those beyond TU_REMOTE_LIMIT. */
#define TU_REMOTE_WINDOW 64
#define TU_REMOTE_LIMIT 256

/* The headers of the active messages. */
typedef struct tu_remote_request {
    uint8_t kind;
    uint8_t flags;
    uint8_t reserved[6];
    uint64_t id;
    uint64_t nonce;            /* of the endpoint; only its peer knows it */
    uint64_t offset;
    uint64_t length;
    char token[TU_TOKEN_SIZE];
} tu_remote_request_t;

typedef struct tu_remote_answer {
    uint8_t kind;
    uint8_t status;            /* minus the ucs_status_t */
    uint8_t reserved[6];
    uint64_t id;
    uint64_t nonce;
} tu_remote_answer_t;

/* Called when a transfer has completed: its buffer belongs to the caller again. */
typedef void (*tu_transfer_done_t)(void *owner, ucs_status_t status);

/* rma/transfer.c. Begin returns UCS_OK when the transfer completed at once, UCS_INPROGRESS when `done` will be called, an
 * error otherwise. A put completes when its buffer is free; with `late`, when it has happened at the owner. */
ucs_status_t tu_transfer_begin(tu_endpoint_t *endpoint, const tu_way_t *way, int put, void *buffer, uint64_t length,
                               int memory, uint64_t offset, int late, tu_transfer_done_t done, void *owner,
                               tu_transfer_t **out);
int tu_transfer_cancel(tu_transfer_t *transfer);
void tu_transfers_forget(tu_endpoint_t *endpoint);
void tu_transfers_free(tu_worker_t *worker);
void tu_transfers_fence(tu_worker_t *worker);
unsigned tu_transfers_copy(tu_worker_t *worker);
ucs_status_t tu_transfer_answered(tu_worker_t *worker, const tu_remote_answer_t *answer, void *data, size_t length,
                                  int rendezvous);
/* Waits for the transfers that were posted before this, then flushes UCX's endpoint. */
int64_t tu_transfers_flush(tu_endpoint_t *endpoint);

/* rma/owner.c */
ucs_status_t tu_remote_handle(tu_worker_t *worker);
void tu_services_free(tu_worker_t *worker);
void tu_remote_store(char *to, const void *data, uint64_t length);

#endif
