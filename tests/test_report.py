"""The report names what waits, and why: eleven programs that hang in eleven ways."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import hanging_programs
import pytest
import trio
from helpers import Peer, open_listener, open_pair, open_peer, open_raw_pair, until
from networks import QUIET, as_user, need, open_network, unshare

import trio_ucx
from trio_ucx import ucp
from trio_ucx._cli.errors import NoReport
from trio_ucx._cli.report import _open_memfd, ask
from trio_ucx._report.reporting import mark_of
from trio_ucx.testing import internals
from trio_ucx.ucp._engine.engine import Engine

open_program = partial(open_peer, program=hanging_programs.HERE)


async def report_of(peer: Peer, kind: str = "text", timeout: float = 10) -> str:
    """What the command line prints for another process."""
    return await trio.to_thread.run_sync(ask, peer.process.pid, signal.SIGUSR1, kind, timeout)


async def reported(peer: Peer, *words: str, within: float = 20) -> str:
    """Waits until the report of a process has lines with a likely cause, or a fact, that have these words."""
    report = ""
    with trio.move_on_after(within):
        while True:
            report = await report_of(peer)
            if any(all(word in line for word in words) for line in report.splitlines()):
                return report
            await trio.sleep(0.05)
    pytest.fail(f"no line has {words}:\n{report}")


# ---- eleven programs that hang ----


async def test_no_credit(transports: str) -> None:
    async with open_peer("silent", 2**16, transports=transports) as peer:
        address, _ = await peer.hear()
        async with open_program("without_credit", address, transports=transports) as program:
            assert await program.hear() == "connected"
            await reported(program, "=> 1 send (1000 bytes) on tag 7 wait", "the peer must receive")
            await reported(program, "waits for credit", "in Connection.send, at", "(without_credit.<locals>.fill)")


async def test_nobody_reads_a_tag(over: str) -> None:
    async with open_program("unread_tag", transports=over) as program:
        async with trio_ucx.connect(tuple(await program.hear()), close_timeout=0.1) as client:
            await client.send(b"go on", tag=1)
            assert await program.hear() == "go on"

            async def send_on() -> None:
                while True:
                    await client.send(bytes(10_000), tag=7)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_on)
                await reported(program, "=> no task receives", "on tag 7; the peer has more to send")
                await reported(program, "tag 7: messages that nobody has received: ")
                nursery.cancel_scope.cancel()
            client.abort()


async def test_both_send_large_messages_first(over: str) -> None:
    async with open_program("large_both_ways", transports=over) as program:
        address = tuple(await program.hear())
        async with trio_ucx.connect(address) as client, trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.send, bytes(2**21), tag=4))
            await reported(program, "=> both sides send large messages, on tag 3 here and tag 4 there", "a deadlock")
            await until(lambda: "a deadlock" in trio_ucx.report())
            assert len(await client.receive(tag=3)) == 2**21
            assert await program.hear() == 2**21


async def test_a_stopped_peer(transports: str) -> None:
    async with open_peer("silent", transports=transports) as peer:
        address, _ = await peer.hear()
        async with open_program("waits_for_answer", address, transports=transports) as program:
            assert await program.hear() == "connected"
            await peer.stop()
            await reported(program, f"=> the peer's process {peer.process.pid} is stopped (state T")
            peer.resume()


async def test_a_firewall() -> None:
    need("iptables", "-w", "-L", why="rules for packets")
    with open_network() as network:
        here, there = network.host(), network.host()
        network.cable((here, "cable", "10.201.1.1/24"), (there, "cable", "10.201.1.2/24"))
        await network.ready()
        async with open_peer("silent", 2**20, "10.201.1.2", under=there.under, **QUIET) as peer:
            address, _ = await peer.hear()
            async with open_program("asks_when_told", address, under=here.under, **QUIET) as program:
                assert await program.hear() == "connected"
                there.run("iptables", "-w", "-A", "INPUT", "-i", "cable", "-j", "DROP")
                await program.tell()
                await reported(program, "=> the peer's host 10.201.1.2 does not answer", "firewall")
                there.run("iptables", "-w", "-F")


async def test_a_receive_on_the_wrong_tag(over: str) -> None:
    async with open_program("wrong_tag", transports=over) as program:
        async with trio_ucx.connect(tuple(await program.hear())) as client:
            for _ in range(3):
                await client.send(b"message", tag=5)
            await reported(program, "=> no task receives 3 messages on tag 5, while a task waits on tag 6")
            await reported(program, "tag 5: messages that nobody has received: 3 (21 bytes)")
            await reported(program, "has waited for", "in Connection.receive, at", "(wrong_tag.<locals>.handler)")


async def test_a_forgotten_aclose(over: str) -> None:
    async with (
        open_listener() as listener,
        open_program("forgotten_aclose", listener.address, transports=over) as program,
    ):
        server = await listener.accept()
        assert await program.hear() == "sent"
        assert await server.receive() == b"all there is"
        await reported(program, "no task uses it, and it was not closed", "needs an aclose()")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.receive)
            await until(lambda: ": empty; the peer may still send" in trio_ucx.report())
            nursery.cancel_scope.cancel()
        server.abort()


async def test_a_handler_that_never_returns(over: str) -> None:
    async with open_program("endless_handler", transports=over) as program:
        async with trio_ucx.connect(tuple(await program.hear())) as client:
            await client.send(b"message")
        assert await program.hear() == "the client has closed"
        await reported(program, "=> the peer ended the connection", "handler still runs", "hanging_programs.py:")


async def test_a_call_that_is_not_answered(over: str) -> None:
    async with open_program("call_without_answer", transports=over) as program:
        async with trio_ucx.connect(tuple(await program.hear())) as client, client.open_conversation() as call:
            await call.send(b"a question")
            assert await program.hear() == "a question"
            words = "=> the peer may wait for an answer on conversation 0", ".answer' waits for something else"
            report = await reported(program, *words)
            assert lines(report, "conversation 0 (opened by the peer): used by", "hanging_programs.py:", "answer)")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call.receive)
                await trio.testing.wait_all_tasks_blocked()
                assert not lines(trio_ucx.report(), "used by task") and not lines(trio_ucx.report(), "answer on")
                nursery.cancel_scope.cancel()


async def test_a_blocked_loop() -> None:
    async with open_program("blocked_loop") as program:
        assert await program.hear() == "ready"
        lines = hanging_programs.HERE.read_text().splitlines()
        [number] = [number for number, line in enumerate(lines, 1) if "os.read(0, 1)" in line]
        await reported(
            program, "=> Trio's loop has been blocked for", f"hanging_programs.py:{number} ", "(blocked_loop)"
        )


@pytest.mark.cut_off
async def test_a_stopped_queue() -> None:
    options = {"TLS": "tcp,sysv,self"}
    async with (
        open_program("stopped_queue", options) as program,
        open_peer("dying_raw_peer", "sysv", transports=options["TLS"]) as bad,
    ):
        address, theirs = await program.hear(), await bad.hear()
        await bad.tell(address)
        await program.tell(theirs)
        assert await program.hear() == "waits"
        await bad.tell()
        await reported(program, "=> the worker's shared-memory queue has stopped", "killed")
        await reported(program, "receiving a message", "in Worker.tag_receive")


# ---- what else a report says ----


def lines(report: str, *words: str) -> list[str]:
    return [line for line in report.splitlines() if all(word in line for word in words)]


async def test_operations_of_ucp(worker: ucp.Worker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.tag_receive, bytearray(5), 99)
        await trio.testing.wait_all_tasks_blocked(0.01)
        [line] = lines(trio_ucx.report(), "receiving a message")
        assert "recv length 5" in line, "UCX's own words"
        assert "in Worker.tag_receive" in line
        nursery.cancel_scope.cancel()


async def test_active_messages_and_streams() -> None:
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    async with ucp.open_worker(features=features) as worker, open_raw_pair(worker) as (client, server):
        with worker.open_active_messages(4) as messages:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(messages.receive)
                nursery.start_soon(server.stream_receive_some)
                await until(lambda: lines(trio_ucx.report(), "has waited for", "in ActiveMessages.receive"))
                await until(lambda: lines(trio_ucx.report(), "the stream: task", "in Endpoint.stream_receive_some"))
                assert lines(trio_ucx.report(), "active messages with id 4")
                assert not lines(trio_ucx.report(), "just now")
                nursery.cancel_scope.cancel()
        client.abort()


async def test_close_in_the_background(worker: ucp.Worker) -> None:
    async with open_pair(worker, close_timeout=5) as (client, server):
        client.send_nowait(bytes(2**20), tag=3)
        with trio.move_on_after(0.05):
            await client.aclose()
        assert lines(trio_ucx.report(), "worker ", "closes in the background: 1")
        words = "task 'trio_ucx closing ", "has waited for", "in Closing.close_gracefully"
        await until(lambda: lines(trio_ucx.report(), *words))
        assert lines(trio_ucx.report(), "connection to", "closing", "close_timeout 5 s")
        await until(lambda: lines(trio_ucx.report(), "connection to", "which the peer is closing"))
        assert await server.receive(tag=3) == bytes(2**20)
        await server.aclose()
        await client.wait_closed()


async def test_cancelled_send(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        with trio.move_on_after(0.05):
            await client.send(bytes(2**20), tag=7)
        assert lines(trio_ucx.report(), "sending 1048576 bytes on tag 7", "no task waits for it")
        await server.receive(tag=7)


async def test_both_directions_of_a_conversation_have_one_name(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, _), client.open_conversation() as talk:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk.send, bytes(2**20))
            nursery.start_soon(talk.receive)
            await trio.testing.wait_all_tasks_blocked()
            assert lines(trio_ucx.report(), "sending 1048576 bytes on conversation 0 (opened here)")
            assert lines(trio_ucx.report(), "conversation 0 (opened here): ")
            assert lines(
                trio_ucx.report(), "=> the peer has not received 1 large message on conversation 0 (opened here)"
            )
            assert not lines(trio_ucx.report(), "sending", "opened by the peer")
            await until(lambda: lines(trio_ucx.report(), "=> no task accepts 1 conversation of the peer's"))
            assert lines(trio_ucx.report(), "=> no task receives 1 message on conversation 0 (opened by the peer)")
            nursery.cancel_scope.cancel()


async def test_connection_that_the_peer_has_closed(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        await client.aclose()
        await server.wait_closed()
        assert "closed by the peer" in repr(server)
        assert lines(trio_ucx.report(), "connection to", "closed by the peer")
        assert not lines(trio_ucx.report(), "it broke")


async def test_json(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server), trio.open_nursery() as nursery:
        await client.send(b"one", tag=5)
        nursery.start_soon(partial(server.receive, tag=6))
        await trio.testing.wait_all_tasks_blocked(0.01)
        found = json.loads(trio_ucx.report(json=True))
        assert found["pid"] == os.getpid()
        [mine] = [item for item in found["items"] if item["text"].startswith("worker ")]
        assert mine["state"] in ("LED", "SERVED") and mine["transports"] == worker.context._transports
        tags = {tag["tag"]: tag for item in mine["items"] for tag in item["items"] if "tag" in tag}
        assert (tags[5]["messages"], tags[5]["bytes"], tags[6]["messages"]) == (1, 3, 0)
        [receive] = tags[6]["items"]
        assert receive["call"] == "Connection.receive" and 0 < receive["seconds"] < 60
        nursery.cancel_scope.cancel()


async def test_connecting_and_listening(worker: ucp.Worker) -> None:
    with trio.socket.socket() as deaf:
        await deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        async with open_listener(worker) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio_ucx.open_ucx_stream, *deaf.getsockname(), worker=worker))
            async with trio_ucx.connect(listener.address, worker=worker) as client:
                await until(lambda: lines(trio_ucx.report(), "=>", "it did not answer; is it a trio_ucx listener"))
                await until(lambda: lines(trio_ucx.report(), "=> no task accepts 1 connection"))
                client.abort()
            nursery.cancel_scope.cancel()


async def test_while_a_call_of_the_library_is_interrupted(worker: ucp.Worker, monkeypatch: Any) -> None:
    """A signal can come between any two of its steps: then UCX is not asked."""
    found = []
    submit = Engine.submit

    def interrupted(engine: Engine) -> None:
        found.append(trio_ucx.report())
        submit(engine)

    monkeypatch.setattr(Engine, "submit", interrupted)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.tag_receive, bytearray(5), 99)
        await until(lambda: found)
        nursery.cancel_scope.cancel()
    assert "UCX's words" in found[0]


async def test_a_part_that_cannot_be_read(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair(worker) as (client, _):
        monkeypatch.setattr(type(internals(client).native), "queues", None)
        report = trio_ucx.report()
        assert lines(report, "a tag: ", "cannot be read just now") or lines(report, "a connection: it cannot be read")
        monkeypatch.undo()
        assert not lines(trio_ucx.report(), "cannot be read")


async def test_worker_of_another_thread(worker: ucp.Worker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.tag_receive, bytearray(5), 99)
        await trio.testing.wait_all_tasks_blocked(0.01)
        report = await trio.to_thread.run_sync(trio_ucx.report)
        [line] = lines(report, "receiving a message")
        assert "recv length" not in line and "in Worker.tag_receive" in line
        nursery.cancel_scope.cancel()


def test_without_workers() -> None:
    assert "no worker is open" in trio_ucx.report()


# ---- by signal ----


def test_report_on_signal(tmp_path: Path) -> None:
    """Also again, and for another file. Without ``faulthandler``, which can crash CPython 3.12 and 3.13 then."""
    program = (
        "import faulthandler, os, signal, sys, trio_ucx\n"
        "for name in sys.argv[1:]:\n"
        "    trio_ucx.report_on_signal(signal.SIGUSR2, open(name, 'w'))\n"
        "    os.kill(os.getpid(), signal.SIGUSR2)\n"
        "assert not faulthandler.unregister(signal.SIGUSR2)\n"
    )
    files = [tmp_path / "one", tmp_path / "two"]
    subprocess.run([sys.executable, "-c", program, *files], check=True, timeout=60)
    for file in files:
        assert file.read_text().count("trio_ucx report of process") == 1


def test_report_on_signal_that_fails() -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            trio_ucx.report_on_signal()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)
    assert "main thread" in str(caught[0])
    with open(os.devnull, "w") as nowhere, pytest.raises(OSError):
        trio_ucx.report_on_signal(signal.SIGKILL, nowhere)


def with_report_variable(value: str, program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with TRIO_UCX_REPORT in its environment."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRIO_UCX_REPORT": value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["USR1", "sigusr1"])
def test_the_environment_turns_it_on(name: str) -> None:
    program = "import os, signal, trio_ucx; os.kill(os.getpid(), signal.SIGUSR1)"
    done = with_report_variable(name, program)
    assert done.returncode == 0
    assert done.stderr.startswith("trio_ucx report of process ") and "no worker is open" in done.stderr


def test_the_environment_turns_it_on_without_stderr() -> None:
    program = "import signal, trio_ucx; print(signal.getsignal(signal.SIGUSR1).__name__)"
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    done = subprocess.run(command, env={**os.environ, "TRIO_UCX_REPORT": "USR1"}, stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0 and done.stdout == b"_answer\n"


@pytest.mark.parametrize(
    ("name", "program", "status", "says"),
    [
        ("nonsense", "import trio_ucx", 1, "TRIO_UCX_REPORT=nonsense in the environment is not the name of a signal"),
        ("KILL", "import trio_ucx", 0, "TRIO_UCX_REPORT=KILL has no effect"),
        (
            "USR1",
            "import threading; t = threading.Thread(target=lambda: __import__('trio_ucx')); t.start(); t.join()",
            0,
            "TRIO_UCX_REPORT=USR1 has no effect: report_on_signal works only in the main thread",
        ),
        ("", "import trio_ucx", 0, ""),
    ],
)
def test_the_environment_cannot_turn_it_on(name: str, program: str, status: int, says: str) -> None:
    done = with_report_variable(name, program)
    assert done.returncode == status and says in done.stderr and bool(says) == bool(done.stderr)


def report_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trio_ucx", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_command_line() -> None:
    async with open_program("blocked_loop") as program:
        assert await program.hear() == "ready"
        command = partial(trio.to_thread.run_sync, report_command, program.process.pid)
        done = await trio.to_thread.run_sync(report_command, program.process.pid)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"trio_ucx report of process {program.process.pid} ")
        done = await command("--json")
        assert json.loads(done.stdout)["pid"] == program.process.pid
        done = await command("--signal", "SIGUSR2")
        assert done.returncode == 1 and "has not called trio_ucx.report_on_signal(signal.SIGUSR2)" in done.stderr
        await program.stop()
        with pytest.raises(NoReport, match="has not answered within 0.2 seconds: it is stopped"):
            await report_of(program, timeout=0.2)
        program.resume()
        assert "report of process" in await report_of(program), (
            "the late answer to the earlier signal is in no one's way"
        )


async def test_command_line_without_a_process() -> None:
    async with open_peer("silent") as peer:
        await peer.hear()
        with pytest.raises(NoReport, match="has not called trio_ucx.report_on_signal"):
            await report_of(peer)
        assert peer.process.poll() is None
    with pytest.raises(NoReport, match="there is no process"):
        await report_of(peer)
    for pid in (0, -1):
        with pytest.raises(NoReport, match="is not the number of a process"):
            ask(pid, signal.SIGUSR1)


def test_process_with_another_handler() -> None:
    """An interactive shell, say, handles the signal, and ends."""
    program = "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(3)); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        with pytest.raises(NoReport, match="has not called trio_ucx.report_on_signal"):
            ask(process.pid, signal.SIGUSR1)
        process.communicate("\n", timeout=30)
    assert process.returncode == 0


async def test_requests_that_were_killed_and_that_are_under_way() -> None:
    async with open_program("blocked_loop") as program:
        assert await program.hear() == "ready"
        memfd = _open_memfd(program.process.pid, signal.SIGUSR1)
        assert memfd is not None
        try:
            for kind in (b"text", b"busy", b"done"):  # as a killed one leaves it
                os.pwrite(memfd, kind, 0)
                assert "report of process" in await report_of(program)
            fcntl.flock(memfd, fcntl.LOCK_EX)
            with pytest.raises(NoReport, match="another request for a report of this process is under way"):
                await report_of(program, timeout=0.2)

            async def ask_too() -> None:
                assert "report of process" in await report_of(program)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_too)
                nursery.start_soon(ask_too)
                await trio.sleep(0.1)
                fcntl.flock(memfd, fcntl.LOCK_UN)
        finally:
            os.close(memfd)
        assert "report of process" in await report_of(program, "json")


def test_a_signal_without_a_request_after_a_killed_one(tmp_path: Path) -> None:
    """The report goes to the file, although an earlier request was never answered."""
    program = (
        "import os, signal, sys, trio_ucx; trio_ucx.report_on_signal(file=open(sys.argv[1], 'w'))\n"
        "from trio_ucx._report import reporting\n"
        "os.pwrite(reporting._mailboxes[signal.SIGUSR1][0], b'text', 0)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.closerange(3, 100); open(sys.argv[1] + '2', 'w'); os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "report"], check=True, timeout=60)
    assert (tmp_path / "report").read_text().startswith("trio_ucx report of process ")
    assert (tmp_path / "report2").read_text() == "", "a program that has closed all descriptors"


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.parametrize("where", ["another user", "a container", "a container of another user"])
async def test_a_process_elsewhere(where: str) -> None:
    """root asks; the process has another user, or a PID namespace, a ``/tmp`` and a ``/dev/shm`` of its own."""
    under: list[str] = []
    if "container" in where:
        mount = 'mount -t tmpfs none /dev/shm && exec "$@"'
        under += [*unshare("pid", "mount", "ipc"), "sh", "-c", mount, "sh"]
    if "user" in where:
        under += as_user(65534)
    async with open_program("blocked_loop", under=under) as program:
        assert await program.hear() == "ready"
        pid = program.process.pid
        while children(pid):
            [pid] = children(pid)
        for kind in ("text", "json"):
            report = await trio.to_thread.run_sync(ask, pid, signal.SIGUSR1, kind)
            assert "report of process" in report
    if where == "another user":
        asks = [*as_user(65533), sys.executable, "-m", "trio_ucx", "report", str(os.getpid())]
        done = subprocess.run(asks, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "belongs to another user" in done.stderr


def test_a_file_that_passes_for_a_request(tmp_path: Path) -> None:
    """A process that can only read a file does not make root write to it."""
    name = f"memfd:{mark_of(signal.SIGUSR1)} "
    program = (
        "import ctypes, os, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "os.chdir(sys.argv[1])\n"
        "assert ctypes.CDLL(None).pivot_root(b'.', b'.') == ctypes.CDLL(None).umount2(b'.', 2) == 0\n"
        "descriptor = os.open('/' + sys.argv[2], os.O_RDONLY)\n"
        "print(flush=True); input()\n"
    )
    shell = 'mount -t tmpfs none "$0" && printf precious > "$0/$1" && exec "$2" -c "$3" "$0" "$1"'
    command = [*unshare("mount"), "sh", "-c", shell, str(tmp_path), name, sys.executable, program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        held = [path for path in Path(f"/proc/{process.pid}/fd").iterdir() if os.readlink(path) == f"/{name}"]
        assert len(held) == 1
        with pytest.raises(NoReport, match="has not called trio_ucx.report_on_signal"):
            ask(process.pid, signal.SIGUSR1)
        assert held[0].read_text() == "precious"
        process.communicate(b"\n", timeout=30)
