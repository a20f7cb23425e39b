"""200 clients of one server, with random cancellations: no reply is lost, duplicated or given to another client."""

from __future__ import annotations

import math
import random
import resource
import struct

import pytest
import trio
from helpers import open_peer, pattern

import trio_ucx
from trio_ucx import ucp

CLIENTS = 200
REQUESTS = 100

_ID = struct.Struct("<II")  # the client, the request


async def converse(connection: trio_ucx.Connection, name: int) -> None:
    """Sends requests and receives their echoes; cancels some sends and receives at random moments."""
    chance = random.Random(name)
    certain: set[int] = set()
    got: list[int] = []
    all_sent = trio.Event()

    async def send() -> None:
        for request in range(REQUESTS):
            size = chance.choice([0, 10, 1000, 5000, 100_000 if request % 20 == 0 else 100])
            patience = chance.choice([0, 0.001]) if request % 3 == 0 else math.inf
            with trio.move_on_after(patience) as scope:
                await connection.send(_ID.pack(name, request) + pattern(size, request))
            if not scope.cancelled_caught:
                certain.add(request)
        all_sent.set()

    async def receive(patience: float) -> bool:
        with trio.move_on_after(patience):
            message = await connection.receive()
            client, request = _ID.unpack_from(message)
            assert client == name, "somebody else's reply"
            assert message[_ID.size :] == pattern(len(message) - _ID.size, request), "a damaged reply"
            got.append(request)
            return True
        return False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while not all_sent.is_set() or not certain <= set(got):
            await receive(chance.choice([0, 0.001, 0.01, 0.1]))
    while await receive(0.2):
        pass  # what was cancelled and nevertheless sent
    assert got == sorted(set(got)), "doubled or out of order"
    assert len(certain) > REQUESTS / 2  # all that were not to be given up


@pytest.mark.full
@pytest.mark.sample(1)
async def test_two_hundred_clients(transports: str, worker: ucp.Worker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with open_peer("echo", [0], transports=transports) as peer:
            address, _ = await peer.hear()
            ready = 0
            everybody = trio.Event()

            async def client(name: int) -> None:
                nonlocal ready
                async with trio_ucx.connect(tuple(address), worker=worker, connect_timeout=60) as connection:
                    ready += 1
                    if ready == CLIENTS:
                        everybody.set()
                    await everybody.wait()
                    await converse(connection, name)

            with trio.fail_after(150):
                async with trio.open_nursery() as nursery:
                    for name in range(CLIENTS):
                        nursery.start_soon(client, name)
            assert ready == CLIENTS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
