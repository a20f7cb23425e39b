"""ucx-reports.md names the programs that are there. Each has its report, compiles, and shows its fault if that is fast.

A test that fails here after an update of UCX may be good news: UCX has mended the fault.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trio_ucx import ucp

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/explanation/ucx-reports.md"
PROGRAMS = sorted((ROOT / "docs/explanation/ucx-reports").glob("*.c"))


@dataclass
class Shown:
    """A program that takes a few seconds at most, and what it prints, each time, where UCX has the fault."""

    program: str
    lines: list[str]
    since: tuple[int, ...] = (1, 13)


CRASHED = r"ended by signal \d+ \(.*\)"
SHOWN = [
    Shown("close_both", [f"process: {CRASHED}"], since=(1, 22)),
    Shown("resumed_flush", [f"process: {CRASHED}"], since=(1, 22)),
    Shown(
        "data_port",
        [
            f"number: {CRASHED}",
            "the server's variable is 0xabadcafe now",
            f"length: {CRASHED}",
            *(f"message {kind}: {CRASHED}" for kind in (1, 8, 10, 11)),
            f"message 9: {'exit status 0' if ucp.library().version[:2] == (1, 21) else CRASHED}",
            "when the others have gone, the next one is refused",
        ],
    ),
    Shown(
        "sockcm_length",
        [f"length 0, with 0 bytes: {CRASHED}", f"the request is not answered|length 8, with 64 bytes: {CRASHED}"],
    ),
    Shown(
        "lost_messages", [r"1000 of 1000 messages were sent; flush: Success; .*", r"\d{1,3} of 1000 messages arrived"]
    ),
    Shown("dead_reader", ["after that the worker's flush does not end", "and ucp_worker_arm: Device is busy"]),
    Shown("shared_registration", ["its worker is gone", f"sender: {CRASHED}"], since=(1, 22)),
    Shown("false_address", ["true address: exit status 0", f"false address: {CRASHED}"]),
    Shown("unreachable_peer", [f"server: {CRASHED}"]),
    Shown("am_handlers", [rf"\d+ left: {CRASHED}"]),
    Shown("empty_datagram", ["ucp_worker_arm before: Success", r"empty datagrams: [1-9]", f"worker: {CRASHED}"]),
    Shown("fence", [r"ucp_worker_fence took (0\.[2-9]|[1-9]\d*\.\d) seconds"], since=(1, 22)),
    Shown("ucm_stdout", [r".*UCX +WARN +cannot open /proc/self/maps for reading.*", "data"]),
]


@pytest.fixture(scope="session")
def compile_command() -> list[str]:
    """Compiler and options, without a source. Skips where there is no compiler, or no headers of the UCX in use."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    include = [] if ucp.library().system else [f"-I{Path(ucp.library().file).parent.parent / 'include'}"]
    command = [compiler, "-Wall", "-Werror", *include]
    header = "#include <ucp/api/ucp.h>\n"
    probe = subprocess.run(
        [*command, "-fsyntax-only", "-x", "c", "-"],
        input=header,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip(f"no headers of UCX: {probe.stderr.splitlines()[0]}")
    return command


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_compiles(program: Path, compile_command: list[str]) -> None:
    command = [*compile_command, "-fsyntax-only", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def built(compile_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a program, once, against the UCX in use."""
    directory = tmp_path_factory.mktemp("reports")
    where = Path(ucp.library().file).parent
    library = [] if ucp.library().system else [f"-L{where}", f"-Wl,-rpath,{where}"]

    @functools.cache
    def build(name: str) -> Path:
        source = PAGE.with_suffix("") / f"{name}.c"
        command = [*compile_command, source, "-o", directory / name, *library, "-lucp", "-lucs"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot be linked: {done.stderr.splitlines()[-1]}")
        return directory / name

    return build


@pytest.mark.sample(1)
@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.program)
def test_program_shows_the_fault(shown: Shown, built: Callable[[str], Path]) -> None:
    if ucp.library().version < shown.since:
        pytest.skip(f"shown with UCX {'.'.join(map(str, shown.since))}")
    # LD_PRELOAD has the checker of tools/sanitize.sh, with which these programs are not compiled.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("UCX_") and name != "LD_PRELOAD"
    }
    done = subprocess.run(
        ["sh", "-c", 'ulimit -c 0; exec "$0"', built(shown.program)],
        env={**environment, "UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    printed = done.stdout.splitlines()
    for line in shown.lines:
        assert any(re.fullmatch(line, one) for one in printed), f"{line}\n\n{done.stdout}\n{done.stderr}"


def test_page_names_the_programs() -> None:
    rows = re.findall(r"^\| (.+?) \| \[`(\w+\.c)`\]\(ucx-reports/(\w+\.c)\)", PAGE.read_text(), re.MULTILINE)
    assert rows and sorted(name for _, name, _ in rows) == [path.name for path in PROGRAMS]
    for fault, name, target in rows:
        assert name == target
        report, _, _ = (PAGE.with_suffix("") / name).read_text().partition("*/")
        assert report.startswith(f"/*\n * {fault}\n"), f"{name}: the report has another title"
        for part in ("What happens.", "This program.", "Shown with", "Suggested change.", "What trio_ucx does."):
            assert f" * {part} " in report, name
