"""examples/rpc.py. (What calls do in detail is in tests/test_rpc.py.)"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import trio
from helpers import pattern, serving, until

from trio_ucx import rpc

from .programs import DEADLINE, EXAMPLES, load, program

RPC = EXAMPLES / "rpc.py"
example: Any = load(RPC)


@pytest.mark.both_transports
async def test_values_and_buffers(over: str) -> None:
    with trio.fail_after(DEADLINE), program(RPC, "serve") as server:
        await server.wait_address()
        async with rpc.connect(server.address) as client:
            assert await client.call("add", a=1, b=2) == 3
            assert await client.call("sleep", seconds=0) == "slept for 0.0 seconds"
            assert await client.call("echo", data={"ü": [None]}) == {"ü": [None]}
            for size in 0, 1000, 5_000_001:
                reply = await client.call("echo", buffers=[pattern(size)])
                assert bytes(reply.buffers[0]) == pattern(size)
                assert len((await client.call("noise", size=size)).buffers[0]) == size


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_server_dies(number: signal.Signals) -> None:
    lost: list[bool] = []

    async def expect_loss() -> None:
        with pytest.raises(rpc.CallLost) as caught:
            await client.call("sleep", seconds=100)
        lost.append(caught.value.may_have_run)

    with trio.fail_after(DEADLINE), program(RPC, "serve") as server:
        await server.wait_address()
        async with rpc.connect(server.address) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(expect_loss)
                assert await client.call("add", a=1, b=2) == 3
                assert lost == []
                server.process.send_signal(number)
        assert lost == [True] * 20
        assert await server.end() == (-number if number == signal.SIGKILL else 130, "")


class Waiting(rpc.Service):
    running = 0

    @rpc.method
    async def wait(self, call: rpc.Call) -> None:
        self.running += 1
        try:
            await trio.sleep_forever()
        finally:
            self.running -= 1


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_client_dies(number: signal.Signals) -> None:
    service = Waiting()
    with trio.fail_after(DEADLINE):
        async with serving(rpc.serving(service)) as listener:
            host, port = listener.address
            with program(RPC, "call", f"{host}:{port}", "wait") as client:
                await until(lambda: service.running == 1)
                client.process.send_signal(number)
                await until(lambda: service.running == 0)
                assert await client.end() == (-number if number == signal.SIGKILL else 130, "")


@pytest.mark.full
async def test_command_line() -> None:
    with trio.fail_after(DEADLINE):
        async with serving(rpc.serving(example.Demonstration())) as listener:
            host, port = listener.address
            for arguments, output, complaint in [
                (["echo", '{"data": {"ü": [null]}}'], '{"\\u00fc": [null]}\n', ""),
                (["add", '{"a": 1, "b": 2}'], "3\n", ""),
                (["add"], "", "rpc: add: Object missing required field `a`\n"),
                (["x\ny"], "", "rpc: the server has no method 'x\\ny'\n"),
                (["add", '{"timeout": "soon"}'], "", "rpc: timeout must be a number of seconds, not str\n"),
            ]:
                with program(RPC, "call", f"{host}:{port}", *arguments) as client:
                    assert await client.end() == (1 if complaint else 0, complaint)
                    assert client.output == output
            noise = partial(program, RPC, "call", f"{host}:{port}", "noise")
            with noise('{"size": -1}') as client:
                status, complaint = await client.end()
                assert status == 1 and complaint.startswith("rpc: ValueError: negative")
