"""``open_worker(shared=True)``: the run's shared worker is one that the program has opened."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import open_listener, until, until_over
from injected_faults import break_worker
from test_server import echo

import trio_ucx
import trio_ucx.testing
from trio_ucx import mesh, ucp

TCP = {"TLS": "tcp"}


async def check_connections(worker: ucp.Worker) -> None:
    """What is opened without ``worker=`` uses this worker."""
    async with open_listener() as listener, trio_ucx.connect(listener.address) as client:
        async with await listener.accept() as server:
            assert client.worker is server.worker is listener.worker is worker
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.aclose)
                nursery.start_soon(server.aclose)


async def default_worker() -> ucp.Worker:
    async with open_listener() as listener:
        return listener.worker


async def test_everything_in_the_run_uses_it(tmp_path: Path) -> None:
    async with ucp.open_worker(shared=True, config=TCP, yield_interval=1e-3, name="ours") as worker:
        assert worker.attributes().name == "ours"
        await check_connections(worker)
        async with trio_ucx.testing.open_connection_pair() as pair:
            assert {connection.worker for connection in pair} == {worker}
            assert {transport.name for transport in pair[0].endpoint.transports} == {"tcp"}
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(trio_ucx.serve_ucx, echo, 0, host="127.0.0.1"))
            async with await trio_ucx.open_ucx_stream(*server.address) as client:
                await client.send(b"x")
                assert await client.receive() == b"x"
                assert server[0].worker is client.worker is worker
            await server.drain(1)


async def test_groups_use_it(tmp_path: Path) -> None:
    async def take_part(rank: int) -> None:
        async with mesh.join(rank=rank, size=2, meeting=f"file://{tmp_path}/meeting") as group:
            await group.barrier()

    async with ucp.open_worker(shared=True) as worker:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for rank in range(2):
                    nursery.start_soon(take_part, rank)
        assert worker.statistics().connections.opened >= 2


@pytest.mark.parametrize("leave", ["normally", "by an exception", "cancelled"])
async def test_after_the_block_there_is_a_default_one_again(leave: str) -> None:
    with trio.CancelScope() as scope:
        try:
            async with ucp.open_worker(shared=True, config=TCP) as worker:
                assert await default_worker() is worker
                if leave == "cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
                if leave == "by an exception":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert leave == "by an exception"
    default = await default_worker()
    assert default is not worker
    await check_connections(default)


async def test_one_after_the_other() -> None:
    for _ in range(2):
        async with ucp.open_worker(shared=True) as worker:
            await check_connections(worker)


async def test_a_given_worker_is_used_all_the_same() -> None:
    async with ucp.open_worker(shared=True), ucp.open_worker() as other, open_listener(other) as listener:
        async with trio_ucx.connect(listener.address, worker=other) as client, await listener.accept():
            assert client.worker is listener.worker is other


async def test_isolated_connections_have_workers_like_it() -> None:
    async with ucp.open_worker(shared=True, config=TCP, spin=0) as worker:
        async with open_listener(isolate=True) as listener:
            async with trio_ucx.connect(listener.address, isolate=True) as client, await listener.accept() as server:
                assert len({client.worker, server.worker, worker}) == 3
                assert client.worker.context is server.worker.context is worker.context
                assert client.worker.statistics().poll_limit == 0
            assert worker.statistics().connections.opened == 2


# ---- two at once ----


async def test_two_at_once_are_refused() -> None:
    async with ucp.open_worker(shared=True) as worker:
        with pytest.raises(RuntimeError, match=r"has a shared worker already.*leave that block first.*worker="):
            async with ucp.open_worker(shared=True):
                raise AssertionError
        await check_connections(worker)
        async with ucp.open_worker():
            await check_connections(worker)


async def test_of_two_that_are_opened_at_once_one_is_refused() -> None:
    refused, opened = [], []

    async def try_to_open() -> None:
        try:
            async with ucp.open_worker(shared=True) as worker:
                opened.append(worker)
                await trio.testing.wait_all_tasks_blocked()
                await check_connections(worker)
        except RuntimeError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(try_to_open)
    assert (len(opened), len(refused)) == (1, 2)


async def test_a_default_one_exists_already() -> None:
    default = await default_worker()
    with pytest.raises(RuntimeError, match=r"opened without worker= before.*before the first connect"):
        async with ucp.open_worker(shared=True):
            raise AssertionError
    await check_connections(default)


async def test_a_default_one_that_broke_is_replaced() -> None:
    default = await default_worker()
    break_worker(default)
    async with ucp.open_worker(shared=True) as worker:
        await check_connections(worker)
    assert await default_worker() not in (default, worker)


# ---- the end of the worker ----


@pytest.mark.filterwarnings("ignore:unclosed")
async def test_connections_end_with_the_block(over: str) -> None:
    """As with any worker: those that are still open are closed by force, and the peer is told."""
    async with ucp.open_worker(config={"TLS": over}) as other, open_listener(other) as listener:
        async with ucp.open_worker(shared=True):
            client = await trio_ucx.connect(listener.address).__aenter__()
            server = await listener.accept()
            [own_listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        with trio.fail_after(15):
            await until_over(server)
            with pytest.raises(trio_ucx.PeerLost) as caught:
                await server.receive()
            assert caught.value.reason == "aborted"
            with pytest.raises(trio.ClosedResourceError):
                await client.send(b"x")
            with pytest.raises(trio.ClosedResourceError):
                await own_listener.accept()
        server.abort()


@pytest.mark.filterwarnings("ignore:unclosed")
async def test_a_task_outside_the_block_gets_a_default_one_while_it_closes() -> None:
    """Closing waits for a close in the background. What is opened meanwhile does not end with the worker."""
    async with trio.open_nursery() as nursery, ucp.open_worker() as other, open_listener(other) as listener:
        async with ucp.open_worker(shared=True) as worker:
            client = await trio_ucx.connect(listener.address, close_timeout=1).__aenter__()
            server = await listener.accept()
            client.send_nowait(bytes(2**20))  # the peer does not receive it
            with trio.move_on_after(0.01):
                await client.aclose()
            nursery.start_soon(open_meanwhile, worker)
        server.abort()


async def open_meanwhile(closing: ucp.Worker) -> None:
    await until(lambda: closing.statistics().background_closes)
    assert await default_worker() is not closing
    assert closing.statistics().background_closes


async def test_a_shared_worker_that_broke_is_not_replaced() -> None:
    """A default one has other options."""
    async with ucp.open_worker(shared=True) as worker:
        break_worker(worker)
        with pytest.raises(trio.BrokenResourceError, match="this worker broke"):
            await default_worker()
        with pytest.raises(RuntimeError, match="has a shared worker already"):
            async with ucp.open_worker(shared=True):
                raise AssertionError
    await check_connections(await default_worker())


async def test_a_shared_worker_whose_context_was_closed() -> None:
    context = ucp.open_context()
    with context as opened:
        async with ucp.open_worker(shared=True, context=opened):
            opened._close()
            with pytest.raises(trio.ClosedResourceError, match="this worker was closed"):
                await default_worker()


# ---- other runs, other threads ----


async def test_each_run_has_its_own() -> None:
    def in_another_run(function: Callable[..., Awaitable[Any]]) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(trio.run(function)))
        thread.start()
        thread.join(30)
        return found[0]

    async def open_both_kinds() -> bool:
        async with ucp.open_worker(shared=True) as worker:
            own = await default_worker() is worker
        return own and await default_worker() is not worker

    async with ucp.open_worker(shared=True) as worker:
        assert await trio.to_thread.run_sync(in_another_run, open_both_kinds)
        await check_connections(worker)


def test_runs_one_after_the_other() -> None:
    async def main() -> None:
        async with ucp.open_worker(shared=True) as worker:
            await check_connections(worker)

    async def default() -> None:
        await check_connections(await default_worker())

    for run in (main, default, main, main):
        trio.run(run)


# ---- bad input ----


@pytest.mark.parametrize("shared", [1, None, "yes"])
async def test_shared_must_be_a_bool(shared: Any) -> None:
    with pytest.raises(TypeError, match="shared must be a bool"):
        async with ucp.open_worker(shared=shared):
            raise AssertionError


async def test_a_worker_that_cannot_be_opened_is_not_shared() -> None:
    with pytest.raises(ValueError, match="TLZ"):
        async with ucp.open_worker(shared=True, config={"TLZ": "tcp"}):
            raise AssertionError
    await check_connections(await default_worker())


async def test_a_shared_worker_that_cannot_have_connections() -> None:
    async with ucp.open_worker(shared=True, features=ucp.Feature.AM):
        with pytest.raises(ValueError, match="feature TAG"):
            await default_worker()
