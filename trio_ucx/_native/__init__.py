"""Loads UCX, checks that it fits, and imports the compiled module. Nothing else in the package does any of the three.

``lib`` and ``ffi`` are the compiled module's; :data:`ucx` says which UCX they run on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from ._types import FFI, Lib

#: The UCX that works for us; older ones lack parts of the API that the C sources use.
MINIMUM_UCX = (1, 13)


@attrs.frozen
class UCXLibrary:
    """The UCX library in use.

    Attributes:
        version: its version at run time, ``(major, minor, release)``.
        compiled_version: ``(major, minor)`` of the headers that trio_ucx was compiled against.
        file: the path of the loaded ``libucp``.
        system: whether it is the system's rather than the PyPI wheel's.
        may_patch: whether it may patch functions of the C library, for its memory hooks.
    """

    version: tuple[int, int, int]
    compiled_version: tuple[int, int]
    file: str
    system: bool
    may_patch: bool

    @property
    def release(self) -> str:
        """The version at run time as UCX writes it: ``"1.22.0"``, for instance."""
        return ".".join(map(str, self.version))


#: UCX's options while it is loaded, unless the user chose others. With its own defaults it would install handlers for
#: SIGSEGV, SIGHUP and others, and print to stdout. (For its log from then on see ``log.c``.)
_WHILE_LOADING = {"UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "UCX_LOG_FILE": "stderr"}
#: UCX patches eight functions of the C library while it is loaded, and waits 50 ms at each for other threads that may
#: be in the middle of it. With one thread there is nothing to wait for.
_WITH_ONE_THREAD = {"UCX_MEM_BISTRO_GRACE_DURATION": "0"}
#: Where UCX may not patch them, it would write two lines to stdout. (Of the other modes, "reloc" crashes.)
MEMORY_HOOKS = "UCX_MEM_MMAP_HOOK_MODE"


@contextlib.contextmanager
def _unobtrusive() -> Iterator[None]:
    """While UCX is loaded in this block, it has no effect on the process. Restores the environment."""
    options = _WHILE_LOADING | (_WITH_ONE_THREAD if _has_one_thread() else {})
    if not _may_patch():
        options |= {MEMORY_HOOKS: "none"}
    before = {name: os.environ.get(name) for name in options}
    for name, value in options.items():
        if not before[name]:
            os.environ[name] = value
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


@functools.cache
def _may_patch() -> bool:
    """True if this process may have memory that is writable and executable."""
    flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    try:
        mmap.mmap(-1, mmap.PAGESIZE, flags, access).close()
    except OSError:  # a seccomp filter, PR_SET_MDWE or SELinux
        return False
    return True


def _has_one_thread() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _system_wanted() -> bool | None:
    choice = os.environ.get("TRIO_UCX_SYSTEM_UCX")
    return None if choice is None else choice.lower() not in ("", "0", "no", "false")


#: What helps if something else has loaded a UCX that does not fit.
_IMPORT_FIRST = (
    "Import trio_ucx before the module that loads that UCX (such as mpi4py.MPI), or take it out of LD_PRELOAD"
)


class _Place(ctypes.Structure):
    """What has an address: a file and a symbol (``Dl_info``)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _loaded_before() -> Path | None:
    """Returns the libucs that something else has loaded before, such as MPI, or LD_PRELOAD; None if nothing has.

    Whatever is loaded later binds to it, because its symbols are global, or because the libraries of every UCX have
    the same sonames.
    """
    for name, mode in ((None, 0), ("libucs.so.0", os.RTLD_NOLOAD)):
        with contextlib.suppress(OSError, AttributeError):
            function = ctypes.CDLL(name, mode).ucs_status_string
            place = _Place()
            ctypes.CDLL(None).dladdr(function, ctypes.byref(place))
            return Path(os.fsdecode(place.file))
    return None


def _preload_rest(libucs: Path) -> None:
    """Opens the libucp that belongs to the libucs that is loaded; another one does not fit.

    Raises:
        ImportError: there is none.
    """
    try:
        ctypes.CDLL(str(libucs.with_name(libucs.name.replace("libucs", "libucp"))))
    except OSError as error:
        raise ImportError(
            f"this process has loaded {libucs}, without a libucp that fits: {error}. {_IMPORT_FIRST}"
        ) from error


#: Variables of UCX's log. If UCX cannot use one of them, it ends the process while it is being loaded.
_LOG = ("UCX_LOG_FILE", "UCX_LOG_FILE_SIZE", "UCX_LOG_FILE_ROTATE")


def _try_log(libucs: str) -> None:
    """Loads UCX in a child process first, if the user has set a variable of its log.

    The child runs ``true``, not Python: where Python is embedded, ``sys.executable`` is another program, or missing. If
    it cannot be started, or cannot load UCX, nothing is tried.

    Raises:
        ImportError: UCX has ended the child; the message has UCX's reason.
    """
    values = {name: os.environ.get(name) for name in _LOG}
    chosen = {name: value for name, value in values.items() if value and value != _WHILE_LOADING.get(name)}
    if not chosen:
        return
    if "UCX_LOG_FILE" in chosen:  # the child opens the file that we shall open
        program = os.path.basename(os.path.realpath("/proc/self/exe"))
        chosen["UCX_LOG_FILE"] = chosen["UCX_LOG_FILE"].replace("%p", str(os.getpid())).replace("%e", program)
    folder, file = os.path.split(libucs)  # apart, because LD_PRELOAD cannot hold a path with a space
    path = ":".join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
    loader = {"LD_PRELOAD": file} | ({"LD_LIBRARY_PATH": path} if path else {})
    try:
        child = subprocess.run(
            ["true"], env={**os.environ, **chosen, **loader}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return
    if child.returncode < 0:
        reason = re.search(r"\.c:\d+ +(?:Fatal: )?(.+)", child.stderr.decode(errors="replace"))
        raise ImportError(
            f"UCX would end this process with {', '.join(f'{name}={values[name]}' for name in chosen)}: "
            f"{'it gives no reason' if reason is None else reason[1].strip()}. Set another value, or unset the variable"
        )


def _preload_wheel() -> None:
    """Opens the PyPI wheel's libraries by their full paths, so that ours binds to them by soname."""
    try:
        import libucx
    except ImportError as error:
        raise ImportError(
            "trio_ucx needs a UCX library and found none: install libucx-cu12 (pip install libucx-cu12), or set "
            "TRIO_UCX_SYSTEM_UCX=1 to use the system's libucp"
        ) from error
    # libucx.load_library() opens the same files, but in some releases prefers the system's.
    files = [str(Path(libucx.__file__).with_name("lib") / name) for name in ("libucs.so", "libuct.so", "libucp.so")]
    _try_log(files[0])
    for file in files:
        ctypes.CDLL(file)


def _preload_system() -> None:
    """Opens the system's library, so that ours binds to it by soname."""
    _try_log("libucs.so.0")
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError as error:
        raise ImportError(
            f"TRIO_UCX_SYSTEM_UCX asks for the system's UCX, which does not load: {error}. Install it (libucx-dev or "
            "ucx), or unset the variable and install libucx-cu12"
        ) from error


def _load() -> tuple[Any, Any, UCXLibrary]:
    wanted = _system_wanted()
    # Not said: the choice that was made at build time holds.
    system = _built_for_system() if wanted is None else wanted
    before = _loaded_before()
    with _unobtrusive():
        if before is not None:
            _preload_rest(before)
        elif system:
            _preload_system()
        else:
            _preload_wheel()
        try:
            _ucx = importlib.import_module(f"{__name__}._ucx")
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError):
                raise ImportError(_compiled_module_missing()) from error
            if before is not None:
                raise ImportError(
                    f"trio_ucx does not work with {before}, which this process has loaded before: {error}. "
                    f"{_IMPORT_FIRST}"
                ) from error
            where = "the system's UCX" if system else "libucx-cu12"
            raise ImportError(f"trio_ucx's compiled module does not load with {where}: {error}") from error
    lib, ffi = _ucx.lib, _ucx.ffi
    numbers = ffi.new("unsigned[3]")
    lib.tu_library_version(numbers, numbers + 1, numbers + 2)
    version = (numbers[0], numbers[1], numbers[2])
    lib.tu_compiled_version(numbers, numbers + 1)
    compiled = (numbers[0], numbers[1])
    file = os.fsdecode(ffi.string(lib.tu_library_file()))
    library = UCXLibrary(version, compiled, file, Path(file).parent.parent.name != "libucx", _may_patch())
    check_versions(library, None if before is None else _IMPORT_FIRST)
    if before is not None and wanted not in (None, library.system):
        raise ImportError(
            f"TRIO_UCX_SYSTEM_UCX asks for another UCX than {file}, which this process has loaded before. "
            f"{_IMPORT_FIRST}, or unset the variable"
        )
    lib.tu_close_on_exec()
    lib.tu_follow_routes()
    if not os.environ.get("UCX_LOG_FILE"):  # else the user has chosen where the lines go
        lib.tu_log_begin()
    return lib, ffi, library


def _compiled_module_missing() -> str:
    """Returns what to do when this folder has no compiled module."""
    here = Path(__file__).parent
    for folder in map(Path, sys.path):
        if any(folder.glob("trio_ucx/_native/_ucx.*")):
            return (
                f"trio_ucx is installed in {folder}, but Python has found the source tree {here.parents[1]} first, "
                "which has no compiled module: start Python in another directory, or install with pip install -e ."
            )
    return f"{here} has no compiled module: install trio_ucx with pip install ."


def _built_for_system() -> bool:
    """True if the compiled module says so (``library.c``), without loading it (and with it a UCX)."""
    from importlib.util import find_spec

    spec = find_spec(f"{__name__}._ucx")
    if spec is None or spec.origin is None:
        return False
    with open(spec.origin, "rb") as file:
        return b"trio_ucx was built for the system" in file.read()


def check_versions(library: UCXLibrary, advice: str | None = None) -> None:
    """Refuses a UCX of a wrong version.

    Args:
        advice: how to get another one; None: by installing it.

    Raises:
        ImportError: UCX is too old, or of another major version than the headers that trio_ucx was compiled with.
    """
    major = library.compiled_version[0]
    if library.version[:2] < MINIMUM_UCX or library.version[0] != major:
        advice = advice or (
            "Install another UCX (pip install --upgrade libucx-cu12), or set TRIO_UCX_SYSTEM_UCX="
            f"{'0' if library.system else '1'} to use the other one that is installed"
        )
        raise ImportError(
            f"{library.file} is UCX {library.release}, and trio_ucx, which was compiled for UCX {major}, needs "
            f"{'.'.join(map(str, MINIMUM_UCX))} or a later one of this major version. {advice}"
        )


lib: Lib
ffi: FFI
ucx: UCXLibrary
lib, ffi, ucx = _load()
