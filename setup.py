"""What pyproject.toml cannot say: the compiled module, and which UCX is installed with it.

pip has no default extras, so libucx-cu12 is an ordinary dependency, which the environment of the build can replace.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_ffi import use_system_ucx

#: The UCX that is installed with trio_ucx, by the value of TRIO_UCX_LIBUCX.
LIBUCX = {"cu12": ["libucx-cu12>=1.21"], "cu13": ["libucx-cu13>=1.21"], "none": []}


def libucx() -> list[str]:
    choice = os.environ.get("TRIO_UCX_LIBUCX") or ("none" if use_system_ucx() else "cu12")
    if choice not in LIBUCX:
        raise SystemExit(f"trio_ucx: TRIO_UCX_LIBUCX={choice}: it must be one of {', '.join(LIBUCX)}")
    return LIBUCX[choice]


def refuse_free_threading() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise SystemExit(
            f"trio_ucx: {sys.executable} is a free-threaded Python, for which trio_ucx is not made: "
            "install it with a CPython that has the GIL"
        )


class Build(build_ext):
    def run(self) -> None:
        compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
        header = Path(sysconfig.get_path("include"), "Python.h")
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"trio_ucx: building it needs a C compiler, and there is no {compiler} here: install one "
                "(Debian and Ubuntu: apt install gcc; Fedora: dnf install gcc), or name it in CC"
            )
        if not header.exists():
            raise SystemExit(
                f"trio_ucx: building it needs Python's headers, and {header.name} is not in {header.parent}: install "
                "them (Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
            )
        super().run()

    def build_extensions(self) -> None:
        """Builds without the run-time search path that Python's own flags may have: a folder of this machine."""
        linker = self.compiler.linker_so
        wanted = os.environ.get("LDFLAGS", "").split()
        linker[:] = [word for word in linker if word in wanted or not word.startswith(("-Wl,-rpath", "-Wl,-R"))]
        super().build_extensions()


refuse_free_threading()
setup(
    cffi_modules=["build_ffi.py:make_builder"],
    cmdclass={"build_ext": Build},
    install_requires=["trio>=0.29", "cffi>=1.16", "attrs>=23.2", "outcome>=1.3", *libucx()],
)
