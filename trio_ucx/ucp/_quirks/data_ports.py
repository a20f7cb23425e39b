"""Data ports: the sockets on which UCX's TCP transport listens, and who may connect to them.

UCX trusts everything that arrives there. A stranger who speaks its protocol can write anywhere in our memory
(``UCT_TCP_EP_PUT_REQ_AM_ID``), or end the process. Each of these sockets therefore has a packet filter in the kernel
(``SO_ATTACH_FILTER``) before it listens: ``_native/data_ports.c`` attaches one that drops everything. This module
replaces it with one that admits the packets of this machine, of the networks that the user names (``Worker.admit``),
and of the peers of Connections, each admitted by its exchange. A connection that the kernel makes for such a socket
keeps the filter that was attached at that moment.

A worker without Connections loses the filter with its first raw endpoint to another host, or its first raw listener
that other hosts can reach, unless the user has named networks. A worker with Connections keeps the filter. A worker
whose ports cannot be filtered gets no Connections.

Report: "A stranger at TCP's data port", in docs/ucx-reports.md. Releases: all, 1.13 to 1.22. Not needed any more when
UCX authenticates its TCP connections (``data_port.c`` there has no effect). Where UCX listens is seen by a replacement
of ``listen`` (``_native/data_ports.c``), and compared with its worker address: if they differ, or the address has an
unknown layout, the worker gets no Connections. Tests: ``tests/test_data_port.py``, ``tests/test_protected_mode.py``.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

import attrs

from ..._native import ffi
from .._address import family_of
from .._worker_address import WorkerAddress
from .address_layout import is_loopback, parse_worker_address

logger = logging.getLogger("trio_ucx")

Network = IPv4Network | IPv6Network

#: Greatest number of peers' addresses in the filter. A further one replaces the one that was admitted least recently;
#: that peer's connections stay. (The kernel accepts 4096 instructions, and 20 KiB of options for a socket.)
MAX_PEERS = 200
#: Greatest number of addresses that one peer can have admitted.
MAX_EACH = 16
#: Greatest number of networks that the user can name.
MAX_NETWORKS = 50

THIS_MACHINE: tuple[Network, ...] = (ip_network("127.0.0.0/8"), ip_network("::1"))

# <linux/filter.h> and <asm-generic/socket.h>
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_WORD, _AND, _RETURN, _JUMP_IF_EQUAL = 0x20, 0x54, 0x06, 0x15
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_SOURCE = {socket.AF_INET: _NETWORK_HEADER + 12, socket.AF_INET6: _NETWORK_HEADER + 8}
_ALL, _NOTHING = 0xFFFFFFFF, 0


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_program(family: socket.AddressFamily, networks: Iterable[Network]) -> bytes:
    """A classic BPF program that drops all packets but those that come from one of the networks."""
    accept = _instruction(_RETURN, _ALL)
    program = b""
    for network in networks:
        if (network.version == 6) != (family == socket.AF_INET6):
            continue
        words = struct.iter_unpack(">I", network.network_address.packed)
        masks = struct.iter_unpack(">I", network.netmask.packed)
        test = accept
        # The last word, which differs most often, is compared first.
        for index, ([word], [mask]) in enumerate(zip(words, masks, strict=True)):
            if mask:
                equal = _instruction(_JUMP_IF_EQUAL, word, if_false=len(test) // 8)
                masked = b"" if mask == _ALL else _instruction(_AND, mask)
                test = _instruction(_LOAD_WORD, _SOURCE[family] + 4 * index) + masked + equal + test
        program += test
    return program + _instruction(_RETURN, _NOTHING)


def tcp_hosts(address: WorkerAddress) -> list[str]:
    """The IP addresses of a peer's TCP transport; any (0.0.0.0) if they are not known."""
    try:
        return address._tcp_hosts or [host for host, _ in parse_worker_address(address.ucx).tcp_addresses]
    except ValueError:
        return ["0.0.0.0"]


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """The descriptor as a socket object, which does not close it; None if it is not a socket."""
    try:
        found = socket.socket(fileno=fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
    except OSError:
        found = None
    try:
        yield found
    finally:
        if found is not None:
            found.detach()


@attrs.frozen
class _Port:
    """A listening socket of UCX's, which UCX may close: the inode tells whether ``fd`` is still this socket."""

    fd: int
    inode: int
    family: socket.AddressFamily
    address: tuple[str, int]

    @classmethod
    def of(cls, fd: int) -> _Port:
        with _borrowed(fd) as borrowed:
            assert borrowed is not None
            return cls(fd, os.fstat(fd).st_ino, borrowed.family, borrowed.getsockname()[:2])

    @property
    def closed(self) -> bool:
        try:
            return os.fstat(self.fd).st_ino != self.inode
        except OSError:
            return True

    def set_option(self, option: int, value: bytes) -> None:
        with _borrowed(self.fd) as borrowed:
            if borrowed is not None and not self.closed:
                borrowed.setsockopt(socket.SOL_SOCKET, option, value)


class DataPorts:
    """The data ports of one worker.

    Args:
        found: what C code saw while UCX created the worker (``tu_data_ports_t``).
        address: the worker's, which says where UCX listens.
        unknown_layout: why that could not be read from UCX's address; None if it could.

    Attributes:
        obstacle: why strangers cannot be kept away from the ports; None if they can, or there are no ports.
        opened: why the filter was removed and every host may connect; None while the filter is attached.
    """

    def __init__(self, found: Any, address: WorkerAddress, unknown_layout: str | None) -> None:
        self.obstacle: str | None = None
        self.opened: str | None = None
        self.networks: list[Network] = []
        self._peers: dict[str, None] = {}
        #: Results of :meth:`_keeps_out`.
        self._known: dict[str, bool] = {}
        self._has_connections = False
        self._ports = [_Port.of(fd) for fd in found.fds[0 : found.count]]
        self._local = [ip_network(host) for host in dict.fromkeys(port.address[0] for port in self._ports)]
        unseen = {*address.tcp_addresses} - {port.address for port in self._ports}
        if unknown_layout is not None:
            self.obstacle = f"trio_ucx cannot read this UCX's worker address ({unknown_layout})"
        # An address says of a loopback device only that it is one; and no other machine reaches that.
        elif not all(is_loopback(host) for host, _ in unseen):
            self.obstacle = "trio_ucx could not find where this UCX begins to listen"
        try:
            if found.error:
                raise OSError(found.error, os.strerror(found.error))
            self._attach()
        except OSError as error:
            if all(is_loopback(port.address[0]) for port in self._ports):
                self._detach()  # no other machine reaches the loopback device
            else:
                self.obstacle = f"the kernel takes no packet filter (SO_ATTACH_FILTER: {error.strerror})"

    @property
    def lost(self) -> bool:
        """Whether UCX has stopped listening at one of the ports.

        UCX stops for good when it cannot accept a connection because the process has no descriptors left.
        """
        return any(port.closed for port in self._ports)

    def keep_shut(self) -> None:
        """Called before the worker gets its first Connection: from now on raw endpoints do not remove the filter.

        Raises:
            PermissionError: the filter was removed, or cannot be attached.
        """
        if self._everybody_admitted:
            pass
        elif self.opened is not None:
            raise PermissionError(
                errno.EPERM,
                f"{self.opened}, so every host can reach the TCP ports of this worker. Open another worker for "
                "Connections, or call worker.admit() before the first raw endpoint or listener",
            )
        elif self.obstacle is not None:
            raise PermissionError(
                errno.EPERM,
                f"strangers cannot be kept away from UCX's TCP ports, because {self.obstacle}. Pass another worker as "
                'worker=: one that uses only this machine (config={"NET_DEVICES": "lo"}), or, in a network that you '
                'trust, one that admits every host (worker.admit("0.0.0.0/0", "::/0")): any of these hosts can take '
                "over this process",
            )
        self._has_connections = True

    def open_for_raw_use(self, reason: str, host: str) -> None:
        """Removes the filter, unless the worker has Connections, or the user has named networks.

        Args:
            reason: for error messages.
            host: the address of the peer, or of the raw listener. One of this machine does not need an open port.
        """
        if self._has_connections or self.networks or self.opened is not None or not self._keeps_out(host):
            return
        self.opened = reason
        logger.debug("every host can reach a worker's TCP ports: %s", reason)
        self._detach()

    def admit(self, networks: Iterable[Network]) -> None:
        """Admits the networks that the user names.

        Raises:
            ValueError: there are too many.
            RuntimeError: the filter was removed already.
            OSError: the kernel refuses the filter.
        """
        new = [network for network in networks if network not in self.networks]
        if len(self.networks) + len(new) > MAX_NETWORKS:
            raise ValueError(f"a worker can admit at most {MAX_NETWORKS} networks: name wider ones")
        if self.opened is not None and not all(network.prefixlen == 0 for network in new):
            raise RuntimeError(f"call admit() earlier: every host can reach this worker already, because {self.opened}")
        self.networks += new
        self._known.clear()
        if new:
            logger.warning("the TCP ports of a worker are open to %s", ", ".join(map(str, new)))
            self._reattach()

    def admit_peer(self, hosts: Iterable[str], control: str | None) -> None:
        """Admits a peer that the exchange has let in.

        Args:
            hosts: the addresses of its TCP transport.
            control: the address that its control socket comes from; None if it is on this machine. It is admitted, too,
                because with address translation, for instance, the peer does not know the address that we see.

        Raises:
            OSError: the kernel refuses the filter.
        """
        stated = [host for host in dict.fromkeys(hosts) if self._keeps_out(host)][:MAX_EACH]
        seen = [control] if control is not None and control not in stated and self._keeps_out(control) else []
        new = [host for host in (*stated, *seen) if host not in self._peers]
        if seen and seen[0] in new:
            logger.warning(
                "the TCP ports of a worker are open to %s: the control socket of a peer comes from there, but the peer "
                "states other addresses (%s). Other hosts behind that address can reach the ports, too",
                seen[0],
                ", ".join(stated) or "none of other machines",
            )
        for host in (*stated, *seen):
            self._peers.pop(host, None)
            self._peers[host] = None
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        if new:
            self._reattach()

    def _keeps_out(self, host: str) -> bool:
        """Whether the filter drops what a host sends, and would not if the host were admitted."""
        known = self._known.get(host)
        if known is None:
            if len(self._known) >= MAX_PEERS:
                self._known.clear()
            known = self._known[host] = self._compare(host)
        return known

    def _compare(self, host: str) -> bool:
        """Computes what :meth:`_keeps_out` remembers."""
        address = ip_network(host)
        return any(port.family == family_of(host) for port in self._ports) and not any(
            network.version == address.version and address.subnet_of(network)  # type: ignore[arg-type]
            for network in (*THIS_MACHINE, *self._local, *self.networks)
        )

    @property
    def _everybody_admitted(self) -> bool:
        """Whether the user has admitted all hosts, by IPv4 and IPv6. (UCX may use either.)"""
        return {network.version for network in self.networks if network.prefixlen == 0} == {4, 6}

    def _reattach(self) -> None:
        if self._everybody_admitted:
            self._detach()
        elif self.opened is None and self.obstacle is None:
            self._attach()

    def _detach(self) -> None:
        for port in self._ports:
            try:
                port.set_option(_SO_DETACH_FILTER, bytes(4))
            except OSError:
                continue  # closed, or it has no filter

    def _attach(self) -> None:
        networks = [*THIS_MACHINE, *self._local, *self.networks, *map(ip_network, self._peers)]
        for port in self._ports:
            program = filter_program(port.family, networks)
            kept = ffi.from_buffer("char[]", program)
            port.set_option(_SO_ATTACH_FILTER, struct.pack("@HP", len(program) // 8, int(ffi.cast("uintptr_t", kept))))
