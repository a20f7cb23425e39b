"""Checks of arguments, text of peers, context managers that Ctrl-C leaves intact, a time limit, and warnings."""

from __future__ import annotations

import errno
import operator
import time
import warnings
from abc import ABCMeta
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

T = TypeVar("T")
P = ParamSpec("P")

#: The greatest tag, and the mask that compares all of it.
ALL_BITS = (1 << 64) - 1
#: Of OSErrors for want of descriptors or memory, which may be there again later.
CAPACITY_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


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


def check_in_trio() -> None:
    """Refuses to open something where nothing could wait, such as under asyncio.

    Raises:
        RuntimeError: this is no Trio task.
    """
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            "trio_ucx works in Trio tasks only, not under asyncio: use trio.run(...), or anyio.run(..., backend='trio')"
        )


def check_integer(value: object, name: str, low: int, high: int) -> int:
    """``value`` as an int between ``low`` and ``high``, both included.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {number}")
    return number


def check_timeout(value: object, name: str) -> float:
    """``value`` as a number of seconds, 0 or more; ``math.inf`` is no limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {value}")
    return float(value)


def printable(text: str, most: int = 1000, keep: str = "") -> str:
    """Makes text that a peer has sent safe for a log, an error or a terminal.

    Replaces each unprintable character that is not in ``keep`` with ``?``, and cuts the text after ``most`` characters.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


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


def protected_asynccontextmanager(
    function: Callable[P, AsyncIterator[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """``contextlib.asynccontextmanager`` that is protected from KeyboardInterrupt on its way to the function and back.

    Marking the function alone is not enough. A KeyboardInterrupt in contextlib's own code would drop the generator
    where it is: a nursery in it would never be left.
    """
    make = asynccontextmanager(enable_ki_protection(function))

    @wraps(function)
    def open(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _ProtectedAsync(make(*args, **kwargs))

    return open


def protected_contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """``contextlib.contextmanager`` that is protected as :func:`protected_asynccontextmanager` is."""
    make = contextmanager(enable_ki_protection(function))

    @wraps(function)
    def open(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Protected(make(*args, **kwargs))

    return open


class _ProtectedAsync(AbstractAsyncContextManager[T]):
    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager

    @enable_ki_protection
    async def __aenter__(self) -> T:
        return await self._manager.__aenter__()

    @enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._manager.__aexit__(exc_type, exc, traceback)
        finally:
            # Frees the generator here, where Ctrl-C is deferred. Freed later, it would make Trio's WeakSet of
            # generators run a callback, and a KeyboardInterrupt that is raised in that is lost.
            del self._manager


class _Protected(AbstractContextManager[T]):
    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager = manager

    @enable_ki_protection
    def __enter__(self) -> T:
        return self._manager.__enter__()

    @enable_ki_protection
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._manager.__exit__(exc_type, exc, traceback)


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


class RealTimeLimit:
    """A limit, in real time, for something that is checked over and over.

    A process that is stopped or slow does not reach it sooner: the time between two checks counts only so far.

    Args:
        longest_gap: how many seconds between two checks count at most.
    """

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._last = time.monotonic()
        self._waited = 0.0

    def is_over(self, seconds: float) -> bool:
        """True if so many seconds have been counted since the limit was made. Call it at each check."""
        now = time.monotonic()
        self._waited += min(now - self._last, self._longest_gap)
        self._last = now
        return self._waited > seconds


def publish(namespace: dict[str, Any], module: str) -> None:
    """Makes what a package exports say the package's name in tracebacks and reprs, not its private module's."""
    for name in namespace["__all__"]:
        thing = namespace[name]
        home = getattr(thing, "__module__", None) or ""
        if home.startswith(f"{module}.") and "._" in home:
            thing.__module__ = module


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


@contextmanager
def ignoring_late_run() -> Iterator[None]:
    """Ignores the RuntimeError that Trio raises when no run goes on."""
    try:
        yield
    except RuntimeError:
        pass
