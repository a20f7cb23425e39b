"""Folders that only this user can enter, in places where everybody can write, such as /tmp."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

#: Where every user can make a folder, in memory.
SHARED = Path("/dev/shm")


def private_folder() -> Path | None:
    """Returns a folder of this user, which is made if it is missing; None if other users are in the way everywhere."""
    name = f"trio_ucx-{os.geteuid()}"
    candidates = [SHARED / name, Path(tempfile.gettempdir(), name)]
    if (runtime := os.environ.get("XDG_RUNTIME_DIR", "")).startswith("/"):
        candidates.insert(1, Path(runtime, "trio_ucx"))
    for folder in candidates:
        with suppress(OSError):
            if make_private(folder):
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
    found, ours = folder.lstat(), os.geteuid()
    stays = above.st_uid in (0, ours) and (not above.st_mode & 0o022 or bool(above.st_mode & stat.S_ISVTX))
    return stays and stat.S_ISDIR(found.st_mode) and found.st_uid == ours and not found.st_mode & 0o077
