"""Markers as breakpoints and keys of both OpenAI forms, in bodies that the SDK's own types take."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatBody
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseBody
from pydantic import TypeAdapter

from gateway.types import Marker, Request, Scope
from gateway.upstreams.translation.base import Form
from gateway.upstreams.translation.openai_chat import OpenAIChat
from gateway.upstreams.translation.openai_responses import OpenAIResponses
from tests.fakes.translated import WEATHER, call, chat, check_types, conversations, result, said, system, user

FORMS: tuple[tuple[Form, TypeAdapter[Any]], ...] = (
    (OpenAIChat(), TypeAdapter(ChatBody)),
    (OpenAIResponses(), TypeAdapter(ResponseBody)),
)
NEW, OLD = "gpt-5.6-mini", "gpt-4.1"
HALF_HOUR, HALF_DAY = {"mode": "explicit"}, {"mode": "explicit", "ttl": "12h"}


def bodies(request: Request, model: str = NEW) -> list[dict[str, Any]]:
    """Of both forms."""
    made = []
    for form, types in FORMS:
        body = orjson.loads(orjson.dumps(form.write(request, model).body))
        check_types(types, body, extra="forbid")
        made.append(body)
    return made


def marked(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The texts that end at a breakpoint, in order."""
    items = body.get("messages", body.get("input"))
    contents = [item.get("output", item.get("content")) for item in items]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [(part["text"], part["prompt_cache_breakpoint"]) for part in parts if "prompt_cache_breakpoint" in part]


CALLS = (user("u"), said("Wait.", call("f", {}, "c1"), call("f", {}, "c2")), result("r", "c1"), result("s", "c2"))
PLACES: dict[str, tuple[tuple[Any, ...], tuple[Marker, ...], list[tuple[str, Any]], list[tuple[str, Any]]]] = {
    "instructions": ((system("s"), user("u")), (Marker(0, 1, 300.0),), *[[("s", HALF_HOUR)]] * 2),
    "inside of a text": ((user("one two"),), (Marker(0, 3, 300.0),), *[[("one", HALF_HOUR)]] * 2),
    "an hour": ((user("u"),), (Marker(0, 1, 3600.0),), *[[("u", HALF_HOUR)]] * 2),
    "a day": ((user("u"),), (Marker(0, 1, 86_400.0),), *[[("u", HALF_DAY)]] * 2),
    "two in one place": ((user("u"),), (Marker(0, 1, 86_400.0), Marker(0, 1, 300.0)), *[[("u", HALF_DAY)]] * 2),
    "a result": (CALLS, (Marker(3, 1, 300.0),), *[[("s", HALF_HOUR)]] * 2),
    "a call": (CALLS, (Marker(1, 0, 300.0, call=1),), [("Wait.", HALF_HOUR)], [("u", HALF_HOUR)]),
    "an answer": ((user("u"), said("a"), user("v")), (Marker(1, 1, 300.0),), [("a", HALF_HOUR)], [("u", HALF_HOUR)]),
    "tools": ((system("s"), user("u")), (Marker(0, 0, 300.0, tool=0),), *[[("s", HALF_HOUR)]] * 2),
    "tools alone": ((user("u"),), (Marker(0, 0, 300.0, tool=0),), [], []),
    "no text": ((system(""), user("u")), (Marker(0, 0, 300.0),), [], []),
}


@pytest.mark.parametrize(("messages", "markers", "in_chat", "in_response"), PLACES.values(), ids=PLACES)
def test_breakpoints_are_behind_marked_texts_and_nowhere_else(
    messages: Any, markers: Any, in_chat: Any, in_response: Any
) -> None:
    chat_body, response_body = bodies(chat(*messages, markers=markers, tools=(WEATHER,)))
    assert (marked(chat_body), marked(response_body)) == (in_chat, in_response)
    for body in (chat_body, response_body):
        assert body.get("prompt_cache_options") == ({"mode": "explicit"} if marked(body) else None)


@pytest.mark.parametrize("model", [OLD, "gpt-5", "o4-mini"])
def test_older_models_get_a_key_and_no_breakpoints(model: str) -> None:
    for body in bodies(chat(system("s"), user("u"), markers=(Marker(0, 1, 300.0),)), model):
        assert body["prompt_cache_key"].startswith("kvasir-")
        assert not marked(body)
        assert "prompt_cache_options" not in body


def test_servers_of_others_get_nothing() -> None:
    for body in bodies(chat(user("u"), markers=(Marker(0, 1, 300.0),), affinity="k"), "mistral-large"):
        assert not {name for name in body if "cache" in name}
        assert not marked(body)


def test_nothing_is_cached_where_the_client_turned_that_off() -> None:
    for body in bodies(chat(user("u"), use_cache=False, affinity="k")):
        assert body["prompt_cache_options"] == {"mode": "explicit"}
        assert "prompt_cache_key" not in body


def key(*messages: Any, **fields: Any) -> Any:
    one, other = (body.get("prompt_cache_key") for body in bodies(chat(*messages, **fields), OLD))
    assert one == other
    return one


def test_a_key_is_one_conversations_and_one_scopes() -> None:
    first = key(system("s"), user("u"), markers=(Marker(1, 1, 300.0),))
    assert first == key(system("s"), user("u"), said("a"), user("v"), markers=(Marker(3, 1, 300.0),))
    assert first != key(system("s"), user("w"), markers=(Marker(1, 1, 300.0),))
    assert first != key(system("s"), user("u"), markers=(Marker(1, 1, 300.0),), scope=Scope(tenant="other"))
    instructions = (Marker(0, 1, 300.0),)  # what is marked first is what they share
    assert key(system("s"), user("u"), markers=instructions) == key(system("s"), user("w"), markers=instructions)
    assert key(system("s"), user("u")) is None


def test_a_clients_own_key_stays_one_and_apart_from_other_tenants() -> None:
    assert key(user("u"), affinity="k") == key(user("v"), affinity="k")
    assert key(user("u"), affinity="k") != key(user("u"), affinity="k", scope=Scope(tenant="other"))
    separate, other = Scope(tenant="t", key="k"), Scope(tenant="t", key="l")
    assert key(user("u"), scope=separate) != key(user("u"), scope=other)
    shared = Scope(namespace="n")
    assert key(user("u"), scope=shared, affinity="k") == key(user("v"), scope=shared, affinity="k")


@given(conversations(), st.data())
def test_breakpoints_change_no_text(messages: list[Any], data: st.DataObject) -> None:
    places = st.integers(0, len(messages) - 1).flatmap(
        lambda at: st.builds(Marker, st.just(at), st.integers(0, len(messages[at]["content"])), st.just(300.0))
    )
    request = chat(*messages, markers=tuple(data.draw(st.lists(places, max_size=6))))
    plain = chat(*messages)
    for form, _ in FORMS:
        assert _texts(form.write(request, NEW).body) == _texts(form.write(plain, NEW).body)


def _texts(body: dict[str, Any]) -> list[str]:
    items = [{"content": body.get("instructions")}, *body.get("messages", body.get("input"))]
    contents = [item.get("output", item.get("content")) for item in items]
    return [
        text
        for content in contents
        if (text := content if isinstance(content, str) else "".join(part["text"] for part in content or ()))
    ]
