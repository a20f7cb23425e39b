"""The command line, in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
from helpers import assert_gone, children_of, open_pair, python_path

import trio_ucx
from trio_ucx import ucp
from trio_ucx._cli import info, main, payload_paths, perf, perf_protocol
from trio_ucx._cli.errors import PerfError, describe

from .programs import AUTHKEY, QUICK, TIMEOUT, listening_address, read_line, run_cli, start_cli


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
    assert facts["config"]["TLS"] == "all"
    left_out = {"POSIX_SHM_MIN_SIZE"}  # posix shared memory, where there is that of System V
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
        assert all(value > 0 for name, value in result.items() if name != "plain_tcp"), result
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
    header, _, table = done.stdout.partition("\n\n")
    assert re.search(r"^transports: tcp\b", header, re.MULTILINE)
    titles, *rows = table.splitlines()
    assert titles.split() == ["bytes", "median", "us", "p99", "us", "MB/s", "messages/s"]
    assert [row.split()[:-4] for row in rows] == [["8"], ["8", "TCP"], ["1k"], ["1k", "TCP"]]
    assert all(float(number.replace(",", "")) > 0 for row in rows for number in row.split()[-4:])


def test_plain_tcp_that_cannot_be_had() -> None:
    """A server of another release does not know it, and a port may be closed to the client: the rest is measured."""

    async def main() -> None:
        async with open_ends() as (client, server):
            async with client.plain_tcp({**server, "plain": 0}) as why_not:
                assert why_not == "the other side is trio_ucx 0.1.0, whose perf cannot"
            for error in (ConnectionRefusedError("refused"), trio.BrokenResourceError("refused")):
                with mock.patch.object(trio, "open_tcp_stream", side_effect=error):
                    async with client.plain_tcp(server) as why_not:
                        assert why_not == "refused"
                        assert (await client.run_next(perf_protocol.RoundKind.LATENCY, 8, 3)).total > 0
            with mock.patch.object(trio, "open_tcp_listeners", side_effect=OSError("no port")):
                async with client.plain_tcp(server) as why_not:
                    assert why_not == "the other side: it cannot listen at another port: no port"
            with (
                mock.patch.object(payload_paths, "STREAM_PATIENCE", 0.2),
                mock.patch.object(perf_protocol, "connect_stream", connected_elsewhere),
            ):
                async with client.plain_tcp(server) as why_not:
                    assert re.fullmatch(r"the other side: nobody has connected to port \d+ with the token", why_not)
                    assert (await client.run_next(perf_protocol.RoundKind.LATENCY, 8, 3)).total > 0
            async with client.plain_tcp(server) as why_not:
                assert why_not == ""
                for kind in perf_protocol.RoundKind:
                    assert (await client.run_next(kind, 70_000, 3, plain=True)).total > 0

    trio.run(main)


def test_warning_of_busy_cores() -> None:
    assert perf.crowded(0.96) == ["WARNING: only 1.0 cores are free for two processes: the figures will vary"]
    assert perf.crowded(1.95) == []


async def connected_elsewhere(connection: trio_ucx.Connection, port: int, token: str) -> trio.SocketStream:
    """As if something between accepted the stream, and took it nowhere."""
    one, other = socket.socketpair()
    other.close()
    return trio.SocketStream(trio.socket.from_stdlib_socket(one))


def test_a_stranger_at_the_plain_port() -> None:
    """Only the stream with the token is taken."""

    async def main() -> None:
        async with open_ends() as (client, server), trio.open_nursery() as nursery:
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
                async with client.plain_tcp(server) as why_not:
                    assert why_not == ""
                    assert (await client.run_next(perf_protocol.RoundKind.STREAM, 8, 100, plain=True)).total > 0
            for stranger in strangers:
                nursery.start_soon(stranger.aclose)

    trio.run(main)


@asynccontextmanager
async def open_ends() -> AsyncIterator[tuple[perf_protocol.PerfClient, dict[str, Any]]]:
    """Yields the client's end of a measurement, whose server is here, and the server's hello."""
    with trio.fail_after(TIMEOUT):
        async with ucp.open_worker(config={"TLS": "tcp"}) as worker, trio.open_nursery() as nursery:
            turn = trio.Lock()
            [server] = await nursery.start(
                partial(
                    trio_ucx.serve_ucx,
                    lambda connection: perf_protocol.serve(connection, turn),
                    0,
                    host="127.0.0.1",
                    worker=worker,
                )
            )
            async with trio_ucx.connect(server.address, worker=worker) as connection:
                client = perf_protocol.PerfClient(connection)
                yield client, await client.introduce()
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
        assert server.communicate(timeout=TIMEOUT) == ("", "")
        assert server.returncode == 130


@pytest.mark.full
def test_the_key_that_a_server_makes() -> None:
    """It prints the command for the other machine; a client without the key is refused, on this machine, too."""
    with start_cli("perf", "--listen", "0", without=["TRIO_UCX_AUTHKEY"]) as server:
        [port] = re.findall(r"^listening at 0\.0\.0\.0:(\d+)\n$", read_line(server))
        assert server.stdout is not None
        line = server.stdout.readline()
        typed = r"on the other machine: TRIO_UCX_AUTHKEY=(\w{32}) python -m trio_ucx perf (\S+):(\d+)\n"
        found = re.fullmatch(typed, line)
        assert found is not None and found[2] not in ("0.0.0.0", "::") and found[3] == port, line
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
        with start_cli("perf", address, "--seconds", "30") as client:
            read_line(client)
            client.kill()
        done = run_cli("perf", address, *QUICK, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=TIMEOUT)
        assert re.fullmatch(r"client .*\n", errors)


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
    payloads = perf_protocol.Payloads()
    for shift in (0, 1):
        round = perf_protocol.Round(perf_protocol.RoundKind.STREAM, "seed", 16, 10, shift)
        pieces, places = payloads.prepare(round)
        arriving = list(pieces)
        if shift == 1:
            with pytest.raises(PerfError, match="wrong data"):  # what the round before left there
                payloads.verify(round)
            if mistake == "swapped":
                arriving[3], arriving[4] = arriving[4], arriving[3]
            elif mistake == "lost":
                arriving[4:] = [*arriving[5:], arriving[-1]]
            else:
                del arriving[9]
        for piece, place in zip(arriving, places, strict=False):
            place[:] = piece
        if shift == 0:
            payloads.verify(round)
    with pytest.raises(PerfError, match=r"message (10|4|5) of 10"):
        payloads.verify(round)


@pytest.mark.parametrize(
    "change",
    [{"size": 2**31}, {"size": 0}, {"count": 10**6}, {"count": True, "size": "8"}, {"shift": -1}, {"kind": "x"}],
)
def test_server_refuses_senseless_rounds(change: dict[str, Any]) -> None:
    good = {"kind": "stream", "seed": "a", "size": 8, "count": 3, "shift": 5}
    assert perf_protocol.Round.from_message(good).count == 3
    with pytest.raises(PerfError, match="an invalid round"):
        perf_protocol.Round.from_message({**good, **change})
    with pytest.raises(PerfError, match="an invalid round"):
        perf_protocol.Round.from_message({"kind": "stream"})


GOOD: dict[str, dict[str, Any]] = {
    "perf": {"perf": 1, "plain": 1, "trio_ucx": "0.1", "ucx": "1.22"},
    "kind": {"kind": "stream", "seed": "a", "size": 8, "count": 3, "shift": 5, "plain": True},
    "tcp": {"tcp": True},
    "plain_port": {"plain_port": 65535, "token": "a"},
    "closed": {"closed": True, "why": ""},
    "ready": {"ready": True},
    "received": {"received": True},
    "verified": {"verified": True},
    "error": {"error": "no"},
}


def test_control_messages() -> None:
    """Only a complete message is decoded, and each entry has its type."""
    assert set(GOOD) == set(perf_protocol.SHAPES)
    for entry, good in GOOD.items():

        def read(message: object, entry: str = entry) -> dict[str, Any] | None:
            return perf_protocol.read_message(bytearray(json.dumps(message).encode()), entry)

        found = read({**good, "more": [[]]})
        assert found is not None and json.loads(json.dumps(found)) == good
        for name in good:
            rest = {each: value for each, value in good.items() if each != name}
            assert name == "plain" or read(rest) is None
            for bad in (
                None,
                -1,
                1.5,
                float("nan"),
                2**70,
                0 if name.endswith("port") else [7],
                {"a": 1},
                [["x"]],
                [[[], "y"]],
            ):
                assert read({**good, name: bad}) is None, (name, bad)
            if isinstance(good[name], str):
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
    assert len(lines) == len(everything) and all(line.startswith("client ") for line in lines), errors
    assert all(line.isprintable() for line in lines) and "100000 bytes is too long" in lines[0]


async def test_other_programs_are_told() -> None:
    with trio.fail_after(TIMEOUT):
        async with trio.open_nursery() as nursery:

            async def handle(connection: trio_ucx.Connection) -> None:
                with pytest.raises(PerfError, match="is it trio_ucx's perf"):
                    await perf_protocol.serve(connection, trio.Lock())

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
                    await client.run(perf_protocol.Round(perf_protocol.RoundKind.LATENCY, "seed", 8, 1, 0))
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
    ],
)
def test_wrong_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err


def test_wrong_arguments_of_a_process() -> None:
    done = run_cli("perf", "--sizes", "big")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("argument --sizes: 'big' is not a message size: write bytes, as in 8,1k,64k,1M\n")


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
    assert b"1k bytes (2 of 3)" in shown
    check_results(json.loads(output)["results"], [8, 1024, 65536])


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with perf.progress_bar("8 bytes") as advance:
        advance(0.5)
    assert capsys.readouterr() == ("", "")
