"""Answers by meaning over HTTP: who asks for them, and what headers, figures and metrics say."""

from __future__ import annotations

import json
from typing import Any

from gateway.responses.stage import ResponseCache
from tests.fakes.gateway import Gateway, response_cache, running
from tests.fakes.meanings import Meanings, semantic_cache
from tests.fakes.pipeline import FakePipeline

CHAT = "/v1/chat/completions"
FIRST, SECOND = "How do I reset my password?", "how can i reset my password"


def in_front(mode: str) -> ResponseCache:
    return response_cache(semantic=semantic_cache(Meanings({"password?": 0.0, "reset": 5.0}), mode=mode))


async def ask(gateway: Gateway, text: str, **body: Any) -> Any:
    headers = body.pop("headers", {})
    sent = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **body}
    status, _, answered = await gateway.post(CHAT, sent, headers=headers)
    assert status == 200
    return answered


async def test_headers_say_how_similar_the_question_was_and_whose_answer_it_is() -> None:
    pipeline = FakePipeline(("One",), responses=in_front("on"))
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        first = await ask(gateway, FIRST)
        second = await ask(gateway, SECOND)
        assert (first["x-kvasir-cache"], second["x-kvasir-cache"]) == ("miss", "semantic")
        assert second["x-kvasir-cache-key"] == first["x-kvasir-cache-key"]
        assert second["x-kvasir-cache-similarity"] == "0.9962"
        assert "Age" in second


async def test_a_request_asks_for_it_and_raises_what_it_takes() -> None:
    pipeline = FakePipeline(("One",), responses=in_front("ask"))
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        asks = {"cache": {"semantic": True}}
        await ask(gateway, FIRST, **asks)
        assert (await ask(gateway, SECOND))["x-kvasir-cache"] == "miss"
        other = "how should i reset my password"
        wants = {"x-kvasir-cache": "semantic, similarity=0.999"}
        assert (await ask(gateway, other, headers=wants))["x-kvasir-cache"] == "miss"
        assert (await ask(gateway, "how would i reset my password", **asks))["x-kvasir-cache"] == "semantic"


async def test_figures_and_metrics_show_what_it_had_and_how_sure_it_is() -> None:
    pipeline = FakePipeline(("One",), responses=in_front("on"))
    async with running(pipeline, response_cache=pipeline.responses) as gateway:
        await ask(gateway, FIRST)
        await ask(gateway, SECOND)
        semantic = json.loads((await gateway.get("/admin/stats"))[1])["response_cache"]["semantic"]
        assert semantic["outcomes"] == {"miss": 1, "hit": 1}
        (space,) = semantic["spaces"]
        assert (space["owner"], space["bound"], space["wrong_share_high"]) == ("tenant:anonymous", 0.01, 1.0)
        text = (await gateway.get("/metrics"))[1]
        assert 'kvasir_semantic_cache_outcomes_total{outcome="hit"} 1.0' in text
        assert 'kvasir_semantic_cache_bound{model="demo",owner="tenant:anonymous"} 0.01' in text
