"""Arming: what a worker waits for, and what progresses it next. A state machine without I/O.

UCX announces events by a file descriptor, but only while the worker is *armed*. Arming succeeds when nothing is left to
do, and any progress disarms the worker. At most one task waits for the descriptor: the worker's progress task, or a
parked task of the program, the *leader*.

While messages flow, arming is wasted: tasks that wait poll (``waits.py``), and a task that has found what it waited for
will most probably wait again at once. So the worker stays disarmed meanwhile, and the progress task is suspended when
the descriptor becomes readable. :class:`Arming` decides this. It guarantees that nobody sleeps on a disarmed worker
that has work.

If a task parks in the state ``SUSPENDED``, it arms the worker and leads: it waits for the descriptor itself. It stops
leading when its wait ends, when its look wakes other tasks, or when the progress task must run. If only one task is
parked, an event wakes that task alone. Without a leader, the event would wake the progress task first, and the task one
round of Trio's loop later.

====================  =======================================================================================
State                 What progresses the worker next
====================  =======================================================================================
``ARMED``             the task that waits for the descriptor, when it becomes readable
``DISARMED``          tasks that poll or run; one more waits for the descriptor, which announces only some events
``SUSPENDED``         tasks that poll or run; the progress task waits to be resumed
``PROGRESSING``       the progress task, which runs, or will in the next round of Trio's loop
``BACKING_OFF``       the progress task, after a pause: UCX has work that it cannot do yet, and refuses to be armed
``ENDED``             tasks that wait, and calls that ask: there is no progress task any more
====================  =======================================================================================

Any progress disarms the worker, so ``ARMED`` becomes ``DISARMED`` by itself. These events cause the
other transitions:

============  ==========  ==========  ===========  =============  =============  ==========
Event         ``ARMED``   DISARMED    SUSPENDED    PROGRESSING    BACKING_OFF    ENDED
============  ==========  ==========  ===========  =============  =============  ==========
``POSTED``    --          defer       defer        --             defer          --
``ASKED``     arm         serve       serve        progress       progress       progress
``PARKS``     --          arm         lead         progress       progress       progress
``OVERDUE``   --          arm         resume       --             progress       --
``WAKE``      signal      signal      resume       --             --             --
``READABLE``  look        hand_over   --           --             --             --
``POLLED``    --          --          --           step_aside     --             --
``RUNS``      run         run         --           run            run            --
============  ==========  ==========  ===========  =============  =============  ==========

* *arm* progresses and arms: ``ARMED`` when that succeeds. Otherwise it makes the descriptor readable, and the progress
  task takes over: ``PROGRESSING``.
* *lead* progresses until something is delivered, and arms if nothing is: ``ARMED``, and the task that parks leads. If
  UCX refuses to be armed: *resume*. Otherwise the state stays, because the task will probably go on; if it does not,
  it sends ``OVERDUE``.
* *defer* leaves the worker as it is for a bounded time. *serve* progresses and delivers, then defers.
* *progress* progresses, and leaves the rest to the progress task, which will run soon.
* *resume* lets the progress task run in the next round: ``PROGRESSING``. *signal* does the same by the descriptor.
* *look* progresses once. When that lets every parked task go on, they will see to the rest: *step_aside*. Otherwise
  the progress task does: ``PROGRESSING``.
* *step_aside* leaves the worker disarmed for a bounded time: ``DISARMED`` if a task still waits for the descriptor,
  else ``SUSPENDED``.
* *hand_over* is *step_aside* where tasks poll; else *look*.
* *run* progresses and arms: ``ARMED`` when that succeeds; ``PROGRESSING`` when there is more to do at once, after a
  schedule point; ``BACKING_OFF`` when UCX refuses.

Posting progresses UCX, so ``POSTED`` never finds the worker ``ARMED``. What has arrived and completed by then is
not delivered yet: tasks that poll or park deliver it, or ``OVERDUE`` does. ``ASKED`` delivers at once.

``OVERDUE`` happens when something is deferred and Trio has nothing else to run. If other tasks keep running, it happens
when nothing has been delivered for ``DEFER_SECONDS`` and for ``MIN_DEFER_ROUNDS`` rounds, or for ``MAX_DEFER_SECONDS``.
(From one message to the next a task passes two rounds. These take longer than ``DEFER_SECONDS`` if another process has
the core.) A hook before Trio's waits notices this. The hook costs half a microsecond or more for each round of Trio's
loop; so when the only task that waits has come back ``RETURNS_UNTIL_TIMER`` times in a row, a timer replaces the hook,
and looks every ``TIMER_SECONDS``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from typing import Protocol

#: Seconds for which work may be deferred while other tasks run, and within which one message closely follows another.
#: More would save calls, but a receiver that polls for DEFAULT_SPIN should not have to park meanwhile.
DEFER_SECONDS = 75e-6
#: Rounds of Trio's loop without a delivery before arming is overdue, unless MAX_DEFER_SECONDS pass first.
MIN_DEFER_ROUNDS = 3
#: Seconds without a delivery after which arming is overdue, however few rounds have passed.
MAX_DEFER_SECONDS = 1e-3
#: Seconds between two looks of the timer that replaces the hook.
TIMER_SECONDS = 0.004
#: The timer replaces the hook when the only waiting task has come back more often than this in a row.
RETURNS_UNTIL_TIMER = 64
#: Idle rounds with nothing deferred, after which the hook before waits is removed. Not sooner, because adding it again
#: takes 10 microseconds.
IDLE_ROUNDS = 100


class ArmingState(IntEnum):
    """What progresses the worker next: see the table above."""

    ARMED = auto()
    DISARMED = auto()
    SUSPENDED = auto()
    PROGRESSING = auto()
    BACKING_OFF = auto()
    ENDED = auto()


#: The states in which deferred work becomes overdue.
_DEFERRED = ArmingState.DISARMED, ArmingState.SUSPENDED, ArmingState.BACKING_OFF


class Event(IntEnum):
    """What happens to a worker."""

    #: An operation was posted, is pending, and the worker was progressed for it.
    POSTED = auto()
    #: A call wants to know at once what has happened.
    ASKED = auto()
    #: A task is about to park.
    PARKS = auto()
    #: The worker was left disarmed, and no task will progress it soon.
    OVERDUE = auto()
    #: Something besides UCX needs the progress task.
    WAKE = auto()
    #: The progress task has waited for the descriptor, which is readable.
    READABLE = auto()
    #: A task polls, or has found something by polling: the progress task need not look.
    POLLED = auto()
    #: The progress task runs.
    RUNS = auto()


class Progress(IntEnum):
    """What became of progressing a worker."""

    #: There is more to do at once, or arming was not asked for.
    MORE = 0
    #: The descriptor announces the next event.
    ARMED = 1
    #: UCX refuses to be armed, although nothing moves.
    BUSY = 2


class ArmedWorker(Protocol):
    """The part of the engine that arming uses, for its UCX worker."""

    #: How often it was progressed.
    progress_count: int

    @property
    def delivery_count(self) -> int:
        """Returns how often it was progressed in order to deliver."""

    def progress_and_deliver(self, arm: bool, once: bool = False) -> int:
        """Progresses and delivers until nothing moves, then arms if asked to. Returns a :class:`Progress`.

        Args:
            once: whether to return as soon as something was delivered.
        """

    def serve_parked(self) -> bool:
        """Progresses the worker once. Returns True if something arrived, and every parked task goes on."""

    def signal(self) -> None:
        """Makes the descriptor readable."""


class Loop(Protocol):
    """The part of Trio's loop that arming uses."""

    def now(self) -> float:
        """Returns the time of a monotonic clock, in seconds."""

    def watch(self) -> None:
        """Calls :meth:`Arming.before_wait` in every round, until told otherwise."""

    def stop_watching(self) -> None:
        """Stops calling :meth:`Arming.before_wait`."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls a function in the next round."""

    def start_timer(self) -> None:
        """Calls :meth:`Arming.timer_ended` after TIMER_SECONDS seconds, if it is not going to already."""

    def resume(self) -> None:
        """Lets the progress task run in the next round if it is suspended."""


class Arming:
    """The state of one worker.

    Args:
        polling: whether tasks poll before they park.
        jumping: whether Trio's clock may jump when no task is runnable. Then Trio does not wait, and deferred work must
            not wait either.
    """

    def __init__(self, worker: ArmedWorker, loop: Loop, *, polling: bool, jumping: bool = False) -> None:
        self._worker = worker
        self._loop = loop
        self._polling = polling
        self._jumping = jumping
        #: ARMED stands for DISARMED, too, as long as a task waits for the descriptor.
        self._state = ArmingState.PROGRESSING
        #: Whether a task of the program waits for it, the leader. The progress task is then suspended.
        self.led = False
        #: Whether the progress task waits for it, or was woken by it and has not run yet.
        self._progress_task_waits = False
        #: The worker's ``progress_count`` when it was armed.
        self.armed_at = -1
        self._deferred = False
        #: How often in a row the only task that waits has come back; and whether the timer has replaced the hook.
        self._returns = 0
        self.steady = False
        self._timer_at = -1
        # The worker's delivery_count, when it was last seen to grow, and how many rounds ago.
        self._seen_count = 0
        self._seen_at = 0.0
        self._seen_rounds = 0
        # Rounds for which the hook was there in vain.
        self._idle = 0

    # ---- the state ----

    @property
    def state(self) -> ArmingState:
        """The worker's state."""
        if self._state is ArmingState.ARMED and self.armed_at != self._worker.progress_count:
            return ArmingState.DISARMED
        return self._state

    @property
    def armed(self) -> bool:
        """True if the descriptor announces every event, and a task waits for it."""
        return self.armed_at == self._worker.progress_count

    @property
    def awaits_descriptor(self) -> bool:
        """True if a task waits for the descriptor."""
        return self._state is ArmingState.ARMED

    def try_to_arm(self) -> bool:
        """Progresses the worker, and tries to arm it. Returns True if that succeeded.

        If no task waits for the descriptor, wakes the progress task and returns False.
        """
        if self._state is not ArmingState.ARMED:
            self.handle(Event.WAKE)
            return False
        self._arm()
        return self.armed

    def handle(self, event: Event) -> None:
        """Makes the transition for an event that has happened."""
        TRANSITIONS[self.state, event](self)

    # ---- transitions ----

    def _nothing(self) -> None:
        pass

    def _arm(self) -> None:
        if self._worker.progress_and_deliver(arm=True) == Progress.ARMED:
            self.armed_at = self._worker.progress_count
        elif self._state is not ArmingState.ENDED:
            self._state = ArmingState.PROGRESSING
            self._worker.signal()

    def _lead(self) -> None:
        result = self._worker.progress_and_deliver(arm=True, once=True)
        if result == Progress.ARMED:
            self._state = ArmingState.ARMED
            self.armed_at = self._worker.progress_count
            self.led = True
        elif result == Progress.BUSY:
            self._resume()

    def _signal(self) -> None:
        self._state = ArmingState.PROGRESSING
        self._worker.signal()

    def _progress(self) -> None:
        self._worker.progress_and_deliver(arm=False)

    def _serve(self) -> None:
        self._worker.progress_and_deliver(arm=False)
        self.defer()

    def _resume(self) -> None:
        self._state = ArmingState.PROGRESSING
        self._loop.resume()

    def _look(self) -> None:
        if self._worker.serve_parked():
            self._step_aside()
        else:
            self._state = ArmingState.PROGRESSING

    def _step_aside(self) -> None:
        # If a task still waits for the descriptor, SUSPENDED would let a second one wait for it.
        self._state = ArmingState.ARMED if self.led or self._progress_task_waits else ArmingState.SUSPENDED
        self.armed_at = -1
        self.defer()

    def _hand_over(self) -> None:
        if self._polling:
            self._step_aside()
        else:
            self._look()

    def _run(self) -> None:
        self._state = ArmingState.PROGRESSING
        result = self._worker.progress_and_deliver(arm=True)
        if self._state is not ArmingState.PROGRESSING:
            return  # ended meanwhile
        if result == Progress.ARMED:
            self._state = ArmingState.ARMED
            self.armed_at = self._worker.progress_count
        elif result == Progress.BUSY:
            self._state = ArmingState.BACKING_OFF

    # ---- the progress task ----

    def next_step(self) -> ArmingState:
        """The progress task runs. Returns what it waits for: never DISARMED."""
        if self.led:
            return ArmingState.SUSPENDED  # the progress task was interrupted while another task leads
        self.handle(Event.RUNS)
        self._progress_task_waits = self._state is ArmingState.ARMED
        return self._state

    def readable(self) -> None:
        """The progress task runs, because the descriptor was readable."""
        self._progress_task_waits = False
        self.handle(Event.READABLE)

    def interrupted(self) -> None:
        """The progress task was woken by something else than what it waited for."""
        self._progress_task_waits = False
        if self._state is not ArmingState.ENDED and not self.led:
            self._state = ArmingState.PROGRESSING
            self.armed_at = -1

    def end(self) -> None:
        """The progress task has ended, or the worker is closed."""
        self._state = ArmingState.ENDED
        self.armed_at = -1

    # ---- the leader ----

    @property
    def may_lead(self) -> bool:
        """True if the leader may wait for the descriptor again."""
        return self.led and self._state is ArmingState.ARMED

    def stop_leading(self) -> None:
        """The leader does not wait for the descriptor any more: the caller sees to it that arming is deferred."""
        if not self.led:
            return
        self.led = False
        if self._state is ArmingState.ARMED:
            self._state = ArmingState.SUSPENDED
            self.armed_at = -1
        elif self._state is ArmingState.PROGRESSING:
            self._loop.resume()

    # ---- deferring ----

    def defer(self) -> None:
        """Leaves the worker as it is, because a task will most probably come back at once."""
        if not self._deferred and not self.steady:
            self._deferred = True
            self.watch()

    def hurry(self) -> None:
        """Something waits to be delivered, or another task waits: the timer would look too late."""
        if self.steady:
            self.steady = False
            self._returns = 0

    def task_resumed(self, parked: int) -> None:
        """A waiting task goes on while the worker is not armed. ``parked``: how many others are parked."""
        alone = not parked and not self._jumping
        if alone and self.steady:
            return  # the timer looks at the worker
        self._returns = self._returns + 1 if alone else 0
        self.steady = self._returns > RETURNS_UNTIL_TIMER
        if self.steady:
            self._deferred = False
            self._loop.start_timer()
        else:
            self.defer()
        if self._polling and self._state is ArmingState.PROGRESSING:
            self.handle(Event.POLLED)

    def _overdue(self) -> None:
        """Schedules OVERDUE for the next round. Trio has decided how long it waits: no task may be woken here."""
        self._deferred = self.steady = False
        self._returns = 0
        self._loop.call_soon(lambda: self.handle(Event.OVERDUE))

    def watch(self) -> None:
        """Something is deferred: lets the hook before waits look at it."""
        self._idle = 0
        self._loop.watch()

    def before_wait(self, timeout: float, *, batches: bool) -> None:
        """Trio is about to wait for events, for at most ``timeout`` seconds.

        Args:
            batches: whether batches are deferred, which the hook serves, too.
        """
        if self._deferred:
            state = self.state
            if state not in _DEFERRED:
                self._deferred = False
            elif timeout > 0 or self._jumping or not self._delivered_lately():
                self._overdue()
        elif not batches and (self.steady or timeout > 0):
            self._idle += 1
            if self._idle > IDLE_ROUNDS:
                self._loop.stop_watching()

    def _delivered_lately(self) -> bool:
        """True if somebody has delivered lately what the worker had."""
        count = self._worker.delivery_count
        if count != self._seen_count:
            self._seen_count = count
            self._seen_at = self._loop.now()
            self._seen_rounds = 0
            return True
        self._seen_rounds += 1
        return self._loop.now() - self._seen_at <= (
            MAX_DEFER_SECONDS if self._seen_rounds < MIN_DEFER_ROUNDS else DEFER_SECONDS
        )

    def timer_ended(self) -> bool:
        """The timer that replaces the hook has ended. Returns True if it is to be started again."""
        count = self._worker.delivery_count
        state = self.state
        if self.steady and count != self._timer_at and state is not ArmingState.PROGRESSING:
            self._timer_at = count
            return True  # a task comes back all the time
        self.steady = False
        self._returns = 0
        if state in _DEFERRED:
            self._overdue()
        return False


def _rows() -> dict[Event, tuple[Callable[[Arming], None], ...]]:
    arm, defer, serve, progress = Arming._arm, Arming.defer, Arming._serve, Arming._progress
    signal, look, hand_over, step_aside = Arming._signal, Arming._look, Arming._hand_over, Arming._step_aside
    lead, run, resume, nothing = Arming._lead, Arming._run, Arming._resume, Arming._nothing
    return {  # ARMED, DISARMED, SUSPENDED, PROGRESSING, BACKING_OFF, ENDED
        Event.POSTED: (nothing, defer, defer, nothing, defer, nothing),
        Event.ASKED: (arm, serve, serve, progress, progress, progress),
        Event.PARKS: (nothing, arm, lead, progress, progress, progress),
        Event.OVERDUE: (nothing, arm, resume, nothing, progress, nothing),
        Event.WAKE: (signal, signal, resume, nothing, nothing, nothing),
        Event.READABLE: (look, hand_over, nothing, nothing, nothing, nothing),
        Event.POLLED: (nothing, nothing, nothing, step_aside, nothing, nothing),
        Event.RUNS: (run, run, nothing, run, run, nothing),
    }


#: The table at the top.
TRANSITIONS = {(state, event): row[state - 1] for event, row in _rows().items() for state in ArmingState}
