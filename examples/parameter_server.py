#!/usr/bin/env python3
"""Training with a parameter server, which goes on when workers die, and takes in those that replace them.

    python -m trio_ucx mesh --ranks 4 examples/parameter_server.py [--seconds S]

Rank 0 keeps the parameters of a linear model. The others are workers: each computes the gradient for a batch of its own
data, sends it, and gets the new parameters, without waiting for other workers. A worker's first gradient is zero, so it
may come at any time. An empty answer means that the training is over.

To see what happens when a worker is lost, start the ranks by hand, each in a terminal of its own:

    export TRIO_UCX_SIZE=4 TRIO_UCX_MEETING=file://$HOME/parameter-server
    TRIO_UCX_RANK=0 python examples/parameter_server.py --seconds 60        # and so on, up to rank 3

Kill a worker: the others go on. Start it again with the same command: the new process takes the place of the lost one.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress

import numpy
import trio

from trio_ucx import mesh

FEATURES, BATCH, RATE = 200, 500, 0.001
GRADIENT, PARAMETERS = 1, 2  # tags
#: What the training has to find out.
TRUTH = numpy.random.default_rng(0).normal(size=FEATURES)


async def serve(group: mesh.Group, seconds: float) -> None:
    parameters = numpy.zeros(FEATURES)
    batches: dict[int, int] = {}  # by worker
    report, end = trio.current_time(), trio.current_time() + seconds
    while True:
        try:
            rank, gradient = await group.receive_from_any(tag=GRADIENT)
            parameters -= RATE * numpy.frombuffer(gradient)
            now = trio.current_time()
            with suppress(mesh.RankLostError):  # `receive_from_any` raises it, too
                await group.send(parameters if now < end else b"", to=rank, tag=PARAMETERS)
            batches[rank] = batches.get(rank, -1) + 1  # the first gradient is zero
        except mesh.RankLostError as error:
            batches.pop(error.rank, None)
            print(f"going on without rank {error.rank}: {error.reason}", flush=True)
            continue
        except trio.EndOfChannel:  # all workers have left
            return
        if now >= report:
            loss = numpy.mean((parameters - TRUTH) ** 2)
            workers = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(batches.items()))
            print(f"loss {loss:.3g}, batches of {workers}", flush=True)
            report = now + 1


async def work(group: mesh.Group) -> None:
    random = numpy.random.default_rng(os.getpid())
    gradient = numpy.zeros(FEATURES)
    while True:
        await group.send(gradient, to=0, tag=GRADIENT)
        answer = await group.receive(source=0, tag=PARAMETERS)
        if not answer:
            return
        parameters = numpy.frombuffer(answer)
        inputs = random.normal(size=(BATCH, FEATURES))
        outputs = inputs @ TRUTH + random.normal(scale=0.1, size=BATCH)  # measured, with noise
        gradient = inputs.T @ (inputs @ parameters - outputs) / BATCH


async def main(seconds: float) -> None:
    async with mesh.join(on_loss="continue") as group:
        if group.rank == 0:
            with trio.move_on_after(seconds + 5):  # a worker that was lost may not come again
                await serve(group, seconds)
        else:
            await work(group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Training with a parameter server and workers that may die.")
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="how long to train (10)")
    trio.run(main, parser.parse_args().seconds)
