"""Questions in a real Redis: gateways know each other's, one that starts again knows its own, and none needs it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.config import ResponseCacheSettings, SemanticCacheSettings
from gateway.errors import RedisDownError
from gateway.responses.entries import Chosen, entry_id
from gateway.responses.entry_stores import MemoryEntries, RedisEntries, Removal
from gateway.responses.semantic.questions import AnsweredQuestion, RedisQuestions, digest_of
from gateway.responses.semantic.spaces import APPLIED_AT_A_TIME, Background, Spaces
from gateway.responses.stored_answers import StoredAnswers
from gateway.storage.redis_calls import RedisCalls, close, connect
from gateway.types import Reuse
from tests.fakes.meanings import Kitchen, Meanings
from tests.fakes.redis_fleet import keys_of
from tests.fakes.redis_process import RedisProcess
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

LIMIT_S = 30.0
SETTINGS = {"mode": "on", "sync_s": 0.001, "max_entries": 3}
FIRST, SECOND = "How do I reset my password?", "how can i reset my password"


@pytest.fixture
async def gateway(redis: Redis) -> AsyncIterator[Callable[..., Kitchen]]:
    """Makes gateways on one Redis."""
    made: list[Kitchen] = []

    def make(chance: float = 1.0, **encoder: Any) -> Kitchen:
        made.append(on(redis, chance, **encoder))
        return made[-1]

    yield make
    for one in made:
        await one.semantic.close()


def questions(redis: Redis, **changes: object) -> RedisQuestions:
    return RedisQuestions(RedisCalls(redis, LIMIT_S), tuned(SemanticCacheSettings, **{**SETTINGS, **changes}))


def on(redis: Redis, chance: float = 1.0, **encoder: Any) -> Kitchen:
    own = ResponseCacheSettings()
    memory = MemoryEntries(own.max_memory_bytes, lambda: 1000.0)
    entries = RedisEntries(RedisCalls(redis, LIMIT_S), own, lambda: 1000.0)
    exact = StoredAnswers(memory, entries, memory_s=60.0)
    settings = tuned(SemanticCacheSettings, **{**SETTINGS, "max_entries": 100})
    answers = {FIRST: "Yes.", SECOND: "No."}
    return Kitchen(settings, Meanings({"reset": 0.0}, **encoder), questions(redis), exact, answers, chance=chance)


async def known(one: Kitchen) -> int:
    """How many questions it knows. Asking makes it look at Redis, and leaves nothing."""
    await one.ask("Anything?", reuse=Reuse(write=False))
    spaces = one.semantic.stats()["spaces"]
    return sum(space["entries"] for space in spaces)


async def test_changes_are_read_once_in_their_order(redis: Redis) -> None:
    store = questions(redis)
    assert await store.changes("n", 0) == (0, [])
    await store.put("n", b"a" * 32, b"1")
    await store.put("n", b"b" * 32, b"2")
    number, changes = await store.changes("n", 0)
    assert changes == [(b"a" * 32, b"1"), (b"b" * 32, b"2")]
    assert await store.changes("n", number) == (number, [])
    await store.put("n", b"a" * 32, b"")
    assert (await store.changes("n", number))[1] == [(b"a" * 32, b"")]
    assert (await store.changes("other", 0))[1] == []


async def test_what_changed_first_goes_when_there_is_no_room(redis: Redis) -> None:
    store = questions(redis, max_redis_bytes=10)
    for number in range(5):
        await store.put("n", bytes([number]) * 32, b"1234")
    assert [key[0] for key, _ in (await store.changes("n", 0))[1]] == [3, 4]
    await store.put("n", b"x" * 32, b"12345678901")
    assert len((await store.changes("n", 0))[1]) == 2
    many = questions(redis)
    for number in range(5):
        await many.put("m", bytes([number]) * 32, b"1")
    assert [key[0] for key, _ in (await many.changes("m", 0))[1]] == [2, 3, 4]


async def test_a_redis_that_lost_everything_is_read_from_its_beginning(redis: Redis) -> None:
    store = questions(redis)
    for number in range(3):
        await store.put("n", bytes([number]) * 32, b"1")
    since, _ = await store.changes("n", 0)
    await redis.flushdb()
    await store.put("n", b"z" * 32, b"9")
    assert (await store.changes("n", since))[1] == [(b"z" * 32, b"9")]


async def test_what_another_encoder_made_of_a_question_is_never_compared(
    redis: Redis, gateway: Callable[..., Kitchen]
) -> None:
    before, here, after = gateway(), gateway(), gateway(digest="other", dimensions=3)
    await before.ask(FIRST)

    async def knows() -> bool:
        return await known(here) == 1

    await until(knows)
    await known(after)
    await until(lambda: not after.semantic._background._tasks)  # it has read what there is for it
    assert await after.ask(SECOND) == ("No.", "miss")
    assert (await here.ask(SECOND))[1] in ("exact", "semantic")


async def test_two_gateways_answer_with_what_the_other_was_asked(redis: Redis, gateway: Callable[..., Kitchen]) -> None:
    here, there = gateway(), gateway()
    assert await here.ask(FIRST) == ("Yes.", "miss")

    async def knows() -> bool:
        return await known(there) == 1

    await until(knows)
    assert await there.ask(SECOND) == ("Yes.", "semantic")


async def test_a_gateway_that_starts_again_reads_everything_and_lets_others_have_their_turns(redis: Redis) -> None:
    store, count, turns = questions(redis, max_entries=1000), 600, 0
    vector = Meanings()._vector("")
    for number in range(count):
        key = digest_of(str(number))
        entry = AnsweredQuestion(key, b"s" * 32, key, f"What is {number}?", vector, "x", digest_of("x"), 1000.0, 2000.0)
        await store.put("tenant:a/demo/fake", key, entry.to_bytes())
    background = Background()
    spaces = Spaces(
        SemanticCacheSettings(),
        store,
        background,
        Counter(),
        random=lambda: 1.0,
        now=lambda: 1000.0,
        clock=lambda: 0.0,
    )
    space = spaces.open("tenant:a", "demo", "fake").space
    async with asyncio.timeout(LIMIT_S):
        while len(space) < count:
            before = len(space)
            await asyncio.sleep(0)
            assert len(space) - before <= 2 * APPLIED_AT_A_TIME
            turns += len(space) > before
    assert turns >= count / APPLIED_AT_A_TIME / 2
    await background.close()


async def test_what_one_gateway_found_wrong_no_other_gives_again(redis: Redis, gateway: Callable[..., Kitchen]) -> None:
    here, there = gateway(chance=0.0), gateway()
    await here.ask(FIRST)

    async def knows() -> bool:
        return await known(there) == 1

    await until(knows)
    assert await here.ask(SECOND) == ("Yes.", "semantic")

    async def forgot() -> bool:
        return await known(there) == 0

    await until(forgot)
    assert await there.ask(SECOND) == ("No.", "miss")


async def test_a_question_whose_answer_was_removed_is_known_nowhere(
    redis: Redis, gateway: Callable[..., Kitchen]
) -> None:
    here, there = gateway(), gateway()
    await here.ask(FIRST)
    await here.ask("Anything else?")

    async def knows() -> bool:
        return await known(there) == 2

    await until(knows)
    (space,) = here.semantic._spaces
    name = next(entry_id(entry.key) for entry in space if entry.text == FIRST)
    for chosen, left in ((Chosen(owner="tenant:b"), 2), (Chosen(id=name), 1), (Chosen(younger_than_s=10), 0)):
        here.semantic.forget(Removal(chosen, 1000.5))

        async def forgot(one: Kitchen, left: int = left) -> bool:
            return await known(one) == left

        for one in (here, there, gateway()):
            await until(partial(forgot, one))
    assert here.semantic.stats()["events"]["removed"] == 2
    assert await redis.hvals("kvasir:{questions:tenant:a/demo/fake}.questions") == [b"", b""]  # type: ignore[misc]


async def test_a_gateway_that_starts_again_has_learned_already(redis: Redis, gateway: Callable[..., Kitchen]) -> None:
    here = gateway(chance=0.0)
    await here.ask(FIRST)
    await here.ask(SECOND)
    await until(lambda: here.semantic.events["audited"] == 1)

    async def saved() -> bool:
        await known(here)
        return await redis.exists("kvasir:{questions:tenant:a/demo/fake}.budget") == 1

    next(iter(here.semantic._spaces._spaces.values())).next_save_s = 0.0  # as if the time to save had come
    await until(saved)
    again = gateway()

    async def learned() -> bool:
        await known(again)
        (space,) = again.semantic.stats()["spaces"]
        return int(space["audits"]) == 1

    await until(learned)


async def test_models_that_nobody_answers_leave_nothing_in_redis(redis: Redis, gateway: Callable[..., Kitchen]) -> None:
    one = gateway()
    for number in range(8):
        for _ in range(2):
            await one.ask("Anything?", model=f"made-up-{number}", reuse=Reuse(write=False))
    await until(lambda: not one.semantic._background._tasks)
    assert await keys_of(redis, "*made-up*") == []


async def test_what_is_no_question_is_passed_over(redis: Redis, gateway: Callable[..., Kitchen]) -> None:
    one, store = gateway(), questions(redis, max_entries=100)
    name = "tenant:a/demo/fake"
    await store.put(name, b"a" * 32, b"garbage")
    other = AnsweredQuestion(b"b" * 32, b"s" * 32, b"b" * 32, "t", b"\x00" * 4, "x", digest_of("x"), 1000.0, 2000.0)
    await store.put(name, b"c" * 32, replace(other, vector=b"\x00" * 3).to_bytes())
    await redis.set("kvasir:{questions:tenant:a/demo/fake}.budget", b"{")
    await one.ask(FIRST)

    async def passed() -> bool:
        await known(one)
        return int(one.semantic.stats()["events"]["unread"]) >= 3

    await until(passed)
    assert await one.ask(SECOND) == ("Yes.", "semantic")


async def test_a_redis_that_is_down_leaves_each_gateway_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisProcess(tmp_path) as process:
        client = connect(process.url, LIMIT_S)
        one = on(client)
        process.kill()
        with pytest.raises(RedisDownError):
            await questions(client).changes("n", 0)
        with caplog.at_level(logging.WARNING):
            await one.ask(FIRST)
            assert await one.ask(SECOND) == ("Yes.", "semantic")
            await until(lambda: one.semantic.stats()["events"]["redis_failures"] > 0)
        assert "Redis is unreachable" in caplog.text
        await one.semantic.close()
        await close(client)
