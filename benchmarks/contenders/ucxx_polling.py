"""ucxx, RAPIDS' binding of UCX for asyncio, which polls: an idle one takes all of a core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ..ends import Control, End, echo, ping
from ..jobs import IDLE, Batch, Kind, bandwidth, latency, rate
from . import Contender
from .perftest import ucx_environment

LOOP = "asyncio"

CONTENDERS = [
    Contender(
        f"ucxx polling {transport}",
        transport,
        "ucxx_polling",
        latency() + bandwidth() + rate() + IDLE,
        needs="ucxx",
        install="pip install ucxx-cu12 && pip install -U libucx-cu12, see README.md",
        environment=ucx_environment(transport),
    )
    for transport in ("tcp", "shm")
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    import ucxx

    ucxx.init(progress_mode="polling")
    if setup["role"] == "client":
        endpoint = await ucxx.create_endpoint(*setup["address"])
        yield UcxxEnd(endpoint)
        await endpoint.close()
        return
    connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def on_connect(endpoint: Any) -> None:
        connected.set_result(endpoint)
        await over.wait()
        await endpoint.close()

    listener = ucxx.create_listener(on_connect, 0)
    await control.tell({"address": ["127.0.0.1", listener.port]})
    yield UcxxEnd(await connected)
    over.set()
    await asyncio.sleep(0.1)
    listener.close()


class UcxxEnd(End):
    def __init__(self, endpoint: Any) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.buffers: list[Any] = []

    def prepare(self, batch: Batch) -> None:
        import numpy

        self.payload = numpy.frombuffer(bytearray(batch.payload()), numpy.uint8)
        wanted = min(batch.window, 64) if batch.job.kind is not Kind.LATENCY else 1
        self.buffers = [numpy.zeros(batch.job.size, numpy.uint8) for _ in range(wanted)]

    async def ping(self, batch: Batch) -> list[int]:
        self.last = self.buffers[0]
        return await ping(
            partial(self.endpoint.send, self.payload), partial(self.endpoint.recv, self.buffers[0]), batch.count
        )

    async def echo(self, batch: Batch) -> None:
        self.last = self.buffers[0]
        buffer = self.buffers[0]
        await echo(partial(self.endpoint.send, buffer), partial(self.endpoint.recv, buffer), batch.count)

    async def send(self, batch: Batch) -> None:
        window = len(self.buffers)
        for done in range(0, batch.count, window):
            await asyncio.gather(*(self.endpoint.send(self.payload) for _ in range(min(window, batch.count - done))))

    async def receive(self, batch: Batch) -> None:
        window = len(self.buffers)
        for done in range(0, batch.count, window):
            now = min(window, batch.count - done)
            await asyncio.gather(*map(self.endpoint.recv, self.buffers[:now]))
        self.last = self.buffers[now - 1]
