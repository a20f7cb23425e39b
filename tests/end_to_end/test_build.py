"""Building and installing: requirements, errors when something is missing, metadata, and the contents of the sdist."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
VARIABLES = ("TRIO_UCX_SYSTEM_UCX", "TRIO_UCX_LIBUCX", "TRIO_UCX_WERROR", "CC")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the source tree to build in, because setuptools leaves files behind."""
    target = tmp_path / "source"
    target.mkdir()
    for file in tracked_files():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target / file)
    return target


def tracked_files() -> set[str]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: what belongs to the project is not known")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return {file for file in listed.stdout.splitlines() if (ROOT / file).exists()}


def run(code: str, source: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{code}"],
        cwd=source,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0, result.stdout
    return result.stderr.strip().splitlines()[-1]


BUILD = "import runpy; sys.argv = ['setup.py', 'build_ext']; runpy.run_path('setup.py')"
IN_PLACE = BUILD.replace("'build_ext'", "'build_ext', '--inplace'")


def test_without_a_compiler_the_build_says_so(source: Path) -> None:
    words = last_line(run(BUILD, source, CC="no-such-compiler -O2"))
    assert words.startswith("trio_ucx: building it needs a C compiler, and there is no no-such-compiler here")
    assert "apt install gcc" in words


def test_without_pythons_headers_the_build_says_so(source: Path) -> None:
    words = last_line(run(f"import sysconfig; sysconfig.get_path = lambda name: '/no/such/folder'\n{BUILD}", source))
    assert words.startswith("trio_ucx: building it needs Python's headers, and Python.h is not in /no/such/folder")
    assert "python3-dev" in words


def test_without_ucxs_headers_the_build_says_so(source: Path) -> None:
    words = last_line(run(f"sys.modules['libucx'] = None\n{BUILD}", source))
    assert words.startswith("trio_ucx: building it needs UCX's headers")
    assert "TRIO_UCX_SYSTEM_UCX=1" in words


def test_a_free_threaded_python_is_refused(source: Path) -> None:
    code = "import sysconfig; sysconfig.get_config_var = {'Py_GIL_DISABLED': 1}.get"
    words = last_line(run(f"{code}\n{BUILD.replace('build_ext', 'egg_info')}", source))
    assert words.startswith(f"trio_ucx: {sys.executable} is a free-threaded Python")
    assert "install it with a CPython that has the GIL" in words


def test_warnings_are_errors_only_where_asked_for(source: Path) -> None:
    code = "import build_ffi; print('-Werror' in build_ffi.make_builder()._assigned_source[3]['extra_compile_args'])"
    assert run(code, source).stdout == "False\n"
    assert run(code, source, TRIO_UCX_WERROR="1").stdout == "True\n"


def dynamic_section(path: str) -> dict[int, int]:
    """Returns what a shared library of 64 bits tells the dynamic linker: values by tag (``elf.h``)."""
    data = Path(path).read_bytes()
    offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    headers = [struct.unpack_from("<IIQQQQQQ", data, offset + 56 * number) for number in range(count)]
    [(_, _, start, _, _, size, _, _)] = [header for header in headers if header[0] == 2]  # PT_DYNAMIC
    return dict(struct.unpack_from("<QQ", data, at) for at in range(start, start + size, 16))


def test_the_compiled_module_is_hardened() -> None:
    """It parses what peers send; and it looks for libraries in no folder of the machine that built it."""
    file = sys.modules["trio_ucx._native._ucx"].__file__
    assert file is not None
    symbols, dynamic = Path(file).read_bytes(), dynamic_section(file)
    assert b"__stack_chk_fail" in symbols and re.search(rb"__(memcpy|snprintf|vsnprintf|fprintf)_chk", symbols)
    runpath, rpath, flags, now = 29, 15, 30, 8
    assert not {runpath, rpath} & dynamic.keys() and dynamic[flags] & now


#: Connections over both transports, and what becomes of request chains, which this build is without.
WITHOUT_CHAINS = """
import trio, trio_ucx
from functools import partial
from trio_ucx import ucp

assert trio_ucx.__file__.startswith(sys.argv[1]), trio_ucx.__file__

async def echo(connection):
    async for message in connection.messages(1):
        await connection.send(message, tag=1)

async def main(transports):
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, echo, 0, host="127.0.0.1", worker=other)
            [listener] = await nursery.start(serve)
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                for size in (1, 300_000):
                    await connection.send(bytes(size), tag=1)
                    assert await connection.receive(tag=1) == bytes(size)
                shared = {each.name for each in connection.endpoint.transports} - {"tcp"}
                assert bool(shared) == ("sm" in transports), shared
            nursery.cancel_scope.cancel()
        try:
            worker.new_chain()
        except ModuleNotFoundError as error:
            print(error)

for transports in ("tcp", "tcp,sm,self"):
    trio.run(main, transports)
import trio_ucx.ucp.chains
"""


@pytest.mark.full
def test_without_request_chains_the_core_works(source: Path) -> None:
    shutil.rmtree(source / "trio_ucx" / "_native" / "chain")
    shutil.rmtree(source / "trio_ucx" / "ucp" / "chains")
    built = run(IN_PLACE, source, TRIO_UCX_WERROR="1")
    assert built.returncode == 0, built.stderr
    result = run(f"sys.argv.append({str(source)!r})\n{WITHOUT_CHAINS}", source)
    missing = "No module named 'trio_ucx.ucp.chains'"
    assert last_line(result) == f"ModuleNotFoundError: {missing}"
    assert result.stdout.splitlines() == [missing] * 2


@pytest.mark.full
def test_without_extensions_the_c_code_is_complete(source: Path) -> None:
    """The compiled module loads, and lacks no function; the Python code needs remote memory."""
    for folder in ("chain", "rma"):
        shutil.rmtree(source / "trio_ucx" / "_native" / folder)
    built = run(IN_PLACE, source, TRIO_UCX_WERROR="1")
    assert built.returncode == 0, built.stderr
    code = """
import importlib.machinery, importlib.util, libucx, pathlib
libucx.load_library()
[file] = pathlib.Path("trio_ucx/_native").glob("_ucx*.so")
loader = importlib.machinery.ExtensionFileLoader("_ucx", str(file.absolute()))
lib = importlib.util.module_from_spec(importlib.util.spec_from_loader("_ucx", loader)).lib
print([name for name in ("tu_worker_create", "tu_endpoint_flush", "tu_put", "tu_chain_run") if hasattr(lib, name)])
"""
    assert run(code, source).stdout == "['tu_worker_create', 'tu_endpoint_flush']\n"


def metadata(source: Path, **variables: str) -> Message:
    """The metadata of a wheel."""
    code = """
import pathlib, build_backend
print(pathlib.Path(build_backend.prepare_metadata_for_build_wheel('.'), "METADATA"))
"""
    result = run(code, source, **variables)
    assert result.returncode == 0, result.stderr
    return Parser().parsestr((source / result.stdout.splitlines()[-1]).read_text())


def requirements(source: Path, **variables: str) -> tuple[list[str], list[str]]:
    """What building a wheel requires, and which UCX the wheel requires without extras."""
    to_build = run("import build_backend; print(build_backend.get_requires_for_build_wheel())", source, **variables)
    wanted = metadata(source, **variables).get_all("Requires-Dist", [])
    return eval(to_build.stdout), [one for one in wanted if "libucx" in one and "extra" not in one]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variables", "to_build", "to_run"),
    [
        ({}, ["libucx-cu12==1.21.*"], ["libucx-cu12>=1.21"]),
        ({"TRIO_UCX_SYSTEM_UCX": "1"}, [], []),
        ({"TRIO_UCX_LIBUCX": "cu13"}, ["libucx-cu12==1.21.*"], ["libucx-cu13>=1.21"]),
        ({"TRIO_UCX_LIBUCX": "none"}, ["libucx-cu12==1.21.*"], []),
        ({"TRIO_UCX_SYSTEM_UCX": "1", "TRIO_UCX_LIBUCX": "cu12"}, [], ["libucx-cu12>=1.21"]),
    ],
)
def test_ucx_is_fetched_only_where_it_is_wanted(
    source: Path, variables: dict[str, str], to_build: list[str], to_run: list[str]
) -> None:
    assert requirements(source, **variables) == (to_build, to_run)


def test_another_choice_of_libucx_is_refused(source: Path) -> None:
    assert last_line(run(BUILD, source, TRIO_UCX_LIBUCX="cu11")) == (
        "trio_ucx: TRIO_UCX_LIBUCX=cu11: it must be one of cu12, cu13, none"
    )


@pytest.mark.full
def test_the_sdist_holds_the_project(source: Path) -> None:
    """It contains everything that building and testing needs."""
    result = run("import build_backend; print(build_backend.build_sdist('dist'))", source)
    assert result.returncode == 0, result.stderr
    with tarfile.open(source / "dist" / result.stdout.splitlines()[-1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked_files() - packed - {".gitignore"} == set()
    assert not [name for name in packed if name.endswith((".so", ".pyc", "_ucx.c"))]


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_metadata(source: Path) -> None:
    read = metadata(source)
    assert (read["Name"], read["License-Expression"], read["Author"]) == (
        "trio_ucx",
        "BSD-3-Clause",
        "The trio_ucx authors",
    )
    assert read.get_all("License-File") == ["LICENSE"]
    assert read["Description-Content-Type"] == "text/markdown" and str(read.get_payload()).startswith("# trio_ucx")
    urls = dict(url.split(", ") for url in read.get_all("Project-URL", []))
    assert list(urls) == ["Homepage", "Documentation", "Source", "Changelog", "Issues"]
    assert all(url.startswith("https://") for url in urls.values())


def console_script(*arguments: str, first: str = "pass") -> subprocess.CompletedProcess[str]:
    """What the script does that pip makes of the entry point, after a line. (``.ci/run`` uses the real one.)"""
    module, _, function = PROJECT["project"]["scripts"]["trio-ucx"].partition(":")
    script = f"import sys; sys.argv[0] = '/bin/trio-ucx'; {first}; import {module} as m; sys.exit(m.{function}())"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_console_script() -> None:
    done = console_script("info", "--json")
    assert (done.returncode, done.stderr) == (0, "") and "ucx" in json.loads(done.stdout)
    wrong = console_script("perf", "-x")
    assert wrong.returncode == 2 and wrong.stderr.startswith("trio-ucx perf: error: ")


def test_what_ucx_prints_is_no_result() -> None:
    noisy = "import os, trio_ucx.__main__ as m; m.main = lambda: print('result') or os.write(1, b'noise') - 5"
    done = console_script(first=noisy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "result\n", "noise")


def test_python_versions_are_those_that_are_tested() -> None:
    """By GitHub's workflows, from the lowest on: the default tests, and the wheel."""
    pattern = r"Programming Language :: Python :: (3\.\d+)$"
    versions = [found[1] for each in PROJECT["project"]["classifiers"] if (found := re.match(pattern, each))]
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert f"python: {versions}".replace("'", '"') in (ROOT / ".github/workflows/tests.yml").read_text()
    tested = [f"cp{version.replace('.', '')}-manylinux*" for version in versions]
    assert PROJECT["tool"]["cibuildwheel"]["build"].split() == tested


def test_wheels_are_built_by_one_script() -> None:
    script = "tools/build_wheels.sh"
    assert PROJECT["tool"]["cibuildwheel"]["repair-wheel-command"].startswith(f"{{project}}/{script} repair ")
    assert f"run: {script} check dist/*\n" in (ROOT / ".github/workflows/wheels.yml").read_text()
    assert f"{script} ../dist" in (ROOT / ".ci/run").read_text()
    assert f'CHECKOUT / "{script}"' in (ROOT / "tools/lab/prepare.py").read_text()


def test_the_version_is_stated_once() -> None:
    version = PROJECT["project"]["version"]
    code = [file for file in tracked_files() if file.endswith(".py") and not file.startswith("tests/")]
    assert [file for file in code if version in (ROOT / file).read_text()] == []
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    wheels = re.findall(r"trio_ucx-([\d.]+)-cp", (ROOT / "docs/start/install.md").read_text())
    assert set(wheels) == {version}
