/* Progresses a worker once: UCX, then the data of streams and the hooks. */
#include "native.h"

unsigned tu_worker_progress(tu_worker_t *worker)
{
    tu_gate_t *before = tu_gate_enter(worker->gate);
    unsigned moved    = ucp_worker_progress(worker->worker);

    tu_gate_leave(before);
    worker->counts.progress_calls++;
    if (worker->streams) {
        tu_stream_collect(worker); /* now: a later progress may find that a peer has gone, and drop its data */
    }
    if (!tu_list_is_empty(&worker->hooks)) {
        moved += tu_hooks_call(worker);
    }
    worker->moved += moved;
    return moved;
}

/* Returns a counter that grows by at least one with each fragment that was sent or received. */
uint64_t tu_worker_moved(const tu_worker_t *worker)
{
    return worker->moved;
}
