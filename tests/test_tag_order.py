"""Each tag is an ordered queue, which ends at the first missing message; and the cost of many tags."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import pytest
import trio
from helpers import Rounds, open_pair, resident, until
from samples import tag_queue
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link.message_port import MessagePort
from trio_ucx._link.receiving import Receiving, Transfer
from trio_ucx._link.tag_queues import IDLE_QUEUES, TagQueues
from trio_ucx._rules import credit as _credit
from trio_ucx._rules import wire
from trio_ucx._rules.credit import ReceiveCredit, SendCredit
from trio_ucx._rules.tag_queue import Mover, TagQueue
from trio_ucx.ucp import Status

Receive = Callable[[trio_ucx.Connection], Awaitable[Any]]


async def receive_into(connection: trio_ucx.Connection) -> bytes:
    buffer = bytearray(2**20)
    return bytes(buffer[: await connection.receive_into(buffer, tag=1)])


async def receive_in_group(connection: trio_ucx.Connection) -> bytes:
    buffer = bytearray(2**20)
    try:
        async with connection.worker.open_request_group() as group:
            length = await group.receive_into(connection, buffer, tag=1)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return bytes(buffer[:length])


async def receive_nowait(connection: trio_ucx.Connection) -> bytes:
    while True:
        try:
            return connection.receive_nowait(tag=1)
        except trio.WouldBlock:
            await trio.sleep(0)


async def wait_and_receive(connection: trio_ucx.Connection) -> bytes:
    await connection.wait_message(tag=1)
    return await connection.receive(tag=1)


RECEIVES: dict[str, Receive] = {
    "receive": lambda connection: connection.receive(tag=1),
    "receive_into": receive_into,
    "group": receive_in_group,
    "receive_nowait": receive_nowait,
    "wait_message": wait_and_receive,
    "messages": lambda connection: anext(connection.messages(1)),
}


@pytest.mark.parametrize("how", RECEIVES)
@pytest.mark.parametrize("missing", [1, 2])
async def test_a_tag_queue_ends_at_a_hole(worker: ucp.Worker, how: str, missing: int) -> None:
    """A large message stays with its sender, who aborts: small ones that were sent after it are not delivered."""
    async with open_pair(worker) as (client, server):
        client.send_nowait(b"first", tag=1)
        for _ in range(missing):
            client.send_nowait(bytes(100_000), tag=1)
        client.send_nowait(b"behind the hole", tag=1)
        client.send_nowait(b"x" * 5000, tag=1)
        client.send_nowait(b"another tag", tag=2)
        await until(lambda: server.statistics().messages_received == 4 + missing)
        client.abort()
        with pytest.raises(trio_ucx.PeerLost):
            await server.wait_closed()
        with trio.fail_after(15):
            assert await RECEIVES[how](server) == b"first"
            lengths = set()
            for _ in range(3):
                with pytest.raises(trio.BrokenResourceError) as broken:
                    await RECEIVES[how](server)
                lengths.add(len(traceback.extract_tb(broken.tb)))
            assert len(lengths) == 1, "the error keeps the frames of all those that got it"
            assert await server.receive(tag=2) == b"another tag"
        server.abort()


async def test_a_cancelled_large_message_is_no_hole(worker: ucp.Worker) -> None:
    """A send that was cancelled may not be delivered; the connection closes in order, and the next message is."""
    async with open_pair(worker) as (client, server):
        with trio.move_on_after(0):
            await client.send(b"x", tag=1)  # cancelled before anything is sent
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, bytes(100_000), tag=1))
                await until(lambda: server.statistics().messages_received == 1)
                scope.cancel()
        await client.send(b"next", tag=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.aclose)
            received = [message async for message in server.messages(1)]
        assert received in ([b"next"], [bytes(100_000), b"next"])


@pytest.mark.parametrize("how", RECEIVES)
async def test_nothing_is_received_after_broken(worker: ucp.Worker, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that arrive after a receive has reported that the connection broke are dropped, on every tag."""
    async with open_pair(worker) as (client, server):
        client.abort()
        with trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
            await RECEIVES[how](server)
        receiving = server._link.receiving
        discarded: list[int] = []
        monkeypatch.setattr(MessagePort, "discard", lambda self, handle: discarded.append(handle))
        monkeypatch.setattr(MessagePort, "receive", lambda self, handle, pins: pytest.fail("received"))
        for tag in (1, 2):
            receiving.packed_arrived(tag, 1, 4, b"late")  # UCX delivers what it read from the socket only now
            receiving.message_arrived(tag, tag, 5000)
            with pytest.raises(trio.BrokenResourceError):
                await server.receive(tag=tag)
        assert discarded == [1, 2]
        server.abort()


async def test_a_failed_transfer_breaks_the_connection(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX gives up one message, and says nothing about the endpoint."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        complete = Transfer.complete
        monkeypatch.setattr(
            Transfer, "complete", lambda self, status, length, tag: complete(self, Status.CONNECTION_RESET, length, tag)
        )
        with trio.fail_after(60):
            nursery.start_soon(partial(client.send, bytes(100_000), tag=1))
            with pytest.raises(trio.BrokenResourceError, match="receiving a message"):
                await server.receive(tag=1)
            assert server.peer_state is trio_ucx.PeerState.LOST and not server.closed
            with pytest.raises(trio.BrokenResourceError, match="broke: receiving a message"):
                await server.receive(tag=2)
            with pytest.raises(trio_ucx.PeerLost):
                await client.wait_closed()


# ---- many tags ----


async def send_and_receive(client: trio_ucx.Connection, server: trio_ucx.Connection, tag: int) -> None:
    """One message on a tag, received by one of several functions."""
    way, size = tag % 7, 100_000 if tag % 70 < 2 else 5000 if tag % 4 == 0 else 4
    data = tag.to_bytes(4, "big") * (size // 4)
    if way in (0, 1):  # somebody waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.send, data, tag=tag))
            if way == 0:
                assert await server.receive(tag=tag) == data
            else:
                assert await server.receive_into(bytearray(size), tag=tag) == size
        return
    if way in (2, 6):
        with trio.move_on_after(0.0001):
            await server.receive(tag=tag)
    if way == 6:  # nothing ever comes
        return
    await client.send(data, tag=tag)
    if way == 3:
        assert await server.wait_message(tag=tag) == size
    if way == 4:
        while True:
            try:
                assert server.receive_nowait(tag=tag) == data
                return
            except trio.WouldBlock:
                await trio.sleep(0)
    assert await server.receive(tag=tag) == data


async def test_idle_tags_are_forgotten(worker: ucp.Worker, rounds: Rounds) -> None:
    async with open_pair(worker) as (client, server):
        count, before = rounds(3000, 10_000_000), 0
        for tag in range(count):
            await send_and_receive(client, server, tag)
            if tag == 2000:
                before = resident()
        assert resident() - before < 4 * 2**20
        assert len(server._link.queues) <= IDLE_QUEUES + 1
        assert len(server._link.queues.awaited) <= IDLE_QUEUES + 1
        queues = client._link.queues.values()  # it learns only now and then what the server has
        assert len(queues) <= 2048 and not any(queue.admitted_by_peer or queue.waiting_sends for queue in queues)


class Send:
    def __init__(self, queue: TagQueue) -> None:
        self.queue, self.size = queue, 4


def test_sends_that_wait_are_found_at_once() -> None:
    """Whatever the order in which their tags are admitted. (Looking through all of them took 20 s for so many.)"""
    out: SendCredit[Send] = SendCredit(4096, 0)
    sends = [Send(tag_queue(tag)) for tag in range(20_000)]
    with Stopwatch(2):
        for send in sends:
            out.wait(send)
        for send in reversed(sends[5000:]):
            out.admit(send.queue, 0)
            assert out.next_ready() is send
            if out.credit < 0:
                out.credit = 0  # so that no other send may go
        for send in sends[:5000:2]:
            out.withdraw(send)
        for send in sends[1:5000:2]:
            out.grant(out.window - out.credit, 0)
            assert out.next_ready() is send
    assert not out.waiting and not any(send.queue.waiting_sends for send in sends) and not out._overtaking


def test_sends_that_were_cancelled_leave_nothing() -> None:
    """Also a send behind one on the same tag that goes on waiting."""
    out: SendCredit[Send] = SendCredit(4096, 0)
    queue = tag_queue(1)
    first = Send(queue)
    out.wait(first)
    for _ in range(100):
        send = Send(queue)
        out.wait(send)
        out.withdraw(send)
    assert list(out.waiting) == [first] and len(queue.waiting_sends) == 1


def test_receives_that_were_cancelled_at_many_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that receives from one tag after the other, while one tag fills the window, is not cut off."""
    monkeypatch.setattr(_credit, "MAX_ADMISSIONS", 100)
    out: SendCredit[Send] = SendCredit(4096, 0)
    into = ReceiveCredit(4096, 0)
    ours, theirs = [[tag_queue(tag) for tag in range(200)] for _ in range(2)]
    while out.take(ours[0], 1000):
        into.arrived(theirs[0], 1000)
    assert into.peer_stalled(0) == 0
    for sender, receiver in zip(ours[1:], theirs[1:], strict=True):
        if into.found_empty(receiver)[1]:
            out.admit(sender, into.received)
    assert out.take(ours[1], 1000) and not out.take(ours[199], 1000)
    into.arrived(theirs[1], 1000)
    assert into.found_empty(theirs[199])[1]


def test_a_peer_cannot_admit_more_tags_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_credit, "MAX_ADMISSIONS", 10)
    out: SendCredit[Send] = SendCredit(4096, 0)
    queues = [tag_queue(tag) for tag in range(11)]
    for queue in [*queues[:10], queues[3]]:
        out.admit(queue, 0)
    with pytest.raises(wire.ProtocolError, match="more than 10 tag queues"):
        out.admit(queues[10], 0)


def wait_there(queue: TagQueue, out: SendCredit[Any]) -> None:
    out.wait(Send(queue))


#: What may be known of a tag queue that is empty.
KNOWN: dict[str, Callable[[TagQueue, SendCredit[Any]], object]] = {
    "a message is on its way": lambda queue, out: out.take(queue, 1),
    "a send waits": wait_there,
    "the peer has admitted a message": lambda queue, out: out.admit(queue, 0),
    "a message was admitted": lambda queue, out: setattr(queue, "admitted_by_us", True),
    "a channel uses it": lambda queue, out: setattr(queue, "channel", object()),
    "only the newest is kept": lambda queue, out: queue.keep_newest(),
    "it has failed": lambda queue, out: queue.close(EOFError()),
}


@pytest.mark.parametrize("known", KNOWN)
def test_what_is_known_of_a_tag_is_not_forgotten(known: str) -> None:
    """Tags are forgotten when the peer has what was sent there."""
    out: SendCredit[Any] = SendCredit(2**24, 0)
    queues = TagQueues(cast(Mover, None), out)
    for tag in range(5000):
        assert out.take(queues[tag], 1)
    kept = [queues[tag] for tag in range(5000, 5100)]
    for queue in kept:
        KNOWN[known](queue, out)
    out.grant(0, 5000)
    queues.sweep_if_due()
    assert all(queues.get(queue.number) is queue for queue in kept)
    assert len(queues) == 100


async def test_receiving_from_any_tag_looks_only_where_messages_are(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the tags of requests that this side has sent."""
    looks = 0
    unread = TagQueue.unread.fget

    def count(queue: TagQueue) -> Any:
        nonlocal looks
        looks += 1
        return unread(queue)

    monkeypatch.setattr(TagQueue, "unread", property(count))
    async with open_pair(worker) as (client, server):
        for tag in range(1000):
            await client.send(b"request", tag=tag)
        await server.send(b"reply", tag=5)
        with trio.fail_after(15):
            assert await client.receive_any() == (5, b"reply")
    assert looks < 50


async def test_tags_received_in_another_order(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a peer without credit, the receiver looks only at tags with waiting receives, not at all unread ones."""
    looks = 0
    look = Receiving._admit_next

    def count(receiving: Receiving, queue: Any) -> None:
        nonlocal looks
        looks += 1
        look(receiving, queue)

    monkeypatch.setattr(Receiving, "_admit_next", count)
    async with open_pair(worker, window=2**17) as (client, server):
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                async with worker.open_request_group() as group:
                    for tag in range(1500):
                        group.send(client, tag.to_bytes(4, "big"), tag=tag)

            nursery.start_soon(send)
            for tag in reversed(range(1500)):
                assert await server.receive(tag=tag) == tag.to_bytes(4, "big")
    assert looks < 10 * 1500
