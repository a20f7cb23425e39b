"""Unix sockets: their addresses, and listening, which replaces a stale socket and removes the path at the end."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable

import trio

PREFIX = "unix:"


def unix_path(address: object) -> str | None:
    """Returns the path of ``"unix:/path"`` or ``("unix:/path", 0)``; None for addresses of other kinds.

    Raises:
        ValueError: the path is missing or contains a null character; or there is a port.
    """
    port: object = 0
    if isinstance(address, (tuple, list)) and len(address) == 2:
        address, port = address
    if not isinstance(address, str) or not address.startswith(PREFIX):
        return None
    path = address[len(PREFIX) :]
    if port != 0:
        raise ValueError(f"a Unix socket has no port: {port!r}")
    if not path or "\0" in path:
        raise ValueError(f"{address!r} is not an address: write 'unix:/path/of/the/socket'")
    return path


def open_unix_listener(path: str, backlog: int) -> tuple[trio.SocketListener, Callable[[], None]]:
    """Listens at a path. Replaces a stale socket there, as a server that died leaves it behind.

    Returns:
        The listener, and a function that removes the path if it still belongs to the listener.

    Raises:
        OSError: another process listens there; something other than a socket is there; the path is too long, or may not
            be written.
    """
    bare = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            _remove_if_stale(path)
        try:
            bare.bind(path)
        except OSError as error:
            raise OSError(error.errno or errno.EINVAL, f"listening at unix:{path}: {error.strerror or error}") from None
        bare.listen(backlog)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bare))
    except BaseException:
        bare.close()
        raise
    inode = os.stat(path).st_ino

    def remove() -> None:
        try:
            if os.stat(path).st_ino == inode:
                os.unlink(path)
        except OSError:
            pass

    return listener, remove


def _remove_if_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.EEXIST, f"listening at unix:{path}: something other than a socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, f"listening at unix:{path}: another process listens there already")
