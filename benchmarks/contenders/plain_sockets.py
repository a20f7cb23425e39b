"""Python's own blocking sockets, without any event loop: what the kernel and the machine take to wake a process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ..ends import Control, End, ping_blocking
from ..jobs import Batch

LOOP = "blocking"


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    if setup["role"] == "client":
        connected = socket.create_connection(tuple(setup["address"]))
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await control.tell({"address": listening.getsockname()})
            connected, _ = listening.accept()
    with connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield SocketEnd(connected)


class SocketEnd(End):
    """For messages so small that they come in one piece. Blocking calls: nothing is waited for asynchronously."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        self.socket = connected

    async def ping(self, batch: Batch) -> list[int]:
        send, receive = partial(self.socket.send, batch.payload()), partial(self.socket.recv, batch.job.size)
        times, self.last = ping_blocking(send, receive, batch.count)
        return times

    async def echo(self, batch: Batch) -> None:
        send, receive = self.socket.send, self.socket.recv
        for _ in range(batch.count):
            message = receive(batch.job.size)
            send(message)
        self.last = message
