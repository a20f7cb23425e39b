"""How an endpoint, or a Connection's share in one, ends. Pure.

Two things end it, in any order: this side closes it (:class:`CloseState`), or it fails (:attr:`Ending.error`), for
example because the peer has gone. What notices that the peer has gone (UCX's errors, a pidfd, the control socket) calls
``Scope.fail``, which sets the error.
"""

from __future__ import annotations

import enum

import trio

from .._status import Origin, Status, UCXError, broken, is_about_a_part


class CloseState(enum.Enum):
    """What this side has done about the end.

    Attributes:
        OPEN: nothing.
        CLOSING: the user has begun to close it, and can do nothing else with it any more.
        CLOSED: it is closed.
    """

    OPEN = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()


class Ending:
    """The end of one endpoint or share.

    Attributes:
        state: what this side has done.
        error: what it failed with, if it did.
        reported: whether an operation of the user's has raised that it is broken: then closing it need not.
        origin: marks the errors about it: see :func:`_status.origin_of`.
    """

    __slots__ = ("error", "origin", "reported", "state")

    def __init__(self) -> None:
        self.state = CloseState.OPEN
        self.error: UCXError | None = None
        self.reported = False
        self.origin = Origin()

    def begin_close(self) -> bool:
        """The user closes it. Returns False if that had begun already."""
        if self.state is not CloseState.OPEN:
            return False
        self.state = CloseState.CLOSING
        return True

    def note(self, error: BaseException) -> None:
        """An operation of the user's raises this error. Other errors than a broken connection do not count."""
        if isinstance(error, trio.BrokenResourceError) and not is_about_a_part(error):
            self.reported = True

    def broken(self, label: str, origin: Origin | None = None) -> trio.BrokenResourceError | None:
        """The exception for using it although it has failed; None if it has not.

        Args:
            origin: instead of its own.
        """
        if self.error is None:
            return None
        return broken(
            f"the connection to {label} broke: {self.error}", self.error, self.origin if origin is None else origin
        )


def internal_failure(error: BaseException) -> UCXError:
    """The error of what cannot go on after an exception in our own code."""
    return _failure(f"an internal error of trio_ucx: {error!r}", error)


def worker_failure(error: BaseException) -> UCXError:
    """The error of an endpoint whose worker broke."""
    return _failure(f"the worker broke: {error!r}", error)


def _failure(text: str, cause: BaseException) -> UCXError:
    failure = UCXError(Status.IO_ERROR, text)
    failure.__cause__ = cause
    return failure
