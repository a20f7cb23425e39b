"""Lanes: messages that arrived, receives that wait, and who gets what. Pure: moving bytes is somebody else's.

A lane pairs its messages with its receives in order: the first message goes to the first receive. Receives complete in
order, too, so that a message is never overtaken when a receive is cancelled.

A message is HELD while UCX has it, MOVING while UCX writes it to memory, READY when it is in memory. A small message is
moved to memory of ours as soon as it arrives; a large one only when a receive is there for it, to the buffer of that
receive. If that receive is cancelled meanwhile, the transfer goes on; afterwards the message is copied out of the
buffer, which is then its owner's again, and the next receive of the lane gets it, whichever that is.

When the peer is lost, messages that had not arrived whole are missing among those that had. The lane of the byte
stream is *sequential*: there nothing is handed out behind a message that is missing.
"""

from __future__ import annotations

import collections
import enum
from typing import Any, Protocol

import outcome
from outcome import Error, Value

from .ucp import Status, UCXError
from .ucp._buffers import Pinned
from .ucp._pending import Pending


class State(enum.Enum):
    HELD = enum.auto()
    MOVING = enum.auto()
    READY = enum.auto()


class Want(enum.Enum):
    BYTES = enum.auto()
    COPY = enum.auto()  # bytes, to be copied to a small buffer of the user's, whose size is the limit
    INTO = enum.auto()
    LENGTH = enum.auto()  # wait_message: does not take the message


class Message:
    """A message of a lane."""

    __slots__ = ("data", "error", "handle", "lane", "length", "owner", "pins", "state", "whole")

    def __init__(self, lane: Lane, handle: int, length: int) -> None:
        self.lane = lane
        #: Whether UCX is known to have the whole message.
        self.whole = False
        self.handle = handle
        self.length = length
        self.state = State.HELD
        #: Its bytes, once READY in memory of ours.
        self.data: bytes | None = None
        #: Why it could not be copied between that and the user's buffer, which was a device's.
        self.error: Exception | None = None
        #: The user's buffer that it is written to or lies in.
        self.pins: Pinned | None = None
        #: Whose that buffer is; None when that receive was cancelled.
        self.owner: Receive | None = None


class Run:
    """Small messages that are READY, all of one length: what has been received of such at once."""

    __slots__ = ("_data", "_position", "left", "length")

    def __init__(self, count: int, length: int, data: bytes) -> None:
        self.left = count
        self.length = length
        self._data = data
        self._position = 0

    def pop(self) -> bytes:
        """The first of them."""
        start = self._position
        self._position = end = start + self.length
        self.left -= 1
        if start == 0 and self.left == 0:
            return self._data
        data = self._data[start:end]
        if end > _KEPT and self.left and end > len(self._data) - end:
            self._data = self._data[end:]  # what is unread must not keep much that is read
            self._position = 0
        return data

    def rest(self) -> bytes:
        """All that are left, one after the other."""
        self.left = 0
        return self._data[self._position :] if self._position else self._data


class Receive(Pending):
    """A receive that waits, or is about to be completed."""

    __slots__ = ("lane", "limit", "message", "pins", "want")

    def __init__(self, lane: Lane, want: Want, pins: Pinned | None, limit: int) -> None:
        super().__init__()
        self.lane = lane
        self.want = want
        self.pins = pins
        #: The longest message that it can take.
        self.limit = limit
        #: The message that is in, or being written to, its buffer.
        self.message: Message | None = None

    def abandon(self) -> bool:
        self.lane.abandon(self)
        return True

    def internal_error(self, error: BaseException) -> None:
        self.lane.mover.internal_error(error)


class Mover(Protocol):
    """Moves bytes, and keeps the books."""

    def move(self, message: Message, pins: Pinned | None) -> None:
        """Begins to write a HELD message to ``pins``, or to fresh memory.

        Sets its state to READY if that is done at once, else to MOVING, and calls ``lane.moved`` later.

        Raises:
            MemoryError: there is not enough memory; the message stays HELD.
        """

    def run_consumed(self, length: int, count: int) -> None:
        """So many messages of this length were taken out of a run by the user, or thrown away."""

    def consumed(self, message: Message) -> None:
        """The message was taken by the user, or thrown away for being too long."""

    def discard(self, message: Message) -> None:
        """A HELD message is not wanted by anybody."""

    def orphaned(self, message: Message, alone: bool) -> None:
        """A user's buffer now belongs (``alone``), or no longer belongs, to the library."""

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: the connection ends. Never raises."""


#: So many bytes that were read already may be kept.
_KEPT = 4096
#: Transfers of one lane that may go on at once.
AHEAD = 8
#: How many bytes those may be that come before one into memory of ours. More large ones at once would keep as much
#: fresh memory in use, which costs more than the transfer; a user's buffer is there anyway.
FRESH_AHEAD = 2**24


#: Used instead of an empty deque, which takes 600 bytes: a peer can make us open a tag queue with an empty message.
_NOTHING: Any = ()
#: Up to so many runs or messages are kept in a list rather than a deque, for the same reason.
_FEW = 8


class Lane:
    """One lane of a connection, in the receiving direction."""

    __slots__ = (
        "_again",
        "_later_runs",
        "_settling",
        "failure",
        "messages",
        "mover",
        "number",
        "receives",
        "run",
        "sequential",
    )

    def __init__(self, number: int, mover: Mover, *, sequential: bool = False) -> None:
        self.number = number
        self.mover = mover
        self.sequential = sequential
        #: Why nothing comes any more in a sequential lane in which a message is missing.
        self.failure: Exception | None = None
        #: READY messages that come before all others; while there are any, there is no receive.
        self.run: Run | None = None
        self._later_runs: collections.deque[Run] | list[Run] = _NOTHING
        self.messages: collections.deque[Message] | list[Message] = _NOTHING
        self.receives: collections.deque[Receive] = _NOTHING
        self._settling = False
        self._again = False

    @property
    def idle(self) -> bool:
        return not (self.messages or self.receives or self.run) and self.failure is None

    def arrived(self, handle: int, length: int, *, whole: bool | None) -> None:
        """A message arrived.

        Args:
            whole: whether UCX has the whole message; False if it stays with its sender until it is received, None if
                that is not known. Unless it is False, a message without a receive is moved to memory of ours.
        """
        message = Message(self, handle, length)
        message.whole = whole is True
        if self.failure is not None:
            self._throw_away(message)
            return
        self._add_messages([message])
        self.settle()
        if whole is not False and message.state is State.HELD and message in self.messages:
            try:
                self.mover.move(message, None)
            except MemoryError:
                return  # UCX keeps the message until it is received
            self.settle()

    def run_arrived(self, run: Run) -> None:
        """Small messages arrived, and are READY."""
        if self.failure is not None:
            self.mover.run_consumed(run.length, run.left)
            return
        if not self.messages and not self._settling:
            while self.receives and run.left and self._deliver_small(run, self.receives[0]):
                pass
            if not self.receives:
                if run.left:
                    self._add_run(run)
                return
        self._add_messages(self._messages_of(run))
        self.settle()

    def _add_run(self, run: Run) -> None:
        later = self._later_runs
        if self.run is None:
            self.run = run
        elif not later:
            self._later_runs = [run]
        else:
            if type(later) is list and len(later) >= _FEW:
                self._later_runs = later = collections.deque(later)
            later.append(run)

    def next_run(self) -> None:
        """Goes on to the next run: the first one is used up."""
        if self._later_runs:
            self.run = self._later_runs[0]
            del self._later_runs[0]
        else:
            self.run = None

    def _add_messages(self, messages: list[Message]) -> None:
        if self.messages:
            if type(self.messages) is list and len(self.messages) >= _FEW:
                self.messages = collections.deque(self.messages)
            self.messages.extend(messages)
        else:
            self.messages = messages if len(messages) <= _FEW else collections.deque(messages)

    def _deliver_small(self, run: Run, receive: Receive) -> bool:
        """Gives the first of a run to the first of the receives, if that is simple."""
        if receive.want is Want.LENGTH or run.length > receive.limit:
            return False
        data = run.pop()
        result: outcome.Outcome[Any] = Value(data)
        if receive.pins is not None:
            try:
                receive.pins.fill(memoryview(data))
                result = Value(len(data))
            except RuntimeError as error:
                result = Error(error)
        self._finish(receive, result)
        self.mover.run_consumed(run.length, 1)
        return True

    def _messages_of(self, run: Run) -> list[Message]:
        messages = []
        while run.left:
            message = Message(self, 0, run.length)
            message.state = State.READY
            message.data = run.pop()
            messages.append(message)
        return messages

    def spread(self) -> None:
        """Turns runs into messages like all others."""
        ready: list[Message] = []
        while self.run is not None:
            ready += self._messages_of(self.run)
            self.next_run()
        if ready:
            self.messages = collections.deque([*ready, *self.messages]) if self.messages or len(ready) > _FEW else ready

    def take_small(self, limit: int) -> bytes | None:
        """The first message, if it is one of a run and not too long. (The caller says that it is consumed.)"""
        run = self.run
        if run is None or run.length > limit:
            return None
        data = run.pop()
        if not run.left:
            self.next_run()
        return data

    def wait(self, want: Want, pins: Pinned | None, limit: int) -> Receive:
        self.spread()
        receive = Receive(self, want, pins, limit)
        if self.receives is _NOTHING:
            self.receives = collections.deque()
        self.receives.append(receive)
        self.settle()
        return receive

    def ready_now(self) -> Message | None:
        """The message that a receive could have without waiting."""
        self.spread()
        if self.messages and not self.receives and self.messages[0].state is State.READY:
            return self.messages[0]
        return None

    def moved(self, message: Message, error: Exception | None) -> None:
        """A MOVING message is READY, or will never be."""
        if message.owner is None and message.pins is not None:
            self.mover.orphaned(message, False)
        if message not in self.messages:  # given up before
            self._detach(message)
        elif error is not None:
            self._missing(message, error)
            self.messages.remove(message)
            owner = message.owner
            self._detach(message)
            if owner is not None:
                self._finish(owner, Error(error))
            elif self.receives and self.receives[0].want is not Want.LENGTH:
                self._finish(self.receives[0], Error(error))
            self.mover.consumed(message)
        else:
            message.state = State.READY
            if message.owner is None:
                self._copy_out(message)
        self.settle()

    def abandon(self, receive: Receive) -> None:
        """A receive was cancelled."""
        self.receives.remove(receive)
        message = receive.message
        receive.message = None
        if message is None:
            if receive.pins is not None:
                receive.pins.release()
        else:
            message.owner = None
            if message.state is State.READY:
                self._copy_out(message)
            else:
                self.mover.orphaned(message, True)
        self.settle()

    def _copy_out(self, message: Message) -> None:
        """Gives a user's buffer back: from now on the message is in memory of ours."""
        if message.pins is not None:
            try:
                message.data = message.pins.copy(message.length)
            except (RuntimeError, MemoryError) as error:
                message.error = error
            self._detach(message)

    def _copy_in(self, message: Message, pins: Pinned) -> None:
        """Fills a user's buffer from memory of ours."""
        self._copy_out(message)
        if message.data is not None:
            try:
                pins.fill(memoryview(message.data))
            except RuntimeError as error:
                message.error = error

    def _detach(self, message: Message) -> None:
        """Separates a message from a user's buffer. Its receive goes on holding it; without one it is released."""
        owner, message.owner = message.owner, None
        pins, message.pins = message.pins, None
        if owner is not None:
            owner.message = None
        elif pins is not None:
            pins.release()

    def settle(self) -> None:
        """Completes what can be completed, in order, and begins transfers for the receives that are next."""
        # Beginning a transfer can deliver others, which settle, too: then once more.
        self._again = True
        if self._settling:
            return
        self._settling = True
        try:
            while self._again:
                self._again = False
                while self._complete_first():
                    pass
                self._move_ahead()
        finally:
            self._settling = False

    def _complete_first(self) -> bool:
        if not self.messages or not self.receives:
            return False
        message, receive = self.messages[0], self.receives[0]
        if receive.want is Want.LENGTH:
            self._finish(receive, Value(message.length))
            return True
        if receive.message is not None and receive.message is not message:
            # A cancellation shifted the pairs: another message lies in its buffer, or is on its way there.
            if receive.message.state is not State.READY:
                return False
            self._copy_out(receive.message)
        if message.length > receive.limit:
            return self._too_long(message, receive)
        if message.state is State.HELD:
            try:
                self._move(message, receive)
            except MemoryError as error:
                return self._no_memory(message, error)
        if not self.messages or self.messages[0] is not message or not self.receives or self.receives[0] is not receive:
            return True  # it could not be moved, and its receive was told; or that was cancelled
        if message.state is not State.READY:
            return False
        self._deliver(message, receive)
        return True

    def _too_long(self, message: Message, receive: Receive) -> bool:
        if message.state is State.MOVING:
            return False
        what = "max_message_size is" if receive.want is Want.BYTES else "the buffer has"
        self._drop_first(
            UCXError(
                Status.MESSAGE_TRUNCATED,
                f"a message of {message.length} bytes is too long, {what} {receive.limit}; it was dropped",
            )
        )
        return True

    def _no_memory(self, message: Message, cause: MemoryError) -> bool:
        """Not enough memory for the first message: drops it, unless it is a piece of the byte stream."""
        fate = "it can be read again" if self.sequential else "it was dropped; receive_into takes a buffer of yours"
        error = MemoryError(f"there is no memory for a message of {message.length} bytes: {fate}")
        error.__cause__ = cause
        if self.sequential:
            self._finish(self.receives[0], Error(error))
        else:
            self._drop_first(error)
        return True

    def _drop_first(self, error: Exception) -> None:
        """Drops the first message, and ends the first receive with an error."""
        message = self.messages[0]
        del self.messages[0]
        self._finish(self.receives[0], Error(error))
        if message.state is State.HELD:
            self.mover.discard(message)
        self._detach(message)
        self.mover.consumed(message)

    def _move(self, message: Message, receive: Receive) -> None:
        if receive.want is Want.INTO:
            message.pins = receive.pins
            message.owner = receive
            receive.message = message
            self.mover.move(message, receive.pins)
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
            if message.state is State.HELD and receive.message is None and message.length <= receive.limit:
                try:
                    self._move(message, receive)
                except MemoryError:
                    return  # raised when its turn comes
                if self._again:
                    return  # things may have changed

    def _deliver(self, message: Message, receive: Receive) -> None:
        result: Any
        if receive.want is not Want.INTO:
            if message.data is None:
                self._copy_out(message)
            result = message.data
        else:
            if message.owner is not receive:
                assert receive.pins is not None
                self._copy_in(message, receive.pins)
            self._detach(message)
            result = message.length
        del self.messages[0]
        self._finish(receive, Value(result) if message.error is None else Error(message.error))
        self.mover.consumed(message)

    def _finish(self, receive: Receive, result: outcome.Outcome[Any]) -> None:
        """Removes a receive from the queue, and ends it. Anything else that may fail is done before or after that."""
        if self.receives[0] is receive:
            self.receives.popleft()
        else:
            self.receives.remove(receive)
        try:
            if receive.pins is not None:
                receive.pins.release()
        finally:
            receive.finish(result)

    def drop_held(self, error: Exception | None = None) -> None:
        """The messages that their sender still has will not come any more: ``error``, or it does not need them to."""
        held = [message for message in self.messages if message.state is State.HELD and not message.whole]
        for message in held:
            if message in self.messages:
                self._missing(message, error)
                self.messages.remove(message)
                self._throw_away(message)
        self.settle()

    def _throw_away(self, message: Message) -> None:
        if message.state is State.HELD:
            self.mover.discard(message)
        self.mover.consumed(message)

    def _missing(self, message: Message, error: Exception | None) -> None:
        """A message will not arrive: in a sequential lane, nothing behind it counts."""
        if not self.sequential:
            return
        self.failure = self.failure or error
        while self.messages[-1] is not message:
            rest = self.messages.pop()
            receive, rest.owner = rest.owner, None
            if receive is not None:
                receive.message = None  # it waits at the end of the lane again
            self._throw_away(rest)

    def give_up_moving(self, error: Exception) -> None:
        """The messages under way will not arrive whole. UCX may keep their buffers for a while, or for ever."""
        for message in [message for message in self.messages if message.state is State.MOVING]:
            if message in self.messages:
                self._missing(message, error)
                self.messages.remove(message)
                self.mover.consumed(message)
                if message.owner is not None:
                    self.give_up(message.owner, error)
        self.settle()

    @property
    def moving(self) -> bool:
        return any(message.state is State.MOVING for message in self.messages)

    def fail_unserved(self, error: Exception) -> bool:
        """No message will arrive any more: the receives for which none is there are told. Whether there were any."""
        self.settle()
        before = len(self.receives)
        served = len(self.messages)
        for receive in list(self.receives):
            if receive.want is not Want.LENGTH:
                served -= 1
            if served < 0 or (receive.want is Want.LENGTH and served <= 0):
                self._finish(receive, Error(error))
        return len(self.receives) < before

    def give_up(self, receive: Receive, error: Exception) -> None:
        """Ends a receive whatever its state; a transfer under way keeps its buffer until UCX lets go of it."""
        message, receive.message = receive.message, None
        if message is not None:
            message.owner = None
            if message.state is State.MOVING:
                receive.pins = None
        self._finish(receive, Error(error))
        if message is not None and message.state is State.MOVING:
            self.mover.orphaned(message, True)

    def close(self, error: Exception) -> None:
        """We closed: nobody gets anything any more."""
        self.run = None
        self._later_runs = _NOTHING
        for receive in list(self.receives):
            self.give_up(receive, error)
        for message in [message for message in self.messages if message.state is not State.MOVING]:
            self.messages.remove(message)
            if message.state is State.HELD:
                self.mover.discard(message)
            self._detach(message)
