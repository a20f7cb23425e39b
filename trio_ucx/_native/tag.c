/* Tag messages: sends, receives and probes, with buffers of any kind. */
#include <string.h>

#include "native.h"

static void message_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data)
{
    tu_operation_done(user_data, request, status, info->length, info->sender_tag);
}

int64_t tu_tag_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers, uint64_t tag, bool sync)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, buffers);

    if (verdict != 0) {
        return verdict;
    }
    return tu_post_end(&post, sync ? ucp_tag_send_sync_nbx(endpoint->ep, post.address, post.count, tag, &post.param) :
                                     ucp_tag_send_nbx(endpoint->ep, post.address, post.count, tag, &post.param));
}

int64_t tu_tag_send_one(tu_endpoint_t *endpoint, const void *address, size_t length, int memory, uint64_t tag)
{
    void *addresses[1] = {(void *)(uintptr_t)address};
    tu_buffers_t one   = {.count = 1, .addresses = addresses, .lengths = &length, .memory = memory};

    endpoint->worker->others++;
    return tu_tag_send(endpoint, &one, tag, false);
}

/* Begins a receive. UCX writes `info` if it completes inside the call. */
static int64_t begin_receive(tu_post_t *post, tu_worker_t *worker, const tu_buffers_t *buffers,
                             ucp_tag_recv_info_t *info)
{
    int64_t verdict = tu_post_begin(post, worker, buffers);

    post->param.op_attr_mask      |= UCP_OP_ATTR_FIELD_RECV_INFO;
    post->param.cb.recv            = message_received;
    post->param.recv_info.tag_info = info;
    memset(info, 0, sizeof(*info));
    return verdict;
}

static int64_t end_receive(tu_post_t *post, ucs_status_ptr_t answer, const ucp_tag_recv_info_t *info,
                           tu_received_t *received)
{
    received->length = info->length;
    received->tag    = info->sender_tag;
    return tu_post_end(post, answer);
}

/* On a worker that has Connections, lets a raw receive or probe match none of their messages. Returns false if it asks
 * for these only. */
static bool leave_claimed(const tu_worker_t *worker, uint64_t *tag, uint64_t *mask)
{
    if (*tag & *mask & worker->claimed_bit) {
        return false;
    }
    *tag  &= ~worker->claimed_bit;
    *mask |= worker->claimed_bit;
    return true;
}

/* A receive that asks for messages of Connections is refused as UCS_ERR_INVALID_PARAM. */
int64_t tu_tag_receive(tu_worker_t *worker, const tu_buffers_t *buffers, uint64_t tag, uint64_t mask,
                       tu_received_t *received)
{
    tu_post_t post;
    ucp_tag_recv_info_t info;
    int64_t verdict;
    ucs_status_ptr_t answer;

    if (!leave_claimed(worker, &tag, &mask)) {
        return UCS_ERR_INVALID_PARAM;
    }
    verdict = begin_receive(&post, worker, buffers, &info);
    if (verdict != 0) {
        return verdict;
    }
    if (worker->loses_info) {
        post.param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    }
    answer = ucp_tag_recv_nbx(worker->worker, post.address, post.count, tag, mask, &post.param);
    return end_receive(&post, answer, &info, received);
}

int64_t tu_tag_receive_one(tu_worker_t *worker, void *address, size_t length, int memory, uint64_t tag, uint64_t mask,
                           tu_received_t *received)
{
    tu_buffers_t one = {.count = 1, .addresses = &address, .lengths = &length, .memory = memory};

    return tu_tag_receive(worker, &one, tag, mask, received);
}

int64_t tu_message_receive(tu_worker_t *worker, uint64_t message, const tu_buffers_t *buffers,
                           tu_received_t *received)
{
    tu_post_t post;
    ucp_tag_recv_info_t info;
    int64_t verdict;
    ucs_status_ptr_t answer;

    if (message & TU_IS_LONG) {
        return tu_long_receive(worker, message, buffers);
    }
    verdict = begin_receive(&post, worker, buffers, &info);
    if (verdict != 0) {
        return verdict;
    }
    answer = ucp_tag_msg_recv_nbx(worker->worker, post.address, post.count, (ucp_tag_message_h)(uintptr_t)message,
                                  &post.param);
    return end_receive(&post, answer, &info, received);
}

int64_t tu_message_receive_one(tu_worker_t *worker, uint64_t message, void *address, size_t length, int memory,
                               tu_received_t *received)
{
    tu_buffers_t one = {.count = 1, .addresses = &address, .lengths = &length, .memory = memory};

    return tu_message_receive(worker, message, &one, received);
}

/* Returns the handle of a message that was removed, 1 for one that was not, 0 if there is none. */
uint64_t tu_tag_probe(tu_worker_t *worker, uint64_t tag, uint64_t mask, bool remove, tu_received_t *received)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;

    if (!leave_claimed(worker, &tag, &mask)) {
        return 0;
    }
    message = ucp_tag_probe_nb(worker->worker, tag, mask, remove, &info);
    if (message == NULL) {
        return 0;
    }
    received->length = info.length;
    received->tag    = info.sender_tag;
    return remove ? (uint64_t)(uintptr_t)message : 1;
}

/* ---- waiting for a message ---- */

/* Probes after each progress, and is over when a message matches. The operation frees it. */
typedef struct tag_wait {
    tu_hook_t hook;
    tu_operation_t *operation;
    uint64_t tag;
    uint64_t mask;
} tag_wait_t;

static void wait_done(tag_wait_t *wait, ucs_status_t status, const tu_received_t *found)
{
    tu_hook_remove(&wait->hook);
    tu_operation_done(wait->operation, NULL, status, found->length, found->tag);
}

static unsigned look_for_message(tu_hook_t *hook)
{
    tag_wait_t *wait    = TU_ITEM(hook, tag_wait_t, hook);
    tu_worker_t *worker = wait->operation->worker;
    tu_received_t found = {0};

    if (wait->tag & wait->mask & worker->claimed_bit) { /* since it began, the worker has got Connections */
        wait_done(wait, UCS_ERR_INVALID_PARAM, &found);
    } else if (tu_tag_probe(worker, wait->tag, wait->mask, false, &found) != 0) {
        wait_done(wait, UCS_OK, &found);
    } else {
        return 0;
    }
    return 1;
}

static void cancel_wait(void *owner)
{
    tu_received_t nothing = {0};

    wait_done(owner, UCS_ERR_CANCELED, &nothing);
}

/* The message stays where it is. */
int64_t tu_tag_wait(tu_worker_t *worker, uint64_t tag, uint64_t mask)
{
    tag_wait_t *wait = tu_malloc(sizeof(*wait));
    tu_post_t post;
    int64_t verdict;

    if (wait == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    verdict = tu_post_begin(&post, worker, NULL);
    if (verdict != 0) {
        free(wait);
        return verdict;
    }
    wait->operation           = post.operation;
    wait->tag                 = tag;
    wait->mask                = mask;
    post.operation->described = wait;
    post.operation->cancel    = cancel_wait;
    post.operation->owner     = wait;
    tu_hook_init(&wait->hook, look_for_message);
    tu_hook_add(worker, &wait->hook);
    return (int64_t)post.id;
}
