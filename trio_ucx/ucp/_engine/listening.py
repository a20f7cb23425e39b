"""Who waits for a worker's descriptor, which UCX makes readable when something happens. One of three states:

``LED``     one task, the *leader*, waits for something, and for the descriptor itself: an event wakes only that task
``SERVED``  the progress task waits for the descriptor: several tasks wait, or none has waited for a while
``FREE``    nobody waits for it: a task has just got what it waited for, and will most probably wait again

Who waits for the descriptor *listens*. UCX announces events there only while the worker is *armed*, and any progress
disarms it. So whoever progresses the worker while another task listens arms it again, or makes the descriptor readable:
:meth:`Listening.progressed`. A task polls only while the worker is ``FREE``, and the progress task before it arms.

* A task that has to wait while the worker is ``FREE`` polls, and then leads if UCX can be armed. Otherwise it *parks*:
  the leader or the progress task wakes it, with what it waits for.
* Up to three tasks poll in turn, because one that finds its own message need not be woken. More park, and the progress
  task polls for all of them, because each task that polls makes all others wait for a round of Trio's loop.
* The leader goes on when it has what it waits for, or is cancelled; and when others are parked, or it has found what
  one of them waits for, because two tasks would run for each event of theirs. Then the progress task listens for those.
* The progress task polls and listens until every task that was parked goes on. Then the worker is ``FREE``, unless more
  than three tasks wait.
* Most programs have tasks that wait for long: for the next request, say. They are parked, and do not count while the
  last events were all for one other task (``serves_one``), which polls and leads as if it were alone, for them, too. If
  it does something else, and Trio is about to wait, a hook makes the progress task listen.
* A timer ends ``FREE`` when no task has come back since its last tick: the progress task listens. Meanwhile a peer may
  wait for something that needs no task here, a control frame or memory: for ``SHORT_TICK`` seconds at most. Where tasks
  come back sooner than two of these, so many ticks would cost too much, and the peer may wait for two long ones.

``tests/listening_model.py`` specifies this, and tries all orders.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

SHORT_TICK, LONG_TICK = 0.0005, 0.004
#: After so many events in a row for one task it is most probably the next one's, too.
IN_A_ROW = 8


class State(Enum):
    LED = auto()
    SERVED = auto()
    FREE = auto()
    ENDED = auto()


class Leads(Protocol):
    """What the leader waits for."""

    #: Its only element is true if it has got it.
    is_due: Any


class HeardEngine(Protocol):
    """The part of the engine that this module uses."""

    @property
    def is_moving(self) -> bool:
        """Returns True if UCX has operations that go on, for which it must be progressed."""

    def signal(self) -> None:
        """Makes the descriptor readable."""


class Ticks(Protocol):
    """What calls :meth:`Listening.ticked` until that returns False."""

    def start(self) -> bool:
        """Begins. Returns True if its ticks are short."""

    def cancel(self) -> None:
        """Ends it."""


class Listening:
    """The state of one worker.

    Args:
        resume: lets the progress task run in the next round.
        hook: calls :meth:`nobody_listens` before Trio's next wait.
        timer: calls :meth:`ticked`.
        always: the worker is never ``FREE``: Trio's clock jumps when no task is runnable, and real time may not pass.

    Attributes:
        most: how many tasks may poll in turn.
        in_a_row: after how many events for one task tasks that are parked do not count.
        leader: what the leader waits for.
        waiting: how many tasks wait: they poll, lead, are parked, or were woken and have not run since.
        parked: how many tasks are parked whom nobody has woken.
        wakes: how often a task was woken that was parked.
        listens: whether the progress task waits for the descriptor.
    """

    def __init__(
        self, engine: HeardEngine, resume: Callable[[], None], hook: Callable[[], None], timer: Ticks, *, always: bool
    ) -> None:
        self.most = 3
        self.in_a_row = IN_A_ROW
        self._engine = engine
        self._resume = resume
        self._hook = hook
        self._timer = timer
        self._always = always
        self.state = State.SERVED
        self.leader: Leads | None = None
        self.waiting = 0
        self.parked = 0
        self.wakes = 0
        self.listens = False
        #: What ``parked`` and ``wakes`` were before the progress task progressed.
        self._before = 0, 0
        #: Which task was woken last, and how many times in a row before.
        self._woken = 0
        self._times = 0
        #: Grows when a task comes back.
        self._returns = 0
        self._seen = 0
        self._ticks = False
        #: Whether the next tick is a short one: a leader cancels it, which would take too long at each message.
        self._short = False

    @property
    def heard(self) -> bool:
        """True if a task waits for the descriptor."""
        return self.listens or self.state is State.LED

    @property
    def are_many(self) -> bool:
        """True if so many tasks wait that the progress task polls and listens for all of them."""
        return self.waiting > self.most and not self.serves_one

    @property
    def serves_one(self) -> bool:
        """True if the last events were all for one task: others that are parked wait for longer, most probably."""
        return self._times >= self.in_a_row

    @property
    def _one_listens(self) -> bool:
        """True if that one may poll and lead for all. What UCX moves for others must not wait for it."""
        return self.serves_one and not self._engine.is_moving

    # ---- tasks ----

    def lead(self, leader: Leads) -> None:
        """The worker is armed, and a task waits for its descriptor from now on."""
        self.leader = leader
        self.state = State.LED
        if self._short:
            self._ticks = self._short = False
            self._timer.cancel()

    def stop_leading(self) -> None:
        self.leader = None
        if self.state is State.LED:
            self.state = State.FREE

    def go_on(self) -> None:
        """A task waits no more: it has got what it waited for, or was cancelled."""
        if self.state is State.FREE:
            if (self.parked and not self._one_listens) or self._always:
                self.serve()
            else:
                self.came_back()
                self._watch()

    def woken(self, task: object) -> None:
        """A task that was parked has got what it waits for."""
        self.parked -= 1
        self.wakes += 1
        number = id(task)
        self._times = self._times + 1 if number == self._woken else 0
        self._woken = number

    def _watch(self) -> None:
        if self.parked:
            self._hook()

    def one_left(self) -> None:
        """The task for which the worker was free has not come back: the next event may be another's."""
        if self.state is State.FREE:
            self._times = 0
            self.serve()

    def nobody_listens(self) -> bool:
        """Returns True if tasks are parked and nobody listens: before Trio waits, call :meth:`one_left`."""
        return self.state is State.FREE and self.parked > 0

    def came_back(self) -> None:
        """A task uses the worker, which is free."""
        self._returns += 1
        if not self._ticks:
            self._ticks = True
            self._seen = self._returns
            self._short = self._timer.start()

    def wake_leader(self) -> None:
        """The leader has got what it waits for, from somebody else."""
        self._engine.signal()

    # ---- the progress task ----

    def serve(self) -> None:
        """The progress task listens from now on, unless a task leads."""
        if self.state is State.FREE:
            self.state = State.SERVED
            self._resume()

    def serve_always(self) -> None:
        """The worker is not ``FREE`` any more: Trio's run ends, and with it the timer."""
        self._always = True
        self.serve()

    def begin(self) -> None:
        """The progress task is about to progress."""
        self._before = self.parked, self.wakes

    def may_be_free(self) -> bool:
        """True if the progress task need not listen, because of what it has found since :meth:`begin`."""
        parked, wakes = self._before
        go_on = self.parked == 0 or (self.wakes != wakes and self._one_listens)
        return parked > 0 and go_on and not self.are_many and self.state is State.SERVED and not self._always

    def be_free(self) -> None:
        """All tasks that were parked go on, or the one that most probably will be the next to be woken."""
        self.state = State.FREE
        self.came_back()
        self._watch()

    def ticked(self) -> bool:
        """Returns True if tasks have come back since the last call. Otherwise the worker is free no longer."""
        self._ticks, self._short = self._seen != self._returns, False
        self._seen = self._returns
        if not self._ticks:
            self.one_left()
        return self._ticks

    # ---- others ----

    def progressed(self, armed: bool) -> None:
        """Somebody who does not listen has progressed the worker while another task listens, and perhaps armed it."""
        if not armed or (self.leader is not None and self.leader.is_due[0]):
            self._engine.signal()

    def wake(self) -> None:
        """Something besides UCX needs the progress task."""
        if self.heard:
            self._engine.signal()
        else:
            self.serve()

    def end(self) -> None:
        """The worker is closed, or broken."""
        self.state = State.ENDED
        self.listens = False
