"""Which breakpoints a chat asks for, by the rules of the API."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.openai.request import parse_chat
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Marker

MINUTE, HOUR = 60.0, 3600.0


def text(said: str, ttl: str | None = None, *, mark: bool = True) -> dict[str, Any]:
    point = {"mode": "explicit"} | ({} if ttl is None else {"ttl": ttl})
    return {"type": "text", "text": said} | ({"prompt_cache_breakpoint": point} if mark else {})


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts) if parts else "hello"}


def asked(*messages: dict[str, Any], leases: LeaseSettings | None = None, **fields: Any) -> tuple[Any, bool]:
    """Markers and use_cache."""
    body = {"model": "demo", "messages": list(messages), **fields}
    call = parse_chat(body, leases or LeaseSettings())
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.markers, call.use_cache


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt_cache_options": {}},
        {"prompt_cache_options": {"mode": "implicit"}},
        {"prompt_cache_options": None},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_key": "k"},
    ],
    ids=str,
)
def test_who_asks_for_nothing_gets_ordinary_reuse(fields: dict[str, Any]) -> None:
    assert asked(user(), **fields) == ((), True)


def test_a_breakpoint_is_right_after_its_part() -> None:
    parts = [text("ab", mark=False), text("cde", "12h"), text("f", mark=False)]
    assert asked(user(), user(*parts)) == ((Marker(1, 5, 12 * HOUR),), True)
    refusal = {"type": "refusal", "refusal": "no", "prompt_cache_breakpoint": {"mode": "explicit"}}
    said = {"role": "assistant", "content": [text("é漢", mark=False), refusal]}
    assert asked(said) == ((Marker(0, 4, 30 * MINUTE),), True)


def test_a_breakpoint_without_a_ttl_takes_the_requests_or_else_the_default() -> None:
    message = user(text("a"), text("b", "5m"))
    assert [marker.ttl_s for marker in asked(message)[0]] == [30 * MINUTE, 5 * MINUTE]
    options = {"mode": "explicit", "ttl": "1h"}
    assert [marker.ttl_s for marker in asked(message, prompt_cache_options=options)[0]] == [HOUR, 5 * MINUTE]
    leases = LeaseSettings(default_ttl="45s", ttls=("5m",))
    assert [marker.ttl_s for marker in asked(message, leases=leases)[0]] == [45.0, 5 * MINUTE]


@pytest.mark.parametrize(("mode", "kept"), [("explicit", [2, 3, 4, 5]), ("implicit", [3, 4, 5]), (None, [3, 4, 5])])
def test_of_many_breakpoints_the_latest_count(mode: str | None, kept: list[int]) -> None:
    markers, _ = asked(user(*[text("x") for _ in range(3)]), user(*[text("y") for _ in range(3)]), **with_options(mode))
    assert [3 * marker.message + marker.chars - 1 for marker in markers] == kept


def with_options(mode: str | None) -> dict[str, Any]:
    return {"prompt_cache_options": {"mode": mode}} if mode else {}


def test_explicit_mode_without_a_breakpoint_is_no_cache_at_all() -> None:
    for options in ({"mode": "explicit"}, {"mode": "explicit", "ttl": "30m"}):
        assert asked(user(text("a", mark=False)), prompt_cache_options=options) == ((), False)


SYSTEM, DEVELOPER = {"role": "system", "content": "sys"}, {"role": "developer", "content": "devel"}
SAID = {"role": "assistant", "content": "said"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": [text("re", mark=False), text("sult", mark=False)]}


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([SYSTEM, user()], (1, 5)),
        ([user(), SAID], (0, 5)),
        ([user(), CALLED, RESULT, RESULT], (3, 6)),
        ([user(), CALLED, RESULT, SAID], (2, 6)),
        ([SYSTEM, DEVELOPER, SAID], (1, 5)),
        ([SYSTEM, user(), SYSTEM], (1, 5)),
        ([{"role": "function", "name": "f", "content": None}], (0, 0)),
    ],
    ids=lambda value: str(value)[:70],
)
def test_the_implicit_breakpoint_is_at_the_end_of_the_latest_eligible_message(
    messages: list[dict[str, Any]], place: tuple[int, int]
) -> None:
    assert asked(*messages, prompt_cache_options={"ttl": "1h"}) == ((Marker(*place, HOUR),), True)


def test_without_an_eligible_message_there_is_no_implicit_breakpoint() -> None:
    assert asked(SAID, SYSTEM, prompt_cache_options={"ttl": "1h"}) == ((), True)


def test_an_implicit_breakpoint_comes_beside_the_latest_three() -> None:
    markers, _ = asked(user(*[text("x", "5m") for _ in range(5)]), prompt_cache_options={"ttl": "1h"})
    assert [(marker.chars, marker.ttl_s) for marker in markers] == [
        (3, 5 * MINUTE),
        (4, 5 * MINUTE),
        (5, 5 * MINUTE),
        (5, HOUR),
    ]


@pytest.mark.parametrize("ttl", ["60m", "3600s", "1h"])
def test_a_ttl_is_compared_by_its_length_and_not_by_its_spelling(ttl: str) -> None:
    assert asked(user(text("a", ttl)))[0][0].ttl_s == HOUR


@pytest.mark.parametrize(
    "ttl", ["2h", "24h", "0m", "-5m", "5", "m", "5 m", "5M", "5d", "٥m", "1e3s", "9" * 5000 + "s", ""]
)
def test_a_ttl_that_is_not_allowed_is_refused_with_those_that_are(ttl: str) -> None:
    for fields, path in (
        ({"prompt_cache_options": {"ttl": ttl}}, "prompt_cache_options.ttl"),
        (
            {"messages": [user(), user(text("a"), text("b", ttl))]},
            "messages[1].content[1].prompt_cache_breakpoint.ttl",
        ),
    ):
        with pytest.raises(BadRequestError, match="'5m', '30m', '1h', '12h'") as refused:
            asked(user(), **fields)
        assert (refused.value.param, refused.value.code) == (path, "invalid_value")
        assert len(refused.value.message) < 400


def test_even_a_breakpoint_that_does_not_count_has_to_be_right() -> None:
    with pytest.raises(BadRequestError):
        asked(user(text("a", "7m"), *[text("x") for _ in range(5)]))


@pytest.mark.parametrize(("mode", "only_leased"), [("explicit", True), ("implicit", False)])
def test_only_explicit_mode_is_told_of_leases_alone(mode: str, only_leased: bool) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt_cache_options": {"mode": mode}}
    assert parse_chat(body, LeaseSettings()).only_leased is only_leased
