/* Makes a worker progress until nothing moves, hands its records to Python, and arms it: ucp/_engine/listening.py
 * says when. */
#include "native.h"

#define BUSY_RETRIES 4
#define FAILING 1000000 /* nanoseconds in which the failure of an endpoint follows that of its operations */

/* Takes up to `max` records, and tells adaptive polling if there were any. */
static size_t take_records(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    size_t count = tu_ring_take(worker, out, max);

    if (count > 0) {
        tu_poll_ended(worker);
    }
    return count;
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

/* Sequences and copies of ours have nothing to do. */
static bool may_sleep(const tu_worker_t *worker)
{
    return worker->background.ready == 0 && worker->background.copies == 0;
}

/* Returns what ucp_worker_arm does; UCS_ERR_NO_PROGRESS: something came before that. */
static ucs_status_t arm_once(tu_worker_t *worker)
{
    ucs_status_t status = ucp_worker_arm(worker->worker);

    /* InfiniBand's completion queues do not announce what came before arming, and UCX does not look for it. */
    if (status == UCS_OK && worker->late_events && (tu_inbox_progress(worker) != 0 || worker->used != 0)) {
        return UCS_ERR_NO_PROGRESS;
    }
    return status;
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
        if (count > 0 || !arm || !in_time || !may_sleep(worker) || tu_poll_sequences(worker, steps)) {
            return (int)count;
        }
        if (tu_inbox_lacks_memory(worker)) {
            *armed = TU_BUSY; /* UCX would not wake the worker for messages that it has already */
            return 0;
        }
        switch (arm_once(worker)) {
        case UCS_OK:
            *armed = TU_ARMED;
            return 0;
        case UCS_ERR_NO_PROGRESS:
            if (tu_now() >= end) {
                return 0;
            }
            break;
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

/* Calls tu_worker_look(), unless the worker's descriptor is readable: what this takes was not signalled. */
int tu_worker_look_unsignalled(int efd, tu_worker_t *worker, tu_record_t *out, size_t max)
{
    return tu_readable(efd) ? 0 : tu_worker_look(worker, out, max);
}

/* Makes UCX progress for what was just posted, for TU_SLICE at most; records stay in the ring. Returns true if the worker
 * was to be armed, and is: UCX has nothing more to do, and there are no records. */
bool tu_worker_submit(tu_worker_t *worker, bool arm)
{
    bool quiet = progress_until_quiet(worker, 1, tu_now() + TU_SLICE);

    return arm && quiet && worker->used == 0 && may_sleep(worker) && !tu_inbox_lacks_memory(worker) &&
           arm_once(worker) == UCS_OK;
}

int tu_worker_signal(tu_worker_t *worker)
{
    return ucp_worker_signal(worker->worker);
}
