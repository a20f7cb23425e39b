"""The benchmarks: their calculations, and that they run."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))  # at the end: what is installed is tested

from benchmarks import (  # noqa: E402
    busy_cores,
    chains,
    compare,
    crowded,
    defaults,
    marks,
    microseconds,
    report,
    runner,
    stats,
    steps,
    trials,
)
from benchmarks.contenders import Contender, all_contenders, load, ours_many, ours_watched, perftest  # noqa: E402
from benchmarks.jobs import BY_SIZE, Batch, Job, pattern  # noqa: E402
from benchmarks.options import OPTIONS, Figure  # noqa: E402
from trio_ucx import ucp  # noqa: E402
from trio_ucx._cli.idle_cores import busy_shares  # noqa: E402
from trio_ucx.ucp._context import _memory_units  # noqa: E402
from trio_ucx.ucp._quirks.default_options import DEFAULT_OPTIONS  # noqa: E402
from trio_ucx.ucp._quirks.releases import WELL_CONFIGURABLE  # noqa: E402

configurable = pytest.mark.skipif(ucp.library().version < WELL_CONFIGURABLE, reason="this UCX is hardly configurable")


def test_figures_of_round_trips() -> None:
    figures = stats.of_round_trips([2000] * 98 + [4000, 200_000])
    assert figures == {"median_us": 1, "mean_us": pytest.approx(2), "p99_us": 2}
    assert stats.of_round_trips([3000]) == {"median_us": 1.5, "mean_us": 1.5, "p99_us": 1.5}


def test_percentiles() -> None:
    assert stats.percentile(list(range(1, 101)), 0.99) == 99
    assert stats.percentile([7], 0.5) == 7


def test_medians_of_rounds() -> None:
    assert stats.of_rounds([{"a": 1}, {"a": 5, "b": 2}, {"a": 2}]) == {"a": 2, "b": 2}
    assert stats.of_rounds([]) == {}


def test_counts_follow_the_time() -> None:
    assert stats.next_count(100, 0.1, 1) == 1000
    assert stats.next_count(1, 10, 1) == 1
    assert stats.next_count(1, 0, 1, most=50) == 50


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0712, "0.0712"), (7.118, "7.12"), (712.4, "712"), (71234, "71,234")]
)
def test_three_figures(value: float, text: str) -> None:
    assert stats.scaled(value) == text


def test_patterns_differ_by_place_and_seed() -> None:
    assert len(pattern(100_000, 1)) == 100_000
    assert pattern(8, 1) != pattern(8, 2)
    assert pattern(8, 1) != bytes(8)
    batch = Batch(Job("rate", 8, "plain"), 10, 3)
    assert Batch.from_order(json.loads(json.dumps(batch.order()))) == batch


def verdict(ours: float | None, theirs: float | None, bound: str = "at most") -> marks.Verdict:
    pick, other = marks.Pick("a", Job("latency", 8), "median_us"), marks.Pick("b", Job("latency", 8), "median_us")
    values = {"a": ours, "b": theirs}
    return marks.Mark("title", pick, other, bound, 0.4).check(lambda asked: values[asked.contender])


def test_marks() -> None:
    assert verdict(1, 4).met is True
    assert verdict(2, 4).met is False
    assert verdict(2, 4, "at least").met is True
    assert verdict(None, 4).met is None
    assert verdict(1, None).met is None
    assert (verdict(1, 4).measured, verdict(1, 4).mark) == ("0.250 x", "at most 0.4 x")


@pytest.mark.parametrize(("bound", "best", "ratio"), [("at most", "b", 2), ("at least", "c", 0.5)])
def test_a_mark_takes_the_best_of_several_others(bound: str, best: str, ratio: float) -> None:
    job, values = Job("latency", 8), {"a": 4.0, "b": 2.0, "c": 8.0}
    ours, *others = (marks.Pick(name, job, "median_us") for name in ("a", "b", "c", "missing"))
    mark = marks.Mark("title", ours, tuple(others), bound, 1)
    found = mark.check(lambda asked: values.get(asked.contender))
    assert (found.theirs, found.value, found.met) == (best, ratio, False)
    found = mark.check(lambda asked: 4.0 if asked is ours else None)
    assert (found.theirs, found.value, found.met) == ("b | c | missing", None, None)


def test_the_worst_of_several_marks_is_shown() -> None:
    picks = [marks.Pick(name, Job("latency", 8), "median_us") for name in ("a", "b", "c", "missing")]
    worst = marks.Worst("worst", tuple(marks.Mark(pick.contender, pick, None, "at most", 3, "us") for pick in picks))
    values = {"a": 1.0, "b": 4.0, "c": 2.0}
    assert worst.check(lambda asked: values.get(asked.contender)).title == "worst, b"
    assert worst.check(lambda asked: None).title == "worst"


def test_every_mark_asks_for_something_that_is_measured() -> None:
    measured = {
        (one.name, job)
        for one in [*all_contenders(), *ours_many.contenders((1, 1000), ("tcp", "shm"))]
        for job in one.jobs
    }
    for mark in marks.all_marks():
        for pick in mark.picks:
            assert (pick.contender, pick.job) in measured, pick


def test_contenders_have_names_of_their_own() -> None:
    names = [one.name for one in all_contenders()]
    assert len(set(names)) == len(names)


def test_perftest_prints_figures() -> None:
    text = (
        "iterations,50.0_percentile_lat,avg_lat,overall_lat,...\n      1000,4.757,4.703,4.710,1.62,1.62,212619,212619\n"
    )
    assert perftest.parse(text) == {"percentile_us": 4.757, "overall_us": 4.71}
    with pytest.raises(RuntimeError, match="no figures"):
        perftest.parse("nothing\n")


def test_who_else_uses_the_cores(capsys: pytest.CaptureFixture[str]) -> None:
    before = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 0 100 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 5\n"
    after = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 125 0 0 175 0 0 0 0 0 0\ncpu1 90 0 0 10 0 0 0 0 0 0\nintr 5\n"
    shares = busy_shares(before, after)
    assert shares == {0: 0.25, 1: 0.9}
    assert busy_cores.busiest_percent(shares, (0, None)) == 90
    assert busy_cores.busiest_percent(shares, (0,)) == 25
    busy_cores.warn(1)
    assert capsys.readouterr().err == ""
    busy_cores.warn(25)
    assert capsys.readouterr().err.startswith("Other programs use 25 % of a core")


def test_names_are_chosen_by_patterns() -> None:
    chosen = compare.matcher(["trio stream", "*raw tcp"])
    assert chosen("trio stream tcp")
    assert chosen("trio_ucx.ucp raw tcp")
    assert not chosen("trio_ucx default tcp")
    assert compare.matcher(None)("anything")


def rows() -> runner.Rows:
    job = Job("latency", 8)
    good = runner.Row("trio stream tcp", "tcp", job, [{"median_us": 30, "mean_us": 31, "p99_us": 60}])
    bad = runner.Row("trio_ucx default tcp", "tcp", job, [], ["it [broke]"])
    return {(row.contender, job): row for row in (good, bad)}


def test_the_report_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [Contender("absent tcp", "tcp", "absent", (), "no_such_package", "pip install absent")]
    verdicts = marks.verdicts({key: row.figures for key, row in rows().items()})
    report.show(rows(), verdicts, missing, report.console())
    shown = capsys.readouterr().out
    assert "30.0" in shown
    assert "1 of 1 rounds failed: it [broke]" in shown
    assert "not installed: absent tcp (pip install absent)" in shown
    assert f"{len(verdicts)} not measured" in shown
    json.dumps(report.as_json(rows(), verdicts, missing, {}))
    assert not missing[0].installed


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots are drawn with matplotlib")
    from benchmarks import plots

    by_size = {("a tcp", job): runner.Row("a tcp", "tcp", job, [{"median_us": 1}]) for job in BY_SIZE}
    found = report.as_json({**rows(), **by_size}, [], [], {})["results"]
    drawn = plots.draw(found, tmp_path)
    assert [path.name for path in drawn] == ["latency-8.svg", "latency-by-size.svg"]
    assert all("<svg" in path.read_text() for path in drawn)


@pytest.mark.full
def test_it_runs(tmp_path: Path) -> None:
    """From a checkout, as a file: two contenders, one of which this trio_ucx may not know."""
    file = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "--rounds=1", "--seconds=0.05"]
    command += ["--only=trio_ucx default tcp", "--only=trio_ucx spin=0 tcp", "--only=trio stream tcp"]
    command += ["--figures=latency/8", "--figures=rate/8/plain", f"--json={file}", f"--against={ROOT}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results: dict[tuple[str, str, str], Any] = {
        (one["contender"], one["kind"], one["way"]): one for one in json.loads(file.read_text())["results"]
    }
    assert "now / before" in ended.stdout
    assert results["trio_ucx default tcp, before", "latency", ""]["medians"]
    latency = results["trio_ucx default tcp", "latency", ""]
    assert latency["lanes"] == ["tcp"]
    assert 0 < latency["medians"]["median_us"] <= latency["medians"]["p99_us"]
    assert results["trio_ucx default tcp", "rate", "plain"]["medians"]["messages_s"] > 0
    assert results["trio stream tcp", "latency", ""]["medians"]["median_us"] > 0
    for one in results.values():
        assert one["rounds"] or "not supported" in one["errors"][0]
    assert "what trio_ucx has to reach" in ended.stdout


# ---- UCX's options ----


def against_default(**figures: Sequence[float]) -> trials.Comparison:
    """Made-up ratios; the default's own speeds differ from round to round, as they do."""
    rounds = [dict(zip(figures, ratios, strict=True)) for ratios in zip(*figures.values(), strict=True)]
    default = [dict.fromkeys(figures, 100 * (1 + number)) for number in range(len(rounds))]
    other = [{name: default[number][name] * ratio for name, ratio in one.items()} for number, one in enumerate(rounds)]
    return trials.compare(default, other)


STEADY = (1.0, 0.99, 1.02, 1.01, 0.98)
CLEAR = (1.3, 1.2, 1.25, 1.4, 1.1)


@pytest.mark.parametrize(
    ("figures", "better", "worse"),
    [
        ({"a": CLEAR, "b": STEADY}, {"a"}, set()),
        ({"a": STEADY, "b": STEADY}, set(), set()),
        ({"a": (1.5, 1.6, 0.9, 1.7, 1.4)}, set(), set()),  # not in every round: it may be noise
        ({"a": (1.04, 1.03, 1.04, 1.02, 1.04)}, set(), set()),  # in every round, but hardly
        ({"a": CLEAR, "b": (0.8, 0.9, 0.85, 0.9, 0.88)}, {"a"}, {"b"}),  # a win here and a loss there
        ({"a": CLEAR, "b": (0.8, 1.2, 0.85, 1.1, 0.9)}, {"a"}, {"b"}),  # a loss need not be certain
        ({"a": CLEAR, "b": (0.97, 0.96, 0.97, 0.96, 0.98)}, {"a"}, set()),  # a loss that does not matter
    ],
)
def test_what_is_clear(figures: dict[str, Sequence[float]], better: set[str], worse: set[str]) -> None:
    comparison = against_default(**figures)
    assert comparison.better == better
    assert comparison.worse == worse


def test_the_table_of_a_trial() -> None:
    """Latencies count inversely; a candidate that uses other lanes says so."""
    figures = (Figure("latency", 8), Figure("bandwidth", 2**20))
    ours, others = trials.Candidate("64k", {"X": "64k"}), trials.Candidate("8k", {"X": "8k"})
    ours.rounds = [dict(zip(figures, (10.0 + number, 1000.0), strict=True)) for number in range(5)]
    others.rounds = [dict(zip(figures, (2 * (10.0 + number), 1500.0), strict=True)) for number in range(5)]
    ours.lanes, others.lanes = ["sysv"], ["tcp"]
    title, names, default, noise, other = trials.trial_text(trials.Trial("X: what", figures, ours, others)).splitlines()
    assert (title, names.split()) == ("X: what", ["latency", "8", "bandwidth", "1M"])
    assert default.split() == ["64k", "(default)", "12.00", "us", "1,000", "MB/s"]
    assert noise.split() == ["its", "rounds", "differ", "by", "33%", "0%"]
    assert other.split(maxsplit=5) == ["8k", "0.50", "x", "1.50", "x", other[other.index("faster") :]]
    assert other.endswith("faster: bandwidth 1M; slower: latency 8 (over tcp)")


@configurable
def test_the_options_have_our_defaults() -> None:
    for name, option in OPTIONS.items():
        units = _memory_units(DEFAULT_OPTIONS[name])
        assert option.ours == DEFAULT_OPTIONS[name] if units is None else _memory_units(option.ours) == units
        assert len({figure.key for figure in option.figures}) == len(option.figures)


@configurable
@pytest.mark.parametrize("name", OPTIONS)
def test_this_ucx_takes_both_values(name: str) -> None:
    for value in (OPTIONS[name].ours, OPTIONS[name].of_ucx):
        with ucp.open_context({name: value}):
            pass


@configurable
async def test_both_ends_have_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the environment has others."""
    monkeypatch.setenv("UCX_MM_ERROR_HANDLING", "n")
    for value, shared_memory in (("y", True), ("n", False)):
        with trio.fail_after(60):
            async with trials.open_client("all", {"MM_ERROR_HANDLING": value}) as client:
                assert client.connection.worker.context.config["MM_ERROR_HANDLING"] == value
                assert client.connection.shared_memory is shared_memory


@configurable
@pytest.mark.full
def test_our_defaults_against_ucxs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(defaults, "OPTIONS", {"ADAPTIVE_PROGRESS": defaults.OPTIONS["ADAPTIVE_PROGRESS"]})
    monkeypatch.setattr(trials, "ROUNDS", 2)
    file = tmp_path / "found.json"
    assert defaults.main(["--transports=tcp", "--seconds=0.001", f"--json={file}"]) == 0
    shown = capsys.readouterr().out
    assert "TLS=tcp: tcp" in shown
    assert "Not about speed" in shown and "TCP_CM_REUSEADDR" in shown
    alone, together = json.loads(file.read_text())["tcp"]
    assert [one["name"] for one in alone["values"]] == ["n", "y"]
    assert [one["config"] for one in alone["values"]] == [{"ADAPTIVE_PROGRESS": "n"}, {"ADAPTIVE_PROGRESS": "y"}]
    assert [one["name"] for one in together["values"]] == ["trio_ucx's", "UCX's"]
    for one in alone["values"] + together["values"]:
        assert len(one["rounds"]) == 2 and one["transports"] == ["tcp"]
        assert all(value > 0 for figures in one["rounds"] for value in figures.values())
    keys = {figure.key for figure in OPTIONS["ADAPTIVE_PROGRESS"].figures}
    assert set(alone["speed"]) == set(together["speed"]) == keys


@configurable
def test_options_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    option = defaults.Option("NO_SUCH_OPTION", "made up", "1", "2")
    monkeypatch.setattr(defaults, "OPTIONS", {option.name: option})
    assert defaults.main(["--transports=tcp", "--seconds=0.001"]) == 0
    assert capfd.readouterr().out.count("not measured: UCX does not know an option 'NO_SUCH_OPTION'") == 2


@pytest.mark.full
def test_where_the_microseconds_go(tmp_path: Path) -> None:
    """Every layer and every step has its figure, and the tables get into the document."""
    file, document = tmp_path / "found.json", tmp_path / "speed.md"
    document.write_text(f"before\n{microseconds.BEGIN}\nold\n{microseconds.END}\nbehind\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "microseconds.py"), "--rounds=1", "--seconds=0.02"]
    command += ["--transports=tcp", f"--json={file}", f"--markdown={document}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(file.read_text())
    half = {one["contender"]: one["medians"]["median_us"] for one in found["results"] if one["kind"] == "latency"}
    for key in [*microseconds.LADDER, *microseconds.BESIDE, *(f"path {key}" for key in microseconds.WORKERS)]:
        assert half[f"{key} tcp"] > 0
    assert half["C tcp"] < half["yield_interval=100e-6 tcp"], "Python takes longer than C alone"
    prices = found["steps"]
    assert all(
        prices[f"tcp: {name}"] > 0 for name in ("send, C", "delivery, Python", "await send", "await receive_into")
    )
    for size in steps.CHAIN_SIZES:
        chain = {name: prices[f"tcp: chain of {size}, {name}"] for name in ("run", "values()", "error_count")}
        assert 0 < chain["error_count"] < chain["values()"] < chain["run"], "what came of it costs less than the run"
    assert prices["Trio: checkpoint_if_cancelled"] < prices["Trio: schedule point"]
    assert prices["16 MiB to the kernel's: page faults"] > prices["16 MiB to memory in use: page faults"]
    written = document.read_text()
    assert written.startswith("before\n") and written.endswith("behind\n") and "old" not in written
    for layer in [*microseconds.LADDER.values(), *microseconds.BESIDE.values()]:
        assert f"| {layer} |" in written
    assert all(name in ended.stdout for name in steps.PASSES)


@pytest.mark.full
def test_polling_where_there_is_no_core_to_spare(capsys: pytest.CaptureFixture[str]) -> None:
    protocols = all(importlib.util.find_spec(name) for name in ("trio_websocket", "httpx", "hypercorn"))
    assert crowded.main(["--transports=tcp", "--rounds=1", "--seconds=0.02"]) == 0
    shown = capsys.readouterr().out
    compared, _, marks_shown = shown.partition("what trio_ucx has to reach")
    for situation in crowded.SITUATIONS:
        assert len([line for line in compared.splitlines() if situation.name in line and "tcp" in line]) == 2
        of_this = [line for line in marks_shown.splitlines() if f", {situation.name} " in line]
        assert len(of_this) == (0 if situation.busy_tasks else 7 if situation.protocols else 5)
        echoes = [line for line in of_this if " request, " not in line]
        assert not any("not measured" in line for line in (of_this if protocols else echoes))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="what chains are compared with is compiled")
def test_chains_beside_await_and_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert chains.main(["--transports=shm", "--rounds=1", "--seconds=0.001", f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert len(found["results"]) == len(chains.HOW) * len(chains.JOBS)
    for one in found["results"]:
        assert one["medians"]["step_us"] > 0 and not one["errors"]
    assert all(one["met"] is not None for one in found["marks"])
    assert "chain / C" in capsys.readouterr().out


def test_every_step_of_a_watched_message_is_told() -> None:
    """What is watched are private names: should they change, a table would lose its rows."""
    [watched] = [one for one in microseconds.contenders("tcp") if one.name == "path yield_interval=100e-6 tcp"]
    [row] = runner.run(runner.Plan([watched], 1, 0.02, (None, None))).values()
    assert not row.errors
    assert {f"{name}_us" for name in ours_watched.STEPS} <= set(row.figures)


def test_a_contender_that_fails_is_an_error_row() -> None:
    """Never a hang, never silently missing; the next round tries again, but not for ever."""
    broken = Contender("broken tcp", "tcp", "ours", (Job("latency", 8),), options={"tls": "nonsense"})
    found = runner.run(runner.Plan([broken], 3, 0.01, (None, None)))
    [row] = found.values()
    assert not row.rounds
    assert len(row.errors) == runner.PATIENCE
    assert load("ours").LOOP == "trio"
