"""Which UCX, its transports, and the environment variables for it."""

from __future__ import annotations

import ctypes.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import attrs
import trio

from ... import UCXError, ucp
from ..._native import ucx
from ..errors import describe
from ..info import EVERYTHING, Log, resources
from .devices import Resources
from .finding import Finding, warn_unless

#: What ends an attempt to use UCX, with a text for the user.
FAILURES = (UCXError, OSError, ValueError, trio.BrokenResourceError)
#: Transports within a machine.
_LOCAL = {"self", "cma", "sysv", "posix"}
#: How trio_ucx's warning about shared memory begins, and a variable that UCX does not know, with its suggestion.
_NO_SHARED_MEMORY = "UCX does without shared memory: "
_VARIABLE = re.compile(r"UCX_(?!WARN_UNUSED)\w+(?: \(maybe: .*?\))?")


@attrs.frozen
class Software:
    """What UCX offers.

    Attributes:
        present, enabled: transports and devices: all, and those that the configuration allows.
        shared_memory: the kinds of shared memory that a worker has.
        error: why no worker could be opened, or None.
        log: what UCX and trio_ucx logged meanwhile.
    """

    present: Resources
    enabled: Resources = ()
    shared_memory: Collection[str] = ()
    error: str | None = None
    log: Sequence[str] = ()


async def read_software() -> Software:
    """Opens a worker as programs do."""
    log = Log("trio_ucx")
    with log, ucp.open_context(EVERYTHING) as context:
        present = resources(context)
    log.lines.clear()
    try:
        with log:
            async with ucp.open_worker() as worker:
                enabled, kinds = resources(worker.context), worker.address.shared_memory_kinds
    except FAILURES as error:
        return Software(present, error=describe(error), log=log.lines)
    return Software(present, enabled, kinds, log=log.lines)


def check_software(software: Software) -> Iterator[Finding]:
    yield check_libraries([Path(folder) for folder in sys.path], Path(ucx.file))
    yield from check_environment(software.log)
    if software.error is not None:
        yield Finding("transports", "problem", f"no worker can be opened: {software.error}", "mend what the text names")
        return
    names = {name: [device for each, device in software.enabled if each == name] for name, _ in software.enabled}
    found = "; ".join(f"{name} ({', '.join(devices)})" for name, devices in names.items())
    reaches = {*names} - _LOCAL - {"tcp"} or {*names.get("tcp", ())} - {"lo"}
    advice = "connect a network, or allow its device (UCX_NET_DEVICES, UCX_TLS): other hosts cannot be reached"
    yield warn_unless(reaches, "transports", found, advice)
    why = [line.removeprefix(_NO_SHARED_MEMORY) for line in software.log if _NO_SHARED_MEMORY in line]
    found = ", ".join(sorted(software.shared_memory)) or f"none: {'; '.join(why) or 'the configuration allows none'}"
    advice = "raise or free what it names, or allow it (UCX_TLS); until then processes of this machine use TCP"
    yield warn_unless(software.shared_memory, "shared memory", found, advice)


def check_libraries(folders: Sequence[Path], used: Path) -> Finding:
    """Looks for several UCX.

    Args:
        folders: where Python looks for packages.
        used: the libucp in use.
    """
    found = f"UCX {ucx.release}, {used}"
    wheels = {path.name.partition("-")[0] for folder in folders for path in folder.glob("libucx_cu*.dist-info")}
    if len(wheels) > 1:
        advice = "uninstall all of them, and install one: they share files, and what is there now may be of either"
        return Finding("libraries", "problem", f"{found}; installed: {' and '.join(sorted(wheels))}", advice)
    pattern, mine = ("*/libucp*.so*", "*/lib/libucp*.so*"), used.resolve().parent
    files = [(folder, file) for folder in folders for each in pattern for file in folder.glob(each)]
    others = sorted({file.relative_to(folder).parts[0] for folder, file in files if file.resolve().parent != mine})
    if (system := ctypes.util.find_library("ucp")) and not ucx.system:
        found += f"; the system has another one ({system}), which MPI may use: import trio_ucx before it"
    advice = "use these packages in other processes than trio_ucx: two UCX in one process get in each other's way"
    return warn_unless(not others, "libraries", f"{found}{'; others in ' * bool(others)}{', '.join(others)}", advice)


def check_environment(log: Sequence[str]) -> Iterator[Finding]:
    """Says which variables UCX does not know.

    Args:
        log: UCX's, of a worker's opening.
    """
    unknown = [name for line in log if "unused env" in line for name in _VARIABLE.findall(line)]
    chosen = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_"))
    found = f"UCX does not know {', '.join(unknown)}" if unknown else chosen or "no UCX_ variable is set"
    yield warn_unless(not unknown, "environment", found, "correct the names; options of missing transports are unknown")
    if rest := [line for line in log if "unused env" not in line and _NO_SHARED_MEMORY not in line]:
        yield Finding("log", "warning", f"UCX says: {'; '.join(rest)}", "mend what the lines name")
