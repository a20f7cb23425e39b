"""The authenticated channel between the two sides of ``check HOST``: lines of JSON over TCP, without UCX.

Each side sends a nonce. From then on each line has a code, made with a key that both sides derive from the authkey and
the nonces. A side with another key is noticed at the first of these lines.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

import trio

from ..errors import PerfError

#: What tells this program and its version from others.
_GREETING = "trio_ucx check 1"
#: The longest line, in bytes (a worker address may have 48,000), and that of a peer that has shown no key yet.
_LONGEST, _LONGEST_OF_STRANGERS = 1 << 18, 1 << 14
#: Seconds for an answer.
ANSWER = 10.0


class ControlError(PerfError):
    """The two sides cannot talk about the checks; the text says why."""


class WrongKey(ControlError):
    """The two sides have different keys."""


class ControlChannel:
    """The channel, for one side."""

    def __init__(self, stream: trio.SocketStream, *, client: bool) -> None:
        self._stream, self._client = stream, client
        self._key, self._sent, self._received = b"", 0, 0
        self._buffer = bytearray()

    async def begin(self, authkey: bytes | None, facts: dict[str, Any]) -> dict[str, Any]:
        """Authenticates the sides to each other, and returns the other side's facts."""
        nonce = secrets.token_hex(32)
        await self.send({_GREETING: nonce})
        greeting = await self.receive()
        if _GREETING not in greeting:
            raise ControlError("the other side is of another release: use one release of trio_ucx on both sides")
        nonces = [nonce, str(greeting[_GREETING])]
        self._key = hmac.digest(authkey or b"", "/".join(nonces if self._client else nonces[::-1]).encode(), "sha256")
        await self.send(facts)
        return await self.receive()

    def _code(self, client: bool, number: int, line: bytes) -> bytes:
        return hmac.digest(self._key, b"%d %d %s" % (client, number, line), "sha256").hex().encode()

    async def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode()
        code, self._sent = self._code(self._client, self._sent, line), self._sent + 1
        try:
            await self._stream.send_all(b"%s %s\n" % (code, line))
        except trio.BrokenResourceError:
            raise ControlError("the other side has closed the connection") from None

    async def receive(self, seconds: float = ANSWER) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            ControlError: the peer has closed the connection, does not answer, has another key, or is something else.
        """
        with trio.move_on_after(seconds) as scope:
            line = await self._receive_line()
        if scope.cancelled_caught:
            raise ControlError(f"the other side did not answer within {seconds:g} seconds")
        code, _, text = line.partition(b" ")
        right = hmac.compare_digest(code, self._code(not self._client, self._received, text))
        if not right and self._received == 1:
            raise WrongKey("the two sides have different keys")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not right or not isinstance(message, dict):
            raise ControlError("the other side is not `python -m trio_ucx check`")
        return message

    async def _receive_line(self) -> bytes:
        """Returns the next line. After the greetings, a peer that closes has seen that our key differs: b""."""
        while b"\n" not in self._buffer:
            try:
                more = await self._stream.receive_some()
            except trio.BrokenResourceError:
                more = b""
            if not more and self._received == 1:
                return b""
            if not more:
                raise ControlError("the other side has closed the connection")
            self._buffer += more
            if len(self._buffer) > (_LONGEST if self._received > 1 else _LONGEST_OF_STRANGERS):
                raise ControlError("the other side is not `python -m trio_ucx check`")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)
