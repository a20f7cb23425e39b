"""The process of one end: ``python -m benchmarks.child SOCKET``. It gets its orders over that Unix socket."""

from __future__ import annotations

import gc
import importlib
import math
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

from . import stats
from .contenders import ROLES
from .control import Line, run
from .ends import Control, End
from .jobs import BURST_COUNT, Batch, Kind

#: Seconds after the limit of an order at which the kernel ends this process, if its parent has not.
LAST = 10


async def serve_orders(control: Control, end: End, leads: bool) -> None:
    """Carries out orders, until the order to end."""
    while True:
        order = await control.hear()
        if order["do"] == "end":
            signal.alarm(LAST)
            return
        signal.alarm(math.ceil(order["limit"]) + LAST)
        if order["do"] == "idle":
            used, begin = time.process_time(), time.perf_counter()
            await control.sleep(order["seconds"])
            await control.tell({"cpu": time.process_time() - used, "seconds": time.perf_counter() - begin})
        else:
            await control.tell(await run_batch(control, end, Batch.from_order(order), leads))
        signal.alarm(0)


async def run_batch(control: Control, end: End, batch: Batch, leads: bool) -> dict[str, Any]:
    end.last = b""
    end.prepare(batch)
    if not leads:
        await control.tell({"ready": True})
    used, begin = time.process_time(), time.perf_counter_ns()
    answer: dict[str, Any] = {}
    if batch.job.kind is Kind.LATENCY:
        if leads:
            answer |= stats.of_round_trips(await end.ping(batch))
            answer["more"] = dict(end.more)
        else:
            await end.echo(batch)
    elif batch.job.kind is Kind.BURST:
        for _ in range(batch.count):
            await (end.send if leads else end.receive)(replace(batch, count=BURST_COUNT))
            await (end.receive if leads else end.send)(replace(batch, count=1))
    elif leads:
        await end.send(batch)
        answer["more"] = dict(end.more)
    else:
        await end.receive(batch)
    # Both processes read the same clock: the pair's time is from the one's begin to the other's end.
    answer |= {"begin": begin, "end": time.perf_counter_ns(), "cpu": time.process_time() - used}
    if batch.job.kind in (Kind.LATENCY, Kind.BURST, Kind.STEPS) or not leads:
        end.verify(batch)
    return answer


def main() -> None:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(sys.argv[1])
    line = Line(connected)
    # Under mpirun all have one command line.
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    line.tell_now({"role": sys.argv[2] if len(sys.argv) > 2 else ROLES[rank]})
    setup = line.hear_within(60)
    signal.alarm(math.ceil(setup["options"].get("start", 30)) + LAST)
    connected.settimeout(None)
    if setup["cpu"] is not None:
        os.sched_setaffinity(0, [setup["cpu"]])
    try:
        module = importlib.import_module(f"benchmarks.contenders.{setup['module']}")
    except Exception as error:
        line.tell_now({"error": describe(error)})
        raise

    async def work(control: Control) -> None:
        try:
            async with module.open_end(control, setup) as end:
                await control.tell({"open": True, "transports": list(end.transports), "info": dict(end.info)})
                gc.collect()
                gc.freeze()
                await serve_orders(control, end, leads=setup["role"] == "client")
        except Exception as error:
            await control.tell({"error": describe(error)})
            raise

    run(module.LOOP, connected, work)


def describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
