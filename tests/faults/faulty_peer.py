"""The peer of ``test_peer_faults.py``, which has the fault, in a process of its own.

``python -m faults.faulty_peer`` forks such processes at the test's request, because a new one takes half a second to
import everything. :class:`Forks` is the test's end of that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from helpers import HERE, Peer, open_raw_endpoint, python_path
from peers import ROLES, ask, end_with_parent, say

import trio_ucx
from trio_ucx import ucp

from .peer_loads import AM_ID, FEATURES, LOADS, PEER, Board, Ends, Planned, Task, lend

# ---- the test's end ----


class ForkedProcess:
    """As much of ``trio.Process`` as ``helpers.Peer`` needs."""

    def __init__(self, forks: Forks, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._forks = forks
        self._pidfd = os.pidfd_open(pid)
        self.stdin = self.stdout = trio.SocketStream(trio.socket.from_stdlib_socket(channel))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self) -> int:
        """Returns the exit status, or minus the signal that has ended it."""
        await trio.lowlevel.wait_readable(self._pidfd)
        return self._forks.status(self.pid)

    async def aclose(self) -> None:
        await self.stdin.aclose()
        os.close(self._pidfd)


class Forks:
    """Starts processes by forking one that has imported everything and opened nothing."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(30)
        self._statuses: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-X", "faulthandler", "-m", "faults.faulty_peer", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": python_path(HERE), "UCX_LOG_LEVEL": "fatal"},
            )

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)

    def fork(self, role: str, *arguments: Any) -> tuple[int, socket.socket]:
        """Returns the process's id, and our end of the socket that is its standard input and output."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [json.dumps([role, arguments]).encode()], [theirs.fileno()])
        while True:
            match json.loads(self._socket.recv(100)):
                case ["forked", pid]:
                    return pid, ours
                case ["ended", pid, status]:
                    self._statuses[pid] = status

    def status(self, pid: int) -> int:
        while pid not in self._statuses:
            _, ended, status = json.loads(self._socket.recv(100))
            self._statuses[ended] = status
        return self._statuses[pid]

    @contextlib.asynccontextmanager
    async def open_peer(self, **arguments: Any) -> Any:
        """A :class:`Peer` that runs :func:`live`. It is killed with the block, unless it ends before."""
        process = ForkedProcess(self, *self.fork("faulty", arguments))
        try:
            yield Peer(process)  # type: ignore[arg-type]
        finally:
            with trio.CancelScope(shield=True):
                process.send_signal(signal.SIGKILL)
                await process.aclose()


def serve_forks(control: socket.socket) -> None:
    """Forks until the test has ended."""

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with contextlib.suppress(OSError):
                    control.send(json.dumps(["ended", ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())

    signal.signal(signal.SIGCHLD, reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            packet, descriptors, *_ = socket.recv_fds(control, 2**16, 1)
        except ConnectionResetError:
            return
        if not packet:
            return
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            control.close()
            os.dup2(descriptors[0], 0)
            os.dup2(descriptors[0], 1)
            os.close(descriptors[0])
            os._exit(run(*json.loads(packet)))
        os.close(descriptors[0])
        control.send(json.dumps(["forked", pid]).encode())


def run(role: str, arguments: Any) -> int:
    try:
        if role == "faulty":
            trio.run(lambda: Life(**arguments[0]).live())
        else:
            os.environ["UCX_TLS"] = arguments[0]
            trio.run(lambda: ROLES[role](*arguments[1:]))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# ---- the peer ----


@attrs.define(eq=False)
class Life:
    """One peer: opens its end as it is told, runs a load, and ends by its fault or when it is told.

    Attributes:
        opening: "connect": the test connects, and this is the server; "accept": the other way round; "address": raw
            endpoints by worker address.
        memory: the kind of memory that this side lends, if any: see :func:`lend`.
    """

    load: str
    opening: str
    transports: str
    board: str
    memory: str | None
    close_timeout: float
    _raising: bool = False
    _raised: bool = False
    _ending: bool = False
    _closing: trio.Event = attrs.field(factory=trio.Event)
    _over: trio.Event = attrs.field(factory=trio.Event)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _ends: Ends | None = None

    async def live(self) -> None:
        try:
            await self._open()
        except* Planned:
            self._raised = True
        if self._raised:
            say("raised")
            if self.opening != "address":  # else nothing but the end of the process tells the peer
                with contextlib.suppress(EOFError):
                    await ask()

    async def _open(self) -> None:
        with (
            ucp.open_context({"TLS": self.transports}, features=FEATURES) as context,
            lend(context, self.memory) if self.memory else contextlib.nullcontext() as memory,
        ):
            async with ucp.open_worker(context=context) as worker:
                await self._work(worker, memory)

    async def _work(self, worker: ucp.Worker, memory: ucp.Memory | None) -> None:
        with worker.open_active_messages(AM_ID, max_bytes=2**28) as queue, self._scope:
            async with trio.open_nursery() as nursery:
                told = trio.Event()

                async def handle(end: Any) -> None:
                    await told.wait()
                    endpoint = end.endpoint if isinstance(end, trio_ucx.Connection) else end
                    connection = end if isinstance(end, trio_ucx.Connection) else None
                    remote = endpoint.attach(bytes.fromhex(said["descriptor"])) if memory else None
                    board = Board(Path(self.board))
                    self._ends = Ends(PEER, board, worker, endpoint, connection, remote, queue)
                    self._ends.raises = self._raises
                    self._ends.ending = self._ending
                    await self._run()
                    self._over.set()

                address = None
                options = {"worker": worker, "close_timeout": self.close_timeout}
                if self.opening == "connect":
                    serve = partial(trio_ucx.serve_ucx, handle, 0, host="127.0.0.1", **options)
                    [listener] = await nursery.start(serve)
                    address = listener.address
                say([bytes(worker.address).hex(), memory.descriptor.hex() if memory else "", address])
                said = await ask()
                told.set()
                nursery.start_soon(self._obey)
                if said["fault"] is not None:
                    self._arm(*said["fault"])
                if self.opening == "connect":
                    await self._over.wait()
                elif self.opening == "accept":
                    async with trio_ucx.connect(tuple(said["address"]), **options) as connection:
                        await handle(connection)
                else:
                    target = ucp.WorkerAddress(bytes.fromhex(said["worker"]))
                    async with await open_raw_endpoint(worker, target) as endpoint:
                        await handle(endpoint)
                say("closed")
                await trio.sleep_forever()

    async def _obey(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                match await ask():
                    case ["fault", kind, delay]:
                        self._arm(kind, delay)
                    case "finish":
                        self._ending = True
                        if self._ends is not None:
                            self._ends.ending = True
                    case "close":
                        self._closing.set()
        self._scope.cancel()

    def _arm(self, kind: str, delay: float) -> None:
        """The fault comes later: from a thread, at any moment."""

        def strike() -> None:
            time.sleep(delay)
            if kind == "raise":
                self._raising = True
            else:
                Board(Path(self.board))[PEER, "ended_at"] = time.monotonic_ns()
                os._exit(0)

        threading.Thread(target=strike, daemon=True).start()

    def _raises(self) -> bool:
        if self._raising:
            assert self._ends is not None
            self._ends.board[PEER, "ended_at"] = time.monotonic_ns()
        return self._raising

    async def _run(self) -> None:
        ends = self._ends
        assert ends is not None
        say("runs")
        async with trio.open_nursery() as nursery:
            for task in LOADS[self.load].peer():
                nursery.start_soon(self._run_task, ends, task)
        say("finished")
        await self._closing.wait()

    async def _run_task(self, ends: Ends, task: Task) -> None:
        try:
            await task.run(ends, task)
        except (trio.BrokenResourceError, trio.EndOfChannel, trio.ClosedResourceError):
            pass  # the test has ended the connection
        except Planned:
            raise
        except Exception as error:
            ends.board.complaint = f"{task.name}: {error!r}"


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve_forks(control)
