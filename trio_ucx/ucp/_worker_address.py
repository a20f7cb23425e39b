"""The address of a worker: everything that identifies it to a peer, as one record in one format.

A program passes it to its peers by its own means. The sides of a Connection send it in their peer descriptions.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any

import attrs

from .._util.fields import Field, Layout
from .._util.process import MAX_PID, NOBODY, Host, Process
from ._features import Feature
from ._keys import KEY_SIZE
from ._quirks.address_layout import AUXILIARY, SHARED_MEMORY, check_version, read_uid
from ._quirks.option_limits import AGREED, Sizes

#: The shortest of UCX's addresses, which has a header and the uid, and the longest.
MIN_ADDRESS, MAX_ADDRESS = 10, 48_000
#: The greatest number of TCP addresses: UCX's limit for the transports of a worker.
MAX_TCP_ADDRESSES = 128

#: Bytes of the keys in a public address: the one that opens the worker's data ports, and the one that they answer with.
KEYS_SIZE = 2 * KEY_SIZE

#: UCX's two addresses, the TCP addresses and the keys follow these fields.
LAYOUT = Layout(
    "this worker address",
    Field("the boot id", "16s"),
    Field("the PID namespace", "Q"),
    Field("the process id", "I", 0, MAX_PID),
    Field("the start time", "Q"),
    Field("the user", "I"),
    Field("the IPC namespace", "Q"),
    Field("the network namespace", "Q"),
    Field("the worker's uid", "Q"),
    Field("the folder of its wake-up sockets", "16s"),
    Field("UCX's major version", "B"),
    Field("UCX's minor version", "B"),
    Field("error handling", "B", 0, 1),
    Field("the kinds of shared memory", "B", 0, 2 ** len(SHARED_MEMORY) - 1),
    Field("the auxiliary transports", "B", 0, 2 ** len(AUXILIARY) - 1),
    Field("the features", "I"),
    *(Field(f"UCX's option {option}", "I") for option in AGREED),
    Field("the length of UCX's address", "I", MIN_ADDRESS, MAX_ADDRESS),
    Field("the length of UCX's network address", "I", 0, MAX_ADDRESS),
    Field("the number of TCP addresses", "B", 0, MAX_TCP_ADDRESSES),
    Field("the length of its keys", "B", 0, KEYS_SIZE),
)
#: Results for so many addresses are kept.
_KEPT = 16
#: An IPv6 address, or an IPv4 address in one (``::ffff:0:0/96``); and a port.
_TCP_ADDRESS = struct.Struct("<16sH")
#: The end, in every version: magic, version, and a checksum of everything before. UCX would crash on damaged bytes, so
#: the checksum is compared first.
_END, _CHECKSUM = struct.Struct("<4sB"), struct.Struct("<I")
_MAGIC, VERSION = b"TUWA", 2


@attrs.frozen(repr=False, init=False)
class WorkerAddress:
    """Where a worker can be reached: opaque bytes, to be given to a peer by whatever means there are.

    ``bytes(address)`` serialises it, ``WorkerAddress(data)`` brings it back. Addresses compare and hash by value.

    Args:
        data: what ``bytes(address)`` gave.

    Raises:
        TypeError: ``data`` is not bytes.
        ValueError: ``data`` is damaged, of another version, or something else. (UCX itself would crash.)
    """

    #: UCX's address, with all transports.
    ucx: bytes
    host: Host
    #: The number by which UCX knows the worker, 64 bits (``ucp_worker_address_query``); 0 in an address that does not
    #: say. All addresses of one worker have it.
    uid: int
    #: A flag: endpoints with error handling can reach the worker over shared memory.
    shared_memory: bool
    #: What the worker's context was opened with; ``Feature.ALL`` if not known.
    features: Feature
    # The rest is known only of workers of trio_ucx.
    #: Its release of UCX, the first two numbers.
    release: tuple[int, int] = (0, 0)
    #: Its wake-up folder (``_quirks/wake_sockets.py``); zeros if it has none.
    wake_folder: bytes = bytes(16)
    #: UCX's address without shared memory; empty if it has no other transport.
    network: bytes = b""
    #: The kinds of shared memory in UCX's address.
    shared_memory_kinds: frozenset[str] = frozenset()
    #: The transports in UCX's address that serve only to connect others, as UD does with ``TLS=rc``.
    auxiliary: frozenset[str] = frozenset()
    #: The sizes of its segments and queues, which must be the same here.
    sizes: Sizes = ()
    #: Where its TCP transport listens.
    tcp_addresses: tuple[tuple[str, int], ...] = ()
    #: With these its holder can connect over TCP (``_quirks/key_gate.py``); empty in what Connections exchange.
    keys: bytes = b""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"a worker address is made from bytes, not {type(data).__name__}")
        self.__attrs_init__(**_decode(bytes(data)))

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
            ValueError: no address of UCX's has this length, or the version of its format is not known.
        """
        if not isinstance(blob, (bytes, bytearray, memoryview)):
            raise TypeError(f"an address of UCX's is bytes, not {type(blob).__name__}")
        if not isinstance(features, Feature):
            raise TypeError(f"features must be a Feature, not {features!r}")
        if not MIN_ADDRESS <= len(blob) <= MAX_ADDRESS:
            raise ValueError(f"an address of UCX's has {MIN_ADDRESS} to {MAX_ADDRESS} bytes, not {len(blob)}")
        check_version(blob)
        return cls._create(
            ucx=bytes(blob),
            host=Host(process),
            uid=read_uid(bytes(blob)),
            shared_memory=bool(shared_memory),
            features=features,
        )

    @classmethod
    def _create(cls, **fields: Any) -> WorkerAddress:
        address = cls.__new__(cls)
        address.__attrs_init__(**fields)
        return address

    def _changed(self, **fields: Any) -> WorkerAddress:
        return self._create(**{**attrs.asdict(self, recurse=False), **fields})

    def _without_shared_memory(self) -> WorkerAddress:
        return _without_shared_memory(self)

    @property
    def process(self) -> Process:
        """The process of the worker; its ``pid`` is 0 if it is not known."""
        return self.host.process

    @property
    def network_namespace(self) -> int:
        """The inode number of its process's network namespace; 0 if not known."""
        return self.host.network_namespace

    @property
    def _is_described(self) -> bool:
        """True if the worker has described itself, as those of trio_ucx do."""
        return self.release != (0, 0)

    @property
    def _tcp_hosts(self) -> list[str]:
        """The IP addresses at which its TCP transport listens."""
        return [host for host, _ in self.tcp_addresses]

    def __hash__(self) -> int:
        return hash(self.ucx)  # which is fast, and all but unique

    def __bytes__(self) -> bytes:
        return _encode(self)

    def __repr__(self) -> str:
        return f"<WorkerAddress {len(self.ucx)} bytes, {zlib.crc32(self.ucx):08x}>"


# Workers connect again and again: what was computed for one of the last few connections is not computed again.


@lru_cache(maxsize=_KEPT)
def _without_shared_memory(address: WorkerAddress) -> WorkerAddress:
    return address._changed(ucx=address.network, shared_memory_kinds=frozenset())


@lru_cache(maxsize=_KEPT)
def _encode(address: WorkerAddress) -> bytes:
    process, *host = attrs.astuple(address.host, recurse=False)
    body = (
        LAYOUT.pack(
            *attrs.astuple(process),
            *host,
            address.uid,
            address.wake_folder,
            *address.release,
            address.shared_memory,
            _bits(SHARED_MEMORY, address.shared_memory_kinds),
            _bits(AUXILIARY, address.auxiliary),
            address.features,
            *(address.sizes or [0] * len(AGREED)),
            len(address.ucx),
            len(address.network),
            len(address.tcp_addresses),
            len(address.keys),
        )
        + address.ucx
        + address.network
        + b"".join(_encode_tcp_address(ip, port) for ip, port in address.tcp_addresses)
        + address.keys
        + _END.pack(_MAGIC, VERSION)
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


@lru_cache(maxsize=_KEPT)
def decode_worker_address(data: bytes) -> WorkerAddress:
    """Returns ``WorkerAddress(data)``, faster for data that it has had before."""
    return WorkerAddress(data)


def _decode(data: bytes) -> dict[str, Any]:
    """The attributes of a :class:`WorkerAddress`.

    Raises:
        ValueError: see there.
    """
    rest, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    body, end = rest[: -_END.size], rest[-_END.size :]
    magic, version = _END.unpack(end) if len(end) == _END.size else (b"", 0)
    if magic != _MAGIC or checksum != _CHECKSUM.pack(zlib.crc32(rest)):
        raise ValueError(
            f"these {len(data)} bytes are no worker address, or damaged on the way; for the address of a UCP "
            "program without trio_ucx use WorkerAddress.from_ucx"
        )
    if version != VERSION:
        raise ValueError(
            f"a worker address of version {version}: this trio_ucx speaks version {VERSION}; use one release of "
            "trio_ucx on both sides"
        )
    *values, ucx_length, network_length, tcp_count, keys_length = LAYOUT.unpack(body)
    numbers, sizes = values[: -len(AGREED)], tuple(values[-len(AGREED) :])
    host, (uid, wake_folder, major, minor, shared_memory, kinds, auxiliary, features) = numbers[:-8], numbers[-8:]
    *process, user, ipc_namespace, network_namespace = host
    network_at = LAYOUT.size + ucx_length
    tcp_at = network_at + network_length
    keys_at = tcp_at + tcp_count * _TCP_ADDRESS.size
    if len(body) != keys_at + keys_length or keys_length not in (0, KEYS_SIZE):
        raise ValueError(f"{LAYOUT.what} is damaged: its length does not match its fields")
    return {
        "ucx": body[LAYOUT.size : network_at],
        "network": body[network_at:tcp_at],
        "host": Host(Process(*process), user, ipc_namespace, network_namespace),
        "uid": uid,
        "wake_folder": wake_folder,
        "release": (major, minor),
        "shared_memory": bool(shared_memory),
        "shared_memory_kinds": _named(SHARED_MEMORY, kinds),
        "auxiliary": _named(AUXILIARY, auxiliary),
        "features": Feature(features),
        "sizes": sizes if (major, minor) != (0, 0) else (),
        "tcp_addresses": tuple(
            _decode_tcp_address(ip, port) for ip, port in _TCP_ADDRESS.iter_unpack(body[tcp_at:keys_at])
        ),
        "keys": body[keys_at:],
    }


def _bits(names: tuple[str, ...], chosen: frozenset[str]) -> int:
    return sum(1 << bit for bit, name in enumerate(names) if name in chosen)


def _named(names: tuple[str, ...], bits: int) -> frozenset[str]:
    return frozenset(name for bit, name in enumerate(names) if bits & 1 << bit)


def _encode_tcp_address(ip: str, port: int) -> bytes:
    packed = ip_address(ip).packed
    return _TCP_ADDRESS.pack(packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed, port)


def _decode_tcp_address(packed: bytes, port: int) -> tuple[str, int]:
    ip = IPv6Address(packed)
    return str(ip.ipv4_mapped or ip), port
