"""Memory that is not exported by the buffer protocol: DLPack, ``__cuda_array_interface__``, raw addresses.

All of it becomes an :class:`Array`: where it is, its shape, what kind of memory it is, and what must be kept so that it
stays. Nothing is copied.

DLPack: the producer's capsule is never consumed, only kept. When we let it go its destructor gives the memory back, as
for a capsule that nobody wanted; so it cannot be given back twice, or not at all.
"""

from __future__ import annotations

import ctypes
import enum
import math
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from ..._util.arguments import check_integer
from . import cuda as _cuda


class MemoryType(enum.IntEnum):
    """Kinds of memory that UCX tells apart (``ucs_memory_type_t``)."""

    HOST = 0
    CUDA = 1
    CUDA_MANAGED = 2
    ROCM = 3
    ROCM_MANAGED = 4
    RDMA = 5
    ZE_HOST = 6
    ZE_DEVICE = 7
    ZE_MANAGED = 8
    GAUDI = 9


@attrs.frozen(eq=False)
class DeviceBuffer:
    """Contiguous memory at an address, to be sent or received into: for allocators of your own.

    It goes to UCX as it is. What a device still does to it must be finished before (nothing here knows its stream).

    Attributes:
        address: where it begins.
        nbytes: how long it is.
        memory_type: what kind of memory it is, a :class:`MemoryType`.
        owner: kept as long as an operation uses the memory: whatever must not be freed meanwhile.
    """

    address: int = attrs.field()
    nbytes: int = attrs.field()
    memory_type: MemoryType = attrs.field(converter=MemoryType)
    owner: object = attrs.field(default=None, repr=False)

    @address.validator
    def _check_address(self, _: object, value: int) -> None:
        check_integer(value, "the address", 0, 2**64 - 1)

    @nbytes.validator
    def _check_nbytes(self, _: object, value: int) -> None:
        check_integer(value, "nbytes", 0, 2**63 - 1)
        if value > 0 and self.address == 0:
            raise ValueError("the address of a buffer that is not empty must not be 0")


@attrs.frozen(eq=False)
class Array:
    """Memory, and how elements lie in it.

    Attributes:
        address: of the element with all indices 0.
        itemsize: bytes of an element.
        shape, strides: strides in bytes; None for an array in C order without gaps.
        memory_type: None for memory that UCX shall look at itself.
        readonly: whether it must not be written to.
        keep: what keeps it there.
        dtype: what numpy calls the elements (``"<f4"``), or a name (``"bfloat16"``); "" if that is not known.
    """

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    memory_type: MemoryType | None
    readonly: bool
    keep: object
    dtype: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def contiguous(self) -> bool:
        if self.strides is None or 0 in self.shape:
            return True
        step = self.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return False
            step *= length
        return True


def array_of(data: object) -> Array | None:
    """Returns what ``data`` says about its memory; None if it says nothing that we understand.

    Work that a device still does on it is waited for, where ``data`` says in which stream that is.

    Raises:
        ValueError: it says something that cannot be used.
        RuntimeError: it is in CUDA memory and there is no CUDA driver.
    """
    if isinstance(data, DeviceBuffer):
        memory_type = data.memory_type if data.nbytes else MemoryType.HOST
        if memory_type in (MemoryType.CUDA, MemoryType.CUDA_MANAGED):
            _cuda.driver()  # said now, not when a message has come that we must copy
        return Array(data.address, 1, (data.nbytes,), None, memory_type, False, data)
    # An object may have both; the CUDA array interface is the one that names the stream to wait for.
    interface = getattr(data, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_cuda_interface(data, interface)
    if hasattr(data, "__dlpack__") and hasattr(data, "__dlpack_device__"):
        return _from_dlpack(data)
    return None


def on_device(data: Any) -> bool:
    """True if ``data`` says by DLPack that it is in a device's memory.

    The buffer protocol of such an object may always raise (JAX's arrays).
    """
    try:
        return hasattr(data, "__dlpack_device__") and _DEVICES.get(data.__dlpack_device__()[0]) is not MemoryType.HOST
    except Exception:
        return False


# ---- __cuda_array_interface__, versions 0 to 3 ----


def _from_cuda_interface(data: object, interface: Any) -> Array:
    try:
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        address, readonly = interface["data"]
        itemsize = _item_size(interface["typestr"])
        _check_fields(interface.get("descr"))
        stream = interface.get("stream")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the __cuda_array_interface__ of {type(data).__name__} is wrong: {error!r}") from error
    if interface.get("mask") is not None:
        raise TypeError(
            f"the bytes of this {type(data).__name__} do not include its mask: send its data and its mask separately"
        )
    strides = None if strides is None else tuple(strides)
    address = address or 0
    dtype = "" if interface["typestr"][1] == "V" else interface["typestr"]
    if not address or 0 in shape:
        # An empty array has no memory, and so no kind.
        return _checked(data, Array(0, itemsize, shape, strides, MemoryType.HOST, bool(readonly), data, dtype))
    driver = _cuda.driver()
    if stream is not None:
        if stream == 0:
            raise ValueError(
                f"the __cuda_array_interface__ of {type(data).__name__} names stream 0, which is ambiguous"
            )
        driver.synchronize(int(stream), address)
    # The interface covers everything that a device can reach.
    memory_type = MemoryType.CUDA
    if driver.is_managed(address):
        memory_type = MemoryType.CUDA_MANAGED
    elif driver.is_host(address):
        memory_type = MemoryType.HOST
    return _checked(data, Array(address, itemsize, shape, strides, memory_type, bool(readonly), data, dtype))


def _check_fields(descr: Any) -> None:
    """Checks the fields of a structure, which may be structures themselves."""
    for _, kind, *_ in descr or ():
        _item_size(kind) if isinstance(kind, str) else _check_fields(kind)


def _item_size(typestr: str) -> int:
    """Of ``"<f4"`` and the like: byte order, kind, size."""
    kind, size = typestr[1], int(typestr[2:])
    if kind == "t":
        raise ValueError(f"elements of {size} bits")
    if kind == "O":
        raise TypeError("elements that are pointers to objects")
    return size * 4 if kind == "U" else size


def _checked(data: object, array: Array) -> Array:
    """Refuses what would lead UCX to other memory."""
    lengths_fit = all(isinstance(length, int) and length >= 0 for length in array.shape)
    if not lengths_fit or (array.strides is not None and len(array.strides) != len(array.shape)):
        raise ValueError(
            f"{type(data).__name__} says that its shape is {array.shape} and that its strides are {array.strides}"
        )
    if array.address == 0 and array.nbytes > 0:
        raise ValueError(f"{type(data).__name__} has {array.nbytes} bytes at address 0")
    return array


# ---- DLPack ----


class _Tensor(ctypes.Structure):
    """``DLTensor``, the device and the data type being unfolded."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_READ_ONLY, _IS_COPIED = 1, 2  # DLPACK_FLAG_BITMASK_...
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"

#: A DLDataTypeCode.
_OPAQUE = 3
#: numpy's letters for the others; the names of those that numpy does not have.
_LETTERS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_NAMES = {
    4: "bfloat16",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
#: DLDeviceType.
_CUDA, _ROCM = 2, 10
_DEVICES = {
    1: MemoryType.HOST,  # kDLCPU
    _CUDA: MemoryType.CUDA,
    3: MemoryType.HOST,  # kDLCUDAHost
    _ROCM: MemoryType.ROCM,
    11: MemoryType.HOST,  # kDLROCMHost
    13: MemoryType.CUDA_MANAGED,
}

_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(data: Any) -> Array:
    name = type(data).__name__
    try:
        kind = int(data.__dlpack_device__()[0])
        memory_type = _DEVICES.get(kind)
        if memory_type is None:
            raise ValueError(f"{name} is on a device of DLPack's type {kind}, which UCX does not know")
        # For CUDA, the producer makes this stream wait for its own work; we wait for this stream.
        capsule = _capsule_of(data, {"stream": _cuda.LEGACY_STREAM} if kind in (_CUDA, 13) else {})
    except Exception as error:
        raise ValueError(f"the DLPack interface of {name} failed: {error}") from error
    flags = 0
    if _capsule_is_valid(capsule, _VERSIONED):
        versioned = _Versioned.from_address(_capsule_pointer(capsule, _VERSIONED))
        if versioned.major != 1:
            raise ValueError(f"{name} speaks DLPack {versioned.major}.{versioned.minor}; 1 and before are understood")
        flags, tensor = versioned.flags, versioned.tensor
    elif _capsule_is_valid(capsule, _LEGACY):
        tensor = _Tensor.from_address(_capsule_pointer(capsule, _LEGACY))
    else:
        raise ValueError(f"{name} gave a DLPack capsule that was used before, or something else")
    if tensor.code == _OPAQUE:
        raise ValueError(f"{name} has elements that are opaque handles")
    bits = tensor.bits * tensor.lanes
    if bits % 8 != 0:
        raise ValueError(f"{name} has elements of {bits} bits; only whole bytes can be sent")
    itemsize = bits // 8
    shape = _numbers(tensor.shape, tensor.ndim)
    strides = tuple(stride * itemsize for stride in _numbers(tensor.strides, tensor.ndim)) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    if 0 in shape:
        address, memory_type = 0, MemoryType.HOST
    # What is written to a copy would be lost.
    readonly = bool(flags & (_READ_ONLY | _IS_COPIED))
    dtype = _dtype_of(tensor.code, bits, tensor.lanes)
    array = _checked(data, Array(address, itemsize, shape, strides, memory_type, readonly, (capsule, data), dtype))
    if memory_type in (MemoryType.CUDA, MemoryType.CUDA_MANAGED):
        _cuda.driver().synchronize(_cuda.LEGACY_STREAM, address)
    return array


def _capsule_of(data: Any, options: dict[str, Any]) -> object:
    try:
        return data.__dlpack__(max_version=(1, 0), **options)
    except TypeError:
        return data.__dlpack__(**options)  # from before DLPack 1.0


def _dtype_of(code: int, bits: int, lanes: int) -> str:
    """Returns :attr:`Array.dtype` of elements of so many bits, all lanes together."""
    if lanes != 1 or code not in _LETTERS:
        return _NAMES.get(code, "") if lanes == 1 else ""
    order = "|" if bits == 8 else "<" if sys.byteorder == "little" else ">"
    return f"{order}{_LETTERS[code]}{bits // 8}"


def _numbers(pointer: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(pointer[i] for i in range(count))
