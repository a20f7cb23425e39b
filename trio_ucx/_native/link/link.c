/* Opens, ends and closes links, the messages of Connections; what arrives for them, and counts. */
#include <sys/random.h>

#include "link.h"

bool tu_links_take(tu_links_t *links, uint64_t tag, size_t length, size_t count, const char *data)
{
    tu_link_t *link = tu_links_find(links, tag >> 32);
    uint32_t number = (uint32_t)tag;
    const tu_queue_t *queue;
    int status;

    if (link == NULL || link->refers || (number == TU_STREAM_QUEUE && length == 0)) {
        return false;
    }
    if (number > TU_STREAM_QUEUE) {
        queue = tu_queue_find(link, number);
        if (queue == NULL || !queue->open) {
            return false;
        }
    }
    status = tu_link_arrived(link, number, length, count, data);
    return status != 1 && status != UCS_ERR_INVALID_PARAM;
}

static bool take(void *links, uint64_t tag, size_t length, size_t count, const char *data)
{
    return tu_links_take(links, tag, length, count, data);
}

tu_links_t *tu_links_create(tu_worker_t *worker)
{
    tu_links_t *links = tu_calloc(1, sizeof(*links));

    if (links != NULL) {
        links->worker = worker;
        if (worker != NULL) {
            worker->take  = take;
            worker->taker = links;
        }
        tu_list_init(&links->due);
        tu_list_init(&links->broken);
        tu_list_init(&links->batches);
        tu_list_init(&links->detached);
        if (getrandom(&links->key, sizeof(links->key), GRND_NONBLOCK) < 0) {
            links->key = (uint32_t)((uintptr_t)links >> 4);
        }
        links->key |= 1;
    }
    return links;
}

tu_link_t *tu_link_open(tu_links_t *links, tu_endpoint_t *endpoint, const tu_link_terms_t *terms)
{
    tu_link_t *link = tu_calloc(1, sizeof(*link));

    if (link != NULL) {
        link->links    = links;
        link->endpoint = endpoint;
        link->terms    = *terms;
        link->credit   = (int64_t)terms->peer_window;
        tu_list_init(&link->news);
        tu_list_init(&link->line);
        tu_list_init(&link->awaited);
        tu_list_init(&link->in_batches);
        tu_list_init(&link->kept);
        if (!tu_links_add(links, link)) {
            free(link);
            link = NULL;
        }
    }
    return link;
}

static void queue_ended(tu_link_t *link, tu_queue_t *queue)
{
    tu_receives_end(link, queue);
    tu_sends_end(link, queue);
}

void tu_link_answers(tu_link_t *link, bool receives_end, bool drains, bool sends_end)
{
    link->receives_end |= receives_end;
    link->drains       |= drains;
    link->sends_end    |= sends_end;
    tu_queues_each(link, queue_ended);
}

int tu_link_end_queue(tu_link_t *link, uint32_t number, bool receives_end, bool sends_end)
{
    tu_queue_t *queue = tu_queue_make(link, number);

    if (queue == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    queue->receives_end |= receives_end;
    queue->sends_end    |= sends_end;
    queue_ended(link, queue);
    return UCS_OK;
}

int tu_link_open_queue(tu_link_t *link, uint32_t number)
{
    tu_queue_t *queue = tu_queue_make(link, number);

    if (queue == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    queue->open = true;
    return UCS_OK;
}

void tu_link_leave_queue(tu_link_t *link, uint32_t number)
{
    tu_queue_t *queue = tu_queue_find(link, number);

    if (queue != NULL) {
        queue->drops = queue->sends_end = true;
        tu_messages_drop(link, queue);
        tu_grant_if_due(link);
        tu_sends_end(link, queue);
    }
}

void tu_link_forget_queue(tu_link_t *link, uint32_t number)
{
    tu_queue_t *queue = tu_queue_find(link, number);

    if (queue != NULL && queue->waiting == 0 && tu_list_is_empty(&queue->sends)) {
        tu_messages_drop(link, queue);
        tu_queue_forget(link, queue);
        tu_grant_if_due(link);
    }
}

void tu_link_detach(tu_link_t *link)
{
    if (link->batch != NULL) {
        tu_list_remove(&link->in_batches);
        free(link->batch);
        link->batch = NULL;
    }
    link->detached = true;
    tu_queues_each(link, tu_sends_end);
}

void tu_link_refer(tu_link_t *link, bool refers)
{
    link->refers = refers;
}

void tu_link_divert(tu_link_t *link, tu_outlet_t outlet, void *context)
{
    link->outlet         = outlet;
    link->outlet_context = context;
}

void tu_link_close(tu_link_t *link)
{
    tu_link_detach(link);
    tu_links_remove(link->links, link);
    link->closed = true;
    tu_queues_each(link, tu_messages_drop);
    tu_link_answers(link, true, true, true);
    tu_link_free_if_over(link);
}

void tu_link_count(const tu_link_t *link, tu_link_counts_t *out)
{
    *out = (tu_link_counts_t){
        .credit         = link->credit,
        .unread         = link->unread,
        .outstanding    = link->outstanding,
        .sent           = link->sent,
        .bytes_sent     = link->bytes_sent,
        .received       = link->received,
        .bytes_received = link->bytes_received,
        .grants         = link->grants,
        .grants_sent    = link->grants_sent,
        .queues         = link->queues,
        .tokens         = link->tokens,
        .kept           = link->kept_count,
        .line           = link->line_count,
        .stalled        = link->stalled,
    };
}

static void count_queue(const tu_queue_t *queue, tu_queue_counts_t *out)
{
    const tu_item_t *message;

    *out = (tu_queue_counts_t){.number = queue->number, .messages = queue->count, .waiting = queue->waiting};
    for (message = queue->first; message != NULL; message = message->next) {
        out->bytes       += message->length - message->taken;
        out->with_sender += message->state == TU_ITEM_HELD && !message->whole;
    }
}

bool tu_link_count_queue(const tu_link_t *link, uint32_t number, tu_queue_counts_t *out)
{
    tu_queue_t *queue = tu_queue_find(link, number);

    if (queue != NULL) {
        count_queue(queue, out);
    }
    return queue != NULL;
}

size_t tu_link_list(const tu_link_t *link, tu_queue_counts_t *out, size_t max)
{
    tu_queue_t *queue = NULL;
    size_t count      = 0;

    while (count < max && (queue = tu_queue_next(link, queue)) != NULL) {
        count_queue(queue, &out[count++]);
    }
    return link->queues;
}

int64_t tu_link_next_filled(const tu_link_t *link, int64_t after)
{
    int64_t next = TU_LINK_EMPTY, first = TU_LINK_EMPTY;
    tu_queue_t *queue = NULL;

    while ((queue = tu_queue_next(link, queue)) != NULL) {
        if (queue->number >= TU_CONTROL_QUEUE || queue->count <= queue->waiting) {
            continue;
        }
        if (first < 0 || queue->number < first) {
            first = queue->number;
        }
        if (queue->number > after && (next < 0 || queue->number < next)) {
            next = queue->number;
        }
    }
    return next >= 0 ? next : first;
}
