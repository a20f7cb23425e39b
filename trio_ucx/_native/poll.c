/* Polling before parking: for how long a task that waits looks for itself, because waking it costs more.
 *
 * The time adapts, as Linux's halt_poll_ns does for virtual processors, but to what polling has found, too: with no
 * core to spare for the peer, waits are short and polls find nothing.
 *
 *   a poll finds something            the limit becomes a multiple of what it took, so that the next finds it, too
 *   MISSES polls do not               no polling for 1 wait, 2, 4, ... 1024 waits; HITS_FOR_A_MISS hits forgive a miss
 *   nobody polled, and the wait was   short, or could have been: polls again, up to the bound. Longer: the limit is halved
 */
#include <time.h>

#include "native.h"

#define LEAST 2000             /* a limit below this is none */
#define MARGIN 8
#define SHORT 4                /* a wait of up to so many bounds may be short once nobody has to be woken */
#define MISSES 4
#define HITS_FOR_A_MISS 3      /* fewer do not make up for it: a poll in vain costs more than one that pays saves */
#define MOST_PENALTY 10
#define ROUNDS 16              /* progress calls between two looks at the clock */

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint64_t least(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

void tu_poll_bound(tu_worker_t *worker, uint64_t nanoseconds)
{
    worker->poll.bound = nanoseconds;
    worker->poll.limit = nanoseconds;
}

/* A task is about to wait. Returns whether it should poll. */
int tu_poll_begin(tu_worker_t *worker)
{
    tu_poll_t *poll = &worker->poll;

    if (poll->bound == 0) {
        return 0;
    }
    poll->began = now();
    if (poll->skip > 0) {
        poll->skip--;
        return 0;
    }
    return poll->limit > 0;
}

/* Polls, to be called after tu_poll_begin said so, again while it finds the wrong things. Takes up to `max` records and
 * returns their number; 0 when the time is over.
 *
 * A request chain that goes on is a reason to stay, until its slice is over: tu_poll_goes_on says then that it is not
 * at its end. */
int tu_poll(tu_worker_t *worker, uint64_t *out, size_t max)
{
    tu_poll_t *poll   = &worker->poll;
    uint64_t start    = now();
    uint64_t last     = start;
    uint64_t time     = start;
    uint64_t requests = worker->counts.chain_requests;
    size_t count;
    int round;

    worker->counts.polls++;
    worker->chains.until = start + TU_CHAIN_SLICE;
    poll->goes_on        = 0;
    do {
        for (round = 0; round < ROUNDS && worker->used == 0; round++) {
            if (tu_worker_progress(worker) != 0) {
                tu_worker_collect(worker);
            }
        }
        time = now();
        if (worker->counts.chain_requests != requests) {
            requests = worker->counts.chain_requests;
            last     = time;
            if (time >= worker->chains.until) {
                poll->goes_on = worker->used == 0;
                break;
            }
        }
    } while (worker->used == 0 && time - last < poll->limit);
    worker->counts.poll_nanoseconds += time - start;
    if (poll->goes_on) {
        return 0;
    }
    if (worker->used == 0) {
        poll->misses += HITS_FOR_A_MISS;
        if (poll->misses >= MISSES * HITS_FOR_A_MISS) {
            poll->misses = 0;
            poll->skip   = 1u << poll->penalty;
            poll->limit  = 0;
            if (poll->penalty < MOST_PENALTY) {
                poll->penalty++;
            }
        }
        return 0;
    }
    count = tu_ring_take(worker, (tu_record_t *)out, max);
    worker->counts.polls_paid++;
    poll->began = 0;
    if (poll->misses > 0) {
        poll->misses--;
    } else {
        poll->penalty = 0;
    }
    poll->limit = least(poll->bound, (poll->limit * 15 + (time - start + LEAST) * MARGIN) / 16);
    return (int)count;
}

/* Whether the last poll ended only so that others can run. */
int tu_poll_goes_on(const tu_worker_t *worker)
{
    return worker->poll.goes_on;
}

/* Both, for a task that has nothing to do in between. */
int tu_poll_at_once(tu_worker_t *worker, uint64_t *out, size_t max)
{
    return tu_poll_begin(worker) ? tu_poll(worker, out, max) : 0;
}

/* Something arrived in a turn: what a wait that did not poll, or in vain, could have saved. */
void tu_poll_ended(tu_worker_t *worker)
{
    tu_poll_t *poll = &worker->poll;
    uint64_t took;

    if (poll->began == 0) {
        return;
    }
    took        = now() - poll->began;
    poll->began = 0;
    if (took > SHORT * poll->bound) {
        poll->limit = poll->limit / 2 >= LEAST ? poll->limit / 2 : 0;
    } else if (poll->skip == 0) {
        poll->limit = poll->bound;
    }
}
