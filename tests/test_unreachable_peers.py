"""Errors about an unreachable peer say only what is known, and what to do."""

from __future__ import annotations

import errno
import os
from typing import Any

import attrs
import pytest
import trio
from helpers import open_listener, open_peer, open_raw_endpoint, open_raw_listener
from injected_faults import Library
from samples import sample, some_worker

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import handshake as handshake_side
from trio_ucx._util import process as _process
from trio_ucx._util.process import NOBODY, has_ended, open_pidfd, start_time, this_process
from trio_ucx.testing import internals
from trio_ucx.ucp import _connecting
from trio_ucx.ucp._hints import hint
from trio_ucx.ucp._status import Status

RELEASE = ".".join(map(str, ucp.library().version[:2]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", [ucp.ErrorMode.PEER, ucp.ErrorMode.NONE])
@pytest.mark.parametrize("alone", [False, True])
async def test_address_of_a_dead_process(transports: str, alone: bool, mode: ucp.ErrorMode) -> None:
    """Over shared memory, opening an endpoint fails; over TCP, the first operation does."""
    if alone and transports == "tcp":
        transports = "tcp,posix,self"
    elif alone:
        transports = "sm,self"
    config = {"TLS": transports}
    async with open_peer("raw_listener", transports=transports) as peer:
        _, text = await peer.hear()
        peer.process.kill()
    address = ucp.WorkerAddress(bytes.fromhex(text))
    async with ucp.open_worker(config=config) as worker:
        if "sm" in transports:
            with pytest.raises(OSError, match="its process has ended") as caught:
                await worker.open_endpoint(address, error_mode=mode)
            assert caught.value.errno == errno.ECONNREFUSED
            assert isinstance(caught.value.__cause__, trio_ucx.UCXError)
            unknown = ucp.WorkerAddress.from_ucx(address.ucx, shared_memory=True)
            worker.admit("127.0.0.1")
            with pytest.raises(OSError, match="its shared memory is not there"):
                await worker.open_endpoint(unknown, error_mode=mode)
            return
        endpoint = await worker.open_endpoint(address, error_mode=mode)
        with trio.fail_after(20), pytest.raises(trio.BrokenResourceError):
            await endpoint.tag_send(b"x", 1)
            await endpoint.flush()
        endpoint.abort()


async def test_refusal_says_nothing_about_transports(transports: str, worker: ucp.Worker) -> None:
    """No process listens at that port: UCX's own message, which differs from time to time, says it all."""
    for status in (Status.NOT_CONNECTED, Status.CONNECTION_RESET, Status.ENDPOINT_TIMEOUT, Status.CANCELED):
        assert hint(transports, status, None) == ""
    endpoint = await open_raw_endpoint(worker, ("127.0.0.1", 9))
    with trio.fail_after(20), pytest.raises(trio.BrokenResourceError) as caught:
        await endpoint.tag_send(b"x", 1)
        await endpoint.flush()
    endpoint.abort()
    assert "transports" not in str(caught.value) and "need" not in str(caught.value)


async def test_socket_address_over_shared_memory_alone() -> None:
    """Whether UCX first notices that no process listens there, or that it has no transport."""
    async with ucp.open_worker(config={"TLS": "sm,self"}) as worker:
        for status in (Status.UNREACHABLE, Status.NOT_CONNECTED, Status.REJECTED):
            assert "Socket addresses need tcp" in hint(worker.context._transports, status, None)
        endpoint = await open_raw_endpoint(worker, ("127.0.0.1", 9))
        expected = r"transports in use: sm,self. Socket addresses need tcp"
        with trio.fail_after(20), pytest.raises(trio.BrokenResourceError, match=expected):
            await endpoint.tag_send(b"x", 1)
            await endpoint.flush()
        endpoint.abort()


def test_socket_address_that_tcp_does_not_reach() -> None:
    said = hint("tcp", Status.UNREACHABLE, None)
    assert "transports in use: tcp" in said and "need" not in said


async def test_address_without_a_common_transport() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as theirs, ucp.open_worker(config={"TLS": "sm,self"}) as ours:
        with pytest.raises(OSError, match="UCX of process [0-9]+ has no other transport: add tcp") as caught:
            await ours.open_endpoint(theirs.address)
        assert caught.value.errno == errno.EHOSTUNREACH and "route" not in str(caught.value)
        with pytest.raises(OSError, match="the address has tcp; transports in use here: sm,self") as caught:
            await ours.open_endpoint(ucp.WorkerAddress.from_ucx(theirs.address.ucx))
        assert caught.value.errno == errno.EHOSTUNREACH
    config = {"TLS": "sm,self", "MM_ERROR_HANDLING": "n"}
    async with ucp.open_worker(config={"TLS": "sm,self"}) as theirs, ucp.open_worker(config=config) as ours:
        with pytest.raises(OSError, match="one side's UCX has no error handling over shared memory"):
            await ours.open_endpoint(theirs.address)


@pytest.mark.parametrize("tls", [("tcp:aux,self", "tcp"), ("tcp", "tcp:aux,self")])
async def test_transports_that_only_connect(tls: tuple[str, str]) -> None:
    """As UD with ``TLS=rc``, against UD alone: UCX would end the process that has them."""
    theirs, ours = (ucp.open_worker(config={"TLS": each}) for each in tls)
    async with theirs as theirs, ours as ours, open_listener(theirs) as listener:
        with pytest.raises(OSError, match="no transport in common: .* (uses tcp, .*none|uses none, .*tcp)") as caught:
            await ours.open_endpoint(theirs.address)
        assert caught.value.errno == errno.EHOSTUNREACH
        with pytest.raises(OSError, match="refused the connection: .* no transport in common"):
            await trio_ucx.connect(listener.address, worker=ours, shared_memory=False).__aenter__()


@pytest.mark.parametrize(
    ("status", "number"), [(Status.ENDPOINT_TIMEOUT, errno.ETIMEDOUT), (Status.NO_MEMORY, errno.ENOMEM)]
)
async def test_a_greeting_that_fails_at_once(
    worker: ucp.Worker, status: Status, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host has the peer's address, and answers. The error says how UCX connects."""

    def fail(share: Any, frame: bytes, tag: int) -> None:
        raise share.error_of(status, "sending a message")

    monkeypatch.setattr(handshake_side, "post_bytes_send", fail)
    async with open_listener(worker) as listener, ucp.open_worker(config={"TLS": "tcp"}) as client:
        with (
            trio.fail_after(15),
            pytest.raises(OSError, match="connecting to .* over UCX: .*its UCX listens") as caught,
        ):
            await trio_ucx.connect(listener.address, worker=client).__aenter__()
    assert caught.value.errno == number
    assert isinstance(caught.value.__cause__, trio_ucx.UCXError)


def test_release_of_the_peer() -> None:
    def said(address: ucp.WorkerAddress) -> str:
        return hint("sm,self", Status.UNREACHABLE, address)

    assert f"its UCX is 1.9, and this one is {RELEASE}" in said(some_worker(release=(1, 9)))
    assert "its UCX" not in said(some_worker(release=ucp.library().version[:2]))
    assert "its UCX" not in said(ucp.WorkerAddress.from_ucx(sample("1.19.0 tcp")))


async def test_client_that_cannot_be_accepted(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the client's UCX is of another release, for instance: an OSError that says so, whatever UCX answers."""
    for status in (Status.UNREACHABLE, Status.INVALID_PARAM, Status.CONNECTION_RESET):
        async with await open_raw_listener(worker) as listener:
            endpoint = await worker.open_endpoint(listener.address)
            request = await listener.accept_request()
            with monkeypatch.context() as patch:
                patch.setattr(_connecting, "lib", Failing(int(status)))
                with pytest.raises(OSError) as caught:
                    await request.accept()
            endpoint.abort()
        assert caught.value.errno
        known = "its UCX is of another release" in str(caught.value)
        assert known == (status is not Status.CONNECTION_RESET)


class Failing(Library):
    """Accepting a request fails."""

    def __init__(self, status: int) -> None:
        self._status = status

    def tu_endpoint_from_request(self, worker: object, id: int, request: int, how: object, *out: Any) -> int:
        out[0][0] = True  # it was answered
        return self._status


def test_has_ended() -> None:
    ours = this_process()
    assert not has_ended(NOBODY) and not has_ended(ours)
    assert ours.pid == os.getpid()


@pytest.mark.parametrize("error", [errno.ENOENT, errno.EACCES, errno.EMFILE])
async def test_a_process_that_cannot_be_looked_at_has_not_ended(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``/proc`` may hide the processes of other users (``hidepid``), and there may be no descriptor left to read it."""

    def refuse(pid: int) -> list[str]:
        raise OSError(error, os.strerror(error))

    child = await trio.lowlevel.open_process(["sleep", "60"])
    process = attrs.evolve(this_process(), pid=child.pid, start=start_time(child.pid))
    monkeypatch.setattr(_process, "_stat", refuse)
    try:
        assert not has_ended(process)
        fd = open_pidfd(process)
        assert fd is not None
        os.close(fd)
    finally:
        child.kill()
        await child.wait()
    assert has_ended(process)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process)


async def test_no_descriptor_for_the_watch_of_a_process(
    transports: str, worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint that would not notice the end of its peer is not opened."""

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptors")

    async with open_peer("raw_listener", transports=transports) as peer:
        _, text = await peer.hear()
        monkeypatch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match="no descriptors"):
            await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(text)))
        assert not internals(worker).endpoints
        monkeypatch.undo()
        (await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(text)))).abort()
