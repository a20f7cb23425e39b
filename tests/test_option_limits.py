"""Values that UCX cannot use are refused by name; values that must be equal are compared before data is sent.

``faults/test_sizes.py`` has the sweep over all options and values.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import trio
from helpers import assert_transports, open_pair, pattern

import trio_ucx
from trio_ucx import ucp
from trio_ucx.testing import assert_no_live_handles
from trio_ucx.ucp._quirks import option_limits, shared_memory
from trio_ucx.ucp._quirks.option_limits import AGREED, DEFAULT_SIZES, LEAST_SEGMENT, agreed_sizes, in_force, number

BOTH = "tcp,sm,self"


@pytest.fixture(autouse=True)
def untouched_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests choose sizes of their own."""
    for name in AGREED:
        monkeypatch.delenv(f"UCX_{name}", raising=False)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("SYSV_SEG_SIZE", "64k", "give it 4352 to 65535"),  # 65,528 bytes with UCX's head: 0, in 16 bits
        ("MM_SEG_SIZE", "65536", "give it 4352 to 65535"),
        ("POSIX_SEG_SIZE", "1k", "give it 4352 to 65535"),
        ("MM_FIFO_SIZE", "1048576", "give it at most 65536"),
        ("SYSV_FIFO_ELEM_SIZE", "65536", "give it at most 65535"),
        ("SYSV_FIFO_SIZE", "1k", "give it at most 65536"),  # 1 to UCX
        ("TCP_RX_SEG_SIZE", "64kbytes", "give it at least 4352"),  # 64k to UCX
        ("MM_RX_MAX_BUFS", "512", "give it inf"),
        ("TCP_TX_MAX_BUFS", "8", "give it inf"),
        ("UD_VERBS_SEG_SIZE", "511", "give it at least 512"),
        ("IB_RX_MAX_BUFS", "4096", "give it inf"),
        ("UD_RX_MAX_BUFS", "8", "give it inf"),
        ("RC_VERBS_TX_MAX_BUFS", "8", "give it inf"),
        ("DC_MLX5_RX_MAX_BUFS", "8", "give it inf"),
        ("TCP_TX_SEG_SIZE", "4351", "give it at least 4352"),
        ("TCP_RX_SEG_SIZE", "2kb", "give it at least 4352"),
        ("SELF_SEG_SIZE", "100", "give it at least 4352"),
        ("SEG_SIZE", "0", "give it at least 512"),
        ("CMA_TX_QUOTA", "0", "give it at least 1"),
        ("RX_MPOOL_SIZES", "64,64k", "give it 1 to 32768"),
        ("BCOPY_THRESH", "64", "give it at most 1"),
        ("MAX_EAGER_RAILS", "2", "give it 1"),
        ("MAX_EAGER_LANES", "inf", "give it 1"),
        ("RNDV_PERF_DIFF", "100", "give it at most 1"),
        ("RNDV_SCHEME", "put_zcopy", "give it auto or am"),
        ("RNDV_SCHEME", "1", "give it auto or am"),
        ("MULTI_LANE_MAX_RATIO", "0.5", "give it at least 1"),
        ("TOPO_PRIO", "1", "give it sysfs or default"),
        ("NUM_PPN", "0", "give it 1 to 2147483647"),
        ("NUM_PPN", "4294967296", "give it 1 to 2147483647"),
        ("PROTOS", "tag*", "give it all"),
        ("PROTOS", "ALL", "give it all"),
        ("TOPO_PRIO", "SYSFS", "give it sysfs or default"),
        ("MAX_RNDV_LANES", "auto", "give it at least 1"),
        ("MAX_RNDV_RAILS", "-0.5", "give it at least 1"),
        ("POSIX_FIFO_SIZE", "64-128", "give it at most 65536"),
        ("POSIX_FIFO_SIZE", "64,128", "give it at most 65536"),
        ("TCP_PORT_RANGE", "20000,60000", "give it at most 65535"),
        ("MAX_RMA_LANES", "many", "give it at least 0"),
        ("MAX_WORKER_NAME", "", "give it at least 0"),
        ("RC_TM_MAX_BCOPY", "some", "give it at least 0"),
        ("RNDV_FRAG_MEM_TYPE", "host,disk", "give it host or cuda"),
        ("MEMTYPE_COPY_ENABLE", "n", "give it y or"),
        ("USE_MT_MUTEX", "y", "give it n or"),
        ("RCACHE_CHECK_PFN", "1", "give it 0"),
        ("RCACHE_STAT_MAX", "inf", "give it at most 1099511627776"),
        ("SELF_NUM_DEVICES", "-1", "give it at most 128"),
        ("TCP_PORT_RANGE", "40000-99999", "give it at most 65535"),
        ("TCP_PORT_RANGE", "99999999999999999999", "give it at most 65535"),
        ("TCP_MAX_IOV", "0", "give it"),
        ("TCP_MAX_POLL", "0", "give it"),
    ],
)
def test_values_that_cannot_work(name: str, value: str, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"UCX's option {name}={re.escape(value)} in config=: {cure}.*\. [A-Zt]"):
        with ucp.open_context({name: value}):
            pass
    monkeypatch.setenv(f"UCX_{name}", value)
    with pytest.raises(ValueError, match=rf"UCX's option UCX_{name}={re.escape(value)} in the environment: {cure}"):
        with ucp.open_context():
            pass
    if name == "MM_SEG_SIZE":  # what is in config= goes over the environment
        with ucp.open_context({name: 8256}):
            pass


def test_what_ucx_chooses_itself() -> None:
    with ucp.open_context({"BCOPY_THRESH": "auto", "RNDV_SCHEME": "Auto", "NUM_PPN": "auto", "PROTOS": "all"}):
        pass


def test_several_values() -> None:
    option_limits.check({"TOPO_PRIO": "default,sysfs", "RX_MPOOL_SIZES": "64,1k", "TCP_PORT_RANGE": "2000 - 2010"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RNDV_FRAG_MEM_TYPE", "host,cuda"),
        ("MAX_RMA_LANES", "2"),
        ("MAX_WORKER_NAME", "8"),
        ("NUM_PPN", "4"),
        ("USE_MT_MUTEX", "no"),
        ("SELF_NUM_DEVICES", "2"),
        ("TCP_PORT_RANGE", "33000-60000"),
        ("RNDV_THRESH", "99999999999999999999"),
    ],
)
async def test_what_else_works(name: str, value: str) -> None:
    """Values near those that are refused."""
    config = {"TLS": BOTH, name: value}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with open_pair(worker, other) as (client, server), trio.open_nursery() as nursery:
            with trio.fail_after(20):
                for length in (1, 9000, 1 << 20):
                    nursery.start_soon(client.send, pattern(length, length))
                    assert await server.receive() == pattern(length, length)


def test_patterns_of_names() -> None:
    """UCX would apply patterns of names, and trio_ucx would not know which options they set."""
    for pattern_of_names in ("*_SEG_SIZE", "SYSV_SEG_SIZ?", "[SP]*_SEG_SIZE"):
        with pytest.raises(ValueError, match="write each UCX option by its own name"):
            with ucp.open_context({pattern_of_names: "64k"}):
                pass


@pytest.mark.parametrize("transports", ["tcp", BOTH, "posix,tcp,self"])
@pytest.mark.parametrize("size", [LEAST_SEGMENT, 65535])
async def test_values_at_the_limits(transports: str, size: int) -> None:
    """Messages around every boundary, one by one, in one batch, and as lists of buffers."""
    names = ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"] if transports == "tcp" else ["MM_SEG_SIZE"]
    config = {"TLS": transports, **dict.fromkeys(names, size)}
    async with ucp.open_worker(config=config) as worker, ucp.open_worker(config=config) as other:
        async with open_pair(worker, other) as (client, server), trio.open_nursery() as nursery:
            with trio.fail_after(20):
                assert_transports(client, "tcp" if transports == "tcp" else BOTH)
                for boundary in (4096, size, 65535):
                    for length in range(boundary - 40, boundary + 2):
                        data, buffer = pattern(length, length), bytearray(length)
                        nursery.start_soon(client.send, data)
                        assert await server.receive() == data
                        nursery.start_soon(server.send, [data[:100], b"", data[100:]])
                        assert await client.receive_into([memoryview(buffer)[:7], memoryview(buffer)[7:]]) == length
                        assert buffer == data
                for _ in range(600):
                    client.send_nowait(bytes(100))
                for _ in range(600):
                    assert await server.receive() == bytes(100)


@pytest.mark.parametrize("sizes", [{"MM_SEG_SIZE": "16k"}, {"SYSV_FIFO_SIZE": 64}, {"MM_FIFO_ELEM_SIZE": 256}])
async def test_sides_that_differ_use_no_shared_memory(sizes: dict[str, Any]) -> None:
    """UCX would overrun the receiver's segments, or look for its messages in other places."""
    [name] = sizes
    name = name.replace("MM", "SYSV")
    async with (
        ucp.open_worker(config={"TLS": BOTH}) as worker,
        ucp.open_worker(config={"TLS": BOTH, **sizes}) as other,
        ucp.open_worker(config={"TLS": "sm,self", **sizes}) as lonely,
    ):
        with trio.fail_after(20):
            for here, there in ((worker, other), (other, worker)):
                async with open_pair(here, there) as (client, server):
                    assert_transports(client, "tcp")
                    await client.send(bytes(20_000))
                    assert len(await server.receive()) == 20_000
                with pytest.raises(OSError, match=rf"{name} \(UCX_{name}\) is \d+ on one side and \d+ on the other"):
                    async with open_pair(here, there, shared_memory=True):
                        pass
                endpoint = await here.open_endpoint(there.address)
                assert_transports(endpoint, "tcp")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(endpoint.tag_send, bytes(20_000), 1)
                    assert await there.tag_receive(bytearray(20_000), 1) == (20_000, 1)
                endpoint.abort()
            with pytest.raises(OSError, match=rf"cannot be used \(UCX's option {name}.*no other transport"):
                await worker.open_endpoint(lonely.address)


async def test_sides_that_differ_over_tcp() -> None:
    async with (
        ucp.open_worker(config={"TLS": "tcp"}) as worker,
        ucp.open_worker(config={"TLS": "tcp", "TCP_RX_SEG_SIZE": "128k"}) as other,
    ):
        what = r"TCP_RX_SEG_SIZE \(UCX_TCP_RX_SEG_SIZE\) is \d+ on one side and \d+ on the other"
        with trio.fail_after(20):
            for here, there in ((worker, other), (other, worker)):
                with pytest.raises(trio_ucx.NotAdmitted, match=what):
                    async with open_pair(here, there):
                        pass
                with pytest.raises(OSError, match=what):
                    await here.open_endpoint(there.address)


async def test_tcp_segments_are_no_longer_than_what_is_received() -> None:
    """UCX would refuse receive segments that are shorter than trio_ucx's default for send segments."""
    with ucp.open_context({"TCP_RX_SEG_SIZE": "8k"}) as context:
        assert context.config["TCP_TX_SEG_SIZE"] == "8192"
        async with ucp.open_worker(context=context):
            pass


async def test_what_ucx_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the options, because UCX names the refused one only in its log."""
    monkeypatch.setenv("UCX_SYSV_FIFO_SIZE", "100")
    with pytest.raises(trio_ucx.UCXError, match=r"a worker, with the options TCP_MAX_IOV=5, UCX_.*SYSV_FIFO_SIZE=100"):
        async with ucp.open_worker(config={"TLS": BOTH, "TCP_MAX_IOV": 5}):
            pass
    with pytest.raises(
        trio_ucx.UCXError, match=r"starting UCX .* with the options MIN_RNDV_CHUNK_SIZE=0.*UCX's log says"
    ):
        with ucp.open_context({"MIN_RNDV_CHUNK_SIZE": 0}):
            pass


async def test_thresholds_that_differ_by_fabric() -> None:
    """The peer must know which short messages stay with their sender."""
    async with ucp.open_worker(config={"TLS": "tcp", "RNDV_THRESH": "intra:1k,inter:100k"}) as worker:
        with pytest.raises(ValueError, match="one RNDV_THRESH .* for all fabrics, .* here the least is 1024"):
            async with open_pair(worker):
                pass


def test_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in UCX: config over the environment, the last in config, the special name in the environment."""
    seg = list(AGREED).index("SYSV_SEG_SIZE")
    assert agreed_sizes({}) == DEFAULT_SIZES and in_force("SYSV_SEG_SIZE", {}) is None
    monkeypatch.setenv("UCX_MM_SEG_SIZE", "16k")
    assert agreed_sizes({})[seg] == 16384
    monkeypatch.setenv("UCX_SYSV_SEG_SIZE", "8k")
    assert agreed_sizes({})[seg] == 8192
    assert in_force("POSIX_SEG_SIZE", {}) == "16k"
    assert in_force("SYSV_SEG_SIZE", {"MM_SEG_SIZE": "5000"}) == "5000"
    assert in_force("SYSV_SEG_SIZE", {"MM_SEG_SIZE": "5000", "SYSV_SEG_SIZE": "6000"}) == "6000"
    assert in_force("SYSV_SEG_SIZE", {"SYSV_SEG_SIZE": "6000", "MM_SEG_SIZE": "5000"}) == "5000"


def test_memory_that_a_worker_needs() -> None:
    """UCX crashes when it runs out of it while it opens a worker."""
    assert shared_memory._needed("POSIX", {}) == (64 << 10, 4608 << 10)
    assert shared_memory._needed("POSIX", {"MM_SEG_SIZE": "60000"})[1] == 512 * 60960
    assert shared_memory._needed("POSIX", {"MM_FIFO_SIZE": "8192"}) == (2 << 20, 16896 * 9216)
    assert shared_memory._needed("POSIX", {"POSIX_RX_BUFS_GROW": "1000"})[1] == 1000 * 9216


def test_numbers() -> None:
    for text, value in (
        ("0", 0),
        ("64k", 65536),
        ("64KB", 65536),
        ("1m", 2**20),
        ("0.5", 0.5),
        ("7b", 7),
        ("2T", 2**41),
    ):
        assert number(text) == value
    assert number("inf") == number("auto") == number("-1") == math.inf
    assert number("none") is number("") is number("k") is None
    assert option_limits.differences((), DEFAULT_SIZES, "sysv") is None


# ---- devices that do not exist ----


@pytest.mark.parametrize("value", ["nope0", "lo,nope0", "nope0,lo", "lo,nope0:1", " lo,nope0"])
@pytest.mark.parametrize("transports", ["tcp", "all", "sm,self"])
def test_devices_that_do_not_exist(value: str, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = r".*there is no device .*'nope0(:1)?'.*; give it one or more of (\S+, )*lo(, \S+)*$"
    with pytest.raises(ValueError, match=rf"UCX's option NET_DEVICES={value} in config=: {there}"):
        with ucp.open_context({"TLS": transports, "NET_DEVICES": value}):
            pass
    monkeypatch.setenv("UCX_NET_DEVICES", value)
    with pytest.raises(ValueError, match=rf"UCX's option UCX_NET_DEVICES={value} in the environment: {there}"):
        with ucp.open_context({"TLS": transports}):
            pass
    with ucp.open_context({"TLS": transports, "NET_DEVICES": "lo"}):
        pass
    assert_no_live_handles()


@pytest.mark.parametrize("value", ["all", "lo", "lo,", "^lo", "^nope0", "^", "n*", ""])
@pytest.mark.parametrize("transports", ["all", "sm,self"])
def test_devices_that_ucx_accepts(value: str, transports: str) -> None:
    with ucp.open_context({"TLS": transports, "NET_DEVICES": value}):
        pass


def test_names_of_devices() -> None:
    def missing(value: str) -> list[str]:
        return option_limits.missing_devices({"NET_DEVICES": value}, ["mlx5_0:1", "mlx5_0:2", "eth0"])

    assert missing("mlx5_0:1,eth0,mlx5_0") == []
    assert missing("mlx5_0:3,eth1,eth0") == ["mlx5_0:3", "eth1"]
    assert missing("(mlx5_0|eth1)") == []
