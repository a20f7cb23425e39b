/* Running a request chain: what depends on results is decided here.
 *
 * A node is a request. It is ready when all that it waits for is over; then its condition and its arguments are
 * evaluated, and it is posted. UCX's callbacks only note that something has landed: what follows from it happens after
 * the progress call that brought it (tu_chains_progress), because UCX's callbacks are no place to post from.
 *
 * Several nodes may be ready: they begin in turn, and are not waited for. A put for which others
 * wait is over when a flush after it is; all other puts are flushed at the end of the run.
 *
 * A run is one operation for Python: its record comes when all nodes are over and UCX has nothing more of the chain.
 */
#include <string.h>

#include "chain/chain.h"

#define DEPTH 64               /* requests and flushes that UCX has of one chain */
#define LOOK 16                /* requests, or calls, between two looks at the clock */

/* ---- what is to be looked at ---- */

static void enqueue(tu_chain_t *chain)
{
    tu_worker_t *worker = chain->worker;

    if (!chain->queued && !chain->advancing && chain->running) {
        chain->queued        = 1;
        chain->next_queued   = NULL;
        *worker->chains.last = chain;
        worker->chains.last  = &chain->next_queued;
    }
}

static void dequeue(tu_chain_t *chain)
{
    tu_worker_t *worker = chain->worker;
    tu_chain_t **link   = &worker->chains.queue;

    if (!chain->queued) {
        return;
    }
    while (*link != chain) {
        link = &(*link)->next_queued;
    }
    *link         = chain->next_queued;
    chain->queued = 0;
    if (*link == NULL) {
        worker->chains.last = link;
    }
}

void tu_node_ready(tu_node_t *node)
{
    tu_chain_t *chain = node->chain;

    chain->ready[node->index / 64] |= (uint64_t)1 << node->index % 64;
    enqueue(chain);
}

static void clear_ready(tu_node_t *node)
{
    node->chain->ready[node->index / 64] &= ~((uint64_t)1 << node->index % 64);
}

/* The first one from `index` on that is ready, perhaps of those that are no atomics; `count` when there is none. */
static uint32_t next_ready(const tu_chain_t *chain, uint32_t index, int no_atomics)
{
    uint64_t word;

    while (index < chain->count) {
        word = chain->ready[index / 64] & ~(no_atomics ? chain->atomics[index / 64] : 0);
        word >>= index % 64;
        if (word != 0) {
            return index + (uint32_t)__builtin_ctzll(word);
        }
        index = (index / 64 + 1) * 64;
    }
    return chain->count;
}

void tu_node_landed(tu_node_t *node, ucs_status_t status)
{
    tu_chain_t *chain = node->chain;

    node->status        = status;
    node->landing       = 1;
    node->next_landed   = NULL;
    *chain->landed_last = node;
    chain->landed_last  = &node->next_landed;
    enqueue(chain);
}

/* ---- the end of a request ---- */

static void waits_less(tu_node_t *node)
{
    if (--node->waiting == 0) {
        tu_node_ready(node);
    }
}

/* Nothing that was added later runs; all of it has waited for this. */
static void stop(tu_node_t *node)
{
    tu_chain_t *chain = node->chain;
    uint32_t i;

    for (i = node->index + 1; i < chain->count; i++) {
        tu_node_t *other = chain->nodes[i];

        if (other->state == TU_CHAIN_WAITING) {
            clear_ready(other);
            tu_node_set_state(other, TU_CHAIN_NOT_EVALUATED);
            other->culprit = node->index;
            chain->unfinished--;
        }
    }
}

void tu_node_conclude(tu_node_t *node, int state)
{
    tu_chain_t *chain = node->chain;
    int failed        = state != TU_CHAIN_DONE && state != TU_CHAIN_SKIPPED;
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
        if (failed && node->edges[i].strict && !other->spoiled) {
            other->spoiled = 1;
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

static void begin_again(tu_node_t *node)
{
    tu_node_set_state(node, TU_CHAIN_WAITING);
    node->waiting    = 0;
    node->spoiled    = 0;
    node->has_result = 0;
    node->continuing = 0;
    node->arrived    = 0;
    node->flushed    = 0;
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

/* Lets a request wait for those that it waits for and that are not over: some may run again for the sake of others.
 * Returns how many there are. */
uint32_t tu_node_wait(tu_node_t *node)
{
    const tu_chain_request_t *request = &node->request;

    tu_node_set_state(node, TU_CHAIN_WAITING);
    node->waiting = count_unfinished(node->chain, request->after, request->after_count) +
                    count_unfinished(node->chain, request->behind, request->behind_count);
    return node->waiting;
}

/* Of those that wait for a request that runs again, the ones that have not begun, and are not to run again themselves,
 * wait anew. */
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
            clear_ready(other);
            other->waiting++;
        }
    }
}

/* Runs a request again whose condition was false, and before it what it says, one after the other. All of that is
 * over. */
static void retry(tu_node_t *node)
{
    tu_chain_t *chain                = node->chain;
    const tu_chain_request_t *request = &node->request;
    tu_node_t *first                 = request->again_count > 0 ? chain->nodes[request->again[0]] : node;
    size_t i;

    begin_again(node);
    for (i = 0; i < request->again_count; i++) {
        begin_again(chain->nodes[request->again[i]]);
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
        tu_node_ready(first); /* all others wait for it */
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

/* ---- a run ---- */

void tu_chain_lost_less(tu_chain_t *chain)
{
    chain->lost--;
    if (chain->freed && !chain->running && chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

static void target_flushed(void *request, ucs_status_t status, void *user_data)
{
    tu_target_t *target = user_data;
    tu_chain_t *chain   = target->chain;

    if (request != NULL) {
        ucp_request_free(request);
    }
    if (target->lost) {
        target->lost = 0;
        tu_chain_lost_less(chain);
    } else {
        chain->in_flight--;
        target->flushing = 0;
        target->status   = status;
        enqueue(chain);
    }
}

/* What was put, and nobody has waited for, is to have happened when the run ends. Whether there was any. */
static int flush_targets(tu_chain_t *chain)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send      = target_flushed,
    };
    ucs_status_ptr_t answer;
    uint32_t i;
    int any = 0;

    for (i = 0; i < chain->target_count; i++) {
        tu_target_t *target = chain->targets[i];

        if (target->written && target->endpoint == NULL) {
            target->written = 0;
            target->status  = UCS_ERR_NOT_CONNECTED;
        } else if (target->written) {
            any              = 1;
            target->written  = 0;
            target->flushing = 1;
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

/* A put may not have happened when the flush after it failed. */
static void blame_flushes(tu_chain_t *chain)
{
    int failed = 0;
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

    blame_flushes(chain);
    dequeue(chain);
    chain->running      = 0;
    chain->operation    = NULL;
    *chain->active_link = chain->next_active;
    if (chain->next_active != NULL) {
        chain->next_active->active_link = chain->active_link;
    }
    if (operation != NULL) {
        tu_operation_done(operation, NULL, chain->cancelled ? UCS_ERR_CANCELED : UCS_OK, chain->lost, 0);
    }
    if (chain->freed && chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

/* Whether it may begin now; else it is noted for what it waits. */
static int may_begin(tu_node_t *node)
{
    tu_chain_t *chain   = node->chain;
    tu_worker_t *worker = chain->worker;

    if (tu_node_has_no_place(node)) {
        if (worker->chains.blocked == 0) { /* 2: a place has come free, for which another chain may wait */
            worker->chains.blocked = 1;
        }
        chain->blocked = 1;
        return 0;
    }
    if (node->not_before > worker->chains.now && node->not_before > (worker->chains.now = tu_now())) {
        if (chain->wake_at == 0 || node->not_before < chain->wake_at) {
            chain->wake_at = node->not_before;
        }
        return 0;
    }
    return 1;
}

/* The next that is ready and may begin, in turn, so that one that is tried over and over lets others begin, too. */
static tu_node_t *next_to_begin(tu_chain_t *chain)
{
    uint32_t from  = chain->cursor;
    uint32_t to    = chain->count;
    int looked     = 0;
    int no_atomics = 0;
    uint32_t index;
    int round;

    for (round = 0; round < 2; round++) {
        for (index = next_ready(chain, from, no_atomics); index < to;
             index = next_ready(chain, index + 1, no_atomics)) {
            if (may_begin(chain->nodes[index])) {
                clear_ready(chain->nodes[index]);
                chain->cursor = index + 1;
                return chain->nodes[index];
            }
            if (chain->blocked && !looked) { /* thousands may be */
                looked     = 1;
                no_atomics = tu_chain_has_no_place(chain);
            }
        }
        from = 0;
        to   = chain->cursor < chain->count ? chain->cursor : chain->count;
    }
    return NULL;
}

/* Does what can be done now, until the slice is over: then it is queued anew. Returns 0 when the run has ended: the
 * chain may be gone. */
static int advance(tu_chain_t *chain)
{
    tu_worker_t *worker = chain->worker;
    unsigned begun      = 0;
    tu_node_t *node;

    chain->advancing = 1;
    chain->wake_at   = 0;
    for (;;) {
        while ((node = chain->landed) != NULL) {
            chain->landed = node->next_landed;
            if (chain->landed == NULL) {
                chain->landed_last = &chain->landed;
            }
            node->landing = 0;
            tu_node_go_on(node);
        }
        node = chain->in_flight < DEPTH ? next_to_begin(chain) : NULL;
        if (node == NULL) {
            break;
        }
        tu_node_begin(node);
        if (++begun % LOOK == 0 && (worker->chains.now = tu_now()) > worker->chains.until) {
            chain->advancing = 0;
            enqueue(chain);
            return 1;
        }
    }
    chain->advancing = 0;
    if (chain->unfinished == 0 && chain->in_flight == 0 && (chain->cancelled || !flush_targets(chain))) {
        end_run(chain);
        return 0;
    }
    return 1;
}

static void set_timer(tu_worker_t *worker)
{
    uint64_t first = 0, time;
    tu_chain_t *chain;

    for (chain = worker->chains.active; chain != NULL; chain = chain->next_active) {
        if (chain->wake_at != 0 && (first == 0 || chain->wake_at < first)) {
            first = chain->wake_at;
        }
    }
    worker->chains.wake = first;
    if (first != 0) {
        time = tu_now();
        tu_timer_set(worker->chains.timer, first > time ? first - time : 1, 0);
    }
}

static void queue_those(tu_worker_t *worker, int blocked, uint64_t due)
{
    tu_chain_t *chain;

    for (chain = worker->chains.active; chain != NULL; chain = chain->next_active) {
        if ((blocked && chain->blocked) || (chain->wake_at != 0 && chain->wake_at <= due)) {
            chain->blocked = 0;
            chain->wake_at = 0; /* it looks for itself */
            enqueue(chain);
        }
    }
}

/* Lets chains go on with what has landed, until `chains.until`. Returns how many did. */
unsigned tu_chains_progress(tu_worker_t *worker)
{
    unsigned moved = 0;
    int delays     = 0;
    tu_chain_t *chain;

    if (worker->chains.wake != 0 && worker->chains.wake <= (worker->chains.now = tu_now())) {
        queue_those(worker, 0, worker->chains.now);
        set_timer(worker); /* for the others */
    }
    if (worker->chains.blocked == 2) {
        worker->chains.blocked = 0;
        queue_those(worker, 1, 0);
    }
    if (worker->chains.queue == NULL) {
        return 0;
    }
    if (worker->chains.until == 0) {
        worker->chains.now   = tu_now();
        worker->chains.until = worker->chains.now + TU_CHAIN_SLICE;
    } else {
        if (++worker->chains.calls % LOOK == 0 || worker->chains.now > worker->chains.until) {
            worker->chains.now = tu_now();
        }
        if (worker->chains.now > worker->chains.until) {
            return 0; /* they stay queued */
        }
    }
    do {
        chain                = worker->chains.queue;
        worker->chains.queue = chain->next_queued;
        if (worker->chains.queue == NULL) {
            worker->chains.last = &worker->chains.queue;
        }
        chain->queued = 0;
        delays |= advance(chain) && chain->wake_at != 0;
        moved++;
    } while (worker->chains.queue != NULL && worker->chains.now <= worker->chains.until);
    if (delays) {
        set_timer(worker);
    }
    return moved;
}

/* What can be done at once, of this chain alone: for what others bring, a turn must follow. */
static void begin_run(tu_chain_t *chain)
{
    tu_worker_t *worker = chain->worker;

    worker->chains.now   = tu_now();
    worker->chains.until = worker->chains.now + TU_CHAIN_SLICE;
    do {
        dequeue(chain);
    } while (advance(chain) && chain->queued && worker->chains.now <= worker->chains.until);
    if (chain->running && chain->wake_at != 0) {
        set_timer(worker);
    }
}

/* Begins a run: a verdict. */
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
    if (chain->room > 0) {
        memset(chain->ready, 0, (chain->room + 63) / 64 * sizeof(*chain->ready));
    }
    chain->running     = 1;
    chain->cancelled   = 0;
    chain->blocked     = 0;
    chain->wake_at     = 0;
    chain->landed      = NULL;
    chain->landed_last = &chain->landed;
    chain->unfinished  = chain->count;
    chain->cursor      = 0;
    chain->next_active = worker->chains.active;
    chain->active_link = &worker->chains.active;
    if (chain->next_active != NULL) {
        chain->next_active->active_link = &chain->next_active;
    }
    worker->chains.active = chain;
    for (i = 0; i < chain->target_count; i++) {
        chain->targets[i]->written = 0;
        chain->targets[i]->status  = UCS_OK;
    }
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        begin_again(node);
        node->happened   = 0;
        node->status     = UCS_OK;
        node->culprit    = 0;
        node->retries    = 0;
        node->steps      = 0;
        node->not_before = 0;
        node->then       = 0;
        node->flushing   = 0;
        node->length     = 0;
        node->waiting    = node->waits_for;
        if (node->waiting == 0) {
            tu_node_ready(node);
        }
    }
    enqueue(chain); /* also when it has nothing to do */
    begin_run(chain);
    if (!chain->running) {
        return tu_post_end(&post, UCS_STATUS_PTR(UCS_OK));
    }
    chain->operation       = post.operation;
    post.operation->chain  = chain;
    return (int64_t)post.id;
}

/* Posts nothing more. What UCX has goes on; when there is none, the run is over, and the chain perhaps gone. */
void tu_chain_cancel(tu_chain_t *chain)
{
    uint32_t i;

    if (!chain->running) {
        return;
    }
    chain->cancelled = 1;
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        if (node->state == TU_CHAIN_WAITING) {
            clear_ready(node);
            tu_node_set_state(node, node->happened ? TU_CHAIN_DONE : TU_CHAIN_CANCELLED);
            node->has_result = node->happened && tu_node_has_data(node);
            chain->unfinished--;
        }
    }
    if (chain->landed == NULL && chain->in_flight == 0) {
        end_run(chain);
    } else {
        enqueue(chain);
    }
}

/* What UCX has of a target, and will not complete. */
static void lose(tu_chain_t *chain, uint32_t index)
{
    tu_target_t *target = chain->targets[index];
    uint32_t i;

    if (target->flushing) {
        target->flushing = 0;
        target->lost     = 1;
        target->status   = UCS_ERR_NOT_CONNECTED;
        chain->lost++;
        chain->in_flight--;
    }
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        if (node->state == TU_CHAIN_POSTED && !node->landing && node->target == index) {
            node->lost = 1;
            chain->lost++;
            chain->in_flight--;
            if (node->flushing) {
                target->status = UCS_ERR_NOT_CONNECTED;
            }
            tu_node_fail(node, UCS_ERR_NOT_CONNECTED);
        }
    }
}

/* An endpoint is going: nothing more is posted to it. UCX completes what it has, unless the endpoint has no error
 * handling. */
void tu_chains_forget(tu_endpoint_t *endpoint)
{
    tu_chain_t *chain;
    uint32_t i;

    for (chain = endpoint->worker->chains.active; chain != NULL; chain = chain->next_active) {
        for (i = 0; i < chain->target_count; i++) {
            if (chain->targets[i]->endpoint == endpoint) {
                chain->targets[i]->endpoint = NULL;
                if (!endpoint->error_handling) {
                    lose(chain, i);
                }
                enqueue(chain);
            }
        }
    }
}
