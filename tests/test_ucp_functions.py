"""``docs/reference/ucp-functions.md`` is complete, and true: against the headers of UCX, and against our C sources."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import attrs
import pytest

from trio_ucx import _native

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs/reference/ucp-functions.md"
SOURCES = Path(_native.__file__).parent

#: A declaration or inline definition, once the preprocessor has done its work: its name and what follows the type.
_FUNCTION = re.compile(
    r"[\w*]\s+\**(ucp_[a-z0-9_]+)\s*\([^;{]*?\)[^;{}()]*(?:__attribute__\s*\(\(.*?\)\)\s*)?[;{]", re.S
)


@attrs.frozen
class Row:
    used: bool
    why: str


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for line in TABLE.read_text().splitlines():
        match = re.fullmatch(r"\| `(ucp_\w+)` \| (yes|no) \| (.+) \|", line)
        if match is not None:
            assert match[1] not in found, f"{match[1]} is there twice"
            found[match[1]] = Row(match[2] == "yes", match[3])
        else:
            assert not line.startswith("| `"), line
    return found


def includes() -> dict[str, Path]:
    """Folders with UCX's headers: of the UCX in use, and of the system's where there is another."""
    places: dict[str, Path] = {}
    if not _native.ucx.system:
        places["wheel"] = Path(_native.ucx.file).parent.parent / "include"
    places["system"] = Path(os.environ.get("TRIO_UCX_SYSTEM_INCLUDE", "/usr/include"))
    return {name: path for name, path in places.items() if (path / "ucp" / "api" / "ucp.h").exists()}


def version(include: Path) -> tuple[int, int]:
    text = (include / "ucp" / "api" / "ucp_version.h").read_text()
    major, minor = (re.search(rf"UCP_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR"))
    assert major is not None and minor is not None
    return int(major[1]), int(minor[1])


def functions(include: Path) -> set[str]:
    """The functions that ``ucp.h`` declares, ``ucp_compat.h`` included; not its types of callbacks."""
    header = include / "ucp" / "api" / "ucp.h"
    preprocessed = subprocess.run(
        ["cc", "-E", "-P", "-I", str(include), str(header)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    without_bodies = re.sub(r"\btypedef\b[^;{]*\([^;]*;", ";", preprocessed)
    return set(_FUNCTION.findall(without_bodies))


@pytest.mark.parametrize("include", includes().values(), ids=includes().keys())
def test_table_has_every_function_of_the_header(include: Path) -> None:
    declared = functions(include)
    assert {"ucp_init", "ucp_ep_close_nbx", "ucp_tag_send_nb", "ucp_worker_progress"} <= declared
    table = rows()
    assert declared - set(table) == set(), "the table lacks these"
    # Rows of functions that came later name the version; an older header does not have them.
    later = {
        name
        for name, row in table.items()
        if (since := re.match(r"UCX (\d+)\.(\d+):", row.why)) and version(include) < (int(since[1]), int(since[2]))
    }
    assert set(table) - declared - later == set(), "these are not in the header"


def calls() -> set[str]:
    """The UCP functions that our C sources call, comments aside."""
    found: set[str] = set()
    for source in SOURCES.rglob("*.c"):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", source.read_text(), flags=re.S)
        found.update(re.findall(r"\b(ucp_[a-z0-9_]+)\s*\(", code))
    return found


@pytest.mark.parametrize("name", [name for name, row in rows().items() if row.used])
def test_what_is_said_to_be_used_is(name: str) -> None:
    assert name in calls()


def test_what_is_said_not_to_be_used_is_not() -> None:
    assert {name for name, row in rows().items() if not row.used} & calls() == set()
