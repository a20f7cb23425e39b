"""The calls into UCX of one connection for what Python hands to it: messages in buffers of the user's, and transfers.

All other messages are sent by C code (``_native/link``). ``SimulatedTransport`` in ``tests/simulation.py`` takes the
place of both.
"""

from __future__ import annotations

import sys
from typing import Any

from .._native import lib
from ..ucp._internal_api import Pinned, Share

_HOST = lib.TU_MEMORY_HOST


class MessagePort:
    """Sends and receives the messages of one connection over its endpoint.

    Sending and receiving return a verdict: 0, UCX is done with the memory; more than 0, the id of an operation in
    flight, which needs the memory until its record arrives; less than 0, a status.
    """

    __slots__ = ("_longest", "_prefix", "engine", "share")

    def __init__(self, share: Share, peer_id: int) -> None:
        self.share = share
        self.engine = share.engine
        threshold = share.engine.context.rendezvous_threshold or 0
        #: The longest message that does not go in pieces. Pieces must stay with their sender until they are received.
        self._longest = lib.TU_LONG if 0 < threshold <= lib.TU_LONGEST_THRESHOLD else sys.maxsize
        #: What the tags of our messages have in common.
        self._prefix = peer_id << 32

    def send(self, queue: int, pins: Pinned) -> int:
        """Sends a message to a tag queue of the peer's."""
        share = self.share
        if pins.size > self._longest:
            return lib.tu_long_send(share.handle, pins.native_list(), pins.size, self._prefix | queue)
        if pins.many is None:
            return lib.tu_tag_send_one(share.handle, pins.address, pins.size, pins.memory, self._prefix | queue)
        return lib.tu_tag_send(share.handle, pins.native_list(), self._prefix | queue, False)

    def receive(self, handle: int, pins: Pinned) -> int:
        """Receives a message that UCX holds."""
        engine = self.engine
        if pins.many is None:
            return self.receive_at(handle, pins.address, pins.size, pins.memory)
        return lib.tu_message_receive(engine.handle, handle, pins.many, engine.tag_dispatch.received)

    def receive_at(self, handle: int, address: Any, size: int, memory: int = _HOST) -> int:
        """Receives a message that UCX holds."""
        engine = self.engine
        return lib.tu_message_receive_one(engine.handle, handle, address, size, memory, engine.tag_dispatch.received)

    def discard(self, handle: int) -> None:
        """Drops a message that UCX holds."""
        engine = self.engine
        if engine.handle is not None:
            engine.tag_dispatch.discard(handle)

    def give_up(self, id: int) -> None:
        """A message that is being received is not wanted any more. A long one ends with its next piece."""
        engine = self.engine
        if engine.handle is not None:
            lib.tu_operation_cancel(engine.handle, id)
