"""Strided arrays: host memory whose elements do not lie one after the other. The copying is ``_native/strided.c``'s."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import attrs
from trio.lowlevel import enable_ki_protection

from ..._native import ffi, lib
from .foreign import Array, MemoryType, array_of, on_device
from .mapped_files import check_backed, is_mapped
from .pointers import check_elements
from .protocols import SupportsBuffer, SupportsDLPack


@attrs.frozen(eq=False)
class Strided:
    """Marks an array whose elements do not lie one after the other, to be sent or received into as it is.

    ``Strided(matrix[:, 3])`` is a column, ``Strided(image[10:20, 30:40])`` a block, ``Strided(cube.T)`` a transposed
    array. The message has the elements in C order (the last index varies fastest), as ``array.tobytes()`` would: the
    other side may use ``Strided``, too, or not, or another shape of as many bytes.

    It is taken wherever a buffer is (not in a list of buffers). UCX asks for the message piece by piece, and each piece
    is gathered from, or scattered into, the array where it lies (a generic datatype, ``ucp_dt_create_generic``): there
    is no copy of the whole. That costs processor time for each contiguous run of bytes, and the ways in which UCX moves
    memory without touching it (RDMA, copies across processes) cannot be used. Contiguous arrays need no mark, and are
    faster without it.

    Attributes:
        array: anything with the buffer protocol, a numpy array say, or a DLPack object, in host memory; any shape,
            strides of any sign, 0 when sending. An array that is received into must not have an element twice.
    """

    array: SupportsBuffer | SupportsDLPack


class _Export(ctypes.Structure):
    """``Py_buffer``."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]

    _held = False

    @enable_ki_protection  # as a destructor, too: see Pinned.release
    def release(self) -> None:
        if self._held:
            self._held = False
            _release_buffer(ctypes.byref(self))

    __del__ = release


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.restype = ctypes.c_int
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Export), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None
_release_buffer.argtypes = [ctypes.POINTER(_Export)]

_WRITABLE, _STRIDES = 0x0001, 0x0018  # PyBUF_...


def _exported(data: object, writable: bool) -> Array | None:
    """The array behind a buffer export, which ``memoryview`` does not give the address of."""
    export = _Export()
    try:
        _get_buffer(data, ctypes.byref(export), _STRIDES | (_WRITABLE if writable else 0))
    except TypeError:
        return None
    except (ValueError, BufferError):
        if on_device(data):
            return None
        raise
    export._held = True
    if export.ndim > 0 and not export.strides:  # numpy's datetime64 scalars do not care what they are asked for
        return Array(export.buf or 0, 1, (export.len,), None, None, bool(export.readonly), export)
    shape = tuple(export.shape[i] for i in range(export.ndim))
    strides = tuple(export.strides[i] for i in range(export.ndim))
    return Array(export.buf or 0, export.itemsize, shape, strides, None, bool(export.readonly), export)


class StridedMemory:
    """The array of a :class:`Strided`, pinned.

    Attributes:
        size: bytes of the message.
        native: the ``tu_strided_t``.
    """

    __slots__ = ("_keep", "native", "size")

    def __init__(self, strided: Strided, writable: bool) -> None:
        self._keep: object = None
        self.native: Any = ffi.NULL
        purpose, name = "receive into" if writable else "send", type(strided.array).__name__
        check_elements(strided.array, purpose)
        try:
            array = _exported(strided.array, writable)
            if array is None:
                array = array_of(strided.array)
        except (ValueError, BufferError) as error:
            raise ValueError(f"cannot {purpose} this strided {name}: {error}") from error
        if array is None:
            raise TypeError(f"cannot {purpose} a strided {name}: Strided takes a numpy array, or another buffer")
        self._keep = array.keep
        try:
            check_array(strided.array, array)
            self.native = _described(array, writable, purpose, name)
        except BaseException:
            self.release()
            raise
        self.size = array.nbytes

    def read(self, length: int) -> bytes:
        """The first bytes of the message."""
        data = ffi.new("char[]", length)
        lib.tu_strided_pack(self.native, 0, data, length)
        return bytes(ffi.buffer(data, length))

    def write(self, source: memoryview, start: int) -> None:
        """Puts a part of a message, from byte ``start`` on, into the array."""
        lib.tu_strided_unpack(self.native, start, ffi.from_buffer("char[]", source), len(source))

    def release(self) -> None:
        native, self.native = self.native, ffi.NULL
        lib.free(native)
        keep, self._keep = self._keep, None
        if isinstance(keep, _Export):
            keep.release()


def _described(array: Array, writable: bool, purpose: str, name: str) -> Any:
    """The ``tu_strided_t`` of an array."""
    if array.memory_type not in (None, MemoryType.HOST):
        raise ValueError(f"cannot {purpose} a strided {name} in device memory: make it contiguous on the device first")
    if writable and array.readonly:
        raise TypeError(f"cannot receive into a read-only {name}")
    strides = array.strides or _compact(array)
    if writable and _overlaps(array.shape, strides, array.itemsize):
        raise ValueError(
            f"cannot receive into this strided {name} (shape {array.shape}, strides {strides}): elements of it "
            "share memory"
        )
    out = ffi.new("tu_strided_t **")
    status = lib.tu_strided_create(
        ffi.cast("void *", array.address),
        array.itemsize,
        len(array.shape),
        ffi.new("size_t[]", array.shape),
        ffi.new("ptrdiff_t[]", strides),
        out,
    )
    if status != 0:
        raise ValueError(f"cannot {purpose} this strided {name}: shape {array.shape} is too large")
    return out[0]


def _compact(array: Array) -> tuple[int, ...]:
    strides: list[int] = []
    step = array.itemsize
    for length in reversed(array.shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def check_whole(data: Any) -> None:
    """Refuses an array in a mapped file that was truncated, before something else than UCX reads it.

    Raises:
        ValueError: it ends behind the end of the file.
    """
    with suppress(BufferError):
        array = _exported(data, False) if is_mapped(data) else None
        if array is not None:
            check_array(data, array)


def check_array(data: Any, array: Array) -> None:
    """Refuses an object that lies in this memory, as :func:`check_whole` does."""
    if array.nbytes > 0 and array.memory_type in (None, MemoryType.HOST):
        steps = zip(array.shape, array.strides or _compact(array), strict=True)
        last = array.address + sum(max(0, (length - 1) * stride) for length, stride in steps) + array.itemsize - 1
        check_backed(data, ffi.cast("char *", last))


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """True if elements share memory, or may: each dimension must step over all of the smaller ones.

    That is so for every slice, transposition and reversal of an array without overlaps.
    """
    if 0 in shape:
        return False
    extent = itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < extent:
                return True
            extent += stride * (length - 1)
    return False
