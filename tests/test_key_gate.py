"""The key gate: who reaches UCX's TCP ports (data ports), and to whom UCX talks.

UCX trusts peers that speak its protocol (security.md); these are not tested here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import hashlib
import logging
import os
import random
import resource
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attacked_server import AttackedServer, open_attacked_server
from helpers import free_port, open_listener, open_pair, open_peer, open_raw_pair, until
from injected_faults import delay_handshakes, have_an_unknown_address_layout, miss_an_import, miss_where_ucx_listens
from key_proofs import ANSWER_SIZE, PROOF_SIZE, Place, Proof, name_of
from networks import Host, as_user, open_network
from samples import some_description, some_worker

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.exchange import Exchange, Taken
from trio_ucx._native import ffi, lib
from trio_ucx.testing import internals
from trio_ucx.ucp._engine.endpoints_to_worker import EndpointSummary
from trio_ucx.ucp._keys import KEY_SIZE, KeyPair, new_key
from trio_ucx.ucp._quirks import key_gate
from trio_ucx.ucp._quirks.key_gate import KeyGate

UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
#: A connection request with the number 2**64 - 1: it ends a process whose UCX reads it (ucx-reports/data_port.c).
FATAL = UCX_MAGIC + struct.pack("<BIIBQHH12x", 32, 29, 1, 0, 2**64 - 1, socket.AF_INET, 9)
LISTENS = "0A"
TCP = {"TLS": "tcp"}
THIS_MACHINE = ["127.0.0.1"]
assert len(FATAL) == 42


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens, in whatever network namespace: IPv4 only."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == LISTENS and f"socket:[{inode}]" in inodes:
            host, port = local.split(":")
            found.add((socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)))
    return found


# ---- what does not speak UCX's protocol ----


def begin(address: tuple[str, int], data: bytes = b"", timeout: float = 60) -> socket.socket:
    connection = socket.create_connection(address, timeout=timeout)
    with contextlib.suppress(ConnectionError):  # the gate may have closed it
        connection.sendall(data)
    return connection


def half_open(address: tuple[str, int]) -> Iterator[socket.socket]:
    for number in range(2000):
        yield begin(address, UCX_MAGIC[: number % 8])


def noise(address: tuple[str, int]) -> Iterator[socket.socket]:
    dice = random.Random(1)
    openings = [b"GET / HTTP/1.1\r\n\r\n", bytes(8), b"\xff" * 8, UCX_MAGIC[:7] + b"\0", UCX_MAGIC[::-1]]
    for number in range(500):
        yield begin(address, [*openings, dice.randbytes(8)][number % 6] + dice.randbytes(dice.randrange(5000)))


def fatal(address: tuple[str, int]) -> Iterator[socket.socket]:
    for number in range(500):
        wrong = bytes(Proof(new_key(), address))
        yield begin(address, [FATAL, wrong + FATAL, bytes(PROOF_SIZE) + FATAL][number % 3])


def come_and_go(address: tuple[str, int]) -> Iterator[socket.socket]:
    for _ in range(3000):
        begin(address).close()
    yield begin(address)


def slow(address: tuple[str, int]) -> Iterator[socket.socket]:
    connections = [begin(address) for _ in range(50)]
    for byte in UCX_MAGIC[:7]:
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(bytes([byte]))
    yield from connections


@pytest.fixture
def many_descriptors() -> Iterator[int]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4096:
        pytest.skip("needs 4096 file descriptors (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.sample(2)
@pytest.mark.parametrize("attack", [half_open, noise, fatal, come_and_go, slow])
async def test_strangers_of_this_machine(
    tmp_path: Path, many_descriptors: int, attack: Callable[[tuple[str, int]], Iterator[socket.socket]]
) -> None:
    async with open_attacked_server(tmp_path, "tcp") as server:
        control = server.address
        [port] = [one for one in listening(server.pid) - {control} if one[0] == "127.0.0.1"]
        await server.assert_well()
        before = server.descriptors
        connections: list[socket.socket] = []

        def come() -> None:
            for connection in attack(port):
                connections.append(connection)

        try:
            await trio.to_thread.run_sync(come)
            await server.assert_well()
        finally:
            for connection in connections:
                connection.close()
        await wait_descriptors_closed(server, before)


async def wait_descriptors_closed(server: AttackedServer, descriptors: int) -> None:
    """Waits until no more descriptors are open than before. Endpoints are kept for two seconds for reuse."""
    await until(lambda: server.descriptors <= descriptors)
    await server.assert_well()


@pytest.mark.full
async def test_a_data_port_that_ucx_closed(tmp_path: Path) -> None:
    """UCX stops listening when it cannot accept for lack of descriptors. The listener goes on with another worker."""
    async with open_attacked_server(tmp_path, "tcp", UCX_LOG_LEVEL="fatal") as server:
        pid = server.pid
        await server.assert_well()
        [port] = [one for one in listening(pid) - {server.address} if one[0] == "127.0.0.1"]
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with trio.fail_after(20):
            while port in listening(pid):
                with contextlib.suppress(OSError):
                    begin(port, b"hello", timeout=5).close()
                await trio.sleep(0.01)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        await server.assert_well()


# ---- what a connection to a data port gets ----


@contextlib.contextmanager
def recorded_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[KeyGate, KeyPair]]]:
    """The pairs of keys that gates get meanwhile."""
    pairs: list[tuple[KeyGate, KeyPair]] = []
    real = KeyGate.let_in

    def let_in(gate: KeyGate, pair: KeyPair, address: ucp.WorkerAddress | None, **options: Any) -> object:
        pairs.append((gate, pair))
        return real(gate, pair, address, **options)

    with monkeypatch.context() as patch:
        patch.setattr(KeyGate, "let_in", let_in)
        yield pairs


def answer(connection: socket.socket) -> bytes:
    """What comes until the other end closes the connection, or ANSWER_SIZE bytes."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(ANSWER_SIZE, socket.MSG_WAITALL)
    return b""


async def show(data: object, place: Place) -> bytes:
    """What a port answers to these bytes, or to a proof."""
    with begin(place, bytes(data)) as connection:  # type: ignore[call-overload]
        return await trio.to_thread.run_sync(answer, connection)


def strangers(worker: ucp.Worker) -> int:
    return worker.statistics().strangers


def native_code(key: bytes, data: bytes) -> bytes:
    out = ffi.new("char[32]")
    lib.tu_blake2s(key, data, len(data), out)
    return bytes(ffi.buffer(out))


def test_the_hash() -> None:
    dice = random.Random(1)
    for size in [*range(260), 1000, 4096, 5000]:
        key, data = dice.randbytes(KEY_SIZE), dice.randbytes(size)
        assert native_code(key, data) == hashlib.blake2s(data, key=key).digest(), size
    # Of the vectors of the reference implementation (blake2s-kat.txt): the key 00 to 1f, data of 0 and of 255 bytes.
    first, last = native_code(bytes(range(32)), b""), native_code(bytes(range(32)), bytes(range(255)))
    assert first.hex() == "48a8997da407876b3d79c0d92325ad3b89cbb754d86ab71aee047ad345fd2c49"
    assert last.hex() == "3fb735061abc519dfe979e54c1ee5bfad0a9d858b3315bad34bde999efd724dd"


async def test_who_knows_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_ucx")
    async with ucp.open_worker(config=TCP) as worker, ucp.open_worker(config=TCP) as other:
        gate = internals(worker).key_gate
        pair = KeyPair(new_key(), new_key())
        admission = gate.let_in(pair, None)
        internals(other).key_gate.let_in(KeyPair(new_key(), new_key()), None)
        ports, others = worker.address.tcp_addresses, other.address.tcp_addresses
        for port in ports:
            for rest in (b"", FATAL[:20]):
                proof = Proof(pair.ours, port)
                assert await show(bytes(proof) + rest, port) == proof.accepted
        assert strangers(worker) == 0
        used = Proof(pair.ours, ports[0])
        assert await show(used, ports[0]) == used.accepted
        right = bytes(Proof(pair.ours, ports[0]))
        wrong = {
            "UCX's bytes": FATAL,
            "their beginning": UCX_MAGIC,
            "a byte": b"x",
            "zeros": bytes(PROOF_SIZE),
            "used": bytes(used),
            "used, with UCX's bytes": bytes(used) + FATAL,
            "cut": right[:-1],
            "changed": right[:-1] + bytes([right[-1] ^ 1]) + FATAL,
            "of another nonce": right[:24] + bytes(16) + right[40:],
            "of another epoch than it says": right[:16] + struct.pack("<Q", 1) + right[24:],
            "of another name": name_of(pair.theirs) + right[16:],
            "behind a byte": b"\0" + right,
            "the key": pair.ours + FATAL,
            "of the other key": bytes(Proof(pair.theirs, ports[0])),
            "of the other key, with this one's name": right[:16] + bytes(Proof(pair.theirs, ports[0]))[16:],
            "of the role of an answer": bytes(Proof(pair.ours, ports[0], role="accept")),
            "an answer": used.accepted,
            "for another port": bytes(Proof(pair.ours, (ports[0][0], ports[0][1] ^ 1))),
            "for another host": bytes(Proof(pair.ours, ("10.0.0.1", ports[0][1]))),
            "for the other worker": bytes(Proof(pair.ours, others[0])),
        }
        for what, data in wrong.items():
            assert await show(data, ports[0]) == b"", what
        assert await show(right, others[0]) == b"", "that opens this worker only"
        assert await show(right, ports[0]) != b"", "it was right"
        admission.end()
        admission.end()
        assert await show(Proof(pair.ours, ports[0]), ports[0]) == b""
        await until(lambda: strangers(worker) == len(wrong) + 1 and strangers(other) == 1)
        await until(lambda: len([one for one in caplog.records if "turned away" in one.getMessage()]) == 2)
        lines = [one for one in caplog.records if "turned away" in one.getMessage()]  # one a minute for each worker
        assert {line.levelname for line in lines} == {"INFO"}
        assert any(host in lines[0].getMessage() for host, _ in ports)


@pytest.fixture
def few_nonces() -> Iterator[int]:
    """Each pair remembers only so many nonces."""
    lib.tu_test_most_nonces(4)
    yield 4
    lib.tu_test_most_nonces(0)


async def test_proofs_that_overtake_each_other() -> None:
    """The order in which proofs arrive does not matter, and two holders of a key do not know of each other."""
    async with ucp.open_worker(config=TCP) as worker:
        address = worker.address
        [port, *_] = address.tcp_addresses
        proofs = [Proof(address.keys[:KEY_SIZE], port, nonce=bytes([number]) * 16) for number in range(100)]
        random.Random(1).shuffle(proofs)
        for proof in proofs:
            assert await show(proof, port) == proof.accepted
        for proof in proofs:
            assert await show(proof, port) == b""
        assert strangers(worker) == len(proofs)


async def test_a_new_epoch_begins_when_there_are_too_many_nonces(few_nonces: int) -> None:
    async with ucp.open_worker(config=TCP) as worker:
        key, [port, *_] = worker.address.keys[:KEY_SIZE], worker.address.tcp_addresses
        recorded = []
        for epoch in range(3):
            for _ in range(few_nonces):
                recorded.append(Proof(key, port, epoch))
                assert await show(recorded[-1], port) == recorded[-1].accepted
            one_too_many = Proof(key, port, epoch)
            assert await show(one_too_many, port) == one_too_many.answer("epoch", epoch + 1)
            for proof in [*recorded, one_too_many]:  # an answer for a stranger, who knows that, and then the end
                with begin(port, bytes(proof)) as connection:
                    assert await trio.to_thread.run_sync(connection.recv, 100) == proof.answer("epoch", epoch + 1)
                    assert await trio.to_thread.run_sync(answer, connection) == b""
        for other in (0, 4, 2**64 - 1):
            proof = Proof(key, port, other)
            assert await show(proof, port) == proof.answer("epoch", 3)
        assert strangers(worker) == 0


async def test_a_silent_stranger_costs_nothing() -> None:
    async with ucp.open_worker(config=TCP) as worker:
        gc.collect()  # else descriptors of earlier tests may be closed meanwhile
        descriptors = len(os.listdir("/proc/self/fd"))
        with begin(worker.address.tcp_addresses[0]) as silent:
            await trio.sleep(0.2)
            assert len(os.listdir("/proc/self/fd")) == descriptors + 1
            assert select.select([silent], [], [], 0) == ([], [], [])  # the kernel keeps it
            assert strangers(worker) == 0


async def test_strangers_at_every_port_while_peers_come_and_go(rounds: Callable[[int, int], int]) -> None:
    """A stranger sends fatal bytes to every port, before, during and after each connection."""
    async with ucp.open_worker(config=TCP) as one, ucp.open_worker(config=TCP) as two:
        ports = [*one.address.tcp_addresses, *two.address.tcp_addresses]

        async def attack() -> None:
            for port in ports:
                with begin(port, FATAL), begin(port, bytes(Proof(new_key(), port)) + FATAL):
                    await trio.sleep(0)

        await attack()
        for _ in range(rounds(3, 50)):
            async with open_pair(one, two) as (client, server):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(attack)
                    await client.send(b"hello")
                    assert await server.receive() == b"hello"
            await attack()
        await until(lambda: strangers(one) > 0 and strangers(two) > 0)


async def test_keys_end_with_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a peer are valid from its exchange on, until the endpoint to it is closed."""
    with recorded_pairs(monkeypatch) as pairs:
        async with ucp.open_worker(config=TCP) as one, ucp.open_worker(config=TCP) as two:

            async def opens(worker: ucp.Worker, key: bytes) -> bool:
                place = internals(worker).identity.address.tcp_addresses[0]
                proof = Proof(key, place)
                return await show(proof, place) == proof.accepted

            async def opened_by(gate: KeyGate, pair: KeyPair) -> bool:
                return await opens(one if gate is internals(one).key_gate else two, pair.ours)

            async def connect_and_close() -> None:
                async with open_pair(one, two) as (client, server), trio.open_nursery() as nursery:
                    for gate, pair in pairs[:2]:
                        assert await opened_by(gate, pair)
                    nursery.start_soon(client.aclose)
                    nursery.start_soon(server.aclose)

            await connect_and_close()
            assert len(pairs) == 2
            assert pairs[0][1] == KeyPair(pairs[1][1].theirs, pairs[1][1].ours)
            await connect_and_close()  # it shares the endpoint, and needs no keys of its own
            assert len(pairs) == 3 and not await opened_by(*pairs[2])
            for gate, pair in pairs[:2]:
                assert await opened_by(gate, pair)  # the endpoint is kept for a moment
            with trio.fail_after(20):
                for gate, pair in pairs[:2]:
                    while await opened_by(gate, pair):
                        await trio.sleep(0.1)


async def test_the_memory_for_nonces_is_bounded() -> None:
    """Of 1024 nonces (wire.md does not say how many)."""
    async with ucp.open_worker(config=TCP) as worker:
        key, [port, *_] = worker.address.keys[:KEY_SIZE], worker.address.tcp_addresses

        def count_until_the_next_epoch() -> int:
            for count in range(2000):
                proof = Proof(key, port)
                with begin(port, bytes(proof)) as connection:
                    if answer(connection) != proof.accepted:
                        return count
            raise AssertionError("there was none")

        assert await trio.to_thread.run_sync(count_until_the_next_epoch) == 1024


async def test_a_host_that_needs_no_key_may_show_an_old_proof(few_nonces: int) -> None:
    """UCX does not always connect again. A false proof is refused there, too."""
    async with ucp.open_worker(config=TCP, admit=THIS_MACHINE) as worker:
        key, [port, *_] = worker.address.keys[:KEY_SIZE], worker.address.tcp_addresses
        for proof in (*[Proof(key, port, 5)] * 2, *(Proof(key, port) for _ in range(2 * few_nonces))):
            assert await show(proof, port) == proof.accepted
        assert await show(attrs.evolve(proof, role="accept"), port) == b""


async def test_raw_endpoints_by_one_address_survive_new_epochs(few_nonces: int) -> None:
    """UCX connects again when a port refuses a proof of a former epoch."""
    async with ucp.open_worker(config=TCP) as owner:
        address = ucp.WorkerAddress(bytes(owner.address))
        async with AsyncExitStack() as stack:
            holders = [await stack.enter_async_context(ucp.open_worker(config=TCP)) for _ in range(3)]
            kept = [await stack.enter_async_context(await each.open_endpoint(address)) for each in holders]
            for number in range(5 * few_nonces):
                async with await holders[number % 3].open_endpoint(address) as endpoint:
                    for each in (endpoint, *kept):
                        await each.tag_send(b"hello", tag=number)
                        await owner.tag_receive(bytearray(5), tag=number)
        assert strangers(owner) == 0


async def test_connections_survive_new_epochs() -> None:
    """Each attempt of UCX's begins a new epoch, or learns of it. (One that it repeats when the Connection has ended is
    a stranger's.)"""
    lib.tu_test_most_nonces(1)
    try:
        for _ in range(3):
            async with ucp.open_worker(config=TCP) as one, ucp.open_worker(config=TCP) as two:
                for _ in range(5):
                    async with open_pair(one, two) as (client, server):
                        for sender, receiver in ((client, server), (server, client)):
                            await sender.send(b"hello")
                            assert await receiver.receive() == b"hello"
    finally:
        lib.tu_test_most_nonces(0)


async def test_a_key_that_comes_again_has_another_epoch() -> None:
    """A worker that holds an address lets its owner in with the same key for each endpoint. Old proofs open nothing."""
    async with ucp.open_worker(config=TCP) as owner, ucp.open_worker(config=TCP) as holder:
        [port, *_] = internals(holder).identity.address.tcp_addresses
        gate, key = internals(holder).key_gate, owner.address.keys[KEY_SIZE:]
        recorded: list[Proof] = []
        for _ in range(3):
            admission = gate.let_in_by_address(owner.address)
            assert admission is not None
            first = Proof(key, port)
            epoch = struct.unpack("<Q", (await show(first, port))[:8])[0]
            assert await show(first, port) == first.answer("epoch", epoch)
            for old in recorded:
                assert await show(old, port) == old.answer("epoch", epoch)
            recorded.append(Proof(key, port, epoch))
            assert await show(recorded[-1], port) == recorded[-1].accepted
            assert await show(recorded[-1], port) == b""
            admission.end()
        assert len({proof.epoch for proof in recorded}) == 3


def forgetful(server: socket.socket, key: bytes, said: list[bytes], over: threading.Event) -> None:
    """Answers proofs as a port whose epoch is 7; first with a false answer about an epoch."""
    place = server.getsockname()
    server.settimeout(0.1)
    with contextlib.ExitStack() as stack:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(2)
                said.append(data := connection.recv(1000))
                shown = Proof(key, place, *struct.unpack("<Q16s", data[16:40]))
                right = shown.accepted if shown.epoch == 7 else shown.answer("epoch", 7)
                other = attrs.evolve(shown, nonce=bytes(16)).answer("epoch", 9)
                connection.sendall(other if len(said) == 1 else right)


async def test_the_epoch_that_a_port_states_is_used_next() -> None:
    """If the statement is the port's."""
    async with peer_that_has_gone() as (address, worker):
        key, [place] = address.keys[:KEY_SIZE], address.tcp_addresses
        said: list[bytes] = []
        over = threading.Event()
        with socket.create_server(place) as server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, forgetful, server, key, said, over)
                endpoint = await worker.open_endpoint(address)
                with trio.fail_after(20):
                    while len(said) < 3:
                        await trio.sleep(0.01)
                await trio.sleep(0.2)
                over.set()
                endpoint.abort()
        epochs = [struct.unpack("<Q", data[16:24])[0] for data in said]
        assert epochs == [0, 0, 7], "the first statement was false"


# ---- the end of a pair ----


#: Seconds after which connections are shut: LINGER of key_gate.c, and two looks of the safety net.
SHUT = 5


async def wait_closed(connection: socket.socket) -> float:
    """Waits until the other end closes; returns after how many seconds."""
    began = trio.current_time()
    with trio.fail_after(SHUT + 5):
        assert await trio.to_thread.run_sync(answer, connection) == b""
    return trio.current_time() - began


def is_open(connection: socket.socket) -> bool:
    return select.select([connection], [], [], 0) == ([], [], [])


async def test_the_end_of_a_pair_shuts_what_it_let_in() -> None:
    """Unless there is another pair of the same peer, before or a moment later."""
    async with ucp.open_worker(config=TCP) as worker, ucp.open_worker(config=TCP) as peer:
        gate = internals(worker).key_gate
        theirs = internals(peer).identity.address
        [port, *_] = internals(worker).identity.address.tcp_addresses

        async def come(pair: KeyPair, stack: contextlib.ExitStack) -> socket.socket:
            proof = Proof(pair.ours, port)
            connection = stack.enter_context(begin(port, bytes(proof)))
            assert await trio.to_thread.run_sync(answer, connection) == proof.accepted
            return connection

        with contextlib.ExitStack() as stack:
            first, second, third, of_another = (KeyPair(new_key(), new_key()) for _ in range(4))
            admission = gate.let_in(first, theirs)
            another = gate.let_in(of_another, some_worker(uid=7))
            one = await come(first, stack)
            other = await come(of_another, stack)
            later = gate.let_in(second, theirs)
            two = await come(second, stack)
            admission.end()
            assert not gate.has_ended
            later.end()
            assert gate.has_ended
            last = gate.let_in(third, theirs)  # in time
            await trio.sleep(SHUT)
            assert is_open(one) and is_open(two) and is_open(other)
            last.end()
            assert 1 < await wait_closed(one) < SHUT
            await wait_closed(two)
            assert is_open(other) and not gate.has_ended
            worker.address  # noqa: B018 - gives out keys, which are others than those
            another.end()
            await wait_closed(other)
            assert not gate.has_ended


@pytest.mark.parametrize("first", ["connection", "raw"])
async def test_a_raw_endpoint_outlives_the_connections_beside_it(first: str) -> None:
    """UCX may connect it while a Connection has keys for the same place."""
    async with ucp.open_worker(config=TCP) as ours, ucp.open_worker(config=TCP) as theirs:
        address = ucp.WorkerAddress(bytes(theirs.address))
        raw = await ours.open_endpoint(address) if first == "raw" else None
        async with open_pair(ours, theirs) as (connection, other):
            raw = raw or await ours.open_endpoint(address)
            await raw.tag_send(b"1", 1)
            await theirs.tag_receive(bytearray(1), 1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.aclose)
                nursery.start_soon(other.aclose)
        await trio.sleep(SHUT)
        with trio.fail_after(10):
            for _ in range(3):
                await raw.tag_send(b"2", 1)
                await theirs.tag_receive(bytearray(1), 1)
            await raw.flush()
        raw.abort()


def descriptor_connected_to(connection: socket.socket) -> int:
    """The other end, in this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            if found.family == connection.family and found.getpeername() == connection.getsockname():
                return fd
    raise AssertionError("no descriptor")


async def test_a_descriptor_that_is_another_socket_is_not_shut() -> None:
    """UCX may close descriptors by other means than those that the gate sees."""
    async with ucp.open_worker(config=TCP) as worker, ucp.open_worker(config=TCP) as peer:
        gate, pair = internals(worker).key_gate, KeyPair(new_key(), new_key())
        [port, *_] = internals(worker).identity.address.tcp_addresses
        admission = gate.let_in(pair, internals(peer).identity.address)
        with begin(port, bytes(Proof(pair.ours, port))) as connection:
            assert await trio.to_thread.run_sync(answer, connection) != b""
            accepted = descriptor_connected_to(connection)
            near, far = socket.socketpair()
            with near, far:
                kept = os.dup(accepted)
                os.dup2(near.fileno(), accepted)
                admission.end()
                with trio.fail_after(SHUT + 5):
                    while gate.has_ended:
                        await trio.sleep(0.1)
                far.sendall(b"x")
                assert near.recv(1) == b"x" and is_open(far)
                os.dup2(kept, accepted)
                os.close(kept)


async def test_the_end_of_an_endpoint_does_not_end_others_between_the_same_workers() -> None:
    """UCX uses one TCP connection for endpoints of both directions, whichever pair has let it in."""
    async with ucp.open_worker(config=TCP) as one, ucp.open_worker(config=TCP) as two:
        async with await one.open_endpoint(two.address) as there:
            await there.tag_send(b"hello", tag=1)
            await two.tag_receive(bytearray(5), tag=1)
            back = await two.open_endpoint(one.address)
            await back.tag_send(b"world", tag=2)
            await one.tag_receive(bytearray(5), tag=2)
        await trio.sleep(SHUT)
        async with back, open_pair(one, two) as (client, server):
            for _ in range(2):
                await back.tag_send(b"world", tag=2)
                await one.tag_receive(bytearray(5), tag=2)
                await client.send(b"hello")
                assert await server.receive() == b"hello"
        async with await two.open_endpoint(one.address) as back, await one.open_endpoint(two.address) as there:
            await trio.sleep(SHUT)  # the Connection's pair has ended
            for sender, receiver in ((back, one), (there, two)):
                await sender.tag_send(b"world", tag=3)
                await receiver.tag_receive(bytearray(5), tag=3)


async def test_ucx_connects_before_take_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's UCX connects when TAKE is sent, and the server's UCX may connect back: the server has let it in."""
    delay_handshakes(monkeypatch, Taken, partial(trio.sleep, 0.3))
    async with ucp.open_worker(config=TCP) as one, ucp.open_worker(config=TCP) as two:
        async with open_pair(one, two) as (client, server):
            await client.send(b"x")
            assert await server.receive() == b"x"
        assert strangers(one) == strangers(two) == 0 and not caplog.records


async def test_a_refused_client_leaves_no_keys(monkeypatch: pytest.MonkeyPatch, worker: ucp.Worker) -> None:
    with recorded_pairs(monkeypatch) as pairs:
        async with open_listener(worker, authkey=b"a key of 16 bytes") as listener:
            with pytest.raises(trio_ucx.NotAdmitted):
                async with trio_ucx.connect(listener.address, authkey=b"another, of 16 bytes"):
                    pass
        assert pairs == []


# ---- keys from the exchange ----


def exchanged(client: Exchange, server: Exchange) -> bytes:
    """Lets the two sides exchange everything until both have keys; returns what has travelled."""
    client.open(some_description())
    travelled = b""
    for _ in range(10):
        for sender, receiver in ((client, server), (server, client)):
            data = sender.data_to_send()
            travelled += data
            receiver.receive_data(data)
            if receiver.next_event() is not None and receiver is server:
                server.welcome(some_description(), EndpointSummary())
        if client._keys is not None:
            return travelled
    raise AssertionError("no keys")


@pytest.mark.parametrize("authkey", [None, b"a key of 16 bytes"])
def test_keys_of_an_exchange(authkey: bytes | None) -> None:
    seen = set()
    for _ in range(3):
        client, server = (Exchange(is_client=side, software="test", authkey=authkey) for side in (True, False))
        travelled = exchanged(client, server)
        assert client.keys == KeyPair(server.keys.theirs, server.keys.ours)
        for key in (client.keys.ours, client.keys.theirs):
            assert len(key) == KEY_SIZE and (key in travelled) == (authkey is None)
            assert key.hex() not in repr(client.keys) and repr(key) not in repr(client.keys)
            seen.add(key)
    assert len(seen) == 6


async def test_keys_are_not_shown_to_people() -> None:
    async with ucp.open_worker(config=TCP) as worker:
        address = worker.address
        assert len(address.keys) == 2 * KEY_SIZE and address.keys in bytes(address)
        assert address == ucp.WorkerAddress(bytes(address)) == worker.address
        assert internals(worker).identity.address.keys == b""  # what Connections exchange
        for text in (repr(address), str(address), repr(worker), repr(vars(internals(worker).key_gate))):
            assert address.keys.hex() not in text and repr(address.keys)[2:-1] not in text


# ---- where UCX connects ----


def impostor(server: socket.socket, said: list[bytes], reply: bytes, end: bool, over: threading.Event) -> None:
    """Answers each connection to the address of a worker that has gone with the same, until all are over."""
    server.settimeout(0.1)
    with contextlib.ExitStack() as stack:
        while True:
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                if over.is_set():
                    return
                continue
            connection.settimeout(2)
            with contextlib.suppress(OSError):  # UCX may have closed it
                said.append(connection.recv(1000))
                connection.sendall(reply)
                if end:
                    connection.shutdown(socket.SHUT_WR)


@contextlib.asynccontextmanager
async def peer_that_has_gone() -> AsyncIterator[tuple[ucp.WorkerAddress, ucp.Worker]]:
    """The address of a worker that has gone, and a worker that does not know it yet."""
    local = {**TCP, "NET_DEVICES": "lo"}
    port = free_port()  # nobody takes it when the worker has gone
    async with ucp.open_worker(config={**local, "TCP_PORT_RANGE": f"{port}-{port}"}) as gone:
        address = gone.address
    async with ucp.open_worker(config=local) as worker:
        yield address, worker


async def what_an_impostor_hears(
    address: ucp.WorkerAddress, worker: ucp.Worker, reply: bytes, end: bool
) -> list[bytes]:
    """Returns what each connection said to an impostor at an address when a worker sent something there."""
    said: list[bytes] = []
    over = threading.Event()
    with socket.create_server(address.tcp_addresses[0]) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, impostor, server, said, reply, end, over)
            try:
                with trio.fail_after(30), pytest.raises((OSError, trio.BrokenResourceError)):
                    await use(worker, address)
            finally:
                over.set()
    return said


async def use(worker: ucp.Worker, address: ucp.WorkerAddress) -> None:
    """Sends something by a raw endpoint."""
    endpoint = await worker.open_endpoint(address)
    try:
        await endpoint.tag_send(b"x" * 100, tag=1)
        await endpoint.flush()
    finally:
        endpoint.abort()


#: An acknowledgement of UCX's connection request.
ACKNOWLEDGED = struct.pack("<BII", 32, 4, 2)


#: What an impostor answers. (One that stays silent, or stops before a whole answer, is noticed by keepalive.)
WHOLE = [bytes(ANSWER_SIZE) + ACKNOWLEDGED, ACKNOWLEDGED + bytes(100), FATAL]


@pytest.mark.parametrize(
    ("reply", "end"), [*((reply, True) for reply in (b"", b"x", *WHOLE)), *((reply, False) for reply in WHOLE)]
)
async def test_an_impostor_at_a_peers_address(reply: bytes, end: bool) -> None:
    """A host that has only a peer's address gets proofs for itself, and nothing of what it says reaches UCX."""
    async with peer_that_has_gone() as (address, worker):
        said = await what_an_impostor_hears(address, worker, reply, end)
    key, [place] = address.keys[:KEY_SIZE], address.tcp_addresses
    for data in said:
        assert data[:PROOF_SIZE] == bytes(Proof(key, place, nonce=data[24:40])) and b"x" * 100 not in data
    assert len({data[24:40] for data in said}) == len(said) > 0, "each has a nonce of its own"
    assert not any(part in data for data in said for part in (key, address.keys[KEY_SIZE:]))


async def test_a_key_that_was_refused_is_shown_last() -> None:
    """Two peers may have stated one place, and the newest keys may have ended there. UCX's next try shows others."""
    async with peer_that_has_gone() as (address, worker):
        other = KeyPair(new_key(), new_key())
        internals(worker).key_gate.let_in(other, address)
        said = await what_an_impostor_hears(address, worker, b"", True)
    shown = [data[:16] for data in said if data]
    assert shown[:4] == [name_of(address.keys[:KEY_SIZE]), name_of(other.theirs)] * 2, "newest first, then in turn"


async def test_a_host_that_was_admitted_is_shown_keys_only_if_it_wants_one() -> None:
    async with peer_that_has_gone() as (address, worker):
        worker.admit(*THIS_MACHINE)
        said = await what_an_impostor_hears(address, worker, b"", True)
    shown = [data[:16] for data in said if data]
    assert [data[:8] == UCX_MAGIC for data in shown[:4]] == [True, False] * 2
    assert shown[1] == name_of(address.keys[:KEY_SIZE])


@pytest.mark.parametrize("host", ["this host", "another host"])
async def test_loopback_addresses_of_other_hosts_are_not_meant(host: str) -> None:
    """Where a peer of another host says 127.0.0.1, here it is somebody else's port."""
    local = {**TCP, "NET_DEVICES": "lo"}
    async with ucp.open_worker(config=local) as worker, ucp.open_worker(config=local) as peer:
        address = peer.address
        if host == "another host":
            process = attrs.evolve(address.host.process, host=bytes(16))
            address = address._changed(host=attrs.evolve(address.host, process=process))
        pair = KeyPair(new_key(), new_key())
        internals(worker).key_gate.let_in(pair, address)
        internals(peer).key_gate.let_in(KeyPair(pair.theirs, pair.ours), None)
        internals(worker).key_gate.let_in_by_address = lambda address: None  # type: ignore[method-assign]
        with trio.fail_after(20), contextlib.ExitStack() as stack:
            if host == "another host":
                stack.enter_context(pytest.raises((OSError, trio.BrokenResourceError)))
            await use(worker, peer.address)
        assert strangers(peer) == 0


async def test_keys_of_endpoints_that_fail_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an endpoint fails while it is made."""
    ended: list[object] = []
    end = key_gate.Admission.end
    monkeypatch.setattr(key_gate.Admission, "end", lambda admission: (ended.append(admission), end(admission)))
    with recorded_pairs(monkeypatch) as pairs:
        async with ucp.open_worker(config=TCP) as worker, ucp.open_worker(config=TCP) as other:
            async with ucp.open_worker(config=TCP) as gone:
                dead = gone.address
            refused = other.address._changed(keys=new_key() + new_key())
            before = len(pairs)
            for address in (dead, refused) * 3:
                with contextlib.suppress(OSError, trio.BrokenResourceError):
                    await use(worker, address)
            assert len(pairs) - before == 6
            await until(lambda: len({id(one) for one in ended}) >= 6)


@pytest.mark.parametrize("had_one", [False, True])
async def test_ucx_connects_only_where_it_has_a_key(had_one: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is logged as an error, unless there was a key a moment ago: then its Connection was given up."""
    caplog.set_level("DEBUG", "trio_ucx.ucx")
    async with ucp.open_worker(config=TCP) as worker, ucp.open_worker(config=TCP) as other:
        bare = ucp.WorkerAddress.from_ucx(other.address.ucx)
        with pytest.raises(PermissionError, match=r"admit=\['.*worker.admit\("):
            await worker.open_endpoint(bare)
        with pytest.raises(PermissionError, match="admit="):
            await worker.open_endpoint(("127.0.0.1", 1))
        with pytest.raises(PermissionError, match=r'admit=\["127.0.0.1"\]'):
            await worker.open_listener("127.0.0.1", 0)
        # Even if our own code let it: no key, no connection.
        gate = internals(worker).key_gate
        gate.check_admitted = lambda hosts: None  # type: ignore[method-assign]
        if had_one:
            gate.let_in(KeyPair(new_key(), new_key()), other.address).end()
        with pytest.raises((OSError, trio.BrokenResourceError)), trio.fail_after(10):
            endpoint = await worker.open_endpoint(bare)
            try:
                await endpoint.flush()
            finally:
                endpoint.abort()
        assert strangers(other) == 0
        level, why = ("DEBUG", "Operation canceled") if had_one else ("ERROR", "Permission denied")
        await until(lambda: [one for one in caplog.records if one.getMessage().endswith(f"failed: {why}")])
        assert {one.levelname for one in caplog.records if "failed" in one.getMessage()} == {level}


@pytest.mark.both_transports
async def test_raw_endpoints_between_workers_of_trio_ucx(transports: str) -> None:
    """They need nothing but the address; both ways, one after the other and at once."""
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as two:
        given = ucp.WorkerAddress(bytes(two.address))
        async with await one.open_endpoint(given) as there:
            await there.tag_send(b"hello", tag=3)
            buffer = bytearray(5)
            await two.tag_receive(buffer, tag=3)
            assert buffer == b"hello"
            async with await two.open_endpoint(one.address) as back:
                await back.tag_send(b"world", tag=4)
                await one.tag_receive(buffer, tag=4)
                assert buffer == b"world"
    for _ in range(5):
        async with ucp.open_worker(config=config) as one, ucp.open_worker(config=config) as two:
            async with await one.open_endpoint(two.address) as there, await two.open_endpoint(one.address) as back:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(there.tag_send, bytes(1 << 20), 3)
                    nursery.start_soon(back.tag_send, b"world", 4)
                    await one.tag_receive(bytearray(5), tag=4)
                    await two.tag_receive(bytearray(1 << 20), tag=3)


async def test_hosts_that_need_no_key(caplog: pytest.LogCaptureFixture) -> None:
    """Any UCP peer on this machine: two lines. Peers with keys are served beside them."""
    async with ucp.open_worker(config=TCP, admit=THIS_MACHINE) as one, ucp.open_worker(config=TCP) as two:
        two.admit("127.0.0.1")
        async with await one.open_listener("127.0.0.1", 0) as listener, trio.open_nursery() as nursery:
            requests = []
            nursery.start_soon(lambda: _take(listener, requests))
            async with await two.open_endpoint(listener.address) as endpoint:
                await endpoint.tag_send(b"hello", tag=1)
                await one.tag_receive(bytearray(5), tag=1)
            requests[0].abort()
        async with await one.open_endpoint(ucp.WorkerAddress.from_ucx(two.address.ucx)) as bare:
            await bare.tag_send(b"hello", tag=2)
            await two.tag_receive(bytearray(5), tag=2)
        async with open_pair(one, two) as (client, server):
            await client.send(b"hello")
            assert await server.receive() == b"hello"
        assert strangers(one) == strangers(two) == 0
    levels = [record.levelname for record in caplog.records if "127.0.0.0/8" in record.message]
    assert len(levels) >= 2 and set(levels) == {"WARNING"}  # workers that are opened for these admit the same


async def test_raw_connections_to_the_place_of_a_peer_with_keys() -> None:
    """One side knows the keys of an exchange before the other does, and until later. UCX does not try again there."""
    async with (
        ucp.open_worker(config=TCP, admit=THIS_MACHINE) as one,
        ucp.open_worker(config=TCP, admit=THIS_MACHINE) as two,
    ):
        for worker, peer in ((one, two), (two, one)):
            internals(worker).key_gate.let_in(KeyPair(new_key(), new_key()), peer.address)
        async with open_raw_pair(one, two) as (client, server):
            for sender, receiver in ((client, two), (server, one)):
                await sender.tag_send(b"hello", tag=1)
                await receiver.tag_receive(bytearray(5), tag=1)


@pytest.mark.parametrize("trial", range(10))
async def test_many_exchanges_at_once(monkeypatch: pytest.MonkeyPatch, trial: int) -> None:
    """The server has the keys of all; the client, those of one. UCX gives up after 25 attempts."""
    async with ucp.open_worker(config=TCP) as one, ucp.open_worker(config=TCP) as two:
        gate = internals(two).key_gate
        let_in = gate.let_in

        def with_others(pair: KeyPair, address: ucp.WorkerAddress | None) -> key_gate.Admission:
            admission = let_in(pair, address)
            for _ in range(40):
                let_in(KeyPair(new_key(), new_key()), address)
            return admission

        monkeypatch.setattr(gate, "let_in", with_others)
        with trio.fail_after(20):
            async with open_pair(one, two) as (client, server):
                for sender, receiver in ((client, server), (server, client)):
                    await sender.send(b"hello")
                    assert await receiver.receive() == b"hello"


@pytest.mark.parametrize("admits", ["client", "server"])
async def test_a_peer_that_does_not_admit_in_return(admits: str) -> None:
    """It gets a proof after it has refused a connection without one; new workers for each kind of use."""

    def workers() -> tuple[Any, Any]:
        opened = [ucp.open_worker(config=TCP, admit=THIS_MACHINE), ucp.open_worker(config=TCP)]
        return tuple(opened if admits == "client" else reversed(opened))

    opened = workers()
    async with opened[0] as one, opened[1] as two, open_pair(one, two) as (client, server):
        for sender, receiver in ((client, server), (server, client)):
            await sender.send(b"hello")
            assert await receiver.receive() == b"hello"
    opened = workers()
    async with opened[0] as one, opened[1] as two, await one.open_endpoint(two.address) as there:
        await there.tag_send(b"hello", tag=1)
        await two.tag_receive(bytearray(5), tag=1)
        async with await two.open_endpoint(one.address) as back:
            await back.tag_send(b"hello", tag=1)
            await one.tag_receive(bytearray(5), tag=1)


async def _take(listener: ucp.RawListener, taken: list[ucp.Endpoint]) -> None:
    taken.append(await (await listener.accept_request()).accept())


async def test_networks_that_the_user_names() -> None:
    async with ucp.open_worker(config=TCP) as worker:
        networks = internals(worker).key_gate.networks
        for wrong in ("10.0.0.1/8", "a host", ""):
            with pytest.raises(ValueError, match=r"."):
                worker.admit(wrong)
        with pytest.raises(TypeError, match="'10.0.0.0/8'"):
            worker.admit(10)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"\['10.0.0.0/8'\]"):
            async with ucp.open_worker(admit="10.0.0.0/8"):
                pass
        worker.admit("203.0.113.0/24", "2001:db8::1")
        assert [str(network) for network in networks] == ["203.0.113.0/24", "2001:db8::1/128"]
        with begin(worker.address.tcp_addresses[0], UCX_MAGIC) as connection:
            assert answer(connection) == b""  # this machine is not among them
        beside = worker._open_isolated()
        assert internals(beside).key_gate.networks == networks
        worker.admit("203.0.113.0/24", "127.0.0.1")  # this machine, with all its addresses
        assert internals(beside).key_gate.networks == networks
        hosts = [host for host, _ in worker.address.tcp_addresses]
        assert all(any(ip_address(host) in network for network in networks) for host in ["127.0.0.9", "::1", *hosts])
        gate = internals(worker).key_gate
        assert gate._is_admitted("203.0.113.7") and not gate._is_admitted("203.0.112.7")


@pytest.mark.parametrize(
    ("network", "is_in"),
    [
        ("127.0.0.0/8", True),
        ("127.0.0.1/32", True),
        ("126.0.0.0/7", True),
        ("96.0.0.0/3", True),
        ("0.0.0.0/0", True),
        ("127.0.0.0/32", False),
        ("126.0.0.0/8", False),
        ("128.0.0.0/1", False),
        ("::/0", False),
    ],
)
async def test_the_comparison_of_networks(network: str, is_in: bool) -> None:
    """C code compares bit by bit who comes with the networks."""
    async with ucp.open_worker(config={**TCP, "NET_DEVICES": "lo"}) as worker:
        native = key_gate._pointer(network.partition("/")[0])
        assert lib.tu_gate_admit(internals(worker).handle, native, int(network.partition("/")[2]))
        with begin(worker.address.tcp_addresses[0], UCX_MAGIC[:4]) as connection:
            if is_in:
                connection.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    connection.recv(1)  # UCX has it, and waits for the rest
            else:
                assert answer(connection) == b""


async def test_an_unknown_address_layout_gets_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be ports that the gate has not seen. Raw endpoints are possible: the gate guards those that it has."""
    have_an_unknown_address_layout(monkeypatch)
    async with ucp.open_worker(config=TCP) as worker:
        why = "cannot read this UCX's worker address"
        with pytest.raises(PermissionError, match=why):
            await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        with pytest.raises(PermissionError, match=why):
            async with trio_ucx.connect(("127.0.0.1", 1), worker=worker):
                pass


@pytest.mark.parametrize(
    ("deny", "why"),
    [
        (miss_where_ucx_listens, "could not find where this UCX begins to listen"),
        (miss_an_import, r"cannot replace connect\(\) in libucs"),
    ],
)
async def test_a_worker_whose_ports_cannot_be_shut_does_not_open(
    monkeypatch: pytest.MonkeyPatch, deny: Callable[[pytest.MonkeyPatch], None], why: str
) -> None:
    deny(monkeypatch)
    with pytest.raises(PermissionError, match=why):
        async with ucp.open_worker(config=TCP):
            pass
    with pytest.raises(PermissionError, match=why):
        await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
    with pytest.raises(PermissionError, match=why):
        async with trio_ucx.connect(("127.0.0.1", 1)):
            pass
    async with ucp.open_worker(config={"TLS": "sysv,self"}):  # it has none
        pass


#: Refuses to make a page of libucs writable, as a policy that forbids to change a library does.
NO_WRITABLE_LIBUCS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
int mprotect(void *at, size_t length, int protection)
{
    Dl_info info;

    if (protection == (PROT_READ | PROT_WRITE) && dladdr(at, &info) && strstr(info.dli_fname, "/libucs") != NULL) {
        errno = EACCES;
        return -1;
    }
    return (int)syscall(SYS_mprotect, at, length, protection);
}
"""

OPEN_WORKERS = """
import sys, trio
from trio_ucx import ucp

async def main():
    for tls in sys.argv[1:]:
        try:
            async with ucp.open_worker(config={"TLS": tls}):
                print("open")
        except PermissionError as error:
            print(error)

trio.run(main)
"""


async def test_a_system_that_forbids_to_change_libucs(tmp_path: Path) -> None:
    """Workers with data ports do not open. (In a new process: the gate is installed once.)"""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "deny.c").write_text(NO_WRITABLE_LIBUCS)
    await trio.run_process(["cc", "-shared", "-fPIC", "-o", "deny.so", "deny.c", "-ldl"], cwd=tmp_path)
    command = [sys.executable, "-c", OPEN_WORKERS, "tcp", "posix,self", "tcp"]
    preloaded = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(tmp_path / "deny.so")]))
    environment = {**os.environ, "LD_PRELOAD": preloaded}
    done = await trio.run_process(command, env=environment, capture_stdout=True)
    refused, opened, again = done.stdout.decode().splitlines()
    assert opened == "open" and again == refused
    assert "strangers cannot be kept away from UCX's TCP ports, because trio_ucx cannot replace" in refused
    assert "forbids changing the import table" in refused and '"TLS": "sm,self"' in refused


async def test_a_worker_without_tcp_has_no_data_port() -> None:
    async with ucp.open_worker(config={"TLS": "sysv,self"}) as worker:
        assert internals(worker).key_gate._ports == [] and worker.address.tcp_addresses == ()


# ---- other users of the same UCX ----


async def test_other_users_of_libucs_are_not_affected() -> None:
    """What UCX connects for somebody else in this process has no keys, also where descriptors are used again."""
    file = ffi.string(lib.tu_library_file()).decode()
    libucs = ctypes.CDLL(file.replace("libucp", "libucs"))

    def exchange() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = ctypes.c_int()
            assert libucs.ucs_socket_create(socket.AF_INET, socket.SOCK_STREAM, 0, ctypes.byref(client)) == 0
            port = server.getsockname()[1]
            address = struct.pack("=H", socket.AF_INET) + struct.pack(">H4s8x", port, socket.inet_aton("127.0.0.1"))
            assert libucs.ucs_socket_connect(client, address) == 0
            assert libucs.ucs_socket_send(client, b"plain", 5) == 0
            accepted, _ = server.accept()
            with accepted:
                got = accepted.recv(100)
                accepted.sendall(b"bytes")
                buffer = ctypes.create_string_buffer(5)
                assert libucs.ucs_socket_recv(client, buffer, 5) == 0 and buffer.raw == b"bytes"
            os.close(client.value)
        return got

    assert exchange() == b"plain"
    async with ucp.open_worker(config=TCP) as worker:
        assert exchange() == b"plain"
        async with ucp.open_worker(config=TCP) as gone:
            address = gone.address
        with contextlib.suppress(OSError, trio.BrokenResourceError):
            (await worker.open_endpoint(address)).abort()  # refused: its descriptor is free again
        for _ in range(3):
            assert exchange() == b"plain"
    assert exchange() == b"plain"


# ---- several hosts and users ----

KNOCK = """
import socket, sys
bytes_ = bytes.fromhex(sys.argv[3])
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as connection:
        connection.sendall(bytes_)
        print("closed" if connection.recv(1) == b"" else "answered")
except ConnectionError:
    print("closed")
except TimeoutError:
    print("open")
"""


async def knock(under: list[str], address: tuple[str, int], data: bytes = FATAL) -> str:
    """What a stranger gets that sends these bytes: "closed" is what it should be."""
    command = [*under, sys.executable, "-c", KNOCK, address[0], str(address[1]), data.hex()]
    done = await trio.run_process(command, capture_stdout=True)
    return done.stdout.decode().strip()


async def test_strangers_on_other_hosts_and_of_other_users() -> None:
    """Strangers are turned away at every port before, during and after a connection.

    They are other users of the server's machine and of the peer's, and other hosts.
    """
    users = [[], as_user(65534)]
    with open_network() as network:
        serving, friend, stranger = network.host(), network.host(), network.host()
        network.cable((serving, "one", "10.213.1.1/24"), (friend, "eth", "10.213.1.2/24"))
        network.cable((serving, "two", "10.213.2.1/24"), (stranger, "eth", "10.213.2.2/24"))
        await network.ready()
        async with (
            open_peer("host", ["0.0.0.0"], {}, under=serving.under) as server,
            open_peer("visiting_until_told", {"NET_DEVICES": "eth"}, {}, under=friend.under) as client,
        ):
            [control] = await server.hear()
            ports = {host: (host, port) for host, port in listening(server.process.pid) if port != control[1]}
            near, far = ports["10.213.1.1"], ports["10.213.2.1"]

            async def attack() -> None:
                async def assert_closed(host: Host, address: tuple[str, int]) -> None:
                    for user in users:
                        assert await knock([*host.under, *user], address) == "closed"

                async with trio.open_nursery() as nursery:
                    for host, address in [(stranger, far), (friend, near), (serving, near), (serving, far)]:
                        nursery.start_soon(assert_closed, host, address)

            await attack()
            await client.tell(["10.213.1.1", control[1]])
            assert await client.hear(40) == ["connected", ["tcp"]]
            await attack()
            theirs = [port for port in listening(client.process.pid) if port[0] == "10.213.1.2"]
            assert theirs
            for host in (serving, friend):  # and at the peer's ports
                for user in users:
                    assert await knock([*host.under, *user], theirs[0]) == "closed"
            await client.tell()
            assert await client.hear(40) == ["still connected"]
            await attack()
            await server.tell()
            await server.hear()


#: Listens at all ports of a range, and counts who comes until standard input ends.
SQUATTER = """
import select, socket, sys
poller, ears, heard = select.epoll(), {}, 0
poller.register(0, select.EPOLLIN | select.EPOLLHUP)
for port in range(int(sys.argv[2]), int(sys.argv[3]) + 1):
    one = socket.socket()
    one.bind((sys.argv[1], port))
    one.listen(64)
    ears[one.fileno()] = one
    poller.register(one, select.EPOLLIN)
print(flush=True)
while True:
    for fd, _ in poller.poll():
        if fd == 0:
            print(heard)
            sys.exit()
        ears[fd].accept()[0].close()
        heard += 1
"""

#: The same at both hosts, as of every guest of some virtual machines; and the network between the hosts.
SHARED_IP, BETWEEN = "10.0.2.15", ("10.9.0.1", "10.9.0.2")
#: The ports that UCX of each host takes.
RANGES = (20_000, 20_049), (20_100, 20_149)


@attrs.frozen
class HostsWithOneAddress:
    """Two hosts that have one address in common, and a squatter of another user on each of them."""

    hosts: tuple[Host, Host]
    squatters: list[trio.Process] = attrs.field(factory=list)

    async def let_squatters_come(self) -> None:
        """They listen where the other host's UCX does."""
        for host, ports in zip(self.hosts, reversed(RANGES), strict=True):
            python = [*as_user(65534), "/usr/bin/python3", "-c", SQUATTER, SHARED_IP, *map(str, ports)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            squatter = await trio.lowlevel.open_process([*host.under, *python], **pipes)
            self.squatters.append(squatter)
            assert squatter.stdout is not None
            assert await squatter.stdout.receive_some() == b"\n"

    async def end_squatters(self) -> int:
        """Returns how many connections they got."""
        heard = 0
        for squatter in self.squatters:
            assert squatter.stdin is not None and squatter.stdout is not None
            await squatter.stdin.aclose()
            heard += int(b"".join([chunk async for chunk in squatter.stdout]))
            await squatter.wait()
        return heard


@contextlib.asynccontextmanager
async def hosts_with_one_address() -> AsyncIterator[HostsWithOneAddress]:
    with open_network() as network:
        one, two = network.host(), network.host()
        for number, host in enumerate((one, two)):
            network.cable((host, "aside", f"{SHARED_IP}/24"), (network.host(), f"to{number}", "10.0.2.2/24"))
        network.cable((one, "between", f"{BETWEEN[0]}/24"), (two, "between", f"{BETWEEN[1]}/24"))
        await network.ready()
        yield HostsWithOneAddress((one, two))


def two_devices(number: int) -> dict[str, str]:
    ports = "{}-{}".format(*RANGES[number])
    return {"UCX_NET_DEVICES": "aside,between", "UCX_TCP_PORT_RANGE": ports, "UCX_TLS": "tcp"}


@pytest.mark.root
async def test_connections_of_two_hosts_with_one_address() -> None:
    """UCX does not connect to a squatter on its own host."""
    async with hosts_with_one_address() as setting:
        one, two = setting.hosts
        async with (
            open_peer("host", [BETWEEN[0]], {}, under=one.under, **two_devices(0)) as server,
            open_peer("visiting_until_told", {}, {}, under=two.under, **two_devices(1)) as client,
        ):
            [address] = await server.hear()
            await setting.let_squatters_come()
            await client.tell(address)
            assert await client.hear(40) == ["connected", ["tcp"]]
            await client.tell()
            assert await client.hear(40) == ["still connected"]
            await server.tell()
            assert (await server.hear())[0] == [["tcp"]]
        assert await setting.end_squatters() == 0


@pytest.mark.root
async def test_raw_endpoints_of_two_hosts_with_one_address() -> None:
    """The same, in both directions."""
    async with hosts_with_one_address() as setting:
        one, two = setting.hosts
        async with (
            open_peer("raw_echo", under=one.under, **two_devices(0)) as owner,
            open_peer("raw_visits", 10, under=two.under, **two_devices(1)) as visitor,
        ):
            await visitor.tell(await owner.hear())
            await owner.tell(await visitor.hear())
            await setting.let_squatters_come()
            await visitor.tell()
            assert await visitor.hear(40) == ["between"]
            owner.process.kill()
        assert await setting.end_squatters() == 0


#: Connects from a port, by raw packets, and sends something.
FROM_PORT = """
import socket, struct, sys
source, target, port, own_port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
heard = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x800))
heard.settimeout(5)
ends = socket.inet_aton(source) + socket.inet_aton(target)

def checksum(data):
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF

def send(flags, number, acknowledged, data=b""):
    head = struct.pack(">HHIIBBHHH", own_port, port, number, acknowledged, 5 << 4, flags, 65000, 0, 0)
    tcp = head + data
    code = checksum(ends + struct.pack(">BBH", 0, 6, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack(">H", code) + tcp[18:]
    raw.sendto(struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(tcp), 1, 0, 64, 6, 0) + ends + tcp, (target, 0))

def answer():
    while True:
        packet = heard.recv(2000)
        if packet[9] == 6 and packet[12:20] == socket.inet_aton(target) + socket.inet_aton(source):
            return struct.unpack(">HHIIBB", packet[20:34])

send(2, 1000, 0)
first = answer()
send(0x18, 1001, first[2] + 1, b"x" * 40)
print("reset" if answer()[5] & 4 or answer()[5] & 4 else "open")
"""


async def test_a_stranger_at_port_0() -> None:
    """The kernel does not tell the address of such a peer: accept() fails if asked, and UCX would stop listening."""
    with open_network() as network:
        serving, stranger = network.host(), network.host()
        network.cable((serving, "one", "10.213.1.1/24"), (stranger, "one", "10.213.1.2/24"))
        await network.ready()
        spoofed, device = "10.213.1.3", stranger.run("cat", "/sys/class/net/one/address").strip()
        serving.ip("neigh", "add", spoofed, "lladdr", device, "dev", "one", "nud", "permanent")
        async with open_peer("host", ["0.0.0.0"], {}, under=serving.under) as server:
            [control] = await server.hear()
            ports = {host: (host, port) for host, port in listening(server.process.pid) if port != control[1]}
            near = ports["10.213.1.1"]
            for own_port in (5555, 0):
                arguments = [spoofed, near[0], str(near[1]), str(own_port)]
                command = [*stranger.under, sys.executable, "-c", FROM_PORT, *arguments]
                with trio.fail_after(30):
                    await trio.run_process(command, capture_stdout=True)
            await trio.sleep(0.2)
            assert near in listening(server.process.pid), "UCX has stopped listening"
            await server.tell()
            await server.hear()


async def test_a_relay_of_the_exchange() -> None:
    """A stranger who relays an authenticated exchange learns no key, and reaches the data ports of neither side."""
    options = {"authkey": "sixteen letters!"}
    with open_network() as network:
        serving, friend, stranger = network.host(), network.host(), network.host()
        network.cable((serving, "direct", "10.213.1.1/24"), (friend, "direct", "10.213.1.2/24"))
        network.cable((serving, "relay", "10.213.2.1/24"), (stranger, "one", "10.213.2.2/24"))
        network.cable((friend, "relay", "10.213.3.1/24"), (stranger, "two", "10.213.3.2/24"))
        await network.ready()
        direct = {"UCX_NET_DEVICES": "direct"}
        async with (
            open_peer("host", ["0.0.0.0"], options, under=serving.under, **direct) as server,
            open_peer("forwarder", "10.213.3.2", under=stranger.under) as relay,
            open_peer("visiting_until_told", {"NET_DEVICES": "direct"}, options, under=friend.under) as client,
        ):
            [control] = await server.hear()
            await relay.tell(["10.213.2.1", control[1]])
            await client.tell(await relay.hear())
            assert await client.hear(40) == ["connected", ["tcp"]]
            stranger.ip("route", "add", "10.213.1.1/32", "via", "10.213.2.1")
            stranger.ip("route", "add", "10.213.1.2/32", "via", "10.213.3.1")
            ports = [port for port in listening(server.process.pid) if port[1] != control[1]]
            ports += [port for port in listening(client.process.pid) if port[0] == "10.213.1.2"]
            assert len(ports) == 2
            for port in ports:
                for data in (FATAL, bytes(Proof(new_key(), port)) + FATAL):
                    assert await knock(stranger.under, port, data) == "closed"
            await client.tell()
            assert await client.hear(40) == ["still connected"]
            await relay.tell()
            assert await relay.hear() > 0
            await server.tell()
            await server.hear()


SWEEP = """
import json, select, socket, sys, time

host, low, high, seconds, data = sys.argv[1], *map(int, sys.argv[2:5]), bytes.fromhex(sys.argv[5])
poller, pending, connected = select.epoll(), {}, 0
end = time.monotonic() + seconds
while time.monotonic() < end:
    for port in range(low, high + 1):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((host, port))
        pending[one.fileno()] = one
        poller.register(one, select.EPOLLOUT)
    wait = time.monotonic() + 0.002
    while (left := wait - time.monotonic()) > 0:
        for fd, _ in poller.poll(left):
            one = pending.pop(fd)
            poller.unregister(fd)
            try:
                one.send(data)
                connected += 1
            except OSError:
                pass
            one.close()
    for fd in list(pending):
        pending.pop(fd).close()
print(connected)
"""


async def test_no_stranger_gets_in_between(rounds: Callable[[int, int], int]) -> None:
    """A stranger sends fatal bytes to a server's ports all the time, while each of its connections gets a worker of its
    own: also in the moment in which UCX begins to listen.
    """
    low, high, seconds = 20_000, 20_019, rounds(3, 60)
    with open_network() as network:
        serving, friend, stranger = network.host(), network.host(), network.host()
        network.cable((serving, "one", "10.213.1.1/24"), (friend, "eth", "10.213.1.2/24"))
        network.cable((serving, "two", "10.213.2.1/24"), (stranger, "eth", "10.213.2.2/24"))
        stranger.ip("route", "add", "10.213.1.0/24", "via", "10.213.2.1")
        await network.ready()
        ports = {"UCX_TCP_PORT_RANGE": f"{low}-{high}", "UCX_NET_DEVICES": "one"}
        async with (
            open_peer("host", ["10.213.1.1"], {"isolate": True}, under=serving.under, **ports) as server,
            open_peer("reconnecting", seconds, under=friend.under) as client,
        ):
            [control] = await server.hear()
            await client.tell(control)
            swept: list[int] = []

            async def sweep(host: str) -> None:
                arguments = [host, *map(str, (low, high, seconds)), FATAL.hex()]
                command = [*stranger.under, sys.executable, "-c", SWEEP, *arguments]
                swept.append(int((await trio.run_process(command, capture_stdout=True)).stdout))

            await sweep("10.213.1.1")
            [connections] = await client.hear(seconds + 60)
            await server.tell()
            await server.hear()
        assert connections and swept[0] > 10 * seconds, (connections, swept)


# ---- ports that are used up ----


async def test_no_port_is_left() -> None:
    """The last free port of the range is found, and then opening fails at once. (UCX alone would try for ever.)"""
    with contextlib.ExitStack() as stack:
        free = free_port()
        first = stack.enter_context(socket.create_server(("127.0.0.1", free)))
        for port in (free + 1, free + 2):
            with contextlib.suppress(OSError):  # somebody else has it
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        config = {"TLS": "tcp", "NET_DEVICES": "lo", "TCP_PORT_RANGE": f"{free}-{free + 2}"}
        with pytest.raises(OSError, match=f"TCP_PORT_RANGE={free}-{free + 2} .* here 1") as caught:
            async with ucp.open_worker(config=config):
                pass
        assert caught.value.errno == errno.EADDRINUSE
        first.close()
        async with ucp.open_worker(config=config) as worker:
            assert internals(worker).key_gate._ports == [("127.0.0.1", free)]
            async with open_listener(worker, isolate=True) as listener:
                with pytest.raises(ConnectionRefusedError, match="no free port for UCX's TCP transport"):
                    async with trio_ucx.connect(listener.address):
                        pass
