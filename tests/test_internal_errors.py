"""Internal errors during deliveries, such as a lack of memory: they end the object concerned, never the Trio run."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import mmap
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import SANITIZED, assert_pinned, is_free, open_pair, open_peer, open_raw_pair, pattern, serving, until
from injected_faults import no_memory_to_record
from refused_memory import few_allocations
from remote import for_ucx

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link import receiving
from trio_ucx._util.live_handles import live_handles
from trio_ucx.testing import internals

# ---- no memory to record an operation ----

UNRECORDED = "no memory to record an operation that UCX has begun"


async def test_raw_send_that_is_not_recorded_keeps_its_buffer(worker: ucp.Worker) -> None:
    """It arrives: a MemoryError would say that it was not sent. So it is for an active message."""
    async with open_raw_pair(worker) as (client, _), worker.open_active_messages(3) as queue:
        with trio.fail_after(15):
            for send in (partial(client.tag_send, tag=5), partial(client.am_send, 3)):
                data, buffer = bytearray(pattern(LONG)), bytearray(LONG)
                with no_memory_to_record(internals(worker)), pytest.raises(RuntimeError, match=UNRECORDED):
                    await send(data)
                assert_pinned(data)
                if send.func == client.tag_send:
                    await worker.tag_receive(buffer, 5)
                else:
                    await (await queue.receive()).receive_into(buffer)
                assert buffer == pattern(LONG)
                await until(lambda data=data: is_free(data))
            assert not internals(worker).teardown.unrecorded


async def test_raw_receive_that_is_not_recorded_keeps_its_buffer(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with trio.fail_after(15):
            buffer = bytearray(LONG)
            with no_memory_to_record(internals(worker)), pytest.raises(RuntimeError, match=UNRECORDED):
                await worker.tag_receive(buffer, 5)
            assert_pinned(buffer)
            await client.tag_send(pattern(LONG), 5)
            await until(lambda: is_free(buffer))
            assert buffer == pattern(LONG)

            buffer = bytearray(LONG)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.tag_send, pattern(LONG), 6)
                message = await probed(worker, 6)
                with no_memory_to_record(internals(worker)), pytest.raises(RuntimeError, match=UNRECORDED):
                    await worker.tag_receive_message(message, buffer)
                with pytest.raises(ValueError, match="each can be received once"):
                    await worker.tag_receive_message(message, bytearray(LONG))
            await until(lambda: is_free(buffer))
            assert buffer == pattern(LONG)


async def probed(worker: ucp.Worker, tag: int) -> ucp.TagMessage:
    """A message that was taken off UCX's queue."""
    await worker.tag_wait(tag)
    message = worker.tag_probe(tag, remove=True)
    assert message is not None
    return message


async def test_send_that_is_not_recorded_keeps_its_buffer(worker: ucp.Worker) -> None:
    """It arrives, and the connection goes on."""
    async with open_pair(worker) as (client, server):
        with trio.fail_after(15):
            data = bytearray(pattern(LONG))
            with no_memory_to_record(internals(worker)), pytest.raises(RuntimeError, match=UNRECORDED):
                await client.send(data)
            assert_pinned(data)
            assert await server.receive() == pattern(LONG)
            await until(lambda: is_free(data))
            await client.send(b"next")
            assert await server.receive() == b"next"
            await client.aclose()


async def test_receive_that_is_not_recorded_keeps_its_buffer(worker: ucp.Worker) -> None:
    """A MemoryError would say that the message can be received again, or was dropped."""
    async with open_pair(worker) as (client, server):
        with trio.fail_after(15):
            buffer = bytearray(LONG)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, pattern(LONG))
                await until(lambda: server.statistics().held > 0)
                with no_memory_to_record(internals(worker)), pytest.raises(RuntimeError, match=UNRECORDED):
                    await server.receive_into(buffer)
                assert_pinned(buffer)
            await until(lambda: not internals(worker).teardown.unrecorded)
            assert bytes(buffer) == pattern(LONG)
            client.abort()
            server.abort()


# ---- no memory for a message ----

LONG = 300_000


@contextmanager
def short_of_memory(monkeypatch: pytest.MonkeyPatch, limit: int = LONG) -> Iterator[None]:
    """Makes allocating memory fail for messages of ``limit`` bytes and more."""

    def new_bytes(size: int) -> bytes:
        if size >= limit:
            raise MemoryError
        return make(size)

    make = receiving.new_bytes
    with monkeypatch.context() as patch:
        patch.setattr(receiving, "new_bytes", new_bytes)
        yield


async def test_receive_without_memory_fails_alone(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the length of the message, which is dropped; all others arrive."""
    async with open_pair(worker) as (client, server), open_pair(worker) as (other, other_server):
        with trio.fail_after(15):
            async with trio.open_nursery() as nursery:
                with short_of_memory(monkeypatch):
                    nursery.start_soon(partial(client.send, pattern(LONG), tag=7))
                    with pytest.raises(MemoryError, match=f"a message of {LONG} bytes: it was dropped"):
                        await server.receive(tag=7)
                    assert await _sent_and_received(client, server, 7, pattern(LONG - 1)) == pattern(LONG - 1)
                assert await _sent_and_received(client, server, 8, pattern(LONG)) == pattern(LONG)
                assert await _sent_and_received(other, other_server, 7, pattern(LONG)) == pattern(LONG)
            with pytest.raises(trio.BrokenResourceError, match=f"dropped a message of {LONG} bytes with tag 7"):
                await client.aclose()


async def test_a_message_without_memory_ends_its_handler_alone(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any client can send one."""

    async def handler(connection: trio_ucx.Connection) -> None:
        async for message in connection.messages():
            await connection.send(message[:1])

    async with serving(handler, worker) as server:
        with short_of_memory(monkeypatch), trio.fail_after(15):
            async with trio_ucx.connect(server.address, worker=worker) as other:
                client = await trio_ucx.connect(server.address, worker=worker).__aenter__()
                with pytest.raises(trio.BrokenResourceError):
                    await client.send(pattern(LONG))
                    await client.receive()
                client.abort()
                await other.send(b"x")
                assert await other.receive() == b"x"
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"no memory for a message of {LONG} bytes" in line and "handler" in line


async def test_receive_that_ucx_cannot_describe_drops_the_message(worker: ucp.Worker) -> None:
    """The C code has no memory for the list of buffers. The sender is told that the message was taken."""
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        with trio.fail_after(15):
            nursery.start_soon(partial(client.send, pattern(LONG), tag=7))
            await server.wait_message(tag=7)
            buffers = [bytearray(LONG // 2), bytearray(LONG // 2)]
            with few_allocations(1), pytest.raises(MemoryError, match=f"a message of {LONG} bytes: it was dropped$"):
                await server.receive_into(buffers, tag=7)
            buffers[0].append(0)  # it is not pinned
            assert await _sent_and_received(client, server, 7, pattern(LONG)) == pattern(LONG)
            await client.wait_buffers_released()
            with pytest.raises(trio.BrokenResourceError, match=f"dropped a message of {LONG} bytes with tag 7"):
                await client.aclose()


@pytest.mark.parametrize("ends", ["stays open", "closes", "closes its worker"])
async def test_message_that_cannot_be_dropped_for_want_of_memory_is_dropped_later(
    worker: ucp.Worker, transports: str, ends: str
) -> None:
    """The safety net tries again; at the latest, closing the worker does."""
    async with (
        ucp.open_worker(config={"TLS": transports}) as server_worker,
        open_pair(worker, server_worker) as (client, server),
        trio.open_nursery() as nursery,
    ):
        dispatch = internals(server_worker).tag_dispatch
        with trio.fail_after(15):
            nursery.start_soon(_send_to_one_who_may_go, client, pattern(LONG))
            await server.wait_message(tag=7)
            async with server_worker.open_request_group() as group:
                with few_allocations():
                    posted = _fill_with_operations(group)
                    with few_allocations(1), pytest.raises(MemoryError, match="dropped"):
                        await server.receive(tag=7)
                    assert len(dispatch.undiscarded) == 1
                    if ends != "stays open":
                        server.abort()
                for request in posted:
                    request.cancel()
            if ends != "closes its worker":
                await until(lambda: not dispatch.undiscarded)
            if ends == "stays open":
                await until(lambda: not internals(client).share.operations.pending)
                assert await _sent_and_received(client, server, 7, pattern(LONG)) == pattern(LONG)
    assert not dispatch.undiscarded


async def _send_to_one_who_may_go(connection: trio_ucx.Connection, data: bytes) -> None:
    with suppress(trio.BrokenResourceError):
        await connection.send(data, tag=7)


def _fill_with_operations(group: ucp.RequestGroup) -> list[ucp.Request]:
    """Posts receives until there is no room for another operation."""
    posted = []
    for _ in range(100_000):
        try:
            posted.append(group.tag_receive(bytearray(8), 1))
        except MemoryError:
            return posted
    raise AssertionError("there is always room")


async def test_receives_behind_one_without_memory(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives that wait behind it get the next messages; a user's buffer needs no memory."""
    async with open_pair(worker) as (client, server):
        results: list[object] = []
        buffer = bytearray(LONG)

        async def receive(task_status: trio.TaskStatus[None]) -> None:
            with trio.CancelScope():
                task_status.started()
                try:
                    results.append(await server.receive(tag=7))
                except MemoryError:
                    results.append(MemoryError)

        with trio.fail_after(15), short_of_memory(monkeypatch):
            async with trio.open_nursery() as nursery:
                await nursery.start(receive)
                await nursery.start(receive)
                nursery.start_soon(partial(server.receive_into, buffer, tag=8))
                await client.send(pattern(LONG), tag=7)
                await client.send(b"short", tag=7)
                await client.send(pattern(LONG), tag=8)
        assert sorted(results, key=str) == sorted([MemoryError, b"short"], key=str)
        assert buffer == pattern(LONG)


async def test_stream_without_memory_loses_nothing(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pattern(5 * 2**20)
    async with open_pair(worker) as (client, server):
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send_all, data)
                with short_of_memory(monkeypatch), pytest.raises(MemoryError, match="it can be read again"):
                    await server.receive_some()
                got = bytearray()
                while len(got) < len(data):
                    got += await server.receive_some()
        assert got == data


async def test_message_that_has_arrived_is_kept_until_there_is_memory(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX keeps the message meanwhile, even when its sender has closed."""
    size = 20_000
    async with open_pair(worker) as (client, server):
        with trio.fail_after(15):
            with short_of_memory(monkeypatch, size):
                client.send_nowait(pattern(size), tag=3)
                client.send_nowait(b"last", tag=4)
                await client.aclose()
                assert await server.receive(tag=4) == b"last"
            assert await server.receive(tag=3) == pattern(size)
            with pytest.raises(trio.EndOfChannel):
                await server.receive(tag=3)


@pytest.mark.skipif(SANITIZED == "address", reason="AddressSanitizer itself needs more address space")
@pytest.mark.parametrize("announced", [900, 1000])
async def test_process_short_of_memory(transports: str, announced: int) -> None:
    """A peer announces more bytes than the process may have (RLIMIT_AS): that receive fails, and others are served."""
    async with open_peer("limited", 700, transports=transports) as peer:
        [address, _] = await peer.hear()
        address = tuple(address)
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            async with (
                trio_ucx.connect(address, worker=worker) as good,
                await trio_ucx.connect(address, worker=worker).__aenter__() as bad,
            ):
                with trio.fail_after(20):
                    assert await _echo(good, b"before") == b"before"
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(partial(bad.send, _zeros(announced * 2**20), tag=7))
                        said = await peer.hear()
                        assert said["error"] == "MemoryError" and str(announced * 2**20) in said["text"]
                    assert await _echo(bad, b"the same connection") == b"the same connection"
                    assert await _echo(good, b"after") == b"after"
                    with pytest.raises(trio.BrokenResourceError, match="dropped"):
                        await bad.aclose()


def _zeros(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))  # pages that nobody touches


async def _echo(connection: trio_ucx.Connection, data: bytes) -> bytes:
    await connection.send(data, tag=7)
    return await connection.receive(tag=7)


async def _sent_and_received(
    sender: trio_ucx.Connection, receiver: trio_ucx.Connection, tag: int, data: bytes
) -> bytes:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(sender.send, data, tag=tag))
        return await receiver.receive(tag=tag)


# ---- an exception anywhere ----

#: UCX's own puts write to it without asking its owner, also when a fault has closed the memory meanwhile.
WORD = bytearray(8)

#: Modules whose functions run in deliveries, or are called by Trio's loop.
MODULES = [
    *(f"_rules.{name}" for name in ("byte_stream", "life", "wire")),
    *(f"_link.{name}" for name in ("closing", "link", "message_port", "native", "receiving", "sending")),
    *(
        f"_handshake.{name}"
        for name in ("control_sockets", "exchange", "peer_description", "handshake", "registry", "server")
    ),
    *(
        f"ucp.{name}"
        for name in (
            "_engine.listening",
            "_engine.links",
            "_engine.progress",
            "_memory.buffers",
            "chains._run",
            "_connecting",
            "_engine.dispatch",
            "_engine.engine",
            "_engine.stream_buffer",
            "_listener",
            "_engine.borrowed",
            "_engine.tag_dispatch",
            "_engine.endpoints_to_worker",
            "_engine.endpoint_core",
            "_engine.operations",
            "_engine.share",
            "_engine.waits",
            "_engine.posting",
        )
    ),
]
PACKAGE = str(Path(trio_ucx.__file__).parent)
#: Functions that Trio's loop calls, and with which deliveries begin: no caller of theirs could handle an error.
LOOP = {
    *("progress_and_deliver", "poll_and_deliver", "_look", "before_io_wait", "_abort_for_trio"),
    *("try_to_cancel", "_run", "run", "_wait", "call", "_serve", "_begin"),
}
#: Functions that contain and report errors: the test relies on them, so they are left out.
CONTAINERS = {
    *("internal_error", "_abort_for_trio", "try_to_cancel", "_fail_everything", "end_waits", "spawn", "run", "guard"),
}


class Injected(RuntimeError):
    pass


class NoMemory(MemoryError):
    pass


def functions(module: types.ModuleType) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """All functions and methods of a module: (where it is, its name there, the function)."""
    for name, thing in list(vars(module).items()):
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        where, members = (thing, dict(vars(thing))) if inspect.isclass(thing) else (module, {name: thing})
        for attribute, function in members.items():
            wanted = attribute == "__init__" or not attribute.startswith("__")
            plain = inspect.isfunction(function) and not inspect.isgeneratorfunction(function)
            if wanted and plain and attribute not in CONTAINERS:
                yield where, attribute, function


def called_by_the_loop() -> bool:
    """Whether the caller's caller runs where its exceptions would reach Trio, rather than in a user's task."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            if frame.f_code.co_name in CONTAINERS - LOOP:
                return False
            if frame.f_code.co_name in LOOP:
                return True
        frame = frame.f_back
    return False


class Fault:
    """Makes one function raise at one of its calls."""

    def __init__(self, function: Callable[..., Any], error: type[Exception], call: int) -> None:
        self.error = error
        self.left = call
        self.armed = False
        self.raised = False
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def instead(*args: Any, **kwargs: Any) -> Any:
                self.count()
                return await function(*args, **kwargs)

        else:

            @wraps(function)
            def instead(*args: Any, **kwargs: Any) -> Any:
                self.count()
                return function(*args, **kwargs)

        self.instead = instead

    def count(self) -> None:
        if self.armed and not self.raised and called_by_the_loop():
            self.left -= 1
            if self.left == 0:
                self.raised = True
                raise self.error("injected")


@contextmanager
def patched(where: Any, name: str, function: Callable[..., Any], fault: Fault) -> Iterator[None]:
    """With the function replaced, wherever a module has it."""
    with ExitStack() as stack:
        places = [where]
        if inspect.ismodule(where):
            places = [m for m in list(sys.modules.values()) if getattr(m, "__name__", "").startswith("trio_ucx")]
        for place in places:
            if vars(place).get(name) is function:
                setattr(place, name, fault.instead)
                stack.callback(setattr, place, name, function)
        yield


async def busy_connection(worker: ucp.Worker, address: Any, accept: Callable[[], Any]) -> None:
    """Uses everything that a connection can do."""
    async with trio_ucx.connect(address, worker=worker, window=16384, connect_timeout=60) as client:
        server = await accept()
        try:
            client.send_nowait(b"first", tag=1)
            for _ in range(8):
                client.send_nowait(b"small", tag=2)  # held back, goes as a batch
            await trio.sleep(0.001)  # Trio's loop sends it
            assert await server.receive(tag=1) == b"first"
            assert await server.receive(tag=2) == b"small"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.send, pattern(5000), tag=3))
                nursery.start_soon(partial(client.send, pattern(200_000), tag=4))
                nursery.start_soon(client.send_all, pattern(100_000))
                for _ in range(4):
                    nursery.start_soon(partial(client.send, pattern(7000), tag=5))  # more than the window
                with trio.move_on_after(0.005):
                    await server.receive(tag=6)
                with trio.move_on_after(0.002) as cancelled:
                    await server.receive_into(bytearray(300_000), tag=4)
                assert await server.receive(tag=3) == pattern(5000)
                if cancelled.cancelled_caught:
                    assert await server.receive(tag=4) == pattern(200_000)
                for _ in range(4):
                    await server.receive(tag=5)
                count = 0
                while count < 100_000:
                    data = await server.receive_some()
                    assert data
                    count += len(data)
            async with worker.open_request_group() as group:
                group.receive_into(server, bytearray(100_000), tag=9)
                group.send(client, pattern(100_000), tag=9)
            server.send_nowait(b"unread")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.aclose)
                nursery.start_soon(server.aclose)
        finally:
            server.abort()


async def aborted_connection(worker: ucp.Worker, address: Any, accept: Callable[[], Any]) -> None:
    client = await trio_ucx.connect(address, worker=worker, connect_timeout=60).__aenter__()
    server = await accept()
    try:
        client.send_nowait(b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_the_end, client.receive)
            nursery.start_soon(_until_the_end, partial(server.send, bytes(100_000), tag=1))
            await trio.sleep(0.002)
            server.abort()
    finally:
        client.abort()
        server.abort()


async def _until_the_end(function: Callable[[], Any]) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await function()


async def raw_operations(worker: ucp.Worker) -> None:
    """Uses everything that raw workers and endpoints can do."""
    async with open_raw_pair(worker) as (client, server):
        with worker.open_active_messages(3) as queue:
            async with trio.open_nursery() as nursery:
                for size in (10, 100_000):
                    nursery.start_soon(client.am_send, 3, pattern(size))
                    with await queue.receive() as message:
                        assert await message.receive() == pattern(size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stream_send, pattern(50_000))
            await server.stream_receive(bytearray(50_000), exact=True)
            nursery.start_soon(client.tag_send, pattern(100_000), 5)
            await worker.tag_receive(bytearray(100_000), 5)
            with trio.move_on_after(0.002):
                await worker.tag_receive(bytearray(10), 6)
        with worker.context.allocate(4096) as memory, client.attach(memory.descriptor) as remote:
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(remote.fetch_add, 1, 0)
            await remote.put(bytes(100), 8)
            await remote.flush()
            assert await remote.get(0, 8) == (10).to_bytes(8, "little")
            chain = worker.new_chain()
            got = chain.get(remote, offset=0, length=8)
            chain.put(remote, b"data", offset=64, when=got.u64(0) == 10)
            await chain.run()
            chain.close()
        with worker.context.register(WORD) as memory, client.attach(for_ucx(memory.descriptor)) as remote:
            await remote.put(bytes(8))
            await remote.get()


#: Exceptions that a user's task may get after an internal error.
EXPECTED = (
    *(OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel, trio.TooSlowError),
    *(Injected, MemoryError, trio_ucx.UCXError, ucp.RequestCancelled),
)
FEATURES = ucp.Feature.ALL


def _is_not_recorded(error: BaseException) -> bool:
    """True if this is what ``Engine.adopt`` raises instead of the injected MemoryError."""
    return "no memory to record" in str(error) and isinstance(error.__cause__, NoMemory)


async def scenario(transports: str, arm: Callable[[bool], None], raised: Callable[[], bool]) -> None:
    """While a fault is armed, uses everything on one worker; an older connection and another worker must not suffer.

    The fault may also hit that other worker, which Trio's loop calls as well: then the first must not suffer.
    """
    async with (
        ucp.open_worker(config={"TLS": transports}, features=FEATURES) as worker,
        ucp.open_worker(config={"TLS": "tcp"}) as apart,
        open_pair(apart) as (far, far_server),
        open_pair(worker) as (near, near_server),
    ):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, connect_timeout=60)

        async def give_up(act: trio.CancelScope) -> None:
            """A task may wait for ever, but only after the fault."""
            await until(raised)
            await trio.sleep(1)
            act.cancel()

        arm(True)
        for act in (
            lambda: busy_connection(worker, listener.address, listener.accept),
            lambda: aborted_connection(worker, listener.address, listener.accept),
            lambda: raw_operations(worker),
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(give_up, nursery.cancel_scope)
                try:
                    await act()
                except* EXPECTED:
                    assert raised()
                except* RuntimeError as group:
                    assert raised()
                    _, others = group.split(_is_not_recorded)
                    assert others is None, others
                nursery.cancel_scope.cancel()
        arm(False)
        with trio.fail_after(15):
            assert None in (internals(worker).broken, internals(apart).broken)
            await _works_or_says_why(apart, far, far_server)
            await _works_or_says_why(worker, near, near_server)
            if internals(worker).broken is None:
                await _is_served(listener, worker)
                await listener.aclose()


async def _works_or_says_why(worker: ucp.Worker, client: trio_ucx.Connection, server: trio_ucx.Connection) -> None:
    if internals(worker).broken is None:
        assert await _sent_and_received(client, server, 1, b"word") == b"word"
    else:
        assert internals(worker).broken.args == ("injected",)
        for connection in (client, server):
            with pytest.raises(trio.BrokenResourceError) as broken:
                await connection.receive()
            assert broken.value.__cause__ is not None


async def _is_served(listener: trio_ucx.Listener, worker: ucp.Worker) -> None:
    """A client that connects now is served."""
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            while True:
                connection = await listener.accept()  # perhaps one that has gone meanwhile
                nursery.start_soon(_echo_once, connection)

        nursery.start_soon(serve)
        async with trio_ucx.connect(listener.address, worker=worker) as client:
            assert await _echo(client, b"new") == b"new"
        nursery.cancel_scope.cancel()


async def _echo_once(connection: trio_ucx.Connection) -> None:
    with suppress(trio.BrokenResourceError, trio.EndOfChannel):
        async with connection:
            await connection.send(await connection.receive(tag=7), tag=7)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of objects that faults leave unclosed, and the log, whose records would keep them alive."""
    logger, hook = logging.getLogger("trio_ucx"), sys.unraisablehook
    logger.disabled, sys.unraisablehook = True, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            gc.collect()
    finally:
        logger.disabled, sys.unraisablehook = False, hook
        live_handles._counts.clear()  # what a fault hit was not always counted


@cache
def called(transports: str) -> dict[tuple[str, str], int]:
    """How often each function is called where no caller could handle its errors, by module and qualified name."""
    counters: list[tuple[tuple[str, str], Fault]] = []
    with ExitStack() as stack:
        for name in MODULES:
            module = importlib.import_module(f"trio_ucx.{name}")
            for where, attribute, function in functions(module):
                counters.append(((name, function.__qualname__), Fault(function, Injected, NEVER)))
                stack.enter_context(patched(where, attribute, function, counters[-1][1]))
        stack.enter_context(quiet())

        def arm(armed: bool) -> None:
            for _, counter in counters:
                counter.armed = armed

        for _ in range(5):  # it may depend on the time
            trio.run(scenario, transports, arm, lambda: False)
    return {key: NEVER - counter.left for key, counter in counters}


NEVER = 1 << 60
#: The transports, at which call of each function the fault happens, and what it raises.
FAULTS = [("tcp", 1, NoMemory), ("tcp,sm,self", 2, Injected)]


@pytest.mark.cut_off
@pytest.mark.sample(3)
@pytest.mark.parametrize(("transports", "call", "error"), FAULTS)
@pytest.mark.parametrize("name", MODULES)
def test_exception_anywhere(name: str, transports: str, call: int, error: type[Exception]) -> None:
    """Each function raises once: the Trio run goes on, and other connections work."""
    raised = False
    for where, attribute, function in functions(importlib.import_module(f"trio_ucx.{name}")):
        if called(transports)[name, function.__qualname__] < call:
            continue
        for _ in range(5):  # whether Trio's loop calls a function may depend on the time
            fault = Fault(function, error, call)
            with patched(where, attribute, function, fault), quiet():
                try:
                    trio.run(scenario, transports, partial(setattr, fault, "armed"), lambda fault=fault: fault.raised)
                except BaseException as failure:
                    failure.add_note(f"{function.__qualname__}, call {call}")
                    raise
            if fault.raised:
                break
        raised = raised or fault.raised
    if call == 1:
        assert raised, "none of these functions was called"
