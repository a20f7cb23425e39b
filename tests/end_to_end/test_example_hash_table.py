"""examples/hash_table.py."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import TRANSPORTS, Rounds, pattern

import trio_ucx
from trio_ucx import ucp

from .programs import DEADLINE, EXAMPLES, Program, load, program, run_here

HASH_TABLE = EXAMPLES / "hash_table.py"
hash_table: Any = load(HASH_TABLE)

#: A client that puts keys of its own, and others, that all clients put, many at once; says how many were new. It
#: begins when there is a key "go".
CLIENT = """
import json, random, sys
import trio
sys.path.insert(0, sys.argv[1])
import hash_table

async def main(address, name, count):
    keys = [b"common %d" % n for n in range(count)] + [b"own %s %d" % (name, n) for n in range(count)]
    random.Random(name).shuffle(keys)
    new = 0

    async def put(some):
        nonlocal new
        for key in some:
            is_new = await table.put(key, b"%s by %s" % (key, name))
            new += is_new

    async with hash_table.open_table(address) as table:
        print("ready", flush=True)
        while await table.get(b"go") is None:
            await trio.sleep(0.001)
        async with trio.open_nursery() as nursery:
            for first in range(8):
                nursery.start_soon(put, keys[first::8])
        for key in keys:
            assert key in await table.get(key)
    print(json.dumps(new), flush=True)

trio.run(main, hash_table.parse_address(sys.argv[2]), sys.argv[3].encode(), int(sys.argv[4]))
"""

#: A client that is to be killed in the middle of an insertion: its node is written, and in no list yet. (Not while an
#: answer is under way: over TCP, UCX may end the server's process then.)
DYING = """
import sys
import trio
sys.path.insert(0, sys.argv[1])
import hash_table

async def main(address):
    async with hash_table.open_table(address) as table:
        for number in range(20):
            await table.put(b"common %d" % number, b"mine")
        with table.worker.new_chain() as chain:
            entry = chain.fetch_add(table.memory, hash_table.NODE.size, hash_table.FREE).u64()
            chain.put(table.memory, bytes([255]) * hash_table.NODE.size, entry)
            (await chain.run()).values()
        print("half done", flush=True)
        await trio.sleep_forever()

trio.run(main, hash_table.parse_address(sys.argv[2]))
"""

#: A server whose only code that runs is the library's: it says where its table is, and sleeps.
SLEEPER = """
import json, sys
import trio
sys.path.insert(0, sys.argv[1])
import hash_table
from trio_ucx import ucp

async def main():
    with ucp.open_context(features=hash_table.FEATURES) as context, context.allocate(2**20) as memory:
        hash_table.lay_out(memory, 16)
        async with ucp.open_worker(context=context) as worker:
            print(json.dumps([bytes(worker.address).hex(), memory.descriptor.hex()]), flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


@asynccontextmanager
async def open_served(*options: object) -> AsyncIterator[tuple[Program, Any]]:
    """(a server, its table). Whatever is done with it is bounded."""
    with trio.fail_after(DEADLINE), program(HASH_TABLE, "serve", *options) as server:
        await server.wait_address()
        async with hash_table.open_table(hash_table.parse_address(server.address)) as table:
            yield server, table


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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("buckets", [1, 7, 1000])
async def test_against_a_model(over: str, buckets: int) -> None:
    rng, model = random.Random(buckets), dict[bytes, bytes]()
    async with open_served("--buckets", buckets, "--size", 200_000) as (_, table):
        for _ in range(400):
            key = b"%d" % rng.randrange(150)
            if rng.random() < 0.5:
                value = rng.randbytes(rng.randrange(100))
                assert await table.put(key, value) == (key not in model)
                model[key] = value
            else:
                assert await table.get(key) == model.get(key)
        assert {key: await table.get(key) for key in model} == model
        assert len(await read_nodes(table)) == len(model)


@pytest.mark.full
async def test_full(over: str) -> None:
    async with open_served("--size", 1000, "--buckets", 2) as (server, table):
        # 32 + 2 * 32 bytes are taken, and an entry with a value of 100 bytes takes 32 + 104.
        for number in range(6):
            assert await table.put(b"%d" % number, bytes([number]) * 100)
        for key in (b"0", b"new"):
            with pytest.raises(hash_table.TableFull, match="no room for 136 more bytes"):
                await table.put(key, bytes(100))
        assert [await table.get(b"%d" % number) for number in range(6)] == [bytes([n]) * 100 for n in range(6)]
        assert await table.get(b"new") is None
        with program(HASH_TABLE, "put", server.address, "new", "value") as client:
            assert await client.end() == (1, "hash_table: this table has no room for 40 more bytes\n")


@pytest.mark.full
async def test_full_to_the_last_byte(over: str) -> None:
    async with open_served("--size", 64 + 2 * 40, "--buckets", 1) as (_, table):
        assert table.memory.nbytes >= 144  # UCX may allocate more than was asked for
        count = 0
        with pytest.raises(hash_table.TableFull):
            while True:
                await table.put(b"%d" % count, b"12345678")
                count += 1
        assert count == (table.memory.nbytes - 64) // 40


# ---- several clients ----


async def put_all(server: Program, table: Any, script: Path, clients: int, count: int) -> list[int]:
    """Runs that many clients at once: how many of the keys were new to each."""
    with ExitStack() as stack:
        running = []
        for number in range(clients):
            arguments = EXAMPLES, server.address, f"client{number}", count
            running.append(stack.enter_context(program(script, *arguments)))
        for client in running:
            assert await client.read_line() == "ready"
        await table.put(b"go", b"")
        for client in running:
            assert await client.end() == (0, "")
        return [json.loads(client.output) for client in running]


@pytest.mark.full
@pytest.mark.sample(2)
@pytest.mark.parametrize(("buckets", "count"), [(1, 30), (64, 200)])
async def test_clients_at_once(over: str, buckets: int, count: int, tmp_path: Path, rounds: Rounds) -> None:
    """Nothing is lost, and no key is there twice: also where all of them write to the end of one list."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    clients, count = 4, rounds(count // 2, count)
    async with open_served("--buckets", buckets) as (server, table):
        new = await put_all(server, table, script, clients, count)
        assert sum(new) == count + clients * count
        names = [b"client%d" % number for number in range(clients)]
        for number in range(count):
            for name in names:
                key = b"own %s %d" % (name, number)
                assert await table.get(key) == b"%s by %s" % (key, name)
            key = b"common %d" % number
            assert await table.get(key) in [b"%s by %s" % (key, name) for name in names]
        nodes = Counter(await read_nodes(table))
        assert len(nodes) == count + clients * count + 1
        assert set(nodes.values()) == {1}


@pytest.mark.full
async def test_values_are_seen_whole(over: str) -> None:
    """One task replaces a value all the time, others look at it."""
    sizes = [1, 60_000, 1000, 8, 30_001]
    allowed = {bytes([number]) * size for number, size in enumerate(sizes)}
    async with open_served("--size", 2**24) as (server, table):
        await table.put(b"key", bytes(1))

        async def replace() -> None:
            address = hash_table.parse_address(server.address)
            async with hash_table.open_table(address) as other:
                for number in range(200):
                    index = number % len(sizes)
                    await other.put(b"key", bytes([index]) * sizes[index])
            nursery.cancel_scope.cancel()

        seen = set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            while True:
                seen.add(await table.get(b"key"))
        assert seen <= allowed


@pytest.mark.full
async def test_cancelled_puts(over: str) -> None:
    """They have happened, or not; the table is whole, and others are not kept from writing."""
    async with open_served("--buckets", 1) as (_, table):
        cancelled = []
        for number in range(100):
            with trio.move_on_after(random.Random(number).random() * 0.002) as scope:
                await table.put(b"%d" % number, b"%d" % number)
            cancelled.append(scope.cancelled_caught)
        for number in range(100):
            value = await table.get(b"%d" % number)
            assert value == b"%d" % number or (value is None and cancelled[number])
            await table.put(b"%d" % number, b"again")
            assert await table.get(b"%d" % number) == b"again"
        nodes = await read_nodes(table)
        assert len(nodes) == len(set(nodes)) == 100


@pytest.mark.full
async def test_client_dies(over: str, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(DYING)
    async with open_served("--buckets", 1) as (server, table):
        with program(script, EXAMPLES, server.address) as client:
            assert await client.read_line() == "half done"
            client.process.kill()
        for number in range(50):
            is_new = await table.put(b"common %d" % number, b"here")
            assert is_new == (number >= 20)
            assert await table.get(b"common %d" % number) == b"here"
        nodes = await read_nodes(table)
        assert len(nodes) == len(set(nodes)) == 50


# ---- the server ----


@pytest.mark.full
@pytest.mark.parametrize("transports", [*TRANSPORTS, "sm,self"])
async def test_server_sleeps(transports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of its user's runs while clients look things up and write; connections by worker address will do."""
    monkeypatch.setenv("UCX_TLS", transports)
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    with trio.fail_after(DEADLINE), program(script, EXAMPLES) as server:
        address, descriptor = map(bytes.fromhex, json.loads(await server.read_line()))
        async with AsyncExitStack() as stack:
            tables = []
            for _ in range(2):
                worker = await stack.enter_async_context(ucp.open_worker(features=hash_table.FEATURES))
                endpoint = await worker.open_endpoint(ucp.WorkerAddress(address))
                stack.callback(endpoint.abort)
                memory = stack.enter_context(endpoint.attach(descriptor))
                tables.append(hash_table.Table(worker, memory, 16))

            async def put(table: Any, name: str) -> None:
                for number in range(100):
                    await table.put(b"%s %d" % (name.encode(), number), b"%d" % number)

            async with trio.open_nursery() as nursery:
                for table, name in zip(tables, "ab", strict=True):
                    nursery.start_soon(put, table, name)
            for name in "ab":
                for number in range(100):
                    assert await tables[0].get(b"%s %d" % (name.encode(), number)) == b"%d" % number


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
    ("said", "complaint"),
    [
        ([], "no memory descriptor"),
        ([b"hello"], "no memory descriptor"),
        (["small"], "no table in it"),
        (["zeros"], "no table in it"),
    ],
)
async def test_somebody_elses_server(
    said: list[Any], complaint: str, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not said:
        monkeypatch.setattr(hash_table, "PATIENCE", 0.5)
    sizes = {"small": 16, "zeros": 4096}
    with ucp.open_context(features=hash_table.FEATURES) as context:
        async with ucp.open_worker(context=context) as worker, trio.open_nursery() as nursery:
            registered = {name: context.register(bytearray(size)) for name, size in sizes.items()}

            async def answer(connection: trio_ucx.Connection) -> None:
                with suppress(trio.BrokenResourceError):
                    for message in said:
                        await connection.send(registered[message].descriptor if message in registered else message)
                    async for _ in connection.messages():
                        pass

            serving = partial(trio_ucx.serve_ucx, answer, 0, host="127.0.0.1", worker=worker)
            [listener] = await nursery.start(serving)
            with pytest.raises(hash_table.TableError, match=complaint), trio.fail_after(DEADLINE):
                async with hash_table.open_table(listener.address):
                    pass
            nursery.cancel_scope.cancel()
        for memory in registered.values():
            memory.close()


# ---- the command line ----


@pytest.mark.full
async def test_command_line(over: str) -> None:
    with program(HASH_TABLE, "serve", "--listen", "127.0.0.1:0") as server:
        await server.wait_address()
        for arguments, output, complaint in [
            (["get", "ü"], "", "hash_table: there is no key 'ü'\n"),
            (["put", "ü", "first"], "", ""),
            (["put", "ü", "second"], "", ""),
            (["get", "ü"], "second\n", ""),
            (["put", "long", "x" * 65_536], "", "hash_table: a value of 65536 bytes is too long: 65535 is the limit\n"),
        ]:
            with program(HASH_TABLE, arguments[0], server.address, *arguments[1:]) as client:
                assert await client.end() == (1 if complaint else 0, complaint)
                assert client.output == output
        with program(HASH_TABLE, "bench", server.address, "--entries", 300) as client:
            assert await client.end() == (0, "")
            assert [line.split(":")[0] for line in client.output.splitlines()] == ["put", "get"]
        server.process.send_signal(signal.SIGINT)
        assert await server.end() == (130, "")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["get", "127.0.0.1:9", "key"], "127.0.0.1:9"),
        (["put", "no.such.host.invalid:9", "key", "value"], "[Errno "),
        (["serve", "--listen", "192.0.2.1:0"], "192.0.2.1"),
        (["serve", "--size", "100", "--buckets", "1000"], "a table of 1000 buckets takes 32032 "),
        (["serve", "--size", str(2**47)], "memory"),
    ],
)
def test_complains_in_one_line(arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(hash_table, *arguments) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("hash_table: ") and errors.count("\n") == 1
    assert complaint in errors


@pytest.mark.parametrize(
    "arguments",
    [["get", "nonsense", "key"], ["put", "h:1", "key"], ["serve", "--size", "0"], ["bench", "h:1", "--tasks", "x"], []],
)
def test_refuses_bad_arguments(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(hash_table, *arguments) == 2
    assert capfd.readouterr().err.startswith("usage: ")
