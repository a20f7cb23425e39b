/* Transfers of large messages to the buffers of receives, or, if they are fetched, to memory of ours. If the task of a
 * receive is cancelled, its transfer goes on; then the message is saved to memory of ours, and keeps its position in
 * the queue. The receives behind it get the messages before theirs; what has arrived in their buffers is saved, too. */
#include <string.h>

#include "link.h"

void tu_link_leave_there(tu_item_t *item)
{
    free(item->data);
    item->data  = NULL;
    item->state = TU_ITEM_HELD;
    tu_places_serve(item->queue);
}

tu_item_t *tu_link_begin(tu_token_t *token, uint32_t number)
{
    tu_queue_t *queue = tu_queue_find(token->link, number);
    tu_item_t *item   = *tu_place_message(tu_place_in(token, queue));

    item->state  = TU_ITEM_MOVING;
    item->holder = token;
    token->held  = item;
    return item;
}

void tu_link_drop(tu_token_t *token, uint32_t number)
{
    tu_queue_t *queue = tu_queue_find(token->link, number);
    tu_place_t *place = tu_place_in(token, queue);
    tu_item_t **from  = tu_place_message(place);
    size_t length     = (*from)->length;

    tu_item_remove(token->link, queue, from);
    tu_report_dropped(token->link, queue, length);
    tu_place_used(token, place);
}

/* Frees a message that was dropped during its transfer, which is over: the receive has its buffer again. */
static void free_dropped(tu_item_t *item)
{
    if (item->holder != NULL) {
        item->holder->held = NULL;
        tu_token_wake(item->holder);
    }
    free(item->data);
    free(item);
}

/* The message is in memory of ours. */
static void became_ready(tu_link_t *link, tu_item_t *item)
{
    item->state = TU_ITEM_READY;
    item->queue->large--;
    tu_places_serve(item->queue);
    tu_messages_keep_newest(link, item->queue);
}

bool tu_link_moved(tu_link_t *link, tu_item_t *item)
{
    if (item->queue == NULL) {
        free_dropped(item);
        return false;
    }
    if (item->data != NULL) { /* it was fetched */
        became_ready(link, item);
        return false;
    }
    item->state = TU_ITEM_ARRIVED;
    if (item->holder != NULL) {
        tu_places_serve(item->queue);
    }
    return item->holder == NULL;
}

bool tu_item_is_dropped(const tu_item_t *item)
{
    return item->queue == NULL;
}

void tu_link_save(tu_link_t *link, tu_item_t *item, const void *data)
{
    item->data = data == NULL ? NULL : tu_malloc(item->length > 0 ? item->length : 1);
    if (item->data != NULL) {
        memcpy(item->data, data, item->length);
    }
    if (item->holder != NULL) {
        tu_token_wake(item->holder); /* there may be a message for it, also in another queue */
        item->holder->held = NULL;
        item->holder       = NULL;
    }
    became_ready(link, item);
}

void tu_link_failed(tu_link_t *link, tu_item_t *item)
{
    if (item->queue != NULL) {
        tu_messages_cut(link, item->queue, item);
        tu_grant_if_due(link);
    }
    free_dropped(item);
}

static bool is_with_sender(const tu_item_t *item)
{
    return item->state == TU_ITEM_HELD && !item->whole;
}

static void lose(tu_link_t *link, tu_queue_t *queue)
{
    tu_item_t *item;

    for (item = queue->first; item != NULL; item = item->next) {
        if (item->state == TU_ITEM_MOVING || is_with_sender(item)) {
            tu_messages_cut(link, queue, item);
            return;
        }
    }
}

void tu_link_lose(tu_link_t *link)
{
    tu_queues_each(link, lose);
}

static void forget_with_sender(tu_link_t *link, tu_queue_t *queue)
{
    tu_item_t **from = &queue->first;

    while (*from != NULL) {
        if (is_with_sender(*from)) {
            tu_item_drop(link, queue, from);
        } else {
            from = &(*from)->next;
        }
    }
    tu_places_recount(link, queue);
}

void tu_link_forget_with_sender(tu_link_t *link)
{
    tu_queues_each(link, forget_with_sender);
}

tu_item_t *tu_token_holds(tu_token_t *token)
{
    return token->held != NULL && token->held->state == TU_ITEM_ARRIVED ? token->held : NULL;
}
