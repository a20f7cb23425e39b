/* Prints one line of data. libucm adds a warning of its own to stdout, although UCX_LOG_FILE says stderr. */
#include "common.h"

#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/syscall.h>

int main(void)
{
    int segment = shmget(IPC_PRIVATE, 4096, 0600);
    void *memory = (void *)syscall(SYS_shmat, segment, NULL, 0); /* libucm does not see this call */

    shmctl(segment, IPC_RMID, NULL);
    option("UCX_LOG_FILE", "stderr");
    option("UCX_TLS", "shm,self");
    ucp_context_h context = open_context(UCP_FEATURE_TAG);

    setrlimit(RLIMIT_NOFILE, &(struct rlimit){3, 3}); /* no descriptor to read /proc/self/maps with */
    shmdt(memory);
    printf("data\n");
    ucp_cleanup(context);
    return 0;
}
