/* Receiving: what arrives, and the calls that take it. A receive without a token takes the first message behind those
 * that tokens are to have. */
#include <string.h>

#include "link.h"

/* True if the peer may have sent so many messages: it had credit, or the first was admitted, or it goes by itself. What
 * is granted because of them does not count, and neither does what came by an admission before: that may have overtaken
 * sends that had their credit already. */
static bool keeps_to_window(const tu_link_t *link, const tu_queue_t *queue, int64_t amount, size_t count)
{
    int64_t before = link->outstanding - link->admitted;
    int64_t room   = (int64_t)link->terms.window - before;
    size_t most    = (room > 0 ? (size_t)(room / amount) : 0) + queue->admitted_by_us;

    return count <= most || (count == 1 && before == 0 && amount <= TU_LINK_LONE);
}

/* Messages have arrived: `data` has the bytes of small ones, one after the other; NULL: UCX has it, by its handle. Then
 * `fetched`, unless it is NULL, asks to have it received to memory of ours. */
static int arrived(tu_link_t *link, uint32_t number, size_t length, size_t count, const char *data, uint64_t handle,
                   bool whole, tu_item_t **fetched)
{
    int64_t amount = tu_link_cost(length, link->terms.peer_threshold);
    tu_queue_t *queue;

    if (!tu_queue_is_valid(number) || length > (data != NULL ? TU_LINK_OUT : TU_LONGEST_MESSAGE)) {
        return UCS_ERR_INVALID_PARAM;
    }
    queue = tu_queue_make(link, number);
    if (queue == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY);
        link->drops = true;
        return UCS_ERR_NO_MEMORY;
    }
    if (!keeps_to_window(link, queue, amount, count)) {
        tu_queue_forget_if_idle(link, queue);
        return UCS_ERR_INVALID_PARAM;
    }
    if (queue->drops) {
        tu_messages_charged(link, queue, length, count);
        tu_grant_if_due(link);
        return UCS_ERR_CANCELED;
    }
    for (; count > 0; count--) {
        if (!tu_message_add(link, queue, data, handle, whole, length)) {
            return UCS_ERR_NO_MEMORY;
        }
        if (fetched != NULL && tu_item_fetch((tu_item_t *)queue->last)) {
            *fetched = (tu_item_t *)queue->last;
        }
        tu_message_arrived(link, queue, length);
        data = data == NULL ? NULL : data + length;
    }
    tu_grant_if_due(link); /* newer messages have taken the place of older ones */
    return UCS_OK;
}

int tu_link_arrived(tu_link_t *link, uint32_t number, size_t length, size_t count, const char *data)
{
    if (link->closed || link->drops) {
        return UCS_ERR_CANCELED;
    }
    return number == TU_CONTROL_QUEUE ? tu_frame_arrived(link, data, length) :
                                        arrived(link, number, length, count, data, 0, true, NULL);
}

int tu_link_announced(tu_link_t *link, uint32_t number, uint64_t handle, size_t length, bool whole)
{
    return link->closed || link->drops ? UCS_ERR_CANCELED : arrived(link, number, length, 1, NULL, handle, whole, NULL);
}

int tu_link_fetch(tu_link_t *link, uint32_t number, uint64_t handle, size_t length, bool whole, tu_item_t **item,
                  char **data)
{
    int status = UCS_ERR_CANCELED;

    *item = NULL;
    if (!link->closed && !link->drops) {
        status = arrived(link, number, length, 1, NULL, handle, whole, item);
    }
    *data = *item == NULL ? NULL : (*item)->data;
    return status;
}

/* Reads the byte stream, and joins its pieces. */
static int64_t read_stream(tu_link_t *link, tu_queue_t *queue, size_t limit, bool look)
{
    size_t done = 0, part;
    tu_item_t *piece, *next;

    limit = limit < TU_LINK_OUT ? limit : TU_LINK_OUT;
    link->links->at = link->links->out;
    for (piece = queue->first; piece != NULL && piece->state == TU_ITEM_READY && done < limit && !queue->at_end;
         piece = next) {
        next = piece->next;
        if (piece->length == 0) {
            if (done > 0 || look) {
                break;
            }
            queue->at_end = true;
        }
        if (piece->data == NULL) { /* there was no memory to save it */
            return done > 0 ? (int64_t)done : UCS_ERR_NO_MEMORY;
        }
        part = piece->length - piece->taken;
        part = part < limit - done ? part : limit - done;
        memcpy(link->links->out + done, piece->data + piece->taken, part);
        done += part;
        if (!look) {
            piece->taken += part;
            if (piece->taken == piece->length) {
                tu_item_remove(link, queue, &queue->first);
            }
        }
    }
    return (int64_t)done;
}

/* Keeps the bytes of a message that is about to be removed for the caller. */
static void hand_out(tu_links_t *links, tu_item_t *item)
{
    free(links->taken);
    links->taken = NULL;
    if (item->length <= TU_LINK_OUT) {
        memcpy(links->out, item->data, item->length);
        links->at = links->out;
    } else { /* it was saved, or fetched */
        links->at = links->taken = item->data;
        item->data               = item->here;
    }
}

static int64_t take_one(tu_link_t *link, tu_queue_t *queue, tu_item_t **from, size_t limit, bool look)
{
    size_t length    = (*from)->length;
    int64_t answer   = (*from)->data == NULL ? UCS_ERR_NO_MEMORY : length > limit ? TU_LINK_TOO_LONG : (int64_t)length;

    if (look) {
        link->links->at = (*from)->data;
        return (*from)->data == NULL ? UCS_ERR_NO_MEMORY : (int64_t)length;
    }
    if (answer >= 0) {
        hand_out(link->links, *from);
    }
    tu_item_remove(link, queue, from);
    if (answer < 0) {
        tu_report_dropped(link, queue, length);
    }
    return answer;
}

/* True if a message can be taken, or it is known that none will come. NULL, or to NULL: there is none. */
static bool can_take(tu_queue_t *queue, tu_item_t **from)
{
    return queue->at_end ||
           (from != NULL && *from != NULL && (*from)->state == TU_ITEM_READY && tu_is_next(queue, *from));
}

static int64_t take(tu_link_t *link, tu_queue_t *queue, tu_item_t **from, size_t limit, bool look)
{
    return queue->number == TU_STREAM_QUEUE ? read_stream(link, queue, limit, look) :
                                              take_one(link, queue, from, limit, look);
}

int64_t tu_link_receive(tu_link_t *link, uint32_t number, size_t limit, bool look)
{
    tu_queue_t *queue = tu_queue_find(link, number);
    tu_item_t **from  = queue == NULL ? NULL : tu_message_behind(queue);
    int64_t length;

    if (number == TU_STREAM_QUEUE && queue != NULL && queue->waiting > 0) {
        return TU_LINK_EMPTY; /* its pieces are for the task that waits */
    }
    if (queue != NULL && can_take(queue, from)) {
        length = take(link, queue, from, limit, look);
        tu_receives_end(link, queue);
        tu_queue_forget_if_idle(link, queue);
        return length;
    }
    if (queue != NULL && *from != NULL) {
        return TU_LINK_EMPTY; /* it is not at hand: the caller waits with a token */
    }
    if (tu_queue_has_ended(link, number, queue)) {
        return queue == NULL || queue->count == 0 ? TU_LINK_ENDED : TU_LINK_EMPTY;
    }
    if (link->stalled) {
        queue = tu_queue_make(link, number);
        if (queue == NULL) {
            return UCS_ERR_NO_MEMORY;
        }
        tu_found_empty(link, queue);
        tu_queue_forget_if_idle(link, queue);
    }
    return TU_LINK_EMPTY;
}

/* Removes a token from all its queues. */
static void receive_gone(tu_token_t *token)
{
    tu_link_t *link = token->link;
    size_t i;

    if (token->held != NULL) {
        token->held->holder = NULL; /* its transfer goes on */
        token->held         = NULL;
    }
    for (i = 0; i < token->count; i++) {
        tu_place_remove(&token->places[i]);
    }
    for (i = 0; i < token->count; i++) {
        tu_messages_keep_newest(link, token->places[i].queue);
        tu_receives_end(link, token->places[i].queue);
        tu_queue_forget_if_idle(link, token->places[i].queue);
    }
    tu_token_free(token);
}

tu_place_t *tu_place_in(tu_token_t *token, const tu_queue_t *queue)
{
    tu_place_t *place = token->places;

    while (place->queue != queue) {
        place++;
    }
    return place;
}

void tu_place_used(tu_token_t *token, tu_place_t *place)
{
    place->has = false;
    receive_gone(token);
}

static bool is_in(const tu_token_t *token, uint32_t number)
{
    size_t i;

    for (i = 0; i < token->count && token->places[i].queue->number != number; i++) {
    }
    return i < token->count;
}

tu_token_t *tu_link_wait(tu_link_t *link, const uint32_t *numbers, size_t count)
{
    tu_token_t *token = tu_token_new(link, count);
    bool ends         = true, ended;
    tu_place_t *place;

    if (token == NULL) {
        return NULL;
    }
    for (; count > 0; count--, numbers++) {
        if (is_in(token, *numbers)) {
            continue;
        }
        place        = &token->places[token->count];
        place->token = token;
        place->queue = tu_queue_make(link, *numbers);
        if (place->queue == NULL) {
            receive_gone(token);
            return NULL;
        }
        token->count++;
        tu_place_add(place);
        ended = tu_queue_has_ended(link, *numbers, place->queue);
        if (place->queue->at_end) {
            tu_token_wake(token);
        } else if (place->has) {
            tu_places_serve(place->queue);
        } else if (!ended) {
            tu_found_empty(link, place->queue);
        }
        ends = ends && ended && place->queue->count == 0;
    }
    if (ends) {
        tu_token_wake(token);
    }
    return token;
}

/* Takes the message in a receive's buffer, if it is the receive's, and its turn. */
static int64_t take_held(tu_token_t *token, bool look, uint32_t *number)
{
    tu_item_t *item = token->held, **from;
    int64_t length  = (int64_t)item->length;
    tu_place_t *place;

    if (item->state == TU_ITEM_MOVING) { /* also if it was dropped: the buffer is still UCX's */
        return TU_LINK_EMPTY;
    }
    place   = tu_place_in(token, item->queue);
    from    = tu_place_message(place);
    *number = item->queue->number;
    if (from == NULL || *from != item) {
        return TU_LINK_SAVE;
    }
    if (!tu_is_next(item->queue, item)) {
        return TU_LINK_EMPTY;
    }
    if (!look) {
        tu_item_remove(token->link, item->queue, from);
        tu_place_used(token, place);
    }
    return length;
}

/* True if the transfer of a message may begin. If it is too long for its receive, that is an answer, too, and has its
 * turn. */
static bool may_begin(const tu_item_t *item, size_t limit)
{
    return item->state == TU_ITEM_HELD && tu_may_begin(item->queue, item) &&
           (item->length <= limit || item->queue->number == TU_STREAM_QUEUE || tu_is_next(item->queue, item));
}

int64_t tu_link_take(tu_token_t *token, size_t limit, bool look, uint32_t *number)
{
    tu_link_t *link = token->link;
    bool ends       = true;
    tu_place_t *place;
    tu_item_t **from;
    int64_t length;
    size_t i;

    tu_list_remove(&token->due);
    token->is_due = false;
    tu_links_forget_news(link->links);
    if (token->held != NULL) {
        return take_held(token, look, number);
    }
    for (i = 0; i < token->count; i++) {
        place   = &token->places[i];
        *number = place->queue->number;
        from    = tu_place_message(place);
        if (can_take(place->queue, from)) {
            length = take(link, place->queue, from, limit, look);
            if (!look) {
                tu_place_used(token, place);
            }
            return length;
        }
        if (from != NULL && may_begin(*from, limit)) {
            link->links->length = (*from)->length;
            link->links->handle = (*from)->handle;
            return TU_LINK_BEGIN;
        }
        ends = ends && place->queue->count == 0 && tu_queue_has_ended(link, *number, place->queue);
    }
    if (!ends) {
        return TU_LINK_EMPTY;
    }
    receive_gone(token);
    return TU_LINK_ENDED;
}

const bool *tu_token_is_due(const tu_token_t *token)
{
    return &token->is_due;
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
    tu_messages_keep_newest(link, queue);
    return UCS_OK;
}
