"""trio_ucx: Connections."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any

import trio

import trio_ucx
from trio_ucx import ucp

from ..ends import Control, End, echo, ping, repeat
from ..jobs import BY_SIZE, CONNECT, CONVERSATION, IDLE, Batch, Job, Kind, bandwidth, burst, latency, rate
from . import Contender
from .trio_sockets import TrioEnd, receive_exactly

LOOP = "trio"
TAG = 1
#: Seconds that busy tasks compute at a time.
WORK = 10e-6
#: Schedule points that are timed, before there is a worker.
POINTS = 2000
#: Without tcp there are no connections by socket address. What is used is checked.
TLS = {"tcp": "tcp", "shm": "tcp,sm,self"}
SHARED_MEMORY = {"sysv", "posix", "xpmem"}

#: Options that came later than the first release.
NEW_OPTIONS = ("spin", "yield_interval")


def contender(name: str, transport: str, jobs: tuple[Job, ...], **worker: float) -> Contender:
    return Contender(
        f"trio_ucx {name} {transport}", transport, "ours", jobs, options={"tls": TLS[transport], "worker": worker}
    )


def variants(transport: str) -> list[Contender]:
    full = latency() + bandwidth("receive_into", "receive", "byte stream") + rate("plain", "nowait", "group") + IDLE
    full += CONVERSATION + CONNECT + BY_SIZE + (burst("plain", "plain, into", "group") if transport == "shm" else ())
    return [
        contender("default", transport, full),
        contender("yield_interval=100e-6", transport, latency() + rate("plain"), yield_interval=100e-6),
        contender("spin=0", transport, latency() + rate("plain") + IDLE, spin=0.0),
    ]


CONTENDERS = [contender for transport in TLS for contender in variants(transport)]


class NotSupported(Exception):
    """This trio_ucx has no such option."""


def worker_options(setup: dict[str, Any]) -> dict[str, Any]:
    """What to open a worker with; only options that this trio_ucx has."""
    asked = dict(setup["options"].get("worker", {}))
    known = inspect.signature(ucp.open_worker).parameters
    missing = [name for name in asked if name not in known]
    if missing:
        raise NotSupported(f"not supported by this trio_ucx: open_worker({missing[0]}=)")
    return {"config": {"TLS": setup["options"]["tls"]}, **asked}


def check_transports(endpoint: ucp.Endpoint, setup: dict[str, Any]) -> tuple[str, ...]:
    names = tuple(sorted({lane.name for lane in endpoint.transports}))
    if (setup["transport"] == "shm") != bool(SHARED_MEMORY & set(names)):
        raise RuntimeError(f"asked for {setup['transport']}, but the connection runs over {', '.join(names)}")
    return names


@asynccontextmanager
async def busy_tasks(count: int) -> AsyncIterator[None]:
    """So many tasks that compute for WORK seconds between their schedule points."""

    async def work() -> None:
        while True:
            end = perf_counter() + WORK
            while perf_counter() < end:
                pass
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(work)
        yield
        nursery.cancel_scope.cancel()


async def schedule_point_us() -> float:
    """What Trio takes to let other tasks run, where there are none and no worker."""
    begin = perf_counter()
    await repeat(trio.lowlevel.cancel_shielded_checkpoint, POINTS)
    return (perf_counter() - begin) / POINTS * 1e6


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    busy = busy_tasks(setup["options"].get("busy_tasks", 0))
    schedule_us = await schedule_point_us()
    async with ucp.open_worker(**worker_options(setup)) as worker, busy:
        if setup["role"] == "client":
            async with trio_ucx.connect(tuple(setup["address"]), worker=worker) as connection:
                end = await greet(connection, setup)
                end.more = {"schedule_us": schedule_us}
                end.further = partial(trio_ucx.open_ucx_stream, *setup["address"], worker=worker)
                yield end
            return
        listeners = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        async with listeners[0] as listener:
            await control.tell({"address": listener.address})
            async with await listener.accept() as connection:
                end = await greet(connection, setup)
                end.further = listener.accept
                yield end
                with trio.move_on_after(5):  # the client closes first, and its GOODBYE is answered at once
                    async for _ in connection.messages(TAG):
                        pass


async def greet(connection: trio_ucx.Connection, setup: dict[str, Any]) -> OurEnd:
    """A message each way: only then UCX knows which lanes it uses."""
    await connection.send(b"hello")
    await connection.receive()
    end = OurEnd(connection)
    end.transports = check_transports(connection.endpoint, setup)
    return end


async def keep_in_flight(
    worker: ucp.Worker, window: int, count: int, post: Callable[[ucp.RequestGroup], ucp.Request]
) -> None:
    """Posts so many requests to a group, at most ``window`` of them unfinished."""
    async with worker.open_request_group() as group:
        flying: deque[ucp.Request] = deque()
        for _ in range(count):
            if len(flying) == window:
                request = flying.popleft()
                if not request.done:  # one that is done needs no checkpoint
                    await request
            flying.append(post(group))


class OurEnd(TrioEnd):
    def __init__(self, connection: trio_ucx.Connection) -> None:
        super().__init__()
        self.connection = connection
        self.payload = b""
        #: One for all messages in flight, as in ucx_perftest: the cost of more memory is not compared here.
        self.buffer = bytearray()

    def prepare(self, batch: Batch) -> None:
        self.payload = batch.payload()
        if len(self.buffer) != batch.job.size:
            self.buffer = bytearray(batch.job.size)
        self.buffer[:] = bytes(batch.job.size)

    async def ping(self, batch: Batch) -> list[int]:
        if batch.job.way == "conversation":
            return await ping(self._ask, trio.lowlevel.checkpoint_if_cancelled, batch.count)
        if batch.job.way == "byte stream":
            send_all = partial(self.connection.send_all, self.payload)
            return await ping(send_all, partial(self._receive_exactly, batch.job.size), batch.count)
        self.last = self.buffer
        send = partial(self.connection.send, self.payload, tag=TAG)
        return await ping(send, partial(self.connection.receive_into, self.buffer, tag=TAG), batch.count)

    async def _ask(self) -> None:
        async with self.connection.open_conversation() as channel:
            await channel.send(self.payload)
            self.last = await channel.receive()

    async def echo(self, batch: Batch) -> None:
        if batch.job.way == "conversation":
            await self._answer(batch.count)
            return
        if batch.job.way == "byte stream":
            await echo(self._send_last, partial(self._receive_exactly, batch.job.size), batch.count)
            return
        self.last = self.buffer
        send = partial(self.connection.send, self.buffer, tag=TAG)
        await echo(send, partial(self.connection.receive_into, self.buffer, tag=TAG), batch.count)

    async def _answer(self, count: int) -> None:
        arriving = self.connection.conversations()
        for _ in range(count):
            async with await anext(arriving) as channel:
                self.last = await channel.receive()
                await channel.send(self.last)

    async def _send_last(self) -> None:
        await self.connection.send_all(self.last)

    async def _receive_exactly(self, size: int) -> None:
        self.last = await receive_exactly(self.connection, size)

    async def send(self, batch: Batch) -> None:
        way = batch.job.way
        if batch.job.kind is Kind.CONNECT:
            await self.connect_each(batch)
        elif way == "byte stream":
            await repeat(partial(self.connection.send_all, self.payload), batch.count)
        elif way.startswith("plain"):
            await repeat(partial(self.connection.send, self.payload, tag=TAG), batch.count)
        elif way == "nowait":
            await self._send_nowait(batch.count)
        else:
            await self._send_by_group(batch)

    async def _send_nowait(self, count: int) -> None:
        send, payload = self.connection.send_nowait, self.payload
        for _ in range(count):
            try:
                send(payload, tag=TAG)
            except trio.WouldBlock:
                await self.connection.send(payload, tag=TAG)

    async def _send_by_group(self, batch: Batch) -> None:
        connection, payload = self.connection, self.payload
        await keep_in_flight(
            connection.worker, batch.window, batch.count, lambda group: group.send(connection, payload, tag=TAG)
        )

    async def receive(self, batch: Batch) -> None:
        way = batch.job.way
        if batch.job.kind is Kind.CONNECT:
            await self.accept_each(batch)
        elif way == "byte stream":
            await self._receive_stream(batch)
        elif way == "plain":
            receive = self.connection.receive
            for _ in range(batch.count):
                message = await receive(tag=TAG)
            self.last = message
        elif way == "plain, into":
            self.last = self.buffer
            await repeat(partial(self.connection.receive_into, self.buffer, tag=TAG), batch.count)
        elif way == "nowait":
            await self._receive_nowait(batch.count)
        elif way == "receive":
            await self._receive_in_tasks(batch)
        else:
            await self._receive_by_group(batch)

    async def _receive_stream(self, batch: Batch) -> None:
        left = batch.count * batch.job.size
        tail = bytearray()
        while left:
            piece = await self.connection.receive_some()
            left -= len(piece)
            if left < batch.job.size:
                tail += piece
        self.last = tail[-batch.job.size :]

    async def _receive_nowait(self, count: int) -> None:
        receive = self.connection.receive_nowait
        left = count
        while left:
            message = await self.connection.receive(tag=TAG)
            left -= 1
            try:
                while left:
                    message = receive(tag=TAG)
                    left -= 1
            except trio.WouldBlock:
                pass
        self.last = message

    async def _receive_in_tasks(self, batch: Batch) -> None:
        left = batch.count

        async def receiver() -> None:
            nonlocal left
            while left:
                left -= 1
                self.last = await self.connection.receive(tag=TAG)

        async with trio.open_nursery() as nursery:
            for _ in range(min(batch.window, batch.count)):
                nursery.start_soon(receiver)

    async def _receive_by_group(self, batch: Batch) -> None:
        connection, buffer = self.connection, self.buffer
        await keep_in_flight(
            connection.worker, batch.window, batch.count, lambda group: group.receive_into(connection, buffer, tag=TAG)
        )
        self.last = buffer
