"""``python -m trio_ucx check``: what it finds in restricted environments, and between two hosts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from end_to_end.programs import read_line
from environments import in_mounts
from networks import Host, as_user, need, open_network, unshare

from trio_ucx import ucp
from trio_ucx._cli import main
from trio_ucx._cli.check import command, control, devices, machine, peers, software
from trio_ucx._cli.check.finding import Finding, worst
from trio_ucx._cli.errors import PerfError
from trio_ucx._cli.idle_cores import cpu_quota
from trio_ucx._cli.privileges import Privileges

CHECK = [sys.executable, "-W", "error", "-m", "trio_ucx", "check"]
KEY = {"TRIO_UCX_AUTHKEY": "a key of the tests, 16 bytes or more"}
#: Seconds for a command.
DEADLINE = 90
ONE, TWO = "10.201.1.1", "10.201.1.2"
#: Devices of UCX that reach other hosts.
TCP = [("tcp", "eth0"), ("tcp", "lo")]

KNOWN = Privileges(
    capabilities=[],
    without_capabilities=["chown"],
    in_user_namespace=False,
    ptrace_scope="0",
    cma="usable",
    shared_memory=64 << 20,
    free_shared_memory=64 << 20,
    descriptors=(1024, 4096),
    locked_memory=(8 << 20, -1),
)


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "TRIO_UCX_"))}
    return {**clean, **changes}


def check(*arguments: str, under: Sequence[str] = (), **changes: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs ``check --json``; returns the exit status, and the findings by their ids."""
    done = subprocess.run(
        [*under, *CHECK, *arguments, "--json"],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd="/",
        check=False,
    )
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    findings = {each["id"]: each for each in said["findings"]}
    assert len(findings) == len(said["findings"])
    for each in findings.values():
        assert set(each) == {"id", "state", "found", "advice"} and each["found"]
        assert (each["advice"] is None) is (each["state"] == "ok"), each
    assert done.returncode == (said["state"] == "problem"), done
    return done.returncode, findings


@contextmanager
def listening(*arguments: str, under: Sequence[str] = (), **changes: str) -> Iterator[dict[str, str]]:
    """Runs ``check --listen --json`` in the block; yields what it says."""
    with subprocess.Popen(
        [*under, *CHECK, *(arguments or ["--listen", "127.0.0.1:0"]), "--json"],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said: dict[str, str] = json.loads(read_line(process))
            yield said
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 130
        finally:
            process.kill()


# ---- this machine ----


def test_this_machine() -> None:
    status, found = check()
    assert status == 0
    assert {"descriptors", "/dev/shm", "cma", "namespaces", "cores", "libraries"} <= found.keys()
    assert "tcp (" in found["transports"]["found"] and found["shared memory"]["state"] == "ok"
    assert "no UCX_ variable" in found["environment"]["found"]


def test_text() -> None:
    done = subprocess.run([*CHECK], env=environment(UCX_TLZ="x"), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("warning  environment: ")]
    assert "UCX_TLZ (maybe: UCX_TLS?)" in lines[at] and lines[at + 1].startswith("         -> correct the names")


@pytest.mark.parametrize("limit", [16, 48])
def test_few_descriptors(limit: int) -> None:
    status, found = check(under=["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"])
    assert status == 1
    assert found["descriptors"]["state"] == "problem" and f"the limit is {limit}" in found["descriptors"]["found"]
    assert "ulimit -n" in found["descriptors"]["advice"]
    assert limit > 16 or "no worker can be opened: " in found["transports"]["found"]


def test_configuration() -> None:
    status, found = check(UCX_TLS="nonsense")
    assert status == 1 and found["transports"]["state"] == "problem" and "nonsense" in found["transports"]["found"]
    status, found = check(UCX_TLS="tcp", UCX_NET_DEVICES="lo")
    assert status == 0 and found["transports"]["state"] == "warning" and found["transports"]["found"] == "tcp (lo)"
    assert found["shared memory"]["state"] == "warning"
    assert found["environment"]["found"] == "UCX_NET_DEVICES=lo, UCX_TLS=tcp"


def test_info_says_why_there_is_no_infiniband() -> None:
    done = subprocess.run([*CHECK[:-1], "info"], env=environment(), capture_output=True, text=True, timeout=DEADLINE)
    wanted = devices.check_rdma((), ()).found
    assert f"  InfiniBand: {wanted}" in done.stdout


@pytest.mark.root
def test_own_namespaces() -> None:
    assert check()[1]["namespaces"]["found"].startswith("this machine's first")
    _, found = check(under=unshare("ipc", "pid"))
    assert "others than the first: ipc, pid (" in found["namespaces"]["found"]
    under = ["unshare", "--user", "--map-root-user"]
    need(*under, "true", why="user namespaces")
    _, found = check(under=under)
    assert ": user (" in found["namespaces"]["found"]


@pytest.mark.root
def test_small_shared_memory() -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    status, found = check(under=in_mounts("sh", "-c", mount, "sh"))
    assert status == 0 and found["/dev/shm"]["state"] == "warning"
    assert found["/dev/shm"]["found"].startswith("1 MiB, 1 MiB free") and "--shm-size" in found["/dev/shm"]["advice"]
    mount = 'mount -t tmpfs -o ro,mode=755 tmpfs /dev/shm && exec "$@"'
    assert "cannot write" in check(under=in_mounts("sh", "-c", mount, "sh"))[1]["/dev/shm"]["found"]


@pytest.mark.root
def test_ordinary_user() -> None:
    status, found = check(under=as_user(65534))
    assert status == 0 and {each["state"] for each in found.values()} <= {"ok", "warning"}


@pytest.mark.parametrize(
    ("limits", "used", "state"),
    [
        ((53, 4096), 0, "problem"),
        ((100, 4096), 10, "warning"),
        ((512, 4096), 10, "warning"),
        ((1024, 4096), 10, "ok"),
        ((-1, -1), 10, "ok"),
    ],
)
def test_descriptors(limits: tuple[int, int], used: int, state: str) -> None:
    assert machine.check_descriptors(limits, used).state == state


def files(root: Path, **contents: str) -> Path:
    """Writes files; in their names, __ stands for a slash, and the rest is as it is."""
    for name, text in contents.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize("path", ["", "pod"])
def test_control_group(tmp_path: Path, path: str) -> None:
    """The path is that on the host, where in a container there is no such folder."""
    base = "sys/fs/cgroup"
    contents = {
        "proc/self/cgroup": f"0::/{path}\n",
        f"{base}/memory.max": str(100 << 20),
        f"{base}/memory.current": str(80 << 20),
        f"{base}/memory.stat": f"anon 1\ninactive_file {10 << 20}\n",
        f"{base}/pids.max": "100",
        f"{base}/pids.current": "40",
        f"{base}/cpu.max": "50000 100000",
    }
    files(tmp_path, **contents)
    few, enough = machine.check_control_group(tmp_path)
    assert (few.id, few.state) == ("memory", "warning") and few.found.startswith("30 MiB left")
    assert (enough.id, enough.state) == ("threads", "ok") and enough.found.startswith("60 left")
    assert cpu_quota(tmp_path) == 0.5
    files(tmp_path, **{f"{base}/memory.max": "max", f"{base}/pids.max": "50", f"{base}/cpu.max": "max 100000"})
    [threads] = machine.check_control_group(tmp_path)
    assert threads.state == "warning" and cpu_quota(tmp_path) is None


def test_own_control_group(tmp_path: Path) -> None:
    files(tmp_path, **{"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "50000 100000"})
    files(tmp_path, **{"sys/fs/cgroup/cpu.max": "100000 100000"})
    assert cpu_quota(tmp_path) == 0.5


def test_no_control_group(tmp_path: Path) -> None:
    assert [*machine.check_control_group(tmp_path)] == [] and cpu_quota(tmp_path) is None


def test_shared_memory_is_missing(tmp_path: Path) -> None:
    assert machine.check_dev_shm(tmp_path / "shm", KNOWN).found == "it does not exist"
    assert machine.check_dev_shm(tmp_path, KNOWN).state == "ok"
    assert machine.check_dev_shm(tmp_path, attrs.evolve(KNOWN, free_shared_memory=15 << 20)).state == "warning"


def test_cma() -> None:
    refused = attrs.evolve(KNOWN, cma="not usable: process_vm_readv: Operation not permitted")
    assert machine.check_cma(KNOWN, "").state == "ok"
    assert "one user" in str(machine.check_cma(refused, "Seccomp:\t0\n").advice)
    assert "seccomp filter" in str(machine.check_cma(refused, "Name:\tx\nSeccomp:\t2\n").advice)
    assert "ptrace_scope is 1" in str(machine.check_cma(attrs.evolve(refused, ptrace_scope="1"), "").advice)


def test_cores() -> None:
    assert [machine.check_cores(4, *idle).state for idle in ((3.5, None), (0.2, None), (3.5, 0.5))] == [
        "ok",
        "warning",
        "warning",
    ]
    assert machine.check_cores(4, 3.5, 2).found == "4, 3.5 idle; the control group allows 2"


def test_why_there_is_no_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One obstacle after another is removed."""
    monkeypatch.setattr(devices.rdma, "WORKS", False)
    monkeypatch.setattr(devices.rdma, "has_module", lambda name: False)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(devices, "lockable_memory", lambda: 8 << 20)

    def found() -> str:
        finding = devices.check_rdma(TCP, TCP, tmp_path)
        assert finding.state == ("warning" if (tmp_path / "sys").exists() else "ok")
        return finding.found

    assert found() == "none: the kernel has no RDMA device, and this UCX no InfiniBand transports"
    port = files(tmp_path, **{"sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"})
    assert "UCX 1.19 or newer" in found()
    monkeypatch.setattr(devices.rdma, "WORKS", True)
    assert "no port of mlx5_0 is active (1: DOWN)" in found()
    files(port, **{"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"})
    assert "no /dev/infiniband/uverbs* here" in found()
    files(tmp_path, **{"dev/infiniband/uverbs0": ""})
    with monkeypatch.context() as closed:
        closed.setattr(os, "access", lambda *_: False)
        assert "this user may not open" in found()
    assert "built without verbs" in found()
    monkeypatch.setattr(devices.rdma, "has_module", lambda name: name == "ib")
    assert "no libibverbs" in found()
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    assert "may lock only 8 MiB" in found()
    monkeypatch.setattr(devices, "lockable_memory", lambda: -1)
    assert "UCX does not use mlx5_0" in found()
    rdma = [("rc_mlx5", "mlx5_0:1")]
    assert "nothing names rc_mlx5/mlx5_0:1" in devices.check_rdma([*TCP, *rdma], TCP, tmp_path).found
    assert devices.check_rdma(rdma, rdma, tmp_path).state == "ok"
    monkeypatch.setattr(devices, "lockable_memory", lambda: 8 << 20)
    assert devices.check_rdma(rdma, rdma, tmp_path).state == "warning"


def test_modules_of_this_ucx() -> None:
    assert devices.rdma.has_module("cma") and not devices.rdma.has_module("nonsense")


def test_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, rdma = [("cuda_copy", "cuda")], [("rc_mlx5", "mlx5_0:1")]
    monkeypatch.setattr(devices.rdma, "has_module", lambda name: False)
    assert devices.check_gpu(TCP, TCP, tmp_path).found.startswith("none")
    files(tmp_path, **{"proc/driver/nvidia/gpus/0": ""})
    assert "no /dev/nvidia* here" in devices.check_gpu(TCP, TCP, tmp_path).found
    files(tmp_path, **{"dev/nvidia0": ""})
    assert "built without CUDA" in devices.check_gpu(TCP, TCP, tmp_path).found
    monkeypatch.setattr(devices.rdma, "has_module", lambda name: True)
    assert "finds no driver" in devices.check_gpu(TCP, TCP, tmp_path).found
    assert "configuration disables" in devices.check_gpu(cuda, TCP, tmp_path).found
    assert devices.check_gpu(cuda, cuda, tmp_path).state == "ok"
    assert devices.check_gpu(cuda, [*cuda, *rdma], tmp_path).state == "warning"
    files(tmp_path, **{"sys/module/nvidia_peermem/refcnt": ""})
    assert devices.check_gpu(cuda, [*cuda, *rdma], tmp_path).state == "ok"


def test_several_ucx(tmp_path: Path) -> None:
    def install(name: str) -> Finding:
        folder = f"{name}-1.22.0.dist-info"
        files(
            tmp_path, **{f"{folder}/METADATA": f"Name: {name}\n", f"{folder}/RECORD": f"{name}.libs/libucp-1.so.0,,\n"}
        )
        return software.check_libraries([str(tmp_path)])

    assert install("libucx-cu12").state == "ok"
    finding = install("other")
    assert finding.state == "warning" and finding.found.endswith("others in other")
    finding = install("libucx-cu13")
    assert finding.state == "problem" and "libucx-cu12 and libucx-cu13" in finding.found


def test_log_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        *software.check_environment(["parser.c:1 unused env variable: UCX_A (set UCX_WARN_UNUSED_ENV_VARS=n)", "odd"])
    ]
    assert [each.state for each in found] == ["warning", "warning"]
    assert found[0].found == "UCX does not know UCX_A" and found[1].found == "UCX says: odd"


def test_no_shared_memory() -> None:
    log = ["UCX does without shared memory: raise kernel.shmmni"]
    transports, shared = software.check_transports(TCP, (), log)
    assert transports.state == "ok" and shared.found == "none: raise kernel.shmmni"
    assert "processes of this machine use TCP" in str(shared.advice)
    _, shared = software.check_transports([("rc_mlx5", "mlx5_0:1")], (), [])
    assert "processes of this machine use RDMA" in str(shared.advice)


def test_worst_finding() -> None:
    good, bad = Finding("a", "ok", "x"), Finding("b", "problem", "x", "y")
    assert str(Finding("a", "ok", "a\x1b[2J")) == "ok       a: a?[2J"  # what another side has said
    assert (worst([]), worst([good]), worst([bad, good])) == ("ok", "ok", "problem")


# ---- two hosts ----


def states(found: dict[str, dict[str, Any]], word: str) -> dict[str, str]:
    return {id: each["state"] for id, each in found.items() if word in id}


def test_two_processes() -> None:
    with listening(**KEY) as said:
        for _ in range(2):  # it serves one after another
            status, found = check(said["listening"], **KEY)
            assert status == 0, found
            assert [*states(found, " 127.0.0.1").values()] == ["ok"] * 6
            assert "over sysv/memory" in found["shared memory, to 127.0.0.1"]["found"]
            assert "over tcp/lo" in found["tcp lo (127.0.0.1) - lo (127.0.0.1), from 127.0.0.1"]["found"]


def test_keys(tmp_path: Path) -> None:
    with listening() as said:
        assert check(said["listening"], TRIO_UCX_AUTHKEY=said["authkey"])[0] == 0
        for environment in (KEY, {}):
            status, found = check(said["listening"], **environment)
            assert status == 1 and "different keys" in found["control"]["found"]
            assert "--authkey-file" in found["control"]["advice"] and not states(found, ", to")
    with listening("--listen", "127.0.0.1:0", "--allow-anyone", **KEY) as said:
        assert check(said["listening"])[0] == 0


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        status, found = check(f"127.0.0.1:{port}")
    assert status == 1 and "refused" in found["control"]["found"]
    assert f"python -m trio_ucx check --listen {port} there" in found["control"]["advice"]


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"a" * 300_000, b""])
async def test_something_else_listens(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(answer)
        if answer:
            await trio.sleep_forever()

    found: list[Finding] = []
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        with trio.fail_after(20):
            await peers.check_peer(listener.socket.getsockname(), b"key", found.append)
        nursery.cancel_scope.cancel()
    [finding] = found
    assert finding.state == "problem"
    assert ("is not `python -m trio_ucx check`" if answer else "closed the connection") in finding.found


async def test_no_answer() -> None:
    one, other = socket.socketpair()
    with other:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(one)) as stream:
            with pytest.raises(PerfError, match="did not answer within 0.1 seconds"):
                await control.ControlChannel(stream, client=True).receive(0.1)


@pytest.mark.parametrize("line", [b"[1]", b"{", b"[" * 10_000])
async def test_strangers_do_not_end_the_server(line: bytes) -> None:
    """A stranger can make the code of the first line, because no key is needed for it."""
    with listening(**KEY) as said:
        host, port = said["listening"].split(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            code = control.ControlChannel(stream, client=True)._code(True, line)
            await stream.send_all(code + b" " + line + b"\n")
            with trio.fail_after(20):
                while await stream.receive_some():
                    pass


async def test_strangers_learn_no_worker_address() -> None:
    """It contains keys of UCX's ports."""
    with listening(**KEY) as said:
        host, port = said["listening"].split(":")
        with trio.fail_after(20):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                channel, seen = control.ControlChannel(stream, client=True), b""
                await channel._send_line(b"a nonce")
                with suppress(trio.BrokenResourceError):
                    while data := await stream.receive_some():
                        seen += data
    assert seen.count(b"\n") == 2 and b"address" not in seen


@pytest.mark.parametrize("facts", [{}, {"devices": 5}, {"devices": {"\0": 1}}, {"devices": {}}], ids=repr)
@pytest.mark.parametrize("request_", [{}, {"attempt": {}}, {"attempt": 5, "network": None, "send": True}], ids=repr)
async def test_clients_that_say_something_else_do_not_end_the_server(
    facts: dict[str, Any], request_: dict[str, Any]
) -> None:
    """As one of another release would, with the key."""
    with listening(**KEY) as said:
        host, port = said["listening"].split(":")
        with trio.fail_after(20):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                channel = control.ControlChannel(stream, client=True)
                await channel.begin(KEY["TRIO_UCX_AUTHKEY"].encode(), facts)
                with suppress(trio.BrokenResourceError, PerfError):
                    await channel.send(request_)
                    while await channel.receive():
                        pass
        assert check(said["listening"], **KEY)[0] == 0


def test_a_listener_that_cannot_print_goes_on() -> None:
    silent = ["sh", "-c", 'exec "$@" 2>/dev/full', "-"]
    with listening(under=silent, **KEY) as said:
        for _ in range(2):
            assert check(said["listening"], **KEY)[0] == 0


def test_listening_names_the_address(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--listen", "192.0.2.99:7"]) == 1
    assert "listening at 192.0.2.99:7: " in capfd.readouterr().err


def test_names() -> None:
    status, found = check("nowhere.invalid")
    assert status == 1 and "Name or service not known" in found["control"]["found"]
    assert "if the host is right" in found["control"]["advice"]


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["host:70000"],
        ["host:x"],
        ["host:0"],
        ["23000"],
        ["[::1]:x"],
        [""],
        ["--listen", "x"],
        ["--allow-anyone"],
        ["host", "--listen"],
        ["--authkey-file", "x"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(["check", *arguments])
        assert exit.value.code == 2
        assert str(command.DEFAULT_PORT) not in capsys.readouterr().err  # nobody has typed it
    port = command.DEFAULT_PORT
    assert command.parse_host("host") == ("host", port) and command.parse_host("host:1") == ("host", 1)
    assert command.parse_host("::1") == ("::1", port) and command.parse_host("[::1]:2") == ("::1", 2)
    assert command.parse_host("[::1]") == ("::1", port)


def test_what_a_failure_means() -> None:
    good, nothing = peers.Outcome([1e-3, 1e-3, 2e-3], ["tcp/eth0"]), peers.Outcome(error="reset")
    assert (
        peers.judge("x", {"a": good, "b": good}, "problem").found == "8 bytes in 1.0 ms, 8 MiB in 2.0 ms over tcp/eth0"
    )
    unused = peers.judge("x", {"a": good, "b": good}, "problem", devices.rdma.TRANSPORTS)
    assert unused.state == "warning" and "RDMA is not used" in str(unused.advice)
    failed = peers.judge("x", {"a": nothing, "b": peers.Outcome(refused="10.0.0.1:7 does not answer")}, "warning")
    assert failed.state == "warning" and "UCX_TCP_PORT_RANGE" in str(failed.advice) and "a: reset" in failed.found
    short = peers.judge("x", {"a": nothing, "b": peers.Outcome([1.0])}, "problem")
    assert "MTU" in str(short.advice) and "64 KiB do not" in short.found
    slow = peers.judge("x", {"a": nothing, "b": peers.Outcome([1.0, 1.0])}, "problem")
    assert "8 Mbit/s" in str(slow.advice) and "8 MiB do not" in slow.found
    assert "UCX_NET_DEVICES" in str(peers.judge("x", {"a": nothing, "b": peers.Outcome()}, "problem").advice)


async def test_what_the_sides_compare(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "obstacle_to_shared_memory", lambda *_: "other hosts")
    ours = {"trio_ucx": "1", "ucx": "1.22.0", "at": "10.0.0.1", "address": bytes(worker.address).hex(), "devices": {}}
    ours = {**ours, "rdma": False, "routes": {}, "peer": "10.0.0.1"}
    same, *_ = peers.plan("host", ours, ours)
    assert isinstance(same, Finding) and same.state == "ok"
    *_, last = peers.plan("host", ours, {**ours, "rdma": True})
    assert isinstance(last, peers.Plan) and last.name == "all transports" and "rc" in last.expected
    alone = bytes(worker.address._changed(network=b"")).hex()
    *_, last = peers.plan("host", ours, {**ours, "address": alone})
    assert isinstance(last, Finding) and last.state == "problem" and last.found.startswith("not tried: ")
    releases, addresses, *_ = peers.plan("host", ours, {**ours, "trio_ucx": "2", "peer": "10.9.9.9"})
    assert isinstance(releases, Finding) and isinstance(addresses, Finding)
    assert releases.state == addresses.state == "problem" and "(NAT)" in addresses.found


# ---- two networks ----


@pytest.fixture
async def hosts() -> Any:
    """Two hosts with a cable between; the second one has another device, which leads nowhere."""
    with open_network() as network:
        one, two, third = network.host(), network.host(), network.host()
        network.cable((one, "cable", f"{ONE}/24"), (two, "eth7", f"{TWO}/24"))
        network.cable((two, "aaa", "10.202.0.1/24"), (third, "cable", "10.202.0.2/24"))
        one.ip("route", "add", "default", "dev", "cable")
        await network.ready()
        yield one, two


def talk(one: Host, two: Host) -> tuple[int, dict[str, dict[str, Any]]]:
    with listening("--listen", f"{TWO}:0", under=two.under, **KEY) as said:
        return check(said["listening"], under=one.under, **KEY)


async def test_two_networks(hosts: tuple[Host, Host]) -> None:
    status, found = await trio.to_thread.run_sync(talk, *hosts)
    assert status == 0, found
    pair = f"tcp cable ({ONE}) - eth7 ({TWO})"
    assert states(found, pair) == {f"{pair}, to {TWO}": "ok", f"{pair}, from {TWO}": "ok"}
    assert "over tcp/cable" in found[f"{pair}, to {TWO}"]["found"]
    assert "over tcp/eth7" in found[f"{pair}, from {TWO}"]["found"]
    assert states(found, "all transports") == dict.fromkeys(
        (f"all transports, {way} {TWO}" for way in ("to", "from")), "ok"
    )
    assert found["tcp aaa (10.202.0.1)"]["found"].startswith("not tried")  # no Connection uses it
    assert "different network namespaces" in found[f"shared memory with {TWO}"]["found"]


@pytest.mark.parametrize("reply", ["DROP", "REJECT"])
@pytest.mark.parametrize("blocked", ["one", "two"])
async def test_firewall(hosts: tuple[Host, Host], blocked: str, reply: str) -> None:
    """One side's ports are blocked, but for the one where `check` listens."""
    one, two = hosts
    need(*one.under, "iptables", "-w", "-L", why="rules for packets")
    host = one if blocked == "one" else two
    rule = ("-p", "tcp", "--syn", "-j", reply)
    with listening("--listen", f"{TWO}:0", under=two.under, **KEY) as said:
        port = said["listening"].rpartition(":")[2]
        host.run("iptables", "-w", "-A", "INPUT", "-p", "tcp", "--dport", port, "-j", "ACCEPT")
        host.run("iptables", "-w", "-A", "INPUT", *rule)
        status, found = await trio.to_thread.run_sync(lambda: check(said["listening"], under=one.under, **KEY))
    assert status == 1
    way = "from" if blocked == "one" else "to"
    failed = found[f"tcp cable ({ONE}) - eth7 ({TWO}), {way} {TWO}"]
    assert failed["state"] == "problem" and "UCX_TCP_PORT_RANGE" in failed["advice"], found
    who = TWO if blocked == "one" else "this host"
    assert f"plain TCP from {who} fails, too" in failed["found"]


async def test_lost_long_packets(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    need(*one.under, "iptables", "-w", "-L", why="rules for packets")
    with listening("--listen", f"{TWO}:0", under=two.under, **KEY) as said:
        port = said["listening"].rpartition(":")[2]
        for way in ("--dport", "--sport"):
            two.run("iptables", "-w", "-A", "INPUT", "-p", "tcp", way, port, "-j", "ACCEPT")
        two.run("iptables", "-w", "-A", "INPUT", "-m", "length", "--length", "1400:65535", "-j", "DROP")
        status, found = await trio.to_thread.run_sync(lambda: check(said["listening"], under=one.under, **KEY))
    assert status == 1
    failed = found[f"tcp cable ({ONE}) - eth7 ({TWO}), to {TWO}"]
    assert "8 bytes arrive, 64 KiB do not" in failed["found"] and "MTU" in failed["advice"], found
