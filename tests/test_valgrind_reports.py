"""Which reports of memcheck ``tools/valgrind_reports.py`` takes for faults of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "valgrind_reports.py"
OURS = "/somewhere/trio_ucx/_native/_ucx.abi3.so"
PYTHON = "/usr/lib/libpython3.11.so.1.0"
UCX = "/somewhere/libucx/lib/libucp.so.0"
MALLOC = "/usr/libexec/valgrind/vgpreload_memcheck-amd64-linux.so"


def stack(*libraries: str) -> str:
    frames = (f"<frame><obj>{library}</obj><fn>in {Path(library).name}</fn></frame>" for library in libraries)
    return f"<stack>{''.join(frames)}</stack>"


def report(access: str, origin: str = "") -> str:
    return f"<error><kind>k</kind><what>Invalid read</what>{access}<auxwhat>made here</auxwhat>{origin}</error>"


def run(path: Path, *reports: str, end: str = "</valgrindoutput>") -> tuple[int, str]:
    path.write_text(f"<?xml version='1.0'?><valgrindoutput>{''.join(reports)}{end}")
    done = subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True, timeout=30, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("access", "origin"),
    [
        (stack(OURS, PYTHON), ""),
        (stack(MALLOC, OURS, PYTHON), ""),  # a memcpy for us
        (stack(PYTHON), stack(MALLOC, OURS)),  # memory that we allocated and have not written
    ],
)
def test_reports_that_concern_us(tmp_path: Path, access: str, origin: str) -> None:
    status, output = run(tmp_path / "1.xml", report(access, origin), report(stack(PYTHON)))
    assert status == 1
    assert "Invalid read" in output and "in _ucx.abi3.so" in output
    assert output.endswith("1 reports concern our code; 1 of CPython, libc and UCX do not\n")


def test_reports_of_others(tmp_path: Path) -> None:
    others = [report(stack(PYTHON), stack(MALLOC, PYTHON)), report(stack(UCX, OURS, PYTHON), stack(MALLOC, UCX, OURS))]
    assert run(tmp_path / "1.xml", *others)[0] == 0


def test_leaks_are_left_out(tmp_path: Path) -> None:
    leak = f"<error><kind>Leak_DefinitelyLost</kind>{stack(MALLOC, OURS, PYTHON)}</error>"
    assert run(tmp_path / "1.xml", leak)[0] == 0


def test_report_of_a_killed_process(tmp_path: Path) -> None:
    """Its file has no end."""
    status, output = run(tmp_path / "1.xml", report(stack(OURS)), "<error><kind>", end="")
    assert status == 1 and output.endswith("1 reports concern our code; 0 of CPython, libc and UCX do not\n")
