from __future__ import annotations

import random

import pytest

from gateway.admin.accounting import LEAST, MODELS, PrefillTimes


def test_the_fixed_part_of_a_request_is_not_put_on_its_tokens() -> None:
    """80 ms on the way, 0.1 ms for each token."""
    times, chance = PrefillTimes(), random.Random(1)
    for _ in range(200):
        tokens = chance.choice([4, 20, 900, 5000])
        times.note("m", tokens, 80 + 0.1 * tokens + chance.gauss(0, 3))
    assert times.ms_per_token("m") == pytest.approx(0.1, rel=0.05)


def test_nothing_is_said_of_few_requests_or_of_prompts_that_are_all_alike() -> None:
    times = PrefillTimes()
    for number in range(100):
        assert times.ms_per_token("m") == 0
        times.note("m", 500, 50 + number % 3)
    for number in range(int(LEAST)):
        assert times.ms_per_token("n") == 0
        times.note("n", number, number)


def test_what_got_quicker_is_believed_after_a_while() -> None:
    times = PrefillTimes()
    for rate in (1.0, 0.1):
        for number in range(1000):
            times.note("m", number % 10 * 100, number % 10 * 100 * rate)
    assert times.ms_per_token("m") == pytest.approx(0.1, rel=0.01)


def test_a_slope_is_never_negative_nor_more_than_the_whole_time() -> None:
    times = PrefillTimes()
    for number in range(100):
        times.note("down", number, 1000 - number)
        times.note("steep", number + 50, max(0, number - 50))
    assert times.ms_per_token("down") == 0
    assert 0 < times.ms_per_token("steep") < 0.3


def test_models_that_are_long_gone_are_forgotten() -> None:
    times = PrefillTimes()
    for name in ("old", *map(str, range(MODELS))):
        for number in range(20):
            times.note(name, number, number)
    assert times.ms_per_token("old") == 0
    assert times.ms_per_token("0") == pytest.approx(1)
