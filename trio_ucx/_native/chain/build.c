/* Creates request chains, adds requests to them, and frees them. */
#include <string.h>

#include "chain/chain.h"

#define FIRST_ROOM 64          /* a multiple of the bits of a word */

/* ---- creating ---- */

int tu_chain_create(tu_worker_t *worker, tu_chain_t **out)
{
    tu_chain_t *chain = tu_calloc(1, sizeof(*chain));

    if (chain == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    chain->worker = worker;
    chain->memory = sizeof(*chain);
    tu_list_init(&chain->running_link);
    tu_list_init(&chain->queue_link);
    tu_list_init(&chain->completed);
    tu_list_prepend(&tu_chains_of(worker)->all, &chain->link);
    *out = chain;
    return UCS_OK;
}

/* Adds a target. tu_chain_bind says before each run what it stands for. Returns its index, or a ucs_status_t. */
int tu_chain_target(tu_chain_t *chain, uint64_t address, uint64_t length)
{
    tu_target_t **targets = tu_realloc(chain->targets, (chain->target_count + 1) * sizeof(*targets));
    tu_target_t *target;

    if (targets == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    chain->targets = targets;
    target         = tu_calloc(1, sizeof(*target));
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

void tu_chain_bind(tu_chain_t *chain, uint32_t target, tu_endpoint_t *endpoint, ucp_rkey_h rkey,
                   const tu_access_path_t *path)
{
    tu_target_t *bound = chain->targets[target];

    memset(&bound->path, 0, sizeof(bound->path));
    if (path != NULL) {
        bound->path = *path;
    }
    bound->endpoint = endpoint;
    bound->rkey     = rkey;
}

static bool make_room(tu_chain_t *chain)
{
    uint32_t room = chain->room == 0 ? FIRST_ROOM : chain->room * 2;
    tu_node_t **nodes;
    uint64_t *ready;

    if (chain->count < chain->room) {
        return true;
    }
    nodes = tu_realloc(chain->nodes, room * sizeof(*nodes));
    if (nodes == NULL) {
        return false;
    }
    chain->nodes = nodes;
    ready        = tu_realloc(chain->ready, room / 8);
    if (ready == NULL) {
        return false;
    }
    chain->ready = ready;
    chain->memory += (room - chain->room) * sizeof(*nodes) + (room - chain->room) / 8;
    chain->room = room;
    return true;
}

/* The state of copying a request. */
typedef struct builder {
    size_t memory;             /* bytes that were allocated */
    bool failed;               /* there was no memory for something */
} builder_t;

static void *allocate(builder_t *builder, size_t size)
{
    void *memory = tu_malloc(size);

    builder->failed |= memory == NULL;
    builder->memory += size;
    return memory;
}

static void *copy(builder_t *builder, const void *array, size_t size)
{
    void *copied = size > 0 ? allocate(builder, size) : NULL;

    return copied != NULL ? memcpy(copied, array, size) : NULL;
}

/* Replaces Python's array by a copy that belongs to the node: NULL where there is nothing, or no memory. */
#define COPY(builder, array, count) ((array) = copy(builder, array, (count) * sizeof(*(array))))

static bool add_edge(tu_chain_t *chain, uint32_t from, uint32_t to, bool strict)
{
    tu_node_t *node = chain->nodes[from];
    tu_edge_t *edges;

    if (node->edge_count == node->edge_room) {
        edges = tu_realloc(node->edges, (node->edge_room * 2 + 2) * sizeof(*edges));
        if (edges == NULL) {
            return false;
        }
        chain->memory += (node->edge_room + 2) * sizeof(*edges);
        node->edges     = edges;
        node->edge_room = node->edge_room * 2 + 2;
    }
    node->edges[node->edge_count].request = to;
    node->edges[node->edge_count].strict  = strict;
    node->edge_count++;
    return true;
}

static tu_terms_t *terms_of(tu_chain_request_t *request, size_t index)
{
    tu_terms_t *all[] = {&request->condition, &request->choice, &request->offset, &request->length,
                         &request->operand,   &request->swapped, &request->next,  &request->until};

    return index < sizeof(all) / sizeof(all[0]) ? all[index] : NULL;
}

static bool all_below(const uint32_t *numbers, size_t count, uint32_t limit)
{
    size_t i;

    for (i = 0; i < count; i++) {
        if (numbers[i] >= limit) {
            return false;
        }
    }
    return true;
}

/* Python has checked all this, with better errors. Here it is checked again because memory is at stake. */
static bool valid(tu_chain_t *chain, tu_chain_request_t *request)
{
    uint32_t self = chain->count + (request->kind == TU_CHAIN_FOLLOW); /* such a request may refer to itself */
    size_t i;

    for (i = 0; terms_of(request, i) != NULL; i++) {
        if (!tu_terms_valid(terms_of(request, i), self)) {
            return false;
        }
    }
    for (i = 0; i < request->part_count; i++) {
        const tu_part_t *part = &request->parts[i];

        if ((part->kind == TU_PART_RESULT && part->request >= chain->count) ||
            (part->kind == TU_PART_INTEGER &&
             (part->length > 16 || part->value.count == 0 || !tu_terms_valid(&part->value, chain->count)))) {
            return false;
        }
    }
    return all_below(request->after, request->after_count, chain->count) &&
           all_below(request->behind, request->behind_count, chain->count) &&
           all_below(request->again, request->again_count, chain->count) &&
           all_below(request->targets, request->targets_count, chain->target_count) &&
           (request->kind == TU_CHAIN_CHECK || request->targets_count > 0) &&
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

static void copy_parts(builder_t *builder, tu_node_t *node)
{
    tu_chain_request_t *request = &node->request;
    tu_part_t *parts;
    size_t i;

    request->parts = parts = copy(builder, request->parts, request->part_count * sizeof(*parts));
    for (i = 0; parts != NULL && i < request->part_count; i++) {
        node->payload_size += parts[i].length;
        COPY(builder, parts[i].value.terms, parts[i].value.count);
    }
    if (parts != NULL && (request->part_count > 1 || parts[0].kind != TU_PART_MEMORY)) {
        node->payload = allocate(builder, node->payload_size + 1);
    }
}

/* Gives the node copies of all that its request points to. Every pointer is a copy, or NULL, afterwards: none remains
 * that is Python's, even if there was no memory for some. */
static void copy_all(builder_t *builder, tu_node_t *node)
{
    tu_chain_request_t *request = &node->request;
    tu_terms_t *terms;
    size_t i;

    for (i = 0; (terms = terms_of(request, i)) != NULL; i++) {
        COPY(builder, terms->terms, terms->count);
    }
    COPY(builder, request->targets, request->targets_count);
    COPY(builder, request->after, request->after_count);
    COPY(builder, request->behind, request->behind_count);
    COPY(builder, request->again, request->again_count);
    COPY(builder, request->header, request->header_length);
    copy_parts(builder, node);
    if (request->into == NULL && (request->size > 0 || request->kind == TU_CHAIN_GET)) {
        node->result     = tu_aligned_alloc(16, (request->size / 16 + 1) * 16); /* an empty result is one, too */
        builder->failed |= node->result == NULL;
        builder->memory += request->size;
    }
}

/* The request for which a node waits: first those of `after`, then those of `behind`. */
static uint32_t predecessor(const tu_node_t *node, size_t index)
{
    const tu_chain_request_t *request = &node->request;

    return index < request->after_count ? request->after[index] : request->behind[index - request->after_count];
}

/* Adds the node to the edges of all for which it waits, or of none. */
static bool add_edges(tu_node_t *node)
{
    tu_chain_t *chain = node->chain;
    size_t i;

    for (i = 0; i < node->waits_for; i++) {
        if (!add_edge(chain, predecessor(node, i), node->index, i < node->request.after_count)) {
            while (i-- > 0) {
                chain->nodes[predecessor(node, i)]->edge_count--; /* the last of its edges is this one */
            }
            return false;
        }
    }
    return true;
}

/* Returns the request's index, or a ucs_status_t. */
int tu_chain_add(tu_chain_t *chain, const tu_chain_request_t *request)
{
    tu_chain_request_t copied = *request;
    builder_t builder         = {.memory = sizeof(tu_node_t)};
    tu_node_t *node;

    if (chain->running) {
        return UCS_ERR_BUSY;
    }
    if (!valid(chain, &copied)) {
        return UCS_ERR_INVALID_PARAM;
    }
    node = tu_calloc(1, sizeof(*node));
    if (node == NULL || !make_room(chain)) {
        free(node);
        return UCS_ERR_NO_MEMORY;
    }
    node->chain     = chain;
    node->index     = chain->count;
    node->request   = copied;
    node->result    = copied.into;
    node->waits_for = (uint32_t)(copied.after_count + copied.behind_count);
    tu_list_init(&node->completed_link);
    copy_all(&builder, node);
    if (builder.failed || !add_edges(node)) {
        node_free(node);
        return UCS_ERR_NO_MEMORY;
    }
    chain->memory += builder.memory;
    chain->nodes[chain->count] = node;
    return (int)chain->count++;
}

/* ---- the end ---- */

void tu_chain_destroy(tu_chain_t *chain)
{
    uint32_t i;

    tu_list_remove(&chain->link);
    for (i = 0; i < chain->count; i++) {
        node_free(chain->nodes[i]);
    }
    for (i = 0; i < chain->target_count; i++) {
        free(chain->targets[i]);
    }
    free(chain->nodes);
    free(chain->ready);
    free(chain->targets);
    free(chain);
}

/* Sets the descriptor of the timer that wakes the worker when a delayed request may begin. */
void tu_chain_timer(tu_worker_t *worker, int fd)
{
    tu_chains_of(worker)->timer = fd;
}
