/* Atomics, and puts and gets without UCX's own, in the order of their posting: by load, store and the processor's
 * atomics if this process has mapped the memory (mapped.c), else by messages to its owner (requester.c).
 *
 * An endpoint's transfers are in a list until they have happened at the owner. They begin in the order of the list, up
 * to TU_REMOTE_WINDOW at once; a transfer behind a fence begins when all before it have happened. A flush is an entry
 * in the list. It has happened when it becomes the first one, and UCX has flushed what UCX itself had to do.
 *
 * A transfer by messages that is longer than the way's `part` is a WHOLE: it is not in the list itself, but its parts
 * are, as transfers like others.
 */
#include <string.h>

#include "rma/transfer.h"

static void advance(tu_endpoint_t *endpoint);

/* ---- the list ---- */

static tu_transfer_t *first_of(const tu_transfers_t *transfers)
{
    return TU_LIST_FIRST(&transfers->list, tu_transfer_t, link);
}

static tu_transfer_t *allocate(tu_worker_t *worker, tu_transfer_kind_t kind, tu_transfer_done_t done, void *owner)
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
    tu_list_prepend(&worker->rma->transfers, &transfer->all_link);
    return transfer;
}

/* Adds a transfer to its endpoint's list. */
static tu_transfer_t *enter(tu_endpoint_t *endpoint, tu_transfer_kind_t kind, tu_transfer_done_t done, void *owner)
{
    tu_transfers_t *transfers = &endpoint->transfers;
    tu_transfer_t *transfer   = allocate(endpoint->worker, kind, done, owner);

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
static void leave(tu_transfer_t *transfer)
{
    tu_endpoint_t *endpoint = transfer->endpoint;
    tu_transfers_t *transfers;

    if (endpoint == NULL) {
        return;
    }
    transfers = &endpoint->transfers;
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

static void dispose(tu_transfer_t *transfer)
{
    tu_list_remove(&transfer->all_link);
    free(transfer);
}

/* ---- the end of a transfer ---- */

void tu_transfer_tell(tu_transfer_t *transfer, ucs_status_t status)
{
    tu_transfer_done_t done = transfer->done;

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

    if (transfer->state != TU_TRANSFER_OVER) {
        if (transfer->state == TU_TRANSFER_SENT) {
            tu_requester_forget(transfer);
        } else if (transfer->state == TU_TRANSFER_COPYING) {
            tu_mapped_end(transfer);
        }
        if (status != UCS_OK && transfer->done == NULL && endpoint != NULL &&
            (transfer->kind == TU_TRANSFER_PUT || transfer->kind == TU_TRANSFER_ATOMIC)) {
            endpoint->transfers.refused = status; /* the next flush of the memory reports it */
        }
        leave(transfer);
        transfer->state  = TU_TRANSFER_OVER;
        transfer->status = status;
    }
    if (!transfer->sending && !transfer->receiving) {
        if (transfer->done != NULL) {
            tu_transfer_tell(transfer, transfer->status);
        }
        dispose(transfer);
    }
    if (endpoint != NULL) {
        advance(endpoint);
    }
}

/* ---- beginning ---- */

/* Begins the transfers that may begin. Completions inside this call do not begin further ones by themselves. */
static void advance(tu_endpoint_t *endpoint)
{
    tu_transfers_t *transfers = &endpoint->transfers;
    tu_transfer_t *first, *transfer;

    if (transfers->advancing || endpoint->ep == NULL) {
        return;
    }
    transfers->advancing = true;
    for (;;) {
        first = first_of(transfers);
        if (first != NULL && first->kind == TU_TRANSFER_FLUSH) {
            tu_transfer_conclude(first, UCS_OK);
            continue;
        }
        transfer = transfers->waiting;
        if (transfer == NULL || transfers->begun >= TU_REMOTE_WINDOW || (transfer->fenced && transfer != first)) {
            break;
        }
        transfers->waiting = TU_LIST_NEXT(&transfers->list, transfer, link);
        if (transfer->kind == TU_TRANSFER_FLUSH) {
            continue;
        }
        if (transfer->local != NULL) {
            tu_mapped_begin(transfer);
        } else {
            tu_requester_send(transfer);
        }
    }
    transfers->advancing = false;
}

/* Adds a transfer to the endpoint's list; by messages if `local` is NULL. */
static ucs_status_t add(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, char *local, tu_transfer_t **out)
{
    tu_transfer_t *transfer = enter(endpoint, params->kind, params->done, params->owner);

    if (transfer == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    transfer->late   = params->late;
    transfer->buffer = params->buffer;
    transfer->length = params->length;
    transfer->memory = params->memory;
    transfer->atomic = params->atomic;
    transfer->local  = local;
    if (local == NULL) {
        tu_requester_prepare(transfer, params->way, params->offset);
    }
    *out = transfer;
    return UCS_OK;
}

/* A part is over, or the caller that held the WHOLE no longer does. */
static void part_done(void *owner, ucs_status_t status)
{
    tu_transfer_t *whole = owner;

    if (whole->status == UCS_OK) {
        whole->status = status;
    }
    if (--whole->parts == 0) {
        tu_transfer_tell(whole, whole->status);
        dispose(whole);
    }
}

/* Adds a long transfer by messages, as parts. If there is no memory for one of them, those before it are cancelled. */
static ucs_status_t add_parts(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, tu_transfer_t **out)
{
    tu_transfer_t *whole      = allocate(endpoint->worker, TU_TRANSFER_WHOLE, params->done, params->owner);
    tu_transfer_params_t part = *params;
    ucs_status_t status       = UCS_OK;
    tu_transfer_t *transfer;
    uint64_t done;

    if (whole == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    part.done  = part_done;
    part.owner = whole;
    for (done = 0; done < params->length && status == UCS_OK; done += part.length) {
        part.length = params->length - done < params->way->part ? params->length - done : params->way->part;
        part.buffer = params->buffer + done;
        part.offset = params->offset + done;
        status      = add(endpoint, &part, NULL, &transfer);
        whole->parts += status == UCS_OK;
    }
    if (status != UCS_OK) {
        whole->parts++; /* so that it does not end in this call */
        tu_transfer_cancel(whole);
        dispose(whole);
        return status;
    }
    *out = whole;
    return UCS_OK;
}

ucs_status_t tu_transfer_begin(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, tu_transfer_t **out)
{
    tu_transfers_t *transfers = &endpoint->transfers;
    const tu_way_t *way       = params->way;
    bool on_host              = params->memory <= TU_MEMORY_HOST;
    char *local               = way->local != NULL && on_host ? way->local + params->offset : NULL;
    ucs_status_t verdict      = UCS_INPROGRESS;
    tu_transfer_t *transfer;
    ucs_status_t status;

    *out = NULL;
    if (local == NULL && !way->messages) {
        return UCS_ERR_UNSUPPORTED;
    }
    if (local != NULL && params->length <= TU_MAPPED_PIECE && transfers->waiting == NULL &&
        !(transfers->fence && !tu_list_is_empty(&transfers->list))) {
        if (params->kind == TU_TRANSFER_ATOMIC) {
            tu_transfer_store_integer(params->buffer, tu_mapped_atomic(&params->atomic, local, params->length),
                                      params->length);
        } else {
            tu_mapped_copy(params->kind == TU_TRANSFER_PUT, params->buffer, local, params->length);
        }
        return UCS_OK;
    }
    if (local == NULL && way->part > 0 && params->length > way->part && on_host) {
        status = add_parts(endpoint, params, &transfer);
    } else {
        status = add(endpoint, params, local, &transfer);
    }
    if (status != UCS_OK) {
        return status;
    }
    transfer->verdict = &verdict;
    advance(endpoint);
    if (verdict == UCS_INPROGRESS) {
        transfer->verdict = NULL;
        *out              = transfer;
    }
    return verdict;
}

/* ---- Python's transfers, flushes and fences ---- */

static void operation_done(void *owner, ucs_status_t status)
{
    tu_operation_done(owner, NULL, status, 0, 0);
}

static void cancel_operation(void *owner)
{
    tu_transfer_cancel(owner);
}

static int64_t pending(tu_post_t *post, tu_transfer_t *transfer)
{
    post->operation->cancel = cancel_operation;
    post->operation->owner  = transfer;
    return (int64_t)post->id;
}

/* Begins a transfer as an operation. Returns a verdict. */
static int64_t post_transfer(tu_endpoint_t *endpoint, tu_transfer_params_t *params)
{
    tu_transfer_t *transfer;
    ucs_status_t status;
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    params->done  = operation_done;
    params->owner = post.operation;
    status        = tu_transfer_begin(endpoint, params, &transfer);
    return status == UCS_INPROGRESS ? pending(&post, transfer) : tu_post_end(&post, UCS_STATUS_PTR(status));
}

/* Gets or puts one buffer. Returns a verdict. Python has checked that the range is in the memory. */
int64_t tu_transfer(tu_endpoint_t *endpoint, const tu_way_t *way, bool put, const tu_buffers_t *buffers,
                    uint64_t offset)
{
    tu_worker_t *worker = endpoint->worker;
    tu_transfer_params_t params;

    if (buffers->count != 1 || buffers->strided != NULL || offset > way->length ||
        buffers->lengths[0] > way->length - offset) {
        return UCS_ERR_INVALID_PARAM;
    }
    if (buffers->memory > TU_MEMORY_HOST && !(worker->memory_types >> (buffers->memory - 1) & 1)) {
        return UCS_ERR_UNSUPPORTED;
    }
    params = (tu_transfer_params_t){
        .way    = way,
        .kind   = put ? TU_TRANSFER_PUT : TU_TRANSFER_GET,
        .buffer = buffers->addresses[0],
        .length = buffers->lengths[0],
        .memory = buffers->memory,
        .offset = offset,
    };
    return post_transfer(endpoint, &params);
}

/* Does an atomic to an integer of `length` bytes (4 or 8), whose address is a multiple of that. `old`: where its old
 * value goes, `length` bytes that must stay until the operation is over; NULL: the operation is over when the request
 * has left. Returns a verdict. */
int64_t tu_transfer_atomic(tu_endpoint_t *endpoint, const tu_way_t *way, int operation, uint64_t length,
                           uint64_t operand, uint64_t swapped, void *old, uint64_t offset)
{
    tu_transfer_params_t params;

    if ((length != 4 && length != 8) || offset > way->length || length > way->length - offset ||
        operation < TU_ATOMIC_ADD || operation > TU_ATOMIC_XOR ||
        (way->local != NULL && (uintptr_t)(way->local + offset) % length != 0)) {
        return UCS_ERR_INVALID_PARAM;
    }
    params = (tu_transfer_params_t){
        .way    = way,
        .kind   = TU_TRANSFER_ATOMIC,
        .late   = old != NULL,
        .buffer = old,
        .length = length,
        .atomic = {.operation = operation, .operand = operand, .swapped = swapped},
        .memory = TU_MEMORY_HOST,
        .offset = offset,
    };
    return post_transfer(endpoint, &params);
}

static void flushed(void *request, ucs_status_t status, void *user_data)
{
    tu_transfer_t *transfer = user_data;

    ucp_request_free(request);
    transfer->sending = false;
    if (transfer->state == TU_TRANSFER_OVER || status != UCS_OK) {
        tu_transfer_conclude(transfer, transfer->state == TU_TRANSFER_OVER ? transfer->status : status);
    }
}

/* Flushes UCX's endpoint. Does not wait for answers to trio_ucx's own requests: tu_endpoint_flush does. */
int64_t tu_endpoint_flush_ucx(tu_endpoint_t *endpoint)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    return verdict != 0 ? verdict : tu_post_end(&post, ucp_ep_flush_nbx(endpoint->ep, &post.param));
}

/* Waits for the transfers that were posted before this, and flushes UCX's endpoint. */
int64_t tu_endpoint_flush(tu_endpoint_t *endpoint)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send      = flushed,
    };
    ucs_status_ptr_t answer;
    tu_transfer_t *transfer;
    tu_post_t post;
    int64_t verdict;

    if (tu_list_is_empty(&endpoint->transfers.list)) {
        return tu_endpoint_flush_ucx(endpoint);
    }
    verdict = tu_post_begin(&post, endpoint->worker, NULL);
    if (verdict != 0) {
        return verdict;
    }
    transfer = enter(endpoint, TU_TRANSFER_FLUSH, operation_done, post.operation);
    if (transfer == NULL) {
        return tu_post_end(&post, UCS_STATUS_PTR(UCS_ERR_NO_MEMORY));
    }
    param.user_data = transfer;
    answer          = ucp_ep_flush_nbx(endpoint->ep, &param); /* at the same time as the answers come */
    if (UCS_PTR_IS_ERR(answer)) {
        leave(transfer);
        dispose(transfer);
        return tu_post_end(&post, answer);
    }
    transfer->sending = answer != NULL;
    verdict           = pending(&post, transfer);
    advance(endpoint);
    return verdict;
}

/* Why the owner refused a put or an atomic after it had returned; reported once. */
int tu_transfers_status(tu_endpoint_t *endpoint)
{
    ucs_status_t status = endpoint->transfers.refused;

    endpoint->transfers.refused = UCS_OK;
    return status;
}

/* UCX's fence is called only if UCX's own puts and gets have been used: inside the call it may wait until everything is
 * flushed (ucp_worker_fence_strong). */
int tu_worker_fence(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    TU_LIST_FOR_EACH(endpoint, &worker->endpoints, link) {
        endpoint->transfers.fence = !tu_list_is_empty(&endpoint->transfers.list);
    }
    if (!worker->unfenced) {
        return UCS_OK;
    }
    worker->unfenced = false;
    return ucp_worker_fence(worker->worker);
}

/* ---- cancelling, and the end ---- */

/* Cancels the parts that need nothing from the peer now. */
static void cancel_parts(tu_transfer_t *whole)
{
    tu_endpoint_t *endpoint = NULL;
    tu_transfer_t *transfer, *after;

    whole->parts++; /* so that it does not end inside the loop */
    TU_LIST_FOR_EACH_SAFE(transfer, after, &whole->worker->rma->transfers, all_link) {
        if (transfer->owner != whole || transfer->done != part_done) {
            continue;
        }
        if (transfer->endpoint != NULL && endpoint == NULL) {
            endpoint                      = transfer->endpoint;
            endpoint->transfers.advancing = true; /* otherwise this could end `after` */
        }
        tu_transfer_cancel(transfer);
    }
    if (endpoint != NULL) {
        endpoint->transfers.advancing = false;
        advance(endpoint);
    }
    part_done(whole, UCS_OK);
}

/* Cancels a transfer, unless the peer has the request: then its answer ends it. */
void tu_transfer_cancel(tu_transfer_t *transfer)
{
    if (transfer->kind == TU_TRANSFER_WHOLE) {
        cancel_parts(transfer);
    } else if (transfer->kind != TU_TRANSFER_FLUSH &&
               (transfer->state == TU_TRANSFER_WAITING || transfer->state == TU_TRANSFER_COPYING)) {
        tu_transfer_conclude(transfer, UCS_ERR_CANCELED);
    }
}

/* No answer will come. UCX completes its parts of the transfers. */
static void endpoint_closing(tu_endpoint_t *endpoint)
{
    tu_transfers_t *transfers = &endpoint->transfers;

    transfers->advancing = true;
    while (!tu_list_is_empty(&transfers->list)) {
        tu_transfer_conclude(first_of(transfers), UCS_ERR_CANCELED);
    }
    transfers->advancing = false;
}

static void worker_destroyed(tu_worker_t *worker)
{
    tu_rma_t *rma = worker->rma;

    while (!tu_list_is_empty(&rma->transfers)) {
        dispose(TU_LIST_FIRST(&rma->transfers, tu_transfer_t, all_link));
    }
    tu_mapped_close(rma);
    tu_owner_close(rma);
    free(rma);
    worker->rma = NULL;
}

ucs_status_t tu_rma_open(tu_worker_t *worker)
{
    tu_rma_t *rma = tu_calloc(1, sizeof(*rma));
    size_t i;

    if (rma == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    worker->rma                     = rma;
    rma->worker                     = worker;
    rma->extension.endpoint_closing = endpoint_closing;
    rma->extension.worker_destroyed = worker_destroyed;
    tu_list_append(&worker->extensions, &rma->extension.link);
    tu_list_init(&rma->transfers);
    for (i = 0; i < TU_AWAITING_BUCKETS; i++) {
        tu_list_init(&rma->awaiting[i]);
    }
    tu_mapped_open(rma);
    return tu_owner_open(rma);
}
