"""A hash table in the memory of a server, which its clients read and write by themselves, with request chains.

    python examples/hash_table.py serve [--listen HOST:PORT] [--size BYTES]       prints the address that it listens at
    python examples/hash_table.py put HOST:PORT KEY VALUE
    python examples/hash_table.py get HOST:PORT KEY
    python examples/hash_table.py bench HOST:PORT [--entries N] [--tasks M]       writes and reads that many entries

In programs of your own:

    async with open_table(("10.0.0.5", 13337)) as table:
        await table.put(b"key", b"value")
        assert await table.get(b"key") == b"value"

The server owns memory, tells each client how to reach it, and sleeps. The memory, in integers of 8 bytes:

    header    MAGIC, how many buckets there are, the offset of the first byte that is free
    buckets   a node each, without a key: the head of a list
    entries   one behind the other: a node, then a value

    node      the next node's offset, 0 in the last; BLAKE2b of the key, 16 bytes; the value's length << 48 | its offset

A lookup is one chain: walk from the bucket to the node that has the key, get the value. A write is one chain, too: take
memory with an atomic addition, and put node and value there; meanwhile walk to the key's node, or to the last one. A
compare-and-swap of the last one's next offset, which is 0, ties the new node to the list. If another client was faster,
that fails, and the walk is done again. If the key has a node, the offset of its value is swapped instead.

Guaranteed:

* Clients that write at once lose nothing, and a key never has two nodes: a node is tied only behind all others.
* A value is seen whole, old or new: it is complete before anything refers to it, and never written again.
* Nothing is locked. When a client dies in the middle, the memory that it took is lost, and its entry is there or not.

Not guaranteed:

* Memory is never freed: neither that of replaced values, nor the rest that was too small for an entry. There is no
  deletion, and a table that was full once stays full.
* Integers that another client swaps are read by ordinary gets, which have to find 8 aligned bytes either old or new.
  The processors and adapters that UCX runs on do so; no specification promises it.
* Keys are known by their hashes only. Clients are trusted: every client that can connect can overwrite everything.
* The table ends with its server. A put that raises BrokenResourceError, or is cancelled, may have happened.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any

import attrs
import trio
from outcome import Error

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp import chains

MAGIC = b"trioucx1"
HEADER = struct.Struct("<8sQQ8x")
FREE = 16  # where in the header
NODE = struct.Struct("<Q16sQ")
NEXT, KEY, VALUE = 0, 8, 24  # where in a node
LENGTH_SHIFT = 48
MAX_SIZE, MAX_VALUE = 2**LENGTH_SHIFT - 1, 2**16 - 1

PATIENCE = 10  # seconds for a server to say where its table is
#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()


class TableError(Exception):
    """Something is wrong with the table, or with a value to be put into it."""


class TableFull(TableError):
    """There is no memory left for this entry."""


# ---- the server ----


def lay_out(memory: ucp.Memory, buckets: int) -> None:
    """Writes an empty table to memory."""
    entries = HEADER.size + buckets * NODE.size
    if not entries <= memory.nbytes <= MAX_SIZE:
        raise TableError(f"a table of {buckets} buckets takes {entries} to {MAX_SIZE} bytes, not {memory.nbytes}")
    memory.memoryview[:entries] = HEADER.pack(MAGIC, buckets, entries).ljust(entries, b"\0")


async def serve(address: tuple[str, int], size: int, buckets: int | None) -> None:
    async def introduce(connection: trio_ucx.Connection) -> None:
        with suppress(trio.BrokenResourceError):  # one client's death is no reason to end the server
            await connection.send(memory.descriptor)
            async for _ in connection.messages():
                pass  # there are none: this waits until the client leaves

    with ucp.open_context() as context, context.allocate(size) as memory:
        lay_out(memory, buckets or max(1, size // 256))
        async with ucp.open_worker(context=context) as worker, trio.open_nursery() as nursery:
            serving = partial(trio_ucx.serve_ucx, introduce, address, worker=worker, authkey=AUTHKEY)
            for listener in await nursery.start(serving):  # a host name may have several addresses
                print(f"listening at {trio_ucx.format_address(listener.address)}", flush=True)


# ---- a client ----


async def run_chain(chain: chains.RequestChain) -> chains.Outcomes:
    """Runs it, and raises errors of the network. The outcomes of its conditions are left to the caller."""
    outcomes = await chain.run()
    for outcome in outcomes:
        if isinstance(outcome, Error) and not isinstance(outcome.error, chains.DependencyError):
            raise outcome.error
    return outcomes


def value_of(outcomes: chains.Outcomes, request: chains.ChainRequest) -> Any:
    outcome = outcomes[request]
    assert outcome is not None
    return outcome.unwrap()


@attrs.define(eq=False)
class Table:
    """Open it with :func:`open_table`. Keys and values are bytes; any number of tasks may use it at once."""

    worker: ucp.Worker
    memory: ucp.RemoteMemory
    buckets: int

    async def get(self, key: bytes) -> bytes | None:
        """The value, or None if there is no such key.

        Raises:
            trio.BrokenResourceError: the server is gone.
        """
        with closing(self.worker.new_chain(capacity=2)) as chain:
            node, found = self._find(chain, key)
            where, length = node.u64(VALUE) & MAX_SIZE, node.u64(VALUE) >> LENGTH_SHIFT
            got = chain.get(self.memory, where, length, at_most=MAX_VALUE, when=found, on_false="skip")
            value = value_of(await run_chain(chain), got)
        return None if value is chains.SKIPPED else bytes(value)

    async def put(self, key: bytes, value: bytes) -> bool:
        """Inserts the key, or replaces its value. Returns whether it is new.

        Cancellation: it has happened, or will in a moment, or will not.

        Raises:
            TableFull: nothing was changed.
            TableError: the value is too long.
            trio.BrokenResourceError: the server is gone, and nobody knows whether it has happened.
        """
        if len(value) > MAX_VALUE:
            raise TableError(f"a value of {len(value)} bytes is too long: {MAX_VALUE} is the limit")
        size = NODE.size + (len(value) + 7) // 8 * 8  # atomics need whole multiples of 8
        with closing(self.worker.new_chain(capacity=6)) as chain:
            entry = chain.fetch_add(self.memory, size, FREE).u64()
            place = entry + NODE.size + (len(value) << LENGTH_SHIFT)
            parts = bytes(KEY - NEXT), self._digest(key), place, value
            written = chain.put(self.memory, parts, entry, when=entry <= self.memory.nbytes - size)

            node, found = self._find(chain, key)
            replaced = chain.atomic(
                self.memory, ucp.AtomicOp.SWAP, place, node.offset + VALUE, when=found, on_false="skip", after=written
            )
            tied = chain.compare_swap(
                self.memory, 0, entry, node.offset + NEXT, when=~found, on_false="skip", after=written
            )
            again = chains.Retry(self._limit, again=(node, replaced, tied))  # each time there is one node more
            won = chain.check(tied.u64() == 0, on_false=again)
            outcomes = await run_chain(chain)
            value_of(outcomes, node)
            if isinstance(outcomes[written], Error):
                raise TableFull(f"this table has no room for {size} more bytes")
            if value_of(outcomes, replaced) is not chains.SKIPPED:
                return False
            value_of(outcomes, won)
            return True

    def _find(self, chain: chains.RequestChain, key: bytes) -> tuple[chains.ChainRequest, chains.Condition]:
        """Walks to the key's node, or to the last one of its bucket. The second result: whether it is the key's."""
        digest = int.from_bytes(self._digest(key), "little")

        def is_it(node: chains.ChainRequest) -> chains.Condition:
            return node.u128(KEY) == digest

        node = chain.follow(
            self.memory,
            HEADER.size + digest % self.buckets * NODE.size,
            next_offset=NEXT,
            until=lambda node: is_it(node) | (node.u64(NEXT) == 0),
            limit=self._limit,
            length=NODE.size,
        )
        return node, is_it(node)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16).digest()

    @property
    def _limit(self) -> int:
        """There cannot be more nodes."""
        return self.memory.nbytes // NODE.size


@asynccontextmanager
async def open_table(address: tuple[str, int]) -> AsyncIterator[Table]:
    async with ucp.open_worker() as worker:
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker, authkey=AUTHKEY)
        async with connection:
            descriptor = b""
            with trio.move_on_after(PATIENCE):
                descriptor = await connection.receive()
            try:
                memory = connection.endpoint.attach(descriptor)
            except ValueError as error:
                raise TableError(f"who listens there has no table: {error}") from error
            with memory:
                header = await memory.get(0, min(HEADER.size, memory.nbytes))
                magic, buckets, _ = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
                if magic != MAGIC or not buckets:
                    raise TableError("who listens there has memory, but no table in it")
                yield Table(worker, memory, buckets)


# ---- the command line ----


async def put(address: tuple[str, int], key: str, value: str) -> None:
    async with open_table(address) as table:
        await table.put(os.fsencode(key), os.fsencode(value))


async def get(address: tuple[str, int], key: str) -> None:
    async with open_table(address) as table:
        value = await table.get(os.fsencode(key))
    if value is None:
        raise TableError(f"there is no key {key!r}")
    sys.stdout.buffer.write(value + b"\n")


async def bench(address: tuple[str, int], entries: int, tasks: int) -> None:
    prefix = os.urandom(8).hex()

    async def put_some(table: Table, first: int) -> None:
        for number in range(first, entries, tasks):
            await table.put(b"%s %d" % (prefix.encode(), number), b"%d" % number)

    async def get_some(table: Table, first: int) -> None:
        for number in range(first, entries, tasks):
            if await table.get(b"%s %d" % (prefix.encode(), number)) != b"%d" % number:
                raise TableError(f"entry {number} was lost")

    async with open_table(address) as table:
        for name, work in (("put", put_some), ("get", get_some)):
            started = trio.current_time()
            async with trio.open_nursery() as nursery:
                for first in range(tasks):
                    nursery.start_soon(work, table, first)
            seconds = trio.current_time() - started
            print(f"{name}: {entries / seconds:,.0f} a second, {seconds * tasks / entries * 1e6:.1f} us each")


async def run(work: Callable[[], Awaitable[None]]) -> None:
    """Makes Ctrl-C a cancellation, which tasks see only where they wait."""

    async def heed_signals(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                raise KeyboardInterrupt

    async with trio.open_nursery() as nursery:
        await nursery.start(heed_signals)
        await work()
        nursery.cancel_scope.cancel()


def explain(error: BaseException) -> str:
    """The one line that matters of an exception, or of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or type(error).__name__
    return "".join(character if character.isprintable() else "?" for character in text)


def parse_count(text: str) -> int:
    if not 1 <= int(text) <= MAX_SIZE:
        raise ValueError
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="A hash table in a server's memory, that its clients see to.")
    commands = parser.add_subparsers(required=True, dest="command")
    server = commands.add_parser("serve", help="have an empty table")
    server.add_argument("--listen", type=trio_ucx.parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    server.add_argument("--size", type=parse_count, default=2**26, metavar="BYTES", help="of memory")
    server.add_argument("--buckets", type=parse_count, metavar="N", help="lists of entries; by default SIZE / 256")
    clients = {
        "put": commands.add_parser("put", help="insert a key, or replace its value"),
        "get": commands.add_parser("get", help="print a key's value"),
        "bench": commands.add_parser("bench", help="write and read entries"),
    }
    for client in clients.values():
        client.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    for name in ("put", "get"):
        clients[name].add_argument("key")
    clients["put"].add_argument("value")
    clients["bench"].add_argument("--entries", type=parse_count, default=10_000, metavar="N")
    clients["bench"].add_argument("--tasks", type=parse_count, default=16, metavar="M", help="that work at once")
    options = vars(parser.parse_args())
    functions: dict[str, Callable[..., Awaitable[None]]] = {"serve": serve, "put": put, "get": get, "bench": bench}
    command = functions[options.pop("command")]
    address = options.pop("listen", None) or options.pop("address")
    status = 0
    try:
        trio.run(run, partial(command, address, **options))
    except* KeyboardInterrupt:
        status = 130
    except* (
        TableError,
        OSError,
        MemoryError,
        trio.BrokenResourceError,
        trio.EndOfChannel,
        chains.DependencyError,
        trio_ucx.UCXError,
    ) as group:
        print(f"hash_table: {explain(group)}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
