"""Errors of handlers: the loss of a client does not end a server; any other error does, as in Trio."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from helpers import open_pair, open_peer, pattern, serving, until, until_over
from injected_faults import break_worker
from remote import for_ucx

import trio_ucx
from trio_ucx import ucp
from trio_ucx._server import split_own
from trio_ucx.testing import internals
from trio_ucx.ucp import Status

Handler = Callable[[trio_ucx.Connection], Awaitable[object]]


def lines(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "trio_ucx" and each.levelname == level]


# ---- what a handler may do while its client goes away; each waits for ever otherwise ----


async def receives(connection: trio_ucx.Connection) -> None:
    while True:
        await connection.receive()


async def sends(connection: trio_ucx.Connection) -> None:
    while True:
        await connection.send(pattern(1000))
        await trio.sleep(0)


async def sends_large(connection: trio_ucx.Connection) -> None:
    while True:
        await connection.send(pattern(2**20))


async def writes(connection: trio_ucx.Connection) -> None:
    while True:
        await connection.send_all(pattern(2**20))


async def asks_its_endpoint(connection: trio_ucx.Connection) -> None:
    while True:
        await connection.endpoint.flush()
        await trio.sleep(0.001)


async def in_tasks(connection: trio_ucx.Connection) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receives, connection)
        nursery.start_soon(sends_large, connection)
        async with trio.open_nursery() as inner:
            inner.start_soon(partial(connection.receive, tag=5))
            inner.start_soon(connection.receive_some)


async def in_a_group(connection: trio_ucx.Connection) -> None:
    async with connection.worker.open_request_group() as group:
        group.send(connection, pattern(2**20))
        group.receive_into(connection, bytearray(10))


HANDLERS = [receives, sends, sends_large, writes, asks_its_endpoint, in_tasks, in_a_group]


@pytest.mark.parametrize("end", ["killed", "aborted"])
async def test_lost_client_does_not_end_the_server(
    transports: str, worker: ucp.Worker, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    caplog.set_level(logging.DEBUG, "trio_ucx")
    begun = 0

    async def handler(connection: trio_ucx.Connection) -> None:
        nonlocal begun
        number = int(await connection.receive(tag=1))
        begun += 1
        if number < len(HANDLERS):
            await HANDLERS[number](connection)
        await connection.send(b"served", tag=1)

    async with serving(handler, worker) as listener:
        for number, one in enumerate(HANDLERS):
            before = len(lines(caplog))
            if end == "killed":
                async with open_peer("client_of", list(listener.address), number, transports=transports) as peer:
                    await until(lambda number=number: begun == number + 1)
                    peer.process.kill()
            else:
                client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
                await client.send(b"%d" % number, tag=1)
                await until(lambda number=number: begun == number + 1)
                client.abort()
            await until(lambda before=before: len(lines(caplog)) > before)
            assert len(lines(caplog)) == before + 1, (one, lines(caplog)[before:])
            line = lines(caplog)[-1]
            assert (
                line.startswith("<trio_ucx.Connection to ") and f"{handler.__qualname__} ended at {__file__}:" in line
            )
            if one is not in_tasks and one is not in_a_group:
                assert line.endswith(f" ({one.__qualname__})"), line
        async with trio_ucx.connect(listener.address, worker=worker) as client:
            await client.send(b"99", tag=1)
            assert await client.receive(tag=1) == b"served"


async def test_client_that_closes_while_it_is_sent_to(worker: ucp.Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trio_ucx")
    ended = 0

    async def handler(connection: trio_ucx.Connection) -> None:
        nonlocal ended
        try:
            await sends(connection)
        finally:
            ended += 1

    async with serving(handler, worker) as listener:
        for count in (1, 2):
            async with trio_ucx.connect(listener.address, worker=worker) as client:
                await client.receive()
            await until(lambda count=count: ended == count)
    assert len([line for line in lines(caplog, "DEBUG") if "closed the connection" in line]) == 2
    assert not lines(caplog)


@pytest.mark.parametrize("end", ["aborted", "closed"])
async def test_a_handler_asks_about_a_client_that_has_gone(worker: ucp.Worker, end: str) -> None:
    """They return what was last known, and raise no error that would be taken for the loss of the client."""
    told: list[Any] = []
    heard = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        endpoint = connection.endpoint
        await connection.receive()
        heard.set()
        await until_over(connection)
        await trio.sleep(0.01)
        told.append((endpoint.transports, endpoint.name, repr(endpoint), endpoint.statistics(), endpoint.alive))
        told.append((endpoint.local_address, endpoint.remote_address, repr(connection), connection.statistics()))

    async with serving(handler, worker) as listener:
        client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
        transports = client.endpoint.transports
        await client.send(b"hello")
        if end == "closed":
            await client.aclose()
        else:
            await heard.wait()
            client.abort()
        await until(lambda: len(told) == 2)
        assert transports and {lane.name for lane in told[0][0]} == {lane.name for lane in transports}
        assert client.endpoint.transports == transports and client.endpoint.name


# ---- what ends it ----


async def own_loss(connection: trio_ucx.Connection) -> trio.BrokenResourceError:
    try:
        await connection.receive()
    except trio.BrokenResourceError as error:
        return error
    raise AssertionError("the client was not lost")


async def raises_another(connection: trio_ucx.Connection) -> None:
    await until_over(connection)  # the client has connected, and gone
    raise trio.BrokenResourceError("of something else")


async def raises_from_its_own(connection: trio_ucx.Connection) -> None:
    error = await own_loss(connection)
    raise trio.BrokenResourceError("another") from error


async def raises_while_handling_its_own(connection: trio_ucx.Connection) -> None:
    try:
        await connection.receive()
    except trio.BrokenResourceError:
        raise ValueError("mine")  # noqa: B904 -- what is its context, not its cause


async def uses_it_after_its_close(connection: trio_ucx.Connection) -> None:
    await connection.aclose()
    await connection.receive()


async def uses_one_that_was_lost(connection: trio_ucx.Connection) -> None:
    async with open_pair(connection.worker) as (mine, other):
        other.abort()
        await mine.receive()


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (raises_another, trio.BrokenResourceError),
        (raises_from_its_own, trio.BrokenResourceError),
        (raises_while_handling_its_own, ValueError),
        (uses_it_after_its_close, trio.ClosedResourceError),
        (uses_one_that_was_lost, trio.BrokenResourceError),
    ],
)
async def test_other_errors_end_the_server(worker: ucp.Worker, handler: Handler, expected: type[Exception]) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        with trio.fail_after(20):
            async with serving(handler, worker) as listener:
                client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
                try:
                    await until(lambda: listener.statistics().accepted)
                finally:
                    client.abort()
                await trio.sleep_forever()
    assert caught.group_contains(expected)


async def test_only_the_own_loss_is_removed_from_an_exception_group(
    worker: ucp.Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trio_ucx")
    raised: list[BaseException] = []

    async def handler(connection: trio_ucx.Connection) -> None:
        loss = await own_loss(connection)
        foreign = trio.BrokenResourceError("foreign")
        cause = KeyError("cause")
        raised.extend([loss, foreign])
        inner = ExceptionGroup("inner", [loss, foreign])
        raise ExceptionGroup("outer", [loss, inner, ValueError("mine")]) from cause

    with pytest.raises(ExceptionGroup) as caught:
        with trio.fail_after(20):
            async with serving(handler, worker) as listener:
                client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
                await until(lambda: listener.statistics().accepted)
                client.abort()
                await trio.sleep_forever()
    loss, foreign = raised
    _, rest = caught.value.split(lambda error: error is loss)
    found = caught.value
    while isinstance(found, ExceptionGroup) and found.message != "outer":
        [found] = found.exceptions  # the nurseries' groups
    assert rest is not None and isinstance(found, ExceptionGroup)
    inner, mine = found.exceptions
    assert isinstance(mine, ValueError) and isinstance(inner, ExceptionGroup) and inner.exceptions == (foreign,)
    assert isinstance(found.__cause__, KeyError)
    assert found.__context__ is None
    assert caught.value.split(lambda error: error is loss)[0] is None
    assert str(loss) in lines(caplog, "INFO")[-1]


async def test_loss_beside_a_cancellation(worker: ucp.Worker) -> None:
    """A handler that is cancelled while its client is lost ends as cancelled."""
    waiting = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        async with trio.open_nursery() as nursery:

            async def last_words() -> None:
                with trio.CancelScope(shield=True):
                    await own_loss(connection)
                    await connection.receive()  # again, uncaught

            nursery.start_soon(last_words)
            nursery.start_soon(trio.sleep_forever)
            waiting.set()

    async with trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1", worker=worker)
        [listener] = await nursery.start(serve)
        client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
        with trio.fail_after(20):
            await waiting.wait()
        nursery.cancel_scope.cancel()
        client.abort()
    assert nursery.cancel_scope.cancelled_caught


async def test_broken_worker_ends_the_server() -> None:
    """When the worker breaks, the error is not taken for the loss of a client."""
    with pytest.raises(ExceptionGroup) as caught:
        with trio.fail_after(20):
            async with ucp.open_worker() as mine, ucp.open_worker() as theirs:
                async with serving(lambda connection: connection.receive(), mine) as listener:
                    client = await trio_ucx.open_ucx_stream(*listener.address, worker=theirs)
                    try:
                        await until(lambda: listener.statistics().accepted)
                        break_worker(mine)
                        await trio.sleep_forever()
                    finally:
                        client.abort()
    assert caught.group_contains(trio.BrokenResourceError, match="worker broke")


async def test_a_connection_owns_its_memory_endpoint(transports: str) -> None:
    """UCX's puts and gets use an endpoint beside the connection's: its errors mean a lost client, too."""
    remote = ucp.DEFAULT_FEATURES | ucp.Feature.RMA
    open_worker = partial(ucp.open_worker, config={"TLS": transports}, features=remote)
    async with open_worker() as mine, open_worker() as theirs:
        async with open_pair(mine, theirs) as (connection, _), contextlib.AsyncExitStack() as stack:
            memory = stack.enter_context(theirs.context.register(bytearray(64)))
            remote_memory = stack.enter_context(connection.endpoint.attach(for_ucx(memory.descriptor)))
            await remote_memory.put(bytes(8), 0)
            await remote_memory.flush()  # UCX's own puts write there even if the memory has been closed and freed
            beside = internals(connection).share.endpoint.beside
            assert beside is not None
            beside.ending.error = trio_ucx.UCXError(Status.CONNECTION_RESET, "pretended")
            for operation in (partial(remote_memory.put, bytes(8), 0), remote_memory.flush):
                with pytest.raises(trio.BrokenResourceError, match="pretended") as caught:
                    await operation()
                loss, rest = split_own(connection, caught.value)
                assert isinstance(loss, trio.BrokenResourceError) and rest is None
            beside.ending.error = None
