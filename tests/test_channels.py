"""Channels within a connection, receive_any, receive_newest, and messages that were dropped."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
import trio.testing
from helpers import assert_free, open_pair, pattern, until
from link_model import cost

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link import Link
from trio_ucx._rules import wire
from trio_ucx.testing import internals
from trio_ucx.testing._faults import FaultyPort


def link_of(connection: trio_ucx.Connection) -> Link:
    return internals(connection)


async def next_of(connection: trio_ucx.Connection) -> trio_ucx.Channel:
    return await anext(connection.conversations())


async def nothing_is_left(*connections: trio_ucx.Connection) -> None:
    """No conversation, no queue of one, and what arrived was granted back or will be."""
    for connection in connections:
        conversations = link_of(connection).receiving.conversations
        await until(lambda conversations=conversations: not conversations.all())
        queues = link_of(connection).native.queues()
        assert not [queue for queue in queues if queue.number >= 2**31 + 2**29]
        assert connection.statistics().held == 0


# ---- conversations ----


@pytest.mark.parametrize("size", [0, 10, 3000, 200_000, 2**21])
async def test_conversation(worker: ucp.Worker, size: int) -> None:
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def serve() -> None:
            async with await next_of(server) as talk:
                async for request in talk:
                    await talk.send(request)
                assert talk.peer_left
                with pytest.raises(trio_ucx.PeerClosed):
                    talk.send_nowait(b"")

        nursery.start_soon(serve)
        async with client.open_conversation() as talk:
            for seed in range(3):
                nursery.start_soon(partial(talk.send, pattern(size, seed)))
                assert await talk.receive() == pattern(size, seed)
            assert talk.connection is client and repr(talk).startswith("<conversation of ")
        assert repr(talk).endswith(", closed>")
        for operation in (talk.receive, partial(talk.send, b""), partial(talk.receive_into, bytearray(1))):
            with pytest.raises(trio.ClosedResourceError, match="channel was closed"):
                await operation()
        for plain in (talk.receive_nowait, partial(talk.send_nowait, b"")):
            with pytest.raises(trio.ClosedResourceError, match="channel was closed"):
                plain()
        await nothing_is_left(client, server)


async def test_late_reply_is_dropped(worker: ucp.Worker) -> None:
    """The reply to a request that timed out is no answer to the next one."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        go_on = trio.Event()

        async def answer(talk: trio_ucx.Channel) -> None:
            async with talk:
                request = await talk.receive()
                if request == b"slow":
                    await go_on.wait()
                await talk.send(request)

        async def serve() -> None:
            async for talk in server.conversations():
                nursery.start_soon(answer, talk)

        nursery.start_soon(serve)
        for size in (0, 100_000):
            with trio.move_on_after(0.05) as scope:
                async with client.open_conversation() as talk:
                    await talk.send(b"slow")
                    await talk.receive()
            assert scope.cancelled_caught
            async with client.open_conversation() as talk:
                nursery.start_soon(talk.send, b"quick" + bytes(size))
                go_on.set()
                assert await talk.receive() == b"quick" + bytes(size)
            await nothing_is_left(client, server)
            go_on = trio.Event()
        nursery.cancel_scope.cancel()


async def test_replies_that_cross_the_leave(worker: ucp.Worker) -> None:
    """What was sent before the sender knows that the peer has left is dropped, whatever its size; credit comes back."""
    async with open_pair(worker, window=20_000) as (client, server):
        for size in (5, 2000, 100_000, 2**21):
            for _ in range(3):
                talk = client.open_conversation()
                await talk.send(b"x")
                there = await next_of(server)
                with trio.move_on_after(0.01) if size >= 65_000 else contextlib.nullcontext():
                    await there.send(bytes(size))  # a large one waits for its receive
                await talk.aclose()
                await until(lambda there=there: there.peer_left)
                with pytest.raises(trio_ucx.PeerClosed):
                    await there.send(bytes(size))
                assert await there.receive() == b"x"
                with pytest.raises(trio.EndOfChannel, match="peer has left this channel"):
                    await there.receive()
                await there.aclose()
                await talk.aclose()
                await nothing_is_left(client, server)
        await server.send(bytes(10_000))
        assert len(await client.receive()) == 10_000


async def test_waits_end_with_the_conversation(worker: ucp.Worker) -> None:
    """Receives end when either side leaves, and so do sends that wait for credit."""
    for who in ("this side", "the peer"):
        async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:
            talk = client.open_conversation()
            await talk.send(b"x")
            there = await next_of(server)
            ended: list[type[BaseException]] = []

            async def ends(operation: partial[object], ended: list[type[BaseException]] = ended) -> None:
                try:
                    await operation()
                except (trio.ClosedResourceError, trio.BrokenResourceError, trio.EndOfChannel) as error:
                    ended.append(type(error))

            while client.statistics().credit > cost(1000, 0):
                await talk.send(bytes(1000))
            nursery.start_soon(ends, partial(talk.send, bytes(1000)))  # for credit
            nursery.start_soon(ends, partial(talk.receive))
            nursery.start_soon(ends, partial(talk.receive_into, bytearray(1)))
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(15):
                await (talk if who == "this side" else there).aclose()
                await until(lambda ended=ended: len(ended) == 3)
            if who == "this side":
                assert set(ended) == {trio.ClosedResourceError}
            else:
                assert Counter(ended) == {trio_ucx.PeerClosed: 1, trio.EndOfChannel: 2}
            for one in (talk, there):
                await one.aclose()
            await nothing_is_left(client, server)


@pytest.mark.parametrize("end", ["aclose", "peer", "connection"])
async def test_a_wait_for_any_of_several_tags_ends_with_their_channels(worker: ucp.Worker, end: str) -> None:
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        channels = [server.channel(tag) for tag in (3, 5)]
        ended: list[Exception] = []

        async def wait() -> None:
            with pytest.raises((trio.ClosedResourceError, trio.EndOfChannel)) as caught:
                await server.receive_any([3, 5])
            ended.append(caught.value)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(10):
            if end == "connection":
                await client.aclose()
            else:
                for number, channel in enumerate(channels):
                    assert not ended
                    await (channel if end == "aclose" else client.channel((3, 5)[number])).aclose()
            await until(lambda: ended)


async def test_many_at_once(worker: ucp.Worker) -> None:
    """Both sides open conversations, with the same numbers; each reply goes to its request."""
    async with open_pair(worker) as pair, trio.open_nursery() as nursery:

        async def answer(talk: trio_ucx.Channel) -> None:
            async with talk:
                request = await talk.receive()
                await trio.sleep(0.001 * (request[0] % 5))
                await talk.send(request * 2)

        async def serve(connection: trio_ucx.Connection) -> None:
            async with trio.open_nursery() as answers:
                async for talk in connection.conversations():
                    answers.start_soon(answer, talk)

        async def ask(connection: trio_ucx.Connection, number: int) -> None:
            for turn in range(5):
                async with connection.open_conversation() as talk:
                    request = bytes([number, turn]) + connection.worker.address.__bytes__()[:8] + bytes(number * 300)
                    await talk.send(request)
                    assert await talk.receive() == request * 2

        servers = trio.CancelScope()

        async def run_servers() -> None:
            with servers:
                async with trio.open_nursery() as both:
                    for connection in pair:
                        both.start_soon(serve, connection)

        nursery.start_soon(run_servers)
        async with trio.open_nursery() as clients:
            for connection in pair:
                for number in range(40):
                    clients.start_soon(ask, connection, number)
        await nothing_is_left(*pair)
        servers.cancel()


async def test_leaving_needs_no_message_of_its_own(worker: ucp.Worker) -> None:
    """Leaving right after a message, as after a reply, goes with the next batch. Each conversation ends in its turn."""
    sent: Counter[int] = Counter()

    class CountingPort(FaultyPort):
        def send_bytes(self, queue: int, data: bytes) -> int:
            sent[queue] += 1
            return super().send_bytes(queue, data)

    async with open_pair(worker) as (client, server):
        for connection in (client, server):
            link = link_of(connection)
            link.sending.port = CountingPort(link)
        for number in range(2 * 10):
            if number == 10:
                sent.clear()
            talk = client.open_conversation()
            talk.send_nowait(b"%d" % number)
            await talk.aclose()
            async with await next_of(server) as accepted:
                assert await accepted.receive() == b"%d" % number
                with pytest.raises(trio.EndOfChannel):
                    await accepted.receive()
        assert sent[wire.CONTROL] <= 10  # of the server, which leaves after it has waited
        assert sent[wire.BATCH] >= 10
        await nothing_is_left(client, server)


async def test_conversations_wake_no_task_that_waits_for_the_end(worker: ucp.Worker) -> None:
    looks = 0

    async def wait_closed(connection: trio_ucx.Connection) -> None:
        nonlocal looks
        task = trio.lowlevel.current_task()

        class Steps(trio.abc.Instrument):
            def before_task_step(self, stepping: trio.lowlevel.Task) -> None:
                nonlocal looks
                looks += stepping is task

        trio.lowlevel.add_instrument(Steps())
        await connection.wait_closed()

    async with open_pair(worker, worker) as (client, server), trio.open_nursery() as nursery:
        nursery.start_soon(wait_closed, client)
        nursery.start_soon(wait_closed, server)
        nursery.start_soon(trio_ucx.answering(echoed), server)
        for _ in range(50):
            assert await client.request(b"x") == b"x"
        assert looks < 10
        nursery.cancel_scope.cancel()


async def echoed(request: bytes) -> bytes:
    return request


async def test_a_receive_that_waits_before_its_conversation_begins(worker: ucp.Worker) -> None:
    """The reply gets through although a tag that nobody reads has filled the window."""
    async with open_pair(worker, window=4096) as (client, server), trio.open_nursery() as nursery:
        with pytest.raises(trio.WouldBlock):
            while True:
                server.send_nowait(bytes(100), tag=5)
        await client.ping()  # the client knows that the server has no credit
        async with client.open_conversation() as talk:
            replies: list[bytes] = []

            async def receive() -> None:
                replies.append(await talk.receive())

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            await talk.send(b"request")
            with trio.fail_after(15):
                async with await next_of(server) as end:
                    await end.send(b"reply")
                    await until(lambda: replies == [b"reply"])
        client.abort()


async def test_conversations_that_nobody_accepts(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server):
        talks = [client.open_conversation() for _ in range(4)]
        for talk in talks[:3]:
            await talk.send(bytes(1000))
        await until(lambda: server.statistics().messages_received == 3)
        for talk in (talks[0], talks[3]):  # one that the peer has heard of, and one that it has not
            await talk.aclose()
        await until(lambda: len(link_of(client).receiving.conversations.all()) == 3)
        first = await next_of(server)  # what was sent in order can be received
        assert [message async for message in first] == [bytes(1000)]
        with pytest.raises(KeyError):
            async with talks[2]:
                raise KeyError  # nobody waits for an answer: it is not offered
        second = await next_of(server)
        assert await second.receive() == bytes(1000)
        await second.send(b"1")
        assert await talks[1].receive() == b"1"
        for one in (first, second, *talks):
            await one.aclose()
        await nothing_is_left(client, server)


async def test_a_server_that_drains_leaves_new_conversations(worker: ucp.Worker) -> None:
    """One that arrived before is accepted, and one that is open goes on."""
    async with open_pair(worker) as (client, server):
        open_one, waiting = client.open_conversation(), client.open_conversation()
        await open_one.send(b"1")
        accepted = await next_of(server)
        await waiting.send(b"2")
        await until(lambda: internals(server).receiving.conversations.begun)
        internals(server).receiving.drain()
        for size in (0, 10, 100_000):
            with pytest.raises(trio.EndOfChannel):
                await client.request(bytes(size), timeout=10)
        late = client.open_conversation()
        await late.send(b"3")
        await until(lambda: late.peer_left)
        with pytest.raises(trio_ucx.PeerClosed):
            await late.send(b"4")
        [talk] = [talk async for talk in server.conversations()]
        assert await talk.receive() == b"2"
        for ours, theirs in ((open_one, accepted), (waiting, talk)):
            await theirs.send(b"answer")
            assert await ours.receive() == b"answer"
        assert await accepted.receive() == b"1"
        for each in (open_one, accepted, waiting, talk, late):
            await each.aclose()
        await nothing_is_left(client, server)


async def test_requests_that_time_out_before_they_are_accepted_leave_nothing(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for _ in range(200):
            with pytest.raises(KeyError):
                async with client.open_conversation() as talk:
                    await talk.send(bytes(2000))
                    raise KeyError
            await client.ping()
        await until(lambda: not link_of(client).receiving.conversations.all())
        assert len(link_of(server).receiving.conversations.begun) < 5 and server.statistics().held == 0
        async with client.open_conversation() as talk:
            await talk.send(b"x")
            assert await (await next_of(server)).receive() == b"x"


async def test_an_answer_that_was_broken_off_is_no_end(worker: ucp.Worker) -> None:
    """The block of the side that answers is left by an exception or a cancellation."""
    async with open_pair(worker) as (client, server):
        for how in ("exception", "cancellation"):
            async with client.open_conversation() as talk:
                await talk.send(b"list")
                with trio.CancelScope() as scope, contextlib.suppress(KeyError):
                    async with await next_of(server) as there:
                        await there.send(b"part 1")
                        if how == "exception":
                            raise KeyError
                        scope.cancel()
                        await there.receive()
                        await there.receive()
                assert await talk.receive() == b"part 1"
                with pytest.raises(trio_ucx.PeerLost) as caught:
                    await talk.receive()
                assert caught.value.reason == "aborted"
                with pytest.raises(trio_ucx.PeerLost):
                    await talk.send(b"x")
            assert client.peer_state is trio_ucx.PeerState.OPEN
        await nothing_is_left(client, server)


async def test_orderly_close_of_the_connection_ends_each_conversation_alone(worker: ucp.Worker) -> None:
    """An idle one does not take another one with it, which still works."""
    finished: list[bytes] = []
    async with open_pair(worker) as (client, server):
        go_on = trio.Event()

        async def answer(talk: trio_ucx.Channel) -> None:
            async with talk:
                request = await talk.receive()
                if request == b"work":
                    await go_on.wait()
                    finished.append(request)
                    await talk.send(b"done")
                else:
                    await talk.receive()

        with trio.fail_after(15):
            async with trio.open_nursery() as nursery:
                for request in (b"work", b"idle"):
                    talk = client.open_conversation()
                    await talk.send(request)
                    nursery.start_soon(answer, await next_of(server))
                await trio.testing.wait_all_tasks_blocked()
                await client.aclose()
                await trio.testing.wait_all_tasks_blocked(0.01)
                go_on.set()
        assert finished == [b"work"]


async def test_ends_of_conversations(worker: ucp.Worker) -> None:
    """The iterator and the conversations end with the connection, or when this side drains."""
    async with open_pair(worker) as (client, server):
        talk = client.open_conversation()
        await talk.send(b"before")
        there = await next_of(server)
        link_of(server).receiving.drain()
        async for _ in server.conversations():
            raise AssertionError("a new conversation")
        await talk.send(b"goes on")
        assert [await there.receive(), await there.receive()] == [b"before", b"goes on"]
        await there.send(b"answer")
        assert await talk.receive() == b"answer"
        with trio.move_on_after(0.01) as scope:
            await there.receive()
        assert scope.cancelled_caught
        await client.aclose()
        with pytest.raises(trio.EndOfChannel):
            await there.receive()
        with pytest.raises(trio_ucx.PeerClosed):
            await there.send(b"x")
        await there.aclose()
        await talk.aclose()
        with pytest.raises(trio.ClosedResourceError):
            client.open_conversation()


async def test_errors_of_a_conversation_in_a_block(worker: ucp.Worker) -> None:
    """The block of an accepted conversation absorbs that the peer has left it, and nothing else."""
    async with open_pair(worker) as (client, server):

        async def left() -> trio_ucx.Channel:
            talk = client.open_conversation()
            await talk.send(b"x")
            there = await next_of(server)
            await there.receive()
            await talk.aclose()
            await until(lambda: there.peer_left)
            return there

        async with await left() as there:
            await there.receive()
            raise AssertionError
        async with await left() as there, trio.open_nursery() as nursery:
            nursery.start_soon(there.receive)
            nursery.start_soon(there.send, b"")
        with pytest.raises(KeyError):
            async with await left() as there:
                raise KeyError
        with pytest.raises(ExceptionGroup) as caught:
            async with await left() as there:
                with pytest.raises(trio_ucx.PeerClosed) as closed:
                    there.send_nowait(b"")
                raise ExceptionGroup("both", [closed.value, KeyError()])
        assert [type(each) for each in caught.value.exceptions] == [KeyError]
        with pytest.raises(trio.EndOfChannel):  # the side that has opened it is told
            async with client.open_conversation() as talk:
                await talk.send(b"x")
                await (await next_of(server)).aclose()
                await talk.receive()


async def test_peer_that_closes_while_it_is_answered(worker: ucp.Worker) -> None:
    """Its close waits until its last message is received; nobody would receive the answer."""
    async with open_pair(worker) as (client, server):
        talk = client.open_conversation()
        await talk.send(b"x")
        there = await next_of(server)
        client.send_nowait(bytes(2**23), tag=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.aclose)
            async with there:
                await until(lambda: link_of(server).life.peer_stopped)
                await there.send(b"answer")
                raise AssertionError
            await server.receive(tag=1)


# ---- channels over tags ----


async def test_channel_over_a_tag(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for turn in range(3):  # the tag can be used anew
            here, there = client.channel(5), server.channel(5)
            assert isinstance(here, trio.abc.Channel) and repr(here).startswith("<channel with tag 5 of ")
            async with here:
                for number in range(3):
                    await here.send(b"%d %d" % (turn, number))
            assert [item async for item in there] == [b"%d %d" % (turn, number) for number in range(3)]
            with pytest.raises(trio_ucx.PeerClosed):
                await there.send(b"x")
            with pytest.raises(RuntimeError, match="has not closed its end yet"):
                client.channel(5)
            await there.aclose()
            await until(lambda: not link_of(client).receiving.conversations.all())
        with pytest.raises(ValueError):
            client.channel(2**31)


@pytest.mark.parametrize("how", ["aborted", "closed"])
async def test_channel_over_a_tag_of_a_connection_that_has_ended(worker: ucp.Worker, how: str) -> None:
    """It says so: the peer will never close its end. What had arrived can still be read, by another channel."""
    async with open_pair(worker) as (client, server):
        await client.channel(5).aclose()
        await server.send(b"x", tag=6)
        if how == "aborted":
            await client.wait_message(tag=6)
            server.abort()
            with pytest.raises(trio_ucx.PeerLost):
                await client.wait_closed()
        else:
            await server.aclose()
        with pytest.raises(trio_ucx.PeerLost if how == "aborted" else trio_ucx.PeerClosed):
            client.channel(5)
        assert await client.channel(6).receive() == b"x"
        client.abort()
        for tag in (5, 6, 7):
            with pytest.raises(trio.ClosedResourceError):
                client.channel(tag)


# ---- receive_any ----


async def test_receive_any(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        sizes = {1: 10, 2: 5000, 3: 100_000}
        async with trio.open_nursery() as nursery:
            for tag, size in sizes.items():
                for number in range(4):
                    nursery.start_soon(partial(client.send, bytes([number]) * size, tag=tag))
            got = [await server.receive_any() for _ in range(6)]
            got += [await server.receive_any([3, 1, 2, 9]) for _ in range(6)]
        assert Counter(tag for tag, _ in got) == {1: 4, 2: 4, 3: 4}
        assert all(len(data) == sizes[tag] for tag, data in got)
        nursery_result: list[tuple[int, bytes]] = []

        async def wait(tags: list[int] | None) -> None:
            nursery_result.append(await server.receive_any(tags))

        for tags in (None, [4, 5]):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, tags)
                await trio.testing.wait_all_tasks_blocked()
                await client.send(b"later", tag=5)
            assert nursery_result.pop() == (5, b"later")


async def test_receive_any_is_fair(worker: ucp.Worker) -> None:
    """A tag with many messages does not starve the others."""
    async with open_pair(worker) as (client, server):
        for number in range(30):
            await client.send(b"%d" % number, tag=7)
        for tag in (1, 9):
            await client.send(b"one", tag=tag)
        await until(lambda: server.statistics().messages_received == 32)
        first = [(await server.receive_any())[0] for _ in range(4)]
        assert sorted(set(first)) == [1, 7, 9]
        assert [await server.receive_any() for _ in range(28)] == [(7, b"%d" % number) for number in range(2, 30)]


async def test_receive_any_loses_nothing(worker: ucp.Worker) -> None:
    """It is cancelled again and again, while messages of several sizes come on several tags."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        sent = [(number % 3, pattern((10, 3000, 90_000)[number % 3], number)) for number in range(90)]

        async def send(tag: int) -> None:
            for each, data in sent:
                if each == tag:
                    await client.send(data, tag=tag)
                    await trio.sleep(0.0005)

        for tag in range(3):
            nursery.start_soon(send, tag)
        got = []
        cancelled = 0
        while len(got) < len(sent):
            with trio.move_on_after(0.0004) as scope:
                got.append(await server.receive_any())
            cancelled += scope.cancelled_caught
        assert cancelled
        for tag in range(3):
            assert [data for each, data in got if each == tag] == [data for each, data in sent if each == tag]


async def test_ends_of_receive_any(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server):
        with pytest.raises(ValueError, match="at least one"):
            await server.receive_any([])
        with pytest.raises(ValueError):
            await server.receive_any([2**31])
        while client.statistics().credit > cost(1000, 0):
            await client.send(bytes(1000), tag=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.send, b"admitted", tag=2))
            with trio.fail_after(15):
                assert await server.receive_any([2, 3]) == (2, b"admitted")
        await client.aclose()
        while True:
            try:
                assert (await server.receive_any())[0] == 1
            except trio.EndOfChannel:
                break
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def lost() -> None:
            with pytest.raises(trio_ucx.PeerLost):
                await server.receive_any()

        nursery.start_soon(lost)
        await trio.testing.wait_all_tasks_blocked()
        client.abort()


async def test_receive_any_admits_and_drains(worker: ucp.Worker) -> None:
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:
        got: list[tuple[int, bytes]] = []

        async def wait() -> None:
            got.append(await server.receive_any([1, 2]))
            with pytest.raises(trio.EndOfChannel, match="shuts down"):
                await server.receive_any([1, 2])

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        while client.statistics().credit > cost(1000, 0):
            await client.send(bytes(1000), tag=3)
        nursery.start_soon(partial(client.send, bytes(1000), tag=1))
        with trio.fail_after(15):
            await until(lambda: got)
            await trio.testing.wait_all_tasks_blocked()
            link_of(server).receiving.drain()
        assert got == [(1, bytes(1000))]


@pytest.mark.parametrize("by", ["receive", "receive_any", "conversations"])
async def test_all_is_read_and_the_next_needs_most_of_the_window(worker: ucp.Worker, by: str) -> None:
    """The peer has said that it has no credit before anything was read: it is granted all in the end."""
    sizes = 500, 500, 7000
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:

        async def send() -> None:
            for size in sizes:
                if by == "conversations":
                    await client.open_conversation().send(bytes(size))
                else:
                    await client.send(bytes(size), tag=1)

        nursery.start_soon(send)
        await until(lambda: link_of(server).native.counts.stalled)
        with trio.fail_after(15):
            for size in sizes:
                if by == "receive":
                    assert await server.receive(tag=1) == bytes(size)
                elif by == "receive_any":
                    assert await server.receive_any() == (1, bytes(size))
                else:
                    assert await (await next_of(server)).receive() == bytes(size)


@pytest.mark.parametrize("by", ["cancelled", "wait_message"])
async def test_receive_any_is_woken_when_others_leave_a_message(worker: ucp.Worker, by: str) -> None:
    """Fewer tasks wait at the tag than when the messages came: one is left for a task that waits for any."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        got: list[tuple[int, bytes]] = []

        async def receive_any() -> None:
            got.append(await server.receive_any([1]))

        leaving = trio.CancelScope()

        async def leave() -> None:
            with leaving:
                if by == "cancelled":
                    await server.receive(tag=1)
                else:
                    nursery.start_soon(partial(server.receive, tag=1))
                    await trio.testing.wait_all_tasks_blocked()
                    await server.wait_message(tag=1)

        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(receive_any)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(1 if by == "cancelled" else 2):
            nursery.start_soon(partial(client.send, bytes(10_000_000), tag=1))
        if by == "cancelled":
            await until(lambda: link_of(server).receiving.transferring())
            leaving.cancel()
        with trio.fail_after(15):
            await until(lambda: got)


async def test_all_that_wait_for_any_are_admitted(worker: ucp.Worker) -> None:
    """Another tag has filled the window."""
    async with open_pair(worker, window=8192) as (client, server), trio.open_nursery() as nursery:
        got: list[tuple[int, bytes]] = []

        async def receive_any() -> None:
            got.append(await server.receive_any([1]))

        async def flood() -> None:
            while True:
                await client.send(bytes(1000), tag=9)

        nursery.start_soon(flood)
        await until(lambda: link_of(server).native.counts.stalled)
        for _ in range(2):
            nursery.start_soon(receive_any)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(2):
            nursery.start_soon(partial(client.send, b"%d" % number, tag=1))
        with trio.fail_after(15):
            await until(lambda: len(got) == 2)
        nursery.cancel_scope.cancel()


# ---- only the newest ----


@pytest.mark.parametrize("size", [8, 3000, 200_000])
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_the_newest_message_takes_the_place_of_others(transports: str, size: int) -> None:
    """However many come, one is kept, the sender need not wait, and a receive gets the newest, or the next one."""
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with open_pair(worker, other) as (client, server):

            def message(number: int) -> bytes:
                return b"%8d" % number * (size // 8)

            async def send(*numbers: int) -> None:
                for number in numbers:
                    client.send_nowait(message(number), tag=3)
                    await trio.sleep(0)

            with trio.fail_after(30):
                for number in (1, 2):  # before anybody has said that only the newest matters
                    client.send_nowait(message(number), tag=3)
                await until(lambda: server.statistics().messages_received == 2)
                assert await server.receive_newest(tag=3) == message(2)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send, *range(3, 200))
                    await until(lambda: server.statistics().messages_received == 199)
                    native = link_of(server).native
                    await until(lambda: (queue := native.queue(3)) is not None and queue.messages == 1)
                    assert await server.receive_newest(tag=3) == message(199)
                assert server.statistics().held == 0
                with pytest.raises(trio.WouldBlock):
                    server.receive_nowait(tag=3)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send, 200)
                    assert await server.receive_newest(tag=3) == message(200)
                    nursery.start_soon(send, 201)
                    assert await server.receive(tag=3) == message(201)
                client.send_nowait(b"last", tag=3)
                await client.aclose()
                assert await server.receive_newest(tag=3) == b"last"
                with pytest.raises(trio.EndOfChannel):
                    await server.receive_newest(tag=3)


async def test_the_newest_of_a_channel(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server), client.open_conversation() as talk:
        for number in range(5):
            await talk.send(b"%d" % number)
        heard = await anext(server.conversations())
        await until(lambda: server.statistics().messages_received == 5)
        assert await heard.receive_newest() == b"4"
        await heard.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await heard.receive_newest()


async def test_a_slow_subscriber_reads_what_is_new(worker: ucp.Worker) -> None:
    """What it reads was sent a moment ago, although it has read nothing for a long time."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        newest = 0

        async def publish() -> None:
            nonlocal newest
            while True:
                newest += 1
                client.send_nowait(b"%d" % newest)
                await trio.sleep(0.0005)

        nursery.start_soon(publish)
        with trio.fail_after(30):
            for _ in range(10):
                behind = newest - int(await server.receive_newest())
                assert behind <= 5
                await until(lambda before=newest: newest > before + 40)
        nursery.cancel_scope.cancel()


async def test_receives_of_the_newest_that_are_cancelled(worker: ucp.Worker, chance: random.Random) -> None:
    """Large ones, in the middle of their transfer: nothing stays pinned, and later ones arrive whole."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:

        async def publish() -> None:
            for number in range(200):
                await client.send(bytes([number]) * 300_000)
            await client.send(b"end")

        nursery.start_soon(publish)
        buffer = bytearray(300_000)
        got = -1
        with trio.fail_after(60):
            await server.receive_newest()
            while True:
                with trio.move_on_after(chance.random() * 0.001):
                    if chance.random() < 0.5:
                        size = await server.receive_into(buffer)
                        message = bytes(buffer[:size])
                    else:
                        message = await server.receive_newest()
                    if message == b"end":
                        break
                    assert message[0] > got and message == message[:1] * 300_000
                    got = message[0]
            await server.wait_buffers_released()
        assert_free(buffer)


async def test_the_newest_of_ever_new_tags(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        for tag in range(300):
            for _ in range(2):
                await client.send(b"%d" % tag, tag=tag)
            await until(lambda tag=tag: server.statistics().messages_received == 2 * (tag + 1))
            assert await server.receive_newest(tag=tag) == b"%d" % tag
        await client.send(b"1", tag=5)
        await client.send(b"2", tag=5)
        await until(lambda: server.statistics().messages_received == 602)
        assert await server.receive(tag=5) == b"2"  # it is known that only the newest matters there


async def test_closing_ends_waits_that_nothing_else_would_end(worker: ucp.Worker) -> None:
    """At once, although the close itself waits for the peer, which does not receive a large message."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        ended: list[str] = []

        async def wait(name: str, operation: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
                await operation()
            ended.append(name)

        async def send_large() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await client.send(bytes(3 * 2**20), tag=2)

        async def close() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await client.aclose()
            ended.append("closed")

        nursery.start_soon(send_large)
        nursery.start_soon(wait, "any", client.receive_any)
        await server.wait_message(tag=2)
        nursery.start_soon(close)
        with trio.fail_after(1):
            await until(lambda: "any" in ended)
        assert "closed" not in ended
        server.abort()


# ---- messages that the receiver has dropped ----


@pytest.mark.parametrize("size", [100, 5000, 100_000, 2**21])
async def test_the_sender_learns_of_a_dropped_message(worker: ucp.Worker, size: int) -> None:
    async with open_pair(worker) as (client, server):
        client.send_nowait(bytes(size), tag=3)
        with pytest.raises(trio_ucx.UCXError, match=f"{size} bytes is too long"):
            await server.receive_into(bytearray(99), tag=3)
        client.send_nowait(b"fine", tag=3)
        assert await server.receive(tag=3) == b"fine"
        with pytest.raises(trio.BrokenResourceError, match=f"dropped a message of {size} bytes with tag 3") as caught:
            await client.aclose()
        assert type(caught.value) is trio.BrokenResourceError  # the peer is not lost
        with pytest.raises(trio.EndOfChannel):
            await server.receive(tag=3)


# ---- work that ends with its channel ----


async def call_that_hears(connection: trio_ucx.Connection, how: str, log: list[str]) -> None:
    """Accepts a conversation, and works on it until the other side has left."""
    async with await next_of(connection) as talk:
        assert await talk.receive() == b"request"
        with talk.cancel_when_left() as scope:
            log.append("working")
            await trio.sleep_forever()
        log.append("cancelled" if scope.cancelled_caught else "other")


@pytest.mark.parametrize("how", ["leaves", "cancelled", "closes", "aborts", "writes more, and leaves"])
async def test_work_is_cancelled_when_its_caller_has_left(worker: ucp.Worker, how: str) -> None:
    log: list[str] = []
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        talk = client.open_conversation()
        await talk.send(b"request")
        nursery.start_soon(call_that_hears, server, how, log)
        await until(lambda: log == ["working"])
        with trio.fail_after(2):
            if how == "leaves":
                await talk.aclose()
            elif how == "cancelled":
                with trio.CancelScope() as scope:
                    async with talk:
                        scope.cancel()
                        await trio.lowlevel.checkpoint()
            elif how == "closes":
                await client.aclose()
            elif how == "aborts":
                client.abort()
            else:
                await talk.send(b"unread")
                await talk.aclose()
            await until(lambda: log == ["working", "cancelled"])


async def test_work_is_cancelled_when_the_worker_closes() -> None:
    log: list[str] = []
    async with trio.open_nursery() as nursery:
        async with ucp.open_worker() as worker, open_pair(worker) as (client, server):
            talk = client.open_conversation()
            await talk.send(b"request")
            heard = await next_of(server)

            async def work() -> None:
                with heard.cancel_when_left() as scope:
                    log.append("working")
                    await trio.sleep_forever()
                log.append("cancelled" if scope.cancelled_caught else "other")

            nursery.start_soon(work)
            await until(lambda: log == ["working"])
            client.abort()
            server.abort()
        with trio.fail_after(5):
            await until(lambda: log == ["working", "cancelled"])


async def test_other_cancellations_of_the_work_pass(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server), client.open_conversation() as talk:
        await talk.send(b"request")
        heard = await next_of(server)
        with trio.CancelScope() as outer, heard.cancel_when_left() as scope:
            outer.cancel()
            await trio.lowlevel.checkpoint()
        assert outer.cancelled_caught and not scope.cancelled_caught
        with heard.cancel_when_left() as scope:
            scope.deadline = trio.current_time() + 0.01
            await trio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(KeyError), heard.cancel_when_left():
            raise KeyError
        with heard.cancel_when_left() as first, heard.cancel_when_left() as second:
            await talk.aclose()
            await trio.sleep(0.001)
            await trio.sleep_forever()
        assert first.cancel_called and second.cancel_called
        with heard.cancel_when_left() as scope:  # it has left before
            await trio.sleep_forever()
        assert scope.cancelled_caught
    async with open_pair(worker) as (client, server), client.open_conversation() as talk:
        await talk.send(b"request")
        heard = await next_of(server)
        with heard.cancel_when_left() as scope:
            await heard.aclose()  # what this side does itself is no reason, nor what the peer does then
            await talk.aclose()
            await trio.sleep(0.02)
        assert not scope.cancel_called
        await heard.aclose()
        with pytest.raises(trio.ClosedResourceError), heard.cancel_when_left():
            pass


@pytest.mark.parametrize("both", [False, True])
async def test_channel_that_is_left_while_a_receive_looks_for_a_message(worker: ucp.Worker, both: bool) -> None:
    """trio_ucx.rpc does so when the peer leaves: the receive must not wait in the tag queue that is left."""
    async with open_pair(worker) as (client, server), client.open_conversation() as talk:
        await talk.send(b"request")
        heard = await next_of(server)
        await heard.receive()
        if both:
            await talk.aclose()
            await until(lambda: heard.peer_left)
        link_of(server).receiving.take_ready = lambda number, limit: heard._close()  # type: ignore[method-assign]
        with trio.fail_after(15), pytest.raises(trio.ClosedResourceError, match="this channel was closed"):
            await heard.receive()


async def test_a_reply_can_still_be_sent_when_the_work_is_done(worker: ucp.Worker) -> None:
    """Nothing is left of the block after its end."""
    async with open_pair(worker) as (client, server), client.open_conversation() as talk:
        await talk.send(b"request")
        heard = await next_of(server)
        with heard.cancel_when_left():
            await heard.receive()
        await heard.send(b"reply")
        assert await talk.receive() == b"reply"
        await talk.aclose()
        with pytest.raises(trio.EndOfChannel):
            await heard.receive()


async def test_drained_servers_finish_their_work(worker: ucp.Worker) -> None:
    """Server.drain ends no conversation."""
    async with open_pair(worker) as (client, server), client.open_conversation() as talk:
        await talk.send(b"request")
        heard = await next_of(server)
        link_of(server).receiving.drain()
        with heard.cancel_when_left() as scope:
            await trio.sleep(0.01)
        assert not scope.cancel_called


async def test_channels_that_the_peer_does_not_open(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of them is bounded at both sides. A client that keeps to the rules is told before its server
    cuts it off.
    """
    monkeypatch.setattr(wire, "MAX_LEFT_ALONE", 10)
    async with open_pair(worker) as (client, server):
        for tag in range(10):
            await client.channel(tag).aclose()
        with pytest.raises(RuntimeError, match="closed 10 channels over tags"):
            client.channel(10)
        await client.ping()
        for tag in range(5):
            await server.channel(tag).aclose()
        await server.ping()
        for tag in range(5):  # also anew
            await client.channel(tag).aclose()
        link_of(client).receiving.conversations._left_alone = 0
        await client.channel(10).aclose()
        with trio.fail_after(10), pytest.raises(trio.BrokenResourceError, match="left 10 channels over tags that this"):
            await server.receive(tag=100)


async def test_conversations_that_are_withdrawn_without_end(worker: ucp.Worker) -> None:
    """Each has another number, which nobody does who keeps to the rules: what is remembered of them is bounded."""
    async with open_pair(worker, window=8192) as (client, server):
        with trio.fail_after(30), pytest.raises(trio.BrokenResourceError):
            for _ in range(3000):
                talk = client.open_conversation()
                await talk.send(b"x")
                talk._close(by_force=True)
                link_of(client).receiving.conversations._free.clear()
        assert len(link_of(server).receiving.conversations._announced) < 1200
        with pytest.raises(trio.BrokenResourceError, match="withdraws conversations without end"):
            await server.receive()
