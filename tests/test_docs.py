"""The code in the documents runs, and prints what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, Block, blocks, matches, sections

from trio_ucx.ucp._engine import listening

#: Where the site is, and the repository, to which README.md has whole addresses: PyPI shows it without the other files.
SITE = "https://trio-ucx.readthedocs.io/en/latest/"
REPOSITORY = "https://github.com/trio-ucx/trio_ucx/"

PROGRAMS = [block for document in DOCUMENTS for block in blocks(document) if block.is_program and not block.not_run]
#: Started by launchers of groups: tests/mesh/test_examples.py.
RANKS = {"docs/reference/mesh.md"}


@pytest.mark.parametrize(
    "block", [block for block in PROGRAMS if block.document not in RANKS], ids=lambda block: block.where
)
def test_program(block: Block, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", block.text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert matches(block.output, done.stdout), f"{block.where} prints:\n{done.stdout}"


SESSIONS = [
    document
    for document in DOCUMENTS
    if any(block.file or (block.language == "console" and not block.not_run) for block in blocks(document))
]


@pytest.mark.parametrize("document", SESSIONS)
def test_session(document: str, tmp_path: Path) -> None:
    """Writes the files that the reader is told to write, and types what he is told to type."""
    script, expected = [], []
    for block in blocks(document):
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            script.append(f"cat > {block.file} <<'END_OF_{block.file}'\n{block.text}END_OF_{block.file}")
        elif block.language == "console" and not block.not_run:
            for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                typed = re.match(r"(?:.*\\\n)*.*\n", command)
                assert typed is not None
                script.append(f"echo '@@@ {len(expected)}'; {typed[0].rstrip()}")
                expected.append((typed[0], command[typed.end() :]))
    script.append("kill $(jobs -p) 2>/dev/null")  # servers of the reader's, which may hold the output open
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    results = re.split(r"^@@@ \d+\n", printed, flags=re.MULTILINE)[1:]
    assert len(results) == len(expected), printed
    for (typed_line, output), result in zip(expected, results, strict=True):
        assert matches(output, result), f"{document}: $ {typed_line}prints:\n{result}\nin all:\n{printed}"


def test_design_has_the_states_of_a_worker() -> None:
    page = (ROOT / "docs/explanation/design.md").read_text()
    rows = re.findall(r"^\| `([A-Z]+)` \|", page, flags=re.MULTILINE)
    documented = re.findall(r"^``([A-Z]+)``", listening.__doc__ or "", flags=re.MULTILINE)
    assert rows == documented == [state.name for state in listening.State if state is not listening.State.ENDED]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, section = target.partition("#")
        if file.startswith(SITE):
            found = ROOT / "docs" / f"{file.removeprefix(SITE).removesuffix('.html') or 'index'}.md"
        elif file.startswith(REPOSITORY):
            found = ROOT / re.sub(r"^(blob|tree)/main/", "", file.removeprefix(REPOSITORY))
        elif file.startswith("https://"):
            continue
        else:
            found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if section:
            assert section in sections(found.read_text()), target


def test_the_site_is_short() -> None:
    """Whoever adds a page moves or shortens another one. (As ``wc -w`` counts, with code and tables.)"""
    site = [one for one in DOCUMENTS if one.startswith(("docs/", "examples/", "README"))]
    words = sum(len((ROOT / document).read_text().split()) for document in site)
    assert words < 52_000, words
