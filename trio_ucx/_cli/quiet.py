"""Whether other programs use the cores that are measured on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

#: Percent of a core's time. If other programs use more, the figures say little.
TOLERABLE = 5.0


def core_times(text: str) -> dict[int, tuple[int, int]]:
    """Reads the text of ``/proc/stat``. Returns, by core, its busy time and its whole time."""
    found = {}
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            times = [int(field) for field in fields[:8]]
            waiting = times[3] + times[4]
            found[int(name[3:])] = (sum(times) - waiting, sum(times))
    return found


def busy_shares(before: str, after: str) -> dict[int, float]:
    """Returns how busy each core was between two texts of ``/proc/stat``, from 0 to 1."""
    then, now = core_times(before), core_times(after)
    return {
        core: (now[core][0] - then[core][0]) / (now[core][1] - then[core][1])
        for core in then
        if core in now and now[core][1] > then[core][1]
    }


def busy_percent(before: str, after: str, cores: Sequence[int | None]) -> float:
    """Returns the load of the busiest of these cores in percent; of all cores if None is among them."""
    shares = busy_shares(before, after)
    return 100 * max((share for core, share in shares.items() if core in cores or None in cores), default=0.0)


def others_percent(cores: Sequence[int | None], seconds: float = 0.5) -> float:
    """Returns how much of these cores other programs use, while this one does nothing."""
    return busy_percent(*_stat_twice(seconds), cores)


def idle_cores(cores: Sequence[int], seconds: float = 0.25) -> float:
    """Returns how many of these cores other programs leave; all of them if the kernel does not say."""
    try:
        shares = busy_shares(*_stat_twice(seconds))
    except OSError:
        return len(cores)
    return len(cores) - sum(shares.get(core, 0.0) for core in cores)


def _stat_twice(seconds: float) -> tuple[str, str]:
    stat = Path("/proc/stat")
    before = stat.read_text()
    time.sleep(seconds)
    return before, stat.read_text()


def warning(busy: float) -> str:
    if busy <= TOLERABLE:
        return ""
    return (
        f"Others use {busy:.0f} % of a core that is measured on: these figures say little, their ratios not much more."
    )
