"""SIGINT at every point of a scenario at which CPython looks for signals, one run for each.

Every run must end by KeyboardInterrupt, whatever Trio makes of the point, with no live handle, and in time. A
KeyboardInterrupt that is raised where nobody gets it, as in a destructor, is lost: the program would go on.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import TRANSPORTS, Rounds

from .interrupted_program import LIMIT, SCENARIOS

PROGRAM = Path(__file__).with_name("interrupted_program.py")
#: Runs of one program. After a failure there is so much less to look at.
RUNS = 50

cases = [pytest.param(name, transports, id=f"{name}-{transports}") for name in SCENARIOS for transports in TRANSPORTS]


def run(name: str, transports: str, points: list[int], protected: bool) -> Iterator[tuple[str | None, int]]:
    """Runs a scenario once for each point; yields what is to be checked of each run, and how many points it has had."""
    command = [sys.executable, "-W", "error", "-X", "faulthandler", str(PROGRAM), name, transports]
    command.append(json.dumps([[point, protected] for point in points]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=len(points) * 5 + LIMIT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"it hung, or crashed, at the point {lines[-1][0]}: {done.stderr}"
    for (point, _), (ended, left, lost, where, count) in zip(lines[::2], lines[1::2], strict=True):
        ended_well = "KeyboardInterrupt" if where is not None else "returned"
        if sys.version_info >= (3, 13) and "Nursery stack corrupted" in ended:
            continue  # the profiler interrupts between __aenter__ and the block, where Trio's nurseries are lost, too
        assert [ended, left, lost] == [ended_well, {}, []], f"point {point}, at {where}: {done.stderr}"
        yield where, count


@pytest.mark.sample(1)
@pytest.mark.parametrize("protected", [False, True], ids=["raised", "deferred"])
@pytest.mark.parametrize(("name", "transports"), cases)
@pytest.mark.timeout(3600)
def test_interrupted_at_every_point(
    name: str, transports: str, protected: bool, rounds: Rounds, chance: random.Random
) -> None:
    [(_, count)] = run(name, transports, [0], protected)
    assert count > 20
    # Where Trio defers it, it is raised at one of the main task's checkpoints, of which there are few.
    few = 5 if protected else 10
    points = list(range(1, count + 1))
    chosen = chance.sample(points, min(count, rounds(few, 500 if protected else count)))
    points = sorted({*chosen, chance.randrange(1, count // 4)})  # runs differ: the last points are not reached in each
    interrupted = 0
    for start in range(0, len(points), RUNS):
        interrupted += sum(
            where is not None for where, _ in run(name, transports, points[start : start + RUNS], protected)
        )
    assert interrupted
