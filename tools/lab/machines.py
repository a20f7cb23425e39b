"""Emulated machines: boots one or two guests, shows what they print, and stops them or their cable when a guest asks.

A program asks by a file ``order.*`` in the folder that it shares with the host, with lines SECONDS GUEST COMMAND: in so
many seconds the command goes to QEMU's monitor (``COMMANDS``). The answer is ``done.order.*`` (accepted) or
``refused.order.*``. A guest for which there is ``again.GUEST`` starts again when it has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parent
#: For each processor: QEMU's program and its options, and the kernel's console.
EMULATORS = {
    "x86_64": ("qemu-system-x86_64", ["-cpu", "max"], "ttyS0"),
    "aarch64": ("qemu-system-aarch64", ["-M", "virt,gic-version=3", "-cpu", "neoverse-n1"], "ttyAMA0"),
}
COMMANDS = "stop|cont|set_link (?:cable|net) (?:on|off)"


@attrs.frozen
class Ground:
    """What guests are made of."""

    processor: str  # a key of EMULATORS
    boot: Path  # the folder with vmlinuz, initramfs, and files, a layer below those of the root
    root: Path
    python: str  # its path there
    variables: dict[str, str]
    rdma: bool = False  # a device of Soft-RoCE


@attrs.define(eq=False)
class Run:
    """One program in one or two guests, which share the folder ``out``; ``lines`` is called with what they print."""

    ground: Ground
    out: Path
    guests: int
    lines: Callable[[int, str], None]
    _processes: dict[int, subprocess.Popen[bytes]] = attrs.Factory(dict)
    _read: dict[int, int] = attrs.Factory(dict)
    _orders: list[tuple[float, int, str]] = attrs.Factory(list)

    def run(self, command: list[str], variables: dict[str, str], ranks: int, seconds: float) -> list[int]:
        """Returns the exit status of each guest's program; 98 if the guest ended without one, or had to be ended."""
        variables = self.ground.variables | variables | {"GUESTS": str(self.guests), "RANKS": str(ranks)}
        settings = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        settings += [f"rdma={'1' if self.ground.rdma else ''}", f"command=({shlex.join(command)})"]
        (self.out / "settings").write_text("\n".join(settings) + "\n")
        shutil.copy(HERE / "guest.sh", self.out)
        end = time.monotonic() + seconds
        try:
            for guest in range(self.guests):
                self._boot(guest)
            while self._processes and time.monotonic() < end:
                time.sleep(0.1)
                self._follow()
                self._obey()
                for guest, process in list(self._processes.items()):
                    if process.poll() is not None:
                        del self._processes[guest]
                        if (self.out / f"again.{guest}").exists():
                            self._boot(guest)
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
        self._follow()
        return [self._status(guest) for guest in range(self.guests)]

    def here(self, command: list[str], variables: dict[str, str], ranks: int, seconds: float) -> list[int]:
        """Runs the ranks as processes of this machine."""
        address = os.environ.get("LAB_ADDRESS", "127.0.0.1")
        variables |= {"GUESTS": "1", "GUEST": "0", "RANKS": str(ranks), "ADDRESS": address, "PEER": address}
        each = 'for rank in $(seq 0 $((RANKS - 1))); do (RANK=$rank "$@" || touch failed; touch ended.$rank) & done'
        program = ["timeout", f"{seconds}", "sh", "-c", f"exec 2>&1; {each}; wait; [ ! -e failed ]", "sh", *command]
        with subprocess.Popen(program, env=os.environ | variables, cwd=self.out, stdout=subprocess.PIPE) as process:
            for line in process.stdout or ():
                self.lines(0, line.decode(errors="replace").rstrip())
        return [process.returncode]

    def _boot(self, guest: int) -> None:
        for name in ("again", "cable", "status"):
            (self.out / f"{name}.{guest}").unlink(missing_ok=True)
        program, options, console = EMULATORS[self.ground.processor]
        accelerator = os.environ.get("LAB_ACCELERATOR", "tcg,thread=multi")
        kernel = f"console={console} quiet loglevel=5 panic=-1 mitigations=off net.ifnames=0 guest={guest}"
        kernel += f" now={time.time():.0f}"  # not every machine has a clock
        if self.ground.processor == "x86_64" and accelerator.startswith("tcg"):
            kernel += f" no_timer_check tsc_early_khz={tsc_rate()} tsc=reliable"
        shares = {"root": self.ground.root, "layer": self.ground.boot / "files", "out": self.out}
        network = ["user,id=net,restrict=on"]
        if self.guests == 2:  # a cable: frames as datagrams between two Unix sockets
            ends = [self.out / f"cable.{end}" for end in (guest, 1 - guest)]
            dgram = f"dgram,id=cable,local.type=unix,local.path={ends[0]},remote.type=unix,remote.path={ends[1]}"
            network = [dgram, "hubport,id=far,hubid=0,netdev=cable", "hubport,id=net,hubid=0"]
        command = [program, "-accel", accelerator, *options, "-smp", "1" if self.guests == 2 else "2"]
        command += ["-m", os.environ.get("LAB_MEMORY", "3G"), "-nodefaults", "-display", "none", "-no-reboot"]
        command += ["-monitor", "stdio", "-serial", f"file:{self.out / f'console.{guest}'}", "-append", kernel]
        command += ["-kernel", str(self.ground.boot / "vmlinuz"), "-initrd", str(self.ground.boot / "initramfs")]
        for tag, path in shares.items():
            mode = "" if tag == "out" else ",readonly=on,multidevs=remap"
            command += ["-fsdev", f"local,id={tag},path={path},security_model=none{mode}"]
            command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        command += [word for netdev in network for word in ("-netdev", netdev)]
        command += ["-device", f"virtio-net-pci,netdev=net,mac=52:54:00:00:00:0{guest + 1}"]
        with open(self.out / f"qemu.{guest}", "ab") as log:
            self._processes[guest] = subprocess.Popen(command, 0, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def _follow(self) -> None:
        """Passes on the whole lines that the guests have printed."""
        for guest in range(self.guests):
            with suppress(FileNotFoundError), open(self.out / f"output.{guest}", "rb") as file:
                file.seek(self._read.get(guest, 0))
                text, newline, _ = file.read().rpartition(b"\n")
                self._read[guest] = self._read.get(guest, 0) + len(text) + len(newline)
                for line in text.decode(errors="replace").splitlines():
                    self.lines(guest, line)

    def _status(self, guest: int) -> int:
        with suppress(FileNotFoundError, ValueError):
            return int((self.out / f"status.{guest}").read_text())
        for name in ("qemu", "console"):
            for line in (self.out / f"{name}.{guest}").read_text(errors="replace").splitlines()[-20:]:
                self.lines(guest, f"{name}: {line}")
        return 98

    def _obey(self) -> None:
        """Answers what programs ask for, and does what is due."""
        now = time.monotonic()
        for path in sorted(self.out.glob("order.*")):
            orders = [re.fullmatch(rf"(\d+) (\d) ({COMMANDS})", line) for line in path.read_text().splitlines()]
            known = [order for order in orders if order and int(order[2]) in self._processes]
            if well := known == orders:
                self._orders += [(now + int(order[1]), int(order[2]), order[3]) for order in known]
            path.rename(self.out / f"{'done' if well else 'refused'}.{path.name}")
        for at, guest, command in self._orders:
            if at <= now and guest in self._processes:
                with suppress(BrokenPipeError):
                    self._processes[guest].stdin.write(f"{command}\n".encode())  # type: ignore[union-attr]
        self._orders = [order for order in self._orders if order[0] > now]


def tsc_rate() -> int:
    """Returns the rate of this machine's TSC in kHz. Guests see this TSC, and a busy one cannot measure its rate."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    ticks, at = rdtsc(), time.monotonic_ns()
    time.sleep(0.2)
    return round(int(rdtsc() - ticks) / (time.monotonic_ns() - at) * 1e6)
