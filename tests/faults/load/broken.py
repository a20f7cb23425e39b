"""Breaks the library on purpose, in this process only, to show that the checker notices it.

The library has no code for this: this module patches its internals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trio_ucx._link.receiving import Receiving
from trio_ucx._native import ffi
from trio_ucx._rules import wire
from trio_ucx.ucp._engine.waits import Pending

#: One in so many grants, messages and wake-ups is broken.
GRANTS, MESSAGES, WAKEUPS = 3, 300, 20


def drop_grants() -> None:
    """Loses one in GRANTS grants of credit, or admissions."""
    control_arrived = Receiving._control_arrived
    lost = _each(GRANTS)

    def control_arrived_or_not(self: Receiving, length: int, data: Any) -> None:
        kind = ffi.buffer(data, length)[:1]
        if not (kind in (bytes([wire.Grant.kind]), bytes([wire.Admit.kind])) and lost()):
            control_arrived(self, length, data)

    _patch(Receiving, "_control_arrived", control_arrived_or_not)


def double_messages() -> None:
    """Gives one in MESSAGES small messages twice."""
    take_ready = Receiving.take_ready
    doubled = _each(MESSAGES)
    again: dict[tuple[Receiving, int], bytes] = {}

    def take_twice(self: Receiving, number: int, *limit: Any) -> bytes | None:
        data = again.pop((self, number), None)
        if data is None:
            data = take_ready(self, number, *limit)
            if data is not None and number <= wire.MAX_TAG and doubled():
                again[self, number] = data
        return data

    _patch(Receiving, "take_ready", take_twice)


def lose_wakeups() -> None:
    """Does not wake one parked task in so many."""
    finish = Pending.finish
    lost = _each(WAKEUPS)

    def finish_silently(self: Pending, result: Any) -> None:
        if self.outcome is None and self._task is not None and self.parked_at is not None and lost():
            self.outcome = result
            return
        finish(self, result)

    _patch(Pending, "finish", finish_silently)


KINDS: dict[str, Callable[[], None]] = {"grant": drop_grants, "double": double_messages, "wakeup": lose_wakeups}


def switch_on(kind: str) -> None:
    KINDS[kind]()


def _patch(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


def _each(number: int) -> Callable[[], bool]:
    """True once in so many calls."""
    count = 0

    def due() -> bool:
        nonlocal count
        count += 1
        return count % number == 0

    return due
