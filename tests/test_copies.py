"""Handles can be neither copied nor pickled, and an attempt has no effect on them."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import trio
from test_public_surface import MODULES

import trio_ucx
from trio_ucx import testing, ucp
from trio_ucx._util.handles import OpenedNotConstructed, refuse_copy
from trio_ucx.anyio import UCXListener, UCXStream

WAYS: list[Callable[[Any], object]] = [copy.copy, copy.deepcopy, pickle.dumps]


def check_refused(handle: object) -> None:
    for way in WAYS:
        with pytest.raises(TypeError, match=rf"{type(handle).__name__} cannot be copied or pickled: it stands for a"):
            way(handle)
    gc.collect()


async def test_handles_are_not_copied() -> None:
    with trio.fail_after(30):
        async with (
            ucp.open_worker(features=ucp.Feature.ALL) as worker,
            testing.open_connection_pair(worker=worker) as (client, server),
            await worker.open_endpoint(worker.address) as endpoint,
        ):
            [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
            memory = worker.context.allocate(64)
            remote = endpoint.attach(memory.descriptor)
            chain = worker.new_chain(capacity=4)
            chain.get(remote, offset=0, length=8)
            async with listener:
                handles = [client, client.channel(5), client.messages(), listener, trio_ucx.connect(listener.address)]
                handles += [UCXStream(client), UCXListener(listener)]
                handles += [worker, worker.context, endpoint, memory, remote, chain]
                for handle in handles:
                    check_refused(handle)
            assert (await chain.run()).values() == [bytes(8)]
            chain.close()
            remote.close()
            memory.close()
            await client.send(b"still")
            assert await server.receive() == b"still"


def test_all_classes_of_handles_refuse_copies() -> None:
    public = [getattr(module, name) for module in MODULES for name in module.__all__]
    handles = [one for one in public if inspect.isclass(one) and type(one) is OpenedNotConstructed]
    assert len(handles) > 15
    assert all(one.__reduce_ex__ is refuse_copy for one in handles)


async def test_records_are_copied() -> None:
    with trio.fail_after(30):
        async with ucp.open_worker() as worker, testing.open_connection_pair(worker=worker) as (client, _):
            for record in (trio_ucx.Backoff(), client.peer, client.statistics(), worker.address, worker.statistics()):
                assert copy.copy(record) == copy.deepcopy(record) == pickle.loads(pickle.dumps(record)) == record
