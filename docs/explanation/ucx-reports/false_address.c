/*
 * A false worker address
 *
 * What happens. Two programs exchange worker addresses, and each makes an endpoint. UCX pairs the two: the worker with
 * the greater uuid processes the other's WIREUP_REQUEST at the endpoint that it has made already, and selects the lanes
 * again, by the address in this message. If the peer's program gave an address with a false system device, the
 * configurations differ in a way that 1.22 cannot reconfigure:
 *
 *     endpoint reconfiguration not supported yet <- ucp_wireup_init_lanes <- ucp_wireup_process_request
 *
 * 1.13 cannot reconfigure at all. 1.22 can after some differences, but ucp_wireup_check_is_reconfigurable refuses three
 * more things: lanes for tag matching; a UCX_FENCE_MODE other than strong; and a new lane for active messages when the
 * wireup messages have a lane of their own. And ucp_wireup_get_reachable_mds ends the process by ucs_assert_always if a
 * memory domain of the peer belongs to another component than before. (We only read this, and did not try it.)
 *
 * This program. Two workers in one process. The one with the smaller uuid gives an address with a system device that it
 * does not have. Then the request of its UCX arrives, with the true address, at the other's endpoint. SIGABRT kills the
 * process each time, in 1.13 and 1.22.
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGABRT.
 *
 * Suggested change. src/ucp/wireup/wireup.c: fail the endpoint (ucp_ep_set_lanes_failed_schedule) rather than the
 * process.
 *
 * What trio_ucx does. Nothing: a peer that was let in is trusted not to give a false address.
 */
#include "common.h"

#define DEVICE 9 /* behind the header and the uuid */
#define SYSTEM_DEVICE 0x20

static uint64_t uuid_of(ucp_worker_h worker, char *copy, size_t *length)
{
    ucp_address_t *address;
    uint64_t uuid;

    must(ucp_worker_get_address(worker, &address, length), "ucp_worker_get_address");
    memcpy(copy, address, *length);
    memcpy(&uuid, copy + 1, sizeof uuid);
    return uuid;
}

static void meet(int false_device)
{
    ucp_context_h context = open_context(UCP_FEATURE_TAG);
    ucp_worker_h server = open_worker(context), peer;
    char of_server[4096], of_peer[4096];
    size_t length;
    uint64_t greater = uuid_of(server, of_server, &length);
    ucs_status_t failure = UCS_OK;

    do
        peer = open_worker(context);
    while (uuid_of(peer, of_peer, &length) > greater);
    if (false_device) {
        memmove(of_peer + DEVICE + 3, of_peer + DEVICE + 2, length - DEVICE - 2);
        of_peer[DEVICE + 1] |= SYSTEM_DEVICE;
        of_peer[DEVICE + 2] = 3;
    }
    connect_to(server, of_peer, &failure);
    connect_to(peer, of_server, &failure);
    progress_both(peer, server, 1);
}

int main(void)
{
    option("UCX_TLS", "tcp");
    option("UCX_NET_DEVICES", "lo");
    option("UCX_RESOLVE_REMOTE_EP_ID", "y");
    ended(start(meet, 0), "true address");
    ended(start(meet, 1), "false address");
    return 0;
}
