"""The engine: what makes a UCX worker progress inside a Trio run.

Theory of operation
===================

UCX calls back only into C (``_native``), which appends records to a ring. :meth:`Engine.progress_and_deliver` calls
into C, which progresses the worker until it is quiet and returns the records. They are delivered (``dispatch.py``),
which wakes tasks; no user code runs in a delivery. When there are none left, C arms the worker if it was asked to.

*What calls it.* One system task per worker, the progress task (``progress.py``), waits for the descriptor with
``wait_readable`` and calls it whenever the descriptor wakes it. A task that posts an operation which does not complete
at once calls :meth:`Engine.progress`, because posting to an armed worker can leave it with work and no event: it must
be progressed and armed again before all tasks sleep. Waiting tasks poll before they park (``polling.py``). The module
``arming.py`` decides what progresses the worker next.

*Memory.* The in-flight table maps the id of each operation to an :class:`~.operations.Operation`, which pins
the buffers until the completion record arrives, whatever became of the task that posted it. UCX can cancel only a tag
receive that has not matched; any other operation whose task is cancelled stays in the table, *detached*.

*Missed events.* While something is awaited, a safety net (``safety_net.py``) looks once a second whether the worker has
something to deliver although its descriptor is silent, or the progress task is suspended. It should never find
anything; ``statistics().missed_events`` counts.

*The end.* See ``lifetime.py``, which makes an engine of its parts, starts its tasks and closes it.

An engine knows what belongs to it, operations and endpoints above all, by the few methods that it calls: the Protocols
below. The modules of those import this one.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
import trio
from outcome import Error, Outcome

from ..._native import ffi, lib
from .._address import worker_address
from .._attributes import query_worker
from .._contained import contained, report
from .._context import Context
from .._features import Feature
from .._forks import Birth
from .._status import Status, UCXError, broken
from .arming import Arming, Event, Progress
from .backoff import Backoff
from .batches import Batches
from .data_ports import DataPorts
from .pairs import Pairs
from .pending import Signal, Waiters
from .polling import Waiting
from .statistics import WorkerStatistics
from .tag_dispatch import TagDispatch

_BATCH = 256
_FIELDS = lib.TU_RECORD_FIELDS
#: How often one call progresses and delivers, at most, before it lets other tasks run.
_ROUNDS = 8

assert tuple(Progress) == (lib.TU_MORE, lib.TU_ARMED, lib.TU_BUSY)

#: The open engines of all threads. Iterate over a copy: other threads change the set.
engines: set[Engine] = set()


def _nothing() -> None:
    pass


def _disown() -> None:
    """In a forked child: drops the handles, because UCX's sockets and shared memory are the parent's."""
    for engine in engines:
        engine.handle = None
        for endpoint in engine.endpoints.values():
            endpoint.disown()


os.register_at_fork(after_in_child=_disown)


class OperationOwner(Protocol):
    """What an operation belongs to: :class:`~.operations.Scope`."""

    @property
    def native(self) -> OpenEndpoint:
        """The endpoint over which it goes."""


class InFlight(Protocol):
    """An operation that UCX has not completed: :class:`~.operations.Operation`."""

    id: int

    @property
    def engine(self) -> Engine: ...

    @property
    def endpoint(self) -> OperationOwner | None: ...

    @property
    def doing(self) -> str:
        """What it does, in words."""

    @property
    def pins(self) -> object | None:
        """Its buffers, pinned."""

    def complete(self, status: int, length: int, tag: int) -> None:
        """UCX has completed it."""

    def conclude(self, status: int, length: int, tag: int) -> None:
        """Ends the wait for it with this status. UCX has completed it, or :meth:`complete` is called when it has."""

    def finish(self, result: Outcome[Any]) -> None:
        """Ends the wait for it, whatever UCX does."""

    def detach(self) -> None:
        """Keeps its buffers for UCX, though no task waits for it any more."""

    def worker_destroyed(self) -> None:
        """UCX's worker has gone without having completed it."""

    def describe(self) -> str:
        """What it does, and UCX's own words for it."""

    def internal_error(self, error: BaseException) -> None:
        """Ends what it belongs to after an exception in our own code. Never raises."""


class StreamPieces(Protocol):
    """What an endpoint has received of its UCP stream: :class:`~.stream_buffer.StreamBuffer`."""

    @property
    def awaited(self) -> bool:
        """Whether a task waits for more."""

    def arrived(self, address: int, length: int) -> None:
        """A piece has arrived."""


class OpenEndpoint(Protocol):
    """An endpoint that UCX has: :class:`~.operations.EndpointCore`."""

    handle: Any

    @property
    def label(self) -> str: ...

    def user_object(self) -> Any:
        """The user's object for it, if there still is one."""

    @property
    def stream_buffer(self) -> StreamPieces | None: ...

    def open_stream_buffer(self) -> StreamPieces:
        """Its stream buffer, which is made if necessary."""

    def hint(self, status: int) -> str:
        """What is known about a peer that cannot be reached, in parentheses."""

    def disown(self) -> None:
        """In a forked child: drops the handles."""

    def fail(self, error: UCXError) -> None:
        """UCX reports that it has failed."""

    def worker_broke(self, error: BaseException) -> None:
        """Its worker is of no use any more."""

    def internal_error(self, error: BaseException) -> None:
        """Ends it after an exception in our own code. Never raises."""

    def close(self) -> None:
        """Closes it by force."""


class EventWatch(Protocol):
    """What looks for missed events: :class:`~.safety_net.SafetyNet`."""

    timer: int

    def watch(self) -> None:
        """Something is awaited: look."""

    def close(self) -> None:
        """Closes the timer's descriptor."""


class BorrowedMemory(Protocol):
    """Memory borrowed from UCX: :class:`~.borrowed.Borrowed`."""

    @property
    def ended(self) -> bool:
        """Whether it was released."""


class Engine:
    """One UCX worker, progressed by one Trio run. Opened by :func:`~.lifetime.open_engine`.

    Args:
        handle: UCX's worker.
        listening: the ports of its TCP transport (``tu_data_ports_t``).
        spin, yield_interval: how tasks wait: see :func:`~trio_ucx.ucp.open_worker`.

    Raises:
        OSError, UCXError: UCX does not tell the worker's attributes or address.
    """

    #: These parts are made of an engine, so they are attached to it.
    arming: Arming
    safety_net: EventWatch
    tag_dispatch: TagDispatch
    backoff: Backoff
    #: Delivers the records of one call into C, all their fields in a row.
    deliver: Callable[[Engine, list[int]], None]
    #: Reports the endpoints that failed.
    deliver_failures: Callable[[Engine], None]

    def __init__(
        self,
        context: Context,
        handle: Any,
        client_id: int | None,
        listening: Any,
        *,
        spin: float,
        yield_interval: float,
    ) -> None:
        self.context = context
        self.client_id = client_id
        self._token = trio.lowlevel.current_trio_token()
        self.handle: Any = handle  # None once closed
        self._thread = threading.get_ident()
        self.birth = Birth()
        self.efd = lib.tu_worker_efd(handle)
        found = query_worker(handle, client_id)
        self.max_am_header = min(found.max_am_header, context.longest_am_header)
        self.attributes = attrs.evolve(found, max_am_header=self.max_am_header)
        handles_errors = context.shared_memory_handles_errors
        features, sizes = context.features, context.agreed_sizes
        self.address = worker_address(handle, features, sizes, shared_memory=handles_errors)
        #: The same without shared memory.
        self.network_address = worker_address(handle, features, sizes, shared_memory=handles_errors, network_only=True)
        self.data_ports = DataPorts(listening, self.address.ucx)
        #: How often the worker was progressed.
        self.progress_count = 0
        self.waiting = Waiting(self, spin, yield_interval)
        self.batches = Batches(lambda: self.arming.watch())
        self._records = ffi.new("tu_record_t[]", _BATCH)
        self._view = memoryview(ffi.buffer(self._records)).cast("Q")
        self._armed = ffi.new("int *")
        self.received = ffi.new("tu_received_t *")
        self.in_flight: dict[int, InFlight] = {}
        #: By id, the memory of operations that UCX has begun but that have no entry in flight: see :meth:`keep`.
        self.unrecorded: dict[int, object] = {}
        self.endpoints: dict[int, OpenEndpoint] = {}
        #: What takes the connection requests of a listener id.
        self.listeners: dict[int, Callable[[int], None]] = {}
        #: Whether tag messages may be used; asked so often that the context's flags are too slow.
        self.tags = Feature.TAG in context.features
        #: Ids of active messages that are taken, and by what.
        self.am_ids: dict[int, str] = {lib.TU_REMOTE_AM_ID: "the library itself"} if context.serves_memory else {}
        #: What takes the news that a queue of active messages is no longer empty, by its id.
        self.am_queues: dict[int, Callable[[], None]] = {}
        #: Tasks that wait for active messages, by the queue's id.
        self.am_waiters: dict[int, Waiters] = {}
        #: Borrowed memory that cannot be released, because something still refers to it.
        self.unreleased: list[BorrowedMemory] = []
        #: Tasks that wait for a piece of any stream.
        self.stream_watchers = Waiters()
        #: Others to be told of an internal error; called with the exception for waiting tasks.
        self.on_broken: dict[int, Callable[[Exception], None]] = {}
        #: Everything to be closed before the worker: called with no arguments, must not raise.
        self.children: dict[int, Callable[[], None]] = {}
        #: To be called when nothing is under way any more, just before the worker is destroyed.
        self.at_end: dict[int, Callable[[], None]] = {}
        #: Called after the worker was destroyed, to release what UCX could use until then.
        self.kept: list[Callable[[], None]] = []
        self.detached = 0
        #: Closes that go on after their task was cancelled.
        self.background: set[object] = set()
        self.background_ended: Signal | None = None
        self.counters: collections.Counter[str] = collections.Counter()
        #: Messages of Connections that arrived.
        self.messages = 0
        self.broken: BaseException | None = None
        #: Endpoints that failed, and why; reported when what had arrived before is delivered.
        self.failures: list[tuple[int, int]] = []
        self._delivering = False
        #: Whether something was posted in a delivery, for which the worker has to be progressed.
        self._again = False
        self.closing = False
        #: Whether peers were left without answers that only this worker could give.
        self.unanswered = False
        #: What wakes it for delayed requests of chains.
        self.chain_timer: object | None = None
        self._next_id = 0
        #: Ends the progress task.
        self.stop: trio.CancelScope | None = None
        self.statistics_at_close: WorkerStatistics | None = None
        #: Called when the worker has been closed.
        self.on_closed: Callable[[], None] | None = None
        #: Its endpoints by worker address, for each peer worker.
        self.pairs: Pairs[Any] = Pairs(lambda: self.safety_net.watch())
        #: Whether UCX's endpoint configurations are used up: a worker has 255 in its life.
        self.is_full = False
        #: Whether the shared-memory queue has stopped (_receive_queue.py).
        self.queue_stopped = False
        #: Called when a process may have died that wrote to this worker over shared memory.
        self.suspect_queue: Callable[[], None] = _nothing
        #: Called when an endpoint is being closed here, while its peer may be writing to this worker.
        self.endpoint_closing: Callable[[Any], None] = lambda core: None
        #: Called when a process may be writing to this worker, to which we have no endpoint.
        self.may_be_writing: Callable[[Any], None] = lambda process: None

    # ---- checks ----

    def check(self) -> None:
        """Refuses use from where or when the worker cannot be used.

        Raises:
            RuntimeError: another thread, or a forked child.
            trio.ClosedResourceError: after the worker was closed.
            trio.BrokenResourceError: after an internal error.
        """
        self.birth.check("this worker")
        self.check_thread()
        if self.handle is None or self.closing:
            raise trio.ClosedResourceError("this worker was closed")
        if self.broken is not None:
            raise broken(f"this worker broke: {self.broken!r}", self.broken)

    def check_thread(self) -> None:
        """Raises RuntimeError in another thread. (A forked child may close what it inherited, without an effect.)"""
        if self._thread != threading.get_ident() and not self.birth.inherited:
            raise RuntimeError(
                "this worker belongs to another thread: open a worker in each thread that runs Trio, or use "
                "trio.from_thread.run"
            )

    @property
    def usable(self) -> bool:
        return self.handle is not None and not self.birth.inherited and self._thread == threading.get_ident()

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # ---- progress ----

    def progress_and_deliver(self, arm: bool) -> int:
        """Progresses and delivers until nothing moves, then arms if asked to.

        Returns:
            ``TU_ARMED``, ``TU_BUSY`` (UCX cannot be armed although nothing moves) or ``TU_MORE`` (not asked to arm, or
            there is more to do).
        """
        if self._delivering or self.handle is None:
            return lib.TU_MORE
        self._delivering = True
        self.progress_count += 1
        try:
            if self.batches.batches:
                self.batches.send_all()
            for _ in range(_ROUNDS):
                count = lib.tu_worker_progress_and_arm(self.handle, self._records, _BATCH, arm, self._armed)
                if count > 0:
                    self.deliver(self, self._view[: count * _FIELDS].tolist())
                elif self.failures:
                    self.deliver_failures(self)
                elif count < 0:
                    raise UCXError(Status.IO_ERROR, "arming the worker")
                else:
                    state: int = self._armed[0]
                    return state
            return lib.TU_MORE
        except BaseException as error:
            self.internal_error(error)
            return lib.TU_BUSY
        finally:
            self._delivering = False

    def take(self, function: Callable[[Any, Any, int], int]) -> bool:
        """Delivers what a function of C brings, and what follows from that; whether there was something."""
        if self._delivering or self.handle is None:
            return False
        self._delivering = True
        self._again = False
        self.progress_count += 1
        try:
            if self.batches.batches:
                self.batches.send_all()
            count = function(self.handle, self._records, _BATCH)
            if count > 0:
                self.deliver(self, self._view[: count * _FIELDS].tolist())
        except BaseException as error:
            self.internal_error(error)
            return False
        finally:
            self._delivering = False
        if self._again or self.failures:
            self.progress_and_deliver(arm=False)
        return count > 0

    def undisturbed(self, function: Callable[[], None]) -> bool:
        """Calls it, and delivers nothing meanwhile. Whether the engine is to progress now."""
        if self._delivering:
            function()
            return False
        self._delivering = True
        self._again = False
        try:
            function()
        finally:
            self._delivering = False
        return self._again

    def send_batches(self) -> None:
        """Sends the deferred batches, from where no task must be woken: Trio is about to look for events."""
        try:
            again = self.undisturbed(self.batches.send_all)
        except BaseException as error:
            again = True
            self.internal_error(error)
        if again:
            self.call_soon(self.wake)  # which also makes Trio look at what was woken all the same

    def news(self) -> int:
        """Grows whenever something arrives or completes."""
        return self.messages + self.counters["arrived"] + self.counters["completed"]

    def progress(self) -> None:
        """To be called after posting something that is pending: progresses the worker, and arms it if it was armed.

        If it was not, somebody is about to look at it: see ``arming.py``.
        """
        if self._delivering:
            self._again = True  # the delivery under way progresses once more
            return
        self.arming.handle(Event.POSTED)

    def serve_parked(self) -> bool:
        """Progresses once. Whether something arrived, and every task that was parked goes on."""
        return self.take(lib.tu_worker_look) and self.waiting.parked == self.waiting.woken and self.usable

    def readable(self) -> bool:
        """Whether the worker's descriptor is readable."""
        return bool(lib.tu_readable(self.efd))

    def signal(self) -> None:
        """Makes the worker's descriptor readable."""
        if self.handle is not None:
            lib.tu_worker_signal(self.handle)

    def wake(self) -> None:
        """Makes the progress task look."""
        self.arming.handle(Event.WAKE)

    def watch_events(self) -> None:
        """A task parks: lets the safety net look, and where tasks do not poll, the hook after Trio's waits."""
        self.safety_net.watch()
        self.arming.task_parks()

    def awaited(self) -> bool:
        """Whether anybody waits for anything that UCX would tell."""
        return bool(
            self.in_flight
            or self.pairs.idle
            or self.tag_dispatch.sinks
            or self.tag_dispatch.undiscarded
            or self.stream_watchers
            or any(waiters for waiters in self.am_waiters.values())
            or any(
                endpoint.stream_buffer is not None and endpoint.stream_buffer.awaited
                for endpoint in self.endpoints.values()
            )
        )

    def stuck(self) -> bool:
        """Whether UCX will refuse for ever to be armed, and there is nothing to progress for."""
        return self.queue_stopped and not self.awaited() and not self.listeners

    # ---- memory ----

    @property
    def uses_memory(self) -> bool:
        """Whether UCX may still use the memory of operations."""
        return bool(self.in_flight or self.unrecorded)

    def keep(self, id: int, what: object) -> None:
        """Keeps the memory of an operation that UCX has begun, when creating our object for it failed."""
        if id not in self.in_flight:
            self.unrecorded[id] = what

    # ---- internal errors ----

    def guard(self, function: Callable[[], None]) -> None:
        """Calls it where an exception would end the run: a bug in it breaks the worker instead."""
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

        def fail(operation: InFlight) -> None:
            operation.finish(Error(failure()))
            operation.detach()

        for operation in list(self.in_flight.values()):
            contained(fail, operation)
        contained(lambda: self.stream_watchers.fail(failure()))
        for tell in list(self.on_broken.values()):
            contained(lambda tell=tell: tell(failure()))
        for endpoint in list(self.endpoints.values()):
            contained(endpoint.worker_broke, error)

    # ---- system tasks: an exception that left one would end the run, so it ends the worker at most ----

    def spawn(self, function: Callable[[], Awaitable[object]], name: str) -> None:
        """Runs an async function in a system task; its errors break the worker."""

        async def run() -> None:
            try:
                await function()
            except Exception as error:
                self.internal_error(error)

        trio.lowlevel.spawn_system_task(run, name=name)

    def spawn_background(self, function: Callable[[], Awaitable[object]], name: str) -> bool:
        """Runs an async function, shielded, in a system task, for which closing the worker waits.

        Returns:
            False when the Trio run has ended too far for that.
        """
        marker = object()

        async def run() -> None:
            try:
                with trio.CancelScope(shield=True):
                    await function()
            except Exception as error:
                report(f"{name} failed", error)
            finally:
                self.background.discard(marker)
                if not self.background and self.background_ended is not None:
                    contained(self.background_ended.set)
                if self.usable:
                    contained(self.wake)  # the progress task may be waiting for the last background task

        try:
            trio.lowlevel.spawn_system_task(run, name=name)
        except RuntimeError:
            return False
        self.background.add(marker)
        return True

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls it in the worker's thread and run, from wherever (a destructor, say); not at all when that is over."""

        def call() -> None:
            if self.usable:
                self.guard(function)

        if self.birth.inherited:
            return
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            pass

    # ---- statistics ----

    def statistics(self) -> WorkerStatistics:
        if self.handle is None:
            self.birth.check("this worker")
            assert self.statistics_at_close is not None
            return self.statistics_at_close
        counts = ffi.new("tu_counts_t *")
        lib.tu_worker_counts(self.handle, counts)
        open_endpoints = sum(endpoint.handle is not None for endpoint in self.endpoints.values())
        return WorkerStatistics(
            operations_in_flight=len(self.in_flight),
            left_over_operations=self.detached,
            completed_operations=self.counters["completed"],
            endpoints=open_endpoints - self.pairs.idle,
            wakeups=self.counters["wakeups"],
            busy_arms=counts.arm_busy,
            backoffs=self.counters["backoffs"],
            missed_events=self.counters["missed_events"],
            progress_calls=counts.progress_calls,
            messages=self.messages,
            batches=self.counters["batches"],
            polls=counts.polls,
            polls_paid=counts.polls_paid,
            poll_seconds=counts.poll_nanoseconds / 1e9,
            poll_limit=counts.poll_limit / 1e9,
            background_closes=len(self.background),
            stopped_queues=self.counters["stopped_queues"],
        )
