/* Receiving: messages in their tag queues, the tokens of receives that wait, and what is granted to the peer.
 *
 * In each queue the place at index n is served by message n. So messages go to receives in the order in which these began,
 * in whatever order their tasks run. A receive without a token takes the first message behind those.
 *
 * All queues share the window. A peer that lacks credit says so (STALLED); a receive that waits at an empty queue then
 * admits its next message. */
#include <string.h>

#include "../little_endian.h"
#include "link.h"

#define FRAME_GRANT 1
#define FRAME_STALLED 2
#define FRAME_ADMIT 3
#define FRAME_DROPPED 12

/* ---- grants ---- */

/* Grants what was read. Returns false if that is nothing. */
static bool grant(tu_link_t *link)
{
    int64_t amount = link->outstanding - link->unread;
    char frame[17] = {FRAME_GRANT};

    if (amount < 1) {
        return false;
    }
    link->outstanding -= amount;
    link->grants_sent++;
    link->stalled = false; /* a peer that still is will say so */
    tu_le64_store(frame + 1, (uint64_t)amount);
    tu_le64_store(frame + 9, link->received);
    tu_link_send_frame(link, frame, sizeof(frame), false);
    return true;
}

static void consumed(tu_link_t *link, size_t length)
{
    int64_t worthwhile = link->terms.window < 4 ? 1 : (int64_t)(link->terms.window / 4);

    link->unread -= tu_link_cost(length, link->terms.peer_threshold);
    if (link->outstanding - link->unread >= worthwhile || (link->stalled && link->unread == 0)) {
        grant(link);
    }
}

/* A receive has found a queue empty: if its peer lacks credit, it gets some, and may send the next message. */
static void found_empty(tu_link_t *link, tu_queue_t *queue)
{
    char frame[13] = {FRAME_ADMIT};

    if (!link->stalled) {
        return;
    }
    grant(link);
    if (!queue->admitted_by_us && link->admissions < TU_MOST_ADMISSIONS) {
        queue->admitted_by_us = true;
        link->admissions++;
        tu_le32_store(frame + 1, queue->number);
        tu_le64_store(frame + 5, link->received);
        tu_link_send_frame(link, frame, sizeof(frame), false);
    }
}

/* ---- places ---- */

static tu_place_t *place_after(tu_queue_t *queue, tu_place_t *place)
{
    return TU_LIST_NEXT(&queue->places, place, link);
}

/* There is one message more for the places, or one place less before them. */
static void serve_next(tu_queue_t *queue)
{
    tu_place_t *place = queue->lacks;

    if (place != NULL) {
        place->has   = true;
        queue->lacks = place_after(queue, place);
        if (queue->lacks == NULL) {
            tu_list_remove(&queue->awaited);
        }
        tu_token_wake(place->token);
    }
}

static void place_add(tu_link_t *link, tu_place_t *place)
{
    tu_queue_t *queue = place->queue;

    place->has = queue->count > queue->waiting++;
    tu_list_append(&queue->places, &place->link);
    if (!place->has && queue->lacks == NULL) {
        queue->lacks = place;
        tu_list_append(&link->awaited, &queue->awaited);
    }
}

/* Its message, if it has one, is for the next place. */
static void place_remove(tu_place_t *place)
{
    tu_queue_t *queue = place->queue;

    if (place == queue->lacks) {
        queue->lacks = place_after(queue, place);
        if (queue->lacks == NULL) {
            tu_list_remove(&queue->awaited);
        }
    }
    tu_list_remove(&place->link);
    queue->waiting--;
    if (place->has) {
        serve_next(queue);
    }
}

/* ---- messages ---- */

static bool ended(const tu_link_t *link, uint32_t number, const tu_queue_t *queue)
{
    return link->receives_end || (link->drains && (number < TU_CONTROL_QUEUE || number == TU_STREAM_QUEUE)) ||
           (queue != NULL && queue->receives_end);
}

/* Where the queue has its message with this index. */
static tu_small_t **message_at(tu_queue_t *queue, size_t index)
{
    tu_small_t **from = &queue->first;

    while (index-- > 0) {
        from = &(*from)->next;
    }
    return from;
}

/* Takes a message out of its queue. The caller frees it. */
static tu_small_t *message_remove(tu_link_t *link, tu_queue_t *queue, tu_small_t **from)
{
    tu_small_t *message = *from;

    *from = message->next;
    if (message->next == NULL) {
        queue->last = from;
    }
    queue->count--;
    consumed(link, message->length);
    return message;
}

void tu_messages_drop(tu_link_t *link, tu_queue_t *queue)
{
    while (queue->count > 0) {
        free(message_remove(link, queue, &queue->first));
    }
}

/* Drops the messages but the last that no place has. */
static void keep_newest(tu_link_t *link, tu_queue_t *queue)
{
    while (queue->count > queue->waiting + 1) {
        free(message_remove(link, queue, message_at(queue, queue->waiting)));
    }
}

/* Reads the byte stream, and joins its pieces. */
static int64_t read_stream(tu_link_t *link, tu_queue_t *queue, size_t limit, bool look)
{
    size_t done = 0, part;
    tu_small_t *piece;

    for (piece = queue->first; piece != NULL && done < limit && !queue->at_end; piece = look ? piece->next : queue->first) {
        if (piece->length == 0) {
            if (done > 0 || look) {
                break;
            }
            queue->at_end = true;
        }
        part = piece->length - piece->taken;
        part = part < limit - done ? part : limit - done;
        memcpy(link->links->out + done, piece->data + piece->taken, part);
        done += part;
        if (!look) {
            piece->taken += (uint32_t)part;
            if (piece->taken == piece->length) {
                free(message_remove(link, queue, &queue->first));
            }
        }
    }
    return (int64_t)done;
}

static void report_dropped(tu_link_t *link, const tu_queue_t *queue, size_t length)
{
    char frame[13] = {FRAME_DROPPED};

    link->links->length = length;
    tu_le32_store(frame + 1, queue->number);
    tu_le64_store(frame + 5, length);
    tu_link_send_frame(link, frame, sizeof(frame), false);
}

static int64_t take_at(tu_link_t *link, tu_queue_t *queue, size_t index, size_t limit, bool look)
{
    tu_small_t **from = message_at(queue, index), *message = *from;
    size_t length     = message->length;

    memcpy(link->links->out, message->data, length < limit ? length : limit);
    if (look) {
        return (int64_t)length;
    }
    free(message_remove(link, queue, from));
    if (length > limit) {
        report_dropped(link, queue, length);
        return TU_LINK_TOO_LONG;
    }
    return (int64_t)length;
}

static bool message_add(tu_link_t *link, tu_queue_t *queue, const char *data, size_t length)
{
    tu_small_t *message = tu_malloc(sizeof(*message) + length);

    if (message == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY);
        return false;
    }
    message->next   = NULL;
    message->length = (uint32_t)length;
    message->taken  = 0;
    memcpy(message->data, data, length);
    *queue->last = message;
    queue->last  = &message->next;
    queue->count++;
    return true;
}

static void message_arrived(tu_link_t *link, tu_queue_t *queue, size_t length)
{
    int64_t amount = tu_link_cost(length, link->terms.peer_threshold);

    link->received++;
    link->bytes_received += length;
    link->outstanding    += amount;
    link->unread         += amount;
    if (queue->admitted_by_us) {
        queue->admitted_by_us = false;
        link->admissions--;
    }
    if (queue->newest) {
        keep_newest(link, queue);
    }
    serve_next(queue);
    if (queue->lacks != NULL) {
        found_empty(link, queue);
    }
}

/* ---- frames ---- */

static ucs_status_t grant_arrived(tu_link_t *link, uint64_t amount, uint64_t received)
{
    if (amount > (uint64_t)((int64_t)link->terms.peer_window - link->credit)) {
        return UCS_ERR_INVALID_PARAM; /* it grants more than was sent */
    }
    link->credit       += (int64_t)amount;
    link->arrived_there = received;
    link->grants++;
    tu_sends_wake(link);
    tu_queues_sweep(link);
    return UCS_OK;
}

static void stalled_arrived(tu_link_t *link, uint64_t grants)
{
    tu_list_t *end = link->awaited.previous, *next;
    tu_queue_t *queue;

    if (grants != link->grants_sent || grant(link)) {
        return; /* a grant is on its way */
    }
    link->stalled = true;
    if (tu_list_is_empty(&link->awaited)) {
        return;
    }
    for (next = link->awaited.next;; next = next->next) {
        queue = TU_ITEM(next, tu_queue_t, awaited);
        found_empty(link, queue);
        if (next == end) {
            return;
        }
    }
}

static ucs_status_t admit_arrived(tu_link_t *link, uint32_t written, uint64_t received)
{
    uint32_t number = tu_queue_other(written);
    tu_queue_t *queue;

    if (!tu_queue_is_valid(written)) {
        return UCS_ERR_INVALID_PARAM;
    }
    queue = tu_queue_find(link, number);
    if (queue == NULL && number > written) {
        return UCS_OK; /* a conversation that was opened here, and is over */
    }
    if (queue == NULL && (queue = tu_queue_make(link, number)) == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY);
        return UCS_OK;
    }
    link->arrived_there = received;
    if (queue->last_sent <= received && !queue->admitted_by_peer) {
        if (link->admissions_of_peer == TU_MOST_ADMISSIONS) {
            return UCS_ERR_INVALID_PARAM;
        }
        queue->admitted_by_peer = true;
        link->admissions_of_peer++;
        tu_sends_admitted(link, queue);
    }
    return UCS_OK;
}

static int frame_arrived(tu_link_t *link, const char *data, size_t length)
{
    if (length == 17 && data[0] == FRAME_GRANT) {
        return grant_arrived(link, tu_le64_load(data + 1), tu_le64_load(data + 9));
    }
    if (length == 9 && data[0] == FRAME_STALLED) {
        stalled_arrived(link, tu_le64_load(data + 1));
        return 0;
    }
    if (length == 13 && data[0] == FRAME_ADMIT) {
        return admit_arrived(link, tu_le32_load(data + 1), tu_le64_load(data + 5));
    }
    return 1;
}

int tu_link_arrived(tu_link_t *link, uint32_t number, size_t length, size_t count, const char *data)
{
    tu_queue_t *queue;

    if (link->closed || link->status != UCS_OK) {
        return 0; /* nothing is delivered behind what is missing */
    }
    if (number == TU_CONTROL_QUEUE) {
        return frame_arrived(link, data, length);
    }
    if (!tu_queue_is_valid(number)) {
        return UCS_ERR_INVALID_PARAM;
    }
    queue = tu_queue_make(link, number);
    if (queue == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY);
        return 0;
    }
    for (; count > 0 && message_add(link, queue, data, length); count--, data += length) {
        message_arrived(link, queue, length);
    }
    return 0;
}

/* ---- receives ---- */

int64_t tu_link_receive(tu_link_t *link, uint32_t number, size_t limit, bool look)
{
    tu_queue_t *queue = tu_queue_find(link, number);
    int64_t length;

    limit = limit < TU_LINK_OUT ? limit : TU_LINK_OUT;
    if (queue != NULL && (queue->count > queue->waiting || queue->at_end)) {
        length = number == TU_STREAM_QUEUE ? read_stream(link, queue, limit, look) :
                                             take_at(link, queue, queue->waiting, limit, look);
        tu_queue_forget_if_idle(link, queue);
        return length;
    }
    if (ended(link, number, queue)) {
        return TU_LINK_ENDED;
    }
    if (link->stalled) {
        queue = tu_queue_make(link, number);
        if (queue == NULL) {
            return UCS_ERR_NO_MEMORY;
        }
        found_empty(link, queue);
    }
    return TU_LINK_EMPTY;
}

/* Removes a token from all its queues. */
static void receive_gone(tu_token_t *token)
{
    tu_link_t *link = token->link;
    size_t i;

    for (i = 0; i < token->count; i++) {
        place_remove(&token->places[i]);
        if (token->places[i].queue->newest) {
            keep_newest(link, token->places[i].queue);
        }
        tu_queue_forget_if_idle(link, token->places[i].queue);
    }
    tu_token_free(token);
}

tu_token_t *tu_link_wait(tu_link_t *link, const uint32_t *numbers, size_t count)
{
    tu_token_t *token = tu_token_new(link, count);
    bool ends         = true;
    tu_place_t *place;

    if (token == NULL) {
        return NULL;
    }
    while (token->count < count) {
        place        = &token->places[token->count];
        place->token = token;
        place->queue = tu_queue_make(link, numbers[token->count]);
        if (place->queue == NULL) {
            receive_gone(token);
            return NULL;
        }
        token->count++;
        place_add(link, place);
        if (place->has || place->queue->at_end) {
            tu_token_wake(token);
        } else if (!ended(link, place->queue->number, place->queue)) {
            found_empty(link, place->queue);
            ends = false;
        }
    }
    if (ends) {
        tu_token_wake(token);
    }
    return token;
}

/* The first of its places that has a message; NULL: none has. `index`: of the message. */
static tu_place_t *place_served(tu_token_t *token, size_t *index)
{
    tu_place_t *place, *before;
    size_t i;

    for (i = 0; i < token->count; i++) {
        place = &token->places[i];
        if (place->has || place->queue->at_end) {
            *index = 0;
            for (before = TU_LIST_FIRST(&place->queue->places, tu_place_t, link); before != place;
                 before = place_after(place->queue, before)) {
                ++*index;
            }
            return place;
        }
    }
    return NULL;
}

int64_t tu_link_take(tu_token_t *token, size_t limit, bool look, uint32_t *number)
{
    tu_link_t *link = token->link;
    size_t index, i;
    tu_place_t *place = place_served(token, &index);
    int64_t length;

    tu_list_remove(&token->due);
    token->is_due = false;
    limit         = limit < TU_LINK_OUT ? limit : TU_LINK_OUT;
    if (place != NULL) {
        *number = place->queue->number;
        if (*number == TU_STREAM_QUEUE) {
            length = read_stream(link, place->queue, limit, look);
        } else {
            length = take_at(link, place->queue, index, limit, look);
        }
        if (!look) {
            place->has = false; /* it was this message */
            receive_gone(token);
        }
        return length;
    }
    for (i = 0; i < token->count; i++) {
        if (!ended(link, token->places[i].queue->number, token->places[i].queue)) {
            return TU_LINK_EMPTY;
        }
    }
    receive_gone(token);
    return TU_LINK_ENDED;
}

void tu_link_leave(tu_token_t *token)
{
    receive_gone(token);
}

int tu_link_newest(tu_link_t *link, uint32_t number)
{
    tu_queue_t *queue = tu_queue_make(link, number);

    if (queue == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    queue->newest = true;
    keep_newest(link, queue);
    return UCS_OK;
}

void tu_receives_end(tu_link_t *link, tu_queue_t *queue)
{
    tu_place_t *place;

    if (ended(link, queue->number, queue)) {
        for (place = queue->lacks; place != NULL; place = place_after(queue, place)) {
            tu_token_wake(place->token);
        }
    }
}
