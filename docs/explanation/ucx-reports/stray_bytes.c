/*
 * Stray bytes at a listener's port
 *
 * What happens. ucp_ep_create trusts the bytes of an address (damaged_address.c), and anybody who reaches the port of a
 * ucp_listener can give it some: the socket connection manager passes on what a stranger sent, and the server ends when
 * it accepts the request. No peer of UCX is needed, only 80 bytes.
 *
 * This program. For each of 16 fill bytes a server, and a plain socket that sends 80 such bytes: the connection should
 * be closed, nothing else. With 22 and 33 (hexadecimal), which are versions 2 and 3, the server ends by SIGABRT in
 * ucp_address_unpack_header; with others ucp_ep_create returns UNSUPPORTED.
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGABRT.
 *
 * Suggested change. As in damaged_address.c; and a magic number in uct_tcp_sockcm_priv_data_hdr_t
 * (src/uct/tcp/tcp_sockcm.h), so that strangers are turned away first, as the data port does (UCT_TCP_MAGIC_NUMBER).
 *
 * What trio_ucx does. Connections begin on a socket of Trio's. Only Worker.open_listener opens such a port.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>

static ucp_conn_request_h requested;

static void on_request(ucp_conn_request_h request, void *argument)
{
    requested = request;
}

static void serve(int fd)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    ucp_listener_h listener;
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {(struct sockaddr *)&address, sizeof address},
        .conn_handler = {on_request, NULL},
    };
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};

    must(ucp_listener_create(worker, &params, &listener), "ucp_listener_create");
    must(ucp_listener_query(listener, &attr), "ucp_listener_query");
    put_block(fd, &attr.sockaddr, sizeof address);
    progress_for(worker, 0.7);
    if (requested != NULL) {
        ucp_ep_params_t accept = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST, .conn_request = requested};
        ucp_ep_h endpoint;
        printf("ucp_ep_create: %s\n", ucs_status_string(ucp_ep_create(worker, &accept, &endpoint)));
    }
}

static void be_a_stranger(int server, int fill)
{
    /* The header of sockcm: the length of what follows, and its kind. */
    struct {
        uint64_t length;
        uint8_t kind, unused[7], data[64];
    } message = {.length = 64, .kind = 0};
    size_t length;
    struct sockaddr *address = get_block(server, &length);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    memset(message.data, fill, sizeof message.data);
    if (connect(fd, address, length) != 0 || write(fd, &message, sizeof message) != sizeof message)
        exit(3);
    sleep(1);
    close(fd);
}

int main(void)
{
    option("UCX_TLS", "tcp");
    for (int fill = 0; fill < 256; fill += 17) {
        int ends[2];
        char name[30];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
            return 3;
        pid_t server = start(serve, ends[1]);
        be_a_stranger(ends[0], fill);
        sprintf(name, "64 times 0x%02x", fill);
        ended(server, name);
    }
    return 0;
}
