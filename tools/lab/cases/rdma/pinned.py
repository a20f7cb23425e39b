"""How much memory stays pinned after it was closed, after it was freed, and after UCX was used again; one rank."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import trio
from common import main, part

from trio_ucx import ucp

SIZE = 32 << 20
FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA


def pinned() -> int:
    """MiB."""
    return int(re.search(r"VmPin:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


async def closed(make, register):
    notes = []
    async with ucp.open_worker(features=FEATURES) as worker:
        context = worker.context
        before = pinned()
        for _ in range(5):
            array = make()
            with register(context, array):
                notes.append(pinned() - before)
            notes.append(pinned() - before)
            del array
            await trio.sleep(0.5)
            notes.append(pinned() - before)
        with context.register(bytearray(4096)):
            pass
        notes.append(pinned() - before)
    return notes, pinned() - before


@part
async def allocated():
    return await closed(lambda: None, lambda context, _: context.allocate(SIZE))


@part
async def array():
    return await closed(lambda: np.zeros(SIZE, np.uint8), lambda context, array: context.register(array))


@part
async def in_bytearray():
    return await closed(lambda: bytearray(SIZE), lambda context, array: context.register(array))


@part
async def small():
    return await closed(
        lambda: [bytearray(100_000) for _ in range(320)],
        lambda context, arrays: context.register(arrays[100]),
    )


@part
async def mapped():
    return await closed(lambda: mmap.mmap(-1, SIZE), lambda context, array: context.register(array))


main()
