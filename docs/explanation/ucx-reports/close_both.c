/*
 * Both sides close a TCP endpoint by force while one of them still has something to write: UCX uses a freed endpoint.
 *
 * Two workers in one process, so that the order of things is always the same: `a` sends until the socket is full, and
 * closes; `b` reads and closes; then the socket of `a` is both readable and writable. Messages go zero-copy: after
 * the close, UCX waits for room in the socket for ever, so that most attempts show it. Short ones show it now and then.
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
