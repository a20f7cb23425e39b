/*
 * Shared memory: a killed reader's full queue
 *
 * What happens. A forced close discards the endpoint's transports: it flushes them, with UCT_FLUSH_FLAG_CANCEL.
 * uct_mm_ep_flush ignores that flag, and returns NO_RESOURCE as long as the peer's queue is full. If the peer was
 * killed, that is for ever: the discard waits in the interface's arbiter. The application sees the close end, but the
 * worker's flush never completes, ucp_worker_arm returns BUSY until the worker is destroyed, nobody can wait for events
 * any more, and the endpoint's memory and attached segments stay.
 *
 * This program. A process is killed while its shared-memory queue is full; its peer closes the endpoint by force. With
 * a queue that is not full (20 messages instead of 1,000) the flush ends, and the worker can be armed.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. uct_mm_ep_flush in src/uct/sm/mm/base/mm_ep.c: with UCT_FLUSH_FLAG_CANCEL return UCS_OK at once, as
 * uct_tcp_ep_flush does. All that an endpoint sends is in the queue already or still in UCP's hands, so there is
 * nothing that the peer's death leaves behind.
 *
 * What trio_ucx does. A worker that cannot be armed looks for events, ever more rarely.
 */
#include "common.h"

static void reader(int fd)
{
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));

    put_address(fd, worker);
    progress_for(worker, 0.3);
    pause();
}

int main(void)
{
    static char message[4000];
    ucp_request_param_t param = {.op_attr_mask = 0}, force = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_t failure = UCS_OK, status;
    size_t length;
    int ends[2];

    option("UCX_TLS", "sysv,self");
    option("UCX_MM_ERROR_HANDLING", "y");
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 3;
    pid_t pid = start(reader, ends[1]);
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP));
    ucp_ep_h endpoint = connect_to(worker, get_block(ends[0], &length), &failure);

    wait_for(worker, ucp_tag_send_nbx(endpoint, message, sizeof message, 1, &param), 5, &status);
    must(status, "first message");
    progress_for(worker, 0.6); /* the connection is complete, and the reader has stopped reading */
    for (int i = 0; i < 1000; i++)
        ucp_tag_send_nbx(endpoint, message, sizeof message, 1, &param);
    progress_for(worker, 0.2);
    kill(pid, SIGKILL);
    ended(pid, "reader");
    wait_for(worker, ucp_ep_close_nbx(endpoint, &force), 3, &status);
    printf("the forced close: %s\n", ucs_status_string(status));
    progress_for(worker, 0.5);
    int done = wait_for(worker, ucp_worker_flush_nbx(worker, &param), 0.4, &status);
    printf("after that the worker's flush %s\n", done ? "ends" : "does not end");
    for (double end = now() + 0.4; (status = ucp_worker_arm(worker)) == UCS_ERR_BUSY && now() < end;)
        ucp_worker_progress(worker);
    printf("and ucp_worker_arm: %s\n", ucs_status_string(status));
    return 0;
}
