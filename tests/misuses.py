"""Wrong uses of the public interface. Never run: mypy and pyright must refuse each marked line, and no other.

``test_types.py`` checks that.
"""

from __future__ import annotations

import numpy as np
import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp import chains


async def handler(connection: trio_ucx.Connection) -> None: ...
async def stream_handler(stream: trio.SocketStream) -> None: ...
async def greedy_handler(connection: trio_ucx.Connection, address: str) -> None: ...
def plain_handler(connection: trio_ucx.Connection) -> None: ...


async def messages(c: trio_ucx.Connection) -> None:
    await c.send(42)  # refused
    await c.send("text")  # refused
    await c.send(None)  # refused
    await c.send(["text"])  # refused
    await c.send([1, 2, 3])  # refused
    await c.send([[b"nested"]])  # refused
    await c.send([ucp.Strided(np.zeros((4, 4))[:, 1])])  # refused
    await c.send(b"", 5)  # refused
    await c.send(b"", tag="5")  # refused
    await c.receive_newest(max_size="few")  # refused
    c.send(b"")  # refused
    c.send_nowait("text")  # refused
    await c.send_all("text")  # refused
    await c.send_all([b"several", b"buffers"])  # refused
    await c.receive(4096)  # refused
    await c.receive(max_size="4096")  # refused
    await c.receive_into(4096)  # refused
    await c.receive_into(b"read-only")  # refused
    await c.receive_into([bytearray(8), b"read-only"])  # refused
    await c.receive_any(tags=["5"])  # refused
    text: str = await c.receive()  # refused
    for message in c.messages(0):  # refused
        print(message)
    c.messages("0")  # refused
    c.channel()  # refused
    with c:  # refused
        print(text)


async def clients() -> None:
    trio_ucx.connect(9999)  # refused
    trio_ucx.connect("host:9999", windw=3)  # refused
    trio_ucx.connect("host:9999", retry=5)  # refused
    trio_ucx.connect("host:9999", retry=trio_ucx.Backoff(0.1))  # refused
    trio_ucx.connect("host:9999", shared_memory="always")  # refused
    trio_ucx.connect("host:9999", authkey="a key that is text")  # refused
    trio_ucx.connect(["host:9999", 9999])  # refused
    trio_ucx.connect({"host:9999": 1})  # refused
    await trio_ucx.connect("host:9999").send(b"")  # refused
    with trio_ucx.connect("host:9999"):  # refused
        pass
    await trio_ucx.open_ucx_stream("host:9999")  # refused


async def servers() -> None:
    await trio_ucx.serve_ucx(handler, 0, windw=3)  # refused
    await trio_ucx.serve_ucx(handler, 0.5)  # refused
    await trio_ucx.serve_ucx(handler, 0, admit=lambda peer: True)  # refused
    await trio_ucx.serve_ucx(handler, 0, "localhost")  # refused
    await trio_ucx.serve_ucx(stream_handler, 0)  # refused
    await trio_ucx.serve_ucx(greedy_handler, 0)  # refused
    await trio_ucx.serve_ucx(plain_handler, 0)  # refused
    await trio_ucx.serve_ucx(handler, 0, on_handler_error="ignore")  # refused
    await trio_ucx.serve_ucx(handler, 0, on_handler_error=lambda error: print(error))  # refused
    await trio_ucx.serve_ucx(handler, 0, drain_on_signal="SIGTERM")  # refused


async def raw(worker: ucp.Worker, endpoint: ucp.Endpoint, remote: ucp.RemoteMemory, chain: chains.RequestChain) -> None:
    await endpoint.tag_send(b"")  # refused
    await endpoint.aclose("force")  # refused
    await endpoint.stream_receive(b"read-only")  # refused
    await worker.open_endpoint("host:9999", error_mode="peer")  # refused
    await worker.tag_receive(bytes(4), 5)  # refused
    worker.open_active_messages(7, when_full="refuse")  # refused
    worker.context.register([bytearray(8)])  # refused
    await remote.put([b"several", b"buffers"])  # refused
    await remote.atomic("ADD", 1)  # refused
    await remote.atomic(ucp.AtomicOp.ADD, 1) + 1  # refused
    chain.put(remote, "text")  # refused
    chain.atomic(remote, 0, 1)  # refused
    chain.put(remote, b"", whn=None)  # refused
    chain.get(remote, 0, 8, on_false="ignore")  # refused
    ucp.open_context(features="TAG")  # refused
