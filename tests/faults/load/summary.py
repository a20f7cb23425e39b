"""The figures of a soak as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .checker import Figures, Slope, Violation

OUTCOMES = ("ok", "cancelled", "end", "broken", "closed", "error", "late")


def percentile(values: Sequence[int], share: float) -> float:
    """Of sorted nanoseconds, in milliseconds."""
    return values[min(len(values) - 1, int(len(values) * share))] / 1e6


def show(console: Console, title: str, figures: Figures, violations: Sequence[Violation]) -> None:
    """Prints what happened, and each violation."""
    console.print(operations(title, figures))
    console.print(facts(figures, violations))
    if figures.slopes:
        console.print(growth(figures.slopes))
    for violation in violations[:50]:
        console.print(str(violation), style="red", markup=False, highlight=False, soft_wrap=True)
    if len(violations) > 50:
        console.print(f"... and {len(violations) - 50} more", style="red")


def operations(title: str, figures: Figures) -> Table:
    table = Table(title=title)
    table.add_column("operation")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for (kind, outcome), count in figures.operations.items():
        rows[kind][outcome] += count
    for kind in sorted(rows):
        table.add_row(kind, *(f"{rows[kind][outcome]:,}" if rows[kind][outcome] else "" for outcome in OUTCOMES))
    return table


def facts(figures: Figures, violations: Sequence[Violation]) -> Table:
    table = Table(show_header=False)
    counts = _counts(figures.ends)
    table.add_row("connections", f"{figures.connections:,}: {counts}")
    table.add_row("processes", _counts(figures.processes))
    table.add_row("faults", _counts(figures.faults) or "none")
    table.add_row("stopped queues in shared memory", str(figures.stopped_queues))
    for name, values in (("ping, no fault near", figures.pings), ("from kill or exit to the report", figures.reported)):
        ordered = sorted(values)
        if ordered:
            shares = (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
            text = ", ".join(f"{label} {percentile(ordered, share):.3f}" for label, share in shares)
            table.add_row(name, f"{text} ms (of {len(ordered):,})")
    table.add_row("seconds", f"{figures.seconds:.1f}")
    kinds = _counts(Counter(violation.kind for violation in violations))
    table.add_row("violations", f"{len(violations)}" + (f": {kinds}" if kinds else ""))
    return table


def growth(slopes: Sequence[Slope]) -> Table:
    """The server that lived longest, and the client that grew most."""
    table = Table(title="growth of processes: per minute, and per thousand connections")
    for name in ("process", "seconds", "connections", "descriptors", "threads", "RSS, KiB"):
        table.add_column(name, justify="left" if name == "process" else "right")
    shown = sorted(slopes, key=lambda slope: slope.name.startswith("server") * 1e9 + slope.seconds)[-4:]
    for slope in reversed(shown):
        cells = []
        for name, unit in (("fds", 1), ("threads", 1), ("rss", 1024)):
            cells.append(f"{slope.per_minute[name] / unit:+.1f}, {slope.per_thousand[name] / unit:+.1f}")
        table.add_row(slope.name, f"{slope.seconds:.0f}", f"{slope.connections:,}", *cells)
    return table


def _counts(counter: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counter.items()))
