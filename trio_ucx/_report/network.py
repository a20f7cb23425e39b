"""What the kernel knows about peers: whether their processes are stopped, and whether their hosts answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from .._util.process import Process, has_ended, is_stopped, is_visible, this_process

#: So many unanswered packets in a row are worth mentioning. One or two get lost anyway.
_MANY = 3


def stopped_process(process: Process) -> Iterator[str]:
    """A sentence if a peer's process on this machine is stopped."""
    others = is_visible(process) and process != this_process() and not has_ended(process)
    if others and is_stopped(process.pid):
        yield (
            f"the peer's process {process.pid} is stopped (state T in /proc/{process.pid}/stat): it goes on when "
            f"something continues it (kill -CONT {process.pid}, or its debugger)"
        )


def silent_hosts() -> dict[str, int]:
    """The hosts to which this one has sent packets several times without an answer, and how often, by IP address."""
    found: dict[str, int] = {}
    for file in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]:
                fields = line.split()
                # Data that was sent again, and probes (of keepalive, or of a full receiver).
                unanswered = max(int(fields[6], 16), int(fields[8]))
                if unanswered >= _MANY:
                    ip = _ip(fields[2].partition(":")[0])
                    found[ip] = max(unanswered, found.get(ip, 0))
    return found


def _ip(text: str) -> str:
    """An IP address of /proc/net: words in the machine's order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return str(ip_address(b"".join(words))).removeprefix("::ffff:")


def no_answer(silent: Mapping[str, int], hosts: Iterable[str]) -> Iterator[str]:
    """A sentence for each of a peer's addresses that does not answer."""
    for host in dict.fromkeys(hosts):
        if host in silent:
            yield (
                f"the peer's host {host} does not answer: the kernel has sent packets {silent[host]} times in a row, "
                "and nothing has acknowledged them. A firewall drops them, or the network or the host is down"
            )
