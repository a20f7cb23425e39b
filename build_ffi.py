"""Builds ``trio_ucx._native._ucx`` from the C sources in ``trio_ucx/_native``: the only build logic there is.

By default it compiles against the headers and libraries of the PyPI wheel ``libucx-cu12``. With
``TRIO_UCX_SYSTEM_UCX=1`` in the environment it uses the system's UCX instead (``pkg-config ucx``, or the compiler's
default search paths), for RDMA: the PyPI wheel has no InfiniBand transports.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from cffi import FFI

NATIVE = Path("trio_ucx", "_native")
ROOT = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
#: The core's compiled files.
SOURCES = [
    "library.c",
    "log.c",
    "context.c",
    "ring.c",
    "hooks.c",
    "extensions.c",
    "worker.c",
    "progress.c",
    "tag_inbox.c",
    "adaptive_poll.c",
    "arming.c",
    "operation.c",
    "sockaddr.c",
    "sockets.c",
    "imports.c",
    "close_on_exec.c",
    "routes.c",
    "blake2s.c",
    "key_gate.c",
    "keepalive.c",
    "private_segments.c",
    "wake_sockets.c",
    "endpoint.c",
    "listener.c",
    "query.c",
    "tag.c",
    "pacing.c",
    "long_messages.c",
    "strided.c",
    "active_messages.c",
    "stream.c",
    "link/queues.c",
    "link/worker.c",
    "link/sending.c",
    "link/grants.c",
    "link/messages.c",
    "link/receiving.c",
    "link/transfers.c",
    "link/link.c",
]
#: The extensions: by folder in ``NATIVE``, their compiled files. Those that come later use those before. A build has
#: those whose folders exist, and tells the core (``native.h``) their names.
EXTENSIONS = {
    "rma": [
        "memory.c",
        "order.c",
        "mapped.c",
        "direct.c",
        "copies.c",
        "requester.c",
        "parts.c",
        "gathered.c",
        "ranges.c",
        "owner.c",
        "transfer.c",
    ],
    "chain": ["build.c", "node.c", "post.c", "run.c", "expressions.c", "report.c", "crc32c.c"],
}

#: What C code may call in Python.
CALLBACKS = 'extern "Python" int64_t tu_python_outlet(void *context, uint32_t number, const void *data, size_t length);'

#: The module parses what peers send. (Some compilers set the second themselves, hence -U.)
HARDENING = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]

# cffi's own part of the translation unit does not compile cleanly under -Wextra; ours does.
PREAMBLE = """
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wcast-function-type"
#pragma GCC diagnostic ignored "-Wsign-compare"
"""


def use_system_ucx() -> bool:
    return os.environ.get("TRIO_UCX_SYSTEM_UCX", "0").lower() not in ("", "0", "no", "false")


def pkg_config(option: str) -> list[str]:
    try:
        answer = subprocess.run(["pkg-config", option, "ucx"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return shlex.split(answer.stdout)


def for_development() -> list[str]:
    """Warnings are errors, and assertions are checked. A user's compiler may have warnings that ours does not know."""
    return ["-Werror", "-UNDEBUG"] if os.environ.get("TRIO_UCX_WERROR") == "1" else []


def ucx_location() -> tuple[list[str], list[str]]:
    """Returns (compiler arguments, link arguments).

    The module gets no run-time search path: trio_ucx/_native/__init__.py opens the right library before it.
    """
    if use_system_ucx():
        includes = [word[2:] for word in pkg_config("--cflags-only-I")]
        return [word for path in includes for word in ("-isystem", path)], pkg_config("--libs-only-L")
    try:
        import libucx
    except ImportError:
        raise SystemExit(
            "trio_ucx: building it needs UCX's headers: install libucx-cu12 (pip does so by itself unless it is told "
            "--no-build-isolation), or set TRIO_UCX_SYSTEM_UCX=1 to build with the system's"
        ) from None

    home = Path(libucx.__file__).parent
    return ["-isystem", str(home / "include")], [f"-L{home / 'lib'}"]


def make_builder() -> FFI:
    compiler_arguments, link_arguments = ucx_location()
    ffi = FFI()
    extensions = [folder for folder in EXTENSIONS if (ROOT / NATIVE / folder).exists()]
    sources = [*SOURCES, *(f"{folder}/{source}" for folder in extensions for source in EXTENSIONS[folder])]
    for folder in ("", "link", *extensions):
        ffi.cdef((ROOT / NATIVE / folder / "cdef.h").read_text())
    ffi.cdef(CALLBACKS)
    headers = ("native.h", *(f"{name}/cdef.h" for name in ("link", *extensions)))
    includes = "".join(f'#include "{header}"\n' for header in headers)
    ffi.set_source(
        "trio_ucx._native._ucx",
        includes + PREAMBLE,
        sources=[str(NATIVE / source) for source in sources],
        define_macros=[
            ("TU_EXTENSIONS", " ".join(f"TU_EXTENSION({folder})" for folder in extensions)),
            ("TU_UCX", '"the system"' if use_system_ucx() else '"libucx"'),
        ],
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / NATIVE).rglob("*.h"))],
        include_dirs=[str(NATIVE)],
        libraries=["ucp", "ucs", "ucm"],
        extra_compile_args=[
            *("-std=gnu11", "-O2", "-Wall", "-Wextra"),
            *(*HARDENING, *for_development(), *compiler_arguments),
        ],
        extra_link_args=[*link_arguments, "-Wl,-z,relro,-z,now"],
    )
    return ffi


if __name__ == "__main__":
    make_builder().compile(verbose=True)
