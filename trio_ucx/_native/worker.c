/* The worker: its ring of records, and the turn that moves everything. */
#include <string.h>

#include "remote.h"

#define BUSY_RETRIES 4
#define PROGRESS_BUDGET 4096 /* a peer that floods us must not keep us in C for ever */

/* ---- the ring ---- */

static int ring_grow(tu_worker_t *worker)
{
    size_t capacity   = worker->capacity * 2;
    tu_record_t *ring = malloc(capacity * sizeof(*ring));
    size_t i;

    if (ring == NULL) {
        return -1;
    }
    for (i = 0; i < worker->used; i++) {
        ring[i] = worker->ring[(worker->first + i) & (worker->capacity - 1)];
    }
    free(worker->ring);
    worker->ring                 = ring;
    worker->capacity             = capacity;
    worker->first                = 0;
    worker->counts.ring_capacity = capacity;
    return 0;
}

/* Makes sure that every pending operation and open endpoint can append its record, with slack to spare. */
int tu_ring_reserve(tu_worker_t *worker)
{
    while (worker->used + worker->reserved + 1 + TU_RING_SLACK > worker->capacity) {
        if (ring_grow(worker) < 0) {
            return -1;
        }
    }
    worker->reserved++;
    return 0;
}

void tu_ring_unreserve(tu_worker_t *worker)
{
    worker->reserved--;
}

int tu_ring_has_slack(const tu_worker_t *worker)
{
    return worker->used + worker->reserved < worker->capacity;
}

void tu_ring_append(tu_worker_t *worker, uint64_t kind, uint64_t id, ucs_status_t status, uint64_t length,
                    uint64_t tag, uint64_t pointer)
{
    tu_record_t *record = &worker->ring[(worker->first + worker->used) & (worker->capacity - 1)];

    record->kind    = kind;
    record->id      = id;
    record->status  = (uint64_t)(-(int64_t)status);
    record->length  = length;
    record->tag     = tag;
    record->pointer = pointer;
    worker->used++;
    worker->counts.records++;
}

size_t tu_ring_take(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    size_t count = worker->used < max ? worker->used : max;
    size_t i;

    for (i = 0; i < count; i++) {
        out[i] = worker->ring[(worker->first + i) & (worker->capacity - 1)];
    }
    worker->first = (worker->first + count) & (worker->capacity - 1);
    worker->used     -= count;
    worker->collected = 0;
    return count;
}

/* ---- the worker ---- */

/* A client id of 0 is none. */
int tu_worker_create(tu_context_t *context, const char *name, uint64_t client_id, tu_worker_t **out)
{
    ucp_worker_params_t params = {
        .field_mask  = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    tu_worker_t *worker     = calloc(1, sizeof(*worker));
    ucs_status_t status;

    if (worker == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    if (name != NULL) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_NAME;
        params.name        = name;
    }
    if (client_id != 0) {
        params.field_mask |= UCP_WORKER_PARAM_FIELD_CLIENT_ID;
        params.client_id   = client_id;
    }
    worker->context              = context;
    worker->streams              = (context->features & UCP_FEATURE_STREAM) != 0;
    worker->knows_user_data      = tu_ucx_has(1, 18);
    worker->loses_info           = !tu_ucx_has(1, 17);
    worker->chains.last          = &worker->chains.queue;
    worker->copies.last          = &worker->copies.first;
    worker->capacity             = 2 * TU_RING_SLACK;
    worker->counts.ring_capacity = worker->capacity;
    worker->ring                 = malloc(worker->capacity * sizeof(*worker->ring));
    if (worker->ring == NULL) {
        free(worker);
        return UCS_ERR_NO_MEMORY;
    }
    if (ucp_context_query(context->context, &attr) == UCS_OK) {
        worker->memory_types = attr.memory_types;
    }
    status = ucp_worker_create(context->context, &params, &worker->worker);
    if (status == UCS_OK) {
        status = ucp_worker_get_efd(worker->worker, &worker->efd);
        if (status == UCS_OK && worker->efd < 0) {
            status = UCS_ERR_UNSUPPORTED; /* UCX 1.22 says OK without the WAKEUP feature, and gives no descriptor */
        }
        if (status == UCS_OK && (context->features & UCP_FEATURE_RMA) && (context->features & UCP_FEATURE_AM)) {
            status = tu_remote_handle(worker);
        }
        if (status != UCS_OK) {
            ucp_worker_destroy(worker->worker);
        }
    }
    if (status != UCS_OK) {
        free(worker->ring);
        free(worker);
        return status;
    }
    *out = worker;
    return UCS_OK;
}

void tu_worker_destroy(tu_worker_t *worker)
{
    tu_endpoint_t *endpoint;

    ucp_worker_destroy(worker->worker);
    tu_operations_free(worker);
    tu_transfers_free(worker);
    tu_services_free(worker);
    while (worker->chains.all != NULL) {
        tu_chain_destroy(worker->chains.all);
    }
    while ((endpoint = worker->closed) != NULL) {
        worker->closed = endpoint->next;
        free(endpoint);
    }
    free(worker->ring);
    free(worker->scratch);
    free(worker);
}

uint64_t tu_worker_memory_types(tu_worker_t *worker)
{
    return worker->memory_types;
}

int tu_worker_efd(tu_worker_t *worker)
{
    return worker->efd;
}

/* Copies the worker's address to out when *size has room for it; *size becomes its length either way. With net_only it
 * names no shared memory. */
int tu_worker_address(tu_worker_t *worker, int net_only, char *out, size_t *size)
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

/* Those of up to `small` bytes, at most TU_SMALL_MESSAGE, are received at once. */
void tu_worker_claim_messages(tu_worker_t *worker, uint64_t tag_bit, size_t small)
{
    worker->claimed_bit = tag_bit;
    worker->small       = small;
}

/* ---- the Connections' messages ---- */

static void scratch_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *scratch)
{
    (void)status;
    (void)info;
    free(scratch);
    ucp_request_free(request);
}

/* Receives a small message that has arrived into the worker's scratch memory. Returns a ucs_status_t. */
static ucs_status_t receive_to_scratch(tu_worker_t *worker, ucp_tag_message_h message, size_t length)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.recv     = scratch_received,
        .datatype    = ucp_dt_make_contig(1),
        .memory_type = UCS_MEMORY_TYPE_HOST,
        .user_data   = worker->scratch,
    };
    ucs_status_ptr_t answer = ucp_tag_msg_recv_nbx(worker->worker, worker->scratch, length, message, &param);

    if (UCS_PTR_IS_PTR(answer)) {
        /* A peer that sends a small message by rendezvous, against what it said when it connected: UCX keeps the memory. */
        worker->scratch = NULL;
        return UCS_ERR_INVALID_PARAM;
    }
    return UCS_PTR_RAW_STATUS(answer);
}

/* Adds messages of one kind to the arena: to the run that the last record is about, or with a new one. */
static void add_run(tu_worker_t *worker, uint64_t tag, size_t length, size_t count, const char *data)
{
    size_t place      = worker->arena_used;
    tu_record_t *last = NULL;

    memcpy(worker->arena + place, data, count * length);
    worker->arena_used += count * length;
    if (worker->used > 0) {
        last = &worker->ring[(worker->first + worker->used - 1) & (worker->capacity - 1)];
    }
    if (last != NULL && last->kind == TU_RECORD_RUN && last->tag == tag && last->length == length && last->id > 0 &&
        last->pointer + last->id * length == place) {
        last->id += count;
    } else {
        tu_ring_append(worker, TU_RECORD_RUN, count, UCS_OK, length, tag, place);
    }
}

/* Adds the runs of a batch that was received into the scratch memory. Returns a ucs_status_t; a batch that is malformed
 * is one up to there. */
static ucs_status_t add_batch(tu_worker_t *worker, uint64_t tag, size_t size)
{
    const char *next = worker->scratch;
    const char *end  = next + size;
    uint16_t length, count;
    uint32_t lane;

    while (worker->used + worker->reserved + size / TU_RUN_HEAD >= worker->capacity) {
        if (ring_grow(worker) < 0) {
            return UCS_ERR_NO_MEMORY;
        }
    }
    while (next < end) {
        if (end - next < TU_RUN_HEAD) {
            return UCS_ERR_INVALID_PARAM;
        }
        memcpy(&lane, next, 4);
        memcpy(&length, next + 4, 2);
        memcpy(&count, next + 6, 2);
        next += TU_RUN_HEAD;
        if (count == 0 || (size_t)count * length > (size_t)(end - next)) {
            return UCS_ERR_INVALID_PARAM;
        }
        add_run(worker, (tag & ~(uint64_t)UINT32_MAX) | lane, length, count, next);
        next += (size_t)count * length;
    }
    return UCS_OK;
}

/* Takes raw tag messages off UCX's unexpected queue, which has no limit, until the program first asks for such. The
 * first ones are kept; the others go to Python, which drops them. */
static void collect_raw(tu_worker_t *worker)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;

    while (worker->used + worker->reserved < worker->capacity && worker->collected < TU_BATCH_BYTES) {
        message = ucp_tag_probe_nb(worker->worker, 0, worker->claimed_bit, 1, &info);
        if (message == NULL) {
            return;
        }
        if (worker->kept_count < TU_RAW_KEPT && info.length <= TU_RAW_BYTES - worker->kept_bytes) {
            worker->kept[worker->kept_count++] = (tu_kept_t){message, info.sender_tag, info.length};
            worker->kept_bytes += info.length;
        } else {
            tu_ring_append(worker, TU_RECORD_MESSAGE, 0, UCS_OK, info.length, info.sender_tag,
                           (uint64_t)(uintptr_t)message);
            worker->collected += info.length > TU_BUFFER ? info.length : TU_BUFFER;
        }
    }
}

/* Takes the Connections' messages off UCX's unexpected queue, so that nobody has to ask for each lane. Those that find
 * no room stay there until Python has taken what is in the ring. */
void tu_worker_collect(tu_worker_t *worker)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;
    ucs_status_t status;
    int batch;

    if (worker->used == 0) {
        worker->arena_used = 0;
    }
    if (worker->scratch == NULL) {
        worker->scratch = malloc(TU_LONGEST_BATCH);
    }
    while (worker->claimed_bit != 0 && worker->scratch != NULL &&
           worker->used + worker->reserved < worker->capacity &&
           worker->arena_used + TU_LONGEST_BATCH <= sizeof(worker->arena)) {
        message = ucp_tag_probe_nb(worker->worker, worker->claimed_bit, worker->claimed_bit, 1, &info);
        if (message == NULL) {
            if (!worker->raw_used) {
                collect_raw(worker);
            }
            return;
        }
        batch = (uint32_t)info.sender_tag == TU_BATCH_LANE && info.length <= TU_LONGEST_BATCH;
        if (!batch && info.length > worker->small) {
            tu_ring_append(worker, TU_RECORD_MESSAGE, 0, UCS_OK, info.length, info.sender_tag,
                           (uint64_t)(uintptr_t)message);
            worker->collected += info.length > TU_BUFFER ? info.length : TU_BUFFER;
            continue;
        }
        status = receive_to_scratch(worker, message, info.length);
        if (status == UCS_OK && batch) {
            status = add_batch(worker, info.sender_tag, info.length);
        } else if (status == UCS_OK) {
            add_run(worker, info.sender_tag, info.length, 1, worker->scratch);
        }
        if (status != UCS_OK) {
            tu_ring_append(worker, TU_RECORD_RUN, 0, status, info.length, info.sender_tag, 0);
        }
        if (worker->scratch == NULL) {
            return; /* another with the next turn */
        }
    }
}

/* Takes up to `max` records; polling learns from it that something came. */
static size_t take_records(tu_worker_t *worker, uint64_t *out, size_t max)
{
    size_t count = tu_ring_take(worker, (tu_record_t *)out, max);

    if (count > 0) {
        tu_poll_ended(worker);
    }
    return count;
}

unsigned tu_worker_progress(tu_worker_t *worker)
{
    unsigned moved = ucp_worker_progress(worker->worker);

    worker->counts.progress_calls++;
    if (worker->streams) {
        tu_stream_collect(worker); /* before the next progress can find that a peer has gone */
    }
    if (worker->copies.first != NULL) {
        moved += tu_transfers_copy(worker);
    }
    if (worker->chains.active != NULL) {
        moved += tu_chains_progress(worker);
    }
    if (worker->unused && tu_ring_has_slack(worker)) {
        worker->unused = 0;
        tu_ring_append(worker, TU_RECORD_UNUSED, 0, UCS_OK, 0, 0, 0);
    }
    return moved;
}

/* Progresses until nothing moves, collects messages, and takes up to `max` records. Only with none left to take does
 * it arm: *armed is then TU_ARMED (the efd will become readable) or TU_BUSY (UCX cannot say when it can go on: back
 * off). TU_MORE: there is more to do at once. Returns the number of records. */
int tu_worker_turn(tu_worker_t *worker, uint64_t *out, size_t max, int arm, int *armed)
{
    int budget  = PROGRESS_BUDGET;
    int retries = BUSY_RETRIES;
    uint64_t requests = worker->counts.chain_requests;
    unsigned moved;
    size_t count;

    *armed               = TU_MORE;
    worker->chains.until = 0;
    for (;;) {
        do {
            moved = tu_worker_progress(worker);
            tu_worker_collect(worker); /* now, so that UCX does not hold a window's worth of messages for us */
        } while (moved != 0 && --budget > 0 && worker->used < max && worker->collected < TU_BATCH_BYTES &&
                 worker->copies.first == NULL); /* one copy is enough for a turn */
        count = take_records(worker, out, max);
        if (count > 0 || !arm || budget <= 0 || worker->chains.queue != NULL || worker->copies.first != NULL ||
            tu_poll_chains(worker, requests)) {
            return (int)count;
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

/* Progresses, once, and takes what that brought: for when something is known to have come, and time matters. */
int tu_worker_look(tu_worker_t *worker, uint64_t *out, size_t max)
{
    worker->chains.until = 0;
    tu_worker_progress(worker);
    tu_worker_collect(worker);
    return (int)take_records(worker, out, max);
}

int tu_worker_signal(tu_worker_t *worker)
{
    return ucp_worker_signal(worker->worker);
}

void tu_worker_counts(tu_worker_t *worker, tu_counts_t *out)
{
    *out            = worker->counts;
    out->poll_limit = worker->poll.limit;
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
