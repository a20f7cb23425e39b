"""How soon either side detects the loss of its peer: a killed process, an abort, a network that is cut. What operations
do then: ``test_peer_death.py``.

A peer that is stopped is not lost.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import Peer, assert_transports, open_listener, open_peer, pattern
from networks import Host, Network, open_network
from peers import load
from timing import Noise, waited_by

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp._engine.endpoint_core import WRITING_TIME

#: Seconds after which the other side knows when the kernel says so.
SOON = 1.0
SIDES = ["client", "server"]
#: What the test does meanwhile, by what the peer does.
COUNTERPART = {"sending": "receiving", "receiving": "sending", "echo": "idle"}


@asynccontextmanager
async def met(
    peer: Peer, worker: ucp.Worker, side: str, host: str, kind: str, way: str, **options: Any
) -> AsyncIterator[trio_ucx.Connection]:
    """Our end of a connection with a ``lost_peer``, which is its client or server, under load."""
    if side == "server":
        await peer.tell([host, None, options, kind, way])
        connection = await trio_ucx.open_ucx_stream(*await peer.hear(), worker=worker, **options)
    else:
        async with open_listener(worker, host=host, **options) as listener:
            await peer.tell([None, listener.address, options, kind, way])
            with trio.fail_after(20):
                connection = await listener.accept()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(load, connection, COUNTERPART.get(kind, "idle"))
            assert await peer.hear() == "ready"
            yield connection
            nursery.cancel_scope.cancel()
    finally:
        connection.abort()


async def assert_soon_lost(connection: trio_ucx.Connection, peer: Peer, since: float, what: object) -> None:
    with Noise(waited_by(peer.process.pid)) as noise:
        with pytest.raises(trio.BrokenResourceError):
            with trio.fail_after(60):
                await connection.receive(tag=1)
        took, now = trio.current_time() - since, time.perf_counter()
        allowed = SOON + noise.since(now - took, now)
    assert took < allowed, f"{what}: noticed after {took:.3f} s, allowed are {allowed:.3f} s"
    with pytest.raises(trio.BrokenResourceError):
        connection.send_nowait(b"x", tag=4)


@pytest.fixture(params=["tcp", "unix"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the control socket is listened at."""
    return "127.0.0.1" if request.param == "tcp" else f"unix:{tmp_path}/socket"


@pytest.mark.sample(2)
@pytest.mark.cut_off
async def test_process_ends(transports: str, host: str) -> None:
    ends = [
        ("client", "killed", "idle"),
        ("server", "killed", "idle"),
        ("client", "killed", "sending"),
        ("server", "killed", "sending"),
        ("server", "killed", "receiving"),
        ("client", "exit", "offered"),
        ("server", "exit", "full"),
    ]
    start = trio.CapacityLimiter(2)
    ready = trio.Lock()  # one at a time, so that none has to wait for others' data

    async def lose(number: int, side: str, way: str, kind: str) -> None:
        async with (
            start,
            open_peer("lost_peer", transports=transports) as peer,
            ucp.open_worker(config={"TLS": transports}) as worker,  # its own: a peer may die while it writes to it
            ready,
            met(peer, worker, side, f"{host}{number}" if "unix" in host else host, kind, way) as connection,
        ):
            assert_transports(connection, transports)
            since = trio.current_time()
            if way == "killed":
                peer.signal(signal.SIGKILL)
            else:
                await peer.tell()
            await assert_soon_lost(connection, peer, since, (side, way, kind))

    async with trio.open_nursery() as nursery:
        for number, case in enumerate(ends):
            nursery.start_soon(lose, number, *case)


@pytest.mark.sample(2)
async def test_process_lives_on(transports: str, host: str) -> None:
    """The connection is aborted, or its worker closed."""
    ends = [
        ("abort", "idle"),
        ("abort", "full"),
        ("abort", "offered"),
        ("abort", "sending"),
        ("abort", "receiving"),
        ("exception", "full"),
        ("exception", "sending"),
        ("worker", "full"),
        ("worker", "offered"),
        ("worker", "receiving"),
    ]
    async with open_peer("lost_peer", transports=transports) as peer:
        for way, kind in ends:
            for side in SIDES:
                async with ucp.open_worker(config={"TLS": transports}) as worker:
                    async with met(peer, worker, side, host, kind, way) as connection:
                        assert_transports(connection, transports)
                        since = trio.current_time()
                        await peer.tell()
                        await assert_soon_lost(connection, peer, since, (side, way, kind))
                    assert await peer.hear() == "ended"


async def test_stopped_is_not_lost(tmp_path: Path) -> None:
    """The kernel answers for a process that is stopped. When it goes on, everything does."""
    everybody = 2 * 2 * 2
    running = 0
    all_run = trio.Event()

    async def stop(transports: str, by: str, side: str) -> None:
        nonlocal running
        host = "127.0.0.1" if by == "tcp" else f"unix:{tmp_path}/{transports}{side}"
        async with (
            ucp.open_worker(config={"TLS": transports}) as worker,
            open_peer("lost_peer", transports=transports) as peer,
            met(peer, worker, side, host, "echo", "abort", keepalive_interval=1) as connection,
        ):
            await connection.send(b"well?", tag=3)
            assert await connection.receive(tag=3) == b"well?"
            running += 1
            if running == everybody:
                all_run.set()
            await all_run.wait()
            await peer.stop()
            large = pattern(2**24)
            with trio.move_on_after(3) as stopped:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(connection.receive, tag=1))
                    nursery.start_soon(partial(connection.send, large, tag=3))
                    await connection.send(b"still there?", tag=3)
            assert stopped.cancelled_caught
            peer.resume()
            with trio.fail_after(60):
                messages = connection.messages(3)
                assert {await anext(messages), await anext(messages)} == {large, b"still there?"}
            since = trio.current_time()
            await peer.tell()
            await assert_soon_lost(connection, peer, since, (side, "after it was stopped"))

    async with trio.open_nursery() as nursery:
        for transports in ("tcp", "tcp,sm,self"):
            for by in ("tcp", "unix"):
                for side in SIDES:
                    nursery.start_soon(stop, transports, by, side)


# ---- networks ----

#: (load, the client's keepalive_interval, the server's)
CASES: list[tuple[str, int, int]] = [
    ("idle", 1, 1),
    ("busy", 1, 1),
    ("offered", 1, 1),
    ("idle", 2, 2),
    ("busy", 2, 2),
    ("idle", 1, 0),
    ("busy", 0, 1),
    ("idle", 0, 0),
    ("busy", 0, 0),
]


#: Seconds within which the buffers of a lost connection are released.
RELEASED = WRITING_TIME + 0.5


def in_time(interval: int) -> float:
    return max(2 * interval, interval + 3) + 3


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    with open_network() as network:
        yield network


async def lose_network(client: Host, server: Host, address: str, cut: Any) -> list[tuple[Any, ...]]:
    """What each side of each case noticed: (the case, the side, its interval, how long it took or None, how long until
    the buffers were released, the error).
    """
    quiet = {"UCX_LOG_LEVEL": "fatal"}
    async with (
        open_peer("watcher", address, [[kind, there] for kind, _, there in CASES], under=server.under, **quiet) as far,
        open_peer("watcher", None, [[kind, here] for kind, here, _ in CASES], under=client.under, **quiet) as near,
    ):
        await near.tell(await far.hear())
        assert await near.hear() == "ready" and await far.hear() == "ready"
        await trio.sleep(0.5)
        since = time.monotonic()
        await trio.to_thread.run_sync(cut)
        await trio.sleep(in_time(max(here for _, here, _ in CASES)))
        await near.tell()
        await far.tell()
        noticed = []
        for side, peer in (("client", near), ("server", far)):
            for case, lost in zip(CASES, await peer.hear(), strict=True):
                interval = case[1] if side == "client" else case[2]
                error, when, released = lost or (None, None, 0)
                noticed.append((case, side, interval, when and when - since, released, error))
        return noticed


@pytest.mark.full
async def test_network_is_lost(network: Network) -> None:
    """A cable is unplugged at either end, or packets are dropped on the way, which neither side sees."""
    noticed: dict[str, list[tuple[Any, ...]]] = {}

    async def unplug(number: int, side: str, client: Host, server: Host) -> None:
        host = client if side == "client" else server
        noticed[side] = await lose_network(client, server, f"10.200.{number}.2", lambda: host.down("cable"))

    async def drop(client: Host, gate: Host, server: Host) -> None:
        noticed["dropped"] = await lose_network(client, server, "10.200.22.2", lambda: gate.forward(False))

    async with trio.open_nursery() as nursery:
        pairs = []
        for number, side in enumerate(SIDES, 11):
            client, server = network.host(), network.host()
            network.cable((client, "cable", f"10.200.{number}.1/24"), (server, "cable", f"10.200.{number}.2/24"))
            pairs.append((number, side, client, server))
        client, gate, server = network.host(), network.host(), network.host()
        network.cable((client, "cable", "10.200.21.2/24"), (gate, "one", "10.200.21.1/24"))
        network.cable((server, "cable", "10.200.22.2/24"), (gate, "two", "10.200.22.1/24"))
        client.ip("route", "add", "default", "via", "10.200.21.1")
        server.ip("route", "add", "default", "via", "10.200.22.1")
        gate.forward(True)
        await network.ready()
        for pair in pairs:
            nursery.start_soon(unplug, *pair)
        nursery.start_soon(drop, client, gate, server)
    wrong = []
    for how, cases in noticed.items():
        for case, side, interval, took, released, error in cases:
            if took is not None if interval == 0 else took is None or not 0.9 < took < in_time(interval):
                wrong.append((how, case, side, took, error))
            if released > RELEASED:
                wrong.append((how, case, side, "released after", released))
    assert not wrong, "\n".join(map(str, wrong))
