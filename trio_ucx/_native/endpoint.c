/* Endpoints: to a socket address, to a worker address, from a connection request. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "native.h"

int tu_sockaddr_make(struct sockaddr_storage *out, socklen_t *length, int family, const char *ip, unsigned port,
                     unsigned scope)
{
    memset(out, 0, sizeof(*out));
    if (family == AF_INET) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)out;

        v4->sin_family = AF_INET;
        v4->sin_port   = htons((uint16_t)port);
        *length        = sizeof(*v4);
        return inet_pton(AF_INET, ip, &v4->sin_addr) == 1 ? 0 : -1;
    } else {
        struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;

        v6->sin6_family   = AF_INET6;
        v6->sin6_port     = htons((uint16_t)port);
        v6->sin6_scope_id = scope;
        *length           = sizeof(*v6);
        return inet_pton(AF_INET6, ip, &v6->sin6_addr) == 1 ? 0 : -1;
    }
}

int tu_sockaddr_text(const struct sockaddr_storage *address, char *host, size_t size, unsigned *port)
{
    const void *ip;

    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;

        ip    = &v4->sin_addr;
        *port = ntohs(v4->sin_port);
    } else if (address->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;

        ip    = &v6->sin6_addr;
        *port = ntohs(v6->sin6_port);
    } else {
        return UCS_ERR_INVALID_ADDR;
    }
    return inet_ntop(address->ss_family, ip, host, (socklen_t)size) != NULL ? UCS_OK : UCS_ERR_INVALID_ADDR;
}

static void endpoint_failed(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    tu_endpoint_t *endpoint = arg;

    (void)ep;
    /* Closing here would free the endpoint twice: Python does it, later. */
    if (!endpoint->failed) {
        endpoint->failed = 1;
        tu_ring_unreserve(endpoint->worker);
        tu_ring_append(endpoint->worker, TU_RECORD_FAILURE, endpoint->id, status, 0, 0, 0);
    }
}

static int endpoint_create(tu_worker_t *worker, uint64_t id, ucp_ep_params_t *params, int error_handling,
                           tu_endpoint_t **out)
{
    tu_endpoint_t *endpoint = calloc(1, sizeof(*endpoint));
    ucs_status_t status;

    if (endpoint == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    if (tu_ring_reserve(worker) < 0) {
        free(endpoint);
        return UCS_ERR_NO_MEMORY;
    }
    endpoint->worker         = worker;
    endpoint->id             = id;
    endpoint->error_handling = error_handling;
    params->field_mask     |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_USER_DATA;
    params->user_data       = endpoint;
    params->err_mode        = error_handling ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    if (error_handling) {
        params->field_mask     |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params->err_handler.cb  = endpoint_failed;
        params->err_handler.arg = endpoint;
    }
    status = ucp_ep_create(worker->worker, params, &endpoint->ep);
    if (status != UCS_OK) {
        tu_ring_unreserve(worker);
        free(endpoint);
        return status;
    }
    endpoint->next = worker->endpoints;
    endpoint->link = &worker->endpoints;
    if (endpoint->next != NULL) {
        endpoint->next->link = &endpoint->next;
    }
    worker->endpoints = endpoint;
    *out              = endpoint;
    return UCS_OK;
}

int tu_endpoint_connect(tu_worker_t *worker, uint64_t id, int family, const char *ip, unsigned port, unsigned scope,
                        int error_handling, tu_endpoint_t **out)
{
    struct sockaddr_storage address;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags      = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
    };

    if (tu_sockaddr_make(&address, &params.sockaddr.addrlen, family, ip, port, scope) < 0) {
        return UCS_ERR_INVALID_ADDR;
    }
    params.sockaddr.addr = (struct sockaddr *)&address;
    return endpoint_create(worker, id, &params, error_handling, out);
}

int tu_endpoint_to_worker(tu_worker_t *worker, uint64_t id, const char *address, int error_handling,
                          tu_endpoint_t **out)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address    = (const ucp_address_t *)address,
    };

    return endpoint_create(worker, id, &params, error_handling, out);
}

int tu_endpoint_from_request(tu_worker_t *worker, uint64_t id, uint64_t request, int error_handling,
                             tu_endpoint_t **out)
{
    ucp_ep_params_t params = {
        .field_mask   = UCP_EP_PARAM_FIELD_CONN_REQUEST,
        .conn_request = (ucp_conn_request_h)(uintptr_t)request,
    };

    return endpoint_create(worker, id, &params, error_handling, out);
}

static void unlink_endpoint(tu_endpoint_t *endpoint)
{
    endpoint->ep    = NULL;
    *endpoint->link = endpoint->next;
    if (endpoint->next != NULL) {
        endpoint->next->link = endpoint->link;
    }
}

/* Closes by force; without error handling UCX can only flush. Whatever the verdict, the endpoint can carry nothing
 * more; tu_endpoint_free releases what is left of it once the closing operation has completed. */
int64_t tu_endpoint_close(tu_endpoint_t *endpoint)
{
    ucp_ep_h ep = endpoint->ep;
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    post.param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    post.param.flags         = endpoint->error_handling ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    unlink_endpoint(endpoint);
    return tu_post_end(&post, ucp_ep_close_nbx(ep, &post.param));
}

void tu_endpoint_free(tu_endpoint_t *endpoint)
{
    tu_worker_t *worker = endpoint->worker;

    if (!endpoint->failed) {
        tu_ring_unreserve(worker);
    }
    if (endpoint->ep != NULL) {
        unlink_endpoint(endpoint);
    }
    if (endpoint->error_handling) {
        free(endpoint);
    } else { /* UCX keeps its half while the peer has the other, and gives it as an active message's sender */
        endpoint->id   = 0;
        endpoint->next = worker->closed;
        worker->closed = endpoint;
    }
}

int64_t tu_endpoint_flush(tu_endpoint_t *endpoint)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    return tu_post_end(&post, ucp_ep_flush_nbx(endpoint->ep, &post.param));
}

int tu_endpoint_sockaddr(tu_endpoint_t *endpoint, int remote, char *host, size_t size, unsigned *port)
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

/* Writes "transport/device" for each lane, one a line. Needs UCX 1.14. */
int tu_endpoint_transports(tu_endpoint_t *endpoint, char *out, size_t size)
{
#if UCP_API_VERSION >= UCP_VERSION(1, 14)
    ucp_transport_entry_t entries[64];
    ucp_ep_attr_t attr = {
        .field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS,
        .transports = {.entries = entries, .num_entries = 64, .entry_size = sizeof(entries[0])},
    };
    ucs_status_t status = ucp_ep_query(endpoint->ep, &attr);
    size_t used         = 0;
    unsigned i;

    if (status != UCS_OK) {
        return status;
    }
    out[0] = '\0';
    for (i = 0; i < attr.transports.num_entries && used < size; i++) {
        int wrote = snprintf(out + used, size - used, "%s/%s\n", entries[i].transport_name, entries[i].device_name);

        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return UCS_OK;
#else
    (void)endpoint;
    (void)out;
    (void)size;
    return UCS_ERR_NOT_IMPLEMENTED;
#endif
}

/* Sends a hello as an active message; with reply, the receiver learns which endpoint it came from. */
int64_t tu_endpoint_send_hello(tu_endpoint_t *endpoint, unsigned am_id, const void *data, size_t length, int reply)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    post.param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    post.param.flags         = UCP_AM_SEND_FLAG_EAGER | (reply ? UCP_AM_SEND_FLAG_REPLY : 0);
    return tu_post_end(&post, ucp_am_send_nbx(endpoint->ep, am_id, NULL, 0, data, length, &post.param));
}
