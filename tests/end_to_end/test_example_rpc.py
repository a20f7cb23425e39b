"""examples/rpc.py."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy
import pytest
import trio
from helpers import assert_transports, pattern, until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, load, program, run_here

RPC = EXAMPLES / "rpc.py"
rpc: Any = load(RPC)


@pytest.fixture(params=["tcp,sm,self"])
def transports(request: pytest.FixtureRequest) -> str:
    """One kind will do: the transports have tests of their own, and processes take their time to start."""
    value: str = request.param
    return value


@asynccontextmanager
async def serving(methods: dict[str, Any], **options: Any) -> AsyncIterator[tuple[str, int]]:
    """The address of a server in this process. Whatever is done with it is bounded."""
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, partial(rpc.answer_calls, methods), 0, host="127.0.0.1", **options)
            [listener] = await nursery.start(serve)
            yield listener.address
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def client_of(methods: dict[str, Any], **options: Any) -> AsyncIterator[Any]:
    async with serving(methods, **options) as address, rpc.open_client(address) as client:
        yield client


class Watched:
    """A method that waits to be cancelled."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.started = trio.Event()
        self.cancelled = trio.Event()

    async def __call__(self, **arguments: object) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.started.set()
        try:
            await trio.sleep_forever()
        finally:
            self.running -= 1
            if not self.running:
                self.cancelled.set()


def request(number: Any = 1, method: Any = "echo", **parts: Any) -> bytes:
    head = {"call": number, "method": method, "timeout": None, "values": {}, "buffers": []}
    return json.dumps(head | parts).encode()


# ---- what arrives ----


async def test_rpc_values(over: str) -> None:
    async with client_of(rpc.METHODS) as client:
        assert_transports(client._connection, over)
        assert await client.call("add", a=1, b=2) == 3
        for value in [None, True, -1, 1.5, "ünï\n\0", [], [1, [2]], {"a": {"$": None}}, 2**80, "x" * 60_000]:
            assert await client.call("echo", data=value) == value


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [0, 1, 1000, 65_535, 65_536, 16_000_001])
async def test_rpc_buffers(over: str, size: int) -> None:
    data = pattern(size)
    with program(RPC, "serve", transports=over) as server:
        await server.wait_address()
        with trio.fail_after(DEADLINE):
            async with rpc.open_client(server.address) as client:
                assert await client.call("echo", data=data) == data
                assert await client.call("echo", data=bytearray(data)) == data
                assert await client.call("add", a=1, b=2) == 3


async def test_rpc_arrays_and_values_mixed(over: str) -> None:
    async def check(values: list[int], scale: int, one: bytes, two: bytes, three: bytes) -> bytes:
        array = numpy.frombuffer(one, numpy.float64).reshape(100, 200)
        assert bytes(two) == b"two" and three == b""
        return (array * scale + sum(values)).astype(numpy.float32)  # type: ignore[return-value]

    array = numpy.arange(20_000, dtype=numpy.float64).reshape(100, 200)
    async with client_of({"check": check}) as client:
        result = await client.call("check", two=memoryview(b"two"), values=[1, 2], one=array, scale=2, three=b"")
    assert numpy.array_equal(numpy.frombuffer(result, numpy.float32).reshape(100, 200), array * 2 + 3)


async def test_rpc_matches_replies_that_come_out_of_order(over: str) -> None:
    may_answer = [trio.Event() for _ in range(100)]
    all_others = trio.Event()
    waiting = 0
    finished: list[int] = []

    async def take_turn(number: int, data: bytes) -> bytes:
        nonlocal waiting
        if number < 99:
            waiting += 1
            if waiting == 99:
                all_others.set()
            await may_answer[number + 1].wait()
            may_answer[number].set()
        return data

    async def check(client: Any, number: int) -> None:
        data = pattern(number * 1500, seed=number)
        assert await client.call("take_turn", number=number, data=data) == data
        finished.append(number)

    async with client_of({"take_turn": take_turn}) as client, trio.open_nursery() as nursery:
        for number in range(99):
            nursery.start_soon(check, client, number)
        await all_others.wait()
        await check(client, 99)
        assert finished == [99], "asked last, answered first"
        may_answer[99].set()
    assert sorted(finished) == list(range(100))


# ---- errors ----


async def fail() -> None:
    raise ZeroDivisionError("it went\nwrong: \ud800 " + "🚀" * 2000)


async def speechless() -> None:
    raise ValueError


async def fail_in_group() -> None:
    async with trio.open_nursery():
        raise KeyError("inside")


async def give(what: str) -> Any:
    return {"object": object(), "json": "x" * 2**16, "strided": numpy.zeros((4, 4))[:, 0], "set": {1}}[what]


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "text"),
    [
        ("fail", {}, "ZeroDivisionError", "it went\nwrong: \ud800 🚀🚀"),
        ("speechless", {}, "ValueError", ""),
        ("fail_in_group", {}, "ExceptionGroup", ""),
        ("nothing", {}, "LookupError", "there is no method 'nothing'"),
        ("__class__", {}, "LookupError", "there is no method '__class__'"),
        ("fail", {"unexpected": 1}, "TypeError", "unexpected"),
        ("give", {}, "TypeError", "what"),
        ("give", {"what": "object"}, "TypeError", "JSON"),
        ("give", {"what": "set"}, "TypeError", "JSON"),
        ("give", {"what": "json"}, "ValueError", "use buffers"),
        ("give", {"what": "strided"}, "ValueError", "not contiguous"),
    ],
)
async def test_rpc_errors(method: str, arguments: dict[str, Any], kind: str, text: str) -> None:
    methods = {"fail": fail, "speechless": speechless, "fail_in_group": fail_in_group, "give": give, **rpc.METHODS}
    async with client_of(methods) as client:
        with pytest.raises(rpc.RpcError) as caught:
            await client.call(method, **arguments)
        assert caught.value.args[0] == kind and text in caught.value.args[1]
        assert str(caught.value) == f"{kind}: {caught.value.args[1]}"
        with pytest.raises(rpc.RpcError):
            await client.call(method, **arguments, data=bytes(10**6))  # received all the same
        assert await client.call("echo", data="next") == "next"
        assert client._connection.statistics().held == 0


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (object(), TypeError),
        ("x" * 2**16, ValueError),
        (numpy.zeros((4, 4))[:, 0], ValueError),
        (numpy.zeros((4, 4), order="F"), ValueError),
    ],
)
async def test_rpc_arguments_that_cannot_be_sent(
    argument: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_CALLS", 2)
    async with client_of(rpc.METHODS) as client:
        for _ in range(3):  # more often than there are slots
            with pytest.raises(error):
                await client.call("echo", data=argument)
        assert await client.call("echo", data=b"next") == b"next"


# ---- cancellation and deadlines ----


@pytest.mark.parametrize("size", [0, 10**6])
async def test_rpc_cancelled(over: str, size: int) -> None:
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.call, "wait", data=bytes(size)))
            await watched.started.wait()
            assert watched.running == 1
            nursery.cancel_scope.cancel()
        with trio.fail_after(15):
            await watched.cancelled.wait()
        assert await client.call("add", a=1, b=2) == 3


async def test_rpc_cancelled_alone(over: str) -> None:
    """One of two calls of the same method, in the middle of others."""
    watched, other = Watched(), Watched()
    async with client_of({"wait": watched, "other": other, **rpc.METHODS}) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.call, "other")
        await other.started.wait()
        async with trio.open_nursery() as inner:
            inner.start_soon(client.call, "wait")
            await watched.started.wait()
            inner.cancel_scope.cancel()
        await watched.cancelled.wait()
        assert other.running == 1
        assert await client.call("add", a=1, b=2) == 3
        nursery.cancel_scope.cancel()


async def test_rpc_deadline_goes_along() -> None:
    with trio.fail_after(DEADLINE):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        async with listener, rpc.open_client(listener.address) as client, await listener.accept() as server:

            async def timeout_of(deadline: float) -> Any:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        scope.deadline = trio.current_time() + deadline
                        nursery.start_soon(client.call, "wait")
                        header = json.loads(await server.receive(rpc.REQUESTS))
                        scope.cancel()
                assert json.loads(await server.receive(rpc.REQUESTS)) == {"cancel": header["call"]}
                await server.send(b'{"error": ["Cancelled", ""]}', header["call"])
                return header["timeout"]

            assert 8 < await timeout_of(20) <= 20
            assert await timeout_of(float("inf")) is not None  # that of this test
            assert 5 < await timeout_of(float("inf")) <= DEADLINE


@pytest.mark.parametrize("timeout", [0, 0.1, 1])
async def test_rpc_deadline_is_kept_by_the_server(timeout: float) -> None:
    watched = Watched()
    async with serving({"wait": watched}) as address, trio_ucx.connect(address) as connection:
        await connection.send(request(7, "wait", timeout=timeout), rpc.REQUESTS)
        kind, text = json.loads(await connection.receive(7))["error"]
        assert kind == "TooSlowError" and "deadline" in text
        assert watched.running == 0


async def test_rpc_without_a_deadline() -> None:
    header: dict[str, Any] = {}

    async def serve(listener: trio_ucx.Listener) -> None:
        async with await listener.accept() as server:
            header.update(json.loads(await server.receive(rpc.REQUESTS)))
            await server.send(b'{"values": {"result": null}}', header["call"])
            with pytest.raises(trio.EndOfChannel):
                await server.wait_message(rpc.REQUESTS)

    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        async with rpc.open_client(listener.address) as client:
            assert await client.call("anything") is None  # bounded by pytest's timeout only
    assert header["timeout"] is None


async def test_rpc_cancellations_leave_nothing(over: str) -> None:
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
            if number % 5 == 0:  # some are cancelled for sure, some are not
                patience, pause = chance.choice([0.001, 0.01, 0.05]), 1000
            elif number % 5 == 1:
                patience = math.inf
            with trio.move_on_after(patience) as scope:
                assert await client.call("echo", data=data, pause=pause) == data
            cancelled += scope.cancelled_caught

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio_ucx.serve_ucx, serve, 0, host="127.0.0.1"))
            async with rpc.open_client(listener.address) as client:
                async with trio.open_nursery() as workers:
                    for seed in range(16):
                        workers.start_soon(work, client, seed)
                for _ in range(rpc.MAX_CALLS):  # until the server has answered everything
                    await client._slots.acquire()
                assert 16 * 5 <= cancelled <= 16 * 20
                [server] = connections
                for connection in (server, client._connection):
                    await until(lambda: not connection.statistics().left_over_operations)  # noqa: B023
                assert server.statistics().held == 0
                assert client._connection.statistics().held == 0
            nursery.cancel_scope.cancel()


# ---- a client that is not to be trusted ----


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([b""], "not JSON"),
        ([b"{"], "not JSON"),
        ([b"\xff\xfe"], "not JSON"),
        ([b"[" * 60_000], "not JSON"),
        ([b"9" * 60_000], "not JSON"),
        ([b"\0" * 70_000], "too long"),
        ([b"[]"], "neither"),
        ([b"{}"], "neither"),
        ([b'{"cancel": "1"}'], "neither"),
        ([request(0)], "neither"),
        ([request(-1)], "neither"),
        ([request(2**31 - 1)], "neither"),
        ([request("1")], "neither"),
        ([request(method=None)], "neither"),
        ([request(timeout=-1)], "neither"),
        ([request(timeout=float("nan"))], "neither"),
        ([request(timeout=float("inf"))], "neither"),
        ([request(timeout=10**400)], "neither"),
        ([request(timeout="1")], "neither"),
        ([request(values=[])], "neither"),
        ([request(buffers={})], "neither"),
        ([request(buffers=[1])], "neither"),
        ([request(3, "wait"), request(3, "wait")], "neither"),
    ],
)
async def test_rpc_hangs_up_after_nonsense(messages: list[bytes], complaint: str) -> None:
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as other:
        address = other._connection.remote_address
        async with trio_ucx.connect(address) as connection:
            await connection.send(request(1, "wait"), rpc.REQUESTS)
            await watched.started.wait()
            for message in messages:
                await connection.send(message, rpc.REQUESTS)
            assert complaint in (await connection.receive(rpc.REQUESTS)).decode()
            with pytest.raises(trio.EndOfChannel):
                await connection.receive(rpc.REQUESTS)
        assert watched.running == 0
        assert await other.call("add", a=1, b=2) == 3


async def test_rpc_ignores_late_cancellations() -> None:
    async with serving(rpc.METHODS) as address, trio_ucx.connect(address) as connection:
        await connection.send(b'{"cancel": 17}', rpc.REQUESTS)
        await connection.send(request(1, values={"data": "here"}), rpc.REQUESTS)
        assert json.loads(await connection.receive(1))["values"] == {"result": "here"}


async def test_rpc_bounds_the_calls_of_a_client(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_CALLS", 3)
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as other:
        async with trio_ucx.connect(other._connection.remote_address) as connection:
            for number in range(1, 11):
                await connection.send(request(number, "wait"), rpc.REQUESTS)
            await until(lambda: watched.running >= 3)
            for _ in range(20):
                assert await other.call("add", a=1, b=2) == 3  # of another client
            assert watched.running == 3
        await watched.cancelled.wait()
        assert watched.most == 3


async def test_rpc_client_waits_for_a_slot(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_CALLS", 3)
    watched = Watched()
    async with client_of({"wait": watched, **rpc.METHODS}) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client.call, "wait")
            await until(lambda: watched.running >= 3)
            with trio.move_on_after(0.2) as scope:
                await client.call("add", a=1, b=2)
            assert scope.cancelled_caught
            nursery.cancel_scope.cancel()
        assert await client.call("add", a=1, b=2) == 3
        assert watched.most == 3


async def test_rpc_tells_why_the_server_hung_up() -> None:
    async with client_of(rpc.METHODS, max_message_size=1000) as client:
        assert await client.call("echo", data=bytes(1000)) == bytes(1000)
        for _ in range(2):
            with pytest.raises(trio.BrokenResourceError, match=r"hung up: .*1001 bytes is too long"):
                await client.call("echo", data=bytes(1001))


@pytest.mark.parametrize(
    "reply",
    [b"", b"[]", b"{}", b'{"error": "text"}', b'{"error": [1, 2]}', b'{"buffers": ["other"]}', bytes(70_000)],
)
async def test_rpc_malformed_reply(reply: bytes) -> None:
    with trio.fail_after(DEADLINE):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        async with listener, rpc.open_client(listener.address) as client, await listener.accept() as server:
            server.send_nowait(reply, 1)
            with pytest.raises(trio.BrokenResourceError, match=r"not a reply|not JSON|too long"):
                await client.call("anything")


# ---- the end ----


async def expect_loss(client: Any, ended: list[str], method: str, **arguments: Any) -> None:
    with pytest.raises(trio.BrokenResourceError) as caught:
        await client.call(method, **arguments)
    assert isinstance(caught.value.__cause__, trio.BrokenResourceError | trio.EndOfChannel)
    ended.append(str(caught.value))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_rpc_server_dies(over: str, number: signal.Signals) -> None:
    ended: list[str] = []
    with program(RPC, "serve", transports=over) as server:
        await server.wait_address()
        with trio.fail_after(DEADLINE):
            async with rpc.open_client(server.address) as client:
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(partial(expect_loss, client, ended, "sleep", seconds=100))
                    assert await client.call("add", a=1, b=2) == 3
                    assert ended == []
                    server.process.send_signal(number)
                await expect_loss(client, ended, "add", a=1, b=2)
        assert len(ended) == 21 and all(ended)
        assert await server.end() == (-number if number == signal.SIGKILL else 130, "")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_rpc_client_dies(over: str, number: signal.Signals) -> None:
    watched = Watched()
    async with serving({"wait": watched, **rpc.METHODS}) as (host, port):
        with program(RPC, "call", f"{host}:{port}", "wait", transports=over) as client:
            await watched.started.wait()
            client.process.send_signal(number)
            await watched.cancelled.wait()
            assert await client.end() == (-number if number == signal.SIGKILL else 130, "")
        with program(RPC, "call", f"{host}:{port}", "add", '{"a": 1, "b": 2}', transports=over) as client:
            assert await client.end() == (0, "")
            assert client.output == "3\n"


async def test_rpc_client_leaves(over: str) -> None:
    watched = Watched()
    async with serving({"wait": watched}) as address:
        async with trio_ucx.connect(address) as connection:
            await connection.send(request(1, "wait"), rpc.REQUESTS)
            await watched.started.wait()
        await watched.cancelled.wait()


async def test_rpc_closed_client() -> None:
    watched = Watched()
    ended: list[str] = []

    async def call(client: Any) -> None:
        with pytest.raises(trio.ClosedResourceError, match="this client was closed"):
            await client.call("wait")
        ended.append("")

    async with serving({"wait": watched}) as address, trio.open_nursery() as nursery:
        async with rpc.open_client(address) as client:
            nursery.start_soon(call, client)
            await watched.started.wait()
        with pytest.raises(trio.ClosedResourceError):
            await client.call("wait")
        await watched.cancelled.wait()
    assert ended == [""]


# ---- the command line ----


@pytest.mark.full
async def test_rpc_command_line(over: str) -> None:
    with program(RPC, "serve", "--listen", "127.0.0.1:0", transports=over) as server:
        await server.wait_address()
        for arguments, output, complaint in [
            (["add", '{"a": 1, "b": 2.5}'], "3.5\n", ""),
            (["echo", '{"data": {"ü": [null]}}'], '{"\\u00fc": [null]}\n', ""),
            (["sleep", '{"seconds": 0}'], '"slept for 0 seconds"\n', ""),
            (["add"], "", "rpc: TypeError: add() missing 2 required positional arguments: 'a' and 'b'\n"),
            (["x\ny"], "", "rpc: LookupError: there is no method 'x\\ny'\n"),
        ]:
            with program(RPC, "call", server.address, *arguments, transports=over) as client:
                assert await client.end() == (1 if complaint else 0, complaint)
                assert client.output == output
        server.process.send_signal(signal.SIGINT)
        assert await server.end() == (130, "")


@pytest.mark.full
async def test_rpc_prints_buffers_as_they_are() -> None:
    async def letters(size: int) -> bytes:
        return b"a" * size

    async with serving({"letters": letters}) as (host, port):
        with program(RPC, "call", f"{host}:{port}", "letters", '{"size": 100000}') as client:
            assert await client.end() == (0, "")
            assert client.output == "a" * 100_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["call", "127.0.0.1:9", "add"], "127.0.0.1:9"),
        (["call", "no.such.host.invalid:9", "add"], "[Errno "),
        (["serve", "--listen", "192.0.2.1:0"], "192.0.2.1"),
    ],
)
def test_rpc_complains_in_one_line(arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(rpc, *arguments) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("rpc: ") and errors.count("\n") == 1
    assert complaint in errors


@pytest.mark.parametrize(
    "arguments",
    [["call", "nonsense", "add"], ["serve", "--listen", "host:-1"]]
    + [["call", "127.0.0.1:9", "add", bad] for bad in ["", "{", "[]", "1", '{"a"}']],
)
def test_rpc_refuses_bad_arguments(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(rpc, *arguments) == 2
    assert capfd.readouterr().err.startswith("usage: ")
