"""Programs that hang, each in a way of its own: see ``test_report.py``.

Each calls ``report_on_signal``, and goes on until the test ends it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from peers import ask, main, role, say, until_told

import trio_ucx
from trio_ucx import ucp

HERE = Path(__file__)


async def serve(handler: Any) -> None:
    """Serves, and says where, until the test ends the program."""

    async def serve_one(connection: trio_ucx.Connection) -> None:
        with suppress(trio.EndOfChannel, trio.BrokenResourceError):  # the test has ended
            async with connection:
                await handler(connection)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, serve_one, 0, host="127.0.0.1"))
        say(listener.address)
        await until_told()
        nursery.cancel_scope.cancel()


async def use(address: list[Any], function: Any) -> None:
    """Connects, and hangs until the test ends the program."""
    connection = await trio_ucx.open_ucx_stream(*address)
    say("connected")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(function, connection)
        await until_told()
        nursery.cancel_scope.cancel()
    connection.abort()


@role
async def without_credit(address: list[Any]) -> None:
    async def fill(connection: trio_ucx.Connection) -> None:
        while True:
            await connection.send(bytes(1000), tag=7)

    await use(address, fill)


@role
async def unread_tag() -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        say((await connection.receive(tag=1)).decode())
        await trio.sleep_forever()

    await serve(handler)


@role
async def large_both_ways() -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.send(bytes(2**21), tag=3)
        say(len(await connection.receive(tag=4)))

    await serve(handler)


@role
async def waits_for_answer(address: list[Any]) -> None:
    async def request(connection: trio_ucx.Connection) -> None:
        await connection.send(b"a question")
        await connection.receive()

    await use(address, request)


@role
async def asks_when_told(address: list[Any]) -> None:
    connection = await trio_ucx.open_ucx_stream(*address)
    say("connected")
    await ask()
    async with trio.open_nursery() as nursery:
        connection.send_nowait(bytes(20_000))
        nursery.start_soon(connection.receive)
        await until_told()
        nursery.cancel_scope.cancel()
    connection.abort()


@role
async def wrong_tag() -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.receive(tag=6)

    await serve(handler)


@role
async def forgotten_aclose(address: list[Any]) -> None:
    connection = await trio_ucx.open_ucx_stream(*address)
    await connection.send(b"all there is")
    say("sent")
    await until_told()
    connection.abort()


@role
async def endless_handler() -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        async for _ in connection.messages():
            pass
        say("the client has closed")
        await trio.Event().wait()

    await serve(handler)


@role
async def call_without_answer() -> None:
    """Its handler accepts calls, each of which has a task of its own."""

    async def answer(call: trio_ucx.Channel) -> None:
        async with call:
            say((await call.receive()).decode())
            await trio.Event().wait()

    async def handler(connection: trio_ucx.Connection) -> None:
        async with trio.open_nursery() as nursery:
            async for call in connection.conversations():
                nursery.start_soon(answer, call)

    await serve(handler)


@role
async def blocked_loop() -> None:
    async with ucp.open_worker():
        time.sleep(0.01)  # as a line that must not be found
        say("ready")
        while os.read(0, 1):  # blocks until the test ends the program
            pass


@role
async def stopped_queue(config: dict[str, str]) -> None:
    """Receives from a raw peer, which then is killed in the middle of writing."""
    async with ucp.open_worker(config=config) as worker, trio.open_nursery() as nursery:
        say(bytes(worker.address).hex())
        await worker.tag_receive(bytearray(10), 1)
        endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(await ask())))
        await endpoint.tag_send(b"x", 1)
        nursery.start_soon(worker.tag_receive, bytearray(10), 2)
        say("waits")
        await until_told()
        endpoint.abort()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    with open(os.devnull, "w") as nowhere:
        trio_ucx.report_on_signal(file=nowhere)
        main()
