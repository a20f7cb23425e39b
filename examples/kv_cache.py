#!/usr/bin/env python3
"""A prefill process computes the cache of a prompt, layer by layer; decoders fetch each layer as soon as it is there.

    python examples/kv_cache.py prefill [--listen HOST:PORT] [--blocks N]     # prints its address
    python examples/kv_cache.py decode HOST:PORT PROMPT [--count N]

The cache is a pool of blocks in the prefill process's memory, which decoders read by themselves. A decoder has a lease
of the blocks of its prompt until it says that it has fetched them, or is gone: a killed decoder gives its blocks back,
too. The prefill process notifies the decoder of each layer. So the decoder fetches one layer while the next one is
computed, and neither of them polls.

    to the decoder:  the descriptor of the pool; for each prompt its blocks, as integers of 8 bytes, layer after layer,
                     or nothing if the pool is smaller than that
    to the prefill:  the descriptor of the memory at which the decoder is notified; prompts; with the tag FETCHED, that
                     a lease may end
    notifications:   the number of a layer, in one byte
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import attrs
import trio

import trio_ucx
from trio_ucx import ucp

BLOCK = 65536
LAYERS = 8
FETCHED = 1
MAX_PROMPT = 65536
#: Seconds that the computation of a layer takes.
COMPUTING = 0.01
#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()


class PrefillError(Exception):
    """The prefill process cannot do that."""


def blocks_of(prompt: bytes) -> int:
    """The blocks of each layer: one for 16 bytes."""
    return 1 + len(prompt) // 16


def block_of(prompt: bytes, layer: int, number: int) -> bytes:
    """What a model would compute."""
    return hashlib.sha256(b"%d %d %b" % (layer, number, prompt)).digest() * (BLOCK // 32)


# ---- prefill ----


@attrs.define(eq=False)
class Pool:
    """The blocks, and which of them nobody has."""

    memory: ucp.Memory
    free: list[int]
    returned: trio.Condition = attrs.field(factory=trio.Condition)

    @asynccontextmanager
    async def lease(self, count: int) -> AsyncIterator[list[int]]:
        async with self.returned:
            while len(self.free) < count:
                await self.returned.wait()
            leased = [self.free.pop() for _ in range(count)]
        try:
            yield leased
        finally:
            self.free += leased
            with trio.CancelScope(shield=True):
                async with self.returned:
                    self.returned.notify_all()

    def write(self, block: int, data: bytes) -> None:
        self.memory.memoryview[block * BLOCK : (block + 1) * BLOCK] = data


async def serve_decoder(pool: Pool, connection: trio_ucx.Connection) -> None:
    """Serves one decoder until it leaves. If it is lost, the notifications fail, or the wait for FETCHED."""
    await connection.send(pool.memory.descriptor)
    gone = (trio.BrokenResourceError, trio.EndOfChannel)
    with suppress(*gone, trio_ucx.Error, ValueError):  # the last two: it sent nonsense
        with await connection.attach(await connection.receive(max_size=MAX_PROMPT)) as decoder:
            while True:
                await compute(pool, connection, decoder, await connection.receive(max_size=MAX_PROMPT))


async def compute(pool: Pool, connection: trio_ucx.Connection, decoder: ucp.RemoteMemory, prompt: bytes) -> None:
    count = blocks_of(prompt)
    if LAYERS * count > pool.memory.nbytes // BLOCK:
        await connection.send(b"")
        return
    async with pool.lease(LAYERS * count) as blocks:
        await connection.send(array("q", blocks))
        for layer in range(LAYERS):
            await trio.sleep(COMPUTING)
            for number, block in enumerate(blocks[layer * count : (layer + 1) * count]):
                pool.write(block, block_of(prompt, layer, number))
            await decoder.notify(bytes([layer]))
        await connection.receive(tag=FETCHED)


async def prefill(address: tuple[str, int], blocks: int) -> None:
    async with ucp.open_worker() as worker:
        with worker.context.allocate(blocks * BLOCK, access=ucp.Access.READ) as memory:
            handler = partial(serve_decoder, Pool(memory, [*range(blocks)]))
            serve = partial(trio_ucx.serve_ucx, handler, address, worker=worker, authkey=AUTHKEY)
            async with trio.open_nursery() as nursery:
                server = await nursery.start(partial(serve, drain_on_signal=1))
                print("listening at", trio_ucx.format_address(server.address), flush=True)


# ---- decode ----


async def decode(address: tuple[str, int], prompt: bytes, count: int) -> None:
    async with trio_ucx.connect(address, authkey=AUTHKEY) as connection, trio.open_nursery() as nursery:
        nursery.start_soon(connection.wait_closed)  # a lost peer sends no notification: this raises an exception
        with (
            connection.worker.context.register(bytearray(1)) as bell,
            await connection.attach(await connection.receive()) as pool,
        ):
            await connection.send(bell.descriptor)
            for _ in range(count):
                await fetch(connection, pool, bell.notifications(), prompt)
        nursery.cancel_scope.cancel()


async def fetch(
    connection: trio_ucx.Connection, pool: ucp.RemoteMemory, notifications: ucp.Notifications, prompt: bytes
) -> None:
    await connection.send(prompt)
    blocks = array("q", await connection.receive())
    if not blocks:
        raise PrefillError("the prompt is too long for the pool")
    count = len(blocks) // LAYERS
    cache = bytearray(len(blocks) * BLOCK)
    plan = pool.plan(cache, block=BLOCK)
    for _ in range(LAYERS):
        layer = (await notifications.receive()).data[0]
        mine = range(layer * count, (layer + 1) * count)
        await plan.get(blocks[mine.start : mine.stop], mine)
        for number, block in enumerate(mine):
            if cache[block * BLOCK : (block + 1) * BLOCK] != block_of(prompt, layer, number):
                raise PrefillError(f"block {number} of layer {layer} is wrong")
        print(f"layer {layer}: {count} blocks", flush=True)
    await connection.send(b"", tag=FETCHED)


def main() -> int:
    parser = argparse.ArgumentParser(description="A cache that decoders read by themselves.")
    commands = parser.add_subparsers(required=True, dest="command")
    server = commands.add_parser("prefill", help="compute for decoders")
    server.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    server.add_argument("--blocks", type=int, default=4096, metavar="N", help=f"of {BLOCK} bytes, in the pool")
    client = commands.add_parser("decode", help="fetch the cache of a prompt")
    client.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    client.add_argument("prompt", metavar="PROMPT")
    client.add_argument("--count", type=int, default=1, metavar="N", help="times")
    options = parser.parse_args()
    if options.command == "prefill" and options.blocks < LAYERS:
        parser.error(f"--blocks must be at least {LAYERS}")
    if options.command == "prefill":
        work = partial(prefill, options.listen, options.blocks)
    else:
        work = partial(decode, options.address, options.prompt.encode(), options.count)
    try:
        trio.run(work)
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, KeyboardInterrupt):
            return 130
        if not isinstance(error, (OSError, MemoryError, trio.BrokenResourceError, trio_ucx.Error, PrefillError)):
            raise
        print(f"kv_cache: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
