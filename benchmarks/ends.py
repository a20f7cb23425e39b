"""One end of a pair: what a contender provides, and the loops that most of them share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from .jobs import Batch, pattern

Buffer = bytes | bytearray | memoryview
Act = Callable[[], Awaitable[Any]]
T = TypeVar("T")


class Control(Protocol):
    """The line to the process that gives the orders."""

    async def hear(self) -> dict[str, Any]: ...
    async def tell(self, message: dict[str, Any]) -> None: ...
    async def sleep(self, seconds: float) -> None: ...


class End:
    """One end of a connected pair. The client pings and sends, the server echoes and receives."""

    #: What the connection runs over, where the library tells.
    transports: tuple[str, ...] = ()
    #: What opening it has cost, where that is measured.
    info: Mapping[str, float] = MappingProxyType({})

    def __init__(self) -> None:
        #: The last message that arrived.
        self.last: Buffer = b""
        #: Further figures of the last batch that it led.
        self.more: Mapping[str, float] = {}

    def prepare(self, batch: Batch) -> None:
        """Prepares a batch, before its time is taken."""

    async def ping(self, batch: Batch) -> list[int]:
        """Sends each message, and receives it again. Returns the nanoseconds that each took."""
        raise NotImplementedError

    async def echo(self, batch: Batch) -> None:
        raise NotImplementedError

    async def send(self, batch: Batch) -> None:
        raise NotImplementedError

    async def receive(self, batch: Batch) -> None:
        """Receives the messages of a batch; returns when all have arrived."""
        raise NotImplementedError

    def verify(self, batch: Batch) -> None:
        """Compares the last message; a batch begins with none."""
        if bytes(self.last) != pattern(batch.job.size, batch.seed):
            raise RuntimeError(f"wrong data arrived: {bytes(self.last[:16])!r}... of {len(self.last)} bytes")


async def ping(send: Act, receive: Act, count: int) -> list[int]:
    clock = time.perf_counter_ns
    times: list[int] = []
    before = clock()
    for _ in range(count):
        await send()
        await receive()
        now = clock()
        times.append(now - before)
        before = now
    return times


async def echo(send: Act, receive: Act, count: int) -> None:
    for _ in range(count):
        await receive()
        await send()


def ping_blocking(send: Callable[[], object], receive: Callable[[], T], count: int) -> tuple[list[int], T]:
    """The same with calls that block: the times, and the last message."""
    clock = time.perf_counter_ns
    times: list[int] = []
    before = clock()
    for _ in range(count):
        send()
        message = receive()
        now = clock()
        times.append(now - before)
        before = now
    return times, message


async def repeat(act: Act, count: int) -> None:
    for _ in range(count):
        await act()
