/* UCX's keepalive, and endpoints that UCX could not make.
 *
 * A peer asks UCX here for an endpoint, and is killed before UCX has attached the peer's shared memory. UCX 1.22 then only
 * schedules that its own endpoint fails (ucp_wireup_process_request). Until then the endpoint has no lanes. If keepalive
 * looks at it in between (ucp_worker_do_ep_keepalive), it calls through a null pointer. So the call is replaced in the
 * import table of libucp, and such an endpoint is left out. */
#include <pthread.h>

#include "native.h"

/* Not in UCX's public headers. NULL if a release has no such function. */
__attribute__((weak)) ucs_status_t ucp_ep_do_uct_ep_am_keepalive(ucp_ep_h ep, void *lane, uint8_t resource);

static ucs_status_t check_lane(ucp_ep_h ep, void *lane, uint8_t resource)
{
    return lane == NULL ? UCS_OK : ucp_ep_do_uct_ep_am_keepalive(ep, lane, resource);
}

static void replace_once(void)
{
    const void *libucp = (const void *)(uintptr_t)ucp_worker_progress;

    if (ucp_ep_do_uct_ep_am_keepalive != NULL) {
        tu_replace_import(libucp, "ucp_ep_do_uct_ep_am_keepalive", (const void *)(uintptr_t)check_lane);
    }
}

void tu_keepalive_guard(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, replace_once);
}
