"""Figures from measurements. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def of_round_trips(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Median, mean and 99th percentile of half the round trips, in microseconds."""
    ordered = sorted(nanoseconds)
    return {
        "median_us": statistics.median(ordered) / 2000,
        "mean_us": statistics.fmean(ordered) / 2000,
        "p99_us": percentile(ordered, 0.99) / 2000,
    }


def of_rounds(rounds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds that have it."""
    values: dict[str, list[float]] = {}
    for figures in rounds:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    return {name: statistics.median(found) for name, found in values.items()}


def next_count(count: int, took: float, seconds: float, most: int = 2_000_000) -> int:
    """How many messages will take about ``seconds``, when ``count`` took ``took`` seconds."""
    return max(1, min(most, round(count * seconds / max(took, 1e-6))))


def scaled(value: float) -> str:
    """Three figures: 0.0712, 7.12, 71.2, 712, 71,234."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"
