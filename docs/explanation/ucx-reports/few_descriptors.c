/*
 * Few descriptors left: an assertion in ucp_init
 *
 * What happens. With 2 to 4 descriptors left ucp_init starts the thread for asynchronous events, cannot create its pipe
 * or its epoll set, and ends the process: Assertion 'ucs_async_thread_global_context.thread != NULL' failed. With fewer
 * it reports an error, as it should; for more, see am_handlers.c.
 *
 * This program. ucp_init and ucp_worker_create with 0 to 5 descriptors left, a process for each: an error is expected,
 * no signal.
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGABRT.
 *
 * Suggested change. ucs_async_thread_start in src/ucs/async/thread.c: the path of errors falls through to out_unlock,
 * where the assertion holds for success only. Check it, and set *thread_p, only if status is UCS_OK.
 *
 * What trio_ucx does. Nothing is opened while too few descriptors are left.
 */
#include "common.h"

static void create_with(int spare)
{
    int next = open("/dev/null", O_RDONLY); /* the lowest free number */

    close(next);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){next + spare, next + spare});
    open_worker(open_context(UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP));
}

int main(void)
{
    option("UCX_TLS", "tcp");
    for (int spare = 0; spare <= 5; spare++) {
        char name[20];
        sprintf(name, "%d left", spare);
        ended(start(create_with, spare), name);
    }
    return 0;
}
