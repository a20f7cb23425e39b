"""How fast connections come and go, and what a thousand of them cost: see ``--help``.

The server and the client are processes of their own; each run of them measures one figure over one transport. With
``--beside PYTHON`` the same is measured with the trio_ucx of another environment, alternately, and ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

TLS = {"tcp": "tcp", "shm": "tcp,sm,self"}
#: How many connections are opened at the same time; how many are held for the last figures.
AT_ONCE = 50
HELD = 1000
#: Seconds that one pair of processes may take.
LIMIT = 120.0

FIGURES = {
    "in turn": "connect and close, one after the other: microseconds each",
    "at once": f"the same, {AT_ONCE} at once: microseconds each",
    "client KiB": f"memory of the client for each of {HELD} connections",
    "server KiB": "the same of the server",
    "client fds": "descriptors of the client for each",
    "server fds": "the same of the server",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="connecting.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--transports", default="tcp,shm", help="of tcp, shm")
    add("--beside", metavar="PYTHON", help="another environment's python, to measure its trio_ucx beside this one's")
    add("--rounds", type=int, default=3, help="how often each figure is measured (3); medians are printed")
    add("--count", type=int, default=300, help="connections for each figure of time (300)")
    add("--held", type=int, default=HELD, help=f"connections for the figures of memory ({HELD}); 0 leaves them out")
    add("--role", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---- the two processes ----


def used() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"KiB": pages * os.sysconf("SC_PAGE_SIZE") / 1024, "fds": len(os.listdir("/proc/self/fd"))}


def allow_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(tls: str) -> None:
    import trio

    import trio_ucx
    from trio_ucx import ucp

    async def handle(connection: trio_ucx.Connection) -> None:
        try:
            async for message in connection.messages():
                await connection.send(json.dumps(used()).encode() if message == b"used" else message)
        except trio.BrokenResourceError:
            pass

    async with ucp.open_worker(config={"TLS": tls}) as worker, trio.open_nursery() as nursery:
        start = partial(trio_ucx.serve_ucx, handle, 0, host="127.0.0.1", worker=worker)
        [listener] = await nursery.start(start)
        print(listener.address[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)  # until the client's process closes it
        nursery.cancel_scope.cancel()


async def call(tls: str, port: int, count: int, held: int) -> dict[str, float]:
    import trio

    import trio_ucx
    from trio_ucx import ucp

    found: dict[str, float] = {}
    async with ucp.open_worker(config={"TLS": tls}) as worker:
        open_one = partial(trio_ucx.connect, ("127.0.0.1", port), worker=worker, connect_timeout=60)

        async def once() -> None:
            async with open_one():
                pass

        for _ in range(20):
            await once()
        begin = time.perf_counter()
        for _ in range(count):
            await once()
        found["in turn"] = (time.perf_counter() - begin) / count * 1e6
        begin = time.perf_counter()
        for _ in range(max(1, count // AT_ONCE)):
            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(once)
        found["at once"] = (time.perf_counter() - begin) / (max(1, count // AT_ONCE) * AT_ONCE) * 1e6
        if held:
            found.update(await hold(open_one, held))
    return found


async def hold(open_one: Any, held: int) -> dict[str, float]:
    """What each of so many connections costs both sides, after a message there and back."""
    import trio

    async def server_used(connection: Any) -> dict[str, float]:
        await connection.send(b"used")
        answer: dict[str, float] = json.loads(await connection.receive())
        return answer

    await trio.sleep(3)  # endpoints that were kept for a moment after a close are gone
    connections = [await open_one().__aenter__()]
    before_there, before_here = await server_used(connections[0]), used()
    for _ in range(held):
        connections.append(await open_one().__aenter__())
        await connections[-1].send(b"greeting")
        await connections[-1].receive()
    after_there, after_here = await server_used(connections[0]), used()
    for connection in connections:
        connection.abort()
    return {
        **{f"client {what}": (after_here[what] - before_here[what]) / held for what in before_here},
        **{f"server {what}": (after_there[what] - before_there[what]) / held for what in before_there},
    }


# ---- what starts them ----


def measure(python: str, transport: str, count: int, held: int) -> dict[str, float]:
    command = [python, str(Path(__file__).resolve()), "--count", str(count), "--held", str(held), "--transports"]
    here = Path(__file__).resolve().parent  # not the checkout's root, whose trio_ucx would hide the environment's
    with subprocess.Popen(
        [*command, transport, "--role", "server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            role = f"client {port}"
            answer = subprocess.run(
                [*command, transport, "--role", role], capture_output=True, text=True, cwd=here, timeout=LIMIT
            )
        finally:
            server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
    if answer.returncode:
        raise RuntimeError(f"the client failed:\n{answer.stderr}")
    figures: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    transports = arguments.transports.split(",")
    if arguments.role:
        import trio

        allow_descriptors()
        tls = TLS[transports[0]]
        if arguments.role == "server":
            trio.run(serve, tls)
        else:
            port = int(arguments.role.split()[1])
            print(json.dumps(trio.run(call, tls, port, arguments.count, arguments.held)), flush=True)
        return 0
    pythons = [sys.executable, *([arguments.beside] if arguments.beside else [])]
    rows: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(arguments.rounds):
        for transport in transports:
            for python in pythons:
                held = arguments.held if number == 0 else 0
                for figure, value in measure(python, transport, arguments.count, held).items():
                    rows[transport, figure, python].append(value)
    for transport in transports:
        print(f"{transport}:")
        for figure, words in FIGURES.items():
            values = [statistics.median(rows[transport, figure, python] or [0.0]) for python in pythons]
            beside = (
                f"   beside: {values[1]:9.1f}, {values[1] / values[0]:5.2f} x" if len(values) > 1 and values[0] else ""
            )
            if values[0]:
                print(f"  {values[0]:9.1f}{beside}   {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
