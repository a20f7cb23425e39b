"""Every public async function is a checkpoint on every successful call. They are found by introspection.

(Leaving a block by an exception is no successful call: there a cancellation must not take the exception's place.)
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
import trio
import trio.testing
from helpers import open_listener, open_raw_listener, open_raw_pair, until

import trio_ucx
import trio_ucx.anyio
from trio_ucx import testing, ucp
from trio_ucx.testing import open_connection_pair
from trio_ucx.ucp import blocks, chains

assert_checkpoints = trio.testing.assert_checkpoints


def public_classes(module: types.ModuleType) -> Iterator[tuple[str, type]]:
    names = getattr(module, "__all__", None) or [
        name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__
    ]
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            yield name, thing


def gives_context_manager(function: Any) -> bool:
    if inspect.isasyncgenfunction(inspect.unwrap(function)):
        return True
    if not function.__module__.startswith("trio_ucx"):
        return False  # inherited
    names = {
        **vars(blocks),
        **vars(chains),
        **vars(ucp),
        **vars(trio_ucx),
        **inspect.unwrap(function).__globals__,
    }  # some are imported for type checkers only
    returned = eval(str(function.__annotations__.get("return")), names)
    returned = typing.get_origin(returned) or returned
    return (
        inspect.isclass(returned)
        and hasattr(returned, "__aenter__")
        and not issubclass(returned, trio.abc.AsyncResource)
    )


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or gives_context_manager(function)


def find() -> set[str]:
    """``Class.method`` and ``function`` of all that is public and awaited, entered, or iterated over."""
    found = set()
    for module in (trio_ucx, ucp, blocks, chains, testing, trio_ucx.anyio):
        for name in getattr(module, "__all__", ()):
            if inspect.isfunction(getattr(module, name)) and is_async(getattr(module, name)):
                found.add(name)
        for name, cls in public_classes(module):
            for member in dir(cls):
                value = inspect.getattr_static(cls, member)
                private = member.startswith("_") and not member.startswith("__")
                if inspect.isfunction(value) and not private and (is_async(value) or member == "__await__"):
                    found.add(f"{name}.{member}")
    return found


@attrs.define
class Stage:
    """What the calls need."""

    worker: ucp.Worker
    client: trio_ucx.Connection
    server: trio_ucx.Connection
    listener: trio_ucx.Listener
    raw_client: ucp.Endpoint
    raw_server: ucp.Endpoint
    raw_listener: ucp.RawListener


@asynccontextmanager
async def set_stage(worker: ucp.Worker) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        client, server = await stack.enter_async_context(open_connection_pair(host="127.0.0.1", worker=worker))
        raw_client, raw_server = await stack.enter_async_context(open_raw_pair(worker))
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        stack.push_async_callback(listener.aclose)
        raw_listener = await open_raw_listener(worker)
        stack.push_async_callback(raw_listener.aclose)
        yield Stage(worker, client, server, listener, raw_client, raw_server, raw_listener)


Call = Callable[[Stage], Awaitable[None]]
CALLS: dict[str, list[Call]] = {}


def calls(*names: str) -> Callable[[Call], Call]:
    def register(call: Call) -> Call:
        for name in names:
            CALLS.setdefault(name, []).append(call)
        return call

    return register


async def arrived(stage: Stage, count: int) -> None:
    await until(lambda: stage.server.statistics().messages_received >= count)


async def together(first: Callable[[], Awaitable[Any]], second: Callable[[], Awaitable[Any]]) -> None:
    """``first`` in this task, under the assertion, while another begins ``second`` later."""

    async def later() -> None:
        await trio.testing.wait_all_tasks_blocked(0.01)
        await second()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later)
        with assert_checkpoints():
            await first()


async def enter_and_exit(make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    manager = make()
    with assert_checkpoints():
        await manager.__aenter__()
    with assert_checkpoints():
        await manager.__aexit__(None, None, None)


# ---- opening ----


@calls("connect", "Connecting.__aenter__", "Connecting.__aexit__")
async def use_connect(stage: Stage) -> None:
    for addresses in stage.listener.address, ["unix:/no/such", stage.listener.address]:
        await enter_and_exit(lambda addresses=addresses: trio_ucx.connect(addresses, worker=stage.worker))
        (await stage.listener.accept()).abort()


@calls("Connecting.__await__")
async def use_connecting_await(stage: Stage) -> None:
    with assert_checkpoints():
        connection = await trio_ucx.connect(stage.listener.address, worker=stage.worker)
    connection.abort()
    with assert_checkpoints():
        with contextlib.suppress(OSError):
            await trio_ucx.connect("unix:/no/such", worker=stage.worker)


@calls("open_ucx_stream")
async def use_open_ucx_stream(stage: Stage) -> None:
    with assert_checkpoints():
        connection = await trio_ucx.open_ucx_stream(*stage.listener.address, worker=stage.worker)
    connection.abort()
    with assert_checkpoints():
        connection = await trio_ucx.open_ucx_stream(
            *stage.listener.address, worker=stage.worker, local_address="127.0.0.1"
        )
    connection.abort()


@calls("open_ucx_listeners", "Listener.aclose", "Listener.__aenter__", "Listener.__aexit__")
async def use_open_ucx_listeners(stage: Stage) -> None:
    with assert_checkpoints():
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=stage.worker)
    for _ in range(2):
        with assert_checkpoints():
            await listener.aclose()
    async with open_listener(stage.worker) as listener:
        # Entering does nothing: Trio's own AsyncResource has no checkpoint there, either.
        manager = listener.__aexit__(None, None, None)
        with assert_checkpoints():
            await manager


@calls("serve_ucx")
async def use_serve_ucx(stage: Stage) -> None:
    with assert_checkpoints():
        with trio.move_on_after(0.05):
            await trio_ucx.serve_ucx(lambda _: trio.sleep(0), 0, host="127.0.0.1", worker=stage.worker)


@calls("open_connection_pair", "open_clogged_pair")
async def use_open_connection_pair(stage: Stage) -> None:
    for open_pair in (open_connection_pair, partial(open_connection_pair, host="127.0.0.1"), testing.open_clogged_pair):
        await enter_and_exit(partial(open_pair, worker=stage.worker))


@calls("open_peer_process")
async def use_open_peer_process(stage: Stage) -> None:
    await enter_and_exit(partial(testing.open_peer_process, trio_ucx.Connection.wait_closed, worker=stage.worker))


@calls("open_worker")
async def use_open_worker(stage: Stage) -> None:
    await enter_and_exit(ucp.open_worker)
    await enter_and_exit(partial(ucp.open_worker, name="named", client_id=1, keepalive_interval=1))
    await enter_and_exit(partial(ucp.open_worker, shared=True))


@calls("Worker.open_endpoint")
async def use_worker_open_endpoint(stage: Stage) -> None:
    if ucp.library().version < (1, 14):
        pytest.skip("Debian's UCX 1.13 ends by an assertion when a connect to a listener is aborted at once")
    for address in (stage.raw_listener.address, stage.worker.address):
        for name in (None, "named"):
            with assert_checkpoints():
                endpoint = await stage.worker.open_endpoint(address, name=name)
            endpoint.abort()
    with assert_checkpoints():
        endpoint = await stage.worker.open_endpoint(stage.raw_listener.address, local_address="127.0.0.1")
    endpoint.abort()


@calls("Worker.open_listener", "RawListener.aclose", "RawListener.__aenter__", "RawListener.__aexit__")
async def use_worker_open_listener(stage: Stage) -> None:
    with assert_checkpoints():
        listener = await open_raw_listener(stage.worker)
    for _ in range(2):
        with assert_checkpoints():
            await listener.aclose()
    async with await open_raw_listener(stage.worker) as listener:
        with assert_checkpoints():
            await listener.__aexit__(None, None, None)


@calls("Listener.accept")
async def use_listener_accept(stage: Stage) -> None:
    accepted = []

    async def accept() -> None:
        accepted.append(await stage.listener.accept())

    opened = []

    async def open_one() -> None:
        opened.append(await trio_ucx.open_ucx_stream(*stage.listener.address, worker=stage.worker))

    await together(accept, open_one)
    await open_one()
    await until(lambda: stage.listener.statistics().waiting)
    with assert_checkpoints():
        await accept()
    for connection in accepted + opened:
        connection.abort()


@calls("RawListener.accept_request", "RawListener.__anext__", "ConnectionRequest.accept")
async def use_rawlistener_accept_request(stage: Stage) -> None:
    endpoints: list[ucp.Endpoint] = []
    requests: list[ucp.ConnectionRequest] = []

    async def open_one() -> None:
        endpoints.append(await stage.worker.open_endpoint(stage.raw_listener.address))

    for take in (stage.raw_listener.accept_request, stage.raw_listener.__anext__):

        async def accept(take: Any = take) -> None:
            requests.append(await take())

        await together(accept, open_one)
        with assert_checkpoints():
            endpoints.append(await requests[-1].accept())
        await open_one()
        await trio.sleep(0.05)
        with assert_checkpoints():
            await accept()
        requests[-1].reject()
    for endpoint in endpoints:
        endpoint.abort()
    listener = await open_raw_listener(stage.worker)
    await listener.aclose()
    with assert_checkpoints(), pytest.raises(StopAsyncIteration):
        await listener.__anext__()


# ---- messages ----


@calls("Connection.send")
async def use_connection_send(stage: Stage) -> None:
    for data in (b"", b"small", [b"a", bytearray(b"b")]):
        with assert_checkpoints():
            await stage.client.send(data)
    await together(partial(stage.client.send, bytes(2**20), tag=5), partial(stage.server.receive, tag=5))


@calls("Connection.receive", "Connection.receive_into", "Connection.wait_message", "Messages.__anext__")
async def use_connection_receive(stage: Stage) -> None:
    client, server = stage.client, stage.server
    ways: list[Callable[[], Awaitable[Any]]] = [
        server.receive,
        partial(server.receive_into, bytearray(2**20)),
        server.messages().__anext__,
    ]
    for way in ways:
        for size in (10, 2**18):
            await together(way, partial(client.send, bytes(size)))
        client.send_nowait(b"there")
        await server.wait_message()
        with assert_checkpoints():
            await way()
    await together(server.wait_message, partial(client.send, b"x"))
    with assert_checkpoints():
        await server.wait_message()
    with assert_checkpoints(), trio.move_on_after(5):
        await server.receive_into([bytearray(1)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.aclose)
        with assert_checkpoints(), pytest.raises(StopAsyncIteration):
            await server.messages().__anext__()


@calls("Connection.wait_closed")
async def use_connection_wait_closed(stage: Stage) -> None:
    async def abort() -> None:
        stage.client.abort()

    await together(stage.client.wait_closed, abort)
    with assert_checkpoints():
        await stage.client.wait_closed()


@calls("Connection.send_array", "Connection.receive_array", "Connection.send_arrays", "Connection.receive_arrays")
async def use_connection_arrays(stage: Stage) -> None:
    await use_arrays(stage.client, stage.server)


async def use_arrays(
    here: trio_ucx.Connection | trio_ucx.Channel, there: trio_ucx.Connection | trio_ucx.Channel
) -> None:
    for array in (np.zeros(3), np.zeros(2**18)):
        await together(partial(here.send_array, array), there.receive_array)
        await together(partial(here.send_array, array), partial(there.receive_array, allocate=bytearray))
        into = [np.empty_like(array)]
        await together(partial(here.send_arrays, [array]), partial(there.receive_arrays, into=into))
    with assert_checkpoints():
        await here.send_array(np.zeros(3))
    with assert_checkpoints():
        await here.send_arrays([])
    with assert_checkpoints():
        await there.receive_array(allocate=bytearray)
    with assert_checkpoints():
        assert await there.receive_arrays() == []
    await here.send(b"no arrays")
    for way in (there.receive_array, partial(there.receive_arrays, into=[])):
        with assert_checkpoints(), pytest.raises(trio_ucx.UnexpectedMessage):
            await way()
    assert await there.receive() == b"no arrays"


@calls("Connection.receive_newest", "Channel.receive_newest")
async def use_receive_newest(stage: Stage) -> None:
    client, server = stage.client, stage.server
    for here, there in ((client, server), (client.channel(3), server.channel(3))):
        for size in (10, 2**18):
            await together(there.receive_newest, partial(here.send, bytes(size)))
        await here.send(b"there")
        await arrived(stage, client.statistics().messages_sent)
        with assert_checkpoints():
            await there.receive_newest()


@calls("Connection.request")
async def use_connection_request(stage: Stage) -> None:
    async def answer(request: bytes) -> bytes:
        return request

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio_ucx.answering(answer), stage.server)
        for timeout in (5, 1e9):
            with assert_checkpoints():
                await stage.client.request(b"request", timeout=timeout)
        nursery.cancel_scope.cancel()


@calls("Connection.receive_any")
async def use_connection_receive_any(stage: Stage) -> None:
    client, server = stage.client, stage.server
    for tags in (None, [3, 4]):
        for size in (10, 2**18):
            await together(partial(server.receive_any, tags), partial(client.send, bytes(size), tag=4))
        client.send_nowait(b"there", tag=4)
        await server.wait_message(tag=4)
        with assert_checkpoints():
            await server.receive_any(tags)


@calls(
    *("Channel.send", "Channel.receive", "Channel.receive_into", "Channel.__anext__", "Channel.aclose"),
    *("Channel.__aenter__", "Channel.__aexit__", "Conversations.__anext__"),
    *("Channel.send_array", "Channel.receive_array", "Channel.send_arrays", "Channel.receive_arrays"),
)
async def use_channels(stage: Stage) -> None:
    client, server = stage.client, stage.server
    for _ in range(2):
        async with client.open_conversation() as here:
            with assert_checkpoints():
                await here.send(b"begin")
            with assert_checkpoints():
                there = await anext(server.conversations())
            await there.receive()
            for way in (there.receive, partial(there.receive_into, bytearray(2**18)), there.__anext__):
                for size in (10, 2**18):
                    await together(way, partial(here.send, bytes(size)))
                here.send_nowait(b"there")
                await arrived(stage, server.statistics().messages_received)
                with assert_checkpoints():
                    await way()
            await use_arrays(here, there)
            for end in (here.aclose, here.aclose, partial(there.__aexit__, None, None, None)):
                with assert_checkpoints():
                    await end()
    await together(server.conversations().__anext__, partial(client.open_conversation().send, b"x"))


@calls("Connection.ping")
async def use_connection_ping(stage: Stage) -> None:
    for _ in range(3):
        with assert_checkpoints():
            await stage.client.ping()


@calls("Server.drain")
async def use_server_drain(stage: Stage) -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.receive()

    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1"))
        async with trio_ucx.connect(server.address):
            for _ in range(2):
                with assert_checkpoints():
                    await server.drain(5)


@calls("Connection.wait_buffers_released")
async def use_connection_wait_buffers_released(stage: Stage) -> None:
    with assert_checkpoints():
        await stage.client.wait_buffers_released()
    with trio.move_on_after(0.01):
        await stage.client.send(bytes(2**20))
    await together(stage.client.wait_buffers_released, stage.server.receive)
    stage.client.abort()
    with assert_checkpoints():
        await stage.client.wait_buffers_released()


# ---- the byte stream ----


@calls("Connection.send_all", "Connection.wait_send_all_might_not_block")
async def use_connection_send_all(stage: Stage) -> None:
    for data in (b"", b"x", bytes(100_000)):
        with assert_checkpoints():
            await stage.client.send_all(data)
    with assert_checkpoints():
        await stage.client.wait_send_all_might_not_block()

    async def while_read(reader: trio_ucx.Connection, function: Callable[[], Awaitable[Any]]) -> None:
        scope = trio.CancelScope()

        async def read() -> None:
            with scope:
                while True:
                    await reader.receive_some()

        async def call() -> None:
            await function()
            scope.cancel()

        await together(call, read)

    for size in (2**18, 3 * 2**20):
        await while_read(stage.server, partial(stage.client.send_all, bytes(size)))
    async with testing.open_clogged_pair(worker=stage.worker) as (client, server):
        await while_read(server, client.wait_send_all_might_not_block)


@calls("Connection.receive_some", "Connection.__anext__", "Connection.send_eof")
async def use_connection_receive_some(stage: Stage) -> None:
    client, server = stage.client, stage.server
    for way in (server.receive_some, partial(server.receive_some, 2), server.__anext__):
        await together(way, partial(client.send_all, b"abc"))
        await client.send_all(b"abc")
        await until(lambda: client.statistics().messages_sent == server.statistics().messages_received)
        with assert_checkpoints():
            await way()
    for _ in range(2):
        with assert_checkpoints():
            await client.send_eof()
    while await server.receive_some():
        pass
    for _ in range(2):
        with assert_checkpoints():
            assert await server.receive_some() == b""
    with assert_checkpoints(), pytest.raises(StopAsyncIteration):
        await server.__anext__()


# ---- closing ----


@calls("Connection.aclose", "Connection.__aenter__", "Connection.__aexit__")
async def use_connection_aclose(stage: Stage) -> None:
    for close in ("aclose", "normal", "broken"):
        async with open_connection_pair(host="127.0.0.1", worker=stage.worker) as (client, server):
            if close == "aclose":
                for _ in range(2):
                    with assert_checkpoints():
                        await client.aclose()
            elif close == "broken":
                server.abort()
                with pytest.raises(trio.BrokenResourceError):
                    await client.receive()
                with assert_checkpoints():
                    await client.aclose()
            else:
                with assert_checkpoints():
                    await client.__aexit__(None)


@calls("Endpoint.aclose", "Endpoint.__aenter__", "Endpoint.__aexit__")
async def use_endpoint_aclose(stage: Stage) -> None:
    for close in ("flush", "force", "normal"):
        async with open_raw_pair(stage.worker) as (client, _):
            for _ in range(2):
                with assert_checkpoints():
                    if close == "flush":
                        await client.aclose()
                    elif close == "force":
                        await client.aclose(ucp.CloseMode.FORCE)
                    else:
                        await client.__aexit__(None, None, None)


# ---- raw operations ----


@calls("Endpoint.tag_send", "Worker.tag_receive")
async def use_endpoint_tag_send(stage: Stage) -> None:
    with assert_checkpoints():
        await stage.raw_client.tag_send(b"x", 1)
    await until(lambda: stage.worker.tag_probe(1))
    with assert_checkpoints():
        await stage.worker.tag_receive(bytearray(1), 1)
    receive = partial(stage.worker.tag_receive, bytearray(2**20), 1)
    send = partial(stage.raw_client.tag_send, bytes(2**20), 1)
    await together(receive, send)
    await together(send, receive)


@calls("Endpoint.tag_send_sync")
async def use_endpoint_tag_send_sync(stage: Stage) -> None:
    send = partial(stage.raw_client.tag_send_sync, b"x", 1)
    await together(send, partial(stage.worker.tag_receive, bytearray(1), 1))


@calls("Worker.tag_receive_message")
async def use_worker_tag_receive_message(stage: Stage) -> None:
    for size in (3, 2**20):

        async def receive() -> None:
            await until(lambda: stage.worker.tag_probe(7))
            message = stage.worker.tag_probe(7, remove=True)
            assert message is not None
            with assert_checkpoints():
                await stage.worker.tag_receive_message(message, bytearray(2**20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.raw_client.tag_send, bytes(size), 7)
            await receive()


@calls("Worker.tag_wait")
async def use_worker_tag_wait(stage: Stage) -> None:
    await together(partial(stage.worker.tag_wait, 7), partial(stage.raw_client.tag_send, b"x", 7))
    with assert_checkpoints():
        await stage.worker.tag_wait(7)
    await stage.worker.tag_receive(bytearray(1), 7)


@calls("Endpoint.wait_closed")
async def use_endpoint_wait_closed(stage: Stage) -> None:
    async def abort() -> None:
        stage.raw_client.abort()

    await together(stage.raw_client.wait_closed, abort)
    with assert_checkpoints():
        await stage.raw_client.wait_closed()


@calls("Endpoint.flush", "Worker.flush")
async def use_endpoint_flush(stage: Stage) -> None:
    for sends in (0, 1):
        for flush in (stage.raw_client.flush, stage.worker.flush):
            for _ in range(sends):
                await stage.raw_client.tag_send(b"x", 1)
            with assert_checkpoints():
                await flush()


@calls("Worker.open_request_group", "Request.__await__")
async def use_worker_open_request_group(stage: Stage) -> None:
    with assert_checkpoints():
        async with stage.worker.open_request_group():
            pass  # leaving is the checkpoint, as with a nursery
    async with stage.worker.open_request_group() as group:
        sent = group.tag_send(stage.raw_client, b"x", 3)
        with assert_checkpoints():
            await sent
        received = group.tag_receive(bytearray(1), 3)
        for _ in range(2):
            with assert_checkpoints():
                await received
        for _ in range(100):  # polling finds most of them
            received = group.tag_receive(bytearray(1), 3)
            group.tag_send(stage.raw_client, b"x", 3)
            with assert_checkpoints():
                await received
        waiting = group.tag_receive(bytearray(1), 4)

        async def wait() -> None:
            await waiting

        await together(wait, partial(stage.raw_client.tag_send, b"x", 4))


# ---- active messages, streams, remote memory ----


@calls(
    "Worker.open_active_messages",
    "ActiveMessages.__aenter__",
    "ActiveMessages.__enter__",
    "ActiveMessages.__aexit__",
    "ActiveMessages.__aiter__",
    "ActiveMessages.__anext__",
    "ActiveMessages.receive",
)
async def use_active_messages(stage: Stage) -> None:
    messages = stage.worker.open_active_messages(3)
    with assert_checkpoints():
        await messages.__aenter__()
    for receive in (messages.receive, messages.__anext__):
        with assert_checkpoints():
            (await receive_later(stage, receive)).release()
        await stage.raw_client.am_send(3, b"x")
        await until(lambda: messages.statistics().waiting != 0)
        with assert_checkpoints():
            (await receive()).release()
    with assert_checkpoints():
        await messages.__aexit__(None, None, None)
    with assert_checkpoints(), pytest.raises(StopAsyncIteration):
        await messages.__anext__()


async def receive_later(stage: Stage, receive: Callable[[], Awaitable[Any]]) -> Any:
    result = []

    async def first() -> None:
        result.append(await receive())

    await together(first, partial(stage.raw_client.am_send, 3, b"x"))
    return result[0]


@calls("Endpoint.am_send", "ActiveMessage.receive", "ActiveMessage.receive_into")
async def use_active_message(stage: Stage) -> None:
    with stage.worker.open_active_messages(3) as messages:
        for size in (0, 1, 2**20):
            for into in (False, True):
                async with trio.open_nursery() as nursery:

                    async def send(size: int = size) -> None:
                        with assert_checkpoints():
                            await stage.raw_client.am_send(3, bytes(size))

                    nursery.start_soon(send)
                    message = await messages.receive()
                    with assert_checkpoints():
                        await (message.receive_into(bytearray(size)) if into else message.receive())


@calls("Endpoint.stream_send", "Endpoint.stream_receive", "Endpoint.stream_receive_some", "Worker.wait_stream_ready")
async def use_streams(stage: Stage) -> None:
    for size in (1, 2**20):
        for exact in (False, True):
            with assert_checkpoints():
                await stage.raw_client.stream_send(bytes(size))
            with assert_checkpoints():
                await stage.worker.wait_stream_ready()
            buffer = bytearray(size)
            received = 0
            while received < size:
                with assert_checkpoints():
                    received += await stage.raw_server.stream_receive(memoryview(buffer)[received:], exact=exact)
    with assert_checkpoints():
        assert await stage.raw_server.stream_receive(bytearray(0)) == 0
    await together(stage.worker.wait_stream_ready, partial(stage.raw_client.stream_send, b"x"))
    with assert_checkpoints():
        (await stage.raw_server.stream_receive_some()).release()


@calls("RemoteMemory.get", "RemoteMemory.get_into", "RemoteMemory.put", "RemoteMemory.flush")
async def use_remote_memory(stage: Stage) -> None:
    with stage.worker.context.allocate(2**20) as memory, stage.raw_client.attach(memory.descriptor) as remote:
        for size in (0, 1, 2**20):
            with assert_checkpoints():
                await remote.put(bytes(size))
            with assert_checkpoints():
                await remote.get(0, size)
            with assert_checkpoints():
                await remote.get_into(bytearray(size))
            with assert_checkpoints():
                await remote.flush()


@calls(
    "Connection.attach",
    "RemoteMemory.connect",
    "RemoteMemory.get_blocks",
    "RemoteMemory.put_blocks",
    "BlockPlan.get",
    "BlockPlan.put",
)
async def use_lists_of_blocks(stage: Stage) -> None:
    with stage.worker.context.register(bytearray(2**20)) as memory:
        with assert_checkpoints():
            remote = await stage.client.attach(memory.descriptor)
        with remote:
            with assert_checkpoints():
                await remote.connect()
            buffer = bytearray(2**20)
            plan = remote.plan(buffer, block=2**12)
            for count in (0, 1, 100):
                with assert_checkpoints():
                    await plan.get(range(0, 2 * count, 2), range(count))
                with assert_checkpoints():
                    await plan.put(range(count), range(0, 2 * count, 2))
                pieces = [(number * 2**12, bytearray(100)) for number in range(count)]
                with assert_checkpoints():
                    await remote.get_blocks(pieces)
                with assert_checkpoints():
                    await remote.put_blocks(pieces)
            await remote.flush()


@calls("RemoteMemory.notify", "Notifications.receive", "Notifications.__anext__")
async def use_notifications(stage: Stage) -> None:
    with stage.worker.context.register(bytearray(8)) as memory, stage.raw_client.attach(memory.descriptor) as remote:
        notes = memory.notifications()
        for receive in (notes.receive, notes.__anext__):
            with assert_checkpoints():
                await remote.notify(b"x")
            with assert_checkpoints():
                await receive()
            await together(receive, partial(remote.notify, b"x"))


@calls("RemoteMemory.atomic", "RemoteMemory.fetch_add", "RemoteMemory.compare_swap")
async def use_atomics(stage: Stage) -> None:
    with stage.worker.context.allocate(8) as memory, stage.raw_client.attach(memory.descriptor) as remote:
        for op, fetch in itertools.product(ucp.AtomicOp, (False, True)):
            with assert_checkpoints():
                await remote.atomic(op, 1, fetch=fetch)
        with assert_checkpoints():
            await remote.fetch_add(1)
        with assert_checkpoints():
            await remote.compare_swap(1, 2)
        await remote.flush()


@calls("RequestChain.run", "RequestChain.wait_idle")
async def use_request_chain(stage: Stage) -> None:
    with stage.worker.context.allocate(64) as memory, stage.raw_client.attach(memory.descriptor) as remote:
        with stage.worker.new_chain() as chain:
            with assert_checkpoints():
                await chain.run()
            word = chain.get(remote, 0, 8)
            chain.put(remote, word.bytes(), 8)
            chain.fetch_add(remote, 1, 16)
            for _ in range(3):
                with assert_checkpoints():
                    (await chain.run()).values()
                with assert_checkpoints():
                    await chain.wait_idle()


# ---- anyio ----


@calls(
    "UCXStream.receive",
    "UCXStream.send",
    "UCXStream.send_eof",
    "UCXStream.aclose",
    "UCXStream.__anext__",
    "UCXStream.__aenter__",
    "UCXStream.__aexit__",
)
async def use_ucxstream_receive(stage: Stage) -> None:
    client, server = map(trio_ucx.anyio.UCXStream, (stage.client, stage.server))
    for receive in (server.receive, server.__anext__):
        with assert_checkpoints():
            await client.send(b"x")
        with assert_checkpoints():
            await receive()
    with assert_checkpoints():
        await client.send_eof()
    for stream in (client, server):
        with assert_checkpoints():
            await stream.aclose()
        with assert_checkpoints():
            await stream.__aexit__(None, None, None)


@calls("UCXListener.serve", "UCXListener.aclose", "UCXListener.__aenter__", "UCXListener.__aexit__")
async def use_ucxlistener_serve(stage: Stage) -> None:
    listener = trio_ucx.anyio.UCXListener(stage.listener)
    with assert_checkpoints():
        with trio.move_on_after(0.05):
            await listener.serve(lambda _: trio.sleep(0))
    with assert_checkpoints():
        await listener.aclose()
    with assert_checkpoints():
        await listener.__aexit__(None, None, None)


def test_no_public_async_function_is_forgotten() -> None:
    found = find()
    assert {"connect", "open_worker", "Connection.send", "Worker.open_request_group"} <= found  # it finds each kind
    assert found == set(CALLS)


@pytest.mark.parametrize("call", dict.fromkeys(call for each in CALLS.values() for call in each))
async def test_checkpoints(transports: str, call: Call) -> None:
    async with ucp.open_worker(config={"TLS": transports}, features=ucp.Feature.ALL) as worker:
        async with set_stage(worker) as stage:
            with trio.fail_after(20):
                await call(stage)


# ---- a cancelled task, and something that was closed meanwhile ----


@asynccontextmanager
async def set_closed_stage(transports: str) -> AsyncIterator[dict[str, Callable[[], Awaitable[Any]]]]:
    """Calls of every async operation, on closed objects."""
    features, config = ucp.Feature.ALL, {"TLS": transports}
    async with ucp.open_worker(config=config, features=features) as worker, set_stage(worker) as stage:
        client, endpoint = stage.client, stage.raw_client
        with worker.context.allocate(64) as own, endpoint.attach(own.descriptor) as memory:
            chain = worker.new_chain()
            chain.get(memory, 0, 8)
            plan = memory.plan(bytearray(64), block=8)
            with worker.context.allocate(64) as other:
                notes = other.notifications()
            async with worker.open_active_messages(1) as active:
                await stage.raw_server.am_send(1, b"data")
                with trio.fail_after(15):
                    message = await active.receive()
                message.release()
            channel = client.channel(6)
            client.abort()
            endpoint.abort()
            chain.close()
            await stage.listener.aclose()
            await stage.raw_listener.aclose()
            async with ucp.open_worker(config=config, features=features) as closed:
                address = closed.address
            stream = trio_ucx.anyio.UCXStream(client)
            buffer = bytearray(8)
            yield {
                "Channel.__anext__": lambda: anext(aiter(channel)),
                "Channel.receive": channel.receive,
                "Channel.receive_into": lambda: channel.receive_into(buffer),
                "Channel.receive_array": channel.receive_array,
                "Channel.receive_arrays": lambda: channel.receive_arrays(into=[buffer]),
                "Channel.receive_newest": channel.receive_newest,
                "Channel.send": lambda: channel.send(b"data"),
                "Channel.send_array": lambda: channel.send_array(buffer),
                "Channel.send_arrays": lambda: channel.send_arrays([buffer]),
                "Connection.receive_array": lambda: client.receive_array(allocate=bytearray),
                "Connection.receive_arrays": client.receive_arrays,
                "Connection.send_array": lambda: client.send_array(buffer),
                "Connection.send_arrays": lambda: client.send_arrays({"a": buffer}),
                "Connection.receive_any": client.receive_any,
                "Conversations.__anext__": lambda: anext(client.conversations()),
                "ActiveMessage.receive": message.receive,
                "ActiveMessage.receive_into": lambda: message.receive_into(buffer),
                "ActiveMessages.receive": active.receive,
                "ActiveMessages.__anext__": lambda: anext(aiter(active)),
                "Connection.__anext__": lambda: anext(aiter(client)),
                "Connection.ping": client.ping,
                "Connection.receive": client.receive,
                "Connection.receive_into": lambda: client.receive_into(buffer),
                "Connection.receive_newest": client.receive_newest,
                "Connection.receive_some": client.receive_some,
                "Connection.request": lambda: client.request(b"request"),
                "Connection.send": lambda: client.send(b"data"),
                "Connection.send_all": lambda: client.send_all(b"data"),
                "Connection.send_eof": client.send_eof,
                "Connection.wait_buffers_released": client.wait_buffers_released,
                "Connection.wait_closed": client.wait_closed,
                "Connection.wait_message": client.wait_message,
                "Connection.wait_send_all_might_not_block": client.wait_send_all_might_not_block,
                "Endpoint.am_send": lambda: endpoint.am_send(1, b"data"),
                "Endpoint.flush": endpoint.flush,
                "Endpoint.stream_receive": lambda: endpoint.stream_receive(buffer),
                "Endpoint.stream_receive_some": endpoint.stream_receive_some,
                "Endpoint.stream_send": lambda: endpoint.stream_send(b"data"),
                "Endpoint.tag_send": lambda: endpoint.tag_send(b"data", 1),
                "Endpoint.tag_send_sync": lambda: endpoint.tag_send_sync(b"data", 1),
                "Endpoint.wait_closed": endpoint.wait_closed,
                "Listener.accept": stage.listener.accept,
                "Messages.__anext__": lambda: anext(client.messages()),
                "BlockPlan.get": lambda: plan.get([0], [0]),
                "BlockPlan.put": lambda: plan.put([0], [0]),
                "Connection.attach": lambda: client.attach(own.descriptor),
                "Notifications.__anext__": lambda: anext(notes),
                "Notifications.receive": notes.receive,
                "RawListener.__anext__": lambda: anext(aiter(stage.raw_listener)),
                "RawListener.accept_request": stage.raw_listener.accept_request,
                "RemoteMemory.atomic": lambda: memory.atomic(ucp.AtomicOp.ADD, 1),
                "RemoteMemory.connect": memory.connect,
                "RemoteMemory.get_blocks": lambda: memory.get_blocks([(0, buffer)]),
                "RemoteMemory.notify": lambda: memory.notify(b"data"),
                "RemoteMemory.put_blocks": lambda: memory.put_blocks([(0, b"data")]),
                "RemoteMemory.compare_swap": lambda: memory.compare_swap(1, 2),
                "RemoteMemory.fetch_add": lambda: memory.fetch_add(1),
                "RemoteMemory.flush": memory.flush,
                "RemoteMemory.get": memory.get,
                "RemoteMemory.get_into": lambda: memory.get_into(buffer),
                "RemoteMemory.put": lambda: memory.put(b"data"),
                "RequestChain.run": chain.run,
                "RequestChain.wait_idle": chain.wait_idle,
                "UCXStream.__anext__": lambda: anext(aiter(stream)),
                "UCXStream.receive": stream.receive,
                "UCXStream.send": lambda: stream.send(b"data"),
                "UCXStream.send_eof": stream.send_eof,
                "Worker.flush": closed.flush,
                "Worker.open_endpoint": lambda: closed.open_endpoint(address),
                "Worker.open_listener": lambda: closed.open_listener("127.0.0.1", 0),
                "Worker.tag_receive": lambda: closed.tag_receive(buffer, 1),
                "Worker.tag_wait": lambda: closed.tag_wait(1),
                "Worker.wait_stream_ready": closed.wait_stream_ready,
            }


#: What opens, enters or closes; and what needs an object that is gone with its worker.
NOT_CALLED_WHEN_CLOSED = {
    "Connecting.__await__",
    "ConnectionRequest.accept",
    "Request.__await__",
    "UCXListener.serve",
    "Server.drain",
    "Worker.tag_receive_message",
    *(name for name in find() if "." not in name or name.startswith("Worker.open_") or name.endswith("aclose")),
    *(name for name in find() if name.endswith(("enter__", "exit__", "__aiter__"))),
} - {"Worker.open_endpoint", "Worker.open_listener"}


CLOSED = trio.ClosedResourceError, anyio.ClosedResourceError, StopAsyncIteration, ValueError


async def test_a_cancelled_task_gets_cancelled_rather_than_closed(transports: str) -> None:
    async with set_closed_stage(transports) as calls:
        assert set(calls) == find() - NOT_CALLED_WHEN_CLOSED
        for name, call in calls.items():
            with trio.CancelScope() as scope:
                scope.cancel()
                try:
                    await call()
                except Exception as error:
                    raise AssertionError(name) from error
            assert scope.cancelled_caught, name
            # without a cancellation, it raises that the object is closed, or returns
            with trio.fail_after(15):
                with contextlib.suppress(
                    trio.ClosedResourceError, anyio.ClosedResourceError, StopAsyncIteration, ValueError
                ):
                    await call()
