"""Whether memory is pinned while it is registered, and no longer; one rank."""

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


async def unpinned(make) -> str:
    def pinned() -> int:
        return int(re.search(r"VmPin:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    async with ucp.open_worker() as worker:
        context, before, notes = worker.context, pinned(), []
        for _ in range(5):
            with context.register(make()) if make else context.allocate(SIZE):
                amount = pinned() - before
            notes.append((amount, pinned() - before))
    assert all(32 <= amount < 40 and left < 8 for amount, left in notes), notes
    return f"MiB while open, and closed: {notes}"


PARTS |= {name: partial(unpinned, make) for name, make in MAKERS.items()}
main()
