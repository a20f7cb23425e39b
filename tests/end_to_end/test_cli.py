"""The command line, in real processes."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import platform
import pty
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import trio
from helpers import assert_gone, children_of, open_pair, python_path
from networks import need

import trio_ucx
from trio_ucx import ucp
from trio_ucx._cli import (
    completion,
    info,
    main,
    measuring,
    payload_paths,
    perf,
    perf_plot,
    perf_protocol,
    perf_results,
    rounds,
)
from trio_ucx._cli.errors import PerfError, describe

from .programs import AUTHKEY, COMMAND, QUICK, TIMEOUT, environment, listening_address, read_line, run_cli, start_cli


def wait_both_started(process: subprocess.Popen[str]) -> list[int]:
    """Waits until the client process has said its header; the server's pid, then the client's."""
    assert read_line(process).startswith("trio_ucx")
    children = children_of(process.pid)
    assert len(children) == 2
    return sorted(children, key=lambda pid: b"--until-stdin-closes" not in Path(f"/proc/{pid}/cmdline").read_bytes())


# ---- info ----


def test_info() -> None:
    done = run_cli("info")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        f"trio_ucx {trio_ucx.__version__}, Trio {trio.__version__}, Python {platform.python_version()}" in done.stdout
    )
    assert re.search(r"^  tcp +.*\blo\b", done.stdout, re.MULTILINE)
    assert "MM_ERROR_HANDLING=y  (in force)" in done.stdout
    assert "ZCOPY_THRESH" not in done.stdout


@pytest.mark.full
def test_info_with_all_options() -> None:
    assert "  ZCOPY_THRESH=auto\n" in run_cli("info", "--config").stdout


@pytest.mark.parametrize("command", [["info"], ["perf"], ["perf", "--listen", "127.0.0.1:0"]])
def test_option_that_cannot_work(command: list[str]) -> None:
    done = run_cli(*command, UCX_MM_SEG_SIZE="5")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"python -m trio_ucx \w+: UCX's option UCX_MM_SEG_SIZE=5 in the environment: .*\n", done.stderr)


def test_info_json() -> None:
    done = run_cli("info", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["trio_ucx"] == trio_ucx.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts["ucx"]["version"])
    assert facts["ucx"]["version"].startswith(tuple(facts["ucx"]["compiled_version"].split(".")[0]))
    assert Path(facts["ucx"]["file"]).exists()
    transports = {one["name"]: one for one in facts["transports"]}
    assert "lo" in transports["tcp"]["devices"]
    assert "memory" in transports["sysv"]["devices"]
    assert all(one["in_force"] for one in facts["defaults"])
    assert facts["config"]["TLS"] == "^ib"
    left_out = {"POSIX_SHM_MIN_SIZE", "TLS", "SOCKADDR_TLS_PRIORITY"}  # POSIX memory where there is System V's; RDMA
    assert set(facts["chosen"]) == {one["name"] for one in facts["defaults"]} | left_out
    assert facts["error"] is None


@pytest.mark.full
def test_info_tells_what_the_environment_changes() -> None:
    done = run_cli("info", "--json", UCX_TLS="tcp,nonsense", UCX_NET_DEVICES="lo", UCX_TCP_TX_SEG_SIZE="8k")
    facts = json.loads(done.stdout)
    assert any("nonsense" in line for line in facts["log"])
    transports = {one["name"]: one for one in facts["transports"]}
    assert transports["tcp"]["devices"] == ["lo"]
    assert transports["sysv"] == {"name": "sysv", "devices": [], "disabled": ["memory"]}
    assert facts["chosen"]["TLS"] == "tcp,nonsense"
    assert facts["chosen"]["TCP_TX_SEG_SIZE"] == "8k"
    [default] = [one for one in facts["defaults"] if not one["in_force"]]
    assert (default["name"], default["instead"]) == ("TCP_TX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE=8k")
    text = run_cli("info", UCX_TLS="tcp").stdout
    assert re.search(r"sysv +disabled by the configuration: memory", text)


WRONG_OPTIONS = {
    "UCX_TLS": ("nonsense", "transports 'nonsense'"),
    "UCX_NET_DEVICES": ("none0", "there is no device 'none0'"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_option(name: str) -> None:
    value, says = WRONG_OPTIONS[name]
    done = run_cli("info", **{name: value})
    assert done.returncode == 1
    assert "UCX does not start with this configuration" in done.stdout and says in done.stdout
    assert "Traceback" not in done.stderr
    if name == "UCX_TLS":  # the error refers to UCX's log
        assert re.search(r"^UCX's log\n  .*transport 'nonsense' is not available", done.stdout, re.MULTILINE)
    done = run_cli("perf", *QUICK, **{name: value})
    assert done.returncode == 1 and says in done.stderr
    assert "Traceback" not in done.stderr


def test_resources_of_other_machines() -> None:
    class Fake:
        def info_text(self) -> str:
            return (
                "#\n# UCP context\n#     component 1  :  ib\n#            md 1  :  component 1  mlx5_0 \n"
                "#      resource 0  :  md 0  dev 0  flags -- self/memory0\n"
                "#      resource 10 :  md 1  dev 3  flags a- rc_mlx5/mlx5_0:1  \n#\n"
            )

    found: Any = Fake()
    assert info.resources(found) == [("self", "memory0"), ("rc_mlx5", "mlx5_0:1")]


# ---- perf ----


def check_results(results: list[dict[str, Any]], sizes: list[int]) -> None:
    assert [result["size"] for result in results] == sizes
    for result in [*results, *(result["plain_tcp"] for result in results)]:
        ignored = ("plain_tcp", "operation", "back_mb_s")
        assert all(value > 0 for name, value in result.items() if name not in ignored and name != "advantages"), result
        assert result["latency_median_us"] <= result["latency_p99_us"]
        assert result["bandwidth_mb_s"] == pytest.approx(result["messages_s"] * result["size"] / 1e6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("transports", "wanted"), [("tcp", {"tcp"}), ("tcp,sm,self", {"sysv", "posix"})])
def test_perf(transports: str, wanted: set[str]) -> None:
    done = run_cli("perf", *QUICK, "--transports", transports, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    check_results(report["results"], [8, 1024, 65536])
    assert all(result["latency_messages"] == result["stream_messages"] == 20 for result in report["results"])
    names = {one["name"] for one in report["transports"]}
    assert names & wanted
    if transports == "tcp":
        assert names == {"tcp"}


@pytest.mark.full
def test_perf_as_a_table() -> None:
    done = run_cli("perf", "--sizes", "8,1k", "--seconds", "0.05", "--transports", "tcp")
    assert (done.returncode, done.stderr) == (0, "")
    header, table, answer = done.stdout.split("\n\n")
    assert re.search(r"^transports: tcp\b", header, re.MULTILINE)
    operation, titles, *rows = table.splitlines()
    assert operation == "messages"
    assert titles.split() == ["bytes", "median", "us", "p99", "us", "MB/s", "messages/s", "CPU", "us"]
    words = [row.replace(" x", "").split() for row in rows]
    assert [row[:-5] for row in words] == [
        *(["8"], ["8", "TCP"], ["advantage"]),
        *(["1k"], ["1k", "TCP"], ["advantage"]),
    ]
    assert all(float(number.replace(",", "")) > 0 for row in words for number in row[-5:])
    assert re.match(r"Is UCX worth it here\? (Yes|No|Partly)\. Beside plain TCP:\n  messages, latency: ", answer)


def test_plain_tcp_that_cannot_be_had() -> None:
    """A port may be closed to the client: the rest is measured."""

    async def main() -> None:
        async with open_ends() as client:
            for error in (ConnectionRefusedError("refused"), trio.BrokenResourceError("refused")):
                with mock.patch.object(trio, "open_tcp_stream", side_effect=error):
                    async with client.plain_tcp() as why_not:
                        assert why_not == "refused"
                        assert (await client.run_next(rounds.RoundKind.LATENCY, 8, 3)).total > 0
            with mock.patch.object(trio, "open_tcp_listeners", side_effect=OSError("no port")):
                async with client.plain_tcp() as why_not:
                    assert why_not == "the other side: it cannot listen at another port: no port"
            with (
                mock.patch.object(payload_paths, "STREAM_PATIENCE", 0.2),
                mock.patch.object(perf_protocol, "connect_stream", connected_elsewhere),
            ):
                async with client.plain_tcp() as why_not:
                    assert re.fullmatch(r"the other side: nobody has connected to port \d+ with the token", why_not)
                    assert (await client.run_next(rounds.RoundKind.LATENCY, 8, 3)).total > 0
            async with client.plain_tcp() as why_not:
                assert why_not == ""
                for kind in rounds.RoundKind:
                    assert (await client.run_next(kind, 70_000, 3, plain=True)).total > 0

    trio.run(main)


def test_warning_of_busy_cores() -> None:
    def crowded(here: float, there: float | None) -> list[str]:
        return perf_results.crowded({"idle_cores": here, "server": {"idle_cores": there}})

    assert crowded(0.96, None) == ["only 1.0 cores are free for two processes"]
    assert crowded(1.95, None) == crowded(0.96, 0.96) == []
    few = ["only 0.4 cores are free here", "only 0.1 cores are free at the server"]
    assert crowded(0.4, 0.1) == few and crowded(3, 0.1) == few[1:]


def test_idle_cores_of_the_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They count if it is on another machine."""
    monkeypatch.setenv("TRIO_UCX_AUTHKEY", AUTHKEY)
    arguments = [*QUICK, "--json"]
    with start_cli("perf", "--listen", "127.0.0.1:0", "--json") as server:
        address = json.loads(read_line(server))["listening"]
        assert main(["perf", address, *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["server"]["idle_cores"] is None
        monkeypatch.setattr(perf, "machine", lambda: "another")
        assert main(["perf", address, *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["server"]["idle_cores"] >= 0


async def connected_elsewhere(connection: trio_ucx.Connection, port: int, token: str) -> trio.SocketStream:
    """As if something between accepted the stream, and took it nowhere."""
    one, other = socket.socketpair()
    other.close()
    return trio.SocketStream(trio.socket.from_stdlib_socket(one))


def test_a_stranger_at_the_plain_port() -> None:
    """Only the stream with the token is taken."""

    async def main() -> None:
        async with open_ends() as client, trio.open_nursery() as nursery:
            connect_stream = payload_paths.connect_stream
            strangers: list[trio.SocketStream] = []

            async def after_strangers(connection: trio_ucx.Connection, port: int, token: str) -> trio.SocketStream:
                for said in (bytes(100), b"short", b""):
                    stranger = await trio.open_tcp_stream("127.0.0.1", port)
                    strangers.append(stranger)
                    await stranger.send_all(said)
                    if said == b"short":
                        await stranger.send_eof()  # the last one waits, and says nothing
                return await connect_stream(connection, port, token)

            with mock.patch.object(perf_protocol, "connect_stream", after_strangers):
                async with client.plain_tcp() as why_not:
                    assert why_not == ""
                    assert (await client.run_next(rounds.RoundKind.STREAM, 8, 100, plain=True)).total > 0
            for stranger in strangers:
                nursery.start_soon(stranger.aclose)

    trio.run(main)


@asynccontextmanager
async def open_ends() -> AsyncIterator[perf_protocol.PerfClient]:
    """Yields the client's end of a measurement, whose server is here."""
    with trio.fail_after(TIMEOUT):
        config = {"TLS": "tcp"}
        async with (
            ucp.open_worker(config=config) as worker,
            ucp.open_worker(config=config) as other,
            trio.open_nursery() as nursery,
        ):
            server_end = perf_protocol.PerfServer()

            async def serve(connection: trio_ucx.Connection) -> None:
                with contextlib.suppress(PerfError):  # the client gets it, too
                    await server_end.serve(connection)

            [server] = await nursery.start(partial(trio_ucx.serve_ucx, serve, 0, host="127.0.0.1", worker=worker))
            async with trio_ucx.connect(server.address, worker=other) as connection:
                with contextlib.closing(perf_protocol.PerfClient(connection)) as client:
                    await client.introduce()
                    yield client
            nursery.cancel_scope.cancel()


@pytest.mark.full
def test_server_serves_one_client_after_another_until_ctrl_c() -> None:
    with start_cli("perf", "--listen", "127.0.0.1:0") as server:
        address = listening_address(server)
        for _ in range(2):
            done = run_cli("perf", address, *QUICK, "--json")
            assert (done.returncode, done.stderr) == (0, "")
            report = json.loads(done.stdout)
            assert report["server"]["address"] == address
            check_results(report["results"], [8, 1024, 65536])
        with start_cli("perf", address, *QUICK, "--json") as one, start_cli("perf", address, *QUICK, "--json") as other:
            for client in (one, other):
                output, errors = client.communicate(timeout=TIMEOUT)
                assert (client.returncode, errors) == (0, "")
                check_results(json.loads(output)["results"], [8, 1024, 65536])
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=TIMEOUT)
        assert (server.returncode, errors) == (130, "")
        came, left = output.splitlines()[:2]
        time, client = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", r"client 127\.0\.0\.1:\d+"
        assert re.fullmatch(rf"{time} {client} came: trio_ucx \S+, UCX \S+, process \d+ of \S+", came)
        measured = "241 messages over UCX, 240 messages over plain TCP; 8 to 64k bytes"
        assert re.fullmatch(rf"{time} {client}: left after [\d.]+ s; {measured}", left)
        assert len(output.splitlines()) == 8


@pytest.mark.full
def test_the_key_that_a_server_makes() -> None:
    """It prints the command for the other machine; a client without the key is refused, on this machine, too."""
    with start_cli("perf", "--listen", "0", without=["TRIO_UCX_AUTHKEY"]) as server:
        [port] = re.findall(r"^listening at \S+:(\d+)\n$", read_line(server))
        assert server.stdout is not None
        line = server.stdout.readline()
        typed = r"on the other machine: TRIO_UCX_AUTHKEY=(\w{32}) python -m trio_ucx perf (\S+):(\d+)\n"
        found = re.fullmatch(typed, line)
        assert found is not None and found[2] not in ("0.0.0.0", "[::]") and found[3] == port, line
        address = f"{found[2]}:{port}"
        for key, status in ((found[1], 0), (AUTHKEY, 1)):
            done = run_cli("perf", address, *QUICK, TRIO_UCX_AUTHKEY=key)
            assert done.returncode == status and ("authkeys of the two sides differ" in done.stderr) == (status == 1)
        done = run_cli("perf", address, without=["TRIO_UCX_AUTHKEY"])
        assert done.returncode == 1 and "no authkey, and its peer wants one" in done.stderr
        assert "authkey=" not in done.stderr and "TRIO_UCX_AUTHKEY or --authkey-file" in done.stderr
    with start_cli("perf", "--listen", "127.0.0.1:0", "--json", without=["TRIO_UCX_AUTHKEY"]) as server:
        assert len(json.loads(read_line(server))["authkey"]) == 32


@pytest.mark.full
def test_keys_from_files_and_without(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"sixteen letters!\n")
    file.chmod(0o600)
    options = ["--authkey-file", str(file)]
    with start_cli("perf", "--listen", "127.0.0.1:0", "--json", *options) as server:  # rather than the environment's
        said = json.loads(read_line(server))
        assert list(said) == ["listening"]
        assert run_cli("perf", said["listening"], *QUICK, *options).returncode == 0
        assert run_cli("perf", said["listening"], *QUICK).returncode == 1
        folder = tmp_path / "trio_ucx"
        folder.mkdir()
        file.rename(folder / "authkey")
        of_user = {"XDG_CONFIG_HOME": str(tmp_path)}
        done = run_cli("perf", said["listening"], *QUICK, without=["TRIO_UCX_AUTHKEY"], **of_user)
        assert done.returncode == 0, done.stderr
    with start_cli("perf", "--listen", "127.0.0.1:0", "--json", "--allow-anyone") as server:
        said = json.loads(read_line(server))
        assert list(said) == ["listening"]
        assert run_cli("perf", said["listening"], *QUICK, without=["TRIO_UCX_AUTHKEY"]).returncode == 0


def test_keys_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"fifteen letters\n")
    file.chmod(0o600)
    readable = tmp_path / "readable"
    readable.write_bytes(b"sixteen letters!\n")
    readable.chmod(0o644)
    for wrong, words in (
        (file, "authkey has 15 bytes"),
        (tmp_path / "none", "No such file"),
        (readable, "other users can read or change this file (mode 0644): chmod 600 it"),
    ):
        with pytest.raises(SystemExit):
            main(["perf", "--listen", "0", "--authkey-file", str(wrong)])
        said = capsys.readouterr().err
        assert words in said and str(wrong) in said and "letters" not in said


@pytest.mark.full
def test_server_survives_a_lost_client() -> None:
    with start_cli("perf", "--listen", "127.0.0.1:0") as server:
        address = listening_address(server)
        with start_cli("perf", address, "--seconds", "30", "--connections", "3") as client:
            read_line(client)
            client.kill()
        done = run_cli("perf", address, *QUICK, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=TIMEOUT)
        assert re.fullmatch(r"[-\d]+ [:\d]+ client 127\.0\.0\.1:\d+: .*\n", errors)


#: Imported by every Python process with it on its path: payload number 50 of one end arrives with one bit flipped.
CORRUPT = """
import os, sys
if ("--until-stdin-closes" in sys.orig_argv) == (os.environ["CORRUPT_END"] == "server") and "perf" in sys.orig_argv:
    from trio_ucx import Connection
    from trio_ucx._cli.payload_paths import PAYLOAD_TAG
    method = os.environ["CORRUPT_METHOD"]
    original = getattr(Connection, method)
    count = 0

    def corrupt(self, data, tag=0):
        global count
        count += tag == PAYLOAD_TAG
        if count == 50:
            data = bytearray(data)
            data[7] ^= 1
        return original(self, data, tag=tag)

    setattr(Connection, method, corrupt)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("end", "method", "kind"),
    [("client", "send", "latency"), ("server", "send", "latency"), ("client", "_submit_send", "stream")],
)
def test_corrupted_data_fail(end: str, method: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CORRUPT)
    done = run_cli(
        "perf", "--sizes", "8", "--iterations", "200", "--json",
        PYTHONPATH=python_path(tmp_path), CORRUPT_END=end, CORRUPT_METHOD=method,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.search(
        rf"wrong data arrived: message \d+ of \d+ \({kind}, 8 bytes each\) .* from byte 7 on\n", done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mistake", ["stale", "swapped", "lost"])
def test_verification(mistake: str) -> None:
    payloads = rounds.Payloads()
    for shift in (0, 1):
        round = rounds.Round(rounds.RoundKind.STREAM, "seed", 16, 10, shift)
        [sent], [places] = payloads.prepare(round)
        arriving = list(sent.pieces)
        if shift == 1:
            with pytest.raises(PerfError, match="wrong data"):  # what the round before left there
                payloads.verify(round)
            if mistake == "swapped":
                arriving[3], arriving[4] = arriving[4], arriving[3]
            elif mistake == "lost":
                arriving[4:] = [*arriving[5:], arriving[-1]]
            else:
                del arriving[9]
        for piece, place in zip(arriving, places.pieces, strict=False):
            place[:] = piece
        if shift == 0:
            payloads.verify(round)
    with pytest.raises(PerfError, match=r"message (10|4|5) of 10"):
        payloads.verify(round)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 2**31},
        {"size": 0},
        {"count": 10**6},
        {"count": True, "size": "8"},
        {"shift": -1},
        {"kind": "x"},
        {"operation": "x"},
        {"flows": 0},
        {"flows": 2**20},
        {"size": 2**30, "count": 2, "flows": 2},
    ],
)
def test_server_refuses_senseless_rounds(change: dict[str, Any]) -> None:
    good = GOOD["kind"]
    assert rounds.Round.from_message(good).count == 3
    with pytest.raises(PerfError, match="an invalid round"):
        rounds.Round.from_message({**good, **change})
    with pytest.raises(PerfError, match="an invalid round"):
        rounds.Round.from_message({"kind": "stream"})


GOOD: dict[str, dict[str, Any]] = {
    "perf": {
        **{"perf": 2, "trio_ucx": "0.1", "ucx": "1.22", "session": "a"},
        **{"machine": "b", "idle_cores": 1.5},
    },
    "join": {"join": "a"},
    "kind": {
        **{"kind": "stream", "seed": "a", "size": 8, "count": 3, "shift": 5, "plain": True},
        **{"operation": "messages", "flows": 1, "both": False},
    },
    "go": {"go": True},
    "memory": {"memory": "00ff"},
    "done": {"done": True},
    "tcp": {"tcp": True},
    "plain_port": {"plain_port": 65535, "token": "a"},
    "closed": {"closed": True, "why": ""},
    "ready": {"ready": True},
    "received": {"received": True},
    "verified": {"verified": True, "cpu_ns": 5},
    "error": {"error": "no"},
}


def test_control_messages() -> None:
    """Only a complete message is decoded, and each entry has its type."""
    assert set(GOOD) == set(perf_protocol.SHAPES)
    for entry, good in GOOD.items():

        def read(message: object, entry: str = entry) -> dict[str, Any] | None:
            return perf_protocol.read_message(bytearray(json.dumps(message).encode()), entry)

        found = read({**good, "more": [[]]})
        assert found is not None and json.loads(json.dumps(found, default=bytes.hex)) == good
        for name in good:
            rest = {each: value for each, value in good.items() if each != name}
            assert name in perf_protocol._DEFAULTS.get(entry, {}) or read(rest) is None
            for bad in (
                None,
                -1,
                [] if name == "idle_cores" else 1.5,
                float("nan"),
                2**70,
                0 if name.endswith("port") else [7],
                {"a": 1},
                [["x"]],
                [[[], "y"]],
            ):
                assert read({**good, name: bad}) is None, (name, bad)
            if name == "memory":
                assert read({**good, name: "0x"}) is None
            elif isinstance(good[name], str):
                long = read({**good, name: "\x1b]0;title\x07\n\ud800\u202e\u009b" + "x" * 5000})
                assert long is not None and long[name].isprintable() and len(long[name]) == 1000
    for data in (b"[" * 16000, b'{"perf":' * 2000, b"", b"\xff", b"1" * 16000, b"{}", b"[]", b'"perf"', b"null"):
        assert perf_protocol.read_message(bytearray(data), *GOOD) is None


@pytest.mark.full
def test_no_client_ends_the_server_or_reaches_its_terminal() -> None:
    """Whatever a client sends, the server prints one printable line for it, and serves the next client."""
    escape = "\x1b]0;title\x07\r\x9b2J\u202e"

    async def visit(address: str) -> None:
        for data in everything:
            with trio.fail_after(TIMEOUT), contextlib.suppress(trio.BrokenResourceError, trio.EndOfChannel):
                async with trio_ucx.connect(address, authkey=AUTHKEY.encode()) as connection:
                    await connection.send(data)
                    await connection.receive()
                    await connection.receive()

    hello = {"perf": 1, "trio_ucx": escape, "ucx": "1"}
    everything = [
        b"[" * 100_000,
        b"[" * 10_000,
        b'{"perf": ' * 1000,
        bytes(2**20),
        *(json.dumps(message).encode() for message in ({**hello, "perf": 7}, {"error": escape}, {"perf": escape})),
        json.dumps({"error": escape}, ensure_ascii=False).encode(),
    ]
    with start_cli("perf", "--listen", "127.0.0.1:0") as server:
        address = listening_address(server)
        trio.run(visit, address)
        done = run_cli("perf", address, *QUICK, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=TIMEOUT)
    lines = errors.splitlines()
    assert len(lines) == len(everything) and all(re.match(r"[-\d]+ [:\d]+ client ", line) for line in lines), errors
    assert all(line.isprintable() for line in lines) and "100000 bytes is too long" in lines[0]


async def test_other_programs_are_told() -> None:
    with trio.fail_after(TIMEOUT):
        async with trio.open_nursery() as nursery:

            async def handle(connection: trio_ucx.Connection) -> None:
                with pytest.raises(PerfError, match="is it trio_ucx's perf"):
                    await perf_protocol.PerfServer().serve(connection)

            [listener, *_] = await nursery.start(trio_ucx.serve_ucx, handle, 0)
            async with trio_ucx.connect(("127.0.0.1", listener.address[1])) as connection:
                await connection.send(b"GET / HTTP/1.1")
                with pytest.raises(PerfError, match=r"the other side says: .*is it trio_ucx's perf"):
                    await perf_protocol.hear(connection, "perf")
            nursery.cancel_scope.cancel()


async def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with trio.fail_after(TIMEOUT):
        async with trio.open_nursery() as nursery:

            async def handle(connection: trio_ucx.Connection) -> None:
                await trio.sleep_forever()

            [listener, *_] = await nursery.start(trio_ucx.serve_ucx, handle, 0)
            async with trio_ucx.connect(("127.0.0.1", listener.address[1])) as connection:
                monkeypatch.setattr(perf_protocol, "PATIENCE", 0.1)
                client = perf_protocol.PerfClient(connection)
                with pytest.raises(PerfError, match="no answer from the server"):
                    await client.introduce()
                with pytest.raises(PerfError, match="did not end in"):
                    await client.run(rounds.Round(rounds.RoundKind.LATENCY, "seed", 8, 1, 0))
            nursery.cancel_scope.cancel()


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_protocol, "PATIENCE", 0.1)
    with trio.fail_after(TIMEOUT):
        async with ucp.open_worker() as worker, open_pair(worker, window=4096) as (server, _):
            with pytest.raises(PerfError, match="has read nothing"):
                while True:
                    await perf_protocol.tell(server, {"ready": True})


def test_no_server_at_the_address() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        done = run_cli("perf", f"127.0.0.1:{unheard.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"python -m trio_ucx perf: .*127\.0\.0\.1:\d+.*\n", done.stderr)


@pytest.mark.full
def test_a_server_that_does_not_start() -> None:
    done = run_cli("perf", "--transports", "nonsense")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("python -m trio_ucx perf: ") == 1
    assert "'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["server", "client"])
def test_a_process_that_dies(name: str) -> None:
    with start_cli("perf", "--seconds", "30") as process:
        pids = wait_both_started(process)
        victim = pids[name == "client"]
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
        assert f"the {name} process (pid {victim}) was ended by SIGKILL" in errors
        assert "Traceback" not in errors
        assert_gone(pids)


@pytest.mark.full
@pytest.mark.parametrize("group", [False, True])
def test_ctrl_c_ends_both_processes(group: bool) -> None:
    # Without warnings: the signal may interrupt an import, and importlib then leaves a file to the garbage collector.
    with start_cli("perf", "--seconds", "30", PYTHONWARNINGS="") as process:
        pids = wait_both_started(process)
        if group:  # as a terminal does it
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, errors) == (130, "")
        assert_gone(pids)


@pytest.mark.full
def test_no_process_outlives_a_killed_command() -> None:
    with start_cli("perf", "--seconds", "30") as process:
        pids = wait_both_started(process)
        process.kill()
        assert_gone(pids)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required: COMMAND"),
        (["perf", "--sizes", "8,x"], "'x' is not a message size"),
        (["perf", "--sizes", "8,,9"], "'' is not a message size"),
        (["perf", "--sizes", "1km"], "'1km' is not a message size"),
        (["perf", "--sizes", "0"], "from 1 byte to 1G"),
        (["perf", "--sizes", "2G"], "from 1 byte to 1G"),
        (["perf", "--iterations", "0"], "'0' is no number of messages"),
        (["perf", "--iterations", "1.5"], "'1.5' is no number of messages"),
        (["perf", "--seconds", "nan"], "'nan' is no number of seconds"),
        (["perf", "--seconds=-1"], "'-1' is no number of seconds"),
        (["perf", "--iterations", "1", "--seconds", "1"], "not allowed with"),
        (["perf", "nowhere"], "'nowhere' has no port"),
        (["perf", "::1:80"], "brackets"),
        (["perf", "host:70000"], "between 0 and 65535"),
        (["perf", "--listen", "70000"], "between 0 and 65535"),
        (["perf", "--listen", "x"], "'x' has no port"),
        (["perf", "--listen", "0", "host:1"], "not allowed with"),
        (["perf", "--listen", "0", "--sizes", "8"], "the client chooses"),
        (["perf", "--transports", " "], "needs the name of a transport"),
        (["perf", "--allow-anyone"], "is for --listen"),
        (["perf", "--allow-anyone", "host:1"], "is for --listen"),
        (["perf", "--authkey-file", "/dev/null"], "with an ADDRESS"),
        (["perf", "--listen", "0", "--authkey-file", "x", "--allow-anyone"], "not allowed with"),
        (["perf", "--operation", "puts,x"], "'x' is none of messages, puts, gets, active-messages, stream"),
        (["perf", "-t", ""], "'' is none of"),
        (["perf", "--connections", "0"], "'0' is no number from 1 to 1024"),
        (["perf", "-P", "1025"], "'1025' is no number from 1 to 1024"),
        (["perf", "-P", "64", "--connections", "64"], "--connections times --parallel is at most 1024"),
        (["perf", "-P", "2", "-t", "messages,stream"], "--parallel is not for the stream"),
        (["perf", "--bidirectional", "-t", "puts"], "--bidirectional is not for puts and gets"),
        (["perf", "--sizes", "8,1G", "-P", "2"], "2 messages of 1G at the same time are more than 1G"),
        (["perf", "--csv", "--json"], "not allowed with"),
        (["perf", "--listen", "0", "--csv", "-P", "2"], "the client chooses --parallel, --csv"),
        (["perf", "--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["perf", "a..b:1"], "'a..b' cannot be the name of a host"),
        (["perf", f"{'a' * 70}:1"], "cannot be the name of a host"),
        (["perf", "--listen", "a..b:0"], "cannot be the name of a host"),
        (["check", "--listen", "a..b:0"], "cannot be the name of a host"),
        (["perf", "--listen", "9" * 5000], "between 0 and 65535"),
        (["perf", "--sizes", "9" * 5000], "from 1 byte to 1G"),
        (["perf", "--plot", "/tmp"], "--plot: /tmp is a folder"),
        (["perf", "--nonsense\n\x1b[2J"], "perf: error: unknown arguments: --nonsense??[2J; see"),
        (["completion", "sh"], "invalid choice: 'sh'"),
        (["report"], "required: PID"),
        (["mesh", "--ranks", "x", "y"], "'x' is not a number of processes"),
    ],
)
def test_wrong_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    output, errors = capsys.readouterr()
    assert complaint in errors and output == ""
    assert errors.count("\n") == 1 and errors.endswith(" --help\n")


def test_plot_of_an_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        main(["perf", "--plot", "x.doc"])
    assert "the name must end with one of ." in (said := capsys.readouterr().err) and ".png, " in said


def test_wrong_arguments_of_a_process() -> None:
    done = run_cli("perf", "--sizes", "big")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m trio_ucx perf: error: argument --sizes: 'big' is not a message size: write bytes, as in 8,1k,64k,1M"
        "; see python -m trio_ucx perf --help\n"
    )


@pytest.mark.parametrize("arguments", [["--version"], ["info"], ["perf", "--listen", "127.0.0.1:0"]])
def test_no_space_for_the_output(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT
        )
    assert done.returncode == 1
    assert re.fullmatch(
        r"python -m trio_ucx[ \w]*: the output cannot be written: \[Errno 28\] No space left on device\n", done.stderr
    )


def test_a_listener_that_cannot_print_goes_on() -> None:
    async def fail(address: str) -> None:
        async with trio_ucx.connect(address, authkey=AUTHKEY.encode()) as connection:
            await connection.send(b"nonsense", tag=payload_paths.CONTROL_TAG)
            with contextlib.suppress(trio.EndOfChannel, trio.BrokenResourceError):
                while True:
                    await connection.receive(tag=payload_paths.CONTROL_TAG)

    with Path("/dev/full").open("w") as full:
        with start_cli("perf", "--listen", "127.0.0.1:0", stderr=full.fileno()) as server:
            address = listening_address(server)
            assert server.stdout is not None
            server.stdout.close()
            trio.run(fail, address)
            for _ in range(2):
                done = run_cli("perf", address, *QUICK)
                assert (done.returncode, done.stderr) == (0, "")
            assert server.poll() is None


def test_closed_standard_streams() -> None:
    def run(closed: str) -> tuple[int, str]:
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, "completion"]
        done = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
        return done.returncode, done.stderr

    status, errors = run(">&-")
    assert status == 2 and errors.count("\n") == 1 and "required: SHELL" in errors
    assert run("<&- >&- 2>&-") == (2, "")


def test_encoding_without_all_characters() -> None:
    """Neither stdout's, nor that of the arguments."""
    done = run_cli("info", UCX_TLS="ä", PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and "UCX_TLS=\\xe4" in done.stdout and "Traceback" not in done.stderr
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_cli("perf", "--listen", "127.0.0.1:0", "--transports", "ä", **plain)
    assert (done.returncode, done.stdout) == (1, "")
    assert "starting UCX with the transports" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds", [1e-320, 1e300])
async def test_extreme_times(seconds: float) -> None:
    """A division overflows, and a product."""
    async with open_ends() as client:
        with trio.move_on_after(1):
            await measuring.repeat(client, rounds.RoundKind.LATENCY, 8, None, seconds, lambda share: None)


def test_a_plot_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed before the measurements."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match=r"this user may not write .*x\.png"):
        perf_plot.new_figure(tmp_path / "x.png")


def test_note_about_keys_only_where_they_matter() -> None:
    done = run_cli("perf", UCX_TLS="self")
    assert done.returncode == 1 and "shared memory cannot be used" in done.stderr
    assert "authkey" not in done.stderr


@pytest.mark.root
def test_no_device_is_up() -> None:
    need("unshare", "--net", "true", why="a network namespace")
    command = ["unshare", "--net", *COMMAND, "perf"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "Network is unreachable; is the network device up (ip link)" in done.stderr


async def test_memory_of_another_release() -> None:
    """The client says so, instead of showing a traceback."""
    async with open_ends() as client:
        with pytest.raises(PerfError, match="the server's memory cannot be used: these 3 bytes"):
            await client._attach(b"???")


def test_no_descriptor_for_plain_tcp() -> None:
    async def main() -> None:
        async with open_ends() as client:
            error = OSError(errno.EMFILE, "Too many open files")
            with mock.patch.object(trio.SocketListener, "accept", side_effect=error):
                async with client.plain_tcp() as why_not:
                    assert why_not.startswith("the other side: it cannot accept another connection: [Errno 24]")

    trio.run(main)


def test_too_little_memory() -> None:
    limited = ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "sh", *COMMAND]
    command = [*limited, "perf", "--sizes", "1G", "--iterations", "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "python -m trio_ucx perf: there is not enough memory (ulimit -v, or the limit of the control group)"
    ]


def runs_a_server(pid: int) -> bool:
    """True if it is a server of a pair, which Python has begun to start."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"--until-stdin-closes" in command and not command.startswith(b"sh")
    return False


def test_ctrl_c_while_the_processes_start() -> None:
    """They do not show where it has interrupted their imports."""
    with start_cli("perf", "--seconds", "30", PYTHONWARNINGS="") as process:
        children: list[int] = []
        deadline = time.monotonic() + TIMEOUT
        while not children and time.monotonic() < deadline:
            children = [pid for pid in children_of(process.pid) if runs_a_server(pid)]
        time.sleep(0.1)  # now Python has begun
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, errors) == (130, "")
        assert_gone(children)


def test_sizes() -> None:
    assert perf.parse_sizes("8, 1k,64K,1M,1g,1000") == [8, 2**10, 2**16, 2**20, 2**30, 1000]
    assert [perf.format_size(size) for size in (8, 2**10, 3 * 2**19, 2**30, 1000)] == ["8", "1k", "1536k", "1G", "1000"]


def test_errors_in_one_line() -> None:
    hint = OSError("second")
    hint.add_note("a hint")
    group = ExceptionGroup("outer", [PerfError("first"), ExceptionGroup("inner", [hint])])
    assert describe(group) == "first; second -- a hint"


def test_bugs_show_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(info, "collect", bug)
    with pytest.raises(ZeroDivisionError):
        main(["info"])


@pytest.mark.full
def test_a_reader_that_went_away() -> None:
    with start_cli("perf", *QUICK) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(TIMEOUT)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (1, "")


@pytest.mark.full
def test_progress_on_a_terminal() -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    shown = b""
    try:
        with start_cli("perf", *QUICK, "--json", stderr=theirs, TERM="xterm", COLUMNS="80") as process:
            os.close(theirs)
            with contextlib.suppress(OSError):  # EIO is the end of a terminal
                while True:
                    shown += os.read(ours, 4096)
            output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        os.close(ours)
    assert b"messages, 1k bytes (2 of 3)" in shown
    check_results(json.loads(output)["results"], [8, 1024, 65536])


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with perf.progress_bar("8 bytes") as advance:
        advance(0.5)
    assert capsys.readouterr() == ("", "")


OPERATIONS = "messages,puts,gets,active-messages,stream"


@pytest.mark.both_transports
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
def test_operations(transports: str) -> None:
    """Each is measured, over UCX and plain TCP, with one flow and with several."""
    for more, flows in (([], 1), (["--connections", "2", "-P", "3"], 6)):
        names = OPERATIONS if flows == 1 else OPERATIONS.removesuffix(",stream")
        options = ["-t", names, "--sizes", "8,70000", "--iterations", "20", "--transports", transports]
        done = run_cli("perf", "--json", *options, *more)
        assert (done.returncode, done.stderr) == (0, "")
        report = json.loads(done.stdout)
        assert report["connections"] * report["parallel"] == flows
        check_results(report["results"], [8, 70000] * len(names.split(",")))
        assert list(dict.fromkeys(result["operation"] for result in report["results"])) == names.split(",")
        assert all(result["latency_messages"] == result["stream_messages"] == 20 for result in report["results"])
        assert all(set(result["advantages"]) == {"latency", "p99", "bandwidth", "cpu"} for result in report["results"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
def test_both_ways(transports: str) -> None:
    options = ["-t", "messages,active-messages,stream", "--sizes", "8,300000", "--seconds", "0.05"]
    done = run_cli("perf", "--json", "--bidirectional", "--connections", "2", "--transports", transports, *options)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["bidirectional"] is True
    check_results(report["results"], [8, 300000] * 3)
    for result in report["results"]:
        assert result["back_mb_s"] > 0 and result["plain_tcp"]["back_mb_s"] > 0
    header, table, _ = run_cli("perf", "--bidirectional", *QUICK).stdout.split("\n\n")
    assert "both sides send at the same time" in header and "MB/s back" in table


def test_fewer_messages_than_flows() -> None:
    done = run_cli("perf", "--json", "-P", "5", "--iterations", "3", "--sizes", "8", "-t", "messages,puts")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(result["stream_messages"] == 3 for result in json.loads(done.stdout)["results"])


def test_csv_and_plot(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    done = run_cli(
        *("perf", *QUICK, "--csv", "--plot", str(tmp_path / "all.svg"), "-t", "messages,gets"),
        PYTHONWARNINGS="",
        MPLCONFIGDIR=str(tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["operation"], row["size"], row["path"]) for row in rows] == [
        (operation, size, path)
        for operation in ("messages", "gets")
        for size in ("8", "1024", "65536")
        for path in ("ucx", "plain_tcp")
    ]
    for row in rows:
        assert float(row["bandwidth_mb_s"]) == pytest.approx(float(row["messages_s"]) * int(row["size"]) / 1e6)
        assert float(row["latency_median_us"]) > 0 and float(row["cpu_us"]) > 0
    text = (tmp_path / "all.svg").read_text()
    assert text.startswith("<?xml") and "svg" in text and matplotlib is not None


def some_result(operation: str = "messages", size: int = 8, times: float = 1.0, **plain: float) -> perf_results.Result:
    """A result whose advantage over plain TCP is ``times``."""
    fields = {"back_mb_s": 0.0, "messages_s": 1e5, "latency_cpu_us": 4.0, "latency_messages": 9, "stream_messages": 9}
    tcp = perf_results.Result(
        operation, size, latency_median_us=10.0, latency_p99_us=20.0, bandwidth_mb_s=100.0, cpu_us=5.0, **fields
    )
    return attrs.evolve(
        tcp,
        latency_median_us=10 / times,
        latency_p99_us=20 / times,
        bandwidth_mb_s=100 * times,
        cpu_us=5 / times,
        plain_tcp=tcp,
    )


def test_csv_has_the_same_numbers_as_json() -> None:
    result = some_result(times=3)
    out = io.StringIO()
    perf_results.write_csv([result], out)
    [ours, plain] = csv.DictReader(io.StringIO(out.getvalue()))
    for row, wanted in ((ours, result.as_dict()), (plain, result.as_dict()["plain_tcp"])):
        for name in row.keys() - {"path"}:
            assert row[name] == str(wanted[name])


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("PDF", b"%PDF"), ("svg", b"<?xml")])
def test_plot_by_suffix(suffix: str, begins: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    results = [some_result(size=size, times=2) for size in (1024, 8)]
    perf_plot.save(perf_plot.new_figure(file), [*results, attrs.evolve(results[0], plain_tcp=None)], "title", file)
    assert file.read_bytes().startswith(begins)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main(["perf", "--plot", "x.png"])
    assert "--plot: it needs matplotlib: pip install 'trio_ucx[plot]'; see" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err.endswith("completion: this needs shtab: pip install 'trio_ucx[cli]'\n")


@pytest.mark.parametrize(
    ("times", "answer", "words"),
    [
        ([2, 3.04], "Yes", "better for all sizes (2.0 to 3.0 x)"),
        ([0.5, 0.5], "No", "worse for all sizes (0.50 x)"),
        ([1, 1], "No", "much the same for all sizes"),
        ([1, 20], "Yes", "better for 64k (20 x), much the same for 8"),
        ([2, 0.5], "Partly", "better for 8 (2.0 x), worse for 64k (0.50 x)"),
    ],
)
def test_verdict(times: list[float], answer: str, words: str) -> None:
    results = [some_result(size=size, times=each) for size, each in zip((8, 65536), times, strict=True)]
    said = perf_results.verdict(results, [])
    assert "Repeat" not in said
    assert perf_results.verdict(results, ["a", "b"]).endswith("Repeat this when more cores are free: a and b.")
    assert said.splitlines()[:3] == [
        f"Is UCX worth it here? {answer}. Beside plain TCP:",
        f"  messages, latency: {words}",
        f"  messages, bandwidth: {words}",
    ]
    cpu = statistics.geometric_mean(times)
    share = "much the same" if cpu == 1 else f"{1 / cpu:.1f} x as much" if cpu < 1.1 else f"{1 / cpu:.2f} x as much"
    assert f"CPU for each message: {share}" in said
    unknown = [attrs.evolve(result, plain_tcp=None) for result in results]
    assert perf_results.verdict(unknown, []) == "Is UCX worth it here? Unknown: plain TCP was not measured."
    assert len(perf_results.row_text(unknown[0], False).splitlines()) == 1


@pytest.mark.full
def test_listening_in_json_and_ctrl_c_at_the_client() -> None:
    with start_cli("perf", "--listen", "127.0.0.1:0", "--json", PYTHONWARNINGS="") as server:
        address = json.loads(read_line(server))["listening"]
        assert run_cli("perf", address, *QUICK, "--connections", "3", "-t", "messages,puts").returncode == 0
        visit = json.loads(read_line(server))
        assert (visit["connections"], visit["sizes"], visit["error"]) == (3, [8, 1024, 65536], None)
        assert visit["messages"]["puts over UCX"] == 240 and visit["seconds"] > 0
        with start_cli("perf", address, "--seconds", "30", PYTHONWARNINGS="") as client:
            read_line(client)
            client.send_signal(signal.SIGINT)
            assert client.communicate(timeout=TIMEOUT)[1] == "" and client.returncode == 130
        assert json.loads(read_line(server))["client"].startswith("127.0.0.1:")
        with start_cli("perf", address, "--seconds", "30") as client:  # and at the server
            read_line(client)
            server.send_signal(signal.SIGINT)
            lost = server.communicate(timeout=TIMEOUT)[1]  # the client before
            assert server.returncode == 130 and lost.count("\n") == 1 and " client 127.0.0.1:" in lost
            errors = client.communicate(timeout=TIMEOUT)[1]
            assert client.returncode == 1 and errors.count("\n") == 1 and "Traceback" not in errors


async def test_another_release_is_told() -> None:
    with trio.fail_after(TIMEOUT):
        async with trio.open_nursery() as nursery:

            async def handle(connection: trio_ucx.Connection) -> None:
                with pytest.raises(PerfError, match="has version 2, trio_ucx 0.9 has version 1. Install the same"):
                    await perf_protocol.PerfServer().serve(connection)

            [listener, *_] = await nursery.start(trio_ucx.serve_ucx, handle, 0)
            for message, answer in (
                ({"perf": 1, "plain": 1, "trio_ucx": "0.9", "ucx": "1"}, "the protocols of perf differ"),
            ):
                async with trio_ucx.connect(("127.0.0.1", listener.address[1])) as connection:
                    await connection.send(json.dumps(message).encode())
                    with pytest.raises(PerfError, match=f"the other side says: {answer}"):
                        await perf_protocol.hear(connection, "perf")
            nursery.cancel_scope.cancel()


async def test_a_session_that_is_not_there() -> None:
    with trio.fail_after(TIMEOUT):
        async with trio.open_nursery() as nursery:

            async def handle(connection: trio_ucx.Connection) -> None:
                with pytest.raises(PerfError, match="no such session"):
                    await perf_protocol.PerfServer().serve(connection)

            [listener, *_] = await nursery.start(trio_ucx.serve_ucx, handle, 0)
            async with trio_ucx.connect(("127.0.0.1", listener.address[1])) as connection:
                with pytest.raises(PerfError, match="the other side says: there is no such session"):
                    await perf_protocol.PerfClient(connection).join(connection, {"session": "a"})
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("operation", list(rounds.PerfOperation))
def test_verification_of_each_operation(operation: rounds.PerfOperation) -> None:
    """A client that sends other data than the server expects is found out, and so is the server."""

    async def main() -> None:
        async with open_ends() as client:
            round = rounds.Round(rounds.RoundKind.STREAM, "seed", 8, 10, 0, operation=operation)
            wrong = attrs.evolve(round, seed="another")
            prepare, expected = client._payloads.prepare, client._payloads.expected
            with (
                mock.patch.object(client._payloads, "prepare", lambda _: prepare(wrong)),
                mock.patch.object(client._payloads, "expected", lambda _: expected(wrong)),
                pytest.raises(PerfError, match="wrong data arrived: message 1 of 10"),
            ):
                await client.run(round)

    trio.run(main)


# ---- completion ----


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "trio-ucx" in script and "bidirectional" in script and "until-stdin-closes" not in script


def test_completion_in_bash(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    assert main(["completion", "bash"]) == 0
    ask = """COMP_WORDS=(trio-ucx perf --bi); COMP_CWORD=2
        $(complete -p trio-ucx | sed 's/.* -F \\([^ ]*\\).*/\\1/'); echo "${COMPREPLY[@]}" """
    script = f"{capsys.readouterr().out}\n{ask}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "--bidirectional", done
