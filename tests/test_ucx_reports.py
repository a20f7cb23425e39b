"""docs/ucx-reports.md: its programs compile, and it names those that are there. (They crash UCX, so none is run.)"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trio_ucx._native import ucx

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "ucx-reports.md"
PROGRAMS = sorted((ROOT / "docs" / "ucx-reports").glob("*.c"))


@pytest.fixture(scope="session")
def compile_command() -> list[str]:
    """Compiler and options, without a source. Skips where there is no compiler, or no headers of the UCX in use."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    include = [] if ucx.system else [f"-I{Path(ucx.file).parent.parent / 'include'}"]
    command = [compiler, "-Wall", "-Werror", "-fsyntax-only", *include]
    header = "#include <ucp/api/ucp.h>\n"
    probe = subprocess.run(
        [*command, "-x", "c", "-"], input=header, capture_output=True, text=True, timeout=60, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"no headers of UCX: {probe.stderr.splitlines()[0]}")
    return command


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_compiles(program: Path, compile_command: list[str]) -> None:
    done = subprocess.run([*compile_command, program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_page_names_the_programs() -> None:
    text = PAGE.read_text()
    table = re.findall(r"^\| \[`(\w+\.c)`\]\(ucx-reports/(\w+\.c)\)", text, re.MULTILINE)
    assert all(name == target for name, target in table)
    there = [path.name for path in PROGRAMS]
    assert there and sorted(name for name, _ in table) == there
    for name in there:
        sections = [section for section in text.split("\n## ")[1:] if f"**Program.** `{name}`" in section]
        assert len(sections) == 1, f"{name}: {len(sections)} sections describe it"
        assert "**What happens.**" in sections[0] and "**Suggested change.**" in sections[0], name
