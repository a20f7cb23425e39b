/*
 * RMA: the owner of memory crashes when a client is killed
 *
 * What happens. A get that no transport can do is emulated: the owner answers GET_REQ with GET_REP messages. If the
 * client dies while answers are queued, the owner's endpoint fails, and its pending requests are purged.
 * ucp_request_send_state_ff does not know an answer's request, and takes it for a user's send: it deregisters memory
 * and calls back by fields that were never set.
 *
 *     ucp_request_dt_dereg <- ucp_request_send_state_ff <- uct_tcp_ep_pending_purge <- ucp_worker_discard_uct_ep <-
 *     ucp_ep_discard_lanes <- ucp_ep_set_failed <- ucp_worker_iface_error_handler <- uct_tcp_ep_handle_recv_err
 *
 * 1.13 ends by the assertion in ucs_empty_function_do_assert_void, below uct_tcp_ep_pending_purge.
 *
 * This program. Clients get 64 blocks of 2 MiB over TCP, and are killed one after the other. The owner of 1.22 died
 * after 4 and 6 kills, that of 1.13 after 23. The same happens over shared memory that UCX did not allocate (seen with
 * a program in Python).
 *
 * Shown with UCX 1.13.1: SIGABRT; UCX 1.22.0: SIGSEGV.
 *
 * Suggested change. In ucp_request_send_state_ff (src/ucp/core/ucp_request.c): a branch for ucp_progress_get_reply and
 * ucp_progress_rma_cmpl (src/ucp/rma/rma_sw.c), and for the answer to an atomic (src/ucp/rma/amo_sw.c), which only
 * gives the request back (ucp_request_put). The same functions return every error of uct_ep_am_bcopy to
 * ucp_request_try_send, which calls ucs_fatal for what is not NO_RESOURCE: an answer to an endpoint that has failed
 * must be dropped instead.
 *
 * What trio_ucx does. Two trio_ucx peers do not use these messages, nor UCX's for atomics, for host memory: they use
 * mapped shared memory or active messages. Peers without this library still bring the crash about.
 */
#include "common.h"

enum { BLOCK = 2 << 20, BLOCKS = 64, KILLS = 30 };

typedef struct {
    void *memory;
    size_t rkey_length;
    char rkey[1000];
} description_t;

static void own(int fd)
{
    ucp_context_h context = open_context(UCP_FEATURE_RMA | UCP_FEATURE_TAG);
    ucp_worker_h worker = open_worker(context);
    description_t it = {.memory = calloc(BLOCKS, BLOCK)};
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = it.memory,
        .length = (size_t)BLOCKS * BLOCK,
    };
    ucp_mem_h memory;
    void *rkey;
    char end;

    must(ucp_mem_map(context, &params, &memory), "ucp_mem_map");
    must(ucp_rkey_pack(context, memory, &rkey, &it.rkey_length), "ucp_rkey_pack");
    memcpy(it.rkey, rkey, it.rkey_length);
    for (int i = 0; i < KILLS; i++) {
        put_address(fd, worker);
        put_block(fd, &it, sizeof it);
    }
    while (recv(fd, &end, 1, MSG_DONTWAIT) < 0)
        ucp_worker_progress(worker);
}

static void get_blocks(int fd)
{
    static char buffers[BLOCKS][BLOCK];
    ucp_request_param_t param = {.op_attr_mask = 0};
    void *requests[BLOCKS] = {NULL};
    ucp_worker_h worker = open_worker(open_context(UCP_FEATURE_RMA | UCP_FEATURE_TAG));
    size_t length;
    ucp_ep_h endpoint = connect_to(worker, get_block(fd, &length), NULL);
    description_t *it = get_block(fd, &length);
    ucp_rkey_h rkey;

    must(ucp_ep_rkey_unpack(endpoint, it->rkey, &rkey), "ucp_ep_rkey_unpack");
    for (;;) {
        for (int i = 0; i < BLOCKS; i++) {
            if (requests[i] != NULL && ucp_request_check_status(requests[i]) == UCS_INPROGRESS)
                continue;
            if (requests[i] != NULL)
                ucp_request_free(requests[i]);
            uint64_t remote = (uint64_t)it->memory + (uint64_t)i * BLOCK;
            requests[i] = ucp_get_nbx(endpoint, buffers[i], BLOCK, remote, rkey, &param);
            if (UCS_PTR_IS_ERR(requests[i]))
                exit(2);
        }
        ucp_worker_progress(worker);
    }
}

int main(void)
{
    int ends[2];

    option("UCX_TLS", "tcp");
    option("UCX_MM_ERROR_HANDLING", "y");
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return 3;
    pid_t owner = start(own, ends[0]);
    close(ends[0]);
    srand(1);
    for (int i = 0; i < KILLS; i++) {
        siginfo_t info = {.si_pid = 0};
        pid_t client = start(get_blocks, ends[1]);
        usleep(200000 + rand() % 800000);
        kill(client, SIGKILL);
        waitpid(client, NULL, 0);
        usleep(300000);
        if (waitid(P_PID, owner, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == owner) {
            printf("after %d kills ", i + 1);
            return !ended(owner, "owner");
        }
    }
    close(ends[1]);
    printf("after %d kills ", KILLS);
    ended(owner, "owner");
    return 0;
}
