"""What UCX does over RDMA only, by a fake between UCX and the library. (``tools/lab`` emulates RDMA itself.)"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import trio
from end_to_end import c_programs
from helpers import echo, serving

BEGIN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD), #name))
"""

#: As over rc_verbs, where they follow a header of one byte.
ODD_HANDLES = """
uintptr_t ucp_tag_probe_nb(void *worker, uint64_t tag, uint64_t mask, int remove, void *info)
{
    uintptr_t message = REAL(ucp_tag_probe_nb)(worker, tag, mask, remove, info);

    return message != 0 && remove ? message | 1 : message;
}

void *ucp_tag_msg_recv_nbx(void *worker, void *buffer, size_t count, uintptr_t message, const void *param)
{
    return REAL(ucp_tag_msg_recv_nbx)(worker, buffer, count, message & ~(uintptr_t)1, param);
}
"""

#: As with InfiniBand's completion queues, on a machine that has them: the descriptor of the process's only worker
#: announces what happens after arming, and nothing that came before, which there always is: arming takes a while.
LATE_EVENTS = """
static int events;

int access(const char *path, int mode)
{
    return strcmp(path, "/dev/infiniband") == 0 ? 0 : faccessat(AT_FDCWD, path, mode, 0);
}

int ucp_worker_get_efd(void *worker, int *fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    int status = REAL(ucp_worker_get_efd)(worker, fd);

    events = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(events, EPOLL_CTL_ADD, *fd, &event);
    *fd = events;
    return status;
}

int ucp_worker_arm(void *worker)
{
    struct epoll_event event;
    int status;

    usleep(5000);
    status = REAL(ucp_worker_arm)(worker);
    epoll_wait(events, &event, 1, 0);
    return status;
}
"""

#: As UCX's registration cache: a registration is forgotten if UCX has heard that the memory is unmapped, and has looked
#: (ucp_mem_map does), when its last use ends.
REGISTRATION_CACHE = """
#include <stdio.h>
#include <ucp/api/ucp.h>

static char *announced, *forgotten;

void ucm_vm_munmap(void *address, size_t length)
{
    announced = length == 300000 ? address : NULL;
}

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memory)
{
    forgotten = announced;
    return REAL(ucp_mem_map)(context, params, memory);
}

ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memory)
{
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};

    REAL(ucp_mem_query)(memory, &attributes);
    if (attributes.length >= 300000) {
        puts(attributes.address == forgotten ? "forgotten" : "kept");
        fflush(stdout);
    }
    return REAL(ucp_mem_unmap)(context, memory);
}
"""

CLOSES_MEMORY = """
from trio_ucx import ucp

with ucp.open_context({"TLS": "tcp,self"}, features=ucp.DEFAULT_FEATURES | ucp.Feature.RMA) as context:
    context.register(bytearray(300_000)).close()
"""

#: Sends to an echo at the port given, without polling. Prints how many wake-ups were lost.
PROGRAM = """
import sys, trio, trio_ucx
from trio_ucx import ucp

async def main():
    async with ucp.open_worker(config={"TLS": "tcp", "KEEPALIVE_INTERVAL": "inf"}, spin=0) as worker:
        async with trio_ucx.connect(("127.0.0.1", int(sys.argv[1])), worker=worker) as connection:
            for number in range(5):
                for size in 8, 5000, 70_000, 3_000_000:
                    data = bytes([number]) * size
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(connection.send, data)
                        assert await connection.receive() == data
            for size in 5000, 3_000_000:  # and these are thrown away
                await connection.send(bytes(size))
            await connection.ping()
        print(worker.statistics().missed_events)

trio.run(main)
"""


async def run_with(fake: str, folder: Path, *command: str) -> str:
    """Runs a program with the fake; returns what it prints."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (folder / "fake.c").write_text(BEGIN + fake)
    includes = [flag for flag in c_programs.flags() if flag.startswith("-I")]
    compile_it = ["cc", "-shared", "-fPIC", *includes, "-o", "fake.so", "fake.c", "-ldl"]
    await trio.run_process(compile_it, cwd=folder)
    preloaded = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(folder / "fake.so")]))
    with trio.fail_after(150):
        done = await trio.run_process(
            [sys.executable, "-c", *command], env={**os.environ, "LD_PRELOAD": preloaded}, capture_stdout=True
        )
    return str(done.stdout, "ascii")


async def echo_through(fake: str, folder: Path) -> int:
    """Runs PROGRAM with the fake; returns how many wake-ups were lost."""
    async with serving(echo) as listener:
        return int(await run_with(fake, folder, PROGRAM, str(listener.address[1])))


async def test_odd_handles(tmp_path: Path) -> None:
    await echo_through(ODD_HANDLES, tmp_path)


async def test_arming_that_loses_events(tmp_path: Path) -> None:
    assert await echo_through(LATE_EVENTS, tmp_path) == 0


async def test_no_registration_outlives_its_memory(tmp_path: Path) -> None:
    assert await run_with(REGISTRATION_CACHE, tmp_path, CLOSES_MEMORY) == "forgotten\n"
