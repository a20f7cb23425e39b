"""The C code of links (``_native/link``), built without UCX, beside its model (``link_model.py``).

python tests/native_link.py SEED STEPS [COMPILER OPTION...]
"""

from __future__ import annotations

import collections
import importlib.util
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cffi
from link_model import Admit, Answer, Dropped, Frame, Grant, Item, Message, Queue, Refused, Side, Stalled, State
from link_world import QUEUES, World

from trio_ucx._rules import wire
from trio_ucx._rules.wire import PACKED_HEAD

HERE = Path(__file__).parent
NATIVE = HERE.parent / "trio_ucx" / "_native"
NO_MEMORY, INVALID_PARAM, CANCELED = -4, -5, -16
NAME = "_link_without_ucx"
MOST_ADMISSIONS = 3
BYTES_AHEAD = 5000
#: Functions of the C library whose place ``native_link.c`` takes.
REPLACED = ["clock_gettime", "malloc", "calloc", "free"]
#: By kind, the control frame of the library for each frame of the model.
_TO_WIRE = {Grant: wire.Grant, Stalled: wire.Stalled, Admit: wire.Admit, Dropped: wire.Dropped}


def build(folder: Path, *options: str, native: Path = NATIVE) -> Any:
    """Compiles it, and loads the module, which has ``ffi`` and ``lib``.

    It allows three admissions, and keeps one idle tag queue.

    Args:
        options: for the compiler.
        native: the folder of the C code.
    """
    # In a process of its own: setuptools changes the process that it compiles in.
    command = [sys.executable, __file__, "build", str(folder), str(native), *options]
    path = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_module(folder: str, native: Path, *options: str) -> str:
    """Compiles it, and returns the path of the module."""
    spec = importlib.util.spec_from_file_location("build_ffi", HERE.parent / "build_ffi.py")
    assert spec is not None and spec.loader is not None
    build_ffi = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_ffi)
    compiler_arguments, _ = build_ffi.ucx_location()
    ffi = cffi.FFI()
    api = (native / "link" / "cdef.h").read_text()
    ffi.cdef(
        "typedef struct tu_endpoint tu_endpoint_t;\ntypedef struct tu_worker tu_worker_t;\n"
        + api
        + (HERE / "native_link.h").read_text()
    )
    ffi.set_source(
        NAME,
        '#include "link/link.h"\n#include "native_link.h"\n' + build_ffi.PREAMBLE,
        sources=[str(path) for path in [*sorted((native / "link").glob("*.c")), HERE / "native_link.c"]],
        include_dirs=[str(native), str(HERE)],
        define_macros=[
            ("TU_EXTENSIONS", ""),
            ("TU_MOST_ADMISSIONS", str(MOST_ADMISSIONS)),
            ("TU_BYTES_AHEAD", str(BYTES_AHEAD)),
            ("TU_IDLE_QUEUES", "1"),
            *((name, f"fake_{name.removeprefix('clock_')}") for name in REPLACED),
        ],
        extra_compile_args=["-std=gnu11", "-O1", "-g", "-UNDEBUG", "-fno-wrapv", *options, *compiler_arguments],
        extra_link_args=[option for option in options if option.startswith("-fsanitize")],
    )
    return str(ffi.compile(tmpdir=folder))


def split_batch(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages of a batch, with their queues."""
    place = 0
    while place < len(data):
        queue, length, count = PACKED_HEAD.unpack_from(data, place)
        place += PACKED_HEAD.size
        for _ in range(count):
            yield queue, data[place : place + length]
            place += length


class NativeLinks:
    """The links of a worker, in C."""

    def __init__(self, module: Any) -> None:
        self.ffi, self.lib = module.ffi, module.lib
        self.links = self.lib.tu_links_create(self.ffi.NULL)
        self.news = self.lib.tu_links_has_news(self.links)
        self.out = self.ffi.buffer(self.lib.tu_links_out(self.links), self.lib.TU_LINK_OUT)
        self._log = self.ffi.new("char[]", 1 << 20)
        self._tokens = self.ffi.new("tu_token_t *[]", 256)

    def open(self, window: int, peer_window: int, threshold: int, peer_threshold: int, *, defers: bool = True) -> Any:
        """Opens a link; NULL: there is no memory."""
        terms = self.ffi.new("tu_link_terms_t *", (1, 2, window, peer_window, threshold, peer_threshold, defers))
        return self.lib.tu_link_open(self.links, self.lib.fake_endpoint(), terms)

    def post(self, number: int, data: bytes) -> int:
        """Hands a message for the link's peer to UCX, as a caller of ``tu_link_may_send`` does."""
        return int(self.lib.tu_tag_send_one(self.lib.fake_endpoint(), data, len(data), 0, 2 << 32 | number))

    def queues(self, link: Any, most: int = 64) -> list[tuple[int, int, int, int, int]]:
        """Of each queue: its number, messages, bytes, messages that may be with the sender, and receives that wait."""
        counts = self.ffi.new("tu_queue_counts_t[]", most)
        count = min(self.lib.tu_link_list(link, counts, most), most)
        return [(each.number, each.messages, each.bytes, each.with_sender, each.waiting) for each in counts[0:count]]

    def sent(self) -> Iterator[tuple[int, bytes]]:
        """What was given to UCX, by queue; batches are taken apart."""
        size = self.lib.fake_log_take(self._log)
        data, place = self.ffi.buffer(self._log, size)[:], 0
        while place < size:
            tag, length = struct.unpack_from("=QQ", data, place)
            place += 16
            assert tag >> 32 == 2
            message = (tag & 0xFFFFFFFF, data[place : place + length])
            yield from split_batch(message[1]) if message[0] == wire.BATCH else [message]
            place += length

    def due(self) -> list[Any]:
        """The tokens that have become due."""
        count = self.lib.tu_links_due(self.links, self._tokens, len(self._tokens))
        return [self._tokens[index] for index in range(count)]

    def answer(self, verdict: int) -> bytes | Answer:
        """What a receive has got."""
        lib = self.lib
        if verdict >= 0:
            return bytes(self.ffi.buffer(self.lib.tu_links_taken(self.links), verdict))
        return {
            lib.TU_LINK_EMPTY: Answer.EMPTY,
            lib.TU_LINK_ENDED: Answer.ENDED,
            lib.TU_LINK_TOO_LONG: Answer.TOO_LONG,
            lib.TU_LINK_BEGIN: Answer.BEGIN,
            lib.TU_LINK_SAVE: Answer.SAVE,
            NO_MEMORY: Answer.REFUSED,
        }[verdict]


class Different(AssertionError):
    """The C code does not do what the model does."""


def compare(what: str, model: object, native: object) -> None:
    if model != native:
        raise Different(f"{what}: the model {model!r:.100}, the C code {native!r:.100}")


class _Due(collections.deque[int]):
    """Tokens that are due, and, since the last look, new."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[int] = []

    def append(self, token: int) -> None:
        super().append(token)
        self.new.append(token)

    def extend(self, tokens: Any) -> None:
        for token in tokens:
            self.append(token)


class PairedSide(Side):
    """A side of the model that is compared, after each step, with one in C.

    Args:
        chance: when UCX refuses a message, when it keeps memory, and when the thread sleeps.
        sides: all that there are, to which it adds itself.
    """

    def __init__(self, module: Any, chance: random.Random, sides: list[PairedSide], *arguments: int) -> None:
        super().__init__(*arguments, most_admissions=MOST_ADMISSIONS, bytes_ahead=BYTES_AHEAD)
        self.due: _Due = _Due()
        self.native = NativeLinks(module)
        self.lib, self.ffi, self.chance = module.lib, module.ffi, chance
        self.link = self.native.open(*arguments, defers=chance.random() < 0.8)
        if chance.random() < 0.2:
            self.lib.tu_link_divert(self.link, self.ffi.addressof(self.lib, "fake_outlet"), self.ffi.NULL)
        #: By the model's token, the one in C.
        self.tokens: dict[int, Any] = {}
        #: The messages whose transfers have begun, in C.
        self.items: dict[Item, Any] = {}
        #: UCX's handles of the messages that were announced, and the queues of those that were not discarded.
        self.handles: dict[Item, int] = {}
        self.announcements: dict[Item, int] = {}
        #: What the model has sent, and the C code has not been seen to send.
        self.expected: collections.deque[tuple[int, bytes]] = collections.deque()
        self._seen = self._requests = 0
        #: What the last tu_links_news has told, and may still be so.
        self._told = 0
        self._alone = False
        self._number = self.ffi.new("uint32_t *")
        self._counts = self.ffi.new("tu_link_counts_t *")
        self._data = self.ffi.new("char **")
        self._item = self.ffi.new("tu_item_t **")
        self.sides = sides
        sides.append(self)

    def _begin(self) -> None:
        """Before each step."""
        self._seen = len(self.frames)
        lib, chance = self.lib, self.chance
        lib.fake_answer = chance.choice([lib.FAKE_DONE, lib.FAKE_DONE, lib.FAKE_PENDING, lib.FAKE_DONE_INSIDE])
        lib.fake_clock += chance.choice([0, 10_000, 10_000_000])
        if chance.random() < 0.2:
            lib.tu_links_progressed(self.native.links)
        self._requests = lib.fake_pending() + lib.fake_freed

    def _refusal(self) -> int:
        self.lib.fake_refusal = NO_MEMORY if self.chance.random() < 0.05 else 0
        return int(self.lib.fake_refusal)

    def _check(self) -> None:
        """After each step."""
        native, lib = self.native, self.lib
        for frame in list(self.frames)[self._seen :]:
            if isinstance(frame, Message):
                self.expected.append((frame.queue, frame.data))
            else:
                self.expected.append((wire.CONTROL, wire.encode_frame(_TO_WIRE[type(frame)](*frame))))
        self._seen = len(self.frames)
        flushed = self.chance.random() < 0.2
        if flushed:
            lib.tu_links_flush(native.links)
            self._told &= ~lib.TU_NEWS_BATCHES
        for each in native.sent():
            compare("sent", self.expected.popleft() if self.expected else None, each)
        if flushed:
            compare("sent, after the batch", 0, len(self.expected))
        while lib.fake_pending() > 40 or (lib.fake_pending() and self.chance.random() < 0.3):
            if not lib.fake_complete(self.chance.randrange(lib.fake_pending()), 0):
                raise Different("memory that UCX has was written to")
        if self.chance.random() < 0.5:
            self._compare_due()
        lib.tu_link_count(self.link, self._counts)
        counts = self._counts
        compare(
            "counts",
            (self.credit, self.unread, self.sent, self.received, self.grants, self.granted),
            (counts.credit, counts.unread, counts.sent, counts.received, counts.grants, counts.grants_sent),
        )
        compare("tokens", len(self.waits) + len(self.waiting), counts.tokens)
        compare("line", len(self.line), counts.line)
        compare("stalled", self.stalled, counts.stalled)
        self._compare_news()
        if self.chance.random() < 0.2:
            self._compare_queues()
        compare("kept", lib.fake_pending(), sum(side.kept() for side in self.sides))

    def _compare_news(self) -> None:
        """What is to be done; and which messages that UCX holds nobody wants."""
        lib, native = self.lib, self.native
        dropped = [
            item
            for item, number in self.announcements.items()
            if item.state is State.HELD and item not in self.queue(number).messages
        ]
        expected = [
            (self.due.new, lib.TU_NEWS_DUE),
            (self.expected, lib.TU_NEWS_BATCHES),
            (lib.fake_pending() + lib.fake_freed > self._requests, lib.TU_NEWS_POSTED),
            (dropped, lib.TU_NEWS_DISCARDED),
        ]
        has_news, news = self.native.news[0], lib.tu_links_news(native.links)
        compare("news", sum(bit for there, bit in expected if there), news)
        compare("news since the last look", True, has_news or not news & ~self._told)
        self._told = news & (lib.TU_NEWS_BATCHES | lib.TU_NEWS_DUE)
        discarded = set(iter(lambda: lib.tu_links_discarded(native.links), 0))
        compare("discarded", {self.handles[item] for item in dropped}, discarded)
        for item in dropped:
            del self.announcements[item]

    def _compare_queues(self) -> None:
        there = {
            number: (
                number,
                len(queue.messages),
                sum(len(item.data) - item.taken for item in queue.messages),
                sum(item.with_sender for item in queue.messages),
                len(queue.receives),
            )
            for number, queue in self.queues.items()
        }
        listed = self.native.queues(self.link)
        compare("queues", {}, {number: counts for number, *counts in listed if there[number] != (number, *counts)})
        missing = there.keys() - {number for number, *_ in listed}
        compare("forgotten queues", [], [number for number in missing if any(there[number][1:])])
        filled = [number for number in sorted(there) if number < wire.CONTROL and self._has_more(self.queues[number])]
        after = self.chance.choice([-1, *QUEUES])
        first = next((number for number in filled if number > after), filled[0] if filled else self.lib.TU_LINK_EMPTY)
        compare("filled", first, self.lib.tu_link_next_filled(self.link, after))

    def _has_more(self, queue: Queue) -> bool:
        return len(queue.messages) > len(queue.receives)

    @contextmanager
    def _model_alone(self) -> Iterator[None]:
        """What the model's methods call of each other is not compared."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def _compare_due(self) -> None:
        names = {token: name for name, token in self.tokens.items()}
        compare("due", self.due.new, [names.get(token, -1) for token in self.native.due()])
        self.due.new = []

    def _compare_dues(self) -> None:
        """In any order."""
        names = {token: name for name, token in self.tokens.items()}
        compare("due", sorted(self.due.new), sorted(names.get(token, -1) for token in self.native.due()))
        self.due.new = []

    @contextmanager
    def _step_in_queues(self) -> Iterator[None]:
        """A step that changes several queues, or a queue in several ways: who is woken is compared, not their order."""
        self._begin()
        self._compare_due()
        yield
        self._compare_dues()
        self._check()

    def _forget(self, token: int) -> Any:
        """The task of a token goes on, whether it has heard of it or not. Returns the token in C."""
        if token in self.due.new:
            self.due.new.remove(token)
        return self.tokens.pop(token)

    def kept(self) -> int:
        """How many frames and batches UCX has of it."""
        self.lib.tu_link_count(self.link, self._counts)
        return int(self._counts.kept)

    # ---- sending ----

    def _sent(self, verdict: int) -> Answer:
        lib = self.lib
        if verdict >= 0:
            return Answer.SENT
        return {
            lib.TU_LINK_WAITS: Answer.WAITS, lib.TU_LINK_ENDED: Answer.ENDED, NO_MEMORY: Answer.REFUSED
        }[verdict]  # fmt: skip

    def send(self, number: int, data: bytes, refused: bool = False) -> Answer:
        self._begin()
        self._refusal()
        native = self._sent(self._send(number, data))
        answer = super().send(number, data, native is Answer.REFUSED)
        compare("send", answer, native)
        self._check()
        return answer

    def _send(self, number: int, data: bytes) -> int:
        """Sends a message, or hands it to UCX itself."""
        if self.chance.random() < 0.7:
            return int(self.lib.tu_link_send(self.link, number, data, len(data)))
        verdict = int(self.lib.tu_link_may_send(self.link, number, len(data)))
        if verdict == 0:
            verdict = self.native.post(number, data)
            if verdict >= 0:
                self.lib.tu_link_was_sent(self.link, number, len(data))
        return verdict

    def _send_reserved(self, token: Any, number: int, data: bytes) -> int:
        if self.chance.random() < 0.7:
            return int(self.lib.tu_link_send_reserved(token, data, len(data)))
        verdict = int(self.lib.tu_token_may_send(token))
        if verdict == 0:
            verdict = self.native.post(number, data)
        if verdict >= 0:
            self.lib.tu_token_was_sent(token, len(data))
        else:
            self.lib.tu_link_leave_send(token)
        return verdict

    def wait_send(self, number: int, size: int, token: int) -> None:
        self._begin()
        self.tokens[token] = self.lib.tu_link_wait_send(self.link, number, size)
        super().wait_send(number, size, token)
        self._check()

    def send_reserved(self, token: int, data: bytes, refused: bool = False) -> Answer:
        self._begin()
        self._refusal()
        native = self._sent(self._send_reserved(self._forget(token), self.waiting[token][0].number, data))
        with self._model_alone():
            answer = super().send_reserved(token, data, native is Answer.REFUSED)
        compare("send_reserved", answer, native)
        self._check()
        return answer

    def leave_send(self, token: int) -> None:
        if self._alone:
            super().leave_send(token)
            return
        self._begin()
        self.lib.tu_link_leave_send(self._forget(token))
        super().leave_send(token)
        self._check()

    # ---- receiving ----

    def receive(self, number: int, limit: int) -> bytes | Answer:
        self._begin()
        native = self.native.answer(self.lib.tu_link_receive(self.link, number, limit, False))
        answer = super().receive(number, limit)
        compare("receive", answer, native)
        self._check()
        return answer

    def wait(self, numbers: list[int], token: int) -> None:
        self._begin()
        self.tokens[token] = self.lib.tu_link_wait(self.link, numbers, len(numbers))
        super().wait(numbers, token)
        self._check()

    def take(self, token: int, limit: int) -> tuple[int, bytes | Answer]:
        self._begin()
        handle = self._forget(token)
        arrived = self.holding.get(token)
        verdict = self.lib.tu_link_take(handle, limit, False, self._number)
        with self._model_alone():
            number, answer = super().take(token, limit)
        if isinstance(answer, bytes) and arrived is not None:  # it is in the receive's own buffer
            compare("take, the length", len(answer), verdict)
        else:
            compare("take", answer, self.native.answer(verdict))
        if answer in (Answer.EMPTY, Answer.BEGIN, Answer.SAVE):
            self.tokens[token] = handle
        if answer not in (Answer.EMPTY, Answer.ENDED):
            compare("take, from", number, self._number[0])
        if answer is Answer.BEGIN:
            item = self.queue(number).messages[self.queue(number).receives.index(token)]
            compare("the length", len(item.data), self.lib.tu_links_length(self.native.links))
        self._check()
        return number, answer

    def begin(self, token: int, number: int) -> None:
        self._begin()
        native = self.lib.tu_link_begin(self.tokens[token], number)
        super().begin(token, number)
        self.items[self.holding[token]] = native
        self._check()

    def drop(self, token: int, number: int) -> None:
        self._begin()
        self.lib.tu_link_drop(self._forget(token), number)
        with self._model_alone():
            super().drop(token, number)
        self._check()

    def moved(self, item: Item, number: int) -> bool:
        self._begin()
        dropped = self.lib.tu_item_is_dropped(self.items[item])
        compare("dropped", item not in self.queue(number).messages, dropped)
        native = self.lib.tu_link_moved(self.link, self.items[item])
        left = super().moved(item, number)
        compare("moved", left, native)
        if item.state is State.MOVING:
            del self.items[item]  # it was dropped before
        self._check()
        return left

    def save(self, item: Item, number: int) -> None:
        self._begin()
        native = self.items[item]
        if item.holder is not None:
            assert self.lib.tu_token_holds(self.tokens[item.holder]) == native
        self.lib.tu_link_save(self.link, native, item.data)
        super().save(item, number)
        self._check()

    def leave(self, token: int) -> None:
        if self._alone:
            super().leave(token)
            return
        self._begin()
        self.lib.tu_link_leave(self._forget(token))
        super().leave(token)
        self._check()

    def newest(self, number: int) -> None:
        self._begin()
        self.lib.tu_link_newest(self.link, number)
        super().newest(number)
        self._check()

    def end(self, *, receives: bool = False, drains: bool = False, sends: bool = False) -> None:
        with self._step_in_queues():
            super().end(receives=receives, drains=drains, sends=sends)
            self.lib.tu_link_answers(self.link, self.receives_end, self.drains, self.sends_end)

    def arrived(self, frame: Frame) -> None:
        self._begin()
        if isinstance(frame, Message):
            queue, data = frame
        elif isinstance(frame, Dropped):
            return
        else:
            queue, data = wire.CONTROL, wire.encode_frame(_TO_WIRE[type(frame)](*frame))
        dropped = isinstance(frame, Message) and self.queue(queue).ended
        native = self._arrives(queue, data)
        try:
            super().arrived(frame)
        except Refused:
            compare("arrived", INVALID_PARAM, native)
            raise
        if native is not None:
            compare("arrived", CANCELED if dropped else 0, native)
        self._check()

    def _arrives(self, queue: int, data: bytes) -> int | None:
        """A message arrives in C. Returns the status, or None: Python was not asked."""
        taken = False
        if self.chance.random() < 0.7:
            refers = self.chance.random() < 0.2
            self.lib.tu_link_refer(self.link, refers)
            taken = self.lib.tu_links_take(self.native.links, 1 << 32 | queue, len(data), 1, data)
            compare("taken although it is Python's", False, taken and (refers or (queue == wire.STREAM and not data)))
        return None if taken else int(self.lib.tu_link_arrived(self.link, queue, len(data), 1, data))

    def failed(self, item: Item, number: int) -> None:
        with self._step_in_queues():
            self.lib.tu_link_failed(self.link, self.items.pop(item))
            super().failed(item, number)

    def lose(self) -> None:
        with self._step_in_queues():
            self.lib.tu_link_lose(self.link)
            super().lose()

    def forget_with_sender(self) -> None:
        with self._step_in_queues():
            self.lib.tu_link_forget_with_sender(self.link)
            super().forget_with_sender()

    def announced(self, frame: Message, whole: bool, fetch: bool) -> Item:
        self._begin()
        size, handle = len(frame.data), len(self.handles) + 1
        arguments = self.link, frame.queue, handle, size, whole
        if fetch:
            verdict = self.lib.tu_link_fetch(*arguments, self._item, self._data)
        else:
            verdict = self.lib.tu_link_announced(*arguments)
        compare("announced", CANCELED if self.queue(frame.queue).ended else 0, verdict)
        item = super().announced(frame, whole, fetch)
        self.handles[item] = handle
        if verdict == 0:
            self.announcements[item] = frame.queue
        if verdict == 0 and fetch:
            self.items[item] = self._item[0]
            self.ffi.memmove(self._data[0], item.data, size)
        self._check()
        return item

    def close(self) -> None:
        """Closes the C side: everything ends, and is freed."""
        self.lib.tu_link_close(self.link)
        for item, native in self.items.items():
            if item.state is State.MOVING:  # until then the buffer of its receive is UCX's
                assert not self.lib.tu_link_moved(self.link, native)
        for token in [self._forget(token) for token in self.waits]:
            compare("take", self.lib.TU_LINK_ENDED, self.lib.tu_link_take(token, 8, False, self._number))
        for token in self.tokens.values():
            compare("send", self.lib.TU_LINK_ENDED, self.lib.tu_link_send_reserved(token, b"", 0))
        self.tokens.clear()
        while self.lib.fake_pending():
            self.lib.fake_complete(0, 0)
        self.lib.tu_links_destroy(self.native.links)
        self.lib.fake_log_take(self.native._log)


def play_paired(module: Any, seed: int, steps: int, **options: bool) -> None:
    """Random steps of two sides, each compared with one in C."""
    chance = random.Random(f"{seed}, UCX")
    sides: list[PairedSide] = []
    world = World(seed, lambda *arguments: PairedSide(module, chance, sides, *arguments), **options)
    for _ in range(steps):
        world.step()
    if seed % 3:
        world.finish()
    for side in sides:
        side.close()
    compare("allocated", 0, module.lib.fake_allocated)


class Fuzz:
    """A link whose peer sends anything, and whose program does anything that is allowed."""

    FRAMES = (wire.Grant(8, 1), wire.Stalled(0), wire.Admit(1, 5), wire.Dropped(1, 9), wire.Ping(4), wire.Goodbye())
    QUEUES = (0, 1, 2, wire.STREAM, wire.CONVERSATIONS, wire.ANSWERS + 1, wire.PIECES, wire.BATCH, wire.LONG)

    def __init__(self, module: Any, seed: int) -> None:
        self.chance = random.Random(f"{seed}, bytes")
        self.lib, self.ffi = module.lib, module.ffi
        self.lib.fake_answer, self.lib.fake_refusal = self.lib.FAKE_DONE, 0
        self.links = NativeLinks(module)
        self.link = self.links.open(4096, 4096, self.chance.choice([0, 64]), self.chance.choice([0, 64]))
        self.number = self.ffi.new("uint32_t *")
        self.receives: list[Any] = []
        #: Tokens, and the lengths of their messages.
        self.sends: list[tuple[Any, int]] = []
        self.transfers: list[Any] = []

    def step(self) -> None:
        steps = [self.frame, self.message, self.announce, self.receive, self.wait, self.run, self.run, self.move]
        self.chance.choice([*steps, self.send, self.run_send, self.leave_send])()
        if self.chance.random() < 0.01:
            self.drop()
        list(self.links.sent())
        self.lib.tu_links_discarded(self.links.links)
        self.lib.tu_links_due(self.links.links, self.links._tokens, self.chance.randrange(3))

    def frame(self) -> None:
        data = bytearray(wire.encode_frame(self.chance.choice(self.FRAMES)))
        for _ in range(self.chance.randrange(3)):
            data[self.chance.randrange(len(data))] = self.chance.randrange(256)
        del data[self.chance.randrange(40) :]
        try:
            ours = isinstance(wire.decode_frame(bytes(data)), wire.Grant | wire.Stalled | wire.Admit)
        except wire.ProtocolError:
            ours = False
        answer = self.lib.tu_link_arrived(self.link, wire.CONTROL, len(data), 1, bytes(data))
        compare("a frame of its own", ours, answer != 1)

    def queue(self) -> int:
        return self.chance.choice([*self.QUEUES, self.chance.getrandbits(32)])

    def message(self) -> None:
        length, count, queue = self.chance.randrange(1025), self.chance.randrange(1, 4), self.queue()
        answer = self.lib.tu_link_arrived(self.link, queue, length, count, self.chance.randbytes(length * count))
        assert answer in ((0, 1, INVALID_PARAM) if queue == wire.CONTROL else (0, INVALID_PARAM, CANCELED))

    def announce(self) -> None:
        """A large message arrives, and is perhaps fetched."""
        length, whole = self.chance.choice([0, 8, 1 << 16, (1 << 64) - 1]), self.chance.random() < 0.5
        queue, data = self.queue(), self.ffi.new("char **")
        item, fetch = self.ffi.new("tu_item_t **"), self.chance.random() < 0.5
        if fetch:
            answer = self.lib.tu_link_fetch(self.link, queue, 7, length, whole, item, data)
        else:
            answer = self.lib.tu_link_announced(self.link, queue, 7, length, whole)
        assert answer in (0, INVALID_PARAM, CANCELED)
        if item[0]:
            self.transfers.append(item[0])
            self.ffi.memmove(data[0], bytes(length), length)

    def receive(self) -> None:
        limit = self.chance.choice([0, 8, 1 << 40])
        self.lib.tu_link_receive(self.link, self.chance.choice(self.QUEUES), limit, self.chance.random() < 0.5)

    def wait(self) -> None:
        if len(self.receives) < 5:
            numbers = self.chance.sample([0, 1, 2, wire.CONVERSATIONS], 2)
            self.receives.append(self.lib.tu_link_wait(self.link, numbers, 2))

    def run(self) -> None:
        """A task takes its message, or begins its transfer, and perhaps leaves."""
        if not self.receives:
            return
        lib, token = self.lib, self.receives.pop(self.chance.randrange(len(self.receives)))
        answer = lib.tu_link_take(token, 8, False, self.number)
        if answer == lib.TU_LINK_BEGIN and self.chance.random() < 0.3:
            lib.tu_link_drop(token, self.number[0])
            return
        if answer == lib.TU_LINK_BEGIN:
            self.transfers.append(lib.tu_link_begin(token, self.number[0]))
        elif answer == lib.TU_LINK_SAVE:
            self.save(lib.tu_token_holds(token))
        elif answer != lib.TU_LINK_EMPTY:
            return
        if self.chance.random() < 0.7:
            self.receives.append(token)
        else:
            self.leave(token)

    def save(self, item: Any) -> None:
        self.lib.tu_link_save(self.link, item, bytes(1 << 16))

    def leave(self, token: Any) -> None:
        item = self.lib.tu_token_holds(token)
        if item:
            self.save(item)
        self.lib.tu_link_leave(token)

    def move(self) -> None:
        """A transfer ends, or fails."""
        if self.transfers:
            item = self.transfers.pop(self.chance.randrange(len(self.transfers)))
            if self.chance.random() < 0.1:
                self.lib.tu_link_failed(self.link, item)
            elif self.lib.tu_link_moved(self.link, item):
                self.save(item)

    def drop(self) -> None:
        """Messages are dropped."""
        lib, queue = self.lib, self.chance.choice([0, 1, wire.STREAM, wire.CONVERSATIONS])
        self.chance.choice([
            lambda: lib.tu_link_lose(self.link),
            lambda: lib.tu_link_forget_with_sender(self.link),
            lambda: lib.tu_link_leave_queue(self.link, queue),
            lambda: lib.tu_link_newest(self.link, queue),
            lambda: lib.tu_link_forget_queue(self.link, wire.ANSWERS + 1),
        ])()  # fmt: skip

    def send(self) -> None:
        """Sends a message, perhaps by handing it to UCX itself, which may refuse it."""
        lib, queue, data = self.lib, self.chance.randrange(3), bytes(self.chance.randrange(1025))
        if self.chance.random() < 0.5:
            answer = lib.tu_link_send(self.link, queue, data, len(data))
        else:
            answer = lib.tu_link_may_send(self.link, queue, len(data))
            if answer == 0 and self.chance.random() < 0.7:
                lib.tu_link_was_sent(self.link, queue, len(data))
        if answer == lib.TU_LINK_WAITS:
            self.sends.append((lib.tu_link_wait_send(self.link, queue, len(data)), len(data)))

    def run_send(self) -> None:
        """A task sends its message if there is credit for that."""
        if self.sends:
            token, length = self.sends.pop(0)
            answer = self.lib.tu_token_may_send(token)
            if answer == self.lib.TU_LINK_WAITS:
                self.sends.append((token, length))
            elif answer == 0 and self.chance.random() < 0.5:
                self.lib.tu_token_was_sent(token, length)
            else:
                self.lib.tu_link_send_reserved(token, bytes(length), length)

    def leave_send(self) -> None:
        if self.sends:
            self.lib.tu_link_leave_send(self.sends.pop()[0])

    def close(self) -> None:
        """Afterwards nothing may be allocated any more."""
        self.lib.tu_link_close(self.link)
        while self.transfers:
            assert not self.lib.tu_link_moved(self.link, self.transfers.pop())
        for token in self.receives:
            assert self.lib.tu_link_take(token, 8, False, self.number) == self.lib.TU_LINK_ENDED
        while self.sends:
            self.leave_send()
        self.lib.tu_links_destroy(self.links.links)
        self.lib.fake_log_take(self.links._log)
        compare("allocated", 0, self.lib.fake_allocated)


def fuzz(module: Any, seed: int, steps: int) -> None:
    """What a peer may send, whatever it is: nothing is damaged."""
    one = Fuzz(module, seed)
    for _ in range(steps):
        one.step()
    one.close()


def main(seed: int, steps: int, *options: str) -> None:
    """Plays so many steps, and fuzzes as many; the options are the compiler's."""
    with tempfile.TemporaryDirectory() as folder:
        module = build(Path(folder), *options)
        for begun in range(0, steps, 500):
            choice = seed + begun // 500
            play_paired(module, choice, 500, leave_due=choice % 2 == 1, several=choice % 4 > 1, ends=choice % 8 == 7)
            fuzz(module, choice, 500)
    print(f"{steps} steps from seed {seed} on: as the model")


if __name__ == "__main__":
    if sys.argv[1] == "build":
        print(compile_module(sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
