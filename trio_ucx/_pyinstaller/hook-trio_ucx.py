"""What PyInstaller does not find by itself: the compiled module, and the files of UCX's wheel, which dlopen() loads."""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs

hiddenimports = ["trio_ucx._native._ucx", "_cffi_backend"]
if find_spec("libucx") is not None:  # None: this trio_ucx uses the system's UCX
    hiddenimports.append("libucx")
    binaries = collect_dynamic_libs("libucx")
    datas = collect_data_files("libucx", excludes=["include", "share", "**/*.a", "**/*.la"])
