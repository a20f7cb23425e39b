"""``python -m trio_ucx info``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
from typing import Any

import attrs
import trio

from .. import UCXError
from .._native import ucx
from .._version import __version__
from ..ucp import Context, open_context
from ..ucp._internal_api import DEFAULT_OPTIONS, OptionError
from .check.devices import check_rdma
from .privileges import Privileges, look

#: Options that make UCX list every device, whatever the environment excludes.
EVERYTHING = dict.fromkeys(("TLS", "NET_DEVICES", "SHM_DEVICES", "SELF_DEVICES", "ACC_DEVICES"), "all")

#: ``#      resource 1  :  md 1  dev 1  flags -- tcp/eth0``
_RESOURCE = re.compile(r"#\s*resource\s+\d+\s*:.*\s(?P<transport>[^\s/]+)/(?P<device>\S+)\s*$")


@attrs.frozen
class TransportInfo:
    """A UCX transport of this machine.

    Attributes:
        name: ``tcp``, ``sysv``, ``rc_mlx5`` and the like.
        devices: the devices that the configuration in force lets UCX use.
        disabled: the devices that it excludes.
    """

    name: str
    devices: list[str]
    disabled: list[str]


@attrs.frozen
class DefaultInfo:
    """An option for which trio_ucx has a default of its own.

    Attributes:
        name: without the ``UCX_`` prefix.
        value: trio_ucx's choice.
        in_force: whether that is what UCX uses.
        instead: what was chosen instead of trio_ucx's default, or why that is not in force; None if it is.
    """

    name: str
    value: str
    in_force: bool
    instead: str | None


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="the UCX in use, this machine's transports, the configuration in force, and what the kernel permits",
        description="Shows the UCX in use, this machine's transports and devices, the configuration in force, and what "
        "the kernel lets this process do: its capabilities, shared memory, descriptors.",
    )
    parser.add_argument("--config", action="store_true", help="all of UCX's options, not only those that were chosen")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all options")
    parser.set_defaults(run=run, prog=parser.prog)


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else as_text(facts, arguments.config))
    return 1 if facts["error"] else 0


def collect() -> dict[str, Any]:
    """Returns all that ``info`` prints, ready for JSON."""
    with Log("trio_ucx"), open_context(EVERYTHING) as context:
        present = resources(context)
    error: str | None = None
    enabled: list[tuple[str, str]] = []
    config: dict[str, str] = {}
    chosen: dict[str, str] = {}
    log = Log("trio_ucx")
    try:
        with log, open_context() as context:
            enabled = resources(context)
            config, chosen = effective_config(context)
            defaults = [_default(name, value, context) for name, value in DEFAULT_OPTIONS.items()]
    except (UCXError, OptionError) as caught:
        error = str(caught)
        defaults = [_default(name, value, None) for name, value in DEFAULT_OPTIONS.items()]
    return {
        "trio_ucx": __version__,
        "trio": trio.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "ucx": {
            "version": ucx.release,
            "compiled_version": ".".join(map(str, ucx.compiled_version)),
            "file": ucx.file,
            "source": "system" if ucx.system else "PyPI wheel",
        },
        "error": error,
        "log": log.lines,
        "transports": [attrs.asdict(one) for one in by_transport(present, enabled)],
        "defaults": [attrs.asdict(one) for one in defaults],
        "chosen": chosen,
        "config": config,
        "infiniband": attrs.asdict(check_rdma(present, enabled)),
        "privileges": attrs.asdict(look()),
    }


class Log(logging.Handler):
    """Keeps the warnings that a logger gets in a block."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger(name)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def resources(context: Context) -> list[tuple[str, str]]:
    """The ``(transport, device)`` pairs of a context."""
    found = (_RESOURCE.match(line) for line in context.info_text().splitlines())
    return [(match["transport"], match["device"]) for match in found if match]


def by_transport(present: list[tuple[str, str]], enabled: list[tuple[str, str]]) -> list[TransportInfo]:
    names = dict.fromkeys(name for name, _ in present + enabled)
    return [
        TransportInfo(
            name,
            devices=[device for transport, device in enabled if transport == name],
            disabled=[pair[1] for pair in present if pair[0] == name and pair not in enabled],
        )
        for name in names
    ]


def effective_config(context: Context) -> tuple[dict[str, str], dict[str, str]]:
    """Returns UCX's options in force, by name without the prefix, and those that trio_ucx or the environment chose.

    UCX lists the options of single transports only if trio_ucx chose them, so those in the environment are added
    unchanged.
    """
    config = {}
    for line in context._config_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            config[name.removeprefix("UCX_")] = value
    environment = {name[4:]: value for name, value in os.environ.items() if name.startswith("UCX_")}
    config = {**environment, **config}
    return config, {name: config[name] for name in sorted({*environment, *context.config})}


def _default(name: str, value: str, context: Context | None) -> DefaultInfo:
    variable = f"UCX_{name}"
    if variable in os.environ:
        return DefaultInfo(name, value, os.environ[variable] == value, f"{variable}={os.environ[variable]}")
    if context is not None and name not in context.config:
        return DefaultInfo(name, value, False, "this UCX does not know the option")
    return DefaultInfo(name, value, True, None)


def as_text(facts: dict[str, Any], full_config: bool) -> str:
    library = facts["ucx"]
    lines = [
        f"trio_ucx {facts['trio_ucx']}, Trio {facts['trio']}, Python {facts['python']}, {facts['platform']}",
        f"UCX {library['version']} (compiled against {library['compiled_version']}), {library['source']}:",
        f"  {library['file']}",
        "",
        "Transports and their devices",
    ]
    width = max(len(one["name"]) for one in facts["transports"])
    for one in facts["transports"]:
        parts = [", ".join(one["devices"])] if one["devices"] else []
        if one["disabled"]:
            parts.append(f"disabled by the configuration: {', '.join(one['disabled'])}")
        lines.append(f"  {one['name']:<{width}}  {'; '.join(parts)}")
    rdma = facts["infiniband"]
    lines.append(f"  InfiniBand: {' -> '.join(filter(None, (rdma['found'], rdma['advice'])))}")
    lines += ["", "trio_ucx's own defaults"]
    for one in facts["defaults"]:
        state = "in force" if one["in_force"] else f"not in force: {one['instead']}"
        lines.append(f"  {one['name']}={one['value']}  ({state})")
    lines += ["", "What the kernel lets this process do"]
    lines += [f"  {line}" for line in Privileges(**facts["privileges"]).as_lines()]
    if facts["log"]:
        lines += ["", "UCX's log", *(f"  {line}" for line in facts["log"])]
    if facts["error"]:
        lines += ["", f"UCX does not start with this configuration: {facts['error']}"]
    elif full_config:
        lines += ["", "UCX's configuration"]
        lines += [f"  {name}={value}" for name, value in facts["config"].items()]
    else:
        lines += ["", "UCX's options in force that trio_ucx or the environment chose (all: --config)"]
        lines += [f"  {name}={value}" for name, value in facts["chosen"].items()]
    return "\n".join(lines)
