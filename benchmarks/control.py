"""The line between the program and its children: JSON objects, one a line, over a Unix socket."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trio

    from .ends import Control

LIMIT = 2**20


class Line:
    """Our side, or a blocking child's: with a limit of time on everything."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = b""

    def tell_now(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear_within(self, seconds: float | None) -> dict[str, Any]:
        """Raises TimeoutError when nothing comes, EOFError when nobody is there any more."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if deadline is not None:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                more = self._socket.recv(65536)
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError("the process ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()


class BlockingControl(Line):
    async def hear(self) -> dict[str, Any]:
        return self.hear_within(None)

    async def tell(self, message: dict[str, Any]) -> None:
        self.tell_now(message)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251


class AsyncioControl:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self._reader.readline())
        return message

    async def tell(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TrioControl:
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def hear(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            more = await self._stream.receive_some()
            if not more:
                raise EOFError
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    async def tell(self, message: dict[str, Any]) -> None:
        await self._stream.send_all(json.dumps(message).encode() + b"\n")

    async def sleep(self, seconds: float) -> None:
        import trio

        await trio.sleep(seconds)


def run(loop: str, line: socket.socket, main: Callable[[Control], Coroutine[Any, Any, None]]) -> None:
    """Runs an end's main function in the loop that its contender wants."""
    if loop == "trio":
        import trio

        async def in_trio() -> None:
            line.setblocking(False)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(line)) as stream:
                await main(TrioControl(stream))

        trio.run(in_trio)
    elif loop == "asyncio":

        async def in_asyncio() -> None:
            reader, writer = await asyncio.open_unix_connection(sock=line, limit=LIMIT)
            await main(AsyncioControl(reader, writer))
            writer.close()

        asyncio.run(in_asyncio())
    else:
        coroutine = main(BlockingControl(line))
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise RuntimeError("a blocking contender must not wait for anything asynchronous")
