"""The plain loops in C that request chains are compared with: compiled when they are needed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(__file__).with_suffix(".c")

DECLARATIONS = """
int64_t loop_follow(uintptr_t worker, uintptr_t endpoint, uintptr_t rkey, uint64_t base, size_t size, uint64_t start,
                    uint64_t key, int64_t limit, uint64_t *place);
int64_t loop_pairs(uintptr_t worker, uintptr_t endpoint, uintptr_t rkey, uint64_t base, uint64_t count, uint64_t value,
                   const char *data, int flush_each, uint64_t *found);
int loop_serve(uintptr_t worker, uintptr_t flag, uint64_t value, double seconds);
"""

ffi = FFI()
ffi.cdef(DECLARATIONS)


def build(folder: Path) -> Path:
    """Compiles them against the headers that trio_ucx was compiled against."""
    from build_ffi import NATIVE, ucx_location

    compiling, linking = ucx_location()
    made = folder / "loops.so"
    # -l: what trio_ucx has loaded is used, by its soname.
    options = ["-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-DTU_EXTENSIONS=", f"-I{ROOT / NATIVE}"]
    command = ["cc", *options, *compiling, str(SOURCE)]
    done = subprocess.run([*command, "-o", str(made), *linking, "-lucp"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the loops in C were not compiled: {done.stderr.strip()[-300:]}")
    return made


def load(made: str) -> Any:
    """After trio_ucx, which loads UCX."""
    return ffi.dlopen(made)


def number(pointer: object) -> int:
    """A pointer of another ``ffi``, as the loops take it."""
    from trio_ucx._native import ffi as theirs

    return int(theirs.cast("uintptr_t", pointer))
