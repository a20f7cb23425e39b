"""pynng, in its Trio mode."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..ends import Control, End, ping, repeat
from ..ends import echo as echo_loop
from ..jobs import IDLE, Batch, bandwidth, latency, rate
from . import Contender

LOOP = "trio"

CONTENDERS = [
    Contender(
        f"pynng {transport}",
        transport,
        "nng",
        latency() + bandwidth() + rate() + IDLE,
        needs="pynng",
        install="pip install pynng",
    )
    for transport in ("tcp", "unix")
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    import pynng

    with tempfile.TemporaryDirectory() as folder, pynng.Pair0(recv_max_size=0) as socket:
        if setup["role"] == "client":
            socket.dial(setup["address"], block=True)
        else:
            if setup["transport"] == "tcp":
                socket.listen("tcp://127.0.0.1:0")
                port = socket.listeners[0].local_address.port
                address = f"tcp://127.0.0.1:{int.from_bytes(port.to_bytes(2, 'little'), 'big')}"
            else:
                address = f"ipc://{Path(folder, 'socket')}"
                socket.listen(address)
            await control.tell({"address": address})
        end = NngEnd(socket)
        await socket.asend(b"hello")
        await socket.arecv()
        yield end


class NngEnd(End):
    def __init__(self, socket: Any) -> None:
        super().__init__()
        self.socket = socket
        self.payload = b""

    def prepare(self, batch: Batch) -> None:
        self.payload = batch.payload()

    async def _receive(self) -> None:
        self.last = await self.socket.arecv()

    async def ping(self, batch: Batch) -> list[int]:
        return await ping(partial(self.socket.asend, self.payload), self._receive, batch.count)

    async def echo(self, batch: Batch) -> None:
        async def send() -> None:
            await self.socket.asend(self.last)

        await echo_loop(send, self._receive, batch.count)

    async def send(self, batch: Batch) -> None:
        await repeat(partial(self.socket.asend, self.payload), batch.count)

    async def receive(self, batch: Batch) -> None:
        await repeat(self._receive, batch.count)
