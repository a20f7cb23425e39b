/* Transfers that one message (or one call of UCX's put and get) cannot do, because they are long, or of several ranges.
 * Each message is a *part*, a transfer of its own, of the *whole*. A part is made when the window has room for it: at
 * most TU_REMOTE_WINDOW of them exist. It stands before its whole in the endpoint's list; the whole leaves the list
 * after its last part.
 */
#include <string.h>

#include "rma/transfer.h"

#define GATHERED (64 * 1024)   /* bytes of data of several ranges in one message, at most */
#define SMALLEST_PIECE 1024    /* a message with less room than that is full */

static bool has_begun_all(const tu_transfer_t *whole)
{
    return whole->status != UCS_OK || whole->cursor.total == whole->length;
}

static void update_progress(const tu_transfer_t *whole)
{
    const tu_transfer_t *first = TU_LIST_FIRST(&whole->parts, tu_transfer_t, part_link);
    uint64_t done              = first == NULL ? whole->cursor.total : first->position;

    if (whole->progress != NULL) {
        *whole->progress = done < whole->failed_at ? done : whole->failed_at;
    }
}

static void end_if_done(tu_transfer_t *whole)
{
    if (!whole->held && has_begun_all(whole) && tu_list_is_empty(&whole->parts)) {
        tu_transfer_conclude(whole, whole->status);
    }
}

/* No further part begins. */
static void stop(tu_transfer_t *whole, ucs_status_t status)
{
    tu_transfers_t *transfers = whole->endpoint == NULL ? NULL : tu_transfers_of(whole->endpoint);

    if (whole->status == UCS_OK) {
        whole->status = status;
    }
    if (transfers != NULL && transfers->waiting == whole) {
        transfers->waiting = TU_LIST_NEXT(&transfers->list, whole, link);
    }
}

static void part_done(void *owner, ucs_status_t status)
{
    tu_transfer_t *part  = owner;
    tu_transfer_t *whole = part->whole;

    tu_list_remove(&part->part_link);
    if (status != UCS_OK) {
        whole->failed_at = part->position < whole->failed_at ? part->position : whole->failed_at;
        stop(whole, status);
    }
    update_progress(whole);
    end_if_done(whole);
}

/* Takes the next range, of at most `most` bytes, from the whole. Returns false if none is left. */
static bool take_range(tu_transfer_t *whole, uint64_t most, tu_range_t *piece)
{
    return tu_cursor_next(&whole->cursor, tu_ranges_of(whole), whole->range_count, most, piece);
}

/* Returns what is left of the room in a message after a range of `length` bytes, which a put describes in the data. */
static uint64_t room_after(const tu_transfer_t *whole, uint64_t room, uint64_t length)
{
    uint64_t used = length + (whole->kind == TU_TRANSFER_PUT ? sizeof(tu_remote_range_t) : 0);

    return used < room ? room - used : 0;
}

/* Takes ranges until the message is full. The last one may be cut. Returns how many. */
static size_t take_cut(tu_transfer_t *whole, tu_range_t *pieces)
{
    uint64_t room = whole->path.part;
    size_t count  = 0;

    while (count < TU_MOST_RANGES && (count == 0 || room >= SMALLEST_PIECE) &&
           take_range(whole, room, &pieces[count])) {
        room = room_after(whole, room, pieces[count].length);
        count++;
    }
    return count;
}

/* Takes whole ranges while they fit into GATHERED bytes, at least one; cuts one that is longer than TU_LONGEST_PART.
 * Returns how many. */
static size_t take_whole(tu_transfer_t *whole, tu_range_t *pieces)
{
    uint64_t room = GATHERED;
    size_t count  = 0;

    while (count < TU_MOST_RANGES && (count == 0 || room >= SMALLEST_PIECE)) {
        tu_cursor_t before = whole->cursor;

        if (!take_range(whole, TU_LONGEST_PART, &pieces[count])) {
            break;
        }
        if (count > 0 && pieces[count].length > room) {
            whole->cursor = before;
            break;
        }
        room = room_after(whole, room, pieces[count].length);
        count++;
    }
    return count;
}

/* Takes the ranges of the next part from the whole: as many as go into one message. Returns how many; 0: none is
 * left. */
static size_t take(tu_transfer_t *whole, tu_range_t *pieces)
{
    if (whole->memory > TU_MEMORY_HOST || !whole->path.messages) {
        return take_range(whole, UINT64_MAX, pieces) ? 1 : 0;
    }
    return whole->path.part > 0 ? take_cut(whole, pieces) : take_whole(whole, pieces);
}

/* Gives a part its ranges. Returns false if there is no memory. */
static bool set_ranges(tu_transfer_t *part, const tu_range_t *pieces, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++) {
        part->length += pieces[i].length;
    }
    part->one         = pieces[0];
    part->buffer      = pieces[0].buffer;
    part->offset      = pieces[0].offset;
    part->range_count = count;
    if (count == 1) {
        return true;
    }
    part->many = tu_calloc(count, sizeof(*part->many));
    if (part->many == NULL) {
        return false;
    }
    memcpy(part->many, pieces, count * sizeof(*pieces));
    return tu_gathered_prepare(part);
}

static void no_memory(tu_transfer_t *whole, uint64_t position)
{
    whole->failed_at = position < whole->failed_at ? position : whole->failed_at;
    stop(whole, UCS_ERR_NO_MEMORY);
    end_if_done(whole);
}

/* Begins the next part. The whole is the next transfer again if there are more. */
static void begin(tu_transfer_t *whole)
{
    tu_range_t pieces[TU_MOST_RANGES];
    tu_transfers_t *transfers = tu_transfers_of(whole->endpoint);
    uint64_t position         = whole->cursor.total;
    size_t count              = whole->status == UCS_OK ? take(whole, pieces) : 0;
    tu_transfer_t *part;

    if (count == 0) {
        return;
    }
    part = tu_order_allocate(whole->worker, whole->kind, part_done, NULL);
    if (part == NULL) {
        no_memory(whole, position);
        return;
    }
    if (!set_ranges(part, pieces, count)) {
        tu_order_dispose(part);
        no_memory(whole, position);
        return;
    }
    part->owner    = part;
    part->whole    = whole;
    part->position = position;
    part->late     = whole->late;
    part->memory   = whole->memory;
    part->scope    = whole->scope;
    part->path     = whole->path;
    part->method   = whole->path.messages ? &tu_requester_method : &tu_ucx_method;
    tu_requester_prepare(part);
    part->endpoint = whole->endpoint;
    tu_list_append(&whole->link, &part->link); /* in front of the whole */
    tu_list_append(&whole->parts, &part->part_link);
    if (!has_begun_all(whole)) {
        transfers->waiting = whole;
    }
    whole->held = true;
    part->method->begin(part);
    whole->held = false;
    end_if_done(whole);
}

/* The peer has the requests of the parts that have begun: their answers end them. */
void tu_parts_cancel(tu_transfer_t *whole)
{
    stop(whole, UCS_ERR_CANCELED);
    end_if_done(whole);
}

const tu_transfer_method_t tu_parts_method = {.sends = true, .begin = begin};
