"""Faults in what one Connection sends: messages that get lost, or come late.

They stand where a Connection hands its messages to UCX: in place of the :class:`MessagePort` of its sending half.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial

import trio

from .. import Connection, UCXError
from .._link import Link, MessagePort, divert
from .._native import lib
from .._util.arguments import ALL_BITS, check_integer, check_timeout
from ..ucp import Status
from ..ucp._internal_api import Pinned, pending_send_of_bytes


class FaultyPort(MessagePort):
    """Drops messages, or passes them on later. C code gives it what it sends itself (``tu_link_divert``)."""

    __slots__ = ("_context", "_late", "_link", "delay", "left")

    def __init__(self, link: Link) -> None:
        super().__init__(link.share, link.peer_id)
        self._link = link
        #: How many more bytes get through.
        self.left = math.inf
        #: Seconds by which messages are late.
        self.delay = 0.0
        #: What sends the late messages, in order, and when.
        self._late: deque[tuple[float, Callable[[], None]]] = deque()
        self._context = divert(link.native, self.send_bytes)

    @property
    def faulty(self) -> bool:
        return self.left < math.inf or self._is_late()

    def send_bytes(self, queue: int, data: bytes) -> int:
        """Sends what C code would have sent."""
        if self._drops(len(data)):
            return 0
        if not self._is_late():
            return self._pass_on(queue, data)
        self._send_later(partial(self._post_bytes, queue, data))
        return 0

    def send(self, queue: int, pins: Pinned) -> int:
        stays = self._link.sending.stays(pins.size) or pins.memory > lib.TU_MEMORY_HOST
        if self._drops(pins.size):
            return self._wait_for_ever() if stays else 0
        if not self._is_late():
            return super().send(queue, pins)
        if not stays:
            self._send_later(partial(self._post_bytes, queue, pins.copy(pins.size)))
            return 0
        placeholder = self._wait_for_ever()
        if placeholder > 0:
            self._send_later(partial(self._post, placeholder, queue, pins))
        return placeholder

    def _drops(self, size: int) -> bool:
        if self.left <= 0 or size > self.left:
            self.left = 0  # from here on everything, in order
            return True
        self.left -= size
        return False

    def _wait_for_ever(self) -> int:
        """An operation that ends only when it is cancelled, as the end of the Connection does."""
        return lib.tu_tag_wait(self.engine.handle, secrets.randbits(63), ALL_BITS)  # a tag that nobody uses

    def _pass_on(self, queue: int, data: bytes) -> int:
        """Hands bytes to UCX, which may keep a copy of them."""
        verdict = lib.tu_tag_send_one(self.share.handle, data, len(data), lib.TU_MEMORY_HOST, self._prefix | queue)
        if verdict > 0:
            pending_send_of_bytes(self.engine, verdict, data, "sending a message with faults", self.share)
            return 0
        return verdict

    # ---- late messages ----

    def _is_late(self) -> bool:
        return bool(self.delay or self._late)

    def _send_later(self, post: Callable[[], None]) -> None:
        due = trio.current_time() + self.delay
        self._late.append((max(due, self._late[-1][0]) if self._late else due, post))
        if len(self._late) == 1:
            self.engine.run.spawn(self._send_late, "trio_ucx.testing: messages that are delayed")

    async def _send_late(self) -> None:
        while self._late:
            due, post = self._late[0]
            await trio.sleep_until(due)
            if self.share.gone or not self.engine.usable:
                self._late.clear()
            else:
                post()
                self._late.popleft()
                self.engine.submit()

    def _post_bytes(self, queue: int, data: bytes) -> None:
        verdict = self._pass_on(queue, data)
        if verdict < 0:
            self.share.fail(UCXError(Status(verdict), "sending a message that was delayed"))

    def _post(self, placeholder: int, queue: int, pins: Pinned) -> None:
        """Sends a message whose operation has had an id that stands for none of UCX's."""
        operation = self.engine.in_flight.pop(placeholder)
        lib.tu_operation_cancel(self.engine.handle, placeholder)
        verdict = super().send(queue, pins)
        if verdict > 0:
            self.engine.adopt(verdict, operation.posted, verdict)
        else:
            operation.complete(verdict, 0, 0)


class Faults:
    """Faults to order in what a Connection sends; made for one that is open.

    They concern its messages and its byte stream in one direction, and what the library sends for them: credit for the
    peer, the handshake of a close. The control socket stays as it is, so neither side learns that anything is wrong,
    and an abort or the end of a process is noticed at once. What is done on ``connection.endpoint`` is not concerned.

    Raises:
        TypeError: not a Connection.
    """

    def __init__(self, connection: Connection) -> None:
        if not isinstance(connection, Connection):
            raise TypeError(f"faults are those of a Connection, not of a {type(connection).__name__}")
        link = connection._link
        port = link.sending.port
        if not isinstance(port, FaultyPort):
            port = link.sending.port = FaultyPort(link)
        self._port = port

    def drop_after(self, nbytes: int) -> None:
        """Lets ``nbytes`` more bytes through, and nothing after them: the peer waits, and is told nothing.

        Messages are dropped whole: the first is the one that does not fit. Bytes are counted as they go to UCX, so
        small messages that are sent as one, and the library's own, count with their headers. A send of a message that
        is dropped returns as if it had been sent, if it is shorter than the rendezvous threshold (65 KiB); one of a
        longer message waits until the Connection ends. A message of which a part was sent before is not dropped.

        Raises:
            TypeError, ValueError: no integer, or negative.
        """
        self._port.left = check_integer(nbytes, "nbytes", 0, 2**63 - 1)

    def delay(self, seconds: float) -> None:
        """Makes what is sent from now on so many seconds late, in order; 0 ends that.

        The time is that of Trio's clock. The pieces of a message of more than 1 MiB are late together. When the
        Connection ends, what is still late is lost.

        Raises:
            TypeError, ValueError: no number of seconds, negative, or infinite.
        """
        seconds = check_timeout(seconds, "seconds")
        if seconds == math.inf:
            raise ValueError("seconds must be finite: drop_after(0) lets nothing through")
        self._port.delay = seconds
