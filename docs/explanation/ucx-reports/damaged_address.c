/*
 * ucp_ep_create with a worker address of which one byte is damaged, in a process of its own for each byte: an error is
 * expected (or success, since nothing protects the bytes). An inaccessible page follows the address.
 */
#include "common.h"

#include <sys/mman.h>

static void create_from(int damage)
{
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_TAG));
    ucp_worker_h peer = open_worker(open_context(UCP_FEATURE_TAG));
    ucp_address_t *address;
    size_t length;
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS};
    ucp_ep_h endpoint;

    must(ucp_worker_get_address(peer, &address, &length), "ucp_worker_get_address");
    char *copy = pages + 4096 - length;
    params.address = memcpy(copy, address, length);
    mprotect(pages + 4096, 4096, PROT_NONE);
    if (damage >= (int)length)
        exit(9);
    if (damage >= 0)
        copy[damage] ^= damage == 0 ? 0x02 : 0xff; /* byte 0: the version, of which 0 and 1 exist */
    exit(ucp_ep_create(worker, &params, &endpoint) == UCS_OK ? 0 : 1);
}

int main(void)
{
    int by_signal = 0, byte = -1;

    option("UCX_TLS", "tcp");
    for (;; byte++) {
        int status;
        waitpid(start(create_from, byte), &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 9)
            break;
        if (WIFSIGNALED(status)) {
            printf("byte %d damaged: signal %d (%s)\n", byte, WTERMSIG(status), strsignal(WTERMSIG(status)));
            by_signal++;
        }
    }
    printf("%d of %d processes ended by a signal\n", by_signal, byte);
    return 0;
}
