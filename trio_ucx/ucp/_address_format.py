"""The format of UCX's worker addresses: a parser that refuses every address that UCX cannot read safely.

``ucp_ep_create`` trusts the bytes that it gets. A damaged address makes it read past the end of them, or ends the
process with an assertion. An address from an untrusted peer is therefore parsed here first.

The layout is that of ``src/ucp/wireup/address.c`` in UCX 1.13 to 1.22, both version 1 (the default) and version 2
(``UCX_ADDRESS_VERSION=v2``). All numbers are little-endian::

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

A flag marks the last transport of a device and the last device. Version 2 writes a memory domain or a length that does
not fit its bits as the largest such value and one more byte. Endpoint addresses occur only in messages between
endpoints, never in a worker address.

The address of a worker in unified mode (``UCX_UNIFIED_MODE=y``) has another layout, and nothing in it says so. It is
refused because its fields make no sense in this layout.

UCX reads a few structures whose size is not the same in all releases and configurations, and so may read past the end
even of a correct address. `PADDING` behind the address keeps that within bounds.

The parser sees nothing but the bytes. It cannot know whether a shared memory segment belongs to the worker that the
address claims, whether an IP address and port do, or whether the uid does. See `parse_worker_address`.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable

import attrs

from ._util import printable

#: To be appended to an address before UCX gets it. UCX ignores what follows the last device. But UCX until 1.21 reads 8
#: bytes of a namespace where 1.22 writes 4, and every UCX copies as many bytes after a posix segment as its own
#: UCX_POSIX_DIR has.
PADDING = bytes(4096)

#: The transports that are shared memory, by UCX's names. A worker receives over each of them from one queue.
SHARED_MEMORY = ("sysv", "posix", "xpmem")

# Limits of UCX (src/ucp/core/ucp_types.h). Its arrays have these sizes.
_MAX_RESOURCES = 128
_MAX_MEMORY_DOMAINS = 64
_MAX_NAME = 31

# The header.
_FLAG_NAME = 0x01
_FLAG_UUID = 0x02
_FLAG_CLIENT_ID = 0x04
_FLAG_AM_ONLY = 0x08
_KNOWN_FLAGS = _FLAG_NAME | _FLAG_UUID | _FLAG_CLIENT_ID | _FLAG_AM_ONLY
_EMPTY_ADDRESS = 0xFF  # UCP_NULL_RESOURCE

# Flags beside a memory domain or a length.
LAST = 0x80
_NO_TRANSPORTS = 0x80
_HAS_PATHS = 0x40
_HAS_SYSTEM_DEVICE = 0x20
_HAS_ENDPOINT_ADDRESS = 0x40
_MEMORY_DOMAIN_MASK = 0x7F
_DEVICE_LENGTH_MASK = 0x1F
_INTERFACE_LENGTH_MASK = 0x3F
_RELEASE_MASK = 0x0F

# Until 1.18, UCX put two capability bits beside the memory domain of version 1. UCX cuts them off if the release, which
# has 4 bits, is one of these. No release means a UCX before 1.16. Until 1.23, UCX takes 14 and 15 for 1.14 and 1.15.
_LEGACY_DOMAIN_MASK = 0x1F
_LEGACY_RELEASES = frozenset({0, 1, 2, 14, 15, None})

# Performance and capabilities.
_ATTRIBUTES_1 = struct.Struct("<fffI")  # overhead and bandwidth, latency, then priority and capabilities
_ATTRIBUTES_2 = struct.Struct("<BBBBHH")  # overhead, bandwidth, latency, priority, segment size, capabilities
_CAPABILITIES_1 = 0xC03FFFFF
_CAPABILITIES_2 = 0x03FF
_AM_CAPABILITY_2 = 0x02
_MIN_SECONDS, _MAX_SECONDS = 1e-12, 1e3  # 0 is allowed too
_MIN_BANDWIDTH, _MAX_BANDWIDTH = 1.0, 1e18
_MAX_FP8_EXPONENT = 13
_MIN_SEGMENT = 512  # bytes
_SEGMENT_UNIT = 64

# Transport tcp (src/uct/tcp/tcp.h).
_TCP_LOOPBACK = 0x01
_TCP_ALLOW_GATEWAY = 0x02  # UCX 1.20.0 only
_AF_INET, _AF_INET6 = 2, 10

# Shared memory (src/uct/base/uct_iface.h, src/uct/sm). Namespace ids had 8 bytes until UCX 1.21, and have 4 since 1.22.
_HOST_ID = 8
_HOST_ID_AND_NAMESPACE = (12, 16)
_NAMESPACE_FLAG = 1 << 63
_POSIX_PROC_LINK = 1 << 63
_POSIX_SHM_OPEN = 1 << 62
_POSIX_PID_NAMESPACE = 1 << 60
_POSIX_ID_MASK = (1 << 60) - 1
_POSIX_PID_MASK = (1 << 30) - 1
_CMA_NAMESPACE_FLAG = 1 << 31

# Network adapters (src/uct/ib/base/ib_device.h): flags at the start of a device address.
_IB_GID_INDEX = 0x01
_IB_PATH_MTU = 0x02
_IB_PKEY = 0x04
_IB_ETHERNET = 0x08
_IB_SUBNET_16 = 0x10
_IB_SUBNET_64 = 0x20
_IB_INTERFACE_ID = 0x40


def transport_checksum(name: str) -> int:
    """How an address names a transport: a CRC-16 of its name (``ucs_crc16_string``)."""
    crc = 0xFFFF
    for byte in name.encode():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x8408 if crc & 1 else 0)
    return crc ^ 0xFFFF


#: Transports over network adapters, and how long an interface address is at least.
_NETWORK_ADAPTERS = {
    "rc_verbs": 0,
    "rc_mlx5": 1,
    "rc_gda": 1,
    "dc_mlx5": 5,
    "ud_verbs": 3,
    "ud_mlx5": 3,
    "gga_mlx5": 1,
    "srd": 3,
}
#: Transports to device memory, and how long a device address and an interface address are at least.
_ACCELERATORS = {
    "cuda_copy": (0, 8),
    "cuda_ipc": (8, 4),
    "gdr_copy": (0, 8),
    "rocm_copy": (0, 8),
    "rocm_gdr": (0, 8),
    "rocm_ipc": (8, 4),
    "ze_copy": (0, 8),
    "gaudi_gdr": (0, 0),
}
_NAMES = {
    transport_checksum(name): name
    for name in (
        *("tcp", "self", "sysv", "posix", "cma", "xpmem", "knem"),
        *_NETWORK_ADAPTERS,
        *_ACCELERATORS,
        *("ugni_rdma", "ugni_smsg", "ugni_udt"),
    )
}


@attrs.frozen
class Transport:
    """A transport by which a worker can be reached.

    Args:
        checksum: which transport, as `transport_checksum` of its name.
        name: its name, or None if the checksum is that of no transport that we know.
        interface_address: what it needs to know besides the device address.
    """

    checksum: int
    name: str | None
    interface_address: bytes


@attrs.frozen
class Device:
    """A device of a worker, and the transports over it.

    Args:
        md_index: the memory domain of the device, an index in the worker's own list.
        address: the device address. All transports of the device share it.
        transports: at least one.
        paths: how many paths lead to the device.
        system_device: the device's index in its host's topology, or None.
        place: its position in the address.
    """

    md_index: int
    address: bytes
    transports: tuple[Transport, ...]
    paths: int = 1
    system_device: int | None = None
    place: slice = attrs.field(default=slice(0), eq=False, repr=False)


@attrs.frozen
class ParsedAddress:
    """What a worker address says.

    Args:
        version: of the format, 1 or 2.
        uid: the worker's id, 64 bits.
        devices: at least one.
        client_id: what the worker's program has chosen, or None.
        name: host name and pid, or None. Only programs with ``UCX_ADDRESS_DEBUG_INFO=y`` send it.
        release: the minor version of the worker's UCX modulo 16, or None.
        am_only: the address has only what active messages need.
    """

    version: int
    uid: int
    devices: tuple[Device, ...]
    client_id: int | None = None
    name: str | None = None
    release: int | None = None
    am_only: bool = False

    @property
    def transports(self) -> set[str | None]:
        return {transport.name for device in self.devices for transport in device.transports}

    @property
    def shared_memory(self) -> frozenset[str]:
        """The kinds of shared memory among its transports."""
        return frozenset(name for name in SHARED_MEMORY if name in self.transports)

    @property
    def tcp_addresses(self) -> tuple[tuple[str, int], ...]:
        """IP addresses and ports to which transport tcp connects. A loopback device says only that it is one."""
        return tuple(
            (_tcp_host(device.address), int.from_bytes(transport.interface_address, "big"))
            for device in self.devices
            for transport in device.transports
            if transport.name == "tcp"
        )


def parse_worker_address(blob: bytes) -> ParsedAddress:
    """Parses what ``ucp_worker_get_address`` has returned to some program.

    Every address of a worker of UCX 1.13 to 1.22 on a little-endian host is accepted, unless the worker is in unified
    mode or the address names no device. Whatever is accepted has the right structure, lengths and value ranges.

    An accepted address can still lie. Over shared memory (sysv, posix, xpmem) a wrong segment id makes UCX write to a
    segment of another program, or ends the process with SIGBUS or SIGSEGV where that segment is too small. Trust such
    an address only as far as its sender may use this host.

    An accepted address also costs something: a worker has 255 endpoint configurations in its life (64 in UCX 1.13), and
    each new combination of memory domains, system devices, segment sizes and release can take one. Limit how many
    different addresses one untrusted peer may send.

    Args:
        blob: the address; nothing may precede or follow it.

    Raises:
        ValueError: UCX could not read it safely, with what is wrong where.
    """
    reader = _Reader(blob)
    version, release, flags = _parse_header(reader)
    if flags & ~_KNOWN_FLAGS:
        raise reader.error(f"its header has unknown flags {flags & ~_KNOWN_FLAGS:#x}")
    if not flags & _FLAG_UUID:
        raise reader.error("it has no worker uid")
    uid = reader.integer(8, "the worker uid")
    client_id = reader.integer(8, "the client id") if flags & _FLAG_CLIENT_ID else None
    name = _parse_name(reader) if flags & _FLAG_NAME else None
    if reader.peek("the first device") == _EMPTY_ADDRESS:
        raise reader.error("it names no device, so nothing can be reached through it")

    raw_devices: list[Device] = []
    transports = 0
    last = False
    while not last:
        if version == 1 and raw_devices and reader.peek("a memory domain") & _NO_TRANSPORTS:
            release = _parse_release(reader)
            break
        device, last = _parse_device(reader, version)
        raw_devices.append(device)
        transports += len(device.transports)
        if transports > _MAX_RESOURCES:
            raise reader.error(f"it has more than {_MAX_RESOURCES} transports")
    if reader.left:
        raise reader.error(f"{reader.left} bytes follow its last device")

    legacy = version == 1 and release in _LEGACY_RELEASES
    devices = tuple(_check_device(device, legacy) for device in raw_devices)
    return ParsedAddress(version, uid, devices, client_id, name, release, bool(flags & _FLAG_AM_ONLY))


def with_uid(blob: bytes, uid: int) -> bytes:
    """The same address with another uid.

    Args:
        blob: an address that :func:`parse_worker_address` accepts.
    """
    start = 1 if blob[0] & 0x0F == 0 else 2  # behind the header of version 1 or 2
    return blob[:start] + uid.to_bytes(8, "little") + blob[start + 8 :]


class _Reader:
    """Reads fields one after another, and never past the end."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._at = 0

    @property
    def at(self) -> int:
        return self._at

    @property
    def left(self) -> int:
        return len(self._blob) - self._at

    def error(self, problem: str) -> ValueError:
        return ValueError(f"this is no UCX worker address that can be used: {problem} (at byte {self._at})")

    def take(self, length: int, what: str) -> bytes:
        if length > self.left:
            raise self.error(f"{what} needs {length} bytes, and {self.left} are left")
        start, self._at = self._at, self._at + length
        return self._blob[start : self._at]

    def integer(self, length: int, what: str) -> int:
        return int.from_bytes(self.take(length, what), "little")

    def peek(self, what: str) -> int:
        if not self.left:
            raise self.error(f"it ends where {what} is expected")
        return self._blob[self._at]

    def extended(self, first: int, mask: int, version: int, what: str) -> int:
        """A value whose first byte has been read. In version 2 the largest one means that the next byte has it."""
        value = first & mask
        if version == 1 or value < mask:
            return value
        value = self.integer(1, what)
        if value < mask:
            raise self.error(f"{what}, {value}, is extended by a byte that it does not need")
        return value


def _parse_header(reader: _Reader) -> tuple[int, int | None, int]:
    """Version, release and flags."""
    first = reader.integer(1, "the header")
    version = (first & 0x0F) + 1
    if version == 1:
        return version, None, first >> 4
    if version == 2:
        return version, first >> 4, reader.integer(1, "the header's second byte")
    raise reader.error(f"its format has version {version}, and only versions 1 and 2 are known")


def _parse_name(reader: _Reader) -> str:
    length = reader.integer(1, "the length of the worker's name")
    if length > _MAX_NAME:
        raise reader.error(f"the worker's name has {length} bytes, more than {_MAX_NAME}")
    name = reader.take(length, "the worker's name").decode(errors="replace")
    if name != printable(name):  # UCX writes it to its log
        raise reader.error("the worker's name has unprintable characters")
    return name


def _parse_release(reader: _Reader) -> int:
    """The release at the end of version 1."""
    domain, length = reader.take(2, "the release")
    if domain & ~(_NO_TRANSPORTS | _RELEASE_MASK) or length != LAST:
        raise reader.error("a device without transports is not the one with the release at the end")
    return domain & _RELEASE_MASK


def _parse_device(reader: _Reader, version: int) -> tuple[Device, bool]:
    """A device and whether it is the last one. Its memory domain may have legacy bits; its addresses are unchecked."""
    start = reader.at
    first = reader.integer(1, "a memory domain")
    if first & _NO_TRANSPORTS:
        raise reader.error("a device has no transports")
    domain = reader.extended(first, _MEMORY_DOMAIN_MASK, version, "a memory domain")
    flags = reader.integer(1, "the length of a device address")
    length = reader.extended(flags, _DEVICE_LENGTH_MASK, version, "the length of a device address")
    paths = 1
    if flags & _HAS_PATHS:
        paths = reader.integer(1, "a number of paths")
        if paths < 2:
            raise reader.error(f"a device has {paths} paths, which is never written so")
    system_device = None
    if flags & _HAS_SYSTEM_DEVICE:
        system_device = reader.integer(1, "a system device")
        if system_device == 0xFF:
            raise reader.error("a device has an unknown system device, which is never written so")
    address = reader.take(length, "a device address")
    transports: list[Transport] = []
    last = False
    while not last:
        transport, last = _parse_transport(reader, version)
        transports.append(transport)
        if len(transports) > _MAX_RESOURCES:
            raise reader.error(f"a device has more than {_MAX_RESOURCES} transports")
    place = slice(start, reader.at)
    return Device(domain, address, tuple(transports), paths, system_device, place), bool(flags & LAST)


def _parse_transport(reader: _Reader, version: int) -> tuple[Transport, bool]:
    """A transport and whether it is the last one of its device. Its address is unchecked."""
    checksum = reader.integer(2, "a transport's checksum")
    name = _NAMES.get(checksum)
    _check_attributes(reader, version, _describe(name, checksum))
    flags = reader.integer(1, "the length of an interface address")
    if flags & _HAS_ENDPOINT_ADDRESS:
        raise reader.error(f"{_describe(name, checksum)} has an endpoint address, which no worker address has")
    length = reader.extended(flags, _INTERFACE_LENGTH_MASK, version, "the length of an interface address")
    address = reader.take(length, "an interface address")
    return Transport(checksum, name, address), bool(flags & LAST)


def _describe(name: str | None, checksum: int) -> str:
    return f"transport {name}" if name else f"the transport with checksum {checksum:#06x}"


def _check_attributes(reader: _Reader, version: int, who: str) -> None:
    """Checks the performance numbers. UCX computes scores of them, and asserts that equal ones are equal."""
    if version == 1:
        overhead, bandwidth, latency, capabilities = _ATTRIBUTES_1.unpack(
            reader.take(_ATTRIBUTES_1.size, "a list of capabilities")
        )
        for value, what in (overhead, "an overhead"), (latency, "a latency"):
            # Written so that NaN is refused.
            if not (value == 0 or _MIN_SECONDS <= value <= _MAX_SECONDS):
                raise reader.error(f"{who} claims {what} of {value} s")
        if not _MIN_BANDWIDTH <= bandwidth <= _MAX_BANDWIDTH:
            raise reader.error(f"{who} claims a bandwidth of {bandwidth} bytes/s")
        unknown = capabilities & ~_CAPABILITIES_1
    else:
        overhead, bandwidth, latency, _, segment, capabilities = _ATTRIBUTES_2.unpack(
            reader.take(_ATTRIBUTES_2.size, "a list of capabilities")
        )
        for value, what in (overhead, "an overhead"), (latency, "a latency"), (bandwidth, "a bandwidth"):
            exponent = value & 0x0F
            zero_allowed = what != "a bandwidth" and value == 0
            if exponent > _MAX_FP8_EXPONENT or (exponent == 0 and not zero_allowed):
                raise reader.error(f"{who} claims {what} of {value:#04x}, which is no number in its range")
        if capabilities & _AM_CAPABILITY_2 and segment * _SEGMENT_UNIT < _MIN_SEGMENT:
            raise reader.error(f"{who} claims a segment size of {segment * _SEGMENT_UNIT} bytes")
        unknown = capabilities & ~_CAPABILITIES_2
    if unknown:
        raise reader.error(f"{who} has unknown capabilities {unknown:#x}")


def _check_device(device: Device, legacy: bool) -> Device:
    """Checks the addresses of a device and its transports, and brings its memory domain into the range of today."""
    domain = device.md_index & _LEGACY_DOMAIN_MASK if legacy else device.md_index
    if domain >= _MAX_MEMORY_DOMAINS:
        raise _unusable(f"memory domain {domain} is out of range: UCX has at most {_MAX_MEMORY_DOMAINS}")
    for transport in device.transports:
        check = _CHECKS.get(transport.name or "")
        if check is not None:
            check(device.address, transport.interface_address, transport.name or "")
    return attrs.evolve(device, md_index=domain)


def _unusable(problem: str) -> ValueError:
    return ValueError(f"this is no UCX worker address that can be used: {problem}")


def _check_tcp(device: bytes, interface: bytes, who: str) -> None:
    """``uct_tcp_device_addr_t``: flags, family, then an IP address or, for loopback, host id and network namespace."""
    if len(interface) != 2:
        raise _unusable(f"transport {who} has an interface address of {len(interface)} bytes, not a port")
    if interface == bytes(2):
        raise _unusable(f"transport {who} has port 0")
    if len(device) < 2:
        raise _unusable(f"transport {who} has a device address of {len(device)} bytes, too short for a family")
    flags, family, content = device[0], device[1], device[2:]
    if flags & ~(_TCP_LOOPBACK | _TCP_ALLOW_GATEWAY):
        raise _unusable(f"transport {who} has a device address with unknown flags {flags:#04x}")
    if family not in (_AF_INET, _AF_INET6):
        raise _unusable(f"transport {who} has address family {family}, which is neither IPv4 nor IPv6")
    if flags & _TCP_LOOPBACK:
        if len(content) not in _HOST_ID_AND_NAMESPACE:
            raise _unusable(f"transport {who} has a loopback device address of {len(device)} bytes")
        return
    if len(content) != (4 if family == _AF_INET else 16):
        raise _unusable(f"transport {who} has an IP address of {len(content)} bytes for family {family}")
    ip = ipaddress.ip_address(content)
    nowhere = ip.is_unspecified or ip.is_multicast or (ip.version == 4 and ip.is_reserved)
    if nowhere or (ip.version == 6 and ip.ipv4_mapped is not None):
        raise _unusable(f"transport {who} has IP address {ip}, at which no worker listens")


def _tcp_host(device: bytes) -> str:
    if device[0] & _TCP_LOOPBACK:
        return "127.0.0.1" if device[1] == _AF_INET else "::1"
    return str(ipaddress.ip_address(device[2:]))


def _check_host(device: bytes, who: str) -> None:
    """``uct_iface_local_addr_ns_t``: the host's id, then, with its flag only, the IPC namespace."""
    has_namespace = len(device) >= _HOST_ID and bool(int.from_bytes(device[:8], "little") & _NAMESPACE_FLAG)
    if len(device) not in (_HOST_ID_AND_NAMESPACE if has_namespace else (_HOST_ID,)):
        expected = "with a namespace" if has_namespace else "without a namespace"
        raise _unusable(f"transport {who} has a device address of {len(device)} bytes {expected}")


def _check_sysv(device: bytes, interface: bytes, who: str) -> None:
    """The id of a System V segment, a C int in 8 bytes."""
    _check_host(device, who)
    if len(interface) != 8:
        raise _unusable(f"transport {who} has an interface address of {len(interface)} bytes, not 8")
    segment = int.from_bytes(interface, "little")
    if segment >= 1 << 31:
        raise _unusable(f"transport {who} has segment id {segment:#x}, which is no id of System V shared memory")


def _check_posix(device: bytes, interface: bytes, who: str) -> None:
    """Flags and id of a segment, then its namespace, or its directory as C string, or nothing."""
    _check_host(device, who)
    if len(interface) < 8:
        raise _unusable(f"transport {who} has an interface address of {len(interface)} bytes, less than 8")
    segment, rest = int.from_bytes(interface[:8], "little"), interface[8:]
    identifier = segment & _POSIX_ID_MASK
    if segment & _POSIX_PROC_LINK:
        # /proc/<pid>/fd/<descriptor>
        if not identifier & _POSIX_PID_MASK:
            raise _unusable(f"transport {who} has a segment of process 0")
        if len(rest) not in ((4, 8) if segment & _POSIX_PID_NAMESPACE else (0,)):
            raise _unusable(f"transport {who} has {len(rest)} bytes where a pid namespace, or nothing, is expected")
        return
    if segment & _POSIX_PID_NAMESPACE:
        raise _unusable(f"transport {who} has a pid namespace for a segment that is no /proc link")
    if identifier >= 1 << 31:
        raise _unusable(f"transport {who} has segment number {identifier:#x}, which UCX never chooses")
    if segment & _POSIX_SHM_OPEN:
        if rest:
            raise _unusable(f"transport {who} has {len(rest)} bytes after a segment that needs nothing more")
    elif not rest.startswith(b"/") or rest.find(b"\0") != len(rest) - 1:
        raise _unusable(f"transport {who} has no absolute directory as C string after its segment")


def _check_cma(device: bytes, interface: bytes, who: str) -> None:
    """A pid and, with its flag only, a pid namespace."""
    _check_host(device, who)
    pid = int.from_bytes(interface[:4], "little")
    if len(interface) not in ((8, 16) if pid & _CMA_NAMESPACE_FLAG else (4,)):
        raise _unusable(f"transport {who} has an interface address of {len(interface)} bytes")
    if not pid & ~_CMA_NAMESPACE_FLAG:
        raise _unusable(f"transport {who} has process 0")


def _check_xpmem(device: bytes, interface: bytes, who: str) -> None:
    """The address of a segment and the id of an XPMEM segment around it."""
    _check_host(device, who)
    if len(interface) != 16:
        raise _unusable(f"transport {who} has an interface address of {len(interface)} bytes, not 16")


def _check_knem(device: bytes, interface: bytes, who: str) -> None:
    _check_host(device, who)
    if interface:
        raise _unusable(f"transport {who} has an interface address of {len(interface)} bytes, not none")


def _check_self(device: bytes, interface: bytes, who: str) -> None:
    """The interface's id, 8 bytes."""
    if device or len(interface) != 8:
        raise _unusable(f"transport {who} has addresses of {len(device)} and {len(interface)} bytes, not 0 and 8")


def _check_adapter(device: bytes, interface: bytes, who: str) -> None:
    """``uct_ib_address_t``: flags that say which fields follow. Only lengths are checked."""
    _check_lengths(device, interface, who, (1, _NETWORK_ADAPTERS[who]))
    flags = device[0]
    if flags & _IB_ETHERNET:
        needed = 16
    else:
        needed = 2 + (8 if flags & _IB_INTERFACE_ID else 0)
        if flags & _IB_SUBNET_16 and flags & _IB_SUBNET_64:
            raise _unusable(f"transport {who} has a device address with two subnet prefixes")
        needed += 2 if flags & _IB_SUBNET_16 else 8 if flags & _IB_SUBNET_64 else 0
    needed += (1 if flags & _IB_PATH_MTU else 0) + (1 if flags & _IB_GID_INDEX else 0) + (2 if flags & _IB_PKEY else 0)
    _check_lengths(device, interface, who, (1 + needed, 0))


def _check_accelerator(device: bytes, interface: bytes, who: str) -> None:
    _check_lengths(device, interface, who, _ACCELERATORS[who])


def _check_lengths(device: bytes, interface: bytes, who: str, least: tuple[int, int]) -> None:
    """Checks that UCX can read the fixed parts of both addresses."""
    if len(device) < least[0] or len(interface) < least[1]:
        raise _unusable(
            f"transport {who} has addresses of {len(device)} and {len(interface)} bytes, less than {least[0]} and "
            f"{least[1]}"
        )


_CHECKS: dict[str, Callable[[bytes, bytes, str], None]] = {
    "tcp": _check_tcp,
    "sysv": _check_sysv,
    "posix": _check_posix,
    "cma": _check_cma,
    "xpmem": _check_xpmem,
    "knem": _check_knem,
    "self": _check_self,
    **dict.fromkeys(_NETWORK_ADAPTERS, _check_adapter),
    **dict.fromkeys(_ACCELERATORS, _check_accelerator),
}
