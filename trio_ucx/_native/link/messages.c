/* The messages of tag queues, and the places of the tokens that wait there.
 *
 * The place at index n is served by message n. So messages go to receives in the order in which these began, in whatever
 * order their tasks run. A large message stays with UCX until the task of its place begins its transfer; transfers
 * overlap, but a message is taken only when those before it are at hand (READY, or ARRIVED in its place's buffer). */
#include <string.h>

#include "link.h"

tu_place_t *tu_place_after(tu_queue_t *queue, tu_place_t *place)
{
    return TU_LIST_NEXT(&queue->places, place, link);
}

size_t tu_place_index(const tu_place_t *place)
{
    tu_queue_t *queue = place->queue;
    tu_place_t *before;
    size_t index = 0;

    for (before = TU_LIST_FIRST(&queue->places, tu_place_t, link); before != place;
         before = tu_place_after(queue, before)) {
        index++;
    }
    return index;
}

bool tu_is_settled(const tu_item_t *item, const tu_token_t *token)
{
    return item->state == TU_ITEM_READY || (item->state == TU_ITEM_ARRIVED && item->holder == token);
}

tu_item_t **tu_item_at(tu_queue_t *queue, size_t index)
{
    tu_item_t **from = &queue->first;

    while (index-- > 0) {
        from = &(*from)->next;
    }
    return from;
}

bool tu_is_at_hand(tu_queue_t *queue, size_t index)
{
    tu_item_t *item = queue->first;
    tu_place_t *place;

    if (queue->count <= index) {
        return false;
    }
    if (queue->large == 0) {
        return true;
    }
    TU_LIST_FOR_EACH(place, &queue->places, link) {
        if (index-- == 0) {
            break;
        }
        if (!tu_is_settled(item, place->token)) {
            return false;
        }
        item = item->next;
    }
    return item->state == TU_ITEM_READY;
}

void tu_places_serve(tu_queue_t *queue)
{
    tu_item_t *item = queue->first, *held;
    bool settled    = true, may;
    size_t ahead    = 0; /* transfers that go on, or may begin */
    tu_place_t *place;

    TU_LIST_FOR_EACH(place, &queue->places, link) {
        held = place->token->held;
        if (held != NULL && held != item) {
            may = held->queue == queue && held->state == TU_ITEM_ARRIVED; /* to save it */
        } else if (item == NULL) {
            continue; /* one behind it may have to save */
        } else if (held == NULL && item->state == TU_ITEM_HELD) {
            may = ahead < TU_TRANSFERS_AHEAD;
        } else {
            may = settled && tu_is_settled(item, place->token);
        }
        if (may) {
            tu_token_wake(place->token);
        }
        if (item != NULL) {
            ahead  += item->state != TU_ITEM_READY;
            settled = settled && tu_is_settled(item, place->token);
            item    = item->next;
        }
    }
}

/* There is one message more for the places, or one place less before them. */
static void serve_next(tu_queue_t *queue)
{
    tu_place_t *place = queue->lacks;

    if (place != NULL) {
        place->has   = true;
        queue->lacks = tu_place_after(queue, place);
        if (queue->lacks == NULL) {
            tu_list_remove(&queue->awaited);
        }
        if (queue->large == 0 && place->token->held == NULL) {
            tu_token_wake(place->token);
        }
    }
    if (queue->large > 0) {
        tu_places_serve(queue);
    }
}

void tu_place_add(tu_link_t *link, tu_place_t *place)
{
    tu_queue_t *queue = place->queue;

    place->has = queue->count > queue->waiting++;
    tu_list_append(&queue->places, &place->link);
    if (!place->has && queue->lacks == NULL) {
        queue->lacks = place;
        tu_list_append(&link->awaited, &queue->awaited);
    }
}

void tu_place_remove(tu_place_t *place)
{
    tu_queue_t *queue = place->queue;

    if (place == queue->lacks) {
        queue->lacks = tu_place_after(queue, place);
        if (queue->lacks == NULL) {
            tu_list_remove(&queue->awaited);
        }
    }
    tu_list_remove(&place->link);
    queue->waiting--;
    if (place->has) {
        serve_next(queue);
    } else if (queue->large > 0 || place->was_large) {
        tu_places_serve(queue);
    }
}

void tu_item_drop(tu_link_t *link, tu_queue_t *queue, tu_item_t **from)
{
    tu_item_t *item = *from;

    *from = item->next;
    if (item->next == NULL) {
        queue->last = from;
    }
    queue->count--;
    queue->large -= item->state != TU_ITEM_READY;
    link->unread -= tu_link_cost(item->length, link->terms.peer_threshold);
    if (item->state == TU_ITEM_MOVING) {
        item->queue = NULL;
        return;
    }
    if (item->holder != NULL) {
        tu_token_wake(item->holder); /* there may be a message for it in another queue */
        item->holder->held = NULL;
    }
    if (item->state == TU_ITEM_HELD && item->handle != 0) {
        item->next             = link->links->discarded;
        link->links->discarded = item;
        return;
    }
    if (item->data != item->here) {
        free(item->data);
    }
    free(item);
}

void tu_item_remove(tu_link_t *link, tu_queue_t *queue, tu_item_t **from)
{
    tu_item_drop(link, queue, from);
    tu_grant_if_due(link);
}

void tu_receives_end(tu_link_t *link, tu_queue_t *queue)
{
    tu_place_t *place;

    /* As long as a message is there, a receive may get it: those in front may leave. */
    if (queue->count == 0 && tu_queue_has_ended(link, queue->number, queue)) {
        for (place = queue->lacks; place != NULL; place = tu_place_after(queue, place)) {
            tu_token_wake(place->token);
        }
    }
}

void tu_places_recount(tu_link_t *link, tu_queue_t *queue)
{
    tu_place_t *place;
    size_t index = 0;

    queue->lacks = NULL;
    TU_LIST_FOR_EACH(place, &queue->places, link) {
        place->has = index++ < queue->count;
        if (!place->has && queue->lacks == NULL) {
            queue->lacks = place;
        }
    }
    if (queue->lacks == NULL) {
        tu_list_remove(&queue->awaited);
    } else if (!tu_list_is_linked(&queue->awaited)) {
        tu_list_append(&link->awaited, &queue->awaited);
    }
    tu_receives_end(link, queue);
    tu_places_serve(queue);
}

void tu_messages_drop(tu_link_t *link, tu_queue_t *queue)
{
    while (queue->count > 0) {
        tu_item_drop(link, queue, &queue->first);
    }
    tu_places_recount(link, queue);
}

void tu_messages_cut(tu_link_t *link, tu_queue_t *queue, const tu_item_t *missing)
{
    tu_item_t **from = &queue->first;

    while (*from != missing) {
        from = &(*from)->next;
    }
    queue->drops = true;
    while (*from != NULL) {
        tu_item_drop(link, queue, from);
    }
    tu_places_recount(link, queue);
}

void tu_messages_keep_newest(tu_link_t *link, tu_queue_t *queue)
{
    size_t older     = queue->count > queue->waiting ? queue->count - queue->waiting - 1 : 0;
    tu_item_t **from = older == 0 ? NULL : tu_item_at(queue, queue->waiting);

    for (; older > 0; older--) {
        if ((*from)->state == TU_ITEM_HELD || (*from)->state == TU_ITEM_READY) {
            tu_item_drop(link, queue, from);
        } else {
            from = &(*from)->next;
        }
    }
}

bool tu_message_add(tu_link_t *link, tu_queue_t *queue, const char *data, uint64_t handle, bool whole, size_t length)
{
    tu_item_t *item = tu_malloc(sizeof(*item) + (data == NULL ? 0 : length));

    if (item == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY);
        link->drops = true; /* nothing is delivered behind what is missing */
        return false;
    }
    *item = (tu_item_t){
        .queue  = queue,
        .handle = handle,
        .whole  = whole,
        .length = length,
        .data   = data == NULL ? NULL : item->here,
        .state  = data == NULL ? TU_ITEM_HELD : TU_ITEM_READY,
    };
    if (data != NULL) {
        memcpy(item->here, data, length);
    }
    *queue->last = item;
    queue->last  = &item->next;
    queue->count++;
    queue->large += data == NULL;
    return true;
}

void tu_messages_charged(tu_link_t *link, tu_queue_t *queue, size_t length, size_t count)
{
    int64_t amount = tu_link_cost(length, link->terms.peer_threshold);

    link->received       += count;
    link->bytes_received += count * length;
    link->outstanding    += (int64_t)count * amount;
    if (queue->admitted_by_us) {
        queue->admitted_by_us = false;
        link->admissions--;
        link->admitted += amount;
    }
}

void tu_message_arrived(tu_link_t *link, tu_queue_t *queue, size_t length)
{
    tu_messages_charged(link, queue, length, 1);
    link->unread += tu_link_cost(length, link->terms.peer_threshold);
    if (queue->newest) {
        tu_messages_keep_newest(link, queue);
    }
    serve_next(queue);
    if (queue->lacks != NULL && !tu_queue_has_ended(link, queue->number, queue)) {
        tu_found_empty(link, queue);
    }
}
