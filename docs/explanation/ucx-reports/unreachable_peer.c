/*
 * A worker that cannot reach a peer which asks for an endpoint
 *
 * What happens. When a peer requests the other end of its endpoint, ucp_wireup_process_request makes an endpoint and
 * selects lanes. If that fails, it schedules the endpoint's failure. But this endpoint has no configuration yet, so
 * ucp_ep_get_cm_lane takes entry 65,535 of the worker's configurations:
 *
 *     ucp_ep_get_cm_lane <- ucp_ep_set_lanes_failed <- ucp_ep_set_lanes_failed_progress
 *
 * The selection fails if the peer's transport reaches the worker, but none of the worker's reaches the peer: their
 * options differ, or there is a route in one direction only. It also fails if the worker has no configuration left (255
 * in 1.22). A hostile peer can use them up: it sends 256 addresses of version 2, each with a different segment size.
 *
 * This program. A peer whose shared memory handles errors (MM_ERROR_HANDLING) makes an endpoint to a server whose
 * shared memory does not. The server only progresses its worker, and crashes each time: SIGSEGV in 1.22, an assertion
 * in 1.13. configurations.c shows the same with configurations that are used up.
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGSEGV.
 *
 * Suggested change. src/ucp/wireup/wireup.c: delete an endpoint without configuration where the selection of its lanes
 * fails (ucp_ep_delete, as ucp_wireup_send_ep_removed does).
 *
 * What trio_ucx does. Its worker addresses say what shared memory and which transports a worker can use, and peers leave
 * out the rest. Of others, authkey= keeps a worker's address from strangers, and the key gate its ports.
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
