"""docs/operation/troubleshooting.md has an entry for each text of ours that a program's owner may have to act on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from documents import ROOT

from trio_ucx._native import ucx

PAGE = ROOT / "docs/operation/troubleshooting.md"
#: The heading of the tables whose texts are UCX's, not ours.
UCX_LOG = "UCX's log"

#: Exceptions that say which argument or call of the program is wrong, that it closed something, or that a peer did.
MISUSE = {
    *("AssertionError", "BaseExceptionGroup", "BufferError", "BusyResourceError", "ClosedResourceError"),
    *("DependencyBoundsError", "DependencyReferenceError", "EndOfChannel", "ExceptionGroup", "NotImplementedError"),
    "TypeError",
}
#: A ValueError or RuntimeError is about the environment, options or the peer in these modules, and misuse in others.
ENVIRONMENT = re.compile(
    r"_handshake/registry|_opening/authkey|mesh/_(launchers|mpi|place|variables)|"
    r"ucp/(_transports|_quirks/|_memory/cuda|_engine/(endpoint_core|posting|trio_run))"
)
#: Modules in which sentences that are no arguments of an exception become part of one, of a log line or of a report.
REASONS = re.compile(
    r"_handshake/(client|control_sockets|exchange|handshake|server)|_link/closing|_report/(causes|network)|rpc/_client|"
    r"ucp/(_transports|_connecting)|ucp/_quirks/(key_gate|shared_memory)|_native/__init__"
)
#: Modules without an entry: those that say themselves what to do, and those in which an error is the program's.
WITHOUT_ENTRIES = re.compile(r"_cli/|testing/|ucp/(chains/|blocks)|_arrays/|(anyio|metrics)\.py")
#: Texts that need no entry, and why.
NO_ENTRY = {
    r"(?!nothing)\w+ing ": "says what UCX was doing; UCX's status follows, which has an entry",
    r"<trio_ucx|trio_ucx [a-z ]+ (\(efd|of|at|with) |unclosed ": "a repr, or the name of a thread or task",
    r"/|[\w/.*]+$": "a path or a name",
    r" (\(|since)|the byte stream$|by the peer$|it (has none|gives no reason)$|\{\}, for its": "an addition to a text",
}


@attrs.frozen
class Text:
    """A text in the source, with ``{}`` for each value in it, and the exception or log method that gets it."""

    file: str
    line: int
    text: str
    receiver: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}: {self.receiver}: {self.text}"

    def needs_entry(self) -> bool:
        is_sentence = len(re.findall(r"[a-z]{2,}", self.text)) >= 3
        if not is_sentence or WITHOUT_ENTRIES.search(self.file):
            return False
        if any(re.match(pattern, self.text) for pattern in NO_ENTRY):
            return False
        if self.receiver == "ProtocolError" and self.file.startswith(("_link/", "_rules/")):
            return False  # "it violated the protocol", which has an entry, goes before it
        if self.receiver in ("RuntimeError", "ValueError"):
            return ENVIRONMENT.search(self.file) is not None
        return self.receiver not in MISUSE and (bool(self.receiver) or REASONS.search(self.file) is not None)


def _template(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in values)
    return None


def _receiver(call: ast.Call) -> str:
    name = ast.unparse(call.func).rpartition(".")[2]
    if re.fullmatch(r"debug|info|warning|error|exception|log", name) and "logger" in ast.unparse(call.func):
        return f"logger.{name}"
    known = re.fullmatch(r"\w+(Error|Lost|Closed|Group|Draining|Full|Admitted|TrioUCX|Channel|TooLong)", name)
    return name if known or name in ("Refusal", "Refused", "NoRoom", "NotYet", "Aborted") else ""


def _texts_of(file: Path) -> Iterator[Text]:
    name = str(file.relative_to(ROOT / "trio_ucx"))
    if file.suffix == ".c":
        source = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), file.read_text(), flags=re.DOTALL)
        for call in re.finditer(r"(fprintf|snprintf)\((.*?)\);", source, re.DOTALL):
            text = re.sub(r"%\w+", "{}", "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call[2])))
            yield Text(name, source.count("\n", 0, call.start()) + 1, text, call[1])
        return
    tree = ast.parse(file.read_text())
    inside: dict[ast.AST, str] = {}
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):  # from the outside to the inside
        if isinstance(node, ast.Call) and (receiver := _receiver(node)):
            inside.update((each, receiver) for each in ast.walk(node))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(each for each in node.values if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if node not in skipped and (template := _template(node)) is not None:
            yield Text(name, getattr(node, "lineno", 0), template, inside.get(node, ""))


TEXTS = [
    text
    for suffix in ("py", "c")
    for file in sorted((ROOT / "trio_ucx").rglob(f"*.{suffix}"))
    for text in _texts_of(file)
]


def _entries() -> Iterator[tuple[str, str]]:
    """Each text in the first column of a table, and the heading above it. ``...`` in it stands for anything."""
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| `"):
            for entry in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                yield heading, entry


ENTRIES = [*_entries()]
OURS = [entry for heading, entry in ENTRIES if heading != UCX_LOG]
UCXS = [entry for heading, entry in ENTRIES if heading == UCX_LOG]


def _pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in entry.split("...")), re.DOTALL)


def _placeholders(text: str) -> str:
    return re.sub(r"%[-.\w]*[a-z]|\{\w*(![a-z])?(:[^}]*)?\}", "{}", text)


@pytest.mark.parametrize("file", sorted({text.file for text in TEXTS if text.needs_entry()}))
def test_texts_have_entries(file: str) -> None:
    patterns = [_pattern(entry) for entry in OURS]
    needed = [text for text in TEXTS if text.file == file and text.needs_entry()]
    missing = [text.where for text in needed if not any(one.search(_placeholders(text.text)) for one in patterns)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("entry", OURS)
def test_entries_have_texts(entry: str) -> None:
    assert any(_pattern(entry).search(_placeholders(text.text)) for text in TEXTS), entry


@pytest.mark.parametrize("entry", UCXS)
def test_ucx_has_the_lines(entry: str) -> None:
    """...in its libraries. Other releases may word them differently."""
    if ucx.version[:2] != (1, 22):
        pytest.skip("the page quotes UCX 1.22")
    folder = Path(ucx.file).resolve().parent
    libraries = [file.read_bytes() for file in [*folder.glob("libuc*.so*"), *folder.glob("ucx/*.so*")]]
    parts = [part.strip().encode() for part in entry.split("...") if part.strip()]
    assert any(all(part in library for part in parts) for library in libraries), entry
