"""The layout of worker addresses: real ones of many UCX releases are read, and other layouts refused."""

from __future__ import annotations

import random
import struct

import attrs
import pytest
import trio
from samples import SAMPLES, sample, some_worker

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp._quirks.address_layout import (
    agree_on_namespaces,
    parse_worker_address,
    read_uid,
    transport_checksum,
    with_tcp_at,
    with_uid,
    without_shared_memory,
)
from trio_ucx.ucp._quirks.key_gate import tcp_hosts
from trio_ucx.ucp._transports import common_part

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
#: Of Soft-RoCE: TLS=rc,tcp and TLS=ud,tcp.
RC_AND_TCP, UD_AND_TCP = (
    bytes.fromhex(
        f"20121cccaf323b6ec4000600020a4d0001cf1917b75138cc0f354bd7e037370113230082852d000e0102529f4f8b72036a91000000f0"
        f"cf1917b75138539e3e4bd7e037370113230082af6101124a00000000000000000000ffff0a4d000103{transports}8680"
    )
    for transports in (
        "278ab00fa13321285b4da97bae3600df22000031d15c7ce13321285b4d5c7daf360003270083370000",
        "31d15c7ce13321285b4d5c7daf360003270083430000",
    )
)
#: UCP_WORKER_ADDRESS_FLAG_NET_ONLY without a network: header, uid, no device.
EMPTY = bytes.fromhex("206e93ee993993be97ff")

HOST = bytes.fromhex("470bc88404be652c")
ETHERNET = bytes.fromhex("0002c0000202")  # 192.0.2.2
ETHERNET_6 = b"\0\x0a" + bytes.fromhex("fd000000000000000000000000000002")
LOOPBACK = b"\x01\x02" + HOST + bytes(4)
PORT = struct.pack(">H", 4000)


@attrs.frozen
class Device:
    """A device of one transport, as it is written in a worker address."""

    transport: str | int
    address: bytes
    interface: bytes
    extra: bytes = b""
    """The number of paths and the system device."""

    def pack(self, version: int, last: bool) -> bytes:
        checksum = self.transport if isinstance(self.transport, int) else transport_checksum(self.transport)
        flags = 0x60 if self.extra else 0
        return (
            b"\0"
            + extended(len(self.address), 0x1F, flags | (0x80 if last else 0), version)
            + self.extra
            + self.address
            + struct.pack("<H", checksum)
            + bytes(16 if version == 1 else 8)
            + extended(len(self.interface), 0x3F, 0x80, version)
            + self.interface
        )


def extended(value: int, mask: int, flags: int, version: int) -> bytes:
    return bytes([mask | flags, value] if version == 2 and value >= mask else [value | flags])


def pack(*devices: Device, version: int = 1, release: int | None = 6) -> bytes:
    header = b"\x20" if version == 1 else bytes([1 | (release or 0) << 4, 2])
    end = bytes([0x80 | release, 0x80]) if version == 1 and release is not None else b""
    written = [device.pack(version, number == len(devices) and not end) for number, device in enumerate(devices, 1)]
    return header + (0x1234).to_bytes(8, "little") + b"".join(written) + end


TCP = Device("tcp", ETHERNET, PORT)


@pytest.mark.parametrize("name", SAMPLES)
def test_addresses_of_all_releases(name: str) -> None:
    """Real addresses are accepted, and what is read of them is what is in them."""
    parsed = parse_worker_address(sample(name))
    expected = {"sysv", "posix", "cma", "self"} if "sm,self" in name else set()
    assert parsed.transports >= expected | ({"tcp"} if "tcp" in name else set())
    assert None not in parsed.transports
    assert parsed.shared_memory == parsed.transports & {"sysv", "posix"}
    assert bool(parsed.tcp_addresses) == ("tcp" in parsed.transports)


@pytest.mark.parametrize("name", SAMPLES)
def test_without_shared_memory(name: str) -> None:
    """What is left is an address like those that UCX makes, of the same worker."""
    blob = sample(name)
    parsed = parse_worker_address(blob)
    rest = without_shared_memory(blob)
    if "tcp" not in parsed.transports:
        assert rest is None
        return
    assert rest is not None
    left = parse_worker_address(rest)
    assert (left.transports, left.tcp_addresses) == ({"tcp"}, parsed.tcp_addresses)
    assert rest[:9] == blob[:9]
    assert (rest == blob) == (left == parsed)
    assert without_shared_memory(rest) == rest


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("release", [None, 6])
def test_without_shared_memory_whatever_is_last(version: int, release: int | None) -> None:
    if version == 2 and release is None:
        release = 0  # it always says one
    memory, other = Device("sysv", HOST, bytes(8)), Device("sysv", HOST, bytes(8))
    tcp = attrs.evolve(TCP, extra=b"\x02\x03")
    for devices in ([tcp, memory], [memory, tcp], [memory, tcp, other], [tcp, TCP, memory], [TCP, memory, tcp]):
        rest = without_shared_memory(pack(*devices, version=version, release=release))
        assert rest == pack(*(one for one in devices if one.transport == "tcp"), version=version, release=release)
    assert without_shared_memory(pack(memory, version=version, release=release)) is None


@pytest.mark.parametrize("version", [1, 2])
def test_with_tcp_at_some_hosts(version: int) -> None:
    memory, six = Device("sysv", HOST, bytes(8)), Device("tcp", ETHERNET_6, PORT)
    blob = pack(TCP, memory, six, version=version)
    assert with_tcp_at(blob, ["192.0.2.2"]) == pack(TCP, memory, version=version)
    assert with_tcp_at(blob, ["fd00::2"]) == pack(memory, six, version=version)
    assert with_tcp_at(blob, ["192.0.2.2", "fd00::2", "10.0.0.1"]) == blob
    assert with_tcp_at(blob, ["10.0.0.1"]) is None


def test_devices_over_which_ucx_would_crash() -> None:
    some, only = some_worker(), frozenset({"ud_verbs"})
    rc, both = (some._changed(ucx=RC_AND_TCP, auxiliary=each) for each in (only, frozenset()))
    ud = some._changed(ucx=UD_AND_TCP)
    for ours, theirs, left in (rc, ud, {"tcp"}), (ud, rc, {"tcp"}), (rc, both, {"tcp", "rc_verbs", "ud_verbs"}):
        assert parse_worker_address(common_part(ours, theirs, theirs.ucx)).transports == left
    unknown = ud._changed(ucx=UD_AND_TCP[:-1])
    for ours, theirs in (rc, rc), (both, rc), (ud, both), (ud, some), (rc, unknown):
        assert common_part(ours, theirs, theirs.ucx) == theirs.ucx


def test_without_shared_memory_refuses_what_the_parser_refuses() -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        without_shared_memory(sample("1.22.0 tcp, with name")[:-1])


@pytest.mark.parametrize("name", SAMPLES)
def test_with_uid(name: str) -> None:
    """UCX reads the new one, and the rest is the same."""
    blob = sample(name)
    old = read_uid(blob)
    changed = with_uid(blob, old ^ 2**63 ^ 1)
    assert read_uid(changed) == old ^ 2**63 ^ 1 == ucp.WorkerAddress.from_ucx(changed).uid
    assert with_uid(changed, old) == blob and parse_worker_address(changed) == parse_worker_address(blob)


def test_tcp_addresses() -> None:
    assert parse_worker_address(sample("1.22.0 tcp, with name")).tcp_addresses == (
        ("192.0.2.2", 0x946F),
        ("127.0.0.1", 0xC9B1),
    )
    assert parse_worker_address(sample("1.22.0 tcp over IPv6")).tcp_addresses == (("fd00::2", 0xA3D1), ("::1", 0x8DDD))
    assert parse_worker_address(sample("1.16.0 sm,self v2")).tcp_addresses == ()


def test_checksums() -> None:
    assert transport_checksum("tcp") == 0x19CF
    assert transport_checksum("self") == 0x7563
    assert transport_checksum("") == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_cut_or_extended(name: str) -> None:
    blob = sample(name)
    for length in range(len(blob)):
        refused(blob[:length], "unknown layout")
    for rest in b"\0", b"\xff", bytes(50), blob:
        refused(blob + rest, "follow its last device")


@pytest.mark.parametrize("name", UNIFIED)
def test_unified_mode(name: str) -> None:
    refused(bytes.fromhex(UNIFIED[name]), "unknown layout")


def refused(blob: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_worker_address(blob)


def test_header() -> None:
    blob = sample("1.22.0 tcp,sm,self")
    refused(b"", "the header needs 1 bytes, and 0 are left")
    refused(bytes([blob[0] | 2]) + blob[1:], "version 3")
    refused(bytes([0x00]) + blob[1:], "no worker uid")
    refused(b"\x61\x12" + blob[1:], "unknown flags 0x10")
    refused(b"\x30" + blob[1:9] + b"\x20" + b"n" * 32 + blob[9:], "name has 32 bytes")
    named = b"\xf0" + blob[1:9] + bytes(8) + b"\x1f" + b"n" * 31 + blob[9:]  # with a client id, too
    assert parse_worker_address(named).tcp_addresses == parse_worker_address(blob).tcp_addresses


def test_no_devices() -> None:
    parsed = parse_worker_address(EMPTY)
    assert parsed.devices == parsed.tcp_addresses == () and without_shared_memory(EMPTY) == EMPTY
    refused(EMPTY + b"\0", "bytes follow")


def test_devices() -> None:
    header, device_and_release = pack(TCP)[:9], pack(TCP)[9:]
    # Neither first nor in the middle may a device be empty, and the one with the release has nothing else.
    refused(header + b"\x86\x80", "a device has no transports")
    for middle in b"\x86\x00", b"\x96\x80", b"\x86\xa0\x00", b"\x86\x81\x00", b"\xff\x80":
        refused(header + device_and_release[:-2] + middle + device_and_release, "release at the end")
    refused(header + device_and_release[:-2] + b"\x86", "the release needs 2 bytes, and 1 are left")
    refused(pack(TCP, version=2)[:10] + b"\x80", "a device has no transports")
    blob = bytearray(pack(TCP))
    assert blob[-5] == 0x82
    blob[-5] |= 0x40
    refused(bytes(blob), "endpoint address")


def test_transports() -> None:
    """Unknown ones are accepted beside a known one. Alone they show that the layout is another one."""
    unknown = Device(0x1234, bytes(7), bytes(9))
    for version in 1, 2:
        one = unknown if version == 1 else attrs.evolve(unknown, address=bytes(255), interface=bytes(255))
        assert parse_worker_address(pack(TCP, one, version=version)).transports == {"tcp", None}
        refused(pack(one, version=version), "only unknown transports")
    refused(pack(TCP, version=2)[:10] + b"\x7f\x40" + pack(TCP, version=2)[11:], "more than one byte")


@pytest.mark.parametrize(
    "device_address", [ETHERNET, b"\x02" + ETHERNET[1:], LOOPBACK, LOOPBACK + bytes(4), ETHERNET_6]
)
def test_tcp(device_address: bytes) -> None:
    """(UCX 1.20.0 has another flag.) One byte less is too little."""
    [(host, port)] = parse_worker_address(pack(attrs.evolve(TCP, address=device_address))).tcp_addresses
    assert host in ("192.0.2.2", "127.0.0.1", "fd00::2") and port == 4000
    for wrong in (device_address[:-1], device_address + b"\0", device_address[:1] + b"\1" + device_address[2:], b""):
        refused(pack(attrs.evolve(TCP, address=wrong)), "which is no IP address")
    for wrong in (b"", b"\1", bytes(2), bytes(3)):
        refused(pack(attrs.evolve(TCP, interface=wrong)), "not a port")


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
        assert all(0 < port < 2**16 for _, port in parsed.tcp_addresses)
        without_shared_memory(bytes(blob))
    assert 1000 < accepted < 15_000
    for _ in range(5000):
        refused(chance.randbytes(chance.randrange(60)), "unknown layout")


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("transports", ["tcp", "sm,self", "tcp,sm,self", "all"])
async def test_our_own(transports: str, version: str) -> None:
    async with ucp.open_worker(config={"TLS": transports, "ADDRESS_VERSION": version}) as worker:
        address = parse_worker_address(worker.address.ucx)
        assert worker.address.ucx[0] & 0x0F == int(version[1]) - 1
        assert bool(address.tcp_addresses) == (transports != "sm,self") == bool(worker.address.network)
        if worker.address.network:
            network = parse_worker_address(worker.address.network)
            assert address.tcp_addresses == network.tcp_addresses and not network.shared_memory
        for host, port in address.tcp_addresses:
            with trio.fail_after(15):
                stream = await trio.open_tcp_stream(host, port)
            await stream.aclose()


async def test_unknown_layout_of_our_own(caplog: pytest.LogCaptureFixture) -> None:
    """Connections need an address that can be read, also if the user has admitted every host. Raw endpoints do without
    shared memory."""
    config = {"TLS": "tcp,sm,self", "UNIFIED_MODE": "y"}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        assert "trio_ucx cannot read the UCX address of a worker (unknown layout" in caplog.text
        assert worker.address.ucx == worker.address.network and not worker.address.shared_memory_kinds
        assert tcp_hosts(ucp.WorkerAddress.from_ucx(other.address.ucx)) == ["0.0.0.0"]  # they are not known
        assert other.address.tcp_addresses == tuple(internals(other).key_gate._ports)
        endpoint = await worker.open_endpoint(other.address)
        with trio.fail_after(15):
            await endpoint.tag_send(b"x", 1)
            await other.tag_receive(bytearray(1), 1)
            assert {each.name for each in endpoint.transports} == {"tcp"}
        endpoint.abort()
        worker.admit("0.0.0.0/0", "::/0")
        with pytest.raises(ValueError, match=r"without UCX's option UNIFIED_MODE .UCX_UNIFIED_MODE in the environment"):
            await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)


async def test_where_a_peer_listens(worker: ucp.Worker) -> None:
    """It has said so, or UCX's address says it."""
    foreign = ucp.WorkerAddress.from_ucx(worker.address.ucx)
    assert tcp_hosts(worker.address) == tcp_hosts(foreign) == [host for host, _ in worker.address.tcp_addresses] != []
    assert tcp_hosts(ucp.WorkerAddress.from_ucx(sample("1.16.0 sm,self v2"))) == []


async def test_unknown_layout_of_another_program() -> None:
    """Its shared memory cannot be left out, so the error says what to do; where it may be used, UCX decides."""
    blob = bytes.fromhex(UNIFIED["1.22.0 tcp,self"])
    async with ucp.open_worker() as worker:
        with pytest.raises(OSError, match="cannot be left out, because the address has an unknown layout.*say so"):
            await worker.open_endpoint(ucp.WorkerAddress.from_ucx(blob))


def test_releases_that_agree_on_namespaces() -> None:
    """From 1.22 on they have another length. Of newer releases nothing is known."""
    for one, other, expected in (
        ((1, 13), (1, 21), True),
        ((1, 21), (1, 22), False),
        ((1, 22), (1, 22), True),
        ((1, 22), (1, 23), False),
        ((1, 23), (1, 23), True),
        ((1, 23), (1, 24), False),
    ):
        assert agree_on_namespaces(one, other) is agree_on_namespaces(other, one) is expected
