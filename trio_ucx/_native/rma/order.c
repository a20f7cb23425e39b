/* The order of an endpoint's transfers: its list, fences, and the end of a transfer.
 *
 * An endpoint's transfers are in a list until they have happened at the owner. They begin in the order of the list, up
 * to TU_REMOTE_WINDOW at once; a transfer behind a fence begins when all before it have happened. A flush is an entry
 * in the list. It has happened when it becomes the first one, and UCX has flushed what UCX itself had to do. */
#include <string.h>

#include "rma/transfer.h"

tu_transfer_t *tu_order_first(const tu_transfers_t *transfers)
{
    return TU_LIST_FIRST(&transfers->list, tu_transfer_t, link);
}

tu_transfer_t *tu_order_allocate(tu_worker_t *worker, tu_transfer_kind_t kind, tu_transfer_done_t done, void *owner)
{
    tu_transfer_t *transfer = tu_calloc(1, sizeof(*transfer));

    if (transfer == NULL) {
        return NULL;
    }
    transfer->worker = worker;
    transfer->kind   = kind;
    transfer->done   = done;
    transfer->owner  = owner;
    tu_list_init(&transfer->link);
    tu_list_init(&transfer->awaiting_link);
    tu_list_init(&transfer->copy_link);
    tu_list_init(&transfer->parts);
    tu_list_init(&transfer->part_link);
    transfer->failed_at = UINT64_MAX;
    tu_list_prepend(&tu_rma_of(worker)->transfers, &transfer->all_link);
    return transfer;
}

/* NULL: there is no memory for it. */
static tu_transfers_t *make_transfers(tu_endpoint_t *endpoint)
{
    tu_transfers_t *transfers = tu_transfers_of(endpoint);

    if (transfers == NULL) {
        transfers = tu_calloc(1, sizeof(*transfers));
        if (transfers != NULL) {
            tu_list_init(&transfers->list);
            tu_list_init(&transfers->refused);
            endpoint->extensions[TU_INDEX_rma] = transfers;
        }
    }
    return transfers;
}

/* Adds a transfer to its endpoint's list. */
tu_transfer_t *tu_order_enter(tu_endpoint_t *endpoint, tu_transfer_kind_t kind, tu_transfer_done_t done, void *owner)
{
    tu_transfers_t *transfers = make_transfers(endpoint);
    tu_transfer_t *transfer   = transfers == NULL ? NULL : tu_order_allocate(endpoint->worker, kind, done, owner);

    if (transfer == NULL) {
        return NULL;
    }
    transfer->endpoint = endpoint;
    if (kind != TU_TRANSFER_FLUSH) { /* a flush waits for all before it in any case */
        transfer->fenced = transfers->fence && !tu_list_is_empty(&transfers->list);
        transfers->fence = false;
    }
    tu_list_append(&transfers->list, &transfer->link);
    if (transfers->waiting == NULL) {
        transfers->waiting = transfer;
    }
    return transfer;
}

/* A transfer with a fence before it leaves the list without having begun. What follows must still wait for what was
 * before the fence. */
static void pass_on_fence(tu_transfers_t *transfers, tu_transfer_t *transfer)
{
    do {
        transfer = TU_LIST_NEXT(&transfers->list, transfer, link);
    } while (transfer != NULL && transfer->kind == TU_TRANSFER_FLUSH);
    if (transfer != NULL) {
        transfer->fenced = true;
    } else {
        transfers->fence = true;
    }
}

/* Takes a transfer out of the list of its endpoint. */
void tu_order_leave(tu_transfer_t *transfer)
{
    tu_endpoint_t *endpoint = transfer->endpoint;
    tu_transfers_t *transfers;

    if (endpoint == NULL) {
        return;
    }
    transfers = tu_transfers_of(endpoint);
    if (transfer->fenced && transfer->state == TU_TRANSFER_WAITING) {
        pass_on_fence(transfers, transfer);
    }
    if (transfers->waiting == transfer) {
        transfers->waiting = TU_LIST_NEXT(&transfers->list, transfer, link);
    }
    if (transfer->state == TU_TRANSFER_SENT) {
        transfers->begun--;
    }
    tu_list_remove(&transfer->link);
    transfer->endpoint = NULL;
}

/* Stores the old value of an atomic's integer. NULL: nobody wants it. */
void tu_transfer_store_integer(char *to, uint64_t value, uint64_t length)
{
    uint32_t four = (uint32_t)value;

    if (to != NULL) {
        memcpy(to, length == 4 ? (const void *)&four : (const void *)&value, length);
    }
}

void tu_order_dispose(tu_transfer_t *transfer)
{
    tu_list_remove(&transfer->all_link);
    free(transfer->many);
    free(transfer->wire_ranges);
    free(transfer->iov);
    free(transfer);
}

/* Keeps a refused transfer until a flush reports it. Beyond TU_MOST_REFUSALS the oldest is dropped: its scope may have
 * ended. */
static void keep_refused(tu_transfers_t *transfers, tu_transfer_t *transfer)
{
    tu_transfer_t *oldest;

    tu_list_append(&transfers->refused, &transfer->link);
    if (++transfers->refusals > TU_MOST_REFUSALS) {
        oldest = TU_LIST_FIRST(&transfers->refused, tu_transfer_t, link);
        tu_list_remove(&oldest->link);
        transfers->refusals--;
        tu_order_dispose(oldest);
    }
}

/* The refused transfer of a scope; NULL: there is none. */
tu_transfer_t *tu_order_refused(tu_transfers_t *transfers, uint64_t scope)
{
    tu_transfer_t *transfer;

    TU_LIST_FOR_EACH(transfer, &transfers->refused, link) {
        if (transfer->scope == scope) {
            return transfer;
        }
    }
    return NULL;
}

/* ---- the end of a transfer ---- */

void tu_transfer_tell(tu_transfer_t *transfer, ucs_status_t status)
{
    tu_transfer_done_t done = transfer->done;

    if (status == UCS_OK && transfer->progress != NULL) {
        *transfer->progress = transfer->length;
    }
    transfer->done = NULL;
    if (transfer->verdict != NULL) {
        *transfer->verdict = status;
    } else if (done != NULL) {
        done(transfer->owner, status);
    }
    transfer->verdict = NULL;
}

void tu_transfer_conclude(tu_transfer_t *transfer, ucs_status_t status)
{
    tu_endpoint_t *endpoint = transfer->endpoint;
    bool refused            = false;

    if (transfer->state != TU_TRANSFER_OVER) {
        if (transfer->state == TU_TRANSFER_SENT || transfer->state == TU_TRANSFER_COPYING) {
            transfer->method->end(transfer);
        }
        refused = status != UCS_OK && transfer->done == NULL && endpoint != NULL &&
                  (transfer->kind == TU_TRANSFER_PUT || transfer->kind == TU_TRANSFER_ATOMIC);
        tu_order_leave(transfer);
        transfer->state  = TU_TRANSFER_OVER;
        transfer->status = status;
    }
    if (refused && tu_order_refused(tu_transfers_of(endpoint), transfer->scope) == NULL) {
        keep_refused(tu_transfers_of(endpoint), transfer);
    } else if (!transfer->sending && !transfer->receiving && tu_list_is_empty(&transfer->parts)) {
        if (transfer->done != NULL) {
            tu_transfer_tell(transfer, transfer->status);
        }
        tu_order_dispose(transfer);
    }
    if (endpoint != NULL) {
        tu_order_advance(endpoint);
    }
}

/* Begins the transfers that may begin. A completion during this call begins no transfer; the loop does. */
void tu_order_advance(tu_endpoint_t *endpoint)
{
    tu_transfers_t *transfers = tu_transfers_of(endpoint);
    tu_transfer_t *first, *transfer;

    if (transfers->advancing || endpoint->ep == NULL) {
        return;
    }
    transfers->advancing = true;
    for (;;) {
        first = tu_order_first(transfers);
        if (first != NULL && first->kind == TU_TRANSFER_FLUSH) {
            tu_transfer_conclude(first, UCS_OK);
            continue;
        }
        transfer = transfers->waiting;
        if (transfer == NULL || (transfer->fenced && transfer != first) ||
            (transfers->begun >= TU_REMOTE_WINDOW && transfer->method != NULL && transfer->method->sends)) {
            break;
        }
        transfers->waiting = TU_LIST_NEXT(&transfers->list, transfer, link);
        if (transfer->kind == TU_TRANSFER_FLUSH || transfer->state != TU_TRANSFER_WAITING) {
            continue;
        }
        transfer->fenced = false;
        transfer->method->begin(transfer);
    }
    transfers->advancing = false;
}
