"""What a message costs beside 1, 10, 100 and 1,000 connections: ``python benchmarks/scale.py``; see ``--help``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.table import Table

from benchmarks import busy_cores, marks, report, runner
from benchmarks.contenders import ours_many
from benchmarks.jobs import Job
from benchmarks.pairs import two_cpus
from benchmarks.stats import scaled

COUNTS = (1, 10, 100, 1000)
ROUNDS, SECONDS = 3, 1.0
QUICK_ROUNDS, QUICK_SECONDS = 1, 0.3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scale.py",
        description="Measures what a message of 8 bytes costs when a worker has many connections: an echo server and a "
        "client, each a process on a core of its own, each with one worker.",
    )
    add = parser.add_argument
    add("--connections", default=",".join(map(str, COUNTS)), help="how many, as in '1,1000'")
    add("--transports", default="tcp,shm", help="of tcp, shm")
    add("--rounds", type=int, help=f"how often each number runs ({ROUNDS})")
    add("--seconds", type=float, help=f"for each figure in each round ({SECONDS})")
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} round of {QUICK_SECONDS} s: a rough look")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    return parser.parse_args(arguments)


def table(rows: runner.Rows, transport: str, counts: Sequence[int]) -> Table:
    """A row for each number of connections; what is in brackets is divided by the first row's."""
    made = Table(title=f"{transport}: microseconds a message of 8 B, of both processes' CPU (x the first row)")
    for title in ("connections", *ours_many.WAYS, *(f"CPU, {way}" for way in ours_many.WAYS)):
        made.add_column(title, justify="right")
    for title in ("connects/s", "KiB each, client", "server", "descriptors each", "idle CPU %"):
        made.add_column(title, justify="right")

    def figures(count: int, job: Job) -> dict[str, float]:
        return rows[f"{marks.SCALE.format(count)} {transport}", job].figures

    for count in counts:
        cells = []
        for figure in ("wall_us", "cpu_us"):
            for way in ours_many.WAYS:
                job = Job("exchange", 8, way)
                mine, first = figures(count, job).get(figure), figures(counts[0], job).get(figure)
                share = f" ({mine / first:.2f})" if mine and first else ""
                cells.append("" if mine is None else scaled(mine) + share)
        opening, idle = figures(count, Job("opening")), figures(count, Job("idle"))
        names = ("connects_s", "client_kib", "server_kib", "descriptors")
        cells += [scaled(opening[name]) if name in opening else "" for name in names]
        cells.append(scaled(idle["idle_percent"]) if idle else "")
        made.add_row(f"{count:,}", *cells)
    return made


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    counts = [int(part) for part in arguments.connections.split(",")]
    transports = arguments.transports.split(",")
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    contenders = ours_many.contenders(counts, transports)
    plan = runner.Plan(contenders, rounds, seconds, two_cpus())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our processes are ended
    busy = busy_cores.others_percent(plan.cpus)
    with report.progress(rounds * sum(len(one.jobs) for one in contenders)) as advance:
        rows = runner.run(plan, advance)
    to = report.console()
    for transport in transports:
        to.print(table(rows, transport, counts))
    verdicts = marks.verdicts({key: row.figures for key, row in rows.items()}, marks.scale_marks())
    settings = {"rounds": rounds, "seconds": seconds, "others_percent": busy}
    return report.conclude(rows, verdicts, settings, arguments.json, to)


if __name__ == "__main__":
    sys.exit(main())
