#!/usr/bin/env python3
"""Training on all ranks, in which a killed rank comes back and goes on with the others.

    python -m trio_ucx mesh --ranks 4 --restart 1 examples/rejoining.py [--steps N] [--kill-at STEP]

Each rank computes the gradient of a linear model for data of its own; ``all_reduce`` adds them, and all ranks take the
same step. At step ``--kill-at``, rank 1 kills itself. The others raise ``RankLostError`` and wait; the launcher starts
rank 1 again, and the new process joins under its number. Then rank 0 tells all ranks where it is, and they go on from
there: a rank may have been one step ahead of it, and the new one has just begun.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy
import numpy.typing
import trio

from trio_ucx import mesh

FEATURES, BATCH, RATE = 200, 500, 0.2
#: Seconds to wait for the process that replaces a lost one.
PATIENCE = 60
#: What the training has to find out.
TRUTH = numpy.random.default_rng(0).normal(size=FEATURES)

Array = numpy.typing.NDArray[numpy.float64]


class Training:
    """The state of the training, which is the same on all ranks."""

    def __init__(self) -> None:
        self.step = 0
        self.parameters = numpy.zeros(FEATURES)
        self._random = numpy.random.default_rng(os.getpid())

    async def take_over(self, group: mesh.Group) -> None:
        """Makes the state that of rank 0."""
        state = await group.broadcast(numpy.append(self.parameters, self.step) if group.rank == 0 else None)
        self.step, self.parameters = int(state[-1]), state[:-1]

    async def advance(self, group: mesh.Group) -> None:
        gradient = await group.all_reduce(self._gradient(), "sum")
        self.parameters = self.parameters - RATE * gradient / group.size
        self.step += 1

    def _gradient(self) -> Array:
        inputs = self._random.normal(size=(BATCH, FEATURES))
        outputs = inputs @ TRUTH + self._random.normal(scale=0.1, size=BATCH)  # measured, with noise
        gradient: Array = inputs.T @ (inputs @ self.parameters - outputs) / BATCH
        return gradient


async def main(steps: int, kill_at: int | None) -> None:
    async with mesh.join(on_loss="continue") as group:
        training = Training()
        is_first = group.generation == 0  # this process has not replaced another one
        while training.step < steps:
            try:
                await training.take_over(group)
                print(f"rank {group.rank} goes on at step {training.step}", flush=True)
                while training.step < steps:
                    if is_first and (group.rank, training.step) == (1, kill_at):
                        os.kill(os.getpid(), signal.SIGKILL)
                    await training.advance(group)
            except mesh.RankLostError as error:
                print(f"rank {group.rank} waits at step {training.step}: {error}", flush=True)
                with trio.fail_after(PATIENCE):
                    await group.wait_replaced(error.rank)
        loss = numpy.mean((training.parameters - TRUTH) ** 2)
        print(f"rank {group.rank} has finished after {training.step} steps, loss {loss:.3g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Training in which a killed rank comes back and goes on.")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="how many steps (200)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="the step at which rank 1 kills itself (never)")
    options = parser.parse_args()
    trio.run(main, options.steps, options.kill_at)
