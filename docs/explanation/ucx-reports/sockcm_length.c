/*
 * The length of a connection request is not checked
 *
 * What happens. uct_tcp_sockcm_ep_recv believes the length in a stranger's header. A length of 0 makes a connection
 * request without data; the application gets it, and ucp_ep_create reads the version and a worker address behind the
 * end of the request's memory. A length that is less than what has arrived is an assertion; without assertions the
 * connection is neither answered nor closed until the stranger leaves, or sends more than the buffer holds.
 *
 *     ucp_ep_create_server_accept <- ucp_ep_create
 *
 * This program. Puts an inaccessible page behind each block from malloc once the server listens, so that reading past
 * the end is SIGSEGV. 16 bytes from a stranger, and the server ends in ucp_conn_request_unpack_sa_data.
 *
 * Shown with UCX 1.13.1: SIGSEGV, SIGABRT; UCX 1.22.0: SIGSEGV, no answer.
 *
 * Suggested change. uct_tcp_sockcm_ep_recv in src/uct/tcp/tcp_sockcm_ep.c: if hdr->length is more than priv_data_len,
 * or less than what has arrived, close the connection. ucp_cm_remote_data_check in src/ucp/wireup/wireup_cm.c: reject
 * what is shorter than ucp_wireup_sockaddr_data_base_t and its address; and pass the length on to ucp_address_unpack,
 * as damaged_address.c suggests.
 *
 * What trio_ucx does. Connections begin on a socket of Trio's. Only Worker.open_listener opens such a port.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>

enum { PAGE = 4096, BLOCKS = 4096 };

static char *guarded, *next, *end;

void *__libc_malloc(size_t size);
void __libc_free(void *block);

void *malloc(size_t size)
{
    if (guarded == NULL || size > PAGE)
        return __libc_malloc(size);
    char *page = __atomic_fetch_add(&next, 2 * PAGE, __ATOMIC_RELAXED);
    if (page >= end)
        return __libc_malloc(size);
    return page + PAGE - size;
}

void free(void *block)
{
    if ((char *)block < guarded || (char *)block > end)
        __libc_free(block);
}

static void guard_blocks(void)
{
    char *pages = mmap(NULL, BLOCKS * 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < BLOCKS; i++)
        mprotect(pages + i * 2 * PAGE, PAGE, PROT_READ | PROT_WRITE);
    next = pages;
    end = pages + BLOCKS * 2 * PAGE;
    guarded = pages;
}

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
    guard_blocks();
    put_block(fd, &attr.sockaddr, sizeof address);
    progress_for(worker, 0.4);
    printf("the request %s\n", requested != NULL ? "is given to the application" : "is not answered");
    if (requested != NULL) {
        ucp_ep_params_t accept = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST, .conn_request = requested};
        ucp_ep_h endpoint;
        fflush(stdout);
        printf("ucp_ep_create: %s\n", ucs_status_string(ucp_ep_create(worker, &accept, &endpoint)));
    }
}

static void be_a_stranger(int server, size_t says, size_t sends)
{
    /* The header of sockcm: the length of what follows, and its kind. */
    struct {
        uint64_t length;
        uint8_t kind, unused[7], data[64];
    } message = {.length = says, .kind = 0};
    size_t length;
    struct sockaddr *address = get_block(server, &length);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    if (connect(fd, address, length) != 0 || write(fd, &message, 16 + sends) != (ssize_t)(16 + sends))
        exit(3);
    usleep(500000);
    close(fd);
}

int main(void)
{
    static const size_t lengths[][2] = {{0, 0}, {8, 64}};

    option("UCX_TLS", "tcp");
    for (int i = 0; i < 2; i++) {
        int ends[2];
        char name[40];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
            return 3;
        pid_t server = start(serve, ends[1]);
        be_a_stranger(ends[0], lengths[i][0], lengths[i][1]);
        sprintf(name, "length %zu, with %zu bytes", lengths[i][0], lengths[i][1]);
        ended(server, name);
    }
    return 0;
}
