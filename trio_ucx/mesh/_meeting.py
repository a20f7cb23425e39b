"""How ranks meet, and how all learn of a loss: each rank keeps a connection to rank 0, which decides.

A rank connects to rank 0 and says :class:`RankHello`. When all are there, rank 0 welcomes each with the addresses of
all. From then on rank 0 notices when one of these connections ends, and is told by ranks that cannot reach another one
(:class:`Suspect`). It tells all which rank was lost (:class:`Lost`). All ranks then name the same one: the first that
was lost, not those that ended because of it.
"""

from __future__ import annotations

import errno
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .. import Channel, Connection, Listener, PeerLost
from ._errors import MeetingError
from ._links import GONE, UNREADABLE, Links, close, first_message, owned
from ._members import Members, elsewhere
from ._messages import Heard, Joined, Leaving, Left, Lost, RankAnswer, RankHello, Suspect, Welcome, decode, encode
from ._place import Place

#: If one rank cannot reach another: seconds for which rank 0 waits to learn why that one is gone.
_JUDGEMENT = 1.0
#: Seconds for which a rank waits for rank 0's judgement.
VERDICT = 5.0
#: Seconds more than its own timeout that a rank waits for rank 0 to say who is missing.
_GRACE = 2.0
#: Seconds in which a new connection must say RankHello.
_GREETING = 10.0
#: Ranks that leave within so many seconds are announced in one message.
_TOGETHER = 0.05
#: A rank for which so many messages wait is lost: it does not read.
_MOST_UNSENT = 1000

#: What has happened to a rank, by ``PeerLost.reason``.
_ENDED = {
    "aborted": "it left with an exception, or could not leave in time",
    "ended": "its process has ended",
    "vanished": "its host does not answer any more",
    "unresponsive": "it does not answer any more",
}


def why(error: BaseException) -> str:
    """Returns why a connection ended, in words."""
    if isinstance(error, PeerLost):
        return _ENDED.get(error.reason, str(error))
    return "it has left the group" if isinstance(error, trio.EndOfChannel) else str(error)


def name_ranks(ranks: tuple[int, ...]) -> str:
    """ "rank 3", or "ranks 3, 5-7"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


class NotYet(Exception):
    """Rank 0 may be another process soon."""


@attrs.frozen(eq=False)
class _Arrival:
    channel: Channel
    hello: RankHello


class Coordinator:
    """Rank 0's part."""

    def __init__(self, place: Place, members: Members, links: Links, listeners: Sequence[Listener]) -> None:
        self._place = place
        self._listeners = listeners
        self._members = members
        self._links = links
        self._arrivals: dict[int, _Arrival] = {}
        #: Ranks that came, and left again before all were there.
        self._gave_up: set[int] = set()
        #: Why ranks were refused.
        self._refused: dict[int, str] = {}
        self._controls: dict[int, Channel] = {}
        #: By rank, the last generation of which it has heard.
        self._heard: dict[int, int] = {}
        self._telling = False
        #: By rank, how many messages wait for it to read others.
        self._unsent: Counter[int] = Counter()
        #: The suspicions that are being judged: who says it, of whom.
        self._judged: set[tuple[int, int, int]] = set()
        self._complete = trio.Event()
        members.name = secrets.token_hex(8)
        members.addresses[0] = ("", listeners[0].address[1])
        if members.size == 1:
            self._complete.set()

    # ---- the meeting ----

    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        here = self._arrivals.keys() | self._gave_up
        return tuple(rank for rank in range(1, self._members.size) if rank not in here)

    def absence(self) -> str:
        """Describes which ranks are missing."""
        missing = self.missing()
        hosts = {host for rank in missing if (host := self._place.host_of(rank)) is not None}
        where = f" (on {', '.join(sorted(hosts))})" if hosts else ""
        absent = f"{name_ranks(missing)} of {self._members.size}{where} did not come to rank 0" if missing else ""
        gave_up = name_ranks(tuple(sorted(self._gave_up)))
        impatient = f"{gave_up} came, and did not wait any longer" if self._gave_up else ""
        refused = [f"rank {rank} was refused: {reason}" for rank in missing if (reason := self._refused.get(rank))]
        turned_away = [
            f"rank 0's listener turned away {client}"
            for each in self._listeners
            if (client := each._acceptor.last_turned_away)
        ]
        return (
            f"{'; '.join(filter(None, (absent, impatient, *refused, *turned_away)))}. Look whether all processes were "
            "started, what they have written, and whether their hosts can connect to rank 0"
        )

    async def meet(self, timeout: float) -> None:
        """Waits until all ranks are there."""
        with trio.move_on_after(timeout):
            await self._complete.wait()
        if not self._complete.is_set():
            error = MeetingError(f"after {timeout:g} s, {self.absence()}", self.missing())
            async with trio.open_nursery() as nursery:
                for arrival in self._arrivals.values():
                    answer = RankAnswer(str(error.strerror), error.missing)
                    nursery.start_soon(close, arrival.channel, answer)
            raise error

    @enable_ki_protection
    async def greet(self, connection: Connection) -> None:
        """Serves a connection: a rank joins, or one that has joined wants to talk to rank 0."""
        with self._links.unless_used(connection):
            with trio.move_on_after(_GREETING) as silent:
                channel, hello = await first_message(connection)
                if hello.group:
                    await self._links.answer(channel, hello)
                    return
                silent.deadline = math.inf
                await self._admit(_Arrival(channel, hello))

    async def _admit(self, arrival: _Arrival) -> None:
        owned(arrival.channel.connection, f"the control connection with rank {arrival.hello.rank}")
        answer = None if self._complete.is_set() else self._refusal(arrival.hello)
        if answer is not None:
            if 0 < arrival.hello.rank < self._members.size:
                self._refused[arrival.hello.rank] = answer.refused
            await close(arrival.channel, answer)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attend, arrival.hello.rank, arrival, nursery.cancel_scope)
            await self._join(arrival.hello.rank, arrival)

    def _refusal(self, hello: RankHello) -> RankAnswer | None:
        size, on_loss = self._members.size, self._members.on_loss
        if hello.to != 0 or hello.size != size or not 0 < hello.rank < size:
            return RankAnswer(f"this is rank 0 of {size}, but it is looked for by rank {hello.rank} of {hello.size}")
        if hello.on_loss != on_loss:
            return RankAnswer(f"rank {hello.rank} has on_loss={hello.on_loss!r}, and rank 0 has {on_loss!r}")
        if not self._complete.is_set() and hello.rank in self._arrivals:
            other = self._arrivals[hello.rank].hello
            return RankAnswer(f"rank {hello.rank} has come already: process {other.pid} on {other.host}")
        return None

    async def _join(self, rank: int, arrival: _Arrival) -> None:
        """Lets a rank in when all are there, or when one with its number is lost; or closes its connection."""
        members = self._members
        remote_address = arrival.channel.connection.remote_address
        assert remote_address is not None
        address = (remote_address[0], arrival.hello.port)
        if not self._complete.is_set():
            with trio.move_on_after(arrival.hello.seconds):
                self._arrivals[rank] = arrival
                self._gave_up.discard(rank)
                members.addresses[rank] = address
                if len(self._arrivals) == members.size - 1:
                    self._complete.set()
                await self._complete.wait()
            await trio.lowlevel.checkpoint_if_cancelled()  # it has gone meanwhile
            if not self._complete.is_set():
                answer = RankAnswer(f"after {arrival.hello.seconds:.3g} s, {self.absence()}", self.missing())
                del self._arrivals[rank]
                self._gave_up.add(rank)
                await close(arrival.channel, answer)
                return
        else:
            with trio.move_on_after(arrival.hello.seconds):
                while rank not in members.lost and members.ended is None:
                    await self._members.changed.park()  # its loss may not be known yet
            await trio.lowlevel.checkpoint_if_cancelled()
            refusal = self._refusal(arrival.hello)
            if members.ended is not None or rank in members.departed:
                refusal = RankAnswer("the previous group has not ended", later=True)
            elif rank not in members.lost:
                refusal = refusal or RankAnswer(f"rank {rank} has joined already")
            if refusal is not None:
                await close(arrival.channel, refusal)
                return
            self._arrivals[rank] = arrival
            joined = Joined(rank, members.generation + 1, address)
            members.replace(joined)
            self._heard[rank] = joined.generation
            self._tell(attrs.evolve(joined, address=elsewhere(address)), but=rank)
        self._controls[rank] = arrival.channel
        with suppress(*GONE):  # whoever attends to it finds that out
            await arrival.channel.send(encode(members.welcome()))
        self._find_heard()

    def _find_heard(self) -> None:
        """Tells all ranks the latest generation that all of them have heard of, if it is later than before."""
        if self._members.heard == self._members.generation:
            return
        heard = min((self._heard.get(rank, 0) for rank in self._controls), default=self._members.generation)
        if heard > self._members.heard:
            self._members.all_heard(heard)
            self._tell(Heard(heard))

    # ---- losses ----

    @enable_ki_protection
    async def _attend(self, rank: int, arrival: _Arrival, scope: trio.CancelScope) -> None:
        """Hears what a rank says, until it has gone. Before it was let in, and once it is lost, it has no say."""
        try:
            while True:
                message = decode(await arrival.channel.receive(), self._members.size)
                if self._controls.get(rank) is not arrival.channel:
                    raise ValueError("it has said something else than its RankHello, and was not let in yet")
                if rank in self._members.lost:
                    continue
                if isinstance(message, Suspect):
                    self._links.nursery.start_soon(self._judge, message, rank)
                elif isinstance(message, Leaving):
                    self._leaves(rank, message.error)
                elif isinstance(message, Heard):
                    self._heard[rank] = min(message.generation, self._members.generation)
                    self._find_heard()
        except (*GONE, *UNREADABLE) as error:
            if self._arrivals.get(rank) is arrival:
                self._ended(rank, why(error))
            scope.cancel()

    def _ended(self, rank: int, reason: str) -> None:
        """The connection of a rank has ended."""
        if not self._complete.is_set():
            del self._arrivals[rank]  # it may come again
            return
        self._controls.pop(rank, None)
        if rank not in self._members.departed:
            self.lose(rank, reason)
        self._find_heard()
        self._members.changed.unpark_all()

    @enable_ki_protection
    async def _judge(self, suspect: Suspect, by: int) -> None:
        rank = suspect.rank
        judged = by, rank, suspect.member
        if judged in self._judged:
            return
        self._judged.add(judged)
        try:
            with trio.move_on_after(_JUDGEMENT):
                while not self._members.gone(rank):
                    await self._members.changed.park()
        finally:
            self._judged.discard(judged)
        if self._members.member(rank) != suspect.member:
            return  # it was lost before, and has been replaced
        if rank in self._members.departed:
            self.lose(rank, "it has left the group")
        elif rank == 0:  # which is here: the other one is cut off from it
            self.lose(by, f"it says of rank 0: {suspect.reason}")
        else:
            self.lose(rank, suspect.reason)

    def _leaves(self, rank: int, error: str) -> None:
        if error:
            self.lose(rank, f"it left with {error}")
            return
        self._members.leave([rank])
        if not self._telling:
            self._telling = True
            self._links.nursery.start_soon(self._tell_left)

    @enable_ki_protection
    async def _tell_left(self) -> None:
        await trio.sleep(_TOGETHER)
        self._telling = False
        self._tell(Left(tuple(self._members.departed)))

    def suspect(self, rank: int, reason: str) -> None:
        """Rank 0 itself cannot reach a rank."""
        self._links.nursery.start_soon(self._judge, Suspect(rank, reason, self._members.member(rank)), 0)

    def lose(self, rank: int, reason: str) -> None:
        """A rank was lost: tells all, the lost one as well, if it hears that."""
        if self._members.lose(rank, reason):
            self._tell(Lost(rank, reason))

    def _tell(self, message: Lost | Left | Joined | Heard, but: int | None = None) -> None:
        for rank, channel in list(self._controls.items()):
            if self._unsent[rank] >= _MOST_UNSENT:
                self._ended(rank, "it does not read what rank 0 says")
            elif rank != but:
                _send_soon(self._links.nursery, channel, message, self._unsent, rank)

    # ---- leaving ----

    async def leave(self) -> None:
        """Rank 0 leaves last: it goes on deciding until all others have left, or are lost."""
        self._members.leave([0])
        self._tell(Left((0,)))
        members = self._members
        while members.ended is None and not members.lost.keys() >= self._controls.keys():
            await self._members.changed.park()
        await trio.lowlevel.checkpoint()

    async def leave_with(self, error: str) -> None:
        """Rank 0 leaves with an error, or because the group has ended: the others are told why."""
        reason = f"it left with {error}"
        self._members.lose(0, reason)
        if error:  # otherwise they know already
            self._tell(Lost(0, reason))
        async with trio.open_nursery() as nursery:
            for channel in list(self._controls.values()):
                nursery.start_soon(close, channel)


class Follower:
    """What the other ranks do with their connection to rank 0."""

    def __init__(self, members: Members, links: Links) -> None:
        self._members = members
        self._links = links
        self._control: Channel | None = None
        self._leaves = False
        self._unsent: Counter[int] = Counter()

    async def meet(self, connection: Connection, port: int, timeout: float) -> None:
        """Says RankHello to rank 0, and waits for its Welcome.

        Raises:
            NotYet: rank 0 belongs to a group that ends, or has ended.
            MeetingError: not all ranks came in time.
            ConnectionRefusedError: rank 0 does not want this rank.
        """
        links = self._links
        owned(connection, "the control connection with rank 0")
        self._control = control = connection.open_conversation()
        with trio.move_on_after(timeout + _GRACE):
            try:
                await control.send(encode(links.hello(0, port=port, seconds=timeout)))
                message = decode(await control.receive(), self._members.size)
            except GONE as error:
                raise NotYet(f"rank 0 ended while the ranks were meeting: {why(error)}") from error
            except UNREADABLE as error:
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"rank 0 cannot be understood: {error}") from error
            if isinstance(message, RankAnswer):
                if message.later:
                    raise NotYet(f"rank 0 is busy: {message.refused}")
                if message.missing:
                    raise MeetingError(message.refused, message.missing)
                raise ConnectionRefusedError(
                    errno.ECONNREFUSED, f"rank 0 refuses rank {self._members.rank}: {message.refused}"
                )
            if not isinstance(message, Welcome) or len(message.addresses) != self._members.size:
                raise ConnectionRefusedError(errno.ECONNREFUSED, f"rank 0 cannot be understood: it says {message!r}")
            self._members.welcomed(message)
            return
        raise MeetingError(f"rank 0 does not say who is missing, {timeout:.3g} s after rank {self._members.rank} came")

    @enable_ki_protection
    async def listen(self) -> None:
        """Hears what rank 0 decides."""
        assert self._control is not None
        members = self._members
        try:
            while True:
                message = decode(await self._control.receive(), members.size)
                if isinstance(message, Lost):
                    members.lose(message.rank, message.reason)
                elif isinstance(message, Left):
                    members.leave(set(message.ranks) - members.departed)
                elif isinstance(message, Joined):
                    members.replace(message)
                    _send_soon(self._links.nursery, self._control, Heard(message.generation), self._unsent, 0)
                elif isinstance(message, Heard):
                    members.all_heard(message.generation)
        except (*GONE, *UNREADABLE) as error:
            if not self._leaves:
                members.lose(0, why(error))

    def suspect(self, rank: int, reason: str) -> None:
        """This rank cannot reach another one: asks rank 0, which tells all."""
        if self._control is not None:
            suspect = Suspect(rank, reason, self._members.member(rank))
            _send_soon(self._links.nursery, self._control, suspect, self._unsent, 0)

    async def leave(self) -> None:
        """Tells rank 0 that this rank leaves."""
        await self.leave_with("")

    async def leave_with(self, error: str) -> None:
        """Tells rank 0 that this rank leaves with an error."""
        self._leaves = True
        assert self._control is not None
        await close(self._control, Leaving(error))


def _send_soon(
    nursery: trio.Nursery,
    channel: Channel,
    message: Lost | Left | Joined | Heard | Suspect,
    unsent: Counter[int],
    rank: int,
) -> None:
    """Sends a message to a rank, in a task if the rank has to read others first; ``unsent`` counts those."""

    @enable_ki_protection
    async def send() -> None:
        try:
            await channel.send(encode(message))
        except GONE:
            pass  # whoever reads at this end finds that out
        finally:
            unsent[rank] -= 1

    try:
        channel.send_nowait(encode(message))
    except trio.WouldBlock:
        unsent[rank] += 1
        nursery.start_soon(send)
    except GONE:
        pass
