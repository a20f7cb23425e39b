"""Programs under real launchers: ``mpirun`` of Open MPI 4.1 and 5, ``srun``, and our own."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trio_ucx.mesh import _mpi

from .launchers import Launcher, mpirun_debian, mpirun_pypi, slurm

RANKS = 4
#: What each rank runs. It prints a line of JSON.
PROGRAM = """
import json, os, socket, trio
from trio_ucx import mesh
from trio_ucx.mesh._place import find_place

place = find_place(os.environ)
said = {
    "rank": place.rank,
    "size": place.size,
    "meeting": str(place.meeting),
    "source": place.source,
    "hosts": place.hosts,
    "authkey": place.authkey is not None,
    "host": socket.gethostname(),
}

async def main():
    async with mesh.join(timeout=30) as group:
        await group.barrier()
        said["ranks"] = [int(part) for part in await group.all_gather(b"%d" % group.rank)]

trio.run(main)
os.write(1, json.dumps(said).encode() + b"\\n")
"""
#: The same with the broadcast of MPI. A rank that has not begun after a while must not hold the others up.
BROADCAST = """
import json, os, sys, trio
from trio_ucx.mesh import _mpi
from trio_ucx.mesh._place import find_place

place = find_place(os.environ, meeting="mpi")

async def main():
    if sys.argv[1] == "initialised":
        from mpi4py import MPI
    if sys.argv[1] == "late" and place.rank == 1:
        await trio.sleep(1000)
    value = b"from the root" * 1000 if place.rank == 0 else None
    with trio.move_on_after(20 if sys.argv[1] != "late" else 2) as scope:
        said = {"rank": place.rank, "value": len(await _mpi.broadcast(value, size=place.size))}
    if scope.cancelled_caught:
        sys.exit("too slow")
    from mpi4py import MPI
    said["world"] = MPI.COMM_WORLD.Get_size()
    os.write(1, json.dumps(said).encode() + b"\\n")

trio.run(main)
"""


#: The collective operations, and mpi4py's on the same values.
COLLECTIVES = """
import numpy, os, trio
from trio_ucx import mesh
from mpi4py import MPI

def same(ours, theirs):
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, numpy.ndarray):
        return ours.dtype == theirs.dtype and numpy.array_equal(ours, theirs)
    return ours == theirs and type(ours) is type(theirs)

async def main():
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    values = [b"", bytes([rank]) * rank, bytes(100_000), numpy.arange(rank + 2.0), numpy.eye(3, dtype="f4") * rank]
    ours, checked = [], 0
    async with mesh.join(timeout=30) as group:
        assert (group.rank, group.size) == (rank, size)
        for value in values:
            ours.append(await group.all_gather(value))
            for root in range(size):
                ours.append((await group.broadcast(value, root=root), await group.gather(value, root=root)))
                await group.barrier()
    # Now MPI may block: nobody waits for this rank's loop any more.
    ours.reverse()
    for value in values:
        assert same(ours.pop(), world.allgather(value)), value
        for root in range(size):
            broadcast, gathered = ours.pop()
            assert same(broadcast, world.bcast(value, root)), (value, root)
            assert same(gathered, world.gather(value, root)), (value, root)
            checked += 3
    os.write(1, b'{"rank": %d, "checked": %d}\\n' % (rank, checked))

trio.run(main)
"""


def mesh_command() -> Launcher:
    return Launcher(
        "python -m trio_ucx mesh",
        lambda ranks: [sys.executable, "-c", _OURS, str(ranks)],
    )


#: Makes of ``[ranks, python, options, "-c", text]`` a program in a file, as ``python -m trio_ucx mesh`` takes it.
_OURS = """
import os, sys, tempfile
from trio_ucx._cli import main
with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write(sys.argv[-1])
    file.flush()
    sys.exit(main(["mesh", "--ranks", sys.argv[1], file.name]))
"""


@contextmanager
def open_launcher(name: str, tmp_path: Path) -> Iterator[Launcher]:
    kind, _, two = name.partition(", ")
    if kind == "slurm":
        with slurm(tmp_path, nodes=2 if two else 1) as launcher:
            yield launcher
    elif kind == "ours":
        yield mesh_command()
    else:
        yield {"debian": mpirun_debian, "pypi": mpirun_pypi}[kind](tmp_path if two else None)


def need_mpi4py() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")


def lines_of(output: str) -> list[dict[str, Any]]:
    """What the ranks have said, by rank."""
    said = [json.loads(re.sub(r"^\[\d+\] ", "", line)) for line in output.splitlines() if "{" in line]
    return sorted(said, key=lambda one: int(one["rank"]))


@pytest.mark.parametrize(
    "name",
    [
        *("debian", "pypi", "ours"),
        *(
            pytest.param(name, marks=pytest.mark.root)
            for name in ("debian, two hosts", "pypi, two hosts", "slurm", "slurm, two hosts")
        ),
    ],
)
def test_places(name: str, tmp_path: Path) -> None:
    if name in ("debian, two hosts", "pypi, two hosts"):
        need_mpi4py()
    with open_launcher(name, tmp_path) as launcher:
        done = launcher.run(RANKS, "-c", PROGRAM, TRIO_UCX_AUTHKEY="a key for the tests")
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stdout)
    assert [(one["rank"], one["size"], one["authkey"]) for one in said] == [
        (rank, RANKS, True) for rank in range(RANKS)
    ]
    assert all(one["ranks"] == list(range(RANKS)) for one in said)
    assert len({one["meeting"] for one in said}) == 1
    meeting, host = said[0]["meeting"], said[0]["host"].partition(".")[0]
    source = said[0]["source"]
    if not name.startswith("ours"):
        assert len({one["host"] for one in said}) == (2 if "two" in name else 1)
    if name in ("debian, two hosts", "pypi, two hosts"):
        assert (source, meeting) == ("Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, mpi4py)", "mpi")
    elif name in ("debian", "pypi"):
        assert source.startswith("Open MPI (") and re.fullmatch(r"file:///.*/trio_ucx-\d+/mesh-[0-9a-f]{16}", meeting)
    elif name.startswith("slurm"):
        assert source == "Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST)"
        assert re.fullmatch(rf"{re.escape(host)}:[23]\d{{4}}", meeting)
        assert said[0]["hosts"] == [one["host"] for one in said]
    else:
        assert source == "TRIO_UCX_RANK, TRIO_UCX_SIZE, TRIO_UCX_MEETING" and meeting.startswith("file:///")


@pytest.mark.root
def test_places_of_two_steps_differ(tmp_path: Path) -> None:
    with slurm(tmp_path) as launcher:
        done = [launcher.run(2, "-c", PROGRAM, TRIO_UCX_AUTHKEY="a key for the tests") for _ in range(2)]
    first, second = (lines_of(one.stdout)[0]["meeting"] for one in done)
    assert first != second


TWO_HOSTS = pytest.param("fresh", ", two hosts", marks=pytest.mark.root)


@pytest.mark.parametrize("name", ["debian", "pypi"])
class TestMPI:
    """The broadcast; mpi4py's wheel finds the library of the Open MPI that has started it."""

    @pytest.fixture(autouse=True)
    def with_mpi4py(self) -> None:
        need_mpi4py()

    @pytest.mark.parametrize(("how", "hosts"), [TWO_HOSTS, ("fresh", ""), ("initialised", "")])
    def test_broadcast(self, name: str, how: str, hosts: str, tmp_path: Path) -> None:
        with open_launcher(name + hosts, tmp_path) as launcher:
            done = launcher.run(RANKS, "-c", BROADCAST, how)
        assert done.returncode == 0, done.stderr
        assert lines_of(done.stdout) == [{"rank": rank, "value": 13_000, "world": RANKS} for rank in range(RANKS)]

    def test_collectives_agree(self, name: str, tmp_path: Path) -> None:
        with open_launcher(name, tmp_path) as launcher:
            done = launcher.run(RANKS, "-c", COLLECTIVES)
        assert done.returncode == 0, done.stderr
        assert lines_of(done.stdout) == [{"rank": rank, "checked": 60} for rank in range(RANKS)]

    def test_a_rank_that_does_not_come_holds_nobody_up(self, name: str, tmp_path: Path) -> None:
        with open_launcher(name, tmp_path) as launcher:
            done = launcher.run(3, "-c", BROADCAST, "late", timeout=30)
        assert done.returncode != 0 and "too slow" in done.stderr

    def test_another_number_of_ranks(self, name: str, tmp_path: Path) -> None:
        with open_launcher(name, tmp_path) as launcher:
            done = launcher.run(2, "-c", BROADCAST, "fresh", TRIO_UCX_SIZE="3")
        assert done.returncode != 0 and "the launcher has started 3 ranks, but MPI has 2" in done.stderr


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broadcasts of these tests fail, after which MPI would not be finalised."""
    monkeypatch.setattr(_mpi, "_state", _mpi._State())


@pytest.mark.usefixtures("fresh_state")
async def test_broadcast_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match="^mpi4py cannot be used: ") as caught:
        await _mpi.broadcast(b"value")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(ValueError, match="the value has 1048577 bytes"):
        await _mpi.broadcast(bytes(2**20 + 1))
