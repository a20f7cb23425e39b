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


def busy_percent(before: str, after: str, cores: Sequence[int | None]) -> float:
    """How busy the busiest of these cores was; of all cores if none is given."""
    then, now = core_times(before), core_times(after)
    shares = [0.0]
    for core in then:
        if (core in cores or None in cores) and core in now and now[core][1] > then[core][1]:
            shares.append(100 * (now[core][0] - then[core][0]) / (now[core][1] - then[core][1]))
    return max(shares)


def others_percent(cores: Sequence[int | None], seconds: float = 0.5) -> float:
    """How much of these cores other programs use, while this one does nothing. 0 if the kernel does not say."""
    stat = Path("/proc/stat")
    try:
        before = stat.read_text()
        time.sleep(seconds)
        return busy_percent(before, stat.read_text(), cores)
    except OSError:
        return 0.0


def warning(busy: float) -> str:
    if busy <= TOLERABLE:
        return ""
    return (
        f"Others use {busy:.0f} % of a core that is measured on: these figures say little, their ratios not much more."
    )
