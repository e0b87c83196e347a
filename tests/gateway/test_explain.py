"""Why a request missed: pairs of prompts whose cause is known, with their texts and by digests alone."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.explain.causes import ADVICE, HOSTED_STEP, Cause, Eviction, View, equal_parts, explain
from gateway.explain.parts import MAX_PARTS, Digests, ends_of, parts_of, rows_of, scope_of, shape_of
from gateway.types import ChatPrompt, Marker, TextPrompt, Tool

DIGESTS = Digests(b"secret")
PAIRS_OF_EACH = 14


def words(dice: random.Random, count: int) -> str:
    return " ".join("".join(dice.choices(string.ascii_lowercase, k=dice.randint(3, 9))) for _ in range(count))


def prompt(dice: random.Random, *, tools: int = 3, turns: int = 4) -> ChatPrompt:
    messages = [{"role": "system", "content": words(dice, 80)}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": words(dice, 20)} for n in range(turns - 1)]
    own = tuple(Tool(f"{words(dice, 1)}_{n}", words(dice, 5), {"type": "object"}) for n in range(tools))
    return ChatPrompt(messages, tools=own)


def view(one: ChatPrompt, texts: bool, **more: Any) -> View:
    given = {"model": "m", "tenant": "t", "scope": "s", "num_tokens": 800, "engine": "e-1", **more}
    return View(parts=parts_of(one, DIGESTS, texts=texts), **given)


def with_message(one: ChatPrompt, number: int, content: str) -> ChatPrompt:
    messages = [dict(message) for message in one.messages]
    messages[number]["content"] = content
    return replace(one, messages=messages)


VOLATILE: list[Callable[[random.Random], str]] = [
    lambda dice: (
        f"2026-{dice.randint(10, 12)}-{dice.randint(10, 28)}T{dice.randint(10, 23)}:{dice.randint(10, 59)}:00Z"
    ),
    lambda dice: f"{dice.randint(10, 23)}:{dice.randint(10, 59)}",
    lambda dice: f"November {dice.randint(10, 28)}, 2026",
    lambda dice: str(uuid.UUID(int=dice.getrandbits(128))),
    lambda dice: f"req_{dice.randint(10**6, 10**7 - 1)}k",
    lambda dice: str(dice.randint(10**6, 10**7 - 1)),
]


def pair(cause: Cause, dice: random.Random) -> tuple[ChatPrompt, ChatPrompt, dict[str, Any], dict[str, Any]]:
    """Two prompts, the earlier one first, and what else is known of each."""
    one = prompt(dice)
    other, before, now = one, dict[str, Any](), dict[str, Any]()
    match cause:
        case "volatile":
            text, made = one.messages[0]["content"], dice.choice(VOLATILE)
            one, other = (with_message(one, 0, f"Now: {made(dice)}. {text}") for _ in range(2))
        case "tools_order":
            tools = list(one.tools)
            while tools == list(one.tools):
                dice.shuffle(tools)
            other = replace(one, tools=tuple(tools))
        case "tools_changed":
            kept = list(one.tools)
            kept[dice.randrange(3)] = Tool("another", words(dice, 4))
            other = replace(one, tools=tuple(dice.choice((kept, list(one.tools[:-1])))))
        case "moved":
            system, *rest = one.messages
            other = replace(one, messages=[*rest[:2], system, *rest[2:]])
        case "marked_changes":
            one, other = (with_message(one, 1, words(dice, 30)) for _ in range(2))
            one, other = (replace(some, markers=(Marker(1, 5, 300.0),)) for some in (one, other))
        case "changed":
            number = dice.choice((1, 2))
            other = with_message(one, number, one.messages[number]["content"] + " " + words(dice, 3))
        case "new_question":
            one, other = (with_message(one, 3, words(dice, 12)) for _ in range(2))
        case "too_short":
            one = ChatPrompt([{"role": "user", "content": "hi"}])
            other, before, now = one, {"num_tokens": 9}, {"num_tokens": 9, "cached_tokens": 0}
        case "bypass":
            now = {"uncached": True, "cached_tokens": 0}
        case "other_model" | "other_tenant" | "other_scope":
            before = {cause.removeprefix("other_"): "another"}
        case "other_engine":
            before, now = {"engine": "e-2"}, {"cached_tokens": dice.randint(0, 700)}
        case "evicted":
            now = {"cached_tokens": dice.randint(0, 700)}
        case "never_seen":
            other = replace(prompt(dice), tools=())
            one = replace(one, tools=())
        case "same":
            other = replace(one, messages=[*one.messages, {"role": "user", "content": words(dice, 9)}])
            now = {"cached_tokens": 800 - dice.randint(0, 20), "num_tokens": 900}
    return one, other, before, now


@pytest.mark.parametrize("texts", [True, False], ids=["pasted", "digests"])
@pytest.mark.parametrize("cause", [*ADVICE, "same"])
def test_a_known_cause_is_told(cause: Cause, texts: bool) -> None:
    """More than 200 pairs, with their texts and without."""
    dice = random.Random(f"{cause} {texts}")
    for _ in range(PAIRS_OF_EACH):
        one, other, before, now = pair(cause, dice)
        verdict = explain(view(one, texts, **before), view(other, texts, **now), 800)
        assert verdict.cause == cause, verdict
        assert (verdict.advice is None) == (cause in ("same", "new_question"))


def test_what_cannot_be_known_is_unknown() -> None:
    known = view(prompt(random.Random(1)), texts=False)
    for one, other in ((known, known._replace(parts=())), (known._replace(parts=()), known)):
        assert explain(one, other, 0).cause == "unknown"


@pytest.mark.parametrize(
    ("behind", "cached", "cause"),
    [
        pytest.param("an edit", 100, "unknown", id="differs behind them"),
        pytest.param("an edit", 790, "same", id="all was read"),
        pytest.param("", 100, "evicted", id="equal to the end"),
    ],
)
def test_what_is_behind_the_parts_that_are_kept_is_known_to_be_equal_or_unknown(
    behind: str, cached: int, cause: Cause
) -> None:
    dice = random.Random(11)
    one = prompt(dice, tools=0, turns=MAX_PARTS + 40)
    other = with_message(one, MAX_PARTS + 9, behind) if behind else one
    verdict = explain(view(one, False), view(other, False, cached_tokens=cached), 800)
    assert (verdict.cause, f"first {MAX_PARTS} parts" in verdict.text) == (cause, cause == "unknown")


@pytest.mark.parametrize(
    ("evicted", "says"),
    [
        (None, "when, and for whom, is not known"),
        (Eviction(50.0, "south", "req_2"), "when, and for whom, is not known"),  # before the other one came
        (Eviction(150.0, "", ""), "at 00:02:30 UTC on 1970-01-01; for whom is not known"),
        (Eviction(150.0, "south", "req_2"), "at 00:02:30 UTC on 1970-01-01 to the request req_2 of south"),
    ],
)
def test_of_an_eviction_no_more_is_told_than_is_known(evicted: Eviction | None, says: str) -> None:
    one = view(prompt(random.Random(13)), False, began_s=100.0, cached_tokens=0)
    verdict = explain(one, one._replace(began_s=200.0, evicted=evicted), 800)
    assert (verdict.cause, says in verdict.text) == ("evicted", True), verdict


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
BODIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "openai": (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "tools": [TOOL]},
        ["tools look", "system system", "messages user"],
    ),
    "responses": (
        {"instructions": "s", "input": [{"role": "user", "content": "u"}, {"type": "function_call", "name": "f"}]},
        ["system system", "messages user", "messages function_call"],
    ),
    "responses of a text": ({"input": "u"}, ["prompt prompt"]),
    "anthropic": (
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}],
            "tools": [{"name": "look", "input_schema": {}}],
        },
        ["tools look", "system system", "messages user"],
    ),
    "gemini": (
        {"systemInstruction": {"parts": [{"text": "s"}]}, "contents": [{"role": "user", "parts": [{"text": "u"}]}]},
        ["system system", "messages user"],
    ),
    "odd": (
        {
            "tools": {"a": 1},
            "system": 7,
            "messages": [None, 10**30, "\ud800", {"role": ["x"], "content": {"a": 10**30}}],
        },
        ["system system", "messages user", "messages user", "messages user", "messages ['x']"],
    ),
    "nothing": ({"messages": 5, "contents": {}, "tools": None}, []),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_any_dialect_has_parts(name: str) -> None:
    body, expected = BODIES[name]
    parts = parts_of(body, DIGESTS)
    assert [f"{part.section} {part.role}" for part in parts] == expected
    assert rows_of(parts, 100, 10) is not None
    assert [part.marked for part in parts] == [name == "anthropic" and part.section == "system" for part in parts]
    assert len({part.digest for part in parts}) == len(parts)


def test_a_mark_that_moves_changes_no_part_of_a_body() -> None:
    block = {"type": "text", "text": "u"}
    plain, marked = [
        parts_of({"messages": [{"role": "user", "content": [one]}]}, DIGESTS)
        for one in (block, block | {"cache_control": {"type": "ephemeral"}})
    ]
    assert equal_parts(plain, marked) == 1
    assert marked[0].marked
    assert (scope_of({"prompt_cache_key": "k"}), scope_of({"prompt_cache_key": 3}), scope_of(None)) == ("k", "", "")


def test_what_an_upstream_keeps_is_not_told() -> None:
    one = prompt(random.Random(12))
    seen = {"num_tokens": 5000, "engine": "up-1", "hosted": True, "block_size": HOSTED_STEP}
    before = view(one, False, **seen)
    for tokens, cached, cause in ((5000, 0, "unknown"), (5000, 4864, "same"), (900, 0, "too_short")):
        now = view(one, False, **seen | {"num_tokens": tokens}, cached_tokens=cached)
        assert explain(before, now, tokens).cause == cause


def test_the_first_character_that_differs_is_told() -> None:
    one = prompt(random.Random(2), tools=0)
    text = one.messages[0]["content"]
    other = with_message(one, 0, text[:100] + "X" + text[101:])
    verdict = explain(view(one, True), view(other, True), 0)
    assert (verdict.cause, verdict.part, verdict.char) == ("changed", 0, 100)


def test_digests_of_other_gateways_secrets_say_nothing() -> None:
    one = prompt(random.Random(3))
    mine, theirs = (parts_of(one, Digests(key)) for key in (b"a", b"b"))
    assert equal_parts(mine, theirs) == 0
    assert all(part.text is None for part in mine)


def test_parts_are_bounded_and_tokens_are_shared_out() -> None:
    many = ChatPrompt([{"role": "user", "content": "word " * 10} for _ in range(500)])
    parts = parts_of(many, DIGESTS)
    assert [part.section for part in parts[MAX_PARTS - 1 :]] == ["messages", "rest"]
    assert (len(parts), parts[-1].message, parts[-1].chars) == (MAX_PARTS + 1, MAX_PARTS, 50 * (500 - MAX_PARTS))
    rows = rows_of(parts, 1000, 333)
    assert ends_of(parts, 1000)[-1] == sum(row["tokens"] for row in rows) == 1000
    assert sum(row["cached_tokens"] for row in rows) == 333
    assert "word" not in str(rows)
    assert [part.section for part in parts_of(TextPrompt("once"), DIGESTS)] == ["prompt"]


def test_a_shape_leaves_out_what_changes_by_itself_and_nothing_else() -> None:
    assert shape_of("at 12:30 on 2026-11-24, a Tuesday") == shape_of("at 09:01 on 2025-01-02, a Friday")
    for one, other in (("be brief", "be short"), ("a Mayor", "a Major"), ("x" * 9000, "x" * 8999 + "y")):
        assert shape_of(one) != shape_of(other)
    middle = "word " * 1000
    assert shape_of(f"{middle} 1 {middle}") != shape_of(f"{middle} 2 {middle}")
