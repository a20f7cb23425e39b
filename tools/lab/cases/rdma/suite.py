"""Runs the project's tests over the transport of this case, in place of TCP. A part is a file of tests.

LAB_PYTEST has further options of pytest, such as ``--part 1/4``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path

from common import OUT, tell

#: What passes between workers. Other tests assume TCP, or open no connection.
FILES = """
    active_messages answering arrays atomics batch blocks byte_stream cancellation chain_regressions chains channels
    closed_memory closed_meanwhile closing credit datatypes forks leader long_messages mapped_memory memory_bounds
    messages notifications peer_death peers_and_transports polling raw_tags receive_queue remote_memory
    remote_memory_peers request_groups rpc rpc_flow server shared_endpoint shared_memory tag_order threads
    ucp_functions ucp_streams ucx_properties mesh/group mesh/losses mesh/processes mesh/reductions
"""


def main() -> int:
    tls = os.environ.pop("UCX_TLS")
    names = sys.argv[1:] or [name for name in FILES.split() if (name, tls) != ("batch", "ud")]  # UD has no batches
    tell("PLAN", *names)
    report, source = OUT / "report.xml", Path(os.environ["PYTHONPATH"].split(":")[1])
    files = {name: "tests/" + "/".join([*name.split("/")[:-1], f"test_{name.split('/')[-1]}"]) for name in names}
    network = {"TRIO_UCX_TEST_NETWORK": tls, "TRIO_UCX_TEST_ADDRESS": os.environ["ADDRESS"]}
    network["TRIO_UCX_TEST_PROMPT"] = "2"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--timeout", "600", f"--junitxml={report}", *os.environ.get("LAB_PYTEST", "").split()]
    command += [f"{file}.py" for file in files.values()]
    status = subprocess.run(command, env={**os.environ, **network}, cwd=source).returncode
    well: Counter[str] = Counter()
    all_cases: Counter[str] = Counter()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        if case.find("skipped") is None:
            all_cases[file] += 1
            well[file] += case.find("failure") is None and case.find("error") is None
    for name, file in files.items():
        result = "FAIL" if well[file] < all_cases[file] else "OK"
        tell(result, name, "rank 0", f"({well[file]} of {all_cases[file]})")
    return status


if __name__ == "__main__":
    sys.exit(main())
