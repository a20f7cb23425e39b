"""The path of a small message through the library, in functions: design.md draws it."""

from __future__ import annotations

import inspect
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from helpers import open_pair

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx.testing import internals
from trio_ucx.ucp._engine.dispatch import deliver
from trio_ucx.ucp._engine.engine import Engine
from trio_ucx.ucp._engine.progress import DEFER_SECONDS

PACKAGE = str(Path(trio_ucx.__file__).parent)
#: The most library functions from ``await connection.send`` to UCX's C call.
MOST_OUT = 6
#: The most from the delivery of a record to where ``await connection.receive`` returns.
MOST_IN = 14
#: The same where the task leads: it takes the message from UCX itself.
MOST_IN_LEADER = 18


class Recorded:
    """Records the library's functions that run inside certain ones.

    Args:
        since: begins with the first call of this function; those of its callers count that return later.
        until: ends with the call of this C function.
    """

    def __init__(self, *roots: Any, since: Any = None, until: str = "") -> None:
        self._roots = {root.__code__ for root in roots}
        self._since = since and since.__code__
        self._until = until
        #: Whether the C call was made at which the record ends.
        self.reached_end = False
        #: Each function once, in the order of the first calls.
        self.functions: list[str] = []
        #: The calls, without those that only resume a coroutine.
        self.calls = 0
        self._seen: set[types.FrameType] = set()

    def _inside(self, frame: types.FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._roots:
                return True
            frame = frame.f_back
        return False

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and self._until and getattr(argument, "__name__", "") == self._until:
            self.reached_end = True
        if event != "call" or self.reached_end or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if self._since is not None:
            if frame.f_code is not self._since:
                return
            self._since = None
            caller = frame.f_back
            while caller is not None:
                if caller.f_code.co_filename.startswith(PACKAGE) and self._inside(caller):
                    self._count(caller)
                caller = caller.f_back
        if self._inside(frame):
            self._count(frame)

    def _count(self, frame: types.FrameType) -> None:
        if frame not in self._seen:
            self.calls += 1
            self._seen.add(frame)
            name = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
            if name not in self.functions:
                self.functions.append(name)

    def __enter__(self) -> Recorded:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __str__(self) -> str:
        return f"{len(self.functions)} functions, {self.calls} calls: {', '.join(self.functions)}"


SEND, RECEIVE = inspect.unwrap(trio_ucx.Connection.send), inspect.unwrap(trio_ucx.Connection.receive)


@pytest.fixture
def transports() -> str:
    return "sm,self"


async def test_out(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        await client.send(b"the tag queue exists from now on")
        await server.receive()
        for data in (b"8 bytes.", b"", bytes(1024), bytes(4096)):
            await trio.sleep(0.001)  # else it would follow closely, and join a batch
            with Recorded(SEND, until="tu_link_send") as path:
                await client.send(data)
            assert path.reached_end
            assert len(path.functions) <= MOST_OUT and path.calls <= MOST_OUT, str(path)
            assert await server.receive() == data


async def test_a_batch_waits_no_longer_because_other_tasks_run(worker: ucp.Worker) -> None:
    """In a round with many tasks, what the first have sent goes before the last have run."""
    async with open_pair(worker) as (client, server):
        await client.send(b"the tag queue exists from now on")
        await server.receive()
        links = internals(client).engine.links
        deferred = 0
        for _ in range(20):  # the machine may delay the three sends
            for number in range(3):
                client.send_nowait(b"%d" % number)
            deferred += bool(lib.tu_links_news(links.native) & lib.TU_NEWS_BATCHES)
            time.sleep(2 * DEFER_SECONDS)
            client.send_nowait(b"3")
            assert not lib.tu_links_news(links.native) & lib.TU_NEWS_BATCHES
            assert [await server.receive() for _ in range(4)] == [b"0", b"1", b"2", b"3"]
        assert deferred


@pytest.mark.parametrize("behind", [0, 1], ids=["alone", "behind another"])
async def test_in_when_it_is_there(worker: ucp.Worker, behind: int) -> None:
    async with open_pair(worker) as (client, server):
        await client.send(b"the tag queue exists from now on")
        await server.receive()
        for _ in range(behind):
            client.send_nowait(b"other size")
            await trio.sleep(0.001)
            internals(worker).reap()
        client.send_nowait(b"8 bytes.")
        with Recorded(deliver, RECEIVE) as path:
            internals(worker).reap()
            data = await server.receive()
        assert data == (b"other size" if behind else b"8 bytes.")
        assert "dispatch.deliver" in path.functions
        assert len(path.functions) <= MOST_IN and path.calls <= MOST_IN, str(path)


async def test_in_when_a_parked_task_waits(transports: str) -> None:
    async with (
        ucp.open_worker(config={"TLS": transports}, spin=0) as worker,
        open_pair(worker) as (client, server),
        trio.open_nursery() as nursery,
    ):
        await client.send(b"the tag queue exists from now on")
        await server.receive()
        got = []

        async def receive() -> None:
            got.append(await server.receive())

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        with Recorded(Engine.look, RECEIVE, since=Engine.look) as path, trio.fail_after(15):
            client.send_nowait(b"8 bytes.")
            while not got:
                await trio.sleep(0)
        assert got == [b"8 bytes."]
        assert "engine.Engine.look" in path.functions
        assert len(path.functions) <= MOST_IN_LEADER, str(path)


async def test_in_when_a_task_polls(transports: str) -> None:
    """The fewest of some messages: a task that begins or ends polling adds a hook, or removes it."""
    paths = []
    async with ucp.open_worker(config={"TLS": transports}) as worker, open_pair(worker) as (client, server):
        for _ in range(100):
            client.send_nowait(b"8 bytes.")
            with Recorded(deliver, RECEIVE, since=deliver) as path, trio.fail_after(15):
                assert await server.receive() == b"8 bytes."
            if path.functions:  # it was not there before
                paths.append(path)
    shortest = min(paths, key=lambda path: len(path.functions))
    assert len(shortest.functions) <= MOST_IN, str(shortest)
