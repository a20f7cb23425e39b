"""Runs trio_ucx in emulated machines (guests) with kernels of their own, on ground that this machine does not offer.

    python tools/lab rdma|machines|arm|here [--quick] [CASE|CASE/PART ...]

rdma: over Soft-RoCE (rdma_rxe), with UCX built with verbs. machines: two machines and a cable, TCP. arm: AArch64.
here: this machine, which may have hardware: the cases of rdma that need no second one, then tests/test_gpu.py.
Prints what the parts of each case say, and how many went well; the exit status is 0 if all did. --quick: what suits CI.

It needs a Python in which this checkout is installed (pip install -e '.[test]'); all but here also root, and Debian or
Ubuntu on x86-64. What is missing is fetched once: packages by apt-get; Debian's kernels, from LAB_MIRROR; UCX's source
(LAB_UCX_SOURCE, an address or a file, of LAB_UCX_VERSION); for arm, what builds trio_ucx's wheel. LAB_CACHE
(~/.cache/trio_ucx_lab) keeps it. Where something is not to be had, the lab says what, and exits with 77.

LAB_ACCELERATOR=kvm uses KVM. LAB_OUT=FOLDER keeps what guests wrote. LAB_MEMORY=3G is for each guest. The programs get
LAB_ROUNDS, LAB_PYTEST and UCX_...; UCX_TLS overrides a case's own. LAB_ADDRESS (127.0.0.1): where those of here listen.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import machines
import prepare
from cases.grounds import GROUNDS, Case

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def prepared(name: str) -> machines.Ground:
    """Makes what a ground needs."""
    if name == "here":
        return machines.Ground("", Path(), Path(), sys.executable, {"PYTHONPATH": str(prepare.CHECKOUT)})
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        raise prepare.NotAvailable("the lab needs root, whose files its guests read, on x86-64")
    variables = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": PATH}
    variables |= {"PYTHONFAULTHANDLER": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/packages"}
    prepare.install(*prepare.HOST, "qemu-system-arm" if name == "arm" else "qemu-system-x86")
    if name == "arm":
        boot = prepare.boot(name, "aarch64", *prepare.ARM_ROOT)
        prepare.add_wheel(boot / "files")
        return machines.Ground("aarch64", boot, boot / "files", "/usr/bin/python3", variables)
    boot = prepare.boot(name, "x86_64", *(prepare.LAYER if name == "machines" else ()))
    prepare.run(sys.executable, "-m", "compileall", "-q", prepare.CHECKOUT / "trio_ucx")  # guests would take long
    variables |= {"PATH": f"{Path(sys.executable).parent}:{PATH}", "PYTHONPATH": str(prepare.CHECKOUT)}
    if name == "rdma":
        prepare.install(*prepare.HOST_RDMA)
        variables |= {"LD_LIBRARY_PATH": f"{prepare.ucx_with_verbs()}/lib", "TRIO_UCX_SYSTEM_UCX": "1"}
    return machines.Ground("x86_64", boot, Path("/"), sys.executable, variables, name == "rdma")


def run_case(name: str, case: Case, parts: list[str], ground: machines.Ground) -> tuple[int, int]:
    """Runs a case. Returns how many of its parts went well, and how many there are."""
    planned: list[str] = []
    well: dict[str, set[str]] = {}

    def line(guest: int, text: str) -> None:
        print(f"{guest}| {text}" if case.guests == 2 else text, flush=True)
        if found := re.match(r"PLAN (.*)", text):
            planned[:] = found[1].split()
        elif found := re.match(r"OK (\S+) rank (\d)", text):
            well.setdefault(found[1], set()).add(found[2])

    began = time.monotonic()
    keep = os.environ.get("LAB_OUT")
    out = Path(keep, name) if keep else Path(tempfile.mkdtemp(prefix="trio_ucx_lab."))
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(prepare.HERE / "cases", out / "cases")
    shutil.copytree(prepare.CHECKOUT / "examples", out / "examples")
    variables = {key: value for key, value in os.environ.items() if re.match("UCX_|LAB_(ROUNDS|QUICK|PYTEST)", key)}
    shared, run = "/mnt" if ground.processor else out, machines.Run(ground, out, case.guests, line)
    variables |= {"PYTHONPATH": f"{shared}/cases:{ground.variables['PYTHONPATH']}"}
    variables = {"UCX_TLS": case.tls, **variables} if case.tls else variables
    command = [ground.python, "-u", f"{shared}/cases/{case.program}", *parts]
    try:
        statuses = (run.run if ground.processor else run.here)(command, variables, case.ranks, case.seconds)
    finally:
        if not keep:
            shutil.rmtree(out)
    good = sum(len(well.get(part, ())) == case.ranks for part in planned)
    if any(statuses) and 0 < good == len(planned):  # it ended badly after its last part
        good -= 1
    print(f"lab: {name}: {good} of {max(1, len(planned))} in {time.monotonic() - began:.0f} s", flush=True)
    return good, max(1, len(planned))


def main() -> int:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/lab", description=__doc__, formatter_class=form)
    parser.add_argument("ground", choices=GROUNDS)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_intermixed_args()
    os.environ |= {"LAB_QUICK": "1"} if chosen.quick else {}
    cases = GROUNDS[chosen.ground]
    wanted: dict[str, list[str]] = {}
    for word in chosen.cases or [name for name, case in cases.items() if case.quick or not chosen.quick]:
        name, _, part = word.partition("/")
        if name not in cases:
            parser.error(f"no case {name}: there are {', '.join(cases)}")
        wanted.setdefault(name, []).extend([part] if part else [])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that guests are ended
    try:
        ground = prepared(chosen.ground)
    except prepare.NotAvailable as error:
        print(f"lab: skipped: {error}", file=sys.stderr)
        return 77
    results = [run_case(name, cases[name], parts, ground) for name, parts in wanted.items()]
    if chosen.ground == "here" and not chosen.cases:
        results += [
            (int(os.system(f"cd {prepare.CHECKOUT} && {sys.executable} -m pytest -rs tests/test_gpu.py") == 0), 1)
        ]
    good, total = (sum(column) for column in zip(*results, strict=True))
    print(f"lab: {chosen.ground}: {good} of {total}; {len(results)} programs")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
