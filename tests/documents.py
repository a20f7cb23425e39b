"""The documents, taken apart: their blocks of code, in the conventions that CONTRIBUTING.md describes."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parent.parent

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "examples/README.md",
    )
)

#: A fenced block, with the comment before it and the output after it. At most one line of text stands between.
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>file|not run): (?P<value>.*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```\n"
    r"(?:(?=\n*(?:[^\n`#<]+\n+)?^ *```text\n(?P<output>.*?)^ *```\n))?",
    re.MULTILINE | re.DOTALL,
)


@frozen
class Block:
    document: str
    line: int
    language: str
    text: str
    #: What the block of text after it says that it prints.
    output: str
    #: The file that the reader is told to write it to.
    file: str | None
    #: Why it cannot run in a test.
    not_run: str | None

    @property
    def is_program(self) -> bool:
        return self.language == "python" and "trio.run(" in self.text and self.file is None

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str) -> list[Block]:
    page = (ROOT / document).read_text()
    found = []
    for match in BLOCK.finditer(page):
        indent = len(match["indent"])
        text = "".join(line[indent:] or "\n" for line in match["text"].splitlines(keepends=True))
        mark, value = match["mark"], match["value"]
        found.append(
            Block(
                document,
                page.count("\n", 0, match.start("language")) + 1,
                match["language"],
                text,
                match["output"] or "",
                value if mark == "file" else None,
                value if mark == "not run" else None,
            )
        )
    return found


def programs(document: str) -> list[str]:
    """Its Python blocks that are whole programs."""
    return [block.text for block in blocks(document) if block.is_program]


def sections(page: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def matches(expected: str, printed: str) -> bool:
    """Whether a program has printed what its document says. ``...`` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None
