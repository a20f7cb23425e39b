"""examples/hash_table.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from helpers import Rounds, pattern, serving

import trio_ucx
from trio_ucx import ucp

from .programs import DEADLINE, EXAMPLES, Program, load, program

HASH_TABLE = EXAMPLES / "hash_table.py"
hash_table: Any = load(HASH_TABLE)


@asynccontextmanager
async def open_served(*options: object) -> AsyncIterator[tuple[Program, Any]]:
    """(a server, its table). Whatever is done with it is bounded."""
    with trio.fail_after(DEADLINE), program(HASH_TABLE, "serve", *options) as server:
        await server.wait_address()
        async with open_another(server) as table:
            yield server, table


def open_another(server: Program) -> Any:
    return hash_table.open_table(trio_ucx.parse_address(server.address))


async def read_nodes(table: Any) -> list[bytes]:
    """The hashes of all keys that a list leads to, by looking at the memory."""
    memory = await table.memory.get()
    digests = []
    for bucket in range(table.buckets):
        following = hash_table.HEADER.size + bucket * hash_table.NODE.size
        while following:
            following, digest, _ = hash_table.NODE.unpack_from(memory, following)
            digests.append(digest)
    return [digest for digest in digests if digest != bytes(16)]


# ---- one client ----


@pytest.mark.both_transports
async def test_values(over: str) -> None:
    async with open_served() as (_, table):
        assert await table.get(b"") is None
        for number, value in enumerate([b"", b"value", bytes(8), pattern(1000), pattern(hash_table.MAX_VALUE)]):
            key = pattern(number, 1)
            assert await table.put(key, value)
            assert await table.get(key) == value
        assert not await table.put(b"", b"another")
        assert await table.get(b"") == b"another"
        assert await table.get(pattern(4, 1)) == pattern(hash_table.MAX_VALUE)
        with pytest.raises(hash_table.TableError, match="65536 bytes is too long"):
            await table.put(b"key", bytes(2**16))
        assert await table.get(b"key") is None


async def test_against_a_model(chance: random.Random) -> None:
    model: dict[bytes, bytes] = {}
    async with open_served("--buckets", 7, "--size", 200_000) as (_, table):
        for _ in range(400):
            key = b"%d" % chance.randrange(150)
            if chance.random() < 0.5:
                value = chance.randbytes(chance.randrange(100))
                assert await table.put(key, value) == (key not in model)
                model[key] = value
            else:
                assert await table.get(key) == model.get(key)
        assert {key: await table.get(key) for key in model} == model
        assert len(await read_nodes(table)) == len(model)


async def test_full() -> None:
    """To the last byte. Then nothing is changed any more."""
    async with open_served("--size", 64 + 2 * 40, "--buckets", 1) as (_, table):
        assert table.memory.nbytes >= 144  # UCX may allocate more than was asked for
        count = 0
        with pytest.raises(hash_table.TableFull, match="no room for 40 more bytes"):
            while True:
                await table.put(b"%d" % count, b"%08d" % count)
                count += 1
        assert count == (table.memory.nbytes - 64) // 40
        with pytest.raises(hash_table.TableFull):
            await table.put(b"0", b"another")
        assert [await table.get(b"%d" % number) for number in range(count)] == [b"%08d" % n for n in range(count)]
        assert await table.get(b"%d" % count) is None


# ---- several clients ----


@pytest.mark.parametrize("buckets", [1, 64])
async def test_clients_at_once(over: str, buckets: int, rounds: Rounds) -> None:
    """Nothing is lost, and no key is there twice: also where all of them write to the end of one list."""
    clients, count = [b"one", b"two", b"three", b"four"], rounds(15, 30)
    common = [b"common %d" % number for number in range(count)]
    new = 0

    async def put(table: Any, name: bytes, keys: list[bytes]) -> None:
        nonlocal new
        for key in keys:
            is_new = await table.put(key, name)
            new += is_new

    async with open_served("--buckets", buckets) as (server, table), AsyncExitStack() as stack:
        async with trio.open_nursery() as nursery:
            for name in clients:
                client = await stack.enter_async_context(open_another(server))
                keys = common + [b"%s %d" % (name, number) for number in range(count)]
                random.Random(name).shuffle(keys)
                for first in range(8):
                    nursery.start_soon(put, client, name, keys[first::8])
        assert new == count + len(clients) * count
        for key in common:
            assert await table.get(key) in clients
        for name in clients:
            for number in range(count):
                assert await table.get(b"%s %d" % (name, number)) == name
        nodes = Counter(await read_nodes(table))
        assert len(nodes) == new
        assert set(nodes.values()) == {1}


@pytest.mark.full
async def test_values_are_seen_whole() -> None:
    """One task replaces a value all the time, others look at it."""
    sizes = [1, 60_000, 1000, 8, 30_001]
    allowed = {bytes([number]) * size for number, size in enumerate(sizes)}
    async with open_served("--size", 2**24) as (server, table), open_another(server) as other:
        await table.put(b"key", bytes(1))

        async def replace() -> None:
            for number in range(200):
                index = number % len(sizes)
                await other.put(b"key", bytes([index]) * sizes[index])
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            while True:
                assert await table.get(b"key") in allowed


@pytest.mark.full
async def test_cancelled_puts(chance: random.Random) -> None:
    """They have happened, or not; the table is whole, and others are not kept from writing."""
    async with open_served("--buckets", 1) as (_, table):
        for number in range(100):
            with trio.move_on_after(chance.random() * 0.002) as scope:
                await table.put(b"%d" % number, b"%d" % number)
            value = await table.get(b"%d" % number)
            assert value == b"%d" % number or (value is None and scope.cancelled_caught)
        for number in range(100):
            await table.put(b"%d" % number, b"again")
            assert await table.get(b"%d" % number) == b"again"
        nodes = await read_nodes(table)
        assert len(nodes) == len(set(nodes)) == 100


async def test_client_dies() -> None:
    """In the middle of an insertion: its node is written, and in no list yet."""
    async with open_served("--buckets", 1) as (server, table):
        with pytest.raises(ZeroDivisionError):  # which aborts its connection
            async with open_another(server) as other:
                for number in range(20):
                    await other.put(b"common %d" % number, b"mine")
                with other.worker.new_chain() as chain:
                    entry = chain.fetch_add(other.memory, hash_table.NODE.size, hash_table.FREE).u64()
                    chain.put(other.memory, bytes([255]) * hash_table.NODE.size, entry)
                    (await chain.run()).values()
                raise ZeroDivisionError
        for number in range(50):
            is_new = await table.put(b"common %d" % number, b"here")
            assert is_new == (number >= 20)
            assert await table.get(b"common %d" % number) == b"here"
        nodes = await read_nodes(table)
        assert len(nodes) == len(set(nodes)) == 50


# ---- the server ----


@pytest.mark.full
async def test_server_dies(over: str) -> None:
    async with open_served() as (server, table):
        assert await table.put(b"key", b"value")
        server.process.kill()
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await table.put(b"key", b"value")
        with pytest.raises(trio.BrokenResourceError):
            await table.get(b"key")


@pytest.mark.parametrize(
    ("has", "complaint"),
    [
        (None, "no memory descriptor"),
        (b"hello", "no memory descriptor"),
        (bytearray(16), "no table in it"),  # which is less than a header
        (bytearray(4096), "no table in it"),
    ],
)
async def test_somebody_elses_server(
    has: bytes | bytearray | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has is None:
        monkeypatch.setattr(hash_table, "PATIENCE", 0.5)

    async def answer(connection: trio_ucx.Connection) -> None:
        with suppress(trio.BrokenResourceError):
            if has is not None:
                await connection.send(memory.descriptor if isinstance(has, bytearray) else has)
            async for _ in connection.messages():
                pass

    with trio.fail_after(DEADLINE), ucp.open_context() as context:
        with context.register(has if isinstance(has, bytearray) else bytearray(8)) as memory:
            async with ucp.open_worker(context=context) as worker, serving(answer, worker) as listener:
                with pytest.raises(hash_table.TableError, match=complaint):
                    async with hash_table.open_table(listener.address):
                        pass


@pytest.mark.full
async def test_command_line() -> None:
    with program(HASH_TABLE, "serve", "--listen", "127.0.0.1:0") as server:
        await server.wait_address()
        for arguments, output, complaint in [
            (["get", "ü"], "", "hash_table: there is no key 'ü'\n"),
            (["put", "ü", "value"], "", ""),
            (["get", "ü"], "value\n", ""),
        ]:
            with program(HASH_TABLE, arguments[0], server.address, *arguments[1:]) as client:
                assert await client.end() == (1 if complaint else 0, complaint)
                assert client.output == output
        with program(HASH_TABLE, "bench", server.address, "--entries", 300) as client:
            assert await client.end() == (0, "")
            assert [line.split(":")[0] for line in client.output.splitlines()] == ["put", "get"]
