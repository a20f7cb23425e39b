"""What trio_ucx has to reach: measured ratios and figures beside their marks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .jobs import KIB, MIB, Job
from .stats import scaled


@dataclass(frozen=True)
class Pick:
    """A figure of a contender."""

    contender: str
    job: Job
    figure: str


#: What was measured, by pick; None where it was not.
Look = Callable[[Pick], float | None]


@dataclass(frozen=True)
class Mark:
    """``ours`` (divided by ``theirs``) must be at most, or at least, ``limit``.

    Attributes:
        unit: of the limit; "x" where it is a ratio.
        unless: where this figure is at most 0, it does not apply.
    """

    title: str
    ours: Pick
    theirs: Pick | None
    bound: str
    limit: float
    unit: str = "x"

    def check(self, look: Look) -> Verdict:
        ours = look(self.ours)
        theirs = look(self.theirs) if self.theirs is not None else None
        value = None
        if ours is not None and self.theirs is None:
            value = ours
        elif ours is not None and theirs:
            value = ours / theirs
        holds = operator.le if self.bound == "at most" else operator.ge
        met = None if value is None else holds(value, self.limit)
        against = self.theirs.contender if self.theirs is not None else ""
        return Verdict(self.title, self.ours.contender, against, value, self.bound, self.limit, self.unit, met)


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


def latency_marks() -> list[Mark]:
    small = Job("latency", 8)

    def of(contender: str, figure: str = "median_us") -> Pick:
        return Pick(contender, small, figure)

    quick = "yield_interval=100e-6"
    marks = []
    for transport, share in (("tcp", 0.4), ("shm", 0.2)):
        ours = of(f"trio_ucx default {transport}")
        marks += [
            Mark("latency 8 B", ours, of("trio stream tcp"), "at most", share),
            Mark("latency 8 B", ours, of(f"ucxx polling {transport}"), "at most", 1),
            Mark("latency 8 B, p99 / median", of(ours.contender, "tail"), None, "at most", 4, "times"),
        ]
    return marks + [
        Mark("latency 8 B", of(f"trio_ucx {quick} tcp"), of("ucx_perftest poll tcp"), "at most", 2),
        Mark("latency 8 B (perftest: 0.07 us)", of(f"trio_ucx {quick} shm"), None, "at most", 2, "us"),
        Mark("latency 8 B", of("trio_ucx spin=0 tcp"), of("ucx_perftest sleep tcp"), "at most", 1.5),
    ]


def bandwidth_marks() -> list[Mark]:
    marks = []
    for transport in ("tcp", "shm"):
        for size in (MIB, 16 * MIB):
            for way, share in (("receive_into", 0.9), ("receive", 0.75)):
                title = f"bandwidth {size // MIB} MiB, {way}"
                ours = Pick(f"trio_ucx default {transport}", Job("bandwidth", size, way), "bytes_s")
                plain = Job("bandwidth", size)
                perftest = Pick(f"ucx_perftest poll {transport}", plain, "bytes_s")
                marks.append(Mark(title, ours, perftest, "at least", share))
                if way == "receive_into":
                    marks.append(Mark(title, ours, Pick("trio stream tcp", plain, "bytes_s"), "at least", 1.5))
    for transport, other, share in (("tcp", "tcp", 1.3), ("shm", "unix", 1.2)):
        ours = Pick(f"trio_ucx default {transport}", Job("bandwidth", MIB, "byte stream"), "bytes_s")
        theirs = Pick(f"trio stream {other}", Job("bandwidth", MIB), "bytes_s")
        marks.append(Mark("byte stream, 1 MiB writes", ours, theirs, "at least", share))
    return marks


def rate_marks() -> list[Mark]:
    def of(contender: str, way: str = "") -> Pick:
        return Pick(contender, Job("rate", 8, way), "messages_s")

    tcp, shm = "trio_ucx default tcp", "trio_ucx default shm"
    marks = []
    for way in ("nowait", "group"):
        title = f"8 B messages/s, {way}"
        marks += [
            Mark(title, of(tcp, way), of("ucx_perftest poll tcp"), "at least", 0.9),
            Mark(title, of(shm, way), None, "at least", 800_000, "/s"),
        ]
    plain = "8 B messages/s, plain await"
    return [
        *marks,
        Mark(
            "8 B messages/s, group", of("trio_ucx.ucp raw tcp", "group"), of("ucx_perftest poll tcp"), "at least", 0.9
        ),
        Mark("8 B messages/s, group", of("trio_ucx.ucp raw shm", "group"), None, "at least", 800_000, "/s"),
        Mark(plain, of(tcp, "plain"), of("trio stream tcp"), "at least", 2),
        Mark(plain, of(shm, "plain"), None, "at least", 250_000, "/s"),
    ]


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


def all_marks() -> list[Mark]:
    return [*latency_marks(), *bandwidth_marks(), *rate_marks(), *idle_marks(), *scale_marks()]


def verdicts(figures: Mapping[tuple[str, Job], Mapping[str, float]], marks: list[Mark] | None = None) -> list[Verdict]:
    """Each mark, checked against the medians of a run."""

    def look(pick: Pick) -> float | None:
        return figures.get((pick.contender, pick.job), {}).get(pick.figure)

    return [mark.check(look) for mark in (all_marks() if marks is None else marks)]


SIZES = {8: "8 B", KIB: "1 KiB", 64 * KIB: "64 KiB", MIB: "1 MiB", 16 * MIB: "16 MiB"}
