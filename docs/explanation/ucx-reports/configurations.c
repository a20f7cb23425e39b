/*
 * Peers with other segment sizes than each other make endpoints to a server, which only progresses its worker. A worker
 * has 255 endpoint configurations. UCX cannot make one for the next peer, and crashes when it fails the endpoint.
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
