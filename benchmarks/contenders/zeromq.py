"""pyzmq, blocking: its fastest way."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..ends import Control, End, ping_blocking
from ..jobs import IDLE, Batch, Kind, bandwidth, latency, rate
from . import Contender

LOOP = "blocking"
#: Messages that may be queued at each end, large ones too.
HIGH_WATER = 256

CONTENDERS = [
    Contender(
        f"pyzmq {transport}",
        transport,
        "zeromq",
        latency() + bandwidth() + rate() + IDLE,
        needs="zmq",
        install="pip install pyzmq",
    )
    for transport in ("tcp", "unix")
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    import zmq

    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.hwm = HIGH_WATER
        if setup["role"] == "client":
            socket.connect(setup["address"])
        else:
            socket.bind("tcp://127.0.0.1:*" if setup["transport"] == "tcp" else f"ipc://{Path(folder, 'socket')}")
            await control.tell({"address": socket.get_string(zmq.LAST_ENDPOINT)})
        socket.send(b"hello")
        socket.recv()
        yield ZmqEnd(socket)


class ZmqEnd(End):
    """Blocking calls: nothing here is waited for asynchronously."""

    def __init__(self, socket: Any) -> None:
        super().__init__()
        self.socket = socket
        self.payload = b""

    def prepare(self, batch: Batch) -> None:
        self.payload = batch.payload()
        #: Large messages are not copied.
        self.copy = batch.job.kind is not Kind.BANDWIDTH

    async def ping(self, batch: Batch) -> list[int]:
        times, self.last = ping_blocking(partial(self.socket.send, self.payload), self.socket.recv, batch.count)
        return times

    async def echo(self, batch: Batch) -> None:
        send, receive = self.socket.send, self.socket.recv
        for _ in range(batch.count):
            message = receive()
            send(message)
        self.last = message

    async def send(self, batch: Batch) -> None:
        send, payload, copy = self.socket.send, self.payload, self.copy
        for _ in range(batch.count):
            send(payload, copy=copy)

    async def receive(self, batch: Batch) -> None:
        receive, copy = self.socket.recv, self.copy
        for _ in range(batch.count):
            message = receive(copy=copy)
        self.last = message if copy else bytes(message.buffer)
