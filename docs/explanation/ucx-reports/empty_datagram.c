/*
 * Shared memory: anybody can send to the socket that wakes a worker
 *
 * What happens. The transports sysv, posix and xpmem wake a receiver that sleeps by a Unix datagram socket, which
 * uct_mm_iface_create_signal_fd binds to a name in the abstract namespace. Abstract names have no permissions: every
 * process in the network namespace, of any user and in any container, finds the name in /proc/net/unix and can send to
 * it. recvfrom() returns 0 for an empty datagram. uct_mm_iface_event_fd_arm takes that for the end of a stream, and
 * returns CONNECTION_RESET. Where no endpoint uses the interface yet, ucp_worker_iface_check_events_do then ends the
 * process (ucs_fatal). Otherwise ucp_worker_arm fails, and the application can only give up the worker. Datagrams of one
 * byte keep it from sleeping.
 *
 * This program. A process that has never met the worker sends an empty datagram to each abstract datagram socket of the
 * worker's process. (As another user, it does the same.)
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. uct_mm_iface_create_signal_fd in src/uct/sm/mm/base/mm_iface.c: a path in a directory of mode 0700.
 * The address already travels in the shared memory. In uct_mm_iface_event_fd_arm: `ret >= 0` is a signal.
 *
 * What trio_ucx does. It gives the sockets of its workers such a path (_native/wake_sockets.c).
 */
#include "common.h"

#include <sys/un.h>

/* Sends an empty datagram to each abstract datagram socket of another process. Returns to how many. */
static int disturb(pid_t pid)
{
    char line[512], path[64], target[64], wanted[64];
    int stranger = socket(AF_UNIX, SOCK_DGRAM, 0), sent = 0;
    FILE *list = fopen("/proc/net/unix", "r");

    while (fgets(line, sizeof line, list) != NULL) {
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        unsigned long inode;
        if (sscanf(line, "%*s %*s %*s %*s 0002 %*s %lu @%100s", &inode, name.sun_path + 1) != 2)
            continue;
        snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
        for (int fd = 0; fd < 1000; fd++) {
            snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
            ssize_t length = readlink(path, target, sizeof target - 1);
            target[length < 0 ? 0 : length] = '\0';
            if (strcmp(target, wanted) == 0)
                sent += sendto(stranger, "", 0, 0, (struct sockaddr *)&name,
                               sizeof(sa_family_t) + 1 + strlen(name.sun_path + 1)) == 0;
        }
    }
    return sent;
}

static void side(int fd)
{
    char byte;

    option("UCX_TLS", "sysv,self");
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP));
    for (int i = 0; i < 2; i++) {
        ucs_status_t status;
        while ((status = ucp_worker_arm(worker)) == UCS_ERR_BUSY)
            ucp_worker_progress(worker);
        printf("ucp_worker_arm %s: %s\n", i == 0 ? "before" : "after", ucs_status_string(status));
        fflush(stdout);
        if (i == 0 && (write(fd, "", 1) != 1 || read(fd, &byte, 1) != 1))
            exit(3);
    }
    /* UCX's own thread sees the datagram, at times after ucp_worker_arm; the next progress then ends the process. */
    for (double end = now() + 10; now() < end; usleep(1000))
        ucp_worker_progress(worker);
}

int main(void)
{
    char byte;
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 3;
    pid_t pid = start(side, ends[1]);
    if (read(ends[0], &byte, 1) != 1)
        return 3;
    printf("empty datagrams: %d\n", disturb(pid));
    fflush(stdout);
    if (write(ends[0], "", 1) != 1)
        return 3;
    ended(pid, "worker");
    return 0;
}
