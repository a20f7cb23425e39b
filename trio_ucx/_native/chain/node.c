/* The states of a chain's requests: which are ready, and which begin, stop or run again when one ends. Nothing is posted
 * here. */
#include "chain/chain.h"

/* ---- the queues ---- */

void tu_chain_enqueue(tu_chain_t *chain)
{
    if (chain->running && !chain->advancing && !tu_list_is_linked(&chain->queue_link)) {
        tu_list_append(&tu_chains_of(chain->worker)->queue, &chain->queue_link);
        chain->worker->background.ready++;
    }
}

void tu_chain_dequeue(tu_chain_t *chain)
{
    if (tu_list_is_linked(&chain->queue_link)) {
        tu_list_remove(&chain->queue_link);
        chain->worker->background.ready--;
    }
}

void tu_node_ready(tu_node_t *node)
{
    tu_chain_t *chain = node->chain;

    chain->ready[node->index / 64] |= (uint64_t)1 << node->index % 64;
    tu_chain_enqueue(chain);
}

void tu_node_not_ready(tu_node_t *node)
{
    node->chain->ready[node->index / 64] &= ~((uint64_t)1 << node->index % 64);
}

/* The first node from `index` on that is ready; `count` when there is none. */
uint32_t tu_chain_next_ready(const tu_chain_t *chain, uint32_t index)
{
    uint64_t word;

    while (index < chain->count) {
        word = chain->ready[index / 64] >> index % 64;
        if (word != 0) {
            return index + (uint32_t)__builtin_ctzll(word);
        }
        index = (index / 64 + 1) * 64;
    }
    return chain->count;
}

void tu_node_completed(tu_node_t *node, ucs_status_t status)
{
    tu_chain_t *chain = node->chain;

    node->status = status;
    tu_list_append(&chain->completed, &node->completed_link);
    tu_chain_enqueue(chain);
}

/* ---- the end of a request ---- */

static void waits_less(tu_node_t *node)
{
    if (--node->waiting == 0) {
        tu_node_ready(node);
    }
}

/* Stops the chain at this node: no request that was added later runs. All of these have waited for this one. */
static void stop(tu_node_t *node)
{
    tu_chain_t *chain = node->chain;
    uint32_t i;

    for (i = node->index + 1; i < chain->count; i++) {
        tu_node_t *other = chain->nodes[i];

        if (other->state == TU_CHAIN_WAITING) {
            tu_node_not_ready(other);
            tu_node_set_state(other, TU_CHAIN_NOT_EVALUATED);
            other->culprit = node->index;
            chain->unfinished--;
        }
    }
}

void tu_node_conclude(tu_node_t *node, int state)
{
    tu_chain_t *chain = node->chain;
    bool failed       = state != TU_CHAIN_DONE && state != TU_CHAIN_SKIPPED;
    size_t i;

    tu_node_set_state(node, state);
    node->happened = state == TU_CHAIN_DONE;
    chain->unfinished--;
    if (state != TU_CHAIN_DONE && node->request.on_false == TU_FALSE_STOP) {
        stop(node);
    }
    for (i = 0; i < node->edge_count; i++) {
        tu_node_t *other = chain->nodes[node->edges[i].request];

        if (other->state != TU_CHAIN_WAITING) {
            continue;
        }
        if (failed && node->edges[i].strict && !other->dependency_failed) {
            other->dependency_failed = true;
            other->culprit = node->index;
        }
        waits_less(other);
    }
    if (node->then != 0) {
        tu_node_t *other = chain->nodes[node->then - 1];

        node->then = 0;
        if (other->state == TU_CHAIN_WAITING) {
            waits_less(other);
        }
    }
}

void tu_node_conclude_for(tu_node_t *node, const tu_reason_t *reason)
{
    node->culprit = reason->culprit;
    tu_node_conclude(node, reason->state);
}

void tu_node_fail(tu_node_t *node, ucs_status_t status)
{
    node->status = status;
    tu_node_conclude(node, TU_CHAIN_FAILED);
}

void tu_node_reset(tu_node_t *node)
{
    tu_node_set_state(node, TU_CHAIN_WAITING);
    node->waiting    = 0;
    node->dependency_failed    = false;
    node->has_result = false;
    node->continuing = false;
    node->arrived    = false;
    node->flushed    = false;
}

static uint32_t count_unfinished(const tu_chain_t *chain, const uint32_t *requests, size_t count)
{
    uint32_t unfinished = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        unfinished += chain->nodes[requests[i]]->state <= TU_CHAIN_POSTED;
    }
    return unfinished;
}

/* Lets a request wait again for its predecessors that are not over: a retry of another request may run them again.
 * Returns their number. */
uint32_t tu_node_wait(tu_node_t *node)
{
    const tu_chain_request_t *request = &node->request;

    tu_node_set_state(node, TU_CHAIN_WAITING);
    node->waiting = count_unfinished(node->chain, request->after, request->after_count) +
                    count_unfinished(node->chain, request->behind, request->behind_count);
    return node->waiting;
}

/* Lets those that wait for a retried request wait for it again, unless they have begun or are retried themselves. */
static void let_wait(const tu_node_t *before, const tu_node_t *retried)
{
    const tu_chain_request_t *request = &retried->request;
    tu_node_t *other;
    size_t edge, i;

    for (edge = 0; edge < before->edge_count; edge++) {
        other = before->chain->nodes[before->edges[edge].request];
        for (i = 0; i < request->again_count && request->again[i] != other->index; i++) {
        }
        if (other->state == TU_CHAIN_WAITING && other != retried && i == request->again_count) {
            tu_node_not_ready(other);
            other->waiting++;
        }
    }
}

/* Runs a request again whose condition was false, and before it the requests that it names, one after the other. All of
 * these are over. */
static void retry(tu_node_t *node)
{
    tu_chain_t *chain                = node->chain;
    const tu_chain_request_t *request = &node->request;
    tu_node_t *first                 = request->again_count > 0 ? chain->nodes[request->again[0]] : node;
    size_t i;

    tu_node_reset(node);
    for (i = 0; i < request->again_count; i++) {
        tu_node_reset(chain->nodes[request->again[i]]);
        chain->nodes[request->again[i]]->retries = 0;
        chain->unfinished++;
    }
    for (i = 0; i < request->again_count; i++) {
        tu_node_wait(chain->nodes[request->again[i]]);
        let_wait(chain->nodes[request->again[i]], node);
    }
    for (i = 1; i < request->again_count; i++) {
        chain->nodes[request->again[i - 1]]->then = request->again[i] + 1;
        chain->nodes[request->again[i]]->waiting++;
    }
    tu_node_wait(node);
    first->not_before = request->delay > 0 ? tu_now() + request->delay : 0;
    if (first->waiting == 0) {
        tu_node_ready(first); /* the others wait for it */
    }
}

void tu_node_false(tu_node_t *node)
{
    if (node->retries < node->request.retries && !node->chain->cancelled) {
        node->retries++;
        retry(node);
    } else if (node->request.on_false == TU_FALSE_ERROR) {
        tu_node_conclude(node, TU_CHAIN_FALSE);
    } else {
        tu_node_conclude(node, TU_CHAIN_SKIPPED);
    }
}

/* ---- facts about a request ---- */

/* Returns true if the request has a result when it is done. */
bool tu_node_has_data(const tu_node_t *node)
{
    return node->request.kind == TU_CHAIN_GET || node->request.kind == TU_CHAIN_ATOMIC ||
           node->request.kind == TU_CHAIN_FOLLOW;
}

bool tu_node_is_written(const tu_node_t *node)
{
    return node->request.kind == TU_CHAIN_PUT && node->length > 0 && !node->stored;
}

/* ---- the end of a chain that is lost ---- */

void tu_chain_lost_less(tu_chain_t *chain)
{
    tu_operation_t *operation = chain->operation;

    chain->lost--;
    if (chain->running || chain->lost > 0) {
        return;
    }
    chain->operation = NULL;
    if (operation != NULL) {
        tu_operation_done(operation, NULL, UCS_OK, 0, 0);
    }
    if (chain->freed) {
        tu_chain_destroy(chain);
    }
}
