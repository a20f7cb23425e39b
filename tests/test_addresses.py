"""Addresses as text, and as pairs; and the addresses of workers."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp._address import in_another_network_namespace
from trio_ucx.ucp._process import NOBODY, Process
from trio_ucx.ucp._quirks.option_limits import DEFAULT_SIZES

#: How many bytes of a worker address say the sizes.
SIZES = 4 * len(DEFAULT_SIZES)

PAIRS = {
    "10.0.0.5:13337": ("10.0.0.5", 13337),
    "some.host.example:1": ("some.host.example", 1),
    "[::1]:65535": ("::1", 65535),
    "[fe80::1%eth0]:7": ("fe80::1%eth0", 7),
    "unix:/run/with:colon": ("unix:/run/with:colon", 0),
}


@pytest.mark.parametrize("text", PAIRS)
def test_there_and_back(text: str) -> None:
    pair = PAIRS[text]
    assert trio_ucx.parse_address(text) == pair == trio_ucx.parse_address(pair)
    assert trio_ucx.format_address(pair) == text


def test_addresses_of_sockets() -> None:
    assert trio_ucx.format_address(("::1", 5, 0, 0)) == "[::1]:5"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "host",
        "host:",
        ":5",
        "::1:5",
        "host:65536",
        "host:-1",
        "host:5x",
        "unix:",
        ("unix:/x", 1),
        ("host",),
        ("h", -1),
    ],
)
def test_values_that_are_no_addresses(wrong: Any) -> None:
    with pytest.raises(ValueError):
        trio_ucx.parse_address(wrong)
    if not isinstance(wrong, str):
        with pytest.raises(ValueError):
            trio_ucx.format_address(wrong)


@pytest.mark.parametrize("wrong", [None, 5, b"host:5", (5, 5), ("host", "5"), ucp])
def test_types_that_are_no_addresses(wrong: Any) -> None:
    for function in trio_ucx.parse_address, trio_ucx.format_address:
        with pytest.raises(TypeError):
            function(wrong)
    with pytest.raises(TypeError, match="pair"):
        trio_ucx.format_address("host:5")  # type: ignore[arg-type]


async def test_what_listeners_give_and_connect_takes(worker: ucp.Worker, tmp_path: Path) -> None:
    for host in "127.0.0.1", f"unix:{tmp_path}/socket":
        [listener] = await trio_ucx.open_ucx_listeners(0, host=host, worker=worker)
        async with listener:
            text = trio_ucx.format_address(listener.address)
            assert trio_ucx.parse_address(text) == listener.address
            with trio.fail_after(15):
                async with trio_ucx.connect(text, worker=worker) as client, await listener.accept():
                    assert client.remote_address == listener.address


# ---- worker addresses ----


def with_checksum(data: bytes) -> bytes:
    return data + struct.pack("<I", zlib.crc32(data))


def moved(address: ucp.WorkerAddress, network_namespace: int, process: Process | None = None) -> ucp.WorkerAddress:
    """The address as one of a worker in this network namespace."""
    process = process or address.process
    return ucp.WorkerAddress._create(address.ucx, process, network_namespace, address.shared_memory, address.features)


async def test_worker_address_there_and_back(worker: ucp.Worker) -> None:
    address = worker.address
    assert address.network_namespace == os.stat("/proc/self/ns/net").st_ino
    foreign = ucp.WorkerAddress.from_ucx(address.ucx)
    assert (foreign.process, foreign.network_namespace, foreign.shared_memory) == (NOBODY, 0, False)
    assert (address.features, foreign.features) == (worker.context.features, ucp.Feature.ALL)
    without_tags, liar = (
        ucp.WorkerAddress.from_ucx(address.ucx, features=ucp.Feature(features)) for features in (0x7E, 2**32 - 1)
    )
    for one in (address, foreign, moved(address, 2**64 - 1), without_tags, liar):
        again = ucp.WorkerAddress(bytes(one))
        assert again == one and again.network_namespace == one.network_namespace and again.features == one.features
    assert moved(address, 1) != address and without_tags != foreign
    with pytest.raises(TypeError, match="must be a Feature"):
        ucp.WorkerAddress.from_ucx(address.ucx, features=1)  # type: ignore[arg-type]


async def test_worker_address_of_version_5(worker: ucp.Worker) -> None:
    """It did not say the features of the worker's context."""
    address = worker.address
    data = bytes(address)
    assert address.features != ucp.Feature.ALL and data[-5] == 7
    older = ucp.WorkerAddress(with_checksum(data[: -9 - 4 - SIZES] + data[-9:-5] + bytes([5])))
    assert older.features == ucp.Feature.ALL
    assert (older.ucx, older.process, older.shared_memory) == (address.ucx, address.process, address.shared_memory)
    assert older.network_namespace == address.network_namespace


async def test_worker_address_of_version_6(worker: ucp.Worker) -> None:
    """It did not say the sizes of segments and queues."""
    address = worker.address
    data = bytes(address)
    older = ucp.WorkerAddress(with_checksum(data[: -9 - SIZES] + data[-9:-5] + bytes([6])))
    assert (older.features, older.sizes) == (address.features, ()) and address.sizes == DEFAULT_SIZES
    assert ucp.WorkerAddress(bytes(older)) == older


async def test_worker_address_of_another_version(worker: ucp.Worker) -> None:
    """The magic, the version and the checksum end an address, whatever the version."""
    data = bytes(worker.address)
    version = data[-5]
    for other in (version + 1, 4, 0, 255):
        changed = with_checksum(b"fields of another version" + data[-9:-5] + bytes([other]))
        with pytest.raises(ValueError, match=f"version {other}: this trio_ucx speaks versions 5 to {version}"):
            ucp.WorkerAddress(changed)
        with pytest.raises(ValueError, match="no worker address, or damaged"):
            ucp.WorkerAddress(data[:-5] + bytes([other]) + data[-4:])


@pytest.mark.parametrize(("version", "size"), [(5, 45), (6, 49), (7, 49 + SIZES)])
async def test_worker_address_that_is_too_short(worker: ucp.Worker, version: int, size: int) -> None:
    """...for its fields, or has nothing of UCX's before them."""
    end = bytes(worker.address)[-9:-5] + bytes([version])
    for length in (0, 1, size - 1, size):
        with pytest.raises(ValueError, match="too short"):
            ucp.WorkerAddress(with_checksum(bytes(length) + end))
    assert ucp.WorkerAddress(with_checksum(bytes(size + 1) + end)).ucx == bytes(1)


async def test_another_network(worker: ucp.Worker) -> None:
    """...of this machine: numbers of namespaces mean nothing between machines."""
    address = worker.address
    own = address.network_namespace
    assert not in_another_network_namespace(address)
    assert in_another_network_namespace(moved(address, own + 1))
    assert in_another_network_namespace(moved(address, own + 1, Process(address.process.host, 5, 6, 7)))
    assert not in_another_network_namespace(moved(address, 0))
    assert not in_another_network_namespace(moved(address, own + 1, NOBODY))
    assert not in_another_network_namespace(moved(address, own + 1, Process(bytes(range(16)))))
    assert not in_another_network_namespace(ucp.WorkerAddress.from_ucx(address.ucx, process=address.process))


@pytest.mark.parametrize("mode", [ucp.ErrorMode.PEER, ucp.ErrorMode.NONE])
async def test_endpoint_to_another_network_has_no_shared_memory(mode: ucp.ErrorMode) -> None:
    """The other network namespace is the address's claim here; tests/test_namespaces.py has real ones."""
    async with ucp.open_worker() as ours, ucp.open_worker() as theirs:
        for address, shared in (theirs.address, True), (moved(theirs.address, 1), False):
            endpoint = await ours.open_endpoint(address, error_mode=mode)
            with trio.fail_after(15):
                await endpoint.tag_send(b"x", 1)
                await theirs.tag_receive(bytearray(1), 1)
                names = {each.name for each in endpoint.transports}
            endpoint.abort()
            assert bool(names & {"sysv", "posix"}) is shared and ("tcp" in names or shared), names


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("sm,self", "sm,self", "it has shared memory only, and its worker is in another network namespace"),
        ("tcp,sm,self", "sm,self", "it has shared memory only, and its worker is in another network namespace"),
        ("sm,self", "tcp,sm,self", "transports in use here: sm,self; it is in another network namespace"),
    ],
)
async def test_endpoint_to_another_network_needs_tcp(ours: str, theirs: str, message: str) -> None:
    async with ucp.open_worker(config={"TLS": ours}) as one, ucp.open_worker(config={"TLS": theirs}) as other:
        with pytest.raises(OSError, match=message) as caught:
            await one.open_endpoint(moved(other.address, 1))
        assert caught.value.errno == errno.EHOSTUNREACH
