"""Figures about a worker, and about all Connections of a worker or a server."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class ConnectionTotals:
    """Sums over Connections: those that are open, and those that have ended.

    Attributes:
        open: gauge: connections that are open on this side.
        opened: counter: connections that were opened, or accepted.
        ended: counters: connections that have ended, by reason. ``"closed"``: gracefully, by either side.
            ``"aborted_here"``: this side has closed by force. The other reasons are those of
            :class:`trio_ucx.PeerLost`.
        messages_sent, bytes_sent, messages_received, bytes_received: counters: see
            :class:`trio_ucx.ConnectionStatistics`.
    """

    open: int = 0
    opened: int = 0
    ended: Mapping[str, int] = attrs.field(factory=dict)
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


@attrs.frozen
class WorkerStatistics:
    """Figures about a :class:`Worker`. Counters only grow; gauges go up and down.

    Gauges: ``operations_in_flight``, ``left_over_operations``, ``endpoints``, ``poll_limit``, ``background_closes`` and
    ``closed_memories``. The others are counters.

    Attributes:
        operations_in_flight: posted and not completed.
        left_over_operations: those of them whose task was cancelled; their buffers stay pinned.
        completed_operations: completed after they were posted; what completed at once is not counted.
        endpoints: open endpoints, without those that are kept for a moment after their connection was closed.
        wakeups: times the progress task woke.
        busy_arms: times UCX said BUSY when asked to arm.
        backoffs: times the progress task slept because UCX stayed BUSY.
        missed_events: times the safety net found work that no event had announced; anything but 0 is a bug in UCX or
            in trio_ucx.
        progress_calls: calls of ``ucp_worker_progress``.
        messages: Connection messages that arrived.
        batches: times that small messages of a Connection which closely followed each other were sent as one.
        polls: times a task polled before it would have parked.
        polls_paid: those of them that found something.
        poll_seconds: time spent in all of them.
        poll_limit: how long the next one may take, in seconds: 0 while polling does not pay.
        background_closes: closes that go on after their task was cancelled.
        stopped_queues: times that the worker's queue in shared memory stopped, because a local peer was killed while it
            wrote to it (ucx-limits.md). Queues of the workers that took over its new Connections are counted, too.
        closed_memories: pieces of memory of the worker's context that were closed, and stay because peers still use
            them: see :meth:`Memory.close`.
        strangers: connections to its TCP ports that were closed, because they brought no proof of a key.
        connections: the Connections of both sides, clients and servers, on this worker and on those that were opened
            for it: for ``isolate=True``, say.
    """

    operations_in_flight: int
    left_over_operations: int
    completed_operations: int
    endpoints: int
    wakeups: int
    busy_arms: int
    backoffs: int
    missed_events: int
    progress_calls: int
    messages: int
    batches: int
    polls: int
    polls_paid: int
    poll_seconds: float
    poll_limit: float
    background_closes: int
    stopped_queues: int
    closed_memories: int
    strangers: int
    connections: ConnectionTotals = attrs.field(factory=ConnectionTotals)
