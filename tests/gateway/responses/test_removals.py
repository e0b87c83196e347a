"""What operators removed leaves the memory of every gateway: two of them beside one epoch, under the response cache."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from gateway.errors import RedisDownError
from gateway.responses.entries import Chosen, Entry, entry_id
from gateway.responses.entry_stores import KEY, MAX_BYTES, MemoryEntries, Removal, RemovalEpoch
from gateway.responses.stored_answers import LATE_S, LOOKED_AT, StoredAnswers
from gateway.storage.redis_calls import RedisCalls, connect
from tests.fakes.redis_process import RedisProcess
from tests.fakes.shelf import Shelf
from tests.fakes.waiting import until

NORTH, SOUTH = "tenant:north", "tenant:south"
NOW = 1000.0
LIMIT_S = 30.0


class Epoch(RemovalEpoch):
    """In memory. While it is `away` every call fails."""

    def __init__(self) -> None:
        self.epoch = 1000
        self.last: Removal | None = None
        self.away = False

    async def advance(self, removal: Removal) -> int:
        await self._answer()
        self.last = removal
        self.epoch += 1
        return self.epoch

    async def read(self) -> tuple[int, Removal | None]:
        await self._answer()
        return self.epoch, self.last

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise RedisDownError("away")


class Gateway:
    def __init__(self, epoch: Epoch, shelf: Shelf | None = None, *, max_bytes: int = 1 << 24) -> None:
        self.memory = MemoryEntries(max_bytes, lambda: NOW)
        self.answers = StoredAnswers(self.memory, shelf, epoch, every_s=0.001)

    def has(self, *entries: Entry) -> list[bool]:
        return [self.answers.has(entry) for entry in entries]


def entry(number: int, owner: str = NORTH, *, age_s: float = 100.0, model: str = "demo") -> Entry:
    key = number.to_bytes(32, "big")
    return Entry(key, entry_id(key), owner, model, NOW - age_s, NOW + 500, b"said")


def removal(**chosen: object) -> Removal:
    return Removal(Chosen(**chosen), NOW)  # type: ignore[arg-type]


CHOICES: dict[str, tuple[Chosen, list[bool]]] = {
    "everything": (Chosen(), [False, False, False]),
    "tenant": (Chosen(owner=SOUTH), [True, False, True]),
    "model": (Chosen(model="other"), [True, True, False]),
    "id": (Chosen(id=entry(0).id), [False, True, True]),
    "prefix": (Chosen(owner=NORTH, id=entry(0).id[:8]), [False, True, True]),
    "older": (Chosen(older_than_s=150), [True, False, True]),
    "younger": (Chosen(younger_than_s=60), [True, True, False]),
}


@pytest.mark.parametrize("choice", CHOICES)
async def test_what_one_gateway_removed_others_have_not_after_their_next_look(choice: str) -> None:
    epoch = Epoch()
    here, there = Gateway(epoch), Gateway(epoch)
    entries = entry(0), entry(1, SOUTH, age_s=200.0), entry(2, model="other", age_s=50.0)
    for one in entries:
        there.answers.keep(one)
    chosen, left = CHOICES[choice]
    await there.answers.look()
    await here.answers.remove(chosen, NOW)
    assert there.has(*entries) == [True] * 3
    await there.answers.look()
    assert there.has(*entries) == left
    assert there.memory.figures.removed == left.count(False)
    assert there.memory.figures.emptied == 0


async def test_what_was_made_after_the_removal_stays() -> None:
    epoch = Epoch()
    here, there = Gateway(epoch), Gateway(epoch)
    await here.answers.remove(Chosen(), NOW)
    anew = entry(0, age_s=-1.0)
    for one in (here, there):
        one.answers.keep(anew)
        await one.answers.look()
        assert one.has(anew) == [True]


async def test_while_it_runs_it_looks_by_itself() -> None:
    epoch = Epoch()
    here, there = Gateway(epoch), Gateway(epoch)
    there.answers.keep(kept := entry(0))
    there.answers.start()
    await here.answers.remove(Chosen(), NOW)
    await until(lambda: there.has(kept) == [False])
    await there.answers.close()


async def test_others_have_their_turn_while_many_answers_are_looked_at() -> None:
    here, turns = Gateway(Epoch()), 0
    for number in range(4 * LOOKED_AT):
        here.answers.keep(entry(number))
    telling = asyncio.create_task(here.answers.remove(Chosen(), NOW))
    while not telling.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 4
    assert here.memory.figures.removed == 4 * LOOKED_AT


@pytest.mark.parametrize("what", ["two", "another epoch", "one that cannot be read"])
async def test_who_missed_a_removal_empties_its_memory(what: str) -> None:
    epoch = Epoch()
    here, there = Gateway(epoch), Gateway(epoch)
    await there.answers.look()
    there.answers.keep(kept := entry(0))
    match what:
        case "two":
            for _ in range(2):
                await here.answers.remove(Chosen(owner=SOUTH), NOW)
        case "another epoch":
            epoch.epoch = 5000
        case _:
            epoch.epoch += 1
    await there.answers.look()
    assert there.has(kept) == [False]
    assert (there.memory.figures.emptied, there.memory.figures.entries, there.memory.figures.bytes) == (1, 0, 0)
    there.answers.keep(kept)
    await there.answers.look()
    assert there.has(kept) == [True]


async def test_a_gateway_that_starts_after_removals_has_missed_none() -> None:
    epoch = Epoch()
    await epoch.advance(removal())
    there = Gateway(epoch)
    await there.answers.look()
    assert there.memory.figures.emptied == 0


async def test_a_gateway_that_removes_has_missed_nothing_itself() -> None:
    here = Gateway(Epoch())
    await here.answers.look()
    for _ in range(3):
        await here.answers.remove(Chosen(owner=SOUTH), NOW)
    await here.answers.look()
    assert here.memory.figures.emptied == 0


async def test_who_began_without_redis_cannot_know() -> None:
    epoch = Epoch()
    there = Gateway(epoch)
    epoch.away = True
    await there.answers.look()
    there.answers.keep(kept := entry(0))
    epoch.away = False
    await there.answers.look()
    assert there.has(kept) == [False]


async def test_while_redis_is_away_memory_is_given_and_before_it_is_believed_again_removals_are_heard() -> None:
    epoch, shelf = Epoch(), Shelf()
    there = Gateway(epoch, shelf)
    poisoned, good = entry(0), entry(1)
    for one in (poisoned, good):
        there.answers.keep(one)
        await there.answers.share(one)
    await there.answers.look()
    epoch.away = shelf.down = True
    for _ in range(3):
        await there.answers.look()
    assert await there.answers.find(NORTH, entry(2).key) is None  # who asks notices
    assert there.has(poisoned, good) == [True, True]
    assert there.answers.peek(NORTH, poisoned.key) is poisoned
    # Another gateway, which reaches Redis, removes one; then this one reaches it, too.
    epoch.epoch, epoch.last = epoch.epoch + 1, removal(id=poisoned.id)
    del shelf.entries[NORTH, poisoned.id]
    shelf.down = False
    assert await there.answers.find(NORTH, entry(2).key) is None
    assert there.has(poisoned, good) == [False, False]
    assert await there.answers.find(NORTH, poisoned.key) is None
    assert await there.answers.find(NORTH, good.key) == good
    epoch.away = False
    await there.answers.look()
    assert there.has(poisoned) == [False]
    assert there.answers.peek(NORTH, good.key) == good


async def test_who_cannot_tell_others_says_so_and_has_it_no_more_itself() -> None:
    epoch = Epoch()
    epoch.away = True
    here = Gateway(epoch)
    here.answers.keep(kept := entry(0))
    with pytest.raises(RedisDownError):
        await here.answers.remove(Chosen(), NOW)
    assert here.has(kept) == [False]


async def test_what_redis_said_before_a_removal_is_not_kept_in_memory_after_it() -> None:
    epoch, shelf = Epoch(), Shelf()
    there, kept = Gateway(epoch, shelf), entry(0)
    await shelf.put(kept)
    shelf.go = asyncio.Event()
    asked = asyncio.create_task(there.answers.find(NORTH, kept.key))
    await until(lambda: len(shelf.looked_up) == 1)
    await shelf.remove(NORTH, kept.id)
    await epoch.advance(removal())
    await there.answers.look()
    shelf.go.set()
    assert await asked == kept  # it asked before
    assert there.has(kept) == [False]
    assert there.answers.peek(NORTH, kept.key) is None


async def test_what_reaches_redis_behind_its_own_removal_is_removed_again() -> None:
    epoch, shelf = Epoch(), Shelf()
    there, kept = Gateway(epoch, shelf), entry(0, age_s=0.01)
    there.answers.keep(kept)
    shelf.go = asyncio.Event()
    sharing = asyncio.create_task(there.answers.share(kept))
    await asyncio.sleep(0)
    await epoch.advance(removal())
    await there.answers.look()
    shelf.go.set()
    await sharing
    assert shelf.entries == {}


async def test_what_was_on_its_way_to_redis_when_it_was_removed_is_removed_at_the_next_look() -> None:
    epoch, shelf = Epoch(), Shelf()
    there = Gateway(epoch, shelf)
    late, early = entry(0, age_s=LATE_S / 2), entry(1, age_s=LATE_S * 2)
    for one in (late, early):
        there.answers.keep(one)
    await epoch.advance(removal())
    for one in (late, early):
        await shelf.put(one)  # which nobody does who keeps to time limits: only the late one is looked for
    await there.answers.look()
    assert list(shelf.entries) == [(NORTH, early.id)]


async def test_an_unrelated_removal_costs_others_nothing_that_is_shared() -> None:
    epoch, shelf = Epoch(), Shelf()
    there, kept = Gateway(epoch, shelf), entry(0)
    there.answers.keep(kept)
    shelf.go = asyncio.Event()
    sharing = asyncio.create_task(there.answers.share(kept))
    await asyncio.sleep(0)
    await epoch.advance(removal(owner=SOUTH))
    await there.answers.look()
    shelf.go.set()
    await sharing
    assert list(shelf.entries) == [(NORTH, kept.id)]
    assert there.has(kept) == [True]


async def test_the_questions_of_the_semantic_cache_hear_of_it() -> None:
    heard: defaultdict[str, list[Removal]] = defaultdict(list)

    class Questions:
        def __init__(self, name: str) -> None:
            self.name = name

        def forget(self, removal: Removal) -> None:
            heard[self.name].append(removal)

    epoch = Epoch()
    memory = MemoryEntries(0, lambda: NOW)
    here, there = (StoredAnswers(memory, None, epoch, Questions(name)) for name in ("here", "there"))
    await there.look()
    await here.remove(Chosen(owner=NORTH), NOW)
    await there.look()
    assert heard == {"here": [removal(owner=NORTH)], "there": [removal(owner=NORTH)]}


# -- the epoch in Redis -----------------------------------------------------------------------------------------------


async def test_an_epoch_begins_with_each_removal_and_names_it(redis_url: str) -> None:
    redis = connect(redis_url, LIMIT_S)
    epoch, last = RemovalEpoch(RedisCalls(redis, LIMIT_S)), Removal(Chosen("tenant:ünï", "m", "0a", 1.5, None), 1000.25)
    first, none = await epoch.read()
    assert none is None
    assert await epoch.advance(removal()) == first + 1
    assert await epoch.advance(last) == first + 2
    assert await epoch.read() == await epoch.read() == (first + 2, last)
    await epoch.advance(Removal(Chosen(model="m" * MAX_BYTES), 5.0))
    assert await epoch.read() == (first + 3, None)
    await redis.hset(KEY, "last", b"[1,2,3,4,5,6,7]")  # type: ignore[arg-type, misc]
    assert await epoch.read() == (first + 3, None)
    await redis.flushall()
    assert (await epoch.read())[0] > first + 3, "a Redis that lost it is noticed"
    await redis.aclose()


async def test_the_first_removal_of_all_begins_to_count(redis_url: str) -> None:
    redis = connect(redis_url, LIMIT_S)
    epoch = RemovalEpoch(RedisCalls(redis, LIMIT_S))
    number = await epoch.advance(removal())
    assert await epoch.read() == (number, removal())
    await redis.aclose()


async def test_the_epoch_of_a_redis_that_is_full_is_read_all_the_same(own_redis: RedisProcess) -> None:
    redis = connect(own_redis.url, LIMIT_S)
    epoch = RemovalEpoch(RedisCalls(redis, LIMIT_S))
    number, _ = await epoch.read()
    await redis.config_set("maxmemory", 1)
    assert await epoch.read() == (number, None)
    with pytest.raises(RedisDownError):
        await epoch.advance(removal())
    await redis.aclose()
