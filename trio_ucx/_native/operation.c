/* Operations: from a call that posts one to the record that says that it is over. */
#include <string.h>

#include "native.h"

#define BLOCK_SLOTS 256

/* ---- the table ---- */

static void forget_buffers(tu_operation_t *operation)
{
    free(operation->described);
    operation->described = NULL;
}

static bool slots_grow(tu_worker_t *worker)
{
    tu_operation_t **blocks = tu_realloc(worker->blocks, (worker->block_count + 1) * sizeof(*blocks));
    tu_operation_t *block;
    size_t i;

    if (blocks == NULL) {
        return false;
    }
    worker->blocks = blocks;
    block          = tu_calloc(BLOCK_SLOTS, sizeof(*block));
    if (block == NULL) {
        return false;
    }
    blocks[worker->block_count] = block;
    for (i = BLOCK_SLOTS; i-- > 0;) {
        block[i].worker    = worker;
        block[i].slot      = (uint32_t)(worker->block_count * BLOCK_SLOTS + i);
        block[i].next_free = worker->free_slots;
        worker->free_slots = &block[i];
    }
    worker->block_count++;
    return true;
}

static void operation_release(tu_operation_t *operation)
{
    tu_worker_t *worker = operation->worker;

    forget_buffers(operation);
    operation->id        = 0;
    operation->request   = NULL;
    operation->cancel    = NULL;
    operation->next_free = worker->free_slots;
    worker->free_slots   = operation;
    worker->counts.operations--;
    tu_ring_unreserve(worker);
}

static tu_operation_t *operation_begin(tu_worker_t *worker)
{
    tu_operation_t *operation;

    if (worker->free_slots == NULL && !slots_grow(worker)) {
        return NULL;
    }
    if (!tu_ring_reserve(worker)) {
        return NULL;
    }
    operation             = worker->free_slots;
    worker->free_slots    = operation->next_free;
    operation->generation = (operation->generation + 1) & 0x3fffffffu;
    if (operation->generation == 0) {
        operation->generation = 1;
    }
    operation->id      = ((uint64_t)operation->generation << 32) | operation->slot;
    operation->request = NULL;
    worker->counts.operations++;
    return operation;
}

void tu_operation_done(tu_operation_t *operation, void *request, ucs_status_t status, uint64_t length, uint64_t tag)
{
    tu_worker_t *worker = operation->worker;
    uint64_t id         = operation->id;

    operation_release(operation);
    worker->failed += status != UCS_OK && status != UCS_ERR_CANCELED;
    tu_ring_append(worker, TU_RECORD_OPERATION, id, status, length, tag, 0);
    if (request != NULL) {
        ucp_request_free(request);
    }
}

void tu_operation_sent(void *request, ucs_status_t status, void *user_data)
{
    tu_operation_done(user_data, request, status, 0, 0);
}

void tu_operation_received(void *request, ucs_status_t status, size_t length, void *user_data)
{
    tu_operation_done(user_data, request, status, length, 0);
}

tu_operation_t *tu_operation_find(tu_worker_t *worker, uint64_t id)
{
    uint32_t slot = (uint32_t)id;
    tu_operation_t *operation;

    if (slot / BLOCK_SLOTS >= worker->block_count) {
        return NULL;
    }
    operation = &worker->blocks[slot / BLOCK_SLOTS][slot % BLOCK_SLOTS];
    return operation->id == id ? operation : NULL;
}

/* Cancels an operation. Returns whether it is over (its record, cancelled or not, is in the ring); if not, UCX still
 * works on it, and the record comes later. */
bool tu_operation_cancel(tu_worker_t *worker, uint64_t id)
{
    tu_operation_t *operation = tu_operation_find(worker, id);

    if (operation == NULL) {
        return true;
    }
    if (operation->cancel != NULL) {
        operation->cancel(operation->owner);
    } else if (operation->request != NULL) {
        ucp_request_cancel(worker->worker, operation->request);
    }
    return operation->id != id;
}

void tu_operations_free(tu_worker_t *worker)
{
    size_t i, slot;

    for (i = 0; i < worker->block_count; i++) {
        for (slot = 0; slot < BLOCK_SLOTS; slot++) {
            forget_buffers(&worker->blocks[i][slot]);
        }
        free(worker->blocks[i]);
    }
    free(worker->blocks);
    if (worker->strided != 0) {
        ucp_dt_destroy(worker->strided);
    }
}

/* ---- posting ---- */

static ucs_status_t describe_strided(tu_post_t *post, const tu_strided_t *strided)
{
    tu_worker_t *worker = post->operation->worker;
    ucs_status_t status;

    if (worker->strided == 0) {
        status = tu_strided_datatype(&worker->strided);
        if (status != UCS_OK) {
            worker->strided = 0;
            return status;
        }
    }
    post->operation->described = tu_strided_copy(strided);
    if (post->operation->described == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    /* Otherwise UCX would look up the kind of memory of the address, which is the description's. */
    post->param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    post->param.memory_type   = UCS_MEMORY_TYPE_HOST;
    post->param.datatype      = worker->strided;
    post->address             = post->operation->described;
    post->count               = 1;
    return UCS_OK;
}

/* Describes the buffers to UCX. The operation owns what UCX reads of the description until it is over. */
static ucs_status_t describe(tu_post_t *post, const tu_buffers_t *buffers)
{
    ucp_dt_iov_t *iov;
    size_t i;

    post->param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    if (buffers->strided != NULL) {
        return describe_strided(post, buffers->strided);
    }
    if (buffers->memory != TU_MEMORY_UNKNOWN &&
        !(post->operation->worker->memory_types >> (buffers->memory - 1) & 1)) {
        return UCS_ERR_UNSUPPORTED; /* UCX would take it for host memory, and crash */
    }
    tu_set_memory(&post->param, buffers->memory);
    if (buffers->count <= 1) {
        post->param.datatype = ucp_dt_make_contig(1);
        post->address        = buffers->count == 1 ? buffers->addresses[0] : NULL;
        post->count          = buffers->count == 1 ? buffers->lengths[0] : 0;
        return UCS_OK;
    }
    iov = tu_malloc(buffers->count * sizeof(*iov));
    if (iov == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    for (i = 0; i < buffers->count; i++) {
        iov[i].buffer = buffers->addresses[i];
        iov[i].length = buffers->lengths[i];
    }
    post->operation->described = iov;
    post->param.datatype       = ucp_dt_make_iov();
    post->address              = iov;
    post->count                = buffers->count;
    return UCS_OK;
}

int64_t tu_post_begin(tu_post_t *post, tu_worker_t *worker, const tu_buffers_t *buffers)
{
    ucs_status_t status;

    memset(post, 0, sizeof(*post));
    post->operation = operation_begin(worker);
    if (post->operation == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    post->id                 = post->operation->id;
    post->param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    post->param.cb.send      = tu_operation_sent;
    post->param.user_data    = post->operation;
    if (buffers != NULL) {
        status = describe(post, buffers);
        if (status != UCS_OK) {
            return tu_post_end(post, UCS_STATUS_PTR(status));
        }
    }
    return 0;
}

int64_t tu_post_end(tu_post_t *post, ucs_status_ptr_t answer)
{
    if (!UCS_PTR_IS_PTR(answer)) {
        operation_release(post->operation);
        return UCS_PTR_RAW_STATUS(answer);
    }
    if (post->operation->id == post->id) { /* otherwise it is over: its record is in the ring already */
        post->operation->request = answer;
    }
    return (int64_t)post->id;
}
