/* Collects the Connections' tag messages: takes them off UCX's queue of unexpected messages, and appends their records.
 *
 * Small messages are received at once, and packed: neighbours with the same tag and length are one record, and lie one
 * after the other in the worker's arena. A batch is taken apart into packed messages.
 *
 * UCX gives a small message at once if it came in one piece. Over UD it may come in several, of a packet each, and a peer
 * with a low threshold sends it by rendezvous: such messages are left to Python. */
#include <string.h>

#include "little_endian.h"
#include "native.h"

char *tu_worker_arena(tu_worker_t *worker)
{
    return worker->arena;
}

/* Collects the tag messages with this bit from now on. */
void tu_worker_claim_messages(tu_worker_t *worker, uint64_t tag_bit)
{
    worker->claimed_bit = tag_bit;
}

/* Allocates what is needed to receive a small message. False: there is no memory. */
bool tu_worker_reserve_scratch(tu_worker_t *worker)
{
    if (worker->scratch == NULL) {
        worker->scratch = tu_malloc(TU_LONGEST_BATCH);
    }
    return worker->scratch != NULL && tu_long_reserve(worker);
}

/* Receives a message into the worker's scratch memory. UCS_ERR_NO_RESOURCE: it is still UCX's, because it does not come in
 * one piece. */
static ucs_status_t receive_to_scratch(tu_worker_t *worker, ucp_tag_message_h message, size_t length)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL | UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .datatype     = ucp_dt_make_contig(1),
        .memory_type  = UCS_MEMORY_TYPE_HOST,
    };

    return UCS_PTR_RAW_STATUS(ucp_tag_msg_recv_nbx(worker->worker, worker->scratch, length, message, &param));
}

/* Leaves a message to Python. */
static void leave(tu_worker_t *worker, ucp_tag_message_h message, const ucp_tag_recv_info_t *info)
{
    tu_ring_append(worker, TU_RECORD_MESSAGE, 0, UCS_OK, info->length, info->sender_tag, (uint64_t)(uintptr_t)message);
    worker->collected += info->length > TU_BUFFER ? info->length : TU_BUFFER;
}

/* Adds messages with the same tag and length to the arena. They become part of the last record if they continue it.
 * Control frames do not: each is a record of its own. */
static void pack(tu_worker_t *worker, uint64_t tag, size_t length, size_t count, const char *data)
{
    size_t offset     = worker->arena_used;
    tu_record_t *last = tu_ring_last(worker);

    memcpy(worker->arena + offset, data, count * length);
    worker->arena_used += count * length;
    if (last != NULL && last->kind == TU_RECORD_PACKED && last->tag == tag && last->length == length && last->id > 0 &&
        last->pointer + last->id * length == offset && (uint32_t)tag != TU_CONTROL_QUEUE) {
        last->id += count;
    } else {
        tu_ring_append(worker, TU_RECORD_PACKED, count, UCS_OK, length, tag, offset);
    }
}

/* Packs the messages of a batch that was received into the scratch memory. The groups before a malformed one count. */
static ucs_status_t unpack_batch(tu_worker_t *worker, uint64_t tag, size_t size)
{
    const char *next = worker->scratch;
    const char *end  = next + size;
    uint16_t length, count;
    uint32_t queue;

    if (!tu_ring_make_room(worker, size / TU_GROUP_HEAD + 1)) {
        return UCS_ERR_NO_MEMORY;
    }
    while (next < end) {
        if (end - next < TU_GROUP_HEAD) {
            return UCS_ERR_INVALID_PARAM;
        }
        queue  = tu_le32_load(next);
        length = tu_le16_load(next + 4);
        count  = tu_le16_load(next + 6);
        next += TU_GROUP_HEAD;
        if (count == 0 || (size_t)count * length > (size_t)(end - next) || (queue == TU_CONTROL_QUEUE && count > 1)) {
            return UCS_ERR_INVALID_PARAM;
        }
        pack(worker, (tag & ~(uint64_t)UINT32_MAX) | queue, length, count, next);
        next += (size_t)count * length;
    }
    return UCS_OK;
}

static bool has_room(const tu_worker_t *worker)
{
    return tu_ring_has_slack(worker) && worker->arena_used + TU_LONGEST_BATCH <= sizeof(worker->arena);
}

/* Makes UCX progress; not while it has messages for which there was no room. Otherwise a peer that sends small messages
 * faster than Python takes them could fill UCX's queue, which has no limit, and all others would wait behind them. */
unsigned tu_inbox_progress(tu_worker_t *worker)
{
    return worker->behind ? 1 : tu_worker_progress(worker);
}

/* Takes the messages of all tag queues, so that no receive has to probe for its own. Those that find no room stay with
 * UCX until Python has taken what is in the ring. */
void tu_inbox_collect(tu_worker_t *worker)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;
    ucs_status_t status;
    bool batch, announcement;

    if (worker->used == 0) {
        worker->arena_used = 0;
    }
    worker->behind = false;
    while (worker->claimed_bit != 0 && tu_worker_reserve_scratch(worker)) {
        if (!has_room(worker)) {
            worker->behind = true;
            return;
        }
        message = ucp_tag_probe_nb(worker->worker, worker->claimed_bit, worker->claimed_bit, 1, &info);
        if (message == NULL) {
            return;
        }
        if ((info.sender_tag & TU_PIECE_QUEUES) == TU_PIECE_QUEUES) {
            tu_long_piece_arrived(worker, message, info.sender_tag, info.length);
            continue;
        }
        worker->others++;
        batch        = (uint32_t)info.sender_tag == TU_BATCH_QUEUE && info.length <= TU_LONGEST_BATCH;
        announcement = (uint32_t)info.sender_tag == TU_LONG_QUEUE && info.length == TU_LONG_HEAD;
        if (!batch && info.length > TU_SMALL_MESSAGE) {
            leave(worker, message, &info);
            continue;
        }
        status = receive_to_scratch(worker, message, info.length);
        if (status == UCS_ERR_NO_RESOURCE && !batch && !announcement && (uint32_t)info.sender_tag != TU_CONTROL_QUEUE) {
            leave(worker, message, &info);
            continue;
        }
        if (status == UCS_ERR_NO_RESOURCE) { /* the peer breaks the protocol: later messages must not overtake it */
            tu_message_throw_away(worker, message);
        }
        if (status == UCS_OK && batch) {
            status = unpack_batch(worker, info.sender_tag, info.length);
        } else if (status == UCS_OK && announcement) {
            status = tu_long_announced(worker, info.sender_tag, worker->scratch);
        } else if (status == UCS_OK) {
            pack(worker, info.sender_tag, info.length, 1, worker->scratch);
        }
        if (status != UCS_OK) {
            tu_ring_append(worker, TU_RECORD_PACKED, 0, status, info.length, info.sender_tag, 0);
        }
    }
}

bool tu_inbox_goes_on(const tu_worker_t *worker)
{
    return !worker->behind && worker->collected < TU_BATCH_BYTES && worker->background.copies == 0;
}

/* If the last record is of a message that UCX has (no rendezvous), makes UCX progress until nothing moves, for TU_SLICE
 * at most: more segments of it may be there. Then its receive completes at once, and Python hears of it once. */
void tu_inbox_complete_last(tu_worker_t *worker)
{
    uint64_t end = tu_now() + TU_SLICE;
    const tu_record_t *last;

    while ((last = tu_ring_last(worker)) != NULL && last->kind == TU_RECORD_MESSAGE &&
           last->length < TU_LONGEST_THRESHOLD && tu_inbox_goes_on(worker) && tu_inbox_progress(worker) != 0 &&
           tu_now() < end) {
        tu_inbox_collect(worker);
    }
}

bool tu_inbox_lacks_memory(const tu_worker_t *worker)
{
    return worker->claimed_bit != 0 && (worker->scratch == NULL || worker->long_spare == NULL);
}
