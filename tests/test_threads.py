"""Threads: a worker and a Trio run in each, addresses exchanged between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from helpers import pattern
from injected_faults import Library

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx.ucp._engine import lifetime
from trio_ucx.ucp._memory import registered

THREADS = 4
ROUNDS = 50


def run_in_threads(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs ``function(number, *arguments)`` in Trio runs of their own, one in each thread; what they return."""
    results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def run(number: int) -> None:
        try:
            results.put((number, trio.run(function, number, *arguments)))
        except BaseException as error:
            results.put((number, error))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    found = dict(results.get(timeout=50) for _ in threads)
    for thread in threads:
        thread.join(10)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[number] for number in range(THREADS)]


class Meeting:
    """Where threads leave something for all others, and wait until all have."""

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}
        self._barrier = threading.Barrier(THREADS, timeout=30)

    async def exchange(self, number: int, thing: Any) -> dict[int, Any]:
        self._things[number] = thing
        await self.wait()
        return dict(self._things)

    async def wait(self) -> None:
        await trio.to_thread.run_sync(self._barrier.wait)


async def talk_to_all(number: int, meeting: Meeting, context: ucp.Context | None, config: ucp.Config | None) -> int:
    """Messages and active messages between all pairs of threads, raw endpoints by worker address."""
    total = 0
    async with ucp.open_worker(context=context, config=config) as worker:
        addresses = await meeting.exchange(number, worker.address)
        with trio.fail_after(40), worker.open_active_messages(3) as messages:
            await meeting.wait()
            endpoints = {
                other: await worker.open_endpoint(address) for other, address in addresses.items() if other != number
            }
            async with trio.open_nursery() as nursery:

                async def send(other: int) -> None:
                    for turn in range(ROUNDS):
                        await endpoints[other].tag_send(pattern(1000 * turn, seed=number), number)
                        await endpoints[other].am_send(3, pattern(100, seed=turn), header=bytes([number]))

                async def receive(other: int) -> None:
                    nonlocal total
                    for turn in range(ROUNDS):
                        buffer = bytearray(1000 * turn)
                        assert await worker.tag_receive(buffer, other) == (len(buffer), other)
                        assert buffer == pattern(1000 * turn, seed=other)
                        total += len(buffer)

                for other in endpoints:
                    nursery.start_soon(send, other)
                    nursery.start_soon(receive, other)
                next_seed = dict.fromkeys(endpoints, 0)
                for _ in range(ROUNDS * len(endpoints)):
                    with await messages.receive() as message:
                        other = message.header[0]
                        assert message.data == pattern(100, seed=next_seed[other])
                        next_seed[other] += 1
            await worker.flush()
            await meeting.wait()  # nobody closes while others still have something to receive
            for endpoint in endpoints.values():
                endpoint.abort()
    return total


@pytest.mark.parametrize("shared", [False, True], ids=["a context each", "one context"])
def test_workers_of_threads_talk_to_each_other(transports: str, shared: bool) -> None:
    expected = [(THREADS - 1) * sum(1000 * turn for turn in range(ROUNDS))] * THREADS
    if shared:
        with ucp.open_context({"TLS": transports}) as context:
            assert run_in_threads(talk_to_all, Meeting(), context, None) == expected
    else:
        assert run_in_threads(talk_to_all, Meeting(), None, {"TLS": transports}) == expected


async def serve_and_call(number: int, meeting: Meeting) -> list[bytes]:
    """Each thread serves, and calls all the others: with the workers that Connections share by default."""

    async def answer(connection: trio_ucx.Connection) -> None:
        async for message in connection.messages():
            await connection.send(bytes([number]) + message)

    async with trio.open_nursery() as nursery:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        addresses = await meeting.exchange(number, (listener.address,))
        answers = []
        with trio.fail_after(30):
            for other in range(THREADS):
                for address in addresses[other]:
                    async with trio_ucx.connect(address) as connection:
                        await connection.send(b"hello")
                        answers.append(await connection.receive())
        await meeting.wait()
        nursery.cancel_scope.cancel()
    return answers


def test_threads_serve_each_other() -> None:
    expected = [bytes([other]) + b"hello" for other in range(THREADS)]
    assert run_in_threads(serve_and_call, Meeting()) == [expected] * THREADS


@pytest.mark.parametrize("what", ["worker", "memory"])
def test_context_that_is_left_while_something_is_made_with_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread leaves it just before UCX is called: it stays for what is made, and no longer."""

    class Leaving(Library):
        def tu_worker_create(self, *arguments: Any) -> int:
            return self._leave(lib.tu_worker_create, arguments)

        def tu_memory_map(self, *arguments: Any) -> int:
            return self._leave(lib.tu_memory_map, arguments)

        def _leave(self, function: Callable[..., int], arguments: Any) -> int:
            thread = threading.Thread(target=context._close)
            thread.start()
            thread.join(15)
            assert context._closed and context._handle is not None
            return function(*arguments)

    async def work() -> None:
        async with ucp.open_worker(context=context) as worker:
            async with await worker.open_endpoint(worker.address):
                pass

    async def main() -> None:
        if what == "worker":
            await trio.to_thread.run_sync(trio.run, work)
        else:
            context.allocate(100).close()

    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA
    with ucp.open_context({"TLS": "tcp,self"}, features=features) as context:
        monkeypatch.setattr(lifetime, "lib", Leaving())
        monkeypatch.setattr(registered, "lib", Leaving())
        trio.run(main)
        assert context._handle is None


def test_context_ends_with_the_last_worker_of_any_thread() -> None:
    """Left while another thread uses it, it stays for that thread, and no longer."""
    opened, leave = threading.Event(), threading.Event()
    problems = []

    async def work() -> None:
        async with ucp.open_worker(context=context) as worker:
            opened.set()
            with trio.fail_after(20):
                await trio.to_thread.run_sync(leave.wait, 15)
            async with await worker.open_endpoint(worker.address) as endpoint:
                await endpoint.tag_send(b"still here", 1)
                assert await worker.tag_receive(bytearray(10), 1) == (10, 1)

    def run() -> None:
        try:
            trio.run(work)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with ucp.open_context({"TLS": "tcp,sm,self"}) as context:
        thread.start()
        assert opened.wait(10)
    with pytest.raises(RuntimeError, match="closed"):
        context.info_text()
    assert context._handle is not None
    leave.set()
    thread.join(20)
    assert problems == []
    assert context._handle is None
