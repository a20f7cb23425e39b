/* Queries about the library, contexts, workers, endpoints, addresses and operations. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "native.h"

#define MAX_LANES 64

_Static_assert(TU_NAME_SIZE == UCP_ENTITY_NAME_MAX, "the records of cdef.h hold UCX's names");

int tu_library_thread_mode(int *mode)
{
    ucp_lib_attr_t attr = {.field_mask = UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL};
    ucs_status_t status = ucp_lib_query(&attr);

    *mode = attr.max_thread_level;
    return status;
}

int tu_context_attributes(tu_context_t *context, tu_context_attributes_t *out)
{
    ucp_context_attr_t attr = {
        .field_mask = UCP_ATTR_FIELD_REQUEST_SIZE | UCP_ATTR_FIELD_THREAD_MODE | UCP_ATTR_FIELD_MEMORY_TYPES |
                      UCP_ATTR_FIELD_NAME,
    };
    ucs_status_t status = ucp_context_query(context->context, &attr);

    if (status == UCS_OK) {
        out->request_size = attr.request_size;
        out->thread_mode  = attr.thread_mode;
        out->memory_types = attr.memory_types;
        memcpy(out->name, attr.name, sizeof(out->name));
    }
    return status;
}

int tu_worker_attributes(tu_worker_t *worker, tu_worker_attributes_t *out)
{
    ucp_worker_attr_t attr = {
        .field_mask = UCP_WORKER_ATTR_FIELD_THREAD_MODE | UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER |
                      UCP_WORKER_ATTR_FIELD_NAME | UCP_WORKER_ATTR_FIELD_MAX_INFO_STRING,
    };
    ucs_status_t status = ucp_worker_query(worker->worker, &attr);

    if (status == UCS_OK) {
        out->thread_mode      = attr.thread_mode;
        out->max_am_header    = attr.max_am_header;
        out->max_debug_string = attr.max_debug_string;
        memcpy(out->name, attr.name, sizeof(out->name));
    }
    return status;
}

int tu_address_uid(void *address, uint64_t *uid)
{
    ucp_worker_address_attr_t attr = {.field_mask = UCP_WORKER_ADDRESS_ATTR_FIELD_UID};
    ucs_status_t status            = ucp_worker_address_query(address, &attr);

    *uid = attr.worker_uid;
    return status;
}

int tu_endpoint_sockaddr(tu_endpoint_t *endpoint, bool remote, char *host, size_t size, unsigned *port)
{
    ucp_ep_attr_t attr = {
        .field_mask = remote ? UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR : UCP_EP_ATTR_FIELD_LOCAL_SOCKADDR,
    };
    ucs_status_t status = ucp_ep_query(endpoint->ep, &attr);

    if (status != UCS_OK) {
        return status;
    }
    return tu_sockaddr_text(remote ? &attr.remote_sockaddr : &attr.local_sockaddr, host, size, port);
}

/* Asks UCX for the transport and device of each lane. Needs UCX 1.14. */
static ucs_status_t query_lanes(tu_endpoint_t *endpoint, tu_transport_entry_t entries[MAX_LANES], unsigned *count)
{
    tu_ep_attr_t attr = {
        .field_mask = TU_EP_ATTR_TRANSPORTS,
        .transports = {.entries = entries, .num_entries = MAX_LANES, .entry_size = sizeof(entries[0])},
    };
    ucs_status_t status = tu_ucx_has(1, 14) ? tu_ep_query(endpoint->ep, &attr) : UCS_ERR_NOT_IMPLEMENTED;

    *count = attr.transports.num_entries;
    return status;
}

/* Whether it has a lane over TCP; also if UCX cannot say. */
bool tu_endpoint_uses_tcp(tu_endpoint_t *endpoint)
{
    tu_transport_entry_t entries[MAX_LANES];
    unsigned i, count;

    if (query_lanes(endpoint, entries, &count) != UCS_OK) {
        return true;
    }
    for (i = 0; i < count; i++) {
        if (strcmp(entries[i].transport_name, "tcp") == 0) {
            return true;
        }
    }
    return false;
}

/* Whether UCX copies all that it sends over it through shared memory; not if UCX cannot say. */
bool tu_endpoint_copies(tu_endpoint_t *endpoint)
{
    tu_transport_entry_t entries[MAX_LANES];
    unsigned i, count;
    const char *name;

    if (query_lanes(endpoint, entries, &count) != UCS_OK) {
        return false;
    }
    for (i = 0; i < count; i++) {
        name = entries[i].transport_name;
        if (strcmp(name, "sysv") != 0 && strcmp(name, "posix") != 0 && strcmp(name, "self") != 0) {
            return false;
        }
    }
    return true;
}

/* Writes "transport/device" for each lane, one a line. Needs UCX 1.14. */
int tu_endpoint_transports(tu_endpoint_t *endpoint, char *out, size_t size)
{
    tu_transport_entry_t entries[MAX_LANES];
    unsigned i, count;
    ucs_status_t status = query_lanes(endpoint, entries, &count);
    size_t used         = 0;

    if (status != UCS_OK) {
        return status;
    }
    out[0] = '\0';
    for (i = 0; i < count && used < size; i++) {
        int wrote = snprintf(out + used, size - used, "%s/%s\n", entries[i].transport_name, entries[i].device_name);

        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return UCS_OK;
}

int tu_endpoint_name(tu_endpoint_t *endpoint, char *out, size_t size)
{
    ucp_ep_attr_t attr  = {.field_mask = UCP_EP_ATTR_FIELD_NAME};
    ucs_status_t status = ucp_ep_query(endpoint->ep, &attr);

    if (status == UCS_OK) {
        snprintf(out, size, "%s", attr.name);
    }
    return status;
}

/* UCX's estimate of the time that a message of so many bytes takes. */
int tu_endpoint_evaluate(tu_endpoint_t *endpoint, size_t bytes, double *seconds)
{
    ucp_ep_evaluate_perf_param_t param = {
        .field_mask   = UCP_EP_PERF_PARAM_FIELD_MESSAGE_SIZE,
        .message_size = bytes,
    };
    ucp_ep_evaluate_perf_attr_t attr = {.field_mask = UCP_EP_PERF_ATTR_FIELD_ESTIMATED_TIME};
    ucs_status_t status;

    if (endpoint->failed) {
        return UCS_ERR_NOT_CONNECTED; /* UCX would use its lanes, which have gone */
    }
    status = ucp_ep_evaluate_perf(endpoint->ep, &param, &attr);
    if (status == UCS_OK && !isfinite(attr.estimated_time)) {
        return UCS_ERR_NO_RESOURCE; /* no data lane yet: UCX has divided by a bandwidth of 0 */
    }
    *seconds = attr.estimated_time;
    return status;
}

/* UCX's description of a pending operation. Returns UCS_ERR_NO_ELEM when it is over. */
int tu_operation_describe(tu_worker_t *worker, uint64_t id, char *out, size_t size)
{
    tu_operation_t *operation = tu_operation_find(worker, id);
    ucp_request_attr_t attr   = {
        .field_mask        = UCP_REQUEST_ATTR_FIELD_INFO_STRING | UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE,
        .debug_string      = out,
        .debug_string_size = size,
    };

    if (operation == NULL || operation->request == NULL) {
        return UCS_ERR_NO_ELEM;
    }
    return ucp_request_query(operation->request, &attr);
}
