/*
 * A peer makes an endpoint to a server that has no transport for it: the peer's shared memory handles errors, and the
 * server's does not. The server only progresses its worker.
 */
#include "common.h"

static ucp_worker_h open_worker_with(const char *error_handling)
{
    return open_worker(open_context_with(UCP_FEATURE_TAG, "MM_ERROR_HANDLING", error_handling));
}

static void meet(int unused)
{
    ucp_worker_h server = open_worker_with("n"), peer = open_worker_with("y");

    (void)unused;
    connect_workers(peer, server);
    progress_both(peer, server, 1);
}

int main(void)
{
    option("UCX_TLS", "sysv,self");
    option("UCX_RESOLVE_REMOTE_EP_ID", "y");
    ended(start(meet, 0), "server");
    return 0;
}
