"""trio_ucx.rpc: a conversation is kept for the next call, and either side may leave it meanwhile."""

from __future__ import annotations

import collections
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from helpers import open_listener, until

import trio_ucx
from trio_ucx import rpc
from trio_ucx.rpc import _messages as wire
from trio_ucx.rpc._server import failure
from trio_ucx.testing import internals

CODEC = wire.DEFAULT
REPLY = wire.encode_message(CODEC, wire.REPLY, "answer")


class Echo(rpc.Service):
    def __init__(self) -> None:
        self.running = 0
        self.release = trio.Event()

    @rpc.method
    async def echo(self, call: rpc.Call, data: int) -> int:
        return data

    @rpc.method
    async def fail(self, call: rpc.Call) -> None:
        raise ValueError("no")

    @rpc.method
    async def wait(self, call: rpc.Call) -> int:
        self.running += 1
        try:
            await self.release.wait()
        finally:
            self.running -= 1
        return 1


@asynccontextmanager
async def serving(service: rpc.Service, **options: int) -> AsyncIterator[trio_ucx.Server]:
    async with trio.open_nursery() as nursery:
        handler = rpc.serving(service, **options)
        yield await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1"))
        nursery.cancel_scope.cancel()


def conversations(connection: trio_ucx.Connection) -> int:
    """How many are open there."""
    return len(internals(connection).receiving.conversations.all())


@asynccontextmanager
async def by_hand(answer: Callable[[trio_ucx.Channel], Awaitable[None]]) -> AsyncIterator[trio_ucx.Connection]:
    """A connection to a server that gives each conversation to a function."""
    with trio.fail_after(30):
        async with open_listener() as listener, trio_ucx.connect(listener.address) as connection:
            async with await listener.accept() as server, trio.open_nursery() as nursery:

                async def accept() -> None:
                    async for talk in server.conversations():
                        nursery.start_soon(answer, talk)

                nursery.start_soon(accept)
                yield connection
                nursery.cancel_scope.cancel()


async def test_one_call_after_the_other_needs_one_conversation() -> None:
    opened = calls = 0

    async def answer(talk: trio_ucx.Channel) -> None:
        nonlocal opened, calls
        opened += 1
        async for message in talk:
            assert wire.decode_message(message)[1] == wire.CALL
            calls += 1
            await talk.send(REPLY)

    async with by_hand(answer) as connection:
        for _ in range(50):  # a program may make a client where it needs one
            for _ in range(3):
                assert await rpc.Client(connection).call("anything") == "answer"
        client = rpc.Client(connection)
        opened = calls = 0
        for _ in range(50):
            assert await client.call("anything") == "answer"
        assert opened == 1 and calls == 50


async def test_what_was_kept_is_bounded_on_both_sides() -> None:
    echo = Echo()
    async with serving(echo, limit=500) as server, trio_ucx.connect(server.address) as connection:
        client = rpc.Client(connection)
        await until(lambda: server.connections)
        [there] = server.connections
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(300):
                    nursery.start_soon(client.call, "wait")
                await until(lambda: echo.running == 300)
                echo.release.set()
            await until(lambda: conversations(connection) <= wire.MOST_KEPT)
            await until(lambda: conversations(there) <= wire.MOST_KEPT)
            for number in range(300):
                assert await client.call("echo", data=number) == number
            echo.release = trio.Event()
        for number in range(300):  # each client keeps one that nobody uses again
            assert await rpc.Client(connection).call("echo", data=number) == number
        await until(lambda: conversations(there) <= wire.MOST_KEPT)
        gc.collect()
        assert sum(isinstance(each, trio_ucx.Channel) for each in gc.get_objects()) <= 2 * wire.MOST_KEPT + 20


async def test_a_server_that_leaves_what_was_kept_has_not_run_the_next_call() -> None:
    """The call is on its way when the server leaves: it is made again, in another conversation."""
    read = left = 0

    async def answer(talk: trio_ucx.Channel) -> None:
        nonlocal read, left
        await talk.receive()
        read += 1
        await talk.send(REPLY)
        receiving, number = internals(talk.connection).receiving, talk._state.number
        await until(lambda: receiving.has_spare(number) or talk.peer_left)
        left += 1
        await talk.aclose()

    async with by_hand(answer) as connection:
        client = rpc.Client(connection)
        for calls in range(1, 20):
            assert await client.call("anything") == "answer"
            assert read == calls and left == calls - 1


async def test_a_server_that_breaks_off_what_was_kept_may_have_run_the_next_call() -> None:
    async def answer(talk: trio_ucx.Channel) -> None:
        with pytest.raises(KeyError):
            async with talk:
                await talk.receive()
                await talk.send(REPLY)
                await talk.receive()
                raise KeyError

    async with by_hand(answer) as connection:
        client = rpc.Client(connection)
        for _ in range(3):
            assert await client.call("anything") == "answer"
            with pytest.raises(rpc.CallLost) as caught:
                await client.call("anything")
            assert caught.value.may_have_run


@pytest.mark.parametrize("how", ["cancelled", "failed", "unknown", "timed out"])
async def test_calls_without_a_reply_leave_nothing_behind(how: str) -> None:
    async with serving(Echo()) as server, trio_ucx.connect(server.address) as connection:
        client = rpc.Client(connection)
        await until(lambda: server.connections)
        [there] = server.connections
        for number in range(30):
            if how == "cancelled":
                with trio.move_on_after(0.001):
                    await client.call("wait")
            else:
                method, kind = {
                    "failed": ("fail", rpc.RemoteError),
                    "unknown": ("nothing", rpc.UnknownMethod),
                    "timed out": ("wait", rpc.CallTimedOut),
                }[how]
                with pytest.raises(kind):
                    await client.call(method, timeout=0.001 if how == "timed out" else None)
            assert await client.call("echo", data=number) == number
        await until(lambda: conversations(connection) == conversations(there) == 1)


async def test_what_was_kept_does_not_delay_a_drain() -> None:
    """Calls that come while the server drains go to another server."""
    with trio.fail_after(30):
        async with serving(Echo()) as first, serving(Echo()) as second:
            async with rpc.connect([first.address, second.address]) as client, trio.open_nursery() as nursery:
                for _ in range(2):
                    for number in range(20):
                        nursery.start_soon(partial(client.call, "echo", data=number))
                    await trio.testing.wait_all_tasks_blocked()
                assert len(first.connections) == 1 and not second.connections
                begun = trio.current_time()
                assert await first.drain(timeout=20) == 0
                assert trio.current_time() - begun < 5
                for number in range(20):
                    assert await client.call("echo", data=number) == number
                assert len(second.connections) == 1


async def test_a_limit_of_one() -> None:
    """However many conversations are kept, a new one is accepted when no call runs."""
    echo = Echo()
    async with serving(echo, limit=1) as server, trio_ucx.connect(server.address) as connection:
        with trio.fail_after(30):
            for _ in range(5):
                async with trio.open_nursery() as nursery:
                    for number in range(10):
                        nursery.start_soon(partial(rpc.Client(connection).call, "echo", data=number))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rpc.Client(connection).call, "wait")
                await until(lambda: echo.running == 1)
                nursery.start_soon(rpc.Client(connection).call, "wait")
                await trio.sleep(0.05)
                assert echo.running == 1
                echo.release.set()


async def test_a_call_in_a_conversation_that_the_server_closes_runs_once() -> None:
    """The server closes the conversation that has waited longest, although its next call may have arrived."""
    runs: collections.Counter[int] = collections.Counter()

    class Counts(rpc.Service):
        @rpc.method
        async def count(self, call: rpc.Call, number: int) -> int:
            runs[number] += 1
            return number

    with trio.fail_after(30):
        async with serving(Counts(), limit=1000) as server, trio_ucx.connect(server.address) as connection:

            async def calls(client: rpc.Client, first: int) -> None:
                for number in range(first, first + 5):
                    assert await client.call("count", number=number) == number

            for first in (0, 1000):
                async with trio.open_nursery() as nursery:
                    for number in range(200):
                        nursery.start_soon(calls, rpc.Client(connection), first + 5 * number)
                [there] = server.connections
                await until(lambda: conversations(there) <= wire.MOST_KEPT)  # noqa: B023
            assert set(runs.values()) == {1} and len(runs) == 2000


@pytest.mark.parametrize("limit", [1, 10])
async def test_a_call_that_is_answered_while_the_server_drains(limit: int) -> None:
    """Its conversation is kept no more: the drain would wait for it."""
    echo = Echo()
    with trio.fail_after(30):
        async with serving(echo, limit=limit) as server, rpc.connect(server.address) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.call, "wait")
                await until(lambda: echo.running == 1)
                nursery.start_soon(server.drain)
                await trio.testing.wait_all_tasks_blocked()
                echo.release.set()


async def test_a_call_that_was_refused_has_not_run() -> None:
    """The server drains, and there is no other one."""
    echo = Echo()
    with trio.fail_after(30):
        async with serving(echo) as server, rpc.connect(server.address) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.call, "wait")
                await until(lambda: echo.running == 1)
                nursery.start_soon(server.drain)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(rpc.CallLost, match="no connection") as caught:
                    await client.call("wait")
                assert not caught.value.may_have_run
                echo.release.set()


async def test_an_earlier_attempt_of_a_call_that_was_refused_may_have_run() -> None:
    attempts = 0

    async def answer(talk: trio_ucx.Channel) -> None:
        nonlocal attempts
        attempts += 1
        await talk.receive()
        if attempts == 1:
            talk._close(by_force=True)
        else:
            await talk._send_last(failure(CODEC, wire.UNKNOWN_METHOD, "no"))

    async def serve(connection: trio_ucx.Connection) -> None:
        async for talk in connection.conversations():
            await answer(talk)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(trio_ucx.serve_ucx, serve, 0, host="127.0.0.1"))
            async with rpc.connect(server.address) as client:
                with pytest.raises(rpc.CallError, match="no") as caught:
                    await client.call("anything", idempotent=True)
                assert caught.value.may_have_run and attempts > 1
            nursery.cancel_scope.cancel()


async def test_a_call_whose_deadline_has_passed_at_the_server() -> None:
    """The answer may be there when the client, which was busy, looks at the clock."""

    async def answer(talk: trio_ucx.Channel) -> None:
        await talk.receive()
        await talk._send_last(failure(CODEC, wire.DEADLINE, "late"))

    async with by_hand(answer) as connection:
        with pytest.raises(rpc.CallTimedOut) as caught:
            await rpc.Client(connection).call("anything", timeout=0.05)
        assert caught.value.may_have_run


async def test_a_drain_refuses_calls_that_wait_for_a_limit() -> None:
    """Otherwise it would not end while clients make calls."""

    class Slow(rpc.Service):
        @rpc.method
        async def slow(self, call: rpc.Call) -> None:
            await trio.sleep(0.01)

    async def calls(client: rpc.Client) -> None:
        with pytest.raises(rpc.CallLost) as caught:
            while True:
                await client.call("slow")
        assert not caught.value.may_have_run

    with trio.fail_after(30):
        async with serving(Slow(), limit=1) as server, trio_ucx.connect(server.address) as connection:
            client = rpc.Client(connection)
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(calls, client)
                await trio.sleep(0.05)
                assert await server.drain(timeout=20) == 0


async def test_a_drain_does_not_run_calls_that_have_waited_for_a_limit() -> None:
    begun = lost = 0
    release = trio.Event()

    class Waits(rpc.Service):
        @rpc.method
        async def wait(self, call: rpc.Call) -> None:
            nonlocal begun
            begun += 1
            await release.wait()

    with trio.fail_after(30):
        async with serving(Waits(), limit=1) as server, trio_ucx.connect(server.address) as connection:
            client = rpc.Client(connection)

            async def call() -> None:
                nonlocal lost
                try:
                    await client.call("wait")
                except rpc.CallLost as error:
                    assert not error.may_have_run
                    lost += 1

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(call)
                await until(lambda: begun == 1)
                await until(lambda: conversations(server.connections[0]) == 10)
                nursery.start_soon(server.drain)
                await trio.testing.wait_all_tasks_blocked()
                release.set()
            assert begun == 1 and lost == 9


async def test_a_stream_that_was_refused_has_not_run() -> None:
    echo = Echo()
    with trio.fail_after(30):
        async with serving(echo) as server, trio_ucx.connect(server.address) as connection:
            client = rpc.Client(connection)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.call, "wait")
                await until(lambda: echo.running == 1)
                nursery.start_soon(server.drain)
                await trio.testing.wait_all_tasks_blocked()
                async with client.stream("wait") as stream:
                    with pytest.raises(rpc.CallLost, match="has not run") as caught:
                        await stream.result()
                assert not caught.value.may_have_run and echo.running == 1
                echo.release.set()
