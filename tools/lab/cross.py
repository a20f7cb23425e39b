"""Compiles trio_ucx's module for ARM64, by the build_ffi.py of the current folder: python cross.py ROOT.

ROOT is the guest's; PYTHONPATH has its libucx.
"""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

root = Path(sys.argv[1])
home = root / "venv/lib/python3.11/site-packages/libucx"
libucx = types.ModuleType("libucx")  # that one cannot be imported here
libucx.__file__ = str(home / "__init__.py")
sys.modules["libucx"] = libucx
spec = importlib.util.spec_from_file_location("build_ffi", "build_ffi.py")
assert spec is not None and spec.loader is not None
build_ffi = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_ffi)

ffi = build_ffi.make_builder()
_, _, _, options = ffi._assigned_source
ffi.emit_c_code("module.c")
command = ["aarch64-linux-gnu-gcc", "-g", "-fPIC", "-shared", "-DPy_LIMITED_API=0x030b0000", "-DNDEBUG"]
command += [f"-I{path}" for path in options["include_dirs"]]
command += [f"-D{macro}={value}" for macro, value in options["define_macros"]]
command += ["-isystem", str(root / "usr/include/python3.11"), "-isystem", str(root / "usr/include")]
command += [*options["extra_compile_args"], "module.c", *options["sources"], "-o", "trio_ucx/_native/_ucx.abi3.so"]
command += [*options["extra_link_args"], "-lucp", "-lucs", "-lpthread", "-ldl", f"-Wl,-rpath-link,{home / 'lib'}"]
sys.exit(subprocess.run(command, check=False).returncode)
