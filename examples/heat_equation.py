#!/usr/bin/env python3
"""The heat equation on a square plate, whose rows are split over the ranks.

    python -m trio_ucx mesh --ranks 4 examples/heat_equation.py [--side N] [--steps M] [--check]

One side of the plate is hot, the others stay cold. In each step every cell becomes the mean of its four neighbours.
Before it, the ranks exchange the outer rows of their strips (the halo): first all send down, then all send up. The
first and the last rank have only one neighbour: ``to=None`` sends nothing, ``source=None`` receives nothing.

With ``--check``, rank 0 collects the plate, and compares it with one that it has computed alone.
"""

from __future__ import annotations

import argparse
import time

import numpy
import numpy.typing
import trio

from trio_ucx import mesh

Grid = numpy.typing.NDArray[numpy.float64]


def plate(first: int, last: int, side: int) -> Grid:
    """Rows of the plate as it is at the beginning. Its first row is hot."""
    grid = numpy.zeros((last - first, side))
    if first == 0:
        grid[0] = 100
    return grid


def step(old: Grid, new: Grid) -> None:
    """Computes the next state of all cells but those at the borders. It allocates nothing, which would cost most."""
    inner = new[1:-1, 1:-1]
    numpy.add(old[:-2, 1:-1], old[2:, 1:-1], out=inner)
    inner += old[1:-1, :-2]
    inner += old[1:-1, 2:]
    inner *= 0.25


async def exchange(group: mesh.Group, strip: Grid) -> None:
    """Fills the strip's first and last row, which belong to the neighbours."""
    above = group.rank - 1 if group.rank > 0 else None
    below = group.rank + 1 if group.rank < group.size - 1 else None
    await group.send_receive(strip[-2], to=below, source=above, into=strip[0])
    await group.send_receive(strip[1], to=above, source=below, into=strip[-1])


async def simulate(group: mesh.Group, side: int, steps: int) -> Grid:
    """Returns this rank's rows after so many steps."""
    bounds = [1 + (side - 2) * rank // group.size for rank in range(group.size + 1)]
    first, last = bounds[group.rank], bounds[group.rank + 1]
    old = plate(first - 1, last + 1, side)  # a neighbour's row, or the border, at both ends
    new = old.copy()
    for _ in range(steps):
        await exchange(group, old)
        step(old, new)
        old, new = new, old
    return old[1:-1]


def simulate_alone(side: int, steps: int) -> Grid:
    old = plate(0, side, side)
    new = old.copy()
    for _ in range(steps):
        step(old, new)
        old, new = new, old
    return old[1:-1]


async def main(side: int, steps: int, check: bool) -> None:
    async with mesh.join() as group:
        await group.barrier()
        begin = time.perf_counter()
        rows = await simulate(group, side, steps)
        await group.barrier()
        took = time.perf_counter() - begin
        if group.rank == 0:
            print(f"{side} x {side} cells, {group.size} ranks: {took / steps * 1e6:,.0f} us a step")
        if check:
            strips = await group.gather(rows)
            if strips is not None:  # at rank 0
                same = numpy.array_equal(numpy.concatenate(strips), simulate_alone(side, steps))
                print("as computed alone" if same else "DIFFERENT from what was computed alone")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The heat equation on a square plate.")
    parser.add_argument("--side", type=int, default=1024, metavar="N", help="cells of a side (1024)")
    parser.add_argument("--steps", type=int, default=500, metavar="M", help="how many steps (500)")
    parser.add_argument("--check", action="store_true", help="compare the result with that of one process")
    options = parser.parse_args()
    trio.run(main, options.side, options.steps, options.check)
