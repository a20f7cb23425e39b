"""Processes on two cores that carry out orders; every wait has a limit, and nothing is left running.

There are two, the client and the server; or more, all but one of which do what the server does: they follow the client.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import stats
from .contenders import ROLES, Contender
from .control import Line
from .cpus import one_cpu_per_core
from .jobs import BURST_COUNT, Batch, Job, Kind

ROOT = Path(__file__).resolve().parent.parent
#: Seconds to start and connect; to end.
START, END = 30, 3
#: At most so many bytes in a batch: some libraries queue without limit.
BATCH_BYTES = 2**31
#: And so many connections: the kernel keeps the port of each for a while.
MOST_CONNECTIONS = 3000

Cpus = tuple[int | None, int | None]


class PairFailed(Exception):
    """An end reported an error, or did not answer in time."""


def two_cpus() -> Cpus:
    """Two cores of those that we may use; none where there is only one."""
    cpus = one_cpu_per_core()
    if len(cpus) < 2:  # the hardware threads of one core, if it has some
        cpus = sorted(os.sched_getaffinity(0))
    return (cpus[0], cpus[1]) if len(cpus) > 1 else (None, None)


class Pair:
    """The processes of a contender."""

    def __init__(self, lines: Mapping[str, Line], sockets: Mapping[Line, socket.socket], errors: Path) -> None:
        self._lines, self._sockets, self._errors = lines, sockets, errors
        self.transports: Sequence[str] = ()
        self.info: Mapping[str, Mapping[str, float]] = {}
        self._seed = 0
        self._followers = [role for role in ROLES if role in lines and role != "client"]

    def hear(self, roles: Sequence[str], limit: float) -> dict[str, dict[str, Any]]:
        """Returns the answer of each end; raises as soon as one of them fails."""
        waiting = {self._sockets[self._lines[role]]: role for role in roles}
        deadline = time.monotonic() + limit
        heard = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise PairFailed(f"nothing from the {' and the '.join(waiting.values())} for {limit:.0f} s")
            for connected in ready:
                role = waiting.pop(connected)
                try:
                    heard[role] = self._lines[role].hear_within(5)
                except (EOFError, TimeoutError):
                    raise PairFailed(f"the {role} ended. {self._said()}") from None
                if "error" in heard[role]:
                    raise PairFailed(heard[role]["error"])
        return heard

    def _said(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def tell(self, role: str, message: dict[str, Any]) -> None:
        try:
            self._lines[role].tell_now(message)
        except OSError:
            raise PairFailed(f"the {role} ended. {self._said()}") from None

    def open(self, setup: dict[str, Any], cpus: Cpus) -> None:
        """Each follower gives an address to the next one, and the last one to the client."""
        address = None
        for number, role in enumerate(self._followers):
            self.tell(role, {**setup, "role": role, "cpu": cpus[number % 2], "address": address})
            address = self.hear([role], START)[role]["address"]
        self.tell("client", {**setup, "role": "client", "cpu": cpus[1], "address": address})
        opened = self.hear([*self._followers, "client"], setup["options"].get("start", START))
        self.transports = opened["client"]["transports"]
        self.info = {role: one["info"] for role, one in opened.items()}

    def end(self) -> None:
        for role in ("client", *self._followers):
            with contextlib.suppress(PairFailed):
                self.tell(role, {"do": "end"})

    def batch(self, job: Job, count: int, limit: float) -> dict[str, float]:
        """Runs one batch. Returns its figures; ``seconds`` is the time that it took."""
        self._seed += 1
        order = {"do": "batch", "limit": limit, **Batch(job, count, self._seed).order()}
        for role in self._followers:
            self.tell(role, order)
        self.hear(self._followers, limit)
        self.tell("client", order)
        heard = self.hear(["client", *self._followers], limit)
        client, server = heard["client"], heard["server"]
        seconds = (server["end"] - client["begin"]) / 1e9
        took_us = (client["end"] - client["begin"]) / 1000
        each = {Kind.LATENCY: 2, Kind.EXCHANGE: 2, Kind.STEPS: job.size, Kind.BURST: BURST_COUNT}.get(job.kind, 1)
        messages = each * count
        figures = {"seconds": seconds, "cpu_us": sum(one["cpu"] for one in heard.values()) / messages * 1e6}
        if job.kind is Kind.EXCHANGE:
            figures["wall_us"] = took_us / messages
        elif job.kind is Kind.STEPS:
            figures |= {"step_us": took_us / messages, **client["more"]}
        elif job.kind is Kind.LATENCY:
            figures |= {name: client[name] for name in ("median_us", "mean_us", "p99_us")} | client["more"]
        elif job.kind is Kind.BURST:
            figures["burst_ms"] = took_us / 1000 / count
        elif job.kind is Kind.BANDWIDTH:
            figures["gb_s"] = count / seconds * job.size / 1e9
        else:
            figures["messages_s" if job.kind is Kind.RATE else "connects_s"] = count / seconds
        return figures

    def idle(self, seconds: float) -> dict[str, float]:
        for role in ("server", "client"):
            self.tell(role, {"do": "idle", "seconds": seconds, "limit": seconds + 10})
        heard = self.hear(["server", "client"], seconds + 10)
        return {"idle_percent": max(100 * one["cpu"] / one["seconds"] for one in heard.values())}

    def opening(self) -> dict[str, float]:
        client, server = self.info["client"], self.info["server"]
        if not client or not server:
            return {}
        return {
            "connects_s": 1 / client["seconds"],
            "client_kib": client["kib"],
            "server_kib": server["kib"],
            "descriptors": max(client["descriptors"], server["descriptors"]),
        }

    def measure(self, job: Job, seconds: float) -> dict[str, float]:
        """Runs a batch of one message, to warm up and to verify it; then larger ones, until one takes long enough."""
        if job.kind is Kind.IDLE:
            return self.idle(max(3 * seconds, 3))  # the cost of these orders must not show
        if job.kind is Kind.OPENING:
            return self.opening()
        count, most = 1, MOST_CONNECTIONS if job.kind is Kind.CONNECT else max(1, BATCH_BYTES // job.size)
        limit = 10 + 10 * seconds
        figures = self.batch(job, count, limit)
        while figures["seconds"] < 0.6 * seconds and count < most:
            count = min(most, 30 * count, stats.next_count(count, figures["seconds"], seconds))
            figures = self.batch(job, count, limit)
        return figures


@contextlib.contextmanager
def open_pair(contender: Contender, cpus: Cpus, pythons: Mapping[str, str]) -> Iterator[Pair]:
    """Starts and connects the processes; ends or kills them at the end of the block."""
    python = pythons.get(contender.module, sys.executable)
    setup = {"module": contender.module, "transport": contender.transport, "options": dict(contender.options)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment = {**clean, **contender.environment}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(folder / "control"))
        listening.listen()
        command = [python, "-m", "benchmarks.child", str(folder / "control")]
        errors = stack.enter_context((folder / "errors").open("w+b"))
        processes = []
        for one in commands(contender, python, command):
            process = subprocess.Popen(
                one,
                cwd=contender.checkout or ROOT,
                env=environment,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
            stack.callback(stop, process)
            processes.append(process)
        count = contender.options.get("processes", 2)
        lines, sockets = accept(listening, count, processes, folder / "errors", stack)
        pair = Pair(lines, sockets, folder / "errors")
        pair.open(setup, cpus)
        yield pair
        pair.end()
        deadline = time.monotonic() + END
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))


def commands(contender: Contender, python: str, command: list[str]) -> list[list[str]]:
    count = contender.options.get("processes", 2)
    if "mpirun" not in contender.options:
        return [[*command, role] for role in ROLES[:count]]
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else "mpirun"
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *contender.options["mpirun"]]
    return [[mpirun, "-n", str(count), *options, *command]]


def accept(
    listening: socket.socket,
    count: int,
    processes: Sequence[subprocess.Popen[bytes]],
    errors: Path,
    stack: contextlib.ExitStack,
) -> tuple[dict[str, Line], dict[Line, socket.socket]]:
    lines: dict[str, Line] = {}
    sockets = {}
    deadline = time.monotonic() + START
    listening.settimeout(0.2)
    while len(lines) < count:
        try:
            connected, _ = listening.accept()
        except TimeoutError:
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                said = errors.read_text(errors="replace").strip().splitlines()
                raise PairFailed(f"the processes did not start. {said[-1][:300] if said else ''}") from None
            continue
        stack.enter_context(connected)
        line = Line(connected)
        lines[line.hear_within(5)["role"]] = line
        sockets[line] = connected
    return lines, sockets


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of it and of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
