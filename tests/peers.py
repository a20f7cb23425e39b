"""What the other processes of the tests do: ``python -m tests.peers ROLE ARGUMENTS``. See ``helpers.open_peer``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import trio

import trio_ucx
from trio_ucx import ucp

from .helpers import pattern

ROLES: dict[str, Callable[..., Any]] = {}


def role(function: Callable[..., Any]) -> Callable[..., Any]:
    ROLES[function.__name__] = function
    return function


def say(thing: Any) -> None:
    os.write(1, json.dumps(thing).encode() + b"\n")


_stdin = b""


async def ask() -> Any:
    """The next thing that the test tells us; EOFError when it has gone."""
    global _stdin
    while b"\n" not in _stdin:
        await trio.lowlevel.wait_readable(0)
        chunk = os.read(0, 65536)
        if not chunk:
            raise EOFError
        _stdin += chunk
    line, _stdin = _stdin.split(b"\n", 1)
    return json.loads(line)


async def until_told() -> None:
    try:
        await ask()
    except EOFError:
        pass


async def serve(handler: Callable[[trio_ucx.Connection], Any], **options: Any) -> None:
    """Serves until told to stop; says the socket address and the worker address first."""
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(
            lambda task_status: trio_ucx.serve_ucx(handler, 0, host="127.0.0.1", task_status=task_status, **options)
        )
        say([listener.address, bytes(listener.worker_address).hex()])
        await until_told()
        nursery.cancel_scope.cancel()


@role
async def echo(tags: list[int]) -> None:
    """Sends every message back on the tag it came by, and the byte stream, too."""

    async def handler(connection: trio_ucx.Connection) -> None:
        async def lane(tag: int) -> None:
            async for message in connection.messages(tag):
                await connection.send(message, tag)

        async def stream() -> None:
            async for chunk in connection:
                await connection.send_all(chunk)

        try:
            async with trio.open_nursery() as nursery:
                for tag in tags:
                    nursery.start_soon(lane, tag)
                nursery.start_soon(stream)
        except* trio.BrokenResourceError:
            pass

    await serve(handler)


@role
async def silent(window: int = 2**20) -> None:
    """Accepts, and reads nothing."""

    async def handler(connection: trio_ucx.Connection) -> None:
        await trio.sleep_forever()

    await serve(handler, window=window)


@role
async def source(plan: list[list[int]], rounds: int = 1) -> None:
    """Sends messages, each ``[tag, size, seed]``, then closes gracefully."""

    async def handler(connection: trio_ucx.Connection) -> None:
        for _ in range(rounds):
            for tag, size, seed in plan:
                await connection.send(pattern(size, seed), tag)

    await serve(handler)


@role
async def sink(plan: list[list[int]]) -> None:
    """Checks that the messages ``[tag, size, seed]`` come, then that nothing else does; says so."""

    async def handler(connection: trio_ucx.Connection) -> None:
        try:
            for tag, size, seed in plan:
                if await connection.receive(tag) != pattern(size, seed):
                    say(f"wrong data with tag {tag}, size {size}")
                    return
            try:
                await connection.receive()
            except trio.EndOfChannel:
                say("complete")
        except trio.BrokenResourceError as error:
            say(f"broken: {error}")

    await serve(handler)


@role
async def numbered(count: int, size: int) -> None:
    """Sends ``count`` messages, the i-th of ``pattern(size, i)``, with tag 1."""

    async def handler(connection: trio_ucx.Connection) -> None:
        for number in range(count):
            await connection.send(pattern(size, number), 1)

    await serve(handler)


@role
async def sender_then_wait(plan: list[list[int]]) -> None:
    """Sends messages, says so, and stays."""

    async def handler(connection: trio_ucx.Connection) -> None:
        for tag, size, seed in plan:
            await connection.send(pattern(size, seed), tag)
        say("sent")
        await trio.sleep_forever()

    await serve(handler)


@role
async def raw_listener() -> None:
    """A raw UCP listener: accepts endpoints, and only progresses."""
    async with ucp.open_worker() as worker, await worker.open_listener("127.0.0.1", 0) as listener:
        say([listener.address, bytes(worker.address).hex()])
        endpoints = []

        async def accept() -> None:
            async for request in listener:
                endpoints.append(await request.accept())
                say("accepted")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await until_told()
            nursery.cancel_scope.cancel()
        for endpoint in endpoints:
            endpoint.abort()


@role
async def deaf() -> None:
    """Accepts raw connections and never says hello."""
    await raw_listener()


def main() -> None:
    name, arguments = sys.argv[1:]
    trio.run(lambda: ROLES[name](*json.loads(arguments)))


if __name__ == "__main__":
    main()
