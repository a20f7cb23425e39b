"""trio_ucx.rpc: calls, their ends, streams, and a client that reconnects."""

from __future__ import annotations

import inspect
import math
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio
from helpers import nothing_happens, open_listener, pattern, python_path, until
from rpc_service import Locked, Store
from sample_arrays import DTYPES, SHAPES, assert_same, filled, some_layout
from trio.testing import assert_checkpoints

import trio_ucx
from trio_ucx import rpc
from trio_ucx.rpc import _messages as wire
from trio_ucx.rpc._connections import ClientConnection

PROGRAM = Path(__file__).parent / "rpc_service.py"
DEADLINE = 30
JSON, MSGPACK = wire.CODECS[ord("J")], wire.CODECS[ord("M")]
#: Seconds for which a handler may run after its call.
OUTLIVES = 0.1


@asynccontextmanager
async def serving(store: rpc.Service, *, options: Any = (), **arguments: Any) -> AsyncIterator[trio_ucx.Server]:
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            handler = rpc.serving(store, **arguments)
            yield await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1", **dict(options)))
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def client_of(store: rpc.Service, limit: int = 100, **options: Any) -> AsyncIterator[rpc.Client]:
    async with serving(store, limit=limit) as server, rpc.connect(server.address, **options) as client:
        yield client


@contextmanager
def process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """A server in another process, and its address."""
    environment = dict(os.environ, PYTHONPATH=python_path(PROGRAM.parent.parent))
    command = [sys.executable, str(PROGRAM), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as started:
        try:
            assert started.stdout is not None
            yield started, ("127.0.0.1", int(started.stdout.readline()))
        finally:
            started.kill()


async def ended_soon(condition: Callable[[], bool]) -> None:
    before = trio.current_time()
    await until(condition)
    assert trio.current_time() - before < OUTLIVES + 0.4  # on a machine that is busy


# ---- values ----


@pytest.mark.both_transports
async def test_values_and_buffers(over: str) -> None:
    async with client_of(Store()) as client:
        assert await client.call("add", a=1) == 11
        assert await client.call("add", a=1, b=2, timeout=5) == 3
        for value in (None, True, -1, 1.5, "ünï\n\0", [], [1, [2]], {"a": {"$": None}}, b"bytes", "x" * 60_000):
            assert await client.call("echo", value=value) == value
        for sizes in ([0], [1], [1000], [5_000_001], [0, 3, 0, 16, 17, 200_000], [1] * 300):
            buffers = [pattern(size, seed=number) for number, size in enumerate(sizes)]
            reply = await client.call("echo", value="beside", buffers=buffers)
            assert type(reply) is rpc.Reply and reply.value == "beside"
            assert [bytes(each) for each in reply.buffers] == buffers


async def test_arrays_are_sent_from_where_they_are() -> None:
    array = numpy.arange(1_000_000, dtype=numpy.float64).reshape(1000, 1000)

    class Sums(rpc.Service):
        @rpc.method
        async def sum(self, call: rpc.Call) -> rpc.Reply:
            [received] = call.arrays()
            assert received.ctypes.data % 16 == 0 and numpy.array_equal(received, array)
            received *= 2
            return rpc.Reply("twice", [received, b"rest"])

    async with client_of(Sums()) as client:
        reply = await client.call("sum", buffers=[array])
        twice, rest = reply.arrays()
        assert numpy.array_equal(twice, array * 2)
        twice[0, 0] = 1
        assert numpy.frombuffer(reply.buffers[0])[0] == 1, "they are the same memory"
        assert bytes(reply.buffers[1]) == b"rest" == rest.tobytes() and isinstance(reply.buffers[1], memoryview)
        pieces = wire.encode_message(MSGPACK, wire.CALL, [], [array])
        assert any(isinstance(each, numpy.ndarray) and numpy.shares_memory(each, array) for each in pieces)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sample(8)
async def test_arrays_of_every_kind(seed: int) -> None:
    chance = random.Random(seed)
    arrays = [
        some_layout(chance, filled(chance, numpy.dtype(chance.choice(DTYPES)), chance.choice(SHAPES)))
        for _ in range(chance.randrange(1, 6))
    ]

    class Arrays(rpc.Service):
        @rpc.method
        async def back(self, call: rpc.Call) -> rpc.Reply:
            return rpc.Reply(None, call.arrays())

        @rpc.stream
        async def items(self, call: rpc.Call) -> AsyncIterator[rpc.Reply]:
            async for item in call.items():
                yield rpc.Reply(item.value, item.arrays())

    async with client_of(Arrays()) as client:
        reply = await client.call("back", buffers=arrays)
        for got, sent in zip(reply.arrays(), arrays, strict=True):
            assert_same(got, sent)
        async with client.stream("items") as stream:
            for number, array in enumerate(arrays):
                await stream.send(number, buffers=(array,))
                item = await anext(stream)
                assert item.value == number
                assert_same(item.arrays()[0], array)


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sample(20)
def test_damaged_messages_are_refused(seed: int) -> None:
    chance = random.Random(seed)
    message = wire.encode_message(MSGPACK, wire.ITEM, {"a": 1}, [numpy.arange(12).reshape(3, 4), b"xyz"])
    found = wire.decode_message(message)[3]
    assert found is not None and found.arrays()[0].shape == (3, 4)
    for _ in range(200):
        damaged = bytearray(message)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        del damaged[chance.randrange(1, 4 * len(damaged)) :]
        try:
            codec, _, head, buffers = wire.decode_message(bytes(damaged))
            wire.decode_head(codec, head)
        except wire.BadMessage:
            continue
        assert sum(len(each) for each in buffers or ()) <= len(damaged)


async def test_buffers_that_have_not_arrived() -> None:
    assert rpc.Reply("value").arrays() == []
    with pytest.raises(TypeError, match="have arrived"):
        rpc.Reply("value", [b"x"]).arrays()


async def test_arguments_that_cannot_be_sent() -> None:
    async with client_of(Store(), limit=1) as client:
        for bad in (object(), {1, object()}, 2**70, "\ud800"):
            with pytest.raises((TypeError, ValueError)):
                await client.call("echo", value=bad)
        for buffer in ("text", 7, numpy.ma.masked_array([1, 2], [0, 1]), numpy.zeros(3, object), None):
            with pytest.raises((TypeError, ValueError)):
                await client.call("echo", buffers=[buffer])
        with pytest.raises(ValueError, match="send fewer"):
            await client.call("echo", buffers=[b"x"] * 2**16)
        for buffers in (numpy.zeros(3), numpy.zeros(0), b"bytes", {"a": b"bytes"}, 5):
            with pytest.raises(TypeError, match="must be a list or a tuple"):
                await client.call("echo", buffers=buffers)
        with pytest.raises(TypeError, match="timeout"):
            await client.call("add", a=1, timeout="2")
        with pytest.raises(ValueError, match="timeout"):
            await client.call("add", a=1, timeout=-1)
        assert await client.call("add", a=1) == 11


def test_wrong_declarations() -> None:
    with pytest.raises(TypeError, match="async"):
        rpc.method(lambda self, call: 1)
    with pytest.raises(TypeError, match="async generator"):

        @rpc.stream
        async def no_generator(self: Any, call: rpc.Call) -> Any: ...

    with pytest.raises(TypeError, match="exception class"):
        rpc.method(raises=[1])  # type: ignore[list-item]

    class Named(rpc.Service):
        @rpc.method
        async def named(self, call: rpc.Call, timeout: int) -> None: ...

    class Starred(rpc.Service):
        @rpc.method
        async def starred(self, call: rpc.Call, **rest: int) -> None: ...

    class Unknown(rpc.Service):
        @rpc.method
        async def unknown(self, call: rpc.Call, x: Nothing) -> None: ...  # type: ignore[name-defined] # noqa: F821

    class WithoutCall(rpc.Service):
        @rpc.method
        async def get(self, key: str) -> None: ...

    class WithNothing(rpc.Service):
        @rpc.method
        async def get(self) -> None: ...

    class WithAnnotation(rpc.Service):
        @rpc.method
        async def get(self, request: rpc.Call, key: str) -> None: ...

    rpc.serving(WithAnnotation())
    for service, text in (
        (Named, "timeout"), (Starred, "plain"), (Unknown, "annotation"), (WithoutCall, "name it call"),
        (WithNothing, "name it call"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=text):
            rpc.serving(service())
    for wrong in (Store, None, "store"):
        with pytest.raises(TypeError, match="Service"):
            rpc.serving(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit"):
        rpc.serving(Store(), limit=0)
    with pytest.raises(TypeError, match="Connection"):
        rpc.Client(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rpc.Call()  # type: ignore[call-arg]


async def test_a_method_called_as_a_stream_and_a_stream_called_as_a_method() -> None:
    async with client_of(Store()) as client:
        with pytest.raises(rpc.UnknownMethod, match=r"count is a stream: use Client\.stream"):
            await client.call("count", until=3)
        assert await client.call("total") == 0, "it has no items"
        async with client.stream("add", a=1, b=2) as stream:
            assert await stream.result() == 3
        with pytest.raises(TypeError, match="fail_after"):
            client.stream("count", until=3, timeout=2)


async def test_a_reply_without_buffers_is_a_reply() -> None:
    class Some(rpc.Service):
        @rpc.method
        async def some(self, call: rpc.Call, count: int) -> rpc.Reply:
            assert call.arrays() == []
            return rpc.Reply("value", [b"x"] * count)

    async with client_of(Some()) as client:
        for count in (0, 2):
            reply = await client.call("some", count=count, buffers=[])
            assert reply.value == "value" and len(reply.arrays()) == len(reply.buffers) == count


async def test_a_deadline_that_was_moved_while_the_call_ran() -> None:
    """The server keeps the deadline that it was told."""
    store = Store()
    async with client_of(store) as client:
        with trio.move_on_after(0.05) as scope:

            async def move() -> None:
                await until(lambda: store.running["wait"])
                scope.deadline = trio.current_time() + 10

            async with trio.open_nursery() as nursery:
                nursery.start_soon(move)
                with pytest.raises(rpc.CallTimedOut, match="at the server"):
                    scope.deadline = trio.current_time() + 0.05
                    await client.call("wait")


async def test_over_a_connection_of_ones_own() -> None:
    async with serving(Store()) as server, trio_ucx.connect(server.address) as connection:
        client = rpc.Client(connection, errors=[KeyError])
        assert await client.call("add", a=1, b=1) == 2
        await connection.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await client.call("add", a=1, b=1)


# ---- errors ----


async def test_errors_of_handlers(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(Store(), service=Store, errors=[ExceptionGroup]) as client:
        with pytest.raises(rpc.RemoteError) as caught:
            await client.call("fail", how="value")
        error = caught.value
        assert error.type == "ValueError" and len(error.text) < 3000 and error.may_have_run
        assert "in fail" in error.remote_traceback and len(error.remote_traceback) < 10_000
        assert "\x1b" not in str(error) and "\x1b" not in error.remote_traceback
        assert "the method fail failed" in caplog.text
        for how, name in (("group", "ExceptionGroup"), ("broken", "trio.BrokenResourceError"), ("result", "TypeError")):
            with pytest.raises(rpc.RemoteError) as caught:
                await client.call("fail", how=how)
            assert caught.value.type == name
        with pytest.raises(rpc.RemoteError, match="could not be made"):
            await client.call("fail", how="text")
        caplog.clear()
        with pytest.raises(Locked) as locked:
            await client.call("declared", how="locked")
        assert locked.value.args == ("by", 7) and isinstance(locked.value.__cause__, rpc.RemoteError)
        with pytest.raises(LookupError):
            await client.call("declared", how="key")
        assert not caplog.records
        assert await client.call("add", a=1) == 11


async def test_an_undeclared_error_stays_a_remote_error() -> None:
    async with client_of(Store()) as client:
        with pytest.raises(rpc.RemoteError, match=r"rpc_service.Locked"):
            await client.call("declared", how="locked")


async def test_calls_that_do_not_fit() -> None:
    async with client_of(Store()) as client:
        for name in ("nothing", "__class__", "__init__", "running", "x" * 10_000, ""):
            with pytest.raises(rpc.UnknownMethod):
                await client.call(name)
        cases: list[dict[str, Any]] = [{}, {"a": "1"}, {"a": 1, "c": 2}, {"a": None}, {"a": 1.5}, {"a": 1, "call": 2}]
        for arguments in cases:
            with pytest.raises(rpc.BadArguments) as caught:
                await client.call("add", **arguments)
            assert not caught.value.may_have_run
        with pytest.raises(rpc.CallError, match="stream"):
            await client.call("count", until=3)
        async with client.stream("add", a=1) as stream:
            assert [each async for each in stream] == []
            assert await stream.result() == 11


async def test_a_client_without_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a server without it, with JSON of the standard library."""
    monkeypatch.setattr("trio_ucx.rpc._client.DEFAULT", JSON)
    plain = wire.Codec(b"J", wire._json_encode, wire._json_decode, wire._json_call, wire._check_names)
    for codecs in (dict(wire.CODECS), {ord("J"): plain}):
        monkeypatch.setattr(wire, "CODECS", codecs)
        monkeypatch.setattr("trio_ucx.rpc._service.CODECS", codecs)
        async with client_of(Store(), service=Store) as client:
            assert await client.call("add", a=1) == 11
            assert (await client.call("echo", value={"a": [1, None]}, buffers=[b"x"])).value == {"a": [1, None]}
            for arguments in ({}, {"a": 1, "c": 1}):
                with pytest.raises(rpc.BadArguments):
                    await client.call("add", **arguments)
            with pytest.raises(Locked):
                await client.call("declared", how="locked")
            async with client.stream("count", until=3) as stream:
                assert [each async for each in stream] == [0, 1, 2]
    monkeypatch.setattr("trio_ucx.rpc._client.DEFAULT", MSGPACK)
    async with client_of(Store()) as client:
        with pytest.raises(rpc.CallRefused, match=r"pip install msgspec|cannot be decoded|msgspec"):
            wire.CODECS.pop(ord("M"), None)
            await client.call("add", a=1)


# ---- cancellation and deadlines ----


async def test_cancelling_a_call_cancels_its_handler() -> None:
    store = Store()
    async with client_of(store) as client:
        for size in (0, 10**6):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.call, "wait", buffers=[bytes(size)]))
                await until(lambda: store.running["wait"] == 1)
                nursery.cancel_scope.cancel()
            await ended_soon(lambda: not store.running["wait"])
        assert await client.call("add", a=1) == 11


async def test_deadlines_travel() -> None:
    store = Store()
    async with client_of(store) as client:
        with pytest.raises(rpc.CallTimedOut) as caught:
            await client.call("wait", timeout=0.2)
        assert caught.value.may_have_run and isinstance(caught.value, trio.TooSlowError)
        with trio.move_on_after(0.2) as scope:
            await client.call("wait")
        assert scope.cancelled_caught
        with trio.move_on_after(0.3), pytest.raises(rpc.CallTimedOut):
            await client.call("wait", timeout=0.1)
        with trio.move_on_after(0.2):
            await client.call("wait", timeout=100)
        assert all(0 < left <= 0.2 for left in store.lefts) and len(store.lefts) == 4
        await ended_soon(lambda: not store.running["wait"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call, "wait")
            await until(lambda: len(store.lefts) == 5)
            nursery.cancel_scope.cancel()


def call_message(method: str, left: Any = None, metadata: Any = None, kind: int = wire.CALL, **arguments: Any) -> Any:
    return wire.encode_message(MSGPACK, kind, [method, left, metadata, arguments])


async def test_the_server_keeps_the_deadline() -> None:
    store = Store()
    async with serving(store) as server, trio_ucx.connect(server.address) as connection:
        for left in (0, 0.1):
            async with connection.open_conversation() as talk:
                await talk.send(call_message("wait", left))
                kind, error = received(await talk.receive())
                assert kind == wire.ERROR and error[0] == wire.DEADLINE
            assert not store.running["wait"]


def received(data: bytes) -> tuple[int, Any]:
    codec, kind, head, _ = wire.decode_message(data)
    return kind, codec.decode(head)


async def test_three_tiers() -> None:
    """A cancellation, and the death of the caller, reach the last of three servers."""
    async with AsyncTiers() as (first, stores):
        everything = lambda: sum(sum(store.running.values()) for store in stores)  # noqa: E731
        async with rpc.connect(first) as client, trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(client.call, "hop")
            await until(lambda: stores[-1].running["wait"] == 20)
            assert everything() == 60
            nursery.cancel_scope.cancel()
        await ended_soon(lambda: not everything())
        with pytest.raises(rpc.CallTimedOut):
            async with rpc.connect(first) as client:
                await client.call("hop", timeout=0.3)
        assert 0 < stores[-1].lefts[-1] < 0.3
        await ended_soon(lambda: not everything())
        connection = await trio_ucx.connect(first).__aenter__()
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with suppress(trio.ClosedResourceError):
                    await rpc.Client(connection).call("hop")

            nursery.start_soon(call)
            await until(lambda: stores[-1].running["wait"] == 1)
            connection.abort()
        await ended_soon(lambda: not everything())


@asynccontextmanager
async def AsyncTiers() -> AsyncIterator[tuple[tuple[str, int], list[Store]]]:
    last = Store()
    async with serving(last) as server, rpc.connect(server.address, service=Store) as to_last:
        middle = Store(to_last)
        async with serving(middle) as server, rpc.connect(server.address) as to_middle:
            first = Store(to_middle)
            async with serving(first) as server:
                yield server.address, [first, middle, last]


async def test_a_killed_server_ends_its_calls() -> None:
    with trio.fail_after(DEADLINE), process() as (server, address):
        async with rpc.connect(address) as client:
            assert await client.call("add", a=1) == 11
            lost = []

            async def call() -> None:
                with pytest.raises(rpc.CallLost) as caught:
                    await client.call("wait")
                lost.append(caught.value.may_have_run)

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(call)
                await client.call("add", a=1)
                server.kill()
            assert lost == [True] * 10
            with pytest.raises(rpc.CallLost) as caught:
                await client.call("add", a=1)
            assert not caught.value.may_have_run


# ---- limits ----


async def test_the_server_runs_so_many_handlers() -> None:
    store = Store()
    async with serving(store, limit=3) as server, rpc.connect(server.address) as one:
        async with rpc.connect(server.address) as two, trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(one.call if number % 2 else two.call, "wait")
            await until(lambda: store.running["wait"] == 3)
            await nothing_happens()
            with pytest.raises(rpc.CallTimedOut):
                await one.call("add", a=1, timeout=0.05)
            assert store.begun["wait"] == 3
            nursery.cancel_scope.cancel()
        await ended_soon(lambda: not store.running["wait"])
        assert await one.call("add", a=1) == 11
        assert store.most == 3


async def test_the_client_has_so_many_calls_in_flight() -> None:
    store = Store()
    async with (
        client_of(store) as client,
        rpc.connect(address_of(client), limit=2) as few,
    ):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(few.call, "wait")
            await until(lambda: store.running["wait"] == 2)
            await nothing_happens()
            with pytest.raises(rpc.CallTimedOut) as caught:
                await few.call("add", a=1, timeout=0.05)
            assert not caught.value.may_have_run
            assert store.most == 2
            store.release.set()


def address_of(client: rpc.Client) -> tuple[str, int]:
    address: Any = client._connections.current.connection.remote_address  # type: ignore[union-attr]
    return address


# ---- streams ----


async def test_streams() -> None:
    store = Store()
    async with client_of(store) as client:
        for until_ in (0, 1, 1000):
            async with client.stream("count", until=until_) as stream:
                assert [each async for each in stream] == [*range(until_)]
                with pytest.raises(StopAsyncIteration):
                    await stream.__anext__()
        async with client.stream("count", until=3, size=100_000) as stream:
            assert [(each.value, len(each.buffers[0])) async for each in stream] == [(n, 100_000) for n in range(3)]
        async with client.stream("count", until=10, fail_at=5) as stream:
            got = []
            with pytest.raises(rpc.RemoteError, match="stopped counting"):
                async for each in stream:
                    got.append(each)
            assert got == [0, 1, 2, 3, 4]
        async with client.stream("nothing") as stream:
            with pytest.raises(rpc.UnknownMethod):
                await stream.__anext__()
        with pytest.raises(RuntimeError, match="once"):
            await stream.__aenter__()
        with pytest.raises(RuntimeError, match="enter"):
            await client.stream("count", until=1).__anext__()
        assert not store.running["count"]


async def test_a_slow_reader_stops_the_handler() -> None:
    """And does not hold up other calls."""
    store = Store()
    async with client_of(store) as client, client.stream("count", until=10**6, size=10_000) as stream:
        assert (await stream.__anext__()).value == 0
        await until(lambda: store.begun["count"] > 2)
        await nothing_happens()
        assert store.begun["count"] < 50
        assert await client.call("add", a=1) == 11
        for number in range(1, 200):
            assert (await stream.__anext__()).value == number


async def test_streams_that_are_left_in_the_middle() -> None:
    store = Store()
    async with client_of(store) as client:
        async with client.stream("count", until=10**9) as stream:
            async for each in stream:
                if each == 10:
                    break
        await ended_soon(lambda: not store.running["count"])
        with pytest.raises(KeyError):
            async with client.stream("count", until=10**9) as stream:
                await stream.__anext__()
                raise KeyError
        await ended_soon(lambda: not store.running["count"])
        with trio.move_on_after(0.05):
            async with client.stream("count", until=10**9) as stream:
                async for _ in stream:
                    await trio.sleep(0.001)
        await ended_soon(lambda: not store.running["count"])
        assert await client.call("add", a=1) == 11


async def test_client_to_server() -> None:
    store = Store()
    async with client_of(store) as client:
        async with client.stream("total") as stream:
            for number in range(100):
                await stream.send(number)
            assert await stream.result() == 4950
            with pytest.raises(trio.ClosedResourceError):
                await stream.send(1)
        async with client.stream("total") as stream:
            await stream.send(None, buffers=[bytes(200_000)])
            await stream.send(5)
            assert await stream.result() == 200_005
        async with client.stream("total") as stream:
            await stream.send("text")
            with pytest.raises(rpc.RemoteError, match="TypeError"):
                await stream.result()
        async with client.stream("total", most=3) as stream:  # the handler ends before the client does
            with pytest.raises(trio_ucx.PeerClosed):
                while True:
                    await stream.send(1)
            assert await stream.result() == 3
        async with client.stream("double") as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                for number in range(100):
                    await stream.send(number)
                await stream.send_eof()

            nursery.start_soon(send)
            assert [each async for each in stream] == [2 * number for number in range(100)]


async def test_a_handler_that_reads_no_items_is_cancelled() -> None:
    """While items are unread, too."""
    store = Store()
    async with client_of(store) as client:
        for items in (0, 1, 5):
            async with client.stream("total", most=0) as stream:
                for _ in range(items):
                    await stream.send(1)
                await until(lambda: store.running["total"] == 1)
                await nothing_happens()
            await ended_soon(lambda: not store.running["total"])
        async with client.stream("total", most=0) as stream:
            with trio.move_on_after(0.3) as scope:
                while True:
                    await stream.send(1)
            assert scope.cancelled_caught  # the handler's backpressure


# ---- reconnecting ----


async def test_reconnects_to_a_server_that_was_started_again() -> None:
    with trio.fail_after(DEADLINE), ExitStack() as stack:
        server, address = stack.enter_context(process())
        async with rpc.connect(address, retry=trio_ucx.Backoff(), service=Store) as client:
            first = await client.call("pid_of")
            server.kill()
            server.wait()
            await until(lambda: not client._connections.current.usable)  # type: ignore[union-attr]
            async with trio.open_nursery() as nursery:
                pids = []

                async def call() -> None:
                    pids.append(await client.call("pid_of"))

                for _ in range(5):
                    nursery.start_soon(call)  # they wait
                with pytest.raises(rpc.CallTimedOut) as caught:
                    await client.call("pid_of", timeout=0.2)
                assert not caught.value.may_have_run
                second, _ = stack.enter_context(process(address[1]))
            assert pids == [second.pid] * 5 and first == server.pid


async def test_several_addresses() -> None:
    with trio.fail_after(DEADLINE), process() as (one, first), process() as (two, second):
        async with rpc.connect(["127.0.0.1:1", first, second], service=Store) as client:
            assert await client.call("pid_of") == one.pid
            one.kill()
            assert await client.call("pid_of") == two.pid
            two.kill()
            with pytest.raises(rpc.CallLost) as caught:
                for _ in range(3):
                    await client.call("add", a=1)
            assert not caught.value.may_have_run or caught.value.__cause__
        with pytest.raises(OSError):
            async with rpc.connect(["127.0.0.1:1", first]):
                pass


async def test_only_idempotent_calls_are_made_again() -> None:
    store = Store()
    async with client_of(store, service=Store, retry=trio_ucx.Backoff()) as client:
        assert await client.call("again", number=1) == 2
        with pytest.raises(rpc.CallLost) as caught:
            await client.call("once", number=2)
        assert caught.value.may_have_run and store.runs[2] == 1
        with pytest.raises(rpc.CallLost):
            await client.call("once", number=3, idempotent=True)
        assert store.runs[3] == 3  # and no more: it may be what kills the server
        with pytest.raises(rpc.CallLost):
            another = rpc.Client(client._connections, limit=1)  # type: ignore[arg-type]
            await another.call("again", number=4)
        assert store.runs[4] == 1


class Closer(rpc.Service):
    """Ends the connection of its caller."""

    def __init__(self) -> None:
        self.begun = 0

    @rpc.method
    async def close(self, call: rpc.Call, how: str) -> None:
        self.begun += 1
        if how == "gracefully":
            await call.connection.aclose()
        else:
            call.connection.abort()


@pytest.mark.parametrize("how", ["gracefully", "by force"])
async def test_a_handler_that_closes_its_connection_has_run(how: str) -> None:
    """The client does not make the call again, although the connection may have ended in good order."""
    service = Closer()
    async with trio.open_nursery() as nursery:
        serving = partial(trio_ucx.serve_ucx, rpc.serving(service), "127.0.0.1:0", on_handler_error="log")
        server = await nursery.start(serving)
        with trio.fail_after(15):
            async with rpc.connect(server.address, retry=trio_ucx.Backoff()) as client:
                with pytest.raises(rpc.CallLost) as caught:
                    await client.call("close", how=how)
        assert caught.value.may_have_run
        assert service.begun == 1
        nursery.cancel_scope.cancel()


async def test_errors_of_a_block_are_not_grouped() -> None:
    async with serving(Store()) as server:
        with pytest.raises(KeyError):
            async with rpc.connect(server.address):
                raise KeyError
        with trio.move_on_after(0) as scope:
            async with rpc.connect(server.address):
                pass
        assert scope.cancelled_caught
    with pytest.raises(ConnectionRefusedError):
        async with rpc.connect("127.0.0.1:1"):
            pass
    for wrong in ([], 7, "nonsense"):
        with pytest.raises((TypeError, ValueError)):
            async with rpc.connect(wrong):  # type: ignore[arg-type]
                pass
    with pytest.raises(TypeError, match="retry"):
        async with rpc.connect("127.0.0.1:1", retry=3):  # type: ignore[typeddict-item]
            pass


@pytest.mark.parametrize("how", ["generator", "by hand"])
async def test_a_block_that_is_dropped_is_left(how: str) -> None:
    """Trio leaves it in another task; the program goes on."""

    async def clients(address: tuple[str, int]) -> AsyncIterator[rpc.Client]:
        async with rpc.connect(address) as client:
            yield client

    async with serving(Store()) as server:
        if how == "generator":
            generator = clients(server.address)
            client = await anext(generator)
            assert await client.call("add", a=1) == 11
            with pytest.warns(ResourceWarning, match="clients"):
                del generator
        else:
            block = rpc.connect(server.address)
            client = await block.__aenter__()
            assert await client.call("add", a=1) == 11
            trios = pytest.warns(ResourceWarning, match="Async generator")
            with trios, pytest.warns(ResourceWarning, match=r"a block of trio_ucx.rpc.connect\(\) was dropped"):
                del block
        await until(lambda: not server.connections)
        with pytest.raises(trio.ClosedResourceError, match="closed"):
            await client.call("add", a=1)
        async with rpc.connect(server.address) as another:
            assert await another.call("add", a=1) == 11


async def test_an_internal_error_ends_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: ClientConnection) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ClientConnection, "wait_unused", fail)
    async with serving(Store()) as server:
        with pytest.raises(trio.ClosedResourceError, match="closed"):
            async with rpc.connect(server.address) as client:
                while True:
                    await client.call("add", a=1)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "an internal error of trio_ucx.rpc ended a client" and record.exc_info is not None


def test_a_run_ends_with_a_block_that_was_not_left(caplog: pytest.LogCaptureFixture) -> None:
    kept = []

    async def program() -> None:
        async with serving(Store()) as server:
            kept.append(rpc.connect(server.address))
            kept.append(await kept[0].__aenter__())
            assert await kept[1].call("add", a=1) == 11

    with warnings.catch_warnings():
        # Trio ends its system tasks in any order. If the worker is closed first, the connection was not.
        warnings.filterwarnings("ignore", "unclosed <trio_ucx.Connection", ResourceWarning)
        trio.run(program)
    assert not [record for record in caplog.records if "asyncgen" in record.message or record.name.startswith("trio.")]
    with pytest.warns(ResourceWarning, match="dropped"):
        kept.clear()


# ---- draining ----


async def test_drain() -> None:
    """Calls that run are finished; new ones are refused, and go to another server."""
    draining, other = Store(), Store()
    async with serving(draining) as first, serving(other) as second, trio.open_nursery() as nursery:
        async with rpc.connect([first.address, second.address]) as client, trio_ucx.connect(first.address) as plain:
            answers = []

            async def call() -> None:
                answers.append(await client.call("wait"))

            async with trio.open_nursery() as calls:
                for _ in range(5):
                    calls.start_soon(call)
                calls.start_soon(rpc.Client(plain).call, "wait")
                await until(lambda: draining.running["wait"] == 6)
                nursery.start_soon(first.drain)
                await until(lambda: all(each.draining for each in first.connections))
                with pytest.raises(rpc.CallLost, match="shuts down") as caught:
                    await rpc.Client(plain).call("add", a=1)
                assert not caught.value.may_have_run
                for number in range(10):
                    assert await client.call("add", a=number, b=0) == number
                assert not answers
                draining.release.set()
            assert answers == ["released"] * 5


async def test_what_has_arrived_is_read_after_the_server_has_gone() -> None:
    async with serving(Store()) as server, rpc.connect(server.address) as client:
        async with client.stream("count", until=5) as stream:
            line: Any = client._connections.current
            await until(lambda: line.connection.statistics().messages_received >= 6)
            assert await server.drain(timeout=5) == 0
            await until(lambda: line.retired)
            await nothing_happens()
            assert [each async for each in stream] == [0, 1, 2, 3, 4]
        await until(lambda: line.connection.closed)


async def test_a_result_that_is_too_long() -> None:
    async with client_of(Store(), max_message_size=1000) as client:
        with pytest.raises(trio_ucx.MessageTooLong):
            await client.call("echo", buffers=[bytes(2000)])
        assert await client.call("add", a=1) == 11


async def test_drains_under_load() -> None:
    """No call of a client is lost when its servers are drained by turns."""
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            servers = []
            for _ in range(2):
                serve = partial(trio_ucx.serve_ucx, rpc.serving(Store()), 0, host="127.0.0.1")
                servers.append(await nursery.start(serve))
            ports = [server.address for server in servers]
            stop = trio.Event()

            async def check(client: rpc.Client, seed: int) -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    assert await client.call("add", a=number, b=seed) == number + seed

            async with rpc.connect(ports, retry=trio_ucx.Backoff()) as client, trio.open_nursery() as workers:
                for seed in range(16):
                    workers.start_soon(check, client, seed)
                for turn in range(4):
                    await trio.sleep(0.1)
                    await servers[turn % 2].drain(timeout=5)
                    serve = partial(trio_ucx.serve_ucx, rpc.serving(Store()), ports[turn % 2][1], host="127.0.0.1")
                    servers[turn % 2] = await nursery.start(serve)
                stop.set()
            nursery.cancel_scope.cancel()


# ---- hooks ----


async def test_hooks() -> None:
    seen: list[Any] = []

    @contextmanager
    def at_client(method: str, metadata: dict[str, str]) -> Iterator[None]:
        metadata["traceparent"] = "00-1"
        try:
            yield
        except BaseException as error:
            seen.append(("client", method, type(error).__name__))
            raise
        seen.append(("client", method))

    @contextmanager
    def at_server(method: str, metadata: dict[str, str]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            seen.append(("server", method, metadata["traceparent"], type(error).__name__))
            raise
        seen.append(("server", method, metadata["traceparent"]))

    async with serving(Store(), hook=at_server) as server, rpc.connect(server.address, hook=at_client) as client:
        metadata = await client.call("metadata", metadata={"user": "me"})
        assert metadata == {"user": "me", "traceparent": "00-1"}
        with pytest.raises(rpc.RemoteError):
            await client.call("fail", how="value")
        async with client.stream("count", until=1) as stream:
            assert [each async for each in stream] == [0]
        await until(lambda: len(seen) == 6)
    assert seen == [
        ("server", "metadata", "00-1"),
        ("client", "metadata"),
        ("server", "fail", "00-1", "ValueError"),
        ("client", "fail", "RemoteError"),
        ("server", "count", "00-1"),
        ("client", "count"),
    ]


# ---- peers that are not to be trusted ----

GARBAGE: list[bytes] = [
    b"",
    b"M",
    b"X\0\0\0\0\0",
    b"M\0\0\0",
    b"J\0\0\0\0\0{",
    b"J\0\0\0\0\0" + b"[" * 60_000,
    b"M\0\0\0\0\0" + b"\x91" * 60_000,
    b"M\0\1\0",
    b"M\0\xff\xff\0\0" + bytes(100),
    b"M\0\1\0\0\0" + b"\xff" * 100,
    b"M\1\0\0\0\0\xc0",
    b"M\x09\0\0\0\0\xc0",
    b"M\0\0\0\0\0\xff\xff",
    b'J\0\0\0\0\0["add", -1, null, {}]',
    b'J\0\0\0\0\0["add", 1e999, null, {}]',
    b'J\0\0\0\0\0["add", null, {"a": 1}, {}]',
    b'J\0\0\0\0\0["add", null, null, []]',
    b'J\0\0\0\0\0["add", null, null]',
    b"J\0\0\0\0\0[1, null, null, {}]",
    b'J\0\0\0\0\0["add", "1", null, {"a": 1}]',
    bytes(random.Random(1).randbytes(200_000)),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_is_refused(garbage: bytes) -> None:
    store = Store()
    async with serving(store) as server, trio_ucx.connect(server.address) as connection:
        async with connection.open_conversation() as talk:
            await talk.send(garbage)
            kind, error = received(await talk.receive())
            assert kind == wire.ERROR and error[0] in (wire.REFUSED, wire.BAD_ARGUMENTS) and len(error[2]) < 3000
        assert await rpc.Client(connection).call("add", a=1) == 11


@pytest.mark.parametrize(
    "items", [[b""], [b"X\0\0\0\0\0"], [b"M\1\0\0\0\0\xff\xff"], [b"M\1\0\0\0\0\xc1"], [b"M\5\0\0\0\0\xc0"] * 2]
)
async def test_garbage_as_items(items: list[bytes]) -> None:
    async with serving(Store()) as server, trio_ucx.connect(server.address) as connection:
        async with connection.open_conversation() as talk:
            await talk.send(call_message("total", kind=wire.STREAM))
            for item in items:
                await talk.send(item)
            kind, error = received(await talk.receive())
            assert kind == wire.ERROR and error[1].endswith("CallError")


async def test_items_without_credit_are_refused() -> None:
    """A client that reads nothing and sends without end does not fill the server's memory."""
    async with serving(Store()) as server, trio_ucx.connect(server.address) as connection:
        async with connection.open_conversation() as talk:
            await talk.send(call_message("count", until=100, kind=wire.STREAM))
            with pytest.raises(trio_ucx.PeerClosed):
                while True:
                    await talk.send(b"M\1\0\0\0\0\xc0")
            kinds = []
            with pytest.raises(trio.EndOfChannel):
                while True:
                    kinds.append(received(await talk.receive())[0])
            assert kinds == [wire.ITEM] * 8 + [wire.ERROR]


async def test_a_call_that_is_too_long() -> None:
    async with serving(Store(), options={"max_message_size": 10_000}) as server, rpc.connect(server.address) as client:
        with pytest.raises(rpc.CallRefused, match="too long"):
            await client.call("echo", buffers=[bytes(20_000)])
        assert await client.call("add", a=1) == 11


@pytest.mark.parametrize(
    "answer",
    [
        *GARBAGE[:12],
        b"M\4\0\0\0\0\xc0",
        b"J\4\0\0\0\0[]",
        b"J\4\0\0\0\0[0, 1, 2, 3, 4]",
        b'J\4\0\0\0\0[99, "", "", "", null]',
        b'J\4\0\0\0\0["a", "", "", "", null]',
    ],
)
async def test_garbage_as_answer(answer: bytes) -> None:
    with trio.fail_after(DEADLINE):
        async with open_listener() as listener, trio_ucx.connect(listener.address) as connection:
            async with await listener.accept() as server, trio.open_nursery() as nursery:

                async def reply() -> None:
                    talk = await server.conversations().__anext__()
                    async with talk:
                        await talk.receive()
                        await talk.send(answer)

                nursery.start_soon(reply)
                with pytest.raises(rpc.CallError):
                    await rpc.Client(connection).call("anything")


async def test_peers_that_hang_up() -> None:
    """A peer that ends the connection in order has not run the call; one that breaks it off may have."""
    for ran in (False, True):
        with trio.fail_after(DEADLINE):
            async with open_listener() as listener, trio_ucx.connect(listener.address) as connection:
                server = await listener.accept()
                async with trio.open_nursery() as nursery:

                    async def hang_up() -> None:
                        await server.conversations().__anext__()  # noqa: B023
                        if ran:  # noqa: B023
                            server.abort()  # noqa: B023
                        else:
                            await server.aclose()  # noqa: B023

                    nursery.start_soon(hang_up)
                    with pytest.raises(rpc.CallLost) as caught:
                        await rpc.Client(connection).call("anything")
                    assert caught.value.may_have_run is ran


# ---- many ----


async def many(store: Store, client: rpc.Client, calls: int, workers: int = 32) -> None:
    """Calls that are cancelled at random: none gets the answer of another, and no handler is left."""
    remaining = iter(range(calls))

    async def work(seed: int) -> None:
        chance = random.Random(seed)
        for number in remaining:
            match chance.randrange(20):
                case 0:
                    with trio.move_on_after(chance.random() * 0.002):
                        await client.call("wait", number=number)
                case 1:
                    data = pattern(chance.choice([1, 1000, 100_000]), seed=number)
                    with trio.move_on_after(chance.choice([0.0005, 0.005, math.inf])):
                        reply = await client.call("echo", value=number, buffers=[data])
                        assert reply.value == number and reply.buffers[0] == data
                case 2:
                    with trio.move_on_after(chance.choice([0.0005, 0.005, math.inf])):
                        async with client.stream("count", until=5) as stream:
                            assert [each async for each in stream] == [0, 1, 2, 3, 4]
                case _:
                    assert await client.call("add", a=number, b=seed) == number + seed

    async with trio.open_nursery() as nursery:
        for seed in range(workers):
            nursery.start_soon(work, seed)
    await ended_soon(lambda: not sum(store.running.values()))


async def test_many_calls() -> None:
    store = Store()
    async with client_of(store) as client:
        await many(store, client, 3000)
        connection = client._connections.current.connection  # type: ignore[union-attr]
        await until(lambda: not connection.statistics().left_over_operations and not connection.statistics().held)


@pytest.mark.full
async def test_100_000_calls() -> None:
    store = Store()
    with trio.fail_after(200):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(trio_ucx.serve_ucx, rpc.serving(store), 0, host="127.0.0.1"))
            async with rpc.connect(server.address) as client:
                await many(store, client, 100_000)
            nursery.cancel_scope.cancel()


async def test_signals_drain_a_server() -> None:
    with trio.fail_after(DEADLINE), process() as (server, address):
        async with rpc.connect(address) as client:
            assert await client.call("add", a=1) == 11
            server.send_signal(signal.SIGTERM)
            await trio.to_thread.run_sync(server.wait)
            assert server.returncode == 0
            with pytest.raises(rpc.CallLost) as caught:
                await client.call("add", a=1)
            assert not caught.value.may_have_run


def test_nothing_imports_it() -> None:
    code = "import sys, trio_ucx, trio_ucx.mesh; sys.exit('trio_ucx.rpc' in sys.modules or 'msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_kills_under_load() -> None:
    """Servers are killed while calls run. Idempotent calls are all answered, rightly; others are lost with an error."""
    answered = lost = 0
    with trio.fail_after(6 * DEADLINE), ExitStack() as stack:
        first, address = stack.enter_context(process())
        second, other = stack.enter_context(process())
        servers, ports = [first, second], [address[1], other[1]]
        async with rpc.connect([address, other], retry=trio_ucx.Backoff(), service=Store) as client:
            stop = False

            async def work(seed: int) -> None:
                nonlocal answered, lost
                number = 0
                while not stop:
                    number += 1
                    if number % 10:
                        assert await client.call("add", a=number, b=seed, idempotent=True) == number + seed
                    else:
                        try:
                            assert await client.call("add", a=number, b=seed) == number + seed
                        except rpc.CallLost as error:
                            assert error.may_have_run
                            lost += 1
                    answered += 1

            async with trio.open_nursery() as nursery:
                for seed in range(16):
                    nursery.start_soon(work, seed)
                for turn in (0, 1, 0):
                    before = answered
                    await until(lambda: answered > before + 200)  # noqa: B023
                    servers[turn].kill()
                    servers[turn].wait()
                    servers[turn], _ = stack.enter_context(process(ports[turn]))
                stop = True
    assert lost <= 3 * 16


# ---- checkpoints ----


async def test_everything_is_a_checkpoint() -> None:
    asynchronous = {
        f"{cls.__name__}.{name}"
        for cls in (rpc.Client, rpc.Stream, rpc.Call)
        for name, value in vars(cls).items()
        if inspect.iscoroutinefunction(value) and (name.startswith("__") or not name.startswith("_"))
    }
    seen = set()

    async def check(name: str, function: Callable[[], Any], *, raises: Any = ()) -> Any:
        seen.add(name)
        with trio.CancelScope() as scope:
            scope.cancel()
            await function()
        assert scope.cancelled_caught, name
        with assert_checkpoints():
            try:
                return await function()
            except raises:
                return None

    async with client_of(Store()) as client:
        assert await check("Client.call", lambda: client.call("add", a=1)) == 11
        stream = await check("Stream.__aenter__", client.stream("double").__aenter__)
        await stream.__aexit__(None, None, None)
        stream = client.stream("double")
        with assert_checkpoints():
            await stream.__aenter__()
        await check("Stream.send", lambda: stream.send(1))
        assert await check("Stream.__anext__", lambda: stream.__anext__()) == 2
        for _ in range(2):
            await check("Stream.send_eof", lambda: stream.send_eof())
        await check("Stream.__anext__", lambda: stream.__anext__(), raises=StopAsyncIteration)
        for _ in range(2):
            await check("Stream.result", lambda: stream.result())
        seen.add("Stream.__aexit__")
        with assert_checkpoints():
            await stream.__aexit__(None, None, None)
        assert seen == asynchronous
        connecting = rpc.connect(address_of(client))
        with assert_checkpoints():
            await connecting.__aenter__()
        with assert_checkpoints():
            await connecting.__aexit__(None, None, None)
