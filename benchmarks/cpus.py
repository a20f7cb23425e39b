"""CPUs to pin processes to."""

from __future__ import annotations

import os
from pathlib import Path


def one_cpu_per_core() -> list[int]:
    """One CPU of each core that we may use: two hardware threads of a core slow each other down."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = topology.read_text() if topology.exists() else str(cpu)
        found.setdefault(core, cpu)
    return list(found.values())
