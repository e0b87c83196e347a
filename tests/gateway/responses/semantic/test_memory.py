"""Memory of questions that are kept is not more than they are counted as."""

from __future__ import annotations

import hashlib
import random
import string
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from gateway.config import SemanticCacheSettings
from gateway.responses.semantic.questions import KEPT_ANSWER_CHARS, AnsweredQuestion
from gateway.responses.semantic.space import Space
from gateway.responses.semantic.spaces import Spaces
from tests.fakes.meanings import Kitchen, Meanings

ENTRIES = 24
SPACE_BYTES = 64 << 10
"""Of a space by itself: what it has learned."""


def words(seed: int, count: int, length: int) -> str:
    dice = random.Random(seed)
    return " ".join("".join(dice.choices(string.ascii_lowercase, k=length)) for _ in range(count))


TEXTS: dict[str, Callable[[int], str]] = {
    "short": lambda at: f"How do I reset device {at}?",
    "words of two letters": lambda at: words(at, 1300, 2),
    "names": lambda at: "x " + words(at, 1000, 3).title(),
    "numbers": lambda at: " ".join(str(at + number) for number in range(700)),
    "units": lambda at: " ".join(f"{at + number} km" for number in range(600)),
    "quotes": lambda at: " ".join(f'"{at}{number}"' for number in range(500)),
    "roles": lambda at: " ".join(f"for {word}" for word in words(at, 500, 3).split()),
    "emoji": lambda at: "\U0001f600" * 3_900 + str(at),
}


def entry(at: int, text: str, *, own_scope: bool) -> AnsweredQuestion:
    vector = np.random.default_rng(at).normal(size=384)
    names = [hashlib.sha256(f"{name}{at}".encode()).digest() for name in ("key", "group", "digest")]
    scope = hashlib.sha256(f"scope{at if own_scope else 0}".encode()).digest()
    written = (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
    answer = "\U0001f600" + "a" * (KEPT_ANSWER_CHARS - 1)
    return AnsweredQuestion(names[0], scope, names[1], text, written, f"{answer[:-9]}{at:09d}", names[2], 0.0, 1e12)


@pytest.mark.parametrize("own_scope", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_a_question_takes_no_more_memory_than_it_is_counted_as(name: str, own_scope: bool) -> None:
    space = Space(SemanticCacheSettings(), random=lambda: 0.5, now=lambda: 0.0)
    space.remember(entry(10**6, TEXTS[name](10**6), own_scope=own_scope))  # what is made once is there
    counted = space.bytes
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for at in range(ENTRIES):
            assert space.remember(entry(at, TEXTS[name](at), own_scope=own_scope))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(space) == ENTRIES + 1
    assert taken <= space.bytes - counted


async def test_all_questions_together_take_no_more_memory_than_is_set() -> None:
    settings = SemanticCacheSettings(mode="on", max_memory_bytes=2 << 20)
    kitchen = Kitchen(meanings=Meanings({}), settings=settings)
    spaces: Spaces = kitchen.semantic._spaces
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for at in range(120):
            space = spaces.open(f"tenant{at % 5}", f"model{at % 4}", "encoder").space
            spaces.remember(space, entry(at, words(at, 1000, 3), own_scope=True))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert sum(space.evicted for space in spaces) > 0
    assert sum(space.bytes for space in spaces) <= settings.max_memory_bytes
    assert taken <= settings.max_memory_bytes + 20 * SPACE_BYTES
