/* What request chains are compared with: the same calls of UCX in plain loops, which wait for each. chains.py compiles
 * them when it runs. Trio does not use the worker meanwhile. */
#include <string.h>
#include <time.h>

#include "native.h"

#define LOOK 1000 /* progress calls between two looks at the clock */

static const ucp_request_param_t host = {
    .op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE,
    .memory_type  = UCS_MEMORY_TYPE_HOST,
};
static const ucp_request_param_t nothing;

static ucs_status_t finish(ucp_worker_h worker, ucs_status_ptr_t request)
{
    ucs_status_t status;

    if (!UCS_PTR_IS_PTR(request)) {
        return UCS_PTR_RAW_STATUS(request);
    }
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
        ucp_worker_progress(worker);
    }
    ucp_request_free(request);
    return status;
}

/* Walks a list of nodes that begin with the offset of the next one and with a key. Returns how many were read, the last
 * of which is at `*place`, or a ucs_status_t. */
int64_t loop_follow(tu_worker_t *worker, tu_endpoint_t *endpoint, ucp_rkey_h rkey, uint64_t base, size_t size,
                    uint64_t start, uint64_t key, int64_t limit, uint64_t *place)
{
    uint64_t node[8] = {start};
    ucs_status_t status;
    int64_t steps = 0;

    do {
        *place = node[0];
        status = finish(worker->worker,
                        ucp_get_nbx(endpoint->ep, node, size, base + *place, rkey, &host));
        if (status != UCS_OK) {
            return status;
        }
        steps++;
    } while (node[1] != key && node[0] != 0 && steps < limit);
    return steps;
}

/* Reads `count` integers, 16 bytes apart, and puts `data` behind each that is `value`. Flushes after each put, or once at
 * the end. Returns how many were put, or a ucs_status_t. */
int64_t loop_pairs(tu_worker_t *worker, tu_endpoint_t *endpoint, ucp_rkey_h rkey, uint64_t base, uint64_t count,
                   uint64_t value, const char *data, int flush_each, uint64_t *found)
{
    int64_t puts = 0;
    ucs_status_t status;
    uint64_t i;

    for (i = 0; i < count; i++) {
        status = finish(worker->worker, ucp_get_nbx(endpoint->ep, &found[i], sizeof(*found), base + 16 * i,
                                                    rkey, &host));
        if (status == UCS_OK && found[i] == value) {
            status = finish(worker->worker,
                            ucp_put_nbx(endpoint->ep, data, 8, base + 16 * i + 8, rkey, &host));
            puts++;
            if (status == UCS_OK && flush_each) {
                status = finish(worker->worker, ucp_ep_flush_nbx(endpoint->ep, &nothing));
            }
        }
        if (status != UCS_OK) {
            return status;
        }
    }
    status = flush_each ? UCS_OK : finish(worker->worker, ucp_ep_flush_nbx(endpoint->ep, &nothing));
    return status == UCS_OK ? puts : status;
}

/* The owner's: progresses until somebody has put `value` at `flag`. Returns whether that was so before the deadline. */
int loop_serve(tu_worker_t *worker, volatile uint64_t *flag, uint64_t value, double seconds)
{
    time_t deadline = time(NULL) + (time_t)seconds + 1;
    int i;

    while (time(NULL) <= deadline) {
        for (i = 0; i < LOOK; i++) {
            ucp_worker_progress(worker->worker);
            if (*flag == value) {
                return 1;
            }
        }
    }
    return 0;
}
