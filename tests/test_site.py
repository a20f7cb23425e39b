"""The site builds without a warning, and no link in it is dead. Needs the extra ``docs``."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_public_surface import FILE as PUBLIC_SURFACE

pytest.importorskip("sphinx")
pytest.importorskip("furo")

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        self.links |= {value for name in ("href", "src") if (value := found.get(name))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", str(ROOT / "docs"), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {path.resolve(): Page(path.read_text()) for path in built.rglob("*.html")}


def test_no_link_is_dead(site: dict[Path, Page]) -> None:
    dead = []
    for path, page in site.items():
        for link in page.links:
            scheme, _, target, _, anchor = urlsplit(link)
            if scheme:
                continue  # of other sites: `sphinx -b linkcheck`, in GitHub's workflow
            found = (path.parent / unquote(target)).resolve() if target else path
            reaches = found.exists() and (
                not anchor or found.suffix != ".html" or unquote(anchor) in site[found].anchors
            )
            if not reaches:
                dead.append(f"{path.name}: {link}")
    assert len(site) > 60
    assert dead == []


def test_code_in_docstrings_is_shown_as_code(site: dict[Path, Page]) -> None:
    """Without the two colons before it, it would be a quotation."""
    quoting = [path.name for path in site if path.parent.name == "api" and "<blockquote>" in path.read_text()]
    assert quoting == []


def test_every_public_name_has_an_anchor(site: dict[Path, Page]) -> None:
    anchors = {anchor for page in site.values() for anchor in page.anchors}
    lines = PUBLIC_SURFACE.read_text().splitlines()
    names = {found[1] for line in lines if (found := re.match(r"(?:\w+ )*?(trio_ucx[\w.]*)", line))}
    assert len(names) > 600
    assert sorted(names - anchors) == []
