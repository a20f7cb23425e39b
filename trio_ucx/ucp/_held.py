"""What is held back for a moment, so that several small messages go as one; and that the moment is short.

A message that closely follows another may wait for more. It goes, at the latest,

* when anything makes the worker progress: so always before a task polls;
* when Trio has nothing more to run, or has run other tasks for ``MOMENT``. Trio tells an instrument before it looks for
  events, and how long it may have to wait for them.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from ._engine import Engine

#: Seconds that a message may be held back while other tasks run; and within which one message follows another closely.
#: More would save calls, but a receiver that polls for DEFAULT_SPIN should not have to park meanwhile.
MOMENT = 75e-6
#: The instrument goes when Trio was idle so often and nothing was held back: adding it takes as long as some messages.
_IDLE = 100


class Holder(Protocol):
    """A connection that holds messages back."""

    def send_held(self) -> bool:
        """Hands them to UCX. Whether nothing remains to be done about them. Never raises."""


class Held(trio.abc.Instrument):
    """All that is held back on one worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Who holds something back; some have sent it meanwhile.
        self.holders: set[Holder] = set()
        self._since = 0.0
        self._watching = False
        self._idle = 0

    def add(self, holder: Holder) -> None:
        """It holds something back."""
        if not self.holders:
            self._since = perf_counter()
            if not self._watching:
                self._watching = True
                trio.lowlevel.add_instrument(self)
        self.holders.add(holder)

    def send(self) -> bool:
        """Sends everything. Whether nothing remains to be done about it."""
        self._idle = 0
        holders, self.holders = self.holders, set()
        done = True
        for holder in holders:
            done = holder.send_held() and done
        return done

    def before_io_wait(self, timeout: float) -> None:
        if self.holders:
            if timeout > 0 or perf_counter() - self._since > MOMENT:
                self._engine.send_held()
        elif timeout > 0:
            self._idle += 1
            if self._idle > _IDLE:
                self._watching = False
                trio.lowlevel.remove_instrument(self)
