"""Addresses: of workers (opaque bytes made by UCX) and of sockets (host and port)."""

from __future__ import annotations

import ipaddress
import socket
import struct
import zlib
from typing import Any

import attrs
import trio

from .._native import ffi, lib
from ._features import Feature
from ._process import NOBODY, Process, check_process, this_host
from ._quirks.option_limits import DEFAULT_SIZES, Sizes
from ._status import read_sized
from ._util import check_integer

#: After UCX's bytes: the process (host, PID namespace, pid, start time), its network namespace, flags, the features of
#: the worker's context, and its sizes of segments and queues. By version; earlier ones had less.
_LAYOUTS = {
    version: struct.Struct(fields)
    for version, fields in ((5, "<16sQIQQB"), (6, "<16sQIQQBI"), (7, f"<16sQIQQBI{len(DEFAULT_SIZES)}I"))
}
#: The end, in every version: magic, the version of the facts, and a checksum of everything before. UCX would crash on
#: damaged bytes, so the checksum is compared first.
_END = struct.Struct("<4sBI")
#: Earlier versions had other magic bytes.
_MAGIC, _VERSION = b"TUWA", 7
_CHECKSUM = struct.Struct("<I")
_SHARED_MEMORY = 1

#: A socket address as people write it.
SocketAddress = str | tuple[str, int]


@attrs.frozen(repr=False, init=False)
class WorkerAddress:
    """Where a worker can be reached: opaque bytes, to be given to a peer by whatever means there are.

    ``bytes(address)`` serialises it, ``WorkerAddress(data)`` brings it back. Addresses compare and hash by value.

    Args:
        data: what ``bytes(address)`` gave.

    Raises:
        ValueError: ``data`` is damaged, of another version, or something else. (UCX itself would crash.)
    """

    ucx: bytes
    process: Process
    #: Of that process, see :class:`Host`; 0 if not known.
    network_namespace: int
    #: A flag: endpoints with error handling can reach the worker over shared memory.
    shared_memory: bool
    #: What the worker's context was opened with; ``Feature.ALL`` if not known.
    features: Feature
    #: The sizes of its segments and queues, which must be the same here; () if not known.
    sizes: Sizes

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"a worker address is made from bytes, not {type(data).__name__}")
        data = bytes(data)
        body, end = data[: -_END.size], data[-_END.size :]
        magic, version, checksum = _END.unpack(end) if len(end) == _END.size else (b"", 0, 0)
        if magic != _MAGIC or checksum != zlib.crc32(data[: -_CHECKSUM.size]):
            raise ValueError(
                f"these {len(data)} bytes are no worker address, or damaged on the way; for the address of a UCP "
                "program without trio_ucx use WorkerAddress.from_ucx"
            )
        layout = _LAYOUTS.get(version)
        if layout is None:
            raise ValueError(
                f"a worker address of version {version}: this trio_ucx speaks versions 5 to {_VERSION}; use one "
                "release of trio_ucx on both sides"
            )
        blob, facts = body[: -layout.size], body[-layout.size :]
        if not blob:
            raise ValueError("this worker address is too short for its fields")
        host, namespace, pid, start, network_namespace, flags, *more = layout.unpack(facts)
        self.__attrs_init__(
            blob,
            check_process(host, namespace, pid, start),
            network_namespace,
            bool(flags & _SHARED_MEMORY),
            Feature(more[0]) if more else Feature.ALL,
            tuple(more[1:]),
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> WorkerAddress:
        """Does the same as ``WorkerAddress(data)``.

        Raises:
            TypeError: ``data`` is not bytes.
            ValueError: ``data`` is damaged, of another version, or something else. (UCX itself would crash.)
        """
        return cls(data)

    @classmethod
    def from_ucx(
        cls,
        blob: bytes,
        *,
        process: Process = NOBODY,
        shared_memory: bool = False,
        features: Feature = Feature.ALL,
    ) -> WorkerAddress:
        """Makes an address from the bytes that ``ucp_worker_get_address`` gives any UCP program.

        UCX does not check them: damaged bytes crash the process. They do not say in which network namespace the program
        runs: if it is another one of this machine, shared memory must be left out by the option TLS.

        Args:
            blob: those bytes.
            process: the process of the worker, where that is known.
            shared_memory: whether the program runs with UCX's option MM_ERROR_HANDLING=y, as trio_ucx does. Without it,
                which is UCX's default, it cannot answer an endpoint with error handling over shared memory, and
                messages would hang: such an endpoint then leaves shared memory out.
            features: what the worker's context was opened with, where that is known. Endpoints refuse operations
                that need other features, which the worker would never answer.

        Raises:
            TypeError: ``blob`` is not bytes; ``features`` is no :class:`Feature`.
        """
        if not isinstance(blob, (bytes, bytearray, memoryview)):
            raise TypeError(f"an address of UCX's is bytes, not {type(blob).__name__}")
        if not isinstance(features, Feature):
            raise TypeError(f"features must be a Feature, not {features!r}")
        return cls._create(bytes(blob), process, 0, bool(shared_memory), features)

    @classmethod
    def _create(
        cls,
        ucx: bytes,
        process: Process,
        network_namespace: int,
        shared_memory: bool,
        features: Feature,
        sizes: Sizes = (),
    ) -> WorkerAddress:
        address = cls.__new__(cls)
        address.__attrs_init__(ucx, process, network_namespace, shared_memory, features, sizes)
        return address

    @property
    def uid(self) -> int:
        """The number by which UCX knows the worker, 64 bits (``ucp_worker_address_query``).

        All addresses of one worker have it; 0 in an address that does not say.
        """
        uid = ffi.new("uint64_t *")
        lib.tu_address_uid(ffi.from_buffer("char[]", self.ucx), uid)
        return int(uid[0])

    def __bytes__(self) -> bytes:
        flags = _SHARED_MEMORY if self.shared_memory else 0
        version = _VERSION if self.sizes else _VERSION - 1
        known = (*attrs.astuple(self.process), self.network_namespace, flags, self.features, *self.sizes)
        facts = _LAYOUTS[version].pack(*known)
        body = self.ucx + facts + _END.pack(_MAGIC, version, 0)[: -_CHECKSUM.size]
        return body + _CHECKSUM.pack(zlib.crc32(body))

    def __repr__(self) -> str:
        return f"<WorkerAddress {len(self.ucx)} bytes, {zlib.crc32(self.ucx):08x}>"


def worker_address(
    worker: Any, features: Feature, sizes: Sizes, *, shared_memory: bool, network_only: bool = False
) -> WorkerAddress:
    """The address of a local worker, by its native handle.

    Args:
        features, sizes: those of its context.
        shared_memory: whether it can be reached over shared memory with error handling.
        network_only: leave out shared memory (``UCP_WORKER_ADDRESS_FLAG_NET_ONLY``).
    """
    blob = read_sized(lambda *out: lib.tu_worker_address(worker, network_only, *out), "asking for the worker's address")
    host = this_host()
    return WorkerAddress._create(blob, host.process, host.network_namespace, shared_memory, features, sizes)


def in_another_network_namespace(address: WorkerAddress) -> bool:
    """Whether a worker is known to be on this machine in another network namespace: it cannot be woken there over
    shared memory, because UCX does that by abstract Unix sockets.
    """
    own = this_host()
    known = any(address.process.host) and address.network_namespace != 0 and own.network_namespace != 0
    return known and address.process.host == own.process.host and address.network_namespace != own.network_namespace


@attrs.frozen
class Resolved:
    """A numeric socket address, ready for UCX."""

    family: socket.AddressFamily
    ip: str
    port: int
    scope: int = 0

    def __str__(self) -> str:
        return format_address((self.ip, self.port))


def family_of(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def format_address(address: tuple[str, int]) -> str:
    host, port = address
    if host.startswith("unix:"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: SocketAddress, *, other: str = "a WorkerAddress") -> tuple[str, int]:
    """``"host:port"``, ``"[v6]:port"`` or ``(host, port)`` as ``(host, port)``.

    Args:
        other: what else the caller takes, for the message of an error.

    Raises:
        TypeError: something else.
        ValueError: no port, or one out of range.
    """
    if isinstance(address, (tuple, list)):
        if len(address) not in (2, 4):
            raise ValueError(f"an address is a pair (host, port), not {address!r}")
        host, port = address[0], address[1]
        if not isinstance(host, str):
            raise TypeError(f"the host must be a str, not {type(host).__name__}")
        return host, check_integer(port, "the port", 0, 65535)
    if not isinstance(address, str):
        raise TypeError(
            f"an address is 'host:port', '[v6]:port', (host, port) or {other}, not {type(address).__name__}"
        )
    host, colon, text = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"write an IPv6 address with brackets: [{address}]:port, or [{host}]:{text}")
    if not colon or not host or not text.isascii() or not text.isdecimal():
        raise ValueError(f"{address!r} is not an address: write 'host:port' or '[v6 address]:port'")
    return host, check_integer(int(text), "the port", 0, 65535)


def numeric(host: str, port: int) -> Resolved | None:
    """A numeric address, which needs no look-up, or None for a name."""
    ip, _, zone = host.partition("%")
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError:
        return None
    family = socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    return Resolved(family, str(parsed), port, socket.if_nametoindex(zone) if zone else 0)


async def resolve(host: str, port: int, family: int = 0) -> list[Resolved]:
    """Looks a host name up; numeric addresses need no look-up and no checkpoint.

    Raises:
        OSError: the name is unknown (``socket.gaierror``).
    """
    found = numeric(host, port)
    if found is not None:
        return [found]
    try:
        answers = await trio.socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise socket.gaierror(error.errno, f"{error.strerror}: {host!r}") from None
    resolved = []
    for kind, _, _, _, address in answers:
        if kind in (socket.AF_INET, socket.AF_INET6):
            scope = address[3] if len(address) == 4 else 0
            one = Resolved(socket.AddressFamily(kind), str(address[0]), port, int(scope))
            if one not in resolved:
                resolved.append(one)
    return resolved
