"""The contenders: one file for each. A file has:

CONTENDERS      its configurations
LOOP            what its ends run in: "trio", "asyncio" or "blocking"; "tool" where it is a program of its own
open_end        an async context manager, which gives one end of a pair, once it is connected
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..jobs import Job

MODULES = (
    "ours", "ours_raw", "ours_chains", "perftest", "trio_sockets", "ucxx_polling", "mpi", "heat", "nng", "zeromq"
)  # fmt: skip

#: The processes of a contender: the first two, unless its option "processes" says that there are more.
ROLES = ("server", "client", "third", "fourth")

#: Ends the name of a contender of another checkout.
BEFORE = ", before"


@dataclass(frozen=True)
class Contender:
    """A configuration that is measured.

    Attributes:
        name: unique, and how it is called in tables.
        transport: "tcp", "shm" (shared memory) or "unix" (sockets of the file system).
        module: of this package.
        jobs: what it can give.
        needs: the import names of its packages, with spaces between; None: nothing but what trio_ucx needs.
        install: what installs it.
        options: for its module.
        environment: for its processes.
        checkout: the folder of another checkout of this project to be measured, built in place.
    """

    name: str
    transport: str
    module: str
    jobs: tuple[Job, ...]
    needs: str | None = None
    install: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    checkout: str = ""

    def beside(self, folder: Path) -> list[Contender]:
        """Itself, and the same of another checkout if it is trio_ucx."""
        before = replace(self, name=self.name + BEFORE, checkout=str(folder))
        return [self, before] if self.name.startswith("trio_ucx") else [self]

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(name) for name in (self.needs or "").split())


def load(module: str) -> Any:
    return importlib.import_module(f"{__name__}.{module}")


def all_contenders() -> list[Contender]:
    return [contender for module in MODULES for contender in load(module).CONTENDERS]
