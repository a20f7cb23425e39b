"""Seconds of the soak: nothing is violated, and what is broken on purpose is noticed.

``tests/faults/soak.py`` runs for hours. What is asserted is what its checker says. It does not count the time in
which a process had no processor, so that a machine with few cores may run this beside other tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the soak prints its tables with rich")


from rich.console import Console

from faults import soak
from faults.load import broken, injector, summary


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another run with the same ``--seed`` has the same loads and faults."""
    value: int = request.config.option.seed
    return value


@pytest.mark.sample(1)
def test_no_violation(tmp_path: Path, transports: str, seed: int) -> None:
    plan = injector.Plan(tmp_path, seconds=7, seed=seed, transports=transports, clients=2, pause=1.5)
    violations, figures = soak.soak(plan)
    summary.show(Console(width=120), f"{transports}, seed {seed}", figures, violations)
    assert not violations, "\n".join(map(str, violations[:10]))
    assert figures.connections > 0
    assert figures.faults
    assert figures.operations["ping", "ok"] > 0
    assert figures.operations["aclose", "ok"] > 0


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", broken.KINDS)
def test_broken_library_is_noticed(tmp_path: Path, kind: str, seed: int) -> None:
    """A soak on a busy machine may have too little load to run into the fault: then there is another one."""
    expected = {"grant": {"stalled"}, "double": {"doubled"}, "wakeup": {"stalled", "slow ping", "never ended"}}
    kinds: set[str] = set()
    for attempt in range(3):
        plan = injector.Plan(
            tmp_path / str(attempt),
            seconds=6,
            seed=seed + attempt,
            transports="tcp",
            clients=2,
            faults=False,
            broken=kind,
            patience=4,
            ending=5,
        )
        plan.folder.mkdir()
        violations, figures = soak.soak(plan)
        assert figures.seconds < 20, "the soak has taken too long to find out"
        kinds = {violation.kind for violation in violations}
        if kinds & expected[kind]:
            return
    raise AssertionError(kinds)
