"""Steps 1 and 7: which requests get an answer that was there, which share one, and which answers are remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.protocol import Sampling
from gateway.config import ResponseCacheSettings
from gateway.errors import (
    BadRequestError,
    DeadlineError,
    EngineLostError,
    KvasirError,
    NotCachedError,
    OverloadedError,
    QueueFullError,
)
from gateway.responses.base import Match, Mode, Query, Regenerate
from gateway.responses.entry_stores import MemoryEntries
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.types import (
    CallDelta,
    ChatPrompt,
    Event,
    Finished,
    FinishReason,
    Request,
    Reuse,
    Scope,
    Started,
    Tenant,
    TextDelta,
    Tool,
    ToolUse,
    Trace,
    Usage,
)
from tests.fakes.pipeline import hello
from tests.fakes.shelf import Shelf
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

LIMIT_S = 30.0
MODEL = hello()
USE = ToolUse((Tool("look"),))


def ask(text: str = "Hi.", tenant: str = "a", reuse: Reuse | None = None, **changes: Any) -> Request:
    request = Request(
        request_id="r",
        tenant=Tenant(tenant),
        model="demo",
        prompt=ChatPrompt([{"role": "user", "content": text}]),
        sampling=Sampling(max_tokens=8, temperature=0.0),
        received_s=0.0,
        deadline_s=9e9,
        stream=True,
        reuse=reuse or Reuse(),
    )
    return replace(request, **changes)


@dataclass
class Engine:
    """Steps 2 to 6: answers that count up, so that each is another one."""

    pieces: Sequence[TextDelta | CallDelta] = (TextDelta("Hel"), TextDelta("lo "))
    reason: FinishReason = "stop"
    errors: list[Exception | None] = field(default_factory=list)  # one for each run, in place of its first event
    fails_after: Exception | None = None
    runs: list[Request] = field(default_factory=list)
    gate: asyncio.Event | None = None  # before the first event
    middle: asyncio.Event | None = None  # after the first piece
    aborted: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.runs.append(request)
        number = len(self.runs)
        try:
            self.reached.set()
            if self.gate is not None:
                await self.gate.wait()
            if self.errors and (error := self.errors.pop(0)) is not None:
                raise error
            request.trace.engine, request.trace.prompt_tokens, request.trace.first_token_ms = "engine-1", 10, 1.0
            yield Started("engine-1", Usage(10, 0, cached_tokens=4))
            for index, piece in enumerate((*self.pieces, TextDelta(str(number)))):
                request.trace.completion_tokens += 1
                yield piece
                if index == 0 and self.middle is not None:
                    await self.middle.wait()
            if self.fails_after is not None:
                raise self.fails_after
            yield Finished(self.reason, Usage(10, 3, cached_tokens=4), None)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += 1
            raise


@dataclass
class Bench:
    """A cache over an engine, at a time that the test sets."""

    settings: ResponseCacheSettings = field(default_factory=ResponseCacheSettings)
    modes: dict[str, Mode] = field(default_factory=dict)
    shelf: Shelf | None = None
    semantic: Any = None
    now: float = 1000.0
    engine: Engine = field(default_factory=Engine)
    audits: list[tuple[str, str, int, int]] = field(default_factory=list)  # whose, and tokens

    def __post_init__(self) -> None:
        self.memory = MemoryEntries(self.settings.max_memory_bytes, lambda: self.now)
        self.exact = StoredAnswers(self.memory, self.shelf)
        self.cache = ResponseCache(
            self.settings, self.modes, self.exact, self.semantic, lambda: self.now, self._audited
        )

    def _audited(self, tenant: str, model: str, trace: Trace, total_ms: float) -> None:
        self.audits.append((tenant, model, trace.prompt_tokens, trace.completion_tokens))

    def events(self, request: Request) -> AsyncGenerator[Event, None]:
        return self.cache.answer(request, MODEL, self.engine.generate)

    async def all(self, request: Request) -> list[Event]:
        async with aclosing(self.events(request)) as events:
            return [event async for event in events]

    async def text(self, request: Request) -> str:
        return said(await self.all(request))

    async def outcome(self, request: Request) -> str:
        """What the cache had for it."""
        await self.all(request)
        assert request.trace.lookup is not None
        return request.trace.lookup.outcome


def said(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


# -- the same request again -------------------------------------------------------------------------------------------


async def test_the_same_request_gets_the_same_answer_in_the_same_pieces_and_no_engine_works() -> None:
    bench = Bench()
    first = await bench.all(ask())
    bench.now += 30
    request = ask()
    again = await bench.all(request)
    assert [event for event in again if isinstance(event, TextDelta)] == [*bench.engine.pieces, TextDelta("1")]
    assert [type(event) for event in first] == [type(event) for event in again]
    assert len(bench.engine.runs) == 1
    lookup, trace = request.trace.lookup, request.trace
    assert lookup is not None
    assert (lookup.outcome, lookup.age_s, lookup.found) == ("exact", 30.0, True)
    hit = request.trace.hit
    assert hit is not None
    assert (hit.kind, hit.prompt_tokens, hit.completion_tokens) == ("exact", 10, 3)
    assert (trace.prompt_tokens, trace.cached_tokens, trace.completion_tokens, trace.engine) == (10, 10, 3, None)
    assert again[-1] == Finished("stop", Usage(10, 3, cached_tokens=10), None)
    assert trace.first_token_ms is not None


async def test_who_wants_no_pieces_gets_one() -> None:
    bench = Bench()
    await bench.all(ask())
    events = await bench.all(ask(stream=False))
    assert [event for event in events if isinstance(event, TextDelta)] == [TextDelta("Hello 1")]


async def test_an_answer_whose_key_is_another_is_not_given_even_under_the_same_id() -> None:
    bench = Bench(shelf=Shelf())
    await bench.all(ask())
    (entry,) = list(bench.memory)
    forged = replace(entry, key=bytes(32))
    bench.memory.set(forged)
    assert bench.shelf is not None
    bench.shelf.entries[entry.owner, entry.id] = forged
    assert await bench.text(ask()) == "Hello 2"


async def test_a_time_to_live_counts_from_the_answer_and_using_it_does_not_make_it_longer() -> None:
    bench = Bench(tuned(ResponseCacheSettings, ttl_s=60))
    await bench.all(ask())
    for seconds in (30, 29):
        bench.now += seconds
        assert await bench.text(ask()) == "Hello 1"
    bench.now += 1
    assert await bench.text(ask()) == "Hello 2"


async def test_a_request_may_ask_for_a_shorter_time_and_not_for_more_than_there_is() -> None:
    bench = Bench(tuned(ResponseCacheSettings, ttl_s=60, max_ttl_s=100))
    await bench.all(ask("short", reuse=Reuse(ttl_s=5)))
    await bench.all(ask("long", reuse=Reuse(ttl_s=1e6)))
    bench.now += 6
    assert await bench.outcome(ask("short")) == "miss"
    bench.now += 95
    assert await bench.outcome(ask("long")) == "miss"


# -- which requests ---------------------------------------------------------------------------------------------------


HOT = Sampling(max_tokens=8, temperature=1.0)


@pytest.mark.parametrize(
    ("settings", "mode", "request_", "reason"),
    [
        ({}, None, ask(), None),
        ({}, None, ask(sampling=HOT), "sampling"),
        ({}, None, ask(sampling=replace(HOT, seed=3)), None),
        ({"requests": "all"}, None, ask(sampling=HOT), None),
        ({}, None, ask(sampling=HOT, reuse=Reuse(asked=True)), None),
        ({}, None, ask(reuse=Reuse(asked=False)), "off"),
        ({"mode": "off"}, None, ask(reuse=Reuse(asked=True)), "off"),
        ({"mode": "ask"}, None, ask(), "not-asked"),
        ({"mode": "ask"}, None, ask(reuse=Reuse(asked=True)), None),
        ({"mode": "off"}, "on", ask(), None),
        ({}, "off", ask(reuse=Reuse(asked=True)), "off"),
        ({}, None, ask(tool_use=USE), "tools"),
        ({"tool_calls": True}, None, ask(tool_use=USE), None),
        ({}, None, ask(tool_use=USE, reuse=Reuse(asked=True)), None),
        ({}, None, ask(prewarm=True), "prewarm"),
        ({}, None, ask(use_cache=False), "uncached"),
        ({}, None, ask(reuse=Reuse(read=False, write=False)), "no-store"),
        ({}, None, ask(lane="batch"), None),
    ],
)
async def test_who_takes_part(
    settings: dict[str, Any], mode: Mode | None, request_: Request, reason: str | None
) -> None:
    bench = Bench(tuned(ResponseCacheSettings, **settings), {"a": mode} if mode else {})
    await bench.all(again(request_))
    request = again(request_)
    text = await bench.text(request)
    assert request.trace.lookup is not None
    if reason is None:
        assert (text, request.trace.lookup.outcome) == ("Hello 1", "exact")
    else:
        assert (text, request.trace.lookup.outcome, request.trace.lookup.reason) == ("Hello 2", "bypass", reason)
        assert bench.cache.figures.bypassed == {reason: 2}


def again(request: Request) -> Request:
    return replace(request, trace=type(request.trace)())


async def test_what_the_client_wants_no_cache_for_is_generated_and_replaces_what_was_there() -> None:
    bench = Bench()
    await bench.all(ask())
    assert await bench.text(ask(reuse=Reuse(read=False))) == "Hello 2"
    assert await bench.text(ask()) == "Hello 2"


async def test_what_is_not_to_be_stored_may_still_come_from_the_cache() -> None:
    bench = Bench()
    assert await bench.outcome(ask(reuse=Reuse(write=False))) == "miss"
    assert await bench.outcome(ask()) == "miss"
    assert await bench.outcome(ask(reuse=Reuse(write=False))) == "exact"


async def test_an_answer_that_is_older_than_wanted_is_not_given() -> None:
    bench = Bench()
    await bench.all(ask())
    bench.now += 10
    assert await bench.outcome(ask(reuse=Reuse(max_age_s=10))) == "exact"
    assert await bench.outcome(ask(reuse=Reuse(max_age_s=9))) == "miss"
    assert await bench.text(ask()) == "Hello 2"


async def test_who_wants_the_cache_or_nothing_gets_either() -> None:
    bench, only = Bench(shelf=Shelf()), Reuse(only_cached=True)
    with pytest.raises(NotCachedError):
        await bench.all(ask(reuse=only))
    with pytest.raises(NotCachedError):
        bench.events(ask(sampling=HOT, reuse=only))
    assert not bench.engine.runs
    await bench.all(ask())
    assert await bench.outcome(ask(reuse=only)) == "exact"


# -- which answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "settings", "kept"),
    [
        (Engine(), {}, True),
        (Engine(reason="length"), {}, False),
        (Engine(reason="length"), {"truncated": True}, True),
        (Engine(pieces=[TextDelta("x" * 2000)]), {"max_entry_bytes": 1000}, False),
        (Engine(pieces=[TextDelta("x" * 2000)]), {"max_flight_bytes": 1024}, False),
        (Engine(pieces=[TextDelta("x" * 2000)]), {"max_memory_bytes": 1000}, False),
        (Engine(pieces=[TextDelta("x" * 2000)]), {}, True),
    ],
)
async def test_which_answers_are_remembered(engine: Engine, settings: dict[str, Any], kept: bool) -> None:
    bench = Bench(tuned(ResponseCacheSettings, **settings), engine=engine)
    await bench.all(ask())
    assert await bench.outcome(ask()) == ("exact" if kept else "miss")


async def test_an_answer_that_failed_or_was_given_up_is_not_remembered() -> None:
    bench = Bench(engine=Engine(fails_after=EngineLostError("lost")))
    with pytest.raises(EngineLostError):
        await bench.all(ask())
    bench.engine.fails_after, bench.engine.middle = None, asyncio.Event()
    async with aclosing(bench.events(ask())) as events:
        await anext(events)
    await until(lambda: bench.engine.aborted == 1)
    assert not list(bench.memory)
    bench.engine.middle = None
    assert await bench.outcome(ask()) == "miss"


# -- at the same time -------------------------------------------------------------------------------------------------


async def test_a_hundred_identical_requests_are_one_generation() -> None:
    bench = Bench(shelf=Shelf(), engine=Engine(gate=asyncio.Event()))
    requests = [ask(stream=number % 2 == 0) for number in range(100)]
    waiting = [asyncio.create_task(bench.text(request)) for request in requests]
    await until(bench.engine.reached.is_set)
    assert bench.engine.gate is not None
    bench.engine.gate.set()
    assert set(await asyncio.gather(*waiting)) == {"Hello 1"}
    assert len(bench.engine.runs) == 1
    assert bench.shelf is not None
    outcomes = [request.trace.lookup.outcome for request in requests if request.trace.lookup]
    assert (outcomes.count("miss"), outcomes.count("shared")) == (1, 99)
    assert sum(request.trace.engine is not None for request in requests) == 1
    await until(lambda: bench.shelf is not None and bench.shelf.asked == 2)  # one look and one put, for all of them


async def test_what_was_computed_after_the_first_one_hung_up_is_on_the_account_of_the_next() -> None:
    bench = Bench(engine=Engine(middle=asyncio.Event()))
    first, second, third = ask(), ask(), ask()
    readers = [bench.events(request) for request in (first, second, third)]
    for events in readers:
        assert [type(await anext(events)) for _ in range(2)] == [Started, TextDelta]
    await readers[0].aclose()
    assert bench.engine.middle is not None
    bench.engine.middle.set()
    for events in readers[1:]:
        rest = [event async for event in events]
        assert rest[-1] == Finished("stop", Usage(10, 3, cached_tokens=10), None)
    assert (first.trace.engine, first.trace.completion_tokens, first.trace.hit) == ("engine-1", 1, None)
    for request, paid, saved in ((second, 2, 1), (third, 0, 3)):
        hit = request.trace.hit
        assert hit is not None
        assert (request.trace.paid_tokens, hit.prompt_tokens, hit.completion_tokens) == (paid, 10, saved)
        assert request.trace.completion_tokens == 3


async def test_when_the_first_one_hangs_up_before_the_first_token_the_next_is_as_if_it_were_alone() -> None:
    bench = Bench(engine=Engine(gate=asyncio.Event()))
    first, second = ask(), ask()
    waiting = [asyncio.create_task(bench.all(request)) for request in (first, second)]
    await until(bench.engine.reached.is_set)
    await until(lambda: bench.cache.stats()["waiting"] == 2)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert bench.engine.gate is not None
    bench.engine.gate.set()
    events = await waiting[1]
    assert events[-1] == Finished("stop", Usage(10, 3, cached_tokens=4), None)
    assert first.trace.engine is None
    assert (second.trace.engine, second.trace.prompt_tokens, second.trace.hit) == ("engine-1", 10, None)
    assert second.trace.lookup is not None
    assert second.trace.lookup.outcome == "miss"


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full"),
        DeadlineError.without_slot(1.0),
        QueueFullError("full"),
        EngineLostError("lost"),
        BadRequestError("no"),
    ],
)
async def test_a_failure_before_the_first_token_is_shared_by_all_who_joined(error: KvasirError) -> None:
    bench = Bench(engine=Engine(errors=[error] * 8))
    waiting = await asyncio.gather(*(bench.text(ask()) for _ in range(8)), return_exceptions=True)
    assert waiting == [error] * 8
    assert len(bench.engine.runs) == 1


async def test_the_leaders_own_deadline_fails_only_the_leader() -> None:
    bench = Bench(engine=Engine(errors=[DeadlineError("late"), OverloadedError("full")]))
    requests = [ask(deadline_s=0.0), *(ask() for _ in range(3))]
    waiting = await asyncio.gather(*map(bench.text, requests), return_exceptions=True)
    assert [type(answer) for answer in waiting] == [DeadlineError, *[OverloadedError] * 3]
    assert len(bench.engine.runs) == 2


async def test_a_full_queue_share_of_one_tenant_fails_that_tenant_alone() -> None:
    bench = Bench(engine=Engine(errors=[QueueFullError("full")]))
    requests = [ask(tenant=tenant, scope=Scope(namespace="n")) for tenant in "aabb"]
    waiting = await asyncio.gather(*map(bench.text, requests), return_exceptions=True)
    assert [type(answer) for answer in waiting] == [QueueFullError, QueueFullError, str, str]
    assert len(bench.engine.runs) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"lane": "batch"},
        {"tier": "flex"},
        {"priority": 1},
        {"reuse": Reuse(read=False)},
        {"reuse": Reuse(write=False)},
        {"reuse": Reuse(asked=False)},
    ],
)
async def test_who_does_not_share_does_not_wait_for_others(other: dict[str, Any]) -> None:
    bench = Bench(engine=Engine(gate=asyncio.Event()))
    waiting = [asyncio.create_task(bench.text(request)) for request in (ask(), ask(**other))]
    await until(lambda: len(bench.engine.runs) == 2)
    assert bench.engine.gate is not None
    bench.engine.gate.set()
    assert set(await asyncio.gather(*waiting)) == {"Hello 1", "Hello 2"}


# -- Redis ------------------------------------------------------------------------------------------------------------


async def test_another_gateway_has_the_answer_from_redis_and_then_in_its_own_memory() -> None:
    shelf = Shelf()
    one, two = Bench(shelf=shelf), Bench(shelf=shelf)
    await one.all(ask())
    await until(lambda: bool(shelf.entries))
    request = ask()
    assert await two.text(request) == "Hello 1"
    assert request.trace.lookup is not None
    assert request.trace.lookup.outcome == "exact"
    assert request.trace.cached_tokens == 10
    asked = shelf.asked
    assert await two.text(ask()) == "Hello 1"
    assert shelf.asked == asked


async def test_a_redis_that_is_away_is_a_cold_cache() -> None:
    shelf = Shelf()
    bench = Bench(shelf=shelf)
    shelf.down = True
    for number in range(5):
        assert await bench.outcome(ask(str(number))) == "miss"
        assert await bench.outcome(ask(str(number))) == "exact"  # from memory
    assert bench.exact.events()["redis_failures"] == shelf.asked
    shelf.down = False
    await bench.all(ask("later"))
    await until(lambda: bool(shelf.entries))


async def test_what_one_tenant_has_asked_changes_nothing_in_what_is_done_for_another() -> None:
    looked_up: list[list[tuple[str, str]]] = []
    for asked_before in (False, True):
        shelf = Shelf()
        bench = Bench(shelf=shelf)
        if asked_before:
            await bench.all(ask(tenant="a"))
            await until(lambda: bool(shelf.entries))  # noqa: B023 - asked at once
        shelf.looked_up.clear()
        assert await bench.outcome(ask(tenant="b")) == "miss"
        looked_up.append(list(shelf.looked_up))
    assert looked_up[0] == looked_up[1]
    assert [owner for owner, _ in looked_up[0]] == ["tenant:b"]


async def test_what_was_removed_elsewhere_is_given_from_memory_only_for_a_while() -> None:
    shelf = Shelf()
    bench = Bench(shelf=shelf)
    bench.exact = StoredAnswers(bench.memory, shelf, memory_s=60.0)
    bench.cache = ResponseCache(bench.settings, {}, bench.exact, None, lambda: bench.now)
    await bench.all(ask())
    await until(lambda: bool(shelf.entries))
    bench.now += 61
    assert await bench.outcome(ask()) == "exact"  # it is still there
    shelf.down, bench.now = True, bench.now + 61
    assert await bench.outcome(ask()) == "exact"  # nobody can tell
    shelf.down, bench.now = False, bench.now + 2
    shelf.entries.clear()
    assert await bench.outcome(ask()) == "miss"
    assert len(bench.engine.runs) == 2


async def test_what_may_be_given_again_is_what_the_cache_would_find_without_asking_redis() -> None:
    bench = Bench(shelf=(shelf := Shelf()))
    bench.exact = StoredAnswers(bench.memory, shelf, memory_s=60.0)
    bench.cache = ResponseCache(bench.settings, {}, bench.exact, None, lambda: bench.now)
    first, hit = ask(), ask(reuse=Reuse(max_age_s=50))
    await bench.all(first)
    await bench.all(hit)
    assert first.trace.repeat is None
    assert (repeat := hit.trace.repeat) is not None
    bench.now += 40
    assert (found := repeat.again()) is not None
    assert (found.outcome, found.age_s) == ("exact", 40)
    bench.now += 11
    assert repeat.again() is None  # older than its request wants
    await bench.all(hit := ask())
    assert (repeat := hit.trace.repeat) is not None
    assert repeat.again() is not None
    bench.now += 10
    assert repeat.again() is None  # another gateway may have removed it
    assert bench.cache.stats()["events"]["resent"] == 2


# -- what means the same ----------------------------------------------------------------------------------------------


@dataclass
class Meaning:
    """Takes every request for one that means the same as the first that was remembered."""

    key: bytes | None = None
    calls: list[str] = field(default_factory=list)
    anew: Regenerate | None = None

    async def find(self, query: Query[Any]) -> Match | None:
        self.calls.append("find")
        return None if self.key is None else Match(self.key, 0.97)

    def repeats(self, query: Query[Any]) -> Callable[[], None]:
        return lambda: self.calls.append("repeated")

    def hit(self, query: Query[Any], anew: Regenerate) -> None:
        self.calls.append("hit")
        self.anew = anew

    def gone(self, query: Query[Any], match: Match) -> None:
        self.calls.append("gone")

    def remember(self, query: Query[Any], answer: str | None) -> None:
        self.calls.append(f"remember {answer}")
        self.key = self.key or query.key


async def test_what_means_the_same_is_asked_for_after_an_exact_miss_and_told_of_answers() -> None:
    meaning = Meaning()
    bench = Bench(semantic=meaning)
    assert await bench.outcome(ask("How are you?")) == "miss"
    request = ask("How are you doing?")
    assert await bench.text(request) == "Hello 1"
    assert request.trace.lookup is not None
    assert (request.trace.lookup.outcome, request.trace.lookup.similarity) == ("semantic", 0.97)
    assert meaning.calls == ["find", "remember Hello 1", "find", "hit"]
    assert meaning.anew is not None
    assert await meaning.anew() == "Hello 2"
    assert bench.engine.runs[-1].lane == "batch"
    assert bench.audits == [("a", "demo", 10, 3)]
    assert request.trace.engine is None
    same = ask("How are you?")
    assert await bench.outcome(same) == "exact"
    assert meaning.calls[4:] == ["repeated"]
    assert same.trace.repeat is not None
    same.trace.repeat.again()
    assert meaning.calls[4:] == ["repeated", "repeated"]


async def test_an_audit_that_is_given_up_is_told_of_with_what_it_took() -> None:
    meaning = Meaning()
    bench = Bench(semantic=meaning)
    await bench.all(ask("How are you?"))
    await bench.all(ask("How are you doing?"))
    assert meaning.anew is not None
    bench.engine.middle = asyncio.Event()
    audit = asyncio.ensure_future(meaning.anew())
    await until(lambda: len(bench.engine.runs) == 2)
    audit.cancel()
    await asyncio.wait([audit])
    assert bench.audits == [("a", "demo", 10, 1)]


async def test_a_match_whose_answer_is_gone_is_a_miss() -> None:
    meaning = Meaning()
    bench = Bench(tuned(ResponseCacheSettings, ttl_s=10), semantic=meaning)
    await bench.all(ask("How are you?"))
    bench.now += 11
    assert await bench.text(ask("How are you doing?")) == "Hello 2"
    assert meaning.calls[2:] == ["find", "gone", "remember Hello 2"]
