"""Introspection: attributes, names, client ids, local addresses, estimates, operations in flight, keepalive."""

from __future__ import annotations

import errno
import math
import os
import re
import socket

import pytest
import trio
from helpers import (
    assert_transports,
    free_port,
    open_listener,
    open_pair,
    open_peer,
    open_raw_endpoint,
    open_raw_listener,
    open_raw_pair,
    until,
)
from injected_faults import close_worker
from networks import open_network

import trio_ucx
from trio_ucx import _native, ucp
from trio_ucx.testing import internals
from trio_ucx.ucp import _endpoint_options
from trio_ucx.ucp._engine.operations import under_way

#: Of which each character has two bytes.
NAME = "\N{GREEK SMALL LETTER OMEGA}" * 15


def own_address() -> str:
    """An address of this machine that is not loopback's."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network but loopback")
        address: str = probe.getsockname()[0]
        return address


# ---- the library, contexts, workers ----


def test_library() -> None:
    library = ucp.library()
    assert library.version == _native.ucx.version and library.version[0] == library.compiled_version[0]
    assert os.path.exists(library.file)
    assert isinstance(library.max_thread_mode, ucp.ThreadMode)


def test_context_attributes() -> None:
    with ucp.open_context({"TLS": "tcp,self"}, name="the context") as context:
        attributes = context.attributes()
        assert attributes.name == "the context"
        assert attributes.request_size > 0
        assert isinstance(attributes.thread_mode, ucp.ThreadMode)
        assert ucp.MemoryType.HOST in attributes.memory_types
    with pytest.raises(RuntimeError, match="closed"):
        context.attributes()


async def test_worker_attributes(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, name=NAME) as worker:
        attributes = worker.attributes()
        assert attributes.name == NAME
        assert attributes.thread_mode is ucp.ThreadMode.SINGLE
        assert attributes.max_am_header >= 64 and attributes.max_debug_string > 0
        assert attributes.client_id is None
    assert worker.attributes() == attributes


async def test_features_of_a_worker() -> None:
    async with ucp.open_worker(features=ucp.Feature.RMA) as worker:
        assert worker.context.features == ucp.Feature.RMA | ucp.Feature.WAKEUP


async def test_address_tells_the_worker_apart(worker: ucp.Worker) -> None:
    assert 0 < worker.address.uid < 2**64
    assert ucp.WorkerAddress(bytes(worker.address)).uid == worker.address.uid
    async with ucp.open_worker() as other:
        assert other.address.uid != worker.address.uid


# ---- endpoints ----


async def test_client_id(transports: str, worker: ucp.Worker) -> None:
    async with await open_raw_listener(worker) as listener:
        for client_id in (None, 1, 2**64 - 1):
            async with ucp.open_worker(config={"TLS": transports}, client_id=client_id, admit=["127.0.0.1"]) as other:
                assert other.attributes().client_id == client_id
                endpoint = await other.open_endpoint(listener.address)
                with trio.fail_after(15):
                    request = await listener.accept_request()
                assert request.client_id == client_id
                server = await request.accept()
                await endpoint.tag_send(b"x", 1)
                await worker.tag_receive(bytearray(1), 1)
                endpoint.abort()
                server.abort()


async def test_client_id_of_a_connection(transports: str, worker: ucp.Worker) -> None:
    """A Connection's client tells it, too, and its server's raw requests need not care."""
    async with ucp.open_worker(config={"TLS": transports}, client_id=7) as other:
        async with open_pair(other, worker) as (client, server):
            await client.send(b"x")
            assert await server.receive() == b"x"


async def test_names_of_endpoints(worker: ucp.Worker) -> None:
    async with await open_raw_listener(worker) as listener:
        client = await worker.open_endpoint(listener.address, name="client")
        server = await (await listener.accept_request()).accept(name="server")
        assert (client.name, server.name) == ("client", "server")
        unnamed = await worker.open_endpoint(worker.address)
        assert unnamed.name  # UCX's own
        for endpoint in (client, server, unnamed):
            endpoint.abort()
        assert client.name == "client"
        assert unnamed.name


async def test_evaluate(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        with trio.fail_after(15):
            while True:  # the connection is made meanwhile
                try:
                    client.evaluate(1)
                    break
                except trio_ucx.UCXError as error:
                    assert error.status is ucp.Status.NO_RESOURCE and "not up yet" in str(error)
                    await trio.sleep(0.001)
        await client.tag_send(b"x", 1)
        await worker.tag_receive(bytearray(1), 1)
        times = [client.evaluate(size) for size in (0, 1000, 2**30)]
        assert times == sorted(times) and 0 < times[0] < times[2] and math.isfinite(times[2])
        server.abort()
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError):
            while True:
                client.evaluate(1)
                await trio.sleep(0.001)
        client.abort()
        with pytest.raises(trio.ClosedResourceError):
            client.evaluate(1)


async def test_evaluate_in_unified_mode() -> None:
    """There UCX would look up the wrong interface."""
    async with ucp.open_worker(config={"TLS": "self,tcp", "UNIFIED_MODE": "y"}) as worker:
        endpoint = await worker.open_endpoint(worker.address)
        with pytest.raises(trio_ucx.UCXError, match="UNIFIED_MODE"):
            endpoint.evaluate(1)
        endpoint.abort()


@pytest.mark.skipif(_native.ucx.version < (1, 14), reason="UCX 1.13 cannot be asked")
async def test_transports_are_one_per_lane(transports: str, worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, server):
        await client.tag_send(b"x", 1)
        await worker.tag_receive(bytearray(1), 1)
        for endpoint in (client, server):
            assert_transports(endpoint, transports)
            assert all(lane.name and lane.device for lane in endpoint.transports)


@pytest.mark.skipif(_native.ucx.version < (1, 14), reason="UCX 1.13 cannot be asked")
@pytest.mark.parametrize("end", ["abort", "aclose"])
async def test_what_is_known_of_an_endpoint_that_was_closed(worker: ucp.Worker, end: str) -> None:
    """Nobody asked before."""
    async with open_raw_pair(worker) as (client, server):
        for _ in range(2):
            await client.tag_send(b"x", 1)
            await worker.tag_receive(bytearray(1), 1)
        addresses = server.remote_address, server.local_address
        client.abort() if end == "abort" else await client.aclose()
        assert client.transports
        assert (client.local_address, client.remote_address) == addresses


async def test_error_mode_failover(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    if ucp.library().version >= (1, 21):
        endpoint = await worker.open_endpoint(worker.address, error_mode=ucp.ErrorMode.FAILOVER)
        assert endpoint.alive and endpoint.evaluate(1) > 0
        endpoint.abort()  # UCX 1.22 can do little else with it
        monkeypatch.setattr(_endpoint_options, "FAILOVER_UCX", (99, 0))
    with pytest.raises(NotImplementedError, match=r"needs UCX 1\.21"):
        await worker.open_endpoint(worker.address, error_mode=ucp.ErrorMode.FAILOVER)


# ---- where from ----


@pytest.mark.parametrize("how", ["connect", "open_ucx_stream"])
async def test_local_address(worker: ucp.Worker, how: str) -> None:
    """The server is at one address of this machine, and sees that the client comes from another."""
    mine = own_address()
    async with open_listener(worker) as listener:
        if how == "connect":
            client = await trio_ucx.connect(listener.address, worker=worker, local_address=mine).__aenter__()
        else:
            client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker, local_address=mine)
        async with client, await listener.accept() as server:
            assert server.remote_address is not None and server.remote_address[0] == mine
            assert client.local_address == server.remote_address
            await client.send(b"x")
            assert await server.receive() == b"x"


async def test_local_address_of_a_raw_endpoint(worker: ucp.Worker) -> None:
    mine = own_address()
    async with await open_raw_listener(worker) as listener:
        endpoint = await worker.open_endpoint(listener.address, local_address=mine)
        with trio.fail_after(15):
            request = await listener.accept_request()
        assert request.client_address[0] == mine
        request.reject()
        endpoint.abort()


@pytest.mark.parametrize(
    ("local", "number", "match"),
    [
        ("::1", errno.EAFNOSUPPORT, "incompatible with the remote address 127.0.0.1"),
        ("198.51.100.1", errno.EADDRNOTAVAIL, "198.51.100.1"),
        ("127.0.0.99", errno.EADDRNOTAVAIL, "no network interface"),  # the kernel would bind to it, UCX then hangs
    ],
)
async def test_local_address_that_is_not_local(worker: ucp.Worker, local: str, number: int, match: str) -> None:
    port = free_port()
    if "interface" not in match:  # a control socket may be bound to such an address
        with pytest.raises(OSError, match=match.partition(" the ")[0]) as caught:
            await trio_ucx.open_ucx_stream("127.0.0.1", port, worker=worker, local_address=local)
        assert caught.value.errno == number
    with pytest.raises(OSError, match=match) as caught:
        await open_raw_endpoint(worker, ("127.0.0.1", port), local_address=local)
    assert caught.value.errno == number


# ---- what is in flight ----


async def test_describing_operations(worker: ucp.Worker) -> None:
    in_flight = internals(worker).in_flight
    async with open_raw_pair(worker) as (client, _):
        with trio.move_on_after(0.05) as scope:
            await client.tag_send(bytes(2**20), 7)
        assert scope.cancelled_caught
        [sending] = [operation.describe() for operation in in_flight.values()]
        assert "sending a message" in sending and internals(client).label in sending and "detached" in sending
        assert "1048576" in sending, "UCX's own words say the length"
        await worker.tag_receive(bytearray(2**20), 7)
        await until(lambda: not in_flight)
        await client.aclose()


async def test_describing_what_ucx_cannot_be_asked_about_any_more(worker: ucp.Worker) -> None:
    async with open_raw_pair(worker) as (client, _):
        with trio.move_on_after(0.05):
            await client.tag_send(bytes(2**20), 7)
        client.abort()
        operations = list(internals(worker).in_flight.values())
        assert all(operation.describe() for operation in operations)  # some of these may have ended
    await close_worker(worker)
    assert all(operation.describe() for operation in operations)


async def test_close_that_times_out_says_what_was_under_way(transports: str) -> None:
    async with open_peer("silent", 2**25, transports=transports) as peer:
        address, _ = await peer.hear()
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            client = await trio_ucx.open_ucx_stream(*address, worker=worker, close_timeout=0.3)
            client.send_nowait(bytes(2**20))
            with pytest.raises(trio.BrokenResourceError, match="within close_timeout, 0.3 seconds") as caught:
                await client.aclose()
            assert "under way: sending a message" in str(caught.value)
            assert "1048576" in str(caught.value)


async def test_connecting_that_times_out_says_what_was_under_way(worker: ucp.Worker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        with pytest.raises(TimeoutError, match="it did not answer; is it a trio_ucx listener"):
            await trio_ucx.open_ucx_stream(*deaf.getsockname(), worker=worker, connect_timeout=1)


async def test_operations_that_did_not_end_in_a_message() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        engine = internals(worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.tag_receive, bytearray(5), 99)
            await trio.testing.wait_all_tasks_blocked(0.01)
            [operation] = engine.in_flight.values()
            text = under_way([operation] * 7)
            assert text.startswith("; under way: receiving a message: ") and text.endswith("; and 3 more")
            nursery.cancel_scope.cancel()
    assert under_way([]) == ""


# ---- keepalive ----


def test_keepalive_interval_as_options() -> None:
    with ucp.open_context(keepalive_interval=2.5) as context:
        assert context.config["KEEPALIVE_INTERVAL"] == "2.500000s"
        assert context.config["KEEPALIVE_NUM_EPS"] == "inf"
        in_force = dict(line.partition("=")[::2] for line in context._config_text().splitlines())
        match = re.fullmatch(r"([\d.]+)(us|ms|s)", in_force["UCX_KEEPALIVE_INTERVAL"])
        assert match is not None
        assert float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1}[match[2]] == pytest.approx(2.5)
    for off in (0, math.inf):
        with ucp.open_context(keepalive_interval=off) as context:
            assert context.config["KEEPALIVE_INTERVAL"] == "inf"
    with ucp.open_context({"KEEPALIVE_NUM_EPS": 5}, keepalive_interval=1) as context:
        assert context.config["KEEPALIVE_NUM_EPS"] == "5"
    with ucp.open_context() as context:
        assert "KEEPALIVE_INTERVAL" not in context.config


@pytest.mark.skipif(_native.ucx.version < (1, 17), reason="older UCX takes TCP's keepalive from the environment only")
async def test_peer_whose_network_went_away_is_noticed() -> None:
    with open_network() as network:
        here, there, address = network.host(), network.host(), "10.77.0.2"
        network.cable((here, "cable", "10.77.0.1/24"), (there, "cable", f"{address}/24"))
        await network.ready()
        async with (
            open_peer("silent", 2**20, address, transports="tcp", under=there.under) as server,
            open_peer("waiting", address, 1, transports="tcp", under=here.under, UCX_LOG_LEVEL="fatal") as client,
        ):
            [_, port], _ = await server.hear()
            await client.tell(port)
            assert await client.hear() == "connected"
            await client.tell()
            since = trio.current_time()
            there.down("cable")
            how, _ = await client.hear()
            assert how == "PeerLost"
            assert 1 < trio.current_time() - since < 12  # UCX's own interval is 20 seconds, and the kernel's two hours
