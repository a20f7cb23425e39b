"""Small messages that follow each other closely are sent as one batch: in order, complete, and soon."""

from __future__ import annotations

import random

import pytest
import trio
from helpers import open_pair, open_peer, pattern, until
from link_model import cost

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx._rules import wire
from trio_ucx.testing import internals

Messages = list[tuple[int, bytes]]


def taken_apart(batch: bytes) -> Messages:
    messages = []
    while batch:
        queue, length, count = wire.PACKED_HEAD.unpack_from(batch)
        batch = batch[wire.PACKED_HEAD.size :]
        for _ in range(count):
            messages.append((queue, batch[:length]))
            batch = batch[length:]
    return messages


def test_c_knows_the_same_numbers() -> None:
    assert lib.TU_CONTROL_QUEUE == wire.CONTROL
    assert lib.TU_STREAM_QUEUE == wire.STREAM
    assert lib.TU_BATCH_QUEUE == wire.BATCH
    assert lib.TU_LONGEST_BATCH == wire.MAX_BATCH
    assert wire.PACKED_HEAD.size == lib.TU_GROUP_HEAD
    assert wire.SMALL_MESSAGE == lib.TU_SMALL_MESSAGE


def batches(worker: ucp.Worker) -> int:
    return worker.statistics().batches


@pytest.mark.parametrize("seed", range(4))
async def test_each_queue_keeps_its_order(worker: ucp.Worker, seed: int) -> None:
    """All ways to send, all sizes, several tag queues and the byte stream: nothing overtakes what was sent before."""
    chance = random.Random(seed)
    sent: dict[int, list[bytes]] = {tag: [] for tag in (0, 1, 2)}
    stream = bytearray()
    sizes = [0, 1, 8, 8, 8, 8, 100, 1000, 1024, 1025, 4000, 10_000]

    async def send(client: trio_ucx.Connection) -> None:
        for number in range(1500):
            tag = chance.choice([0, 0, 0, 1, 2])
            data = pattern(chance.choice(sizes if chance.random() < 0.95 else [70_000, 200_000]), number)
            way = chance.random()
            if way < 0.1 and data:
                stream.extend(data)
                await client.send_all(data)
                continue
            sent[tag].append(data)
            try:
                if way < 0.7:
                    client.send_nowait(data, tag=tag)
                    continue
            except trio.WouldBlock:
                pass
            if way > 0.9:
                async with worker.open_request_group() as group:
                    group.send(client, data, tag=tag)
            else:
                await client.send(data, tag=tag)

    async with open_pair(worker) as (client, server):
        got: dict[int, list[bytes]] = {tag: [] for tag in sent}
        read = bytearray()

        async def receive(tag: int) -> None:
            async for data in server.messages(tag):
                got[tag].append(data)

        async def read_all() -> None:
            async for chunk in server:
                read.extend(chunk)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for tag in sent:
                    nursery.start_soon(receive, tag)
                nursery.start_soon(read_all)
                await send(client)
                await client.aclose()
        assert got == sent
        assert read == stream
        assert batches(worker) > 20
        assert worker.statistics().missed_events == 0


async def test_a_single_message_is_sent_at_once(worker: ucp.Worker) -> None:
    """It does not wait for a second message; nor does an answer."""
    async with open_pair(worker) as (client, server):
        for _ in range(20):
            client.send_nowait(b"to")
            assert await server.receive() == b"to"
            server.send_nowait(b"fro")
            assert await client.receive() == b"fro"
        assert batches(worker) == 0


def some(connection: trio_ucx.Connection, count: int = 10) -> list[bytes]:
    data = [pattern(8, number) for number in range(count)]
    for one in data:
        connection.send_nowait(one)
    return data


@pytest.mark.parametrize("then", ["sleeps", "works", "computes and sleeps"])
async def test_a_batch_is_sent_soon_whatever_the_sender_does(transports: str, then: str) -> None:
    """It does nothing more with the connection; and in another process, nobody makes its worker progress."""
    async with open_peer("echo", [0], transports=transports) as peer:
        address, _ = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            async with trio_ucx.connect(tuple(address), worker=worker) as connection:
                await connection.send(b"first")
                assert await connection.receive() == b"first"
                for number in range(1, 4):
                    sent = some(connection)
                    begin = trio.current_time()
                    if then == "sleeps":
                        await trio.sleep(0.2)
                    elif then == "works":
                        while trio.current_time() < begin + 0.2:
                            await trio.lowlevel.checkpoint()
                    else:
                        while trio.current_time() < begin + 0.02:
                            pass
                        await trio.sleep(0.2)
                    assert not internals(worker).links.deferred
                    # The answers come, and with them the proof that UCX has sent it.
                    await until(lambda number=number: connection.statistics().messages_received == 1 + 10 * number)
                    assert [connection.receive_nowait() for _ in sent] == sent
                assert batches(worker) > 0
                assert worker.statistics().missed_events == 0


async def test_the_instrument_is_removed_when_it_is_not_needed(worker: ucp.Worker) -> None:
    def watched() -> bool:
        instrument = internals(worker).progress_task.before_wait
        try:
            trio.lowlevel.remove_instrument(instrument)
        except KeyError:
            return False
        trio.lowlevel.add_instrument(instrument)
        return True

    async def idle() -> None:
        for _ in range(300):
            await trio.sleep(0.0001)

    async with open_pair(worker) as (client, server):
        await idle()
        assert not watched()
        some(client)
        assert watched()
        assert [await server.receive() for _ in range(10)] == [pattern(8, number) for number in range(10)]
        await idle()
        assert not watched()
        some(client)  # and it comes back
        assert watched()
        assert await server.receive() == pattern(8, 0)


@pytest.mark.parametrize("how", ["aclose", "abort", "flush", "worker flush", "cancelled aclose"])
async def test_a_batch_is_sent_before_the_end(worker: ucp.Worker, how: str) -> None:
    async with open_pair(worker) as (client, server):
        sent = some(client)
        if how == "abort":
            client.abort()
        elif how == "aclose":
            await client.aclose()
        elif how == "flush":
            await client.endpoint.flush()
        elif how == "worker flush":
            await worker.flush()
        else:
            with trio.CancelScope() as scope:
                scope.cancel()
                await client.aclose()
        assert not internals(worker).links.deferred
        with trio.fail_after(15):
            assert [await server.receive() for _ in sent] == sent


async def test_undelivered_batches_are_an_error_when_the_peer_dies(transports: str) -> None:
    async with open_peer("echo", [0], transports=transports) as peer:
        address, _ = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            connection = await trio_ucx.open_ucx_stream(*address, worker=worker)
            await connection.send(b"first")
            assert await connection.receive() == b"first"
            some(connection)
            peer.process.kill()
            with trio.fail_after(15):
                await peer.process.wait()
                with pytest.raises(trio.BrokenResourceError):
                    while True:
                        some(connection, 3)
                        await trio.sleep(0.01)
                await connection.aclose()
            assert not internals(worker).links.deferred


async def test_no_batch_above_the_rendezvous_threshold(transports: str) -> None:
    """With a rendezvous threshold this low, a batch would stay with the sender until somebody receives it."""
    async with ucp.open_worker(config={"TLS": transports, "RNDV_THRESH": 500}) as worker:
        async with open_pair(worker) as (client, server):
            sent = some(client, 50)
            assert [await server.receive() for _ in sent] == sent
            assert batches(worker) == 0


async def test_credit_is_paid_for_each(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server):
        sent = 0
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(bytes(8))
                sent += 1
        assert sent == 8192 // cost(8, 0)
        assert client.statistics().messages_sent == sent
        for _ in range(sent):
            assert await server.receive() == bytes(8)
        assert server.statistics().messages_received == sent
        assert server.statistics().held == 0
