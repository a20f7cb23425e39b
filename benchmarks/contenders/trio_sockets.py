"""Trio's own streams, over TCP and Unix sockets."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ..ends import Control, End, ping, repeat
from ..ends import echo as echo_loop
from ..jobs import CONNECT, IDLE, Batch, Kind, bandwidth, burst, latency, rate
from . import Contender

LOOP = "trio"
#: Of the sizes tried (64 KiB to 1 MiB) the fastest.
CHUNK = 256 * 1024
#: Small messages in a stream have their length before them.
LENGTH = struct.Struct("<I")

JOBS = latency() + bandwidth() + rate() + IDLE
CONTENDERS = [
    # Trio takes a Unix socket for connected even where the listener's queue was full, so only TCP connects in turn.
    Contender("trio stream tcp", "tcp", "trio_sockets", JOBS + CONNECT),
    Contender("trio stream unix", "unix", "trio_sockets", JOBS + burst()),
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    if setup["role"] == "client":
        if setup["transport"] == "tcp":
            open_one = partial(trio.open_tcp_stream, *setup["address"])
        else:
            open_one = partial(trio.open_unix_socket, setup["address"])
        async with await open_one() as stream:
            yield StreamEnd(stream, open_one)
        return
    with tempfile.TemporaryDirectory() as folder:
        if setup["transport"] == "tcp":
            listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
            address = listener.socket.getsockname()
        else:
            listening = trio.socket.socket(trio.socket.AF_UNIX)
            address = str(Path(folder, "socket"))
            await listening.bind(address)
            listening.listen()
            listener = trio.SocketListener(listening)
        async with listener:
            await control.tell({"address": address})
            async with await listener.accept() as stream:
                yield StreamEnd(stream, listener.accept)


async def receive_exactly(stream: trio.abc.ReceiveStream, size: int) -> bytes | bytearray:
    data: bytes | bytearray = await stream.receive_some(size)
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise EOFError("the stream ended")
        data = data + more
    return data


class TrioEnd(End):
    """An end that can make further connections."""

    #: The client opens another one, the server accepts it.
    further: Callable[[], Awaitable[trio.abc.Stream]]

    async def connect_each(self, batch: Batch) -> None:
        """Opens and closes connections, one after the other; the last one carries the message."""
        for left in reversed(range(batch.count)):
            async with await self.further() as stream:
                if not left:
                    await stream.send_all(batch.payload())

    async def accept_each(self, batch: Batch) -> None:
        """Accepts them, and reads until the peer has closed."""

        async def handle(stream: trio.abc.Stream) -> None:
            async with stream:
                async for data in stream:
                    self.last = data

        async with trio.open_nursery() as nursery:
            for _ in range(batch.count):
                nursery.start_soon(handle, await self.further())


class StreamEnd(TrioEnd):
    def __init__(self, stream: trio.SocketStream, further: Callable[[], Awaitable[trio.SocketStream]]) -> None:
        super().__init__()
        self.stream, self.further = stream, further
        self.payload = b""

    def prepare(self, batch: Batch) -> None:
        self.payload = batch.payload()

    async def _receive_exactly(self, size: int) -> None:
        self.last = await receive_exactly(self.stream, size)

    async def ping(self, batch: Batch) -> list[int]:
        send = partial(self.stream.send_all, self.payload)
        return await ping(send, partial(self._receive_exactly, batch.job.size), batch.count)

    async def echo(self, batch: Batch) -> None:
        async def send() -> None:
            await self.stream.send_all(self.last)

        await echo_loop(send, partial(self._receive_exactly, batch.job.size), batch.count)

    async def send(self, batch: Batch) -> None:
        if batch.job.kind is Kind.CONNECT:
            return await self.connect_each(batch)
        data = self.payload
        if batch.job.kind is Kind.RATE:
            data = LENGTH.pack(len(data)) + data
        await repeat(partial(self.stream.send_all, data), batch.count)

    async def receive(self, batch: Batch) -> None:
        if batch.job.kind is Kind.CONNECT:
            return await self.accept_each(batch)
        if batch.job.kind is Kind.RATE:
            await self._receive_messages(batch.count)
            return
        left = batch.count * batch.job.size
        tail = bytearray()
        while left:
            piece = await self.stream.receive_some(min(CHUNK, left))
            if not piece:
                raise EOFError("the stream ended")
            left -= len(piece)
            if left < batch.job.size:
                tail += piece
        self.last = tail[-batch.job.size :]

    async def _receive_messages(self, count: int) -> None:
        unpack, header = LENGTH.unpack_from, LENGTH.size
        rest = b""
        message = b""
        left = count
        while left:
            more = await self.stream.receive_some()
            if not more:
                raise EOFError("the stream ended")
            data = rest + more
            place = 0
            while len(data) - place >= header:
                (length,) = unpack(data, place)
                end = place + header + length
                if end > len(data):
                    break
                message = data[place + header : end]
                place = end
                left -= 1
            rest = data[place:]
        self.last = message
