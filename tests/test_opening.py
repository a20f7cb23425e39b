"""Opening connections and listeners: an address in place of the port, several addresses, ``await connect(...)``."""

from __future__ import annotations

import errno
import gc
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import echo, free_port, open_listener, serving, until
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp

KEY = b"sixteen letters!"


async def expect_echo(connection: trio_ucx.Connection) -> None:
    with trio.fail_after(15):
        await connection.send(b"x")
        assert await connection.receive() == b"x"


# ---- an address in place of the port ----


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "[::1]:0", ("127.0.0.1", 0), ["127.0.0.1", 0], "unix:{}/x", ("unix:{}/x", 0)], ids=str
)
async def test_listening_at_an_address(worker: ucp.Worker, address: Any, tmp_path: Path) -> None:
    if isinstance(address, str):
        address = address.format(tmp_path)
    elif address[0].startswith("unix"):
        address = (address[0].format(tmp_path), 0)
    host = trio_ucx.parse_address(address)[0]
    [listener] = await trio_ucx.open_ucx_listeners(address, worker=worker)
    async with listener:
        assert listener.address[0] == host and (listener.address[1] != 0) == (not host.startswith("unix"))
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(trio_ucx.serve_ucx, worker=worker), echo, address)
        assert server.address[0] == host
        async with trio_ucx.connect(server.address, worker=worker) as client:
            await expect_echo(client)
        nursery.cancel_scope.cancel()


async def test_listening_where_another_listener_was(worker: ucp.Worker) -> None:
    """Its address opens another one there."""
    async with open_listener(worker) as listener:
        address = listener.address
    [again] = await trio_ucx.open_ucx_listeners(address, worker=worker)
    async with again:
        assert again.address == address


@pytest.mark.parametrize(
    ("port", "host", "kind", "match"),
    [
        (
            "10.0.0.5:13337",
            "10.0.0.5",
            ValueError,
            "'10.0.0.5:13337' names the host already: leave out host='10",
        ),
        (("10.0.0.5", 13337), "", ValueError, "leave out host=''"),
        ("unix:/run/x", "unix:/run/x", ValueError, "names the host already"),
        ("13337", None, TypeError, "an integer, or an address such as 'host:port', not the str '13337'"),
        ("localhost", None, TypeError, "not the str 'localhost'"),
        ("", None, TypeError, "not the str ''"),
        ("localhost:", None, ValueError, "'localhost:' is not an address"),
        ("::1:80", None, ValueError, "brackets"),
        ("tcp://10.0.0.5:13337", None, ValueError, "has a scheme, .*: write '10.0.0.5:13337'$"),
        (13337, "tcp://10.0.0.5", ValueError, "has a scheme, .*: write '10.0.0.5'$"),
        ("unix:", None, ValueError, "unix:/path"),
        (("unix:/run/x", 5), None, ValueError, "no port"),
        (("10.0.0.5", "5"), None, TypeError, "the port must be an integer, not str"),
        ((5, 5), None, TypeError, "the host must be a str, not int"),
        (["a:1", "b:1"], None, TypeError, "the port must be an integer, not str"),
        (None, None, TypeError, "the port must be an integer, not NoneType"),
        (b"a:1", None, TypeError, "the port must be an integer, not bytes"),
        (1.5, None, TypeError, "the port must be an integer, not float"),
        (0, 5, TypeError, "the host must be a str, not int"),
        (65536, None, ValueError, "between 0 and 65535"),
    ],
)
async def test_bad_addresses_of_listeners(port: Any, host: Any, kind: type[Exception], match: str) -> None:
    for opening in trio_ucx.open_ucx_listeners, partial(trio_ucx.serve_ucx, echo):
        with pytest.raises(kind, match=match):
            await opening(port, host=host)  # type: ignore[operator]


# ---- several addresses ----


@pytest.mark.parametrize("kind", [list, tuple])
async def test_first_address_that_succeeds(worker: ucp.Worker, kind: Any, tmp_path: Path) -> None:
    async with open_listener(worker) as first, open_listener(worker, host=f"unix:{tmp_path}/x") as second:
        nobody = f"127.0.0.1:{free_port()}"
        for addresses, chosen in (
            ([nobody, trio_ucx.format_address(first.address), second.address], first),
            ([second.address, first.address], second),
            ([nobody, f"unix:{tmp_path}/none", second.address], second),
            ([first.address], first),
        ):
            with trio.fail_after(15):
                async with trio_ucx.connect(kind(addresses), worker=worker):
                    (await chosen.accept()).abort()
        assert first.statistics().accepted == 2


async def test_pairs_are_one_address(worker: ucp.Worker) -> None:
    async with open_listener(worker) as listener:
        host, port = listener.address
        for one in ((host, port), [host, port], (host, port, 0, 0)):
            assert repr(trio_ucx.connect(one)) == f"<trio_ucx.Connecting to {host}:{port}>"  # type: ignore[arg-type]
    several = trio_ucx.connect([("a", 1), "[::1]:2", "unix:/x"])
    assert repr(several) == "<trio_ucx.Connecting to a:1, [::1]:2, unix:/x>"


async def test_servers_that_refuse(worker: ucp.Worker) -> None:
    """Another server may let the client in, for whatever reason the first does not."""
    tcp = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def other_protocol(stream: trio.SocketStream) -> None:
        await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")
        await stream.receive_some()

    async with open_listener(worker, authkey=KEY) as locked, serving(echo, worker) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, other_protocol, tcp)
            addresses = [locked.address, tcp[0].socket.getsockname(), listener.address]
            async with trio_ucx.connect(addresses, worker=worker) as client:
                await expect_echo(client)
            assert client.remote_address == listener.address
            nursery.cancel_scope.cancel()


async def test_error_names_every_address(worker: ucp.Worker, tmp_path: Path) -> None:
    ports = free_port(), free_port()
    with pytest.raises(ConnectionRefusedError) as caught:
        await trio_ucx.connect([("127.0.0.1", ports[0]), f"127.0.0.1:{ports[1]}"], worker=worker)
    refused = "Connection refused; is a listener open there?"
    assert caught.value.errno == errno.ECONNREFUSED
    assert caught.value.strerror == (
        f"none of 2 addresses could be connected to: (1) connecting to 127.0.0.1:{ports[0]}: {refused} "
        f"(2) connecting to 127.0.0.1:{ports[1]}: {refused}"
    )
    group = caught.value.__cause__
    assert isinstance(group, ExceptionGroup) and len(group.exceptions) == 2
    with pytest.raises(FileNotFoundError, match="is a listener open there.$") as single:
        await trio_ucx.connect([f"unix:{tmp_path}/none"], worker=worker)
    assert "none of" not in str(single.value)


async def test_type_of_the_error(worker: ucp.Worker, tmp_path: Path) -> None:
    """That of an address where a later attempt may succeed, or of the first."""
    nobody, unknown = f"unix:{tmp_path}/none", "no.such.host.invalid:1"
    async with open_listener(worker, authkey=KEY) as locked:
        for addresses, kind in (
            ([locked.address, nobody], FileNotFoundError),
            ([nobody, locked.address], FileNotFoundError),
            ([locked.address, unknown], trio_ucx.NotAdmitted),
            ([unknown, locked.address], socket.gaierror),
            ([locked.address, locked.address], trio_ucx.NotAdmitted),
        ):
            with trio.fail_after(15), pytest.raises(OSError, match=r"none of 2 addresses .*\(1\) .*\(2\) ") as caught:
                await trio_ucx.connect(addresses, worker=worker)
            assert type(caught.value) is kind and caught.value.errno is not None
        assert isinstance(caught.value, trio_ucx.NotAdmitted)
        assert caught.value.address == trio_ucx.format_address(locked.address)


async def test_timeout_is_for_each_address(worker: ucp.Worker) -> None:
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with silent[0], serving(echo, worker) as listener:
        address = silent[0].socket.getsockname()
        async with trio_ucx.connect([address, listener.address], worker=worker, connect_timeout=0.3) as client:
            await expect_echo(client)
        with Stopwatch(1.5), pytest.raises(TimeoutError, match="none of 2 .* took longer than 0.2 seconds"):
            await trio_ucx.connect([address, address], worker=worker, connect_timeout=0.2)


async def test_retry_goes_around_all_addresses(worker: ucp.Worker) -> None:
    """Also around one that lets nobody in, as long as another may."""
    port = free_port()
    async with open_listener(worker, authkey=KEY) as locked, trio.open_nursery() as nursery:
        connected = trio.Event()

        async def connect() -> None:
            addresses = [locked.address, ("127.0.0.1", port)]
            async with trio_ucx.connect(addresses, worker=worker, retry=trio_ucx.Backoff(longest=0.1)) as client:
                await expect_echo(client)
                connected.set()

        nursery.start_soon(connect)
        await until(lambda: locked.statistics().refused >= 2)
        nursery.start_soon(partial(trio_ucx.serve_ucx, echo, ("127.0.0.1", port), worker=worker))
        with trio.fail_after(15):
            await connected.wait()
        with trio.fail_after(5), pytest.raises(trio_ucx.NotAdmitted):  # at once
            await trio_ucx.connect([locked.address] * 2, worker=worker, retry=trio_ucx.Backoff())
        nursery.cancel_scope.cancel()


async def test_cancelled_at_the_second_address(worker: ucp.Worker, tmp_path: Path) -> None:
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with silent[0]:
        address = silent[0].socket.getsockname()
        with trio.move_on_after(0.1) as scope:
            await trio_ucx.connect([f"unix:{tmp_path}/none", address, address], worker=worker)
        assert scope.cancelled_caught


async def test_errors_leave_no_reference_cycle(worker: ucp.Worker, tmp_path: Path) -> None:
    def errors() -> list[Any]:
        return [one for one in gc.get_objects() if isinstance(one, OSError) and f"{tmp_path}/none" in str(one)]

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(FileNotFoundError) as caught:
            await trio_ucx.connect([f"unix:{tmp_path}/none", f"unix:{tmp_path}/none"], worker=worker)
        assert len(errors()) == 3
        del caught
        assert not errors()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("addresses", "kind", "match"),
    [
        ([], ValueError, "the list of addresses is empty"),
        ((), ValueError, "an address is a pair"),
        (["a:1", "b"], ValueError, "'b' has no port"),
        (("a:1", "b"), ValueError, "'b' has no port"),
        (["a:1", "tcp://b:1"], ValueError, "has a scheme, .*: write 'b:1'"),
        (["a:1", ["b:1"]], ValueError, "an address is a pair"),
        (["a:1", None], TypeError, "the port must be an integer, not NoneType"),
        ({"a:1": 1}, TypeError, "not dict"),
        ({"a:1"}, TypeError, "not set"),
        (b"a:1", TypeError, "not bytes"),
        (bytearray(b"a:1"), TypeError, "not bytearray"),
        (("a", "1"), TypeError, "the port must be an integer, not str"),
    ],
    ids=repr,
)
def test_bad_lists_of_addresses(addresses: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        trio_ucx.connect(addresses)


# ---- await connect ----


async def test_awaited_connection_is_the_caller_s(worker: ucp.Worker) -> None:
    async with serving(echo, worker) as listener:
        connecting = trio_ucx.connect(listener.address, worker=worker)
        client = await connecting
        await expect_echo(client)
        with pytest.raises(RuntimeError, match="entered or awaited once"):
            await connecting
        with pytest.raises(RuntimeError, match="entered or awaited once"):
            await connecting.__aenter__()
        await expect_echo(client)
        await client.aclose()
        assert client.closed
        async with await trio_ucx.connect(listener.address, worker=worker) as client:
            await expect_echo(client)
        assert client.closed


async def test_await_after_an_error(worker: ucp.Worker) -> None:
    """An attempt that has failed can be repeated."""
    port = free_port()
    connecting = trio_ucx.connect(("127.0.0.1", port), worker=worker)
    with pytest.raises(ConnectionRefusedError):
        await connecting
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio_ucx.serve_ucx, echo, ("127.0.0.1", port), worker=worker))
        async with await connecting as client:
            await expect_echo(client)
        nursery.cancel_scope.cancel()


async def test_await_is_cancelled(worker: ucp.Worker) -> None:
    async with open_listener(worker) as listener:
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio_ucx.connect(listener.address, worker=worker)
        assert scope.cancelled_caught and worker.statistics().endpoints == 0
