"""Programs run without privileges: as ordinary users, in containers, with little shared memory or few descriptors."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import environments
import pytest
from documents import programs
from environments import ENVIRONMENTS, RESTRICT, ROOT, Environment

PROGRAMS = Path(__file__).parent / "unprivileged_programs.py"
PYTHON = [sys.executable, "-W", "error"]
PERF = [*PYTHON, "-m", "trio_ucx", "perf", "--sizes", "8", "--seconds", "0.1"]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))

in_each_environment = pytest.mark.parametrize(
    "environment",
    [
        pytest.param(each, id=each.name.replace("/", "_"), marks=[pytest.mark.root] if each.of_root else [])
        for each in ENVIRONMENTS
    ],
)


@in_each_environment
def test_environment_is_what_it_is_called(environment: Environment) -> None:
    environment.check()


def test_what_fails_or_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = next(each for each in ENVIRONMENTS if not each.of_root)
    with pytest.raises(AssertionError, match="exit status 3: output"):
        environment.run([*PYTHON, "-c", "print('output'); raise SystemExit(3)"])
    monkeypatch.setattr(environments, "DEADLINE", 0.5)
    with pytest.raises(pytest.fail.Exception, match="hangs"):
        environment.run([*PYTHON, "-c", "import time; time.sleep(60)"])


@in_each_environment
def test_program_of_the_readme(environment: Environment) -> None:
    [program] = programs("README.md")
    assert environment.run([*PYTHON, "-c", program]) == "b'reward'\n"


@pytest.mark.sample(2)
@in_each_environment
def test_info_tells_what_is_permitted(environment: Environment) -> None:
    seen = json.loads(environment.run(RESTRICT))
    told = json.loads(environment.run([*PYTHON, "-m", "trio_ucx", "info", "--json"]))["privileges"]
    assert (told["capabilities"] == []) is (seen["capabilities"] == 0)
    assert told["in_user_namespace"] is (seen["user ids"] != ["0", "0", "4294967295"])
    assert told["shared_memory"] == seen["/dev/shm"]
    assert told["descriptors"] == seen["descriptors"]
    if seen["ptrace_scope"] is None:
        assert told["ptrace_scope"] == "this kernel has no Yama"
        assert (told["cma"] == "usable") is (seen["reading a sibling"] is None)
    else:
        assert told["ptrace_scope"] == str(seen["ptrace_scope"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("transports", ["all", "tcp"])
@in_each_environment
def test_perf(environment: Environment, transports: str) -> None:
    output = environment.run(PERF, **({} if transports == "all" else {"UCX_TLS": transports}))
    assert "data verified" in output
    assert f"transports: {'tcp' if transports == 'tcp' else 'sysv'}" in output


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["pairs", "unix_listener", "two_ranks"])
@in_each_environment
def test_program(environment: Environment, name: str) -> None:
    environment.run([*PYTHON, str(PROGRAMS), name])


@pytest.mark.sample(1)
@pytest.mark.parametrize("example", EXAMPLES)
@in_each_environment
def test_example(environment: Environment, example: str) -> None:
    if example == "beside_mpi":
        if importlib.util.find_spec("mpi4py") is None:
            pytest.skip("mpi4py is not installed")
        if shutil.which("mpirun", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}") is None:
            pytest.skip("there is no mpirun")
    environment.run([*PYTHON, str(PROGRAMS), f"example_{example}"])
