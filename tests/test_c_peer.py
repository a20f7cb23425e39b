"""UCX's own example program, unmodified, as our client and as our server: any UCP peer can be talked to."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from helpers import free_port

from trio_ucx import ucp
from trio_ucx._native import ucx

#: What the example sends; it receives whatever comes.
TAG = 0xCAFE


@pytest.fixture(scope="session")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles ``ucp_client_server.c`` of the UCX in use."""
    if ucx.system:
        pytest.skip("the distribution's UCX brings no examples; libucx-cu12 does")
    home = Path(ucx.file).parent.parent
    source = home / "share" / "ucx" / "examples" / "ucp_client_server.c"
    if not source.exists():
        pytest.skip(f"this UCX has no examples: {source}")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("c") / "ucp_client_server"
    libraries = home / "lib"
    subprocess.run(
        [compiler, "-o", target, source, f"-I{home / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        + ["-lucp", "-lucs"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return target


class Program:
    """A running example program, which prints to a file, line by line (``stdbuf``), much."""

    def __init__(self, process: trio.Process, output: Path) -> None:
        self.process = process
        self.output = output

    async def printed(self, text: bytes) -> None:
        with trio.fail_after(20):
            while text not in self.output.read_bytes():
                await trio.sleep(0.02)


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


@pytest.mark.parametrize(("size", "iterations"), [(16, 1), (16, 10), (65_535, 2), (100_000, 3), (2**24, 2)])
async def test_c_program_as_client(
    executable: Path, worker: ucp.Worker, transports: str, size: int, iterations: int
) -> None:
    async with await worker.open_listener("127.0.0.1", 0) as listener:
        host, port = listener.address
        command = [executable, "-a", host, "-p", str(port), "-c", "tag", "-s", str(size), "-i", str(iterations)]
        async with running(command, transports) as program:
            with trio.fail_after(20):
                endpoint = await (await listener.accept_request()).accept()
                try:
                    first = bytearray(size)
                    for number in range(iterations):
                        buffer = bytearray(size)
                        assert await worker.tag_receive(buffer, TAG) == (size, TAG)
                        if number == 0:
                            first = buffer
                        assert buffer == first
                    assert first != bytes(size)  # a known text
                    # The program's FIN. It closes by force when it has it, which a large send may take for a failure.
                    with contextlib.suppress(trio.BrokenResourceError):
                        await endpoint.tag_send(bytes(first), TAG)
                    await program.printed(b"received FIN message")
                    assert await program.process.wait() == 0
                finally:
                    endpoint.abort()


@pytest.mark.parametrize(("size", "iterations"), [(16, 1), (16, 10), (65_535, 2), (100_000, 3), (2**24, 2)])
async def test_c_program_as_server(
    executable: Path, worker: ucp.Worker, transports: str, size: int, iterations: int
) -> None:
    port = free_port()
    command = [executable, "-p", str(port), "-c", "tag", "-s", str(size), "-i", str(iterations)]
    data = bytes(range(97, 123)) * (size // 26 + 1)
    async with running(command, transports) as program:
        await program.printed(b"Waiting for connection")
        with trio.fail_after(20):
            async with await worker.open_endpoint(f"127.0.0.1:{port}") as endpoint:
                for _ in range(iterations):
                    await endpoint.tag_send(data[:size], TAG)
                buffer = bytearray(size)
                length, _ = await worker.tag_receive(buffer, 0, 0)
                assert length == size
        await program.printed(b"sent FIN message")
        await program.printed(b"UCP TEST SUCCESS")
        assert data[: size - 1] in program.output.read_bytes()  # it takes the last byte for the end of a string
