"""Buffers: from Python objects to pinned memory that UCX may use until it says that it is done.

A :class:`Pinned` holds the buffer export of every object it was made from (``ffi.from_buffer``): a ``bytearray`` in it
cannot be resized, a ``memoryview`` or ``mmap`` not be closed. :meth:`Pinned.release` ends that at once, whoever still
refers to the object.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .._native import ffi

#: Anything with the buffer protocol, contiguous.
Buffer = Any

_KINDS = "bytes, bytearray, memoryview, array.array, mmap or a numpy array"


def _export(data: Buffer, writable: bool) -> Any:
    try:
        return ffi.from_buffer("char[]", data, writable)
    except (TypeError, ValueError, BufferError) as error:
        raise _explain(data, writable) from error


def _explain(data: Buffer, writable: bool) -> Exception:
    purpose = "receive into" if writable else "send"
    try:
        view = memoryview(data)
    except TypeError:
        return TypeError(f"cannot {purpose} a {type(data).__name__}: it must be a buffer ({_KINDS}) or a list of them")
    except (ValueError, BufferError) as error:
        return ValueError(f"cannot {purpose} this {type(data).__name__}: {error}")
    with view:
        if not view.c_contiguous:
            return ValueError(
                f"cannot {purpose} a non-contiguous {type(data).__name__} (shape {view.shape}, strides "
                f"{view.strides}): make it contiguous first, for instance with numpy.ascontiguousarray"
            )
        if writable and view.readonly:
            return TypeError(f"cannot receive into a read-only {type(data).__name__}: use a bytearray or another copy")
    return ValueError(f"cannot {purpose} this {type(data).__name__}")


class Pinned:
    """One buffer, or a gather/scatter list of them, pinned in memory.

    Attributes:
        size: bytes in all.
        address: where the only buffer is (a cffi pointer); meaningless for a list.
        many: the ``tu_buffers_t`` of a list, else None.
        companion: what else must live as long.
    """

    __slots__ = ("_exports", "_keep", "address", "companion", "many", "size")
    _exports: tuple[Any, ...]

    def __init__(self, data: Buffer, *, writable: bool = False) -> None:
        self._exports = ()
        self.companion: Any = None
        if isinstance(data, (list, tuple)):
            exports: list[Any] = []
            try:
                for part in data:
                    exports.append(_export(part, writable))
            except BaseException:
                for export in exports:
                    ffi.release(export)
                raise
            sizes = [len(export) for export in exports]
            addresses = ffi.new("void *[]", exports)
            lengths = ffi.new("size_t[]", sizes)
            self._exports = tuple(exports)
            self._keep = (addresses, lengths)
            self.address = ffi.NULL
            self.many = ffi.new("tu_buffers_t *", {"count": len(sizes), "addresses": addresses, "lengths": lengths})
            self.size = sum(sizes)
        else:
            export = _export(data, writable)
            self._exports = (export,)
            self.address = export
            self.many = None
            self.size = len(export)

    def native_list(self) -> Any:
        """The ``tu_buffers_t``, for calls that take nothing else."""
        if self.many is None:
            addresses = ffi.new("void *[]", [self.address])
            lengths = ffi.new("size_t[]", [self.size])
            self._keep = (addresses, lengths)
            self.many = ffi.new("tu_buffers_t *", {"count": 1, "addresses": addresses, "lengths": lengths})
        return self.many

    def release(self) -> None:
        exports, self._exports = self._exports, ()
        for export in exports:
            ffi.release(export)

    # The collector calls this before it takes a cycle apart. Without it, it may clear a memoryview first, of which the
    # export then makes CPython dereference NULL (seen with 3.11).
    __del__ = release

    def parts(self) -> list[memoryview]:
        """Writable views of the memory, in order."""
        return [memoryview(ffi.buffer(export)) for export in self._exports]

    def fill(self, source: memoryview, start: int = 0) -> None:
        """Copies ``source`` into the buffers, behind their first ``start`` bytes; it must fit."""
        for part in self.parts():
            skipped = min(start, len(part))
            count = min(len(part) - skipped, len(source))
            part[skipped : skipped + count] = source[:count]
            source = source[count:]
            start -= skipped

    def copy(self, length: int) -> bytes:
        """A copy of the first ``length`` bytes."""
        parts = self.parts()
        if len(parts) == 1:
            return bytes(parts[0][:length])
        return b"".join(parts)[:length]


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]

#: Below this, zeroing a bytes object costs less than calling through ctypes.
_SMALL = 4096


def new_bytes(size: int) -> bytes:
    """A bytes object to be filled before anybody else sees it, as CPython's own ``recv`` does; not zeroed."""
    result: bytes = bytes(size) if size < _SMALL else _new_bytes(None, size)
    return result
