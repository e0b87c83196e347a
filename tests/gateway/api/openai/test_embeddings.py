"""POST /v1/embeddings against an embedder whose vector of a text is the text's own tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.config import AuthSettings, ServerSettings, TenantSettings
from tests.fakes.embedding import LIMIT_S, FakeTextModel, fake_embedder
from tests.fakes.gateway import Gateway, running
from tests.fakes.waiting import until

PATH = "/v1/embeddings"
NAME = "all-MiniLM-L6-v2"
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model() -> Iterator[FakeTextModel]:
    fake = FakeTextModel()
    yield fake
    fake.go_on()


async def embed(gateway: Gateway, value: object, **options: object) -> tuple[int, Any]:
    status, body, _ = await gateway.post(PATH, {"model": NAME, "input": value, **options})
    return status, body


def vectors(body: Any) -> list[list[float]]:
    return [item["embedding"] for item in body["data"]]


async def test_the_answer_has_every_field_of_the_api() -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, body, headers = await gateway.post(PATH, {"model": NAME, "input": "AB"})
        assert status == 200
        assert body == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [1, 65, 66, 2]}],
            "model": NAME,
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        }
        assert headers["x-request-id"]
        assert headers["openai-version"] == "2020-10-01"


async def test_usage_counts_the_clients_own_ids_and_of_texts_what_the_model_reads() -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        for value, count in (([7, 8, 9], 3), ([[7], [8, 9]], 3), ("AB", 4), (["A", "B"], 6)):
            assert (await embed(gateway, value))[1]["usage"] == {"prompt_tokens": count, "total_tokens": count}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("A", [[1, 65, 2]]),
        (["A", "B"], [[1, 65, 2], [1, 66, 2]]),
        ([7, 8], [[1, 7, 8, 2]]),
        ([[7], [8, 9]], [[1, 7, 2], [1, 8, 9, 2]]),
        ([[7]], [[1, 7, 2]]),
    ],
)
async def test_texts_and_token_ids_alone_and_in_lists_are_embedded_in_order(value: object, expected: object) -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, body = await embed(gateway, value)
        assert (status, vectors(body)) == (200, expected)
        assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))


async def test_null_is_not_given_and_the_user_has_no_effect() -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, body = await embed(gateway, "A", dimensions=None, encoding_format=None, user="somebody")
        assert (status, vectors(body)) == (200, [[1, 65, 2]])


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        ({"model": NAME}, "input", "missing_required_parameter", "input"),
        ({"input": "a"}, "model", "missing_required_parameter", "model"),
        ({"model": NAME, "input": ""}, "input", "empty_string", "minimum length 1"),
        ({"model": NAME, "input": []}, "input", "empty_array", "empty array"),
        ({"model": NAME, "input": ["a", ""]}, "input[1]", "empty_string", "minimum length 1"),
        ({"model": NAME, "input": ["a", 3]}, "input[1]", "invalid_type", "a string"),
        ({"model": NAME, "input": [[1], []]}, "input[1]", "empty_array", "empty array"),
        ({"model": NAME, "input": [1, "a"]}, "input[1]", "invalid_type", "an integer"),
        ({"model": NAME, "input": [1, True]}, "input[1]", "invalid_type", "an integer"),
        ({"model": NAME, "input": [1.5]}, "input[0]", "invalid_type", "an integer"),
        ({"model": NAME, "input": {"text": "a"}}, "input", "invalid_type", "a string or an array"),
        ({"model": NAME, "input": [5, 1000]}, "input[1]", "invalid_value", "0 to 999"),
        ({"model": NAME, "input": [[5, -1]]}, "input[0][1]", "invalid_value", "token ids"),
        ({"model": NAME, "input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value", "base64"),
        ({"model": NAME, "input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value", ">= 1"),
        ({"model": NAME, "input": "a", "dimensions": 5}, "dimensions", "integer_above_max_value", "<= 4"),
        ({"model": NAME, "input": "a", "dimension": 3}, "dimension", "unknown_parameter", "Did you mean 'dimensions'"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(body: object, param: str, code: str, said: str) -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, answer, _ = await gateway.post(PATH, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
        assert said in answer["error"]["message"]


async def test_a_text_that_does_not_fit_is_refused_and_not_cut() -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, body = await embed(gateway, ["x" * 14, "x" * 15])
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "input[1]")
        assert "maximum context length is 16 tokens" in body["error"]["message"]
        assert "17 tokens" in body["error"]["message"]
        status, body = await embed(gateway, list(range(15)))
        assert (status, body["error"]["param"]) == (400, "input")


async def test_a_request_has_limits_that_are_in_the_settings(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, max_inputs=2, max_input_chars=5, max_request_tokens=9)
    async with running(embedder=embedder) as gateway:
        for value, param, code, said in (
            (["a", "b", "c"], "input", "array_above_max_length", "maximum length 2"),
            (["a", "abcdef"], "input[1]", "string_above_max_length", "maximum length 5"),
            (["abc", "abc"], "input", "max_tokens_per_request", "10 tokens"),
        ):
            status, body = await embed(gateway, value)
            assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)
            assert said in body["error"]["message"]
        assert model.batches == []


async def test_a_model_is_for_its_own_route() -> None:
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, body, _ = await gateway.post(PATH, {"model": "demo", "input": "a"})
        assert (status, body["error"]["param"]) == (400, "model")
        assert "generates text" in body["error"]["message"]
        assert NAME in body["error"]["message"]
        status, body, _ = await gateway.post(PATH, {"model": "text-embedding-9", "input": "a"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
async def test_a_model_that_embeds_generates_nothing(path: str, body: dict[str, object]) -> None:
    headers = {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
    async with running(embedder=fake_embedder(FakeTextModel())) as gateway:
        status, answer, _ = await gateway.post(path, {"model": NAME, **body}, headers=headers)
        assert status == 400
        assert PATH in answer["error"]["message"]


async def test_embedding_models_are_listed_under_all_their_names(model: FakeTextModel) -> None:
    async with running(embedder=fake_embedder(model, names="small,org/small")) as gateway:
        _, text, _ = await gateway.get("/v1/models")
        assert [item["id"] for item in json.loads(text)["data"]] == ["demo", "small", "org/small"]
        status, text, _ = await gateway.get("/v1/models/org%2Fsmall")
        assert (status, json.loads(text)["id"]) == (200, "org/small")
        for name in ("small", "org/small"):
            status, body, _ = await gateway.post(PATH, {"model": name, "input": "a"})
            assert (status, body["model"]) == (200, name)


async def test_without_the_extra_the_answer_says_what_to_install() -> None:
    async with running() as gateway:
        status, body = await embed(gateway, "a")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "pip install -e '.[semantic]'" in body["error"]["message"]
        _, text, _ = await gateway.get("/v1/models")
        assert [item["id"] for item in json.loads(text)["data"]] == ["demo"]


async def test_a_model_that_fails_is_a_500_in_the_shape_of_the_api(model: FakeTextModel) -> None:
    model.broken = {ord("!")}
    async with running(embedder=fake_embedder(model)) as gateway:
        status, body = await embed(gateway, ["fine", "!"])
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert (await embed(gateway, "fine"))[0] == 200


async def test_a_full_queue_is_a_429_with_a_time_to_retry(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=3, max_request_tokens=3, max_waiting_tokens=3)
    model.hold()
    async with running(embedder=embedder) as gateway, asyncio.TaskGroup() as group:
        running_one = group.create_task(embed(gateway, "a"))
        assert await asyncio.to_thread(model.begun.acquire, timeout=LIMIT_S)
        waiting = group.create_task(embed(gateway, "b"))
        await until(lambda: embedder.waiting_tokens == 3)
        status, body, headers = await gateway.post(PATH, {"model": NAME, "input": "c"})
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) >= 1
        model.go_on()
        assert [(await running_one)[0], (await waiting)[0]] == [200, 200]


async def test_nothing_is_computed_for_a_client_that_left(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=3)
    model.hold()
    async with running(embedder=embedder) as gateway:
        task = asyncio.create_task(embed(gateway, ["a", "b", "c"]))
        assert await asyncio.to_thread(model.begun.acquire, timeout=LIMIT_S)
        assert embedder.waiting_tokens == 6
        task.cancel()
        await until(lambda: embedder.waiting_tokens == 0)
        model.go_on()
        assert (await embed(gateway, "d"))[0] == 200
        assert model.batches == [[(1, ord("a"), 2)], [(1, ord("d"), 2)]]


async def test_the_time_of_a_request_is_limited(model: FakeTextModel) -> None:
    model.hold()
    async with running(embedder=fake_embedder(model), server=ServerSettings(request_timeout_s=0.05)) as gateway:
        status, body = await embed(gateway, "a")
        assert (status, body["error"]["code"]) == (503, "server_is_overloaded")


async def test_tokens_are_counted_for_the_tenant_whose_key_it_is(model: FakeTextModel) -> None:
    north = TenantSettings(name="north", keys=("the-key-of-north",))
    auth = AuthSettings(admin_keys=("the-admin-key",))
    async with running(embedder=fake_embedder(model), tenants=(north,), auth=auth) as gateway:
        assert (await embed(gateway, "a"))[0] == 401
        headers = {"Authorization": "Bearer the-key-of-north"}
        status, _, _ = await gateway.post(PATH, {"model": NAME, "input": ["a", "bc"]}, headers=headers)
        assert status == 200
        stats = json.loads((await gateway.get("/admin/stats", "the-admin-key"))[1])
        assert stats["tenants"]["north"]["embedded_tokens"] == 7
        assert stats["embeddings"]["texts"] == 2
        assert stats["embeddings"]["tokens"] == 7
        metrics = (await gateway.get("/metrics"))[1]
        assert f'kvasir_embedded_tokens_total{{model="{NAME}",tenant="north"}} 7.0' in metrics
        assert 'kvasir_embeddings{figure="batches"} 1.0' in metrics
