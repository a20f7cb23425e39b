"""UCP streams: every byte arrives once and in order, despite cancellations, and stays as long as it can be read."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from helpers import (
    assert_free,
    assert_transports,
    expect_closed,
    nothing_happens,
    open_peer,
    open_raw_endpoint,
    open_raw_listener,
    open_raw_pair,
    pattern,
    until,
)
from injected_faults import close_context, close_worker, record_workers_left_alone
from timing import cancelled_after

from trio_ucx import ucp
from trio_ucx.testing import internals

FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
SIZES = [0, 1, 8191, 65535, 65536, 65537, 2**20]


@pytest.fixture
async def worker(transports: str) -> AsyncIterator[ucp.Worker]:
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker:
        yield worker


async def arrived(endpoint: ucp.Endpoint, size: int) -> None:
    """Waits until so many bytes are there, unread."""
    await until(
        lambda: internals(endpoint).stream_buffer is not None and internals(endpoint).stream_buffer.size == size
    )


# ---- the data ----


async def test_sizes(worker: ucp.Worker, transports: str) -> None:
    async with open_raw_pair(worker) as (client, server), trio.open_nursery() as nursery:
        with trio.fail_after(30):
            for sender, receiver in ((client, server), (server, client)):
                for size in SIZES:
                    data = pattern(size, size)
                    nursery.start_soon(sender.stream_send, data)
                    buffer = bytearray(size)
                    assert await receiver.stream_receive(buffer, exact=True) == size
                    assert buffer == data
                    assert_free(buffer)
        assert_transports(client, transports)
    assert worker.statistics().operations_in_flight == 0


async def test_64_mib(worker: ucp.Worker) -> None:
    data, buffer = pattern(2**26), bytearray(2**26)
    async with open_raw_pair(worker) as (client, server), trio.open_nursery() as nursery:
        with trio.fail_after(30):
            nursery.start_soon(client.stream_send, data)
            assert await server.stream_receive(buffer, exact=True) == 2**26
    assert buffer == data


async def test_lists_and_strided_arrays(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server), trio.open_nursery() as nursery:
        with trio.fail_after(20):
            for side in (10, 300):
                matrix = np.arange(side * side, dtype=np.int32).reshape(side, side)
                for given, expected in (
                    ([matrix[0], b"", matrix[1:]], matrix.tobytes()),
                    (ucp.Strided(matrix[::2, ::3]), matrix[::2, ::3].tobytes()),
                ):
                    nursery.start_soon(client.stream_send, given)
                    parts = [bytearray(7), bytearray(0), np.zeros(len(expected) - 7, np.uint8)]
                    assert await server.stream_receive(parts, exact=True) == len(expected)
                    assert b"".join(map(bytes, parts)) == expected
                target = np.zeros((side, side), np.int32)[:, ::2]
                nursery.start_soon(client.stream_send, matrix[:, ::2].copy())
                assert await server.stream_receive(ucp.Strided(target), exact=True) == target.nbytes
                assert (target == matrix[:, ::2]).all()


@pytest.mark.parametrize("seed", range(6))
async def test_random_sizes_and_cancellations(worker: ucp.Worker, seed: int) -> None:
    """Against a reference: no byte is lost, none is doubled, whatever is cancelled, and whichever way it is read."""
    rng = random.Random(seed)
    reference, got = pattern(3_000_000, seed), bytearray()

    async def send() -> None:
        position = 0
        while position < len(reference):
            size = rng.choice([1, 7, 100, 5000, 9000, 70_000, 300_000])
            await client.stream_send(reference[position : position + size])
            position += size
            if rng.random() < 0.2:
                await trio.sleep(0.0003)

    async with open_raw_pair(worker) as (client, server), trio.open_nursery() as nursery:
        with trio.move_on_after(0.001):
            await server.stream_receive(bytearray(1), exact=True)  # cancelled for sure: nothing is sent yet
        nursery.start_soon(send)
        with trio.fail_after(30):
            while len(got) < len(reference):
                rest = len(reference) - len(got)
                with trio.CancelScope() as scope:
                    if rng.random() < 0.7:
                        scope.deadline = trio.current_time() + rng.choice([-1, 0, 0.0001, 0.001])
                    if rng.random() < 0.3:
                        with await server.stream_receive_some() as piece:
                            got += piece.data
                            assert len(piece) == len(bytes(piece)) > 0
                    else:
                        exact = rng.random() < 0.6
                        buffer = bytearray(min(rng.choice([1, 9, 1000, 60_000, 500_000]), rest))
                        count = await server.stream_receive(buffer, exact=exact)
                        if exact:
                            assert count == len(buffer)
                        else:
                            assert 0 < count <= len(buffer)
                        got += buffer[:count]
    assert got == reference


async def test_not_exact_takes_what_is_there(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        buffer = bytearray(100)
        with trio.fail_after(20):
            await client.stream_send(b"some")
            await client.stream_send(b"thing")
            await arrived(server, 9)
            assert await server.stream_receive(buffer) == 9
            assert buffer[:9] == b"something"
            assert await server.stream_receive(bytearray(0)) == await server.stream_receive([], exact=True) == 0


async def test_exact_receive_that_was_cancelled_leaves_the_bytes(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        with trio.fail_after(20):
            await client.stream_send(b"abc")
            await arrived(server, 3)
            buffer = bytearray(5)
            with trio.move_on_after(0.02) as scope:
                await server.stream_receive(buffer, exact=True)
            assert scope.cancelled_caught
            assert_free(buffer)
            assert await worker.wait_stream_ready() == [server]
            await client.stream_send(b"de")
            assert await server.stream_receive(buffer, exact=True) == 5
            assert buffer == b"abcde"


async def test_two_receivers(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.stream_receive, bytearray(3))
            await trio.testing.wait_all_tasks_blocked()
            for function in (lambda: server.stream_receive(bytearray(3)), server.stream_receive_some):
                with pytest.raises(trio.BusyResourceError):
                    await function()
            await client.stream_send(b"abc")
        await client.stream_send(b"def")
        with trio.fail_after(20), await server.stream_receive_some() as data:
            assert data.data == b"def"


async def test_streams_of_a_worker_address(worker: ucp.Worker, transports: str) -> None:
    """What comes before the receiver has opened its endpoint waits for that."""
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as other:
        with trio.fail_after(20):
            there = await worker.open_endpoint(other.address)
            await there.stream_send(b"early")
            await there.flush()
            await nothing_happens()
            await expect_none_ready(other)
            here = await other.open_endpoint(worker.address)
            buffer = bytearray(10)
            await there.stream_send(b" late")
            assert await here.stream_receive(buffer, exact=True) == 10
            assert buffer == b"early late"
            await here.stream_send(b"answer")
            assert await there.stream_receive(buffer) == 6
            here.abort()
            there.abort()


# ---- readiness ----


async def expect_none_ready(worker: ucp.Worker) -> None:
    with trio.move_on_after(0.02) as scope:
        await worker.wait_stream_ready()
    assert scope.cancelled_caught


async def test_which_endpoints_are_ready(worker: ucp.Worker) -> None:
    async with (
        open_raw_pair(worker) as (client_1, server_1),
        open_raw_pair(worker) as (client_2, server_2),
    ):
        with trio.fail_after(20):
            await expect_none_ready(worker)
            ready: list[list[ucp.Endpoint]] = []

            async def wait() -> None:
                ready.append(await worker.wait_stream_ready())

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                assert not ready
                await client_1.stream_send(b"one")
            assert ready == [[server_1]] * 3
            await server_2.stream_send(b"two")
            await arrived(client_2, 3)
            assert set(await worker.wait_stream_ready()) == {server_1, client_2}
            (await server_1.stream_receive_some()).release()
            assert await worker.wait_stream_ready() == [client_2]
            assert await client_2.stream_receive(bytearray(2)) == 2
            assert await worker.wait_stream_ready() == [client_2]
            assert await client_2.stream_receive(bytearray(2)) == 1
            await expect_none_ready(worker)


async def test_waiting_for_readiness_ends_with_the_worker(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker:
        async with open_raw_pair(worker) as (client, _), trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, worker.wait_stream_ready)
            nursery.start_soon(expect_closed, client.stream_receive, bytearray(1))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.warns(ResourceWarning, match="RawListener"):  # the pair's
                await close_worker(worker)


# ---- the end ----


async def test_what_the_peer_sent_before_it_closed(worker: ucp.Worker) -> None:
    """Over and over: UCX throws away what it still has when it finds that the peer has gone."""
    for number in range(30):
        async with open_raw_pair(worker) as (client, server):
            data = pattern(1 + number * 3000, number)
            got = bytearray()
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.stream_send, data)
                    if number % 2:
                        await arrived(server, len(data))
                await client.aclose()
                with pytest.raises(trio.BrokenResourceError):
                    while True:
                        with await server.stream_receive_some() as piece:
                            got += piece.data
            assert got == data
            with pytest.raises(trio.BrokenResourceError):
                await server.stream_receive(bytearray(1))


async def test_exact_receive_that_breaks_leaves_the_bytes(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        with trio.fail_after(20):
            await client.stream_send(b"abc")
            await arrived(server, 3)
            await client.aclose()
            buffer = bytearray(5)
            for _ in range(2):
                with pytest.raises(trio.BrokenResourceError):
                    await server.stream_receive(buffer, exact=True)
                assert_free(buffer)
            assert await server.stream_receive(buffer) == 3
            assert buffer[:3] == b"abc"
            with pytest.raises(trio.BrokenResourceError):
                await server.stream_receive(buffer)


async def test_receiver_that_finds_the_break_itself(worker: ucp.Worker) -> None:
    """The progress that it makes before it waits may be what reports the error."""
    for _ in range(20):
        async with open_raw_pair(worker) as (client, server):
            await client.stream_send(b"x")
            (await server.stream_receive_some()).release()
            client.abort()
            time.sleep(0.005)  # nobody else takes it
            with trio.fail_after(20), pytest.raises(trio.BrokenResourceError):
                await server.stream_receive(bytearray(1))


async def test_closed_by_us(worker: ucp.Worker) -> None:
    """Waiting tasks get an error, and unread data are released."""
    async with open_raw_pair(worker) as (client, server):
        await client.stream_send(pattern(10_000))
        await arrived(server, 10_000)
        assert await server.stream_receive(bytearray(10)) == 10
        server.abort()
        for function in (lambda: server.stream_receive(bytearray(1)), server.stream_receive_some):
            with pytest.raises(trio.ClosedResourceError):
                await function()
        with pytest.raises(trio.ClosedResourceError):
            await server.stream_send(b"x")
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
                    await client.stream_receive(bytearray(1))

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            client.abort()
    assert not internals(worker).teardown.unreleased
    assert not internals(worker).teardown.children


async def test_broken_endpoint_that_nobody_closes_keeps_nothing(worker: ucp.Worker) -> None:
    async with await open_raw_listener(worker) as listener:
        client = await worker.open_endpoint(listener.address)
        server: ucp.Endpoint | None = await (await listener.accept_request()).accept()
        assert server is not None
        await client.stream_send(bytes(1000))
        await arrived(server, 1000)
        await client.aclose()
        await until(lambda: not server.alive)
    server = None
    gc.collect()
    await until(lambda: not internals(worker).teardown.children)


@pytest.mark.parametrize("read", [0, 3])
async def test_worker_closed_with_unread_data(transports: str, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with endpoints that are open."""
    kept = record_workers_left_alone(monkeypatch)
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker:
        listener = await open_raw_listener(worker)
        client = await worker.open_endpoint(listener.address)
        server = await (await listener.accept_request()).accept()
        await client.stream_send(pattern(10_000))
        await arrived(server, 10_000)
        await server.stream_receive(bytearray(read))
        await listener.aclose()
    assert not kept
    with pytest.raises(trio.ClosedResourceError):
        await server.stream_receive(bytearray(1))
    with pytest.raises(trio.ClosedResourceError):
        await worker.wait_stream_ready()


# ---- borrowed memory ----


def numpy_array(view: memoryview) -> Any:
    return np.frombuffer(view, np.uint8)


def part(view: memoryview) -> Any:
    return view[5:]


@pytest.mark.parametrize("make", [numpy_array, part])
@pytest.mark.parametrize("read", [0, 10])
async def test_release_while_something_uses_the_data(
    worker: ucp.Worker, make: Callable[[memoryview], Any], read: int
) -> None:
    """A whole piece, and the rest of one. (A longer one comes in several packets over UD.)"""
    async with open_raw_pair(worker) as (client, server):
        await client.stream_send(pattern(500))
        await arrived(server, 500)
        await server.stream_receive(bytearray(read))
        data = await server.stream_receive_some()
        made = make(data.data)
        for _ in range(2):
            with pytest.raises(BufferError, match="still in use"):
                data.release()
            assert data.data == pattern(500)[read:]
            assert pattern(500).endswith(bytes(made))
        del made
        data.release()
        data.release()
        assert "released" in repr(data)
        with pytest.raises(ValueError, match="released"):
            bytes(data)


async def test_data_outlives_all_endpoints(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        kept = []
        for number in range(20):
            await client.stream_send(pattern(600, number))
            await arrived(server, 600)
            kept.append(await server.stream_receive_some())
        kept.pop().release()
    await until(lambda: not internals(worker).endpoints)
    for number, data in reversed(list(enumerate(kept))):
        assert data.data == pattern(600, number)
        data.release()
    async with open_raw_pair(worker) as (client, server):  # and nothing is broken
        await client.stream_send(b"well?")
        with trio.fail_after(20), await server.stream_receive_some() as answer:
            assert bytes(answer) == b"well?"


async def test_worker_closed_while_data_is_held(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker:
        async with open_raw_pair(worker) as (client, server):
            await client.stream_send(pattern(5000))
            data = await server.stream_receive_some()
            view = data.data
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    assert "released" in repr(data)
    data.release()


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_worker_closed_while_something_uses_the_data(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = record_workers_left_alone(monkeypatch)
    with pytest.warns(ResourceWarning, match="still in use"):
        async with ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker:
            async with open_raw_pair(worker) as (client, server):
                await client.stream_send(pattern(5000))
                await arrived(server, 5000)
                await server.stream_receive(bytearray(10))
                data = await server.stream_receive_some()
                rest = data.data[5:]
    assert len(kept) == 1
    assert rest == pattern(5000)[15:]
    del rest
    data.release()
    close_context(worker.context)


@pytest.mark.filterwarnings("default::ResourceWarning")
async def test_dropped_data(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        await client.stream_send(pattern(5000))
        children = len(internals(worker).teardown.children)
        with pytest.warns(ResourceWarning, match="unreleased .*StreamData"):
            await server.stream_receive_some()
            gc.collect()
            await until(lambda: len(internals(worker).teardown.children) <= children + 1)  # the stream buffer


# ---- cancelled, stopped, killed ----


async def test_stopped_peer(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("stream_echo", transports=transports) as peer:
        address, _ = await peer.hear()
        endpoint = await open_raw_endpoint(worker, tuple(address))
        await endpoint.stream_send(b"hello")
        with trio.fail_after(20):
            assert await endpoint.stream_receive(bytearray(5), exact=True) == 5
        await peer.stop()
        buffers = [bytearray(10), bytearray(2**24)]
        try:
            with trio.move_on_after(0.02) as scope:
                await endpoint.stream_receive(bytearray(1))
            assert scope.cancelled_caught
            for buffer in buffers:
                with cancelled_after(0.05) as scope:
                    await endpoint.stream_send(buffer)
            if scope.cancelled_caught:
                with pytest.raises(BufferError):
                    buffers[1].append(0)
                assert worker.statistics().left_over_operations
        finally:
            peer.resume()
        with trio.fail_after(30):
            assert await endpoint.stream_receive(bytearray(2**24 + 10), exact=True) == 2**24 + 10
        await until(lambda: not worker.statistics().left_over_operations)
        assert_free(*buffers)
        endpoint.abort()


@pytest.mark.sample(1)
@pytest.mark.cut_off
async def test_killed_peer(transports: str) -> None:
    """At several moments: every waiting task gets an error; the data that had arrived are right."""
    for moment in range(4):
        async with (
            ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker,
            open_peer("stream_echo", transports=transports) as peer,
        ):
            address, _ = await peer.hear()
            endpoint = await open_raw_endpoint(worker, tuple(address))
            await endpoint.stream_send(b"hello")
            got = bytearray(5)
            sent = pattern(2**18)

            async def send(endpoint: ucp.Endpoint, data: bytes) -> None:
                with pytest.raises(trio.BrokenResourceError):
                    while True:
                        await endpoint.stream_send(data)

            with trio.fail_after(20):
                await endpoint.stream_receive(got, exact=True)
                del got[:]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send, endpoint, sent)
                    with pytest.raises(trio.BrokenResourceError):
                        while True:
                            with await endpoint.stream_receive_some() as data:
                                got += data.data
                            if len(got) > moment * 100_000:
                                peer.signal(signal.SIGKILL)
            assert all(got[start : start + 2**18] == sent[: len(got) - start] for start in range(0, len(got), 2**18))
            endpoint.abort()


async def test_cancelled_sends(worker: ucp.Worker) -> None:
    """All or nothing of each; buffers are free in the end."""
    rng = random.Random(5)
    async with open_raw_pair(worker) as (client, server):
        buffers = []
        cancelled = []
        got = bytearray()
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    while not got.endswith(b"end"):
                        with await server.stream_receive_some() as data:
                            got.extend(data.data)

                nursery.start_soon(read)
                for number in range(60):
                    buffer = bytearray([number]) * rng.choice([1, 1000, 70_000, 300_000])
                    with trio.move_on_after(rng.choice([0, 0, 0.0002])) as scope:
                        await client.stream_send(buffer)
                    buffers.append(buffer)
                    cancelled.append(scope.cancelled_caught)
                await client.stream_send(b"end")
            await until(lambda: not worker.statistics().left_over_operations)
        position = 0
        for number, buffer in enumerate(buffers):
            count = got.count(number, position, len(got) - 3)
            if cancelled[number]:
                assert count in (0, len(buffer)), "a part of a cancelled send has arrived"
            else:
                assert count == len(buffer)
            assert got[position : position + count] == buffer[:count]
            position += count
        assert position == len(got) - 3
        assert_free(*buffers)


async def test_request_groups(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        buffer = bytearray(40 * 30_000)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: server.stream_receive(buffer, exact=True))
                async with worker.open_request_group() as group:
                    for number in range(39):
                        group.stream_send(client, pattern(30_000, number))
                    await group.stream_send(client, pattern(30_000, 39))
        assert buffer == b"".join(pattern(30_000, number) for number in range(40))


# ---- mistakes ----


async def test_wrong_arguments(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        good = bytearray(5)
        for data, kind in (
            ("text", TypeError),
            (None, TypeError),
            (np.zeros(9)[::2], ValueError),
            ([good, 5], TypeError),
        ):
            with pytest.raises(kind, match="cannot send"):
                await client.stream_send(data)
            with pytest.raises(kind, match="cannot send"):
                async with worker.open_request_group() as group:
                    try:
                        group.stream_send(client, data)
                    except Exception as error:
                        failure = error
                raise failure
        for buffer, kind in (
            (b"bytes", TypeError),
            (None, TypeError),
            (np.zeros(9)[::2], ValueError),
            ([good, b""], TypeError),
        ):
            with pytest.raises(kind):
                await server.stream_receive(buffer)
        assert_free(good)
        await client.stream_send(b"works")
        with trio.fail_after(20):
            assert await server.stream_receive(good, exact=True) == 5
    assert worker.statistics().operations_in_flight == 0


async def test_without_the_feature(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker, open_raw_pair(worker) as (client, _):
        buffer = bytearray(5)
        for function in (
            lambda: client.stream_send(buffer),
            lambda: client.stream_receive(buffer),
            client.stream_receive_some,
            worker.wait_stream_ready,
        ):
            with pytest.raises(RuntimeError, match=r"Feature\.STREAM"):
                await function()
        assert_free(buffer)


async def test_thousands_of_pieces(worker: ucp.Worker) -> None:
    """More than the ring of records has room for, unread."""
    async with open_raw_pair(worker) as (client, server):
        with trio.fail_after(120):
            for number in range(3000):
                await client.stream_send(number.to_bytes(2, "big"))
            await arrived(server, 6000)
            buffer = bytearray(6000)
            assert await server.stream_receive(buffer, exact=True) == 6000
            assert buffer == b"".join(number.to_bytes(2, "big") for number in range(3000))
