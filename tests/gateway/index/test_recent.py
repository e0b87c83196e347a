"""Blocks whose events are on their way."""

from __future__ import annotations

import pytest

from gateway.index import recent
from gateway.index.recent import RecentBlocks
from tests.fakes.clock import Clock

PROMPT = b"".join(bytes([number]) * 16 for number in range(1, 6))
OTHER = PROMPT[:32] + bytes([9]) * 48


def test_what_was_computed_follows_what_the_index_knows_until_its_events_are_due() -> None:
    clock = Clock()
    blocks = RecentBlocks(clock)
    blocks.add("a", PROMPT, 2)
    assert blocks.extend("a", PROMPT, 2) == 5
    assert blocks.extend("a", PROMPT, 4) == 5
    assert blocks.extend("a", PROMPT, 0) == 0  # what comes before was evicted
    assert blocks.extend("a", PROMPT[:48], 2) == 3
    assert blocks.extend("a", OTHER, 2) == blocks.extend("b", PROMPT, 2) == 2
    clock.now_s += recent.TTL_S
    assert blocks.extend("a", PROMPT, 2) == 2


def test_an_engine_that_is_lost_has_nothing_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    blocks = RecentBlocks(clock)
    blocks.add("a", PROMPT, 0)
    blocks.add("b", PROMPT, 0)
    blocks.drop("a")
    assert (blocks.extend("a", PROMPT, 0), blocks.extend("b", PROMPT, 0)) == (0, 5)
    monkeypatch.setattr(recent, "MAX_BLOCKS", 8)
    blocks.add("c", PROMPT, 0)
    assert blocks.extend("b", PROMPT, 0) == 0
