"""C code of ours that the suite does not reach otherwise, or not often enough, compiled into programs of its own."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import google_crc32c
import pytest

import trio_ucx

from .c_programs import compiled

NATIVE = Path(trio_ucx.__file__).parent / "_native"
OPTIONS = ["-O2", "-pthread", f"-I{NATIVE}", "-DTU_EXTENSIONS=TU_EXTENSION(rma) TU_EXTENSION(chain)", '-DTU_UCX=""']

#: Prints the checksum of its input, computed without the processor's instruction.
CHECKSUM = """
#include <stdio.h>
#include <string.h>
#include "chain/chain.h"
#undef __x86_64__
#include "chain/crc32c.c"

int main(void)
{
    static char input[65536];
    size_t length = fread(input, 1, sizeof(input), stdin);

    printf("%u", tu_crc32c(input, length));
    return 0;
}
"""

#: A thread writes integers of which all bytes are equal, and the other one gets them, until it has seen many changes.
#: Prints how many were torn.
INTEGERS = """
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "rma/transfer.h"

static _Alignas(8) char shared[8];
static volatile int over;

static void *write_them(void *bytes)
{
    for (int value = 0; !over; value ^= 0xff) {
        uint64_t all = 0x0101010101010101u * (unsigned)value;

        switch (*(size_t *)bytes) {
        case 2: __atomic_store_n((uint16_t *)shared, (uint16_t)all, __ATOMIC_RELEASE); break;
        case 4: __atomic_store_n((uint32_t *)shared, (uint32_t)all, __ATOMIC_RELEASE); break;
        default: __atomic_store_n((uint64_t *)shared, all, __ATOMIC_RELEASE);
        }
    }
    return NULL;
}

int main(void)
{
    int torn = 0;

    for (size_t bytes = 2; bytes <= 8; bytes *= 2) {
        pthread_t thread;
        char got[8], last = 0;

        over = 0;
        memset(shared, 0, sizeof(shared));
        pthread_create(&thread, NULL, write_them, &bytes);
        for (int i = 0, changes = 0; i < 50000000 && changes < 100000; i++) {
            tu_mapped_copy(false, got, shared, bytes);
            for (size_t k = 1; k < bytes; k++) torn += got[k] != got[0];
            changes += got[0] != last;
            last = got[0];
        }
        over = 1;
        pthread_join(thread, NULL);
    }
    printf("%d", torn);
    return 0;
}
"""


def program(tmp_path: Path, text: str, *options: str | Path) -> Path:
    source = tmp_path / "program.c"
    source.write_text(text)
    return compiled(source, tmp_path, *OPTIONS, *map(str, options))


def test_checksums_without_the_instruction(tmp_path: Path, chance: random.Random) -> None:
    """What processors use that have no instruction for them."""
    built = program(tmp_path, CHECKSUM)
    for length in (0, 1, 9, 255, 65536):
        data = chance.randbytes(length)
        done = subprocess.run([built], input=data, capture_output=True, timeout=60)
        assert int(done.stdout) == google_crc32c.value(data)


def test_checksums_share_nothing_that_changes(tmp_path: Path) -> None:
    """Threads compute them without a lock: what they share is constant."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    built = program(tmp_path, CHECKSUM, "-c", "-Dmain=unused")
    symbols = subprocess.run(["nm", built], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "tu_crc32c" in symbols
    assert [line for line in symbols.splitlines() if line.split()[-2] in "bBdD" and "input" not in line] == []


def test_integers_are_not_torn(tmp_path: Path) -> None:
    """By gets of mapped memory, while another thread writes them."""
    built = program(tmp_path, INTEGERS, NATIVE / "rma" / "mapped.c")
    done = subprocess.run([built], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0")
