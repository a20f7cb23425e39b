/*
 * MM_ERROR_HANDLING on one side only
 *
 * What happens. A peer with UCX_MM_ERROR_HANDLING=y uses shared memory for an endpoint with error handling; a peer on
 * the same host with the default (n) cannot. By worker address nobody compares. The first peer connects over shared
 * memory alone; eager messages arrive. To answer a rendezvous the other peer needs an endpoint, which fails there:
 * UNREACHABLE, "no active messages transport: sysv/memory - no peer failure handler". The first peer is not told: its
 * send stays pending, its endpoint stays well.
 *
 * This program. A message of 1 MiB from a peer with MM_ERROR_HANDLING=y to one with the default (n). The sender gives
 * up after 30 seconds: its rendezvous never completes, and its endpoint never fails.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. Let a worker address say that an interface handles peer failure: one more UCP_ADDR_IFACE_FLAG in
 * src/ucp/wireup/address.c, which ucp_wireup_fill_peer_err_criteria (src/ucp/wireup/select.c) demands of the remote
 * side, too. Then both choose TCP. Or make y the default of MM_ERROR_HANDLING (src/uct/sm/mm/base/mm_iface.c). In any
 * case a wireup request that cannot be answered should be refused with a message.
 *
 * What trio_ucx does. Peer descriptions and worker addresses say whether shared memory handles errors; if one side's
 * does not, the endpoint uses TCP.
 */
#include "common.h"

enum { LENGTH = 1 << 20 };

static char buffer[LENGTH];

static void sender(int fd)
{
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_t failure = UCS_OK, status;
    size_t length;

    setenv("UCX_MM_ERROR_HANDLING", "y", 1);
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    put_address(fd, worker);
    ucp_ep_h endpoint = connect_to(worker, get_block(fd, &length), &failure);
    wait_for(worker, ucp_tag_send_nbx(endpoint, buffer, 100, 1, &param), 5, &status);
    must(status, "short message");
    wait_for(worker, ucp_tag_send_nbx(endpoint, buffer, LENGTH, 1, &param), 30, &status);
    printf("sender: %s; its endpoint: %s\n", ucs_status_string(status), ucs_status_string(failure));
    progress_for(worker, 5);
}

static void receiver(int fd)
{
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_t failure = UCS_OK, status;
    size_t length;
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));

    put_address(fd, worker);
    connect_to(worker, get_block(fd, &length), &failure);
    for (int i = 0; i < 2; i++) {
        wait_for(worker, ucp_tag_recv_nbx(worker, buffer, LENGTH, 1, -1, &param), 10, &status);
        printf("receiver: %s; its endpoint: %s\n", ucs_status_string(status), ucs_status_string(failure));
    }
    progress_for(worker, 25);
}

int main(void)
{
    pid_t pids[2];

    option("UCX_TLS", "tcp,sm,self");
    start_two(sender, receiver, pids);
    ended(pids[0], "sender");
    ended(pids[1], "receiver");
    return 0;
}
