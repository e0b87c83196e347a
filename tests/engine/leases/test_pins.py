"""What is worth least, asked many times at one moment and at many moments."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.leases.pins import Ranking


class Wares:
    """Things with a worth of their own, and how often they were sorted."""

    def __init__(self, worth: dict[str, float]) -> None:
        self.worth = worth
        self.sorted = 0
        self.ranking = Ranking(self.items, self.value)

    def items(self) -> list[str]:
        self.sorted += 1
        return list(self.worth)

    def value(self, item: str, now: float) -> tuple[float, int] | None:
        return (self.worth[item] - now, 0) if item in self.worth else None


def test_questions_about_one_moment_sort_once() -> None:
    wares = Wares({"a": 3.0, "b": 1.0, "c": 2.0})
    found = []
    while len(wares.worth) > 1:
        item = wares.ranking.find_least(5.0, beside="c")
        assert item is not None
        found.append(item)
        del wares.worth[item]
    assert (found, wares.sorted) == (["b", "a"], 1)
    assert wares.ranking.find_least(5.0, beside="c") is None
    assert wares.ranking.find_least(5.0) == "c"


def test_what_is_worth_something_else_meanwhile_is_passed_over() -> None:
    wares = Wares({"a": 3.0, "b": 1.0})
    assert wares.ranking.find_least(0.0) == "b"
    wares.worth["b"] = 9.0
    assert wares.ranking.find_least(0.0) == "a"
    del wares.worth["a"]
    assert wares.ranking.find_least(0.0) == "b"
    assert wares.ranking.find_least(1.0) == "b"


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_at_a_new_moment_the_answer_is_the_least_of_all(rng: random.Random) -> None:
    wares = Wares({})
    for moment in range(30):
        for _ in range(rng.randint(0, 3)):
            wares.worth[rng.choice("abcdef")] = float(rng.randrange(1000))
        if rng.random() < 0.3:
            wares.worth.pop(rng.choice("abcdef"), None)
        found = wares.ranking.find_least(float(moment))
        assert (wares.worth[found] if found else None) == min(wares.worth.values(), default=None)
