"""One of two processes between which the network fails: run by ``test_networks.py``, once as "near" and once as "far".

They have *flows* between them: Connections, which the near one opens, and raw endpoints by worker address. Most flows
carry numbered messages in both directions all the time. The near process also has connections to healthy peers,
through the same worker, and makes round trips over them.

The test gives orders, one line each: ``hurry`` (large transfers follow each other without a pause), ``calm``,
``finish`` (all flows that were not lost end, and everything must arrive, within a number of seconds; answered with a
report), ``report`` (at once), ``end``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import attrs
import trio
from helpers import live_handles, until
from peers import ask, say
from timing import Noise, waited_by

import trio_ucx
from faults.load import payload
from trio_ucx import ucp

#: The tags of a Connection's flow: its name, its messages.
NAME, DATA = 0, 2
#: Messages of one round of the flow "cycle", and seconds that each may take there: connecting, sending and closing.
CYCLE_MESSAGES, CYCLE_TIMEOUT = 5, 4
#: Kinds of flows on raw endpoints by worker address; the index is in the tag.
RAW_KINDS = ("raw idle", "raw small", "raw large")
LARGE = 4 * 2**20
#: The longest pauses between messages, in seconds.
SMALL_PAUSE, LARGE_PAUSE = 0.04, 0.4
_PERIOD = 1_000_003


def size_of(kind: str, number: int) -> int:
    """Of the message with this number."""
    if "large" in kind:
        return LARGE - number
    return payload.HEADER.size + number * 7919 % 20_000


@attrs.define(eq=False)
class Flow:
    """What one side did, got and was told.

    Attributes:
        told: by task, when it was told that the peer is lost, and the error.
        gap: the longest time between two messages that arrived: when it began, and when it ended.
    """

    name: str
    sent: int = 0
    received: int = 0
    told: dict[str, tuple[float, str]] = attrs.field(factory=dict)
    problem: str | None = None
    gap: tuple[float, float] = (0, 0)
    done: bool = False
    _latest: float = 0

    @property
    def kind(self) -> str:
        return self.name.partition(",")[0]

    def wrong(self, problem: str) -> None:
        self.problem = self.problem or problem

    def lost(self, task: str, error: str) -> None:
        self.told[task] = (time.monotonic(), error)

    def arrived(self, units: int = 1) -> None:
        now = time.monotonic()
        if self._latest and now - self._latest > self.gap[1] - self.gap[0]:
            self.gap = (self._latest, now)
        self._latest = now
        self.received += units

    def check(self, direction: str, data: bytes | memoryview) -> None:
        """Notes what is wrong with the next message, if anything is."""
        said = payload.examine(payload.Address(self.name, direction, 0), data)
        if "fault" in said:
            self.wrong(f"message {self.received}: {said['fault']}")
        elif said["n"] != self.received:
            self.wrong(f"message {said['n']} came instead of message {self.received}")

    def report(self) -> dict[str, Any]:
        fields = attrs.asdict(self, filter=lambda attribute, _: not attribute.name.startswith("_"))
        return {name: value for name, value in fields.items() if name != "name"}


class Stretches:
    """The bytes of a stream, any stretch of them. They repeat after a prime number of bytes."""

    def __init__(self, name: str, direction: str) -> None:
        self._bytes = random.Random(name + direction).randbytes(_PERIOD) * 2

    def at(self, position: int, length: int) -> bytes:
        start = position % _PERIOD
        return self._bytes[start : start + length]


class Side:
    """This process's end of all flows."""

    def __init__(self, side: str, seed: int) -> None:
        self.sends, self.receives = ("up", "down") if side == "near" else ("down", "up")
        self.chance = random.Random(f"{seed} {side}")
        self.flows: dict[str, Flow] = {}
        self.hurry = False
        self.finishing = trio.Event()
        #: Of the flow "cycle": by round, the outcome and the seconds (near), or the messages that arrived (far).
        self.cycles: dict[int, Any] = {}
        #: Rounds of it that this side is receiving.
        self.taking = 0
        #: By healthy peer: when each round trip began, how long it took, and the noise meanwhile.
        self.pings: dict[str, list[tuple[float, float, float]]] = {}
        self.noise = Noise()

    async def pause(self, longest: float) -> None:
        """Waits; not before the next large message while ``hurry`` is in force."""
        seconds = self.chance.uniform(0, longest)
        with trio.move_on_after(0 if self.hurry and longest == LARGE_PAUSE else seconds):
            await self.finishing.wait()

    def flow(self, name: str) -> Flow:
        flow = self.flows[name] = Flow(name)
        return flow

    async def run_task(self, flow: Flow, task: str, function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            await function(flow, *arguments)
        except trio.BrokenResourceError as error:
            flow.lost(task, str(error))

    # ---- Connections ----

    async def run_connection(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        """Runs a flow until it is lost or finished, then closes."""
        tasks: dict[str, Callable[..., Awaitable[None]]] = {"watch": self._watch, "end": self._end_watch}
        if flow.kind == "stream":
            tasks |= {"send": self._write, "receive": self._read}
        elif flow.kind != "idle":
            tasks |= {"send": self._send, "receive": self._receive}
        try:
            async with trio.open_nursery() as nursery:
                for name, function in tasks.items():
                    nursery.start_soon(self.run_task, flow, name, function, connection)
            if not flow.told:
                await self.run_task(flow, "close", self._close, connection)
            flow.done = True
        finally:
            connection.abort()

    async def _close(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        await connection.aclose()

    async def _watch(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        """Waits for a message that comes only when the flow ends: an idle wait."""
        if await connection.receive(tag=1) != b"over":
            flow.wrong("another message than the last one came with tag 1")

    async def _end_watch(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        while (
            not connection.closed and connection.peer_state is not trio_ucx.PeerState.LOST
        ):  # not at the end of a stream
            with trio.move_on_after(0.05):
                await self.finishing.wait()
                await connection.send(b"over", tag=1)
                return

    async def _send(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        to = payload.Address(flow.name, self.sends, 0)
        while not self.finishing.is_set():
            await connection.send(payload.make(to, flow.sent, size_of(flow.kind, flow.sent)), tag=DATA)
            flow.sent += 1
            await self.pause(LARGE_PAUSE if flow.kind == "large" else SMALL_PAUSE)
        await connection.send(b"", tag=DATA)

    async def _receive(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        buffer = memoryview(bytearray(LARGE if flow.kind == "large" else 2**16))
        while True:
            length = await connection.receive_into(buffer, tag=DATA)
            if length == 0:
                return
            flow.check(self.receives, buffer[:length])
            flow.arrived()

    async def _write(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        stretches = Stretches(flow.name, self.sends)
        while not self.finishing.is_set():
            length = 2 ** self.chance.randrange(8, 20)
            await connection.send_all(stretches.at(flow.sent, length))
            flow.sent += length
            await self.pause(0.1)
        await connection.send_eof()

    async def _read(self, flow: Flow, connection: trio_ucx.Connection) -> None:
        stretches = Stretches(flow.name, self.receives)
        async for chunk in connection:
            for start in range(0, len(chunk), _PERIOD):
                piece = chunk[start : start + _PERIOD]
                if piece != stretches.at(flow.received, len(piece)):
                    flow.wrong(f"the byte stream is wrong after {flow.received} bytes")
                flow.arrived(len(piece))

    # ---- raw endpoints ----

    async def run_endpoint(self, flow: Flow, endpoint: ucp.Endpoint) -> None:
        """Runs a flow until its endpoint is lost, or it is finished. A tag receive belongs to the worker: UCX never
        tells it that a peer is lost.
        """
        tag = RAW_KINDS.index(flow.kind) + 1
        ended = trio.Event()

        async def watch(flow: Flow) -> None:
            while endpoint.alive:
                with trio.move_on_after(0.02):
                    await ended.wait()
                    return
            flow.lost("alive", "the endpoint is not alive")
            await trio.sleep(0.2)  # for what had arrived
            nursery.cancel_scope.cancel()

        async def send(flow: Flow) -> None:
            to = payload.Address(flow.name, self.sends, 0)
            while not self.finishing.is_set():
                await endpoint.tag_send(payload.make(to, flow.sent, size_of(flow.kind, flow.sent)), tag)
                flow.sent += 1
                if flow.kind == "raw idle":
                    await self.finishing.wait()
                await self.pause(LARGE_PAUSE if flow.kind == "raw large" else SMALL_PAUSE)
            await endpoint.tag_send(b"", tag)

        async def receive(flow: Flow) -> None:
            buffer = memoryview(bytearray(LARGE if flow.kind == "raw large" else 2**16))
            while True:
                length, _ = await endpoint.worker.tag_receive(buffer, tag)
                if length == 0:
                    return
                flow.check(self.receives, buffer[:length])
                flow.arrived()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.run_task, flow, "watch", watch)
                async with trio.open_nursery() as inner:
                    inner.start_soon(self.run_task, flow, "send", send)
                    inner.start_soon(self.run_task, flow, "receive", receive)
                ended.set()
            flow.done = True
            await trio.sleep_forever()
        finally:
            endpoint.abort()

    # ---- connections that come and go ----

    async def make_cycles(self, address: tuple[str, int], worker: ucp.Worker) -> None:
        """Connects, sends messages and closes, again and again: what was closed with success must have arrived."""
        flow = self.flow("cycle")
        while not self.finishing.is_set():
            start = time.monotonic()
            outcome = "ok"
            try:
                async with trio_ucx.connect(
                    address, worker=worker, connect_timeout=CYCLE_TIMEOUT, close_timeout=CYCLE_TIMEOUT
                ) as connection:
                    # Behind what other Connections send over the same endpoint, a send may wait until the peer is lost.
                    with trio.move_on_after(CYCLE_TIMEOUT) as sending:
                        await connection.send(b"cycle %d" % flow.sent, tag=NAME)
                        for number in range(CYCLE_MESSAGES):
                            to = payload.Address("cycle", self.sends, number)
                            await connection.send(payload.make(to, flow.sent, size_of("cycle", number * 10)), tag=DATA)
                    if sending.cancelled_caught:
                        outcome = "the sends were cancelled"
            except (trio.BrokenResourceError, OSError) as error:
                outcome = repr(error)
            self.cycles[flow.sent] = [outcome, start, time.monotonic()]
            flow.sent += 1
            await self.pause(0.2)
        flow.done = True

    async def take_cycle(self, number: int, connection: trio_ucx.Connection) -> None:
        self.cycles[number] = 0
        self.taking += 1
        try:
            async with connection:
                async for message in connection.messages(DATA):
                    said = payload.examine(payload.Address("cycle", self.receives, self.cycles[number]), message)
                    if said.get("n") != number:
                        raise AssertionError(f"message {self.cycles[number]} of round {number}: {said}")
                    self.cycles[number] += 1
        except trio.BrokenResourceError:
            pass
        finally:
            self.taking -= 1

    async def ping(self, name: str, connection: trio_ucx.Connection) -> None:
        """Makes round trips all the time, each with the noise meanwhile."""
        took = self.pings[name] = []
        try:
            while True:
                begin, start = time.monotonic(), time.perf_counter()
                await connection.send(bytes(100))
                await connection.receive()
                now = time.perf_counter()
                took.append((begin, now - start, self.noise.since(start, now)))
                await trio.sleep(0.02)
        finally:
            connection.abort()

    # ---- orders ----

    def report(self) -> dict[str, Any]:
        flows = {name: flow.report() for name, flow in self.flows.items()}
        noise = self.noise.since(0, time.perf_counter())
        return {"at": time.monotonic(), "noise": noise, "flows": flows, "cycles": self.cycles, "pings": self.pings}

    async def obey(self) -> None:
        while True:
            order, *arguments = await ask()
            if order == "end":
                return
            if order in ("hurry", "calm"):
                self.hurry = order == "hurry"
            else:
                if order == "finish":
                    self.finishing.set()
                    with trio.move_on_after(arguments[0]):
                        while self.taking or not all(flow.done for flow in self.flows.values()):
                            await trio.sleep(0.02)
                say(self.report())


async def open_raw(stack: AsyncExitStack, options: dict[str, Any]) -> ucp.Worker:
    worker = await stack.enter_async_context(ucp.open_worker(**options))
    worker.admit("0.0.0.0/0")  # the other side may be the first to connect
    return worker


async def start_raw(side: Side, nursery: trio.Nursery, name: str, worker: ucp.Worker, address: str) -> None:
    for kind in RAW_KINDS:  # in the same order on both sides: UCX pairs the n-th endpoint with the n-th
        endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address)))
        nursery.start_soon(side.run_endpoint, side.flow(f"{kind},{name}"), endpoint)


async def far(host: str, seed: int, intervals: list[float], raw: dict[str, Any]) -> None:
    side = Side("far", seed)

    async def handle(connection: trio_ucx.Connection) -> None:
        try:
            name = (await connection.receive(tag=NAME)).decode()
        except (trio.BrokenResourceError, trio.EndOfChannel):
            connection.abort()
            return
        if name.startswith("cycle"):
            await side.take_cycle(int(name.removeprefix("cycle ")), connection)
        else:
            await side.run_connection(side.flow(name), connection)

    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker())
        workers = {name: await open_raw(stack, options) for name, options in raw.items()}
        stack.enter_context(side.noise)
        async with trio.open_nursery() as nursery:
            addresses = {}
            for interval in intervals:
                [listener] = await trio_ucx.open_ucx_listeners(
                    0, host=host, worker=worker, keepalive_interval=interval, allow_anyone=True
                )
                nursery.start_soon(trio.serve_listeners, handle, [listener])
                addresses[str(interval)] = listener.address
            say([addresses, {name: bytes(one.address).hex() for name, one in workers.items()}])
            for name, address in (await ask()).items():
                await start_raw(side, nursery, name, workers[name], address)
            say("ready")
            await side.obey()
            nursery.cancel_scope.cancel()
    say_end([worker, *workers.values()])


async def near(seed: int, kinds: list[str], raw: dict[str, Any], healthy: dict[str, Any], far: list[Any]) -> None:
    side = Side("near", seed)
    side.noise = Noise(waited_by(*(pid for _, pid in healthy.values())))
    listeners, raw_addresses = far
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker())
        workers = {name: await open_raw(stack, options) for name, options in raw.items()}
        say({name: bytes(one.address).hex() for name, one in workers.items()})
        stack.enter_context(side.noise)
        async with trio.open_nursery() as nursery:
            connect = partial(trio_ucx.open_ucx_stream, worker=worker)
            for name, (address, _) in healthy.items():
                nursery.start_soon(side.ping, name, await connect(*address))
            for interval, address in listeners.items():
                for kind in kinds:
                    name = f"{kind},{interval}"
                    connection = await connect(*address, keepalive_interval=float(interval))
                    await connection.send(name.encode(), tag=NAME)
                    nursery.start_soon(side.run_connection, side.flow(name), connection)
            nursery.start_soon(side.make_cycles, tuple(listeners[max(listeners, key=float)]), worker)
            for name, address in raw_addresses.items():
                await start_raw(side, nursery, name, workers[name], address)
            await until(lambda: any(outcome == "ok" for outcome, *_ in side.cycles.values()))
            say("ready")
            await side.obey()
            nursery.cancel_scope.cancel()
    say_end([worker, *workers.values()])


def say_end(workers: list[ucp.Worker]) -> None:
    """What is left of everything, when all is closed."""
    missed = sum(worker.statistics().missed_events for worker in workers)
    pending = sum(worker.statistics().operations_in_flight for worker in workers)
    alive = live_handles()
    segments = [name for name in os.listdir("/dev/shm") if f"{os.getpid()}" in name]
    say({"missed": missed, "pending": pending, "alive": alive, "segments": segments})


if __name__ == "__main__":
    trio.run(partial({"near": near, "far": far}[sys.argv[1]], *json.loads(sys.argv[2])))
