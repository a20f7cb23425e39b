"""Buffers that contain pointers, or have a mask, are refused wherever a buffer is taken; all others are accepted."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from helpers import open_pair, open_raw_pair

from trio_ucx import ucp
from trio_ucx.ucp._memory.pointers import format_has_pointers


class Inner(ctypes.Structure):
    _fields_ = [("OP", ctypes.c_int), ("next", ctypes.POINTER(ctypes.c_int))]


class Either(ctypes.Union):
    _fields_ = [("number", ctypes.c_long), ("object", ctypes.py_object)]


class Outer(ctypes.Structure):
    _fields_ = [("O:P", ctypes.c_char), ("inner", Inner * 2)]


class Derived(Inner):
    _fields_ = [("more", ctypes.c_int)]


class Innocent(ctypes.Structure):
    _fields_ = [("OP", ctypes.c_int), ("z:", ctypes.c_double), ("X", ctypes.c_char * 3)]


NESTED = np.dtype([("a", "i4"), ("b", [("c", "f8"), ("d", "O", (2,))])])

WITH = {
    "objects": np.array(["x", None], object),
    "memoryview of objects": memoryview(np.array(["x", None], object)),
    "structure": np.zeros(2, [("OP", "i4"), ("x", "O")]),
    "nested structure": np.zeros(2, NESTED),
    "memoryview of structures": memoryview(np.zeros(2, NESTED)),
    "one object": np.array(None, object),
    "no objects": np.array([], object),
    "ctypes object": (ctypes.py_object * 2)("x", "y"),
    "ctypes pointers": (ctypes.POINTER(ctypes.c_int) * 2)(),
    "void pointers": (ctypes.c_void_p * 2)(),
    "char pointers": (ctypes.c_char_p * 2)(),
    "wchar pointers": (ctypes.c_wchar_p * 2)(),
    "function pointers": (ctypes.CFUNCTYPE(None) * 2)(),
    "one pointer": ctypes.c_void_p(),
    "union": (Either * 2)(),
    "memoryview of a union": memoryview((Either * 2)()),
    "ctypes structure": Outer(),
    "derived structure": Derived(),
    "pointers of a memoryview": memoryview(bytearray(16)).cast("P"),
}
WITHOUT = {
    "bytes": b"OP",
    "mmap": mmap.mmap(-1, 10),
    "array": array.array("d", [1, 2]),
    "named like pointers": np.zeros(2, [("O", "i4"), ("P", "c16"), ("X", "S3")]),
    "memoryview of these": memoryview(np.zeros(2, [("O", "i4"), ("OP", "c16")])),
    "complex": np.zeros(3, "c16"),
    "unicode": np.zeros(3, "U4"),
    "void": np.zeros(3, "V8"),
    "half": np.zeros(3, "f2"),
    "dates": np.zeros(3, "M8[s]").view("i8"),
    "ctypes": Innocent(),
    "ctypes array": (ctypes.c_int * 3 * 2)(),
    "memoryview": memoryview(bytearray(10)).cast("h"),
}


def test_formats() -> None:
    for format in (
        None,
        "B",
        "d",
        "3w",
        "Zd",
        "2Zf",
        "T{i:OP:}",
        "T{Zd:O:T{(2)i:P:=x:X:}:&:}",
        "@i",
        "<3s",
        "T{=i:a:3x}",
    ):
        assert not format_has_pointers(format), format
    for format in ("O", "P", "&i", "<P", "z", "<Z", "X{}", "T{i:OP:O:x:}", "T{T{(2)O:b:}:a:}", "T{i:a", "T{i:a:", "2O"):
        assert format_has_pointers(format), format
    assert format_has_pointers("T{<c:P::<O:p:}")  # a name with a colon in it must hide nothing


OBJECTS = np.array(["x", None], object)


MASKED = np.ma.masked_array([1.0, -9999.0], mask=[False, True])


async def refused(function: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="pointers|its mask is not part of its bytes"):
        result = function()
        if isinstance(result, Awaitable):
            await result


async def test_connection(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, server):
        with trio.fail_after(15):
            masked = (MASKED, [bytearray(4), MASKED], ucp.Strided(MASKED[::2]), np.ma.masked_array([1.0]), np.ma.masked)
            pointers = (*WITH.values(), [bytearray(4), OBJECTS], ucp.Strided(OBJECTS[::2]))
            for bad in (*pointers, *masked):
                for function in (client.send, client.send_nowait, server.receive_into):
                    await refused(lambda function=function, bad=bad: function(bad))
            await refused(lambda: client.send_all(OBJECTS))
            await refused(lambda: client.send_all(MASKED))
            await refused(lambda: client.send_all(WITH["pointers of a memoryview"]))
            named = np.zeros(2, [("mask", "i4")]).view(np.recarray)
            for good in (*WITHOUT.values(), named):
                await client.send(good)
                assert await server.receive() == bytes(good)


async def test_raw(transports: str) -> None:
    async with (
        ucp.open_worker(config={"TLS": transports}, features=ucp.Feature.ALL) as worker,
        open_raw_pair(worker) as (client, server),
    ):
        context = worker.context
        with trio.fail_after(15), context.allocate(64) as memory, client.attach(memory.descriptor) as remote:
            chain = worker.new_chain()
            for bad in (OBJECTS, ucp.Strided(OBJECTS[::2]), MASKED):
                for function in (
                    lambda bad=bad: client.tag_send(bad, 1),
                    lambda bad=bad: client.tag_send_sync(bad, 1),
                    lambda bad=bad: worker.tag_receive(bad, 1),
                    lambda bad=bad: client.am_send(1, bad),
                    lambda bad=bad: client.am_send(1, b"", bad),
                    lambda bad=bad: client.stream_send(bad),
                    lambda bad=bad: server.stream_receive(bad),
                    lambda bad=bad: remote.put(bad, 0),
                    lambda bad=bad: remote.get_into(bad, 0),
                    lambda bad=bad: context.register(bad),
                    lambda bad=bad: chain.put(remote, bad),
                    lambda bad=bad: chain.get(remote, into=bad),
                    lambda bad=bad: chain.am_send(client, 1, bad),
                ):
                    await refused(function)
            await refused(lambda: chain.am_send(client, 1, b"", header=OBJECTS))
            await refused(lambda: chain.am_send(client, 1, b"", header=MASKED))
            chain.close()


class Interface:
    """An object that has ``__cuda_array_interface__`` and nothing else."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (0,), "data": (0, False), "version": 3, **interface}


async def test_array_interfaces(worker: ucp.Worker) -> None:
    async with open_pair(worker) as (client, _):
        await refused(lambda: client.send(Interface(typestr="|O8")))
        await refused(lambda: client.send(Interface(typestr="|V16", descr=[("a", "<i8"), ("b", [("c", "|O8")])])))
        await client.send(Interface(typestr="|V16", descr=[("O", "<i8"), ("b", [("c", "<i8", (1,))])]))
