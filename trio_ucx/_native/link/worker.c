/* What a worker's links share, and the tokens of the tasks that wait. */
#include "link.h"

/* ---- the links of a worker ---- */

static void links_free_if_over(tu_links_t *links)
{
    tu_outgoing_t *outgoing;

    if (links->destroyed && links->count == 0) {
        while ((outgoing = TU_LIST_FIRST(&links->detached, tu_outgoing_t, link)) != NULL) {
            tu_list_remove(&outgoing->link);
            free(outgoing);
        }
        while (tu_links_discarded(links) != 0) { /* UCX has gone: nobody can release the handles */
        }
        free(links->spare);
        free(links->taken);
        free(links->by_id);
        free(links);
    }
}

void tu_links_destroy(tu_links_t *links)
{
    links->destroyed = true;
    links->worker    = NULL;
    links_free_if_over(links);
}

char *tu_links_out(tu_links_t *links)
{
    return links->out;
}

const char *tu_links_taken(const tu_links_t *links)
{
    return links->at;
}

static int news(const tu_links_t *links)
{
    return (tu_list_is_empty(&links->due) ? 0 : TU_NEWS_DUE) |
           (tu_list_is_empty(&links->broken) ? 0 : TU_NEWS_BROKEN) |
           (tu_list_is_empty(&links->batches) ? 0 : TU_NEWS_BATCHES) |
           (links->posted ? TU_NEWS_POSTED : 0) |
           (links->discarded == NULL ? 0 : TU_NEWS_DISCARDED);
}

int tu_links_news(tu_links_t *links)
{
    int now = news(links);

    links->posted = links->has_news = false;
    return now;
}

void tu_links_forget_news(tu_links_t *links)
{
    links->has_news = links->has_news && news(links) != 0;
}

const bool *tu_links_has_news(const tu_links_t *links)
{
    return &links->has_news;
}

size_t tu_links_length(const tu_links_t *links)
{
    return links->length;
}

uint64_t tu_links_handle(const tu_links_t *links)
{
    return links->handle;
}

uint64_t tu_links_discarded(tu_links_t *links)
{
    tu_item_t *item = links->discarded;
    uint64_t handle = 0;

    if (item != NULL) {
        handle           = item->handle;
        links->discarded = item->next;
        free(item);
    }
    return handle;
}

void tu_links_progressed(tu_links_t *links)
{
    links->progressed++;
}

uint64_t tu_links_count_progress(const tu_links_t *links)
{
    return links->worker != NULL ? links->worker->counts.progress_calls : links->progressed;
}

bool tu_links_sending(const tu_links_t *links)
{
    return links->kept > 0;
}

uint64_t tu_links_batches(const tu_links_t *links)
{
    return links->batches_sent;
}

size_t tu_links_due(tu_links_t *links, tu_token_t **out, size_t max)
{
    size_t count = 0;
    tu_token_t *token;

    while (count < max && (token = TU_LIST_FIRST(&links->due, tu_token_t, due)) != NULL) {
        tu_list_remove(&token->due);
        out[count++] = token;
    }
    return count;
}

uint64_t tu_links_broken(tu_links_t *links, int *status)
{
    tu_link_t *link = TU_LIST_FIRST(&links->broken, tu_link_t, news);

    if (link == NULL) {
        return 0;
    }
    tu_list_remove(&link->news);
    *status = link->status;
    return link->terms.id;
}

/* ---- links by their ids ---- */

static tu_link_t **bucket(const tu_links_t *links, uint64_t id)
{
    return &links->by_id[(id * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (links->id_count - 1)];
}

tu_link_t *tu_links_find(const tu_links_t *links, uint64_t id)
{
    tu_link_t *link = links->id_count == 0 ? NULL : *bucket(links, id);

    while (link != NULL && link->terms.id != id) {
        link = link->next;
    }
    return link;
}

static void put(tu_links_t *links, tu_link_t *link)
{
    tu_link_t **first = bucket(links, link->terms.id);

    link->next = *first;
    *first     = link;
}

bool tu_links_add(tu_links_t *links, tu_link_t *link)
{
    size_t i, old_count = links->id_count;
    tu_link_t **old     = links->by_id, *next;

    if (links->count >= old_count) {
        links->id_count = old_count == 0 ? 4 : 2 * old_count;
        links->by_id    = tu_calloc(links->id_count, sizeof(*links->by_id));
        if (links->by_id == NULL) {
            links->by_id    = old;
            links->id_count = old_count;
            return false;
        }
        for (i = 0; i < old_count; i++) {
            for (; old[i] != NULL; old[i] = next) {
                next = old[i]->next;
                put(links, old[i]);
            }
        }
        free(old);
    }
    put(links, link);
    links->count++;
    return true;
}

void tu_links_remove(tu_links_t *links, tu_link_t *link)
{
    tu_link_t **place = bucket(links, link->terms.id);

    while (*place != link) {
        place = &(*place)->next;
    }
    *place = link->next;
}

/* ---- tokens ---- */

tu_token_t *tu_token_new(tu_link_t *link, size_t places)
{
    tu_token_t *token = tu_calloc(1, sizeof(*token) + places * sizeof(token->places[0]));

    if (token != NULL) {
        token->link = link;
        tu_list_init(&token->due);
        tu_list_init(&token->in_queue);
        link->tokens++;
    }
    return token;
}

void tu_token_wake(tu_token_t *token)
{
    if (!token->is_due) {
        token->is_due = token->link->links->has_news = true;
        tu_list_append(&token->link->links->due, &token->due);
    }
}

void tu_link_free_if_over(tu_link_t *link)
{
    tu_links_t *links = link->links;
    tu_outgoing_t *outgoing;

    if (!link->closed || link->tokens > 0) {
        return;
    }
    while ((outgoing = TU_LIST_FIRST(&link->kept, tu_outgoing_t, link)) != NULL) {
        outgoing->of = NULL;
        tu_list_remove(&outgoing->link);
        tu_list_append(&links->detached, &outgoing->link);
    }
    tu_list_remove(&link->news);
    tu_queues_free(link);
    free(link);
    links->count--;
    links_free_if_over(links);
}

void tu_token_free(tu_token_t *token)
{
    tu_link_t *link = token->link;

    tu_list_remove(&token->due);
    free(token);
    link->tokens--;
    tu_link_free_if_over(link);
}

void tu_link_broke(tu_link_t *link, ucs_status_t status)
{
    if (link->status == UCS_OK && !link->closed) {
        link->status          = status;
        link->links->has_news = true;
        tu_list_append(&link->links->broken, &link->news);
    }
}
