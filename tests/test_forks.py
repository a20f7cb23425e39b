"""A forked child's calls are refused at once, with a helpful error; the parent is not affected."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import trio
from helpers import open_pair, open_peer, open_raw_listener, open_raw_pair
from injected_faults import close_context, close_worker
from outcome import Value
from peers import REMOTE

import trio_ucx
from trio_ucx import ucp

#: How long a child may take in all.
LIMIT = 60.0


def in_child(function: Callable[[], Any]) -> Any:
    """Runs the function in a forked child, and returns its result (by JSON)."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        try:
            answer = function()
        except BaseException:
            answer = traceback.format_exc()
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def refusal(function: Callable[[], Any]) -> str:
    """How a function is refused. If it returns a coroutine, the refusal must come before the first wait."""
    try:
        result = function()
        if hasattr(result, "send"):
            result.send(None)
            result.close()
            return "it waits"
        if hasattr(result, "__aenter__"):
            result.__aenter__().send(None)
        return f"it returned {result!r}"
    except RuntimeError as error:
        return "refused" if "fork" in str(error) and "'spawn'" in str(error) else repr(error)
    except BaseException as error:
        return repr(error)


def in_run(function: Callable[[], Any]) -> str:
    """How a Trio run in the child is refused that awaits or enters what the function returns."""
    verdict: list[str] = []

    async def main() -> None:
        try:
            with trio.fail_after(LIMIT):
                thing = function()
                if hasattr(thing, "__await__"):
                    await thing
                else:
                    async with thing:
                        pass
            verdict.append("it was let in")
        except RuntimeError as error:
            verdict.append("refused" if "fork" in str(error) and "'spawn'" in str(error) else repr(error))
        except BaseException as error:
            verdict.append(repr(error))

    thread = threading.Thread(target=trio.run, args=(main,))  # this one has a run, which is the parent's
    thread.start()
    thread.join()
    return verdict[0]


def answers_at_entries(address: tuple[str, int], worker: ucp.Worker) -> dict[str, Any]:
    async def handler(connection: trio_ucx.Connection) -> None:
        pass

    def child() -> dict[str, Any]:
        began = time.monotonic()
        answers: dict[str, Any] = {
            "connect": in_run(lambda: trio_ucx.connect(address)),
            "connect, the parent's worker": in_run(lambda: trio_ucx.connect(address, worker=worker)),
            "open_ucx_stream": in_run(lambda: trio_ucx.open_ucx_stream(*address)),
            "open_ucx_listeners": in_run(lambda: trio_ucx.open_ucx_listeners(0)),
            "serve_ucx": in_run(lambda: trio_ucx.serve_ucx(handler, 0)),
            "open_worker": in_run(ucp.open_worker),
            "open_worker, the parent's context": in_run(lambda: ucp.open_worker(context=worker.context)),
            "open_context": refusal(lambda: ucp.open_context().__enter__()),
            "connect in the parent's run": refusal(lambda: _second_step(trio_ucx.open_ucx_stream(*address))),
        }
        answers["soon"] = time.monotonic() - began < LIMIT
        return answers

    answers: dict[str, Any] = in_child(child)
    return answers


def _second_step(coroutine: Any) -> None:
    """Lets the coroutine pass its first checkpoint, as the Trio run would."""
    coroutine.send(None)
    coroutine.send(Value(None))


async def test_a_child_may_open_nothing(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker, open_pair(worker) as (client, server):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")  # on the run's own worker
        answers = answers_at_entries(listener.address, worker)
        assert answers.pop("soon") is True
        assert set(answers.values()) == {"refused"}, answers
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            await connection.send(b"the listener")
            async with await listener.accept() as accepted:
                assert await accepted.receive() == b"the listener"
        await client.send(b"and the pair")
        assert await server.receive() == b"and the pair"
        await listener.aclose()


async def test_what_a_child_inherits(transports: str) -> None:
    """Use of inherited objects is refused; closing and dropping them has no effect on the parent, which uses them."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config={"TLS": transports}, features=REMOTE))
        client, server = await stack.enter_async_context(open_pair(worker))
        endpoint, other_end = await stack.enter_async_context(open_raw_pair(worker))
        raw_listener = await stack.enter_async_context(await open_raw_listener(worker))
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        stack.push_async_callback(listener.aclose)
        memory = stack.enter_context(worker.context.allocate(4096))
        memory.memoryview[:8] = b"original"
        remote = stack.enter_context(endpoint.attach(memory.descriptor))
        assert await remote.get(0, 8) == b"original"
        queue = stack.enter_context(worker.open_active_messages(7))
        await endpoint.am_send(7, bytes(3000), b"header")
        message = await queue.receive()
        chain = worker.new_chain(capacity=4)
        stack.callback(chain.close)
        chain.get(remote, 0, 8)
        await client.send(b"unread")
        await server.wait_message()

        def child() -> dict[str, Any]:
            uses: dict[str, Callable[[], Any]] = {
                "send": lambda: client.send(b"x"),
                "send_nowait": lambda: client.send_nowait(b"x"),
                "send_all": lambda: client.send_all(b"x"),
                "receive": lambda: server.receive(),
                "receive_nowait": server.receive_nowait,
                "receive_into": lambda: server.receive_into(bytearray(10)),
                "receive_some": lambda: server.receive_some(),
                "tag_send": lambda: endpoint.tag_send(b"x", 1),
                "am_send": lambda: endpoint.am_send(7, b"x"),
                "flush": lambda: endpoint.flush(),
                "put": lambda: remote.put(b"x", 0),
                "get": lambda: remote.get(0, 8),
                "attach": lambda: endpoint.attach(b""),
                "run": lambda: chain.run(),
                "new_chain": worker.new_chain,
                "tag_receive": lambda: worker.tag_receive(bytearray(1), 1),
                "tag_probe": lambda: worker.tag_probe(1),
                "flush worker": lambda: worker.flush(),
                "fence": worker.fence,
                "open_endpoint": lambda: worker.open_endpoint(worker.address),
                "open_listener": lambda: open_raw_listener(worker),
                "open_active_messages": lambda: worker.open_active_messages(8),
                "statistics": worker.statistics,
                "accept": lambda: listener.accept(),
                "accept_request": lambda: raw_listener.accept_request(),
                "receive am": lambda: queue.receive(),
                "register": lambda: worker.context.register(bytearray(10)),
                "allocate": lambda: worker.context.allocate(10),
                "rkey": lambda: memory.memoryview,
                "info_text": worker.context.info_text,
            }
            answers = {name: refusal(use) for name, use in uses.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for each in client, endpoint:
                    each.abort()
                for close in (
                    server.aclose,
                    other_end.aclose,
                    listener.aclose,
                    raw_listener.aclose,
                    partial(close_worker, worker),
                ):
                    coroutine = close()
                    coroutine.send(None)  # all that it does but a checkpoint
                    coroutine.close()
                message.release()
                for thing in memory, remote, chain:
                    thing.close()
                queue.__exit__(None, None, None)
                for thing in client, server, endpoint, other_end, listener, message:
                    thing.__del__()
                close_context(worker.context)
                gc.collect()
            return answers

        trips = 0
        forked = trio.Event()

        async def fork() -> None:
            def use_and_end() -> list[str]:
                answers = [
                    in_run(lambda: trio_ucx.connect(listener.address)),
                    refusal(lambda: client.send_nowait(b"x")),
                ]
                for each in client, server, endpoint:
                    each.abort()
                gc.collect()
                return answers

            for _ in range(5):
                assert await trio.to_thread.run_sync(in_child, use_and_end) == ["refused", "refused"]
            forked.set()

        assert await server.receive() == b"unread"
        answers = in_child(child)
        assert {name: answer for name, answer in answers.items() if answer != "refused"} == {}
        with trio.fail_after(LIMIT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fork)
                while not forked.is_set() or trips < 100:
                    trips += 1
                    for size in 8, 3000, 2**17:
                        async with trio.open_nursery() as pair:
                            pair.start_soon(client.send, bytes(size))
                            assert len(await server.receive()) == size
        assert await remote.get(0, 8) == b"original"
        await chain.run()
        assert len(message.data) == 3000
        message.release()
        await endpoint.am_send(7, b"again")
        with await queue.receive() as second:
            assert bytes(second.data) == b"again"
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            await connection.send(b"the listener")
            async with await listener.accept() as accepted:
                assert await accepted.receive() == b"the listener"


async def test_a_child_of_a_parent_that_has_nothing_open(transports: str) -> None:
    async with open_peer("echo", [0], transports=transports) as server:
        [_, port], _ = await server.hear()
        async with open_peer("fork_between_runs", port, transports=transports) as parent:
            assert await parent.hear() == "hello"
            assert await parent.hear() == "hello"
