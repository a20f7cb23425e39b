"""Whether registered memory is given back: UCX unpins it when it was freed and UCX next registers some; one rank."""

from __future__ import annotations

import mmap
import re
from functools import partial
from pathlib import Path

import numpy as np
from common import PARTS, main

from trio_ucx import ucp

SIZE = 32 << 20
MAKERS = {
    "array": lambda: np.zeros(SIZE, np.uint8),
    "bytes": lambda: bytearray(SIZE),
    "map": lambda: mmap.mmap(-1, SIZE),
}


def pinned() -> int:
    """Returns how much of this process's memory is pinned, in MiB."""
    return int(re.search(r"VmPin:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


async def given_back(make=None) -> str:
    async with ucp.open_worker(features=ucp.DEFAULT_FEATURES | ucp.Feature.RMA) as worker:
        context, before, notes = worker.context, pinned(), []
        for _ in range(5):
            data = make() if make else None
            with context.register(data) if make else context.allocate(SIZE):
                open_ = pinned()
            closed = pinned()
            del data
            notes.append([amount - before for amount in (open_, closed, pinned())])
        with context.register(bytearray(4096)):
            assert pinned() - before < 8, notes
    return f"MiB while open, closed, freed: {notes}; then {pinned() - before}"


PARTS["allocated"] = given_back
for name, make in MAKERS.items():
    PARTS[name] = partial(given_back, make)
main()
