"""Whether polling makes anything worse where there is no core to spare: ``python benchmarks/crowded.py``.

Compares trio_ucx's defaults with ``spin=0``, which never polls, in one interleaved run:

* both processes on one core, where a process that polls keeps its peer from answering;
* 50 busy tasks in each process, each computing for 10 microseconds between its schedule points.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import attrs
from rich.table import Table

from benchmarks import quiet, report, runner
from benchmarks.contenders import Contender
from benchmarks.contenders.ours import TLS
from benchmarks.jobs import Job, latency, rate
from benchmarks.pairs import two_cpus
from benchmarks.stats import scaled

BUSY_TASKS = 50
JOBS = (*latency(8), *rate("plain"))
WORKERS: dict[str, dict[str, float]] = {"default": {}, "spin=0": {"spin": 0.0}}
ROUNDS, SECONDS = 7, 1.0
QUICK_ROUNDS, QUICK_SECONDS = 3, 0.3


@attrs.frozen
class Situation:
    name: str
    one_core: bool = False
    busy_tasks: int = 0

    def contenders(self, transports: Sequence[str]) -> list[Contender]:
        return [
            Contender(
                f"{name} {transport}, {self.name}",
                transport,
                "ours",
                JOBS,
                options={"tls": TLS[transport], "worker": worker, "busy_tasks": self.busy_tasks},
            )
            for transport in transports
            for name, worker in WORKERS.items()
        ]


SITUATIONS = (
    Situation("a core each"),
    Situation("one core for both", one_core=True),
    Situation(f"{BUSY_TASKS} busy tasks", busy_tasks=BUSY_TASKS),
)

#: The main figure of a job, and whether more of it is better.
FIGURES = {"latency": ("median_us", False), "rate": ("messages_s", True)}


def measure(situation: Situation, transports: Sequence[str], rounds: int, seconds: float) -> runner.Rows:
    cpus = two_cpus()
    if situation.one_core:
        cpus = (cpus[0], cpus[0])
    plan = runner.Plan(situation.contenders(transports), rounds, seconds, cpus)
    with report.progress(rounds * len(plan.contenders) * len(JOBS)) as advance:
        return runner.run(plan, advance)


def compared(rows: runner.Rows, situation: Situation, transport: str, job: Job) -> tuple[float, float, float] | None:
    """The default's figure, that without polling, and how many times as good the default is."""
    figure, more = FIGURES[job.kind_name]
    default, without = (rows[f"{name} {transport}, {situation.name}", job].figures.get(figure) for name in WORKERS)
    if not default or not without:
        return None
    return default, without, default / without if more else without / default


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="crowded.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--transports", default="tcp,shm", help="of tcp, shm")
    parser.add_argument("--rounds", type=int, help=f"how often each runs ({ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"for each figure in each round ({SECONDS})")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_SECONDS} s: a rough look"
    )
    arguments = parser.parse_args(given)
    transports = arguments.transports.split(",")
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our processes are ended
    busy = quiet.others_percent(two_cpus())
    table = Table(
        title="trio_ucx that polls, and that does not (spin=0); above 1: polling is better", title_justify="left"
    )
    for title in ("situation", "transport", "figure", "default", "spin=0", "times as good"):
        table.add_column(title, justify="left" if title in ("situation", "transport", "figure") else "right")
    failed = []
    for situation in SITUATIONS:
        rows = measure(situation, transports, rounds, seconds)
        failed += [row for row in rows.values() if row.errors]
        for transport in transports:
            for job in JOBS:
                found = compared(rows, situation, transport, job)
                cells = map(scaled, found) if found else ("", "", "")
                table.add_row(situation.name, transport, job.key, *cells)
    to = report.console()
    to.print(table)
    for row in failed:
        to.print(f"{row.contender}, {row.job.key}: {report.trouble(row)}")
    if warning := quiet.warning(busy):
        print(warning, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
