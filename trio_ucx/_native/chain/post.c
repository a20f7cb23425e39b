/* Begins requests of a chain: evaluates and checks their arguments, posts them to UCX, and notes their completion.
 *
 * UCX's callbacks only note that a request has completed, because a callback must not post.
 */
#include <string.h>

#include "chain/chain.h"

/* ---- from UCX and back ---- */

/* UCX is done with a request. Nothing waits for one that is lost. */
static void ended(tu_node_t *node, ucs_status_t status)
{
    if (node->lost) {
        node->lost = false;
        tu_chain_lost_less(node->chain);
    } else {
        node->chain->in_flight--;
        tu_node_completed(node, status);
    }
}

static void request_ended(void *request, ucs_status_t status, void *user_data)
{
    ucp_request_free(request);
    ended(user_data, status);
}

static void transfer_ended(void *owner, ucs_status_t status)
{
    ended(owner, status);
}

static void begin_post(tu_node_t *node, ucp_request_param_t *param, int memory)
{
    memset(param, 0, sizeof(*param));
    param->op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param->cb.send      = request_ended;
    param->user_data    = node;
    tu_set_memory(param, memory);
    node->state = TU_CHAIN_POSTED; /* before the call, in which it may complete */
    node->chain->in_flight++;
    node->chain->worker->background.steps++;
}

static void end_post(tu_node_t *node, ucs_status_ptr_t answer)
{
    if (!UCS_PTR_IS_PTR(answer)) {
        node->chain->in_flight--;
        tu_node_completed(node, UCS_PTR_RAW_STATUS(answer));
    }
}

/* A request for which UCX has nothing to do. */
static void done_at_once(tu_node_t *node)
{
    node->state = TU_CHAIN_POSTED;
    tu_node_completed(node, UCS_OK);
}

/* Flushes after a put for which others wait: they begin when it has happened. */
static void flush_put(tu_node_t *node, tu_target_t *target)
{
    ucp_request_param_t param;

    node->flushing  = true;
    target->written = false;
    begin_post(node, &param, TU_MEMORY_UNKNOWN);
    end_post(node, ucp_ep_flush_nbx(target->endpoint->ep, &param));
}

/* ---- arguments ---- */

/* Evaluates an argument. Returns false if that has ended the request. */
static bool argument(tu_node_t *node, const tu_terms_t *terms, tu_integer_t *out)
{
    tu_reason_t reason;

    if (terms->count == 0) {
        *out = (tu_integer_t)terms->value;
        return true;
    }
    if (!tu_terms_evaluate(node->chain, terms, out, &reason)) {
        tu_node_conclude_for(node, &reason);
        return false;
    }
    return true;
}

static void out_of_bounds(tu_node_t *node, ucs_status_t why)
{
    node->status = why;
    tu_node_conclude(node, TU_CHAIN_OUT_OF_BOUNDS);
}

static tu_target_t *choose_target(tu_node_t *node)
{
    tu_integer_t choice;
    tu_target_t *target;

    if (!argument(node, &node->request.choice, &choice)) {
        return NULL;
    }
    if (choice < 0 || choice >= (tu_integer_t)node->request.targets_count) {
        out_of_bounds(node, UCS_ERR_OUT_OF_RANGE);
        return NULL;
    }
    node->target = node->request.targets[(size_t)choice];
    target       = node->chain->targets[node->target];
    if (target->endpoint == NULL) {
        tu_node_fail(node, UCS_ERR_NOT_CONNECTED);
        return NULL;
    }
    return target;
}

/* Evaluates the offset in the target; all of `length` bytes from there on must be in it. Returns false when the request
 * is over instead. */
static bool choose_offset(tu_node_t *node, const tu_target_t *target, tu_integer_t length)
{
    tu_integer_t offset;

    if (node->continuing) {
        offset = node->next_offset;
    } else if (!argument(node, &node->request.offset, &offset)) {
        return false;
    }
    if (offset < 0 || length < 0 || length > (tu_integer_t)target->length ||
        offset > (tu_integer_t)target->length - length) {
        out_of_bounds(node, UCS_ERR_INVALID_ADDR);
        return false;
    }
    node->offset  = (uint64_t)offset;
    node->length = (uint64_t)length;
    return true;
}

static bool choose_length(tu_node_t *node, uint64_t longest, tu_integer_t *out)
{
    if (!argument(node, &node->request.length, out)) {
        return false;
    }
    if (*out < 0 || *out > (tu_integer_t)longest) {
        out_of_bounds(node, UCS_ERR_EXCEEDS_LIMIT);
        return false;
    }
    return true;
}

/* The payload, of `payload_size` bytes: in the user's memory, or assembled in the node's. NULL: the request is over. */
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
            if (!tu_terms_evaluate(node->chain, &part->value, &value, &reason)) {
                tu_node_conclude_for(node, &reason);
                return NULL;
            }
            tu_integer_store(to, value, part->length, part->big);
            break;
        case TU_PART_RESULT:
            from = tu_chain_result(node->chain, part->request, part->offset, part->length, &reason);
            if (from == NULL) {
                tu_node_conclude_for(node, &reason);
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

/* Whether a target's memory can be reached without UCX's puts and gets, with local memory of this kind. */
static bool bypasses_ucx_rma(const tu_target_t *target, int memory)
{
    return target->path.messages || (target->path.local != NULL && memory <= TU_MEMORY_HOST);
}

/* Gets, puts or does an atomic by the access path of its target. When it completes, it has happened at the owner. */
static void transfer(tu_node_t *node, const tu_target_t *target, tu_transfer_kind_t kind, char *buffer, int memory,
                     const tu_atomic_terms_t *atomic)
{
    tu_transfer_params_t params = {
        .path   = &target->path,
        .kind   = kind,
        .late   = true,
        .range  = {.buffer = buffer, .offset = node->offset, .length = node->length},
        .memory = memory,
        .done   = transfer_ended,
        .owner  = node,
    };
    tu_transfer_t *transfer;
    ucs_status_t status;

    if (atomic != NULL) {
        params.atomic = *atomic;
    }
    node->stored = kind == TU_TRANSFER_PUT;
    node->state  = TU_CHAIN_POSTED; /* before the call, in which it may complete */
    node->chain->in_flight++;
    node->chain->worker->background.steps++;
    status = tu_transfer_begin(target->endpoint, &params, &transfer);
    if (status != UCS_INPROGRESS) {
        node->chain->in_flight--;
        tu_node_completed(node, status);
    }
}

/* Gets what was chosen to the node's result. */
static void read_remote(tu_node_t *node, tu_target_t *target)
{
    int memory = node->request.into != NULL ? node->request.memory : TU_MEMORY_HOST;
    ucp_request_param_t param;

    if (bypasses_ucx_rma(target, memory)) {
        transfer(node, target, TU_TRANSFER_GET, node->result, memory, NULL);
        return;
    }
    begin_post(node, &param, memory);
    tu_rma_unfenced(node->chain->worker);
    end_post(node, ucp_get_nbx(target->endpoint->ep, node->result, node->length, target->address + node->offset,
                               target->rkey, &param));
}

static void begin_get(tu_node_t *node, tu_target_t *target)
{
    tu_integer_t length;

    if (!choose_length(node, node->request.size, &length) || !choose_offset(node, target, length)) {
        return;
    }
    if (length == 0) {
        done_at_once(node);
        return;
    }
    read_remote(node, target);
}

static void begin_put(tu_node_t *node, tu_target_t *target)
{
    const char *data = payload(node);
    ucp_request_param_t param;
    tu_integer_t length;

    node->stored = false;
    if (data == NULL || !choose_length(node, node->payload_size, &length) || !choose_offset(node, target, length)) {
        return;
    }
    if (length == 0) {
        done_at_once(node);
        return;
    }
    if (bypasses_ucx_rma(target, node->request.memory)) {
        transfer(node, target, TU_TRANSFER_PUT, (char *)data, node->request.memory, NULL);
        return;
    }
    target->written = true;
    begin_post(node, &param, node->request.memory);
    tu_rma_unfenced(node->chain->worker);
    end_post(node, ucp_put_nbx(target->endpoint->ep, data, node->length, target->address + node->offset,
                               target->rkey, &param));
}

static void begin_atomic(tu_node_t *node, tu_target_t *target)
{
    tu_integer_t operand, swapped;
    tu_atomic_terms_t atomic;

    if (!argument(node, &node->request.operand, &operand) || !argument(node, &node->request.swapped, &swapped) ||
        !choose_offset(node, target, (tu_integer_t)node->request.size)) {
        return;
    }
    if ((target->address + node->offset) % node->request.size != 0) {
        out_of_bounds(node, UCS_ERR_INVALID_PARAM);
        return;
    }
    atomic = (tu_atomic_terms_t){
        .operation = node->request.atomic,
        .operand   = (uint64_t)operand,
        .swapped   = (uint64_t)swapped,
    };
    transfer(node, target, TU_TRANSFER_ATOMIC, node->result, TU_MEMORY_HOST, &atomic);
}

static void begin_send(tu_node_t *node, tu_target_t *target)
{
    const tu_chain_request_t *request = &node->request;
    const char *data                  = payload(node);
    ucp_request_param_t param;
    tu_integer_t length;

    if (data == NULL || !choose_length(node, node->payload_size, &length)) {
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
    if (!choose_offset(node, target, (tu_integer_t)node->request.size)) {
        return;
    }
    if (!node->continuing && node->request.has_end && node->offset == node->request.end) {
        tu_node_false(node); /* there is no first one */
        return;
    }
    node->continuing = false;
    node->happened   = false; /* what it found before is overwritten */
    read_remote(node, target);
}

/* A node of a list was read: it is the one that was looked for, or the next one is read, or there is none. */
static void follow_on(tu_node_t *node)
{
    const tu_chain_request_t *request = &node->request;
    tu_integer_t found, next;

    node->steps++;
    if (!argument(node, &request->until, &found)) {
        return;
    }
    if (found) {
        tu_node_conclude(node, TU_CHAIN_DONE);
        return;
    }
    if (!argument(node, &request->next, &next)) {
        return;
    }
    if ((request->has_end && next == (tu_integer_t)request->end) || node->steps >= request->limit) {
        if (request->until.count == 0) {
            tu_node_conclude(node, TU_CHAIN_DONE);
        } else {
            node->has_result = false;
            tu_node_false(node);
        }
        return;
    }
    node->next_offset = next;
    node->continuing = true;
    node->state      = TU_CHAIN_WAITING;
    tu_node_ready(node);
}

/* A node of a list was read. If requests that it depends on run again, it waits for them. */
static void follow_arrived(tu_node_t *node)
{
    node->has_result = true;
    if (node->chain->cancelled) {
        tu_node_conclude(node, TU_CHAIN_CANCELLED);
    } else if (tu_node_wait(node) > 0) {
        node->arrived = true;
    } else {
        follow_on(node);
    }
}

void tu_node_begin(tu_node_t *node)
{
    tu_integer_t holds = true;
    tu_target_t *target;

    node->not_before = 0;
    if (node->dependency_failed) {
        node->has_result = false;
        tu_node_conclude(node, TU_CHAIN_NOT_EVALUATED);
        return;
    }
    if (node->arrived) {
        node->arrived = false;
        follow_on(node);
        return;
    }
    if (!node->continuing) {
        node->steps = 0;
        if (node->request.condition.count > 0 && !argument(node, &node->request.condition, &holds)) {
            return;
        }
        if (!holds) {
            tu_node_false(node);
            return;
        }
        if (node->request.kind == TU_CHAIN_CHECK) {
            tu_node_conclude(node, TU_CHAIN_DONE);
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

void tu_node_go_on(tu_node_t *node)
{
    tu_chain_t *chain   = node->chain;
    tu_target_t *target = chain->targets[node->target];
    int kind            = node->request.kind;

    if (node->status != UCS_OK) {
        if (node->flushing) {
            target->status = node->status; /* the flush was for other puts, too */
        }
        node->flushing = false;
        tu_node_conclude(node, TU_CHAIN_FAILED);
    } else if (kind == TU_CHAIN_FOLLOW) {
        follow_arrived(node);
    } else if (tu_node_is_written(node) && !node->flushing && node->edge_count > 0 && !chain->cancelled) {
        if (target->endpoint != NULL) {
            flush_put(node, target);
        } else {
            tu_node_fail(node, UCS_ERR_NOT_CONNECTED); /* whether it has happened is not known */
        }
    } else {
        node->flushed    = node->flushing;
        node->flushing   = false;
        node->has_result = tu_node_has_data(node);
        tu_node_conclude(node, TU_CHAIN_DONE);
    }
}
