"""Which ranks are in the group: a state that rank 0 decides and the others copy. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import trio

from .._util.socket_addresses import is_loopback
from ._errors import RankLostError, again
from ._messages import Address, Joined, Welcome


@attrs.define(eq=False)
class Members:
    """What one rank knows of the group and its ranks.

    Attributes:
        rank, size: this rank, and how many there are.
        fatal: whether the first loss ends the group.
        name: the group's name.
        generation: how many processes have joined under the numbers of lost ranks.
        heard: the last generation of which all ranks have heard.
        addresses: by rank, where it listens.
        since: by rank, the generation in which it joined, if that is not 0.
        lost: by rank, why it is not there.
        losses: by rank, the last loss, also if a new process has its number.
        departed: the ranks that have left without an error, and that nobody has missed since.
        ended: why the group has ended, if it has.
        on_change: called after each change, with the rank that it is about.
        changed: where tasks wait for a change.
    """

    rank: int
    size: int
    fatal: bool
    name: str = ""
    generation: int = 0
    heard: int = 0
    addresses: dict[int, Address] = attrs.field(factory=dict)
    since: dict[int, int] = attrs.field(factory=dict)
    lost: dict[int, RankLostError] = attrs.field(factory=dict)
    losses: dict[int, RankLostError] = attrs.field(factory=dict)
    departed: set[int] = attrs.field(factory=set)
    ended: RankLostError | None = None
    on_change: list[Callable[[int], None]] = attrs.field(factory=list)
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def on_loss(self) -> str:
        """The argument of ``join``."""
        return "cancel" if self.fatal else "continue"

    def member(self, rank: int) -> int:
        """The generation in which a rank joined."""
        return self.since.get(rank, 0)

    def welcomed(self, welcome: Welcome) -> None:
        """This rank has joined."""
        self.name, self.generation = welcome.group, welcome.generation
        self.since.update(welcome.members)
        self.addresses.update({rank: one for rank, one in enumerate(welcome.addresses) if one is not None})
        self.lost.update({rank: RankLostError(rank, reason) for rank, reason in welcome.lost.items()})
        if self.fatal:
            self.ended = next(iter(self.lost.values()), None)
        self._changed(self.rank)

    def welcome(self) -> Welcome:
        """Returns what a rank that joins is told."""
        return Welcome(
            self.name,
            self.generation,
            [None if (one := self.addresses.get(rank)) is None else elsewhere(one) for rank in range(self.size)],
            dict(self.since),
            {rank: error.reason for rank, error in self.lost.items()},
        )

    def lose(self, rank: int, reason: str) -> bool:
        """Records that a rank was lost. Returns True if that is new."""
        if rank in self.lost or self.ended is not None:
            return False
        error = self.lost[rank] = self.losses[rank] = RankLostError(rank, reason)
        self.departed.discard(rank)
        if self.fatal or rank in (0, self.rank):
            self.ended = error
        self._changed(rank)
        return True

    def leave(self, ranks: Iterable[int]) -> None:
        """Ranks have left. That is a loss when somebody needs one of them."""
        for rank in ranks:
            self.departed.add(rank)
            self._changed(rank)

    def gone(self, rank: int) -> bool:
        """True if a rank has left, or is lost."""
        return rank in self.lost or rank in self.departed

    def replace(self, joined: Joined) -> None:
        """A new process has joined under the number of a lost rank."""
        self.lost.pop(joined.rank, None)
        self.departed.discard(joined.rank)
        self.generation = self.since[joined.rank] = joined.generation
        self.addresses[joined.rank] = joined.address
        self._changed(joined.rank)

    def all_heard(self, generation: int) -> None:
        """All ranks have heard of a generation."""
        self.heard = generation
        self.changed.unpark_all()

    def _changed(self, rank: int) -> None:
        for tell in list(self.on_change):
            tell(rank)
        self.changed.unpark_all()

    def error(self, rank: int) -> RankLostError | None:
        """Returns why nothing can be done with a rank; None if something can."""
        error = self.ended or self.lost.get(rank)
        return None if error is None else again(error)

    def any_error(self) -> RankLostError | None:
        """Returns why not all ranks can take part in something, if so: the first loss."""
        if self.ended is None and not self.lost:
            return None
        return again(self.ended or next(iter(self.lost.values())))


def elsewhere(address: Address) -> Address:
    """An address that rank 0 knows, for ranks that may be on another host than rank 0."""
    host, port = address
    return "" if is_loopback(host) else host, port
