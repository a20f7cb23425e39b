"""Opening things with few file descriptors left gives an error that says so, leaves nothing open, and never crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import as_other_user

from trio_ucx import ucp
from trio_ucx.ucp._quirks import descriptors

#: Opens one kind of thing with 0 to 20 descriptors left, and once more when there are enough again. Says what happened.
PROGRAM = """
import contextlib, errno, json, os, resource, sys
import trio, trio_ucx
from trio_ucx import ucp
from trio_ucx._util.live_handles import live_handles

KIND, TLS, SPARES = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
# A shared worker stays, and so do the descriptors of a GPU's drivers, which the first context starts.
STAYS = KIND in ("shared worker", "first context")
_, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(HARD, 4096), HARD))
SOFT, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

def open_descriptors():
    return sorted(map(int, os.listdir("/proc/self/fd")))[:-1]  # without listdir's own, the highest

@contextlib.contextmanager
def spare(count):
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(max(SPARES) + 10)]
    for filler in fillers[:count]:
        os.close(filler)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, HARD))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
        for filler in fillers[count:]:
            os.close(filler)

async def descriptors_after_release():
    # The other ends of what was closed go a moment later.
    last, unchanged = None, 0
    while unchanged < 6:
        state = len(open_descriptors()), live_handles.counts()
        unchanged = unchanged + 1 if state == last else 0
        last = state
        await trio.sleep(0.005)
    return last

async def exchange(one, other):
    with trio.fail_after(15):
        await one.send(b"x" * 10_000)
        assert len(await other.receive()) == 10_000

async def attempt(kind, stack):
    if kind in ("context", "first context"):
        stack.enter_context(ucp.open_context({"TLS": TLS}))
    elif kind == "worker":
        await stack.enter_async_context(ucp.open_worker(config={"TLS": TLS}))
    elif kind == "second worker":
        await stack.enter_async_context(ucp.open_worker(context=common["context"]))
    elif kind == "raw listener":
        listener = await common["worker"].open_listener("127.0.0.1", 0)
        stack.push_async_callback(listener.aclose)
    elif kind == "endpoint":
        endpoint = await common["worker"].open_endpoint(common["peer"].address)
        stack.callback(endpoint.abort)
    elif kind == "listener":
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=common["worker"])
        stack.push_async_callback(listener.aclose)
    elif kind == "connection":
        client = await trio_ucx.open_ucx_stream(*common["listener"].address, worker=common["worker"])
        stack.callback(client.abort)
        server = await common["listener"].accept()
        stack.callback(server.abort)
        await exchange(client, server)
    elif kind == "shared worker":
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        stack.push_async_callback(listener.aclose)

common = {}

async def main():
    async with contextlib.AsyncExitStack() as outer:
        if KIND == "second worker":
            common["context"] = outer.enter_context(ucp.open_context({"TLS": TLS}))
        elif KIND not in ("context", "first context", "worker", "shared worker"):
            common["worker"] = await outer.enter_async_context(ucp.open_worker(config={"TLS": TLS}))
            common["worker"].admit("127.0.0.1")
            common["peer"] = await outer.enter_async_context(ucp.open_worker(config={"TLS": TLS}))
        if KIND == "connection":
            [common["listener"]] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=common["peer"])
            outer.push_async_callback(common["listener"].aclose)
        async with contextlib.AsyncExitStack() as stack:  # what is opened once is open from now on
            if KIND != "first context":
                await attempt("context" if KIND == "shared worker" else KIND, stack)
        opened = 0
        for count in SPARES:
            before = await descriptors_after_release()
            error = None
            async with contextlib.AsyncExitStack() as stack:
                with spare(count):
                    try:
                        await attempt(KIND, stack)
                    except OSError as found:
                        refused = KIND == "connection" and "process is running out of file descriptors" in str(found)
                        assert found.errno == errno.EMFILE or refused, found
                        error = str(found)
                if error is None:
                    opened += 1
            if error is not None or not STAYS:
                after = await descriptors_after_release()
                assert after == before, (count, error, before, after)
            print(json.dumps([count, error]), flush=True)
            async with contextlib.AsyncExitStack() as stack:
                if opened or not STAYS:
                    await attempt(KIND, stack)
trio.run(main)
assert not live_handles.counts()
"""

#: The largest suffices for the first context, whose need depends on the machine's GPUs, and for a worker.
SPARES = sorted({*range(21), 30, 40, descriptors.for_context(first=True) + 20})
KINDS = [
    "first context",
    "context",
    "worker",
    "second worker",
    "shared worker",
    "raw listener",
    "endpoint",
    "listener",
    "connection",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
@pytest.mark.parametrize("kind", KINDS)
def test_few_descriptors(kind: str, transports: str) -> None:
    command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c", PROGRAM, kind, transports, json.dumps(SPARES)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, (result.stdout[-1000:], result.stderr[-3000:])
    errors = dict(json.loads(line) for line in result.stdout.splitlines())
    assert sorted(errors) == SPARES
    assert errors[0] is not None, "there are no descriptors"
    if kind in ("first context", "context", "worker", "second worker", "raw listener", "endpoint", "connection"):
        assert "file descriptors, and 0 are left" in errors[0]
    opened = [count for count, error in errors.items() if error is None]
    assert opened and opened == SPARES[-len(opened) :], "more are enough, too"


def test_what_the_drivers_of_gpus_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first context starts them. If they leave too few descriptors for UCX's thread, UCX ends the process."""
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", {"/dev/nvidia0", "/dev/nvidia3"}.__contains__)
        two = descriptors.for_context(first=True)
        patch.setattr(os.path, "exists", {"/dev/nvidia0"}.__contains__)
        one = descriptors.for_context(first=True)
        later = descriptors.for_context(first=False)
    assert later + 22 <= one <= two - 7  # of 22 that one H100 takes, 7 are named after it


def test_what_rdma_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context over Soft-RoCE takes two descriptors for each device, a worker one for each transport."""
    monkeypatch.setattr(descriptors, "DEVICES", tmp_path)
    without = descriptors.for_context(first=False)
    for device in "mlx5_0", "rxe0":
        (tmp_path / device).mkdir()
    assert descriptors.for_context(first=False) >= without + 4
    lines = ["#      resource 0  :  md 0  dev 0  flags -- rc_verbs/rxe0:1"]
    lines += ["#      resource 1  :  md 0  dev 0  flags a- ud_verbs/rxe0:1", ""]
    assert descriptors.for_worker("\n".join(lines)) == descriptors.for_worker("") + 2


@pytest.mark.parametrize("transports", ["self", "tcp", "sysv,self", "posix,self", "sm,self", "tcp,sm,self", "all"])
async def test_what_a_worker_needs_is_what_it_takes(transports: str) -> None:
    with ucp.open_context({"TLS": transports}) as context:
        async with ucp.open_worker(context=context):  # the first one starts what all have in common
            before = len(os.listdir("/proc/self/fd"))
            async with ucp.open_worker(context=context):
                taken = len(os.listdir("/proc/self/fd")) - before
        assert taken <= context._descriptors_per_worker <= taken + 4
        assert descriptors.for_worker("") >= 5


@pytest.mark.root
def test_room_for_one_more_thread() -> None:
    """The thread of the log starts, and UCX's would not: UCX ends the process then."""
    program = """
import errno, resource
from trio_ucx import ucp
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
try:
    with ucp.open_context({"TLS": "tcp"}):
        print("opened")
except OSError as error:
    print(error.errno == errno.EAGAIN, "RLIMIT_NPROC" in str(error), "UCX's" in str(error))
"""
    done = subprocess.run(
        [*as_other_user(54398), sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr
