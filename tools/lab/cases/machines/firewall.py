"""Firewalls in both guests (nftables), and IPv6: what connects, and what fails with an error. Rank 0 serves.

The documents promise that a range works which both sides open; what else does is up to UCX.
"""

from __future__ import annotations

import time
from functools import partial

import trio
from common import ADDRESS, KEY, PEER, RANK, barrier, brief, echo, main, part, shell

import trio_ucx
from trio_ucx import ucp

PORT = 23306
RANGE = {"TCP_PORT_RANGE": "23350-23399"}
LISTENER, DATA = f"tcp dport {PORT} accept", "tcp dport 23350-23399 accept"
LIKE_FIREWALLD = "reject with icmpx admin-prohibited"


def wall(*rules, rest="drop"):
    always = ["iif lo accept", "meta l4proto { icmp, ipv6-icmp } accept", "ct state established,related accept"]
    lines = "\n".join([*always, *rules, rest])
    return f"table inet f {{ chain input {{ type filter hook input priority 0;\n{lines}\n}}\n}}"


async def attempt(name, walls=(None, None), config=None, host="0.0.0.0", to=PEER, works=True):
    await shell("nft flush ruleset")
    if walls[RANK]:
        await shell(f"nft -f - <<'X'\n{walls[RANK]}\nX")
    await barrier(f"wall.{name}")
    try:
        async with ucp.open_worker(config=config or {}) as worker:
            if RANK == 0:
                async with trio.open_nursery() as nursery:
                    options = {"host": host, "authkey": KEY, "worker": worker, "on_handler_error": "log"}
                    await nursery.start(partial(trio_ucx.serve_ucx, echo, PORT, **options))
                    await barrier(f"up.{name}")
                    await barrier(f"down.{name}")
                    nursery.cancel_scope.cancel()
                return None
            await barrier(f"up.{name}")
            began, note = time.monotonic(), "works"
            try:
                async with trio_ucx.connect(f"{to}:{PORT}", authkey=KEY, worker=worker, connect_timeout=30) as c:
                    with trio.fail_after(40):
                        for size in 8, 3_000_000:
                            async with trio.open_nursery() as nursery:
                                nursery.start_soon(c.send, bytes(size))
                                assert await c.receive() == bytes(size)
            except (OSError, trio_ucx.UCXError, trio.TooSlowError, trio.BrokenResourceError) as error:
                note = brief(error)
            finally:
                await barrier(f"down.{name}")
            assert (note == "works") == works, note
            return f"{note}, {time.monotonic() - began:.1f} s"
    finally:
        await shell("nft flush ruleset")


def add(name, **arguments):
    async def function():
        return await attempt(name, **arguments)

    function.__name__ = name
    part(function)


add("server_lets_the_listener_in", walls=(wall(LISTENER), None))
add("server_rejects_all_else", walls=(wall(LISTENER, rest="meta l4proto tcp reject with tcp reset"), None), works=False)
add("client_lets_nobody_in", walls=(None, wall()), works=False)
add("client_like_firewalld", walls=(None, wall(rest=LIKE_FIREWALLD)), works=False)
add("both_open_a_range", walls=(wall(LISTENER, DATA), wall(DATA)), config=RANGE)
add("only_the_server_opens_a_range", walls=(wall(LISTENER, DATA), wall()), config=RANGE, works=False)
add("only_the_client_opens_a_range", walls=(wall(LISTENER), wall(DATA)), config=RANGE)
add("both_let_nothing_else_in", walls=(wall(LISTENER), wall()), works=False)
add("listener_dropped", walls=(wall(), None), works=False)
add("listener_rejected", walls=(wall(rest="reject"), None), works=False)
add("ipv6_address", host=None, to="[fd77::1]")
add("ipv6_name", host=None, to="guest0-v6")
add("ipv6_first", host="::", to="[fd77::1]", config={"TCP_AF_PRIO": "inet6,inet"})


@part
async def ipv6_only():
    await shell("ip -4 addr flush dev eth0")
    try:
        return await attempt("ipv6_only", host="::", to="[fd77::1]")
    finally:
        await shell(f"ip addr add {ADDRESS}/24 dev eth0")


main(timeout=120)
