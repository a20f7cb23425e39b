"""Random bytes, and a corpus of those that reached new code, through each target of ``fuzz_targets.py``.

``python tools/fuzz.py`` looks for more, guided by coverage. ``corpus/TARGET.found`` has the inputs by which it found a
fault, since mended.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    inputs = (CORPUS / name).read_text().split()
    assert inputs
    found = CORPUS / f"{name}.found"
    if found.exists():
        inputs += found.read_text().split()
    for line in inputs:
        TARGETS[name](bytes.fromhex(line))


@pytest.mark.parametrize("name", TARGETS)
@settings(settings.get_profile("model"), max_examples=300)
@given(data=st.binary(max_size=400))
def test_random_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)
