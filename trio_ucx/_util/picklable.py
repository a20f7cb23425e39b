"""Exceptions that cross process borders, whatever their constructors take."""

from __future__ import annotations

from typing import Any, TypeVar

_AnyOSError = TypeVar("_AnyOSError", bound=OSError)


class Picklable(BaseException):
    """An exception that is pickled and copied by its ``args`` and its attributes, without a call of its constructor.

    Otherwise Python calls the constructor with ``args``. If that fails in a parent process, the whole
    ``ProcessPoolExecutor`` breaks. Pickling drops the cause, the context and the traceback of every exception.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: Any = super().__reduce__()
        _, arguments, *state = reduced
        return _restored, (type(self), arguments), *state


def _restored(kind: type[Picklable], arguments: tuple[Any, ...]) -> Picklable:
    error = kind.__new__(kind, *arguments)
    super(Picklable, error).__init__(*arguments)  # OSError's sets errno
    return error


def with_text(error: _AnyOSError, text: str) -> _AnyOSError:
    """Gives an error another text, and returns it. Copies of it have that, too: they are made from ``args``."""
    if error.errno is None:
        error.args = (text,)
    else:
        error.args, error.strerror = (error.errno, text), text
    return error
