"""Checks of arguments, and a check that a call comes from a Trio task."""

from __future__ import annotations

import operator

import trio

#: The greatest unsigned integer of 64 bits: as a mask, it compares all bits.
ALL_BITS = (1 << 64) - 1


def check_in_trio() -> None:
    """Refuses to open something where nothing could wait, such as under asyncio.

    Raises:
        RuntimeError: this is no Trio task.
    """
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            "trio_ucx works in Trio tasks only, not under asyncio: use trio.run(...), or anyio.run(..., backend='trio')"
        )


def check_integer(value: object, name: str, low: int, high: int) -> int:
    """``value`` as an int between ``low`` and ``high``, both included.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {number}")
    return number


def check_timeout(value: object, name: str) -> float:
    """``value`` as a number of seconds, 0 or more; ``math.inf`` is no limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {value}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large: use math.inf for no limit") from None
