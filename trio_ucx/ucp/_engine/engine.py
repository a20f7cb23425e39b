"""The engine: what makes a UCX worker progress inside a Trio run.

Theory of operation
===================

UCX calls back only into C (``_native``), which appends records to a ring. :meth:`Engine.progress_and_deliver` calls
into C, which progresses the worker until it is quiet and returns the records. They are delivered (``dispatch.py``),
which wakes tasks; no user code runs in a delivery. When there are none left, C arms the worker if it was asked to.

*What calls it.* One task waits for the descriptor with ``wait_readable``, and calls it whenever the descriptor wakes
the task: one that is parked, or else a system task of the worker, the progress task (``progress.py``). Waiting tasks
poll before they park (``waits.py``). Calls that must know what has arrived, such as ``receive_nowait``, begin with
:meth:`Engine.reap`; calls that release buffers, such as ``abort``, end with it. Who progresses
the worker next is said in ``listening.py``.

*Posting delivers nothing.* A task that posts an operation which does not complete at once calls :meth:`Engine.submit`:
UCX begins it, and what arrives or completes meanwhile stays in the ring. No delivery comes between two steps of a
change.

*Memory.* The in-flight table maps the id of each operation to an :class:`~.operations.Operation`, which pins
the buffers until the completion record arrives, whatever became of the task that posted it. UCX can cancel a tag
receive that has not matched, and our C code what has not begun. Any other operation whose task is cancelled stays in
the table, *detached*. :meth:`Engine.adopt` makes the entry, or keeps the memory without one.

*Missed events.* While something is awaited, a safety net (``progress.py``) looks once a second whether the worker has
something to deliver although its descriptor is silent. It should never find anything; ``statistics().missed_events``
counts.

*The end.* See ``lifetime.py``, which opens an engine, starts its tasks and closes it.

An engine makes its parts, whose modules name what they use of it in Protocols. Endpoints use the class itself.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, NoReturn, TypeVar, TypeVarTuple, cast

import trio
from outcome import Error

from ..._native import ffi, lib
from ..._util.contained import contained, report
from .._context import Context
from .._memory.registered import closed_memories
from .._quirks.key_gate import KeyGate
from .._status import Status, UCXError, broken
from .dispatch import EngineEndpoint, Receivers, deliver, deliver_failures
from .endpoints_to_worker import EndpointsByWorker
from .identity import Identity
from .links import WorkerLinks
from .listening import Leads, Listening
from .operations import Operation
from .peer_processes import PeerProcesses
from .progress import ProgressTask
from .receive_queue import ReceiveQueue
from .statistics import WorkerStatistics
from .tag_dispatch import TagDispatch
from .teardown import Teardown
from .trio_run import TrioRun
from .waits import Waiting

_Made = TypeVar("_Made")
_Arguments = TypeVarTuple("_Arguments")

_BATCH = 256
_ARMED, _MORE = lib.TU_ARMED, lib.TU_MORE
_FIELDS, _TAKEN = lib.TU_RECORD_FIELDS, lib.TU_RECORD_TAKEN
#: How often one call progresses and delivers, at most, before it lets other tasks run.
_ROUNDS = 8
#: Seconds after which they end: other tasks wait meanwhile.
_SLICE = lib.TU_SLICE * 1e-9

#: The open engines of all threads. Iterate over a copy: other threads change the set.
engines: set[Engine] = set()


def _disown() -> None:
    """In a forked child: drops the handles, because UCX's sockets and shared memory are the parent's."""
    for engine in engines:
        engine.handle = engine.key_gate.handle = None
        for endpoint in engine.endpoints.values():
            endpoint.disown()


os.register_at_fork(after_in_child=_disown)


class Engine:
    """One UCX worker, progressed by one Trio run. Opened by :func:`~.lifetime.open_engine`.

    Args:
        handle: UCX's worker.
        spin, yield_interval: how tasks wait: see :func:`~trio_ucx.ucp.open_worker`.
        receive_queue: makes the watch of its queue in shared memory.

    Raises:
        OSError, UCXError: UCX does not tell the worker's attributes or address; too few descriptors are left; strangers
            cannot be kept away from its TCP ports (PermissionError).
    """

    def __init__(
        self,
        context: Context,
        handle: Any,
        client_id: int | None,
        spin: float,
        yield_interval: float,
        receive_queue: Callable[[Engine], ReceiveQueue],
    ) -> None:
        self.context = context
        self.handle: Any = handle  # None once closed
        #: The event descriptor of UCX's worker.
        self.efd: int = lib.tu_worker_efd(handle)
        self.run = TrioRun(self)
        self.identity = Identity.of(handle, context, client_id)
        self.key_gate = KeyGate(
            handle, self.identity.address, self.identity.unknown_layout, lambda: self.progress_task.safety_net.watch()
        )
        self.endpoints_by_worker: EndpointsByWorker = EndpointsByWorker(lambda: self.progress_task.safety_net.watch())
        self.endpoints: dict[int, EngineEndpoint] = {}
        self.peer_processes = PeerProcesses(self.run)
        self.in_flight: dict[int, Operation] = {}
        self._last_id = 0
        self.tag_dispatch = TagDispatch(self)
        #: Whether the safety net looks, because something is awaited.
        self.watched = False
        self.receivers = Receivers(serves_memory=context._serves_memory)
        self.counters: collections.Counter[str] = collections.Counter()
        records = ffi.new("tu_record_t[]", _BATCH)
        #: What C code writes: the records of one call, the same as words, and whether it has armed the worker.
        self._buffers = records, memoryview(ffi.buffer(records)).cast("Q"), ffi.new("int *")
        self._reaping = False
        #: Endpoints that failed, and why; reported when what had arrived before is delivered.
        self.failures: list[tuple[int, int]] = []
        self.broken: BaseException | None = None
        #: Held while UCX's worker is asked for figures, which another thread may do, and while it is given up.
        self.figures = threading.RLock()
        self.teardown = Teardown()
        self.waiting = Waiting(self, spin, yield_interval)
        self.links = WorkerLinks(self, handle, lambda: self.progress_task.before_wait.watch())
        self.receive_queue = receive_queue(self)
        self.progress_task: ProgressTask = ProgressTask(self)
        self.listening = Listening(
            self,
            self.progress_task.resume,
            self.progress_task.before_wait.watch,
            self.progress_task.safety_net,
            always=self.run.clock_jumps,
        )

    # ---- checks ----

    def check(self) -> None:
        """Refuses use from where or when the worker cannot be used.

        Raises:
            RuntimeError: another thread, or a forked child.
            trio.ClosedResourceError: after the worker was closed.
            trio.BrokenResourceError: after an internal error.
        """
        # Every message passes here: the usual answer takes a single function. (A forked child has no handle.)
        if (
            self.handle is None
            or self.run.thread != threading.get_ident()
            or self.broken is not None
            or self.teardown.begun
        ):
            self._refuse()

    def _refuse(self) -> NoReturn:
        self.run.check("this worker")
        self.run.check_thread()
        if self.handle is None or self.teardown.begun:
            raise trio.ClosedResourceError("this worker was closed")
        assert self.broken is not None
        raise broken(f"this worker broke: {self.broken!r}", self.broken)

    @property
    def usable(self) -> bool:
        """True if UCX's worker is there, and may be used by this thread. (A forked child has no handle.)"""
        return self.handle is not None and self.run.thread == threading.get_ident()

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # ---- progress ----

    def progress_and_deliver(self, arm: bool) -> int:
        """Progresses and delivers until nothing moves, then arms if asked to.

        Returns:
            ``TU_ARMED``, ``TU_BUSY`` (UCX cannot be armed although nothing moves) or ``TU_MORE`` (not asked to arm, or
            there is more to do).
        """
        if self._reaping or self.handle is None:
            return lib.TU_MORE
        self._reaping = True
        try:
            if self.links.deferred:
                self.links.flush()
            records, words, armed = self._buffers
            end = perf_counter() + _SLICE
            for _ in range(_ROUNDS):
                count = lib.tu_worker_progress_and_arm(self.handle, records, _BATCH, arm, False, armed)
                if count > 0:
                    deliver(self, words[: count * _FIELDS].tolist())
                    if self.failures:
                        continue
                    if perf_counter() > end:
                        break
                elif self.links.news[0]:
                    self.links.settle()  # what the leader has left; something may have been posted then
                elif self.failures:
                    deliver_failures(self)
                elif count < 0:
                    raise UCXError(Status.IO_ERROR, "arming the worker")
                else:
                    state: int = armed[0]
                    return state
            return lib.TU_MORE
        except BaseException as error:
            self.internal_error(error)
            return lib.TU_BUSY
        finally:
            self._reaping = False

    def poll_and_deliver(self, function: Callable[[Any, Any, int], int]) -> bool:
        """Calls a function of C, and delivers the records that it brings. Returns True if there were any."""
        if self._reaping or self.handle is None:
            return False
        if self.links.deferred:
            self.links.flush()
        return self._deliver(function(self.handle, self._buffers[0], _BATCH))

    def _deliver(self, count: int) -> bool:
        """Delivers so many records. Returns True if there are any."""
        self._reaping = True
        try:
            if count > 0:
                deliver(self, self._buffers[1][: count * _FIELDS].tolist())
            elif self.links.news[0]:  # what the leader has left
                self.links.settle()
        except BaseException as error:
            self.internal_error(error)
            return False
        finally:
            self._reaping = False
        if self.failures:
            self.progress_and_deliver(arm=False)
        return count > 0

    # For a task that leads, or is about to.

    def arm(self, leader: Leads) -> bool:
        """Delivers what is there until that is due; if nothing is, arms. Returns False if that cannot be done."""
        links = self.links
        if links.deferred:
            links.flush()
        records, words, armed = self._buffers
        for _ in range(_ROUNDS):
            count = lib.tu_worker_progress_and_arm(self.handle, records, _BATCH, True, True, armed)
            if count == 0 and not self.failures:
                state = armed[0]
                if state != _MORE:
                    return cast(bool, state == _ARMED)
            else:
                self._arrived(count, words)
                if links.news[0] and not leader.is_due[0]:  # others' tokens are due
                    links.settle()
                if leader.is_due[0] or self.handle is None:
                    return False
        return False

    def look(self) -> None:
        """Progresses once, and delivers what has arrived. (The caller settles the links' news.)"""
        records, words, _ = self._buffers
        count = lib.tu_worker_look(self.handle, records, _BATCH)
        if count:
            self._arrived(count, words)

    def _arrived(self, count: int, words: Any) -> None:
        if count == 1 and words[0] == _TAKEN:  # the usual case
            self.tag_dispatch.messages += words[1]
        else:
            self._deliver(count)

    def progress_calls(self) -> int:
        """Returns how often the worker was progressed."""
        native = ffi.new("tu_counts_t *")
        lib.tu_worker_counts(self.handle, native)
        return cast(int, native.progress_calls)

    def events_seen(self) -> int:
        """Grows whenever something arrives or completes."""
        return self.tag_dispatch.messages + self.counters["arrived"] + self.counters["completed"]

    def submit(self) -> None:
        """Makes UCX begin what was posted and is pending. Call it after posting.

        What arrives or completes stays in the ring; who listens delivers it, or a task that waits.
        """
        if self.handle is None or self._reaping:  # then a later round progresses
            return
        heard = self.listening.heard
        armed = lib.tu_worker_submit(self.handle, heard)
        if heard:
            self.listening.progressed(armed)

    def reap(self) -> None:
        """Progresses the worker, and delivers what has arrived and completed."""
        self.try_to_arm()

    def try_to_arm(self) -> bool:
        """Reaps. Returns True if somebody listens, and the worker is armed for him."""
        if self._reaping:
            return False
        heard = self.listening.heard
        armed = self.progress_and_deliver(arm=heard) == lib.TU_ARMED
        if heard:
            self.listening.progressed(armed)
        return armed

    def reap_soon(self) -> None:
        """Reaps in the next round of Trio's loop; makes Trio look for runnable tasks before that."""
        self.run.call_soon(self.reap)

    @property
    def is_moving(self) -> bool:
        """True if UCX has operations that go on, for which it must be progressed."""
        return bool(self.in_flight) or (self.handle is not None and bool(lib.tu_poll_goes_on(self.handle)))

    def signal(self) -> None:
        """Makes the worker's descriptor readable."""
        if self.handle is not None:
            lib.tu_worker_signal(self.handle)

    def wake(self) -> None:
        """Wakes the progress task, or the task that waits for the worker's descriptor."""
        self.listening.wake()

    def watch_events(self) -> None:
        """Makes the safety net look, because something is awaited."""
        if not self.watched:
            self.progress_task.safety_net.watch()

    def awaited(self) -> bool:
        """True if a task or a queue waits for an event of UCX."""
        return bool(
            self.in_flight
            or self.endpoints_by_worker.idle
            or self.key_gate.has_ended
            or self.tag_dispatch.sinks
            or self.tag_dispatch.undiscarded
            or self.receivers.awaited()
            or any(
                endpoint.stream_buffer is not None and endpoint.stream_buffer.awaited
                for endpoint in self.endpoints.values()
            )
        )

    def user_endpoint(self, id: int) -> Any:
        """Returns what users hold of an endpoint; None: it was closed."""
        core = self.endpoints.get(id)
        return core.user_object() if core is not None and core.handle is not None else None

    # ---- memory ----

    def adopt(self, id: int, make: Callable[[*_Arguments], _Made], *arguments: *_Arguments) -> _Made:
        """Returns what ``make`` returns: it makes our object for an operation that UCX has begun, and records it.

        If that fails, ``make`` and its arguments are kept until UCX has completed the operation. The operation's memory
        must be among them.

        Raises:
            RuntimeError: there is no memory for the object. A MemoryError would say that nothing has happened.
        """
        try:
            return make(*arguments)
        except BaseException as error:
            if id not in self.in_flight:
                self.teardown.unrecorded[id] = make, arguments
            if isinstance(error, MemoryError):
                raise RuntimeError("no memory to record an operation that UCX has begun and may complete") from error
            raise

    # ---- internal errors ----

    def guard(self, function: Callable[[], None]) -> None:
        """Calls a function where an exception would end the run: a bug in it breaks the worker instead."""
        try:
            function()
        except Exception as error:
            self.internal_error(error)

    def internal_error(self, error: BaseException) -> None:
        """Marks the worker broken after an exception in our own code, and fails all waiting tasks.

        Never raises.
        """
        if self.broken is None:
            self.broken = error
            report("trio_ucx worker broke", error)
        contained(self._fail_everything, error)

    def _fail_everything(self, error: BaseException) -> None:
        def failure() -> trio.BrokenResourceError:
            return broken(f"the worker broke: {error!r}", error)

        def fail(operation: Operation) -> None:
            operation.finish(Error(failure()))
            operation.detach()

        for operation in list(self.in_flight.values()):
            contained(fail, operation)
        contained(lambda: self.receivers.stream_watchers.fail(failure()))
        self.teardown.report_broken(failure)
        for endpoint in list(self.endpoints.values()):
            contained(endpoint.worker_broke, error)

    # ---- statistics ----

    def statistics(self) -> WorkerStatistics:
        """Returns the worker's figures; after its close, the last ones. Any thread may ask."""
        native = ffi.new("tu_counts_t *")
        with self.figures:
            if self.handle is None:
                self.run.check("this worker")
                assert self.teardown.statistics is not None
                return self.teardown.statistics
            lib.tu_worker_counts(self.handle, native)
            batches = lib.tu_links_batches(self.links.native)
        open_endpoints = sum(endpoint.handle is not None for endpoint in list(self.endpoints.values()))
        return WorkerStatistics(
            operations_in_flight=len(self.in_flight),
            left_over_operations=sum(operation.detached for operation in list(self.in_flight.values())),
            completed_operations=self.counters["completed"],
            endpoints=open_endpoints - self.endpoints_by_worker.idle,
            wakeups=self.counters["wakeups"],
            busy_arms=native.arm_busy,
            backoffs=self.counters["backoffs"],
            missed_events=self.counters["missed_events"],
            progress_calls=native.progress_calls,
            messages=self.tag_dispatch.messages,
            batches=batches,
            polls=native.polls,
            polls_paid=native.polls_paid,
            poll_seconds=native.poll_nanoseconds / 1e9,
            poll_limit=native.poll_limit / 1e9,
            background_closes=self.run.background,
            stopped_queues=self.counters["stopped_queues"],
            closed_memories=closed_memories(self.context),
            strangers=native.strangers,
        )
