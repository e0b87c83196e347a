"""The promises of gateway/index/index.py over memory and a real Redis, and both against an oracle.

Memory is fed with events as the stream brings them; Redis by the engine's own publisher. Histories are random, but
prefix-closed as an engine's are: parents are stored first, children are removed first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from engine.protocol import BlockEvents, split_digests
from engine.publish import Publisher, ResidencyTable
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.storage.redis_calls import RedisCalls, close, connect
from tests.fakes.fake_engine import make_hello

LIMIT_S = 30.0
NAMES = ("engine-a", "engine-b", "engine-c")
CHAINS = [b"".join(bytes([chain, block]) * 8 for block in range(40)) for chain in range(4)]
"""Four prompts of forty blocks; the first ten blocks of the last two are the same."""
CHAINS[3] = CHAINS[2][: 10 * 16] + CHAINS[3][10 * 16 :]


class Held:
    """What one engine holds, as leading blocks of each chain. Makes events that keep it prefix-closed."""

    def __init__(self) -> None:
        self.digests: dict[bytes, None] = {}

    def change(self, chain: int, blocks: int) -> BlockEvents:
        """Holds exactly `blocks` leading blocks of a chain from now on, what other chains need aside."""
        wanted = split_digests(CHAINS[chain][: 16 * blocks])
        beyond = split_digests(CHAINS[chain][16 * blocks :])
        needed = {
            digest
            for other, packed in enumerate(CHAINS)
            if other != chain
            for digest in split_digests(packed)[: self.prefix(packed)]
        }
        removed = [digest for digest in reversed(beyond) if digest in self.digests and digest not in needed]
        stored = [digest for digest in wanted if digest not in self.digests]
        for digest in removed:
            del self.digests[digest]
        self.digests.update(dict.fromkeys(stored))
        return BlockEvents(stored=b"".join(stored), removed=b"".join(removed))

    def prefix(self, packed: bytes) -> int:
        """The oracle: one block after the other."""
        count = 0
        for digest in split_digests(packed):
            if digest not in self.digests:
                break
            count += 1
        return count


def index_of(memory: MemoryIndex, redis: Redis | None = None) -> PrefixIndex:
    return PrefixIndex(memory, None if redis is None else RedisCalls(redis, LIMIT_S), retry_s=1.0)


class Memory:
    """The memory index and how events get into it."""

    def __init__(self) -> None:
        self.memory = MemoryIndex()
        self.index = index_of(self.memory)

    async def apply(self, name: str, events: BlockEvents) -> None:
        self.memory.apply(name, events)

    async def end(self, name: str) -> None:
        self.memory.drop(name)


class Published:
    """The Redis index and how events get into it: each engine's table and publisher."""

    def __init__(self, redis: Redis) -> None:
        self.index = index_of(MemoryIndex(), redis)
        self._redis = redis
        self.engines: dict[str, tuple[ResidencyTable, Publisher]] = {}

    async def apply(self, name: str, events: BlockEvents) -> None:
        if name not in self.engines:
            hello = replace(make_hello("m"), incarnation=name)
            table = ResidencyTable()
            publisher = Publisher(self._redis, table, hello, "unix:/nowhere", heartbeat_s=0.5, lease_s=60)
            publisher.start()
            self.engines[name] = table, publisher
        table, publisher = self.engines[name]
        table.apply(events)
        publisher.publish(events)
        async with asyncio.timeout(LIMIT_S):
            await publisher.settled()

    async def end(self, name: str) -> None:
        _, publisher = self.engines.pop(name)
        await publisher.close()


@asynccontextmanager
async def made(kind: str, redis_url: str) -> AsyncIterator[Memory | Published]:
    if kind == "memory":
        yield Memory()
        return
    redis: Redis = connect(redis_url, LIMIT_S)
    fed = Published(redis)
    try:
        yield fed
    finally:
        for name in list(fed.engines):
            await fed.end(name)
        await close(redis)


@pytest.fixture(params=["memory", "redis"])
async def fed(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Memory | Published]:
    async with made(request.param, redis_url) as one:
        yield one


async def test_an_unknown_engine_is_left_out_and_an_empty_one_holds_nothing(fed: Memory | Published) -> None:
    await fed.apply("engine-a", BlockEvents(reset=True))
    assert dict(await fed.index.find("m", CHAINS[0], NAMES)) == {"engine-a": 0}


async def test_the_longest_prefix_of_every_engine_is_found(fed: Memory | Published) -> None:
    for name, blocks in zip(NAMES, (1, 17, 40), strict=True):
        await fed.apply(name, BlockEvents(stored=CHAINS[0][: 16 * blocks], reset=True))
    assert dict(await fed.index.find("m", CHAINS[0], NAMES)) == dict(zip(NAMES, (1, 17, 40), strict=True))
    assert dict(await fed.index.find("m", CHAINS[0][: 16 * 5], NAMES[1:])) == {"engine-b": 5, "engine-c": 5}
    assert dict(await fed.index.find("m", CHAINS[1], NAMES[:1])) == {"engine-a": 0}


async def test_every_length_of_prefix_is_found_exactly(fed: Memory | Published) -> None:
    held = Held()
    for blocks in [*range(1, 41), *range(39, -1, -1)]:
        await fed.apply("engine-a", held.change(0, blocks))
        assert dict(await fed.index.find("m", CHAINS[0], ["engine-a"])) == {"engine-a": blocks}


async def test_of_many_engines_each_is_told_what_it_holds(fed: Memory | Published) -> None:
    """Whatever those before it hold, which is what is tried first."""
    dice = random.Random(1)
    held = [dice.choice((0, 0, 1, 2, 10, 10, 10, 39, 40)) for _ in range(60)]
    names = [f"engine-{number:02}" for number in range(len(held))]
    for name, blocks in zip(names, held, strict=True):
        await fed.apply(name, BlockEvents(stored=CHAINS[0][: 16 * blocks], reset=True))
    for asked in (1, 2, 3, 10, 11, 39, 40):
        expected = {name: min(blocks, asked) for name, blocks in zip(names, held, strict=True)}
        for order in (names, names[::-1], dice.sample(names, len(names))):
            assert dict(await fed.index.find("m", CHAINS[0][: 16 * asked], [*order, "unknown"])) == expected


async def test_a_block_both_removed_and_stored_in_one_step_is_there(fed: Memory | Published) -> None:
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0]))
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0][:32], removed=CHAINS[0]))
    assert dict(await fed.index.find("m", CHAINS[0], ["engine-a"])) == {"engine-a": 2}


async def test_a_block_that_moves_to_another_tier_is_found_as_before(fed: Memory | Published) -> None:
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0]))
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0][16 * 3 :], tier="disk"))
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0][: 16 * 20], tier="host"))
    assert dict(await fed.index.find("m", CHAINS[0], ["engine-a"])) == {"engine-a": 40}
    await fed.apply("engine-a", BlockEvents(removed=b"".join(reversed(split_digests(CHAINS[0][16 * 5 :])))))
    assert dict(await fed.index.find("m", CHAINS[0], ["engine-a"])) == {"engine-a": 5}


async def test_a_reset_starts_from_nothing(fed: Memory | Published) -> None:
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0]))
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[1][:32], reset=True))
    found = [dict(await fed.index.find("m", chain, ["engine-a"])) for chain in CHAINS[:2]]
    assert found == [{"engine-a": 0}, {"engine-a": 2}]


async def test_an_engine_that_ended_is_unknown(fed: Memory | Published) -> None:
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0]))
    await fed.apply("engine-b", BlockEvents(stored=CHAINS[0]))
    await fed.end("engine-a")
    assert dict(await fed.index.find("m", CHAINS[0], NAMES)) == {"engine-b": 40}


@pytest.mark.parametrize(("digests", "names"), [(b"", NAMES), (CHAINS[0], ())], ids=["no blocks", "no engines"])
async def test_an_empty_question_has_an_empty_answer(
    fed: Memory | Published, digests: bytes, names: Sequence[str]
) -> None:
    await fed.apply("engine-a", BlockEvents(stored=CHAINS[0]))
    index: PrefixIndex = fed.index
    assert dict(await index.find("m", digests, names)) == {}


history = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 40), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history)
def test_memory_redis_and_oracle_agree_after_every_change(
    redis_url: str, changes: list[tuple[str, int, int, bool]]
) -> None:
    async def run() -> None:
        async with made("memory", redis_url) as memory, made("redis", redis_url) as published:
            engines: dict[str, Held] = {}
            for name, chain, blocks, ends in changes:
                if ends and name in engines:
                    del engines[name]
                    await memory.end(name)
                    await published.end(name)
                else:
                    events = engines.setdefault(name, Held()).change(chain, blocks)
                    await memory.apply(name, events)
                    await published.apply(name, events)
                for packed in CHAINS:
                    expected = {name: held.prefix(packed) for name, held in engines.items()}
                    assert dict(await memory.index.find("m", packed, NAMES)) == expected
                    assert dict(await published.index.find("m", packed, NAMES)) == expected

    asyncio.run(run())


async def test_events_that_pile_up_are_applied_as_one(redis_url: str) -> None:
    """Thousands of changes between two looks at Redis, as when Redis is slow."""
    source, held = random.Random(5), Held()
    async with made("redis", redis_url) as published:
        await published.apply("engine-a", BlockEvents(reset=True))
        assert isinstance(published, Published)
        table, publisher = published.engines["engine-a"]
        for _ in range(3000):
            events = held.change(source.randrange(4), source.randrange(41))
            table.apply(events)
            publisher.publish(events)
        async with asyncio.timeout(LIMIT_S):
            await publisher.settled()
        for packed in CHAINS:
            assert dict(await published.index.find("m", packed, ["engine-a"])) == {"engine-a": held.prefix(packed)}
