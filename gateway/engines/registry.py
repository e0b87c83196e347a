"""The known engines, and which of them serve a model now.

Engines are named in the settings, started by `kvasir serve`, or found by their announcements in Redis
(engine/publish.py). Each has a client that connects by itself: that of a bundled engine (bundled.py) is made by the
`connect` of app.py, those of other servers (replicas/replica.py) are attached.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from redis.asyncio import Redis

from engine.protocol import ENGINES_KEY, Hello, Load, Sampling, SequenceUpdate, announcement_key
from gateway import tasks
from gateway.errors import ModelNotFoundError, NoEngineError, RedisDownError
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.types import EncodedPrompt, Request

log = logging.getLogger(__name__)

_STORE: Final = "announcements of engines"

MAX_DISCOVERED: Final = 1024
FRESH_S: Final = 1.0
"""Seconds for which counters are new enough: two scrapes at a time cost an engine one answer."""

MAX_MODELS: Final = 4096
"""Models remembered after their engines left; the oldest is forgotten first."""


class Client(Protocol):
    """An engine of any kind, joined or not: stages.Engine and more. See bundled.py for what each member promises."""

    name: str
    url: str
    why: str

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...

    @property
    def prefilling(self) -> Mapping[str, int]: ...

    def reused(self, held_tokens: int, prompt_tokens: int) -> int: ...

    async def render(self, prompt: EncodedPrompt, request: Request) -> EncodedPrompt: ...

    def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]: ...

    @property
    def model(self) -> str | None: ...

    @property
    def joined(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def wait_joined(self) -> None: ...

    async def fetch_stats(self) -> dict[str, Any] | None: ...

    async def purge(self, salt_prefix: str) -> dict[str, Any]: ...


class Registry:
    """stages.Registry. Single event loop; `serving` takes microseconds and awaits nothing."""

    def __init__(
        self,
        connect: Callable[[str, str], Client],
        *,
        retry_after_s: float,
        redis: Redis | None = None,
        breaker: RedisBreaker | None = None,
        discover_s: float = 1.0,
        start_timeout_s: float = 0.0,
        on_unused: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        connect          makes a client from a name and a URL, without starting it
        retry_after_s    Retry-After for a client whose model has no engine at the moment
        redis            where engines announce themselves; None switches discovery off
        breaker          of all calls of this gateway
        discover_s       seconds between looks at the announcements, and how long one look may take
        start_timeout_s  how long an engine that was never reached may turn out to serve any model
        on_unused        called with the fingerprint of a tokeniser that no known engine has any more
        """
        self._connect = connect
        self._retry_after_s = retry_after_s
        self._calls = None if redis is None else RedisCalls(redis, max(discover_s, 1.0), breaker)
        self._discover_s = discover_s
        self._start_timeout_s = start_timeout_s
        self._on_unused = on_unused
        self._clock = clock
        self._added_s: dict[str, float] = {}  # by URL
        self._clients: dict[str, Client] = {}  # by URL
        self._discovered: set[str] = set()  # URLs found in Redis
        self._has_looked = redis is None
        self._models: dict[str, int] = {}  # model -> Unix second of the start of its newest engine
        self._tokenizers: set[str] = set()  # fingerprints that engines have, or had at the last look
        self._mixed: set[str] = set()  # models whose engines differ, as the log says
        self._looking: asyncio.Task[None] | None = None

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[Client]:
        """Every engine that is known, joined or not."""
        return list(self._clients.values())

    def serving(self, model: str) -> Sequence[Client]:
        """Engines that are joined and not draining, alike in all that a prompt's tokens and digests depend on; at least
        one. A LoRA adapter is served by the engines of its model, and theirs is the hello: see Hello.named. Raises
        NoEngineError when the model is known and its engines are unreachable, or may be that of an engine that is still
        starting or was not yet looked for, and ModelNotFoundError otherwise."""
        found: dict[str, Client] = {}
        for client in self._clients.values():
            if client.joined and client.hello.named(model).model == model and not client.draining:
                found.setdefault(client.hello.incarnation, client)  # one engine may be known under two URLs
        if not found:
            self._remember()
            if model in self._models or not self._has_looked or self._any_starting():
                raise NoEngineError(model, self._retry_after_s)
            raise ModelNotFoundError(model)
        return self._alike(model, list(found.values()))

    def models(self) -> Mapping[str, int]:
        """Every model that is or was served here -> Unix second at which its newest engine started."""
        self._remember()
        return dict(self._models)

    def prefill_tokens_per_s(self, name: str) -> float:
        """What an engine has measured; 0 when it has not, or is not known."""
        return next((one.load.prefill_tokens_per_s for one in self._clients.values() if one.name == name), 0.0)

    def was_joined(self, url: str) -> bool:
        """Whether the engine at this URL is joined or ever was. False for one that is not known."""
        client = self._clients.get(_key(url))
        return client is not None and client.model is not None

    async def wait_joined(self) -> None:
        """Returns when every engine that is known now is joined. May wait for ever."""
        await asyncio.gather(*(client.wait_joined() for client in self.engines))

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, url: str, name: str | None = None) -> None:
        """Makes an engine known that stays known, and begins to connect. Nothing happens when the URL is known."""
        key = _key(url)
        self._discovered.discard(key)
        if key not in self._clients:
            self.attach(self._connect(name or short_name(url), url))

    def attach(self, client: Client) -> None:
        """Makes an engine known by its client, and starts that. Nothing happens when its URL is known."""
        key = _key(client.url)
        if key not in self._clients:
            self._clients[key], self._added_s[key] = client, self._clock()
            client.start()

    async def detach(self, client: Client) -> None:
        """Forgets an engine, and stops its client."""
        key = _key(client.url)
        if self._clients.get(key) is client:
            del self._clients[key], self._added_s[key]
            self._remember()
            await client.stop()

    def start(self) -> None:
        """Begins to look for announcements, if there is a Redis to look in."""
        if self._calls is not None:
            self._looking = tasks.spawn(self._look(self._calls), name="discover engines")

    async def stop(self) -> None:
        """Disconnects from every engine."""
        await tasks.cancel(self._looking)
        await asyncio.gather(*(client.stop() for client in self._clients.values()))

    # -- discovery ----------------------------------------------------------------------------------------------------

    async def _look(self, calls: RedisCalls) -> None:
        while not tasks.was_cancelled():
            with suppress(RedisDownError):
                await self._follow(await calls.ask(announced(calls.redis)))
            await asyncio.sleep(self._discover_s)

    async def _follow(self, urls: Mapping[str, str]) -> None:
        """Connects to announced engines, and forgets those that are neither announced nor joined any more."""
        by_key = {_key(url): (incarnation, url) for incarnation, url in urls.items()}
        joined = {client.hello.incarnation for client in self._clients.values() if client.joined}
        for key, (incarnation, url) in by_key.items():
            if key not in self._clients and incarnation not in joined and len(self._discovered) < MAX_DISCOVERED:
                log.info("engine found in Redis: %s", url)
                self.add(url)
                self._discovered.add(key)
        self._has_looked = True
        self._remember()
        for key in self._discovered - by_key.keys():
            client = self._clients[key]
            if not client.joined:
                log.info("engine %s is gone", client.name)
                self._discovered.discard(key)
                del self._clients[key], self._added_s[key]
                await client.stop()
        self._remember()

    def _any_starting(self) -> bool:
        youngest_s = self._clock() - self._start_timeout_s
        return any(client.model is None and self._added_s[key] > youngest_s for key, client in self._clients.items())

    # -- models -------------------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Notes what the engines serve now, and reports tokenisers that none of them has any more."""
        tokenizers = set()
        for client in self._clients.values():
            if client.model is not None:
                for model in (client.model, *(name for name, _ in client.hello.adapters)):
                    self._models[model] = max(client.hello.created, self._models.pop(model, 0))
                tokenizers.add(client.hello.tokenizer)
        unused, self._tokenizers = self._tokenizers - tokenizers, tokenizers
        for fingerprint in unused:
            self._on_unused(fingerprint)
        while len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]

    def _alike(self, model: str, clients: list[Client]) -> list[Client]:
        """The largest group of engines that agree on tokens and digests, the newest one among equals."""
        first, *others = clients
        hello = first.hello.named(model)
        if not others or all(_identity(client.hello.named(model)) == _identity(hello) for client in others):
            self._mixed.discard(model)
            return clients
        groups: dict[object, list[Client]] = {}
        for client in clients:
            groups.setdefault(_identity(client.hello.named(model)), []).append(client)
        if model not in self._mixed:
            self._mixed.add(model)
            log.warning("engines that serve %s differ in weights, tokeniser, context or block size", model)
        return max(groups.values(), key=lambda group: (len(group), max(client.hello.created for client in group)))


class EngineFigures:
    """The engines' own counters, fetched for /metrics and /admin/stats, at most once every FRESH_S. An engine that is
    unreachable or does not answer in time has none. Belongs to one event loop."""

    def __init__(self, engines: Callable[[], Sequence[Client]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = engines
        self._clock = clock
        self._figures: dict[str, Mapping[str, Any]] = {}  # by URL
        self._fetched_s = float("-inf")
        self._one_at_a_time = asyncio.Lock()

    async def refresh(self) -> None:
        """Returns when every engine has answered or had its time, at once if they did a moment ago."""
        async with self._one_at_a_time:
            if self._clock() - self._fetched_s < FRESH_S:
                return
            engines = list(self._engines())
            answers = await asyncio.gather(*(engine.fetch_stats() for engine in engines))
            self._figures = {engine.url: stats for engine, stats in zip(engines, answers, strict=True) if stats}
            self._fetched_s = self._clock()

    def of(self, url: str) -> Mapping[str, Any]:
        """The engine's last answer, empty without one. Must not be changed."""
        return self._figures.get(url, {})


async def announced(redis: Redis) -> dict[str, str]:
    """Incarnation -> URL of every engine whose announcement has not expired. Raises RedisError and OSError."""
    members: list[Any] = await redis.zrevrange(ENGINES_KEY, 0, MAX_DISCOVERED - 1)
    names = [read_or_skip(_STORE, partial(_text, member)) for member in members]
    incarnations = [name for name in names if name is not None]
    async with redis.pipeline(transaction=False) as pipe:  # not MGET: the keys lie in different cluster slots
        for incarnation in incarnations:
            pipe.get(announcement_key(incarnation))
        values = await pipe.execute(raise_on_error=False)
    if any(isinstance(value, ConnectionError) for value in values):
        raise OSError("the connection to Redis ended")
    urls = {}
    for incarnation, value in zip(incarnations, values, strict=True):
        url = None if value is None else read_or_skip(_STORE, partial(_url, value))
        if url:
            urls[incarnation] = url
    return urls


def short_name(url: str) -> str:
    """`unix:/run/engine-0.sock` -> `engine-0`, `http://host:8090` -> `host:8090`."""
    if url.startswith("unix:"):
        return url.rsplit("/", 1)[-1].removeprefix("unix:").removesuffix(".sock")
    return urlsplit(url if "://" in url else f"http://{url}").netloc


def _key(url: str) -> str:
    """One spelling for URLs that mean the same place."""
    if url.startswith("unix:"):
        return "unix:" + url.removeprefix("unix:").removeprefix("//")
    return (url if "://" in url else f"http://{url}").rstrip("/").lower()


def _url(announcement: Any) -> str:
    """Raises ValueError and others for what no engine wrote."""
    url = json.loads(announcement)["url"]
    if not url.startswith(("http://", "https://", "unix:")) or not short_name(url):
        raise ValueError("no URL")
    return str(url)


def _identity(hello: Hello) -> object:
    return hello.namespace, hello.tokenizer, hello.context_tokens, hello.eos_ids


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
