/* How many pieces of long messages an endpoint has under way, and how long they are. Pure: no I/O, and no clock. */
#include <stdlib.h>

#include "native.h"

/* The least pieces of an endpoint that UCX has, not counting the first ones of each message. With one, the path is idle
 * while the next one is asked for. */
#define LEAST_UNDER_WAY 2
/* The pieces: small ones while other messages come and go, larger ones, which cost less, when none has for a while. Both
 * are a little less than multiples of TCP_TX_SEG_SIZE (64k), so that what UCX adds to each segment does not make one
 * more of them. */
#define SMALL_PIECE (2 * 63488)
#define LARGE_PIECE (8 * 63488)
/* Nanoseconds that pieces are always allowed to wait in queues on the path: beside other messages, which wait as long;
 * and alone, when full queues give bandwidth. */
#define QUEUED_BESIDE_OTHERS 35000
#define QUEUED_ALONE 1000000
#define A_WHILE 50000000 /* nanoseconds */
#define SAMPLES 7                 /* pieces whose median decides */
#define MEASUREMENT_LASTS 64      /* a measurement is good for at least so many times the time of a piece */
#define MEASUREMENTS 2            /* a higher time counts after so many measurements */

_Static_assert(sizeof(((tu_pacing_t *)NULL)->samples) == SAMPLES * sizeof(uint64_t), "cdef.h");

void tu_pacing_open(tu_pacing_t *pacing)
{
    *pacing = (tu_pacing_t){.window = LEAST_UNDER_WAY, .piece = LARGE_PIECE};
}

static uint64_t larger(uint64_t one, uint64_t other)
{
    return one > other ? one : other;
}

static int compare_times(const void *one, const void *other)
{
    uint64_t first = *(const uint64_t *)one, second = *(const uint64_t *)other;

    return (first > second) - (first < second);
}

/* Begins to measure how long a piece takes when hardly any of ours are in its way. It changes with the path, its other
 * users, and the load of both processes. */
static void begin_measuring(tu_pacing_t *pacing, uint64_t now)
{
    pacing->usual     = pacing->window;
    pacing->measuring = true;
    pacing->window    = LEAST_UNDER_WAY;
    pacing->shrunk    = now;
    pacing->sampled   = 0;
}

/* A lower time counts at once. A higher one does not: the peer may have filled the path with pieces of its own, and if
 * each side took that for the path, both would fill it more and more. */
static void measured(tu_pacing_t *pacing, uint64_t took)
{
    if (pacing->measurements == 0 || took < pacing->lowest) {
        pacing->lowest = took;
    }
    if (++pacing->measurements == MEASUREMENTS || pacing->unqueued == 0 || took < pacing->unqueued) {
        pacing->unqueued     = pacing->lowest;
        pacing->measurements = 0;
    }
    pacing->measuring = false;
    pacing->window    = pacing->usual;
}

/* Adapts the window to the path, when a piece has ended that was posted at that time. `others` grows with each other
 * message. What pieces take longer than `unqueued`, they wait in queues, behind others of ours. (Congestion control by
 * delay, as in TCP Vegas and LEDBAT.) */
void tu_pacing_piece_ended(tu_pacing_t *pacing, uint64_t now, uint64_t posted, uint64_t others)
{
    uint64_t took, allowed;
    unsigned step;
    size_t piece;
    bool alone, due;

    if (pacing->others != others) {
        pacing->others  = others;
        pacing->changed = now;
    }
    alone         = now - pacing->changed >= A_WHILE;
    piece         = alone ? LARGE_PIECE : SMALL_PIECE;
    due           = now >= pacing->next || (pacing->piece != piece && MEASUREMENT_LASTS * pacing->unqueued <= A_WHILE);
    pacing->piece = piece;
    if (due && !pacing->measuring) {
        begin_measuring(pacing, now);
    }
    if (posted < pacing->shrunk) {
        return; /* it waited behind more than there are now */
    }
    pacing->samples[pacing->sampled++] = now - posted;
    if (pacing->sampled < SAMPLES) {
        return;
    }
    pacing->sampled = 0;
    qsort(pacing->samples, SAMPLES, sizeof(pacing->samples[0]), compare_times);
    took = pacing->samples[SAMPLES / 2];
    if (pacing->measuring) {
        measured(pacing, took);
        pacing->next = now + larger(A_WHILE, MEASUREMENT_LASTS * took);
        return;
    }
    allowed = alone ? larger(QUEUED_ALONE, 3 * pacing->unqueued) : larger(QUEUED_BESIDE_OTHERS, pacing->unqueued / 4);
    step    = pacing->window < 4 ? 1 : pacing->window / 4;
    if (took < pacing->unqueued + allowed / 2) {
        pacing->window = pacing->window + step < TU_MOST_PIECES ? pacing->window + step : TU_MOST_PIECES;
    } else if (took > pacing->unqueued + allowed && pacing->window > LEAST_UNDER_WAY) {
        pacing->window -= step;
        pacing->shrunk  = now;
    }
}
