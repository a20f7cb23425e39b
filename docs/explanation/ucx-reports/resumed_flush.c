/*
 * TCP: a flush is resumed at an endpoint that was closed by force
 *
 * What happens. ucp_ep_flush_progress_pending cannot always go on with a flush: while the endpoint is being connected
 * (UCP_EP_FLAG_BLOCK_FLUSH), or with lanes left that were not started, it adds ucp_ep_flush_resume_slow_path_callback
 * to the worker's queue of callbacks. If the endpoint is closed with UCP_EP_CLOSE_FLAG_FORCE before the next call of
 * ucp_worker_progress, that callback stays, and uses the endpoint that was freed. A program that closes an endpoint in
 * the completion of something else, right after a call of progress, may therefore crash.
 *
 *     ucp_ep_get_live_lanes <- ucp_ep_flush_progress <- ucp_ep_flush_resume_slow_path_callback <-
 *     ucs_callbackq_dispatch
 *
 * This program. Two workers in one process, with UCX_RESOLVE_REMOTE_EP_ID=y. Each attempt opens an endpoint, posts
 * messages and a flush while it is being connected, and closes by force after a random number of calls of
 * ucp_worker_progress: which call leaves the callback depends on the timing. The busier the machine, the larger is the
 * number. UCX keeps freed endpoints in a pool, so not every such use crashes: the program begins again, in up to 200
 * processes. In all of 14 runs with UCX 1.22 a process crashed, mostly the first, on a busy machine the 14th at the
 * latest.
 *
 * Shown with UCX 1.13.1: no; UCX 1.22.0: SIGSEGV.
 *
 * Suggested change. When an endpoint is closed or fails, remove the callback of its flushes
 * (ucs_callbackq_remove_oneshot with ucp_ep_flush_slow_path_remove_filter, as ucp_flush_check_completion does), and
 * complete them with the endpoint's status.
 *
 * What trio_ucx does. Before trio_ucx closes an endpoint by force, it progresses the worker until nothing moves (100
 * calls at most).
 */
#include "common.h"

#include <malloc.h>

enum { ATTEMPTS = 150, COUNT = 60, LENGTH = 8000, CALLS = 60 };

static void close_after(ucp_worker_h a, ucp_worker_h b, ucp_address_t *address, int calls)
{
    static char buffer[LENGTH];
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucp_ep_h endpoint = connect_to(a, address, NULL);

    for (int i = 0; i < COUNT; i++)
        ucp_tag_send_nbx(endpoint, buffer, LENGTH, 1, &param);
    for (int i = 0; i < 3; i++) ucp_ep_flush_nbx(endpoint, &param);
    for (int i = 0; i < calls; i++)
        ucp_worker_progress(random() % 2 == 0 ? a : b);
    close_by_force(a, endpoint);
    for (int i = 0; i < 100; i++)
        ucp_worker_progress(a), ucp_worker_progress(b);
}

static void attempts(int seed)
{
    ucp_context_h context = open_context(UCP_FEATURE_TAG);
    ucp_worker_h a = open_worker(context), b = open_worker(context);
    ucp_address_t *address;
    size_t length;

    must(ucp_worker_get_address(b, &address, &length), "ucp_worker_get_address");
    srandom(seed);
    for (int i = 0; i < ATTEMPTS; i++)
        close_after(a, b, address, random() % (CALLS << i % 5));
}

int main(void)
{
    mallopt(M_PERTURB, 5); /* freed memory is filled */
    option("UCX_TLS", "tcp");
    option("UCX_RESOLVE_REMOTE_EP_ID", "y");
    for (int i = 0; i < 200; i++)
        if (ended(start(attempts, i), "process"))
            break;
    return 0;
}
