"""Compiles trio_ucx's module for ARM64, by the build_ffi.py of the current folder: python cross.py ROOT (a guest's)."""

import os
import subprocess
import sys
import types
from pathlib import Path

root = Path(sys.argv[1])
home = root / "venv/lib/python3.11/site-packages/libucx"
libucx = types.ModuleType("libucx")  # that one cannot be imported here
libucx.__file__ = str(home / "__init__.py")
sys.modules["libucx"] = libucx
sys.path.insert(0, os.getcwd())
import build_ffi  # noqa: E402

ffi = build_ffi.make_builder()
_, _, _, options = ffi._assigned_source
ffi.emit_c_code("module.c")
command = ["aarch64-linux-gnu-gcc", "-g", "-fPIC", "-shared", "-DPy_LIMITED_API=0x030b0000", "-DNDEBUG"]
command += [f"-I{path}" for path in options["include_dirs"]]
command += ["-isystem", str(root / "usr/include/python3.11"), "-isystem", str(root / "usr/include")]
command += [f"-D{macro}={value}" for macro, value in options["define_macros"]]
command += [*options["extra_compile_args"], "module.c", *options["sources"], "-o", "trio_ucx/_native/_ucx.abi3.so"]
command += [*options["extra_link_args"], "-lucp", "-lucs", "-lpthread", "-ldl", f"-Wl,-rpath-link,{home / 'lib'}"]
sys.exit(subprocess.run(command, check=False).returncode)
