"""The lab of emulated machines (``tools/lab``): what it says where it cannot run, and its list of cases."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parent.parent / "tools/lab"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can run it")
def test_says_what_it_lacks() -> None:
    done = subprocess.run([sys.executable, LAB, "rdma"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 77 and "lab: skipped: the lab needs root" in done.stderr


def test_runs_here() -> None:
    """As it does where there is hardware."""
    command, variables = (
        [sys.executable, LAB, "here", "wakeups-tcp"],
        {**os.environ, "LAB_ROUNDS": "5", "UCX_TLS": "tcp"},
    )
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "lab: here: 1 of 1" in done.stdout, done.stdout + done.stderr


def test_each_program_is_a_case() -> None:
    grounds = runpy.run_path(str(LAB / "cases/grounds.py"))["GROUNDS"]
    listed = {case.program for cases in grounds.values() for case in cases.values()}
    found = {str(path.relative_to(LAB / "cases")) for path in (LAB / "cases").rglob("*.py")}
    assert listed == found - {"common.py", "grounds.py", "machines/rank.py"}
