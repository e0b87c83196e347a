"""Which chats to upstreams are one situation: nothing but the text that its user said last may differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.routes import REPLAYS
from gateway.config import ResponseCacheSettings
from gateway.responses.upstream_answers import UpstreamQuery
from gateway.responses.upstream_key import LARGE_BYTES, route_of
from gateway.types import Reuse, Tenant, UpstreamRequest

CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1beta/models/{model}:generateContent"
TEXTS = [{"type": "text", "text": "Read this."}, {"type": "text", "text": "Hi."}]
BODIES: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "chat": (
        CHAT,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi."},
                {"role": "assistant", "content": "Yes?", "refusal": None},
                {"role": "user", "content": "What is this?"},
            ],
            "temperature": 0,
            "x_unknown": {"a": [1]},
        },
        ("messages", -1, "content"),
    ),
    "parts": (
        MESSAGES,
        {"model": "m", "system": TEXTS, "messages": [{"role": "user", "content": TEXTS}], "max_tokens": 9},
        ("messages", -1, "content", -1, "text"),
    ),
    "input": (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "Hi."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is this?"}]},
            ],
        },
        ("input", -1, "content", -1, "text"),
    ),
    "contents": (
        GENERATE,
        {
            "contents": [
                {"role": "user", "parts": [{"text": "Hi."}]},
                {"role": "model", "parts": [{"text": "Yes?", "thoughtSignature": "s"}]},
                {"parts": [{"text": "What is this?"}]},
            ],
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "generationConfig": {"temperature": 0, "topK": 1},
        },
        ("contents", -1, "parts", -1, "text"),
    ),
}


def asked(path: str, values: dict[str, Any], tenant: str = "a", model: str = "m", **changes: Any) -> UpstreamQuery:
    route_text = changes.pop("route_text", "up m")
    request = UpstreamRequest(
        "r", Tenant(tenant), "openai", model, path, changes.pop("query", ""), changes.pop("headers", ()),
        orjson.dumps(values), values, 0.0, 9e9, **changes,
    )  # fmt: skip
    upstreams: Any = None
    return UpstreamQuery.of(request, upstreams, REPLAYS[route_of(request)], ResponseCacheSettings(), route_text)


def put(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value there."""
    changed = orjson.loads(orjson.dumps(values))  # in which nothing is there twice
    inside = changed
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return changed


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a JSON value that is neither object nor list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        yield from places(one, (*at, name))
    if not isinstance(value, dict | list):
        yield at


def same_place(one: tuple[Any, ...], other: tuple[Any, ...], values: Any) -> bool:
    """Whether two paths, of which the second counts from the end, lead to one value."""
    inside, turned = values, []
    for name in other:
        turned.append(name if isinstance(name, str) else len(inside) + name)
        inside = inside[name]
    return one == tuple(turned)


@pytest.mark.parametrize("name", BODIES)
@given(st.text("abc ?", min_size=1, max_size=8), st.text("abc ?", min_size=1, max_size=8))
def test_the_last_text_alone_may_differ(name: str, one: str, other: str) -> None:
    path, values, place = BODIES[name]
    here, there = (asked(path, put(values, place, text)).find_situation() for text in (one, other))
    assert here is not None
    assert there is not None
    assert (here.text, there.text, here.digest) == (one, other, there.digest)


@pytest.mark.parametrize("name", BODIES)
def test_every_other_value_is_a_part_of_the_situation(name: str) -> None:
    path, values, last = BODIES[name]
    own = asked(path, values).find_situation()
    assert own is not None
    for place in places(values):
        changed = asked(path, put(values, place, "changed")).find_situation()
        assert (changed is not None and changed.digest == own.digest) == same_place(place, last, values), place


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "b"},
        {"model": "n"},
        {"route_text": "other m"},
        {"query": "beta=true"},
        {"headers": (("openai-beta", "x"),)},
        {"reuse": Reuse(partition="p")},
        {"path": "/v1/messages"},
    ],
)
def test_whose_it_is_and_who_answers_it_are_a_part_of_the_situation(changes: dict[str, Any]) -> None:
    path, values, _ = BODIES["chat"]
    own, other = asked(path, values).find_situation(), asked(**{"path": path, "values": values, **changes})
    assert own is not None
    found = other.find_situation()
    assert found is not None
    assert found.digest != own.digest


def said(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in turns], **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


APART = [
    said(("user", "c")),
    said(("system", "ab"), ("user", "c")),
    said(("system", "a"), ("user", "bc")),
    said(("user", "ab"), ("user", "c")),
    said(("user", "a"), ("assistant", "b"), ("user", "c")),
    said(("assistant", "ab"), ("user", "c")),
    said(("user", 'ab"},{"role":"user","content":"c')) | {"system": "ab"},
    said(("user", "c"), system="a"),
    said(("user", "c"), system=parts("ab")),
    said(("user", "c"), system=parts("a", "b")),
    said(("user", "c"), instructions="ab"),
    said(("user", parts("c"))),
    said(("user", parts("ab", "c"))),
    said(("user", parts("a", "b", "c"))),
    said(("user", "ab"), ("user", parts("c"))),
    said(("user", "c"), messages_before=[{"role": "system", "content": "ab"}]),
    said(("user", "c"), model="n"),
    said(("user", "c"), tool_choice="none"),
    said(("user", "c"), stop=["a", "b"]),
    said(("user", "c"), stop=["ab"]),
    said(("user", None), ("user", "c")),
]


def test_nothing_can_be_moved_from_one_place_to_another_within_one_situation() -> None:
    found = [asked(CHAT, values).find_situation() for values in APART]
    assert [one is None for one in found] == [False] * (len(APART) - 1) + [True]
    digests = [one.digest for one in found if one is not None]
    assert len(set(digests)) == len(digests)


def test_whether_it_streams_and_who_says_so_is_no_part_of_it() -> None:
    path, values, _ = BODIES["chat"]
    streamed = {
        **values,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "u",
        "metadata": {"a": "b"},
    }
    assert asked(path, streamed).find_situation() == asked(path, values).find_situation()


def test_a_situation_is_no_key_of_an_answer() -> None:
    path, values, place = BODIES["chat"]
    situation = asked(path, values).find_situation()
    assert situation is not None
    assert situation.digest != asked(path, put(values, place, None)).key


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 9)
    | st.text("ab", max_size=2)
    | st.sampled_from(("user", "text", "Hi.")),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(("role", "content", "parts", "type", "text", "tool_calls")), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(
    st.sampled_from((CHAT, MESSAGES, GENERATE)),
    ODD,
    st.dictionaries(st.sampled_from(("n", "text", "temperature")), ODD),
)
def test_whatever_a_body_says_nothing_fails(path: str, turns: Any, more: dict[str, Any]) -> None:
    one = asked(path, {"messages": turns, "contents": turns, **more})
    situation = one.find_situation()
    assert situation is None or isinstance(situation.text, str)
    assert one.find_unfit(0.3) in ("tools", "form", "sampling", None)


def test_a_large_request_is_one_byte_for_byte_and_means_the_same_as_none() -> None:
    values = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "a" * LARGE_BYTES}]}
    one = asked(CHAT, values)
    assert one.key == asked(CHAT, dict(values)).key
    assert one.find_situation() is None
    for other in (
        asked(CHAT, {**values, "user": "u"}),
        asked(CHAT, values, tenant="b"),
        asked(CHAT, values, route_text="v"),
    ):
        assert other.key != one.key
