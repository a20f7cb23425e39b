/* The TCP sockets that UCX opens for a worker. UCX has no call that lists them; the kernel lists them among the
 * descriptors that the worker's event descriptor watches. */
#include <inttypes.h>
#include <limits.h>
#include <linux/sock_diag.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

#ifndef SO_MEMINFO
#define SO_MEMINFO 55
#endif

/* `data` is what was given to epoll_ctl. */
typedef void (*visit_t)(int fd, uint64_t data, void *arg);

/* Calls `visit` with each descriptor that an epoll descriptor watches. Not an epoll descriptor: no calls. */
static void for_each_watched(int epoll, visit_t visit, void *arg)
{
    char name[64], line[256];
    uint64_t data;
    FILE *info;
    int fd;

    snprintf(name, sizeof(name), "/proc/self/fdinfo/%d", epoll);
    info = fopen(name, "re");
    if (info == NULL) {
        return;
    }
    while (fgets(line, sizeof(line), info) != NULL) {
        if (sscanf(line, "tfd: %d events: %*x data: %" SCNx64, &fd, &data) == 2) {
            visit(fd, data, arg);
        }
    }
    fclose(info);
}

/* Bytes of the largest send buffer that the kernel lets us ask for; 0 if that cannot be found out. */
static uint32_t largest_send_buffer(void)
{
    int fd         = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int bytes      = INT_MAX;
    socklen_t size = sizeof(bytes);

    if (fd < 0) {
        return 0;
    }
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, size) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, &size) != 0) {
        bytes = 0;
    }
    close(fd);
    return (uint32_t)bytes;
}

/* Doubles the send buffer of a socket whose send buffer is full, if the kernel allows it. */
static void make_room(int fd, uint64_t data, void *enlarged)
{
    uint32_t memory[SK_MEMINFO_VARS];
    socklen_t size = sizeof(memory);
    int wanted;

    (void)data;
    if (getsockopt(fd, SOL_SOCKET, SO_MEMINFO, memory, &size) != 0 || size <= SK_MEMINFO_WMEM_QUEUED * sizeof(*memory) ||
        memory[SK_MEMINFO_WMEM_QUEUED] < memory[SK_MEMINFO_SNDBUF] ||
        memory[SK_MEMINFO_SNDBUF] >= largest_send_buffer()) {
        return;
    }
    wanted = (int)memory[SK_MEMINFO_SNDBUF]; /* the kernel doubles it */
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof(wanted)) == 0) {
        ++*(unsigned *)enlarged;
    }
}

static void make_room_behind(int epoll, uint64_t data, void *enlarged)
{
    (void)data;
    for_each_watched(epoll, make_room, enlarged);
}

/* Makes room in all sockets of a worker that are full, for the few bytes that UCX writes when it closes an endpoint: if
 * the socket does not take them, UCX 1.22 tries again and again, inside one call, until the peer reads.
 *
 * Returns how many sockets it has enlarged. */
unsigned tu_sockets_make_room(int efd)
{
    unsigned enlarged = 0;

    for_each_watched(efd, make_room_behind, &enlarged);
    return enlarged;
}

/* UCX's endpoint begins with a few fields, and the lanes that it uses most: five pointers. All its releases since 1.13
 * have these among the first so many words, and none has a shorter endpoint. */
#define ENDPOINT_WORDS 8

typedef struct shutting {
    const uint64_t *endpoint;
    unsigned count;
} shutting_t;

static void shut_down(int fd, uint64_t data, void *arg)
{
    shutting_t *shutting = arg;
    int i;

    for (i = 0; i < ENDPOINT_WORDS; i++) {
        if (data != 0 && shutting->endpoint[i] == data && shutdown(fd, SHUT_RDWR) == 0) {
            shutting->count++;
        }
    }
}

static void shut_down_behind(int epoll, uint64_t data, void *arg)
{
    (void)data;
    for_each_watched(epoll, shut_down, arg);
}

/* Shuts down the sockets of an endpoint's lanes. UCX then reports that the endpoint has failed.
 *
 * Which they are UCX does not tell. But it gives the address of a lane to epoll as the data of its socket, and the
 * endpoint has the addresses of its lanes.
 *
 * Returns how many it has shut down. */
unsigned tu_sockets_shut_down(int efd, const void *endpoint)
{
    shutting_t shutting = {.endpoint = endpoint};

    for_each_watched(efd, shut_down_behind, &shutting);
    return shutting.count;
}
