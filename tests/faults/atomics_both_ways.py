"""A peer is killed while two processes do atomics on each other's memory over TCP: does the other one go on?

``python tests/faults/atomics_both_ways.py [KILLS] [one] [ucx]``: each time two processes add to a counter of the
other's, or with ``one`` only the first to the second's, and the first is killed. Prints how the others ended. With
``ucx`` the atomics are UCX's own: then UCX ends some of them (docs/reliability.md, "Known limits").
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter

import attrs
import trio

from trio_ucx import ucp

FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64


async def add(channel: socket.socket, active: bool, victim: int | None) -> None:
    with ucp.open_context({"TLS": "tcp"}, features=FEATURES) as context, context.allocate(4096) as memory:
        async with ucp.open_worker(context=context) as worker:
            channel.send(bytes(worker.address))
            address = channel.recv(2**16)
            channel.send(bytes(memory.descriptor))
            descriptor = channel.recv(2**16)
            endpoint = await worker.open_endpoint(ucp.WorkerAddress(address))
            if "ucx" in sys.argv:
                descriptor = attrs.evolve(ucp.MemoryDescriptor.from_bytes(descriptor), token=b"")
            remote = endpoint.attach(descriptor)
            if victim is not None:
                threading.Thread(target=kill_soon, args=(victim,)).start()
            with trio.move_on_after(2):
                try:
                    while active:
                        await remote.fetch_add(1)
                    await endpoint.flush()
                    await trio.sleep_forever()
                except trio.BrokenResourceError:
                    await trio.sleep(0.1)  # what has arrived is handled now
            endpoint.abort()


def kill_soon(pid: int) -> None:
    time.sleep(0.1 + random.random() * 0.1)
    os.kill(pid, signal.SIGKILL)


def start(channel: socket.socket, active: bool, victim: int | None = None) -> int:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            trio.run(add, channel, active, victim)
            status = 0
        finally:
            os._exit(status)
    channel.close()
    return pid


def main() -> None:
    kills, both = int(sys.argv[1]) if sys.argv[1:] else 50, "one" not in sys.argv
    endings: Counter[int] = Counter()
    for _ in range(kills):
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        victim = start(first, True)
        survivor = start(second, both, victim)
        os.waitpid(victim, 0)
        endings[os.waitstatus_to_exitcode(os.waitpid(survivor, 0)[1])] += 1
    print(f"{kills} kills, atomics {'both ways' if both else 'one way'}; exit statuses: {dict(endings)}")
    sys.exit(set(endings) != {0})


if __name__ == "__main__":
    main()
