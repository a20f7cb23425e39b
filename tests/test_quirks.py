"""Each module of the folder says what it is for; a release of UCX that nobody has tried gives one warning."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trio_ucx.ucp import _quirks
from trio_ucx.ucp._quirks.releases import NEWEST_KNOWN, is_known

ROOT = Path(__file__).parent.parent
MODULES = [found.name for found in pkgutil.iter_modules(_quirks.__path__)]

#: Imports trio_ucx with a UCX that says that it is of another release, and uses it.
WITH_ANOTHER_RELEASE = """
import sys, types, warnings, attrs, trio
package = types.ModuleType("trio_ucx")
package.__path__ = [sys.argv[1]]
sys.modules["trio_ucx"] = package
from trio_ucx import _native
_native.ucx = attrs.evolve(_native.ucx, version=tuple(map(int, sys.argv[2].split("."))))
del sys.modules["trio_ucx"]
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import trio_ucx
    import trio_ucx.ucp

async def main():
    with trio.fail_after(20):
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        async with listener, trio_ucx.connect(listener.address) as client, await listener.accept() as server:
            client.send_nowait(bytes(100_000))
            assert await server.receive() == bytes(100_000)

trio.run(main)
print(*[f"{each.category.__name__}: {each.message}" for each in found], sep="\\n")
"""


def run_with(release: str) -> list[str]:
    command = [sys.executable, "-c", WITH_ANOTHER_RELEASE, str(Path(_quirks.__file__).parents[2]), release]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


def test_unknown_release_warns_once() -> None:
    [line] = run_with("1.23.0")
    assert re.match(r"RuntimeWarning: UCX 1\.23\.0 \(.*\) is newer than 1\.22", line)
    assert "Use a newer trio_ucx, or" in line and "'libucx-cu12<1.23'" in line


def test_known_release_does_not_warn() -> None:
    assert run_with("1.22.7") == [""]


def test_known_releases() -> None:
    assert is_known(NEWEST_KNOWN) and is_known((1, 13, 1)) and is_known((*NEWEST_KNOWN, 99))
    assert not is_known((NEWEST_KNOWN[0], NEWEST_KNOWN[1] + 1)) and not is_known((2, 0, 0))


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_of_quirks(name: str) -> None:
    """They say which releases need it, when it can go, and what tests it."""
    text = importlib.import_module(f"trio_ucx.ucp._quirks.{name}").__doc__
    assert text is not None and name in str(_quirks.__doc__)
    for wanted in (r"releases?\b", r"needed", r"``tests/"):
        assert re.search(wanted, text, re.IGNORECASE), wanted
    for path in re.findall(r"``(tests/[\w/]+\.py)``", text):
        assert (ROOT / path).exists(), path
