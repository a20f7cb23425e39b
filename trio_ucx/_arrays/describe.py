"""What an object with an array in it says about that: dtype, shape, order, and the buffer with its bytes.

numpy's arrays are asked as numpy's, if numpy is imported; others by the buffer protocol, DLPack, or the CUDA array
interface.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import lru_cache
from typing import Any, Literal

import attrs

from ..ucp import DeviceBuffer, MemoryType
from ..ucp._internal_api import Array, array_of, check_elements, check_whole
from .header import OTHERS, ArrayKind

#: numpy's names of the elements of the buffer protocol (the codes of the module struct, of native size and order).
_CODES = {"?": "b1", "c": "S1", "e": "f2", "f": "f4", "d": "f8", "Zf": "c8", "Zd": "c16"}
_SIGNED, _UNSIGNED = "bhilqn", "BHILQN"
_NATIVE = "<" if sys.byteorder == "little" else ">"


@attrs.frozen(eq=False)
class Described:
    """An array.

    Attributes:
        kind: what the header says of it.
        buffer: its bytes, in its order: for a send or a receive. None if they are not contiguous.
        array: the object itself; one of numpy's without its subclass.
        on_device: whether the bytes are in a device's memory.
        joins: whether ``bytes.join`` takes the buffer.
        is_numpy: whether the object is an array of numpy's.
    """

    kind: ArrayKind
    buffer: Any
    array: Any
    on_device: bool = False
    joins: bool = True
    is_numpy: bool = False


def describe(array: Any, purpose: str) -> Described:
    """Returns what an array is.

    Args:
        purpose: what is to be done with it, for errors: "send" or "receive into".

    Raises:
        TypeError, ValueError: it is no array; or one with a mask, with Python objects, or with pointers.
        RuntimeError: it is in CUDA memory and there is no CUDA driver.
    """
    check_elements(array, purpose)
    check_whole(array)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, (numpy.ndarray, numpy.generic)):
        if purpose != "send" and not (isinstance(array, numpy.ndarray) and array.flags.writeable):
            raise TypeError(f"cannot receive into a read-only {type(array).__name__}")
        return _of_numpy(numpy, numpy.asarray(array))
    if not hasattr(array, "__dlpack__"):  # its buffer, if it has one, may know less (torch's dtypes)
        try:
            view = memoryview(array)
        except TypeError:
            pass
        except (ValueError, BufferError) as error:
            raise ValueError(f"cannot {purpose} this {type(array).__name__}: {error}") from error
        else:
            return _of_view(array, view, purpose)
    try:
        found = array_of(array)
    except ValueError as error:
        raise ValueError(f"cannot {purpose} this {type(array).__name__}: {error}") from error
    if found is None or not found.dtype:
        raise TypeError(
            f"cannot {purpose} a {type(array).__name__} as an array: it must be a numpy array, or have the buffer "
            "protocol, DLPack or the CUDA array interface"
        )
    if purpose != "send" and found.readonly:
        raise TypeError(f"cannot receive into a read-only {type(array).__name__}, or a copy that its DLPack makes")
    return _of_array(array, found, purpose)


def _of_numpy(numpy: Any, array: Any) -> Described:
    kind = ArrayKind(dtype_name(array.dtype), array.shape)
    if array.flags.c_contiguous:
        flat = array
    elif array.flags.f_contiguous:
        kind, flat = attrs.evolve(kind, order="F"), array.T
    else:
        return Described(kind, None, array, is_numpy=True)
    if not array.size or not array.dtype.itemsize:
        return Described(kind, bytearray(), array, is_numpy=True)
    # Dates have no buffer protocol of their own.
    return Described(kind, flat.reshape(-1).view(numpy.uint8), array, is_numpy=True)


@lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Returns what the header calls a dtype of numpy's."""
    import numpy

    name = str(dtype.name)
    if name in OTHERS:
        return name
    if dtype.names is None:
        if dtype.kind == "V" and dtype.type is not numpy.void:
            raise TypeError(f"arrays of {name} cannot be sent: view them as bytes or integers first")
        return str(dtype.str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it leaves out the dtype's metadata
        return json.dumps(numpy.lib.format.dtype_to_descr(dtype), separators=(",", ":"))


def _of_view(array: Any, view: memoryview, purpose: str) -> Described:
    """Describes what has the buffer protocol, and nothing else."""
    with view:
        code = view.format
        if purpose != "send" and view.readonly:
            raise TypeError(f"cannot receive into a read-only {type(array).__name__}")
        order = ""
        if code[:1] in "@=<>!" and len(code) > 1:
            order, code = {"@": _NATIVE, "=": _NATIVE, "!": ">"}.get(code[0], code[0]), code[1:]
        order = order or _NATIVE
        if code in _CODES:
            name = _CODES[code]
        elif len(code) == 1 and code in _SIGNED + _UNSIGNED:
            name = f"{'i' if code in _SIGNED else 'u'}{view.itemsize}"
        else:
            raise TypeError(
                f"cannot {purpose} this {type(array).__name__} as an array: its elements have the format {code!r}; "
                "make a numpy array of it"
            )
        if view.itemsize == 1 or name[0] in "bS":
            order = "|"
        kind = ArrayKind(f"{order}{name}", tuple(view.shape or ()))
        if view.c_contiguous:
            return Described(kind, array, array)
    raise ValueError(f"cannot {purpose} a non-contiguous {type(array).__name__}: make a numpy array of it")


def _of_array(array: Any, found: Array, purpose: str) -> Described:
    """Describes what has DLPack or the CUDA array interface."""
    on_device = found.memory_type is not MemoryType.HOST
    if found.contiguous:
        order: Literal["C", "F"] = "C"
    elif attrs.evolve(found, shape=found.shape[::-1], strides=(found.strides or ())[::-1]).contiguous:
        order = "F"
    else:
        raise ValueError(f"cannot {purpose} a non-contiguous {type(array).__name__}: make it contiguous first")
    assert found.memory_type is not None
    buffer = DeviceBuffer(found.address, found.nbytes, found.memory_type, (found.keep, array))
    return Described(ArrayKind(found.dtype, found.shape, order), buffer, array, on_device, joins=on_device)
