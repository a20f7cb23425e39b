/*
 * TCP by worker address with error handling has no RMA lanes
 *
 * What happens. With UCP_ERR_HANDLING_MODE_PEER a TCP endpoint by worker address gets no rma_bw lane, and large
 * messages go as "rendezvous zero-copy" on one device instead of "rendezvous zero-copy fenced write to remote". That
 * has 0.7 to 0.75 of the bandwidth: 2,000 to 2,300 MB/s against 2,900 MB/s (1 MiB over loopback, medians, segments of
 * 256 KiB). An endpoint by socket address has the lane, with error handling, too.
 *
 * This program. Prints the lanes (ucp_ep_print_info) of an endpoint by worker address between two workers in one
 * process, without and with error handling. UCX_PROTO_INFO=y shows the protocol, and ucx_perftest -t tag_bw -s 1048576
 * without and with -e the bandwidth, on a machine that is idle. (Under load we saw no difference.)
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. ucp_wireup_add_rma_bw_lanes in src/ucp/wireup/select.c demands UCT_MD_FLAG_INVALIDATE_RMA.
 * ucp_wireup_select_transport waives it where ucp_wireup_connect_p2p(worker, rsc_index, has_cm) holds, "since both
 * sides close the connection in case of error". TCP can connect both ways, and without a connection manager UCX
 * connects it to the interface. Either let ucp_wireup_connect_p2p prefer endpoint to endpoint with error handling, too,
 * as it does for has_cm; or waive the flag for a transport whose remote writes end with its connection. For TCP the
 * latter needs more: an endpoint that was connected to an interface, and closed by force, goes on receiving until the
 * peer's FIN.
 *
 * What trio_ucx does. Nothing: endpoints by worker address have error handling.
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
