"""What the compiled module offers for request chains, for the type checker: the Python side of ``chain/cdef.h``."""

from __future__ import annotations

from typing import Protocol, cast

from ..._native import ffi as ffi
from ..._native import lib as _lib
from ..._native._types import CData, EndpointHandle, Lib, WorkerHandle


class ChainLib(Lib, Protocol):
    TU_TERM_CONSTANT: int
    TU_TERM_LOAD: int
    TU_TERM_OFFSET: int
    TU_TERM_CRC32C: int
    TU_TERM_SAME: int
    TU_TERM_LOCAL: int
    TU_TERM_ADD: int
    TU_TERM_SUBTRACT: int
    TU_TERM_MULTIPLY: int
    TU_TERM_AND: int
    TU_TERM_OR: int
    TU_TERM_XOR: int
    TU_TERM_LEFT: int
    TU_TERM_RIGHT: int
    TU_TERM_RIGHT_UNSIGNED: int
    TU_TERM_EQUAL: int
    TU_TERM_NOT_EQUAL: int
    TU_TERM_LESS: int
    TU_TERM_LESS_EQUAL: int
    TU_TERM_LESS_UNSIGNED: int
    TU_TERM_LESS_EQUAL_UNSIGNED: int
    TU_TERM_NOT: int
    TU_TERM_DEPTH: int
    TU_LOAD_SIGNED: int
    TU_LOAD_BIG: int
    TU_CHAIN_CHECK: int
    TU_CHAIN_GET: int
    TU_CHAIN_PUT: int
    TU_CHAIN_ATOMIC: int
    TU_CHAIN_TAG_SEND: int
    TU_CHAIN_AM_SEND: int
    TU_CHAIN_FOLLOW: int
    TU_FALSE_ERROR: int
    TU_FALSE_SKIP: int
    TU_FALSE_STOP: int
    TU_CHAIN_WAITING: int
    TU_CHAIN_POSTED: int
    TU_CHAIN_DONE: int
    TU_CHAIN_NO_VALUE: int
    TU_CHAIN_SKIPPED: int
    TU_CHAIN_FALSE: int
    TU_CHAIN_NOT_EVALUATED: int
    TU_CHAIN_OUT_OF_BOUNDS: int
    TU_CHAIN_NO_RESULT: int
    TU_CHAIN_FAILED: int
    TU_CHAIN_CANCELLED: int
    TU_PART_MEMORY: int
    TU_PART_RESULT: int
    TU_PART_INTEGER: int

    def tu_chain_create(self, worker: WorkerHandle, out: CData, /) -> int: ...
    def tu_chain_free(self, chain: CData, /) -> None: ...
    def tu_chain_target(self, chain: CData, address: int, length: int, /) -> int: ...
    def tu_chain_bind(
        self, chain: CData, target: int, endpoint: EndpointHandle | CData, rkey: CData, path: CData, /
    ) -> None: ...
    def tu_chain_forget(self, chain: CData, target: int, /) -> None: ...
    def tu_chain_add(self, chain: CData, request: CData, /) -> int: ...
    def tu_chain_busy(self, chain: CData, /) -> bool: ...
    def tu_chain_report(self, chain: CData, request: int, out: CData, /) -> None: ...
    def tu_chain_errors(self, chain: CData, /) -> int: ...
    def tu_chain_values(self, chain: CData, count: int, lengths: CData, results: CData, /) -> int: ...
    def tu_chain_reports(self, chain: CData, count: int, out: CData, results: CData, failed: CData, /) -> int: ...
    def tu_chain_restart(self, chain: CData, state: int, /) -> None: ...
    def tu_chain_memory(self, chain: CData, /) -> int: ...
    def tu_chain_timer(self, worker: WorkerHandle, fd: int, /) -> None: ...
    def tu_chain_run(self, chain: CData, /) -> int: ...
    def tu_chain_cancel(self, chain: CData, /) -> None: ...


lib = cast(ChainLib, _lib)
