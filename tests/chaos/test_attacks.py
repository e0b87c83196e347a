"""A short form of the attacks. How long the event loop stood still is measured by the gateway itself, in time that it
ran, and compared with what this machine takes to parse one large body: neither other work on the machine nor its speed
counts."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import orjson
import pytest

from gateway.admin.tallies import BOUNDS_S
from tests.chaos.attack_bodies import MOST
from tests.chaos.attacks import KINDS, NAMED, QUIET, fuzzed, run

GOAL_MS = 50.0
PARSES = 4.0
"""Times that one large text could have been parsed while the loop stood still: bodies at once press on the memory."""
PEAK_MIB = 800.0


def parse_ms() -> float:
    """Of the largest body with one text."""
    body, took_ms = b'"' + b"lorem ipsum " * (MOST // 12) + b'"', []
    for _ in range(7):
        begun_s = time.process_time()
        orjson.loads(body)
        took_ms.append((time.process_time() - begun_s) * 1e3)
    return statistics.median(took_ms)


@pytest.mark.slow
def test_no_request_of_one_tenant_stops_the_others() -> None:
    lines: list[str] = []
    found = run(NAMED | fuzzed(None, seed=2), Path(__file__).parent.parent.parent, 60.0, lines.append)
    most_ms = max(GOAL_MS, PARSES * parse_ms())
    found.pop(QUIET)
    assert len(found) == len(NAMED) + len(KINDS)
    assert len(KINDS) >= 50
    table = f"at most {most_ms:.0f} ms\n" + "\n".join(lines)
    for name, seen in found.items():
        assert not seen.died, f"{name}\n{table}"
        assert not any(status == 0 or status == 500 for status in seen.statuses), f"{name}\n{table}"
        assert seen.own_ms is not None, f"{name}\n{table}"
        assert seen.own_ms <= _end_of_bucket(most_ms), f"{name}\n{table}"
        assert seen.peak_mib <= PEAK_MIB, f"{name}\n{table}"


def _end_of_bucket(milliseconds: float) -> float:
    return min(end_s * 1e3 for end_s in BOUNDS_S if end_s * 1e3 >= milliseconds)
