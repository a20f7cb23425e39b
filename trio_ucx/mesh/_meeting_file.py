"""The file in which rank 0 says where it listens, and with which key.

Its folder may be one where everybody can write, such as /tmp. Whoever can write the file can pass for rank 0, so that
only this user and root are trusted. Nothing here blocks, whatever is at the path.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from .._util.text import printable

#: Bytes. What rank 0 writes is much shorter.
_LONGEST = 2**20


def write(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read. Other ranks see all of it, or nothing.

    Raises:
        PermissionError: another user's file is there, and cannot be replaced.
        OSError: it cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, PermissionError):
            _check(path, path.lstat(), os.geteuid())
        raise


def read(path: Path) -> bytes:
    """Returns the content of the file.

    Raises:
        PermissionError: another user can have written it.
        OSError: it cannot be read.
    """
    _check(path, path.lstat(), 0, os.geteuid())
    with open(path, "rb", opener=_open) as file:
        _check(path, os.fstat(file.fileno()), 0, os.geteuid())  # it may be another one by now
        return file.read(_LONGEST)


def remove(path: Path, data: bytes) -> None:
    """Removes the file if its content is still ``data``."""
    with suppress(OSError):
        if read(path) == data:
            path.unlink()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _check(path: Path, found: os.stat_result, *users: int) -> None:
    """Refuses a file that others than these users can have written."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in users:
        problem = f"belongs to user {found.st_uid}"
    elif not stat.S_ISREG(found.st_mode):
        problem = "is not a regular file"
    elif mode & 0o022:
        problem = f"can be changed by other users (mode {mode:04o})"
    else:
        return
    raise PermissionError(
        errno.EPERM,
        f"{printable(str(path))} {problem}: ranks meet only at a file of their own user. Let them meet at a new file "
        "in a folder where only this user can write, such as file://$HOME/meeting",
    )
