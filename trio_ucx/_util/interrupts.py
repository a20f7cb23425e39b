"""Context managers whose entry and exit are protected from KeyboardInterrupt (Ctrl-C)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from trio.lowlevel import enable_ki_protection

from .handles import dropped, warn_resource

T = TypeVar("T")
P = ParamSpec("P")


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
        return _ProtectedAsync(make(*args, **kwargs), open)

    return open


def protected_contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """``contextlib.contextmanager`` that is protected as :func:`protected_asynccontextmanager` is."""
    make = contextmanager(enable_ki_protection(function))

    @wraps(function)
    def open(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Protected(make(*args, **kwargs))

    return open


class _ProtectedAsync(AbstractAsyncContextManager[T]):
    _inside = False  # here, because a KeyboardInterrupt may end __init__

    def __init__(self, manager: AbstractAsyncContextManager[T], function: Callable[..., object]) -> None:
        self._manager = manager
        self._function = function

    @enable_ki_protection
    async def __aenter__(self) -> T:
        value = await self._manager.__aenter__()
        self._inside = True
        return value

    @enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._inside = False
        try:
            return await self._manager.__aexit__(exc_type, exc, traceback)
        finally:
            # Frees the generator here, where Ctrl-C is deferred. Freed later, it would make Trio's WeakSet of
            # generators run a callback, and a KeyboardInterrupt that is raised in that is lost.
            del self._manager

    def __del__(self) -> None:
        if self._inside:
            warn_resource(dropped(f"{self._function.__module__}.{self._function.__qualname__}"))


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
