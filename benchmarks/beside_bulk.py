"""How long small messages wait beside messages of 64 MiB, and how long one step of a task takes: see ``--help``.

The client moves large messages over one connection to a server, and sends pings of 8 bytes over another one. A third
process sends pings only. With ``--beside PYTHON`` the same is measured with the trio_ucx of another environment,
alternately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

LARGE = 64 * 2**20
PING = b"12345678"
#: Seconds between two pings.
PAUSE = 0.0005
CONTENDERS = {"trio": "Trio's TCP", "tcp": "trio_ucx, TCP", "shm": "trio_ucx, shared memory"}
DIRECTIONS = {"out": "bulk out", "both": "bulk both ways"}
#: Seconds that one measurement may take beside what was asked for.
LIMIT = 60.0

#: The figures of a measurement.
FIGURES = {
    "same p50": "pings from the bulk's process, us, p50",
    "same p99": "the same, p99",
    "third p50": "pings from a third process, us, p50",
    "third p99": "the same, p99",
    "step p99.9": "steps of the bulk's process, ms, p99.9",
    "step max": "the same, the longest",
    "there p99.9": "steps of the server, ms, p99.9",
    "there max": "the same, the longest",
    "GB/s": "large messages, all directions together, GB/s",
}
#: At most so many times Trio's figure; so many milliseconds.
PINGS, STEP, LONGEST_STEP, BULK = 1.3, 1.0, 2.0, 0.95


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="beside_bulk.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contenders", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    add("--directions", default=",".join(DIRECTIONS), help=f"of {', '.join(DIRECTIONS)}")
    add("--beside", metavar="PYTHON", help="another environment's python, to measure its trio_ucx, too")
    add(
        "--rounds",
        type=int,
        default=3,
        help="how often each is measured (3): medians, and the largest maximum",
    )
    add("--seconds", type=float, default=3.0, help="for each measurement (3)")
    add("--role", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---- the two kinds of connections ----


class Sockets:
    """Trio's streams. What a connection is for is its first 8 bytes."""

    @asynccontextmanager
    async def open(self, port: int, purpose: bytes) -> AsyncIterator[trio.abc.Stream]:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(purpose.ljust(len(PING)))
            yield stream

    async def serve(self, handle: Callable[[Any, bytes], Any], task_status: trio.TaskStatus[int]) -> None:
        async def begin(stream: trio.SocketStream) -> None:
            with suppress(trio.BrokenResourceError):
                await handle(stream, (await self._exactly(stream)).strip())

        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listener.socket.getsockname()[1])
        await trio.serve_listeners(begin, [listener])

    async def _exactly(self, stream: trio.abc.Stream) -> bytes:
        found = b""
        while len(found) < len(PING):
            more = await stream.receive_some(len(PING) - len(found))
            if not more:
                raise trio.BrokenResourceError("the peer has closed")
            found += more
        return found

    async def send(self, stream: trio.abc.Stream, data: bytes | bytearray) -> None:
        await stream.send_all(data)

    async def receive(self, stream: trio.abc.Stream) -> bytes:
        return await self._exactly(stream)

    async def receive_large(self, stream: trio.abc.Stream, buffer: bytearray) -> int:
        """Receives some of it. Returns how much."""
        return len(await stream.receive_some())


class Ours:
    """Connections of trio_ucx. What a connection is for is its first message."""

    def __init__(self, *, shared_memory: bool) -> None:
        self._options: Any = {"shared_memory": shared_memory}

    @asynccontextmanager
    async def open(self, port: int, purpose: bytes) -> AsyncIterator[Any]:
        import trio_ucx

        async with trio_ucx.connect(("127.0.0.1", port), **self._options) as connection:
            await connection.send(purpose)
            yield connection

    async def serve(self, handle: Callable[[Any, bytes], Any], task_status: trio.TaskStatus[int]) -> None:
        import trio_ucx

        async def begin(connection: Any) -> None:
            with suppress(trio.BrokenResourceError, trio.EndOfChannel):
                await handle(connection, await connection.receive())

        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, begin, 0, host="127.0.0.1", **self._options)
            [listener] = await nursery.start(serve)
            task_status.started(listener.address[1])

    async def send(self, connection: Any, data: bytes | bytearray) -> None:
        await connection.send(data)

    async def receive(self, connection: Any) -> bytes:
        return bytes(await connection.receive())

    async def receive_large(self, connection: Any, buffer: bytearray) -> int:
        return int(await connection.receive_into(buffer))


def library(kind: str) -> Sockets | Ours:
    return Sockets() if kind == "trio" else Ours(shared_memory=kind == "shm")


# ---- the three processes ----


class Steps(trio.abc.Instrument):
    """The milliseconds that each step of a task takes, of CPU time: how long others have the core says nothing."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._begin = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.found.append((time.thread_time() - self._begin) * 1e3)

    def begin(self) -> None:
        self.found.clear()

    def figures(self, where: str) -> dict[str, float]:
        return {f"{where} p99.9": statistics.quantiles(self.found, n=1000)[-1], f"{where} max": max(self.found)}


async def serve(kind: str, steps: Steps) -> None:
    lib = library(kind)

    async def handle(connection: Any, purpose: bytes) -> None:
        if purpose == b"ping":
            while True:
                await lib.send(connection, await lib.receive(connection))
        elif purpose == b"out":
            buffer = bytearray(LARGE)
            while True:
                if await lib.receive_large(connection, buffer) == 0:
                    return
        elif purpose == b"in":
            data = bytearray(LARGE)
            while True:
                await lib.send(connection, data)

    async with trio.open_nursery() as nursery:
        print(await nursery.start(lambda task_status: lib.serve(handle, task_status)), flush=True)
        for act in (steps.begin, lambda: print(json.dumps(steps.figures("there")), flush=True)):
            await trio.to_thread.run_sync(sys.stdin.readline)
            act()
        nursery.cancel_scope.cancel()


async def ping(lib: Sockets | Ours, port: int, seconds: float, name: str) -> dict[str, float]:
    took = []
    async with lib.open(port, b"ping") as connection:
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            begin = time.perf_counter()
            await lib.send(connection, PING)
            await lib.receive(connection)
            took.append((time.perf_counter() - begin) * 1e6)
            await trio.sleep(PAUSE)
    return {f"{name} p50": statistics.median(took), f"{name} p99": statistics.quantiles(took, n=100)[-1]}


async def call(kind: str, port: int, direction: str, seconds: float, steps: Steps) -> dict[str, float]:
    lib = library(kind)
    moved = 0

    async def out() -> None:
        nonlocal moved
        data = bytearray(LARGE)
        async with lib.open(port, b"out") as connection:
            while True:
                await lib.send(connection, data)
                moved += LARGE

    async def in_() -> None:
        nonlocal moved
        buffer = bytearray(LARGE)
        async with lib.open(port, b"in") as connection:
            while True:
                more = await lib.receive_large(connection, buffer)
                moved += more

    async with trio.open_nursery() as nursery:
        nursery.start_soon(out)
        if direction == "both":
            nursery.start_soon(in_)
        await trio.sleep(0.5)
        print("running", flush=True)
        steps.begin()
        before, begin = moved, time.perf_counter()
        found = await ping(lib, port, seconds, "same")
        found["GB/s"] = (moved - before) / 1e9 / (time.perf_counter() - begin)
        found |= steps.figures("step")
        nursery.cancel_scope.cancel()
    return found


# ---- what starts them ----


def measure(python: str, kind: str, direction: str, seconds: float) -> dict[str, float]:
    file = Path(__file__).resolve()
    command = [python, str(file), "--contenders", kind, "--directions", direction, "--seconds", str(seconds), "--role"]
    # Not in the checkout's root, whose trio_ucx would hide the environment's.
    start: Any = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=file.parent)
    with start([*command, "server"]) as server:
        try:
            port = server.stdout.readline().strip()
            with start([*command, f"client {port}"]) as client:
                if client.stdout.readline().strip() != "running":
                    raise RuntimeError("the client failed")
                server.stdin.write("begin\n")
                server.stdin.flush()
                with start([*command, f"third {port}"]) as third:
                    found: dict[str, float] = json.loads(third.communicate(timeout=seconds + LIMIT)[0])
                found |= json.loads(client.communicate(timeout=seconds + LIMIT)[0])
            answer, _ = server.communicate("end\n", timeout=LIMIT)
            found |= json.loads(answer.splitlines()[0])
            return found
        finally:
            server.kill()


def run(role: str, kind: str, direction: str, seconds: float) -> None:
    steps = Steps()
    name, _, port = role.partition(" ")
    if name == "server":
        trio.run(serve, kind, steps, instruments=[steps])
    elif name == "client":
        print(json.dumps(trio.run(call, kind, int(port), direction, seconds, steps, instruments=[steps])), flush=True)
    else:
        print(json.dumps(trio.run(ping, library(kind), int(port), seconds, "third")), flush=True)


def marked(name: str, value: float, trios: float | None, before: float | None) -> str:
    """What the figure is compared with, and whether it reaches the mark."""
    if name.startswith(("same", "third")):
        return "" if not trios else f"{value / trios:6.2f} x Trio's {'ok' if value <= PINGS * trios else 'MISSED'}"
    if name == "GB/s":
        return "" if not before else f"{value / before:6.2f} x before {'ok' if value >= BULK * before else 'MISSED'}"
    most = LONGEST_STEP if "max" in name else STEP
    beside = "" if trios is None else f" (Trio's {trios:.2f})"
    return f"at most {most} ms: {'ok' if value <= most else 'MISSED'}{beside}"


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    kinds, directions = arguments.contenders.split(","), arguments.directions.split(",")
    if arguments.role:
        run(arguments.role, kinds[0], directions[0], arguments.seconds)
        return 0
    runs = [(kind, sys.executable) for kind in kinds]
    if arguments.beside:
        runs += [(kind, arguments.beside) for kind in kinds if kind != "trio"]
    rows: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for direction in directions:
            for kind, python in runs:
                for figure, value in measure(python, kind, direction, arguments.seconds).items():
                    rows[direction, kind, python, figure].append(value)

    def figure_of(direction: str, kind: str, python: str, figure: str) -> float | None:
        values = rows.get((direction, kind, python, figure))
        return None if not values else max(values) if "max" in figure else statistics.median(values)

    for direction in directions:
        for kind in kinds:
            print(f"{DIRECTIONS[direction]}, {CONTENDERS[kind]}:")
            for figure, words in FIGURES.items():
                value = figure_of(direction, kind, sys.executable, figure) or 0.0
                before = figure_of(direction, kind, arguments.beside, figure) if arguments.beside else None
                trios = figure_of(direction, "trio", sys.executable, figure)
                before_text = "" if before is None else f"   beside: {before:10.2f}"
                mark = "" if kind == "trio" else marked(figure, value, trios, before)
                print(f"  {value:10.2f}{before_text}   {words:45} {mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
