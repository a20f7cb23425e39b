"""The simulation in ``benchmarks/meeting.py``: its counts by hand, and that every rank is welcomed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))  # at the end: what is installed is tested

from benchmarks import meeting  # noqa: E402

BYTES = replace(meeting.Parameters(), join=150, row=20, welcome=60, where=40, at=60, lost=100)
#: Time costs nothing: only counts remain.
AT_ONCE = replace(BYTES, spread=0)


def meet(
    scheme: str, size: int, parameters: meeting.Parameters = AT_ONCE, fan_out: int = 2, seed: int = 1
) -> meeting.Result:
    return meeting.Meeting(scheme, size, parameters, fan_out, seed).run()


@pytest.mark.parametrize(
    ("scheme", "messages", "size", "rounds", "connections", "sent"),
    [
        # 3 JOIN; 3 WELCOME with 4 rows.
        ("star", 6, 3 * 150 + 3 * (60 + 4 * 20), 2, 3, 3 * (60 + 4 * 20)),
        # 3 JOIN; 3 WELCOME without; 2 partners for each of 3 ranks.
        ("lookup", 6 + 3 * 2 * 2, 3 * 150 + 3 * 60 + 6 * (40 + 60), 2 + 4, 3, 3 * 60 + 6 * 60),
        # 3 joins 1, which passes 2 JOINs on; 2 joins 0. WELCOME goes to 1 and 2, and from 1 to 3.
        ("tree", 6, (150 + 2 * 150 + 150) + 3 * (60 + 4 * 20), 4, 2, 2 * 150 + 60 + 4 * 20),
    ],
)
def test_counts_of_four_ranks(scheme: str, messages: int, size: int, rounds: int, connections: int, sent: int) -> None:
    found = meet(scheme, 4)
    assert (found.messages, found.message_bytes) == (messages, size)
    assert (found.rounds, found.connections, found.sent_bytes) == (rounds, connections, sent)
    assert found.lost_messages == (1 if scheme == "tree" else 2)


def test_time_of_two_ranks_by_hand() -> None:
    """A handshake of 4 frames and 3 answers, JOIN, WELCOME."""
    p = AT_ONCE
    handshake = p.latency + p.handshake_cpu + p.first_cpu + 6 * p.latency
    welcome = p.welcome + 2 * p.row
    messages = (
        4 * p.message_cpu + 2 * (p.join + welcome) * p.byte_cpu + (p.join + welcome) / p.bandwidth + 2 * p.latency
    )
    assert meet("star", 2).welcomed == pytest.approx(handshake + p.latency + messages)


@pytest.mark.parametrize("scheme", meeting.SCHEMES)
@pytest.mark.parametrize("size", [1, 2, 3, 33, 300])
def test_every_rank_is_welcomed(scheme: str, size: int) -> None:
    found = meet(scheme, size, BYTES, fan_out=4)
    assert found.welcomed_ranks == size
    assert found.welcomed <= found.ready < 20
    joins = welcomes = size - 1
    lookups = (size - 1) * (size - 1).bit_length() if scheme == "lookup" else 0
    assert found.messages == joins + welcomes + 2 * lookups
    assert found.connections == (
        min(size - 1, 5) if scheme == "tree" and size > 5 else min(size - 1, found.connections)
    )


@pytest.mark.parametrize("scheme", meeting.SCHEMES)
def test_ranks_that_must_try_again_are_welcomed(scheme: str) -> None:
    """There is room for few: the kernel drops clients, and others wait longer than they may."""
    crowded = replace(BYTES, exchanges=4, kernel_queue=8, handshake_cpu=20e-3, connect_timeout=1.0, spread=0.5)
    found = meet(scheme, 100, crowded, fan_out=50)
    assert found.timeouts > 0
    assert found.attempts > 100
    assert found.welcomed_ranks == 100
    assert found.lost_seconds < 1


def test_a_meeting_that_never_succeeds_says_so() -> None:
    found = meet("star", 4, replace(AT_ONCE, connect_timeout=1e-3))
    assert found.welcomed == found.ready == float("inf")
    assert found.welcomed_ranks < 4


@pytest.mark.parametrize("scheme", meeting.SCHEMES)
def test_it_is_deterministic(scheme: str) -> None:
    assert meet(scheme, 50, BYTES) == meet(scheme, 50, BYTES)
    assert meet(scheme, 50, BYTES).welcomed != meet(scheme, 50, BYTES, seed=2).welcomed


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert meeting.main(["--ranks=4,5", "--fan-out=2", "--set=row=30", "--markdown", f"--json={file}"]) == 0
    shown = capsys.readouterr().out
    for source in ("measured", "assumed", "in the code", "--set"):
        assert source in shown
    found = json.loads(file.read_text())
    assert found["parameters"]["row"] == 30
    assert [(one["scheme"], one["ranks"]) for one in found["results"]] == [
        (scheme, size) for scheme in meeting.SCHEMES for size in (4, 5)
    ]


@pytest.mark.parametrize("argument", ["--set=rows=3", "--set=row", "--set=row=many", "--schemes=ring", "--fan-out=0"])
def test_wrong_arguments_are_refused(argument: str) -> None:
    with pytest.raises(SystemExit):
        meeting.parse([argument])


@pytest.mark.full
def test_what_is_measured() -> None:
    found = meeting.measure()
    assert set(found) == {
        one.name for one in meeting.fields(meeting.Parameters) if one.metadata["source"] == "measured"
    }
    assert all(value > 0 for value in found.values())
    assert found["descriptors"] >= 2
