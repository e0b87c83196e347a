"""Remembered answers as operators see them, over the real response cache and HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from gateway.config import AuthSettings, ResponseCacheSettings, TenantSettings
from gateway.responses.entries import Entry
from gateway.responses.entry_stores import MemoryEntries, RedisEntries, RemovalEpoch
from gateway.responses.recording import Form, UpstreamRecording, encode_upstream
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.storage.redis_calls import RedisCalls, connect
from gateway.types import CallDelta
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakePipeline
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

LIMIT_S = 30.0
CHAT = "/v1/chat/completions"
TENANTS = (TenantSettings(name="north", keys=("north-key-1",)), TenantSettings(name="south", keys=("south-key-1",)))


class Asking:
    def __init__(self, gateway: Gateway, clock: list[float], answers: StoredAnswers) -> None:
        self.gateway = gateway
        self.clock = clock
        self.answers = answers

    async def ask(self, question: str, tenant: str = "north") -> tuple[str, str]:
        """What the cache had for it, and the answer's id."""
        body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
        headers = {"Authorization": f"Bearer {tenant}-key-1"}
        status, _, told = await self.gateway.post(CHAT, body, headers=headers)
        assert status == 200
        return told["x-kvasir-cache"].partition(";")[0], told["x-kvasir-cache-key"]

    async def get(self, path: str) -> Any:
        status, text, _ = await self.gateway.get(f"/admin/cache{path}", "admin-key-1")
        assert status == 200, text
        return json.loads(text)

    async def invalidate(self, **chosen: Any) -> int:
        headers = {"Authorization": "Bearer admin-key-1"}
        path = "/admin/cache/invalidate"
        _, shown, _ = await self.gateway.post(path, chosen, headers=headers)
        _, done, _ = await self.gateway.post(path, {**chosen, "confirm": shown["confirm"]}, headers=headers)
        assert done["removed"] == shown["would_remove"]
        return int(done["removed"])


@asynccontextmanager
async def asking(*pieces: Any, redis: Redis | None = None, clock: list[float] | None = None) -> AsyncIterator[Asking]:
    """A gateway with a response cache of its own, over this Redis if there is one."""
    clock, settings = clock or [time.time()], ResponseCacheSettings()

    def now() -> float:
        return clock[0]

    memory = MemoryEntries(1 << 20, now)
    shared = None if redis is None else RedisEntries(RedisCalls(redis, LIMIT_S), settings, now)
    epoch = None if redis is None else RemovalEpoch(RedisCalls(redis, LIMIT_S))
    answers = StoredAnswers(memory, shared, epoch, memory_s=settings.memory_s, every_s=settings.removals_s)
    cache = ResponseCache(settings, {}, answers, None, now)
    pipeline = FakePipeline(pieces or ("Hello", " world"), responses=cache)
    auth = AuthSettings(admin_keys=("admin-key-1",), admin_content=True)
    async with running(pipeline, auth=auth, tenants=TENANTS, answers=answers, now=now) as gateway:
        yield Asking(gateway, clock, answers)


async def test_what_is_remembered_is_listed_by_the_id_of_its_headers_and_counted() -> None:
    async with asking() as admin:
        outcome, first = await admin.ask("one")
        admin.clock[0] += 1
        _, second = await admin.ask("two", "south")
        assert (outcome, await admin.ask("one")) == ("miss", ("exact", first))
        listed = (await admin.get(""))["data"]
        assert [(one["id"], one["tenant"], one["model"]) for one in listed] == [
            (second, "south", "demo"),
            (first, "north", "demo"),
        ]
        assert [one["age_s"] for one in listed] == [0, 1]
        stats = await admin.get("/stats?tenant=south")
        assert stats["total"] == {"entries": 1, "bytes": listed[0]["bytes"], "oldest_s": 0.0}


async def test_what_an_answer_says_is_shown_whole() -> None:
    call = (CallDelta(0, "look", '{"a":'), CallDelta(0, "", "1}"), CallDelta(1, "go"))
    async with asking("Let me ", "see.", *call) as admin:
        _, name = await admin.ask("one")
        told = await admin.get(f"/{name}?content=true")
    assert told["content"] == {
        "text": "Let me see.",
        "calls": [{"name": "look", "arguments": '{"a":1}'}, {"name": "go", "arguments": ""}],
    }
    assert (told["prompt_tokens"], told["completion_tokens"], told["finish"]) == (40, 5, "stop")


async def test_what_was_removed_is_generated_again_and_nothing_else() -> None:
    async with asking() as admin:
        _, name = await admin.ask("one")
        for question, tenant in (("two", "north"), ("one", "south")):
            await admin.ask(question, tenant)
        assert await admin.invalidate(id=name) == 1
        assert [(await admin.ask(*one))[0] for one in (("two",), ("one", "south"), ("one",))] == [
            "exact",
            "exact",
            "miss",
        ]
        admin.clock[0] += 10
        assert await admin.invalidate(tenant="north", older_than_s=5) == 2
        assert [(await admin.ask(*one))[0] for one in (("one", "south"), ("one",), ("two",))] == [
            "exact",
            "miss",
            "miss",
        ]
        assert await admin.invalidate(everything=True) == 3


async def test_an_answer_past_its_time_is_neither_listed_nor_found() -> None:
    async with asking() as admin:
        await admin.ask("one")
        admin.clock[0] += ResponseCacheSettings().ttl_s
        assert (await admin.get(""))["data"] == []
        assert await admin.invalidate(everything=True) == 0


async def test_what_one_gateway_remembers_another_one_lists_shows_and_removes(redis_url: str) -> None:
    redis, clock = connect(redis_url, LIMIT_S), [time.time()]
    async with asking(redis=redis, clock=clock) as here, asking(redis=redis, clock=clock) as there:
        _, name = await here.ask("one")
        _, other = await there.ask("two", "south")
        await until(lambda: there_is(redis, name))  # a client has its answer before Redis has
        await until(lambda: there_is(redis, other, "south"))
        assert {one["tenant"] for one in (await here.get(""))["data"]} == {"north", "south"}
        assert (await there.get(f"/{name}?content=true"))["content"]["text"] == "Hello world"
        assert await there.invalidate(id=name) == 1
        assert await there.ask("one") == ("miss", name)
        await until(lambda: there_is(redis, name))
        clock[0] += 1
        assert await there.invalidate(id=name) == 1
        await here.answers.look()
        assert (await here.ask("one"))[0] == "miss", "it is in no gateway's memory any more"
        assert (await here.ask("two", "south"))[0] == "exact"
    await redis.aclose()


async def there_is(redis: Redis, name: str, tenant: str = "north") -> bool:
    return await redis.exists(f"kvasir:{{answers:tenant:{tenant}}}:{name}") == 1


async def test_what_cannot_be_removed_everywhere_is_not_said_to_be(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    async with asking(redis=redis) as admin:
        await admin.ask("one")
        own_redis.kill()
        for path in ("", "/stats"):
            assert (await admin.gateway.get(f"/admin/cache{path}", "admin-key-1"))[0] == 503
        assert (await admin.ask("one"))[0] == "exact"
    await redis.aclose()


async def test_what_an_upstream_wrote_can_be_looked_at_and_what_cannot_be_read_is_not_there() -> None:
    now = time.time()
    memory = MemoryEntries(1 << 20, lambda: now)
    auth = AuthSettings(admin_keys=("admin-key-1",), admin_content=True)
    told = encode_upstream(
        UpstreamRecording(
            Form(stream=False, usage=False), "application/json", "up-1", (100, 7), 20.0, [b'{"a":', b"1}"]
        )
    )
    for number, body in enumerate((told, b"[]")):
        key = bytes(31) + bytes((number,))
        memory.set(Entry(key, f"{number}" * 32, "tenant:north", "up-1", now, now + 60, body))
    async with running(FakePipeline(), auth=auth, answers=StoredAnswers(memory, None), now=lambda: now) as gateway:
        status, text, _ = await gateway.get(f"/admin/cache/{'0' * 32}?content=true", "admin-key-1")
        shown = json.loads(text)
        assert (status, shown["prompt_tokens"], shown["completion_tokens"]) == (200, 100, 7)
        assert (shown["finish"], shown["tool_calls"], shown["content"]["text"]) == (None, None, '{"a":1}')
        status, _, _ = await gateway.get(f"/admin/cache/{'1' * 32}", "admin-key-1")
        assert status == 404
