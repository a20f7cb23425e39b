/*
 * 65,535 endpoints between two workers
 *
 * What happens. Endpoints by worker address are paired by a number of 16 bits (ucp_ep_match_conn_sn_t). It counts all
 * endpoints that were ever created between two workers, including closed ones, and stays at 65,535. From then on
 * endpoints are not paired, each gets another, internal endpoint at the peer, and with UCP_FEATURE_STREAM ucp_ep_create
 * fails: EXCEEDS_LIMIT. A server that runs for long, and its client that connects often, must replace a worker.
 *
 * This program. Creates endpoints between the same two workers one after the other, each closed before the next one:
 * number 65,535 is refused. It takes a minute or two.
 *
 * Shown with UCX 1.13.1: yes; UCX 1.22.0: yes.
 *
 * Suggested change. src/ucp/wireup/ep_match.h: 32 bits, in ucp_wireup_msg_t as well (which has to tell releases apart,
 * by dst_version). Or use a number again when both of its endpoints are closed.
 *
 * What trio_ucx does. A client connects from another worker of the same context.
 */
#include "common.h"

int main(void)
{
    option("UCX_TLS", "tcp");
    ucp_context_h context = open_context(UCP_FEATURE_STREAM);
    ucp_worker_h one = open_worker(context), other = open_worker(context);
    ucp_address_t *address;
    size_t length;

    must(ucp_worker_get_address(other, &address, &length), "ucp_worker_get_address");
    for (int count = 0; count < 70000; count++) {
        ucp_ep_params_t params = {
            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
            .address = address,
            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        };
        ucp_ep_h endpoint;
        ucs_status_t status = ucp_ep_create(one, &params, &endpoint);
        if (status != UCS_OK) {
            printf("endpoint %d: %s\n", count, ucs_status_string(status));
            return 1;
        }
        close_by_force(one, endpoint);
        while (ucp_worker_progress(other) + ucp_worker_progress(one) > 0)
            ;
    }
    printf("70000 endpoints\n");
    return 0;
}
