"""How many cores other programs leave idle, and how many the control group allows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from .privileges import in_control_group


def own_idle_cores() -> float:
    """Returns how many of the cores that this process may use other programs leave. Takes a quarter of a second."""
    return count_idle_cores(sorted(os.sched_getaffinity(0)))


def count_idle_cores(cores: Sequence[int], seconds: float = 0.25) -> float:
    """Returns how many of these cores other programs leave; all of them if the kernel does not say."""
    try:
        shares = measure_busy_shares(seconds)
    except OSError:
        return len(cores)
    return len(cores) - sum(shares.get(core, 0.0) for core in cores)


def measure_busy_shares(seconds: float) -> dict[int, float]:
    """Returns how busy other programs keep each core, from 0 to 1, while this one sleeps.

    Raises:
        OSError: the kernel does not say.
    """
    stat = Path("/proc/stat")
    before = stat.read_text()
    time.sleep(seconds)
    return busy_shares(before, stat.read_text())


def busy_shares(before: str, after: str) -> dict[int, float]:
    """Returns how busy each core was between two texts of ``/proc/stat``, from 0 to 1."""
    then, now = _core_times(before), _core_times(after)
    return {
        core: (now[core][0] - then[core][0]) / (now[core][1] - then[core][1])
        for core in then
        if core in now and now[core][1] > then[core][1]
    }


def _core_times(text: str) -> dict[int, tuple[int, int]]:
    """Reads the text of ``/proc/stat``. Returns, by core, its busy time and its whole time."""
    found = {}
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            times = [int(field) for field in fields[:8]]
            waiting = times[3] + times[4]
            found[int(name[3:])] = (sum(times) - waiting, sum(times))
    return found


def cpu_quota(root: Path) -> float | None:
    """Returns how many cores the control group allows; None without a limit."""
    quota, _, period = in_control_group(root, "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None
