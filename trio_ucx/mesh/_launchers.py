"""The launchers: each tells its processes their ranks in environment variables of its own.

Launchers can be nested: ``mpirun`` and ``torchrun`` run inside a Slurm allocation, and Slurm's variables then belong to
the outer launcher. The order of :data:`LAUNCHERS` puts the inner ones first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import attrs

from .._util.private_folder import make_private
from .._util.text import printable
from ._slurm_lists import expand_counts, expand_nodelist
from ._variables import MEETING, SIZE, AtFile, AtPort, Found, Meeting, ThroughMPI, Variables

#: Ports that are computed: below those that Linux gives to outgoing connections (32768 to 60999).
_FIRST_PORT, _PORTS = 20000, 12768
#: The port of rank 0 in Kubernetes, where each pod has an IP address of its own.
POD_PORT = 13337


@attrs.frozen
class Machine:
    """What a launcher asks this machine. Tests replace it."""

    full_host_name: Callable[[], str] = socket.getfqdn
    temporary_folder: Callable[[], str] = tempfile.gettempdir
    has_mpi4py: Callable[[], bool] = lambda: importlib.util.find_spec("mpi4py") is not None


@attrs.frozen
class Launcher:
    """One kind of launcher. Its methods are called only for values that nothing overrides."""

    name: ClassVar[str]
    #: The variables that tell that this launcher has started the process.
    looks_for: ClassVar[str]
    rank_variable: ClassVar[str]
    #: The first of these that is set counts.
    size_variables: ClassVar[tuple[str, ...]] = ()

    variables: Variables
    machine: Machine

    def recognised(self) -> bool:
        return self.variables.has(self.rank_variable)

    def rank(self) -> Found[int]:
        return self.variables.integer(self.rank_variable)

    def size(self) -> Found[int]:
        return self.variables.integer(*self.size_variables)

    def meeting(self) -> Found[Meeting]:
        raise NotImplementedError

    def hosts(self, size: int) -> tuple[str, ...]:
        """The host of each rank, or nothing."""
        return ()


@attrs.frozen
class _Torchrun(Launcher):
    """torchrun, and everything else that sets the variables of ``torch.distributed``.

    The agent of torchrun listens at ``MASTER_PORT`` itself; with such an agent, rank 0 listens at a port that is
    computed from ``MASTER_PORT`` and the run's id.
    """

    name = "torchrun"
    looks_for = "RANK, WORLD_SIZE"
    rank_variable = "RANK"
    size_variables = ("WORLD_SIZE",)

    def recognised(self) -> bool:
        return self.variables.has("RANK", "WORLD_SIZE")

    def meeting(self) -> Found[Meeting]:
        host, port = _master(self.variables)
        run = self.variables.text("TORCHELASTIC_RUN_ID")
        if run is None and self.variables.text("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return Found(AtPort(host, port), "MASTER_ADDR, MASTER_PORT")
        ours = _port_for("torchrun", port, run)
        if ours == port:
            ours = _FIRST_PORT + (ours + 1 - _FIRST_PORT) % _PORTS
        return Found(AtPort(host, ours), "MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID")


@attrs.frozen
class _MPI(Launcher):
    """What launchers of MPI programs have in common: ranks of one host meet at a file, others through MPI.

    The file comes first because MPI is slow to start, waits for all ranks when it starts and when it ends, and works
    only if mpi4py uses the MPI that started the program.
    """

    local_size_variable: ClassVar[str]

    def meeting(self) -> Found[Meeting]:
        job = self.job()
        if job is not None and self._on_one_host():
            folder = _private_folder(Path(self.machine.temporary_folder()))
            return Found(AtFile(folder / f"mesh-{job.value}"), job.name)
        if self.machine.has_mpi4py():
            return Found(ThroughMPI(), "mpi4py")
        if self.variables.has("MASTER_ADDR", "MASTER_PORT"):
            return Found(AtPort(*_master(self.variables)), "MASTER_ADDR, MASTER_PORT")
        raise RuntimeError(
            f"{self.name} started this process, but does not say where the ranks can meet. Install mpi4py; or set "
            f"{MEETING} to host:port of rank 0, or to file:///path of a new file that all ranks can read"
        )

    def job(self) -> Found[str] | None:
        """A name for the job that no other job on this host has had; None if the launcher gives nothing to make one."""
        return None

    def _on_one_host(self) -> bool:
        local = self.variables.text(self.local_size_variable)
        return local is not None and local == self.variables.text(*self.size_variables)


@attrs.frozen
class _OpenMPI(_MPI):
    name = "Open MPI"
    looks_for = "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    size_variables = ("OMPI_COMM_WORLD_SIZE",)
    local_size_variable = "OMPI_COMM_WORLD_LOCAL_SIZE"

    def job(self) -> Found[str] | None:
        space = self.variables.text("PMIX_NAMESPACE")
        if space is None:
            return None
        # The namespace is made of the process id of mpirun, which comes again; the port of its server is different.
        server = (self.variables.text(name) for name in ("PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI2"))
        return Found(_digest(space, *server)[:16], "PMIX_NAMESPACE")


@attrs.frozen
class _MPICH(_MPI):
    """MPICH and those that are made of it, such as Intel MPI. Its launcher gives a job no name."""

    name = "MPICH"
    looks_for = "PMI_RANK, PMI_SIZE"
    rank_variable = "PMI_RANK"
    size_variables = ("PMI_SIZE",)
    local_size_variable = "MPI_LOCALNRANKS"

    def recognised(self) -> bool:
        # Slurm sets these variables, too (srun --mpi=pmi2), and says more about the ranks in its own.
        step = f"{self.variables.text('SLURM_JOB_ID')}.{self.variables.text('SLURM_STEP_ID')}"
        return self.variables.has(self.rank_variable) and self.variables.text("PMI_JOBID") != step


@attrs.frozen
class _Slurm(Launcher):
    """Slurm. Rank 0 is on the first host of the list, at a port that is computed from the ids of job and step."""

    name = "Slurm"
    looks_for = "SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_STEP_NODELIST or SLURM_JOB_NODELIST"
    rank_variable = "SLURM_PROCID"
    size_variables = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

    def rank(self) -> Found[int]:
        # sbatch gives its script a rank, too, and the number of tasks that srun would start.
        if not self.variables.has("SLURM_STEP_ID") and self.size().value > 1:
            raise RuntimeError(
                f"this process belongs to a batch script, not to a step of {self.size().value} tasks "
                "(SLURM_STEP_ID is not set): start the program with srun in the script"
            )
        return super().rank()

    def meeting(self) -> Found[Meeting]:
        if self._distribution() == "arbitrary":
            raise RuntimeError(
                "with SLURM_DISTRIBUTION=arbitrary, the list of hosts does not say which one has rank 0: set "
                f"{MEETING} to host:port of rank 0"
            )
        nodes, name = self._nodes()
        port = _port_for("Slurm", self.variables.need("SLURM_JOB_ID").value, self.variables.text("SLURM_STEP_ID"))
        return Found(AtPort(nodes[0], port), name)

    def hosts(self, size: int) -> tuple[str, ...]:
        text = self.variables.text("SLURM_STEP_TASKS_PER_NODE") or self.variables.text("SLURM_TASKS_PER_NODE")
        if text is None or not self.variables.has("SLURM_STEP_NODELIST"):
            return ()
        nodes, _ = self._nodes()
        counts = expand_counts(text)
        if len(counts) != len(nodes) or sum(counts) != size:
            return ()
        match self._distribution():
            case "block":
                return tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))
            case "cyclic":
                turns = ((turn, node) for node, count in enumerate(counts) for turn in range(count))
                return tuple(nodes[node] for _, node in sorted(turns))
            case _:
                return ()

    def _distribution(self) -> str:
        """Returns how tasks are distributed to hosts: ``block``, ``cyclic``, ``plane`` or ``arbitrary``."""
        return re.split("[:,=]", self.variables.text("SLURM_DISTRIBUTION") or "block")[0].lower()

    def _nodes(self) -> tuple[list[str], str]:
        found = self.variables.need("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        try:
            return expand_nodelist(found.value), found.name
        except ValueError as error:
            raise ValueError(f"{found.name}: {error}") from None


@attrs.frozen
class _Kubernetes(Launcher):
    """A pod of an indexed Job or of a StatefulSet: the pod's host name ends with the rank."""

    name = "Kubernetes"
    looks_for = "KUBERNETES_SERVICE_HOST, and JOB_COMPLETION_INDEX or HOSTNAME"
    rank_variable = "JOB_COMPLETION_INDEX"

    def recognised(self) -> bool:
        return self.variables.has("KUBERNETES_SERVICE_HOST") and (super().recognised() or self._ordinal() is not None)

    def rank(self) -> Found[int]:
        ordinal = self._ordinal()
        if not super().recognised() and ordinal is not None:
            return Found(ordinal, "HOSTNAME")
        return super().rank()

    def size(self) -> Found[int]:
        raise RuntimeError(
            f"Kubernetes does not tell a pod how many there are: set {SIZE} in the pod template to the completions of "
            "the Job, or to the replicas of the StatefulSet"
        )

    def meeting(self) -> Found[Meeting]:
        name = self.machine.full_host_name()
        pod, dot, domain = name.partition(".")
        if not dot or re.search("-[0-9]+$", pod) is None:
            raise RuntimeError(
                f"the host name of this pod, {printable(name)}, does not lead to that of rank 0. Give the pods a "
                "headless Service: its name is the subdomain of the Job's pods, or the serviceName of the StatefulSet; "
                f"or set {MEETING} to host:port of rank 0"
            )
        return Found(AtPort(re.sub("[0-9]+$", "0", pod) + dot + domain, POD_PORT), "the pod's host name")

    def _ordinal(self) -> int | None:
        match = re.search("-([0-9]{1,9})$", self.variables.text("HOSTNAME") or "")
        return None if match is None else int(match[1])


#: In this order: those that are started by others come first.
LAUNCHERS: Sequence[type[Launcher]] = (_Torchrun, _OpenMPI, _MPICH, _Slurm, _Kubernetes)


def recognise(variables: Variables, machine: Machine) -> Launcher | None:
    return next((found for kind in LAUNCHERS if (found := kind(variables, machine)).recognised()), None)


def _master(variables: Variables) -> tuple[str, int]:
    return variables.need("MASTER_ADDR").value, variables.port("MASTER_PORT").value


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()


def _port_for(*parts: object) -> int:
    """A port that is the same on all ranks, and most likely different for other jobs."""
    return _FIRST_PORT + int(_digest(*parts), 16) % _PORTS


def _private_folder(parent: Path) -> Path:
    """A folder of this user's own in a folder where everybody can write, such as /tmp."""
    folder = parent / f"trio_ucx-{os.geteuid()}"
    if not make_private(folder):
        raise PermissionError(
            f"{printable(str(folder))} must be a folder that only this user can enter or replace: remove it, or set "
            f"{MEETING}"
        )
    return folder
