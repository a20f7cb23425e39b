"""Which UCX, its transports, and the environment variables for it."""

from __future__ import annotations

import ctypes.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import distributions

import trio

from ... import UCXError, ucp
from ..._native import ucx
from ...ucp._internal_api import rdma
from ..errors import describe
from ..info import EVERYTHING, Log, by_transport, resources
from .devices import Resources, check_gpu, check_rdma
from .finding import Finding, State, warn_unless

#: What ends an attempt to use UCX, with a text for the user.
FAILURES = (UCXError, OSError, ValueError, trio.BrokenResourceError)
#: Transports within a machine.
_LOCAL = {"self", "cma", "sysv", "posix"}
#: trio_ucx's warnings, and a variable that UCX does not know, with its suggestion.
_WITHOUT = re.compile(r"UCX does without (shared memory|TCP|memory hooks|RDMA).*?: (.*)")
_VARIABLE = re.compile(r"UCX_(?!WARN_UNUSED)\w+(?: \(maybe: .*?\))?")


async def check_software() -> tuple[list[Finding], bool]:
    """Opens a worker as programs do. Returns what was found, and whether that worked."""
    log, present, enabled = Log("trio_ucx"), [], []
    try:
        with Log("trio_ucx"), ucp.open_context(EVERYTHING) as context:
            present = resources(context)
        with log:
            async with ucp.open_worker() as worker:
                enabled, kinds = resources(worker.context), worker.address.shared_memory_kinds
        found = [*check_transports(enabled, kinds, log.lines)]
    except FAILURES as error:
        found = [Finding("transports", "problem", f"no worker can be opened: {describe(error)}", "mend what it names")]
    uses = [*check_environment(log.lines), *found, check_rdma(present, enabled), check_gpu(present, enabled)]
    return [check_libraries(sys.path), *uses], bool(enabled)


def check_transports(enabled: Resources, kinds: Collection[str], log: Sequence[str]) -> Iterator[Finding]:
    """Says what a worker uses.

    Args:
        enabled: transports and devices.
        kinds: of shared memory.
        log: what UCX and trio_ucx logged meanwhile.
    """
    found = "; ".join(f"{each.name} ({', '.join(each.devices)})" for each in by_transport([], [*enabled]))
    reaches = [(name, device) for name, device in enabled if name not in _LOCAL and (name, device) != ("tcp", "lo")]
    advice = "bring a network device up (ip link set lo up), or allow it (UCX_NET_DEVICES, UCX_TLS), to reach others"
    state: State = "ok" if reaches else "warning" if "tcp" in found else "problem"
    why = {match[1]: match[2] for line in log if (match := _WITHOUT.match(line))}
    no_tcp = f"; no tcp: {why['TCP']}" if "TCP" in why else ""
    yield Finding(
        "transports", state, found + no_tcp, None if reaches else "change what it names" if no_tcp else advice
    )
    found = ", ".join(sorted(kinds)) or f"none: {why.get('shared memory', 'the configuration allows none')}"
    instead = "RDMA" if any(name.startswith(rdma.TRANSPORTS) for name, _ in enabled) else "TCP"
    advice = f"raise or free what it names, or allow it (UCX_TLS); until then processes of this machine use {instead}"
    yield warn_unless(kinds, "shared memory", found, advice)
    if hooks := why.get("memory hooks"):
        yield Finding("memory hooks", "warning", f"none: {hooks}", "change what it names, if there is RDMA")


def check_libraries(folders: Sequence[str]) -> Finding:
    """Looks for several UCX.

    Args:
        folders: where Python looks for packages.
    """
    packages = {each.name for each in distributions(path=[*folders]) if "/libucp" in (each.read_text("RECORD") or "")}
    wheels, others = (sorted(each for each in packages if each.startswith("libucx") is own) for own in (True, False))
    found, system = f"UCX {ucx.release}, {ucx.file}", ctypes.util.find_library("ucp")
    if len(wheels) > 1:
        advice = "uninstall all of them, and install one: they share files, and what is there now may be of either"
        return Finding("libraries", "problem", f"{found}; installed: {' and '.join(wheels)}", advice)
    if system and not ucx.system:
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
    if rest := [line for line in log if "unused env" not in line and not _WITHOUT.match(line)]:
        yield Finding("log", "warning", f"UCX says: {'; '.join(rest)}", "mend what the lines name")
