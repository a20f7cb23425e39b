/* Remote memory: registration, remote keys, put and get, atomics. */
#include <string.h>

#include "rma/rma.h"

static ucp_mem_h native(tu_memory_t *memory)
{
    return (ucp_mem_h)memory;
}

static ucp_rkey_h rkey_of(tu_rkey_t *rkey)
{
    return (ucp_rkey_h)rkey;
}

/* Registers what is at `address`, or allocates when that is NULL. */
int tu_memory_map(tu_context_t *context, void *address, size_t length, int memory_type, unsigned protection,
                  tu_memory_t **out)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_FLAGS | UCP_MEM_MAP_PARAM_FIELD_PROT |
                      (memory_type >= 0 ? UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE : 0),
        .address     = address,
        .length      = length,
        .flags       = address == NULL ? UCP_MEM_MAP_ALLOCATE : 0,
        .prot        = protection,
        .memory_type = memory_type >= 0 ? (ucs_memory_type_t)memory_type : UCS_MEMORY_TYPE_UNKNOWN,
    };

    ucp_mem_h memory    = NULL;
    ucs_status_t status = ucp_mem_map(context->context, &params, &memory);

    *out = (tu_memory_t *)memory;
    return status;
}

int tu_memory_query(tu_memory_t *memory, uint64_t *address, size_t *length, int *memory_type)
{
    ucp_mem_attr_t attr = {
        .field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH | UCP_MEM_ATTR_FIELD_MEM_TYPE,
    };
    ucs_status_t status = ucp_mem_query(native(memory), &attr);

    *address     = (uint64_t)(uintptr_t)attr.address;
    *length      = attr.length;
    *memory_type = (int)attr.mem_type;
    return status;
}

int tu_memory_unmap(tu_context_t *context, tu_memory_t *memory)
{
    return ucp_mem_unmap(context->context, native(memory));
}

/* Copies the packed remote key to out when *size has room for it; *size becomes its length either way. */
int tu_memory_pack(tu_context_t *context, tu_memory_t *memory, char *out, size_t *size)
{
    void *packed;
    size_t length;
    ucs_status_t status = ucp_rkey_pack(context->context, native(memory), &packed, &length);

    if (status != UCS_OK) {
        return status;
    }
    if (length <= *size) {
        memcpy(out, packed, length);
    }
    *size = length;
    ucp_rkey_buffer_release(packed);
    return UCS_OK;
}

int tu_rkey_unpack(tu_endpoint_t *endpoint, const char *packed, tu_rkey_t **out)
{
    ucp_rkey_h rkey     = NULL;
    ucs_status_t status = ucp_ep_rkey_unpack(endpoint->ep, packed, &rkey);

    *out = (tu_rkey_t *)rkey;
    return status;
}

void tu_rkey_destroy(tu_rkey_t *rkey)
{
    ucp_rkey_destroy(rkey_of(rkey));
}

/* Where this process reaches the remote address by load and store, if it does. */
int tu_rkey_pointer(tu_rkey_t *rkey, uint64_t remote, uint64_t *local)
{
    void *pointer;
    ucs_status_t status = ucp_rkey_ptr(rkey_of(rkey), remote, &pointer);

    *local = status == UCS_OK ? (uint64_t)(uintptr_t)pointer : 0;
    return status;
}

int64_t tu_put(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t remote, tu_rkey_t *rkey)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, buffers);

    if (verdict != 0) {
        return verdict;
    }
    endpoint->worker->unfenced = 1;
    return tu_post_end(&post, ucp_put_nbx(endpoint->ep, post.address, post.count, remote, rkey_of(rkey),
                                          &post.param));
}

int64_t tu_get(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t remote, tu_rkey_t *rkey)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, buffers);

    if (verdict != 0) {
        return verdict;
    }
    endpoint->worker->unfenced = 1;
    return tu_post_end(&post, ucp_get_nbx(endpoint->ep, post.address, post.count, remote, rkey_of(rkey),
                                          &post.param));
}

/* `operand` (and, fetching, `reply`) is `size` bytes, 4 or 8, that must stay until the operation completes. A compare
 * and swap compares with the operand, and swaps in what is in `reply`. */
int64_t tu_atomic(tu_endpoint_t *endpoint, int operation, size_t size, void *operand, void *reply, uint64_t remote,
                  tu_rkey_t *rkey)
{
    static const ucp_atomic_op_t operations[] = {
        [TU_ATOMIC_ADD] = UCP_ATOMIC_OP_ADD, [TU_ATOMIC_SWAP] = UCP_ATOMIC_OP_SWAP,
        [TU_ATOMIC_COMPARE_SWAP] = UCP_ATOMIC_OP_CSWAP, [TU_ATOMIC_AND] = UCP_ATOMIC_OP_AND,
        [TU_ATOMIC_OR] = UCP_ATOMIC_OP_OR, [TU_ATOMIC_XOR] = UCP_ATOMIC_OP_XOR,
    };
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    post.param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    post.param.datatype      = ucp_dt_make_contig(size);
    if (reply != NULL) {
        post.param.op_attr_mask |= UCP_OP_ATTR_FIELD_REPLY_BUFFER;
        post.param.reply_buffer  = reply;
    }
    endpoint->worker->unfenced = 1;
    return tu_post_end(&post, ucp_atomic_op_nbx(endpoint->ep, operations[operation], operand, 1, remote,
                                                rkey_of(rkey), &post.param));
}

/* Inside the call, UCX's fence may wait until everything is flushed (ucp_worker_fence_strong). So it is called only if
 * UCX's own puts and gets have been used. */
int tu_worker_fence(tu_worker_t *worker)
{
    tu_transfers_fence(worker);
    if (!worker->unfenced) {
        return UCS_OK;
    }
    worker->unfenced = 0;
    return ucp_worker_fence(worker->worker);
}
