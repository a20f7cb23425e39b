/* Routes: the network interface by which packets to an address leave.
 *
 * UCX 1.20 to 1.22 read the routes once in a process, and never see those of a network that comes later
 * (ucs_netlink_init_routing_table_cache). So libuct's question for a route is answered here: yes if UCX says so, or if
 * the kernel says so now. */
#define _GNU_SOURCE
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

/* Not in UCX's public headers. NULL if a release has no such function. TCP calls route_exists in UCX 1.20, and
 * is_best_route later. */
__attribute__((weak)) int ucs_netlink_is_best_route(int interface, const struct sockaddr *to);
__attribute__((weak)) int ucs_netlink_route_exists(int interface, const struct sockaddr *to, int allow_default);

/* Returns the index of the interface by which packets to an address leave; 0 if there is none, or if that cannot be
 * found out. */
unsigned tu_route_interface(const struct sockaddr *to)
{
    struct {
        struct nlmsghdr header;
        struct rtmsg route;
        struct rtattr attribute;
        unsigned char ip[sizeof(struct in6_addr)];
    } question = {
        .header = {.nlmsg_type = RTM_GETROUTE, .nlmsg_flags = NLM_F_REQUEST},
        .route  = {.rtm_family = (unsigned char)to->sa_family},
    };
    union {
        struct nlmsghdr header;
        char bytes[4096];
    } answer;
    size_t size = to->sa_family == AF_INET ? sizeof(struct in_addr) : sizeof(struct in6_addr);
    unsigned interface = 0;
    ssize_t received   = -1;
    int fd             = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);

    if (fd < 0) {
        return 0;
    }
    memcpy(question.ip,
           to->sa_family == AF_INET ? (const void *)&((const struct sockaddr_in *)(const void *)to)->sin_addr
                                    : (const void *)&((const struct sockaddr_in6 *)(const void *)to)->sin6_addr,
           size);
    question.route.rtm_dst_len  = (unsigned char)(8 * size);
    question.attribute          = (struct rtattr){.rta_len = (unsigned short)RTA_LENGTH(size), .rta_type = RTA_DST};
    question.header.nlmsg_len   = (unsigned)(NLMSG_LENGTH(sizeof(struct rtmsg)) + RTA_LENGTH(size));
    if (send(fd, &question, question.header.nlmsg_len, 0) == (ssize_t)question.header.nlmsg_len) {
        received = recv(fd, &answer, sizeof(answer), 0);
    }
    close(fd);
    if (received >= (ssize_t)NLMSG_LENGTH(sizeof(struct rtmsg)) && NLMSG_OK(&answer.header, (size_t)received) &&
        answer.header.nlmsg_type == RTM_NEWROUTE) {
        const struct rtattr *each = RTM_RTA(NLMSG_DATA(&answer.header));
        size_t left               = RTM_PAYLOAD(&answer.header);

        for (; RTA_OK(each, left); each = RTA_NEXT(each, left)) {
            if (each->rta_type == RTA_OIF) {
                memcpy(&interface, RTA_DATA(each), sizeof(interface));
            }
        }
    }
    return interface;
}

static int is_best_route(int interface, const struct sockaddr *to)
{
    return ucs_netlink_is_best_route(interface, to) || tu_route_interface(to) == (unsigned)interface;
}

static int route_exists(int interface, const struct sockaddr *to, int allow_default)
{
    return ucs_netlink_route_exists(interface, to, allow_default) ||
           (allow_default && tu_route_interface(to) == (unsigned)interface);
}

/* Lets UCX use routes that have come since it was first used. Where that is impossible, new networks need a new
 * process. Called once, when UCX has been loaded. */
void tu_follow_routes(void)
{
    const void *libuct = tu_libuct();

    if (libuct == NULL) {
        return;
    }
    if (ucs_netlink_is_best_route != NULL) {
        tu_replace_import(libuct, "ucs_netlink_is_best_route", (const void *)(uintptr_t)is_best_route);
    } else if (ucs_netlink_route_exists != NULL) {
        tu_replace_import(libuct, "ucs_netlink_route_exists", (const void *)(uintptr_t)route_exists);
    }
}
