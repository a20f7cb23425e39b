"""Lists of blocks of remote memory: they move what a model says, and end early in good order."""

from __future__ import annotations

import array
import os
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from helpers import Peer, assert_free, open_pair, open_peer, pattern, until
from peers import REMOTE
from remote import (
    SOON,
    ask_the_owner,
    expect_broken,
    for_ucx,
    open_ground,
    open_owner,
    open_to_peer,
    open_two,
    open_way,
    released,
)
from timing import Stopwatch, cancelled_promptly

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi, lib
from trio_ucx.ucp.blocks import BlockPlan, BlockProgress

WAYS = [("tcp", "connection"), ("tcp,sm,self", "connection"), ("sm,self", "worker"), ("tcp", "raw")]
#: "asked": registered memory that the kernel does not read.
KINDS = ["allocated", "registered", "asked", "for UCX"]
#: Sizes of blocks: integers, less than a message, as much as a message over TCP has, and more.
SIZES = [1, 8, 100, 4096, 65_000, 65_536, 300_000]
POOL = 2**21


def memory_of(kind: str, context: ucp.Context, nbytes: int) -> ucp.Memory:
    return context.allocate(nbytes) if kind == "allocated" else context.register(bytearray(nbytes))


async def forbid_reading(kind: str, remote: ucp.RemoteMemory) -> None:
    if kind == "asked":
        await ask_the_owner(remote)


def some_blocks(chance: random.Random, limit: int, count: int) -> list[int]:
    """Different blocks, of which some are neighbours."""
    found: dict[int, None] = {}
    while len(found) < count:
        first = chance.randrange(limit)
        for block in range(first, min(limit, first + chance.choice([1, 1, 1, 2, 20]))):
            found[block] = None
    return list(found)[:count]


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_random_lists(transports: str, way: str, kind: str, seed: int) -> None:
    """Both sides' memory is what a model says, after lists of all sizes in both directions, many at the same time."""
    chance = random.Random(seed)
    async with open_two(transports) as (worker, owner), open_way(way, worker, owner) as endpoint:
        with memory_of(kind, owner.context, POOL) as memory:
            descriptor = for_ucx(memory.descriptor) if kind == "for UCX" else memory.descriptor
            with endpoint.attach(descriptor) as remote:
                await forbid_reading(kind, remote)
                for size in SIZES:
                    await run_random_lists(chance, memory, remote, size)


async def run_random_lists(chance: random.Random, memory: ucp.Memory, remote: ucp.RemoteMemory, size: int) -> None:
    here, there = bytearray(pattern(POOL + 3, 1)), memory.memoryview
    there[:] = pattern(POOL, 2)
    model_here, model_there = bytearray(here), bytearray(there)
    offset = chance.choice([0, 5, size])
    plan = remote.plan(here, block=size, offset=offset)
    assert plan.remote_block_count == (POOL - offset) // size
    for _ in range(3):
        most = min(plan.remote_block_count, len(here) // size)
        lists = []
        taken: set[int] = set()
        for _ in range(3):  # at the same time, so they must not write the same blocks
            put, count = chance.random() < 0.5, chance.randint(0, max(1, min(most // 4, 2000)))
            remote_blocks = [each for each in some_blocks(chance, most, count) if each not in taken]
            taken |= set(remote_blocks)
            local_blocks = remote_blocks[::-1] if chance.random() < 0.3 else remote_blocks
            lists.append((put, remote_blocks, local_blocks))
        async with trio.open_nursery() as nursery:
            for put, remote_blocks, local_blocks in lists:
                progress = BlockProgress()
                if put:
                    nursery.start_soon(partial_put(plan, local_blocks, remote_blocks, progress))
                else:
                    nursery.start_soon(partial_get(plan, remote_blocks, local_blocks, progress))
        await remote.flush()
        for put, remote_blocks, local_blocks in lists:
            for source, target in zip(remote_blocks, local_blocks, strict=True):
                near, far = slice(target * size, (target + 1) * size), offset + source * size
                if put:
                    model_there[far : far + size] = model_here[near]
                else:
                    model_here[near] = model_there[far : far + size]
        assert here == model_here
        assert there == model_there


def partial_put(plan: BlockPlan, near: Any, far: Any, progress: BlockProgress) -> Callable[[], Any]:
    async def put() -> None:
        await plan.put(near, far, progress=progress)
        assert progress.completed == len(near)

    return put


def partial_get(plan: BlockPlan, far: Any, near: Any, progress: BlockProgress) -> Callable[[], Any]:
    async def get() -> None:
        await plan.get(far, near, progress=progress)
        assert progress.completed == len(far)

    return get


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_buffers_of_all_sizes(transports: str, way: str, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    async with open_two(transports) as (worker, owner), open_way(way, worker, owner) as endpoint:
        with memory_of(kind, owner.context, POOL) as memory:
            descriptor = for_ucx(memory.descriptor) if kind == "for UCX" else memory.descriptor
            memory.memoryview[:] = model = bytearray(pattern(POOL, seed))
            with endpoint.attach(descriptor) as remote:
                await forbid_reading(kind, remote)
                for put in (False, True, False):
                    ends = sorted(chance.sample(range(1, POOL), chance.choice([1, 2, 30, 600])))
                    pieces = [(start, stop) for start, stop in zip([0, *ends], ends, strict=False) if stop > start]
                    chance.shuffle(pieces)
                    pieces = pieces[: chance.randint(1, len(pieces))]
                    progress = BlockProgress()
                    if put:
                        data = [pattern(stop - start, start) for start, stop in pieces]
                        await remote.put_blocks(
                            zip((start for start, _ in pieces), data, strict=True), progress=progress
                        )
                        await remote.flush()
                        for (start, stop), each in zip(pieces, data, strict=True):
                            model[start:stop] = each
                        assert memory.memoryview == model
                    else:
                        buffers = [bytearray(stop - start) for start, stop in pieces]
                        blocks = [(start, buffer) for (start, _), buffer in zip(pieces, buffers, strict=True)]
                        await remote.get_blocks(blocks, progress=progress)
                        for (start, stop), buffer in zip(pieces, buffers, strict=True):
                            assert buffer == model[start:stop]
                            assert_free(buffer)
                    assert progress.completed == len(pieces)
                    assert repr(progress) == f"<trio_ucx.ucp.blocks.BlockProgress, {len(pieces)} completed>"


async def test_bad_lists_of_buffers() -> None:
    async with open_ground("tcp", nbytes=4096) as ground:
        remote, buffer = ground.remote, bytearray(64)
        view = memoryview(buffer)
        bad: list[tuple[Any, type[Exception], str]] = [
            ([5], TypeError, "a block is an offset and a buffer, not 5"),
            ([(1, 2, 3)], TypeError, "a block is an offset and a buffer"),
            ([("x", buffer)], TypeError, "offset"),
            ([(-1, buffer)], ValueError, "offset"),
            ([(0, 5)], TypeError, "must be a buffer"),
            ([(0, b"12345678")], TypeError, "read-only"),
            ([(0, buffer), (0, bytearray())], ValueError, "has an empty buffer"),
            (
                [(0, buffer), (4090, bytearray(8))],
                ValueError,
                "block 1: 8 bytes from offset 4090 on reach beyond the end",
            ),
            ([(0, view[:40]), (64, view[39:])], ValueError, "overlap"),
        ]
        for blocks, kind, message in bad:
            with pytest.raises(kind, match=message):
                await remote.get_blocks(blocks)
        with pytest.raises(ValueError, match="overlap in the remote memory"):
            await remote.put_blocks([(0, b"1234"), (3, b"1234")])
        await remote.put_blocks([(0, view[:40]), (64, view[20:])])  # our side may overlap
        await remote.get_blocks([(0, view[:40]), (0, view[40:])])
        await remote.get_blocks([])
        bad.clear()
        del view, blocks
        assert_free(buffer)
        remote.close()
        with pytest.raises(ValueError, match="closed"):
            await remote.get_blocks([(0, buffer)])
        with pytest.raises(ValueError, match="closed"):
            await remote.get_blocks([])


NUMBERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "array": lambda numbers: array.array("q", numbers),
    "short array": lambda numbers: array.array("H", numbers),
    "int64": lambda numbers: np.array(numbers, dtype=np.int64),
    "uint8": lambda numbers: np.array(numbers, dtype=np.uint8),
    "big-endian": lambda numbers: np.array(numbers, dtype=">i4"),
    "every second": lambda numbers: np.repeat(np.array(numbers, dtype=np.int64), 2)[::2],
    "numpy integers": lambda numbers: [np.int32(number) for number in numbers],
}


@pytest.mark.parametrize("name", NUMBERS)
async def test_numbers_of_blocks(name: str) -> None:
    async with open_ground("tcp", nbytes=4096) as ground:
        ground.write(pattern(4096))
        here = bytearray(4096)
        await ground.remote.plan(here, block=16).get(NUMBERS[name]([200, 3, 4]), NUMBERS[name]([0, 1, 2]))
        assert here[:48] == pattern(4096)[3200:3216] + pattern(4096)[48:80]
        assert here[48:] == bytes(4048)
        assert_free(here)


async def test_ranges() -> None:
    async with open_ground("tcp", nbytes=4096) as ground:
        ground.write(pattern(4096))
        here = bytearray(4096)
        await ground.remote.plan(here, block=16).get(range(256), range(255, -1, -1))
        assert here == b"".join(pattern(4096)[start : start + 16] for start in range(4080, -1, -16))


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "floats": ([1.0], [0], TypeError, "remote_blocks must be integers"),
    "a string": ("ab", [0, 1], TypeError, "remote_blocks must be integers, not str"),
    "bytes": (b"ab", [0, 1], TypeError, "remote_blocks must be integers, not bytes"),
    "None": (None, [0], TypeError, "remote_blocks must be integers"),
    "one number": (3, [0], TypeError, "remote_blocks must be integers"),
    "a mask": (np.ones(256, dtype=bool), range(256), TypeError, "not a mask of booleans"),
    "an array of floats": (np.ones(2), [0, 1], TypeError, "remote_blocks must be integers"),
    "two dimensions": (np.ones((2, 2), dtype=np.int64), range(4), ValueError, "one dimension, not 2"),
    "too large for C": ([2**70], [0], ValueError, "no 64-bit integer"),
    "not as many": ([1, 2], [0], ValueError, "local_blocks has 1 numbers, and remote_blocks has 2"),
    "negative": ([0, -1], [0, 1], ValueError, r"remote_blocks\[1\] is -1, but the remote memory has 256 blocks"),
    "beyond the end there": (
        [256],
        [0],
        ValueError,
        r"remote_blocks\[0\] is 256, but the remote memory has 256 blocks",
    ),
    "beyond the end here": ([0, 1], [3, 10], ValueError, r"local_blocks\[1\] is 10, but the buffer has 10 blocks"),
    "written twice": ([1, 2, 3], [4, 5, 4], ValueError, r"local_blocks\[2\] is 4, which is in the list before"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_lists(case: str) -> None:
    far, near, kind, message = BAD[case]
    async with open_ground("tcp", nbytes=4096) as ground:
        here = bytearray(16 * 10 + 7)
        plan = ground.remote.plan(here, block=16)
        with pytest.raises(kind, match=message):
            await plan.get(far, near)
        assert here == bytes(len(here))
        assert_free(here)
        assert ground.worker.statistics().operations_in_flight == 0


async def test_bad_plans_and_rights() -> None:
    async with open_ground("tcp", nbytes=4096) as ground:
        for block in (0, -1):
            with pytest.raises(ValueError, match="block"):
                ground.remote.plan(bytearray(8), block=block)
        with pytest.raises(TypeError, match="takes one contiguous buffer"):
            ground.remote.plan([bytearray(8), bytearray(8)], block=8)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="offset"):
            ground.remote.plan(bytearray(8), block=8, offset=4097)
        with pytest.raises(TypeError, match="read-only"):
            await ground.remote.plan(bytes(8), block=8).get([0], [0])
        await ground.remote.plan(pattern(8), block=8).put([0], [3])
        await ground.remote.flush()
        assert ground.read(24, 8) == pattern(8)
        with pytest.raises(ValueError, match=r"remote_blocks\[1\] is 3, which is in the list before"):
            await ground.remote.plan(bytes(16), block=8).put([0, 1], [3, 3])
        await ground.remote.plan(bytearray(16), block=8).get([3, 3], [0, 1])  # read twice: no harm
        for rights, call in ((ucp.Access.READ, "write"), (ucp.Access.WRITE, "read")):
            with ground.owner.context.allocate(64, access=rights) as memory:
                with ground.endpoint.attach(memory.descriptor) as remote:
                    plan = remote.plan(bytearray(64), block=8)
                    with pytest.raises(ValueError, match=f"does not allow to {call}"):
                        await (plan.put if call == "write" else plan.get)([0], [0])
        plan = ground.remote.plan(bytearray(8), block=8)
        await plan.get([], [])
        ground.remote.close()
        with pytest.raises(ValueError, match="closed"):
            await plan.get([0], [0])


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_a_million_blocks(transports: str) -> None:
    """A long list in random order arrives within a minute."""
    count = 2**20
    async with open_ground(transports, nbytes=16 * count) as ground:
        data = pattern(16 * count)
        ground.write(data)
        here = bytearray(16 * count)
        order = np.random.default_rng(1).permutation(count)
        with trio.fail_after(60):
            await ground.remote.plan(here, block=16).get(order, np.arange(count))
        assert np.array_equal(np.frombuffer(here, "V16"), np.frombuffer(data, "V16")[order])


async def test_other_tasks_run_meanwhile() -> None:
    async with open_ground("sm,self", nbytes=2**27) as ground:
        plan = ground.remote.plan(bytearray(2**27), block=2**16)
        turns = 0
        done = trio.Event()

        async def other() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await plan.get(range(0, 2**11, 2), range(0, 2**11, 2))
            done.set()
        assert turns > 20


# ---- lists that end early ----


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
@pytest.mark.parametrize("put", [False, True])
async def test_cancelled_at_random_moments(transports: str, put: bool) -> None:
    """It returns at once; the first blocks are there; nothing is written once the buffers are released."""
    chance = random.Random(3)
    size, count = 16_384, 1024
    async with open_owner(transports, "worker", size * count, "registered") as (_, endpoint, remote):
        here = bytearray(size * count)
        plan = remote.plan(here, block=size)
        data = pattern(size * count, 7)
        if not put:
            await remote.put(data)
            await remote.flush()
        numbers = chance.sample(range(count), count)
        early = 0
        for _ in range(20):
            here[:] = data if put else bytes(len(here))
            progress = BlockProgress()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_later, scope, chance.random() * 0.01)
                    await (plan.put if put else plan.get)(numbers, numbers, progress=progress)
                    nursery.cancel_scope.cancel()
            completed = progress.completed
            early += completed < count
            await released(endpoint.worker)
            after = bytes(here)
            if not put:
                for block in numbers[:completed]:
                    assert after[block * size : (block + 1) * size] == data[block * size : (block + 1) * size]
                got, right = np.frombuffer(after, np.uint8), np.frombuffer(data, np.uint8)
                assert np.all((got == right) | (got == 0)), "others are there, not, or in part"
            assert progress.completed >= completed
            assert_free(here)
            await trio.sleep(0.01)
            assert here == after
        assert early > 0
        await plan.get(numbers, numbers)
        await remote.flush()


async def cancel_later(scope: trio.CancelScope, seconds: float) -> None:
    await trio.sleep(seconds)
    scope.cancel()


async def test_a_stopped_owner_and_a_cancelled_list() -> None:
    """Over TCP nothing comes; the blocks that were asked for come when the owner goes on."""
    async with open_owner("tcp", "connection", 2**24, "registered") as (peer, endpoint, remote):
        await remote.get(0, 8)
        here = bytearray(2**24)
        plan, progress = remote.plan(here, block=2**16), BlockProgress()
        await peer.stop()
        try:

            async def get() -> None:
                await plan.get(range(0, 256, 2), range(0, 256, 2), progress=progress)

            await cancelled_promptly(get)
            assert progress.completed == 0
            assert endpoint.worker.statistics().left_over_operations == 1
            with trio.move_on_after(0.05):
                await plan.put(range(0, 256, 2), range(1, 256, 2))
        finally:
            peer.resume()
        await released(endpoint.worker)
        assert_free(here)
        await plan.get(range(256), range(256), progress=progress)
        assert progress.completed == 256


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_a_killed_owner(transports: str) -> None:
    async with open_owner(transports, "connection", 2**26, "registered") as (peer, _, remote):
        here = bytearray(2**26)
        plan, progress = remote.plan(here, block=2**16), BlockProgress()
        numbers = random.Random(1).sample(range(1024), 1024)

        async def again_and_again() -> None:
            while True:
                await plan.get(numbers, numbers, progress=progress)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_soon, peer)
            with Stopwatch() as watch, pytest.raises(trio.BrokenResourceError) as caught:
                await again_and_again()
        assert watch.seconds < SOON
        if progress.completed < 1024:
            [note] = caught.value.__notes__
            assert note == f"the first {progress.completed} of 1024 blocks are completed"


async def kill_soon(peer: Peer) -> None:
    await trio.sleep(0.05)
    peer.process.kill()


@pytest.mark.cut_off
@pytest.mark.sample(4)
@pytest.mark.parametrize("point", [0, 1, 7, 100, 511, 900, 1023])
@pytest.mark.parametrize("way", ["get", "get, asked", "put"])
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_an_owner_killed_at_a_point_of_a_list(transports: str, way: str, point: int, chance: Any) -> None:
    """The list ends soon, with an error unless it was finished. What has arrived by then is right, and is freed.

    Where messages go over shared memory, UCX may keep the buffer until the worker closes (``wait_buffers_released``).
    """
    size, count = 2**16, 1024
    may_be_kept = transports != "tcp" and way != "get"
    async with open_owner(transports, "connection", size * count, "registered") as (peer, endpoint, remote):
        await forbid_reading("asked" if way == "get, asked" else "registered", remote)
        data = pattern(size * count)
        here = bytearray(data)
        await remote.put(here)
        await remote.flush()
        if way != "put":
            here[:] = bytes(size * count)
        progress, over = BlockProgress(), trio.Event()

        async def kill_there() -> None:
            await until(lambda: progress.completed >= point or over.is_set())
            peer.process.kill()

        numbers = chance.sample(range(count), count)
        plan = remote.plan(here, block=size)
        error = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_there)
            try:
                await (plan.put if way == "put" else plan.get)(numbers, numbers, progress=progress)
            except trio.BrokenResourceError as caught:
                error = caught
            over.set()
            with Stopwatch() as watch:
                await peer.ended()
                if not may_be_kept:
                    await released(endpoint.worker)
        assert watch.seconds < SOON
        if error is None:
            assert progress.completed == count
        else:
            assert error.__notes__ == [f"the first {progress.completed} of {count} blocks are completed"]
        for block in numbers[: progress.completed]:
            assert here[block * size : (block + 1) * size] == data[block * size : (block + 1) * size]
        if not may_be_kept:
            assert_free(here)
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await plan.get(numbers, numbers)
    assert_free(here)


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_memory_that_closes_in_the_middle(transports: str) -> None:
    """What was read before is right; then the owner refuses, and the error says how far the list came."""
    data = pattern(2**26)
    async with open_two(transports) as (worker, owner), open_way("worker", worker, owner) as endpoint:
        buffer = bytearray(data)
        memory = owner.context.register(buffer)
        here = bytearray(2**26)
        with endpoint.attach(memory.descriptor) as remote:
            plan, progress = remote.plan(here, block=2**16), BlockProgress()

            async def close_soon() -> None:
                await until(lambda: progress.completed > 10)
                memory.close()
                while True:  # the buffer is free as soon as no answer uses it
                    try:
                        buffer.clear()
                    except BufferError:
                        await trio.sleep(0)
                    else:
                        return

            async with trio.open_nursery() as nursery:
                nursery.start_soon(close_soon)
                with pytest.raises(trio_ucx.UCXError, match="its owner refused") as caught:
                    await plan.get(range(0, 1024, 2), range(0, 1024, 2), progress=progress)
        assert caught.value.status == ucp.Status.NO_ELEM
        assert caught.value.__notes__ == [f"the first {progress.completed} of 512 blocks are completed"]
        assert 10 < progress.completed < 512
        for block in range(progress.completed):
            where = slice(2 * block * 2**16, (2 * block + 1) * 2**16)
            assert here[where] == data[where]


async def test_a_fence_between_lists() -> None:
    async with open_owner("tcp", "worker", 2**22, "registered") as (_, endpoint, remote):
        here = bytearray(pattern(2**22))
        plan = remote.plan(here, block=2**12)
        for number in range(20):
            here[:] = pattern(2**22, number)
            await plan.put(range(0, 1024, 3), range(0, 1024, 3))  # it may not have happened at the owner yet
            endpoint.worker.fence()
            there = bytearray(2**22)
            await remote.plan(there, block=2**12).get(range(0, 1024, 3), range(0, 1024, 3))
            for block in range(0, 1024, 3):
                assert there[block * 2**12 : block * 2**12 + 8] == here[block * 2**12 : block * 2**12 + 8]


# ---- reading another process's memory ----


def path_of(remote: ucp.RemoteMemory) -> Any:
    assert remote._path is not None
    return remote._path.native


async def test_registered_memory_is_read_without_its_owner() -> None:
    """The owner is suspended. (Skipped where the kernel does not allow it.)"""
    async with open_owner("tcp,sm,self", "connection", 2**22, "registered") as (peer, _, remote):
        await remote.put(pattern(2**22))
        await remote.flush()
        if not path_of(remote).pid:
            pytest.skip("the kernel does not let this process read the owner's memory")
        await peer.stop()
        try:
            with trio.fail_after(SOON):
                assert await remote.get() == pattern(2**22)
                here = bytearray(2**22)
                await remote.plan(here, block=2**16).get(range(0, 64, 2), range(0, 64, 2))
                assert here[: 2**16] == pattern(2**22)[: 2**16]
        finally:
            peer.resume()


async def test_integers_are_not_read_directly() -> None:
    """The kernel may copy them in two steps, while the owner, or an atomic, writes them."""
    async with open_owner("tcp,sm,self", "connection", 4096, "registered") as (peer, _, remote):
        await remote.get(0, 100)
        here = bytearray(64)
        plan = remote.plan(here, block=8)
        await peer.stop()
        try:
            for call in (
                partial(remote.get, 0, 8),
                partial(plan.get, [0], [0]),
                partial(plan.get, [0, 2], [0, 1]),
                partial(plan.get, [0, 1], [0, 1]),
                partial(remote.get_blocks, [(0, bytearray(100)), (200, bytearray(8))]),
            ):
                with trio.move_on_after(0.05) as scope:
                    await call()
                assert scope.cancelled_caught
        finally:
            peer.resume()


@pytest.mark.parametrize("wrong", ["process", "address", "token"])
async def test_what_is_not_the_owner_is_not_read(wrong: str) -> None:
    """Another process that got the owner's pid, or memory that was closed."""
    buffer = bytearray(pattern(4096))
    path = ffi.new("tu_access_path_t *", {"pid": 1 if wrong == "process" else os.getpid()})
    token = ffi.new("char[]", b"0123456789abcdef")
    path.token_address = int(ffi.cast("uintptr_t", token)) if wrong != "address" else 8
    ffi.memmove(path.token, b"0123456789abcdef" if wrong != "token" else bytes(16), 16)
    path.address = int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))
    assert not lib.tu_direct_allowed(path)


async def test_closed_memory_has_no_token() -> None:
    async with ucp.open_worker() as worker:
        memory = worker.context.register(bytearray(4096))
        descriptor = ucp.MemoryDescriptor.from_bytes(memory.descriptor)
        path = ffi.new("tu_access_path_t *", {"pid": os.getpid()})
        path.token_address = descriptor._token_address
        ffi.memmove(path.token, descriptor._token, 16)
        assert lib.tu_direct_allowed(path)
        memory.close()
        assert not lib.tu_direct_allowed(path)


async def test_another_process_than_the_peer_is_not_read() -> None:
    """A descriptor that names another process than the one to which the endpoint leads is refused or not believed."""
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(open_peer("owner", 4096, "registered", transports="tcp,sm,self"))
        said = await peer.hear()
        worker = await stack.enter_async_context(ucp.open_worker(config={"TLS": "tcp,sm,self"}, features=REMOTE))
        endpoint = await stack.enter_async_context(open_to_peer("raw", worker, said))
        with endpoint.attach(bytes.fromhex(said["descriptor"])) as remote:
            await remote.get(0, 100)
            assert not path_of(remote).pid, "who is at the other end of a raw endpoint is not known"


# ---- without Feature.RMA, and by Connections ----


async def test_default_features_are_enough() -> None:
    async with ucp.open_worker() as worker, ucp.open_worker() as owner:
        async with open_pair(worker, owner) as (connection, _):
            with owner.context.register(bytearray(pattern(4096))) as memory:
                with await connection.attach(memory.descriptor) as remote:
                    here = bytearray(4096)
                    await remote.plan(here, block=64).get(range(64), range(64))
                    assert here == pattern(4096)
                    await remote.put(b"x", 5)
                    assert await remote.fetch_add(1, 8) == int.from_bytes(pattern(4096)[8:16], "little")
                    await remote.flush()
                    assert memory.memoryview[5] == ord("x")


async def test_attach_reports_what_is_wrong() -> None:
    async with ucp.open_worker() as worker, ucp.open_worker() as owner:
        async with open_pair(worker, owner) as (connection, far):
            with pytest.raises(ValueError, match="no memory descriptor"):
                await connection.attach(b"x")
            with owner.context.allocate(64) as memory:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await connection.attach(memory.descriptor)
                assert scope.cancelled_caught

                async def attach() -> None:
                    (await connection.attach(memory.descriptor)).close()

                far.abort()
                await expect_broken(attach)
                with pytest.raises(trio.BrokenResourceError):
                    await connection.attach(memory.descriptor)
                connection.abort()
                with pytest.raises(trio.ClosedResourceError):
                    await connection.attach(memory.descriptor)


async def test_several_lists_when_the_memory_closes() -> None:
    """All of them go over to messages, one after the other; each is refused, and none is forgotten."""
    async with open_two("sm,self") as (worker, owner), open_way("worker", worker, owner) as endpoint:
        memory = owner.context.register(bytearray(2**26))
        here = [bytearray(2**26) for _ in range(4)]
        with endpoint.attach(memory.descriptor) as remote:
            await remote.get(0, 100)
            ended = []

            async def get(buffer: bytearray, progress: BlockProgress) -> None:
                with pytest.raises(trio_ucx.UCXError, match="its owner refused"):
                    await remote.plan(buffer, block=2**12).get(
                        range(0, 2**14, 2), range(0, 2**14, 2), progress=progress
                    )
                ended.append(progress.completed)

            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    running = [BlockProgress() for _ in here]
                    for buffer, progress in zip(here, running, strict=True):
                        nursery.start_soon(get, buffer, progress)
                    await until(lambda: all(progress.completed > 10 for progress in running))
                    memory.close()
            assert all(10 < completed < 2**13 for completed in ended)
