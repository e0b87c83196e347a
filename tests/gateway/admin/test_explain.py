"""POST /admin/explain over all stages of a gateway."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from gateway import cli
from gateway.config import AuthSettings, TenantSettings
from tests.fakes import tokenisers
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess
from tests.fakes.small_engine import small_engine
from tests.fakes.upstream import said, upstream
from tests.fakes.whole import Whole, whole

BOOK = " ".join(tokenisers.sentences(60, seed=5))


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return {"model": "demo", "messages": messages, **more}


async def post(session: aiohttp.ClientSession, gateway: Whole, body: Any) -> tuple[int, Any]:
    async with session.post(gateway.url + "/admin/explain", json=body) as answer:
        return answer.status, await answer.json()


SAME_TEXT = {
    "/v1/chat/completions": lambda date: chat(f"It is {date}. {BOOK}", "hello"),
    "/v1/messages": lambda date: {
        "model": "demo",
        "max_tokens": 9,
        "system": f"It is {date}. {BOOK}",
        "messages": [{"role": "user", "content": "hello"}],
    },
    "/v1/responses": lambda date: {"model": "demo", "instructions": f"It is {date}. {BOOK}", "input": "hello"},
    "/v1beta/models/demo:generateContent": lambda date: {
        "systemInstruction": {"parts": [{"text": f"It is {date}. {BOOK}"}]},
        "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
    },
}


@pytest.mark.parametrize("endpoint", SAME_TEXT)
async def test_pasted_requests_of_each_dialect_are_compared_to_the_token(endpoint: str) -> None:
    make = SAME_TEXT[endpoint]
    async with aiohttp.ClientSession() as session, whole() as gateway:
        body = {"a": make("2026-11-23"), "b": make("2026-11-24"), "endpoint": endpoint}
        status, told = await post(session, gateway, body)
    assert status == 200, told
    assert told["verdict"] == "volatile"
    differs = told["differs"]
    assert (differs["segment"], differs["char"], differs["message"]) == (0, len("It is 2026-11-2"), 0)
    assert "2026-11-23" in differs["a"]
    assert "2026-11-24" in differs["b"]
    tokens = sum(part["tokens"] for part in told["b"])
    assert 0 < told["equal_tokens"] < 30 < told["computed_again_tokens"] <= tokens
    assert "last message" in told["advice"]


async def test_a_request_that_missed_is_told_why_from_digests_alone(own_redis: RedisProcess) -> None:
    async with (
        aiohttp.ClientSession() as session,
        whole(redis_url=own_redis.url) as gateway,
        Redis.from_url(own_redis.url) as redis,
    ):

        async def asked(*contents: str) -> Any:
            body = chat(*contents)
            _, headers = await gateway.ask(*body["messages"])
            status, told = await post(session, gateway, {"id": headers["x-request-id"]})
            assert status == 200, told
            return told

        first = await asked(f"It is 2026-11-23 09:00. {BOOK}", "What is it about?")
        assert (first["verdict"], first["before"]) == ("never_seen", None)
        second = await asked(f"It is 2026-11-23 09:01. {BOOK}", "What is it about?")
        assert (second["verdict"], second["differs"]["segment"]) == ("volatile", 0)
        assert second["differs"]["a"] is None
        assert second["computed_again_tokens"] > 100
        assert second["per_day"]["requests"] > 0
        third = await asked(f"It is 2026-11-23 09:01. {BOOK}", "And who wrote it?")
        assert third["verdict"] == "new_question"

        async def everything() -> bytes:
            found = b""
            for key in await redis.keys("*"):
                kind = (await redis.type(key)).decode()
                found += key
                if kind == "list":
                    found += b"".join(await redis.lrange(key, 0, -1))
                elif kind == "string":
                    found += await redis.get(key)
                elif kind == "hash":
                    found += b"".join([part for item in (await redis.hgetall(key)).items() for part in item])
            return found

        kept = await everything()
        assert b'"volatile"' not in kept
        assert b"segments" in kept
        sample = random.Random(1).sample(BOOK.split(), 20)
        assert not [word for word in sample if len(word) > 6 and word.encode() in kept]


async def test_an_evicted_prefix_is_told_with_the_time_and_the_request_that_took_its_place() -> None:
    files = tokenisers.qwen()
    vocab = tokenisers.hello(files).vocab_size
    tenants = tuple(TenantSettings(name=name, keys=(f"{name}-key-123",)) for name in ("north", "south"))
    sections = {"tenants": tenants, "auth": AuthSettings(admin_keys=("admin-key-123",))}
    books = [" ".join(tokenisers.sentences(120, seed=seed)) for seed in (21, 22)]
    async with (
        small_engine(num_blocks=40, files=files, vocab_size=vocab) as engine,
        aiohttp.ClientSession(headers={"Authorization": "Bearer admin-key-123"}) as session,
        whole(engines=0, sections=sections) as gateway,
    ):
        gateway.gateway.registry.add(engine.url)
        await gateway.gateway.registry.wait_joined()

        async def asked(tenant: str, book: str) -> str:
            client = gateway.client.with_options(api_key=f"{tenant}-key-123")
            raw = await client.chat.completions.with_raw_response.create(
                model="small", max_tokens=1, messages=[{"role": "user", "content": book}]
            )
            return raw.headers["x-request-id"]

        began_s = time.time()
        await asked("north", books[0])
        taker = await asked("south", books[1])
        again = await asked("north", books[0])
        status, told = await post(session, gateway, {"id": again})
        async with session.get(f"{gateway.url}/admin/requests/{again}") as answer:
            evicted = (await answer.json())["evicted"]
        assert engine.pool.evictions > 0
    assert (status, told["verdict"]) == (200, "evicted"), told
    assert (evicted["tenant"], evicted["id"]) == ("south", taker)
    assert began_s <= evicted["at_s"] <= time.time()
    assert f"to the request {taker} of south" in told["text"]
    assert time.strftime("%H:%M:%S UTC", time.gmtime(evicted["at_s"])) in told["text"]


async def test_a_request_that_an_upstream_of_the_same_api_answered_is_explained_by_its_parts() -> None:
    message = {"index": 0, "message": {"role": "assistant", "content": "No."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 2000, "completion_tokens": 3, "total_tokens": 2003}
    base = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "up-1"}
    async with (
        upstream(said({**base, "choices": [message], "usage": usage})) as stub,
        running(FakePipeline(), upstreams=(stub.settings("up-1"),)) as gateway,
    ):

        async def asked(system: str, question: str) -> Any:
            body = chat(system, question, model="up-1")
            status, text, headers = await gateway.post("/v1/chat/completions", body)
            assert status == 200, text
            status, told, _ = await gateway.post("/admin/explain", {"id": headers["x-kvasir-request-id"]})
            assert status == 200, told
            return told

        first = await asked(f"It is 09:00. {BOOK}", "What is it about?")
        assert (first["verdict"], len(first["b"])) == ("never_seen", 2)
        assert sum(part["tokens"] for part in first["b"]) == pytest.approx(2000, abs=2)
        assert (await asked(f"It is 09:01. {BOOK}", "What is it about?"))["verdict"] == "volatile"
        again = await asked(f"It is 09:01. {BOOK}", "What is it about?")
        assert (again["verdict"], "which ones an upstream keeps" in again["text"]) == ("unknown", True)
        _, text, _ = await gateway.get("/admin/requests")
        _, life, _ = await gateway.get(f"/admin/requests/{json.loads(text)['requests'][0]['row']}")
        assert "segments" in life
        assert not [word for word in BOOK.split() if len(word) > 6 and word in life]


REFUSED: list[Any] = [
    pytest.param({}, 400, "`id`", id="nothing"),
    pytest.param({"id": "req_1", "a": {}}, 400, "alone", id="both"),
    pytest.param({"id": "req_1"}, 404, "latest 2,000", id="unknown id"),
    pytest.param({"a": {}, "b": 5}, 400, "object", id="no object"),
    pytest.param({"a": chat("x", "y"), "b": {"model": "demo"}}, 400, "messages", id="no messages"),
    pytest.param({"a": chat("x"), "b": chat("x"), "endpoint": "/v1/files"}, 400, "endpoint", id="another route"),
    pytest.param({"a": chat("x", model="who"), "b": chat("x")}, 404, "who", id="unknown model"),
    pytest.param({"a": chat("x"), "b": chat("x", max_tokens=-1)}, 400, "b.max_tokens", id="bad field"),
]


@pytest.mark.parametrize(("body", "status", "says"), REFUSED)
async def test_what_cannot_be_explained_is_refused_in_words(body: dict[str, Any], status: int, says: str) -> None:
    async with aiohttp.ClientSession() as session, whole() as gateway:
        got, told = await post(session, gateway, body)
    assert (got, says in json.dumps(told["error"])) == (status, True), told


async def test_a_huge_and_a_deep_body_are_refused_or_compared() -> None:
    async with aiohttp.ClientSession() as session, whole() as gateway:
        deep = '{"a":' + '{"x":' * 300 + "1" + "}" * 300 + "}"
        async with session.post(gateway.url + "/admin/explain", data=deep) as answer:
            assert answer.status == 400
        text = "word " * 30_000
        status, told = await post(session, gateway, {"a": chat(text, "a"), "b": chat(text, "b")})
        assert (status, told["verdict"], told["equal_tokens"] > 30_000) == (200, "new_question", True)
        assert (await post(session, gateway, {"a": chat("x", "a"), "b": chat("x", "b")}))[0] == 200


async def test_the_command_shows_both_requests_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("one.json", "other.json", "broken.json")]
    for file, text in zip(files, ("Be brief.", "Be \x1b[31mbrief."), strict=False):
        file.write_text(json.dumps(chat(f"{BOOK} {text}", "hello")))
    files[2].write_text("{")
    async with whole() as gateway:
        monkeypatch.setenv("KVASIR_URL", gateway.url)

        async def kvasir(*arguments: str) -> int:
            return await asyncio.to_thread(cli.main, ["explain", *arguments])

        assert await kvasir(str(files[0]), str(files[1])) == 0
        shown = capsys.readouterr().out
        assert "changed: The system message (number 0) was edited" in shown
        assert "advice: Text that is edited belongs behind text that is not" in shown
        assert "\x1b" not in shown
        assert await kvasir(str(files[0]), str(files[2])) == 2
        assert "is no JSON" in capsys.readouterr().err
        assert await kvasir(str(files[0])) == 2
        assert await kvasir("--id", "req_0") == 1
        assert "latest 2,000" in capsys.readouterr().err
