"""Request chains: faults that were found by attacking them."""

from __future__ import annotations

import gc
import signal
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from outcome import Value
from peers import REMOTE
from remote import SOON, open_owner, released
from test_chains import Ground, error_of, open_ground, value_of

from trio_ucx import ucp


@pytest.fixture(params=["tcp", "tcp,sm,self"])
async def ground(request: pytest.FixtureRequest) -> AsyncIterator[Ground]:
    async with open_ground(request.param) as ground:
        yield ground


def delayed(ground: Ground, delay: float, then: str = "skip") -> ucp.RequestChain:
    """A chain that ends after a delay."""
    chain = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    chain.check(word.u64() == 1, on_false=ucp.Retry(1, again=word, delay=delay, then=then))
    return chain


# ---- delays ----


async def test_a_cancelled_delay_does_not_stop_the_clock(ground: Ground) -> None:
    async with trio.open_nursery() as nursery:
        shorter = trio.CancelScope()

        async def run_shorter() -> None:
            with shorter:
                await delayed(ground, 0.1).run()

        nursery.start_soon(run_shorter)
        await trio.sleep(0.01)
        nursery.start_soon(delayed(ground, 0.3).run)
        await trio.sleep(0.02)
        shorter.cancel()
        nursery.cancel_scope.deadline = trio.current_time() + SOON
    assert not nursery.cancel_scope.cancelled_caught


async def test_a_delay_that_ends_in_the_run_of_another(ground: Ground) -> None:
    first, longest, other = delayed(ground, 0.05), delayed(ground, 30.0), ground.worker.new_chain()
    async with trio.open_nursery() as nursery:
        ended = trio.Event()

        async def run_first() -> None:
            await first.run()
            ended.set()

        nursery.start_soon(run_first)
        nursery.start_soon(longest.run)
        await trio.sleep(0.02)
        time.sleep(0.1)
        await other.run()
        with trio.move_on_after(SOON):
            await ended.wait()
        nursery.cancel_scope.cancel()
    assert ended.is_set()


# ---- trying again ----


def list_of(ground: Ground, nodes: int) -> None:
    """At offset 64, nodes of 16 bytes: where the next one is, and a number."""
    for number in range(nodes):
        following = 64 + 16 * (number + 1) if number + 1 < nodes else 0
        ground.write(struct.pack("<QQ", following, number), 64 + 16 * number)


async def test_again_while_a_walk_goes_on(ground: Ground) -> None:
    list_of(ground, 200)
    ground.write(struct.pack("<QQ", 0, 64))
    chain = ground.worker.new_chain()
    head = chain.get(ground.remote, 0, 16)
    walk = chain.follow(
        ground.remote,
        head.u64(8),
        next_offset=0,
        until=lambda node: node.u64(8) == head.u64(8) * 0 + 199,
        limit=1000,
        length=16,
    )
    gate = chain.check(head.u64() == 1, on_false=ucp.Retry(50, again=head, then="skip"))
    last = chain.check(head.u64() == 0, after=[walk, gate])
    with trio.fail_after(SOON):
        outcomes = await chain.run()
    assert value_of(outcomes[walk]).steps == 200
    assert value_of(outcomes[gate]) is ucp.SKIPPED
    assert value_of(outcomes[last]) is None


async def test_a_walk_and_a_check_try_the_same_again(ground: Ground) -> None:
    list_of(ground, 20)
    ground.write(struct.pack("<QQ", 0, 64))
    chain = ground.worker.new_chain()
    head = chain.get(ground.remote, 0, 16)
    walk = chain.follow(
        ground.remote,
        head.u64(8),
        next_offset=0,
        until=lambda node: node.u64(8) == 1000,
        limit=1000,
        length=16,
        on_false=ucp.Retry(20, again=head, then="skip"),
    )
    gate = chain.check(head.u64() == 1, on_false=ucp.Retry(500, again=head, then="skip"))
    with trio.fail_after(SOON):
        outcomes = await chain.run()
    assert value_of(outcomes[walk]) is ucp.SKIPPED
    assert value_of(outcomes[gate]) is ucp.SKIPPED
    assert value_of(outcomes[head]) == struct.pack("<QQ", 0, 64)


async def test_again_waits_for_what_others_try_again(ground: Ground) -> None:
    ground.write(struct.pack("<QQ", 0, 64))
    chain = ground.worker.new_chain()
    head = chain.get(ground.remote, 0, 16)
    row = chain.get(ground.remote, head.u64(8), at_most=8, length=8)
    one = chain.check(head.u64() == 1, on_false=ucp.Retry(50, again=head, then="skip"))
    two = chain.check(row.u64() == 1, on_false=ucp.Retry(50, again=row, then="skip"))
    with trio.fail_after(SOON):
        outcomes = await chain.run()
    assert value_of(outcomes[one]) is ucp.SKIPPED
    assert value_of(outcomes[two]) is ucp.SKIPPED
    assert value_of(outcomes[row]) == bytes(8)


# ---- walks ----


async def test_no_result_of_a_walk_that_was_skipped(ground: Ground) -> None:
    list_of(ground, 3)
    chain = ground.worker.new_chain()
    walk = chain.follow(ground.remote, 64, next_offset=0, until=lambda node: node.u64(8) == 9, limit=9, on_false="skip")
    reader = chain.put(ground.remote, walk.u64(8), 2048)
    outcomes = await chain.run()
    assert value_of(outcomes[walk]) is ucp.SKIPPED
    assert isinstance(error_of(outcomes[reader]), ucp.DependencyNotEvaluated)


async def test_a_walk_beyond_64_bits(ground: Ground) -> None:
    ground.write(struct.pack("<Q", 2**63), 64)
    chain = ground.worker.new_chain()
    walk = chain.follow(ground.remote, 64, next_offset=lambda node: node.u64() * 2 + 128, limit=5)
    outcomes = await chain.run()
    assert isinstance(error_of(outcomes[walk]), ucp.DependencyBoundsError)


async def test_no_request_is_added_while_another_is_described(ground: Ground) -> None:
    chain = ground.worker.new_chain()

    def until(node: ucp.ChainRequest) -> Any:
        chain.get(ground.remote, 0, 8)
        return node.u64(8) == 1

    with pytest.raises(RuntimeError, match="follow"):
        chain.follow(ground.remote, 64, next_offset=0, until=until, limit=5)
    assert len(chain) == 0


# ---- who else uses the chain ----


async def test_added_to_while_the_run_connects() -> None:
    async with open_ground("tcp") as ground:
        chain = ground.worker.new_chain()
        chain.fetch_add(ground.remote, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chain.run)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            for use in (lambda: chain.get(ground.remote, 0, 8), chain.clear, lambda: chain.nbytes):
                with pytest.raises(trio.BusyResourceError):
                    use()
            with pytest.raises(trio.BusyResourceError):
                await chain.run()
        assert ground.u64(0) == 1
        chain.get(ground.remote, 0, 8)
        assert all(isinstance(outcome, Value) for outcome in await chain.run())


# ---- memory ----


async def test_memory_of_a_closed_endpoint_is_kept() -> None:
    """Without error handling, UCX writes to it long after the endpoint was closed."""
    size = 64 * 2**20
    config = {"TLS": "tcp"}
    async with ucp.open_worker(config=config, features=REMOTE) as worker:
        async with ucp.open_worker(config=config, features=REMOTE) as owner:
            endpoint = await worker.open_endpoint(owner.address, error_mode=ucp.ErrorMode.NONE)
            with owner.context.allocate(size) as memory, endpoint.attach(memory.descriptor) as remote:
                await remote.get(0, 8)
                chain, into = worker.new_chain(), bytearray(size)
                word = chain.get(remote, 0, size, into=into)
                with trio.fail_after(SOON):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(chain.run)
                        while not worker.statistics().operations_in_flight:
                            await trio.lowlevel.checkpoint()
                        endpoint.abort()
                assert isinstance(error_of(chain.outcomes[word]), trio.ClosedResourceError)
                with pytest.raises(trio.BusyResourceError):
                    await chain.run()
                chain.close()
                del chain, word
                gc.collect()
                with pytest.raises(BufferError):
                    into.append(1)
                await released(worker)
    into.append(1)


async def test_device_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_ucx.ucp._chain_building.check_reaches", lambda *_: None)
    async with open_ground("tcp") as ground:
        chain = ground.worker.new_chain()
        into = ucp.DeviceBuffer(0x10000, 8, ucp.MemoryType.ROCM)
        word = chain.get(ground.remote, 0, 8, into=into)
        for use in (word.u64, word.bytes, word.crc32c, lambda: word.equals(b"1")):
            with pytest.raises(ucp.DependencyReferenceError, match="host memory"):
                use()


async def test_a_flush_that_failed_was_for_others_too() -> None:
    """A put that nobody waits for has not happened for sure when the flush after another one failed."""
    async with open_owner("tcp", "worker", 2**26) as (peer, endpoint, memory):
        await memory.get(0, 8)
        chain = endpoint.worker.new_chain()
        alone = chain.put(memory, bytes(8))
        waited = chain.put(memory, bytes(8), 8)
        chain.get(memory, 0, 8, after=waited)
        peer.process.send_signal(signal.SIGSTOP)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chain.run)
                await trio.sleep(0.1)
                peer.process.kill()
        finally:
            peer.process.kill()
        for put in (alone, waited):
            assert isinstance(error_of(chain.outcomes[put]), trio.BrokenResourceError)


# ---- arguments ----


async def test_integers_of_other_types(ground: Ground) -> None:
    class Four:
        def __index__(self) -> int:
            return 4

    four: Any = Four()
    ground.write(struct.pack("<Q", 4))
    chain = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    for number in range(4):
        chain.check(word.u64() == four, after=[number])
    last = chain.check((word.u64() <= four) & (word.u64() >= four), after=four)
    outcomes = await chain.run()
    assert value_of(outcomes[last]) is None
    assert value_of(outcomes[four]) is None


async def test_wrong_arguments(ground: Ground) -> None:
    chain: Any = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    with pytest.raises(TypeError, match="the value must be an integer, not NoneType"):
        chain.compare_swap(ground.remote, 1, None)
    with pytest.raises(TypeError, match="a request, its id, or several"):
        chain.check(word.u64() == 1, after=3.5)
    with pytest.raises(TypeError, match="compared with an int"):
        word.u64() < 1.5  # noqa: B015
    with pytest.raises(ValueError, match="on_false must be"):
        chain.check(word.u64() == 1, on_false=[])
    with pytest.raises(ValueError, match="64 bytes are more than there is room for"):
        chain.get(ground.remote, 0, 64, into=bytearray(8))
    assert len(chain) == 1
