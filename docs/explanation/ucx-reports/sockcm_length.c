/*
 * The length in a stranger's connection request, at the port of a ucp_listener: no data, and less than there is.
 *
 * Behind each block from malloc, once the server listens, is an inaccessible page: reading past the end is SIGSEGV.
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
