"""Whether other programs use the cores that are measured on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from trio_ucx._cli.idle_cores import measure_busy_shares

#: Percent of a core's time. If other programs use more, the figures say little.
TOLERABLE = 5.0


def others_percent(cores: Sequence[int | None], seconds: float = 0.5) -> float:
    """Returns how busy other programs keep the busiest of these cores, in percent, while this one sleeps."""
    return busiest_percent(measure_busy_shares(seconds), cores)


def busiest_percent(shares: Mapping[int, float], cores: Sequence[int | None]) -> float:
    """Returns the load of the busiest of these cores in percent; of all cores if None is among them."""
    return 100 * max((share for core, share in shares.items() if core in cores or None in cores), default=0.0)


def warn(busy: float) -> None:
    """Prints a warning if other programs use more than is tolerable."""
    if busy > TOLERABLE:
        others = f"Other programs use {busy:.0f} % of a core that is measured on"
        print(f"{others}: the figures are unreliable, and their ratios hardly better.", file=sys.stderr)
