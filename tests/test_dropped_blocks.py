"""Blocks of async context managers that a program drops: a warning names them, they are left, and the run goes on."""

from __future__ import annotations

import gc
import importlib
import inspect
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import attrs
import pytest
import trio
from helpers import free_port, live_handles, open_raw_listener, serving, until

import trio_ucx
from trio_ucx import anyio, mesh, rpc, testing, ucp

MODULES = ["", ".ucp", ".ucp.chains", ".ucp.blocks", ".rpc", ".mesh", ".testing", ".anyio"]
#: They are closed with what they belong to.
PARTS = {"trio_ucx.Channel", "trio_ucx.ucp.ActiveMessages"}


class Counting(rpc.Service):
    running = 0

    @rpc.stream
    async def count(self, call: rpc.Call) -> AsyncIterator[int]:
        self.running += 1
        try:
            while True:
                yield self.running
        finally:
            self.running -= 1


async def wait_closed(connection: trio_ucx.Connection) -> None:
    await connection.wait_closed()


@attrs.define
class Around:
    """What is open around the block.

    Attributes:
        server: of :class:`Counting`.
        connection: to this server.
    """

    worker: ucp.Worker
    server: trio_ucx.Listener
    connection: trio_ucx.Connection


async def connecting(around: Around) -> Any:
    return trio_ucx.connect(around.server.address, worker=around.worker)


async def connection(around: Around) -> Any:
    return await trio_ucx.open_ucx_stream(*around.server.address, worker=around.worker)


async def listener(around: Around) -> Any:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=around.worker)
    return listener


async def endpoint(around: Around) -> Any:
    return await around.worker.open_endpoint(around.worker.address)


async def raw_listener(around: Around) -> Any:
    return await open_raw_listener(around.worker)


async def open_request_group(around: Around) -> Any:
    return around.worker.open_request_group()


async def open_worker(around: Around) -> Any:
    return ucp.open_worker(config={"TLS": "tcp"})


async def stream(around: Around) -> Any:
    return rpc.Client(around.connection).stream("count")


async def connect_client(around: Around) -> Any:
    return rpc.connect(around.server.address, worker=around.worker)


async def join(around: Around) -> Any:
    return mesh.join(rank=0, size=1, meeting=f"127.0.0.1:{free_port()}", worker=around.worker)


async def open_clogged_pair(around: Around) -> Any:
    return testing.open_clogged_pair(worker=around.worker)


async def open_connection_pair(around: Around) -> Any:
    return testing.open_connection_pair(worker=around.worker)


async def open_peer_process(around: Around) -> Any:
    return testing.open_peer_process(wait_closed, worker=around.worker)


async def anyio_stream(around: Around) -> Any:
    return anyio.UCXStream(await connection(around))


async def anyio_listener(around: Around) -> Any:
    return anyio.UCXListener(await listener(around))


#: By public name: what makes one, and how the warning calls it.
MANAGERS: dict[str, tuple[Callable[[Around], Awaitable[Any]], str]] = {
    "trio_ucx.Connecting": (connecting, "unclosed <trio_ucx.Connection"),
    "trio_ucx.Connection": (connection, "unclosed <trio_ucx.Connection"),
    "trio_ucx.Listener": (listener, "unclosed <trio_ucx.Listener"),
    "trio_ucx.ucp.Endpoint": (endpoint, "unclosed <trio_ucx.ucp.Endpoint"),
    "trio_ucx.ucp.RawListener": (raw_listener, "unclosed <trio_ucx.ucp.RawListener"),
    "trio_ucx.ucp.Worker.open_request_group": (open_request_group, ""),
    "trio_ucx.ucp.open_worker": (open_worker, ""),
    "trio_ucx.rpc.Stream": (stream, "a block of trio_ucx.rpc.Client.stream() was dropped before its end"),
    "trio_ucx.rpc.connect": (connect_client, ""),
    "trio_ucx.mesh.join": (join, ""),
    "trio_ucx.testing.open_clogged_pair": (open_clogged_pair, ""),
    "trio_ucx.testing.open_connection_pair": (open_connection_pair, ""),
    "trio_ucx.testing.open_peer_process": (open_peer_process, ""),
    "trio_ucx.anyio.UCXStream": (anyio_stream, "unclosed <trio_ucx.Connection"),
    "trio_ucx.anyio.UCXListener": (anyio_listener, "unclosed <trio_ucx.Listener"),
}


def opens_a_block(function: Any) -> bool:
    returned = str(getattr(function, "__annotations__", {}).get("return"))
    return inspect.isasyncgenfunction(inspect.unwrap(function)) or "AsyncContextManager" in returned


def public_managers() -> Iterator[str]:
    for name in MODULES:
        module: Any = importlib.import_module(f"trio_ucx{name}")
        for each in getattr(module, "__all__", ["UCXListener", "UCXStream"]):
            thing = getattr(module, each)
            if inspect.isclass(thing):
                if hasattr(thing, "__aenter__"):
                    yield f"trio_ucx{name}.{each}"
                yield from (
                    f"trio_ucx{name}.{each}.{method}"
                    for method, function in vars(thing).items()
                    if not method.startswith("_") and inspect.isfunction(function) and opens_a_block(function)
                )
            elif inspect.isfunction(thing) and opens_a_block(thing):
                yield f"trio_ucx{name}.{each}"


def test_all_are_here() -> None:
    assert {*public_managers()} == MANAGERS.keys() | PARTS


async def around_by_generator(block: Any) -> AsyncIterator[Any]:
    async with block as opened:
        yield opened


@pytest.mark.parametrize("how", ["by hand", "generator"])
@pytest.mark.parametrize("name", MANAGERS)
async def test_a_block_that_is_dropped(name: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    make, text = MANAGERS[name]
    text = text or f"a block of {name}() was dropped before its end: use it with `async with`"
    went_on = False

    async def drop(around: Around) -> None:
        nonlocal went_on
        before = live_handles()
        block = await make(around)
        if how == "by hand":
            opened = await block.__aenter__()
        else:
            generator = around_by_generator(block)
            opened = await anext(generator)
            del generator
        await trio.lowlevel.checkpoint()
        del block, opened
        gc.collect()
        with trio.fail_after(30):
            while not all(live_handles()[each] <= before[each] for each in before):
                await trio.sleep(0.01)
        went_on = True

    with warnings.catch_warnings(record=True) as caught, trio.fail_after(60):
        warnings.simplefilter("always")
        async with (
            ucp.open_worker(config={"TLS": "tcp"}) as worker,
            serving(rpc.serving(Counting()), worker) as server,
            trio_ucx.connect(server.address, worker=worker) as connection,
        ):
            async with trio.open_nursery() as nursery:  # a task of its own: it may stay in a cancel scope
                nursery.start_soon(drop, Around(worker, server, connection))
            assert went_on
    found = [str(each.message) for each in caught if issubclass(each.category, ResourceWarning)]
    expected = text if how == "by hand" else "Async generator 'test_dropped_blocks.around_by_generator'"
    assert any(message.startswith(expected) for message in found), found
    errors = [each for each in caplog.records if each.levelname == "ERROR" or each.name.startswith("trio.")]
    assert not errors, errors


async def test_the_method_of_a_dropped_stream_is_cancelled(worker: ucp.Worker) -> None:
    counting = Counting()
    async with serving(rpc.serving(counting), worker) as server, trio_ucx.connect(server.address) as connection:
        client = rpc.Client(connection, limit=1)
        for _ in range(2):
            with trio.fail_after(20):
                stream = await client.stream("count").__aenter__()
                assert await anext(stream) == 1
            with pytest.warns(ResourceWarning, match="dropped"):
                del stream
            await until(lambda: not counting.running)


async def test_a_stream_that_is_dropped_after_its_worker_was_closed(worker: ucp.Worker) -> None:
    """The client has its place again."""
    async with serving(rpc.serving(Counting()), worker) as server:
        async with ucp.open_worker() as gone:
            connection = await trio_ucx.open_ucx_stream(*server.address, worker=gone)
            client = rpc.Client(connection, limit=1)
            stream = await client.stream("count").__aenter__()
            assert await anext(stream) == 1
            connection.abort()
        with pytest.warns(ResourceWarning, match="dropped"):
            del stream
        await until(lambda: client._slots.value == 1)
