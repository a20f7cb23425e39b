"""The items of a stream, in both directions, and how many of them may be unread."""

from __future__ import annotations

import collections
from typing import Any

import trio

from .. import Channel, PeerClosed
from . import _messages as wire
from ._messages import Codec, decode_head, decode_message, encode_message
from ._service import whole

#: How many items may be unread. A side that has read half of them says so (CREDIT).
UNREAD_ITEMS = 8


class ItemFlow:
    """One side of the conversation of a stream.

    One task may wait for items while another one waits until it may send more. One of them receives for both.
    """

    def __init__(self, talk: Channel, codec: Codec) -> None:
        self._talk = talk
        self._codec = codec
        self._may_send = UNREAD_ITEMS
        self._read = 0
        self._arrived: collections.deque[tuple[int, Any]] = collections.deque()
        self._receiving = False
        self._received = trio.lowlevel.ParkingLot()
        self.over = False

    async def next(self) -> tuple[int, Any]:
        """Returns the kind and the value of the next message that is no CREDIT; a checkpoint.

        Raises:
            wire.BadMessage: the peer has sent something else.
            Others: as ``Channel.receive``.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._arrived:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not self._arrived:
            await self._receive()
        kind, value = self._arrived.popleft()
        if kind == wire.ITEM:
            self._read += 1
            if self._read == UNREAD_ITEMS // 2:
                self._read = 0
                try:
                    self._talk.send_nowait(self._codec.plain[wire.CREDIT] + self._codec.encode(None))
                except trio.WouldBlock:
                    self._read = UNREAD_ITEMS // 2 - 1  # with the next item
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass  # it sends no more
        return kind, value

    async def send(self, value: Any, buffers: Any) -> None:
        """Sends an item, when the peer has room for it; a checkpoint.

        Raises:
            PeerClosed: the peer reads no more.
            TypeError, ValueError: it cannot be sent.
            Others: as ``Channel.send`` and :meth:`next`.
        """
        message = encode_message(self._codec, wire.ITEM, value, buffers)
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._may_send:
            if self.over or self._talk.peer_left:
                raise PeerClosed("the other side of this stream has ended")
            await self._receive()
        self._may_send -= 1
        await self._talk.send(message)

    async def _receive(self) -> None:
        """Receives a message, or waits until another task has."""
        if self._receiving:
            await self._received.park()
            return
        self._receiving = True
        try:
            codec, kind, head, buffers = decode_message(await self._talk.receive())
            value = decode_head(codec, head)
        finally:
            self._receiving = False
            self._received.unpark_all()
        if kind == wire.CREDIT:
            self._may_send += UNREAD_ITEMS // 2
            if self._may_send > UNREAD_ITEMS:
                raise wire.BadMessage("a credit for more items than were sent")
        elif len(self._arrived) > UNREAD_ITEMS + 1:
            raise wire.BadMessage("an item for which there was no credit")
        else:
            self.over |= kind in (wire.REPLY, wire.ERROR)
            self._arrived.append((kind, value if kind == wire.ERROR else whole(value, buffers)))
