"""Requests and replies in one line each: every request gets its own reply, or the work on it is cancelled."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from helpers import until

import trio_ucx
from trio_ucx import ucp
from trio_ucx._link import Link
from trio_ucx.testing import internals


@asynccontextmanager
async def open_server(
    function: Callable[[bytes], Awaitable[Any]], *, limit: int = 100, transports: str = "tcp,sm,self", **options: Any
) -> AsyncIterator[tuple[trio_ucx.Server, trio_ucx.Connection]]:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with trio.open_nursery() as nursery:
            handler = trio_ucx.answering(function, limit=limit)
            serving = partial(trio_ucx.serve_ucx, handler, "127.0.0.1:0", worker=other, **options)
            server = await nursery.start(serving)
            async with trio_ucx.connect(server.address, worker=worker) as connection:
                yield server, connection
            nursery.cancel_scope.cancel()


async def double(request: bytes) -> bytes:
    await trio.sleep(0.001 * (request[0] % 3) if request else 0)
    return request * 2


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_every_request_gets_its_own_reply(transports: str, limit: int) -> None:
    async with open_server(double, limit=limit, transports=transports) as (_, connection):

        async def ask(number: int) -> None:
            for size in (0, 1, 100, 3000, 100_000):
                request = bytes([number]) * size
                assert await connection.request(request, timeout=60) == request * 2

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(ask, number)
        link: Link = internals(connection)
        await until(lambda: not link.receiving.conversations.all())


async def test_the_limit_holds_and_nothing_waits_for_ever() -> None:
    running = most = 0

    async def function(request: bytes) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.001)
        running -= 1
        return request

    async with open_server(function, limit=5) as (_, connection):
        with trio.fail_after(60):
            for count in (1, 4, 5, 60, 1, 1, 60):
                async with trio.open_nursery() as nursery:
                    for _ in range(count):
                        nursery.start_soon(connection.request, b"x")
        assert most == 5


@pytest.mark.parametrize("how", ["timeout", "cancelled", "closed", "aborted"])
async def test_work_that_nobody_waits_for_is_cancelled(how: str) -> None:
    log: list[str] = []

    async def function(request: bytes) -> bytes:
        log.append("begun")
        try:
            await trio.sleep_forever()
        finally:
            log.append("ended")

    async with open_server(function, on_handler_error="log") as (_, connection):
        if how == "timeout":
            with pytest.raises(trio.TooSlowError):
                await connection.request(b"x", timeout=0.05)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ignoring_ends, partial(connection.request, b"x"))
                await until(lambda: log == ["begun"])
                if how == "cancelled":
                    nursery.cancel_scope.cancel()
                elif how == "closed":
                    await connection.aclose()
                else:
                    connection.abort()
        with trio.fail_after(2):
            await until(lambda: log == ["begun", "ended"])
        if how in ("timeout", "cancelled"):
            log.clear()
            with pytest.raises(trio.TooSlowError):
                await connection.request(b"again", timeout=0.05)  # the connection goes on


async def ignoring_ends(function: Callable[[], Awaitable[Any]]) -> None:
    try:
        await function()
    except (trio.ClosedResourceError, trio.BrokenResourceError):
        pass


async def test_cancels_at_random_moments(chance: random.Random) -> None:
    """Late replies go to nobody, and nothing is left."""
    async with open_server(double) as (_, connection):

        async def ask(number: int) -> None:
            for _ in range(20):
                with trio.move_on_after(chance.random() * 0.004):
                    assert await connection.request(bytes([number]) * 5) == bytes([number]) * 10

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(ask, number)
            assert await connection.request(b"\0last") == b"\0last\0last"
        link: Link = internals(connection)
        await until(lambda: not link.receiving.conversations.all())


async def test_a_server_that_drains_finishes_what_it_works_on() -> None:
    begun = trio.Event()
    go_on = trio.Event()

    async def function(request: bytes) -> bytes:
        begun.set()
        await go_on.wait()
        return b"finished"

    async with open_server(function) as (server, connection), trio.open_nursery() as nursery:
        replies: list[bytes] = []

        async def ask() -> None:
            replies.append(await connection.request(b"x"))

        nursery.start_soon(ask)
        await begun.wait()
        nursery.start_soon(server.drain, 10)
        await until(lambda: connection.draining or server.statistics().drains)
        go_on.set()
        with trio.fail_after(5):
            await until(lambda: replies == [b"finished"])
        with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
            await connection.request(b"too late", timeout=5)


async def test_an_error_of_the_function_is_one_of_the_handler() -> None:
    async def function(request: bytes) -> bytes:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with open_server(function) as (_, connection):
            with pytest.raises(trio_ucx.PeerLost):
                await connection.request(b"x", timeout=5)
            await trio.sleep(5)
    assert caught.group_contains(ZeroDivisionError)


async def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="async function"):
        trio_ucx.answering(5)  # type: ignore[arg-type]
    for limit in (0, "5", 1.5):
        with pytest.raises((TypeError, ValueError), match="limit"):
            trio_ucx.answering(double, limit=limit)  # type: ignore[arg-type]
    async with open_server(double) as (_, connection):
        for timeout in (-1, "1", float("nan"), None):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                await connection.request(b"x", timeout=timeout)  # type: ignore[arg-type]
        for size in (-1, "a"):
            with pytest.raises((TypeError, ValueError), match="max_size"):
                await connection.request(b"x", max_size=size)  # type: ignore[arg-type]
        assert connection.statistics().messages_sent == 0
        with pytest.raises(TypeError):
            await connection.request("text")  # type: ignore[arg-type]
        with pytest.raises(trio_ucx.MessageTooLong):
            await connection.request(b"xx", max_size=3)
        assert await connection.request(b"x", max_size=2) == b"xx"
        assert await connection.request([b"\0a", b"b"]) == b"\0ab\0ab"


async def test_a_function_that_is_not_async() -> None:
    def square(request: bytes) -> bytes:
        return request

    errors: list[Exception] = []
    server = open_server(square, on_handler_error=lambda _, error: errors.append(error))  # type: ignore[arg-type]
    async with server as (_, connection):
        with pytest.raises((trio.BrokenResourceError, trio.EndOfChannel)):
            await connection.request(b"2", timeout=10)
        await until(lambda: errors)
        connection.abort()
    assert "answering takes an async function; " in repr(errors) and "square returned bytes" in repr(errors)


def test_logs_and_reports_name_the_function() -> None:
    async def square(request: bytes) -> bytes:
        raise NotImplementedError

    name = "test_logs_and_reports_name_the_function.<locals>.square"
    assert trio_ucx.answering(square).__qualname__ == f"answering({name})"
