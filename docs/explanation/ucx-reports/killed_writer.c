/*
 * Shared memory: a killed writer stops the queue
 *
 * What happens. All peers write to one queue of a worker. A sender takes the queue's head, writes the element, and sets
 * its owner bit. If it is killed in between, the reader waits for that element for ever: nothing that anybody sends
 * over shared memory arrives any more, and no endpoint fails. In our measurements 2 of 60 kills of a client that sends
 * 8 kB messages did that.
 *
 * This program. Needs no luck: UCX packs a generic datatype between taking the queue's head and setting the owner bit.
 * The first client's datatype ends its process right there, as SIGKILL would at any time. A second client, which does
 * nothing wrong, then sends 21 messages to the same server: none arrives, and its endpoint stays well.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. uct_mm_ep_get_remote_elem and uct_mm_ep_am_common_send in src/uct/sm/mm/base/mm_ep.c, and
 * uct_mm_iface_poll_fifo in mm_iface.c. The sender writes its process id into the element that it took; a reader whose
 * next element has not become ready for a while, although the head is past it, checks that process, and skips the
 * element if it is gone. The moment between taking the head and writing the id remains: an id of the last round there
 * means the same after a longer while. (It changes the layout that peers share.) A queue for each peer would also do.
 *
 * What trio_ucx does. A worker notices that its queue has stopped, and breaks the connections that use it; new
 * connections use another worker.
 */
#include "common.h"

static void *start_pack(void *context, const void *buffer, size_t count)
{
    return (void *)buffer;
}

static size_t packed_size(void *state)
{
    return 4000;
}

static size_t pack(void *state, size_t offset, void *target, size_t length)
{
    kill(getpid(), SIGKILL);
    return length;
}

static void finish(void *state)
{
}

static void client(int fd, int dies)
{
    static char message[4000];
    ucp_generic_dt_ops_t ops = {
        .start_pack = start_pack, .packed_size = packed_size, .pack = pack, .finish = finish};
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE, .datatype = ucp_dt_make_contig(1)};
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    ucs_status_t failure = UCS_OK, status;
    size_t length;
    ucp_ep_h endpoint = connect_to(worker, get_block(fd, &length), &failure);

    wait_for(worker, ucp_tag_send_nbx(endpoint, message, 4000, 1, &param), 10, &status);
    must(status, "first message");
    progress_for(worker, 0.5); /* the connection is complete now */
    if (dies) {
        must(ucp_dt_create_generic(&ops, NULL, &param.datatype), "ucp_dt_create_generic");
        wait_for(worker, ucp_tag_send_nbx(endpoint, message, 1, 1, &param), 10, &status);
    }
    for (int i = 0; i < 20; i++)
        wait_for(worker, ucp_tag_send_nbx(endpoint, message, 4000, 1, &param), 1, &status);
    progress_for(worker, 3);
    printf("the other client's endpoint: %s\n", ucs_status_string(failure));
}

static void dying_client(int fd)
{
    client(fd, 1);
}

static void other_client(int fd)
{
    client(fd, 0);
}

/* How many messages arrive within so many seconds. */
static int receive(ucp_worker_h worker, double seconds)
{
    static char buffer[4000];
    int count = 0;

    for (double end = now() + seconds; now() < end;) {
        ucp_tag_recv_info_t info;
        ucp_request_param_t param = {.op_attr_mask = 0};
        ucs_status_t status;
        ucp_worker_progress(worker);
        ucp_tag_message_h message = ucp_tag_probe_nb(worker, 0, 0, 1, &info);
        if (message != NULL) {
            wait_for(worker, ucp_tag_msg_recv_nbx(worker, buffer, sizeof buffer, message, &param), 1, &status);
            count++;
        }
    }
    return count;
}

int main(void)
{
    int to_dying[2], to_other[2];
    pid_t dying, other;

    option("UCX_TLS", "sysv,self");
    option("UCX_MM_ERROR_HANDLING", "y");
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, to_dying) || socketpair(AF_UNIX, SOCK_STREAM, 0, to_other))
        return 3;
    dying = start(dying_client, to_dying[1]);
    other = start(other_client, to_other[1]);
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    put_address(to_dying[0], worker);
    printf("from the client that dies: %d messages\n", receive(worker, 2));
    ended(dying, "dying client");
    put_address(to_other[0], worker);
    printf("from the other client: %d of 21 messages\n", receive(worker, 6));
    ended(other, "other client");
    return 0;
}
