"""What is measured."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

KIB, MIB = 2**10, 2**20


class Kind(enum.Enum):
    """LATENCY: one message there and back; BANDWIDTH, RATE: many in flight, one way; IDLE: nothing, once connected.

    Of many connections: OPENING: what it takes to make them; EXCHANGE: messages there and back.
    STEPS: ``size`` of them, one after the other: with remote memory, or of a computation.
    BURST: BURST_COUNT messages one way, of which the last comes back. CONNECT: connections made and closed in turn.
    """

    LATENCY = "latency"
    BANDWIDTH = "bandwidth"
    RATE = "rate"
    IDLE = "idle"
    OPENING = "opening"
    EXCHANGE = "exchange"
    STEPS = "steps"
    BURST = "burst"
    CONNECT = "connect"


@dataclass(frozen=True, order=True)
class Job:
    """One figure of a contender.

    Attributes:
        way: which of several ways of a contender to do it; "" where there is one.
    """

    kind_name: str
    size: int = 0
    way: str = ""

    @property
    def kind(self) -> Kind:
        return Kind(self.kind_name)

    @property
    def key(self) -> str:
        """As in ``latency/8`` or ``rate/8/nowait``."""
        parts = [self.kind_name, str(self.size) if self.size else "", self.way]
        return "/".join(filter(None, parts))


def size_name(size: int) -> str:
    """As in "8 B" or "64 KiB"."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def latency(*sizes: int) -> tuple[Job, ...]:
    return tuple(Job("latency", size) for size in sizes or (8, KIB, 64 * KIB))


def bandwidth(*ways: str) -> tuple[Job, ...]:
    return tuple(Job("bandwidth", size, way) for way in ways or ("",) for size in (MIB, 16 * MIB))


def rate(*ways: str) -> tuple[Job, ...]:
    return tuple(Job("rate", 8, way) for way in ways or ("",))


def burst(*ways: str) -> tuple[Job, ...]:
    return tuple(Job("burst", 64 * KIB, way) for way in ways or ("",))


#: Each message has a conversation of its own, which both sides open and leave.
CONVERSATION = (Job("latency", 8, "conversation"),)
IDLE = (Job("idle"),)
CONNECT = (Job("connect", 8),)
#: Latencies that ``compare.py --sizes`` prints in a table of their own.
BY_SIZE = tuple(Job("latency", 2**exponent, "by size") for exponent in range(10, 27))

#: Messages in flight where a contender says how many: large ones, small ones.
WINDOW, SMALL_WINDOW = 8, 256
#: Messages of a burst, which may all be in flight.
BURST_COUNT = 500


@dataclass(frozen=True)
class Batch:
    """So many messages of a job, verified by the pattern of ``seed``."""

    job: Job
    count: int
    seed: int

    @classmethod
    def from_order(cls, order: dict[str, Any]) -> Batch:
        return cls(Job(order["kind"], order["size"], order["way"]), order["count"], order["seed"])

    def order(self) -> dict[str, Any]:
        job = self.job
        return {"kind": job.kind_name, "size": job.size, "way": job.way, "count": self.count, "seed": self.seed}

    def payload(self) -> bytes:
        return pattern(self.job.size, self.seed)

    @property
    def window(self) -> int:
        return {Kind.BANDWIDTH: WINDOW, Kind.BURST: BURST_COUNT}.get(self.job.kind, SMALL_WINDOW)


def pattern(size: int, seed: int) -> bytes:
    """Bytes that differ by place and by seed; never all zero."""
    block = b"".join((1 + seed * 65_537 + number).to_bytes(8, "little") for number in range(min(size // 8 + 1, 8191)))
    return (block * (size // len(block) + 1))[:size]
