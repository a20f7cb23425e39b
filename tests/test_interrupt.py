"""KeyboardInterrupt: a real SIGINT at random moments of a busy program."""

from __future__ import annotations

import random
import signal

import pytest
import trio
from helpers import Peer, open_peer

import trio_ucx
from trio_ucx import ucp

PROGRAMS = 5
INTERRUPTS = 10  # of each program, for each of the two transports


async def interrupt(program: Peer, begun: str, delay: float) -> None:
    """Runs the program once more, and interrupts it so long after it has said that word."""
    await program.tell()
    while await program.hear(60) != begun:
        pass
    await trio.sleep(delay)
    program.signal(signal.SIGINT)
    try:
        while (said := await program.hear(60)) in ("begins", "ready"):
            pass
    except trio.TooSlowError:
        program.signal(signal.SIGABRT)  # faulthandler says where it hangs
        raise
    assert said == ["KeyboardInterrupt", {}], "ended, left"


@pytest.mark.full
@pytest.mark.sample(1)
async def test_interrupted_at_random_moments(worker: ucp.Worker, transports: str, chance: random.Random) -> None:
    async with open_peer("echo", [0, 1], transports=transports) as peer:
        address, _ = await peer.hear()
        limit = trio.CapacityLimiter(3)

        async def run(delays: list[float]) -> None:
            async with limit, open_peer("busy", address, transports) as program:
                for delay in delays:
                    await interrupt(program, "ready", delay)

        with trio.fail_after(200):
            async with trio.open_nursery() as nursery:
                for _ in range(PROGRAMS):
                    nursery.start_soon(run, [chance.random() * 0.05 for _ in range(INTERRUPTS)])
        # The other side was not hurt.
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            await connection.send(b"alive?")
            assert await connection.receive() == b"alive?"


async def test_interrupted_before_anything_is_up(transports: str) -> None:
    """From ``trio.run`` on it must be as clean. (During imports Python's own KeyboardInterrupt ends it.)"""
    async with open_peer("silent", transports=transports) as peer:
        address, _ = await peer.hear()
        async with open_peer("busy", address, transports) as program:  # waits for an answer that never comes
            for delay in (0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5):
                await interrupt(program, "begins", delay)
