/* What became of a chain's requests: states, errors and results, for Python. */
#include <string.h>

#include "chain/chain.h"

/* Whether UCX still has something of it. */
bool tu_chain_busy(const tu_chain_t *chain)
{
    return chain->running || chain->lost > 0;
}

/* Forgets the last run: all requests are in this state, without results. */
void tu_chain_restart(tu_chain_t *chain, int state)
{
    uint32_t i;

    for (i = 0; i < chain->count; i++) {
        tu_node_set_state(chain->nodes[i], state);
        chain->nodes[i]->has_result = false;
    }
}

/* The bytes that a chain takes, without what UCX needs for its requests. */
size_t tu_chain_memory(const tu_chain_t *chain)
{
    return chain->memory;
}

void tu_chain_report(const tu_chain_t *chain, uint32_t request, tu_chain_report_t *out)
{
    const tu_node_t *node;

    memset(out, 0, sizeof(*out));
    if (request >= chain->count) {
        return;
    }
    node         = chain->nodes[request];
    out->state   = node->state;
    out->status  = node->status;
    out->culprit = node->culprit;
    out->length  = node->has_result ? node->length : 0;
    out->offset   = node->offset;
    out->steps   = node->steps;
    out->retries = node->retries;
    out->target  = node->target;
    out->result  = node->has_result ? node->result : NULL;
}

/* Reports the first `count` requests at once, with their results one after the other in `results`; if that is NULL, the
 * results stay where they are. Returns the length of the results; `failed` is the number of requests that UCX
 * failed. */
uint64_t tu_chain_reports(const tu_chain_t *chain, uint32_t count, tu_chain_report_t *out, char *results,
                          uint32_t *failed)
{
    uint64_t size = 0;
    uint32_t i;

    *failed = 0;
    for (i = 0; i < count; i++) {
        tu_chain_report(chain, i, &out[i]);
        *failed += out[i].state == TU_CHAIN_FAILED;
        if (out[i].result != NULL && chain->nodes[i]->request.into == NULL) {
            if (results != NULL) {
                memcpy(results + size, out[i].result, out[i].length);
                out[i].result = results + size;
            }
            size += out[i].length;
        }
    }
    return size;
}

/* The number of requests that failed, or were cancelled, in the last run. */
uint32_t tu_chain_errors(const tu_chain_t *chain)
{
    return chain->errors;
}

/* The results of the first `count` requests, if all of these succeeded or were skipped: the length of each (of one that
 * was skipped: TU_CHAIN_NO_VALUE), and, unless `results` is NULL, the bytes, one result after the other. Results in the
 * user's memory are not copied. Returns the length of the bytes, or -1. */
int64_t tu_chain_values(const tu_chain_t *chain, uint32_t count, uint64_t *lengths, char *results)
{
    int64_t size = 0;
    uint32_t i;

    for (i = 0; i < count; i++) {
        const tu_node_t *node = chain->nodes[i];

        if (node->state != TU_CHAIN_DONE && node->state != TU_CHAIN_SKIPPED) {
            return -1;
        }
        lengths[i] = node->state == TU_CHAIN_SKIPPED ? TU_CHAIN_NO_VALUE : node->has_result ? node->length : 0;
        if (node->state == TU_CHAIN_DONE && node->has_result && node->result != NULL && node->request.into == NULL) {
            if (results != NULL) {
                memcpy(results + size, node->result, node->length);
            }
            size += (int64_t)node->length;
        }
    }
    return size;
}
