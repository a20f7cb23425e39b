"""A local UCP program with UCX's default options, which lack the MM_ERROR_HANDLING that this library sets."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from helpers import assert_transports, open_peer, until

from trio_ucx import ucp

from .c_programs import compiled

SIZES = [1000, 300_000, 4 * 2**20]
#: Which side opens an endpoint to the other.
DIRECTIONS = ["ours", "theirs", "both"]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(Path(__file__).parent / "stock_peer.c", tmp_path_factory.mktemp("c"), "-Wall", "-Werror")


class Stock:
    """The program, running."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._said = b""

    async def line(self) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._said:
            chunk = await self._process.stdout.receive_some()
            assert chunk, "it ended"
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        return line.decode()

    async def tell(self, address: bytes) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(address.hex().encode() + b"\n")


@asynccontextmanager
async def running(program: Path, *arguments: object) -> AsyncIterator[Stock]:
    process = await trio.lowlevel.open_process(
        [program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        with trio.fail_after(30):
            yield Stock(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", ["peer", "none"])
async def test_messages(program: Path, transports: str, mode: str, direction: str, size: int) -> None:
    ours, theirs = direction in ("ours", "both"), direction in ("theirs", "both")
    sending, receiving = size if theirs else -1, size if ours else -1
    with ucp.open_context({"TLS": transports}) as context:
        async with (
            ucp.open_worker(context=context, admit=["127.0.0.1"]) as worker,
            running(program, mode, sending, receiving) as stock,
        ):
            blob = bytes.fromhex(await stock.line())
            address = ucp.WorkerAddress.from_ucx(blob)
            await stock.tell(worker.address.ucx)
            buffer = bytearray(size)

            async def send() -> None:
                endpoint = await worker.open_endpoint(address, error_mode=ucp.ErrorMode[mode.upper()])
                try:
                    await endpoint.tag_send(bytes(size), 1)
                    await endpoint.flush()
                    # With error handling, it could not answer over shared memory.
                    assert_transports(endpoint, "tcp" if mode == "peer" else transports)
                finally:
                    if mode == "peer":
                        endpoint.abort()  # what was flushed arrives
                    else:
                        await endpoint.aclose()

            async with trio.open_nursery() as nursery:
                if theirs:
                    nursery.start_soon(worker.tag_receive, buffer, 2)
                if ours:
                    nursery.start_soon(send)
            assert buffer == bytes([7 if theirs else 0]) * size
            expected = {"sent: Success"} if theirs else set()
            expected |= {"received: Success"} if ours else set()
            while expected:
                line = await stock.line()
                if not line.startswith("failed"):  # UCX reports that this side has closed
                    expected.remove(line)


@pytest.mark.parametrize("kind", ["sysv", "posix"])
async def test_both_sides_wake_each_other(program: Path, kind: str) -> None:
    """The program has abstract Unix sockets, and ours have paths."""
    async with (
        ucp.open_worker(config={"TLS": f"{kind},self"}) as worker,
        running(program, "none", 8, 8, "asleep") as stock,
    ):
        address = ucp.WorkerAddress.from_ucx(bytes.fromhex(await stock.line()))
        buffer = bytearray(8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.tag_receive, buffer, 2)
            await trio.testing.wait_all_tasks_blocked(0.1)
            await stock.tell(worker.address.ucx)
            assert await stock.line() == "sent: Success"
        assert buffer == bytes([7]) * 8
        async with await worker.open_endpoint(address, error_mode=ucp.ErrorMode.NONE) as endpoint:
            await trio.sleep(0.2)  # it sleeps
            await endpoint.tag_send(bytes(8), 1)
            assert await stock.line() == "received: Success"
            assert_transports(endpoint, f"{kind},self")


async def test_peers_of_ours_use_shared_memory(worker: ucp.Worker, transports: str) -> None:
    """Because ``bytes(address)`` says how the peer is configured, or the caller does."""
    worker.admit("127.0.0.1")  # for those addresses that have no keys
    async with open_peer("raw_listener", transports=transports) as peer:
        _, address = await peer.hear()
        known = ucp.WorkerAddress(bytes.fromhex(address))
        assert known.shared_memory
        for one in (known, ucp.WorkerAddress.from_ucx(known.ucx, shared_memory=True)):
            async with await worker.open_endpoint(one) as endpoint:
                await endpoint.tag_send(b"x", 1)
                await endpoint.flush()
                assert_transports(endpoint, transports)
        async with await worker.open_endpoint(ucp.WorkerAddress.from_ucx(known.ucx)) as endpoint:
            await endpoint.tag_send(b"x", 1)
            await endpoint.flush()
            assert_transports(endpoint, "tcp")


async def test_address_says_whether_its_worker_handles_errors() -> None:
    for option, expected in ("y", True), ("n", False):
        async with ucp.open_worker(config={"MM_ERROR_HANDLING": option}) as worker:
            again = ucp.WorkerAddress(bytes(worker.address))
            assert again == worker.address and again.shared_memory is expected


@pytest.mark.parametrize(("sends", "receives"), ["ny", "yn"])
async def test_two_of_ours_with_different_options(sends: str, receives: str) -> None:
    """One side has MM_ERROR_HANDLING=n: both directions work, over TCP."""
    async with (
        ucp.open_worker(config={"MM_ERROR_HANDLING": sends}) as source,
        ucp.open_worker(config={"MM_ERROR_HANDLING": receives}) as target,
        await source.open_endpoint(target.address) as endpoint,
    ):
        buffer = bytearray(300_000)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(target.tag_receive, buffer, 5)
                await endpoint.tag_send(b"y" * len(buffer), 5)
            await endpoint.flush()
        assert buffer == b"y" * len(buffer)
        assert_transports(endpoint, "tcp")


async def test_shared_memory_alone_is_refused_with_what_to_do() -> None:
    config = {"TLS": "sm,self", "MM_ERROR_HANDLING": "n"}
    async with ucp.open_worker(config=config) as theirs, ucp.open_worker() as worker:
        with pytest.raises(OSError, match=r"MM_ERROR_HANDLING=n.*add tcp to its option TLS") as caught:
            await worker.open_endpoint(theirs.address)
        assert caught.value.errno
        with pytest.raises(OSError, match=r"MM_ERROR_HANDLING=y.*shared_memory=True.*ErrorMode.NONE.*tcp"):
            await worker.open_endpoint(ucp.WorkerAddress.from_ucx(theirs.address.ucx))
        endpoint = await worker.open_endpoint(theirs.address, error_mode=ucp.ErrorMode.NONE)
        await endpoint.tag_send(b"x", 1)
        await until(lambda: theirs.tag_probe(1))
        await theirs.tag_receive(bytearray(1), 1)
        await endpoint.aclose()
