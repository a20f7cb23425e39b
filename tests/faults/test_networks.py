"""The network between two hosts fails while they exchange messages: who is told, and when; and what arrives.

``network_program.py`` is what runs on the hosts. ``--full`` plays each fault several times, and with the default
``keepalive_interval``, too. ``-rP`` shows the figures.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from helpers import Peer, open_peer
from networks import QUIET, Host, Network, need, open_network

PROGRAM = Path(__file__).parent / "network_program.py"
#: UCX's data ports, so that rules for packets can tell them from the control sockets.
DATA_PORTS = "20000:20999"
ENVIRONMENT = {**QUIET, "UCX_TCP_PORT_RANGE": DATA_PORTS.replace(":", "-")}
DEVICE = "cable"
RATE = ("rate", "40mbit", "burst", "64k", "latency", "100ms")
#: As in the program.
CYCLE_MESSAGES = 5
#: Kinds of Connections' flows.
KINDS = ["idle", "messages", "large", "stream"]
#: By name: how the worker of raw endpoints is opened.
RAW: dict[str, dict[str, Any]] = {
    "default": {},
    "1": {"keepalive_interval": 1},
    "off": {"keepalive_interval": 0},
    "limited": {"keepalive_interval": 1, "config": {"TCP_USER_TIMEOUT": "3s"}},
}


@attrs.frozen
class Scene:
    """Two hosts with a cable between them, and the process on the far one."""

    network: Network
    near: Host
    far: Host
    address: str
    peer: Peer
    chance: random.Random

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.near, self.far

    def either(self) -> Host:
        return self.chance.choice(self.hosts)


def filter_packets(host: Host, chain: str, *rule: str) -> None:
    host.run("iptables", "-w", "-A", chain, {"INPUT": "-i", "OUTPUT": "-o"}[chain], DEVICE, "-p", "tcp", *rule)


def stop_filters(scene: Scene) -> None:
    for host in scene.hosts:
        host.run("iptables", "-w", "-F")


def link_down(scene: Scene) -> None:
    scene.either().down(DEVICE)


def link_up(scene: Scene) -> None:
    for host in scene.hosts:
        host.ip("link", "set", DEVICE, "up")


def drop_all(scene: Scene) -> None:
    host = scene.either()
    for chain in ("INPUT", "OUTPUT"):
        filter_packets(host, chain, "-j", "DROP")


def drop_to(which: str) -> Callable[[Scene], None]:
    """Drops what goes to one of the hosts, there or where it comes from."""

    def make(scene: Scene) -> None:
        target, source = scene.hosts if which == "near" else scene.hosts[::-1]
        if scene.chance.random() < 0.5:
            filter_packets(target, "INPUT", "-j", "DROP")
        else:
            filter_packets(source, "OUTPUT", "-j", "DROP")

    return make


def reset(what: str) -> Callable[[Scene], None]:
    """Answers packets of the data connections, of the control sockets, or of both, with a reset."""

    def make(scene: Scene) -> None:
        host, chain = scene.either(), scene.chance.choice(["INPUT", "OUTPUT"])
        rules = {
            "data": [("--sport", DATA_PORTS), ("--dport", DATA_PORTS)],
            "control": [("!", "--sport", DATA_PORTS, "!", "--dport", DATA_PORTS)],
            "all": [()],
        }
        for rule in rules[what]:
            filter_packets(host, chain, *rule, "-j", "REJECT", "--reject-with", "tcp-reset")

    return make


def lose(percent: int) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        for host in scene.hosts:
            chance = ("--mode", "random", "--probability", str(percent / 100))
            filter_packets(host, "INPUT", "-m", "statistic", *chance, "-j", "DROP")

    return make


def mtu(size: int) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        for host in scene.chance.sample(scene.hosts, 2):
            host.ip("link", "set", DEVICE, "mtu", str(size))

    return make


def limit_rate(scene: Scene) -> None:
    for host in scene.hosts:
        host.run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *RATE)


def stop_limit(scene: Scene) -> None:
    for host in scene.hosts:
        host.run("tc", "qdisc", "del", "dev", DEVICE, "root")


def vanish(scene: Scene) -> None:
    """No packet gets out when the process is killed."""
    scene.far.down(DEVICE)
    scene.peer.process.kill()


def unplug_for_good(scene: Scene) -> None:
    scene.either().ip("link", "del", DEVICE)


def restart(scene: Scene) -> None:
    """The far host comes back, at the same address, and knows nothing of any connection."""
    vanish(scene)
    time.sleep(scene.chance.uniform(0, 0.5))
    scene.near.ip("link", "del", DEVICE)
    fresh = scene.network.host()
    scene.network.cable((scene.near, DEVICE, f"{scene.address}.1/24"), (fresh, DEVICE, f"{scene.address}.2/24"))


#: Seconds beyond what the kernel needs to give up.
MARGIN = 3.0
#: Seconds in which both sides know of a reset. One of them is told by the other, which may first go on for five seconds
#: (``AFTER_PEER_WITH_MUCH``).
BOTH_TOLD = 8.0
#: Seconds within which raw endpoints of the worker "limited" are told.
LIMITED = 10.0
#: Seconds in which everything arrives when the network is mended.
FINISH = 60.0
#: Seconds for a round trip to another peer, besides the noise.
PING = 1.0
#: Seconds between the first and the last task of a flow that is told: a receiver first gets what has arrived.
TOGETHER = 5.0
#: Seconds for one round of the flow "cycle", whose three timeouts are 4 seconds each.
CYCLE = 12.0 + MARGIN
#: Seconds after a round was closed within which the far side's handler has taken its messages.
TAKEN = 1.0
DEFAULT, OFF = 20, 0


def silence(interval: float) -> float:
    """Seconds after which the kernel gives up a control socket: see ``set_keepalive``."""
    return max(2 * interval, interval + 3)


@attrs.frozen
class Fault:
    """How the network fails, and whether that ends.

    Attributes:
        mend: ends the fault, after ``lasts`` seconds. None: it does not end, and every Connection with keepalive is
            lost.
        spares: the least ``keepalive_interval`` with which no Connection is lost; None if any may be.
        kills: the far process does not live through it.
        told: seconds in which both sides know of a reset.
    """

    make: Callable[[Scene], None]
    mend: Callable[[Scene], None] | None = None
    lasts: float = 0
    spares: float | None = None
    kills: bool = False
    told: Callable[[float], float] = lambda interval: BOTH_TOLD


FOR_GOOD: dict[str, Fault] = {
    "link down": Fault(link_down),
    "all packets dropped": Fault(drop_all),
    "packets to the near host dropped": Fault(drop_to("near")),
    "packets to the far host dropped": Fault(drop_to("far")),
    "cable removed": Fault(unplug_for_good),
    "far host vanished": Fault(vanish, kills=True),
    "far host restarted": Fault(restart, kills=True),
}
FOR_A_WHILE: dict[str, Fault] = {
    "link down for 5 s": Fault(link_down, link_up, 5, DEFAULT),
    "link down for 12 s": Fault(link_down, link_up, 12, DEFAULT),
    "data connections reset": Fault(reset("data"), stop_filters, 1),
    "control sockets reset": Fault(reset("control"), stop_filters, 1),
    # A side that sends nothing meanwhile learns of it by its next question.
    "all connections reset": Fault(
        reset("all"), stop_filters, 1, told=lambda interval: max(BOTH_TOLD, silence(interval) + MARGIN)
    ),
    "1 % lost": Fault(lose(1), stop_filters, 6, 1),
    "5 % lost": Fault(lose(5), stop_filters, 6, DEFAULT),
    "20 % lost": Fault(lose(20), stop_filters, 6, DEFAULT),
    "MTU of 600": Fault(mtu(600), mtu(1500), 4, 1),
    "MTU of 9000": Fault(mtu(9000), mtu(1500), 4, 1),
    "40 Mbit/s": Fault(limit_rate, stop_limit, 4, 1),
}


@attrs.frozen
class Played:
    """What happened, by ``time.monotonic``.

    Attributes:
        said: the reports of the near process and, if it lives, of the far one. left: what they say at their end.
    """

    since: float
    mended: float | None
    ended: float
    said: list[dict[str, Any]]
    left: list[dict[str, Any]]
    segments: list[str]


_numbers = itertools.count(1)


@asynccontextmanager
async def open_scene(
    network: Network, chance: random.Random, intervals: list[float]
) -> AsyncIterator[tuple[Scene, Peer]]:
    """Both processes with all flows, on hosts of their own, and healthy peers; and the near process."""
    near, far, third = network.host(), network.host(), network.host()
    number = next(_numbers)
    network.cable((near, DEVICE, f"10.201.{number}.1/24"), (far, DEVICE, f"10.201.{number}.2/24"))
    network.cable((near, "other", f"10.202.{number}.1/24"), (third, "other", f"10.202.{number}.2/24"))
    await network.ready()
    seed = chance.randrange(10**6)
    async with AsyncExitStack() as stack:

        async def start(role: str, host: Host, *arguments: Any, **options: Any) -> Peer:
            return await stack.enter_async_context(open_peer(role, *arguments, under=host.under, **options))

        tcp = await start("host", third, [f"10.202.{number}.2"], {}, **QUIET)
        local = await start("host", near, ["127.0.0.1"], {}, **QUIET)
        others = {
            name: [(await peer.hear())[0], peer.process.pid] for name, peer in (("TCP", tcp), ("shared memory", local))
        }
        options = {"program": PROGRAM, **ENVIRONMENT}
        far_peer = await start("far", far, f"10.201.{number}.2", seed, intervals, RAW, **options)
        arguments = seed, KINDS, RAW, others, await far_peer.hear()
        near_peer = await start("near", near, *arguments, **options)
        await far_peer.tell(await near_peer.hear())
        for peer in (near_peer, far_peer):
            assert await peer.hear() == "ready"
        yield Scene(network, near, far, f"10.201.{number}", far_peer, chance), near_peer


async def play(network: Network, fault: Fault, chance: random.Random, intervals: list[float]) -> Played:
    """Makes the fault at a moment at which large messages are being transferred."""
    async with open_scene(network, chance, intervals) as (scene, near):
        both = [near, scene.peer]
        pids = {peer.process.pid for peer in both}

        async def tell(peers: list[Peer], *order: Any) -> None:
            for peer in peers:
                await peer.tell(order)

        await trio.sleep(1)
        await tell(both, "hurry")
        await trio.sleep(chance.uniform(0.1, 0.4))
        since = time.monotonic()
        await trio.to_thread.run_sync(fault.make, scene)
        alive = [near] if fault.kills else both
        await tell(alive, "calm")
        mended = None
        if fault.mend is None:
            await trio.sleep(max(LIMITED, silence(max(intervals)) + MARGIN))
        else:
            await trio.sleep(fault.lasts)
            await trio.to_thread.run_sync(fault.mend, scene)
            mended = time.monotonic()
            if fault.spares is None:
                await trio.sleep(fault.told(max(intervals)))
        if mended is None:
            await tell(alive, "report")
        else:  # after a reset, raw endpoints wait in vain for what was lost
            await tell(alive, "finish", FINISH if fault.spares is not None else BOTH_TOLD)
        said = [await peer.hear(FINISH + 20) for peer in alive]
        ended = time.monotonic()
        await tell(alive, "end")
        left = [await peer.hear(30) for peer in alive]
    table = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    segments = [line for line in table if int(line.split()[4]) in pids]
    return Played(since, mended, ended, said, left, segments)


class Judge:
    """Looks for what must not be, in what was played.

    Attributes:
        wrong: sentences.
        told: by ``keepalive_interval``, the seconds after which Connections were told.
        noise: the seconds for which the machine kept one of the two waiting, during all of it.
    """

    def __init__(self, fault: Fault, played: Played) -> None:
        self.fault = fault
        self.played = played
        self.wrong: list[str] = []
        self.told: dict[float, list[float]] = {}
        self.raw_told: list[float] = []
        self.noise = 0.0

    def judge(self) -> None:
        self.noise = max(side["noise"] for side in self.played.said)
        for name in self.played.said[0]["flows"]:
            kind, _, what = name.partition(",")
            flows = [side["flows"][name] for side in self.played.said if name in side["flows"]]
            for flow in flows:
                if flow["problem"] is not None:
                    self.wrong.append(f"{name}: {flow['problem']}")
            if name == "cycle":
                self.judge_cycles()
            elif kind.startswith("raw"):
                self.judge_raw(name, what, flows)
            else:
                self.judge_connection(name, kind, float(what), flows)
        self.judge_rest()

    def judge_connection(self, name: str, kind: str, interval: float, flows: list[dict[str, Any]]) -> None:
        if len(flows) < len(self.played.said):
            self.wrong.append(f"{name}: the far side has never begun")
            return
        is_reset = self.fault.mend is not None and self.fault.spares is None
        bound = self.fault.told(interval) if is_reset else silence(interval) + MARGIN
        lost = [flow for flow in flows if flow["told"]]
        for flow in lost:
            times = [when - self.played.since for when, _ in flow["told"].values()]
            self.told.setdefault(interval, []).append(max(times))
            if interval != OFF and min(times) > bound + self.noise:
                self.wrong.append(f"{name}: told after {min(times):.2f} s, the bound is {bound:g} s")
            waiting = {"watch"} | ({"send", "receive"} if kind != "idle" else set())
            before_end = self.played.mended is None or min(times) < self.played.mended - self.played.since
            if before_end and (not waiting <= set(flow["told"]) or max(times) - min(times) > TOGETHER + self.noise):
                self.wrong.append(f"{name}: not all tasks were told together: {flow['told']}")
        for one, other in ((flows[0], flows[-1]), (flows[-1], flows[0])):
            if kind != "stream" and len(flows) == 2 and one["received"] > other["sent"] + 1:
                self.wrong.append(f"{name}: {one['received']} messages were received, and {other['sent']} sent")
        if self.fault.mend is None:
            if interval != OFF and len(lost) < len(flows):
                self.wrong.append(f"{name}: not told")
        elif lost and self.fault.spares is not None and (interval == OFF or interval >= self.fault.spares):
            self.wrong.append(f"{name}: lost, although the fault ends: {[flow['told'] for flow in lost]}")
        elif lost and len(lost) < len(flows):
            other = flows[1] if flows[0] is lost[0] else flows[0]
            # The answer to a close may be lost: then the other side, which sent it, has closed with success.
            if not (set(lost[0]["told"]) == {"close"} and other["done"]):
                self.wrong.append(f"{name}: only one side was told: {[flow['told'] for flow in flows]}")
        elif not lost:
            self.judge_whole(name, flows)

    def judge_whole(self, name: str, flows: list[dict[str, Any]]) -> None:
        for one, other in ((flows[0], flows[1]), (flows[1], flows[0])):
            if not one["done"] or one["received"] != other["sent"]:
                done = "ended" if one["done"] else "has not ended"
                self.wrong.append(f"{name}: {done}, {one['received']} of {other['sent']} have arrived")

    def judge_raw(self, name: str, worker: str, flows: list[dict[str, Any]]) -> None:
        lost = [flow for flow in flows if flow["told"]]
        first = [min(when for when, _ in flow["told"].values()) - self.played.since for flow in lost]
        if self.fault.mend is None and worker == "limited":
            self.raw_told += first
            if len(lost) < len(flows) or max(first) > LIMITED + self.noise:
                self.wrong.append(f"{name}: told after {first}, the bound is {LIMITED:g} s on each side")
        elif self.fault.spares is not None and worker in ("default", "off"):
            if lost:
                self.wrong.append(f"{name}: lost, although the fault ends: {[flow['told'] for flow in lost]}")
            else:
                self.judge_whole(name, flows)

    def judge_cycles(self) -> None:
        """What was closed with success has arrived, unless the far side reported before its handler could take it."""
        near = self.played.said[0]["cycles"]
        taken = self.played.said[-1]["at"] - TAKEN
        for number, (outcome, begin, end) in near.items():
            if end - begin > CYCLE + self.noise:
                self.wrong.append(f"round {number} took {end - begin:.2f} s: {outcome}")
            if outcome == "ok" and end < taken and len(self.played.said) == 2:
                arrived = self.played.said[1]["cycles"].get(number)
                if arrived != CYCLE_MESSAGES:
                    self.wrong.append(f"round {number} was closed with success, and {arrived} messages arrived")

    def judge_rest(self) -> None:
        """Other connections go on, and nothing is left."""
        for name in ("TCP", "shared memory"):
            slow = [(took, noise) for _, took, noise in self.pings(name) if took - noise > PING]
            if slow or not self.pings(name):
                self.wrong.append(f"round trips over {name} to a healthy peer: {slow or 'none'}")
        for side, left in zip(self.played.said, self.played.left, strict=True):
            # UCX never ends the receive of a message of which half arrived (docs/explanation/ucx-limits.md).
            cut_off = sum(bool(flow["told"]) for flow in side["flows"].values())
            if left != {"missed": 0, "pending": min(left["pending"], cut_off), "alive": {}, "segments": []}:
                self.wrong.append(f"left: {left}")
        if self.played.segments:
            self.wrong.append(f"segments of shared memory are left: {self.played.segments}")

    def pings(self, name: str) -> list[tuple[float, float, float]]:
        """Of the round trips that began after the fault: when, how long they took, and the noise."""
        return [ping for ping in self.played.said[0]["pings"][name] if ping[0] >= self.played.since]

    def figures(self) -> str:
        lines = []
        for interval, told in sorted(self.told.items()):
            lines.append(f"Connections, keepalive_interval {interval:g}: {figure(told)}")
        if self.raw_told:
            lines.append(f"raw, TCP_USER_TIMEOUT=3s: {figure(self.raw_told)}")
        if self.played.mended is not None:
            flows = [flow for side in self.played.said for flow in side["flows"].values() if not flow["told"]]
            went_on = [flow["gap"][1] - self.played.mended for flow in flows if flow["gap"][0] < self.played.mended]
            went_on = [seconds for seconds in went_on if seconds > 0]
            if went_on:
                lines.append(f"went on after it was mended: {figure(went_on)}")
            lines.append(f"all ended {self.played.ended - self.played.mended:.1f} s after it was mended")
        for name in ("TCP", "shared memory"):
            milliseconds = [1000 * took for _, took, _ in self.pings(name)]
            lines.append(
                f"round trips to others, {name}: median {statistics.median(milliseconds):.1f} ms, "
                f"max {max(milliseconds):.0f} ms of {len(milliseconds)}"
            )
        return "\n    ".join(lines)


def figure(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.1f} s, max {max(seconds):.1f} s of {len(seconds)}"


@pytest.fixture
def network() -> Iterator[Network]:
    with open_network() as network:
        host = network.host()
        need(*host.under, "iptables", "-w", "-L", why="faults of a network")
        need(*host.under, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *RATE, why="faults of a network")
        yield network


async def check(network: Network, name: str, fault: Fault, seed: str, intervals: list[float]) -> None:
    played = await play(network, fault, random.Random(seed), intervals)
    judge = Judge(fault, played)
    judge.judge()
    print(f"{name}, seed {seed!r}:\n    {judge.figures()}")
    assert not judge.wrong, f"{name}, seed {seed!r}:\n" + "\n".join(judge.wrong)


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize("name", FOR_GOOD)
async def test_for_good(network: Network, name: str, again: int, request: pytest.FixtureRequest) -> None:
    """Both sides are told within the bound of the keepalive, whatever is under way."""
    intervals: list[float] = [DEFAULT, 1, OFF] if request.config.option.full else [1, OFF]
    await check(network, name, FOR_GOOD[name], f"{request.config.option.seed} {name} {again}", intervals)


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize("name", FOR_A_WHILE)
async def test_for_a_while(network: Network, name: str, again: int, request: pytest.FixtureRequest) -> None:
    """Nothing is lost, torn or doubled, and nobody is told of a loss, where the interval is long enough. A Connection
    that breaks all the same breaks on both sides.
    """
    seed = f"{request.config.option.seed} {name} {again}"
    await check(network, name, FOR_A_WHILE[name], seed, [DEFAULT, 1, OFF])
