"""Reads the logs of a soak for violations of what the library promises. It does no I/O: :class:`Checker` is fed events.

A bound does not count the time in which a process could not run: while the injector had stopped it, while it was ready
and had no processor, and while the whole machine stood still (the last two are ``starved``).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

import attrs

from .log import Event
from .payload import Address, is_short

SECOND = 1_000_000_000
#: Nanoseconds within which a blocked operation ends after the process that blocked it goes on.
RESUMED = SECOND // 4
#: Exit status of a client that ended by ``os._exit``, as planned: ``workload.EXIT``.
EXIT = 3


@attrs.frozen
class Bounds:
    """Seconds. Where each comes from:

    Attributes:
        reported: networks.md: "trio_ucx notices at once that the peer's process has ended, on every
            transport"; ``tests/test_peer_loss_detection.py`` takes a second for "at once". An abort comes over the same
            socket.
        queue: ucx-limits.md: a stopped queue is noticed "within about two seconds".
            It takes the place of ``reported`` when the worker counted a stopped queue.
        cancelled: cancellation.md: "returns promptly". The tests allow 0.1 s and
            the noise that they measure (``tests/timing.py``); here the noise is not measured.
        ping: the documents have no figure. It is as soon as a lost peer is noticed; the percentiles are reported.
        stall: the documents have no figure for one operation either: both sides keep sending and receiving, so each
            must end. It is what the workload gives up after, less the time that a fault may take.
        close: options.md: ``close_timeout``, 10 seconds, and a second of margin.
        connect: the same: ``connect_timeout``, 10 seconds, and the workload's greeting.
        start: no document has a figure: what a server may take until it listens.
    """

    reported: float = 1.0
    queue: float = 3.0
    cancelled: float = 1.0
    ping: float = 1.0
    stall: float = 3.0
    close: float = 11.0
    connect: float = 14.0
    start: float = 5.0


@attrs.frozen
class Violation:
    """A promise was not kept.

    Attributes:
        kind: a word or two, by which violations are counted.
        sentence: what happened.
        lines: the lines of the logs that show it.
    """

    kind: str
    sentence: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.sentence}", *(line[:600] for line in self.lines)])


@attrs.define(eq=False)
class Process:
    pid: int
    role: str = "?"
    name: str = "?"
    started: int = 0
    shares_memory: bool = False
    #: The event that ended the process: a kill, os._exit, that it hung, or its exit.
    gone: Event | None = None
    #: What may have ended it: a process can be killed while it ends itself.
    ended_by: list[Event] = attrs.field(factory=list)
    exited: Event | None = None
    finish: Event | None = None
    stops: list[tuple[int, int]] = attrs.field(factory=list)
    stopped: int | None = None
    #: (time, ns for which it was starved of a processor until then).
    starved: list[tuple[int, int]] = attrs.field(factory=list)
    #: Times at which the worker's figure of stopped queues had risen.
    stopped_queues: list[int] = attrs.field(factory=list)
    samples: list[tuple[int, int, int, int, int]] = attrs.field(factory=list)
    connections: int = 0
    operations: dict[int, Operation] = attrs.field(factory=dict)
    queues_seen: int = 0

    def excused(self, begin: int, end: int) -> int:
        """Nanoseconds between two times in which the machine did not let it run; rather too many than too few."""
        samples = [(0, 0), *self.starved]
        before, starved_before = max(sample for sample in samples if sample[0] <= begin)
        after, starved_after = min((sample for sample in samples if sample[0] >= end), default=samples[-1])
        # A process that is stopped notes that as starved, too.
        starved = starved_after - starved_before - self._stopped_between(before, after)
        return self._stopped_between(begin, end) + max(0, starved)

    def _stopped_between(self, begin: int, end: int) -> int:
        stops = [*self.stops, *([(self.stopped, end)] if self.stopped is not None else [])]
        return sum(max(0, min(end, b) - max(begin, a)) for a, b in stops)

    def stopped_until(self, end: int) -> int | None:
        """Returns since when it was stopped, if it was continued a moment before this time; else None."""
        return next((a for a, b in self.stops if b - RESUMED // 10 <= end <= b + RESUMED), None)

    def was_stopped(self, begin: int) -> bool:
        return self.stopped is not None or any(b >= begin for _, b in self.stops[-3:])

    def queue_stopped(self, begin: int, end: int) -> bool:
        return any(begin - 3 * SECOND <= at <= end + 3 * SECOND for at in self.stopped_queues)


@attrs.define(eq=False)
class Operation:
    begin: Event
    connection: Connection
    side: Side

    @property
    def kind(self) -> str:
        return str(self.begin["k"])


@attrs.define(eq=False)
class Side:
    pid: int
    ending: Event | None = None
    over: Event | None = None
    closed: Event | None = None  # aclose has returned without an error


@attrs.define(eq=False)
class Sent:
    begin: Event
    outcome: str = "flight"


@attrs.define(eq=False)
class Queue:
    """One direction of a tag queue, or of the active messages of a connection."""

    sent: dict[int, Sent] = attrs.field(factory=dict)
    last: int = 0
    recent: deque[tuple[int, Sent, Event]] = attrs.field(factory=lambda: deque(maxlen=300))
    #: A violation was found here: what follows is not checked.
    faulty: bool = False


@attrs.define(eq=False)
class Stream:
    """One direction of a byte stream."""

    writes: dict[int, Sent] = attrs.field(factory=dict)
    current: int = 0
    reached: int = 0
    #: A violation was found here: what follows is not checked.
    faulty: bool = False


@attrs.define(eq=False)
class Connection:
    name: str
    sides: dict[str, Side] = attrs.field(factory=dict)
    queues: dict[tuple[str, int], Queue] = attrs.field(factory=lambda: defaultdict(Queue))
    streams: dict[str, Stream] = attrs.field(factory=lambda: defaultdict(Stream))
    messages: Queue = attrs.field(factory=Queue)
    got: set[int] = attrs.field(factory=set)
    #: By cell: the checksums of the last put, and of the last put that was flushed.
    cells: dict[int, list[int | None]] = attrs.field(factory=dict)
    scheduled: bool = False


@attrs.frozen
class Suspect:
    """An operation that took too long by the clock. The whole log decides whether that is excused."""

    kind: str
    sentence: str
    begin: int
    end: int
    bound: float
    excuses: tuple[int, ...]
    queues: tuple[int, ...]
    lines: tuple[Event, ...]


@attrs.define
class Figures:
    """What the logs say besides violations. Times in nanoseconds."""

    operations: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    connections: int = 0
    ends: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    pings: list[int] = attrs.field(factory=list)
    reported: list[int] = attrs.field(factory=list)
    stopped_queues: int = 0
    processes: dict[str, int] = attrs.field(factory=Counter)
    slopes: list[Slope] = attrs.field(factory=list)
    #: From the begin of the load to the end of the last process.
    seconds: float = 0


@attrs.frozen
class Slope:
    """How a process grew: per minute, and per thousand connections."""

    name: str
    seconds: float
    connections: int
    per_minute: dict[str, float]
    per_thousand: dict[str, float]


class Checker:
    """Feed it the events in the order of their times, then ask for the violations."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.figures = Figures()
        self._violations: list[Violation] = []
        self._suspects: list[Suspect] = []
        #: (what may explain it, when the whole log is known: process ids, begin, end), and the violation otherwise.
        self._unexplained: list[tuple[tuple[int, ...], int, int, Violation]] = []
        self._processes: dict[int, Process] = {}
        self._connections: dict[str, Connection] = {}
        self._finished: set[str] = set()
        self._due: deque[tuple[int, Connection]] = deque()
        self._counted: dict[tuple[int, int], Event] = {}
        self._before: dict[str, list[str]] = {}
        self._servers: list[Process] = []
        #: Since when there is load, and the latest time.
        self._first = self._now = 0

    def feed(self, event: Event) -> None:
        self._now = event.t
        while self._due and self._due[0][0] <= event.t:
            self._finalise(self._due.popleft()[1])
        getattr(self, f"_on_{event.kind}")(event)

    def finish(self) -> list[Violation]:
        """The violations, when all events have been fed."""
        for connection in list(self._connections.values()):
            self._finalise(connection)
        for process in self._processes.values():
            self._judge_end(process)
            self.figures.slopes += slopes(process)
        self.figures.stopped_queues = sum(len(process.stopped_queues) for process in self._processes.values())
        self.figures.seconds = (self._now - self._first) / SECOND
        for suspect in self._suspects:
            self._judge_suspect(suspect)
        for pids, begin, end, violation in self._unexplained:
            if not any(self._process(pid).queue_stopped(begin, end) for pid in pids):
                self._violations.append(violation)
        return self._violations

    # ---- helpers ----

    def _process(self, pid: int) -> Process:
        process = self._processes.get(pid)
        if process is None:
            process = self._processes[pid] = Process(pid)
        return process

    def _violation(self, kind: str, sentence: str, *lines: Event | None) -> None:
        self._violations.append(Violation(kind, sentence, tuple(str(line) for line in lines if line is not None)))

    def _connection(self, name: str) -> Connection:
        connection = self._connections.get(name)
        if connection is None:
            connection = self._connections[name] = Connection(name)
        return connection

    def _side(self, connection: Connection, pid: int) -> tuple[str, Side]:
        """The side that this process has."""
        which = "server" if self._process(pid).role == "server" else "client"
        side = connection.sides.get(which)
        if side is None:
            side = connection.sides[which] = Side(pid)
        return which, side

    def _other(self, connection: Connection, side: Side) -> Side | None:
        return next((one for one in connection.sides.values() if one is not side), None)

    def _gone(self, side: Side | None) -> Event | None:
        """What ended the connection on this side, by force."""
        if side is None:
            return None
        events = [self._process(side.pid).gone]
        if side.ending is not None and side.ending["how"] != "close":
            events.append(side.ending)
        return min((event for event in events if event is not None), key=lambda event: event.t, default=None)

    def _suspect(
        self, op: Operation, kind: str, what: str, begin: int, end: int, bound: float, *lines: Event, peer: bool = False
    ) -> None:
        """Notes something that may have taken too long.

        Args:
            peer: whether the time in which the peer's process could not run is excused, too.
        """
        if end - begin <= bound * SECOND:
            return
        other = self._other(op.connection, op.side)
        both = (op.side.pid, *([other.pid] if other is not None else []))
        excuses = both if peer or kind in ("stalled", "slow ping", "slow connect", "slow close") else (op.side.pid,)
        sentence = f"{op.kind} on {op.connection.name} of process {op.side.pid} {what}"
        self._suspects.append(Suspect(kind, sentence, begin, end, bound, excuses, both, (op.begin, *lines)))

    def _judge_suspect(self, suspect: Suspect) -> None:
        excused = sum(self._process(pid).excused(suspect.begin, suspect.end) for pid in suspect.excuses)
        bound = suspect.bound
        if any(self._process(pid).queue_stopped(suspect.begin, suspect.end) for pid in suspect.queues):
            bound = max(bound, self.bounds.queue)
        took = (suspect.end - suspect.begin - max(excused, self._blocked(suspect))) / SECOND
        if took > bound:
            sentence = f"{suspect.sentence} ({took:.3f} s; the bound is {bound:g} s; {self._stops(suspect)})"
            self._violation(suspect.kind, sentence, *suspect.lines)

    def _blocked(self, suspect: Suspect) -> int:
        """Nanoseconds for which another process may have blocked the shared-memory queue that the operation needs.

        A process that is stopped while it writes to such a queue blocks all that write there until it goes on
        (reliability.md, "Known limits"). Then the operation ends, too.
        """
        if len(suspect.excuses) == 1:
            return 0  # it does not depend on what arrives
        processes = [one for one in self._processes.values() if one.shares_memory and one.pid not in suspect.queues]
        begins = [begin for one in processes if (begin := one.stopped_until(suspect.end)) is not None]
        return max((suspect.end - max(begin, suspect.begin) for begin in begins), default=0)

    def _stops(self, suspect: Suspect) -> str:
        """Which processes were stopped meanwhile, in words; times from the start of the operation."""
        found = [
            f"{process.name} from {(a - suspect.begin) / SECOND:.3f} to {(b - suspect.begin) / SECOND:.3f} s"
            for process in self._processes.values()
            for a, b in process.stops
            if a < suspect.end and b > suspect.begin
        ]
        return f"stopped meanwhile: {', '.join(found) or 'nobody'}"

    # ---- processes ----

    def _on_start(self, event: Event) -> None:
        process = self._process(event.pid)
        process.role, process.name, process.started = event["role"], event["name"], event.t
        process.shares_memory = "sm" in event.get("transports", "")
        self.figures.processes[process.role] += 1
        if process.role == "server":
            self._servers.append(process)

    def _on_spawn(self, event: Event) -> None:
        process = self._process(event["child"])
        process.role, process.name = event["role"], event["name"]

    def _on_ready(self, event: Event) -> None:
        """The first processes have started: the load begins."""
        self._first = event.t

    def _on_kill(self, event: Event) -> None:
        self.figures.faults[f"SIGKILL {self._process(event['child']).role}"] += 1
        self._goes(self._process(event["child"]), event)

    def _goes(self, process: Process, event: Event) -> None:
        process.ended_by.append(event)
        process.gone = process.gone or event

    def _on_exit(self, event: Event) -> None:
        self.figures.faults["os._exit client"] += 1
        self._goes(self._process(event.pid), event)

    def _on_stop(self, event: Event) -> None:
        self.figures.faults[f"SIGSTOP {self._process(event['child']).role}"] += 1
        self._process(event["child"]).stopped = event.t

    def _on_continue(self, event: Event) -> None:
        process = self._process(event["child"])
        if process.stopped is not None:
            process.stops.append((process.stopped, event.t))
            process.stopped = None

    def _on_exited(self, event: Event) -> None:
        process = self._process(event["child"])
        process.exited = event
        status, gone = event["status"], process.gone
        expected = {0, *(EXIT if cause.kind == "exit" else -9 for cause in process.ended_by)}
        if status not in expected:
            name = f"the {process.role} {process.name}"
            self._violation("exit status", f"{name} ended with status {status}", event)
        if gone is None:
            process.gone = event

    def _on_hung(self, event: Event) -> None:
        self._goes(self._process(event["child"]), event)
        lines = event["stacks"].splitlines()
        self._violations.append(Violation("hung", f"process {event['name']} did not end on request", tuple(lines)))

    def _on_sample(self, event: Event) -> None:
        process = self._process(event.pid)
        process.starved.append((event.t, event["starved"]))
        process.samples.append((event.t, process.connections, event["fds"], event["threads"], event["rss"]))

    def _on_worker(self, event: Event) -> None:
        process = self._process(event.pid)
        if event["stopped_queues"] > process.queues_seen:
            process.stopped_queues.append(event.t)
            process.queues_seen = event["stopped_queues"]

    def _on_finish(self, event: Event) -> None:
        process = self._process(event.pid)
        process.finish = event
        if event["handles"]:
            text = f"process {event.pid} has ended with live handles: {event['handles']}"
            self._violation("handles left", text, event)
        if event["missed"]:
            text = f"a worker of process {event.pid} has missed {event['missed']} events"
            self._violation("missed events", text, event)
        if event.get("stopped_queues", 0) > process.queues_seen:
            process.stopped_queues.append(event.t)

    def _judge_end(self, process: Process) -> None:
        exited = process.exited
        if exited is not None and exited["status"] == 0 and process.finish is None:
            self._violation("no finish", f"process {process.pid} has ended with status 0 before it was done", exited)
        for op in process.operations.values():
            if process.finish is not None or (exited is not None and exited["status"] == 0):
                text = f"{op.kind} on {op.connection.name} of process {process.pid} has never ended"
                self._violation("never ended", text, op.begin)
            elif process.gone is not None:
                self._judge_report(op, process.gone)

    def _on_machine(self, event: Event) -> None:
        left = {name: event[name] for name in ("shared_memory", "processes")}
        if event["when"] == "before":
            self._before = left
            return
        for name, things in left.items():
            for thing in things:
                if thing not in self._before.get(name, []):
                    text = f"{name.replace('_', ' ')} was left on the machine: {thing}"
                    self._violation("left behind", text, event)

    # ---- connections ----

    def _on_open(self, event: Event) -> None:
        self._side(self._connection(event["c"]), event.pid)
        self._process(event.pid).connections += 1
        if event["side"] == "client":
            self.figures.connections += 1
            self.figures.ends[event["end"]] += 1

    def _on_ending(self, event: Event) -> None:
        side = self._side(self._connection(event["c"]), event.pid)[1]
        if side.ending is None:
            side.ending = event

    def _on_over(self, event: Event) -> None:
        connection = self._connection(event["c"])
        self._side(connection, event.pid)[1].over = event
        for side in list(connection.sides.values()):
            if side.over is None and self._process(side.pid).gone is None:
                return
        if not connection.scheduled:  # a little later, as its active messages may still wait at the server
            connection.scheduled = True
            self._due.append((event.t + 15 * SECOND, connection))

    def _finalise(self, connection: Connection) -> None:
        """Reports what was lost although one side closed without an error, and the other has read everything."""
        if self._connections.pop(connection.name, None) is None:
            return
        self._finished.add(connection.name)
        for which, direction in (("client", "up"), ("server", "down")):
            side = connection.sides.get(which)
            other = self._other(connection, side) if side is not None else None
            if side is None or side.closed is None or other is None or other.over is None or not other.over["all"]:
                continue
            for (queue_direction, number), queue in connection.queues.items():
                lost = [n for n, sent in queue.sent.items() if n > queue.last and sent.outcome == "ok"]
                if queue_direction == direction and lost and not queue.faulty:
                    what = f"message {lost[0]} of queue {number} {direction} of {connection.name}"
                    text = f"{what} was sent with success and the connection closed without an error, and never came"
                    self._violation("lost", text, queue.sent[lost[0]].begin, side.closed)
            gone = self._process(other.pid).gone
            if direction == "up" and (gone is None or gone.get("status") == 0):
                for number, sent in connection.messages.sent.items():
                    if sent.outcome == "ok":
                        text = f"active message {number} of {connection.name} was sent with success, and never came"
                        self._violation("lost active message", text, sent.begin, side.closed)
                        break

    # ---- operations ----

    def _on_begin(self, event: Event) -> None:
        connection = self._connection(event["c"])
        side = self._side(connection, event.pid)[1]
        op = Operation(event, connection, side)
        self._process(event.pid).operations[event["op"]] = op
        if op.kind == "send":
            connection.queues[event["d"], event["q"]].sent[event["n"]] = Sent(event)
        elif op.kind == "write":
            connection.streams[event["d"]].writes[event["n"]] = Sent(event)
        elif op.kind == "am_send":
            connection.messages.sent[event["n"]] = Sent(event)

    def _on_end(self, event: Event) -> None:
        op = self._process(event.pid).operations.pop(event["op"])
        outcome = event["o"]
        self.figures.operations[op.kind, outcome] += 1
        self._judge_time(op, event)
        self._judge_outcome(op, event)
        handler = getattr(self, f"_ended_{op.kind}", None)
        if handler is not None:
            handler(op, event, outcome)

    def _judge_time(self, op: Operation, end: Event) -> None:
        bounds, began = self.bounds, op.begin.t
        cancel = op.begin.get("cancel")
        if cancel is not None:
            what = "was cancelled and ended too late"
            self._suspect(op, "late after cancellation", what, cancel, end.t, bounds.cancelled, end)
        self._judge_report(op, end)
        if op.side.ending is not None and op.side.ending["how"] in ("abort", "exception"):
            what, since = "ended too late after this side closed by force", max(op.side.ending.t, began)
            self._suspect(op, "reported late", what, since, end.t, bounds.reported, op.side.ending, end)
        kind = {"aclose": "slow close", "connect": "slow connect", "ping": "slow ping"}.get(op.kind, "stalled")
        limits = {"slow close": bounds.close, "slow connect": bounds.connect, "slow ping": bounds.ping}
        if op.kind not in ("drain", "read", "wait_closed"):  # these wait for what the plan says
            self._suspect(
                op, kind, f"took too long, and was {end['o']}", began, end.t, limits.get(kind, bounds.stall), end
            )
        elif end["o"] == "late":
            self._suspect(op, "stalled", "was given up", began, end.t, bounds.stall, end)

    def _judge_report(self, op: Operation, end: Event) -> None:
        """The peer has gone: was that reported to the waiting task in time?"""
        gone = self._gone(self._other(op.connection, op.side))
        if gone is None or gone.t >= end.t or op.kind == "connect":
            return
        since = max(gone.t, op.begin.t)
        what = "ended too late after its peer was gone"
        own = gone.kind in ("ending", "exit")  # logged before it is done: the peer may be stopped in between
        self._suspect(op, "reported late", what, since, end.t, self.bounds.reported, gone, end, peer=own)
        waited = end.kind == "end" and end["o"] == "broken" and op.begin.t < gone.t
        if waited and gone.kind in ("kill", "exit") and not self._process(op.side.pid).was_stopped(gone.t):
            self.figures.reported.append(end.t - gone.t)

    def _judge_outcome(self, op: Operation, end: Event) -> None:
        outcome, other = end["o"], self._other(op.connection, op.side)
        what = f"{op.kind} on {op.connection.name} of process {op.side.pid}"
        pids = (op.side.pid, *([other.pid] if other is not None else []))
        if outcome in ("ok", "cancelled", "late"):
            return
        if op.kind == "connect":
            self._judge_refusal(op, end)
        elif outcome == "closed":
            if op.side.ending is None:
                self._violation("wrong outcome", f"{what} says closed, and this side has not closed", op.begin, end)
        elif outcome == "end":
            if other is None or other.ending is None or other.ending["how"] != "close":
                self._violation("wrong outcome", f"{what} says end, and the peer has not closed", op.begin, end)
        elif outcome == "broken":
            if op.side.ending is None and self._gone(other) is None and (other is None or other.ending is None):
                text = f"{what} broke, and nobody had ended the connection: {end.get('why')}"
                violation = Violation("broken without a fault", text, (str(op.begin), str(end)))
                self._unexplained.append((pids, op.begin.t, end.t, violation))
        else:
            self._violation("error", f"{what} failed: {end.get('why')}", op.begin, end)

    def _judge_refusal(self, op: Operation, end: Event) -> None:
        """Reports a connect that failed, unless a fault of the server, of either process or of a queue explains it."""
        server = next((one for one in reversed(self._servers) if one.started <= end.t), None)
        if server is None or server.started + self.bounds.start * SECOND > op.begin.t:
            return
        gone = server.gone
        harmed = (gone is not None and gone.t <= end.t) or server.was_stopped(op.begin.t)
        if not harmed and not self._process(op.side.pid).was_stopped(op.begin.t):
            text = f"connecting as {op.connection.name} failed, and a server was there: {end.get('why')}"
            violation = Violation("not connected", text, (str(op.begin), str(end)))
            self._unexplained.append(((op.side.pid, server.pid), op.begin.t, end.t, violation))

    def _ended_send(self, op: Operation, end: Event, outcome: str) -> None:
        sent = op.connection.queues[op.begin["d"], op.begin["q"]].sent.get(op.begin["n"])
        if sent is not None:  # not received yet
            sent.outcome = outcome

    def _ended_aclose(self, op: Operation, end: Event, outcome: str) -> None:
        if outcome == "ok":
            op.side.closed = end

    def _ended_ping(self, op: Operation, end: Event, outcome: str) -> None:
        if outcome != "ok":
            return
        if end["answer"] != "right":
            text = f"ping {op.begin['n']} of {op.connection.name} got another's answer: {end['answer']!r}"
            self._violation("foreign", text, op.begin, end)
        other = self._other(op.connection, op.side)
        sides = [op.side, *([other] if other is not None else [])]
        if not any(self._process(side.pid).was_stopped(op.begin.t) for side in sides):
            self.figures.pings.append(end.t - op.begin.t)

    # -- messages --

    def _ended_drain(self, op: Operation, end: Event, outcome: str) -> None:
        self._ended_receive(op, end, outcome)

    def _ended_receive(self, op: Operation, end: Event, outcome: str) -> None:
        if outcome != "ok":
            return
        direction, number = op.begin["d"], op.begin["q"]
        queue = op.connection.queues[direction, number]
        if queue.faulty:
            return
        where = f"queue {number} {direction} of {op.connection.name}"
        fault = end.get("fault")
        if fault is not None:
            queue.faulty = True
            self._violation(
                fault.partition(":")[0], f"a message of {end['len']} bytes in {where} is {fault}", op.begin, end
            )
        elif "short" in end.fields:
            self._short_received(queue, Address(op.connection.name, direction, number), where, end)
        else:
            self._received(queue, end["n"], where, end)

    def _received(self, queue: Queue, n: int, where: str, end: Event) -> None:
        """Message ``n`` was received."""
        before = next(((sent, received) for m, sent, received in queue.recent if m == n), None)
        if before is not None:
            queue.faulty = True
            self._violation("doubled", f"message {n} of {where} was received twice", before[0].begin, before[1], end)
            return
        if n not in queue.sent:
            queue.faulty = True
            self._violation("never sent", f"message {n} of {where} was received, and never sent", end)
            return
        if n <= queue.last:
            queue.faulty = True
            text = f"message {n} of {where} was received after message {queue.last}"
            self._violation("out of order", text, queue.sent[n].begin, end)
            return
        for m in range(queue.last + 1, n):
            if m in queue.sent and queue.sent[m].outcome == "ok":
                queue.faulty = True
                text = f"message {m} of {where}, which was sent with success, is missing before message {n}"
                self._violation("gap", text, queue.sent[m].begin, end)
                return
        queue.recent.append((n, queue.sent.pop(n), end))
        for m in range(max(queue.last + 1, n - 400), max(0, n - 350)):
            queue.sent.pop(m, None)
        queue.last = n

    def _short_received(self, queue: Queue, to: Address, where: str, end: Event) -> None:
        """A message without a header was received: which one can it be?"""
        text = end["short"]
        for n in itertools.count(queue.last + 1):
            sent = queue.sent.get(n)
            if sent is None:
                break
            if is_short(to, n, sent.begin["len"], text):
                self._received(queue, n, where, end)
                return
            if sent.outcome == "ok":
                break
        queue.faulty = True
        for m, sent, received in reversed(queue.recent):
            if is_short(to, m, sent.begin["len"], text):
                self._violation("doubled", f"message {m} of {where} was received twice", sent.begin, received, end)
                return
        expected = queue.sent.get(queue.last + 1)
        for m, sent in queue.sent.items():
            if is_short(to, m, sent.begin["len"], text):
                what = f"message {m} of {where} was received, and not message {queue.last + 1} before it"
                self._violation("gap", what, expected.begin if expected is not None else None, sent.begin, end)
                return
        what = f"a message of {end['len']} bytes in {where} is none that was sent there: {text}"
        self._violation("torn", what, expected.begin if expected is not None else None, end)

    # -- the byte stream --

    def _ended_write(self, op: Operation, end: Event, outcome: str) -> None:
        write = op.connection.streams[op.begin["d"]].writes.get(op.begin["n"])
        if write is not None:
            write.outcome = outcome

    def _ended_read(self, op: Operation, end: Event, outcome: str) -> None:
        stream = op.connection.streams[op.begin["d"]]
        if outcome != "ok" or stream.faulty:
            return
        where = f"the byte stream {op.begin['d']} of {op.connection.name}"
        problem, kind = None, "gap"
        for number, first, last in end["runs"]:
            write = stream.writes.get(number)
            if number < stream.current or (number == stream.current and first < stream.reached):
                problem, kind = f"write {number} was received again in {where}", "doubled"
            elif write is None:
                problem, kind = f"write {number} of {where} was received, and never sent", "never sent"
            elif number == stream.current:
                if first != stream.reached:
                    problem = f"write {number} of {where} lacks records {stream.reached} to {first - 1}"
            elif (missing := self._missing(stream, number)) is not None:
                problem = f"write {missing} of {where}, which was sent with success, did not come whole"
            elif first != 0:
                problem = f"write {number} of {where} lacks its first {first} records"
            if problem is None and write is not None and last >= write.begin["records"]:
                problem, kind = f"write {number} of {where} has more records than were sent", "torn"
            if problem is not None:
                break
            if number != stream.current:
                for n in range(stream.current, number):
                    stream.writes.pop(n, None)
            stream.current, stream.reached = number, last + 1
        if problem is None and end.get("fault"):
            problem, kind = f"{end['fault']}, in {where}", end["fault"].partition(":")[0]
        if problem is None and end.get("eof"):
            missing = self._missing(stream, max(stream.writes, default=0) + 1)
            if missing is not None:
                problem = f"{where} has ended without write {missing}, which was sent with success"
        if problem is not None:
            stream.faulty = True
            self._violation(kind, problem, op.begin, end)

    def _missing(self, stream: Stream, until: int) -> int | None:
        """The first write before ``until`` that was sent with success and did not come whole."""
        for number in range(max(1, stream.current), until):
            write = stream.writes.get(number)
            if write is not None and write.outcome == "ok":
                reached = stream.reached if number == stream.current else 0
                if reached != write.begin["records"]:
                    return number
        return None

    # -- active messages --

    def _ended_am_send(self, op: Operation, end: Event, outcome: str) -> None:
        sent = op.connection.messages.sent.get(op.begin["n"])
        if sent is not None:
            sent.outcome = outcome

    def _on_am(self, event: Event) -> None:
        if "broken" in event.fields:
            return
        connection = self._connections.get(event["c"])
        number = event["n"]
        what = f"active message {number} of {event['c']}"
        if event["fault"] is not None:
            self._violation(event["fault"].partition(":")[0], f"{what} is {event['fault']}", event)
        elif event["c"] in self._finished:
            return  # it came very late, as the server was stopped
        elif connection is None or (number not in connection.messages.sent and number not in connection.got):
            self._violation("never sent", f"{what} was received, and never sent", event)
        elif number in connection.got:
            self._violation("doubled", f"{what} was received twice", event)
        else:
            connection.got.add(number)
            del connection.messages.sent[number]

    # -- remote memory --

    def _ended_put(self, op: Operation, end: Event, outcome: str) -> None:
        # [what the last put wrote, what is known to be there]
        op.connection.cells[op.begin["cell"]] = [op.begin["sum"] if outcome == "ok" else None, None]

    def _ended_flush(self, op: Operation, end: Event, outcome: str) -> None:
        if outcome == "ok":
            for cell in op.connection.cells.values():
                cell[1] = cell[0]

    def _ended_get(self, op: Operation, end: Event, outcome: str) -> None:
        known = op.connection.cells.get(op.begin["cell"], [None, None])[1]
        if outcome == "ok" and known is not None and end["sum"] != known:
            text = f"a get from cell {op.begin['cell']} of {op.connection.name} read something else than was put there"
            self._violation("wrong read", text, op.begin, end)

    def _ended_fetch_add(self, op: Operation, end: Event, outcome: str) -> None:
        if outcome == "ok":
            key = (op.begin["server"], end["value"])
            if key in self._counted:
                text = f"a fetch-and-add on the counter of process {key[0]} has returned {key[1]} twice"
                self._violation("counted twice", text, self._counted[key], end)
            self._counted[key] = end

    def _ended_chain(self, op: Operation, end: Event, outcome: str) -> None:
        if outcome != "ok":
            return
        self._ended_fetch_add(op, end, outcome)
        if end["sums"] != [op.begin["sum"]] * 2:
            text = f"a chain of {op.connection.name} read something else than it had put"
            self._violation("wrong read", text, op.begin, end)


def slopes(process: Process) -> Iterator[Slope]:
    """How a process grew after its first seconds, if it lived for long enough to say."""
    samples = [one for one in process.samples if one[0] - process.samples[0][0] > 5 * SECOND]
    if len(samples) < 20:
        return
    minutes = [one[0] / (60 * SECOND) for one in samples]
    thousands = [one[1] / 1000 for one in samples]
    columns = {name: [float(one[2 + index]) for one in samples] for index, name in enumerate(("fds", "threads", "rss"))}
    yield Slope(
        f"{process.role} {process.name}",
        (samples[-1][0] - samples[0][0]) / SECOND,
        samples[-1][1] - samples[0][1],
        {name: fit(minutes, values) for name, values in columns.items()},
        {name: fit(thousands, values) for name, values in columns.items()},
    )


def fit(x: list[float], y: list[float]) -> float:
    """The slope of the straight line that fits best."""
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - middle_x) ** 2 for one in x)
    if spread == 0:
        return 0.0
    return sum((one - middle_x) * (other - middle_y) for one, other in zip(x, y, strict=True)) / spread


def check(events: Iterable[Event], bounds: Bounds | None = None) -> tuple[list[Violation], Figures]:
    """The violations in these logs, and their figures."""
    checker = Checker(bounds)
    for event in events:
        checker.feed(event)
    return checker.finish(), checker.figures
