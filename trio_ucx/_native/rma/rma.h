/* Remote memory, as far as the rest of the C code needs it. UCX's own puts and gets of one buffer are in memory.c.
 *
 *   transfer.c    posts and cancels puts, gets and atomics; fences and flushes
 *   order.c       the order in which an endpoint's transfers begin, and their end
 *   mapped.c      memory that this process has mapped: load, store, and the processor's atomics
 *   direct.c      memory of a process of this machine, that this one may read (process_vm_readv)
 *   copies.c      copies, step by step: of mapped memory both ways, of another process's memory out of it only
 *   requester.c   memory that this process does not reach: messages to the owner, and its answers
 *   parts.c       long transfers and lists of blocks, by messages or UCX's own puts and gets: part by part
 *   gathered.c    requests for several ranges at once
 *   ranges.c      lists of blocks: checks their numbers, and joins neighbours
 *   owner.c       the owner's side: memory that peers may use, and answers to them
 *   memory.c      registered memory and remote keys; UCX's own puts and gets
 *
 * wire.md describes the messages.
 *
 * The table of served memory in owner.c is shared by threads, and has a lock. Ownership of memory:
 *
 *   memory                      allocated by            freed by                       UCX may use it
 *   --------------------------  ----------------------  -----------------------------  --------------------------------
 *   tu_rma_t                    tu_worker_create        tu_worker_destroy              as the argument of callbacks
 *   tu_transfers_t              the first transfer      closing the endpoint           no
 *   tu_transfer_t               tu_transfer_begin,      when the owner and UCX are     its request, and itself as the
 *                               parts.c, a flush        done with it; the rest by      argument of callbacks
 *                                                       tu_worker_destroy
 *   service_t (owner.c)         the callback that got   when the answer was sent; the  its answer, and itself as the
 *                               the request             rest by tu_worker_destroy      argument of callbacks
 *   tu_served_t (owner.c)       tu_memory_serve         tu_memory_withdraw, or, while  no; answers hold it by `uses`
 *                                                       answers use it, the
 *                                                       tu_memory_unused after them
 *   note_t (owner.c)            the callback that got   tu_note_take; the rest by      no
 *                               the notification        tu_worker_destroy
 *   ucp_mem_h, ucp_rkey_h       UCX                     tu_memory_unmap,               they are UCX's
 *                                                       tu_rkey_destroy
 */
#ifndef TRIO_UCX_RMA_H
#define TRIO_UCX_RMA_H

#include "native.h"
#include "rma/cdef.h"

typedef struct tu_transfer tu_transfer_t;

/* Called when a transfer has completed: its buffer belongs to the caller again. */
typedef void (*tu_transfer_done_t)(void *owner, ucs_status_t status);

typedef enum tu_transfer_kind {
    TU_TRANSFER_GET,
    TU_TRANSFER_PUT,
    TU_TRANSFER_ATOMIC,
    TU_TRANSFER_FLUSH,
    TU_TRANSFER_NOTE,          /* a notification for the memory's owner; completes when the owner has it */
} tu_transfer_kind_t;

/* Bytes that follow each other, here and in the remote memory. */
typedef struct tu_range {
    char *buffer;
    uint64_t offset;           /* in the remote memory */
    uint64_t length;
} tu_range_t;

/* What an atomic does to an integer. Of smaller integers the low bits count. */
typedef struct tu_atomic_terms {
    int operation;             /* TU_ATOMIC_... */
    uint64_t operand;          /* of a compare-and-swap: what it compares with */
    uint64_t swapped;          /* what a compare-and-swap stores */
} tu_atomic_terms_t;

/* A put, get or atomic that is to begin. A put completes when its buffer is free, an atomic when its request has left;
 * with `late`, when it has happened at the memory's owner. */
typedef struct tu_transfer_params {
    const tu_access_path_t *path;
    tu_transfer_kind_t kind;
    bool late;
    tu_range_t range;              /* of an atomic: where the old value goes (NULL unless it is late); 4 or 8 bytes */
    tu_range_t *ranges;            /* several instead: tu_transfer_begin takes them over, and frees them; else NULL */
    size_t range_count;
    uint64_t shortest;         /* of the blocks in the ranges, bytes */
    uint64_t *progress;        /* counts the bytes, from the beginning, that are done; NULL: nobody asks */
    tu_atomic_terms_t atomic;
    int memory;                /* the kind of memory of the buffers */
    uint64_t scope;            /* whose next flush reports what is refused after the transfer has completed */
    tu_transfer_done_t done;
    void *owner;               /* the argument of `done` */
} tu_transfer_params_t;

/* Notes that UCX has puts or gets of its own. */
void tu_rma_unfenced(tu_worker_t *worker);
/* Returns UCS_OK when the transfer completed at once, UCS_INPROGRESS when `done` will be called, an error otherwise. */
ucs_status_t tu_transfer_begin(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, tu_transfer_t **out);

#endif
