"""How N processes meet, on paper: a simulation, and the measurements that it needs. See ``--help``.

Each rank of the simulation is a process with one CPU core and one network link, both of which serve in order of
arrival. A message takes CPU time of its sender, time of the sender's link, the latency, and CPU time of its receiver. A
listener has room for so many unfinished handshakes; further clients wait in the kernel's queue. A client that waits too
long gives up, and connects again after a pause. Only the starts and these pauses are random. The three schemes:

* star: every rank connects to rank 0 and sends JOIN. When all are there, rank 0 sends each WELCOME with the table of
  all addresses.
* lookup: the same, but WELCOME has no table. A rank asks rank 0 for an address when it needs it (WHERE, AT). Here each
  asks for its partners in a barrier, one after the other.
* tree: rank r connects to rank (r - 1) // fan-out, which passes the JOINs of its subtree on in one message, and later
  the table.

When all ranks are welcomed, the last rank is lost, and the others are told (LOST).
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import random
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: its folder must not hide other modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import trio
from rich import box
from rich.table import Table

import trio_ucx
from benchmarks import report
from benchmarks.stats import scaled
from trio_ucx import ucp

RANKS = (4, 64, 1_000, 10_000, 100_000)
SCHEMES = ("star", "lookup", "tree")
#: Seconds of simulated time after which a meeting has failed.
PATIENCE = 3600.0
#: Frames of a handshake that the listening side handles: its preamble, OPEN, TAKE, and HELLO over UCX.
STEPS = 4
#: Of trio_ucx.Backoff: the first pause, the longest one.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0


def parameter(value: float, source: str, words: str) -> Any:
    return field(default=value, metadata={"source": source, "words": words})


@dataclass(frozen=True)
class Parameters:
    """What the simulation computes with. Seconds and bytes, where the name says nothing else."""

    handshake_cpu: float = parameter(2.1e-3, "measured", "CPU seconds of a handshake, listening side")
    connect_cpu: float = parameter(2.2e-3, "measured", "the same, connecting side")
    first_cpu: float = parameter(18.6e-3, "measured", "the same, with a worker's first endpoint")
    message_cpu: float = parameter(28e-6, "measured", "CPU seconds of a small message, at each side")
    byte_cpu: float = parameter(0.57e-9, "measured", "CPU seconds for each byte of a long message, at each side")
    handshake_bytes: float = parameter(1280, "measured", "bytes of a handshake in TCP streams, both directions")
    handshake_packets: float = parameter(27, "measured", "TCP packets of a handshake, both directions")
    descriptors: float = parameter(2, "measured", "descriptors of a connection to a worker of its own, listening side")
    descriptors_connecting: float = parameter(2, "measured", "the same, connecting side")
    memory: float = parameter(20_000, "measured", "resident bytes of such a connection, listening side")
    memory_connecting: float = parameter(7_000, "measured", "the same, connecting side")
    exchanges: float = parameter(1024, "in the code", "unfinished handshakes at one listener (MAX_EXCHANGES)")
    connect_timeout: float = parameter(60, "in the code", "after which a rank tries again (the timeout of join)")
    kernel_queue: float = parameter(4096, "assumed", "clients in the kernel's queue (net.core.somaxconn)")
    latency: float = parameter(50e-6, "assumed", "one way, with waking the process")
    bandwidth: float = parameter(1.25e9, "assumed", "bytes a second of a rank's link: 10 Gbit/s")
    spread: float = parameter(5, "assumed", "within so many seconds all ranks have started, rank 0 first")
    join: float = parameter(150, "assumed", "bytes of JOIN, for each rank that it is about")
    row: float = parameter(20, "assumed", "bytes of the table for each rank")
    welcome: float = parameter(60, "assumed", "bytes of WELCOME without the table")
    where: float = parameter(40, "assumed", "bytes of WHERE")
    at: float = parameter(60, "assumed", "bytes of AT")
    lost: float = parameter(100, "assumed", "bytes of LOST")


# ---- what is measured ----

#: Connections that are measured; those that are opened before, for what happens once; at the same time; repetitions.
HELD, WARM, AT_ONCE, REPEATED = 48, 4, 16, 20
SMALL, LONG = 100, 200_000
AUTHKEY = b"the key of the measured meeting!"
#: The connections of the listening side.
_connections: list[trio_ucx.Connection] = []


def tcp_counters() -> dict[str, int]:
    """Bytes and packets of this process's TCP sockets, in both directions, since each was connected."""
    found = {"bytes": 0, "packets": 0}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        except FileNotFoundError:  # the one that listdir() used
            continue
        with socket.socket(fileno=os.dup(int(name))) as probe:
            if probe.type == socket.SOCK_STREAM and probe.family in (socket.AF_INET, socket.AF_INET6):
                info = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144)
                # tcpi_bytes_acked, tcpi_bytes_received, tcpi_segs_out, tcpi_segs_in (linux/tcp.h)
                acked, received, segments_out, segments_in = struct.unpack_from("QQII", info, 120)
                found["bytes"] += acked + received
                found["packets"] += segments_out + segments_in
    return found


def used() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "cpu": time.process_time(),
        "memory": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        **tcp_counters(),
    }


async def handle(connection: trio_ucx.Connection) -> None:
    """Answers ``join``, ``used``, and ``tell SIZE``: a message to every connection, and the CPU time of each."""
    _connections.append(connection)

    async def tell(one: trio_ucx.Connection, message: bytes) -> None:
        await one.send(message, tag=1)
        await one.receive(tag=1)

    try:
        async for message in connection.messages():
            what, _, size = message.partition(b" ")
            answer: dict[str, float] = {}
            if what == b"used":
                answer = used()
            elif what == b"tell":
                before = time.process_time()
                async with trio.open_nursery() as nursery:
                    for one in _connections:
                        nursery.start_soon(tell, one, bytes(int(size)))
                answer = {"cpu": (time.process_time() - before) / len(_connections)}
            await connection.send(json.dumps(answer).encode())
    except trio.BrokenResourceError:
        pass


def allow_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def listen() -> None:
    """The listening side, with one worker, until its standard input ends."""
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker, trio.open_nursery() as nursery:
        start = partial(trio_ucx.serve_ucx, handle, 0, host="127.0.0.1", worker=worker, authkey=AUTHKEY)
        [listener] = await nursery.start(start)
        print(listener.address[1], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def connect_all(port: int) -> dict[str, float]:
    """The connecting side, with a worker for each connection. Returns what was measured, named as in Parameters."""

    async def ask(connection: trio_ucx.Connection, what: str) -> dict[str, float]:
        await connection.send(what.encode())
        answer: dict[str, float] = json.loads(await connection.receive())
        return answer

    async def answer(connection: trio_ucx.Connection) -> None:
        async for _ in connection.messages(tag=1):
            await connection.send(b"heard", tag=1)

    async with AsyncExitStack() as stack:
        context = stack.enter_context(ucp.open_context({"TLS": "tcp"}))
        enter = stack.enter_async_context
        hub, *workers = [await enter(ucp.open_worker(context=context)) for _ in range(1 + WARM + HELD)]
        connections: list[trio_ucx.Connection] = []
        left = len(workers)

        async def connect(to: int, count: int) -> None:
            """Connects one worker after the other, until so many are left."""
            nonlocal left
            while left > count:
                left -= 1
                connection = await trio_ucx.open_ucx_stream("127.0.0.1", to, worker=workers[left], authkey=AUTHKEY)
                connections.append(connection)
                await ask(connection, "join")

        async with trio.open_nursery() as nursery:
            start = partial(trio_ucx.serve_ucx, handle, 0, host="127.0.0.1", worker=hub, authkey=AUTHKEY)
            [own] = await nursery.start(start)
            begin = time.process_time()
            await connect(own.address[1], 0)  # a worker's first endpoint costs much, and each rank has it once
            first = (time.process_time() - begin) / len(workers)  # both sides, which are in this process
            connections.clear()
            left = len(workers)
            await connect(port, HELD)
            there, here = await ask(connections[0], "used"), used()
            async with trio.open_nursery() as connectors:
                for _ in range(AT_ONCE):
                    connectors.start_soon(connect, port, 0)
            there_after, here_after = await ask(connections[0], "used"), used()
            for connection in connections:
                nursery.start_soon(answer, connection)
            told: dict[int, list[float]] = {SMALL: [], LONG: []}
            for _ in range(REPEATED):
                for size, costs in told.items():
                    costs.append((await ask(connections[0], f"tell {size}"))["cpu"])
            nursery.cancel_scope.cancel()
        for connection in connections:
            connection.abort()
    small, long = statistics.median(told[SMALL]), statistics.median(told[LONG])
    listening = {name: (there_after[name] - there[name]) / HELD for name in there}
    connecting = {name: (here_after[name] - here[name]) / HELD for name in here}
    return {
        "handshake_cpu": listening["cpu"],
        "connect_cpu": connecting["cpu"],
        "first_cpu": first,
        "message_cpu": small / 2,
        "byte_cpu": (long - small) / LONG,
        "handshake_bytes": listening["bytes"],
        "handshake_packets": listening["packets"],
        "descriptors": listening["descriptors"],
        "descriptors_connecting": connecting["descriptors"],
        "memory": listening["memory"],
        "memory_connecting": connecting["memory"],
    }


def measure() -> dict[str, float]:
    """Starts both sides as processes of their own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--role"]
    with subprocess.Popen([*command, "listen"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdin is not None and listener.stdout is not None
        try:
            port = listener.stdout.readline().strip()
            done = subprocess.run([*command, f"connect {port}"], capture_output=True, text=True, timeout=120)
        finally:
            listener.stdin.close()
    if done.returncode:
        raise RuntimeError(f"the connecting side failed:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


# ---- the simulation ----


@dataclass(slots=True, eq=False)
class Rank:
    """A process: its CPU and its link, each free from a time on; its listener; and what it knows.

    Attributes:
        subtree: how many ranks there are below it, itself included.
        known: how many of them have joined.
        queue: clients that it has not accepted; None before it has started.
        exchanges: its unfinished handshakes, as the listening side.
    """

    number: int
    subtree: int = 1
    known: int = 1
    cpu_free: float = 0.0
    cpu_used: float = 0.0
    link_free: float = 0.0
    queue: deque[Attempt] | None = None
    exchanges: int = 0
    connections: int = 0
    sent: int = 0
    sent_bytes: float = 0.0
    connected: bool = False
    welcomed: bool = False
    told: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt to connect.

    Attributes:
        pause: seconds before the next one, if this fails.
        over: it is connected, or was given up.
    """

    client: Rank
    pause: float
    over: bool = False


@dataclass(frozen=True)
class Result:
    """What came of a meeting. Times are seconds since the first rank started.

    Attributes:
        messages, message_bytes: JOIN, WELCOME, WHERE and AT; handshakes are not among them.
        rounds: messages of which each is sent when the one before has arrived.
        welcomed: when the last rank was welcomed; infinite if it never was.
        ready: when the last one knew the addresses of its partners in a barrier.
        attempts: to connect; one for each rank, if no rank has to try again.
        refused, timeouts: attempts that failed: nobody listened yet, or they took too long.
        connections, descriptors, memory, cpu, sent_bytes: the greatest figure of any rank.
        lost_messages, lost_seconds: the most LOST that a rank sends when the last rank ends; the time until all know.
    """

    scheme: str
    ranks: int
    messages: int
    message_bytes: float
    rounds: int
    attempts: int
    refused: int
    timeouts: int
    welcomed: float
    ready: float
    welcomed_ranks: int
    connections: int
    descriptors: float
    memory: float
    cpu: float
    sent_bytes: float
    lost_messages: int
    lost_seconds: float


class Meeting:
    """One meeting. The star is a tree whose root is the parent of all others."""

    def __init__(self, scheme: str, size: int, parameters: Parameters, fan_out: int, seed: int) -> None:
        self.scheme, self.size, self.p = scheme, size, parameters
        self.fan_out = fan_out if scheme == "tree" else max(1, size - 1)
        self.now = 0.0
        self.messages = self.attempts = self.refused = self.timeouts = self.ready = 0
        self.last_welcomed = self.last_ready = self.last_told = 0.0
        self.bytes = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._random = random.Random(seed)
        self.ranks = [Rank(number) for number in range(size)]
        for rank in reversed(self.ranks[1:]):
            self.parent(rank).subtree += rank.subtree
        for rank in self.ranks:
            self.after(self._random.uniform(0, parameters.spread) if rank.number else 0.0, self._start, rank)

    def parent(self, rank: Rank) -> Rank:
        return self.ranks[(rank.number - 1) // self.fan_out]

    def children(self, rank: Rank) -> list[Rank]:
        first = rank.number * self.fan_out + 1
        return self.ranks[first : first + self.fan_out]

    @property
    def lookups(self) -> int:
        """How many partners a rank has in a barrier by dissemination: the logarithm of the size, rounded up."""
        return (self.size - 1).bit_length() if self.scheme == "lookup" else 0

    @property
    def depth(self) -> int:
        number, depth = self.size - 1, 0
        while number:
            number, depth = (number - 1) // self.fan_out, depth + 1
        return depth

    def run(self) -> Result:
        self._run_events()
        done = self.ready == self.size
        ranks = self.ranks
        busiest = max(rank.connections for rank in ranks)
        sent = [rank.sent for rank in ranks]
        result = Result(
            scheme=self.scheme,
            ranks=self.size,
            messages=self.messages,
            message_bytes=self.bytes,
            rounds=2 * (self.depth + self.lookups),
            attempts=self.attempts,
            refused=self.refused,
            timeouts=self.timeouts,
            welcomed=self.last_welcomed if done else float("inf"),
            ready=self.last_ready if done else float("inf"),
            welcomed_ranks=sum(rank.welcomed for rank in ranks),
            connections=busiest,
            descriptors=busiest * self.p.descriptors,
            memory=busiest * self.p.memory,
            cpu=max(rank.cpu_used for rank in ranks),
            sent_bytes=max(rank.sent_bytes for rank in ranks),
            lost_messages=0,
            lost_seconds=0.0 if done else float("inf"),
        )
        if not done or self.size == 1:
            return result
        begin, lost = self.now, ranks[-1]
        lost.told = True
        self.after(self.p.latency, self._tell, self.parent(lost), lost)
        self._run_events()
        told = max(rank.sent - before for rank, before in zip(ranks, sent, strict=True))
        return replace(result, lost_messages=told, lost_seconds=self.last_told - begin)

    # ---- the machinery ----

    def after(self, delay: float, do: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, do, arguments))

    def _run_events(self) -> None:
        events = self._events
        while events:
            self.now, _, do, arguments = heapq.heappop(events)
            if self.now > PATIENCE:
                return
            do(*arguments)

    def work(self, rank: Rank, seconds: float, do: Callable[..., object], *arguments: Any) -> None:
        """Calls something when the rank's CPU has worked so long at it, after all that it had to do before."""
        rank.cpu_free = max(self.now, rank.cpu_free) + seconds
        rank.cpu_used += seconds
        self.after(rank.cpu_free - self.now, do, *arguments)

    def send(self, sender: Rank, receiver: Rank, size: float, do: Callable[..., object], *arguments: Any) -> None:
        """Sends a message; calls something when the receiver has taken it."""
        self.messages += 1
        self.bytes += size
        sender.sent += 1
        sender.sent_bytes += size
        cost = self.p.message_cpu + size * self.p.byte_cpu
        sender.cpu_free = max(self.now, sender.cpu_free) + cost
        sender.cpu_used += cost
        sender.link_free = max(sender.cpu_free, sender.link_free) + size / self.p.bandwidth
        self.after(sender.link_free + self.p.latency - self.now, self.work, receiver, cost, do, *arguments)

    # ---- connecting ----

    def _start(self, rank: Rank) -> None:
        rank.queue = deque()
        if rank.number:
            self._connect(rank, FIRST_PAUSE)
        else:
            rank.connected = True
            self._pass_on(rank)

    def _connect(self, client: Rank, pause: float) -> None:
        self.attempts += 1
        attempt = Attempt(client, pause)
        self.after(self.p.connect_timeout, self._time_out, attempt)
        self.after(self.p.latency, self._arrive, attempt, 1.0)

    def _arrive(self, attempt: Attempt, again: float) -> None:
        """A client's SYN arrives. The kernel drops it when its queue is full; the client's repeats it, ever later."""
        server = self.parent(attempt.client)
        if attempt.over:
            return
        if server.queue is None:  # it has not started yet
            self.refused += 1
            self._try_again(attempt)
        elif len(server.queue) > self.p.kernel_queue:
            self.after(again, self._arrive, attempt, 2 * again)
        else:
            server.queue.append(attempt)
            self._admit(server)

    def _time_out(self, attempt: Attempt) -> None:
        if not attempt.over:
            self.timeouts += 1
            self._try_again(attempt)

    def _try_again(self, attempt: Attempt) -> None:
        attempt.over = True
        wait = attempt.pause * self._random.uniform(0.5, 1)
        self.after(wait, self._connect, attempt.client, min(2 * attempt.pause, LONGEST_PAUSE))

    def _admit(self, server: Rank) -> None:
        assert server.queue is not None
        while server.queue and server.exchanges < self.p.exchanges:
            server.exchanges += 1
            self._frame(server, server.queue.popleft(), 1)

    def _frame(self, server: Rank, attempt: Attempt, number: int) -> None:
        """A frame of the client arrives, or the end of its socket, if it has given up."""
        if attempt.over and number > 1:
            server.exchanges -= 1
            self._admit(server)
        else:
            self.work(server, self.p.handshake_cpu / STEPS, self._answer, server, attempt, number)

    def _answer(self, server: Rank, attempt: Attempt, number: int) -> None:
        client, p = attempt.client, self.p
        if number == STEPS:
            server.exchanges -= 1
            self._admit(server)
            if not attempt.over:
                attempt.over = True
                server.connections += 1
                client.connections += 1
                self.after(p.latency, self._connected, client)
            return
        cost = p.first_cpu if client.connections == 0 else p.connect_cpu
        follow = (self._frame, server, attempt, number + 1)
        self.after(p.latency, self.work, client, cost / (STEPS - 1), self.after, p.latency, *follow)

    def _connected(self, rank: Rank) -> None:
        rank.connected = True
        self._pass_on(rank)

    # ---- the messages ----

    def _pass_on(self, rank: Rank) -> None:
        """Sends JOIN, when the whole subtree has joined; at the root, WELCOME."""
        if rank.known < rank.subtree or not rank.connected:
            return
        if rank.number:
            self.send(rank, self.parent(rank), self.p.join * rank.known, self._joined, self.parent(rank), rank.known)
        else:
            self._welcome(rank)

    def _joined(self, rank: Rank, count: int) -> None:
        rank.known += count
        self._pass_on(rank)

    def _welcome(self, rank: Rank) -> None:
        rank.welcomed = True
        self.last_welcomed = self.now
        size = self.p.welcome + (0 if self.scheme == "lookup" else self.p.row * self.size)
        for child in self.children(rank):
            self.send(rank, child, size, self._welcome, child)
        self._ask(rank, self.lookups if rank.number else 0)

    def _ask(self, rank: Rank, count: int) -> None:
        """Asks the root for so many addresses, one after the other."""
        if count:
            self.send(rank, self.ranks[0], self.p.where, self._tell_address, rank, count - 1)
        else:
            self.ready += 1
            self.last_ready = self.now

    def _tell_address(self, rank: Rank, count: int) -> None:
        self.send(self.ranks[0], rank, self.p.at, self._ask, rank, count)

    def _tell(self, rank: Rank, source: Rank) -> None:
        """The rank learns of the loss from ``source``, and tells its other neighbours."""
        rank.told = True
        self.last_told = self.now
        neighbours = self.children(rank)
        if rank.number:
            neighbours = [self.parent(rank), *neighbours]
        for one in neighbours:
            if not one.told and one is not source:
                self.send(rank, one, self.p.lost, self._tell, one, rank)


# ---- the command ----


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="meeting.py",
        description="Simulates how the ranks of a group meet at rank 0, or at a tree of ranks: messages, bytes, time, "
        "connections, and how the loss of a rank becomes known. 100,000 ranks take some minutes.",
    )
    add = parser.add_argument
    add("--ranks", default=",".join(map(str, RANKS)), help="how many, as in '64,10000'")
    add("--schemes", default=",".join(SCHEMES), help=f"of {', '.join(SCHEMES)}")
    add("--fan-out", type=int, default=32, help="ranks that meet at one rank of the tree (32)")
    add("--seed", type=int, default=1, help="of the times at which the ranks start (1)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="another value of a parameter; repeatable")
    add("--measure", action="store_true", help="measures what can be measured, on this machine: about 10 seconds")
    add("--markdown", action="store_true", help="prints the tables in Markdown")
    add("--json", type=Path, metavar="FILE", help="writes parameters and results")
    add("--role", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.fan_out < 1:
        parser.error("--fan-out must be at least 1")
    if unknown := [name for name in found.schemes.split(",") if name not in SCHEMES]:
        parser.error(f"no such scheme: {', '.join(unknown)}")
    try:
        found.chosen = {name: float(value) for name, value in (one.split("=") for one in found.set)}
        replace(Parameters(), **found.chosen)
    except (TypeError, ValueError):
        names = ", ".join(one.name for one in fields(Parameters))
        parser.error(f"--set takes NAME=VALUE with a number and one of these names: {names}")
    return found


EXPLANATION = """\
messages, MB: of all ranks, without handshakes. rounds: messages of which each waits for the one before.
welcomed: when the last rank was. addresses: when the last rank knew those of its partners in a barrier.
time-outs: attempts to connect that took too long. connections to LOST: of the busiest rank.
all know: from the end of the last rank's process until all others know of it."""
COLUMNS: dict[str, Callable[[Result], str]] = {
    "ranks": lambda one: f"{one.ranks:,}",
    "messages": lambda one: f"{one.messages:,}",
    "MB": lambda one: scaled(one.message_bytes / 1e6),
    "rounds": lambda one: str(one.rounds),
    "welcomed, s": lambda one: scaled(one.welcomed),
    "addresses, s": lambda one: scaled(one.ready),
    "time-outs": lambda one: f"{one.timeouts:,}",
    "connections": lambda one: f"{one.connections:,}",
    "descriptors": lambda one: f"{one.descriptors:,.0f}",
    "CPU s": lambda one: scaled(one.cpu),
    "MB sent": lambda one: scaled(one.sent_bytes / 1e6),
    "LOST": lambda one: f"{one.lost_messages:,}",
    "all know, ms": lambda one: scaled(1e3 * one.lost_seconds),
}


def table(title: str, columns: Iterable[str], markdown: bool) -> Table:
    made = Table(title=title, title_justify="left", box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for column in columns:
        made.add_column(column, justify="left" if column in ("name", "from", "") else "right")
    return made


def parameters_table(parameters: Parameters, sources: dict[str, str], markdown: bool) -> Table:
    made = table("parameters", ("name", "value", "from", ""), markdown)
    for one in fields(Parameters):
        value, source = getattr(parameters, one.name), sources.get(one.name, one.metadata["source"])
        made.add_row(one.name, f"{value:.2g}" if value < 1e-3 else scaled(value), source, one.metadata["words"])
    return made


def results_table(results: Iterable[Result], title: str, markdown: bool) -> Table:
    made = table(title, COLUMNS, markdown)
    for one in results:
        made.add_row(*(cell(one) for cell in COLUMNS.values()))
    return made


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    if arguments.role:
        allow_descriptors()
    if arguments.role == "listen":
        trio.run(listen)
        return 0
    if arguments.role:
        print(json.dumps(trio.run(connect_all, int(arguments.role.split()[1]))), flush=True)
        return 0
    found = measure() if arguments.measure else {}
    parameters = replace(Parameters(), **{**found, **arguments.chosen})
    sources = dict.fromkeys(found, "measured now") | dict.fromkeys(arguments.chosen, "--set")
    sizes, schemes = [int(part) for part in arguments.ranks.split(",")], arguments.schemes.split(",")
    to = report.console()
    to.print(parameters_table(parameters, sources, arguments.markdown))
    results = []
    gc.disable()  # millions of small tuples, none in a cycle
    with report.progress(len(sizes) * len(schemes)) as advance:
        for scheme in schemes:
            for size in sizes:
                results.append(Meeting(scheme, size, parameters, arguments.fan_out, arguments.seed).run())
                advance(f"{scheme}, {size:,} ranks")
    for scheme in schemes:
        title = f"tree, fan-out {arguments.fan_out}" if scheme == "tree" else scheme
        to.print(results_table((one for one in results if one.scheme == scheme), title, arguments.markdown))
    to.print(EXPLANATION)
    if arguments.json:
        what = {"parameters": asdict(parameters), "sources": sources, "results": [asdict(one) for one in results]}
        arguments.json.write_text(json.dumps(what, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
