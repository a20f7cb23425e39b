"""Things that finish once and that a task may wait for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import outcome
import trio
from outcome import Error, Outcome, Value

from .._contained import report

RaiseCancel = Callable[[], Any]


class Pending:
    """Something that finishes once, with a value or an error; at most one task waits for it.

    What happens when that task is cancelled is the subclass's to say, in :meth:`cancel`.
    """

    __slots__ = ("_raise_cancel", "_task", "expected", "notify", "on_wake", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome[Any] | None = None
        #: Called with this object when it finishes (request groups use it).
        self.notify: Callable[[Pending], None] | None = None
        self._task: trio.lowlevel.Task | None = None
        #: Whether a task looks for it, and will wait for it if that finds nothing.
        self.expected = False
        #: Called when a task that is parked for it was made runnable.
        self.on_wake: Callable[[], None] | None = None
        self._raise_cancel: RaiseCancel | None = None

    @property
    def awaited(self) -> bool:
        """Whether a task waits for it; no more, from the moment on in which that task is cancelled."""
        return self._task is not None or self.expected

    def finish(self, result: Outcome[Any]) -> None:
        if self.outcome is not None:
            return
        self.outcome = result
        task, self._task = self._task, None
        if task is not None:
            on_wake, self.on_wake = self.on_wake, None
            trio.lowlevel.reschedule(task, Value(None))
            if on_wake is not None:
                on_wake()
        notify, self.notify = self.notify, None
        if notify is not None:
            notify(self)

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
        """Called when ``cancel`` failed: ends what it belongs to. Never raises."""
        report("an internal error of trio_ucx, in a cancellation", error)

    def _abort_for_trio(self) -> trio.lowlevel.Abort:
        """The abort function. It must not raise, or Trio ends the run."""
        try:
            over = self.cancel()
        except BaseException as error:
            self.internal_error(error)
            over = self.outcome is None
        if not over:
            return trio.lowlevel.Abort.FAILED
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def result(self) -> Any:
        """What it finished with, as often as one likes (an Outcome can be unwrapped once)."""
        assert self.outcome is not None
        if isinstance(self.outcome, Error):
            raise self.outcome.error
        assert isinstance(self.outcome, Value)
        return self.outcome.value

    async def wait(self) -> Any:
        """Waits until it finishes; cancelling the wait cancels it. No schedule point if it has finished."""
        if self.outcome is not None:
            return self.result()
        self._task = trio.lowlevel.current_task()

        def abort(raise_cancel: RaiseCancel) -> trio.lowlevel.Abort:
            self._raise_cancel = raise_cancel
            return self._abort_for_trio()

        await trio.lowlevel.wait_task_rescheduled(abort)
        return self.result()

    async def watch(self) -> Any:
        """Waits until it finishes; cancelling the wait changes nothing about it."""
        if self.outcome is None:
            self._task = trio.lowlevel.current_task()

            def abort(_: RaiseCancel) -> trio.lowlevel.Abort:
                self._task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
            return self.result()
        await trio.lowlevel.checkpoint()
        return self.result()


class RequestCancelled(Exception):
    """This request of a group was cancelled, by ``request.cancel()`` or because its group was."""


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
        #: In order; a dict, because those who are cancelled leave from the middle.
        self._queue: dict[Signal, None] = {}

    def _first(self) -> Signal | None:
        while self._queue:
            first = next(iter(self._queue))
            if first.awaited:
                return first
            del self._queue[first]  # cancelled, but its task has not run yet: it must be given nothing
        return None

    def __bool__(self) -> bool:
        return self._first() is not None

    def _finish_first(self, result: Outcome[Any]) -> bool:
        first = self._first()
        if first is None:
            return False
        del self._queue[first]
        first.finish(result)
        return True

    def give(self, thing: Any) -> bool:
        """Gives it to the task that has waited longest; False when no task waits."""
        return self._finish_first(Value(thing))

    def fail(self, error: Exception) -> None:
        """Ends all waits with this error."""
        while self._finish_first(Error(error)):
            pass

    async def wait(self, wait: Callable[[Signal], Awaitable[Any]] = Signal.wait) -> Any:
        """Waits for a thing, with a worker's ``waiting.wait`` if it is in a hurry. Cancelling it loses none."""
        waiter = Signal()
        self._queue[waiter] = None
        try:
            return await wait(waiter)
        finally:
            self._queue.pop(waiter, None)
