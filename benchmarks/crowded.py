"""Measures trio_ucx where cores are busy: ``python benchmarks/crowded.py``.

There are several situations, one after the other; within each, the contenders take turns:

* a core for each of the two processes;
* both processes on one core, where a process that polls keeps its peer from answering;
* 1, 2 or 4 more processes that compute all the time: the kernel places all processes on the same two cores;
* 50 busy tasks in each process, each computing for 10 microseconds between its schedule points.

Prints two tables. The first compares the default worker with one that never polls (``spin=0``). The second compares
echoes on the byte stream, and WebSockets and HTTP over it, with Trio's TCP, and has the marks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import attrs
from rich.table import Table

from benchmarks import busy_cores, report, runner
from benchmarks.contenders import Contender, protocols
from benchmarks.contenders.ours import TLS
from benchmarks.jobs import KIB, Job, latency, rate
from benchmarks.marks import Mark, Pick
from benchmarks.pairs import Cpus, two_cpus
from benchmarks.stats import scaled

BUSY_TASKS = 50
#: Echoes on the byte stream.
STREAM, LARGE = Job("latency", 8, "byte stream"), Job("latency", 64 * KIB, "byte stream")
PROTOCOLS = {"WebSocket": protocols.WEBSOCKET, "HTTP": protocols.HTTP}
JOBS = (*latency(8), *rate("plain"))
UNPOLLED = "spin=0"
WORKERS: dict[str, dict[str, float]] = {"default": {}, UNPOLLED: {"spin": 0.0}}
#: Upper limits, as multiples of Trio's TCP: the time and the CPU time of an echo of 8 bytes; the time of one of 64 KiB
#: with spin=0; the time of a WebSocket or HTTP request.
TIME, CPU, LARGE_TIME, PROTOCOL_TIME = 1.15, 1.3, 1.3, 1.0
ROUNDS, SECONDS = 7, 1.0
QUICK_ROUNDS, QUICK_SECONDS = 3, 0.3


@attrs.frozen
class Situation:
    """What the two processes have to share their cores with.

    Attributes:
        one_core: whether both run on one core; else each has one of its own, unless there are ``hogs``.
        hogs: the number of other processes that compute all the time; the kernel places all of them on two cores.
        busy_tasks: the number of computing tasks in each process.
        protocols: whether WebSockets and HTTP are measured.
    """

    name: str
    one_core: bool = False
    hogs: int = 0
    busy_tasks: int = 0
    protocols: bool = False

    @property
    def cpus(self) -> Cpus:
        one, other = two_cpus()
        return (None, None) if self.hogs else (one, one) if self.one_core else (one, other)

    def ours(self, worker: str, transport: str) -> str:
        return f"trio_ucx {worker} {transport}, {self.name}"

    @property
    def theirs(self) -> str:
        return f"trio stream tcp, {self.name}"

    def over(self, stream: str, protocol: str) -> str:
        return f"{protocol} over {stream}, {self.name}"

    def contenders(self, transports: Sequence[str]) -> list[Contender]:
        found = [] if self.busy_tasks else [Contender(self.theirs, "tcp", "trio_sockets", (STREAM, LARGE))]
        for transport, (name, worker) in itertools.product(transports, WORKERS.items()):
            jobs = JOBS if self.busy_tasks else (*JOBS, STREAM, LARGE) if name == UNPOLLED else (*JOBS, STREAM)
            options = {"tls": TLS[transport], "worker": worker, "busy_tasks": self.busy_tasks}
            found.append(Contender(self.ours(name, transport), transport, "ours", jobs, options=options))
        if self.protocols:
            for name, job in PROTOCOLS.items():
                found.append(protocols.contender(self.over("Trio's TCP", name), "tcp", job))
                found += [protocols.ours(self.over(transport, name), transport, job) for transport in transports]
        return found

    def marks(self, transports: Sequence[str]) -> list[Mark]:
        """Returns the comparisons with Trio's TCP; none with busy tasks."""
        if self.busy_tasks:
            return []
        found = []
        for transport, worker in itertools.product(transports, WORKERS):
            ours = self.ours(worker, transport)
            rows = [("8 B echo", STREAM, "median_us", TIME), ("its CPU time", STREAM, "cpu_us", CPU)]
            if worker == UNPOLLED:
                rows.append(("64 KiB echo", LARGE, "median_us", LARGE_TIME))
            for title, job, figure, limit in rows:
                found.append(self._mark(title, Pick(ours, job, figure), Pick(self.theirs, job, figure), limit))
        for transport, (name, job) in itertools.product(transports, PROTOCOLS.items() if self.protocols else ()):
            one, other = (Pick(self.over(stream, name), job, "median_us") for stream in (transport, "Trio's TCP"))
            found.append(self._mark(f"{name} request", one, other, PROTOCOL_TIME))
        return found

    def _mark(self, title: str, ours: Pick, theirs: Pick, limit: float) -> Mark:
        return Mark(f"{title}, {self.name}", ours, theirs, "at most", limit)


SITUATIONS = (
    Situation("a core each", protocols=True),
    Situation("one core for both", one_core=True),
    *(
        Situation(f"{count} busy process{'es' if count > 1 else ''}", hogs=count, protocols=count < 4)
        for count in (1, 2, 4)
    ),
    Situation(f"{BUSY_TASKS} busy tasks", busy_tasks=BUSY_TASKS),
)

#: The main figure of a job, and whether more of it is better.
FIGURES = {"latency": ("median_us", False), "rate": ("messages_s", True)}


#: It ends when its parent has ended.
HOG = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Runs ``count`` processes that compute all the time, on the two cores that are measured on."""
    if not count:
        yield
        return
    before = os.sched_getaffinity(0)
    with ExitStack() as undo:
        undo.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, {cpu for cpu in two_cpus() if cpu is not None} or before)
        for _ in range(count):
            # A session of its own, as each end has: a scheduler that groups by sessions gives it an equal share.
            hog = subprocess.Popen([sys.executable, "-c", HOG], start_new_session=True)
            undo.callback(hog.wait)
            undo.callback(hog.kill)
        yield


def measure(situation: Situation, transports: Sequence[str], rounds: int, seconds: float) -> runner.Rows:
    contenders = [contender for contender in situation.contenders(transports) if contender.installed]
    plan = runner.Plan(contenders, rounds, seconds, situation.cpus)
    figures = sum(len(contender.jobs) for contender in plan.contenders)
    with hogs(situation.hogs), report.progress(rounds * figures) as advance:
        return runner.run(plan, advance)


def compared(rows: runner.Rows, situation: Situation, transport: str, job: Job) -> tuple[float, float, float] | None:
    """The default's figure, that without polling, and how many times as good the default is."""
    figure, more = FIGURES[job.kind_name]
    default, without = (rows[situation.ours(name, transport), job].figures.get(figure) for name in WORKERS)
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
    busy = busy_cores.others_percent(two_cpus())
    table = Table(
        title="trio_ucx that polls, and that does not (spin=0); above 1: polling is better", title_justify="left"
    )
    for title in ("situation", "transport", "figure", "default", "spin=0", "times as good"):
        table.add_column(title, justify="left" if title in ("situation", "transport", "figure") else "right")
    failed, verdicts = [], []
    for situation in SITUATIONS:
        rows = measure(situation, transports, rounds, seconds)
        failed += [row for row in rows.values() if row.errors]

        def look(pick: Pick, rows: runner.Rows = rows) -> float | None:
            row = rows.get((pick.contender, pick.job))
            return row.figures.get(pick.figure) if row else None

        verdicts += [mark.check(look) for mark in situation.marks(transports)]
        for transport in transports:
            for job in JOBS:
                found = compared(rows, situation, transport, job)
                cells = map(scaled, found) if found else ("", "", "")
                table.add_row(situation.name, transport, job.key, *cells)
    to = report.console()
    to.print(table)
    to.print(report.marks_table(verdicts))
    for row in failed:
        to.print(f"{row.contender}, {row.job.key}: {report.trouble(row)}")
    missing = {one.install for each in SITUATIONS for one in each.contenders(transports) if not one.installed}
    for install in sorted(missing):
        print(f"not measured, because packages are missing, which this installs: {install}", file=sys.stderr)
    busy_cores.warn(busy)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
