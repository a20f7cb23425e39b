"""Which of memcheck's reports concern our C code: ``python tools/valgrind_reports.py FILE.xml ...``.

CPython and UCX read memory that they have not written, on purpose, hundreds of times: CPython looks for small integers
in the digits of a number that has none, UCX takes buffers from pools. A report concerns us if our compiled module made
the access, or made the memory: allocated it, freed it, or left it uninitialised. Prints those reports; the exit status
is 1 if there are any. Leaks are left out: the tests count what is open.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

OURS = "/trio_ucx/_native/"
#: Functions that allocate, or copy, for their caller.
ON_BEHALF = ("libc.so", "vgpreload_", "ld-linux")


def reports(path: Path) -> Iterator[ElementTree.Element]:
    text = path.read_text(errors="replace")
    if not text.rstrip().endswith("</valgrindoutput>"):
        text = text[: text.rindex("</error>") + len("</error>")] + "</valgrindoutput>" if "</error>" in text else ""
    if text:
        yield from ElementTree.fromstring(text).iter("error")


def concerns_us(report: ElementTree.Element) -> bool:
    return any(_responsible(stack) for stack in report.iter("stack"))


def _responsible(stack: ElementTree.Element) -> bool:
    for frame in stack.iter("frame"):
        library = frame.findtext("obj") or ""
        if not any(name in library for name in ON_BEHALF):
            return OURS in library
    return False


def show(report: ElementTree.Element) -> str:
    lines = [report.findtext("what") or report.findtext("xwhat/text") or report.findtext("kind") or "?"]
    for part in report:
        if part.tag == "auxwhat":
            lines.append(part.text or "")
        for frame in part.iter("frame"):
            place = f"{frame.findtext('file')}:{frame.findtext('line')}" if frame.findtext("file") else ""
            lines.append(f"    {frame.findtext('fn') or '?'} {place or frame.findtext('obj') or ''}")
    return "\n".join(lines)


def main() -> int:
    found = ours = 0
    for name in sys.argv[1:]:
        for report in reports(Path(name)):
            if (report.findtext("kind") or "").startswith("Leak_"):
                continue
            found += 1
            if concerns_us(report):
                ours += 1
                print(show(report), end="\n\n")
    print(f"{ours} reports concern our code; {found - ours} of CPython, libc and UCX do not")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
