"""The lab of emulated machines (``tools/lab``): what it says where it cannot run, and its list of cases."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_orders_that_cannot_be_carried_out_are_refused(tmp_path: Path) -> None:
    """...rather than end the lab: the program in the guest hears of it."""
    run = runpy.run_path(str(LAB / "machines.py"))["Run"](None, tmp_path, 2, print)
    monitor = io.BytesIO()
    run._processes[1] = SimpleNamespace(stdin=monitor)  # guest 0 has ended
    unplug = "0 1 set_link net off\n0 1 set_link net on"
    orders = {"once": unplug, "twice": unplug, "ended": "0 0 stop", "unknown": "0 1 quit", "later": "9 1 cont"}
    for name, order in orders.items():
        (tmp_path / f"order.{name}").write_text(order)
    for _ in range(2):
        run._obey()
    refused = {path.name for path in tmp_path.iterdir() if path.name.startswith("refused.")}
    assert refused == {f"refused.order.{name}" for name in ("ended", "unknown")}
    assert monitor.getvalue().decode() == f"{unplug}\n".replace("0 1 ", "") * 2
    del run._processes[1]
    run._orders = [(0, 1, "cont")]  # of a guest that has ended since
    run._obey()
