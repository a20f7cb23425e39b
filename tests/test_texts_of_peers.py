"""Texts of peers, and of whatever else a process does not control, are printable before they reach an error, a log or
a terminal: each way in is tried with text that would take a terminal over.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from samples import some_description

from trio_ucx import PeerInfo, mesh, ucp
from trio_ucx._cli import perf_protocol
from trio_ucx._cli import report as report_command
from trio_ucx._handshake.control_stream import remote_address
from trio_ucx._handshake.exchange import Exchange, FrameKind, Refused, UnknownProtocol
from trio_ucx._handshake.peer_description import PeerDescription
from trio_ucx._native import ffi, lib
from trio_ucx._rules.wire import MAGIC, VERSION, ProtocolError, RefusalCode
from trio_ucx.mesh._contact import Contact
from trio_ucx.mesh._launchers import Machine
from trio_ucx.mesh._messages import _KINDS, decode, encode
from trio_ucx.mesh._place import find_place
from trio_ucx.ucp._quirks import log as ucx_log

#: Sets a terminal's title and clears it, also with 8-bit control characters; turns the direction of writing around.
EVIL = "begin\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e\x7fend"
SHOWN = EVIL.translate({ord(char): "?" for char in EVIL if not char.isprintable()})


def texts(value: Any) -> list[str]:
    """Returns all texts in a value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return texts([*value, *value.values()])
    return [text for one in value for text in texts(one)] if isinstance(value, (list, tuple)) else []


def check(*found: str) -> None:
    """All are printable, and the harmless characters are still there."""
    for text in found:
        assert text.isprintable() and SHOWN in text, text


# ---- the exchange ----


def refuse(version: int) -> bytes:
    reason = EVIL.encode()
    preamble = struct.pack("<8sHH32s", MAGIC, version, 0, bytes(32))
    return preamble + struct.pack("<IBB", 2 + len(reason), FrameKind.REFUSE, RefusalCode.OTHER) + reason


@pytest.mark.parametrize("is_client", [True, False])
def test_reason_of_a_refusal(is_client: bool) -> None:
    exchange = Exchange(is_client=is_client, software="", authkey=None)
    exchange.receive_data(refuse(VERSION))
    event = exchange.next_event()
    assert isinstance(event, Refused)
    check(event.reason)


def test_reason_of_a_refusal_in_another_version() -> None:
    exchange = Exchange(is_client=True, software="", authkey=None)
    exchange.receive_data(refuse(VERSION + 1))
    with pytest.raises(ProtocolError) as caught:
        exchange.next_event()
    check(str(caught.value))


def test_first_bytes_of_another_protocol() -> None:
    assert str(UnknownProtocol(EVIL.encode())).isprintable()


@pytest.mark.parametrize("field", ["software", "host_name"])
def test_peer_description(field: str) -> None:
    description = some_description(**{field: EVIL})
    check(getattr(PeerDescription.decode(description.encode()), field))


def test_peer_info() -> None:
    """The texts of a certificate are the program's, as ``ssl`` returns them."""
    info = PeerInfo({"subject": ((("commonName", EVIL),),)}, None, None, None, None, "", 0, "")
    assert repr(info).isprintable()


def test_path_of_a_unix_socket() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,  # the path of a socket is short
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        listener.bind(f"{folder}/listener")
        listener.listen()
        client.bind(f"{folder}/{EVIL}")
        client.connect(f"{folder}/listener")
        server, _ = listener.accept()
        with trio.socket.from_stdlib_socket(server) as control:
            address = remote_address(control)
    assert address is not None
    check(address[0])


# ---- groups of processes ----

#: By the annotation of a field of a message: a value with texts.
VALUES: dict[str, Any] = {
    "int": 1,
    "float": 1.0,
    "bool": True,
    "str": EVIL,
    "tuple[int, ...]": (1,),
    "Address": (EVIL, 1),
    "list[Address | None]": [(EVIL, 1), None],
    "dict[int, int]": {1: 1},
    "dict[int, str]": {1: EVIL},
}


@pytest.mark.parametrize("kind", _KINDS.values())
def test_messages_of_ranks(kind: type[Any]) -> None:
    message = kind(**{field.name: VALUES[str(field.type)] for field in attrs.fields(kind)})
    decoded = decode(encode(message))
    assert type(decoded) is kind
    found = texts(attrs.astuple(decoded))
    assert len(found) == len(texts(attrs.astuple(message)))
    check(*found)


@pytest.mark.parametrize("message", [["Left", {EVIL: 1}], [EVIL, {}], {EVIL: 1}, EVIL])
def test_malformed_messages_of_ranks(message: Any) -> None:
    with pytest.raises(ValueError) as caught:
        decode(json.dumps(message).encode())
    assert str(caught.value).isprintable() and str(caught.value.__cause__).isprintable()


async def test_last_words_of_a_rank(tmp_path: Path) -> None:
    """They are in the errors of the others."""

    class Evil(Exception):
        def __repr__(self) -> str:
            return EVIL

    async def run(rank: int) -> None:
        meeting = f"file://{tmp_path}/meeting"
        try:
            async with ucp.open_worker() as worker:
                async with mesh.join(rank=rank, size=3, meeting=meeting, worker=worker) as group:
                    await group.barrier()
                    if rank == 1:
                        raise Evil
                    await trio.sleep_forever()
        except mesh.RankLostError as error:
            check(str(error), error.reason)
            lost.append(error.rank)
        except Evil:
            pass

    lost: list[int] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                nursery.start_soon(run, rank)
    assert lost == [1, 1]


@pytest.mark.parametrize("fields", [{}, {EVIL: 1}])
async def test_what_rank_0_says_of_itself(tmp_path: Path, fields: dict[str, Any]) -> None:
    contact = attrs.asdict(Contact([EVIL], 1, "another", "sixteen bytes or more"))
    path = tmp_path / "meeting"
    path.write_text(json.dumps({**contact, **fields}))
    with pytest.raises(mesh.MeetingError) as caught:
        async with mesh.join(rank=1, size=2, meeting=f"file://{path}", timeout=0.5):
            pass
    check(str(caught.value))


OURS = {"TRIO_UCX_RANK": "1", "TRIO_UCX_SIZE": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
POD = {**OURS, "KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"}
HERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    "environment",
    [
        {**OURS, "TRIO_UCX_MEETING": f"{EVIL}:1"},
        {**OURS, "TRIO_UCX_MEETING": f"file:///tmp/{EVIL}"},
        {**OURS, "TRIO_UCX_MEETING": EVIL},
        {**OURS, "TRIO_UCX_MEETING": HERE, "TRIO_UCX_RANK": EVIL},
        {**OURS, "TRIO_UCX_MEETING": HERE, "TRIO_UCX_AUTHKEY_FILE": f"/{EVIL}"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": EVIL, "MASTER_PORT": "1"},
        {"RANK": "1", "WORLD_SIZE": EVIL, "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {**SLURM, "SLURM_STEP_NODELIST": EVIL},
        {**SLURM, "SLURM_STEP_NODELIST": "a\x1b[2J", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {**SLURM, "SLURM_STEP_NODELIST": "a\x9b2J", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {**SLURM, "SLURM_STEP_NODELIST": f"a[{EVIL}]"},
        {**SLURM, "SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": EVIL},
        POD,
    ],
)
def test_environment_of_a_launcher(environment: dict[str, str]) -> None:
    machine = Machine(full_host_name=lambda: EVIL)
    try:
        place = find_place(environment, machine=machine)
    except (RuntimeError, ValueError, OSError) as error:
        assert str(error).isprintable()
    else:
        assert all(text.isprintable() for text in (repr(place), str(place.meeting), *place.hosts))


@pytest.mark.parametrize("file", ["meeting", "key"])
def test_path_of_a_file(tmp_path: Path, file: str) -> None:
    path = tmp_path / EVIL
    path.touch()
    path.chmod(0o666)
    with pytest.raises((PermissionError, mesh.MeetingError)) as caught:
        if file == "key":
            find_place({**OURS, "TRIO_UCX_MEETING": HERE, "TRIO_UCX_AUTHKEY_FILE": str(path)})
        else:
            trio.run(join_at, path)
    check(str(caught.value))


async def join_at(path: Path) -> None:
    async with mesh.join(rank=1, size=2, meeting=path.as_uri(), timeout=0.1):
        pass


# ---- the command line ----


@asynccontextmanager
async def hostile_process(answer: bytes) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A process that answers whatever it wants when it is asked for its report."""
    program = (
        "import os, signal, sys\n"
        f"memfd = os.memfd_create({report_command.mark_of(signal.SIGUSR1)!r})\n"
        "def answer(*_):\n"
        "    os.pwrite(memfd, answer_of_it, 4)\n"
        "    os.pwrite(memfd, b'done', 0)\n"
        "answer_of_it = sys.stdin.buffer.read()\n"
        "signal.signal(signal.SIGUSR1, answer)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(answer)
        process.stdin.close()
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["text", "json"])
async def test_report_of_another_process(kind: str) -> None:
    """It has several lines."""
    answer = f"{EVIL.replace(chr(10), '')}\n\t{EVIL}".encode() + b"\xff"
    async with hostile_process(answer) as process:
        report = await trio.to_thread.run_sync(report_command.ask, process.pid, signal.SIGUSR1, kind)
    assert report.startswith("begin?]0;owned??[2J?") and "\n\tbegin" in report
    assert all(char.isprintable() or char in "\n\t" for char in report)


async def test_endless_report_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_command, "LONGEST", 100_000)
    async with hostile_process(bytes(300_000)) as process:
        with pytest.raises(report_command.NoReport, match="more than 100000 bytes"):
            await trio.to_thread.run_sync(report_command.ask, process.pid, signal.SIGUSR1)


def test_name_of_a_process_that_is_asked() -> None:
    """``/proc/PID/status`` begins with it."""
    program = "import ctypes; ctypes.CDLL(None).prctl(15, b'SigCgt: \\x1b'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        with pytest.raises(report_command.NoReport, match="has not called trio_ucx.report_on_signal"):
            report_command.ask(process.pid, signal.SIGUSR1)
        process.communicate(b"\n")


@pytest.mark.parametrize(
    "shape", [name for name, shape in perf_protocol.SHAPES.items() if perf_protocol._text in shape.values()]
)
def test_control_messages_of_perf(shape: str) -> None:
    readers = {
        perf_protocol._text: EVIL,
        perf_protocol._number: 1,
        perf_protocol._port: 1,
        perf_protocol._true: True,
        perf_protocol._flag: True,
        perf_protocol._cores: 1.0,
        perf_protocol._packed: "00",
    }
    values: dict[Callable[[Any], Any], Any] = readers
    message = {name: values[read] for name, read in perf_protocol.SHAPES[shape].items()}
    decoded = perf_protocol.read_message(bytearray(json.dumps(message).encode()), shape)
    assert decoded is not None
    check(*texts(list(decoded.values())))


# ---- UCX's log ----


@pytest.mark.parametrize("logged", [True, False])
def test_lines_of_ucx(logged: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """They may quote a peer. Without a handler they go to stderr."""
    texts = [ffi.new("char[]", text) for text in (b"/a/file.c", b"function", EVIL.encode())]
    file, function, text = texts
    line = ffi.new("tu_log_line_t *", {"level": 1, "number": 3, "file": file, "function": function, "text": text})
    if logged:
        ucx_log._log(line, 0)
        [message] = [record.getMessage() for record in caplog.records]
        check(message)
    else:
        lib.tu_log_print(line)
        [message] = os.fsdecode(capfd.readouterr().err).split("\n")[:-1]
        assert message.isprintable() and message.startswith("file.c:3 UCX ERROR begin?]0;owned??[2J??")
