/*
 * A peer makes an endpoint to a server that has no transport for it: the peer's shared memory handles errors, and the
 * server's does not. The server only progresses its worker.
 */
#include "common.h"

static ucp_context_h context_with(const char *error_handling)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_config_t *config;
    ucp_context_h context;

    must(ucp_config_read(NULL, NULL, &config), "ucp_config_read");
    must(ucp_config_modify(config, "MM_ERROR_HANDLING", error_handling), "MM_ERROR_HANDLING");
    must(ucp_init(&params, config, &context), "ucp_init");
    ucp_config_release(config);
    return context;
}

static void meet(int unused)
{
    ucp_worker_h server = open_worker(context_with("n")), peer = open_worker(context_with("y"));
    ucp_address_t *address;
    size_t length;
    ucs_status_t failure = UCS_OK;

    (void)unused;
    must(ucp_worker_get_address(server, &address, &length), "ucp_worker_get_address");
    connect_to(peer, address, &failure);
    for (double end = now() + 1; now() < end;) {
        ucp_worker_progress(peer);
        ucp_worker_progress(server);
    }
}

int main(void)
{
    option("UCX_TLS", "sysv,self");
    option("UCX_RESOLVE_REMOTE_EP_ID", "y");
    ended(start(meet, 0), "server");
    return 0;
}
