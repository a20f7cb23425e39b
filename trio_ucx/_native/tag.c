/* Tag messages: send, receive, probe; contiguous or gather/scatter. */
#include <string.h>

#include "native.h"

static void message_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    tu_operation_done(user_data, request, status, info->length, info->sender_tag);
}

/* Fills in the datatype, and gives the operation the list that UCX reads until it completes. */
static int describe(tu_operation_t *operation, const tu_buffers_t *buffers, ucp_request_param_t *param, void **address,
                    size_t *count)
{
    size_t i;

    param->op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    if (buffers->count <= 1) {
        param->datatype = ucp_dt_make_contig(1);
        *address        = buffers->count == 1 ? buffers->addresses[0] : NULL;
        *count          = buffers->count == 1 ? buffers->lengths[0] : 0;
        return 0;
    }
    operation->iov = malloc(buffers->count * sizeof(*operation->iov));
    if (operation->iov == NULL) {
        return -1;
    }
    for (i = 0; i < buffers->count; i++) {
        operation->iov[i].buffer = buffers->addresses[i];
        operation->iov[i].length = buffers->lengths[i];
    }
    param->datatype = ucp_dt_make_iov();
    *address        = operation->iov;
    *count          = buffers->count;
    return 0;
}

static int64_t out_of_memory(tu_operation_t *operation)
{
    return tu_operation_posted(operation, operation->id, UCS_STATUS_PTR(UCS_ERR_NO_MEMORY));
}

int64_t tu_tag_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t tag, int sync)
{
    tu_operation_t *operation = tu_operation_begin(endpoint->worker);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb           = {.send = tu_operation_sent},
        .user_data    = operation,
    };
    void *address;
    size_t count;
    uint64_t id;

    if (operation == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    if (describe(operation, buffers, &param, &address, &count) < 0) {
        return out_of_memory(operation);
    }
    id = operation->id;
    return tu_operation_posted(operation, id,
                               sync ? ucp_tag_send_sync_nbx(endpoint->ep, address, count, tag, &param) :
                                      ucp_tag_send_nbx(endpoint->ep, address, count, tag, &param));
}

int64_t tu_tag_send_one(tu_endpoint_t *endpoint, const void *address, size_t length, uint64_t tag)
{
    void *addresses[1] = {(void *)(uintptr_t)address};
    tu_buffers_t one   = {.count = 1, .addresses = addresses, .lengths = &length};

    return tu_tag_send(endpoint, &one, tag, 0);
}

typedef struct receive {
    tu_operation_t *operation;
    ucp_request_param_t param;
    ucp_tag_recv_info_t info;
    void *address;
    size_t count;
} receive_t;

/* Begins a receive. Returns 0, or the verdict of one that could not begin. */
static int64_t begin_receive(receive_t *receive, tu_worker_t *worker, const tu_buffers_t *buffers)
{
    memset(receive, 0, sizeof(*receive));
    receive->operation = tu_operation_begin(worker);
    if (receive->operation == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    receive->param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                  UCP_OP_ATTR_FIELD_RECV_INFO;
    receive->param.cb.recv            = message_received;
    receive->param.user_data          = receive->operation;
    receive->param.recv_info.tag_info = &receive->info;
    if (describe(receive->operation, buffers, &receive->param, &receive->address, &receive->count) < 0) {
        return out_of_memory(receive->operation);
    }
    return 0;
}

static int64_t end_receive(receive_t *receive, uint64_t id, ucs_status_ptr_t answer, tu_received_t *received)
{
    received->length = receive->info.length;
    received->tag    = receive->info.sender_tag;
    return tu_operation_posted(receive->operation, id, answer);
}

int64_t tu_tag_receive(tu_worker_t *worker, const tu_buffers_t *buffers, uint64_t tag, uint64_t mask,
                       tu_received_t *received)
{
    receive_t receive;
    int64_t verdict = begin_receive(&receive, worker, buffers);
    uint64_t id;

    if (verdict != 0) {
        return verdict;
    }
    if (worker->loses_info) {
        receive.param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    }
    id = receive.operation->id;
    return end_receive(&receive, id,
                       ucp_tag_recv_nbx(worker->worker, receive.address, receive.count, tag, mask, &receive.param),
                       received);
}

int64_t tu_message_receive(tu_worker_t *worker, uint64_t message, const tu_buffers_t *buffers,
                           tu_received_t *received)
{
    receive_t receive;
    int64_t verdict = begin_receive(&receive, worker, buffers);
    uint64_t id;

    if (verdict != 0) {
        return verdict;
    }
    id = receive.operation->id;
    return end_receive(&receive, id,
                       ucp_tag_msg_recv_nbx(worker->worker, receive.address, receive.count,
                                            (ucp_tag_message_h)(uintptr_t)message, &receive.param),
                       received);
}

int64_t tu_message_receive_one(tu_worker_t *worker, uint64_t message, void *address, size_t length,
                               tu_received_t *received)
{
    tu_buffers_t one = {.count = 1, .addresses = &address, .lengths = &length};

    return tu_message_receive(worker, message, &one, received);
}

/* Returns the handle of a removed message, 1 for one that stays, 0 for none. */
uint64_t tu_tag_probe(tu_worker_t *worker, uint64_t tag, uint64_t mask, int remove, tu_received_t *received)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message = ucp_tag_probe_nb(worker->worker, tag, mask, remove, &info);

    if (message == NULL) {
        return 0;
    }
    received->length = info.length;
    received->tag    = info.sender_tag;
    return remove ? (uint64_t)(uintptr_t)message : 1;
}
