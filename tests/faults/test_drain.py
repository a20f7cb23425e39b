"""Servers that are restarted one after the other, under load: no request fails, and none of them exits late."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from contextlib import AsyncExitStack

import attrs
import trio
from helpers import Peer, free_port, open_peer

import trio_ucx
from trio_ucx import ucp

CLIENTS, REQUESTS, SERVERS = 4, 1000, 3
#: Seconds for a drain: ``drain_on_signal``.
DRAIN = 5.0
#: Seconds between two requests of a client, so that there are restarts in between.
PAUSE = 0.002


@attrs.define
class Client:
    """Asks one of several servers, and the next one when that has gone."""

    number: int
    addresses: list[tuple[str, int]]
    worker: ucp.Worker
    #: Why it had to go to another server.
    moved: Counter[str]
    failed: int = 0

    async def run(self) -> None:
        addresses = itertools.cycle(self.addresses[self.number % len(self.addresses) :] + self.addresses)
        retry = trio_ucx.Backoff(first=0.01, longest=0.1, timeout=20)
        connection: trio_ucx.Connection | None = None
        for number in range(REQUESTS):
            request = b"%d %d" % (self.number, number)
            while True:
                try:
                    if connection is None:
                        connection = await trio_ucx.open_ucx_stream(*next(addresses), worker=self.worker, retry=retry)
                    await connection.send(request)
                    if await connection.receive() != request:
                        self.failed += 1
                    break
                except (trio.EndOfChannel, trio_ucx.PeerClosed) as error:  # what it asked was not answered: ask again
                    assert connection is not None
                    connection.abort()
                    connection = None
                    self.moved[type(error).__name__] += 1
            await trio.sleep(PAUSE)
        assert connection is not None
        await connection.aclose()


async def test_restarts_under_load(worker: ucp.Worker, transports: str) -> None:
    ports = [free_port() for _ in range(SERVERS)]
    moved: Counter[str] = Counter()
    late = restarts = 0
    started: list[Peer] = []
    async with AsyncExitStack() as stack:

        async def start(port: int) -> Peer:
            server = await stack.enter_async_context(open_peer("drained", port, DRAIN, transports=transports))
            started.append(server)
            assert await server.hear() == "ready"
            return server

        servers = [await start(port) for port in ports]
        clients = [Client(number, [("127.0.0.1", port) for port in ports], worker, moved) for number in range(CLIENTS)]
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:

                async def restart() -> None:
                    nonlocal late, restarts
                    for number in itertools.cycle(range(SERVERS)):
                        begun = trio.current_time()
                        servers[number].signal(signal.SIGTERM)
                        assert await servers[number].ended() == 0
                        late += trio.current_time() - begun > DRAIN
                        restarts += 1
                        servers[number] = await start(ports[number])

                nursery.start_soon(restart)
                async with trio.open_nursery() as running:
                    for client in clients:
                        running.start_soon(client.run)
                nursery.cancel_scope.cancel()
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
    assert sum(client.failed for client in clients) == 0 and late == 0
    assert restarts >= SERVERS and moved
