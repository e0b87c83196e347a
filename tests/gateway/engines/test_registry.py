"""Which engines can be given a request, and which are found in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol import ENGINES_KEY, Hello, Namespace, announcement_key
from gateway.engines import registry as registry_module
from gateway.engines.bundled import BundledEngine
from gateway.engines.registry import FRESH_S, EngineFigures, Registry, short_name
from gateway.errors import ModelNotFoundError, NoEngineError
from tests.fakes.clock import Clock
from tests.fakes.fake_engine import FakeEngine, make_hello
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

LOOK_S = 0.02


@dataclass
class FakeClient:
    """A client whose connection the test makes and breaks."""

    name: str
    url: str
    draining: bool = False
    joined: bool = False
    started: int = 0
    stopped: int = 0
    said: Hello | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def hello(self) -> Hello:
        assert self.said is not None
        return self.said

    @property
    def model(self) -> str | None:
        return self.said.model if self.said else None

    def start(self) -> None:
        self.started += 1

    async def stop(self) -> None:
        self.stopped += 1
        self.joined = False

    async def wait_joined(self) -> None:
        await self.ready.wait()

    def join(self, hello: Hello | None = None) -> None:
        self.said = hello or make_hello()
        self.joined = True
        self.ready.set()


class Looks:
    """Counts the looks at the announcements, in a registry module that is patched for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        announced = registry_module.announced

        async def counted(redis: Redis) -> dict[str, str]:
            self.begun += 1
            return await announced(redis)

        monkeypatch.setattr(registry_module, "announced", counted)

    async def whole_one(self) -> None:
        """Returns when a look that began after this call has ended, and what it led to is done."""
        wanted = self.begun + 2
        await until(lambda: self.begun >= wanted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def new(redis: Redis | None = None) -> Registry:
    return Registry(FakeClient, retry_after_s=2.0, redis=redis, discover_s=LOOK_S)


def names(registry: Registry, model: str = "demo") -> list[str]:
    return [client.name for client in registry.serving(model)]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client: Redis = Redis.from_url(redis_url)
    yield client
    await client.aclose()


async def announce(redis: Redis, hello: Hello, url: object, *, seconds: float = 30.0) -> None:
    await redis.zadd(ENGINES_KEY, {hello.incarnation: time.time() + seconds})
    value = json.dumps({**hello.to_json(), "url": url})
    await redis.set(announcement_key(hello.incarnation), value, px=int(seconds * 1000))


def test_a_known_model_whose_engines_are_away_is_asked_to_come_back_later() -> None:
    registry = new()
    registry.add("http://a:1")
    with pytest.raises(ModelNotFoundError):
        registry.serving("demo")
    (client,) = registry.engines
    client.join()
    assert names(registry) == ["a:1"]
    client.joined = False
    with pytest.raises(NoEngineError) as caught:
        registry.serving("demo")
    assert caught.value.retry_after_s == 2.0
    assert list(registry.models()) == ["demo"]


def test_while_an_engine_starts_any_model_may_be_its_own() -> None:
    now = [100.0]
    registry = Registry(FakeClient, retry_after_s=2.0, start_timeout_s=60.0, clock=lambda: now[0])
    registry.add("http://a:1")
    with pytest.raises(NoEngineError):
        registry.serving("demo")
    now[0] += 61.0
    with pytest.raises(ModelNotFoundError):
        registry.serving("demo")
    registry.add("http://b:1")
    with pytest.raises(NoEngineError):
        registry.serving("demo")
    for client in registry.engines:
        client.join()
    with pytest.raises(ModelNotFoundError):
        registry.serving("another")


async def test_until_a_redis_was_looked_into_any_model_may_be_that_of_an_engine_there(own_redis: RedisProcess) -> None:
    """A gateway that starts while Redis is away knows no engine, and none of its models."""
    await asyncio.to_thread(own_redis.kill)
    client: Redis = Redis.from_url(own_redis.url)
    registry = Registry(FakeClient, retry_after_s=2.0, redis=client, discover_s=LOOK_S)
    try:
        registry.start()
        with pytest.raises(NoEngineError):
            registry.serving("demo")
        await asyncio.to_thread(own_redis.start)

        def is_unknown() -> bool:
            with pytest.raises((ModelNotFoundError, NoEngineError)) as caught:
                registry.serving("demo")
            return caught.type is ModelNotFoundError

        await until(is_unknown)
    finally:
        await registry.stop()
        await client.aclose()


def test_each_model_has_its_own_engines() -> None:
    registry = new()
    for number, model in enumerate(["one", "two", "one"]):
        registry.add(f"http://e{number}:1")
        registry.engines[number].join(make_hello(model, created=100 + number))
    assert names(registry, "one") == ["e0:1", "e2:1"]
    assert names(registry, "two") == ["e1:1"]
    assert registry.models() == {"one": 102, "two": 101}


def test_a_draining_engine_gets_nothing_new() -> None:
    registry = new()
    registry.add("http://a:1")
    registry.add("http://b:1")
    for client in registry.engines:
        client.join()
    registry.engines[0].draining = True
    assert names(registry) == ["b:1"]
    registry.engines[1].draining = True
    with pytest.raises(NoEngineError):
        registry.serving("demo")


def test_an_engine_known_under_two_urls_counts_once() -> None:
    registry = new()
    hello = make_hello()
    for url in ("http://localhost:1", "http://127.0.0.1:1"):
        registry.add(url)
        registry.engines[-1].join(hello)
    assert len(names(registry)) == 1


def test_adding_a_url_twice_makes_one_client() -> None:
    registry = new()
    for url in ("http://a:1", "http://a:1/", "HTTP://A:1", "a:1", "unix:/x/e.sock", "unix:///x/e.sock"):
        registry.add(url)
    assert [client.name for client in registry.engines] == ["a:1", "e"]
    assert [client.started for client in registry.engines] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"namespace": Namespace(weights="other", dtype="f", kv_dtype="f", block_size=16)}, ["a:1", "b:1"]),
        ({"tokenizer": "other"}, ["a:1", "b:1"]),
        ({"context_tokens": 17}, ["a:1", "b:1"]),
        ({"num_blocks": 17, "max_sequences": 3, "created": 5}, ["a:1", "b:1", "c:1"]),
    ],
    ids=["weights", "tokeniser", "context", "only the size"],
)
def test_engines_of_one_model_that_differ_are_never_mixed(
    changes: dict[str, object], left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    registry = new()
    for url, hello in (("a:1", make_hello()), ("b:1", make_hello()), ("c:1", make_hello(**changes))):
        registry.add(url)
        registry.engines[-1].join(hello)
    for _ in range(3):
        assert names(registry) == left
    assert len(caplog.records) == (len(left) == 2)


def test_an_engine_was_joined_from_its_first_hello_on() -> None:
    registry = new()
    assert not registry.was_joined("http://a:1")
    registry.add("http://a:1")
    assert not registry.was_joined("http://a:1")
    registry.engines[0].join()
    registry.engines[0].joined = False
    assert registry.was_joined("http://A:1/")


async def test_waiting_for_the_first_engines_ends_when_all_have_joined() -> None:
    registry = new()
    registry.add("http://a:1")
    registry.add("http://b:1")
    waiting = asyncio.create_task(registry.wait_joined())
    registry.engines[0].join()
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.engines[1].join()
    await asyncio.wait_for(waiting, 30)


async def test_an_engine_that_announces_itself_is_connected_to_and_forgotten_when_it_is_gone(
    redis: Redis, looks: Looks
) -> None:
    registry = new(redis)
    hello = make_hello()
    await announce(redis, hello, "http://e:1")
    registry.start()
    await until(lambda: len(registry.engines) == 1)
    (client,) = registry.engines
    assert (client.url, client.started) == ("http://e:1", 1)
    client.join(hello)
    await redis.delete(announcement_key(hello.incarnation))
    await looks.whole_one()
    assert registry.engines == [client], "joined: Redis may have lost its data"
    client.joined = False
    await until(lambda: not registry.engines)
    assert client.stopped == 1
    with pytest.raises(NoEngineError):  # its model is still known
        registry.serving("demo")
    await registry.stop()


async def test_a_tokeniser_is_given_up_with_the_last_engine_that_has_it(redis: Redis) -> None:
    unused: list[str] = []
    registry = Registry(FakeClient, retry_after_s=2.0, redis=redis, discover_s=LOOK_S, on_unused=unused.append)
    hellos = [make_hello(tokenizer=name) for name in ("shared", "shared", "own")]
    for number, hello in enumerate(hellos):
        await announce(redis, hello, f"http://e{number}:1")
    registry.start()
    await until(lambda: len(registry.engines) == 3)
    clients = {client.url: client for client in registry.engines}
    for number, hello in enumerate(hellos):
        clients[f"http://e{number}:1"].join(hello)

    async def leave(number: int) -> None:
        await redis.delete(announcement_key(hellos[number].incarnation))
        client = clients[f"http://e{number}:1"]
        client.joined = False
        await until(lambda: client not in registry.engines)

    await leave(0)
    clients["http://e1:1"].joined = False  # for a moment: it is still announced
    await leave(2)
    await until(lambda: unused == ["own"])
    await leave(1)
    await until(lambda: unused == ["own", "shared"])
    await registry.stop()


def test_an_engine_that_comes_back_with_another_tokeniser_gives_up_its_first() -> None:
    unused: list[str] = []
    registry = Registry(FakeClient, retry_after_s=2.0, on_unused=unused.append)
    registry.add("http://a:1")
    (client,) = registry.engines
    for tokenizer in ("old", "new", "new"):
        client.join(make_hello(tokenizer=tokenizer))
        registry.models()
    assert unused == ["old"]


async def test_an_engine_that_is_connected_already_is_not_found_again(redis: Redis) -> None:
    registry = new(redis)
    registry.add("unix:/x/e.sock", "engine-0")
    hello = make_hello()
    registry.engines[0].join(hello)
    await announce(redis, hello, "http://elsewhere:1")
    await announce(redis, make_hello(), "unix:///x/e.sock")
    registry.start()
    await announce(redis, make_hello(), "http://new:1")
    await until(lambda: len(registry.engines) == 2)
    assert [client.name for client in registry.engines] == ["engine-0", "new:1"]
    await registry.stop()


@pytest.mark.parametrize("url", [None, 7, "", "ftp://e:1", "e:1"])
async def test_an_announcement_without_a_usable_url_is_passed_over(redis: Redis, url: object) -> None:
    registry = new(redis)
    await announce(redis, make_hello(), url)
    await redis.zadd(ENGINES_KEY, {"never announced": time.time() + 9})
    await redis.zadd(ENGINES_KEY, {"nonsense": time.time() + 9})
    await redis.set(announcement_key("nonsense"), b"\xff{")
    await redis.zadd(ENGINES_KEY, {"nested": time.time() + 9})
    await redis.set(announcement_key("nested"), b"[" * 200_000)
    await announce(redis, make_hello(), "http://good:1")
    registry.start()
    await until(lambda: len(registry.engines) == 1)
    assert registry.engines[0].url == "http://good:1"
    await registry.stop()


async def test_discovery_survives_an_outage_of_redis(
    own_redis: RedisProcess, looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client: Redis = Redis.from_url(own_redis.url)
    registry = new(client)
    registry.add("http://static:1")
    registry.engines[0].join()
    await asyncio.to_thread(own_redis.kill)
    registry.start()
    await looks.whole_one()
    assert names(registry) == ["static:1"]
    await asyncio.to_thread(own_redis.start)
    await announce(client, make_hello(), "http://found:1")
    await until(lambda: len(registry.engines) == 2)
    warned = {record.name for record in caplog.records if record.levelno >= logging.WARNING}
    assert warned <= {"gateway.storage.breaker"}
    await registry.stop()
    await client.aclose()


async def test_stopping_ends_a_look_whose_cancellation_redis_py_drops() -> None:
    class Deaf:
        async def zrevrange(self, *arguments: object) -> list[bytes]:
            asked.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise RedisError

    asked = asyncio.Event()
    registry = new(cast("Redis", Deaf()))
    registry.start()
    await asyncio.wait_for(asked.wait(), 30)
    await asyncio.wait_for(registry.stop(), 30)


async def test_a_static_engine_is_never_forgotten(redis: Redis, looks: Looks) -> None:
    registry = new(redis)
    hello = make_hello()
    await announce(redis, hello, "http://e:1", seconds=30)
    registry.start()
    await until(lambda: len(registry.engines) == 1)
    registry.add("http://e:1")
    await redis.delete(announcement_key(hello.incarnation))
    await looks.whole_one()
    assert len(registry.engines) == 1
    await registry.stop()


@pytest.mark.parametrize(
    ("url", "name"),
    [("unix:/run/engine-0.sock", "engine-0"), ("unix:e", "e"), ("http://host:8090", "host:8090"), ("h:1", "h:1")],
)
def test_names_are_short(url: str, name: str) -> None:
    assert short_name(url) == name


LIMIT_S = 30.0


@dataclass
class Told:
    """An engine that answers when the test lets it."""

    url: str
    stats: dict[str, Any] | None
    asked: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def fetch_stats(self) -> dict[str, Any] | None:
        self.asked += 1
        await self.go.wait()
        return self.stats


async def test_everybody_who_looks_at_once_waits_for_the_same_answer() -> None:
    told, clock = Told("a", {"n": 1}), Clock()
    figures = EngineFigures(lambda: [told], clock=clock)
    looking = [asyncio.create_task(figures.refresh()) for _ in range(5)]
    await until(lambda: told.asked > 0)
    looking[4].cancel()
    assert figures.of("a") == {}
    told.go.set()
    await asyncio.wait(looking, timeout=LIMIT_S)
    assert looking[4].cancelled()
    assert (told.asked, figures.of("a"), figures.of("b")) == (1, {"n": 1}, {})


async def test_figures_are_new_for_a_moment_and_then_asked_for_again() -> None:
    told, gone, clock = Told("a", {"n": 1}), Told("b", {"n": 2}), Clock()
    clients = [told, gone]
    figures = EngineFigures(lambda: clients, clock=clock)
    for client in clients:
        client.go.set()
    await figures.refresh()
    clock.now_s += FRESH_S - 0.01
    await figures.refresh()
    assert told.asked == 1
    told.stats, clock.now_s = None, clock.now_s + 0.01
    clients.remove(gone)
    await figures.refresh()
    assert (told.asked, figures.of("a"), figures.of("b")) == (2, {}, {})


async def nobody(*_: Any) -> None:
    """Loads no tokeniser."""


def client_of(fake: FakeEngine, timeout_s: float, secret: str | None = None) -> BundledEngine:
    ignored: Any = lambda *_: 0  # noqa: E731
    return BundledEngine(
        "e",
        fake.url,
        stats_timeout_s=timeout_s,
        secret=secret,
        on_tokenizer=nobody,
        on_blocks=ignored,
        on_lost=ignored,
        on_load=ignored,
        prefix=ignored,
    )


async def test_an_engine_tells_its_counters_to_those_it_knows() -> None:
    async with FakeEngine(stats={"evictions": 3}, secret="s") as fake:
        client = client_of(fake, 5.0, "s")
        assert await client.fetch_stats() is None
        client.start()
        try:
            await asyncio.wait_for(client.wait_joined(), LIMIT_S)
            stats = await client.fetch_stats()
            assert stats is not None
            assert stats["evictions"] == 3
            await fake.die()
            await until(lambda: not client.joined)
            assert await client.fetch_stats() is None
        finally:
            await client.stop()


@pytest.mark.parametrize("stats_s", [600.0, 0.0])
async def test_an_engine_that_does_not_answer_in_time_or_with_nonsense_is_shown_without(stats_s: float) -> None:
    async with FakeEngine(stats_s=stats_s) as fake:
        if not stats_s:
            fake.behaviour.stats = {"text": "x" * (2 << 20)}  # more than anybody reads
        client = client_of(fake, 0.05 if stats_s else 5.0)
        client.start()
        try:
            await asyncio.wait_for(client.wait_joined(), LIMIT_S)
            assert await client.fetch_stats() is None
            assert fake.stats_requests == 1
            assert client.joined
        finally:
            await client.stop()


def test_an_adapter_is_a_model_that_the_engines_of_its_model_serve() -> None:
    registry = new()
    registry.add("http://a:1")
    registry.add("http://b:1")
    first, second = cast("list[FakeClient]", registry.engines)
    hello = make_hello()
    first.join(replace(hello, incarnation="1", adapters=(("pirate", "f1"),)))
    second.join(replace(hello, incarnation="2"))
    assert names(registry, "pirate") == ["a:1"]
    assert names(registry) == ["a:1", "b:1"]
    assert set(registry.models()) == {"demo", "pirate"}
    with pytest.raises(ModelNotFoundError):
        registry.serving("corsair")
    second.join(replace(hello, incarnation="2", adapters=(("pirate", "f2"),), created=hello.created + 1))
    assert names(registry, "pirate") == ["b:1"]  # another adapter of that name, and the newer one
    assert names(registry) == ["a:1", "b:1"]
    first.joined = second.joined = False
    with pytest.raises(NoEngineError):
        registry.serving("pirate")
