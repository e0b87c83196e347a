"""Caching hints: where they go, and that they say nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.bodies import PrefixHistory, find_hint, usage_option
from tests.fakes.clock import Clock


def seen(most: int = 1000) -> PrefixHistory:
    return PrefixHistory(most, 300.0, Clock())


MARK = {"type": "ephemeral"}


def request_of(values: dict[str, Any], path: str, tenant: str = "t") -> UpstreamRequest:
    dialect = "anthropic" if path.startswith("/v1/messages") else "openai"
    return UpstreamRequest("r", Tenant(tenant), dialect, "m", path, "", (), b"", values, 0.0, 1.0)


def ask(
    memory: PrefixHistory,
    values: dict[str, Any],
    *,
    path: str = "/v1/messages",
    tenant: str = "t",
) -> Any:
    """The body that the upstream gets, parsed."""
    request = request_of(values, path, tenant)
    before = copy.deepcopy(values)
    told = {**values, **find_hint(request, memory)}
    assert request.values == before
    return told


def marks(body: Any, at: str = "") -> list[str]:
    """Paths of everything that is marked."""
    found = []
    if isinstance(body, dict):
        found += [at] if body.get("cache_control") is not None else []
        found += [path for name, value in body.items() for path in marks(value, f"{at}.{name}")]
    if isinstance(body, list):
        found += [path for number, value in enumerate(body) for path in marks(value, f"{at}[{number}]")]
    return found


def unmarked(body: Any) -> Any:
    """Without marks, and with a block of text as the string that it stands for."""
    if isinstance(body, dict):
        return {name: unmarked(value) for name, value in body.items() if name != "cache_control"}
    if isinstance(body, list):
        inner = [unmarked(value) for value in body]
        return inner[0]["text"] if len(inner) == 1 and isinstance(inner[0], dict) and "text" in inner[0] else inner
    return body


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


SYSTEM: dict[str, Any] = {"system": "You are a librarian.", "tools": [{"name": "find", "input_schema": {}}]}


def test_what_comes_for_the_first_time_is_not_marked() -> None:
    values = {**SYSTEM, "messages": turns("Hello.")}
    assert ask(seen(), values) == values


def test_the_longest_prefix_that_was_seen_before_is_marked_and_nothing_else_changes() -> None:
    memory = seen()
    ask(memory, {**SYSTEM, "messages": turns("Hello.")})
    values = {**SYSTEM, "messages": turns("Hello.", "Hi!", "A book?")}
    told = ask(memory, values)
    assert marks(told) == [".messages[0].content[0]"]
    assert unmarked(told) == unmarked(values)
    told = ask(memory, {**SYSTEM, "messages": turns("Hello.", "Hi!", "A book?", "Which?", "Any.")})
    assert marks(told) == [".messages[2].content[0]"]


def test_requests_that_share_the_system_prompt_alone_have_that_marked() -> None:
    memory = seen()
    ask(memory, {**SYSTEM, "messages": turns("One.")})
    assert marks(ask(memory, {**SYSTEM, "messages": turns("Two.")})) == [".system[0]"]
    ask(memory, {"tools": SYSTEM["tools"], "messages": turns("One.")})
    assert marks(ask(memory, {"tools": SYSTEM["tools"], "messages": turns("Two.")})) == [".tools[0]"]


def test_a_string_and_its_block_are_the_same_text() -> None:
    memory = seen()
    ask(memory, {"messages": turns("Hello.")})
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "More."}]}]
    assert marks(ask(memory, {"messages": blocks})) == [".messages[0].content[0]"]


def test_another_tenants_prefixes_are_nobodys() -> None:
    memory = seen()
    values = {**SYSTEM, "messages": turns("Hello.")}
    ask(memory, values, tenant="t")
    assert marks(ask(memory, values, tenant="u")) == []
    assert marks(ask(memory, values, tenant="t")) == [".messages[0].content[0]"]


def test_a_prefix_is_forgotten_after_its_time_and_when_there_are_too_many() -> None:
    clock = Clock()
    memory = PrefixHistory(2, 300.0, clock)
    values = {"messages": turns("Hello.")}
    ask(memory, values)
    clock.now_s += 299
    assert marks(ask(memory, values))
    clock.now_s += 300
    assert not marks(ask(memory, values))
    assert marks(ask(memory, values))
    ask(memory, {"messages": turns("a", "b", "c")})
    assert not marks(ask(memory, values))


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "thinking", "thinking": "x", "signature": "s"}],
        [{"type": "text", "text": "  "}],
        "",
        [{"type": "some_new_block"}],
    ],
)
def test_what_cannot_be_marked_leaves_the_mark_to_what_is_before_it(content: Any) -> None:
    memory = seen()
    values = {"messages": [*turns("Hello."), {"role": "assistant", "content": content}, *turns("More.")]}
    ask(memory, {"messages": values["messages"][:2]})
    told = ask(memory, values)
    assert marks(told) == [".messages[0].content[0]"]
    assert told["messages"][1]["content"] == content


def marked(*texts: str, at: tuple[int, ...] = ()) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    for number in at:
        blocks[number]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    return {"messages": [{"role": "user", "content": blocks}]}


@pytest.mark.parametrize(
    ("at", "hinted_at"),
    [((), 4), ((0,), 4), ((0, 1, 2), 4), ((4,), None), ((5,), None), ((0, 1, 2, 3), None)],
)
def test_the_clients_own_marks_stay_and_ours_is_never_in_front_of_one_or_the_fifth(
    at: tuple[int, ...], hinted_at: int | None
) -> None:
    memory = seen()
    ask(memory, marked("0", "1", "2", "3", "4"))
    values = marked("0", "1", "2", "3", "4", "5", at=at)
    told = ask(memory, copy.deepcopy(values))
    expected = copy.deepcopy(values)
    if hinted_at is not None:
        expected["messages"][0]["content"][hinted_at]["cache_control"] = MARK
    assert told == expected


@pytest.mark.parametrize("inside", ["tool_result", "document"])
def test_marks_within_a_block_are_the_clients_own_as_well(inside: str) -> None:
    text = {"type": "text", "text": "x", "cache_control": MARK}
    within = {"type": "content", "content": [text]}
    block = {"type": inside, "content": [text]} if inside == "tool_result" else {"type": inside, "source": within}
    memory = seen()
    values = marked("0", "1", "2", "3", at=(0, 1, 2))
    values["messages"][0]["content"].insert(0, block)
    ask(memory, copy.deepcopy(values))
    assert ask(memory, copy.deepcopy(values)) == values
    del values["messages"][0]["content"][0]
    ask(memory, copy.deepcopy(values))
    assert ask(memory, copy.deepcopy(values)) != values


def test_a_client_that_caches_its_whole_prompt_needs_no_hint() -> None:
    memory = seen()
    values = {"cache_control": MARK, "messages": turns("Hello.")}
    ask(memory, values)
    assert ask(memory, values) == values


def test_a_mark_that_is_null_is_none() -> None:
    memory = seen()
    values = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}]}
    ask(memory, values)
    assert marks(ask(memory, values)) == [".messages[0].content[0]"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"messages": 1},
        {"messages": [1, {"content": [1, "x"]}]},
        {"system": 1, "messages": [{"content": {}}]},
        {"tools": [1]},
    ],
)
def test_what_is_no_request_of_this_api_is_left_for_the_upstream_to_refuse(values: dict[str, Any]) -> None:
    memory = seen()
    ask(memory, values)
    assert ask(memory, values) == values


def test_counting_tokens_has_no_hints() -> None:
    memory = seen()
    values = {"messages": turns("Hello.")}
    ask(memory, values)
    assert ask(memory, values, path="/v1/messages/count_tokens") == values


# -- OpenAI -----------------------------------------------------------------------------------------------------------


def key(values: dict[str, Any], path: str = "/v1/chat/completions", tenant: str = "t") -> Any:
    told = ask(seen(), values, path=path, tenant=tenant)
    assert {name: value for name, value in told.items() if name != "prompt_cache_key"} == {
        name: value for name, value in values.items() if name != "prompt_cache_key"
    }
    return told.get("prompt_cache_key")


def test_all_turns_of_a_conversation_have_one_key_and_others_another() -> None:
    first = key({"messages": turns("Hello.")})
    assert first.startswith("kvasir-")
    assert key({"messages": turns("Hello.", "Hi!", "More.")}) == first
    assert key({"messages": turns("Other.")}) != first
    assert key({"messages": turns("Hello.")}, tenant="u") != first
    assert key({"input": "Hello.", "instructions": "x"}, "/v1/responses") not in (None, first)


def test_a_key_of_the_clients_own_stays() -> None:
    assert key({"prompt_cache_key": "mine", "messages": turns("Hello.")}) == "mine"
    assert key({"previous_response_id": "resp_1", "input": "Hello."}, "/v1/responses") is None
    assert key({"input": "Hello."}, "/v1/embeddings") is None


def test_a_key_that_is_null_is_none() -> None:
    assert key({"prompt_cache_key": None, "messages": turns("Hello.")}).startswith("kvasir-")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False}, {"include_usage": True}),
        ({"include_obfuscation": False}, {"include_usage": True, "include_obfuscation": False}),
    ],
)
def test_usage_is_asked_for_whatever_the_options_say(options: Any, expected: Any) -> None:
    request = request_of({"stream": True, "stream_options": options}, "/v1/chat/completions")
    assert usage_option(request) == {"stream_options": expected}
