/* Active messages: bounded queues for those that arrive, and sending and receiving them. */
#include <string.h>

#include "native.h"

/* What a queued message is charged beside its bytes. */
#define MESSAGE_OVERHEAD 128

/* Shorter data is copied rather than borrowed: over shared memory UCX keeps 8 KiB for each message, however short. */
#define BORROW_FROM 4096

/* Nanoseconds between two records that say that a queue drops messages. */
#define DROPS_INTERVAL 60000000000

struct tu_am_queue {
    tu_worker_t *worker;
    uint64_t id;
    unsigned am_id;
    size_t max_messages;
    size_t max_bytes;
    bool refuse;               /* a rendezvous that finds the queue full is refused; else it is queued all the same */
    bool announced;            /* Python knows that there are messages; else room for the record is reserved */
    tu_hook_t retry;           /* added while Python waits for a record and no room could be reserved for it */
    tu_list_t messages;
    tu_am_counts_t counts;
    uint64_t next_report;      /* when a message that is dropped is to be reported again; 0: at once */
};

/* A message in a queue, or in Python's hands. */
typedef struct queued {
    tu_list_t link;
    tu_am_message_t message;   /* what Python sees; header and copied data follow */
} queued_t;

static size_t cost(const tu_am_message_t *message)
{
    return MESSAGE_OVERHEAD + message->header_length + (message->kind == TU_AM_RENDEZVOUS ? 0 : message->length);
}

/* The id of this endpoint; 0 if UCX made it by itself. */
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

/* Tries again to reserve room for the record; without memory, the record of a message that arrived uses the slack. */
static unsigned reserve_again(tu_hook_t *hook)
{
    tu_am_queue_t *queue = TU_ITEM(hook, tu_am_queue_t, retry);
    bool empty           = tu_list_is_empty(&queue->messages);

    if (tu_ring_reserve(queue->worker)) {
        tu_hook_remove(hook);
        queue->announced = false;
        if (!empty) {
            announce(queue);
        }
    } else if (!empty && tu_ring_has_slack(queue->worker)) {
        tu_hook_remove(hook);
        tu_ring_append(queue->worker, TU_RECORD_AM, queue->id, UCS_OK, 0, 0, 0);
    }
    return 0;
}

/* A message that finds the queue full. */
static ucs_status_t turn_away(tu_am_queue_t *queue, bool rendezvous)
{
    if (rendezvous) {
        queue->counts.refused++;
        return UCS_ERR_NO_RESOURCE;
    }
    queue->counts.dropped++;
    if (tu_now() >= queue->next_report && tu_ring_has_slack(queue->worker)) {
        queue->next_report = tu_now() + DROPS_INTERVAL;
        tu_ring_append(queue->worker, TU_RECORD_DROPS, queue->id, UCS_OK, 0, 0, 0);
    }
    return UCS_OK;
}

static ucs_status_t message_arrived(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                    const ucp_am_recv_param_t *param)
{
    tu_am_queue_t *queue = arg;
    bool rendezvous      = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    bool borrowed        = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0 && !rendezvous && length >= BORROW_FROM;
    size_t copied        = rendezvous || borrowed ? 0 : length;
    size_t bytes         = MESSAGE_OVERHEAD + header_length + (rendezvous ? 0 : length);
    bool full            = queue->counts.messages >= queue->max_messages ||
                           queue->counts.bytes + bytes > queue->max_bytes;
    queued_t *queued;
    char *behind;

    if (tu_list_is_empty(&queue->messages)) {
        full = false; /* otherwise a message longer than the limit could never be received */
    }
    if (full && !(rendezvous && !queue->refuse)) {
        return turn_away(queue, rendezvous);
    }
    queued = tu_malloc(sizeof(*queued) + header_length + copied);
    if (queued == NULL) {
        return turn_away(queue, rendezvous);
    }
    behind          = (char *)(queued + 1);
    queued->message = (tu_am_message_t){
        .kind          = rendezvous ? TU_AM_RENDEZVOUS : borrowed ? TU_AM_BORROWED : TU_AM_COPIED,
        .endpoint      = tu_am_sender(queue->worker, param),
        .length        = length,
        .header_length = header_length,
        .header        = behind,
        .data          = copied > 0 ? behind + header_length : data,
    };
    if (header_length > 0) {
        memcpy(behind, header, header_length);
    }
    if (copied > 0) {
        memcpy(behind + header_length, data, copied);
    }
    tu_list_append(&queue->messages, &queued->link);
    queue->counts.messages++;
    queue->counts.bytes += cost(&queued->message);
    announce(queue);
    return rendezvous || borrowed ? UCS_INPROGRESS : UCS_OK;
}

/* The handler of ids whose queue was closed. Without one UCX would log a warning for each message; the answer is UCX's
 * for an id without a handler. */
static ucs_status_t message_unwanted(void *arg, const void *header, size_t header_length, void *data, size_t length,
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
               tu_am_queue_t **out)
{
    tu_am_queue_t *queue = tu_calloc(1, sizeof(*queue));
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
    tu_list_init(&queue->messages);
    tu_hook_init(&queue->retry, reserve_again);
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

static tu_am_message_t *take(tu_am_queue_t *queue)
{
    queued_t *oldest = TU_LIST_FIRST(&queue->messages, queued_t, link);

    if (oldest == NULL) {
        return NULL;
    }
    tu_list_remove(&oldest->link);
    queue->counts.messages--;
    queue->counts.bytes -= cost(&oldest->message);
    return &oldest->message;
}

/* Takes the oldest message, which belongs to the caller from then on. NULL when there is none: then a record announces
 * the next one that arrives. */
tu_am_message_t *tu_am_next(tu_am_queue_t *queue)
{
    tu_am_message_t *message = take(queue);

    if (message == NULL && queue->announced) {
        if (tu_ring_reserve(queue->worker)) {
            queue->announced = false;
            tu_hook_remove(&queue->retry);
        } else {
            tu_hook_add(queue->worker, &queue->retry);
        }
    }
    return message;
}

void tu_am_counts(tu_am_queue_t *queue, tu_am_counts_t *out)
{
    *out = queue->counts;
}

/* Ends the queue. The senders of rendezvous messages in it are told that these were received: UCX has no other
 * answer. */
void tu_am_close(tu_am_queue_t *queue)
{
    tu_am_message_t *message;

    tu_am_handle(queue->worker, queue->am_id, message_unwanted, NULL);
    while ((message = take(queue)) != NULL) {
        tu_am_release(queue->worker, message);
    }
    tu_hook_remove(&queue->retry);
    if (!queue->announced) {
        tu_ring_unreserve(queue->worker);
    }
    free(queue);
}

/* Receives the data of a message of any kind. The caller keeps the message until the operation is over, and then frees
 * it by tu_am_forget. */
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

/* Frees a message whose data tu_am_receive has given back to UCX. */
void tu_am_forget(tu_am_message_t *message)
{
    free(TU_ITEM(message, queued_t, message));
}

/* Frees a message, and gives its data back to UCX. */
void tu_am_release(tu_worker_t *worker, tu_am_message_t *message)
{
    if (message->kind != TU_AM_COPIED) {
        ucp_am_data_release(worker->worker, message->data);
    }
    tu_am_forget(message);
}

/* The header must stay until the operation is over. */
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
