"""Peers as forks of one process that has imported everything and has opened nothing.

A new interpreter takes half a second of CPU time to import what ``peers.py`` needs; a fork takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import trio

#: Environment variables that are read when a worker is opened. UCX and Python read all others when they are loaded.
READ_LATER = {"PYTEST_CURRENT_TEST", "UCX_TLS", "UCX_KEEPALIVE_INTERVAL", "UCX_NET_DEVICES"}
#: The longest request, in bytes: the arguments of a peer, its environment and its folder.
LONGEST = 2**17


class ForkedProcess:
    """A forked peer, with the interface of :class:`trio.Process`. It is no child of this process."""

    def __init__(self, pid: int, pidfd: int, stdin: int, stdout: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = trio.lowlevel.FdStream(stdin), trio.lowlevel.FdStream(stdout)
        self._pidfd = pidfd
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.hear()
            self.returncode = self._server.ended.pop(self.pid, None)
            if self.returncode is not None:
                os.close(self._pidfd)
        return self.returncode

    async def wait(self) -> int:
        if self.returncode is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        while self.poll() is None:
            self._server.hear(wait=True)  # the fork server is about to report the exit status
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The side of the process that wants peers."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = dict(os.environ)
        #: The exit statuses of those that have ended.
        self.ended: dict[int, int] = {}
        self._started: tuple[int, int] | None = None
        with theirs:
            command = [sys.executable, "-W", "error", "-X", "faulthandler", __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def knows(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork may have this environment, which is not the one that its interpreter began with."""
        names = environment.keys() | self.environment.keys()
        return all(environment.get(name) == self.environment.get(name) for name in names - READ_LATER)

    def start(self, arguments: list[str], environment: Mapping[str, str]) -> ForkedProcess:
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        try:
            request = json.dumps([arguments, dict(environment), os.getcwd()]).encode()
            socket.send_fds(self.socket, [request], [their_stdin, their_stdout, 2])
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        while self._started is None:
            self.hear(wait=True)
        (pid, pidfd), self._started = self._started, None
        return ForkedProcess(pid, pidfd, stdin, stdout, self)

    def hear(self, *, wait: bool = False) -> None:
        """Takes in what the process has said: who has begun, and who has ended, and how."""
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        with contextlib.suppress(BlockingIOError):
            while True:
                said, parts, *_ = self.socket.recvmsg(100, socket.CMSG_LEN(4), flags)
                if not said:
                    raise RuntimeError("the process that forks peers has ended")
                what, pid, status = json.loads(said)
                if what == "started":
                    [(_, _, pidfd)] = parts
                    self._started = pid, int.from_bytes(pidfd, sys.byteorder)
                else:
                    self.ended[pid] = status
                flags |= socket.MSG_DONTWAIT


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer()


# ---- the other process ----


def serve(requests: socket.socket) -> tuple[bytes, list[int]] | None:
    """Forks a child for each request, until the other side closes.

    Returns:
        In each child: the request, and the descriptors 0, 1 and 2. None at the end.
    """
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd in children:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = os.waitpid(children.pop(key.fd), 0)
                    requests.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())
                    continue
                request, streams, _, _ = socket.recv_fds(requests, LONGEST, 3)
                if not request:
                    return None
                pid = os.fork()
                if not pid:
                    requests.close()
                    for pidfd in children:
                        os.close(pidfd)
                    return request, streams
                for fd in streams:
                    os.close(fd)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid
                ready.register(pidfd, selectors.EVENT_READ)
                # With its pidfd: by the time that this is read it may have ended, and its pid is free again.
                socket.send_fds(requests, [json.dumps(["started", pid, 0]).encode()], [pidfd])


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    import peers

    gc.collect()
    gc.freeze()
    order = serve(requests)
    if order is None:
        return
    request, streams = order
    sys.argv, environment, folder = json.loads(request)
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    peers.main()


if __name__ == "__main__":
    main()
