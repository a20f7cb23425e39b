/* Sending: credit, the sends that wait for it, batches, and control frames.
 *
 * The peer holds `peer_window` bytes of messages that its program has not read. Each message costs its length and some
 * bytes more. A send without credit waits. Its tag queue is in a line while its first send waits; when there is credit
 * for that, it is reserved, and its task woken; the next send of the queue may then be reserved after the first was
 * sent. So the messages of a queue stay in order, and queues take turns. An admitted queue needs no credit.
 *
 * A message gets its number when it is sent, not when its cost is reserved: an ADMIT names the last message that had
 * arrived, and if a number of that queue was never sent, the admission would be taken for void. */
#include <string.h>

#include "../little_endian.h"
#include "link.h"

#define SMALL_OVERHEAD 352
#define LARGE_OVERHEAD 512
/* What a message costs that stays with its sender. */
#define ANNOUNCEMENT_COST 8960
/* Within which one message closely follows another. */
#define FOLLOWS_NANOSECONDS 75000

#define MOST_IN_A_GROUP 0xffff

/* ---- credit ---- */

int64_t tu_link_cost(size_t length, uint64_t threshold)
{
    if (threshold != 0 && length >= threshold) {
        return ANNOUNCEMENT_COST;
    }
    return (int64_t)length + (length <= TU_SMALL_MESSAGE ? SMALL_OVERHEAD : LARGE_OVERHEAD);
}

static bool suffices(const tu_link_t *link, int64_t amount)
{
    return amount <= link->credit || (link->credit == (int64_t)link->terms.peer_window && amount <= TU_LINK_LONE);
}

/* Tells the peer, once after each grant, that something cannot be sent. */
static void report_stalled(tu_link_t *link)
{
    char frame[9] = {TU_FRAME_STALLED};

    if (link->reported != link->grants + 1) {
        link->reported = link->grants + 1;
        tu_le64_store(frame + 1, link->grants);
        tu_link_send_frame(link, frame, sizeof(frame), false);
    }
}

static tu_token_t *first_send(const tu_queue_t *queue)
{
    return TU_LIST_FIRST(&queue->sends, tu_token_t, in_queue);
}

static void leave_line(tu_link_t *link, tu_queue_t *queue)
{
    link->line_count -= tu_list_is_linked(&queue->in_line);
    tu_list_remove(&queue->in_line);
}

/* The first send of a queue may go on. */
static void reserve(tu_link_t *link, tu_queue_t *queue)
{
    tu_token_t *token = first_send(queue);

    leave_line(link, queue);
    link->credit   -= token->cost;
    token->reserved = true;
    tu_token_wake(token);
}

void tu_sends_wake(tu_link_t *link)
{
    tu_queue_t *queue;

    while ((queue = TU_LIST_FIRST(&link->line, tu_queue_t, in_line)) != NULL &&
           suffices(link, first_send(queue)->cost)) {
        reserve(link, queue);
    }
    if (!tu_list_is_empty(&link->line)) {
        report_stalled(link);
    }
}

void tu_sends_admitted(tu_link_t *link, tu_queue_t *queue)
{
    if (tu_list_is_linked(&queue->in_line)) {
        reserve(link, queue);
    }
}

/* The first send of a queue has gone: the next one waits for its turn. */
static void line_up(tu_link_t *link, tu_queue_t *queue)
{
    tu_token_t *next = first_send(queue);

    if (next == NULL || next->reserved) {
        return;
    }
    if (!tu_list_is_linked(&queue->in_line)) {
        tu_list_append(&link->line, &queue->in_line);
        link->line_count++;
    }
    if (queue->admitted_by_peer) {
        reserve(link, queue);
    }
}

/* A send has left. */
static void send_gone(tu_token_t *token)
{
    tu_link_t *link   = token->link;
    tu_queue_t *queue = token->queue;

    tu_list_remove(&token->in_queue);
    if (tu_list_is_empty(&queue->sends)) {
        leave_line(link, queue);
    }
    line_up(link, queue);
    tu_sends_wake(link);
    tu_queue_forget_if_idle(link, queue);
    tu_token_free(token);
}

static void sent(tu_link_t *link, tu_queue_t *queue, size_t length)
{
    link->charged    += tu_link_cost(length, link->terms.threshold);
    queue->last_sent  = ++link->sent;
    link->bytes_sent += length;
    if (queue->admitted_by_peer) {
        queue->admitted_by_peer = false;
        link->admissions_of_peer--;
    }
}

/* ---- frames and batches that UCX has ---- */

static void outgoing_over(tu_outgoing_t *outgoing, ucs_status_t status)
{
    tu_link_t *link = outgoing->of;

    tu_list_remove(&outgoing->link);
    outgoing->links->kept--;
    if (link != NULL) {
        link->kept_count--;
        if (status != UCS_OK && !link->detached) { /* what ends with its endpoint is no failure */
            tu_link_broke(link, status);
        }
        if (link->links->spare == NULL && outgoing->batch) {
            link->links->spare = outgoing;
            return;
        }
    }
    free(outgoing);
}

static void outgoing_sent(void *request, ucs_status_t status, void *user_data)
{
    outgoing_over(user_data, status);
    ucp_request_free(request);
}

static void post_outgoing(tu_link_t *link, uint32_t number, tu_outgoing_t *outgoing)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send     = outgoing_sent,
        .user_data   = outgoing,
        .datatype    = ucp_dt_make_contig(1),
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    uint64_t tag = link->terms.peer_id << 32 | number;
    ucs_status_ptr_t answer;
    int64_t verdict;

    outgoing->of    = link;
    outgoing->links = link->links;
    tu_list_append(&link->kept, &outgoing->link);
    link->kept_count++;
    link->links->kept++;
    if (link->outlet != NULL) {
        verdict = link->outlet(link->outlet_context, number, outgoing->data, outgoing->size);
        outgoing_over(outgoing, verdict < 0 ? (ucs_status_t)verdict : UCS_OK);
        return;
    }
    link->endpoint->worker->others++;
    answer = ucp_tag_send_nbx(link->endpoint->ep, outgoing->data, outgoing->size, tag, &param);
    if (UCS_PTR_IS_PTR(answer)) { /* its callback comes, or has come */
        link->links->posted = link->links->has_news = true;
    } else {
        outgoing_over(outgoing, UCS_PTR_RAW_STATUS(answer));
    }
}

/* ---- batches ---- */

/* Returns false if the link defers nothing, or there is no memory. */
static bool batch_begin(tu_link_t *link)
{
    tu_links_t *links = link->links;

    if (!link->terms.defers) {
        return false;
    }
    link->batch  = links->spare;
    links->spare = NULL;
    if (link->batch == NULL) {
        link->batch = tu_malloc(sizeof(*link->batch) + TU_LONGEST_BATCH);
    }
    if (link->batch == NULL) {
        return false;
    }
    tu_list_init(&link->batch->link);
    link->batch->batch = true;
    link->batch->size  = 0;
    link->group_count = 0;
    tu_list_append(&links->batches, &link->in_batches);
    links->has_news = true;
    return true;
}

/* Adds a small message or a frame. Returns true if another may find no room. */
static bool batch_add(tu_link_t *link, uint32_t number, const void *data, size_t length)
{
    tu_outgoing_t *batch = link->batch;

    if (link->group_count == 0 || number != link->group || length != link->group_length ||
        link->group_count == MOST_IN_A_GROUP || number == TU_CONTROL_QUEUE) {
        link->group        = number;
        link->group_length = (uint32_t)length;
        link->group_count  = 0;
        link->head         = batch->size;
        tu_le32_store(batch->data + link->head, number);
        tu_le16_store(batch->data + link->head + 4, (uint16_t)length);
        batch->size += TU_GROUP_HEAD;
    }
    memcpy(batch->data + batch->size, data, length);
    batch->size += length;
    tu_le16_store(batch->data + link->head + 6, (uint16_t)++link->group_count);
    return batch->size > TU_LONGEST_BATCH - TU_GROUP_HEAD - TU_SMALL_MESSAGE;
}

int64_t tu_link_flush(tu_link_t *link)
{
    tu_outgoing_t *batch = link->batch;

    if (batch != NULL) {
        link->batch = NULL;
        tu_list_remove(&link->in_batches);
        link->links->batches_sent++;
        post_outgoing(link, TU_BATCH_QUEUE, batch);
    }
    return link->status;
}

void tu_links_flush(tu_links_t *links)
{
    tu_link_t *link;

    while ((link = TU_LIST_FIRST(&links->batches, tu_link_t, in_batches)) != NULL) {
        tu_link_flush(link);
    }
}

void tu_link_send_each(tu_link_t *link)
{
    tu_link_flush(link);
    link->terms.defers = false;
}

static uint64_t clock_of(const tu_link_t *link)
{
    return link->outlet != NULL ? 0 : tu_now();
}

void tu_link_expect_more(tu_link_t *link)
{
    link->sent_at         = clock_of(link);
    link->sent_progressed = tu_links_count_progress(link->links);
}

/* ---- frames ---- */

void tu_link_send_frame(tu_link_t *link, const void *frame, size_t length, bool later)
{
    tu_outgoing_t *outgoing;
    char owed[TU_LONGEST_FRAME];
    size_t unreported;

    if (link->detached || link->status != UCS_OK) {
        return;
    }
    if (length > TU_LONGEST_FRAME || link->kept_count > TU_MOST_KEPT) {
        tu_link_broke(link, length > TU_LONGEST_FRAME ? UCS_ERR_INVALID_PARAM : UCS_ERR_EXCEEDS_LIMIT);
        return;
    }
    unreported = link->unreported_length;
    if (unreported > 0) {
        link->unreported_length = 0;
        memcpy(owed, link->unreported, unreported);
        tu_link_send_frame(link, owed, unreported, later);
    }
    if (later && (link->batch != NULL || batch_begin(link))) {
        if (batch_add(link, TU_CONTROL_QUEUE, frame, length)) {
            tu_link_flush(link);
        }
        return;
    }
    if (tu_link_flush(link) != UCS_OK) {
        return;
    }
    outgoing = tu_malloc(sizeof(*outgoing) + length);
    if (outgoing == NULL && *(const char *)frame == TU_FRAME_DROPPED) {
        memcpy(link->unreported, frame, length); /* nobody waits for it; of several, one is reported */
        link->unreported_length = length;
        return;
    }
    if (outgoing == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY); /* otherwise a peer that waits for it would wait for ever */
        return;
    }
    memcpy(outgoing->data, frame, length);
    outgoing->batch = false;
    outgoing->size  = length;
    tu_list_init(&outgoing->link);
    post_outgoing(link, TU_CONTROL_QUEUE, outgoing);
}

/* ---- messages ---- */

/* Gives a message to UCX, or adds it to the batch. Its queue is one of ours: the peer reads the other direction. */
static int64_t send_now(tu_link_t *link, tu_queue_t *queue, const void *data, size_t length)
{
    uint32_t number = tu_queue_other(queue->number);
    bool follows    = false;
    uint64_t now, progressed;

    if (length <= TU_SMALL_MESSAGE) {
        now        = clock_of(link);
        progressed = tu_links_count_progress(link->links);
        follows    = link->batch != NULL ||
                     (progressed == link->sent_progressed && now - link->sent_at < FOLLOWS_NANOSECONDS);
        if (link->batch == NULL) {
            link->sent_at         = now;
            link->sent_progressed = progressed;
            follows               = follows && batch_begin(link);
        }
        if (follows) { /* other tasks may run for long before the thread sleeps */
            if (batch_add(link, number, data, length) || now - link->sent_at > FOLLOWS_NANOSECONDS) {
                return tu_link_flush(link);
            }
            return TU_LINK_BATCHED;
        }
    } else if (tu_link_flush(link) != UCS_OK) {
        return link->status;
    }
    return link->outlet != NULL ?
               link->outlet(link->outlet_context, number, data, length) :
               tu_tag_send_one(link->endpoint, data, length, TU_MEMORY_HOST, link->terms.peer_id << 32 | number);
}

/* Why nothing can be sent to a queue; 0: something can. */
static int64_t cannot_send(const tu_link_t *link, const tu_queue_t *queue)
{
    if (link->detached || link->sends_end || (queue != NULL && queue->sends_end)) {
        return TU_LINK_ENDED;
    }
    return link->status;
}

/* 0: a message may be sent now; otherwise why not. */
static int64_t may_send(tu_link_t *link, tu_queue_t *queue, size_t length)
{
    int64_t amount  = tu_link_cost(length, link->terms.threshold);
    int64_t verdict = cannot_send(link, queue);

    if (verdict != 0 || queue == NULL) {
        return verdict != 0 ? verdict : UCS_ERR_NO_MEMORY;
    }
    if (tu_list_is_empty(&queue->sends) &&
        (queue->admitted_by_peer || (tu_list_is_empty(&link->line) && suffices(link, amount)))) {
        return 0;
    }
    report_stalled(link);
    return link->status != UCS_OK ? link->status : TU_LINK_WAITS;
}

static int64_t no_send(tu_link_t *link, tu_queue_t *queue, int64_t verdict)
{
    if (queue != NULL) {
        tu_queue_forget_if_idle(link, queue);
    }
    return verdict;
}

int64_t tu_link_may_send(tu_link_t *link, uint32_t number, size_t length)
{
    tu_queue_t *queue = tu_queue_make(link, number);
    int64_t verdict   = may_send(link, queue, length);

    if (verdict == 0) {
        verdict = tu_link_flush(link);
    }
    return verdict == 0 ? 0 : no_send(link, queue, verdict);
}

void tu_link_was_sent(tu_link_t *link, uint32_t number, size_t length)
{
    link->credit -= tu_link_cost(length, link->terms.threshold);
    sent(link, tu_queue_find(link, number), length);
}

int64_t tu_link_send(tu_link_t *link, uint32_t number, const void *data, size_t length)
{
    tu_queue_t *queue = tu_queue_make(link, number);
    int64_t verdict   = may_send(link, queue, length);

    if (verdict == 0) {
        verdict = send_now(link, queue, data, length);
    }
    if (verdict < 0) {
        return no_send(link, queue, verdict);
    }
    link->credit -= tu_link_cost(length, link->terms.threshold);
    sent(link, queue, length);
    return verdict;
}

tu_token_t *tu_link_wait_send(tu_link_t *link, uint32_t number, size_t length)
{
    tu_token_t *token = tu_token_new(link, 0);
    tu_queue_t *queue = token == NULL ? NULL : tu_queue_make(link, number);

    if (queue == NULL) {
        if (token != NULL) {
            tu_token_free(token);
        }
        return NULL;
    }
    token->queue = queue;
    token->cost  = tu_link_cost(length, link->terms.threshold);
    tu_list_append(&queue->sends, &token->in_queue);
    if (cannot_send(link, queue) != 0) {
        tu_token_wake(token);
    } else {
        line_up(link, queue);
        tu_sends_wake(link);
    }
    return token;
}

static int64_t may_send_reserved(const tu_token_t *token)
{
    int64_t verdict = cannot_send(token->link, token->queue);

    return verdict != 0 ? verdict : token->reserved ? 0 : TU_LINK_WAITS;
}

int64_t tu_token_may_send(tu_token_t *token)
{
    int64_t verdict = may_send_reserved(token);

    return verdict != 0 ? verdict : tu_link_flush(token->link);
}

void tu_token_was_sent(tu_token_t *token, size_t length)
{
    token->reserved = false; /* it was paid */
    sent(token->link, token->queue, length);
    tu_link_leave_send(token);
}

int64_t tu_link_send_reserved(tu_token_t *token, const void *data, size_t length)
{
    int64_t verdict = may_send_reserved(token);

    if (verdict == TU_LINK_WAITS) {
        return verdict;
    }
    if (verdict == 0) {
        verdict = send_now(token->link, token->queue, data, length);
    }
    if (verdict >= 0) {
        tu_token_was_sent(token, length);
    } else {
        tu_link_leave_send(token);
    }
    return verdict;
}

void tu_link_leave_send(tu_token_t *token)
{
    if (token->reserved) {
        token->link->credit += token->cost;
    }
    send_gone(token);
}

void tu_sends_end(tu_link_t *link, tu_queue_t *queue)
{
    tu_token_t *token;

    if (cannot_send(link, queue) != 0) {
        TU_LIST_FOR_EACH(token, &queue->sends, in_queue) {
            tu_token_wake(token);
        }
    }
}
