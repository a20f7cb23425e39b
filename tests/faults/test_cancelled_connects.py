"""Clients that give up while they connect harm no other connection of the same two workers."""

from __future__ import annotations

import random

import trio
from helpers import Rounds, open_peer

import trio_ucx
from trio_ucx import ucp

#: Seconds after which a client gives up at the latest. UCX needs a few milliseconds to connect.
PATIENCE = 0.02


async def test_others_go_on(transports: str, chance: random.Random, rounds: Rounds) -> None:
    """Over TCP, each 150th to 1,000th that was cancelled broke another one, when UCX's endpoint was closed at once."""
    over = False
    async with (
        open_peer("echo", [0], transports=transports) as peer,
        ucp.open_worker(config={"TLS": transports}) as worker,
    ):
        [host, port], _ = await peer.hear()

        async def live() -> None:
            """Connects again and again, and exchanges messages for up to a second."""
            while not over:
                async with trio_ucx.connect((host, port), worker=worker) as connection:
                    leaves = trio.current_time() + chance.uniform(0.1, 1)
                    while trio.current_time() < leaves and not over:
                        await connection.send(b"well?")
                        with trio.fail_after(20):
                            assert await connection.receive() == b"well?"
                        await trio.sleep(0.002)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            nursery.start_soon(live)
            for _ in range(rounds(300, 5000)):
                with trio.move_on_after(chance.uniform(0, PATIENCE)):
                    connection = await trio_ucx.open_ucx_stream(host, port, worker=worker)
                    await connection.aclose()
            over = True
        await peer.tell()
