"""examples/rpc.py."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy
import pytest
import trio
from helpers import nothing_happens, open_listener, pattern, serving, until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, load, program

RPC = EXAMPLES / "rpc.py"
rpc: Any = load(RPC)


@asynccontextmanager
async def answering(methods: dict[str, Any], **options: Any) -> AsyncIterator[tuple[str, int]]:
    """The address of a server in this process. Whatever is done with it is bounded."""
    with trio.fail_after(DEADLINE):
        async with serving(partial(rpc.answer_calls, methods), **options) as listener:
            yield listener.address


@asynccontextmanager
async def client_of(methods: dict[str, Any], **options: Any) -> AsyncIterator[Any]:
    async with answering(methods, **options) as address, rpc.open_client(address) as client:
        yield client


@asynccontextmanager
async def client_of_ours() -> AsyncIterator[tuple[Any, trio_ucx.Connection]]:
    """A client, and its server's connection, on which the test answers."""
    async with (
        open_listener() as listener,
        rpc.open_client(listener.address) as client,
        await listener.accept() as server,
    ):
        yield client, server


class Watched:
    """A method that waits to be cancelled."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    async def __call__(self, **arguments: object) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep_forever()
        finally:
            self.running -= 1

    async def started(self, count: int = 1) -> None:
        await until(lambda: self.running == count)

    async def ended(self) -> None:
        assert self.most
        await until(lambda: not self.running)


def request(number: Any = 1, method: Any = "echo", **parts: Any) -> bytes:
    head = {"call": number, "method": method, "timeout": None, "values": {}, "buffers": []}
    return json.dumps(head | parts).encode()


# ---- what arrives ----


@pytest.mark.both_transports
async def test_values_and_buffers(over: str) -> None:
    with trio.fail_after(DEADLINE), program(RPC, "serve") as server:
        await server.wait_address()
        async with rpc.open_client(server.address) as client:
            assert await client.call("add", a=1, b=2) == 3
            for value in [None, True, -1, 1.5, "ünï\n\0", [], [1, [2]], {"a": {"$": None}}, 2**80, "x" * 60_000]:
                assert await client.call("echo", data=value) == value
            for size in 0, 1000, 5_000_001:
                assert await client.call("echo", data=bytearray(pattern(size))) == pattern(size)


async def test_arrays_and_values_mixed() -> None:
    async def check(values: list[int], scale: int, one: bytes, two: bytes, three: bytes) -> bytes:
        array = numpy.frombuffer(one, numpy.float64).reshape(100, 200)
        assert bytes(two) == b"two" and three == b""
        return (array * scale + sum(values)).astype(numpy.float32)  # type: ignore[return-value]

    array = numpy.arange(20_000, dtype=numpy.float64).reshape(100, 200)
    async with client_of({"check": check}) as client:
        result = await client.call("check", two=memoryview(b"two"), values=[1, 2], one=array, scale=2, three=b"")
    assert numpy.array_equal(numpy.frombuffer(result, numpy.float32).reshape(100, 200), array * 2 + 3)


async def test_replies_that_come_out_of_order() -> None:
    may_answer = [trio.Event() for _ in range(30)]
    finished: list[int] = []

    async def answer(number: int, data: bytes) -> bytes:
        await may_answer[number].wait()
        return data

    async def check(client: Any, number: int) -> None:
        data = pattern(number * 5000, seed=number)
        assert await client.call("answer", number=number, data=data) == data
        finished.append(number)

    async with client_of({"answer": answer}) as client, trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(check, client, number)
        for number in reversed(range(30)):
            may_answer[number].set()
            await until(lambda: number in finished)  # noqa: B023
    assert finished == [*reversed(range(30))]


# ---- errors ----


async def fail() -> None:
    raise ZeroDivisionError("it went\nwrong: \ud800 " + "🚀" * 2000)


async def fail_in_group() -> None:
    async with trio.open_nursery():
        raise KeyError("inside")


async def give(what: str) -> Any:
    return {"object": object(), "json": "x" * 2**16, "strided": numpy.zeros((4, 4))[:, 0]}[what]


async def test_errors_of_methods() -> None:
    async with client_of({"fail": fail, "fail_in_group": fail_in_group, "give": give, **rpc.METHODS}) as client:
        for method, arguments, kind, text in [
            ("fail", {}, "ZeroDivisionError", "it went\nwrong: \ud800 🚀🚀"),
            ("fail_in_group", {}, "ExceptionGroup", ""),
            ("nothing", {}, "LookupError", "there is no method 'nothing'"),
            ("__class__", {}, "LookupError", "there is no method '__class__'"),
            ("give", {}, "TypeError", "what"),
            ("give", {"what": "object"}, "TypeError", "JSON"),
            ("give", {"what": "json"}, "ValueError", "use buffers"),
            ("give", {"what": "strided"}, "ValueError", "not contiguous"),
        ]:
            with pytest.raises(rpc.RpcError) as caught:
                await client.call(method, **arguments)
            assert caught.value.args[0] == kind and text in caught.value.args[1]
            assert str(caught.value) == f"{kind}: {caught.value.args[1]}"
            with pytest.raises(rpc.RpcError):
                await client.call(method, **arguments, data=bytes(10**6))  # received all the same
            assert await client.call("echo", data="next") == "next"
            assert client._connection.statistics().held == 0


async def test_arguments_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_CALLS", 2)  # there are more bad calls than slots
    async with client_of(rpc.METHODS) as client:
        bad: list[Any] = [object(), "x" * 2**16, numpy.zeros((4, 4))[:, 0]]
        for argument in bad:
            with pytest.raises((TypeError, ValueError)):
                await client.call("echo", data=argument)
        assert await client.call("echo", data=b"next") == b"next"


# ---- cancellation and deadlines ----


async def test_cancelled() -> None:
    """One of two calls, in the middle of others; also while its arguments are on their way."""
    watched, other = Watched(), Watched()
    async with client_of({"wait": watched, "other": other, **rpc.METHODS}) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.call, "other")
        await other.started()
        for size in 0, 10**6:
            async with trio.open_nursery() as inner:
                inner.start_soon(partial(client.call, "wait", data=bytes(size)))
                await watched.started()
                inner.cancel_scope.cancel()
            await watched.ended()
        assert other.running == 1
        assert await client.call("add", a=1, b=2) == 3
        nursery.cancel_scope.cancel()


async def test_deadline_goes_along() -> None:
    async with client_of_ours() as (client, server):
        for seconds, outer in (100, math.inf), (math.inf, 100), (math.inf, math.inf):
            with trio.move_on_after(outer):
                async with trio.open_nursery() as nursery:
                    nursery.cancel_scope.deadline = trio.current_time() + seconds
                    nursery.start_soon(client.call, "wait")
                    header = json.loads(await server.receive(tag=rpc.REQUESTS))
                    nursery.cancel_scope.cancel()
            assert json.loads(await server.receive(tag=rpc.REQUESTS)) == {"cancel": header["call"]}
            await server.send(b'{"error": ["Cancelled", ""]}', tag=header["call"])
            if seconds == outer:
                assert header["timeout"] is None
            else:
                assert 0 < header["timeout"] <= 100


async def test_deadline_is_kept_by_the_server() -> None:
    watched = Watched()
    async with answering({"wait": watched}) as address, trio_ucx.connect(address) as connection:
        for number, timeout in (7, 0), (8, 0.1):
            await connection.send(request(number, "wait", timeout=timeout), tag=rpc.REQUESTS)
            kind, text = json.loads(await connection.receive(tag=number))["error"]
            assert kind == "TooSlowError" and "deadline" in text
            assert watched.running == 0


async def test_cancellations_leave_nothing() -> None:
    """Calls with buffers both ways are cancelled at any time; the others' results are right, and the tag queues are
    empty.
    """
    connections: list[trio_ucx.Connection] = []
    cancelled = 0

    async def echo(data: bytes, pause: float) -> bytes:
        await trio.sleep(pause)
        return data

    async def serve(connection: trio_ucx.Connection) -> None:
        connections.append(connection)
        await rpc.answer_calls({"echo": echo}, connection)

    async def work(client: Any, seed: int) -> None:
        nonlocal cancelled
        chance = random.Random(seed)
        for number in range(25):
            data = pattern(chance.choice([0, 100, 10_000, 100_000, 1_000_000]), seed=seed * 1000 + number)
            patience, pause = chance.choice([0.001, 0.01, 0.05, math.inf]), chance.choice([0, 0.002, 0.02])
            if number == 0:  # this one is cancelled for sure
                patience, pause = 0.01, 1000
            with trio.move_on_after(patience) as scope:
                assert await client.call("echo", data=data, pause=pause) == data
            cancelled += scope.cancelled_caught

    with trio.fail_after(DEADLINE):
        async with serving(serve) as listener:
            async with rpc.open_client(listener.address) as client:
                async with trio.open_nursery() as workers:
                    for seed in range(16):
                        workers.start_soon(work, client, seed)
                assert cancelled >= 16
                for _ in range(rpc.MAX_CALLS):  # until the server has answered everything
                    await client._slots.acquire()
                for connection in (*connections, client._connection):
                    await until(lambda: not connection.statistics().left_over_operations)  # noqa: B023
                    assert connection.statistics().held == 0


# ---- a client that is not to be trusted ----


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([b"{"], "not JSON"),
        ([b"\xff\xfe"], "not JSON"),
        ([b"[" * 60_000], "not JSON"),
        ([b"\0" * 70_000], "too long"),
        ([b"[]"], "neither"),
        ([b'{"cancel": "1"}'], "neither"),
        ([request(0)], "neither"),
        ([request(2**31 - 1)], "neither"),
        ([request("1")], "neither"),
        ([request(method=None)], "neither"),
        ([request(timeout=-1)], "neither"),
        ([request(timeout=float("nan"))], "neither"),
        ([request(timeout=10**400)], "neither"),
        ([request(timeout="1")], "neither"),
        ([request(values=[])], "neither"),
        ([request(buffers=[1])], "neither"),
        ([request(3, "wait"), request(3, "wait")], "neither"),
    ],
)
async def test_hangs_up_after_nonsense(messages: list[bytes], complaint: str) -> None:
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as other, AsyncExitStack() as stack:
        if complaint == "too long":  # the end of the connection says it, too
            stack.enter_context(pytest.raises(trio.BrokenResourceError, match="dropped"))
        async with trio_ucx.connect(other._connection.remote_address) as connection:
            await connection.send(request(1, "wait"), tag=rpc.REQUESTS)
            await watched.started()
            for message in messages:
                await connection.send(message, tag=rpc.REQUESTS)
            assert complaint in (await connection.receive(tag=rpc.REQUESTS)).decode()
            with pytest.raises(trio.EndOfChannel):
                await connection.receive(tag=rpc.REQUESTS)
        assert watched.running == 0
        assert await other.call("add", a=1, b=2) == 3


async def test_ignores_late_cancellations() -> None:
    async with answering(rpc.METHODS) as address, trio_ucx.connect(address) as connection:
        await connection.send(b'{"cancel": 17}', tag=rpc.REQUESTS)
        await connection.send(request(1, values={"data": "here"}), tag=rpc.REQUESTS)
        assert json.loads(await connection.receive(tag=1))["values"] == {"result": "here"}


async def test_bounds_the_calls_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_CALLS", 3)
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as other:
        async with trio_ucx.connect(other._connection.remote_address) as connection:
            for number in range(1, 11):
                await connection.send(request(number, "wait"), tag=rpc.REQUESTS)
            await watched.started(3)
            for _ in range(20):
                assert await other.call("add", a=1, b=2) == 3  # of another client
        await watched.ended()
        assert watched.most == 3


async def test_client_waits_for_a_slot() -> None:
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as client:
        client._slots = trio.Semaphore(3)  # fewer than the server has
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(client.call, "wait")
            await watched.started(3)
            await nothing_happens()
            nursery.cancel_scope.cancel()
        assert await client.call("add", a=1, b=2) == 3
        assert watched.most == 3


async def test_tells_why_the_server_hung_up() -> None:
    async with client_of(rpc.METHODS, max_message_size=1000) as client:
        assert await client.call("echo", data=bytes(1000)) == bytes(1000)
        for _ in range(2):
            with pytest.raises(trio.BrokenResourceError, match=r"hung up: .*1001 bytes is too long"):
                await client.call("echo", data=bytes(1001))


@pytest.mark.parametrize("reply", [b"", b"[]", b'{"error": [1, 2]}', b'{"buffers": ["other"]}', bytes(70_000)])
async def test_malformed_reply(reply: bytes) -> None:
    with trio.fail_after(DEADLINE):
        async with client_of_ours() as (client, server):
            server.send_nowait(reply, tag=1)
            with pytest.raises(trio.BrokenResourceError, match=r"not a reply|not JSON|too long"):
                await client.call("anything")
            if len(reply) > 60_000:
                with pytest.raises(trio.BrokenResourceError, match="dropped"):
                    await server.aclose()


# ---- the end ----


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_server_dies(number: signal.Signals) -> None:
    lost: list[str] = []

    async def expect_loss(method: str, **arguments: Any) -> None:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await client.call(method, **arguments)
        assert isinstance(caught.value.__cause__, trio.BrokenResourceError | trio.EndOfChannel)
        lost.append(str(caught.value))

    with trio.fail_after(DEADLINE), program(RPC, "serve") as server:
        await server.wait_address()
        async with rpc.open_client(server.address) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(partial(expect_loss, "sleep", seconds=100))
                assert await client.call("add", a=1, b=2) == 3
                assert lost == []
                server.process.send_signal(number)
            await expect_loss("add", a=1, b=2)
        assert len(lost) == 21 and all(lost)
        assert await server.end() == (-number if number == signal.SIGKILL else 130, "")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_client_dies(number: signal.Signals) -> None:
    watched = Watched()
    async with answering({"wait": watched}) as (host, port):
        with program(RPC, "call", f"{host}:{port}", "wait") as client:
            await watched.started()
            client.process.send_signal(number)
            await watched.ended()
            assert await client.end() == (-number if number == signal.SIGKILL else 130, "")


async def test_closed_client() -> None:
    watched = Watched()

    async def call(client: Any) -> None:
        with pytest.raises(trio.ClosedResourceError, match="this client was closed"):
            await client.call("wait")

    async with answering({"wait": watched}) as address, trio.open_nursery() as nursery:
        async with rpc.open_client(address) as client:
            nursery.start_soon(call, client)
            await watched.started()
        with pytest.raises(trio.ClosedResourceError):
            await client.call("wait")
        await watched.ended()


@pytest.mark.full
async def test_command_line() -> None:
    async def letters(size: int) -> bytes:
        return b"a" * size

    async with answering({"letters": letters, **rpc.METHODS}) as (host, port):
        for arguments, output, complaint in [
            (["echo", '{"data": {"ü": [null]}}'], '{"\\u00fc": [null]}\n', ""),
            (["letters", '{"size": 100000}'], "a" * 100_000, ""),
            (["add"], "", "rpc: TypeError: add() missing 2 required positional arguments: 'a' and 'b'\n"),
            (["x\ny"], "", "rpc: LookupError: there is no method 'x\\ny'\n"),
        ]:
            with program(RPC, "call", f"{host}:{port}", *arguments) as client:
                assert await client.end() == (1 if complaint else 0, complaint)
                assert client.output == output
