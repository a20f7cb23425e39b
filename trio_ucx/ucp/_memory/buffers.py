"""Buffers: from Python objects to pinned memory that UCX may use until it says that it is done.

A :class:`Pinned` holds the buffer export of every object it was made from (``ffi.from_buffer``): a ``bytearray`` in it
cannot be resized, a ``memoryview`` or ``mmap`` not be closed. :meth:`Pinned.release` ends that at once, even if other
code still refers to the object.

The buffer protocol is tried first, because it tells most; then what ``foreign`` understands, and :class:`Strided`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from trio.lowlevel import enable_ki_protection

from ..._native import ffi, lib
from . import cuda as _cuda
from .foreign import Array, DeviceBuffer, MemoryType, array_of, on_device
from .mapped_files import check_backed, is_mapped
from .pointers import check_elements
from .protocols import SupportsBuffer, SupportsCudaArray, SupportsDLPack, SupportsWritableBuffer
from .strided import Strided, StridedMemory, check_array

#: One piece of contiguous memory: anything with the buffer protocol, ``__cuda_array_interface__`` or DLPack.
Contiguous = SupportsBuffer | SupportsCudaArray | SupportsDLPack | DeviceBuffer
#: The same without ``bytes``, and what else the types show to be read-only. Types cannot show all.
WritableContiguous = SupportsWritableBuffer | SupportsCudaArray | SupportsDLPack | DeviceBuffer
#: What can be sent: contiguous memory, a list or tuple of such, or a Strided. (``list[Contiguous]`` would refuse a
#: ``list[bytes]``, because lists are invariant, so the types let other sequences pass.)
Buffer = Contiguous | Strided | Sequence[Contiguous]
#: What can be received into.
WritableBuffer = WritableContiguous | Strided | Sequence[WritableContiguous]

_KINDS = (
    "bytes, bytearray, memoryview, array.array, mmap or a numpy array, an object with __cuda_array_interface__ or "
    "DLPack, ucp.DeviceBuffer, ucp.Strided"
)

#: Python's own allocator made their memory. Any other buffer may lie in memory that a device manages (numpy can use it
#: for its arrays): there UCX has to look, or it would, for instance, try to register it with a network card as ordinary
#: memory. Looking is cheap, and nothing at all where there is no device.
_HOST_TYPES = frozenset((bytes, bytearray))

_UNKNOWN, _HOST = lib.TU_MEMORY_UNKNOWN, lib.TU_MEMORY_HOST


def _export(data: Any, writable: bool) -> Any:
    """The pinned memory of one object: a cffi export, or one of the classes here and in ``_strided``."""
    plain = type(data) in _HOST_TYPES
    if not plain:
        check_elements(data, "receive into" if writable else "send")
    try:
        export = ffi.from_buffer("char[]", data, writable)
    except (TypeError, ValueError, BufferError) as error:
        failure = _explain(data, writable)
        if failure is not None:
            raise failure from error
    else:
        if not plain and is_mapped(data) and len(export) > 0:
            try:
                check_backed(data, export + (len(export) - 1))
            except ValueError:
                ffi.release(export)
                raise
        return export
    if isinstance(data, Strided):
        return StridedMemory(data, writable)
    return ForeignMemory(data, writable)


def _explain(data: Any, writable: bool) -> Exception | None:
    """Returns why a buffer cannot be exported; None if it has no buffer protocol, or is in a device's memory."""
    purpose = "receive into" if writable else "send"
    try:
        view = memoryview(data)
    except TypeError:
        return None
    except (ValueError, BufferError) as error:
        return None if on_device(data) else ValueError(f"cannot {purpose} this {type(data).__name__}: {error}")
    with view:
        if not view.c_contiguous:
            return ValueError(
                f"cannot {purpose} a non-contiguous {type(data).__name__} (shape {view.shape}, strides "
                f"{view.strides}): wrap it in ucp.Strided, or make it contiguous first, for instance with "
                "numpy.ascontiguousarray"
            )
        if writable and view.readonly:
            return TypeError(f"cannot receive into a read-only {type(data).__name__}: use a bytearray or another copy")
    return ValueError(f"cannot {purpose} this {type(data).__name__}")


class ForeignMemory:
    """Contiguous memory that has no buffer export.

    Attributes:
        address: where it is, a cffi pointer.
        size: bytes.
        memory: its kind, as ``tu_buffers_t`` has it.
    """

    __slots__ = ("_array", "address", "memory", "size")

    def __init__(self, data: object, writable: bool) -> None:
        purpose, name = "receive into" if writable else "send", type(data).__name__
        try:
            array = array_of(data)
        except ValueError as error:
            raise ValueError(f"cannot {purpose} this {name}: {error}") from error
        if array is None:
            raise TypeError(f"cannot {purpose} a {name}: it must be a buffer ({_KINDS}) or a list of them")
        if not array.contiguous:
            advice = "wrap it in ucp.Strided, or make it contiguous first"
            if array.memory_type is not MemoryType.HOST:
                advice = "make it contiguous on the device first"
            raise ValueError(
                f"cannot {purpose} a non-contiguous {name} (shape {array.shape}, strides in bytes {array.strides}): "
                f"{advice}"
            )
        if writable and array.readonly:
            raise TypeError(f"cannot receive into a read-only {name}, or a copy that its DLPack interface makes")
        assert array.memory_type is not None
        check_array(data, array)
        self._array: Array | None = array
        self.address = ffi.cast("char *", array.address)
        self.size = array.nbytes
        self.memory = array.memory_type + 1

    @property
    def on_device(self) -> bool:
        return self.memory != _HOST

    def _view(self) -> memoryview:
        return memoryview(ffi.buffer(self.address, self.size))

    def read(self, length: int) -> bytes:
        """Returns a copy of the first bytes."""
        if length == 0:
            return b""
        if self.memory == MemoryType.CUDA + 1:
            return _cuda.driver().read(_address(self.address), length)
        self.check_copies()
        return bytes(self._view()[:length])

    def write(self, source: memoryview, start: int) -> None:
        """Copies ``source`` into the memory, behind its first ``start`` bytes."""
        if self.memory == MemoryType.CUDA + 1:
            _cuda.driver().write(_address(self.address) + start, bytes(source))
        else:
            self.check_copies()
            self._view()[start : start + len(source)] = source

    def check_copies(self) -> None:
        if self.memory == MemoryType.ROCM + 1:
            raise ValueError(
                "the library cannot copy to and from ROCm device memory, which a Connection does with small messages: "
                "use host memory, or the tag operations of ucp, which leave that to UCX"
            )

    def release(self) -> None:
        self._array = None


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class _HostMemory:
    """The export of a buffer, with the methods of the other kinds: for copies, which are not the fast path."""

    __slots__ = ("_export",)

    def __init__(self, export: Any) -> None:
        self._export = export

    def read(self, length: int) -> bytes:
        return bytes(memoryview(ffi.buffer(self._export))[:length])

    def write(self, source: memoryview, start: int) -> None:
        memoryview(ffi.buffer(self._export))[start : start + len(source)] = source


class Pinned:
    """One buffer, or a gather/scatter list of them, pinned in memory.

    Attributes:
        size: bytes in all.
        address: where it is (a cffi pointer); None for what is not contiguous: a list, a strided array.
        memory: its kind: ``TU_MEMORY_UNKNOWN``, or 1 + a :class:`MemoryType`.
        many: the ``tu_buffers_t`` of what is not contiguous, else None.
        kept: what else must live as long.
    """

    __slots__ = ("_exports", "_keep", "address", "kept", "many", "memory", "size")
    address: Any
    memory: int
    size: int

    def __init__(self, data: Buffer, *, writable: bool = False) -> None:
        self.many: Any = None
        self.kept: Any = None
        self._exports: tuple[Any, ...] = ()
        if isinstance(data, (list, tuple)):
            self._pin_list(data, writable)
            return
        export = _export(data, writable)
        self._exports = (export,)
        kind = type(export)
        if kind is StridedMemory:
            self.address = None
            self.memory = _HOST
            self.size = export.size
            self.many = ffi.new("tu_buffers_t *", {"strided": export.native})
        elif kind is ForeignMemory:
            self.address = export.address
            self.memory = export.memory
            self.size = export.size
        else:
            self.address = export
            self.memory = _HOST if type(data) in _HOST_TYPES else _UNKNOWN
            self.size = len(export)

    def _pin_list(self, data: Sequence[object], writable: bool) -> None:
        exports: list[Any] = []
        try:
            for part in data:
                exports.append(_export(part, writable))
                if isinstance(exports[-1], StridedMemory):
                    raise ValueError("a list of buffers cannot have a ucp.Strided in it: send it by itself")
            self.memory = _common_memory(exports)
        except BaseException:
            self._exports = tuple(exports)
            self.release()
            raise
        self._exports = tuple(exports)
        if self.memory != _UNKNOWN:
            # UCX looks at the first to know what memory they are in: that must not be an empty one, which has none.
            exports = [export for export in exports if _size(export) > 0]
        addresses = [export.address if type(export) is ForeignMemory else export for export in exports]
        sizes = [_size(export) for export in exports]
        self.address = None
        self.size = sum(sizes)
        if writable and _overlap(addresses, sizes):
            self.release()
            raise ValueError("the buffers of a list to receive into overlap")
        self._set_list(addresses, sizes)

    def native_list(self) -> Any:
        """The ``tu_buffers_t``, for calls that take nothing else."""
        if self.many is None:
            self._set_list([self.address], [self.size])
        return self.many

    def _set_list(self, addresses: list[Any], sizes: list[int]) -> None:
        self._keep = first, lengths = ffi.new("void *[]", addresses), ffi.new("size_t[]", sizes)
        self.many = ffi.new(
            "tu_buffers_t *", {"count": len(sizes), "addresses": first, "lengths": lengths, "memory": self.memory}
        )

    @enable_ki_protection  # as a destructor, too, which Trio knows by a name that this has not: nobody would get it
    def release(self) -> None:
        exports, self._exports = self._exports, ()
        for export in exports:
            if type(export) in _OURS:
                export.release()
            else:
                ffi.release(export)

    # The collector calls this before it takes a cycle apart. Without it, it may clear a memoryview first, of which the
    # export then makes CPython dereference NULL (seen with 3.11).
    __del__ = release

    def _parts(self) -> list[tuple[Any, int]]:
        """Returns what the memory is made of, in order, and how long each is."""
        return [(export if type(export) in _OURS else _HostMemory(export), _size(export)) for export in self._exports]

    def fill(self, source: memoryview, start: int = 0) -> None:
        """Copies ``source`` into the buffers, behind their first ``start`` bytes; it must fit.

        Raises:
            RuntimeError: the device did not let us.
        """
        if start == 0 and self.many is None and type(self._exports[0]) not in _OURS:
            ffi.memmove(self.address, source, len(source))
            return
        for part, size in self._parts():
            skipped = min(start, size)
            count = min(size - skipped, len(source))
            if count > 0:
                part.write(source[:count], skipped)
            source = source[count:]
            start -= skipped

    def copy(self, length: int) -> bytes:
        """A copy of the first ``length`` bytes.

        Raises:
            RuntimeError: the device did not let us.
        """
        result = []
        for part, size in self._parts():
            result.append(part.read(min(size, length)))
            length -= len(result[-1])
        return result[0] if len(result) == 1 else b"".join(result)

    def check_copies(self) -> None:
        """Refuses memory that :meth:`fill` and :meth:`copy` cannot reach.

        Raises:
            ValueError: there is some; all is released.
        """
        for export in self._exports:
            if isinstance(export, ForeignMemory):
                try:
                    export.check_copies()
                except ValueError:
                    self.release()
                    raise


#: The classes of exports that are not cffi's.
_OURS = frozenset((ForeignMemory, StridedMemory))


def _size(export: Any) -> int:
    return export.size if type(export) in _OURS else len(export)


def _overlap(addresses: list[Any], sizes: list[int]) -> bool:
    """True if two of these pieces of memory have bytes in common."""
    starts = [int(ffi.cast("uintptr_t", address)) for address in addresses]
    ordered = sorted((start, size) for start, size in zip(starts, sizes, strict=True) if size)
    return any(start + size > following for (start, size), (following, _) in pairwise(ordered))


def _common_memory(exports: list[Any]) -> int:
    """The kind of memory that a list is in.

    UCX looks at the first part only and treats all as such; the builds that check do not include the usual one.
    """
    devices = {export.memory for export in exports if type(export) is ForeignMemory and export.on_device}
    if not devices:
        return _UNKNOWN
    full = [export for export in exports if _size(export) > 0]
    if len(devices) > 1 or not all(type(export) is ForeignMemory and export.on_device for export in full):
        raise ValueError("the buffers of a list must all be in the same kind of memory: all host, or all device memory")
    return int(devices.pop())


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]

#: Below this, zeroing a bytes object costs less than calling through ctypes.
_SMALL = 4096
#: From here on, malloc takes fresh memory from the kernel each time: every page of it costs a fault.
_FRESH = 2**25


def new_bytes(size: int) -> bytes:
    """A bytes object to be filled before anybody else sees it, as CPython's own ``recv`` does; not zeroed."""
    result: bytes = bytes(size) if size < _SMALL else _new_bytes(None, size)
    if size >= _FRESH:
        lib.tu_prefer_huge_pages(ffi.from_buffer("char[]", result), size)
    return result
