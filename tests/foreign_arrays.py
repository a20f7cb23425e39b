"""Arrays that describe their memory by DLPack, correctly or not."""

from __future__ import annotations

import ctypes
from typing import Any

from trio_ucx.ucp._memory.foreign import _Tensor, _Versioned

CPU, CUDA, CUDA_HOST, OPENCL, ROCM, MANAGED = 1, 2, 3, 4, 10, 13


class Tensor:
    """An array that has DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class OldTensor(Tensor):
    """One from before DLPack 1.0."""

    def __dlpack__(self, stream: None = None) -> Any:
        return self.array.__dlpack__()


def described(memory: Any, *, version: tuple[int, int] | None = (1, 0), device: int = CPU, **fields: Any) -> Any:
    """An object whose capsule says what we like about the memory of a ctypes array."""
    shape = fields.pop("shape", (ctypes.sizeof(memory),))
    strides = fields.pop("strides", None)
    flags = fields.pop("flags", 0)
    numbers = ctypes.c_int64 * max(1, len(shape))
    tensor = _Tensor(
        device_type=device,
        ndim=len(shape),
        shape=numbers(*shape),
        strides=numbers(*strides) if strides is not None else None,
        **{"data": ctypes.addressof(memory), "code": 1, "bits": 8, "lanes": 1, **fields},
    )
    managed = tensor if version is None else _Versioned(major=version[0], minor=version[1], flags=flags, tensor=tensor)
    name = b"dltensor" if version is None else b"dltensor_versioned"
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    class Described:
        keep = memory, managed, tensor, name
        asked: dict[str, Any]

        def __dlpack__(self, **options: Any) -> Any:
            self.asked = options
            return new(ctypes.addressof(managed), name, None)

        def __dlpack_device__(self) -> tuple[int, int]:
            return device, 0

    return Described()
