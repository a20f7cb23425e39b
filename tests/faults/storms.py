"""Many clients at once, and thousands of connections one after the other: ``python tests/faults/storms.py``.

* 500 clients, in several processes, connect at once, and exchange messages for 30 seconds.
* 20,000 cycles: connect, exchange, end. The connection is closed, aborted or cancelled, its block raises, its process
  ends or is killed. Others open a socket and say nothing or half a hello, or connect and are silent.

Meanwhile the state of the server is read: its memory, descriptors, handles, threads and shared memory. A slope is
that of a straight line, fitted to what was read after the first fifth of the cycles.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import attrs
import trio

ROOT = Path(__file__).resolve().parent.parent
TRANSPORTS = ("tcp", "tcp,sm,self")
CLIENTS, SECONDS, CYCLES = 500, 30.0, 20_000
PROCESSES = 5
#: How a client process may end: at its end, by ``os._exit``, by SIGKILL.
ENDS = (0, 9, -9)
#: What is read of the server.
COUNTS = ("resident", "descriptors", "threads", "segments", "handles", "sinks")


class Child:
    """A process that runs a role of ``load/storm_roles.py``."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._buffer = b""

    async def hear(self) -> Any:
        """Its next line; None at the end."""
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            chunk = await self.process.stdout.receive_some()
            if not chunk:
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    async def tell(self) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(b"\n")


@asynccontextmanager
async def child(role: str, transports: str, *arguments: Any) -> AsyncIterator[Child]:
    """Starts one; its standard input ends with the block, and it is killed if it does not end then."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "faults.load.storm_roles", role, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "UCX_TLS": transports},
        cwd=ROOT,
    )
    assert process.stdin is not None
    try:
        yield Child(process)
        await process.stdin.aclose()
        with trio.move_on_after(30):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@attrs.define(eq=False)
class Server:
    process: Child
    address: list[Any]
    memory: str

    async def state(self) -> dict[str, int]:
        with trio.fail_after(60):
            await self.process.tell()
            found = await self.process.hear()
        if found is None:
            raise RuntimeError(f"the server ended, exit status {await self.process.process.wait()}")
        return dict(found)

    async def settled(self, patience: float = 30) -> dict[str, int]:
        """Its state when no connection, endpoint and operation is left, or else after so many seconds."""
        with trio.move_on_after(patience):
            while True:
                state = await self.state()
                if not any(state[what] for what in ("sinks", "endpoints", "connections", "in flight")):
                    break
                await trio.sleep(0.2)
        return state


@asynccontextmanager
async def open_server(transports: str) -> AsyncIterator[Server]:
    async with child("serve", transports) as process:
        said = await process.hear()
        yield Server(process, said["address"], said["memory"])
    if process.process.returncode:
        raise RuntimeError(f"the server failed, exit status {process.process.returncode}")


@attrs.frozen
class Crowd:
    """How a crowd fared. Seconds."""

    connections: int
    opening: list[float]
    trips: list[float]
    errors: dict[str, int]
    before: dict[str, int]
    during: dict[str, int]
    after: dict[str, int]


async def run_crowd(transports: str, seed: int, clients: int, seconds: float, processes: int = PROCESSES) -> Crowd:
    opening: list[float] = []
    trips: list[float] = []
    errors: Counter[str] = Counter()
    async with open_server(transports) as server:
        before = during = await server.state()

        async def some(number: int, count: int) -> None:
            async with child("crowd", transports, server.address, f"{seed} {number}", count, seconds) as process:
                said = await process.hear()
            if said is None:
                errors[f"a process ended with {process.process.returncode}"] += 1
                return
            opening.extend(said["opening"])
            trips.extend(said["trips"])
            errors.update(said["errors"])

        with trio.fail_after(seconds + 180):
            async with trio.open_nursery() as nursery:
                for number in range(processes):
                    share = clients // processes + (number < clients % processes)
                    nursery.start_soon(some, number, share)
                while len(nursery.child_tasks) == processes:
                    state = await server.state()
                    if state["connections"] > during["connections"]:
                        during = state
                    await trio.sleep(1)
        after = await server.settled()
    return Crowd(len(opening), sorted(opening), sorted(trips), dict(errors), before, during, after)


@attrs.frozen
class Cycles:
    """How the cycles went.

    Attributes:
        states: the server's, after so many cycles.
        slopes: by what was read: the growth of 1,000 cycles.
    """

    done: dict[str, int]
    states: list[tuple[int, dict[str, int]]]
    slopes: dict[str, float]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through the points, by least squares."""
    x0 = sum(x for x, _ in points) / len(points)
    y0 = sum(y for _, y in points) / len(points)
    spread = sum((x - x0) ** 2 for x, _ in points)
    return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0


async def run_cycles(
    transports: str,
    seed: int,
    count: int,
    *,
    each: int = 1000,
    patience: float = 30,
    processes: int = 2,
    together: int = 4,
) -> Cycles:
    """So many cycles. The server's state is read before, and after each 1,000 of them, when nothing is left of these.

    Args:
        patience: seconds to wait for that. Unused endpoints stay for 15 seconds.
    """
    done: Counter[str] = Counter()
    states: list[tuple[int, dict[str, int]]] = []

    async def some(server: Server, name: str, amount: int) -> None:
        first = 0
        while first < amount:
            arguments = (server.address, name, first, amount - first, together, True)
            last = first
            async with child("cycles", transports, *arguments) as process:
                with trio.fail_after(60 + amount / 5):
                    while (said := await process.hear()) is not None:
                        if isinstance(said, int):
                            last = max(last, said)
                        else:
                            done[said] += 1
                await process.process.wait()
            status = process.process.returncode
            if status not in ENDS:
                raise RuntimeError(f"cycle {last} of {name!r}: the client ended with {status}")
            if status:
                done["its process ends"] += 1
            first = last + 1

    async with open_server(transports) as server:
        states.append((0, await server.state()))
        for start in range(0, count, each):
            amount = min(each, count - start)
            async with trio.open_nursery() as nursery:
                for number in range(processes):
                    nursery.start_soon(some, server, f"{seed} {start} {number}", amount // processes)
            last = start + amount == count
            states.append((start + amount, await server.settled(30 if last else patience)))
    warm = [point for point in states if point[0] > count // 5] or states
    slopes = {name: slope([(at / 1000, found[name]) for at, found in warm]) for name in COUNTS}
    return Cycles(dict(done), states, slopes)


def milliseconds(values: Sequence[float], share: float) -> str:
    """A percentile of sorted seconds."""
    return f"{values[min(len(values) - 1, int(len(values) * share))] * 1e3:.1f} ms" if values else "none"


def show_crowd(transports: str, crowd: Crowd) -> None:
    print(f"{transports}: {crowd.connections} connections at once")
    for name, values in (("opening", crowd.opening), ("round trips", crowd.trips)):
        figures = ", ".join(f"p{share * 100:g} {milliseconds(values, share)}" for share in (0.5, 0.99, 1))
        print(f"  {name}: {len(values)}, {figures}")
    for name, found in (("before", crowd.before), ("during", crowd.during), ("after", crowd.after)):
        print(f"  the server {name}: {found['resident'] >> 20} MiB, {found}")
    print(f"  errors: {crowd.errors or 'none'}")


def show_cycles(transports: str, cycles: Cycles) -> None:
    print(f"{transports}: {cycles.states[-1][0]} cycles")
    for what, times in sorted(cycles.done.items(), key=lambda item: -item[1]):
        print(f"  {times:7,} {what}")
    print("  per 1,000 cycles: " + ", ".join(f"{name} {value:+.2f}" for name, value in cycles.slopes.items()))
    for at, found in (*cycles.states[:2], cycles.states[-1]):
        print(f"  after {at:,}: {found}")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", choices=TRANSPORTS, help="UCX_TLS; by default both, one after the other")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="chooses the ways")
    parser.add_argument("--clients", type=int, default=CLIENTS, help=f"at once; 0: none; default {CLIENTS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that these exchange; default {SECONDS:.0f}")
    parser.add_argument("--cycles", type=int, default=CYCLES, help=f"default {CYCLES}")
    arguments = parser.parse_args(given)
    print(f"--seed {arguments.seed}")
    failed = False
    for transports in [arguments.transports] if arguments.transports else TRANSPORTS:
        if arguments.clients:
            crowd = trio.run(run_crowd, transports, arguments.seed, arguments.clients, arguments.seconds)
            show_crowd(transports, crowd)
            failed = failed or bool(crowd.errors)
        if arguments.cycles:
            cycles = trio.run(run_cycles, transports, arguments.seed, arguments.cycles)
            show_cycles(transports, cycles)
            failed = failed or any(what.startswith("failed") for what in cycles.done)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
