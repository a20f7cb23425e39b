"""Refuses buffers whose bytes do not say what they are: of elements that are, or contain, pointers (numpy's arrays of
objects, ctypes pointers), and of masked arrays.

A peer's bytes must not become pointers of this process, nor the other way round. So the type of the elements is
checked: numpy's dtype, the type of a ctypes object, or else the format of the buffer protocol (PEP 3118).
"""

from __future__ import annotations

import array
import ctypes
import mmap
from functools import lru_cache
from typing import Any

#: Types whose elements are never pointers.
_PLAIN = frozenset((bytes, bytearray, array.array, mmap.mmap))
#: One-letter codes of a format for pointers: to an object, void, char and wchar_t, anything else, a function.
_POINTERS = frozenset("OPz&X")
#: The ctypes types that are pointers.
_CTYPES: tuple[type, ...] = (ctypes._Pointer, ctypes.CFUNCTYPE(None).__mro__[1])
_SIMPLE = frozenset("OPzZ")


def check_elements(data: Any, purpose: str) -> None:
    """Refuses a buffer with pointers, or a mask.

    Raises:
        TypeError: its elements are, or contain, pointers; its buffer is without its mask.
    """
    if type(data) in _PLAIN:
        return
    if isinstance(getattr(type(data), "mask", None), property):  # numpy's masked arrays, and astropy's
        raise TypeError(
            f"cannot {purpose} this {type(data).__name__}: its mask is not part of its bytes. Use its data and its "
            "mask separately, or an array without a mask"
        )
    if has_pointers(data):
        raise TypeError(
            f"cannot {purpose} this {type(data).__name__}: its elements are, or contain, pointers (Python objects, "
            "say), which mean nothing in another process"
        )


def has_pointers(data: Any) -> bool:
    """True if an element of ``data`` is, or may be, a pointer. False if ``data`` does not have the buffer protocol."""
    kind = type(data)
    if kind in _PLAIN:
        return False
    dtype = getattr(data, "dtype", None)
    if dtype is not None:
        has_objects = getattr(dtype, "hasobject", None)
        if has_objects is not None:
            return bool(has_objects)
    try:
        view = data if kind is memoryview else memoryview(data)
    except (TypeError, ValueError, BufferError):
        return False  # not a buffer: refused elsewhere, or taken by another protocol
    if view.itemsize == 1 and view.format in ("B", "b", "c"):
        return False
    owner = view.obj
    if isinstance(owner, _CDATA):  # a format does not show the members of a union
        kind_of_owner: Any = type(owner)
        return _type_has_pointers(kind_of_owner)
    if kind is memoryview and getattr(getattr(owner, "dtype", None), "hasobject", False):
        return True
    return format_has_pointers(view.format)


_CDATA = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData, *_CTYPES)


@lru_cache(maxsize=256)
def _type_has_pointers(kind: Any) -> bool:
    """True if a ctypes type is, or contains, a pointer."""
    if issubclass(kind, _CTYPES):
        return True
    if issubclass(kind, ctypes.Array):
        return _type_has_pointers(kind._type_)
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return any(_type_has_pointers(field[1]) for field in fields)
    return kind._type_ in _SIMPLE


@lru_cache(maxsize=256)
def format_has_pointers(format: str | None) -> bool:
    """True if a format contains a pointer. True also if it cannot be parsed, because a name contains a colon."""
    position, depth = 0, 0
    text = format or "B"
    while position < len(text):
        code = text[position]
        position += 1
        if code in _POINTERS:
            return True
        if code == ":":  # a name, up to the next colon; the letters in it mean nothing
            end = text.find(":", position)
            if end < 0 or depth == 0:
                return True
            position = end + 1
            if text[position : position + 1] == ":":
                return True  # the name contains a colon: its end is unknown
        elif code == "Z":  # complex, before the letter of a floating-point number; else a pointer to wchar_t
            if text[position : position + 1] not in ("f", "d", "g"):
                return True
            position += 1
        elif code == "T":
            depth += 1
        elif code == "}":
            depth -= 1
    return depth != 0
