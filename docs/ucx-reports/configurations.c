/*
 * Peers with other segment sizes than each other make endpoints to a server, which only progresses its worker. A worker
 * has 255 endpoint configurations. UCX cannot make one for the next peer, and crashes when it fails the endpoint.
 */
#include "common.h"

static ucp_context_h context_with(const char *segment)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_config_t *config;
    ucp_context_h context;

    must(ucp_config_read(NULL, NULL, &config), "ucp_config_read");
    must(ucp_config_modify(config, "TCP_TX_SEG_SIZE", segment), "TCP_TX_SEG_SIZE");
    must(ucp_init(&params, config, &context), "ucp_init");
    ucp_config_release(config);
    return context;
}

static void serve(int peers)
{
    ucp_worker_h server = open_worker(open_context(UCP_FEATURE_TAG));
    ucp_address_t *address;
    size_t length;

    must(ucp_worker_get_address(server, &address, &length), "ucp_worker_get_address");
    for (int i = 0; i < peers; i++) {
        ucs_status_t failure = UCS_OK;
        char segment[32];
        snprintf(segment, sizeof segment, "%d", 4096 + 64 * i);
        ucp_context_h context = context_with(segment);
        ucp_worker_h peer = open_worker(context);
        ucp_ep_h endpoint = connect_to(peer, address, &failure);
        for (double end = now() + 0.01; now() < end;)
            ucp_worker_progress(server), ucp_worker_progress(peer);
        close_by_force(peer, endpoint);
        ucp_worker_destroy(peer);
        ucp_cleanup(context);
    }
}

int main(void)
{
    option("UCX_TLS", "tcp");
    option("UCX_NET_DEVICES", "lo");
    option("UCX_ADDRESS_VERSION", "v2");
    option("UCX_RESOLVE_REMOTE_EP_ID", "y");
    ended(start(serve, 200), "200 peers");
    ended(start(serve, 400), "400 peers");
    return 0;
}
