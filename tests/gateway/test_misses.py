"""The list of misses that one change would have saved: rows whose causes are known, and how much work it is."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, get_args

import pytest

from gateway.explain import misses
from gateway.explain.causes import ADVICE, Cause, View, likeness
from gateway.explain.misses import CAUSES, find_misses
from gateway.explain.parts import MAX_PARTS, parts_of, rows_of
from gateway.types import ChatPrompt
from tests.gateway.test_explain import DIGESTS, pair, words

OF_EACH = 12


def row(number: str, prompt: ChatPrompt, **more: Any) -> dict[str, Any]:
    tokens, cached = more.get("num_tokens", 800), more.get("cached_tokens", 0)
    return {
        "row": number,
        "id": number,
        "at_s": 0.0,
        "model": "m",
        "tenant": "t",
        "scope": "s",
        "engine": "e-1",
        "hit": "prefix" if cached else "miss",
        "prompt_tokens": tokens,
        **more,
        "cached_tokens": cached,
        "segments": rows_of(parts_of(prompt, DIGESTS), tokens, cached),
    }


def test_misses_of_known_causes_are_found_among_all_others() -> None:
    dice = random.Random(5)
    causes: list[Cause] = [cause for cause in get_args(Cause) if cause in ADVICE or cause == "same"] * OF_EACH
    dice.shuffle(causes)
    earlier, later = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, cause in enumerate(causes):
        one, other, before, now = pair(cause, dice)
        earlier.append(row(f"{cause}-{number}-a", one, **before))
        later.append(row(f"{cause}-{number}-b", other, **now))
    dice.shuffle(later)
    found = find_misses([*later, *earlier])
    assert found.keys() == {"t"}
    assert {one.cause: one.requests for one in found["t"]} == dict.fromkeys(CAUSES, OF_EACH)
    for one in found["t"]:
        first, second = one.example
        assert (first[:-2], first[-1], second[-1]) == (second[:-2], "a", "b")
        assert first.startswith(one.cause)
        assert one.tokens["m"] > OF_EACH * one.most / 10
        assert one.advice == ADVICE[one.cause]
    tokens = [sum(one.tokens.values()) for one in found["t"]]
    assert tokens == sorted(tokens, reverse=True)


def test_tenants_are_told_nothing_of_each_other() -> None:
    dice = random.Random(6)
    one, other, _, _ = pair("volatile", dice)
    assert find_misses([row("b", other, tenant="u"), row("a", one)]) == {}
    both = [row("d", other, tenant="u"), row("c", one, tenant="u"), row("b", other), row("a", one)]
    assert {tenant: found[0].example for tenant, found in find_misses(both).items()} == {
        "t": ("a", "b"),
        "u": ("c", "d"),
    }


def test_what_nobody_could_save_is_no_miss() -> None:
    dice = random.Random(7)
    one, other, _, _ = pair("volatile", dice)
    assert find_misses([]) == {}
    assert find_misses([row("b", other, hit="exact"), row("a", one)]) == {}  # it was not computed
    assert find_misses([row("b", other, cached_tokens=790), row("a", one)]) == {}  # the end of a prompt
    assert find_misses([row("b", other) | {"segments": []}, row("a", one)]) == {}  # nothing is known of it
    assert find_misses([row("b", one), row("a", other)])["t"][0].requests == 1


def test_what_wanted_nothing_of_a_cache_missed_nothing_and_left_nothing() -> None:
    one, _, _, _ = pair("evicted", random.Random(9))
    uncached = {"hit": "bypass", "uncached": True}
    assert find_misses([row("b", one), row("a", one)])["t"][0].cause == "evicted"
    for newer, older in ((uncached, {}), ({}, uncached)):
        assert find_misses([row("b", one, **newer), row("a", one, **older)]) == {}


def test_each_request_is_compared_with_a_few_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Counter[View]()

    def counted(before: View, now: View) -> tuple[int, int, int, int]:
        compared[now._replace(parts=())] += 1
        return likeness(before, now)

    monkeypatch.setattr(misses, "likeness", counted)
    dice = random.Random(8)
    system = words(dice, 50)
    turns = [{"role": "user", "content": words(dice, 5)} for _ in range(MAX_PARTS)]
    rows = [
        row(str(n), ChatPrompt([{"role": "system", "content": f"{n} {system}"}, *turns]), num_tokens=800 + n)
        for n in range(200)
    ]
    (found,) = find_misses(rows)["t"]
    assert (found.cause, found.requests) == ("volatile", 199)
    assert max(compared.values()) <= 6
