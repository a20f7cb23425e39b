"""KeyboardInterrupt: a real SIGINT at random moments of a busy program."""

from __future__ import annotations

import gc
import random
import signal
import sys
from functools import partial
from types import FrameType
from typing import Any

import pytest
import trio
from helpers import Peer, echo, open_listener, open_peer, until

import trio_ucx
from trio_ucx import ucp
from trio_ucx._server import Handler, Server
from trio_ucx.anyio import UCXListener, UCXStream

PROGRAMS = 5
INTERRUPTS = 10  # of each program, for each of the two transports


async def interrupt(program: Peer, begun: str, delay: float) -> None:
    """Runs the program once more, and interrupts it so long after it has said that word."""
    await program.tell()
    while await program.hear(60) != begun:
        pass
    await trio.sleep(delay)
    program.signal(signal.SIGINT)
    try:
        while (said := await program.hear(60)) in ("begins", "ready"):
            pass
    except trio.TooSlowError:
        program.signal(signal.SIGABRT)  # faulthandler says where it hangs
        raise
    assert said == ["KeyboardInterrupt", {}], "ended, left"


@pytest.mark.full
@pytest.mark.sample(1)
async def test_interrupted_at_random_moments(worker: ucp.Worker, transports: str, chance: random.Random) -> None:
    async with open_peer("echo", [0, 1], transports=transports) as peer:
        address, _ = await peer.hear()
        limit = trio.CapacityLimiter(3)

        async def run(delays: list[float]) -> None:
            async with limit, open_peer("busy", address, transports) as program:
                for delay in delays:
                    await interrupt(program, "ready", delay)

        with trio.fail_after(200):
            async with trio.open_nursery() as nursery:
                for _ in range(PROGRAMS):
                    nursery.start_soon(run, [chance.random() * 0.05 for _ in range(INTERRUPTS)])
        # The other side was not hurt.
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            await connection.send(b"alive?")
            assert await connection.receive() == b"alive?"


async def test_interrupted_before_anything_is_up(transports: str) -> None:
    """From ``trio.run`` on it must be as clean. (During imports Python's own KeyboardInterrupt ends it.)"""
    async with open_peer("silent", transports=transports) as peer:
        address, _ = await peer.hear()
        async with open_peer("busy", address, transports) as program:  # waits for an answer that never comes
            for delay in (0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5):
                await interrupt(program, "begins", delay)


async def serve(handler: Handler, task_status: trio.TaskStatus[Any]) -> None:
    await trio_ucx.serve_ucx(handler, 0, host="127.0.0.1", task_status=task_status)


async def serve_with_anyio(handler: Handler, task_status: trio.TaskStatus[Any]) -> None:
    async def handle(stream: UCXStream) -> None:
        async with stream:
            await handler(stream.connection)

    async with open_listener() as listener:
        task_status.started(listener)
        await UCXListener(listener).serve(handle)


@pytest.mark.parametrize(
    ("serve", "function"),
    [
        (serve, Server._begin),
        (serve, Server._serve),
        (serve, Server._handle),
        (serve_with_anyio, UCXStream.__init__),
    ],
)
def test_interrupted_between_accept_and_handler(serve: Any, function: Any, over: str) -> None:
    """The connection is closed: the destructor of an unclosed one would warn."""

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is function.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                address = (await nursery.start(serve, echo)).address
                sys.setprofile(interrupt)
                async with trio_ucx.connect(address) as connection:
                    await connection.send(b"x")
                    await trio.sleep_forever()

    try:
        trio.run(main)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        assert not isinstance(error, BaseExceptionGroup) or error.split(KeyboardInterrupt)[1] is None, error
    else:
        raise AssertionError("it was not interrupted")
    finally:
        sys.setprofile(None)
    gc.collect()


async def test_handlers_can_be_interrupted(worker: ucp.Worker) -> None:
    """The library's protection ends where the user's code begins."""
    seen = []

    async def handler(connection: trio_ucx.Connection) -> None:
        seen.append(trio.lowlevel.currently_ki_protected())
        await connection.ping()  # the client's connect has returned
        raise ValueError

    def on_error(connection: trio_ucx.Connection, error: Exception) -> None:
        seen.append(trio.lowlevel.currently_ki_protected())

    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1", worker=worker, on_handler_error=on_error)
        )
        async with trio_ucx.connect(server.address, worker=worker):
            await until(lambda: len(seen) == 2)
        nursery.cancel_scope.cancel()
    assert seen == [False, False]
