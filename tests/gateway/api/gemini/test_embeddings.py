"""embedContent and batchEmbedContents, with the real google-genai SDK and as JSON."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types

from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import Gateway, running
from tests.fakes.gemini import gemini

NAME = "all-MiniLM-L6-v2"
ONE = {"content": {"parts": [{"text": "A"}, {"text": "B"}]}}


async def post(gateway: Gateway, verb: str, body: Any, version: str = "v1beta") -> tuple[int, Any]:
    status, answer, _ = await gateway.post(f"/{version}/models/{NAME}:{verb}", body)
    return status, answer


async def test_the_sdk_gets_a_vector_for_each_content() -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        client = gemini(gateway.url)
        config = types.EmbedContentConfig(task_type="RETRIEVAL_DOCUMENT")
        answer = await client.aio.models.embed_content(model=NAME, contents=["A", "BC"], config=config)
        assert answer.embeddings is not None
        assert [one.values for one in answer.embeddings] == [[1, 65, 2], [1, 66, 67, 2]]
        await client.aio.aclose()
        client.close()


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_both_routes_to_the_letter(version: str) -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        one = {"embedding": {"values": [1, 65, 66, 2]}, "usageMetadata": {"promptTokenCount": 4}}
        assert await post(gateway, "embedContent", ONE, version) == (200, one)
        several = {"embeddings": [{"values": [1, 65, 66, 2]}] * 2, "usageMetadata": {"promptTokenCount": 8}}
        assert await post(gateway, "batchEmbedContents", {"requests": [ONE, ONE]}, version) == (200, several)


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("embedContent", {}, "content"),
        ("embedContent", {"content": {"parts": [{"text": ""}]}}, "content"),
        (
            "embedContent",
            {"content": {"parts": [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]}},
            "content.parts[0].inlineData",
        ),
        ("embedContent", {**ONE, "autoTruncate": True}, "autoTruncate"),
        ("batchEmbedContents", {"requests": []}, "requests"),
        ("batchEmbedContents", {"requests": [ONE, {}]}, "requests[1].content"),
        (
            "batchEmbedContents",
            {"requests": [ONE, {**ONE, "outputDimensionality": 2}]},
            "requests[].outputDimensionality",
        ),
    ],
)
async def test_what_cannot_be_embedded_is_a_400_with_its_path(verb: str, body: Any, field: str) -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, answer = await post(gateway, verb, body)
        assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert answer["error"]["details"][0]["fieldViolations"][0]["field"] == field
