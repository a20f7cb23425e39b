"""Raw tag messages on a worker that has Connections: receives and probes never take a Connection's message."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from helpers import open_listener, open_pair, until

import trio_ucx
from trio_ucx import ucp

BIT_63 = 1 << 63
#: Masks and tags that would match those of Connections, too.
OPEN = [(0, 0), (2**64 - 1, 0), (BIT_63 | 5, 0xFF), (5, 2**31 - 1)]


@pytest.mark.parametrize(("tag", "mask"), OPEN)
async def test_open_masks_take_no_message_of_a_connection(worker: ucp.Worker, tag: int, mask: int) -> None:
    async with open_pair(worker) as (client, server), ucp.open_worker(config=worker.context.config) as other:
        with trio.fail_after(20):
            endpoint = await other.open_endpoint(worker.address)
            async with trio.open_nursery() as nursery:
                raw = tag & mask & ~BIT_63
                received = []

                async def receive(buffer: bytearray) -> None:
                    received.append(await worker.tag_receive(buffer, tag, mask))

                async def request() -> None:
                    async with worker.open_request_group() as group:
                        received.append(await group.tag_receive(bytearray(9), tag, mask))

                nursery.start_soon(receive, bytearray(9))
                nursery.start_soon(receive, bytearray(2**20))
                nursery.start_soon(request)
                await trio.testing.wait_all_tasks_blocked()
                for size in (5, 5000, 2**20):
                    nursery.start_soon(partial(client.send, bytes(size), tag=5))
                    assert len(await server.receive(tag=5)) == size
                    assert worker.tag_probe(tag, mask) is None
                    assert worker.tag_probe(tag, mask, remove=True) is None
                assert not received
                for number in range(3):
                    await endpoint.tag_send(b"raw"[: number + 1], raw)
            assert sorted(received) == [(1, raw), (2, raw), (3, raw)]
            await endpoint.tag_send(b"more", raw)
            await until(lambda: worker.tag_probe(tag, mask))
            message = worker.tag_probe(tag, mask, remove=True)
            assert message is not None and message.sender_tag == raw
            assert await worker.tag_receive_message(message, bytearray(4)) == (4, raw)
            await client.aclose()  # the close handshake was not disturbed
            endpoint.abort()


async def test_tags_of_connections_are_refused(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for tag, mask in ((BIT_63, 2**64 - 1), (2**64 - 1, 2**64 - 1), (BIT_63, BIT_63)):
            with pytest.raises(ValueError, match="belong to the Connections of this worker: use a tag below"):
                await worker.tag_receive(bytearray(1), tag, mask)
            for remove in (False, True):
                with pytest.raises(ValueError, match="belong to the Connections"):
                    worker.tag_probe(tag, mask, remove=remove)
            with pytest.raises(ExceptionGroup) as caught:
                async with worker.open_request_group() as group:
                    group.tag_receive([bytearray(1), bytearray(1)], tag, mask)
            assert caught.group_contains(ValueError, match="belong to the Connections")
        await client.send(b"x", tag=0)
        assert await server.receive(tag=0) == b"x"


@pytest.mark.parametrize(("tag", "mask"), [(0, 0), (5, 0xFF), (BIT_63, 2**64 - 1)])
async def test_earlier_receives(worker: ucp.Worker, tag: int, mask: int) -> None:
    """The first Connection is refused while a receive waits that could take its messages."""
    async with ucp.open_worker(config=worker.context.config) as other:
        with trio.fail_after(20):
            async with open_listener(other) as listener, trio.open_nursery() as nursery:
                nursery.start_soon(worker.tag_receive, bytearray(1), tag, mask)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(RuntimeError, match="a tag_receive that waits on this worker could take"):
                    await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
                with pytest.raises(RuntimeError, match="a tag_receive that waits on this worker could take"):
                    async with trio_ucx.connect(listener.address, worker=worker):
                        pass
                nursery.cancel_scope.cancel()
        async with open_pair(worker, other) as (client, server):
            await client.send(b"x", tag=0)
            assert await server.receive(tag=0) == b"x"


async def test_earlier_receives_that_take_other_tags(worker: ucp.Worker) -> None:
    buffer = bytearray(1)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.tag_receive, buffer, 7, BIT_63 | 0xFF)
            await trio.testing.wait_all_tasks_blocked()
            async with open_pair(worker) as (client, server):
                await client.send(b"x", tag=7)
                assert await server.receive(tag=7) == b"x"
                await client.endpoint.tag_send(b"r", 7)
                await until(lambda: not nursery.child_tasks)
    assert buffer == b"r"


async def test_all_bits_without_connections(worker: ucp.Worker) -> None:
    endpoint = await worker.open_endpoint(worker.address)
    with trio.fail_after(20):
        for tag in (BIT_63, 2**64 - 1, BIT_63 | 5):
            await endpoint.tag_send(b"x", tag)
            assert await worker.tag_receive(bytearray(1), tag) == (1, tag)
            await endpoint.tag_send(b"y", tag)
            await until(lambda tag=tag: worker.tag_probe(tag))  # type: ignore[misc]
            assert await worker.tag_receive(bytearray(1), 0, 0) == (1, tag)
    endpoint.abort()
