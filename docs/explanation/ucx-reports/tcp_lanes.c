/*
 * Lanes of a TCP endpoint by worker address, without and with error handling: with it there is no rma_bw lane.
 * Two workers in one process.
 */
#include "common.h"

static void print_lanes(int error_handling)
{
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucp_context_h context = open_context(UCP_FEATURE_TAG);
    ucp_worker_h worker = open_worker(context), peer = open_worker(context);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .err_mode = error_handling ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE,
    };
    ucp_address_t *address;
    ucp_ep_h endpoint;
    size_t length;

    must(ucp_worker_get_address(peer, &address, &length), "ucp_worker_get_address");
    params.address = address;
    must(ucp_ep_create(worker, &params, &endpoint), "ucp_ep_create");
    ucp_tag_send_nbx(endpoint, "message", 8, 1, &param);
    progress_both(worker, peer, 0.5);
    printf("%s error handling:\n", error_handling ? "with" : "without");
    ucp_ep_print_info(endpoint, stdout);
}

int main(void)
{
    option("UCX_TLS", "tcp");
    print_lanes(0);
    print_lanes(1);
    return 0;
}
