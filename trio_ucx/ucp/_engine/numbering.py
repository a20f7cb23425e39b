"""Which endpoints by worker address belong together: they are numbered here as UCX numbers them.

UCX pairs the n-th endpoint that a worker makes to the address of another with the n-th that the other makes to it, and
a large message is answered by the endpoint that is paired with its sender's. So the two ends of a Connection must have
the same number. One of the two workers, the one with the greater uid, chooses it, and each makes its endpoint with just
that number: if others come first, because their Connections are still being opened, it makes those meanwhile, too, and
keeps them (*fillers*). Raw endpoints take numbers on one side only; each side then says how far it is. A filler
handles errors only if its pair does; so the sides also say which of their endpoints are without error handling.

Only the worker with the smaller uid makes its endpoint from the address that the peer gave. Its UCX requests the other
end from the peer's UCX, which makes that. The worker with the greater uid waits for it, and *adopts* it. If it made an
endpoint itself, its UCX would compare the address that the peer gave with what the peer's UCX says, and would end the
process if they differ in certain ways. If the peer's UCX has not requested the other end for a number, there is no
filler, and the number is skipped.

Making an endpoint takes UCX longer than everything else about a connection. So when one is closed gracefully, with
nothing left under way, both sides keep its endpoint for a moment (*idle* endpoints), and the next connection gets that
pair.

UCX's numbers have 16 bits. When they are used up between two workers, the server goes on with another worker.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import attrs

from .._address import WorkerAddress

#: Numbers that can be used between two workers. At 2**16 - 1 UCX refuses.
LIMIT = 65_000
#: Fillers that one Connection may need. More are needed only by a peer that lies.
MAX_FILLERS = 4096
#: How many are made in one step, which takes UCX up to a millisecond each. If more are missing, the side
#: tries again, or another number is negotiated.
FILLERS_AT_ONCE = 32
#: Endpoints without error handling that a side tells the other about.
MAX_PLAIN = 1000
#: Seconds before an unused filler is closed. A connection that asks for it later gets another number.
FILLER_AGE = 15.0
#: Seconds before an idle endpoint is closed.
IDLE_TIME = 2.0
#: Seconds during which it is offered to a new connection: less, so that the peer still has its own end.
OFFER_TIME = 1.0
#: Idle endpoints that are kept for each peer worker.
MAX_IDLE = 64


@attrs.frozen
class Numbers:
    """How far one side is.

    Attributes:
        next: the number of the next endpoint that it makes.
        has_raw: whether it has raw endpoints open, whose numbers the other side does not know about.
        plain: the numbers of those that are without error handling; the newest ones, if there are very many.
    """

    next: int
    has_raw: bool = False
    plain: tuple[int, ...] = ()


class UsedUp(Exception):
    """UCX has no number left for an endpoint between two workers."""


class NotRequested(ConnectionError):
    """The peer's UCX has not requested the endpoint that we want to adopt. Its number is skipped."""


class NumberedEndpoint(Protocol):
    """An endpoint that may be a filler or idle: :class:`~.operations.EndpointCore`."""

    @property
    def handle(self) -> Any:
        """None once it is closed."""

    @property
    def forcible(self) -> bool:
        """Whether it handles errors."""

    served: bool
    """Whether it has served a connection before, and so has its pair at the peer."""

    @property
    def peer_address(self) -> WorkerAddress | None: ...

    def close(self) -> None: ...


E = TypeVar("E", bound=NumberedEndpoint)


class PeerNumbers(Generic[E]):
    """The numbers of the endpoints to one peer worker."""

    def __init__(self) -> None:
        self._next = 0
        self._raw: WeakSet[E] = WeakSet()
        self._peer_has_raw = False
        #: The numbers of endpoints without error handling, here and at the peer.
        self._plain: list[int] = []
        self._peer_plain: array[int] = array("H")
        #: The numbers that were chosen, and have not been given back.
        self._chosen: set[int] = set()
        self._fillers: dict[int, tuple[E, float]] = {}
        #: Endpoints of connections that were closed, and since when, the oldest first.
        self._idle: dict[int, tuple[E, float]] = {}
        #: Those of them that are offered to connections which are being opened.
        self._offered: dict[int, tuple[E, float]] = {}

    def made(self, *, error_handling: bool) -> None:
        """UCX has given a number to an endpoint, or used one up on an attempt to make it."""
        if not error_handling:
            self._plain = [*self._plain[1 - MAX_PLAIN :], self._next]
        self._next += 1

    def add_raw(self, core: E) -> None:
        """The endpoint that was just made is a raw one."""
        self._raw.add(core)

    def numbers(self) -> Numbers:
        has_raw = any(core.handle is not None for core in self._raw)
        return Numbers(self._next, has_raw, tuple(self._plain))

    def heard(self, theirs: Numbers) -> None:
        """The other side said how far it is."""
        self._peer_has_raw = theirs.has_raw
        # What was said in different handshakes may come in any order.
        ahead = {number for number in (*self._peer_plain, *theirs.plain) if number >= self._next}
        self._peer_plain = array("H", sorted(ahead)[:MAX_PLAIN])

    @property
    def used_up(self) -> bool:
        # What a peer says does not count: it would make a server open one worker after the other.
        return self._next + MAX_FILLERS >= LIMIT

    @property
    def idle(self) -> int:
        """How many endpoints wait for another connection."""
        return sum(core.handle is not None for core, _ in self._idle.values())

    def keep(self, number: int, core: E) -> None:
        """A connection was closed: its endpoint may serve another one."""
        if len(self._idle) >= MAX_IDLE:
            oldest, _ = self._idle.pop(next(iter(self._idle)))
            oldest.close()
        core.served = True
        self._idle[number] = core, time.monotonic()

    def close_idle(self) -> None:
        """Closes those that nobody has come for."""
        limit = time.monotonic() - IDLE_TIME
        for number, (core, since) in list(self._idle.items()):
            if core.handle is None or since <= limit:
                self._idle.pop(number, None)  # gone if an earlier close ended a connection, and `keep` made room
                core.close()

    def choose(self, theirs: Numbers | None, address: bytes = b"") -> int:
        """A number for a new Connection. :meth:`release` it when an endpoint has it, or nobody needs it.

        Args:
            theirs: how far the other side is, if that is known.
            address: of the peer; only an idle endpoint that was made by it is offered; others may use other transports.

        Raises:
            UsedUp: none is left.
        """
        lowest = self._next
        if theirs is not None:
            self.heard(theirs)
            lowest = max(lowest, theirs.next)
        oldest = time.monotonic() - OFFER_TIME
        for number, (core, since) in self._idle.items():  # the oldest first: its peer has most likely finished closing
            if since > oldest and _fits(core, address):
                self._offered[number] = self._idle.pop(number)
                return number
        number = lowest
        while number in self._chosen:
            number += 1
        if number >= LIMIT:
            raise UsedUp
        self._chosen.add(number)
        return number

    @property
    def is_unused(self) -> bool:
        """Whether no endpoint was ever made, and no number is chosen."""
        return self._next == 0 and not self._chosen

    def release(self, number: int) -> None:
        """Ends the choice of a number: an endpoint has it now, or nobody needs it.

        An endpoint that is still offered is closed: the peer has closed its pair, or the connection was not opened.
        """
        self._chosen.discard(number)
        offered = self._offered.pop(number, None)
        if offered is not None:
            core, _ = offered
            core.close()

    def make(self, number: int, make: Callable[[bool], E], address: bytes = b"") -> E | None:
        """Makes the endpoint with this number; None if that is not possible, and another number must be chosen.

        None also if more fillers are missing than FILLERS_AT_ONCE. Then it has made that many, and the caller tries
        again: the number :meth:`is_ahead` still.

        Args:
            make: makes or adopts an endpoint to this peer, with error handling or without, and calls :meth:`made`.
            address: of the peer.

        Raises:
            OSError, UCXError: what ``make`` raises.
        """
        self.close_old_fillers()
        there = self._offered.pop(number, None) or self._fillers.pop(number, None) or self._idle.pop(number, None)
        if there is not None:
            core, _ = there
            if _fits(core, address) and core.forcible:
                return core
            core.close()
            return None
        if not self.is_ahead(number) or not self.is_near(number):
            return None
        last = min(number, self._next + FILLERS_AT_ONCE)
        while self._next < last:
            following = self._next
            with suppress(NotRequested):
                self._fillers[following] = make(following not in self._peer_plain), time.monotonic()
        return make(True) if self._next == number else None

    def is_ahead(self, number: int) -> bool:
        """Whether no endpoint here has had this number."""
        return number >= self._next

    def is_near(self, number: int) -> bool:
        """Whether a number is below all limits, and needs no more fillers than a Connection to an honest peer does."""
        return number < LIMIT and number - self._next <= MAX_FILLERS

    def keep_as_filler(self, number: int, core: E) -> None:
        """An endpoint whose number the peer cannot use is a filler from now on, or closed if it has served before."""
        if core.served:
            core.close()
        else:
            self._fillers[number] = core, time.monotonic()

    @property
    def has_temporary_fillers(self) -> bool:
        return not self._peer_has_raw and any(core.forcible for core, _ in self._fillers.values())

    def close_old_fillers(self) -> None:
        """Closes fillers that nobody asks for any more."""
        oldest = time.monotonic() - FILLER_AGE
        for number, (core, made_at) in list(self._fillers.items()):
            # While the peer has raw endpoints open, fillers stay: each may be the pair of one, and answer its messages.
            # A filler without error handling stays, too: UCX could only flush it, and its peer may have died.
            if core.handle is None or (made_at < oldest and core.forcible and not self._peer_has_raw):
                self._fillers.pop(number, None)  # gone if an earlier close ended a handshake that asked for it
                core.close()


def _fits(core: NumberedEndpoint, address: bytes) -> bool:
    made_by = core.peer_address.ucx if core.peer_address is not None else b""
    return core.handle is not None and made_by == address


class Numbering(Generic[E]):
    """The numbers of one worker, for each peer worker by its uid."""

    def __init__(self) -> None:
        self._peers: dict[int, PeerNumbers[E]] = {}

    def of(self, uid: int) -> PeerNumbers[E]:
        """Those for one peer worker. (They are kept as long as UCX keeps its own, until the worker is closed.)"""
        numbers = self._peers.get(uid)
        if numbers is None:
            numbers = self._peers[uid] = PeerNumbers()
        return numbers

    def forget_unused(self, uid: int) -> None:
        """Forgets a peer worker that only said it was there."""
        numbers = self._peers.get(uid)
        if numbers is not None and numbers.is_unused:
            del self._peers[uid]

    @property
    def idle(self) -> int:
        """How many endpoints wait for another connection."""
        return sum(numbers.idle for numbers in self._peers.values())

    @property
    def has_temporary(self) -> bool:
        """Whether :meth:`close_idle` has something to do, now or later."""
        return any(numbers.idle or numbers.has_temporary_fillers for numbers in self._peers.values())

    def close_idle(self) -> None:
        """Closes the endpoints that no other connection has come for."""
        for numbers in list(self._peers.values()):  # closing may end a handshake with another peer
            numbers.close_idle()
            if numbers.has_temporary_fillers:
                numbers.close_old_fillers()
