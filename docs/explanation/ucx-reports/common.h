/* What the programs have in common: workers, endpoints with error handling, and a second process to talk to. */
#define _GNU_SOURCE
#include <ucp/api/ucp.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline void must(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) {
        fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
        exit(2);
    }
}

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* A value given in the environment comes before this one. */
static inline void option(const char *name, const char *value)
{
    setenv(name, value, 0);
}

static inline ucp_context_h open_context(uint64_t features)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = features};
    ucp_context_h context;
    must(ucp_init(&params, NULL, &context), "ucp_init");
    return context;
}

static inline ucp_context_h open_context_with(uint64_t features, const char *option, const char *value)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = features};
    ucp_config_t *config;
    ucp_context_h context;

    must(ucp_config_read(NULL, NULL, &config), "ucp_config_read");
    must(ucp_config_modify(config, option, value), option);
    must(ucp_init(&params, config, &context), "ucp_init");
    ucp_config_release(config);
    return context;
}

static inline ucp_worker_h open_worker(ucp_context_h context)
{
    ucp_worker_params_t params = {.field_mask = 0};
    ucp_worker_h worker;
    must(ucp_worker_create(context, &params, &worker), "ucp_worker_create");
    return worker;
}

/* Without a callback UCX logs each failure as an error. */
static inline void on_error(void *flag, ucp_ep_h endpoint, ucs_status_t status)
{
    if (flag != NULL)
        *(ucs_status_t *)flag = status;
}

/* By worker address, with error handling; `failure` gets the status when the endpoint fails. */
static inline ucp_ep_h connect_to(ucp_worker_h worker, const void *address, ucs_status_t *failure)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = failure},
    };
    ucp_ep_h endpoint;
    must(ucp_ep_create(worker, &params, &endpoint), "ucp_ep_create");
    return endpoint;
}

/* The same to another worker of this process. */
static inline ucp_ep_h connect_workers(ucp_worker_h worker, ucp_worker_h peer)
{
    ucp_address_t *address;
    size_t length;
    must(ucp_worker_get_address(peer, &address, &length), "ucp_worker_get_address");
    return connect_to(worker, address, NULL);
}

static inline void progress_both(ucp_worker_h one, ucp_worker_h other, double seconds)
{
    for (double end = now() + seconds; now() < end;)
        ucp_worker_progress(one), ucp_worker_progress(other);
}

static inline void progress_for(ucp_worker_h worker, double seconds)
{
    for (double end = now() + seconds; now() < end;)
        ucp_worker_progress(worker);
}

/* 1 if it completed in time; `*status` is how. */
static inline int wait_for(ucp_worker_h worker, void *request, double seconds, ucs_status_t *status)
{
    *status = UCS_PTR_IS_PTR(request) ? UCS_INPROGRESS : UCS_PTR_STATUS(request);
    for (double end = now() + seconds; *status == UCS_INPROGRESS && now() < end;) {
        ucp_worker_progress(worker);
        *status = ucp_request_check_status(request);
    }
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    return *status != UCS_INPROGRESS;
}

static inline void close_by_force(ucp_worker_h worker, ucp_ep_h endpoint)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_t status;
    wait_for(worker, ucp_ep_close_nbx(endpoint, &param), 5, &status);
}

/* Blocks of bytes over a socket pair, to exchange addresses with. */
static inline void put_block(int fd, const void *data, size_t length)
{
    if (write(fd, &length, sizeof length) != sizeof length || write(fd, data, length) != (ssize_t)length)
        exit(3);
}

static inline void *get_block(int fd, size_t *length)
{
    if (read(fd, length, sizeof *length) != sizeof *length)
        exit(3);
    char *data = calloc(1, *length + 4096);
    for (size_t done = 0; done < *length;) {
        ssize_t n = read(fd, data + done, *length - done);
        if (n <= 0)
            exit(3);
        done += n;
    }
    return data;
}

static inline void put_address(int fd, ucp_worker_h worker)
{
    ucp_address_t *address;
    size_t length;
    must(ucp_worker_get_address(worker, &address, &length), "ucp_worker_get_address");
    put_block(fd, address, length);
    ucp_worker_release_address(worker, address);
}

/* Runs a side in a process of its own. Call it before UCX is used. */
static inline pid_t start(void (*side)(int), int argument)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        side(argument);
        exit(0);
    }
    return pid;
}

/* Two sides, with the two ends of a socket pair. When one dies, the other's exchange ends. */
static inline void start_two(void (*first)(int), void (*second)(int), pid_t pids[2])
{
    void (*sides[2])(int) = {first, second};
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        exit(3);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            close(ends[1 - i]);
            sides[i](ends[i]);
            exit(0);
        }
    }
    close(ends[0]);
    close(ends[1]);
}

/* Says how a process ended: 1 if by a signal. */
static inline int ended(pid_t pid, const char *name)
{
    int status;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status))
        printf("%s: ended by signal %d (%s)\n", name, WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        printf("%s: exit status %d\n", name, WEXITSTATUS(status));
    return WIFSIGNALED(status);
}
