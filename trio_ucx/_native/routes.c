/* Routes: the network interface by which packets to an address leave.
 *
 * UCX 1.20 to 1.22 read the routes once in a process, and never see those of a network that comes later
 * (ucs_netlink_init_routing_table_cache). So libuct's question for a route is answered here: yes if UCX says so, or if
 * the kernel says so now. */
#define _GNU_SOURCE
#include <ifaddrs.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

/* Not in UCX's public headers. NULL if a release has no such function. TCP calls route_exists in UCX 1.20, and
 * is_best_route later. */
__attribute__((weak)) int ucs_netlink_is_best_route(int interface, const struct sockaddr *to);
__attribute__((weak)) int ucs_netlink_route_exists(int interface, const struct sockaddr *to, int allow_default);

/* Appends an IP address to the question. */
static void append(struct nlmsghdr *question, unsigned short kind, const struct sockaddr *address)
{
    bool is_v4            = address->sa_family == AF_INET;
    struct rtattr *attribute = (struct rtattr *)(void *)((char *)question + NLMSG_ALIGN(question->nlmsg_len));
    size_t size           = is_v4 ? sizeof(struct in_addr) : sizeof(struct in6_addr);

    attribute->rta_type = kind;
    attribute->rta_len  = (unsigned short)RTA_LENGTH(size);
    memcpy(RTA_DATA(attribute),
           is_v4 ? (const void *)&((const struct sockaddr_in *)(const void *)address)->sin_addr
                 : (const void *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr,
           size);
    question->nlmsg_len = NLMSG_ALIGN(question->nlmsg_len) + (unsigned)RTA_LENGTH(size);
}

/* Returns the index of the interface by which packets from one address to another leave: routes may depend on both.
 * 0 if there is none, -1 if that cannot be found out. */
int tu_route_interface(const struct sockaddr *from, const struct sockaddr *to)
{
    struct {
        struct nlmsghdr header;
        struct rtmsg route;
        char attributes[2 * RTA_SPACE(sizeof(struct in6_addr))];
    } question = {
        .header = {.nlmsg_len = NLMSG_LENGTH(sizeof(struct rtmsg)), .nlmsg_type = RTM_GETROUTE,
                   .nlmsg_flags = NLM_F_REQUEST},
        .route  = {.rtm_family = (unsigned char)to->sa_family},
    };
    union {
        struct nlmsghdr header;
        char bytes[4096];
    } answer;
    int interface    = -1;
    ssize_t received = -1;
    int fd           = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);

    if (fd < 0) {
        return interface;
    }
    append(&question.header, RTA_DST, to);
    append(&question.header, RTA_SRC, from);
    question.route.rtm_dst_len = question.route.rtm_src_len = to->sa_family == AF_INET ? 32 : 128;
    if (send(fd, &question, question.header.nlmsg_len, 0) == (ssize_t)question.header.nlmsg_len) {
        received = recv(fd, &answer, sizeof(answer), 0);
    }
    close(fd);
    if (received < (ssize_t)NLMSG_LENGTH(sizeof(struct rtmsg)) || !NLMSG_OK(&answer.header, (size_t)received)) {
        return interface;
    }
    interface = 0;
    if (answer.header.nlmsg_type == RTM_NEWROUTE) {
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

/* Returns true if packets from one of an interface's addresses leave by it. UCX binds to such an address. */
static bool leave_by(int interface, const struct sockaddr *to)
{
    char name[IF_NAMESIZE];
    struct ifaddrs *all, *each;
    bool found = false;

    if (if_indextoname((unsigned)interface, name) == NULL || getifaddrs(&all) < 0) {
        return false;
    }
    for (each = all; each != NULL && !found; each = each->ifa_next) {
        found = each->ifa_addr != NULL && each->ifa_addr->sa_family == to->sa_family &&
                strcmp(each->ifa_name, name) == 0 && tu_route_interface(each->ifa_addr, to) == interface;
    }
    freeifaddrs(all);
    return found;
}

static int is_best_route(int interface, const struct sockaddr *to)
{
    return ucs_netlink_is_best_route(interface, to) || leave_by(interface, to);
}

static int route_exists(int interface, const struct sockaddr *to, int allow_default)
{
    return ucs_netlink_route_exists(interface, to, allow_default) ||
           (allow_default && leave_by(interface, to));
}

/* Returns true if UCX would use an interface to reach an address. Before 1.20 it would use any. */
bool tu_route_exists(int interface, const struct sockaddr *to)
{
    if (ucs_netlink_is_best_route != NULL) {
        return is_best_route(interface, to) != 0;
    }
    return ucs_netlink_route_exists == NULL || route_exists(interface, to, true) != 0;
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
