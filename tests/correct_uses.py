"""Right uses of the public interface. Never run: mypy and pyright must accept each line. See ``test_types.py``."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp import chains


class OnDevice:
    """As PyTorch and CuPy have it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}

    def __dlpack__(self, *, stream: int | None = -1, max_version: tuple[int, int] | None = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Page(ctypes.Structure): ...


def failed(connection: trio_ucx.Connection, error: Exception) -> None: ...


async def admit(peer: trio_ucx.PeerInfo) -> bool:
    return peer.uid == 1000


async def handler(connection: trio_ucx.Connection) -> None:
    async for message in connection.messages(5):
        await connection.send(message, tag=5)


async def messages(c: trio_ucx.Connection, matrix: npt.NDArray[np.float64], chunks: list[bytes]) -> None:
    await c.send(b"", tag=5)
    await c.send(bytearray())
    await c.send(memoryview(b"")[1:])
    await c.send(array.array("d", [1.0]))
    await c.send(mmap.mmap(-1, 4096))
    await c.send(Page())
    await c.send(matrix)
    await c.send([matrix[0], b"", memoryview(b"")])
    await c.send((b"", b""))
    await c.send(chunks)
    await c.send(OnDevice())
    await c.send(ucp.Strided(matrix[:, 1]))
    await c.send(ucp.DeviceBuffer(1, 2, ucp.MemoryType.CUDA))
    length: int = await c.receive_into(bytearray(8), tag=5)
    await c.receive_into(memoryview(bytearray(length)))
    await c.receive_into((ctypes.c_char * 8)())
    await c.receive_into([matrix, OnDevice()])
    await c.receive_into(ucp.Strided(matrix.T))
    tag, data = await c.receive_any([1, 2], max_size=2**20)
    async with c.open_conversation() as talk:
        await talk.send(data + await c.receive(tag=tag, max_size=4096))


async def connections(nursery: trio.Nursery, options: trio_ucx.ListenerOptions) -> None:
    server: trio_ucx.Server = await nursery.start(trio_ucx.serve_ucx, handler, 0)
    async with trio_ucx.connect(server.address, retry=trio_ucx.Backoff(timeout=5), window=2**20) as c:
        stream: trio.abc.HalfCloseableStream = c
        await stream.send_all(b"")
    await trio_ucx.serve_ucx(handler, 0, on_handler_error=failed, drain_on_signal=5, **options)
    await trio_ucx.serve_ucx(handler, "unix:/run/x", authkey=trio_ucx.authkey(), admit=admit)
    await trio_ucx.open_ucx_listeners(server.address)
    addresses = ["a:1", "b:1"]
    async with trio_ucx.connect(addresses), trio_ucx.connect((("a", 1), "b:1")), trio_ucx.connect([server.address]):
        connection: trio_ucx.Connection = await trio_ucx.connect("a:1")
        await connection.aclose()


async def raw(worker: ucp.Worker, endpoint: ucp.Endpoint, remote: ucp.RemoteMemory, chain: chains.RequestChain) -> None:
    await endpoint.am_send(7, [b"", bytearray()], header=b"")
    size, sender = await worker.tag_receive(bytearray(8), 5)
    await remote.put(np.zeros(size))
    await remote.atomic(ucp.AtomicOp.OR, await remote.atomic(ucp.AtomicOp.ADD, 1, bits=32, fetch=True))
    await remote.compare_swap(await remote.atomic(ucp.AtomicOp.SWAP, size, 8), await remote.fetch_add(1))
    node = chain.get(remote, sender, 64, into=bytearray(64))
    chain.atomic(remote, ucp.AtomicOp.XOR, node.u64(), node.u32(8), when=node.u8(0) == 1)
    chain.put(remote, (b"", node.u32() + 1, node.bytes(0, 8)), when=node.u8(0) == 1, on_false="skip", after=[node, 0])
    with worker.context.register(bytearray(8), access=ucp.Access.READ | ucp.Access.WRITE) as memory:
        await endpoint.tag_send(memory.descriptor, 5)
