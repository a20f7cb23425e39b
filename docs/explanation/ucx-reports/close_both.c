/*
 * TCP: both sides close by force
 *
 * What happens. A closes an endpoint by force while it still has something to write: UCX destroys the user's side, and
 * keeps the socket to read the peer's FIN, with EVWRITE armed. B reads, and closes, too. Now one event of A's socket
 * says readable and writable. Reading the FIN frees the endpoint; then the same function uses it to write.
 *
 *     uct_tcp_ep_destroy_internal <- uct_tcp_cm_handle_conn_fin <- uct_tcp_ep_progress_am_rx <-
 *     uct_tcp_iface_handle_events
 *
 * What is left of the freed endpoint's state is an index into the table of functions, so anything may be called.
 *
 * A zero-copy send that is under way when the endpoint is closed makes it likely. uct_tcp_ep_purge sets tx.offset to
 * tx.length, but leaves tx.buf: uct_tcp_ep_progress_data_tx then has nothing to send, yet never takes the buffer for
 * empty. EVWRITE therefore stays armed for good, and the FIN packet, which waits for the buffer, is never sent.
 * Whatever the peer then closes finds a socket that is writable. (We read this in the sources; the program shows the
 * crash.)
 *
 * This program. Two workers in one process, so that the order of things is always the same: a sends until the socket is
 * full, and closes; b reads and closes; then the socket of a is both readable and writable. Messages of 16 MiB go
 * zero-copy: after the close, UCX waits for room in the socket for ever, so that most attempts show it. Short ones show
 * it now and then. Freed memory is filled (M_PERTURB). At most six attempts; of 12 runs of each release all crashed, by
 * the third attempt at the latest.
 *
 * Between two processes that close at the same moment it depends on how much is under way. With four messages of 16 MiB
 * in each direction, by rendezvous, 5 of 160 rounds of UCX 1.22 crashed on a busy machine, all in
 * uct_tcp_iface_handle_events, and none of 160 on a less busy one. With messages of 1 MiB, which the sockets' buffers
 * hold, none did in 1,706 rounds; with UCX_RNDV_THRESH=inf or UCX_RNDV_SCHEME=put_zcopy 17 of 21 runs of a few hundred
 * rounds did. When one of the two goes on progressing for 100 ms before it closes, none of 899 such rounds did.
 *
 * Shown with UCX 1.13.1: SIGSEGV; UCX 1.22.0: SIGSEGV.
 *
 * Suggested change. uct_tcp_iface_handle_events in src/uct/tcp/tcp_iface.c must not touch the endpoint after
 * rx_progress unless it still exists. uct_tcp_cm_handle_conn_fin in src/uct/tcp/tcp_cm.c could leave the destruction of
 * an endpoint that can only receive to uct_tcp_ep_set_failed, which schedules uct_tcp_ep_destroy_progress. The other
 * callers of uct_tcp_ep_destroy_internal below rx_progress (uct_tcp_cm_handle_conn_req,
 * uct_tcp_ep_progress_magic_number_rx) could do the same. uct_tcp_ep_purge in tcp_ep.c must give the buffer back
 * (uct_tcp_ep_ctx_reset). As the peer would take a FIN packet for the rest of a message that was sent in part,
 * uct_tcp_ep_destroy should then end the connection, by uct_tcp_ep_destroy_internal, rather than send one.
 *
 * What trio_ucx does. Before a forced close, trio_ucx reads from /proc/self/fdinfo whether UCX waits for room in a
 * socket of the endpoint (EPOLLOUT). If it does, UCX gets half a second to finish writing. Then trio_ucx removes
 * EPOLLOUT from what epoll waits for, so that the two events never come together.
 */
#include "common.h"

#include <malloc.h>

enum { LENGTH = 16 << 20, COUNT = 2 };

static void close_both(int attempt)
{
    static char buffer[LENGTH];
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucp_context_h context = open_context(UCP_FEATURE_TAG);
    ucp_worker_h workers[] = {open_worker(context), open_worker(context)};
    ucp_worker_h a = workers[attempt % 2], b = workers[1 - attempt % 2]; /* their numbers decide which socket is used */
    ucp_ep_h to_b = connect_workers(a, b), to_a;

    ucp_tag_send_nbx(to_b, buffer, 8, 1, &param);
    progress_both(a, b, 0.3);
    to_a = connect_workers(b, a);
    ucp_tag_send_nbx(to_a, buffer, 8, 1, &param);
    progress_both(a, b, 0.3); /* both are connected now */

    for (int i = 0; i < COUNT; i++)
        ucp_tag_send_nbx(to_b, buffer, LENGTH, 1, &param);
    progress_for(a, 0.3);
    close_by_force(a, to_b);
    progress_for(a, 0.1);
    progress_for(b, 0.5);
    close_by_force(b, to_a);
    progress_for(b, 0.2);
    progress_for(a, 0.2);
}

/* Each attempt is a process of its own, with other addresses: what is left of the freed endpoint depends on them. */
static void attempt(int number)
{
    char text[12];
    sprintf(text, "%d", number);
    execl("/proc/self/exe", "close_both", text, NULL);
    exit(3);
}

int main(int argc, char **argv)
{
    mallopt(M_PERTURB, 5); /* freed memory is filled */
    option("UCX_TLS", "tcp");
    option("UCX_RNDV_THRESH", "inf");
    if (argc > 1)
        close_both(atoi(argv[1]));
    for (int i = 0; i < 6 && argc == 1; i++)
        if (ended(start(attempt, i), "process"))
            break;
    return 0;
}
