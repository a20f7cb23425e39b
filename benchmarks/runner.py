"""All contenders, interleaved, in several rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from . import stats
from .contenders import Contender, perftest
from .jobs import Job
from .pairs import Cpus, PairFailed, open_pair

#: Rounds that may fail before a contender is left out.
PATIENCE = 2


@dataclass
class Row:
    """A figure of a contender: by round, and the medians of the rounds."""

    contender: str
    transport: str
    job: Job
    rounds: list[Mapping[str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    #: What the library says that it runs over.
    lanes: Sequence[str] = ()

    @property
    def figures(self) -> dict[str, float]:
        return stats.of_rounds(self.rounds)


Rows = dict[tuple[str, Job], Row]


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        seconds: for each figure in each round.
        pythons: interpreters of contenders that live in environments of their own, by module.
    """

    contenders: Sequence[Contender]
    rounds: int
    seconds: float
    cpus: Cpus
    pythons: Mapping[str, str] = field(default_factory=dict)
    wanted: Callable[[Job], bool] = lambda job: True

    def jobs(self, contender: Contender) -> list[Job]:
        return [job for job in contender.jobs if self.wanted(job)]


def run(plan: Plan, advance: Callable[[str], None] = lambda what: None) -> Rows:
    """Each round runs every contender once, in another order."""
    rows: Rows = {
        (contender.name, job): Row(contender.name, contender.transport, job)
        for contender in plan.contenders
        for job in plan.jobs(contender)
    }
    failed: dict[str, int] = {}
    for number in range(plan.rounds):
        for contender in in_turn(plan.contenders, number):
            mine = {job: rows[contender.name, job] for job in plan.jobs(contender)}
            if failed.get(contender.name, 0) < PATIENCE and not run_contender(
                plan,
                contender,
                mine,
                lambda job: advance(f"round {number + 1}: {contender.name}, {job.key}"),  # noqa: B023
            ):
                failed[contender.name] = failed.get(contender.name, 0) + 1
    return rows


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of one round: another contender begins each time, so that none always follows the same one."""
    shift = number * 7 % max(1, len(contenders))
    return [*contenders[shift:], *contenders[:shift]]


def run_contender(plan: Plan, contender: Contender, rows: Mapping[Job, Row], advance: Callable[[Job], None]) -> bool:
    """Measures each job once. A job that fails ends its processes; the next gets new ones. Whether all succeeded."""
    jobs = list(rows)
    good = True
    while jobs:
        job = jobs[0]
        try:
            with opened(plan, contender) as measure:
                while jobs:
                    job = jobs[0]
                    advance(job)
                    figures, lanes = measure(job)
                    rows[job].rounds.append(with_derived(figures))
                    rows[job].lanes = lanes
                    jobs.pop(0)
        except NotOpened as problem:
            for job in jobs:
                rows[job].errors.append(str(problem))
            return False
        except Exception as problem:
            rows[job].errors.append(str(problem) or type(problem).__name__)
            if job in jobs:
                jobs.remove(job)
            good = False
    return good


class NotOpened(Exception):
    """The pair could not even start."""


Measure = Callable[[Job], tuple[Mapping[str, float], Sequence[str]]]


@contextlib.contextmanager
def opened(plan: Plan, contender: Contender) -> Iterator[Measure]:
    with contextlib.ExitStack() as stack:
        if contender.module == "perftest":
            yield lambda job: (perftest.measure(contender, job, plan.seconds, plan.cpus), ())
        else:
            try:
                pair = stack.enter_context(open_pair(contender, plan.cpus, plan.pythons))
            except (PairFailed, OSError) as problem:
                raise NotOpened(str(problem)) from problem
            yield lambda job: (pair.measure(job, plan.seconds), pair.transports)


def with_derived(figures: Mapping[str, float]) -> Mapping[str, float]:
    """Adds "tail", the 99th percentile divided by the median; "beyond_us", the median less two schedule points."""
    found = dict(figures)
    if "p99_us" in figures and figures["median_us"]:
        found["tail"] = figures["p99_us"] / figures["median_us"]
    if "schedule_us" in figures:
        found["beyond_us"] = figures["median_us"] - 2 * figures["schedule_us"]
    return found
