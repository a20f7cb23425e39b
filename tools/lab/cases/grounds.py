"""The cases of each ground."""

from __future__ import annotations

import attrs


@attrs.frozen
class Case:
    """A program of this folder, and where it runs.

    Args:
        tls: the transports (UCX_TLS); "": UCX's default.
        guests, ranks: two ranks run it in one guest or in two, or one rank in one.
        seconds: after which the guests are ended.
        quick: whether it suits CI.
    """

    program: str
    tls: str = ""
    guests: int = 1
    ranks: int = 2
    seconds: int = 600
    quick: bool = False


GROUNDS: dict[str, dict[str, Case]] = {
    "rdma": {
        "features-rc": Case("features.py", "rc", quick=True),
        "features-ud": Case("features.py", "ud"),
        "features-all": Case("features.py", "all"),
        "features-rc-tcp": Case("features.py", "rc_verbs,tcp"),
        "features-two": Case("features.py", "rc", guests=2, seconds=900),
        "faults-rc": Case("machines/faults.py", "rc", guests=2, seconds=900),
        "faults-ud": Case("machines/faults.py", "ud", guests=2, seconds=900),
        "faults-rc-tcp": Case("machines/faults.py", "rc_verbs,tcp", guests=2, seconds=900),
        "power": Case("machines/power.py", "rc", guests=2, seconds=900),
        "loss-rc": Case("rdma/loss.py", "rc", guests=2),
        "loss-ud": Case("rdma/loss.py", "ud", guests=2),
        "loss-rc-tcp": Case("rdma/loss.py", "rc_verbs,tcp", guests=2),
        "commands": Case("rdma/commands.py", ranks=1, seconds=1200),
        "many": Case("rdma/many.py", "rc", ranks=1),
        "suite-rc": Case("rdma/suite.py", "rc", ranks=1, seconds=7200),
        "suite-ud": Case("rdma/suite.py", "ud", ranks=1, seconds=7200),
        "suite-shared": Case("rdma/suite.py", "rc,sm,self", ranks=1, seconds=7200),
        "suite-default": Case("rdma/suite.py", "all", ranks=1, seconds=7200),
        "combinations": Case("rdma/combinations.py", "rc", ranks=1),
        "pinned": Case("rdma/pinned.py", "rc", ranks=1),
        "strangers": Case("rdma/strangers.py", "rc", ranks=1, seconds=1200),
        "wakeups-rc": Case("rdma/wakeups.py", "rc", seconds=1500, quick=True),
        "wakeups-ud": Case("rdma/wakeups.py", "ud", seconds=1500, quick=True),
        "wakeups-tcp": Case("rdma/wakeups.py", "tcp", seconds=1500),
        "wakeups-shm": Case("rdma/wakeups.py", "sm,self", seconds=1500),
    },
    "machines": {
        "features": Case("features.py", "tcp", guests=2, quick=True),
        "faults": Case("machines/faults.py", "tcp", guests=2, seconds=900),
        "power": Case("machines/power.py", "tcp", guests=2, seconds=900),
        "documented": Case("machines/documented.py", guests=2),
        "firewall": Case("machines/firewall.py", guests=2, seconds=900),
        "groups": Case("machines/groups.py", guests=2, seconds=1500),
    },
    "arm": {
        "features-tcp": Case("features.py", "tcp", quick=True),
        "features-shm": Case("features.py", "tcp,sm,self"),
        "examples": Case("arm/examples.py", ranks=1, seconds=900),
    },
}
GROUNDS["here"] = {name: case for name, case in GROUNDS["rdma"].items() if case.guests == 1}
