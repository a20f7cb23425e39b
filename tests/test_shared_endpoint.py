"""All Connections between two workers share one endpoint, which is kept for a moment when the last one has closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from helpers import (
    assert_transports,
    echo,
    expect_closed,
    live_handles,
    open_listener,
    open_pair,
    open_peer,
    pattern,
    serving,
    until,
    until_over,
)
from injected_faults import delay_handshakes, fill_worker, limit_generations

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake.exchange import Taken, Welcomed
from trio_ucx._link.receiving import Receiving
from trio_ucx.testing import internals
from trio_ucx.ucp import chains
from trio_ucx.ucp._engine import endpoints_to_worker


@asynccontextmanager
async def open_echo(transports: str) -> AsyncIterator[tuple[ucp.Worker, trio_ucx.Listener]]:
    """A server that sends messages back, on a worker of its own in this process."""

    async with ucp.open_worker(config={"TLS": transports}) as worker:
        async with serving(partial(echo, tag=1), worker) as listener:
            yield worker, listener


@asynccontextmanager
async def open_two(transports: str) -> AsyncIterator[tuple[ucp.Worker, trio_ucx.Listener]]:
    """A worker with a listener whose Connections the test accepts."""
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        async with open_listener(worker) as listener:
            yield worker, listener


async def works(connection: trio_ucx.Connection, seed: int) -> None:
    with trio.fail_after(15):
        for size in (10, 100_000):
            await connection.send(pattern(size, seed), tag=1)
            assert await connection.receive(tag=1) == pattern(size, seed)


def endpoints_made(worker: ucp.Worker, other: ucp.Worker) -> int:
    made: int = internals(worker).endpoints_by_worker.of(other.address.uid).summary(other.address).made
    return made


async def test_connections_in_turn(worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_to_worker, "IDLE_TIME", 60)
    async with open_echo(transports) as (server, listener):
        for number in range(20):
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, number)
                assert_transports(connection, transports)
            await until(lambda: server.statistics().endpoints == 0)  # it has closed its side, too
        assert endpoints_made(worker, server) == endpoints_made(server, worker) == 1
        assert worker.statistics().endpoints == 0
        monkeypatch.undo()
        with trio.fail_after(15):  # nobody comes: it is closed
            await until(lambda: not live_handles()["endpoint"])


async def test_connections_at_a_time(worker: ucp.Worker, transports: str) -> None:
    async with open_echo(transports) as (server, listener), trio.open_nursery() as nursery:

        async def client(number: int) -> None:
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, number)

        for number in range(30):
            nursery.start_soon(client, number)
        await until(lambda: listener.statistics().accepted == 30)
        assert endpoints_made(worker, server) == endpoints_made(server, worker) == 1


@pytest.mark.parametrize("wishes", [("auto", "auto"), ("auto", False)], ids=["alike", "different transports"])
async def test_connects_that_cross(worker: ucp.Worker, transports: str, wishes: tuple[str | bool, str | bool]) -> None:
    """Both workers connect to each other at the same time, again and again."""
    async with open_echo(transports) as (server, there), serving(partial(echo, tag=1), worker) as here:

        async def client(to: trio_ucx.Listener, own: ucp.Worker, wish: str | bool, number: int) -> None:
            async with trio_ucx.connect(to.address, worker=own, shared_memory=wish) as connection:  # type: ignore[arg-type]
                await works(connection, number)
                if wish is False:
                    assert {one.name for one in connection.endpoint.transports} == {"tcp"}

        for number in range(5):
            with trio.fail_after(15):
                async with trio.open_nursery() as clients:
                    for wish in (wishes, wishes[::-1]):
                        clients.start_soon(client, there, worker, wish[0], number)
                        clients.start_soon(client, here, server, wish[1], number)


@pytest.mark.parametrize("closes", [False, True])
async def test_messages_before_take_is_read(
    worker: ucp.Worker, transports: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that uses an endpoint again may have sent, and even closed, before the server knows that it is there."""
    async with open_two(transports) as (_, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as first, await listener.accept():
            await first.send(b"x")
        delay_handshakes(monkeypatch, Taken, partial(trio.sleep, 0.5))
        client = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
        sizes = (10, 5000) if closes else (10, 5000, 200_000)
        with trio.fail_after(15):
            for tag, size in enumerate(sizes):
                client.send_nowait(pattern(size, tag), tag=tag)
            await client.send_all(b"stream")
            await (client.aclose() if closes else client.ping())
            assert listener.statistics().waiting == 0  # the server has answered, and has not read TAKE
            server = await listener.accept()
            for tag, size in enumerate(sizes):
                assert await server.receive(tag=tag) == pattern(size, tag)
            assert await server.receive_some() == b"stream"
            if closes:
                with pytest.raises(trio.EndOfChannel):
                    await server.receive()
                await server.aclose()
            else:
                await server.send(b"back")
                assert await client.receive() == b"back"
            server.abort()
            client.abort()


async def test_a_message_that_is_lost_before_take_is_read_ends_the_connection(
    worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is well, so that the connection could open over it without the message."""
    async with open_two(transports) as (server, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as first, await listener.accept():
            await first.send(b"x")
        delay_handshakes(monkeypatch, Taken, partial(trio.sleep, 0.3))
        async with trio_ucx.connect(listener.address, worker=worker) as client:
            with monkeypatch.context() as patch:
                patch.setattr(Receiving, "packed_arrived", lambda *_: 1 / 0)
                await client.send_eof()  # its end of the byte stream is Python's
                with trio.fail_after(15), pytest.raises(trio.BrokenResourceError, match="an internal error"):
                    await client.receive()
            client.abort()
        assert listener.statistics().waiting == 0 and not internals(server).tag_dispatch.sinks


async def test_client_that_closes_its_endpoint_while_it_is_welcomed(
    worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WELCOME has told it of the server's end. It takes the next endpoint, or connects from another worker."""
    async with open_echo(transports) as (server, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            await works(connection, 1)

        async def close_endpoint() -> None:
            monkeypatch.setattr(endpoints_to_worker, "IDLE_TIME", 0)
            internals(worker).endpoints_by_worker.close_idle()
            monkeypatch.setattr(endpoints_to_worker, "IDLE_TIME", 60)

        delay_handshakes(monkeypatch, Welcomed, close_endpoint)
        for number in range(5):
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, number)
        assert endpoints_made(worker, server) > 1


async def test_what_one_connection_left_does_not_reach_the_next(worker: ucp.Worker, transports: str) -> None:
    async with open_two(transports) as (_, listener):
        for number in range(10):
            async with trio_ucx.connect(listener.address, worker=worker) as client:
                server = await listener.accept()
                await client.send(bytes([number]), tag=5)
                await client.send(b"never read", tag=6)
                await client.send_all(b"never read, either")
                await server.send(b"nor this", tag=7)
                assert await server.receive(tag=5) == bytes([number])
                with pytest.raises(trio.WouldBlock):
                    server.receive_nowait(tag=8)
            await server.aclose()


@pytest.mark.parametrize("how", ["aborted", "large send under way"])
async def test_endpoints_that_are_not_used_again(worker: ucp.Worker, transports: str, how: str) -> None:
    async with open_echo(transports) as (server, listener):
        for number in range(5):
            connection = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
            await works(connection, number)
            if how == "large send under way":
                connection.send_nowait(bytes(2**24), tag=9)
            connection.abort()
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            await works(connection, 9)
        assert endpoints_made(worker, server) == 6


async def test_abort_of_one_of_several(worker: ucp.Worker, transports: str) -> None:
    """What it waits for ends at once, the others go on, and both sides get their buffers back."""
    async with open_two(transports) as (server, listener), trio.open_nursery() as nursery:
        one, other = [await trio_ucx.open_ucx_stream(*listener.address, worker=worker) for _ in range(2)]
        one_there, other_there = await listener.accept(), await listener.accept()
        ended: list[type[BaseException]] = []

        async def ends(function: object, *args: object) -> None:
            try:
                await function(*args)  # type: ignore[operator]
            except trio.TrioInternalError:
                raise
            except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
                ended.append(type(error))

        for side in (one, one_there):
            nursery.start_soon(ends, partial(side.send, bytes(2**24), tag=3))
            nursery.start_soon(ends, partial(side.receive, tag=4))
        await until(lambda: worker.statistics().operations_in_flight and server.statistics().operations_in_flight)
        with trio.fail_after(15):
            one.abort()
            await until_over(one_there)
            await one.wait_buffers_released()
            await one_there.wait_buffers_released()
            one_there.abort()
        await until(lambda: not nursery.child_tasks)
        assert ended.count(trio.ClosedResourceError) >= 2
        for number in range(3):
            await other.send(pattern(50_000, number))
            assert await other_there.receive() == pattern(50_000, number)
        assert endpoints_made(worker, server) == 1
        await other.aclose()
        await other_there.aclose()


async def test_closing_the_endpoint_is_refused(worker: ucp.Worker, transports: str) -> None:
    async with open_two(transports) as (_, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            endpoint = connection.endpoint
            there = await listener.accept()
            with pytest.raises(RuntimeError, match="close or abort the Connection"):
                endpoint.abort()
            for mode in ucp.CloseMode:
                with pytest.raises(RuntimeError, match="close or abort the Connection"):
                    await endpoint.aclose(mode)
            await connection.send(b"goes on")
            assert await there.receive() == b"goes on"
        endpoint.abort()
        await endpoint.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await endpoint.tag_send(b"", 1)
        await there.aclose()


async def test_endpoint_ends_with_its_connection(worker: ucp.Worker, transports: str) -> None:
    """What waits at the endpoint of one Connection ends with that one, though another one goes on."""
    async with open_two(transports) as (_, listener):
        one, other = [await trio_ucx.open_ucx_stream(*listener.address, worker=worker) for _ in range(2)]
        there = [await listener.accept(), await listener.accept()]
        errors: list[Exception] = []

        async def sends(endpoint: ucp.Endpoint) -> None:
            with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)) as caught:
                await endpoint.tag_send_sync(b"nobody receives it", 1)
            errors.append(caught.value)

        async def sends_in_a_group() -> None:
            with pytest.raises(ExceptionGroup) as caught:
                async with worker.open_request_group() as group:
                    group.tag_send_sync(one.endpoint, b"nobody receives it", 1)
            errors.extend(caught.value.exceptions)

        with trio.fail_after(15):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sends, one.endpoint)
                nursery.start_soon(sends_in_a_group)
                nursery.start_soon(sends, there[0].endpoint)
                ends = one.endpoint, there[0].endpoint
                await until(lambda: [end.statistics().operations_in_flight for end in ends] == [2, 1])
                one.abort()
        assert sorted(type(error).__name__ for error in errors) == [*["ClosedResourceError"] * 2, "PeerLost"]
        assert one.endpoint.name and not one.endpoint.alive
        assert other.endpoint.alive
        await other.send(b"goes on")
        assert await there[1].receive() == b"goes on"
        for each in (*there, other):
            each.abort()


@pytest.mark.parametrize("how", ["abort", "aclose", "force"])
async def test_ending_the_endpoint_of_a_broken_connection(worker: ucp.Worker, transports: str, how: str) -> None:
    """It has no effect: what has arrived can be received, and the Connection must still be closed."""
    async with open_two(transports) as (_, listener):
        connection = await trio_ucx.connect(listener.address, worker=worker).__aenter__()
        peer = await listener.accept()
        await peer.send(b"the last")
        peer.abort()
        with trio.fail_after(15):
            await until_over(connection)
        endpoint = connection.endpoint
        if how == "abort":
            endpoint.abort()
        else:
            await endpoint.aclose(ucp.CloseMode.FORCE if how == "force" else ucp.CloseMode.FLUSH)
        assert await connection.receive() == b"the last"
        await connection.aclose()


async def test_refused_operations_do_not_hide_a_loss(transports: str) -> None:
    """A refusal says nothing about the Connection: its close still raises that messages may be lost."""
    config, features = {"TLS": transports}, ucp.DEFAULT_FEATURES | ucp.Feature.RMA
    async with (
        ucp.open_worker(config=config, features=features) as mine,
        ucp.open_worker(config=config, features=features) as theirs,
        open_pair(mine, theirs) as (connection, peer),
    ):
        memory = theirs.context.register(bytearray(200_000))
        with connection.endpoint.attach(memory.descriptor) as remote:
            memory.close()
            with pytest.raises(trio_ucx.UCXError, match="owner refused"):
                await remote.get()
        await connection.send(b"unread")
        peer.abort()
        with trio.fail_after(15):
            await until(lambda: connection.peer_state is trio_ucx.PeerState.LOST)
        with pytest.raises(trio.BrokenResourceError, match="may not have been delivered"):
            await connection.aclose()


async def test_remote_memory_and_chains_end_with_their_connection(transports: str) -> None:
    """Though another Connection goes on: puts that have not begun are not done any more, and a chain stops."""
    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64
    async with (
        ucp.open_worker(config={"TLS": transports}, features=features) as worker,
        ucp.open_worker(config={"TLS": transports}, features=features) as owner,
        open_pair(worker, owner) as (one, _),
        open_pair(worker, owner) as (other, other_there),
    ):
        data = bytearray(2**24)
        with owner.context.register(data) as memory, one.endpoint.attach(memory.descriptor) as remote:
            chain = worker.new_chain()
            never = chain.get(remote, 0, 8)
            chain.check(never.u64() == 1, on_false=chains.Retry(100_000, again=never, delay=0.001))
            ended: list[int] = []

            async def put(index: int) -> None:
                try:
                    await remote.put(b"x" * 2**13, 2**13 * index)
                except trio.ClosedResourceError:
                    ended.append(index)

            with trio.fail_after(15):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(chain.run)
                    await until(lambda: worker.statistics().operations_in_flight)
                    for index in range(1, 2000):
                        nursery.start_soon(put, index)
                    await until(lambda: worker.statistics().operations_in_flight > 100)
                    one.abort()
            written = data.count(b"x")
            assert ended
            for _ in range(50):
                await other.send(b"ping")
                await other_there.send(await other_there.receive())
                await other.receive()
            assert data.count(b"x") <= written + 64 * 2**13, "more than what was under way"
            chain.close()


async def test_refused_puts_are_reported_to_their_connection(transports: str) -> None:
    """A flush does not report what the owner has refused to another Connection over the same endpoint."""
    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64
    async with (
        ucp.open_worker(config={"TLS": transports}, features=features) as worker,
        ucp.open_worker(config={"TLS": transports}, features=features) as owner,
        open_pair(worker, owner) as (one, _),
        open_pair(worker, owner) as (other, _),
    ):
        with (
            owner.context.register(bytearray(64)) as memory,
            one.endpoint.attach(memory.descriptor) as remote,
            other.endpoint.attach(memory.descriptor) as others,
            trio.fail_after(15),
        ):
            await remote.put(b"accepted")
            await others.put(b"accepted")
            await remote.flush()
            await others.flush()
            memory.close()
            for _ in range(3):
                await others.put(b"refused")
                await others.atomic(ucp.AtomicOp.ADD, 1, 8)
            await remote.flush()
            with pytest.raises(trio_ucx.UCXError, match="before this flush") as caught:
                await others.flush()
            assert caught.value.status is ucp.Status.NO_ELEM
            await others.flush()
            await remote.put(b"refused")
            await others.flush()
            with pytest.raises(trio_ucx.UCXError, match="before this flush"):
                await remote.flush()
            await others.put(b"refused, and never reported")


async def test_waits_for_one_ucp_stream(transports: str) -> None:
    """Connections that share an endpoint share its UCP stream: one task at a time receives."""
    features = ucp.DEFAULT_FEATURES | ucp.Feature.STREAM
    async with (
        ucp.open_worker(config={"TLS": transports}, features=features) as worker,
        ucp.open_worker(config={"TLS": transports}, features=features) as there,
        open_pair(worker, there) as (one, _),
        open_pair(worker, there) as (other, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(expect_closed, one.endpoint.stream_receive_some)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await other.endpoint.stream_receive_some()
        with trio.fail_after(15):
            one.abort()


async def test_different_transports(worker: ucp.Worker, transports: str) -> None:
    """An endpoint over shared memory is of no use to a connection without; one after the other, and both at once."""
    async with open_echo(transports) as (_, listener):
        before: trio_ucx.Connection | None = None
        for number in range(6):
            wish: bool | str = "auto" if number % 2 == 0 else False
            connection = await trio_ucx.connect(
                listener.address,
                worker=worker,
                shared_memory=wish,  # type: ignore[arg-type]
            ).__aenter__()
            await works(connection, number)
            if wish is False:
                assert {one.name for one in connection.endpoint.transports} == {"tcp"}
            if before is not None:
                await works(before, number)
                await before.aclose()
            before = connection if number < 3 else None
            if before is None:
                await connection.aclose()


async def test_endpoint_to_a_process_that_ends(worker: ucp.Worker, transports: str) -> None:
    async with open_peer("echo", [1], transports=transports) as peer:
        address, _ = await peer.hear()
        async with trio_ucx.connect(tuple(address), worker=worker) as connection:
            await works(connection, 1)
        peer.process.kill()
        await peer.process.wait()
        with pytest.raises(OSError):
            await trio_ucx.open_ucx_stream(*address, worker=worker)
    await until(lambda: not live_handles()["endpoint"])


async def test_used_up_generations(worker: ucp.Worker, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX has 65,535 for two workers. The client then goes on with others, and closes those that nobody uses."""
    limit_generations(monkeypatch, 5)
    async with open_echo(transports) as (_, listener):
        for number in range(30):
            connection = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
            await works(connection, number)
            connection.abort()
        assert worker._successors
        assert live_handles()["worker"] <= 5


@pytest.mark.parametrize("side", ["client", "server"])
async def test_worker_that_is_full(worker: ucp.Worker, transports: str, side: str) -> None:
    """UCX has room for 255 kinds of endpoints in a worker."""
    async with open_echo(transports) as (server, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as before:
            full = worker if side == "client" else server
            fill_worker(full)
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, 1)
            await works(before, 2)
        assert len(full._successors) == 1


@pytest.mark.parametrize("side", ["client", "server"])
async def test_raw_endpoints_count(worker: ucp.Worker, transports: str, side: str) -> None:
    """The two workers have not made equally many: the client connects from another one."""
    async with open_echo(transports) as (server, listener):
        one, other = (worker, server) if side == "client" else (server, worker)
        raw = await one.open_endpoint(other.address)
        for number in range(3):
            async with trio_ucx.connect(listener.address, worker=worker) as connection:
                await works(connection, number)
        assert len(worker._successors) == 1 and not server._successors
        raw.abort()


@pytest.mark.parametrize("value", ["n", "auto"])
async def test_ucx_that_does_not_request_the_other_end_at_once(transports: str, value: str) -> None:
    config = {"TLS": transports, "RESOLVE_REMOTE_EP_ID": value}
    async with ucp.open_worker(config=config) as worker, open_echo(transports) as (_, listener):
        async with trio_ucx.connect(listener.address, worker=worker) as connection:
            await works(connection, 1)


async def test_isolated_clients(worker: ucp.Worker, transports: str) -> None:
    """Each has a worker of its own, and so an endpoint of its own."""
    async with open_echo(transports) as (server, listener):
        workers = live_handles()["worker"]
        connections = [await trio_ucx.open_ucx_stream(*listener.address, worker=worker, isolate=True) for _ in range(3)]
        for number, connection in enumerate(connections):
            await works(connection, number)
            assert_transports(connection, transports)
        assert server.statistics().endpoints == 3 and endpoints_made(worker, server) == 0
        connections[0].abort()
        await connections[1].aclose()
        await works(connections[2], 9)
        await connections[2].aclose()
        await until(lambda: live_handles()["worker"] == workers)
        with pytest.raises(OSError):
            await trio_ucx.open_ucx_stream("127.0.0.1", 1, worker=worker, isolate=True)
        with pytest.raises(TypeError, match="isolate must be a bool"):
            trio_ucx.connect(listener.address, worker=worker, isolate=1)  # type: ignore[arg-type]
        assert live_handles()["worker"] == workers
