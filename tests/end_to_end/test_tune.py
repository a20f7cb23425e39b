"""``perf --tune``: how it decides, what it prints, and which options a client may ask for."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._cli import ends, main, options, report, trials, tune
from trio_ucx._cli.errors import CandidateError, PerfError
from trio_ucx._cli.options import OPTIONS, Figure
from trio_ucx._cli.verdict import Comparison, best, compare, confirm
from trio_ucx._native import ucx
from trio_ucx.ucp._context import _memory_units
from trio_ucx.ucp._quirks.default_options import DEFAULT_OPTIONS
from trio_ucx.ucp._quirks.releases import WELL_CONFIGURABLE

from .programs import QUICK, TIMEOUT, listening_address, run_cli, start_cli

pytestmark = pytest.mark.skipif(ucx.version < WELL_CONFIGURABLE, reason="this UCX is hardly configurable")

LIMIT = 20


# ---- how it decides ----


def against_default(**figures: Sequence[float]) -> Comparison:
    """Made-up ratios; the default's own speeds differ from round to round, as they do."""
    rounds = [dict(zip(figures, ratios, strict=True)) for ratios in zip(*figures.values(), strict=True)]
    default = [dict.fromkeys(figures, 100 * (1 + number)) for number in range(len(rounds))]
    other = [{name: default[number][name] * ratio for name, ratio in one.items()} for number, one in enumerate(rounds)]
    return compare(default, other)


STEADY = (1.0, 0.99, 1.02, 1.01, 0.98)
CLEAR = (1.3, 1.2, 1.25, 1.4, 1.1)


@pytest.mark.parametrize(
    ("figures", "better", "worse", "wins"),
    [
        ({"a": CLEAR, "b": STEADY}, {"a"}, set(), True),
        ({"a": STEADY, "b": STEADY}, set(), set(), False),
        ({"a": (1.5, 1.6, 0.9, 1.7, 1.4)}, set(), set(), False),  # not in every round: it may be noise
        ({"a": (1.04, 1.03, 1.04, 1.02, 1.04)}, set(), set(), False),  # in every round, but hardly
        ({"a": CLEAR, "b": (0.8, 0.9, 0.85, 0.9, 0.88)}, {"a"}, {"b"}, False),  # a win here and a loss there
        ({"a": CLEAR, "b": (0.8, 1.2, 0.85, 1.1, 0.9)}, {"a"}, {"b"}, False),  # a loss need not be certain
        ({"a": CLEAR, "b": (0.97, 0.96, 0.97, 0.96, 0.98)}, {"a"}, set(), True),  # a loss that does not matter
    ],
)
def test_what_is_clear(figures: dict[str, Sequence[float]], better: set[str], worse: set[str], wins: bool) -> None:
    comparison = against_default(**figures)
    assert comparison.better == better
    assert comparison.worse == worse
    assert best([("it", comparison)]) == ("it" if wins else None)


def test_the_best_of_several() -> None:
    modest, great = against_default(a=CLEAR, b=STEADY), against_default(a=CLEAR, b=CLEAR)
    costly = against_default(a=[9.0] * 5, b=[0.5] * 5)
    assert best({"modest": modest, "great": great, "costly": costly}.items()) == "great"
    assert best([]) is None


def test_the_same_figure_has_to_be_better_again() -> None:
    one, other = against_default(a=CLEAR, b=STEADY), against_default(a=STEADY, b=CLEAR)
    assert confirm([("it", frozenset("a"), one)]) == "it"
    assert confirm([("it", frozenset("a"), other)]) is None
    assert confirm([("alone", frozenset("a"), one), ("both", frozenset("ab"), against_default(a=CLEAR, b=CLEAR))]) == (
        "both"
    )


# ---- the table ----


def test_the_table_has_our_defaults() -> None:
    for name, option in OPTIONS.items():
        assert option.config(option.default) == {name: option.default}
        if name in DEFAULT_OPTIONS:
            ours = DEFAULT_OPTIONS[name]
            if _memory_units(ours) is None:
                assert option.default == ours
            else:
                assert _memory_units(option.default) == _memory_units(ours)
        else:
            assert option.of_ucx is None


@pytest.mark.parametrize("name", OPTIONS)
def test_this_ucx_takes_all_of_the_table(name: str) -> None:
    option = OPTIONS[name]
    for value in [*option.values, *([option.of_ucx] if option.of_ucx else [])]:
        with ucp.open_context(options.config_of([(name, value)])):
            pass


def test_larger_segments_come_with_room_for_them() -> None:
    """Else they overrun the receiver's memory."""
    for value in OPTIONS["TCP_TX_SEG_SIZE"].values:
        config = options.config_of([("TCP_TX_SEG_SIZE", value)])
        assert config is not None
        sent, received = (_memory_units(config.get(f"TCP_{way}_SEG_SIZE", "64k")) or 0 for way in ("TX", "RX"))
        assert 0 < sent <= received


@pytest.mark.parametrize("asked", [[["TLS", "tcp"]], [["RNDV_THRESH", "7"]], [["RNDV_THRESH", "16k"], ["\x1b[2J", ""]]])
async def test_nothing_else_can_be_asked_for(asked: Any) -> None:
    with trio.fail_after(LIMIT):
        async with open_session() as client:
            await ends.tell(client.connection, {"open": asked})
            answer = await ends.hear(client.connection, "port", "closed")
            assert "is not among the options and values" in answer["why"]
            await client.run_next(ends.Kind.LATENCY, 8, 3)  # it serves on


# ---- candidates ----


@asynccontextmanager
async def open_session(worker: ucp.Worker | None = None, host: str = "127.0.0.1") -> AsyncIterator[ends.Client]:
    """A client that the server lets measure, and that server, in this process."""
    async with trio.open_nursery() as nursery:
        turn = trio.Lock()

        async def handle(connection: trio_ucx.Connection) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await ends.serve(connection, turn)

        async def listen(task_status: trio.TaskStatus[Any]) -> None:
            await trio_ucx.serve_ucx(handle, 0, host=host, worker=worker, task_status=task_status)

        [listener] = await nursery.start(listen)
        async with trio_ucx.connect((host, listener.address[1]), worker=worker) as connection:
            client = ends.Client(connection)
            assert (await client.introduce())["tune"] == ends.TUNING
            yield client
        nursery.cancel_scope.cancel()


CHOICES = [("TCP_TX_SEG_SIZE", "256k"), ("RNDV_THRESH", "16k")]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_candidates_have_their_options(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Mapping[str, str]] = []
    open_worker = ends.open_worker

    def recording(config: dict[str, str]) -> Any:
        opened.append(config)
        return open_worker(config=config)

    monkeypatch.setattr(ends, "open_worker", recording)
    base = {"TLS": "tcp", **({"TCP_AF_PRIO": "inet6,inet"} if host == "::1" else {})}
    with trio.fail_after(LIMIT):
        async with ucp.open_worker(config=base) as worker, open_session(worker, host) as client:
            async with client.candidate(CHOICES) as candidate:
                for kind in ends.Kind:
                    await candidate.run_next(kind, 100_000, 3)
                assert {transport.name for transport in candidate.connection.endpoint.transports} == {"tcp"}
            await client.run_next(ends.Kind.LATENCY, 8, 3)
    wanted = {**base, "TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k", "RNDV_THRESH": "16k"}
    assert opened == [wanted, wanted]  # ours and the server's


async def test_options_that_ucx_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = options.Option("NO_SUCH_OPTION", "", options.same("NO_SUCH_OPTION", "1"))
    monkeypatch.setitem(OPTIONS, "NO_SUCH_OPTION", wrong)  # type: ignore[arg-type]
    with trio.fail_after(LIMIT):
        async with open_session() as client:
            with pytest.raises(CandidateError, match="does not know an option 'NO_SUCH_OPTION'"):
                async with client.candidate([("NO_SUCH_OPTION", "1")]):
                    raise AssertionError("it was opened")
            await ends.tell(client.connection, {"open": [["NO_SUCH_OPTION", "1"]]})  # the server's UCX
            answer = await ends.hear(client.connection, "port", "closed")
            assert "does not know an option 'NO_SUCH_OPTION'" in answer["why"]
            await client.run_next(ends.Kind.LATENCY, 8, 3)


async def test_a_client_that_asks_and_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "CANDIDATE_PATIENCE", 0.1)
    with trio.fail_after(LIMIT):
        async with open_session() as client:
            await ends.tell(client.connection, {"open": CHOICES})
            assert "port" in await ends.hear(client.connection, "port")
            assert (await ends.hear(client.connection, "closed"))["why"] == "the client did not connect"
            await client.run_next(ends.Kind.LATENCY, 8, 3)


async def test_a_client_that_asks_and_leaves() -> None:
    """The server does not wait for it."""
    with trio.fail_after(LIMIT / 2):
        async with open_session() as client:
            await ends.tell(client.connection, {"open": CHOICES})
            assert "port" in await ends.hear(client.connection, "port")
            client.connection.abort()
            with Stopwatch(ends.CANDIDATE_PATIENCE / 3):
                async with trio_ucx.connect(client.connection.remote_address) as another:
                    await ends.Client(another).introduce()


async def test_a_candidate_that_breaks() -> None:
    with trio.fail_after(LIMIT):
        async with open_session() as client:
            with pytest.raises(CandidateError):
                async with client.candidate(CHOICES) as candidate:
                    await candidate.connection.ping()  # it was accepted
                    candidate.connection.abort()
                    raise trio.BrokenResourceError("made up")
            await client.run_next(ends.Kind.LATENCY, 8, 3)
            with pytest.raises(ZeroDivisionError):  # a bug is not the candidate's
                async with client.candidate(CHOICES):
                    raise ZeroDivisionError


# ---- the whole of it, without measuring ----


def speeds(figures: Mapping[str, float]) -> Callable[..., Any]:
    """A measurement that finds the default's value times these."""

    async def run_one(self: trials.Trial, client: object, candidate: trials.Candidate, seconds: float) -> None:
        await trio.lowlevel.checkpoint()
        found = {}
        for figure in self.figures:
            factor = 1.0
            for name, value in candidate.choices:
                factor *= figures.get(f"{name}={value} {figure.key}", 1.0)
            if factor < 0:
                raise CandidateError("it cannot be")
            noise = 1 + 0.001 * len(candidate.rounds)
            found[figure] = noise * (10 / factor if figure.what == "latency" else 1000 * factor)
        candidate.rounds.append(found)
        candidate.lanes = ["tcp"]

    return run_one


async def tuned(
    monkeypatch: pytest.MonkeyPatch, figures: Mapping[str, float], names: Sequence[str] | None = None
) -> report.Findings:
    monkeypatch.setattr(trials.Trial, "_run_one", speeds(figures))
    findings = report.Findings(
        {"address": "127.0.0.1:1", "trio_ucx": "0.1.0", "ucx": "1.22.0"}, [ucp.Transport("tcp", "eth0")], 0.1
    )
    nobody: Any = None
    with trio.fail_after(LIMIT):
        await tune.tune(nobody, findings, names or tune.tunable(), quiet=False)
    json.dumps(report.as_json(findings))
    return findings


async def test_defaults_that_are_fine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = await tuned(monkeypatch, {"TCP_TX_SEG_SIZE=8k bandwidth/1M": 0.5})
    assert (findings.config, findings.again) == ({}, None)
    shown = capsys.readouterr().out
    assert "It would set nothing: no other value is clearly faster" in shown
    assert "slower: bandwidth 1M" in shown
    assert "Left out: MM_ERROR_HANDLING, because messages do not go over shared memory here." in shown
    assert "Left out: MAX_RNDV_RAILS, because messages go over one lane here." in shown


async def test_a_proposal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = await tuned(monkeypatch, {"TCP_TX_SEG_SIZE=256k bandwidth/1M": 1.5, "ZCOPY_THRESH=2k latency/4k": 1.3})
    assert findings.config == {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k", "ZCOPY_THRESH": "2k"}
    shown = capsys.readouterr().out
    assert f"ucp.open_worker(config={json.dumps(findings.config)})" in shown
    assert "export UCX_TCP_TX_SEG_SIZE=256k UCX_TCP_RX_SEG_SIZE=256k UCX_ZCOPY_THRESH=2k\n" in shown
    assert "Beware: Segments of more than 64k overrun" in shown
    assert "TCP_TX_SEG_SIZE=256k ZCOPY_THRESH=2k" in shown  # together, once more
    assert "1.50 x" in shown


async def test_what_is_good_alone_and_bad_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"RNDV_THRESH=256k latency/128k": 1.5, "RNDV_SCHEME=am latency/1M": 1.2}
    # Only in the trial of what was faster are both options chosen, and a figure of the other's measured.
    findings = await tuned(monkeypatch, {**figures, "RNDV_SCHEME=am latency/128k": 0.5})
    assert findings.faster == [("RNDV_THRESH", "256k"), ("RNDV_SCHEME", "am")]
    assert findings.config == {"RNDV_THRESH": "256k"}
    shown = capsys.readouterr().out
    assert "Some of what was faster at first was not" in shown
    assert "Beware: Messages below RNDV_THRESH" in shown


async def test_options_that_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"RNDV_SCHEME=am latency/8": -1.0, "ZCOPY_THRESH=auto latency/8": -1.0}
    monkeypatch.setenv("UCX_RNDV_SCHEME", "am")
    findings = await tuned(monkeypatch, figures, ["RNDV_SCHEME", "ZCOPY_THRESH"])
    assert findings.left_out == {"ZCOPY_THRESH": "it cannot be"}
    shown = capsys.readouterr().out
    assert "not measured: it cannot be" in shown
    assert "UCX_RNDV_SCHEME=am is set in this environment" in shown


# ---- the command ----


@pytest.mark.full
def test_it_runs() -> None:
    done = run_cli("perf", "--tune", "--transports=tcp", "--options=zcopy_thresh", "--seconds=0.001", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {transport["name"] for transport in found["transports"]} == {"tcp"}
    [option] = found["options"]
    assert option["default"] == "auto"
    assert [one["name"] for one in option["values"]] == list(OPTIONS["ZCOPY_THRESH"].values)
    for one in option["values"]:
        assert one["config"] == {"ZCOPY_THRESH": one["name"]}
        assert one["transports"] == ["tcp"]
        assert len(one["rounds"]) == found["rounds"]
        assert all(value > 0 for figures in one["rounds"] for value in figures.values())
    assert set(option["values"][1]["speed"]) == {figure.key for figure in OPTIONS["ZCOPY_THRESH"].figures}
    assert found["config"].keys() <= {"ZCOPY_THRESH"}


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"it did not say {beginning}")


@pytest.mark.full
@pytest.mark.timeout(60)
def test_a_client_that_dies_in_the_middle() -> None:
    with start_cli("perf", "--listen", "127.0.0.1:0") as server:
        address = listening_address(server)
        with start_cli("perf", address, "--tune", "--transports=tcp", "--seconds=0.1") as client:
            wait_for_line(client, "This takes")
            time.sleep(0.3)  # wherever that is: some candidate is being opened, measured or closed
            client.kill()
        done = run_cli("perf", address, *QUICK, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=TIMEOUT)
        assert "Traceback" not in errors


async def test_a_server_that_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "hello", lambda: {"perf": ends.PROTOCOL, "trio_ucx": "0.0.9", "ucx": "1.22.0"})
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:

            async def handle(connection: trio_ucx.Connection) -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await ends.serve(connection, trio.Lock())

            [listener, *_] = await nursery.start(trio_ucx.serve_ucx, handle, 0)
            asked = argparse.Namespace(
                address=("127.0.0.1", listener.address[1]),
                authkey=None,
                transports=None,
                seconds=None,
                options=None,
                json=False,
            )
            with pytest.raises(PerfError, match=r"is trio_ucx 0\.0\.9, whose perf does not know this --tune: install"):
                await tune.run_tune(asked)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tune", "--sizes", "8"], "use --seconds"),
        (["--tune", "--iterations", "8"], "use --seconds"),
        (["--options", "RNDV_THRESH"], "add --tune"),
        (["--tune", "--options", "TLS"], "'TLS' is not among the options that it tries: MM_ERROR_HANDLING"),
        (["--tune", "--options", "ADAPTIVE_PROGRESS"], "is not among the options"),
        (["--tune", "--listen", "0"], "the client chooses --tune"),
        (["--options", "RNDV_THRESH", "--listen", "0"], "the client chooses --tune"),
    ],
)
def test_options_that_contradict(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["perf", *arguments])
    assert exit.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_figures_have_names() -> None:
    assert Figure("bandwidth", 2**20).key == "bandwidth/1M"
    assert len({figure.key for figure in OPTIONS["RNDV_THRESH"].figures}) == len(OPTIONS["RNDV_THRESH"].figures)
