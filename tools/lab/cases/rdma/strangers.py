"""Who reaches a server over RDMA: peers with other transports, and a stranger without the key; one rank.

A peer that was let in must not end the server. What UCX lets a stranger do is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import trio
from common import ADDRESS, KEY, PARTS, brief, echo, get, main, put, run_shell

import trio_ucx
from trio_ucx import ucp

FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA
#: UCX_TLS of the client, UCX_TLS of the server, and whether they reach each other.
PEERS = [
    *(("ud", "rc", False), ("rc", "ud", False), ("tcp", "rc", False), ("ud", "all", True), ("rc", "all", True)),
    *(("all", "rc", True), ("all", "ud", True), ("ud,tcp", "rc,tcp", True), ("rc,tcp", "ud,tcp", True)),
    ("rc_verbs,tcp", "rc_verbs,tcp", True),  # without UD: rc_verbs is not rc
]


async def serve(tls: str, name: str) -> None:
    """Serves, with a buffer of which nobody is told."""
    worker = ucp.open_worker(shared=True, config={"TLS": tls}, features=FEATURES)
    async with worker as worker, trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, echo, 0, host=ADDRESS, authkey=KEY, worker=worker)
        server = await nursery.start(serve)
        with worker.context.register(bytearray(b"untouched")) as memory:
            put(f"server.{name}", f"{server.address[1]} {memory.address} {bytes(worker.address).hex()}")
            await trio.sleep_forever()


@asynccontextmanager
async def serving(tls: str, name: str):
    with subprocess.Popen([sys.executable, __file__, "--serve", tls, name]) as child:
        try:
            yield child, *(await get(f"server.{name}")).split()
        finally:
            child.kill()


async def said(function, timeout: float = 20) -> str:
    try:
        with trio.fail_after(timeout):
            return await function()
    except Exception as error:
        return brief(error)


async def peer(name: str, ours: str, theirs: str, works: bool) -> str:
    async with serving(theirs, name) as (child, port, _, address), ucp.open_worker(config={"TLS": ours}) as worker:

        async def connect():
            async with trio_ucx.connect((ADDRESS, int(port)), authkey=KEY, worker=worker, connect_timeout=15) as c:
                await c.send(bytes(100_000))
                assert len(await c.receive()) == 100_000
                return f"works over {c.transports}"

        async def raw():
            async with await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address))) as endpoint:
                await endpoint.tag_send(b"raw", 7)
                await endpoint.flush()
                return "works"

        heard = [await said(connect), await said(raw)]
        await trio.sleep(1)
        assert child.poll() is None, f"the server ended: {child.returncode}; {heard}"
    assert all(each.startswith("works" if works else ("NotAdmitted", "OSError")) for each in heard), heard
    return " | ".join(heard)


async def stranger(name: str, ours: str, theirs: str) -> str:
    """It guesses the number of the server's UD queue pair. (It is told where the buffer lies.)"""

    def queue_pairs(pid: int) -> list[int]:
        lines = [line for line in run_shell("rdma resource show qp").splitlines() if "type UD" in line]
        return [int(line.split("lqpn ")[1].split()[0]) for line in lines if f"pid {pid} " in line]

    async with serving(theirs, name) as (child, _, place, _):
        found, notes = queue_pairs(child.pid), {}
        async with ucp.open_worker(config={"TLS": ours}, features=FEATURES) as worker:
            [own] = queue_pairs(os.getpid())
            blob, mark = worker.address.ucx, own.to_bytes(3, "little")
            # A key without anything for hardware: the peer's UCX then puts and gets for us, and checks nothing.
            with ucp.open_context({"TLS": "tcp"}, features=FEATURES) as context, context.allocate(64) as memory:
                descriptor = ucp.MemoryDescriptor(int(place), 9, memory.rkey)
        assert blob.count(mark) == 1
        for number in range(max(17, own - 8), own):
            async with ucp.open_worker(config={"TLS": ours}, features=FEATURES) as worker:
                patched = blob.replace(mark, number.to_bytes(3, "little"))
                endpoint = await worker.open_endpoint(ucp.WorkerAddress.from_ucx(patched, features=FEATURES))

                async def talk(endpoint=endpoint):
                    await endpoint.tag_send(b"hello from a stranger", 5)
                    await endpoint.flush()
                    with endpoint.attach(descriptor) as remote:
                        assert await remote.get(nbytes=9) == b"untouched"
                        await remote.put(b"OVERTAKEN")
                        await remote.flush()
                    return "it reads and writes"

                notes[number] = await said(talk, 3)
                endpoint.abort()
        notes["the server"] = "lives" if child.poll() is None else f"ended: {child.returncode}"
        assert found or set(notes.values()) == {"lives", "TooSlowError()"}, notes
        return f"its UD queue pairs: {found}; {notes}"


for ours, theirs, works in PEERS:
    name = f"{ours}_meets_{theirs}".replace(",", "+")
    PARTS[name] = partial(peer, name, ours, theirs, works)
for ours, theirs in ("rc", "rc"), ("ud", "rc"), ("rc", "rc_verbs,tcp"):
    name = f"stranger_with_{ours}_at_{theirs}".replace(",", "+")
    PARTS[name] = partial(stranger, name, ours, theirs)
if "--serve" in sys.argv:
    trio.run(serve, *sys.argv[-2:])
else:
    main()
