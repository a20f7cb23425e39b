"""Request chains that are cancelled, closed, or lose their peer; and three worked examples."""

from __future__ import annotations

import signal
import struct
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing
from helpers import (
    Rounds,
    assert_free,
    expect_closed,
    live_handles,
    nothing_happens,
    open_pair,
    open_peer,
    tasks_begin,
    until,
)
from injected_faults import close_worker_at_once
from outcome import Error, Value
from peers import REMOTE
from remote import (
    SOON,
    Ground,
    error_of,
    has_begun,
    long_delay_has_begun,
    open_ground,
    open_owner,
    open_two,
    open_way,
    released,
    value_of,
)
from timing import Stopwatch

from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp import chains


def spinning(ground: Ground, chain: chains.RequestChain, **options: Any) -> chains.ChainRequest:
    """A request that is tried until the word at offset 0 is 1."""
    word = chain.get(ground.remote, 0, 8)
    return chain.check(word.u64() == 1, on_false=chains.Retry(10**9, again=word, **options))


# ---- the worked cases ----


@pytest.mark.parametrize("magic", [0x12345678, 0x12345679])
async def test_conditional_write(ground: Ground, magic: int) -> None:
    before = bytes(range(256)) * 4
    ground.write(before)
    ground.write(struct.pack("<I", magic), 1020)
    chain = ground.worker.new_chain(capacity=2)
    head = chain.get(ground.remote, offset=0, length=1024)
    written = chain.put(ground.remote, b"new content", offset=64, when=head.u32(1020) == 0x12345678)
    outcomes = await chain.run()
    if magic == 0x12345678:
        assert value_of(outcomes[written]) is None
        assert ground.read(64, 11) == b"new content"
    else:
        assert isinstance(error_of(outcomes[written]), chains.DependencyFalse)
        assert ground.read(0, 1020) == before[:1020]


async def test_address_from_an_atomic(transports: str) -> None:
    """100 MB, whose place is what a counter has."""
    size = 100_000_000
    data = bytes(range(256)) * (size // 256)
    async with open_owner(transports, "worker", size + 4096) as (_, endpoint, memory):
        chain = endpoint.worker.new_chain(capacity=2)
        with trio.fail_after(60):
            await memory.put(struct.pack("<Q", 5), 0)
            await memory.flush()
            place = chain.fetch_add(memory, 1, 0)
            chain.put(memory, data, offset=place.u64() * 64 + 1024)
            assert [value_of(outcome) for outcome in await chain.run()] == [5, None]
            assert await memory.get(5 * 64 + 1024, size) == data
            assert await memory.get(5 * 64 + 1023, 1) == b"\0"
            assert await memory.get(5 * 64 + 1024 + size, 1) == b"\0"
            assert int.from_bytes(await memory.get(0, 8), "little") == 6


@pytest.mark.sample(1)
@pytest.mark.parametrize(("transports", "sections", "runs"), [("tcp", 50, 20), ("tcp,sm,self", 500, 50)])
async def test_lock(transports: str, sections: int, runs: int, rounds: Rounds) -> None:
    """Held by one of 4 processes at a time."""
    runs = rounds(runs // 3, runs)
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(open_peer("owner", 64, transports=transports))
        said = await owner.hear()
        clients = []
        for number in range(1, 5):
            arguments = said["worker"], said["descriptor"], number, sections, runs
            clients.append(
                await stack.enter_async_context(open_peer("chain_locking", *arguments, transports=transports))
            )
        for client in clients:
            assert await client.hear() == "ready"
        for client in clients:
            await client.tell(["go"])
        with trio.fail_after(120):
            for client in clients:
                assert await client.hear() == sections * runs
        await owner.tell(["word", 8])
        assert await owner.hear() == 4 * sections * runs
        await owner.tell(["word", 0])
        assert await owner.hear() == 0


# ---- cancellation ----


@pytest.mark.parametrize("delay", [0.0, 0.001, 1e6])
async def test_cancelled(ground: Ground, delay: float) -> None:
    chain = ground.worker.new_chain()
    first = chain.put(ground.remote, b"first", 100)
    gate = spinning(ground, chain, delay=delay)
    never = chain.put(ground.remote, b"never", 200, after=gate)
    other = chain.get(ground.remote, 8, 8)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chain.run)
            await has_begun(ground.worker)
            await until(lambda: chain.outcomes[first] is not None and chain.outcomes[other] is not None)
            nursery.cancel_scope.cancel()
    await released(ground.worker)
    outcomes = chain.outcomes
    assert value_of(outcomes[first]) is None
    assert value_of(outcomes[other]) == bytes(8)
    for request in (gate, never):
        assert isinstance(error_of(outcomes[request]), ucp.RequestCancelled)
    requests = ground.worker.statistics()
    await nothing_happens(0.01)
    assert ground.read(200, 5) == bytes(5)
    assert ground.worker.statistics().completed_operations == requests.completed_operations
    ground.write(b"\1")
    with trio.fail_after(60):
        outcomes = await chain.run()  # and it can be run again
    assert all(isinstance(outcome, Value) for outcome in outcomes)
    assert ground.read(200, 5) == b"never"


async def test_others_run_while_a_chain_spins(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    spinning(ground, chain)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chain.run)
        await has_begun(ground.worker)
        with Stopwatch(0.2):
            for _ in range(20):
                await trio.lowlevel.checkpoint()
        ground.write(b"\1")


async def test_cancelled_before_it_begins(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    chain.put(ground.remote, b"never", 200)
    for _ in range(2):
        with trio.CancelScope() as scope:
            scope.cancel()
            await chain.run()
        assert scope.cancelled_caught
        assert ground.read(200, 5) == bytes(5)
        assert isinstance(error_of(chain.outcomes[0]), ucp.RequestCancelled)
        await chain.run()  # what became of it then, is not what became of it the next time
        ground.write(bytes(5), 200)


async def test_busy(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    spinning(ground, chain)
    refused: list[Callable[[], Any]] = [lambda: chain.get(ground.remote), chain.clear]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chain.run)
        await has_begun(ground.worker)
        for function in refused:
            with pytest.raises(trio.BusyResourceError):
                function()
        with pytest.raises(trio.BusyResourceError):
            await chain.run()
        ground.write(b"\1")
    assert len(chain) == 2


# ---- waiting until it can be run again ----

LARGE = 2**20


def unanswered(ground: Ground, chain: chains.RequestChain) -> None:
    """A message that stays under way until :func:`answer` is called."""
    chain.tag_send(ground.endpoint, bytes(LARGE), 9)


async def answer(ground: Ground) -> None:
    await ground.owner.tag_receive(bytearray(LARGE), 9)


async def cancelled_with_something_under_way(ground: Ground) -> chains.RequestChain:
    chain = ground.worker.new_chain()
    unanswered(ground, chain)
    chain.put(ground.remote, b"never", 200, after=-1)
    await cancelled(ground, chain)
    return chain


async def cancelled(ground: Ground, chain: chains.RequestChain) -> None:
    """Runs the chain, and cancels it when its first request is under way."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chain.run)
        in_flight = internals(ground.worker).in_flight
        await until(lambda: any(one.doing == "running a request chain" for one in in_flight.values()))
        nursery.cancel_scope.cancel()


async def test_wait_idle_after_a_cancelled_run(ground: Ground) -> None:
    chain = await cancelled_with_something_under_way(ground)
    idle = 0

    async def wait() -> None:
        nonlocal idle
        await chain.wait_idle()
        idle += 1

    for _ in range(2):  # and the second time, it is cancelled and run again
        with pytest.raises(trio.BusyResourceError, match="wait_idle"):
            await chain.run()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            with trio.move_on_after(0.01) as scope:
                await chain.wait_idle()
            assert scope.cancelled_caught and idle == 0
            with trio.fail_after(60):
                await answer(ground)
        assert idle == 3
        idle = 0
        assert isinstance(error_of(chain.outcomes[1]), ucp.RequestCancelled)
        await cancelled(ground, chain)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, ground)
            await chain.wait_idle()
            nursery.start_soon(answer, ground)
            outcomes = await chain.run()
    assert outcomes.values() == [None, None]
    assert ground.read(200, 5) == b"never"


async def test_wait_idle_when_there_is_nothing_to_wait_for(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    await chain.wait_idle()
    chain.put(ground.remote, b"x", 100)
    await chain.wait_idle()
    await chain.run()
    await chain.wait_idle()
    chain.close()
    with pytest.raises(trio.ClosedResourceError):
        await chain.wait_idle()


async def test_wait_idle_during_a_run(ground: Ground) -> None:
    """Also one that waits for its connection yet."""
    chain = ground.worker.new_chain()
    spinning(ground, chain)
    ended = []

    async def run() -> None:
        await chain.run()
        ended.append("run")

    async def wait() -> None:
        await chain.wait_idle()
        ended.append("idle")

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await tasks_begin()
            nursery.start_soon(wait)
            await has_begun(ground.worker)
            nursery.start_soon(wait)
            await nothing_happens()
            assert ended == []
            ground.write(b"\1")
    assert sorted(ended) == ["idle", "idle", "run"]


@pytest.mark.parametrize("running", [False, True])
async def test_wait_idle_of_a_chain_that_is_closed(ground: Ground, running: bool) -> None:
    if running:
        chain = ground.worker.new_chain()
        spinning(ground, chain)
    else:
        chain = await cancelled_with_something_under_way(ground)

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError, match="chain was closed"):
            await chain.wait_idle()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            if running:
                nursery.start_soon(expect_closed, chain.run)
                await tasks_begin()
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await tasks_begin()
            if running:
                await has_begun(ground.worker)
            chain.close()
        if not running:
            await answer(ground)
        await released(ground.worker)


@pytest.mark.cut_off
async def test_wait_idle_when_the_worker_closes(transports: str) -> None:
    async with trio.open_nursery() as nursery:
        async with open_ground(transports) as ground:
            chain = await cancelled_with_something_under_way(ground)

            nursery.start_soon(expect_closed, chain.wait_idle)
            await tasks_begin()
            close_worker_at_once(ground.worker)
        nursery.cancel_scope.deadline = trio.current_time() + 60
    assert not nursery.cancel_scope.cancelled_caught


# ---- what goes away ----


async def test_closed_while_it_runs(ground: Ground) -> None:
    buffer = bytearray(8)
    chain = ground.worker.new_chain()
    spinning(ground, chain)
    chain.get(ground.remote, into=buffer)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, chain.run)
            await has_begun(ground.worker)
            chain.close()
        await released(ground.worker)
    buffer.append(1)
    with pytest.raises(trio.ClosedResourceError):
        await chain.run()
    assert not live_handles()["request chain"]


async def test_forgotten_chains_are_freed(ground: Ground) -> None:
    import gc

    buffer = bytearray(8)
    for _ in range(10):
        chain = ground.worker.new_chain()
        chain.get(ground.remote, into=buffer)
        await chain.run()
    assert live_handles()["request chain"] >= 1
    del chain
    gc.collect()
    await until(lambda: not live_handles()["request chain"])
    buffer.append(1)


@pytest.mark.cut_off
@pytest.mark.parametrize("what", ["worker", "endpoint", "memory"])
async def test_closed_under_a_run(transports: str, what: str) -> None:
    with trio.fail_after(30):
        async with open_two(transports) as (worker, owner), open_way("worker", worker, owner) as endpoint:
            with owner.context.allocate(64) as memory, endpoint.attach(memory.descriptor) as remote:
                memory.memoryview[:] = bytes(64)
                ground = Ground(worker, owner, endpoint, memory, remote)
                chain = worker.new_chain()
                atomic = chain.fetch_add(remote, 1, 8)
                # Nothing is under way: what is closed with an answer under way over TCP may end its owner.
                gate = spinning(ground, chain, delay=0.02 if what == "memory" else 1e6)
                ended: list[Any] = []

                async def run() -> None:
                    try:
                        ended.append(await chain.run())
                    except Exception as error:
                        ended.append(error)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run)
                    await until(lambda: chain.outcomes[atomic] is not None)
                    if what != "memory":
                        await until(long_delay_has_begun)
                    if what == "worker":
                        close_worker_at_once(worker)
                    elif what == "endpoint":
                        endpoint.abort()
                    else:
                        remote.close()  # waits for the run
                        await nothing_happens(0.02)
                        assert not ended
                        memory.memoryview[0] = 1
                if what == "memory":
                    assert value_of(ended[0][gate]) is None
                    with pytest.raises(ValueError, match="closed"):
                        await chain.run()
                    return
                if what == "worker" and isinstance(ended[0], trio.ClosedResourceError):
                    return  # nothing was under way
                assert value_of(ended[0][atomic]) == 0
                assert isinstance(error_of(ended[0][gate]), (chains.DependencyNotEvaluated, trio.ClosedResourceError))
                if what == "endpoint":
                    assert all(isinstance(outcome, Error) for outcome in await chain.run())


@pytest.mark.cut_off
@pytest.mark.parametrize("side", ["the peer", "we"])
@pytest.mark.parametrize("size", [8, 16 * 2**20])
async def test_chains_end_with_their_connection(size: int, side: str) -> None:
    """At once, whatever UCX does with the requests that it has."""
    with trio.fail_after(60):
        async with open_two("tcp") as (worker, owner), open_pair(worker, owner) as (connection, peer):
            memory = owner.context.register(bytearray(size))
            chain, buffer = worker.new_chain(), bytearray(size)
            with memory, connection.endpoint.attach(memory.descriptor) as remote:
                written = chain.put(remote, buffer)
                read = chain.get(remote, 0, 8, after=written)
                gate = chain.check(read.u64() == 1, on_false=chains.Retry(10**9, again=[written, read]))
                outcomes: list[chains.Outcomes] = []

                async def run() -> None:
                    outcomes.append(await chain.run())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run)
                    await has_begun(worker)
                    await trio.sleep(0.02)
                    with Stopwatch(0.3):
                        (peer if side == "the peer" else connection).abort()
                        while not outcomes:
                            await trio.sleep(0.001)
                failure = trio.BrokenResourceError if side == "the peer" else trio.ClosedResourceError
                errors = [outcome.error for outcome in outcomes[0] if isinstance(outcome, Error)]
                assert any(isinstance(error, failure) for error in errors), errors
                assert isinstance(outcomes[0][gate], Error)
                await chain.wait_idle()  # until UCX has let go of the requests
                assert (await chain.run()).error_count == len(chain)
                chain.close()
                assert_free(buffer)


@pytest.mark.cut_off
@pytest.mark.parametrize("doing", ["get", "nothing", "atomic", "both"])
async def test_killed_peer(transports: str, doing: str) -> None:
    async with open_owner(transports, "worker", 4096, "registered") as (peer, endpoint, memory):
        chain = endpoint.worker.new_chain()
        last = []
        if doing != "atomic":
            word = chain.get(memory, 0, 8)
            delay = 1e6 if doing == "nothing" else 0
            last.append(chain.check(word.u64() == 1, on_false=chains.Retry(10**9, again=word, delay=delay)))
        if doing in ("atomic", "both"):
            word = chain.fetch_add(memory, 1, 8)
            last.append(chain.check(word.u64() > 2**62, on_false=chains.Retry(10**9, again=word)))
        outcomes: list[chains.Outcomes] = []

        async def run() -> None:
            outcomes.append(await chain.run())

        with Stopwatch(SOON + 5), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                await has_begun(endpoint.worker)
                await trio.sleep(0.05)  # they are tried again and again
                peer.signal(signal.SIGKILL)
        for request in last:
            error = error_of(outcomes[0][request])
            assert isinstance(error, (chains.DependencyNotEvaluated, trio.BrokenResourceError))
        assert any(isinstance(o, Error) and isinstance(o.error, trio.BrokenResourceError) for o in outcomes[0])
        errors = [outcome for outcome in outcomes[0] if isinstance(outcome, Error)]
        assert outcomes[0].error_count == len(errors) > 0
        with pytest.raises(trio.BrokenResourceError):
            for number in range(len(chain)):
                outcomes[0].value(number)
        with Stopwatch(SOON), trio.fail_after(60):
            await chain.wait_idle()
            assert (await chain.run()).error_count == len(chain)
        chain.close()


@pytest.mark.cut_off
async def test_the_others_go_on_when_one_peer_dies(transports: str) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config={"TLS": transports}, features=REMOTE))
        memories, peers = [], []
        for _ in range(2):
            peer = await stack.enter_async_context(open_peer("owner", 64, transports=transports))
            said = await peer.hear()
            endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(said["worker"])))
            stack.callback(endpoint.abort)
            memories.append(stack.enter_context(endpoint.attach(bytes.fromhex(said["descriptor"]))))
            peers.append(peer)
        chain = worker.new_chain()
        dying = chain.fetch_add(memories[0], 1)
        gate = chain.check(dying.u64() > 2**62, on_false=chains.Retry(10**9, again=dying))
        fine = chain.fetch_add(memories[1], 1)
        enough = chain.check(fine.u64() >= 20, on_false=chains.Retry(10**9, again=fine, delay=0.005))
        outcomes: list[chains.Outcomes] = []

        async def run() -> None:
            outcomes.append(await chain.run())

        with Stopwatch(SOON + 5), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                await has_begun(worker)
                await trio.sleep(0.03)  # both are tried again and again
                peers[0].signal(signal.SIGKILL)
        assert isinstance(outcomes[0][gate], Error)
        assert value_of(outcomes[0][fine]) == 20
        assert value_of(outcomes[0][enough]) is None
        chain.close()
