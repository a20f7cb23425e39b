"""The engine: what makes a UCX worker move inside a Trio run.

Theory of operation
===================

UCX calls back only into C (``_native``), which appends records to a ring. :meth:`Engine.turn` makes one call into C
that progresses the worker until it is quiet, takes the records, and arms the worker's event descriptor; then it
delivers the records here, where they wake tasks. Nothing in a delivery runs user code.

*What calls it.* One system task per worker, the progress task (``progress.py``), waits for the descriptor with
``wait_readable`` and calls it whenever it wakes. A task that posts an operation which does not complete at once calls
:meth:`progress`, because posting to an armed worker can leave it with work and no event: it must be progressed and
armed again before every task sleeps. Waiting tasks poll before they park (``polling.py``). The module ``arming.py``
decides what progresses the worker next.

*Who owns memory.* The in-flight table maps the id of each operation to an :class:`Operation`, which pins the buffers
until the completion record arrives, whatever became of the task that posted it. UCX can cancel only a tag receive that
has not matched; any other operation whose task is cancelled stays in the table, *detached*.

*Lost events.* While something is awaited, a safety net looks once a second whether the worker has something to deliver
although its descriptor is silent, or the progress task has stepped aside. It should never find anything;
``statistics().missed_events`` counts.

*The end.* The progress task is a system task: Trio cancels it when the main task is done. It then lets the closes that
still go on in the background finish (each has its own deadline) and closes the worker. Closing by force needs no
progress task: it is a plain function, which async generators finalised after the system tasks still can call.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import trio
from outcome import Error

from ..._native import ffi, lib
from .. import _descriptors as descriptors
from .. import _shared_memory as shared_memory
from .._address import worker_address
from .._attributes import native_name, query_worker
from .._contained import contained, report
from .._context import Context, Feature
from .._forks import Birth
from .._live_handles import live_handles
from .._status import Status, UCXError, broken
from .arming import Arming, Event, Progress
from .backoff import Backoff
from .borrowed import Borrowed
from .data_ports import DataPorts
from .dispatch import FIELDS, deliver, deliver_failures
from .lingering import Lingering
from .numbering import Numbering
from .operations import EndpointCore, Operation, under_way
from .pending import Signal, Waiters
from .polling import DEFAULT_SPIN, Waiting
from .progress import ProgressTask
from .safety_net import SafetyNet
from .shutdown import dispose, drain, fail_everything, ignoring_late_run
from .statistics import WorkerStatistics, worker_statistics
from .system_tasks import spawn, spawn_background
from .tag_dispatch import TagDispatch

_BATCH = 256
#: Turns that one delivery takes before it lets other tasks run.
_ROUNDS = 8

assert tuple(Progress) == (lib.TU_MORE, lib.TU_ARMED, lib.TU_BUSY)

#: All that are open in this process, of whatever thread: to be looked at in a copy.
engines: set[Engine] = set()


def _nothing() -> None:
    pass


def _disown() -> None:
    """In a forked child: detaches everything from the parent's UCX, whose sockets and shared memory are here, too."""
    for engine in engines:
        engine.handle = None
        for core in engine.endpoints.values():
            core.handle = None


os.register_at_fork(after_in_child=_disown)


def _create_worker(context: Context, name: str | None, client_id: int | None) -> Any:
    doing = "opening a worker"
    descriptors.require(context.descriptors_per_worker, doing)
    out = ffi.new("tu_worker_t **")
    status = lib.tu_worker_create(context._native(), native_name(name), client_id or 0, out)
    if status != Status.OK:
        descriptors.require(context.descriptors_per_worker, doing)  # another thread may have taken the descriptors
        raise shared_memory.explain(status, "creating a worker")
    return out[0]


class Engine:
    """One UCX worker, moved by one Trio run."""

    def __init__(
        self,
        context: Context,
        name: str | None = None,
        client_id: int | None = None,
        *,
        spin: float = DEFAULT_SPIN,
        yield_interval: float = 0.0,
    ) -> None:
        self.context = context
        self.client_id = client_id
        self._token = trio.lowlevel.current_trio_token()
        self.handle: Any = _create_worker(context, name, client_id)  # None once closed
        self._thread = threading.get_ident()
        self.birth = Birth()
        self.efd = lib.tu_worker_efd(self.handle)
        with ExitStack() as undo:
            undo.callback(lib.tu_worker_destroy, self.handle)
            self._net = SafetyNet(self)
            undo.callback(self._net.close)
            self._backoff = Backoff(self.efd)
            undo.callback(self._backoff.close)
            self.max_am_header = min(query_worker(self.handle, client_id).max_am_header, context.longest_am_header)
            handles_errors = context.shared_memory_handles_errors
            self.address = worker_address(self.handle, shared_memory=handles_errors)
            #: The same without shared memory.
            self.network_address = worker_address(self.handle, shared_memory=handles_errors, network_only=True)
            self.data_ports = DataPorts(self.network_address.ucx)
            undo.pop_all()
        #: How often the worker was progressed.
        self.turns = 0
        self.waiting = Waiting(self, spin, yield_interval)
        self._progress_task = ProgressTask(self, self._net, self._backoff)
        self.batches = self._progress_task.before_wait
        self.arming = Arming(self, self._progress_task, polling=self.waiting.polling)
        self._records = ffi.new("tu_record_t[]", _BATCH)
        self._view = memoryview(ffi.buffer(self._records)).cast("Q")
        self._armed = ffi.new("int *")
        self.tag_dispatch = TagDispatch(self)
        self.received = ffi.new("tu_received_t *")
        self.in_flight: dict[int, Operation] = {}
        #: By id, the memory of operations that UCX has begun but that have no entry in flight: see :meth:`keep`.
        self.unrecorded: dict[int, object] = {}
        self.endpoints: dict[int, EndpointCore] = {}
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
        #: Memory that UCX lent and nobody will give back, because something still refers to it.
        self.overdue: list[Borrowed] = []
        #: Tasks that wait for a piece of any stream.
        self.stream_watchers = Waiters()
        #: Others to be told of an internal error; called with the exception for who waits.
        self.on_broken: dict[int, Callable[[Exception], None]] = {}
        #: Everything to be closed before the worker: called with no arguments, must not raise.
        self.children: dict[int, Callable[[], None]] = {}
        #: To be called when nothing is under way any more, just before the worker is destroyed.
        self.at_end: dict[int, Callable[[], None]] = {}
        #: The same, after that: lets go of what UCX may use as long as it has the worker.
        self.kept: list[Callable[[], None]] = []
        self.detached = 0
        #: Closes that go on after their task was cancelled.
        self.background: set[object] = set()
        self.background_ended: Signal | None = None
        self.counters: collections.Counter[str] = collections.Counter()
        #: Messages of Connections that arrived.
        self.messages = 0
        self.broken: BaseException | None = None
        #: Endpoints that failed, and why; told when what had arrived before is delivered.
        self.failures: list[tuple[int, int]] = []
        self._delivering = False
        #: Whether something was posted in a delivery, which has to be progressed.
        self._again = False
        self._closing = False
        self.unanswered = False
        #: What wakes it for delayed requests of chains.
        self.chain_timer: object | None = None
        #: Whether there were ever endpoints for atomics.
        self.has_companions = False
        self._next_id = 0
        self._stop: trio.CancelScope | None = None
        self.statistics_at_close: WorkerStatistics | None = None
        #: Called when the worker has been closed.
        self.on_closed: Callable[[], None] | None = None
        #: The numbers of its endpoints by worker address.
        self.numbering = Numbering()
        #: Whether UCX's endpoint configurations are used up: a worker has 255 in its life.
        self.is_full = False
        #: Whether the shared-memory queue has stopped (_receive_queue.py).
        self.queue_stopped = False
        #: Called when a process may have died that wrote to this worker over shared memory.
        self.suspect_queue: Callable[[], None] = _nothing
        #: Endpoints that are closed a moment later.
        self.lingering = Lingering(self.progress)
        live_handles.opened("worker")
        context.destroy_postponed()
        context.engines.add(self)
        engines.add(self)

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
        if self.handle is None or self._closing:
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

    # ---- turning ----

    def turn(self, arm: bool) -> int:
        """Progresses and delivers until nothing moves, then arms if asked to.

        Returns:
            ``TU_ARMED``, ``TU_BUSY`` (UCX cannot be armed although nothing moves) or ``TU_MORE`` (not asked to arm, or
            there is more to do).
        """
        if self._delivering or self.handle is None:
            return lib.TU_MORE
        self._delivering = True
        self.turns += 1
        try:
            if self.batches.batches:
                self.batches.send_batches()
            for _ in range(_ROUNDS):
                count = lib.tu_worker_turn(self.handle, self._records, _BATCH, arm, self._armed)
                if count > 0:
                    deliver(self, self._view[: count * FIELDS].tolist())
                elif self.failures:
                    deliver_failures(self)
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
        self.turns += 1
        try:
            if self.batches.batches:
                self.batches.send_batches()
            count = function(self.handle, self._records, _BATCH)
            if count > 0:
                deliver(self, self._view[: count * FIELDS].tolist())
        except BaseException as error:
            self.internal_error(error)
            return False
        finally:
            self._delivering = False
        if self._again or self.failures:
            self.turn(arm=False)
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
            again = self.undisturbed(self.batches.send_batches)
        except BaseException as error:
            again = True
            self.internal_error(error)
        if again:
            self.call_soon(self.wake)  # which also makes Trio look at what was woken all the same

    def news(self) -> int:
        """Grows whenever something arrives or completes."""
        return self.messages + self.counters["arrived"] + self.counters["completed"]

    def progress(self) -> None:
        """To be called after posting something that is pending: nobody sleeps on an unarmed worker."""
        if self._delivering:
            self._again = True  # the delivery under way takes another turn
            return
        self.arming.handle(Event.POSTED)

    def guard(self, function: Callable[[], None]) -> None:
        """Calls it where an exception would end the run: a bug in it breaks the worker instead."""
        try:
            function()
        except Exception as error:
            self.internal_error(error)

    @property
    def uses_memory(self) -> bool:
        """Whether UCX may still use the memory of operations."""
        return bool(self.in_flight or self.unrecorded)

    def keep(self, id: int, what: object) -> None:
        """Keeps the memory of an operation that UCX has begun, when creating our object for it failed."""
        if id not in self.in_flight:
            self.unrecorded[id] = what

    def internal_error(self, error: BaseException) -> None:
        """Marks the worker broken after an exception in our own code, and fails all waiting tasks.

        Never raises.
        """
        if self.broken is None:
            self.broken = error
            report("trio_ucx worker broke", error)
        contained(fail_everything, self, error)

    # ---- the tasks ----

    def start(self) -> None:
        self.spawn(self._run, f"trio_ucx progress (efd {self.efd})")
        self.spawn(self._net.run, f"trio_ucx safety net (efd {self.efd})")

    def spawn(self, function: Callable[[], Awaitable[object]], name: str) -> None:
        """See :func:`_system_tasks.spawn`."""
        spawn(self, function, name)

    async def _run(self) -> None:
        """The progress task."""
        self._stop = trio.CancelScope()
        try:
            with self._stop:
                try:
                    await self._progress_task.run_until(lambda: False)
                except trio.ClosedResourceError:
                    pass  # the worker was closed while we waited
                except Exception as error:
                    self.internal_error(error)
                if self.handle is not None:
                    self.arming.end()
                    await trio.sleep_forever()  # broken: nothing moves any more
        finally:
            # The run ends (or the worker was closed, and nothing of this does anything).
            if self.handle is not None and not self._closing:
                with trio.CancelScope(shield=True):
                    try:
                        if self.background:
                            await self._progress_task.run_until(lambda: not self.background)
                    finally:
                        await self.close()

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

    def stuck(self) -> bool:
        """Whether UCX will refuse for ever to be armed, and there is nothing to progress for."""
        return self.queue_stopped and not self._net.awaited() and not self.listeners

    def wake(self) -> None:
        """Makes the progress task look."""
        self.arming.handle(Event.WAKE)

    def watch_events(self) -> None:
        """A task parks: lets the safety net look, and where tasks do not poll, the hook after Trio's waits."""
        self._net.watch()
        self.arming.task_parks()

    def spawn_background(self, function: Callable[[], Any], name: str) -> bool:
        """See :func:`_system_tasks.spawn_background`."""
        return spawn_background(self, function, name)

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

    # ---- closing ----

    async def close_after_background(self) -> None:
        """Waits, shielded, for the closes that go on in the background (each has its own deadline), then closes."""
        try:
            with trio.CancelScope(shield=True):
                while self.background and self.usable and self.broken is None and self._stop is not None:
                    self.background_ended = Signal()
                    await self.background_ended.wait()
                await self.close()
        finally:
            self.close_now()
        await trio.lowlevel.checkpoint()

    async def close_after_lingering(self) -> None:
        """The same, and waits for endpoints that are closed a moment later."""
        await self.lingering.wait_ended()
        await self.close_after_background()

    async def close(self) -> None:
        """Closes everything by force and destroys the worker; waits shielded, for a bounded time."""
        if not self._begin_close():
            return
        for _ in drain(self):
            # Not a checkpoint in a shielded scope: Trio raises KeyboardInterrupt there, too, and we would never finish.
            await trio.lowlevel.cancel_shielded_checkpoint()
        self._finish_close()

    def close_now(self) -> None:
        """The same as a plain function."""
        if self._begin_close():
            for _ in drain(self):
                pass
            self._finish_close()

    def _begin_close(self) -> bool:
        if self.handle is None or self._closing:
            return False
        if not self.usable:
            self.handle = None  # after a fork: the parent's, to be left alone
            return False
        self._closing = True
        self.stream_watchers.fail(trio.ClosedResourceError("this worker was closed"))
        for close in list(self.children.values()):
            contained(close)
        for core in list(self.endpoints.values()):
            contained(core.close)
        for operation in list(self.in_flight.values()):
            contained(self._end, operation)
        return True

    def _end(self, operation: Operation) -> None:
        operation.finish(Error(trio.ClosedResourceError("this worker was closed")))
        operation.detach()
        lib.tu_operation_cancel(self.handle, operation.id)

    def _finish_close(self) -> None:
        self.statistics_at_close = self.statistics()
        for end in list(self.at_end.values()):
            contained(end)
        stuck = under_way(self.in_flight.values())
        for fd in (self.efd, self._net.timer, *self._backoff.descriptors):
            with ignoring_late_run():
                trio.lowlevel.notify_closing(fd)
        handle, self.handle = self.handle, None
        self.arming.end()
        self._backoff.close()
        self._net.close()
        if self._stop is not None:
            with ignoring_late_run():
                self._stop.cancel()
        live_handles.closed("worker")
        engines.discard(self)
        self.detached = 0
        dispose(self, handle, stuck)

    def statistics(self) -> WorkerStatistics:
        if self.handle is None:
            self.birth.check("this worker")
            assert self.statistics_at_close is not None
            return self.statistics_at_close
        return worker_statistics(self)
