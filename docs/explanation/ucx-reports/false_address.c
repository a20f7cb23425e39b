/*
 * A peer gives a worker address to a server in which the system device of its only device is wrong. Both make an
 * endpoint. Then the request of the peer's UCX arrives, with the true address, at the server's endpoint: the server's
 * process ends. UCX compares the two addresses only at the worker with the greater uuid.
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
