"""The rounds of a measurement: what is sent, how it is made, and how it is verified.

Payloads are pieces of a pattern that both ends make from a seed. Each round uses another part of it, so that lost,
stale and swapped data are noticed. Each end keeps all payloads of a round and compares them afterwards, outside the
measured time. A round's messages are spread over its flows: each flow has a consecutive part of them.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any

import attrs

from .errors import PerfError
from .sizes import MAX_SIZE

#: Limits for the payloads of a round: their number, and their bytes (but at least one payload for each flow).
ROUND_MESSAGES = 4096
ROUND_BYTES = 8 * 2**20
#: The most flows of a round, and the most connections of a client.
MAX_FLOWS = 1024
#: The number of places in the pattern at which rounds begin.
SHIFTS = 4096


class RoundKind(enum.Enum):
    """What a round measures. LATENCY: each message is answered before the next; STREAM: many in flight."""

    LATENCY = "latency"
    STREAM = "stream"


class PerfOperation(enum.Enum):
    """How the payloads travel over UCX. Plain TCP imitates the pattern."""

    MESSAGES = "messages"
    PUTS = "puts"
    GETS = "gets"
    ACTIVE_MESSAGES = "active-messages"
    BYTE_STREAM = "stream"

    @property
    def one_sided(self) -> bool:
        """True if only the client acts."""
        return self in (PerfOperation.PUTS, PerfOperation.GETS)


def round_limit(size: int, flows: int = 1) -> int:
    """Returns how many messages of ``size`` bytes a round has at most."""
    return max(flows, min(ROUND_MESSAGES, ROUND_BYTES // size))


@attrs.frozen
class Round:
    """``count`` messages of ``size`` bytes: the pattern of ``seed`` from byte ``shift`` on.

    Attributes:
        plain: True: over plain TCP.
        flows: how many tasks of the client send at the same time.
        both: True: with many in flight, the server sends as much as the client, at the same time.
    """

    kind: RoundKind
    seed: str
    size: int
    count: int
    shift: int
    plain: bool = False
    operation: PerfOperation = PerfOperation.MESSAGES
    flows: int = 1
    both: bool = False

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Round:
        """Decodes and checks a client's request, because it decides how much memory we use."""
        try:
            names = ("seed", "size", "count", "shift", "plain", "flows", "both")
            asked = cls(
                RoundKind(message["kind"]),
                operation=PerfOperation(message["operation"]),
                **{name: message[name] for name in names},
            )
            sensible = (
                isinstance(asked.seed, str)
                and 1 <= asked.size <= MAX_SIZE
                and 1 <= asked.flows <= MAX_FLOWS
                and 1 <= asked.count <= round_limit(asked.size, asked.flows)
                and asked.size * asked.count <= MAX_SIZE
                and 0 <= asked.shift < SHIFTS
            )
        except (KeyError, TypeError, ValueError):
            sensible = False
        if not sensible:
            raise PerfError(f"the client asks for an invalid round: {message}")
        return asked

    def to_message(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "kind": self.kind.value, "operation": self.operation.value}

    @property
    def acts_alone(self) -> bool:
        """True if only the client acts, in the server's memory."""
        return self.operation.one_sided and not self.plain

    @property
    def goes(self) -> bool:
        """True if payloads go to the server."""
        return self.operation is not PerfOperation.GETS

    @property
    def comes_back(self) -> bool:
        """True if payloads come from the server."""
        if self.operation.one_sided:
            return not self.goes
        return self.both or self.kind is RoundKind.LATENCY


@attrs.frozen
class Part:
    """Consecutive messages of a round, which are those of one flow.

    Attributes:
        offset: where the first one begins in the round, in bytes.
        data: all of them.
        pieces: the single ones.
    """

    offset: int
    data: memoryview
    pieces: list[memoryview]


class Payloads:
    """The memory of one end: the pattern that it sends, and the buffer that it receives into."""

    def __init__(self) -> None:
        self._seed: str | None = None
        self._pattern = memoryview(b"")
        self._received = bytearray()

    def prepare(self, round: Round) -> tuple[list[Part], list[Part]]:
        """Returns what to send, and where to receive, for each flow that has a message."""
        length = max(ROUND_BYTES, round.size * round.count)  # long enough for most rounds, because making it takes time
        if self._seed != round.seed or len(self._received) < length:
            self._pattern = memoryview(hashlib.shake_256(round.seed.encode()).digest(length + SHIFTS))
            self._received = bytearray(length)
            pages = memoryview(self._received)[::4096]
            pages[:] = bytes(len(pages))  # written, so that no page is new in the measured time
            self._seed = round.seed
        return _parts(self.expected(round), round), _parts(memoryview(self._received), round)

    def expected(self, round: Round) -> memoryview:
        """Returns what the other end sends in a round that was prepared."""
        return self._pattern[round.shift : round.shift + round.count * round.size]

    def verify(self, round: Round, memory: memoryview | None = None) -> None:
        """Compares all that was received in a round.

        Args:
            memory: where, if not in the buffer.

        Raises:
            PerfError: it differs from what the other end should have sent.
        """
        expected = self.expected(round)
        received = self._received if memory is None else bytes(memory[: len(expected)])
        if received.startswith(expected):
            return
        wrong = next(index for index, byte in enumerate(expected) if received[index] != byte)
        number, offset = divmod(wrong, round.size)
        raise PerfError(
            f"wrong data arrived: message {number + 1} of {round.count} ({round.kind.value}, {round.size} bytes each) "
            f"differs from what was sent, from byte {offset} on"
        )


def _parts(data: memoryview, round: Round) -> list[Part]:
    size, parts, first = round.size, [], 0
    each, more = divmod(round.count, round.flows)
    for flow in range(min(round.flows, round.count)):
        begin, first = first, first + each + (flow < more)
        pieces = [data[number * size : (number + 1) * size] for number in range(begin, first)]
        parts.append(Part(begin * size, data[begin * size : first * size], pieces))
    return parts
