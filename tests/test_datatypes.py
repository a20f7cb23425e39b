"""Strided arrays: the bytes that numpy would copy arrive, no others are read or written, and nothing stays pinned."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio.testing
from helpers import assert_transports, is_free, open_pair, open_peer, open_raw_pair, pattern, until
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import cancelled_after

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi, lib
from trio_ucx.ucp import Status, Strided
from trio_ucx.ucp._memory.buffers import Pinned

#: Around the edge between eager and rendezvous, and far beyond the size of one fragment.
SIZES = [0, 1, 1000, 65535, 65536, 66559, 66560, 2**20, 4 * 2**20]

Array = Any


def backing(size: int, seed: int = 0) -> Array:
    return np.frombuffer(bytearray(pattern(size, seed)), np.uint8)


#: Arrays of a given number of bytes, from fresh memory.
VIEWS: dict[str, Callable[[int, int], Array]] = {
    "column": lambda size, seed: backing(3 * size, seed).reshape(size, 3)[:, 1],
    "backwards": lambda size, seed: backing(size, seed)[::-1],
    "wide rows": lambda size, seed: (
        backing(2 * size, seed).reshape(-1, 2, max(1, size // 4))[:, 1]
        if size % 4 == 0
        else backing(size + 7, seed)[7:]
    ),
    "3-D, transposed": lambda size, seed: (
        backing(2 * size, seed).reshape(2, -1, 16, 4)[1].T if size % 64 == 0 else backing(2 * size, seed)[::-2]
    ),
}


def memory_of(view: Array) -> Array:
    """All the memory that a view is of."""
    while view.base is not None and isinstance(view.base, np.ndarray):
        view = view.base
    return view


def elements(view: Array) -> bytes:
    return bytes(view.tobytes())


async def transfer(client: ucp.Endpoint, worker: ucp.Worker, data: Any, buffer: Any, early: bool) -> int:
    length = -1

    async def receive() -> None:
        nonlocal length
        length, tag = await worker.tag_receive(buffer, 7)
        assert tag == 7

    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            if early:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(client.tag_send, data, 7)
            if not early:
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(receive)
    return length


# ---- what is packed, without UCX ----


@st.composite
def strided_arrays(draw: st.DrawFn) -> Array:
    """Slices, with steps of both signs, of transposed arrays of any item size."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    item = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24]))
    array = backing(int(np.prod(shape, dtype=int)) * item).view(f"V{item}").reshape(shape)
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    slices = []
    for length in array.shape:
        ends = st.one_of(st.none(), st.integers(-length, length))
        slices.append(slice(draw(ends), draw(ends), draw(st.sampled_from([None, 2, 3, -1, -2]))))
    return array[(*slices, ...)]  # the dots: not a scalar


@given(strided_arrays(), st.data())
@settings(settings.get_profile("model"), max_examples=300)
def test_any_part_packs_and_unpacks(view: Array, data: st.DataObject) -> None:
    want = elements(view)
    before = elements(memory_of(view))
    pins = Pinned(Strided(view), writable=True)
    try:
        assert pins.size == len(want)
        assert pins.copy(pins.size) == want
        begin = data.draw(st.integers(0, len(want)))
        end = data.draw(st.integers(begin, len(want)))
        out = ffi.new("char[]", end - begin + 1)
        assert lib.tu_strided_pack(pins.many.strided, begin, out, end - begin) == end - begin
        assert bytes(ffi.buffer(out)) == want[begin:end] + b"\0"
        # The part is taken out, and put back: everything is as before, what is around it, too.
        if view.size:
            zeros = bytes(end - begin)
            assert lib.tu_strided_unpack(pins.many.strided, begin, ffi.from_buffer(zeros), len(zeros)) == len(zeros)
            assert elements(view) == want[:begin] + zeros + want[end:]
            lib.tu_strided_unpack(pins.many.strided, begin, out, end - begin)
        assert elements(memory_of(view)) == before
        pins.fill(memoryview(want[::-1]))
        assert elements(view) == want[::-1]
    finally:
        pins.release()


def test_nothing_outside_the_message() -> None:
    view = VIEWS["column"](10, 0)
    before = elements(memory_of(view))
    pins = Pinned(Strided(view), writable=True)
    out = ffi.new("char[]", 20)
    assert lib.tu_strided_pack(pins.many.strided, 8, out, 20) == 2
    assert lib.tu_strided_pack(pins.many.strided, 11, out, 20) == 0
    assert lib.tu_strided_unpack(pins.many.strided, 10, out, 20) == 0
    pins.release()
    assert elements(memory_of(view)) == before


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.float64(3.5),
        np.zeros((0, 3)).T,
        np.zeros((3, 4), order="F"),
        np.broadcast_to(np.arange(3), (4, 3)),
        np.zeros(10, dtype="M8[s]")[::3],
        np.zeros(9, dtype=[("a", "u1"), ("b", "f8")])[::2],
        np.zeros(9, dtype=[("a", "u1"), ("b", "f8")])["b"],
        memoryview(b"abcdefg")[::-2],
        b"bytes",
    ],
    ids=lambda array: f"{type(array).__name__} {getattr(array, 'dtype', '')}",
)
def test_what_can_be_sent(array: Any) -> None:
    pins = Pinned(Strided(array))
    assert pins.copy(pins.size) == (array if isinstance(array, bytes) else array.tobytes())
    pins.release()


@pytest.mark.parametrize(
    "array, writable, kind, match",
    [
        ("text", False, TypeError, "cannot send a strided str: Strided takes a numpy array"),
        (None, True, TypeError, "cannot receive into a strided NoneType"),
        ([np.zeros(3)], False, TypeError, "strided list"),
        (b"bytes", True, ValueError, "cannot receive into this strided bytes: .*not writable"),
        (np.broadcast_to(np.zeros(1), (5,)), True, ValueError, "read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(10), (4, 4), (8, 8)), True, ValueError, "share memory"),
        (np.lib.stride_tricks.as_strided(np.zeros(10), (5,), (0,)), True, ValueError, "share memory"),
        (np.lib.stride_tricks.as_strided(np.zeros(10), (5,), (4,)), True, ValueError, "share memory"),
    ],
)
def test_what_cannot_be_sent(array: Any, writable: bool, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        Pinned(Strided(array), writable=writable)


def test_a_failure_leaves_nothing_pinned() -> None:
    memory = bytearray(100)
    view = memoryview(np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)))
    with pytest.raises(ValueError, match="share memory") as info:
        Pinned(Strided(view), writable=True)
    with pytest.raises(ValueError, match=r"cannot have a ucp\.Strided in it") as info_of_list:
        Pinned([memory, Strided(view)])
    memory.append(1)  # although the tracebacks still refer to the frames
    view.release()
    del info, info_of_list


# ---- raw tag messages ----


@pytest.mark.parametrize("size", SIZES)
async def test_sizes(worker: ucp.Worker, transports: str, size: int) -> None:
    async with open_raw_pair(worker) as (client, _):
        for number, (name, make) in enumerate(VIEWS.items()):
            source = make(size, number)
            want = elements(source)
            before = elements(memory_of(source))
            plain = bytearray(b"\xaa" * (size + 3))
            assert await transfer(client, worker, Strided(source), plain, early=bool(number % 2)) == size, name
            assert plain == want + b"\xaa" * 3, name
            target = make(size, 99)
            around = elements(memory_of(target))
            assert await transfer(client, worker, want, Strided(target), early=not number % 2) == size, name
            assert elements(target) == want, name
            target[...] = make(size, 99)
            assert elements(memory_of(target)) == around, name
            # Both ends, and another layout at the other.
            target = VIEWS["column"](size, 98)
            assert await transfer(client, worker, Strided(source), Strided(target), early=True) == size, name
            assert elements(target) == want, name
            assert elements(memory_of(source)) == before
        if size and ucp.library().version >= (1, 14):
            assert_transports(client, transports)
    assert worker.statistics().operations_in_flight == 0


async def test_a_shorter_message_leaves_the_rest(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        for size in (10, 100_000):
            target = VIEWS["column"](size * 2, 1)
            rest = elements(target)[size:]
            data = pattern(size)
            assert await transfer(client, worker, data, Strided(target), early=False) == size
            assert elements(target) == data + rest


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("size", [100, 65536, 2**20])
async def test_truncation(worker: ucp.Worker, size: int, early: bool) -> None:
    async with open_raw_pair(worker) as (client, _):
        for view in (VIEWS["column"](size - 1, 1), VIEWS["backwards"](size - 1, 1), VIEWS["column"](0, 0)):
            before = memory_of(view).copy()
            with pytest.raises(trio_ucx.UCXError, match=f"longer than the buffer of {view.nbytes}") as info:
                try:
                    await transfer(client, worker, pattern(size), Strided(view), early)
                except* trio_ucx.UCXError as group:
                    error = group.exceptions[0]
                raise error
            assert info.value.status == Status.MESSAGE_TRUNCATED
            after = memory_of(view).copy()
            view[...] = 0
            inside = memory_of(view) != after
            # Only elements of the view may have been written to.
            assert np.array_equal(after[~inside & (memory_of(view) != 0)], before[~inside & (memory_of(view) != 0)])
            assert await transfer(client, worker, b"next", bytearray(4), early=True) == 4


async def test_large_messages_stay_with_their_sender(worker: ucp.Worker) -> None:
    """From the same size on as others: Connections count on it for their credits."""
    edge = worker.context.rendezvous_threshold
    assert edge is not None
    async with open_raw_pair(worker) as (client, _):
        for size in (edge - 1, edge):
            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    sent = trio.Event()

                    async def send(size: int = size, sent: trio.Event = sent) -> None:
                        await client.tag_send(Strided(VIEWS["column"](size, 1)), 1)
                        sent.set()

                    nursery.start_soon(send)
                    with trio.move_on_after(0.05 if size == edge else 60) as scope:
                        await sent.wait()
                    assert scope.cancelled_caught == (size == edge)
                    await worker.tag_receive(bytearray(size), 1)


async def test_probed_and_synchronous(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        for size in (100, 100_000):
            source, target = VIEWS["column"](size, 1), VIEWS["backwards"](size, 2)
            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.tag_send_sync, Strided(source), 3)
                    await until(lambda: worker.tag_probe(3))
                    message = worker.tag_probe(3, remove=True)
                    assert message is not None
                    assert message.length == size
                    assert await worker.tag_receive_message(message, Strided(target)) == (size, 3)
            assert elements(target) == elements(source)


async def test_request_groups(worker: ucp.Worker) -> None:
    matrix = np.arange(200 * 300, dtype=np.float64).reshape(200, 300)
    result = np.zeros_like(matrix)
    async with open_raw_pair(worker) as (client, _):
        with trio.fail_after(15):
            async with worker.open_request_group() as group:
                for column in range(300):
                    group.tag_receive(Strided(result[:, column]), column)
                    group.tag_send(client, Strided(matrix[:, column]), column)
    assert np.array_equal(matrix, result)


async def test_bad_buffers(worker: ucp.Worker) -> None:
    column = np.zeros((4, 4))[:, 1]
    async with open_raw_pair(worker) as (client, _):
        for data in (column, [b"x", column]):
            with pytest.raises(ValueError, match=r"non-contiguous ndarray .*wrap it in ucp\.Strided"):
                await client.tag_send(data, 1)
        for data in ([Strided(column)], (b"x", Strided(column))):
            with pytest.raises(ValueError, match=r"a list of buffers cannot have a ucp\.Strided in it"):
                await client.tag_send(data, 1)
            with pytest.raises((TypeError, ValueError), match="Strided|read-only"):
                await worker.tag_receive(data, 1)
        assert worker.tag_probe(0, 0) is None


# ---- Connections ----


@pytest.mark.parametrize("size", [0, 1000, 65536, 2**20])
async def test_connection(worker: ucp.Worker, size: int) -> None:
    async with open_pair(worker) as (client, server):
        for early in (False, True):
            source = VIEWS["column"](size, 1)
            want = elements(source)
            targets = [VIEWS[name](size, 2) for name in VIEWS]
            results: list[Any] = []

            async def receive(target: Array, results: list[Any] = results) -> None:
                results.append(await server.receive_into(Strided(target), tag=1))

            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    if early:
                        for target in targets:
                            nursery.start_soon(receive, target)
                        await trio.testing.wait_all_tasks_blocked()
                    for _ in targets:
                        nursery.start_soon(partial(client.send, Strided(source), tag=1))
                    if not early:
                        await server.wait_message(tag=1)
                        for target in targets:
                            nursery.start_soon(receive, target)
                assert results == [size] * len(targets)
                for target in targets:
                    assert elements(target) == want
                async with worker.open_request_group() as group:
                    group.send(client, Strided(source), tag=2)
                    group.receive_into(server, Strided(targets[0][...]), tag=2)
                client.send_nowait(Strided(source), tag=3)
                source[...] = 0  # it was copied
                assert await server.receive(tag=3) == want
        assert client.statistics().left_over_operations == server.statistics().left_over_operations == 0


async def test_connection_refuses(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        view = VIEWS["column"](10, 0)
        for data in ([Strided(view)], [b"x", Strided(view)]):
            for send in (client.send, client.send_nowait):
                with pytest.raises(ValueError, match=r"cannot have a ucp\.Strided"):
                    answer = send(data)
                    if answer is not None:
                        await answer
        with pytest.raises(ValueError, match="send_nowait copies at most"):
            client.send_nowait(Strided(VIEWS["column"](2**20 + 1, 0)))
        before = elements(memory_of(view))
        for size in (11, 100_000):
            client.send_nowait(pattern(size))
            with trio.fail_after(15), pytest.raises(trio_ucx.MessageTooLong, match="the buffer has 10"):
                await server.receive_into(Strided(view))
        assert elements(memory_of(view)) == before
        with trio.fail_after(15):
            await client.send(b"still works")
            assert await server.receive() == b"still works"


# ---- cancellation ----


async def test_cancelled_send(worker: ucp.Worker) -> None:
    memory = bytearray(pattern(3 * 2**20))
    view = memoryview(memory)[::3]
    want = view.tobytes()
    async with open_pair(worker) as (client, server):
        with cancelled_after(0.05) as scope:
            await client.send(Strided(view), tag=1)
        assert scope.cancelled_caught
        with pytest.raises(BufferError):
            view.release()
        del view
        assert client.statistics().left_over_operations == 1
        with pytest.raises(BufferError):
            memory.append(1)
        with trio.fail_after(15):
            assert await server.receive(tag=1) == want
            await client.wait_buffers_released()
        gc.collect()  # contextlib of Python 3.12 leaves a cycle that refers to the exception, and so to the view
        memory.append(1)


async def test_cancelled_receive(worker: ucp.Worker) -> None:
    memory = bytearray(100)
    async with open_pair(worker) as (client, server):
        view = memoryview(memory)[::-3]
        with cancelled_after(0.02) as scope:
            await server.receive_into(Strided(view), tag=1)
        assert scope.cancelled_caught
        view.release()
        await client.send(b"abc", tag=1)
        assert await server.receive(tag=1) == b"abc"


async def test_receive_cancelled_in_the_middle(worker: ucp.Worker, transports: str) -> None:
    """The sender is stopped. The array is the library's until the transfer ends, and the message goes to the next."""
    size = 4 * 2**20
    memory = bytearray(3 * size)
    async with open_peer("numbered", 2, size, transports=transports) as peer:
        address, _ = await peer.hear()
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            assert await connection.wait_message(tag=1) == size
            await peer.stop()
            try:
                view = memoryview(memory)[::-3]
                with cancelled_after(0.05) as scope:
                    await connection.receive_into(Strided(view), tag=1)
                assert scope.cancelled_caught
                with pytest.raises(BufferError):
                    view.release()
                assert connection.statistics().left_over_operations == 1
            finally:
                peer.resume()
            with trio.fail_after(15):
                await connection.wait_buffers_released()
                view.release()
                memory[:] = bytes(len(memory))  # ours again: it must not matter to the message
                target = VIEWS["column"](size, 2)
                assert await connection.receive_into(Strided(target), tag=1) == size
                assert elements(target) == pattern(size, 0)
                assert await connection.receive(tag=1) == pattern(size, 1)


async def test_aborted_under_way(worker: ucp.Worker) -> None:
    """The array is let go of when the endpoint is closed by force."""
    memory = bytearray(3 * 2**20)
    async with open_raw_pair(worker) as (client, _):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with memoryview(memory)[::3] as view, pytest.raises(trio.ClosedResourceError):
                    await client.tag_send(Strided(view), 1)

            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            client.abort()
        await until(lambda: is_free(memory))
