"""UCX's own example program, unmodified, as a client and as a server of this library."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from helpers import free_port, open_raw_endpoint, open_raw_listener, until

import trio_ucx
from trio_ucx import ucp

from .c_programs import compiled

#: What the example sends; it receives whatever comes.
TAG = 0xCAFE


@pytest.fixture(scope="session")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ucp_client_server.c`` of the UCX in use."""
    if ucp.library().system:
        pytest.skip("the distribution's UCX brings no examples; libucx-cu12 does")
    source = Path(ucp.library().file).parent.parent / "share" / "ucx" / "examples" / "ucp_client_server.c"
    if not source.exists():
        pytest.skip(f"this UCX has no examples: {source}")
    return compiled(source, tmp_path_factory.mktemp("c"))


class Program:
    """A running example program, which prints to a file, line by line (``stdbuf``), much."""

    def __init__(self, process: trio.Process, output: Path) -> None:
        self.process = process
        self.output = output

    async def printed(self, text: bytes) -> None:
        await until(lambda: text in self.output.read_bytes())


@asynccontextmanager
async def running(command: list[str | Path], transports: str) -> AsyncIterator[Program]:
    environment = {**os.environ, "UCX_TLS": transports}
    if "sm" in transports:
        environment["UCX_MM_ERROR_HANDLING"] = "y"
    with tempfile.NamedTemporaryFile() as output:
        process = await trio.lowlevel.open_process(
            # It prints messages from its stack, which must have room for them.
            ["sh", "-c", 'ulimit -s 262144 && exec stdbuf -oL "$@"', "sh", *(str(word) for word in command)],
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            yield Program(process, Path(output.name))
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()


class Talk:
    """What the example does in one of its modes, our side of it."""

    def __init__(self, mode: str, worker: ucp.Worker, size: int) -> None:
        self.mode = mode
        self.worker = worker
        self.size = size
        self.messages: ucp.ActiveMessages | None = None

    async def send(self, endpoint: ucp.Endpoint, data: bytes) -> None:
        if self.mode == "tag":
            await endpoint.tag_send(data, TAG)
        elif self.mode == "stream":
            await endpoint.stream_send(data)
        else:
            await endpoint.am_send(0, data)

    async def receive(self, endpoint: ucp.Endpoint) -> bytes:
        if self.mode == "am":
            assert self.messages is not None
            message = await self.messages.receive()
            assert message.header == b""
            return await message.receive()
        buffer = bytearray(self.size)
        if self.mode == "stream":
            assert await endpoint.stream_receive(buffer, exact=True) == self.size
        else:
            length, tag = await self.worker.tag_receive(buffer, 0, 0)
            print("TAG", tag)
            assert length == self.size and tag in (TAG, 0)
        return bytes(buffer)


@asynccontextmanager
async def open_talk(mode: str, transports: str, size: int) -> AsyncIterator[Talk]:
    features = ucp.Feature.STREAM if mode == "stream" else ucp.DEFAULT_FEATURES
    with ucp.open_context({"TLS": transports}, features=features) as context:
        async with ucp.open_worker(context=context) as worker:
            talk = Talk(mode, worker, size)
            if mode == "am":
                with worker.open_active_messages(0) as talk.messages:
                    yield talk
            else:
                yield talk


#: Bytes of a buffer, buffers of a message, messages.
SHAPES = [(16, 1, 1), (16, 1, 10), (65_535, 1, 2), (100_000, 1, 3), (5_000, 3, 2), (2**24, 1, 2)]


def arguments(mode: str, port: int, size: int, vector: int, iterations: int) -> list[str]:
    return ["-p", str(port), "-c", mode, "-s", str(size), "-v", str(vector), "-i", str(iterations)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["tag", "stream", "am"])
@pytest.mark.parametrize(("size", "vector", "iterations"), SHAPES)
async def test_c_program_as_client(
    executable: Path, transports: str, mode: str, size: int, vector: int, iterations: int
) -> None:
    async with (
        open_talk(mode, transports, size * vector) as talk,
        await open_raw_listener(talk.worker) as listener,
    ):
        host, port = listener.address
        command = [executable, "-a", host, *arguments(mode, port, size, vector, iterations)]
        async with running(command, transports) as program:
            with trio.fail_after(20):
                endpoint = await (await listener.accept_request()).accept()
                try:
                    first = await talk.receive(endpoint)
                    assert first != bytes(size * vector)  # a known text
                    for _ in range(iterations - 1):
                        assert await talk.receive(endpoint) == first
                    if mode == "am":  # it opens its side of that only when its sends are done, and does not say when
                        await trio.sleep(0.3)
                    # The program's FIN. It closes by force when it has it, which a large send may take for a failure.
                    async with trio.open_nursery() as nursery:

                        async def send_fin() -> None:
                            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                                await talk.send(endpoint, first)
                                while mode == "am":  # perhaps it did not listen yet
                                    await trio.sleep(2)
                                    with contextlib.suppress(trio_ucx.UCXError):
                                        await talk.send(endpoint, first)

                        nursery.start_soon(send_fin)
                        await program.printed(b"received FIN message")
                        nursery.cancel_scope.cancel()
                    assert await program.process.wait() == 0
                finally:
                    endpoint.abort()


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["tag", "stream", "am"])
@pytest.mark.parametrize(("size", "vector", "iterations"), SHAPES)
async def test_c_program_as_server(
    executable: Path, transports: str, mode: str, size: int, vector: int, iterations: int
) -> None:
    port = free_port()
    total = size * vector
    data = (bytes(range(97, 123)) * (total // 26 + 1))[:total]
    async with (
        open_talk(mode, transports, total) as talk,
        running([executable, *arguments(mode, port, size, vector, iterations)], transports) as program,
    ):
        await program.printed(b"Waiting for connection")
        with trio.fail_after(20):
            async with await open_raw_endpoint(talk.worker, f"127.0.0.1:{port}") as endpoint:
                for _ in range(iterations):
                    await talk.send(endpoint, data)
                assert len(await talk.receive(endpoint)) == total
        await program.printed(b"sent FIN message")
        await program.printed(b"UCP TEST SUCCESS")
        # It takes the last byte for the end of a string.
        assert data[: size - 1] in program.output.read_bytes()
