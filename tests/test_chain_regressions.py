"""Request chains: regression tests for faults that adversarial testing found."""

from __future__ import annotations

import contextlib
import gc
import signal
import struct
import time
from typing import Any

import pytest
import trio
from helpers import expect_closed, is_free, open_pair, until
from injected_faults import Library, close_worker_at_once, have_device_memory, ignore_unreachable_memory
from outcome import Value
from peers import REMOTE
from remote import (
    Ground,
    error_of,
    for_ucx,
    has_begun,
    long_delay_has_begun,
    open_ground,
    open_owner,
    open_two,
    released,
    value_of,
)

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import lib
from trio_ucx.testing import internals
from trio_ucx.ucp import chains
from trio_ucx.ucp._engine.engine import Engine
from trio_ucx.ucp.chains import _run


def delayed(ground: Ground, delay: float, then: str = "skip") -> chains.RequestChain:
    """A chain that ends after a delay."""
    chain = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    chain.check(word.u64() == 1, on_false=chains.Retry(1, again=word, delay=delay, then=then))
    return chain


# ---- delays ----


async def test_a_cancelled_delay_does_not_stop_the_clock(ground: Ground) -> None:
    short, long = delayed(ground, 0.1), delayed(ground, 0.3)
    async with trio.open_nursery() as nursery:
        shorter = trio.CancelScope()

        async def run_shorter() -> None:
            with shorter:
                await short.run()

        nursery.start_soon(run_shorter)
        await trio.sleep(0.01)  # its delay has begun
        nursery.start_soon(long.run)
        await trio.sleep(0.02)  # this one's, too
        shorter.cancel()
        nursery.cancel_scope.deadline = trio.current_time() + 60
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
        await trio.sleep(0.02)  # both delays have begun
        time.sleep(0.1)  # the first one is over
        await other.run()
        with trio.move_on_after(20):
            await ended.wait()
        nursery.cancel_scope.cancel()
    assert ended.is_set()


# ---- trying again ----


def list_of(ground: Ground, nodes: int) -> None:
    """At offset 64, nodes of 16 bytes: where the next one is, and a number."""
    for number in range(nodes):
        following = 64 + 16 * (number + 1) if number + 1 < nodes else 0
        ground.write(struct.pack("<QQ", following, number), 64 + 16 * number)


def headed_list(ground: Ground, nodes: int) -> tuple[chains.RequestChain, chains.ChainRequest]:
    """A chain that reads where such a list begins."""
    list_of(ground, nodes)
    ground.write(struct.pack("<QQ", 0, 64))
    chain = ground.worker.new_chain()
    return chain, chain.get(ground.remote, 0, 16)


def walk_to(
    ground: Ground, chain: chains.RequestChain, head: chains.ChainRequest, number: chains.Integer | int, **options: Any
) -> chains.ChainRequest:
    return chain.follow(
        ground.remote,
        head.u64(8),
        next_offset=0,
        until=lambda node: node.u64(8) == number,
        limit=1000,
        length=16,
        **options,
    )


async def test_again_while_a_walk_goes_on(ground: Ground) -> None:
    chain, head = headed_list(ground, 200)
    walk = walk_to(ground, chain, head, head.u64(8) * 0 + 199)
    gate = chain.check(head.u64() == 1, on_false=chains.Retry(50, again=head, then="skip"))
    last = chain.check(head.u64() == 0, after=[walk, gate])
    with trio.fail_after(60):
        outcomes = await chain.run()
    assert value_of(outcomes[walk]).steps == 200
    assert value_of(outcomes[gate]) is chains.SKIPPED
    assert value_of(outcomes[last]) is None


async def test_a_walk_and_a_check_try_the_same_again(ground: Ground) -> None:
    chain, head = headed_list(ground, 20)
    walk = walk_to(ground, chain, head, 1000, on_false=chains.Retry(20, again=head, then="skip"))
    gate = chain.check(head.u64() == 1, on_false=chains.Retry(500, again=head, then="skip"))
    with trio.fail_after(60):
        outcomes = await chain.run()
    assert value_of(outcomes[walk]) is chains.SKIPPED
    assert value_of(outcomes[gate]) is chains.SKIPPED
    assert value_of(outcomes[head]) == struct.pack("<QQ", 0, 64)


async def test_again_waits_for_what_others_try_again(ground: Ground) -> None:
    ground.write(struct.pack("<QQ", 0, 64))
    chain = ground.worker.new_chain()
    head = chain.get(ground.remote, 0, 16)
    row = chain.get(ground.remote, head.u64(8), at_most=8, length=8)
    one = chain.check(head.u64() == 1, on_false=chains.Retry(50, again=head, then="skip"))
    two = chain.check(row.u64() == 1, on_false=chains.Retry(50, again=row, then="skip"))
    with trio.fail_after(60):
        outcomes = await chain.run()
    assert value_of(outcomes[one]) is chains.SKIPPED
    assert value_of(outcomes[two]) is chains.SKIPPED
    assert value_of(outcomes[row]) == bytes(8)


# ---- walks ----


async def test_no_result_of_a_walk_that_was_skipped(ground: Ground) -> None:
    list_of(ground, 3)
    chain = ground.worker.new_chain()
    walk = chain.follow(ground.remote, 64, next_offset=0, until=lambda node: node.u64(8) == 9, limit=9, on_false="skip")
    reader = chain.put(ground.remote, walk.u64(8), 2048)
    outcomes = await chain.run()
    assert value_of(outcomes[walk]) is chains.SKIPPED
    assert isinstance(error_of(outcomes[reader]), chains.DependencyNotEvaluated)


async def test_a_walk_beyond_64_bits(ground: Ground) -> None:
    ground.write(struct.pack("<Q", 2**63), 64)
    chain = ground.worker.new_chain()
    walk = chain.follow(ground.remote, 64, next_offset=lambda node: node.u64() * 2 + 128, limit=5)
    outcomes = await chain.run()
    assert isinstance(error_of(outcomes[walk]), chains.DependencyBoundsError)


async def test_no_request_is_added_while_another_is_described(ground: Ground) -> None:
    chain = ground.worker.new_chain()

    def until(node: chains.ChainRequest) -> Any:
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


@pytest.mark.parametrize("end", ["closed", "forgotten", "closed first"])
async def test_memory_of_a_closed_endpoint_is_kept(end: str) -> None:
    """Without error handling, UCX writes to it long after the endpoint was closed."""
    size = 64 * 2**20
    config = {"TLS": "tcp"}

    async def run(chain: chains.RequestChain) -> None:
        try:
            await chain.run()
        except trio.ClosedResourceError:
            assert end == "closed first"

    async with ucp.open_worker(config=config, features=REMOTE) as worker:
        async with ucp.open_worker(config=config, features=REMOTE) as owner:
            endpoint = await worker.open_endpoint(owner.address, error_mode=ucp.ErrorMode.NONE)
            with owner.context.allocate(size) as memory, endpoint.attach(for_ucx(memory.descriptor)) as remote:
                await remote.get(0, 8)
                chain, into = worker.new_chain(), bytearray(size)
                word = chain.get(remote, 0, size, into=into)
                with trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(run, chain)
                        while not worker.statistics().operations_in_flight:
                            await trio.lowlevel.checkpoint()
                        if end == "closed first":
                            chain.close()
                        endpoint.abort()
                if end != "closed first":
                    assert isinstance(error_of(chain.outcomes[word]), trio.ClosedResourceError)
                    with pytest.raises(trio.BusyResourceError):
                        await chain.run()
                if end == "closed":
                    chain.close()
                del chain, word
                gc.collect()
                with pytest.raises(BufferError):
                    into.append(1)
                await released(worker)
    into.append(1)


async def test_device_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_unreachable_memory(monkeypatch)
    async with open_ground("tcp") as ground:
        chain = ground.worker.new_chain()
        into = ucp.DeviceBuffer(0x10000, 8, ucp.MemoryType.ROCM)
        word = chain.get(ground.remote, 0, 8, into=into)
        for use in (word.u64, word.bytes, word.crc32c, lambda: word.equals(b"1")):
            with pytest.raises(chains.DependencyReferenceError, match="host memory"):
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
                await has_begun(endpoint.worker)
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
    for wrong in ("ADD", 0, None, ucp.Access.ATOMIC):
        with pytest.raises(TypeError, match=r"an AtomicOp \(ADD, .*compare_swap\(\)"):
            chain.atomic(ground.remote, wrong, 1)
    with pytest.raises(ValueError, match="32 or 64"):
        chain.atomic(ground.remote, ucp.AtomicOp.OR, 1, bits=16)
    with pytest.raises(TypeError, match="a request, its id, or several"):
        chain.check(word.u64() == 1, after=3.5)
    with pytest.raises(TypeError, match="compared with an int"):
        word.u64() < 1.5  # noqa: B015
    with pytest.raises(ValueError, match="on_false must be"):
        chain.check(word.u64() == 1, on_false=[])
    with pytest.raises(ValueError, match="64 bytes are more than there is room for"):
        chain.get(ground.remote, 0, 64, into=bytearray(8))
    assert len(chain) == 1


@pytest.mark.parametrize("how", ["payload", "condition", "cleared", "shared", "forgotten"])
async def test_local_memory_is_kept(ground: Ground, how: str) -> None:
    chain, other = ground.worker.new_chain(), ground.worker.new_chain()
    buffer = bytearray(b"\7" + bytes(99))
    numbers = chain.local(buffer)
    if how == "payload":
        chain.put(ground.remote, (b"", numbers.u8().pack(1)))
    else:
        if how != "condition":
            other.check(numbers.u8() == 7)
        if how == "shared":
            other.close()
        elif how == "cleared":
            other.clear()
        chain.put(ground.remote, b"\7", when=numbers.u8() == 7)
    del numbers, other
    gc.collect()
    with pytest.raises(BufferError):
        buffer.append(1)
    (await chain.run()).values()
    assert ground.read(0, 1) == b"\7"
    chain.close()
    with trio.fail_after(60):  # the worker frees a dropped chain the next time it progresses
        await until(lambda: is_free(buffer))


async def test_results_of_no_bytes(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    for nothing in (chain.get(ground.remote, 8, 0), chain.get(ground.remote, ground.remote.nbytes)):
        chain.check(nothing.crc32c() == 0, on_false="stop")
        chain.check(nothing.equals(b""), on_false=chains.Retry(3, again=nothing))
        chain.put(ground.remote, (nothing.bytes(), b"x"), 16)
        chain.check(nothing.offset >= 8)
    with trio.fail_after(60):
        assert (await chain.run()).values() == [b"", b"", *[None] * 8]
    assert ground.read(16, 1) == b"x"


async def test_devices_are_not_reached_by_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX 1.22 gives a pointer to memory of a GPU, too."""
    have_device_memory(monkeypatch)
    async with open_ground("tcp,sm,self") as ground:
        ground.write(b"there")
        await ground.remote.flush()
        chain = ground.worker.new_chain()
        word = chain.get(ground.remote, 0, 5)
        assert value_of((await chain.run())[word]) == b"there"
        with pytest.raises(trio_ucx.UCXError, match="load and store"):
            ground.remote.map()


# ---- what became of the requests ----


async def test_what_was_to_run_again_has_happened(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    added = chain.fetch_add(ground.remote, 1, 8)
    written = chain.put(ground.remote, b"\5", 16)
    gate = chain.check(added.u64() == 100, on_false=chains.Retry(5, again=[added, written], delay=100))
    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chain.run)
            await until(lambda: (ground.u64(8), ground.u64(16)) == (1, 5))
            await until(long_delay_has_begun)  # and the gate was found closed
            nursery.cancel_scope.cancel()
    assert (ground.u64(8), ground.u64(16)) == (1, 5)
    assert value_of(chain.outcomes[added]) == 0
    assert value_of(chain.outcomes[written]) is None
    assert isinstance(error_of(chain.outcomes[gate]), ucp.RequestCancelled)


async def test_outcomes_of_a_closed_chain(ground: Ground) -> None:
    chain = delayed(ground, 100)
    chain.put(ground.remote, b"never", after=chain[-1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, chain.run)
        await until(long_delay_has_begun)
        outcomes = chain.outcomes
        chain.close()
        assert value_of(outcomes[0]) == bytes(8)
        assert [isinstance(error_of(outcome), ucp.RequestCancelled) for outcome in outcomes[1:]] == [True, True]
        assert chain.outcomes is outcomes
    with ground.worker.new_chain() as other:
        other.put(ground.remote, b"once")
        await other.run()
    with pytest.raises(trio.ClosedResourceError, match="outcomes"):
        other.outcomes  # noqa: B018


async def test_a_guard_that_fails_stops_as_well(ground: Ground) -> None:
    ground.write(struct.pack("<Q", 2**40))
    chain = ground.worker.new_chain()
    head = chain.get(ground.remote, 0, 8)
    row = chain.get(ground.remote, head.u64(), length=8)
    guard = chain.check(row.u64() == 1, on_false="stop")
    guarded = chain.put(ground.remote, b"guarded", 100)
    outcomes = await chain.run()
    assert isinstance(error_of(outcomes[row]), chains.DependencyBoundsError)
    for one, why in ((guard, "request 1 failed"), (guarded, "request 2 was not run either")):
        assert isinstance(error_of(outcomes[one]), chains.DependencyNotEvaluated)
        assert why in str(error_of(outcomes[one]))
    assert ground.read(100, 7) == bytes(7)


# ---- arguments ----


async def test_large_constants(ground: Ground) -> None:
    ground.write(struct.pack("<Q", 5))
    chain = ground.worker.new_chain()
    five = chain.get(ground.remote, 0, 8).u64()
    for condition in (five < 2**127, five <= 2**128 - 1, ~(five > 2**127), ~(five == 2**128 - 1)):
        chain.check(condition)
    for condition in (1 << five == 32, 160 >> five == 5, -five == -5, ~five == -6):
        chain.check(condition)
    (await chain.run()).values()


async def test_what_was_refused_leaves_nothing_behind(ground: Ground) -> None:
    chain = ground.worker.new_chain(capacity=3)
    first = chain.get(ground.remote, 0, 8)
    with ground.endpoint.attach(ground.memory.descriptor) as other:
        with pytest.raises(ValueError, match="times"):
            chain.get(other, 0, 8, when=first.u64() == 1, on_false=chains.Retry(-1))
        with pytest.raises(chains.NoDependencyResource):
            chain.get(other, 0, 8, when=sum([first.u64()] * 30) == 1)
        with pytest.raises(ValueError, match="multiple of 8"):
            chain.fetch_add(other, 1, 3)
        with pytest.raises(TypeError, match="request"):
            chain.get(other, 0, 8, request=first)
    (await chain.run()).values()
    assert list(chain) == [first]
    assert first in chain


async def test_the_smaller_of_at_most_and_into(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    chain.get(ground.remote, into=bytearray(100), at_most=10)
    assert (await chain.run()).values() == [10]


async def test_retries_can_be_used_again(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    added = chain.fetch_add(ground.remote, 1)
    twice = chains.Retry(1, again=(one for one in [added]), then="skip")
    for _ in range(2):
        chain.check(added.u64() == 2**63, on_false=twice, after=chain[-1])
    await chain.run()
    assert ground.u64(0) == 3


async def test_cleared_while_a_request_is_described(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    chain.get(ground.remote, 0, 8)

    def until(node: chains.ChainRequest) -> chains.Condition:
        chain.clear()
        return node.u64(8) == 1

    with pytest.raises((RuntimeError, chains.DependencyReferenceError), match="changed|cleared"):
        chain.follow(ground.remote, 64, next_offset=0, until=until, limit=5)
    assert list(chain) == []


async def test_memory_at_the_end_of_a_worker() -> None:
    """What a run uses is let go of when UCX has let go of it: with the worker."""
    config = {"TLS": "tcp"}
    async with ucp.open_worker(config=config, features=REMOTE) as owner:
        buffer, number = bytearray(8), bytearray(8)
        async with ucp.open_worker(config=config, features=REMOTE) as worker:
            endpoint = await worker.open_endpoint(owner.address)
            with owner.context.allocate(8) as memory, endpoint.attach(memory.descriptor) as remote:
                chain = worker.new_chain()
                word = chain.get(remote, into=buffer)
                chain.check(chain.local(number).u64() == 1, on_false=chains.Retry(2**40, again=word, delay=0.01))
                await remote.get()  # connects
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run_until_closed, chain)
                    await has_begun(worker)
                    close_worker_at_once(worker)
        for memory_of_ours in (buffer, number):
            memory_of_ours.append(1)


async def run_until_closed(chain: chains.RequestChain) -> None:
    with contextlib.suppress(trio.ClosedResourceError):  # the error may also be the outcome of a request in flight
        await chain.run()


async def test_outcomes_of_the_run_before(ground: Ground) -> None:
    """They are copied before the next run, and not changed by it."""
    chain = ground.worker.new_chain()
    into = bytearray(3)
    read = chain.get(ground.remote, 0, 5)
    added = chain.fetch_add(ground.remote, 1, 8)
    walk = chain.follow(ground.remote, 16, next_offset=0, limit=2, end=None)
    beyond = chain.get(ground.remote, added.u64() + 2**40, length=4)
    never = chain.put(ground.remote, beyond.bytes(), 200)
    chain.get(ground.remote, into=into)
    seen = []
    for number in range(3):
        ground.write(b"run %d" % number)
        seen.append(await chain.run())
    chain.close()
    for number, outcomes in enumerate(seen):
        assert value_of(outcomes[read]) == b"run %d" % number
        assert value_of(outcomes[added]) == number
        assert value_of(outcomes[walk]).steps == 2
        assert isinstance(error_of(outcomes[beyond]), chains.DependencyBoundsError)
        assert "request 3 failed" in str(error_of(outcomes[never]))
        assert value_of(outcomes[-1]) == 3


async def test_closed_and_its_connection_ended_before_the_end_of_the_run_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection's end tells the chain of C, which is freed when the run's end is delivered, and not before."""
    freed: list[Any] = []
    told: list[bool] = []

    class Recording(Library):
        def tu_chain_free(self, handle: Any) -> None:
            freed.append(handle)
            lib.tu_chain_free(handle)

        def tu_chain_forget(self, handle: Any, target: int) -> None:
            told.append(handle in freed)
            if not told[-1]:
                lib.tu_chain_forget(handle, target)

    def end() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "reap", lambda _: None)
            chain.close()
        connection.abort()

    async with open_two("tcp") as (worker, owner), open_pair(worker, owner) as (connection, _):
        with owner.context.allocate(8) as memory, connection.endpoint.attach(memory.descriptor) as remote:
            monkeypatch.setattr(_run, "lib", Recording())
            await remote.put(bytes(8))
            await remote.flush()
            chain = worker.new_chain()
            word = chain.get(remote, 0, 8)
            chain.check(word.u64() == 1, on_false=chains.Retry(10**6, again=word, delay=100.0))
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(expect_closed, chain.run)
                    await until(lambda: internals(worker).in_flight)
                    end()
                await until(lambda: len(freed) == 1)
    assert told and not any(told)
