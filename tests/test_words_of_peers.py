"""What ranks and rpc peers that were let in may say: wrong types, wrong ranges, and no messages at all.

Whatever it is, it ends the connection, the conversation or the call of the one who says it, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from faults.fuzz_targets import PLAIN_JSON
from faults.fuzz_targets import call as call_target
from helpers import free_port, open_listener
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_service import Store

import trio_ucx
from trio_ucx import mesh, rpc
from trio_ucx.mesh import _collectives as collectives
from trio_ucx.mesh._messages import (
    Heard,
    Joined,
    Leaving,
    Left,
    Lost,
    Message,
    RankAnswer,
    RankHello,
    Suspect,
    Welcome,
    decode,
    encode,
)
from trio_ucx.rpc import _messages as wire

DEADLINE = 60
KEY = bytes(range(32))
#: Numbers that are wrong nearly everywhere, as JSON has them.
NUMBERS = ["NaN", "Infinity", "-Infinity", *("1" + "0" * 400, "-1" + "0" * 400, "1" * 5000), "1e999", "-1", "1e300"]
#: Other values that are wrong nearly everywhere.
OTHERS = [
    "true",
    "null",
    '"x"',
    '"\\ud800"',
    '"\\u001b"',
    "[]",
    "{}",
    '[["h", 1]]',
    '{"0": 0}',
    "[" * 900 + "]" * 900,
]
WRONG = NUMBERS + OTHERS
SIZE = 3
MESSAGES: list[Message] = [
    RankHello(1, 0, SIZE, 9, 3.0, "cancel", "", 0, "h", 1),
    Welcome("g", 1, [("", 1), ("h", 2), None], {1: 1}, {2: "gone"}),
    RankAnswer("no", (1, 2), False, False),
    Suspect(1, "silent", 0),
    Leaving("error"),
    Left((1, 2)),
    Lost(1, "gone"),
    Joined(1, 2, ("h", 3)),
    Heard(1),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("0123-x", max_size=3), inner, max_size=4),
    max_leaves=8,
)
FEW = settings(settings.get_profile("model"), max_examples=200)


def is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < SIZE


def is_text(value: Any) -> bool:
    return type(value) is str and value.isprintable()


def is_address(value: Any) -> bool:
    return type(value) is tuple and is_text(value[0]) and type(value[1]) is int and 0 <= value[1] < 2**16


def is_right(name: str, value: Any) -> bool:
    """True if a value is one that a field with this name may have."""
    match name:
        case "rank":
            return is_rank(value)
        case "to" | "size" | "member" | "generation" | "pid":
            return type(value) is int and 0 <= value < 2**31
        case "port":
            return is_address(("", value))
        case "seconds":
            return type(value) is float and math.isfinite(value) and value >= 0
        case "crossed" | "later":
            return type(value) is bool
        case "address":
            return is_address(value)
        case "addresses":
            return len(value) <= SIZE and all(one is None or is_address(one) for one in value)
        case "missing" | "ranks":
            return type(value) is tuple and all(map(is_rank, value))
        case "lost":
            return all(is_rank(rank) and is_text(one) for rank, one in value.items())
        case "members":
            return all(is_rank(rank) and type(one) is int for rank, one in value.items())
    return is_text(value)


def check_rank_message(data: bytes) -> Message | None:
    """Decodes a message, whose fields are all right if it is one."""
    try:
        message = decode(data, SIZE)
    except ValueError as error:
        assert str(error).isprintable()
        return None
    for field in attrs.fields(type(message)):
        assert is_right(field.name, getattr(message, field.name)), message
    return message


def with_field(message: Message, name: str, text: str) -> bytes:
    """The message with another value, which is JSON, in one field."""
    fields = {**attrs.asdict(message, recurse=False), name: "@"}
    return json.dumps([type(message).__name__, fields]).replace('"@"', text, 1).encode()


def fields_of(message: Message) -> list[str]:
    return [field.name for field in attrs.fields(type(message))]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_fields_of_a_rank_message(message: Message) -> None:
    assert decode(encode(message), SIZE) == message
    for name in fields_of(message):
        for text in WRONG:
            check_rank_message(with_field(message, name, text))
    fields = attrs.asdict(message, recurse=False)
    for wrong in ({**fields, "more": 1}, {}, [], None, list(fields)):
        if wrong != {} or not isinstance(message, (RankAnswer, Leaving)):  # whose fields have defaults
            assert check_rank_message(json.dumps([type(message).__name__, wrong]).encode()) is None


@pytest.mark.parametrize(
    ("message", "name", "text"),
    [
        *((MESSAGES[0], "seconds", text) for text in [*NUMBERS[:8], "true", "null", '"1"', "[]", "1e10"]),
        *((MESSAGES[0], name, text) for name in ("rank", "member", "port", "pid") for text in [*NUMBERS, "true"]),
        *((MESSAGES[0], "port", "65536"), (MESSAGES[0], "host", "1"), (MESSAGES[0], "group", "null")),
        *((MESSAGES[1], "addresses", text) for text in ('[["", 1], null, null]', '[["", 1, 2]]', "[null]", '["", 1]')),
        *((MESSAGES[1], "addresses", text) for text in ('[["", 1], ["h", true], null]', '[[1, 1], ["h", 1], null]')),
        *((MESSAGES[1], name, text) for name in ("members", "lost") for text in ('{"3": 1}', '{"-1": 1}', '{"x": 1}')),
        *((MESSAGES[2], "missing", text) for text in ("[3]", "[true]", "[-1]", '"12"', '{"1": 1}')),
        *((MESSAGES[2], "crossed", text) for text in ("1", "null")),
        *((message, "rank", text) for message in MESSAGES[3::3] for text in ("3", "-1", "true", "1.0", "null")),
        *((MESSAGES[7], "address", text) for text in ('["h"]', '["h", -1]', '["h", NaN]', "[1, 1]")),
    ],
)
def test_wrong_fields_of_a_rank_message(message: Message, name: str, text: str) -> None:
    assert check_rank_message(with_field(message, name, text)) is None


@FEW
@given(st.sampled_from(MESSAGES), st.data())
def test_random_fields_of_a_rank_message(message: Message, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(fields_of(message)))
    check_rank_message(with_field(message, name, json.dumps(data.draw(VALUES))))


@FEW
@given(VALUES)
def test_random_json_of_a_rank(value: Any) -> None:
    check_rank_message(json.dumps(value).encode())


# ---- a group ----


async def say(port: int, *messages: bytes) -> bytes | None:
    """Connects to rank 0 with the right key, says something, and waits until rank 0 answers or has had enough."""
    with contextlib.suppress(trio.EndOfChannel, trio.BrokenResourceError):
        async with trio_ucx.connect(("127.0.0.1", port), authkey=KEY, retry=trio_ucx.Backoff(timeout=5)) as connection:
            async with connection.open_conversation() as talk:
                for message in messages:
                    talk.send_nowait(message)
                with trio.move_on_after(5):
                    return await talk.receive()
    return None


async def meet_after(*words: Callable[[int], Awaitable[Any]]) -> None:
    """Ranks meet although somebody who knows their key has said something to rank 0 before."""
    port = free_port()

    async def join(rank: int) -> None:
        async with mesh.join(rank=rank, size=SIZE, meeting=f"127.0.0.1:{port}", authkey=KEY, timeout=50) as group:
            assert await group.all_gather(b"%d" % rank) == [b"0", b"1", b"2"]

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, 0)
            for word in words:
                await word(port)
            nursery.start_soon(join, 1)
            nursery.start_soon(join, 2)


async def test_wild_hellos_end_no_group() -> None:
    chance = random.Random(1)
    hello = MESSAGES[0]
    for_each = [with_field(hello, name, chance.choice(WRONG)) for name in fields_of(hello) if name != "on_loss"]
    times = [with_field(hello, "seconds", text) for text in NUMBERS[:8]]
    garbage = [b"", b"\xff", b"[" * 4000, b'["Welcome"]', encode(MESSAGES[1]), encode(MESSAGES[3]), bytes(5000)]
    await meet_after(*(partial(answered, one) for one in for_each + times + garbage))


async def answered(data: bytes, port: int) -> None:
    answer = await say(port, data)
    assert answer is None or isinstance(decode(answer), RankAnswer), answer


@pytest.mark.parametrize("later", [Suspect(0, "it is gone", 0), Suspect(2, "it is gone", 0), Leaving("x"), Heard(9)])
async def test_who_was_not_let_in_has_no_say(later: Message) -> None:
    """A rank that is refused, and one that waits for the others."""
    refused, waits = encode(attrs.evolve(MESSAGES[0], size=9)), encode(MESSAGES[0])
    await meet_after(
        lambda port: say(port, refused, encode(later)),
        lambda port: say(port, waits, encode(later)),
    )


async def test_the_suspicion_of_rank_0_is_about_its_sender() -> None:
    """Rank 0 is there: a rank that cannot reach it is the one that is lost."""
    ends: dict[int, BaseException] = {}
    port = free_port()

    async def join(rank: int) -> None:
        try:
            async with mesh.join(
                rank=rank, size=SIZE, meeting=f"127.0.0.1:{port}", authkey=KEY, on_loss="continue"
            ) as group:
                if rank == 1:
                    group._links.suspect(0, "no route")
                if rank == 2:
                    with pytest.raises(mesh.RankLostError, match="rank 1 was lost: it says of rank 0: no route"):
                        await group.wait_lost()
                    await group.send(b"still here", to=0)
                elif rank == 0:
                    assert await group.receive(source=2) == b"still here"
                else:
                    await group.wait_lost()
        except mesh.RankLostError as error:
            ends[rank] = error

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            for rank in range(SIZE):
                nursery.start_soon(join, rank)
    assert list(ends) == [1], ends


@pytest.mark.parametrize("data", [b"", b"x", bytes(8) + b"\x63", b"\0\0\0\0\1\0\0\0\3" + b"\xff" * 20])
async def test_a_collective_message_that_cannot_be_read(data: bytes) -> None:
    """The rank that has sent it is lost."""
    port = free_port()
    ends: dict[int, BaseException] = {}

    async def join(rank: int) -> None:
        try:
            async with mesh.join(rank=rank, size=2, meeting=f"127.0.0.1:{port}", authkey=KEY) as group:
                if rank == 1:
                    await group.connection(0)
                    channel = group._links.by_rank[0].channel
                    assert channel is not None
                    await channel.send(data)
                    await trio.sleep_forever()
                await group.all_gather(b"")
        except mesh.RankLostError as error:
            ends[rank] = error

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, 0)
            nursery.start_soon(join, 1)
    assert {end.rank for end in ends.values()} == {1}, ends  # type: ignore[attr-defined]
    assert "cannot be read" in str(ends[0])


@FEW
@given(st.binary(max_size=60) | st.lists(st.binary(max_size=4), max_size=4).map(collectives.pack), st.integers(0, 4))
def test_parts_of_a_collective_message(data: bytes, count: int) -> None:
    try:
        parts = collectives.unpack(data, count)
    except trio.BrokenResourceError:
        return
    assert len(parts) == count and collectives.pack(parts) == data


# ---- rpc ----

CODECS = [*wire.CODECS.values(), PLAIN_JSON]
HEAD = ["add", 1.5, {"user": "me"}, {"a": 1, "b": 2}]


@FEW
@given(st.integers(0, 3), VALUES)
def test_random_fields_of_a_call(index: int, value: Any) -> None:
    head: list[Any] = [*HEAD]
    head[index] = value
    call_target(json.dumps(head).encode())
    for codec in wire.CODECS.values():
        with contextlib.suppress(ValueError, OverflowError):
            call_target(codec.encode(head))


def calls(chance: random.Random) -> list[bytes]:
    """Heads of calls in JSON: each field with each wrong value, and what is no JSON."""
    found = []
    for index in range(4):
        for text in WRONG:
            fields = [json.dumps(field) for field in HEAD]
            fields[index] = text
            found.append(f"[{', '.join(fields)}]".encode())
    found += [f'["add", null, null, {{"a": {text}}}]'.encode() for text in WRONG]
    found += [
        b"",
        b"[]",
        b"\xff",
        b'["add"]',
        b"[" * 100_000,
        b'["add", 1, null, {}, 1]',
        b'["add", 1, null, {"self": 1}]',
    ]
    return found + [chance.randbytes(chance.randrange(40)) for _ in range(50)]


@pytest.fixture(params=["msgspec", "plain"])
def codecs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The encodings of a server, and of a client, with msgspec and without it."""
    if request.param == "plain":
        monkeypatch.setattr(wire, "CODECS", {ord("J"): PLAIN_JSON})
        monkeypatch.setattr("trio_ucx.rpc._service.CODECS", {ord("J"): PLAIN_JSON})
        monkeypatch.setattr("trio_ucx.rpc._client.DEFAULT", PLAIN_JSON)
    return str(request.param)


async def test_no_call_ends_a_server(codecs: str) -> None:
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(trio_ucx.serve_ucx, rpc.serving(Store()), 0)
            async with rpc.connect(server.address) as other, trio_ucx.connect(server.address) as connection:
                for letter in b"JM":
                    for head in calls(random.Random(2)):
                        answer = await connection.request(bytes([letter, wire.CALL, 0, 0, 0, 0]) + head)
                        assert answer[1] in (wire.REPLY, wire.ERROR)
                for size in (1, 16, 2**32 - 1):
                    message = b"J\0" + size.to_bytes(4, "little") + b'["add", 1, null, {"a": 1}]' + bytes(64)
                    assert (await connection.request(message))[1] == wire.ERROR
                assert await rpc.Client(connection).call("add", a=1) == await other.call("add", a=1) == 11
            nursery.cancel_scope.cancel()


async def test_no_answer_ends_a_client(codecs: str) -> None:
    """It is the error of one call."""
    heads = [text.encode() for text in WRONG] + [b"[0, %s, %s, 3, 4]" % (one.encode(), one.encode()) for one in WRONG]
    answers = [b"J" + bytes([kind, 0, 0, 0, 0]) + head for kind in (wire.REPLY, wire.ERROR, 9, 255) for head in heads]
    answers += [b"", b"J", b"M\3\0\0\0\0\x81\x81\1\2\3", b"J\3\1\0\0\0null", b"M\3\xff\xff\xff\xff" + bytes(100)]

    async def answer(connection: trio_ucx.Connection) -> None:
        async with connection:
            for data in [*answers, b"J\3\0\0\0\0[1]"]:
                async with await connection.conversations().__anext__() as talk:
                    await talk.receive()
                    await talk.send(data)

    with trio.fail_after(DEADLINE):
        async with open_listener() as listener, trio_ucx.connect(listener.address) as connection:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, await listener.accept())
                client = rpc.Client(connection)
                for _ in answers:
                    with contextlib.suppress(rpc.CallError):
                        await client.call("anything")
                assert await client.call("anything") == [1]


@pytest.mark.parametrize("kind", [wire.CALL, wire.STREAM, 9, 255])
async def test_items_of_an_unknown_kind(kind: int) -> None:
    """They do not pass for the end of a stream, at either side."""
    item = b"J" + bytes([kind, 0, 0, 0, 0]) + b"null"

    async def answer(connection: trio_ucx.Connection) -> None:
        async with connection, await connection.conversations().__anext__() as talk:
            await talk.receive()
            await talk.send(item)

    with trio.fail_after(DEADLINE):
        async with open_listener() as listener, trio_ucx.connect(listener.address) as connection:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, await listener.accept())
                async with rpc.Client(connection).stream("anything") as stream:
                    with pytest.raises(rpc.CallError, match=f"a message of kind {kind}, which is no item"):
                        await stream.__anext__()
        async with trio.open_nursery() as nursery:
            server = await nursery.start(trio_ucx.serve_ucx, rpc.serving(Store()), 0)
            async with trio_ucx.connect(server.address) as connection, connection.open_conversation() as talk:
                await talk.send(b'J\6\0\0\0\0["total", null, null, {}]')
                await talk.send(item)
                assert (await talk.receive())[1] == wire.ERROR
            nursery.cancel_scope.cancel()
