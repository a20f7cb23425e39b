/* Endpoints: connects them to a socket address, to a worker address or for a connection request, and closes them. */
#include "native.h"

#define LOOK_SHARE 20    /* looking at all sockets takes at most 1/20 of the time */
#define QUIET_BUDGET 100 /* progress calls. There is always more to do only while peers send all the time */

static void endpoint_failed(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    tu_endpoint_t *endpoint = arg;

    (void)ep;
    /* Closing it in this callback would free it twice. Python closes it later. */
    if (!endpoint->failed) {
        endpoint->failed = true;
        tu_ring_unreserve(endpoint->worker);
        tu_ring_append(endpoint->worker, TU_RECORD_FAILURE, endpoint->id, status, 0, 0, 0);
    }
}

/* NULL: there is no memory for it. */
static tu_endpoint_t *endpoint_new(tu_worker_t *worker, uint64_t id, const tu_endpoint_options_t *options)
{
    tu_endpoint_t *endpoint = tu_calloc(1, sizeof(*endpoint));

    if (endpoint == NULL || !tu_ring_reserve(worker)) {
        free(endpoint);
        return NULL;
    }
    endpoint->worker         = worker;
    endpoint->id             = id;
    endpoint->error_handling = options->error_mode != UCP_ERR_HANDLING_MODE_NONE;
    return endpoint;
}

/* Makes UCX's endpoint. If that fails, ours is freed. */
static ucs_status_t endpoint_create(tu_endpoint_t *endpoint, ucp_ep_params_t *params,
                                    const tu_endpoint_options_t *options, tu_endpoint_t **out)
{
    tu_worker_t *worker = endpoint->worker;
    tu_gate_t *before;
    ucs_status_t status;

    params->field_mask |= UCP_EP_PARAM_FIELD_USER_DATA | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->user_data   = endpoint;
    params->err_mode    = (ucp_err_handling_mode_t)options->error_mode;
    if (endpoint->error_handling) {
        params->field_mask     |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params->err_handler.cb  = endpoint_failed;
        params->err_handler.arg = endpoint;
    }
    if (options->name[0] != '\0') {
        params->field_mask |= UCP_EP_PARAM_FIELD_NAME;
        params->name        = options->name;
    }
    before = tu_gate_enter(worker->gate);
    status = ucp_ep_create(worker->worker, params, &endpoint->ep);
    tu_gate_leave(before);
    if (status != UCS_OK) {
        tu_ring_unreserve(worker);
        free(endpoint);
        return status;
    }
    tu_list_prepend(&worker->endpoints, &endpoint->link);
    *out = endpoint;
    return UCS_OK;
}

int tu_endpoint_connect(tu_worker_t *worker, uint64_t id, const tu_address_t *remote, const tu_address_t *local,
                        const tu_endpoint_options_t *options, tu_endpoint_t **out)
{
    struct sockaddr_storage remote_address, local_address;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags      = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
    };
    tu_endpoint_t *endpoint;

    if (!tu_sockaddr_make(&remote_address, &params.sockaddr.addrlen, remote->family, remote->ip, remote->port,
                          remote->scope)) {
        return UCS_ERR_INVALID_ADDR;
    }
    params.sockaddr.addr = (struct sockaddr *)&remote_address;
    if (local != NULL) {
        if (!tu_sockaddr_make(&local_address, &params.local_sockaddr.addrlen, local->family, local->ip, local->port,
                              local->scope)) {
            return UCS_ERR_INVALID_ADDR;
        }
        params.field_mask          |= UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR;
        params.local_sockaddr.addr  = (struct sockaddr *)&local_address;
    }
    if (options->send_client_id) {
        params.flags |= UCP_EP_PARAMS_FLAGS_SEND_CLIENT_ID;
    }
    endpoint = endpoint_new(worker, id, options);
    return endpoint == NULL ? UCS_ERR_NO_MEMORY : endpoint_create(endpoint, &params, options, out);
}

int tu_endpoint_to_worker(tu_worker_t *worker, uint64_t id, const void *address, const tu_endpoint_options_t *options,
                          tu_endpoint_t **out)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address    = address,
    };
    tu_endpoint_t *endpoint = endpoint_new(worker, id, options);

    return endpoint == NULL ? UCS_ERR_NO_MEMORY : endpoint_create(endpoint, &params, options, out);
}

/* *answered: whether UCX was asked to accept the request; if not, it can still be answered. */
int tu_endpoint_from_request(tu_worker_t *worker, uint64_t id, uint64_t request, const tu_endpoint_options_t *options,
                             bool *answered, tu_endpoint_t **out)
{
    ucp_ep_params_t params = {
        .field_mask   = UCP_EP_PARAM_FIELD_CONN_REQUEST,
        .conn_request = (ucp_conn_request_h)(uintptr_t)request,
    };
    tu_endpoint_t *endpoint = endpoint_new(worker, id, options);

    *answered = endpoint != NULL;
    return endpoint == NULL ? UCS_ERR_NO_MEMORY : endpoint_create(endpoint, &params, options, out);
}

static void unlink_endpoint(tu_endpoint_t *endpoint)
{
    tu_extensions_closing(endpoint);
    tu_long_endpoint_closing(endpoint, endpoint->error_handling);
    endpoint->ep = NULL;
    tu_list_remove(&endpoint->link);
}

/* UCX 1.22 resumes a flush by a callback in its next progress, and crashes there if the endpoint has gone meanwhile. So
 * nothing may be left for the next progress. */
static void progress_until_quiet(tu_worker_t *worker)
{
    int budget = QUIET_BUDGET;

    while (tu_worker_progress(worker) != 0 && --budget > 0) {
    }
}

/* Enlarges full send buffers, if that has not just been done: with many sockets it takes milliseconds. */
static void make_room(tu_worker_t *worker)
{
    uint64_t began = tu_now();

    if (began >= worker->next_room) {
        tu_sockets_make_room(worker->efd);
        worker->next_room = began + LOOK_SHARE * (tu_now() - began);
    }
}

/* Whether UCX has more to write to an endpoint's TCP sockets than they accept now. TU_CLOSE does not look again if no
 * socket of the worker was full a moment ago; TU_CLOSE_EXACT always looks. TU_CLOSE_STOP also keeps UCX from writing. */
static bool writes(tu_endpoint_t *endpoint, int how)
{
    tu_worker_t *worker = endpoint->worker;
    uint64_t began      = tu_now();
    unsigned own, full;

    if (how == TU_CLOSE && began < worker->next_look) {
        return false;
    }
    own               = tu_sockets_full(worker->efd, endpoint->ep, how == TU_CLOSE_STOP, &full);
    worker->next_look = full > 0 ? 0 : began + LOOK_SHARE * (tu_now() - began);
    return own > 0;
}

/* Closes by force; without error handling UCX can only flush. From then on the endpoint transfers nothing more. Call
 * tu_endpoint_free when the closing operation is over. Without memory for an operation UCX closes it all the same, and
 * nothing tells when it is over: otherwise UCX would go on calling back to an endpoint that is freed.
 *
 * how: TU_CLOSE_STOP: UCX writes nothing more to its TCP sockets, which it keeps until the peer closes its end, too.
 *      TU_CLOSE, TU_CLOSE_EXACT: does not close it if UCX still has something to write; returns UCS_ERR_BUSY. If an
 *      extension has requests in flight, this is TU_CLOSE_STOP, because more would follow what is written. */
int64_t tu_endpoint_close(tu_endpoint_t *endpoint, int how)
{
    unsigned flags            = endpoint->error_handling ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = flags};
    ucp_ep_h ep               = endpoint->ep;
    tu_worker_t *worker       = endpoint->worker;
    ucs_status_ptr_t closing;
    tu_post_t post;

    if (tu_extensions_in_flight(endpoint)) {
        how = TU_CLOSE_STOP;
    }
    progress_until_quiet(worker);
    if (!endpoint->failed && tu_endpoint_uses_tcp(endpoint)) {
        if (endpoint->error_handling && writes(endpoint, how) && how != TU_CLOSE_STOP) {
            return UCS_ERR_BUSY;
        }
        make_room(worker);
    }
    if (tu_post_begin(&post, worker, NULL) == 0) {
        post.param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        post.param.flags         = flags;
        unlink_endpoint(endpoint);
        return tu_post_end(&post, ucp_ep_close_nbx(ep, &post.param));
    }
    unlink_endpoint(endpoint);
    closing = ucp_ep_close_nbx(ep, &param);
    if (UCS_PTR_IS_PTR(closing)) {
        ucp_request_free(closing);
    }
    return UCS_PTR_IS_ERR(closing) ? UCS_PTR_STATUS(closing) : 0;
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
    } else { /* UCX's endpoint lives as long as the peer's, and active messages may still name it as their sender */
        endpoint->id     = 0;
        endpoint->failed = true; /* nobody needs to hear of it */
        tu_list_prepend(&worker->closed, &endpoint->link);
    }
}

/* ---- flushing ---- */

/* Flushes UCX's endpoint, and nothing of an extension's. */
int64_t tu_endpoint_flush_ucx(tu_endpoint_t *endpoint)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, NULL);

    return verdict != 0 ? verdict : tu_post_end(&post, ucp_ep_flush_nbx(endpoint->ep, &post.param));
}

/* Flushes UCX's endpoint, and what extensions have posted to it before. */
int64_t tu_endpoint_flush(tu_endpoint_t *endpoint)
{
    int64_t verdict;

    return tu_extensions_flush(endpoint, &verdict) ? verdict : tu_endpoint_flush_ucx(endpoint);
}
