/* The C code of links without UCX: what it asks of UCX is written to a log, and answered as the test says. */
#include <string.h>

#include "link/link.h"

#include "native_link.h"

/* native_link.py gives the allocator's functions these names, so that what is not freed is noticed. */
#undef malloc
#undef calloc
#undef free
void *malloc(size_t size);
void *calloc(size_t count, size_t size);
void free(void *memory);

int64_t tu_allocations_left = -1;
uint64_t fake_clock;
int fake_answer;
int fake_refusal;
size_t fake_freed;

size_t fake_allocated;

static struct tu_worker worker;
static struct tu_endpoint endpoint = {.worker = &worker};

static char fake_log[1 << 20];
static size_t log_used;

/* What UCX has: a pointer to memory of links, and what was there when it was posted. */
typedef struct pending {
    const void *memory;
    size_t size;
    char *copy;
    ucp_send_nbx_callback_t callback;
    void *user_data;
} pending_t;

static pending_t pending[4096];
static size_t pending_count;

int fake_gettime(clockid_t clock, struct timespec *time)
{
    (void)clock;
    time->tv_sec  = (time_t)(fake_clock / 1000000000u);
    time->tv_nsec = (long)(fake_clock % 1000000000u);
    return 0;
}

static void *counted(void *memory)
{
    fake_allocated += memory != NULL;
    return memory;
}

void *fake_malloc(size_t size)
{
    return counted(malloc(size));
}

void *fake_calloc(size_t count, size_t size)
{
    return counted(calloc(count, size));
}

void fake_free(void *memory)
{
    fake_allocated -= memory != NULL;
    free(memory);
}

tu_endpoint_t *fake_endpoint(void)
{
    return &endpoint;
}

static void log_add(uint64_t tag, const void *data, uint64_t size)
{
    if (log_used + 16 + size > sizeof(fake_log)) {
        abort();
    }
    memcpy(fake_log + log_used, &tag, 8);
    memcpy(fake_log + log_used + 8, &size, 8);
    memcpy(fake_log + log_used + 16, data, size);
    log_used += 16 + size;
}

size_t fake_log_take(char *out)
{
    size_t size = log_used;

    memcpy(out, fake_log, size);
    log_used = 0;
    return size;
}

int64_t tu_tag_send_one(tu_endpoint_t *to, const void *data, size_t length, int memory, uint64_t tag)
{
    (void)to;
    (void)memory;
    if (fake_refusal != 0) {
        return fake_refusal;
    }
    log_add(tag, data, length);
    return 0;
}

int64_t fake_outlet(void *context, uint32_t number, const void *data, size_t length)
{
    (void)context;
    log_add((uint64_t)2 << 32 | number, data, length);
    return 0;
}

ucs_status_ptr_t ucp_tag_send_nbx(ucp_ep_h ep, const void *data, size_t length, ucp_tag_t tag,
                                  const ucp_request_param_t *param)
{
    pending_t *one = &pending[pending_count];

    (void)ep;
    if (fake_answer < 0) {
        return UCS_STATUS_PTR((intptr_t)fake_answer);
    }
    log_add(tag, data, length);
    if (fake_answer == FAKE_DONE) {
        return NULL;
    }
    if (fake_answer == FAKE_DONE_INSIDE) {
        param->cb.send(&worker, UCS_OK, param->user_data);
        return &worker;
    }
    *one = (pending_t){data, length, malloc(length), param->cb.send, param->user_data};
    memcpy(one->copy, data, length);
    pending_count++;
    return &worker;
}

void ucp_request_free(void *request)
{
    (void)request;
    fake_freed++;
}

size_t fake_pending(void)
{
    return pending_count;
}

bool fake_complete(size_t index, int status)
{
    pending_t one = pending[index];
    bool same     = memcmp(one.memory, one.copy, one.size) == 0;

    free(one.copy);
    pending[index] = pending[--pending_count];
    one.callback(&worker, (ucs_status_t)status, one.user_data);
    return same;
}
