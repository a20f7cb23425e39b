"""Programs in C, compiled against the UCX in use."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trio_ucx import ucp


def flags() -> list[str]:
    """The compiler's options for the UCX in use."""
    if ucp.library().system:
        return ["-lucp", "-lucs"]
    home = Path(ucp.library().file).parent.parent
    return [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lucp", "-lucs"]


def compiled(source: Path, folder: Path, *options: str) -> Path:
    """Compiles a program into this folder; skips the test where there is no compiler, or no header of UCX."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    probe = [compiler, "-E", "-x", "c", "-include", "ucp/api/ucp.h", os.devnull, "-o", os.devnull, *flags()]
    if subprocess.run(probe, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("no headers of UCX")
    target = folder / source.stem
    done = subprocess.run(
        [compiler, *options, "-o", target, source, *flags()], capture_output=True, timeout=60, text=True
    )
    assert done.returncode == 0, done.stderr
    return target
