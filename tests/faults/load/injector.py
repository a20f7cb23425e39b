"""The parent of the soak: starts a server and clients, harms them at random moments, and starts them again.

It harms only processes that it started. Every wait has a limit: a process that does not end on request is logged as
hung, with its stacks, and killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import attrs
import trio

from . import workload
from .log import Log

ROOT = Path(__file__).resolve().parent.parent.parent
#: In the environment of every process of a soak, so that what it left can be found.
MARK = "TRIO_UCX_SOAK"
#: Shares of the faults. Each comes once before they count.
FAULTS = {"kill client": 10, "stop client": 8, "stop server": 4, "kill server": 1}
#: Seconds that a process may be stopped.
STOPPED = (0.1, 5.0)


@attrs.frozen
class Plan:
    """What a soak is to be.

    Attributes:
        seconds: how long the load and the faults last.
        patience: seconds after which the processes give an operation up as late.
        pause: seconds between two faults, on average.
        ending: seconds that a process may take to end when it is told to.
        starting: seconds that the first processes may take until they are ready.
    """

    folder: Path
    seconds: float
    seed: int
    transports: str
    clients: int
    faults: bool = True
    broken: str | None = None
    patience: float = 8.0
    pause: float = 2.0
    ending: float = 30.0
    starting: float = 60.0


@attrs.define(eq=False)
class Child:
    """A process that we started."""

    role: str
    name: str
    process: trio.Process
    ready: bool = False
    stopped: bool = False
    over: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


@attrs.define
class Injector:
    """Runs one soak; see :func:`run`."""

    plan: Plan
    log: Log
    port: int
    random: random.Random
    mark: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    children: list[Child] = attrs.field(factory=list)
    started: int = 0
    stopping: bool = False
    pids: set[int] = attrs.field(factory=set)

    async def run(self) -> None:
        self.log.event("machine", when="before", **self.left())
        async with trio.open_nursery() as nursery:
            for role in ("server", *["client"] * self.plan.clients):
                nursery.start_soon(self.keep, role)
            with trio.move_on_after(self.plan.starting):
                while len([child for child in self.children if child.ready]) <= self.plan.clients:
                    await trio.sleep(0.02)
            self.log.event("ready")
            with trio.move_on_after(self.plan.seconds):
                if self.plan.faults:
                    await self.inject()
                else:
                    await trio.sleep_forever()
            self.stopping = True
            for role in ("client", "server"):
                for child in [child for child in self.children if child.role == role]:
                    nursery.start_soon(self.end, child)
                await self.wait_until_gone(role)
        await trio.sleep(0.1)
        self.log.event("machine", when="after", **self.left())

    async def wait_until_gone(self, role: str) -> None:
        with trio.fail_after(self.plan.ending + 10):
            while any(child.role == role for child in self.children):
                await trio.sleep(0.02)

    # ---- processes ----

    async def keep(self, role: str) -> None:
        """Starts a process, and another when it has ended."""
        while not self.stopping:
            child = await self.start(role)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.wait_ready, child)
                status = await child.process.wait()
                nursery.cancel_scope.cancel()
            child.over = True
            self.children.remove(child)
            self.log.event("exited", child=child.pid, name=child.name, status=status)
            assert child.process.stdin is not None
            await child.process.stdin.aclose()

    async def wait_ready(self, child: Child) -> None:
        """Notes when it says that it is ready."""
        assert child.process.stdout is not None
        async with child.process.stdout as said:
            child.ready = bool(await said.receive_some(1))

    async def start(self, role: str) -> Child:
        self.started += 1
        name = f"{role[0]}{self.started}"
        settings = workload.Settings(
            role=role,
            name=name,
            folder=str(self.plan.folder),
            seed=f"{self.plan.seed} {name}",
            port=self.port,
            transports=self.plan.transports,
            patience=self.plan.patience,
            broken=self.plan.broken,
        )
        command = [sys.executable, "-m", "faults.load.workload", json.dumps(attrs.asdict(settings))]
        with (self.plan.folder / f"{name}.err").open("w") as errors:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, MARK: self.mark},
            )
        child = Child(role, name, process)
        self.children.append(child)
        self.pids.add(process.pid)
        self.log.event("spawn", child=process.pid, name=name, role=role)
        return child

    async def end(self, child: Child) -> None:
        """Lets it end; by force if it does not."""
        assert child.process.stdin is not None
        self.send(child, signal.SIGCONT)
        await child.process.stdin.aclose()
        with trio.move_on_after(self.plan.ending):
            while not child.over:
                await trio.sleep(0.02)
            return
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            self.send(child, number)
            await trio.sleep(0.5)
        stacks = (self.plan.folder / f"{child.name}.stacks").read_text()
        self.log.event("hung", child=child.pid, name=child.name, stacks=stacks[-20_000:])
        self.send(child, signal.SIGKILL)

    def send(self, child: Child, number: int) -> None:
        if not child.over and child.process.poll() is None:
            child.process.send_signal(number)

    # ---- faults ----

    async def inject(self) -> None:
        first = self.random.sample(list(FAULTS), len(FAULTS))
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(min(self.random.expovariate(1 / self.plan.pause), 2 * self.plan.pause))
                fault = first.pop() if first else self.random.choices(list(FAULTS), list(FAULTS.values()))[0]
                what, role = fault.split()
                candidates = [
                    child for child in self.children if child.role == role and child.ready and not child.stopped
                ]
                if not candidates:
                    continue
                child = self.random.choice(candidates)
                if what == "kill":
                    self.log.event("kill", child=child.pid, name=child.name)
                    self.send(child, signal.SIGKILL)
                else:
                    nursery.start_soon(self.stop, child, self.random.uniform(*STOPPED))

    async def stop(self, child: Child, seconds: float) -> None:
        child.stopped = True
        self.log.event("stop", child=child.pid, name=child.name)
        self.send(child, signal.SIGSTOP)
        try:
            await trio.sleep(seconds)
        finally:
            self.send(child, signal.SIGCONT)
            self.log.event("continue", child=child.pid, name=child.name)
            child.stopped = False

    # ---- what is left ----

    def left(self) -> dict[str, list[str]]:
        """Shared memory and processes of ours on this machine."""
        return {"shared_memory": [*system_v(self.pids), *posix()], "processes": processes(self.mark)}


def system_v(pids: set[int]) -> list[str]:
    """Segments that these processes created."""
    found = []
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[4]) in pids:
            found.append(f"System V segment {words[1]}, {words[3]} bytes, created by {words[4]}")
    return found


def posix() -> list[str]:
    """Files of UCX's in /dev/shm that no process of the machine has mapped for a second: at first none has."""
    found = _unmapped()
    if found:
        time.sleep(1)
        found = [path for path in _unmapped() if path in found]
    return found


def _unmapped() -> list[str]:
    files = [path.name for path in Path("/dev/shm").glob("ucx*")] if Path("/dev/shm").is_dir() else []
    if not files:
        return []
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += "".join(line for line in maps.read_text().splitlines(True) if "/dev/shm/ucx" in line)
        except OSError:
            pass
    return [f"/dev/shm/{name}" for name in files if name not in mapped]


def processes(mark: str) -> list[str]:
    """Processes that have this mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            pass
    return found


def choose_port(chance: random.Random) -> int:
    """A free port that no connection is given by chance."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = chance.randrange(10_000, given_out)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port was found")


async def run(plan: Plan) -> None:
    """Runs one soak, and leaves its logs in the plan's folder."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(plan.seed)
    log = Log(plan.folder, "parent")
    log.event("start", role="parent", name="parent", transports=plan.transports, seed=plan.seed)
    injector = Injector(plan, log, choose_port(random.SystemRandom()), chance)
    try:
        with trio.fail_after(plan.seconds + 3 * plan.ending + 60):
            await injector.run()
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            for child in injector.children:  # nobody is left behind, whatever happened
                injector.send(child, signal.SIGKILL)
                await child.process.wait()
        log.close()
