/*
 * libucm writes to stdout
 *
 * What happens. libucm has a log of its own, which knows no UCX_LOG_FILE: it writes to descriptor 1, also if the
 * program has put something else there. The default level is warn. For instance, a program with no descriptor left that
 * detaches System V memory finds "cannot open /proc/self/maps for reading" in its output.
 *
 * This program. Prints one line of data, to which libucm adds a warning of its own, although UCX_LOG_FILE says stderr;
 * /tmp/ucm_stdout 2>/dev/null | wc -l says 2. UCX_MEM_LOG_LEVEL=fatal avoids it.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. ucm_log_fileno in src/ucm/util/log.c: 2, and a function that ucs_log_init calls with the descriptor
 * of its file.
 *
 * What trio_ucx does. Nothing. Its user can set UCX_MEM_LOG_LEVEL=fatal.
 */
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
