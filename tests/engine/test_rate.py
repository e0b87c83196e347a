"""How quickly an engine computes."""

from __future__ import annotations

import pytest

from engine.loop import Rate


def test_a_rate_weighs_long_steps_more_and_forgets() -> None:
    rate = Rate()
    assert rate.per_s == 0
    rate.add(1000, 0.1)
    rate.add(1, 0.001)
    assert rate.per_s == pytest.approx(9911, rel=0.01)
    for _ in range(100):
        rate.add(1000, 1.0)
    assert rate.per_s == pytest.approx(1000, rel=0.02)
