/* The messages of tag queues, and the places of the tokens that wait there.
 *
 * The place at index n is served by message n. So messages go to receives in the order in which these began, whatever
 * the order in which their tasks run. A large message stays with UCX until the task of its place begins its transfer;
 * transfers overlap, but a message is taken only when those before it are at hand (READY, or ARRIVED in its place's
 * buffer). */
#include <string.h>

#include "link.h"

tu_place_t *tu_place_after(tu_queue_t *queue, tu_place_t *place)
{
    return TU_LIST_NEXT(&queue->places, place, link);
}

tu_item_t **tu_place_message(tu_place_t *place)
{
    tu_queue_t *queue = place->queue;
    tu_item_t **from  = &queue->first;
    tu_place_t *before;

    if (!place->has) {
        return NULL;
    }
    for (before = TU_LIST_FIRST(&queue->places, tu_place_t, link); before != place;
         before = tu_place_after(queue, before)) {
        from = &(*from)->next;
    }
    return from;
}

tu_item_t **tu_message_behind(tu_queue_t *queue)
{
    tu_item_t **from = &queue->first;
    size_t before;

    for (before = queue->waiting; before > 0 && *from != NULL; before--) {
        from = &(*from)->next;
    }
    return from;
}

/* True if the messages behind need not wait for this one: it is in memory of ours, or in the buffer of its place. */
static bool is_settled(const tu_item_t *item, const tu_token_t *token)
{
    return item->state == TU_ITEM_READY || (item->state == TU_ITEM_ARRIVED && item->holder == token);
}

bool tu_is_next(tu_queue_t *queue, const tu_item_t *message)
{
    tu_item_t *before = queue->first;
    tu_place_t *place;

    if (queue->large > 0) {
        TU_LIST_FOR_EACH(place, &queue->places, link) {
            if (before == message) {
                break;
            }
            if (!is_settled(before, place->token)) {
                return false;
            }
            before = before->next;
        }
    }
    return true;
}

/* The transfers before one: that are not over, or whose receives have not run since; and the bytes to be transferred. */
typedef struct {
    size_t count;
    size_t bytes;
} ahead_t;

static void add(ahead_t *ahead, const tu_item_t *item)
{
    ahead->count += item->state != TU_ITEM_READY;
    ahead->bytes += item->state == TU_ITEM_HELD || item->state == TU_ITEM_MOVING ? item->length : 0;
}

static bool allows_another(const ahead_t *ahead)
{
    return ahead->count < TU_TRANSFERS_AHEAD && ahead->bytes < TU_BYTES_AHEAD;
}

bool tu_may_begin(const tu_queue_t *queue, const tu_item_t *item)
{
    ahead_t ahead = {0};
    const tu_item_t *before;

    for (before = queue->first; before != item; before = before->next) {
        add(&ahead, before);
    }
    return allows_another(&ahead);
}

void tu_places_serve(tu_queue_t *queue)
{
    tu_item_t *item = queue->first, *held;
    bool settled    = true, may;
    ahead_t ahead   = {0};
    tu_place_t *place;

    TU_LIST_FOR_EACH(place, &queue->places, link) {
        if (item == NULL && queue->large == 0) {
            break; /* nobody behind has to save */
        }
        held = place->token->held;
        if (held != NULL && held != item) {
            may = held->queue == queue && held->state == TU_ITEM_ARRIVED; /* to save it */
        } else if (item == NULL) {
            continue; /* one behind it may have to save */
        } else if (held == NULL && item->state == TU_ITEM_HELD) {
            may = allows_another(&ahead);
        } else {
            may = settled && is_settled(item, place->token);
        }
        if (may) {
            tu_token_wake(place->token);
        }
        if (item != NULL) {
            add(&ahead, item);
            settled = settled && is_settled(item, place->token);
            item    = item->next;
        }
    }
}

/* From this place on none has a message; NULL: all have. */
static void set_lacks(tu_queue_t *queue, tu_place_t *place)
{
    queue->lacks = place;
    if (place == NULL) {
        tu_list_remove(&queue->awaited);
    } else if (!tu_list_is_linked(&queue->awaited)) {
        tu_list_append(&place->token->link->awaited, &queue->awaited);
    }
}

/* There is one message more for the places, or one place less before them. */
static void serve_next(tu_queue_t *queue)
{
    tu_place_t *place = queue->lacks;

    if (place != NULL) {
        place->has = true;
        set_lacks(queue, tu_place_after(queue, place));
        if (queue->large == 0 && place->token->held == NULL) {
            tu_token_wake(place->token);
        }
    }
    if (queue->large > 0) {
        tu_places_serve(queue);
    }
}

void tu_place_add(tu_place_t *place)
{
    tu_queue_t *queue = place->queue;

    place->has = queue->count > queue->waiting++;
    tu_list_append(&queue->places, &place->link);
    if (!place->has && queue->lacks == NULL) {
        set_lacks(queue, place);
    }
}

void tu_place_remove(tu_place_t *place)
{
    tu_queue_t *queue = place->queue;

    if (place == queue->lacks) {
        set_lacks(queue, tu_place_after(queue, place));
    }
    tu_list_remove(&place->link);
    queue->waiting--;
    if (place->has) {
        serve_next(queue);
    } else {
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
        link->links->has_news  = true;
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
    tu_place_t *place, *lacks = NULL;
    size_t index = 0;

    TU_LIST_FOR_EACH(place, &queue->places, link) {
        place->has = index++ < queue->count;
        lacks      = place->has || lacks != NULL ? lacks : place;
    }
    set_lacks(queue, lacks);
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

/* Drops the messages but the last that no place has. */
static void drop_older(tu_link_t *link, tu_queue_t *queue)
{
    tu_item_t **from = tu_message_behind(queue);

    while (*from != NULL && (*from)->next != NULL) {
        if ((*from)->state == TU_ITEM_HELD || (*from)->state == TU_ITEM_READY) {
            tu_item_drop(link, queue, from);
        } else {
            from = &(*from)->next;
        }
    }
}

void tu_messages_keep_newest(tu_link_t *link, tu_queue_t *queue)
{
    if (queue->newest) {
        drop_older(link, queue);
        tu_grant_if_due(link);
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

bool tu_item_fetch(tu_item_t *item)
{
    item->data = tu_malloc(item->length > 0 ? item->length : 1);
    if (item->data != NULL) {
        item->state = TU_ITEM_MOVING;
    }
    return item->data != NULL;
}

int64_t tu_messages_charged(tu_link_t *link, tu_queue_t *queue, size_t length, size_t count)
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
    return amount;
}

void tu_message_arrived(tu_link_t *link, tu_queue_t *queue, size_t length)
{
    link->unread += tu_messages_charged(link, queue, length, 1);
    if (queue->newest) {
        drop_older(link, queue);
    }
    serve_next(queue);
    if (queue->lacks != NULL && !tu_queue_has_ended(link, queue->number, queue)) {
        tu_found_empty(link, queue);
    }
}
