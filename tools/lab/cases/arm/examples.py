"""Programs of examples/, each with its client; one rank. (Not those that wait for a few seconds only.)"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from common import OUT, main, part, run_shell

EXAMPLES = OUT / "examples"


def call(*words: str) -> None:
    run_shell(" ".join([sys.executable, "-u", *words]), timeout=120)


@contextmanager
def served(name: str, *arguments: str):
    """Starts a program; gives the address that it prints."""
    log = Path(f"/tmp/{name}.log")
    with open(log, "w") as file:
        process = subprocess.Popen([sys.executable, "-u", EXAMPLES / name, *arguments], stdout=file, stderr=file)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield found[0]
    finally:
        process.terminate()
        process.wait()


#: By example: the server's arguments, and what its clients are called with; ADDRESS stands for the server's.
PAIRS = {
    "rpc": (["serve"], ['call ADDRESS add \'{"a": 1, "b": 2}\'']),
    "hash_table": (["serve"], ["put ADDRESS key value", "get ADDRESS key", "bench ADDRESS --entries 200"]),
    "kv_cache": (["prefill"], ["decode ADDRESS 'a prompt'"]),
    "publish": (["serve"], ["watch ADDRESS --count 3"]),
}
MESHES = {
    "ring_all_reduce": "ring_all_reduce.py",
    "heat_equation": "heat_equation.py --side 64 --steps 20 --check",
}


def add(name: str) -> None:
    async def pair():
        server, clients = PAIRS[name]
        with served(f"{name}.py", *server) as address:
            for client in clients:
                call(str(EXAMPLES / f"{name}.py"), client.replace("ADDRESS", address))

    async def two_ranks():
        call("-m trio_ucx mesh --ranks 2", f"{EXAMPLES}/{MESHES[name]}")

    function = pair if name in PAIRS else two_ranks
    function.__name__ = name
    part(function)


for name in (*PAIRS, *MESHES):
    add(name)
main(timeout=200)
