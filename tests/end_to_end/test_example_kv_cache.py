"""The KV cache: decoders get the right blocks, and give them back, however they end."""

from __future__ import annotations

import signal
from pathlib import Path

import trio

from .programs import EXAMPLES, Program, assert_complaint, program

KV_CACHE = EXAMPLES / "kv_cache.py"
BLOCKS = 160
#: Its 20 blocks a layer are the whole pool.
LONG = "x" * 16 * 19


async def lines(decoder: Program, count: int) -> list[str]:
    with trio.fail_after(30):
        return [await decoder.read_line() for _ in range(count)]


async def test_decoders_share_the_pool() -> None:
    with program(KV_CACHE, "prefill", "--blocks", BLOCKS) as server:
        await server.wait_address()
        with (
            program(KV_CACHE, "decode", server.address, "a prompt", "--count", "5") as one,
            program(KV_CACHE, "decode", server.address, "another, which is longer", "--count", "5") as other,
            program(KV_CACHE, "decode", server.address, LONG, "--count", "2") as waits,
        ):
            assert await lines(one, 40) == [f"layer {layer}: 1 blocks" for layer in range(8)] * 5
            assert await lines(other, 40) == [f"layer {layer}: 2 blocks" for layer in range(8)] * 5
            assert await lines(waits, 16) == [f"layer {layer}: 20 blocks" for layer in range(8)] * 2
            for each in (one, other, waits):
                assert await each.end() == (0, "")
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == (0, "")


async def test_a_killed_decoder_gives_its_blocks_back() -> None:
    with program(KV_CACHE, "prefill", "--blocks", BLOCKS) as server:
        await server.wait_address()
        for _ in range(3):
            with program(KV_CACHE, "decode", server.address, LONG, "--count", "1000") as killed:
                await lines(killed, 11)
                killed.process.kill()
                await killed.end()
        with program(KV_CACHE, "decode", server.address, LONG) as decoder:
            assert await lines(decoder, 8) == [f"layer {layer}: 20 blocks" for layer in range(8)]
            assert await decoder.end() == (0, "")
        server.process.send_signal(signal.SIGTERM)
        assert (await server.end())[0] == 0


async def test_a_killed_prefill_ends_its_decoders() -> None:
    with program(KV_CACHE, "prefill", "--blocks", BLOCKS) as server:
        await server.wait_address()
        with program(KV_CACHE, "decode", server.address, LONG, "--count", "1000") as decoder:
            await lines(decoder, 11)
            server.process.kill()
            status, errors = await decoder.end()
            assert status == 1
            assert_complaint(errors, Path("kv_cache"))


async def test_a_prompt_that_is_too_long() -> None:
    with program(KV_CACHE, "prefill", "--blocks", BLOCKS) as server:
        await server.wait_address()
        with program(KV_CACHE, "decode", server.address, LONG + "x" * 16) as decoder:
            status, errors = await decoder.end()
            assert status == 1
            assert_complaint(errors, Path("kv_cache"), "too long for the pool")
        server.process.send_signal(signal.SIGINT)
        assert await server.end() == (0, "")
