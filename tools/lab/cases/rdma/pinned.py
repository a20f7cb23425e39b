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
MAKERS = {"allocated": None, "array": lambda: np.zeros(SIZE, np.uint8), "map": lambda: mmap.mmap(-1, SIZE)}


async def given_back(make) -> str:
    def pinned() -> int:
        return int(re.search(r"VmPin:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    async with ucp.open_worker(features=ucp.DEFAULT_FEATURES | ucp.Feature.RMA) as worker:
        context, before, notes = worker.context, pinned(), []
        for _ in range(5):
            data = make() if make else None
            with context.register(data) if make else context.allocate(SIZE):
                amounts = [pinned()]
            amounts.append(pinned())
            del data
            notes.append([amount - before for amount in (*amounts, pinned())])
        with context.register(bytearray(4096)):
            assert pinned() - before < 8, notes
    return f"MiB while open, closed, freed: {notes}; then {pinned() - before}"


PARTS |= {name: partial(given_back, make) for name, make in MAKERS.items()}
main()
