"""What goes wrong without being a bug, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from ..ucp import UCXError


class PerfError(Exception):
    """A measurement cannot go on; the text is all that the user needs."""


class CandidateError(PerfError):
    """Options that cannot be measured between these two ends; others can."""


#: Errors that the user can do something about, and whose text says what.
EXPECTED = (OSError, UCXError, MemoryError, trio.BrokenResourceError, trio.EndOfChannel, PerfError)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, however deep; or the one exception."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def is_expected(error: BaseException) -> bool:
    return all(isinstance(leaf, EXPECTED) for leaf in leaves(error))


def describe(error: BaseException) -> str:
    """All errors in one, each once, with their hints, in one line."""
    texts = (" -- ".join([str(leaf) or type(leaf).__name__, *getattr(leaf, "__notes__", ())]) for leaf in leaves(error))
    return "; ".join(dict.fromkeys(texts))
