"""Every operation is cancelled at every point, one attempt for each, and the same objects go on.

Asserted of each attempt: the cancellation returns promptly; a cancelled receive has lost no message; a cancelled send
was whole or not at all; what follows arrives, in order; buffers are released. Asserted of each scenario: nothing is
left of it.
"""

from __future__ import annotations

import pytest
from timing import Noise

from .cancellation_points import Sweep, attempt, nothing_is_left
from .cancelled_scenarios import SCENARIOS

#: More points than any operation has.
MOST = 1000


@pytest.mark.sample(25)
@pytest.mark.parametrize("spin", [None, 0.0], ids=["polls", "parks"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_cancelled_at_every_point(name: str, transports: str, spin: float | None) -> None:
    sweep = Sweep()
    async with nothing_is_left():
        async with SCENARIOS[name](transports, spin) as begin:
            with Noise() as noise:
                await attempt(begin, 0, MOST, noise, Sweep())  # it is not cancelled
                for at in range(MOST):
                    if await attempt(begin, at + 1, at, noise, sweep) <= at:
                        break  # it ended before that point
                else:
                    pytest.fail("there are points without end")
    assert sweep.cancelled or name.startswith("cancelled_request")
    print(f"{sweep.attempts} attempts, {sweep.cancelled} cancelled, at most {sweep.slowest * 1000:.1f} ms")
