"""Memory that this process has mapped: how it is copied, and its pages."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import pytest
from remote import for_ucx, open_endpoint_and_context, open_owner

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp._rma.access_paths import _end_of_shared_mapping
from trio_ucx.ucp._rma.remote_memory import RemoteMemory

SIZE = 2**21
#: From one step of a copy to the next.
STEP = 2**20
LENGTHS = [
    *range(1, 200, 7),
    2,
    4,
    8,
    1000,
    2047,
    2048,
    2049,
    2111,
    2112,
    4096,
    65535,
    65536,
    STEP - 1,
    STEP,
    STEP + 65,
]


async def test_copies_of_any_length_and_place(chance: random.Random) -> None:
    """They are right, and touch nothing beside them, wherever source and target lie in their cache lines."""
    edge = 128
    async with open_endpoint_and_context("tcp,sm,self", "worker") as (endpoint, context):
        content, here = chance.randbytes(SIZE), bytearray(SIZE)
        with context.allocate(SIZE) as memory, endpoint.attach(memory.descriptor) as remote:
            memory.memoryview[:] = content
            for length in LENGTHS:
                there, at = (chance.randrange(edge, SIZE - length - edge) for _ in range(2))
                around = slice(at - edge, at + length + edge)
                await remote.get_into(memoryview(here)[at : at + length], there)
                assert here[around] == bytes(edge) + content[there : there + length] + bytes(edge), (length, there, at)
                here[around] = bytes(length + 2 * edge)
                await remote.put(memoryview(content)[at : at + length], there)
                around = slice(there - edge, there + length + edge)
                expected = content[around][:edge] + content[at : at + length] + content[around][-edge:]
                assert memory.memoryview[around] == expected, (length, there, at)
                memory.memoryview[around] = content[around]


def mapped_pages(remote: RemoteMemory) -> int:
    """Bytes of the mapping that are in this process's page table."""
    address = np.frombuffer(remote.map(), np.uint8).ctypes.data
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            found = begin <= address < end
        elif found and name == "Rss:":
            return int(rest[0]) * 1024
    raise AssertionError("there is no mapping")


def kernel_version() -> tuple[int, int]:
    major, minor, *_ = Path("/proc/sys/kernel/osrelease").read_text().split(".")
    return int(major), int(minor)


@pytest.mark.skipif(kernel_version() < (5, 14), reason="the kernel has no MADV_POPULATE_READ")
async def test_pages_are_mapped_ahead() -> None:
    """Reading one block again and again: then no other block costs page faults."""
    size, block = 2**23, bytearray(2**16)
    async with open_owner("tcp,sm,self", "connection", size) as (_, _, remote):
        await remote.get_into(block)
        assert mapped_pages(remote) < size // 2
        for _ in range(size // len(block) + 16):
            await remote.get_into(block)
        assert mapped_pages(remote) >= size


async def test_memory_that_the_owner_has_not_used_stays_unused() -> None:
    size, block = 2**23, bytearray(2**16)
    async with open_endpoint_and_context("tcp,sm,self", "worker") as (endpoint, context):
        with context.allocate(size) as memory, endpoint.attach(memory.descriptor) as remote:
            memory.memoryview[: len(block)] = bytes(len(block))
            for _ in range(size // len(block) + 16):
                await remote.get_into(block)
            assert mapped_pages(remote) < size // 2


async def test_a_key_of_another_address_is_refused() -> None:
    """Atomics would otherwise be carried out on integers that are not aligned."""
    async with open_endpoint_and_context("tcp,sm,self", "worker") as (endpoint, context):
        with context.allocate(4096) as memory:
            good = for_ucx(memory.descriptor)
            before = memory.address.to_bytes(8, "little")
            assert good.rkey.count(before) == 1
            bad = attrs.evolve(good, rkey=good.rkey.replace(before, (memory.address - 4).to_bytes(8, "little")))
            with endpoint.attach(bad) as remote, endpoint.worker.new_chain() as chain:
                chain.fetch_add(remote, 1)
                with pytest.raises(ValueError, match="contradicts itself"):
                    await remote.fetch_add(1)
                with pytest.raises(ValueError, match="contradicts itself"):
                    await chain.run()
                with pytest.raises(ValueError, match="contradicts itself"):
                    await remote.get(0, 8)


@pytest.mark.parametrize("how", ["asks", "reads"])
def test_the_end_of_a_shared_mapping(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 6.11 has to be read."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    if how == "reads":
        monkeypatch.setattr(fcntl, "ioctl", refuse)
    size = 3 * mmap.PAGESIZE
    for flags, shared in ((mmap.MAP_SHARED, True), (mmap.MAP_PRIVATE, False)):
        with mmap.mmap(-1, size, flags, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            array = np.frombuffer(mapped, np.uint8)
            begin = array.ctypes.data
            for offset in (0, mmap.PAGESIZE, size - 1):
                end = _end_of_shared_mapping(begin + offset)
                assert end >= begin + size if shared else end == 0
            del array
    assert _end_of_shared_mapping(mmap.PAGESIZE) == 0  # nothing is there


@contextmanager
def limited(what: str) -> Iterator[None]:
    """For a moment this process gets no more descriptors, or 8 MiB of address space."""
    kind = resource.RLIMIT_AS if what == "room" else resource.RLIMIT_NOFILE
    gc.collect()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    room = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE") + 2**23
    before = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (room if what == "room" else max(fillers) + 1, before[1]))
        yield
    finally:
        resource.setrlimit(kind, before)
        for filler in fillers:
            os.close(filler)


@pytest.mark.parametrize(
    ("what", "transports", "said"),
    [
        ("room", "sysv,self", "Cannot allocate memory"),
        ("room", "posix,self", "Cannot allocate memory"),
        ("descriptors", "posix,self", "Too many open files"),
        ("descriptors", "sysv,self", "cannot be reached"),
    ],
)
async def test_memory_that_this_process_cannot_map(what: str, transports: str, said: str) -> None:
    """Then it is not called closed, and gets go by messages."""
    async with open_endpoint_and_context(transports, "worker") as (endpoint, context):
        with context.allocate(2**25) as memory:
            raw = for_ucx(memory.descriptor)  # read by UCX
            with endpoint.attach(memory.descriptor) as remote, endpoint.attach(memory.descriptor) as other:
                await remote.flush()
                with limited(what), endpoint.attach(raw) as unreachable:
                    with pytest.raises(trio_ucx.UCXError, match=f"{said}.*use get and put") as caught:
                        remote.map()
                    assert caught.value.status is ucp.Status.UNREACHABLE
                    assert await other.get(0, 8) == bytes(8)
                    if what == "room":
                        with pytest.raises(trio_ucx.UCXError, match=said):
                            await unreachable.get(0, 8)
                assert remote.map()[:8] == bytes(8)
