"""Uses an installed trio_ucx for a moment, from wherever: what the README shows, over the transports that are there."""

import trio

import trio_ucx


async def handler(connection: trio_ucx.Connection) -> None:
    async for message in connection.messages(tag=7):
        await connection.send(message[::-1], tag=7)


async def main() -> None:
    async with trio.open_nursery() as nursery:
        [listener, *_] = await nursery.start(trio_ucx.serve_ucx, handler, 0)
        async with trio_ucx.connect(("127.0.0.1", listener.address[1])) as connection:
            for size in (10, 10**6):
                await connection.send(b"ab" * (size // 2), tag=7)
                assert await connection.receive(tag=7) == b"ba" * (size // 2)
            with trio.move_on_after(0.05) as scope:
                await connection.receive(tag=8)
            assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
    print(f"trio_ucx {trio_ucx.__version__} works: {trio_ucx.__file__}")


trio.run(main)
