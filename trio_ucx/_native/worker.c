/* Creates, destroys, describes and flushes workers. */
#include <string.h>
#include <unistd.h>

#include "native.h"

/* Frees everything but UCX's worker, which has gone, or was never created. */
static void worker_free(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    tu_gate_destroy(worker->gate);
    tu_long_worker_destroyed(worker);
    tu_operations_free(worker);
    tu_extensions_worker_destroyed(worker);
    while ((endpoint = TU_LIST_FIRST(&worker->closed, tu_endpoint_t, link)) != NULL) {
        tu_list_remove(&endpoint->link);
        free(endpoint);
    }
    free(worker->ring);
    free(worker->scratch);
    free(worker);
}

void tu_worker_destroy(tu_worker_t *worker)
{
    tu_gate_t *before = tu_gate_enter(worker->gate);

    tu_sockets_make_room(worker->efd);
    ucp_worker_destroy(worker->worker);
    tu_gate_leave(before);
    worker_free(worker);
}

/* Allocates everything but UCX's worker. */
static tu_worker_t *worker_allocate(tu_context_t *context, const tu_port_range_t *range, const char *wake_folder)
{
    tu_worker_t *worker = tu_calloc(1, sizeof(*worker));

    if (worker == NULL) {
        return NULL;
    }
    worker->context         = context;
    worker->streams         = (context->features & UCP_FEATURE_STREAM) != 0;
    worker->knows_user_data = tu_ucx_has(1, 18);
    worker->loses_info      = !tu_ucx_has(1, 17);
    worker->late_events     = access("/dev/infiniband", F_OK) == 0; /* all of UCX's RDMA transports need it */
    strncpy(worker->wake.folder, wake_folder, sizeof(worker->wake.folder) - 1);
    tu_list_init(&worker->hooks);
    tu_long_open(worker);
    tu_list_init(&worker->endpoints);
    tu_list_init(&worker->closed);
    worker->gate = tu_gate_create(range);
    if (worker->gate == NULL || !tu_ring_create(worker)) {
        worker_free(worker);
        return NULL;
    }
    return worker;
}

/* Creates UCX's worker, and asks what the rest needs to know of it. */
static ucs_status_t worker_create_ucx(tu_worker_t *worker, const char *name, uint64_t client_id, tu_port_range_t *range)
{
    ucp_worker_params_t params = {
        .field_mask  = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    tu_gate_t *before;
    ucs_status_t status;

    if (name != NULL) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_NAME;
        params.name        = name;
    }
    if (client_id != 0) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_CLIENT_ID;
        params.client_id   = client_id;
    }
    if (ucp_context_query(worker->context->context, &attr) == UCS_OK) {
        worker->memory_types = attr.memory_types;
    }
    tu_keepalive_guard();
    before = tu_gate_enter(worker->gate);
    tu_wake_opening(&worker->wake);
    status = ucp_worker_create(worker->context->context, &params, &worker->worker);
    tu_wake_opening(NULL);
    tu_gate_leave(before);
    range->used_up = tu_gate_ready(worker->gate);
    if (status != UCS_OK) {
        worker->worker = NULL;
        return status;
    }
    status = ucp_worker_get_efd(worker->worker, &worker->efd);
    if (status == UCS_OK && worker->efd < 0) {
        status = UCS_ERR_UNSUPPORTED; /* UCX 1.22 says OK without the WAKEUP feature, and gives no descriptor */
    }
    return status;
}

/* A client id of 0 means none; a wake_folder of "", no wake-up sockets. */
int tu_worker_create(tu_context_t *context, const char *name, uint64_t client_id, tu_port_range_t *range,
                     const char *wake_folder, tu_worker_t **out)
{
    tu_worker_t *worker = worker_allocate(context, range, wake_folder);
    ucs_status_t status;

    if (worker == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    status = worker_create_ucx(worker, name, client_id, range);
    if (status == UCS_OK) {
        status = tu_extensions_open(worker);
    }
    if (status != UCS_OK) {
        if (worker->worker != NULL) {
            ucp_worker_destroy(worker->worker);
        }
        worker_free(worker);
        return status;
    }
    *out = worker;
    return UCS_OK;
}

uint64_t tu_worker_memory_types(tu_worker_t *worker)
{
    return worker->memory_types;
}

int tu_worker_efd(tu_worker_t *worker)
{
    return worker->efd;
}

/* Copies the worker's address to `out` if *size has room for it; *size becomes its length either way. With net_only the
 * address names no shared memory. */
int tu_worker_address(tu_worker_t *worker, bool net_only, char *out, size_t *size)
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

void tu_worker_counts(tu_worker_t *worker, tu_counts_t *out)
{
    *out            = worker->counts;
    out->poll_limit = worker->poll.limit;
    out->strangers  = tu_gate_strangers(worker->gate);
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
