"""Large requests to upstreams are looked through, hashed and edited in a thread, in every dialect."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from gateway.api.lines import _loaded
from gateway.api.passthrough import Passthrough
from gateway.responses import upstream_answers
from gateway.tasks import AT_ONCE
from gateway.upstreams import stage
from gateway.upstreams.routes import MAX_NAME_CHARS
from tests.fakes.gateway import response_cache, running
from tests.fakes.meanings import Meanings, semantic_cache
from tests.fakes.upstream import CHAT, CONTENT, EMBEDDINGS, MESSAGE, RESPONSE, Told, upstream

LONG = "Hello. " * 100_000
MANY = {str(number): 0 for number in range(20_000)}
SMALL_TURN = {"role": "user", "content": "Hello."}
CASES: dict[str, tuple[str, str, Told, dict[str, Any]]] = {
    "a chat": ("openai", "/v1/chat/completions", CHAT, {"messages": [{**SMALL_TURN, "content": LONG}, SMALL_TURN]}),
    "names of a chat": ("openai", "/v1/chat/completions", CHAT, {"messages": [SMALL_TURN], "logit_bias": MANY}),
    "a response": ("openai", "/v1/responses", RESPONSE, {"store": False, "instructions": LONG, "input": "Hello."}),
    "embeddings": ("openai", "/v1/embeddings", EMBEDDINGS, {"input": LONG}),
    "ids for embeddings": ("openai", "/v1/embeddings", EMBEDDINGS, {"input": [5] * 20_000}),
    "a message": ("anthropic", "/v1/messages", MESSAGE, {"max_tokens": 5, "system": LONG, "messages": [SMALL_TURN]}),
    "a prompt to count": ("anthropic", "/v1/messages/count_tokens", MESSAGE, {"messages": [SMALL_TURN], "more": MANY}),
    "contents": (
        "gemini",
        "/v1beta/models/up-1:generateContent",
        CONTENT,
        {"contents": [{"parts": [{"text": LONG}]}, {"role": "user", "parts": [{"text": "Hello."}]}]},
    ),
}
LOOKED_AT: tuple[tuple[Any, str], ...] = (
    (Passthrough, "request"),
    (upstream_answers, "find_upstream_bypass"),
    (upstream_answers.UpstreamQuery, "of"),
    (upstream_answers.UpstreamQuery, "find_situation"),
    (stage, "body_for"),
)
"""What goes through a whole body."""


@pytest.mark.parametrize("case", CASES)
async def test_a_large_request_is_not_looked_through_on_the_event_loop(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect, path, told, body = CASES[case]
    threads: dict[str, set[int]] = {}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return work(*arguments, **named)

        return watch

    for place, name in LOOKED_AT:
        wrapped: Any = watched(name, getattr(place, name))
        monkeypatch.setattr(place, name, staticmethod(wrapped) if name == "of" else wrapped)
    semantic = semantic_cache(Meanings({"Hello.": 0.0}), mode="on")
    async with upstream(told) as stub:
        settings = stub.settings("up-1", dialect=dialect, hints=["*"], meter=["*"])
        async with running(upstreams=[settings], response_cache=response_cache(semantic=semantic)) as gateway:
            version = {"anthropic-version": "2023-06-01"}
            model = {} if dialect == "gemini" else {"model": "up-1"}
            status, _, _ = await gateway.post(path, {**model, "temperature": 0, **body}, headers=version)
            await semantic.close()
    assert (status, len(stub.got)) == (200, 1)
    assert {"request", "find_upstream_bypass", "body_for"} <= set(threads)
    assert case not in ("a chat", "a response", "contents") or {"of", "find_situation"} <= set(threads)
    assert not any(threading.get_ident() in found for found in threads.values()), threads


async def test_a_model_with_a_name_without_end_is_matched_with_no_pattern() -> None:
    async with upstream(CHAT) as stub, running(upstreams=[stub.settings("up-*")]) as gateway:
        body = {"model": "up-" + "1" * MAX_NAME_CHARS, "messages": [SMALL_TURN]}
        assert (await gateway.post("/v1/chat/completions", body))[0] == 404
        assert (await gateway.post("/v1/chat/completions", {**body, "model": "up-1"}))[0] == 200


async def test_the_objects_of_a_row_are_work_and_not_its_bytes_alone() -> None:
    row: dict[str, Any] = {"custom_id": "a", "body": {"messages": [{}] * 2000}}
    value, work = await _loaded(orjson.dumps(row))
    assert value == row
    assert len(orjson.dumps(row)) < AT_ONCE < work
