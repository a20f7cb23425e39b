"""DLPack, ``__cuda_array_interface__``, raw addresses: interpreted correctly, checked, and released exactly once."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio.testing
from foreign_arrays import CPU, CUDA, CUDA_HOST, MANAGED, OPENCL, ROCM, OldTensor, Tensor, described
from helpers import open_pair, open_raw_pair, pattern, until
from injected_faults import ignore_unreachable_memory

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi, lib
from trio_ucx.testing import internals
from trio_ucx.ucp import DeviceBuffer, MemoryType, Strided
from trio_ucx.ucp._memory import cuda as _cuda
from trio_ucx.ucp._memory.buffers import Pinned
from trio_ucx.ucp._memory.foreign import array_of


class Interface:
    """An object with a ``__cuda_array_interface__``."""

    def __init__(self, address: int, shape: Any, typestr: str = "|u1", **more: Any) -> None:
        data = (address, more.pop("readonly", False))
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": data, "version": 3, **more}


class FakeDriver:
    """CUDA whose device memory is host memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.managed: set[int] = set()
        self.host: set[int] = set()
        self.broken = False

    def is_managed(self, address: int) -> bool:
        return address in self.managed

    def is_host(self, address: int) -> bool:
        return address in self.host

    def synchronize(self, stream: int, address: int) -> None:
        self.calls.append((stream, address))

    def read(self, address: int, size: int) -> bytes:
        if self.broken:
            raise RuntimeError("CUDA's cuMemcpyDtoH_v2 failed: out of luck (1)")
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("CUDA's cuMemcpyHtoD_v2 failed: out of luck (1)")
        ctypes.memmove(address, data, len(data))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(_cuda, "driver", lambda: fake)
    return fake


# ---- DLPack ----


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
async def test_dlpack_in_every_position(worker: ucp.Worker, kind: type[Tensor]) -> None:
    async with open_raw_pair(worker) as (client, _), open_pair(worker) as (left, right):
        for size in (0, 1000, 100_000):
            source = np.frombuffer(bytearray(pattern(size)), np.uint8)
            target = np.zeros(size, np.uint8)
            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.tag_send, kind(source), 1)
                    assert await worker.tag_receive(kind(target), 1) == (size, 1)
                assert np.array_equal(source, target)
                target[:] = 0
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(left.send, kind(source), tag=1))
                    assert (
                        await right.receive_into([kind(target[: size // 2]), kind(target[size // 2 :])], tag=1) == size
                    )
                assert np.array_equal(source, target)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(left.send, [b"head", kind(source)], tag=1))
                    assert await right.receive(tag=1) == b"head" + source.tobytes()
                left.send_nowait(kind(source), tag=1)
                assert await right.receive(tag=1) == source.tobytes()
                # A column of it, both ways.
                matrix = np.zeros((size, 2), np.uint8)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(left.send, Strided(kind(source[::-1])), tag=1))
                    assert await right.receive_into(Strided(kind(matrix[:, 1])), tag=1) == size
                assert np.array_equal(matrix[::-1, 1], source)
                assert not matrix[:, 0].any()


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
def test_dlpack_memory_is_kept_and_given_back_once(kind: type[Tensor]) -> None:
    array = np.arange(100, dtype=np.float32)
    before = sys.getrefcount(array)
    tensor = kind(array)
    pins = Pinned(tensor)
    again = Pinned(tensor)
    assert sys.getrefcount(array) >= before + 3  # the tensor and two capsules
    del tensor
    assert pins.copy(400) == again.copy(400) == array.tobytes()
    pins.release()
    pins.release()
    assert sys.getrefcount(array) == before + 2  # the capsule and its tensor
    again.release()
    assert sys.getrefcount(array) == before
    strided = Pinned(Strided(kind(array[::3])))
    assert strided.copy(12) == array[::3].tobytes()[:12]
    strided.release()
    assert sys.getrefcount(array) == before


async def test_dlpack_memory_is_kept_while_in_flight(worker: ucp.Worker) -> None:
    array = np.frombuffer(bytearray(pattern(2**20)), np.uint8)
    before = sys.getrefcount(array)
    async with open_pair(worker) as (client, server):
        with trio.move_on_after(0.02):
            await client.send(Tensor(array))
        assert client.statistics().left_over_operations == 1
        assert sys.getrefcount(array) > before
        with trio.fail_after(15):
            assert await server.receive() == array.tobytes()
            await client.wait_buffers_released()


def test_dlpack_details() -> None:
    memory = (ctypes.c_uint8 * 48)(*range(48))
    data = bytes(memory)
    for version in (None, (1, 0), (1, 7)):
        assert Pinned(described(memory, version=version)).copy(48) == data
        pins = Pinned(described(memory, version=version, byte_offset=8, shape=(2, 5), bits=32), writable=True)
        assert pins.copy(pins.size) == data[8:]
        pins = Pinned(described(memory, version=version, shape=(3, 1, 4), strides=(4, 99, 1), bits=16, lanes=2))
        assert pins.copy(pins.size) == data
        assert Pinned(described(memory, version=version, shape=())).copy(1) == data[:1]
        assert Pinned(described(memory, version=version, shape=(3, 0), device=CUDA)).size == 0
        column = described(memory, version=version, shape=(3, 2), strides=(16, 4), bits=16)
        with pytest.raises(
            ValueError, match=r"non-contiguous Described \(shape \(3, 2\), .* \(32, 8\)\): wrap it in ucp.Strided"
        ):
            Pinned(column)
        assert described(memory).__dlpack_device__() == (CPU, 0)
        pins = Pinned(Strided(described(memory, version=version, shape=(3, 2), strides=(8, 4), bits=16)))
        assert pins.copy(12) == b"".join(data[start : start + 2] for start in (0, 8, 16, 24, 32, 40))
    described_array = described(memory)
    array = array_of(described_array)
    assert array is not None and array.memory_type is MemoryType.HOST
    assert described_array.asked == {"max_version": (1, 0)}


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"version": (2, 0)}, "speaks DLPack 2.0"),
        ({"bits": 4}, "elements of 4 bits"),
        ({"bits": 1, "lanes": 4}, "elements of 4 bits"),
        ({"device": OPENCL}, "DLPack's type 4, which UCX does not know"),
        ({"shape": (-1,)}, "shape is"),
        ({"data": None}, "at address 0"),
    ],
)
def test_dlpack_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"cannot send this Described: .*{match}"):
        Pinned(described((ctypes.c_uint8 * 8)(), **fields))


def test_dlpack_that_must_not_be_written_to() -> None:
    memory = (ctypes.c_uint8 * 8)()
    read_only, copied = 1, 2
    for flags in (read_only, copied):
        Pinned(described(memory, flags=flags)).release()
        with pytest.raises(TypeError, match="read-only Described, or a copy"):
            Pinned(described(memory, flags=flags), writable=True)
        with pytest.raises(TypeError, match="read-only Described"):
            Pinned(Strided(described(memory, flags=flags)), writable=True)
    array = np.arange(3)
    array.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match="cannot receive into"):
        Pinned(Tensor(array), writable=True)


def test_dlpack_that_fails() -> None:
    array = np.arange(3)
    capsule = array.__dlpack__()

    class Stale(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            return capsule

    class Failing(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    pins = Pinned(Stale(array))
    pins.release()
    np.from_dlpack(Stale(array))  # consumes it
    with pytest.raises(ValueError, match="used before"):
        Pinned(Stale(array))
    with pytest.raises(ValueError, match="cannot send this Failing: the DLPack interface of Failing failed: not today"):
        Pinned(Failing(array))
    with pytest.raises(ValueError, match="cannot send this strided Failing: .*not today"):
        Pinned(Strided(Failing(array)))


def test_dlpack_on_devices(driver: FakeDriver) -> None:
    memory = (ctypes.c_uint8 * 48)(*range(48))
    address = ctypes.addressof(memory)
    for device, kind, options in (
        (CUDA, MemoryType.CUDA, {"stream": 1}),
        (MANAGED, MemoryType.CUDA_MANAGED, {"stream": 1}),
        (CUDA_HOST, MemoryType.HOST, {}),
        (ROCM, MemoryType.ROCM, {}),
    ):
        tensor = described(memory, device=device, byte_offset=8, shape=(40,))
        pins = Pinned(tensor, writable=True)
        assert pins.memory == kind + 1
        assert tensor.asked == {"max_version": (1, 0), **options}
        assert driver.calls == ([(1, address + 8)] if options else [])
        driver.calls.clear()
        assert pins.native_list().memory == kind + 1
        if kind is MemoryType.ROCM:
            with pytest.raises(ValueError, match="cannot copy to and from ROCm"):
                pins.check_copies()
        else:
            pins.check_copies()
            pins.fill(memoryview(b"written"))
            assert pins.copy(9) == b"written" + bytes(memory)[15:17]
            pins.release()
    with pytest.raises(ValueError, match="make it contiguous on the device first"):
        Pinned(described(memory, device=CUDA, shape=(2,), strides=(2,)))
    with pytest.raises(ValueError, match="strided Described in device memory: make it contiguous on the device"):
        Pinned(Strided(described(memory, device=CUDA, shape=(2,), strides=(2,))))


# ---- __cuda_array_interface__ ----


def test_cuda_array_interface(driver: FakeDriver) -> None:
    memory = (ctypes.c_uint8 * 48)(*range(48))
    address = ctypes.addressof(memory)
    for shape, typestr, more in (
        ((48,), "|u1", {}),
        ((2, 3), "<f8", {"version": 2}),
        ((2, 3), "<c8", {"strides": None, "stream": None}),
        ((6, 1, 2), ">i4", {"strides": (8, 77, 4), "stream": 1}),
        ((1, 12), "<U1", {"strides": (1, 4), "stream": 2}),
        ((3,), "|V16", {"descr": [], "stream": 0x7F00}),
    ):
        thing = Interface(address, shape, typestr, **more)
        pins = Pinned(thing)
        assert pins.size == 48
        assert pins.memory == MemoryType.CUDA + 1
        assert pins.copy(48) == bytes(memory)
        assert driver.calls == ([(more["stream"], address)] if more.get("stream") else [])
        driver.calls.clear()
        before = sys.getrefcount(thing)
        pins.release()
        assert sys.getrefcount(thing) < before
    driver.managed.add(address)
    assert Pinned(Interface(address, (48,))).memory == MemoryType.CUDA_MANAGED + 1
    driver.managed.clear()
    driver.host.add(address)
    assert Pinned(Interface(address, (48,))).memory == MemoryType.HOST + 1
    assert Pinned(Interface(0, (0,))).size == Pinned(Interface(address, (4, 0), stream=1)).size == 0
    assert driver.calls == []


@pytest.mark.parametrize(
    "arguments, more, match",
    [
        (((4,), "<f3x"), {}, "is wrong"),
        (((4,), "<t3"), {}, "elements of 3 bits"),
        ((4, "<f4"), {}, "is wrong"),
        (((4,), "<f4"), {"stream": 0}, "stream 0"),
        (((4,), "<f4"), {"strides": (4, 4)}, r"its strides are \(4, 4\)"),
        (((4,), "<f4"), {"strides": (8,)}, "make it contiguous on the device first"),
        (((4,), "<f4"), {"strides": (-4,)}, "make it contiguous on the device first"),
        (((-4,), "<f4"), {}, "its shape is"),
        (((4.0,), "<f4"), {}, "its shape is"),
    ],
)
def test_cuda_array_interface_refused(
    driver: FakeDriver, arguments: tuple[Any, str], more: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Pinned(Interface(4096, *arguments, **more))
    with pytest.raises(ValueError, match="address 0"):
        Pinned(Interface(0, (4,)))
    with pytest.raises(TypeError, match="do not include its mask"):
        Pinned(Interface(4096, (4,), mask=object()))
    with pytest.raises(TypeError, match="cannot receive into a read-only Interface"):
        Pinned(Interface(4096, (4,), readonly=True), writable=True)


def test_the_buffer_protocol_comes_first(driver: FakeDriver) -> None:
    class Both(bytearray):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise AssertionError("not asked for")

    assert Pinned(Both(b"abc")).copy(3) == b"abc"
    assert Pinned(b"abc").memory == Pinned(bytearray(3)).memory == MemoryType.HOST + 1
    # Their memory may be anybody's, managed by a device, too: UCX looks.
    assert Pinned(np.zeros(3)).memory == Pinned(memoryview(b"abc")).memory == 0


def test_a_buffer_protocol_that_only_fails(driver: FakeDriver) -> None:
    """As that of JAX's arrays in device memory."""
    memory = (ctypes.c_uint8 * 48)(*range(48))
    tensor = described(memory, device=CUDA)

    class OnDevice(mmap.mmap):
        def __dlpack__(self, **options: Any) -> Any:
            return tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return tensor.__dlpack_device__()

    array = OnDevice(-1, 48)
    array.close()
    with pytest.raises(ValueError, match="closed"):
        memoryview(array)
    for each in (array, [array]):
        pins = Pinned(each)
        assert (pins.memory, pins.size) == (MemoryType.CUDA + 1, 48)
        pins.release()
    with pytest.raises(ValueError, match="strided OnDevice in device memory"):
        Pinned(Strided(array))


# ---- the driver ----


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_cuda.ctypes, "CDLL", missing)
    _cuda.driver.cache_clear()
    for thing in (Interface(4096, (4,)), DeviceBuffer(4096, 4, MemoryType.CUDA)):
        with pytest.raises(RuntimeError, match=r"needs the CUDA driver, which cannot be loaded: libcuda\.so\.1"):
            Pinned(thing)
    _cuda.driver.cache_clear()


class FakeLibrary:
    """libcuda, as far as we call it; ``pool`` memory belongs to no context."""

    def __init__(self, pool: bool = False, fail: str = "") -> None:
        self.calls: list[str] = []
        self.pool = pool
        self.fail = fail

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"as told"
                return 0
            self.calls.append(name)
            if name == self.fail:
                return 700
            if name == "cuPointerGetAttribute":
                value = {1: None if self.pool else 0x77, 2: 2, 8: 0, 9: 3}[arguments[1]]
                arguments[0]._obj.value = value
            if name == "cuDevicePrimaryCtxRetain":
                assert arguments[1].value == 3
                arguments[0]._obj.value = 0x88
            if name == "cuCtxPushCurrent_v2":
                assert arguments[0].value == (0x88 if self.pool else 0x77)
            if name == "cuMemcpyDtoH_v2":
                ctypes.memmove(arguments[0], arguments[1].value, arguments[2].value)
            if name == "cuMemcpyHtoD_v2":
                ctypes.memmove(arguments[0].value, arguments[1], arguments[2].value)
            return 0

        return call


@pytest.mark.parametrize("pool", [False, True])
def test_driver_calls(pool: bool) -> None:
    library = FakeLibrary(pool)
    driver = _cuda.Driver(library)
    memory = (ctypes.c_uint8 * 4)(*b"abcd")
    assert library.calls == ["cuInit"]
    library.calls.clear()
    assert driver.read(ctypes.addressof(memory), 4) == b"abcd"
    around = (["cuDevicePrimaryCtxRetain"], ["cuDevicePrimaryCtxRelease_v2"]) if pool else ([], [])
    calls = [name for name in library.calls if name != "cuPointerGetAttribute"]
    assert calls == [*around[0], "cuCtxPushCurrent_v2", "cuMemcpyDtoH_v2", "cuCtxPopCurrent_v2", *around[1]]
    driver.write(ctypes.addressof(memory), b"xy\0z")
    assert bytes(memory) == b"xy\0z"
    driver.synchronize(5, ctypes.addressof(memory))
    assert not driver.is_managed(1) and not driver.is_host(1)
    for name in ("cuMemcpyDtoH_v2", "cuCtxPushCurrent_v2"):
        library.calls.clear()
        library.fail = name
        with pytest.raises(RuntimeError, match=rf"CUDA's {name} failed: as told \(700\)"):
            driver.read(ctypes.addressof(memory), 4)
        assert library.calls.count("cuCtxPopCurrent_v2") == (name == "cuMemcpyDtoH_v2")
        assert library.calls.count("cuDevicePrimaryCtxRelease_v2") == pool
    with pytest.raises(RuntimeError, match="cuInit failed"):
        _cuda.Driver(FakeLibrary(fail="cuInit"))


# ---- DeviceBuffer, and lists ----


@pytest.mark.parametrize(
    "arguments, kind, match",
    [
        ((-1, 4, MemoryType.HOST), ValueError, "the address must be between"),
        (("x", 4, MemoryType.HOST), TypeError, "the address must be an integer"),
        ((4096, -1, MemoryType.HOST), ValueError, "nbytes must be between"),
        ((0, 1, MemoryType.HOST), ValueError, "must not be 0"),
        ((4096, 4, 17), ValueError, "17 is not a valid MemoryType"),
        ((4096, 4, None), ValueError, "not a valid MemoryType"),
    ],
)
def test_device_buffer_arguments(arguments: tuple[Any, ...], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        DeviceBuffer(*arguments)


async def test_raw_addresses(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for size in (0, 100, 100_000):
            source, target = bytearray(pattern(size)), bytearray(size)
            places = [
                DeviceBuffer(ctypes.addressof(ctypes.c_char.from_buffer(memory)) if size else 0, size, 0, memory)
                for memory in (source, target)
            ]
            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.send, places[0])
                    assert await server.receive_into(places[1]) == size
            assert target == source


@pytest.fixture
def devices(driver: FakeDriver) -> Iterator[tuple[Any, DeviceBuffer, DeviceBuffer]]:
    memory = (ctypes.c_uint8 * 64)()
    address = ctypes.addressof(memory)
    yield memory, DeviceBuffer(address, 32, MemoryType.CUDA), DeviceBuffer(address + 32, 32, MemoryType.ROCM)


def test_lists(devices: tuple[Any, DeviceBuffer, DeviceBuffer], driver: FakeDriver) -> None:
    """UCX takes the kind of the first for all."""
    _, cuda, rocm = devices
    nothing = DeviceBuffer(0, 0, MemoryType.CUDA)
    for mixed in ([cuda, b"host"], [b"host", cuda], [cuda, rocm], [b"", np.zeros(3), cuda]):
        with pytest.raises(ValueError, match="must all be in the same kind of memory"):
            Pinned(mixed)
    for parts in ([cuda, cuda], [nothing, b"", cuda], [cuda, bytearray()]):
        pins = Pinned(parts)
        assert pins.many.memory == MemoryType.CUDA + 1
        assert pins.many.addresses[0] != 0
        assert pins.copy(pins.size) == bytes(pins.size)
        pins.release()
    assert Pinned([b"a", Tensor(np.zeros(3))]).many.memory == 0
    pins = Pinned([cuda, DeviceBuffer(cuda.address + 32, 32, MemoryType.CUDA)], writable=True)
    pins.fill(memoryview(pattern(40)))
    assert pins.copy(40) == pattern(40)


async def test_memory_that_the_transports_do_not_reach(
    worker: ucp.Worker, devices: tuple[Any, DeviceBuffer, DeviceBuffer]
) -> None:
    """UCX would read and write it as if it were host memory."""
    memory, cuda, rocm = devices
    async with open_raw_pair(worker) as (raw, _), open_pair(worker) as (client, server):
        credit = client.statistics().credit
        for thing, match in (
            (cuda, "reach CUDA memory: .*cuda in it"),
            ([rocm, b""], "reach ROCM memory: .*rocm in it"),
        ):
            for send in (partial(raw.tag_send, tag=1), partial(raw.tag_send_sync, tag=1), client.send):
                with pytest.raises(ValueError, match=match):
                    await send(thing)
            with pytest.raises(ValueError, match=match):
                await worker.tag_receive(thing if thing is cuda else rocm, 1)
            with pytest.raises(ValueError, match=match if thing is cuda else "cannot copy to and from ROCm"):
                await server.receive_into(thing if thing is cuda else rocm, tag=1)
        await raw.tag_send(b"probed", 2)
        with trio.fail_after(15):
            await until(lambda: worker.tag_probe(2))
            message = worker.tag_probe(2, remove=True)
            assert message is not None
            with pytest.raises(ValueError, match="reach CUDA"):
                await worker.tag_receive_message(message, cuda)
            buffer = bytearray(10)
            assert await worker.tag_receive_message(message, buffer) == (6, 2)
        # What does without the check is stopped in C.
        verdict = lib.tu_tag_send_one(internals(raw).handle, ffi.NULL, 4, MemoryType.CUDA + 1, 1)
        assert verdict == ucp.Status.UNSUPPORTED
        assert client.statistics().credit == credit
    assert not any(memory)


async def test_small_messages_are_copied_to_the_device(
    worker: ucp.Worker,
    devices: tuple[Any, DeviceBuffer, DeviceBuffer],
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the device fails, the receive raises, and nothing else is affected."""
    memory, cuda, rocm = devices
    ignore_unreachable_memory(monkeypatch)
    async with open_pair(worker) as (client, server):
        with trio.fail_after(15):
            await client.send(b"message", tag=1)
            await server.wait_message(tag=1)
            assert await server.receive_into(cuda, tag=1) == 7
            assert bytes(memory)[:8] == b"message\0"
            client.send_nowait(cuda, tag=1)
            assert await server.receive(tag=1) == bytes(memory)[:32]
            driver.broken = True
            await client.send(b"lost", tag=1)
            await client.send(b"next", tag=1)
            await server.wait_message(tag=1)
            with pytest.raises(RuntimeError, match="cuMemcpyHtoD_v2 failed: out of luck"):
                await server.receive_into(cuda, tag=1)
            assert await server.receive(tag=1) == b"next"
            with pytest.raises(ValueError, match="cannot copy to and from ROCm"):
                await server.receive_into(rocm, tag=1)
            with pytest.raises(ValueError, match="cannot copy to and from ROCm"):
                client.send_nowait(rocm, tag=1)
            await client.send(b"still works", tag=1)
            assert await server.receive(tag=1) == b"still works"
        assert isinstance(server, trio_ucx.Connection) and server.statistics().held == 0
