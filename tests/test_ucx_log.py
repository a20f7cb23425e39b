"""UCX's log goes to the logger ``trio_ucx.ucx``, and to stdout only if the user says so."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from remote import open_endpoint_and_context

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi
from trio_ucx.ucp._quirks import log as ucx_log

#: Prints the environment's state, has UCX say something, and provokes an error.
PROGRAM = """
import ctypes, json, logging, os, sys

def environment():
    first = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    native = []
    while first[len(native)]:
        native.append(first[len(native)])
    return dict(os.environ), sorted(native)

before = environment()
import trio
from trio_ucx import ucp

records = []
class Keep(logging.Handler):
    def emit(self, record):
        if "are open to" not in record.getMessage():  # which hosts are admitted
            records.append((record.levelname, record.name, record.getMessage()))
if "unconfigured" not in sys.argv:
    logging.getLogger().addHandler(Keep())

async def main():
    async with ucp.open_worker(config={"TLS": "tcp"}, admit=["127.0.0.1"]) as worker:
        async with await worker.open_listener("127.0.0.1", 0) as listener:
            kept = len(records)
            for _ in range(30 if "patient" in sys.argv else 1):
                del records[kept:]
                try:
                    await worker.open_listener("127.0.0.1", listener.address[1])
                except OSError:
                    logged_at_once = any("failed" in message for _, _, message in records)
                if logged_at_once:
                    break
                await trio.sleep(1)  # UCX waits 20 ms in each second for the thread that logs

    print(json.dumps({"same": before == environment(), "at_once": logged_at_once, "records": records}))

print("begin", flush=True)
trio.run(main)
"""

#: Calls UCX's logging function as UCX does, with any level and from any thread.
DISPATCH = """
import ctypes, logging, sys, threading, time
from trio_ucx import ucp, _native
with open("/proc/self/maps") as maps:
    library = [line.split()[-1] for line in maps if "/libucs.so" in line][0]
class Component(ctypes.Structure):
    _fields_ = [("level", ctypes.c_int), ("name", ctypes.c_char * 16), ("filter", ctypes.c_char_p)]
component = Component(11, b"TEST", b"*")
libucs = ctypes.CDLL(library)  # lets go of the GIL
def dispatch(level, text):
    libucs.ucs_log_dispatch(b"/some/file.c", 7, b"f", level, ctypes.byref(component), b"%s", text.encode())
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record)
logging.getLogger().addHandler(Keep())
"""


def run(
    code: str, *arguments: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_LOG")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env={**env, **environment},
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=60,
        check=False,
    )


def check(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, (result.stdout, result.stderr)


def test_lines_go_to_the_logger_and_the_environment_stays() -> None:
    result = run(PROGRAM, "patient", UCX_LOG_LEVEL="info", UCX_UNHEARD_OF="1")
    check(result)
    begin, report = result.stdout.splitlines()
    assert begin == "begin"
    said = json.loads(report)
    assert said["same"], "the environment was changed"
    assert said["at_once"], "an error is logged before its exception is raised"
    assert {name for _, name, _ in said["records"]} == {"trio_ucx.ucx"}
    found = {level: text for level, _, text in said["records"]}
    assert "Address already in use" in found["ERROR"]
    assert "UCX_UNHEARD_OF" in found["WARNING"]
    assert "INFO" in found
    assert result.stderr == ""


def test_without_logging_set_up_lines_go_to_stderr() -> None:
    result = run(PROGRAM, "unconfigured", UCX_LOG_LEVEL="info", UCX_UNHEARD_OF="1")
    check(result)
    assert len(result.stdout.splitlines()) == 2
    for text in ("UCX ERROR", "Address already in use", "UCX WARN", "UCX_UNHEARD_OF", "UCX INFO"):
        assert text in result.stderr


def test_only_warnings_by_default() -> None:
    result = run(PROGRAM, UCX_UNHEARD_OF="1")
    check(result)
    assert '"WARNING"' in result.stdout and '"INFO"' not in result.stdout


def test_a_full_pipe_on_stdout_blocks_nothing() -> None:
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writer, bytes(4096))
        code = PROGRAM.replace('print("begin", flush=True)', "").replace("print(json", "sys.stderr.write(json")
        result = run(code, stdout=writer, UCX_LOG_LEVEL="info")
        check(result)
        assert "Address already in use" in result.stderr
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    "handlers", ["", "logging.basicConfig(level=1)", "logging.basicConfig(level=1, filename=FILE)"]
)
def test_a_full_pipe_on_stderr_blocks_nothing(handlers: str, tmp_path: Path) -> None:
    code = """
import logging, os, select, trio, trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import open_connection_pair
HANDLERS
poll = select.poll()
poll.register(2, select.POLLOUT)
while poll.poll(0):
    os.write(2, bytes(4096))
async def main():
    async with open_connection_pair() as (one, other):
        await one.send(b"x")
        await other.receive()
trio.run(main)
""".replace("HANDLERS", handlers.replace("FILE", repr(str(tmp_path / "log"))))
    reader, writer = os.pipe()
    try:
        result = run(code, stderr=writer, UCX_LOG_LEVEL="debug", UCX_TLS="tcp")
        check(result)
    finally:
        os.close(reader)
        os.close(writer)
    if "filename" in handlers:
        assert "tag(tcp/" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("target", ["file", "stdout", "stderr"])
def test_what_the_user_chose_holds(target: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    result = run(PROGRAM, UCX_LOG_LEVEL="info", UCX_LOG_FILE=str(file) if target == "file" else target)
    check(result)
    assert '"records": []' in result.stdout and '"same": true' in result.stdout
    written = {"file": file.read_text() if file.exists() else "", "stdout": result.stdout, "stderr": result.stderr}
    assert {name for name, text in written.items() if "bind(" in text} == {target}


def test_protocol_information_is_logged() -> None:
    code = """
import trio
from trio_ucx.testing import open_connection_pair
async def main():
    async with open_connection_pair() as (one, other):
        await one.send(b"x")
        await other.receive()
trio.run(main)
"""
    result = run(code, UCX_PROTO_INFO="y", UCX_TLS="tcp")
    check(result)
    assert result.stdout == ""
    assert "tag" in result.stderr
    result = run(
        "import logging; logging.basicConfig(filename='/dev/stdout')" + code, UCX_PROTO_INFO="y", UCX_TLS="tcp"
    )
    check(result)
    assert "INFO:trio_ucx.ucx:table:1 +---" in result.stdout
    assert result.stderr == ""


def test_levels() -> None:
    code = (
        DISPATCH
        + """
with ucp.open_context({"TLS": "tcp"}):
    for level in (1, 2, 3, 4, 5, 6, 10, 13):
        dispatch(level, f"level {level}")
    thread = threading.Thread(target=dispatch, args=(1, "foreign"))
    thread.start(); thread.join()
for record in records:
    print(record.levelname, record.getMessage(), record.pathname, record.lineno, record.funcName)
"""
    )
    result = run(code, UCX_LOG_LEVEL="trace")
    check(result)
    ours = [line for line in result.stdout.splitlines() if "/some/file.c" in line]
    levels = ["ERROR", "WARNING", "INFO", "INFO", "DEBUG", "DEBUG", "DEBUG", "INFO", "ERROR"]
    texts = [f"level {level}" for level in (1, 2, 3, 4, 5, 6, 10, 13)] + ["foreign"]
    assert ours == [f"{level} file.c:7 {text} /some/file.c 7 f" for level, text in zip(levels, texts, strict=True)], (
        result.stderr
    )


@pytest.mark.parametrize(
    ("file", "text", "level"),
    [
        (b"/b/src/uct/tcp/tcp_ep.c", b"tcp_ep 0x55d (state=CLOSED): recv(-1) failed: Input/output error", "DEBUG"),
        (b"/b/src/uct/tcp/tcp_ep.c", b"tcp_ep 0x55d (state=CONNECTED): recv(12) failed: Input/output error", "ERROR"),
        (b"/b/src/uct/tcp/tcp_iface.c", b"tcp_ep 0x55d (state=CLOSED): recv(-1) failed: Input/output error", "ERROR"),
        (b"/b/src/uct/tcp/tcp_ep.c", b"a peer: tcp_ep 0x55d (state=CLOSED): recv(-1) failed: x", "ERROR"),
        (b"/b/src/uct/tcp/tcp_cm.c", b"tcp_ep 0x55d: connection establishment for socket fd 24 was x", "DEBUG"),
        (b"/b/src/uct/tcp/tcp_cm.c", b"tcp_ep 0x55d: connection establishment went wrong", "ERROR"),
        (
            b"/b/src/ucs/datastruct/mpool.c",
            b"object 0x5 {{cb|rcv_tag} recv length 65536 host memory} was not returned to mpool ucp_requests",
            "DEBUG",
        ),
        (b"/b/src/ucs/sys/sock.c", b"connect(fd=24, dest_addr=[::1]:24) failed: Operation canceled", "DEBUG"),
        (b"/b/src/ucs/sys/sock.c", b"connect(fd=24, dest_addr=10.0.0.5:24) failed: Permission denied", "ERROR"),
        (b"/b/src/ucp/tag/tag_match.c", b"unexpected tag-receive descriptor 0x5 was not matched", "DEBUG"),
        (b"/b/src/uct/sm/mm/sysv/mm_sysv.c", b"shmat(shmid=327548972) failed: Invalid argument", "DEBUG"),
        (b"/b/src/uct/sm/mm/sysv/mm_sysv.c", b"shmat(shmid=327548972) failed: Cannot allocate memory", "ERROR"),
        (
            b"/b/src/uct/sm/mm/posix/mm_posix.c",
            b"open(file_name=/proc/2/fd/3 flags=0x0) failed: Too many",
            "ERROR",
        ),
        (b"/b/src/ucs/datastruct/mpool.c", b"object 0x5 was not returned to mpool ucp_requests", "ERROR"),
        (b"/b/src/ucp/core/ucp_worker.c", b"invalid configurations: RNDV_THRESH=65k,RESOLVE_REMOTE_EP_ID=y", "DEBUG"),
        (b"/b/src/ucp/core/ucp_worker.c", b"invalid configurations: RNDV_THRESH=65k,TCP_TX_SEGSIZE=64k", "ERROR"),
    ],
)
def test_harmless_lines_are_for_debugging(
    file: bytes, text: bytes, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [ffi.new("char[]", each) for each in (file, b"function", text)]
    line = ffi.new("tu_log_line_t *", {"level": 1, "number": 7, "file": kept[0], "function": kept[1], "text": kept[2]})
    caplog.set_level("DEBUG", logger="trio_ucx.ucx")
    ucx_log._log(line, 0)
    assert [record.levelname for record in caplog.records] == [level]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What UCX has said above DEBUG. (All contexts are closed.)"""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "trio_ucx.ucx" and record.levelname != "DEBUG"
    ]


@pytest.mark.parametrize("transport", ["sysv", "posix"])
async def test_memory_that_was_closed_is_no_news(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    async with open_endpoint_and_context(f"{transport},self", "worker") as (endpoint, context):
        memory = context.allocate(100)
        remote = endpoint.attach(memory.descriptor)
        await remote.flush()
        memory.close()
        with remote:
            with pytest.raises(trio_ucx.UCXError, match="refused"):
                remote.map()
            with pytest.raises(trio_ucx.UCXError, match="refused"):
                await remote.get()
    assert logged(caplog) == []


async def test_a_process_that_ends_while_ucx_connects_to_it_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    config = {"TLS": "sysv,self"}
    async with ucp.open_worker(config=config) as worker:
        async with ucp.open_worker(config=config) as other:
            address = other.address
        with pytest.raises(OSError, match="its shared memory is not there"):
            await worker.open_endpoint(address)
    assert logged(caplog) == []


def test_lines_without_a_reader_and_from_a_forked_child_go_to_stderr() -> None:
    code = (
        DISPATCH
        + """
import os
dispatch(2, "before")
with ucp.open_context({"TLS": "tcp"}):
    if (child := os.fork()) == 0:
        dispatch(1, "in the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert threading.active_count() == 1
dispatch(2, "after")
assert not records, records
"""
    )
    result = run(code)
    check(result)
    assert result.stderr.splitlines() == [
        "file.c:7 UCX WARN before",
        "file.c:7 UCX ERROR in the child",
        "file.c:7 UCX WARN after",
    ]
    assert result.stdout == ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "KeyboardInterrupt"])
def test_a_handler_that_blocks_or_raises_does_not_stop_ucx(error: str) -> None:
    code = (
        DISPATCH
        + """
go_on = threading.Event()
class Blocks(logging.Handler):
    def emit(self, record):
        go_on.wait(30)
        if "raise" in record.getMessage():
            raise ERROR
logging.getLogger().addHandler(Blocks())
with ucp.open_context({"TLS": "tcp"}):
    began = time.monotonic()
    for number in range(300):
        dispatch(1, f"error {number}")
    dispatch(2, "raise")
    for number in range(30_000):
        dispatch(2, "x" * 900)
    took = time.monotonic() - began
    assert took < 10, took
    go_on.set()
for thread in threading.enumerate():  # on a slow machine it is not finished with the context's end
    if thread.name == "trio_ucx log of UCX":
        thread.join(50)
texts = [record.getMessage() for record in records]
assert [text for text in texts if "error" in text] == [f"file.c:7 error {number}" for number in range(300)]
lost = [int(text.split()[0]) for text in texts if "are lost" in text]
assert sum(lost) > 0 and sum(lost) + sum("xxx" in text for text in texts) == 30_000, lost
"""
    )
    result = run(code.replace("ERROR", error))
    check(result)
    assert "UCX WARN raise" in result.stderr


def test_nothing_is_lost_when_ucx_ends_the_process() -> None:
    result = run(PROGRAM, "unconfigured", UCX_LOG_LEVEL_TRIGGER="error", UCX_UNHEARD_OF="1")
    assert result.returncode == -signal.SIGABRT
    assert result.stdout == "begin\n"
    assert "UCX_UNHEARD_OF" in result.stderr and "Address already in use" in result.stderr


def test_the_thread_ends_with_the_last_context() -> None:
    """In a process of its own: another test's context may be waiting here for its peers."""
    check(
        run(
            """
import threading
from trio_ucx import ucp
def running():
    return [thread.name for thread in threading.enumerate()].count("trio_ucx log of UCX")
with ucp.open_context({"TLS": "tcp"}), ucp.open_context({"TLS": "tcp"}):
    assert running() == 1
assert running() == 0
"""
        )
    )
