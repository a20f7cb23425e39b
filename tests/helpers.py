"""What many tests share: peers in other processes, pairs in this one, numbered data, and assertions about time.

Beside it:

* ``timing.py``: assertions about time, which allow for a busy machine by what they measure.
* ``peers.py``: the roles of other processes; see ``open_peer``. ``forked.py``: how they are started.
* ``attacked_server.py``: a server under attack.
* ``end_to_end/programs.py``: the examples and the command line, run as programs; ``c_programs.py``: programs in C.
* ``selection.py``: which cases run.
* ``environments.py``: what runs programs without privileges, made by ``restrict.py``; ``unprivileged_programs.py``:
  the programs.
* ``networks.py``: network namespaces, and processes in them; ``faults/network_program.py``: one that has much traffic.
* ``remote.py``: remote memory, atomics and request chains.
* ``samples.py``: worker addresses of many releases. ``foreign_arrays.py``: arrays that describe themselves by DLPack.
* ``shared_queue.py``: a writer that dies in UCX's shared-memory queue. ``simulation.py``: a simulated UCX.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from forked import ForkedProcess, fork_server

import trio_ucx
from trio_ucx import ucp
from trio_ucx._util import live_handles as _live_handles
from trio_ucx.ucp import _context

#: Values of UCX_TLS. Shared memory alone has no connections by socket address.
TRANSPORTS = ["tcp", "tcp,sm,self"]
#: The transport that tests get where they ask for "tcp": "rc", say, to run them over RDMA.
NETWORK = os.environ.get("TRIO_UCX_TEST_NETWORK", "tcp")
#: An address of the device of that transport: UCX's connections by socket address do not leave it.
ADDRESS = os.environ.get("TRIO_UCX_TEST_ADDRESS", "127.0.0.1")
#: Whether it puts and gets by hardware: UD does not.
HARDWARE = not NETWORK.startswith(("tcp", "ud"))
HERE = Path(__file__).parent
PEERS = HERE / "peers.py"
#: Under which checker tools/sanitize.sh runs the tests; None: under none.
SANITIZED = os.environ.get("TRIO_UCX_SANITIZED")


def _choose_network(config: ucp.Config | None) -> dict[str, str]:
    """The options of a context, with this run's network in place of "tcp"."""
    chosen = _check_config(config)
    wanted = chosen.get("TLS", os.environ.get("UCX_TLS", "tcp,sm,self")).split(",")
    tls = [NETWORK if each == "tcp" else each for each in wanted]
    return {**chosen, "TLS": "all" if "all" in tls else ",".join(tls)}  # "all" goes with nothing else


_check_config = _context._check_config
if NETWORK != "tcp":
    _context._check_config = _choose_network


#: See the fixture ``rounds``.
Rounds = Callable[[int, int], int]


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes without repetition in their first 64 KB, different for each seed."""
    block = random.Random(seed).randbytes(min(size, 65521))
    return (block * (size // len(block) + 1))[:size] if size else b""


def segments() -> int:
    """How many shared-memory segments of UCX this process has attached."""
    return sum("/SYSV" in line or "ucx_shm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def live_handles() -> Counter[str]:
    """The native handles that are alive in this process, by kind, such as ``worker`` and ``endpoint``."""
    return Counter(_live_handles.live_handles.counts())


def assert_transports(connection: trio_ucx.Connection | ucp.Endpoint, transports: str) -> None:
    endpoint = connection.endpoint if isinstance(connection, trio_ucx.Connection) else connection
    names = {transport.name for transport in endpoint.transports}
    if transports == "tcp":
        assert names == {"tcp"} if NETWORK == "tcp" else names and "tcp" not in names
    else:
        assert names & {"sysv", "posix"}, names


def free_port() -> int:
    """A free port outside the kernel's range for outgoing connections. The other processes of pytest-xdist choose from
    other ports.
    """
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    while True:
        port = random.SystemRandom().randrange(10_000 + own, given_out, count)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def python_path(folder: Path) -> str:
    """Returns PYTHONPATH for a child: the folder, then this process's own, through which it may find trio_ucx."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


class Peer:
    """A process that runs a function of ``tests/peers.py``; the test and the peer exchange lines of JSON."""

    def __init__(self, process: trio.Process | ForkedProcess) -> None:
        self.process = process
        assert process.stdout is not None
        self._buffer = b""

    async def hear(self, timeout: float = 60) -> Any:
        """Receives the peer's next line."""
        assert self.process.stdout is not None
        with trio.fail_after(timeout):
            while b"\n" not in self._buffer:
                chunk = await self.process.stdout.receive_some()
                if not chunk:
                    raise EOFError(f"the peer ended, exit status {await self.process.wait()}")
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    async def tell(self, thing: Any = None) -> None:
        """Sends the peer a line."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(thing).encode() + b"\n")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def stop(self) -> None:
        """Stops the process (SIGSTOP), and waits until the kernel has stopped it."""
        self.signal(signal.SIGSTOP)
        await self.stopped()

    async def stopped(self) -> None:
        """Waits until the kernel has stopped the process."""
        with trio.fail_after(15):
            while process_state(self.process.pid) != "T":
                await trio.sleep(0.001)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    async def ended(self, timeout: float = 60) -> int:
        with trio.fail_after(timeout):
            return await self.process.wait()


@asynccontextmanager
async def open_peer(
    role: str,
    *args: Any,
    transports: str | None = None,
    under: Sequence[str] = (),
    program: Path = PEERS,
    **environment: str,
) -> AsyncIterator[Peer]:
    """Starts ``role`` of ``tests/peers.py``. Ends it with the block, by force if need be; its exit status must be 0.

    Args:
        under: a prefix of the command line, such as ``ip netns exec name``.
        program: another program with roles.
    """
    env = {**os.environ, **environment}
    if transports is not None:
        env["UCX_TLS"] = transports
    arguments = [str(program), role, json.dumps(args)]
    process: trio.Process | ForkedProcess
    if program == PEERS and not under and fork_server().knows(env):
        process = fork_server().start(arguments, env)
    else:
        process = await trio.lowlevel.open_process(
            [*under, sys.executable, "-W", "error", "-X", "faulthandler", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
    peer = Peer(process)
    clean = False
    try:
        yield peer
        clean = True
    except BaseException as error:
        if process.poll() not in (None, 0):
            error.add_note(f"the peer {role!r} had ended before that, exit status {process.returncode}")
        raise
    finally:
        with trio.CancelScope(shield=True):
            assert process.stdin is not None and process.stdout is not None
            await process.stdin.aclose()
            if process.returncode is None and clean:
                with trio.move_on_after(60):
                    await process.wait()
            if process.returncode is None:
                clean = False
                process.send_signal(signal.SIGCONT)
                process.kill()
                await process.wait()
            await process.stdout.aclose()
    assert clean, "the peer did not end"
    assert process.returncode in (0, -signal.SIGKILL), f"the peer failed, exit status {process.returncode}"


@asynccontextmanager
async def open_to_peer(way: str, worker: ucp.Worker, said: dict[str, Any]) -> AsyncIterator[ucp.Endpoint]:
    """An endpoint to an ``owner`` in another process, by the addresses that it reported."""
    if way == "connection":
        connection = await trio_ucx.open_ucx_stream(*said["connection"], worker=worker)
        try:
            yield connection.endpoint
        finally:
            connection.abort()
        return
    target = tuple(said["raw"]) if way == "raw" else ucp.WorkerAddress(bytes.fromhex(said["worker"]))
    endpoint = await open_raw_endpoint(worker, target)
    try:
        yield endpoint
    finally:
        endpoint.abort()


@asynccontextmanager
async def open_listener(
    worker: ucp.Worker | None = None, *, port: int = 0, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[trio_ucx.Listener]:
    """A listener at one address, of this machine unless ``host`` says otherwise."""
    [listener] = await trio_ucx.open_ucx_listeners(port, host=host, worker=worker, **options)
    async with listener:
        yield listener


@asynccontextmanager
async def serving(
    handler: Callable[[trio_ucx.Connection], Awaitable[object]], worker: ucp.Worker | None = None, **options: Any
) -> AsyncIterator[trio_ucx.Listener]:
    """The listener of ``serve_ucx`` on this machine, until the end of the block."""
    async with trio.open_nursery() as nursery:
        options = {"host": "127.0.0.1", "worker": worker, **options}
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, **options))
        yield listener
        nursery.cancel_scope.cancel()


async def echo(connection: trio_ucx.Connection, tag: int = 0) -> None:
    """Sends the messages of a tag back."""
    async for message in connection.messages(tag):
        await connection.send(message, tag=tag)


@asynccontextmanager
async def open_pair(
    worker: ucp.Worker, server_worker: ucp.Worker | None = None, *, by: str = "tcp", **options: Any
) -> AsyncIterator[tuple[trio_ucx.Connection, trio_ucx.Connection]]:
    """Both ends of one connection in this process, (client, server). Aborts those that the test does not close.

    Args:
        by: the kind of control socket, "tcp" or "unix".
    """
    async with AsyncExitStack() as stack:
        host = "127.0.0.1"
        if by == "unix":
            host = f"unix:{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        listening = open_listener(server_worker or worker, host=host, **options)
        listener = await stack.enter_async_context(listening)
        client = None
        try:
            client = await trio_ucx.connect(listener.address, worker=worker, **options).__aenter__()
            server = await listener.accept()
        except BaseException:
            if client is not None:
                client.abort()
            raise
        stack.callback(client.abort)
        stack.callback(server.abort)
        yield client, server


async def open_raw_endpoint(worker: ucp.Worker, address: Any, **options: Any) -> ucp.Endpoint:
    """An endpoint to a raw listener of this machine, or by worker address."""
    if not isinstance(address, ucp.WorkerAddress):
        worker.admit(ADDRESS)  # it has no key
    return await worker.open_endpoint(address, **options)


async def open_raw_listener(worker: ucp.Worker, *clients: ucp.Worker) -> ucp.RawListener:
    """A raw listener for clients of this machine, such as these workers."""
    for each in (worker, *clients):
        each.admit(ADDRESS)  # they have no keys
    return await worker.open_listener(ADDRESS, 0)


@asynccontextmanager
async def open_raw_pair(
    worker: ucp.Worker, server_worker: ucp.Worker | None = None
) -> AsyncIterator[tuple[ucp.Endpoint, ucp.Endpoint]]:
    """Both ends of a raw UCP connection in this process: (client, server) endpoints."""
    async with await open_raw_listener(server_worker or worker, worker) as listener:
        client = await worker.open_endpoint(listener.address)
        try:
            server = await (await listener.accept_request()).accept()
            try:
                yield client, server
            finally:
                server.abort()
        finally:
            client.abort()


_RECORD = struct.Struct("<II")


def numbered_write(number: int, records: int) -> bytes:
    """Data for the ``number``-th write to a byte stream: records of 8 bytes, each with that number and its index."""
    flat = array.array("I", [number, 0] * records)
    flat[1::2] = array.array("I", range(records))
    return flat.tobytes()


def check_stream(writes: list[tuple[int, bool]], got: bytes | bytearray, *, everything: bool = False) -> None:
    """Asserts that the data read are, in order, a prefix of each numbered write; all of it unless it was cancelled.

    Args:
        writes: (bytes, whether it was completed) of each.
        everything: the stream has ended cleanly. Otherwise writes at the end may be missing.
    """
    rest = len(got) % _RECORD.size
    assert not (everything and rest)
    reached = [0] * len(writes)
    current = 0
    for number, index in _RECORD.iter_unpack(got[: len(got) - rest]):
        assert number >= current, f"write {number} after {current}"
        current = number
        assert index == reached[number], f"write {number}: {index} after {reached[number]}"
        reached[number] += 1
    for number, (size, complete) in enumerate(writes):
        if complete and (everything or number < current):
            assert reached[number] * _RECORD.size == size, f"write {number} did not arrive whole"


@attrs.frozen
class Certificates:
    """TLS contexts that trust each other, for "localhost"."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def resident(pid: int | str = "self") -> int:
    """The memory that a process has, in bytes. Under a checker, which keeps what was freed, it says nothing: 0."""
    if SANITIZED:
        return 0
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def process_state(pid: int) -> str:
    """As in ``/proc/PID/stat``: "T" if it is stopped, "Z" if it has ended and its parent has not waited for it; "" if
    there is no such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found


def assert_gone(pids: Sequence[int], within: float = 60) -> None:
    """Asserts that processes which were told to end do so."""
    deadline = time.monotonic() + within
    while left := [pid for pid in pids if process_state(pid) not in ("", "Z")]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.01)


async def until_over(connection: trio_ucx.Connection) -> None:
    """Waits until a connection has ended, however."""
    with contextlib.suppress(trio.BrokenResourceError):
        await connection.wait_closed()


async def expect_closed(function: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Calls what must raise ``trio.ClosedResourceError``. (Peers import this module, and need no pytest.)"""
    try:
        await function(*arguments)
    except trio.ClosedResourceError:
        return
    raise AssertionError("trio.ClosedResourceError was not raised")


async def until(condition: Callable[[], object], *, within: float = 60) -> None:
    """Waits until the condition holds."""
    with trio.fail_after(within):
        while not condition():
            await trio.sleep(0.001)


async def tasks_begin() -> None:
    """Lets tasks run that were started, until each waits for the first time."""
    for _ in range(5):
        await trio.lowlevel.checkpoint()


async def nothing_happens(seconds: float = 0.05) -> None:
    """Waits, so that what must not happen would have happened by then. Assert afterwards that it has not.

    A faulty program passes where the machine is too busy; a correct one never fails.
    """
    await trio.sleep(seconds)


def assert_free(*buffers: bytearray) -> None:
    """Asserts that no buffer is pinned."""
    for buffer in buffers:
        assert is_free(buffer), "the buffer is pinned"


def is_free(buffer: bytearray) -> bool:
    """Whether the buffer can be resized: it is not pinned."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


def assert_pinned(buffer: bytearray) -> None:
    assert not is_free(buffer), "the buffer is not pinned"
