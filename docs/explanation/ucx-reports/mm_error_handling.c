/*
 * Shared memory: MM_ERROR_HANDLING=y on the sending side, the default (n) on the other. Both ask for error handling.
 * The sender's rendezvous never completes, and its endpoint never fails.
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
