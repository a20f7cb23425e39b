"""Programs that run in the environments of ``environments.py``: ``unprivileged_programs.py NAME``.

Each is a function, or an example (``example_*``) that runs as its users run it. It must end by itself with status 0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import trio

import trio_ucx
from trio_ucx import mesh, testing

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Seconds for each step.
DEADLINE = 40
PYTHON = [sys.executable, "-W", "error"]
#: Sizes of messages: in one piece, in several, and without copies.
SIZES = (8, 50_000, 3 << 20)


async def check_echo(one: trio_ucx.Connection, other: trio_ucx.Connection) -> None:
    """Asserts that messages and bytes get to the other side, which may be a connection of this process."""
    for size in SIZES:
        data = os.urandom(size)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.send, data)
            assert await other.receive() == data


# ---- programs ----


async def pairs() -> None:
    """All of ``trio_ucx.testing`` that opens connections."""
    for host in (None, "127.0.0.1"):
        async with testing.open_connection_pair(host=host) as (one, other):
            await check_echo(one, other)
    async with testing.open_clogged_pair() as (one, other):
        assert not one.closed and not other.closed
    from unprivileged_programs import send_back  # another process cannot import what is in __main__

    async with testing.open_peer_process(send_back) as (connection, _):
        await connection.send(b"there")
        assert await connection.receive() == b"there"


async def send_back(connection: trio_ucx.Connection) -> None:
    async for message in connection.messages():
        await connection.send(message)


async def unix_listener() -> None:
    with tempfile.TemporaryDirectory() as folder:
        [listener] = await trio_ucx.open_ucx_listeners(0, host=f"unix:{folder}/socket")
        async with listener, trio_ucx.connect(listener.address) as client, await listener.accept() as server:
            await check_echo(client, server)


async def rank() -> None:
    """A rank of a mesh; see ``two_ranks``."""
    async with mesh.join() as group:
        for size in SIZES:
            other = 1 - group.rank
            sent = bytes([group.rank]) * size
            assert await group.send_receive(sent, to=other, source=other) == bytes([other]) * size
        if importlib.util.find_spec("numpy") is not None:
            import numpy

            for length in (10, 500_000):  # in messages; read from each other's memory, where the kernel lets them
                assert (await group.all_reduce(numpy.full(length, group.rank + 1), "sum") == 3).all()
        await group.barrier()


def run(*command: object) -> str:
    """Runs a command to its end; returns its output."""
    done = subprocess.run(
        [str(each) for each in command], stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, f"{command}: exit status {done.returncode}: {done.stdout}"
    return done.stdout


@contextlib.contextmanager
def serving(*command: object, stop: int | None = signal.SIGTERM, status: int = 0) -> Iterator[str]:
    """The address at which a server listens, which is then stopped by a signal, or ends by itself."""
    with subprocess.Popen([*PYTHON, *(str(each) for each in command)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words, _, address = process.stdout.readline().rstrip().rpartition(" ")
            assert words == "listening at", words
            yield address
            if stop is not None:
                process.send_signal(stop)
            assert process.wait(DEADLINE) == status, f"{command}: exit status {process.returncode}"
        finally:
            process.kill()


def ranks(program: Path, *arguments: object) -> str:
    return run(*PYTHON, "-m", "trio_ucx", "mesh", "--ranks", 2, program, *arguments)


def two_ranks() -> None:
    ranks(Path(__file__), "rank")


def example_copy_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder, "source"), Path(folder, "destination")
        source.mkdir()
        (source / "file").write_bytes(os.urandom(5 << 20))
        with serving(EXAMPLES / "copy_files.py", "receive", destination, stop=None) as address:
            run(*PYTHON, EXAMPLES / "copy_files.py", "send", source, address)
        assert (destination / "file").read_bytes() == (source / "file").read_bytes()


def example_hash_table() -> None:
    example = EXAMPLES / "hash_table.py"
    with serving(example, "serve", stop=signal.SIGINT, status=130) as address:
        run(*PYTHON, example, "put", address, "key", "value")
        assert run(*PYTHON, example, "get", address, "key").rstrip() == "value"


def example_http_server() -> None:
    with serving(EXAMPLES / "http_server.py", EXAMPLES, stop=signal.SIGINT, status=130) as address:
        got = run(*PYTHON, EXAMPLES / "http_client.py", address, "/README.md")
    assert got == (EXAMPLES / "README.md").read_text()


example_http_client = example_http_server


def example_kv_cache() -> None:
    example = EXAMPLES / "kv_cache.py"
    with serving(example, "prefill", "--blocks", 16) as address:
        assert run(*PYTHON, example, "decode", address, "a prompt", "--count", 3).count("layer") == 24


def example_publish() -> None:
    example = EXAMPLES / "publish.py"
    with serving(example, "serve", "--interval", 0.01) as address:
        assert len(run(*PYTHON, example, "watch", address, "--count", 5).split()) == 5


def example_rpc() -> None:
    with serving(EXAMPLES / "rpc.py", "serve", stop=signal.SIGINT, status=130) as address:
        assert run(*PYTHON, EXAMPLES / "rpc.py", "call", address, "add", '{"a": 1, "b": 2}').rstrip() == "3"


def example_worker_pool() -> None:
    run(*PYTHON, EXAMPLES / "worker_pool.py", "demo", "--workers", 2, "--tasks", 4)


def example_ring_all_reduce() -> None:
    assert ranks(EXAMPLES / "ring_all_reduce.py").count("right") == 2


def example_heat_equation() -> None:
    got = ranks(EXAMPLES / "heat_equation.py", "--side", 50, "--steps", 50, "--check")
    assert "as computed alone" in got, got


def example_parameter_server() -> None:
    assert "loss" in ranks(EXAMPLES / "parameter_server.py", "--seconds", 1)


def example_rejoining() -> None:
    command = [*PYTHON, "-m", "trio_ucx", "mesh", "--ranks", 3, "--restart", 1, EXAMPLES / "rejoining.py"]
    assert run(*command, "--steps", 40, "--kill-at", 20).count("has finished after 40 steps") == 3


def example_beside_mpi() -> None:
    mpirun = shutil.which("mpirun", path=sysconfig.get_path("scripts")) or "mpirun"
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # The ranks meet in a folder of the user's. In /tmp root's may be in the way, if a user namespace calls us root.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        run(
            *(mpirun, *as_root, "--oversubscribe", "--bind-to", "none", "-n", 2),
            *(sys.executable, EXAMPLES / "beside_mpi.py"),
        )


async def bounded(program: Callable[[], Awaitable[None]]) -> None:
    with trio.fail_after(DEADLINE):
        await program()


if __name__ == "__main__":
    chosen = globals()[sys.argv[1]]
    trio.run(bounded, chosen) if inspect.iscoroutinefunction(chosen) else chosen()
