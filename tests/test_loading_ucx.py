"""Loading UCX: which library, whether its version fits, and its effects on the process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import trio_ucx
from trio_ucx import _native
from trio_ucx.ucp._memory.buffers import Pinned


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("version", "compiled", "fits"),
    [
        ((1, 22, 0), (1, 22), True),
        ((1, 22, 0), (1, 13), True),
        ((1, 13, 1), (1, 13), True),
        ((1, 13, 1), (1, 22), True),
        ((1, 12, 0), (1, 12), False),
        ((2, 0, 0), (1, 22), False),
    ],
)
def test_a_ucx_that_does_not_fit_is_refused(
    version: tuple[int, int, int], compiled: tuple[int, int], fits: bool
) -> None:
    library = attrs.evolve(_native.ucx, version=version, compiled_version=compiled, file="/some/libucp.so.0")
    if fits:
        _native.check_versions(library)
    else:
        with pytest.raises(ImportError) as caught:
            _native.check_versions(library)
        for word in ("/some/libucp.so.0", ".".join(map(str, version)), f"compiled for UCX {compiled[0]}"):
            assert word in str(caught.value)


def test_the_library_is_the_one_that_it_says() -> None:
    code = (
        "import json, trio_ucx._native as n; maps = open('/proc/self/maps').read();"
        "print(json.dumps([n.ucx.file, sorted({l.split()[-1] for l in maps.splitlines() if 'libucp' in l})]))"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    file, mapped = json.loads(result.stdout)
    assert [os.path.realpath(path) for path in mapped] == [os.path.realpath(file)]


def test_import_leaves_signals_and_the_environment_alone() -> None:
    code = """
import os
def state():
    status = open("/proc/self/status").read()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn"))]
    return [mask % 2**31 for mask in masks], dict(os.environ)  # without those that the C library itself uses
before = state()
import trio_ucx._native
after = state()
assert before == after, (before, after)
from trio_ucx import ucp
with ucp.open_context({"TLS": "tcp"}):
    pass
assert state() == before, (before, state())
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"UCX_LOG_FILE": "/nonexistent/ucx.%h.log"}, "UCX_LOG_FILE=/nonexistent/ucx.%h.log: failed to open '/non"),
        ({"UCX_LOG_FILE_SIZE": "10"}, "UCX_LOG_FILE_SIZE=10: the maximal log file size"),
        ({"UCX_LOG_FILE_ROTATE": "-1"}, "UCX_LOG_FILE_ROTATE=-1: the log file rotate"),
    ],
)
def test_a_log_that_ucx_cannot_have(environment: dict[str, str], reason: str) -> None:
    """UCX ends the process."""
    result = run("import trio_ucx", **environment)
    assert result.returncode == 1
    assert f"ImportError: UCX would end this process with {reason}" in result.stderr


@pytest.mark.parametrize("executable", ["''", "'/bin/false'", "None"])
def test_a_log_that_ucx_cannot_have_in_an_embedded_python(executable: str) -> None:
    """Where ``sys.executable`` is no Python."""
    result = run(f"import sys; sys.executable = {executable}; import trio_ucx", UCX_LOG_FILE="/nonexistent/ucx.log")
    assert result.returncode == 1
    assert "ImportError: UCX would end this process with UCX_LOG_FILE=/nonexistent/ucx.log" in result.stderr


def test_a_log_where_no_child_process_can_start(tmp_path: Path) -> None:
    result = run("import os; os.environ['PATH'] = '/nonexistent'; import trio_ucx", UCX_LOG_FILE=f"{tmp_path}/log")
    assert result.returncode == 0, result.stderr
    assert os.listdir(tmp_path) == ["log"]


def test_only_this_process_has_a_log(tmp_path: Path) -> None:
    """UCX is tried in another process first, which has another number, and runs another program."""
    result = run("import os, trio_ucx; print(os.getpid())", UCX_LOG_FILE=f"{tmp_path}/%e-%p.log")
    assert os.listdir(tmp_path) == [f"{Path(sys.executable).resolve().name}-{result.stdout.strip()}.log"]


def test_loading_waits_for_other_threads_only() -> None:
    """UCX's wait for threads that may be in functions which it patches is left out while there is one thread only."""
    code = """
import os, threading
import trio_ucx._native as native
NAME = "UCX_MEM_BISTRO_GRACE_DURATION"
with native._unobtrusive():
    alone = os.environ.get(NAME)
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
with native._unobtrusive():
    together = os.environ.get(NAME)
end.set()
thread.join()
print(alone, together, os.environ.get(NAME))
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0", "None", "None"]


def test_the_other_library_is_refused_or_works() -> None:
    """Asked for a UCX that it was not built for, the import works if that one fits, and else says what to do."""
    other = "0" if _native.ucx.system else "1"
    result = run("import trio_ucx._native as n; print(n.ucx.system, n.ucx.file)", TRIO_UCX_SYSTEM_UCX=other)
    if result.returncode == 0:
        system, file = result.stdout.split()
        assert (system == "True") == (other == "1") == ("/libucx/" not in file)
    else:
        assert "ImportError" in result.stderr
        assert "UCX" in result.stderr.splitlines()[-1]


#: A Connection carries a message; then it says which libucp the process has.
EXCHANGE = """
import trio, trio_ucx.testing
from trio_ucx import ucp
async def main():
    async with trio_ucx.testing.open_connection_pair(host="127.0.0.1") as (a, b), trio.open_nursery() as nursery:
        nursery.start_soon(a.send, bytes(300_000))
        assert len(await b.receive()) == 300_000
trio.run(main)
print(ucp.library().file)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libucp" in line})
"""


@pytest.mark.parametrize("library", ["libucs", "libucp"])
@pytest.mark.parametrize("scope", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_a_ucx_that_is_loaded_already_is_used(library: str, scope: str, tmp_path: Path) -> None:
    """The libraries of every UCX have the same sonames, so a second UCX would bind to the first (MPI has one)."""
    other = copy_of_ucx(tmp_path)
    result = run(f"import ctypes; ctypes.CDLL('{other / library}.so.0', ctypes.{scope})\n{EXCHANGE}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(other / "libucp.so.0")] * 2


def copy_of_ucx(folder: Path) -> Path:
    """Copies the libraries of this UCX, as another package has its own."""
    target = folder / "other"
    target.mkdir()
    for name in ("libucm", "libucs", "libuct", "libucp"):
        shutil.copy(Path(_native.ucx.file).with_name(f"{name}.so.0"), target)
    return target


def test_a_ucx_that_is_loaded_already_and_does_not_fit(tmp_path: Path) -> None:
    other = copy_of_ucx(tmp_path)
    (other / "libucp.so.0").unlink()
    result = run(f"import ctypes; ctypes.CDLL('{other}/libucs.so.0'); import trio_ucx")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: this process has loaded {other}/libucs.so.0")
    assert "Import trio_ucx before" in last


def test_a_ucx_that_is_loaded_already_and_not_wanted(tmp_path: Path) -> None:
    other = copy_of_ucx(tmp_path)
    result = run(f"import ctypes; ctypes.CDLL('{other}/libucp.so.0'); import trio_ucx", TRIO_UCX_SYSTEM_UCX="0")
    assert result.returncode == 1
    assert f"asks for another UCX than {other}/libucp.so.0" in result.stderr.splitlines()[-1]


def test_source_tree_before_the_installed_package(tmp_path: Path) -> None:
    """After ``pip install .``, Python finds the checkout that it is started in, and not what was installed."""
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(
        Path(trio_ucx.__file__).parent, checkout / "trio_ucx", ignore=shutil.ignore_patterns("_ucx.*", "__pycache__")
    )
    module = site / "trio_ucx" / "_native" / "_ucx.abi3.so"
    module.parent.mkdir(parents=True)
    module.touch()
    result = run(f"import sys; sys.path[:1] = [{str(checkout)!r}, {str(site)!r}]; import trio_ucx")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: trio_ucx is installed in {site}, but Python has found the source tree {checkout}"
    )


def test_compiled_module_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert "pip install ." in _native._compiled_module_missing()


#: Frozen without these, which modules of trio_ucx and Trio import if they are there: it takes a third of the time.
LEFT_OUT = ("numpy", "msgspec", "matplotlib", "cryptography", "anyio", "hypothesis", "pytest", "setuptools", "sphinx")


@pytest.mark.full
def test_a_frozen_program(tmp_path: Path) -> None:
    pytest.importorskip("PyInstaller")
    (tmp_path / "program.py").write_text("""
import trio
from trio_ucx.testing import open_connection_pair
async def main():
    async with open_connection_pair() as (one, other):
        await one.send(b"x")
        print((await other.receive()).decode(), [each.name for each in one.endpoint.transports])
trio.run(main)
""")
    options = [option for name in LEFT_OUT for option in ("--exclude-module", name)]
    freeze = [sys.executable, "-m", "PyInstaller", "--log-level", "ERROR", *options]
    freeze += ["--paths", str(Path(trio_ucx.__file__).parents[1]), "program.py"]  # PyInstaller sees no editable install
    subprocess.run(freeze, check=True, cwd=tmp_path, timeout=200)
    program = tmp_path / "dist/program/program"
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False, env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("x ['sysv'") or done.stdout.startswith("x ['posix'"), done.stdout


def test_types_describe_every_function() -> None:
    """``_types.Lib`` and ``cdef.h`` name the same functions."""
    from trio_ucx._native import _types
    from trio_ucx.ucp.chains import _library

    protocols = (_types.Lib, _library.ChainLib)
    typed = {name for protocol in protocols for name in vars(protocol) if name.startswith("tu_")}
    compiled = {name for name in dir(_native.lib) if name.startswith("tu_")}
    assert typed == compiled


def test_sources_are_in_the_package() -> None:
    folder = Path(_native.__file__).parent
    assert {"cdef.h", "native.h", "worker.c", "chain/run.c"} <= {
        str(path.relative_to(folder)) for path in folder.rglob("*.[ch]")
    }


def test_buffers_in_a_garbage_cycle() -> None:
    """A pinned memoryview that dies together with its pin must not crash the collector."""
    for _ in range(200):
        view = memoryview(bytearray(100))
        cycle: list[object] = [view, Pinned(view), Pinned([view, view])]
        cycle.append(cycle)
        del view, cycle
    gc.collect()
    holder = bytearray(10)
    cycle = [Pinned(holder)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    holder.append(1)  # it is not pinned any more
