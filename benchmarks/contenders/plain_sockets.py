"""Python's own blocking sockets, without any event loop: what the kernel and the machine take to wake a process."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..ends import Control, End
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
        send, receive, clock, payload = self.socket.send, self.socket.recv, time.perf_counter_ns, batch.payload()
        times = []
        before = clock()
        for _ in range(batch.count):
            send(payload)
            message = receive(batch.job.size)
            now = clock()
            times.append(now - before)
            before = now
        self.last = message
        return times

    async def echo(self, batch: Batch) -> None:
        send, receive = self.socket.send, self.socket.recv
        for _ in range(batch.count):
            message = receive(batch.job.size)
            send(message)
        self.last = message
