"""What trio_ucx reads from UCX's worker addresses, because UCX does not tell it.

Of this worker: where it listens, and its kinds of shared memory, which it states to its peers in its ``WorkerAddress``.
Of programs without trio_ucx: the same, and the part without shared memory. Of both: the part with some of the TCP
devices. Of a peer, for a memory endpoint: where the uid stands.

The layout is private to UCX: that of ``src/ucp/wireup/address.c`` in UCX 1.13 to 1.22, both version 1 (the default) and
version 2 (``UCX_ADDRESS_VERSION=v2``). An address with another layout is refused by an error that says where. All
numbers are little-endian::

    header     version 1: one byte, version (4 bits) and flags (4 bits)
               version 2: version (4 bits), UCX's minor release (4 bits), then one byte of flags
    uid        8 bytes
    client id  8 bytes, with its flag only
    name       length (1 byte) and text, with its flag only (UCX_ADDRESS_DEBUG_INFO=y)
    device     memory domain (1 byte), length of the device address and flags (1 byte), number of paths (1 byte, with
               its flag only), system device (1 byte, with its flag only), device address; then its transports:
        transport  checksum of its name (2 bytes), performance and capabilities (16 bytes, or 8 in version 2), length
                   of the interface address and flags (1 byte), interface address
        ...
    ...
    release    version 1, from UCX 1.16 on: a device without transports, whose memory domain is the minor release

A flag marks the last transport of a device and the last device. An address without devices has 0xff in their place.
Version 2 writes a length that does not fit its bits as the largest such value and one more byte.

The address of a worker in unified mode (``UCX_UNIFIED_MODE=y``) has another layout, and nothing in it says so. It is
refused because its fields make no sense in this layout.

The structure is checked, and the contents only where trio_ucx reads them. A damaged address crashes UCX
("A damaged worker address", ucx-reports.md).

Releases: all, 1.13 to 1.22. Not needed any more when UCX tells the transports and devices of an address
(``ucp_worker_address_query`` tells its uid only). Test: ``tests/test_address_layout.py``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection

import attrs

from ..._native import ffi, lib
from .releases import is_known

#: To be appended to an address before UCX gets it. UCX ignores what follows the last device. But UCX until 1.21 reads 8
#: bytes of a namespace where 1.22 writes 4, and every UCX copies as many bytes after a posix segment as its own
#: UCX_POSIX_DIR has.
PADDING = bytes(4096)

#: The transports that are shared memory, by UCX's names. A worker receives over each of them from one queue.
SHARED_MEMORY = ("sysv", "posix", "xpmem")
#: The transports that may serve only to connect others. An address does not say so; ``ucp_context_print_info`` does.
AUXILIARY = ("ud_verbs", "ud_mlx5", "tcp")
#: Transports that do not leave the host.
_WITHIN_HOST = frozenset({*SHARED_MEMORY, "self", "cma", "knem"})

# Flags of the header.
_HAS_NAME, _HAS_UID, _HAS_CLIENT_ID, _ACTIVE_MESSAGES_ONLY = 0x01, 0x02, 0x04, 0x08
_NO_DEVICES = 0xFF  # UCP_NULL_RESOURCE
_MAX_NAME = 31

# Flags beside a memory domain or a length.
_LAST = 0x80
_NO_TRANSPORTS = 0x80
_HAS_PATHS = 0x40
_HAS_SYSTEM_DEVICE = 0x20
_HAS_ENDPOINT_ADDRESS = 0x40
_EXTENDED_MEMORY_DOMAIN = 0x7F  # UCX has at most 64
_DEVICE_LENGTH_MASK = 0x1F
_INTERFACE_LENGTH_MASK = 0x3F

#: From this release of UCX on, a namespace in an address of shared memory or of TCP's loopback device has four bytes
#: rather than eight. So an older and a newer release believe that they are in different namespaces.
_NEW_NAMESPACES = (1, 22)

#: Bytes of performance and capabilities, by version.
_ATTRIBUTES = {1: 16, 2: 8}

# Transport tcp (src/uct/tcp/tcp.h). A loopback device has the host's id, 8 bytes, and a namespace, 8 bytes until UCX
# 1.21 and 4 since 1.22.
_TCP_LOOPBACK = 0x01
_AF_INET, _AF_INET6 = 2, 10
_TCP_LENGTHS = {
    (_AF_INET, False): (4,),
    (_AF_INET6, False): (16,),
    (_AF_INET, True): (12, 16),
    (_AF_INET6, True): (12, 16),
}


def transport_checksum(name: str) -> int:
    """Returns how an address names a transport: a CRC-16 of its name (``ucs_crc16_string``)."""
    crc = 0xFFFF
    for byte in name.encode():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x8408 if crc & 1 else 0)
    return crc ^ 0xFFFF


_NAMES = {
    transport_checksum(name): name
    for name in (
        *("tcp", *sorted(_WITHIN_HOST)),
        *("rc_verbs", "rc_mlx5", "rc_gda", "dc_mlx5", "ud_verbs", "ud_mlx5", "gga_mlx5", "srd"),
        *("cuda_copy", "cuda_ipc", "gdr_copy", "rocm_copy", "rocm_gdr", "rocm_ipc", "ze_copy", "gaudi_gdr"),
        *("ugni_rdma", "ugni_smsg", "ugni_udt"),
    )
}


@attrs.frozen
class Device:
    """A device of a worker.

    Args:
        address: the device address. All transports of the device share it.
        transports: the names of its transports, and their interface addresses. A name is None if the checksum is that
            of no transport that we know.
        place: its position in the worker address.
        tcp_addresses: where its transport tcp listens, if it has that.
    """

    address: bytes
    transports: tuple[tuple[str | None, bytes], ...]
    place: slice
    tcp_addresses: tuple[tuple[str, int], ...]


@attrs.frozen
class ParsedAddress:
    """What trio_ucx reads from a worker address.

    Args:
        devices: none, if the worker has no device of the kind that was asked for.
    """

    devices: tuple[Device, ...]

    @property
    def tcp_addresses(self) -> tuple[tuple[str, int], ...]:
        """IP addresses and ports to which transport tcp connects. A loopback device says only that it is one."""
        return tuple(address for device in self.devices for address in device.tcp_addresses)

    @property
    def transports(self) -> set[str | None]:
        return {name for device in self.devices for name, _ in device.transports}

    @property
    def shared_memory(self) -> frozenset[str]:
        """The kinds of shared memory among its transports."""
        return frozenset(name for name in SHARED_MEMORY if name in self.transports)


def parse_worker_address(blob: bytes) -> ParsedAddress:
    """Reads what ``ucp_worker_get_address`` has returned to some program.

    Args:
        blob: the address; nothing may precede or follow it.

    Raises:
        ValueError: it has another layout than trio_ucx knows.
    """
    reader = _Reader(blob)
    _parse_header(reader)
    devices: list[Device] = []
    last = not reader.at_end and reader.peek() == _NO_DEVICES
    if last:
        reader.integer(1, "the mark that there are no devices")
    while not last:
        if reader.version == 1 and devices and not reader.at_end and reader.peek() & _NO_TRANSPORTS:
            _parse_release(reader)
            break
        device, last = _parse_device(reader)
        devices.append(device)
    if not reader.at_end:
        raise reader.error("bytes follow its last device")
    if devices and not any(name for device in devices for name, _ in device.transports):
        raise reader.error("it has only unknown transports")
    return ParsedAddress(tuple(devices))


def without_shared_memory(blob: bytes) -> bytes | None:
    """Returns a worker address without its transports over shared memory; None if it has no others.

    Raises:
        ValueError: as :func:`parse_worker_address`.
    """
    return _with(blob, lambda device: not any(name in _WITHIN_HOST for name, _ in device.transports))


def with_tcp_at(blob: bytes, hosts: Collection[str]) -> bytes | None:
    """Returns a worker address with only those TCP devices that have these IPs; None if there is none.

    Raises:
        ValueError: as :func:`parse_worker_address`.
    """
    if not any(host in hosts for host, _ in parse_worker_address(blob).tcp_addresses):
        return None
    return _with(blob, lambda device: all(host in hosts for host, _ in device.tcp_addresses))


def auxiliary(info: str) -> frozenset[str]:
    """Returns the transports that serve only to connect others, as UD does with ``TLS=rc``, or TCP with ``tcp:aux``.

    Args:
        info: UCX's description of a context.
    """
    return frozenset(re.findall(r"flags a. (\w+)/", info)) & {*AUXILIARY}


def without_devices(blob: bytes, having: Collection[str], but_not: Collection[str | None]) -> bytes | None:
    """Returns a worker address without the devices that have transports of one list, but not of the other.

    None if it has no other devices.

    Raises:
        ValueError: as :func:`parse_worker_address`.
    """

    def keep(device: Device) -> bool:
        names = {name for name, _ in device.transports}
        return names.isdisjoint(having) or not names.isdisjoint(but_not)

    return _with(blob, keep)


def _with(blob: bytes, keep: Callable[[Device], bool]) -> bytes | None:
    """Returns a worker address with some of its devices; None if there are none."""
    devices = parse_worker_address(blob).devices
    kept = [device for device in devices if keep(device)]
    if len(kept) == len(devices):
        return blob
    if not kept:
        return None
    start, end = devices[0].place.start, devices[-1].place.stop  # behind it, version 1 may have the release
    last = bytearray(blob[kept[-1].place])
    last[1] = last[1] & ~_LAST | (_LAST if end == len(blob) else 0)  # behind the memory domain
    return b"".join([blob[:start], *(blob[device.place] for device in kept[:-1]), last, blob[end:]])


def check_version(blob: bytes) -> None:
    """Refuses an address of another version than trio_ucx knows. (UCX would end the process.)

    Raises:
        ValueError: it is one.
    """
    _version(_Reader(blob))


def read_uid(blob: bytes) -> int:
    """The number by which UCX knows the worker (``ucp_worker_address_query``); 0 if the address does not say."""
    uid = ffi.new("uint64_t *")
    lib.tu_address_uid(ffi.from_buffer("char[]", blob + PADDING), uid)
    return int(uid[0])


def agree_on_namespaces(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if two releases read the namespaces in each other's addresses. Unknown releases only read their own."""
    if is_known(one) and is_known(other):
        return (one < _NEW_NAMESPACES) == (other < _NEW_NAMESPACES)
    return one == other


def with_uid(blob: bytes, uid: int) -> bytes:
    """Returns a worker address with another uid.

    Args:
        blob: an address of a layout that UCX of this release understands.
    """
    start = 1 if blob[0] & 0x0F == 0 else 2  # behind the header of version 1 or 2
    return blob[:start] + uid.to_bytes(8, "little") + blob[start + 8 :]


class _Reader:
    """Reads fields one after another, and never past the end."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self.at = 0
        self.version = 1

    @property
    def at_end(self) -> bool:
        return self.at == len(self._blob)

    def error(self, problem: str) -> ValueError:
        return ValueError(f"unknown layout: {problem} (at byte {self.at})")

    def take(self, length: int, what: str) -> bytes:
        left = len(self._blob) - self.at
        if length > left:
            raise self.error(f"{what} needs {length} bytes, and {left} are left")
        self.at += length
        return self._blob[self.at - length : self.at]

    def integer(self, length: int, what: str) -> int:
        return int.from_bytes(self.take(length, what), "little")

    def peek(self) -> int:
        return self._blob[self.at]

    def extended(self, first: int, mask: int, what: str) -> int:
        """A value whose first byte has been read. In version 2 the largest one means that the next byte has it."""
        value = first & mask
        return value if self.version == 1 or value < mask else self.integer(1, what)


def _version(reader: _Reader) -> int:
    """Reads the version. Returns the first byte."""
    first = reader.integer(1, "the header")
    reader.version = (first & 0x0F) + 1
    if reader.version not in _ATTRIBUTES:
        raise reader.error(f"it has version {reader.version}, and only versions 1 and 2 are known")
    return first


def _parse_header(reader: _Reader) -> None:
    """Reads what precedes the devices."""
    first = _version(reader)
    flags = first >> 4 if reader.version == 1 else reader.integer(1, "the header's second byte")
    if unknown := flags & ~(_HAS_NAME | _HAS_UID | _HAS_CLIENT_ID | _ACTIVE_MESSAGES_ONLY):
        raise reader.error(f"its header has unknown flags {unknown:#x}")
    if not flags & _HAS_UID:
        raise reader.error("it has no worker uid")
    reader.take(8, "the worker uid")
    if flags & _HAS_CLIENT_ID:
        reader.take(8, "the client id")
    if flags & _HAS_NAME:
        length = reader.integer(1, "the length of the worker's name")
        if length > _MAX_NAME:
            raise reader.error(f"the worker's name has {length} bytes, more than {_MAX_NAME}")
        reader.take(length, "the worker's name")


def _parse_release(reader: _Reader) -> None:
    """Reads the release at the end of version 1."""
    domain, length = reader.take(2, "the release")
    if domain & ~(_NO_TRANSPORTS | 0x0F) or length != _LAST:
        raise reader.error("a device without transports is not the one with the release at the end")


def _parse_device(reader: _Reader) -> tuple[Device, bool]:
    """A device and whether it is the last one."""
    start = reader.at
    first = reader.integer(1, "a memory domain")
    if first & _NO_TRANSPORTS:
        raise reader.error("a device has no transports")
    if reader.version == 2 and first == _EXTENDED_MEMORY_DOMAIN:
        raise reader.error("a memory domain has more than one byte")
    flags = reader.integer(1, "the length of a device address")
    length = reader.extended(flags, _DEVICE_LENGTH_MASK, "the length of a device address")
    if flags & _HAS_PATHS:
        reader.take(1, "a number of paths")
    if flags & _HAS_SYSTEM_DEVICE:
        reader.take(1, "a system device")
    address = reader.take(length, "a device address")
    transports: list[tuple[str | None, bytes]] = []
    last = False
    while not last:
        transport, last = _parse_transport(reader)
        transports.append(transport)
    tcp = tuple(
        (_tcp_host(reader, address), int.from_bytes(interface, "big"))
        for name, interface in transports
        if name == "tcp"
    )
    return Device(address, tuple(transports), slice(start, reader.at), tcp), bool(flags & _LAST)


def _parse_transport(reader: _Reader) -> tuple[tuple[str | None, bytes], bool]:
    """A transport's name and interface address, and whether it is the last one of its device."""
    name = _NAMES.get(reader.integer(2, "a transport's checksum"))
    reader.take(_ATTRIBUTES[reader.version], "a list of capabilities")
    flags = reader.integer(1, "the length of an interface address")
    if flags & _HAS_ENDPOINT_ADDRESS:
        raise reader.error("a transport has an endpoint address, which no worker address has")
    length = reader.extended(flags, _INTERFACE_LENGTH_MASK, "the length of an interface address")
    address = reader.take(length, "an interface address")
    if name == "tcp" and (len(address) != 2 or address == bytes(2)):
        raise reader.error(f"transport tcp has the interface address {address.hex() or 'of no bytes'}, not a port")
    return (name, address), bool(flags & _LAST)


def _tcp_host(reader: _Reader, device: bytes) -> str:
    """``uct_tcp_device_addr_t``: flags, family, then an IP address or, for loopback, host id and network namespace."""
    loopback = bool(device and device[0] & _TCP_LOOPBACK)
    family = device[1] if len(device) > 1 else 0
    if len(device) - 2 not in _TCP_LENGTHS.get((family, loopback), ()):
        raise reader.error(f"transport tcp has the device address {device.hex()}, which is no IP address")
    if loopback:
        return "127.0.0.1" if family == _AF_INET else "::1"
    return str(ipaddress.ip_address(device[2:]))
