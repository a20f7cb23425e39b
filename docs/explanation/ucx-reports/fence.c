/*
 * ucp_worker_fence waits for the peer
 *
 * What happens. The fence's documentation says that it "does not guarantee completion of the operations on the call
 * return but only ensures the order". With the protocols of 1.22 (UCX_PROTO_ENABLE=y) the mode auto is strong:
 * ucp_worker_fence_strong flushes the worker, and progresses inside the call until that is done. A peer that is busy
 * stops the caller's thread for that long, one that is stopped stops it for good, and callbacks run inside the call. In
 * 1.13 it returns at once.
 *
 * This program. The owner of the memory is busy for a second; a fence after a put of 8 bytes takes that long.
 *
 * Shown with UCX 1.13.1: no; UCX 1.22.0: yes.
 *
 * Suggested change. src/ucp/core/ucp_context.c: let auto choose ep_based where proto_enable is set, which only marks
 * the worker; the operations that follow on an endpoint then wait for its flush as pending requests, not by
 * ucp_rma_wait in ucp_ep_fence_strong (src/ucp/rma/flush.c). Or a ucp_worker_fence_nbx which returns a request, and a
 * sentence in ucp.h that says that the other one may block.
 *
 * What trio_ucx does. The library's own transfers are ordered without the fence. Where Worker.fence is UCX's, its
 * documentation says so.
 */
#include "common.h"

static uint64_t word;

static void owner(int fd)
{
    ucp_context_h context = open_context(UCP_FEATURE_RMA);
    ucp_worker_h worker = open_worker(context);
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = &word,
        .length = sizeof word,
    };
    uint64_t address = (uintptr_t)&word;
    ucp_mem_h memory;
    void *key;
    size_t length;
    char byte;

    must(ucp_mem_map(context, &params, &memory), "ucp_mem_map");
    must(ucp_rkey_pack(context, memory, &key, &length), "ucp_rkey_pack");
    put_address(fd, worker);
    put_block(fd, key, length);
    put_block(fd, &address, sizeof address);
    while (recv(fd, &byte, 1, MSG_DONTWAIT) < 0)
        ucp_worker_progress(worker);
    sleep(1); /* computes, for example */
    progress_for(worker, 0.3);
}

static void client(int fd)
{
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_RMA));
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_t status;
    size_t length;
    ucp_rkey_h key;
    uint64_t value = 1;
    ucp_ep_h endpoint = connect_to(worker, get_block(fd, &length), NULL);

    must(ucp_ep_rkey_unpack(endpoint, get_block(fd, &length), &key), "ucp_ep_rkey_unpack");
    uint64_t address = *(uint64_t *)get_block(fd, &length);
    wait_for(worker, ucp_put_nbx(endpoint, &value, sizeof value, address, key, &param), 5, &status);
    wait_for(worker, ucp_worker_flush_nbx(worker, &param), 5, &status);
    must(status, "first put");
    put_block(fd, "", 1);
    usleep(100000);
    wait_for(worker, ucp_put_nbx(endpoint, &value, sizeof value, address, key, &param), 5, &status);
    double before = now();
    must(ucp_worker_fence(worker), "ucp_worker_fence");
    printf("ucp_worker_fence took %.1f seconds\n", now() - before);
}

int main(void)
{
    pid_t pids[2];

    option("UCX_TLS", "tcp");
    start_two(owner, client, pids);
    ended(pids[1], "client");
    ended(pids[0], "owner");
    return 0;
}
