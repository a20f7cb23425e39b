/* The tag queues of a link: a hash table. One is made when it is first used, and forgotten when a new one would know as
 * much. */
#include "link.h"

#define CONVERSATIONS 0xa0000000u
#define ANSWERS 0xb0000000u
#define PIECES 0xc0000000u
#define FIRST_BUCKETS 8
/* A sweep looks at no more queues than this for each message that the peer has received since the last one. */
#define LOOKS_PER_MESSAGE 4

bool tu_queue_is_valid(uint32_t number)
{
    return number < TU_CONTROL_QUEUE || number == TU_STREAM_QUEUE || (number >= CONVERSATIONS && number < PIECES);
}

uint32_t tu_queue_other(uint32_t number)
{
    return number >= CONVERSATIONS ? number ^ (ANSWERS ^ CONVERSATIONS) : number;
}

static tu_queue_t **bucket_of(const tu_link_t *link, uint32_t number)
{
    return &link->buckets[(uint64_t)(number * link->links->key) * link->bucket_count >> 32];
}

tu_queue_t *tu_queue_find(const tu_link_t *link, uint32_t number)
{
    tu_queue_t *queue = NULL;

    if (link->bucket_count > 0) {
        for (queue = *bucket_of(link, number); queue != NULL && queue->number != number; queue = queue->next) {
        }
    }
    return queue;
}

static void table_add(tu_link_t *link, tu_queue_t *queue)
{
    tu_queue_t **bucket = bucket_of(link, queue->number);

    queue->next = *bucket;
    *bucket     = queue;
}

/* Returns false if there is no memory; a table that is there then stays as it is. */
static bool table_resize(tu_link_t *link, size_t new_count)
{
    tu_queue_t **old = link->buckets;
    size_t count     = link->bucket_count;
    tu_queue_t *queue, *next;
    size_t i;

    link->bucket_count = new_count;
    link->buckets      = tu_calloc(link->bucket_count, sizeof(*link->buckets));
    if (link->buckets == NULL) {
        link->bucket_count = count;
        link->buckets      = old;
        return false;
    }
    for (i = 0; i < count; i++) {
        for (queue = old[i]; queue != NULL; queue = next) {
            next = queue->next;
            table_add(link, queue);
        }
    }
    free(old);
    return true;
}

tu_queue_t *tu_queue_make(tu_link_t *link, uint32_t number)
{
    tu_queue_t *queue = tu_queue_find(link, number);

    if (queue != NULL) {
        return queue;
    }
    if (link->queues >= link->bucket_count &&
        !table_resize(link, link->bucket_count == 0 ? FIRST_BUCKETS : 2 * link->bucket_count) &&
        link->bucket_count == 0) {
        return NULL;
    }
    queue = tu_calloc(1, sizeof(*queue));
    if (queue == NULL) {
        return NULL;
    }
    queue->number = number;
    queue->last   = &queue->first;
    tu_list_init(&queue->places);
    tu_list_init(&queue->awaited);
    tu_list_init(&queue->sends);
    tu_list_init(&queue->in_line);
    table_add(link, queue);
    link->queues++;
    return queue;
}

void tu_queue_forget(tu_link_t *link, tu_queue_t *queue)
{
    tu_queue_t **from = bucket_of(link, queue->number);

    link->admissions         -= queue->admitted_by_us;
    link->admissions_of_peer -= queue->admitted_by_peer;
    while (*from != queue) {
        from = &(*from)->next;
    }
    *from = queue->next;
    link->queues--;
    free(queue);
}

static bool is_idle(const tu_link_t *link, const tu_queue_t *queue)
{
    return queue->count == 0 && queue->waiting == 0 && tu_list_is_empty(&queue->sends) &&
           queue->last_sent <= link->arrived_there && !queue->admitted_by_peer && !queue->admitted_by_us &&
           !queue->receives_end && !queue->sends_end && !queue->newest && !queue->at_end && !queue->drops &&
           !queue->open;
}

void tu_queue_forget_if_idle(tu_link_t *link, tu_queue_t *queue)
{
    if (link->queues > TU_IDLE_QUEUES && is_idle(link, queue)) {
        tu_queue_forget(link, queue);
    }
}

void tu_queues_sweep(tu_link_t *link)
{
    size_t looks = link->queues + link->bucket_count;

    if (link->queues > TU_IDLE_QUEUES && looks / LOOKS_PER_MESSAGE <= link->arrived_there - link->swept_at) {
        link->swept_at = link->arrived_there;
        tu_queues_each(link, tu_queue_forget_if_idle);
        if (link->queues < link->bucket_count / 8) {
            table_resize(link, link->bucket_count / 4);
        }
    }
}

void tu_queues_each(tu_link_t *link, void (*function)(tu_link_t *link, tu_queue_t *queue))
{
    tu_queue_t *queue, *next;
    size_t i;

    for (i = 0; i < link->bucket_count; i++) {
        for (queue = link->buckets[i]; queue != NULL; queue = next) {
            next = queue->next;
            function(link, queue);
        }
    }
}

tu_queue_t *tu_queue_next(const tu_link_t *link, const tu_queue_t *queue)
{
    tu_queue_t *next = queue == NULL ? NULL : queue->next;
    size_t i         = queue == NULL ? 0 : (size_t)(bucket_of(link, queue->number) - link->buckets) + 1;

    for (; next == NULL && i < link->bucket_count; i++) {
        next = link->buckets[i];
    }
    return next;
}

void tu_queues_free(tu_link_t *link)
{
    tu_queues_each(link, tu_queue_forget);
    free(link->buckets);
    link->buckets      = NULL;
    link->bucket_count = 0;
}
