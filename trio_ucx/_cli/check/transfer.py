"""One attempt to send messages from one side to the other, with chosen transports. Both sides run it at once."""

from __future__ import annotations

import time
from collections.abc import Mapping

import attrs
import trio

from ... import ucp
from ..._util.socket_addresses import format_address
from ..errors import describe
from .control import ControlChannel
from .finding import Finding, State, warn_unless
from .software import FAILURES

#: The two messages, of 8 bytes and 8 MiB.
MESSAGES = (b"trio_ucx", b"trio_ucx" * 2**20)
#: Seconds for the two messages; and for a plain TCP connection to a port of UCX's, after they have failed.
LIMIT, PROBE = 8.0, 2.0
_PORTS = (
    "let both hosts connect to each other's TCP ports, in both directions: UCX chooses ports of its own, or those of "
    "UCX_TCP_PORT_RANGE=20000-20999 (set it on both sides, and open these)"
)
_MTU = "long packets are lost: compare the MTU of all devices on the way (ip link, tracepath), and let ICMP through"
_FABRIC = "RDMA is not used: are both in one subnet and partition? Name its devices (UCX_NET_DEVICES) on both sides"
_DEVICES = "name the devices that lead to the other side (UCX_NET_DEVICES, on both sides), or mend the routes"


@attrs.define
class Outcome:
    """What one side has seen of an attempt.

    Attributes:
        seconds: how long each message took that has arrived.
        transports: that the sender has used.
        error: what went wrong; None if nothing did.
        refused: what became of a plain TCP connection to the other side's UCX; None if it was not tried, or works.
    """

    seconds: list[float] = attrs.field(factory=list)
    transports: list[str] = attrs.field(factory=list)
    error: str | None = None
    refused: str | None = None

    @property
    def failed(self) -> bool:
        return len(self.seconds) < len(MESSAGES)


async def attempt(
    channel: ControlChannel, config: Mapping[str, str], network: str | None, *, sends: bool
) -> tuple[Outcome, Outcome]:
    """Opens a worker, and sends or receives the messages. Returns what this side and the other one have seen.

    Args:
        network: which of the other side's TCP addresses to use; None: all.
    """
    mine, theirs = Outcome(), Outcome()
    scope = trio.CancelScope()

    async def hear() -> None:
        nonlocal theirs
        theirs = Outcome(**await channel.receive(LIMIT + 2 * PROBE + 5))
        if theirs.failed:
            scope.cancel()

    try:
        async with ucp.open_worker(config=config) as worker:
            await channel.send({"address": bytes(worker.address).hex()})
            reply = await channel.receive()
            if "error" in reply:
                return mine, Outcome(error=reply["error"])
            peer = ucp.WorkerAddress(bytes.fromhex(reply["address"]))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hear)
                scope.deadline = trio.current_time() + LIMIT
                with scope:
                    await transfer(worker, peer, network, mine, sends)
                if mine.failed:
                    mine.error = mine.error or f"nothing more came through within {LIMIT:g} seconds"
                    mine.refused = await _try_plain_tcp(peer, network)
                await channel.send(attrs.asdict(mine))
    except FAILURES as error:  # this side could open no worker
        mine.error = describe(error)
        await channel.send({"error": mine.error})
        await channel.receive()
    return mine, theirs


async def transfer(
    worker: ucp.Worker, peer: ucp.WorkerAddress, network: str | None, outcome: Outcome, sends: bool
) -> None:
    try:
        endpoint = await worker.open_endpoint(peer, network=network) if sends else None
        for tag, message in enumerate(MESSAGES):
            start = time.perf_counter()
            if endpoint is None:
                buffer = bytearray(len(message))
                await worker.tag_receive(buffer, tag)
                if buffer != message:
                    raise OSError(f"a message of {len(message)} bytes arrived with other contents")
            else:
                await endpoint.tag_send_sync(message, tag)
                await endpoint.flush()
                outcome.transports = sorted({f"{each.name}/{each.device}" for each in endpoint.transports})
            outcome.seconds.append(time.perf_counter() - start)
    except FAILURES as error:
        outcome.error = describe(error)


async def _try_plain_tcp(peer: ucp.WorkerAddress, network: str | None) -> str | None:
    """Connects to the port of the other side's UCX without UCX; returns why that fails."""
    for address in peer.tcp_addresses:
        if network in (None, address[0]):
            with trio.move_on_after(PROBE) as scope:
                try:
                    await (await trio.open_tcp_stream(*address)).aclose()
                except OSError as error:
                    return f"{format_address(address)}: {describe(error.__cause__ or error)}"
            if scope.cancelled_caught:
                return f"{format_address(address)} does not answer"
    return None


def judge(id: str, sides: Mapping[str, Outcome], failure: State, expected: tuple[str, ...] = ("",)) -> Finding:
    """Says whether a direction works.

    Args:
        sides: the sender by its name, and then the receiver.
        failure: the state if it does not work.
        expected: how the names of the transports begin that should be used.
    """
    (_, sender), (_, receiver) = sides.items()
    over = f" over {', '.join(sender.transports)}" if sender.transports else ""
    if not sender.failed and not receiver.failed:
        small, large = (1000 * each for each in sender.seconds)
        found = f"8 bytes in {small:.1f} ms, 8 MiB in {large:.1f} ms{over}"
        return warn_unless(any(each.startswith(expected) for each in sender.transports), id, found, _FABRIC)
    parts = [f"8 bytes arrive, 8 MiB do not{over}"] if receiver.seconds else []
    parts += [f"{name}: {side.error}" for name, side in sides.items() if side.error]
    refused = [f"plain TCP from {name} fails, too: {side.refused}" for name, side in sides.items() if side.refused]
    advice = _PORTS if refused else _MTU if receiver.seconds else _DEVICES
    return Finding(id, failure, "; ".join(parts + refused), advice)
