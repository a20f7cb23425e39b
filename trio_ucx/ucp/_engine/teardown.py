"""The end of a worker: what must be closed with it, what is in flight, and destroying it, or not where that harms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._native import lib
from .._contained import contained
from .._memory.registered import unmap_unused
from .._quirks.releases import STUCK_OPERATIONS_ARE_HARMLESS
from .._util import RealTimeLimit, warn_resource
from .operations import Operation
from .statistics import WorkerStatistics

if TYPE_CHECKING:
    from .engine import Engine

#: How long closing a worker waits for UCX to let go of what is in flight.
DRAIN_TIMEOUT = 2.0
#: The same when every endpoint is closed: what is still pending then will hardly end.
STUCK_TIMEOUT = 0.1
#: How many seconds between two checks count at most for the time limits.
_LONGEST_GAP = 0.01

#: Workers that were left alone, and everything that UCX may still look at.
left_alone: list[Any] = []


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


def _uses_memory(engine: Engine, handle: Any) -> bool:
    """True if UCX may still use the memory of operations, or holds registrations of it."""
    return bool(engine.in_flight or engine.teardown.unrecorded or lib.tu_long_lingers(handle))


def drain(engine: Engine) -> Iterator[None]:
    """Progresses until nothing is in flight, yielding in between; gives up after DRAIN_TIMEOUT, in real time."""
    limit = RealTimeLimit(_LONGEST_GAP)
    engine.progress_and_deliver(arm=False)
    while _uses_memory(engine, engine.handle):
        if limit.is_over(DRAIN_TIMEOUT if engine.endpoints else STUCK_TIMEOUT):
            break
        yield
        time.sleep(0.0002)
        engine.progress_and_deliver(arm=False)
    engine.tag_dispatch.discard_again()
    # Then what nobody asked for. (Messages of Connections are taken whenever the worker is progressed.)
    tags = engine.tag_dispatch
    while tags.has_tags and (message := lib.tu_tag_probe(engine.handle, 0, 0, True, tags.received)):
        engine.tag_dispatch.discard(message)
        if limit.is_over(DRAIN_TIMEOUT):
            break
    yield
    engine.progress_and_deliver(arm=False)
    yield from _send_answers(engine)


def _send_answers(engine: Engine) -> Iterator[None]:
    """Sends what UCX still has to send, and would crash over when the worker is destroyed.

    That is answers to peers that read our memory, which are no operations of ours: UCX takes what a get's answer keeps
    in its request for the description of a buffer (ucp_request_send_state_ff). They are left when the shared-memory
    queue of a peer that is gone or stopped is full; as long as they are, the worker cannot be armed, and must not be
    destroyed.
    """
    if not engine.context._exposed_memory:
        return
    limit = RealTimeLimit(_LONGEST_GAP)
    while engine.progress_and_deliver(arm=True) != lib.TU_ARMED:
        if limit.is_over(STUCK_TIMEOUT):
            engine.teardown.unanswered = True
            warn_resource(
                "a UCX worker was left alone: a peer that is not reading has not taken all replies to its requests"
            )
            return
        yield
        time.sleep(0.0002)


def dispose(engine: Engine, handle: Any, stuck: str) -> None:
    """Destroys a worker that was closed, or leaves it alone.

    Args:
        handle: UCX's, which the engine has forgotten.
        stuck: what is still under way, in words.
    """
    uses_memory = _uses_memory(engine, handle)
    if engine.teardown.unanswered or engine.teardown.unreleased:
        _leave_alone(engine, handle)  # UCX has unsent answers, or a view of its memory is in use; a warning was given
    elif uses_memory and (engine.endpoints or not STUCK_OPERATIONS_ARE_HARMLESS):
        _leave_alone(engine, handle)  # UCX may still touch those buffers: keep them for ever
        warn_resource(f"a UCX worker was left alone, {len(engine.in_flight)} operation(s) did not end{stuck}")
    elif uses_memory and (wait := _registrations_of_others(engine)):
        _postpone(engine, handle, wait)
    else:
        _destroy(engine, handle)
    engine.context._destroy_postponed()
    unmap_unused()


def _destroy(engine: Engine, handle: Any) -> None:
    # A receive whose sender died in the middle of a message never completes, nor does a send to the full shared-memory
    # queue of a receiver that died. With every endpoint closed, nothing but this worker's own progress could still
    # touch their buffers, and that ends here.
    lib.tu_worker_destroy(handle)
    operations = list(engine.in_flight.values())
    engine.in_flight.clear()
    for operation in operations:
        contained(operation.worker_destroyed)
    engine.teardown.release_kept()
    engine.context._worker_destroyed(engine)
    if engine.teardown.on_closed is not None:
        engine.teardown.on_closed()


def _registrations_of_others(engine: Engine) -> list[Callable[[], bool]]:
    """Returns functions that say whether one of the context's other workers still has memory registered."""
    held: list[Callable[[], bool]] = []
    for other in list(engine.context._workers):
        if other.handle is not None:
            held += [partial(_in_flight, one) for one in list(other.in_flight.values()) if one.pins is not None]
            if _lingers(other):
                held.append(partial(_lingers, other))
    return held


def _in_flight(operation: Operation) -> bool:
    return operation.id in operation.engine.in_flight


def _lingers(engine: Engine) -> bool:
    return engine.handle is not None and lib.tu_long_lingers(engine.handle)


def _postpone(engine: Engine, handle: Any, held: list[Callable[[], bool]]) -> None:
    """Destroys a worker only when none of these holds registrations of memory any more.

    The workers of a context share the registrations of memory. When an endpoint is closed, UCX ends its large
    transfers only after everybody else has ended theirs of the same buffer; then it takes the worker's memory, and
    crashes if the worker was destroyed (docs/ucx-reports.md: "A closed endpoint's send ends after its worker").
    """

    def destroy_if_possible() -> bool:
        if any(still() for still in held):
            return False
        while lib.tu_worker_progress(handle):
            pass
        _destroy(engine, handle)
        return True

    engine.context._postponed.append(destroy_if_possible)


def _leave_alone(engine: Engine, handle: Any) -> None:
    left_alone.append((engine, handle))
    lib.tu_worker_stop_serving(handle)
