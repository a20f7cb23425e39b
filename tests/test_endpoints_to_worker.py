"""The endpoint that Connections share: its rules, and a random model of two sides that connect with each other.

The model runs the library's own ``EndpointsToWorker`` objects and ``connect_shared``. UCX, the control sockets and the
handshakes around them are simulated, so that their events can be interleaved in any order.
"""

from __future__ import annotations

import errno
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from helpers import Rounds, open_listener

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.client import SHARED_WORKERS
from trio_ucx._handshake.registry import WorkerConnections
from trio_ucx._native import ffi
from trio_ucx._open import _Destination
from trio_ucx.ucp import Status, _connecting
from trio_ucx.ucp._connecting import connect_shared, connect_worker
from trio_ucx.ucp._engine import endpoints_to_worker as module
from trio_ucx.ucp._engine.endpoints_to_worker import (
    IDLE_TIME,
    LIMIT,
    EndpointsByWorker,
    EndpointsToWorker,
    EndpointSummary,
)


@attrs.define
class Clock:
    """Takes the place of ``time`` in the module."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_idle_time(self) -> None:
        self.now += IDLE_TIME + 0.1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


# ---- one side ----

WITH: Any = SimpleNamespace(ucx=b"tcp and shared memory")
WITHOUT: Any = SimpleNamespace(ucx=b"tcp")


@attrs.define(eq=False, slots=False)
class Core:
    """Stands for an endpoint."""

    endpoints_to_worker: Any = None
    peer_address: Any = None
    proven: bool = False
    handle: object = 1

    @property
    def gone(self) -> bool:
        return self.handle is None

    def close(self) -> None:
        self.handle = None
        self.endpoints_to_worker.ended(self)


class OneSide:
    """One side: its endpoints to the other's worker."""

    def __init__(self) -> None:
        self.watched = 0
        self.endpoints_to_worker: Any = EndpointsToWorker(self._watch)

    def _watch(self) -> None:
        self.watched += 1

    def leave(self, core: Core, *, left_clean: bool) -> None:
        if not self.endpoints_to_worker.last_left(core, left_clean=left_clean):
            core.close()

    def summary(self, address: Any = WITH) -> EndpointSummary:
        return self.endpoints_to_worker.summary(address)

    def get(self, generation: int, address: Any = WITH, *, proven: bool = True) -> Core:
        core = self.endpoints_to_worker.get(generation, address, lambda: self.make(address))
        assert core is not None
        core.proven = core.proven or proven
        return core  # type: ignore[no-any-return]

    def make(self, address: Any = WITH) -> Core:
        self.endpoints_to_worker.count_made()
        return Core(peer_address=address)

    def cannot_get(self, generation: int, address: Any = WITH) -> bool:
        return self.endpoints_to_worker.get(generation, address, lambda: pytest.fail("it makes one")) is None

    def passes(self, made: int) -> None:
        """Uses generations up, as raw endpoints do."""
        for _ in range(made - self.summary().made):
            self.endpoints_to_worker.count_made()


@pytest.fixture
def side(clock: Clock) -> OneSide:
    return OneSide()


@pytest.mark.parametrize(
    ("ours", "theirs", "generation"),
    [
        # (made, shared), (made, shared)
        ((0, 0), (0, 0), 1),
        ((1, 1), (1, 1), 1),
        ((1, 1), (0, 0), 1),  # the server makes it
        ((0, 0), (1, 1), 1),  # the client makes it
        ((2, 2), (3, 3), 3),
        ((3, 3), (2, 2), 3),
        ((1, 1), (1, 0), 2),
        ((1, 0), (1, 1), 2),
        ((2, 1), (2, 2), 3),
        ((5, 2), (3, 2), 2),  # raw endpoints do not matter
        ((5, 2), (1, 0), 2),
        ((1, 0), (5, 2), 2),
        ((1, 0), (0, 0), None),
        ((0, 0), (1, 0), None),
        ((3, 3), (1, 1), None),
        ((2, 1), (4, 3), 3),
        ((2, 1), (4, 4), None),
        ((4, 0), (2, 2), None),
    ],
)
def test_choose(side: OneSide, ours: tuple[int, int], theirs: tuple[int, int], generation: int | None) -> None:
    made, shared = ours
    if shared:
        side.passes(shared - 1)
        side.get(shared)
    side.passes(made)
    assert side.summary() == EndpointSummary(made, shared, proven=bool(shared))
    assert side.endpoints_to_worker.choose(EndpointSummary(*theirs), WITH) == generation


def test_choose_ends_at_the_limit(side: OneSide) -> None:
    side.passes(LIMIT - 2)
    assert side.endpoints_to_worker.choose(EndpointSummary(LIMIT - 2), WITH) == LIMIT - 1
    side.get(LIMIT - 1)
    assert side.endpoints_to_worker.choose(EndpointSummary(LIMIT - 1, LIMIT - 1), WITH) == LIMIT - 1
    assert side.endpoints_to_worker.choose(EndpointSummary(LIMIT - 1), WITH) is None


def test_endpoint_that_is_left_is_kept_for_a_moment(side: OneSide, clock: Clock) -> None:
    core = side.get(1)
    side.leave(core, left_clean=True)
    assert (side.endpoints_to_worker.idle, side.watched) == (1, 1)
    clock.now += 0.9 * IDLE_TIME
    side.endpoints_to_worker.close_idle()
    assert side.get(1) is core and side.endpoints_to_worker.idle == 0
    clock.pass_idle_time()
    side.endpoints_to_worker.close_idle()
    assert not core.gone, "it has a Connection again"
    side.leave(core, left_clean=True)
    clock.pass_idle_time()
    side.endpoints_to_worker.close_idle()
    assert core.gone and side.endpoints_to_worker.idle == 0
    assert side.summary() == EndpointSummary(1)


def test_endpoint_that_cannot_be_kept(side: OneSide) -> None:
    core = side.get(1)
    side.leave(core, left_clean=False)
    assert core.gone and not side.watched
    assert side.summary() == EndpointSummary(1)


@pytest.mark.parametrize("left_clean", [True, False])
def test_endpoint_that_was_not_greeted_is_closed_later(side: OneSide, clock: Clock, left_clean: bool) -> None:
    core = side.get(1, proven=False)
    side.leave(core, left_clean=left_clean)
    assert not core.gone and side.watched
    assert side.summary() == EndpointSummary(1), "no Connection may join it"
    clock.pass_idle_time()
    side.endpoints_to_worker.close_idle()
    assert core.gone


@pytest.mark.parametrize("proven", [True, False])
def test_idle_endpoint_that_is_replaced(side: OneSide, clock: Clock, proven: bool) -> None:
    """UCX may still be connecting one that is not proven: it is closed later."""
    old = side.get(1, proven=proven)
    side.endpoints_to_worker.hold_for_client(WITH)
    side.leave(old, left_clean=True)
    side.endpoints_to_worker.release_hold(WITH)
    new = side.get(2)
    assert old.gone == proven and not new.gone
    clock.pass_idle_time()
    side.endpoints_to_worker.close_idle()
    assert old.gone and not new.gone and side.endpoints_to_worker.idle == 0


def test_idle_endpoints_of_either_kind(side: OneSide, clock: Clock) -> None:
    """A client that is expected, and an endpoint that is made, matter to those of one kind only."""
    core, other = side.get(1, WITH), side.get(2, WITHOUT)
    side.endpoints_to_worker.hold_for_client(WITHOUT)
    for each in (core, other):
        side.leave(each, left_clean=True)
    assert side.endpoints_to_worker.idle == 2
    newer = side.get(3, WITH)
    assert core.gone and not other.gone and side.endpoints_to_worker.idle == 1
    side.leave(newer, left_clean=True)
    clock.pass_idle_time()
    side.endpoints_to_worker.close_idle()
    assert newer.gone and not other.gone
    assert side.summary(WITH) == EndpointSummary(3)
    assert side.summary(WITHOUT) == EndpointSummary(3, 2, True)
    side.endpoints_to_worker.release_hold(WITHOUT)
    side.endpoints_to_worker.close_idle()
    assert other.gone


def test_endpoint_that_has_ended_is_forgotten(side: OneSide) -> None:
    core = side.get(1)
    side.leave(core, left_clean=True)
    side.endpoints_to_worker.hold_for_client(WITH)
    core.close()
    assert (side.summary(), side.endpoints_to_worker.idle) == (EndpointSummary(1), 0)
    assert side.cannot_get(1)
    assert side.get(2) is not core


def test_peers_that_only_said_they_were_there() -> None:
    by_worker: Any = EndpointsByWorker(lambda: None)
    endpoints = by_worker.of(1)
    endpoints.hold_for_client(WITH)
    by_worker.forget_unused(1)
    assert by_worker.of(1) is endpoints
    endpoints.release_hold(WITH)
    by_worker.forget_unused(1)
    by_worker.forget_unused(2)
    assert by_worker.of(1) is not endpoints
    by_worker.of(1).count_made()
    endpoints = by_worker.of(1)
    by_worker.forget_unused(1)
    assert by_worker.of(1) is endpoints, "UCX counts"


# ---- two sides: UCX ----


@attrs.define(eq=False, slots=False, repr=False)
class Endpoint:
    """An endpoint of the simulated UCX, and what ``EndpointCore`` does about Connections.

    Attributes:
        generation: by which UCX pairs it.
        users: the ends of Connections and handshakes that use it.
        failed: whether UCX has reported that it failed.
        stream_data: whether stream data has come, which a later Connection must not get.
    """

    world: World
    node: Node
    peer: int
    generation: int
    handle: object = 1
    endpoints_to_worker: Any = None
    proven: bool = False
    peer_address: Any = None
    users: dict[End, None] = attrs.Factory(dict)
    failed: bool = False
    raw: bool = False
    stream_data: bool = False

    def __repr__(self) -> str:
        return f"<endpoint {self.generation} of {self.node} to {self.peer}>"

    @property
    def gone(self) -> bool:
        return self.handle is None

    def set_peer(self, address: Any) -> None:
        self.peer_address = address

    def watch_process(self) -> None:
        """The program looks after itself."""

    def leave(self, end: End, *, left_clean: bool) -> None:
        """``EndpointCore.leave``."""
        if end not in self.users:
            return
        del self.users[end]
        if self.users or self.gone:
            return
        left_clean = left_clean and not self.stream_data
        was_shared = self.is_shared
        stays = self.endpoints_to_worker.last_left(self, left_clean=left_clean)
        expected = self.world.expected(self.node, self.peer_address)
        assert self.is_shared is (was_shared and (expected or (left_clean and self.proven))), f"{self}: kept or not"
        assert stays or not self.is_shared
        if stays:
            assert self.node.watching, f"{self} will not be closed"
        else:
            self.close()

    @property
    def is_shared(self) -> bool:
        """True if it is offered to the next Connection."""
        shared: int = self.endpoints_to_worker.summary(self.peer_address).shared
        return shared == self.generation

    def close(self) -> None:
        """Closed for being idle, or because its last Connection left."""
        assert not self.users, f"{self} is closed, and has Connections"
        for end in self.world.ends():
            assert not (end.expects and end.told_endpoint is self), f"{self} is closed, and a client was told of it"
        self._end()

    def fail(self) -> None:
        if not self.gone:
            self.failed = True
            self._end()

    def _end(self) -> None:
        self.handle = None
        if self.endpoints_to_worker is not None:
            self.endpoints_to_worker.ended(self)
        users, self.users = list(self.users), {}
        for end in users:
            end.fail()


class Node:
    """A worker."""

    def __init__(self, world: World, uid: int) -> None:
        self.world = world
        self.uid = uid
        self.is_full = False
        self.closed = False
        self.watching = False
        #: How many endpoints UCX has counted, by the peer's uid.
        self.counted: Counter[int] = Counter()
        self.endpoints: list[Endpoint] = []
        self.endpoints_by_worker: Any = EndpointsByWorker(self._watch)
        #: What UCX says to the next attempts to make an endpoint; None: the library does not even ask it.
        self.obstacles: list[Status | None] = []
        self.engine: Any = SimpleNamespace(
            endpoints_by_worker=self.endpoints_by_worker,
            identity=SimpleNamespace(address=SimpleNamespace(uid=uid, auxiliary=frozenset())),
            key_gate=SimpleNamespace(let_in_by_address=lambda address: None),
            handle=self,
        )

    def __repr__(self) -> str:
        return f"worker {self.uid}"

    def _watch(self) -> None:
        self.watching = True

    def address(self, shared_memory: bool) -> Any:
        ucx = bytes([shared_memory]) + self.uid.to_bytes(8, "little")
        return SimpleNamespace(uid=self.uid, ucx=ucx, process=None, tcp_addresses=(), auxiliary=frozenset())

    def close_idle(self) -> None:
        """The safety net."""
        if self.watching and not self.closed:
            self.endpoints_by_worker.close_idle()
            self.watching = self.endpoints_by_worker.idle > 0

    def close(self) -> None:
        self.closed = True
        for endpoint in self.endpoints:
            assert not endpoint.users
            endpoint.handle = None


def _make(engine: Any, label: str, options: Any, create: Callable[[int, Any], int], hint_for: Any) -> Endpoint:
    """Takes the place of ``_connecting._make``."""
    node: Node = engine.handle
    if node.obstacles and node.obstacles[-1] is None:
        node.obstacles.pop()
        raise OSError(errno.EMFILE, "no descriptors")
    made: list[Endpoint] = []
    if create(0, made) != Status.OK:
        raise OSError(errno.EHOSTUNREACH, "UCX cannot make it")
    [endpoint] = made
    return endpoint


def _endpoint_to_worker(node: Node, id: int, address: Any, options: Any, out: list[Endpoint]) -> int:
    """Takes the place of the native function."""
    status = (node.obstacles.pop() or Status.OK) if node.obstacles else Status.OK
    peer = int.from_bytes(bytes(ffi.buffer(address))[1:9], "little")
    if status != Status.NO_MEMORY:
        node.counted[peer] += 1
    if status == Status.OK:
        out.append(Endpoint(node.world, node, peer, node.counted[peer]))
        node.endpoints.append(out[-1])
    return status


@contextmanager
def simulated_ucx() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_connecting, "_make", _make)
        patch.setattr(_connecting, "lib", SimpleNamespace(tu_endpoint_to_worker=_endpoint_to_worker))
        patch.setattr(_connecting, "_usable_part", lambda engine, address, options: address)
        yield


# ---- two sides: handshakes and Connections ----

HANDSHAKE, OPEN, ENDED = "handshake", "open", "ended"


@attrs.define(eq=False, slots=False, repr=False)
class End:
    """One side of an attempt to connect, and then of the Connection: what ``Handshake`` and ``Link`` do."""

    attempt: Attempt
    node: Node
    is_client: bool
    peer: Node | None = None
    state: str = HANDSHAKE
    endpoint: Endpoint | None = None
    expects: bool = False
    #: The server's summary, as the client was told.
    told: EndpointSummary = attrs.Factory(EndpointSummary)
    told_endpoint: Endpoint | None = None
    shared_memory: bool = False
    greet: bool = True
    hello_arrived: bool = False

    @property
    def peer_uid(self) -> int:
        return -1 if self.peer is None else self.peer.uid

    @property
    def endpoints_to_worker(self) -> Any:
        return self.node.endpoints_by_worker.of(self.peer_uid)

    @property
    def peer_address(self) -> Any:
        assert self.peer is not None
        return self.peer.address(self.shared_memory)

    def tell(self, *message: Any) -> None:
        self.attempt.inbox(not self.is_client).append(message)

    # ---- the handshake ----

    def summary(self) -> EndpointSummary:
        self.endpoints_to_worker.hold_for_client(self.peer_address)
        self.expects = True
        self.told = self.endpoints_to_worker.summary(self.peer_address)
        if self.told.shared:
            self.told_endpoint = self.attempt.world.endpoint(self.node, self.peer_uid, self.told.shared)
        return self.told

    def expect_no_more(self) -> None:
        if self.expects:
            self.expects = False
            self.endpoints_to_worker.release_hold(self.peer_address)

    def choose(self, theirs: EndpointSummary) -> int | None:
        endpoints_to_worker, address = self.endpoints_to_worker, self.peer_address
        ours = endpoints_to_worker.summary(address)
        generation = endpoints_to_worker.choose(theirs, address)
        if generation is None:
            # There must be a reason: no endpoint that each side has, or makes next.
            has = {ours.shared}
            if not (ours.shared and self.attempt.world.expected(self.node, address)):
                has.add(ours.made + 1)
            assert not has & ({theirs.shared, theirs.made + 1} - {0}), (ours, theirs)
            return None
        self.greet = not (ours.proven and theirs.proven and ours.shared == theirs.shared == generation)
        return generation

    def join(self, generation: int) -> bool:
        """Gets the endpoint; returns whether it can be had. Raises OSError if UCX cannot make it."""
        self.expect_no_more()
        address = self.peer_address
        endpoint: Endpoint | None = connect_shared(self.node.engine, address, generation, "")  # type: ignore[assignment]
        if endpoint is None:
            return False
        assert endpoint.generation == generation and endpoint.node is self.node and endpoint.peer == self.peer_uid
        assert endpoint.peer_address.ucx == address.ucx, f"{endpoint} has other transports"
        assert not endpoint.raw
        assert not endpoint.gone or endpoint.failed, f"{endpoint} was closed"
        assert self.greet or endpoint.proven, f"no message has come through {endpoint}"
        if endpoint.gone:
            assert endpoint is self.node.endpoints[-1], f"{endpoint} failed before"
            self.fail()
        elif self.state == ENDED:  # while it was made
            endpoint.users[self] = None
            endpoint.leave(self, left_clean=endpoint.proven)
        else:
            endpoint.users[self] = None
            self.endpoint = endpoint
            if self.greet:
                self.attempt.hellos.append(not self.is_client)
            self.open_if_ready()
        return True

    def open_if_ready(self) -> None:
        if self.state == HANDSHAKE and self.endpoint is not None and (self.hello_arrived or not self.greet):
            self.endpoint.proven = True
            self.state = OPEN

    # ---- the end ----

    def fail(self) -> None:
        """The handshake or the Connection ends by force. Ended already: no effect."""
        if self.state != ENDED:
            self.tell("GONE")
            self.end(left_clean=self.state == HANDSHAKE and self.endpoint is not None and self.endpoint.proven)

    def end(self, *, left_clean: bool) -> None:
        self.state = ENDED
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            endpoint.leave(self, left_clean=left_clean)
        if self.peer is not None:
            self.expect_no_more()
            self.node.endpoints_by_worker.forget_unused(self.peer.uid)


class Attempt:
    """An attempt to connect from one worker."""

    def __init__(self, connect: Connect, node: Node) -> None:
        self.world = connect.world
        self.connect = connect
        self.client = End(self, node, True, shared_memory=connect.shared_memory)
        self.server: End | None = None
        #: Frames on the control socket, and that it is connected.
        self.to_client: deque[tuple[Any, ...]] = deque([("CONNECTED",)])
        self.to_server: deque[tuple[Any, ...]] = deque()
        #: HELLOs under way: whether to the client.
        self.hellos: list[bool] = []
        #: Whether it is being closed gracefully.
        self.closing = False

    @property
    def ends(self) -> list[End]:
        return [self.client] if self.server is None else [self.client, self.server]

    @property
    def is_open(self) -> bool:
        return self.server is not None and self.client.state == self.server.state == OPEN

    def inbox(self, to_client: bool) -> deque[tuple[Any, ...]]:
        return self.to_client if to_client else self.to_server

    def deliver(self, to_client: bool) -> None:
        """Takes the next frame to one side."""
        inbox = self.inbox(to_client)
        if not inbox:
            return
        frame = inbox.popleft()
        end = self.client if to_client else self.server
        if end is None:
            if frame[0] == "OPEN":
                self._welcome()
        elif end.state == ENDED:
            pass
        elif frame[0] == "GONE":
            end.fail()
        elif frame[0] == "CONNECTED":
            assert not end.node.closed, f"{end.node} was closed while a client connected from it"
            end.tell("OPEN")
        elif frame[0] == "WELCOME":
            self._take(*frame[1:])
        elif frame[0] == "TAKE":
            self._taken(end, *frame[1:])
        elif frame[0] == "AGAIN":
            was_open = end.state == OPEN
            end.fail()
            if to_client and not was_open:
                self.connect.try_another_worker()

    def deliver_hello(self, to_client: bool) -> None:
        if to_client in self.hellos:
            self.hellos.remove(to_client)
            end = self.client if to_client else self.server
            assert end is not None
            end.hello_arrived = True
            end.open_if_ready()

    def _welcome(self) -> None:
        self.server = server = End(self, self.world.suitable(1 - self.connect.side), False, self.client.node)
        server.shared_memory = self.connect.shared_memory
        server.tell("WELCOME", server.node, server.summary())

    def _take(self, server: Node, theirs: EndpointSummary) -> None:
        client = self.client
        client.peer = server
        generation = client.choose(theirs)
        if generation is None:
            client.tell("AGAIN")
            client.end(left_clean=False)
            self.connect.try_another_worker()
            return
        client.tell("TAKE", generation, client.greet)
        try:
            assert client.join(generation), "chosen, and then it cannot be had"
        except OSError:
            client.fail()

    def _taken(self, server: End, generation: int, greet: bool) -> None:
        server.greet = greet
        told = server.told_endpoint
        try:
            if not server.join(generation):
                if generation == server.told.shared:
                    assert told is not None
                    assert told.failed, f"{told} was promised"
                server.tell("AGAIN")
                server.end(left_clean=False)
        except OSError:
            server.fail()


class Connect:
    """``connect``: attempts from one worker after the other."""

    def __init__(self, world: World, side: int, shared_memory: bool) -> None:
        self.world, self.side, self.shared_memory = world, side, shared_memory
        self.tried: list[Node] = []
        self.given_up = False
        #: Whether there was no worker left to try.
        self.failed = False
        self.attempt = self._try()

    def _try(self) -> Attempt:
        last = len(self.tried) == SHARED_WORKERS
        self.tried.append(self.world.open() if last else self.world.suitable(self.side, self.tried))
        attempt = Attempt(self, self.tried[-1])
        self.world.attempts.append(attempt)
        return attempt

    def try_another_worker(self) -> None:
        if self.given_up:
            return
        if len(self.tried) > SHARED_WORKERS:
            self.failed = True
        else:
            self.attempt = self._try()


class World:
    """Two sides, each with workers and a listener."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.attempts: list[Attempt] = []
        #: The workers of each side: the main one first.
        self.sides: list[list[Node]] = []
        self.nodes: list[Node] = []
        for _ in range(2):
            self.sides.append([self.open()])

    def open(self) -> Node:
        node = Node(self, len(self.nodes))
        self.nodes.append(node)
        return node

    def suitable(self, side: int, tried: list[Node] | tuple[()] = ()) -> Node:
        """``WorkerConnections.for_new_connection`` and ``Worker._open_successor``."""
        workers = self.sides[side]
        for node in (workers[0], *workers[1:][-1:]):
            if not node.is_full and node not in tried:
                return node
        busy = {end.node for end in self.ends()}
        for node in workers[1:]:
            if node not in busy:
                workers.remove(node)
                node.close()
        workers.append(self.open())
        return workers[-1]

    def ends(self) -> Iterator[End]:
        for attempt in self.attempts:
            for end in attempt.ends:
                if end.state != ENDED:
                    yield end

    def expected(self, node: Node, address: Any) -> bool:
        """Whether a worker expects a client to join the endpoint of one kind."""
        return any(end.expects and end.node is node and end.peer_address.ucx == address.ucx for end in self.ends())

    def endpoint(self, node: Node, peer: int, generation: int) -> Endpoint:
        [endpoint] = (each for each in node.endpoints if (each.peer, each.generation) == (peer, generation))
        return endpoint

    def open_endpoints(self) -> list[Endpoint]:
        return [each for node in self.nodes for each in node.endpoints if not each.gone and not each.raw]

    # ---- steps ----

    def start(self, chance: random.Random) -> None:
        Connect(self, chance.randrange(2), chance.random() < 0.5)

    def deliver(self, chance: random.Random) -> None:
        inboxes = [(each, to) for each in self.attempts for to in (True, False) if each.inbox(to)]
        if inboxes:
            attempt, to_client = chance.choice(inboxes)
            attempt.deliver(to_client)

    def hello(self, chance: random.Random) -> None:
        under_way = [(each, to) for each in self.attempts for to in each.hellos]
        if under_way:
            attempt, to_client = chance.choice(under_way)
            attempt.deliver_hello(to_client)

    def give_up(self, chance: random.Random) -> None:
        ends = [end for end in self.ends() if end.state == HANDSHAKE]
        if ends:
            end = chance.choice(ends)
            if end.is_client:
                end.attempt.connect.given_up = True
                if chance.random() < 0.3:  # the kernel drops what the server has not read
                    end.attempt.to_server.clear()
            end.fail()

    def close(self, chance: random.Random) -> None:
        """Begins a graceful close."""
        attempts = [each for each in self.attempts if each.is_open]
        if attempts:
            chance.choice(attempts).closing = True

    def leave(self, chance: random.Random) -> None:
        """One side has closed gracefully."""
        ends = [end for end in self.ends() if end.attempt.closing]
        if ends:
            chance.choice(ends).end(left_clean=chance.random() < 0.8)

    def abort(self, chance: random.Random) -> None:
        ends = [end for end in self.ends() if end.state == OPEN]
        if ends:
            chance.choice(ends).fail()

    def fail(self, chance: random.Random) -> None:
        """UCX says that an endpoint has failed, or the endpoints of both sides."""
        endpoints = self.open_endpoints()
        if endpoints:
            endpoint = chance.choice(endpoints)
            endpoint.fail()
            if chance.random() < 0.5:
                for other in endpoints:
                    ends = (other.peer, other.node.uid, other.generation)
                    if ends == (endpoint.node.uid, endpoint.peer, endpoint.generation):
                        other.fail()

    def raw(self, chance: random.Random) -> None:
        node, peer = (workers[0] for workers in chance.sample(self.sides, 2))
        try:
            endpoint: Any = connect_worker(node.engine, peer.address(chance.random() < 0.5))
            endpoint.raw = True
        except OSError:
            pass

    def stream_data(self, chance: random.Random) -> None:
        used = [endpoint for endpoint in self.open_endpoints() if endpoint.users]
        if used:
            chance.choice(used).stream_data = True

    def time(self, chance: random.Random) -> None:
        self.clock.now += chance.choice([0.4, 0.9, 1.1]) * IDLE_TIME
        for node in self.nodes:
            if chance.random() < 0.7:
                node.close_idle()

    def obstacle(self, chance: random.Random) -> None:
        node = chance.choice(chance.choice(self.sides))
        node.obstacles.append(chance.choice([Status.UNREACHABLE, Status.NO_MEMORY, None]))

    def full(self, chance: random.Random) -> None:
        """A worker has no room for another connection."""
        chance.choice(chance.choice(self.sides)).is_full = True

    # ---- what must hold ----

    def check(self) -> None:
        for attempt in self.attempts:
            if attempt.server is None:
                continue
            client, server = attempt.client.endpoint, attempt.server.endpoint
            if client is not None and server is not None and not attempt.to_client:  # no AGAIN or GONE
                assert client.generation == server.generation, f"{client} and {server} are not paired"
                assert (client.node.uid, client.peer) == (server.peer, server.node.uid)
                assert client.peer_address.ucx[0] == server.peer_address.ucx[0], "of different transports"
                assert not client.gone and not server.gone
        for node in self.nodes:
            for peer, counted in node.counted.items():
                for shared_memory in (False, True):
                    address = self.nodes[peer].address(shared_memory)
                    summary = node.endpoints_by_worker.of(peer).summary(address)
                    assert summary.made == counted, f"{node} has counted wrong"
                    if summary.shared and not node.closed:
                        endpoint = self.endpoint(node, peer, summary.shared)
                        assert not endpoint.gone, f"{endpoint} is offered, and has ended"
                        assert endpoint.peer_address.ucx == address.ucx, f"{endpoint} is of the other kind"

    def finish(self) -> None:
        """Delivers what is under way until nothing is."""
        attempts = self.attempts
        while any(each.to_client or each.to_server or each.hellos for each in attempts):
            for attempt in list(attempts):
                for to_client in (True, False):
                    attempt.deliver(to_client)
                    attempt.deliver_hello(to_client)
            self.check()
        for end in self.ends():
            assert end.state == OPEN, "a handshake does not end"
            assert not end.expects

    def connect(self, side: int, shared_memory: bool) -> None:
        """While nothing else happens, a connect succeeds."""
        for node in self.nodes:
            node.obstacles.clear()
        connect = Connect(self, side, shared_memory)
        self.finish()
        assert connect.attempt.is_open, f"it does not connect: {connect.tried}"

    def end_all(self) -> None:
        for end in list(self.ends()):
            end.end(left_clean=True)
        self.clock.pass_idle_time()
        for node in self.nodes:
            node.close_idle()
            assert node.closed or (node.endpoints_by_worker.idle, node.watching) == (0, False)
        assert not self.open_endpoints()


#: How often each step is chosen.
WEIGHTS = {
    World.start: 6,
    World.deliver: 24,
    World.hello: 8,
    World.give_up: 2,
    World.close: 4,
    World.leave: 5,
    World.abort: 1,
    World.fail: 1,
    World.raw: 1,
    World.stream_data: 0.5,
    World.time: 2,
    World.obstacle: 1,
    World.full: 0.2,
}

Step = tuple[Callable[[World, random.Random], None], int]


def some_steps(chance: random.Random) -> list[Step]:
    """Steps, each with the seed of its choices. Some kinds do not occur at all in most sequences."""
    weights = {step: weight for step, weight in WEIGHTS.items() if weight > 4 or chance.random() < 0.6}
    steps = chance.choices(list(weights), list(weights.values()), k=chance.randrange(5, 80))
    return [(step, chance.randrange(2**30)) for step in steps]


def play(steps: list[Step], clock: Clock) -> None:
    world = World(clock)
    for step, seed in steps:
        step(world, random.Random(seed))
        world.check()
    world.finish()
    for side in (0, 1):
        for shared_memory in (False, True):
            world.connect(side, shared_memory)
    world.end_all()
    for side in (0, 1):
        world.connect(side, True)
    world.end_all()


def why_it_fails(steps: list[Step], clock: Clock) -> Exception | None:
    try:
        play(steps, clock)
    except Exception as error:
        return error
    return None


def shortest(steps: list[Step], clock: Clock) -> list[Step]:
    """Leaves out the steps without which it still fails."""
    count = 0
    while count != len(steps):
        count = len(steps)
        for index in reversed(range(count)):
            rest = steps[:index] + steps[index + 1 :]
            if why_it_fails(rest, clock) is not None:
                steps = rest
    return steps


def test_two_sides_choose_the_same_endpoint(chance: random.Random, rounds: Rounds, clock: Clock) -> None:
    with simulated_ucx():
        for _ in range(rounds(400, 40_000)):
            steps = some_steps(chance)
            if why_it_fails(steps, clock) is not None:
                for step in (steps := shortest(steps, clock)):
                    print(step[0].__name__, step[1])
                play(steps, clock)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "different transports"])
def test_connects_at_a_time(alike: bool, directions: int, chance: random.Random, rounds: Rounds, clock: Clock) -> None:
    """Nothing breaks, and nobody gives up: each succeeds, and those that are alike share one endpoint."""
    with simulated_ucx():
        for _ in range(rounds(20, 1000)):
            world = World(clock)
            kinds = [True] * 30 if alike else [chance.random() < 0.5 for _ in range(30)]
            connects = []
            while kinds:
                if chance.random() < 0.3:
                    connects.append(Connect(world, chance.randrange(directions), kinds.pop()))
                else:
                    chance.choice([world.deliver, world.deliver, world.hello])(chance)
                world.check()
            world.finish()
            assert not [connect for connect in connects if not connect.attempt.is_open]
            if alike:
                assert [len(connect.tried) for connect in connects] == [1] * 30
                assert len(world.open_endpoints()) == 2
            world.end_all()


def test_connects_of_both_kinds_beside_an_open_connection(clock: Clock) -> None:
    """A new endpoint of one kind does not take the other kind's from a client that was told of it."""
    with simulated_ucx():
        world = World(clock)
        before = Connect(world, 0, shared_memory=False)
        world.finish()
        x, y = (Connect(world, 0, shared_memory).attempt for shared_memory in (True, False))
        for attempt in (x, y):
            attempt.deliver(True)  # the socket is connected
            attempt.deliver(False)  # OPEN
        for attempt in (x, y):
            assert attempt.server is not None
            assert attempt.server.told == EndpointSummary(1, 0 if attempt is x else 1, attempt is y)
            attempt.deliver(True)  # WELCOME
            assert [frame[0] for frame in attempt.to_server] == ["TAKE"]
            attempt.deliver(False)  # TAKE
            assert not attempt.to_client, "no AGAIN"
            assert attempt.server.endpoint is not None
        world.finish()
        assert all(attempt.is_open for attempt in (before.attempt, x, y))
        assert y.client.endpoint is before.attempt.client.endpoint
        assert [endpoint.generation for endpoint in world.open_endpoints()] == [1, 2, 1, 2]
        world.end_all()


def test_third_try_has_a_worker_of_its_own(clock: Clock) -> None:
    """Another connect, of the other kind, makes the only endpoint that the worker of the third try could have made."""

    def play(attempt: Attempt, *to_client: bool) -> None:
        for each in to_client:
            attempt.deliver(each)

    with simulated_ucx():
        world = World(clock)
        (ours, *_), (theirs, *_) = world.sides
        connect_worker(ours.engine, theirs.address(True))
        world.nodes[0].endpoints[0].raw = True  # the two workers have no endpoint that both can use
        a = Connect(world, 0, shared_memory=True)
        play(a.attempt, True, False, True)
        play(a.attempt, True, False)  # A: the second try has WELCOME under way
        b, c = Connect(world, 0, shared_memory=False), Connect(world, 0, shared_memory=True)
        play(b.attempt, True, False, True)
        play(b.attempt, True, False)  # B: the same, from the same worker
        play(a.attempt, True)  # A takes the first generation of that worker
        play(b.attempt, True)  # B finds none there
        play(b.attempt, True, False)  # B: the third try, from a new worker, has WELCOME under way
        play(c.attempt, True, False, True)
        play(c.attempt, True, False, True)  # C: the second try takes the first generation of a worker
        play(b.attempt, True)
        world.finish()
        assert [len(connect.tried) for connect in (a, b, c)] == [2, 3, 2]
        assert [connect.failed for connect in (a, b, c)] == [False] * 3


# ---- the library's own workers ----


async def test_worker_stays_open_while_a_client_connects_from_it(
    worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connect opens a further successor, and closes those that are idle."""
    open_socket = _Destination.open_socket
    tries = []

    async def slow(destination: _Destination) -> trio.SocketStream:
        tries.append(destination)
        if len(tries) == 2:
            registry = WorkerConnections.of(worker)
            registry.for_new_connection([registry, registry])  # as another connect does at its third try
        return await open_socket(destination)

    monkeypatch.setattr(_Destination, "open_socket", slow)
    async with ucp.open_worker(config={"TLS": transports}) as server:
        async with open_listener(server) as listener:
            raw = await worker.open_endpoint(server.address)  # the two workers have no endpoint that both can use
            try:
                (await trio_ucx.open_ucx_stream(*listener.address, worker=worker)).abort()
            finally:
                raw.abort()
    assert len(tries) == 2
