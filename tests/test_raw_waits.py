"""``Endpoint.wait_closed`` and ``Worker.tag_wait``: what the raw layer waits for besides data."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from helpers import expect_closed, nothing_happens, open_pair, open_peer, open_raw_endpoint, open_raw_pair, until

from trio_ucx import ucp

# ---- Endpoint.wait_closed ----


@pytest.mark.parametrize("by", ["abort", "aclose", "worker"])
async def test_this_side_closes(transports: str, by: str) -> None:
    ended = []

    async def wait(endpoint: ucp.Endpoint) -> None:
        await endpoint.wait_closed()
        ended.append(endpoint)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, ucp.open_worker(config={"TLS": transports}) as other:
            async with ucp.open_worker(config={"TLS": transports}) as worker:
                async with open_raw_pair(worker, other) as (client, _):
                    for _ in range(3):
                        nursery.start_soon(wait, client)
                    await trio.testing.wait_all_tasks_blocked()
                    assert not ended
                    if by == "abort":
                        client.abort()
                    elif by == "aclose":
                        await client.aclose()
                    else:
                        await worker._aclose()
                    await until(lambda: len(ended) == 3)
    await client.wait_closed()


@pytest.mark.parametrize("address", ["listener", "worker"])
async def test_a_peer_that_dies(over: str, address: str) -> None:
    with trio.fail_after(30):
        async with ucp.open_worker() as worker, open_peer("owner", 8) as peer:
            said = await peer.hear()
            target: Any = tuple(said["raw"])
            if address == "worker":
                target = ucp.WorkerAddress(bytes.fromhex(said["worker"]))
            endpoint = await open_raw_endpoint(worker, target)
            await endpoint.flush()
            async with trio.open_nursery() as nursery:

                async def wait() -> None:
                    with pytest.raises(trio.BrokenResourceError):
                        await endpoint.wait_closed()

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                with trio.fail_after(5):
                    peer.signal(9)
                    await until(lambda: not nursery.child_tasks)
            await endpoint.aclose()  # what it waited for has said why
            with pytest.raises(trio.BrokenResourceError):
                await endpoint.wait_closed()


async def test_a_peer_that_closes(worker: ucp.Worker) -> None:
    with trio.fail_after(20):
        async with open_raw_pair(worker) as (client, server):
            await client.tag_send(b"x", 1)
            await worker.tag_receive(bytearray(1), 1)
            async with trio.open_nursery() as nursery:

                async def wait() -> None:
                    with pytest.raises(trio.BrokenResourceError):
                        await client.wait_closed()

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                await server.aclose()


async def test_a_cancelled_wait_changes_nothing(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with trio.move_on_after(0.05) as scope:
            await client.wait_closed()
        assert scope.cancelled_caught
        await client.tag_send(b"x", 1)
        assert await worker.tag_receive(bytearray(1), 1) == (1, 1)


# ---- Worker.tag_wait ----


async def test_every_waiting_task_learns_of_a_message_and_none_takes_it(worker: ucp.Worker) -> None:
    found: list[ucp.TagMessage] = []

    async def wait(*arguments: Any) -> None:
        found.append(await worker.tag_wait(*arguments))

    with trio.fail_after(20):
        async with open_raw_pair(worker) as (client, _), trio.open_nursery() as nursery:
            for arguments in ((0x105,), (0x105,), (5, 0xFF), (0, 0)):
                nursery.start_soon(wait, *arguments)
            nursery.start_soon(wait, 6)
            await client.tag_send(b"not asked for", 0x200)  # but by (0, 0)
            await until(lambda: found)
            await nothing_happens()
            assert [(message.length, message.sender_tag) for message in found] == [(13, 0x200)]
            for size in (3, 2**20):
                found.clear()
                async with trio.open_nursery() as sending:
                    sending.start_soon(client.tag_send, bytes(size), 0x105)
                    await until(lambda least=3 if size == 3 else 1: len(found) >= least)  # type: ignore[misc]
                    assert {(message.length, message.sender_tag) for message in found} == {(size, 0x105)}
                    assert await worker.tag_receive(bytearray(size), 0x105) == (size, 0x105)
                    assert worker.tag_probe(0x105) is None
                nursery.start_soon(wait, 0x105)
            nursery.cancel_scope.cancel()
        assert await worker.tag_receive(bytearray(13), 0, 0) == (13, 0x200)


async def test_a_message_that_was_there(worker: ucp.Worker) -> None:
    with trio.fail_after(20):
        async with open_raw_pair(worker) as (client, _):
            await client.tag_send(b"abc", 9)
            for _ in range(2):
                message = await worker.tag_wait(9)
                assert (message.length, message.sender_tag) == (3, 9)
            with pytest.raises(ValueError, match="remove=True"):
                await worker.tag_receive_message(message, bytearray(3))
            removed = worker.tag_probe(9, remove=True)
            assert removed is not None
            await worker.tag_receive_message(removed, bytearray(3))


async def test_a_cancelled_tag_wait_leaves_the_message(worker: ucp.Worker) -> None:
    with trio.fail_after(20):
        async with open_raw_pair(worker) as (client, _):
            with trio.move_on_after(0.05) as scope:
                await worker.tag_wait(1)
            assert scope.cancelled_caught
            assert worker.statistics().operations_in_flight == 0
            await client.tag_send(b"x", 1)
            assert (await worker.tag_wait(1)).length == 1


async def test_the_worker_closes_during_a_tag_wait(transports: str) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, ucp.open_worker(config={"TLS": transports}) as worker:
            nursery.start_soon(expect_closed, worker.tag_wait, 1)
            await trio.testing.wait_all_tasks_blocked()


async def test_tags_of_connections(worker: ucp.Worker) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(ValueError, match="belong to the Connections"):
                    await worker.tag_wait(1 << 63)

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            async with open_pair(worker) as (client, server):
                await client.send(b"x")
                with trio.move_on_after(0.05) as scope:
                    await worker.tag_wait(0, 0)
                assert scope.cancelled_caught
                await wait()
                assert await server.receive() == b"x"


@pytest.mark.parametrize("tag,mask,error", [(-1, None, ValueError), (0, 2**64, ValueError), ("x", None, TypeError)])
async def test_wrong_arguments(tag: Any, mask: Any, error: type[Exception]) -> None:
    async with ucp.open_worker() as worker:
        with pytest.raises(error):
            await worker.tag_wait(tag, mask)
    async with ucp.open_worker(features=ucp.Feature.AM) as worker:
        with pytest.raises(RuntimeError, match=r"Feature\.TAG"):
            await worker.tag_wait(1)


async def test_a_tag_wait_parks(transports: str) -> None:
    """It polls nothing by itself: the worker sleeps."""
    async with ucp.open_worker(config={"TLS": transports}, spin=0) as worker:
        with trio.move_on_after(0.3):
            await worker.tag_wait(1)
        before = worker.statistics().progress_calls
        with trio.move_on_after(0.5):
            await worker.tag_wait(1)
        assert worker.statistics().progress_calls - before < 40


async def test_no_event_is_missed(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, spin=0) as worker, open_raw_pair(worker) as (client, _):
        with trio.fail_after(20):
            for number in range(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(worker.tag_wait, number))
                    await trio.testing.wait_all_tasks_blocked(0.002)
                    await client.tag_send(b"x", number)
