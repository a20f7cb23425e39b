/* Declarations of UCX's API that is newer than the oldest headers this can be compiled with.
 *
 * UCX only ever appends to its structures, and reads no field that the mask does not name. So a module that was
 * compiled with old headers runs with a newer UCX, and can use its newer fields by these declarations. Check
 * tu_ucx_has() first.
 */
#ifndef TRIO_UCX_NEWER_H
#define TRIO_UCX_NEWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include <ucp/api/ucp.h>

/* The oldest UCX whose API is used without a check: the version that ucp_init_version() is asked for. */
#define TU_OLDEST_MAJOR 1
#define TU_OLDEST_MINOR 13

/* For ucp_am_send_nbx: UCX copies the header. Known to be in 1.17. */
#define TU_AM_SEND_COPY_HEADER (1u << 3) /* UCP_AM_SEND_FLAG_COPY_HEADER */
#if UCP_API_VERSION >= UCP_VERSION(1, 17)
_Static_assert(TU_AM_SEND_COPY_HEADER == UCP_AM_SEND_FLAG_COPY_HEADER, "UCX's number");
#endif

/* ucp_ep_attr_t as of UCX 1.18. */
#define TU_EP_ATTR_TRANSPORTS (1u << 3) /* UCP_EP_ATTR_FIELD_TRANSPORTS, since 1.14 */
#define TU_EP_ATTR_USER_DATA (1u << 4)  /* UCP_EP_ATTR_FIELD_USER_DATA, since 1.18 */

typedef struct tu_transport_entry {
    const char *transport_name;
    const char *device_name;
} tu_transport_entry_t;

typedef struct tu_ep_attr {
    uint64_t field_mask;
    char name[UCP_ENTITY_NAME_MAX];
    struct sockaddr_storage local_sockaddr;
    struct sockaddr_storage remote_sockaddr;
    struct {
        tu_transport_entry_t *entries;
        unsigned num_entries;
        size_t entry_size;
    } transports;
    void *user_data;
} tu_ep_attr_t;

_Static_assert(offsetof(tu_ep_attr_t, remote_sockaddr) == offsetof(ucp_ep_attr_t, remote_sockaddr), "UCX's layout");
#if UCP_API_VERSION >= UCP_VERSION(1, 14)
_Static_assert(TU_EP_ATTR_TRANSPORTS == UCP_EP_ATTR_FIELD_TRANSPORTS, "UCX's number");
_Static_assert(offsetof(tu_ep_attr_t, transports) == offsetof(ucp_ep_attr_t, transports), "UCX's layout");
_Static_assert(offsetof(tu_ep_attr_t, transports.entry_size) == offsetof(ucp_ep_attr_t, transports.entry_size),
               "UCX's layout");
_Static_assert(sizeof(tu_transport_entry_t) == sizeof(ucp_transport_entry_t), "UCX's layout");
#endif
#if UCP_API_VERSION >= UCP_VERSION(1, 18)
_Static_assert(TU_EP_ATTR_USER_DATA == UCP_EP_ATTR_FIELD_USER_DATA, "UCX's number");
_Static_assert(offsetof(tu_ep_attr_t, user_data) == offsetof(ucp_ep_attr_t, user_data), "UCX's layout");
#endif

static inline ucs_status_t tu_ep_query(ucp_ep_h ep, tu_ep_attr_t *attr)
{
    return ucp_ep_query(ep, (ucp_ep_attr_t *)(void *)attr);
}

/* Whether the running UCX is of this release or a later one. */
static inline bool tu_ucx_has(unsigned major, unsigned minor)
{
    unsigned have_major, have_minor, release;

    ucp_get_version(&have_major, &have_minor, &release);
    return have_major > major || (have_major == major && have_minor >= minor);
}

#endif
