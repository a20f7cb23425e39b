"""Breaks the library on purpose, in this process only, to show that the checker notices it.

The library has no code for this: this module patches its internals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trio_ucx._link.buffers import PackedMessages
from trio_ucx._link.receiving import Receiving
from trio_ucx._link.sending import Sending
from trio_ucx._rules import wire
from trio_ucx.ucp._engine.waits import Pending

#: One in so many grants, messages and wake-ups is broken.
GRANTS, MESSAGES, WAKEUPS = 3, 300, 20


def drop_grants() -> None:
    """Loses one in GRANTS grants of credit, or admissions."""
    send_frame = Sending.send_frame
    lost = _each(GRANTS)

    def send_frame_or_not(self: Sending, frame: wire.Frame) -> None:
        if not (isinstance(frame, wire.Grant | wire.Admit) and lost()):
            send_frame(self, frame)

    _patch(Sending, "send_frame", send_frame_or_not)


def double_messages() -> None:
    """Delivers one in MESSAGES small messages twice, without charging the second, or the peer would be cut off."""
    packed_arrived = Receiving.packed_arrived
    doubled = _each(MESSAGES)

    def packed_arrived_twice(self: Receiving, number: int, count: int, length: int, data: bytes) -> None:
        packed_arrived(self, number, count, length, data)
        if number <= wire.MAX_TAG and doubled():
            self.queues[number].packed_arrived(PackedMessages(1, length, data[-length:] if length else b""))

    _patch(Receiving, "packed_arrived", packed_arrived_twice)


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
