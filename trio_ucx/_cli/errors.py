"""Errors that are not bugs, and their text."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import trio

from .. import UCXError
from ..ucp._internal_api import OptionError


class PerfError(Exception):
    """A measurement cannot go on; the text is all that the user needs."""


class AlreadyReported(Exception):
    """A process of this command has failed, and has written why itself."""


class NoReport(Exception):
    """Another process has given no report; the text says why."""


class MissingPackage(Exception):
    """An optional package is not installed; the text says how to install it."""


#: Errors whose text tells the user what to do.
EXPECTED = (
    *(OSError, UCXError, OptionError, MemoryError, trio.BrokenResourceError, trio.EndOfChannel),
    *(PerfError, NoReport, MissingPackage),
)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yields the exceptions in a group, however deeply nested; or the one exception."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def is_expected(error: BaseException) -> bool:
    return all(isinstance(leaf, EXPECTED) for leaf in leaves(error))


def describe(error: BaseException) -> str:
    """Returns the text of all errors in a group, each once, with their notes, in one line."""
    texts = (" -- ".join([_text(leaf), *getattr(leaf, "__notes__", ())]) for leaf in leaves(error))
    return "; ".join(dict.fromkeys(texts))


def _text(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return str(error) or "there is not enough memory (ulimit -v, or the limit of the control group)"
    return str(error) or type(error).__name__


def how_it_ended(status: int) -> str:
    """Says how a process ended, whose status is negative if that was by a signal."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
