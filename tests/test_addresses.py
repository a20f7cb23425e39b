"""Addresses as text, and as pairs; and the addresses of workers."""

from __future__ import annotations

import errno
import os
from functools import partial
from socket import AF_INET, AF_INET6, AddressFamily, socket
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from samples import ALL, with_checksum

import trio_ucx
from trio_ucx import ucp
from trio_ucx._opening import addresses as _addresses
from trio_ucx._util.process import NOBODY, this_host
from trio_ucx.mesh import _contact
from trio_ucx.ucp._quirks.network_devices import active_addresses, addresses_of_devices
from trio_ucx.ucp._quirks.option_limits import DEFAULT_SIZES
from trio_ucx.ucp._worker_address import LAYOUT, VERSION

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


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        *(
            (f"{scheme}://{end}", f"'{scheme}://{end}' has a scheme, which is no part of an address: write '{meant}'$")
            for scheme in ("tcp", "ucx", "http")
            for end, meant in (
                ("127.0.0.1:5", "127.0.0.1:5"),
                ("some.host:5/", "some.host:5"),
                ("some.host:5/a/path", "some.host:5"),
                ("some.host", "some.host:port"),
                ("", "host:port"),
            )
        ),
        ("ucx://[::1]:5", r"write '\[::1\]:5'$"),
        ("unix:///run/socket", "'unix:///run/socket' has a scheme, .*: write 'unix:/run/socket'$"),
        ("unix://run/socket", "write 'unix:/run/socket'$"),
        (("tcp://some.host", 5), "'tcp://some.host' has a scheme, .*: write 'some.host'$"),
        *((host, "has no port: write") for host in ("127.0.0.1", "some.host", "[::1]")),
        ("::1:5", r"brackets: \[::1:5\]:port or \[::1\]:5$"),
        ("fe80::1%eth0:65535", r"brackets: \[fe80::1%eth0:65535\]:port or \[fe80::1%eth0\]:65535$"),
        ("::1:65535", r"brackets: \[::1\]:65535$"),
        ("a:b:5", "'a:b:5' is not an address"),
    ],
)
def test_what_is_wrong_with_an_address(wrong: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        trio_ucx.parse_address(wrong)
    assert ("brackets:" in str(caught.value)) == ("brackets:" in match)


async def test_hosts_and_paths_that_cannot_be(worker: ucp.Worker) -> None:
    with pytest.raises(ValueError, match="connecting to aaa.* is not possible: .*label"):
        await trio_ucx.open_ucx_stream("a" * 300, 1, worker=worker)
    with pytest.raises(OSError, match="connecting to unix:/tmp/xxx.*: File name too long") as caught:
        await trio_ucx.connect(f"unix:/tmp/{'x' * 120}", worker=worker).__aenter__()
    assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize(
    ("listening", "own", "expected"),
    [
        (["127.0.0.1"], ["10.1.2.3"], "127.0.0.1"),
        (["::1", "127.0.0.1"], ["10.1.2.3"], "::1"),
        (["unix:/run/socket"], [], "unix:/run/socket"),
        (["0.0.0.0", "::"], ["127.0.0.1", "10.1.2.3", "fe80::1", "fd00::3"], "10.1.2.3"),
        (["0.0.0.0", "::"], ["127.0.0.1", "10.1.2.3", "10.9.9.9"], "10.9.9.9"),
        (["0.0.0.0", "::"], ["127.0.0.1", "::1", "fe80::1", "fd00::3"], "fd00::3"),
        (["::"], ["10.1.2.3", "fe80::1"], "::1"),
        (["0.0.0.0", "::"], [], "127.0.0.1"),
    ],
)
def test_address_for_other_machines(
    listening: list[str], own: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_addresses, "outward_address", lambda ip: None if ":" in ip else "10.9.9.9")
    assert _addresses.reachable_address([(host, 5) for host in listening], own) == (expected, 5)


async def test_address_of_a_server_over_rdma_alone(worker: ucp.Worker) -> None:
    """Its UCX has no TCP device: other machines reach the server's socket at every device, not only at loopback."""
    alone = worker.address._changed(tcp_addresses=())
    hosts = addresses_of_devices(alone)
    assert hosts and set(hosts) == {host for host, _ in active_addresses()}
    assert addresses_of_devices(alone._changed(network=b"")) == []  # shared memory alone
    of_a_rank: Any = SimpleNamespace(_engine=SimpleNamespace(identity=SimpleNamespace(address=alone)))
    assert set(_contact._own_hosts(of_a_rank)) >= {host for host in hosts if _addresses._is_for_others(host)}


@pytest.mark.parametrize("family", [AF_INET, AF_INET6])
def test_outward_address(family: AddressFamily) -> None:
    found = _addresses.outward_address("192.0.2.1" if family is AF_INET else "2001:db8::1")
    if found is not None:  # it has a route
        with socket(family) as own:
            own.bind((found, 0))


async def test_address_of_a_server_at_all_addresses(worker: ucp.Worker) -> None:
    async def echo(connection: trio_ucx.Connection) -> None:
        await connection.send(await connection.receive())

    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(trio_ucx.serve_ucx, worker=worker), echo, 0)
        wildcards = ("0.0.0.0", "::")
        assert server.listeners[0].address[0] in wildcards and server.address[0] not in wildcards
        with trio.fail_after(15):
            async with trio_ucx.connect(server.address, worker=worker) as client:
                await client.send(b"x")
                assert await client.receive() == b"x"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("wrong", [None, 5, b"host:5", (5, 5), ("host", "5"), ucp])
def test_types_that_are_no_addresses(wrong: Any) -> None:
    for function in trio_ucx.parse_address, trio_ucx.format_address:
        with pytest.raises(TypeError):
            function(wrong)
    with pytest.raises(TypeError, match="pair"):
        trio_ucx.format_address("host:5")  # type: ignore[arg-type]


# ---- worker addresses ----


def moved(address: ucp.WorkerAddress, network_namespace: int) -> ucp.WorkerAddress:
    """The address as one of a worker in this network namespace."""
    return address._changed(host=attrs.evolve(address.host, network_namespace=network_namespace))


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


async def test_what_a_worker_address_says(worker: ucp.Worker, transports: str) -> None:
    """Everything that a peer has to know; UCX's own parts are what UCX answers."""
    address = worker.address
    assert (address.host, address.release, address.sizes) == (this_host(), ucp.library().version[:2], DEFAULT_SIZES)
    assert address.uid == ucp.WorkerAddress.from_ucx(address.ucx).uid != 0
    assert bool(address.shared_memory_kinds) == ("sm" in transports) and bool(address.tcp_addresses)
    assert address._is_described and not ucp.WorkerAddress.from_ucx(address.ucx)._is_described
    network = address._without_shared_memory()
    assert network.ucx == network.network == address.network and not network.shared_memory_kinds
    assert (network.uid, network.features) == (address.uid, address.features)


async def test_worker_address_of_another_version(worker: ucp.Worker) -> None:
    """The magic, the version and the checksum end an address, whatever the version."""
    data = bytes(worker.address)
    version = data[-5]
    assert version == VERSION
    for other in (version - 1, version + 1, 7, 255):
        changed = with_checksum(b"fields of another version" + data[-9:-5] + bytes([other]))
        with pytest.raises(ValueError, match=f"version {other}: this trio_ucx speaks version {version}; use"):
            ucp.WorkerAddress(changed)
        with pytest.raises(ValueError, match="no worker address, or damaged"):
            ucp.WorkerAddress(data[:-5] + bytes([other]) + data[-4:])


async def test_worker_address_of_another_length(worker: ucp.Worker) -> None:
    """...than its fields say."""
    body, end = bytes(worker.address)[:-9], bytes(worker.address)[-9:-4]
    for length in range(LAYOUT.size):
        with pytest.raises(ValueError, match="too short for its fields"):
            ucp.WorkerAddress(with_checksum(body[:length] + end))
    for wrong in (body[:-1], body + b"x", body[: LAYOUT.size]):
        with pytest.raises(ValueError, match="does not match its fields"):
            ucp.WorkerAddress(with_checksum(wrong + end))


def test_address_that_ucx_does_not_make() -> None:
    """(UCX would end the process.)"""
    for length in (0, 9, 48_001):
        with pytest.raises(ValueError, match=f"10 to 48000 bytes, not {length}"):
            ucp.WorkerAddress.from_ucx(ALL[:1] * length)
    with pytest.raises(ValueError, match="unknown layout: it has version 3"):
        ucp.WorkerAddress.from_ucx(b"\x02" + ALL[1:])


@pytest.mark.parametrize("mode", [ucp.ErrorMode.PEER, ucp.ErrorMode.NONE])
async def test_endpoint_to_another_namespace_has_no_shared_memory(mode: ucp.ErrorMode) -> None:
    """The other namespace is the address's claim here; tests/test_namespaces.py has real ones."""
    admit = ["127.0.0.1"]  # the address has no keys
    async with ucp.open_worker(admit=admit) as ours, ucp.open_worker(admit=admit) as theirs:
        elsewhere = theirs.address._changed(host=attrs.evolve(theirs.address.host, ipc_namespace=1))
        for address, shared in (theirs.address, True), (elsewhere, False):
            endpoint = await ours.open_endpoint(address, error_mode=mode)
            with trio.fail_after(15):
                await endpoint.tag_send(b"x", 1)
                await theirs.tag_receive(bytearray(1), 1)
                names = {each.name for each in endpoint.transports}
            endpoint.abort()
            assert bool(names & {"sysv", "posix"}) is shared and ("tcp" in names or shared), names


@pytest.mark.parametrize("mode", [ucp.ErrorMode.PEER, ucp.ErrorMode.NONE])
async def test_own_addresses_are_not_those_of_another_network(mode: ucp.ErrorMode) -> None:
    async with ucp.open_worker() as ours, ucp.open_worker() as theirs:
        address = moved(ucp.WorkerAddress(bytes(theirs.address)), 1)
        with pytest.raises(OSError, match="Destination is unreachable"):
            await ours.open_endpoint(address, error_mode=mode)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("sm,self", "sm,self"), ("tcp,sm,self", "sm,self"), ("sm,self", "tcp,sm,self")]
)
async def test_endpoint_to_another_network_needs_tcp(ours: str, theirs: str) -> None:
    message = r"cannot be used \(the two sides have different network namespaces\).* no other transport: add tcp"
    async with ucp.open_worker(config={"TLS": ours}) as one, ucp.open_worker(config={"TLS": theirs}) as other:
        with pytest.raises(OSError, match=message) as caught:
            await one.open_endpoint(moved(other.address, 1))
        assert caught.value.errno == errno.EHOSTUNREACH
