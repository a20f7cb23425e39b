"""Backpressure: the rules by themselves, then over real connections."""

from __future__ import annotations

import contextlib
import random
from functools import partial

import attrs
import pytest
import trio
import trio.testing
from helpers import nothing_happens, open_pair, open_peer, pattern, until
from refused_memory import few_allocations
from samples import tag_queue

from trio_ucx import ucp
from trio_ucx._link import MessagePort
from trio_ucx._rules.credit import (
    ANNOUNCEMENT,
    LARGE_OVERHEAD,
    LONE,
    MESSAGE_OVERHEAD,
    SMALL_MESSAGE,
    ReceiveCredit,
    SendCredit,
    cost,
)
from trio_ucx._rules.tag_queue import TagQueue
from trio_ucx.ucp import Status


@attrs.define(eq=False)
class Send:
    queue: TagQueue
    size: int


class Queues(dict[int, TagQueue]):
    """One side's tag queues."""

    def __missing__(self, number: int) -> TagQueue:
        return self.setdefault(number, tag_queue(number))


@pytest.fixture
def ours() -> Queues:
    return Queues()


@pytest.fixture
def theirs() -> Queues:
    return Queues()


def ready(out: SendCredit[Send]) -> list[object]:
    return list(iter(out.next_ready, None))


def test_costs() -> None:
    assert cost(0, 0) == MESSAGE_OVERHEAD
    assert cost(SMALL_MESSAGE, 0) == SMALL_MESSAGE + MESSAGE_OVERHEAD
    assert cost(SMALL_MESSAGE + 1, 0) == SMALL_MESSAGE + 1 + LARGE_OVERHEAD
    assert cost(65535, 65536) == 65535 + LARGE_OVERHEAD
    assert cost(65536, 65536) == cost(2**40, 65536) == ANNOUNCEMENT
    assert cost(2**20, 0) == 2**20 + LARGE_OVERHEAD


def test_credit_runs_out_and_comes_back(ours: Queues, theirs: Queues) -> None:
    out, into = SendCredit(4096, 0), ReceiveCredit(4096, 0)
    sent = 0
    size = 1024 - MESSAGE_OVERHEAD
    while out.take(ours[1], size):
        into.arrived(theirs[1], size)
        sent += 1
    assert sent == 4 and out.credit == 0
    send = Send(ours[1], size)
    out.wait(send)
    assert out.must_report() and not out.must_report()
    assert into.peer_stalled(0) == 0
    granted = into.consumed(size) or into.found_empty(theirs[1])[0]
    assert granted == 1024
    out.grant(granted, into.received)
    assert ready(out) == [send] and out.credit == 0


def test_grants_to_a_fast_receiver_stay_few(ours: Queues, theirs: Queues) -> None:
    """STALLED that crosses a GRANT is answered with none. (Else each message came to have a GRANT of its own.)"""
    out, into = SendCredit(16_384, 0), ReceiveCredit(16_384, 0)
    size, count, grants, done = 1024 - LARGE_OVERHEAD, 2000, 0, 0
    for _ in range(count):
        out.wait(Send(ours[1], size))
    frames: list[tuple[int, int]] = []
    stalled: list[int] = []
    while done < count:
        sent = len(ready(out))
        if out.waiting and out.must_report():
            stalled.append(out.grants)
        arriving, frames = frames, []
        for _ in range(sent):
            into.arrived(theirs[1], size)
            if amount := into.consumed(size):
                frames.append((amount, into.received))
        done += sent
        while stalled:  # behind these messages
            if amount := into.peer_stalled(stalled.pop()):
                frames.append((amount, into.received))
        for amount, received in arriving:
            out.grant(amount, received)
            grants += 1
    assert grants <= count / 3


def test_message_larger_than_the_window_goes_by_itself(ours: Queues) -> None:
    out = SendCredit[Send](4096, 0)
    assert not out.take(ours[1], LONE)  # it would be too much for a receiver that does not wait
    assert out.take(ours[1], 60_000) and out.credit < 0
    for size in (60_000, 1):
        out.wait(Send(ours[2], size))
    out.grant(60_000, 1)
    assert not ready(out)
    out.grant(LARGE_OVERHEAD, 1)
    assert [send.size for send in ready(out)] == [60_000]  # type: ignore[attr-defined]


def test_nobody_overtakes_within_a_queue_nor_starves_a_large_message(ours: Queues) -> None:
    out = SendCredit(4096, 0)
    assert out.take(ours[1], 3000)
    large, small, other = Send(ours[1], 2000), Send(ours[1], 1), Send(ours[2], 1)
    for send in (large, small, other):
        assert not out.take(send.queue, send.size)
        out.wait(send)
    out.grant(cost(3000, 0), 1)
    assert ready(out) == [large, small, other]


def test_admitted_queue_overtakes(ours: Queues, theirs: Queues) -> None:
    out, into = SendCredit(4096, 0), ReceiveCredit(4096, 0)
    assert out.take(ours[1], 4096 - LARGE_OVERHEAD)
    into.arrived(theirs[1], 4096 - LARGE_OVERHEAD)
    blocked, wanted, second = Send(ours[1], 100), Send(ours[2], 9000), Send(ours[2], 1)
    for send in (blocked, wanted, second):
        out.wait(send)
    assert out.must_report() and into.peer_stalled(0) == 0
    assert into.found_empty(theirs[2]) == (0, True)
    assert into.found_empty(theirs[2]) == (0, False)
    out.admit(ours[2], into.received)
    assert ready(out) == [wanted] and out.credit < 0
    into.arrived(theirs[2], 9000)


def test_admission_is_void_when_a_message_is_on_its_way(ours: Queues) -> None:
    out = SendCredit(4096, 0)
    assert out.take(ours[2], 4096 - LARGE_OVERHEAD)
    out.admit(ours[2], 0)
    assert not out.take(ours[2], 100)
    out.admit(ours[2], 1)
    assert out.take(ours[2], 100)


def test_message_that_was_not_sent_leaves_no_trace(ours: Queues, theirs: Queues) -> None:
    out, into = SendCredit(4096, 0), ReceiveCredit(4096, 0)
    assert out.take(ours[1], 1000) and out.take(ours[2], 1000)
    before = out.credit
    for queue in (1, 3):
        assert out.take(ours[queue], 1000)
        out.take_back(ours[queue], 1000)
        assert out.take_short(ours[queue], 100)
        out.take_back(ours[queue], 100)
    assert (out.credit, out.sent) == (before, 2)
    for queue in (1, 2):
        into.arrived(theirs[queue], 1000)
    out.admit(ours[1], into.received)
    out.admit(ours[3], into.received)
    for queue in (1, 3):  # the admission is not used up, either
        assert out.take(ours[queue], 9000)
        out.take_back(ours[queue], 9000)
        assert out.take(ours[queue], 9000)
        assert not out.take(ours[queue], 9000)
    assert out.sent == 4


@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(200))
def test_random_programs_deliver_everything_within_the_window(ours: Queues, theirs: Queues, seed: int) -> None:
    """Two halves joined by queues, with messages and frames at random speeds; nothing stalls for ever."""
    chance = random.Random(seed)
    window = chance.choice([4096, 10_000])
    out, into = SendCredit(window, 0), ReceiveCredit(window, 0)
    to_send = [Send(ours[chance.randrange(4)], chance.choice([0, 10, 1000, 3000, 12_000])) for _ in range(60)]
    expected = {queue: [t.size for t in to_send if t.queue is ours[queue]] for queue in range(4)}
    got: dict[int, list[int]] = {queue: [] for queue in range(4)}
    wire: list[Send] = []
    unread: dict[int, list[int]] = {queue: [] for queue in range(4)}
    back: list[tuple[str, int, int]] = []
    stalls: list[int] = []

    def grant(amount: int) -> None:
        if amount:
            back.append(("grant", amount, into.received))

    def report() -> None:
        if out.must_report():
            stalls.append(out.grants)

    for _ in range(20_000):
        action = chance.randrange(5)
        if action == 0 and to_send:
            send = to_send.pop(0)
            if out.take(send.queue, send.size):
                wire.append(send)
            else:
                out.wait(send)
                report()
        elif action == 1 and wire:
            send = wire.pop(0)
            queue = theirs[send.queue.number]
            was_admitted = queue.admitted_by_us
            into.arrived(queue, send.size)
            came_alone = into.outstanding == cost(send.size, 0) <= LONE
            assert was_admitted or came_alone or into.outstanding <= window
            unread[queue.number].append(send.size)
        elif action == 2 and back:
            kind, value, received = back.pop(0)
            out.grant(value, received) if kind == "grant" else out.admit(ours[value], received)
            wire.extend(ready(out))  # type: ignore[arg-type]
            if out.waiting:
                report()
        elif action == 3 and stalls:
            grant(into.peer_stalled(stalls.pop(0)))
        elif action == 4:
            number = chance.choice([0, 0, 0, 1, 2, 3])
            if len(got[number]) < len(expected[number]):
                if unread[number]:
                    got[number].append(unread[number].pop(0))
                    grant(into.consumed(got[number][-1]))
                else:
                    amount, admit = into.found_empty(theirs[number])
                    grant(amount)
                    if admit:
                        back.append(("admit", number, into.received))
        admitted = sum(size for sizes in unread.values() for size in sizes[-1:])
        assert sum(map(sum, unread.values())) <= window + admitted
        if got == expected:
            break
    assert got == expected


# ---- over real connections ----


#: Besides the window: UCX's receive buffers, which it allocates in large steps, and Python's.
FIXED = 3 * 2**20


@pytest.mark.sample(1)
async def test_silent_receivers_hold_their_windows(transports: str) -> None:
    """A sender in a loop, and a receiver that reads nothing for 3 seconds, in processes of their own. All pairs at the
    same time."""
    window = 4 * 2**20

    async def check(size: int, count: int) -> None:
        async with open_peer("flood", count, size, transports=transports) as sender:
            address, _ = await sender.hear(60)
            async with open_peer(
                "flooded_receiver", address, 3, window, count, size, transports=transports
            ) as receiver:
                grown, held, received = await receiver.hear(120)
                assert held <= window, (size, held)
                assert grown < window + FIXED, (size, grown)
                assert received == count, (size, received)
                assert await receiver.ended() == 0

    async with trio.open_nursery() as nursery:
        for size, count in [(8, 30_000), (4096, 4000), (2**24, 8), (0, 300)]:
            nursery.start_soon(check, size, count)


async def test_unread_queue_does_not_block_others(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=16384) as (client, server), trio.open_nursery() as nursery:

        async def flood() -> None:
            for number in range(1000):
                await client.send(pattern(1000, number), tag=1)

        nursery.start_soon(flood)
        await until(lambda: client.statistics().queued_sends)
        assert client.statistics().queued_sends == 1
        for number in range(20):
            with trio.fail_after(15):
                async with trio.open_nursery() as sends:  # one send_all is over before the next begins
                    sends.start_soon(partial(client.send, pattern(2000, number), tag=2))
                    sends.start_soon(client.send_all, bytes([number]) * 3000)
                    assert await server.receive(tag=2) == pattern(2000, number)
                    got = b""
                    while len(got) < 3000:
                        got += await server.receive_some()
                    assert got == bytes([number]) * 3000
        assert server.statistics().held <= 16384
        with trio.fail_after(15):
            for number in range(1000):
                assert await server.receive(tag=1) == pattern(1000, number)


async def test_polling_a_queue_with_receive_nowait_lets_messages_in(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:

        async def flood() -> None:
            with trio.move_on_after(0.2):
                while True:
                    await client.send(bytes(1000), tag=1)
            await client.send(b"here", tag=2)

        nursery.start_soon(flood)
        with trio.fail_after(15):
            while True:
                try:
                    assert server.receive_nowait(tag=2) == b"here"
                    break
                except trio.WouldBlock:
                    await trio.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2000, 2**20])
async def test_all_receives_of_a_queue_are_served_beside_a_full_one(worker: ucp.Worker, size: int) -> None:
    """Tag 1 fills the window and has no reader; receives wait at tag 2 before the messages for them are sent."""
    count = 3  # they cost less in all than is granted without being asked for
    async with open_pair(worker, window=2**17) as (client, server):
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(bytes(100), tag=1)
        with trio.fail_after(15):
            async with worker.open_request_group() as group:
                buffers = [bytearray(size) for _ in range(count)]
                for buffer in buffers:
                    group.receive_into(server, buffer, tag=2)
                for number in range(count):
                    await client.send(pattern(size, number), tag=2)
        assert buffers == [pattern(size, number) for number in range(count)]


async def test_sends_that_find_no_memory_cost_no_credit(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=2**16) as (client, server):
        parts = [bytes(10_000), bytes(10_000)]
        before = client.statistics()
        for _ in range(10):
            with few_allocations(), pytest.raises(MemoryError):
                await client.send(parts, tag=2)
            with few_allocations(), pytest.raises(MemoryError):
                client.send_nowait(parts, tag=2)
        assert client.statistics() == before
        with trio.fail_after(15):
            await client.send(parts, tag=1)  # it is not received: then tag 2 needs to be admitted
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, bytes(60_000), tag=2))
                assert await server.receive(tag=2) == bytes(60_000)
            assert await server.receive(tag=1) == bytes(20_000)
            await client.aclose()


async def test_end_of_the_stream_that_finds_no_memory_can_be_sent_again(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:
        refused = trio.Event()

        async def end() -> None:
            with pytest.raises(MemoryError):
                await client.send_eof()
            refused.set()

        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(bytes(1000), tag=1)
        nursery.start_soon(end)
        await until(lambda: client.statistics().queued_sends)
        monkeypatch.setattr(MessagePort, "send", lambda *_: Status.NO_MEMORY)
        with trio.fail_after(15):
            while not refused.is_set():
                with contextlib.suppress(trio.WouldBlock):  # all were read, and the sender does not know it yet
                    assert server.receive_nowait(tag=1) == bytes(1000)
                await trio.sleep(0.001)
            monkeypatch.undo()
            await client.send_eof()
            assert await server.receive_some() == b""


async def test_message_larger_than_the_window(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:
        for size in (4096, 60_000, 200_000):
            nursery.start_soon(partial(client.send, pattern(size), tag=1))
            with trio.fail_after(15):
                assert await server.receive(tag=1) == pattern(size)


@pytest.mark.parametrize("size", [5000, 60_000, 200_000])
async def test_message_larger_than_the_window_that_no_receive_asks_for(worker: ucp.Worker, size: int) -> None:
    """It goes by itself, when the peer has read everything else."""
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:

        async def ask() -> None:
            async with client.open_conversation() as talk:
                await talk.send(pattern(size))
                assert await talk.receive() == b"answer"

        with trio.fail_after(15):
            for tag in range(3):
                for data in (pattern(size), bytes(3000)):
                    nursery.start_soon(partial(client.send, data, tag=tag))
            sizes = [len((await server.receive_any())[1]) for _ in range(6)]
            assert sorted(sizes) == [3000] * 3 + [size] * 3
            nursery.start_soon(ask)
            async for talk in server.conversations():
                async with talk:
                    assert await talk.receive() == pattern(size)
                    await talk.send(b"answer")
                break


async def test_wait_send_all_might_not_block(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:
        await client.wait_send_all_might_not_block()
        with pytest.raises(trio.WouldBlock):
            while True:
                client.send_nowait(b"", tag=1)
        done = trio.Event()

        async def wait() -> None:
            await client.wait_send_all_might_not_block()
            done.set()

        nursery.start_soon(wait)
        await nothing_happens()
        assert not done.is_set()
        with trio.fail_after(15):
            while not done.is_set():
                with contextlib.suppress(trio.WouldBlock):
                    assert server.receive_nowait(tag=1) == b""
                await trio.sleep(0.001)


async def test_cancelled_queued_send_does_not_reorder_the_others(worker: ucp.Worker) -> None:
    """Credit that comes while the queue is being posted: posting large messages progresses the worker."""
    async with open_pair(worker, window=20_000) as (client, server), trio.open_nursery() as nursery:
        await client.send(bytes(15_000), tag=9)
        scope = trio.CancelScope()

        async def blocked() -> None:
            with scope:
                await client.send(bytes(19_000), tag=8)

        nursery.start_soon(blocked)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(6):
            nursery.start_soon(partial(client.send, bytes([number]) * (100_000 if number % 2 else 1000), tag=1))
            await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        with trio.fail_after(15):
            assert [(await server.receive(tag=1))[0] for _ in range(6)] == list(range(6))
            await server.receive(tag=9)
