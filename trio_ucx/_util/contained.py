"""Internal errors where no caller could handle them: in calls from Trio's loop, and while something is being closed.

Trio ends the whole run when such a call raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("trio_ucx")


def report(what: str, error: BaseException) -> None:
    """Logs an internal error. Never raises, not even for lack of memory."""
    try:
        logger.error("%s", what, exc_info=error)
    except BaseException:
        pass


def contained(function: Callable[..., object], *arguments: object) -> bool:
    """Calls a function, and logs what it raises. Returns True if it succeeded."""
    try:
        function(*arguments)
    except BaseException as error:
        report("an internal error of trio_ucx, while something ended", error)
        return False
    return True


@contextmanager
def ignoring_late_run() -> Iterator[None]:
    """Ignores the RuntimeError that Trio raises when no run goes on."""
    try:
        yield
    except RuntimeError:
        pass
