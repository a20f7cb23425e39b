"""A model of who waits for a worker's descriptor, and who is owed a wake-up. Pure, and small enough to try all orders.

It is the specification of ``ucp/_engine/listening.py``. A worker is in one of three states:

``LED``     one task, the *leader*, waits for its message and for the descriptor itself: an event wakes only that task
``SERVED``  the progress task waits for the descriptor: several tasks wait, or none has waited for a while
``FREE``    nobody waits for it: a task has just taken its message, and will probably wait again; a timer ends the state

Who waits for the descriptor *listens*. UCX announces events there only while the worker is *armed*, and any progress
disarms it. So:

* Progress on an armed worker must be followed by arming, or by running the progress task. A task that looks or polls
  does neither: it progresses only while the worker is ``FREE``. The progress task may poll, too, before it arms.
* A task that finds nothing leads if the worker is ``FREE``, UCX can be armed, and few tasks wait. Otherwise it queues a
  *token*, and parks: whoever listens makes the token *due*, which wakes the task.
* The leader gets its message, or is cancelled. Then the progress task listens if anybody waits; else the worker is
  ``FREE``. A leader that finds that others have parked, or a message for them, parks, too.
* The progress task goes on while somebody waits whose token is not due, or many wait; else the worker is ``FREE``.
* While the last tokens that became due were all of one task, the others that are parked do not count: that task polls
  and leads as if it were alone, and the progress task leaves the worker ``FREE`` when it has made its token due.
* ``FREE`` ends by the timer, and by a hook of Trio's when all sleep and one is parked: the progress task listens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import attrs

#: What a task does: it computes; it will look; it polls, and will again; it leads; it has parked; its token is due.
IDLE, LOOKS, POLLS, LEADS, PARKED, DUE = "idle", "looks", "polls", "leads", "parked", "due"
#: What the progress task does.
SUSPENDED, RUNS, LISTENS = "suspended", "runs", "listens"


@attrs.define
class Worker:
    """A worker, its progress task, and the tasks that wait for one message each, again and again.

    Attributes:
        left: how many messages will still arrive for each task.
        starts, polls, cancels, refusals: how many more times a task starts to wait, polls, and is cancelled, and UCX
            refuses to be armed.
        most: how many tasks may wait before the progress task listens for all.
        in_a_row: how often one task alone must have been woken again before those that are parked do not count.
        woken, times: the task that was woken last, and how often it was woken again.
        gap: the task whose message arrives the next time between the last progress and arming, which is not announced
            (InfiniBand); -1: none.
        pending, queued: what UCX has for each task, and what is in its queue.
    """

    tasks: list[str]
    left: list[int]
    starts: int
    polls: int
    cancels: int
    refusals: int
    gaps: int
    most: int = 3
    in_a_row: int = 8
    pending: list[int] = attrs.field(init=False)
    queued: list[int] = attrs.field(init=False)
    gap: int = -1
    refuses: bool = False
    armed: bool = False
    readable: bool = False
    progress_task: str = RUNS
    timer: bool = False
    woken: int = -1
    times: int = 0

    def __attrs_post_init__(self) -> None:
        self.pending = [0] * len(self.tasks)
        self.queued = [0] * len(self.tasks)

    @property
    def leader(self) -> int | None:
        return self.tasks.index(LEADS) if LEADS in self.tasks else None

    @property
    def free(self) -> bool:
        return self.leader is None and self.progress_task == SUSPENDED

    @property
    def many(self) -> bool:
        return sum(doing != IDLE for doing in self.tasks) > self.most and not self.serves_one

    @property
    def serves_one(self) -> bool:
        return self.times >= self.in_a_row

    @property
    def waits_for_parked(self) -> bool:
        """True if others than the task that is woken again and again must be listened for."""
        return PARKED in self.tasks and not self.serves_one

    # ---- UCX ----

    def progress(self) -> bool:
        """Puts what UCX has into the queues, and makes tokens due. Returns True if there was something."""
        self.armed = False
        moved = any(self.pending)
        for task, count in enumerate(self.pending):
            self.queued[task] += count
            self.pending[task] = 0
            if self.queued[task] and self.tasks[task] == PARKED:
                self.tasks[task] = DUE
                self.times = min(self.times + 1, self.in_a_row) if task == self.woken else 0
                self.woken = task
        return moved

    def arm(self) -> bool:
        """Progresses until nothing is left, and arms. Returns False if UCX is busy."""
        self.progress()
        if self.refuses:
            self.refuses = False
            return False
        if self.gap >= 0:
            self.pending[self.gap], self.gap = self.pending[self.gap] + 1, -1
        self.progress_after_arming()
        self.armed, self.readable = True, False
        return True

    def progress_after_arming(self) -> None:
        """As ``arming.c`` does where events can get lost; what it finds, it looks at, and arms again."""
        self.progress()

    # ---- the rules ----

    def look(self, task: int) -> None:
        """A task that waits has its turn."""
        if self.take(task):
            self.go_on()
        elif not self.free:
            self.tasks[task] = PARKED
        elif self.many:
            self.park(task)
        else:
            self.look_harder(task)

    def look_harder(self, task: int) -> None:
        self.tasks[task] = LOOKS
        self.progress()
        polls = self.polls > 0 and not self.queued[task]
        armed = False
        if polls:
            self.polls -= 1
            self.tasks[task] = POLLS
        elif not self.queued[task]:
            armed = self.arm()
        if self.take(task):
            self.go_on()
        elif armed:
            self.tasks[task] = LEADS
        elif not polls:
            self.park(task)

    def park(self, task: int) -> None:
        self.tasks[task] = PARKED
        self.serve()

    def take(self, task: int) -> bool:
        if self.queued[task]:
            self.queued[task] -= 1
            self.tasks[task] = IDLE
            return True
        return False

    def go_on(self) -> None:
        """A task goes on with its message, or was cancelled."""
        if self.leader is not None or self.progress_task != SUSPENDED:
            return  # somebody listens
        if self.waits_for_parked:
            self.serve()
        else:
            self.timer = True

    def serve(self) -> None:
        self.progress_task = RUNS

    def lead(self, task: int) -> None:
        """The leader was woken by the descriptor."""
        before = self.tasks.count(DUE)
        self.progress()
        if self.take(task):
            self.go_on()
        elif self.tasks.count(DUE) > before or self.waits_for_parked or not self.arm():
            self.park(task)
        elif self.take(task):
            self.go_on()

    def run_progress_task(self) -> None:
        waited = self.tasks.count(PARKED)
        polls = waited > 0 and self.progress_task == RUNS and self.polls > 0
        if polls:
            self.polls -= 1
            self.progress()
        armed = not polls and self.arm()
        parked = self.tasks.count(PARKED)
        if waited and (parked == 0 or (self.serves_one and parked < waited)) and not self.many:
            self.progress_task = SUSPENDED
            self.timer = True
        elif armed:
            self.progress_task = LISTENS
        else:
            self.progress_task = RUNS

    def cancelled(self, task: int) -> None:
        self.tasks[task] = IDLE
        self.go_on()

    def hooked(self) -> None:
        self.times = 0
        self.serve()

    def timer_ended(self) -> None:
        self.timer = False
        if self.free:
            self.times = 0
            self.serve()

    # ---- what may happen next ----

    def must(self) -> Iterator[tuple[str, int]]:
        """What Trio does soon, in any order."""
        for task, doing in enumerate(self.tasks):
            if doing in (LOOKS, POLLS, DUE) or (doing == LEADS and self.readable):
                yield "run", task
        if self.progress_task == RUNS or (self.progress_task == LISTENS and self.readable):
            yield "progress", 0
        elif self.free and PARKED in self.tasks and not any(doing in (LOOKS, POLLS, DUE) for doing in self.tasks):
            yield "hook", 0

    def may(self) -> Iterator[tuple[str, int]]:
        """What programs, peers and the clock may do."""
        for task, doing in enumerate(self.tasks):
            if doing == IDLE and self.starts:
                yield "start", task
            if self.left[task]:
                yield "arrive", task
                if self.gaps and self.gap < 0:
                    yield "arrive in the gap", task
            if doing in (LOOKS, POLLS, LEADS, PARKED) and self.cancels:
                yield "cancel", task
        if self.refusals and not self.refuses:
            yield "refuse", 0
        if self.timer:
            yield "timer", 0

    def after(self, what: str, task: int) -> Worker:
        """Returns the worker after this."""
        new = copy.copy(self)
        for name in ("tasks", "left", "pending", "queued"):
            setattr(new, name, list(getattr(self, name)))
        if what == "run":
            (new.lead if new.tasks[task] == LEADS else new.look)(task)
        elif what == "progress":
            new.run_progress_task()
        elif what == "hook":
            new.hooked()
        elif what == "start":
            new.starts -= 1
            new.tasks[task] = LOOKS
        elif what == "arrive":
            new.left[task] -= 1
            new.pending[task] += 1
            new.readable = new.readable or new.armed
        elif what == "cancel":
            new.cancels -= 1
            new.cancelled(task)
        elif what == "arrive in the gap":
            new.gaps -= 1
            new.left[task] -= 1
            new.gap = task
        elif what == "refuse":
            new.refusals -= 1
            new.refuses = True
        else:
            new.timer_ended()
        return new

    def key(self) -> tuple[object, ...]:
        return tuple(tuple(value) if isinstance(value, list) else value for value in attrs.astuple(self, recurse=False))
