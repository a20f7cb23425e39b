"""What a server offers: the class Service, and the decorators of its methods."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import attrs

from .._arrays.messages import ReceivedBuffers
from ._messages import CODECS, RESERVED, Check, Codec

F = TypeVar("F", bound=Callable[..., Any])
MethodFunction = TypeVar("MethodFunction", bound=Callable[..., Awaitable[Any]])
StreamFunction = TypeVar("StreamFunction", bound=Callable[..., AsyncIterator[Any]])


class Service:
    """A base class for what a server offers: its methods with the decorators :func:`method` and :func:`stream`."""


@attrs.frozen
class Reply:
    """A value with buffers beside it, which are not copied.

    A method returns or yields one, and the client then gets one.

    Attributes:
        value: the value.
        buffers: what to send: bytes, arrays, whatever :meth:`.Connection.send_arrays` takes. What has arrived are
            memoryviews of writable memory; each begins at a multiple of 16 bytes.
    """

    value: Any = None
    buffers: Sequence[Any] = ()

    def arrays(self) -> list[Any]:
        """Returns the buffers as numpy's arrays, with the dtypes and shapes that were sent; no copies.

        Raises:
            ImportError: numpy is missing, or ml_dtypes for an array of bfloat16 or the like.
            UnexpectedMessage: numpy has no such array.
            TypeError: they have not arrived, but are to be sent.
        """
        return arrays_of(self.buffers)


def arrays_of(buffers: Sequence[Any]) -> list[Any]:
    if isinstance(buffers, ReceivedBuffers):
        return buffers.arrays()
    if buffers:
        raise TypeError("only buffers that have arrived say what arrays they are")
    return []


def parts(value: Any) -> tuple[Any, Sequence[Any] | None]:
    """Returns a value that is sent, and the buffers beside it."""
    return (value.value, value.buffers) if isinstance(value, Reply) else (value, None)


def whole(value: Any, buffers: Sequence[Any] | None) -> Any:
    """Returns what the user gets of a value that has arrived."""
    return value if buffers is None else Reply(value, buffers)


@attrs.frozen
class Declaration:
    """What a decorator says about a method."""

    stream: bool
    idempotent: bool
    raises: tuple[type[Exception], ...]


def _decorate(function: Any, declaration: Declaration) -> Any:
    right = inspect.isasyncgenfunction if declaration.stream else inspect.iscoroutinefunction
    if not right(function):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!r} must be an async "
            + ("generator (or use rpc.method)" if declaration.stream else "function (rpc.stream is for generators)")
        )
    function.__rpc__ = declaration
    return function


def check_errors(errors: Iterable[type[Exception]]) -> tuple[type[Exception], ...]:
    """Returns the exception classes.

    Raises:
        TypeError: one is none.
    """
    found = tuple(errors)
    for each in found:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise TypeError(f"an exception class is needed, not {each!r}")
    return found


def type_name(kind: type[Exception]) -> str:
    """Returns the name of an exception's class, by which the two sides know it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@overload
def method(function: MethodFunction, /) -> MethodFunction: ...
@overload
def method(
    *, idempotent: bool = False, raises: Sequence[type[Exception]] = ()
) -> Callable[[MethodFunction], MethodFunction]: ...
def method(function: Any = None, /, *, idempotent: bool = False, raises: Sequence[type[Exception]] = ()) -> Any:
    """Marks an async function of a :class:`Service` that clients can call.

    Its parameters are ``self``, the :class:`Call`, and the arguments, which are checked against their annotations (with
    msgspec; without it only their names). It returns a value, or a :class:`Reply`.

    Args:
        idempotent: calling it twice does no harm: a client that knows the class (``service=``) then repeats a call that
            may have run when the connection is lost.
        raises: exceptions that belong to the interface: they are not logged, and a client that knows the class raises
            the same type.

    Raises:
        TypeError: not an async function; not exception classes.
    """
    declaration = Declaration(False, idempotent, check_errors(raises))
    return (lambda each: _decorate(each, declaration)) if function is None else _decorate(function, declaration)


@overload
def stream(function: StreamFunction, /) -> StreamFunction: ...
@overload
def stream(*, raises: Sequence[type[Exception]] = ()) -> Callable[[StreamFunction], StreamFunction]: ...
def stream(function: Any = None, /, *, raises: Sequence[type[Exception]] = ()) -> Any:
    """Marks an async generator of a :class:`Service` whose values a client iterates over.

    The generator waits where the client does not read fast enough, and is cancelled when the client stops reading.

    Args:
        raises: as for :func:`method`.

    Raises:
        TypeError: not an async generator; not exception classes.
    """
    declaration = Declaration(True, False, check_errors(raises))
    return (lambda each: _decorate(each, declaration)) if function is None else _decorate(function, declaration)


@attrs.frozen(eq=False)
class Method:
    """A method of one service."""

    function: Callable[..., Any]
    declaration: Declaration
    checks: dict[Codec, Check]


def declarations(service: type) -> dict[str, Declaration]:
    """Returns what a class declares, by the names of the methods."""
    found = {name: getattr(getattr(service, name), "__rpc__", None) for name in dir(service)}
    return {name: each for name, each in found.items() if isinstance(each, Declaration)}


def methods_of(service: Service) -> dict[str, Method]:
    """Returns the methods of a service by name.

    Raises:
        TypeError: it is no service; an annotation that cannot be checked.
    """
    if not isinstance(service, Service):
        raise TypeError(f"an rpc.Service is needed, not {service!r}")
    return {
        name: _method(getattr(service, name), declaration) for name, declaration in declarations(type(service)).items()
    }


def _method(function: Any, declaration: Declaration) -> Method:
    name = function.__qualname__
    found = list(inspect.signature(function).parameters.values())
    call, parameters = found[0].name if found else "", found[1:]
    if any(each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in parameters):
        raise TypeError(f"{name}: the arguments after the call must be plain, or keyword-only")
    if taken := RESERVED.intersection(each.name for each in parameters):
        raise TypeError(f"{name}: rename the argument {' and '.join(taken)}: rpc.Client.call has that itself")
    try:
        types = typing.get_type_hints(function, include_extras=True)
        wanted = [(each.name, types.get(each.name, Any), each.default is each.empty) for each in parameters]
        method = Method(function, declaration, {codec: codec.check(wanted) for codec in CODECS.values()})
    except (TypeError, NameError) as error:
        raise TypeError(f"{name}: an annotation that cannot be checked: {error}") from error
    if call not in ("call", "_call") and getattr(types.get(call), "__name__", "") != "Call":
        raise TypeError(f"{name}: its first parameter after self must be the rpc.Call: name it call, or annotate it")
    return method
