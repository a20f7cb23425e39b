"""One of two processes that use raw endpoints, each order once: ``python tests/raw_side.py side ARGUMENTS``.

It says where it can be reached, hears where to open an endpoint to, obeys orders, and says what came of each. It also
says what came from the other one and wants no answer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import attrs
import trio
from helpers import pattern
from peers import REMOTE, ask, say, until_told

from trio_ucx import ucp

LARGEST = 2**20
TAG, QUESTION, ANSWER = 1, 1, 2


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


@attrs.define
class Side:
    worker: ucp.Worker
    stack: AsyncExitStack
    answers: ucp.ActiveMessages
    endpoint: ucp.Endpoint | None = None
    memory: ucp.RemoteMemory | None = None

    async def open(self, target: str | list[Any], mode: str, descriptor: str, by_ucx: bool) -> str:
        """Opens the endpoint.

        Args:
            target: a worker address or a socket address.
            by_ucx: reach the memory by UCX's own puts and gets.
        """
        address = ucp.WorkerAddress(bytes.fromhex(target)) if isinstance(target, str) else (target[0], target[1])
        try:
            self.endpoint = await self.worker.open_endpoint(address, error_mode=ucp.ErrorMode[mode])
        except OSError as error:
            return f"{error.errno}: {error}"
        self.stack.callback(self.endpoint.abort)
        found = ucp.MemoryDescriptor.from_bytes(bytes.fromhex(descriptor))
        if by_ucx:
            found = attrs.evolve(found, token=b"")
        self.memory = self.stack.enter_context(self.endpoint.attach(found))
        return "open"

    async def obey(self, order: str, argument: int) -> Any:
        endpoint, memory = self.endpoint, self.memory
        assert endpoint is not None and memory is not None
        if order == "transports":
            return [each.name for each in endpoint.transports]
        if order == "add":
            return await memory.fetch_add(argument)
        data = pattern(argument, argument)
        if order == "tag":
            await endpoint.tag_send(data, TAG)
        elif order == "am":
            await endpoint.am_send(QUESTION, data)
        elif order == "ask":
            await endpoint.am_send(QUESTION, data, reply=True)
            with await self.answers.receive() as message:
                return await message.receive() == data
        elif order == "put":
            await memory.put(data, 8)
            await memory.flush()
        elif order == "get":
            return await memory.get(8, argument) == data
        return True

    async def receive(self) -> None:
        buffer = bytearray(LARGEST)
        while True:
            length, _ = await self.worker.tag_receive(buffer, TAG)
            say(digest(buffer[:length]))

    async def answer(self, after: float) -> None:
        with self.worker.open_active_messages(QUESTION, max_bytes=2**24) as questions:
            async for question in questions:
                data = await question.receive()
                if question.reply_endpoint is None:
                    say(digest(data))
                    continue
                await trio.sleep(after)
                await question.reply_endpoint.am_send(ANSWER, data)

    async def accept(self, listener: ucp.RawListener) -> None:
        async for request in listener:
            self.stack.callback((await request.accept()).abort)


async def side(host: str | None, answers_after: float) -> None:
    """Runs one side.

    Args:
        host: where its listener listens; None: it has none.
        answers_after: how long it waits before it answers an active message, so that the other one sleeps.
    """
    async with AsyncExitStack() as stack:
        context = stack.enter_context(ucp.open_context(features=REMOTE))
        worker = await stack.enter_async_context(ucp.open_worker(context=context))
        worker.admit("0.0.0.0/0", "::/0")  # the other side is on another host, and may be the first to connect
        own = stack.enter_context(context.allocate(8 + LARGEST))
        own.memoryview[:8] = bytes(8)
        answers = stack.enter_context(worker.open_active_messages(ANSWER, max_bytes=2**24))
        said: dict[str, Any] = {"worker": bytes(worker.address).hex(), "descriptor": own.descriptor.hex()}
        async with trio.open_nursery() as nursery:
            one = Side(worker, stack, answers)
            nursery.start_soon(one.receive)
            nursery.start_soon(one.answer, answers_after)
            if host is not None:
                listener = await stack.enter_async_context(await worker.open_listener(host, 0))
                nursery.start_soon(one.accept, listener)
                said["socket"] = listener.address
            say(said)
            while (order := await ask())[0] != "end":
                say(await (one.open(*order[1:]) if order[0] == "open" else one.obey(*order)))
            say(worker.statistics().missed_events)
            await until_told()
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(side, *json.loads(sys.argv[2]))
