"""What is taken for granted of UCX (the table in ``_native/native.h``) and tested nowhere else.

Tests with the fixture ``transports`` hold over any transport, RDMA included. Those for RDMA alone fake what UCX does.
"""

from __future__ import annotations

import random

import pytest
import trio
from helpers import open_pair, open_raw_pair, pattern

from trio_ucx import ucp
from trio_ucx._rules import wire
from trio_ucx.testing import internals
from trio_ucx.ucp._engine.endpoint_core import EndpointCore
from trio_ucx.ucp._quirks import option_limits
from trio_ucx.ucp._quirks.default_options import RENDEZVOUS_THRESHOLD
from trio_ucx.ucp._rma import access_paths

#: A segment of UD where Ethernet has its usual MTU is a little shorter than 1 KiB.
SHORT_SEGMENT = "1000"


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options with which TCP has segments as short as UD's."""
    monkeypatch.setattr(option_limits, "LIMITS", ())
    return {"TLS": "tcp", "TCP_TX_SEG_SIZE": SHORT_SEGMENT, "TCP_RX_SEG_SIZE": SHORT_SEGMENT}


def pretend_to_use_ud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndpointCore, "lanes", lambda core: [b"ud_verbs/rxe0:1"])


async def test_small_messages_in_several_pieces(
    short_segments: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_use_ud(monkeypatch)
    async with ucp.open_worker(config=short_segments) as worker, ucp.open_worker(config=short_segments) as other:
        async with open_pair(worker, other) as (client, server), trio.open_nursery() as nursery:

            async def send(size: int, count: int) -> None:
                for number in range(count):
                    await client.send(pattern(size, number))

            with trio.fail_after(60):
                for size in (10, 980, 1000, wire.SMALL_MESSAGE, wire.SMALL_MESSAGE + 1, 5000):
                    nursery.start_soon(send, size, 500)
                    for number in range(500):
                        assert await server.receive() == pattern(size, number)
        assert internals(worker).counters["batches"] == 0  # receivers take a batch only in one piece


@pytest.mark.parametrize(("lane", "by_messages"), [(b"ud_verbs/mlx5_0:1", True), (b"rc_verbs/mlx5_0:1", False)])
async def test_ud_does_not_put_by_hardware(
    worker: ucp.Worker, lane: bytes, by_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX emulates that by messages, as over TCP, and ends the owner's process when a peer dies meanwhile."""
    async with open_raw_pair(worker) as (client, _):
        monkeypatch.setattr(EndpointCore, "lanes", lambda core: [lane])
        assert access_paths._is_emulated(client._core) == by_messages


async def test_order_of_messages(worker: ucp.Worker) -> None:
    """Messages of one endpoint are found in the order in which they were posted, short, long or by rendezvous."""
    sizes = [0, 1, 100, 980, 1024, 4096, 8192, 20_000, RENDEZVOUS_THRESHOLD - 1, RENDEZVOUS_THRESHOLD, 300_000] * 6
    random.Random(59).shuffle(sizes)
    async with open_raw_pair(worker) as (client, _):
        with trio.fail_after(60):
            async with worker.open_request_group() as group:
                for tag, size in enumerate(sizes):
                    group.tag_send(client, pattern(size, tag), tag)
                for tag, size in enumerate(sizes):
                    await worker.tag_wait(0, 0)
                    message = worker.tag_probe(0, 0, remove=True)
                    assert message is not None and (message.sender_tag, message.length) == (tag, size)
                    buffer = bytearray(size)
                    assert await worker.tag_receive_message(message, buffer) == (size, tag)
                    assert buffer == pattern(size, tag)


async def test_what_the_rendezvous_threshold_says(worker: ucp.Worker) -> None:
    """Shorter messages leave although nobody receives them; the others stay with their sender until then."""
    async with open_raw_pair(worker) as (client, _), trio.open_nursery() as nursery:
        with trio.fail_after(60):
            await client.tag_send(bytes(RENDEZVOUS_THRESHOLD - 1), 1)
            sent = trio.Event()

            async def send() -> None:
                await client.tag_send(bytes(RENDEZVOUS_THRESHOLD), 2)
                sent.set()

            nursery.start_soon(send)
            await worker.tag_wait(2)
            for _ in range(20):
                await trio.sleep(0.001)
            assert not sent.is_set()
            for tag in 1, 2:
                await worker.tag_receive(bytearray(RENDEZVOUS_THRESHOLD), tag)
            await sent.wait()
