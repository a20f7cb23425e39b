"""UCX's status codes, the one exception of our own, and the one table that maps the first to exceptions."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable
from typing import Any

import trio

from .._native import ffi, lib


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
    FIRST_LINK_FAILURE = -40
    LAST_LINK_FAILURE = -59
    FIRST_ENDPOINT_FAILURE = -60
    ENDPOINT_TIMEOUT = -80
    LAST_ENDPOINT_FAILURE = -89
    UNKNOWN = -100

    @classmethod
    def _missing_(cls, value: object) -> Status:
        return cls.UNKNOWN


class UCXError(Exception):
    """UCX refused or failed something, and none of Trio's or Python's own exceptions says it better.

    Attributes:
        status: UCX's :class:`Status`.
    """

    status: Status

    def __init__(self, status: int, doing: str, hint: str = "") -> None:
        self.status = Status(status)
        self.doing = doing
        self.hint = hint
        text = ffi.string(lib.tu_status_text(status)).decode()
        super().__init__(f"{doing}: {text} (UCX status {self.status.name}, {status}){hint}")

    def __reduce__(self) -> tuple[type[UCXError], tuple[int, str, str]]:
        return type(self), (int(self.status), self.doing, self.hint)


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


#: The connection is gone: BrokenResourceError. Everything that is not here, nor a Python exception below, stays a
#: UCXError.
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
        Status.FIRST_LINK_FAILURE,
        Status.LAST_LINK_FAILURE,
        Status.FIRST_ENDPOINT_FAILURE,
        Status.ENDPOINT_TIMEOUT,
        Status.LAST_ENDPOINT_FAILURE,
        Status.SHMEM_SEGMENT,  # the peer's worker has given back its shared memory
    }
)

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


def error_from_status(status: int, doing: str, origin: object = None, hint: str = "") -> Exception:
    """The exception for an operation that failed on a worker or endpoint in use. ``origin``: see :func:`broken`."""
    native = UCXError(status, doing, hint)
    if native.status is Status.NO_MEMORY:
        return MemoryError(str(native))
    if native.status in _BROKEN:
        return broken(str(native), native, origin)
    return native


#: The attribute of an error that says which connection it is about. (Not a WeakKeyDictionary: its callback runs where
#: the error is dropped, in the program's code, and nobody would get a KeyboardInterrupt that was raised in it.)
_ORIGIN = "_trio_ucx_origin"


def broken(message: str, cause: BaseException | None, origin: object = None) -> trio.BrokenResourceError:
    """Makes the exception for something that is lost.

    Args:
        origin: the connection that it is about (``Ending.origin``), for :func:`origin_of`.
    """
    error = trio.BrokenResourceError(message)
    error.__cause__ = cause
    if origin is not None:
        setattr(error, _ORIGIN, origin)
    return error


def origin_of(error: BaseException) -> object:
    """The connection that this error is about, or None. (Its cause and context do not count.)"""
    return getattr(error, _ORIGIN, None)


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
