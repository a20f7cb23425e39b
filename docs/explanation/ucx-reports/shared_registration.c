/*
 * Two workers of a context send from the same memory. The first one's endpoint is closed by force, and then its worker:
 * its send ends when the second one's does, and UCX uses the worker that is gone.
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
