"""``python -m trio_ucx mesh``, with programs that know nothing of meshes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from helpers import assert_gone

from trio_ucx._cli import main

TIMEOUT = 60.0


@attrs.define
class Launch:
    """A running launcher, in a process group of its own.

    Attributes:
        folder: that of its program.
        out: what it has printed so far.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    out: bytes = b""

    def go(self) -> None:
        """Lets ranks go on that are in ``wait_for_go()``."""
        (self.folder / "go").touch()

    def read_until(self, condition: Callable[[bytes], bool]) -> bytes:
        """Reads stdout until a condition of all that was read holds."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + TIMEOUT
        while not condition(self.out):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"nothing more came after {self.out!r}"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"it has ended after {self.out!r}"
            self.out += data
        return self.out

    def pids(self, count: int) -> list[int]:
        """The process ids that ranks, or what they have started, have printed as ``pid N``."""
        lines = self.read_until(lambda out: out.count(b"pid ") >= count and out.endswith(b"\n")).splitlines()
        return [int(line.partition(b"pid ")[2]) for line in lines if b"pid " in line]

    def finish(self) -> tuple[int, list[str], list[str]]:
        """Waits for its end: its status, and the lines of stdout and stderr."""
        out, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, (self.out + out).decode().splitlines(), err.decode().splitlines()


Start = Callable[..., Launch]

#: What each program begins with.
HEAD = """
import os, signal, subprocess, sys, time
rank = os.environ["TRIO_UCX_RANK"]
folder = os.path.dirname(__file__)

def wait_for_go():
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)

"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program under the launcher; the function takes the program's text and the command's options."""
    program = tmp_path / "program.py"
    started: list[Launch] = []

    def start(text: str, *options: str, arguments: tuple[str, ...] = (), **variables: str) -> Launch:
        program.write_text(HEAD + textwrap.dedent(text))
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "trio_ucx", "mesh", *options, str(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path), **variables},
            process_group=0,
        )
        started.append(Launch(process, tmp_path))
        return started[-1]

    yield start
    for launch in started:
        launch.process.kill()  # the kernel kills its ranks then
        launch.process.communicate(timeout=TIMEOUT)
    assert list(tmp_path.glob("trio_ucx-mesh-*")) == [] or any(it.process.returncode == -9 for it in started)


#: A rank that ends on no signal but SIGKILL.
STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("pid", os.getpid())
    time.sleep(1000)
"""
#: A rank with a process of its own, which runs on when the rank ends.
WITH_CHILD = """
    child = subprocess.Popen([sys.executable, "-c", "import os, time; print('pid', os.getpid()); time.sleep(1000)"])
    print("pid", os.getpid())
    wait_for_go()
    child.returncode = 0  # Python would warn
"""


# ---- what a rank gets, and its output ----


def test_ranks_get_their_place_and_arguments(start: Start) -> None:
    text = """
        from trio_ucx.mesh._place import find_place
        place = find_place(os.environ)
        folder = place.meeting.path.parent
        print(place.rank, place.size, len(place.authkey), folder.stat().st_mode & 0o777 == 0o700, sys.argv[1:])
        print(place.meeting.path.exists(), place.authkey.hex(), file=sys.stderr)
    """
    status, out, err = start(text, "--ranks", "3", arguments=("--ranks", "9", "a b")).finish()
    assert status == 0
    assert sorted(out) == [f"[{rank}] {rank} 3 64 True ['--ranks', '9', 'a b']" for rank in range(3)]
    assert {line[:9] for line in err} == {f"[{rank}] False" for rank in range(3)}
    assert len({line[4:] for line in err}) == 1  # the same key
    assert start(text, "--ranks", "1").finish()[2][0][4:] != err[0][4:]  # another key


def test_lines_stay_whole(start: Start) -> None:
    text = """
        for number in range(300):
            for piece in (f"{rank}-{number} ", "x" * 500, "\\n"):
                os.write(1, piece.encode())
        os.write(1, b"the end, without a newline")
    """
    status, out, err = start(text, "--ranks", "3").finish()
    assert (status, err) == (0, [])
    for rank in range(3):
        mine = [line for line in out if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {rank}-{number} {'x' * 500}" for number in range(300)]
        assert mine == [*expected, f"[{rank}] the end, without a newline"]
    assert len(out) == 903


def test_output_comes_at_once_and_a_slow_reader_gets_all(start: Start) -> None:
    launch = start("print('begun')\nwait_for_go()\nfor i in range(20000): print('x' * 100)", "--ranks", "1")
    assert launch.read_until(lambda out: out.endswith(b"\n")) == b"[0] begun\n"
    launch.go()
    time.sleep(2.5)  # longer than it waits for a rank that says nothing more
    assert len(launch.finish()[1]) == 20001


def test_a_very_long_line_is_split(start: Start) -> None:
    status, out, err = start("os.write(1, b'x' * 2_500_000)", "--ranks", "1").finish()
    assert (status, err) == (0, []) and 2 <= len(out) <= 4
    assert sum(len(line) - len("[0] ") for line in out) == 2_500_000


def test_64_ranks(start: Start) -> None:
    status, out, err = start("print(os.environ['TRIO_UCX_SIZE'])", "--ranks", "64").finish()
    assert (status, err) == (0, [])
    assert sorted(out) == sorted(f"[{rank}] 64" for rank in range(64))


def test_the_default_is_a_rank_for_each_cpu(start: Start) -> None:
    status, out, _ = start("print()").finish()
    assert status == 0 and len(out) == len(os.sched_getaffinity(0))


# ---- failures ----


def test_the_status_is_that_of_the_first_failure(start: Start) -> None:
    text = """
        if rank == "1":
            with open(f"{folder}/new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{folder}/new", f"{folder}/pid")
            sys.exit(7)
        while not os.path.exists(f"{folder}/pid"):
            time.sleep(0.01)
        while os.path.exists(f"/proc/{open(f'{folder}/pid').read()}"):  # until the launcher has seen its end
            time.sleep(0.01)
        sys.exit(3 if rank == "2" else 0)
    """
    status, _, err = start(text, "--ranks", "4").finish()
    assert status == 7
    assert err[-1].startswith("python -m trio_ucx mesh: rank 1 (pid ") and err[-1].endswith(") ended with status 7")


def test_a_rank_that_is_killed(start: Start) -> None:
    text = """
        print("pid", os.getpid())
        wait_for_go()
        if rank == "2":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1000)
    """
    launch = start(text, "--ranks", "3", "--grace", "0.2")
    pids = launch.pids(3)
    launch.go()
    status, _, err = launch.finish()
    assert status == 128 + signal.SIGSEGV and err[-1].endswith("was ended by SIGSEGV")
    assert_gone(pids)


def test_others_get_time_then_sigterm_then_sigkill(start: Start) -> None:
    text = """
        def end(number, frame):
            print("SIGTERM after", time.monotonic() - begun)
            if rank == "1":
                sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        begun = time.monotonic()
        print("pid", os.getpid())
        wait_for_go()
        if rank == "0":
            sys.exit(1)
        while True:
            time.sleep(1000)
    """
    launch = start(text, "--ranks", "3", "--grace", "1.5")
    pids = launch.pids(3)
    launch.go()
    begun = time.monotonic()
    status, out, err = launch.finish()
    assert status == 1 and "rank 0 " in err[-1]
    assert 5 < time.monotonic() - begun < 30
    waited = {line[:3]: float(line.split()[-1]) for line in out if "SIGTERM" in line}
    assert waited.keys() == {"[1]", "[2]"} and all(1.5 < seconds < 15 for seconds in waited.values())
    assert_gone(pids)


def test_what_a_rank_has_started_ends_with_it(start: Start) -> None:
    launch = start(WITH_CHILD, "--ranks", "2")
    pids = launch.pids(4)
    launch.go()
    assert launch.finish()[0] == 0
    assert_gone(pids)


def test_a_process_that_has_left_the_group_does_not_hold_the_launcher_up(start: Start) -> None:
    text = """
        sleeper = "import os, time; os.setsid(); print('pid', os.getpid()); time.sleep(20)"
        child = subprocess.Popen([sys.executable, "-u", "-c", sleeper])
        wait_for_go()
    """
    launch = start(text, "--ranks", "1")
    pids = launch.pids(1)
    launch.go()
    begun = time.monotonic()
    try:
        assert launch.finish()[0] == 0
        assert time.monotonic() - begun < 18
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signals_are_passed_on(start: Start, number: signal.Signals) -> None:
    launch = start(WITH_CHILD, "--ranks", "2")
    pids = launch.pids(4)
    launch.process.send_signal(number)
    status, _, err = launch.finish()
    assert status == 128 + number and err[-1].endswith(f"was ended by {number.name}")
    assert_gone(pids)


def test_ranks_that_end_in_order_after_a_signal(start: Start) -> None:
    text = """
        signal.signal(signal.SIGTERM, lambda *_: (print("draining"), sys.exit(0)))
        print("pid", os.getpid())
        time.sleep(1000)
    """
    launch = start(text, "--ranks", "2")
    launch.pids(2)
    launch.process.send_signal(signal.SIGTERM)
    status, out, err = launch.finish()
    assert (status, err) == (0, []) and sorted(out)[::2] == ["[0] draining", "[1] draining"]


def test_a_second_signal_kills(start: Start) -> None:
    launch = start(STUBBORN.replace("signal.SIG_IGN", "lambda *_: print('not yet')"), "--ranks", "2")
    pids = launch.pids(2)
    launch.process.send_signal(signal.SIGINT)
    launch.read_until(lambda out: out.count(b"not yet") == 2)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish()[0] == 128 + signal.SIGTERM
    assert_gone(pids)


def test_ranks_that_ignore_signals_are_killed_in_the_end(start: Start) -> None:
    launch = start(STUBBORN, "--ranks", "2", "--grace", "0.1")
    pids = launch.pids(2)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish()[0] == 128 + signal.SIGKILL
    assert_gone(pids)


def test_no_rank_is_left_when_the_launcher_is_killed(start: Start) -> None:
    launch = start(STUBBORN, "--ranks", "3")
    pids = launch.pids(3)
    launch.process.kill()
    assert_gone(pids)


def test_no_rank_is_left_when_nobody_reads(start: Start) -> None:
    launch = start("print('pid', os.getpid())\nwhile True: print('more'); time.sleep(0.01)", "--ranks", "2")
    pids = launch.pids(2)
    assert launch.process.stdout is not None
    launch.process.stdout.close()
    assert launch.process.wait(timeout=TIMEOUT) == 1
    assert_gone(pids)


def test_signals_end_it_although_nobody_reads(start: Start) -> None:
    launch = start("print('pid', os.getpid())\nwhile True: print('more' * 1000)", "--ranks", "2")
    pids = launch.pids(2)
    time.sleep(0.5)  # the pipes fill
    launch.process.send_signal(signal.SIGTERM)
    assert_gone(pids)
    launch.process.send_signal(signal.SIGTERM)  # it has output that it cannot write
    assert launch.process.wait(timeout=TIMEOUT) == 128 + signal.SIGTERM


# ---- restarts, and modules ----

#: Each rank counts how often it was started. Rank 0 waits for the others.
COUNTED = """
    with open(f"{folder}/{rank}", "a") as file:
        file.write("x")
    times = os.stat(f"{folder}/{rank}").st_size
    print("start", times)
    if rank == "0":
        wait_for_go()
"""


def test_a_rank_that_fails_is_started_again(start: Start) -> None:
    text = """
        if times < 3:
            os.kill(os.getpid(), signal.SIGKILL) if times == 1 else sys.exit(3)
        print(os.environ["TRIO_UCX_MEETING"])
    """
    program = COUNTED + "    if rank == '1':" + textwrap.indent(text, "    ")
    launch = start(program, "--ranks", "3", "--restart", "2")
    launch.read_until(lambda out: b"[1] start 3" in out)
    launch.go()
    status, out, err = launch.finish()
    assert status == 0
    assert sorted(line for line in out if "start" in line) == [
        "[0] start 1", "[1] start 1", "[1] start 2", "[1] start 3", "[2] start 1"
    ]  # fmt: skip
    assert [line.partition(") ")[2] for line in err] == [
        "was ended by SIGKILL; restart 1 of 2",
        "ended with status 3; restart 2 of 2",
    ]


def test_restarts_are_counted_for_all_ranks(start: Start) -> None:
    """The one after the last ends all, with its status."""
    text = """
        if rank != '0' and times == 1:
            sys.exit(5)
        if rank == '1':
            while not os.path.exists(f"{folder}/2") or os.stat(f"{folder}/2").st_size < 2:
                time.sleep(0.01)  # rank 2 took the last restart
            sys.exit(6)
    """
    program = COUNTED + textwrap.indent(textwrap.dedent(text), "    ")
    launch = start(program, "--ranks", "3", "--restart", "2", "--grace", "0.1")
    status, out, err = launch.finish()
    assert status == 6 and err[-1].startswith("python -m trio_ucx mesh: rank 1 ")
    assert sorted(out)[-3:] == ["[1] start 2", "[2] start 1", "[2] start 2"] and len(err) == 3


@pytest.mark.parametrize("how", ["rank 0 fails", "rank 0 has ended", "a signal"])
def test_what_is_not_started_again(start: Start, how: str) -> None:
    program = COUNTED + "    print('pid', os.getpid())"
    if how == "rank 0 fails":
        program += "\n    if rank == '0': sys.exit(4)\n    time.sleep(1000)"
    elif how == "rank 0 has ended":
        program += (
            "\n    if rank == '0':\n        print('end', os.getpid())\n        sys.exit(0)"
            "\n    while not os.path.exists(f'{folder}/late'):\n        time.sleep(0.01)\n    sys.exit(4)"
        )
    else:
        program += "\n    time.sleep(1000)"
    launch = start(program, "--ranks", "2", "--restart", "9", "--grace", "0.1")
    launch.go()
    pids = launch.pids(2)
    if how == "rank 0 has ended":
        launch.read_until(lambda out: b"end " in out)
        assert_gone([int(launch.out.partition(b"end ")[2].split()[0])])
        (launch.folder / "late").touch()
    elif how == "a signal":
        launch.process.send_signal(signal.SIGTERM)
    status, out, err = launch.finish()
    assert status == (143 if how == "a signal" else 4)
    assert out.count("[1] start 1") + out.count("[0] start 1") == 2 and not any("start 2" in line for line in out)
    assert not any("restart" in line for line in err)
    assert_gone(pids)


def test_a_module(tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "trio_ucx", "mesh", "--ranks", "2", "-m", "some_package.program", "-m", "x"],
        capture_output=True, text=True, timeout=TIMEOUT, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] __main__ ['-m', 'x']" for rank in (0, 1)]


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ranks", "0", "x.py"], "'0' is not a number of processes"),
        (["--ranks", "two", "x.py"], "'two' is not a number of processes"),
        (["--grace", "-1", "x.py"], "is not a number of seconds"),
        (["--grace", "nan", "x.py"], "'nan' is not a number of seconds"),
        (["/nonexistent/x.py"], "there is no program /nonexistent/x.py"),
        (["--restart", "-1", "x.py"], "'-1' is not a number of restarts"),
        (["--restart", "x.py"], "'x.py' is not a number of restarts"),
        (["-m", "no_such_module.at_all"], "there is no module no_such_module.at_all"),
        (["-m", ".relative"], "there is no module .relative"),
        (["-m"], "the following arguments are required: PROGRAM"),
        ([], "the following arguments are required: PROGRAM"),
    ],
)
def test_wrong_arguments(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["mesh", *options])
    assert caught.value.code == 2 and text in capsys.readouterr().err
