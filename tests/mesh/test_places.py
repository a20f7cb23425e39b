"""The place of a process in a mesh: what each launcher's environment says."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from trio_ucx.mesh import _launchers, _place
from trio_ucx.mesh._launchers import Machine
from trio_ucx.mesh._place import Place
from trio_ucx.mesh._slurm_lists import expand_counts, expand_nodelist
from trio_ucx.mesh._variables import AtFile, AtPort, Meeting, ThroughMPI, parse_meeting

KEY = "0123456789abcdef-Ω"


def refuse(*arguments: object) -> Any:
    raise AssertionError("this must not be asked")


#: A machine that is asked nothing.
NO_MACHINE = Machine(full_host_name=refuse, temporary_folder=refuse, has_mpi4py=refuse)
WITH_MPI4PY = attrs.evolve(NO_MACHINE, has_mpi4py=lambda: True)
WITHOUT_MPI4PY = attrs.evolve(NO_MACHINE, has_mpi4py=lambda: False)

OURS = {"TRIO_UCX_RANK": "1", "TRIO_UCX_SIZE": "4", "TRIO_UCX_MEETING": "ours:1000"}
MASTER = {"MASTER_ADDR": "master", "MASTER_PORT": "29500"}
#: torch.distributed's variables, as a program sets them that has no torchrun.
TORCH = {"RANK": "2", "WORLD_SIZE": "5", **MASTER}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
#: Of Open MPI 4.1.4 and 5.0.11 on one host.
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "6",
    "PMIX_NAMESPACE": "175177729",
    "PMIX_SERVER_URI2": "175177728.0;tcp4://127.0.0.1:42017",
    "PMIX_SERVER_URI41": "175177728.0;tcp4://127.0.0.1:42017",
}
OPEN_MPI_5 = {**OPEN_MPI_4, "PMIX_NAMESPACE": "prterun-host-26343@1"}
OPEN_MPI_HOSTS = {**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
MPICH = {"PMI_RANK": "4", "PMI_SIZE": "7", "MPI_LOCALNRANKS": "7", "PMI_FD": "9", "HYDI_CONTROL_FD": "7"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "99",  # of the job
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_NODELIST": "n[0-9]",
    "SLURM_STEP_NODELIST": "n[1-3,5]",
    "SLURM_TASKS_PER_NODE": "9(x10)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),2",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}
#: srun --mpi=pmi2
SLURM_PMI2 = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "17.0", "PMI_FD": "13"}
#: What sbatch gives its script.
BATCH = {name: text for name, text in SLURM.items() if "STEP" not in name}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TRIO_UCX_SIZE": "3"}
INDEXED_JOB = {**POD, "HOSTNAME": "train-2", "JOB_COMPLETION_INDEX": "2"}
STATEFUL_SET = {**POD, "HOSTNAME": "train-7-2"}
POD_NAME = attrs.evolve(NO_MACHINE, full_host_name=lambda: "train-7-12.group.default.svc.cluster.local")


def find_place(environment: Mapping[str, str], machine: Machine = NO_MACHINE, **arguments: Any) -> Place:
    return _place.find_place(environment, machine=machine, **arguments)


def port_of(environment: Mapping[str, str]) -> int:
    meeting = find_place(environment).meeting
    assert isinstance(meeting, AtPort)
    return meeting.port


@pytest.mark.parametrize(
    ("environment", "machine", "rank", "size", "source"),
    [
        (OURS, NO_MACHINE, 1, 4, "TRIO_UCX_RANK, TRIO_UCX_SIZE, TRIO_UCX_MEETING"),
        (TORCH, NO_MACHINE, 2, 5, "torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)"),
        (TORCHRUN, NO_MACHINE, 2, 5, "torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID)"),
        (OPEN_MPI_HOSTS, WITH_MPI4PY, 3, 6, "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, mpi4py)"),
        (MPICH, WITH_MPI4PY, 4, 7, "MPICH (PMI_RANK, PMI_SIZE, mpi4py)"),
        (SLURM, NO_MACHINE, 5, 8, "Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST)"),
        (SLURM_PMI2, NO_MACHINE, 5, 8, "Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST)"),
        (INDEXED_JOB, POD_NAME, 2, 3, "Kubernetes (JOB_COMPLETION_INDEX, TRIO_UCX_SIZE, the pod's host name)"),
        (STATEFUL_SET, POD_NAME, 2, 3, "Kubernetes (HOSTNAME, TRIO_UCX_SIZE, the pod's host name)"),
        # Launchers inside others.
        ({**SLURM, **OPEN_MPI_HOSTS}, WITH_MPI4PY, 3, 6, "Open MPI"),
        ({**SLURM, **MPICH}, WITH_MPI4PY, 4, 7, "MPICH"),
        ({**SLURM_PMI2, **TORCHRUN}, NO_MACHINE, 2, 5, "torchrun"),
        ({**OPEN_MPI_4, **TORCHRUN}, NO_MACHINE, 2, 5, "torchrun"),
        ({**INDEXED_JOB, **OPEN_MPI_HOSTS, "TRIO_UCX_SIZE": "9"}, WITH_MPI4PY, 3, 9, "Open MPI"),
        ({**SLURM, **OPEN_MPI_4, **TORCHRUN, **OURS}, NO_MACHINE, 1, 4, "TRIO_UCX_RANK"),
        # Incomplete or accidental variables of others.
        ({**SLURM, "RANK": "3"}, NO_MACHINE, 5, 8, "Slurm"),
        ({**SLURM, "RANK": "", "WORLD_SIZE": " ", "PMI_RANK": ""}, NO_MACHINE, 5, 8, "Slurm"),
        ({**SLURM, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, NO_MACHINE, 5, 8, "Slurm"),
    ],
)
def test_launchers(environment: dict[str, str], machine: Machine, rank: int, size: int, source: str) -> None:
    place = find_place(environment, machine)
    assert (place.rank, place.size) == (rank, size)
    assert place.source == source if "," in source else place.source.startswith(source)
    assert place.authkey is None


# ---- the arguments and trio_ucx's variables ----


@pytest.mark.parametrize("launcher", [TORCHRUN, OPEN_MPI_4, MPICH, SLURM, STATEFUL_SET, OURS], ids=lambda e: min(e))
def test_each_value_is_overridden_by_itself(launcher: dict[str, str]) -> None:
    machine = WITH_MPI4PY if launcher == MPICH else POD_NAME
    machine = attrs.evolve(machine, temporary_folder=lambda: "/nonexistent")
    basis = find_place(launcher, machine, meeting="m:1")
    assert basis.meeting == AtPort("m", 1)
    own = find_place({**launcher, "TRIO_UCX_RANK": "0", "TRIO_UCX_MEETING": "m:1"}, machine)
    assert (own.rank, own.size, own.meeting) == (0, basis.size, AtPort("m", 1))
    assert find_place({**launcher, "TRIO_UCX_SIZE": "1234"}, machine, meeting="m:1").size == 1234
    for arguments in ({"rank": 0}, {"size": 1234}, {"rank": 0, "size": 1234}):
        place = find_place(launcher, machine, meeting="m:1", **arguments)
        assert (place.rank, place.size) == (arguments.get("rank", basis.rank), arguments.get("size", basis.size))
        assert place.hosts == ()
        assert all(f"the argument {name}" in place.source for name in (*arguments, "meeting"))


def test_arguments_override_variables() -> None:
    place = find_place(OURS, rank=3, size=9, meeting="file:///shared/a%20file", authkey=b"k" * 16)
    assert place == Place(
        3, 9, AtFile(Path("/shared/a file")), b"k" * 16, "the argument rank, the argument size, the argument meeting"
    )
    assert find_place({}, rank=3, size=9, meeting="h:1") == find_place(SLURM, rank=3, size=9, meeting="h:1")
    assert "kkk" not in repr(place)


def test_a_launcher_is_not_asked_for_what_is_given() -> None:
    assert find_place({**OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE": "x", "TRIO_UCX_SIZE": "9"}, meeting="mpi").size == 9
    assert find_place({**BATCH, **OURS}).size == 4


# ---- meetings ----


@pytest.mark.parametrize(
    ("text", "meeting"),
    [
        ("host:1", AtPort("host", 1)),
        ("[fe80::1%eth0]:65535", AtPort("fe80::1%eth0", 65535)),
        ("file:///shared/path", AtFile(Path("/shared/path"))),
        ("file://localhost/shared/a%25b", AtFile(Path("/shared/a%b"))),
        ("mpi", ThroughMPI()),
    ],
)
def test_meetings(text: str, meeting: Meeting) -> None:
    assert parse_meeting(text) == meeting
    assert parse_meeting(str(meeting)) == meeting


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":1", "host:x", "host:65536", "host:0", "::1:5", "MPI"),
        *("file:", "file://", "file:///", "file:///a/", "file://host/path", "file:relative", "file:///a%00", "/path"),
        *("unix:/path", "http://host:80"),
    ],
)
def test_bad_meetings(text: str) -> None:
    with pytest.raises(ValueError):
        parse_meeting(text)
    if text:  # an empty variable counts as not set
        with pytest.raises(ValueError, match="^TRIO_UCX_MEETING: "):
            find_place({**OURS, "TRIO_UCX_MEETING": text})
    with pytest.raises(TypeError):
        parse_meeting(text.encode())  # type: ignore[arg-type]


# ---- torchrun ----


def test_torchrun_leaves_the_port_of_its_agent_alone() -> None:
    assert find_place(TORCH).meeting == AtPort("master", 29500)
    ports = {port_of({**TORCHRUN, "TORCHELASTIC_RUN_ID": str(run)}) for run in range(300)}
    assert len(ports) > 250 and 29500 not in ports and all(20000 <= port < 32768 for port in ports)
    assert port_of(TORCHRUN) == port_of({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "1"})
    assert port_of({**TORCHRUN, "MASTER_PORT": "29501"}) != port_of(TORCHRUN)
    assert port_of({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True"}) != 29500
    assert port_of({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "False"}) == 29500


@pytest.mark.parametrize("ours", [20000, 32767])
def test_a_computed_port_is_never_that_of_the_agent(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launchers, "_port_for", lambda *parts: ours)
    port = port_of({**TORCHRUN, "MASTER_PORT": str(ours)})
    assert port != ours and 20000 <= port < 32768


# ---- MPI ----


@pytest.mark.parametrize("environment", [OPEN_MPI_4, OPEN_MPI_5], ids=["4.1", "5"])
def test_open_mpi_on_one_host_meets_at_a_private_file(environment: dict[str, str], tmp_path: Path) -> None:
    machine = attrs.evolve(NO_MACHINE, temporary_folder=lambda: str(tmp_path))

    def path(environment: dict[str, str]) -> Path:
        meeting = find_place(environment, machine).meeting
        assert isinstance(meeting, AtFile)
        return meeting.path

    first = path(environment)
    assert first.parent == tmp_path / f"trio_ucx-{os.geteuid()}"
    assert first.parent.stat().st_mode & 0o777 == 0o700 and not first.exists()
    assert first == path({**environment, "OMPI_COMM_WORLD_RANK": "0"})
    assert first != path({**environment, "PMIX_NAMESPACE": "another"})
    assert first != path({**environment, "PMIX_SERVER_URI41": "175177728.0;tcp4://127.0.0.1:42018"})


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    machine = attrs.evolve(NO_MACHINE, temporary_folder=lambda: str(tmp_path))
    folder = tmp_path / f"trio_ucx-{os.geteuid()}"

    def refused() -> None:
        with pytest.raises(PermissionError, match="must be a folder that only this user can enter"):
            find_place(OPEN_MPI_4, machine)

    folder.mkdir(mode=0o700)
    folder.chmod(0o750)
    refused()
    folder.chmod(0o700)
    find_place(OPEN_MPI_4, machine)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        refused()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    refused()
    folder.unlink()
    folder.write_text("")
    refused()


@pytest.mark.parametrize(
    "environment",
    [
        *(OPEN_MPI_HOSTS, MPICH),
        {name: text for name, text in OPEN_MPI_4.items() if name != "PMIX_NAMESPACE"},
        {name: text for name, text in OPEN_MPI_4.items() if name != "OMPI_COMM_WORLD_LOCAL_SIZE"},
    ],
    ids=["hosts", "mpich", "no id", "no local size"],
)
def test_mpi_meets_by_mpi_or_at_the_master_port(environment: dict[str, str]) -> None:
    assert find_place(environment, WITH_MPI4PY).meeting == ThroughMPI()
    assert find_place({**environment, **MASTER}, WITH_MPI4PY).meeting == ThroughMPI()
    assert find_place({**environment, **MASTER}, WITHOUT_MPI4PY).meeting == AtPort("master", 29500)
    with pytest.raises(RuntimeError, match="MPI.* started this process.* Install mpi4py; or set TRIO_UCX_MEETING"):
        find_place({**environment, "MASTER_ADDR": "master"}, WITHOUT_MPI4PY)


def test_mpi4py_is_looked_for_but_not_imported() -> None:
    before = "mpi4py" in sys.modules
    assert isinstance(Machine().has_mpi4py(), bool)
    assert ("mpi4py" in sys.modules) == before


# ---- Slurm ----


def test_slurm_meets_on_the_first_host_at_a_port_of_the_step() -> None:
    place = find_place(SLURM)
    assert isinstance(place.meeting, AtPort) and place.meeting.host == "n1"
    ports = {port_of({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step}) for job in range(99) for step in "012"}
    assert len(ports) > 250 and all(20000 <= port < 32768 for port in ports)
    assert port_of(SLURM) == port_of({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "1"})
    assert port_of(SLURM) == 30034  # the same in all versions of Python, and of trio_ucx


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        ({}, "n1 n1 n2 n2 n3 n3 n5 n5"),
        ({"SLURM_DISTRIBUTION": "block:cyclic"}, "n1 n1 n2 n2 n3 n3 n5 n5"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3,2(x2)"}, "n1 n2 n2 n2 n3 n3 n5 n5"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,4,2,1", "SLURM_DISTRIBUTION": "cyclic"}, "n1 n2 n3 n5 n2 n3 n2 n2"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, ""),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ""),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, ""),
        ({"SLURM_STEP_TASKS_PER_NODE": "what"}, ""),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, ""),
    ],
)
def test_hosts_of_slurm(changes: dict[str, str], hosts: str) -> None:
    place = find_place({**SLURM, **changes})
    assert place.hosts == tuple(hosts.split())
    assert [place.host_of(rank) for rank in range(8)] == (hosts.split() or [None] * 8)


def test_slurm_of_the_job_without_those_of_the_step() -> None:
    environment = {**without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "a,b"}
    place = find_place(environment)
    assert place.size == 99 and isinstance(place.meeting, AtPort) and place.meeting.host == "a" and place.hosts == ()


def test_slurm_says_what_is_wrong() -> None:
    with pytest.raises(RuntimeError, match="belongs to a batch script, not to a step of 99 tasks.*with srun"):
        find_place(BATCH)
    assert find_place({**BATCH, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).size == 1
    with pytest.raises(RuntimeError, match="SLURM_DISTRIBUTION=arbitrary.*TRIO_UCX_MEETING"):
        find_place({**SLURM, "SLURM_DISTRIBUTION": "arbitrary"})
    with pytest.raises(ValueError, match="^SLURM_STEP_NODELIST: 'n\\[1' is not a list of hosts"):
        find_place({**SLURM, "SLURM_STEP_NODELIST": "n[1"})
    with pytest.raises(RuntimeError, match="variable SLURM_JOB_ID is not set"):
        find_place(without(SLURM, "SLURM_JOB_ID"))
    with pytest.raises(RuntimeError, match="variable SLURM_STEP_NODELIST or SLURM_JOB_NODELIST is not set"):
        find_place(without(SLURM, "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a", "a"),
        ("a,b-1.domain", "a b-1.domain"),
        ("node[01-03,7],gpu-a[1-2]b", "node01 node02 node03 node7 gpu-a1b gpu-a2b"),
        ("r[1-2]n[08-10]", "r1n08 r1n09 r1n10 r2n08 r2n09 r2n10"),
        ("r[1,3]c[0]s[0-1]x,last", "r1c0s0x r1c0s1x r3c0s0x r3c0s1x last"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[009-011,5]", "n009 n010 n011 n5"),
        ("[1-2]a", "1a 2a"),
    ],
)
def test_lists_of_hosts(text: str, nodes: str) -> None:
    assert expand_nodelist(text) == nodes.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "a[", "a]", "a[]", "a[1", "a1]", "a[1-]", "a[-1]", "a[x]", "a[3-1]"),
        *("a[[1]]", "a[1],", "a[1-999999999]", "a[1-9999]b[1-9999]", "a[1,,2]"),
    ],
)
def test_bad_lists_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of hosts"):
        expand_nodelist(text)


def test_counts_of_tasks() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for text in ("", "x", "2(x)", "2(3)", "2,", "-1", "1(x9999999)"):
        assert expand_counts(text) == []


# ---- Kubernetes ----


def test_kubernetes_meets_at_the_first_pod() -> None:
    for environment in (INDEXED_JOB, STATEFUL_SET):
        expected = AtPort("train-7-0.group.default.svc.cluster.local", _launchers.POD_PORT)
        assert find_place(environment, POD_NAME).meeting == expected
    alone = attrs.evolve(NO_MACHINE, full_host_name=lambda: "train-7-12")
    with pytest.raises(RuntimeError, match="host name of this pod, train-7-12, .*headless Service"):
        find_place(STATEFUL_SET, alone)
    assert find_place({**STATEFUL_SET, "TRIO_UCX_MEETING": "leader:99"}, alone).meeting == AtPort("leader", 99)
    with pytest.raises(RuntimeError, match="set TRIO_UCX_SIZE in the pod template"):
        find_place(without(STATEFUL_SET, "TRIO_UCX_SIZE"), POD_NAME)
    with pytest.raises(RuntimeError, match="Looked for"):  # a pod of a Deployment
        find_place({**POD, "HOSTNAME": "web-5d4f8c7b9-abcde"})


# ---- what is wrong ----


def test_nothing_found() -> None:
    with pytest.raises(RuntimeError) as caught:
        find_place({"HOME": "/root", "HOSTNAME": "worker-3", "SLURM_NTASKS": "4"})
    text = str(caught.value)
    assert text.startswith("the environment does not say the rank of this process. Looked for, in this order: TRIO_UCX")
    names = ["TRIO_UCX_RANK", "RANK, WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "KUBERNETES_SERV"]
    assert sorted(names, key=text.index) == names
    assert "python -m trio_ucx mesh --ranks 4 program.py" in text and "join(rank=, size=, meeting=)" in text


@pytest.mark.parametrize(
    ("environment", "arguments", "what"),
    [
        ({"TRIO_UCX_RANK": "1"}, {}, "the number of ranks. Set: only TRIO_UCX_RANK"),
        ({"TRIO_UCX_RANK": "1", "TRIO_UCX_SIZE": "2"}, {}, "where the ranks meet. Set: only TRIO_UCX_RANK and"),
        ({"TRIO_UCX_SIZE": "2", "TRIO_UCX_MEETING": "a:1"}, {}, "the rank of this process. Set: only TRIO_UCX_SI"),
        ({}, {"rank": 1}, "the number of ranks. Looked for"),
        ({}, {"rank": 1, "size": 2}, "where the ranks meet. Looked for"),
    ],
)
def test_too_little_is_said(environment: dict[str, str], arguments: dict[str, int], what: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        find_place(environment, **arguments)
    assert str(caught.value).startswith(f"the environment does not say {what}")


@pytest.mark.parametrize(
    ("environment", "arguments", "text"),
    [
        ({**TORCH, "RANK": "abc"}, {}, "RANK must be an integer, not 'abc'"),
        ({**TORCH, "RANK": "1.5"}, {}, "RANK must be an integer"),
        ({**TORCH, "RANK": "9" * 30}, {}, "RANK must be an integer"),
        ({**TORCH, "RANK": "٣"}, {}, "RANK must be an integer"),
        ({**TORCH, "WORLD_SIZE": "many"}, {}, "WORLD_SIZE must be an integer, not 'many'"),
        ({**TORCH, "RANK": "5"}, {}, "RANK is 5, but WORLD_SIZE is 5: ranks are 0 to 4"),
        ({**TORCH, "RANK": "-1"}, {}, "RANK is -1, but WORLD_SIZE is 5: ranks are 0 to 4"),
        ({**TORCH, "WORLD_SIZE": "0"}, {}, "WORLD_SIZE is 0: the number of ranks is 1 to"),
        ({**TORCH, "WORLD_SIZE": str(2**40)}, {}, "WORLD_SIZE is 1099511627776: the number"),
        ({**TORCH, "MASTER_PORT": "http"}, {}, "MASTER_PORT must be an integer, not 'http'"),
        ({**TORCH, "MASTER_PORT": "0"}, {}, "MASTER_PORT must be a port, 1 to 65535, not 0"),
        ({**OURS, "TRIO_UCX_RANK": "one"}, {}, "TRIO_UCX_RANK must be an integer, not 'one'"),
        ({**SLURM, "TRIO_UCX_SIZE": "5"}, {}, "SLURM_PROCID is 5, but TRIO_UCX_SIZE is 5"),
        (OURS, {"rank": 4}, "the argument rank is 4, but TRIO_UCX_SIZE is 4"),
        (OURS, {"rank": -1}, "the argument rank is -1, but TRIO_UCX_SIZE is 4"),
        (OURS, {"size": 0}, "the argument size is 0"),
        (OURS, {"size": -3}, "the argument size is -3"),
    ],
)
def test_bad_values_name_their_variable(environment: dict[str, str], arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_place(environment, **arguments)
    assert str(caught.value).startswith(text)


def test_missing_variables_of_a_launcher_are_named() -> None:
    with pytest.raises(RuntimeError, match="variable MASTER_ADDR is not set; the launcher should set it"):
        find_place(without(TORCH, "MASTER_ADDR"))
    with pytest.raises(RuntimeError, match="variable OMPI_COMM_WORLD_SIZE is not set"):
        find_place(without(OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE"))


@pytest.mark.parametrize("arguments", [{"rank": "1"}, {"size": 2.0}, {"meeting": b"a:1"}, {"authkey": "k" * 20}])
def test_arguments_of_wrong_types(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        find_place(OURS, **arguments)


# ---- the key ----


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"  a key of some length\n")
    path.chmod(0o600)
    with_file = {**OURS, "TRIO_UCX_AUTHKEY_FILE": str(path)}
    assert find_place(with_file).authkey == b"a key of some length"
    with_both = {**with_file, "TRIO_UCX_AUTHKEY": KEY}
    assert find_place(with_both).authkey == KEY.encode()
    assert find_place(with_both, authkey=b"x" * 16).authkey == b"x" * 16
    assert find_place({**OURS, "TRIO_UCX_AUTHKEY": "\udcff" * 16}).authkey == b"\xff" * 16  # as os.environ has it


def test_bad_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with_file = {**OURS, "TRIO_UCX_AUTHKEY_FILE": str(path)}
    with pytest.raises(FileNotFoundError):
        find_place(with_file)
    path.write_bytes(b"\n")
    for mode in (0o644, 0o604, 0o620, 0o610):
        path.chmod(mode)
        with pytest.raises(PermissionError, match=rf"^TRIO_UCX_AUTHKEY_FILE=.*\(mode {mode:04o}\): chmod 600"):
            find_place(with_file)
    path.chmod(0o400)
    with pytest.raises(ValueError, match="^TRIO_UCX_AUTHKEY_FILE=.*: the file is empty"):
        find_place(with_file)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="^TRIO_UCX_AUTHKEY_FILE=.*: authkey has 5 bytes"):
        find_place(with_file)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(PermissionError, match="^TRIO_UCX_AUTHKEY_FILE=.*: it is not a regular file"):
        find_place(with_file)
    for text in ("", "short"):
        with pytest.raises(ValueError, match="^TRIO_UCX_AUTHKEY: authkey has"):
            find_place({**OURS, "TRIO_UCX_AUTHKEY": text})
    with pytest.raises(ValueError, match="^authkey has"):
        find_place(OURS, authkey=b"")
