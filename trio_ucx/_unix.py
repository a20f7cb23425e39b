"""Listening at Unix sockets: binds the path, replaces a socket that nobody listens at, removes the path at the end."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable

import trio

PREFIX = "unix:"


def unix_path(address: object) -> str | None:
    """The path of ``"unix:/path"`` or ``("unix:/path", 0)``; None for addresses of other kinds.

    Raises:
        ValueError: there is no path, or it contains a null character; there is a port.
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
        raise ValueError(f"{address!r} is no address: write 'unix:/path/of/the/socket'")
    return path


def open_unix_listener(path: str, backlog: int) -> tuple[trio.SocketListener, Callable[[], None]]:
    """Listens at a path. A socket that nobody listens at any more is replaced, as servers that died leave them behind.

    Returns:
        The listener, and a function that removes the path, if it is still ours.

    Raises:
        OSError: somebody listens there, or the path is of something else, too long, or not ours to write.
    """
    bare = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            _remove_if_dead(path)
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


def _remove_if_dead(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.EEXIST, f"listening at unix:{path}: there is something else than a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, f"listening at unix:{path}: somebody listens there already")
