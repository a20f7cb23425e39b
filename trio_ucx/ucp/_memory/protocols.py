"""What a type checker asks of an object that can be sent or received into. Nothing is checked at run time by these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class SupportsBuffer(Protocol):
    """The buffer protocol: ``collections.abc.Buffer``, which is new in Python 3.12."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsWritableBuffer(SupportsBuffer, Protocol):
    """The buffer protocol, and elements that can be assigned: so not ``bytes``."""

    def __setitem__(self, key: Any, value: Any, /) -> None: ...


class SupportsCudaArray(Protocol):
    """``__cuda_array_interface__``."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]: ...


class SupportsDLPack(Protocol):
    """DLPack. Type checkers take numpy's arrays for this: numpy shows them ``__buffer__`` from Python 3.12 on only."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
