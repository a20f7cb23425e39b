/* A peer is killed while its shared-memory queue is full: the sender never gets rid of its endpoint. */
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
