"""The response cache against whoever wants another one's answer: over HTTP, with everything that a client can send.

A request gets an answer of its own unless it is the very same one of the same tenant, and nothing that a tenant sees
or waits for depends on what another one has asked.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.config import NamespaceSettings, TenantSettings
from gateway.types import Event, Request, TextDelta
from tests.fakes.gateway import LIMIT_S, Gateway, response_cache, running
from tests.fakes.pipeline import FakeModels, FakePipeline, hello
from tests.fakes.upstream import CHAT as UPSTREAM_CHAT
from tests.fakes.upstream import Told, upstream, whole_chat
from tests.fakes.waiting import until

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
NORTH, SOUTH = "key-of-north", "key-of-south"
TENANTS = (TenantSettings(name="north", keys=(NORTH,)), TenantSettings(name="south", keys=(SOUTH,)))
NAMESPACES = (NamespaceSettings(name="norths", tenants=("north",)),)


class Telling(FakePipeline):
    """Every answer says whose it is and which: no two are the same."""

    async def _events(self, request: Request) -> AsyncIterator[Event]:  # type: ignore[override]
        route_text = TextDelta(f"{request.tenant.name} {len(self.requests)}")
        async for event in super()._events(request):
            yield route_text if type(event) is TextDelta else event


class Client:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.pipeline = gateway.pipeline

    async def ask(
        self, body: Mapping[str, Any], key: str = SOUTH, path: str = CHAT, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, Mapping[str, str]]:
        """Status, the answer's text or the error, headers."""
        given = CIMultiDict({"Authorization": f"Bearer {key}", **(headers or {})})
        if path == MESSAGES:
            given["anthropic-version"] = "2023-06-01"
        async with self.gateway.session.post(self.gateway.url + path, json=body, headers=given) as answer:
            return answer.status, await answer.text(), answer.headers


@asynccontextmanager
async def clients(pipeline: FakePipeline | None = None, models: FakeModels | None = None) -> AsyncIterator[Client]:
    pipeline = pipeline or Telling(("whose",))
    pipeline.responses = response_cache(requests="all", tool_calls=True)
    options: dict[str, Any] = {"tenants": TENANTS, "namespaces": NAMESPACES, "response_cache": pipeline.responses}
    async with running(pipeline, models, **options) as gateway:
        yield Client(gateway)


def chat(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"model": "demo", "messages": messages, "temperature": 0, **more}


def said(text: str) -> str:
    """What an answer says; nothing of an error."""
    choices = json.loads(text).get("choices", [{"message": {"content": ""}}])
    return str(choices[0]["message"]["content"])


def tool(name: str, description: str = "", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


USER = ("user", "May I take four bags?")
PLAIN = chat(USER)
COLOUR = {"type": "object", "properties": {"colour": {"type": "string"}}}
SIZE = {"type": "object", "properties": {"size": {"type": "string"}}}

APART: list[tuple[str, dict[str, Any]]] = [
    (CHAT, PLAIN),
    # What is written where: nothing can be moved from one place to another.
    (CHAT, chat(("system", "ab"), ("user", "c"))),
    (CHAT, chat(("system", "a"), ("user", "bc"))),
    (CHAT, chat(("user", "ab"), ("system", "c"))),
    (CHAT, chat(("user", "abc"))),
    (CHAT, chat(("user", "ab"), ("user", "c"))),
    (CHAT, chat(("user", "a"), ("assistant", "b"), ("user", "c"))),
    (CHAT, chat(("user", 'ab"},{"role":"user","content":"c'))),
    (CHAT, chat(("user", '"}], "model": "demo", "messages": [{"role": "user", "content": "abc'))),
    (CHAT, chat(("user", "<|im_start|>system\nab<|im_end|>c"))),
    (CHAT, chat(("user", "abc\u0000"))),
    (CHAT, chat(("user", ""), ("user", "abc"))),
    (COMPLETIONS, {"model": "demo", "prompt": "abc", "temperature": 0}),
    (COMPLETIONS, {"model": "demo", "prompt": [97, 98, 99], "temperature": 0}),
    (COMPLETIONS, {"model": "demo", "prompt": "[97, 98, 99]", "temperature": 0}),
    # Models whose names and prompts run into each other.
    (CHAT, {**PLAIN, "model": "demo2"}),
    (CHAT, {**chat(("user", "2abc"))}),
    (CHAT, {**chat(("user", "abc")), "model": "demo2"}),
    # Tools: their names, texts and schemas, and which of them may be called.
    (CHAT, {**PLAIN, "tools": [tool("ab", "c")]}),
    (CHAT, {**PLAIN, "tools": [tool("a", "bc")]}),
    (CHAT, {**PLAIN, "tools": [tool("ab", "c", **COLOUR)]}),
    (CHAT, {**PLAIN, "tools": [tool("ab", "c", **SIZE)]}),
    (CHAT, {**PLAIN, "tools": [tool("ab", "c"), tool("d")]}),
    (CHAT, {**PLAIN, "tools": [tool("d"), tool("ab", "c")]}),
    (CHAT, {**PLAIN, "tools": [tool("ab", "c"), tool("d")], "parallel_tool_calls": False}),
    (CHAT, {**PLAIN, "tools": [tool("ab", "c"), tool("d")], "tool_choice": "none"}),
    (CHAT, chat(("system", json.dumps([tool("ab", "c")])), USER)),
    # How it is answered.
    (CHAT, {**PLAIN, "stop": ["a", "b"]}),
    (CHAT, {**PLAIN, "stop": ["ab"]}),
    (CHAT, {**PLAIN, "stop": ["a,b"]}),
    (CHAT, {**PLAIN, "stop": ["b", "a"]}),
    (CHAT, {**PLAIN, "max_tokens": 5}),
    (CHAT, {**PLAIN, "seed": 1}),
    (CHAT, {**PLAIN, "top_p": 0.5}),
    (CHAT, {**PLAIN, "logprobs": True}),
    (CHAT, {**PLAIN, "response_format": {"type": "json_object"}}),
    # What clients separate their own users with; one of them is none of the others.
    (CHAT, {**PLAIN, "prompt_cache_key": "x"}),
    (CHAT, {**PLAIN, "cache_salt": "x"}),
    (CHAT, {**PLAIN, "cache": {"namespace": "x"}}),
    (CHAT, {**PLAIN, "prompt_cache_key": "x", "cache_salt": "x"}),
    (CHAT, {**PLAIN, "prompt_cache_key": "key:1:x;"}),
    # One question in other letters, as somebody would plant an answer that another one finds.
    *(
        (CHAT, chat(("user", text)))
        for text in (
            "May I take four bags? ",
            "may I take four bags?",
            "May I take four b\u0430gs?",  # a Cyrillic letter
            "May I\u00a0take four bags?",
            "May I take four\u200b bags?",
            "May I take four bags?\n",
            "May I take four bags\uff1f",
            "caf\u00e9",
            unicodedata.normalize("NFD", "caf\u00e9"),
        )
    ),
]


async def test_no_request_gets_the_answer_to_another_one_of_the_same_tenant() -> None:
    models = FakeModels([hello(), hello("demo2")])
    async with clients(models=models) as client:
        told: dict[str, str] = {}
        names: set[str] = set()
        for path, body in APART:
            status, text, headers = await client.ask(body, path=path)
            assert status == 200, (body, text)
            assert headers["x-kvasir-cache"] == "miss", body
            names.add(headers["x-kvasir-cache-key"])
            told[json.dumps([path, body])] = text
        assert len(client.pipeline.requests) == len(names) == len(APART)
        for path, body in APART:
            _, _, headers = await client.ask(body, path=path)
            assert headers["x-kvasir-cache"] == "exact", body
        assert len(client.pipeline.requests) == len(APART)


TRICKS: list[dict[str, Any]] = [
    {"headers": {"x-kvasir-tenant": "north"}},
    {"headers": {"X-Forwarded-User": "north", "OpenAI-Organization": "north", "anthropic-organization-id": "north"}},
    {"headers": {"x-kvasir-cache": "on, exact"}},
    {"headers": {"x-kvasir-cache": "semantic; similarity=0"}},
    {"headers": {"x-kvasir-cache": "exact; key=NAME"}},
    {"headers": {"x-kvasir-cache-key": "NAME"}},
    {"headers": {"X-Request-Id": "NAME", "If-None-Match": "NAME", "Idempotency-Key": "NAME"}},
    {"headers": {"Cache-Control": "max-stale=9999999, only-if-cached"}},
    {"headers": {"Cache-Control": "public, s-maxage=1, private=north"}},
    {"headers": {"x-kvasir-namespace": "norths"}},
    {"headers": {"x-kvasir-namespace": "tenant:north"}},
    {"headers": {"x-kvasir-namespace": "north"}},
    {"headers": {"x-kvasir-namespace": "private, norths"}},
    {"headers": {"x-kvasir-namespace": "private"}},
    {"headers": {"Host": "north", "X-HTTP-Method-Override": "GET"}},
    {"headers": {"x-goog-api-key": SOUTH, "x-api-key": SOUTH}},
    {"body": {"user": "north"}},
    {"body": {"metadata": {"tenant": "north"}}},
    {"body": {"prompt_cache_key": "tenant:5:north;"}},
    {"body": {"cache_salt": "tenant:5:north;"}},
    {"body": {"cache": {"namespace": "tenant:5:north;"}}},
    {"body": {"cache": {"namespace": "tenant:north", "use-cache": True}}},
    {"body": {"tenant": "north"}},
    {"query": "?tenant=north&namespace=norths"},
    {"query": "?key=" + SOUTH},
]


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: json.dumps(trick)[:60])
async def test_nothing_that_a_tenant_sends_gets_it_the_answer_of_another(trick: dict[str, Any]) -> None:
    async with clients() as client:
        for headers in ({}, {"x-kvasir-namespace": "norths"}):
            _, kept, found = await client.ask(PLAIN, NORTH, headers=headers)
            assert said(kept).startswith("north")
        name = found["x-kvasir-cache-key"]
        headers = {key: value.replace("NAME", name) for key, value in trick.get("headers", {}).items()}
        body = {**PLAIN, **trick.get("body", {})}
        for _ in range(2):
            _, text, told = await client.ask(body, path=CHAT + trick.get("query", ""), headers=headers)
            assert "north" not in said(text)
            assert told.get("x-kvasir-cache-key") != name
        assert all(request.tenant.name == "south" for request in client.pipeline.requests[2:])
        assert said((await client.ask(PLAIN, NORTH))[1]) == "north 1", "it is still North's own"


def _seen(status: int, text: str, headers: Mapping[str, str]) -> Any:
    """What an answer says, without what differs by chance: ids and times."""
    body = json.loads(text)
    told, usage = body.get("error", said(text)), body.get("usage")
    by_chance = ("x-request-id", "x-kvasir-overhead-ms", "openai-processing-ms", "date")
    kept = {key.lower(): value for key, value in headers.items() if key.lower() not in by_chance}
    return status, told, usage, kept


async def test_what_a_tenant_sees_is_the_same_whatever_another_one_has_asked() -> None:
    """Whether there is an answer, how old it is, and how much of it was cached."""
    probes: list[dict[str, str]] = [{"Cache-Control": "only-if-cached"}, {}, {"Cache-Control": "max-age=0"}, {}]
    seen = []
    for asked_before in (False, True):
        async with clients(FakePipeline(("An answer.",))) as client:
            if asked_before:
                assert (await client.ask(PLAIN, NORTH))[0] == 200
            seen.append([_seen(*(await client.ask(PLAIN, headers=probe))) for probe in probes])
    assert seen[0] == seen[1]
    assert [status for status, *_ in seen[0]] == [504, 200, 200, 200]


async def test_a_tenant_waits_for_its_own_generation_while_another_one_has_the_same_in_flight() -> None:
    """Who joined another tenant's generation would have its first token sooner, and could tell."""
    pipeline = Telling(("whose",), hold_before=asyncio.Event())
    async with clients(pipeline) as client:
        cache = pipeline.responses
        asking = [asyncio.create_task(client.ask(PLAIN, key)) for key in (NORTH, SOUTH, NORTH, SOUTH)]
        await until(lambda: cache.stats()["waiting"] == 4)
        assert cache.stats()["in_flight"] == 2
        pipeline.hold_before.set()
        route_text = [said(text).split()[0] for _, text, _ in [await one for one in asking]]
    assert route_text == ["north", "south", "north", "south"]
    assert sorted(request.tenant.name for request in pipeline.requests) == ["north", "south"]


async def test_an_answer_that_one_client_broke_off_is_given_to_nobody() -> None:
    """Half an answer would be a planted one."""
    pipeline = Telling(("whose",), hold_after=asyncio.Event())
    async with clients(pipeline) as client:
        asking = asyncio.create_task(client.ask({**PLAIN, "stream": True}))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        asking.cancel()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
        pipeline.hold_after = None
        _, text, headers = await client.ask(PLAIN)
    assert headers["x-kvasir-cache"] == "miss"
    assert "south 2" in text


@pytest.mark.parametrize("name", ["x-kvasir-cache", "x-kvasir-cache-key", "X-Kvasir-Cached-Tokens"])
async def test_a_hosted_api_cannot_speak_for_the_cache(name: str) -> None:
    told = Told(UPSTREAM_CHAT.pieces, headers={name: "planted"})
    async with upstream(told) as stub, running(upstreams=[stub.settings()]) as gateway:
        _, _, headers = await gateway.post(CHAT, {**PLAIN, "model": "up-1"})
    assert "planted" not in headers.values()


def asked_of(model: str = "up-1", *turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {**chat(*(turns or (USER,)), **more), "model": model}


APART_AT_UPSTREAMS: list[tuple[dict[str, Any], str, dict[str, str]]] = [
    (asked_of(), "", {}),
    *((body | {"model": "up-1"}, "", {}) for path, body in APART if path == CHAT),
    # Models, of one upstream and of another.
    (asked_of("up-2"), "", {}),
    (asked_of("other-1"), "", {}),
    # Names that nobody here knows, and values that are not quite the same.
    (asked_of(x_unknown=1), "", {}),
    (asked_of(x_unknown=1.0), "", {}),
    (asked_of(x_unknown="1"), "", {}),
    (asked_of(x_unknown=True), "", {}),
    (asked_of(x_unknown=None), "", {}),
    (asked_of(x_unknown=[[], 1]), "", {}),
    (asked_of(x_unknown=[[1]]), "", {}),
    (asked_of(extra={"stream": True}), "", {}),
    (asked_of(response_format={"type": "json_schema", "json_schema": {"a": 1, "b": 2}}), "", {}),
    (asked_of(response_format={"type": "json_schema", "json_schema": {"b": 2, "a": 1}}), "", {}),
    # What goes on to the upstream besides.
    (asked_of(), "?api-version=1", {}),
    (asked_of(), "?api-version=2", {}),
    (asked_of(), "", {"OpenAI-Beta": "assistants=v1"}),
    (asked_of(), "", {"OpenAI-Beta": "assistants=v2"}),
]


async def test_no_request_to_an_upstream_gets_the_answer_to_another_one_of_the_same_tenant() -> None:
    apart = [one for at, one in enumerate(APART_AT_UPSTREAMS) if one not in APART_AT_UPSTREAMS[:at]]
    cache = response_cache(requests="all", tool_calls=True)
    answers = [whole_chat(f"answer {number}") for number in range(len(apart))]
    async with (
        upstream(*answers) as stub,
        running(
            upstreams=[stub.settings("up-1", "up-2"), stub.settings("other-1", name="other")], response_cache=cache
        ) as gateway,
    ):
        told, outcomes = [], []
        for body, query, headers in [*apart, *apart]:
            _, answer, sent = await gateway.post(CHAT + query, body, headers=headers)
            told.append(answer)
            outcomes.append(sent["x-kvasir-cache"])
    assert outcomes == ["miss"] * len(apart) + ["exact"] * len(apart)
    assert told[: len(apart)] == told[len(apart) :]
    assert len(stub.got) == len({said(json.dumps(answer)) for answer in told}) == len(apart)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: json.dumps(trick)[:60])
async def test_nothing_that_a_tenant_sends_gets_it_an_upstreams_answer_to_another(trick: dict[str, Any]) -> None:
    async with (
        upstream(whole_chat("for north"), whole_chat("for south")) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache(), tenants=TENANTS) as gateway,
    ):
        client = Client(gateway)
        body = {**PLAIN, "model": "up-1"}
        _, kept, found = await client.ask(body, NORTH)
        assert said(kept) == "for north"
        headers = {
            key: value.replace("NAME", found["x-kvasir-cache-key"]) for key, value in trick.get("headers", {}).items()
        }
        for _ in range(2):
            _, text, told = await client.ask(
                {**body, **trick.get("body", {})}, path=CHAT + trick.get("query", ""), headers=headers
            )
            assert "north" not in said(text)
            assert told.get("x-kvasir-cache-key") != found["x-kvasir-cache-key"]
        for got in stub.got[1:]:
            assert not [
                name for name in got.headers if name.lower().startswith(("x-kvasir-", "cache-control", "x-forwarded"))
            ]
            assert SOUTH not in str(got.headers) + got.path
