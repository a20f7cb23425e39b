"""UCX's status codes, the exceptions of our own, and the one table that maps the first to exceptions."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from .._native import ffi, lib
from .._util.picklable import Picklable


class Status(enum.IntEnum):
    """UCX's ``ucs_status_t``, without the ``UCS_`` and ``ERR_`` of the C names."""

    OK = 0
    INPROGRESS = 1
    NO_MESSAGE = -1
    NO_RESOURCE = -2
    IO_ERROR = -3
    NO_MEMORY = -4
    INVALID_PARAM = -5
    UNREACHABLE = -6
    INVALID_ADDR = -7
    NOT_IMPLEMENTED = -8
    MESSAGE_TRUNCATED = -9
    NO_PROGRESS = -10
    BUFFER_TOO_SMALL = -11
    NO_ELEM = -12
    SOME_CONNECTS_FAILED = -13
    NO_DEVICE = -14
    BUSY = -15
    CANCELED = -16
    SHMEM_SEGMENT = -17
    ALREADY_EXISTS = -18
    OUT_OF_RANGE = -19
    TIMED_OUT = -20
    EXCEEDS_LIMIT = -21
    UNSUPPORTED = -22
    REJECTED = -23
    NOT_CONNECTED = -24
    CONNECTION_RESET = -25
    ENDPOINT_TIMEOUT = -80
    UNKNOWN = -100

    @classmethod
    def _missing_(cls, value: object) -> Status:
        return cls.UNKNOWN


class Error(Picklable, Exception):
    """The base class of the exceptions that only trio_ucx has. They can be pickled and copied."""


class UCXError(Error):
    """UCX refused or failed something, and none of Trio's or Python's own exceptions says it better.

    Attributes:
        status: UCX's :class:`Status`.
    """

    status: Status

    def __init__(self, status: int, doing: str, hint: str = "") -> None:
        self.status = Status(status)
        text = ffi.string(lib.tu_status_text(status)).decode()
        super().__init__(f"{doing}: {text} (UCX status {self.status.name}, {status}){hint}")


class MessageTooLong(UCXError):
    """A message is longer than the buffer that it was to be received into, or than the limit of the receive.

    Attributes:
        length: the message's bytes.
        limit: the bytes that the buffer has, or that the limit allows.
        status: MESSAGE_TRUNCATED.
    """

    length: int
    limit: int

    def __init__(self, length: int, limit: int, doing: str) -> None:
        super().__init__(Status.MESSAGE_TRUNCATED, doing)
        Exception.__init__(self, doing)  # it says more than UCX's "Message truncated", of what may have been dropped
        self.length = length
        self.limit = limit


def read_sized(call: Callable[[Any, Any], int], doing: str) -> bytes:
    """The bytes that ``call(out, size)`` copies to ``out`` if they fit; it makes ``size`` their number either way.

    Raises:
        UCXError: it answers that it failed.
    """
    size = ffi.new("size_t *", 4096)
    while True:
        room = size[0]
        out = ffi.new("char[]", room)
        status = call(out, size)
        if status != Status.OK:
            raise UCXError(status, doing)
        if size[0] <= room:
            return bytes(ffi.buffer(out, size[0]))


#: The connection is gone: BrokenResourceError. Everything that is neither here, nor in the ranges, nor a Python
#: exception below, stays a UCXError.
_BROKEN = frozenset(
    {
        Status.IO_ERROR,
        Status.UNREACHABLE,
        Status.SOME_CONNECTS_FAILED,
        Status.NO_DEVICE,
        Status.CANCELED,  # we did not ask for it, or the asker is not told: the endpoint went away under the operation
        Status.TIMED_OUT,
        Status.REJECTED,
        Status.NOT_CONNECTED,
        Status.CONNECTION_RESET,
        Status.SHMEM_SEGMENT,  # the peer's worker has given back its shared memory
    }
)
#: UCX's failures of links and of endpoints: BrokenResourceError, too, with a name or without.
_LINK_FAILURES, _ENDPOINT_FAILURES = range(-59, -39), range(-89, -59)

#: Setting up a connection or a listener: OSError with this errno.
_ERRNO = {
    Status.UNREACHABLE: errno.EHOSTUNREACH,
    Status.INVALID_ADDR: errno.EADDRNOTAVAIL,
    Status.NO_DEVICE: errno.ENODEV,
    Status.BUSY: errno.EADDRINUSE,
    Status.ALREADY_EXISTS: errno.EADDRINUSE,
    Status.TIMED_OUT: errno.ETIMEDOUT,
    Status.ENDPOINT_TIMEOUT: errno.ETIMEDOUT,
    Status.REJECTED: errno.ECONNREFUSED,
    Status.NOT_CONNECTED: errno.ECONNREFUSED,
    Status.CONNECTION_RESET: errno.ECONNREFUSED,  # nobody listens there, or it went away before the hello
    Status.IO_ERROR: errno.EIO,
    Status.NO_MEMORY: errno.ENOMEM,
    Status.EXCEEDS_LIMIT: errno.EMFILE,
    Status.SHMEM_SEGMENT: errno.ECONNREFUSED,  # its owner has ended
}


def error_from_status(status: int, doing: str, origin: Origin | None = None, hint: str = "") -> Exception:
    """The exception for an operation that failed on a worker or endpoint in use. ``origin``: see :func:`broken`."""
    native = UCXError(status, doing, hint)
    if native.status is Status.NO_MEMORY:
        return MemoryError(str(native))
    if native.status in _BROKEN or status in _LINK_FAILURES or status in _ENDPOINT_FAILURES:
        return broken(str(native), native, origin)
    return native


class Origin:
    """What an error is about: an endpoint or a connection.

    Args:
        within: of what it is a part.

    Attributes:
        lost: makes the exception that says that it is lost, from a text.
    """

    __slots__ = ("lost", "within")

    def __init__(self, within: Origin | None = None) -> None:
        self.within = within
        self.lost: Callable[[str], trio.BrokenResourceError] = trio.BrokenResourceError

    def __deepcopy__(self, memo: object) -> Origin:
        return self

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()  # in another process, an error is about nothing that is there


_AnyError = TypeVar("_AnyError", bound=BaseException)

#: The attribute of an error that says what it is about. (Not a WeakKeyDictionary: its callback runs where
#: the error is dropped, in the program's code, and nobody would get a KeyboardInterrupt that was raised in it.)
_ORIGIN = "_trio_ucx_origin"


def broken(message: str, cause: BaseException | None, origin: Origin | None = None) -> trio.BrokenResourceError:
    """Makes the exception for something that is lost.

    Args:
        origin: what it is about (``Ending.origin``), for :func:`is_about`.
    """
    error = trio.BrokenResourceError(message) if origin is None else about(origin, origin.lost(message))
    error.__cause__ = cause
    return error


def about(origin: Origin, error: _AnyError) -> _AnyError:
    """Records what an error is about, for :func:`is_about`, and returns the error."""
    setattr(error, _ORIGIN, origin)
    return error


def is_about(error: BaseException, origin: Origin) -> bool:
    """True if this error is about that, or a part of it. (Its cause and context do not count.)"""
    found: Origin | None = getattr(error, _ORIGIN, None)
    return found is not None and origin in (found, found.within)


def is_about_a_part(error: BaseException) -> bool:
    """True if this error is about a part of something, which goes on without it."""
    found: Origin | None = getattr(error, _ORIGIN, None)
    return found is not None and found.within is not None


def separate(error: BaseException, origin: Origin) -> tuple[BaseException | None, BaseException | None]:
    """Separates the errors about something from all others, in an exception group, too.

    Returns:
        The first of these errors, and ``error`` without them; each is None if there is none.
    """
    if not isinstance(error, BaseExceptionGroup):
        return (error, None) if is_about(error, origin) else (None, error)
    own, rest = error.split(lambda one: is_about(one, origin))
    first: BaseException | None = own
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first, rest


def os_error_from_status(status: int, doing: str, hint: str = "") -> OSError:
    """The exception for a connection or listener that could not be set up.

    Args:
        hint: what is known beyond UCX's status, in parentheses; without, the words for the errno are added.
    """
    native = UCXError(status, doing)
    number = _ERRNO.get(native.status, errno.EIO)
    error = OSError(number, f"{native}{hint}" if hint else f"{native}: {os.strerror(number)}")
    error.__cause__ = native
    return error
