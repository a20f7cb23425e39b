/*
 * A closed endpoint's send ends after its worker
 *
 * What happens. A rendezvous send or receive whose endpoint is closed by force, or fails, has its memory's registration
 * invalidated first, so that the peer cannot use the key any more. It ends when the last user of that registration
 * does: that may be a request of another worker, for however long. The application cannot wait for that, nor cancel it,
 * and destroys the worker. When the other user ends, ucp_request_mem_invalidate_completion takes the request and its
 * worker, which both are freed, and schedules the request's completion there.
 *
 *     ucp_request_mem_invalidate_completion <- ucs_mem_region_destroy_internal <- ucs_rcache_region_put_unsafe <-
 *     ucp_memh_put <- ucp_request_memh_invalidate <- ucp_proto_rndv_rts_abort <- ucp_ep_reqs_purge
 *
 * This program. Two workers of a context send the same memory to a peer that does not receive. The first one's endpoint
 * is closed by force, and its send is still pending; its worker is destroyed; then the second endpoint is closed:
 * SIGSEGV in 1.22, over TCP, where there is nothing to invalidate. 1.13 ends the first send at once.
 *
 * Shown with UCX 1.13.1: no; UCX 1.22.0: SIGSEGV.
 *
 * Suggested change. src/ucp/core/ucp_request.c: ucp_request_memh_invalidate returns 0 if the invalidation map is empty,
 * so that the request ends at once. Otherwise the worker keeps a list of the requests that wait for an invalidation;
 * ucp_worker_destroy completes them with CANCELED, and the callback finds, under the context's lock, that its request
 * is gone.
 *
 * What trio_ucx does. Answers from memory that others may get use the registration of its owner, which is not
 * invalidated. A worker that is closed with such a send is destroyed only when the sends of the context's other workers
 * have ended that were under way then.
 */
#include "common.h"

#include <malloc.h>

enum { LENGTH = 1 << 20 };

static void receiver(int fd)
{
    char byte;
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));

    put_address(fd, worker);
    while (recv(fd, &byte, 1, MSG_DONTWAIT) != 0)
        ucp_worker_progress(worker); /* receives nothing, so that the large sends wait */
}

static const char *state(void *request)
{
    return ucs_status_string(UCS_PTR_IS_PTR(request) ? ucp_request_check_status(request) : UCS_PTR_STATUS(request));
}

static void sender(int fd)
{
    ucp_context_h context = open_context(UCP_FEATURE_TAG);
    char *memory = aligned_alloc(4096, LENGTH);
    ucp_request_param_t param = {.op_attr_mask = 0};
    size_t length;
    void *address = get_block(fd, &length), *sends[2];
    ucp_worker_h workers[2];
    ucp_ep_h endpoints[2];

    for (int i = 0; i < 2; i++) {
        workers[i] = open_worker(context);
        endpoints[i] = connect_to(workers[i], address, NULL);
        ucp_tag_send_nbx(endpoints[i], memory, 8, 1, &param);
        progress_for(workers[i], 0.2);
        sends[i] = ucp_tag_send_nbx(endpoints[i], memory, LENGTH, 1, &param);
        progress_for(workers[i], 0.1);
    }
    close_by_force(workers[0], endpoints[0]);
    progress_for(workers[0], 0.2);
    printf("the endpoint is closed, its send: %s\n", state(sends[0]));
    ucp_worker_destroy(workers[0]);
    printf("its worker is gone\n");
    fflush(stdout);
    close_by_force(workers[1], endpoints[1]);
    progress_for(workers[1], 0.2);
    printf("the other endpoint is closed, its send: %s\n", state(sends[1]));
}

int main(void)
{
    pid_t pids[2];

    mallopt(M_PERTURB, 5); /* freed memory is filled with fives */
    option("UCX_TLS", "tcp");
    start_two(receiver, sender, pids);
    ended(pids[1], "sender");
    ended(pids[0], "receiver");
    return 0;
}
