"""A TCP endpoint is closed by force while its socket's send buffer is full: UCX 1.22 would wait inside one call."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import pytest
from helpers import open_peer
from networks import need, open_network
from tcp_sockets import SNDBUF, meminfo
from timing import check_prompt

from trio_ucx._native import lib

#: What UCX writes when it closes an endpoint.
CLOSING_BYTES = bytes(9)
#: Seconds that an abort may take, besides the noise.
PROMPT = 0.1


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)  # which the kernel then does not enlarge
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with client, accepted:
        client.setblocking(False)
        yield client, accepted


@pytest.fixture
def watched() -> Iterator[tuple[int, select.epoll]]:
    """As UCX has them: an epoll descriptor, and one that it watches."""
    with select.epoll() as outer, select.epoll() as inner:
        outer.register(inner.fileno(), select.EPOLLIN)
        yield outer.fileno(), inner


def fill(one: socket.socket) -> None:
    """Sends until the kernel takes no byte more."""
    for size in (2**16, *[1] * 10):
        time.sleep(0.01)  # what acknowledges earlier data may be on its way
        with pytest.raises(BlockingIOError):
            while True:
                one.send(bytes(size))


def test_a_full_socket_gets_room(
    connected: tuple[socket.socket, socket.socket], watched: tuple[int, select.epoll]
) -> None:
    sender, _ = connected
    efd, inner = watched
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)
    inner.register(sender, select.EPOLLIN)
    fill(sender)
    assert lib.tu_sockets_make_room(efd) == 1
    assert sender.send(CLOSING_BYTES) == len(CLOSING_BYTES)


def test_a_buffer_that_may_not_grow_does_not_shrink(
    connected: tuple[socket.socket, socket.socket], watched: tuple[int, select.epoll]
) -> None:
    sender, _ = connected
    efd, inner = watched
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**31 - 1)
    largest = meminfo(sender)[SNDBUF]
    inner.register(sender, select.EPOLLIN)
    fill(sender)
    assert lib.tu_sockets_make_room(efd) == 0
    assert meminfo(sender)[SNDBUF] == largest


def test_other_sockets_are_left_alone(
    connected: tuple[socket.socket, socket.socket], watched: tuple[int, select.epoll]
) -> None:
    sender, receiver = connected
    efd, inner = watched
    inner.register(receiver, select.EPOLLIN)
    fill(sender)
    before = meminfo(receiver)[SNDBUF]
    assert lib.tu_sockets_make_room(efd) == 0
    assert meminfo(receiver)[SNDBUF] == before
    assert lib.tu_sockets_make_room(10**6) == 0


async def test_an_abort_with_a_full_socket_returns_at_once() -> None:
    """The network drops what is sent, and the last message has just filled the buffer: UCX itself has nothing left."""
    need("iptables", "-w", "-L", why="rules for packets")
    with open_network() as network:
        host = network.host()
        # So that the kernel cannot make room by joining two messages of the peer's into one packet.
        host.ip("link", "set", "lo", "mtu", "4000")
        async with open_peer("aborts_with_a_full_socket", under=host.under) as peer:
            assert await peer.hear() == "connected"
            host.run("iptables", "-w", "-A", "INPUT", "-i", "lo", "-p", "tcp", "-j", "DROP")
            await peer.tell()
            seconds, noise = await peer.hear()
            host.run("iptables", "-w", "-F")
            await peer.tell()
    check_prompt(seconds, PROMPT, noise)
