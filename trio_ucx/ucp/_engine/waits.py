"""What a task waits for, and how: it polls for a moment before it parks.

:class:`Pending` finishes once, and a task may wait for it: an operation, or a :class:`Signal`. :class:`Waiters` are
tasks that wait for things of one kind. :class:`Waiting` is how the tasks of one worker wait for what UCX will report.

Waking a task takes longer than most answers, so a task that has to wait polls in C first, or the progress task polls
for all who are parked (``listening.py`` says which). They poll only while no task has work to do: the schedule point
before the poll was short. Every call owes Trio a schedule point anyway, and other runnable tasks run during it.

C code decides for how long a task polls (``adaptive_poll.c``): the time grows while polling finds something, and
polling stops while it does not. Each millisecond the poll is interrupted by a schedule point, for Trio's deadlines and
signals.

A task that has polled in vain leads or parks (``listening.py``).
"""

from __future__ import annotations

import collections
import math
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, Protocol

import outcome
import trio
from outcome import Error, Outcome, Value

from ..._native import lib
from ..._util.arguments import check_timeout
from ..._util.contained import report
from .listening import Leads, Listening, State

RaiseCancel = Callable[[], Any]

#: The default of ``spin``, in seconds: three times what it costs to wake a task.
DEFAULT_SPIN = 100e-6
#: Its limit, in seconds: a task that waits in vain uses a core for so long.
MOST_SPIN = 1.0
#: Seconds. A schedule point takes 3 to 10 microseconds by itself; a longer one includes the work of other tasks.
_ALONE = 25e-6
#: Seconds. A schedule point between these two limits may have included the progress task only, or a delay of the
#: machine: another one is measured, up to so many in all.
_SURELY_OTHERS = 100e-6
_MEASURED = 3
#: Rounds of Trio's loop before the progress task polls: two at least, because in the first one a task that it has woken
#: may run later than it. More while it polls in vain; after so many polls that have paid, it tries with one less.
_MOST_ROUNDS, _TRY_LESS = 5, 100
#: They say that something has ended, and are raised again by the next call: a cancellation may come before them. Any
#: other error is the outcome of one operation, which may have used up a message, and is raised once.
_ENDED = (trio.ClosedResourceError, trio.BrokenResourceError, trio.EndOfChannel)


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # this frame is in its traceback, and would keep it alive


#: What Pending.is_due is before and after it has finished.
_NOT_DUE, _DUE = (False,), (True,)
_FREE = State.FREE


class Waited(Protocol):
    """What a task may wait for: see :class:`Pending`."""

    #: Its only element says whether the task may go on.
    is_due: Any
    expected: bool
    parked_at: Listening | None
    since: float
    _task: trio.lowlevel.Task | None

    async def wait(self, *, watch: bool = False) -> Any:
        """Parks."""

    async def cancel_for_leader(self, error: BaseException) -> bool:
        """Its leader was cancelled or interrupted. Returns False if ``error`` is to be raised."""

    def result(self) -> Any:
        """Returns what the task gets."""


class Pending:
    """Something that finishes once, with a value or an error; at most one task waits for it.

    What happens when that task is cancelled is the subclass's to say, in :meth:`cancel`.
    """

    __slots__ = ("_raise_cancel", "_task", "expected", "is_due", "notify", "outcome", "parked_at", "since")

    #: When the last task parked for it; not set if none has.
    since: float

    def __init__(self) -> None:
        self.outcome: Outcome[Any] | None = None
        #: Its only element says whether it has finished.
        self.is_due: Any = _NOT_DUE
        #: Called with this object when it finishes (request groups use it).
        self.notify: Callable[[Pending], None] | None = None
        self._task: trio.lowlevel.Task | None = None
        #: Whether a task looks for it, and will wait for it if that finds nothing.
        self.expected = False
        #: Where a task is parked for it, or leads.
        self.parked_at: Listening | None = None
        self._raise_cancel: RaiseCancel | None = None

    @property
    def awaited(self) -> bool:
        """True if a task waits for this. A cancelled task no longer waits.

        The leader is an exception: until it runs, it can still get a value, or an error that is raised only once.
        """
        return self._task is not None or self.expected

    def finish(self, result: Outcome[Any]) -> None:
        if self.outcome is not None:
            return
        task, self._task = self._task, None
        at = self.parked_at if task is not None else None  # else it was cancelled, and its task has not run yet
        led = at is not None and at.leader is self
        try:
            if led:
                at.wake_leader()  # type: ignore[union-attr]
            elif task is not None:
                trio.lowlevel.reschedule(task, Value(None))
        except BaseException:
            self._task = task  # it still waits, and can be cancelled
            raise
        self.outcome, self.is_due = result, _DUE
        if task is not None and not led:
            if at is not None:
                self.parked_at = None
                at.woken(task)
            if type(result) is Error:  # isinstance takes longer with these classes
                self.reported(result.error)
        notify, self.notify = self.notify, None
        if notify is not None:
            notify(self)

    def reported(self, error: BaseException) -> None:
        """Called when the user gets this error, perhaps twice.

        (A task that polls, and the leader, may get a cancellation instead. For these only :meth:`result` calls this.)
        """

    def finish_cancelled(self) -> None:
        """Finishes with the exception that the abort function was given for a cancellation."""
        assert self._raise_cancel is not None
        self.finish(outcome.capture(self._raise_cancel))

    def cancel(self) -> bool:
        """Ends the operation if that can be done at once, or leaves it to the library. Never raises.

        Returns:
            True when the wait ends now, as cancelled; False when the completion is at hand, and the waiting task gets
            that instead.
        """
        raise NotImplementedError

    def internal_error(self, error: BaseException) -> None:
        """Called when :meth:`cancel` failed: ends what this Pending belongs to. Never raises."""
        report("an internal error of trio_ucx, in a cancellation", error)

    def try_to_cancel(self) -> bool:
        """Calls :meth:`cancel`; if that fails, ends what this Pending belongs to."""
        try:
            return self.cancel()
        except BaseException as error:
            self.internal_error(error)
            return self.outcome is None

    def _abort_for_trio(self, raise_cancel: RaiseCancel) -> trio.lowlevel.Abort:
        """The abort function. It must not raise, or Trio ends the run."""
        self._raise_cancel = raise_cancel
        if not self.try_to_cancel():
            return trio.lowlevel.Abort.FAILED
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    @property
    def has_ended(self) -> bool:
        """True if it has finished with an error that the next call raises again."""
        return isinstance(self.outcome, Error) and isinstance(self.outcome.error, _ENDED)

    async def cancel_for_leader(self, error: BaseException) -> bool:
        """Cancels this Pending after its leader was cancelled or interrupted, if it has not finished.

        Returns:
            True if the task gets the outcome. (A KeyboardInterrupt is then raised again at the next checkpoint.) False
            if ``error`` is to be raised, also instead of an error in ``_ENDED``.
        """
        if self.outcome is None:
            self._raise_cancel = partial(_raise, error)
            try:
                if self.try_to_cancel():
                    return False
                if self.outcome is None:
                    self._task = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
            finally:
                self._raise_cancel = None
        elif self.has_ended:
            return False
        raises_error = isinstance(self.outcome, Error) and self.outcome.error is error
        if isinstance(error, KeyboardInterrupt) and not raises_error:
            signal.raise_signal(signal.SIGINT)  # Trio raises KeyboardInterrupt again at the next checkpoint
        return True

    def result(self) -> Any:
        """Returns what it finished with, as often as one likes (an Outcome can be unwrapped once)."""
        if type(self.outcome) is Value:
            return self.outcome.value
        assert isinstance(self.outcome, Error)
        self.reported(self.outcome.error)
        raise self.outcome.error

    async def wait(self, *, watch: bool = False) -> Any:
        """Waits until it finishes. No schedule point if it has finished.

        Cancelling the wait cancels it; with ``watch``, it changes nothing about it.
        """

        def leave(_: RaiseCancel) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        if self.outcome is None:
            self.since = perf_counter()
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(leave if watch else self._abort_for_trio)
        return self.result()


class Signal(Pending):
    """A Pending without an operation behind it: somebody calls :meth:`finish`."""

    __slots__ = ()

    def cancel(self) -> bool:
        return True

    def set(self) -> None:
        self.finish(Value(None))


class Waiters:
    """Tasks that wait for things of one kind, first come, first served."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        #: In order; a dict, because cancelled tasks leave from the middle.
        self._queue: dict[Signal, None] = {}

    def __bool__(self) -> bool:
        return any(waiter.awaited for waiter in self._queue)

    def _take_first(self) -> Signal | None:
        while self._queue:
            first = next(iter(self._queue))
            del self._queue[first]
            if first.awaited:
                return first  # else it was cancelled, and its task has not run yet: it must be given nothing
        return None

    def give(self, thing: Any) -> bool:
        """Gives a thing to the task that has waited longest. Returns False if no task waits."""
        first = self._take_first()
        if first is not None:
            first.finish(Value(thing))
        return first is not None

    def fail(self, error: Exception) -> None:
        """Ends all waits with this error."""
        while (first := self._take_first()) is not None:
            first.finish(Error(error))

    async def wait(self, wait: Callable[[Signal], Awaitable[Any]] = Signal.wait) -> Any:
        """Waits for a thing. A cancelled wait takes none.

        Args:
            wait: how. A worker's ``waiting.wait`` polls before it parks.
        """
        waiter = Signal()
        self._queue[waiter] = None
        try:
            return await wait(waiter)
        finally:
            self._queue.pop(waiter, None)


def check_spin(spin: float | None) -> float:
    if spin is None:
        return DEFAULT_SPIN
    spin = check_timeout(spin, "spin")
    if spin > MOST_SPIN:
        raise ValueError(f"spin must be at most {MOST_SPIN} seconds, not {spin}: polling uses a whole core")
    return spin


def check_yield_interval(yield_interval: float) -> float:
    yield_interval = check_timeout(yield_interval, "yield_interval")
    if yield_interval == math.inf:
        raise ValueError("yield_interval must be finite: other tasks would never run")
    return yield_interval


class AwaitedLinks(Protocol):
    """The links of Connections."""

    #: Its first element is true when there is something to settle.
    news: Any

    def settle(self) -> None:
        """Wakes tasks whose tokens are due."""


class AwaitedEngine(Protocol):
    """The part of the engine that waiting tasks use."""

    handle: Any
    efd: int
    links: AwaitedLinks
    listening: Listening
    broken: BaseException | None
    counters: collections.Counter[str]
    #: Whether the safety net looks.
    watched: bool

    def arm(self, leader: Leads) -> bool:
        """Delivers what is there until that is due; if nothing is, arms. Returns False if that cannot be done."""

    def look(self) -> None:
        """Progresses once, and delivers what has arrived."""

    def poll_and_deliver(self, function: Callable[[Any, Any, int], int]) -> bool:
        """Calls a function of C, and delivers the records that it brings. Returns True if there were any."""

    def watch_events(self) -> None:
        """Makes the safety net look, because something is awaited."""


class Waiting:
    """How the tasks of one worker wait."""

    __slots__ = ("_engine", "_hits", "_rounds", "_yield_interval", "_yielded", "polled", "polling", "slept")

    def __init__(self, engine: AwaitedEngine, spin: float, yield_interval: float) -> None:
        self._engine = engine
        self.polling = spin > 0
        lib.tu_poll_bound(engine.handle, int(spin * 1e9))
        self._yield_interval = yield_interval
        #: Whether the last wait was more than a look.
        self.slept = False
        #: Whether the last wait ended while its task polled: a cancellation that came meanwhile is not known yet.
        self.polled = False
        #: When a task last passed a schedule point.
        self._yielded = 0.0
        self._rounds = 2
        self._hits = 0

    async def schedule_point(self) -> None:
        """Lets other tasks run, if this has not been done for the ``yield_interval``. No cancel point."""
        if self._yield_interval:
            if self._yielded_lately():
                return
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._yielded = perf_counter()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def _yielded_lately(self) -> bool:
        # If another task passed that schedule point, ours has run since, so it yielded later.
        return perf_counter() - self._yielded < self._yield_interval

    def look(self) -> bool:
        """Progresses the worker once for a task that is about to wait, so that the task need not park.

        Does nothing if somebody listens. Where no schedule point is due, polls instead, if polling has been paying.

        Returns:
            True if something was delivered.
        """
        listening = self._engine.listening
        if listening.state is not _FREE:
            return False
        listening.came_back()
        polls = self._yield_interval and self.polling and self._yielded_lately()
        return self._engine.poll_and_deliver(lib.tu_poll_at_once if polls else lib.tu_worker_look)

    async def wait(self, pending: Waited, *, watch: bool = False) -> Any:
        """Waits for something pending. A schedule point, unless one was passed within the ``yield_interval``.

        If the wait is cancelled, so is ``pending``; with ``watch``, ``pending`` goes on.
        """
        engine = self._engine
        listening = engine.listening
        listening.waiting += 1
        pending.expected = self.slept = True
        self.polled = False
        try:
            if listening.state is _FREE and not listening.are_many:
                if self.polling and lib.tu_poll_begin(engine.handle):
                    await self._poll(pending)
                if listening.state is _FREE and not pending.is_due[0]:
                    await self._lead(pending, watch)
            if not pending.is_due[0]:
                await self._park(pending, watch)
        finally:
            pending.expected = False
            listening.waiting -= 1
            listening.go_on()
        return pending.result()

    async def _poll(self, pending: Waited) -> None:
        engine = self._engine
        listening = engine.listening
        while await self._alone() and listening.state is _FREE:
            listening.came_back()
            found = not pending.is_due[0] and engine.poll_and_deliver(lib.tu_poll)
            if pending.is_due[0] or not (found or lib.tu_poll_continues(engine.handle)):
                break
            if trio.current_effective_deadline() == -math.inf:
                break  # cancelled: waiting raises that
            self._yielded = 0.0  # whatever the yield_interval: tasks that go on, deadlines and signals wait
        if isinstance(pending, Pending) and pending.has_ended:
            await trio.lowlevel.checkpoint_if_cancelled()  # as a parked task, which gets the cancellation first
        self.polled = pending.is_due[0]

    async def poll_for_parked(self) -> None:
        """For the progress task: polls for tasks that are parked, as long as that pays."""
        engine = self._engine
        listening = engine.listening
        woken = listening.waiting - listening.parked
        polls = listening.parked > 0 and self.polling and lib.tu_poll_begin(engine.handle)
        while polls and await self._all_wait(woken) and not listening.may_be_free():
            listening.begin()
            parked = listening.parked
            found = engine.poll_and_deliver(lib.tu_poll)
            self._found(found)
            if engine.handle is None or listening.may_be_free():
                break
            woken = parked - listening.parked
            polls = (lib.tu_poll_begin if found else lib.tu_poll_continues)(engine.handle)

    def _found(self, found: bool) -> None:
        """The progress task has polled. If that was in vain, a task may have had work that needed another round."""
        if found:
            self._hits += 1
        if not found or self._hits == _TRY_LESS:
            self._hits = 0
            self._rounds = max(self._rounds - 1, 2) if found else min(self._rounds + 1, _MOST_ROUNDS)

    async def _all_wait(self, woken: int) -> bool:
        """Lets tasks run that go on. Returns True if no other seems to have work, and the worker is open."""
        for _ in range(self._rounds):
            began = perf_counter()
            await trio.lowlevel.cancel_shielded_checkpoint()
            if perf_counter() - began > _ALONE * (1 + 2 * woken):
                return False
        return self._engine.handle is not None

    async def poll_for_sequences(self) -> None:
        """For the progress task: polls once for sequences (``native.h``) that go on while their tasks are parked.

        A schedule point, as :meth:`wait` is.
        """
        if await self._alone():
            self._engine.poll_and_deliver(lib.tu_poll)

    async def _alone(self) -> bool:
        """Passes a schedule point, unless one was passed lately. Returns True if no other task seems to have work."""
        if self._yield_interval and self._yielded_lately():
            return True
        took = 0.0
        for _ in range(_MEASURED):
            began = perf_counter()
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._yielded = perf_counter()
            took = self._yielded - began
            if took < _ALONE or took > _SURELY_OTHERS:
                break
        engine = self._engine
        # While others wait, they may have polled in that time.
        if took >= _ALONE and engine.listening.waiting - engine.listening.parked == 1 and engine.handle is not None:
            lib.tu_poll_pause(engine.handle)
        return took < _ALONE

    async def _park(self, pending: Waited, watch: bool) -> None:
        """Waits until somebody else finds what this task waits for."""
        engine = self._engine
        listening = engine.listening
        engine.watch_events()
        listening.parked += 1
        pending.parked_at = listening
        try:
            listening.serve()
            pending.expected = False
            await pending.wait(watch=watch)
        finally:
            if pending.parked_at is not None:  # nobody has woken this task
                pending.parked_at = None
                listening.parked -= 1
            if self._yield_interval:
                self._yielded = perf_counter()

    async def _lead(self, pending: Waited, watch: bool) -> None:
        """Waits for the descriptor, for which this task arms the worker.

        Returns when ``pending`` has finished, or when the progress task must listen.
        """
        engine = self._engine
        listening = engine.listening
        if not engine.arm(pending) or listening.state is not _FREE:
            if pending.is_due[0]:
                self.slept = False
                await self.schedule_point()
            return
        if not engine.watched:
            engine.watch_events()
        pending.since = perf_counter()
        task = trio.lowlevel.current_task()
        listening.lead(pending)
        try:
            while True:
                pending.parked_at, pending._task = listening, task
                try:
                    await trio.lowlevel.wait_readable(engine.efd)
                finally:
                    pending.parked_at = pending._task = None
                engine.counters["wakeups"] += 1
                if pending.is_due[0] or engine.handle is None or engine.broken is not None:
                    return
                wakes = listening.wakes
                engine.look()
                if pending.is_due[0]:
                    return
                if engine.links.news[0]:
                    engine.links.settle()
                others = listening.wakes != wakes or (listening.parked > 0 and not listening.serves_one)
                if pending.is_due[0] or others or not engine.arm(pending):
                    return
        except (trio.Cancelled, KeyboardInterrupt) as error:
            listening.stop_leading()
            listening.serve()  # UCX may have to complete what is cancelled
            if (watch and not pending.is_due[0]) or not await pending.cancel_for_leader(error):
                raise
        except (OSError, trio.ClosedResourceError):
            pass  # the progress task will get the same error; or the worker was closed, and pending has finished
        finally:
            listening.stop_leading()
            if self._yield_interval:
                self._yielded = perf_counter()
