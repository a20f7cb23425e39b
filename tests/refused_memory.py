"""Refuses memory to the C code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trio_ucx._native import lib


@contextmanager
def few_allocations(count: int = 0) -> Iterator[None]:
    """trio_ucx's C code, but not UCX, can allocate so many times."""
    lib.tu_test_refuse_memory(count)
    try:
        yield
    finally:
        lib.tu_test_refuse_memory(-1)
