"""Random request chains, against a model in Python: the same outcomes, the same remote memory."""

from __future__ import annotations

import operator as o
import random
from typing import Any

import attrs
import google_crc32c
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outcome import Error, Value
from remote import Ground, open_ground

from trio_ucx import ucp
from trio_ucx.testing import assert_no_live_handles
from trio_ucx.ucp import chains

NBYTES = 512
#: Each request of an unordered program writes only here, at 16 times its number; before it, nobody writes.
OWN = 256
TAG = 9

#: An expression is a tuple: ("const", value), ("load", request, offset, width, signed, big), ("place", request),
#: ("crc", request, offset, length), or (operator, left, right).
Expression = tuple[Any, ...]
ARITHMETIC = ("+", "-", "*", "&", "|", "^", "<<", ">>")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
OPERATORS: dict[str, Any] = {
    **dict(zip(ARITHMETIC, (o.add, o.sub, o.mul, o.and_, o.or_, o.xor, o.lshift, o.rshift), strict=True)),
    **dict(zip(COMPARISONS, (o.eq, o.ne, o.lt, o.le, o.gt, o.ge), strict=True)),
}


class NotEvaluated(Exception):
    """A result that is not there."""


class Stopped(Exception):
    """A request that was run again has stopped the chain."""


class TooShort(Exception):
    """A result that has less than is referred to."""


# ---- programs ----


@attrs.define
class Step:
    """A request of a program."""

    kind: str
    size: int = 0  # of a result
    offset: Expression = ("const", 0)
    length: Expression | None = None
    value: Expression = ("const", 0)
    swapped: Expression = ("const", 0)
    atomic: str = ""
    bits: int = 64
    parts: list[Any] = attrs.Factory(list)  # bytes, ("bytes", request, offset, length), or (expression, width, big)
    when: Expression | None = None
    then: str = "error"
    retries: int = 0
    again: list[int] = attrs.Factory(list)
    after: list[int] = attrs.Factory(list)
    next: Expression = ("const", 0)
    until: Expression | None = None
    limit: int = 0

    @property
    def depends_on(self) -> set[int]:
        found = set(self.after) | set(self.again)
        for expression in (self.offset, self.length, self.value, self.swapped, self.when):
            found |= references(expression)
        for part in self.parts:
            if isinstance(part, tuple):
                found |= {part[1]} if part[0] == "bytes" else references(part[0])
        return found


def references(expression: Any) -> set[int]:
    if not isinstance(expression, tuple):
        return set()
    if expression[0] in ("load", "place", "crc", "same"):
        return {expression[1]}
    return set().union(*(references(part) for part in expression[1:])) if expression[0] != "const" else set()


class Maker:
    """Draws programs."""

    def __init__(self, rng: random.Random, *, ordered: bool) -> None:
        self.rng = rng
        self.ordered = ordered
        self.steps: list[Step] = []
        #: Those that are run again by somebody: nobody else may refer to them where order is not defined.
        self.private: set[int] = set()

    def program(self) -> list[Step]:
        for _ in range(self.rng.randint(1, 10)):
            self.steps.append(self.step())
        return self.steps

    def sources(self) -> list[int]:
        return [n for n, step in enumerate(self.steps) if step.size and n not in self.private]

    def integer(self, depth: int = 2) -> Expression:
        rng, sources = self.rng, self.sources()
        kind = rng.randint(0, 9)
        if depth and kind > 5:
            operator = rng.choice(ARITHMETIC)
            right = ("const", rng.randint(0, 128)) if operator in ("<<", ">>") else self.integer(depth - 1)
            return (operator, self.integer(depth - 1), right)
        if not sources or kind == 0:
            return ("const", rng.choice([0, 1, -1, 8, 255, 2**64 - 1, rng.randint(-1000, 1000)]))
        source = rng.choice(sources)
        if kind == 1:
            return ("place", source)
        size = self.steps[source].size
        if kind == 2:
            offset = rng.randint(0, size)
            return ("crc", source, offset, rng.randint(0, size - offset))
        width = rng.choice([width for width in (1, 2, 4, 8, 16) if width <= size])
        return (
            "load",
            source,
            rng.randint(0, size - width),
            width,
            rng.random() < 0.5,
            rng.random() < 0.3 and width > 1,
        )

    def small(self, most: int) -> Expression:
        """An integer that is mostly between 0 and `most`; computed, as known ones out of bounds are refused at once."""
        if self.rng.random() < 0.5 or not self.sources():
            return ("+", ("const", self.rng.randint(0, most)), ("const", 0))
        if self.rng.random() < 0.1:
            return ("+", self.integer(), ("const", 0))
        mask = 1
        while mask * 2 <= most + 1:
            mask *= 2
        return ("&", self.integer(1), ("const", mask - 1))

    def condition(self, depth: int = 2) -> Expression:
        rng, sources = self.rng, self.sources()
        kind = rng.randint(0, 9)
        if depth and kind > 6:
            return (rng.choice(["and", "or"]), self.condition(depth - 1), self.condition(depth - 1))
        if depth and kind == 6:
            return ("not", self.condition(depth - 1))
        if sources and kind == 5:
            source = rng.choice(sources)
            length = rng.randint(0, self.steps[source].size)
            return ("same", source, 0, bytes(length))
        if kind == 4:
            return (rng.choice(["any", "all"]), self.integer(), ("const", rng.randint(0, 255)))
        return (rng.choice(COMPARISONS), self.integer(), self.integer())

    def step(self) -> Step:
        rng, number = self.rng, len(self.steps)
        kind = rng.choice(["get", "get", "put", "put", "atomic", "check", "send", "follow"])
        if kind == "check" and not self.sources():
            kind = "get"
        step = Step(kind)
        most = NBYTES if self.ordered else OWN
        if kind == "get":
            step.size = rng.choice([1, 4, 8, 16, 32, 64])
            step.offset = self.small(most - 1)
            if rng.random() < 0.2:
                step.length = self.small(step.size)
            if not self.ordered:
                step.offset = ("const", rng.randint(0, OWN - step.size))
        elif kind in ("put", "send"):
            step.parts = [self.part() for _ in range(rng.randint(1, 3))]
            total = sum(part_length(part) for part in step.parts)
            if rng.random() < 0.2:
                step.length = self.small(total)
            if kind == "put":
                step.offset = self.small(NBYTES - 1) if self.ordered else ("const", OWN + 16 * number)
        elif kind == "atomic":
            step.atomic = rng.choice([*ucp.AtomicOp.__members__, "fetch_add", "compare_swap"])
            step.bits = rng.choice([32, 64])
            step.size = step.bits // 8
            step.offset = ("*", self.small(NBYTES // step.size - 1), ("const", step.size))
            if not self.ordered:
                step.offset = ("const", OWN + 16 * number)
            elif rng.random() < 0.1:
                step.offset = self.small(NBYTES - 1)
            step.value = self.operand(step.bits)
            if step.atomic == "compare_swap":
                step.swapped = self.operand(step.bits)
        elif kind == "follow":
            step.size = 8
            step.offset = ("const", rng.randint(0, OWN - 8))
            step.next = ("&", ("load", number, rng.randint(0, 7), 1, False, False), ("const", 127))
            step.limit = rng.randint(1, 8)
            if rng.random() < 0.8:
                step.until = ("<", ("load", number, 0, 1, False, False), ("const", rng.randint(0, 100)))
        if kind == "check" or rng.random() < 0.4:
            step.when = self.condition()
            step.then = rng.choice(["error", "error", "skip", "skip", "stop"])
            again = sorted(rng.sample(range(number), min(number, rng.randint(0, 2)))) if rng.random() < 0.4 else []
            again = [one for one in again if self.may_run_again(one)]
            if again:
                step.again, step.retries = again, rng.randint(0, 3)
        if number and rng.random() < 0.3:
            step.after = [one for one in rng.sample(range(number), 1) if one not in self.private]
        self.private |= set() if self.ordered else set(step.again)
        return step

    def may_run_again(self, number: int) -> bool:
        """In programs without an order, nobody else may look at the results."""
        if self.ordered:
            return True
        return not any(number in step.depends_on for step in self.steps) and self.steps[number].then != "stop"

    def operand(self, bits: int) -> Expression:
        return self.integer() if self.rng.random() < 0.5 and self.sources() else ("const", self.rng.getrandbits(bits))

    def part(self) -> Any:
        kind = self.rng.randint(0, 3)
        sources = self.sources()
        if kind == 0 or not sources:
            return self.rng.randbytes(self.rng.randint(0, 5))
        if kind == 1:
            source = self.rng.choice(sources)
            length = self.rng.randint(0, min(5, self.steps[source].size))
            return ("bytes", source, self.rng.randint(0, self.steps[source].size - length), length)
        return (self.integer(), self.rng.randint(1, 4), self.rng.random() < 0.5)


def part_length(part: Any) -> int:
    if isinstance(part, bytes):
        return len(part)
    return int(part[3] if part[0] == "bytes" else part[1])


# ---- the model ----


def wrap(value: int) -> int:
    value %= 2**128
    return value - 2**128 if value >> 127 else value


def wide(expression: Expression) -> bool:
    if expression[0] == "load":
        return expression[3] == 16 and not expression[4]
    if expression[0] in ("const", "place", "crc", "same"):
        return False
    return any(wide(part) for part in expression[1:])


class Model:
    """Runs a program one request after the other."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.results: dict[int, bytes] = {}
        self.places: dict[int, int] = {}
        self.sent: list[bytes] = []
        self.outcomes: list[Any] = []

    def result(self, number: int, offset: int, length: int) -> bytes:
        if number not in self.results:
            raise NotEvaluated
        if offset + length > len(self.results[number]):
            raise TooShort
        return self.results[number][offset : offset + length]

    def integer(self, expression: Expression) -> int:
        kind = expression[0]
        if kind == "const":
            return wrap(expression[1])
        if kind == "load":
            _, number, offset, width, signed, big = expression
            data = self.result(number, offset, width)
            return wrap(int.from_bytes(data, "big" if big else "little", signed=signed))
        if kind == "place":
            self.result(expression[1], 0, 0)
            return self.places[expression[1]]
        if kind == "crc":
            return int(google_crc32c.value(self.result(*expression[1:])))
        left, right = self.integer(expression[1]), self.integer(expression[2])
        if kind == ">>":
            return wrap((left % 2**128 if wide(expression[1]) else left) >> min(right, 128))
        functions = {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "&": left & right,
            "|": left | right,
            "^": left ^ right,
        }
        return wrap(left << min(right, 128) if kind == "<<" else functions[kind])

    def condition(self, expression: Expression) -> bool:
        kind = expression[0]
        if kind in ("and", "or"):
            left, right = self.condition(expression[1]), self.condition(expression[2])
            return (left and right) if kind == "and" else (left or right)
        if kind == "not":
            return not self.condition(expression[1])
        if kind == "same":
            return self.result(expression[1], 0, len(expression[3])) == expression[3]
        left, right = self.integer(expression[1]), self.integer(expression[2])
        if kind == "any":
            return left & right != 0
        if kind == "all":
            return left & right == right
        if wide(expression[1]) or wide(expression[2]):
            left, right = left % 2**128, right % 2**128
        comparisons = {
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            "<=": left <= right,
            ">": left > right,
            ">=": left >= right,
        }
        return comparisons[kind]

    def run(self, program: list[Step]) -> None:
        self.outcomes = [None] * len(program)
        for number, step in enumerate(program):
            try:
                self.outcomes[number] = self.outcome(number, step, program)
            except Stopped:
                self.outcomes[number:] = [(chains.DependencyNotEvaluated,)] * (len(program) - number)
                break
            if self.outcomes[number][0] != "value" and step.then == "stop":
                self.outcomes[number + 1 :] = [(chains.DependencyNotEvaluated,)] * (len(program) - number - 1)
                break

    def outcome(self, number: int, step: Step, program: list[Step]) -> Any:
        """Tries the request until it succeeds, fails, or runs out of attempts."""
        tries = 0
        while True:
            self.results.pop(number, None)
            if any(isinstance(self.outcomes[one][0], type) for one in step.depends_on):
                return (chains.DependencyNotEvaluated,)
            try:
                done = self.attempt(number, step)
            except NotEvaluated:
                return (chains.DependencyNotEvaluated,)
            except TooShort:
                return (chains.DependencyReferenceError,)
            except IndexError:
                return (chains.DependencyBoundsError,)
            if done is not None:
                return done
            if tries == step.retries:
                return ("skipped",) if step.then in ("skip", "stop") else (chains.DependencyFalse,)
            tries += 1
            for one in step.again:
                self.outcomes[one] = self.outcome(one, program[one], program)
                if self.outcomes[one][0] != "value" and program[one].then == "stop":
                    for other in step.again[step.again.index(one) + 1 :]:
                        self.outcomes[other] = (chains.DependencyNotEvaluated,)
                    raise Stopped

    def attempt(self, number: int, step: Step) -> Any:
        """None: the condition was false."""
        if step.when is not None and not self.condition(step.when):
            return None
        if step.kind == "check":
            return ("value", None)
        if step.kind == "get":
            length = step.size if step.length is None else self.integer(step.length)
            if not 0 <= length <= step.size:
                raise IndexError
            place = self.place(step.offset, length)
            self.results[number], self.places[number] = bytes(self.memory[place : place + length]), place
            return ("value", self.results[number])
        if step.kind in ("put", "send"):
            data = b"".join(self.payload(part) for part in step.parts)
            length = len(data) if step.length is None else self.integer(step.length)
            if not 0 <= length <= len(data):
                raise IndexError
            if step.kind == "send":
                self.sent.append(data[:length])
            else:
                place = self.place(step.offset, length)
                self.memory[place : place + length] = data[:length]
            return ("value", None)
        if step.kind == "atomic":
            return self.atomic(number, step)
        return self.follow(number, step)

    def place(self, offset: Expression, length: int) -> int:
        place = self.integer(offset)
        if place < 0 or place + length > NBYTES:
            raise IndexError
        return place

    def payload(self, part: Any) -> bytes:
        if isinstance(part, bytes):
            return part
        if part[0] == "bytes":
            return self.result(*part[1:])
        value, width, big = part
        return (self.integer(value) % 2 ** (8 * width)).to_bytes(width, "big" if big else "little")

    def atomic(self, number: int, step: Step) -> Any:
        size = step.bits // 8
        value = self.integer(step.value) % 2**step.bits
        swapped = self.integer(step.swapped) % 2**step.bits if step.atomic == "compare_swap" else 0
        place = self.place(step.offset, size)
        if place % size:
            raise IndexError
        old = int.from_bytes(self.memory[place : place + size], "little")
        new = {
            "fetch_add": old + value,
            "ADD": old + value,
            "AND": old & value,
            "OR": old | value,
            "XOR": old ^ value,
            "SWAP": value,
            "compare_swap": swapped if old == value else old,
        }[step.atomic]
        self.memory[place : place + size] = (new % 2**step.bits).to_bytes(size, "little")
        self.results[number], self.places[number] = old.to_bytes(size, "little"), place
        return ("value", old)

    def follow(self, number: int, step: Step) -> Any:
        place = self.place(step.offset, 8)
        if place == 0:
            return None
        for count in range(1, step.limit + 1):
            self.results[number], self.places[number] = bytes(self.memory[place : place + 8]), place
            value = ("value", chains.Followed(self.results[number], place, count))
            if step.until is not None and self.condition(step.until):
                return value
            place = self.integer(step.next)
            if place == 0:
                break
        if step.until is None:
            return value
        del self.results[number], self.places[number]
        return None


# ---- the chain ----


class Builder:
    """Makes a chain of a program."""

    def __init__(self, ground: Ground, program: list[Step], *, ordered: bool) -> None:
        self.ground = ground
        self.chain = ground.worker.new_chain(capacity=64, ordered=ordered)
        for step in program:
            self.add(step)

    def request(self, number: int, node: Any) -> chains.ChainRequest:
        return node if number == len(self.chain) else self.chain[number]

    def integer(self, expression: Expression, node: Any = None) -> Any:
        kind = expression[0]
        if kind == "const":
            return expression[1]
        if kind == "place":
            return self.chain[expression[1]].offset
        if kind == "crc":
            return self.chain[expression[1]].crc32c(*expression[2:])
        if kind == "load":
            _, number, offset, width, signed, big = expression
            load = getattr(self.request(number, node), f"{'i' if signed else 'u'}{8 * width}")
            return load(offset, big=big) if width > 1 else load(offset)
        return OPERATORS[kind](self.expression(expression[1], node), self.integer(expression[2], node))

    def expression(self, expression: Expression, node: Any = None) -> chains.Integer:
        """The same, but a constant is one of the chain's, too."""
        value = self.integer(expression, node)
        return value if isinstance(value, chains.Integer) else _constant(value)

    def condition(self, expression: Expression, node: Any = None) -> Any:
        kind = expression[0]
        if kind == "and":
            return self.condition(expression[1]) & self.condition(expression[2])
        if kind == "or":
            return self.condition(expression[1]) | self.condition(expression[2])
        if kind == "not":
            return ~self.condition(expression[1])
        if kind == "same":
            return self.chain[expression[1]].equals(expression[3])
        left, right = self.expression(expression[1], node), self.integer(expression[2], node)
        if kind in ("any", "all"):
            return getattr(left, f"{kind}_bits")(right)
        return OPERATORS[kind](left, right)

    def part(self, part: Any) -> Any:
        if isinstance(part, bytes):
            return part
        if part[0] == "bytes":
            return self.chain[part[1]].bytes(part[2], part[3])
        return self.expression(part[0]).pack(part[1], big=part[2])

    def add(self, step: Step) -> None:
        chain, remote = self.chain, self.ground.remote
        options: dict[str, Any] = {"after": step.after, "on_false": step.then}
        if step.again:
            options["on_false"] = chains.Retry(step.retries, again=step.again, then=step.then)
        if step.when is not None:
            options["when"] = self.condition(step.when)
        offset = self.expression(step.offset)
        length = None if step.length is None else self.expression(step.length)
        if step.kind == "get":
            chain.get(remote, offset, step.size if length is None else length, at_most=step.size, **options)
        elif step.kind == "put":
            chain.put(remote, tuple(map(self.part, step.parts)), offset, length=length, **options)
        elif step.kind == "send":
            chain.tag_send(self.ground.endpoint, tuple(map(self.part, step.parts)), TAG, length=length, **options)
        elif step.kind == "check":
            chain.check(**options)
        elif step.kind == "atomic":
            value = self.expression(step.value)
            if step.atomic == "compare_swap":
                chain.compare_swap(remote, value, self.expression(step.swapped), offset, bits=step.bits, **options)
            elif step.atomic == "fetch_add":
                chain.fetch_add(remote, value, offset, bits=step.bits, **options)
            else:
                chain.atomic(remote, ucp.AtomicOp[step.atomic], value, offset, bits=step.bits, **options)
        else:
            options["next_offset"] = lambda node: self.expression(step.next, node)
            if step.until is not None:
                options["until"] = lambda node: self.condition(step.until, node)
            chain.follow(remote, offset, limit=step.limit, length=8, **options)


def _constant(value: int) -> chains.Integer:
    from trio_ucx.ucp.chains._expressions import as_integer

    return as_integer(value)


def simplified(outcome: Any) -> Any:
    if isinstance(outcome, Error):
        return (type(outcome.error),)
    assert isinstance(outcome, Value), outcome
    return ("skipped",) if outcome.value is chains.SKIPPED else ("value", outcome.value)


async def compare(transports: str, programs: list[tuple[list[Step], bytes]], *, ordered: bool) -> None:
    async with open_ground(transports, nbytes=NBYTES) as ground:
        for program, content in programs:
            ground.write(content)
            model = Model(bytearray(content))
            chain = Builder(ground, program, ordered=ordered).chain
            for _ in range(2):  # a chain can be run again
                model.results.clear()
                model.sent.clear()
                model.run(program)
                outcomes = await chain.run()
                assert [simplified(outcome) for outcome in outcomes] == model.outcomes, program
                assert ground.read(0, NBYTES) == model.memory
                received = []
                buffer = bytearray(64)
                for _ in model.sent:
                    length, _ = await ground.owner.tag_receive(buffer, TAG)
                    received.append(bytes(buffer[:length]))
                assert received == model.sent if ordered else sorted(received) == sorted(model.sent)
            chain.close()


@pytest.mark.parametrize("ordered", [True, False])
@given(seed=st.randoms(use_true_random=False))
@settings(settings.get_profile("model"), max_examples=40, suppress_health_check=list(HealthCheck))
@pytest.mark.sample(1)
def test_like_the_model(transports: str, seed: random.Random, ordered: bool) -> None:
    programs = [(Maker(seed, ordered=ordered).program(), seed.randbytes(NBYTES)) for _ in range(5)]
    trio.run(lambda: compare(transports, programs, ordered=ordered))
    assert_no_live_handles()
