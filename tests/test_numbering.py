"""The numbers of endpoints by worker address: both ends of a connection always have the same one."""

from __future__ import annotations

import errno
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from helpers import pattern
from hypothesis import example, given, settings
from hypothesis import strategies as st
from remote import open_two
from samples import ALL, some_facts

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import handshake as handshake_side
from trio_ucx._handshake.client import Connector
from trio_ucx._handshake.exchange import Exchange, Taken
from trio_ucx._handshake.facts import SharedMemory
from trio_ucx._handshake.handshake import ExchangeOptions, Handshake
from trio_ucx._handshake.server import Acceptor
from trio_ucx._link import Options
from trio_ucx._wire import ProtocolError
from trio_ucx.testing import internals
from trio_ucx.ucp import _contained as contained_module
from trio_ucx.ucp._connecting import connect_for_memory, connect_worker
from trio_ucx.ucp._connecting import connect_paired as connect_paired_for_real
from trio_ucx.ucp._engine import numbering as numbering_module
from trio_ucx.ucp._engine.numbering import (
    FILLERS_AT_ONCE,
    LIMIT,
    MAX_FILLERS,
    MAX_IDLE,
    MAX_PLAIN,
    NotRequested,
    Numbering,
    Numbers,
    PeerNumbers,
    UsedUp,
)
from trio_ucx.ucp._opening import WITHOUT_ERROR_HANDLING


@attrs.define(eq=False, slots=False)
class Core:
    """Stands for an endpoint. Its index is what UCX pairs it by."""

    index: int
    forcible: bool = True
    raw: bool = False
    handle: object = 1
    on_failure: Callable[[], None] | None = None
    error: ucp.UCXError | None = None
    peer_address: object = None
    served: bool = False
    #: Whether the peer's UCX has got the request for its pair.
    asked_for: bool = False

    def close(self) -> None:
        self.on_failure = None
        self.handle = None

    def fail(self, error: ucp.UCXError) -> None:
        if self.handle is not None:
            self.error = error
            self.handle = None
            if self.on_failure is not None:
                self.on_failure()


class Made:
    """The endpoints of one worker to another, as UCX counts them.

    Args:
        uid: the other worker's.
    """

    def __init__(self, uid: int = 1) -> None:
        self.numbering: Numbering[Any] = Numbering()
        self._uid = uid
        self.cores: list[Core] = []
        self.made_at_once = 0
        #: Called while UCX makes an endpoint.
        self.meanwhile: Callable[[], object] = lambda: None
        #: How many of the next attempts to make one fail, and whether these, too, use up numbers.
        self.failing = 0
        self.failing_counts = False

    @property
    def numbers(self) -> PeerNumbers[Any]:
        return self.numbering.of(self._uid)  # which may have forgotten those that it had before

    def open(self, error_handling: bool = True, raw: bool = False) -> Core:
        core = Core(len(self.cores), error_handling, raw)
        if self.failing:
            self.failing -= 1
            if self.failing_counts:
                self._count(core)
                core.close()
            raise OSError(errno.EHOSTUNREACH, "UCX cannot make it")
        self._count(core)
        self.meanwhile()
        return core

    def _count(self, core: Core) -> None:
        self.cores.append(core)
        self.numbers.made(error_handling=core.forcible)
        if core.raw:
            self.numbers.add_raw(core)

    def adopt(self, peer: Made, error_handling: bool) -> Core:
        """Takes the endpoint that UCX has made for the peer's."""
        core = self.open(error_handling)
        pair = peer.cores[core.index] if core.index < len(peer.cores) else None
        if pair is None or pair.handle is None or not pair.asked_for:
            core.close()
            raise NotRequested
        assert pair.forcible == error_handling
        return core

    def claim(self, number: int, address: bytes = b"", pairs: Made | None = None) -> Core | None:
        """Makes an endpoint, or adopts it if its pairs are given."""

        def make(error_handling: bool) -> Any:
            core = self.open(error_handling) if pairs is None else self.adopt(pairs, error_handling)
            core.peer_address = SimpleNamespace(ucx=address)
            return core

        self.made_at_once = -len(self.cores)
        core: Any = self.numbers.make(number, make, address)
        self.made_at_once += len(self.cores)
        assert self.made_at_once <= FILLERS_AT_ONCE + 1
        if core is not None:
            assert core.index == number
        return core  # type: ignore[no-any-return]


# ---- one side ----


@pytest.mark.parametrize("seed", range(20))
def test_claims_in_any_order(seed: int) -> None:
    """Each number gives the endpoint that UCX counts so; the others up to it are made meanwhile, and used later."""
    chance = random.Random(seed)
    claims = list(range(200))
    chance.shuffle(claims)
    made = Made()
    for number in claims:
        for _ in range(200 // FILLERS_AT_ONCE):
            if len(made.cores) < number - FILLERS_AT_ONCE:
                assert made.claim(number) is None  # too many at once: the sides try another number
        assert made.claim(number) is made.cores[number]
        assert made.claim(number) is None, "given twice"
    assert len(made.cores) == 200
    assert made.numbers.numbers() == Numbers(200)


def test_chosen_numbers_are_all_different() -> None:
    made = Made()
    assert [made.numbers.choose(None) for _ in range(5)] == [0, 1, 2, 3, 4]
    made.numbers.release(3)
    made.numbers.release(1)
    assert [made.numbers.choose(None) for _ in range(3)] == [1, 3, 5]
    made.claim(4)
    made.numbers.release(2)  # there is a filler, but the peer may have used it already
    assert made.numbers.choose(None) == 6


def test_choice_is_beyond_what_either_side_has_made() -> None:
    made = Made()
    assert made.numbers.choose(Numbers(7, True)) == 7
    made.numbers.release(7)
    assert made.numbers.choose(Numbers(8, True)) == 8
    for _ in range(10):
        made.open(raw=True)
    assert made.numbers.numbers() == Numbers(10, True)
    assert made.numbers.choose(Numbers(9, True)) == 10


def test_endpoint_that_is_asked_for_while_others_are_made() -> None:
    """Making one progresses the worker, so messages arrive, for which other handshakes go on, or fail."""
    made = Made()

    def another() -> None:
        made.meanwhile = lambda: None
        assert made.claim(5) is made.cores[5]

    made.meanwhile = another
    assert made.claim(3) is None, "an endpoint with another number"
    assert made.claim(3) is made.cores[3]


def test_fillers_that_are_asked_for_while_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    made.claim(3)
    monkeypatch.setattr(numbering_module, "FILLER_AGE", -1)
    monkeypatch.setattr(made.cores[0], "close", made.numbers.close_old_fillers)
    made.numbers.close_old_fillers()
    assert not made.numbers._fillers and made.cores[1].handle is None


def test_peer_that_is_forgotten_while_idle_endpoints_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    core = made.claim(0)
    assert core is not None
    made.numbers.keep(0, core)
    made.numbering.of(99)
    monkeypatch.setattr(core, "close", lambda: made.numbering.forget_unused(99))
    monkeypatch.setattr(numbering_module, "IDLE_TIME", -1)
    made.numbering.close_idle()
    assert made.numbering._peers.keys() == {made._uid}


def test_little_is_kept_of_what_a_peer_says() -> None:
    made = Made()
    for first in range(0, 60_000, MAX_PLAIN):
        made.numbers.heard(Numbers(0, False, tuple(range(first, first + MAX_PLAIN))))
    assert len(made.numbers._peer_plain) == MAX_PLAIN


def test_number_that_was_used_is_not_given_again() -> None:
    made = Made()
    made.open(raw=True)
    assert made.claim(0) is None
    assert made.claim(2) is made.cores[2]
    made.cores[1].close()  # a filler that failed
    assert made.claim(1) is None


def test_fillers_handle_errors_as_their_pairs_do() -> None:
    made = Made()
    made.numbers.heard(Numbers(9, True, (1, 3, 7)))
    made.claim(5)
    assert [core.forcible for core in made.cores] == [True, False, True, False, True, True]
    assert made.claim(3) is None  # of no use for a connection
    made.claim(8)
    assert [core.forcible for core in made.cores[6:]] == [True, False, True]


def test_numbers_without_error_handling_are_sent() -> None:
    made = Made()
    for index in range(3000):
        made.open(error_handling=index % 2 == 0, raw=True)
    sent = made.numbers.numbers()
    assert sent.next == 3000 and sent.has_raw
    assert sent.plain == tuple(range(3000 - 2 * MAX_PLAIN + 1, 3000, 2))  # the newest ones


def test_fillers_that_the_peer_has_not_asked_for() -> None:
    made, peer = Made(), Made()
    for _ in range(4):
        peer.open().asked_for = True
    peer.cores[1].close()
    assert made.claim(3, pairs=peer) is made.cores[3]
    assert made.claim(1, pairs=peer) is None, "its number is used up"
    assert made.claim(2, pairs=peer) is made.cores[2]
    with pytest.raises(NotRequested):
        made.claim(4, pairs=peer)
    assert made.numbers.numbers() == Numbers(5)


def test_limits() -> None:
    made = Made()
    for number in (MAX_FILLERS + 1, 64_000, LIMIT, 65535, 2**32 - 1):
        assert made.claim(number) is None
    assert made.cores == []
    assert made.numbers.choose(Numbers(LIMIT - 1)) == LIMIT - 1
    with pytest.raises(UsedUp):
        made.numbers.choose(Numbers(LIMIT - 1))
    with pytest.raises(UsedUp):
        made.numbers.choose(Numbers(65535))


def test_peer_cannot_use_up_our_numbers() -> None:
    """What a peer says about its numbers does not make a server go on with another worker, which costs something."""
    made = Made()
    made.numbers.choose(Numbers(LIMIT - 1))
    made.numbers.heard(Numbers(65535, True, (1,)))
    assert not made.numbers.used_up
    for _ in range(LIMIT):
        made.numbers.made(error_handling=True)
    assert made.numbers.used_up


def test_numbers_that_come_back_are_chosen_again() -> None:
    """...so what a peer says affects the numbers of its own connections only."""
    made = Made()
    made.numbers.choose(Numbers(LIMIT - 1))
    assert made.numbers.choose(None) == 0
    for number in (0, LIMIT - 1):
        made.numbers.release(number)
    assert made.numbers.choose(Numbers(LIMIT - 1)) == LIMIT - 1


def test_peer_without_endpoints_is_forgotten() -> None:
    numbering: Numbering[Any] = Numbering()
    first = numbering.of(1)
    for theirs in (None, Numbers(5), None):
        number = first.choose(theirs)
        numbering.forget_unused(1)
        assert numbering.of(1) is first, "its number is under way"
        first.release(number)
    numbering.forget_unused(1)
    assert numbering.of(1) is not first


def test_more_endpoints_become_idle_while_some_are_closed() -> None:
    """Closing one progresses the worker, which may end other connections."""
    made = Made()
    for number in range(MAX_IDLE + 4):
        core = made.claim(number)
        assert core is not None
    idle, later = made.cores[:MAX_IDLE], made.cores[MAX_IDLE:]
    for core in idle:
        made.numbers.keep(core.index, core)

    def close(core: Core) -> None:
        core.handle = None
        while later:
            newest = later.pop()
            made.numbers.keep(newest.index, newest)

    idle[0].close = partial(close, idle[0])  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbering_module, "IDLE_TIME", -1)
        made.numbers.close_idle()
    assert [core for core in idle if core.handle is not None] == []
    assert made.numbers.idle == 4


def test_old_fillers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(numbering_module.time, "monotonic", lambda: now)
    for has_raw in (False, True):
        made = Made()
        made.numbers.heard(Numbers(0, has_raw))
        made.claim(3)
        now += numbering_module.FILLER_AGE + 1
        made.claim(4)
        assert [core.handle is None for core in made.cores] == [not has_raw] * 3 + [False] * 2
        assert (made.claim(1) is None) is not has_raw
        made.numbers.heard(Numbers(0, False))  # the peer has closed its raw endpoints
        made.numbers.close_old_fillers()
        assert [core.handle is None for core in made.cores[2:]] == [True, False, False]


def test_closed_raw_endpoints_do_not_count() -> None:
    made = Made()
    raw = [made.open(raw=True) for _ in range(2)]
    for endpoint in raw:
        assert made.numbers.numbers() == Numbers(2, True)
        endpoint.close()
    assert made.numbers.numbers() == Numbers(2)


def test_filler_without_error_handling_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX could only flush it."""
    monkeypatch.setattr(numbering_module, "FILLER_AGE", -1)
    made = Made()
    made.numbers.heard(Numbers(2, False, (1,)))
    made.claim(2)
    made.numbers.close_old_fillers()
    assert [core.handle is None for core in made.cores] == [True, False, False]
    assert not made.numbers.has_temporary_fillers


# ---- two sides, by what the client and the server decide ----


class Node:
    """A worker that has Connections to one other worker."""

    def __init__(self, uid: int, peer_uid: int) -> None:
        self.made = Made(peer_uid)
        self.address = ALL[:1] + uid.to_bytes(8, "little") + ALL[9:]
        self.network_address = some_facts().network_address
        self.network_address = self.address[:9] + self.network_address[9:]
        sinks: dict[int, Any] = {}
        self.engine = SimpleNamespace(
            numbering=self.made.numbering,
            address=SimpleNamespace(uid=uid),
            tag_dispatch=SimpleNamespace(sinks=sinks, remove=lambda id: sinks.pop(id), reserve_memory=lambda: None),
            made=self.made,
            data_ports=SimpleNamespace(admit_peer=lambda *_: None),
            call_soon=lambda function: function(),
            may_be_writing=lambda process: None,
            check=lambda: None,
        )

    def for_peer(self, uid: int) -> Node:
        return self

    def facts(self, connection_id: int, options: object, shared_memory: object, sees_local: bool) -> Any:
        return some_facts(connection_id=connection_id, address=self.address, network_address=self.network_address)


def connect_paired(engine: Any, address: Any, uid: int, number: int, label: str) -> Core | None:
    pairs = engine.peer.made if engine.address.uid > uid else None
    return engine.made.claim(number, address.ucx, pairs)  # type: ignore[no-any-return]


class Control:
    """Stands for a control socket after the exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def flush(self) -> None:
        pass

    def abort(self) -> None:
        self.exchange.abort()

    def refuse(self, reason: str) -> None:
        self.exchange.refuse(reason)


def greet(end: Any) -> None:
    """Says HELLO, once for each endpoint."""
    greeted = end.__dict__.setdefault("greeted", set())
    assert end._core is not None and end.number == end._core.index and end.number not in greeted
    greeted.add(end.number)
    end.hellos.append(end.number)


EXCHANGE_OPTIONS = ExchangeOptions(SharedMemory.AUTO, 20.0, None, None)


class Meeting:
    """A connection that is being opened: the library's two sides, and the bytes between them."""

    def __init__(self, client: Node, server: Node) -> None:
        self.connector = Connector(client, None, "server", EXCHANGE_OPTIONS, Options(), 10)  # type: ignore[arg-type]
        self.acceptor = Acceptor.__new__(Acceptor)
        self.acceptor._exchange_options = EXCHANGE_OPTIONS
        self.acceptor._isolate = False
        self.acceptor._check_room = lambda more=0: None  # type: ignore[method-assign]
        self.ends = {
            True: self.connector._handshake,
            False: Handshake(server, Options(), "client"),  # type: ignore[arg-type]
        }
        self.exchanges = {
            is_client: Exchange(is_client=is_client, software="", authkey=None) for is_client in (True, False)
        }
        #: HELLOs in flight, by their receiver.
        self.hellos: dict[bool, deque[int]] = {True: deque(), False: deque()}
        for is_client, end in self.ends.items():
            end.__dict__["hellos"] = self.hellos[not is_client]
        self.exchanges[True].open(self.ends[True].make_facts(SharedMemory.AUTO))
        #: Bytes in flight, by their receiver.
        self.under_way: dict[bool, deque[bytes]] = {True: deque(), False: deque()}
        self.given_up: set[bool] = set()
        #: The sides that have closed the connection.
        self.left: set[bool] = set()
        self.flush()

    def flush(self) -> None:
        for is_client, exchange in self.exchanges.items():
            data = exchange.data_to_send()
            if data:
                self.under_way[not is_client].append(data)

    def lose_peer(self) -> None:
        """The control socket ends at a side that still waits, if the other one has given up."""
        for is_client, end in self.ends.items():
            if not self.failed or is_client in self.given_up or is_client in self.left:
                continue
            if self.settled(is_client):
                end.peer_lost("its control connection ended")
            else:
                end.close()
            self.given_up.add(is_client)

    @property
    def failed(self) -> bool:
        return bool(self.given_up)

    def settled(self, is_client: bool) -> bool:
        return self.ends[is_client].control is not None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is in flight."""
        return not any(self.under_way.values()) and not any(self.hellos.values())

    def deliver(self, is_client: bool) -> None:
        """Takes the next bytes for one side to it, or the next HELLO."""
        if not self.under_way[is_client]:
            self.deliver_hello(is_client)
            return
        data = self.under_way[is_client].popleft()
        if is_client not in self.given_up:
            self.exchanges[is_client].receive_data(data)
            self._answer_events(is_client)

    def deliver_hello(self, is_client: bool) -> None:
        if self.hellos[is_client]:
            number = self.hellos[is_client].popleft()
            greeter = self.ends[not is_client].registry.engine.made
            if number < len(greeter.cores):  # not in a connection of a worker with itself
                greeter.cores[number].asked_for = True
            if is_client not in self.given_up:
                self.ends[is_client]._greetings.add(number)
                self._answer_events(is_client)

    def _next_event(self, is_client: bool) -> Any:
        event = self.exchanges[is_client].next_event()
        return event or (None if self.settled(is_client) else self.ends[is_client]._awaited_greeting())

    def _answer_events(self, is_client: bool) -> None:
        exchange, end = self.exchanges[is_client], self.ends[is_client]
        try:
            while (event := self._next_event(is_client)) is not None:
                if self.settled(is_client):
                    if is_client:
                        self.connector._event_while_greeting(exchange, event)
                    else:
                        self.acceptor._event_while_greeting(end, exchange, event)
                elif is_client:
                    self.connector._answer(exchange, event)
                else:
                    self.acceptor._answer(_CLIENT, end, exchange, event)
                if end.number is not None and end.control is None:
                    end.control = Control(exchange)  # type: ignore[assignment]
                    end.greet()
        except (ProtocolError, OSError):
            self.give_up(is_client)
        self.notice_failures()
        self.flush()

    def notice_failures(self) -> None:
        self.given_up |= {is_client for is_client, end in self.ends.items() if end.opened.outcome is not None}

    def give_up(self, is_client: bool) -> None:
        """Cancels the task of one side; the other side notices that, or does not."""
        self.ends[is_client].close("no")
        self.given_up.add(is_client)
        self.flush()

    @property
    def opened(self) -> bool:
        return not self.failed and self.is_quiet and bool(self.left or all(map(self.core, (0, 1))))

    def leave(self, is_client: bool) -> None:
        """Closes one side of the connection gracefully."""
        end = self.ends[is_client]
        core, end._core = self.core(is_client), None
        assert core is not None and end.number is not None
        core.on_failure = None
        end.numbers.keep(end.number, core)  # type: ignore[arg-type]
        self.left.add(is_client)

    def core(self, is_client: bool) -> Core | None:
        return self.ends[is_client]._core  # type: ignore[return-value]


_CLIENT: Any = SimpleNamespace(stream=SimpleNamespace(socket=None))


class World:
    """Two workers, as many connections between them as one likes, and raw endpoints."""

    def __init__(self) -> None:
        self.nodes = [Node(1, 2), Node(2, 1)]
        for node, peer in zip(self.nodes, self.nodes[::-1], strict=True):
            node.engine.peer = peer
        self.meetings: list[Meeting] = []

    def start(self, client: int) -> None:
        self.meetings.append(Meeting(self.nodes[client], self.nodes[1 - client]))

    def finish(self) -> None:
        """Delivers what is under way until nothing is."""
        while not all(meeting.is_quiet for meeting in self.meetings):
            for meeting in self.meetings:
                for is_client in (True, False):
                    meeting.deliver(is_client)
        for meeting in self.meetings:
            meeting.lose_peer()

    def break_endpoint(self, number: int, node: int) -> None:
        """UCX says that an endpoint has failed."""
        cores = [core for core in self.nodes[node].made.cores if core.handle is not None]
        if cores:
            cores[number % len(cores)].fail(ucp.UCXError(ucp.Status.CONNECTION_RESET, "it broke"))
        for meeting in self.meetings:
            meeting.notice_failures()
            meeting.flush()

    def check(self) -> None:
        used: dict[int, Meeting] = {}
        for meeting in self.meetings:
            client, server = meeting.core(True), meeting.core(False)
            if meeting.failed or client is None or server is None:
                continue
            if not meeting.under_way[True]:  # no DECLINE
                assert client.index == server.index, "UCX would pair them with others"
                assert client.forcible and server.forcible and not client.raw and not server.raw
                assert client.handle is not None and server.handle is not None
                assert used.setdefault(client.index, meeting) is meeting

    def check_finished(self) -> None:
        for meeting in self.meetings:
            if not meeting.failed and not meeting.left:
                assert meeting.core(True) is not None and meeting.core(False) is not None, "it did not come about"
        self.check()
        for node in self.nodes:
            numbers = node.made.numbers
            assert numbers._next == len(node.made.cores)
            assert not numbers._offered and not numbers._chosen, "a number was lost"
            used = {core.index for core in node.made.cores if core.raw} | {*numbers._fillers, *numbers._idle}
            ends = [end for meeting in self.meetings for end in meeting.ends.values() if end.registry is node]
            used |= {core.index for end in ends if (core := end._core) is not None and end.opened.outcome is None}
            assert {core.index for core in node.made.cores if core.handle is not None} <= used, "an endpoint was lost"

    @property
    def failed(self) -> bool:
        """Whether any handshake has failed."""
        return any(meeting.failed for meeting in self.meetings)

    def ask(self, number: int, node: int) -> None:
        """A node's UCX asks for the pair of one of its endpoints, at the latest before HELLO."""
        later = [core for core in self.nodes[node].made.cores if not core.asked_for]
        if later:
            later[number % len(later)].asked_for = True

    def let_time_pass(self, node: int) -> None:
        """Makes one side close its idle endpoints and old fillers, as if their time were over."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numbering_module, "IDLE_TIME", -1)
            patch.setattr(numbering_module, "FILLER_AGE", -1)
            self.nodes[node].made.numbering.close_idle()


def not_hidden(what: str, error: BaseException) -> None:
    """Takes the place of a function that logs internal errors."""
    raise AssertionError(what) from error


@pytest.fixture(autouse=True, scope="module")
def fakes(request: pytest.FixtureRequest) -> Any:
    """The library's decisions, without endpoints and sockets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            handshake_side,
            "connect_paired",
            lambda engine, *rest: (connect_paired if isinstance(engine, SimpleNamespace) else _real_paired)(
                engine, *rest
            ),
        )
        for module in (contained_module, handshake_side):
            patch.setattr(module, "report", not_hidden)
        patch.setattr(Handshake, "greet", lambda end: (greet if isinstance(end.registry, Node) else _real_greet)(end))
        yield


_real_paired, _real_greet = handshake_side.connect_paired, Handshake.greet


def play(world: World, steps: list[tuple[str, int, bool]]) -> None:
    for what, number, flag in steps:
        if what == "start":
            world.start(int(flag))
        elif what == "raw":
            with suppress(OSError):
                world.nodes[number % 2].made.open(error_handling=flag, raw=True)
        elif what == "forget":
            world.let_time_pass(int(flag))
        elif what == "leave":
            there = [meeting for meeting in world.meetings if meeting.opened and flag not in meeting.left]
            if there:
                there[number % len(there)].leave(flag)
        elif what == "ask":
            world.ask(number, int(flag))
        elif what == "fail":
            made = world.nodes[number % 2].made
            made.failing, made.failing_counts = 1 + number % 3, flag
        elif what == "break":
            world.break_endpoint(number, int(flag))
        elif world.meetings:
            meeting = world.meetings[number % len(world.meetings)]
            step = {"deliver": meeting.deliver, "hello": meeting.deliver_hello, "give up": meeting.give_up}[what]
            step(flag)
        world.check()


def played(steps: list[tuple[str, int, bool]]) -> World:
    """A world after these steps, and after everything that follows from them."""
    world = World()
    play(world, steps)
    world.finish()
    world.check_finished()
    return world


def steps_of(*kinds: str) -> st.SearchStrategy[list[tuple[str, int, bool]]]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 60), st.booleans()), max_size=150)


#: The chooser forgets the numbers of a peer worker while another connection to it is being opened.
FORGOTTEN_MEANWHILE = [
    ("start", 0, True),
    ("deliver", 0, False),
    ("start", 0, False),
    ("deliver", 1, False),
    ("give up", 1, False),
    ("deliver", 1, True),
]

model = settings.get_profile("model")


@model
@given(steps_of("start", "ask", "deliver", "deliver", "deliver", "hello"))
def test_connections_in_both_directions(steps: list[tuple[str, int, bool]]) -> None:
    assert not played(steps).failed


@model
@given(steps_of("start", "raw", "ask", "deliver", "deliver", "deliver", "hello"))
def test_with_raw_endpoints(steps: list[tuple[str, int, bool]]) -> None:
    assert not played(steps).failed


@model
@given(steps_of("start", "start", "raw", "ask", "give up", "deliver", "deliver", "deliver", "deliver", "hello"))
def test_with_connections_that_are_given_up(steps: list[tuple[str, int, bool]]) -> None:
    played(steps)


@model
@given(steps_of("start", "raw", "ask", "leave", "leave", "forget", "deliver", "deliver", "deliver", "deliver", "hello"))
def test_with_connections_that_are_closed(steps: list[tuple[str, int, bool]]) -> None:
    """Each side keeps its endpoint for a while, not for the same time."""
    assert not played(steps).failed


@model
@given(
    steps_of("start", "ask", "leave", "leave", "forget", "give up", "deliver", "deliver", "deliver", "deliver", "hello")
)
@example(FORGOTTEN_MEANWHILE)
def test_with_connections_that_are_closed_or_given_up(steps: list[tuple[str, int, bool]]) -> None:
    played(steps)


@model
@given(
    steps_of(
        "start", "raw", "ask", "leave", "forget", "give up", "fail", "break", "deliver", "deliver", "deliver", "hello"
    )
)
def test_with_all(steps: list[tuple[str, int, bool]]) -> None:
    """All kinds of steps at once, and UCX cannot make some endpoints, or they fail."""
    played(steps)


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize("chooser_forgets", [True, False])
def test_offer_of_an_endpoint_that_the_peer_has_closed(client: int, chooser_forgets: bool) -> None:
    """Both make another one, and what is left of the first is closed at once."""
    world = World()
    world.start(client)
    world.finish()
    for is_client in (True, False):
        world.meetings[0].leave(is_client)
    world.let_time_pass(1 if chooser_forgets else 0)  # the greater uid chooses
    world.start(client)
    world.finish()
    world.check_finished()
    assert world.meetings[1].core(True).index == 1  # type: ignore[union-attr]
    for node in world.nodes:
        node.made.numbers.close_old_fillers()
        assert len([core for core in node.made.cores if core.handle is not None]) <= 1 + chooser_forgets


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize("busy", [0, 1])
def test_raw_endpoints_by_the_thousand(client: int, busy: int) -> None:
    """One worker has opened them. The fillers of the other one are made a few at a time."""
    world = World()
    for _ in range(1500):
        world.nodes[busy].made.open(raw=True)
    world.start(client)
    world.finish()
    world.check_finished()
    assert not world.failed
    assert [len(node.made.cores) for node in world.nodes] == [1501, 1501]


def test_endpoint_without_error_handling_of_which_the_peer_has_not_heard() -> None:
    """The client must not adopt it as one that handles errors: UCX would destroy it."""
    world = World()
    for _ in range(2):
        world.start(1)
    for is_client in (False, True):
        for meeting in world.meetings:
            meeting.deliver(is_client)
    raw = world.nodes[0].made.open(error_handling=False, raw=True)  # takes the number of the first connection
    raw.asked_for = True
    for is_client in (False, True):
        world.meetings[1].deliver(is_client)
    world.finish()
    world.check_finished()
    assert not world.failed


def test_numbers_without_error_handling_that_are_heard_in_another_order() -> None:
    made = Made()
    made.numbers.heard(Numbers(2, True, (1,)))
    made.numbers.heard(Numbers(1, True))
    made.claim(2)
    assert [core.forcible for core in made.cores] == [True, False, True]


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize("fails", [True, False], ids=["client", "server"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "after DECLINE"])
def test_handshake_that_fails_while_its_endpoint_is_made(client: int, fails: bool, again: bool) -> None:
    """The worker is progressed then, and the peer may have sent something that it may not send."""
    world = World()
    if again:
        world.nodes[1 - client].made.open(raw=True)
    world.start(client)
    [meeting] = world.meetings
    end, made = meeting.ends[fails], world.nodes[client if fails else 1 - client].made
    error = ConnectionError("it sent something other than its greeting")
    made.meanwhile = lambda: end.fail(error) if len(made.cores) > again else None
    world.finish()
    assert end.opened.outcome is not None and end.opened.outcome.error is error  # type: ignore[union-attr]
    world.check_finished()


def test_client_that_takes_a_number_which_it_was_not_given() -> None:
    """It is refused before the server makes an endpoint, and the endpoint that it was offered is closed."""
    world = World()
    world.start(0)
    world.finish()
    for is_client in (True, False):
        world.meetings[0].leave(is_client)
    world.start(0)
    meeting = world.meetings[1]
    meeting.deliver(False)
    assert meeting.ends[False].chosen == 0, "the idle endpoint"
    client = meeting.exchanges[True]
    client._out.clear()
    client.take(1, Numbers(2))
    meeting.flush()
    meeting.deliver(False)
    assert meeting.given_up == {False}
    server = world.nodes[1].made
    assert len(server.cores) == 1 and server.cores[0].handle is None
    assert not server.numbers._offered and not server.numbers._chosen


@pytest.mark.parametrize("answer", ["decline", "assign"])
def test_server_of_our_own_worker_that_declines(answer: str) -> None:
    """A peer may claim that its worker is ours. Then there is nothing to decline, and no filler."""
    world = World()
    world.nodes[0] = world.nodes[1] = Node(1, 1)
    world.start(0)
    [meeting] = world.meetings
    for is_client in (False, True):
        meeting.deliver(is_client)
    server = meeting.exchanges[False]
    for number in (1, 0, 1):
        server.decline(Numbers(0)) if answer == "decline" else server.assign(number, Numbers(0))
        meeting.flush()
        meeting.deliver(True)
    assert True in meeting.given_up
    [core] = world.nodes[0].made.cores
    assert core.handle is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("client", [0, 1])
def test_many_connections_whose_choices_come_in_any_order(client: int) -> None:
    """More endpoints are missing than are made at a time."""
    for seed in range(5):
        chance = random.Random(seed)
        world = World()
        for _ in range(200):
            world.start(client)
        for is_client in (False, True):
            for meeting in world.meetings:
                meeting.deliver(is_client)
        while not all(meeting.is_quiet for meeting in world.meetings):
            chance.choice(world.meetings).deliver(chance.random() < 0.5)
        world.check_finished()
        assert not world.failed


def test_many_raw_endpoints_between() -> None:
    chance = random.Random(4)
    world = World()
    for _ in range(300):
        world.start(chance.randrange(2))
        for _ in range(chance.randrange(8)):
            world.nodes[chance.randrange(2)].made.open(error_handling=chance.random() < 0.5, raw=True)
            world.meetings[chance.randrange(len(world.meetings))].deliver(chance.random() < 0.5)
            world.check()
    world.finish()
    world.check_finished()
    assert not world.failed


@pytest.mark.parametrize("theirs", [Numbers(60_000), Numbers(LIMIT), Numbers(65535), Numbers(5000, True)])
def test_server_that_sends_false_numbers(theirs: Numbers) -> None:
    """A client that has to choose a number refuses at last."""
    world = World()
    world.start(1)
    [meeting] = world.meetings
    meeting.deliver(False)
    server = meeting.exchanges[False]
    facts = meeting.ends[False]._own_facts
    assert facts is not None
    meeting.under_way[True].clear()
    server._out.clear()
    server.welcome(facts, None, theirs)
    meeting.flush()
    meeting.deliver(True)
    assert meeting.given_up == {True}


# ---- real endpoints ----


async def test_fillers_are_closed_where_no_task_waits(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a connection that was given up may have nothing else to do."""
    monkeypatch.setattr(numbering_module, "FILLER_AGE", 0.1)
    async with open_two(transports) as two:
        one, other = sorted(two, key=lambda worker: worker.address.uid)  # the other order would adopt endpoints
        engine = one._engine
        core = connect_paired_for_real(engine, other.address, other.address.uid, 3, "a client")
        assert core is not None and len(engine.endpoints) == 4
        core.close()
        with trio.fail_after(15):
            while engine.endpoints:
                await trio.sleep(0.05)


async def test_fillers_of_raw_endpoints_are_closed(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does not grow with the raw endpoints that its clients have closed."""
    monkeypatch.setattr(numbering_module, "FILLER_AGE", 0.1)
    async with open_two(transports) as (one, other):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=other)
        theirs = other._engine.numbering.of(one.address.uid)
        async with listener:
            with trio.fail_after(30):
                for _ in range(10):
                    raw = await one.open_endpoint(other.address)
                    await raw.tag_send(b"x", 1)
                    async with trio_ucx.connect(listener.address, worker=one) as connection:
                        assert theirs._fillers
                        await raw.tag_send(pattern(10), 1)
                        await other.tag_receive(bytearray(1), 1)
                        await other.tag_receive(bytearray(10), 1)
                        connection.abort()
                    (await listener.accept()).abort()
                    raw.abort()
                assert len(theirs._fillers) >= 10
                async with trio_ucx.connect(listener.address, worker=one) as connection:
                    (await listener.accept()).abort()
                    connection.abort()
                while theirs._fillers:
                    await trio.sleep(0.05)


@pytest.mark.parametrize("below", [True, False], ids=["smaller uid", "greater uid"])
async def test_error_of_a_client_that_hears_nothing_over_ucx(
    transports: str, below: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, whether the client has its endpoint already or waits for the server's HELLO to adopt one."""
    monkeypatch.setattr(Handshake, "greet", lambda end: None)
    async with open_two(transports) as two:
        client, server = sorted(two, key=lambda worker: worker.address.uid, reverse=not below)
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=server)
        async with listener:
            with pytest.raises(TimeoutError, match="messages did not get through over UCX"):
                await trio_ucx.open_ucx_stream(*listener.address, worker=client, connect_timeout=2)


@pytest.mark.parametrize("below", [True, False], ids=["smaller uid", "greater uid"])
async def test_client_without_a_route_to_the_server(below: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side that adopts makes no endpoint, so UCX does not tell it: it asks the kernel."""
    monkeypatch.setattr(handshake_side, "has_route", lambda ip: False)
    async with open_two("tcp") as two:
        client, server = sorted(two, key=lambda worker: worker.address.uid, reverse=not below)
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=server)
        async with listener:
            with pytest.raises(OSError, match="UCX cannot connect to .*: No route to host .its UCX listens at"):
                await trio_ucx.open_ucx_stream(*listener.address, worker=client)


@asynccontextmanager
async def open_disturbed(
    transports: str, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[ucp.Worker, ucp.WorkerAddress], object]
) -> AsyncIterator[tuple[dict[ucp.Worker, ucp.Worker], list[trio_ucx.Listener]]]:
    """Two workers, each with a listener: of each worker the other one, and the listeners.

    Args:
        disturb: called once for each handshake, when the client has chosen the number and before the server has, with
            the server's worker and the client's address.
    """
    answer = Acceptor._answer
    disturbed: set[Handshake] = set()

    def disturbed_answer(acceptor: Acceptor, client: Any, handshake: Handshake, *rest: Any) -> None:
        if isinstance(rest[1], Taken) and handshake not in disturbed:
            disturbed.add(handshake)
            disturb(acceptor.worker, other_of[acceptor.worker].address)
        answer(acceptor, client, handshake, *rest)

    async with open_two(transports) as workers, AsyncExitStack() as stack:
        other_of = {workers[0]: workers[1], workers[1]: workers[0]}
        monkeypatch.setattr(Acceptor, "_answer", disturbed_answer)
        listeners = [(await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker))[0] for worker in workers]
        for listener in listeners:
            stack.push_async_callback(listener.aclose)
        yield other_of, listeners


async def test_raw_endpoint_that_takes_the_number(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """...after the client has chosen it, before the server has: they agree on another, and the raw endpoint works."""
    raw: list[ucp.Endpoint] = []

    def open_raw(server: ucp.Worker, client: ucp.WorkerAddress) -> None:
        raw.append(ucp.Endpoint._create(server, connect_worker(internals(server), client)))

    async with open_disturbed(transports, monkeypatch, open_raw) as (other_of, listeners):
        kept = []
        with trio.fail_after(30):
            for number in range(20):
                listener = listeners[number % 2]
                client = await trio_ucx.connect(listener.address, worker=other_of[listener.worker]).__aenter__()
                server = await listener.accept()
                kept += [(client, server), (server, client)]
                assert client.endpoint is not None and len(raw) == number + 1
            for one, other in kept:
                one.send_nowait(pattern(100_000))
                assert await other.receive() == pattern(100_000)
            for number, endpoint in enumerate(raw):
                buffer = bytearray(100_000)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(endpoint.tag_send, pattern(100_000, number), number)
                    await other_of[listeners[number % 2].worker].tag_receive(buffer, number)
                assert buffer == pattern(100_000, number)
        for connection, _ in kept:
            connection.abort()
        for endpoint in raw:
            endpoint.abort()


async def test_endpoint_without_error_handling_that_takes_the_number(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX does not pair it with an endpoint that handles errors: at worst this attempt to connect fails."""
    disturbing = True

    def open_plain(server: ucp.Worker, client: ucp.WorkerAddress) -> None:
        nonlocal disturbing
        if disturbing:
            disturbing = False
            stack.callback(connect_worker(internals(server), client, WITHOUT_ERROR_HANDLING).close)

    async with (
        open_disturbed(transports, monkeypatch, open_plain) as (other_of, listeners),
        AsyncExitStack() as stack,
    ):
        for number in range(6):
            listener = listeners[number % 2]
            client_worker = other_of[listener.worker]
            disturbing = True
            with suppress(OSError):
                stack.callback(
                    (await trio_ucx.open_ucx_stream(*listener.address, worker=client_worker, connect_timeout=2)).abort
                )
                stack.callback((await listener.accept()).abort)
            assert not disturbing
            async with trio_ucx.connect(listener.address, worker=client_worker) as client:
                async with await listener.accept() as server:
                    client.send_nowait(pattern(100_000))
                    assert await server.receive() == pattern(100_000)


async def test_the_endpoint_beside_a_connection_has_no_number(transports: str) -> None:
    """UCX does not compare it with what the peer's UCX says: it is paired with none of the peer's."""
    async with open_two(transports) as workers:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=workers[0])
        async with listener, trio_ucx.connect(listener.address, worker=workers[1]) as client, await listener.accept():
            core = internals(client).core
            assert core.peer_address is not None
            numbers = core.engine.numbering.of(core.peer_address.uid)
            before = numbers.numbers()
            beside = connect_for_memory(core)
            assert numbers.numbers() == before
            beside.close()
            client.send_nowait(b"the connection goes on")


async def test_aborting_one_disturbs_no_other(transports: str) -> None:
    """Connections between the same two workers, in both directions, with raw endpoints opened in between.

    Each carries large messages, which are answered by the endpoint that UCX pairs with their sender's; half of them are
    aborted in the middle of one.
    """
    count, size = 150, 70_000
    chance = random.Random(7)
    async with open_two(transports) as workers:
        listeners = [(await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker))[0] for worker in workers]
        raw: list[ucp.Endpoint] = []
        async with trio.open_nursery() as servers:

            async def echo(connection: trio_ucx.Connection) -> None:
                try:
                    async for message in connection.messages():
                        await connection.send(message)
                    await connection.aclose()
                except trio.BrokenResourceError:
                    connection.abort()

            for listener in listeners:
                servers.start_soon(trio.serve_listeners, echo, [listener])

            async def honest(number: int, seed: int) -> None:
                async with trio_ucx.connect(listeners[number].address, worker=workers[1 - number]) as connection:
                    for each in range(3):
                        await connection.send(pattern(size, seed + each))
                        assert await connection.receive() == pattern(size, seed + each)

            async def aborted(number: int, seed: int) -> None:
                connection = await trio_ucx.connect(listeners[number].address, worker=workers[1 - number]).__aenter__()
                await connection.send(pattern(size, seed))
                await trio.sleep(random.Random(seed).random() * 0.003)
                connection.abort()

            async def interlude(number: int, *modes: ucp.ErrorMode) -> None:
                """Raw endpoints in one direction."""
                for mode in modes:
                    endpoint = await workers[number].open_endpoint(workers[1 - number].address, error_mode=mode)
                    raw.append(endpoint)
                    await endpoint.flush()

            with trio.fail_after(50):
                async with trio.open_nursery() as clients:
                    limiter = trio.Semaphore(8)

                    async def one(what: Any, number: int, seed: int) -> None:
                        try:
                            await what(number, seed)
                        finally:
                            limiter.release()

                    for seed in range(count):
                        await limiter.acquire()
                        clients.start_soon(one, chance.choice([honest, aborted]), chance.randrange(2), seed)
                        if seed % 10 == 5:
                            await interlude(chance.randrange(2), ucp.ErrorMode.PEER)
                        if seed % 30 == 15:
                            # An endpoint without error handling disturbs a connection that is just being opened.
                            for _ in range(8):
                                await limiter.acquire()
                            await honest(0, seed)  # brings both sides to the same number
                            await interlude(chance.randrange(2), ucp.ErrorMode.PEER, ucp.ErrorMode.NONE)
                            for _ in range(8):
                                limiter.release()
            servers.cancel_scope.cancel()
        for endpoint in raw:
            endpoint.abort()
