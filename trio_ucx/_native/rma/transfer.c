/* Posts puts, gets and atomics. They are carried out in the order of their posting (order.c): by load, store and the
 * processor's atomics if this process has mapped the memory (mapped.c), by process_vm_readv where the kernel allows it
 * (direct.c), else by messages to its owner (requester.c, parts.c). Lists may also use UCX's own puts and gets
 * (memory.c).
 */
#include <string.h>

#include "rma/transfer.h"

static void cancel(tu_transfer_t *transfer);

static const tu_transfer_method_t *choose_method(const tu_transfer_params_t *params, const tu_transfer_t *transfer)
{
    uint64_t part = transfer->path.part > 0 ? transfer->path.part : TU_LONGEST_PART;

    if (transfer->path.local != NULL || transfer->path.pid != 0) {
        return &tu_copies_method;
    }
    if (!transfer->path.messages || transfer->range_count > 1 || transfer->cursor.total > 0 ||
        (params->memory <= TU_MEMORY_HOST && transfer->length > part)) {
        return &tu_parts_method;
    }
    return &tu_requester_method;
}

/* Adds a transfer to the endpoint's list. It takes over the ranges. */
static tu_transfer_t *add(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, const tu_access_path_t *path,
                          uint64_t length, const tu_cursor_t *cursor)
{
    tu_transfer_t *transfer = tu_order_enter(endpoint, params->kind, params->done, params->owner);

    if (transfer == NULL) {
        return NULL;
    }
    transfer->late        = params->late;
    transfer->one         = params->range;
    transfer->many        = params->ranges;
    transfer->range_count = params->ranges != NULL ? params->range_count : 1;
    transfer->buffer      = tu_ranges_of(transfer)->buffer;
    transfer->offset      = tu_ranges_of(transfer)->offset;
    transfer->length      = length;
    transfer->memory      = params->memory;
    transfer->cursor      = *cursor;
    transfer->progress    = params->progress;
    transfer->atomic      = params->atomic;
    transfer->path        = *path;
    transfer->scope       = params->scope;
    transfer->method      = choose_method(params, transfer);
    if (transfer->method == &tu_requester_method) {
        tu_requester_prepare(transfer);
    }
    return transfer;
}

/* Returns true if nothing that was posted before has to begin first. */
static bool may_begin(const tu_transfers_t *transfers)
{
    return transfers == NULL ||
           (transfers->waiting == NULL && !(transfers->fence && !tu_list_is_empty(&transfers->list)));
}

/* Does what can be done in TU_SEQUENCE_SLICE. Returns UCS_INPROGRESS if something is left, an error if the owner has
 * closed the memory. If the kernel refuses, it clears path->pid: then messages do the rest. */
static ucs_status_t do_at_once(const tu_transfer_params_t *params, tu_access_path_t *path, const tu_range_t *ranges,
                       size_t count, uint64_t length, tu_cursor_t *cursor)
{
    uint64_t end = length > TU_COPIED_AT_ONCE ? tu_now() + TU_SEQUENCE_SLICE : 0;
    ucs_status_t status;

    if (path->local == NULL && (path->pid == 0 || params->kind == TU_TRANSFER_ATOMIC)) {
        return UCS_INPROGRESS;
    }
    if (params->kind == TU_TRANSFER_ATOMIC) {
        if (!tu_mapped_is_open(path)) {
            return UCS_ERR_NO_ELEM;
        }
        tu_transfer_store_integer(
            ranges->buffer, tu_mapped_atomic(&params->atomic, path->local + ranges->offset, length), length);
        return UCS_OK;
    }
    do {
        status = tu_copies_step(path, params->kind == TU_TRANSFER_PUT, ranges, count, cursor);
        if (status == UCS_ERR_UNREACHABLE) {
            path->pid = 0;
            return UCS_INPROGRESS;
        }
        if (status != UCS_OK) {
            return status;
        }
        if (params->progress != NULL) {
            *params->progress = cursor->total;
        }
    } while (cursor->total < length && tu_now() < end);
    return cursor->total == length ? UCS_OK : UCS_INPROGRESS;
}

ucs_status_t tu_transfer_begin(tu_endpoint_t *endpoint, const tu_transfer_params_t *params, tu_transfer_t **out)
{
    const tu_range_t *ranges = params->ranges != NULL ? params->ranges : &params->range;
    size_t count             = params->ranges != NULL ? params->range_count : 1;
    tu_access_path_t path    = *params->path;
    ucs_status_t verdict     = UCS_INPROGRESS;
    uint64_t length          = 0;
    tu_cursor_t cursor       = {0};
    tu_transfer_t *transfer;
    size_t i;

    *out = NULL;
    for (i = 0; i < count; i++) {
        length += ranges[i].length;
    }
    if (params->memory > TU_MEMORY_HOST || params->kind == TU_TRANSFER_NOTE) {
        path.local = NULL;
    }
    if (params->memory > TU_MEMORY_HOST ||
        !tu_direct_takes(&path, params->kind, params->ranges != NULL ? params->shortest : length)) {
        path.pid = 0;
    }
    if (path.local == NULL && !path.messages && path.rkey == NULL) {
        free(params->ranges);
        return UCS_ERR_UNSUPPORTED;
    }
    if (may_begin(tu_transfers_of(endpoint))) {
        verdict = do_at_once(params, &path, ranges, count, length, &cursor);
        if (verdict != UCS_INPROGRESS) {
            free(params->ranges);
            return verdict;
        }
    }
    transfer = add(endpoint, params, &path, length, &cursor);
    if (transfer == NULL) {
        free(params->ranges);
        return UCS_ERR_NO_MEMORY;
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
        free(params->ranges);
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
        .range  = {.buffer = address, .offset = offset, .length = length},
        .memory = memory,
        .scope  = scope,
    };
    return post_transfer(endpoint, &params);
}

static int64_t post_list(tu_endpoint_t *endpoint, tu_transfer_params_t *params, tu_range_t *ranges)
{
    params->ranges = ranges;
    if (ranges == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    if (params->memory > TU_MEMORY_HOST && !(endpoint->worker->memory_types >> (params->memory - 1) & 1)) {
        free(ranges);
        return UCS_ERR_UNSUPPORTED;
    }
    return post_transfer(endpoint, params);
}

/* Gets or puts a list of blocks of `size` bytes: those that `remote` and `local` name, of the memory from `offset` on
 * and of the buffer. Python has checked that they are in both. `progress` stays until the operation is over, and counts
 * the bytes, from the beginning of the list, that are done. Otherwise as tu_transfer. */
int64_t tu_transfer_blocks(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, bool put,
                           void *buffer, int memory, const int64_t *local, uint64_t offset, const int64_t *remote,
                           size_t count, uint64_t size, uint64_t *progress)
{
    tu_transfer_params_t params = {
        .path     = path,
        .kind     = put ? TU_TRANSFER_PUT : TU_TRANSFER_GET,
        .shortest = size,
        .progress = progress,
        .memory   = memory,
        .scope    = scope,
    };

    if (count == 0 || size == 0 || offset > path->length ||
        tu_blocks_beyond(remote, count, (path->length - offset) / size) < count) {
        return UCS_ERR_INVALID_PARAM;
    }
    return post_list(endpoint, &params,
                     tu_ranges_of_blocks(buffer, local, offset, remote, count, size, &params.range_count));
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
        .range  = {.buffer = old, .offset = offset, .length = length},
        .atomic = {.operation = operation, .operand = operand, .swapped = swapped},
        .memory = TU_MEMORY_HOST,
        .scope  = scope,
    };
    return post_transfer(endpoint, &params);
}

/* Gets or puts a list of buffers, each with its offset in the memory: otherwise as tu_transfer_blocks. */
int64_t tu_transfer_buffers(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, bool put,
                            const tu_buffers_t *buffers, const uint64_t *offsets, uint64_t *progress)
{
    tu_transfer_params_t params = {
        .path      = path,
        .kind      = put ? TU_TRANSFER_PUT : TU_TRANSFER_GET,
        .range_count = buffers->count,
        .shortest  = UINT64_MAX,
        .progress  = progress,
        .memory    = buffers->memory,
        .scope     = scope,
    };
    size_t i;

    for (i = 0; i < buffers->count; i++) {
        if (buffers->lengths[i] == 0 || offsets[i] > path->length || buffers->lengths[i] > path->length - offsets[i]) {
            return UCS_ERR_INVALID_PARAM;
        }
        params.shortest = buffers->lengths[i] < params.shortest ? buffers->lengths[i] : params.shortest;
    }
    return post_list(endpoint, &params, tu_ranges_of_buffers(buffers, offsets));
}

/* Notifies the owner of the memory. Python has flushed before. The buffer stays until the operation is over. Returns a
 * verdict. */
int64_t tu_transfer_note(tu_endpoint_t *endpoint, uint64_t scope, const tu_access_path_t *path, void *data,
                         size_t length)
{
    tu_transfer_params_t params = {
        .path   = path,
        .kind   = TU_TRANSFER_NOTE,
        .late   = true,
        .range  = {.buffer = data, .length = length},
        .memory = TU_MEMORY_HOST,
        .scope  = scope,
    };

    if (length > TU_LONGEST_NOTE || !path->messages) {
        return UCS_ERR_INVALID_PARAM;
    }
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

/* Cancels a transfer, unless the peer has the request: then its answer ends it. */
static void cancel(tu_transfer_t *transfer)
{
    if (transfer->method == &tu_parts_method) {
        tu_parts_cancel(transfer);
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
    tu_copies_close(rma);
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
    tu_copies_open(rma);
    return tu_owner_open(rma);
}

const tu_extension_t tu_extension_rma = {
    .open             = open,
    .flush            = flush,
    .endpoint_closing = endpoint_closing,
    .worker_destroyed = worker_destroyed,
};
