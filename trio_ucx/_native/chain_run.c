/* Running a request chain: what depends on results is decided here.
 *
 * A node is a request. It is ready when all that it waits for is over; then its condition and its arguments are
 * evaluated, and it is posted. UCX's callbacks only note that something has landed: what follows from it happens after
 * the progress call that brought it (tu_chains_progress), because UCX's callbacks are no place to post from.
 *
 * Several nodes may be ready: the one that was added first begins first, and is not waited for. A put for which others
 * wait is over when a flush after it is; all other puts are flushed at the end of the run.
 *
 * A run is one operation for Python: its record comes when all nodes are over and UCX has nothing more of the chain.
 */
#include <string.h>
#include <time.h>

#include "chain.h"

#define DEPTH 64               /* requests and flushes that UCX has of one chain */
#define LOOK 16                /* requests, or calls, between two looks at the clock */

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

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

static void set_ready(tu_node_t *node)
{
    tu_chain_t *chain = node->chain;

    chain->ready[node->index / 64] |= (uint64_t)1 << node->index % 64;
    if (node->index < chain->first) {
        chain->first = node->index;
    }
    enqueue(chain);
}

static void clear_ready(tu_node_t *node)
{
    node->chain->ready[node->index / 64] &= ~((uint64_t)1 << node->index % 64);
}

/* The first one from `index` on that is ready; `count` when none is. */
static uint32_t next_ready(const tu_chain_t *chain, uint32_t index)
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

static void landed(tu_node_t *node, ucs_status_t status)
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

static void conclude(tu_node_t *node, int state)
{
    tu_chain_t *chain = node->chain;
    int failed        = state != TU_CHAIN_DONE && state != TU_CHAIN_SKIPPED;
    size_t i;

    node->state = state;
    chain->unfinished--;
    for (i = 0; i < node->edge_count; i++) {
        tu_node_t *other = chain->nodes[node->edges[i].request];

        if (other->state != TU_CHAIN_WAITING) {
            continue;
        }
        if (failed && node->edges[i].strict && !other->spoiled) {
            other->spoiled = 1;
            other->culprit = node->index;
        }
        if (--other->waiting == 0) {
            set_ready(other);
        }
    }
}

static void conclude_for(tu_node_t *node, const tu_reason_t *reason)
{
    node->culprit = reason->culprit;
    conclude(node, reason->state);
}

static void fail(tu_node_t *node, ucs_status_t status)
{
    node->status = status;
    conclude(node, TU_CHAIN_FAILED);
}

static void begin_again(tu_node_t *node)
{
    node->state      = TU_CHAIN_WAITING;
    node->waiting    = 0;
    node->spoiled    = 0;
    node->has_result = 0;
    node->continuing = 0;
}

/* Runs a request again whose condition was false, and before it what it says. All of that is over, and of those that
 * wait for it the ones that have not begun wait anew. */
static void retry(tu_node_t *node)
{
    tu_chain_t *chain                = node->chain;
    const tu_chain_request_t *request = &node->request;
    uint64_t not_before              = request->delay > 0 ? now() + request->delay : 0;
    size_t i, edge;

    begin_again(node);
    for (i = 0; i < request->again_count; i++) {
        begin_again(chain->nodes[request->again[i]]);
        chain->unfinished++;
    }
    for (i = 0; i < request->again_count; i++) {
        tu_node_t *before = chain->nodes[request->again[i]];

        for (edge = 0; edge < before->edge_count; edge++) {
            tu_node_t *other = chain->nodes[before->edges[edge].request];

            if (other->state == TU_CHAIN_WAITING) {
                clear_ready(other);
                other->waiting++;
            }
        }
    }
    for (i = 0; i < request->again_count; i++) {
        tu_node_t *before = chain->nodes[request->again[i]];

        if (before->waiting == 0) {
            before->not_before = not_before;
            set_ready(before);
        }
    }
    if (node->waiting == 0) {
        node->not_before = not_before;
        set_ready(node);
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
            other->state   = TU_CHAIN_NOT_EVALUATED;
            other->culprit = node->index;
            chain->unfinished--;
        }
    }
}

static void condition_false(tu_node_t *node)
{
    if (node->retries < node->request.retries && !node->chain->cancelled) {
        node->retries++;
        retry(node);
    } else if (node->request.on_false == TU_FALSE_ERROR) {
        conclude(node, TU_CHAIN_FALSE);
    } else if (node->request.on_false == TU_FALSE_SKIP) {
        conclude(node, TU_CHAIN_SKIPPED);
    } else {
        stop(node);
        conclude(node, TU_CHAIN_SKIPPED);
    }
}

/* ---- posting ---- */

static void lost_no_more(tu_chain_t *chain)
{
    chain->lost--;
    if (chain->freed && !chain->running && chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

static void over(void *request, ucs_status_t status, void *user_data)
{
    tu_node_t *node   = user_data;
    tu_chain_t *chain = node->chain;

    ucp_request_free(request);
    if (node->lost) {
        node->lost = 0;
        lost_no_more(chain);
    } else {
        chain->in_flight--;
        landed(node, status);
    }
}

static void begin_post(tu_node_t *node, ucp_request_param_t *param, int memory)
{
    memset(param, 0, sizeof(*param));
    param->op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param->cb.send      = over;
    param->user_data    = node;
    if (memory != TU_MEMORY_UNKNOWN) {
        param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param->memory_type   = (ucs_memory_type_t)(memory - 1);
    }
    node->state = TU_CHAIN_POSTED; /* now: UCX may call back from inside the call */
    node->chain->in_flight++;
    node->chain->worker->counts.chain_requests++;
}

static void end_post(tu_node_t *node, ucs_status_ptr_t answer)
{
    if (!UCS_PTR_IS_PTR(answer)) {
        node->chain->in_flight--;
        landed(node, UCS_PTR_RAW_STATUS(answer));
    }
}

/* Something that needs nothing of UCX. */
static void done_at_once(tu_node_t *node)
{
    node->state = TU_CHAIN_POSTED;
    landed(node, UCS_OK);
}

static int is_written(const tu_node_t *node)
{
    return node->request.kind == TU_CHAIN_PUT && node->length > 0;
}

/* A put for which others wait: they go out when it has happened. */
static void flush_put(tu_node_t *node, tu_target_t *target)
{
    ucp_request_param_t param;

    node->flushing  = 1;
    target->written = 0;
    begin_post(node, &param, TU_MEMORY_UNKNOWN);
    end_post(node, ucp_ep_flush_nbx(target->endpoint->ep, &param));
}

/* ---- arguments ---- */

/* An argument that was not given is `otherwise`. Returns 0, or -1 when the request is over instead. */
static int argument(tu_node_t *node, const tu_terms_t *terms, tu_integer_t otherwise, tu_integer_t *out)
{
    tu_reason_t reason;

    if (terms->count == 0) {
        *out = otherwise;
        return 0;
    }
    if (tu_terms_evaluate(node->chain, terms, out, &reason) < 0) {
        conclude_for(node, &reason);
        return -1;
    }
    return 0;
}

static int out_of_bounds(tu_node_t *node, ucs_status_t why)
{
    node->status = why;
    conclude(node, TU_CHAIN_OUT_OF_BOUNDS);
    return -1;
}

static tu_target_t *choose_target(tu_node_t *node)
{
    tu_integer_t choice;
    tu_target_t *target;

    if (argument(node, &node->request.choice, 0, &choice) < 0) {
        return NULL;
    }
    if (choice < 0 || choice >= (tu_integer_t)node->request.target_count) {
        out_of_bounds(node, UCS_ERR_OUT_OF_RANGE);
        return NULL;
    }
    node->target = node->request.targets[(size_t)choice];
    target       = node->chain->targets[node->target];
    if (target->endpoint == NULL) {
        fail(node, UCS_ERR_NOT_CONNECTED);
        return NULL;
    }
    return target;
}

/* Where in the target; all of `length` bytes from there on must be in it. */
static int choose_place(tu_node_t *node, const tu_target_t *target, tu_integer_t length)
{
    tu_integer_t offset;

    if (node->continuing) {
        offset = node->next_place;
    } else if (argument(node, &node->request.offset, 0, &offset) < 0) {
        return -1;
    }
    if (offset < 0 || length < 0 || length > (tu_integer_t)target->length ||
        offset > (tu_integer_t)target->length - length) {
        return out_of_bounds(node, UCS_ERR_INVALID_ADDR);
    }
    node->place  = (uint64_t)offset;
    node->length = (uint64_t)length;
    return 0;
}

static int choose_length(tu_node_t *node, uint64_t longest, tu_integer_t *out)
{
    if (argument(node, &node->request.length, (tu_integer_t)longest, out) < 0) {
        return -1;
    }
    return *out < 0 || *out > (tu_integer_t)longest ? out_of_bounds(node, UCS_ERR_EXCEEDS_LIMIT) : 0;
}

/* Where the payload is: in the user's memory, or put together in ours. Its length is `payload_size`. */
static const char *payload(tu_node_t *node)
{
    const tu_part_t *part = node->request.parts;
    const tu_part_t *end  = part + node->request.part_count;
    tu_integer_t value;
    tu_reason_t reason;
    const char *from;
    char *to = node->payload;

    if (node->payload == NULL) {
        return node->payload_size > 0 ? part->address : "";
    }
    for (; part < end; part++) {
        switch (part->kind) {
        case TU_PART_INTEGER:
            if (tu_terms_evaluate(node->chain, &part->value, &value, &reason) < 0) {
                conclude_for(node, &reason);
                return NULL;
            }
            tu_integer_store(to, value, part->length, part->big);
            break;
        case TU_PART_RESULT:
            from = tu_chain_result(node->chain, part->request, part->offset, part->length, &reason);
            if (from == NULL) {
                conclude_for(node, &reason);
                return NULL;
            }
            memcpy(to, from, part->length);
            break;
        default:
            memcpy(to, part->address, part->length);
        }
        to += part->length;
    }
    return node->payload;
}

/* ---- requests ---- */

static void begin_get(tu_node_t *node, tu_target_t *target)
{
    ucp_request_param_t param;
    tu_integer_t length;

    if (choose_length(node, node->request.size, &length) < 0 || choose_place(node, target, length) < 0) {
        return;
    }
    if (length == 0) {
        done_at_once(node);
        return;
    }
    begin_post(node, &param, node->request.into != NULL ? node->request.memory : TU_MEMORY_HOST);
    end_post(node, ucp_get_nbx(target->endpoint->ep, node->result, node->length, target->address + node->place,
                               (ucp_rkey_h)target->rkey, &param));
}

static void begin_put(tu_node_t *node, tu_target_t *target)
{
    const char *data = payload(node);
    ucp_request_param_t param;
    tu_integer_t length;

    if (data == NULL || choose_length(node, node->payload_size, &length) < 0 ||
        choose_place(node, target, length) < 0) {
        return;
    }
    if (length == 0) {
        done_at_once(node);
        return;
    }
    target->written = 1;
    begin_post(node, &param, node->request.memory);
    end_post(node, ucp_put_nbx(target->endpoint->ep, data, node->length, target->address + node->place,
                               (ucp_rkey_h)target->rkey, &param));
}

static void begin_atomic(tu_node_t *node, tu_target_t *target)
{
    static const ucp_atomic_op_t operations[] = {
        [TU_ATOMIC_ADD] = UCP_ATOMIC_OP_ADD, [TU_ATOMIC_SWAP] = UCP_ATOMIC_OP_SWAP,
        [TU_ATOMIC_COMPARE_SWAP] = UCP_ATOMIC_OP_CSWAP, [TU_ATOMIC_AND] = UCP_ATOMIC_OP_AND,
        [TU_ATOMIC_OR] = UCP_ATOMIC_OP_OR, [TU_ATOMIC_XOR] = UCP_ATOMIC_OP_XOR,
    };
    size_t size = node->request.size;
    char *reply = node->result;
    ucp_request_param_t param;
    tu_integer_t operand, swapped;

    if (argument(node, &node->request.operand, 0, &operand) < 0 ||
        argument(node, &node->request.swapped, 0, &swapped) < 0 ||
        choose_place(node, target, (tu_integer_t)size) < 0) {
        return;
    }
    if ((target->address + node->place) % size != 0) {
        out_of_bounds(node, UCS_ERR_INVALID_PARAM);
        return;
    }
    tu_integer_store((char *)node->operand, operand, size, 0);
    tu_integer_store(reply, swapped, size, 0);
    target->endpoint->chain_atomics++;
    begin_post(node, &param, TU_MEMORY_HOST);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_REPLY_BUFFER;
    param.datatype      = ucp_dt_make_contig(size);
    param.reply_buffer  = reply;
    end_post(node, ucp_atomic_op_nbx(target->endpoint->ep, operations[node->request.atomic], node->operand, 1,
                                     target->address + node->place, (ucp_rkey_h)target->rkey, &param));
}

static void begin_send(tu_node_t *node, tu_target_t *target)
{
    const tu_chain_request_t *request = &node->request;
    const char *data                  = payload(node);
    ucp_request_param_t param;
    tu_integer_t length;

    if (data == NULL || choose_length(node, node->payload_size, &length) < 0) {
        return;
    }
    node->length = (uint64_t)length;
    begin_post(node, &param, request->memory);
    if (request->kind == TU_CHAIN_TAG_SEND) {
        end_post(node, ucp_tag_send_nbx(target->endpoint->ep, data, node->length, request->tag, &param));
        return;
    }
    if (request->reply) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags         = UCP_AM_SEND_FLAG_REPLY;
    }
    end_post(node, ucp_am_send_nbx(target->endpoint->ep, (unsigned)request->tag, request->header,
                                   request->header_length, data, node->length, &param));
}

static void begin_follow(tu_node_t *node, tu_target_t *target)
{
    ucp_request_param_t param;

    if (choose_place(node, target, (tu_integer_t)node->request.size) < 0) {
        return;
    }
    node->continuing = 0;
    begin_post(node, &param, TU_MEMORY_HOST);
    end_post(node, ucp_get_nbx(target->endpoint->ep, node->result, node->length, target->address + node->place,
                               (ucp_rkey_h)target->rkey, &param));
}

/* A node of a list was read: it is the one, or the next is read, or there is none. */
static void follow_on(tu_node_t *node)
{
    const tu_chain_request_t *request = &node->request;
    tu_integer_t found, next;

    node->steps++;
    if (node->chain->cancelled) {
        conclude(node, TU_CHAIN_CANCELLED);
        return;
    }
    if (argument(node, &request->until, 0, &found) < 0) {
        return;
    }
    if (found) {
        conclude(node, TU_CHAIN_DONE);
        return;
    }
    if (argument(node, &request->next, 0, &next) < 0) {
        return;
    }
    if ((request->has_end && next == (tu_integer_t)request->end) || node->steps >= request->limit) {
        if (request->until.count == 0) {
            conclude(node, TU_CHAIN_DONE);
        } else {
            condition_false(node);
        }
        return;
    }
    node->next_place = next;
    node->continuing = 1;
    node->state      = TU_CHAIN_WAITING;
    set_ready(node);
}

/* Whether it must wait for a place among the atomics of its endpoint. UCX bears only so many: _atomics.py. */
static int has_no_place(const tu_node_t *node)
{
    const tu_chain_t *chain = node->chain;
    size_t i;

    if (node->request.kind != TU_CHAIN_ATOMIC || node->spoiled) {
        return 0;
    }
    for (i = 0; i < node->request.target_count; i++) { /* whichever it will be */
        const tu_target_t *target = chain->targets[node->request.targets[i]];

        if (target->endpoint != NULL && target->endpoint->chain_atomics >= target->atomics) {
            return 1;
        }
    }
    return 0;
}

static void begin(tu_node_t *node)
{
    tu_integer_t holds;
    tu_target_t *target;

    node->not_before = 0;
    if (node->spoiled) {
        conclude(node, TU_CHAIN_NOT_EVALUATED);
        return;
    }
    if (!node->continuing) {
        node->steps = 0;
        if (argument(node, &node->request.condition, 1, &holds) < 0) {
            return;
        }
        if (!holds) {
            condition_false(node);
            return;
        }
        if (node->request.kind == TU_CHAIN_CHECK) {
            conclude(node, TU_CHAIN_DONE);
            return;
        }
    }
    target = choose_target(node);
    if (target == NULL) {
        return;
    }
    switch (node->request.kind) {
    case TU_CHAIN_GET:
        begin_get(node, target);
        break;
    case TU_CHAIN_PUT:
        begin_put(node, target);
        break;
    case TU_CHAIN_ATOMIC:
        begin_atomic(node, target);
        break;
    case TU_CHAIN_FOLLOW:
        begin_follow(node, target);
        break;
    default:
        begin_send(node, target);
    }
}

/* UCX is done with a request, or with the flush after it. */
static void go_on(tu_node_t *node)
{
    tu_chain_t *chain   = node->chain;
    tu_target_t *target = chain->targets[node->target];
    int kind            = node->request.kind;

    if (kind == TU_CHAIN_ATOMIC && target->endpoint != NULL) {
        target->endpoint->chain_atomics--;
        chain->worker->chains.blocked = chain->worker->chains.blocked > 0 ? 2 : 0; /* somebody may go on */
    }
    if (node->status != UCS_OK) {
        node->flushing = 0;
        conclude(node, TU_CHAIN_FAILED);
    } else if (kind == TU_CHAIN_FOLLOW) {
        node->has_result = 1;
        follow_on(node);
    } else if (is_written(node) && !node->flushing && node->edge_count > 0 && !chain->cancelled &&
               target->endpoint != NULL) {
        flush_put(node, target);
    } else {
        node->flushing   = 0;
        node->has_result = kind == TU_CHAIN_GET || kind == TU_CHAIN_ATOMIC;
        conclude(node, TU_CHAIN_DONE);
    }
}

/* ---- a run ---- */

static void target_flushed(void *request, ucs_status_t status, void *user_data)
{
    tu_target_t *target = user_data;
    tu_chain_t *chain   = target->chain;

    if (request != NULL) {
        ucp_request_free(request);
    }
    if (target->lost) {
        target->lost = 0;
        lost_no_more(chain);
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

        if (target->written && target->endpoint != NULL) {
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

        if (node->state == TU_CHAIN_DONE && is_written(node) && chain->targets[node->target]->status != UCS_OK) {
            node->state  = TU_CHAIN_FAILED;
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
        tu_operation_done(operation, NULL, UCS_OK, 0, 0);
    }
    if (chain->freed && chain->lost == 0) {
        tu_chain_destroy(chain);
    }
}

/* The first that is ready, and no longer is; NULL: none may begin now. */
static tu_node_t *next_to_begin(tu_chain_t *chain)
{
    tu_worker_t *worker = chain->worker;
    uint32_t index      = chain->first = next_ready(chain, chain->first);
    tu_node_t *node;

    for (; index < chain->count; index = next_ready(chain, index + 1)) {
        node = chain->nodes[index];
        if (has_no_place(node)) {
            worker->chains.blocked = 1;
            chain->blocked         = 1;
        } else if (node->not_before > worker->chains.now && node->not_before > (worker->chains.now = now())) {
            if (chain->wake_at == 0 || node->not_before < chain->wake_at) {
                chain->wake_at = node->not_before;
            }
        } else {
            clear_ready(node);
            return node;
        }
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
            go_on(node);
        }
        node = chain->in_flight < DEPTH ? next_to_begin(chain) : NULL;
        if (node == NULL) {
            break;
        }
        begin(node);
        if (++begun % LOOK == 0 && (worker->chains.now = now()) > worker->chains.until) {
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
        time = now();
        tu_timer_set(worker->chains.timer, first > time ? first - time : 1, 0);
    }
}

static void queue_those(tu_worker_t *worker, int blocked, uint64_t due)
{
    tu_chain_t *chain;

    for (chain = worker->chains.active; chain != NULL; chain = chain->next_active) {
        if ((blocked && chain->blocked) || (chain->wake_at != 0 && chain->wake_at <= due)) {
            chain->blocked = 0;
            enqueue(chain);
        }
    }
}

/* Lets chains go on with what has landed, until `chains_until`. Returns how many did. */
unsigned tu_chains_progress(tu_worker_t *worker)
{
    unsigned moved = 0;
    int delays     = 0;
    tu_chain_t *chain;

    if (worker->chains.wake != 0 && worker->chains.wake <= (worker->chains.now = now())) {
        queue_those(worker, 0, worker->chains.now);
        worker->chains.wake = 0;
        delays              = 1;
    }
    if (worker->chains.blocked == 2) {
        worker->chains.blocked = 0;
        queue_those(worker, 1, 0);
    }
    if (worker->chains.queue == NULL) {
        return 0;
    }
    if (worker->chains.until == 0) {
        worker->chains.now   = now();
        worker->chains.until = worker->chains.now + TU_CHAIN_SLICE;
    } else {
        if (++worker->chains.calls % LOOK == 0 || worker->chains.now > worker->chains.until) {
            worker->chains.now = now();
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
    memset(chain->ready, 0, (chain->room + 63) / 64 * sizeof(*chain->ready));
    chain->running     = 1;
    chain->cancelled   = 0;
    chain->blocked     = 0;
    chain->wake_at     = 0;
    chain->landed      = NULL;
    chain->landed_last = &chain->landed;
    chain->unfinished  = chain->count;
    chain->first       = chain->count;
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
        node->status     = UCS_OK;
        node->culprit    = 0;
        node->retries    = 0;
        node->steps      = 0;
        node->not_before = 0;
        node->flushing   = 0;
        node->length     = 0;
        node->waiting    = node->waits_for;
        if (node->waiting == 0) {
            set_ready(node);
        }
    }
    enqueue(chain); /* also when it has nothing to do */
    worker->chains.until = 0;
    tu_chains_progress(worker);
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

    chain->cancelled = 1;
    for (i = 0; i < chain->count; i++) {
        tu_node_t *node = chain->nodes[i];

        if (node->state == TU_CHAIN_WAITING) {
            clear_ready(node);
            node->state = TU_CHAIN_CANCELLED;
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
            fail(node, UCS_ERR_NOT_CONNECTED);
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
