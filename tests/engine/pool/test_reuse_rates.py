"""Hazards and scores against a slow twin of their formulas, and what is watched against a full count."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pool.reuse_rates import AGES_S, NUM_AGES, PARENT_WEIGHT, UNSEEN_HAZARD, Lifetimes, ReuseRates, age_bin

TREE = [2, 2, 3, -1]  # two classes, their parent, the root


def slow_score(hazards: list[float], age: int) -> float:
    """max over H of P(reused within H | age) / E[min(time to reuse, H)], bin by bin, from the middle of a bin with all
    of its hazard ahead."""
    widths = [AGES_S[i + 1] - AGES_S[i] for i in range(NUM_AGES - 1)] + [AGES_S[-1]]
    best = 0.0
    for horizon in range(age + 1, NUM_AGES + 1):
        unused, waited = 1.0, 0.0
        for i in range(age, horizon):
            width = widths[i] / 2 if i == age else widths[i]
            left = unused * (1 - hazards[i])
            waited += width * (unused + left) / 2
            unused = left
        best = max(best, (1 - unused) / waited)
    return best


events = st.lists(st.tuples(st.integers(0, 1), st.integers(0, NUM_AGES - 1), st.booleans()), max_size=200)


@given(events)
@settings(deadline=None, max_examples=50)
def test_scores_are_those_of_the_formula(lifetimes: list[tuple[int, int, bool]]) -> None:
    rates = ReuseRates(TREE)
    entered = [[0] * NUM_AGES for _ in range(2)]
    reused = [[0] * NUM_AGES for _ in range(2)]
    for number, last, again in lifetimes:
        for age in range(last + 1):
            rates.entered(number, age)
            entered[number][age] += 1
        if again:
            rates.reused(number, last)
            reused[number][last] += 1
    for _ in range(5000):  # each call brings one class up to date
        rates.settle()
    for number in range(2):
        hazards = [UNSEEN_HAZARD] * NUM_AGES
        for seen, hit in (
            *[([a + b for a, b in zip(*entered, strict=True)], [a + b for a, b in zip(*reused, strict=True)])] * 2,
            (entered[number], reused[number]),
        ):
            hazards = [
                (hit[age] + PARENT_WEIGHT * hazards[age]) / (seen[age] + PARENT_WEIGHT) for age in range(NUM_AGES)
            ]
        assert rates.hazards(number) == pytest.approx(hazards)
        rates._refresh(number)
        for age in range(NUM_AGES):
            assert rates.score(number, AGES_S[age]) == pytest.approx(slow_score(hazards, age))
        between = (AGES_S[3] + AGES_S[4]) / 2
        assert rates.score(number, between) == pytest.approx((slow_score(hazards, 3) + slow_score(hazards, 4)) / 2)


def test_without_evidence_older_blocks_score_lower() -> None:
    rates = ReuseRates(TREE)
    scores = [rates.score(0, age_s) for age_s in AGES_S[1:]]
    assert scores == sorted(scores, reverse=True)


def test_scores_follow_a_change_of_habits() -> None:
    rates = ReuseRates(TREE)

    def live(again: bool) -> None:
        for _ in range(200_000):
            rates.entered(0, 0)
            if again:
                rates.reused(0, 0)
            else:
                rates.entered(0, 1)
            rates.settle()

    live(True)
    before = rates.score(0, 0.0)
    live(False)
    assert rates.score(0, 0.0) < before / 3


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_lifetimes_count_what_a_full_count_does(rng: random.Random) -> None:
    """The twin keeps every lifetime and counts the bins that each reached, and the bin in which it ended."""
    rates, now, twin = ReuseRates([-1]), 0.0, list[tuple[float, float | None]]()
    lifetimes = Lifetimes(rates, max_records=1000)
    running: dict[bytes, float] = {}
    digests = [rng.randbytes(16) for _ in range(20)]
    for _ in range(200):
        now += rng.choice((0.0, 0.5, 3.0, 100.0, 3000.0))
        lifetimes.advance(now)
        digest = rng.choice(digests)
        record = lifetimes.watch(digest)
        assert record is not None
        if digest in running:
            lifetimes.end(record, now)
            lifetimes.end(record, now)  # nothing runs: nothing happens
            twin.append((running.pop(digest), now))
        else:
            lifetimes.begin(record, 0, now)
            running[digest] = now
    twin += [(since, None) for since in running.values()]
    entered, reused = [0.0] * NUM_AGES, [0.0] * NUM_AGES
    for since, ended in twin:
        last = age_bin((now if ended is None else ended) - since)
        for age in range(last + 1):
            entered[age] += 1
        if ended is not None:
            reused[last] += 1
    assert rates._entered[0] == entered
    assert rates._reused[0] == reused


def test_records_are_bounded_and_sampled_evenly() -> None:
    lifetimes, rng = Lifetimes(ReuseRates([-1]), max_records=256), random.Random(0)
    watched = 0
    for number in range(20_000):
        lifetimes.advance(number * 0.01)
        record = lifetimes.watch(rng.randbytes(16))
        if record is not None:
            lifetimes.begin(record, 0, number * 0.01)
            watched += number >= 19_000
        assert len(lifetimes) <= 256
    assert 0 < watched < 100  # about one in 128 by now: 200 seconds of the two hours that are to be remembered
    waiting = sum(cohort.alive for queue in lifetimes._aging for cohort in queue)
    assert waiting <= 256


def test_a_record_outlives_its_block() -> None:
    lifetimes = Lifetimes(ReuseRates([-1]))
    record = lifetimes.watch(b"\x01" * 16)
    assert record is not None
    lifetimes.begin(record, 0, 1.0)
    assert lifetimes.watch(b"\x01" * 16) is record is lifetimes.find(b"\x01" * 16)
