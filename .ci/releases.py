#!/usr/bin/env python3
"""Connects trio_ucx on one UCX release with trio_ucx on another: which releases can talk to each other.

Builds one wheel, and installs it in a virtual environment for each release of libucx-cu12; the system's UCX gets a
build of its own. Then connects each release to each, in both roles and over each transport, checks messages, the byte
stream, closing and aborting, and prints a table. Exits with 1 when a pair does something else than EXPECTED says.

    python .ci/releases.py                  all releases
    python .ci/releases.py 1.19 1.22        these only
    python .ci/releases.py --verbose        also prints how each pair went

The same file is the server and the client: the virtual environments run it with --serve and --connect ADDRESS.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # the roles import it and Trio where they run; the program that starts them needs neither
    import trio_ucx

ROOT = Path(__file__).resolve().parent.parent

#: Releases of the PyPI wheel libucx-cu12: the oldest and the newest that trio_ucx supports.
WHEELS = ("1.21", "1.22")
#: The system's UCX, where it is older than every wheel above: Debian 12's libucx-dev is 1.13.
SYSTEM_HEADER = Path("/usr/include/ucp/api/ucp_version.h")

#: What UCX may use, by the name that the table has for it.
#: tcp stands for two hosts, so it leaves the loopback device out. lo is for one host without shared memory.
TRANSPORTS: Mapping[str, str] = {"tcp": "tcp", "sm": "tcp,sm,self", "lo": "tcp"}


@dataclass(frozen=True)
class Known:
    """Why a pair is not "ok", and how its cell may begin instead."""

    reason: str
    cells: tuple[str, ...] = ("refused", "FAILED")


NAMESPACES = Known(
    "UCX 1.22 has 4 bytes for a namespace in its addresses where others have 8 (openucx/ucx ef3890931a): it takes "
    "their loopback device to be reachable, and they do not take its to be"
)


def both_ways(known: Known, transport: str, one: str, others: Sequence[str]) -> dict[tuple[str, str, str], Known]:
    pairs = [(one, other) for other in others] + [(other, one) for other in others]
    return {(server, client, transport): known for server, client in pairs}


#: Pairs that are known not to be "ok", by (server, client, transport).
EXPECTED: Mapping[tuple[str, str, str], Known] = {}

#: Seconds: for all that one role does; for a pair, which is killed then; for a server to start, and for connecting.
ROLE_LIMIT = 20.0
PAIR_LIMIT = 30.0
START_LIMIT = 15.0
#: For one command that builds a virtual environment.
BUILD_LIMIT = 600.0

# ---- the two roles ----

#: Around the thresholds at which UCX and trio_ucx change how they send: 1 KiB, segments of 8 and 64 KiB, rendezvous.
SIZES = (0, 1, 8, 255, 1000, 1023, 1024, 1025, 4096, 8191, 8192, 8193, 65000, 65535, 65536, 65537, 2**18, 2**20, 2**24)
TAGS_IN_FLIGHT = range(100, 108)
SIZES_IN_FLIGHT = (0, 8, 1024, 8192, 65535, 65536, 100, 2**18, 1, 3000) * 3
STREAM_SIZE = 3_000_000

#: Tags: the client's order and the server's answer; messages one by one; a message that nobody receives.
ORDERS, ECHO, UNREAD = 1, 2, 3


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def say(*words: object) -> None:
    print(*words, flush=True)


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def words_of(error: BaseException) -> str:
    return " | ".join(f"{type(each).__name__}: {each}" for each in leaves(error)).replace("\n", " ")


async def echo(connection: trio_ucx.Connection, tag: int) -> None:
    async for message in connection.messages(tag=tag):
        await connection.send(message, tag=tag)


async def echo_stream(connection: trio_ucx.Connection) -> None:
    received = bytearray()
    async for chunk in connection:
        received += chunk
    if received:  # else the client has closed the connection without using the stream
        await connection.send_all(received)
        await connection.send_eof()


async def serve_exchange(connection: trio_ucx.Connection) -> None:
    """Sends back what comes, until the client closes: then every iteration ends."""
    import trio

    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo_stream, connection)
        for tag in (ECHO, *TAGS_IN_FLIGHT):
            nursery.start_soon(echo, connection, tag)
    await connection.aclose()


async def serve_client_aborts(connection: trio_ucx.Connection) -> None:
    import trio

    await connection.send(b"ready", tag=ORDERS)
    try:
        await connection.receive(tag=ORDERS)
    except trio.BrokenResourceError:
        connection.abort()
    else:
        raise AssertionError("the client's abort was not noticed")


async def serve_server_aborts(connection: trio_ucx.Connection) -> None:
    await connection.wait_message(tag=UNREAD)  # the client is in the middle of sending it
    connection.abort()


async def serve() -> None:
    import trio_ucx

    handlers = {
        b"exchange": serve_exchange,
        b"client aborts": serve_client_aborts,
        b"server aborts": serve_server_aborts,
    }
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
    async with listener:
        host, port = listener.address
        say("ADDRESS", f"{host}:{port}")
        while True:
            connection = await listener.accept()
            order = await connection.receive(tag=ORDERS)
            if order == b"end":
                await connection.aclose()
                return
            await handlers[order](connection)


async def exchange_one_by_one(connection: trio_ucx.Connection) -> None:
    for size in SIZES:
        say("STEP", f"message of {size} bytes")
        message = content(size)
        await connection.send(message, tag=ECHO)
        if await connection.receive(tag=ECHO) != message:
            raise AssertionError(f"a message of {size} bytes came back changed")


async def exchange_many(connection: trio_ucx.Connection) -> None:
    import trio

    say("STEP", "many messages in flight")

    async def send(tag: int) -> None:
        for number, size in enumerate(SIZES_IN_FLIGHT):
            await connection.send(content(size, tag * 1000 + number), tag=tag)

    async def receive(tag: int) -> None:
        for number, size in enumerate(SIZES_IN_FLIGHT):
            if await connection.receive(tag=tag) != content(size, tag * 1000 + number):
                raise AssertionError(f"message {number} of {size} bytes with tag {tag} came back changed, or late")

    async with trio.open_nursery() as nursery:
        for tag in TAGS_IN_FLIGHT:
            nursery.start_soon(send, tag)
            nursery.start_soon(receive, tag)


async def exchange_stream(connection: trio_ucx.Connection) -> None:
    import trio

    say("STEP", "byte stream")
    data = content(STREAM_SIZE)
    received = bytearray()
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            await connection.send_all(data)
            await connection.send_eof()

        nursery.start_soon(send)
        async for chunk in connection:
            received += chunk
    if received != data:
        raise AssertionError("the byte stream came back changed")


async def abort(connection: trio_ucx.Connection) -> None:
    """Aborts with a message under way that the server does not receive."""
    import trio
    import trio.testing

    await connection.receive(tag=ORDERS)

    async def send() -> None:
        try:
            await connection.send(content(2**20), tag=UNREAD)
        except trio.ClosedResourceError:
            return
        raise AssertionError("a message that nobody received was sent")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked(0.05)
        connection.abort()


async def be_aborted(connection: trio_ucx.Connection) -> None:
    import trio

    try:
        await connection.send(content(2**20), tag=UNREAD)
    except trio.BrokenResourceError:
        connection.abort()
    else:
        raise AssertionError("the server's abort was not noticed")


async def connect(address: str) -> None:
    import trio_ucx

    say("STEP", "connect")
    try:
        async with trio_ucx.connect(address, connect_timeout=START_LIMIT) as connection:
            await connection.send(b"exchange", tag=ORDERS)
            await exchange_one_by_one(connection)
            say("LANES", lanes(connection))
            await exchange_many(connection)
            await exchange_stream(connection)
            say("STEP", "close")
    except ConnectionRefusedError as error:
        say("REFUSED", error)
        return
    for order, run in ((b"client aborts", abort), (b"server aborts", be_aborted), (b"exchange", exchange_one_by_one)):
        say("STEP", order.decode())
        async with trio_ucx.connect(address, connect_timeout=START_LIMIT) as connection:
            await connection.send(order, tag=ORDERS)
            await run(connection)
    say("STEP", "end of the server")
    async with trio_ucx.connect(address, connect_timeout=START_LIMIT) as connection:
        await connection.send(b"end", tag=ORDERS)


def lanes(connection: trio_ucx.Connection) -> str:
    """The transports that UCX chose; before UCX 1.14 it does not say."""
    import trio_ucx

    try:
        return "+".join(sorted({transport.name for transport in connection.endpoint.transports}))
    except trio_ucx.UCXError:
        return ""


def play(address: str | None) -> int:
    """Runs the server (no address) or the client, and says how that ended."""
    import trio

    async def main() -> None:
        with trio.fail_after(ROLE_LIMIT):
            await (serve() if address is None else connect(address))

    try:
        trio.run(main)
    except BaseException as error:
        say("FAILED", words_of(error))
        return 1
    say("DONE")
    return 0


# ---- the program that builds, starts the roles and judges ----


def system_release() -> str | None:
    """The release of the system's UCX, where its headers are installed and no wheel is that old."""
    if not SYSTEM_HEADER.exists():
        return None
    text = SYSTEM_HEADER.read_text()
    numbers = [re.search(rf"define UCP_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(numbers):
        return None
    release = ".".join(number[1] for number in numbers if number)
    return release if order_of(release) < order_of(WHEELS[0]) else None


def order_of(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def network_device() -> str | None:
    """A network device that other hosts could be reached by. None: there is none, or the system does not say."""
    try:
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return None
    return next((route.split()[0] for route in routes if route and route.split()[0] != "lo"), None)


def environment(transport: str) -> dict[str, str]:
    """What a peer runs with: UCX's options, and no others that this shell may have."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "TRIO_UCX_"))}
    options = {"UCX_TLS": TRANSPORTS[transport]}
    device = "lo" if transport == "lo" else network_device()
    if device is not None:
        options["UCX_NET_DEVICES"] = device
    return {**inherited, **options}


def run(*command: str | Path, **variables: str) -> None:
    """Runs a command that must succeed, silently."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_LIMIT,
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{command}: still running after {BUILD_LIMIT:g} s")
    if done.returncode:
        sys.exit(f"{done.stdout}\n{command}: exit status {done.returncode}")


def build_wheel(directory: Path) -> Path:
    """The wheel that every release of libucx-cu12 has to run with, unless it is there."""
    wheels = directory / "wheel"
    if not list(wheels.glob("*.whl")):
        source = copy_of_the_source(directory / "source")
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
        run(*pip, "--no-deps", "--wheel-dir", wheels, source, TRIO_UCX_SYSTEM_UCX="0")
    [wheel] = wheels.glob("*.whl")
    return wheel


def copy_of_the_source(target: Path) -> Path:
    """A source tree of its own for each build: setuptools takes object files that lie about for its own."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in ROOT.glob("*"):
        if file.is_file():
            shutil.copy(file, target)
    shutil.copytree(ROOT / "trio_ucx", target / "trio_ucx", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return target


def install(release: str, system: bool, directory: Path) -> Path:
    """Makes the virtual environment of a release, unless it is there; returns its interpreter."""
    python = directory / release / "bin" / "python"
    finished = directory / release / "finished"
    if finished.exists():
        return python
    shutil.rmtree(directory / release, ignore_errors=True)
    run(sys.executable, "-m", "venv", directory / release)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if system:
        run(*pip, copy_of_the_source(directory / f"source-{release}"), TRIO_UCX_SYSTEM_UCX="1")
    else:
        run(*pip, build_wheel(directory), f"libucx-cu12=={release}.*")
    run(python, "-I", ROOT / ".ci" / "smoke.py")
    finished.touch()
    return python


class Peer:
    """A process that plays a role. Its lines are read as they come, so that it never waits for us."""

    def __init__(self, python: Path, transport: str, *arguments: str) -> None:
        self.lines: list[str] = []
        self.address: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [python, "-I", Path(__file__).resolve(), *arguments],
            env=environment(transport),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.append(line.rstrip())
            if line.startswith("ADDRESS "):
                self.address.put(line.removeprefix("ADDRESS ").strip())
        self.address.put(None)

    def wait(self, deadline: float) -> bool:
        """Whether it ended in time, and well. Afterwards it has ended."""
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.lines.append("FAILED still running")
        self._reader.join(5)
        return self.process.returncode == 0

    def last(self, word: str) -> str | None:
        """The last line that begins with the word, without the word."""
        return next((line.removeprefix(word).strip() for line in reversed(self.lines) if line.startswith(word)), None)

    def end(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        other = "" if code in (0, 1) else f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        logged = next((line for line in reversed(self.lines) if " ERROR " in line or " Bug: " in line), "")
        return "; ".join(filter(None, (self.last("FAILED") or "", other, logged))) or "ended well"


@dataclass(frozen=True)
class Result:
    """What a pair did.

    Attributes:
        cell: "ok", with the transports where UCX says them; "refused: " and why; or "FAILED".
        details: where and why it failed.
    """

    cell: str
    details: str


def connect_pair(server: Path, client: Path, transport: str) -> Result:
    """Runs a server and a client of two releases; both have ended when it returns."""
    deadline = time.monotonic() + PAIR_LIMIT
    listening = Peer(server, transport, "--serve")
    try:
        address = listening.address.get(timeout=START_LIMIT)
    except queue.Empty:
        address = None
    if address is None:
        listening.wait(0)
        return Result("FAILED", f"the server does not start: {listening.end()}: {' | '.join(listening.lines)}")
    connecting = Peer(client, transport, "--connect", address)
    connected = connecting.wait(deadline)
    refused = connecting.last("REFUSED")
    # A server whose client has failed may be waiting for it.
    served = listening.wait(deadline if connected and refused is None else time.monotonic() + 1)
    if connected and refused is not None:
        return Result(f"refused: {refused}", "")
    if connected and served:
        used = connecting.last("LANES")
        return Result(f"ok ({used})" if used else "ok", "")
    return Result("FAILED", f"at: {connecting.last('STEP')}. client: {connecting.end()}. server: {listening.end()}")


def print_table(transport: str, releases: Sequence[str], results: Mapping[tuple[str, str, str], Result]) -> None:
    rows = [["server \\ client", *releases]]
    for server in releases:
        rows.append([server, *(shortened(results[server, client, transport].cell) for client in releases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{transport} (UCX_TLS={TRANSPORTS[transport]})")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shortened(words: str, length: int = 40) -> str:
    return words if len(words) <= length else words[: length - 3] + "..."


def judge(results: Mapping[tuple[str, str, str], Result]) -> int:
    """Prints which results EXPECTED does not allow, and why others are not "ok"; returns the exit status."""
    counts: Counter[str] = Counter()
    unexpected = 0
    print()
    for (server, client, transport), result in results.items():
        name = f"{transport}: server {server}, client {client}"
        known = EXPECTED.get((server, client, transport))
        cells = known.cells if known else ("ok",)
        if not result.cell.startswith(cells):
            unexpected += 1
            print(f"UNEXPECTED: {name}: {result.cell}, not {' or '.join(cells)}. {result.details}".rstrip())
        elif known:
            counts[known.reason] += 1
    for reason, count in counts.items():
        print(f"Known, {count} pairs: {reason}")
    print(f"{len(results)} pairs, {unexpected} unexpected results")
    return 1 if unexpected else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "releases", nargs="*", help=f"such as 1.19; default: {', '.join(WHEELS)}, and the system's if it is older"
    )
    parser.add_argument(
        "--transports", default="tcp,sm", help=f"comma-separated, of {', '.join(TRANSPORTS)}; default: tcp,sm"
    )
    parser.add_argument("--directory", type=Path, help="build here and keep it; what is there is used again")
    parser.add_argument("--verbose", action="store_true", help="print how each pair went")
    parser.add_argument("--serve", action="store_true", help="be a server; prints its address (used by this script)")
    parser.add_argument("--connect", metavar="ADDRESS", help="be a client (used by this script)")
    options = parser.parse_args(arguments)
    if options.serve or options.connect is not None:
        return play(options.connect)

    system = system_release()
    releases: list[str] = options.releases or [*([system] if system else []), *WHEELS]
    transports: list[str] = options.transports.split(",")
    if wrong := [name for name in transports if name not in TRANSPORTS]:
        parser.error(f"no such transport: {', '.join(wrong)}")
    if wrong := [name for name in releases if not re.fullmatch(r"\d+\.\d+", name)]:
        parser.error(f"a release is written like 1.19, not {', '.join(wrong)}")
    releases = sorted(set(releases), key=order_of)
    with tempfile.TemporaryDirectory() as temporary:
        directory: Path = options.directory or Path(temporary)
        began = time.monotonic()
        interpreters: dict[str, Path] = {}
        for release in releases:
            started = time.monotonic()
            interpreters[release] = install(release, release == system, directory)
            print(f"installed with UCX {release} in {time.monotonic() - started:.0f} s", flush=True)
        results: dict[tuple[str, str, str], Result] = {}
        for transport in transports:
            for server, server_python in interpreters.items():
                for client, client_python in interpreters.items():
                    result = connect_pair(server_python, client_python, transport)
                    results[server, client, transport] = result
                    if options.verbose:
                        words = f"{transport}: server {server}, client {client}: {result.cell}. {result.details}"
                        print(words.rstrip(". "), flush=True)
            print_table(transport, releases, results)
        status = judge(results)
        print(f"took {time.monotonic() - began:.0f} s")
        return status


if __name__ == "__main__":
    sys.exit(main())
