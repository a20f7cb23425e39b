"""``ucx_perftest``, UCX's own tool in C: what UCX can do on this machine, with our options and error handling."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import stats
from ..jobs import BY_SIZE, WINDOW, Job, Kind, bandwidth, latency, rate
from . import Contender

LOOP = "tool"

#: UCX's names of the transports. The tool connects by worker address, which needs no tcp beside shared memory.
TLS = {"tcp": "tcp", "shm": "tcp,sm,self"}
#: Seconds for the server to listen.
START = 10
ATTEMPTS = 3


class NotListening(Exception):
    """The server ended, or does not listen."""


def ucx_environment(transport: str) -> dict[str, str]:
    """Our UCX options as environment variables."""
    try:
        from trio_ucx.ucp._quirks.default_options import DEFAULT_OPTIONS
    except ImportError:  # the child of a contender with an environment of its own; it has the variables already
        return {}
    options = {**DEFAULT_OPTIONS, "TLS": TLS[transport], "WARN_UNUSED_ENV_VARS": "n"}
    return {f"UCX_{name}": value for name, value in options.items()}


@functools.cache
def tool() -> Path | None:
    """The tool of the libucx wheel, so that it is the same UCX; otherwise the system's."""
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None and wheel.origin is not None:
        found = Path(wheel.origin).parent / "bin" / "ucx_perftest"
        if found.exists():
            return found
    elsewhere = shutil.which("ucx_perftest")
    return Path(elsewhere) if elsewhere else None


def contender(mode: str, transport: str, jobs: tuple[Job, ...]) -> Contender:
    return Contender(
        f"ucx_perftest {mode} {transport}",
        transport,
        "perftest",
        jobs,
        options={"mode": mode},
        environment=ucx_environment(transport),
    )


# Sleeping over shared memory hangs now and then: a fault of UCX.
CONTENDERS = [
    contender("poll", "tcp", latency() + bandwidth() + rate() + BY_SIZE),
    contender("sleep", "tcp", latency() + bandwidth() + rate()),
    contender("poll", "shm", latency() + bandwidth() + rate() + BY_SIZE),
]


def environment(contender: Contender) -> dict[str, str]:
    found = tool()
    if found is None:
        raise RuntimeError("there is no ucx_perftest, neither in the libucx wheel nor in the PATH")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return {**clean, "LD_LIBRARY_PATH": str(found.parent.parent / "lib"), **contender.environment}


def measure(contender: Contender, job: Job, seconds: float, cpus: tuple[int | None, int | None]) -> Mapping[str, float]:
    """Calibrates, in the first round, then measures for about ``seconds``."""
    key = (contender.name, job, seconds)
    if key not in _counts:
        _counts[key] = calibrate(contender, job, seconds, cpus)
    count = _counts[key]
    found = run(contender, job, count, 50, cpus)
    if job.kind is Kind.BANDWIDTH:
        return {"gb_s": job.size / found["overall_us"] / 1e3}
    if job.kind is Kind.RATE:
        return {"messages_s": 1e6 / found["overall_us"]}
    figures = {"median_us": found["percentile_us"], "mean_us": found["overall_us"]}
    if job.size == 8:  # a run of its own: the tool prints one percentile
        figures["p99_us"] = run(contender, job, max(count // 2, 100), 99, cpus)["percentile_us"]
    return figures


#: How many messages take a given time.
_counts: dict[tuple[str, Job, float], int] = {}


def calibrate(contender: Contender, job: Job, seconds: float, cpus: tuple[int | None, int | None]) -> int:
    count = 10 if job.size > 2**16 else 2000
    for _ in range(3):
        took = count * run(contender, job, count, 50, cpus)["overall_us"] / 1e6
        count = stats.next_count(count, took, seconds)
        if took > seconds / 20:
            break
    return count


def run(
    contender: Contender, job: Job, count: int, rank: int, cpus: tuple[int | None, int | None]
) -> Mapping[str, float]:
    """One run of the tool, which prints half round trips. If the port is taken meanwhile, tries another one."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(NotListening):
            return run_once(contender, job, count, rank, cpus)
    return run_once(contender, job, count, rank, cpus)


def run_once(
    contender: Contender, job: Job, count: int, rank: int, cpus: tuple[int | None, int | None]
) -> Mapping[str, float]:
    test = "tag_lat" if job.kind is Kind.LATENCY else "tag_bw"
    # The server is started without these: its client chooses the test.
    client = ["-t", test, "-s", str(job.size), "-n", str(count), "-w", str(min(count, 100)), "-R", str(rank)]
    if job.kind is Kind.BANDWIDTH:
        client += ["-O", str(WINDOW)]
    client += ["-e", "-E", contender.options["mode"], "-f", "-v"]
    return run_pair(contender, [], client, cpus)


def run_pair(
    contender: Contender, server: list[str], client: list[str], cpus: tuple[int | None, int | None] = (None, None)
) -> Mapping[str, float]:
    """Runs a server and a client of the tool, with these arguments."""
    port = free_port()
    with process(contender, port, cpus[0], server) as tool_server:
        wait_listening(port, tool_server)
        with process(contender, port, cpus[1], ["127.0.0.1", *client]) as tool_client:
            output, errors = tool_client.communicate(timeout=30)
        if tool_client.returncode:
            raise RuntimeError(f"ucx_perftest: exit status {tool_client.returncode}: {errors[-300:]}")
    return parse(output)


def parse(output: str) -> Mapping[str, float]:
    """The line of figures in what it prints with -v: iterations, percentile, average, overall latency, ..."""
    for line in reversed(output.splitlines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 8 and fields[0].isdigit():
            return {"percentile_us": float(fields[1]), "overall_us": float(fields[3])}
    raise RuntimeError(f"ucx_perftest printed no figures: {output[-300:]}")


@contextlib.contextmanager
def process(contender: Contender, port: int, cpu: int | None, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The tool, which is killed at the end of the block if it still runs."""
    command = [str(tool()), *arguments, "-p", str(port)]
    if cpu is not None:
        command += ["-c", str(cpu)]
    running = subprocess.Popen(
        command, env=environment(contender), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running:
        try:
            yield running
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(0.5 if sys.exc_info()[0] is None else 0)
            running.kill()


def wait_listening(port: int, server: subprocess.Popen[str]) -> None:
    """Looks into the kernel's table, because the tool would take a trial connection for its client."""
    wanted, listening = f":{port:04X}", "0A"
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError):
                rows = [row.split() for row in Path(table).read_text().splitlines()[1:]]
                if any(row[1].endswith(wanted) and row[3] == listening for row in rows):
                    return
        time.sleep(0.01)
    status = server.poll()
    server.kill()
    output, errors = server.communicate()
    raise NotListening(f"ucx_perftest: the server does not listen (exit status {status}). {(output + errors)[-300:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
