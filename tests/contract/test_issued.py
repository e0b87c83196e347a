"""Tenants and keys that admins made: the same promises over a file and a real Redis."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.config import TenantSettings
from gateway.errors import ConflictError, NotFoundError, RedisDownError
from gateway.issued import directory as directories
from gateway.issued.base import digest_of
from gateway.issued.directory import Directory
from gateway.issued.stores import FILE, KEY, FileIssued, IssuedStore, RedisIssued
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.clock import Clock
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

NORTH = TenantSettings(name="north", keys=("north-key-1",))


@pytest.fixture(params=["file", "redis"])
def store(request: pytest.FixtureRequest, redis: Redis, tmp_path: Path) -> IssuedStore:
    if request.param == "file":
        return FileIssued(tmp_path / "data")
    return RedisIssued(RedisCalls(redis, 5.0))


@pytest.fixture
def clock() -> Clock:
    return Clock(1_700_000_000.0)


def directory(store: IssuedStore, clock: Clock) -> Directory:
    return Directory(store, (NORTH,), clock)


async def test_what_one_makes_another_one_has_after_a_look(store: IssuedStore, clock: Clock) -> None:
    here, there = directory(store, clock), directory(store, clock)
    await here.make_tenant({"name": "south", "weight": 2.0, "requests_per_minute": 5}, ("gpt-*",))
    secret, key = await here.make_key("south", "laptop", None, ())
    assert await there.refresh()
    assert there.find(digest_of(secret)) == key == here.find(digest_of(secret))
    (south,) = there.tenants()[1:]
    assert (south.weight, south.requests_per_minute, south.keys) == (2.0, 5, ())
    assert there.allows("south", None, "gpt-5")
    assert not there.allows("south", key, "demo")
    assert await there.remove_tenant("south") == 1
    assert there.find(digest_of(secret)) is None
    assert await here.refresh()
    assert here.find(digest_of(secret)) is None
    assert [one.name for one in here.tenants()] == ["north"]


async def test_changes_at_the_same_time_lose_nothing(store: IssuedStore, clock: Clock) -> None:
    several = [directory(store, clock) for _ in range(3)]
    made = await asyncio.gather(*(one.make_key("north", str(n), None, ()) for n, one in enumerate(several)))
    assert await several[0].refresh()
    assert all(several[0].find(digest_of(secret)) == key for secret, key in made)


async def test_the_key_itself_is_kept_nowhere(store: IssuedStore, clock: Clock, redis: Redis, tmp_path: Path) -> None:
    secret, key = await directory(store, clock).make_key("north", "laptop", None, ())
    if isinstance(store, FileIssued):
        path = tmp_path / "data" / FILE
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        kept = path.read_bytes()
    else:
        fields = await redis.hgetall(KEY)  # type: ignore[misc]
        kept = b"".join(item for pair in fields.items() for item in pair)
        assert await redis.ttl(KEY) == -1
    assert secret.encode() not in kept
    assert key.digest.encode() in kept
    assert secret.startswith("kv-")
    assert len(secret) > 40


async def test_a_key_ends_at_its_time(store: IssuedStore, clock: Clock) -> None:
    here = directory(store, clock)
    secret, _ = await here.make_key("north", "laptop", clock() + 10, ())
    assert here.find(digest_of(secret)) is not None
    clock.now_s += 10
    assert here.find(digest_of(secret)) is None


async def test_there_is_a_bound_and_what_has_expired_makes_room(
    store: IssuedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "MAX_KEYS", 2)
    here = directory(store, clock)
    await here.make_key("north", "1", clock() + 10, ())
    await here.make_key("north", "2", None, ())
    with pytest.raises(ConflictError):
        await here.make_key("north", "3", None, ())
    clock.now_s += 10
    await here.make_key("north", "4", None, ())
    assert sorted(key.name for key in here.issued.keys.values()) == ["2", "4"]


async def test_the_file_of_settings_wins(store: IssuedStore, clock: Clock) -> None:
    here = directory(store, clock)
    with pytest.raises(ConflictError):
        await here.make_tenant({"name": "north"}, ())
    with pytest.raises(ConflictError):
        await here.remove_tenant("north")
    with pytest.raises(NotFoundError):
        await here.make_key("nobody", "laptop", None, ())
    await here.make_tenant({"name": "south"}, ("demo",))
    secret, _ = await here.make_key("south", "laptop", None, ())
    here.replace((NORTH, TenantSettings(name="south", keys=("south-key-1",), weight=3.0)))
    assert [one.weight for one in here.tenants()] == [1.0, 3.0]
    assert here.allows("south", here.find(digest_of(secret)), "gpt-5")
    here.replace(())
    assert here.find(digest_of(secret)) is None, "an open server has no keys"
    with pytest.raises(ConflictError):
        await here.make_tenant({"name": "east"}, ())


async def test_a_session_that_one_ends_is_over_for_all_until_it_would_have_been(
    store: IssuedStore, clock: Clock
) -> None:
    here, there = directory(store, clock), directory(store, clock)
    changes: list[str] = []
    there.on_change = lambda: changes.append("tenants or keys")
    await asyncio.gather(here.end_session("a", 1_700_000_100), there.end_session("b", 1_700_000_200))
    for one in (here, there, directory(store, clock)):
        assert await one.refresh()
        assert [one.has_ended(session) for session in "abc"] == [True, True, False]
    assert changes == []
    clock.now_s += 150
    await there.end_session("c", 1_700_000_300)
    assert await here.refresh()
    assert sorted(here.issued.ended) == ["b", "c"], "what would be over by itself is kept no longer"


async def test_of_many_ended_sessions_those_are_kept_that_would_be_over_last(
    store: IssuedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "MAX_ENDED", 2)
    here = directory(store, clock)
    for number in (3, 1, 2):
        await here.end_session(str(number), 1_700_000_100 + number)
    assert sorted(here.issued.ended) == ["2", "3"]


async def test_a_session_that_is_ended_without_redis_is_over_here_and_elsewhere_once_it_is_back(
    tmp_path: Path, clock: Clock
) -> None:
    with RedisProcess(tmp_path) as process:
        async with Redis(unix_socket_path=str(process.socket)) as client:
            here, there = (directory(RedisIssued(RedisCalls(client, 5.0)), clock) for _ in range(2))
            process.kill()
            await here.end_session("a", 1_700_000_100)
            assert (here.has_ended("a"), there.has_ended("a")) == (True, False)
            process.start()
            await until(here.refresh)
            assert await there.refresh()
            assert there.has_ended("a")


async def test_without_redis_the_last_known_goes_on_and_nothing_changes(tmp_path: Path, clock: Clock) -> None:
    with RedisProcess(tmp_path) as process:
        async with Redis(unix_socket_path=str(process.socket)) as client:
            here = directory(RedisIssued(RedisCalls(client, 5.0)), clock)
            secret, key = await here.make_key("north", "laptop", None, ())
            process.kill()
            assert not await here.refresh()
            assert here.stale
            assert here.find(digest_of(secret)) == key
            with pytest.raises(RedisDownError):
                await here.remove_key(key.id)
            assert here.find(digest_of(secret)) == key
