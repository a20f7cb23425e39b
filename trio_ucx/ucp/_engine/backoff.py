"""Sleeping while UCX is busy without moving: it cannot be armed while a queue of shared memory is full, say."""

from __future__ import annotations

import os
from time import monotonic

import trio

from ..._native import lib
from .._quirks.descriptors import opened

#: Seconds. A queue of shared memory holds 2 MiB, which the peer takes in a few of the shortest.
_SHORTEST, _LONGEST = 0.00005, 0.002
#: Progress that took longer has filled such a queue again, although UCX counts nothing that it sends from there.
_REFILLED = 0.00002
#: After so many seconds in which nothing has arrived or completed, UCX will not become idle any more: it is busy for
#: ever with what it had for a peer that was killed. The pauses then grow to 0.1 s, and a message may be noticed that
#: late.
_QUIET, _LONGEST_IF_QUIET = 1.0, 0.1


class Backoff:
    """Pauses that grow while nothing moves, in real time."""

    def __init__(self, efd: int) -> None:
        self._efd = efd
        self._timer = opened(lib.tu_timer_create(), "creating a worker's timer")
        try:
            #: Readable when the timer is, or the worker's descriptor.
            self._either = opened(lib.tu_wait_create(efd, self._timer), "creating a worker's epoll")
        except BaseException:
            os.close(self._timer)
            raise
        self._delay = 0.0
        #: The count of events at the last sleep, and the time since which it has not grown.
        self._news = -1
        self._since = 0.0

    @property
    def descriptors(self) -> tuple[int, int]:
        return self._timer, self._either

    def reset(self) -> None:
        """UCX could be armed."""
        self._delay = 0.0

    async def sleep(self, took: float, news: int) -> None:
        """Waits after progress that took so many seconds.

        Args:
            news: a number that grows when something arrives or completes.
        """
        if news != self._news:
            self._news, self._since = news, monotonic()
        quiet = monotonic() - self._since > _QUIET
        if took > _REFILLED and not quiet:
            self._delay = 0.0
        self._delay = min(max(self._delay * 2, _SHORTEST), _LONGEST_IF_QUIET if quiet else _LONGEST)
        lib.tu_timer_set(self._timer, int(self._delay * 1e9), False)
        # An event may end the sleep; but one that is there already, and could not be armed away, may not.
        early = not lib.tu_readable(self._efd)
        await trio.lowlevel.wait_readable(self._either if early else self._timer)

    def close(self) -> None:
        for fd in (self._either, self._timer):
            os.close(fd)
