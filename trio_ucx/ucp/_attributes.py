"""What UCX says about itself when it is asked: the library, contexts and workers."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from .._native import ffi, lib, ucx
from .._util.arguments import check_integer
from ._memory.foreign import MemoryType
from ._status import Status, UCXError

#: UCX keeps names of this many bytes.
MAX_NAME = lib.TU_NAME_SIZE - 1


class ThreadMode(enum.Enum):
    """Which threads may use something (``ucs_thread_mode_t``). A worker of trio_ucx belongs to one thread, always."""

    SINGLE = 0
    SERIALIZED = 1
    MULTI = 2


@attrs.frozen
class Library:
    """The UCX library in use.

    Attributes:
        version: its version, ``(major, minor, release)``.
        compiled_version: ``(major, minor)`` of the headers that trio_ucx was compiled against.
        file: the path of the loaded ``libucp``.
        system: whether it is the system's rather than the PyPI wheel's.
        max_thread_mode: what it was built for at most.
    """

    version: tuple[int, int, int]
    compiled_version: tuple[int, int]
    file: str
    system: bool
    max_thread_mode: ThreadMode


@attrs.frozen
class ContextAttributes:
    """What UCX says about a :class:`Context`.

    Attributes:
        name: the name that it was given, or UCX's own.
        memory_types: the kinds of memory that its workers can send from and receive into.
        thread_mode: which threads may use its workers; each worker is used by one.
        request_size: bytes that UCX keeps for each operation in flight.
    """

    name: str
    memory_types: frozenset[MemoryType]
    thread_mode: ThreadMode
    request_size: int


@attrs.frozen
class WorkerAttributes:
    """What UCX says about a :class:`Worker`.

    Attributes:
        name: the name that it was given, or UCX's own.
        client_id: the number that it tells the listeners it connects to; None: none.
        thread_mode: always SINGLE.
        max_am_header: the longest header of an active message, in bytes; UCX's option SEG_SIZE limits it, too.
        max_debug_string: the longest description of an operation, in bytes.
    """

    name: str
    client_id: int | None
    thread_mode: ThreadMode
    max_am_header: int
    max_debug_string: int


def library() -> Library:
    """Returns which UCX library is in use (``ucp_get_version``, ``ucp_lib_query``).

    Raises: nothing.
    """
    mode = ffi.new("int *")
    check(lib.tu_library_thread_mode(mode), "asking for UCX's thread mode")
    return Library(ucx.version, ucx.compiled_version, ucx.file, ucx.system, ThreadMode(mode[0]))


def query_context(handle: Any) -> ContextAttributes:
    found = ffi.new("tu_context_attributes_t *")
    check(lib.tu_context_attributes(handle, found), "asking for a context's attributes")
    return ContextAttributes(
        name=text(found.name),
        # Types that a later UCX may add have no name here.
        memory_types=frozenset(one for one in MemoryType if found.memory_types >> one.value & 1),
        thread_mode=ThreadMode(found.thread_mode),
        request_size=found.request_size,
    )


def query_worker(handle: Any, client_id: int | None) -> WorkerAttributes:
    found = ffi.new("tu_worker_attributes_t *")
    check(lib.tu_worker_attributes(handle, found), "asking for a worker's attributes")
    return WorkerAttributes(
        name=text(found.name),
        client_id=client_id,
        thread_mode=ThreadMode(found.thread_mode),
        max_am_header=found.max_am_header,
        max_debug_string=found.max_debug_string,
    )


def check(status: int, doing: str) -> None:
    if status != Status.OK:
        raise UCXError(status, doing)


def text(chars: Any) -> str:
    return ffi.string(chars).decode(errors="replace")


def check_name(name: str | None) -> str | None:
    """A name for UCX's logs; UCX would cut a longer one."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"the name must be a str, not {type(name).__name__}")
    if not name or "\0" in name or len(name.encode()) > MAX_NAME:
        raise ValueError(f"the name must have 1 to {MAX_NAME} bytes, and no null character; it is {name!r}")
    return name


def check_client_id(client_id: int | None) -> int | None:
    """UCX takes 0 for none."""
    return None if client_id is None else check_integer(client_id, "client_id", 1, 2**64 - 1)


def native_name(name: str | None) -> Any:
    return ffi.NULL if name is None else ffi.new("char[]", name.encode())
