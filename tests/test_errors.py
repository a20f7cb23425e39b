"""From UCX's status to an exception: one table, every row. And what an internal error does."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from helpers import open_listener, open_pair
from injected_faults import break_deliveries

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp import _status
from trio_ucx.ucp._memory.buffers import new_bytes


@pytest.mark.parametrize("status", [status for status in ucp.Status if status < 0])
def test_every_status_has_an_exception(status: ucp.Status) -> None:
    error = _status.error_from_status(status, "doing something")
    native = error if isinstance(error, trio_ucx.UCXError) else error.__cause__
    if status is ucp.Status.NO_MEMORY:
        assert isinstance(error, MemoryError)
    else:
        assert isinstance(native, trio_ucx.UCXError) and native.status is status
        assert isinstance(error, trio.BrokenResourceError) == (status in _status._BROKEN or -89 <= status <= -40)
    assert "doing something" in str(error)
    set_up = _status.os_error_from_status(status, "connecting", " (a hint)")
    assert set_up.errno == _status._ERRNO.get(status, errno.EIO)
    assert str(set_up) == f"[Errno {set_up.errno}] {set_up.__cause__} (a hint)"
    assert isinstance(set_up.__cause__, trio_ucx.UCXError) and set_up.__cause__.status is status


@pytest.mark.parametrize("status", range(-90, -38))
def test_failures_of_links_and_endpoints_are_ranges(status: int) -> None:
    """From -40 to -59 and from -60 to -89. UCX has a name for one of these statuses."""
    error = _status.error_from_status(status, "doing something")
    assert isinstance(error, trio.BrokenResourceError) == (-89 <= status <= -40)
    native = error.__cause__ or error
    assert isinstance(native, trio_ucx.UCXError) and f", {status})" in str(error)
    assert native.status is (ucp.Status.ENDPOINT_TIMEOUT if status == -80 else ucp.Status.UNKNOWN)
    set_up = _status.os_error_from_status(status, "connecting")
    assert set_up.errno == (errno.ETIMEDOUT if status == -80 else errno.EIO)


def test_without_a_hint_the_errno_is_explained() -> None:
    error = _status.os_error_from_status(ucp.Status.BUSY, "listening")
    assert str(error).endswith(os.strerror(errno.EADDRINUSE))


def test_ucx_error_says_what_ucx_says() -> None:
    assert str(trio_ucx.MessageTooLong(3, 2, "receiving")) == "receiving"  # UCX's words would say it was truncated
    assert trio_ucx.UCXError(-99, "x").status is ucp.Status.UNKNOWN
    assert "-99" in str(trio_ucx.UCXError(-99, "x"))
    assert str(trio_ucx.UCXError(-25, "reading", " (a hint)")).endswith(" (a hint)")


def test_new_bytes_are_not_shared() -> None:
    for size in (1, 2, 4095, 4096, 10_000):
        one, two = new_bytes(size), new_bytes(size)
        assert len(one) == size and one is not two
    assert new_bytes(1) is not bytes([0])


async def test_an_internal_error_in_a_delivery_breaks_its_connection_and_no_other(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(worker) as (client, server):

        async def expect_broken() -> None:
            with pytest.raises(trio.BrokenResourceError) as caught:
                await server.receive()
            cause: BaseException | None = caught.value
            while cause is not None and not isinstance(cause, ZeroDivisionError):
                cause = cause.__cause__
            assert isinstance(cause, ZeroDivisionError)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_broken)
            await trio.testing.wait_all_tasks_blocked()
            caplog.set_level(logging.CRITICAL, "trio_ucx")
            break_deliveries(server, monkeypatch)
            await client.send(b"x")
        with pytest.raises(trio.BrokenResourceError, match="aborted"):
            await client.receive()
        async with open_pair(worker) as (another, its_peer):
            await another.send(b"x")
            assert await its_peer.receive() == b"x"


async def test_what_was_closed_and_who_was_lost_are_named(worker: ucp.Worker, tmp_path: Path) -> None:
    """A Connection is no endpoint to its user, and the client of a Unix socket has a pid."""

    async def expect_closed(function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        with pytest.raises(trio.ClosedResourceError, match="this connection was closed"):
            await function(*arguments)

    with trio.fail_after(15):
        async with open_listener(worker, host=f"unix:{tmp_path}/socket") as listener:
            client = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
            server = await listener.accept()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect_closed, client.send, bytes(2**23))
                nursery.start_soon(expect_closed, client.receive)
                await trio.testing.wait_all_tasks_blocked()
                client.abort()
            await expect_closed(client.endpoint.tag_send, b"x", 1)
            with pytest.raises(trio_ucx.PeerLost) as lost:
                await server.receive(tag=7)
            assert str(lost.value).startswith(f"the connection to process {os.getpid()} broke: the peer aborted the ")
            server.abort()
