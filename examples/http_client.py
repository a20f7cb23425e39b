"""An HTTP/1.1 client over UCX, for http_server.py: GET, or POST of a file whose answer may come while it is sent.

    pip install '.[examples]'
    python examples/http_client.py HOST:PORT /some/file -o FILE         without -o to stdout
    python examples/http_client.py HOST:PORT /echo --data FILE
    python examples/http_client.py HOST:PORT /some/file --tls CAFILE    trusts these certificates only
    python examples/http_client.py HOST:PORT /some/file --repeat 10     all over one connection
    python examples/http_client.py HOST:PORT /some/file --tcp           over TCP, from any server: see `run`

The exit status is 0 when all went well; 3, 4 or 5 when the answer was a redirection or an error, by the first digit of
its status; and 1 when there was no whole answer.
"""

from __future__ import annotations

import argparse
import os
import ssl
import stat
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import attrs
import h11
import trio

import trio_ucx

PIECE = 2**18
STALL_TIMEOUT = 60  # seconds in which something has to move
#: Both sides need the same one, of 16 bytes or more. Without it a server lets in only clients of its own user.
AUTHKEY = trio_ucx.authkey()


class Failed(Exception):
    """A failure that the user reads in one line."""

    def __init__(self, text: str, exit_status: int = 1) -> None:
        super().__init__(text)
        self.exit_status = exit_status


#: What may go wrong without a bug in this program.
EXPECTED = Failed, OSError, h11.ProtocolError, trio.BrokenResourceError, trio.TooSlowError, trio_ucx.UCXError


@attrs.define(eq=False)
class Server:
    """One connection: h11's state machine and the stream that it lacks, which may be of any kind."""

    stream: trio.abc.Stream
    host: str
    watchdog: trio.CancelScope
    http: h11.Connection = attrs.field(factory=lambda: h11.Connection(h11.CLIENT))

    def moved(self) -> None:
        self.watchdog.deadline = trio.current_time() + STALL_TIMEOUT

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        assert data is not None
        await self.stream.send_all(data)
        self.moved()

    async def receive(self) -> object:
        """The next of h11's events."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            data = bytes(await self.stream.receive_some())
            if not data and self.http.their_state is not h11.SEND_BODY:
                raise Failed("the server hung up")
            self.http.receive_data(data)
            self.moved()
        return event

    async def send_request(self, target: str, data: str | None, task_status: trio.TaskStatus[None]) -> None:
        """Has started when h11 knows of the request: h11 cannot take an answer before."""
        headers = [("Host", self.host)]
        with suppress(trio.BrokenResourceError):  # there may be an answer that says why
            if data is None:
                task_status.started()
                await self.send(h11.Request(method="GET", target=target, headers=headers))
            else:
                async with await trio.open_file(data, "rb") as file:
                    status = os.fstat(file.fileno())
                    length = "Content-Length", str(status.st_size)
                    headers.append(length if stat.S_ISREG(status.st_mode) else ("Transfer-Encoding", "chunked"))
                    task_status.started()
                    await self.send(h11.Request(method="POST", target=target, headers=headers))
                    while piece := await file.read(PIECE):
                        await self.send(h11.Data(data=piece))
            await self.send(h11.EndOfMessage())

    async def fetch(self, target: str, data: str | None, write: Callable[[bytes], Awaitable[object]]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.send_request, target, data)  # goes on: /echo reads no further while we do not read
            while not isinstance(response := await self.receive(), h11.Response):
                pass  # only that there will be one
            if response.status_code >= 300:
                reason = response.reason.decode(errors="replace")
                raise Failed(f"{response.status_code} {reason}", response.status_code // 100)
            while isinstance(event := await self.receive(), h11.Data):
                await write(event.data)


async def run(options: argparse.Namespace) -> None:
    host, port = options.address
    tls = make_tls(options.tls) if options.tls else None
    output = options.output or sys.stdout.fileno()
    open_stream: Callable[..., Awaitable[trio.abc.Stream]]
    open_stream = trio.open_tcp_stream if options.tcp else partial(trio_ucx.open_ucx_stream, authkey=AUTHKEY)
    with trio.fail_after(STALL_TIMEOUT) as watchdog:
        stream: trio.abc.Stream = await open_stream(host, port)
        async with stream, await trio.open_file(output, "wb", closefd=options.output is not None) as file:
            if tls is not None:
                stream = tls_stream = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
                await tls_stream.do_handshake()  # which is for one task alone to do
            server = Server(stream, trio_ucx.format_address(options.address), watchdog)
            for number in range(options.repeat):
                if number and server.http.our_state is not h11.DONE:
                    raise Failed(f"the server took {number} of {options.repeat} requests")
                if number:
                    server.http.start_next_cycle()
                await server.fetch(options.target, options.data, file.write)


# ---- the command line ----


def make_tls(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None


def explain(error: BaseException) -> str:
    if isinstance(error, trio.TooSlowError):
        return f"nothing moved for {STALL_TIMEOUT} seconds"
    text = str(error) or str(error.__cause__ or type(error).__name__)  # trio.SSLStream's only say `from` what
    return "".join(character if character.isprintable() else "?" for character in text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Gets something by HTTP over UCX.")
    parser.add_argument("address", type=trio_ucx.parse_address, metavar="HOST:PORT")
    parser.add_argument("target", metavar="/PATH")
    parser.add_argument("-o", dest="output", metavar="FILE", help="for the answer, instead of stdout")
    parser.add_argument("--data", metavar="FILE", help="POST it")
    parser.add_argument("--tls", metavar="CAFILE")
    parser.add_argument("--tcp", action="store_true", help="without UCX")
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    options = parser.parse_args()
    status = 0
    try:
        trio.run(run, options)
    except* KeyboardInterrupt:
        status = 130
    except* EXPECTED as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print(f"http_client: {explain(error)}", file=sys.stderr)
        status = error.exit_status if isinstance(error, Failed) else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
