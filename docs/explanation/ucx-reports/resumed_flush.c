/*
 * An endpoint is closed by force while UCX is about to resume its flush: UCX uses the freed endpoint.
 *
 * A flush is posted while the endpoint is being connected. When it is connected, UCX leaves the rest of the flush to a
 * callback in its next progress, and does not remove that callback when the endpoint is closed before. After which call
 * of ucp_worker_progress this is so depends on the timing: each attempt closes after a random number of calls, which is
 * the larger, the busier the machine may be.
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
