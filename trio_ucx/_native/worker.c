/* Creates, destroys and describes workers, and makes them progress. */
#include <string.h>

#include "native.h"

#define BUSY_RETRIES 4
#define FAILING 1000000 /* nanoseconds in which the failure of an endpoint follows that of its operations */

#define TU_EXTENSION(folder) extern const tu_extension_t tu_extension_##folder;
TU_EXTENSIONS
#undef TU_EXTENSION

#define TU_EXTENSION(folder) &tu_extension_##folder,
static const tu_extension_t *const extensions[TU_EXTENSION_COUNT] = {TU_EXTENSIONS};
#undef TU_EXTENSION

/* Frees everything but UCX's worker, which has gone, or was never created. */
static void worker_free(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;
    int i;

    tu_gate_destroy(worker->gate);
    tu_long_worker_destroyed(worker);
    tu_operations_free(worker);
    for (i = TU_EXTENSION_COUNT; i-- > 0;) {
        if (worker->extensions[i] != NULL) {
            extensions[i]->worker_destroyed(worker);
        }
    }
    while ((endpoint = TU_LIST_FIRST(&worker->closed, tu_endpoint_t, link)) != NULL) {
        tu_list_remove(&endpoint->link);
        free(endpoint);
    }
    free(worker->ring);
    free(worker->scratch);
    free(worker);
}

void tu_worker_destroy(tu_worker_t *worker)
{
    tu_gate_t *before = tu_gate_enter(worker->gate);

    tu_sockets_make_room(worker->efd);
    ucp_worker_destroy(worker->worker);
    tu_gate_leave(before);
    worker_free(worker);
}

/* Allocates everything but UCX's worker. */
static tu_worker_t *worker_allocate(tu_context_t *context, const tu_port_range_t *range)
{
    tu_worker_t *worker = tu_calloc(1, sizeof(*worker));

    if (worker == NULL) {
        return NULL;
    }
    worker->context         = context;
    worker->streams         = (context->features & UCP_FEATURE_STREAM) != 0;
    worker->knows_user_data = tu_ucx_has(1, 18);
    worker->loses_info      = !tu_ucx_has(1, 17);
    tu_list_init(&worker->hooks);
    tu_long_open(worker);
    tu_list_init(&worker->endpoints);
    tu_list_init(&worker->closed);
    worker->gate = tu_gate_create(range);
    if (worker->gate == NULL || !tu_ring_create(worker)) {
        worker_free(worker);
        return NULL;
    }
    return worker;
}

/* Creates UCX's worker, and asks what the rest needs to know of it. */
static ucs_status_t worker_create_ucx(tu_worker_t *worker, const char *name, uint64_t client_id, tu_port_range_t *range)
{
    ucp_worker_params_t params = {
        .field_mask  = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    tu_gate_t *before;
    ucs_status_t status;

    if (name != NULL) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_NAME;
        params.name        = name;
    }
    if (client_id != 0) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_CLIENT_ID;
        params.client_id   = client_id;
    }
    if (ucp_context_query(worker->context->context, &attr) == UCS_OK) {
        worker->memory_types = attr.memory_types;
    }
    tu_keepalive_guard();
    before = tu_gate_enter(worker->gate);
    status = ucp_worker_create(worker->context->context, &params, &worker->worker);
    tu_gate_leave(before);
    range->used_up = tu_gate_ready(worker->gate);
    if (status != UCS_OK) {
        worker->worker = NULL;
        return status;
    }
    status = ucp_worker_get_efd(worker->worker, &worker->efd);
    if (status == UCS_OK && worker->efd < 0) {
        status = UCS_ERR_UNSUPPORTED; /* UCX 1.22 says OK without the WAKEUP feature, and gives no descriptor */
    }
    return status;
}

/* A client id of 0 means none. */
int tu_worker_create(tu_context_t *context, const char *name, uint64_t client_id, tu_port_range_t *range,
                     tu_worker_t **out)
{
    tu_worker_t *worker = worker_allocate(context, range);
    ucs_status_t status;
    int i;

    if (worker == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    status = worker_create_ucx(worker, name, client_id, range);
    for (i = 0; i < TU_EXTENSION_COUNT && status == UCS_OK; i++) {
        status = extensions[i]->open(worker);
    }
    if (status != UCS_OK) {
        if (worker->worker != NULL) {
            ucp_worker_destroy(worker->worker);
        }
        worker_free(worker);
        return status;
    }
    *out = worker;
    return UCS_OK;
}

uint64_t tu_worker_memory_types(tu_worker_t *worker)
{
    return worker->memory_types;
}

int tu_worker_efd(tu_worker_t *worker)
{
    return worker->efd;
}

/* Copies the worker's address to `out` if *size has room for it; *size becomes its length either way. With net_only the
 * address names no shared memory. */
int tu_worker_address(tu_worker_t *worker, bool net_only, char *out, size_t *size)
{
    ucp_worker_attr_t attr = {
        .field_mask    = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS,
        .address_flags = net_only ? UCP_WORKER_ADDRESS_FLAG_NET_ONLY : 0,
    };
    ucs_status_t status    = ucp_worker_query(worker->worker, &attr);

    if (status != UCS_OK) {
        return status;
    }
    if (attr.address_length <= *size) {
        memcpy(out, attr.address, attr.address_length);
    }
    *size = attr.address_length;
    ucp_worker_release_address(worker->worker, attr.address);
    return UCS_OK;
}

char *tu_worker_arena(tu_worker_t *worker)
{
    return worker->arena;
}

/* Collects the tag messages with this bit from now on; those of up to `small` bytes (at most TU_SMALL_MESSAGE) are
 * packed. */
void tu_worker_claim_messages(tu_worker_t *worker, uint64_t tag_bit, size_t small)
{
    worker->claimed_bit = tag_bit;
    worker->small       = small;
}

/* Allocates what is needed to receive a small message. False: there is no memory. */
bool tu_worker_reserve_scratch(tu_worker_t *worker)
{
    if (worker->scratch == NULL) {
        worker->scratch = tu_malloc(TU_LONGEST_BATCH);
    }
    return worker->scratch != NULL && tu_long_reserve(worker);
}

/* Takes up to `max` records, from which adaptive polling learns that something arrived. */
static size_t take_records(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    size_t count = tu_ring_take(worker, out, max);

    if (count > 0) {
        tu_poll_ended(worker);
    }
    return count;
}

/* ---- hooks ---- */

void tu_hook_init(tu_hook_t *hook, unsigned (*function)(tu_hook_t *hook))
{
    tu_list_init(&hook->link);
    hook->function = function;
}

void tu_hook_add(tu_worker_t *worker, tu_hook_t *hook)
{
    if (!tu_list_is_linked(&hook->link)) {
        tu_list_append(&worker->hooks, &hook->link);
    }
}

void tu_hook_remove(tu_hook_t *hook)
{
    tu_list_remove(&hook->link);
}

static unsigned call_hooks(tu_worker_t *worker)
{
    unsigned moved = 0;
    tu_list_t rest; /* hooks that were not called yet; any of them may be removed meanwhile */
    tu_hook_t *hook;

    tu_list_move_all(&worker->hooks, &rest);
    while ((hook = TU_LIST_FIRST(&rest, tu_hook_t, link)) != NULL) {
        tu_list_remove(&hook->link);
        tu_list_append(&worker->hooks, &hook->link);
        moved += hook->function(hook);
    }
    return moved;
}

/* ---- extensions ---- */

bool tu_extensions_in_flight(tu_endpoint_t *endpoint)
{
    int i;

    for (i = 0; i < TU_EXTENSION_COUNT; i++) {
        if (extensions[i]->in_flight != NULL && extensions[i]->in_flight(endpoint)) {
            return true;
        }
    }
    return false;
}

bool tu_extensions_flush(tu_endpoint_t *endpoint, int64_t *verdict)
{
    int i;

    for (i = 0; i < TU_EXTENSION_COUNT; i++) {
        if (extensions[i]->flush != NULL && extensions[i]->flush(endpoint, verdict)) {
            return true;
        }
    }
    return false;
}

void tu_extensions_closing(tu_endpoint_t *endpoint)
{
    int i;

    for (i = TU_EXTENSION_COUNT; i-- > 0;) {
        extensions[i]->endpoint_closing(endpoint);
    }
}

/* ---- progress ---- */

unsigned tu_worker_progress(tu_worker_t *worker)
{
    tu_gate_t *before = tu_gate_enter(worker->gate);
    unsigned moved    = ucp_worker_progress(worker->worker);

    tu_gate_leave(before);
    worker->counts.progress_calls++;
    if (worker->streams) {
        tu_stream_collect(worker); /* now: a later progress may find that a peer has gone, and drop its data */
    }
    if (!tu_list_is_empty(&worker->hooks)) {
        moved += call_hooks(worker);
    }
    worker->moved += moved;
    return moved;
}

/* Makes UCX progress, and collects messages, until nothing moves, or the ring has `enough` records. Returns false if it
 * is `end` before that. */
static bool progress_until_quiet(tu_worker_t *worker, size_t enough, uint64_t end)
{
    uint64_t failed = worker->failed;
    unsigned moved;

    worker->background.slice_end = 0;
    do {
        moved = tu_inbox_progress(worker);
        tu_inbox_collect(worker); /* now, so that UCX does not accumulate a window of messages */
        /* When an operation has failed, its endpoint's failure comes next, and Python should get both at once. */
        if (moved != 0 && tu_now() >= end + (worker->failed != failed ? FAILING : 0)) {
            return false;
        }
    } while (moved != 0 && worker->used < enough && tu_inbox_goes_on(worker));
    return true;
}

/* Makes UCX progress until nothing moves, or for TU_SLICE, or with `once` until something has arrived; collects
 * messages, and takes up to `max` records. Arms only when there are none: *armed is then TU_ARMED (the descriptor will
 * become readable) or TU_BUSY (the worker cannot be armed: call again after a while). TU_MORE means that there is more
 * to do at once. Returns the number of records, or -1 if arming failed. */
int tu_worker_progress_and_arm(tu_worker_t *worker, tu_record_t *out, size_t max, bool arm, bool once, int *armed)
{
    uint64_t end   = tu_now() + TU_SLICE;
    int retries    = BUSY_RETRIES;
    uint64_t steps = worker->background.steps;
    bool in_time;
    size_t count;

    *armed = TU_MORE;
    for (;;) {
        in_time = progress_until_quiet(worker, once ? 1 : max, end);
        if (once) {
            tu_inbox_complete_last(worker);
        }
        count = take_records(worker, out, max);
        if (count > 0 || !arm || !in_time || worker->background.ready > 0 || worker->background.copies > 0 ||
            tu_poll_sequences(worker, steps)) {
            return (int)count;
        }
        if (tu_inbox_lacks_memory(worker)) {
            *armed = TU_BUSY; /* UCX would not wake the worker for messages that it has already */
            return 0;
        }
        switch (ucp_worker_arm(worker->worker)) {
        case UCS_OK:
            *armed = TU_ARMED;
            return 0;
        case UCS_ERR_BUSY:
            worker->counts.arm_busy++;
            if (--retries == 0) {
                *armed = TU_BUSY;
                return 0;
            }
            break;
        default:
            return -1;
        }
    }
}

/* Makes UCX progress once, or while segments of the last message arrive, and takes up to `max` records: for when
 * something is known to have arrived, and time matters. Returns the number of records. */
int tu_worker_look(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    worker->background.slice_end = 0;
    tu_inbox_progress(worker);
    tu_inbox_collect(worker);
    tu_inbox_complete_last(worker);
    return (int)take_records(worker, out, max);
}

/* The same, unless the worker's descriptor is readable: what this takes was not signalled. */
int tu_worker_look_unsignalled(int efd, tu_worker_t *worker, tu_record_t *out, size_t max)
{
    return tu_readable(efd) ? 0 : tu_worker_look(worker, out, max);
}

/* Makes UCX progress for what was just posted, for TU_SLICE at most. Returns whether records are in the ring, where they
 * stay. */
bool tu_worker_submit(tu_worker_t *worker)
{
    progress_until_quiet(worker, 1, tu_now() + TU_SLICE);
    return worker->used > 0;
}

int tu_worker_signal(tu_worker_t *worker)
{
    return ucp_worker_signal(worker->worker);
}

void tu_worker_counts(tu_worker_t *worker, tu_counts_t *out)
{
    *out            = worker->counts;
    out->poll_limit = worker->poll.limit;
    out->strangers  = tu_gate_strangers(worker->gate);
}

/* Returns a number that grows by one with each fragment that progress has sent or received, at least. */
uint64_t tu_worker_moved(const tu_worker_t *worker)
{
    return worker->moved;
}

int64_t tu_worker_flush(tu_worker_t *worker)
{
    tu_post_t post;
    int64_t verdict = tu_post_begin(&post, worker, NULL);

    if (verdict != 0) {
        return verdict;
    }
    return tu_post_end(&post, ucp_worker_flush_nbx(worker->worker, &post.param));
}
