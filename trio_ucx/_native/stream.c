/* UCP streams: sends, and collects what arrives, as pieces of memory that are borrowed from UCX.
 *
 * Data is collected at once, because UCX drops unread data when the peer closes, and a posted receive cannot be
 * cancelled without loss. */
#include "native.h"

/* Collects what one endpoint has received: a record for each piece. If the ring has no room, the endpoint is marked, as
 * UCX does not report it again before more data arrives. */
static void collect_from(tu_worker_t *worker, tu_endpoint_t *endpoint, ucp_ep_h ep)
{
    ucs_status_ptr_t data;
    size_t length;

    while (tu_ring_find_room(worker)) {
        data = ucp_stream_recv_data_nb(ep, &length);
        if (!UCS_PTR_IS_PTR(data)) {
            return;
        }
        tu_ring_append(worker, TU_RECORD_STREAM, endpoint->id, UCS_OK, length, 0, (uint64_t)(uintptr_t)data);
    }
    endpoint->unread = true;
    worker->unread   = true;
}

static void collect_unread(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    worker->unread = false;
    TU_LIST_FOR_EACH(endpoint, &worker->endpoints, link) {
        if (endpoint->unread) {
            endpoint->unread = false;
            collect_from(worker, endpoint, endpoint->ep);
        }
    }
}

/* Collects what has arrived on any endpoint. */
void tu_stream_collect(tu_worker_t *worker)
{
    ucp_stream_poll_ep_t ready;

    if (worker->unread) {
        collect_unread(worker);
    }
    while (ucp_stream_worker_poll(worker->worker, &ready, 1, 0) == 1) {
        collect_from(worker, ready.user_data, ready.ep);
    }
}

/* UCX wants an endpoint to give data back, but accepts any of the worker's; the one that received it may have gone. */
static ucp_ep_h some_endpoint(tu_worker_t *worker)
{
    ucp_worker_attr_t attr = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS};
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS};

    if (!tu_list_is_empty(&worker->endpoints)) {
        return TU_LIST_FIRST(&worker->endpoints, tu_endpoint_t, link)->ep;
    }
    if (worker->spare == NULL && ucp_worker_query(worker->worker, &attr) == UCS_OK) {
        params.address = attr.address;
        if (ucp_ep_create(worker->worker, &params, &worker->spare) != UCS_OK) {
            worker->spare = NULL;
        }
        ucp_worker_release_address(worker->worker, attr.address);
    }
    return worker->spare; /* ends with the worker */
}

/* Gives a piece of a stream back to UCX. */
void tu_stream_release(tu_worker_t *worker, uint64_t data)
{
    ucp_ep_h ep = some_endpoint(worker);

    if (ep != NULL) {
        ucp_stream_data_release(ep, (void *)(uintptr_t)data);
    }
}

int64_t tu_stream_send(tu_endpoint_t *endpoint, const tu_buffers_t *buffers)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, endpoint->worker, buffers);

    if (verdict != 0) {
        return verdict;
    }
    return tu_post_end(&post, ucp_stream_send_nbx(endpoint->ep, post.address, post.count, &post.param));
}
