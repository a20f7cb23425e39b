"""What the classes of handles share: making and closing them, refusing copies and conflicts, public names, warnings."""

from __future__ import annotations

import warnings
from abc import ABCMeta
from typing import Any, NoReturn, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

T = TypeVar("T")


class OpenedNotConstructed(ABCMeta):
    """For the classes of handles, which a function opens: calling the class, copying and pickling are refused."""

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type.__setattr__(cls, "__reduce_ex__", refuse_copy)

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} has no public constructor: see its documentation for the function "
            "that opens one"
        )

    def _create(cls: type[T], *args: Any, **kwargs: Any) -> T:
        return super().__call__(*args, **kwargs)  # type: ignore[misc, no-any-return]


def refuse_copy(handle: object, protocol: object) -> NoReturn:
    """``__reduce_ex__`` of handles, which ``copy`` and ``pickle`` call: a copy would close what the original uses."""
    name = f"{type(handle).__module__}.{type(handle).__qualname__}"
    raise TypeError(
        f"a {name} cannot be copied or pickled: it stands for a resource of this process. Pass the object itself"
    )


class ClosedOnExit:
    """A context manager for what may refuse to be closed, with BufferError, while its memory is in use."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    @enable_ki_protection
    def __exit__(self, *exc_info: object) -> None:
        try:
            self.close()
        except BufferError as error:
            if exc_info[0] is None:
                raise
            warn_resource(f"{self!r} stays open: {error}", self)


class ConflictDetector:
    """Refuses a second task in an operation that only one may be in: ``with`` it around the operation."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(self._message)
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


def publish(namespace: dict[str, Any], module: str) -> None:
    """Makes what a package exports say the package's name in tracebacks and reprs, not its private module's."""
    for name in namespace["__all__"]:
        thing = namespace[name]
        home = getattr(thing, "__module__", None) or ""
        if home.startswith(f"{module}.") and "._" in home:
            thing.__module__ = module


def dropped(name: str) -> str:
    """Returns the text of the warning about a block that a program has dropped."""
    return f"a block of {name}() was dropped before its end: use it with `async with`, in one task"


def warn_resource(message: str, source: object = None) -> None:
    """Warns where raising would do harm: a warning that is an error is reported as destructors' errors are."""
    try:
        warnings.warn(message, ResourceWarning, source=source, stacklevel=3)
    except ResourceWarning as error:
        _raise_in_destructor(error)


def _raise_in_destructor(error: Exception) -> None:
    class Raiser:
        def __del__(self) -> None:
            raise error

    Raiser()
