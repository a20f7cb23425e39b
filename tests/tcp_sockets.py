"""The TCP sockets of this process, UCX's among them."""

from __future__ import annotations

import os
import socket
import struct

#: What SO_MEMINFO tells, in 32-bit words (<linux/sock_diag.h>).
SO_MEMINFO, SNDBUF, WMEM_QUEUED, MEMINFO_WORDS = 55, 3, 5, 9


def meminfo(one: socket.socket) -> tuple[int, ...]:
    words = one.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 4 * MEMINFO_WORDS)
    return struct.unpack(f"{MEMINFO_WORDS}I", words)


def is_full(one: socket.socket) -> bool:
    info = meminfo(one)
    return info[WMEM_QUEUED] >= info[SNDBUF]


def tcp_sockets() -> list[socket.socket]:
    """Copies of this process's connected TCP sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or the descriptor with which the folder was read
        try:
            one.getpeername()
            is_tcp = one.family == socket.AF_INET and one.type == socket.SOCK_STREAM
        except OSError:
            is_tcp = False
        if is_tcp:
            found.append(one)
        else:
            one.close()
    return found
