"""The parser of worker addresses accepts real ones of many UCX releases; UCX survives all that it accepts.

Run as a program, this file connects to addresses with hostile contents that the parser accepts: see `main`.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio
from samples import SAMPLES, sample

from trio_ucx import ucp
from trio_ucx.ucp._address_format import (
    PADDING,
    Device,
    ParsedAddress,
    Transport,
    parse_worker_address,
    transport_checksum,
)
from trio_ucx.ucp._network_part import without_shared_memory

#: The same with UCX_UNIFIED_MODE=y.
UNIFIED = {
    "1.13.1 tcp,self": (
        "2013e811c8c26b51ca200063758000000000fd045e115c3840ac21120102470bc88404be65acf9ffffef00000000cf1981d7e037"
        "378a1921860002c0000202cf1982d7e03737889f"
    ),
    "1.22.0 tcp,self": (
        "201ca38c9063e8c8fb00006375800000000039cc515f542c5a6101060002c0000202cf1981d7e0373795cd010e0102470bc88404"
        "be65acf9ffffefcf1982d7e03737bd858680"
    ),
    "1.22.0 tcp,sm,self v2": (
        "610248a43886f42f2b6a00006375800000000008449d3c4b72cd6c01060002c0000202cf1981d7e037379f45010e0102470bc884"
        "04be65acf9ffffefcf1982d7e03737e5090488470bc88404be652c478b8577ccab33d8360000"
    ),
    "1.22.0 self": "201a17fda806c9f572000063758000000000cfb4f51257a5b5b98680",
}
#: UCP_WORKER_ADDRESS_FLAG_NET_ONLY without a network: header, uid, no device.
EMPTY = "206e93ee993993be97ff"

HOST = bytes.fromhex("470bc88404be652c")
HOST_WITH_NAMESPACE = bytes.fromhex("470bc88404be65ac520100f0")
ETHERNET = bytes.fromhex("0002c0000202")  # 192.0.2.2
PORT = struct.pack(">H", 4000)


def attributes_of(
    version: int, overhead: float = 5e-5, bandwidth: float = 2e8, latency: float = 1e-5, capabilities: int = 0x231301
) -> bytes:
    """Performance and capabilities of a transport; those of version 2 are always the same."""
    if version == 2:
        return bytes.fromhex("0c015a0180008b00")
    return struct.pack("<fffI", overhead, bandwidth, latency, capabilities)


def pack(address: ParsedAddress, attributes: Callable[[int], bytes] = attributes_of) -> bytes:
    """The inverse of the parser, which also packs what the parser refuses."""
    version, flags = address.version, 2 | 8 * address.am_only
    flags |= (4 if address.client_id is not None else 0) | (1 if address.name is not None else 0)
    blob = bytearray([flags << 4] if version == 1 else [1 | (address.release or 0) << 4, flags])
    blob += address.uid.to_bytes(8, "little")
    if address.client_id is not None:
        blob += address.client_id.to_bytes(8, "little")
    if address.name is not None:
        blob += bytes([len(address.name)]) + address.name.encode()
    release = bytes([0x80 | address.release, 0x80]) if version == 1 and address.release is not None else b""
    for device in address.devices:
        blob += extended(device.md_index, 0x7F, 0, version)
        flags = (0x40 if device.paths != 1 else 0) | (0x20 if device.system_device is not None else 0)
        flags |= 0x80 if device is address.devices[-1] and not release else 0
        blob += extended(len(device.address), 0x1F, flags, version)
        blob += bytes([device.paths] if device.paths != 1 else [])
        blob += bytes([device.system_device] if device.system_device is not None else [])
        blob += device.address
        for number, transport in enumerate(device.transports, 1):
            blob += struct.pack("<H", transport.checksum) + attributes(version)
            flags = 0x80 if number == len(device.transports) else 0
            blob += extended(len(transport.interface_address), 0x3F, flags, version) + transport.interface_address
    return bytes(blob + release)


def extended(value: int, mask: int, flags: int, version: int) -> bytes:
    return bytes([mask | flags, value] if version == 2 and value >= mask else [value | flags])


def device(name: str, address: bytes, *interfaces: bytes, md_index: int = 0) -> Device:
    transports = tuple(Transport(transport_checksum(name), name, interface) for interface in interfaces)
    return Device(md_index, address, transports)


def address(*devices: Device, version: int = 1, release: int | None = 6) -> ParsedAddress:
    return ParsedAddress(version, 0x1234, devices, release=release)


TCP = device("tcp", ETHERNET, PORT)


@pytest.mark.parametrize("name", SAMPLES)
def test_addresses_of_all_releases(name: str) -> None:
    """Real addresses are accepted, and what is read of them is what is in them."""
    blob = sample(name)
    parsed = parse_worker_address(blob)
    assert parsed.version == (2 if "v2" in name else 1)
    assert parsed.uid == int.from_bytes(blob[parsed.version :][:8], "little")
    minor = int(name.split(".")[1])
    if minor >= 16:
        assert parsed.release == minor % 16
    known = {transport.name for device in parsed.devices for transport in device.transports}
    expected = {"sysv", "posix", "cma", "self"} if "sm,self" in name else set()
    assert known >= expected | ({"tcp"} if "tcp" in name else set())
    assert None not in known
    # All but the attributes, which are not kept.
    assert parse_worker_address(pack(parsed)) == parsed
    assert len(pack(parsed)) == len(blob)


@pytest.mark.parametrize("name", SAMPLES)
def test_without_shared_memory(name: str) -> None:
    """What is left is an address like those that UCX makes, of the same worker."""
    blob = sample(name)
    parsed = parse_worker_address(blob)
    rest = without_shared_memory(blob)
    local = {"sysv", "posix", "cma", "self"}
    kept = tuple(one for one in parsed.devices if not local & {each.name for each in one.transports})
    if not kept:
        assert rest is None
        return
    assert rest is not None
    assert parse_worker_address(rest) == attrs.evolve(parsed, devices=kept)
    assert (rest == blob) == (kept == parsed.devices)
    assert without_shared_memory(rest) == rest


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("release", [None, 6])
def test_without_shared_memory_whatever_is_last(version: int, release: int | None) -> None:
    if version == 2 and release is None:
        release = 0  # it always says one
    memory, other = device("sysv", HOST, bytes(8)), device("sysv", HOST, bytes(8))
    tcp = attrs.evolve(TCP, paths=2, system_device=3)
    for devices in ([tcp, memory], [memory, tcp], [memory, tcp, other], [tcp, TCP, memory], [TCP, memory, tcp]):
        rest = without_shared_memory(pack(address(*devices, version=version, release=release)))
        kept = [one for one in devices if one.transports[0].name == "tcp"]
        assert rest == pack(address(*kept, version=version, release=release))
    assert without_shared_memory(pack(address(memory, version=version, release=release))) is None


def test_without_shared_memory_refuses_what_the_parser_refuses() -> None:
    with pytest.raises(ValueError, match="no UCX worker address"):
        without_shared_memory(sample("1.22.0 tcp, with name")[:-1])


def test_tcp_addresses() -> None:
    assert parse_worker_address(sample("1.22.0 tcp, with name")).tcp_addresses == (
        ("192.0.2.2", 0x946F),
        ("127.0.0.1", 0xC9B1),
    )
    assert parse_worker_address(sample("1.22.0 tcp over IPv6")).tcp_addresses == (("fd00::2", 0xA3D1), ("::1", 0x8DDD))
    assert parse_worker_address(sample("1.16.0 sm,self v2")).tcp_addresses == ()


def test_fields() -> None:
    parsed = parse_worker_address(sample("1.22.0 tcp, with name"))
    assert parsed.name == "vm:13896" and parsed.client_id is None and not parsed.am_only
    [posix] = [one for one in parse_worker_address(sample("1.17.0 posix in a directory")).devices if one.address]
    assert posix.transports[0].interface_address.endswith(b"/tmp\0")
    # UCX 1.13 writes capability bits beside the memory domain; 1.19 and later do not.
    assert sample("1.13.1 tcp over IPv6")[9] == 0x20
    assert parse_worker_address(sample("1.13.1 tcp over IPv6")).devices[0].md_index == 0
    full = attrs.evolve(
        address(attrs.evolve(TCP, md_index=63, paths=255, system_device=254)),
        client_id=2**64 - 1,
        name="n" * 31,
        am_only=True,
    )
    assert parse_worker_address(pack(full)) == full
    unknown = Device(1, bytes(7), (Transport(0x1234, None, bytes(9)), Transport(0x4321, None, b"")))
    assert parse_worker_address(pack(address(TCP, unknown))).devices[1] == unknown
    long = address(Device(1, bytes(255), (Transport(0x1234, None, bytes(255)),)), version=2)
    assert parse_worker_address(pack(long)) == long


def test_checksums() -> None:
    assert transport_checksum("tcp") == 0x19CF
    assert transport_checksum("self") == 0x7563
    assert transport_checksum("") == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_cut_or_extended(name: str) -> None:
    blob = sample(name)
    for length in range(len(blob)):
        with pytest.raises(ValueError, match="no UCX worker address"):
            parse_worker_address(blob[:length])
    for rest in b"\0", b"\xff", bytes(50), blob:
        with pytest.raises(ValueError, match="follow its last device"):
            parse_worker_address(blob + rest)


@pytest.mark.parametrize("name", UNIFIED)
def test_unified_mode(name: str) -> None:
    with pytest.raises(ValueError, match="no UCX worker address"):
        parse_worker_address(bytes.fromhex(UNIFIED[name]))


def refused(blob: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_worker_address(blob)


def test_header() -> None:
    blob = sample("1.22.0 tcp,sm,self")
    refused(b"", "the header needs 1 bytes, and 0 are left")
    refused(bytes.fromhex(EMPTY), "names no device")
    refused(bytes([blob[0] | 2]) + blob[1:], "version 3")
    refused(bytes([0x00]) + blob[1:], "no worker uid")
    refused(b"\x61\x12" + blob[1:], "unknown flags 0x10")
    refused(b"\x30" + blob[1:9] + b"\x20" + b"n" * 32 + blob[9:], "name has 32 bytes")
    for name in (b"a\x1bb", "a\x9bb".encode(), "a\u202eb".encode()):
        refused(b"\x30" + blob[1:9] + bytes([len(name)]) + name + blob[9:], "unprintable characters")


def test_devices() -> None:
    refused(pack(address(attrs.evolve(TCP, md_index=64))), "memory domain 64 is out of range")
    refused(pack(address(attrs.evolve(TCP, md_index=254), version=2)), "memory domain 254 is out of range")
    # A release that UCX takes for a legacy one, whose memory domain it cuts.
    assert parse_worker_address(pack(address(attrs.evolve(TCP, md_index=0x61), release=None))).devices[0].md_index == 1
    refused(pack(address(attrs.evolve(TCP, paths=0))), "0 paths")
    refused(pack(address(attrs.evolve(TCP, system_device=255))), "unknown system device")
    header = pack(address(TCP))[:9]
    device_and_release = pack(address(TCP))[9:]
    # Neither first nor in the middle may a device be empty, and the one with the release has nothing else.
    refused(header + b"\x86\x80", "a device has no transports")
    for middle in b"\x86\x00", b"\x96\x80", b"\x86\xa0\x00", b"\x86\x81\x00", b"\xff\x80":
        refused(header + device_and_release[:-2] + middle + device_and_release, "release at the end")
    refused(header + device_and_release[:-2] + b"\x86", "the release needs 2 bytes, and 1 are left")
    # Version 2 extends only what does not fit.
    start = pack(address(TCP, version=2))[:10]
    refused(start + b"\x7f\x01", "extended by a byte that it does not need")
    refused(start + b"\x01\x1f\x06", "extended by a byte that it does not need")
    refused(start + b"\x80", "a device has no transports")


def test_numbers_of_transports() -> None:
    many = attrs.evolve(TCP, transports=TCP.transports * 128)
    assert len(parse_worker_address(pack(address(many))).devices[0].transports) == 128
    refused(pack(address(attrs.evolve(TCP, transports=TCP.transports * 129))), "more than 128 transports")
    devices = [attrs.evolve(TCP) for _ in range(129)]
    assert len(parse_worker_address(pack(address(*devices[:128]))).devices) == 128
    refused(pack(address(*devices)), "more than 128 transports")


def test_endpoint_addresses() -> None:
    blob = bytearray(pack(address(TCP)))
    assert blob[-5] == 0x82
    blob[-5] |= 0x40
    refused(bytes(blob), "endpoint address")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e-30, 1e4])
def test_version_1_numbers(value: float) -> None:
    refused(pack(address(TCP), lambda version: attributes_of(version, overhead=value)), "claims an overhead of")
    refused(pack(address(TCP), lambda version: attributes_of(version, latency=value)), "claims a latency of")
    if not 0 < value < float("inf") or value < 1:
        refused(pack(address(TCP), lambda version: attributes_of(version, bandwidth=value)), "claims a bandwidth of")


def test_capabilities() -> None:
    refused(pack(address(TCP), lambda version: attributes_of(version, capabilities=1 << 22)), "unknown capabilities")
    refused(pack(address(TCP, version=2), lambda _: bytes.fromhex("0c015a0180000004")), "unknown capabilities 0x400")


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ("0f015a0180008b00", "an overhead of 0x0f"),  # exponent of NaN
        ("0c0f5a0180008b00", "a bandwidth of 0x0f"),
        ("0c01ff0180008b00", "a latency of 0xff"),
        ("0c00000180008b00", "a bandwidth of 0x00"),
        ("10015a0180008b00", "an overhead of 0x10"),  # denormal
        ("0c015a0107008b00", "segment size of 448 bytes"),
    ],
)
def test_version_2_numbers(attributes: str, match: str) -> None:
    refused(pack(address(TCP, version=2), lambda _: bytes.fromhex(attributes)), match)


LOOPBACK = b"\x01\x02" + HOST + bytes(4)
TCP_6 = b"\0\x0a" + bytes.fromhex("fd000000000000000000000000000002")
PROC_LINK, SHM_OPEN, PID_NAMESPACE = 1 << 63, 1 << 62, 1 << 60
IB = bytes.fromhex("00 1234")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("name", "device_address", "interface"),
    [
        ("tcp", ETHERNET, PORT),
        ("tcp", b"\x02" + ETHERNET[1:], PORT),  # a flag of 1.20.0
        ("tcp", LOOPBACK, PORT),
        ("tcp", LOOPBACK + bytes(4), PORT),
        ("tcp", TCP_6, PORT),
        ("self", b"", bytes(8)),
        ("sysv", HOST, u64(2**31 - 1)),
        ("sysv", HOST_WITH_NAMESPACE, u64(0)),
        ("sysv", HOST_WITH_NAMESPACE + bytes(4), u64(0)),
        ("posix", HOST, u64(PROC_LINK | SHM_OPEN | 7 << 30 | 99)),
        ("posix", HOST, u64(PROC_LINK | PID_NAMESPACE | 99) + bytes(4)),
        ("posix", HOST, u64(PROC_LINK | PID_NAMESPACE | 99) + bytes(8)),
        ("posix", HOST, u64(SHM_OPEN | 99)),
        ("posix", HOST, u64(99) + b"/dir\0"),
        ("cma", HOST, (99).to_bytes(4, "little")),
        ("cma", HOST, (1 << 31 | 99).to_bytes(4, "little") + bytes(4)),
        ("xpmem", HOST, bytes(16)),
        ("knem", HOST, b""),
        ("cuda_copy", b"", bytes(8)),
        ("cuda_ipc", bytes(8), bytes(4)),
        ("rc_verbs", IB, b""),
        ("dc_mlx5", b"\x08" + bytes(16), bytes(5)),
        ("ud_mlx5", b"\x67" + bytes(2 + 8 + 8 + 1 + 1 + 2), bytes(3)),
    ],
)
def test_transports(name: str, device_address: bytes, interface: bytes) -> None:
    """What each transport may look like; one byte less at the end of either address is too little."""
    wanted = address(device(name, device_address, interface))
    assert parse_worker_address(pack(wanted)) == wanted
    if device_address:
        refused(pack(address(device(name, device_address[:-1], interface))), f"transport {name} ha")
    if interface:
        refused(pack(address(device(name, device_address, interface[:-1]))), f"transport {name} ha")


@pytest.mark.parametrize(
    ("name", "device_address", "interface", "match"),
    [
        ("tcp", ETHERNET, bytes(2), "port 0"),
        ("tcp", ETHERNET, bytes(3), "3 bytes, not a port"),
        ("tcp", b"", PORT, "too short for a family"),
        ("tcp", b"\0\2\0\0\0\0", PORT, "IP address 0.0.0.0"),
        ("tcp", b"\0\2\xff\xff\xff\xff", PORT, "IP address 255.255.255.255"),
        ("tcp", b"\0\2\xe0\0\0\1", PORT, "IP address 224.0.0.1"),
        ("tcp", b"\0\x0a" + bytes(16), PORT, "IP address ::"),
        ("tcp", b"\0\x0a" + bytes(10) + b"\xff\xff\x0a\0\0\1", PORT, "at which no worker listens"),
        ("tcp", b"\4\2\x7f\0\0\1", PORT, "unknown flags 0x04"),
        ("tcp", b"\0\1\x7f\0\0\1", PORT, "address family 1"),
        ("tcp", b"\0\x0a\x7f\0\0\1", PORT, "4 bytes for family 10"),
        ("tcp", b"\1\2\x7f\0\0\1", PORT, "loopback device address of 6 bytes"),
        ("self", HOST, bytes(8), "not 0 and 8"),
        ("sysv", HOST, u64(2**31), "segment id"),
        ("sysv", HOST, u64(1) + b"/tmp\0", "13 bytes, not 8"),
        ("sysv", HOST_WITH_NAMESPACE[:8], u64(1), "with a namespace"),
        ("sysv", HOST + bytes(8), u64(1), "without a namespace"),
        ("sysv", b"", u64(1), "device address of 0 bytes"),
        ("posix", HOST, u64(PROC_LINK | 7 << 30), "process 0"),
        ("posix", HOST, u64(PROC_LINK | 99) + bytes(8), "8 bytes where a pid namespace, or nothing"),
        ("posix", HOST, u64(PROC_LINK | PID_NAMESPACE | 99), "0 bytes where a pid namespace"),
        ("posix", HOST, u64(PID_NAMESPACE | SHM_OPEN | 99) + bytes(8), "no /proc link"),
        ("posix", HOST, u64(SHM_OPEN | 2**31), "which UCX never chooses"),
        ("posix", HOST, u64(SHM_OPEN | 99) + b"/tmp\0", "5 bytes after a segment"),
        ("posix", HOST, u64(99), "no absolute directory"),
        ("posix", HOST, u64(99) + b"tmp\0", "no absolute directory"),
        ("posix", HOST, u64(99) + b"/tmp", "no absolute directory"),
        ("posix", HOST, u64(99) + b"/tmp\0\0", "no absolute directory"),
        ("cma", HOST, bytes(4), "process 0"),
        ("cma", HOST, (99).to_bytes(4, "little") + bytes(4), "interface address of 8 bytes"),
        ("cma", HOST, (1 << 31 | 99).to_bytes(4, "little"), "interface address of 4 bytes"),
        ("knem", HOST, b"\0", "1 bytes, not none"),
        ("rc_mlx5", b"", b"\0", "less than 1 and 1"),
        ("rc_verbs", b"\x30" + bytes(18), b"", "two subnet prefixes"),
    ],
)
def test_hostile_transports(name: str, device_address: bytes, interface: bytes, match: str) -> None:
    refused(pack(address(TCP, device(name, device_address, interface))), match)


def test_any_bytes() -> None:
    """Whatever the bytes, they are parsed or refused with ValueError."""
    chance = random.Random(1)
    accepted = 0
    blobs = [sample(name) for name in SAMPLES]
    for _ in range(20_000):
        blob = bytearray(chance.choice(blobs))
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = chance.randrange(len(blob))
            match chance.randrange(4):
                case 0:
                    blob[at] ^= 1 << chance.randrange(8)
                case 1:
                    blob[at : at + 4] = chance.randbytes(chance.randrange(8))
                case 2:
                    blob[at:at] = chance.choice(blobs)[chance.randrange(30) :]
                case 3:
                    del blob[at : at + chance.randrange(1, 9)]
            if not blob:
                break
        try:
            parsed = parse_worker_address(bytes(blob))
        except ValueError:
            continue
        accepted += 1
        assert parsed.devices
        if parsed.name is None or parsed.name.isascii():
            assert len(pack(parsed)) == len(blob)
        assert all(0 < port < 2**16 for _, port in parsed.tcp_addresses)
    assert 1000 < accepted < 15_000
    for _ in range(5000):
        with pytest.raises(ValueError):
            parse_worker_address(chance.randbytes(chance.randrange(60)))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("transports", ["tcp", "sm,self", "tcp,sm,self", "all"])
async def test_our_own(transports: str, version: str) -> None:
    async with ucp.open_worker(config={"TLS": transports, "ADDRESS_VERSION": version}) as worker:
        parsed = parse_worker_address(worker.address.ucx)
        assert parsed.version == int(version[1])
        assert parsed.uid == worker.address.uid
        assert bool(parsed.tcp_addresses) == (transports not in ("sm,self",))
        for host, port in parsed.tcp_addresses:
            with trio.fail_after(15):
                stream = await trio.open_tcp_stream(host, port)
            await stream.aclose()


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
def test_ucx_survives_what_is_accepted(transports: str) -> None:
    run = subprocess.run(
        [sys.executable, __file__, transports],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "UCX_LOG_LEVEL": "fatal", "PYTHONPATH": str(Path(ucp.__file__).parents[2])},
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 200


def hostile(original: ParsedAddress, chance: random.Random) -> bytes:
    """An address with other contents, but with ports and segments of the original."""
    devices = list(original.devices)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(devices))
        one = devices[at]
        match chance.randrange(7):
            case 0:
                devices[at] = attrs.evolve(one, md_index=chance.choice([0, 1, 31, 32, 63]))
            case 1:
                devices[at] = attrs.evolve(one, paths=chance.choice([2, 64, 255]), system_device=chance.randrange(255))
            case 2:
                devices[at] = attrs.evolve(one, transports=one.transports * chance.randint(2, 120))
            case 3:
                devices.extend(attrs.evolve(chance.choice(original.devices)) for _ in range(chance.choice([1, 5, 70])))
            case 4:
                chance.shuffle(devices)
            case 5:
                unknown = Transport(chance.randrange(2**16), None, chance.randbytes(chance.randrange(60)))
                devices.append(Device(chance.randrange(64), chance.randbytes(chance.randrange(30)), (unknown,)))
            case 6:
                del devices[at + 1 :]
    changed = attrs.evolve(
        original,
        devices=tuple(devices),
        release=chance.randrange(16),
        uid=chance.choice([0, original.uid, original.uid, chance.getrandbits(64)]),
        client_id=chance.choice([None, chance.getrandbits(64)]),
        name=chance.choice([None, "%s%n{}", "n" * 31]),
        am_only=chance.choice([False, True]),
    )

    def attributes(version: int) -> bytes:
        if version == 2:
            return struct.pack(
                "<BBBBHH",
                *(chance.choice([1, 13, 0xF1, 0xFD]) for _ in range(3)),
                chance.randrange(256),
                chance.choice([8, 9, 128, 65535]),
                chance.choice([0x8B, 0x9B, chance.getrandbits(10)]),
            )
        seconds = [chance.choice([0.0, 1e-12, 1e-6, 1.0, 1e3]) for _ in range(2)]
        capabilities = chance.choice([0x231301, 0x23004F00, chance.getrandbits(32)]) & 0xC03FFFFF
        return struct.pack("<fffI", seconds[0], chance.choice([1.0, 1e6, 1e10, 1e17]), seconds[1], capabilities)

    return pack(changed, attributes)


async def main(transports: str) -> None:
    """Connects to accepted addresses that are made from those of two workers in this process; sends a little."""
    chance = random.Random(2)
    accepted = 0
    one_version = {"TLS": transports}
    async with (
        ucp.open_worker(config=one_version) as client,
        ucp.open_worker(config=one_version) as first,
        ucp.open_worker(config={**one_version, "ADDRESS_VERSION": "v2"}) as second,
        trio.open_nursery() as nursery,
    ):
        limit = trio.CapacityLimiter(20)

        async def attempt(blob: bytes) -> None:
            async with limit:
                try:
                    endpoint = await client.open_endpoint(ucp.WorkerAddress.from_ucx(blob + PADDING))
                except OSError:
                    return
                try:
                    with trio.move_on_after(0.05):
                        await endpoint.tag_send(bytes(8), 7)
                        await trio.sleep_forever()
                except (OSError, trio.BrokenResourceError):
                    pass
                finally:
                    endpoint.abort()

        own = [parse_worker_address(worker.address.ucx) for worker in (client, first, second)]
        while accepted < 200:
            blob = hostile(chance.choice(own), chance)
            try:
                parse_worker_address(blob)
            except ValueError:
                continue
            accepted += 1
            nursery.start_soon(attempt, blob)
    print(accepted)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
