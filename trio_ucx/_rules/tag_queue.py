"""Tag queues: the messages that arrived, the receives that wait for them, and which receive gets which message. Pure.

A tag queue is a user's tag, the byte stream, or a conversation. A :class:`TagQueue` has all that one side knows about
it, in both directions. Its methods are about the messages that arrive. What may be sent is decided in ``credit.py``,
which keeps its state of each queue in its attributes.

A tag queue pairs its messages with its receives in order: the first message goes to the first receive. Receives
complete in order, too, so a message is never overtaken when a receive is cancelled.

A message is HELD while UCX has it, MOVING while UCX writes it to memory, READY when it is in memory. A small message is
moved to memory of ours as soon as it arrives; a large one only when there is a receive for it, to the buffer of that
receive. If that receive is cancelled meanwhile, the transfer goes on, and the receive keeps its buffer, *detached* from
its task. When the transfer ends, the message is saved out of the buffer, which then is its owner's again, and the next
receive of the queue gets the message, whichever that is. A receive that looks at its message (``Want.SUITABLE``) and
does not want it ends with an error, and leaves the message in the same way.

When the peer is lost, a message that had not arrived whole may be missing between messages that had. A tag queue ends
at the first missing message: it delivers nothing behind it, and every later receive gets the error.

The queue decides; it never touches memory. A :class:`Receive` owns a buffer of the user's, and copies to it and from
it. A :class:`Mover` begins transfers. :class:`Packed` messages give out their bytes.
"""

from __future__ import annotations

import collections
import enum
from typing import Any, Protocol

from . import wire


class MessageState(enum.Enum):
    HELD = enum.auto()
    MOVING = enum.auto()
    READY = enum.auto()


class Want(enum.Enum):
    BYTES = enum.auto()
    COPY = enum.auto()  # bytes, to be copied to a small buffer of the user's, whose size is the limit
    INTO = enum.auto()
    LENGTH = enum.auto()  # wait_message: does not take the message
    SUITABLE = enum.auto()  # into a buffer, if the receive wants it: else the message stays


class Message:
    """A message of a tag queue."""

    __slots__ = ("contents", "error", "handle", "length", "queue", "receive", "state", "whole")

    def __init__(self, queue: TagQueue, handle: int, length: int) -> None:
        self.queue = queue
        #: Whether UCX is known to have the whole message.
        self.whole = False
        #: UCX's handle while it is HELD, the id of the operation while it is MOVING.
        self.handle = handle
        self.length = length
        self.state = MessageState.HELD
        #: Its bytes, if they are, or will be, in memory of ours.
        self.contents: bytes | None = None
        #: Why it could not be saved out of a buffer of the user's.
        self.error: Exception | None = None
        #: The receive whose buffer it lies in or is written to.
        self.receive: Receive | None = None

    @property
    def with_sender(self) -> bool:
        """True if the message may still be with its sender."""
        return self.state is MessageState.HELD and not self.whole


class Packed(Protocol):
    """Small messages of one length that are READY: what was received of such at once."""

    #: The length of each.
    length: int
    #: How many were not taken yet.
    remaining: int

    @property
    def first(self) -> bytes:
        """The first of them, which is not taken."""

    def pop(self) -> bytes:
        """Takes the first of them."""

    def pop_all(self) -> bytes:
        """Takes all that are left, one after the other."""


class Receive(Protocol):
    """A receive that waits, or whose message is being written to its buffer. Owns that buffer, if there is one."""

    want: Want
    #: The longest message that it can take.
    limit: int
    #: The message that lies in its buffer or is written to it.
    message: Message | None
    #: Whether its task is gone, while a message is written to its buffer.
    detached: bool

    def fits(self, length: int) -> bool:
        """Returns True if a message of this length may be written to its buffer at once."""

    def look(self, contents: bytes | None) -> Exception | None:
        """Looks at a message. Returns None if it takes the message, else the error to end with (Want.SUITABLE only).

        Args:
            contents: the message, which it copies to its buffer, if it has one; None if the message lies there.

        Raises:
            RuntimeError: the device of the buffer failed.
        """

    def fill(self, contents: bytes) -> None:
        """Copies a message to its buffer, if it has one.

        Raises:
            RuntimeError: the device of the buffer failed.
        """

    def save(self, length: int) -> bytes:
        """Copies a message out of its buffer.

        Raises:
            RuntimeError: the device of the buffer failed.
            MemoryError: there is no memory for the copy.
        """

    def succeed(self, value: Any) -> None:
        """Releases the buffer, and ends with a value."""

    def fail(self, error: Exception) -> None:
        """Ends with an error, and releases the buffer unless it is detached."""

    def fail_too_long(self, length: int) -> None:
        """Fails because the message is longer than its limit, and was dropped."""

    def release(self) -> None:
        """Releases the buffer: the task is gone, and so is the transfer."""


class Mover(Protocol):
    """Moves messages to memory, and keeps the books."""

    def move(self, message: Message, receive: Receive | None) -> None:
        """Begins to write a HELD message to the buffer of a receive, or to fresh memory.

        Sets its state to READY if that is done at once, else to MOVING, and calls ``TagQueue.moved`` later.

        Raises:
            MemoryError: there is not enough memory; the message stays HELD.
        """

    def consumed(self, message: Message) -> None:
        """The user has taken the message, or it was dropped."""

    def dropped(self, message: Message) -> None:
        """A message was dropped that the user could not receive: its sender is told."""

    def discard(self, message: Message) -> None:
        """Nobody wants a HELD message."""

    def give_up(self, message: Message) -> None:
        """Nobody will get a MOVING message: the rest of it need not arrive. Still calls ``TagQueue.moved`` later."""

    def detached(self, receive: Receive, detached: bool) -> None:
        """The buffer of a receive now belongs to the library, or no longer does."""

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: the connection ends. Never raises."""


#: Transfers of one queue that may go on at once.
AHEAD = 8
#: How many bytes those may be that come before one into memory of ours. More large ones at once would keep as much
#: fresh memory in use, which costs more than the transfer; a user's buffer is there anyway.
FRESH_AHEAD = 2**24


#: Used instead of an empty deque, which takes 600 bytes: a tag queue may have a single empty message.
NOTHING: Any = ()
#: Up to so many are kept in a list rather than a deque, for the same reason.
_FEW = 8


class TagQueue:
    """One tag queue of a connection, in both directions.

    Attributes:
        number: the number that this side reads, by which its connection finds it.
        written: the number that this side writes to: the same, unless it is a conversation's.
    """

    __slots__ = (
        "_advancing",
        "_again",
        "_later",
        "admitted_by_peer",
        "admitted_by_us",
        "channel",
        "failure",
        "last_sent",
        "messages",
        "mover",
        "newest_only",
        "number",
        "packed",
        "receives",
        "waiting_sends",
        "written",
    )

    def __init__(self, number: int, mover: Mover) -> None:
        self.number = number
        self.written = wire.other_direction(number)
        self.mover = mover
        #: The channel that uses it, if one does (``_link.conversations.ChannelState``).
        self.channel: Any = None
        # What is sent: see SendCredit.
        #: Its message that was charged last, counted over all messages of the connection; 0 if there was none.
        self.last_sent = 0
        #: The sends that wait for credit.
        self.waiting_sends: collections.OrderedDict[Any, None] = NOTHING
        #: Whether the peer has admitted the next message.
        self.admitted_by_peer = False
        # What arrives.
        #: Whether this side has admitted the peer's next message: see ReceiveCredit.
        self.admitted_by_us = False
        #: Whether a message takes the place of those before it that no receive waits for.
        self.newest_only = False
        #: The error of all later receives: a message is missing, or the queue has ended. None if neither is the case.
        self.failure: Exception | None = None
        #: The first packed messages, which come before all others; while there are any, no receive waits.
        self.packed: Packed | None = None
        self._later: collections.deque[Packed] | list[Packed] = NOTHING
        self.messages: collections.deque[Message] | list[Message] = NOTHING
        self.receives: collections.deque[Receive] = NOTHING
        self._advancing = False
        self._again = False

    @property
    def stream(self) -> bool:
        """True if its messages are pieces of the byte stream, none of which may be dropped."""
        return self.number == wire.STREAM

    @property
    def empty(self) -> bool:
        """True if all messages were taken, no receive waits, and the queue has not failed or ended."""
        return not (self.messages or self.receives or self.packed) and self.failure is None

    def idle(self, arrived_there: int) -> bool:
        """True if a new queue with this number would know as much.

        Args:
            arrived_there: how many messages of the connection the peer is known to have received.
        """
        return (
            self.empty
            and self.last_sent <= arrived_there
            and not (self.waiting_sends or self.admitted_by_peer or self.admitted_by_us)
            and self.channel is None
            and not self.newest_only
        )

    @property
    def unread(self) -> int:
        """Returns the number of messages that have arrived and were not taken."""
        packed = 0 if self.packed is None else self.packed.remaining + sum(each.remaining for each in self._later)
        return packed + len(self.messages)

    @property
    def has_spare(self) -> bool:
        """True if a message is there for which no receive waits."""
        return self.unread > len(self.receives)

    @property
    def lacks_messages(self) -> bool:
        """True if more receives wait than there are messages. (While there are packed messages, no receive waits.)"""
        return len(self.receives) > len(self.messages)

    @property
    def held(self) -> tuple[int, int]:
        """Returns how many messages nobody has taken yet, and their bytes."""
        packed = [each for each in (self.packed, *self._later) if each is not None]
        size = sum(message.length for message in self.messages) + sum(each.remaining * each.length for each in packed)
        return self.unread, size

    @property
    def first(self) -> bytes | None:
        """The first message, which is not taken; None if there is none in memory of ours."""
        if self.packed is not None:
            return self.packed.first
        message = self.messages[0] if self.messages else None
        return message.contents if message is not None and message.state is MessageState.READY else None

    # ---- messages arrive ----

    def arrived(self, handle: int, length: int, *, whole: bool | None) -> None:
        """A message arrived.

        Args:
            whole: whether UCX has the whole message; False if it stays with its sender until it is received, None if
                that is not known. Unless it is False, a message without a receive is moved to memory of ours.
        """
        message = Message(self, handle, length)
        message.whole = whole is True
        if self.failure is not None:
            self._drop(message)
            return
        self._add_messages([message])
        self.advance()
        if whole is not False and message.state is MessageState.HELD and message in self.messages:
            try:
                self.mover.move(message, None)
            except MemoryError:
                return  # UCX keeps the message until it is received
            self.advance()

    def give(self, data: bytes) -> bool:
        """Gives one small message, which has just arrived, to the first receive: the usual case.

        Returns:
            False if there is more to do: use :meth:`packed_arrived`.
        """
        if self.messages or self._advancing or self.failure is not None:
            return False
        receive = self.receives[0]
        want = receive.want
        if want is Want.LENGTH or want is Want.SUITABLE or len(data) > receive.limit:
            return False
        if want is Want.INTO:
            self._fill_first(receive, data)
        else:
            self.receives.popleft()
            receive.succeed(data)
        return True

    def packed_arrived(self, packed: Packed) -> int:
        """Packed messages arrived. Returns how many of them were consumed at once."""
        if self.failure is not None:
            return packed.remaining
        before = packed.remaining
        if not self.messages and not self._advancing:
            while self.receives and packed.remaining:
                receive = self.receives[0]
                if receive.want in (Want.LENGTH, Want.SUITABLE) or packed.length > receive.limit:
                    break
                if receive.want is Want.INTO:
                    self._fill_first(receive, packed.pop())
                else:
                    data = packed.pop()
                    self.receives.popleft()
                    receive.succeed(data)
            if not self.receives:
                if packed.remaining:
                    if self.packed is None:
                        self.packed = packed
                    else:
                        self._add_later(packed)
                consumed = before - packed.remaining
                if self.newest_only:
                    self.keep_newest()
                return consumed
        consumed = before - packed.remaining
        self._add_messages(self._messages_of(packed))
        self.advance()
        return consumed

    def _fill_first(self, receive: Receive, data: bytes) -> None:
        """Gives a message to the first receive, which has a buffer."""
        try:
            receive.fill(data)
        except RuntimeError as error:
            self._remove(receive)
            receive.fail(error)
        else:
            self._remove(receive)
            receive.succeed(len(data))

    def _add_later(self, packed: Packed) -> None:
        later = self._later
        if not later:
            self._later = [packed]
        else:
            if type(later) is list and len(later) >= _FEW:
                self._later = later = collections.deque(later)
            later.append(packed)

    def next_packed(self) -> None:
        """The first packed messages are used up: goes on to the next ones."""
        if self._later:
            self.packed = self._later[0]
            del self._later[0]
        else:
            self.packed = None

    def _add_messages(self, messages: list[Message]) -> None:
        if self.messages:
            if type(self.messages) is list and len(self.messages) >= _FEW:
                self.messages = collections.deque(self.messages)
            self.messages.extend(messages)
        else:
            self.messages = messages if len(messages) <= _FEW else collections.deque(messages)

    def _messages_of(self, packed: Packed) -> list[Message]:
        messages = []
        while packed.remaining:
            message = Message(self, 0, packed.length)
            message.state = MessageState.READY
            message.contents = packed.pop()
            messages.append(message)
        return messages

    def unpack(self) -> None:
        """Turns packed messages into messages like all others."""
        ready: list[Message] = []
        while self.packed is not None:
            ready += self._messages_of(self.packed)
            self.next_packed()
        if ready:
            self.messages = collections.deque([*ready, *self.messages]) if self.messages or len(ready) > _FEW else ready

    def keep_newest(self) -> None:
        """Drops all messages for which no receive waits but the newest one; from now on, also when one arrives."""
        self.newest_only = True
        self.unpack()
        self._drop_older()

    def _drop_older(self) -> None:
        for message in list(self.messages)[len(self.receives) : -1]:
            # Not one that is being written to the buffer of a receive, which therefore cannot take another one.
            if message in self.messages and (message.receive is None or message.receive.detached):
                self.messages.remove(message)
                if message.state is MessageState.READY:
                    self._part(message)
                self._drop(message)

    # ---- receives ----

    def wait(self, receive: Receive) -> None:
        """Adds a receive, which may complete at once."""
        if self.packed is not None:
            self.unpack()
        if self.receives is NOTHING:
            self.receives = collections.deque()
        if self.number == wire.UNACCEPTED:  # any task will do: the last one polls, the others would have to be woken
            self.receives.appendleft(receive)
        else:
            self.receives.append(receive)
        if self.messages:
            self.advance()

    def ready_now(self) -> Message | None:
        """The message that a receive could have without waiting."""
        self.unpack()
        if self.messages and not self.receives and self.messages[0].state is MessageState.READY:
            return self.messages[0]
        return None

    def take_ready(self, limit: int) -> Message | None:
        """Takes the first message if a receive with this limit would have it at once. Call it if none are packed."""
        message = self.ready_now() if self.messages else None
        if message is None or message.contents is None or message.error is not None or message.length > limit:
            return None
        del self.messages[0]
        return message

    def cancel(self, receive: Receive) -> None:
        """The task of a receive was cancelled."""
        self.receives.remove(receive)
        message = receive.message
        if message is None:
            receive.release()
        elif message.state is MessageState.READY:
            self._save(message)
            receive.release()
        else:
            self._detach(receive)
        self.advance()

    def _detach(self, receive: Receive) -> None:
        """The task of a receive is gone, while a message is written to its buffer: it keeps the buffer until then."""
        receive.detached = True
        self.mover.detached(receive, True)

    def _remove(self, receive: Receive) -> None:
        """Removes a receive that is about to end. Anything that may fail is done before."""
        if self.receives[0] is receive:
            self.receives.popleft()
        else:
            self.receives.remove(receive)

    # ---- transfers ----

    def moved(self, message: Message, error: Exception | None) -> None:
        """A MOVING message is READY, or will never be."""
        receive = message.receive
        detached = receive is not None and receive.detached
        if receive is not None and detached:
            self.mover.detached(receive, False)
        if message not in self.messages:  # given up before
            self._part(message)
        elif error is not None:
            self._end_at(message, error)
            self._part(message)
        else:
            message.state = MessageState.READY
            if detached:
                self._save(message)
        self.advance()

    def _part(self, message: Message) -> None:
        """A message has nothing to do with a user's buffer any more. A detached receive lets go of its buffer."""
        receive, message.receive = message.receive, None
        if receive is not None:
            receive.message = None
            if receive.detached:
                receive.release()

    def _save(self, message: Message) -> None:
        """Copies a READY message out of a user's buffer: from now on it is in memory of ours."""
        if message.receive is not None:
            try:
                message.contents = message.receive.save(message.length)
            except (RuntimeError, MemoryError) as error:
                message.error = error
            self._part(message)

    def advance(self) -> None:
        """Completes what can be completed, in order, and begins transfers for the receives that are next."""
        # A transfer that fails at once ends the connection, which calls this again: then once more.
        self._again = True
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._again:
                self._again = False
                while self._complete_first():
                    pass
                self._move_ahead()
            if self.newest_only:
                self._drop_older()
        finally:
            self._advancing = False

    def _complete_first(self) -> bool:
        if not self.messages or not self.receives:
            return False
        message, receive = self.messages[0], self.receives[0]
        if receive.want is Want.LENGTH:
            self.receives.popleft()
            receive.succeed(message.length)
            return True
        if receive.message is not None and receive.message is not message:
            # A cancellation shifted the pairs: another message lies in its buffer, or is on its way there.
            if receive.message.state is not MessageState.READY:
                if receive.message not in self.messages:  # UCX may still write to the buffer: no message can go there
                    assert self.failure is not None, "only the end of a queue drops what is on its way"
                    self._end_at(message, self.failure)
                return False
            self._save(receive.message)
        if message.length > receive.limit:
            return self._too_long(message, receive)
        if message.state is MessageState.HELD:
            try:
                self._move(message, receive)
            except MemoryError as error:
                return self._no_memory(message, receive, error)
        if not self.messages or self.messages[0] is not message or not self.receives or self.receives[0] is not receive:
            return True  # it could not be moved, and its receive has failed; or that was cancelled
        if message.state is not MessageState.READY:
            return False
        self._deliver(message, receive)
        return True

    def _too_long(self, message: Message, receive: Receive) -> bool:
        if message.state is MessageState.MOVING:
            return False
        self._drop_first(message)
        self._remove(receive)
        receive.fail_too_long(message.length)
        self.mover.dropped(message)
        return True

    def _no_memory(self, message: Message, receive: Receive, cause: MemoryError) -> bool:
        """Not enough memory for the first message: drops it, unless it is a piece of the byte stream."""
        fate = "it can be read again" if self.stream else "it was dropped"
        if receive.want is not Want.INTO and not self.stream:
            fate += "; receive_into takes a buffer of yours"
        error = MemoryError(f"there is no memory for a message of {message.length} bytes: {fate}")
        error.__cause__ = cause
        if not self.stream:
            self._drop_first(message)
        self._remove(receive)
        receive.fail(error)
        if not self.stream:
            self.mover.dropped(message)
        return True

    def _drop_first(self, message: Message) -> None:
        """Drops the first message, which does not suit the first receive."""
        del self.messages[0]
        self._part(message)
        self._drop(message)

    def _drop(self, message: Message) -> None:
        self._let_go(message)
        self.mover.consumed(message)

    def _let_go(self, message: Message) -> None:
        if message.state is MessageState.HELD:
            self.mover.discard(message)
        elif message.state is MessageState.MOVING:
            self.mover.give_up(message)

    def _move(self, message: Message, receive: Receive) -> None:
        # A peer that dies may have written only part of a short message. A receive that waited for the rest would keep
        # the user's buffer, so such a message is received into memory of ours and copied.
        if receive.fits(message.length) and not message.whole:
            message.receive = receive
            receive.message = message
            try:
                self.mover.move(message, receive)
            except BaseException:
                if message.state is MessageState.HELD:  # else UCX may be writing to the buffer
                    self._part(message)
                raise
        else:
            self.mover.move(message, None)

    def _move_ahead(self) -> None:
        """Begins the transfers of receives that are not first, so that they overlap."""
        if len(self.receives) < 2 or len(self.messages) < 2:
            return
        takers = [receive for receive in self.receives if receive.want is not Want.LENGTH][:AHEAD]
        before = 0
        for message, receive in zip(list(self.messages), takers, strict=False):
            if before >= FRESH_AHEAD and receive.want is not Want.INTO:
                return
            before += message.length
            if message.state is MessageState.HELD and receive.message is None and message.length <= receive.limit:
                try:
                    self._move(message, receive)
                except MemoryError:
                    return  # raised when its turn comes
                if self._again:
                    return  # things may have changed

    def _deliver(self, message: Message, receive: Receive) -> None:
        if message.receive is not receive:
            self._save(message)
        error = self._look(message, receive)
        if error is not None:
            self._remove(receive)
            receive.fail(error)
            return
        self._part(message)
        del self.messages[0]
        self._remove(receive)
        if message.error is not None:
            receive.fail(message.error)
        else:
            receive.succeed(message.length if receive.want is Want.INTO else message.contents)
        self.mover.consumed(message)

    def _look(self, message: Message, receive: Receive) -> Exception | None:
        """Lets a receive look at its message, and take it. Returns its error if it leaves it.

        A message in the receive's buffer that it does not want is saved, and it looks once more: it may convert it.
        """
        try:
            error = receive.look(None) if message.receive is receive else None
            if error is not None:
                self._save(message)
            if message.contents is not None and message.error is None:
                error = receive.look(message.contents)
        except RuntimeError as failure:
            message.error, error = failure, None
        except Exception as failure:  # its buffer has changed meanwhile, say
            self._save(message)
            error = failure
        return error if message.error is None else None

    # ---- the end ----

    def drop_held(self) -> None:
        """The peer closes: drops the messages that are still with it, because their sends were cancelled."""
        for message in [message for message in self.messages if message.with_sender]:
            if message in self.messages:
                self.messages.remove(message)
                self._drop(message)
        self.advance()

    def lose(self, error: Exception) -> None:
        """The peer is lost: the queue ends at the first message that has not arrived whole.

        UCX may keep the buffers of messages whose transfer has begun, for a while or for ever.
        """
        missing = next((one for one in self.messages if one.with_sender or one.state is MessageState.MOVING), None)
        if missing is not None:
            self._end_at(missing, error)

    def _end_at(self, missing: Message, error: Exception) -> None:
        """Drops a message that will not arrive, and everything behind it."""
        self.failure = error
        message = None
        while message is not missing:
            message = self.messages.pop()
            if message.state is MessageState.READY:
                self._part(message)
            self._drop(message)

    @property
    def moving(self) -> bool:
        """True if a message is being written to memory."""
        return any(message.state is MessageState.MOVING for message in self.messages)

    def fail_unserved(self, error: Exception) -> bool:
        """No message will arrive any more: ends the receives if no message is left, and returns whether there were any.

        As long as a message is on its way, all receives wait: if its receive is cancelled, the next receive gets it.
        """
        self.advance()
        if self.messages or not self.receives:
            return False
        for receive in list(self.receives):
            self.give_up(receive, error)
        return True

    def give_up(self, receive: Receive, error: Exception) -> None:
        """Ends a receive whatever its state; a message in its buffer is not received any more.

        If UCX still writes a message to its buffer, the buffer stays pinned until UCX releases it.
        """
        message = receive.message
        if message is not None:
            if message.state is MessageState.MOVING:
                self._detach(receive)
            else:
                self._part(message)
        self._remove(receive)
        receive.fail(error)

    def drop_all(self, error: Exception) -> None:
        """The user is done with the queue: drops what is there and what will arrive. All receives get the error."""
        self.unpack()
        for receive in list(self.receives):
            self.give_up(receive, error)
        self.failure = error
        while self.messages:
            message = self.messages.pop()
            if message.state is MessageState.READY:
                self._part(message)
            self._drop(message)

    def close(self, error: Exception) -> None:
        """Ends the queue: all receives, now and later, get the error."""
        self.failure = error
        self.packed = None
        self._later = NOTHING
        for receive in list(self.receives):
            self.give_up(receive, error)
        messages, self.messages = self.messages, NOTHING
        for message in messages:
            self._let_go(message)
