"""Notifications about remote memory: they come after the data, and none is lost."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
import trio
from helpers import pattern, until
from remote import SOON, for_ucx, open_owner, open_two, open_way
from timing import cancelled_promptly

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib

WAYS = [("tcp", "connection"), ("tcp,sm,self", "connection"), ("sm,self", "worker"), ("tcp", "raw")]
MOST = lib.TU_MOST_NOTES


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["allocated", "registered"])
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_a_notification_comes_after_the_blocks(transports: str, way: str, kind: str) -> None:
    chance = random.Random(1)
    async with open_two(transports) as (worker, owner), open_way(way, worker, owner) as endpoint:
        context = owner.context
        with context.allocate(2**22) if kind == "allocated" else context.register(bytearray(2**22)) as memory:
            view = memory.memoryview
            view[:] = bytes(2**22)
            with endpoint.attach(memory.descriptor) as remote:
                here = bytearray(2**22)
                plan = remote.plan(here, block=2**14)
                lists = [chance.sample(range(256), 100) for _ in range(20)]
                started = trio.Event()

                async def write() -> None:
                    for number, blocks in enumerate(lists):
                        for block in blocks:
                            here[block * 2**14 : (block + 1) * 2**14] = bytes([number + 1]) * 2**14
                        await plan.put(blocks, blocks, notify=b"list %d" % number)
                        if number == 0:
                            started.set()
                        await seen[number].wait()

                seen = [trio.Event() for _ in lists]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write)
                    await started.wait()  # the first one comes before anybody receives
                    notes = memory.notifications()
                    for number, blocks in enumerate(lists):
                        note = await notes.receive()
                        assert note.data == b"list %d" % number
                        for block in blocks:
                            assert view[block * 2**14 : (block + 1) * 2**14] == bytes([number + 1]) * 2**14
                        if way == "raw":
                            assert isinstance(note.endpoint, ucp.Endpoint)
                        seen[number].set()
            del view


async def test_each_goes_to_one_of_several_tasks_and_none_is_lost() -> None:
    """Tasks that receive are cancelled all the time."""
    async with open_two("tcp") as (worker, owner), open_way("worker", worker, owner) as endpoint:
        memory = owner.context.register(bytearray(8))
        with memory, endpoint.attach(memory.descriptor) as remote:
            got: list[int] = []
            chance = random.Random(5)

            async def receive() -> None:
                notes = memory.notifications()
                while len(got) < 500:
                    with trio.move_on_after(chance.random() * 0.002):
                        async for note in notes:
                            got.append(int(note.data))

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for _ in range(5):
                        nursery.start_soon(receive)
                    for number in range(500):
                        await remote.notify(b"%d" % number)
            assert sorted(got) == list(range(500))


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_senders_wait_when_nobody_receives(transports: str) -> None:
    async with open_two(transports) as (worker, owner), open_way("worker", worker, owner) as endpoint:
        memory = owner.context.register(bytearray(8))
        with memory, endpoint.attach(memory.descriptor) as remote:
            sent = 0

            async def send() -> None:
                nonlocal sent
                for number in range(MOST + 200):
                    await remote.notify(b"%d" % number)
                    sent += 1

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    await until(lambda: sent == MOST)
                    await trio.sleep(0.1)
                    assert sent == MOST
                    await cancelled_promptly(remote.notify, b"not now")
                    notes = memory.notifications()
                    for number in range(MOST + 200):
                        assert (await notes.receive()).data == b"%d" % number
            assert sent == MOST + 200


async def test_misuse() -> None:
    async with open_two("tcp") as (worker, owner), open_way("worker", worker, owner) as endpoint:
        context = owner.context
        memory = context.register(bytearray(64))
        with endpoint.attach(memory.descriptor) as remote:
            await remote.notify(b"")
            await remote.notify(bytes(4096))
            with pytest.raises(ValueError, match="at most 4096 bytes, not 4097"):
                await remote.notify(bytes(4097))
            with pytest.raises(TypeError):
                await remote.notify("text")  # type: ignore[arg-type]
            notes = memory.notifications()
            assert [len((await notes.receive()).data) for _ in range(2)] == [0, 4096]
            with (
                context.register(bytearray(8), access=ucp.Access.READ) as other,
                endpoint.attach(other.descriptor) as only,
            ):
                with pytest.raises(ValueError, match="does not allow to write"):
                    await only.notify(b"x")
            with endpoint.attach(for_ucx(memory.descriptor)) as by_ucx:
                with pytest.raises(RuntimeError, match="takes no notifications"):
                    await by_ucx.notify(b"x")

            async def receive() -> None:
                with pytest.raises(trio.ClosedResourceError, match="this memory was closed"):
                    await notes.receive()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                memory.close()
            with pytest.raises(ValueError, match="closed"):
                memory.notifications()
            with pytest.raises(trio_ucx.UCXError, match="its owner refused"):
                await remote.notify(b"too late")


async def test_received_in_another_thread() -> None:
    """The memory's context is used by two threads; the worker of one has the notification."""
    async with open_two("tcp") as (worker, owner), open_way("worker", worker, owner) as endpoint:
        memory = owner.context.register(bytearray(8))
        with memory, endpoint.attach(memory.descriptor) as remote:
            found: list[bytes] = []
            waits = threading.Event()

            async def receive() -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(until, waits.is_set)
                    waits.set()
                    with trio.fail_after(20):
                        found.append((await memory.notifications().receive()).data)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(trio.to_thread.run_sync, trio.run, receive))
                await until(waits.is_set)
                await trio.sleep(0.05)
                await remote.notify(b"hello")
            assert found == [b"hello"]


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_a_killed_owner(transports: str) -> None:
    """Also one that has never received a notification, so that this side waits."""
    async with open_owner(transports, "connection", 2**20, "registered") as (peer, _, remote):
        await remote.put(pattern(2**20))
        await remote.notify(b"x")

        async def notify_for_ever() -> None:
            with trio.fail_after(SOON), pytest.raises(trio.BrokenResourceError):
                while True:
                    await remote.notify(b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(notify_for_ever)
            await trio.sleep(0.3)
            peer.process.kill()


async def test_a_closed_worker_leaves_its_notifications() -> None:
    """They were accepted, so the owner gets them, without the endpoint."""
    async with ucp.open_worker() as owner:
        with owner.context.register(bytearray(8)) as memory:
            async with ucp.open_worker() as worker:
                endpoint = await worker.open_endpoint(owner.address)
                with endpoint.attach(memory.descriptor) as remote:
                    for number in range(10):
                        await remote.notify(b"%d" % number)
                endpoint.abort()
            notes = memory.notifications()
            for number in range(10):
                note = await notes.receive()
                assert (note.data, note.endpoint) == (b"%d" % number, None)
