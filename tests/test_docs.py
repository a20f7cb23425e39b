"""The programs in the documentation run, and print what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trio_ucx.ucp._engine import arming
from trio_ucx.ucp._engine.arming import ArmingState, Event

ROOT = Path(__file__).parent.parent

PRINTED = {
    "README.md": ["b'reward'"],
    "docs/arrays.md": [
        r"float32 \(2, 3\)",
        r"\['step', 'weights'\] 7",
        r"\[0 1 2\]",
        r"the message is an array .*dtype <f8, shape \(5,\).*received into an array \(dtype <i8, shape \(3,\)\).*",
        "5",
    ],
    "docs/blocks.md": ["1 2"],
    "docs/chains.md": [r"0 b'seven' b'a row'"],
    "docs/rpc.md": ["1", "not there: 'b'", r"\[0, 1, 2\]"],
    "docs/ucp.md": ["b'header' b'data' True", "24", r"\d+", "b'written from afar'"],
}


def programs(document: str) -> list[str]:
    """Its Python blocks that are whole programs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [block for block in blocks if "trio.run(" in block]


@pytest.mark.parametrize("document", PRINTED)
def test_program_of_the_documentation(document: str, tmp_path: Path) -> None:
    lines = []
    for program in programs(document):
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        lines += done.stdout.splitlines()
    assert len(lines) == len(PRINTED[document]), lines
    for line, expected in zip(lines, PRINTED[document], strict=True):
        assert re.fullmatch(expected.replace("(", r"\(") if "b'" in expected else expected, line), line


def arming_tables(lines: list[list[str]]) -> dict[str, list[str]]:
    """The rows about states and events, by their first cell, of a table's lines that were taken apart into cells."""
    plain = [[cell.replace("`", "") for cell in cells] for cells in lines]
    names = {*ArmingState.__members__, *Event.__members__}
    return {cells[0]: cells[1:] for cells in plain if len(cells) > 1 and cells[0] in names}


def test_design_has_the_tables_of_arming() -> None:
    page = (ROOT / "docs/design.md").read_text()
    shown = arming_tables(
        [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    )
    documented = arming_tables([re.split(r"\s{2,}", line) for line in (arming.__doc__ or "").splitlines()])
    assert set(documented) == {*ArmingState.__members__, *Event.__members__}
    assert shown == documented


def sections(page: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


DOCUMENTS = [
    *("README.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, section = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if section:
            assert section in sections(found.read_text()), target
