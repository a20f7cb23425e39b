/*
 * A UCP program with UCX's own defaults, that knows nothing of trio_ucx: worker addresses, and tag messages.
 *
 * usage: stock_peer peer|none SEND RECEIVE [asleep]
 *
 * Prints its worker's address in hex, reads another one. Opens an endpoint with that error handling mode, and sends
 * SEND bytes with tag 2, unless SEND is -1. Receives RECEIVE bytes with tag 1, unless RECEIVE is -1. Says "sent" and
 * "received", and ends with its input. With "asleep" it waits for events of UCX, and looks only when there are some.
 */

#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <ucp/api/ucp.h>

static void check(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) {
        fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
        exit(1);
    }
}

static void failed(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)arg;
    (void)ep;
    printf("failed: %s\n", ucs_status_string(status));
    fflush(stdout);
}

static int input_ended(void)
{
    struct pollfd in = {.fd = 0, .events = POLLIN};

    return poll(&in, 1, 0) > 0;
}

/* Says when a request is done; returns what remains to be waited for. */
static void *say_if_done(void *request, const char *word)
{
    if (request == NULL || ucp_request_check_status(request) == UCS_INPROGRESS) {
        return request;
    }
    printf("%s: %s\n", word, ucs_status_string(ucp_request_check_status(request)));
    fflush(stdout);
    ucp_request_free(request);
    return NULL;
}

int main(int argc, char **argv)
{
    long to_send            = argc >= 4 ? atol(argv[2]) : -1;
    long to_receive         = argc >= 4 ? atol(argv[3]) : -1;
    int asleep              = argc == 5;
    ucp_params_t params     = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_worker_params_t one = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_request_param_t none       = {0};
    static char line[1 << 16], theirs[1 << 15];
    void *sending = NULL, *receiving = NULL;
    char *out, *in;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *address;
    ucp_ep_h ep;
    size_t length, i;
    int efd = -1;

    if (argc != 4 && argc != 5) {
        return 2;
    }
    params.features |= asleep ? UCP_FEATURE_WAKEUP : 0;
    check(ucp_init(&params, NULL, &context), "ucp_init");
    check(ucp_worker_create(context, &one, &worker), "ucp_worker_create");
    if (asleep) {
        check(ucp_worker_get_efd(worker, &efd), "ucp_worker_get_efd");
    }
    check(ucp_worker_get_address(worker, &address, &length), "ucp_worker_get_address");
    for (i = 0; i < length; i++) {
        printf("%02x", ((unsigned char *)address)[i]);
    }
    printf("\n");
    fflush(stdout);
    for (i = 0; i + 1 < sizeof(line) && read(0, line + i, 1) == 1 && line[i] != '\n'; i++) {
    }
    for (length = i / 2, i = 0; i < length; i++) {
        sscanf(line + 2 * i, "%2hhx", (unsigned char *)theirs + i);
    }
    out = calloc(1, to_send > 0 ? to_send : 1);
    in  = calloc(1, to_receive > 0 ? to_receive : 1);
    if (to_receive >= 0) {
        receiving = ucp_tag_recv_nbx(worker, in, to_receive, 1, UINT64_MAX, &none);
    }
    if (to_send >= 0) {
        ucp_ep_params_t ep_params = {
            .field_mask  = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                           UCP_EP_PARAM_FIELD_ERR_HANDLER,
            .address     = (ucp_address_t *)theirs,
            .err_mode    = strcmp(argv[1], "peer") == 0 ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE,
            .err_handler = {.cb = failed}};
        check(ucp_ep_create(worker, &ep_params, &ep), "ucp_ep_create");
        memset(out, 7, to_send);
        sending = ucp_tag_send_nbx(ep, out, to_send, 2, &none);
        if (UCS_PTR_IS_ERR(sending)) {
            check(UCS_PTR_STATUS(sending), "ucp_tag_send_nbx");
        } else if (sending == NULL) {
            printf("sent: Success\n");
            fflush(stdout);
        }
    }
    while (!input_ended()) {
        while (ucp_worker_progress(worker)) {
        }
        sending   = say_if_done(sending, "sent");
        receiving = say_if_done(receiving, "received");
        if (!asleep) {
            usleep(100);
        } else if (ucp_worker_arm(worker) == UCS_OK) {
            struct pollfd both[2] = {{.fd = 0, .events = POLLIN}, {.fd = efd, .events = POLLIN}};

            poll(both, 2, -1);
        }
    }
    _exit(0);
}
