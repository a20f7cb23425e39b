"""The header in front of arrays: which dtype, shape and order each has, and where it begins. Without numpy.

A message with arrays begins with 8 bytes: ``MAGIC``, and the length of the header, a multiple of 16, as a little-endian
integer of 4 bytes. Then comes JSON, padded with spaces: a list, whose first element is null for a single array, 0 for a
list of arrays, or the list of their names; then for each array ``[dtype, shape, order]``. The bytes of each array begin
at a multiple of 16 from the beginning of the message; zeros fill the gaps.

A dtype is what numpy calls it, with its byte order (``"<f4"``, ``">M8[ns]"``); a structured one is JSON in a string, of
what ``numpy.lib.format.dtype_to_descr`` returns; those that numpy does not have are names (``"bfloat16"``). The order
is ``"C"`` or ``"F"``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn

import attrs

MAGIC = b"\x93TUA"
#: Arrays begin at multiples of it, which no element needs more than.
ALIGNMENT = 16
_PREFIX = struct.Struct("<4sI")
PREFIX_SIZE = _PREFIX.size
#: The longest header, in bytes. The event loop waits while one is read: 0.1 s, if it is that long.
_LONGEST = 2**18
_MOST_DIMENSIONS = 64
_LONGEST_DTYPE = 2**16
#: Longer headers and dtypes, and headers of more arrays, are not kept.
_KEPT, _KEPT_ARRAYS = 1024, 64
#: The most elements without bytes.
_MOST_EMPTY = 2**31
#: Dtypes of numpy's that are no structures: bool, integers, floating point, complex, dates, characters, raw bytes.
#: (numpy divides by the number after the slash: by zero, too, which ends the process.)
_PLAIN = re.compile(
    r"[<>|](?P<kind>[biufcSUV]|[mM])(?P<size>\d{1,9})(\[([1-9]\d{0,8})?[A-Za-z]{1,7}(/[1-9]\d{0,8})?\])?"
)
#: The largest floating point numbers, alone and in pairs. Longer ones, C's long double, have one name in numpy, but
#: 80 bits on x86-64 and 128 on AArch64.
_LARGEST = {"f": 8, "c": 16}
#: The size in bytes of elements that numpy does not have (names as of ml_dtypes).
OTHERS = {
    "bfloat16": 2,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


@attrs.frozen
class ArrayKind:
    """What is said about one array.

    Attributes:
        dtype: as the header has it.
        shape: its lengths.
        order: ``"C"`` or ``"F"``.
    """

    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"] = "C"

    def __str__(self) -> str:
        order = ", in Fortran order" if self.order == "F" else ""
        return f"dtype {self.dtype}, shape {self.shape}{order}"


@attrs.frozen
class ArraysLayout:
    """What a header says.

    Attributes:
        single: whether it is one array, not a list or dict of them.
        names: of a dict; None for a list.
        arrays: what it says of each.
        offsets: where each begins in the message.
        sizes: their bytes.
        header_size: the length of the header.
        size: the length of the message.
    """

    single: bool
    names: tuple[str, ...] | None
    arrays: tuple[ArrayKind, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    header_size: int
    size: int

    def __str__(self) -> str:
        if self.single:
            return f"an array ({self.arrays[0]})"
        listed = [str(one) for one in self.arrays[:4]]
        if self.names is not None:
            listed = [f"{name!r}: {one}" for name, one in zip(self.names, listed, strict=False)]
        more = "; ..." if len(self.arrays) > len(listed) else ""
        kind = "a list" if self.names is None else "a dict"
        plural = "" if len(self.arrays) == 1 else "s"
        return f"{kind} of {len(self.arrays)} array{plural} ({'; '.join(listed)}{more})"


class BadHeader(ValueError):
    """A message does not begin with a header, or its header does not describe it."""


def item_size(dtype: str) -> int:
    """Returns the bytes of an element.

    Raises:
        BadHeader: there is no such dtype, or it may not be sent.
    """
    if dtype in OTHERS:
        return OTHERS[dtype]
    if len(dtype) > _LONGEST_DTYPE:
        raise BadHeader(f"a dtype of {len(dtype)} characters")
    return int(numpy_dtype(dtype).itemsize) if dtype.startswith("[") else _plain_size(dtype)


def _plain_size(dtype: str) -> int:
    plain = _PLAIN.fullmatch(dtype)
    if plain is None:
        raise BadHeader(f"no dtype that can be received: {dtype[:100]!r}")
    kind, size = plain["kind"], int(plain["size"])
    if size > _LARGEST.get(kind, size):
        raise BadHeader(
            f"numbers of the dtype {dtype!r} differ between kinds of machines: send them as "
            f"{'float64' if kind == 'f' else 'complex128'}, or as bytes"
        )
    return 4 * size if kind == "U" else size


def numpy_dtype(dtype: str) -> Any:
    """Returns numpy's dtype.

    Raises:
        BadHeader: numpy has no such dtype, or it may not be received.
        ImportError: numpy or ml_dtypes is needed for it, and is missing.
    """
    return _numpy_dtype_again(dtype) if len(dtype) <= _KEPT else _numpy_dtype(dtype)


def _numpy_dtype(dtype: str) -> Any:
    import numpy

    if dtype in OTHERS:
        try:
            import ml_dtypes  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise ImportError(
                f"numpy has no {dtype}: install ml_dtypes, or receive into an array of yours (out=)"
            ) from None
        try:
            return numpy.dtype(getattr(ml_dtypes, dtype))
        except AttributeError:
            raise BadHeader(f"this ml_dtypes has no {dtype}: install a newer one") from None
    try:
        described: Any = _tuples(json.loads(dtype)) if dtype.startswith("[") else dtype
        found = numpy.lib.format.descr_to_dtype(described)
    except BadHeader:
        raise
    except Exception as error:  # numpy raises many kinds
        raise BadHeader(f"no dtype: {dtype[:100]!r}") from error
    if found.hasobject:
        raise BadHeader(f"a dtype with Python objects: {dtype[:100]!r}")
    return found


#: The same dtypes are received again and again.
_numpy_dtype_again = lru_cache(maxsize=256)(_numpy_dtype)


def _tuples(fields: Any) -> Any:
    """Returns the description of a structured dtype as numpy wants it: a list of tuples, in which shapes are tuples.

    Raises:
        Exception: it has other elements than :func:`item_size` knows.
    """
    for _, kind, *_ in fields:
        if not isinstance(kind, list):
            _plain_size(kind)
    return [
        (
            tuple(name) if isinstance(name, list) else name,
            _tuples(kind) if isinstance(kind, list) else kind,
            *(tuple(one) for one in rest),
        )
        for name, kind, *rest in fields
    ]


def _layout(single: bool, names: tuple[str, ...] | None, arrays: Sequence[ArrayKind], header_size: int) -> ArraysLayout:
    offsets, sizes = [], []
    position = header_size
    for array in arrays:
        position += -position % ALIGNMENT
        offsets.append(position)
        count, item = math.prod(array.shape), item_size(array.dtype)
        if not item and count > _MOST_EMPTY:
            raise BadHeader(f"{count} elements without bytes")
        sizes.append(count * item)
        position += sizes[-1]
    return ArraysLayout(single, names, tuple(arrays), tuple(offsets), tuple(sizes), header_size, position)


def encode(single: bool, names: tuple[str, ...] | None, arrays: tuple[ArrayKind, ...]) -> tuple[bytes, ArraysLayout]:
    """Returns the header of a message, and its layout; the arguments are as in :class:`ArraysLayout`.

    Raises:
        ValueError: it would be too long.
    """
    return _encode_again(single, names, arrays) if len(arrays) <= _KEPT_ARRAYS else _encode(single, names, arrays)


def _encode(single: bool, names: tuple[str, ...] | None, arrays: tuple[ArrayKind, ...]) -> tuple[bytes, ArraysLayout]:
    kind: Any = None if single else 0 if names is None else names
    text = json.dumps([kind, *([one.dtype, one.shape, one.order] for one in arrays)], separators=(",", ":")).encode()
    size = PREFIX_SIZE + len(text)
    size += -size % ALIGNMENT
    if size > _LONGEST:
        raise ValueError(f"{len(arrays)} arrays need a header of {size} bytes, and {_LONGEST} is the limit: send fewer")
    return _PREFIX.pack(MAGIC, size) + text.ljust(size - PREFIX_SIZE), _layout(single, names, arrays, size)


#: The same arrays are sent again and again.
_encode_again = lru_cache(maxsize=256)(_encode)


def header_size(start: bytes | memoryview, size: int) -> int:
    """Returns the length of the header of a message of ``size`` bytes, which begins so.

    Raises:
        BadHeader: it has none.
    """
    if len(start) < PREFIX_SIZE:
        raise BadHeader("it has no header")
    magic, length = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise BadHeader("it has no header")
    if not PREFIX_SIZE < length <= min(size, _LONGEST) or length % ALIGNMENT:
        raise BadHeader(f"its header would have {length} bytes")
    return int(length)


def decode(header: bytes) -> ArraysLayout:
    """Returns what a header says. The caller compares the layout's size with that of the message.

    Raises:
        BadHeader: it is no header, or describes something that cannot be.
        ImportError: numpy is needed to know the size of a structure, and is missing.
    """
    return _decode_again(header) if len(header) <= _KEPT else _decode(header)


def _decode(header: bytes) -> ArraysLayout:
    try:
        kind, *described = json.loads(header[PREFIX_SIZE:])
    except (ValueError, TypeError, RecursionError):
        raise BadHeader("its header is no JSON list") from None
    names: tuple[str, ...] | None = None
    if isinstance(kind, list) and all(isinstance(name, str) for name in kind) and len(set(kind)) == len(kind):
        names = tuple(kind)
    elif kind is not None and kind != 0:
        _bad("list of names", kind)
    if len(described) != (1 if kind is None else len(described) if names is None else len(names)):
        _bad("number of arrays", len(described))
    return _layout(kind is None, names, [_array(one) for one in described], len(header))


#: The same arrays are sent again and again.
_decode_again = lru_cache(maxsize=256)(_decode)


def _array(described: Any) -> ArrayKind:
    if not isinstance(described, list) or len(described) != 3:
        _bad("description", described)
    dtype, shape, order = described
    if not isinstance(dtype, str):
        _bad("dtype", dtype)
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        _bad("shape", shape)
    if not all(type(length) is int and 0 <= length < 2**62 for length in shape):
        _bad("shape", shape)
    if order not in ("C", "F"):
        _bad("order", order)
    return ArrayKind(dtype, tuple(shape), order)


def _bad(what: str, value: object) -> NoReturn:
    raise BadHeader(f"its header has a wrong {what}: {str(value)[:100]!r}")
