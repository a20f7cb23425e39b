"""Forks, which UCX does not survive: a child is refused the use of what its parent had opened, and never closes it.

UCX's thread does not exist in the child, while its sockets, timers and shared memory are the parent's. A child can use
UCX only if the parent had nothing open: then UCX starts afresh there.

Reason: UCX does not support forks; a child that destroys an inherited worker crashes the parent. Releases: all, 1.13 to
1.22. Not needed any more when UCX has a ``pthread_atfork`` handler that makes its workers unusable in the child.
Test: ``tests/test_forks.py``.
"""

from __future__ import annotations

import os

#: The number of forks between the first process and this one.
_generation = 0
#: How many UCX contexts exist in this process; whether a process that this one was forked from had some.
_open_contexts = 0
_inherited_contexts = False

_ADVICE = "start it with the multiprocessing method 'spawn', or any new program"


def _forked() -> None:
    global _generation, _open_contexts, _inherited_contexts
    _generation += 1
    _inherited_contexts = _inherited_contexts or _open_contexts > 0
    _open_contexts = 0


os.register_at_fork(after_in_child=_forked)


class Birth:
    """Records in which process something was opened: this one, or one that it was forked from."""

    __slots__ = ("_generation",)

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def inherited(self) -> bool:
        """True if it belongs to the parent: then this process must not touch it."""
        return self._generation != _generation

    def check(self, what: str) -> None:
        """Refuses to use what belongs to the parent.

        Raises:
            RuntimeError: with what to do.
        """
        if self._generation != _generation:
            raise RuntimeError(
                f"{what} was opened before a fork, which UCX does not survive: open another one in the child process "
                f"({_ADVICE})"
            )


def check_may_open() -> None:
    """Refuses to open anything in a child whose parent had something open when it forked.

    Raises:
        RuntimeError: with what to do.
    """
    if _inherited_contexts:
        raise RuntimeError(
            "UCX was in use when this process was forked, and does not survive that: its thread is missing here, and "
            f"connecting would time out. Do not fork a process that has workers or connections open: {_ADVICE}"
        )


def context_opened() -> None:
    global _open_contexts
    _open_contexts += 1


def context_destroyed() -> None:
    global _open_contexts
    _open_contexts -= 1
