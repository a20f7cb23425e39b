/*
 * A receiver that is slow loses messages of shared memory when it has no buffer left for them. Nobody is told.
 *
 * UCX_MM_RX_MAX_BUFS makes the buffers few. Without it the same happens when shared memory cannot grow any more.
 */
#include "common.h"

enum { LENGTH = 2000, COUNT = 1000 };

static void receiver(int fd)
{
    static char buffer[LENGTH];
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_t status;
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;
    int count = 0;

    put_address(fd, worker);
    progress_for(worker, 0.5);
    for (double end = now() + 0.5; now() < end;) {
        ucp_worker_progress(worker);
        while ((message = ucp_tag_probe_nb(worker, 0, 0, 1, &info)) != NULL) {
            wait_for(worker, ucp_tag_msg_recv_nbx(worker, buffer, sizeof buffer, message, &param), 1, &status);
            count += status == UCS_OK;
        }
    }
    printf("%d of %d messages arrived\n", count, COUNT);
}

static void sender(int fd)
{
    static char message[LENGTH];
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_t failure = UCS_OK, status, flushed;
    size_t length;
    ucp_ep_h endpoint = connect_to(worker, get_block(fd, &length), &failure);
    void *requests[COUNT];
    int sent = 0;

    for (int i = 0; i < COUNT; i++)
        requests[i] = ucp_tag_send_nbx(endpoint, message, sizeof message, 1, &param);
    wait_for(worker, ucp_ep_flush_nbx(endpoint, &param), 4, &flushed);
    for (int i = 0; i < COUNT; i++) {
        wait_for(worker, requests[i], 0.01, &status);
        sent += status == UCS_OK;
    }
    printf("%d of %d messages were sent; flush: %s; endpoint: %s\n", sent, COUNT, ucs_status_string(flushed),
           ucs_status_string(failure));
    progress_for(worker, 0.7);
}

int main(void)
{
    pid_t pids[2];

    option("UCX_TLS", "sysv,self");
    option("UCX_MM_ERROR_HANDLING", "y");
    option("UCX_MM_RX_MAX_BUFS", "512");
    start_two(receiver, sender, pids);
    ended(pids[1], "sender");
    ended(pids[0], "receiver");
    return 0;
}
