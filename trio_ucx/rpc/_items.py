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
#: More unread items than that are refused. It is more than UNREAD_ITEMS because a send that was cancelled may have sent
#: its item, and has its credit again all the same.
_MOST_UNREAD = 4 * UNREAD_ITEMS


class ItemFlow:
    """One side of the conversation of a stream.

    One task may wait for items while another one waits until it may send more. One of them receives for both.
    """

    def __init__(self, talk: Channel, codec: Codec) -> None:
        self._talk = talk
        self._codec = codec
        self._may_send = UNREAD_ITEMS
        #: Items whose sends were cancelled: they may have been sent all the same.
        self._unsure = 0
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
        if self._read >= UNREAD_ITEMS // 2:
            await self._send_credit()
        if self._arrived:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not self._arrived:
            await self._receive()
        kind, value = self._arrived.popleft()
        self._read += kind == wire.ITEM
        return kind, value

    async def _send_credit(self) -> None:
        """Says that items were read. Waits only if the peer has used all its credit."""
        credit = self._codec.plain[wire.CREDIT] + self._codec.encode(None)
        try:
            while self._read >= UNREAD_ITEMS // 2:
                try:
                    self._talk.send_nowait(credit)
                except trio.WouldBlock:
                    if self._read < UNREAD_ITEMS:
                        return
                    await self._talk.send(credit)  # the peer waits for it, so it gets through a full window
                self._read -= UNREAD_ITEMS // 2
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it sends no more

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
        try:
            await self._talk.send(message)
        except trio.Cancelled:
            self._may_send += 1
            self._unsure += 1
            raise

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
            if self._may_send > UNREAD_ITEMS + self._unsure:
                raise wire.BadMessage("a credit for more items than were sent")
            self._may_send = min(self._may_send, UNREAD_ITEMS)
        elif kind not in (wire.ITEM, wire.END, wire.REPLY, wire.ERROR):
            raise wire.BadMessage(f"a message of kind {kind}, which is no item")
        elif len(self._arrived) > _MOST_UNREAD:
            raise wire.BadMessage("an item for which there was no credit")
        else:
            self.over |= kind in (wire.REPLY, wire.ERROR)
            self._arrived.append((kind, value if kind == wire.ERROR else whole(value, buffers)))
