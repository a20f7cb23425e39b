"""Remote memory that its owner has closed: every access is refused, by every path and at every place; none meets other
memory."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from helpers import HARDWARE, live_handles, open_pair, open_peer, open_to_peer, until
from peers import REMOTE
from remote import error_of, open_two

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp.blocks import BlockProgress

BLOCK, SIZE = 4096, 16 * 4096
#: What the owner's memory contains before it closes it, what its next memory contains, and what peers put.
OLD, NEXT, PUT = b"\x00", b"\x01", b"\x07"
#: The features of those who use it: by messages where hardware would put and get (test_by_hardware).
USER = REMOTE & ~ucp.Feature.RMA if HARDWARE else REMOTE
PLACES = ["one worker", "one context", "two contexts", "threads", "processes"]
#: The access paths: messages over TCP; mapped memory and, of registered memory, process_vm_readv and messages.
GROUNDS = [
    ("tcp,self", "allocated"),
    ("tcp,self", "registered"),
    ("tcp,sysv,cma,self", "allocated"),
    ("tcp,posix,cma,self", "allocated"),
    ("tcp,sm,self", "registered"),
]


# ---- owners ----


def make_memory(context: ucp.Context, kind: str, content: bytes, size: int = SIZE) -> ucp.Memory:
    memory = context.allocate(size) if kind == "allocated" else context.register(bytearray(size))
    memory.memoryview[:] = content * size
    return memory


class Owner:
    """Owns memory in this process: the first one, and the next one after :meth:`close`."""

    def __init__(self, context: ucp.Context, kind: str) -> None:
        self._context, self._kind = context, kind
        self.memory = make_memory(context, kind, OLD)
        self.descriptor = self.memory.descriptor

    def close(self) -> None:
        self.memory.close()
        self.memory = make_memory(self._context, self._kind, NEXT)  # at the address that is free now, if one is

    @property
    def intact(self) -> bool:
        return self.memory.memoryview == NEXT * SIZE


@attrs.frozen
class Place:
    """A peer's endpoint, and the owner at its other end."""

    endpoint: ucp.Endpoint
    descriptor: bytes
    close: Callable[[], Awaitable[object]]
    is_intact: Callable[[], Awaitable[bool]]
    statistics: Callable[[], ucp.WorkerStatistics] | None = None


def own_in_thread(transports: str, kind: str, questions: queue.Queue[str], answers: queue.Queue[Any]) -> None:
    async def main() -> None:
        async with ucp.open_worker(config={"TLS": transports}, features=REMOTE) as worker:
            owner = Owner(worker.context, kind)
            [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)

            async def keep(connection: trio_ucx.Connection) -> None:
                with suppress(trio.BrokenResourceError):
                    await connection.wait_closed()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, keep, [listener])
                answers.put((listener.address, owner.descriptor))
                while (question := await trio.to_thread.run_sync(questions.get)) != "end":
                    if question == "close":
                        owner.close()
                    answers.put(owner.intact)
                nursery.cancel_scope.cancel()
            owner.memory.close()

    trio.run(main)


@asynccontextmanager
async def open_thread(transports: str, kind: str) -> AsyncIterator[Place]:
    questions: queue.Queue[str] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()

    async def ask(question: str) -> bool:
        questions.put(question)
        return bool(await trio.to_thread.run_sync(answers.get))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, own_in_thread, transports, kind, questions, answers)
        address, descriptor = await trio.to_thread.run_sync(answers.get)
        try:
            async with ucp.open_worker(config={"TLS": transports}, features=USER) as worker:
                async with trio_ucx.connect(address, worker=worker) as connection:
                    yield Place(connection.endpoint, descriptor, partial(ask, "close"), partial(ask, "is it intact?"))
        finally:
            questions.put("end")


@asynccontextmanager
async def open_process(transports: str, kind: str) -> AsyncIterator[Place]:
    async with (
        open_peer("owner", SIZE, kind, transports=transports) as peer,
        ucp.open_worker(config={"TLS": transports}, features=USER) as worker,
    ):

        async def ask(question: str) -> bool:
            await peer.tell([question])
            return bool(await peer.hear())

        said = await peer.hear()
        async with open_to_peer("connection", worker, said) as endpoint:
            descriptor = bytes.fromhex(said["descriptor"])
            yield Place(endpoint, descriptor, partial(ask, "close"), partial(ask, "intact"))


@asynccontextmanager
async def open_place(place: str, transports: str, kind: str) -> AsyncIterator[Place]:
    if place in ("threads", "processes"):
        async with (open_thread if place == "threads" else open_process)(transports, kind) as opened:
            yield opened
        return
    async with open_two(transports, USER) as (worker, other):
        async with ucp.open_worker(context=worker.context) as sibling:
            server = {"one worker": worker, "one context": sibling, "two contexts": other}[place]
            async with open_pair(worker, server) as (connection, _):
                owner = Owner(server.context, kind)

                async def close() -> None:
                    owner.close()

                async def is_intact() -> bool:
                    return owner.intact

                try:
                    yield Place(connection.endpoint, owner.descriptor, close, is_intact, server.statistics)
                finally:
                    owner.memory.close()


# ---- accesses ----


class Peer:
    """Uses the memory of a place, in every way."""

    def __init__(self, endpoint: ucp.Endpoint, descriptor: bytes) -> None:
        self.worker = endpoint.worker
        self.remote = endpoint.attach(descriptor)
        self.buffer = bytearray(PUT * SIZE)
        self.plan = self.remote.plan(self.buffer, block=BLOCK)

    async def put_and_flush(self, put: Callable[[], Awaitable[None]]) -> None:
        await put()
        await self.remote.flush()

    async def chain(self, kind: str) -> None:
        with self.worker.new_chain() as chain:
            if kind == "get":
                node: Any = chain.get(self.remote, 0, 100)
            elif kind == "put":
                node = chain.put(self.remote, PUT * 100)
            else:
                node = chain.fetch_add(self.remote, 1)
            outcomes = await chain.run()
            with suppress(AssertionError):
                raise error_of(outcomes[node])

    async def add_and_flush(self) -> None:
        await self.remote.atomic(ucp.AtomicOp.ADD, 1)
        await self.remote.flush()

    def accesses(self) -> dict[str, Callable[[], Awaitable[object]]]:
        remote, plan, here = self.remote, self.plan, self.buffer
        return {
            "get": partial(remote.get, 0, 4),
            "a word": partial(remote.get, 0, 8),
            "all": partial(remote.get_into, here),
            "put": partial(self.put_and_flush, partial(remote.put, PUT * 8)),
            "put of all": partial(self.put_and_flush, partial(remote.put, PUT * SIZE)),
            "blocks": partial(plan.get, [0, 3], [0, 1]),
            "put of blocks": partial(self.put_and_flush, partial(plan.put, [0, 1], [0, 3])),
            "buffers": partial(remote.get_blocks, [(0, bytearray(100)), (5000, bytearray(8))]),
            "put of buffers": partial(self.put_and_flush, partial(remote.put_blocks, [(0, PUT), (5000, PUT * 100)])),
            "fetch_add": partial(remote.fetch_add, 1),
            "compare_swap": partial(remote.compare_swap, 0, 7, bits=32),
            "add": self.add_and_flush,
            "chained get": partial(self.chain, "get"),
            "chained put": partial(self.chain, "put"),
            "chained fetch_add": partial(self.chain, "fetch_add"),
            "notify": partial(remote.notify, b"closed?"),
        }

    async def is_refused(self) -> None:
        for name, access in self.accesses().items():
            with pytest.raises(trio_ucx.UCXError) as caught:
                await access()
                pytest.fail(f"{name} was not refused")
            assert caught.value.status is ucp.Status.NO_ELEM, name
            assert "having closed it" in str(caught.value), name
        assert set(self.buffer) <= {*OLD, *PUT}

    def close(self) -> None:
        self.remote.close()


@pytest.mark.sample(9)
@pytest.mark.parametrize(("transports", "kind"), GROUNDS)
@pytest.mark.parametrize("place", PLACES)
async def test_every_access_is_refused(place: str, transports: str, kind: str) -> None:
    """Of peers that have used the memory, that have only attached it, and that attach it afterwards."""
    async with open_place(place, transports, kind) as there:
        used, attached = (Peer(there.endpoint, there.descriptor) for _ in range(2))
        for access in used.accesses().values():
            await access()
        view, is_mapped = None, False
        with suppress(trio_ucx.UCXError):
            view = used.remote.map()
            is_mapped = True
            assert view[:4] == (await used.remote.get(0, 4))
        assert is_mapped == (kind == "allocated" and ("sysv" in transports or "posix" in transports))
        old = None if view is None else bytes(view)
        await there.close()
        late = Peer(there.endpoint, there.descriptor)
        for peer in (used, attached, late):
            await peer.is_refused()
            with pytest.raises(trio_ucx.UCXError):
                peer.remote.map()
        assert old is None or view == old, "a view keeps the old bytes"
        assert await there.is_intact()
        if there.statistics is not None:
            assert there.statistics().closed_memories == is_mapped, "memory of this process stays for its peers"
        del view
        for peer in (used, attached, late):
            peer.close()
        if there.statistics is not None:
            assert there.statistics().closed_memories == 0


@pytest.mark.skipif(not HARDWARE, reason="needs RDMA")
@pytest.mark.parametrize("kind", ["allocated", "registered"])
@pytest.mark.parametrize("put", [False, True])
async def test_by_hardware(kind: str, put: bool) -> None:
    """RDMA hardware ends the connection of who uses closed memory; nobody reads or writes any."""
    async with open_two("tcp") as (worker, owner):
        theirs = Owner(owner.context, kind)
        async with open_pair(worker, owner) as (connection, _):
            with await connection.attach(theirs.descriptor) as remote:
                here = bytearray(PUT * BLOCK)
                await remote.put(OLD * 8)
                await remote.flush()
                theirs.close()
                with pytest.raises((trio_ucx.UCXError, trio.BrokenResourceError)):
                    await (remote.put(here) if put else remote.get_into(here))
                    await remote.flush()
                with pytest.raises((trio_ucx.UCXError, trio.BrokenResourceError)):
                    await remote.get(0, 8)
                assert NEXT[0] not in here and theirs.intact
                connection.abort()
        async with open_pair(worker, owner) as (connection, _):
            with await connection.attach(theirs.memory.descriptor) as remote:
                assert await remote.get(0, 8) == NEXT * 8
        theirs.memory.close()


@pytest.mark.parametrize("features", [ucp.Feature.TAG | ucp.Feature.RMA, REMOTE])
async def test_without_messages(features: ucp.Feature) -> None:
    """Mapped memory is refused where its owner takes no messages, too; such an owner's UCX refuses nobody else."""
    config = {"TLS": "tcp,sm,self"}
    async with ucp.open_worker(config=config, features=features) as worker:
        async with await worker.open_endpoint(worker.address) as endpoint:
            owner = Owner(worker.context, "allocated")
            with endpoint.attach(owner.descriptor) as used, endpoint.attach(owner.descriptor) as attached:
                assert await used.get(0, 8) == OLD * 8
                owner.close()
                for remote in (used, attached):
                    for access in (partial(remote.get, 0, 8), partial(remote.put, PUT), partial(remote.get, 0, SIZE)):
                        with pytest.raises(trio_ucx.UCXError) as caught:
                            await access()
                        assert caught.value.status is ucp.Status.NO_ELEM
                assert owner.intact
            owner.memory.close()


async def test_a_late_attach_meets_a_shorter_file() -> None:
    """POSIX shared memory: the owner's descriptor is another file by then, and loads beyond its end are faults."""
    async with (
        open_peer("owner", 2**20, transports="tcp,posix,self") as peer,
        ucp.open_worker(config={"TLS": "tcp,posix,self"}, features=USER) as worker,
    ):
        said = await peer.hear()
        await peer.tell(["close", 4096])
        await peer.hear()
        async with open_to_peer("connection", worker, said) as endpoint:
            with endpoint.attach(bytes.fromhex(said["descriptor"])) as remote:
                for call in (remote.connect, partial(remote.get, 0, 8), partial(remote.put, PUT)):
                    with pytest.raises(trio_ucx.UCXError) as caught:
                        await call()
                    assert caught.value.status is ucp.Status.NO_ELEM
        await peer.tell(["intact"])
        assert await peer.hear()


VIEW_OUTLIVES_WORKER = """
import trio, warnings
from trio_ucx import ucp
warnings.simplefilter("ignore")  # the worker is left alone, because its memory is in use
async def main():
    async with ucp.open_worker() as worker:
        memory = worker.context.allocate(300_000)
        memory.memoryview[:] = bytes([17]) * 300_000
        endpoint = await worker.open_endpoint(worker.address)
        remote = endpoint.attach(memory.descriptor)
        await remote.connect()
        view = memoryview(remote.map())
        memory.close()
        endpoint.abort()
    print(set(view))
trio.run(main)
"""


def test_a_view_outlives_the_worker() -> None:
    """The memory is this process's own mapping."""
    done = subprocess.run([sys.executable, "-c", VIEW_OUTLIVES_WORKER], capture_output=True, text=True, timeout=30)
    assert done.stdout == "{17}\n", done


# ---- in the middle ----


@pytest.mark.parametrize("put", [False, True])
@pytest.mark.parametrize(("transports", "kind"), GROUNDS)
async def test_closed_in_the_middle_of_a_transfer(transports: str, kind: str, put: bool) -> None:
    """What has begun ends with its next step, and the blocks that are completed are right."""
    async with open_two(transports, USER) as (worker, owner), open_pair(worker, owner) as (connection, _):
        for _ in range(20):  # until the owner was fast enough
            if await is_refused_midway(connection, owner, kind, put):
                return
        pytest.fail("all transfers ended before the memory was closed")


async def is_refused_midway(connection: trio_ucx.Connection, owner: ucp.Worker, kind: str, put: bool) -> bool:
    count, block = 1024, 65536
    size = count * block
    memory, here, refusal = make_memory(owner.context, kind, b"\x05", size), bytearray(size), None
    with await connection.attach(memory.descriptor) as remote:
        plan, progress = remote.plan(here, block=block), BlockProgress()
        blocks = range(count), range(count - 1, -1, -1)  # no neighbours

        async def close() -> None:
            await until(lambda: progress.completed > 0)
            memory.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            try:
                await (plan.put if put else plan.get)(*blocks, progress=progress)
                await remote.flush()
            except trio_ucx.UCXError as error:
                refusal = error
        done = progress.completed * block
        assert put or here[size - done :] == b"\x05" * done
        await until(lambda: not connection.worker.statistics().left_over_operations)
    await until(lambda: owner.statistics().closed_memories == 0)
    assert refusal is None or refusal.status is ucp.Status.NO_ELEM
    return refusal is not None


@pytest.mark.parametrize("transports", ["tcp,self", "tcp,sm,self"])
async def test_closed_while_a_server_drains(transports: str) -> None:
    """The client's handler still runs, and has closed its memory."""
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as ours, ucp.open_worker(config=config) as theirs:
        now, closed = trio.Event(), trio.Event()

        async def handler(connection: trio_ucx.Connection) -> None:
            with connection.worker.context.allocate(SIZE) as memory:
                memory.memoryview[:] = OLD * SIZE
                await connection.send(memory.descriptor)
                await now.wait()
            closed.set()
            await connection.wait_closed()

        async with trio.open_nursery() as servers:
            serve = partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1", worker=theirs)
            server = await servers.start(serve)
            async with trio_ucx.connect(server.address, worker=ours) as connection:
                with await connection.attach(await connection.receive()) as remote:
                    assert await remote.get(0, 8) == OLD * 8
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(server.drain, 10)
                        await until(lambda: server.connections[0].draining)
                        now.set()
                        await closed.wait()
                        for access in (partial(remote.get, 0, 8), partial(remote.fetch_add, 1)):
                            with pytest.raises(trio_ucx.UCXError) as caught:
                                await access()
                            assert caught.value.status is ucp.Status.NO_ELEM
                        await connection.aclose()


async def test_a_stopped_peer_delays_only_the_freeing() -> None:
    """A get by messages is on its way to a peer that was stopped; killing it lets go of the memory."""
    size = 16 * 2**20
    config = {"TLS": "tcp,self", "TCP_SNDBUF": "64k"}
    async with ucp.open_worker(config=config, features=USER) as worker:
        memory = make_memory(worker.context, "registered", OLD, size)
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        async with listener, trio.open_nursery() as nursery:

            async def keep(connection: trio_ucx.Connection) -> None:
                with suppress(trio.BrokenResourceError):
                    await connection.wait_closed()

            nursery.start_soon(trio.serve_listeners, keep, [listener])
            said = {"connection": listener.address, "descriptor": memory.descriptor.hex()}
            async with open_peer(
                "gets_everything", "connection", said, size, transports="tcp,self", UCX_TCP_RCVBUF="64k"
            ) as peer:
                assert await peer.hear(30) == "got"  # two more are under way
                await peer.stop()
                await trio.sleep(0.3)  # what is under way fills the sockets
                started = trio.current_time()
                memory.close()
                assert trio.current_time() - started < 1
                assert worker.statistics().closed_memories == 1
                assert live_handles()["memory"] == 1
                peer.process.kill()
                await peer.ended()
                await until(lambda: worker.statistics().closed_memories == 0)
            nursery.cancel_scope.cancel()


# ---- at random ----


@pytest.mark.parametrize("place", ["threads", "processes"])
async def test_memory_that_comes_and_goes(place: str, chance: random.Random) -> None:
    """Peers read and write while the owner closes memory, and makes other memory at once, for a while."""
    async with open_place(place, "tcp,sm,self", "allocated") as there:
        peers = [Peer(there.endpoint, there.descriptor) for _ in range(4)]
        refused = 0

        async def hammer(peer: Peer) -> None:
            nonlocal refused
            while True:
                name, access = chance.choice(list(peer.accesses().items()))
                try:
                    result = await access()
                except trio_ucx.UCXError as error:
                    assert error.status is ucp.Status.NO_ELEM, name
                    refused += 1
                    if refused > 200:
                        return
                else:
                    if name in ("get", "a word"):
                        assert isinstance(result, bytes)
                        assert NEXT[0] not in result[1:], "the owner's next memory was read"

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(hammer, peer)
            await trio.sleep(chance.uniform(0, 0.05))
            await there.close()
        assert await there.is_intact()
        for peer in peers:
            peer.close()
