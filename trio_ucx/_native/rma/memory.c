/* Registered memory and remote keys; UCX's own puts and gets. */
#include <string.h>

#include <ucm/api/ucm.h>

#include "rma/transfer.h"

/* Registers what is at `address`, or allocates when that is NULL. */
int tu_memory_map(tu_context_t *context, void *address, size_t length, int memory_type, unsigned protection,
                  ucp_mem_h *out)
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

    *out = NULL;
    return ucp_mem_map(context->context, &params, out);
}

int tu_memory_query(ucp_mem_h memory, uint64_t *address, size_t *length, int *memory_type)
{
    ucp_mem_attr_t attr = {
        .field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH | UCP_MEM_ATTR_FIELD_MEM_TYPE,
    };
    ucs_status_t status = ucp_mem_query(memory, &attr);

    *address     = (uint64_t)(uintptr_t)attr.address;
    *length      = attr.length;
    *memory_type = (int)attr.mem_type;
    return status;
}

/* UCX alone would keep the registration in its cache until the memory is unmapped: a peer's RDMA device could still put
 * and get, and the memory stays pinned. So UCX is told that it is unmapped (ucm_vm_munmap; nothing else happens), and made
 * to look (ucs_rcache_create_region does, also for memory that is registered): ucp_mem_unmap then ends the last use. */
int tu_memory_unmap(tu_context_t *context, ucp_mem_h memory)
{
    static char page[64];
    uint64_t address;
    size_t length;
    int memory_type;
    ucp_mem_h other;

    if (tu_memory_query(memory, &address, &length, &memory_type) == UCS_OK) {
        ucm_vm_munmap((void *)(uintptr_t)address, length);
        if (tu_memory_map(context, page, sizeof(page), UCS_MEMORY_TYPE_HOST, 0, &other) == UCS_OK) {
            (void)ucp_mem_unmap(context->context, other);
        }
    }
    return ucp_mem_unmap(context->context, memory);
}

/* Copies the packed remote key to `out` if *size has room for it; *size becomes its length either way. */
int tu_memory_pack(tu_context_t *context, ucp_mem_h memory, char *out, size_t *size)
{
    void *packed;
    size_t length;
    ucs_status_t status = ucp_rkey_pack(context->context, memory, &packed, &length);

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

int tu_rkey_unpack(tu_endpoint_t *endpoint, const char *packed, ucp_rkey_h *out)
{
    *out = NULL;
    return ucp_ep_rkey_unpack(endpoint->ep, packed, out);
}

void tu_rkey_destroy(ucp_rkey_h rkey)
{
    ucp_rkey_destroy(rkey);
}

/* The address at which this process has mapped the remote address, if it has. */
int tu_rkey_pointer(ucp_rkey_h rkey, uint64_t remote, uint64_t *local)
{
    void *pointer;
    ucs_status_t status = ucp_rkey_ptr(rkey, remote, &pointer);

    *local = status == UCS_OK ? (uint64_t)(uintptr_t)pointer : 0;
    return status;
}

/* ---- UCX's own puts and gets, as parts of a list ---- */

void tu_rma_unfenced(tu_worker_t *worker)
{
    tu_rma_of(worker)->unfenced = true;
}

static void part_moved(void *request, ucs_status_t status, void *user_data)
{
    tu_transfer_t *transfer = user_data;

    if (request != NULL) {
        ucp_request_free(request);
    }
    transfer->sending = false;
    tu_transfer_conclude(transfer, transfer->state == TU_TRANSFER_OVER ? transfer->status : status);
}

static void begin_part(tu_transfer_t *transfer)
{
    tu_endpoint_t *endpoint   = transfer->endpoint;
    uint64_t remote           = transfer->path.address + transfer->offset;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send      = part_moved,
        .user_data    = transfer,
    };
    ucs_status_ptr_t answer;

    tu_set_memory(&param, transfer->memory);
    transfer->state   = TU_TRANSFER_SENT;
    transfer->sending = true;
    tu_transfers_of(endpoint)->begun++;
    tu_rma_unfenced(endpoint->worker);
    answer = transfer->kind == TU_TRANSFER_PUT ?
                 ucp_put_nbx(endpoint->ep, transfer->buffer, transfer->length, remote, transfer->path.rkey, &param) :
                 ucp_get_nbx(endpoint->ep, transfer->buffer, transfer->length, remote, transfer->path.rkey, &param);
    if (!UCS_PTR_IS_PTR(answer)) {
        part_moved(NULL, UCS_PTR_RAW_STATUS(answer), transfer);
    }
}

static void end_part(tu_transfer_t *transfer)
{
    (void)transfer; /* UCX completes it */
}

const tu_transfer_method_t tu_ucx_method = {.sends = true, .begin = begin_part, .end = end_part};

/* ---- those of one buffer ---- */

int64_t tu_put(tu_endpoint_t *endpoint, void *address, size_t length, int memory, uint64_t remote, ucp_rkey_h rkey)
{
    tu_buffers_t one = {.count = 1, .addresses = &address, .lengths = &length, .memory = memory};
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, &one);

    if (verdict != 0) {
        return verdict;
    }
    tu_rma_unfenced(endpoint->worker);
    return tu_post_end(&post, ucp_put_nbx(endpoint->ep, post.address, post.count, remote, rkey,
                                          &post.param));
}

int64_t tu_get(tu_endpoint_t *endpoint, void *address, size_t length, int memory, uint64_t remote, ucp_rkey_h rkey)
{
    tu_buffers_t one = {.count = 1, .addresses = &address, .lengths = &length, .memory = memory};
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, &one);

    if (verdict != 0) {
        return verdict;
    }
    tu_rma_unfenced(endpoint->worker);
    return tu_post_end(&post, ucp_get_nbx(endpoint->ep, post.address, post.count, remote, rkey,
                                          &post.param));
}
