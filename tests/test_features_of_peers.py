"""What a peer's context was not opened for is refused at once: the peer would drop it in silence, or never answer.

One process owns memory of one context and has workers of others, each with other features.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from helpers import Peer, assert_free, open_peer, open_raw_pair, pattern
from outcome import Value
from remote import for_ucx

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp import chains

F = ucp.Feature
#: The features of the peer's workers.
FEATURES = [F.TAG, F.AM, F.STREAM, F.RMA, F.AMO32, F.AMO64, F.TAG | F.RMA, F.TAG | F.AMO64, ucp.DEFAULT_FEATURES, F.ALL]
SIZES = [8, 2**20]
WAYS = [
    ("tcp", "worker"),
    ("tcp,sm,self", "worker"),
    ("sm,self", "worker"),
    ("tcp", "connection"),
    ("tcp,sm,self", "connection"),
]


@attrs.frozen
class End:
    """Our end: an endpoint to a worker of the peer's, whose context has these features, and the peer's memory."""

    peer: Peer
    endpoint: ucp.Endpoint
    features: F
    remote: dict[str, ucp.RemoteMemory]

    async def heard(self, kind: str, size: int) -> None:
        assert await self.peer.hear() == [kind, size]

    async def chain(self, add: Callable[[chains.RequestChain], Any]) -> None:
        chain = self.endpoint.worker.new_chain()
        try:
            add(chain)
            assert all(isinstance(outcome, Value) for outcome in await chain.run())
            await chain.wait_idle()
        finally:
            chain.close()

    async def group(self, add: Callable[[ucp.RequestGroup], Any]) -> None:
        refused = []
        async with self.endpoint.worker.open_request_group() as group:
            try:
                add(group)
            except RuntimeError as error:
                refused.append(error)
        if refused:
            raise refused[0]


Action = Callable[[End, bytearray], Awaitable[None]]


async def tag_send(end: End, data: bytearray) -> None:
    await end.endpoint.tag_send(data, 5)
    await end.heard("tag", len(data))


async def tag_send_bytes(end: End, data: bytearray) -> None:
    await end.endpoint.tag_send(bytes(data), 5)
    await end.heard("tag", len(data))


async def tag_send_sync(end: End, data: bytearray) -> None:
    await end.endpoint.tag_send_sync(data, 5)
    await end.heard("tag", len(data))


async def tag_send_in_group(end: End, data: bytearray) -> None:
    await end.group(lambda group: group.tag_send(end.endpoint, data, 5))
    await end.heard("tag", len(data))


async def tag_send_in_chain(end: End, data: bytearray) -> None:
    await end.chain(lambda chain: chain.tag_send(end.endpoint, data, 5))
    await end.heard("tag", len(data))


async def am_send(end: End, data: bytearray, protocol: ucp.SendProtocol = ucp.SendProtocol.AUTO) -> None:
    await end.endpoint.am_send(7, data, b"header", reply=True, protocol=protocol)
    await end.heard("am", len(data))


async def am_send_in_group(end: End, data: bytearray) -> None:
    await end.group(lambda group: group.am_send(end.endpoint, 7, data))
    await end.heard("am", len(data))


async def am_send_in_chain(end: End, data: bytearray) -> None:
    await end.chain(lambda chain: chain.am_send(end.endpoint, 7, data))
    await end.heard("am", len(data))


async def stream_send(end: End, data: bytearray, *, in_group: bool = False) -> None:
    if in_group:
        await end.group(lambda group: group.stream_send(end.endpoint, data))
    else:
        await end.endpoint.stream_send(data)
    echoed = bytearray(len(data))
    assert await end.endpoint.stream_receive(echoed, exact=True) == len(data)
    assert echoed == data


async def stream_receive(end: End, data: bytearray) -> None:
    """Waits for nothing if the peer cannot send on a stream."""
    if F.STREAM in end.features:
        await stream_send(end, data)
    else:
        await end.endpoint.stream_receive(data)


async def stream_receive_some(end: End, data: bytearray) -> None:
    if F.STREAM in end.features:
        await end.endpoint.stream_send(data)
        received = b""
        while len(received) < len(data):
            with await end.endpoint.stream_receive_some() as piece:
                received += bytes(piece)
        assert received == data
    else:
        await end.endpoint.stream_receive_some()


MESSAGES: dict[F, list[Action]] = {
    F.TAG: [tag_send, tag_send_bytes, tag_send_sync, tag_send_in_group, tag_send_in_chain],
    F.AM: [
        am_send,
        partial(am_send, protocol=ucp.SendProtocol.EAGER),
        partial(am_send, protocol=ucp.SendProtocol.RENDEZVOUS),
        am_send_in_group,
        am_send_in_chain,
    ],
    F.STREAM: [stream_send, partial(stream_send, in_group=True), stream_receive, stream_receive_some],
}


async def put_and_get(remote: ucp.RemoteMemory, end: End, data: bytearray) -> None:
    await remote.put(data)
    await remote.flush()
    received = bytearray(len(data))
    await remote.get_into(received)
    assert received == data


async def get(remote: ucp.RemoteMemory, end: End, data: bytearray) -> None:
    assert len(await remote.get(0, len(data))) == len(data)


async def put_in_chain(remote: ucp.RemoteMemory, end: End, data: bytearray) -> None:
    await end.chain(lambda chain: chain.put(remote, data))
    assert await remote.get(0, len(data)) == data


async def get_in_chain(remote: ucp.RemoteMemory, end: End, data: bytearray) -> None:
    await end.chain(lambda chain: chain.get(remote, into=data))


async def add(remote: ucp.RemoteMemory, end: End, data: bytearray) -> None:
    await remote.atomic(ucp.AtomicOp.ADD, 1)
    await remote.flush()
    end.endpoint.worker.fence()


async def fetch_add(remote: ucp.RemoteMemory, end: End, data: bytearray, *, bits: int = 64) -> None:
    before = await remote.fetch_add(1, bits=bits)
    assert await remote.fetch_add(1, bits=bits) == before + 1


async def fetch_add_in_chain(remote: ucp.RemoteMemory, end: End, data: bytearray) -> None:
    await end.chain(lambda chain: chain.fetch_add(remote, 1))


TRANSFERS = [put_and_get, get, put_in_chain, get_in_chain]
ATOMICS: list[Any] = [add, fetch_add, partial(fetch_add, bits=32), fetch_add_in_chain]


@asynccontextmanager
async def open_ends(transports: str, way: str) -> AsyncIterator[list[End]]:
    """For each of FEATURES an endpoint to a worker whose context has them."""
    features = [each for each in FEATURES if way == "worker" or F.TAG in each]
    async with (
        open_peer("two_contexts", [int(each) for each in features], transports=transports) as peer,
        ucp.open_worker(config={"TLS": transports}, features=F.ALL) as worker,
        AsyncExitStack() as stack,
    ):
        addresses, listeners, descriptors = await peer.hear()
        await peer.tell(bytes(worker.address).hex())
        found = []
        for each, address, listener in zip(features, addresses, listeners, strict=True):
            if way == "connection":
                connection = await stack.enter_async_context(trio_ucx.connect(tuple(listener), worker=worker))
                endpoint = connection.endpoint
            else:
                endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address)))
                stack.callback(endpoint.abort)
            allocated, registered = map(bytes.fromhex, descriptors)
            remote = {
                "allocated": stack.enter_context(endpoint.attach(allocated)),
                "registered": stack.enter_context(endpoint.attach(registered)),
                "of a raw peer": stack.enter_context(endpoint.attach(for_ucx(registered))),
            }
            found.append(End(peer, endpoint, F(each) | F.WAKEUP, remote))
        yield found


async def expect(action: Any, end: End, data: bytearray, missing: F) -> None:
    """Runs an action, or expects that it is refused for a missing feature; either way it leaves no operation."""
    with trio.fail_after(60):
        if missing:
            with pytest.raises(RuntimeError, match=rf"opened without.* ucp\.Feature\.{missing.name}$"):
                await action(end, data)
        else:
            await action(end, data)
    assert_free(data)
    assert end.endpoint.statistics().left_over_operations == 0
    assert end.endpoint.statistics().operations_in_flight == 0, trio_ucx.report()
    assert end.endpoint.alive


@pytest.mark.sample(2)
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_messages_and_streams(transports: str, way: str) -> None:
    async with open_ends(transports, way) as peers:
        for end in peers:
            for needed, actions in MESSAGES.items():
                for action in actions:
                    for size in SIZES:
                        missing = F(0) if needed in end.features else needed
                        await expect(action, end, bytearray(pattern(size)), missing)
            with trio.fail_after(60):
                await end.endpoint.flush()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("transports", "way"), WAYS)
async def test_remote_memory(transports: str, way: str) -> None:
    """Of another context than that of the worker at the other end of the endpoint."""
    async with open_ends(transports, way) as peers:
        for end in peers:
            for kind, remote in end.remote.items():
                mapped = kind == "allocated" and transports != "tcp"
                answered = mapped or (kind != "of a raw peer" and F.AM in end.features)
                transferred = answered or F.RMA in end.features
                for size in SIZES:
                    for transfer in TRANSFERS:
                        missing = F(0) if transferred else F.RMA
                        await expect(partial(transfer, remote), end, bytearray(pattern(size)), missing)
                for atomic in ATOMICS:
                    if F.AM in end.features and not answered:
                        with pytest.raises(RuntimeError, match="no token"):
                            await atomic(remote, end, bytearray(8))
                    else:
                        await expect(partial(atomic, remote), end, bytearray(8), F(0) if answered else F.AM)


async def test_where_the_features_are_not_known(worker: ucp.Worker) -> None:
    """Endpoints by socket address, those of UCX's own addresses, and those of version 5 refuse nothing."""
    config = {"TLS": worker.context._transports}
    async with ucp.open_worker(config=config, features=F.ALL, admit=["127.0.0.1"]) as able:
        blob = ucp.WorkerAddress.from_ucx(worker.address.ucx, shared_memory=True)
        unknown, known = await able.open_endpoint(blob), await able.open_endpoint(worker.address)
        assert internals(unknown).features == F.ALL
        assert internals(known).features == worker.context.features
        with trio.fail_after(60):
            await unknown.tag_send(b"x", 1)
            assert await worker.tag_receive(bytearray(1), 1) == (1, 1)
        unknown.abort()
        known.abort()
        async with open_raw_pair(able, worker) as pair:
            assert [internals(endpoint).features for endpoint in pair] == [F.ALL, worker.context.features]
        told = ucp.WorkerAddress.from_ucx(worker.address.ucx, shared_memory=True, features=F.AM)
        async with await able.open_endpoint(told) as endpoint:
            with pytest.raises(RuntimeError, match="sending tag messages needs Feature.TAG at the peer, too"):
                await endpoint.tag_send(b"x", 1)
