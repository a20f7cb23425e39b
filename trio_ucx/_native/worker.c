/* The worker: creating, destroying and querying it, and the calls that make it progress. */
#include <string.h>

#include "rma/rma.h"

#define BUSY_RETRIES 4
#define PROGRESS_BUDGET 4096 /* a peer that floods us must not keep us in C for ever */

/* A client id of 0 is none. */
int tu_worker_create(tu_context_t *context, const char *name, uint64_t client_id, tu_worker_t **out)
{
    ucp_worker_params_t params = {
        .field_mask  = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    tu_worker_t *worker     = calloc(1, sizeof(*worker));
    ucs_status_t status;

    if (worker == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    if (name != NULL) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_NAME;
        params.name        = name;
    }
    if (client_id != 0) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_CLIENT_ID;
        params.client_id   = client_id;
    }
    worker->context              = context;
    worker->streams              = (context->features & UCP_FEATURE_STREAM) != 0;
    worker->knows_user_data      = tu_ucx_has(1, 18);
    worker->loses_info           = !tu_ucx_has(1, 17);
    worker->chains.last          = &worker->chains.queue;
    worker->copies.last          = &worker->copies.first;
    worker->capacity             = 2 * TU_RING_SLACK;
    worker->counts.ring_capacity = worker->capacity;
    worker->ring                 = malloc(worker->capacity * sizeof(*worker->ring));
    if (worker->ring == NULL) {
        free(worker);
        return UCS_ERR_NO_MEMORY;
    }
    if (ucp_context_query(context->context, &attr) == UCS_OK) {
        worker->memory_types = attr.memory_types;
    }
    status = ucp_worker_create(context->context, &params, &worker->worker);
    if (status == UCS_OK) {
        status = ucp_worker_get_efd(worker->worker, &worker->efd);
        if (status == UCS_OK && worker->efd < 0) {
            status = UCS_ERR_UNSUPPORTED; /* UCX 1.22 says OK without the WAKEUP feature, and gives no descriptor */
        }
        if (status == UCS_OK && (context->features & UCP_FEATURE_RMA) && (context->features & UCP_FEATURE_AM)) {
            status = tu_remote_handle(worker);
        }
        if (status != UCS_OK) {
            ucp_worker_destroy(worker->worker);
        }
    }
    if (status != UCS_OK) {
        free(worker->ring);
        free(worker);
        return status;
    }
    *out = worker;
    return UCS_OK;
}

void tu_worker_destroy(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    ucp_worker_destroy(worker->worker);
    tu_operations_free(worker);
    tu_transfers_free(worker);
    tu_services_free(worker);
    while (worker->chains.all != NULL) {
        tu_chain_destroy(worker->chains.all);
    }
    while ((endpoint = worker->closed) != NULL) {
        worker->closed = endpoint->next;
        free(endpoint);
    }
    free(worker->ring);
    free(worker->scratch);
    free(worker);
}

uint64_t tu_worker_memory_types(tu_worker_t *worker)
{
    return worker->memory_types;
}

int tu_worker_efd(tu_worker_t *worker)
{
    return worker->efd;
}

/* Copies the worker's address to out when *size has room for it; *size becomes its length either way. With net_only it
 * names no shared memory. */
int tu_worker_address(tu_worker_t *worker, int net_only, char *out, size_t *size)
{
    ucp_worker_attr_t attr = {
        .field_mask    = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS,
        .address_flags = net_only ? UCP_WORKER_ADDRESS_FLAG_NET_ONLY : 0,
    };
    ucs_status_t status    = ucp_worker_query(worker->worker, &attr);

    if (status != UCS_OK) {
        return status;
    }
    if (attr.address_length <= *size) {
        memcpy(out, attr.address, attr.address_length);
    }
    *size = attr.address_length;
    ucp_worker_release_address(worker->worker, attr.address);
    return UCS_OK;
}

char *tu_worker_arena(tu_worker_t *worker)
{
    return worker->arena;
}

/* Those of up to `small` bytes, at most TU_SMALL_MESSAGE, are received at once. */
void tu_worker_claim_messages(tu_worker_t *worker, uint64_t tag_bit, size_t small)
{
    worker->claimed_bit = tag_bit;
    worker->small       = small;
}

/* Takes up to `max` records; polling learns from it that something came. */
static size_t take_records(tu_worker_t *worker, uint64_t *out, size_t max)
{
    size_t count = tu_ring_take(worker, (tu_record_t *)out, max);

    if (count > 0) {
        tu_poll_ended(worker);
    }
    return count;
}

unsigned tu_worker_progress(tu_worker_t *worker)
{
    unsigned moved = ucp_worker_progress(worker->worker);

    worker->counts.progress_calls++;
    if (worker->streams) {
        tu_stream_collect(worker); /* before the next progress can find that a peer has gone */
    }
    if (worker->copies.first != NULL) {
        moved += tu_transfers_copy(worker);
    }
    if (worker->chains.active != NULL) {
        moved += tu_chains_progress(worker);
    }
    if (worker->unused && tu_ring_has_slack(worker)) {
        worker->unused = 0;
        tu_ring_append(worker, TU_RECORD_UNUSED, 0, UCS_OK, 0, 0, 0);
    }
    return moved;
}

/* Progresses until nothing moves, collects messages, and takes up to `max` records. Only with none left to take does
 * it arm: *armed is then TU_ARMED (the efd will become readable) or TU_BUSY (UCX cannot say when it can go on: back
 * off). TU_MORE: there is more to do at once. Returns the number of records. */
int tu_worker_turn(tu_worker_t *worker, uint64_t *out, size_t max, int arm, int *armed)
{
    int budget  = PROGRESS_BUDGET;
    int retries = BUSY_RETRIES;
    uint64_t requests = worker->counts.chain_requests;
    unsigned moved;
    size_t count;

    *armed               = TU_MORE;
    worker->chains.until = 0;
    for (;;) {
        do {
            moved = tu_worker_progress(worker);
            tu_worker_collect(worker); /* now, so that UCX does not hold a window's worth of messages for us */
        } while (moved != 0 && --budget > 0 && worker->used < max && worker->collected < TU_BATCH_BYTES &&
                 worker->copies.first == NULL); /* one copy is enough for a turn */
        count = take_records(worker, out, max);
        if (count > 0 || !arm || budget <= 0 || worker->chains.queue != NULL || worker->copies.first != NULL ||
            tu_poll_chains(worker, requests)) {
            return (int)count;
        }
        switch (ucp_worker_arm(worker->worker)) {
        case UCS_OK:
            *armed = TU_ARMED;
            return 0;
        case UCS_ERR_BUSY:
            worker->counts.arm_busy++;
            if (--retries == 0) {
                *armed = TU_BUSY;
                return 0;
            }
            break;
        default:
            return -1;
        }
    }
}

/* Progresses, once, and takes what that brought: for when something is known to have come, and time matters. */
int tu_worker_look(tu_worker_t *worker, uint64_t *out, size_t max)
{
    worker->chains.until = 0;
    tu_worker_progress(worker);
    tu_worker_collect(worker);
    return (int)take_records(worker, out, max);
}

int tu_worker_signal(tu_worker_t *worker)
{
    return ucp_worker_signal(worker->worker);
}

void tu_worker_counts(tu_worker_t *worker, tu_counts_t *out)
{
    *out            = worker->counts;
    out->poll_limit = worker->poll.limit;
}

int64_t tu_worker_flush(tu_worker_t *worker)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    return tu_post_end(&post, ucp_worker_flush_nbx(worker->worker, &post.param));
}
