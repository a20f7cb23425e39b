/* Socket addresses: from text, to text, and whether a network interface has one. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <string.h>

#include "native.h"

bool tu_sockaddr_make(struct sockaddr_storage *out, socklen_t *length, int family, const char *ip, unsigned port,
                     unsigned scope)
{
    memset(out, 0, sizeof(*out));
    if (family == AF_INET) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)out;

        v4->sin_family = AF_INET;
        v4->sin_port   = htons((uint16_t)port);
        *length        = sizeof(*v4);
        return inet_pton(AF_INET, ip, &v4->sin_addr) == 1;
    } else {
        struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;

        v6->sin6_family   = AF_INET6;
        v6->sin6_port     = htons((uint16_t)port);
        v6->sin6_scope_id = scope;
        *length           = sizeof(*v6);
        return inet_pton(AF_INET6, ip, &v6->sin6_addr) == 1;
    }
}

ucs_status_t tu_sockaddr_text(const struct sockaddr_storage *address, char *host, size_t size, unsigned *port)
{
    const void *ip;

    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;

        ip    = &v4->sin_addr;
        *port = ntohs(v4->sin_port);
    } else if (address->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;

        ip    = &v6->sin6_addr;
        *port = ntohs(v6->sin6_port);
    } else {
        return UCS_ERR_INVALID_ADDR;
    }
    return inet_ntop(address->ss_family, ip, host, (socklen_t)size) != NULL ? UCS_OK : UCS_ERR_INVALID_ADDR;
}

/* Whether a network interface has exactly this address: 1, 0, or -1 if the system does not say. The kernel also binds
 * to other addresses, such as 127.0.0.2, for which UCX finds no interface, and then neither connects nor fails. */
int tu_is_interface_address(const tu_address_t *address)
{
    struct ifaddrs *all, *each;
    char host[64];
    unsigned port;
    int found = 0;

    if (getifaddrs(&all) < 0) {
        return -1;
    }
    for (each = all; each != NULL && !found; each = each->ifa_next) {
        struct sockaddr_storage storage;

        if (each->ifa_addr == NULL || each->ifa_addr->sa_family != address->family) {
            continue;
        }
        memset(&storage, 0, sizeof(storage));
        memcpy(&storage, each->ifa_addr,
               address->family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
        found = tu_sockaddr_text(&storage, host, sizeof(host), &port) == UCS_OK && strcmp(host, address->ip) == 0;
    }
    freeifaddrs(all);
    return found;
}
