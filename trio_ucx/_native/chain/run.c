/* Runs request chains: decides which requests may begin. What the end of one means for others is in node.c.
 *
 * A node is a request. It is ready when all that it waits for is over; then post.c evaluates its condition and its
 * arguments, and posts it. UCX's callbacks only note that a request has completed; the rest happens after the call that
 * made UCX progress, in the hook `progress`, because a callback must not post.
 *
 * Several nodes may be in flight at once. Ready nodes begin in turn. A put for which others wait is over when a flush
 * after it is; all other puts are flushed at the end of the run.
 *
 * For Python a run is one operation: its record comes when all nodes are over and UCX has nothing more of the chain.
 *
 * When an endpoint goes away, its requests in flight are *lost*: nothing waits for them. If UCX still has some when the
 * run is over, TU_RECORD_CONCLUDED wakes the task, and the operation's record comes when UCX has completed them. UCX may
 * never complete those of an endpoint without error handling (`lost_for_good`). Then the operation's record comes with
 * the end of the run, says how many are lost, and Python keeps their memory until the worker is destroyed.
 */
#include <string.h>

#include "chain/chain.h"

#define DEPTH 64               /* requests and flushes that UCX has of one chain */
#define LOOK 16                /* requests, or calls, between two looks at the clock */

/* ---- a run ---- */

static void target_flushed(void *request, ucs_status_t status, void *user_data)
{
    tu_target_t *target = user_data;
    tu_chain_t *chain   = target->chain;

    if (request != NULL) {
        ucp_request_free(request);
    }
    if (target->lost) {
        target->lost = false;
        tu_chain_lost_less(chain);
    } else {
        chain->in_flight--;
        target->flushing = false;
        target->status   = status;
        tu_chain_enqueue(chain);
    }
}

/* Flushes the puts that no other request waited for, so that they have happened when the run ends. Returns whether
 * there were any. */
static bool flush_targets(tu_chain_t *chain)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send      = target_flushed,
    };
    ucs_status_ptr_t answer;
    uint32_t i;
    bool any = false;

    for (i = 0; i < chain->target_count; i++) {
        tu_target_t *target = chain->targets[i];

        if (target->written && target->endpoint == NULL) {
            target->written = false;
            target->status  = UCS_ERR_NOT_CONNECTED;
        } else if (target->written) {
            any              = true;
            target->written  = false;
            target->flushing = true;
            param.user_data  = target;
            chain->in_flight++;
            answer = ucp_ep_flush_nbx(target->endpoint->ep, &param);
            if (!UCS_PTR_IS_PTR(answer)) {
                target_flushed(NULL, UCS_PTR_RAW_STATUS(answer), target);
            }
        }
    }
    return any;
}

/* Fails the puts whose flush failed: they may not have happened. */
static void blame_flushes(tu_chain_t *chain)
{
    bool failed = false;
    uint32_t i;

    for (i = 0; i < chain->target_count; i++) {
        failed |= chain->targets[i]->status != UCS_OK;
    }
    for (i = 0; failed && i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        if (node->state == TU_CHAIN_DONE && tu_node_is_written(node) && !node->flushed &&
            chain->targets[node->target]->status != UCS_OK) {
            tu_node_set_state(node, TU_CHAIN_FAILED);
            node->status = chain->targets[node->target]->status;
        }
    }
}

static void end_run(tu_chain_t *chain)
{
    tu_operation_t *operation = chain->operation;
    tu_chains_t *chains       = tu_chains_of(chain->worker);
    ucs_status_t status       = chain->cancelled ? UCS_ERR_CANCELED : UCS_OK;

    blame_flushes(chain);
    tu_chain_dequeue(chain);
    chain->running = false;
    tu_list_remove(&chain->running_link);
    chain->worker->background.sequences--;
    if (tu_list_is_empty(&chains->running)) {
        tu_hook_remove(&chains->hook);
    }
    tu_ring_unreserve(chain->worker);
    if (operation != NULL && chain->lost > 0 && !chain->lost_for_good) {
        tu_ring_append(chain->worker, TU_RECORD_CONCLUDED, operation->id, status, 0, 0, 0);
    } else if (operation != NULL) {
        chain->operation = NULL;
        tu_operation_done(operation, NULL, status, chain->lost, 0);
    }
    if (chain->freed && chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

/* Whether a node may begin now. If not, notes when it may. */
static bool may_begin(tu_node_t *node)
{
    tu_chain_t *chain   = node->chain;
    tu_chains_t *chains = tu_chains_of(chain->worker);

    if (node->not_before > chains->now && node->not_before > (chains->now = tu_now())) {
        if (chain->wake_at == 0 || node->not_before < chain->wake_at) {
            chain->wake_at = node->not_before;
        }
        return false;
    }
    return true;
}

/* The next node that is ready and may begin, in turn, so that a request that is retried lets others begin, too. */
static tu_node_t *next_to_begin(tu_chain_t *chain)
{
    uint32_t from = chain->cursor;
    uint32_t to   = chain->count;
    uint32_t index;
    int round;

    for (round = 0; round < 2; round++) {
        for (index = tu_chain_next_ready(chain, from); index < to; index = tu_chain_next_ready(chain, index + 1)) {
            if (may_begin(chain->nodes[index])) {
                tu_node_not_ready(chain->nodes[index]);
                chain->cursor = index + 1;
                return chain->nodes[index];
            }
        }
        from = 0;
        to   = chain->cursor < chain->count ? chain->cursor : chain->count;
    }
    return NULL;
}

/* Does what can be done now, until the slice is over; then the chain is queued again. Returns false when the run has
 * ended: the chain may have been destroyed. */
static bool advance(tu_chain_t *chain)
{
    tu_chains_t *chains = tu_chains_of(chain->worker);
    unsigned begun      = 0;
    tu_node_t *node;

    chain->advancing = true;
    chain->wake_at   = 0;
    for (;;) {
        while ((node = TU_LIST_FIRST(&chain->completed, tu_node_t, completed_link)) != NULL) {
            tu_list_remove(&node->completed_link);
            tu_node_go_on(node);
        }
        node = chain->in_flight < DEPTH ? next_to_begin(chain) : NULL;
        if (node == NULL) {
            break;
        }
        tu_node_begin(node);
        if (++begun % LOOK == 0 && (chains->now = tu_now()) > chain->worker->background.slice_end) {
            chain->advancing = false;
            tu_chain_enqueue(chain);
            return true;
        }
    }
    chain->advancing = false;
    if (chain->unfinished == 0 && chain->in_flight == 0 && (chain->cancelled || !flush_targets(chain))) {
        end_run(chain);
        return false;
    }
    return true;
}

static void set_timer(tu_chains_t *chains)
{
    uint64_t first = 0, time;
    tu_chain_t *chain;

    TU_LIST_FOR_EACH(chain, &chains->running, running_link) {
        if (chain->wake_at != 0 && (first == 0 || chain->wake_at < first)) {
            first = chain->wake_at;
        }
    }
    chains->wake = first;
    if (first != 0) {
        time = tu_now();
        tu_timer_set(chains->timer, first > time ? first - time : 1, 0);
    }
}

/* Queues the chains whose delay is over at `due`. */
static void queue_those(tu_chains_t *chains, uint64_t due)
{
    tu_chain_t *chain;

    TU_LIST_FOR_EACH(chain, &chains->running, running_link) {
        if (chain->wake_at != 0 && chain->wake_at <= due) {
            chain->wake_at = 0; /* `advance` finds out what it waits for */
            tu_chain_enqueue(chain);
        }
    }
}

/* Whether the slice of this call from Python is over. Begins the slice if there is none. */
static bool slice_is_over(tu_chains_t *chains)
{
    uint64_t *end = &chains->worker->background.slice_end;

    if (*end == 0) {
        chains->now = tu_now();
        *end        = chains->now + TU_SEQUENCE_SLICE;
        return false;
    }
    if (++chains->calls % LOOK == 0 || chains->now > *end) {
        chains->now = tu_now();
    }
    return chains->now > *end;
}

/* Lets chains go on with what has completed, until the slice is over. Returns the number of chains that did. */
static unsigned progress(tu_hook_t *hook)
{
    tu_chains_t *chains = TU_ITEM(hook, tu_chains_t, hook);
    unsigned moved      = 0;
    bool delays         = false;
    tu_chain_t *chain;

    if (chains->wake != 0 && chains->wake <= (chains->now = tu_now())) {
        queue_those(chains, chains->now);
        set_timer(chains); /* for the next delay */
    }
    if (tu_list_is_empty(&chains->queue) || slice_is_over(chains)) {
        return 0; /* they stay queued */
    }
    do {
        chain = TU_LIST_FIRST(&chains->queue, tu_chain_t, queue_link);
        tu_chain_dequeue(chain);
        delays |= advance(chain) && chain->wake_at != 0;
        moved++;
    } while (!tu_list_is_empty(&chains->queue) && chains->now <= chains->worker->background.slice_end);
    if (delays) {
        set_timer(chains);
    }
    return moved;
}

/* Does what can be done at once for this chain alone. What completes for others is left to the next progress. */
static void begin_run(tu_chain_t *chain)
{
    tu_chains_t *chains = tu_chains_of(chain->worker);
    uint64_t *end       = &chain->worker->background.slice_end;

    chains->now = tu_now();
    *end        = chains->now + TU_SEQUENCE_SLICE;
    do {
        tu_chain_dequeue(chain);
    } while (advance(chain) && tu_list_is_linked(&chain->queue_link) && chains->now <= *end);
    if (chain->running && chain->wake_at != 0) {
        set_timer(chains);
    }
}

static void cancel_operation(void *owner)
{
    tu_chain_cancel(owner);
}

/* Begins a run. Returns a verdict. */
int64_t tu_chain_run(tu_chain_t *chain)
{
    tu_worker_t *worker = chain->worker;
    tu_post_t post;
    int64_t verdict;
    uint32_t i;

    if (chain->running || chain->lost > 0) {
        return UCS_ERR_BUSY;
    }
    verdict = tu_post_begin(&post, worker, NULL);
    if (verdict != 0) {
        return verdict;
    }
    if (!tu_ring_reserve(worker)) { /* for TU_RECORD_CONCLUDED */
        return tu_post_end(&post, UCS_STATUS_PTR(UCS_ERR_NO_MEMORY));
    }
    if (chain->room > 0) {
        memset(chain->ready, 0, (chain->room + 63) / 64 * sizeof(*chain->ready));
    }
    chain->running       = true;
    chain->cancelled     = false;
    chain->lost_for_good = false;
    chain->wake_at       = 0;
    chain->unfinished    = chain->count;
    chain->cursor        = 0;
    tu_list_prepend(&tu_chains_of(worker)->running, &chain->running_link);
    worker->background.sequences++;
    tu_hook_add(worker, &tu_chains_of(worker)->hook);
    for (i = 0; i < chain->target_count; i++) {
        chain->targets[i]->written = false;
        chain->targets[i]->status  = UCS_OK;
    }
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        tu_node_reset(node);
        node->happened   = false;
        node->status     = UCS_OK;
        node->culprit    = 0;
        node->retries    = 0;
        node->steps      = 0;
        node->not_before = 0;
        node->then       = 0;
        node->flushing   = false;
        node->length     = 0;
        node->waiting    = node->waits_for;
        if (node->waiting == 0) {
            tu_node_ready(node);
        }
    }
    tu_chain_enqueue(chain); /* also if it has no requests */
    begin_run(chain);
    if (!chain->running) {
        return tu_post_end(&post, UCS_STATUS_PTR(UCS_OK));
    }
    chain->operation       = post.operation;
    post.operation->cancel = cancel_operation;
    post.operation->owner  = chain;
    return (int64_t)post.id;
}

/* Posts nothing more. If UCX has nothing of the chain, the run ends, and the chain may be destroyed. */
void tu_chain_cancel(tu_chain_t *chain)
{
    uint32_t i;

    if (!chain->running) {
        return;
    }
    chain->cancelled = true;
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        if (node->state == TU_CHAIN_WAITING) {
            tu_node_not_ready(node);
            tu_node_set_state(node, node->happened ? TU_CHAIN_DONE : TU_CHAIN_CANCELLED);
            node->has_result = node->happened && tu_node_has_data(node);
            chain->unfinished--;
        }
    }
    if (tu_list_is_empty(&chain->completed) && chain->in_flight == 0) {
        end_run(chain);
    } else {
        tu_chain_enqueue(chain);
    }
}

/* Python needs the chain no more. If UCX has something of it, it is destroyed when UCX is done with that. */
void tu_chain_free(tu_chain_t *chain)
{
    chain->freed = true;
    if (chain->running) {
        tu_chain_cancel(chain);
    } else if (chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

/* Gives up waiting for the requests of a target; `for_good`: UCX may not complete them. */
static void lose(tu_chain_t *chain, uint32_t index, bool for_good)
{
    tu_target_t *target = chain->targets[index];
    uint32_t before     = chain->lost;
    uint32_t i;

    if (target->flushing) {
        target->flushing = false;
        target->lost     = true;
        target->status   = UCS_ERR_NOT_CONNECTED;
        chain->lost++;
        chain->in_flight--;
    }
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        if (node->state == TU_CHAIN_POSTED && !tu_list_is_linked(&node->completed_link) && node->target == index) {
            node->lost = true;
            chain->lost++;
            chain->in_flight--;
            if (node->flushing) {
                target->status = UCS_ERR_NOT_CONNECTED;
            }
            tu_node_fail(node, UCS_ERR_NOT_CONNECTED);
        }
    }
    chain->lost_for_good |= for_good && chain->lost > before;
}

/* Whether an endpoint has requests in flight. */
static bool in_flight(tu_endpoint_t *endpoint)
{
    tu_chain_t *chain;
    uint32_t i;

    TU_LIST_FOR_EACH(chain, &tu_chains_of(endpoint->worker)->running, running_link) {
        for (i = 0; chain->in_flight > 0 && i < chain->count; i++) {
            const tu_node_t *node = chain->nodes[i];

            if (node->state == TU_CHAIN_POSTED && chain->targets[node->target]->endpoint == endpoint) {
                return true;
            }
        }
    }
    return false;
}

/* Posts nothing more to a target. Ends the delays of its chain: what that retries may fail now. */
static void forget(tu_chain_t *chain, uint32_t index)
{
    uint32_t i;

    chain->targets[index]->endpoint = NULL;
    for (i = 0; i < chain->count; i++) {
        chain->nodes[i]->not_before = 0;
    }
    tu_chain_enqueue(chain);
}

/* Its user has given a target up: nothing waits for its requests any more, which UCX completes later. */
void tu_chain_forget(tu_chain_t *chain, uint32_t target)
{
    if (chain->running && chain->targets[target]->endpoint != NULL) {
        lose(chain, target, false);
        forget(chain, target);
    }
}

/* With error handling, UCX is about to complete the requests. */
static void endpoint_closing(tu_endpoint_t *endpoint)
{
    tu_chain_t *chain;
    uint32_t i;

    TU_LIST_FOR_EACH(chain, &tu_chains_of(endpoint->worker)->running, running_link) {
        for (i = 0; i < chain->target_count; i++) {
            if (chain->targets[i]->endpoint == endpoint) {
                if (!endpoint->error_handling) {
                    lose(chain, i, true);
                }
                forget(chain, i);
            }
        }
    }
}

static void worker_destroyed(tu_worker_t *worker)
{
    tu_chains_t *chains = tu_chains_of(worker);

    while (!tu_list_is_empty(&chains->all)) {
        tu_chain_destroy(TU_LIST_FIRST(&chains->all, tu_chain_t, link));
    }
    tu_hook_remove(&chains->hook);
    free(chains);
}

static ucs_status_t open(tu_worker_t *worker)
{
    tu_chains_t *chains = tu_calloc(1, sizeof(*chains));

    if (chains == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    worker->extensions[TU_INDEX_chain] = chains;
    chains->worker                     = worker;
    tu_hook_init(&chains->hook, progress);
    tu_list_init(&chains->all);
    tu_list_init(&chains->running);
    tu_list_init(&chains->queue);
    return UCS_OK;
}

const tu_extension_t tu_extension_chain = {
    .open             = open,
    .in_flight        = in_flight,
    .endpoint_closing = endpoint_closing,
    .worker_destroyed = worker_destroyed,
};
