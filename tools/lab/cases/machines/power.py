"""A server's machine is switched off in the middle of everything, and boots again: what its client hears, and when.

Guest 0 serves; its program starts anew with each boot. Guest 1, the client, judges each round alone.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import trio
from common import KEY, OUT, PEER, RANK, Losses, brief, echo, get, put, tell

import trio_ucx
from trio_ucx import rpc, ucp

ROUNDS = ("idle", "sending", "getting", "draining")
PORT, KEEPALIVE, NOTICED = 23400, 5, 25


class Store(rpc.Service):
    @rpc.method(idempotent=True)
    async def boot(self, call: rpc.Call) -> int:
        return BOOT

    @rpc.method(idempotent=True)
    async def slow(self, call: rpc.Call) -> int:
        await trio.sleep(6)
        return BOOT


OPTIONS = {"authkey": KEY, "keepalive_interval": KEEPALIVE}
BOOT = len(list(OUT.glob("note.booted.*")))


async def server():
    put(f"booted.{BOOT}")
    last = len(ROUNDS) == BOOT
    if not last:
        (OUT / "again.0").touch()
    async with ucp.open_worker(shared=True) as worker, trio.open_nursery() as nursery:
        with worker.context.allocate(8 << 20) as memory:

            async def handler(c):
                await c.send(memory.descriptor, tag=2)
                async with trio.open_nursery() as inner:
                    inner.start_soon(echo, c)
                    async for _ in c.messages(1):
                        pass

            async def answer(request):
                await trio.sleep_forever()

            async def serve(what, port):
                options = {"host": "0.0.0.0", "on_handler_error": "log", **OPTIONS}
                return await nursery.start(partial(trio_ucx.serve_ucx, what, port, **options))

            await serve(handler, PORT)
            draining = await serve(trio_ucx.answering(answer), PORT + 1)
            await serve(rpc.serving(Store()), PORT + 2)
            if last:
                await get("finished", 400)
                nursery.cancel_scope.cancel()
                return
            if ROUNDS[BOOT] == "draining":
                await get(f"drain.{BOOT}", 400)
                nursery.start_soon(draining.drain, 60)
            await get(f"die.{BOOT}", 400)
            put(f"dying.{BOOT}")
            await trio.Path("/proc/sysrq-trigger").write_text("b")
            await trio.sleep(60)


async def switch_off(number, retry):
    losses = Losses()
    async with rpc.connect(f"{PEER}:{PORT + 2}", service=Store, retry=retry, **OPTIONS) as calls:
        while await calls.call("boot", timeout=120) != number:
            await trio.sleep(0.5)
        async with trio.open_nursery() as nursery:
            c = await trio_ucx.connect(f"{PEER}:{PORT}", retry=retry, **OPTIONS)
            asking = await trio_ucx.connect(f"{PEER}:{PORT + 1}", retry=retry, **OPTIONS)
            remote = await c.attach(await c.receive(tag=2))
            waits = {"receive": c.receive}
            if ROUNDS[number] == "sending":
                waits["send"] = partial(c.send, bytes(1 << 20), tag=1)
            if ROUNDS[number] == "getting":
                waits["get"] = partial(remote.get, offset=0, nbytes=1 << 20)
            if ROUNDS[number] == "draining":
                waits["request"] = partial(asking.request, b"")
            for what, function in waits.items():
                nursery.start_soon(losses.note, what, function)
            answers = []

            async def call():
                answers.append(await calls.call("slow"))

            nursery.start_soon(call)
            await trio.sleep(1)
            put(f"drain.{number}")
            await trio.sleep(2)
            put(f"die.{number}")
            await get(f"dying.{number}")
            began = time.monotonic()
        remote.close()
        c.abort()
        asking.abort()
    assert answers == [number + 1], answers  # of the machine that has booted again
    return losses.check(waits, began, NOTICED)


async def client():
    retry = trio_ucx.Backoff(timeout=200)
    tell("PLAN", *ROUNDS)
    failed = False
    for number, name in enumerate(ROUNDS):
        try:
            with trio.fail_after(200):
                said = await switch_off(number, retry)
            for rank in range(2):
                tell(f"OK {name} rank {rank}", said)
        except Exception as error:
            failed = True
            tell(f"FAIL {name} rank 1: {brief(error)}")
            break
    put("finished")
    return failed


sys.exit(trio.run(server if RANK == 0 else client))
