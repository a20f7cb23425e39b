/* Request chains: how they are made, and what is said of them. chain/run.c runs them. */
#include <string.h>

#include "chain/chain.h"

#define FIRST_ROOM 64          /* a multiple of the bits of a word */

/* ---- making ---- */

int tu_chain_create(tu_worker_t *worker, tu_chain_t **out)
{
    tu_chain_t *chain = calloc(1, sizeof(*chain));

    if (chain == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    chain->worker      = worker;
    chain->memory      = sizeof(*chain);
    chain->landed_last = &chain->landed;
    chain->next        = worker->chains.all;
    chain->link        = &worker->chains.all;
    if (chain->next != NULL) {
        chain->next->link = &chain->next;
    }
    worker->chains.all = chain;
    *out               = chain;
    return UCS_OK;
}

/* Where requests may go; what it is bound to is said before each run. Returns its index, or a ucs_status_t. */
int tu_chain_target(tu_chain_t *chain, uint64_t address, uint64_t length)
{
    tu_target_t **targets = realloc(chain->targets, (chain->target_count + 1) * sizeof(*targets));
    tu_target_t *target;

    if (targets == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    chain->targets = targets;
    target         = calloc(1, sizeof(*target));
    if (target == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    target->chain   = chain;
    target->address = address;
    target->length  = length;
    targets[chain->target_count] = target;
    chain->memory += sizeof(*target);
    return (int)chain->target_count++;
}

void tu_chain_bind(tu_chain_t *chain, uint32_t target, tu_endpoint_t *endpoint, tu_rkey_t *rkey, unsigned atomics,
                   const tu_way_t *way)
{
    tu_target_t *bound = chain->targets[target];

    memset(&bound->way, 0, sizeof(bound->way));
    if (way != NULL) {
        bound->way = *way;
    }
    bound->endpoint = endpoint;
    bound->rkey     = rkey;
    bound->atomics  = atomics;
}

static int make_room(tu_chain_t *chain)
{
    uint32_t room = chain->room == 0 ? FIRST_ROOM : chain->room * 2;
    tu_node_t **nodes;
    uint64_t *ready, *atomics;

    if (chain->count < chain->room) {
        return 0;
    }
    nodes = realloc(chain->nodes, room * sizeof(*nodes));
    if (nodes == NULL) {
        return -1;
    }
    chain->nodes = nodes;
    ready        = realloc(chain->ready, room / 8);
    if (ready == NULL) {
        return -1;
    }
    chain->ready = ready;
    atomics      = realloc(chain->atomics, room / 8);
    if (atomics == NULL) {
        return -1;
    }
    memset(atomics + chain->room / 64, 0, (room - chain->room) / 8);
    chain->atomics = atomics;
    chain->memory += (room - chain->room) * sizeof(*nodes) + (room - chain->room) / 4;
    chain->room    = room;
    return 0;
}

/* A copy that belongs to the node, in `*array`. It is left alone, and NULL, where there is nothing. */
static int copy(tu_node_t *node, const void **array, size_t size)
{
    void *made = size > 0 ? malloc(size) : NULL;

    if (size > 0 && made != NULL) {
        memcpy(made, *array, size);
    }
    *array = made;
    node->chain->memory += size;
    return size == 0 || made != NULL ? 0 : -1;
}

static int copy_terms(tu_node_t *node, tu_terms_t *terms)
{
    return copy(node, (const void **)&terms->terms, terms->count * sizeof(*terms->terms));
}

static int add_edge(tu_chain_t *chain, uint32_t from, uint32_t to, int strict)
{
    tu_node_t *node = chain->nodes[from];
    tu_edge_t *edges;

    if (node->edge_count == node->edge_room) {
        edges = realloc(node->edges, (node->edge_room * 2 + 2) * sizeof(*edges));
        if (edges == NULL) {
            return -1;
        }
        chain->memory += (node->edge_room + 2) * sizeof(*edges);
        node->edges     = edges;
        node->edge_room = node->edge_room * 2 + 2;
    }
    node->edges[node->edge_count].request = to;
    node->edges[node->edge_count].strict  = strict;
    node->edge_count++;
    return 0;
}

static tu_terms_t *terms_of(tu_chain_request_t *request, size_t index)
{
    tu_terms_t *all[] = {&request->condition, &request->choice, &request->offset, &request->length,
                         &request->operand,   &request->swapped, &request->next,  &request->until};

    return index < sizeof(all) / sizeof(all[0]) ? all[index] : NULL;
}

static int all_below(const uint32_t *numbers, size_t count, uint32_t limit)
{
    size_t i;

    for (i = 0; i < count; i++) {
        if (numbers[i] >= limit) {
            return 0;
        }
    }
    return 1;
}

/* Python has checked it, and explained. This is the last look before memory is at stake. */
static int valid(tu_chain_t *chain, tu_chain_request_t *request)
{
    uint32_t self = chain->count + (request->kind == TU_CHAIN_FOLLOW); /* which may refer to itself */
    size_t i;

    for (i = 0; terms_of(request, i) != NULL; i++) {
        if (!tu_terms_valid(terms_of(request, i), self)) {
            return 0;
        }
    }
    for (i = 0; i < request->part_count; i++) {
        const tu_part_t *part = &request->parts[i];

        if ((part->kind == TU_PART_RESULT && part->request >= chain->count) ||
            (part->kind == TU_PART_INTEGER &&
             (part->length > 16 || part->value.count == 0 || !tu_terms_valid(&part->value, chain->count)))) {
            return 0;
        }
    }
    return all_below(request->after, request->after_count, chain->count) &&
           all_below(request->behind, request->behind_count, chain->count) &&
           all_below(request->again, request->again_count, chain->count) &&
           all_below(request->targets, request->target_count, chain->target_count) &&
           (request->kind == TU_CHAIN_CHECK || request->target_count > 0) &&
           (request->kind != TU_CHAIN_ATOMIC ||
            ((request->size == 4 || request->size == 8) && request->into == NULL &&
             request->atomic >= TU_ATOMIC_ADD && request->atomic <= TU_ATOMIC_XOR));
}

static void node_free(tu_node_t *node)
{
    tu_chain_request_t *request = &node->request;
    size_t i;

    for (i = 0; terms_of(request, i) != NULL; i++) {
        free((void *)terms_of(request, i)->terms);
    }
    for (i = 0; request->parts != NULL && i < request->part_count; i++) {
        free((void *)request->parts[i].value.terms);
    }
    free((void *)request->parts);
    free((void *)request->targets);
    free((void *)request->after);
    free((void *)request->behind);
    free((void *)request->again);
    free((void *)request->header);
    if (request->into == NULL) {
        free(node->result);
    }
    free(node->payload);
    free(node->edges);
    free(node);
}

static int copy_parts(tu_node_t *node)
{
    tu_chain_request_t *request = &node->request;
    int failed                  = 0;
    tu_part_t *parts;
    size_t i;

    if (copy(node, (const void **)&request->parts, request->part_count * sizeof(*request->parts)) < 0) {
        return -1;
    }
    parts = (tu_part_t *)request->parts;
    for (i = 0; i < request->part_count; i++) {
        node->payload_size += parts[i].length;
        failed |= copy_terms(node, &parts[i].value); /* all of them: none may remain that is not ours */
    }
    if (failed) {
        return -1;
    }
    if (request->part_count > 1 || (request->part_count == 1 && parts[0].kind != TU_PART_MEMORY)) {
        node->payload = malloc(node->payload_size + 1);
        node->chain->memory += node->payload_size;
        return node->payload != NULL ? 0 : -1;
    }
    return 0;
}

static int copy_all(tu_node_t *node)
{
    tu_chain_request_t *request = &node->request;
    int failed                  = 0;
    size_t i;

    for (i = 0; terms_of(request, i) != NULL; i++) {
        failed |= copy_terms(node, terms_of(request, i));
    }
    failed |= copy(node, (const void **)&request->targets, request->target_count * sizeof(*request->targets));
    failed |= copy(node, (const void **)&request->after, request->after_count * sizeof(*request->after));
    failed |= copy(node, (const void **)&request->behind, request->behind_count * sizeof(*request->behind));
    failed |= copy(node, (const void **)&request->again, request->again_count * sizeof(*request->again));
    failed |= copy(node, (const void **)&request->header, request->header_length);
    failed |= copy_parts(node);
    if (!failed && request->into == NULL && (request->size > 0 || request->kind == TU_CHAIN_GET)) {
        failed = posix_memalign((void **)&node->result, 16, request->size + 1) != 0; /* an empty result is one, too */
        node->chain->memory += request->size;
    }
    return failed ? -1 : 0;
}

/* Returns the request's index, or a ucs_status_t. */
int tu_chain_add(tu_chain_t *chain, const tu_chain_request_t *request)
{
    tu_chain_request_t copied = *request;
    tu_node_t *node;
    size_t i;

    if (chain->running) {
        return UCS_ERR_BUSY;
    }
    if (!valid(chain, &copied)) {
        return UCS_ERR_INVALID_PARAM;
    }
    node = calloc(1, sizeof(*node));
    if (node == NULL || make_room(chain) < 0) {
        free(node);
        return UCS_ERR_NO_MEMORY;
    }
    node->chain     = chain;
    node->index     = chain->count;
    node->request   = copied;
    node->result    = copied.into;
    node->waits_for = (uint32_t)(copied.after_count + copied.behind_count);
    chain->memory  += sizeof(*node);
    if (copy_all(node) < 0) {
        node_free(node);
        return UCS_ERR_NO_MEMORY;
    }
    for (i = 0; i < node->waits_for; i++) {
        int strict      = i < copied.after_count;
        uint32_t before = strict ? copied.after[i] : copied.behind[i - copied.after_count];

        if (add_edge(chain, before, node->index, strict) < 0) {
            while (i-- > 0) { /* the last of theirs */
                strict = i < copied.after_count;
                chain->nodes[strict ? copied.after[i] : copied.behind[i - copied.after_count]]->edge_count--;
            }
            node_free(node);
            return UCS_ERR_NO_MEMORY;
        }
    }
    if (copied.kind == TU_CHAIN_ATOMIC) {
        chain->atomics[chain->count / 64] |= (uint64_t)1 << chain->count % 64;
    }
    chain->nodes[chain->count] = node;
    return (int)chain->count++;
}

/* ---- the end ---- */

void tu_chain_destroy(tu_chain_t *chain)
{
    uint32_t i;

    *chain->link = chain->next;
    if (chain->next != NULL) {
        chain->next->link = chain->link;
    }
    for (i = 0; i < chain->count; i++) {
        node_free(chain->nodes[i]);
    }
    for (i = 0; i < chain->target_count; i++) {
        free(chain->targets[i]);
    }
    free(chain->nodes);
    free(chain->ready);
    free(chain->atomics);
    free(chain->targets);
    free(chain);
}

/* Whoever made it needs it no more. UCX may: then it goes when UCX is done with it. */
void tu_chain_free(tu_chain_t *chain)
{
    chain->freed = 1;
    if (chain->running) {
        tu_chain_cancel(chain);
    } else if (chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

/* The timer that is to fire when a delayed request may begin: its descriptor. */
void tu_chain_timer(tu_worker_t *worker, int fd)
{
    worker->chains.timer = fd;
}
