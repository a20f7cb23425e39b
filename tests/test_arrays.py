"""Arrays as messages: what numpy has arrives as it was, goes where it shall, and nothing else is taken for it."""

from __future__ import annotations

import array
import ctypes
import json
import random
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from foreign_arrays import described
from helpers import assert_free, nothing_happens, open_pair, pattern
from sample_arrays import DTYPES, SHAPES, assert_same, filled, some_layout
from timing import Stopwatch

import trio_ucx
from trio_ucx import UnexpectedMessage, ucp
from trio_ucx._arrays import describe, header
from trio_ucx._arrays.header import MAGIC, PREFIX_SIZE, BadHeader


@asynccontextmanager
async def two_ends(
    transports: str = "tcp,sm,self", **options: Any
) -> AsyncIterator[tuple[trio_ucx.Connection, trio_ucx.Connection]]:
    config = {"TLS": transports}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with open_pair(worker, other, **options) as pair:
            yield pair


async def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Calls them at the same time, and returns their results: large messages wait for their receiver."""
    results: list[Any] = [None] * len(functions)

    async def call(index: int) -> None:
        results[index] = await functions[index]()

    async with trio.open_nursery() as nursery:
        for index in range(len(functions)):
            nursery.start_soon(call, index)
    return results


# ---- what arrives ----


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_every_dtype_shape_and_layout(transports: str, dtype: Any, chance: random.Random) -> None:
    async with two_ends(transports) as (here, there):
        for shape in SHAPES:
            values = filled(chance, np.dtype(dtype), shape)
            sent = some_layout(chance, values)
            _, got = await at_once(partial(here.send_array, sent), there.receive_array)
            assert_same(got, sent)
            assert got.flags.writeable and got.flags.aligned
            got[...] = got
            out = some_layout(chance, np.zeros(shape, dtype))
            if not out.flags.writeable:
                out = out.copy()
            _, same = await at_once(partial(here.send_array, sent), partial(there.receive_array, out=out))
            assert same is out
            assert_same(out, values, order=False)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(40))
async def test_random_lists_and_dicts(seed: int, chance: random.Random) -> None:
    async with two_ends(chance.choice(["tcp", "tcp,sm,self"])) as (here, there):
        for _ in range(10):
            arrays = [
                some_layout(chance, filled(chance, np.dtype(chance.choice(DTYPES)), chance.choice(SHAPES)))
                for _ in range(chance.choice([0, 1, 2, 5, 100]))
            ]
            sent: Any = arrays if chance.random() < 0.5 else {f"ü{i}": one for i, one in enumerate(arrays)}
            _, got = await at_once(partial(here.send_arrays, sent), there.receive_arrays)
            assert type(got) is type(sent) and len(got) == len(sent)
            if isinstance(sent, dict):
                assert list(got) == list(sent)
            for index in sent if isinstance(sent, dict) else range(len(sent)):
                assert_same(got[index], sent[index])
            into: Any = [np.zeros_like(one) for one in arrays]
            if isinstance(sent, dict):
                named = list(zip(sent, into, strict=True))
                if chance.random() < 0.5:
                    chance.shuffle(named)
                into = dict(named)
            _, same = await at_once(partial(here.send_arrays, sent), partial(there.receive_arrays, into=into))
            assert same is into
            for index in sent if isinstance(sent, dict) else range(len(sent)):
                assert_same(into[index], sent[index], order=False)


async def test_channels_and_conversations() -> None:
    async with two_ends() as (here, there):
        for size in (3, 2**20):
            sent = np.arange(size)
            async with here.open_conversation() as talk:
                await talk.send_array(sent[:3])
                heard = await anext(there.conversations())
                assert_same(await heard.receive_array(), sent[:3])
                _, got = await at_once(partial(heard.send_arrays, {"a": sent}), talk.receive_arrays)
                assert_same(got["a"], sent)
                out = np.zeros_like(sent)
                await at_once(partial(heard.send_array, sent), partial(talk.receive_array, out=out))
                assert_same(out, sent)
            left, right = here.channel(5), there.channel(5)
            _, got = await at_once(partial(left.send_arrays, [sent]), partial(right.receive_arrays, into=[out]))
            assert got[0] is out


async def test_large_arrays_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go from the sender's memory to the receiver's array: nothing of their size is allocated meanwhile."""
    sent, out = np.ones(2**22), np.zeros(2**22)
    async with two_ends() as (here, there):
        monkeypatch.setattr("trio_ucx._link.receiving.new_bytes", None)
        await at_once(partial(here.send_array, sent), partial(there.receive_array, out=out))
        await at_once(partial(here.send_arrays, [sent, sent]), partial(there.receive_arrays, into=[out, out.copy()]))
        pool = bytearray(sent.nbytes + 1000)
        _, got = await at_once(partial(here.send_array, sent), partial(there.receive_array, allocate=lambda n: pool))
        assert np.shares_memory(got, np.frombuffer(pool, np.uint8))
        assert_same(got, sent)


async def test_memory_of_a_pool() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        asked.append(nbytes)
        return memoryview(bytearray(nbytes + 100))

    async with two_ends() as (here, there):
        for size in (0, 10, 10_000, 2**20):
            sent = np.arange(size, dtype=">i4")
            _, got = await at_once(partial(here.send_array, sent), partial(there.receive_array, allocate=allocate))
            assert_same(got, sent)
            assert asked.pop() >= sent.nbytes
            assert not asked
            _, both = await at_once(
                partial(here.send_arrays, {"a": sent, "b": sent[::2]}), partial(there.receive_arrays, allocate=allocate)
            )
            assert_same(both["b"], sent[::2], order=False)
            asked.clear()


async def test_two_tasks_that_receive_get_one_array_each() -> None:
    """Also when one of them gets another message than the one it has allocated memory for."""
    async with two_ends() as (here, there):
        sent = [np.full(size, size) for size in (10, 2000, 100_000, 30)]

        async def send_all() -> None:
            for one in sent:
                await here.send_array(one)

        for allocate in (None, bytearray):
            got = await at_once(send_all, *(partial(there.receive_array, allocate=allocate) for _ in sent))
            assert sorted(len(one) for one in got[1:]) == sorted(map(len, sent))
            assert all((one == len(one)).all() for one in got[1:])


# ---- other kinds of arrays ----


def test_what_has_the_buffer_protocol() -> None:
    for code in "bBhHiIlLqQfd":
        values = array.array(code, [1, 2, 3])
        assert describe.describe(values, "send").kind.dtype == np.asarray(values).dtype.str
    view = memoryview(np.zeros((2, 3), "<f4"))
    assert describe.describe(view, "send").kind == header.ArrayKind("<f4", (2, 3))
    assert describe.describe(b"abc", "send").kind == header.ArrayKind("|u1", (3,))
    assert describe.describe((ctypes.c_double * 4)(), "send").kind == header.ArrayKind("<f8", (4,))
    assert describe.describe(memoryview(bytearray(4)).cast("?"), "send").kind.dtype == "|b1"


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


async def test_arrays_that_are_not_numpys() -> None:
    async with two_ends() as (here, there):
        sent = array.array("d", range(5000))
        out = array.array("d", bytes(8 * 5000))
        await at_once(partial(here.send_array, sent), partial(there.receive_array, out=out))
        assert out == sent
        with pytest.raises(TypeError, match="read-only bytes"):
            await there.receive_array(out=bytes(8))
        with pytest.raises(TypeError, match="format '<P'|pointers"):
            await here.send_array((ctypes.c_void_p * 2)())
        with pytest.raises(TypeError, match="format 'N'|format '<N'|format 'T"):
            await here.send_array((Pair * 2)())


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [(0, 16, "<i2"), (1, 8, "|u1"), (2, 32, "<f4"), (4, 16, "bfloat16"), (5, 64, "<c8"), (6, 8, "|b1")]
    + [(10, 8, "float8_e4m3fn"), (12, 8, "float8_e5m2")],
)
@pytest.mark.parametrize("count", [6, 30_000])
async def test_dlpack(code: int, bits: int, dtype: str, count: int) -> None:
    """As torch's tensors: sent, and received into, without numpy's help; bfloat16 has no dtype of numpy's."""
    size = bits // 8
    memory = (ctypes.c_char * (size * count)).from_buffer_copy(pattern(size * count))
    target = (ctypes.c_char * (size * count))()
    shape = (count // 3, 3)
    async with two_ends() as (here, there):
        tensor = described(memory, code=code, bits=bits, shape=shape)
        out = described(target, code=code, bits=bits, shape=shape)
        await at_once(partial(here.send_array, tensor), partial(there.receive_array, out=out))
        assert bytes(target) == bytes(memory)
        transposed = described(memory, code=code, bits=bits, shape=(3, count // 3), strides=(1, 3))
        assert describe.describe(transposed, "send").kind == header.ArrayKind(dtype, (3, count // 3), "F")
        if dtype[0] in "<|":
            _, got = await at_once(partial(here.send_array, transposed), there.receive_array)
            plain = np.frombuffer(memory, dtype).reshape(shape).T
            assert_same(got, plain)
        with pytest.raises(ValueError, match="non-contiguous"):
            await here.send_array(described(memory, code=code, bits=bits, shape=(2, 2), strides=(4, 1)))


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="a long double is a double here")
async def test_long_doubles_are_refused_by_both_sides() -> None:
    """numpy has one name for those of x86-64 and of AArch64. An older release sends them."""
    real, pair = np.dtype("g"), np.dtype("G")
    nested = np.dtype([("a", "<i4"), ("b", [("c", "<f8"), ("d", real, (2, 3))])])
    memory = (ctypes.c_char * 32)()
    async with two_ends() as (here, there):
        for dtype in (real, real.newbyteorder(), pair, nested, np.dtype((real, 2))):
            array = np.zeros(3, dtype)
            for send in (here.send_array, lambda array: here.send_arrays({"a": np.zeros(1), "b": array})):
                with pytest.raises(ValueError, match="complex128" if dtype == pair else "float64") as caught:
                    await send(array)  # type: ignore[operator]
                assert type(caught.value) is ValueError  # rpc tells clients the name
        with pytest.raises(ValueError, match="float64"):
            await here.send_array(described(memory, code=2, bits=128, shape=(2,)))
        with pytest.raises(ValueError, match="float64"):
            await here.receive_array(out=np.zeros(2, real))
        for written in (real.str, '[["a",[["b","<f16"]]]]'):
            await here.send(with_header([None, [written, [2], "C"]], bytes(32)))
            await expect_refused(there, "differ between kinds of machines")
            assert len(await there.receive()) > 32
        await here.send_array(np.zeros(3, real).view(f"V{real.itemsize}"))
        assert (await there.receive_array()).view(real).shape == (3,)


async def test_elements_that_numpy_does_not_have() -> None:
    memory = (ctypes.c_char * 8)()
    async with two_ends() as (here, there):
        await here.send_array(described(memory, code=4, bits=16, shape=(4,)))
        try:
            import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            with pytest.raises(UnexpectedMessage, match="install ml_dtypes"):
                await there.receive_array()
            out = (ctypes.c_char * 8)()
            await there.receive_array(out=described(out, code=4, bits=16, shape=(4,)))
        else:
            got = await there.receive_array()
            assert got.dtype == ml_dtypes.bfloat16
            await here.send_array(got)
            assert (await there.receive_array()).dtype == ml_dtypes.bfloat16


# ---- what does not go together ----


async def expect_refused(there: trio_ucx.Connection, match: str, **how: Any) -> None:
    several = "into" in how or how.pop("several", False)
    with pytest.raises(UnexpectedMessage, match=match):
        await (there.receive_arrays if several else there.receive_array)(**how)


@pytest.mark.parametrize("size", [4, 5000, 200_000])
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_a_message_that_does_not_fit_stays(transports: str, size: int) -> None:
    """The error names both, the buffers are free, and the next receive gets the message."""
    sent = np.arange(2 * size, dtype="<f4").reshape(size, 2)
    async with two_ends(transports) as (here, there):

        async def look() -> None:
            of_message = rf"dtype <f4, shape \({size}, 2\)"
            wrong = {
                "same size": np.zeros((size, 2), "<i4"),
                "order of bytes": np.zeros((size, 2), ">f4"),
                "other shape": np.zeros((2, size), "<f4"),
                "longer": np.zeros((size + 1, 2), "<f4"),
                "shorter": np.zeros(3, "<f4"),
            }
            for out in wrong.values():
                both = rf"{of_message}.*received into an array \(dtype {out.dtype.str}, shape \({out.shape[0]},"
                await expect_refused(there, both, out=out)
            await expect_refused(there, "call receive_array", several=True)
            await expect_refused(there, of_message, into=[np.zeros((size, 2), "<f4")])
            await expect_refused(there, of_message, into={"a": np.zeros((size, 2), "<f4")})
            out = np.asfortranarray(np.zeros((size, 2), "<f4"))
            assert await there.receive_array(out=out) is out
            assert (out == sent).all()

        await at_once(partial(here.send_array, sent), look)

        async def look_at_several() -> None:
            await expect_refused(there, "dict of 2 arrays.*call receive_arrays")
            for into in ({"a": sent.copy()}, {"a": sent.copy(), "c": sent.copy()}, [sent.copy(), sent.copy()]):
                await expect_refused(there, "dict of 2 arrays", into=into)
            assert list(await there.receive_arrays()) == ["a", "b"]

        await at_once(partial(here.send_arrays, {"a": sent, "b": sent}), look_at_several)


def with_header(text: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    size = PREFIX_SIZE + len(encoded)
    size += -size % 16
    prefix = struct.pack("<4sI", MAGIC, size if length is None else length)
    return prefix + encoded.ljust(size - PREFIX_SIZE) + data


#: What a peer that does not keep to the format may send.
LIES: dict[str, bytes] = {
    "nothing": b"",
    "bytes": b"just bytes, and no header at all",
    "no length": MAGIC,
    "no header": MAGIC + bytes(4),
    "a longer header than message": with_header([None, ["<f4", [1], "C"]], bytes(4), length=2**23),
    "an odd header": with_header([None, ["<f4", [1], "C"]], bytes(4), length=33),
    "no JSON": with_header(b"{'"),
    "no list": with_header({"a": 1}),
    "no UTF-8": with_header(b"\xff\xfe[[["),
    "deep": with_header(b"[" * 100_000),
    "empty": with_header([]),
    "no array": with_header([None]),
    "two arrays": with_header([None, ["<f4", [1], "C"], ["<f4", [1], "C"]], bytes(20)),
    "more than there is": with_header([None, ["<f4", [2**40], "C"]], bytes(4)),
    "overflow": with_header([None, ["<f4", [2**61, 2**61, 2**61], "C"]], bytes(4)),
    "less than there is": with_header([None, ["<f4", [1], "C"]], bytes(8)),
    "a negative length": with_header([None, ["<f4", [-1], "C"]]),
    "two negative lengths": with_header([None, ["<f4", [-1, -1], "C"]], bytes(4)),
    "half a length": with_header([None, ["<f4", [0.5], "C"]]),
    "a huge integer": with_header(b'[null,["<f4",[' + b"9" * 5000 + b'],"C"]]'),
    "true": with_header([None, ["<f4", [True], "C"]], bytes(4)),
    "many dimensions": with_header([None, ["<f4", [1] * 65, "C"]], bytes(4)),
    "order": with_header([None, ["<f4", [1], "K"]], bytes(4)),
    "objects": with_header([None, ["|O", [1], "C"]], bytes(8)),
    "objects inside": with_header([None, ['[["a","|O"]]', [1], "C"]], bytes(8)),
    "a dtype to be evaluated": with_header([None, ["__import__('os').system('true')", [1], "C"]], bytes(4)),
    "fields to be evaluated": with_header([None, ['[["a","(exit())f4"]]', [1], "C"]], bytes(4)),
    "no such dtype": with_header([None, ["<f3", [1], "C"]], bytes(3)),
    "no such unit": with_header([None, ["<M8[parsec]", [1], "C"]], bytes(8)),
    "a division by zero": with_header([None, ["<M8[s/0]", [1], "C"]], bytes(8)),
    "a division by zero inside": with_header([None, ['[["a",[["b","<m8[s/0]"]]]]', [1], "C"]], bytes(8)),
    "no seconds": with_header([None, ["<M8[0s]", [1], "C"]], bytes(8)),
    "a dtype that is a list": with_header([None, [["<f4"], [1], "C"]], bytes(4)),
    "no fields": with_header([None, ["[", [1], "C"]], bytes(4)),
    "wrong fields": with_header([None, ["[1]", [1], "C"]], bytes(4)),
    "deep fields": with_header([None, ["[" * 60_000, [1], "C"]], bytes(4)),
    "a long dtype": with_header([None, ["[" + " " * 70_000, [1], "C"]], bytes(4)),
    "names": with_header([["a", "a"], ["<f4", [1], "C"], ["<f4", [1], "C"]], bytes(20)),
    "names that are numbers": with_header([[1], ["<f4", [1], "C"]], bytes(4)),
    "fewer names": with_header([["a"], ["<f4", [1], "C"], ["<f4", [1], "C"]], bytes(20)),
    "a short description": with_header([None, ["<f4", [1]]], bytes(4)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_header_that_lies(lie: str) -> None:
    """It is refused, costs no memory, and the message stays as what it is: bytes."""
    async with two_ends() as (here, there):

        async def look() -> None:
            for how in ({}, {"out": np.zeros(1, "<f4")}, {"allocate": bytearray}):
                await expect_refused(
                    there, "no arrays|no such array|no dtype|call receive_arrays|is to be received into", **how
                )
            for how in ({"several": True}, {"into": [np.zeros(1, "<f4")]}):
                await expect_refused(there, "was not taken", **how)
            assert await there.receive() == LIES[lie]

        await at_once(partial(here.send, LIES[lie]), look)


async def test_a_long_header_is_not_read() -> None:
    """Reading it would stop the event loop for seconds."""
    many = b"[0" + b',["|u1",[0],"C"]' * 100_000 + b"]"
    async with two_ends() as (here, there):

        async def look() -> None:
            for how in ({"several": True}, {"into": [np.zeros(1)]}):
                with Stopwatch():
                    await expect_refused(there, "its header would have", **how)
            await there.receive()

        await at_once(partial(here.send, with_header(many)), look)
        with pytest.raises(trio_ucx.UnexpectedMessage, match="elements without bytes"):
            await here.send(with_header([None, ["|S0", [2**61], "C"]]))
            await there.receive_array()


async def test_dtypes_of_peers_are_not_kept_for_ever() -> None:
    async with two_ends() as (here, there):
        dtype = [(f"field{i}", "<f8") for i in range(100)]
        await here.send_array(np.zeros(2, dtype))
        kept = header._numpy_dtype_again.cache_info().currsize
        assert (await there.receive_array()).dtype == dtype
        assert header._numpy_dtype_again.cache_info().currsize == kept


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.sample(20)
def test_random_damage(seed: int) -> None:
    """Whatever bytes change, a header is read, or refused as a header."""
    chance = random.Random(seed)
    head, layout = header.encode(False, ("a", "b"), (header.ArrayKind("<f4", (3, 4)), header.ArrayKind("|S3", (2,))))
    for _ in range(200):
        damaged = bytearray(head)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            size = header.header_size(bytes(damaged), layout.size)
            found = header.decode(bytes(damaged[:size]))
        except BadHeader:
            continue
        assert found.size >= 0 and len(found.offsets) == len(found.arrays)


async def test_bad_arguments() -> None:
    class WithMask(np.ma.MaskedArray):  # type: ignore[type-arg]
        pass

    async with two_ends() as (here, there):
        for wrong in (np.ma.masked_array([1, 2], [0, 1]), WithMask([1])):
            with pytest.raises(TypeError, match="mask"):
                await here.send_array(wrong)
        for thing in ([1, 2], 5, "text", None, {"a": np.zeros(1)}, object()):
            with pytest.raises(TypeError, match="must be a numpy array"):
                await here.send_array(thing)
        with pytest.raises(TypeError, match="pointers"):
            await here.send_array(np.array([object()]))
        with pytest.raises(TypeError, match="see send_array for one"):
            await here.send_arrays(np.zeros(2))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="names of arrays must be strings, not 1"):
            await here.send_arrays({1: np.zeros(2)})  # type: ignore[dict-item]
        frozen = np.zeros(2)
        frozen.flags.writeable = False
        with pytest.raises(TypeError, match="read-only"):
            await there.receive_array(out=frozen)
        with pytest.raises(TypeError, match="not both"):
            await there.receive_array(out=np.zeros(2), allocate=bytearray)
        with pytest.raises(TypeError, match="allocate must be a function"):
            await there.receive_array(allocate=5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="tag"):
            await there.receive_array(tag="a")  # type: ignore[arg-type]
        await here.send_array(np.arange(9))
        for memory, match in ((bytes(500), "writable"), ([1], "writable"), (bytearray(3), "has returned 3 bytes")):
            with pytest.raises((TypeError, ValueError), match=match):
                await there.receive_array(allocate=lambda n, memory=memory: memory)
        with pytest.raises(ZeroDivisionError):
            await there.receive_array(allocate=lambda n: 1 // 0)
        assert (await there.receive_array() == np.arange(9)).all()
        with pytest.raises(ValueError, match="send fewer"):
            await here.send_arrays({"name" * 2**20 + str(i): np.zeros(1) for i in range(5)})


async def test_arrays_that_overlap_are_refused() -> None:
    """A message that is left, or whose receive is cancelled, could not be saved out of them."""
    async with two_ends() as (_, there):
        one = np.zeros(10_000)
        for into in ([one[:5000], one[3000:]], {"a": one, "b": one}):
            with pytest.raises(ValueError, match="overlap"):
                await there.receive_arrays(into=into)
        buffer = bytearray(100)
        for exact in (False, True):
            with pytest.raises(ValueError, match="overlap"):
                await there.receive_into([buffer, buffer], exact=exact)
        assert_free(buffer)


class Unit(np.ndarray):  # type: ignore[type-arg]
    """A subclass with an opinion."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ValueError("cannot convert units")


async def test_code_of_subclasses_does_not_run() -> None:
    async with two_ends() as (here, there):
        for size in (4, 40_000):
            sent = np.arange(float(size))
            memory = np.zeros(2 * size)
            out = memory.view(Unit)[::2]
            await at_once(partial(here.send_array, sent), partial(there.receive_array, out=out))
            assert (memory[::2] == sent).all()
            _, got = await at_once(partial(here.send_array, sent.view(Unit)), there.receive_array)
            assert_same(got, sent)


async def test_an_array_that_changes_while_its_receive_waits() -> None:
    """That receive fails, and the message stays; the connection goes on."""
    async with two_ends() as (here, there):
        memory = np.zeros(8)
        out = memory[::2]
        numbers = array.array("d", [0] * 4)

        async def spoil() -> None:
            await nothing_happens(0.02)
            with pytest.raises(BufferError):
                numbers.append(1)  # it is in use
            memory.flags.writeable = False
            out.flags.writeable = False
            await here.send_array(np.arange(4.0))
            await here.send_array(np.arange(4.0))

        async def receive() -> None:
            with pytest.raises(ValueError, match="read-only"):
                await there.receive_array(out=out)

        await at_once(receive, partial(there.receive_array, out=numbers), spoil)
        assert numbers.tolist() == [0, 1, 2, 3]
        assert (await there.receive_array() == np.arange(4.0)).all()
        numbers.append(5)


async def test_scalars_are_no_place_to_receive_into() -> None:
    async with two_ends() as (_, there):
        for out in (np.zeros(3)[0], np.int64(5)):
            with pytest.raises(TypeError, match="read-only"):
                await there.receive_array(out=out)
        with pytest.raises(TypeError, match="read-only"):
            await there.receive_arrays(into={"w": np.zeros(2), "step": np.int64(0)})


async def test_names_in_another_order_take_no_time() -> None:
    async with two_ends() as (here, there):
        names = [f"n{i}" for i in range(1000)]
        sent = {name: np.full(1, place) for place, name in enumerate(names)}
        into = {name: np.zeros(1, int) for name in reversed(names)}
        with Stopwatch(2):
            await at_once(partial(here.send_arrays, sent), partial(there.receive_arrays, into=into))
        assert all(into[name] == sent[name] for name in names)


async def test_max_message_size_bounds_what_is_not_asked_for() -> None:
    """An array of the right size may be longer, as with receive_into; what is refused to fit is dropped."""
    sent = np.zeros(100_000)
    async with two_ends(max_message_size=100_000) as (here, there):
        out = np.ones(100_000)
        await at_once(partial(here.send_array, sent), partial(there.receive_array, out=out))
        assert not out.any()
        with pytest.raises(ExceptionGroup) as caught:
            await at_once(partial(here.send_array, sent), there.receive_array)
        assert caught.group_contains(trio_ucx.MessageTooLong, match="max_message_size is 100000")
        asked: list[int] = []
        with pytest.raises(ExceptionGroup) as caught:
            await at_once(partial(here.send_array, sent), partial(there.receive_array, allocate=asked.append))
        assert caught.group_contains(trio_ucx.MessageTooLong) and not asked


@pytest.mark.parametrize("size", [10, 2**20])
async def test_cancelled_receives_lose_nothing(size: int, chance: random.Random) -> None:
    async with two_ends("tcp") as (here, there):
        sent = np.arange(size)
        out = np.zeros_like(sent)
        for _ in range(20):
            got = None

            async def receive() -> None:
                nonlocal got
                while got is None:
                    with trio.move_on_after(chance.random() * 0.002):
                        got = await there.receive_array(**chance.choice([{}, {"out": out}, {"allocate": bytearray}]))

            await at_once(partial(here.send_array, sent), receive)
            assert (got == sent).all()
            await there.wait_buffers_released()
            out[:] = 0


async def test_a_receive_that_leaves_its_message_frees_its_buffer() -> None:
    async with two_ends() as (here, there):
        buffer = bytearray(2**20)

        async def look() -> None:
            await expect_refused(there, "no arrays", out=buffer)
            assert_free(buffer)
            await there.receive()

        await at_once(partial(here.send, bytes(2**20 + 48)), look)


# ---- exact ----


@pytest.mark.parametrize("size", [0, 10, 5000, 2**20])
@pytest.mark.parametrize("transports", ["tcp", "tcp,sm,self"])
async def test_exact_receives(transports: str, size: int) -> None:
    """A message of another length stays, and the buffer is as it was."""
    data = pattern(size)
    async with two_ends(transports) as (here, there):

        async def look() -> None:
            for wrong in {max(0, size - 1), size + 1} - {size}:
                buffer = bytearray(b"\xee" * wrong)
                with pytest.raises(UnexpectedMessage, match=f"{size} bytes does not fill a buffer of {wrong} bytes"):
                    await there.receive_into(buffer, exact=True)
                assert buffer == b"\xee" * wrong
                assert_free(buffer)
            halves = [bytearray(size // 2), bytearray(size - size // 2)]
            assert await there.receive_into(halves, exact=True) == size
            assert b"".join(halves) == data

        await at_once(partial(here.send, data), look)
        async with here.open_conversation() as talk:
            await talk.send(b"begin")
            heard = await anext(there.conversations())
            with pytest.raises(UnexpectedMessage):
                await heard.receive_into(bytearray(4), exact=True)
            assert await heard.receive_into(bytearray(5), exact=True) == 5


async def test_exact_receives_wait_in_line() -> None:
    """What one leaves goes to the next, in the order of the messages."""
    async with two_ends() as (here, there):
        got: dict[int, Any] = {}

        async def receive(buffer: bytearray) -> None:
            try:
                got[len(buffer)] = await there.receive_into(buffer, exact=True)
            except UnexpectedMessage:
                got[len(buffer)] = "left"

        async with trio.open_nursery() as nursery:
            for size in (3, 5, 4):
                nursery.start_soon(receive, bytearray(size))
                await nothing_happens(0.01)
            await here.send(b"12345")
            await here.send(b"1234")
        assert got == {3: "left", 5: 5, 4: 4}


# ---- who pays ----


def test_bytes_alone_import_nothing() -> None:
    program = (
        "import sys, trio_ucx; assert not [name for name in sys.modules if name.startswith('trio_ucx._arrays')]; "
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


WITHOUT_NUMPY = """
import array, sys
sys.modules["numpy"] = None
import trio, trio_ucx
from trio_ucx.testing import open_connection_pair

async def main():
    async with open_connection_pair() as (here, there):
        for count in (10, 10_000):
            sent, out = array.array("f", [1.5] * count), array.array("f", bytes(4 * count))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.send_array, sent)
                await there.receive_array(out=out)
            assert out == sent
        try:
            await there.receive_array()
        except ImportError as error:
            assert "install numpy" in str(error)
        else:
            raise AssertionError

trio.run(main)
"""


def test_without_numpy() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], check=True, timeout=60)
