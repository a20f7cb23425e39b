"""The exceptions of the mesh."""

from __future__ import annotations

import errno

import trio

from .. import Error


class RankLostError(Error, trio.BrokenResourceError):
    """A rank of the group has died, has left, or was cut off.

    With ``on_loss="cancel"``, all ranks get it with the same ``rank`` and ``reason``.

    Attributes:
        rank: which rank.
        reason: what happened to it, in words.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} was lost: {reason}")
        self.rank = rank
        self.reason = reason


class MeetingError(Error, TimeoutError):
    """The ranks did not find each other in time. The message names those that are missing, and what to check.

    Attributes:
        missing: the ranks that did not come, as far as this rank knows.
        errno: ETIMEDOUT.
    """

    def __init__(self, text: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(errno.ETIMEDOUT, text)
        self.missing = missing


def again(error: RankLostError) -> RankLostError:
    """Returns a copy of an error, with a traceback of its own."""
    return RankLostError(error.rank, error.reason)
