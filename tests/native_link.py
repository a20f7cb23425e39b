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
from link_model import Admit, Answer, Dropped, Frame, Grant, Message, Refused, Side, Stalled
from link_world import World

from trio_ucx._rules import wire
from trio_ucx._rules.wire import PACKED_HEAD

HERE = Path(__file__).parent
NATIVE = HERE.parent / "trio_ucx" / "_native"
NO_MEMORY, INVALID_PARAM = -4, -5
NAME = "_link_without_ucx"
MOST_ADMISSIONS = 3
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
    # In a process of its own: what setuptools does to the process that compiles, would disturb other tests.
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
    ffi.cdef("typedef struct tu_endpoint tu_endpoint_t;\n" + api + (HERE / "native_link.h").read_text())
    ffi.set_source(
        NAME,
        '#include "link/link.h"\n#include "native_link.h"\n' + build_ffi.PREAMBLE,
        sources=[str(path) for path in [*sorted((native / "link").glob("*.c")), HERE / "native_link.c"]],
        include_dirs=[str(native), str(HERE)],
        define_macros=[
            ("TU_EXTENSIONS", ""),
            ("TU_MOST_ADMISSIONS", str(MOST_ADMISSIONS)),
            ("TU_IDLE_QUEUES", "1"),
            *((name, f"fake_{name.removeprefix('clock_')}") for name in REPLACED),
        ],
        extra_compile_args=["-std=gnu11", "-O1", "-g", "-UNDEBUG", *options, *compiler_arguments],
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
        self.links = self.lib.tu_links_create()
        self.out = self.ffi.buffer(self.lib.tu_links_out(self.links), self.lib.TU_LINK_OUT)
        self._log = self.ffi.new("char[]", 1 << 20)
        self._tokens = self.ffi.new("tu_token_t *[]", 256)

    def open(self, window: int, peer_window: int, threshold: int, peer_threshold: int, *, defers: bool = True) -> Any:
        """Opens a link; NULL: there is no memory."""
        terms = self.ffi.new("tu_link_terms_t *", (1, 2, window, peer_window, threshold, peer_threshold, defers))
        return self.lib.tu_link_open(self.links, self.lib.fake_endpoint(), terms)

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
            return bytes(self.out[: min(verdict, len(self.out))])
        return {
            lib.TU_LINK_EMPTY: Answer.EMPTY,
            lib.TU_LINK_ENDED: Answer.ENDED,
            lib.TU_LINK_TOO_LONG: Answer.TOO_LONG,
            NO_MEMORY: Answer.REFUSED,
        }[verdict]


class Different(AssertionError):
    """The C code does something else than the model."""


def compare(what: str, model: object, native: object) -> None:
    if model != native:
        raise Different(f"{what}: the model {model!r}, the C code {native!r}")


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
        super().__init__(*arguments, most_admissions=MOST_ADMISSIONS)
        self.due: _Due = _Due()
        self.native = NativeLinks(module)
        self.lib, self.ffi, self.chance = module.lib, module.ffi, chance
        self.link = self.native.open(*arguments, defers=chance.random() < 0.8)
        #: By the model's token, the one in C.
        self.tokens: dict[int, Any] = {}
        #: What the model has sent, and the C code has not been seen to send.
        self.expected: collections.deque[tuple[int, bytes]] = collections.deque()
        self._seen = 0
        self._alone = False
        self._number = self.ffi.new("uint32_t *")
        self._counts = self.ffi.new("tu_link_counts_t *")
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
            (self.credit, self.unread, self.sent, self.received, self.grants, self.granted, len(self.line)),
            (
                counts.credit, counts.unread, counts.sent, counts.received, counts.grants, counts.grants_sent,
                counts.line,
            ),
        )  # fmt: skip
        compare("tokens", len(self.waits) + len(self.waiting), counts.tokens)
        compare("kept", lib.fake_pending(), sum(side.kept() for side in self.sides))

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
        native = self._sent(self.lib.tu_link_send(self.link, number, data, len(data)))
        answer = super().send(number, data, native is Answer.REFUSED)
        compare("send", answer, native)
        self._check()
        return answer

    def wait_send(self, number: int, size: int, token: int) -> None:
        self._begin()
        self.tokens[token] = self.lib.tu_link_wait_send(self.link, number, size)
        super().wait_send(number, size, token)
        self._check()

    def send_reserved(self, token: int, data: bytes, refused: bool = False) -> Answer:
        self._begin()
        self._refusal()
        native = self._sent(self.lib.tu_link_send_reserved(self._forget(token), data, len(data)))
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
        native = self.native.answer(self.lib.tu_link_take(handle, limit, False, self._number))
        with self._model_alone():
            number, answer = super().take(token, limit)
        compare("take", answer, native)
        if answer is Answer.EMPTY:
            self.tokens[token] = handle
        elif answer is not Answer.ENDED:
            compare("take, from", number, self._number[0])
        self._check()
        return number, answer

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
        self._begin()
        self._compare_due()
        super().end(receives=receives, drains=drains, sends=sends)
        self.lib.tu_link_answers(self.link, self.receives_end, self.drains, self.sends_end)
        names = {token: name for name, token in self.tokens.items()}
        compare("due at the end", sorted(self.due.new), sorted(names.get(token, -1) for token in self.native.due()))
        self.due.new = []
        self._check()

    def arrived(self, frame: Frame) -> None:
        self._begin()
        if isinstance(frame, Message):
            queue, data = frame
        elif isinstance(frame, Dropped):
            return
        else:
            queue, data = wire.CONTROL, wire.encode_frame(_TO_WIRE[type(frame)](*frame))
        native = self.lib.tu_link_arrived(self.link, queue, len(data), 1, data)
        try:
            super().arrived(frame)
        except Refused:
            compare("arrived", INVALID_PARAM, native)
            raise
        compare("arrived", 0, native)
        self._check()

    def close(self) -> None:
        """Closes the C side: everything is freed."""
        self.lib.tu_link_close(self.link)
        for token in self.tokens.values():
            self.lib.tu_link_leave(token)
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
    world.finish()
    for side in sides:
        side.close()
    compare("allocated", 0, module.lib.fake_allocated)


def fuzz(module: Any, seed: int, steps: int) -> None:
    """What a peer may send, whatever it is: nothing is damaged."""
    chance = random.Random(f"{seed}, bytes")
    links = NativeLinks(module)
    lib, ffi = module.lib, module.ffi
    link = links.open(4096, 4096, chance.choice([0, 64]), chance.choice([0, 64]))
    lib.fake_answer, lib.fake_refusal = lib.FAKE_DONE, 0
    number, tokens, sends = ffi.new("uint32_t *"), [], []
    frames = [wire.Grant(8, 1), wire.Stalled(0), wire.Admit(1, 5), wire.Dropped(1, 9), wire.Ping(4), wire.Goodbye()]
    queues = [0, 1, 2, wire.STREAM, wire.CONVERSATIONS, wire.ANSWERS + 1, wire.PIECES, wire.BATCH, wire.LONG]
    for _ in range(steps):
        what = chance.randrange(6)
        if what == 0:
            data = bytearray(wire.encode_frame(chance.choice(frames)))
            for _ in range(chance.randrange(3)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            del data[chance.randrange(1, 40) :]
            answer = lib.tu_link_arrived(link, wire.CONTROL, len(data), 1, bytes(data))
            try:
                ours = isinstance(wire.decode_frame(bytes(data)), wire.Grant | wire.Stalled | wire.Admit)
            except wire.ProtocolError:
                ours = False
            compare("a frame of its own", ours, answer != 1)
        elif what == 1:
            queue = chance.choice([*queues, chance.getrandbits(32)])
            length, count = chance.randrange(1025), chance.randrange(1, 4)
            answer = lib.tu_link_arrived(link, queue, length, count, chance.randbytes(length * count))
            assert answer in (0, 1, INVALID_PARAM)
        elif what == 2:
            lib.tu_link_receive(link, chance.choice(queues), chance.choice([0, 8, 1 << 40]), chance.random() < 0.5)
        elif what == 3 and len(tokens) < 5:
            tokens.append(lib.tu_link_wait(link, [chance.randrange(3), wire.CONVERSATIONS], 2))
        elif what == 4 and tokens:
            token = tokens.pop(chance.randrange(len(tokens)))
            if chance.random() < 0.5:
                lib.tu_link_leave(token)
            elif lib.tu_link_take(token, 8, False, number) == lib.TU_LINK_EMPTY:
                tokens.append(token)
        elif sends and chance.random() < 0.5:
            lib.tu_link_leave_send(sends.pop())
        else:
            data = bytes(chance.randrange(1025))
            if lib.tu_link_send(link, chance.randrange(3), data, len(data)) == lib.TU_LINK_WAITS:
                sends.append(lib.tu_link_wait_send(link, chance.randrange(3), len(data)))
        list(links.sent())
    lib.tu_link_close(link)
    for token in tokens:
        lib.tu_link_leave(token)
    for token in sends:
        lib.tu_link_leave_send(token)
    lib.tu_links_destroy(links.links)
    lib.fake_log_take(links._log)
    compare("allocated", 0, lib.fake_allocated)


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
