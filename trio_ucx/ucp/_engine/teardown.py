"""What ends with a worker: what must be closed with it, and who is told."""

from __future__ import annotations

from collections.abc import Callable

from ..._util.contained import contained
from .statistics import WorkerStatistics


class Teardown:
    """What ends with one worker. The attributes are in the order in which they are used.

    Attributes:
        begun: whether the worker is being closed, or was closed.
        on_broken: to be told of an internal error of the worker; called with the exception for waiting tasks.
        children: by id, what closes everything that must be closed before the worker. Must not raise.
        statistics: those of the closed worker.
        at_end: called when nothing is under way any more, just before the worker is destroyed.
        unanswered: whether peers were left without answers that only this worker could give.
        unreleased: ids of children: borrowed memory that cannot be released, because something still refers to it.
        unrecorded: by id, what has the memory of operations that UCX has begun but that have no entry in flight: see
            :meth:`Engine.adopt`.
        kept: called after the worker was destroyed, to release what UCX could use until then.
        on_closed: called last.
    """

    def __init__(self) -> None:
        self.begun = False
        self.on_broken: dict[int, Callable[[Exception], None]] = {}
        self.children: dict[int, Callable[[], None]] = {}
        self.statistics: WorkerStatistics | None = None
        self.at_end: dict[int, Callable[[], None]] = {}
        self.unanswered = False
        self.unreleased: set[int] = set()
        self.unrecorded: dict[int, object] = {}
        self.kept: list[Callable[[], None]] = []
        self.on_closed: Callable[[], None] | None = None

    def report_broken(self, failure: Callable[[], Exception]) -> None:
        """The worker broke: tells all that depend on it, each with a new exception."""
        for tell in list(self.on_broken.values()):
            contained(lambda tell=tell: tell(failure()))

    def close_children(self) -> None:
        """Closes the children, because the worker is being closed."""
        for close in list(self.children.values()):
            contained(close)

    def end(self, statistics: WorkerStatistics) -> None:
        """Ends what is registered for the worker's end: nothing is under way any more."""
        self.statistics = statistics
        for end in list(self.at_end.values()):
            contained(end)

    def release_kept(self) -> None:
        """Releases what was kept until the worker was destroyed."""
        self.unrecorded.clear()
        for let_go in self.kept:
            let_go()
        self.kept.clear()
