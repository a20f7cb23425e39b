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
from environments import ENVIRONMENTS, RESTRICT, ROOT, Environment, checked_command, in_mounts

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


#: Prints the log, and what happens with shared memory and without.
TWO_WAYS = """
import logging, sys, trio, trio_ucx
logging.basicConfig(stream=sys.stdout)

async def serve(connection):
    async for message in connection.messages():
        await connection.send(message)

async def main(nursery):
    server = await nursery.start(trio_ucx.serve_ucx, serve, 0)
    for shared_memory in (True, False):
        async with trio_ucx.connect(server.address, shared_memory=shared_memory) as connection:
            await connection.send(b"hello")
            print(await connection.receive())

async def run():
    try:
        async with trio.open_nursery() as nursery:
            await main(nursery)
            nursery.cancel_scope.cancel()
    except* OSError as group:
        print(repr(group.exceptions[0]))

trio.run(run)
"""


def in_unit(restriction: str, *command: str, **variables: str) -> str:
    """Runs a command as in a systemd unit that is hardened; returns its output."""
    enter = in_mounts if restriction == "processes-only" else checked_command
    environment = Environment(
        f"with {restriction}", lambda: enter(*RESTRICT, restriction, "--"), lambda seen: True, powerless=False
    )
    return environment.run(command, **variables)


def checked(restriction: str) -> dict[str, dict[str, str]]:
    """Returns the findings of ``check`` in such a unit."""
    said = in_unit(restriction, "sh", "-c", '"$@"; test $? -le 1', "sh", *PYTHON, "-m", "trio_ucx", "check", "--json")
    return {each["id"]: each for each in json.loads(said)["findings"]}


def test_unit_without_netlink() -> None:
    without = "UCX does without TCP: it finds no network devices, because this process may not open netlink sockets"
    warning, hello, error = in_unit("no-netlink", *PYTHON, "-c", TWO_WAYS).splitlines()
    assert warning.startswith(f"WARNING:trio_ucx:{without}: add AF_NETLINK to RestrictAddressFamilies=")
    assert hello == "b'hello'"
    assert "NotAdmitted" in error and "sockets: add AF_NETLINK" in error and "option TLS" not in error
    *_, error = in_unit("no-netlink", *PYTHON, "-c", TWO_WAYS, UCX_TLS="tcp").splitlines()
    assert "TLS='tcp' allows nothing but TCP, and UCX has none: it finds no network devices" in error
    found = checked("no-netlink")
    assert found["transports"]["state"] == "problem" and "AF_NETLINK" in found["transports"]["found"]
    assert "log" not in found


@pytest.mark.parametrize("restriction", ["write-xor-execute", "old-write-xor-execute"])
def test_unit_without_executable_memory(restriction: str) -> None:
    warning, *rest = in_unit(restriction, *PYTHON, "-c", TWO_WAYS).splitlines()
    assert warning.startswith("WARNING:trio_ucx:UCX does without memory hooks: ") and "MemoryDenyWriteEx" in warning
    assert rest == ["b'hello'"] * 2
    assert in_unit(restriction, *PYTHON, "-c", TWO_WAYS, UCX_MEM_MMAP_HOOK_MODE="none").splitlines() == rest
    found = checked(restriction)["memory hooks"]
    assert found["state"] == "warning" and "MemoryDenyWriteExecute=" in found["found"]


def test_unit_with_processes_only_in_proc() -> None:
    *_, error = in_unit("processes-only", *PYTHON, "-c", TWO_WAYS).splitlines()
    assert error.startswith("FileNotFoundError") and "Remove ProcSubset=pid from the systemd unit" in error
    found = checked("processes-only")["transports"]
    assert found["state"] == "problem" and "ProcSubset=pid" in found["found"]


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
