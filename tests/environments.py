"""Environments without privileges: how a command is run in each, and what a process there is restricted to.

``restrict.py`` makes those for which there is no command.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import trio_ucx
from trio_ucx import ucp

ROOT = Path(__file__).parent.parent
RESTRICT = [sys.executable, "-I", "-S", str(Path(__file__).parent / "restrict.py")]
#: Seconds that a program has to end.
DEADLINE = 90
#: Linux's overflow user and group, often called nobody.
NOBODY = 65534
AS_ROOT = os.geteuid() == 0
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@attrs.frozen
class Environment:
    """An environment.

    Attributes:
        enter: what goes before a command to run it there. Skips the test where that is impossible.
        of_root: whether only root can be there.
        holds: what is true of a process there, as ``restrict.describe`` describes it; besides ``powerless``.
        variables: environment variables that are part of it.
        powerless: whether a process there has no capabilities, and cannot get any.
    """

    name: str
    enter: Callable[[], Sequence[str]]
    holds: Callable[[dict[str, Any]], bool]
    variables: Mapping[str, str] = attrs.field(factory=dict)
    powerless: bool = True
    of_root: bool = False

    def run(self, command: Sequence[str], **variables: str) -> str:
        """Runs a command there; returns its output. Fails the test if the command fails, or does not end."""
        under = self.enter()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        process = subprocess.Popen(
            [*under, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**clean, "PYTHONFAULTHANDLER": "1", **self.variables, **variables},
            start_new_session=True,
        )
        with process:
            try:
                output, errors = process.communicate(timeout=DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
                pytest.fail(f"{command} hangs {self.name}: {output}{errors}")
        assert process.returncode == 0, f"{command} {self.name}: exit status {process.returncode}: {output}{errors}"
        return output

    def check(self) -> None:
        """Asserts that a process there is restricted as it should be."""
        seen = json.loads(self.run(RESTRICT))
        assert self.holds(seen), seen
        if self.powerless:
            assert seen["capabilities"] == 0 and (seen["to be had"] == 0 or seen["user"] != 0), seen


@functools.cache
def _obstacle(under: Sequence[str]) -> str | None:
    """Returns why no command can be run like this; None if it can."""
    if shutil.which(under[0]) is None:
        return f"there is no {under[0]}"
    done = subprocess.run([*under, "true"], capture_output=True, timeout=60, text=True, check=False)
    return None if done.returncode == 0 else f"not possible here: {' '.join(under)}: {done.stderr.strip()}"


def checked_command(*under: str) -> Sequence[str]:
    """Returns what goes before a command; skips the test if ``true`` cannot be run with it."""
    if (obstacle := _obstacle(under)) is not None:
        pytest.skip(obstacle)
    return under


def without_capabilities(*, as_root: bool = AS_ROOT) -> Sequence[str]:
    """Returns the command that takes all capabilities away.

    Args:
        as_root: whether root runs it, be it of a user namespace. Others cannot shrink their bounding set, but neither
            can they get anything from it.
    """
    bounding = ["--bounding-set=-all"] if as_root else []
    return checked_command("setpriv", "--inh-caps=-all", "--ambient-caps=-all", *bounding)


def in_mounts(*command: str) -> Sequence[str]:
    """Returns what runs a command in a mount namespace, first as its root, and then without capabilities."""
    user = [] if AS_ROOT else ["--user", "--map-root-user"]
    powerless = ["setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    return checked_command("unshare", *user, "--mount", *command, *powerless)


def as_other_user(uid: int) -> Sequence[str]:
    """Returns what root runs a command with as another user, who can read this Python, and has no capabilities."""
    package, wheel = Path(trio_ucx.__file__).parent, Path(ucp.library().file).parents[1]
    needed = [ROOT, Path(sys.prefix), Path(sys.base_prefix), package, wheel]
    return in_mounts(
        *(*RESTRICT, "readable", *map(str, needed), "--"),
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"),
    )


def as_ordinary_user() -> Sequence[str]:
    return as_other_user(NOBODY) if AS_ROOT else without_capabilities()


def with_ptrace_scope() -> Sequence[str]:
    if not SCOPE.exists():
        pytest.skip("this kernel has no Yama, and no kernel.yama.ptrace_scope")
    if (scope := SCOPE.read_text().strip()) != "1":
        pytest.skip(f"kernel.yama.ptrace_scope is {scope}: sysctl kernel.yama.ptrace_scope=1")
    return without_capabilities()


ENVIRONMENTS = [
    Environment("as root without capabilities", without_capabilities, lambda seen: seen["user"] == 0, of_root=True),
    Environment(
        "as an ordinary user without capabilities",
        as_ordinary_user,
        lambda seen: seen["user"] == (os.geteuid() or NOBODY),
    ),
    Environment(
        "with ptrace_scope 1",
        with_ptrace_scope,
        lambda seen: seen["ptrace_scope"] == 1 and seen["reading a sibling"] == "EPERM",
    ),
    Environment(
        "under Docker's seccomp filter",
        lambda: checked_command(*without_capabilities(), *RESTRICT, "seccomp", "--"),
        lambda seen: (
            (seen["seccomp"], seen["no_new_privs"]) == (2, 1)
            and (seen["reading a sibling"], seen["unshare"], seen["vsock"]) == ("EPERM", "EPERM", "EPERM")
        ),
    ),
    Environment(
        "with MemoryDenyWriteExecute",
        lambda: checked_command(*without_capabilities(), *RESTRICT, "write-xor-execute", "--"),
        lambda seen: seen["executable memory"] == "EACCES",
    ),
    Environment(
        "where only /dev/shm can be written to",
        lambda: in_mounts(*RESTRICT, "read-only", "--"),
        lambda seen: seen["writable"] == [] and seen["/dev/shm is writable"] and not seen["home is writable"],
        {"TMPDIR": "/dev/shm"},
    ),
    Environment("without a home", without_capabilities, lambda seen: not seen["home is writable"], {"HOME": "/proc"}),
    Environment(
        "with 64 MB in /dev/shm",
        lambda: in_mounts("sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"),
        lambda seen: seen["/dev/shm"] == 64 << 20,
    ),
    Environment(
        "with 1024 descriptors",
        lambda: checked_command(*without_capabilities(), "sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh"),
        lambda seen: seen["descriptors"] == [1024, 1024],
    ),
    Environment(
        "in a user namespace",
        lambda: checked_command("unshare", "--user", "--map-root-user"),
        lambda seen: seen["user"] == 0 and seen["user ids"] == ["0", str(os.geteuid()), "1"],
        powerless=False,  # it has all of them, but only over its own namespace
    ),
]
