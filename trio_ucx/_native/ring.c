/* The ring of records, by which UCX's callbacks tell Python what happened. native.h says who reserves room in it. */
#include <assert.h>
#include <stdio.h>

#include "native.h"

bool tu_ring_create(tu_worker_t *worker)
{
    worker->capacity             = 2 * TU_RING_SLACK;
    worker->counts.ring_capacity = worker->capacity;
    worker->ring                 = tu_malloc(worker->capacity * sizeof(*worker->ring));
    return worker->ring != NULL;
}

static bool ring_grow(tu_worker_t *worker)
{
    size_t capacity   = worker->capacity * 2;
    tu_record_t *ring = tu_malloc(capacity * sizeof(*ring));
    size_t i;

    if (ring == NULL) {
        return false;
    }
    for (i = 0; i < worker->used; i++) {
        ring[i] = worker->ring[(worker->first + i) & (worker->capacity - 1)];
    }
    free(worker->ring);
    worker->ring                 = ring;
    worker->capacity             = capacity;
    worker->first                = 0;
    worker->counts.ring_capacity = capacity;
    return true;
}

bool tu_ring_reserve(tu_worker_t *worker)
{
    while (worker->used + worker->reserved + 1 + TU_RING_SLACK > worker->capacity) {
        if (!ring_grow(worker)) {
            return false;
        }
    }
    worker->reserved++;
    return true;
}

void tu_ring_unreserve(tu_worker_t *worker)
{
    assert(worker->reserved > 0);
    worker->reserved--;
}

bool tu_ring_find_room(tu_worker_t *worker)
{
    if (tu_ring_reserve(worker)) {
        tu_ring_unreserve(worker);
        return true;
    }
    return tu_ring_has_slack(worker);
}

bool tu_ring_make_room(tu_worker_t *worker, size_t count)
{
    while (worker->used + worker->reserved + count > worker->capacity) {
        if (!ring_grow(worker)) {
            return false;
        }
    }
    return true;
}

tu_record_t *tu_ring_last(tu_worker_t *worker)
{
    return worker->used > 0 ? &worker->ring[(worker->first + worker->used - 1) & (worker->capacity - 1)] : NULL;
}

bool tu_ring_has_slack(const tu_worker_t *worker)
{
    return worker->used + worker->reserved < worker->capacity;
}

/* Makes room for a record that comes without a reservation, so that it is not lost, and overwrites no other one. */
static void rescue_full_ring(tu_worker_t *worker)
{
    if (!ring_grow(worker)) {
        fprintf(stderr, "trio_ucx: the ring of records is full (%zu records), and there is no memory to let it grow\n",
                worker->capacity);
        abort();
    }
}

void tu_ring_append(tu_worker_t *worker, uint64_t kind, uint64_t id, ucs_status_t status, uint64_t length,
                    uint64_t tag, uint64_t pointer)
{
    tu_record_t *record;

    assert(worker->used + worker->reserved < worker->capacity && "nothing was reserved for this record");
    if (__builtin_expect(worker->used == worker->capacity, false)) {
        rescue_full_ring(worker);
    }
    record          = &worker->ring[(worker->first + worker->used) & (worker->capacity - 1)];
    record->kind    = kind;
    record->id      = id;
    record->status  = (uint64_t)(-(int64_t)status);
    record->length  = length;
    record->tag     = tag;
    record->pointer = pointer;
    worker->used++;
    worker->counts.records++;
}

static tu_record_t *first(tu_worker_t *worker)
{
    return &worker->ring[worker->first];
}

static void remove_first(tu_worker_t *worker)
{
    worker->first = (worker->first + 1) & (worker->capacity - 1);
    worker->used--;
}

/* Lets worker->take have the messages at the front, and returns their number. No later ones: what is left to Python comes
 * in order. */
static size_t take_messages(tu_worker_t *worker)
{
    size_t messages = 0;
    const tu_record_t *record;

    while (worker->take != NULL && worker->used > 0) {
        record = first(worker);
        if (record->kind != TU_RECORD_PACKED || record->id == 0 ||
            !worker->take(worker->taker, record->tag, record->length, record->id, worker->arena + record->pointer)) {
            break;
        }
        messages += record->id;
        remove_first(worker);
    }
    return messages;
}

size_t tu_ring_take(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    size_t messages = take_messages(worker);
    size_t count    = 0;

    if (messages > 0) {
        out[count++] = (tu_record_t){.kind = TU_RECORD_TAKEN, .id = messages};
    }
    for (; count < max && worker->used > 0; remove_first(worker)) {
        out[count++] = *first(worker);
    }
    worker->collected = 0;
    return count;
}
