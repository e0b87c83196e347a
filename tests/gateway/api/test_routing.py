"""The order of an alias's targets, policy by policy, and what a choice goes by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.api.facts import facts_of
from gateway.api.routing import EXPLORED_SHARE, Facts, State, choose_order, ranked
from gateway.api.tenants import IMAGE_TOKENS
from gateway.config import AliasSettings, PriceSettings, Settings, TargetSettings

MODELS = ("a", "b", "c")


def alias(policy: str, *targets: Any, **options: Any) -> AliasSettings:
    return AliasSettings(name="best", targets=targets or MODELS, policy=policy, **options)  # type: ignore[arg-type]


def states(*models: str, **known: State) -> dict[str, State]:
    return dict.fromkeys(models or MODELS, State()) | known


def key(number: int) -> Facts:
    return Facts(key=number.to_bytes(8, "little"))


def test_the_order_of_the_settings_holds_but_for_targets_that_are_down() -> None:
    assert choose_order(alias("first"), Facts(), states()) == (MODELS, "first")
    down = State(up=False)
    assert choose_order(alias("first"), Facts(), states(a=down)) == (("b", "c", "a"), "down")
    assert choose_order(alias("first"), Facts(), states(b=down)) == (("a", "c", "b"), "first")
    everything = dict.fromkeys(MODELS, down)
    assert choose_order(alias("first"), Facts(), everything) == (MODELS, "first")


def test_the_cheapest_comes_first_and_what_has_no_price_last() -> None:
    costs = states(a=State(cost=None), b=State(cost=7), c=State(cost=5))
    assert choose_order(alias("cheapest"), Facts(), costs) == (("c", "b", "a"), "cheapest")
    assert choose_order(alias("cheapest"), Facts(), states()) == (MODELS, "unpriced")


def test_the_fastest_comes_first_and_an_unknown_one_for_a_small_share() -> None:
    times = states(a=State(first_token_ms=30), b=State(first_token_ms=10))
    assert choose_order(alias("fastest"), Facts(), states()) == (MODELS, "unmeasured")
    assert choose_order(alias("fastest"), Facts(), times, draw=0.5) == (("b", "a", "c"), "fastest")
    draws = [number / 10_000 for number in range(10_000)]
    explored = [choose_order(alias("fastest"), Facts(), times, draw=draw).models[0] for draw in draws]
    assert explored.count("c") / len(draws) == pytest.approx(EXPLORED_SHARE, abs=1e-3)
    times["c"] = State(up=False)
    assert choose_order(alias("fastest"), Facts(), times, draw=0.0) == (("b", "a", "c"), "fastest")


def test_each_target_gets_its_share_of_the_conversations() -> None:
    targets = [{"model": "a", "weight": 1}, {"model": "b", "weight": 2}, {"model": "c", "weight": 5}]
    one = alias("weighted", *targets)
    firsts = [choose_order(one, key(number), states()).models[0] for number in range(8_000)]
    for target in one.targets:
        assert firsts.count(target.model) / 8_000 == pytest.approx(target.weight / 8, abs=0.02)
    assert firsts == [choose_order(one, key(number), states(), draw=0.1).models[0] for number in range(8_000)]
    without = [choose_order(one, Facts(), states(), draw=number / 8_000).models[0] for number in range(8_000)]
    assert without.count("c") / 8_000 == pytest.approx(5 / 8, abs=0.02)


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=8), st.data())
def test_only_the_conversations_of_a_target_that_went_move(models: set[str], data: st.DataObject) -> None:
    targets = [TargetSettings(model=model, weight=data.draw(st.floats(0.1, 10))) for model in sorted(models)]
    gone = data.draw(st.sampled_from(targets))
    left = [target for target in targets if target is not gone]
    for number in range(50):
        before = ranked(targets, key(number).key)
        assert ranked(left, key(number).key) == tuple(model for model in before if model != gone.model)
        one = AliasSettings(name="\0best", targets=tuple(targets), policy="affinity")
        down = {target.model: State(up=target is not gone) for target in targets}
        moved = choose_order(one, key(number), down)
        assert moved.models[0] == next(model for model in before if model != gone.model)
        assert moved.reason == ("down" if before[0] == gone.model else "affinity")


def test_a_conversation_that_went_elsewhere_stays_while_that_is_up() -> None:
    one = alias("affinity")
    first, second, third = choose_order(one, key(1), states()).models
    assert choose_order(one, key(1), states(), sticky=second) == ((second, first, third), "sticky")
    down = states(**{second: State(up=False)})
    assert choose_order(one, key(1), down, sticky=second) == ((first, third, second), "affinity")


def test_the_first_target_that_a_request_fits_gets_it() -> None:
    small = {"model": "a", "max_prompt_tokens": 100, "tools": False}
    one = alias("size", small, {"model": "b", "images": False}, {"model": "c", "max_prompt_tokens": 1000})
    for facts, models, reason in (
        (Facts(100), MODELS, "fits"),
        (Facts(101), ("b", "c"), "fits"),
        (Facts(1, has_tools=True), ("b", "c"), "fits"),
        (Facts(1, has_images=True), ("a", "c"), "fits"),
        (Facts(101, has_images=True), ("c",), "fits"),
        (Facts(1001, has_images=True), ("c",), "none_fits"),
    ):
        assert choose_order(one, facts, states()) == (models, reason)


# -- what a choice goes by --------------------------------------------------------------------------------------------

TOOL = {"name": "f", "parameters": {"type": "object"}}


def bodies(*turns: str, marked: int = -1) -> list[dict[str, Any]]:
    """The same conversation in four dialects, with a mark for caching at one of its turns where there are any."""
    roles = ["assistant" if number % 2 else "user" for number in range(len(turns))]
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    blocks: list[Any] = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    if marked >= 0:
        blocks[marked]["content"][0] |= mark
    system = [{"type": "text", "text": "Be brief.", **(mark if marked >= 0 else {})}]
    return [
        {"messages": [{"role": "system", "content": "Be brief."}, *messages], "tools": [{"function": TOOL}]},
        {"instructions": "Be brief.", "input": messages, "tools": [TOOL]},
        {"system": system, "messages": blocks, "tools": [{**TOOL, **(mark if marked >= 0 else {})}]},
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [{"role": one["role"], "parts": [{"text": one["content"]}]} for one in messages],
        },
    ]


def test_a_conversation_keeps_its_key_as_it_grows_and_others_have_another() -> None:
    grown_ones = bodies("Hi", "Ho", "Go on", marked=2)
    for one, grown, other in zip(bodies("Hi", marked=0), grown_ones, bodies("Hello"), strict=True):
        first = facts_of(one, 100, "t").key
        assert first
        assert facts_of(grown, 900, "t").key == first
        assert facts_of(other, 100, "t").key != first
        assert facts_of(one, 100, "u").key != first
    assert (
        facts_of({"prompt_cache_key": "k", "input": "a"}, 9, "t").key
        == facts_of({"prompt_cache_key": "k", "input": "b"}, 9, "t").key
    )
    assert facts_of({}, 9, "t").key == b""
    one, other = (
        {"system": [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}], "messages": ["Hi"]}
        for number in range(2)
    )
    assert facts_of(one, 9, "t").key == facts_of(other, 9, "t").key


def test_size_tools_and_images_are_seen_in_every_dialect() -> None:
    for body in bodies("Hi")[:3]:
        assert facts_of(body, 400, "t")[:4] == (100, 256, True, False)
    data = "A" * 4000
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "input_image", "image_url": data},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"data": data}}]},
    ]
    for part in parts:
        facts = facts_of({"messages": [{"role": "user", "content": [part]}], "max_tokens": 9}, 4400, "t")
        assert facts.has_images
        assert IMAGE_TOKENS <= facts.prompt_tokens <= IMAGE_TOKENS + 100
        assert facts.completion_tokens == 9
    content = {"parts": [{"inlineData": {"mimeType": "image/png", "data": data}}]}
    facts = facts_of({"contents": [content], "generationConfig": {"maxOutputTokens": 7}}, 4400, "t")
    assert (facts.has_images, facts.completion_tokens) == (True, 7)
    odd = {"messages": {"a": 1}, "tools": 7, "generationConfig": [], "max_tokens": "x"}
    assert facts_of(odd, 40, "t").prompt_tokens == 10


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"target": "a", "targets": ["b"]}, "exclude each other"),
        ({}, "needs a `target`"),
        ({"targets": []}, "needs a `target`"),
        ({"targets": ["a", "best"]}, "names itself"),
        ({"target": "best"}, "names itself"),
        ({"targets": ["a", "a"]}, "there twice"),
        ({"targets": ["a"], "policy": "random"}, "'first', 'cheapest'"),
        ({"target": "a", "policy": "fastest"}, "is for `targets`"),
        ({"targets": ["a", {"model": "b", "weight": 0}], "policy": "weighted"}, "greater than 0"),
        ({"targets": ["a", {"model": "b", "weight": 2}]}, "`weight` is for"),
        ({"targets": ["a", "b"], "checks": ["schema"]}, "are for the policy `cascade`"),
        ({"targets": ["a", "b"], "policy": "cascade"}, "needs `checks`"),
        ({"targets": ["a"], "policy": "cascade", "checks": ["schema"]}, "needs two"),
        ({"targets": ["a", "b"], "policy": "cascade", "checks": ["wisdom"]}, "'schema', 'refusal' or 'logprob'"),
        ({"targets": ["a", "b"], "policy": "cascade", "checks": ["logprob"]}, "need each other"),
        ({"targets": ["a", "b"], "policy": "size"}, "needs a target with"),
        ({"targets": ["a", "b"], "sticky_s": 9}, "is for the policy `affinity`"),
    ],
)
def test_what_is_no_alias_is_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AliasSettings.model_validate({"name": "best", **table})


def test_prices_of_two_currencies_are_not_compared() -> None:
    prices = [PriceSettings(model="a", input=1), PriceSettings(model="b*", currency="EUR", input=1)]  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"prices in EUR, USD"):
        Settings(aliases=(alias("cheapest", "a", "b1"),), prices=tuple(prices))
    Settings(aliases=(alias("cheapest", "a", "c"),), prices=tuple(prices))
