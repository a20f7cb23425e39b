"""A worker that breaks, by an internal error, tells every task that waits for something on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import nothing_happens, open_listener, open_pair, open_raw_listener, until
from injected_faults import break_worker, lose_completions
from peers import REMOTE
from remote import ask_the_owner
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals

#: Seconds in which every waiting task must be told.
SOON = 1.0
LARGE = 2**20


@attrs.define
class Waits:
    """Tasks that wait on one worker, and what each has ended with."""

    nursery: trio.Nursery
    worker: ucp.Worker
    peer: ucp.Worker
    stack: AsyncExitStack
    waiting: set[str] = attrs.field(factory=set)
    ended: dict[str, BaseException | None] = attrs.field(factory=dict)

    def start(self, name: str, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        async def run() -> None:
            try:
                await function(*arguments)
            except trio.Cancelled:
                raise
            except BaseException as error:
                self.ended[name] = error
            else:
                self.ended[name] = None
            self.waiting.discard(name)

        self.waiting.add(name)
        self.nursery.start_soon(run)

    async def endpoint(self) -> ucp.Endpoint:
        endpoint = await self.worker.open_endpoint(self.peer.address)
        self.stack.callback(endpoint.abort)
        await endpoint.flush()
        return endpoint

    async def connection(self, **options: Any) -> trio_ucx.Connection:
        client, _ = await self.stack.enter_async_context(open_pair(self.worker, self.peer, **options))
        return client


@asynccontextmanager
async def open_waits(transports: str) -> AsyncIterator[Waits]:
    config = {"TLS": transports}
    with trio.fail_after(60):
        async with (
            ucp.open_worker(config=config, features=REMOTE | ucp.Feature.STREAM | ucp.Feature.AM) as worker,
            ucp.open_worker(config=config, features=REMOTE | ucp.Feature.STREAM | ucp.Feature.AM) as peer,
            AsyncExitStack() as stack,
            trio.open_nursery() as nursery,
        ):
            yield Waits(nursery, worker, peer, stack)
            nursery.cancel_scope.cancel()


async def check_all_told(waits: Waits) -> None:
    """Breaks the worker, and expects that all tasks are told."""
    await nothing_happens(0.2)
    assert not waits.ended, "some tasks did not wait"
    with Stopwatch(SOON):
        break_worker(waits.worker)
        with trio.move_on_after(30):
            await until(lambda: not waits.waiting)
        assert not waits.waiting, "these tasks were not told"


def check_errors(waits: Waits, *without: str) -> None:
    """All tasks but some have ended with an error that says that the worker broke."""
    for name, error in waits.ended.items():
        if name in without:
            assert error is None, (name, error)
        else:
            assert isinstance(error, trio.BrokenResourceError), (name, error)
            assert "worker broke" in str(error), (name, error)


async def test_raw_operations(transports: str) -> None:
    async with open_waits(transports) as waits:
        worker, start = waits.worker, waits.start
        endpoint, second, third, closing = [await waits.endpoint() for _ in range(4)]
        start("tag_receive", worker.tag_receive, bytearray(1), 1)
        start("tag_send", endpoint.tag_send, bytes(LARGE), 2)
        start("stream_receive", endpoint.stream_receive, bytearray(8))
        start("stream_receive, exact", partial(second.stream_receive, bytearray(8), exact=True))
        start("stream_receive_some", third.stream_receive_some)
        start("wait_stream_ready", worker.wait_stream_ready)
        messages = waits.stack.enter_context(worker.open_active_messages(1))
        start("ActiveMessages.receive", messages.receive)
        listener = await waits.stack.enter_async_context(await open_raw_listener(worker))
        start("accept_request", listener.accept_request)
        start("tag_send before the close", closing.tag_send, bytes(LARGE), 3)
        await trio.testing.wait_all_tasks_blocked()
        start("Endpoint.aclose", closing.aclose)
        chain = worker.new_chain()
        waits.stack.callback(chain.close)
        chain.tag_send(endpoint, bytes(LARGE), 4)
        start("RequestChain.run", chain.run)
        cancelled = worker.new_chain()
        waits.stack.callback(cancelled.close)
        cancelled.tag_send(endpoint, bytes(LARGE), 5)
        with trio.move_on_after(0.05):
            await cancelled.run()
        start("wait_idle", cancelled.wait_idle)
        start("request group", _receive_in_a_group, worker)
        await check_all_told(waits)
        group = waits.ended.pop("request group")
        assert isinstance(group, ExceptionGroup) and group.subgroup(trio.BrokenResourceError)
        check_errors(waits)


async def _receive_in_a_group(worker: ucp.Worker) -> None:
    async with worker.open_request_group() as group:
        group.tag_receive(bytearray(1), 6)


@pytest.mark.cut_off
async def test_operations_whose_completions_are_lost(transports: str) -> None:
    async with open_waits(transports) as waits:
        endpoint, start = await waits.endpoint(), waits.start
        with waits.peer.context.register(bytearray(64)) as memory:
            remote = waits.stack.enter_context(endpoint.attach(memory.descriptor))
            await remote.fetch_add(1)
            await ask_the_owner(remote)
            lose_completions(waits.worker)
            start("fetch_add", remote.fetch_add, 1)
            start("get", remote.get)
            await check_all_told(waits)
            check_errors(waits)


async def test_operations_of_connections(transports: str) -> None:
    async with open_waits(transports) as waits:
        start = waits.start
        connection = await waits.connection(window=8192)
        start("receive", partial(connection.receive, tag=1))
        start("receive_into", partial(connection.receive_into, bytearray(8), tag=2))
        start("receive_some", connection.receive_some)
        without_credit = False
        while not without_credit:
            with trio.move_on_after(0.3) as scope:
                await connection.send(bytes(1024), tag=3)
            without_credit = scope.cancelled_caught
        start("send, for credit", partial(connection.send, bytes(1024), tag=3))
        start("wait_closed", connection.wait_closed)
        cancelled = await waits.connection()
        with trio.move_on_after(0.05):
            await cancelled.send(bytes(LARGE), tag=1)
        start("wait_buffers_released", cancelled.wait_buffers_released)
        start("send, by rendezvous", partial(cancelled.send, bytes(LARGE), tag=2))
        start("send_all", connection.send_all, bytes(LARGE))
        closing = await waits.connection(close_timeout=30)
        closing.send_nowait(bytes(LARGE), tag=1)
        start("Connection.aclose", closing.aclose)
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=waits.worker)
        waits.stack.push_async_callback(listener.aclose)
        start("accept", listener.accept)
        await check_all_told(waits)
        if waits.ended["wait_buffers_released"] is None:  # UCX has let go of them after all
            del waits.ended["wait_buffers_released"]
        check_errors(waits)


@pytest.mark.parametrize("how", ["a close in the background", "a close that waits for its acknowledgement"])
async def test_closes_of_connections(transports: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_waits(transports) as waits:
        connection = await waits.connection(close_timeout=30)
        if "background" in how:
            connection.send_nowait(bytes(LARGE), tag=1)
            with trio.move_on_after(0.05):
                await connection.aclose()
            waits.start("background", until, lambda: not waits.worker.statistics().background_closes)
            await check_all_told(waits)
            check_errors(waits, "background")
        else:
            monkeypatch.setattr(internals(connection).closing, "ack_arrived", lambda: None)
            await connection.send(b"x")
            waits.start("Connection.aclose", connection.aclose)
            await check_all_told(waits)
            check_errors(waits)


async def test_another_shared_worker_takes_the_place_of_a_broken_one() -> None:
    broken = ucp.Worker._shared()
    break_worker(broken)
    async with open_listener() as listener, trio_ucx.connect(listener.address) as client, await listener.accept():
        assert client.worker is listener.worker is not broken
