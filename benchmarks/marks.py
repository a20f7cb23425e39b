"""What trio_ucx has to reach: measured ratios and figures beside their marks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .jobs import BY_SIZE, CONNECT, CONVERSATION, KIB, MIB, Job, burst, size_name
from .stats import scaled


@dataclass(frozen=True)
class Pick:
    """A figure of a contender."""

    contender: str
    job: Job
    figure: str


Theirs = Pick | tuple[Pick, ...] | None
#: What was measured, by pick; None where it was not.
Look = Callable[[Pick], float | None]


@dataclass(frozen=True)
class Mark:
    """``ours`` must be at most, or at least, ``limit``.

    Attributes:
        theirs: what ours is divided by; of several the best that was measured.
        unit: of the limit; "x" where it is a ratio.
    """

    title: str
    ours: Pick
    theirs: Theirs
    bound: str
    limit: float
    unit: str = "x"

    @property
    def others(self) -> tuple[Pick, ...]:
        return (self.theirs,) if isinstance(self.theirs, Pick) else self.theirs or ()

    @property
    def picks(self) -> tuple[Pick, ...]:
        return (self.ours, *self.others)

    def check(self, look: Look) -> Verdict:
        smaller_is_better = self.bound == "at most"
        measured = {found: pick.contender for pick in self.others if (found := look(pick))}
        best = (min if smaller_is_better else max)(measured, default=None)
        value = look(self.ours)
        if self.theirs is not None:
            value = None if value is None or best is None else value / best
        met = None if value is None else value <= self.limit if smaller_is_better else value >= self.limit
        against = " | ".join(pick.contender for pick in self.others) if best is None else measured[best]
        return Verdict(self.title, self.ours.contender, against, value, self.bound, self.limit, self.unit, met)


@dataclass(frozen=True)
class Worst:
    """Several marks with one limit. What is shown is the one that is farthest from it."""

    title: str
    marks: tuple[Mark, ...]

    @property
    def picks(self) -> tuple[Pick, ...]:
        return tuple(pick for mark in self.marks for pick in mark.picks)

    def check(self, look: Look) -> Verdict:
        found = {mark.title: mark.check(look) for mark in self.marks}
        values = {title: one.value for title, one in found.items() if one.value is not None}
        if not values:
            return replace(next(iter(found.values())), title=self.title)
        farthest = (max if self.marks[0].bound == "at most" else min)(values, key=values.__getitem__)
        return replace(found[farthest], title=f"{self.title}, {farthest}")


@dataclass(frozen=True)
class Verdict:
    """A mark, and what was measured; ``met`` is None where something is missing."""

    title: str
    ours: str
    theirs: str
    value: float | None
    bound: str
    limit: float
    unit: str
    met: bool | None

    @property
    def mark(self) -> str:
        return f"{self.bound} {self.limit:,.10g} {self.unit}"

    @property
    def measured(self) -> str:
        return "-" if self.value is None else f"{scaled(self.value)} {self.unit}"

    @property
    def answer(self) -> str:
        return {None: "not measured", True: "met", False: "MISSED"}[self.met]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


#: trio_ucx over how many connections, as :mod:`benchmarks.scale` names it.
SCALE = "trio_ucx scale {}"


def best_others(transport: str, job: Job, figure: str) -> tuple[Pick, ...]:
    """What other libraries of Python do over the same kind of transport."""
    stream = "trio stream tcp" if transport == "tcp" else "trio stream unix"
    return tuple(Pick(name, job, figure) for name in (f"ucxx polling {transport}", f"mpi4py {transport}", stream))


def latency_marks() -> list[Mark]:
    def of(contender: str, figure: str = "median_us", size: int = 8) -> Pick:
        return Pick(contender, Job("latency", size), figure)

    quick, long = "trio_ucx yield_interval=100e-6", 64 * KIB
    marks = []
    for transport, beyond, limit in (("tcp", 3, 28), ("shm", 1.5, 9)):
        ours = f"trio_ucx default {transport}"
        conversation = Pick(ours, CONVERSATION[0], "median_us")
        marks += [
            Mark("latency 8 B, beyond two schedule points", of(ours, "beyond_us"), None, "at most", beyond, "us"),
            Mark("latency 8 B, a conversation / a tag", conversation, of(ours), "at most", 1.3),
            Mark("latency 8 B, p99 / median", of(ours, "tail"), None, "at most", 4, "times"),
            Mark("latency 64 KiB", of(ours, size=long), None, "at most", limit, "us"),
        ]
    marks += [
        Mark("latency 8 B", of(f"{quick} tcp"), of("ucx_perftest poll tcp"), "at most", 1.5),
        Mark("latency 8 B", of(f"{quick} shm"), None, "at most", 2, "us"),
        Mark("latency 8 B", of("trio_ucx spin=0 tcp"), of("trio stream tcp"), "at most", 1),
    ]
    for transport, other in (("tcp", "tcp"), ("shm", "unix")):
        sleeping, theirs = of(f"trio_ucx spin=0 {transport}", size=long), of(f"trio stream {other}", size=long)
        marks.append(Mark("latency 64 KiB", sleeping, theirs, "at most", 1.3))
    return marks


def bandwidth_marks() -> list[Mark]:
    marks = []
    for transport in ("tcp", "shm"):
        for size, gb_s in ((MIB, 7.4), (16 * MIB, 4.5)):
            plain = Job("bandwidth", size)
            others = best_others(transport, plain, "gb_s")
            perftest = Pick(f"ucx_perftest poll {transport}", plain, "gb_s")
            asked: list[tuple[str, Theirs, float, str]] = [
                *([("receive_into", None, gb_s, "GB/s")] if transport == "tcp" else []),
                ("receive_into", others, 1, "x"),
                ("receive", perftest, 0.75, "x"),
                ("byte stream", others, 1, "x"),
            ]
            for way, theirs, limit, unit in asked:
                ours = Pick(f"trio_ucx default {transport}", Job("bandwidth", size, way), "gb_s")
                marks.append(Mark(f"bandwidth {size_name(size)}, {way}", ours, theirs, "at least", limit, unit))
    return marks


def rate_marks() -> list[Mark]:
    def mark(contender: str, way: str, limit: float, *theirs: Pick) -> Mark:
        title = f"8 B messages/s, {way}{' await' if way == 'plain' else ''}"
        ours = Pick(contender, Job("rate", 8, way), "messages_s")
        return Mark(title, ours, theirs or None, "at least", limit, "x" if theirs else "/s")

    tcp, shm = "trio_ucx default tcp", "trio_ucx default shm"
    perftest = Pick("ucx_perftest poll tcp", Job("rate", 8), "messages_s")
    return [
        mark(tcp, "nowait", 0.9, perftest),
        mark(shm, "nowait", 2_000_000),
        mark(tcp, "group", 0.9, perftest),
        mark(shm, "group", 800_000),
        mark("trio_ucx.ucp raw tcp", "group", 0.9, perftest),
        mark("trio_ucx.ucp raw shm", "group", 800_000),
        mark(tcp, "plain", 250_000),
        mark(shm, "plain", 250_000),
    ]


def other_marks() -> list[Mark]:
    """For connections that come and go, bursts, remote memory, chains, and a computation by several processes."""
    marks = [
        Mark("connect and close", Pick(f"trio_ucx default {transport}", CONNECT[0], "connects_s"), None,
             "at least", 1500, "/s")
        for transport in ("tcp", "shm")
    ]  # fmt: skip
    jobs = burst("plain", "plain, into", "group")
    loop, into, group = (Pick("trio_ucx default shm", job, "burst_ms") for job in jobs)
    marks += [
        Mark("500 messages of 64 KiB, a loop", loop, None, "at most", 8.8, "ms"),
        Mark("500 messages of 64 KiB, a group / a loop", group, into, "at most", 1),
    ]
    for contender, way, figure, title, limit in (
        ("RemoteMemory", "get", "step_us", "get of 8 B", 3),
        ("RemoteMemory", "put", "step_us", "put of 8 B", 3),
        ("chain", "pairs, unordered", "request_us", "making a chain, each request", 3),
        ("heat", "heat equation, 64 x 64, 4 ranks", "step_us", "heat equation, an iteration", 500),
    ):
        pick = Pick(f"trio_ucx {contender} shm", Job("steps", 1000, way), figure)
        marks.append(Mark(title, pick, None, "at most", limit, "us"))
    return marks


def size_marks() -> list[Worst]:
    """For every size of ``compare.py --sizes``: against the next larger one, and against UCX in C."""
    found = []
    for transport in ("tcp", "shm"):
        names = f"trio_ucx default {transport}", f"ucx_perftest poll {transport}"
        ours, theirs = ([Pick(name, job, "median_us") for job in BY_SIZE] for name in names)
        larger = tuple(
            Mark(f"{size_name(one.job.size)} / {size_name(next_one.job.size)}", one, next_one, "at most", 1)
            for one, next_one in itertools.pairwise(ours)
        )
        in_c = tuple(
            Mark(size_name(one.job.size), one, other, "at most", 2) for one, other in zip(ours, theirs, strict=True)
        )
        found += [Worst("latency by size", larger), Worst("latency by size", in_c)]
    return found


def idle_marks() -> list[Mark]:
    return [
        Mark("idle CPU, 1 connection", Pick(f"trio_ucx default {transport}", Job("idle"), "idle_percent"), None,
             "at most", 0.1, "%")
        for transport in ("tcp", "shm")
    ]  # fmt: skip


def scale_marks() -> list[Mark]:
    """For connections by the thousand, from :mod:`benchmarks.scale`."""
    marks = []
    for transport in ("tcp", "shm"):
        one, many = SCALE.format(f"1 {transport}"), SCALE.format(f"1000 {transport}")
        marks.append(
            Mark("idle CPU, 1,000 connections", Pick(many, Job("idle"), "idle_percent"), None, "at most", 0.1, "%")
        )
        for way in ("round robin", "all at once", "one of many"):
            job = Job("exchange", 8, way)
            marks.append(
                Mark(f"cost per message, {way}", Pick(many, job, "wall_us"), Pick(one, job, "wall_us"), "at most", 1.5)
            )
    return marks


def all_marks() -> list[Mark | Worst]:
    return [
        *latency_marks(),
        *bandwidth_marks(),
        *rate_marks(),
        *other_marks(),
        *size_marks(),
        *idle_marks(),
        *scale_marks(),
    ]


def verdicts(
    figures: Mapping[tuple[str, Job], Mapping[str, float]], marks: Sequence[Mark | Worst] | None = None
) -> list[Verdict]:
    """Each mark, checked against the medians of a run."""

    def look(pick: Pick) -> float | None:
        return figures.get((pick.contender, pick.job), {}).get(pick.figure)

    return [mark.check(look) for mark in (all_marks() if marks is None else marks)]
