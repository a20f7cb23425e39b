/* Listeners, and the connection requests that they receive. */
#include "native.h"

static void connection_requested(ucp_conn_request_h request, void *arg)
{
    tu_listener_t *listener = arg;

    if (!tu_ring_has_slack(listener->worker)) {
        ucp_listener_reject(listener->listener, request);
        return;
    }
    tu_ring_append(listener->worker, TU_RECORD_REQUEST, listener->id, UCS_OK, 0, 0, (uint64_t)(uintptr_t)request);
}

int tu_listener_create(tu_worker_t *worker, uint64_t id, int family, const char *ip, unsigned port, unsigned scope,
                       tu_listener_t **out)
{
    struct sockaddr_storage address;
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
    };
    tu_listener_t *listener = tu_calloc(1, sizeof(*listener));
    ucs_status_t status;

    if (listener == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    if (!tu_sockaddr_make(&address, &params.sockaddr.addrlen, family, ip, port, scope)) {
        free(listener);
        return UCS_ERR_INVALID_ADDR;
    }
    listener->worker       = worker;
    listener->id           = id;
    params.sockaddr.addr   = (struct sockaddr *)&address;
    params.conn_handler.cb = connection_requested;
    params.conn_handler.arg = listener;
    status                 = ucp_listener_create(worker->worker, &params, &listener->listener);
    if (status != UCS_OK) {
        free(listener);
        return status;
    }
    *out = listener;
    return UCS_OK;
}

int tu_listener_sockaddr(tu_listener_t *listener, char *host, size_t size, unsigned *port)
{
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucs_status_t status      = ucp_listener_query(listener->listener, &attr);

    return status != UCS_OK ? (int)status : tu_sockaddr_text(&attr.sockaddr, host, size, port);
}

void tu_listener_destroy(tu_listener_t *listener)
{
    ucp_listener_destroy(listener->listener);
    free(listener);
}

int tu_request_client(uint64_t request, char *host, size_t size, unsigned *port)
{
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
    ucs_status_t status          = ucp_conn_request_query((ucp_conn_request_h)(uintptr_t)request, &attr);

    return status != UCS_OK ? (int)status : tu_sockaddr_text(&attr.client_address, host, size, port);
}

/* The id is 0, too, if the client sent none: UCX does not tell the two apart. */
int tu_request_client_id(uint64_t request, uint64_t *client_id)
{
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ID};
    ucs_status_t status          = ucp_conn_request_query((ucp_conn_request_h)(uintptr_t)request, &attr);

    *client_id = attr.client_id;
    return status;
}

int tu_request_reject(tu_listener_t *listener, uint64_t request)
{
    return ucp_listener_reject(listener->listener, (ucp_conn_request_h)(uintptr_t)request);
}
