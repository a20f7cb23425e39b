"""Trials: trio_ucx's values of UCX's options and UCX's own, measured by turns and compared round by round.

In each of several rounds both are measured once, each time with a new server process, new workers and a new connection,
so that an unusually fast connection does not count as an effect of its options. The rounds begin with one and the other
alternately, and values are compared within a round, because whatever makes the whole machine slower for a second makes
both slower. With speeds as multiples of the default's in the same round, a figure is

* better if the median is more than 5 % above 1 and *every* round is above 1: then the noise between the rounds is
  smaller than the difference. In five rounds of pure noise, 1 figure in 32 has every round above 1;
* worse if the median is more than 5 % below 1, whatever the single rounds are: in doubt the default stays.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs

from benchmarks.options import Figure
from trio_ucx import connect
from trio_ucx._cli.local_pair import open_server
from trio_ucx._cli.measuring import Advance, repeat
from trio_ucx._cli.perf_protocol import PerfClient
from trio_ucx._cli.rounds import RoundKind
from trio_ucx.ucp import open_worker

ROUNDS = 5
#: A smaller share of a speed does not count as a difference.
MARGIN = 0.05

#: The speeds of one round, by the figure's key; of a latency, its inverse. More is better.
Speeds = Mapping[str, float]


@attrs.frozen
class Comparison:
    """Speeds as multiples of the default's, by figure, one for each round."""

    ratios: Mapping[str, Sequence[float]]

    @property
    def medians(self) -> dict[str, float]:
        return {figure: statistics.median(rounds) for figure, rounds in self.ratios.items()}

    @property
    def better(self) -> frozenset[str]:
        """The figures that are clearly better than the default's."""
        return frozenset(
            figure
            for figure, median in self.medians.items()
            if median > 1 + MARGIN and all(ratio > 1 for ratio in self.ratios[figure])
        )

    @property
    def worse(self) -> frozenset[str]:
        return frozenset(figure for figure, median in self.medians.items() if median < 1 - MARGIN)


def compare(default: Sequence[Speeds], other: Sequence[Speeds]) -> Comparison:
    """Compares the speeds of two candidates in the same rounds."""
    rounds = list(zip(default, other, strict=True))
    return Comparison({figure: [theirs[figure] / ours[figure] for ours, theirs in rounds] for figure in default[0]})


@attrs.define(eq=False)
class Candidate:
    """Values of one or more options, and what was measured with them.

    Attributes:
        rounds: the figures: microseconds, messages a second, or 10**6 bytes a second.
        lanes: the transports of its messages.
    """

    name: str
    config: Mapping[str, str]
    rounds: list[dict[Figure, float]] = attrs.field(factory=list)
    lanes: list[str] = attrs.field(factory=list)

    def median(self, figure: Figure) -> float:
        return statistics.median(one[figure] for one in self.rounds)

    def spread(self, figure: Figure) -> float:
        """The difference between the lowest and the highest round, as a share of the median."""
        values = [one[figure] for one in self.rounds]
        return (max(values) - min(values)) / statistics.median(values)

    @property
    def speeds(self) -> list[Speeds]:
        return [
            {figure.key: 1 / value if figure.what == "latency" else value for figure, value in one.items()}
            for one in self.rounds
        ]


@attrs.frozen
class Trial:
    """Two candidates that are measured together: trio_ucx's default, and the other, which is compared with it."""

    title: str
    figures: Sequence[Figure]
    default: Candidate
    other: Candidate

    @property
    def comparison(self) -> Comparison:
        return compare(self.default.speeds, self.other.speeds)

    async def run(self, transports: str, seconds: float, advance: Advance) -> None:
        """Measures each figure of both candidates for ``seconds`` in each round."""
        for number in range(ROUNDS):
            for candidate in (self.default, self.other) if number % 2 == 0 else (self.other, self.default):
                async with open_client(transports, candidate.config) as client:
                    candidate.rounds.append({figure: await measure(client, figure, seconds) for figure in self.figures})
                    candidate.lanes = list(dict.fromkeys(lane.name for lane in client.connection.endpoint.transports))
            advance((number + 1) / ROUNDS)


@asynccontextmanager
async def open_client(transports: str, config: Mapping[str, str]) -> AsyncIterator[PerfClient]:
    """Opens a connection to a new server process, both with these options of UCX; yields the client's end."""
    authkey = secrets.token_hex(16)
    async with (
        open_server(transports, authkey, config) as address,
        open_worker(config={**config, "TLS": transports}) as worker,
        connect(address, worker=worker, authkey=authkey.encode()) as connection,
    ):
        client = PerfClient(connection)
        await client.introduce()
        await client.run_next(RoundKind.LATENCY, 8, 1)  # only after a message UCX knows which lanes it uses
        yield client


async def measure(client: PerfClient, figure: Figure, seconds: float) -> float:
    """Returns microseconds, messages a second, or 10**6 bytes a second."""
    kind = RoundKind.LATENCY if figure.what == "latency" else RoundKind.STREAM
    measured = await repeat(client, kind, figure.size, None, seconds, lambda share: None)
    if figure.what == "latency":
        return statistics.median(measured.half_trips)
    rate = measured.messages_a_second
    return rate if figure.what == "rate" else rate * figure.size / 1e6


def trial_text(trial: Trial) -> str:
    """A table: the default's values and how much its rounds differ, then the other's as multiples of it."""
    default, other, comparison = trial.default, trial.other, trial.comparison
    over = f" (over {', '.join(other.lanes)})" if other.lanes != default.lanes else ""
    rows = [
        ("", [figure.title for figure in trial.figures], ""),
        (f"{default.name} (default)", [value_text(default, figure) for figure in trial.figures], ""),
        ("its rounds differ by", [f"{default.spread(figure):.0%}" for figure in trial.figures], ""),
        (
            other.name,
            [f"{comparison.medians[figure.key]:.2f} x" for figure in trial.figures],
            judgement(trial.figures, comparison) + over,
        ),
    ]
    width = max(len(name) for name, _, _ in rows)
    lines = [trial.title]
    for name, cells, remark in rows:
        padded = [f"{cell:>{len(title)}}" for cell, title in zip(cells, rows[0][1], strict=True)]
        lines.append("  ".join([f"  {name:<{width}}", *padded, remark]).rstrip())
    return "\n".join(lines) + "\n"


def value_text(candidate: Candidate, figure: Figure) -> str:
    value = candidate.median(figure)
    return {"latency": f"{value:.2f} us", "rate": f"{value:,.0f}/s", "bandwidth": f"{value:,.0f} MB/s"}[figure.what]


def judgement(figures: Sequence[Figure], comparison: Comparison) -> str:
    """Returns the figures in which a candidate is faster or slower, as text."""
    parts = []
    for word, keys in (("faster", comparison.better), ("slower", comparison.worse)):
        found = [figure.title for figure in figures if figure.key in keys]
        if found:
            parts.append(f"{word}: {', '.join(found)}")
    return "; ".join(parts) or "no clear difference"


def trial_json(trial: Trial) -> dict[str, Any]:
    comparison = trial.comparison
    return {
        "title": trial.title,
        "values": [
            {
                "name": one.name,
                "config": one.config,
                "transports": one.lanes,
                "rounds": [{figure.key: value for figure, value in round.items()} for round in one.rounds],
            }
            for one in (trial.default, trial.other)
        ],
        "speed": comparison.medians,
        "faster": sorted(comparison.better),
        "slower": sorted(comparison.worse),
    }
