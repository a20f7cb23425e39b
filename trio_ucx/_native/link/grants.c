/* What is granted to the peer, and the control frames about credit.
 *
 * All tag queues share the window. A peer that lacks credit says so (STALLED); a receive that waits at an empty queue
 * then admits its next message (ADMIT). */
#include "../little_endian.h"
#include "link.h"

bool tu_queue_has_ended(const tu_link_t *link, uint32_t number, const tu_queue_t *queue)
{
    return link->receives_end || (link->drains && (number < TU_CONTROL_QUEUE || number == TU_STREAM_QUEUE)) ||
           (queue != NULL && (queue->receives_end || queue->drops));
}

/* Grants what was read. Returns false if that is nothing. */
static bool grant(tu_link_t *link)
{
    int64_t amount = link->outstanding - link->unread;
    char frame[17] = {TU_FRAME_GRANT};

    if (amount < 1) {
        return false;
    }
    link->outstanding -= amount;
    link->admitted    -= link->admitted < amount ? link->admitted : amount;
    link->grants_sent++;
    link->stalled = false; /* a peer that still is will say so */
    tu_le64_store(frame + 1, (uint64_t)amount);
    tu_le64_store(frame + 9, link->received);
    tu_link_send_frame(link, frame, sizeof(frame), false);
    return true;
}

void tu_grant_if_due(tu_link_t *link)
{
    int64_t worthwhile = link->terms.window < 4 ? 1 : (int64_t)(link->terms.window / 4);

    if (link->outstanding - link->unread >= worthwhile || (link->stalled && link->unread == 0)) {
        grant(link);
    }
}

void tu_found_empty(tu_link_t *link, tu_queue_t *queue)
{
    char frame[13] = {TU_FRAME_ADMIT};

    if (!link->stalled) {
        return;
    }
    grant(link);
    if (!queue->admitted_by_us && link->admissions < TU_MOST_ADMISSIONS) {
        queue->admitted_by_us = true;
        link->admissions++;
        tu_le32_store(frame + 1, queue->number);
        tu_le64_store(frame + 5, link->received);
        tu_link_send_frame(link, frame, sizeof(frame), false);
    }
}

void tu_report_dropped(tu_link_t *link, const tu_queue_t *queue, size_t length)
{
    char frame[13] = {TU_FRAME_DROPPED};

    link->links->length = length;
    tu_le32_store(frame + 1, queue->number);
    tu_le64_store(frame + 5, length);
    tu_link_send_frame(link, frame, sizeof(frame), false);
}

static ucs_status_t grant_arrived(tu_link_t *link, uint64_t amount, uint64_t received)
{
    if (amount == 0 || amount > (uint64_t)link->charged || received > link->sent || received < link->arrived_there) {
        return UCS_ERR_INVALID_PARAM;
    }
    link->charged      -= (int64_t)amount;
    link->credit       += (int64_t)amount;
    link->arrived_there = received;
    link->grants++;
    tu_sends_wake(link);
    tu_queues_sweep(link);
    return UCS_OK;
}

static void stalled_arrived(tu_link_t *link, uint64_t grants)
{
    tu_list_t *end = link->awaited.previous, *next;
    tu_queue_t *queue;

    if (grants != link->grants_sent || grant(link) || link->stalled) {
        return; /* a grant is on its way, or that is known */
    }
    link->stalled = true;
    if (tu_list_is_empty(&link->awaited)) {
        return;
    }
    for (next = link->awaited.next;; next = next->next) {
        queue = TU_ITEM(next, tu_queue_t, awaited);
        if (!tu_queue_has_ended(link, queue->number, queue)) {
            tu_found_empty(link, queue);
        }
        if (next == end) {
            return;
        }
    }
}

static ucs_status_t admit_arrived(tu_link_t *link, uint32_t written, uint64_t received)
{
    uint32_t number = tu_queue_other(written);
    tu_queue_t *queue;

    if (!tu_queue_is_valid(written) || received > link->sent || received < link->arrived_there) {
        return UCS_ERR_INVALID_PARAM;
    }
    queue = tu_queue_find(link, number);
    if (queue == NULL && number > written) {
        return UCS_OK; /* a conversation that was opened here, and is over */
    }
    if (queue == NULL && (queue = tu_queue_make(link, number)) == NULL) {
        tu_link_broke(link, UCS_ERR_NO_MEMORY);
        return UCS_OK;
    }
    link->arrived_there = received;
    if (queue->last_sent <= received && !queue->admitted_by_peer) {
        if (link->admissions_of_peer == TU_MOST_ADMISSIONS) {
            return UCS_ERR_INVALID_PARAM;
        }
        queue->admitted_by_peer = true;
        link->admissions_of_peer++;
        tu_sends_admitted(link, queue);
    }
    return UCS_OK;
}

int tu_frame_arrived(tu_link_t *link, const char *data, size_t length)
{
    if (length == 17 && data[0] == TU_FRAME_GRANT) {
        return grant_arrived(link, tu_le64_load(data + 1), tu_le64_load(data + 9));
    }
    if (length == 9 && data[0] == TU_FRAME_STALLED) {
        stalled_arrived(link, tu_le64_load(data + 1));
        return 0;
    }
    if (length == 13 && data[0] == TU_FRAME_ADMIT) {
        return admit_arrived(link, tu_le32_load(data + 1), tu_le64_load(data + 5));
    }
    return 1;
}
