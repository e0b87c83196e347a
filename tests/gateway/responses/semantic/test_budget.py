"""The bound is kept on streams whose truth is known, whatever the evidence is worth there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from gateway.responses.semantic.budget import Budget, Evidence

BOUND = 0.02
Stream = Callable[[random.Random, int], tuple[Evidence, bool]]


def honest(rng: random.Random, _: int) -> tuple[Evidence, bool]:
    """Near questions are right."""
    similarity = rng.uniform(0.6, 1.0)
    return Evidence(similarity, rng.random(), rng.uniform(0.0, 0.4)), rng.random() < (similarity - 0.6) / 0.35


def trap(rng: random.Random, _: int) -> tuple[Evidence, bool]:
    """Everything is near, and nearly nothing is right."""
    return Evidence(rng.uniform(0.93, 1.0), rng.uniform(0.8, 1.0), 0.4), rng.random() < 0.1


def turning(rng: random.Random, number: int) -> tuple[Evidence, bool]:
    """Honest until somebody finds out what passes."""
    return honest(rng, number) if number < 2000 else trap(rng, number)


def backwards(rng: random.Random, _: int) -> tuple[Evidence, bool]:
    """The nearer, the likelier wrong."""
    similarity = rng.uniform(0.6, 1.0)
    return Evidence(similarity, rng.random(), 0.2), rng.random() > (similarity - 0.6) / 0.4


def played(stream: Stream, *, seed: int, requests: int = 4000) -> tuple[Budget, int, int, int]:
    """Hits, wrong ones and audits."""
    rng = random.Random(seed)
    budget = Budget(BOUND, audit_share=0.03, random=rng.random)
    hits = wrong = audits = 0
    for number in range(requests):
        budget.count()
        evidence, same = stream(rng, number)
        verdict = budget.decide(evidence)
        if not verdict.hit:
            budget.learn(evidence, same)
            continue
        budget.given()
        hits, wrong, audits = hits + 1, wrong + (not same), audits + verdict.audit
        if verdict.audit:
            budget.learn(evidence, same, weight=verdict.weight)
    return budget, hits, wrong, audits


@pytest.mark.parametrize("stream", [honest, trap, turning, backwards])
def test_wrong_hits_stay_under_the_bound_in_the_mean(stream: Stream) -> None:
    shares = [played(stream, seed=seed)[2] / 4000 for seed in range(5)]
    assert sum(shares) / len(shares) <= BOUND
    assert max(shares) <= 1.5 * BOUND


def test_questions_that_are_told_well_are_answered() -> None:
    _, hits, _, audits = played(honest, seed=1)
    assert hits > 400
    assert audits < 0.07 * 4000


def test_what_it_says_of_wrong_hits_is_what_they_are() -> None:
    budget, hits, wrong, audits = played(honest, seed=2)
    figures = budget.figures()
    assert (figures.requests, figures.hits, figures.audits) == (4000, hits, audits)
    assert figures.wrong_share_low <= wrong / hits <= figures.wrong_share_high
    assert figures.wrong_requests == pytest.approx(figures.wrong_share * hits / 4000)


def test_nothing_is_known_of_wrong_hits_before_the_first_audit() -> None:
    figures = Budget(BOUND, audit_share=0.03, random=lambda: 0.5).figures()
    assert (figures.wrong_share_low, figures.wrong_share_high) == (0.0, 1.0)


def test_a_budget_that_is_spent_answers_nothing_until_more_requests_came() -> None:
    budget = Budget(BOUND, audit_share=0.03, random=lambda: 0.0)
    sure = Evidence(0.999, 1.0, 0.49)
    for _ in range(100):
        budget.count()
    verdict = budget.decide(sure)
    assert verdict.hit
    assert verdict.audit
    budget.given()
    budget.learn(sure, False, weight=5.0)
    assert budget.closed
    assert not budget.decide(sure).hit
    for _ in range(300):
        budget.count()
    assert not budget.closed


def test_requests_that_the_exact_cache_answers_count_up_to_a_quarter_of_the_others() -> None:
    budget = Budget(BOUND, audit_share=0.03, random=lambda: 0.0)
    for _ in range(100):
        budget.count()
    for _ in range(1000):
        budget.count_exact()
    assert (budget.figures().requests, budget.figures().exact) == (125, 25)
    budget.decide(Evidence(0.999, 1.0, 0.49))
    budget.learn(Evidence(0.999, 1.0, 0.49), False, weight=1.9)
    assert not budget.closed  # of a hundred, it would be
    budget.learn(Evidence(0.999, 1.0, 0.49), False, weight=0.2)
    assert budget.closed


def test_whoever_starts_again_goes_on_where_it_was() -> None:
    budget, *_ = played(honest, seed=3, requests=1500)
    again = Budget(BOUND, audit_share=0.03, random=lambda: 1.0)
    again.restore(json.loads(json.dumps(budget.to_state())))
    assert again.figures().labels == budget.figures().labels
    assert again.figures().wrong_share == budget.figures().wrong_share
    for similarity in (0.7, 0.85, 0.95, 0.99):
        before, now = (one.decide(Evidence(similarity, 0.5, 0.2), counts=False) for one in (budget, again))
        assert (now.probability, now.hit) == (pytest.approx(before.probability, abs=0.01), before.hit)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"labels": [{}], "counts": [1, 0, 1, 1], "sums": [0, 0, 0]},
        {"labels": [], "counts": "x", "sums": []},
        {"labels": [{"request": 1, "row": [1], "same": True, "weight": 1}], "counts": [1, 0, 0, 0], "sums": [0, 0, 0]},
        {"labels": [], "counts": [1, 0, 0, 0], "sums": [float("nan"), 0, 0]},
    ],
)
def test_a_state_that_cannot_be_read_changes_nothing(state: dict[str, object]) -> None:
    budget, *_ = played(honest, seed=4, requests=300)
    before = budget.figures()
    with pytest.raises(ValueError, match="cannot be read"):
        budget.restore(state)
    assert budget.figures() == before
