/*
 * Peers use up the endpoint configurations of a worker
 *
 * What happens. As in unreachable_peer.c: UCX cannot make the other end of a peer's endpoint, and crashes when it fails
 * the endpoint. Here the reason is that the worker has no configuration left (255 in 1.22).
 *
 * This program. Peers over TCP, up to 400 with different segment sizes, make endpoints to a server, which only
 * progresses its worker. It takes half a minute. The server crashes by SIGSEGV in 1.22. In 1.13 another bug ends it
 * earlier: an assertion in src/ucp/core/ucp_request.c.
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGSEGV.
 *
 * Suggested change. As in unreachable_peer.c.
 *
 * What trio_ucx does. Nothing, as in unreachable_peer.c.
 */
#include "common.h"

static void serve(int peers)
{
    ucp_worker_h server = open_worker(open_context(UCP_FEATURE_TAG));

    for (int i = 0; i < peers; i++) {
        char segment[32];
        snprintf(segment, sizeof segment, "%d", 4096 + 64 * i);
        ucp_context_h context = open_context_with(UCP_FEATURE_TAG, "TCP_TX_SEG_SIZE", segment);
        ucp_worker_h peer = open_worker(context);
        ucp_ep_h endpoint = connect_workers(peer, server);
        progress_both(server, peer, 0.01);
        close_by_force(peer, endpoint);
        ucp_worker_destroy(peer);
        ucp_cleanup(context);
    }
}

int main(void)
{
    option("UCX_TLS", "tcp");
    option("UCX_NET_DEVICES", "lo");
    option("UCX_ADDRESS_VERSION", "v2");
    option("UCX_RESOLVE_REMOTE_EP_ID", "y");
    ended(start(serve, 200), "200 peers");
    ended(start(serve, 400), "400 peers");
    return 0;
}
