"""Unix sockets: their addresses, and listening, which replaces a stale socket and removes the path at the end."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

import trio

PREFIX = "unix:"


def unix_path(address: object) -> str | None:
    """Returns the path of ``"unix:/path"`` or ``("unix:/path", 0)``; None for addresses of other kinds.

    Raises:
        ValueError: the path is missing, begins with ``//``, or contains a null character; or there is a port.
    """
    port: object = 0
    if isinstance(address, (tuple, list)) and len(address) == 2:
        address, port = address
    if not isinstance(address, str) or not address.startswith(PREFIX):
        return None
    path = address[len(PREFIX) :]
    if port != 0:
        raise ValueError(f"a Unix socket has no port: {port!r}")
    if path.startswith("//"):
        meant = f"{PREFIX}/{path.lstrip('/')}"
        raise ValueError(f"{address!r} has a scheme, which is no part of an address: write {meant!r}")
    if not path or "\0" in path:
        raise ValueError(f"{address!r} is not an address: write 'unix:/path/of/the/socket'")
    return path


def open_unix_listener(path: str, backlog: int) -> tuple[trio.SocketListener, Callable[[], None]]:
    """Listens at a path. Replaces a stale socket there, as a server that died leaves it behind.

    Returns:
        The listener, and a function that removes the path if it still belongs to the listener. Call it before the
        listener is closed: until then no other process gets the path, and the kernel does not reuse its inode number.

    Raises:
        OSError: another process has the path; something other than a socket is there; the path is too long, or may not
            be written.
    """
    bare = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            with suppress(FileNotFoundError):
                _remove_if_stale(path)
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
    """Removes a socket that no process has bound.

    It holds a lock: without one, two servers could find the same socket, and the second could remove what the first has
    bound in the meantime.
    """
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.EEXIST, "something other than a socket is there")
    taken = OSError(errno.EADDRINUSE, "another process has bound it already")
    lock = f"{path}.lock"
    with open(os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.stat(lock), os.fstat(file.fileno())):
                raise taken  # its holder has removed this file, and another process has made a new one
        except (BlockingIOError, FileNotFoundError):
            raise taken from None
        try:
            if _is_bound(path):
                raise taken
            os.unlink(path)
        finally:
            os.unlink(lock)


def _is_bound(path: str) -> bool:
    """True if a process has bound the socket at a path, listening yet or not.

    A datagram socket cannot be connected to it, so this does not disturb that process. Without a process the kernel
    refuses the connection; otherwise it says that the type is wrong (EPROTOTYPE).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:
                raise
    return True
