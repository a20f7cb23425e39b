"""The environment variables of a process, and the meetings that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import unquote, urlsplit

import attrs

from .. import format_address, parse_address
from .._opening.unix import PREFIX as UNIX
from .._util.text import printable

T = TypeVar("T")

RANK, SIZE, MEETING = "TRIO_UCX_RANK", "TRIO_UCX_SIZE", "TRIO_UCX_MEETING"

#: A number of ranks that is certainly a mistake, and would be an endless list of hosts.
MAX_SIZE = 2**20


# ---- variables ----


@attrs.frozen
class Found(Generic[T]):
    """A value, and the variable or argument that it is from."""

    value: T
    name: str


@attrs.frozen
class Variables:
    """The environment. A variable that is empty counts as not set."""

    environment: Mapping[str, str]

    def text(self, name: str) -> str | None:
        return self.environment.get(name, "").strip() or None

    def has(self, *names: str) -> bool:
        return all(self.text(name) is not None for name in names)

    def need(self, *names: str) -> Found[str]:
        """The first of these variables that is set."""
        for name in names:
            if (text := self.text(name)) is not None:
                return Found(text, name)
        raise RuntimeError(f"the environment variable {' or '.join(names)} is not set; the launcher should set it")

    def integer(self, *names: str) -> Found[int]:
        found = self.need(*names)
        if not re.fullmatch(r"-?[0-9]{1,18}", found.value):
            raise ValueError(f"{found.name} must be an integer, not {found.value!r}")
        return Found(int(found.value), found.name)

    def port(self, name: str) -> Found[int]:
        found = self.integer(name)
        if not 1 <= found.value <= 65535:
            raise ValueError(f"{name} must be a port, 1 to 65535, not {found.value}")
        return found


# ---- meetings ----


@attrs.frozen
class AtPort:
    """Rank 0 listens at this host and port."""

    host: str = attrs.field(converter=printable)
    port: int

    def __str__(self) -> str:
        return format_address((self.host, self.port))


@attrs.frozen
class AtFile:
    """Rank 0 writes its address to this file, which all ranks can read."""

    path: Path

    def __str__(self) -> str:
        return self.path.as_uri()


@attrs.frozen
class ThroughMPI:
    """Rank 0 broadcasts its address with mpi4py."""

    def __str__(self) -> str:
        return "mpi"


Meeting = AtPort | AtFile | ThroughMPI


def parse_meeting(text: str) -> Meeting:
    """Reads a meeting: ``"host:port"``, ``"file:///path"`` or ``"mpi"``.

    Raises:
        ValueError: it is none of these.
        TypeError: it is not a str.
    """
    if not isinstance(text, str):
        raise TypeError(f"a meeting must be a str, not {type(text).__name__}")
    if text == "mpi":
        return ThroughMPI()
    if text.startswith("file:"):
        parts = urlsplit(text)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise ValueError(f"{text!r} is not the URL of a file: write file:///path/of/the/file")
        return AtFile(Path(path))
    if text.startswith(UNIX):
        raise ValueError(f"ranks cannot meet at {text!r}: write 'host:port', 'file:///path' or 'mpi'")
    host, port = parse_address(text)
    if port == 0:
        raise ValueError(f"ranks cannot meet at {text!r}: port 0 would be another port on each host")
    return AtPort(host, port)
