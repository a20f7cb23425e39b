"""The release before this wire version: each side refuses the other by name, at once. The other one is a real build."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import open_listener

import trio_ucx
from trio_ucx import ucp

ROOT = Path(__file__).parent.parent
#: The last commit with wire version 1, and with version 1 of worker addresses and memory descriptors (0.1.0).
COMMIT = "5c50e22"
KEY = b"a key of 16 bytes"
#: Seconds in which each side is refused.
AT_ONCE = 1.0

#: Takes lines of JSON, each with a step and its argument; answers each with a line.
OLD = """
import json, logging, os, sys, time
import trio, trio_ucx
from trio_ucx import ucp
assert trio_ucx.__file__.startswith(sys.argv[1]), trio_ucx.__file__
LOG = []
class Handler(logging.Handler):
    def emit(self, record):
        LOG.append(record.getMessage())
logging.getLogger("trio_ucx").addHandler(Handler())

async def main():
    async with ucp.open_worker(features=ucp.Feature.ALL) as worker, trio.open_nursery() as nursery:
        memory = worker.context.allocate(4096)
        async def step(what, argument):
            began = time.monotonic()
            try:
                if what == "serve":
                    key = bytes.fromhex(argument) or None
                    listeners = await nursery.start(lambda task_status: trio_ucx.serve_ucx(
                        lambda connection: trio.sleep_forever(), 0, host="127.0.0.1", worker=worker, authkey=key,
                        task_status=task_status))
                    return listeners[0].address
                if what == "connect":
                    address, key = argument
                    async with trio_ucx.connect(tuple(address), worker=worker, authkey=bytes.fromhex(key) or None):
                        return "connected"
                if what == "open":
                    (await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(argument)))).abort()
                    return "opened"
                if what == "memory":
                    ucp.MemoryDescriptor.from_bytes(bytes.fromhex(argument))
                    return "read"
                if what == "describe":
                    return [bytes(worker.address).hex(), memory.descriptor.hex()]
                if what == "log":
                    return LOG
            except Exception as error:
                return [type(error).__name__, str(error), time.monotonic() - began]
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            print(json.dumps(await step(*json.loads(line))), flush=True)
        memory.close()
        nursery.cancel_scope.cancel()
trio.run(main)
"""


class OldRelease:
    """A process of the old release."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._heard = b""

    async def ask(self, step: str, argument: Any = None) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        await self._process.stdin.send_all(json.dumps([step, argument]).encode() + b"\n")
        with trio.fail_after(60):
            while b"\n" not in self._heard:
                chunk = await self._process.stdout.receive_some()
                assert chunk, "the old release has ended"
                self._heard += chunk
        line, self._heard = self._heard.split(b"\n", 1)
        return json.loads(line)


@pytest.fixture(scope="session")
def old_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a build of the old release: one for all processes of pytest-xdist."""
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"needs the history of the repository, with commit {COMMIT}")
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("needs setuptools and pip, to build the old release")
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"trio_ucx-{COMMIT}"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            source = folder.with_suffix(".source")
            source.mkdir(exist_ok=True)
            archive = subprocess.run(["git", "-C", ROOT, "archive", COMMIT], check=True, capture_output=True).stdout
            subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-build-isolation",
                "--no-deps",
                "--no-index",
            ]
            subprocess.run([*install, "--target", folder, source], check=True)
    return folder


@pytest.fixture
async def old(old_package: Path) -> AsyncIterator[OldRelease]:
    command = [sys.executable, "-c", OLD, str(old_package)]
    environment = {**os.environ, "PYTHONPATH": str(old_package)}
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd="/"
    )
    try:
        yield OldRelease(process)
        assert process.stdin is not None
        await process.stdin.aclose()
        with trio.fail_after(30):
            assert await process.wait() == 0
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.parametrize("key", [b"", KEY], ids=["", "authkey"])
async def test_a_client_of_this_release(old: OldRelease, worker: ucp.Worker, key: bytes) -> None:
    address = await old.ask("serve", key.hex())
    began = time.monotonic()
    with pytest.raises(trio_ucx.NotAdmitted, match="the client speaks wire version 2, and this listener speaks 1"):
        async with trio_ucx.connect(tuple(address), worker=worker, authkey=key or None):
            pass
    assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize("key", [b"", KEY], ids=["", "authkey"])
async def test_a_client_of_the_old_release(old: OldRelease, worker: ucp.Worker, key: bytes) -> None:
    async with open_listener(worker, authkey=key or None) as listener:
        error, text, seconds = await old.ask("connect", [listener.address, key.hex()])
    assert error == "NotAdmitted" and seconds < AT_ONCE, text
    assert "the client speaks wire version 1, and this listener speaks 2" in text, text


async def test_worker_addresses_and_memory_descriptors(old: OldRelease) -> None:
    """Neither release reads those of the other."""
    address, descriptor = map(bytes.fromhex, await old.ask("describe"))
    with pytest.raises(ValueError, match="a worker address of version 1: .* version 2"):
        ucp.WorkerAddress(address)
    with pytest.raises(ValueError, match=r"version 1.* version 2"):
        ucp.MemoryDescriptor.from_bytes(descriptor)
    async with ucp.open_worker(features=ucp.Feature.ALL) as worker:
        with worker.context.allocate(4096) as memory:
            error, text, seconds = await old.ask("memory", memory.descriptor.hex())
        assert error == "ValueError" and seconds < AT_ONCE
        assert "a memory descriptor of version 2: this trio_ucx speaks version 1" in text
        error, text, seconds = await old.ask("open", bytes(worker.address).hex())
        assert error == "ValueError" and seconds < AT_ONCE
        assert "a worker address of version 2: this trio_ucx speaks version 1" in text
