"""The authenticated channel between the two sides of ``check HOST``: lines of JSON over TCP, without UCX.

Each line has a code. Each side first sends a nonce; from then on both make the codes with a key that they derive from
the authkey and the nonces. A side with another key is noticed at the first of these lines, which
both send before they read.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

import trio

from ..errors import PerfError, describe

#: What tells this program and its version from others: the key of a side's first line.
_PROGRAM = b"trio_ucx check 1"
#: The longest line, in bytes: a worker address may have 48,000.
_LONGEST = 1 << 18
#: Seconds for an answer.
ANSWER = 10.0
_OTHER_PROGRAM = "the other side is not `python -m trio_ucx check` of the same release"


async def connect(address: tuple[str, int], seconds: float = ANSWER) -> trio.SocketStream:
    """Connects plain TCP.

    Raises:
        PerfError: there is nothing at the address, or no answer.
    """
    with trio.move_on_after(seconds):
        try:
            return await trio.open_tcp_stream(*address)
        except OSError as error:
            raise PerfError(describe(error.__cause__ or error)) from None
    raise PerfError(f"no answer within {seconds:g} seconds")


class ControlChannel:
    """The channel, for one side."""

    def __init__(self, stream: trio.SocketStream, *, client: bool) -> None:
        self._stream, self._client = stream, client
        self._key, self._buffer = _PROGRAM, bytearray()
        #: How many lines the client has sent (True), and the server.
        self._lines = {True: 0, False: 0}

    async def begin(self, authkey: bytes | None, facts: dict[str, Any]) -> Any:
        """Authenticates the sides to each other, and returns the other side's facts."""
        nonce = secrets.token_hex(32).encode()
        await self._send_line(nonce)
        nonces = sorted([nonce, await self._receive_line(ANSWER)])
        self._key = hmac.digest(authkey or b"", b"/".join(nonces), "sha256")
        await self.send({})
        await self.receive()  # it has the key: only then it gets the facts, which let it in to UCX
        await self.send(facts)
        return await self.receive()

    async def send(self, message: dict[str, Any]) -> None:
        await self._send_line(json.dumps(message).encode())

    async def receive(self, seconds: float = ANSWER) -> Any:
        """Returns the next message.

        Raises:
            PerfError: the peer has closed the connection, does not answer, has another key, or is something else.
            trio.BrokenResourceError: the connection broke.
        """
        return json.loads(await self._receive_line(seconds))

    def _code(self, client: bool, line: bytes) -> bytes:
        """Returns the code of the next line of a side."""
        self._lines[client] += 1
        return hmac.digest(self._key, b"%d %d %s" % (client, self._lines[client], line), "sha256").hex().encode()

    async def _send_line(self, line: bytes) -> None:
        await self._stream.send_all(b"%s %s\n" % (self._code(self._client, line), line))

    async def _receive_line(self, seconds: float) -> bytes:
        with trio.move_on_after(seconds) as scope:
            while b"\n" not in self._buffer and len(self._buffer) < _LONGEST:
                if not (more := await self._stream.receive_some()):
                    raise PerfError("the other side has closed the connection")
                self._buffer += more
        if scope.cancelled_caught:
            raise PerfError(f"the other side did not answer within {seconds:g} seconds")
        line, _, self._buffer = self._buffer.partition(b"\n")
        code, _, text = bytes(line).partition(b" ")
        if not hmac.compare_digest(code, self._code(not self._client, text)):
            raise PerfError(_OTHER_PROGRAM if self._key == _PROGRAM else "the two sides have different keys")
        return text
