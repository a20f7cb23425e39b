"""The examples of trio_ucx.mesh, with ranks in processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import programs

from .ranks import ranks

pytest.importorskip("numpy")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^loss (\S+),", output, re.MULTILINE)]


def test_program_of_the_documentation(tmp_path: Path) -> None:
    [text] = programs("docs/reference/mesh.md")
    program = tmp_path / "program.py"
    program.write_text(text)
    with ranks(3, tmp_path, program) as started:
        assert started.finish() == ""


def test_ring_all_reduce(tmp_path: Path) -> None:
    with ranks(3, tmp_path, EXAMPLES / "ring_all_reduce.py") as started:
        output = started.finish()
    assert re.findall(r"rank (\d): (\w+), 32 MB", output) == [("0", "right"), ("1", "right"), ("2", "right")]


def test_heat_equation(tmp_path: Path) -> None:
    with ranks(4, tmp_path, EXAMPLES / "heat_equation.py", "--side", 50, "--steps", 200, "--check") as started:
        output = started.finish()
    assert re.fullmatch(r"50 x 50 cells, 4 ranks: [\d,]+ us a step\nas computed alone\n", output), output


def test_a_killed_rank_comes_back(tmp_path: Path) -> None:
    with ranks(3, tmp_path, EXAMPLES / "rejoining.py", "--kill-at", 60) as started:
        assert started[1].finish() == -9
        started.start(1)
        output = started.finish()
    for rank in range(3):
        assert re.search(rf"^rank {rank} goes on at step (59|60|61)$", output, re.MULTILINE), output
    found = re.findall(r"^rank (\d) has finished after 200 steps, loss (\S+)$", output, re.MULTILINE)
    assert [rank for rank, _ in found] == ["0", "1", "2"] and len({loss for _, loss in found}) == 1
    assert float(found[0][1]) < 1e-4


def test_training(tmp_path: Path) -> None:
    with ranks(3, tmp_path, EXAMPLES / "parameter_server.py", "--seconds", 2.5) as started:
        found = losses(started.finish())
    assert len(found) >= 2 and found[-1] < 0.95 * found[0]  # how many batches that are depends on the machine


@pytest.mark.cut_off
def test_training_goes_on_without_a_worker_and_with_its_replacement(tmp_path: Path) -> None:
    with ranks(4, tmp_path, EXAMPLES / "parameter_server.py", "--seconds", 300) as started:
        server, all_work = started[0], r"batches of rank 1: [1-9]\d*, rank 2: [1-9]\d*, rank 3: [1-9]"
        server.wait_output(all_work)
        started[2].kill()
        server.wait_output(
            r"^going on without rank 2: its process has ended\n(.*\n)*.*batches of rank 1: \d+, rank 3: "
        )
        seen = len(server.output)
        started.start(2)
        server.wait_output(all_work, seen)
        found = losses(server.output)
        assert found[-1] < found[0] / 2
        assert [rank.process.poll() for rank in started.values()] == [None] * 4
