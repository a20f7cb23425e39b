"""Figures that users get about workers."""

from __future__ import annotations

import attrs


@attrs.frozen
class WorkerStatistics:
    """Figures about a :class:`Worker`.

    Attributes:
        operations_in_flight: posted and not completed.
        left_over_operations: those of them whose task was cancelled; their buffers stay pinned.
        completed_operations: completed after they were posted; what completed at once is not counted.
        endpoints: open endpoints.
        wakeups: times the progress task woke.
        busy_arms: times UCX said BUSY when asked to arm.
        backoffs: times the progress task slept because UCX stayed BUSY.
        missed_events: times the safety net found work that no event had announced; anything but 0 is a bug in UCX or
            in trio_ucx.
        progress_calls: calls of ``ucp_worker_progress``.
        messages: Connection messages that arrived.
        background_closes: closes that go on after their task was cancelled.
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
    background_closes: int
