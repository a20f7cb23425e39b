"""trio_ucx.rpc where the window is full, sends of items are cancelled, and handlers fail while they are cancelled."""

from __future__ import annotations

import contextlib
import logging
import mmap
import random
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from helpers import Rounds, nothing_happens, open_peer, serving, until

import trio_ucx
from trio_ucx import rpc
from trio_ucx._util import limited_log


def fill_window(connection: trio_ucx.Connection) -> None:
    """Sends on a tag that nobody reads, until not even an empty message is admitted."""
    for size in 600, 50, 0:
        with contextlib.suppress(trio.WouldBlock):
            while True:
                connection.send_nowait(bytes(size), tag=5)


class Shop(rpc.Service):
    def __init__(self) -> None:
        self.running = 0
        self.may_read = trio.Event()
        self.runs = 0

    @rpc.method
    async def echo(self, call: rpc.Call, data: Any = None) -> Any:
        return data

    @rpc.method
    async def pause(self, call: rpc.Call, seconds: float) -> float:
        await trio.sleep(seconds)
        return seconds

    @rpc.method
    async def late(self, call: rpc.Call) -> int:
        await self.may_read.wait()
        return sum([1 async for _ in call.items()])

    @rpc.stream
    async def count(self, call: rpc.Call, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    @rpc.stream
    async def items(self, call: rpc.Call) -> AsyncIterator[Any]:
        async for item in call.items():
            yield item

    @rpc.method
    async def unwilling(self, call: rpc.Call) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("on the way out")

    @rpc.method(idempotent=True)
    async def die(self, call: rpc.Call) -> None:
        self.runs += 1
        call.connection.abort()
        await trio.sleep_forever()


async def test_large_items_both_ways() -> None:
    """A large item waits until it is read: the client reads while it sends."""

    async def feed(stream: rpc.Stream) -> None:
        for number in range(20):
            await stream.send(number, buffers=[bytes(700_000)])
        await stream.send_eof()

    with trio.fail_after(20):
        async with (
            serving(rpc.serving(Shop())) as listener,
            rpc.connect(listener.address) as client,
            client.stream("items") as stream,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(feed, stream)
            assert [(item.value, len(item.buffers[0])) async for item in stream] == [(n, 700_000) for n in range(20)]


async def test_error_of_a_handler_that_is_cancelled(caplog: Any) -> None:
    """The handler raises a group of its error and the cancellation: the server must go on."""
    with trio.fail_after(20):
        async with serving(rpc.serving(Shop())) as listener, rpc.connect(listener.address) as client:
            with pytest.raises(rpc.CallTimedOut):
                await client.call("unwilling", timeout=0.05)
            assert await client.call("echo", data=1, timeout=5) == 1


class Gone(rpc.Service):
    """Methods whose caller leaves, or dies, while they wait for it. ``ends`` has what they get."""

    def __init__(self) -> None:
        self.begun = 0
        self.ends: list[str] = []

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        self.begun += 1
        try:
            yield
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise

    @rpc.method
    async def read(self, call: rpc.Call) -> int:
        with self.run():
            return len([item async for item in call.items()])

    @rpc.method
    async def shielded(self, call: rpc.Call) -> int:
        with self.run(), trio.CancelScope(shield=True):
            return len([item async for item in call.items()])

    @rpc.method
    async def in_tasks(self, call: rpc.Call) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read, call)
            nursery.start_soon(self.use, call)

    @rpc.method
    async def use(self, call: rpc.Call) -> None:
        with self.run():
            await call.connection.receive(tag=7)

    @rpc.method
    async def convert(self, call: rpc.Call) -> None:
        try:
            await self.use(call)
        except trio.BrokenResourceError:
            raise KeyError("a fault of the method") from None


#: By method: what it gets when its caller leaves the call, and when its caller is lost.
GONE = {
    "read": (["Cancelled"], ["Cancelled"]),
    "shielded": (["PeerLost"], ["PeerLost"]),
    "use": (["Cancelled"], ["PeerLost"]),
    "in_tasks": (["Cancelled", "Cancelled"], ["Cancelled", "PeerLost"]),
    "convert": (["Cancelled"], ["PeerLost"]),
}


@pytest.mark.parametrize("method", GONE)
@pytest.mark.parametrize("size", [1, 100_000])
async def test_methods_whose_caller_has_gone(
    over: str, method: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They are cancelled. What they raise because of the client is no fault of theirs, and nobody's news."""
    caplog.set_level(logging.DEBUG, "trio_ucx")
    service = Gone()
    begun = len(GONE[method][0])

    @contextlib.asynccontextmanager
    async def calling(connection: trio_ucx.Connection) -> AsyncIterator[None]:
        service.begun, service.ends[:] = 0, []
        with contextlib.suppress(trio.ClosedResourceError):
            async with rpc.Client(connection).stream(method) as stream:
                with trio.move_on_after(0.05):  # a large one waits for a method that reads
                    await stream.send(1, buffers=[bytes(size)])
                await until(lambda: service.begun == begun)
                yield
        await until(lambda: len(service.ends) == begun)

    def loud() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno > logging.INFO]

    with trio.fail_after(20):
        async with serving(rpc.serving(service)) as listener:
            connection = await trio_ucx.open_ucx_stream(*listener.address)
            async with calling(connection):
                pass
            assert (sorted(service.ends), loud()) == (GONE[method][0], [])
            async with calling(connection):
                connection.abort()
            assert sorted(service.ends) == GONE[method][1]
            await until(lambda: len(loud()) > (method == "convert"))
    *faults, lost = sorted(loud(), key=lambda record: -record.levelno)
    assert f"The handler rpc.serving(Gone) ended and cancelled {method}" in lost.getMessage()
    assert lost.levelname == "WARNING" and [one.levelname for one in faults] == ["ERROR"] * (method == "convert")


class Nested(rpc.Service):
    """Streams with nurseries around their yields, and an answer that cannot be sent."""

    def __init__(self) -> None:
        self.ended = 0
        self.file: mmap.mmap

    @rpc.stream
    async def numbers(self, call: rpc.Call, fails: bool) -> AsyncIterator[int]:
        async def helper() -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.ended += 1
                if fails:
                    raise RuntimeError("the helper failed")

        async with trio.open_nursery() as outer:
            outer.start_soon(helper)
            async with trio.open_nursery() as inner:
                inner.start_soon(helper)
                for number in range(10**6):
                    yield number

    @rpc.method
    async def echo(self, call: rpc.Call) -> int:
        return 5

    @rpc.method
    async def truncated(self, call: rpc.Call) -> rpc.Reply:
        return rpc.Reply(1, [self.file])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_with_nurseries_is_left_early(over: str, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Closing its generator raises GeneratorExit in a nursery, which makes it a group: the server goes on."""
    service = Nested()
    with trio.fail_after(20):
        async with serving(rpc.serving(service)) as listener, rpc.connect(listener.address) as client:
            for round in range(1, 4):
                async with client.stream("numbers", fails=fails) as stream:
                    async for number in stream:
                        if number == 5:
                            break
                await until(lambda round=round: service.ended == 2 * round)
            async with client.stream("numbers", fails=False) as stream:
                assert await anext(aiter(stream)) == 0
    assert any(record.levelname == "ERROR" for record in caplog.records) is fails


async def test_an_answer_that_cannot_be_sent(
    over: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, left = trio_ucx.Channel._send_unscheduled, 0

    async def lacks_memory(channel: trio_ucx.Channel, message: bytes) -> None:
        nonlocal left
        if (left := left - 1) >= 0:
            raise MemoryError("no memory for a send")
        await send(channel, message)

    service = Nested()
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(2**20)
        service.file = mmap.mmap(file.fileno(), 2**20)
        file.truncate(0)
    with trio.fail_after(20):
        async with serving(rpc.serving(service)) as listener, rpc.connect(listener.address) as client:
            for _ in range(2):
                with pytest.raises(rpc.RemoteError, match="cannot use this mmap: .*truncated"):
                    await client.call("truncated")
            monkeypatch.setattr(trio_ucx.Channel, "_send_unscheduled", lacks_memory)
            left = 1
            with pytest.raises(rpc.RemoteError, match="the answer cannot be sent: no memory for a send"):
                await client.call("echo")
            left = 2
            with pytest.raises(rpc.CallLost):
                await client.call("echo")
            assert await client.call("echo") == 5
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["ERROR"] * 4


async def test_many_callers_are_lost_at_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first loss is logged at once, the last one and the number of others later, or when the run ends."""
    service = Gone()
    count = 6

    async def call(connection: trio_ucx.Connection, method: str) -> None:
        with contextlib.suppress(trio.ClosedResourceError):
            await rpc.Client(connection).call(method)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    async def lose_clients(address: tuple[str, int]) -> None:
        service.begun, service.ends[:] = 0, []
        connections = [await trio_ucx.open_ucx_stream(*address) for _ in range(count)]
        async with trio.open_nursery() as nursery:
            for connection in connections:
                for method in ("use", "convert", "use"):
                    nursery.start_soon(call, connection, method)
            await until(lambda: service.begun == 3 * count)
            for connection in connections:
                connection.abort()
        await until(lambda: len(service.ends) == 3 * count)

    async def main(interval: float, expected: int) -> None:
        monkeypatch.setattr(limited_log, "LOG_INTERVAL", interval)
        caplog.clear()
        with trio.fail_after(30):
            async with serving(rpc.serving(service)) as listener:
                await lose_clients(listener.address)
                await until(lambda: len(lines()) == expected)
                await nothing_happens()

    for interval, expected in (1.0, 2), (60.0, 1):
        await trio.to_thread.run_sync(trio.run, main, interval, expected)
        first, last = lines()
        assert "ended and cancelled use (2 calls), convert" in first and "others" not in first
        assert last.endswith(
            f"ended and cancelled use (2 calls), convert (and {count - 2} others since the last such line)"
        )


async def test_cancelled_sends_of_items() -> None:
    """Sends that are cancelled while the connection's window is full use up no credit."""
    shop = Shop()
    with trio.fail_after(20):
        async with serving(rpc.serving(shop), window=4096) as listener, rpc.connect(listener.address) as client:
            async with client.stream("late") as stream:
                sent = 0
                for _ in range(12):
                    with trio.move_on_after(0.01):
                        await stream.send("x" * 1500)
                        sent += 1
                shop.may_read.set()
                await trio.sleep(0.1)
                with trio.fail_after(5):
                    for _ in range(10):
                        await stream.send("x")
                        sent += 1
                assert await stream.result() >= sent


async def test_credit_that_would_block() -> None:
    """A stream goes on after the window of the other direction was full for a while."""
    other = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rpc.serving(Shop()), connection)
            await other.wait()
            with contextlib.suppress(trio.EndOfChannel):
                while True:
                    await connection.receive(tag=5)

    with trio.fail_after(20):
        async with serving(handler, window=4096) as listener, trio_ucx.connect(listener.address) as connection:
            async with rpc.Client(connection).stream("count", to=1000) as stream:
                await trio.sleep(0.2)  # until the first items are here
                fill_window(connection)
                got = []
                with trio.move_on_after(0.5):
                    async for number in stream:
                        got.append(number)
                other.set()
                with trio.move_on_after(3):
                    async for number in stream:
                        got.append(number)
                assert got == [*range(1000)], len(got)


async def test_uploads_nobody_reads_do_not_stop_calls() -> None:
    shop = Shop()
    with trio.fail_after(20):
        async with serving(rpc.serving(shop)) as listener, rpc.connect(listener.address) as client:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(5):
                    stream = await stack.enter_async_context(client.stream("late"))
                    with trio.move_on_after(0.05):
                        while True:
                            await stream.send("x" * 50_000)
                assert await client.call("echo", data=1, timeout=3) == 1


async def test_may_have_run_of_an_earlier_attempt() -> None:
    """An idempotent call may have run; then there is no server any more."""
    shop = Shop()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(trio_ucx.serve_ucx, rpc.serving(shop), 0, host="127.0.0.1"))
            async with rpc.connect(server.address, retry=trio_ucx.Backoff(first=0.01, timeout=0.1)) as client:
                await client.call("echo")
                for listener in server:
                    await listener.aclose()
                with pytest.raises(rpc.CallLost) as caught:
                    await client.call("die", idempotent=True)
                assert shop.runs == 1 and caught.value.may_have_run
            nursery.cancel_scope.cancel()


async def test_items_are_read_while_no_credit_can_be_sent() -> None:
    """A reader gets each item as it comes, also while the window of the other direction is full."""
    begin = trio.Event()

    class Slow(rpc.Service):
        @rpc.stream
        async def count(self, call: rpc.Call) -> AsyncIterator[int]:
            for number in range(7):
                yield number
            await trio.sleep_forever()

    async def handler(connection: trio_ucx.Connection) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rpc.serving(Slow()), connection)
            await begin.wait()

    with trio.fail_after(20):
        async with serving(handler, window=4096) as listener, trio_ucx.connect(listener.address) as connection:
            async with rpc.Client(connection).stream("count") as stream:
                await trio.sleep(0.1)
                fill_window(connection)
                got = []
                with trio.move_on_after(1):
                    async for number in stream:
                        got.append(number)
                assert got == [*range(7)]
            connection.abort()
            begin.set()


async def test_call_on_a_lost_connection() -> None:
    """It has certainly not run."""
    with trio.fail_after(30):
        async with open_peer("echo", [0]) as peer:
            address, _ = await peer.hear()
            connection = await trio_ucx.connect(tuple(address)).__aenter__()
            client = rpc.Client(connection)
            peer.signal(9)
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.wait_closed()
            with pytest.raises(rpc.CallLost) as caught:
                await client.call("echo")
            assert not caught.value.may_have_run
            connection.abort()


async def test_a_call_that_is_cancelled_cancels_no_other(chance: random.Random, rounds: Rounds) -> None:
    """Handlers take turns in the same tasks of the server, whatever became of the call before."""
    cancelled = done = 0

    async def work(client: rpc.Client) -> None:
        nonlocal cancelled, done
        for _ in range(rounds(60, 3000)):
            seconds = chance.choice([0.0, 0.001, 0.003])
            match chance.randrange(3):
                case 0:
                    with trio.move_on_after(seconds * chance.uniform(0.8, 1.2)) as scope:
                        await client.call("pause", seconds=seconds)
                    cancelled += scope.cancelled_caught
                case 1:
                    try:
                        await client.call("pause", seconds=seconds, timeout=seconds * chance.uniform(0.8, 1.2))
                    except rpc.CallTimedOut:
                        cancelled += 1
                case _:
                    assert await client.call("pause", seconds=seconds) == seconds
                    assert await client.call("pause", seconds=seconds, timeout=60) == seconds
            done += 1

    with trio.fail_after(200):
        async with serving(rpc.serving(Shop())) as listener, rpc.connect(listener.address) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(work, client)
    assert cancelled and done == 20 * rounds(60, 3000)


async def test_deadlines_of_calls_one_after_the_other() -> None:
    """The deadline of a call does not bind the next one, which the same task of the server answers."""
    with trio.fail_after(30):
        async with serving(rpc.serving(Shop(), limit=1)) as listener, rpc.connect(listener.address) as client:
            for _ in range(3):
                assert await client.call("pause", seconds=0, timeout=0.2) == 0
                assert await client.call("pause", seconds=0.3) == 0.3
                with pytest.raises(rpc.CallTimedOut):
                    await client.call("pause", seconds=1, timeout=0.05)


async def test_client_that_was_closed() -> None:
    """Calls and streams say so, also those that wait for a connection."""
    errors: list[BaseException] = []

    async def call(client: rpc.Client) -> None:
        try:
            await client.call("echo")
        except trio.ClosedResourceError as error:
            errors.append(error)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, rpc.serving(Shop()), 0, host="127.0.0.1")
            server = await nursery.start(serve)
            async with rpc.connect(server.address, retry=trio_ucx.Backoff()) as client:
                await client.call("echo")
                await server.drain(1)
                nursery.start_soon(call, client)
                await trio.sleep(0.2)
            for _ in range(2):
                with trio.testing.assert_checkpoints(), pytest.raises(trio.ClosedResourceError, match="client"):
                    await client.call("echo")
                with pytest.raises(trio.ClosedResourceError, match="client"):
                    async with client.stream("count", to=1):
                        pass
    assert len(errors) == 1
