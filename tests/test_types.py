"""The types of the public surface: what they promise to a checker is what the functions do."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import trio_ucx

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("options", "function", "others"),
    [
        (trio_ucx.ConnectOptions, trio_ucx.connect, {"address", "worker"}),
        (trio_ucx.ListenerOptions, trio_ucx.open_ucx_listeners, {"port", "host", "worker"}),
    ],
    ids=["connect", "listeners"],
)
def test_typed_options_are_those_of_the_function(
    options: Any, function: Callable[..., object], others: set[str]
) -> None:
    hints = get_type_hints(function)
    parameters = set(inspect.signature(function).parameters)
    assert get_type_hints(options) == {name: hints[name] for name in parameters - others}


def test_options_of_both_sides_are_those_that_both_functions_have() -> None:
    both = get_type_hints(trio_ucx.ConnectOptions).keys() & get_type_hints(trio_ucx.ListenerOptions).keys()
    assert get_type_hints(trio_ucx.ConnectionOptions).keys() == both


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_checker_refuses_misuses_and_accepts_correct_uses(checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: pip install -e '.[dev]'")
    files = ["tests/misuses.py", "tests/correct_uses.py"]
    checked = subprocess.run([sys.executable, "-m", checker, *files], cwd=TESTS.parent, capture_output=True, text=True)
    found = re.findall(r"(\w+\.py):(\d+):.* error: ", checked.stdout)
    lines = (TESTS / "misuses.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("  # refused")}
    assert len(marked) >= 30
    assert {name for name, _ in found} == {"misuses.py"}, checked.stdout + checked.stderr
    refused = {int(number) for _, number in found}
    assert refused == marked, [lines[number - 1] for number in refused ^ marked]
