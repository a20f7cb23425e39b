"""The programs in the documentation run, and print what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PRINTED = {
    "README.md": ["b'reward'"],
    "docs/chains.md": [r"0 b'seven' b'a row'"],
    "docs/ucp.md": ["b'header' b'data' True", "24", r"\d+", "b'written from afar'"],
}


def programs(document: str) -> list[str]:
    """Its Python blocks that are whole programs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [block for block in blocks if "trio.run(" in block]


@pytest.mark.parametrize("document", PRINTED)
def test_program_of_the_documentation(document: str, tmp_path: Path) -> None:
    [program] = programs(document)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(PRINTED[document]), done.stdout
    for line, expected in zip(lines, PRINTED[document], strict=True):
        assert re.fullmatch(expected.replace("(", r"\(") if "b'" in expected else expected, line), line
