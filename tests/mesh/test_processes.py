"""Ranks that are processes: real deaths, two hosts, and many ranks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from helpers import free_port
from networks import Host, Network, open_network

from .ranks import Ranks, ranks

#: Waits in some operation, and says how that ended.
PROGRAM = """
import json, os, sys, time
import trio
from trio_ucx import mesh

async def main(victim, what):
    async with mesh.join(timeout=40, keepalive_interval=1) as group:
        await group.barrier()
        hosts = await group.all_gather(os.environ.get("NAME", "here").encode())
        rank = (group.rank + 1) % group.size
        connection = await group.connection(rank)
        say(hosts=[host.decode() for host in hosts], shared_memory=connection.shared_memory)
        if group.rank == victim:
            await trio.sleep(0.2)
            if what == "kill":
                os.kill(os.getpid(), 9)
            elif what == "exit":
                os._exit(0)
            elif what == "return":
                return
        if victim < 0:
            return
        if group.rank % 2:
            await group.barrier()
        else:
            await group.receive(source=rank)

def say(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

try:
    trio.run(main, int(sys.argv[1]), sys.argv[2])
except mesh.RankLostError as error:
    say(lost=error.rank, reason=error.reason, at=time.monotonic())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def said(group: Ranks, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in group[rank].output.splitlines()]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_dead_process_is_named_by_all(tmp_path: Path, program: Path, victim: int, how: str) -> None:
    with ranks(4, tmp_path, program, victim, how) as group:
        for rank in range(4):
            group[rank].finish()
        ends = {rank: said(group, rank)[-1] for rank in range(4) if rank != victim}
    assert {(end["lost"], end["reason"]) for end in ends.values()} == {(victim, "its process has ended")}


#: A ring that goes on until a rank is lost; rank 1 kills itself.
RING = """
import os, time
import trio
from trio_ucx import mesh

async def main():
    async with mesh.join(timeout=40, on_loss="continue") as group:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        await group.barrier()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(group.wait_lost)
                for step in range(10**9):
                    if (group.rank, step) == (1, 100):
                        print(time.monotonic(), flush=True)
                        os.kill(os.getpid(), 9)
                    await group.send_receive(b"token", to=right, source=left)
        except* mesh.RankLostError as errors:
            print(time.monotonic(), errors.exceptions[0])

trio.run(main)
"""


def test_a_ring_ends_when_a_rank_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RING)
    with ranks(4, tmp_path, program) as group:
        assert group[1].finish() == -9
        killed = float(group[1].output)
        for rank in (0, 2, 3):
            assert (group[rank].finish(), group[rank].errors) == (0, ""), f"rank {rank}, {group[rank]}"
            at, _, what = group[rank].output.partition(" ")
            assert what == "rank 1 was lost: its process has ended\n"
            assert 0 < float(at) - killed < 1


@pytest.mark.full
def test_64_ranks(tmp_path: Path, program: Path) -> None:
    """They meet, a barrier works, and they end clean. (On two idle cores this takes 17 seconds; no timed test.)"""
    start = time.monotonic()
    with ranks(64, tmp_path, program, -1, "nothing") as group:
        for rank in range(64):
            assert (group[rank].finish(), group[rank].errors) == (0, ""), f"rank {rank}, {group[rank]}"
            assert len(said(group, rank)[0]["hosts"]) == 64  # type: ignore[arg-type]
    print(f"{time.monotonic() - start:.1f} s")


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_environment_of_torch(tmp_path: Path, program: Path, torchrun: bool) -> None:
    """With torchrun's own variables, its agent has the port of ``MASTER_PORT``."""
    port = free_port()
    ours = ("TRIO_UCX_RANK", "TRIO_UCX_SIZE", "TRIO_UCX_MEETING")
    torch = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if torchrun:
        torch |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with socket.socket() as agent, ranks(3, tmp_path, program, -1, "nothing", start=False) as group:
        if torchrun:
            agent.bind(("localhost", port))
            agent.listen()
        for rank in range(3):
            unset = [word for name in ours for word in ("-u", name)]
            group.start(rank, under=["env", *unset], RANK=str(rank), **torch)
        group.finish()


def two_hosts(network: Network, address: str, other: str) -> list[Host]:
    one, two = network.host(), network.host()
    network.cable((one, "right", address), (two, "left", other))
    trio.run(network.ready)
    return [one, two]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with open_network() as network:
        yield two_hosts(network, "10.203.1.1/24", "10.203.1.2/24")


def start_on(hosts: list[Host], group: Ranks, meeting: str, **environment: str) -> None:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second one."""
    for rank in range(4):
        number = rank // 2
        settings = {"TRIO_UCX_MEETING": meeting, "NAME": f"host {number}", **environment}
        group.start(rank, under=hosts[number].under, **settings)


@pytest.mark.parametrize("how", ["port", "file"])
def test_two_hosts(tmp_path: Path, program: Path, hosts: list[Host], how: str) -> None:
    """Network namespaces with different addresses: shared memory within one, TCP between them."""
    meeting = "10.203.1.1:13400" if how == "port" else f"file://{tmp_path}/meeting"
    with ranks(4, tmp_path, program, -1, "nothing", start=False) as group:
        start_on(hosts, group, meeting, **({"TRIO_UCX_AUTHKEY": "sixteen bytes or more"} if how == "port" else {}))
        for rank in range(4):
            assert group[rank].finish() == 0, f"rank {rank}, {group[rank]}"
            [first] = said(group, rank)
            assert first["hosts"] == ["host 0", "host 0", "host 1", "host 1"]
            assert first["shared_memory"] is (rank in (0, 2))  # with the next rank


def test_two_hosts_without_ipv4(tmp_path: Path, program: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    with open_network() as network, ranks(4, tmp_path, program, -1, "nothing", start=False) as group:
        hosts = two_hosts(network, "fd00:203::1/64", "fd00:203::2/64")
        start_on(hosts, group, meeting, UCX_TCP_AF_PRIO="inet6,inet")
        for rank in range(4):
            assert group[rank].finish() == 0, f"rank {rank}, {group[rank]}"
            [first] = said(group, rank)
            assert first["hosts"] == ["host 0", "host 0", "host 1", "host 1"]


def test_two_hosts_without_a_key(tmp_path: Path, program: Path, hosts: list[Host]) -> None:
    """Protected mode. The ranks say so at once, and try again."""
    with ranks(4, tmp_path, program, -1, "nothing", start=False) as group:
        start_on(hosts, group, "10.203.1.1:13400")
        for rank in (2, 3):
            group[rank].wait_error(rf"^rank {rank} tries again for .* protected mode: .* authkey=")


def test_a_host_that_is_cut_off(tmp_path: Path, program: Path, hosts: list[Host]) -> None:
    """The ranks with rank 0 name a rank of the other host; those on the other host, rank 0."""
    with ranks(4, tmp_path, program, 99, "nothing", start=False) as group:
        start_on(hosts, group, "10.203.1.1:13400", TRIO_UCX_AUTHKEY="sixteen bytes or more")
        for rank in range(4):
            group[rank].wait_output("hosts")
        hosts[1].down("left")
        for rank in range(4):
            group[rank].finish()
        ends = [said(group, rank)[-1] for rank in range(4)]
    assert ends[0]["lost"] == ends[1]["lost"] in (2, 3), ends
    assert ends[2]["lost"] == ends[3]["lost"] == 0, ends
