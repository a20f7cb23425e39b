/* Remote memory that this process has not mapped: messages ask its owner, whose answers are checked and taken here. */
#include <string.h>

#include "rma/transfer.h"

/* Longer puts stay with their sender until the owner fetches them. */
#define EAGER_PUT (96 * 1024)

static tu_list_t *bucket_of(tu_rma_t *rma, uint64_t id)
{
    return &rma->awaiting[id % TU_AWAITING_BUCKETS];
}

static tu_transfer_t *find(tu_rma_t *rma, uint64_t id)
{
    tu_transfer_t *transfer;

    TU_LIST_FOR_EACH(transfer, bucket_of(rma, id), awaiting_link) {
        if (transfer->id == id) {
            return transfer;
        }
    }
    return NULL;
}

/* ---- requests ---- */

void tu_requester_prepare(tu_transfer_t *transfer)
{
    tu_remote_request_t *request = &transfer->request;

    switch (transfer->kind) {
    case TU_TRANSFER_ATOMIC:
        request->kind              = TU_REMOTE_ATOMIC;
        request->flags             = (uint8_t)transfer->atomic.operation;
        transfer->operands.operand = tu_le64_from(transfer->atomic.operand);
        transfer->operands.swapped = tu_le64_from(transfer->atomic.swapped);
        break;
    case TU_TRANSFER_PUT:
        request->kind = TU_REMOTE_PUT;
        break;
    case TU_TRANSFER_NOTE:
        request->kind = TU_REMOTE_NOTE;
        break;
    default:
        request->kind  = TU_REMOTE_GET;
        request->flags = transfer->memory > TU_MEMORY_HOST ? TU_REMOTE_RENDEZVOUS : 0;
    }
    request->offset = tu_le64_from(transfer->offset);
    request->length = tu_le64_from(transfer->length);
    if (transfer->wire_ranges != NULL) {
        request->kind   = transfer->kind == TU_TRANSFER_PUT ? TU_REMOTE_PUT_LIST : TU_REMOTE_GET_LIST;
        request->offset = tu_le64_from(transfer->range_count);
    }
    memcpy(request->token, transfer->path.token, sizeof(request->token));
}

static void request_left(tu_transfer_t *transfer, ucs_status_t status)
{
    transfer->sending = false;
    if (transfer->state == TU_TRANSFER_OVER) {
        tu_transfer_conclude(transfer, transfer->status);
    } else if (status != UCS_OK) {
        tu_transfer_conclude(transfer, status);
    } else if (transfer->kind != TU_TRANSFER_GET && !transfer->late) {
        tu_transfer_tell(transfer, UCS_OK);
    }
}

static void request_sent(void *request, ucs_status_t status, void *user_data)
{
    ucp_request_free(request);
    request_left(user_data, status);
}

static void begin(tu_transfer_t *transfer)
{
    tu_endpoint_t *endpoint   = transfer->endpoint;
    tu_rma_t *rma             = tu_rma_of(endpoint->worker);
    const void *data          = NULL;
    uint64_t length           = 0;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags        = UCP_AM_SEND_FLAG_REPLY,
        .cb.send      = request_sent,
        .user_data    = transfer,
    };
    ucs_status_ptr_t answer;

    if (transfer->iov != NULL) {
        data                = transfer->iov;
        length              = transfer->range_count + 1;
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        param.datatype      = ucp_dt_make_iov();
        param.flags        |= UCP_AM_SEND_FLAG_EAGER;
        tu_set_memory(&param, TU_MEMORY_HOST);
    } else if (transfer->wire_ranges != NULL) {
        data   = transfer->wire_ranges;
        length = transfer->range_count * sizeof(*transfer->wire_ranges);
        tu_set_memory(&param, TU_MEMORY_HOST);
        param.flags |= UCP_AM_SEND_FLAG_EAGER;
    } else if (transfer->kind == TU_TRANSFER_PUT || transfer->kind == TU_TRANSFER_NOTE) {
        data   = transfer->buffer;
        length = transfer->length;
        tu_set_memory(&param, transfer->memory);
        param.flags |= length > EAGER_PUT ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
    } else if (transfer->kind == TU_TRANSFER_ATOMIC) {
        data   = &transfer->operands;
        length = sizeof(transfer->operands);
        tu_set_memory(&param, TU_MEMORY_HOST);
        param.flags |= UCP_AM_SEND_FLAG_EAGER;
    }
    transfer->id         = ++rma->last_id;
    transfer->request.id = tu_le64_from(transfer->id);
    transfer->state      = TU_TRANSFER_SENT;
    transfer->sending    = true;
    tu_transfers_of(endpoint)->begun++;
    tu_list_prepend(bucket_of(rma, transfer->id), &transfer->awaiting_link);
    answer = ucp_am_send_nbx(endpoint->ep, TU_REMOTE_AM_ID, &transfer->request, sizeof(transfer->request),
                             data, length, &param);
    if (!UCS_PTR_IS_PTR(answer)) {
        request_left(transfer, UCS_PTR_RAW_STATUS(answer));
    }
}

/* An answer to this transfer is not taken any more. */
static void forget(tu_transfer_t *transfer)
{
    tu_list_remove(&transfer->awaiting_link);
}

const tu_transfer_method_t tu_requester_method = {.sends = true, .begin = begin, .end = forget};

/* ---- answers ---- */

static void received(void *request, ucs_status_t status, size_t length, void *user_data)
{
    tu_transfer_t *transfer = user_data;

    if (request != NULL) {
        ucp_request_free(request);
    }
    transfer->receiving = false;
    if (status == UCS_OK && length != transfer->length) {
        status = UCS_ERR_IO_ERROR;
    }
    tu_transfer_conclude(transfer, status);
}

/* Receives the data of an answer by rendezvous. */
static void receive(tu_transfer_t *transfer, void *data)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.recv_am   = received,
        .user_data    = transfer,
    };
    ucs_status_ptr_t answer;

    tu_set_memory(&param, transfer->memory);
    transfer->receiving = true;
    answer = ucp_am_recv_data_nbx(transfer->worker->worker, data, transfer->buffer, transfer->length, &param);
    if (!UCS_PTR_IS_PTR(answer)) {
        received(NULL, UCS_PTR_RAW_STATUS(answer), transfer->length, transfer);
    }
}

/* The status for an owner's refusal. */
static ucs_status_t refusal(uint8_t status)
{
    switch (-(int)status) {
    case UCS_ERR_INVALID_ADDR:
        return UCS_ERR_INVALID_ADDR;
    case UCS_ERR_NO_MEMORY:
        return UCS_ERR_NO_MEMORY;
    case UCS_ERR_NO_RESOURCE:
        return UCS_ERR_NO_RESOURCE;
    default:
        return UCS_ERR_NO_ELEM;
    }
}

/* Takes the answer to an atomic. */
static void take_old_value(tu_transfer_t *transfer, const void *data, size_t length, bool rendezvous)
{
    if (rendezvous || length != sizeof(tu_le64_t)) {
        tu_transfer_conclude(transfer, UCS_ERR_IO_ERROR);
        return;
    }
    tu_transfer_store_integer(transfer->buffer, tu_le64_load(data), transfer->length);
    tu_transfer_conclude(transfer, UCS_OK);
}

/* Checks and takes an answer. */
void tu_requester_answered(tu_rma_t *rma, const tu_remote_answer_t *answer, void *data, size_t length, bool rendezvous)
{
    tu_transfer_t *transfer = find(rma, tu_le64_to(answer->id));

    if (transfer == NULL) {
        return; /* the transfer was cancelled meanwhile */
    }
    if (answer->status != 0) {
        tu_transfer_conclude(transfer, refusal(answer->status));
    } else if (transfer->kind == TU_TRANSFER_PUT || transfer->kind == TU_TRANSFER_NOTE) {
        tu_transfer_conclude(transfer, UCS_OK);
    } else if (transfer->kind == TU_TRANSFER_ATOMIC) {
        take_old_value(transfer, data, length, rendezvous);
    } else if (length != transfer->length || (!rendezvous && transfer->memory > TU_MEMORY_HOST)) {
        tu_transfer_conclude(transfer, UCS_ERR_IO_ERROR);
    } else if (!rendezvous) {
        tu_gathered_scatter(tu_ranges_of(transfer), transfer->range_count, data);
        tu_transfer_conclude(transfer, UCS_OK);
    } else if (transfer->wire_ranges != NULL) {
        tu_transfer_conclude(transfer, UCS_ERR_IO_ERROR); /* nobody asked for that */
    } else {
        forget(transfer); /* a second answer is not taken */
        receive(transfer, data);
    }
}
