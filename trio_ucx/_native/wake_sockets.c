/* Keeps other users away from the sockets by which UCX's shared memory wakes a worker that sleeps.
 *
 * sysv, posix and xpmem have a Unix datagram socket each, with a name that the kernel chooses in the abstract namespace
 * (uct_mm_iface_create_signal_fd). Everybody in the network namespace can send to it: an empty datagram ends the process
 * (ucp_worker_iface_check_events_do) or makes ucp_worker_arm fail, a flood keeps the worker awake. For our workers,
 * libuct's bind() gives the socket a path in a folder that only this user can enter. UCX passes the address on in the
 * shared memory, and peers send to it. Other users of the same libuct are not affected. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "native.h"

/* How many empty datagrams one call skips. A queue rarely has more (net.unix.max_dgram_qlen). */
#define EMPTY_AT_ONCE 64

static __thread tu_wake_t *opening; /* of the worker that this thread is creating; NULL: none */

static int private_bind(int fd, const struct sockaddr *address, socklen_t length)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    uint64_t random;
    int error;

    if (opening == NULL || address->sa_family != AF_UNIX || length != sizeof(sa_family_t)) {
        return bind(fd, address, length);
    }
    if (opening->folder[0] == '\0' || getrandom(&random, sizeof(random), 0) != sizeof(random)) {
        errno = EACCES;
        return -1;
    }
    snprintf(name.sun_path, sizeof(name.sun_path), "%s/%016llx" TU_WAKE_SUFFIX, opening->folder,
             (unsigned long long)random);
    if (bind(fd, (const struct sockaddr *)&name, sizeof(name)) != 0) {
        return -1;
    }
    if (chmod(name.sun_path, S_IRUSR | S_IWUSR) != 0) { /* the umask may take from us what peers need */
        error = errno;
        unlink(name.sun_path);
        errno = error;
        return -1;
    }
    opening->sockets++;
    return 0;
}

/* No other socket that libuct closes has a path. */
static int private_close(int fd)
{
    struct sockaddr_un name = {.sun_family = AF_UNSPEC};
    socklen_t length        = sizeof(name);

    if (getsockname(fd, (struct sockaddr *)&name, &length) == 0 && name.sun_family == AF_UNIX &&
        name.sun_path[0] == '/') {
        unlink(name.sun_path);
    }
    return close(fd);
}

/* A socket whose worker is closed has no path any more. UCX expects the error that it would have in the abstract
 * namespace. */
static ssize_t private_sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *address,
                              socklen_t length)
{
    ssize_t sent = sendto(fd, data, size, flags, address, length);

    if (sent < 0 && errno == ENOENT) {
        errno = ECONNREFUSED;
    }
    return sent;
}

/* An empty datagram is no signal. */
static ssize_t private_recvfrom(int fd, void *data, size_t size, int flags, struct sockaddr *address, socklen_t *length)
{
    ssize_t received;

    for (int i = 0; i < EMPTY_AT_ONCE; i++) {
        received = recvfrom(fd, data, size, flags, address, length);
        if (received != 0) {
            return received;
        }
    }
    return 1; /* as if it were one: UCX asks again */
}

static bool are_private;

static void replace_once(void)
{
    static const tu_import_t imports[] = {
        TU_IMPORT("bind", private_bind),
        TU_IMPORT("close", private_close),
        TU_IMPORT("sendto", private_sendto),
        TU_IMPORT("recvfrom", private_recvfrom),
    };
    const void *libuct = tu_libuct();

    are_private = libuct != NULL && tu_replace_imports(libuct, imports, sizeof(imports) / sizeof(*imports)) == NULL;
}

/* Lets our workers make private sockets from now on. Returns false if libuct does not import the functions that this
 * needs. */
bool tu_keep_wakes_private(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, replace_once);
    return are_private;
}

/* Sets the sockets of the worker that this thread is creating; NULL: it creates none. */
void tu_wake_opening(tu_wake_t *wake)
{
    opening = wake;
}

/* The folder of a worker's wake-up sockets; "" if it has none. */
const char *tu_worker_wake_folder(tu_worker_t *worker)
{
    return worker->wake.sockets > 0 ? worker->wake.folder : "";
}
