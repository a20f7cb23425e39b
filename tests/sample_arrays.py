"""Arrays of all kinds that numpy has, and whether what has arrived is the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from helpers import pattern

STRUCTURED = np.dtype(
    {
        "names": ["a", "b", "c"],
        "formats": ["<i2", ("<f8", (2, 3)), [("x", ">u4"), ("y", "S3")]],
        "offsets": [0, 8, 64],
        "itemsize": 80,
    }
)
DTYPES: list[Any] = [
    *("b1", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">f4", "<f2", "<f8", ">c8", "<c16", "S5", "<U3", ">U3", "V7"),
    *("<M8[ns]", ">M8[D]", "<m8[25us]", "<M8", STRUCTURED, [("name", "<f4"), ("", "u1")]),
    [(("a title", "field"), "<i4")],
]
#: Short messages arrive packed, others by UCX, the longest as a rendezvous.
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 4), (1, 5, 1), (300, 70), (40, 50, 60), (2,) * 12]


def filled(chance: random.Random, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of any bytes that the dtype has meaning for."""
    count = int(np.prod(shape))
    if dtype.kind == "U":
        values = np.array([chr(97 + i % 26) * (i % 4) for i in range(count)], dtype)
    elif dtype.kind == "b":
        values = np.frombuffer(pattern(count), np.uint8) % 2 == 1
    else:
        values = np.frombuffer(bytearray(pattern(count * dtype.itemsize, chance.randrange(99))), dtype)
    return values.reshape(shape).astype(dtype, copy=False)


def some_layout(chance: random.Random, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements, as arrays of programs lie in memory."""
    way = chance.choice(["as it is", "fortran", "transposed", "every second", "reversed", "read-only", "unaligned"])
    if values.ndim == 0 and way != "read-only":
        return values
    if way == "fortran":
        return np.asfortranarray(values)
    if way == "transposed":
        return np.ascontiguousarray(values.T).T
    if way == "every second":
        spread = np.zeros((2 * len(values), *values.shape[1:]), values.dtype)
        spread[::2] = values
        return spread[::2]
    if way == "reversed":
        return np.flip(np.flip(values).copy())
    if way == "read-only":
        values = values.copy()
        values.flags.writeable = False
    if way == "unaligned" and values.dtype.itemsize:
        memory = bytearray(values.nbytes + 1)
        shifted = np.ndarray(values.shape, values.dtype, memory, 1)
        shifted[...] = values
        return shifted
    return values


def elements(values: np.ndarray[Any, Any]) -> bytes:
    """The bytes of all elements, without what is between the fields of a structure."""
    names = values.dtype.names
    return values.tobytes() if names is None else b"".join(elements(values[name]) for name in names)


def assert_same(got: Any, sent: Any, *, order: bool = True) -> None:
    assert type(got) is np.ndarray
    assert got.dtype == sent.dtype and got.dtype.str == sent.dtype.str
    assert got.shape == sent.shape
    assert elements(got) == elements(sent)
    if order and (sent.flags.c_contiguous or sent.flags.f_contiguous):
        assert got.flags.c_contiguous == sent.flags.c_contiguous
        assert got.flags.f_contiguous == sent.flags.f_contiguous
