"""Ctrl-C, a real SIGINT, at random moments of a busy program."""

from __future__ import annotations

import random
import signal

import pytest
import trio
from helpers import open_peer

import trio_ucx
from trio_ucx import ucp

INTERRUPTS = 50  # for each of the two transports


async def test_interrupted_at_random_moments(worker: ucp.Worker, transports: str) -> None:
    chance = random.Random(transports)
    async with open_peer("echo", [0, 1], transports=transports) as peer:
        address, _ = await peer.hear()

        async def once(delay: float) -> None:
            async with open_peer("busy", address, transports) as program:
                assert await program.hear(30) == "ready"
                await trio.sleep(delay)
                program.signal(signal.SIGINT)
                ended, left = await program.hear(30)
                assert ended == "KeyboardInterrupt"
                assert left == {}
                assert await program.ended() == 0

        limit = trio.CapacityLimiter(3)

        async def limited(delay: float) -> None:
            async with limit:
                await once(delay)

        with trio.fail_after(240):
            async with trio.open_nursery() as nursery:
                for _ in range(INTERRUPTS):
                    nursery.start_soon(limited, chance.random() * 0.05)
        # The other side was not hurt.
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            await connection.send(b"alive?")
            assert await connection.receive() == b"alive?"


@pytest.mark.parametrize("moment", range(5))
async def test_interrupted_before_anything_is_up(transports: str, moment: int) -> None:
    """During imports Python's own KeyboardInterrupt ends it; from ``trio.run`` on, ours must be as clean."""
    async with open_peer("silent", transports=transports) as peer:
        address, _ = await peer.hear()
        async with open_peer("busy", address, transports) as program:  # waits for an answer that never comes
            with trio.move_on_after(1.5 + moment * 0.05):
                await program.ended(10)
            program.signal(signal.SIGINT)
            ended, left = await program.hear(30)
            assert (ended, left) == ("KeyboardInterrupt", {})
