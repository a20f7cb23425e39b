"""The library's own protocol for remote memory: owners whose peers are killed, and requests that an owner refuses."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from helpers import Rounds, assert_free, live_handles, open_peer, open_to_peer, pattern, until
from peers import REMOTE
from remote import open_endpoint_and_context, open_two, open_way

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp import chains
from trio_ucx.ucp._engine import draining
from trio_ucx.ucp._rma import access_paths

MB = 2**20
#: Sizes of the owner's memory: the part of the killed peers, and that of this process.
THEIRS, OURS = 48 * MB, 8 * MB
#: How many peers run, and are killed, at once.
PEERS = 4
#: The layout of requests and answers (wire.md).
REQUEST = struct.Struct("<BB6xQQQ16s")
ANSWER = struct.Struct("<BB6xQ")
GET, PUT, ATOMIC, GET_LIST, PUT_LIST = 1, 2, 4, 5, 6
#: The operands of an atomic.
OPERANDS = struct.Struct("<QQ")
ADD, COMPARE_SWAP, XOR = 0, 2, 5
ID = 4095


# ---- peers that are killed ----


async def check_ours(memory: ucp.RemoteMemory, rng: random.Random, chain: chains.RequestChain) -> None:
    """Puts, gets, and both by a chain, of random lengths, in this process's part of the memory."""
    length = min(2 ** rng.randrange(4, 25), OURS)
    offset = THEIRS + rng.randrange(OURS - length + 1)
    data = pattern(length, rng.randrange(1000))
    await memory.put(data, offset)
    await memory.flush()
    assert await memory.get(offset, length) == data
    chain.clear()
    put = chain.put(memory, data[::-1], offset)
    got = chain.get(memory, offset, length, after=put)
    outcomes = await chain.run()
    outcomes[put].unwrap()
    assert outcomes[got].unwrap() == data[::-1]


async def kill_peers(way: str, said: dict[str, Any], transports: str, rng: random.Random) -> None:
    async with trio.open_nursery() as nursery:

        async def one(kind: str) -> None:
            async with open_peer(
                "transferring_peer", way, said, kind, 0, THEIRS, transports=transports, UCX_LOG_FILE="stderr"
            ) as peer:
                # It cannot come up where the owner's queue in shared memory has stopped: see below.
                with suppress(*(() if transports == "tcp" else (trio.TooSlowError, EOFError))):
                    assert await peer.hear(15) == "moving"
                await trio.sleep(rng.uniform(0, 0.1))
                peer.process.kill()
                await peer.ended()

        for number in range(PEERS):
            nursery.start_soon(one, "get" if number % 2 else "put")


@pytest.mark.full
@pytest.mark.cut_off
@pytest.mark.timeout(600)
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["allocated", "registered"])
@pytest.mark.parametrize(
    ("transports", "way"),
    [("tcp", "connection"), ("tcp", "worker"), ("tcp,sm,self", "connection"), ("sm,self", "worker")],
)
async def test_owner_survives_killed_peers(
    transports: str, way: str, kind: str, chance: random.Random, rounds: Rounds
) -> None:
    """Getters and putters of 16 bytes to 16 MiB, by single calls, chains and lists: the owner lives, others go on.

    Over shared memory an owner is sometimes left whose queue stopped, because a peer was killed while it wrote there.
    Connections to it break (tests/test_receive_queue.py), and a new one uses another of the owner's workers. A raw
    endpoint by worker address gets no error (ucp.md): then the test goes on with another owner.
    """
    crowds = rounds(2, 50)
    owners = 0
    while crowds:
        owners += 1
        assert owners < 10, "nearly every kill stopped a queue"
        with trio.fail_after(55 + 8 * crowds):
            crowds -= await kill_peers_repeatedly(crowds, way, kind, transports, chance)


async def kill_peers_repeatedly(crowds: int, way: str, kind: str, transports: str, chance: random.Random) -> int:
    """Kills all peers of one owner, so many times, while this process goes on; fewer if its queue stops. Returns how
    often.
    """
    async with (
        open_peer("owner", THEIRS + OURS, kind, transports=transports, UCX_LOG_FILE="stderr") as owner,
        ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker,
    ):
        said = await owner.hear()
        done, stopped, killed = 0, False, 0

        async def go_on() -> None:
            nonlocal done, stopped
            while not stopped:
                try:
                    async with open_to_peer(way, worker, said) as endpoint:
                        with (
                            endpoint.attach(bytes.fromhex(said["descriptor"])) as memory,
                            worker.new_chain() as chain,
                        ):
                            while True:
                                await check_ours(memory, chance, chain)
                                done += 1
                except trio.BrokenResourceError:
                    if transports == "tcp":
                        raise
                    stopped = way == "worker"  # connections get another worker

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            while killed < crowds and not stopped:
                before = done
                await kill_peers(way, said, transports, chance)
                killed += 1
                assert owner.process.returncode is None
                with trio.move_on_after(20) as waiting:
                    await until(lambda: done >= before + 2 or stopped)  # noqa: B023
                if waiting.cancelled_caught:
                    assert way == "worker" and transports != "tcp", "the owner does not answer"
                    stopped = True
            nursery.cancel_scope.cancel()
        await owner.tell(["word", 0])
        await owner.hear()
    return killed


# ---- what an owner checks ----


@asynccontextmanager
async def open_asker(
    transports: str, access: ucp.Access = ucp.Access.ALL
) -> AsyncIterator[tuple[ucp.Endpoint, ucp.Memory, ucp.ActiveMessages]]:
    """An endpoint that sends requests written by the test, the owner's memory, and the answers."""
    config = {"TLS": transports}
    async with (
        ucp.open_worker(config=config) as worker,
        ucp.open_worker(config=config, features=REMOTE) as owner,
    ):
        del internals(worker).receivers.am_ids[ID]  # the test takes the place of the library
        with (
            owner.context.register(bytearray(b"secret!!" * 8), access=access) as memory,
            worker.open_active_messages(ID) as answers,
        ):
            endpoint = await worker.open_endpoint(owner.address)
            yield endpoint, memory, answers
            endpoint.abort()


def token_of(memory: ucp.Memory) -> bytes:
    return ucp.MemoryDescriptor.from_bytes(memory.descriptor)._token


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_an_owner_checks_every_request(transports: str) -> None:
    """The owner checks the token, range, access rights and form of a request."""
    no_elem, invalid = 12, 7
    async with open_asker(transports) as (endpoint, memory, answers):
        token = token_of(memory)
        wrong = bytes([token[0] ^ 1]) + token[1:]

        async def ask(kind: int, offset: int, length: int, key: bytes, data: bytes = b"") -> tuple[int, bytes]:
            header = REQUEST.pack(kind, 0, 77, offset, length, key)
            await endpoint.am_send(ID, data, header=header, reply=True)
            with trio.fail_after(15), await answers.receive() as answer:
                said, status, id = ANSWER.unpack(answer.header)
                assert (said, id) == (3, 77)
                return status, await answer.receive()

        assert await ask(GET, 8, 8, token) == (0, b"secret!!")
        assert await ask(GET, 0, 64, token) == (0, b"secret!!" * 8)
        for offset, length in ((0, 65), (64, 1), (65, 0), (1, 64), (2**64 - 8, 16), (8, 2**64 - 8), (0, 0)):
            assert await ask(GET, offset, length, token) == (invalid, b"")
        for bad in (wrong, bytes(16)):
            assert await ask(GET, 0, 8, bad) == (no_elem, b"")
            assert await ask(PUT, 0, 0, bad, b"x") == (no_elem, b"")
        for offset, data in ((64, b"x"), (60, b"12345"), (2**64 - 1, b"12"), (0, b"")):
            assert await ask(PUT, offset, 0, token, data) == (invalid, b"")
        assert bytes(memory.memoryview) == b"secret!!" * 8
        assert await ask(PUT, 60, 0, token, b"1234") == (0, b"")
        assert memory.memoryview[56:] == b"secr1234"
        for header in (b"", b"\1", REQUEST.pack(8, 0, 1, 0, 8, token), REQUEST.pack(GET, 0, 1, 0, 8, token)[:-1]):
            await endpoint.am_send(ID, b"", header=header, reply=True)
        await endpoint.am_send(ID, b"", header=REQUEST.pack(GET, 0, 1, 0, 8, token))  # no reply asked for
        for _ in range(2):
            await endpoint.am_send(ID, b"x", header=ANSWER.pack(3, 0, 1), reply=True)  # to nothing
        assert await ask(GET, 0, 8, token) == (0, b"secret!!")


def ranges(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQ", *pair) for pair in pairs)


#: The kind of a request with a list, its count and length, its data, and the status of the answer.
LISTS: dict[str, tuple[int, int, int, bytes, int]] = {
    "no ranges": (GET_LIST, 0, 0, b"", 5),
    "fewer ranges than it says": (GET_LIST, 3, 8, ranges((0, 4), (8, 4)), 5),
    "too many ranges": (GET_LIST, 513, 513, ranges(*[(0, 1)] * 513), 5),
    "a huge count": (GET_LIST, 2**64 - 1, 8, ranges((0, 8)), 5),
    "a count that wraps around": (GET_LIST, 2**60 + 1, 8, ranges((0, 8)), 5),
    "beyond the end": (GET_LIST, 2, 16, ranges((0, 8), (57, 8)), 7),
    "the first beyond the end": (GET_LIST, 2, 16, ranges((57, 8), (0, 8)), 7),
    "an offset that wraps around": (GET_LIST, 2, 16, ranges((0, 8), (2**64 - 4, 8)), 7),
    "an empty range": (GET_LIST, 2, 8, ranges((0, 8), (8, 0)), 7),
    "an empty first range": (GET_LIST, 2, 8, ranges((8, 0), (0, 8)), 7),
    "less than the length that it says": (GET_LIST, 2, 20, ranges((0, 8), (8, 8)), 7),
    "more than the length that it says": (GET_LIST, 2, 10, ranges((0, 8), (8, 8)), 7),
    "a total that wraps around": (GET_LIST, 2, 2**64 - 8, ranges((0, 8), (8, 64)), 7),
    "a put without data": (PUT_LIST, 2, 16, ranges((0, 8), (8, 8)), 5),
    "a put with more data": (PUT_LIST, 1, 8, ranges((0, 8)) + bytes(9), 5),
    "a put with less data": (PUT_LIST, 1, 8, ranges((0, 8)) + bytes(7), 5),
    "a put beyond the end": (PUT_LIST, 2, 16, ranges((0, 8), (60, 8)) + bytes(16), 7),
    "a right get": (GET_LIST, 2, 12, ranges((56, 8), (0, 4)), 0),
    "a right put": (PUT_LIST, 2, 12, ranges((56, 8), (0, 4)) + b"12345678abcd", 0),
}


@pytest.mark.parametrize("protocol", [ucp.SendProtocol.EAGER, ucp.SendProtocol.RENDEZVOUS])
@pytest.mark.parametrize("case", LISTS)
async def test_an_owner_checks_every_list(case: str, protocol: ucp.SendProtocol) -> None:
    """A list is done as a whole or not at all; with data by rendezvous, not at all."""
    kind, count, length, data, expected = LISTS[case]
    async with open_asker("tcp") as (endpoint, memory, answers):
        token = token_of(memory)
        for key in (bytes(16), token):
            with suppress(trio_ucx.UCXError):  # data by rendezvous are refused
                header = REQUEST.pack(kind, 0, 77, count, length, key)
                await endpoint.am_send(ID, data, header=header, reply=True, protocol=protocol)
            with trio.fail_after(15), await answers.receive() as answer:
                said, status, id = ANSWER.unpack(answer.header)
                assert (said, id) == (3, 77)
                got = await answer.receive()
            if protocol is ucp.SendProtocol.RENDEZVOUS and data:
                assert status == 5
            else:
                assert status == expected if key == token else status in (5, 12)
        done = expected == 0 and status == 0
        assert got == (b"secret!!secr" if done and kind == GET_LIST else b"")
        changed = b"abcdet!!" + b"secret!!" * 6 + b"12345678"
        assert bytes(memory.memoryview) == (changed if done and kind == PUT_LIST else b"secret!!" * 8)
        with trio.fail_after(15):
            await endpoint.am_send(ID, b"", header=REQUEST.pack(GET, 0, 1, 0, 8, token), reply=True)
            with await answers.receive() as answer:
                assert ANSWER.unpack(answer.header)[1] == 0


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_an_owner_checks_every_atomic(transports: str) -> None:
    no_elem, invalid = 12, 7
    async with open_asker(transports) as (endpoint, memory, answers):
        token = token_of(memory)
        view = memory.memoryview
        start = bytes(view)

        async def ask(
            operation: int, offset: int, size: int, data: bytes = OPERANDS.pack(1, 2), key: bytes = token
        ) -> tuple[int, bytes]:
            header = REQUEST.pack(ATOMIC, operation, 77, offset, size, key)
            with suppress(trio_ucx.UCXError):  # data by rendezvous are refused
                await endpoint.am_send(ID, data, header=header, reply=True)
            with trio.fail_after(15), await answers.receive() as answer:
                said, status, id = ANSWER.unpack(answer.header)
                assert (said, id) == (3, 77)
                return status, await answer.receive()

        for operation in (XOR + 1, 77, 255):
            assert (await ask(operation, 0, 8))[0] != 0
        for size in (0, 1, 2, 3, 5, 7, 9, 16, 64, 2**32 + 8, 2**64 - 8, 2**64 - 1):
            assert (await ask(ADD, 0, size))[0] != 0
        for offset, size in (
            (64, 8),
            (60, 8),
            (64, 4),
            (2**64 - 8, 8),
            (2**64 - 4, 4),
            (1, 8),
            (4, 8),
            (2, 4),
            (61, 4),
        ):
            assert await ask(ADD, offset, size) == (invalid, b"")
        for data in (b"", bytes(8), bytes(15), bytes(17), bytes(100_000), bytes(2**20)):
            assert (await ask(ADD, 0, 8, data))[0] != 0
        for bad in (bytes(16), bytes([token[0] ^ 1]) + token[1:]):
            assert await ask(ADD, 0, 8, key=bad) == (no_elem, b"")
        assert bytes(view) == start
        assert await ask(COMPARE_SWAP, 8, 8, OPERANDS.pack(0, 5)) == (0, b"secret!!")
        assert bytes(view) == start
        old = int.from_bytes(b"secret!!", "little")
        assert await ask(COMPARE_SWAP, 8, 8, OPERANDS.pack(old, 5)) == (0, b"secret!!")
        assert await ask(ADD, 56, 4, OPERANDS.pack(2**64 - 1, 0)) == (0, b"secr" + bytes(4))
        assert view[8:16] == (5).to_bytes(8, "little")
        assert view[56:] == b"recret!!"
        del view


async def test_an_owner_allows_no_more_than_it_said() -> None:
    data = {GET: b"", PUT: b"x", ATOMIC: OPERANDS.pack(1, 2)}
    for access, allowed in ((ucp.Access.READ, GET), (ucp.Access.WRITE, PUT), (ucp.Access.ATOMIC, ATOMIC)):
        async with open_asker("tcp", access) as (endpoint, memory, answers):
            for kind in data:
                header = REQUEST.pack(kind, 0, 1, 0, 8, token_of(memory))
                await endpoint.am_send(ID, data[kind], header=header, reply=True)
                with trio.fail_after(15), await answers.receive() as answer:
                    assert (ANSWER.unpack(answer.header)[1] == 0) == (kind == allowed)


@pytest.mark.parametrize("way", ["raw", "connection", "worker"])
async def test_closed_memory_is_refused(way: str) -> None:
    """Requests in flight go on; later ones are errors, and the connection stays."""
    async with open_endpoint_and_context("tcp", way) as (endpoint, context):
        memory, other = context.register(bytearray(8)), context.register(buffer := bytearray(8 * MB))
        with endpoint.attach(memory.descriptor) as remote, endpoint.attach(other.descriptor) as large:
            assert await remote.get() == bytes(8)
            memory.close()
            with pytest.raises(trio_ucx.UCXError, match="refused") as caught:
                await remote.get()
            assert caught.value.status is ucp.Status.NO_ELEM
            await remote.put(b"12345678")
            with pytest.raises(trio_ucx.UCXError, match="refused"):
                await remote.flush()
            await remote.flush()
            chain = endpoint.worker.new_chain()
            got = chain.get(remote, 0, 8)
            outcome = (await chain.run())[got]
            with pytest.raises(trio_ucx.UCXError, match="refused"):
                outcome.unwrap()
            chain.close()
            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(large.put, b"\1" * (8 * MB))
                    while not buffer[0]:
                        await trio.lowlevel.checkpoint()
                    other.close()
                await until(lambda: not live_handles()["memory"])
        assert_free(buffer)
        assert endpoint.alive


@pytest.mark.parametrize("transports", ["tcp", "sm,self"])
async def test_memory_of_another_context_of_the_process(transports: str) -> None:
    """The worker that the endpoint leads to has neither RMA nor atomics; another context has the memory."""
    config = {"TLS": transports}
    async with ucp.open_worker(config=config, features=REMOTE) as worker, ucp.open_worker(config=config) as server:
        with ucp.open_context(config, features=REMOTE) as context, context.register(bytearray(64)) as memory:
            endpoint = await worker.open_endpoint(server.address)
            with endpoint.attach(memory.descriptor) as remote, trio.fail_after(15):
                await remote.put(b"12345678")
                assert await remote.fetch_add(1) == int.from_bytes(b"12345678", "little")
                assert await remote.get(0, 8) == b"22345678"
            endpoint.abort()


# ---- order, and the loop ----


@pytest.mark.parametrize(
    ("transports", "kind"), [("tcp", "registered"), ("sm,self", "allocated"), ("sm,self", "registered")]
)
async def test_a_fence_orders_long_and_short_ones(transports: str, kind: str) -> None:
    async with open_endpoint_and_context(transports, "worker") as (endpoint, context):
        nbytes = 4 * MB
        memory = context.allocate(nbytes) if kind == "allocated" else context.register(np.zeros(nbytes, np.uint8))
        with memory, endpoint.attach(memory.descriptor) as remote, trio.fail_after(30):
            view = memory.memoryview
            view[:] = bytes(nbytes)
            await remote.get(0, 1)
            for number in range(1, 20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(remote.put, bytes([number]) * nbytes)
                    while not endpoint.statistics().operations_in_flight and view[0] != number:
                        await trio.lowlevel.checkpoint()
                    endpoint.worker.fence()
                    await remote.put(b"\xff" * 8, nbytes - 8)
                await remote.flush()
                assert bytes(view[nbytes - 8 :]) == b"\xff" * 8
                assert view[: nbytes - 8] == bytes([number]) * (nbytes - 8)
            del view


async def test_transfers_in_parts(chance: random.Random) -> None:
    """Over TCP long ones are several messages: each byte arrives, fences hold, and cancelling ends all parts."""
    part = access_paths.PART_OVER_TCP
    async with open_endpoint_and_context("tcp", "worker") as (endpoint, context):
        worker = endpoint.worker
        content = bytearray(pattern(40 * part, 1))
        with (
            context.register(memoryview(content)) as memory,
            endpoint.attach(memory.descriptor) as remote,
            worker.new_chain() as chain,
            trio.fail_after(60),
        ):
            for length in (1, part - 1, part, part + 1, 2 * part, 3 * part + 7, 30 * part + 5):
                offset = chance.randrange(len(content) - length)
                assert await remote.get(offset, length) == content[offset : offset + length]
                data = pattern(length, length)
                await remote.put(data, offset)
                worker.fence()
                await remote.put(b"!", offset + length - 1)
                await remote.flush()
                assert content[offset : offset + length] == data[:-1] + b"!"
                chain.clear()
                put = chain.put(remote, data, offset)
                got = chain.get(remote, offset, length, after=put)
                assert (await chain.run())[got].unwrap() == data
            for number in range(60):
                buffer, data = bytearray(20 * part), bytes([number]) * (20 * part)
                with trio.move_on_after(chance.uniform(0, 0.002)):
                    await (remote.get_into(buffer) if number % 2 else remote.put(data))
                if number % 3 == 0:
                    assert await remote.get(30 * part, 10 * part) == content[30 * part :]  # behind what was cancelled
            await remote.flush()
            await until(lambda: not endpoint.statistics().left_over_operations)
        assert_free(content)


@pytest.mark.parametrize("stall", [0, 0.15], ids=["no stall", "the process stands still"])
async def test_transfers_in_parts_when_the_endpoint_closes(
    chance: random.Random, stall: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        time.sleep(seconds + (stalls.pop() if stalls else 0))

    stalls: list[float] = []
    monkeypatch.setattr(draining, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))

    async def move(call: Callable[[bytearray], Awaitable[None]], buffer: bytearray) -> None:
        with pytest.raises(trio.ClosedResourceError):
            while True:
                await call(buffer)

    for number in range(20):
        stalls[:] = [stall]
        async with open_endpoint_and_context("tcp", "worker") as (endpoint, context):
            with context.allocate(8 * MB) as memory, endpoint.attach(memory.descriptor) as remote:
                await remote.get(0, 1)
                buffer = bytearray(8 * MB)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(move, remote.get_into if number % 2 else remote.put, buffer)
                    await trio.sleep(chance.uniform(0, 0.01))
                    endpoint.abort()
                await until(lambda: not endpoint.statistics().left_over_operations)
                assert_free(buffer)


async def test_a_flush_while_the_endpoint_closes(chance: random.Random) -> None:
    async def put(remote: ucp.RemoteMemory) -> None:
        with pytest.raises(trio.ClosedResourceError):
            while True:
                await remote.put(b"12345678")
                await remote.flush()

    for _ in range(30):
        async with open_endpoint_and_context("tcp", "worker") as (endpoint, context):
            with context.allocate(8) as memory, endpoint.attach(memory.descriptor) as remote:
                with trio.fail_after(15):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(put, remote)
                        await trio.sleep(chance.uniform(0, 0.004))
                        endpoint.abort()


async def test_long_copies_let_others_run() -> None:
    """While 256 MiB are copied over shared memory, other tasks run; cancelling the copy frees the buffer at once."""
    async with open_endpoint_and_context("sm,self", "worker") as (endpoint, context):
        size = 256 * MB
        with context.allocate(size) as memory, endpoint.attach(memory.descriptor) as remote:
            await remote.get(0, 1)
            buffer = bytearray(size)
            rounds = 0
            async with trio.open_nursery() as nursery:

                async def count() -> None:
                    nonlocal rounds
                    while True:
                        rounds += 1
                        await trio.lowlevel.checkpoint()

                nursery.start_soon(count)
                await remote.get_into(buffer)
                assert rounds > 50
                with trio.CancelScope() as scope:
                    scope.deadline = trio.current_time() + 0.005
                    await remote.put(buffer)
                assert scope.cancelled_caught
                nursery.cancel_scope.cancel()
            assert_free(buffer)
            assert not endpoint.statistics().left_over_operations


async def test_a_descriptor_that_claims_more_than_is_mapped() -> None:
    async with open_endpoint_and_context("sm,self", "worker") as (endpoint, context):
        with context.allocate(8192) as memory:
            whole = ucp.MemoryDescriptor.from_bytes(memory.descriptor)
            lying = ucp.MemoryDescriptor(whole.address, 2**30, whole.rkey, token=whole._token)
            with endpoint.attach(lying) as remote:
                for call in (remote.get, lambda: remote.put(b"x"), lambda: remote.get(2**29, 8)):
                    with pytest.raises(ValueError, match="exist"):
                        await call()
                with pytest.raises(ValueError, match="exist"):
                    remote.map()


# ---- peers without trio_ucx ----


@pytest.mark.parametrize(("transports", "way"), [("tcp", "connection"), ("tcp", "worker"), ("sm,self", "worker")])
async def test_without_a_token(transports: str, way: str) -> None:
    """Memory of a UCP program is reached by UCX's puts and gets; allocated memory is mapped all the same."""
    async with open_two(transports) as (worker, owner), open_way(way, worker, owner) as endpoint:
        for memory in (owner.context.register(bytearray(MB)), owner.context.allocate(MB)):
            with memory, endpoint.attach(ucp.MemoryDescriptor(memory.address, MB, memory.rkey)) as remote:
                await remote.put(pattern(MB))
                await remote.flush()
                assert await remote.get() == memory.memoryview == pattern(MB)


async def test_a_token_is_of_16_bytes() -> None:
    async with open_endpoint_and_context("tcp", "worker") as (_, context):
        with context.allocate(8) as memory:
            for token in (b"1", bytes(17)):
                with pytest.raises(ValueError, match="16 bytes"):
                    ucp.MemoryDescriptor(memory.address, 8, memory.rkey, token=token)
            with pytest.raises(TypeError):
                ucp.MemoryDescriptor(memory.address, 8, memory.rkey, token="token")


@pytest.mark.parametrize("features", [REMOTE, ucp.DEFAULT_FEATURES])
async def test_the_id_of_the_library(features: ucp.Feature) -> None:
    async with ucp.open_worker(features=features) as worker:
        with pytest.raises(ValueError, match="the library itself"):
            worker.open_active_messages(ID)
