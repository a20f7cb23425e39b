"""Who reaches a server over RDMA: peers with other transports, and a stranger without the key; one rank.

Neither may end the server or its other clients. What UCX lets a stranger do all the same is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import trio
from common import ADDRESS, KEY, OUT, brief, echo, get, main, part, put, run_shell

import trio_ucx
from trio_ucx import ucp

FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA


async def serve(tls: str, name: str) -> None:
    """A server with a buffer of which nobody is told."""
    worker = ucp.open_worker(shared=True, config={"TLS": tls}, features=FEATURES)
    async with worker as worker, trio.open_nursery() as nursery:
        serve = partial(trio_ucx.serve_ucx, echo, 0, host=ADDRESS, authkey=KEY, worker=worker)
        server = await nursery.start(serve)
        buffer = bytearray(b"untouched")
        with worker.context.register(buffer) as memory:
            (OUT / f"raw.{name}").write_bytes(bytes(worker.address))
            put(f"server.{name}", f"{server.address[1]} {memory.address}")
            while buffer == b"untouched":
                await trio.sleep(0.1)
            put(f"buffer.{name}", buffer.decode())
            await trio.sleep_forever()


@asynccontextmanager
async def server(tls: str, name: str):
    with subprocess.Popen([sys.executable, __file__, "--serve", tls, name]) as child:
        try:
            yield child, (await get(f"server.{name}")).split()
        finally:
            child.kill()


async def said(function) -> str:
    try:
        with trio.fail_after(20):
            return await function()
    except Exception as error:
        return brief(error)


# ---- peers that were let in ----


async def round_trip(c):
    await c.send(bytes(100_000))
    assert len(await c.receive()) == 100_000
    return "works"


async def meets(ours: str, theirs: str, works: bool) -> str:
    name = f"{ours}.{theirs}".replace(",", "-")
    async with (
        server(theirs, name) as (child, [port, _]),
        ucp.open_worker(config={"TLS": theirs}) as same,
        trio_ucx.connect((ADDRESS, int(port)), authkey=KEY, worker=same, connect_timeout=60) as bystander,
    ):
        await round_trip(bystander)
        async with ucp.open_worker(config={"TLS": ours}, features=FEATURES) as worker:

            async def connect():
                options = {"authkey": KEY, "worker": worker, "connect_timeout": 15}
                async with trio_ucx.connect((ADDRESS, int(port)), **options) as c:
                    await round_trip(c)
                    return f"works over {c.transports}"

            async def raw():
                address = ucp.WorkerAddress((OUT / f"raw.{name}").read_bytes())
                endpoint = await worker.open_endpoint(address)
                try:
                    await endpoint.tag_send(b"raw", 7)
                    await endpoint.flush()
                    return f"works over {endpoint.transports}"
                finally:
                    endpoint.abort()

            heard = [await said(connect), await said(raw)]
            await trio.sleep(1)
            heard.append(run_shell("rdma resource show qp | grep -c 'type UD'", check=False))
        assert child.poll() is None, f"the server ended: {child.returncode}; {heard}"
        await round_trip(bystander)
    assert all(each.startswith("works") == works for each in heard[:2]), heard
    return " | ".join(heard)


@part
async def ud_meets_rc():
    return await meets("ud", "rc", False)


@part
async def rc_meets_ud():
    return await meets("rc", "ud", False)


@part
async def tcp_meets_rc():
    return await meets("tcp", "rc", False)


@part
async def ud_and_tcp_meet_rc_and_tcp():
    return await meets("ud,tcp", "rc,tcp", True)


@part
async def rc_and_tcp_meet_ud_and_tcp():
    return await meets("rc,tcp", "ud,tcp", True)


@part
async def ud_meets_all():
    return await meets("ud", "all", True)


@part
async def rc_meets_all():
    return await meets("rc", "all", True)


@part
async def all_meet_rc():
    return await meets("all", "rc", True)


@part
async def all_meet_ud():
    return await meets("all", "ud", True)


@part
async def rc_that_connects_over_tcp():
    """Without UD: ``rc_verbs`` is not ``rc``."""
    return await meets("rc_verbs,tcp", "rc_verbs,tcp", True)


# ---- a stranger ----


def queue_pairs() -> list[int]:
    """The numbers of this process's UD queue pairs."""
    lines = [line for line in run_shell("rdma resource show qp").splitlines() if "type UD" in line]
    return [int(line.split("lqpn ")[1].split()[0]) for line in lines if f"pid {os.getpid()} " in line]


async def stranger(ours: str, theirs: str) -> str:
    """It guesses the number of the server's UD queue pair, and is told where the buffer lies."""
    name, notes = f"stranger.{ours}.{theirs}".replace(",", "-"), []
    async with server(theirs, name) as (child, [_, place]):
        async with ucp.open_worker(config={"TLS": ours}, features=FEATURES) as template:
            [own] = queue_pairs()
            blob = template.address.ucx
            # A key without anything for hardware: the peer's UCX then puts and gets for us, and checks nothing.
            with ucp.open_context({"TLS": "tcp"}, features=FEATURES) as context, context.allocate(64) as memory:
                descriptor = ucp.MemoryDescriptor(int(place), 9, memory.rkey)
            assert blob.count(own.to_bytes(3, "little")) == 1
            for number in range(max(17, own - 12), own + 12):
                async with ucp.open_worker(config={"TLS": ours}, features=FEATURES) as worker:
                    if number in [own, *queue_pairs()]:
                        continue
                    patched = blob.replace(own.to_bytes(3, "little"), number.to_bytes(3, "little"))
                    endpoint = await worker.open_endpoint(ucp.WorkerAddress.from_ucx(patched, features=FEATURES))

                    async def talk(endpoint=endpoint):
                        await endpoint.tag_send(b"hello from a stranger", 5)
                        await endpoint.flush()
                        with endpoint.attach(descriptor) as remote:
                            assert await remote.get(nbytes=9) == b"untouched"
                            await remote.put(b"OVERTAKEN")
                            await remote.flush()
                        return "is in"

                    with trio.move_on_after(3):
                        notes.append(f"{number}: {await said(talk)}")
                    endpoint.abort()
                if child.poll() is not None or notes[-1:] == [f"{number}: is in"]:
                    break
        await trio.sleep(1)
        return f"the server {'lives' if child.poll() is None else f'ended: {child.returncode}'}; {notes[-1:]}"


@part
async def stranger_over_rc():
    return await stranger("rc", "rc")


@part
async def stranger_over_ud():
    return await stranger("ud", "rc")


@part
async def stranger_without_ud_at_the_server():
    return await stranger("rc", "rc_verbs,tcp")


if "--serve" in sys.argv:
    trio.run(serve, *sys.argv[-2:])
else:
    main()
