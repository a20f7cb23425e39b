"""The peer descriptions that the sides exchange, and which transports follow from them. Without I/O."""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from typing import Any

import attrs

from .._wire import MAX_WINDOW, MIN_THRESHOLD, MIN_WINDOW, ProtocolError
from ..ucp._process import MAX_PID, Host, Process
from ..ucp._quirks.address_layout import SHARED_MEMORY, is_loopback
from ..ucp._quirks.option_limits import AGREED, DEFAULT_SIZES, Sizes, differences
from ..ucp._util import printable

#: The shortest worker address, which has a header and the uid, and the longest.
MIN_ADDRESS, MAX_ADDRESS = 10, 48_000
#: The greatest number of TCP addresses: UCX's limit for the transports of a worker.
MAX_TCP_ADDRESSES = 128
#: The ranges of numbers that are only compared: any value is valid.
_ANY8, _ANY32, _ANY64 = (0, 2**8 - 1), (0, 2**32 - 1), (0, 2**64 - 1)

#: The fields in their order: name, format, and the least and the greatest value (None if it is not a number). The
#: addresses, the TCP addresses, the software and a checksum of everything follow.
FIELDS: tuple[tuple[str, str, tuple[int, int] | None], ...] = (
    ("connection id", "I", (2**31, 2**32 - 1)),
    ("window", "Q", (MIN_WINDOW, MAX_WINDOW)),
    ("rendezvous threshold", "Q", (0, MAX_WINDOW)),
    ("wish for shared memory", "B", (0, 2)),
    ("error handling", "B", (0, 1)),
    ("whether the peer is on this machine", "B", (0, 1)),
    ("UCX's major version", "B", _ANY8),
    ("UCX's minor version", "B", _ANY8),
    ("boot id", "16s", None),
    ("PID namespace", "Q", _ANY64),
    ("pid", "I", (0, MAX_PID)),
    ("start time", "Q", _ANY64),
    ("user", "I", _ANY32),
    ("IPC namespace", "Q", _ANY64),
    ("network namespace", "Q", _ANY64),
    ("features", "I", _ANY32),
    ("uid", "Q", _ANY64),
    ("kinds of shared memory", "B", (0, 2 ** len(SHARED_MEMORY) - 1)),
    ("length of the address", "I", (MIN_ADDRESS, MAX_ADDRESS)),
    ("length of the network address", "I", (0, MAX_ADDRESS)),
    ("length of the list of TCP addresses", "B", (0, MAX_TCP_ADDRESSES)),
    ("length of the software", "H", (0, 2**16 - 1)),
    *((f"UCX's option {option}", "I", _ANY32) for option in AGREED),
)
_FACTS = struct.Struct("<" + "".join(format for _, format, _ in FIELDS))
_CHECKSUM = struct.Struct("<I")
#: An IPv6 address, or an IPv4 address in one (``::ffff:0:0/96``); and a port.
_TCP_ADDRESS = struct.Struct("<16sH")

#: From this release of UCX on, a namespace in an address of shared memory or of TCP's loopback device has four bytes
#: rather than eight. So an older and a newer release believe that they are in different namespaces.
_NEW_NAMESPACES = (1, 22)


class SharedMemory(enum.IntEnum):
    """Whether a side wants to use shared memory."""

    AUTO = 0
    NEVER = 1
    ALWAYS = 2


@attrs.frozen
class Facts:
    """The peer description: what one side says about itself, and how its worker can be reached.

    Attributes:
        connection_id: what the peer puts into the tags of its messages.
        window: bytes of unread messages that it is ready to hold.
        threshold: its messages of at least so many bytes stay with it until they are received; 0 if none do.
        shared_memory: whether it wants to use shared memory.
        error_handling: whether its shared memory can be used with error handling (UCX's MM_ERROR_HANDLING).
        sees_local: whether it sees the other end of the control socket on its own machine. (The peer's claim to be on
            the same machine proves nothing.)
        host: where it runs.
        uid: its worker's, by which UCX knows it.
        shared_memory_kinds: the kinds of shared memory in its worker's address.
        tcp_addresses: the IP addresses and ports at which its worker's TCP transport listens.
        address: its worker's address, with all transports.
        network_address: the same without shared memory; empty if nothing else is left.
        features: what its worker's context was opened with (``UCP_FEATURE_*``).
        software: its releases of trio_ucx and UCX, for error messages.
        ucx: its release of UCX, the first two numbers.
        sizes: its values of UCX's options that both sides must have in common.
    """

    connection_id: int
    window: int
    threshold: int
    shared_memory: SharedMemory
    error_handling: bool
    sees_local: bool
    host: Host
    uid: int
    shared_memory_kinds: frozenset[str]
    tcp_addresses: tuple[tuple[str, int], ...]
    address: bytes
    network_address: bytes
    features: int
    software: str
    ucx: tuple[int, int] = (0, 0)
    sizes: Sizes = DEFAULT_SIZES

    def encode(self) -> bytes:
        host, software = self.host, self.software.encode()
        body = (
            _FACTS.pack(
                self.connection_id,
                self.window,
                self.threshold,
                self.shared_memory,
                self.error_handling,
                self.sees_local,
                *self.ucx,
                *attrs.astuple(host.process),
                host.user,
                host.ipc_namespace,
                host.network_namespace,
                self.features,
                self.uid,
                sum(1 << bit for bit, kind in enumerate(SHARED_MEMORY) if kind in self.shared_memory_kinds),
                len(self.address),
                len(self.network_address),
                len(self.tcp_addresses),
                len(software),
                *self.sizes,
            )
            + self.address
            + self.network_address
            + b"".join(_encode_tcp_address(ip, port) for ip, port in self.tcp_addresses)
            + software
        )
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> Facts:
        """Decodes what :meth:`encode` returned.

        Raises:
            ProtocolError: it is damaged, or a field is out of range.
        """
        body = data[: -_CHECKSUM.size]
        if len(body) < _FACTS.size:
            raise ProtocolError("the peer description is too short")
        [checksum] = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
        if checksum != zlib.crc32(body):
            raise ProtocolError("the peer description was damaged on the way")
        (
            connection_id,
            window,
            threshold,
            wish,
            error_handling,
            sees_local,
            major,
            minor,
            boot_id,
            pid_namespace,
            pid,
            start,
            user,
            ipc_namespace,
            network_namespace,
            features,
            uid,
            kinds,
            address_length,
            network_length,
            tcp_addresses,
            software_length,
            *sizes,
        ) = _checked(_FACTS.unpack_from(body))
        lengths = (_FACTS.size, address_length, network_length, tcp_addresses * _TCP_ADDRESS.size, software_length)
        if len(body) != sum(lengths):
            raise ProtocolError("the peer description has another length than it says")
        if 0 < threshold < MIN_THRESHOLD:
            raise ProtocolError(
                f"a rendezvous threshold (UCX_RNDV_THRESH) of {threshold} bytes: connections need at least "
                f"{MIN_THRESHOLD}"
            )
        _, address, network_address, tcp, software = _split(body, lengths)
        return cls(
            connection_id=connection_id,
            window=window,
            threshold=threshold,
            shared_memory=SharedMemory(wish),
            error_handling=bool(error_handling),
            sees_local=bool(sees_local),
            host=Host(Process(boot_id, pid_namespace, pid, start), user, ipc_namespace, network_namespace),
            uid=uid,
            shared_memory_kinds=frozenset(kind for bit, kind in enumerate(SHARED_MEMORY) if kinds & 1 << bit),
            tcp_addresses=tuple(_decode_tcp_address(ip, port) for ip, port in _TCP_ADDRESS.iter_unpack(tcp)),
            address=address,
            network_address=network_address,
            features=features,
            software=printable(software.decode(errors="replace"), 200),
            ucx=(major, minor),
            sizes=tuple(sizes),
        )


def _encode_tcp_address(ip: str, port: int) -> bytes:
    packed = ip_address(ip).packed
    return _TCP_ADDRESS.pack(packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed, port)


def _decode_tcp_address(packed: bytes, port: int) -> tuple[str, int]:
    ip = IPv6Address(packed)
    return str(ip.ipv4_mapped or ip), port


def _split(data: bytes, lengths: tuple[int, ...]) -> Iterator[bytes]:
    """Parts of these lengths."""
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length


def _checked(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the fields of a packed peer description, after checking the range of each."""
    for value, (name, _, limits) in zip(values, FIELDS, strict=True):
        if limits is not None and not limits[0] <= value <= limits[1]:
            raise ProtocolError(
                f"a field of the peer description is out of range: {name} is {value}, not {limits[0]} to {limits[1]}"
            )
    return values


def obstacle_to_shared_memory(ours: Facts, theirs: Facts) -> str | None:
    """Why the two sides cannot use shared memory, in words for the user; None if they can.

    UCX itself checks less. Shared segments need the same IPC namespace, copies by process id need the same PID
    namespace, and waking a sleeping peer, by an abstract Unix socket, needs the same network namespace. The kernel
    gives access only to the same user.
    """
    here, there = ours.host, theirs.host
    differences = [
        what
        for what, mine, other in (
            ("hosts", here.process.host, there.process.host),
            ("IPC namespaces", here.ipc_namespace, there.ipc_namespace),
            ("PID namespaces", here.process.namespace, there.process.namespace),
            ("network namespaces", here.network_namespace, there.network_namespace),
            ("users", here.user, there.user),
        )
        if mine != other
    ]
    if differences:
        return f"the two sides have different {differences[0] if differences[0] == 'hosts' else _listed(differences)}"
    if not (ours.sees_local and theirs.sees_local):
        return "the control socket goes through a proxy or another machine"
    if _releases_differ(ours, theirs):
        return "UCX 1.22 describes shared memory differently from older releases, and one side has an older one"
    if not (ours.error_handling and theirs.error_handling):
        return "one side has the UCX option MM_ERROR_HANDLING=n"
    if not (ours.shared_memory_kinds and theirs.shared_memory_kinds):
        return "one side's UCX has no shared memory (its option TLS, or UCX_TLS, or a limit that its log names)"
    if not ours.shared_memory_kinds & theirs.shared_memory_kinds:
        kinds = " and ".join(sorted(ours.shared_memory_kinds | theirs.shared_memory_kinds))
        return f"the two sides have different kinds of shared memory ({kinds}: see the option TLS, or UCX_TLS)"
    found = (_differences(ours, theirs, kind) for kind in sorted(ours.shared_memory_kinds & theirs.shared_memory_kinds))
    return next((difference for difference in found if difference is not None), None)


def _differences(ours: Facts, theirs: Facts, kind: str) -> str | None:
    return differences(ours.sizes, theirs.sizes, kind)


def _releases_differ(ours: Facts, theirs: Facts) -> bool:
    """Whether each side would misread the namespaces in the other's addresses."""
    return (ours.ucx < _NEW_NAMESPACES) != (theirs.ucx < _NEW_NAMESPACES)


def _only_loopback(side: Facts) -> bool:
    return bool(side.tcp_addresses) and all(is_loopback(ip) for ip, _ in side.tcp_addresses)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def use_shared_memory(ours: Facts, theirs: Facts) -> bool:
    """Whether the two sides use shared memory. Both compute the same answer.

    Raises:
        ProtocolError: one side insists on shared memory, and it is not possible; or no other transport is.
    """
    wishes = {ours.shared_memory, theirs.shared_memory}
    if SharedMemory.NEVER in wishes:
        if SharedMemory.ALWAYS in wishes:
            raise ProtocolError("one side wants shared_memory=True, and the other shared_memory=False")
        obstacle: str | None = "shared_memory=False"
    else:
        obstacle = obstacle_to_shared_memory(ours, theirs)
        if obstacle is not None and SharedMemory.ALWAYS in wishes:
            raise ProtocolError(f"shared_memory=True, but {obstacle}")
    if obstacle is None:
        return True
    if _releases_differ(ours, theirs) and all(map(_only_loopback, (ours, theirs))):
        raise ProtocolError(
            "UCX 1.22 and older releases do not recognise each other's loopback device, and there is no other network "
            "device: use one release on both sides"
        )
    if not (ours.network_address and theirs.network_address):
        raise ProtocolError(
            f"shared memory cannot be used ({obstacle}), and one side's UCX has no other transport: add tcp to its "
            "option TLS (UCX_TLS), as in 'tcp,sm,self'"
        )
    if ours.tcp_addresses and theirs.tcp_addresses and (difference := _differences(ours, theirs, "tcp")) is not None:
        raise ProtocolError(f"{difference}: one side would overrun the memory of the other. Give both the same value")
    return False
