#!/usr/bin/env python3
"""All-reduce on a ring: the sum of an array of each rank, on all ranks.

    python -m trio_ucx mesh --ranks 4 examples/ring_all_reduce.py

Each rank sends to its right neighbour while it receives from its left one, a part of the array at a time: first sums
that grow, then sums that are complete. However many ranks there are, each sends about twice the size of the array.

It shows ``send_receive`` with parts of arrays. For the sum alone, ``await group.all_reduce(array, "sum")`` is faster.
"""

from __future__ import annotations

import time

import numpy
import numpy.typing
import trio

from trio_ucx import mesh

#: Elements of the array.
LENGTH = 4_000_000

Array = numpy.typing.NDArray[numpy.float64]


async def all_reduce(group: mesh.Group, array: Array) -> None:
    """Replaces the array by the sum of the arrays of all ranks."""
    rank, size = group.rank, group.size
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = numpy.array_split(array, size)  # views of the array
    received = numpy.empty_like(parts[0])
    for step in range(size - 1):
        sent, summed = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        into = received[: len(summed)]
        await group.send_receive(sent, to=right, source=left, into=into)
        summed += into
    for step in range(size - 1):
        sent, complete = parts[(rank - step + 1) % size], parts[(rank - step) % size]
        await group.send_receive(sent, to=right, source=left, into=complete)


async def main() -> None:
    async with mesh.join() as group:
        array = numpy.arange(LENGTH, dtype=float) + group.rank
        expected = group.size * numpy.arange(LENGTH, dtype=float) + sum(range(group.size))
        await group.barrier()
        begin = time.perf_counter()
        await all_reduce(group, array)
        took = time.perf_counter() - begin
        right = numpy.array_equal(array, expected)
        print(f"rank {group.rank}: {'right' if right else 'WRONG'}, {array.nbytes / 1e6:.0f} MB in {took * 1e3:.1f} ms")


if __name__ == "__main__":
    trio.run(main)
