"""Groups of two machines with two ranks each: by hand, with torchrun's variables, by mpirun over ssh, by Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trio
from common import KEY, OUT, RANK, barrier, main, part, run_shell, shell

HOME, GUEST = Path("/root/.config/trio_ucx"), int(os.environ["GUEST"])
PROGRAM = f"{sys.executable} -u {Path(__file__).with_name('rank.py')}"
SLURM = """ClusterName=lab
SlurmctldHost=guest0
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/linear
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=guest[0-1] CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4 State=UP
"""


def check(text: str, ranks: int) -> None:
    for number in range(4):
        assert ranks < 4 or f"rank {number} of 4 is well" in text, text[-2000:]
    assert text.count("is well; hosts ['guest0', 'guest1']") == ranks, text[-2000:]


def write_key() -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "authkey").write_bytes(KEY)
    (HOME / "authkey").chmod(0o600)


async def start(variables: dict[str, str]) -> None:
    """Starts this machine's two ranks; $R and $L stand for the rank, and the rank on this machine."""
    write_key()
    texts: list[str] = []

    async def one(local: int) -> None:
        words = " ".join(f"{name}={value}" for name, value in variables.items())
        command = f"unset RANK RANKS; L={local} R={2 * GUEST + local}; env {words} {PROGRAM}"
        texts.append(await shell(command, 120))

    async with trio.open_nursery() as nursery:
        for local in range(2):
            nursery.start_soon(one, local)
    check("\n".join(texts), 2)


@part
async def by_hand():
    await start({"TRIO_UCX_RANK": "$R", "TRIO_UCX_SIZE": "4", "TRIO_UCX_MEETING": "10.77.0.1:24001"})


@part
async def torchrun_variables():
    place = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    await start({"RANK": "$R", "WORLD_SIZE": "4", "LOCAL_RANK": "$L", **place})


@part
async def mpirun_over_ssh():
    write_key()
    run_shell(
        "mkdir -p /run/sshd /root/.ssh; chmod 700 /root /root/.ssh; chown root:root /root; ssh-keygen -q -A;"
        "grep -q ^sshd: /etc/passwd || echo 'sshd:x:101:65534::/run/sshd:/usr/sbin/nologin' >>/etc/passwd;"
        "printf 'PermitRootLogin yes\\nStrictModes no\\nUsePAM no\\n' >/root/sshd_config;"
        "printf 'StrictHostKeyChecking no\\nLogLevel ERROR\\n' >/root/.ssh/config; /usr/sbin/sshd -f /root/sshd_config"
    )
    if RANK == 0:
        run_shell("rm -f /root/.ssh/id_*; ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")
        run_shell(f"cp /root/.ssh/*.pub {OUT}")
    await barrier("ssh.key")
    run_shell(f"cp {OUT}/id_ed25519.pub /root/.ssh/authorized_keys; chmod 600 /root/.ssh/*")
    await barrier("ssh.up")
    if RANK == 0:
        tcp = "--mca btl tcp,self --mca pml ob1 --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0"
        names = [name for name in os.environ if name in ("PYTHONPATH", "PATH", "HOME")]
        passed = " ".join(f"-x {name}" for name in (*names, "MASTER_ADDR=10.77.0.1", "MASTER_PORT=29501"))
        mpirun = f"/usr/bin/mpirun.openmpi --allow-run-as-root --oversubscribe -n 4 -H guest0:2,guest1:2 {tcp}"
        check(await shell(f"unset RANK RANKS; {mpirun} {passed} {PROGRAM}", 200), 4)


@part
async def slurm():
    write_key()
    Path("/etc/slurm").mkdir(exist_ok=True)
    Path("/etc/slurm/slurm.conf").write_text(SLURM)
    run_shell(
        "for file in passwd group; do grep -q ^munge: /etc/$file || echo 'munge:x:102:102::/:' >>/etc/$file; done;"
        "mkdir -p /etc/munge /var/lib/munge /var/log/munge /run/munge /run/slurm /var/spool/slurmd /var/spool/slurmctld"
        " /var/log/slurm; printf '%01024d' 7 >/etc/munge/munge.key; chmod 400 /etc/munge/munge.key;"
        "chmod 700 /etc/munge /var/lib/munge /var/log/munge; chmod 755 /run/munge /run /var /var/lib /var/log /etc /;"
        "chown root:root /etc/munge /etc/munge/munge.key /var/lib/munge /var/log/munge /run/munge; munged --force;"
        "umount /sys/fs/cgroup; mount -t tmpfs tmpfs /sys/fs/cgroup; mkdir -p /sys/fs/cgroup/systemd;"
        "mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd"
    )
    for number, daemon in enumerate(("slurmctld", "slurmd")):
        if number == 1 or RANK == 0:
            run_shell(daemon)
        await barrier(daemon)
    if RANK == 0:
        up = "sinfo -h -o '%D %T' | grep -q '^2 idle' && exit"
        run_shell(f"for i in $(seq 40); do {up}; sleep 1; done; sinfo; exit 1", 90)
        srun = "srun --mpi=none --nodes 2 --ntasks 4 --ntasks-per-node 2 --overcommit"
        check(await shell(f"unset RANK RANKS; {srun} {PROGRAM}", 200), 4)
    await barrier("slurm.done", 300)


main(timeout=400)
