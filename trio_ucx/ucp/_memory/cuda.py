"""The few things that the library itself asks of CUDA: copies between host and device memory, and to wait for a stream.

Through the driver, which is there wherever CUDA memory is; nothing is linked. Every call is made in the context that
the memory belongs to, and blocks until it is done.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: ``CU_STREAM_LEGACY``: the stream that everything which does not choose one runs in.
LEGACY_STREAM = 1

_CONTEXT, _MEMORY_TYPE, _IS_MANAGED, _DEVICE = 1, 2, 8, 9  # CU_POINTER_ATTRIBUTE_...
_MEMORY_HOST = 1  # CU_MEMORYTYPE_HOST


class Driver:
    """The CUDA driver, initialized."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"CUDA's {name} failed: {reason} ({status})")

    def _attribute(self, kind: Any, attribute: int, address: int) -> Any:
        value = kind()
        self._call("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(address))
        return value.value

    def is_managed(self, address: int) -> bool:
        """True if it is managed (unified) memory."""
        return bool(self._attribute(ctypes.c_uint, _IS_MANAGED, address))

    def is_host(self, address: int) -> bool:
        """True if it is page-locked host memory."""
        if self.is_managed(address):
            return False
        return bool(self._attribute(ctypes.c_uint, _MEMORY_TYPE, address) == _MEMORY_HOST)

    @contextmanager
    def _context_of(self, address: int) -> Iterator[None]:
        try:
            context = self._attribute(ctypes.c_void_p, _CONTEXT, address)
        except RuntimeError:
            context = None
        primary = None
        if not context:  # memory of a stream-ordered pool belongs to a device, not to a context
            primary = ctypes.c_int(self._attribute(ctypes.c_int, _DEVICE, address))
            handle = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), primary)
            context = handle.value
        try:
            self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            if primary is not None:
                self._call("cuDevicePrimaryCtxRelease_v2", primary)

    def synchronize(self, stream: int, address: int) -> None:
        """Waits until all that was submitted to a stream is done; for the default streams, those of the memory's."""
        with self._context_of(address):
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def read(self, address: int, size: int) -> bytes:
        """A copy of device memory."""
        result = ctypes.create_string_buffer(size)
        with self._context_of(address):
            self._call("cuMemcpyDtoH_v2", result, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return result.raw

    def write(self, address: int, data: bytes) -> None:
        """Copies to device memory."""
        with self._context_of(address):
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
            # The call may return when it has read the data; other streams must not see the memory before it is there.
            self._call("cuStreamSynchronize", ctypes.c_void_p(LEGACY_STREAM))


@functools.cache
def driver() -> Driver:
    """The CUDA driver.

    Raises:
        RuntimeError: there is none, or no device.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"CUDA memory needs the CUDA driver, which cannot be loaded: {error}") from error
    return Driver(library)
