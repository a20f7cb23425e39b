"""Sweeps over UCX's options for sizes and thresholds: each combination works, or is refused at once by name.

Each case runs ``sizes_program.py`` in a process of its own, so that a hang or a crash in UCX costs only that case. A
sample runs by default, all with ``--full``.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from trio_ucx import ucp
from trio_ucx.ucp._quirks.option_limits import LIMITS, number
from trio_ucx.ucp._quirks.releases import WELL_CONFIGURABLE

pytestmark = pytest.mark.skipif(ucp.library().version < WELL_CONFIGURABLE, reason="this UCX is hardly configurable")

PROGRAM = Path(__file__).parent / "sizes_program.py"
#: Seconds that a case may take, and those after which its process is killed.
LIMIT, PATIENCE = 30.0, 60.0

TCP, SYSV, POSIX, CMA = "tcp", "sysv,tcp,self", "posix,tcp,self", "sysv,cma,tcp,self"
QUEUE = {
    "SEG_SIZE": "0 1 64 1k 2048 4095 4351 4352 4353 8192 8256 16k 32k 60000 65534 65535 65536 64k 65537 1m 4g inf auto",
    "FIFO_SIZE": "0 1 2 4 64 100 512 4096 1k 65537 33554432 inf -1",
    "FIFO_ELEM_SIZE": "0 28 29 32 36 40 64 100 127 256 4096 65535 65536 131072 inf",
    "FIFO_RELEASE_FACTOR": "0 0.01 0.9 1",
    "FIFO_MAX_POLL": "0 1 1000 inf auto",
    "RX_MAX_BUFS": "0 1 257 512 inf -1",
    "RX_BUFS_GROW": "0 1 2 10000",
    "RX_MAX_CHUNK_SIZE": "0 1k 64k 1g inf",
    "RX_GROW_FACTOR": "0 1 4",
    "MAX_NUM_EPS": "0 1 inf",
}
#: By the value of TLS: options and their values.
ALIKE: dict[str, dict[str, str]] = {
    SYSV: {f"SYSV_{name}": values for name, values in QUEUE.items()},
    POSIX: {f"POSIX_{name}": values for name, values in QUEUE.items()},
    "tcp,sm,self": {f"MM_{name}": QUEUE[name] for name in ("SEG_SIZE", "FIFO_SIZE", "FIFO_ELEM_SIZE")},
    TCP: {
        "TCP_TX_SEG_SIZE": "0 64 256 1k 4351 4352 8k 63k 65535 64k 65537 1m inf auto",
        "TCP_RX_SEG_SIZE": "0 1k 4351 4352 8k 63k 65535 65537 256k 16m 1g inf",
        "TCP_MAX_IOV": "0 1 2 6 7 16 1024 100000 inf",
        "TCP_SENDV_THRESH": "0 1 64 2k 64k inf",
        "TCP_PUT_ENABLE": "y n",
        "TCP_MAX_POLL": "0 1 1000 inf -1",
        "TCP_TX_MAX_BUFS": "0 8 inf -1",
        "TCP_TX_BUFS_GROW": "0 1 100000",
        "TCP_TX_MAX_CHUNK_SIZE": "0 1k 1m inf",
        "TCP_TX_GROW_FACTOR": "0 1 10",
        "TCP_RX_MAX_BUFS": "0 8 inf -1",
        "TCP_RX_BUFS_GROW": "0 1 100000",
        "TCP_RX_MAX_CHUNK_SIZE": "0 1k 1m inf",
        "TCP_RX_GROW_FACTOR": "0 1 10",
        "TCP_SNDBUF": "64k 1m auto",  # with less, here or in TCP_RCVBUF, transfers are very slow
        "TCP_RCVBUF": "64k 1m auto",
        "SELF_SEG_SIZE": "0 64 4351 4352 64k 1m inf",
    },
    CMA: {
        "CMA_SEG_SIZE": "0 64 4k inf",
        "CMA_MAX_IOV": "0 1 16 inf",
        "CMA_TX_QUOTA": "0 1 inf",
        "CMA_TX_MAX_BUFS": "0 8 inf",
        "CMA_TX_BUFS_GROW": "0 1 100000",
    },
}
#: Those of UCP itself, whatever the transport.
UCP = {
    "RNDV_THRESH": "0 63 64 100 1k 1024 1025 4096 4097 8k 60000 65535 65537 1m inf auto intra:1k,inter:100k "
    "intra:4097,inter:1m",
    "RNDV_SEND_NBR_THRESH": "0 1 64k inf auto",
    "RNDV_THRESH_FALLBACK": "0 64k inf",
    "RNDV_FRAG_SIZE": "1k host:0 host:1 host:100 host:1k host:64k host:64m",
    "RNDV_FRAG_ALLOC_COUNT": "1 host:0 host:1 host:10000",
    "RNDV_FRAG_MEM_TYPES": "host cuda host,cuda",
    "RNDV_SCHEME": "auto get_zcopy put_zcopy get_ppln put_ppln am rkey_ptr",
    "RNDV_PIPELINE_SEND_THRESH": "0 1 64k inf",
    "RNDV_PIPELINE_SHM_ENABLE": "y n",
    "RNDV_PIPELINE_ERROR_HANDLING": "y n",
    "RNDV_PERF_DIFF": "0 100",
    "RNDV_ALIGN_THRESH": "0 1 inf",
    "MIN_RNDV_CHUNK_SIZE": "0 1 1k inf",
    "RKEY_PTR_SEG_SIZE": "0 1 4k inf",
    "RNDV_PUT_FORCE_FLUSH": "y n",
    "ZCOPY_THRESH": "0 1 1k 8k 64k inf auto",
    "BCOPY_THRESH": "0 1 64 1k 8k 64k inf auto",
    "SEG_SIZE": "0 1 511 512 1k 8k 64k 1m inf",
    "MAX_EAGER_RAILS": "0 1 4 inf",
    "MAX_RNDV_RAILS": "0 1 4 inf",
    "MULTI_LANE_MAX_RATIO": "0 0.5 1 100",
    "RX_MPOOL_SIZES": "0 1 64 8,16,32 64,32k 64,64k 128k inf",
    "TM_THRESH": "0 inf",
}


@attrs.frozen
class Case:
    """Options of the two sides."""

    ours: Mapping[str, str]
    theirs: Mapping[str, str]

    def __str__(self) -> str:
        alike = self.ours == self.theirs
        return _text(self.ours) if alike else f"{_text(self.ours)} / {_text(self.theirs)}"


def _text(options: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def every_value(transports: str) -> dict[str, str]:
    return {**ALIKE[transports], **({} if transports in (POSIX, "tcp,sm,self") else UCP)}


def alike() -> Iterator[Case]:
    for transports in ALIKE:
        more = {"CMA_MEMORY_INVALIDATE": "y"} if transports == CMA else {}
        for name, values in every_value(transports).items():
            for value in values.split():
                options = {"TLS": transports, **more, name: value}
                yield Case(options, options)


def can_work(name: str, value: str) -> bool:
    return all(limit.allows(value) for limit in LIMITS if re.fullmatch(limit.options, name))


def different() -> Iterator[Case]:
    """The first value that can work with each of the others."""
    for transports in ALIKE:
        for name, values in every_value(transports).items():
            first, *others = [value for value in values.split() if can_work(name, value)]
            for value in others:
                yield Case({"TLS": transports, name: first}, {"TLS": transports, name: value})


def run(case: Case) -> None:
    """Runs a case: every message arrives unchanged, or an option is refused by name."""
    texts = [part for side in (case.ours, case.theirs) for value in side.values() for part in value.split(",")]
    numbers = {100, 8192, 65536, *(int(size) for text in texts if (size := number(text.rpartition(":")[2])) in SIZES)}
    arguments = {"ours": case.ours, "theirs": case.theirs, "sizes": sorted(numbers), "raw": True, "limit": LIMIT}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    process = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    last = process.stdout.strip().rpartition("\n")[2]
    where = f"{case}: exit status {process.returncode}, last step: {last}\n{process.stderr[-2000:]}"
    assert process.returncode == 0, where
    if last != "done":
        named = {name for side in (case.ours, case.theirs) for name in side if name != "TLS"}
        named |= {re.sub("^MM_", f"{kind}_", name) for name in named for kind in ("SYSV", "POSIX")}
        assert last.startswith("refused ") and any(name in last for name in named), where


#: Sizes around which messages are sent.
SIZES = range(2**20 + 1)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(alike()), ids=str)
def test_sides_alike(case: Case) -> None:
    run(case)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(different()), ids=str)
def test_sides_different(case: Case) -> None:
    run(case)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(150))
def test_several_options(number: int, chance: random.Random) -> None:
    """Random values of a few options, on both sides or one."""
    transports = chance.choice(list(ALIKE))
    values: dict[str, Any] = {**every_value(transports), **UCP}

    def choose() -> dict[str, str]:
        return {
            name: chance.choice([value for value in values[name].split() if can_work(name, value)])
            for name in chance.sample(list(values), chance.randint(2, 5))
        }

    both = {"TLS": transports, **choose()}
    run(Case({**both, **choose()}, both if chance.random() < 0.5 else {**both, **choose()}))
