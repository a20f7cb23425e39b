/*
 * Shared memory: messages are lost when buffers run out
 *
 * What happens. uct_mm_iface_process_recv needs a spare buffer before it delivers a message that is not inline. If the
 * pool has none, and cannot grow, it returns (UCT_TL_IFACE_GET_RX_DESC(..., return)), and uct_mm_iface_poll_fifo goes
 * on to the next element: the message is gone. The sender's request and flush are successful, the endpoint stays well,
 * and the receiver logs a line 30 seconds later at the earliest. The pool cannot grow when its limit is reached
 * (UCX_MM_RX_MAX_BUFS) or there is no more shared memory (/dev/shm, shmmax, limits of a container).
 *
 * This program. Sends 1,000 messages to a process that receives them later, with 512 buffers (UCX_MM_RX_MAX_BUFS): 256
 * arrive in 1.22, 448 in 1.13. With UCX_MM_RX_MAX_BUFS=-1 all do, as long as shared memory can grow.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. src/uct/sm/mm/base/mm_iface.c: uct_mm_iface_process_recv says that it could not, and
 * uct_mm_iface_poll_fifo returns 0 without raising read_index, so that the element is tried again. The queue fills, and
 * senders wait, until the application has received something. Or deliver the message without UCT_CB_PARAM_FLAG_DESC:
 * then UCP copies what it must keep.
 *
 * What trio_ucx does. Connections keep few enough buffers; raw endpoints can lose messages.
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
