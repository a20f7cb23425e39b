"""Data ports: the sockets on which UCX's TCP transport listens, and who may connect to them.

UCX trusts everything that arrives there. A stranger who speaks its protocol can write anywhere in our memory
(``UCT_TCP_EP_PUT_REQ_AM_ID``). So a filter on each socket (``SO_ATTACH_FILTER``) makes the kernel drop strangers'
requests to connect. At first it admits processes of this machine only. The exchange of each Connection admits the
addresses of its peer's TCP transport. When a program gives the worker's address away by other means, or uses raw
endpoints, its peers may connect from anywhere: then the filter is removed.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import attrs

from ..._native import ffi
from .._address import family_of
from .._address_format import parse_worker_address

logger = logging.getLogger("trio_ucx")

#: Greatest number of peers' addresses in the filter. A further one replaces the one that connected least recently; that
#: peer's connections stay, because the filter only concerns new ones. (The kernel takes 4096 instructions, and 20 KiB
#: of options for a socket.)
MAX_ADMITTED = 200
#: Greatest number of addresses that one peer can have admitted.
MAX_EACH = 16

#: The first UCX that connects from the address of the device that it chose (TCP_EP_BIND_SRC_ADDR).
BINDS_TO_ITS_ADDRESS = (1, 19)

# <linux/filter.h> and <asm-generic/socket.h>
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_BYTE, _LOAD_WORD, _AND, _RETURN = 0x30, 0x20, 0x54, 0x06
_JUMP_IF_EQUAL, _JUMP_IF_SET = 0x15, 0x45
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_TCP_FLAGS, _SYN, _ACK = 13, 0x02, 0x10
_SOURCE = {socket.AF_INET: _NETWORK_HEADER + 12, socket.AF_INET6: _NETWORK_HEADER + 8}
_ALL, _NOTHING = 0xFFFFFFFF, 0


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_program(family: socket.AddressFamily, hosts: Iterable[str]) -> bytes:
    """A classic BPF program that drops requests to connect (SYN), unless they come from one of ``hosts``.

    Packets of existing connections pass after three instructions. Offsets count from the TCP header.
    """
    accept, source = _instruction(_RETURN, _ALL), _SOURCE[family]
    program = [
        _instruction(_LOAD_BYTE, _TCP_FLAGS),
        _instruction(_JUMP_IF_SET, _SYN, if_false=1),
        _instruction(_JUMP_IF_SET, _ACK, if_false=1),
        accept,
    ]
    if family == socket.AF_INET:
        loopback = [_instruction(_LOAD_WORD, source), _instruction(_AND, 0xFF000000)]
        program += [*loopback, _instruction(_JUMP_IF_EQUAL, 0x7F000000, if_false=1), accept]
        program.append(_instruction(_LOAD_WORD, source))
    for host in hosts:
        words = struct.unpack(f">{4 if family == socket.AF_INET6 else 1}I", socket.inet_pton(family, host))
        if len(words) == 1:
            program += [_instruction(_JUMP_IF_EQUAL, words[0], if_false=1), accept]
            continue
        for index, word in enumerate(words):
            program.append(_instruction(_LOAD_WORD, source + 4 * index))
            program.append(_instruction(_JUMP_IF_EQUAL, word, if_false=2 * (len(words) - index - 1) + 1))
        program.append(accept)
    return b"".join([*program, _instruction(_RETURN, _NOTHING)])


@attrs.frozen
class _Port:
    """A socket of UCX's, which may close it any time: the inode tells whether the descriptor is still this socket."""

    fd: int
    inode: int
    family: socket.AddressFamily

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


def _find(addresses: set[tuple[str, int]]) -> list[_Port]:
    """The listening sockets of this process at these addresses."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with _borrowed(int(name)) as candidate:
            if candidate is None or candidate.family not in _SOURCE:
                continue
            try:
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and candidate.getsockname()[:2] in addresses:
                    found.append(_Port(int(name), os.fstat(int(name)).st_ino, candidate.family))
            except OSError:  # closed by another thread just now
                continue
    return found


class DataPorts:
    """The data ports of one worker.

    Args:
        address: the worker's UCX address, by which its ports are found.

    Attributes:
        restricted: whether the filter is attached.
    """

    def __init__(self, address: bytes) -> None:
        self._ports: list[_Port] = []
        self._admitted: dict[str, None] = {}
        try:
            own = parse_worker_address(address).tcp_addresses
            self._ports = _find(set(own))
        except (ValueError, OSError):
            own = ()
        self._local = list(dict.fromkeys(host for host, _ in own))
        self.restricted = bool(self._ports)
        self._restrict()

    @property
    def lost(self) -> bool:
        """Whether UCX has stopped listening at one of them.

        UCX stops for good when it cannot accept a connection because the process has no descriptors left.
        """
        return any(port.closed for port in self._ports)

    def admit(self, hosts: Iterable[str], control: str | None, ucx: tuple[int, int]) -> None:
        """Admits the addresses of a peer that the exchange has let in.

        Args:
            hosts: the addresses that its TCP transport connects from.
            ucx: its release of UCX. Older releases connect from whatever address the kernel chooses.
            control: the address that its control socket comes from; None for a Unix socket. If that is not among
                ``hosts`` (address translation, say), it is unknown where the peer will connect from.
        """
        if not self.restricted:
            return
        if ucx < BINDS_TO_ITS_ADDRESS and control is not None and not _is_loopback(control):
            self.open("a peer's UCX is too old to connect from the addresses that it names")
            return
        hosts = list(dict.fromkeys(hosts))[:MAX_EACH]
        if control is not None and not _is_loopback(control) and control not in (*hosts, *self._local):
            self.open("a peer's control socket comes from an address that its TCP transport does not have")
            return
        hosts = [host for host in hosts if not _is_loopback(host)]
        new = [host for host in hosts if host not in self._admitted and host not in self._local]
        for host in hosts:
            if host in self._admitted:
                del self._admitted[host]
            if host not in self._local:
                self._admitted[host] = None
        while len(self._admitted) > MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        if new:
            self._restrict()

    def open(self, reason: str) -> None:
        """Removes the filter: from now on all hosts may connect."""
        if self.restricted:
            self.restricted = False
            logger.debug("UCX's data ports are open to every host: %s", reason)
            for port in self._ports:
                try:
                    port.set_option(_SO_DETACH_FILTER, bytes(4))
                except OSError:
                    continue  # closed, or it has no filter

    def _restrict(self) -> None:
        if not self.restricted:
            return
        hosts = [*self._local, *self._admitted]
        try:
            for port in self._ports:
                program = filter_program(port.family, [host for host in hosts if family_of(host) == port.family])
                kept = ffi.from_buffer("char[]", program)
                port.set_option(
                    _SO_ATTACH_FILTER, struct.pack("@HP", len(program) // 8, int(ffi.cast("uintptr_t", kept)))
                )
        except OSError as error:
            self.open(f"the kernel takes no filter ({error})")


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
