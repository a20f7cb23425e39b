"""The key gate: keys that open the ports of UCX's TCP transport (data ports), and hosts that need none.

UCX trusts everything that arrives at a data port. A stranger who speaks its protocol can write anywhere in our memory
(``UCT_TCP_EP_PUT_REQ_AM_ID``), or end the process. A data port therefore lets in whoever proves that it knows one of
its keys, and answers with a proof of its own; ``_native/key_gate.c`` says how. This module decides on the keys:

* Each exchange of a Connection makes a pair, one key for each side's ports. The peer is let in with it before it can
  connect, and until the endpoint to it is closed.
* A worker's public address has a pair, for raw endpoints. It lets in everybody who has the address, from the moment at
  which the program asks for it.
* UCP programs without trio_ucx cannot make a proof. Hosts that the user names (``Worker.admit``) need none, whatever
  runs there.

Nobody else reaches the data ports, and UCX connects to nobody else over TCP. Raw listeners have ports of their own,
which the gate does not guard. None of this needs a privilege.

Report: "A stranger at TCP's data port", in ucx-reports.md. Releases: all, 1.13 to 1.22. Not needed any more when
UCX authenticates its TCP connections (``ucx-reports/data_port.c`` then has no effect). No worker opens if UCX listens
at a port that ``key_gate.c`` has not seen, or if a function of the C library could not be replaced in libucs. A worker
whose address has an unknown layout gets no Connections. Tests: ``tests/test_key_gate.py``,
``tests/test_protected_mode.py``.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

from ..._native import ffi, lib
from ..._util.socket_addresses import family_of, is_loopback
from .._keys import KEY_SIZE, KeyPair, new_key
from .._worker_address import WorkerAddress
from .address_layout import parse_worker_address

logger = logging.getLogger("trio_ucx")

Network = IPv4Network | IPv6Network

assert KEY_SIZE == lib.TU_KEY

LOOPBACK: tuple[Network, ...] = (ip_network("127.0.0.0/8"), ip_network("::1"))


def tcp_hosts(address: WorkerAddress) -> list[str]:
    """Returns the IP addresses of a peer's TCP transport; any (0.0.0.0) if they are not known."""
    try:
        return address._tcp_hosts or [host for host, _ in parse_worker_address(address.ucx).tcp_addresses]
    except ValueError:
        return ["0.0.0.0"]


class Admission:
    """A peer that was let in. It stays in until :meth:`end`, or until the worker is destroyed."""

    def __init__(self, gate: KeyGate, native: Any) -> None:
        self._gate = gate
        self._native = native

    def peer_has_it(self) -> None:
        """The peer has the keys, too: they are used before those that it may not have. Not after :meth:`end`."""
        lib.tu_gate_know(self._native)

    def end(self) -> None:
        """Takes the keys away. No effect if it has ended.

        The connections that they have let in pass on to another pair of this peer, or are shut some seconds later.
        """
        native, self._native = self._native, None
        if native is not None and self._gate.handle is not None and lib.tu_gate_remove(native):
            self._gate.wait_to_shut()


class KeyGate:
    """The key gate of one worker.

    Args:
        handle: UCX's worker.
        address: the worker's, which says where UCX listens.
        unknown_layout: why UCX's address could not be read; None if it could.
        watch: called when a pair has ended whose connections are to be shut: call :meth:`shut_ended` now and then from
            here on.

    Attributes:
        handle: None once UCX's worker is destroyed.
        address: the worker's, without keys.
        networks: the hosts that need no key.
        has_ended: whether there are connections to be shut.

    Raises:
        PermissionError: strangers cannot be kept away from the data ports.
    """

    def __init__(
        self,
        handle: Any,
        address: WorkerAddress,
        unknown_layout: str | None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.handle: Any = handle
        self.networks: list[Network] = []
        self.address = address
        self.has_ended = False
        self._watch = watch
        self._unknown_layout = unknown_layout
        self._ports = self._find_ports()
        missing = lib.tu_gate_missing()
        if missing != ffi.NULL and (address.tcp_addresses or unknown_layout is not None):
            raise _not_shut(
                f"trio_ucx cannot replace {ffi.string(missing).decode()}() in libucs: libucs does not import it from "
                "the C library, or a security policy (seccomp, a security module) forbids changing the import table"
            )
        if not {port for _, port in address.tcp_addresses} <= {port for _, port in self._ports}:
            # The address of a loopback device does not say which IP address it has.
            raise _not_shut("trio_ucx could not find where this UCX begins to listen")

    def _find_ports(self) -> list[tuple[str, int]]:
        """Returns the addresses at which UCX listens for the worker."""
        found: list[tuple[str, int]] = []
        port = ffi.new("tu_address_t *")
        while lib.tu_gate_port(self.handle, len(found), port):
            found.append((ffi.string(port.ip).decode(), port.port))
        return found

    @property
    def lost(self) -> bool:
        """True if UCX has stopped listening at a port.

        UCX stops for good when it cannot accept a connection because the process has no descriptors left.
        """
        return lib.tu_gate_lost(self.handle)

    def check_shut(self) -> None:
        """Refuses a worker that may have data ports of which the gate does not know, before its first Connection.

        Raises:
            PermissionError: it may.
        """
        if self._unknown_layout is not None:
            raise _not_shut(f"trio_ucx cannot read this UCX's worker address ({self._unknown_layout})")

    def wait_to_shut(self) -> None:
        """There are connections to be shut."""
        self.has_ended = True
        self._watch()

    def shut_ended(self) -> None:
        """Shuts the connections of pairs that have ended some time ago."""
        self.has_ended = self.handle is not None and lib.tu_gate_shut_ended(self.handle)

    def let_in(self, pair: KeyPair, address: WorkerAddress | None, *, lasting: bool = False) -> Admission:
        """Lets a peer in: it can connect to the data ports, and UCX can connect to its data ports.

        UCX does not connect to addresses of this host if the peer is on another one, or in another network namespace.

        Args:
            address: the peer's; None if it is not known.
            lasting: whether the keys are in that address. They may then be used again, so their epoch is random.

        Raises:
            OSError: there is no memory for that (ENOMEM).
        """
        peer = ffi.new("tu_peer_t *")
        if address is not None:
            places = ffi.new("tu_address_t[]", [_native_address(*place) for place in address.tcp_addresses])
            peer.addresses, peer.count, peer.uid = places, len(places), address.uid
            peer.is_here = self.address.host.shares_network(address.host)
        peer.lasting = lasting
        epoch = secrets.randbits(63) if lasting else 0
        native = lib.tu_gate_add(self.handle, pair.ours, pair.theirs, epoch, peer)
        if native == ffi.NULL:
            raise OSError(errno.ENOMEM, "no memory for the keys of a peer")
        return Admission(self, native)

    @cached_property
    def public_address(self) -> WorkerAddress:
        """The worker's address with keys: from now on, whoever has it can connect.

        If UCX connects to a host for which the gate has no other pair, the gate proves that it knows the second key of
        this address. That happens when a peer that has the address makes our UCX connect back: we do not know that
        peer's own address.
        """
        if self.handle is None:
            return self.address
        pair = KeyPair(ours=new_key(), theirs=new_key())
        lib.tu_gate_use_by_default(self.let_in(pair, None)._native)
        ports = self.address.tcp_addresses or tuple(self._ports)  # the address may have an unknown layout
        return self.address._changed(keys=pair.ours + pair.theirs, tcp_addresses=ports)

    def let_in_by_address(self, address: WorkerAddress) -> Admission | None:
        """Lets in the worker with this public address: its UCX may have to connect to our data ports.

        Returns:
            None if the address has no keys, or if our worker has no data ports.

        Raises:
            PermissionError: the address has no keys, and its hosts are not admitted without a key.
            OSError: there is no memory for that (ENOMEM).
        """
        if not self._ports:
            return None
        if not address.keys or not address.tcp_addresses:
            self.check_admitted(tcp_hosts(address))
            return None
        pair = KeyPair(ours=address.keys[KEY_SIZE:], theirs=address.keys[:KEY_SIZE])
        return self.let_in(pair, address, lasting=True)

    # ---- hosts that need no key ----

    def admit(self, networks: Iterable[Network]) -> None:
        """Lets in the hosts of some networks without a key.

        If a network contains an address of this machine, all addresses of this machine are let in.

        Raises:
            MemoryError: there is no memory for that.
        """
        new = [network for network in networks if network not in self.networks]
        if not new:
            return
        ours = [*LOOPBACK, *(ip_network(host) for host in dict.fromkeys(host for host, _ in self._ports))]
        if any(network.overlaps(own) for network in new for own in ours if network.version == own.version):
            new += [own for own in ours if own not in (*self.networks, *new)]
        for network in new:
            if not lib.tu_gate_admit(self.handle, _pointer(str(network.network_address)), network.prefixlen):
                raise MemoryError("no memory for an admitted network")
            self.networks.append(network)
        logger.warning("the TCP ports of a worker are open to %s", ", ".join(map(str, new)))

    def check_admitted(self, hosts: Sequence[str]) -> None:
        """Refuses peers that are not trio_ucx's, unless their hosts are admitted without a key.

        A loopback address counts only where there is no other: each host has one.

        Raises:
            PermissionError: a host is not admitted.
        """
        counted = [host for host in hosts if not is_loopback(host)] or hosts
        others = [host for host in counted if not self._is_admitted(host)]
        if others:
            raise PermissionError(
                errno.EPERM,
                f"the peer at {', '.join(others)} has no key: it has no trio_ucx, or was reached by its socket "
                f"address. To do without a key, open the worker with admit={others!r}, or call worker.admit(...): "
                "every process on an admitted host can take over this program. (Workers of trio_ucx need no "
                "admission if they exchange bytes(worker.address).)",
            )

    def _is_admitted(self, host: str) -> bool:
        address = ip_address(host.partition("%")[0])
        return any(address in network for network in self.networks)

    def check_admits_anybody(self) -> None:
        """Refuses a raw listener if no host is admitted without a key.

        Raises:
            PermissionError: none is.
        """
        if not self.networks:
            raise PermissionError(
                errno.EPERM,
                "clients of a raw listener have no keys, and this worker lets in nobody without one. Open it with "
                'admit=["127.0.0.1"] for this machine, or admit=["10.0.0.0/8"] for a network, or call worker.admit(): '
                "every process on a host that is admitted can take over this program",
            )


def parse_networks(networks: Sequence[str]) -> list[Network]:
    """Returns the networks that a user has named.

    Raises:
        TypeError, ValueError: they are not such text.
    """
    if isinstance(networks, str):
        raise TypeError(f"networks are given in a list, such as [{networks!r}]")
    for network in networks:
        if not isinstance(network, str):
            raise TypeError(f"a network must be a str, such as '10.0.0.0/8', not {type(network).__name__}")
    return [ip_network(network) for network in networks]


def _not_shut(why: str) -> PermissionError:
    return PermissionError(
        errno.EPERM,
        f"strangers cannot be kept away from UCX's TCP ports, because {why}. Use UCX 1.13 to 1.22 as a shared library, "
        'or a worker without TCP (config={"TLS": "sm,self"})',
    )


def _native_address(host: str, port: int) -> tuple[int, bytes, int, int]:
    return int(family_of(host)), host.encode(), port, 0


def _pointer(host: str) -> Any:
    return ffi.new("tu_address_t *", _native_address(host, 0))
