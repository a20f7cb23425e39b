"""The endpoints that one worker makes to another, and the choice of the one that a new Connection uses.

UCX matches the n-th endpoint that a worker makes to the address of another with the n-th that the other makes to it,
and answers a large message over the endpoint that matches its sender's. The number of an endpoint is its *generation*,
from 1 on. The server tells the client its :class:`EndpointSummary`: how many endpoints it has made to the client's
worker, and which of them its Connections share. The client compares that with its own, and chooses: the shared
endpoint, if both sides have it or make it next; otherwise the next one, if both have made equally many. If neither is
possible, because one side has a raw endpoint to the other's worker, say, the client connects from another worker, at
the latest from a new one, which has made none. Connections over shared memory and Connections without it have an
endpoint each; one count covers both.

Making an endpoint takes UCX longer than everything else about a connection. So when the last Connection has left the
shared endpoint, it is kept for a moment. An endpoint that the next generation replaces is closed when its last
Connection leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import attrs

from .._worker_address import WorkerAddress

#: Generations that can be used between two workers. UCX's numbers have 16 bits.
LIMIT = 65_000
#: Seconds before an endpoint without Connections is closed.
IDLE_TIME = 2.0


@attrs.frozen
class EndpointSummary:
    """What one side tells the other: which endpoints its worker has made to the other's worker.

    Attributes:
        made: how many it has made.
        shared: the generation of the one that its Connections share; 0 if there is none.
        proven: whether something has arrived over that one.
    """

    made: int = 0
    shared: int = 0
    proven: bool = False

    def reaches(self, generation: int) -> bool:
        """True if the side has this endpoint, or makes it next."""
        return generation in (self.shared, self.made + 1)


@attrs.define
class SharedEndpoint:
    """The endpoint that Connections of one kind share: over shared memory, or without.

    Attributes:
        core: None if there is none.
        holds: how many clients were told of it, and have not joined it yet.
    """

    core: PeerEndpoint | None = None
    generation: int = 0
    holds: int = 0


class PeerEndpoint(Protocol):
    """The part of an endpoint that :class:`EndpointsToWorker` uses."""

    peer_address: WorkerAddress | None
    endpoints_to_worker: EndpointsToWorker | None

    @property
    def proven(self) -> bool:
        """True if something has arrived over it for a Connection."""

    def close(self) -> None:
        """Closes it by force."""


class EndpointsToWorker:
    """The endpoints that this worker makes to one worker of a peer.

    The address from which an endpoint is made, with shared memory or without, distinguishes its kind.

    Args:
        watch: called when an endpoint has lost its last Connection: call :meth:`close_idle` now and then from here on.
    """

    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch
        self._made = 0
        self._kinds: dict[bytes, SharedEndpoint] = {}
        #: Endpoints without Connections, and since when.
        self._idle: dict[PeerEndpoint, float] = {}

    def count_made(self) -> None:
        """Counts a generation: UCX has made an endpoint, or used the number up on an attempt."""
        self._made += 1

    def _kind(self, address: WorkerAddress | None) -> SharedEndpoint:
        assert address is not None
        return self._kinds.setdefault(address.ucx, SharedEndpoint())

    def summary(self, address: WorkerAddress) -> EndpointSummary:
        """Returns what is said to the peer about the endpoints of one kind."""
        kind = self._kind(address)
        return EndpointSummary(min(self._made, LIMIT), kind.generation, kind.core is not None and kind.core.proven)

    @property
    def is_unused(self) -> bool:
        """True if no endpoint was ever made, and none is held for a client."""
        return self._made == 0 and not any(kind.holds for kind in self._kinds.values())

    # ---- clients that were told our summary ----

    def hold_for_client(self, address: WorkerAddress) -> None:
        """Keeps the shared endpoint until :meth:`release_hold`, for a client that is told our summary."""
        self._kind(address).holds += 1

    def release_hold(self, address: WorkerAddress) -> None:
        """The client has joined, or will not."""
        self._kind(address).holds -= 1

    # ---- choosing and making ----

    def choose(self, theirs: EndpointSummary, address: WorkerAddress) -> int | None:
        """For the client: returns the generation that both sides can use; None if there is none.

        Args:
            theirs: the server's summary.
            address: the server's worker, to which our endpoint leads.
        """
        ours = self.summary(address)
        shared = max(ours.shared, theirs.shared)
        if shared and self._reaches(shared, address) and theirs.reaches(shared):
            return shared
        following = ours.made + 1
        return following if ours.made == theirs.made and self._reaches(following, address) else None

    def _reaches(self, generation: int, address: WorkerAddress) -> bool:
        kind = self._kind(address)
        if kind.core is not None and (generation == kind.generation or kind.holds):
            return generation == kind.generation  # a client that was told of it must find it
        return generation == self._made + 1 and generation < LIMIT

    def get(self, generation: int, address: WorkerAddress, make: Callable[[], PeerEndpoint]) -> PeerEndpoint | None:
        """Returns the endpoint of this generation, which it makes if it is the next; None if it cannot be had.

        Raises:
            OSError, UCXError: what ``make`` raises.
        """
        if not self._reaches(generation, address):
            return None
        kind = self._kind(address)
        if kind.core is None or generation != kind.generation:
            core = make()  # which calls `count_made`
            old, kind.core, kind.generation = kind.core, core, generation
            core.endpoints_to_worker = self
            if old is not None and old.proven and self._idle.pop(old, None) is not None:
                old.close()  # one that is not proven stays for a moment: see `last_left`
            return core
        self._idle.pop(kind.core, None)
        return kind.core

    # ---- the end ----

    def last_left(self, core: PeerEndpoint, *, left_clean: bool) -> bool:
        """The last Connection has left an endpoint.

        Args:
            left_clean: whether another connection may go on with it: nothing was left at it.

        Returns:
            Whether it stays for a moment. If not, it is to be closed now.
        """
        kind = self._kind(core.peer_address)
        if not kind.holds and not (left_clean and core.proven):
            self._forget(core)
        # UCX may still be connecting one that is not proven. If that is closed at once, another connection between
        # the same two workers over TCP sometimes breaks (UCX 1.22: 6 of 900 cancelled connects did that).
        stays = core is kind.core or not core.proven
        if stays:
            self._idle[core] = time.monotonic()
            self._watch()
        return stays

    def ended(self, core: PeerEndpoint) -> None:
        """An endpoint was closed, or has failed."""
        self._idle.pop(core, None)
        self._forget(core)

    def _forget(self, core: PeerEndpoint) -> None:
        kind = self._kind(core.peer_address)
        if core is kind.core:
            kind.core, kind.generation = None, 0

    @property
    def idle(self) -> int:
        """Returns how many endpoints have no Connection."""
        return len(self._idle)

    def close_idle(self) -> None:
        """Closes the endpoints to this worker that have had no Connection for a while."""
        oldest = time.monotonic() - IDLE_TIME
        for core, since in list(self._idle.items()):
            kind = self._kind(core.peer_address)
            if since <= oldest and not (kind.holds and core is kind.core):
                del self._idle[core]
                core.close()


class EndpointsByWorker:
    """All endpoints that this worker makes, by the uid of the worker to which they lead.

    Args:
        watch: see :class:`EndpointsToWorker`.
    """

    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch
        self._by_uid: dict[int, EndpointsToWorker] = {}
        #: Whether UCX's endpoint configurations are used up: a worker has 255 in its life.
        self.is_full = False

    def of(self, uid: int) -> EndpointsToWorker:
        """Returns the endpoints to the worker with this uid. (Kept until our worker is closed, because UCX counts.)"""
        endpoints = self._by_uid.get(uid)
        if endpoints is None:
            endpoints = self._by_uid[uid] = EndpointsToWorker(self._watch)
        return endpoints

    def forget_unused(self, uid: int) -> None:
        """Forgets a worker to which no endpoint was made."""
        endpoints = self._by_uid.get(uid)
        if endpoints is not None and endpoints.is_unused:
            del self._by_uid[uid]

    @property
    def idle(self) -> int:
        """Returns how many endpoints have no Connection."""
        return sum(endpoints.idle for endpoints in list(self._by_uid.values()))  # in any thread

    def close_idle(self) -> None:
        """Closes the endpoints to any worker that have had no Connection for a while."""
        for endpoints in self._by_uid.values():
            endpoints.close_idle()
