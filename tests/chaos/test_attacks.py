"""A short form of the attacks. The bounds have room for a noisy machine: before there were limits, half of these
stopped the event loop for 2 to 120 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.attacks import NAMED, QUIET, fuzzed, run

MORE_MS = 1000.0
PEAK_MIB = 1200.0
FUZZED = 15


@pytest.mark.slow
def test_no_request_of_one_tenant_stops_the_others() -> None:
    lines: list[str] = []
    found = run(NAMED | fuzzed(FUZZED, seed=2), Path(__file__).parent.parent.parent, 20.0, lines.append)
    quiet = found.pop(QUIET)
    assert len(found) == len(NAMED) + FUZZED
    table = "\n".join(lines)
    for name, seen in found.items():
        assert not seen.died, f"{name}\n{table}"
        assert not any(status == 0 or status == 500 for status in seen.statuses), f"{name}\n{table}"
        assert seen.stop_ms <= quiet.stop_ms + MORE_MS, f"{name}\n{table}"
        assert seen.peak_mib <= PEAK_MIB, f"{name}\n{table}"
