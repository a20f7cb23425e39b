"""A peer's process is killed, stopped, ends, or has a handler that raises, while both sides are at work.

The cases are a table: what both sides do (``peer_loads.py``), the fault, the transports, and how the two have met. The
fault comes at a random moment; ``--seed`` repeats a run, up to the machine's own timing. Besides, another peer of the
same worker answers pings. ``pytest --full -n 0 tests/faults/test_peer_faults.py`` runs all cases, those in which the
peer ends three times, and prints the figures of ``reliability.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import pytest
import trio
from helpers import TRANSPORTS, Peer, Rounds, open_raw_endpoint, until
from timing import PROMPT, Noise, check_prompt, waited_by

import trio_ucx
from trio_ucx import ucp
from trio_ucx.ucp._engine import draining

from .faulty_peer import Forks
from .peer_loads import (
    AM_ID,
    CHAIN_COUNTER,
    COUNTER,
    FEATURES,
    LOADS,
    PEER,
    TEST,
    TO_CLOSE,
    Board,
    Ends,
    Task,
    lend,
    waiting,
)

#: How the two meet: the test connects, the test accepts, or both open raw endpoints by worker address.
OPENINGS = ["connect", "accept", "address"]
#: Seconds within which every waiting task is told: networks.md.
TOLD = 1.0
#: The same, when the kill has stopped a queue in shared memory: ucx-limits.md.
TOLD_OF_QUEUE = 3.0
#: What pings take at most. The documents have no figure: as soon as a lost peer is noticed.
PING = 1.0
#: Seconds for which a peer is stopped before it goes on.
STOPPED = 5.0
#: Seconds that the graceful close to a stopped peer may take.
CLOSE_TIMEOUT = 1.0
#: Seconds that closing a worker may take: design.md, "Of a worker", has 2. (A raw endpoint whose close was
#: cancelled adds its 10.)
CLOSED = 4.0
NS = 1_000_000_000


# ---- figures ----


@attrs.define(eq=False)
class Figures:
    """What was measured, by transports and fault; in seconds."""

    told: dict[tuple[str, str], list[float]] = attrs.field(factory=dict)
    pings: dict[tuple[str, str], list[float]] = attrs.field(factory=dict)
    runs: dict[tuple[str, str], int] = attrs.field(factory=dict)
    queues: dict[tuple[str, str], int] = attrs.field(factory=dict)
    #: How long it took to abort the connection and close the worker.
    ends: dict[tuple[str, str], list[float]] = attrs.field(factory=dict)
    #: Workers that could not be destroyed.
    left_alone: int = 0
    #: Peers that held up the queue of a worker while they were stopped.
    held_up: int = 0

    def add(self, transports: str, fault: str, told: list[float], pings: list[float], queues: int) -> None:
        key = (transports, fault)
        self.told.setdefault(key, []).extend(told)
        self.pings.setdefault(key, []).extend(pings)
        self.runs[key] = self.runs.get(key, 0) + 1
        self.queues[key] = self.queues.get(key, 0) + queues

    def lines(self) -> Iterator[str]:
        for key, runs in sorted(self.runs.items()):
            transports, fault = key
            yield (
                f"{transports}, {fault}: {runs} runs, {self.queues[key]} queues stopped; "
                f"told: {spread(self.told[key])}; pings: {spread(self.pings[key])}; "
                f"worker closed: {spread(self.ends.get(key, []))}"
            )
        yield f"workers that were left alone: {self.left_alone}; queues that were held up: {self.held_up}"


def spread(values: list[float]) -> str:
    if not values:
        return "none"
    ordered = sorted(1000 * value for value in values)
    high = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"median {median(ordered):.1f} ms, p99 {high:.1f} ms, at most {ordered[-1]:.1f} ms of {len(ordered)}"


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    figures = Figures()
    yield figures
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if reporter is not None and capture is not None:  # not in a process of pytest-xdist's
        with capture.global_and_fixture_disabled():
            reporter.write_line("")
            for line in figures.lines():
                reporter.write_line(line)


# ---- what is there before and after ----


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def healthy(forks: Forks) -> Iterator[dict[str, tuple[str, int]]]:
    """Addresses of servers that send everything back, for each transport."""
    channels = []
    addresses = {}
    for transports in TRANSPORTS:
        _, channel = forks.fork("echo", transports, [0])
        channels.append(channel)
        with channel.makefile() as lines:
            host, port = json.loads(lines.readline())[0]
        addresses[transports] = (host, port)
        trio.run(open_and_close, transports)  # what stays open for good, it opens before anything is counted
    yield addresses
    for channel in channels:
        channel.close()


async def open_and_close(transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}, features=FEATURES):
        pass


def segments(pids: set[int]) -> frozenset[int]:
    """The SysV segments that these processes have made and somebody has written to."""
    names, *rows = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines())
    found = [dict(zip(names, map(int, row), strict=True)) for row in rows]
    return frozenset(one["shmid"] for one in found if one["cpid"] in pids and one["rss"] + one["swap"])


@attrs.frozen
class Held:
    """What this process holds, and the shared memory of the peer."""

    descriptors: int
    threads: int
    segments: frozenset[int]

    @classmethod
    def now(cls, *peers: int) -> Held:
        threads = 0
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                threads += not path.read_text().startswith("Trio")  # Trio keeps its threads for a moment
        return cls(len(os.listdir("/proc/self/fd")), threads, segments({os.getpid(), *peers}))


async def assert_nothing_left(before: Held, peer: int) -> None:
    """Once everything is closed and the peer is gone."""

    def gone() -> bool:
        now = Held.now(peer)
        return (
            now.descriptors <= before.descriptors and now.threads <= before.threads and now.segments <= before.segments
        )

    try:
        await until(gone)
    except trio.TooSlowError:
        links = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # that of iterdir
                links.append(os.readlink(path))
        raise AssertionError(f"left: {Held.now(peer)}, were {before}; {links}") from None


# ---- another peer of the same worker ----


@attrs.define(eq=False)
class Pings:
    """Round trips with a healthy peer, over the worker that has the other connection."""

    worker: ucp.Worker
    address: tuple[str, int]
    took: list[float] = attrs.field(factory=list)
    #: When the latest ping that has come back was sent.
    latest: float = 0
    broken: int = 0

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        while True:
            connection = await trio_ucx.open_ucx_stream(*self.address, worker=self.worker)
            try:
                while True:
                    start = time.monotonic()
                    await connection.send(b"well?")
                    assert await connection.receive() == b"well?"
                    self.took.append(time.monotonic() - start)
                    self.latest = start
                    if len(self.took) == 1:
                        task_status.started()
                    await trio.sleep(0.005)
            except trio.BrokenResourceError:
                if not self.worker.statistics().stopped_queues:
                    raise
                self.broken += 1
            finally:
                connection.abort()

    async def go_on(self, *, within: float = 60) -> None:
        """Waits for a ping that is sent from now on."""
        now = time.monotonic()
        await until(lambda: self.latest >= now, within=within)


@asynccontextmanager
async def pinging(worker: ucp.Worker, address: tuple[str, int]) -> AsyncIterator[Pings]:
    pings = Pings(worker, address)
    async with trio.open_nursery() as nursery:
        await nursery.start(pings.run)
        yield pings
        nursery.cancel_scope.cancel()


# ---- one case ----


@attrs.frozen
class Case:
    load: str
    fault: str
    transports: str
    opening: str

    def __str__(self) -> str:
        medium = "shared memory" if "sm" in self.transports else "tcp"
        return f"{self.load}-{self.fault}-{medium}-{self.opening}"


@attrs.define(eq=False)
class Trial:
    """One run of a case, up to the moment at which the fault has come."""

    case: Case
    chance: random.Random
    worker: ucp.Worker
    peer: Peer
    board: Board
    memory: ucp.Memory | None
    queue: ucp.ActiveMessages
    pings: Pings
    noise: Noise
    nursery: trio.Nursery
    ends: Ends | None = None
    listener: trio_ucx.Listener | None = None
    #: Where the peer is, and the descriptor of its memory.
    target: Any = None
    descriptor: bytes = b""
    tasks: list[Task] = attrs.field(factory=list)
    #: When the fault came: of time.monotonic_ns and of time.perf_counter.
    at: int = 0
    at_counter: float = 0
    #: When opening the connection began, and when it has failed.
    met_from: int = 0
    refused_at: int = 0
    close_timeout: float = 10
    closes_in_background: bool = False
    #: The peer was stopped in the middle of writing to our queue in shared memory, which then serves nobody.
    held_up: bool = False

    async def open(self, fault: tuple[str, float] | None = None) -> None:
        """Tells the peer to open its end; the fault is one of the peer's own, after so many seconds."""
        worker_address, descriptor, address = await self.peer.hear()
        if self.case.opening == "accept":
            [self.listener] = await trio_ucx.open_ucx_listeners(
                0, host="127.0.0.1", worker=self.worker, close_timeout=self.close_timeout
            )
        await self.peer.tell(
            {
                "worker": bytes(self.worker.address).hex() if self.case.opening == "address" else "",
                "descriptor": self.memory.descriptor.hex() if self.memory else "",
                "address": self.listener and self.listener.address,
                "fault": fault,
            }
        )
        self.target = address if address is not None else ucp.WorkerAddress(bytes.fromhex(worker_address))
        self.descriptor = bytes.fromhex(descriptor)

    async def meet(self, timeout: float = 10) -> None:
        """Opens our end."""
        connection = None
        self.met_from = time.monotonic_ns()
        if self.case.opening == "connect":
            connection = await trio_ucx.open_ucx_stream(
                *self.target, worker=self.worker, close_timeout=self.close_timeout, connect_timeout=timeout
            )
        elif self.listener is not None:
            connection = await self.listener.accept()
        if connection is not None:
            endpoint = connection.endpoint
        else:
            self.worker.tag_probe(0)  # or it would drop raw messages: ucp.md
            endpoint = await open_raw_endpoint(self.worker, self.target)
        self.ends = Ends(TEST, self.board, self.worker, endpoint, connection, None, self.queue)
        if self.descriptor:
            self.ends.remote = endpoint.attach(self.descriptor)

    def start(self) -> None:
        assert self.ends is not None
        self.tasks += [*LOADS[self.case.load].test(), *waiting(self.ends, self.case.load)]
        for task in self.tasks:
            self.nursery.start_soon(self.run, task)

    async def run(self, task: Task) -> None:
        try:
            with task.scope:
                await task.run(self.ends, task)  # type: ignore[arg-type]
                task.outcome = "done"
            if task.outcome is None:
                task.outcome = "cancelled"
        except Exception as error:
            task.outcome = error
        task.ended_at = time.monotonic_ns()

    # ---- the fault ----

    async def strike(self, number: signal.Signals, delay: float) -> None:
        """Sends the peer a signal, from a thread: at any moment of this process's."""

        def later() -> None:
            time.sleep(delay)
            self.at, self.at_counter = time.monotonic_ns(), time.perf_counter()
            self.peer.signal(number)

        await trio.to_thread.run_sync(later)

    def note_moment(self) -> None:
        """The peer has noted when it ended."""
        self.at = self.board[PEER, "ended_at"]
        assert self.at
        self.at_counter = time.perf_counter() - (time.monotonic_ns() - self.at) / NS

    async def others_go_on(self, figures: Figures) -> None:
        """While the peer is stopped: pings come back, unless its stop holds up our queue in shared memory."""
        if self.case.transports == "tcp":
            await self.pings.go_on()
            return
        try:
            await self.pings.go_on(within=TOLD_OF_QUEUE + PING)
        except trio.TooSlowError:
            self.held_up = True
            figures.held_up += 1

    # ---- afterwards ----

    def note(self, figures: Figures, told: list[float]) -> None:
        queues = self.worker.statistics().stopped_queues
        took = self.pings.took
        if not queues and not self.held_up:
            assert max(took) < PING + self.noise.since(0, time.perf_counter()), f"a ping took {max(took):.3f} s"
        figures.add(self.case.transports, self.case.fault, told, took, queues)

    def late(self, seconds: float, bound: float, what: str) -> None:
        """Asserts that it took no longer than the bound, and the noise of the machine."""
        if seconds < bound:
            return
        noise = self.noise.since(self.at_counter, time.perf_counter())
        assert seconds < bound + noise, f"{what}: {seconds:.3f} s, allowed are {bound:.1f} s and {noise:.3f} s of noise"

    async def all_told(self) -> list[float]:
        """Waits until every task has ended that waits for the peer. Returns how long each took since the fault."""
        assert self.ends is not None
        self.ends.lost = True
        with contextlib.suppress(trio.TooSlowError):
            await until(lambda: all(task.outcome is not None or not task.attached for task in self.tasks))
        untold = [task.name for task in self.tasks if task.outcome is None and task.attached]
        assert not untold, f"never told: {untold}; {trio_ucx.report()}"
        bound = TOLD
        if self.worker.statistics().stopped_queues:
            bound = TOLD_OF_QUEUE
        told = []
        for task in self.tasks:
            if task.outcome is None:
                await self.cancelled(task)
                continue
            if task.ended_at > self.at:
                told.append((task.ended_at - self.at) / NS)
                self.late(told[-1], bound, f"{task.name} was told after")
            if isinstance(task.outcome, BaseException):
                assert self.may_end(task), f"{task.name}: {task.outcome!r}"
                self.check_cause(task)
        return told

    def may_end(self, task: Task) -> bool:
        """True if this is how a task may end. A peer that raises closes its memory first."""
        error = task.outcome
        closed = isinstance(error, trio_ucx.UCXError) and error.status is ucp.Status.NO_ELEM
        return isinstance(error, task.expects) or (closed and LOADS[self.case.load].memory)

    def check_cause(self, task: Task) -> None:
        """What broke a connection is named, unless the peer has closed it gracefully."""
        error = task.outcome
        if isinstance(error, trio.BrokenResourceError) and not (LOADS[self.case.load].alone and not error.__cause__):
            assert isinstance(error.__cause__, trio_ucx.UCXError), f"{task.name}: {error!r} from {error.__cause__!r}"

    async def cancelled(self, task: Task) -> None:
        start, counter = time.monotonic(), time.perf_counter()
        task.scope.cancel()
        await until(lambda: task.outcome is not None)
        took = time.monotonic() - start
        noise = self.noise.since(counter, time.perf_counter())
        assert took < PROMPT + noise, f"{task.name} was cancelled, and returned after {took:.3f} s"
        if isinstance(task.outcome, BaseException):
            assert self.may_end(task), f"{task.name}: {task.outcome!r}"

    def check_data(self) -> None:
        """Nothing torn, nothing lost that was known to have arrived, nothing done twice."""
        board = self.board
        assert not board.complaint, board.complaint
        for offset, done, begun in ((COUNTER, "counted", "count_begun"), (CHAIN_COUNTER, "chained", "chain_begun")):
            if self.memory is None:
                break
            ours = int.from_bytes(self.memory.memoryview[offset : offset + 8], "little")
            low, high = board[PEER, done], board[PEER, begun]
            assert low <= ours <= high, f"the counter is {ours}; {low} were acknowledged and {high} begun"
        assert board[TEST, "received"] <= board[PEER, "begun"]
        if "64 MiB from" in self.case.load:  # a send of a rendezvous returns when it was fetched
            assert board[TEST, "received"] >= board[PEER, "done"]
        if board[PEER, "closed"] and self.ends is not None and self.ends.connection is not None:
            # The close was acknowledged: everything has arrived.
            assert board[TEST, "received"] == board[PEER, "done"] or board[TEST, "begun"], self.tasks


@asynccontextmanager
async def open_trial(
    case: Case,
    chance: random.Random,
    forks: Forks,
    healthy: dict[str, tuple[str, int]],
    figures: Figures,
    folder: Path,
) -> AsyncIterator[Trial]:
    before, left_alone = Held.now(), len(draining.left_alone)
    kind = chance.choice(["allocated", "registered"]) if LOADS[case.load].memory else None
    board = Board.make(folder / "board")
    life = {
        "load": case.load,
        "opening": case.opening,
        "transports": case.transports,
        "board": str(folder / "board"),
        "memory": kind,
        "close_timeout": 10,
    }
    ending: list[float] = []

    def note_end() -> None:
        """The worker was closed, and the peer that has stopped is still there."""
        if ending:
            figures.ends.setdefault((case.transports, case.fault), []).append(time.monotonic() - ending[0])

    async with AsyncExitStack() as outer:
        outer.callback(board.close)
        async with AsyncExitStack() as stack:
            peer = await stack.enter_async_context(forks.open_peer(**life))
            noise = outer.enter_context(Noise(waited_by(peer.process.pid)))
            context = stack.enter_context(ucp.open_context({"TLS": case.transports}, features=FEATURES))
            memory = stack.enter_context(lend(context, kind)) if kind else None
            stack.callback(note_end)
            worker = await stack.enter_async_context(ucp.open_worker(context=context))
            queue = stack.enter_context(worker.open_active_messages(AM_ID, max_bytes=2**28))
            pings = await stack.enter_async_context(pinging(worker, healthy[case.transports]))
            nursery = await stack.enter_async_context(trio.open_nursery())
            trial = Trial(case, chance, worker, peer, board, memory, queue, pings, noise, nursery)
            try:
                yield trial
            finally:
                ending.append(time.monotonic())
                if trial.ends is not None:
                    trial.ends.abort()
                if trial.listener is not None:
                    await trial.listener.aclose()
                nursery.cancel_scope.cancel()
        now, took = time.perf_counter(), time.monotonic() - ending[0]
        check_prompt(took, CLOSED + 10 * trial.closes_in_background, noise.since(now - took, now))  # closing the worker
    if len(draining.left_alone) > left_alone:
        # reliability.md, "Known limits": UCX cannot say whether the queue holds answers of the worker's.
        assert kind is not None and case.transports != "tcp"
        figures.left_alone += 1
    else:
        await assert_nothing_left(before, peer.process.pid)


async def hear(peer: Peer, line: str) -> None:
    """Waits until the peer has said so, whatever it says before."""
    while await peer.hear() != line:
        pass


async def begin(
    trial: Trial, fault: Callable[[], Any], timeout: float = 10, own: tuple[str, float] | None = None
) -> bool:
    """Both sides open their ends and begin to work; the fault comes meanwhile or afterwards. Whether we have met."""
    load = LOADS[trial.case.load]
    if load.at != "hello":
        await trial.open()
        await trial.meet()
        await hear(trial.peer, "runs")
        trial.start()
        await fault()
        return True
    await trial.open(own)
    met = trio.Event()
    refused: list[BaseException] = []

    async def meet() -> None:
        try:
            with accepting:
                await trial.meet(timeout)
                met.set()
                trial.start()
        except (OSError, trio.BrokenResourceError) as error:
            refused.append(error)
            trial.refused_at = time.monotonic_ns()

    accepting = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meet)
        await fault()
        if trial.listener is not None and trial.case.fault in ENDING:
            await until(lambda: not trial.listener.statistics().handshaking)
            trial.late((time.monotonic_ns() - trial.at) / NS, TOLD_OF_QUEUE, "the listener was told after")
            if not trial.listener.statistics().waiting and not met.is_set():
                accepting.cancel()  # the client was turned away
        elif trial.case.fault == "stopped for good" and trial.listener is not None:
            await trio.sleep(timeout)
            accepting.cancel()
    return trial.ends is not None and not refused


ENDING = ["kill", "exit", "raise"]


async def peer_ends(trial: Trial, figures: Figures) -> None:
    case, peer = trial.case, trial.peer
    load = LOADS[case.load]
    hello = load.at == "hello"
    delay = trial.chance.uniform(0, load.span)

    async def fault() -> None:
        if case.fault == "kill":
            await trial.strike(signal.SIGKILL, delay)
            return
        if not hello:
            await peer.tell(["fault", case.fault, delay])
        if case.fault == "raise":
            await hear(peer, "raised")
        else:
            await peer.ended()
        trial.note_moment()

    told = []
    if await begin(trial, fault, own=(case.fault, delay) if hello and case.fault == "exit" else None):
        told = await trial.all_told()
    elif trial.refused_at:
        told = [max(0.0, (trial.refused_at - trial.at) / NS)]
        trial.late(told[0], TOLD, "connecting failed after")
    if trial.listener is not None:
        await assert_accepts(trial)
    if case.fault != "raise":
        status = await peer.ended()
        assert status == (-signal.SIGKILL if case.fault == "kill" else 0), f"the peer crashed: {status}"
    trial.check_data()
    await trial.pings.go_on()
    trial.note(figures, told)


async def assert_accepts(trial: Trial) -> None:
    """The listener goes on; once a queue has stopped, with another worker."""
    assert trial.listener is not None
    with trio.fail_after(60):
        while True:
            try:
                await assert_accepts_now(trial.listener, trial.worker)
                return
            except (OSError, trio.BrokenResourceError):
                if not trial.worker.statistics().stopped_queues:
                    raise


async def assert_accepts_now(listener: trio_ucx.Listener, worker: ucp.Worker) -> None:
    client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
    try:
        await client.send(b"here I am", tag=50)
        while True:
            server = await listener.accept()
            try:
                assert await server.receive(tag=50) == b"here I am"
                return
            except (trio.BrokenResourceError, trio.EndOfChannel):
                if client.peer_state is not trio_ucx.PeerState.OPEN:
                    raise
            finally:
                server.abort()
    finally:
        client.abort()


async def peer_stops_and_continues(trial: Trial, figures: Figures) -> None:
    load = LOADS[trial.case.load]

    async def fault() -> None:
        await trial.strike(signal.SIGSTOP, trial.chance.uniform(0, load.span))
        await trio.sleep(STOPPED)
        wrong = [task for task in trial.tasks if task.outcome is not None and not ended_well(trial, task)]
        assert not wrong, f"the peer was only stopped: {wrong}"
        await trial.others_go_on(figures)
        trial.peer.resume()
        await trial.pings.go_on()

    assert await begin(trial, fault)
    ends, board, peer = trial.ends, trial.board, trial.peer
    assert ends is not None
    with trio.fail_after(100):
        if not load.alone:
            await assert_goes_on(trial)
            ends.ending = True
            await peer.tell("finish")
        mine = trial.tasks[: len(load.test())]
        await until(lambda: all(task.outcome is not None or (load.alone and not task.attached) for task in mine))
        await hear(peer, "finished") if not load.alone or ends.connection is not None else None
        for task in trial.tasks:
            if task.outcome is None:
                await trial.cancelled(task)
        for task in trial.tasks:
            assert ended_well(trial, task), f"{task.name}: {task.outcome!r}"
        trial.check_data()
        if not load.alone:
            for side in (TEST, PEER):
                assert board[side, "received"] == (board[1 - side, "done"] if has_messages(trial) else 0)
            await peer.tell("close")
            await ends.aclose()
            await hear(peer, "closed")
    trial.note(figures, [])


def ended_well(trial: Trial, task: Task) -> bool:
    """Whether a task finished its work, or could not because one side has closed."""
    if task.outcome in ("done", "cancelled"):
        return True
    ends: tuple[type[Exception], ...] = (trio.ClosedResourceError, trio.EndOfChannel)
    # A side that closes does so when it has sent these messages, and ends what it still receives, too.
    if TO_CLOSE in (trial.board[PEER, "done"], trial.board[TEST, "done"]):
        ends += (trio.BrokenResourceError,)
    return LOADS[trial.case.load].alone and isinstance(task.outcome, ends)


def has_messages(trial: Trial) -> bool:
    return not LOADS[trial.case.load].memory


async def assert_goes_on(trial: Trial) -> None:
    """Both sides have done more than when the peer was stopped."""
    board = trial.board
    names = ("done", "received", "counted", "chained")

    def done() -> list[int]:
        return [sum(board[side, name] for name in names) for side in (TEST, PEER)]

    before = done()
    both = [True, True] if "'s" not in trial.case.load else ["test" in trial.case.load, "peer's" in trial.case.load]

    def moved() -> bool:
        return all(now > then + 1 or not works for now, then, works in zip(done(), before, both, strict=True))

    await until(moved)


async def peer_stops_for_good(trial: Trial, figures: Figures) -> None:
    load = LOADS[trial.case.load]
    trial.close_timeout = CLOSE_TIMEOUT

    async def fault() -> None:
        await trial.strike(signal.SIGSTOP, trial.chance.uniform(0, load.span))

    await begin(trial, fault, timeout=CLOSE_TIMEOUT)
    if trial.refused_at:
        trial.late((trial.refused_at - trial.met_from) / NS, CLOSE_TIMEOUT + 0.5, "connecting took")
    await trio.sleep(1.5)
    for task in trial.tasks:
        # A graceful close gives up. Nothing else notices a peer that has stopped.
        assert not isinstance(task.outcome, BaseException) or load.alone, f"{task.name}: {task.outcome!r}"
    for task in trial.tasks:
        if task.outcome is None:
            await trial.cancelled(task)
    await trial.others_go_on(figures)
    if trial.ends is not None and trial.ends.connection is not None:
        trial.at_counter = time.perf_counter()
        try:
            await trial.ends.aclose()
        except trio.BrokenResourceError:
            pass
        trial.late(time.perf_counter() - trial.at_counter, CLOSE_TIMEOUT + 0.3, "the close took")
    elif trial.ends is not None and trial.chance.random() < 0.3:
        trial.closes_in_background = True
        with trio.move_on_after(0.5) as waiting:
            await trial.ends.aclose()
        if waiting.cancelled_caught:
            assert trio.current_time() - waiting.deadline < PROMPT + trial.noise.since(0, time.perf_counter())
    if trial.held_up:
        trial.peer.signal(signal.SIGKILL)  # then the queue is known to have stopped
    await trial.pings.go_on()
    trial.note(figures, [])


# ---- the tests ----

pytestmark = pytest.mark.filterwarnings("ignore:a UCX worker was left alone:ResourceWarning")


def cases(*faults: str) -> list[Any]:
    table = [
        Case(load, fault, transports, opening)
        for load in LOADS
        for fault in faults
        for transports in TRANSPORTS
        for opening in OPENINGS
        # What raises is a handler: it runs once the connection is open, until it is closed.
        if fault != "raise" or not (LOADS[load].alone or LOADS[load].at == "hello")
    ]
    return [pytest.param(case, id=str(case)) for case in table]


Flow = Callable[[Trial, Figures], Any]


@pytest.fixture
def repeat(
    request: pytest.FixtureRequest,
    forks: Forks,
    healthy: dict[str, tuple[str, int]],
    figures: Figures,
    tmp_path: Path,
) -> Callable[[Case, Flow, int], Any]:
    """Runs a case so many times, with different moments of its fault."""

    async def run(case: Case, flow: Flow, times: int) -> None:
        for number in range(times):
            seed = f"{request.config.option.seed} {case} {number}"
            try:
                with trio.fail_after(200):
                    async with open_trial(case, random.Random(seed), forks, healthy, figures, tmp_path) as trial:
                        await flow(trial, figures)
            except BaseException as error:
                error.add_note(f"--seed {request.config.option.seed}, round {number} of {case}")
                raise

    return run


@pytest.mark.cut_off
@pytest.mark.sample(12)
@pytest.mark.parametrize("case", cases(*ENDING))
async def test_peer_ends(case: Case, repeat: Any, rounds: Rounds) -> None:
    await repeat(case, peer_ends, rounds(1, 3))


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", cases("stopped for 5 s"))
async def test_peer_stops_and_continues(case: Case, repeat: Any) -> None:
    await repeat(case, peer_stops_and_continues, 1)


@pytest.mark.cut_off
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", cases("stopped for good"))
async def test_peer_stops_for_good(case: Case, repeat: Any) -> None:
    await repeat(case, peer_stops_for_good, 1)
