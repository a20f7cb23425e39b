"""The output of ``perf --tune``, as text and as JSON."""

from __future__ import annotations

import json
import os
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

import attrs

from .._version import __version__
from ..ucp import Transport
from .options import OPTIONS, Choice, Figure, config_of
from .sizes import format_size
from .trials import ROUNDS, Candidate, Trial
from .verdict import MARGIN, Comparison

WIDTH = 100
#: If the rounds differ by more than this share, the report says so.
MUCH_NOISE = 0.3

EXPLANATION = (
    f"Speeds are multiples of the default's, medians of {ROUNDS} rounds: 1.20 x is 20 % faster (latencies, too). "
    f"Faster is what is so by more than {MARGIN:.0%} and in every round, slower what is so by more than {MARGIN:.0%}. "
    "Latency: half of a round trip; bandwidth and rate: one way, many in flight; MB: 10^6 bytes; data verified."
)
UNKNOWN = (
    "Only speed was measured, over one connection. TCP segments are memory of a worker, not of a connection: a hundred "
    "connections took as much with 8k as with 1m. What programs choose, such as spin=, yield_interval= and window=, "
    "and what the system does, such as the kernel's socket buffers and the CPUs' frequencies, is not UCX's to set."
)


@attrs.define
class Findings:
    """The results so far.

    Attributes:
        server: its address and releases.
        lanes: the transports of the messages, with the defaults.
        seconds: measured for each figure in each round.
        left_out: options that were not compared, and why.
        trials: what was compared; the last one is ``again``, if there was a second comparison.
        faster: the values that were clearly faster at first, at most one of each option.
        again: the second comparison of these values.
        proposed: the values that were faster again; None if none were.
    """

    server: dict[str, str]
    lanes: Sequence[Transport]
    seconds: float
    left_out: dict[str, str] = attrs.field(factory=dict)
    trials: list[Trial] = attrs.field(factory=list)
    faster: Sequence[Choice] = ()
    again: Trial | None = None
    proposed: Sequence[Choice] | None = None

    @property
    def config(self) -> dict[str, str]:
        """What to set."""
        return config_of(self.proposed or ()) or {}

    @property
    def warnings(self) -> list[str]:
        return [OPTIONS[name].warning for name, _ in self.proposed or () if OPTIONS[name].warning]

    @property
    def noise(self) -> float:
        """By how much the rounds of the default differ: the median of all figures."""
        return statistics.median(
            [trial.default.spread(figure) for trial in self.trials for figure in trial.figures] or [0.0]
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that set options that were compared."""
        compared = dict.fromkeys(name for trial in self.trials for one in trial.candidates for name, _ in one.choices)
        return {f"UCX_{name}": os.environ[f"UCX_{name}"] for name in compared if f"UCX_{name}" in os.environ}


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def export(config: dict[str, str]) -> str:
    return "export " + " ".join(f"UCX_{name}={value}" for name, value in config.items())


def header_text(findings: Findings, expected_seconds: float) -> str:
    server = findings.server
    lanes = ", ".join(dict.fromkeys(f"{lane.name}/{lane.device}" for lane in findings.lanes))
    return (
        f"trio_ucx {__version__}; server {server['address']} (trio_ucx {server['trio_ucx']}, UCX {server['ucx']})\n"
        f"transports: {lanes}\n"
        f"{paragraph(EXPLANATION)}\n"
        f"This takes about {expected_seconds:.0f} seconds.\n"
    )


def trial_text(trial: Trial) -> str:
    """A table: the default's values and how much its rounds differ, then the others as multiples of it."""
    comparisons = dict(trial.comparisons())
    default = trial.default
    rows: list[tuple[str, list[str], str]] = [
        ("", [f"{figure.what} {format_size(figure.size)}" for figure in trial.figures], ""),
        (f"{default.name} (default)", [value_text(default, figure) for figure in trial.figures], ""),
        ("its rounds differ by", [f"{default.spread(figure):.0%}" for figure in trial.figures], ""),
    ]
    for candidate in trial.candidates[1:]:
        comparison = comparisons.get(candidate)
        if comparison is None:
            rows.append((candidate.name, ["-"] * len(trial.figures), f"not measured: {candidate.trouble}"))
        else:
            cells = [f"{comparison.medians[figure.key]:.2f} x" for figure in trial.figures]
            over = f" (over {', '.join(candidate.lanes)})" if candidate.lanes != default.lanes else ""
            rows.append((candidate.name, cells, judgement(trial, comparison) + over))
    width = max(len(name) for name, _, _ in rows)
    lines = [trial.title]
    for name, cells, remark in rows:
        padded = [f"{cell:>{len(title)}}" for cell, title in zip(cells, rows[0][1], strict=True)]
        lines.append("  ".join([f"  {name:<{width}}", *padded, remark]).rstrip())
    return "\n".join(lines) + "\n"


def value_text(candidate: Candidate, figure: Figure) -> str:
    value = candidate.median(figure)
    return {"latency": f"{value:.2f} us", "rate": f"{value:,.0f}/s", "bandwidth": f"{value:,.0f} MB/s"}[figure.what]


def judgement(trial: Trial, comparison: Comparison) -> str:
    """Returns the figures in which a candidate is faster or slower, as text."""
    parts = []
    for word, keys in (("faster", comparison.better), ("slower", comparison.worse)):
        found = [f"{figure.what} {format_size(figure.size)}" for figure in trial.figures if figure.key in keys]
        if found:
            parts.append(f"{word}: {', '.join(found)}")
    return "; ".join(parts) or "no clear difference"


def closing_text(findings: Findings) -> str:
    lines = [f"Left out: {name}, because {why}." for name, why in findings.left_out.items()]
    for variable, value in findings.environment.items():
        lines.append(
            f"{variable}={value} is set in this environment, and is what programs use here instead of the default. "
            "While the values of this option were compared, it was not in force."
        )
    if findings.noise > MUCH_NOISE:
        lines.append(
            f"The rounds of the defaults themselves differ by {findings.noise:.0%} (median of the figures): what is "
            "less than that is hard to see. Try again when nothing else uses the machines, or with more --seconds."
        )
    lines = [paragraph(line) for line in lines]
    if findings.config:
        if findings.again is not None and len(findings.proposed or ()) < len(findings.faster):
            lines.append(paragraph("Some of what was faster at first was not when it was measured again, or together."))
        lines += [
            "",
            "It would set, on both sides:",
            f"    ucp.open_worker(config={json.dumps(findings.config)})",
            "or, for the shared workers and whatever else uses UCX:",
            f"    {export(findings.config)}",
            *(paragraph(f"Beware: {warning}") for warning in findings.warnings),
        ]
    elif findings.faster:
        tried = " ".join(f"{name}={value}" for name, value in findings.faster)
        again = f"It would set nothing: {tried} was faster at first, but not when it was measured again."
        lines += ["", paragraph(again)]
    elif findings.trials:
        lines += ["", "It would set nothing: no other value is clearly faster than trio_ucx's default."]
    else:
        lines += ["", "It would set nothing: nothing could be compared."]
    return "\n".join([*lines, "", paragraph(UNKNOWN)])


def as_json(findings: Findings) -> dict[str, Any]:
    again = findings.again
    return {
        "server": findings.server,
        "transports": [attrs.asdict(lane) for lane in findings.lanes],
        "rounds": ROUNDS,
        "seconds": findings.seconds,
        "margin": MARGIN,
        "noise": findings.noise,
        "options": [trial_json(trial) for trial in findings.trials if trial is not again],
        "left_out": findings.left_out,
        "environment": findings.environment,
        "again": trial_json(again) if again is not None else None,
        "config": findings.config,
        "export": export(findings.config) if findings.config else "",
        "warnings": findings.warnings,
    }


def trial_json(trial: Trial) -> dict[str, Any]:
    comparisons = dict(trial.comparisons())

    def one(candidate: Candidate) -> dict[str, Any]:
        comparison = comparisons.get(candidate)
        return {
            "name": candidate.name,
            "config": config_of(candidate.choices),
            "transports": candidate.lanes,
            "trouble": candidate.trouble,
            "rounds": [{figure.key: value for figure, value in round.items()} for round in candidate.rounds],
            "speed": comparison.medians if comparison is not None else {},
            "faster": sorted(comparison.better) if comparison is not None else [],
            "slower": sorted(comparison.worse) if comparison is not None else [],
        }

    return {"title": trial.title, "default": trial.default.name, "values": [one(each) for each in trial.candidates]}
