"""What the single steps of a message cost, in one process: ``python -m benchmarks.steps CPU SECONDS`` prints JSON.

Nanoseconds, medians of many batches, including the call from Python. Steps that need a message to be there are timed
one by one; the time of reading the clock is subtracted.
"""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import resource
import select
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi, lib
from trio_ucx.ucp._engine.dispatch import deliver
from trio_ucx.ucp._memory.buffers import Pinned, new_bytes

from .contenders.ours import TAG, TLS
from .jobs import MIB

BATCH_NS = 200_000
LEAST_BATCHES = 5
DATA = bytes(range(1, 9))
RECORDS = 16
FULL = 2**64 - 1
#: The steps of a Connection's message: its sender's, then its receiver's.
PASSES = ("send, Python", "send, C", "progress and record, C", "delivery, Python", "receive_into, Python")
SIZES = (MIB, 16 * MIB)
CHAIN_SIZES = (4, 256)

clock = time.perf_counter_ns
Prices = dict[str, float]


async def price(act: Callable[[], object], seconds: float) -> float:
    """The cost of a plain function, in nanoseconds."""

    async def again(count: int) -> None:
        for _ in range(count):
            act()

    return await price_of_batches(again, seconds)


async def price_of_waiting(act: Callable[[], Awaitable[object]], seconds: float) -> float:
    async def again(count: int) -> None:
        for _ in range(count):
            await act()

    return await price_of_batches(again, seconds)


async def price_of_batches(again: Callable[[int], Awaitable[None]], seconds: float) -> float:
    count = 1
    found: list[float] = []
    deadline = clock() + seconds * 1e9
    while len(found) < LEAST_BATCHES or clock() < deadline:
        begin = clock()
        await again(count)
        took = clock() - begin
        if took < BATCH_NS / 2 and not found:
            count *= 2
        else:
            found.append(took / count)
    return statistics.median(found)


async def nothing() -> None:
    """What an ``await`` costs by itself."""


def pin(into: bytearray = bytearray(8), data: memoryview = memoryview(DATA)) -> None:  # noqa: B008
    pins = Pinned(into, writable=True)
    pins.fill(data)
    pins.release()


async def of_python_and_kernel(seconds: float) -> Prices:
    found = {
        "await of a function that does nothing": await price_of_waiting(nothing, seconds),
        "call into C that does nothing": await price(partial(lib.free, ffi.NULL), seconds),
        "system call that does nothing": await price(os.getppid, seconds),
        "a buffer of 8 B pinned, filled and released": await price(pin, seconds),
        "Trio: checkpoint_if_cancelled": await price_of_waiting(trio.lowlevel.checkpoint_if_cancelled, seconds),
        "Trio: schedule point": await price_of_waiting(trio.lowlevel.cancel_shielded_checkpoint, seconds),
    }
    near, far = trio.socket.socketpair()
    await far.send(b"x")
    with near, far, select.epoll() as idle:
        found["Trio: wait_readable, ready"] = await price_of_waiting(
            partial(trio.lowlevel.wait_readable, near), seconds
        )
        found["epoll_wait that finds nothing"] = await price(partial(idle.poll, 0), seconds)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other, _ = listening.accept()
        with other:
            names = ("kernel: send 8 B by TCP, to the other socket", "kernel: receive them")
            ends = [(one, other), (other, one)]

            async def exchange() -> Sequence[int]:
                ends.reverse()  # answered, as is usual: else each would be acknowledged by a packet of its own
                source, target = ends[0]
                begin = clock()
                source.send(DATA)
                sent = clock()
                target.recv(8)
                return begin, sent, clock()

            found |= await prices_one_by_one(exchange, names, seconds)
    return found


async def prices_one_by_one(
    once: Callable[[], Awaitable[Sequence[int]]], names: Sequence[str], seconds: float
) -> Prices:
    """The costs of the steps between the times that ``once`` returns. A step without a name does not count."""
    itself = statistics.median(clock() - clock() for _ in range(1000))  # negative
    rows: list[Sequence[int]] = []
    deadline = clock() + seconds * len(names) * 1e9
    while len(rows) < LEAST_BATCHES or clock() < deadline:
        rows.append(await once())
    steps = zip(*([after - before for before, after in itertools.pairwise(row)] for row in rows), strict=True)
    return {name: max(0, statistics.median(step) + itself) for name, step in zip(names, steps, strict=True) if name}


@asynccontextmanager
async def connected(transport: str) -> AsyncIterator[tuple[trio_ucx.Connection, trio_ucx.Connection]]:
    """Both ends of a connection between two workers of this process."""
    config = {"TLS": TLS[transport]}
    async with (
        ucp.open_worker(config=config, yield_interval=1) as near,
        ucp.open_worker(config=config, yield_interval=1) as far,
    ):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=near)
        async with listener, trio_ucx.connect(listener.address, worker=far) as one, await listener.accept() as other:
            await one.send(DATA, tag=TAG)
            await other.receive(tag=TAG)
            yield one, other


async def of_a_message(transport: str, seconds: float) -> Prices:
    """The costs of a Connection's message in one process, which waits for nothing; there and back alternately."""
    async with connected(transport) as ends:
        engines = [end.worker._engine for end in ends]
        into = bytearray(8)
        address = ffi.from_buffer("char[]", into)
        received, armed = ffi.new("tu_received_t *"), ffi.new("int *")
        records = ffi.new("tu_record_t[]", RECORDS)
        view = memoryview(ffi.buffer(records)).cast("Q")
        look = partial(lib.tu_worker_progress_and_arm, engines[0].handle, records, RECORDS)
        found = {
            "a look that finds nothing, C": await price(partial(look, False, False, armed), seconds),
            "the same, and armed, C": await price(partial(look, True, False, armed), seconds),
            "the same, by the engine, Python and C": await price(
                partial(engines[0].progress_and_deliver, True), seconds
            ),
        }
        raw = [
            await one.open_endpoint(other.address) for one, other in itertools.permutations(end.worker for end in ends)
        ]
        for one, other in zip(raw, reversed(ends), strict=True):
            await one.tag_send(DATA, TAG)
            await other.worker.tag_receive(into, TAG)
        turn = itertools.cycle((0, 1))

        async def post() -> Sequence[int]:
            here = next(turn)
            handle = raw[here]._core.handle
            begin = clock()
            lib.tu_tag_send_one(handle, DATA, 8, lib.TU_MEMORY_HOST, TAG)
            end = clock()
            engines[1 - here].progress_and_deliver(False)
            lib.tu_tag_receive_one(engines[1 - here].handle, address, 8, lib.TU_MEMORY_HOST, TAG, FULL, received)
            return begin, end

        async def arrive() -> Sequence[int]:
            here = next(turn)
            engine = engines[1 - here]
            engines[here].progress_and_deliver(False)  # otherwise the message would wait for another one
            ends[here].send_nowait(DATA, tag=TAG)
            count = 0
            while not count:  # over tcp the first look may find nothing yet
                begin = clock()
                count = lib.tu_worker_progress_and_arm(engine.handle, records, RECORDS, False, False, armed)
            recorded = clock()
            deliver(engine, view[: count * lib.TU_RECORD_FIELDS].tolist())
            delivered = clock()
            ends[1 - here].receive_nowait(tag=TAG)
            return begin, recorded, delivered, clock()

        async def send_and_receive(receive: Callable[[trio_ucx.Connection], Awaitable[object]]) -> Sequence[int]:
            here = next(turn)
            begin = clock()
            await ends[here].send(DATA, tag=TAG)
            sent = clock()
            await receive(ends[1 - here])
            return begin, sent, clock()

        found |= await prices_one_by_one(post, ("send, C",), seconds)
        found |= await prices_one_by_one(
            arrive, ("progress and record, C", "delivery, Python", "receive_nowait"), seconds
        )
        once = partial(send_and_receive, lambda connection: connection.receive(tag=TAG))
        found |= await prices_one_by_one(once, ("await send", "await receive"), seconds)
        once = partial(send_and_receive, lambda connection: connection.receive_into(into, tag=TAG))
        found |= await prices_one_by_one(once, ("", "await receive_into"), seconds)
        found["send, Python"] = found["await send"] - found["send, C"]
        found["receive_into, Python"] = (
            found["await receive_into"] - found["progress and record, C"] - found["delivery, Python"]
        )
        for endpoint in raw:
            endpoint.abort()
        await trio.lowlevel.checkpoint()
        return {f"{transport}: {name}": value for name, value in found.items()}


async def of_memory(seconds: float) -> Prices:
    """The costs of one MiB when messages of these sizes are copied, and its page faults."""
    found = {}
    for size in SIZES:
        source, target = memoryview(bytearray(b"x") * size), memoryview(bytearray(b"y") * size)
        last = [new_bytes(1)]

        def copy(source: memoryview = source, target: memoryview = target) -> None:
            target[:] = source

        def receive(source: memoryview = source, size: int = size, last: list[bytes] = last) -> None:
            """Copies as a program does that keeps a message until it has the next one."""
            data = new_bytes(size)
            pins = Pinned(data)
            pins.fill(source)
            pins.release()
            last[0] = data

        def map_and_copy(source: memoryview = source, size: int = size) -> None:
            with mmap.mmap(-1, size) as fresh:
                fresh[:] = source

        for name, act in (("memory in use", copy), ("new bytes", receive), ("the kernel's", map_and_copy)):
            counted = Counted(act)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            found[f"{size // MIB} MiB to {name}"] = await price(counted, seconds) * MIB / size
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            found[f"{size // MIB} MiB to {name}: page faults"] = faults / counted.count * MIB / size
    return found


async def of_a_chain(transport: str, seconds: float) -> Prices:
    """The costs of a small request chain, half gets of 8 bytes and half puts of what was read, and of its outcomes."""
    found = {}
    options = {"config": {"TLS": TLS[transport]}, "features": ucp.DEFAULT_FEATURES | ucp.Feature.RMA}
    async with ucp.open_worker(**options) as owner, ucp.open_worker(**options) as worker:  # type: ignore[arg-type]
        endpoint = await worker.open_endpoint(owner.address)
        with owner.context.allocate(MIB) as memory, endpoint.attach(memory.descriptor) as remote:
            for size in CHAIN_SIZES:
                with worker.new_chain(capacity=size) as chain:
                    for number in range(size // 2):
                        got = chain.get(remote, 16 * number, 8)
                        chain.put(remote, got.u64(), 16 * number + 8)
                    outcomes = await chain.run()
                    name = f"{transport}: chain of {size}"
                    found[f"{name}, run"] = await price_of_waiting(chain.run, seconds)
                    outcomes = await chain.run()
                    found[f"{name}, values()"] = await price(outcomes.values, seconds)
                    found[f"{name}, value(request)"] = await price(partial(outcomes.value, got), seconds)
                    found[f"{name}, error_count"] = await price(lambda: outcomes.error_count, seconds)  # noqa: B023
        endpoint.abort()
    return found


class Counted:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.count = act, 0

    def __call__(self) -> None:
        self.count += 1
        self.act()


async def measure(seconds: float, transports: list[str]) -> Prices:
    """Measures all of them; each may take so many seconds."""
    found = await of_python_and_kernel(seconds) | await of_memory(seconds)
    for transport in transports:
        found |= await of_a_message(transport, seconds)
        found |= await of_a_chain(transport, seconds)
    return found


def main(arguments: list[str]) -> None:
    cpu, seconds, *transports = arguments
    if cpu != "None":
        os.sched_setaffinity(0, [int(cpu)])
    gc.collect()
    gc.freeze()
    print(json.dumps(trio.run(measure, float(seconds), transports)))


if __name__ == "__main__":
    main(sys.argv[1:])
