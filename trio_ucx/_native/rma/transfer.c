/* Posts atomics, and puts and gets without UCX's own. They are carried out in the order of their posting (order.c): by
 * load, store and the processor's atomics if this process has mapped the memory (mapped.c), else by messages to its
 * owner (requester.c).
 *
 * A transfer by messages that is longer than the access path's `part` is a WHOLE: it is not in the list itself, but its parts
 * are, as transfers like others.
 */
#include <string.h>

#include "rma/transfer.h"

static void cancel(tu_transfer_t *transfer);

/* Adds a transfer to the endpoint's list; by messages if `local` is NULL. */
static ucs_status_t add(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, char *local, tu_transfer_t **out)
{
    tu_transfer_t *transfer = tu_order_enter(endpoint, params->kind, params->done, params->owner);

    if (transfer == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    transfer->late   = params->late;
    transfer->buffer = params->buffer;
    transfer->length = params->length;
    transfer->memory = params->memory;
    transfer->atomic = params->atomic;
    transfer->local  = local;
    transfer->method = local != NULL ? &tu_mapped_method : &tu_requester_method;
    transfer->scope  = params->scope;
    if (local == NULL) {
        tu_requester_prepare(transfer, params->path, params->offset);
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
        tu_order_dispose(whole);
    }
}

/* Adds a long transfer by messages, as parts. If there is no memory for one of them, those before it are cancelled. */
static ucs_status_t add_parts(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, tu_transfer_t **out)
{
    tu_transfer_t *whole      = tu_order_allocate(endpoint->worker, TU_TRANSFER_WHOLE, params->done, params->owner);
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
        part.length = params->length - done < params->path->part ? params->length - done : params->path->part;
        part.buffer = params->buffer + done;
        part.offset = params->offset + done;
        status      = add(endpoint, &part, NULL, &transfer);
        whole->parts += status == UCS_OK;
    }
    if (status != UCS_OK) {
        whole->parts++; /* so that it does not end in this call */
        cancel(whole);
        tu_order_dispose(whole);
        return status;
    }
    *out = whole;
    return UCS_OK;
}

ucs_status_t tu_transfer_begin(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, tu_transfer_t **out)
{
    tu_transfers_t *transfers    = tu_transfers_of(endpoint);
    const tu_access_path_t *path = params->path;
    bool on_host                 = params->memory <= TU_MEMORY_HOST;
    char *local                  = path->local != NULL && on_host ? path->local + params->offset : NULL;
    ucs_status_t verdict         = UCS_INPROGRESS;
    tu_transfer_t *transfer;
    ucs_status_t status;

    *out = NULL;
    if (local == NULL && !path->messages) {
        return UCS_ERR_UNSUPPORTED;
    }
    if (local != NULL && params->length <= TU_MAPPED_PIECE &&
        (transfers == NULL ||
         (transfers->waiting == NULL && !(transfers->fence && !tu_list_is_empty(&transfers->list))))) {
        if (params->kind == TU_TRANSFER_ATOMIC) {
            tu_transfer_store_integer(params->buffer, tu_mapped_atomic(&params->atomic, local, params->length),
                                      params->length);
        } else {
            tu_mapped_copy(params->kind == TU_TRANSFER_PUT, params->buffer, local, params->length);
        }
        return UCS_OK;
    }
    if (local == NULL && path->part > 0 && params->length > path->part && on_host) {
        status = add_parts(endpoint, params, &transfer);
    } else {
        status = add(endpoint, params, local, &transfer);
    }
    if (status != UCS_OK) {
        return status;
    }
    transfer->verdict = &verdict;
    tu_order_advance(endpoint);
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
    cancel(owner);
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

/* Gets or puts one buffer. Returns a verdict. Python has checked that the range is in the memory. If the owner refuses
 * a put that has completed, tu_transfers_status says so to its scope. */
int64_t tu_transfer(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, bool put, void *address,
                    size_t length, int memory, uint64_t offset)
{
    tu_worker_t *worker = endpoint->worker;
    tu_transfer_params_t params;

    if (offset > path->length || length > path->length - offset) {
        return UCS_ERR_INVALID_PARAM;
    }
    if (memory > TU_MEMORY_HOST && !(worker->memory_types >> (memory - 1) & 1)) {
        return UCS_ERR_UNSUPPORTED;
    }
    params = (tu_transfer_params_t){
        .path   = path,
        .kind   = put ? TU_TRANSFER_PUT : TU_TRANSFER_GET,
        .buffer = address,
        .length = length,
        .memory = memory,
        .offset = offset,
        .scope  = scope,
    };
    return post_transfer(endpoint, &params);
}

/* Does an atomic to an integer of `length` bytes (4 or 8), whose address is a multiple of that. `old`: where its old
 * value goes, `length` bytes that must stay until the operation is over; NULL: the operation is over when the request
 * has left; `scope` as for a put. Returns a verdict. */
int64_t tu_transfer_atomic(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, int operation,
                           uint64_t length, uint64_t operand, uint64_t swapped, void *old, uint64_t offset)
{
    tu_transfer_params_t params;

    if ((length != 4 && length != 8) || offset > path->length || length > path->length - offset ||
        operation < TU_ATOMIC_ADD || operation > TU_ATOMIC_XOR ||
        (path->local != NULL && (uintptr_t)(path->local + offset) % length != 0)) {
        return UCS_ERR_INVALID_PARAM;
    }
    params = (tu_transfer_params_t){
        .path   = path,
        .kind   = TU_TRANSFER_ATOMIC,
        .late   = old != NULL,
        .buffer = old,
        .length = length,
        .atomic = {.operation = operation, .operand = operand, .swapped = swapped},
        .memory = TU_MEMORY_HOST,
        .offset = offset,
        .scope  = scope,
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

/* Waits for the transfers that were posted before this, and flushes UCX's endpoint. */
static int64_t post_flush(tu_endpoint_t *endpoint)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send      = flushed,
    };
    ucs_status_ptr_t answer;
    tu_transfer_t *transfer;
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    transfer = tu_order_enter(endpoint, TU_TRANSFER_FLUSH, operation_done, post.operation);
    if (transfer == NULL) {
        return tu_post_end(&post, UCS_STATUS_PTR(UCS_ERR_NO_MEMORY));
    }
    param.user_data = transfer;
    answer          = ucp_ep_flush_nbx(endpoint->ep, &param); /* at the same time as the answers come */
    if (UCS_PTR_IS_ERR(answer)) {
        tu_order_leave(transfer);
        tu_order_dispose(transfer);
        return tu_post_end(&post, answer);
    }
    transfer->sending = answer != NULL;
    verdict           = pending(&post, transfer);
    tu_order_advance(endpoint);
    return verdict;
}

static bool flush(tu_endpoint_t *endpoint, int64_t *verdict)
{
    const tu_transfers_t *transfers = tu_transfers_of(endpoint);

    if (transfers == NULL || tu_list_is_empty(&transfers->list)) {
        return false;
    }
    *verdict = post_flush(endpoint);
    return true;
}

/* Why the owner refused a put or an atomic of a scope after it had returned; reported once. */
int tu_transfers_status(tu_endpoint_t *endpoint, uint64_t scope)
{
    tu_transfers_t *transfers = tu_transfers_of(endpoint);
    tu_transfer_t *refused    = transfers == NULL ? NULL : tu_order_refused(transfers, scope);
    ucs_status_t status;

    if (refused == NULL) {
        return UCS_OK;
    }
    status = refused->status;
    tu_list_remove(&refused->link);
    transfers->refusals--;
    tu_order_dispose(refused);
    return status;
}

void tu_rma_unfenced(tu_worker_t *worker)
{
    tu_rma_of(worker)->unfenced = true;
}

/* UCX's fence is called only if UCX's own puts and gets have been used: inside the call it may wait until everything is
 * flushed (ucp_worker_fence_strong). */
int tu_worker_fence(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;
    tu_gate_t *before;
    ucs_status_t status;

    TU_LIST_FOR_EACH(endpoint, &worker->endpoints, link) {
        tu_transfers_t *transfers = tu_transfers_of(endpoint);

        if (transfers != NULL) {
            transfers->fence = !tu_list_is_empty(&transfers->list);
        }
    }
    if (!tu_rma_of(worker)->unfenced) {
        return UCS_OK;
    }
    tu_rma_of(worker)->unfenced = false;
    before = tu_gate_enter(worker->gate);
    status = ucp_worker_fence(worker->worker);
    tu_gate_leave(before);
    return status;
}

/* ---- cancelling, and the end ---- */

/* Cancels the parts that need nothing from the peer now. */
static void cancel_parts(tu_transfer_t *whole)
{
    tu_endpoint_t *endpoint = NULL;
    tu_transfer_t *transfer, *after;

    whole->parts++; /* so that it does not end inside the loop */
    TU_LIST_FOR_EACH_SAFE(transfer, after, &tu_rma_of(whole->worker)->transfers, all_link) {
        if (transfer->owner != whole || transfer->done != part_done) {
            continue;
        }
        if (transfer->endpoint != NULL && endpoint == NULL) {
            endpoint                             = transfer->endpoint;
            tu_transfers_of(endpoint)->advancing = true; /* otherwise this could end `after` */
        }
        cancel(transfer);
    }
    if (endpoint != NULL) {
        tu_transfers_of(endpoint)->advancing = false;
        tu_order_advance(endpoint);
    }
    part_done(whole, UCS_OK);
}

/* Cancels a transfer, unless the peer has the request: then its answer ends it. */
static void cancel(tu_transfer_t *transfer)
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
    tu_transfers_t *transfers = tu_transfers_of(endpoint);
    tu_transfer_t *refused;

    if (transfers == NULL) {
        return;
    }
    transfers->advancing = true;
    while (!tu_list_is_empty(&transfers->list)) {
        tu_transfer_conclude(tu_order_first(transfers), UCS_ERR_CANCELED);
    }
    while ((refused = TU_LIST_FIRST(&transfers->refused, tu_transfer_t, link)) != NULL) {
        tu_list_remove(&refused->link);
        tu_order_dispose(refused);
    }
    free(transfers);
    endpoint->extensions[TU_INDEX_rma] = NULL;
}

static void worker_destroyed(tu_worker_t *worker)
{
    tu_rma_t *rma = tu_rma_of(worker);

    while (!tu_list_is_empty(&rma->transfers)) {
        tu_order_dispose(TU_LIST_FIRST(&rma->transfers, tu_transfer_t, all_link));
    }
    tu_mapped_close(rma);
    tu_owner_close(rma);
    free(rma);
}

static ucs_status_t open(tu_worker_t *worker)
{
    tu_rma_t *rma = tu_calloc(1, sizeof(*rma));
    size_t i;

    if (rma == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    worker->extensions[TU_INDEX_rma] = rma;
    rma->worker                      = worker;
    tu_list_init(&rma->transfers);
    for (i = 0; i < TU_AWAITING_BUCKETS; i++) {
        tu_list_init(&rma->awaiting[i]);
    }
    tu_mapped_open(rma);
    return tu_owner_open(rma);
}

const tu_extension_t tu_extension_rma = {
    .open             = open,
    .flush            = flush,
    .endpoint_closing = endpoint_closing,
    .worker_destroyed = worker_destroyed,
};
