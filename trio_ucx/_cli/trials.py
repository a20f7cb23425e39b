"""Compares values of UCX's options, which are measured by turns.

In each of several rounds every candidate is measured once, each time with new workers and a new connection on both
sides, so that an unusually fast connection does not count as an effect of its options. Each round begins with another
candidate, so a machine that becomes slower meanwhile disadvantages none of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import attrs

from .ends import Client, Kind
from .errors import CandidateError
from .measuring import Advance, half_trips, messages_a_second, repeat
from .options import Choice, Figure
from .verdict import Comparison, Speeds, compare

ROUNDS = 5
#: Seconds that a figure and a connection take besides the requested time: for opening, warming up, verifying.
FIGURE_SECONDS, CONNECTION_SECONDS = 0.05, 0.1


@attrs.define(eq=False)
class Candidate:
    """Values of one or more options, and what was measured with them.

    Attributes:
        rounds: the figures: microseconds, messages a second, or 10**6 bytes a second.
        lanes: the transports of its messages.
        trouble: why it could not be measured; "" if it could.
    """

    name: str
    choices: Sequence[Choice]
    rounds: list[dict[Figure, float]] = attrs.field(factory=list)
    lanes: list[str] = attrs.field(factory=list)
    trouble: str = ""

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
    """Candidates that are measured together. The first is trio_ucx's default, with which the others are compared."""

    title: str
    figures: Sequence[Figure]
    candidates: Sequence[Candidate]

    @property
    def default(self) -> Candidate:
        return self.candidates[0]

    def comparisons(self) -> Iterator[tuple[Candidate, Comparison]]:
        """Compares the others with the default, except those that could not be measured."""
        for candidate in self.candidates[1:]:
            if not candidate.trouble:
                yield candidate, compare(self.default.speeds, candidate.speeds)

    def expected_seconds(self, seconds: float) -> float:
        turn = len(self.figures) * (seconds + FIGURE_SECONDS) + CONNECTION_SECONDS
        return ROUNDS * len(self.candidates) * turn

    async def run(self, client: Client, seconds: float, advance: Advance) -> None:
        """Measures each figure of each candidate for ``seconds`` in each round.

        Raises:
            CandidateError: the default cannot be measured, so there is nothing to compare with.
            trio.BrokenResourceError, trio.EndOfChannel: the server is gone.
        """
        done = 0
        for number in range(ROUNDS):
            first = number % len(self.candidates)
            for candidate in [*self.candidates[first:], *self.candidates[:first]]:
                if not candidate.trouble:
                    try:
                        await self._run_one(client, candidate, seconds)
                    except CandidateError as error:
                        if candidate is self.default:
                            raise
                        candidate.trouble = str(error)
                done += 1
                advance(done / (ROUNDS * len(self.candidates)))

    async def _run_one(self, client: Client, candidate: Candidate, seconds: float) -> None:
        async with client.candidate(candidate.choices) as other:
            candidate.rounds.append({figure: await measure(other, figure, seconds) for figure in self.figures})
            candidate.lanes = list(dict.fromkeys(lane.name for lane in other.connection.endpoint.transports))


async def measure(client: Client, figure: Figure, seconds: float) -> float:
    kind = Kind.LATENCY if figure.what == "latency" else Kind.STREAM
    timings = await repeat(client, kind, figure.size, None, seconds, lambda share: None)
    if figure.what == "latency":
        return statistics.median(half_trips(timings))
    rate = messages_a_second(timings)
    return rate if figure.what == "rate" else rate * figure.size / 1e6
