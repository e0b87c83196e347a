"""The publisher: Redis is kept equal to the table, and costs the engine nothing when it is away."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from engine.protocol import ENGINES_KEY, BlockEvents, Hello, announcement_key, blocks_key, split_digests
from engine.publish import VERSION_FIELD, Publisher, ResidencyTable
from tests.fakes.fake_engine import make_hello
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

LIMIT_S = 30.0
BEAT_S = 0.05


def run_of(name: int, blocks: int) -> bytes:
    return b"".join(name.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(blocks))


class Published:
    """A publisher, its table, and what a reader sees in Redis."""

    def __init__(self, redis: Redis, lease_s: float = 30.0) -> None:
        self.hello: Hello = make_hello("m")
        self.redis = redis
        self.table = ResidencyTable()
        self.publisher = Publisher(redis, self.table, self.hello, "http://here:1", heartbeat_s=BEAT_S, lease_s=lease_s)
        self.key = blocks_key("m", self.hello.incarnation)

    def change(self, events: BlockEvents) -> None:
        self.table.apply(events)
        self.publisher.publish(events)

    async def settled(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.publisher.settled()

    async def in_redis(self) -> set[bytes]:
        return set(await self.redis.hkeys(self.key)) - {VERSION_FIELD}

    async def until_equal(self) -> None:
        async def equal() -> bool:
            return self.publisher.up and await self.in_redis() == set(self.table)

        await until(equal)


@asynccontextmanager
async def publishing(url: str, lease_s: float = 30.0) -> AsyncIterator[Published]:
    redis: Redis = Redis.from_url(url, retry=Retry(NoBackoff(), 0))
    published = Published(redis, lease_s)
    published.publisher.start()
    try:
        yield published
    finally:
        await published.publisher.close()
        await redis.aclose()


async def test_an_engine_announces_itself_with_its_url(redis_url: str) -> None:
    async with publishing(redis_url) as published:
        await published.settled()
        announcement = json.loads(await published.redis.get(announcement_key(published.hello.incarnation)))
        assert announcement.pop("url") == "http://here:1"
        assert Hello.from_json(announcement) == published.hello
        assert await published.redis.zscore(ENGINES_KEY, published.hello.incarnation) is not None


async def test_stored_and_removed_blocks_are_seen_with_their_tier(redis_url: str) -> None:
    async with publishing(redis_url) as published:
        published.change(BlockEvents(stored=run_of(1, 5000)))
        await published.settled()
        assert await published.in_redis() == set(published.table)
        assert await published.redis.hget(published.key, run_of(1, 1)) == b"g"  # type: ignore[arg-type]
        published.change(BlockEvents(removed=run_of(1, 5000)[16 * 2000 :]))
        await published.settled()
        assert len(await published.in_redis()) == 2000


async def test_a_block_that_moves_is_in_redis_with_its_new_tier(redis_url: str) -> None:
    async with publishing(redis_url) as published:
        published.change(BlockEvents(stored=run_of(1, 10)))
        await published.settled()
        published.change(BlockEvents(stored=run_of(1, 10)[16 * 4 :], tier="disk"))
        published.change(BlockEvents(stored=run_of(1, 10)[16 * 4 : 16 * 7], tier="host"))
        await published.settled()
        codes = await published.redis.hmget(published.key, *split_digests(run_of(1, 10)))
        assert codes == [b"g"] * 4 + [b"h"] * 3 + [b"d"] * 3
        await published.redis.unlink(published.key)
        await published.until_equal()  # now from the table
        codes = await published.redis.hmget(published.key, *split_digests(run_of(1, 10)))
        assert codes == [b"g"] * 4 + [b"h"] * 3 + [b"d"] * 3


async def test_data_that_vanished_is_missed_also_when_something_is_written_before_the_next_heartbeat(
    redis_url: str,
) -> None:
    async with publishing(redis_url) as published:
        published.change(BlockEvents(stored=run_of(1, 100)))
        await published.settled()
        await published.redis.unlink(published.key)
        published.change(BlockEvents(stored=run_of(2, 1)))
        await published.until_equal()
        assert len(await published.in_redis()) == 101


def test_a_block_that_moves_before_redis_hears_of_it_stays_before_its_children() -> None:
    table = ResidencyTable()
    publisher = Publisher(Redis(), table, make_hello("m"), "http://here:1", heartbeat_s=1, lease_s=1)
    publisher._resync = False
    for events in (BlockEvents(stored=run_of(1, 3)), BlockEvents(stored=run_of(1, 1), tier="host")):
        table.apply(events)
        publisher.publish(events)
    assert list(publisher._pending) == list(table) == split_digests(run_of(1, 3))
    assert table.tier(run_of(1, 1)) == "host"


async def test_both_keys_have_a_lease_that_the_heartbeat_renews(redis_url: str) -> None:
    async with publishing(redis_url, lease_s=30.0) as published:
        published.change(BlockEvents(stored=run_of(1, 10)))
        await published.settled()
        for key in (published.key, announcement_key(published.hello.incarnation)):
            assert 0 < await published.redis.pttl(key) <= 30_000
            await published.redis.pexpire(key, 10_000)  # as if two thirds of it had passed

            async def renewed(key: str = key) -> bool:
                return bool(10_000 < await published.redis.pttl(key) <= 30_000)

            await until(renewed)
        assert published.publisher.resyncs == 1
        assert len(await published.in_redis()) == 10


async def test_an_engine_that_dies_takes_its_index_with_it(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    published = Published(redis, lease_s=0.2)
    published.publisher.start()
    published.change(BlockEvents(stored=run_of(1, 10)))
    await published.settled()
    assert published.publisher._task is not None
    published.publisher._task.cancel()  # as a crash would end it: nothing is cleaned up

    async def gone() -> bool:
        return not await redis.exists(published.key, announcement_key(published.hello.incarnation))

    await until(gone)
    await redis.aclose()


async def test_a_shutdown_leaves_nothing_behind(redis_url: str) -> None:
    async with publishing(redis_url) as published:
        published.change(BlockEvents(stored=run_of(1, 10)))
        await published.settled()
    redis: Redis = Redis.from_url(redis_url)
    assert await redis.keys("*") == []
    await redis.aclose()


async def test_a_restarted_redis_gets_the_whole_table_again(own_redis: RedisProcess) -> None:
    async with publishing(own_redis.url) as published:
        published.change(BlockEvents(stored=run_of(1, 3000)))
        await published.settled()
        await asyncio.to_thread(own_redis.restart)
        await published.until_equal()
        published.change(BlockEvents(removed=run_of(1, 3000)[16 * 10 :]))
        await published.settled()
        assert len(await published.in_redis()) == 10


@pytest.mark.parametrize("command", [("FLUSHALL",), ("UNLINK",)], ids=["flushed", "evicted"])
async def test_data_that_vanished_is_missed_at_the_next_heartbeat(redis_url: str, command: tuple[str, ...]) -> None:
    async with publishing(redis_url) as published:
        published.change(BlockEvents(stored=run_of(1, 100)))
        await published.settled()
        await published.redis.execute_command(*command, *([published.key] if command == ("UNLINK",) else []))  # type: ignore[no-untyped-call]
        await published.until_equal()
        assert published.publisher.resyncs == 2


async def test_an_older_copy_of_the_index_is_noticed(redis_url: str) -> None:
    """As after a failover to a replica that lags: the keys are there, and are not what was written last."""
    async with publishing(redis_url) as published:
        published.change(BlockEvents(stored=run_of(1, 100)))
        await published.settled()
        old = await published.redis.dump(published.key)
        published.change(BlockEvents(removed=run_of(1, 100)[16:], stored=run_of(2, 99)))
        await published.settled()
        await published.redis.restore(published.key, 30_000, old, replace=True)
        await published.until_equal()


async def test_an_unreachable_redis_costs_one_warning_and_no_memory(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    note_down = Publisher._note_down
    monkeypatch.setattr(
        Publisher, "_note_down", lambda self, error: (failures.append(error), note_down(self, error))[1]
    )
    caplog.set_level(logging.INFO, "engine.publish")
    own_redis.kill()
    async with publishing(own_redis.url) as published:
        for step in range(2000):
            published.change(BlockEvents(stored=run_of(step, 5)))
            published.change(BlockEvents(removed=run_of(step, 5)))
        await until(lambda: bool(caplog.records))
        for step in range(200):
            published.change(BlockEvents(stored=run_of(step, 5)))
            await asyncio.sleep(0)
        tried = len(failures)
        await until(lambda: len(failures) >= tried + 4)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert not published.publisher._pending
        await asyncio.to_thread(own_redis.start)
        await published.until_equal()
        assert len(published.table) == 1000


async def test_a_redis_that_is_too_small_is_asked_less_and_less_and_holds_no_half_table(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "engine.publish")
    async with publishing(own_redis.url) as published:
        await published.redis.config_set("maxmemory-policy", "volatile-lru")
        await published.redis.config_set("maxmemory", 3 << 20)
        published.change(BlockEvents(stored=run_of(1, 60_000)))
        await until(lambda: bool([record for record in caplog.records if record.levelno == logging.WARNING]))
        pauses = []
        for _ in range(4):
            was = published.publisher._wrote_s
            await until(lambda was=was: published.publisher._wrote_s > was)  # type: ignore[misc]
            pauses.append(published.publisher._pause_s)

            async def gone() -> bool:
                return not await published.redis.exists(published.key)

            await until(gone)
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 4 * pauses[0]
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        # It recovers by itself when there is room again, at the end of the pause, which is longer on a slower machine.
        await published.redis.config_set("maxmemory", 0)
        published.publisher._write_s = 0.0
        await published.until_equal()


async def test_a_redis_that_hangs_is_left_behind_too(own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.publish.REDIS_TIMEOUT_S", 0.1)
    async with publishing(own_redis.url) as published:
        published.change(BlockEvents(stored=run_of(1, 10)))
        await published.settled()
        assert own_redis._process is not None
        own_redis._process.send_signal(signal.SIGSTOP)
        published.change(BlockEvents(stored=run_of(2, 10)))
        await until(lambda: not published.publisher.up)
        own_redis._process.send_signal(signal.SIGCONT)
        await published.until_equal()


def test_a_snapshot_applied_from_nothing_is_the_table() -> None:
    table = ResidencyTable()
    table.apply(BlockEvents(stored=run_of(1, 1000)))
    table.apply(BlockEvents(removed=run_of(1, 1000)[16 * 700 :], stored=run_of(2, 300)))
    for max_bytes in (1, 16, 100, 16 * 999, 16 * 1000, 1 << 20):
        copy = ResidencyTable()
        copy.apply(BlockEvents(stored=run_of(3, 5)))
        parts = table.snapshot(max_bytes)
        for events in parts:
            copy.apply(events)
        assert list(copy) == list(table)
        assert [copy.tier(digest) for digest in copy] == [table.tier(digest) for digest in table]
        assert [events.reset for events in parts] == [True] + [False] * (len(parts) - 1)
    assert ResidencyTable().snapshot(100) == [BlockEvents(reset=True)]


def test_a_snapshot_tells_the_fastest_tier_first_and_parents_before_children() -> None:
    table = ResidencyTable()
    table.apply(BlockEvents(stored=run_of(1, 6), tier="disk"))
    table.apply(BlockEvents(stored=run_of(2, 2), tier="host"))
    table.apply(BlockEvents(stored=run_of(1, 4), tier="host"))
    table.apply(BlockEvents(stored=run_of(1, 2)))
    told = [(events.tier, events.stored, events.reset) for events in table.snapshot(1 << 20)]
    assert told == [
        ("device", run_of(1, 2), True),
        ("host", run_of(1, 4)[16 * 2 :] + run_of(2, 2), False),
        ("disk", run_of(1, 6)[16 * 4 :], False),
    ]


async def test_what_is_not_announced_is_no_engine(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    table, hello = ResidencyTable(), make_hello("m")
    publisher = Publisher(redis, table, hello, None, heartbeat_s=BEAT_S, lease_s=30)
    publisher.start()
    await publisher.settled()
    assert await redis.keys() == [blocks_key("m", hello.incarnation).encode()]
    await publisher.stop()
    assert await redis.exists(blocks_key("m", hello.incarnation))
    await publisher.close()
    assert await redis.keys() == []
    await redis.aclose()


async def test_late_writes_of_a_publisher_that_was_replaced_are_written_over(redis_url: str) -> None:
    redis: Redis = Redis.from_url(redis_url)
    hello, tables = make_hello("m"), (ResidencyTable(), ResidencyTable())
    old, new = (
        Publisher(redis, table, hello, None, heartbeat_s=BEAT_S, lease_s=30, fence=fence)
        for table, fence in zip(tables, (1 << 32, 2 << 32), strict=True)
    )
    for number, (table, publisher) in enumerate(zip(tables, (old, new), strict=True)):
        table.apply(BlockEvents(stored=run_of(number, 10)))
        publisher.start()
        await publisher.settled()
    await old._write_all()
    await old.stop()

    async def equal() -> bool:
        return set(await redis.hkeys(blocks_key("m", hello.incarnation))) - {VERSION_FIELD} == set(tables[1])

    await until(equal)
    await new.close()
    await redis.aclose()
