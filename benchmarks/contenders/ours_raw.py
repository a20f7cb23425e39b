"""trio_ucx.ucp: endpoints and tags of UCP, without Connections. No handshake, no credits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from trio_ucx import ucp

from ..ends import Control, End, echo, ping
from ..jobs import Batch, bandwidth, latency, rate
from . import Contender
from .ours import TLS, check_transports, keep_in_flight, worker_options

LOOP = "trio"
#: The tag of what each end sends.
TAGS = {"client": 1, "server": 2}
GOODBYE = 3

CONTENDERS = [
    Contender(
        f"trio_ucx.ucp raw {transport}",
        transport,
        "ours_raw",
        latency() + bandwidth("group") + rate("group"),
        options={"tls": tls},
    )
    for transport, tls in TLS.items()
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    async with ucp.open_worker(**worker_options(setup), admit=["127.0.0.1"]) as worker:
        role = setup["role"]
        if role == "client":
            endpoint = await worker.open_endpoint(tuple(setup["address"]))
        else:
            listener = await worker.open_listener("127.0.0.1", 0)
            await control.tell({"address": listener.address})
            endpoint = await (await listener.accept_request()).accept()
            await listener.aclose()
        other = "server" if role == "client" else "client"
        end = RawEnd(worker, endpoint, TAGS[role], TAGS[other])
        if role == "client":
            await endpoint.tag_send(b"hello", end.mine)
        await worker.tag_receive(bytearray(5), end.theirs)
        if role == "server":
            await endpoint.tag_send(b"hello", end.mine)
        end.transports = check_transports(endpoint, setup)
        yield end
        if role == "client":
            await endpoint.tag_send(b"", GOODBYE)
            await endpoint.flush()
        else:
            with trio.move_on_after(5):
                await worker.tag_receive(bytearray(1), GOODBYE)
        await endpoint.aclose(ucp.CloseMode.FORCE)


class RawEnd(End):
    def __init__(self, worker: ucp.Worker, endpoint: ucp.Endpoint, mine: int, theirs: int) -> None:
        super().__init__()
        self.worker, self.endpoint, self.mine, self.theirs = worker, endpoint, mine, theirs
        self.payload = b""
        self.buffer = bytearray()

    def prepare(self, batch: Batch) -> None:
        self.payload = batch.payload()
        self.buffer = bytearray(b"\0") * batch.job.size

    async def ping(self, batch: Batch) -> list[int]:
        self.last = self.buffer
        send = partial(self.endpoint.tag_send, self.payload, self.mine)
        return await ping(send, partial(self.worker.tag_receive, self.buffer, self.theirs), batch.count)

    async def echo(self, batch: Batch) -> None:
        self.last = self.buffer
        send = partial(self.endpoint.tag_send, self.buffer, self.mine)
        await echo(send, partial(self.worker.tag_receive, self.buffer, self.theirs), batch.count)

    async def send(self, batch: Batch) -> None:
        endpoint, payload, tag = self.endpoint, self.payload, self.mine
        await keep_in_flight(
            self.worker, batch.window, batch.count, lambda group: group.tag_send(endpoint, payload, tag)
        )

    async def receive(self, batch: Batch) -> None:
        buffer, tag = self.buffer, self.theirs
        await keep_in_flight(self.worker, batch.window, batch.count, lambda group: group.tag_receive(buffer, tag))
        self.last = buffer
