"""Device memory over a real CUDA device, with nothing but its driver: skipped where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio.testing
from foreign_arrays import CUDA, MANAGED, described
from helpers import open_pair, open_raw_pair, pattern

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx.testing import internals
from trio_ucx.ucp import DeviceBuffer, MemoryType, Status, Strided
from trio_ucx.ucp._memory import cuda as _cuda

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 4096, 65535, 65536, 65537, 2**20, 64 * 2**20]
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL


class Memory:
    """Device memory, with a ``__cuda_array_interface__``."""

    def __init__(self, device: Device, size: int, managed: bool) -> None:
        self.size = size
        self.stream: int | None = None
        pointer = ctypes.c_uint64()
        if managed and size:
            device.call("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(size), ATTACH_GLOBAL)
        elif size:
            device.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self.address = pointer.value
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "stream": self.stream,
        }

    def part(self, start: int, stop: int) -> DeviceBuffer:
        return DeviceBuffer(self.address + start if stop > start else 0, stop - start, MemoryType.CUDA, self)

    def write(self, data: bytes) -> None:
        if data:
            self.device.call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)))
            self.device.call("cuCtxSynchronize")

    def read(self) -> bytes:
        result = ctypes.create_string_buffer(max(1, self.size))
        if self.size:
            self.device.call("cuMemcpyDtoH_v2", result, ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
        return result.raw[: self.size]


class Device:
    """The first CUDA device; its memory lives as long as the test."""

    def __init__(self) -> None:
        try:
            driver = _cuda.driver()
        except RuntimeError as error:
            pytest.skip(f"no CUDA device: {error}")
        self.call = driver._call
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            pytest.skip("no CUDA device: the driver has found none")
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)
        self.memories: list[Memory] = []

    def memory(self, data: bytes | int, *, managed: bool = False) -> Memory:
        memory = Memory(self, data if isinstance(data, int) else len(data), managed)
        self.memories.append(memory)
        memory.write(data if isinstance(data, bytes) else bytes(data))
        return memory

    def close(self) -> None:
        for memory in self.memories:
            if memory.address:
                self.call("cuMemFree_v2", ctypes.c_uint64(memory.address))
        self.call("cuCtxSetCurrent", None)  # UCX crashes where the current one is gone
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


@pytest.fixture(params=["tcp,cuda", "tcp,sm,self,cuda"])
async def worker(request: pytest.FixtureRequest, device: Device) -> AsyncIterator[ucp.Worker]:
    async with ucp.open_worker(config={"TLS": request.param}) as worker:
        if not lib.tu_worker_memory_types(internals(worker).handle) >> MemoryType.CUDA & 1:
            pytest.skip("this UCX has no module for CUDA, or it does not work here")
        yield worker


async def transfer(client: ucp.Endpoint, worker: ucp.Worker, source: Any, target: Any, early: bool) -> int:
    lengths: list[int] = []

    async def receive() -> None:
        lengths.append((await worker.tag_receive(target, 3))[0])

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            if early:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(client.tag_send, source, 3)
            if not early:
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(receive)
    return lengths[0]


@pytest.mark.parametrize("size", SIZES)
async def test_raw(worker: ucp.Worker, device: Device, size: int) -> None:
    data = pattern(size)
    source = device.memory(data)
    async with open_raw_pair(worker) as (client, _):
        for early in (False, True):
            target = device.memory(size)
            assert await transfer(client, worker, source, target, early) == size
            assert target.read() == data
            host = bytearray(size)
            assert await transfer(client, worker, source, host, early) == size
            assert host == data
            target = device.memory(size + 3)
            assert await transfer(client, worker, data, target, early) == size
            assert target.read() == data + bytes(3)


@pytest.mark.parametrize("size", SIZES)
async def test_connection(worker: ucp.Worker, device: Device, size: int) -> None:
    data = pattern(size)
    source = device.memory(data)
    async with open_pair(worker) as (client, server):
        for early in (False, True):
            target = device.memory(size)
            halves = device.memory(size)
            results: list[Any] = []

            async def receive(target: Memory = target, halves: Memory = halves, results: list[Any] = results) -> None:
                results.append(await server.receive_into(target, tag=1))
                results.append(await server.receive(tag=1))
                middle = size // 3
                results.append(await server.receive_into([halves.part(0, middle), halves.part(middle, size)], tag=1))

            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    if early:
                        nursery.start_soon(receive)
                        await trio.testing.wait_all_tasks_blocked()
                    else:
                        nursery.start_soon(_after_a_message, server, receive)
                    await client.send(source, tag=1)
                    await client.send([source.part(0, size // 2), source.part(size // 2, size)], tag=1)
                    await client.send(data, tag=1)
            assert results == [size, data, size]
            assert target.read() == halves.read() == data
        if size <= 2**20:
            client.send_nowait(source, tag=2)
            source.write(bytes(size))  # it was copied
            with trio.fail_after(15):
                assert await server.receive(tag=2) == data
        assert client.statistics().left_over_operations == server.statistics().left_over_operations == 0


async def _after_a_message(connection: trio_ucx.Connection, then: Any) -> None:
    await connection.wait_message(tag=1)
    await then()


async def test_dlpack_and_managed_memory(worker: ucp.Worker, device: Device) -> None:
    nothing = (ctypes.c_uint8 * 0)()
    async with open_raw_pair(worker) as (client, _):
        for size in (100, 2**20):
            data = pattern(size)
            for managed, kind in ((False, CUDA), (True, MANAGED)):
                source, target = device.memory(data, managed=managed), device.memory(size, managed=managed)
                things = [
                    described(nothing, device=kind, shape=(size,), data=each.address) for each in (source, target)
                ]
                assert await transfer(client, worker, *things, early=False) == size
                assert target.read() == data
                target.write(bytes(size))
                assert await transfer(client, worker, source, target, early=True) == size
                assert target.read() == data
            # The same memory as numpy sees it: UCX finds out what it is.
            target.write(bytes(size))
            views = [
                np.frombuffer((ctypes.c_uint8 * size).from_address(each.address), np.uint8) for each in (source, target)
            ]
            assert await transfer(client, worker, *views, early=False) == size
            assert target.read() == data
            column = np.zeros((size, 2), np.uint8)
            assert await transfer(client, worker, views[0], Strided(column[:, 1]), early=False) == size
            assert column[:, 1].tobytes() == data


@pytest.mark.parametrize("size", [10, 2**20])
@pytest.mark.parametrize("library", ["cupy", "torch", "jax"])
async def test_arrays_of(worker: ucp.Worker, library: str, size: int) -> None:
    module: Any = pytest.importorskip("jax.numpy" if library == "jax" else library)
    numbers = np.arange(size, dtype=np.float32)
    source = module.from_numpy(numbers).cuda() if library == "torch" else module.asarray(numbers)
    target = None if library == "jax" else module.zeros_like(source)
    async with open_pair(worker) as (client, server):
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, source)
                if target is None:
                    with pytest.raises(TypeError, match="read-only"):
                        await server.receive_into(source)
                    received = np.frombuffer(await server.receive(), np.float32)
                else:
                    assert await server.receive_into(target) == numbers.nbytes
                    received = target.get() if library == "cupy" else target.cpu().numpy()
    assert np.array_equal(received, numbers)


async def test_work_in_the_named_stream_is_waited_for(worker: ucp.Worker, device: Device) -> None:
    size = 64 * 2**20
    stream = ctypes.c_void_p()
    device.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
    source = device.memory(size)
    assert stream.value is not None
    source.stream = stream.value
    try:
        async with open_raw_pair(worker) as (client, _):
            for value in (1, 2, 3):
                for _ in range(20):
                    device.call(
                        "cuMemsetD8Async", ctypes.c_uint64(source.address), value, ctypes.c_size_t(size), stream
                    )
                host = bytearray(size)
                await transfer(client, worker, source, host, early=True)
                assert host.count(value) == size
    finally:
        device.call("cuStreamDestroy_v2", stream)


@pytest.mark.parametrize("size", [100, 2**20])
async def test_truncation(worker: ucp.Worker, device: Device, size: int) -> None:
    async with open_raw_pair(worker) as (client, _):
        memory = device.memory(size)
        with trio.fail_after(15):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.tag_send, pattern(size), 3)
                with pytest.raises(trio_ucx.UCXError) as info:
                    await worker.tag_receive(memory.part(0, size - 1), 3)
        assert info.value.status == Status.MESSAGE_TRUNCATED
        assert memory.read()[-1:] == b"\0"


async def test_refused(worker: ucp.Worker, device: Device) -> None:
    memory = device.memory(100)
    strided = described((ctypes.c_uint8 * 0)(), device=CUDA, data=memory.address, shape=(50,), strides=(2,))
    async with open_raw_pair(worker) as (client, _):
        for data, match in (
            ([memory, b"host"], "same kind of memory"),
            (strided, "contiguous on the device"),
            (Strided(strided), "contiguous on the device"),
        ):
            with pytest.raises(ValueError, match=match):
                await client.tag_send(data, 1)
            with pytest.raises((TypeError, ValueError)):
                await worker.tag_receive(data, 1)


async def test_cancelled(worker: ucp.Worker, device: Device) -> None:
    """A send, and receives at any moment of the transfer: no message is lost, and the memory is given back."""
    size = 64 * 2**20
    data = pattern(size)
    source, target = device.memory(data), device.memory(size)
    async with open_pair(worker) as (client, server):
        with trio.fail_after(30):
            with trio.move_on_after(0.05):
                await client.send(source, tag=1)
            assert await server.receive(tag=1) == data
            await client.wait_buffers_released()
            for delay in (0, 0.001, 0.005, 0.02):
                target.write(bytes(size))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(client.send, source, tag=1))
                    await server.wait_message(tag=1)
                    with trio.move_on_after(delay) as scope:
                        await server.receive_into(target, tag=1)
                    if scope.cancelled_caught:
                        await server.wait_buffers_released()
                        assert await server.receive_into(target, tag=1) == size
                assert target.read() == data
        assert client.statistics().left_over_operations == server.statistics().left_over_operations == 0


async def test_a_worker_without_cuda(device: Device) -> None:
    memory = device.memory(100)
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        async with open_raw_pair(worker) as (client, _):
            with pytest.raises(ValueError, match="do not reach CUDA memory"):
                await client.tag_send(memory, 1)
            with pytest.raises(ValueError, match="do not reach CUDA memory"):
                await worker.tag_receive(memory, 1)
