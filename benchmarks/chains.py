"""Compares request chains with ``await``, and with a plain loop in C: ``python benchmarks/chains.py``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.table import Table

from benchmarks import busy_cores, loops, marks, report, runner
from benchmarks.contenders import ours_chains
from benchmarks.contenders.ours_chains import AWAIT, CHAIN, HOW, JOBS, PLAIN, QUICK_AWAIT
from benchmarks.jobs import Job
from benchmarks.marks import Mark, Pick
from benchmarks.pairs import two_cpus
from benchmarks.stats import scaled

ROUNDS, SECONDS = 7, 0.5
QUICK_ROUNDS, QUICK_SECONDS = 3, 0.1
#: ``await`` has to take at least so many times as long as a chain; a chain may take so many times as long as C.
FASTER = {"tcp": 1.5, "shm": 3.0}
SLOWER = 1.3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chains.py",
        description=f"Measures {ours_chains.STEPS:,} steps with remote memory, one process owning it, another one "
        "working, each on a core of its own: as a request chain, with await, and in a loop in C.",
    )
    add = parser.add_argument
    add("--transports", default="tcp,shm", help="of tcp, shm")
    add("--rounds", type=int, help=f"how often each runs ({ROUNDS})")
    add("--seconds", type=float, help=f"for each figure in each round ({SECONDS})")
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_SECONDS} s: a rough look")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    return parser.parse_args(arguments)


def chain_marks(transports: Sequence[str]) -> list[Mark]:
    def of(name: str, transport: str, job: Job) -> Pick:
        return Pick(f"{name} {transport}", job, "step_us")

    found = []
    for transport in transports:
        for job in JOBS:
            chain = of(CHAIN, transport, job)
            for name in (AWAIT, QUICK_AWAIT):
                found.append(Mark(job.way, of(name, transport, job), chain, "at least", FASTER[transport]))
            found.append(Mark(job.way, chain, of(PLAIN, transport, job), "at most", SLOWER))
    return found


def table(rows: runner.Rows, transport: str) -> Table:
    made = Table(title=f"{transport}: microseconds a step", title_justify="left")
    made.add_column("")
    for title in (*HOW, *(f"{name} / chain" for name in (AWAIT, QUICK_AWAIT)), "chain / C", "making the chain"):
        made.add_column(title, justify="right")
    for job in JOBS:
        figures = {name: rows[f"{name} {transport}", job].figures for name in HOW}
        took = {name: found.get("step_us") for name, found in figures.items()}

        def share(one: str, other: str, took: dict[str, float | None] = took) -> str:
            mine, theirs = took[one], took[other]
            return scaled(mine / theirs) if mine and theirs else ""

        cells = [scaled(value) if value else "" for value in took.values()]
        cells += [share(AWAIT, CHAIN), share(QUICK_AWAIT, CHAIN), share(CHAIN, PLAIN)]
        made.add_row(job.way, *cells, scaled(figures[CHAIN].get("build_us", 0)))
    return made


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    transports = arguments.transports.split(",")
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our processes are ended
    busy = busy_cores.others_percent(two_cpus())
    with tempfile.TemporaryDirectory() as folder:
        contenders = ours_chains.contenders(transports, str(loops.build(Path(folder))))
        plan = runner.Plan(contenders, rounds, seconds, two_cpus())
        with report.progress(rounds * len(contenders) * len(JOBS)) as advance:
            rows = runner.run(plan, advance)
    to = report.console()
    for transport in transports:
        to.print(table(rows, transport))
    verdicts = marks.verdicts({key: row.figures for key, row in rows.items()}, chain_marks(transports))
    settings = {"rounds": rounds, "seconds": seconds, "others_percent": busy}
    return report.conclude(rows, verdicts, settings, arguments.json, to)


if __name__ == "__main__":
    sys.exit(main())
