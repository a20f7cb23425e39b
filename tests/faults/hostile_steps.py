"""A server, its honest client, and a hostile peer of it, each a process: ``test_hostile_steps.py`` runs them.

The hostile peer takes random steps of ``docs/wire.md``, legal and illegal. Each session draws its steps from a seed and
its own number, so it can be repeated. It uses UCX by its API only: what a peer can do that forges UCX's own packets is
not the subject. So it neither gets nor puts by UCX's messages (``docs/ucp.md`` says how these end the owner).
"""

from __future__ import annotations

import array
import contextlib
import gc
import itertools
import json
import logging
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

sys.path.append(str(Path(__file__).parent.parent))

from false_addresses import random_lie
from helpers import pattern, resident, segments
from peers import REMOTE, ask, say
from timing import waited_by

import trio_ucx
from trio_ucx import _wire as wire
from trio_ucx import ucp
from trio_ucx._byte_stream import MAX_PIECE
from trio_ucx._handshake.client import Connector
from trio_ucx._handshake.exchange import MAX_FRAME, Assigned, Declined, Event, Exchange, Kind, Welcomed
from trio_ucx._handshake.facts import Facts, SharedMemory
from trio_ucx._handshake.handshake import ExchangeOptions, Handshake
from trio_ucx._handshake.registry import SOFTWARE, Registry
from trio_ucx._link import Options
from trio_ucx.testing import internals, live_handles
from trio_ucx.ucp._engine.numbering import Numbers
from trio_ucx.ucp._tag import post_bytes_send

#: Queues that the server sends back, one that it never reads, and one for memory descriptors.
ECHOED, UNREAD, DESCRIPTORS = (0, 1, 2), 3, 4
#: Active messages that the server receives, and those of remote memory.
AM_ID, REMOTE_ID = 1, 4095
MEMORY = 1 << 16
LONGEST = 4 << 20
#: Messages of 1000 bytes for which a window of 1 MiB has room.
WINDOWFUL = 2**20 // 1288
#: Lengths of the data of a request for remote memory, by its kind: a put's, an atomic's.
_DATA = {2: [0, 0, 1, 100, 60_000, 100_000, 1 << 20], 4: [16, 16, 16, 0, 15, 17, 100_000]}
#: Sessions until the hostile process takes new workers.
GENERATION = 100
#: What a session can fail with: it is the peer's own fault.
EXPECTED = (
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.BusyResourceError,
    ucp.UCXError,
    wire.ProtocolError,
    ValueError,
)


# ---- the server ----


async def serve(log: str) -> None:
    """Sends messages and the byte stream back, attaches descriptors, and receives active messages. Reports its state
    for each line of the test.
    """
    logging.basicConfig(filename=log, level=logging.INFO, format="%(levelname)s %(message)s")
    connections: set[trio_ucx.Connection] = set()

    async def echo(connection: trio_ucx.Connection, queue: int) -> None:
        while True:
            try:
                await connection.send(await connection.receive(queue), queue)
            except ucp.UCXError as error:
                assert error.status is ucp.Status.MESSAGE_TRUNCATED, error
            except trio.EndOfChannel:
                return

    async def stream(connection: trio_ucx.Connection) -> None:
        async for chunk in connection:
            await connection.send_all(chunk)

    async def attach(connection: trio_ucx.Connection) -> None:
        while True:
            try:
                descriptor = await connection.receive(DESCRIPTORS)
                with connection.endpoint.attach(descriptor) as memory, trio.move_on_after(1):
                    await memory.get(0, min(100, memory.nbytes))
                    await memory.put(b"here", 0)
            except (ValueError, TypeError, ucp.UCXError):
                pass
            except trio.EndOfChannel:
                return

    async def handler(connection: trio_ucx.Connection) -> None:
        connections.add(connection)
        try:
            async with trio.open_nursery() as nursery:
                for queue in ECHOED:
                    nursery.start_soon(echo, connection, queue)
                nursery.start_soon(stream, connection)
                nursery.start_soon(attach, connection)
        finally:
            connections.discard(connection)

    async def receive(queue: ucp.ActiveMessages) -> None:
        async for message in queue:
            with message, contextlib.suppress(ucp.UCXError, trio.BrokenResourceError), trio.move_on_after(0.05):
                if message.length <= LONGEST:
                    await message.receive()

    def state() -> dict[str, Any]:
        gc.collect()
        engine = internals(worker)
        statistics = worker.statistics()
        return {
            "resident": resident(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "segments": segments(),
            "connections": len(connections),
            "handles": live_handles(),
            "sinks": len(engine.tag_dispatch.sinks),
            "in flight": statistics.operations_in_flight,
            "missed": statistics.missed_events,
            "tasks": len(trio.lowlevel.current_root_task().child_nurseries),
        }

    with ucp.open_context(features=REMOTE) as context:
        async with ucp.open_worker(context=context) as worker, trio.open_nursery() as nursery:
            allocated, registered = context.allocate(MEMORY), context.register(bytearray(MEMORY))
            options = {"host": "127.0.0.1", "worker": worker, "connect_timeout": 2, "close_timeout": 2}
            serving = partial(trio_ucx.serve_ucx, handler, 0, max_message_size=LONGEST, **options)
            with worker.open_active_messages(AM_ID, max_bytes=1 << 20) as queue:
                nursery.start_soon(receive, queue)
                [listener] = await nursery.start(serving)
                descriptors = [each.descriptor.hex() for each in (allocated, registered)]
                say({"address": listener.address, "memory": descriptors})
                while True:
                    try:
                        await ask()
                    except EOFError:
                        break
                    say(state())
                nursery.cancel_scope.cancel()
            allocated.close()
            registered.close()


# ---- its honest client ----


@attrs.define
class Conversation:
    """Numbered messages that must come back once, in order and unchanged."""

    connection: trio_ucx.Connection
    chance: random.Random
    sent: int = 0
    received: int = 0

    async def run(self, ending: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            for queue in ECHOED:
                send, receive = trio.open_memory_channel[bytes](16)
                nursery.start_soon(self._send, queue, send, ending)
                nursery.start_soon(self._check, queue, receive)
            nursery.start_soon(self._stream, ending)

    async def _send(self, queue: int, sent: trio.MemorySendChannel[bytes], ending: trio.Event) -> None:
        async with sent:
            while not ending.is_set():
                size = self.chance.choice([8, 100, 1000, 1500, 10_000, 100_000, 300_000])
                message = struct.pack("<II", queue, self.sent) + pattern(size, self.sent)
                await sent.send(message)
                await self.connection.send(message, queue)
                self.sent += 1
                await trio.sleep(self.chance.uniform(0, 0.05))

    async def _check(self, queue: int, sent: trio.MemoryReceiveChannel[bytes]) -> None:
        async for message in sent:
            with trio.fail_after(20):
                answer = await self.connection.receive(queue)
            assert answer == message, f"queue {queue}: {len(answer)} bytes came for {len(message)}: {answer[:8].hex()}"
            self.received += 1
        with trio.move_on_after(0.2):
            raise AssertionError(f"queue {queue}: {len(await self.connection.receive(queue))} bytes too many")

    async def _stream(self, ending: trio.Event) -> None:
        number = 0
        while not ending.is_set():
            data = array.array("I", [number]) * self.chance.choice([1, 100, 20_000])
            await self.connection.send_all(data.tobytes())
            got = b""
            with trio.fail_after(20):
                while len(got) < len(data) * data.itemsize:
                    got += await self.connection.receive_some()
            assert got == data.tobytes(), "the byte stream was changed"
            number += 1
            await trio.sleep(0.02)


async def measure(connection: trio_ucx.Connection, server: int, trips: list[float], noise: list[float]) -> None:
    """Makes round trips, and notes how long they take, less what this process and the server's waited for a processor,
    and how late our own sleeps end.
    """
    waited = waited_by(server)
    while True:
        start, before = time.perf_counter(), waited()
        await connection.send(b"are you there?")
        await connection.receive()
        end = time.perf_counter()
        trips.append(end - start - (waited() - before))
        await trio.sleep(0.005)
        noise.append(time.perf_counter() - end - 0.005)


async def be_honest(address: list[Any], seed: str, server: int) -> None:
    """Converses over two connections, and measures over a third, until the test's line; then reports."""
    chance = random.Random(seed)
    trips: list[float] = []
    noise: list[float] = []
    ending = trio.Event()
    async with ucp.open_worker() as worker, contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(trio_ucx.connect(tuple(address), worker=worker)) for _ in range(3)
        ]
        conversations = [Conversation(each, chance) for each in connections[1:]]
        say("ready")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure, connections[0], server, trips, noise)
            async with trio.open_nursery() as talk:
                for each in conversations:
                    talk.start_soon(each.run, ending)
                await ask()
                ending.set()
            nursery.cancel_scope.cancel()
        messages = sum(each.received for each in conversations)
        assert messages == sum(each.sent for each in conversations)
        say({"messages": messages, "trips": trips, "noise": noise})


# ---- the hostile peer ----


@attrs.define
class Sink:
    """Takes what the server sends to a session: it drops small messages, and keeps announcements without an answer."""

    dispatch: Any
    greedy: bool
    kept: list[int] = attrs.field(factory=list)

    def message_arrived(self, queue: int, handle: int, length: int) -> None:
        self.kept.append(handle) if self.greedy else self.dispatch.discard(handle)

    def packed_arrived(self, queue: int, count: int, length: int, data: bytes) -> None:
        pass

    def queue_stopped(self, error: ucp.UCXError) -> None:
        pass

    def internal_error(self, error: BaseException) -> None:
        pass

    def release(self) -> None:
        for handle in self.kept:
            self.dispatch.discard(handle)
        self.kept = []


def split_frames(data: bytes, at_start: bool) -> list[bytes]:
    """The preamble, if the data begin with it, and the frames."""
    frames = [data[:44]] if at_start else []
    rest = data[44:] if at_start else data
    while rest:
        end = 4 + struct.unpack_from("<I", rest)[0]
        frames.append(rest[:end])
        rest = rest[end:]
    return frames


@attrs.define(eq=False)
class Attacker:
    """What the sessions of a hostile process share."""

    address: tuple[str, int]
    memory: list[bytes]
    tcp_only: bool
    worker: ucp.Worker
    #: A worker whose address some sessions give instead of their own.
    other: ucp.Worker
    ids: list[int] = attrs.field(factory=list)
    victim_addresses: list[Facts] = attrs.field(factory=list)
    counts: Counter[str] = attrs.field(factory=Counter)


class Session:
    """One session: an exchange, an endpoint perhaps, and steps."""

    def __init__(self, attacker: Attacker, chance: random.Random) -> None:
        self.attacker = attacker
        self.chance = chance
        self.control: socket.socket | None = None
        self.endpoint: ucp.Endpoint | None = None
        self.connection: trio_ucx.Connection | None = None
        self.handshake: Handshake | None = None
        self.sink: Sink | None = None
        #: The id that the server has chosen.
        self.id = 0
        self.number = 0
        self.background: trio.Nursery | None = None

    async def run(self) -> None:
        try:
            with trio.move_on_after(3):
                async with trio.open_nursery() as self.background:
                    await self._take_steps()
                    self.background.cancel_scope.cancel()
        finally:
            self._forget()

    async def _take_steps(self) -> None:
        with trio.move_on_after(1.5):
            if self.chance.random() < 0.35:
                await self._connect()
            else:
                await self._exchange()
        with trio.move_on_after(1):
            for _ in range(self.chance.choice([0, 1, 3, 6, 12, 25])):
                await self._step()
        await self._end()

    # ---- beginning ----

    async def _connect(self) -> None:
        """As an honest client does."""
        window = self.chance.choice([4096, 2**16, 2**20])
        self.connection = connection = await trio_ucx.open_ucx_stream(
            *self.attacker.address, worker=self.attacker.worker, window=window, connect_timeout=1, close_timeout=1
        )
        self.endpoint = connection.endpoint
        self.id = internals(connection).peer_id
        control = internals(connection).closing.control_socket
        assert control is not None
        self.control = control._socket

    async def _exchange(self) -> None:
        """By hand: legally, or with frames that are changed, repeated, left out, in another order, cut or too long."""
        chance, attacker = self.chance, self.attacker
        self.control = control = socket.socket()
        control.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            control.connect(attacker.address)
        await trio.lowlevel.wait_writable(control)
        options = ExchangeOptions(SharedMemory.AUTO, 20.0, None, None)
        connector = Connector(Registry.of(attacker.worker), _no_socket, "victim", options, Options(), 1)
        self.handshake = handshake = connector._handshake
        handshake.remote = attacker.address
        dispatch = internals(attacker.worker).tag_dispatch
        self.sink = Sink(dispatch, greedy=chance.random() < 0.5)
        exchange = Exchange(is_client=True, software=SOFTWARE, authkey=None)
        honest = chance.random() < 0.5
        tampers_at = 99 if honest or chance.random() < 0.5 else chance.randrange(3)
        facts = handshake.make_facts(SharedMemory.AUTO)
        dispatch.sinks[handshake.id] = self.sink
        exchange.open(facts if honest or chance.random() < 0.5 else self._lie(facts))
        await self._say(exchange.data_to_send(), at_start=True, tampers=tampers_at == 0)
        for turn in range(1, 6):
            event = await self._hear(exchange)
            if isinstance(event, Welcomed):
                attacker.victim_addresses[:] = [event.facts]
            if event is None:
                return
            if honest or chance.random() < 0.6:
                connector._answer(exchange, event)
            else:
                self._answer_wrongly(exchange, handshake, event)
            await self._say(exchange.data_to_send(), tampers=tampers_at == turn)
            if handshake._core is not None:
                break
        core = handshake._core
        if core is None and isinstance(event, Welcomed) and chance.random() < 0.5:
            self.endpoint = await self._open_raw(event.facts)
        elif core is not None:
            self.endpoint = ucp.Endpoint._create(attacker.worker, core)
            self.number = handshake.number or 0
        if self.endpoint is None:
            return
        self.id = handshake.peer.facts.connection_id if handshake._peer is not None else event.facts.connection_id
        attacker.ids.append(self.id)
        if honest or chance.random() < 0.7:
            await self._send(wire.CONTROL, wire.encode_frame(wire.Hello(self.number)))

    async def _open_raw(self, facts: Facts) -> ucp.Endpoint:
        """An endpoint that was not agreed on."""
        blob = self.chance.choice([facts.network_address, facts.address]) or facts.address
        address = ucp.WorkerAddress.from_ucx(blob, process=facts.host.process)
        self.id = facts.connection_id
        return await self.attacker.worker.open_endpoint(address)

    def _answer_wrongly(self, exchange: Exchange, handshake: Handshake, event: Event) -> None:
        chance = self.chance
        if isinstance(event, Welcomed):
            handshake.peer_facts_arrived(event.facts)
        numbers = chance.choice(
            [event.numbers if isinstance(event, Welcomed | Assigned | Declined) else Numbers(0)]
            + [attrs.evolve(Numbers(0), next=chance.choice([0, 1, 5, 64_999, 2**16 - 1]))]
        )
        for _ in range(chance.choice([1, 1, 2, 70])):
            number = chance.choice([0, 1, chance.randrange(50), chance.randrange(2**16), 64_999])
            chance.choice([exchange.take, lambda _, numbers: exchange.decline(numbers)])(number, numbers)

    def _lie(self, facts: Facts) -> Facts:
        chance, victims = self.chance, self.attacker.victim_addresses
        host = facts.host
        lies: list[dict[str, Any]] = [
            {"connection_id": chance.choice([*self.attacker.ids[-20:], 2**31, 2**32 - 1, 5])},
            {"window": chance.choice([0, 4096, 4097, 2**62, 2**64 - 1])},
            {"threshold": chance.choice([0, 1, 64, 100, 1024, 2**62])},
            {"shared_memory": chance.choice(list(SharedMemory))},
            {"error_handling": False},
            {"sees_local": False},
            {"software": chance.choice(["", "a\nERROR b", "\x1b[2J", "x" * 60_000])},
            {"ucx": chance.choice([(0, 0), (1, 13), (255, 255)])},
            {"host": attrs.evolve(host, process=attrs.evolve(host.process, pid=chance.choice([0, 1, 2**22])))},
            {"host": attrs.evolve(host, process=attrs.evolve(host.process, start=chance.randrange(2**63)))},
            {"host": attrs.evolve(host, user=12345)},
            {"address": internals(self.attacker.other).address.ucx},
            {"address": b"", "network_address": b""},
            {"network_address": facts.address},
            {"network_address": facts.network_address + facts.network_address},
            {"address": _changed(facts.address, chance)},
            {"network_address": _changed(facts.network_address, chance)},
            *[
                {
                    "address": random_lie(facts.address, chance),
                    "network_address": random_lie(facts.network_address, chance),
                }
                for _ in range(4)
            ],
        ]
        if victims:
            lies.append({"address": victims[0].address, "network_address": victims[0].network_address})
        changes: dict[str, Any] = {}
        for lie in chance.sample(lies, chance.choice([1, 1, 2, 3])):
            changes |= lie
        with contextlib.suppress(ValueError, struct.error):
            changed = attrs.evolve(facts, **changes)
            changed.encode()
            return changed
        return facts

    async def _hear(self, exchange: Exchange) -> Event | None:
        assert self.control is not None
        while True:
            event = exchange.next_event()
            if event is not None:
                return event
            await trio.lowlevel.wait_readable(self.control)
            data = self.control.recv(65536)
            if not data:
                return None
            exchange.receive_data(data)

    async def _say(self, data: bytes, *, at_start: bool = False, tampers: bool = False) -> None:
        pieces = [data]
        if tampers and data:
            pieces = self._tampered(split_frames(data, at_start))
        for piece in pieces:
            await self._write(piece)

    def _tampered(self, frames: list[bytes]) -> list[bytes]:
        chance = self.chance
        at = chance.randrange(len(frames))
        one = frames[at]
        before, after = frames[:at], frames[at + 1 :]
        how = chance.randrange(8)
        if how == 0:
            frames = [*before, _changed(one, chance), *after]
        elif how == 1:
            frames = [*before, *[one] * chance.choice([2, 3, 70]), *after]
        elif how == 2:
            frames = [*before, *after]
        elif how == 3:
            frames = frames[::-1]
        elif how == 4:
            frames = [*before, one[: chance.randrange(len(one))], *after]
        elif how == 5:
            head = struct.pack("<IB", chance.choice([0, MAX_FRAME, MAX_FRAME + 1, 2**32 - 1]), chance.randrange(10))
            frames = [*before, head + bytes(chance.choice([0, 100, 2**17])), *after]
        elif how == 6:
            body = chance.randbytes(chance.randrange(200))
            frames = [*before, struct.pack("<IB", 1 + len(body), chance.randrange(12)) + body, one, *after]
        else:
            frames = [bytes([byte]) for byte in b"".join(frames)[:300]]
        return frames

    async def _write(self, data: bytes) -> None:
        while data and self.control is not None:
            try:
                data = data[self.control.send(data) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.control)

    # ---- steps ----

    async def _step(self) -> None:
        """Takes a random step. Without an endpoint only the control socket is left."""
        steps: list[tuple[int, Callable[[], Awaitable[object]]]] = [
            (1, self._bytes_on_control),
            (1, self._abort_on_control),
            (1, self._close_control),
            (3, lambda: trio.sleep(self.chance.choice([0, 0.001, 0.01]))),
        ]
        if self.endpoint is not None:
            steps += [
                (6, self._frame),
                (2, self._noise_as_frame),
                (8, self._message),
                (3, self._batch),
                (3, self._to_another_id),
                (3, self._rendezvous),
                (3, self._active_message),
                (4, self._remote_request),
                (2, self._descriptor),
                (2, self._remote_memory),
                (2, self._chain),
                (1, self._half_close),
            ]
        weights = [weight for weight, _ in steps]
        [(_, step)] = self.chance.choices(steps, weights)
        self.attacker.counts[getattr(step, "__name__", "")] += 1
        with contextlib.suppress(*EXPECTED, trio.TooSlowError):
            await step()

    def _later(self, function: Callable[..., Awaitable[object]], *args: Any, **options: Any) -> None:
        """Does it in the background, and cancels it at a random moment."""
        patience = self.chance.choice([0, 0.001, 0.01, 0.1, 1])

        async def run() -> None:
            with contextlib.suppress(*EXPECTED), trio.move_on_after(patience):
                await function(*args, **options)

        assert self.background is not None
        self.background.start_soon(run)

    async def _send(self, queue: int, data: bytes, id: int | None = None) -> None:
        assert self.endpoint is not None
        self._later(self.endpoint.tag_send, data, ((self.id if id is None else id) << 32) | queue)
        await trio.lowlevel.checkpoint()

    async def _frame(self) -> None:
        chance = self.chance
        cls = chance.choice(list(wire._FRAMES.values()))
        fields = [
            max(least, min(most, chance.choice([least, least + 1, most, 1, 3, 300, 2**16, self.number])))
            for least, most in cls.limits
        ]
        data = struct.pack(cls.format, cls.kind, *fields)
        for _ in range(chance.choice([1, 1, 1, 2, 50])):
            await self._send(wire.CONTROL, data)

    async def _noise_as_frame(self) -> None:
        chance = self.chance
        data = chance.choice([b"", b"\x06", chance.randbytes(chance.randrange(40)), bytes(2000), bytes(100_000)])
        await self._send(wire.CONTROL, data)

    async def _message(self) -> None:
        chance = self.chance
        queue = chance.choice([*ECHOED, *ECHOED, UNREAD, 7, wire.STREAM, wire.STREAM, wire.BATCH, 2**31 - 1, 2**32 - 1])
        size = chance.choice([0, 1, 8, 1000, 1024, 1025, 5000, 30_000, 70_000, MAX_PIECE + 1, LONGEST + 1])
        for _ in range(chance.choice([1, 1, 1, 5, 100 if size < 10_000 else 2])):
            await self._send(queue, bytes(size))

    async def _batch(self) -> None:
        chance = self.chance
        data = b""
        for _ in range(chance.randrange(1, 4)):
            length, count = chance.choice([0, 1, 8, 500]), chance.choice([0, 1, 2, 5, 65535])
            queue = chance.choice([*ECHOED, UNREAD, wire.CONTROL, wire.STREAM, wire.BATCH, 2**32 - 1])
            data += wire.PACKED_HEAD.pack(queue, length, count) + bytes(length * min(count, 5))
        await self._send(wire.BATCH, data[: chance.choice([len(data), len(data) - 1, 5000])])

    async def _to_another_id(self) -> None:
        chance = self.chance
        ids = [0, 5, 2**31, 2**32 - 1, *self.attacker.ids[-50:]]
        queue = chance.choice([0, wire.CONTROL, wire.STREAM, 2**31 + 9])
        await self._send(queue, bytes(chance.choice([1, 9, 1000, 5000, 100_000])), chance.choice(ids))

    async def _rendezvous(self) -> None:
        """Large messages, which are then cancelled, or whose endpoint goes."""
        for _ in range(self.chance.choice([1, 4, 30])):
            await self._send(self.chance.choice([*ECHOED, UNREAD, wire.STREAM]), bytes(1 << 20))
        if self.chance.random() < 0.5:
            await trio.sleep(self.chance.choice([0, 0.001, 0.02]))
            self._abort()

    async def _active_message(self) -> None:
        chance = self.chance
        assert self.endpoint is not None
        id = chance.choice([AM_ID, AM_ID, 0, 2, REMOTE_ID - 1, 65535])
        data = bytes(chance.choice([0, 1, 100, 10_000, 100_000, 1 << 20, LONGEST + 1]))
        header = chance.randbytes(chance.choice([0, 1, 24, 56, 200]))
        for _ in range(chance.choice([1, 1, 10])):
            self._later(
                self.endpoint.am_send,
                id,
                data,
                header,
                reply=chance.random() < 0.5,
                protocol=chance.choice(list(ucp.SendProtocol)) if len(data) < 5000 else ucp.SendProtocol.AUTO,
            )

    async def _remote_request(self) -> None:
        """A request for remote memory, or an answer, with the fields that ``docs/wire.md`` gives them, or others."""
        chance = self.chance
        assert self.endpoint is not None
        token = chance.choice([each.token for each in self._descriptors()] + [chance.randbytes(16)])
        kind = chance.choice([1, 1, 1, 2, 2, 3, 4, 4, 4, 0, 77])
        lengths = [0, 1, 100, MEMORY, MEMORY + 1, 2**40, 2**64 - 1, *([4, 8] * 5 if kind == 4 else [])]
        length = chance.choice(lengths)
        offset = chance.choice([0, 1, 8, MEMORY - 8, MEMORY - 1, MEMORY, 2**63, 2**64 - 1])
        if kind == 3:
            header = struct.pack("<BB6xQQ", kind, chance.randrange(256), chance.randrange(10), chance.randrange(2**64))
        else:
            header = struct.pack(
                "<BB6xQQQQ16s",
                kind,
                chance.choice([0, 0, 1, 2, 5, 6, 255]),
                chance.randrange(2**64),
                chance.randrange(2**64),
                offset,
                length,
                token,
            )
        if chance.random() < 0.2:
            header = _changed(header, chance)[: chance.choice([len(header), chance.randrange(len(header))])]
        data = chance.randbytes(chance.choice(_DATA.get(kind, [0])))
        for _ in range(chance.choice([1, 1, 5, 300 if len(data) < 1000 else 5])):
            self._later(self.endpoint.am_send, REMOTE_ID, data, header, reply=chance.random() < 0.8)

    def _descriptors(self) -> list[ucp.MemoryDescriptor]:
        return [ucp.MemoryDescriptor.from_bytes(each) for each in self.attacker.memory]

    async def _descriptor(self) -> None:
        """Sends a descriptor of memory, damaged perhaps."""
        chance = self.chance
        with self.attacker.worker.context.register(bytearray(1000)) as memory:
            good = bytes(memory.descriptor)
            cut = good[: chance.randrange(len(good))]
            data = chance.choice([good, _changed(good, chance), cut, *self.attacker.memory])
            await self._send(DESCRIPTORS, data)
            await trio.sleep(chance.choice([0, 0.01]))

    async def _remote_memory(self) -> None:
        """Legal gets, puts and atomics, cancelled at a random moment."""
        chance = self.chance
        assert self.endpoint is not None
        memory = self.endpoint.attach(chance.choice(self._descriptors()))
        length = chance.choice([1, 8, 1000, MEMORY])
        for _ in range(chance.choice([1, 5, 70])):
            what = chance.randrange(4)
            if what == 0:
                self._later(memory.get, 0, length)
            elif what == 1:
                self._later(memory.put, bytes(length), 0)
            else:
                self._later(memory.fetch_add if what == 2 else memory.add, 1, 0)
        await trio.sleep(chance.choice([0, 0.005]))
        memory.close()

    async def _chain(self) -> None:
        """A chain of gets, puts and messages; the endpoint perhaps goes meanwhile."""
        chance = self.chance
        assert self.endpoint is not None
        memory = self.endpoint.attach(chance.choice(self._descriptors()))
        with memory, self.attacker.worker.new_chain() as chain:
            for _ in range(chance.choice([1, 5, 30])):
                first = chain.get(memory, 0, 8)
                chain.put(memory, bytes(chance.choice([8, 5000])), 8, after=first)
                chain.tag_send(self.endpoint, bytes(8), (self.id << 32) | chance.choice([0, UNREAD, wire.CONTROL]))
                chain.am_send(self.endpoint, chance.choice([AM_ID, 2]), bytes(100))
            with trio.move_on_after(chance.choice([0, 0.001, 0.05])):
                await chain.run()
            if chance.random() < 0.3:
                self._abort()

    async def _bytes_on_control(self) -> None:
        chance = self.chance
        kind = chance.randrange(10)
        await self._write(
            chance.choice(
                [
                    chance.randbytes(chance.randrange(1, 100)),
                    struct.pack("<IB", 2**31, kind),
                    struct.pack("<IB", 5, kind) + bytes(4),
                    struct.pack("<IB", 9, kind),
                    bytes(2**17),
                ]
            )
        )

    async def _abort_on_control(self) -> None:
        sent = self.chance.choice([0, 1, 1000, 2**62, 2**64 - 1])
        await self._write(struct.pack("<IBQ", 9, Kind.ABORT, sent))

    async def _half_close(self) -> None:
        if self.control is not None:
            self.control.shutdown(self.chance.choice([socket.SHUT_WR, socket.SHUT_RD]))

    async def _close_control(self) -> None:
        if self.control is None:
            return
        if self.connection is not None:
            self.control.shutdown(socket.SHUT_RDWR)
            return
        if self.chance.random() < 0.5:
            self.control.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
        self.control.close()
        self.control = None

    # ---- ends ----

    async def _end(self) -> None:
        chance = self.chance
        how = chance.random()
        if how < 0.01:
            self._die()
        elif how < 0.3:
            self._abort()
        elif how < 0.4 and self.connection is not None:
            with contextlib.suppress(*EXPECTED), trio.move_on_after(0.5):
                await self.connection.aclose()
        elif how < 0.5:
            await self._close_control()
            await trio.sleep(chance.choice([0, 0.05]))

    def _die(self) -> None:
        """Ends the process: inside UCX perhaps, over TCP. (Over shared memory that may stop the server's queue.)"""
        if not self.attacker.tcp_only or self.chance.random() < 0.5:
            os._exit(9)
        timer = threading.Timer(self.chance.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()

    def _abort(self) -> None:
        if self.connection is not None:
            self.connection.abort()
        elif self.endpoint is not None:
            self.endpoint.abort()

    def _forget(self) -> None:
        """Closes what is left of the session here, whatever the server thinks of it."""
        attacker = self.attacker
        self._abort()
        if self.connection is None and self.control is not None:
            self.control.close()
        if self.sink is not None:
            self.sink.release()
        if self.handshake is not None:
            attacker_sinks = internals(attacker.worker).tag_dispatch.sinks
            attacker_sinks.pop(self.handshake.id, None)
            self.handshake.drop_endpoint()


async def _no_socket() -> trio.SocketStream:
    raise AssertionError("the session opens its socket by hand")


def _changed(data: bytes, chance: random.Random) -> bytes:
    copy = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if copy:
            copy[chance.randrange(len(copy))] = chance.randrange(256)
    return bytes(copy)


async def attack(
    address: list[Any], memory: list[str], transports: str, seed: str, first: int, count: int, together: int
) -> None:
    """Runs the sessions with these numbers, some at the same time. Reports each before it begins, and at the end what
    was done.
    """
    logging.getLogger("trio_ucx").setLevel(logging.CRITICAL)
    numbers = iter(range(first, first + count))
    counts: Counter[str] = Counter()
    descriptors = [bytes.fromhex(each) for each in memory]

    async def some(attacker: Attacker) -> None:
        for number in itertools.islice(numbers, GENERATION // together):
            say(number)
            try:
                await Session(attacker, random.Random(f"{seed} {number}")).run()
            except* EXPECTED:
                counts["failed"] += 1

    for _ in range(0, count, GENERATION):
        async with ucp.open_worker(features=REMOTE) as worker, ucp.open_worker(features=REMOTE) as other:
            attacker = Attacker(tuple(address), descriptors, transports == "tcp", worker, other, counts=counts)
            async with trio.open_nursery() as nursery:
                for _ in range(together):
                    nursery.start_soon(some, attacker)
    say(counts)


async def flood(address: list[Any], kind: str, count: int) -> None:
    """Sends control frames that make the server answer, and reads nothing. Reports when it has done so."""
    async with ucp.open_worker() as worker:
        connection = await trio_ucx.open_ucx_stream(*address, worker=worker)
        link = internals(connection)
        # So that this side does not notice what it sends past its own books.
        link.sending.credit.sent, link.sending.credit.credit = 10**9, -(10**9)
        frame: wire.Frame = wire.GoodbyeAck()
        if kind == "grant":
            # The server's credit is used up, and it has more to send: it says so after each grant.
            for messages in (WINDOWFUL, WINDOWFUL // 2):
                for _ in range(messages):
                    post_bytes_send(link.core, bytes(1000), link.peer_id << 32)
                await trio.sleep(1)
            frame = wire.Grant(1, WINDOWFUL)
        data, tag = wire.encode_frame(frame), (link.peer_id << 32) | wire.CONTROL
        start = time.monotonic()
        for _ in range(count):
            if link.core.handle is None or time.monotonic() - start > 10:
                break
            post_bytes_send(link.core, data, tag)
        say("sent")
        await ask()
        os._exit(0)


def main() -> None:
    role, arguments = sys.argv[1:3]
    function = {"serve": serve, "honest": be_honest, "attack": attack, "flood": flood}[role]
    trio.run(lambda: function(*json.loads(arguments)))


if __name__ == "__main__":
    main()
