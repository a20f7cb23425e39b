"""The C code of links (``_native/link``), without UCX: compared with its model step by step, with planted faults,
without memory, with anything that a peer may send, and under AddressSanitizer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Rounds
from link_model import Answer
from native_link import CANCELED, INVALID_PARAM, NATIVE, NO_MEMORY, NativeLinks, build, compare, fuzz, play_paired

from trio_ucx._rules import wire


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(tmp_path_factory.mktemp("link"), "-Wall", "-Wextra", "-Werror")


@pytest.mark.parametrize("leave_due", [False, True])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_as_the_model(native: Any, leave_due: bool, several: bool, ends: bool, rounds: Rounds) -> None:
    for seed in range(rounds(250, 2500)):
        play_paired(native, seed, 500, leave_due=leave_due, several=several, ends=ends)


def test_anything_a_peer_may_send(native: Any, rounds: Rounds) -> None:
    for seed in range(rounds(500, 20_000)):
        fuzz(native, seed, 500)


def test_under_sanitizers(rounds: Rounds) -> None:
    """The same under AddressSanitizer and UndefinedBehaviorSanitizer."""
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if found.returncode or not Path(found.stdout.strip()).is_absolute():
        pytest.skip("there is no AddressSanitizer here")
    environment = {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much; what links keep is counted
        "PYTHONMALLOC": "malloc",
    }
    steps = ["0", str(rounds(20_000, 200_000)), "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command = [sys.executable, str(Path(__file__).with_name("native_link.py")), *steps]
    subprocess.run(command, env=environment, check=True, timeout=500)


# ---- planted faults ----

#: By name: a file, what is there, and what is planted.
FAULTS = {
    "a message that was left wakes nobody": ("messages.c", "    if (place->has) {\n", "    if (false) {\n"),
    "a message is taken before those in front": ("messages.c", "settled && is_settled(item", "is_settled(item"),
    "a message in another's buffer is not saved": ("messages.c", "held->state == TU_ITEM_ARRIVED", "false"),
    "whoever runs first gets the first message": ("messages.c", "        from = &(*from)->next;\n", "        ;\n"),
    "a receive behind a large message sleeps on": (
        "messages.c",
        "    } else {\n        tu_places_serve(queue);\n",
        "    } else if (queue->large > 0) {\n        tu_places_serve(queue);\n",
    ),
    "who leaves keeps the credit": ("sending.c", "        token->link->credit += token->cost;\n", "        ;\n"),
    "a frame overtakes the batch": (
        "sending.c",
        "(tu_link_flush(link) != UCS_OK) {\n        return",
        "(false) {\n        return",
    ),
    "a queue is forgotten with its admission": ("queues.c", " && !queue->admitted_by_us", ""),
    "a message of the caller overtakes the batch": ("sending.c", "verdict = tu_link_flush(link);", "verdict = 0;"),
    "a reserved message of the caller overtakes it": (
        "sending.c",
        "verdict != 0 ? verdict : tu_link_flush(",
        "verdict != 0 ? verdict : 0 * (int64_t)(uintptr_t)(",
    ),
    "a message of the caller costs nothing": (
        "sending.c",
        "{\n    link->credit -= tu_link_cost(length, link->terms.threshold);\n",
        "{\n",
    ),
    "a message that was fetched wakes nobody": (
        "transfers.c",
        "        became_ready(link, item);\n",
        "        item->state = TU_ITEM_READY;\n        item->queue->large--;\n",
    ),
    "a message that was fetched is kept when it is dropped": (
        "transfers.c",
        "    free(item->data);\n    free(item);",
        "    free(item);",
    ),
    "a receive does not wait for what is fetched": ("messages.c", "item->state = TU_ITEM_MOVING;\n    }\n", "}\n"),
    "transfers begin whatever goes on before them": ("messages.c", " && ahead->bytes < TU_BYTES_AHEAD", ""),
    "a token that is due is freed": ("worker.c", "    tu_list_remove(&token->due);\n    free", "    free"),
}

PLAY = """
import sys
from pathlib import Path
from native_link import build, play_paired
module = build(Path(sys.argv[1]), native=Path(sys.argv[2]))
for seed in range(100):
    play_paired(module, seed, 500, leave_due=seed % 2 == 1, several=seed % 4 > 1)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    folder = shutil.copytree(NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    name, there, planted = FAULTS[fault]
    file = folder / "link" / name
    code = file.read_text()
    assert there in code
    file.write_text(code.replace(there, planted, 1))
    command = [sys.executable, "-c", PLAY, str(tmp_path), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode and ("Different" in done.stderr or done.returncode < 0), done.stderr


# ---- what the model does not say ----


class Native:
    """One link in C, whose peer is the test."""

    def __init__(self, module: Any, window: int = 4096, peer_window: int = 4096, peer_threshold: int = 0) -> None:
        self.lib, self.ffi = module.lib, module.ffi
        self.lib.fake_answer, self.lib.fake_refusal = self.lib.FAKE_DONE, 0
        self.links = NativeLinks(module)
        self.link = self.links.open(window, peer_window, 0, peer_threshold)
        self._status = 0

    def arrived(self, number: int, *messages: bytes) -> int:
        [length] = {len(message) for message in messages}
        return int(self.lib.tu_link_arrived(self.link, number, length, len(messages), b"".join(messages)))

    def frame(self, frame: wire.Frame) -> int:
        return self.arrived(wire.CONTROL, wire.encode_frame(frame))

    def send(self, number: int, data: bytes) -> int:
        return int(self.lib.tu_link_send(self.link, number, data, len(data)))

    def send_frame(self, frame: wire.Frame, *, later: bool) -> None:
        data = wire.encode_frame(frame)
        self.lib.tu_link_send_frame(self.link, data, len(data), later)

    def receive(self, number: int, limit: int = 1 << 40, *, look: bool = False) -> bytes | Answer:
        return self.links.answer(self.lib.tu_link_receive(self.link, number, limit, look))

    def take(self, token: Any, limit: int = 1 << 40, *, look: bool = False) -> bytes | Answer:
        return self.links.answer(self.lib.tu_link_take(token, limit, look, self.ffi.new("uint32_t *")))

    def wait(self, *numbers: int) -> Any:
        return self.lib.tu_link_wait(self.link, numbers, len(numbers))

    def counts(self) -> Any:
        counts = self.ffi.new("tu_link_counts_t *")
        self.lib.tu_link_count(self.link, counts)
        return counts

    def broken(self) -> int:
        """The status with which it has broken; 0: it has not, or that was asked before."""
        status = self.ffi.new("int *")
        return int(status[0]) if self.lib.tu_links_broken(self.links.links, status) else 0

    def link_status(self) -> int:
        """The status with which it has broken; 0: it has not."""
        self._status = self._status or self.broken()
        return self._status

    def close(self) -> None:
        self.lib.tu_link_close(self.link)

    def destroy(self) -> None:
        """Afterwards nothing may be allocated any more."""
        self.lib.tu_links_destroy(self.links.links)
        list(self.links.sent())
        compare("allocated", 0, self.lib.fake_allocated)


def test_looking(native: Any) -> None:
    side = Native(native)
    side.arrived(1, b"first", b"other")
    assert side.receive(1, 2, look=True) == b"first"
    token = side.wait(1)
    assert side.take(token, look=True) == b"first"
    assert side.receive(1) == b"other"
    assert side.take(token) == b"first"
    side.arrived(wire.STREAM, b"abc", b"def")
    assert side.receive(wire.STREAM, look=True) == b"abcdef"
    assert side.receive(wire.STREAM, 4) == b"abcd"
    assert side.receive(wire.STREAM) == b"ef"
    side.close()
    side.destroy()


def test_no_more_bytes_than_there_is_room_for(native: Any) -> None:
    side = Native(native, window=1 << 20)
    for _ in range(70):
        side.arrived(wire.STREAM, bytes(1000))
    assert side.receive(wire.STREAM) == bytes(65536)
    assert side.receive(wire.STREAM) == bytes(70_000 - 65536)
    side.close()
    side.destroy()


def test_too_long(native: Any) -> None:
    side = Native(native)
    side.arrived(3, bytes(9))
    assert side.receive(3, 8) is Answer.TOO_LONG
    assert side.lib.tu_links_length(side.links.links) == 9
    assert (wire.CONTROL, wire.encode_frame(wire.Dropped(3, 9))) in side.links.sent()
    side.close()
    side.destroy()


def test_frames_with_the_batch(native: Any) -> None:
    """Each is a group of its own, between the messages where it was sent."""
    side = Native(native)
    side.lib.tu_link_expect_more(side.link)
    assert side.send(1, b"12345") == side.lib.TU_LINK_BATCHED
    for _ in range(2):
        side.send_frame(wire.Leave(7, 0), later=True)
    assert not list(side.links.sent())
    side.send_frame(wire.Ping(1), later=False)
    leave = (wire.CONTROL, wire.encode_frame(wire.Leave(7, 0)))
    assert list(side.links.sent()) == [(1, b"12345"), leave, leave, (wire.CONTROL, wire.encode_frame(wire.Ping(1)))]
    side.close()
    side.destroy()


@pytest.mark.parametrize("inside", [False, True])
def test_a_batch_that_fails(inside: bool, native: Any) -> None:
    """The link breaks, and says so once; what had arrived can be read."""
    side = Native(native)
    side.arrived(1, b"abc")
    side.lib.tu_link_expect_more(side.link)
    assert side.send(1, b"12345") == side.lib.TU_LINK_BATCHED
    side.lib.fake_answer = -3 if inside else side.lib.FAKE_PENDING
    side.lib.tu_links_flush(side.links.links)
    if not inside:
        assert side.broken() == 0
        side.lib.fake_complete(0, -3)
    assert side.broken() == -3
    assert side.broken() == 0
    assert side.send(1, b"1") == -3
    assert side.receive(1) == b"abc"
    side.close()
    side.destroy()


@pytest.mark.parametrize("closed_first", [False, True])
def test_tokens_and_batches_outlive_the_link(closed_first: bool, native: Any) -> None:
    side = Native(native, peer_window=400)
    lib = side.lib
    assert side.send(1, bytes(40)) >= 0
    assert side.send(1, bytes(40)) == lib.TU_LINK_WAITS
    sends = [lib.tu_link_wait_send(side.link, 1, 40) for _ in range(2)]
    receives = [side.wait(1, 2), side.wait(2)]
    lib.fake_answer = lib.FAKE_PENDING
    side.send_frame(wire.Ping(1), later=False)
    side.close()
    assert set(side.links.due()) == {*sends, *receives}
    if closed_first:
        lib.tu_links_destroy(side.links.links)
    assert lib.tu_link_send_reserved(sends[0], bytes(40), 40) == lib.TU_LINK_ENDED
    lib.tu_link_leave_send(sends[1])
    assert side.take(receives[0]) is Answer.ENDED
    assert lib.fake_complete(0, 0)
    lib.tu_link_leave(receives[1])
    if not closed_first:
        lib.tu_links_destroy(side.links.links)
    lib.fake_log_take(side.links._log)
    compare("allocated", 0, lib.fake_allocated)


def test_the_endpoint_goes_first(native: Any) -> None:
    """What arrives can still be read; nothing is sent."""
    side = Native(native)
    side.lib.tu_link_expect_more(side.link)
    assert side.send(1, b"12345") == side.lib.TU_LINK_BATCHED
    assert side.send(2, bytes(4000)) == side.lib.TU_LINK_WAITS
    token = side.lib.tu_link_wait_send(side.link, 2, 4000)
    side.lib.tu_link_detach(side.link)
    assert [queue for queue, _ in side.links.sent()] == [1, wire.CONTROL]
    assert side.links.due() == [token]
    assert side.lib.tu_link_send_reserved(token, bytes(4000), 4000) == side.lib.TU_LINK_ENDED
    assert side.send(1, b"") == side.lib.TU_LINK_ENDED
    side.send_frame(wire.Leave(1, 0), later=True)
    side.frame(wire.Stalled(0))
    side.arrived(1, b"late")
    assert side.receive(1) == b"late"
    assert not list(side.links.sent())
    side.close()
    side.destroy()


def begin(side: Native, number: int, size: int) -> tuple[Any, Any]:
    """A large message has arrived, and its receive has begun the transfer. Returns the token and the item."""
    assert side.lib.tu_link_announced(side.link, number, 99, size, False) == 0
    token = side.wait(number)
    assert side.take(token) is Answer.BEGIN
    return token, side.lib.tu_link_begin(token, number)


def test_a_saved_message_that_is_longer_than_one_read(native: Any) -> None:
    side = Native(native, window=1 << 21)
    token, item = begin(side, 1, 1 << 20)
    side.lib.tu_link_leave(token)
    assert side.lib.tu_link_moved(side.link, item)
    data = random.Random(1).randbytes(1 << 20)
    side.lib.tu_link_save(side.link, item, data)
    side.arrived(1, b"next")
    assert side.receive(1) == data
    assert side.receive(1) == b"next"
    side.close()
    side.destroy()


def test_what_arrives_after_a_send_has_failed(native: Any) -> None:
    """It can be read: the peer's last answer, say."""
    side = Native(native)
    side.lib.fake_answer = -25
    side.send_frame(wire.Ping(1), later=False)
    assert side.broken() == -25
    side.arrived(1, b"answer")
    assert side.receive(1) == b"answer"
    side.close()
    side.destroy()


def test_a_frame_that_ends_with_its_endpoint(native: Any) -> None:
    """That is no failure."""
    side = Native(native)
    side.lib.fake_answer = side.lib.FAKE_PENDING
    side.send_frame(wire.Ping(1), later=False)
    side.lib.tu_link_detach(side.link)
    side.lib.fake_complete(0, CANCELED)
    assert side.broken() == 0
    side.close()
    side.destroy()


def test_a_peer_that_sends_more_than_its_window(native: Any) -> None:
    """However few bytes it needs for that."""
    side = Native(native)
    assert side.arrived(1, *[b""] * 11) == 0
    assert side.arrived(2, *[b""] * 65535) == INVALID_PARAM
    assert side.lib.fake_allocated < 40
    assert side.frame(wire.Grant(1, 0)) == INVALID_PARAM
    assert side.frame(wire.Grant(0, 1)) == INVALID_PARAM
    assert side.frame(wire.Grant(0, 0)) == INVALID_PARAM
    side.close()
    side.destroy()


@pytest.mark.parametrize("how", ["left", "newest"])
def test_messages_that_are_dropped_at_once_cost_credit(how: str, native: Any) -> None:
    """What is granted because of them is no credit for the rest of them."""
    side = Native(native)
    if how == "left":
        assert side.lib.tu_link_open_queue(side.link, 1) == 0
        side.lib.tu_link_leave_queue(side.link, 1)
    else:
        side.lib.tu_link_newest(side.link, 1)
    assert side.arrived(1, *[b""] * 65535) == INVALID_PARAM
    assert side.arrived(1, *[b""] * 11) == (CANCELED if how == "left" else 0)
    assert len(list(side.links.sent())) <= 11
    side.close()
    side.destroy()


def test_what_was_admitted_is_no_credit_for_ever(native: Any) -> None:
    """A peer fills one queue, and sends to another by admissions, which are read."""
    side = Native(native, window=65536)
    for _ in range(200):
        side.arrived(1, bytes(60_000))
        token = side.wait(2)
        side.frame(wire.Stalled(side.counts().grants_sent))
        side.arrived(2, bytes(60_000))
        side.lib.tu_link_leave(token)
        side.receive(2)
        list(side.links.sent())
    assert side.counts().unread <= 2 * 65536
    side.close()
    side.destroy()


def test_a_buffer_is_ucxs_until_the_transfer_is_over(native: Any) -> None:
    """Even if the message was dropped: its receive begins no other transfer, and does not end."""
    side = Native(native, window=1 << 20)
    lib = side.lib
    assert lib.tu_link_announced(side.link, 1, 99, 5, False) == 0
    token = side.wait(1, 2)
    assert side.take(token) is Answer.BEGIN
    item = lib.tu_link_begin(token, 1)
    lib.tu_link_leave_queue(side.link, 1)
    assert lib.tu_link_announced(side.link, 2, 98, 6, False) == 0
    assert side.take(token) is Answer.EMPTY
    assert not lib.tu_link_moved(side.link, item)
    assert side.links.due() == [token]
    assert side.take(token) is Answer.BEGIN
    lib.tu_link_leave(token)
    side.close()
    side.destroy()


def test_the_byte_stream_is_for_the_task_that_waits(native: Any) -> None:
    side = Native(native)
    token = side.wait(wire.STREAM)
    side.arrived(wire.STREAM, b"12345", b"67890")
    assert side.receive(wire.STREAM) is Answer.EMPTY
    assert side.take(token) == b"1234567890"
    side.close()
    side.destroy()


def test_messages_before_ours_are_dropped(native: Any) -> None:
    """The peer has closed: a message that has arrived in a buffer is for a receive in front by now."""
    side = Native(native, window=1 << 20)
    lib = side.lib
    first, items = [], []
    for number in (1, 3):
        assert lib.tu_link_announced(side.link, number, 99, 9, True) == 0
        first.append(side.wait(number, 2))
        assert side.take(first[-1]) is Answer.BEGIN
        items.append(lib.tu_link_begin(first[-1], number))
    for whole in (False, False, True):
        assert lib.tu_link_announced(side.link, 2, 99, 9, whole) == 0
    token = side.wait(2)
    assert side.take(token) is Answer.BEGIN
    items.append(lib.tu_link_begin(token, 2))
    lib.tu_link_forget_with_sender(side.link)
    assert not lib.tu_link_moved(side.link, items[-1])
    assert token in side.links.due()
    assert side.take(token) is Answer.SAVE
    lib.tu_link_save(side.link, lib.tu_token_holds(token), b"123456789")
    for other in first:
        lib.tu_link_leave(other)
    assert side.take(token) == b"123456789"
    for item in items[:2]:
        assert lib.tu_link_moved(side.link, item)
        lib.tu_link_save(side.link, item, b"123456789")
    while lib.tu_links_discarded(side.links.links):
        pass
    side.close()
    side.destroy()


def test_a_buffer_is_free_again(native: Any) -> None:
    """What had arrived there was another receive's: this one looks at its other queue, too."""
    side = Native(native, window=1 << 20)
    lib = side.lib
    front, first = begin(side, 1, 5)
    assert lib.tu_link_announced(side.link, 1, 99, 6, False) == 0
    token = side.wait(1, 2)
    assert side.take(token) is Answer.BEGIN
    second = lib.tu_link_begin(token, 1)
    lib.tu_link_leave(front)
    assert not lib.tu_link_moved(side.link, second)
    side.arrived(2, b"other")
    assert token in side.links.due()
    assert side.take(token) is Answer.SAVE
    lib.tu_link_save(side.link, second, b"second")
    assert side.links.due() == [token]
    assert side.take(token) == b"other"
    assert lib.tu_link_moved(side.link, first)
    lib.tu_link_save(side.link, first, b"first")
    assert [side.receive(1), side.receive(1)] == [b"first", b"second"]
    side.close()
    side.destroy()


def test_a_receive_that_runs_too_early(native: Any) -> None:
    """Its message has arrived, and the one before that has not."""
    side = Native(native)
    lib, number = side.lib, side.ffi.new("uint32_t *")
    tokens, items = zip(*[begin(side, 1, 5), begin(side, 1, 6)], strict=True)
    side.links.due()
    assert not lib.tu_link_moved(side.link, items[1])
    assert side.links.due() == []
    assert side.take(tokens[1]) is Answer.EMPTY
    assert not lib.tu_link_moved(side.link, items[0])
    assert side.links.due() == [*tokens]
    assert [lib.tu_link_take(token, 8, False, number) for token in reversed(tokens)] == [6, 5]
    side.close()
    side.destroy()


def test_conversations(native: Any) -> None:
    """A queue is kept while it is open; what arrives when this side has left is dropped, and granted."""
    side = Native(native, window=8000)
    lib, number = side.lib, wire.ANSWERS + 5
    assert lib.tu_link_open_queue(side.link, number) == 0
    side.arrived(1, b"1")
    assert side.receive(1) == b"1"
    side.arrived(number, b"question")
    token = side.wait(number)
    lib.tu_link_leave_queue(side.link, number)
    assert side.take(token) is Answer.ENDED
    assert side.send(number, b"") == lib.TU_LINK_ENDED
    for _ in range(100):
        assert side.arrived(number, bytes(100)) == CANCELED
    assert side.counts().unread == 0
    lib.tu_link_forget_queue(side.link, number)
    assert side.counts().queues <= 1
    side.close()
    side.destroy()


def test_a_queue_that_is_named_twice(native: Any) -> None:
    side = Native(native)
    token = side.wait(5, 5, 6)
    side.arrived(6, b"six")
    side.arrived(5, b"five")
    assert side.take(token) == b"five"
    assert side.receive(6) == b"six"
    side.close()
    side.destroy()


def test_a_send_that_runs_too_early(native: Any) -> None:
    side = Native(native, peer_window=400)
    assert side.send(1, bytes(40)) >= 0
    token = side.lib.tu_link_wait_send(side.link, 1, 40)
    assert side.lib.tu_link_send_reserved(token, bytes(40), 40) == side.lib.TU_LINK_WAITS
    assert side.frame(wire.Grant(392, 1)) == 0
    assert side.links.due() == [token]
    assert side.lib.tu_link_send_reserved(token, bytes(40), 40) >= 0
    side.close()
    side.destroy()


def test_a_receive_waits_while_a_message_may_come_to_it(native: Any) -> None:
    """The receive in front may leave."""
    side = Native(native)
    token, item = begin(side, 1, 5)
    behind = side.wait(1)
    side.lib.tu_link_answers(side.link, True, False, False)
    assert side.links.due() == []
    side.lib.tu_link_leave(token)
    assert side.lib.tu_link_moved(side.link, item)
    side.lib.tu_link_save(side.link, item, b"12345")
    assert side.links.due() == [behind]
    assert side.take(behind) == b"12345"
    side.close()
    side.destroy()


def test_no_memory_to_save_a_message(native: Any) -> None:
    """The receive that gets it hears that; those behind it are not lost."""
    side = Native(native)
    lib = side.lib
    token, item = begin(side, 1, 5)
    lib.tu_link_leave(token)
    side.arrived(1, b"other")
    assert side.receive(1) is Answer.EMPTY
    assert lib.tu_link_moved(side.link, item)
    lib.tu_allocations_left = 0
    lib.tu_link_save(side.link, item, b"first")
    lib.tu_allocations_left = -1
    assert side.receive(1) is Answer.REFUSED
    assert (wire.CONTROL, wire.encode_frame(wire.Dropped(1, 5))) in side.links.sent()
    assert side.receive(1) == b"other"
    side.close()
    side.destroy()


def test_the_end_of_one_queue(native: Any) -> None:
    side = Native(native)
    side.arrived(1, b"last")
    tokens = [side.wait(1), side.wait(1), side.wait(2)]
    assert side.links.due() == tokens[:1]
    assert side.lib.tu_link_end_queue(side.link, 1, True, True) == 0
    assert side.take(tokens[0]) == b"last"
    assert side.links.due() == tokens[1:2]
    assert side.take(tokens[1]) is Answer.ENDED
    assert side.receive(1) is Answer.ENDED
    assert side.send(1, b"") == side.lib.TU_LINK_ENDED
    assert side.send(2, b"") >= 0
    side.lib.tu_link_leave(tokens[2])
    side.close()
    side.destroy()


def test_many_tag_queues(native: Any) -> None:
    """All are found, and forgotten when they were used."""
    side = Native(native, window=1 << 30)
    numbers = range(0, 1 << 20, 97)
    for number in numbers:
        side.arrived(number, number.to_bytes(4, "big"))
    assert side.counts().queues == len(numbers)
    held = side.ffi.new("tu_queue_counts_t *")
    assert side.lib.tu_link_count_queue(side.link, 97, held)
    assert (held.number, held.messages, held.bytes, held.with_sender, held.waiting) == (97, 1, 4, 0, 0)
    assert not side.lib.tu_link_count_queue(side.link, 98, held)
    for number in numbers:
        assert side.receive(number) == number.to_bytes(4, "big")
    assert side.counts().queues <= 1
    assert side.counts().unread == 0
    side.close()
    side.destroy()


# ---- messages that the caller hands to UCX ----


def test_a_message_that_the_caller_hands_to_ucx(native: Any) -> None:
    """The batch goes first. If UCX refuses the message, nothing has happened."""
    side = Native(native)
    lib = side.lib
    lib.tu_link_expect_more(side.link)
    assert side.send(1, b"batched") == lib.TU_LINK_BATCHED
    before = side.counts()
    assert lib.tu_link_may_send(side.link, 2, 100) == 0
    assert list(side.links.sent()) == [(1, b"batched")]
    assert (side.counts().credit, side.counts().sent) == (before.credit, 1)
    assert lib.tu_link_may_send(side.link, 2, 100) == 0
    assert side.links.post(2, bytes(100)) == 0
    lib.tu_link_was_sent(side.link, 2, 100)
    assert (before.credit - side.counts().credit, side.counts().sent) == (452, 2)
    assert side.counts().bytes_sent == 107
    assert lib.tu_link_may_send(side.link, 2, 4000) == lib.TU_LINK_WAITS
    lib.tu_link_answers(side.link, False, False, True)
    assert lib.tu_link_may_send(side.link, 2, 100) == lib.TU_LINK_ENDED
    side.close()
    side.destroy()


def test_a_message_that_had_to_wait_is_handed_to_ucx(native: Any) -> None:
    """If UCX refuses it, its task may try again, or leave: the next one gets the credit."""
    side = Native(native, peer_window=900)
    lib = side.lib
    assert side.send(1, bytes(40)) >= 0
    first, second, third = [lib.tu_link_wait_send(side.link, 1, 540) for _ in range(3)]
    assert lib.tu_token_may_send(first) == lib.TU_LINK_WAITS
    assert side.frame(wire.Grant(392, 1)) == 0
    assert side.links.due() == [first]
    assert lib.tu_token_may_send(first) == 0
    assert lib.tu_token_may_send(first) == 0
    assert lib.tu_token_may_send(second) == lib.TU_LINK_WAITS
    lib.tu_link_leave_send(first)
    assert side.links.due() == [second]
    lib.tu_link_expect_more(side.link)
    side.send_frame(wire.Leave(7, 0), later=True)
    list(side.links.sent())
    assert lib.tu_token_may_send(second) == 0
    assert [queue for queue, _ in side.links.sent()] == [wire.CONTROL]
    lib.tu_token_was_sent(second, 540)
    assert (side.counts().credit, side.counts().sent, side.counts().tokens) == (8, 2, 1)
    lib.tu_link_detach(side.link)
    assert lib.tu_token_may_send(third) == lib.TU_LINK_ENDED
    lib.tu_link_leave_send(third)
    side.close()
    side.destroy()


@pytest.mark.parametrize("waits", [False, True])
def test_a_batch_that_fails_before_a_message_of_the_caller(waits: bool, native: Any) -> None:
    side = Native(native, peer_window=900)
    lib = side.lib
    if waits:
        assert side.send(1, bytes(500)) >= 0
        token = lib.tu_link_wait_send(side.link, 1, 540)
        assert side.frame(wire.Grant(852, 1)) == 0
    side.send_frame(wire.Leave(7, 0), later=True)
    lib.fake_answer = -25
    if waits:
        assert lib.tu_token_may_send(token) == -25
        lib.tu_link_leave_send(token)
    else:
        assert lib.tu_link_may_send(side.link, 1, 40) == -25
    assert side.broken() == -25
    side.close()
    side.destroy()


def test_an_admission_is_used_by_a_message_of_the_caller(native: Any) -> None:
    side = Native(native, peer_window=900)
    lib = side.lib
    assert side.send(1, bytes(500)) >= 0
    assert lib.tu_link_may_send(side.link, 2, 540) == lib.TU_LINK_WAITS
    assert side.frame(wire.Admit(2, 0)) == 0
    assert lib.tu_link_may_send(side.link, 2, 540) == 0
    lib.tu_link_was_sent(side.link, 2, 540)
    assert lib.tu_link_may_send(side.link, 2, 540) == lib.TU_LINK_WAITS
    assert side.counts().credit == 900 - 852 - 892
    side.close()
    side.destroy()


# ---- messages that are fetched ----


def fetch(side: Native, number: int, data: bytes, *, whole: bool = True) -> Any:
    """A large message has arrived, and is on its way to memory of the link's."""
    room, item = side.ffi.new("char **"), side.ffi.new("tu_item_t **")
    assert side.lib.tu_link_fetch(side.link, number, 99, len(data), whole, item, room) == 0
    assert item[0]
    side.ffi.memmove(room[0], data, len(data))
    return item[0]


@pytest.mark.parametrize("size", [0, 2000, 1 << 20])
def test_a_message_is_fetched(size: int, native: Any) -> None:
    """It needs no receive, and is then as if it were small."""
    side = Native(native, window=1 << 21)
    data = random.Random(1).randbytes(size)
    item = fetch(side, 1, data)
    side.arrived(1, b"next")
    assert side.receive(1) is Answer.EMPTY
    assert not side.lib.tu_link_moved(side.link, item)
    assert side.receive(1, look=True) == data
    assert side.receive(1) == data
    assert side.receive(1) == b"next"
    assert (wire.CONTROL, wire.encode_frame(wire.Dropped(1, size))) not in side.links.sent()
    side.close()
    side.destroy()


def test_receives_wait_for_what_is_fetched(native: Any) -> None:
    """They need not begin a transfer; one in front, and one that comes later."""
    side = Native(native)
    front = side.wait(1, 2)
    item = fetch(side, 1, b"12345")
    assert side.links.due() == []
    assert side.take(front) is Answer.EMPTY
    behind = side.wait(1)
    side.arrived(1, b"other")
    assert side.links.due() == []
    assert not side.lib.tu_link_moved(side.link, item)
    assert side.links.due() == [front, behind]
    assert side.take(behind) == b"other"
    assert side.take(front) == b"12345"
    side.close()
    side.destroy()


def test_what_cannot_be_fetched(native: Any) -> None:
    """Without memory it is announced; of a queue that has ended, or from a peer that has no credit, it is refused."""
    side = Native(native)
    lib, room, item = side.lib, side.ffi.new("char **"), side.ffi.new("tu_item_t **")
    token = side.wait(1)
    lib.tu_allocations_left = 1
    assert lib.tu_link_fetch(side.link, 1, 98, 5, True, item, room) == 0
    lib.tu_allocations_left = -1
    assert (item[0], room[0]) == (side.ffi.NULL, side.ffi.NULL)
    assert side.take(token) is Answer.BEGIN
    assert lib.tu_links_handle(side.links.links) == 98
    lib.tu_link_leave(token)
    assert lib.tu_link_fetch(side.link, 1, 99, 4000, True, item, room) == INVALID_PARAM
    side.close()
    assert lib.tu_link_fetch(side.link, 1, 97, 5, True, item, room) == CANCELED
    assert item[0] == side.ffi.NULL
    assert lib.tu_links_discarded(side.links.links) == 98
    side.destroy()


def test_pieces_of_the_byte_stream_are_fetched(native: Any) -> None:
    side = Native(native, window=1 << 20)
    side.arrived(wire.STREAM, b"abc")
    items = [fetch(side, wire.STREAM, data) for data in (bytes(2000), b"")]
    assert side.receive(wire.STREAM) == b"abc"
    assert side.receive(wire.STREAM) is Answer.EMPTY
    token = side.wait(wire.STREAM)
    assert not side.lib.tu_link_moved(side.link, items[1])
    assert side.links.due() == []
    assert not side.lib.tu_link_moved(side.link, items[0])
    assert side.links.due() == [token]
    assert side.take(token, 1500) == bytes(1500)
    assert side.receive(wire.STREAM) == bytes(500)
    assert [side.receive(wire.STREAM) for _ in range(2)] == [b"", b""]
    side.close()
    side.destroy()


def lose(side: Native, _: Any) -> None:
    side.lib.tu_link_lose(side.link)


def leave_queue(side: Native, _: Any) -> None:
    side.lib.tu_link_leave_queue(side.link, 1)


def end_and_fail(side: Native, item: Any) -> None:
    side.lib.tu_link_answers(side.link, True, False, False)
    assert side.links.due() == []
    side.lib.tu_link_failed(side.link, item)


@pytest.mark.parametrize("how", [lose, leave_queue, end_and_fail, Native.close])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_fetched_is_dropped(how: Callable[..., None], fails: bool, native: Any) -> None:
    """Its memory is UCX's until the transfer is over; the receive ends at once."""
    side = Native(native)
    lib = side.lib
    item = fetch(side, 1, bytes(2000), whole=False)
    side.arrived(1, b"behind")
    token = side.wait(1)
    allocated = lib.fake_allocated
    assert not lib.tu_item_is_dropped(item)
    how(side, *[item] * (how is not Native.close))
    assert side.links.due() == [token]
    assert side.take(token) is Answer.ENDED
    if how is not end_and_fail:
        assert lib.tu_item_is_dropped(item)
        assert lib.fake_allocated < allocated
        if fails:
            lib.tu_link_failed(side.link, item)
        else:
            assert not lib.tu_link_moved(side.link, item)
    if how is not Native.close:
        side.close()
    side.destroy()


def test_what_is_fetched_is_not_with_the_sender(native: Any) -> None:
    side = Native(native)
    item = fetch(side, 1, b"fetched", whole=False)
    assert side.lib.tu_link_announced(side.link, 1, 98, 9, False) == 0
    side.lib.tu_link_forget_with_sender(side.link)
    assert side.lib.tu_links_discarded(side.links.links) == 98
    assert not side.lib.tu_link_moved(side.link, item)
    assert side.receive(1) == b"fetched"
    assert side.receive(1) is Answer.EMPTY
    side.close()
    side.destroy()


@pytest.mark.parametrize("forgets", [False, True])
def test_what_is_fetched_and_then_too_old(forgets: bool, native: Any) -> None:
    """A transfer goes on when newer messages arrive, or the conversation is over; then its message is dropped."""
    side = Native(native, window=8000)
    side.lib.tu_link_newest(side.link, 1)
    item = fetch(side, 1, bytes(2000))
    side.arrived(1, b"newer", b"older", b"newer")
    assert side.counts().unread == 2512 + 357
    if forgets:
        side.lib.tu_link_forget_queue(side.link, 1)
        assert side.lib.tu_item_is_dropped(item)
    assert not side.lib.tu_link_moved(side.link, item)
    assert side.receive(1) == (Answer.EMPTY if forgets else b"newer")
    assert side.receive(1) is Answer.EMPTY
    assert side.counts().unread == 0
    side.close()
    side.destroy()


# ---- instead of UCX, and what is to be done ----


def test_an_outlet(native: Any) -> None:
    """It gets messages, batches and control frames instead of UCX, and answers for it."""
    side = Native(native)
    lib, answers, got = side.lib, [0, 0, 0, 0, -25, -3], []

    @side.ffi.callback("int64_t(void *, uint32_t, const void *, size_t)")  # type: ignore[misc]
    def outlet(context: Any, number: int, data: Any, length: int) -> int:
        assert context == side.ffi.NULL
        got.append((number, side.ffi.buffer(data, length)[:]))
        return answers.pop(0)

    lib.tu_link_divert(side.link, outlet, side.ffi.NULL)
    lib.fake_answer = lib.FAKE_PENDING
    assert side.send(1, bytes(2000)) == 0
    lib.tu_link_expect_more(side.link)
    assert side.send(1, b"batched") == lib.TU_LINK_BATCHED
    side.send_frame(wire.Ping(1), later=False)
    assert [number for number, _ in got] == [1, wire.BATCH, wire.CONTROL]
    assert not list(side.links.sent())
    assert side.counts().kept == 0
    assert not lib.tu_links_news(side.links.links)
    lib.tu_link_divert(side.link, side.ffi.NULL, side.ffi.NULL)
    lib.fake_answer = lib.FAKE_DONE
    side.send_frame(wire.Ping(2), later=False)
    assert list(side.links.sent()) == [(wire.CONTROL, wire.encode_frame(wire.Ping(2)))]
    lib.tu_link_divert(side.link, outlet, side.ffi.NULL)
    side.send_frame(wire.Ping(3), later=False)
    lib.tu_links_progressed(side.links.links)
    before = side.counts().credit
    assert side.send(1, bytes(20)) == -25
    assert side.counts().credit == before
    assert side.broken() == 0
    side.send_frame(wire.Ping(4), later=False)
    assert side.broken() == -3
    assert not answers
    side.close()
    side.destroy()


def test_news(native: Any) -> None:
    side = Native(native)
    lib = side.lib
    links = side.links.links
    assert lib.tu_links_news(links) == 0
    token = side.wait(1)
    side.arrived(1, b"1")
    for _ in range(2):
        assert lib.tu_links_news(links) == lib.TU_NEWS_DUE
    assert side.links.due() == [token]
    assert lib.tu_links_news(links) == 0
    lib.tu_link_leave(token)
    lib.tu_link_expect_more(side.link)
    assert side.send(1, b"12345") == lib.TU_LINK_BATCHED
    for _ in range(2):
        assert lib.tu_links_news(links) == lib.TU_NEWS_BATCHES
    lib.fake_answer = lib.FAKE_PENDING
    lib.tu_links_flush(links)
    assert [lib.tu_links_news(links) for _ in range(2)] == [lib.TU_NEWS_POSTED, 0]
    assert lib.tu_link_announced(side.link, 2, 99, 5, False) == 0
    assert lib.tu_links_news(links) == 0
    lib.tu_link_leave_queue(side.link, 2)
    for _ in range(2):
        assert lib.tu_links_news(links) == lib.TU_NEWS_DISCARDED
    assert lib.tu_links_discarded(links) == 99
    assert lib.tu_links_news(links) == 0
    lib.fake_complete(0, -3)
    for _ in range(2):
        assert lib.tu_links_news(links) == lib.TU_NEWS_BROKEN
    assert side.broken() == -3
    assert lib.tu_links_news(links) == 0
    side.close()
    side.destroy()


def test_what_is_there(native: Any) -> None:
    side = Native(native, window=1 << 16)
    lib = side.lib
    assert side.links.queues(side.link) == []
    assert lib.tu_link_next_filled(side.link, -1) == lib.TU_LINK_EMPTY
    side.arrived(7, b"123", b"456")
    side.arrived(wire.STREAM, b"abcdef")
    assert lib.tu_link_announced(side.link, 3, 99, 2000, False) == 0
    assert lib.tu_link_announced(side.link, 3, 98, 2000, True) == 0
    assert side.receive(wire.STREAM, 2) == b"ab"
    tokens = [side.wait(7), side.wait(7, 5)]
    assert sorted(side.links.queues(side.link)) == [
        (3, 2, 4000, 1, 0),
        (5, 0, 0, 0, 1),
        (7, 2, 6, 0, 2),
        (wire.STREAM, 1, 4, 0, 0),
    ]
    assert len(side.links.queues(side.link, 2)) == 2
    assert lib.tu_link_list(side.link, side.ffi.NULL, 0) == 4
    assert [lib.tu_link_next_filled(side.link, after) for after in (-1, 3, 7)] == [3, 3, 3]
    side.arrived(7, b"789")
    side.arrived(0, b"000")
    assert [lib.tu_link_next_filled(side.link, after) for after in (-1, 0, 3, 7)] == [0, 3, 7, 0]
    for token in tokens:
        lib.tu_link_leave(token)
    assert not side.counts().stalled
    side.frame(wire.Stalled(side.counts().grants_sent))
    for number in (0, 3, 7, wire.STREAM):
        assert side.counts().stalled
        lib.tu_link_leave_queue(side.link, number)
    assert not side.counts().stalled
    side.close()
    side.destroy()


# ---- no memory ----


def scenario(module: Any, allocations: int) -> tuple[list[object], list[tuple[int, bytes]], int]:
    """Does a little of everything. After so many allocations the next one fails, and those after it in the same call.

    What has failed is done again. Returns what came of each step, what was sent, and how often memory was refused; if
    the link has broken, up to there.
    """
    side = Native(module)
    lib = side.lib
    trace: list[object] = []
    tokens: list[Any] = []
    sends: list[Any] = []
    fetched: list[Any] = []
    refused = 0

    def wait(*numbers: int) -> int:
        token = side.wait(*numbers)
        if not token:
            return NO_MEMORY
        tokens.append(token)
        return 0

    def wait_send(number: int, size: int) -> int:
        token = lib.tu_link_wait_send(side.link, number, size)
        if not token:
            return NO_MEMORY
        sends.append(token)
        return 0

    def fetch(number: int, handle: int) -> int:
        data, item = side.ffi.new("char **"), side.ffi.new("tu_item_t **")
        status = lib.tu_link_fetch(side.link, number, handle, 4, True, item, data)
        if status == 0 and not item[0]:  # it was announced
            lib.tu_link_forget_queue(side.link, number)
            return NO_MEMORY
        if status == 0:
            data[0][0:4] = b"data"
            fetched.append(item[0])
        return int(status)

    steps: list[Callable[[], object]] = [
        lambda: lib.tu_link_expect_more(side.link),
        lambda: side.send(1, b"a") >= 0 or NO_MEMORY,
        lambda: side.send(2, b"b") >= 0 or NO_MEMORY,
        lambda: side.arrived(3, b"one", b"two", b"six"),
        lambda: wait(3),
        lambda: wait(3, 5),
        lambda: side.receive(3),
        lambda: side.take(tokens.pop()),
        lambda: wait(5, 6, 7),
        lambda: side.send(4, bytes(3000)),
        lambda: wait_send(4, 3000),
        lambda: wait_send(8, 30),
        lambda: side.frame(wire.Stalled(0)),
        lambda: side.frame(wire.Stalled(1)),
        lambda: side.receive(9),
        lambda: side.frame(wire.Admit(8, 2)),
        lambda: side.frame(wire.Grant(706, 2)),
        lambda: len(side.links.due()),
        lambda: lib.tu_link_send_reserved(sends.pop(0), bytes(3000), 3000) >= 0,
        lambda: lib.tu_link_newest(side.link, 10),
        lambda: lib.tu_link_end_queue(side.link, 11, True, True),
        lambda: side.arrived(10, b"x", b"y"),
        lambda: side.receive(10),
        lambda: side.send_frame(wire.Leave(7, 0), later=True),
        lambda: lib.tu_link_announced(side.link, 12, 99, 4, False),
        lambda: lib.tu_link_announced(side.link, 12, 98, 4, True),
        lambda: wait(12),
        lambda: side.take(tokens[-1]),
        lambda: lib.tu_link_drop(tokens.pop(), 12),
        lambda: lib.tu_links_discarded(side.links.links),
        lambda: lib.tu_links_discarded(side.links.links),
        lambda: lib.tu_link_open_queue(side.link, 13),
        lambda: fetch(14, 97),
        lambda: lib.tu_link_moved(side.link, fetched.pop()),
        lambda: side.receive(14),
        lambda: side.send_frame(wire.Leave(8, 0), later=True),
        lambda: side.frame(wire.Grant(3512, 3)),
        lambda: lib.tu_link_may_send(side.link, 15, 8),
        lambda: lib.tu_link_was_sent(side.link, 15, 8),
    ]
    lib.tu_allocations_left = allocations
    for step in steps:
        answer = step()
        again = answer in (NO_MEMORY, Answer.REFUSED)
        if lib.tu_allocations_left == 0 and (again or side.link_status()):
            lib.tu_allocations_left = -1
            refused += 1
            if again:
                answer = step()
        trace.append(answer)
        if side.link_status():
            trace.pop()
            break
    lib.tu_allocations_left = -1
    lib.tu_links_flush(side.links.links)
    sent = list(side.links.sent())
    for item in fetched:
        lib.tu_link_failed(side.link, item)
    for token in tokens:
        lib.tu_link_leave(token)
    for token in sends:
        lib.tu_link_leave_send(token)
    side.close()
    side.destroy()
    return trace, sent, refused


def test_memory_that_is_refused(native: Any) -> None:
    """What was refused can be done again, or the link has broken: nothing is lost without a word."""
    trace, sent, _ = scenario(native, -1)
    assert len(trace) == 39
    refused = 0
    for allocations in range(60):
        got, got_sent, times = scenario(native, allocations)
        refused += times
        assert trace[: len(got)] == got, allocations
        assert sent[: len(got_sent)] == got_sent, allocations
        if not times:
            assert len(got) == len(trace)
    assert refused > 15
