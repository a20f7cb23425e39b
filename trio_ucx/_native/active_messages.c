/* Active messages: handlers that put what arrives into bounded queues, and what sends and receives them. */
#include <string.h>

#include "native.h"

/* What a queued message costs besides its bytes. */
#define MESSAGE_OVERHEAD 128

/* Smaller data is copied: over shared memory UCX lends 8 KiB for each message, however small. */
#define LEND_FROM 4096

struct tu_am_queue {
    tu_worker_t *worker;
    uint64_t id;
    unsigned am_id;
    size_t max_messages;
    size_t max_bytes;
    bool refuse;               /* what happens to a rendezvous that finds the queue full: refused, or held */
    bool cut;                  /* what happens to the sender of an eager message that does, if it is known */
    bool announced;             /* its record is in the ring, or Python is still taking messages; else reserved */
    tu_am_message_t *first;
    tu_am_message_t **last;
    tu_am_counts_t counts;
};

static size_t cost(const tu_am_message_t *message)
{
    return MESSAGE_OVERHEAD + message->header_length + (message->kind == TU_AM_RENDEZVOUS ? 0 : message->length);
}

/* Which of the worker's endpoints this is: 0 for one that UCX made by itself. */
static uint64_t endpoint_id(tu_worker_t *worker, ucp_ep_h ep)
{
    tu_endpoint_t *endpoint;

    tu_ep_attr_t attr = {.field_mask = TU_EP_ATTR_USER_DATA};

    if (worker->knows_user_data && tu_ep_query(ep, &attr) == UCS_OK) {
        endpoint = attr.user_data;
        return endpoint != NULL ? endpoint->id : 0;
    }
    TU_LIST_FOR_EACH(endpoint, &worker->endpoints, link) {
        if (endpoint->ep == ep) {
            return endpoint->id;
        }
    }
    return 0;
}

uint64_t tu_am_sender(tu_worker_t *worker, const ucp_am_recv_param_t *param)
{
    return (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) ? endpoint_id(worker, param->reply_ep) : 0;
}

static void announce(tu_am_queue_t *queue)
{
    if (!queue->announced) {
        queue->announced = true;
        tu_ring_unreserve(queue->worker);
        tu_ring_append(queue->worker, TU_RECORD_AM, queue->id, UCS_OK, 0, 0, 0);
    }
}

/* A message that finds the queue full. */
static ucs_status_t turn_away(tu_am_queue_t *queue, uint64_t sender, bool rendezvous)
{
    if (rendezvous) {
        queue->counts.refused++;
        return UCS_ERR_NO_RESOURCE;
    }
    queue->counts.dropped++;
    if (queue->cut && sender != 0 && tu_ring_has_slack(queue->worker)) {
        tu_ring_append(queue->worker, TU_RECORD_CUT, sender, UCS_ERR_EXCEEDS_LIMIT, 0, 0, 0);
    }
    return UCS_OK;
}

static ucs_status_t message_arrived(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                    const ucp_am_recv_param_t *param)
{
    tu_am_queue_t *queue = arg;
    bool rendezvous      = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    bool lent            = !rendezvous && length >= LEND_FROM && (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;
    size_t copied        = rendezvous || lent ? 0 : length;
    uint64_t sender      = tu_am_sender(queue->worker, param);
    bool full            = queue->first != NULL && /* an empty one takes any message, or some could never be received */
                           (queue->counts.messages >= queue->max_messages ||
                            queue->counts.bytes + MESSAGE_OVERHEAD + header_length + (rendezvous ? 0 : length) >
                                    queue->max_bytes);
    tu_am_message_t *message;

    if (full && !(rendezvous && !queue->refuse)) {
        return turn_away(queue, sender, rendezvous);
    }
    message = malloc(sizeof(*message) + header_length + copied);
    if (message == NULL) {
        return turn_away(queue, sender, rendezvous);
    }
    message->next          = NULL;
    message->kind          = rendezvous ? TU_AM_RENDEZVOUS : lent ? TU_AM_LENT : TU_AM_COPIED;
    message->endpoint      = sender;
    message->length        = length;
    message->header_length = header_length;
    message->header        = (char *)(message + 1);
    message->data          = copied > 0 ? message->header + header_length : data;
    if (header_length > 0) {
        memcpy(message->header, header, header_length);
    }
    if (copied > 0) {
        memcpy(message->data, data, copied);
    }
    *queue->last = message;
    queue->last  = &message->next;
    queue->counts.messages++;
    queue->counts.bytes += cost(message);
    announce(queue);
    return rendezvous || lent ? UCS_INPROGRESS : UCS_OK;
}

/* For ids whose queue was closed: UCX would print a warning for each message. The answer is UCX's own for such an id. */
static ucs_status_t nobody_is_here(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                   const ucp_am_recv_param_t *param)
{
    (void)arg;
    (void)header;
    (void)header_length;
    (void)data;
    (void)length;
    return (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) ? UCS_ERR_INVALID_PARAM : UCS_OK;
}

ucs_status_t tu_am_handle(tu_worker_t *worker, unsigned am_id, ucp_am_recv_callback_t callback, void *arg)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS,
        .id         = am_id,
        .flags      = UCP_AM_FLAG_WHOLE_MSG,
        .cb         = callback,
        .arg        = arg,
    };

    return ucp_worker_set_am_recv_handler(worker->worker, &param);
}

int tu_am_open(tu_worker_t *worker, uint64_t id, unsigned am_id, size_t max_messages, size_t max_bytes, bool refuse,
               bool cut, tu_am_queue_t **out)
{
    tu_am_queue_t *queue = calloc(1, sizeof(*queue));
    ucs_status_t status;

    if (queue == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    queue->worker       = worker;
    queue->id           = id;
    queue->am_id        = am_id;
    queue->max_messages = max_messages;
    queue->max_bytes    = max_bytes;
    queue->refuse       = refuse;
    queue->cut          = cut;
    queue->last         = &queue->first;
    if (!tu_ring_reserve(worker)) {
        free(queue);
        return UCS_ERR_NO_MEMORY;
    }
    status = tu_am_handle(worker, am_id, message_arrived, queue);
    if (status != UCS_OK) {
        tu_ring_unreserve(worker);
        free(queue);
        return status;
    }
    *out = queue;
    return UCS_OK;
}

/* Takes the oldest message; it then belongs to the caller. NULL when there is none: the next that comes is announced
 * by a record. */
tu_am_message_t *tu_am_next(tu_am_queue_t *queue)
{
    tu_am_message_t *message = queue->first;

    if (message == NULL) {
        if (queue->announced && tu_ring_reserve(queue->worker)) {
            queue->announced = false;
        }
        return NULL;
    }
    queue->first = message->next;
    if (queue->first == NULL) {
        queue->last = &queue->first;
    }
    queue->counts.messages--;
    queue->counts.bytes -= cost(message);
    return message;
}

void tu_am_counts(tu_am_queue_t *queue, tu_am_counts_t *out)
{
    *out = queue->counts;
}

/* Ends the queue. The sender of a rendezvous that nobody has received is told that it was: UCX has no other answer. */
void tu_am_close(tu_am_queue_t *queue)
{
    tu_am_message_t *message;

    tu_am_handle(queue->worker, queue->am_id, nobody_is_here, NULL);
    while ((message = tu_am_next(queue)) != NULL) {
        tu_am_release(queue->worker, message);
    }
    if (!queue->announced) {
        tu_ring_unreserve(queue->worker);
    }
    free(queue);
}

/* Receives the message's data, whatever its kind. The caller keeps the message until the operation completed, then
 * frees it with tu_am_forget. */
int64_t tu_am_receive(tu_worker_t *worker, tu_am_message_t *message, const tu_buffers_t *buffers)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, worker, buffers);

    if (verdict != 0) {
        return verdict;
    }
    post.param.cb.recv_am = tu_operation_received;
    return tu_post_end(&post, ucp_am_recv_data_nbx(worker->worker, message->data, post.address, post.count,
                                                   &post.param));
}

/* Frees a message whose data UCX has taken back. */
void tu_am_forget(tu_am_message_t *message)
{
    free(message);
}

void tu_am_release(tu_worker_t *worker, tu_am_message_t *message)
{
    if (message->kind != TU_AM_COPIED) {
        ucp_am_data_release(worker->worker, message->data);
    }
    free(message);
}

/* The header must stay until the operation completes. */
int64_t tu_am_send(tu_endpoint_t *endpoint, unsigned am_id, const char *header, size_t header_length,
                   const tu_buffers_t *buffers, bool reply, int protocol)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, buffers);

    if (verdict != 0) {
        return verdict;
    }
    post.param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    post.param.flags         = (reply ? UCP_AM_SEND_FLAG_REPLY : 0) |
                               (protocol == TU_AM_SEND_EAGER      ? UCP_AM_SEND_FLAG_EAGER :
                                protocol == TU_AM_SEND_RENDEZVOUS ? UCP_AM_SEND_FLAG_RNDV :
                                                                    0);
    return tu_post_end(&post, ucp_am_send_nbx(endpoint->ep, am_id, header, header_length, post.address, post.count,
                                              &post.param));
}
