"""Folders that only this user can enter, in places where everybody can write, such as /tmp."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Where every user can make a folder, in memory.
SHARED = Path("/dev/shm")
#: Where this exists, systemd's logind empties SHARED and XDG_RUNTIME_DIR of what belongs to a user who has logged out
#: (RemoveIPC=), also while programs of the user go on; not of system users, whose numbers are below 1000.
SYSTEMD, FIRST_USER = Path("/run/systemd/system"), 1000
#: The user numbers of this user namespace: "inside outside count" a line, from inside = outside = 0 in the first one.
UID_MAP = Path("/proc/self/uid_map")
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


def private_folder(usable: Callable[[Path], object] = lambda folder: None) -> Path | None:
    """Returns a folder of this user, which is made if it is missing; None if no place has a usable one.

    Args:
        usable: raises OSError for an unusable folder.
    """
    name = f"trio_ucx-{_outside(os.geteuid())}"  # the root of a container is not the machine's
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
    alone = not above.st_mode & 0o022 or bool(above.st_mode & stat.S_ISVTX)
    stays = alone and above.st_uid in (0, ours, _machine_root())
    return stays and stat.S_ISDIR(found.st_mode) and found.st_uid == ours and not found.st_mode & 0o077


def _outside(user: int) -> int:
    """Returns the number that a user has outside this user namespace."""
    return next((outside + user - inside for inside, outside, count in _numbers() if 0 <= user - inside < count), user)


def _machine_root() -> int:
    """Returns the owner that files of the machine's root seem to have in this user namespace, such as /tmp."""
    mapped = [inside for inside, outside, _count in _numbers() if outside == 0]
    return mapped[0] if mapped else overflow_uid()


@cache
def overflow_uid() -> int:
    """Returns the number that stands for all users that a user namespace does not have."""
    try:
        return int(OVERFLOW_UID.read_text())
    except OSError:  # without /proc/sys: what Linux uses unless an administrator has changed it
        return 65534


def _numbers() -> list[list[int]]:
    return [[int(number) for number in line.split()] for line in UID_MAP.read_text().splitlines()]
