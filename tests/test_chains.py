"""Request chains: the effect of each kind of request, condition, argument and policy."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import pytest
import trio
from outcome import Error, Value
from remote import ATOMICS, Ground, error_of, open_ground, value_of

from trio_ucx import ucp
from trio_ucx.ucp import chains

# ---- the example, and what each request does ----


async def test_example(ground: Ground) -> None:
    ground.write(struct.pack("<I", 0x12345678), 1020)
    ground.write(struct.pack("<Q", 5), 2048)
    chain = ground.worker.new_chain(capacity=16)
    head = chain.get(ground.remote, offset=0, length=1024)
    chain.put(ground.remote, b"data", offset=64, when=head.u32(1020) == 0x12345678)
    slot = chain.fetch_add(ground.remote, 1, 2048)
    chain.put(ground.remote, b"row of 8", offset=slot.u64() * 64 + 2056)
    outcomes = await chain.run()
    assert len(outcomes) == 4
    assert value_of(outcomes[head])[1020:] == struct.pack("<I", 0x12345678)
    assert value_of(outcomes[slot]) == 5
    assert [value_of(outcomes[number]) for number in (1, 3)] == [None, None]
    assert ground.read(64, 4) == b"data"
    assert ground.u64(2048) == 6
    assert ground.read(5 * 64 + 2056, 8) == b"row of 8"


async def test_gets(ground: Ground) -> None:
    content = random.Random(1).randbytes(4096)
    ground.write(content)
    chain = ground.worker.new_chain()
    buffer = bytearray(100)
    whole, some = chain.get(ground.remote), chain.get(ground.remote, 10, 20)
    into = chain.get(ground.remote, 30, into=buffer)
    nothing = chain.get(ground.remote, 4096)
    length = chain.get(ground.remote, 50, some.u8(0) & 31, at_most=31)
    outcomes = await chain.run()
    assert value_of(outcomes[whole]) == content
    assert value_of(outcomes[some]) == content[10:30]
    assert value_of(outcomes[into]) == 100
    assert buffer == content[30:130]
    assert value_of(outcomes[nothing]) == b""
    assert value_of(outcomes[length]) == content[50 : 50 + (content[10] & 31)]


async def test_payloads(ground: Ground) -> None:
    ground.write(bytes(range(64)))
    chain = ground.worker.new_chain()
    source = chain.get(ground.remote, 0, 64)
    mutable = bytearray(b"mutable")
    parts = (
        b"<",
        source.bytes(3, 5),
        source.u16(8),
        (source.u32(4) + 1).pack(4, big=True),
        mutable,
        source.crc32c(1, 9),
    )
    chain.put(ground.remote, parts, 100)
    chain.put(ground.remote, source.bytes(60), 200)
    chain.put(ground.remote, source.u8(1) - 2, 300)
    chain.put(ground.remote, b"0123456789", 400, length=source.u8(4))
    outcomes = await chain.run()
    assert [value_of(outcome) for outcome in outcomes[1:]] == [None] * 4
    crc = int(google_crc32c.value(bytes(range(1, 10))))
    expected = b"<" + bytes(range(3, 8)) + (0x0908).to_bytes(8, "little") + bytes([7, 6, 5, 5]) + mutable
    expected += crc.to_bytes(8, "little")
    assert ground.read(100, len(expected)) == expected
    assert ground.read(200, 5) == bytes([60, 61, 62, 63, 0])
    assert ground.read(300, 8) == b"\xff" * 8
    assert ground.read(400, 5) == b"0123\0"
    with pytest.raises(BufferError):
        mutable.append(1)
    chain.close()
    mutable.append(1)


async def test_atomics(ground: Ground) -> None:
    assert set(ATOMICS) == set(ucp.AtomicOp)
    rng = random.Random(2)
    for bits in (32, 64):
        size = bits // 8
        chain = ground.worker.new_chain()
        before, values = [rng.getrandbits(bits) for _ in range(8)], [rng.getrandbits(bits) for _ in range(8)]
        ground.write(b"".join(old.to_bytes(size, "little") for old in before))
        for number, op in enumerate(ATOMICS):
            chain.atomic(ground.remote, op, values[number], number * size, bits=bits)
        chain.fetch_add(ground.remote, values[5], 5 * size, bits=bits)
        chain.compare_swap(ground.remote, before[6], values[6], 6 * size, bits=bits)
        chain.compare_swap(ground.remote, before[7] ^ 1, values[7], 7 * size, bits=bits)
        outcomes = await chain.run()
        assert [value_of(outcome) for outcome in outcomes] == before
        results = [combine(before[n], values[n]) for n, combine in enumerate(ATOMICS.values())]
        results += [before[5] + values[5], values[6], before[7]]
        expected = b"".join((result % 2**bits).to_bytes(size, "little") for result in results)
        assert ground.read(0, 8 * size) == expected


async def test_atomics_with_computed_values(ground: Ground) -> None:
    ground.write(struct.pack("<QQQ", 40, 2, 42))
    chain = ground.worker.new_chain()
    seen = chain.get(ground.remote, 0, 24)
    swapped = chain.compare_swap(ground.remote, seen.u64(0) + seen.u64(8), seen.u64(0) * -1, 16)
    added = chain.fetch_add(ground.remote, swapped.u64() - 41, (swapped.u64() - 42) * 8)
    outcomes = await chain.run()
    assert value_of(outcomes[swapped]) == 42
    assert value_of(outcomes[added]) == 40
    assert (ground.u64(0), ground.u64(16)) == (41, 2**64 - 40)


async def test_sends(ground: Ground) -> None:
    async with ground.owner.open_active_messages(7) as messages:
        chain = ground.worker.new_chain()
        word = chain.get(ground.remote, 0, 8)
        sent = chain.tag_send(ground.endpoint, (b"tag ", word.bytes(0, 4)), 5, when=word.u64() == 0)
        chain.am_send(ground.endpoint, 7, b"data", b"header", after=sent)
        chain.tag_send(ground.endpoint, b"never", 5, when=word.u64() == 1)
        outcomes = await chain.run()
        assert [value_of(outcomes[number]) for number in (1, 2)] == [None, None]
        assert isinstance(error_of(outcomes[3]), chains.DependencyFalse)
        buffer = bytearray(100)
        assert await ground.owner.tag_receive(buffer, 5) == (8, 5)
        assert buffer[:8] == b"tag \0\0\0\0"
        message = await messages.receive()
        assert (message.header, await message.receive()) == (b"header", b"data")


async def test_closed_chain_takes_no_request(ground: Ground) -> None:
    """Whatever the request is: one that is tried again later needs a timer, which must not be left behind."""
    chain = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    descriptors = len(os.listdir("/proc/self/fd"))
    chain.close()
    for on_false in ("error", chains.Retry(1, again=word, delay=0.1)):
        with pytest.raises(trio.ClosedResourceError):
            chain.check(word.u64() == 2, on_false=on_false)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


# ---- conditions ----


WIDTHS = [
    (name, width, signed) for width in (1, 2, 4, 8, 16) for name, signed in ((f"u{8 * width}", 0), (f"i{8 * width}", 1))
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "width", "signed"), WIDTHS, ids=[name for name, *_ in WIDTHS])
async def test_comparisons(ground: Ground, name: str, width: int, signed: int) -> None:
    """Every width, byte order and comparison, against Python's integers."""
    rng = random.Random(width + signed)
    edge = [0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1]
    chain = ground.worker.new_chain(capacity=2048)
    raw = [rng.choice([*edge, rng.getrandbits(8 * width)]).to_bytes(width, "little") for _ in range(16)]
    ground.write(b"".join(raw))
    source = chain.get(ground.remote, 0, 16 * width)
    expected = []
    for number in range(0, 16, 2):
        for big in (False, True)[: 1 + (width > 1)]:
            options = {"big": big} if width > 1 else {}
            load = getattr(source, name)
            one, other = load(number * width, **options), load((number + 1) * width, **options)
            order = "big" if big else "little"
            left, right = (int.from_bytes(part, order, signed=bool(signed)) for part in raw[number : number + 2])
            for condition, holds in [
                (one == other, left == right),
                (one != other, left != right),
                (one < other, left < right),
                (one <= other, left <= right),
                (one > other, left > right),
                (one >= other, left >= right),
                (one == left, True),
                (one < left, False),
                (one.any_bits(0x51), left & 0x51 != 0),
                (one.all_bits(0x11), left & 0x11 == 0x11),
                ((one & 0x0F) >= 7, left & 0x0F >= 7),
            ]:
                chain.check(condition)
                expected.append(holds)
    outcomes = await chain.run()
    assert [isinstance(outcome, Value) for outcome in outcomes[1:]] == expected
    assert all(isinstance(error_of(o), chains.DependencyFalse) for o in outcomes[1:] if not isinstance(o, Value))


async def test_payload_functions(ground: Ground) -> None:
    content = random.Random(5).randbytes(777)
    ground.write(content)
    local = bytearray(content[10:20])
    chain = ground.worker.new_chain()
    got = chain.get(ground.remote, 0, 777)
    for length in (0, 1, 7, 8, 9, 64, 777):
        chain.check(got.crc32c(0, length) == int(google_crc32c.value(content[:length])))
    chain.check(got.equals(local, 10))
    chain.check(got.equals(local, 11), on_false="skip")
    outcomes = await chain.run()
    assert [value_of(outcome) for outcome in outcomes[1:]] == [None] * 8 + [chains.SKIPPED]
    local[0] ^= 1  # what is there when the chain runs counts
    assert isinstance(error_of((await chain.run())[8]), chains.DependencyFalse)


async def test_local_numbers(ground: Ground) -> None:
    """A chain can be run again with others."""
    content = random.Random(6).randbytes(256)
    ground.write(content)
    arguments = bytearray(8)
    chain = ground.worker.new_chain()
    numbers = chain.local(arguments)
    byte = chain.get(ground.remote, numbers.u16(0), 1)
    chain.put(ground.remote, b"!", numbers.i16(2, big=True) + 300, when=byte.u8() == numbers.u8(4))
    for number in (3, 200):
        struct.pack_into("<H", arguments, 0, number)
        struct.pack_into(">h", arguments, 2, -number)
        arguments[4] = content[number]
        assert value_of((await chain.run())[0]) == content[number : number + 1]
        assert ground.read(300 - number, 1) == b"!"
    with pytest.raises(chains.DependencyReferenceError):
        numbers.u16(7)
    with pytest.raises(BufferError):
        arguments.append(1)
    chain.close()
    del numbers
    arguments.append(1)


# ---- policies ----


async def test_false_and_what_depends_on_it(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    zero = chain.get(ground.remote, 0, 8)
    false = zero.u64() == 1
    error = chain.get(ground.remote, 0, 8, when=false)
    skipped = chain.get(ground.remote, 0, 8, when=false, on_false="skip")
    of_error = chain.check(error.u64() == 0)
    behind_error = chain.put(ground.remote, b"x", 100, after=error)
    of_skipped = chain.check(skipped.u64() == 0)
    behind_skipped = chain.put(ground.remote, b"y", 101, after=skipped)
    far = chain.put(ground.remote, b"z", 102, after=of_error)
    fine = chain.put(ground.remote, b"w", 103)
    outcomes = await chain.run()
    assert isinstance(error_of(outcomes[error]), chains.DependencyFalse)
    assert value_of(outcomes[skipped]) is chains.SKIPPED
    for request in (of_error, behind_error, of_skipped, far):
        assert isinstance(error_of(outcomes[request]), chains.DependencyNotEvaluated), request
    assert [value_of(outcomes[request]) for request in (behind_skipped, fine)] == [None, None]
    assert ground.read(100, 4) == b"\0y\0w"


@pytest.mark.parametrize("delay", [0.0, 0.002])
async def test_retry(ground: Ground, delay: float) -> None:
    """Counts up until the third time."""
    chain = ground.worker.new_chain()
    counted = chain.fetch_add(ground.remote, 1)
    early = chain.check(counted.u64() == 0)
    again = chains.Retry(5, again=counted, delay=delay)
    enough = chain.put(ground.remote, b"!", 100, when=counted.u64() == 3, on_false=again)
    late = chain.check(counted.u64() == 3, after=enough)
    begin = trio.current_time()
    outcomes = await chain.run()
    assert [value_of(outcomes[request]) for request in (counted, early, enough, late)] == [3, None, None, None]
    assert (ground.u64(0), ground.read(100, 1)) == (4, b"!")
    assert trio.current_time() - begin >= 3 * delay
    outcomes = await chain.run()
    assert isinstance(error_of(outcomes[enough]), chains.DependencyFalse)
    assert "6 times" in str(outcomes[enough].error)
    assert isinstance(error_of(outcomes[late]), chains.DependencyNotEvaluated)
    assert ground.u64(0) == 10


@pytest.mark.parametrize("then", ["error", "skip", "stop"])
async def test_what_follows_retries(ground: Ground, then: str) -> None:
    chain = ground.worker.new_chain()
    counted = chain.fetch_add(ground.remote, 1)
    never = chain.check(counted.u64() == 100, on_false=chains.Retry(9, again=-1, then=then))
    after = chain.put(ground.remote, b"!", 100)
    outcomes = await chain.run()
    assert ground.u64(0) == 10
    if then == "error":
        assert isinstance(error_of(outcomes[never]), chains.DependencyFalse)
    else:
        assert value_of(outcomes[never]) is chains.SKIPPED
    assert isinstance(outcomes[after], Error) == (then == "stop")


# ---- choices, walks ----


async def test_choices(transports: str) -> None:
    async with open_ground(transports) as one, open_ground(transports) as other:
        del other
        with one.owner.context.allocate(64) as second:
            endpoint = await one.worker.open_endpoint(one.owner.address)
            with endpoint.attach(second.descriptor) as remote:
                second.memoryview[:] = bytes(64)
                one.write(struct.pack("<QQQ", 0, 1, 2))
                chain = one.worker.new_chain()
                index = chain.get(one.remote, 0, 24)
                for number in range(3):
                    where = chain.choose(index.u64(8 * number), [one.remote, remote])
                    chain.put(where, bytes([65 + number]), 32 + number)
                    to = chain.choose(index.u64(8 * number), [one.endpoint, endpoint])
                    chain.tag_send(to, b"x", number)
                chain.fetch_add(chain.choose(index.u64(8), [one.remote, remote]), 7)
                outcomes = await chain.run()
                assert [isinstance(outcome, Value) for outcome in outcomes] == [True] * 5 + [False] * 2 + [True]
                assert all(isinstance(error_of(outcome), chains.DependencyBoundsError) for outcome in outcomes[5:7])
                assert one.read(32, 3) == b"A\0\0"
                assert bytes(second.memoryview[32:35]) == b"\0B\0"
                assert int.from_bytes(second.memoryview[:8], "little") == 7
                buffer = bytearray(1)
                for number in range(2):
                    assert await one.owner.tag_receive(buffer, number) == (1, number)
            endpoint.abort()


def write_list(ground: Ground, keys: list[int], rng: random.Random) -> list[int]:
    """Nodes of 16 bytes (key, offset of the next; 0 is the end), scattered; their offsets."""
    offsets = rng.sample(range(16, ground.memory.nbytes, 16), len(keys))
    for number, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
        ground.write(struct.pack("<QQ", key, [*offsets, 0][number + 1]), offset)
    return offsets


async def test_follow(ground: Ground) -> None:
    keys = list(range(1000, 1100))
    offsets = write_list(ground, keys, random.Random(3))
    chain = ground.worker.new_chain()
    found = chain.follow(ground.remote, offsets[0], next_offset=8, until=lambda node: node.u64(0) == 1042, limit=1000)
    chain.put(ground.remote, (found.u64(0) + 1000).pack(), offset=found.offset)
    missing = chain.follow(ground.remote, offsets[0], next_offset=8, until=lambda node: node.u64() == 7, limit=1000)
    short = chain.follow(ground.remote, offsets[0], next_offset=8, until=lambda node: node.u64() == 1099, limit=50)
    last = chain.follow(ground.remote, offsets[0], next_offset=8, limit=1000, length=16)
    computed = chain.follow(
        ground.remote,
        offsets[0],
        next_offset=lambda node: node.u32(8) + (node.u32(12) << 32),
        until=lambda node: node.u16(0) >= 1010,
        limit=99,
    )
    outcomes = await chain.run()
    assert value_of(outcomes[found]) == chains.Followed(struct.pack("<QQ", 1042, offsets[43]), offsets[42], 43)
    assert ground.u64(offsets[42]) == 2042
    for request in (missing, short):
        assert isinstance(error_of(outcomes[request]), chains.DependencyFalse)
    assert value_of(outcomes[last]) == chains.Followed(struct.pack("<QQ", 1099, 0), offsets[99], 100)
    assert value_of(outcomes[computed]).offset == offsets[10]


async def test_follow_nothing(ground: Ground) -> None:
    """What would be the first node is the end already."""
    with ground.worker.new_chain() as chain:
        empty = chain.follow(ground.remote, 0, next_offset=8, limit=10)
        word = chain.get(ground.remote, 0, 8)
        computed = chain.follow(ground.remote, word.u64(), next_offset=8, limit=10, on_false="skip")
        endless = chain.follow(ground.remote, 0, next_offset=8, limit=10, end=None)
        outcomes = await chain.run()
    assert isinstance(error_of(outcomes[empty]), chains.DependencyFalse)
    assert value_of(outcomes[computed]) is chains.SKIPPED
    assert value_of(outcomes[endless]) == chains.Followed(bytes(16), 0, 10)
    with pytest.raises(ExceptionGroup) as caught:
        outcomes.values()
    assert [type(error) for error in caught.value.exceptions] == [chains.DependencyFalse]
    assert len(outcomes[1:]) == 3


async def test_node_of_a_walk_that_was_refused(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    seen: list[chains.ChainRequest] = []

    def until(node: chains.ChainRequest) -> chains.Condition:
        seen.append(node)
        return node.u64(0) == 0

    with pytest.raises(ValueError, match="limit"):
        chain.follow(ground.remote, 16, next_offset=8, until=until, limit=0)
    chain.get(ground.remote, 0, 8)
    with pytest.raises(chains.DependencyReferenceError, match="not added"):
        chain.check(seen[0].u64(0) == 0)


async def test_follow_out_of_the_memory(ground: Ground) -> None:
    ground.write(struct.pack("<QQ", 1, ground.memory.nbytes - 8), 16)
    chain = ground.worker.new_chain()
    lost = chain.follow(ground.remote, 16, next_offset=8, until=lambda node: node.u64() == 2, limit=10)
    after = chain.check(lost.u64() == 1)
    outcomes = await chain.run()
    assert isinstance(error_of(outcomes[lost]), chains.DependencyBoundsError)
    assert isinstance(error_of(outcomes[after]), chains.DependencyNotEvaluated)


# ---- errors ----


async def test_bounds(ground: Ground) -> None:
    """Nothing is posted that would reach beyond the memory, whatever is computed."""
    ground.write(struct.pack("<QQ", 4090, 2**64 - 8))
    chain = ground.worker.new_chain()
    seen = chain.get(ground.remote, 0, 16)
    big, huge = seen.u64(0), seen.u64(8)
    for request in (
        chain.put(ground.remote, b"1234567", big),
        chain.put(ground.remote, b"1", huge),
        chain.put(ground.remote, b"1", big * -1),
        chain.put(ground.remote, b"1", (huge << 64) + 1),
        chain.get(ground.remote, big, 7),
        chain.get(ground.remote, 0, big, at_most=100),
        chain.get(ground.remote, 0, huge * -1, at_most=100),
        chain.fetch_add(ground.remote, 1, big),
        chain.fetch_add(ground.remote, 1, big - 4),
        chain.follow(ground.remote, big, next_offset=0, limit=3),
    ):
        request.name  # noqa: B018 - it was added
    fine = chain.put(ground.remote, b"123456", big)
    outcomes = await chain.run()
    for number in range(1, 11):
        assert isinstance(error_of(outcomes[number]), chains.DependencyBoundsError), number
    assert value_of(outcomes[fine]) is None
    assert ground.read(4088) == bytes(2) + b"123456"


async def test_references(ground: Ground) -> None:
    chain, other = ground.worker.new_chain(), ground.worker.new_chain()
    foreign = other.get(ground.remote, 0, 8)
    mine = chain.get(ground.remote, 0, 8)
    put = chain.put(ground.remote, b"x")
    assert chain.previous() is put is chain[1] is chain[-1]
    assert chain.previous(2) is mine is chain[0]
    wrong: list[Callable[[], Any]] = [
        lambda: chain.check(foreign.u64() == 0),
        lambda: chain.put(ground.remote, foreign.bytes()),
        lambda: chain.put(ground.remote, b"x", after=foreign),
        lambda: chain.put(ground.remote, b"x", after=2),
        lambda: chain.put(ground.remote, b"x", after=-3),
        lambda: chain.previous(3),
        lambda: put.u8(0),
        lambda: mine.u8(8),
        lambda: mine.u128(),
        lambda: mine.bytes(4, 5),
    ]
    for refer in wrong:
        with pytest.raises(chains.DependencyReferenceError):
            refer()
    assert len(chain) == 2
    await chain.run()
    chain.clear()
    with pytest.raises(chains.DependencyReferenceError, match="cleared"):
        chain.check(mine.u64() == 0)
    assert len(await chain.run()) == 0


async def test_no_room(ground: Ground) -> None:
    chain = ground.worker.new_chain(capacity=2)
    word = chain.get(ground.remote, 0, 8)
    with pytest.raises(chains.NoDependencyResource):
        condition = word.u64() == 0
        for number in range(20):
            condition = condition & (word.u64() == number)
        chain.check(condition)
    chain.check(word.u64() == 0)
    with pytest.raises(chains.NoDependencyResource):
        chain.put(ground.remote, b"x")
    assert [value_of(outcome) for outcome in await chain.run()] == [bytes(8), None]
    deep: Any = word.u64()
    with pytest.raises(chains.NoDependencyResource):
        for _ in range(40):
            deep = 1 + deep


async def test_bad_arguments(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    remote = ground.remote
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: bool(word.u64() == 0)),
        (TypeError, lambda: (word.u64() == 0) and True),
        (TypeError, lambda: word.u64() == "0"),
        (TypeError, lambda: word.u64() + 1.5),
        (TypeError, lambda: chain.check(True)),  # type: ignore[arg-type]
        (TypeError, lambda: chain.check(None)),  # type: ignore[arg-type]
        (TypeError, lambda: chain.get(b"memory")),  # type: ignore[arg-type]
        (TypeError, lambda: chain.put(ground.endpoint, b"x")),  # type: ignore[arg-type]
        (TypeError, lambda: chain.put(remote, 5)),
        (TypeError, lambda: chain.put(remote, b"x", wrong=1)),
        (TypeError, lambda: chain.tag_send(remote, b"x", 1)),  # type: ignore[arg-type]
        (TypeError, lambda: chain.follow(remote, 0, next_offset=lambda node: 5, limit=1)),  # type: ignore[arg-type, return-value]
        (ValueError, lambda: chain.get(remote, word.u64())),
        (ValueError, lambda: chain.get(remote, 0, word.u64())),
        (ValueError, lambda: chain.get(remote, 4000, 100)),
        (ValueError, lambda: chain.put(remote, b"12345", 4092)),
        (ValueError, lambda: chain.put(remote, b"1", -1)),
        (ValueError, lambda: chain.put(remote, b"1", when=word.u64() == 0, on_false="retry")),
        (ValueError, lambda: chain.fetch_add(remote, 1, bits=16)),
        (ValueError, lambda: chain.fetch_add(remote, 2**64)),
        (ValueError, lambda: chain.choose(word.u64(), [])),
        (ValueError, lambda: ground.worker.new_chain(capacity=0)),
        (ValueError, lambda: chain.follow(remote, 0, next_offset=0, limit=0)),
        (ValueError, lambda: word.u64() << 129),
    ]
    for number, (expected, call) in enumerate(wrong):
        with pytest.raises(expected):
            call()
            pytest.fail(f"number {number} was taken")
    assert len(chain) == 1
    assert [value_of(outcome) for outcome in await chain.run()] == [bytes(8)]


# ---- runs ----


async def test_run_again(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    counted = chain.fetch_add(ground.remote, 1)
    chain.put(ground.remote, counted.u64() * 2, 64)
    kept = [await chain.run() for _ in range(20)]
    assert [value_of(outcomes[counted]) for outcomes in kept] == list(range(20))
    assert ground.u64(64) == 38
    assert value_of(kept[-1][counted]) == 19
    assert value_of(chain.outcomes[counted]) == 19
    added = chain.put(ground.remote, counted.u64(), 72)
    assert value_of((await chain.run())[added]) is None
    assert ground.u64(72) == 20


async def test_values(ground: Ground) -> None:
    """The same by every way: one by one, one alone, all; of the last run, and of one whose reports are copies."""
    ground.write(struct.pack("<4Q", 5, 16, 0, 7))
    chain = ground.worker.new_chain()
    buffer = bytearray(4)
    requests = [
        chain.get(ground.remote, 0, 8),
        chain.get(ground.remote, 0, 4, into=buffer),
        chain.get(ground.remote, 0, 0),
        chain.put(ground.remote, b"put", 100),
        chain.fetch_add(ground.remote, 1, 0, after=0),
        chain.check(chain[0].u64() == 0, on_false="skip"),
        chain.follow(ground.remote, 8, next_offset=0, limit=5, length=8),
        chain.get(ground.remote, 24, 8),
        chain.check(chain[0].u64() == 5),
        chain.tag_send(ground.endpoint, b"x", 3),
        chain.fetch_add(ground.remote, 1, 24, bits=32, after=7),
    ]
    walked = chains.Followed(bytes(8), 16, 2)
    seven = struct.pack("<Q", 7)
    expected = [struct.pack("<Q", 5), 4, b"", None, 5, chains.SKIPPED, walked, seven, None, None, 7]
    outcomes = await chain.run()
    for _ in range(2):
        assert outcomes.values() == expected == [value_of(outcome) for outcome in outcomes]
        assert [outcomes.value(request) for request in requests] == expected
        assert [outcomes.value(number) for number in range(len(chain))] == expected
        assert outcomes.value(-1) == 7
        assert outcomes.error_count == 0
        ground.write(struct.pack("<4Q", 6, 16, 0, 7))
        await chain.run()  # now those are copies
    for _ in range(3):
        await ground.owner.tag_receive(bytearray(1), 3)
    for wrong in (ground.worker.new_chain().get(ground.remote, 0, 8), "0", None):
        with pytest.raises(chains.DependencyReferenceError):
            outcomes.value(wrong)  # type: ignore[arg-type]
    for number in (len(chain), -len(chain) - 1):
        with pytest.raises(IndexError):
            outcomes.value(number)
    chain.close()
    assert outcomes.values() == expected


async def test_errors_are_counted(ground: Ground) -> None:
    chain = ground.worker.new_chain()
    word = chain.get(ground.remote, 0, 8)
    assert chain.outcomes.error_count == 0  # not run
    false = chain.check(word.u64() == 1)
    depends = chain.put(ground.remote, b"x", 8, after=false)
    chain.put(ground.remote, b"x", 16, when=word.u64() == 1, on_false="skip")
    beyond = chain.get(ground.remote, word.u64() + 10**6, 8)
    tried = chain.check(word.u64() == 2, on_false=chains.Retry(3, again=word))
    for _ in range(3):
        outcomes = await chain.run()
        assert outcomes.error_count == 4 == sum(isinstance(outcome, Error) for outcome in outcomes)
        for request, error in (
            (false, chains.DependencyFalse),
            (depends, chains.DependencyNotEvaluated),
            (beyond, chains.DependencyBoundsError),
            (tried, chains.DependencyFalse),
        ):
            for _ in range(2):
                with pytest.raises(error):
                    outcomes.value(request)
        with pytest.raises(ExceptionGroup) as caught:
            outcomes.values()
        assert len(caught.value.exceptions) == 4
    ground.write(b"\2")
    second = await chain.run()
    assert outcomes.error_count == 4  # of the run before
    assert second.error_count == 3 == sum(isinstance(outcome, Error) for outcome in second)
    with trio.CancelScope() as scope:
        scope.cancel()
        await chain.run()
    assert chain.outcomes.error_count == len(chain)
    with pytest.raises(ucp.RequestCancelled):
        chain.outcomes.value(word)
    chain.clear()
    assert chain.outcomes.error_count == 0 and second.error_count == 3
    stopped = ground.worker.new_chain()
    stopped.check(stopped.get(ground.remote, 0, 8).u64() == 9, on_false="stop")
    stopped.put(ground.remote, b"x", 8)
    stopped.put(ground.remote, b"x", 8)
    assert (await stopped.run()).error_count == 2


async def test_many_chains_at_once(ground: Ground) -> None:
    async def count(number: int) -> None:
        chain = ground.worker.new_chain()
        for _ in range(10):
            mine = chain.fetch_add(ground.remote, 1, 8 * number)
            chain.fetch_add(ground.remote, 1, 800, when=mine.u64() >= 0)
        outcomes = await chain.run()
        assert sorted(value_of(outcomes[number]) for number in range(0, 20, 2)) == list(range(10))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(count, number)
    assert ground.u64(800) == 500


async def test_outcomes_outlive_the_worker(transports: str) -> None:
    async with open_ground(transports) as ground:
        ground.write(b"12345678")
        chain = ground.worker.new_chain()
        got = chain.get(ground.remote, 0, 8)
        outcomes = await chain.run()
    assert value_of(outcomes[got]) == b"12345678"
    with pytest.raises(trio.ClosedResourceError):
        await chain.run()


async def test_empty(ground: Ground) -> None:
    assert list(await ground.worker.new_chain().run()) == []


async def test_default_features_are_enough() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker, ucp.open_worker(config={"TLS": "tcp"}) as owner:
        endpoint = await worker.open_endpoint(owner.address)
        with owner.context.allocate(64) as memory, endpoint.attach(memory.descriptor) as remote:
            memory.memoryview[:] = bytes(64)
            with worker.new_chain() as chain:
                put = chain.put(remote, b"12345678", 8)
                added = chain.fetch_add(remote, 1, 8, after=put)
                got = chain.get(remote, 8, 8, after=added)
                outcomes = await chain.run()
                assert value_of(outcomes[got]) == b"22345678"
        endpoint.abort()


async def test_without_the_features() -> None:
    features = ucp.Feature.TAG | ucp.Feature.RMA | ucp.Feature.WAKEUP
    async with ucp.open_worker(config={"TLS": "tcp"}, features=ucp.Feature.TAG | ucp.Feature.WAKEUP) as worker:
        async with ucp.open_worker(config={"TLS": "tcp"}, features=features) as owner:
            endpoint = await worker.open_endpoint(owner.address)
            with owner.context.allocate(64) as memory, pytest.raises(RuntimeError, match="Feature.AM"):
                endpoint.attach(memory.descriptor)
            endpoint.abort()
