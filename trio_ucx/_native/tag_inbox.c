/* Collects the Connections' tag messages from UCX. Small ones are received at once and packed into the worker's arena;
 * batches are taken apart into packed messages. */
#include <string.h>

#include "little_endian.h"
#include "native.h"

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
    tu_record_t *last = tu_ring_last(worker);

    memcpy(worker->arena + place, data, count * length);
    worker->arena_used += count * length;
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

    if (!tu_ring_make_room(worker, size / TU_RUN_HEAD + 1)) {
        return UCS_ERR_NO_MEMORY;
    }
    while (next < end) {
        if (end - next < TU_RUN_HEAD) {
            return UCS_ERR_INVALID_PARAM;
        }
        lane   = tu_le32_load(next);
        length = tu_le16_load(next + 4);
        count  = tu_le16_load(next + 6);
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
void tu_inbox_collect(tu_worker_t *worker)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;
    ucs_status_t status;
    bool batch;

    if (worker->used == 0) {
        worker->arena_used = 0;
    }
    if (worker->scratch == NULL) {
        worker->scratch = tu_malloc(TU_LONGEST_BATCH);
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

bool tu_inbox_lacks_memory(const tu_worker_t *worker)
{
    return worker->claimed_bit != 0 && worker->scratch == NULL;
}
