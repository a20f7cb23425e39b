"""The states of a worker (``ucp/_engine/arming.py``), with a simulated worker, loop and clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_ucx.ucp._engine import arming as _arming
from trio_ucx.ucp._engine.arming import (
    DEFER_SECONDS,
    IDLE_ROUNDS,
    MAX_DEFER_SECONDS,
    MIN_DEFER_ROUNDS,
    RETURNS_UNTIL_TIMER,
    TIMER_SECONDS,
    TRANSITIONS,
    Arming,
    ArmingState,
    Event,
    Progress,
)

#: Seconds that a sleeping loop may take to notice work: the timer and a pause, and some for rounds.
BOUND = 2 * TIMER_SECONDS + 0.01
PAUSE = 0.002


class Lost(AssertionError):
    """Everybody sleeps, and the worker has work."""


@attrs.define(eq=False)
class World:
    """A worker, and a loop in which tasks wait for it."""

    polling: bool = True
    clock: float = 0.0
    # The worker.
    progress_count: int = 0
    delivery_count: int = 0
    work: int = 0
    armed_by_ucx: bool = False
    descriptor: bool = False
    #: How often it will refuse to be armed, or have more to do.
    refusals: int = 0
    more: int = 0
    #: How often it goes on, and arms, although it was to return once something was delivered.
    goes_on: int = 0
    # The loop.
    hook: bool = False
    soon: list[Callable[[], None]] = attrs.Factory(list)
    timer: float = math.inf
    #: What the progress task waits for; None: it runs in the next round. And until when.
    progress_task: ArmingState | None = None
    pause: float = math.inf
    #: Tasks that wait for the worker; those of them that will run.
    parked: int = 0
    woken: int = 0
    #: Whether one of them is the leader, and waits for the descriptor; whether it has what it waits for; whether it is
    #: the first to get something.
    leader: bool = False
    leader_done: bool = False
    leader_first: bool = False
    calls: list[str] = attrs.Factory(list)
    arming: Arming = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.arming = Arming(self, self, polling=self.polling)

    # ---- the worker ----

    def deliver(self) -> bool:
        came, self.work = self.work, 0
        waiting = self.parked - self.woken
        self.woken += min(waiting, came)
        if self.leader and not self.leader_done and came and (self.leader_first or came >= waiting):
            self.leader_done = True
        self.progress_count += 1
        self.delivery_count += 1
        self.armed_by_ucx = False
        return came > 0

    def progress_and_deliver(self, arm: bool, once: bool = False) -> int:
        self.calls.append("arm" if arm else "progress")
        came = self.deliver()
        if arm and once and came and not self.goes_on:
            pass
        elif arm and self.more:
            self.more -= 1
        elif arm and self.refusals:
            self.refusals -= 1
            return Progress.BUSY
        elif arm:
            self.goes_on = max(0, self.goes_on - 1)
            self.armed_by_ucx = True
            self.descriptor = False
            return Progress.ARMED
        return Progress.MORE

    def serve_parked(self) -> bool:
        self.calls.append("look")
        return self.deliver() and self.parked == self.woken

    def signal(self) -> None:
        self.calls.append("signal")
        self.descriptor = True

    def arrive(self, announced: bool = True) -> None:
        self.work += 1
        if self.armed_by_ucx and announced:
            self.descriptor = True

    # ---- the loop ----

    def now(self) -> float:
        return self.clock

    def watch(self) -> None:
        self.hook = True

    def stop_watching(self) -> None:
        self.hook = False

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def start_timer(self) -> None:
        self.timer = min(self.timer, self.clock + TIMER_SECONDS)

    def resume(self) -> None:
        self.calls.append("resume")
        if self.progress_task is ArmingState.SUSPENDED:
            self.progress_task = None

    # ---- what tasks do ----

    def park(self) -> None:
        if not self.arming.armed and not self.woken:
            self.arming.handle(Event.PARKS)
            if self.arming.state is ArmingState.SUSPENDED and not self.woken:
                self.arming.handle(Event.OVERDUE)
        self.parked += 1
        if self.arming.led and not self.leader:
            assert self.progress_task is not ArmingState.ARMED, "two tasks wait for the descriptor"
            self.leader, self.leader_done = True, False

    def finds(self) -> None:
        """A task is about to park, and finds what it waits for when the worker is progressed for that."""
        self.work += 1
        if not self.arming.armed and not self.woken:
            self.arming.handle(Event.PARKS)
            if not self.leader:
                self.arming.stop_leading()
        self.go_on()

    def lead(self) -> None:
        """The leader runs, because the descriptor is readable."""
        self.leader = False
        if not self.leader_done and self.arming.may_lead:
            self.calls.append("look")
            others = self.woken
            self.deliver()
            if self.woken > others and self.leader_first:
                self.parked -= 1  # not counted as woken, because it runs already
                self.woken -= 1
                self.arming.stop_leading()
                self.go_on()
                return
            if not self.woken:
                self.arming.handle(Event.PARKS)
                if not self.woken and self.arming.may_lead:
                    self.leader = True
                    return
        self.arming.stop_leading()
        if self.leader_done:
            self.leader_done = False
            self.woken -= 1
            self.parked -= 1
            self.go_on()

    def cancel_leader(self) -> None:
        if self.leader and not self.leader_done:
            self.leader = False
            self.parked -= 1
            self.arming.stop_leading()
            self.go_on()

    def post(self) -> None:
        """UCX may have something to do about it, and no event announces that."""
        self.progress_count += 1
        self.armed_by_ucx = False
        self.arrive(announced=False)
        self.arming.handle(Event.POSTED)

    def go_on(self) -> None:
        if not self.arming.armed and not self.woken:
            self.arming.task_resumed(self.parked)

    def round(self, *, others: bool = False) -> bool:
        """A round of the loop; ``others``: other tasks are always runnable. False when nothing will ever happen."""
        runnable = others or self.progress_task is None or bool(self.soon) or self.woken > 0
        deadline = 0.0 if runnable else math.inf
        if self.hook:
            self.arming.before_wait(deadline, batches=False)
        if not runnable and not self.soon:
            watched = self.leader or (
                self.progress_task is ArmingState.ARMED
                or (self.progress_task is ArmingState.BACKING_OFF and self.armed_by_ucx)
            )
            if not (watched and self.descriptor) and not self.leader_done:
                wakes = min(self.timer, self.pause)
                if wakes is math.inf:
                    if self.work:
                        raise Lost(f"{self.arming.state!r}, {self.work} to be delivered")
                    return False
                self.clock = max(self.clock, wakes)
        if self.timer <= self.clock:
            self.timer = math.inf
            if self.arming.timer_ended():
                self.timer = self.clock + TIMER_SECONDS
        if self.progress_task is ArmingState.ARMED and self.descriptor:
            self.progress_task = None
            self.arming.readable()
        if self.leader and (self.descriptor or self.leader_done):
            self.lead()
        if self.pause <= self.clock:
            self.pause, self.progress_task = math.inf, None
        soon, self.soon = self.soon, []
        for function in soon:
            function()
        if self.progress_task is None:
            self.progress_task = self.arming.next_step()
            if self.progress_task is ArmingState.BACKING_OFF:
                self.pause = self.clock + PAUSE
            elif self.progress_task is ArmingState.PROGRESSING:
                self.progress_task = None
        self.clock += 3e-6
        return True

    def run_woken(self, *, parks: bool) -> None:
        """The tasks that were woken run, one after the other."""
        while self.woken > self.leader_done:
            self.woken -= 1
            self.parked -= 1
            self.go_on()
            if parks:
                self.park()

    def run_until_idle(self) -> None:
        """Everybody parks, and the loop goes on until nothing happens any more. Raises Lost."""
        for _ in range(200):
            self.run_woken(parks=True)
            if not self.round():
                return
        raise Lost("the loop never sleeps")


def world(state: ArmingState, *, polling: bool = True) -> World:
    """One whose worker is in this state."""
    made = World(polling=polling)
    if state is ArmingState.PROGRESSING:
        return made
    if state is ArmingState.BACKING_OFF:
        made.refusals = 1
    made.round()
    if state in (ArmingState.DISARMED, ArmingState.SUSPENDED):
        made.progress_and_deliver(arm=False)
    if state is ArmingState.SUSPENDED:
        made.descriptor = True
        if not polling:
            made.parked = made.work = 1
        made.round(others=True)
        made.parked = made.woken = 0
    if state is ArmingState.ENDED:
        made.arming.end()
    made.calls.clear()
    assert made.arming.state is state
    return made


# ---- the table ----


def test_the_docstring_has_the_table() -> None:
    names = {"step_aside": Arming._step_aside, "defer": Arming.defer, "--": Arming._nothing}
    documented = {}
    for line in (_arming.__doc__ or "").splitlines():
        event, *cells = line.replace("`", "").split()[:1] + line.replace("`", "").split()[1:] if line.strip() else [""]
        if event in Event.__members__ and len(cells) == len(ArmingState):
            for state, cell in zip(ArmingState, cells, strict=True):
                documented[state, Event[event]] = names.get(cell) or getattr(Arming, f"_{cell}")
    assert documented == TRANSITIONS
    assert len(documented) == len(ArmingState) * len(Event)


A, D, S, P, B, E = ArmingState
EXPECTED: list[tuple[Event, ArmingState, ArmingState, list[str]]] = [
    # event, state before, state afterwards, what was done
    (Event.POSTED, A, A, []),
    (Event.POSTED, D, D, []),
    (Event.POSTED, S, S, []),
    (Event.POSTED, P, P, []),
    (Event.POSTED, B, B, []),
    (Event.POSTED, E, E, []),
    (Event.ASKED, A, A, ["arm"]),
    (Event.ASKED, D, D, ["progress"]),
    (Event.ASKED, S, S, ["progress"]),
    (Event.ASKED, P, P, ["progress"]),
    (Event.ASKED, B, B, ["progress"]),
    (Event.ASKED, E, E, ["progress"]),
    (Event.PARKS, A, A, []),
    (Event.PARKS, D, A, ["arm"]),
    (Event.PARKS, S, A, ["arm"]),
    (Event.PARKS, P, P, ["progress"]),
    (Event.PARKS, B, B, ["progress"]),
    (Event.PARKS, E, E, ["progress"]),
    (Event.OVERDUE, A, A, []),
    (Event.OVERDUE, D, A, ["arm"]),
    (Event.OVERDUE, S, P, ["resume"]),
    (Event.OVERDUE, P, P, []),
    (Event.OVERDUE, B, B, ["progress"]),
    (Event.OVERDUE, E, E, []),
    (Event.WAKE, A, P, ["signal"]),
    (Event.WAKE, D, P, ["signal"]),
    (Event.WAKE, S, P, ["resume"]),
    (Event.WAKE, P, P, []),
    (Event.WAKE, B, B, []),
    (Event.WAKE, E, E, []),
    (Event.READABLE, A, P, ["look"]),
    (Event.READABLE, D, S, []),
    (Event.READABLE, S, S, []),
    (Event.READABLE, P, P, []),
    (Event.READABLE, B, B, []),
    (Event.READABLE, E, E, []),
    (Event.POLLED, A, A, []),
    (Event.POLLED, D, D, []),
    (Event.POLLED, S, S, []),
    (Event.POLLED, P, S, []),
    (Event.POLLED, B, B, []),
    (Event.POLLED, E, E, []),
    (Event.RUNS, A, A, ["arm"]),
    (Event.RUNS, D, A, ["arm"]),
    (Event.RUNS, S, S, []),
    (Event.RUNS, P, A, ["arm"]),
    (Event.RUNS, B, A, ["arm"]),
    (Event.RUNS, E, E, []),
]


@pytest.mark.parametrize(
    ("event", "before", "afterwards", "calls"), EXPECTED, ids=[f"{row[0].name}-{row[1].name}" for row in EXPECTED]
)
def test_transition(event: Event, before: ArmingState, afterwards: ArmingState, calls: list[str]) -> None:
    one = world(before)
    one.arming.readable() if event is Event.READABLE else one.arming.handle(event)
    assert one.arming.state is afterwards
    assert one.calls == calls


def test_every_transition_is_expected() -> None:
    assert {(state, event) for event, state, _, _ in EXPECTED} == set(TRANSITIONS)


@pytest.mark.parametrize(("event", "state"), [(Event.ASKED, A), (Event.PARKS, D), (Event.OVERDUE, D)])
@pytest.mark.parametrize("why", ["refusals", "more"])
def test_the_progress_task_takes_over_when_arming_fails(event: Event, state: ArmingState, why: str) -> None:
    one = world(state)
    setattr(one, why, 1)
    one.arming.handle(event)
    assert (one.arming.state, one.calls) == (ArmingState.PROGRESSING, ["arm", "signal"])


def test_a_run_ends_in_what_ucx_says() -> None:
    for refusals, more, state in (
        (0, 0, ArmingState.ARMED),
        (0, 1, ArmingState.PROGRESSING),
        (1, 0, ArmingState.BACKING_OFF),
    ):
        one = World(refusals=refusals, more=more)
        assert one.arming.next_step() is state


def test_a_look_that_serves_every_parked_task_suffices() -> None:
    for parked, work, state in (
        (1, 1, ArmingState.SUSPENDED),
        (2, 1, ArmingState.PROGRESSING),
        (1, 0, ArmingState.PROGRESSING),
    ):
        one = world(ArmingState.ARMED)
        one.parked, one.work = parked, work
        one.arming.readable()
        assert one.arming.state is state


def test_without_polling_a_disarmed_worker_is_looked_at() -> None:
    one = world(ArmingState.DISARMED, polling=False)
    one.arming.readable()
    assert (one.arming.state, one.calls) == (ArmingState.PROGRESSING, ["look"])


@pytest.mark.parametrize("polling", [True, False])
def test_the_leader_gets_its_messages_without_the_progress_task(polling: bool) -> None:
    one = world(ArmingState.SUSPENDED, polling=polling)
    one.leader_first = True
    for _ in range(3):
        one.park()
        assert one.leader and one.arming.state is ArmingState.ARMED
        while one.round():
            pass
        one.arrive()
        one.round()
        assert not one.parked and one.arming.state is ArmingState.SUSPENDED
        assert one.calls == ["arm", "look"]
        one.calls.clear()


@pytest.mark.parametrize("why", ["refusals", "more"])
def test_a_task_that_cannot_arm_does_not_lead(why: str) -> None:
    one = world(ArmingState.SUSPENDED)
    setattr(one, why, 1)
    one.park()
    assert not one.leader and not one.arming.led
    assert (one.arming.state, one.calls) == (ArmingState.PROGRESSING, ["arm", "resume"])


def test_a_leader_that_is_told_to_lets_the_progress_task_run() -> None:
    one = world(ArmingState.SUSPENDED)
    one.park()
    one.arming.handle(Event.WAKE)
    one.round()
    assert not one.leader and one.parked == 1
    one.round()
    assert one.progress_task is ArmingState.ARMED


def test_no_task_leads_while_the_progress_task_waits_for_the_descriptor() -> None:
    """...or was woken by it and has not run yet, and meanwhile the descriptor was made silent by arming."""
    one = world(ArmingState.ARMED)
    one.refusals = 1
    one.arming.handle(Event.ASKED)  # cannot arm: wakes the progress task
    one.deliver()
    one.go_on()
    assert one.arming.state is ArmingState.DISARMED
    one.park()
    assert one.arming.state is ArmingState.ARMED and not one.leader


def test_a_progress_task_that_was_interrupted_leaves_the_descriptor_to_the_leader() -> None:
    one = world(ArmingState.SUSPENDED)
    one.park()
    one.arming.interrupted()
    assert one.arming.next_step() is ArmingState.SUSPENDED
    assert one.arming.state is ArmingState.ARMED


@pytest.mark.parametrize("state", [ArmingState.DISARMED, ArmingState.SUSPENDED])
def test_deferred_arming_is_done_when_the_loop_is_idle(state: ArmingState) -> None:
    one = world(state)
    one.arming.defer()
    assert one.hook
    one.round()
    one.round()
    assert one.arming.state is ArmingState.ARMED


def test_deferred_arming_is_done_a_moment_after_the_last_delivery() -> None:
    one = world(ArmingState.DISARMED)
    one.arming.defer()
    for _ in range(100):
        one.progress_and_deliver(arm=False)
        one.round(others=True)
    assert one.arming.state is ArmingState.DISARMED, "it is polled all the time"
    one.clock += 2 * DEFER_SECONDS
    for _ in range(MIN_DEFER_ROUNDS):
        assert one.arming.state is ArmingState.DISARMED, "the task may come back in the next round"
        one.round(others=True)
    assert one.arming.state is ArmingState.ARMED


def test_a_timer_replaces_the_hook_while_one_task_comes_back_all_the_time() -> None:
    one = world(ArmingState.DISARMED)
    for _ in range(RETURNS_UNTIL_TIMER + 1):
        one.progress_and_deliver(arm=False)
        one.go_on()
    assert one.arming.steady
    for _ in range(IDLE_ROUNDS + 1):
        assert one.hook, "what is sent meanwhile may need it, and adding it again is slow"
        one.round(others=True)
    assert not one.hook
    for _ in range(10):
        one.progress_and_deliver(arm=False)
        one.clock += TIMER_SECONDS
        one.round(others=True)
        assert one.arming.state is ArmingState.DISARMED
    one.clock += TIMER_SECONDS
    one.round(others=True)
    one.round(others=True)
    assert one.arming.state is ArmingState.ARMED
    assert not one.arming.steady


@pytest.mark.parametrize("polling", [False, True])
@pytest.mark.parametrize(
    "state", [ArmingState.ARMED, ArmingState.DISARMED, ArmingState.SUSPENDED, ArmingState.BACKING_OFF]
)
def test_a_task_that_posts_in_every_round_starves_nobody(state: ArmingState, polling: bool) -> None:
    one = world(state, polling=polling)
    waited = 0.0
    for _ in range(2000):
        before, one.work = one.clock, one.work or 1
        one.post()
        one.round(others=True)
        waited = waited + one.clock - before if one.work else 0.0
        assert waited < MAX_DEFER_SECONDS + PAUSE


def test_what_was_posted_beside_one_task_that_comes_back_all_the_time_need_not_wait_for_the_timer() -> None:
    one = world(ArmingState.DISARMED)
    for _ in range(RETURNS_UNTIL_TIMER + 1):
        one.progress_and_deliver(arm=False)
        one.go_on()
    for _ in range(IDLE_ROUNDS + 1):
        one.round(others=True)
    assert one.arming.steady and not one.hook
    one.arming.hurry()
    one.post()
    one.round()
    assert not one.work and one.clock < TIMER_SECONDS


def test_an_interrupted_progress_task_looks_again() -> None:
    for state in (ArmingState.ARMED, ArmingState.DISARMED, ArmingState.SUSPENDED, ArmingState.BACKING_OFF):
        one = world(state)
        one.arming.interrupted()
        assert one.arming.next_step() is ArmingState.ARMED


# ---- nobody sleeps on a disarmed worker that has work ----

Step = tuple[str, int]
STEPS = [
    *("arrive", "post", "ask", "poll", "go on", "park", "wake", "compute", "round", "busy round", "refuse", "more"),
    *("woken", "cancel", "interrupt", "again"),
]


def take(one: World, step: Step) -> None:
    what, number = step
    if what == "arrive":
        one.arrive()
    elif what == "post":
        one.post()
    elif what == "ask":
        one.arming.handle(Event.ASKED)
    elif what == "poll":
        one.deliver()
        if number % 2:  # in vain
            one.park()
        elif number % 4:
            one.finds()
        else:
            one.go_on()
    elif what == "go on":
        for _ in range(number * 10):
            one.deliver()
            one.go_on()
    elif what == "park":
        one.park()
    elif what == "wake":
        one.arming.handle(Event.WAKE)
    elif what == "compute":
        one.clock += number * DEFER_SECONDS / 3
    elif what == "refuse":
        one.refusals = number
    elif what == "more":
        one.more = number
    elif what == "again":
        one.goes_on = number
    elif what == "cancel":
        one.cancel_leader()
    elif what == "interrupt":
        if one.progress_task is not None:
            one.arming.interrupted()
            one.pause, one.progress_task = math.inf, None
    elif what == "woken":
        one.run_woken(parks=number % 2 == 0)
    else:
        one.round(others=what == "busy round")


def play(steps: list[Step], *, polling: bool, leader_first: bool) -> None:
    """Raises Lost when work stays undone although nobody is there who would do it."""
    one = World(polling=polling, leader_first=leader_first)
    for step in steps:
        take(one, step)
    one.arrive()
    began = one.clock
    one.run_until_idle()
    assert one.work == 0
    assert one.arming.state is ArmingState.ARMED
    assert one.clock - began < BOUND + 8 * PAUSE


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), max_size=60), st.booleans(), st.booleans())
@settings(settings.get_profile("model"), max_examples=1000)
def test_nobody_sleeps_on_a_disarmed_worker_that_has_work(steps: list[Step], polling: bool, leader_first: bool) -> None:
    play(steps, polling=polling, leader_first=leader_first)


def arm_for_nobody(arming: Arming) -> None:
    arming._lead()
    arming.led = False


@pytest.mark.parametrize(
    ("state", "event", "instead"),
    [
        (ArmingState.ARMED, Event.ASKED, Arming._progress),
        (ArmingState.DISARMED, Event.POSTED, Arming._nothing),
        (ArmingState.DISARMED, Event.PARKS, Arming._nothing),
        (ArmingState.SUSPENDED, Event.PARKS, arm_for_nobody),
        (ArmingState.DISARMED, Event.OVERDUE, Arming._progress),
        (ArmingState.SUSPENDED, Event.OVERDUE, Arming._progress),
    ],
)
def test_the_property_notices_what_is_wrong(
    state: ArmingState, event: Event, instead: Callable[[Arming], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSITIONS, (state, event), instead)
    chance = random.Random(1)
    with pytest.raises(AssertionError):
        for _ in range(3000):
            length = chance.randrange(60)
            steps = [(chance.choice(STEPS), chance.randrange(8)) for _ in range(length)]
            play(steps, polling=chance.random() < 0.5, leader_first=chance.random() < 0.5)
