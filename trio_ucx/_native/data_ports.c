/* The ports of UCX's TCP transport: each gets a packet filter before it listens.
 *
 * UCX binds a socket for each network device, and makes it listen at once, inside ucp_worker_create. It has no hook
 * there. A filter that is attached afterwards does not stop a stranger who has connected in the meantime. The entries
 * for bind and listen in the import table (GOT) of libucs are therefore replaced with the functions below. They act only
 * while this thread creates a worker, so other users of the same libucs are not affected. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#include "native.h"

/* The ports of the worker that this thread creates. */
static __thread tu_data_ports_t *creating;

/* UCX tries random ports of its range (TCP_PORT_RANGE) until one is free. If none is, it tries for ever. And without
 * SO_REUSEADDR a port is not free for a minute after its last connection (TIME_WAIT). */
static int bind_in_range(int fd, const struct sockaddr *address, socklen_t length)
{
    union {
        struct sockaddr_storage any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } copy;

    if (bind(fd, address, length) == 0) {
        return 0;
    }
    if (creating == NULL || errno != EADDRINUSE || length > sizeof(copy)) {
        return -1;
    }
    memcpy(&copy, address, length);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    for (unsigned port = creating->lowest; port <= creating->highest && port != 0; port++) {
        *(copy.any.ss_family == AF_INET6 ? &copy.v6.sin6_port : &copy.v4.sin_port) = htons((uint16_t)port);
        if (bind(fd, (const struct sockaddr *)&copy, length) == 0) {
            return 0;
        }
    }
    creating->used_up = true;
    errno             = EADDRNOTAVAIL; /* with EADDRINUSE UCX would try again */
    return -1;
}

static int listen_behind_filter(int fd, int backlog)
{
    struct sock_filter drop    = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program  = {.len = 1, .filter = &drop};

    if (creating != NULL && creating->count < TU_DATA_PORTS) {
        if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) != 0) {
            creating->error = errno;
        }
        creating->fds[creating->count++] = fd;
    }
    return listen(fd, backlog);
}

/* If that fails, Python notices that the worker's address has other ports. */
static void replace_once(void)
{
    const void *libucs = (const void *)(uintptr_t)ucs_status_string;

    tu_replace_import(libucs, "bind", (const void *)(uintptr_t)bind_in_range);
    tu_replace_import(libucs, "listen", (const void *)(uintptr_t)listen_behind_filter);
}

/* From now on, until tu_data_ports_end, the sockets on which UCX listens go into `ports`. */
void tu_data_ports_begin(tu_data_ports_t *ports)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, replace_once);
    creating = ports;
}

void tu_data_ports_end(void)
{
    creating = NULL;
}
