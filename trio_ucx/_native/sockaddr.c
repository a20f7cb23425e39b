/* Socket addresses: from text, to text, and whether a network interface has one. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

/* Reads an address of an interface. Returns false if it is none of IP's. */
static bool address_of(const struct ifaddrs *each, tu_address_t *out)
{
    struct sockaddr_storage storage = {0};

    if (each->ifa_addr == NULL ||
        (each->ifa_addr->sa_family != AF_INET && each->ifa_addr->sa_family != AF_INET6)) {
        return false;
    }
    out->family = each->ifa_addr->sa_family;
    snprintf(out->device, sizeof(out->device), "%.*s", (int)strcspn(each->ifa_name, ":"), each->ifa_name); /* eth0:1 */
    if (out->family == AF_INET6) {
        memcpy(&storage, each->ifa_addr, sizeof(struct sockaddr_in6));
        out->scope = ((const struct sockaddr_in6 *)&storage)->sin6_scope_id;
    } else {
        memcpy(&storage, each->ifa_addr, sizeof(struct sockaddr_in));
    }
    return tu_sockaddr_text(&storage, out->ip, sizeof(out->ip), &out->port) == UCS_OK;
}

/* Returns true if an interface's address is this one. The scope counts where both have one. */
static bool is_same_address(const struct ifaddrs *each, const tu_address_t *address)
{
    tu_address_t found = {0};

    return address_of(each, &found) && found.family == address->family && strcmp(found.ip, address->ip) == 0 &&
           (address->scope == 0 || found.scope == 0 || found.scope == address->scope);
}

/* Returns true if this host has the address, in this network namespace; `address` has no more than an IPv6 address
 * needs. It is not enough that it can be bound: broadcast addresses can, and with ip_nonlocal_bind all addresses. */
bool tu_sockaddr_is_own(const struct sockaddr *address, socklen_t length)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } own;
    socklen_t own_length = sizeof(own);
    bool is_own          = false;
    int probe            = socket(address->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    if (probe < 0) {
        return false;
    }
    memcpy(&own, address, length);
    if (address->sa_family == AF_INET) {
        own.v4.sin_port = 0;
        is_own = bind(probe, &own.any, length) == 0 && connect(probe, address, length) == 0; /* that sends nothing */
    } else if (connect(probe, address, length) == 0 && getsockname(probe, &own.any, &own_length) == 0) {
        /* Packets to an own address come from it. */
        is_own = memcmp(&own.v6.sin6_addr, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, 16) == 0;
    }
    close(probe);
    return is_own;
}

bool tu_is_own_address(const tu_address_t *address)
{
    struct sockaddr_storage storage;
    socklen_t length;

    return tu_sockaddr_make(&storage, &length, address->family, address->ip, address->port, address->scope) &&
           tu_sockaddr_is_own((const struct sockaddr *)&storage, length);
}

/* Returns the index of the network interface that has exactly this address; 0 if none has, -1 if the system does not
 * say. (The kernel also binds to other addresses, such as 127.0.0.2.) */
int tu_interface_with(const tu_address_t *address)
{
    struct ifaddrs *all, *each;
    int index = 0;

    if (getifaddrs(&all) < 0) {
        return -1;
    }
    for (each = all; each != NULL && index == 0; each = each->ifa_next) {
        if (is_same_address(each, address)) {
            index = (int)if_nametoindex(each->ifa_name);
        }
    }
    freeifaddrs(all);
    return index;
}

/* Returns the index of the network interface by which packets from one address to another leave; 0 if there is none, -1
 * if the kernel does not say. `peer` gets the second address. */
static int route_between(const tu_address_t *from, const tu_address_t *to, struct sockaddr_storage *peer)
{
    struct sockaddr_storage own;
    socklen_t length;

    if (from->family != to->family || !tu_sockaddr_make(&own, &length, from->family, from->ip, 0, from->scope) ||
        !tu_sockaddr_make(peer, &length, to->family, to->ip, 0, to->scope)) {
        return 0;
    }
    return tu_route_interface((const struct sockaddr *)&own, (const struct sockaddr *)peer);
}

/* Returns the index of the network interface by which packets from one address to another leave; 0 if there is none, or
 * if that is not known. */
int tu_interface_between(const tu_address_t *from, const tu_address_t *to)
{
    struct sockaddr_storage peer;
    int interface = route_between(from, to, &peer);

    return interface > 0 ? interface : 0;
}

/* Returns true if there is a route from an address of ours to a peer, and UCX would use the interface with our address
 * for it. Also true if the kernel does not say. */
bool tu_leads_to(const tu_address_t *own, const tu_address_t *to)
{
    struct sockaddr_storage peer;
    int route = route_between(own, to, &peer);

    return route < 0 || (route > 0 && tu_route_exists(tu_interface_with(own), (const struct sockaddr *)&peer));
}

/* Finds the addresses of the network interface with this index; TU_ACTIVE: of all that are up and have a carrier.
 * Returns how many there are, of which `out` gets the first; 0 if the system does not say. */
int tu_interface_addresses(int index, tu_address_t *out, int size)
{
    struct ifaddrs *all, *each;
    int count = 0;

    if (getifaddrs(&all) < 0) {
        return 0;
    }
    for (each = all; each != NULL; each = each->ifa_next) {
        bool is_meant = index == TU_ACTIVE ? (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_RUNNING) != 0
                                           : (int)if_nametoindex(each->ifa_name) == index;
        tu_address_t found = {0};

        if (is_meant && address_of(each, &found)) {
            if (count < size) {
                out[count] = found;
            }
            count++;
        }
    }
    freeifaddrs(all);
    return count;
}
