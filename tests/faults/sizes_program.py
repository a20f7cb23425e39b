"""Exchanges messages of many sizes between two workers with given UCX options, and checks every byte.

Usage: sizes_program.py JSON, an object with "ours" and "theirs" (options of the two sides), "sizes" (lengths at which
the behaviour may change), and "raw" (whether to use raw endpoints, too). It prints a line when a step begins, so that
the last line shows where a hang or a crash happened. Without one, the last line is "done" or "refused ...".
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import open_pair, pattern

import trio_ucx
from trio_ucx import ucp

#: Message lengths are tried at these distances from each number: UCX's and trio_ucx's headers are less than 96 bytes.
HEADS = (-96, -64, -48, -33, -32, -25, -24, -18, -17, -16, -9, -8, -7, -1, 0, 1, 8, 64)
#: How many messages are in flight at once: more than any queue of UCX's has by default.
BURST = 600
TAG = 77


def sizes_around(numbers: list[int]) -> list[int]:
    return sorted({max(0, number + head) for number in numbers for head in HEADS})


def parts(data: Any, count: int = 7) -> list[Any]:
    """Cuts something into pieces of unequal lengths, an empty one among them."""
    view = memoryview(data)
    cuts = sorted({0, len(view), *(len(view) * n * n // (count * count) for n in range(count))})
    return [view[:0], *(view[start:end] for start, end in itertools.pairwise(cuts))]


async def both(*functions: Callable[[], Awaitable[Any]]) -> None:
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(function)


async def exchange(send: Callable[[], Awaitable[Any]], receive: Callable[[], Awaitable[Any]], data: bytes) -> None:
    async def check() -> None:
        got = await receive()
        assert got == data, f"{len(got)} other bytes than the {len(data)} that were sent"

    await both(send, check)


async def messages(sender: trio_ucx.Connection, receiver: trio_ucx.Connection, size: int) -> None:
    data, buffer = pattern(size, size), bytearray(size)

    async def receive_into(into: Any) -> bytearray:
        await receiver.receive_into(into)
        return buffer

    await exchange(lambda: sender.send(data), receiver.receive, data)
    await exchange(lambda: sender.send(parts(data)), lambda: receive_into(parts(buffer)), data)


async def stream(sender: trio_ucx.Connection, receiver: trio_ucx.Connection, size: int) -> None:
    data, got = pattern(size, size), bytearray()

    async def receive() -> bytearray:
        while len(got) < size:
            got.extend(await receiver.receive_some())
        return got

    await exchange(lambda: sender.send_all(data), receive, data)


async def burst(sender: trio_ucx.Connection, receiver: trio_ucx.Connection, size: int) -> None:
    """Many at once, read after the first few have arrived and as fast as possible."""
    data = pattern(size, size)

    async def send() -> None:
        async with sender.worker.open_request_group() as group:
            for _ in range(BURST):
                group.send(sender, data, tag=TAG)

    async def receive() -> None:
        for _ in range(BURST):
            assert await receiver.receive(tag=TAG) == data

    await both(send, receive)


async def raw(sender: ucp.Endpoint, receiver: ucp.Worker, queue: ucp.ActiveMessages, size: int) -> None:
    data, buffer = pattern(size, size), bytearray(size)

    async def receive(into: Any) -> bytearray:
        await receiver.tag_receive(into, TAG)
        return buffer

    await exchange(lambda: sender.tag_send(data, TAG), lambda: receive(buffer), data)
    await exchange(lambda: sender.tag_send_sync(parts(data), TAG), lambda: receive(parts(buffer)), data)
    max_header = sender.worker.attributes().max_am_header
    header, longest = pattern(min(size, 200, max_header), 3), pattern(max_header, 5)
    for head, what, protocol in (
        (b"", data, ucp.SendProtocol.AUTO),
        (header, parts(data), ucp.SendProtocol.AUTO),
        (longest, data, ucp.SendProtocol.AUTO),
        (header, data, ucp.SendProtocol.EAGER),
        (header, parts(data), ucp.SendProtocol.RENDEZVOUS),
    ):

        async def receive_am(head: bytes = head) -> bytes:
            message = await queue.receive()
            assert message.header == head
            return await message.receive()

        await exchange(
            lambda head=head, what=what, protocol=protocol: sender.am_send(1, what, head, protocol=protocol),
            receive_am,
            data,
        )

    async def receive_stream() -> bytearray:
        await streams[sender].stream_receive(buffer, exact=True)
        return buffer

    if size:
        await exchange(lambda: sender.stream_send(data), receive_stream, data)


#: The other end of each raw endpoint.
streams: dict[ucp.Endpoint, ucp.Endpoint] = {}


async def main(ours: dict[str, str], theirs: dict[str, str], sizes: list[int], raw_too: bool, limit: float) -> None:
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    with trio.fail_after(limit):
        print("workers", flush=True)
        async with (
            ucp.open_worker(config=ours, features=features) as here,
            ucp.open_worker(config=theirs, features=features) as there,
        ):
            print("connect", flush=True)
            async with open_pair(here, there, connect_timeout=5) as (client, server):
                print("over", *sorted({transport.name for transport in client.endpoint.transports}), flush=True)
                for sender, receiver in ((client, server), (server, client)):
                    for size in sizes_around(sizes):
                        print("size", size, flush=True)
                        await messages(sender, receiver, size)
                        await stream(sender, receiver, size)
                    for size in (0, 100, *sizes):
                        if size <= 2**17:
                            print("burst", size, flush=True)
                            await burst(sender, receiver, size)
                print("close", flush=True)
                await both(client.aclose, server.aclose)
            if raw_too:
                with here.open_active_messages(1) as queue_here, there.open_active_messages(1) as queue_there:
                    first, second = await here.open_endpoint(there.address), await there.open_endpoint(here.address)
                    streams.update({first: second, second: first})
                    for endpoint, receiver, queue in ((first, there, queue_there), (second, here, queue_here)):
                        for size in sizes_around(sizes):
                            print("raw", size, flush=True)
                            await raw(endpoint, receiver, queue, size)
                    await both(first.flush, second.flush)
                    first.abort()
                    second.abort()
            print("done", flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    try:
        trio.run(
            main,
            arguments["ours"],
            arguments["theirs"],
            arguments["sizes"],
            arguments["raw"],
            arguments["limit"],
        )
    except (ValueError, OSError, trio_ucx.UCXError, trio.BrokenResourceError) as error:
        print("refused", type(error).__name__, error, flush=True)
