"""Remote memory between two workers of one process, for 16 combinations of features and kinds of memory; one rank."""

from __future__ import annotations

from functools import partial

from common import PARTS, main

from trio_ucx.ucp import DEFAULT_FEATURES, Feature, open_worker

AM, RMA, AMO = Feature.AM, Feature.RMA, Feature.AMO32 | Feature.AMO64
SETS = {
    "default": DEFAULT_FEATURES,
    "default_rma": DEFAULT_FEATURES | RMA,
    "default_rma_amo": DEFAULT_FEATURES | RMA | AMO,
}
SETS |= {"am": AM, "rma": RMA, "rma_amo": RMA | AMO, "tag_rma": Feature.TAG | RMA, "all": Feature.ALL}


async def combination(features: Feature, allocated: bool) -> object:
    async with open_worker(features=features) as owner, open_worker(features=features) as worker:
        endpoint = await worker.open_endpoint(owner.address)
        opened = owner.context.allocate(1 << 20) if allocated else owner.context.register(bytearray(1 << 20))
        with opened as memory, endpoint.attach(memory.descriptor) as remote:
            for size in 8, 100, 10_000, 1 << 20:
                await remote.put(b"x" * size)
                await remote.flush()
                assert await remote.get(nbytes=size) == b"x" * size == bytes(memory.memoryview[:size])
            await remote.put_blocks([(0, bytes(100)), (5000, b"y" * 70_000)])
            await remote.flush()
            assert memory.memoryview[:100] == bytes(100) and memory.memoryview[5000:75_000] == b"y" * 70_000
            if features & AM:
                assert [await remote.fetch_add(1, offset=0) for _ in range(2)] == [0, 1]
        transports = endpoint.transports
        endpoint.abort()
        return transports


for name, features in SETS.items():
    for kind in "allocated", "registered":
        PARTS[f"{name}_{kind}"] = partial(combination, features, kind == "allocated")
main()
