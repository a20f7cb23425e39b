/* Copies between this process's memory and remote memory that it has mapped, or may read. A step copies at most
 * TU_COPIED_AT_ONCE bytes and TU_MOST_RANGES ranges. What the posting call does not finish in TU_SEQUENCE_SLICE goes on
 * with the worker's progress, one step at a time, so that other tasks can run.
 */
#include "rma/transfer.h"

/* Does the next step. Returns UCS_ERR_NO_ELEM if the owner has closed mapped memory, and UCS_ERR_UNREACHABLE if another
 * process does not let us read it, or has closed it: then the cursor stays. */
ucs_status_t tu_copies_step(const tu_access_path_t *path, bool put, const tu_range_t *ranges, size_t count,
                            tu_cursor_t *cursor)
{
    uint64_t end     = cursor->total + TU_COPIED_AT_ONCE;
    tu_cursor_t next = *cursor;
    size_t taken     = 0;
    tu_range_t pieces[TU_MOST_RANGES];

    if (path->local != NULL && !tu_mapped_is_open(path)) {
        return UCS_ERR_NO_ELEM;
    }
    while (taken < TU_MOST_RANGES && next.total < end &&
           tu_cursor_next(&next, ranges, count, end - next.total, &pieces[taken])) {
        if (path->local != NULL) {
            tu_mapped_copy(put, pieces[taken].buffer, path->local + pieces[taken].offset, pieces[taken].length);
        }
        taken++;
    }
    if (path->local == NULL && !tu_direct_read(path, pieces, taken)) {
        return UCS_ERR_UNREACHABLE;
    }
    if (path->local != NULL) {
        tu_mapped_prepare(path, next.total - cursor->total);
    }
    *cursor = next;
    return UCS_OK;
}

/* The owner's process no longer lets us read the memory: messages ask the owner for what is left. It knows why. */
static void ask_the_owner(tu_transfer_t *transfer)
{
    tu_transfers_t *transfers = tu_transfers_of(transfer->endpoint);

    tu_copies_method.end(transfer);
    transfer->state    = TU_TRANSFER_WAITING;
    transfer->method   = &tu_parts_method;
    transfer->path.pid = 0;
    transfers->waiting = tu_order_first(transfers); /* an earlier one may have more parts to begin */
    tu_order_advance(transfer->endpoint);
}

/* Does the next transfer's next step, or its atomic. */
static unsigned step(tu_hook_t *hook)
{
    tu_rma_t *rma           = TU_ITEM(hook, tu_rma_t, copy_hook);
    tu_transfer_t *transfer = TU_LIST_FIRST(&rma->copies, tu_transfer_t, copy_link);
    ucs_status_t status;
    uint64_t old;

    if (transfer->kind == TU_TRANSFER_ATOMIC && tu_mapped_is_open(&transfer->path)) {
        old = tu_mapped_atomic(&transfer->atomic, transfer->path.local + transfer->one.offset, transfer->length);
        tu_transfer_store_integer(transfer->buffer, old, transfer->length);
        tu_transfer_conclude(transfer, UCS_OK);
        return 1;
    }
    status = tu_copies_step(&transfer->path, transfer->kind == TU_TRANSFER_PUT, tu_ranges_of(transfer),
                            transfer->range_count, &transfer->cursor);
    if (status == UCS_ERR_UNREACHABLE) {
        ask_the_owner(transfer);
        return 1;
    }
    if (status != UCS_OK) {
        tu_transfer_conclude(transfer, status);
        return 1;
    }
    if (transfer->progress != NULL) {
        *transfer->progress = transfer->cursor.total;
    }
    if (transfer->cursor.total == transfer->length) {
        tu_transfer_conclude(transfer, UCS_OK);
    } else { /* the next step is another transfer's */
        tu_list_remove(&transfer->copy_link);
        tu_list_append(&rma->copies, &transfer->copy_link);
    }
    return 1;
}

void tu_copies_open(tu_rma_t *rma)
{
    tu_list_init(&rma->copies);
    tu_hook_init(&rma->copy_hook, step);
}

void tu_copies_close(tu_rma_t *rma)
{
    tu_hook_remove(&rma->copy_hook);
}

static void begin(tu_transfer_t *transfer)
{
    tu_rma_t *rma = tu_rma_of(transfer->worker);

    transfer->state = TU_TRANSFER_COPYING;
    tu_list_append(&rma->copies, &transfer->copy_link);
    transfer->worker->background.copies++;
    tu_hook_add(transfer->worker, &rma->copy_hook);
}

static void end(tu_transfer_t *transfer)
{
    tu_rma_t *rma = tu_rma_of(transfer->worker);

    tu_list_remove(&transfer->copy_link);
    transfer->worker->background.copies--;
    if (tu_list_is_empty(&rma->copies)) {
        tu_hook_remove(&rma->copy_hook);
    }
}

const tu_transfer_method_t tu_copies_method = {.begin = begin, .end = end};
