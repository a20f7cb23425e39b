"""Which transports two processes use that share a machine, but not all of its namespaces; and networks between them."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from helpers import Peer, open_peer, pattern
from networks import (
    LOOPBACK,
    QUIET,
    SHARED_MEMORY,
    SIZES,
    Host,
    Network,
    Side,
    as_user,
    meet,
    open_network,
    unshare,
)
from timing import Noise, waited_by


@attrs.frozen
class Hosts:
    """One network for all tests of this module.

    Attributes:
        one, two: with a cable between.
        six, seven: the same, with IPv6 only.
        near, gate, far: ``near`` has a cable to ``gate``, as has ``far``, and ``gate`` does not forward.
    """

    one: Host
    two: Host
    six: Host
    seven: Host
    near: Host
    gate: Host
    far: Host


ONE, TWO = "10.200.1.1", "10.200.1.2"
SIX, SEVEN = "fd00:200::6", "fd00:200::7"
NEAR, GATE_TO_NEAR, GATE_TO_FAR, FAR = "10.200.2.1", "10.200.2.254", "10.200.3.254", "10.200.3.1"


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Network, Hosts]]:
    with open_network() as network:
        one, two, six, seven, near, gate, far = (network.host() for _ in range(7))
        network.cable((one, "cable", f"{ONE}/24"), (two, "cable", f"{TWO}/24"))
        network.cable((six, "cable", f"{SIX}/64"), (seven, "cable", f"{SEVEN}/64"))
        network.cable((near, "cable", f"{NEAR}/24"), (gate, "to_near", f"{GATE_TO_NEAR}/24"))
        network.cable((far, "cable", f"{FAR}/24"), (gate, "to_far", f"{GATE_TO_FAR}/24"))
        gate.forward(False)
        yield network, Hosts(one, two, six, seven, near, gate, far)


@pytest.fixture
async def hosts(network: tuple[Network, Hosts]) -> Hosts:
    await network[0].ready()
    return network[1]


# ---- the same namespaces ----


async def test_nothing_differs() -> None:
    (await meet(Side(), Side())).assert_shared_memory()
    (await meet(Side(options={"shared_memory": True}), Side())).assert_shared_memory()


@pytest.mark.parametrize("who", ["client", "server"])
async def test_without_shared_memory(who: str) -> None:
    without = Side(options={"shared_memory": False})
    meeting = await (meet(without, Side()) if who == "client" else meet(Side(), without))
    meeting.assert_tcp()


@pytest.mark.parametrize("who", ["client", "server"])
async def test_one_side_wants_it_and_the_other_does_not(who: str) -> None:
    wants, refuses = Side(options={"shared_memory": True}), Side(options={"shared_memory": False})
    meeting = await (meet(wants, refuses) if who == "client" else meet(refuses, wants))
    meeting.assert_refused("shared_memory=True", "shared_memory=False")


async def test_shared_memory_is_all_there_is(tmp_path: Path) -> None:
    """A control socket by host and port, or by path, is no transport of UCX's."""
    only, over_tcp = Side(environment={"UCX_TLS": "sm,self"}), Side(environment={"UCX_TLS": "tcp"})

    async def works(host: str) -> None:
        (await meet(only, only, host)).assert_shared_memory()

    async def refused(client: Side, server: Side) -> None:
        (await meet(client, server)).assert_refused("shared memory cannot be used", "UCX_TLS", "tcp,sm,self")

    async with trio.open_nursery() as nursery:
        for host in (LOOPBACK, "::1", f"unix:{tmp_path}/socket"):
            nursery.start_soon(works, host)
        nursery.start_soon(refused, only, over_tcp)
        nursery.start_soon(refused, over_tcp, only)


@pytest.mark.sample(1)
@pytest.mark.parametrize("who", ["client", "server"])
async def test_shared_memory_without_error_handling(who: str) -> None:
    """...cannot be used by an endpoint that is to notice errors."""
    odd = Side(environment={"UCX_MM_ERROR_HANDLING": "n"})
    meeting = await (meet(odd, Side()) if who == "client" else meet(Side(), odd))
    meeting.assert_tcp()
    wants = Side(options={"shared_memory": True})
    meeting = await (meet(odd, wants) if who == "client" else meet(wants, odd))
    meeting.assert_refused("shared_memory=True", "MM_ERROR_HANDLING=n")


# ---- namespaces of this machine ----


async def each_differs(under: Sequence[str], what: str, host: str = LOOPBACK, target: Any = None) -> None:
    """Client, server, or both are run under something, and so cannot share memory."""
    async with trio.open_nursery() as nursery:

        async def over_tcp(client: Side, server: Side) -> None:
            (await meet(client, server, host, target)).assert_tcp()

        async def refused(client: Side, server: Side) -> None:
            (await meet(client, server, host, target)).assert_refused("shared_memory=True", f"different {what}")

        nursery.start_soon(over_tcp, Side(under), Side())
        nursery.start_soon(over_tcp, Side(), Side(under))
        nursery.start_soon(refused, Side(under, {"shared_memory": True}), Side())
        nursery.start_soon(refused, Side(), Side(under, {"shared_memory": True}))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kinds", "what"),
    [
        (("pid",), "PID namespaces"),
        (("ipc",), "IPC namespaces"),
        (("ipc", "pid"), "IPC namespaces and PID namespaces"),
    ],
)
async def test_namespaces_differ(kinds: tuple[str, ...], what: str) -> None:
    await each_differs(unshare(*kinds), what)


@pytest.mark.full
async def test_both_have_a_pid_namespace_of_their_own() -> None:
    """As in containers with ``--ipc=host --network=host``: both sides have the process id 1."""
    under = unshare("pid")
    (await meet(Side(under), Side(under))).assert_tcp()


async def test_namespaces_are_joined() -> None:
    """As in containers with ``--ipc``, ``--pid`` and ``--network`` of another one."""
    holder = [*unshare("ipc", "net", "pid"), "sh", "-c", "ip link set lo up && echo && exec sleep 600"]
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            join = ["nsenter", f"--target={first}", "--net"]
            joined = Side([*join, "--ipc", "--pid", "unshare", "--mount", "--mount-proc"])
            (await meet(joined, joined)).assert_shared_memory()
            (await meet(Side(join), joined)).assert_tcp()
        finally:
            process.kill()


@pytest.mark.full
async def test_users_differ(tmp_path: Path) -> None:
    under = as_user(65534)
    await each_differs(under, "users")
    path = tmp_path / "socket"
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(folder.stat().st_mode | 0o011)
    meeting = await meet(Side(under), Side(), f"unix:{path}")
    assert meeting.client[0] == "PermissionError" and meeting.client[1] == errno.EACCES, meeting.client


# ---- networks ----


async def test_networks_differ(hosts: Hosts) -> None:
    one, two = Side(hosts.one.under), Side(hosts.two.under)
    meeting = await meet(one, two, TWO)
    meeting.assert_tcp()
    assert meeting.client[2][0] == ONE and meeting.client[3][0] == TWO
    wants = attrs.evolve(one, options={"shared_memory": True})
    (await meet(wants, two, TWO)).assert_refused("shared_memory=True", "different network namespaces")
    wants = attrs.evolve(two, options={"shared_memory": True})
    (await meet(one, wants, TWO)).assert_refused("shared_memory=True", "different network namespaces")


@pytest.mark.full
async def test_networks_and_namespaces_differ(hosts: Hosts) -> None:
    """Containers as they are by default."""
    under = unshare("ipc", "pid")
    one, two = Side([*hosts.one.under, *under]), Side([*hosts.two.under, *under])
    (await meet(one, two, TWO)).assert_tcp()
    wants = attrs.evolve(one, options={"shared_memory": True})
    meeting = await meet(wants, two, TWO)
    meeting.assert_refused("different IPC namespaces, PID namespaces and network namespaces")


async def test_control_socket_by_path_leads_to_another_network(hosts: Hosts, tmp_path: Path) -> None:
    one, two = Side(hosts.one.under), Side(hosts.two.under)
    (await meet(one, two, f"unix:{tmp_path}/socket")).assert_tcp()


@pytest.mark.full
async def test_only_shared_memory_and_networks_differ(hosts: Hosts) -> None:
    one, two = (Side(host.under, environment={"UCX_TLS": "sm,self"}) for host in (hosts.one, hosts.two))
    meeting = await meet(one, two, TWO)
    meeting.assert_refused("different network namespaces", "add tcp to its option TLS (UCX_TLS)")


async def test_ipv6_only(hosts: Hosts) -> None:
    six, seven = Side(hosts.six.under), Side(hosts.seven.under)
    meeting = await meet(six, seven, SEVEN)
    meeting.assert_tcp()
    assert meeting.client[2][0] == SIX and meeting.client[3][0] == SEVEN


# ---- raw endpoints between networks ----

#: How long the receiver has slept before each message, and the longest time that a message then takes. When a wake-up
#: is lost, the worker looks once a second by itself, and counts a missed event.
ASLEEP, SOON = 0.1, 0.5
SIDE = Path(__file__).parent / "raw_side.py"


@asynccontextmanager
async def open_sides(hosts: Hosts, answers_after: float = 0.0, **environment: str) -> AsyncIterator[tuple[Peer, ...]]:
    """Two processes, whose hosts are joined by a cable."""
    start = partial(open_peer, "side", program=SIDE, **environment)
    async with (
        start(None, answers_after, under=hosts.one.under) as one,
        start(TWO, answers_after, under=hosts.two.under) as two,
    ):
        yield one, two


async def told(peer: Peer, *order: Any) -> Any:
    await peer.tell(order)
    return await peer.hear(40)


async def use_everything(noise: Noise, sender: Peer, receiver: Peer, by_ucx: bool, message: str = "ask") -> None:
    """Sends each kind of message, each size, to a side that sleeps.

    Args:
        by_ucx: the memory is reached by UCX's puts and gets, and there are no atomics.
        message: whether an active message asks for an answer: "ask", or "am".
    """

    async def timed(order: str, argument: int, limit: float = SOON) -> Any:
        await trio.sleep(ASLEEP)
        start = time.perf_counter()
        said = await told(sender, order, argument)
        if order in ("tag", "am"):
            assert await receiver.hear() == hashlib.sha256(pattern(argument, argument)).hexdigest()
        now = time.perf_counter()
        assert now - start - noise.since(start, now) < limit, (order, argument)
        return said

    for size in SIZES:
        assert await timed("tag", size) is True
        assert await timed(message, size, ASLEEP + SOON) is True
        assert await timed("put", size) is True
        assert await timed("get", size) is True
    if not by_ucx:
        assert [await timed("add", number) for number in (5, 2**40, 0)] == [0, 5, 5 + 2**40]
    assert not SHARED_MEMORY & set(await told(sender, "transports", 0))


async def end_without_missed_events(*sides: Peer) -> None:
    for each in sides:
        assert await told(each, "end") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["PEER", "NONE"])
@pytest.mark.parametrize("by_ucx", [False, True], ids=["by_messages", "by_ucx"])
async def test_raw_endpoints_both_ways(hosts: Hosts, mode: str, by_ucx: bool) -> None:
    async with open_sides(hosts, ASLEEP) as (one, two):
        addresses = [await each.hear() for each in (one, two)]
        for each, theirs in zip((one, two), reversed(addresses), strict=True):
            assert await told(each, "open", theirs["worker"], mode, theirs["descriptor"], by_ucx) == "open"
        with Noise(waited_by(one.process.pid, two.process.pid)) as noise:
            await use_everything(noise, one, two, by_ucx)
            await use_everything(noise, two, one, by_ucx)
        await end_without_missed_events(one, two)


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["worker", "socket"])
@pytest.mark.parametrize("by_ucx", [False, True], ids=["by_messages", "by_ucx"])
async def test_raw_endpoint_of_one_side(hosts: Hosts, by: str, by_ucx: bool) -> None:
    """The other side answers gets, large messages and atomics by an endpoint that UCX makes, or by the accepted one. By
    socket address, that needs an option (reliability.md).
    """
    async with open_sides(hosts, ASLEEP, **({"UCX_CM_USE_ALL_DEVICES": "n"} if by == "socket" else {})) as (one, two):
        _, theirs = await one.hear(), await two.hear()
        assert await told(one, "open", theirs[by], "PEER", theirs["descriptor"], by_ucx) == "open"
        with Noise(waited_by(one.process.pid, two.process.pid)) as noise:
            await use_everything(noise, one, two, by_ucx, "ask" if by == "socket" else "am")
        await end_without_missed_events(one, two)


@pytest.mark.full
async def test_raw_endpoint_has_only_shared_memory(hosts: Hosts) -> None:
    """An error says why there is no endpoint, whichever side has nothing else."""
    for kinds in ("sm,self", "sm,self"), ("sm,self", "all"), ("all", "sm,self"):
        async with (
            open_peer("side", None, 0, program=SIDE, under=hosts.one.under, UCX_TLS=kinds[0]) as one,
            open_peer("side", None, 0, program=SIDE, under=hosts.two.under, UCX_TLS=kinds[1]) as two,
        ):
            _, theirs = await one.hear(), await two.hear()
            said = await told(one, "open", theirs["worker"], "PEER", theirs["descriptor"], False)
            assert said.startswith(f"{errno.EHOSTUNREACH}: ") and "different network namespaces" in said, said
            await end_without_missed_events(one, two)


async def test_raw_endpoints_in_one_network_share_memory(hosts: Hosts) -> None:
    """...although it is not the network of the test itself."""
    async with (
        open_peer("side", None, ASLEEP, program=SIDE, under=hosts.one.under) as one,
        open_peer("side", None, ASLEEP, program=SIDE, under=hosts.one.under) as other,
    ):
        _, theirs = await one.hear(), await other.hear()
        assert await told(one, "open", theirs["worker"], "PEER", theirs["descriptor"], False) == "open"
        assert await told(one, "add", 1) == 0
        assert SHARED_MEMORY & set(await told(one, "transports", 0))
        await end_without_missed_events(one, other)


# ---- forwarded control sockets ----


async def test_forwarded_on_this_machine() -> None:
    """Messages go directly, over shared memory: the forwarder is on the same machine."""
    async with (
        open_peer("forwarder", LOOPBACK) as forwarder,
        open_peer("host", [LOOPBACK], {}) as listening,
        open_peer("visitor", {}, SIZES) as connecting,
    ):
        [address] = await listening.hear()
        await forwarder.tell(address)
        await connecting.tell(await forwarder.hear())
        said = await connecting.hear()
        assert said[0] == "connected" and set(said[1]) & SHARED_MEMORY, said
        await forwarder.tell()
        assert await forwarder.hear() < 100_000
        await listening.tell()
        await listening.hear()


@pytest.mark.full
async def test_forwarded_between_networks(hosts: Hosts) -> None:
    """Messages go directly where there is a route; otherwise both errors name the addresses that were tried."""
    listen = partial(open_peer, "host", [FAR], {"connect_timeout": 4}, under=hosts.far.under, **QUIET)
    forward = partial(open_peer, "forwarder", GATE_TO_NEAR, under=hosts.gate.under)

    async def visit(timeout: float, target: Any) -> list[Any]:
        options = {"connect_timeout": timeout}
        async with open_peer("visitor", options, SIZES, under=hosts.near.under, **QUIET) as client:
            await client.tell(target)
            said: list[Any] = await client.hear()
            return said

    def assert_told(said: list[Any], kind: str, host: str, word: str) -> None:
        assert said[0] == kind and said[1], said
        assert re.search(rf"its UCX listens at .*{re.escape(host)}:\d+", said[2]), said
        assert word in said[2], said
        assert said[3] < 2 + 1

    async def told_to_end(listening: Peer) -> tuple[list[list[str]], str]:
        await listening.tell()
        transports, log = await listening.hear()
        return transports, "\n".join(log)

    async with forward() as forwarder, listen() as listening:
        [address] = await listening.hear()
        await forwarder.tell(address)
        target = await forwarder.hear()
        # There is no route, none to the server, and none back. UCX knows that, and needs not try.
        assert_told(await visit(2, target), "ConnectionRefusedError", NEAR, "No route")
        hosts.far.ip("route", "add", "default", "via", GATE_TO_FAR)
        assert_told(await visit(2, target), "OSError", FAR, "No route")
        hosts.far.ip("route", "del", "default")
        hosts.near.ip("route", "add", "default", "via", GATE_TO_NEAR)
        assert_told(await visit(2, target), "ConnectionRefusedError", NEAR, "No route")
        _, log = await told_to_end(listening)
        assert f"UCX cannot connect to {GATE_TO_FAR}" in log and f"its UCX listens at {NEAR}:" in log, log

    hosts.far.ip("route", "add", "default", "via", GATE_TO_FAR)
    async with forward() as forwarder, listen() as listening:
        [address] = await listening.hear()
        await forwarder.tell(address)
        target = await forwarder.hear()
        # There are routes, and packets are dropped: nobody knows.
        assert_told(await visit(2, target), "TimeoutError", FAR, "firewall")
        hosts.gate.forward(True)
        said = await visit(5, target)
        assert said[0] == "connected" and said[1] == ["tcp"], said
        hosts.gate.forward(False)
        await forwarder.tell()
        assert await forwarder.hear() < 100_000
        transports, log = await told_to_end(listening)
        assert transports == [["tcp"]]
        # A client with the greater uid has no endpoint yet, and just closes the control socket.
        assert "gave up the connection" in log or "its control connection ended" in log, log


PAIR = """
import ctypes, sys, trio, trio_ucx.testing
name = bytes.fromhex(sys.argv[1])
assert not name or ctypes.CDLL(None).sethostname(name, len(name)) == 0
async def main():
    with trio.fail_after(30):
        async with trio_ucx.testing.open_connection_pair() as (client, server):
            print(ascii(server.peer.stated_host))
trio.run(main)
"""


def run_pair(*under: str, name: bytes = b"", locale: str = "C.UTF-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*under, sys.executable, "-c", PAIR, name.hex()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    )


@pytest.mark.parametrize(("name", "shown"), [(b"b\xfcro", r"b\ufffdro"), ("büro".encode(), r"b\xfcro")])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_host_name(name: bytes, shown: str, locale: str) -> None:
    done = run_pair(*unshare("uts"), name=name, locale=locale)
    assert done.stdout.strip() == f"'{shown}'", done.stderr


def test_without_proc() -> None:
    done = run_pair(*unshare("mount"), "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
    assert "FileNotFoundError: [Errno 2] UCX cannot create a worker: the proc file system is missing" in done.stderr
