"""The soak's checker finds each kind of violation in a small log, and none in a correct one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the soak prints its tables with rich")


from faults.load import checker, log
from faults.load.payload import HEADER, Address, StreamReader, examine, make, make_write

SERVER, CLIENT, OTHER, PARENT = 10, 20, 30, 1
NAME = "c1.0.1"
SECOND = 1000  # the log below counts milliseconds
UP = Address(NAME, "up", 3)


class Story:
    """A log that is written down by hand: times in milliseconds."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.operations = 0
        for pid, role in ((SERVER, "server"), (CLIENT, "client")):
            self.say(0, pid, "start", role=role, name=role)
        for pid, side, peer in ((SERVER, "server", CLIENT), (CLIENT, "client", SERVER)):
            self.say(1, pid, "open", c=NAME, side=side, peer=peer, end="client close")

    def say(self, t: float, pid: int, e: str, **fields: Any) -> None:
        self.lines.append({"t": int(t * 1_000_000), "pid": pid, "e": e, **fields})

    def do(self, begin: float, end: float | None, pid: int, k: str, o: str = "ok", /, **fields: Any) -> None:
        """An operation; ``got`` is what it logged at its end."""
        got = fields.pop("got", {})
        self.operations += 1
        if "cancel" in fields:
            fields["cancel"] = int(fields["cancel"] * 1_000_000)
        self.say(begin, pid, "begin", op=self.operations, c=NAME, k=k, **fields)
        if end is not None:
            self.say(end, pid, "end", op=self.operations, o=o, **got)

    def send(self, t: float, n: int, o: str = "ok", length: int = 100) -> None:
        self.do(t, t + 1, CLIENT, "send", o, q=3, d="up", n=n, len=length)

    def receive(self, t: float, data: bytes | None, o: str = "ok") -> None:
        got = examine(UP, data) if data is not None else {}
        self.do(t, t + 1, SERVER, "receive", o, q=3, d="up", got=got)

    def close(self, t: float, pid: int, side: str, o: str = "ok") -> None:
        self.say(t, pid, "ending", c=NAME, side=side, how="close")
        self.do(t, t + 1, pid, "aclose", o)
        self.say(t + 2, pid, "over", c=NAME, side=side, all=True)

    def end(self, t: float) -> None:
        """Everybody closes and ends."""
        self.close(t, CLIENT, "client")
        self.close(t + 3, SERVER, "server")
        for pid in (CLIENT, SERVER):
            self.say(t + 10, pid, "finish", handles={}, missed=0)
            self.say(t + 11, PARENT, "exited", child=pid, name="", status=0)

    def kinds(self) -> list[str]:
        """The kinds of violations in it."""
        violations, _ = checker.check(log.events(sorted(self.lines, key=lambda line: line["t"])))
        for violation in violations:
            assert violation.sentence and "\n" not in violation.sentence
            assert violation.lines
        return [violation.kind for violation in violations]


@pytest.fixture
def story() -> Story:
    return Story()


def test_correct_log(story: Story) -> None:
    story.say(2, PARENT, "machine", when="before", shared_memory=["old"], processes=[])
    for n, length in enumerate((100, 1, 5000, 3, 40, 100), 1):
        outcome = "cancelled" if n in (2, 5) else "ok"
        story.send(10 * n, n, outcome, length)
        if n != 5:
            story.receive(10 * n + 5, make(UP, n, length))
    story.do(70, 80, CLIENT, "ping", n=1, got={"answer": "right"})
    story.do(80, 81, CLIENT, "write", n=1, records=2, d="up")
    story.do(82, 83, SERVER, "read", d="up", got={"runs": [[1, 0, 1]], "rest": 0})
    story.do(84, 85, SERVER, "read", d="up", got={"runs": [], "eof": True})
    story.do(90, 91, CLIENT, "put", cell=0, sum=7, len=1)
    story.do(91, 92, CLIENT, "flush")
    story.do(92, 93, CLIENT, "get", cell=0, len=1, got={"sum": 7})
    story.do(94, 95, CLIENT, "fetch_add", server=SERVER, got={"value": 1})
    story.do(95, 96, CLIENT, "chain", server=SERVER, sum=5, got={"sums": [5, 5], "value": 2})
    story.do(96, 97, CLIENT, "am_send", n=1, len=9)
    story.say(98, SERVER, "am", c=NAME, n=1, fault=None)
    story.do(99, 200, SERVER, "drain", "end", q=3, d="up")
    story.end(150)
    story.say(300, PARENT, "machine", when="after", shared_memory=["old"], processes=[])
    assert story.kinds() == []


def test_figures(story: Story) -> None:
    story.do(10, 30, CLIENT, "ping", n=1, got={"answer": "right"})
    story.do(40, 700, SERVER, "receive", "broken", q=3, d="up", got={"why": ""})
    story.say(500, PARENT, "kill", child=CLIENT, name="c1")
    story.say(701, SERVER, "ending", c=NAME, side="server", how="abort", after="broken")
    story.say(702, SERVER, "over", c=NAME, side="server", all=False)
    violations, figures = checker.check(log.events(sorted(story.lines, key=lambda line: line["t"])))
    assert violations == []
    assert figures.pings == [20_000_000]
    assert figures.reported == [200_000_000]
    assert figures.faults == {"SIGKILL client": 1}
    assert figures.operations == {("ping", "ok"): 1, ("receive", "broken"): 1}


# ---- messages ----


@pytest.mark.parametrize("length", [1, 2, 30, 100, 100_000])
class TestMessages:
    def test_doubled(self, story: Story, length: int) -> None:
        for n in (1, 2):
            story.send(10 * n, n, length=length)
        for t, n in ((15, 1), (25, 2), (30, 2)):
            story.receive(t, make(UP, n, length))
        story.end(50)
        assert story.kinds() == ["doubled"]

    def test_gap(self, story: Story, length: int) -> None:
        for n in (1, 2, 3):
            story.send(10 * n, n, length=length)
        for n in (1, 3):
            story.receive(50 + n * 2, make(UP, n, length))
        story.end(60)
        assert story.kinds() == ["gap"]

    def test_gap_after_cancelled_sends(self, story: Story, length: int) -> None:
        for n in (1, 2, 3):
            story.send(10 * n, n, "cancelled" if n == 2 else "ok", length)
        for n in (1, 3):
            story.receive(50 + n * 2, make(UP, n, length))
        story.end(60)
        assert story.kinds() == []

    def test_lost(self, story: Story, length: int) -> None:
        for n in (1, 2):
            story.send(10 * n, n, length=length)
        story.receive(15, make(UP, 1, length))
        story.end(50)
        assert story.kinds() == ["lost"]

    def test_lost_with_its_receiver(self, story: Story, length: int) -> None:
        """Nobody promised anything to a sender whose peer was killed."""
        story.send(10, 1, length=length)
        story.say(20, PARENT, "kill", child=SERVER, name="s1")
        story.close(30, CLIENT, "client")
        assert story.kinds() == []

    def test_torn(self, story: Story, length: int) -> None:
        story.send(10, 1, length=length)
        data = bytearray(make(UP, 1, length))
        data[-1] ^= 1
        story.receive(15, bytes(data))
        story.end(50)
        assert story.kinds() == ["torn"]

    def test_never_sent(self, story: Story, length: int) -> None:
        story.receive(15, make(UP, 1, length))
        story.end(50)
        assert story.kinds() == ["never sent" if length >= HEADER.size else "torn"]


def test_out_of_order(story: Story) -> None:
    story.send(10, 1, "cancelled")
    story.send(20, 2)
    for t, n in ((30, 2), (40, 1)):
        story.receive(t, make(UP, n, 100))
    story.end(50)
    assert story.kinds() == ["out of order"]


@pytest.mark.parametrize("other", [Address("c9.0.1", "up", 3), Address(NAME, "down", 3), Address(NAME, "up", 4)])
def test_foreign(story: Story, other: Address) -> None:
    story.send(10, 1)
    story.receive(15, make(other, 1, 100))
    story.end(50)
    assert story.kinds() == ["foreign"]


def test_foreign_answer(story: Story) -> None:
    story.do(10, 20, CLIENT, "ping", n=1, got={"answer": "c9.0.1 4"})
    story.end(50)
    assert story.kinds() == ["foreign"]


@pytest.mark.parametrize(
    ("fault", "number", "kinds"),
    [
        (None, 1, []),
        (None, 2, ["never sent"]),
        ("torn: bytes differ", 1, ["torn"]),
        (None, None, ["lost active message"]),
    ],
)
def test_active_messages(story: Story, fault: str | None, number: int | None, kinds: list[str]) -> None:
    story.do(10, 11, CLIENT, "am_send", n=1, len=9)
    if number is not None:
        story.say(12, SERVER, "am", c=NAME, n=number, fault=fault)
    if kinds and kinds != ["lost active message"]:
        story.say(13, SERVER, "am", c=NAME, n=1, fault=None)
    story.end(50)
    assert story.kinds() == kinds


def test_doubled_active_message(story: Story) -> None:
    story.do(10, 11, CLIENT, "am_send", n=1, len=9)
    story.say(12, SERVER, "am", c=NAME, n=1, fault=None)
    story.say(13, SERVER, "am", c=NAME, n=1, fault=None)
    story.end(50)
    assert story.kinds() == ["doubled"]


# ---- the byte stream ----


@pytest.mark.parametrize(
    ("reads", "kinds"),
    [
        ([[[1, 0, 9]], [[2, 0, 9]], [[3, 0, 9]]], []),
        ([[[1, 0, 4]], [[1, 5, 9], [2, 0, 2], [3, 0, 9]]], []),  # the second was cancelled
        ([[[1, 0, 9], [3, 0, 9]]], []),
        ([[[1, 0, 9], [1, 3, 4]]], ["doubled"]),
        ([[[1, 0, 9], [3, 0, 9], [2, 0, 9]]], ["doubled"]),
        ([[[1, 0, 8], [2, 0, 9], [3, 0, 9]]], ["gap"]),
        ([[[1, 0, 4], [1, 6, 9]]], ["gap"]),
        ([[[1, 1, 9]]], ["gap"]),
        ([[[1, 0, 9], [2, 0, 9], [3, 0, 3]]], ["gap"]),  # at the end
        ([[[1, 0, 9]]], ["gap"]),
        ([[[1, 0, 10]]], ["torn"]),
        ([[[1, 0, 9], [4, 0, 9]]], ["never sent"]),
    ],
)
def test_byte_stream(story: Story, reads: list[Any], kinds: list[str]) -> None:
    for n in (1, 2, 3):
        story.do(10 * n, 10 * n + 1, CLIENT, "write", "cancelled" if n == 2 else "ok", n=n, records=10, d="up")
    for number, runs in enumerate(reads):
        story.do(50 + number, 50.5 + number, SERVER, "read", d="up", got={"runs": runs, "rest": 0})
    story.do(60, 61, SERVER, "read", d="up", got={"runs": [], "eof": True})
    story.end(70)
    assert story.kinds() == kinds


def test_stream_reader() -> None:
    data = make_write(NAME, "up", 1, 3) + make_write(NAME, "up", 2, 2)
    reader = StreamReader(NAME, "up")
    assert reader.feed(data[:20])["runs"] == [[1, 0, 0]]
    assert reader.feed(data[20:])["runs"] == [[1, 1, 2], [2, 0, 1]]
    assert "torn" in StreamReader(NAME, "up").feed(data[1:])["fault"]
    assert "foreign" in StreamReader(NAME, "down").feed(data)["fault"]


# ---- remote memory ----


def test_wrong_read(story: Story) -> None:
    story.do(10, 11, CLIENT, "put", cell=0, sum=7, len=1)
    story.do(12, 13, CLIENT, "flush")
    story.do(14, 15, CLIENT, "get", cell=0, len=1, got={"sum": 8})
    story.end(50)
    assert story.kinds() == ["wrong read"]


def test_read_after_a_cancelled_put(story: Story) -> None:
    story.do(10, 11, CLIENT, "put", "cancelled", cell=0, sum=7, len=1)
    story.do(12, 13, CLIENT, "flush")
    story.do(14, 15, CLIENT, "get", cell=0, len=1, got={"sum": 8})
    story.end(50)
    assert story.kinds() == []


def test_wrong_read_of_a_chain(story: Story) -> None:
    story.do(10, 11, CLIENT, "chain", server=SERVER, sum=5, got={"sums": [5, 6], "value": 2})
    story.end(50)
    assert story.kinds() == ["wrong read"]


def test_counted_twice(story: Story) -> None:
    story.do(10, 11, CLIENT, "fetch_add", server=SERVER, got={"value": 4})
    story.do(12, 13, CLIENT, "chain", server=SERVER, sum=5, got={"sums": [5, 5], "value": 4})
    story.do(14, 15, CLIENT, "fetch_add", server=SERVER + 1, got={"value": 4})
    story.end(50)
    assert story.kinds() == ["counted twice"]


# ---- time ----


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("excuse", [None, "stopped", "starved"])
@pytest.mark.parametrize("kind", ["cancelled", "killed", "aborted", "ping", "stalled"])
def test_bounds(story: Story, kind: str, excuse: str | None, late: bool) -> None:
    """Each bound; the time counts in which the process could run."""
    bounds = checker.Bounds()
    limit = {"ping": bounds.ping, "stalled": bounds.stall, "cancelled": bounds.cancelled}.get(kind, bounds.reported)
    took = 1000 * limit * (1.1 if late else 0.9)
    story.say(5, SERVER, "sample", fds=1, threads=1, rss=1, starved=0)
    if excuse is not None:
        took += 4000
    if excuse == "stopped":
        story.say(200, PARENT, "stop", child=SERVER, name="s1")
        story.say(4200, PARENT, "continue", child=SERVER, name="s1")
    end = 100 + took
    story.say(end + 5, SERVER, "sample", fds=1, threads=1, rss=1, starved=4_000_000_000 if excuse == "starved" else 0)
    gone = kind in ("killed", "aborted")
    if kind == "cancelled":
        story.do(10, end, SERVER, "receive", "cancelled", cancel=100, q=3, d="up")
    elif kind == "ping":
        story.do(100, end, SERVER, "ping", n=1, got={"answer": "right"})
    elif kind == "stalled":
        story.do(100, end, SERVER, "send", q=4, d="down", n=1, len=5)
    else:
        story.do(10, end, SERVER, "receive", "broken", q=3, d="up")
        if kind == "killed":
            story.say(100, PARENT, "kill", child=CLIENT, name="c1")
        else:
            story.say(100, CLIENT, "ending", c=NAME, side="client", how="abort")
    if not gone:
        story.say(end + 20, SERVER, "ending", c=NAME, side="server", how="abort")
    names = {
        "cancelled": "late after cancellation",
        "killed": "reported late",
        "aborted": "reported late",
        "ping": "slow ping",
    }
    expected = {names.get(kind, "stalled")} if late else set()
    if kind == "cancelled" and took > bounds.stall * 1000:
        expected |= set(story.kinds()) & {"stalled"}
    assert set(story.kinds()) == expected


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
@pytest.mark.parametrize(("resumed", "explains"), [(2900, True), (2500, False), (3100, False)])
def test_blocked_by_a_suspended_process(story: Story, transports: str, resumed: int, explains: bool) -> None:
    """It may have been suspended while it wrote to the shared-memory queue: then the ping ends when it goes on."""
    story.say(0, OTHER, "start", role="client", name="c2", transports=transports)
    story.say(900, PARENT, "stop", child=OTHER, name="c2")
    story.do(1000, 3000, CLIENT, "ping", n=1, got={"answer": "right"})
    story.say(resumed, PARENT, "continue", child=OTHER, name="c2")
    story.say(3200, CLIENT, "ending", c=NAME, side="client", how="abort")
    assert story.kinds() == ([] if explains and transports != "tcp" else ["slow ping"])


def test_reported_late_and_not_at_all(story: Story) -> None:
    """A task that was waiting when its own process was killed got no report either."""
    story.do(10, None, SERVER, "receive", q=3, d="up")
    story.say(100, PARENT, "kill", child=CLIENT, name="c1")
    story.say(5000, PARENT, "kill", child=SERVER, name="s1")
    assert story.kinds() == ["reported late"]


def test_stopped_queue_takes_longer(story: Story) -> None:
    story.do(10, 2500, SERVER, "receive", "broken", q=3, d="up", got={"why": ""})
    story.say(100, PARENT, "kill", child=CLIENT, name="c1")
    story.say(2600, SERVER, "worker", missed=0, stopped_queues=1)
    assert story.kinds() == []


def test_never_ended(story: Story) -> None:
    story.do(10, None, SERVER, "receive", q=3, d="up")
    story.end(50)
    assert story.kinds() == ["never ended"]


def test_hung(story: Story) -> None:
    story.say(50, PARENT, "hung", child=SERVER, name="s1", stacks="-- task one\n-- task two")
    story.say(60, PARENT, "exited", child=SERVER, name="s1", status=-9)
    assert story.kinds() == ["hung"]


# ---- outcomes ----


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [("broken", "broken without a fault"), ("closed", "wrong outcome"), ("end", "wrong outcome"), ("error", "error")],
)
def test_outcome_without_a_reason(story: Story, outcome: str, kind: str) -> None:
    story.do(10, 20, SERVER, "receive", outcome, q=3, d="up", got={"why": "nobody knows"})
    assert story.kinds() == [kind]


@pytest.mark.parametrize("outcome", ["broken", "end"])
def test_outcome_of_a_close(story: Story, outcome: str) -> None:
    story.do(10, 70, SERVER, "receive", outcome, q=3, d="up", got={"why": "closed"})
    story.end(50)
    assert story.kinds() == []


def test_broken_by_a_stopped_queue(story: Story) -> None:
    story.do(10, 70, SERVER, "receive", "broken", q=3, d="up", got={"why": ""})
    story.say(600, SERVER, "worker", missed=0, stopped_queues=1)
    assert story.kinds() == []


@pytest.mark.parametrize(("begin", "kinds"), [(6000, ["not connected"]), (1000, [])])
def test_not_connected(story: Story, begin: float, kinds: list[str]) -> None:
    """A server that has just been started need not listen yet."""
    story.do(begin, begin + 10, CLIENT, "connect", "error", got={"why": "refused"})
    assert story.kinds() == kinds


# ---- the end ----


@pytest.mark.parametrize(
    ("handles", "missed", "kinds"), [({"worker": 1}, 0, ["handles left"]), ({}, 2, ["missed events"]), ({}, 0, [])]
)
def test_finish(story: Story, handles: dict[str, int], missed: int, kinds: list[str]) -> None:
    story.say(10, CLIENT, "finish", handles=handles, missed=missed)
    assert story.kinds() == kinds


@pytest.mark.parametrize("status", [1, -11, 0, -9])
def test_exit_status(story: Story, status: int) -> None:
    story.say(10, PARENT, "exited", child=CLIENT, name="c1", status=status)
    assert story.kinds() == (["no finish"] if status == 0 else ["exit status"])


def test_planned_exits(story: Story) -> None:
    story.say(10, CLIENT, "exit")
    story.say(11, PARENT, "exited", child=CLIENT, name="c1", status=checker.EXIT)
    story.say(12, PARENT, "kill", child=SERVER, name="s1")
    story.say(13, PARENT, "exited", child=SERVER, name="s1", status=-9)
    assert story.kinds() == []


def test_killed_while_it_ended_itself(story: Story) -> None:
    story.say(10, CLIENT, "exit")
    story.say(11, PARENT, "kill", child=CLIENT, name="c1")
    story.say(12, PARENT, "exited", child=CLIENT, name="c1", status=checker.EXIT)
    assert story.kinds() == []


@pytest.mark.parametrize(("took", "kinds"), [(900, []), (3500, ["reported late", "stalled"])])
def test_chains_end_with_their_connection(story: Story, took: float, kinds: list[str]) -> None:
    story.say(100, SERVER, "ending", c=NAME, side="server", how="abort")
    story.do(99, 100 + took, CLIENT, "chain", "broken", server=SERVER, sum=5)
    assert sorted(story.kinds()) == kinds


@pytest.mark.parametrize("what", ["shared_memory", "processes"])
def test_left_behind(story: Story, what: str) -> None:
    left = {"shared_memory": ["old"], "processes": []}
    story.say(1, PARENT, "machine", when="before", **left)
    story.say(10, PARENT, "machine", when="after", **{**left, what: ["new"]})
    assert story.kinds() == ["left behind"]


def test_slopes() -> None:
    process = checker.Process(SERVER, "server", "s1")
    for second in range(60):
        time = second * 1_000_000_000
        process.samples.append((time, 10 * second, 20 + second, 2, 1000 * second))
    [slope] = checker.slopes(process)
    assert slope.per_minute == pytest.approx({"fds": 60, "threads": 0, "rss": 60_000})
    assert slope.per_thousand == pytest.approx({"fds": 100, "threads": 0, "rss": 100_000})


# ---- the log ----


def test_log_of_two_processes(tmp_path: Path) -> None:
    one, other = log.Log(tmp_path, "one"), log.Log(tmp_path, "other")
    numbers = [one.begin("c", "send", n=1), one.begin("c", "send", n=2)]
    other.event("exit")
    one.event("end", op=numbers[0], o="ok")
    one.close()
    other.close()
    events = list(log.read(tmp_path))
    assert [event.kind for event in events] == ["begin", "begin", "exit", "end"]
    assert numbers == [1, 2]
    assert events[2].source == "other.jsonl:1"
