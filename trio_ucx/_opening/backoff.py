"""Trying to connect again: how long to wait, and what is worth another try."""

from __future__ import annotations

import errno
import math
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import attrs
import trio

from .._errors import NotAdmitted, NotTrioUCX
from .._util.arguments import check_timeout

_T = TypeVar("_T")

#: The errors of a listener that is not there yet, is being started again, or cannot be reached at the moment.
_TEMPORARY = frozenset(
    {
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ENOENT,  # the path of a Unix socket
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EAGAIN,
    }
)


def _seconds(instance: Backoff, attribute: attrs.Attribute[float], value: float) -> None:
    check_timeout(value, attribute.name)


@attrs.frozen(kw_only=True)
class Backoff:
    """How :func:`connect` tries again: waits between two attempts, longer each time, and a little at random.

    It tries again while no listener is there yet, the server drains or is full, the host cannot be reached, or an
    attempt took longer than ``connect_timeout``. It gives up at once where another attempt cannot help:
    :class:`NotAdmitted`, :class:`NotTrioUCX`, an unknown host, a wrong argument, too few file descriptors. Of several
    addresses it tries all again while that can help at one of them.

    Args:
        first: seconds to wait before the second attempt.
        factor: each wait is this many times the one before.
        longest: seconds that a wait takes at most. Each is shortened by up to a half at random, so that many clients do
            not come at the same moment.
        timeout: seconds after which it stops trying, and raises the last error; by default never.

    Raises:
        TypeError, ValueError: a wrong argument.
    """

    first: float = attrs.field(default=0.05, validator=_seconds)
    factor: float = attrs.field(default=2.0)
    longest: float = attrs.field(default=2.0, validator=_seconds)
    timeout: float = attrs.field(default=math.inf, validator=_seconds)

    @factor.validator
    def _check_factor(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not 1 <= value < math.inf:
            raise ValueError(f"factor must be a number from 1 on, not {value!r}")

    async def _run(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        began = trio.current_time()
        deadline = began + self.timeout
        next_wait = waits(self)
        while True:
            try:
                return await attempt()
            except OSError as error:
                if not is_temporary(error):
                    raise
                wait = next(next_wait)
                if trio.current_time() + wait >= deadline:
                    error.add_note(f"(the last attempt of {trio.current_time() - began:.1f} seconds)")
                    raise
            await trio.sleep(wait)


def waits(backoff: Backoff) -> Iterator[float]:
    """The seconds to wait after each attempt."""
    wait = min(backoff.first, backoff.longest)
    while True:
        yield wait * random.uniform(0.5, 1)
        wait = min(wait * backoff.factor, backoff.longest)


def is_temporary(error: OSError) -> bool:
    """True if another attempt to connect may succeed."""
    if isinstance(error, (NotAdmitted, NotTrioUCX)):
        return False
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return error.errno in _TEMPORARY
