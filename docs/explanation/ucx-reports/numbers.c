/*
 * Endpoints by worker address between the same two workers, one after the other, each closed before the next one.
 * After 65,535 they are no longer paired, and UCX refuses them where the context has the STREAM feature.
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
