"""How ranks meet: late, missing, wrong and foreign ones."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from helpers import free_port, open_listener

import trio_ucx
from trio_ucx import mesh, ucp
from trio_ucx._rules.wire import MAGIC, VERSION, RefusalCode
from trio_ucx.mesh import _meeting_file
from trio_ucx.mesh._contact import Contact
from trio_ucx.mesh._meeting import Coordinator, Follower, name_ranks

KEY = bytes(range(32))


async def join(rank: int, size: int, meeting: str, **options: Any) -> None:
    async with (
        ucp.open_worker() as worker,
        mesh.join(rank=rank, size=size, meeting=meeting, worker=worker, **options) as group,
    ):
        await group.barrier()


async def failure(rank: int, size: int, meeting: str, **options: Any) -> BaseException | None:
    try:
        await join(rank, size, meeting, **options)
    except (Exception, trio.Cancelled) as error:
        return error
    return None


async def meet(*calls: Any, seconds: float = 20) -> list[BaseException | None]:
    """Runs joins at the same time: each is (seconds to wait first, rank, size, meeting, options)."""
    ends: list[BaseException | None] = [None] * len(calls)

    async def run(index: int, delay: float, rank: int, size: int, meeting: str, options: dict[str, Any]) -> None:
        await trio.sleep(delay)
        ends[index] = await failure(rank, size, meeting, **options)

    with trio.fail_after(seconds):
        async with trio.open_nursery() as nursery:
            for index, call in enumerate(calls):
                nursery.start_soon(run, index, *call)
    return ends


@pytest.fixture(params=["file", "port"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting" if request.param == "file" else f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("delays", [(0, 0.2, 0.4), (0.4, 0.2, 0)])
async def test_in_any_order(meeting: str, delays: tuple[float, ...]) -> None:
    assert await meet(*((delay, rank, 3, meeting, {}) for rank, delay in enumerate(delays))) == [None] * 3


async def test_missing_ranks_are_named_by_all(meeting: str) -> None:
    ends = await meet(*((0, rank, 6, meeting, {"timeout": 3}) for rank in (0, 1, 4)))
    for end in ends:
        assert isinstance(end, mesh.MeetingError)
        assert end.missing == (2, 3, 5)
        assert "ranks 2-3, 5 of 6" in str(end)


async def test_a_rank_whose_time_is_over_first_learns_who_is_missing(meeting: str) -> None:
    ends = await meet((0, 0, 3, meeting, {"timeout": 6}), (0, 1, 3, meeting, {"timeout": 3}))
    assert isinstance(ends[1], mesh.MeetingError) and ends[1].missing == (2,)
    assert isinstance(ends[0], mesh.MeetingError) and ends[0].missing == (2,)
    assert "rank 1 came, and did not wait any longer" in str(ends[0])


async def test_a_rank_that_gave_up_may_come_again(meeting: str) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, 0, 3, meeting)
            assert isinstance(await failure(1, 3, meeting, timeout=0.5), mesh.MeetingError)
            nursery.start_soon(join, 1, 3, meeting)
            nursery.start_soon(join, 2, 3, meeting)


async def test_rank_0_is_missing(meeting: str) -> None:
    [end] = await meet((0, 1, 2, meeting, {"timeout": 0.3}))
    assert isinstance(end, mesh.MeetingError) and end.missing == (0,)
    assert "rank 1 did not find rank 0" in str(end)
    assert meeting.removeprefix("file://") in str(end)


async def test_the_same_rank_twice(meeting: str) -> None:
    ends = await meet((0, 0, 3, meeting, {"timeout": 4}), (0.2, 1, 3, meeting, {}), (0.4, 1, 3, meeting, {}))
    [refused] = [end for end in ends[1:] if isinstance(end, ConnectionRefusedError)]  # whichever came second
    assert "rank 1 has come already: process" in str(refused)


async def test_another_size(meeting: str) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, 0, 3, meeting)
            error = await failure(1, 4, meeting)
            nursery.cancel_scope.cancel()
    assert isinstance(error, ConnectionRefusedError) and "rank 0 of 3" in str(error) and "of 4" in str(error)


async def test_keys_that_differ(meeting: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is at the address may not be rank 0, so a rank tries again until its time is over."""
    ends = await meet(*((0, rank, 2, meeting, {"authkey": KEY[:: 1 - 2 * rank], "timeout": 3}) for rank in (0, 1)))
    assert isinstance(ends[1], trio_ucx.NotAdmitted) and "the authkeys of the two sides differ" in str(ends[1])
    assert isinstance(ends[0], mesh.MeetingError)
    assert re.search(r"turned away (127\.0\.0\.1|\[?::1\]?):\d+: .*the authkeys of the two sides differ", str(ends[0]))
    assert [line.getMessage()[:37] for line in caplog.records] == ["rank 1 tries again for up to 3 s: [Er"]


def _preamble(flags: int) -> bytes:
    return MAGIC + struct.pack("<HH", VERSION, flags) + bytes(32)


def _refusal(why: int) -> bytes:
    return struct.pack("<IBB", 9, 1, why) + b"go away"


@pytest.mark.parametrize(
    "answer",
    [
        *(_preamble(1) + _refusal(why) for why in RefusalCode),
        _preamble(0) + _refusal(RefusalCode.NOT_ADMITTED),
        _preamble(0),  # it has no key
        _preamble(1) + struct.pack("<IB", 33, 2) + bytes(32),  # a wrong proof
        _preamble(1) + struct.pack("<IB", 0, 0),
        MAGIC + struct.pack("<HH", 99, 1) + bytes(32) + _refusal(RefusalCode.NOT_ADMITTED),
        b"HTTP/1.0 400\r\n\r\n",
        b"",
    ],
)
async def test_a_stranger_that_has_the_port_for_a_moment(answer: bytes) -> None:
    """It does not know the key, so that it cannot send a rank away."""
    port = free_port()
    meeting = f"127.0.0.1:{port}"

    async def refuse(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            if answer:
                await stream.send_all(answer)
        came.set()

    came = trio.Event()
    ends: list[BaseException | None] = []

    async def join_rank_1() -> None:
        ends.append(await failure(1, 2, meeting, authkey=KEY))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as squatting:
                [listener] = await trio.open_tcp_listeners(port, host="127.0.0.1")
                squatting.start_soon(trio.serve_listeners, refuse, [listener])
                nursery.start_soon(join_rank_1)
                await came.wait()
                squatting.cancel_scope.cancel()
            ends.append(await failure(0, 2, meeting, authkey=KEY))
    assert ends == [None, None]


async def test_what_has_refused_a_rank_is_in_its_error(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()  # nobody takes it when the listener has closed
    [listener] = await trio.open_tcp_listeners(port, host="127.0.0.1")

    async def refuse_once() -> None:
        async with listener, await listener.accept() as stream:
            await stream.receive_some()
            await stream.send_all(_preamble(1) + _refusal(RefusalCode.NOT_ADMITTED))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse_once)
        error = await failure(1, 2, f"127.0.0.1:{port}", authkey=KEY, timeout=3)
    assert isinstance(error, trio_ucx.NotAdmitted)
    assert "refused the connection: go away; later: " in str(error) and "is a listener open there?" in str(error)
    [line] = caplog.records
    assert line.getMessage().endswith(": go away")


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    [end] = await meet((0, 0, 2, f"file://{tmp_path}/meeting", {"timeout": 1}))
    assert isinstance(end, IsADirectoryError)
    assert [path.name for path in tmp_path.iterdir()] == ["meeting"]


async def test_the_same_key(tmp_path: Path) -> None:
    meeting = f"127.0.0.1:{free_port()}"
    assert await meet(*((0, rank, 3, meeting, {"authkey": KEY}) for rank in range(3))) == [None] * 3


async def test_a_meeting_in_a_file_needs_no_key(tmp_path: Path) -> None:
    """Rank 0 makes one, and only its user can read it. The file goes when rank 0 leaves."""
    path = tmp_path / "meeting"
    modes = []

    async def look() -> None:
        while not path.exists():
            await trio.sleep(0.01)
        modes.append(path.stat().st_mode & 0o777)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        assert await meet(*((0.1, rank, 2, f"file://{path}", {}) for rank in range(2))) == [None] * 2
    assert modes == [0o600]
    assert not path.exists()


async def test_a_file_that_an_earlier_job_has_left(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.write_text('{"hosts": ["127.0.0.1"], "port": 9, "machine": "gone", "authkey": "0123456789abcdef0123"}')
    meeting = f"file://{path}"
    assert await meet((0.5, 0, 2, meeting, {}), (0, 1, 2, meeting, {})) == [None, None]


def _foreign(path: Path, text: str) -> None:
    path.write_text(text)
    os.chown(path, 12345, -1)


def _changeable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o620)


def _linked(path: Path, text: str) -> None:
    path.with_name("elsewhere").write_text(text)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_foreign, "meeting belongs to user 12345: "),
        (_changeable, "meeting can be changed by other users (mode 0620): "),
        (_linked, "meeting is not a regular file: "),
        (lambda path, text: os.mkfifo(path), "meeting is not a regular file: "),
        (lambda path, text: path.mkdir(), "meeting is not a regular file: "),
    ],
)
async def test_a_file_that_others_can_have_written_is_not_trusted(
    tmp_path: Path, make: Callable[[Path, str], object], words: str
) -> None:
    """It would lead to a false rank 0, and a FIFO would block Trio's loop for ever."""
    path = tmp_path / "meeting"
    if make is _foreign and os.geteuid() != 0:
        pytest.skip("only root can make a file of somebody else")
    async with ucp.open_worker() as worker:
        async with open_listener(worker, authkey=KEY) as listener:
            contact = Contact(["127.0.0.1"], listener.address[1], "", KEY.decode("latin-1"))
            make(path, json.dumps(attrs.asdict(contact)))
            [end] = await meet((0, 1, 2, f"file://{path}", {"timeout": 0.5}))
            assert isinstance(end, mesh.MeetingError)
            assert words in str(end) and "a folder where only this user can write" in str(end)
            assert listener.statistics().handshaking == listener.statistics().waiting == 0


def test_a_meeting_file_is_replaced_at_once(tmp_path: Path) -> None:
    """Nobody knows the name of the temporary file before. A FIFO at the path does no harm at the end either."""
    path = tmp_path / "meeting"
    os.mkfifo(path)
    _meeting_file.remove(path, b"")
    assert path.is_fifo()
    for name in (f".meeting.{os.getpid()}", ".meeting"):
        (tmp_path / name).mkdir()
    for data in (b"first", b"second"):
        _meeting_file.write(path, data)
        assert path.stat().st_mode == stat.S_IFREG | 0o600 and _meeting_file.read(path) == data
    _meeting_file.remove(path, b"first")
    assert path.exists()
    _meeting_file.remove(path, b"second")
    assert not path.exists() and len(list(tmp_path.iterdir())) == 2


def test_a_file_of_another_user_where_rank_0_writes() -> None:
    """In a folder such as /tmp, it cannot be replaced."""
    if os.geteuid() != 0:
        pytest.skip("only root can become two users")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        path = Path(folder, "meeting")
        _foreign(path, "")
        os.seteuid(54321)
        try:
            with pytest.raises(PermissionError, match="meeting belongs to user 12345: .* in a folder where only"):
                _meeting_file.write(path, b"text")
        finally:
            os.seteuid(0)
        assert os.listdir(folder) == ["meeting"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hosts": 5}', "\0"])
async def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "meeting"
    path.write_text(text)
    [end] = await meet((0, 1, 2, f"file://{path}", {"timeout": 0.3}))
    assert isinstance(end, mesh.MeetingError)


async def test_the_port_is_taken() -> None:
    async with ucp.open_worker() as worker:
        async with open_listener(worker) as listener:
            [end] = await meet((0, 0, 2, f"127.0.0.1:{listener.address[1]}", {}))
    assert isinstance(end, OSError) and "is it another job's?" in str(end)


async def test_strangers_do_not_disturb_the_meeting(meeting: str) -> None:
    """Somebody with the key who is no rank: says nothing, or nonsense, and goes."""
    port = free_port()
    meeting = f"127.0.0.1:{port}"

    async def strange() -> None:
        async with ucp.open_worker() as worker:
            retry = trio_ucx.Backoff()  # rank 0 may begin to listen later
            for first in (
                None,
                b"",
                b"nonsense",
                b'["RankHello",{}]',
                b'["RankHello",[]]',
                b'["RankHello",{"rank":99,"to":0,"size":2}]',
                b'["RankHello",{"rank":[],"to":0,"size":2}]',
                b'["RankHello",{"rank":1,"to":0,"size":2,"seconds":"a"}]',
                b'["RankHello",{"rank":1,"to":0,"size":2,"group":"q","member":"z"}]',
                bytes(100_000),
                b"[" * 5000,
            ):
                connection = await trio_ucx.open_ucx_stream("127.0.0.1", port, worker=worker, retry=retry)
                if first is not None:
                    await connection.open_conversation().send(first)
                    await trio.sleep(0.02)
                connection.abort()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(join, 0, 2, meeting)
        await strange()
        await join(1, 2, meeting)


async def test_cancelled_while_meeting(meeting: str) -> None:
    """Nothing stays: the same meeting point serves the next group."""
    with trio.move_on_after(0.3) as scope:
        await join(0, 2, meeting)
    assert scope.cancelled_caught
    with trio.move_on_after(0.3) as scope:
        await join(1, 2, meeting)
    assert scope.cancelled_caught
    assert await meet((0, 0, 2, meeting, {}), (0, 1, 2, meeting, {})) == [None, None]


async def test_a_rank_that_ends_at_the_moment_of_the_welcome_is_lost(
    meeting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are there, and one of them is gone before it is welcomed: the others learn that."""
    original = Coordinator._join

    async def join_late(self: Coordinator, rank: int, arrival: Any) -> None:
        if rank == 1:  # the last one to come
            arrival.channel.connection.abort()
        await original(self, rank, arrival)

    monkeypatch.setattr(Coordinator, "_join", join_late)
    ends = await meet((0, 0, 3, meeting, {}), (0.5, 1, 3, meeting, {}), (0, 2, 3, meeting, {}))
    for rank in (0, 2):
        error = ends[rank]
        assert isinstance(error, mesh.RankLostError) and error.rank == 1, ends


class Late:
    """A connection of which the first message of a conversation is read late."""

    def __init__(self, real: Any, seconds: float) -> None:
        self._real, self._seconds = real, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def open_conversation(self) -> Any:
        return Late(self._real.open_conversation(), self._seconds)

    async def receive(self) -> bytes:
        message: bytes = await self._real.receive()
        await trio.sleep(self._seconds)
        return message


async def test_a_rank_that_is_welcomed_late_is_not_lost(meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others connect to it before it knows the group."""
    original = Follower.meet

    async def meet_late(self: Follower, connection: Any, port: int, timeout: float) -> None:
        await original(self, Late(connection, 0.3 * (self._members.rank == 2)), port, timeout)

    monkeypatch.setattr(Follower, "meet", meet_late)
    assert await meet(*((0, rank, 4, meeting, {}) for rank in range(4))) == [None] * 4


async def test_rank_0_ends_while_the_ranks_are_meeting(meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may begin to listen there in time."""
    original = Coordinator._join

    async def join_and_tell(self: Coordinator, rank: int, arrival: Any) -> None:
        came.set()
        await original(self, rank, arrival)

    async def short() -> None:
        """Rank 0 ends as soon as another one has come."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, 0, 3, meeting)
            await came.wait()
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(Coordinator, "_join", join_and_tell)
    came = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(short)
        [end] = await meet((0.05, 1, 3, meeting, {"timeout": 5}))
    assert isinstance(end, mesh.MeetingError) and end.missing == (0,)
    assert str(end).count("Errno 110") == 1
    came = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(short)
        ends = await meet((0.05, 1, 3, meeting, {}), (0.4, 2, 3, meeting, {}), (0.5, 0, 3, meeting, {}))
    assert ends == [None] * 3


async def test_on_loss_differs(meeting: str) -> None:
    ends = await meet((0, 0, 2, meeting, {"timeout": 3}), (0, 1, 2, meeting, {"on_loss": "continue"}))
    assert isinstance(ends[1], ConnectionRefusedError) and "on_loss='continue'" in str(ends[1])
    assert isinstance(ends[0], mesh.MeetingError) and ends[0].missing == (1,)
    assert "rank 1 was refused: rank 1 has on_loss='continue'" in str(ends[0])


async def test_a_join_that_is_cancelled_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    def services() -> int:
        root = trio.lowlevel.current_root_task()
        assert root is not None
        return sum(task.name == "trio_ucx.mesh" for nursery in root.child_nurseries for task in nursery.child_tasks)

    for _ in range(3):
        with trio.CancelScope() as scope:
            scope.cancel()
            async with mesh.join(rank=0, size=2, meeting=f"file://{tmp_path}/m"):
                pass
    await trio.testing.wait_all_tasks_blocked()
    assert services() == 0


async def test_wrong_arguments(tmp_path: Path) -> None:
    for wrong in ({"on_loss": "ignore"}, {"timeout": -1}, {"rank": 2}, {"authkey": b"short"}):
        with pytest.raises(ValueError):
            async with mesh.join(**{"rank": 0, "size": 1, "meeting": f"file://{tmp_path}/m", **wrong}):
                pass
    with pytest.raises(TypeError, match=r"join\(\) got an unexpected keyword argument 'backlog'"):
        async with mesh.join(rank=0, size=1, meeting=f"file://{tmp_path}/m", backlog=3):  # type: ignore[call-arg]
            pass


def test_names_of_ranks() -> None:
    assert name_ranks((3,)) == "rank 3"
    assert name_ranks((0, 1, 2, 5, 7, 8)) == "ranks 0-2, 5, 7-8"
