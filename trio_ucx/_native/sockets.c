/* The TCP sockets that UCX opens for a worker. UCX has no call that lists them; the kernel lists them among the
 * descriptors that the worker's event descriptor watches. */
#include <inttypes.h>
#include <limits.h>
#include <linux/sock_diag.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

#ifndef SO_MEMINFO
#define SO_MEMINFO 55
#endif

typedef struct watched {
    int epoll;
    int fd;
    uint32_t events;           /* which ones epoll waits for */
    uint64_t data;             /* what was given to epoll_ctl with the descriptor */
} watched_t;

typedef void (*visit_t)(const watched_t *watched, void *arg);

/* Calls `visit` with each descriptor that an epoll descriptor watches. Not an epoll descriptor: no calls. */
static void for_each_watched(int epoll, visit_t visit, void *arg)
{
    watched_t watched = {.epoll = epoll};
    char name[64], line[256];
    FILE *info;

    snprintf(name, sizeof(name), "/proc/self/fdinfo/%d", epoll);
    info = fopen(name, "re");
    if (info == NULL) {
        return;
    }
    while (fgets(line, sizeof(line), info) != NULL) {
        if (sscanf(line, "tfd: %d events: %" SCNx32 " data: %" SCNx64, &watched.fd, &watched.events, &watched.data) == 3) {
            visit(&watched, arg);
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
static void make_room(const watched_t *watched, void *enlarged)
{
    uint32_t memory[SK_MEMINFO_VARS];
    socklen_t size = sizeof(memory);
    int fd         = watched->fd;
    int wanted;

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

static void make_room_behind(const watched_t *watched, void *enlarged)
{
    for_each_watched(watched->fd, make_room, enlarged);
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

/* ---- sockets that are full ---- */

/* UCX's endpoint begins with a few fields and the pointers to the five lanes that it uses most. In all releases since
 * 1.13 these pointers are within the first ENDPOINT_WORDS words, and no release has a shorter endpoint. */
#define ENDPOINT_WORDS 8

typedef struct look {
    const uint64_t *endpoint;
    bool stop;
    unsigned full, own;        /* sockets in which UCX waits for room: all, and the endpoint's */
} look_t;

static void look_at(const watched_t *watched, void *arg)
{
    struct epoll_event reading = {.events = EPOLLIN, .data.u64 = watched->data};
    look_t *look               = arg;
    int i;

    if ((watched->events & EPOLLOUT) == 0) {
        return;
    }
    look->full++;
    for (i = 0; i < ENDPOINT_WORDS; i++) {
        if (look->endpoint[i] == watched->data) {
            look->own++;
            if (look->stop) {
                epoll_ctl(watched->epoll, EPOLL_CTL_MOD, watched->fd, &reading);
            }
        }
    }
}

static void look_behind(const watched_t *watched, void *look)
{
    for_each_watched(watched->fd, look_at, look);
}

/* Returns in how many sockets of an endpoint UCX waits for room, because it has more to write.
 *
 * UCX does not say which sockets these are. But the data that it registers with epoll for a socket is the address of
 * the lane, and the endpoint has the addresses of its lanes.
 *
 * full: is set to the number of such sockets that the worker has in all.
 * stop: epoll no longer reports to UCX that there is room, so UCX writes nothing more. */
unsigned tu_sockets_full(int efd, ucp_ep_h endpoint, bool stop, unsigned *full)
{
    look_t look = {.endpoint = (const void *)endpoint, .stop = stop};

    for_each_watched(efd, look_behind, &look);
    *full = look.full;
    return look.own;
}
