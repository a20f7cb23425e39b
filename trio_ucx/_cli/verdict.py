"""Whether another value of an option is clearly faster than trio_ucx's default. Pure functions.

Both are measured in the same rounds, one after the other, and compared round by round, because whatever makes the whole
machine slower for a second makes both slower. With speeds as multiples of the default's in the same round, a figure is

* better if the median is more than 5 % above 1 and *every* round is above 1: then the noise between the rounds is
  smaller than the difference. In five rounds of pure noise, 1 figure in 32 has every round above 1;
* worse if the median is more than 5 % below 1, whatever the single rounds are: in doubt the default stays.

A value is a candidate if a figure is better and none is worse. Among many values and figures some are better by chance,
so a value is proposed only if the same figure is better once more, in fresh rounds (:func:`confirm`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

#: A smaller share of a speed does not count as a difference.
MARGIN = 0.05

#: The speeds of one round, by the figure's key; of a latency, its inverse. More is better.
Speeds = Mapping[str, float]

T = TypeVar("T")


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

    @property
    def overall(self) -> float:
        """The geometric mean of all figures, to choose between candidates."""
        return statistics.geometric_mean(self.medians.values())


def compare(default: Sequence[Speeds], other: Sequence[Speeds]) -> Comparison:
    """Compares the speeds of two candidates in the same rounds."""
    rounds = list(zip(default, other, strict=True))
    return Comparison({figure: [theirs[figure] / ours[figure] for ours, theirs in rounds] for figure in default[0]})


def best(comparisons: Iterable[tuple[T, Comparison]]) -> T | None:
    """Returns the best of those that are better in a figure and worse in none; None if there is none."""
    found = [(name, one) for name, one in comparisons if one.better and not one.worse]
    return max(found, key=lambda pair: pair[1].overall)[0] if found else None


def confirm(again: Iterable[tuple[T, frozenset[str], Comparison]]) -> T | None:
    """Returns the best of those that are better again in a figure in which they were better before.

    Args:
        again: names, the figures that were better before, and the comparison in fresh rounds.
    """
    return best((name, comparison) for name, before, comparison in again if comparison.better & before)
