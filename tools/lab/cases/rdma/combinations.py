"""Remote memory between two workers of one process, for each of 16 combinations of features and kinds of memory."""

from __future__ import annotations

from functools import partial

from common import PARTS, main

from trio_ucx import ucp

F = ucp.Feature
SETS = {
    "default": ucp.DEFAULT_FEATURES,
    "default_rma": ucp.DEFAULT_FEATURES | F.RMA,
    "default_rma_amo": ucp.DEFAULT_FEATURES | F.RMA | F.AMO32 | F.AMO64,
    "am": F.AM,
    "rma": F.RMA,
    "rma_amo": F.RMA | F.AMO32 | F.AMO64,
    "tag_rma": F.TAG | F.RMA,
    "all": F.ALL,
}


async def combination(here: F, there: F, allocated: bool) -> object:
    owner, worker = ucp.open_worker(features=there), ucp.open_worker(features=here)
    async with owner as owner, worker as worker:
        endpoint = await worker.open_endpoint(owner.address)
        opened = owner.context.allocate(1 << 20) if allocated else owner.context.register(bytearray(1 << 20))
        with opened as memory, endpoint.attach(memory.descriptor) as remote:
            memory.memoryview[:] = bytes(1 << 20)
            for size in 8, 100, 10_000, 1 << 20:
                await remote.put(b"x" * size)
                await remote.flush()
                assert await remote.get(nbytes=size) == b"x" * size == bytes(memory.memoryview[:size])
            mine = bytearray(1 << 20)
            await remote.plan(mine, block=4096).get([5, 9], [0, 1])
            assert mine[:8193] == b"x" * 8192 + b"\0"
            await remote.put_blocks([(0, bytes(100)), (5000, b"y" * 70_000)])
            await remote.flush()
            assert memory.memoryview[:100] == bytes(100) and memory.memoryview[5000:75_000] == b"y" * 70_000
            if here & F.AM:
                assert await remote.fetch_add(1, offset=0) == 0
                assert await remote.fetch_add(1, offset=0) == 1
        transports = endpoint.transports
        endpoint.abort()
        return transports


for name, features in SETS.items():
    for kind in "allocated", "registered":
        PARTS[f"{name}_{kind}"] = partial(combination, features, features, kind == "allocated")
main()
