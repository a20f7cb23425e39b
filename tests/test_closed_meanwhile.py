"""What another task closes, or loses, between the moment in which a task was woken and the one in which it goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from helpers import expect_closed, open_listener, open_pair, open_raw_listener, open_raw_pair, until
from injected_faults import close_worker, close_worker_at_once

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.handshake import Handshake
from trio_ucx.testing import internals


async def test_raw_listener(worker: ucp.Worker) -> None:
    """The request that a task was given is rejected, and freed, when the listener closes."""
    for _ in range(8):  # either task may be the first
        listener = await open_raw_listener(worker)
        endpoint = await worker.open_endpoint(listener.address)
        await until(lambda listener=listener: listener._core.waiting)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, listener.accept_request)
            nursery.start_soon(listener.aclose)
        endpoint.abort()


async def test_raw_listener_that_was_waited_for(worker: ucp.Worker) -> None:
    listener = await open_raw_listener(worker)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, listener.accept_request)
        await trio.testing.wait_all_tasks_blocked()
        endpoint = await worker.open_endpoint(listener.address)
        while not listener._core.unanswered:
            internals(worker).reap()  # and no other task runs
        listener._core.close()
    endpoint.abort()


@pytest.mark.cut_off
@pytest.mark.filterwarnings("ignore:unclosed")
async def test_waiting_for_streams(transports: str) -> None:
    options: Any = {"config": {"TLS": transports}, "features": ucp.DEFAULT_FEATURES | ucp.Feature.STREAM}
    async with ucp.open_worker(**options) as worker, ucp.open_worker(**options) as other:
        async with (
            open_raw_pair(worker, other) as (client, server),
            trio.open_nursery() as nursery,
            worker.open_request_group() as group,
        ):
            nursery.start_soon(expect_closed, other.wait_stream_ready)
            await trio.testing.wait_all_tasks_blocked()
            group.stream_send(client, b"x")  # no checkpoint: no other task may run before the worker is closed
            while internals(other).receivers.stream_watchers:
                internals(worker).reap()
                internals(other).reap()
            close_worker_at_once(other)
            server.abort()


@pytest.mark.filterwarnings("ignore:unclosed")
async def test_connecting_while_the_worker_closes(
    worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the exchange, and while HELLO is awaited; also if the handshake ends before the task that waits for it."""
    async with open_listener(worker) as listener:
        for _ in range(4):
            async with ucp.open_worker(config={"TLS": transports}) as other, trio.open_nursery() as nursery:
                nursery.start_soon(expect_closed, lambda: trio_ucx.open_ucx_stream(*listener.address, worker=other))
                nursery.start_soon(expect_closed, lambda: trio_ucx.open_ucx_listeners(0, worker=other))
                nursery.start_soon(close_worker, other)
        silent: list[Handshake] = []
        monkeypatch.setattr(Handshake, "_open_if_ready", lambda handshake: silent.append(handshake))
        for handshake_first in (False, True):
            silent.clear()
            async with ucp.open_worker(config={"TLS": transports}) as other, trio.open_nursery() as nursery:
                with trio.fail_after(15):
                    nursery.start_soon(
                        expect_closed,
                        partial(trio_ucx.open_ucx_stream, *listener.address, worker=other, connect_timeout=60),
                    )
                    await until(lambda: silent)  # one side waits for the other
                    await trio.testing.wait_all_tasks_blocked()
                    if handshake_first:
                        for handshake in silent:
                            handshake.close()
                    close_worker_at_once(other)


async def test_flush_of_an_endpoint_whose_messages_break_it(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = trio_ucx.UCXError(ucp.Status.CONNECTION_RESET, "as if the peer had gone")
    async with open_pair(worker) as (client, _):
        core = internals(client.endpoint)
        monkeypatch.setattr(type(core.engine.links), "flush", lambda _: core.fail(lost))
        with pytest.raises(trio.BrokenResourceError, match="as if"):
            await client.endpoint.flush()
        monkeypatch.undo()
