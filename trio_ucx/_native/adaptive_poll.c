/* Decides for how long a waiting task polls before it parks, because waking it costs more than a short poll.
 *
 * The time adapts, as Linux's halt_poll_ns does for virtual processors, but to what polling has found, too: with no
 * core to spare for the peer, waits are short and polls find nothing.
 *
 *   a poll finds something            the limit becomes a multiple of what it took, so that the next finds it, too
 *   MISSES polls find nothing         no polling for a pause, and then until a wait was short. Each further miss starts
 *                                     a pause that is twice as long, up to 8 ms. HITS_FOR_A_MISS hits cancel a miss;
 *                                     a hit when no misses are left makes the next pause a short one again
 *   no poll, and the wait was         short, or could have been: polls again, up to the bound
 *   no poll, and the wait was         longer: the limit is halved
 *   a poll finds something, but       others have used the core meanwhile, the peer itself perhaps, which could not
 *                                     answer before: a pause, too, because nothing would have been lost by sleeping
 *   other tasks have work             a pause
 */

#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "native.h"

#include <sys/resource.h>

#define LEAST 2000             /* a limit below this is none */
#define MARGIN 8
#define SHORT 4                /* a wait of up to so many bounds may be short once nobody has to be woken */
#define MISSES 4
#define CHECKED 4              /* polls that have paid, between two looks at whether others have used their core */
#define HITS_FOR_A_MISS 3      /* fewer do not make up for a miss: it costs more than a hit saves */
#define FIRST_PAUSE_NS 128000
#define MOST_DOUBLINGS 6       /* up to 8 ms: the longest time without a new try */
#define SLICE 1000000          /* one call takes no longer: Trio looks at deadlines and signals in between */
#define ROUNDS 16              /* progress calls that find nothing, between two looks at the clock */

static uint64_t least(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

void tu_poll_bound(tu_worker_t *worker, uint64_t nanoseconds)
{
    worker->poll.bound = nanoseconds;
    worker->poll.limit = nanoseconds;
    worker->poll.interruptions = -1;
}

/* A task is about to wait. Returns whether it should poll. */
bool tu_poll_begin(tu_worker_t *worker)
{
    tu_poll_t *poll = &worker->poll;

    if (poll->bound == 0) {
        return false;
    }
    poll->continues = false;
    poll->began     = tu_now();
    poll->steps     = worker->background.steps;
    return poll->limit > 0 && poll->began >= poll->resumes;
}

static void pause_polling(tu_poll_t *poll, uint64_t time)
{
    poll->resumes       = time + ((uint64_t)FIRST_PAUSE_NS << poll->doublings);
    poll->limit         = 0;
    poll->interruptions = -1;
    if (poll->doublings < MOST_DOUBLINGS) {
        poll->doublings++;
    }
}

static long count_interruptions(void)
{
    struct rusage usage;

    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}

/* Returns true if others have used this core since the last look. */
static bool was_interrupted(tu_poll_t *poll)
{
    long before = poll->interruptions;

    if (++poll->unchecked < CHECKED && before >= 0) {
        return false;
    }
    poll->unchecked     = 0;
    poll->interruptions = count_interruptions();
    return before >= 0 && poll->interruptions > before;
}

/* It found something, or a sequence went on. Returns whether it will be worth while again. */
static bool paid(tu_worker_t *worker, uint64_t time)
{
    tu_poll_t *poll = &worker->poll;
    unsigned before = poll->unchecked;

    worker->counts.polls_paid++;
    if (was_interrupted(poll)) {
        pause_polling(poll, time);
        return false;
    }
    if (poll->misses > 0) {
        poll->misses--;
    } else if (poll->unchecked < before) {
        poll->doublings = 0;
    }
    return true;
}

static void missed(tu_poll_t *poll, uint64_t time)
{
    poll->misses += HITS_FOR_A_MISS;
    if (poll->misses >= MISSES * HITS_FOR_A_MISS) {
        poll->misses -= HITS_FOR_A_MISS; /* the next miss is one too many again */
        pause_polling(poll, time);
    }
}

/* Notes that sequences have posted more since `steps` was their number. Each step of theirs is a wait of its own. */
static void look_at_sequences(tu_worker_t *worker, uint64_t *steps, uint64_t time)
{
    if (worker->background.steps != *steps) {
        *steps               = worker->background.steps;
        worker->poll.last    = time;
        worker->poll.goes_on = true;
    }
}

/* Polls. Call it after tu_poll_begin said so, and again while it finds other things. Takes up to `max` records and
 * returns their number; 0 when the time is over, or a slice of it: then tu_poll_continues says that there is time left.
 *
 * A sequence that goes on is a reason to stay, until its slice is over: tu_poll_goes_on says then that it is not
 * at its end. */
int tu_poll(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    tu_poll_t *poll   = &worker->poll;
    uint64_t start    = tu_now();
    uint64_t time     = start;
    uint64_t steps    = worker->background.steps;
    size_t count;
    int round;

    worker->background.slice_end = start + TU_SEQUENCE_SLICE;
    poll->goes_on                = false;
    if (!poll->continues) {
        worker->counts.polls++;
        poll->last = start;
    }
    poll->continues = false;
    do {
        for (round = 0; round < ROUNDS && worker->used == 0; round++) {
            if (tu_inbox_progress(worker) != 0) {
                tu_inbox_collect(worker);
                break; /* it may have taken long */
            }
        }
        time = tu_now();
        look_at_sequences(worker, &steps, time);
        if (time >= worker->background.slice_end && (poll->goes_on || worker->background.ready > 0)) {
            poll->goes_on = true;
            break;
        }
        if (time - start >= SLICE && worker->used == 0) {
            poll->continues = time - poll->last < poll->limit;
            break;
        }
    } while (worker->used == 0 && time - poll->last < poll->limit);
    worker->counts.poll_nanoseconds += time - start;
    if (worker->background.ready == 0 && time - poll->last >= poll->limit) {
        poll->goes_on = false;
    }
    if (worker->used == 0) {
        if (poll->goes_on) {
            paid(worker, time);
        } else if (!poll->continues) {
            missed(poll, time);
        }
        return 0;
    }
    tu_inbox_complete_last(worker);
    count = tu_ring_take(worker, out, max);
    poll->began = 0;
    if (paid(worker, time)) {
        poll->limit = least(poll->bound, (poll->limit * 15 + (time - poll->last + LEAST) * MARGIN) / 16);
    }
    return (int)count;
}

/* Returns true if the worker should poll instead of being armed: a sequence went on since its steps were `before`, and
 * its steps take no longer than it pays to poll for. */
bool tu_poll_sequences(tu_worker_t *worker, uint64_t before)
{
    tu_poll_t *poll = &worker->poll;
    uint64_t steps  = worker->background.steps - before;
    uint64_t time, took;

    if (worker->background.sequences == 0 || poll->bound == 0) {
        poll->goes_on = false;
        return false;
    }
    time = tu_now();
    took = time - poll->last;
    look_at_sequences(worker, &before, time);
    if (steps > 0 && poll->limit == 0 && time >= poll->resumes && took / steps <= SHORT * poll->bound) {
        poll->limit = poll->bound;
    }
    poll->goes_on = time - poll->last < poll->limit;
    return poll->goes_on;
}

/* Whether a sequence went on in the last poll or progress, and is not at its end. */
bool tu_poll_goes_on(const tu_worker_t *worker)
{
    return worker->poll.goes_on && worker->background.sequences > 0;
}

/* Whether the last poll ended before its time, or for a sequence that is not at its end: the task may poll again. */
bool tu_poll_continues(const tu_worker_t *worker)
{
    return worker->poll.continues || tu_poll_goes_on(worker);
}

/* The thread has other work, so that nobody could poll: pauses. Each try would cost the waiting task a schedule point. */
void tu_poll_pause(tu_worker_t *worker)
{
    pause_polling(&worker->poll, tu_now());
}

/* tu_poll_begin and tu_poll, for a task that has nothing to do between the two. */
int tu_poll_at_once(tu_worker_t *worker, tu_record_t *out, size_t max)
{
    return tu_poll_begin(worker) ? tu_poll(worker, out, max) : 0;
}

/* Something arrived by progress: adapts the limit to what polling could have saved the wait. */
void tu_poll_ended(tu_worker_t *worker)
{
    tu_poll_t *poll = &worker->poll;
    uint64_t time, took, steps;

    if (poll->began == 0) {
        return;
    }
    time        = tu_now();
    steps       = worker->background.steps - poll->steps; /* each was a wait of its own */
    took        = (time - poll->began) / (steps + 1);
    poll->began = 0;
    if (took > SHORT * poll->bound) {
        poll->limit = poll->limit / 2 >= LEAST ? poll->limit / 2 : 0;
    } else if (time >= poll->resumes) {
        poll->limit = poll->bound;
    }
}
