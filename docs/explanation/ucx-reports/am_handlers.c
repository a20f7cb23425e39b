/* ucp_worker_create with 5 to 40 descriptors left, a process for each: an error is expected, no signal. */
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
