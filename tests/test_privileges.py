"""What ``info`` says of the kernel's restrictions. ``test_environments.py`` compares it with those of environments."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import attrs
import pytest

from trio_ucx._cli import privileges
from trio_ucx._cli.privileges import Privileges, look

KNOWN = Privileges(
    capabilities=["net_admin", "sys_ptrace"],
    without_capabilities=["chown", "kill", "sys_admin"],
    in_user_namespace=False,
    ptrace_scope="1",
    cma="usable",
    shared_memory=64 << 20,
    free_shared_memory=(64 << 20) - 1,
    descriptors=(1024, 524288),
    locked_memory=(8 << 20, -1),
)


def test_lines() -> None:
    assert KNOWN.as_lines() == [
        "capabilities   net_admin, sys_ptrace",
        "ptrace scope   1",
        "cma            usable",
        "/dev/shm       64 MiB, 64 MiB free",
        "descriptors    1024 (hard limit: 524288)",
        "locked memory  8 MiB (hard limit: no limit)",
    ]


@pytest.mark.parametrize(
    ("has", "lacks", "in_user_namespace", "text"),
    [
        ([], ["chown"], False, "none"),
        ([], ["chown"], True, "none"),
        (["chown"], [], False, "all"),
        (["chown"], [], True, "all (of a user namespace)"),
        (["chown", "kill"], ["bpf"], False, "all but bpf"),
        (["chown"], ["bpf"], None, "chown"),
        (None, None, None, "unknown"),
    ],
)
def test_capabilities(
    has: list[str] | None, lacks: list[str] | None, in_user_namespace: bool | None, text: str
) -> None:
    described = attrs.evolve(KNOWN, capabilities=has, without_capabilities=lacks, in_user_namespace=in_user_namespace)
    assert described.as_lines()[0] == f"capabilities   {text}"


@pytest.mark.parametrize(
    ("capabilities", "users", "bytes"),
    [("4000", "0 0 4294967295", -1), ("4000", "0 1000 1", 8 << 20), ("2000", "0 0 4294967295", 8 << 20)],
)
def test_lockable_memory(
    capabilities: str, users: str, bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No limit holds for the capability ipc_lock, unless it is that of a user namespace."""
    for name, text in (("_STATUS", f"CapEff:\t{capabilities}\n"), ("_USERS", users)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(privileges, name, tmp_path / name)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, -1))
    assert privileges.lockable_memory() == bytes


def test_this_process() -> None:
    found = look()
    assert found.capabilities is not None and found.without_capabilities is not None
    assert (len(found.capabilities) > 0) is (os.geteuid() == 0 and "CapEff:\t0000000000000000" not in status())
    shared = os.statvfs("/dev/shm")
    assert found.shared_memory == shared.f_blocks * shared.f_frsize
    assert found.descriptors == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert "unknown" not in "".join(found.as_lines())


def status() -> str:
    return Path("/proc/self/status").read_text()


def test_what_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_STATUS", "_LAST_CAPABILITY", "_USERS", "_SHARED_MEMORY"):
        monkeypatch.setattr(privileges, name, tmp_path / "missing")
    monkeypatch.setattr(privileges, "_PTRACE_SCOPE", tmp_path)  # it exists, and cannot be read
    monkeypatch.setattr("sys.executable", "/does/not/exist")
    found = look()
    assert (found.capabilities, found.in_user_namespace, found.ptrace_scope, found.cma) == (None, None, None, None)
    assert "".join(found.as_lines()).count("unknown") == 4


@pytest.mark.parametrize("program", ["print('nonsense')", "import sys; sys.exit(1)", "import time; time.sleep(9)"])
def test_attempts_at_cma_that_fail(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "_READ_PARENT", program)
    monkeypatch.setattr(privileges, "_DEADLINE", 0.5)
    assert look().cma is None


def test_what_the_kernel_answers_about_cma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "_READ_PARENT", "print(1)")
    assert look().cma == "not usable: process_vm_readv: Operation not permitted"
    monkeypatch.setattr(privileges, "_READ_PARENT", "print(0)")  # something is at that address
    assert look().cma is None


def test_the_kernel_names_fewer_capabilities_or_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, last = tmp_path / "status", tmp_path / "last"
    monkeypatch.setattr(privileges, "_STATUS", status)
    monkeypatch.setattr(privileges, "_LAST_CAPABILITY", last)
    status.write_text("Name:\tpython\nCapEff:\t0000000000001001\n")
    last.write_text("12\n")
    found = look()
    assert found.capabilities == ["chown", "net_admin"]
    assert found.without_capabilities is not None and len(found.without_capabilities) == 11
    status.write_text(f"CapEff:\t{1 << 45:016x}\n")
    assert look().capabilities == ["45"]
