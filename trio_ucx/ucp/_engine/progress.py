"""What makes a worker progress when no task of the user's does it: a system task, a hook in Trio's loop, and a timer.

* :class:`ProgressTask` waits for the worker's descriptor, and progresses the worker, while that is ``SERVED``
  (``listening.py``).
* :class:`BeforeWait` bounds how long batches wait.
* :class:`SafetyNet` looks for events that UCX might have lost, does again what must be tried later, and ticks.
* :class:`ArmingPause` sleeps while UCX is busy without moving: it cannot be armed while a queue of shared memory is
  full, say.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic, perf_counter, thread_time
from typing import Protocol

import trio

from ..._native import lib
from ..._util.contained import ignoring_late_run
from .._quirks.descriptors import opened
from .._quirks.key_gate import KeyGate
from .endpoints_to_worker import EndpointsByWorker
from .links import WorkerLinks
from .listening import LONG_TICK, SHORT_TICK, State
from .tag_dispatch import TagDispatch
from .trio_run import HostedEngine, TrioRun
from .waits import AwaitedEngine, Waiting

#: Seconds of a pause. A queue of shared memory holds 2 MiB, which the peer takes in a few of the shortest ones.
_SHORTEST, _LONGEST = 0.00005, 0.002
#: After so many seconds in which nothing has moved, UCX will not become idle any more: it is busy for ever with what it
#: had for a peer that was killed. The pauses then grow to 0.1 s, and a message may be noticed that late.
_QUIET, _LONGEST_IF_QUIET = 1.0, 0.1
#: Seconds for which batches wait while other tasks run, and within which one message closely follows another. More
#: would save calls, but a receiver that polls for DEFAULT_SPIN should not have to park meanwhile.
DEFER_SECONDS = 75e-6
#: Rounds of Trio's loop without batches, after which the hook is removed. Not sooner, because adding it again takes 10
#: microseconds.
_IDLE_ROUNDS = 100
#: Seconds between two looks of the safety net. Programs that send once a second should not do so at the moment of
#: each look.
INTERVAL = 1.03
#: The longest wait for a processor, in seconds, in a look that counts: an event that arrives meanwhile was not missed.
INTERRUPTED = 0.0002


class ProgressingEngine(AwaitedEngine, HostedEngine, Protocol):
    """The part of the engine that this module uses."""

    watched: bool
    links: WorkerLinks
    endpoints_by_worker: EndpointsByWorker
    key_gate: KeyGate
    run: TrioRun
    tag_dispatch: TagDispatch
    waiting: Waiting

    def progress_and_deliver(self, arm: bool) -> int:
        """Progresses and delivers until nothing moves, then arms if asked to."""

    def awaited(self) -> bool:
        """True if a task or a queue waits for an event of UCX."""

    def progress_calls(self) -> int:
        """Returns how often the worker was progressed."""

    def events_seen(self) -> int:
        """Grows whenever something arrives or completes."""

    def reap(self) -> None:
        """Progresses the worker, and delivers what has arrived and completed."""

    def reap_soon(self) -> None:
        """Reaps in the next round of Trio's loop."""


class BeforeWait(trio.abc.Instrument):
    """Before Trio waits for events: sends batches, and has the progress task listen for parked tasks if nobody does.

    It is present only while it is needed. It must not make a task runnable without scheduling something, too, because
    Trio has decided already how long it waits.
    """

    def __init__(self, engine: ProgressingEngine) -> None:
        self._engine = engine
        self._present = False
        #: Rounds in which nobody needed it.
        self._idle = 0

    def watch(self) -> None:
        self._idle = 0
        if not self._present:
            self._present = True
            trio.lowlevel.add_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        engine = self._engine
        try:
            links = engine.links
            nobody_listens = engine.listening.nobody_listens()
            # 0.0 instead of 0: no task is runnable, and one waits for just that (trio.testing.wait_all_tasks_blocked).
            if nobody_listens and (timeout > 0 or type(timeout) is float):
                engine.run.call_soon(engine.listening.one_left)
            if not links.deferred:
                self._idle += not nobody_listens
                if self._idle > _IDLE_ROUNDS:
                    self._present = False
                    with suppress(KeyError):  # Trio drops an instrument that has raised
                        trio.lowlevel.remove_instrument(self)
            elif timeout > 0 or engine.run.clock_jumps or perf_counter() - links.since > DEFER_SECONDS:
                links.flush()
        except BaseException as error:  # Trio would drop this instrument
            engine.internal_error(error)
            engine.reap_soon()


def _waited() -> float:
    """Grows, in seconds, while this thread does not run."""
    return perf_counter() - thread_time()


async def wait_timer(engine: ProgressingEngine, timer: int) -> bool:
    """Waits until a timer of a worker's ends, and clears it. Returns False if the worker was closed."""
    while engine.handle is not None:
        try:
            await trio.lowlevel.wait_readable(timer)
        except trio.ClosedResourceError:
            return False
        if engine.handle is None:
            return False  # the descriptor may be another's
        if lib.tu_timer_ended(timer):  # else it was started again meanwhile, which must not be undone
            return True
    return False


class SafetyNet:
    """Looks, while something is awaited, whether a worker has something to deliver although its descriptor is silent.

    It also ticks for :class:`~.listening.Listening`, closes idle endpoints, shuts connections whose keys have ended,
    and discards messages for which there was no memory. The timer's time is real, not that of Trio's clock, which
    ``autojump_clock`` would jump.
    """

    def __init__(self, engine: ProgressingEngine) -> None:
        self._engine = engine
        self.timer = opened(lib.tu_timer_create(), "creating a worker's timer")
        #: Seconds until the next tick; 0.0: there are no ticks.
        self._tick_after = 0.0
        #: When the ticks began, or the last one was.
        self._ticked_at = 0.0
        #: When the next look is due; 0.0: never, because nothing is awaited.
        self._look_at = 0.0

    def watch(self) -> None:
        """Begins to look, because something is awaited."""
        self._engine.watched = True
        if not self._look_at:
            self._look_at = perf_counter() + INTERVAL
            if not self._tick_after:
                self._set_timer(INTERVAL)

    def start(self) -> bool:
        """Calls :meth:`Listening.ticked` from now on, until that returns False. Returns True if the ticks are short."""
        now = perf_counter()
        self._tick_after = LONG_TICK if now - self._ticked_at < 2 * SHORT_TICK else SHORT_TICK
        self._ticked_at = now
        self._set_timer(self._tick_after)
        return self._tick_after == SHORT_TICK

    def cancel(self) -> None:
        """Ends the ticks."""
        self._tick_after = 0.0
        self._set_timer(max(self._look_at - perf_counter(), 0.001) if self._look_at else INTERVAL)

    def _set_timer(self, seconds: float) -> None:
        if self._engine.handle is not None:  # else the descriptor is closed, and may be another's
            lib.tu_timer_set(self.timer, int(seconds * 1e9), False)

    async def run(self) -> None:
        engine = self._engine
        count = 0
        while await wait_timer(engine, self.timer):
            if engine.key_gate.has_ended:
                engine.guard(engine.key_gate.shut_ended)
            if self._tick_after:
                self._ticked_at = perf_counter()
                self._tick_after = LONG_TICK if engine.listening.ticked() else 0.0
            left = self._look_at - perf_counter()
            if self._look_at and left <= 0:
                engine.watched = engine.awaited()
                self._look_at = perf_counter() + INTERVAL if engine.watched else 0.0
                left = INTERVAL
                count = self._look(count)
            if self._tick_after or self._look_at:
                self._set_timer(self._tick_after or left)

    def _look(self, count: int) -> int:
        """Looks, and returns how often the worker was progressed so far. ``count``: what the last call returned."""
        engine = self._engine
        if engine.endpoints_by_worker.idle:
            engine.guard(engine.endpoints_by_worker.close_idle)
        if engine.tag_dispatch.undiscarded:
            engine.guard(engine.tag_dispatch.discard_again)
        # Only a worker that was quiet all the time since the last look can have missed something: in a busy one, what
        # is found now may have come just now.
        if self._look_at and engine.listening.heard and count == engine.progress_calls():
            began = _waited()
            before = engine.events_seen()
            engine.poll_and_deliver(partial(lib.tu_worker_look_unsignalled, engine.efd))
            if before != engine.events_seen() and _waited() - began < INTERRUPTED:
                engine.counters["missed_events"] += 1
            engine.reap()
        return engine.progress_calls() if engine.handle is not None else count

    def close(self) -> None:
        os.close(self.timer)


class ArmingPause:
    """Pauses that grow while nothing moves, in real time."""

    def __init__(self, efd: int) -> None:
        self._efd = efd
        self._timer = opened(lib.tu_timer_create(), "creating a worker's timer")
        try:
            #: Readable when the timer is, or the worker's descriptor.
            self._either = opened(lib.tu_wait_create(efd, self._timer), "creating a worker's epoll")
        except BaseException:
            os.close(self._timer)
            raise
        #: Seconds of the last sleep; 0 when UCX could be armed since.
        self.delay = 0.0
        #: What had moved at the last sleep, and the time since which nothing has.
        self._moved = 0
        self._since = 0.0

    @property
    def descriptors(self) -> tuple[int, int]:
        return self._timer, self._either

    async def sleep(self, moved: int) -> None:
        """Waits after progress in which nothing moved any more.

        Args:
            moved: a number that grows with each fragment that UCX sends or receives. A long message is many of them,
                and tells nothing else before its end.
        """
        now = monotonic()
        if moved != self._moved:
            self._moved, self._since, self.delay = moved, now, 0.0
        quiet = now - self._since > _QUIET
        self.delay = min(max(self.delay * 2, _SHORTEST), _LONGEST_IF_QUIET if quiet else _LONGEST)
        lib.tu_timer_set(self._timer, int(self.delay * 1e9), False)
        # An event may end the sleep; but one that is there already, and could not be armed away, may not.
        early = not lib.tu_readable(self._efd)
        await trio.lowlevel.wait_readable(self._either if early else self._timer)

    def close(self) -> None:
        for fd in (self._either, self._timer):
            os.close(fd)


class ProgressTask:
    """The progress task of one worker, with what else progresses it.

    Attributes:
        stop: ends the task; None before it runs.
        backs_off: whether UCX cannot be armed, although nothing moves.
    """

    def __init__(self, engine: ProgressingEngine) -> None:
        self._engine = engine
        self.stop: trio.CancelScope | None = None
        with ExitStack() as undo:
            self._backoff = ArmingPause(engine.efd)
            undo.callback(self._backoff.close)
            self.safety_net = SafetyNet(engine)
            undo.pop_all()
        self.before_wait = BeforeWait(engine)
        self._suspended: trio.lowlevel.Task | None = None
        #: When it ran last.
        self.began = perf_counter()
        self.backs_off = False

    @property
    def is_quiet(self) -> bool:
        """True if UCX has refused to be armed for a second in which nothing has moved."""
        return self.backs_off and self._backoff.delay > _LONGEST

    def resume(self) -> None:
        """Lets the task run in the next round if it is suspended."""
        task, self._suspended = self._suspended, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def run(self, *, ending: bool = False) -> None:
        """Returns when the worker is closed or broken; if ``ending``, also when no close goes on in the background."""
        engine = self._engine
        listening = engine.listening
        readable = False
        if ending:
            listening.serve_always()
        while engine.handle is not None and engine.broken is None and not (ending and not engine.run.background):
            self.began = perf_counter()
            if listening.state is not State.SERVED:
                readable = False
                self._suspended = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._leave)
                continue
            listening.begin()
            if readable:  # most often everybody goes on
                engine.poll_and_deliver(lib.tu_worker_look)
            state = lib.TU_MORE
            if not (readable and listening.may_be_free()):
                await engine.waiting.poll_for_parked()
                if not listening.may_be_free():
                    state = engine.progress_and_deliver(arm=True)
            readable = False
            if listening.may_be_free():
                listening.be_free()
            elif engine.handle is not None and engine.broken is None:
                readable = await self._wait(state)

    async def _wait(self, state: int) -> bool:
        """Waits for what the state of the worker asks for. Returns True if its descriptor is readable."""
        engine = self._engine
        if state == lib.TU_ARMED:
            self._backoff.delay = 0.0
            engine.listening.listens = True
            try:
                await trio.lowlevel.wait_readable(engine.efd)
            finally:
                engine.listening.listens = False
            engine.counters["wakeups"] += 1
            return True
        if state == lib.TU_BUSY:
            engine.counters["backoffs"] += 1
            self.backs_off = True
            try:
                await self._backoff.sleep(lib.tu_worker_moved(engine.handle))
            finally:
                self.backs_off = False
            return False
        await trio.lowlevel.checkpoint_if_cancelled()
        if lib.tu_poll_goes_on(engine.handle):
            await engine.waiting.poll_for_sequences()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return False

    def _leave(self, _: object) -> trio.lowlevel.Abort:
        self._suspended = None
        return trio.lowlevel.Abort.SUCCEEDED

    def close(self) -> None:
        """The worker is closed: ends what waits for its descriptors, and closes those that are ours."""
        for fd in (self._engine.efd, self.safety_net.timer, *self._backoff.descriptors):
            with ignoring_late_run():
                trio.lowlevel.notify_closing(fd)
        self._backoff.close()
        self.safety_net.close()
        if self.stop is not None:
            with ignoring_late_run():
                self.stop.cancel()
