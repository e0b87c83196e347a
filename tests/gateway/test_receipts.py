"""When an index is not believed any more."""

from __future__ import annotations

import random

import pytest

from gateway.receipts import HALF_LIFE_S, MAX_ENGINES, WINDOW, Receipts
from tests.fakes.clock import Clock


class Noted:
    """Receipts of one engine, and how often it was distrusted."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.distrusted: list[str] = []
        self.receipts = Receipts(self.distrusted.append, self.clock)

    def note(self, predicted: int, cached: int, incarnation: str = "i", predicted_s: float | None = None) -> None:
        self.receipts.note("e", incarnation, predicted, cached, self.clock() if predicted_s is None else predicted_s)


def test_a_cache_that_was_cleared_without_notice_is_found_within_eleven_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted = Noted()
    for _ in range(1000):
        noted.note(160, 160)
    for _ in range(10):
        noted.note(160, 0)
    assert noted.distrusted == []
    noted.note(160, 0)
    assert noted.distrusted == ["i"]
    assert noted.receipts.of("e")["distrusted"] == 1
    (line,) = caplog.messages
    assert line.startswith(
        "index of engine e dropped (1 times so far): of 100 prompts whose prefix it should hold, 11% "
    )
    assert "cleared without notice" in line


def test_an_engine_that_never_reuses_anything_is_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted()
    for _ in range(60):  # a minute of 11 requests a second
        for _ in range(11):
            noted.note(160, 0)
        noted.clock.now_s += 1.0
    assert len(noted.distrusted) == noted.receipts.of("e")["distrusted"] == 60
    for _ in range(11):
        noted.note(160, 0)
    first, second = caplog.messages
    assert "(1 times so far)" in first
    assert "(61 times so far)" in second
    assert all("its prefix caching is off, or it does not count cached tokens" in line for line in (first, second))
    noted.receipts.note("f", "j", 160, 16, noted.clock())
    for _ in range(11):
        noted.receipts.note("f", "j", 160, 0, noted.clock())
    assert caplog.messages[-1].startswith("index of engine f dropped (1 times")  # engines have a minute each
    assert "prefix caching is off" not in caplog.messages[-1]


def test_an_index_of_which_a_fifth_is_stale_is_found_within_a_window() -> None:
    noted, dice = Noted(), random.Random(1)
    for _ in range(WINDOW):
        noted.note(1600, 1600 if dice.random() > 0.2 else 0)
    assert noted.distrusted == ["i"]


def test_evictions_on_the_way_are_no_reason_however_long_the_prompts() -> None:
    noted, dice = Noted(), random.Random(2)
    for _ in range(20_000):
        predicted = dice.choice([160, 320, 160_000])
        noted.note(predicted, predicted if dice.random() > 0.02 else 0)
    assert noted.distrusted == []
    assert noted.receipts.of("e")["over_tokens"] > 0


def test_more_reuse_than_predicted_and_prompts_without_a_prediction_say_nothing() -> None:
    noted = Noted()
    for _ in range(3 * WINDOW):
        noted.note(0, 160)
        noted.note(16, 160)
    assert noted.distrusted == []


def test_what_the_dropped_index_predicted_is_not_held_against_the_new_one() -> None:
    noted = Noted()
    before = noted.clock()
    for _ in range(11):
        noted.note(160, 0)
    noted.clock.now_s += 1.0
    noted.note(160, 160)
    for _ in range(50):
        noted.note(160, 0, predicted_s=before - 1)  # requests that were in flight
    assert noted.distrusted == ["i"]
    for _ in range(11):
        noted.note(160, 0)
    assert noted.distrusted == ["i", "i"]


def test_a_new_incarnation_begins_anew_and_the_figures_of_its_name_go_on() -> None:
    noted = Noted()
    for _ in range(10):
        noted.note(160, 0)
    noted.note(160, 0, incarnation="j")
    assert noted.distrusted == []
    assert noted.receipts.of("e") == {
        "receipts": 11,
        "exact": 0,
        "predicted_tokens": 1760,
        "cached_tokens": 0,
        "error_tokens": 1760,
        "over_tokens": 1760,
        "distrusted": 0,
        "recent_tokens": 0.0,
    }


def test_tokens_reused_lately_count_half_after_every_half_life_and_not_beyond_a_restart() -> None:
    noted = Noted()
    noted.note(160, 160)
    noted.clock.now_s += HALF_LIFE_S
    assert noted.receipts.of("e")["recent_tokens"] == 80
    noted.note(160, 100)
    assert noted.receipts.of("e")["recent_tokens"] == 180
    noted.note(160, 16, incarnation="j")
    assert noted.receipts.of("e")["recent_tokens"] == 16


def test_so_many_engines_are_remembered() -> None:
    receipts = Receipts()
    for number in range(MAX_ENGINES + 1):
        receipts.note(f"e{number}", f"i{number}", 16, 16, 0.0)
    assert receipts.of("e0") == {}
    assert receipts.of(f"e{MAX_ENGINES}")["receipts"] == 1
