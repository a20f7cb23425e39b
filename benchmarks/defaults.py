"""What trio_ucx's own defaults for UCX's options gain: ``python benchmarks/defaults.py``; see ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio

from benchmarks import busy_cores
from benchmarks.options import OPTIONS, Option, figures_of
from benchmarks.pairs import two_cpus
from benchmarks.trials import MARGIN, ROUNDS, Candidate, Trial, open_client, trial_json, trial_text
from trio_ucx._cli.errors import EXPECTED, AlreadyReported, describe
from trio_ucx._cli.measuring import progress_bar
from trio_ucx.ucp._quirks.default_options import DEFAULT_OPTIONS

#: Over TCP, and as UCX chooses: shared memory, inside a machine.
TRANSPORTS = ("tcp", "all")
SECONDS = 0.2
WIDTH = 100

EXPLANATION = (
    f"Speeds are multiples of the default's, medians of {ROUNDS} rounds: 1.20 x is 20 % faster (latencies, too). "
    f"Faster is what is so by more than {MARGIN:.0%} and in every round, slower what is so by more than {MARGIN:.0%}. "
    "Latency: half of a round trip; bandwidth and rate: one way, many in flight; MB: 10^6 bytes; data verified."
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="defaults.py",
        description="Compares trio_ucx's defaults for UCX's options with UCX's own, each alone and all together, "
        "between two processes of this machine.",
    )
    add = parser.add_argument
    add("--transports", default=" ".join(TRANSPORTS), help=f"one or more TLS of UCX ('{' '.join(TRANSPORTS)}')")
    add("--seconds", type=float, default=SECONDS, help=f"for each figure in each round ({SECONDS})")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    return parser.parse_args(arguments)


def trials(options: Sequence[Option]) -> list[Trial]:
    """Our value and UCX's of each option, then of all."""
    alone = [
        Trial(
            f"{option.name}: {option.about}",
            option.figures,
            Candidate(option.ours, {option.name: option.ours}),
            Candidate(option.of_ucx, {option.name: option.of_ucx}),
        )
        for option in options
    ]
    together = Trial(
        "All of them",
        figures_of(options),
        Candidate("trio_ucx's", {option.name: option.ours for option in options}),
        Candidate("UCX's", {option.name: option.of_ucx for option in options}),
    )
    return [*alone, together]


async def measure(transports: str, seconds: float) -> list[Trial]:
    done = []
    async with open_client(transports, {}) as client:
        lanes = client.connection.endpoint.transports
    print(f"\nTLS={transports}: {', '.join(dict.fromkeys(lane.name for lane in lanes))}\n")
    for trial in trials([option for option in OPTIONS.values() if option.matters(lanes)]):
        try:
            with progress_bar(trial.title) as advance:
                await trial.run(transports, seconds, advance)
        except* (*EXPECTED, AlreadyReported) as error:
            print(f"{trial.title}\n  not measured: {describe(error)}\n")
        else:
            print(trial_text(trial), flush=True)
            done.append(trial)
    return done


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    busy = busy_cores.others_percent(two_cpus())
    print(paragraph(EXPLANATION))
    found = {one: trio.run(measure, one, arguments.seconds) for one in arguments.transports.split()}
    others = [name for name in DEFAULT_OPTIONS if name not in OPTIONS]
    print(paragraph(f"Not about speed, see trio_ucx/ucp/_quirks/default_options.py: {', '.join(others)}."))
    busy_cores.warn(busy)
    if arguments.json:
        report = {transports: [trial_json(trial) for trial in done] for transports, done in found.items()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
