/*
 * Few descriptors left: a fatal error in ucp_worker_create
 *
 * What happens. uct_iface_set_am_handler asks the interface for its attributes, for each handler, only to see a flag.
 * TCP's uct_tcp_iface_query opens /proc/net/route for them. With no descriptor left it fails, and
 * ucp_worker_set_am_handlers takes every failure for fatal: failed to set active message handler id 1: Input/output
 * error. How many descriptors must be left before ucp_worker_create depends on the machine's devices; here it is 13.
 * With one more or less it returns an error.
 *
 * This program. ucp_worker_create with 5 to 40 descriptors left, a process for each: an error is expected, no signal.
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGABRT.
 *
 * Suggested change. ucp_worker_set_am_handlers in src/ucp/core/ucp_worker.c: return the status, and let
 * ucp_worker_iface_init and ucp_worker_iface_activate pass it on. Besides, uct_tcp_iface_query could ask for the
 * default route once, when the interface is opened.
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
    option("UCX_TLS", "tcp,sysv");
    for (int spare = 5; spare <= 40; spare++) {
        char name[20];
        sprintf(name, "%d left", spare);
        ended(start(create_with, spare), name);
    }
    return 0;
}
