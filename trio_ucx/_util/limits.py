"""A limit in real time, and the errno values that say that the process or the host has run out of a resource."""

from __future__ import annotations

import errno
import time

#: The errno of OSErrors for lack of descriptors or memory, which may be available again later.
CAPACITY_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class RealTimeLimit:
    """A limit, in real time, for something that is checked over and over.

    A process that is stopped or slow does not reach it sooner: the time between two checks counts only so far.

    Args:
        longest_gap: how many seconds between two checks count at most.
    """

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._last = time.monotonic()
        self._waited = 0.0

    def is_over(self, seconds: float) -> bool:
        """True if so many seconds have been counted since the limit was made. Call it at each check."""
        now = time.monotonic()
        self._waited += min(now - self._last, self._longest_gap)
        self._last = now
        return self._waited > seconds
