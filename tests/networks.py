"""Simulated hosts: network namespaces on this machine, connected by veth pairs (called cables here);
and two processes that meet in such networks, or in other namespaces.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import pytest
import trio
from environments import as_other_user
from helpers import open_peer

_numbers = itertools.count()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, timeout=60, text=True).stdout


#: Whether the test that runs has the marker ``root``; see ``selection.py``.
marked_root = False


def need(*command: str, why: str) -> None:
    """Skips the test where a command that does nothing cannot be run under what the test needs, besides root."""
    assert marked_root, "only root can do this: mark the test with pytest.mark.root"
    if shutil.which(command[0]) is None:
        pytest.skip(f"{why} need {command[0]}")
    try:
        run(*command)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{why}: {error}")


@attrs.frozen
class Host:
    """A network namespace.

    Attributes:
        under: what runs a command in it, for ``open_peer``.
    """

    name: str

    @property
    def under(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def ip(self, *command: str) -> str:
        return run("ip", "-n", self.name, *command)

    def run(self, *command: str) -> str:
        return run(*self.under, *command)

    def add_address(self, device: str, address: str) -> None:
        self.ip("addr", "add", address, "dev", device, *(["nodad"] if ":" in address else []))

    def down(self, device: str) -> None:
        self.ip("link", "set", device, "down")

    def forward(self, on: bool) -> None:
        """Whether it forwards packets; otherwise it drops those that are not for itself, and says nothing."""
        for file in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            self.run("sh", "-c", f"echo {int(on)} > /proc/sys/net/{file}")


class Network:
    """Creates hosts and cables; see :func:`open_network`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._ends: list[tuple[Host, str]] = []

    def host(self) -> Host:
        host = Host(f"tu{os.getpid()}n{next(_numbers)}")
        run("ip", "netns", "add", host.name)
        self._stack.callback(run, "ip", "netns", "del", host.name)
        host.ip("link", "set", "lo", "up")
        return host

    def cable(self, one: tuple[Host, str, str], other: tuple[Host, str, str]) -> None:
        """Lays a cable.

        Args:
            one, other: an end: the host, the name of its device, and its address, as in "10.200.1.1/24".
        """
        (host, device, _), (peer, peer_device, _) = one, other
        host.ip("link", "add", device, "type", "veth", "peer", "name", peer_device, "netns", peer.name)
        for end, name, address in (one, other):
            end.add_address(name, address)
            end.ip("link", "set", name, "up")
            self._ends.append((end, name))

    def cut(self, host: Host, device: str) -> None:
        """Removes the cable at this device."""
        host.ip("link", "del", device)
        kept = [(end, name) for end, name in self._ends if f" {name}@" in end.ip("-o", "link")]
        self._ends[:] = kept

    def rename(self, host: Host, device: str, name: str) -> None:
        """Gives a device another name. It keeps its IPv4 addresses."""
        for change in ("down",), ("name", name):
            host.ip("link", "set", device, *change)
        host.ip("link", "set", name, "up")
        self._ends[self._ends.index((host, device))] = (host, name)

    async def ready(self) -> None:
        """The kernel looks at a new cable only once a second."""
        with trio.fail_after(15):
            for host, device in self._ends:
                while "LOWER_UP" not in (shown := host.ip("link", "show", device)) or "state UP" not in shown:
                    await trio.sleep(0.05)


@contextmanager
def open_network() -> Iterator[Network]:
    """A network, which ends with the block. Skips the test where this cannot be had."""
    need("ip", "netns", "list", why="network namespaces")
    with ExitStack() as stack:
        probe = Host(f"tu{os.getpid()}probe")
        try:
            run("ip", "netns", "add", probe.name)
            stack.callback(run, "ip", "netns", "del", probe.name)
            run(*probe.under, "true")
            probe.ip("link", "add", "one", "type", "veth", "peer", "name", "other")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield Network(stack)


def unshare(*kinds: str) -> Sequence[str]:
    """What runs a command in namespaces of its own: "pid", "ipc". Skips the test where that cannot be had."""
    command = ["unshare", *(f"--{kind}" for kind in kinds)]
    if "pid" in kinds:
        command += ["--fork", "--kill-child", "--mount-proc"]
    need(*command, "true", why=f"namespaces ({', '.join(kinds)})")
    return command


def as_user(uid: int) -> Sequence[str]:
    """What runs a command as another user, without capabilities. Skips the test where that cannot be had."""
    need("unshare", "--mount", "true", why="tests as another user")
    return as_other_user(uid)


SIZES = [1, 5000, 2**20]
SHARED_MEMORY = {"sysv", "posix"}
LOOPBACK = "127.0.0.1"
#: UCX logs what we expect to standard output, where peers speak.
QUIET = {"UCX_LOG_LEVEL": "fatal"}


@attrs.frozen
class Side:
    """How one of the two is run."""

    under: Sequence[str] = ()
    options: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Meeting:
    """What became of it: what the client said, the transports of the server's connections, and the server's log."""

    client: list[Any]
    server: list[list[str]]
    log: str

    def assert_tcp(self) -> None:
        assert self.client[0] == "connected", (self.client, self.log)
        assert self.client[1] == ["tcp"] and self.server == [["tcp"]]

    def assert_shared_memory(self) -> None:
        assert self.client[0] == "connected", (self.client, self.log)
        assert set(self.client[1]) & SHARED_MEMORY
        [transports] = self.server
        assert set(transports) & SHARED_MEMORY

    def assert_refused(self, *words: str) -> None:
        """Both sides got an error with the reason."""
        kind, number, text, seconds = self.client
        assert kind == "NotAdmitted" and number == errno.EACCES, self.client
        assert seconds < 9  # connect_timeout is 10
        for word in words:
            assert word in text, text
            assert word in self.log, self.log
        assert self.server == []


async def meet(
    client: Side, server: Side, host: str = LOOPBACK, target: Any = None, through: str | None = None
) -> Meeting:
    """A server, and a client that connects to it: messages come back.

    Args:
        host: where the server listens.
        target: where the client connects to, if it is not that.
        through: the address that the client uses for the server's host.
    """
    async with (
        open_peer("host", [host], server.options, under=server.under, **server.environment) as listening,
        open_peer("visitor", client.options, SIZES, under=client.under, **client.environment) as connecting,
    ):
        [address] = await listening.hear()
        await connecting.tell([through, address[1]] if through else target or address)
        said = await connecting.hear(40)
        await listening.tell()
        transports, log = await listening.hear()
        return Meeting(said, transports, "\n".join(log))
