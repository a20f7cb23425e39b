"""The engine: what makes a UCX worker move inside a Trio run.

Theory of operation
===================

UCX calls back only into C (``_native``), which appends records to a ring. :meth:`Engine.turn` makes one call into C
that progresses the worker until it is quiet, takes the records, and arms the worker's event descriptor; then it
delivers the records here, where they wake tasks. Nothing in a delivery runs user code.

*Who calls it.* One system task per worker, the progress task, sits in ``wait_readable(efd)`` and takes a turn whenever
it wakes. Besides, whoever posts an operation that does not complete at once takes a turn itself (:meth:`settle`),
because posting to an armed worker can leave it with work and no event: it must be progressed and armed again before
anybody sleeps. When that fails (UCX says BUSY), the progress task is woken and takes over.

*Who owns memory.* The in-flight table maps the id of each operation to an :class:`Operation`, which pins the buffers
until the completion record arrives, whatever became of the task that posted it. UCX can cancel only a tag receive that
has not matched; any other operation whose task is cancelled stays in the table, as *left over*.

*Lost events.* While something is awaited, a safety net looks once a second whether the worker has something to deliver
although its descriptor is silent. It should never find anything; ``statistics().missed_events`` counts.

*The end.* The progress task is a system task: Trio cancels it when the main task is done. It then lets the closes that
still go on in the background finish (each has its own deadline) and closes the worker. Closing by force needs no
progress task: it is a plain function, which async generators finalised after the system tasks still can call.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import trio
from outcome import Error

from .._native import ffi, lib, ucx
from ._address import worker_address
from ._answers import send_answers
from ._attributes import native_name, query_worker
from ._context import Context, Feature
from ._loans import Loan
from ._operations import EndpointCore, Operation, ReceiveOperation, live_handles, under_way
from ._pending import Signal, Waiters
from ._safety_net import SafetyNet
from ._statistics import WorkerStatistics
from ._status import Status, UCXError, broken
from ._util import warn_resource
from ._waiting import DEFAULT_SPIN, Waiting

logger = logging.getLogger("trio_ucx")

#: Tags with this bit set are Connections' messages, on a worker that has Connections: conn ids have it.
CONNECTION_BIT = 1 << 63

_FIELDS = lib.TU_RECORD_FIELDS
_OPERATION, _RUN = lib.TU_RECORD_OPERATION, lib.TU_RECORD_RUN
_BATCH = 256
#: Turns that one delivery takes before it lets other tasks run.
_ROUNDS = 8
#: How long closing a worker waits for UCX to let go of what is in flight.
DRAIN_TIMEOUT = 2.0
#: The same when every endpoint is closed: what is still pending then will hardly end.
STUCK_TIMEOUT = 0.1
#: From this version on, a worker can be destroyed while operations on closed endpoints are pending; 1.13 aborts.
STUCK_OPERATIONS_ARE_HARMLESS = (1, 17)
_MAX_BACKOFF = 0.002

#: All that are open in this process, of whatever thread: to be looked at in a copy.
engines: set[Engine] = set()

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Mailbox(Protocol):
    """Takes the messages of one connection."""

    def message_came(self, lane: int, handle: int, length: int) -> None:
        """A message arrived, and is UCX's until it is received."""

    def run_came(self, lane: int, count: int, length: int, data: bytes) -> None:
        """So many small messages of the same length arrived; none: one that had promised to be small was not."""


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
        out = ffi.new("tu_worker_t **")
        status = lib.tu_worker_create(context._native(), native_name(name), client_id or 0, out)
        if status != Status.OK:
            raise UCXError(status, "creating a worker")
        self.handle: Any = out[0]  # None once closed
        self._thread = threading.get_ident()
        self._forks = _forks
        self._token = trio.lowlevel.current_trio_token()
        self.efd = lib.tu_worker_efd(self.handle)
        self._net = SafetyNet(self)
        self.waiting = Waiting(self, spin, yield_interval)
        self._backoff_timer = lib.tu_timer_create()
        self._backoff_fd = lib.tu_wait_create(self.efd, self._backoff_timer)
        self._records = ffi.new("uint64_t[]", _BATCH * _FIELDS)
        self._view = memoryview(ffi.buffer(self._records)).cast("Q")
        self._armed = ffi.new("int *")
        self._arena = memoryview(ffi.buffer(lib.tu_worker_arena(self.handle), lib.TU_ARENA))
        #: Up to how many bytes the messages of Connections are received as they come.
        self._small = 0
        self.received = ffi.new("tu_received_t *")
        self.in_flight: dict[int, Operation] = {}
        self.endpoints: dict[int, EndpointCore] = {}
        #: What takes the messages of a connection id, while it is open.
        self.mailboxes: dict[int, Mailbox] = {}
        #: What takes the connection requests of a listener id.
        self.listeners: dict[int, Callable[[int], None]] = {}
        #: Whether tag messages may be used; asked so often that the context's flags are too slow.
        self.tags = Feature.TAG in context.features
        #: Ids of active messages that are taken, and by what.
        self.am_ids: dict[int, str] = {}
        self.max_am_header = min(query_worker(self.handle, client_id).max_am_header, context.longest_am_header)
        #: What takes the news that a queue of active messages is no longer empty, by its id.
        self.am_queues: dict[int, Callable[[], None]] = {}
        #: Who waits for active messages, by the queue's id.
        self.am_waiters: dict[int, Waiters] = {}
        #: Memory that UCX lent and nobody will give back, because something still refers to it.
        self.overdue: list[Loan] = []
        #: Who waits for a piece of any stream.
        self.stream_watchers = Waiters()
        self.on_hello: Callable[[int, bytes], None] | None = None
        #: Others to be told of an internal error; called with the exception for who waits.
        self.on_broken: dict[int, Callable[[Exception], None]] = {}
        #: Everything to be closed before the worker: called with no arguments, must not raise.
        self.children: dict[int, Callable[[], None]] = {}
        #: To be called when nothing is under way any more, just before the worker is destroyed.
        self.at_end: dict[int, Callable[[], None]] = {}
        self.left_over = 0
        #: Closes that go on after their task was cancelled.
        self.background: set[object] = set()
        self.background_ended: Signal | None = None
        self.counters: collections.Counter[str] = collections.Counter()
        self.broken: BaseException | None = None
        self._failures: list[tuple[int, int]] = []
        self._delivering = False
        #: Whether something was posted in a delivery, which has to be progressed.
        self._again = False
        #: Whether the descriptor says when there is something to do.
        self.armed = False
        self.turns = 0
        self.parked = False
        self._closing = False
        self.unanswered = False
        #: Whether there were ever endpoints for atomics.
        self.has_companions = False
        self._next_id = 0
        self._stop: trio.CancelScope | None = None
        self.statistics_at_close: WorkerStatistics | None = None
        #: Called when the worker has been closed.
        self.on_closed: Callable[[], None] | None = None
        self.address = worker_address(self.handle)
        live_handles.opened("worker")
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
        if self._forks != _forks:
            raise RuntimeError(
                "this worker was opened before a fork: UCX does not survive forks. Open a worker in the child process "
                "(start it with the multiprocessing method 'spawn')"
            )
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "this worker belongs to another thread: open a worker in each thread that runs Trio, or use "
                "trio.from_thread.run"
            )
        if self.handle is None or self._closing:
            raise trio.ClosedResourceError("this worker was closed")
        if self.broken is not None:
            raise broken(f"this worker broke: {self.broken!r}", self.broken)

    @property
    def usable(self) -> bool:
        return self.handle is not None and self._forks == _forks and self._thread == threading.get_ident()

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # ---- turning ----

    def turn(self, arm: bool, *, leave_to_woken: bool = False) -> int:
        """Progresses and delivers until nothing moves, then arms if asked to.

        With ``leave_to_woken``, only until tasks are woken: they will see to the rest, and are wanted first.

        Returns:
            ``TU_ARMED``, ``TU_BUSY`` (UCX cannot be armed although nothing moves) or ``TU_MORE`` (not asked to arm, or
            there is more to do).
        """
        if self._delivering or self.handle is None:
            return lib.TU_MORE
        self._delivering = True
        self.armed = False
        self.turns += 1
        try:
            for _ in range(_ROUNDS):
                count = lib.tu_worker_turn(self.handle, self._records, _BATCH, arm, self._armed)
                if count > 0:
                    self._deliver(self._view[: count * _FIELDS].tolist())
                    if leave_to_woken and self.waiting.woken:
                        return lib.TU_MORE
                elif self._failures:
                    self._deliver_failures()
                elif count < 0:
                    raise UCXError(Status.IO_ERROR, "arming the worker")
                else:
                    state: int = self._armed[0]
                    self.armed = state == lib.TU_ARMED
                    return state
            return lib.TU_MORE
        except BaseException as error:
            self._break(error)
            return lib.TU_BUSY
        finally:
            self._delivering = False

    def poll(self) -> bool:
        """Polls as long as that pays; whether something was delivered."""
        if self._delivering or self.handle is None:
            return False
        self._delivering = True
        self._again = self.armed = False
        self.turns += 1
        try:
            count = lib.tu_poll(self.handle, self._records, _BATCH)
            if count > 0:
                self._deliver(self._view[: count * _FIELDS].tolist())
        except BaseException as error:
            self._break(error)
            return False
        finally:
            self._delivering = False
        if self._again or self._failures:
            self.turn(arm=False)
        return count > 0

    def _deliver(self, rows: list[int]) -> None:
        for start in range(0, len(rows), _FIELDS):
            kind, id, status, length, tag, pointer = rows[start : start + _FIELDS]
            if kind == _OPERATION:
                self.in_flight.pop(id).complete(-status, length, tag)
            elif kind == _RUN:
                self.counters["messages"] += id
                self.counters["arrived"] += 1
                mailbox = self.mailboxes.get(tag >> 32)
                if mailbox is not None:
                    data = self._arena[pointer : pointer + id * length].tobytes()
                    mailbox.run_came(tag & 0xFFFFFFFF, id, length, data)
            elif kind == lib.TU_RECORD_MESSAGE:
                self.counters["messages"] += 1
                self.counters["arrived"] += 1
                mailbox = self.mailboxes.get(tag >> 32)
                if mailbox is None:
                    self.discard_message(pointer)
                else:
                    mailbox.message_came(tag & 0xFFFFFFFF, pointer, length)
            elif kind == lib.TU_RECORD_FAILURE:
                self._failures.append((id, -status))  # after the messages that had arrived by then
            elif kind == lib.TU_RECORD_REQUEST:
                listener = self.listeners.get(id)
                assert listener is not None, "a listener's requests end before the listener"
                listener(pointer)
            elif kind == lib.TU_RECORD_HELLO:
                memory = ffi.cast("void *", pointer)
                hello = bytes(ffi.buffer(memory, length)) if length else b""
                lib.free(memory)
                if self.on_hello is not None:
                    self.on_hello(id, hello)
            elif kind == lib.TU_RECORD_AM:
                self.counters["arrived"] += 1
                announce = self.am_queues.get(id)
                if announce is not None:
                    announce()
            elif kind == lib.TU_RECORD_STREAM:
                self._deliver_piece(id, pointer, length)
            elif kind == lib.TU_RECORD_CUT:
                self._failures.append((id, -status))

    def _deliver_piece(self, id: int, pointer: int, length: int) -> None:
        self.counters["arrived"] += 1
        core = self.endpoints.get(id)
        if core is None or core.handle is None:
            lib.tu_stream_release(self.handle, pointer)
            return
        core.stream_inbox().arrived(pointer, length)
        while self.stream_watchers.give(None):
            pass

    def _deliver_failures(self) -> None:
        failures, self._failures = self._failures, []
        for id, status in failures:
            core = self.endpoints.get(id)
            if core is not None:
                core.fail(UCXError(status, f"talking to {core.label}{self.context.reach_hint(status)}"))

    def settle(self) -> None:
        """To be called after posting something that is pending: nobody sleeps on an unarmed worker."""
        if self._delivering:
            self._again = True  # the delivery under way takes another turn
            return
        state = self.turn(arm=self.parked)
        if self.parked and state != lib.TU_ARMED and self.handle is not None:
            lib.tu_worker_signal(self.handle)

    def guard(self, function: Callable[[], None]) -> None:
        """Calls it where an exception would end the run: a bug in it breaks the worker instead."""
        try:
            function()
        except Exception as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """An internal error: everything that waits is told, nothing more is promised."""
        if self.broken is None:
            logger.error("trio_ucx worker broke", exc_info=error)
            self.broken = error
        for operation in list(self.in_flight.values()):
            operation.finish(Error(broken(f"the worker broke: {error!r}", error)))
            operation.leave_over()
        self.stream_watchers.fail(broken(f"the worker broke: {error!r}", error))
        for tell in list(self.on_broken.values()):
            tell(broken(f"the worker broke: {error!r}", error))
        for core in list(self.endpoints.values()):
            callback, core.on_failure = core.on_failure, None
            if core.error is None:
                core.error = UCXError(Status.IO_ERROR, f"the worker broke: {error!r}")
                core.error.__cause__ = error
            if callback is not None:
                callback()

    # ---- the tasks ----

    def start(self) -> None:
        trio.lowlevel.spawn_system_task(self._run, name=f"trio_ucx progress (efd {self.efd})")
        trio.lowlevel.spawn_system_task(self._net.run, name=f"trio_ucx safety net (efd {self.efd})")

    async def _run(self) -> None:
        """The progress task."""
        self._stop = trio.CancelScope()
        try:
            with self._stop:
                await self._progress_until(lambda: False)
                await trio.sleep_forever()  # broken: nothing moves any more
        except trio.ClosedResourceError:
            pass  # the worker was closed while we waited
        finally:
            # The run ends (or the worker was closed, and nothing of this does anything).
            if self.handle is not None and not self._closing:
                with trio.CancelScope(shield=True):
                    try:
                        if self.background:
                            await self._progress_until(lambda: not self.background)
                    finally:
                        await self.close()

    async def _progress_until(self, finished: Callable[[], bool]) -> None:
        delay = 0.0
        while self.handle is not None and not finished():
            state = self.turn(arm=True, leave_to_woken=True)
            if self.handle is None or finished():
                return
            if self.broken is not None:
                return
            if state == lib.TU_ARMED or (state == lib.TU_MORE and self.waiting.woken):
                delay = 0.0
                await self._park(self.efd)
                self.counters["wakeups"] += 1
            elif state == lib.TU_MORE:
                await trio.lowlevel.checkpoint()
            else:
                # UCX is busy without moving, as long as a shared-memory queue is full, say. Sleep in real time.
                delay = min(max(delay * 2, 0.0001), _MAX_BACKOFF)
                self.counters["backoffs"] += 1
                lib.tu_timer_set(self._backoff_timer, int(delay * 1e9), 0)
                # An event may end the sleep; but one that is there already, and could not be armed away, may not.
                early = not lib.tu_readable(self.efd)
                await trio.lowlevel.wait_readable(self._backoff_fd if early else self._backoff_timer)

    async def _park(self, fd: int) -> None:
        self.parked = True
        try:
            await trio.lowlevel.wait_readable(fd)
        finally:
            self.parked = False

    def watch_events(self) -> None:
        """Something is awaited: let the safety net look."""
        self._net.watch()

    def arm_soon(self) -> None:
        """The worker is not armed; nobody waits for anything in particular."""
        self._net.arm_soon()

    def awaited(self) -> bool:
        """Whether anybody waits for anything that UCX would tell."""
        return bool(
            self.in_flight
            or self.mailboxes
            or self.stream_watchers
            or any(waiters for waiters in self.am_waiters.values())
            or any(core.inbox is not None and core.inbox.awaited for core in self.endpoints.values())
        )

    def spawn_background(self, function: Callable[[], Any], name: str) -> bool:
        """Runs an async function that outlives its caller. False when the run is too far gone for that."""
        marker = object()

        async def run() -> None:
            try:
                with trio.CancelScope(shield=True):
                    await function()
            except Exception:
                logger.exception("%s failed", name)
            finally:
                self.background.discard(marker)
                if not self.background and self.background_ended is not None:
                    self.background_ended.set()
                if self.usable:
                    lib.tu_worker_signal(self.handle)  # the progress task may be waiting for the last of them

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

        if self._forks != _forks:
            return
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            pass

    # ---- the messages of Connections ----

    def claim_messages(self, tag_bit: int) -> None:
        """From now on, messages whose tag has this bit go to mailboxes."""
        self._small = lib.TU_SMALL_MESSAGE
        lib.tu_worker_claim_messages(self.handle, tag_bit, self._small)

    def expect_rendezvous(self, threshold: int) -> None:
        """A peer sends messages from so many bytes on in a way that keeps them with it until they are received."""
        if threshold <= self._small:
            self._small = threshold - 1
            lib.tu_worker_claim_messages(self.handle, CONNECTION_BIT, max(self._small, 0))

    def discard_message(self, message: int) -> None:
        """Takes a message off UCX's hands and throws it away."""
        verdict = lib.tu_message_receive_one(self.handle, message, ffi.NULL, 0, lib.TU_MEMORY_HOST, self.received)
        if verdict > 0:
            ReceiveOperation(self, verdict, None, "discarding a message").leave_over()

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

    async def close(self) -> None:
        """Closes everything by force and destroys the worker; waits shielded, for a bounded time."""
        if not self._begin_close():
            return
        with trio.CancelScope(shield=True):
            for _ in self._drain():
                await trio.lowlevel.checkpoint()
        self._finish_close()

    def close_now(self) -> None:
        """The same as a plain function."""
        if self._begin_close():
            for _ in self._drain():
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
            close()
        for core in list(self.endpoints.values()):
            core.close()
        for operation in list(self.in_flight.values()):
            operation.finish(Error(trio.ClosedResourceError("this worker was closed")))
            operation.leave_over()
            lib.tu_operation_cancel(self.handle, operation.id)
        return True

    def _drain(self) -> Iterator[None]:
        """Progresses until nothing is in flight, yielding in between; gives up after DRAIN_TIMEOUT of real time."""
        start = time.monotonic()
        self.turn(arm=False)
        while self.in_flight and time.monotonic() < start + (DRAIN_TIMEOUT if self.endpoints else STUCK_TIMEOUT):
            yield
            time.sleep(0.0002)
            self.turn(arm=False)
        # Then what nobody asked for. (Messages of Connections are taken by every turn.)
        while self.tags and (message := lib.tu_tag_probe(self.handle, 0, 0, 1, self.received)):
            self.discard_message(message)
            if time.monotonic() > start + DRAIN_TIMEOUT:
                break
        yield
        self.turn(arm=False)
        yield from send_answers(self, STUCK_TIMEOUT)

    def _finish_close(self) -> None:
        self.statistics_at_close = self.statistics()
        for end in list(self.at_end.values()):
            end()
        stuck = under_way(self.in_flight.values())
        for fd in (self.efd, self._net.timer, self._backoff_timer, self._backoff_fd):
            with _ignoring_late_run():
                trio.lowlevel.notify_closing(fd)
        handle, self.handle = self.handle, None
        for fd in (self._backoff_fd, self._backoff_timer):
            os.close(fd)
        self._net.close()
        if self._stop is not None:
            with _ignoring_late_run():
                self._stop.cancel()
        live_handles.closed("worker")
        engines.discard(self)
        self.left_over = 0
        if self.unanswered or not all(loan.ended for loan in self.overdue):
            _abandoned.append((self, handle))  # somebody looks at UCX's memory, and was warned
        elif not self.in_flight or (not self.endpoints and ucx.version >= STUCK_OPERATIONS_ARE_HARMLESS):
            # A receive whose sender died in the middle of a message never completes, nor does a send to the full
            # shared-memory queue of a receiver that died. With every endpoint closed, nothing but this worker's own
            # progress could still touch their buffers, and that ends here.
            lib.tu_worker_destroy(handle)
            for operation in self.in_flight.values():
                if operation.pins is not None:
                    operation.pins.release()
            self.in_flight.clear()
            self.context.released(self)
            if self.on_closed is not None:
                self.on_closed()
        else:
            _abandoned.append((self, handle))  # UCX may still touch those buffers: keep them for ever
            warn_resource(f"a UCX worker was left alone, {len(self.in_flight)} operation(s) did not end{stuck}")

    def statistics(self) -> WorkerStatistics:
        if self.handle is None:
            assert self.statistics_at_close is not None
            return self.statistics_at_close
        counts = ffi.new("tu_counts_t *")
        lib.tu_worker_counts(self.handle, counts)
        return WorkerStatistics(
            operations_in_flight=len(self.in_flight),
            left_over_operations=self.left_over,
            completed_operations=self.counters["completed"],
            endpoints=len(self.endpoints),
            wakeups=self.counters["wakeups"],
            busy_arms=counts.arm_busy,
            backoffs=self.counters["backoffs"],
            missed_events=self.counters["missed_events"],
            progress_calls=counts.progress_calls,
            messages=self.counters["messages"],
            polls=counts.polls,
            polls_paid=counts.polls_paid,
            poll_seconds=counts.poll_nanoseconds / 1e9,
            poll_limit=counts.poll_limit / 1e9,
            background_closes=len(self.background),
        )


_abandoned: list[Any] = []


@contextmanager
def _ignoring_late_run() -> Iterator[None]:
    """Trio calls that only matter while a run goes on."""
    try:
        yield
    except RuntimeError:
        pass
