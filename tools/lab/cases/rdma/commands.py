"""What info, check, check HOST, perf and report say over RDMA; one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from common import main, part

COMMAND = [sys.executable, "-m", "trio_ucx"]


def variables(tls: str) -> dict[str, str]:
    return {**os.environ, "TRIO_UCX_AUTHKEY": "k" * 32, "TRIO_UCX_REPORT": "USR1", "UCX_TLS": tls}


def said(*words: str, tls: str) -> str:
    return subprocess.run([*COMMAND, *words], stdout=subprocess.PIPE, text=True, env=variables(tls), timeout=300).stdout


def findings(*words: str, tls: str) -> dict[str, str]:
    found = json.loads(said("check", *words, "--json", tls=tls))["findings"]
    return {each["id"]: f"{each['state']}: {each['found']} -> {each['advice']}" for each in found}


@part
async def this_machine():
    for tls, chosen in ("rc", {"rc", "ud"}), ("ud", {"ud"}), ("tcp,self", {"self", "tcp"}):
        transports = json.loads(said("info", "--json", tls=tls))["transports"]
        assert {each["name"].split("_")[0] for each in transports if each["devices"]} == chosen, transports
    found = findings(tls="rc")
    assert found["InfiniBand"].startswith("ok: rc_"), found
    assert found["shared memory"].endswith("until then processes of this machine use RDMA"), found
    assert "nothing names" in findings(tls="")["InfiniBand"]


@part
async def host_and_report():
    for theirs, outcome in ("rc", "ok: 8 bytes in "), ("ud", "problem: not tried: "):
        command = [*COMMAND, "check", "--listen", "0.0.0.0:0", "--json"]
        with subprocess.Popen(command, env=variables(theirs), stdout=subprocess.PIPE, text=True) as listener:
            try:
                address = json.loads(listener.stdout.readline())["listening"]
                found = findings(address, tls="rc")
                assert not address.startswith("127."), address
                assert all(line.startswith(outcome) for name, line in found.items() if "all transports" in name), found
                assert "transports rc" in said("report", str(listener.pid), tls="rc") or theirs != "rc"
            finally:
                listener.send_signal(signal.SIGINT)


@part
async def perf():
    text = said("perf", "--sizes", "8,64k", "--seconds", "0.5", tls="rc")
    assert "transports: rc_" in text and text.count(" TCP ") >= 2, text


main(timeout=500)
