"""Imitates a writer to a worker's shared-memory queue that is killed in the middle of writing."""

from __future__ import annotations

import ctypes
import mmap
import os

from trio_ucx import ucp
from trio_ucx.ucp._quirks.address_layout import parse_worker_address

#: UCX marks with it that the reader sleeps (UCT_MM_IFACE_FIFO_HEAD_EVENT_ARMED). A writer clears it.
_ARMED = 1 << 63
#: Of a posix segment: a file in /proc, by the process and the descriptor (UCX's mm_posix.c).
_PID_BITS = 30
_CACHE_LINE = 64


def take_an_element(address: ucp.WorkerAddress, transport: str) -> None:
    """Takes the next element of a queue, as UCX's writers do first, and never fills it."""
    [where] = [
        interface_address[:8]
        for device in parse_worker_address(address.ucx).devices
        for name, interface_address in device.transports
        if name == transport
    ]
    segment = int.from_bytes(where, "little")
    start = _attach_sysv(segment) if transport == "sysv" else _attach_posix(segment)
    head = ctypes.c_uint64.from_address((start + _CACHE_LINE - 1) // _CACHE_LINE * _CACHE_LINE)
    head.value = (head.value & ~_ARMED) + 1


def _attach_sysv(segment: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    start: int = libc.shmat(segment, None, 0)
    assert start != 2**64 - 1, os.strerror(ctypes.get_errno())
    return start


_mapped: list[mmap.mmap] = []


def _attach_posix(segment: int) -> int:
    pid = segment & (1 << _PID_BITS) - 1
    descriptor = segment >> _PID_BITS & (1 << _PID_BITS) - 1
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
        _mapped.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    return ctypes.addressof(ctypes.c_char.from_buffer(_mapped[-1]))
