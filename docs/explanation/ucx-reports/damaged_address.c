/*
 * A damaged worker address
 *
 * What happens. ucp_ep_create trusts the bytes of an address. A version that does not exist is an assertion, lengths
 * are used unchecked, and lists without an end mark are read on into whatever follows. An address comes from the
 * network, and the call does not even get its length.
 *
 * This program. Inverts one byte of a TCP worker's address at a time, in a process of its own for each byte; an
 * inaccessible page follows the address. An error is expected (or success, since nothing protects the bytes). In 1.22 8
 * or 9 of 77 processes ended by a signal, in 1.13 7 of 79: one by the assertion on the version in
 * ucp_address_unpack_header, now and then one by that on the score in select.c, the others by SIGSEGV in
 * ucp_address_unpack.
 *
 * Shown with UCX 1.13.1: SIGABRT, SIGSEGV; UCX 1.22.0: SIGABRT, SIGSEGV.
 *
 * Suggested change. src/ucp/wireup/address.c: return UCS_ERR_INVALID_ADDR for an unknown version, an UCP_EP_PARAM_FIELD
 * for the length of the address, and let the functions below ucp_address_unpack check the end before each read. They
 * should also refuse performance figures that are negative or not numbers.
 *
 * What trio_ucx does. Worker addresses and peer descriptions have a checksum, which is compared first. The bytes that
 * WorkerAddress.from_ucx takes have none: only their length and version are checked.
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
