"""Cached contents, in memory and shared over Redis, with a clock that the test turns."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from redis.asyncio import Redis

from gateway.api.gemini.content_store import ContentStore, quota_of
from gateway.config import GeminiSettings
from gateway.errors import OverloadedError, QuotaError
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, close, connect
from gateway.types import CachedContent
from tests.fakes.clock import Clock
from tests.fakes.redis_process import RedisProcess
from tests.fakes.tuned import tuned

LIMIT_S = 30.0
LIMITS = tuned(GeminiSettings, max_contents=3, max_bytes=1024)


@pytest.fixture
def clock() -> Clock:
    """Starts when it is: what lies in Redis also ends by Redis's own clock."""
    return Clock(float(int(time.time())))


def content(clock: Clock, name: str, body: bytes = b'{"contents":[]}', *, ttl_s: float = 60.0) -> CachedContent:
    now = clock()
    return CachedContent(name, "org/demo", body, len(body), 17, now, now, now + ttl_s, "Ümlaut\u2028")


def make(clock: Clock, redis: Redis | None, timeout_s: float = LIMIT_S) -> ContentStore:
    quota, breaker = quota_of(LIMITS), RedisBreaker(retry_s=1.0, clock=clock)
    if redis is None:
        return ContentStore(LIMITS, clock)
    shared = RedisBytes(RedisCalls(redis, timeout_s, breaker), "contents", quota, clock)
    return ContentStore(LIMITS, clock, shared)


@pytest.fixture(params=["memory", "shared"])
def store(request: pytest.FixtureRequest, redis: Redis, clock: Clock) -> ContentStore:
    return make(clock, None if request.param == "memory" else redis)


async def test_what_is_put_is_found_by_its_owner_and_nobody_else(store: ContentStore, clock: Clock) -> None:
    one, two = content(clock, "one", bytes(range(256))), content(clock, "two")
    await store.put("north", one)
    await store.put("north", two)
    assert await store.find("north", "one") == one
    assert await store.find("north", "two") == two
    assert await store.find("north", "three") is None
    assert await store.find("south", "one") is None
    assert await store.all_of("south") == []
    assert await store.extend("south", one, clock() + 9) is None
    assert not await store.delete("south", "one")
    assert await store.find("north", "one") == one


async def test_a_list_has_everything_but_the_bodies(store: ContentStore, clock: Clock) -> None:
    kept = [content(clock, "one"), content(clock, "two")]
    for each in kept:
        await store.put("north", each)
    listed = sorted(await store.all_of("north"), key=lambda one: one.name)
    assert listed == [replace(one, body=b"") for one in kept]


async def test_what_is_past_its_end_is_gone_at_once(store: ContentStore, clock: Clock) -> None:
    one = content(clock, "one", ttl_s=60.5)
    await store.put("north", one)  # by Redis's own clock it lasts as long as the test
    clock.now_s += 60.499
    assert await store.find("north", "one") is not None
    clock.now_s += 0.001
    assert await store.find("north", "one") is None
    assert await store.all_of("north") == []
    assert await store.extend("north", one, clock() + 60) is None
    assert not await store.delete("north", "one")


async def test_an_end_can_be_moved_both_ways(store: ContentStore, clock: Clock) -> None:
    one = content(clock, "one", ttl_s=60)
    await store.put("north", one)
    clock.now_s += 1
    later = await store.extend("north", one, clock() + 3600)
    assert later == replace(one, body=b"", updated_s=clock(), expires_s=clock() + 3600)
    clock.now_s += 100
    assert await store.find("north", "one") == replace(later, body=one.body)
    assert await store.extend("north", one, clock() + 5) is not None
    clock.now_s += 5
    assert await store.find("north", "one") is None


async def test_what_is_deleted_is_gone_and_its_room_is_free(store: ContentStore, clock: Clock) -> None:
    for name in ("one", "two", "three"):
        await store.put("north", content(clock, name))
    assert await store.delete("north", "two")
    assert not await store.delete("north", "two")
    assert await store.find("north", "two") is None
    assert {one.name for one in await store.all_of("north")} == {"one", "three"}
    await store.put("north", content(clock, "four"))


async def test_a_tenant_has_so_many_contents_and_so_many_bytes(store: ContentStore, clock: Clock) -> None:
    for name in ("one", "two", "three"):
        await store.put("north", content(clock, name, ttl_s=10))
    with pytest.raises(QuotaError, match="3 cached contents"):
        await store.put("north", content(clock, "four"))
    await store.put("south", content(clock, "four", b"x" * 1000))
    with pytest.raises(QuotaError, match=r"gemini\.max_bytes"):
        await store.put("south", content(clock, "five", b"x" * 25))
    await store.put("south", content(clock, "four", b"x" * 1024))
    clock.now_s += 10
    await store.put("north", content(clock, "four"))
    assert [one.name for one in await store.all_of("north")] == ["four"]


# -- what several gateways share --------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two gateways over one Redis."""

    here: ContentStore
    there: ContentStore
    redis: RedisProcess
    clock: Clock


@pytest.fixture
async def pair(own_redis: RedisProcess, clock: Clock) -> AsyncIterator[Pair]:
    clients = [connect(own_redis.url, 1.0) for _ in range(2)]
    stores = [make(clock, client, timeout_s=1.0) for client in clients]
    try:
        yield Pair(stores[0], stores[1], own_redis, clock)
    finally:
        for client in clients:
            await close(client)


async def test_gateways_share_what_one_of_them_was_given(pair: Pair) -> None:
    one = content(pair.clock, "one")
    await pair.here.put("north", one)
    assert await pair.there.find("north", "one") == one
    extended = await pair.there.extend("north", one, pair.clock() + 100)
    assert extended is not None
    assert await pair.here.find("north", "one") == replace(extended, body=one.body)
    assert await pair.there.delete("north", "one")
    assert await pair.here.find("north", "one") is None
    assert await pair.here.all_of("north") == []


async def test_while_redis_is_away_copies_are_used_and_nothing_is_changed(pair: Pair) -> None:
    one, two = content(pair.clock, "one"), content(pair.clock, "two")
    await pair.here.put("north", one)
    await pair.there.put("north", two)
    assert await pair.here.find("north", "two") == two
    pair.redis.kill()
    assert [await pair.here.find("north", name) for name in ("one", "two")] == [one, two]
    for change in (
        pair.here.extend("north", one, pair.clock() + 9),
        pair.here.delete("north", "one"),
        pair.here.put("north", content(pair.clock, "three")),
        pair.there.find("north", "one"),  # it never saw it, and cannot know
    ):
        with pytest.raises(OverloadedError) as refused:
            await change
        assert refused.value.retry_after_s == 1.0


async def test_what_was_deleted_elsewhere_is_not_found_in_a_copy(pair: Pair) -> None:
    await pair.here.put("north", content(pair.clock, "one"))
    assert await pair.there.delete("north", "one")
    assert await pair.here.find("north", "one") is None
    pair.redis.kill()
    with pytest.raises(OverloadedError):
        await pair.here.find("north", "one")
