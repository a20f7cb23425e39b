"""Folders that only this user can enter, in places where everybody can write, such as /tmp."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Where every user can make a folder, in memory.
SHARED = Path("/dev/shm")
#: Where this exists, systemd's logind empties SHARED and XDG_RUNTIME_DIR of what belongs to a user who has logged out
#: (RemoveIPC=), also while programs of the user go on; not of system users, whose numbers are below 1000.
SYSTEMD, FIRST_USER = Path("/run/systemd/system"), 1000
#: The inode of the initial user namespace (PROC_USER_INIT_INO). In others, users have other numbers.
_INITIAL = 0xEFFFFFFD


def private_folder(usable: Callable[[Path], object] = lambda folder: None) -> Path | None:
    """Returns a folder of this user, which is made if it is missing; None if no place has a usable one.

    Args:
        usable: raises OSError for an unusable folder.
    """
    namespace = os.stat("/proc/self/ns/user").st_ino
    name = f"trio_ucx-{os.geteuid()}" + ("" if namespace == _INITIAL else f"-{namespace}")
    candidates = [SHARED / name, Path(tempfile.gettempdir(), name)]
    if (runtime := os.environ.get("XDG_RUNTIME_DIR", "")).startswith("/"):
        candidates.insert(1, Path(runtime, "trio_ucx"))
    if os.geteuid() >= FIRST_USER and SYSTEMD.is_dir():
        candidates.insert(0, candidates.pop())
    for folder in candidates:
        with suppress(OSError):
            if make_private(folder):
                usable(folder)
                return folder
    return None


def make_private(folder: Path) -> bool:
    """Makes a folder if it is missing. True if only this user, and root, can enter it or replace it.

    Raises:
        OSError: it cannot be made.
    """
    above = folder.parent.stat()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # the umask may have taken something away
    found, ours = folder.lstat(), os.geteuid()
    stays = above.st_uid in (0, ours) and (not above.st_mode & 0o022 or bool(above.st_mode & stat.S_ISVTX))
    return stays and stat.S_ISDIR(found.st_mode) and found.st_uid == ours and not found.st_mode & 0o077
