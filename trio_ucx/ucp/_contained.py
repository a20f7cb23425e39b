"""Errors of our own where nobody could take them: in calls that Trio's loop makes, and where things end.

Trio ends the whole run when such a call raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("trio_ucx")


def report(what: str, error: BaseException) -> None:
    """Logs an internal error. Never raises, short of memory or not."""
    try:
        logger.error("%s", what, exc_info=error)
    except BaseException:
        pass


def contained(function: Callable[..., object], *arguments: object) -> bool:
    """Calls a function; what it raises is logged. Returns whether it went well."""
    try:
        function(*arguments)
    except BaseException as error:
        report("an internal error of trio_ucx, while something ended", error)
        return False
    return True
