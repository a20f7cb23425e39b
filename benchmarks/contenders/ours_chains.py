"""Remote memory, one step after the other: as a request chain, with ``await``, and in a plain loop in C.

The server owns the memory, and does nothing but progress while the client works: in C where it has the loops, which
:mod:`benchmarks.chains` compiles.
"""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import trio

from trio_ucx import ucp
from trio_ucx.ucp import chains

from .. import loops
from ..ends import Control, End
from ..jobs import Batch, Job
from . import Contender
from .ours import TAG, TLS, check_transports, worker_options

LOOP = "trio"
STEPS = 1000
#: Slots of 64 bytes among which the nodes of the list are scattered. The first is not used: offset 0 is the end.
SLOTS = 16_384
PAIRS, PAIR = SLOTS * 64, 16
FLAG = PAIRS + STEPS * PAIR
NBYTES = FLAG + 8
#: The value of a pair's first half for which something is put to the second half.
CHOSEN = 0xC0FFEE

FOLLOW_SMALL, FOLLOW, ORDERED, UNORDERED = (
    "follow, nodes of 16 B",
    "follow, nodes of 64 B",
    "pairs, ordered",
    "pairs, unordered",
)
NODE_SIZES = {FOLLOW_SMALL: 16, FOLLOW: 64}
#: A get of 8 bytes from each pair; a put of 8 bytes to each.
GET, PUT = "get", "put"
WAYS = (FOLLOW_SMALL, FOLLOW, ORDERED, UNORDERED)
JOBS = tuple(Job("steps", STEPS, way) for way in WAYS)

CHAIN, AWAIT, QUICK_AWAIT, PLAIN = "chain", "await", "await, yield_interval=100e-6", "C"
#: By contender: the doer, and the options of its worker.
HOW: dict[str, tuple[str, dict[str, float]]] = {
    CHAIN: ("chain", {}),
    AWAIT: ("await", {}),
    QUICK_AWAIT: ("await", {"yield_interval": 100e-6}),
    PLAIN: ("plain", {}),
}


def contender(name: str, transport: str, jobs: tuple[Job, ...], doer: str, **options: Any) -> Contender:
    options = {"tls": TLS[transport], "doer": doer, "loops": "", **options}
    return Contender(f"{name} {transport}", transport, "ours_chains", jobs, options=options)


def contenders(transports: Sequence[str], loops_file: str, jobs: tuple[Job, ...] = JOBS) -> list[Contender]:
    return [
        contender(name, transport, jobs, doer, worker=options, loops=loops_file)
        for transport in transports
        for name, (doer, options) in HOW.items()
    ]


CONTENDERS = [
    contender("trio_ucx RemoteMemory", "shm", (Job("steps", STEPS, GET), Job("steps", STEPS, PUT)), "single"),
    contender("trio_ucx chain", "shm", (Job("steps", STEPS, UNORDERED),), "chain"),
]


class Ground:
    """What is in the memory before a batch, and after it. Both ends make it from the seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        #: Offsets of the nodes; the key of each is its number.
        self.nodes = [64 * slot for slot in chance.sample(range(1, SLOTS), STEPS)]
        self.chosen = [number < STEPS // 2 for number in range(STEPS)]
        chance.shuffle(self.chosen)
        self.data = seed.to_bytes(4, "little") * 2

    def pairs(self, data: bytes, others: bytes = bytes(8)) -> bytes:
        return b"".join(
            struct.pack("<Q", CHOSEN if chosen else number) + (data if chosen else others)
            for number, chosen in enumerate(self.chosen)
        )

    def write(self, view: memoryview) -> None:
        view[:] = bytes(len(view))
        for number, (here, following) in enumerate(zip(self.nodes, [*self.nodes[1:], 0], strict=True)):
            struct.pack_into("<QQ", view, here, following, number + 1)
        view[PAIRS:FLAG] = self.pairs(bytes(8))


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    features = ucp.Feature.RMA | ucp.Feature.TAG | ucp.Feature.WAKEUP
    asked = worker_options(setup)
    with ucp.open_context(asked.pop("config"), features=features) as context:
        async with ucp.open_worker(context=context, **asked) as worker:
            plain = loops.load(setup["options"]["loops"]) if setup["options"]["loops"] else None
            if setup["role"] == "server":
                with context.allocate(NBYTES) as memory:
                    address = {"worker": bytes(worker.address).hex(), "memory": bytes(memory.descriptor).hex()}
                    await control.tell({"address": address})
                    await worker.tag_receive(bytearray(8), TAG)
                    yield Owner(worker, memory, plain)
                return
            endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(setup["address"]["worker"])))
            try:
                with endpoint.attach(bytes.fromhex(setup["address"]["memory"])) as remote:
                    await remote.get(0, 8)
                    await endpoint.tag_send(b"greeting", TAG)
                    end = DOERS[setup["options"]["doer"]](worker, remote, plain)
                    end.transports = check_transports(endpoint, setup)
                    yield end
            finally:
                endpoint.abort()


class Owner(End):
    def __init__(self, worker: ucp.Worker, memory: ucp.Memory, plain: Any) -> None:
        super().__init__()
        self.worker, self.view, self.plain = worker, memory.memoryview, plain

    def prepare(self, batch: Batch) -> None:
        Ground(batch.seed).write(self.view)

    async def receive(self, batch: Batch) -> None:
        if self.plain is None:
            while self.view[FLAG:] != batch.seed.to_bytes(8, "little"):
                await trio.lowlevel.checkpoint()
            return
        flag = loops.ffi.from_buffer("char[]", self.view) + FLAG
        served = self.plain.loop_serve(
            loops.number(self.worker._engine.handle), int(loops.ffi.cast("uintptr_t", flag)), batch.seed, 60
        )
        self.worker._engine.reap()
        if not served:
            raise RuntimeError("the client did not come to an end")

    def verify(self, batch: Batch) -> None:
        ground = Ground(batch.seed)
        data = ground.data if batch.job.way in (ORDERED, UNORDERED, PUT) else bytes(8)
        if bytes(self.view[PAIRS:FLAG]) != ground.pairs(data, data if batch.job.way == PUT else bytes(8)):
            raise RuntimeError("the memory is not as it should be afterwards")


class Doer(End):
    """A client. ``once`` does all steps, and keeps what it found."""

    def __init__(self, worker: ucp.Worker, remote: ucp.RemoteMemory, plain: Any) -> None:
        super().__init__()
        self.worker, self.remote, self.plain = worker, remote, plain
        self.ground = Ground(0)
        #: Of the list: (offset of the last node, how many). Of the pairs: how many were put, or had the value.
        self.found: object = None

    def prepare(self, batch: Batch) -> None:
        self.ground = Ground(batch.seed)
        self.found = None
        self.more = {}

    async def send(self, batch: Batch) -> None:
        size = NODE_SIZES.get(batch.job.way)
        for _ in range(batch.count):
            if size is not None:
                await self.follow(size)
            else:
                await self.pairs(batch.job.way)
        await self.remote.put(batch.seed.to_bytes(8, "little"), FLAG)
        await self.remote.flush()

    async def follow(self, size: int) -> None:
        raise NotImplementedError

    async def pairs(self, way: str) -> None:
        raise NotImplementedError

    def verify(self, batch: Batch) -> None:
        way, chosen = batch.job.way, STEPS // 2
        expected = (self.ground.nodes[-1], STEPS) if way in NODE_SIZES else STEPS if way == PUT else chosen
        if self.found != expected:
            raise RuntimeError(f"found {self.found!r}, not {expected!r}")


class Chain(Doer):
    """The chain is made before the time is taken. What that takes: ``build_us`` a step, ``request_us`` a request."""

    chain: chains.RequestChain | None = None
    outcomes: Sequence[Any] = ()

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        if self.chain is not None:
            self.chain.close()
        began = perf_counter()
        way, remote, ground = batch.job.way, self.remote, self.ground
        chain = self.chain = self.worker.new_chain(capacity=2 * STEPS, ordered=way == ORDERED)
        if way in NODE_SIZES:
            chain.follow(
                remote,
                ground.nodes[0],
                next_offset=0,
                until=lambda node: node.u64(8) == STEPS,
                limit=2 * STEPS,
                length=NODE_SIZES[way],
            )
        else:
            for place in range(PAIRS, FLAG, PAIR):
                read = chain.get(remote, place, 8)
                chain.put(remote, ground.data, place + 8, when=read.u64() == CHOSEN, on_false="skip")
        took = (perf_counter() - began) * 1e6
        self.more = {"build_us": took / STEPS}
        if way not in NODE_SIZES:
            self.more["request_us"] = took / (2 * STEPS)

    async def follow(self, size: int) -> None:
        await self._run()

    async def pairs(self, way: str) -> None:
        await self._run()

    async def _run(self) -> None:
        assert self.chain is not None
        self.outcomes = ()  # else the next run would read all of them first, to keep them
        self.outcomes = await self.chain.run()

    def verify(self, batch: Batch) -> None:
        values = [one.unwrap() for one in self.outcomes if one is not None]
        if batch.job.way in NODE_SIZES:
            self.found = (values[0].offset, values[0].steps)
        else:
            for number, chosen in enumerate(self.ground.chosen):
                if values[2 * number] != struct.pack("<Q", CHOSEN if chosen else number):
                    raise RuntimeError(f"pair {number}: read {values[2 * number]!r}")
            self.found = values[1::2].count(None)
        super().verify(batch)


class Await(Doer):
    async def follow(self, size: int) -> None:
        get = self.remote.get
        here, steps, unpack = self.ground.nodes[0], 0, struct.Struct("<QQ").unpack_from
        while True:
            following, key = unpack(await get(here, size))
            steps += 1
            if key == STEPS or following == 0 or steps == 2 * STEPS:
                break
            here = following
        self.found = (here, steps)

    async def pairs(self, way: str) -> None:
        get, put, flush = self.remote.get, self.remote.put, self.remote.flush
        puts, data, wanted = 0, self.ground.data, CHOSEN.to_bytes(8, "little")
        for place in range(PAIRS, FLAG, PAIR):
            if await get(place, 8) == wanted:
                await put(data, place + 8)
                puts += 1
                if way == ORDERED:
                    await flush()
        if way != ORDERED:
            await flush()
        self.found = puts


class Single(Doer):
    async def pairs(self, way: str) -> None:
        places = range(PAIRS, FLAG, PAIR)
        if way == GET:
            wanted = CHOSEN.to_bytes(8, "little")
            self.found = sum([await self.remote.get(place, 8) == wanted for place in places])
            return
        for place in places:
            await self.remote.put(self.ground.data, place + 8)
        await self.remote.flush()
        self.found = len(places)


class Plain(Doer):
    """Nothing is awaited while C works."""

    def _handles(self) -> tuple[int, int, int, int]:
        core = self.remote._core
        key = self.remote._key("put and get", core)
        things = (self.worker._engine.handle, core.handle, key.handle)
        return (*map(loops.number, things), self.remote._descriptor.address)  # type: ignore[return-value]

    async def follow(self, size: int) -> None:
        place = loops.ffi.new("uint64_t *")
        steps = self.plain.loop_follow(*self._handles(), size, self.ground.nodes[0], STEPS, 2 * STEPS, place)
        self.found = (place[0], steps)
        await trio.lowlevel.checkpoint()

    async def pairs(self, way: str) -> None:
        worker, endpoint, key, base = self._handles()
        read = loops.ffi.new("uint64_t[]", STEPS)
        self.found = self.plain.loop_pairs(
            worker, endpoint, key, base + PAIRS, STEPS, CHOSEN, self.ground.data, way == ORDERED, read
        )
        await trio.lowlevel.checkpoint()


DOERS: dict[str, type[Doer]] = {"chain": Chain, "await": Await, "single": Single, "plain": Plain}
