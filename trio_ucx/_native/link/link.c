/* Links: the small messages of Connections. This file opens, ends and closes them; queues.c, sending.c, receiving.c. */
#include "link.h"

/* ---- the links of a worker ---- */

tu_links_t *tu_links_create(void)
{
    tu_links_t *links = tu_calloc(1, sizeof(*links));

    if (links != NULL) {
        tu_list_init(&links->due);
        tu_list_init(&links->broken);
        tu_list_init(&links->batches);
        tu_list_init(&links->orphans);
    }
    return links;
}

static void links_free_if_over(tu_links_t *links)
{
    if (links->destroyed && links->count == 0) {
        tu_own_free_all(&links->orphans);
        free(links->spare);
        free(links);
    }
}

void tu_links_destroy(tu_links_t *links)
{
    links->destroyed = true;
    links_free_if_over(links);
}

char *tu_links_out(tu_links_t *links)
{
    return links->out;
}

size_t tu_links_length(const tu_links_t *links)
{
    return links->length;
}

void tu_links_progressed(tu_links_t *links)
{
    links->polls++;
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
        token->is_due = true;
        tu_list_append(&token->link->links->due, &token->due);
    }
}

/* Frees a link that is closed, when no token is left. */
static void link_free_if_over(tu_link_t *link)
{
    tu_links_t *links = link->links;
    tu_own_t *own;

    if (!link->closed || link->tokens > 0) {
        return;
    }
    while ((own = TU_LIST_FIRST(&link->kept, tu_own_t, link)) != NULL) {
        own->of = NULL;
        tu_list_remove(&own->link);
        tu_list_append(&links->orphans, &own->link);
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
    link_free_if_over(link);
}

/* ---- a link ---- */

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
        links->count++;
    }
    return link;
}

void tu_link_broke(tu_link_t *link, ucs_status_t status)
{
    if (link->status == UCS_OK && !link->closed) {
        link->status = status;
        tu_list_append(&link->links->broken, &link->news);
    }
}

static void queue_ended(tu_link_t *link, tu_queue_t *queue)
{
    tu_receives_end(link, queue);
    tu_sends_end(link, queue);
}

void tu_link_answers(tu_link_t *link, bool receives_end, bool drains, bool sends_end)
{
    link->receives_end = receives_end;
    link->drains       = drains;
    link->sends_end    = sends_end;
    tu_queues_each(link, queue_ended);
}

int tu_link_end_queue(tu_link_t *link, uint32_t number, bool receives_end, bool sends_end)
{
    tu_queue_t *queue = tu_queue_make(link, number);

    if (queue == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    queue->receives_end = receives_end;
    queue->sends_end    = sends_end;
    queue_ended(link, queue);
    return UCS_OK;
}

void tu_link_detach(tu_link_t *link)
{
    tu_link_flush(link);
    link->endpoint = NULL;
    tu_queues_each(link, tu_sends_end);
}

void tu_link_close(tu_link_t *link)
{
    tu_link_detach(link);
    link->closed = true;
    tu_queues_each(link, tu_messages_drop);
    tu_link_answers(link, true, true, true);
    link_free_if_over(link);
}

void tu_link_count(const tu_link_t *link, tu_link_counts_t *out)
{
    const tu_list_t *next;

    *out = (tu_link_counts_t){
        .credit         = link->credit,
        .unread         = link->unread,
        .sent           = link->sent,
        .bytes_sent     = link->bytes_sent,
        .received       = link->received,
        .bytes_received = link->bytes_received,
        .grants         = link->grants,
        .grants_sent    = link->grants_sent,
        .queues         = link->queues,
        .tokens         = link->tokens,
        .kept           = link->kept_count,
    };
    for (next = link->line.next; next != &link->line; next = next->next) {
        out->line++;
    }
}

size_t tu_link_held(const tu_link_t *link, uint32_t number, size_t *bytes)
{
    tu_queue_t *queue = tu_queue_find(link, number);
    const tu_small_t *message;

    *bytes = 0;
    if (queue == NULL) {
        return 0;
    }
    for (message = queue->first; message != NULL; message = message->next) {
        *bytes += message->length - message->taken;
    }
    return queue->count;
}
