"""The composition root: builds every stage once, hands each its own settings, and tears all down in reverse.

Nothing else knows who implements what. `serve` is what `kvasir serve` and `kvasir gateway` run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from aiohttp import web
from redis.asyncio import Redis

from engine.compute.threads import choose_threads, usable_cores
from engine.config import ConfigError, EngineSettings
from gateway.admin.sources import EngineState, EngineStatus, Sources
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.replays import REPLAYS
from gateway.api.routes import RUNNER, app_runner, build_app
from gateway.config import Settings
from gateway.contents.memory_contents import MemoryContents
from gateway.contents.redis_contents import RedisContents
from gateway.contents.shared_contents import SharedContents
from gateway.engine_processes import EngineProcesses, EngineStartError
from gateway.engines.bundled import BundledEngine
from gateway.engines.figures import EngineFigures
from gateway.files.folder import Folder
from gateway.files.store import FileStore
from gateway.index.fallback import FallbackIndex
from gateway.index.memory_index import MemoryIndex
from gateway.index.redis_index import RedisIndex, connect
from gateway.ledger.base import Book
from gateway.ledger.ledger import Ledger
from gateway.ledger.memory_book import MemoryBook
from gateway.ledger.prices import Prices
from gateway.ledger.redis_book import RedisBook
from gateway.limits.limits import TenantLimits
from gateway.limits.memory_counters import MemoryCounters
from gateway.limits.redis_counters import RedisCounters
from gateway.limits.shared_counters import SharedCounters
from gateway.prompt.stage import PromptStage
from gateway.queues.batch.lane import BatchLane
from gateway.queues.places import PlaceQueue
from gateway.redis_server import RedisServer, RedisStartError
from gateway.responses.embedding.embedder import Embedder
from gateway.responses.exact import ExactCache
from gateway.responses.kept_answers import KeptAnswers
from gateway.responses.memory_entries import MemoryEntries
from gateway.responses.redis_entries import RedisEntries
from gateway.responses.semantic.cache import SemanticCache
from gateway.responses.semantic.redis_questions import RedisQuestions
from gateway.responses.stage import ResponseCache
from gateway.routing.registry import Registry
from gateway.routing.router import Router
from gateway.stores.base import Backend
from gateway.stores.memory_store import MemoryStore
from gateway.stores.redis_store import RedisStore
from gateway.street import Street
from gateway.upstreams.stage import Upstreams
from gateway.version import installed_version

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0
"""What a client is told whose model has no engine at the moment: about what one takes to start."""


@dataclass
class Gateway:
    """The stages, built and wired. `engines` grows while the gateway runs."""

    settings: Settings
    redis: Redis | None
    redis_url: str | None
    upstream_keys: Mapping[str, str] = field(default_factory=dict)
    memory: MemoryIndex = field(default_factory=MemoryIndex)
    draining: bool = False

    def __post_init__(self) -> None:
        settings = self.settings
        self.prompts = PromptStage(settings.prompt)
        self.queue: PlaceQueue[BundledEngine] = PlaceQueue(settings.queue, Router(settings.routing))
        self.embedder = Embedder(settings.embeddings)
        redis_index = RedisIndex(self.redis, timeout_s=settings.redis.timeout_s) if self.redis is not None else None
        self.index = FallbackIndex(redis_index, self.memory, retry_s=settings.redis.retry_s)
        self.contents = _contents(settings, self.redis)
        folder = settings.files.folder or settings.server.data_dir / "files"
        self.files = FileStore(Folder(folder, settings.files, time.time), settings.files)
        jobs_folder = settings.batches.folder or settings.server.data_dir / "batches"
        # A connection of its own: what is asked about jobs may take longer than what a request waits for.
        timeout_s = settings.batches.redis_timeout_s
        self.batch_redis = connect(self.redis_url, timeout_s) if self.redis_url and self.redis is not None else None
        self.batches = BatchLane(self.batch_redis, jobs_folder, self.files, settings.batches, time.time)
        self.registry = Registry(
            self._connect,
            retry_after_s=RETRY_AFTER_S,
            start_timeout_s=settings.engines.start_timeout_s,
            on_unused=self.prompts.unload,
            redis=self.redis if settings.engines.discover else None,
        )
        self.responses = ResponseStore(self._response_backend(), retry_s=settings.redis.retry_s)
        self.ledger = Ledger(settings.ledger, Prices(settings.prices, settings.batches.price), self._book(), time.time)
        self.limits = TenantLimits(settings.limits, settings.tenants, _counters(settings, self.redis))
        self.upstreams = Upstreams(settings.upstreams, self.upstream_keys)
        self.figures = EngineFigures(lambda: self.registry.engines)
        remembered = MemoryEntries(settings.response_cache.max_memory_bytes, time.time)
        shared = _shared_answers(settings, self.redis)
        self.answers = KeptAnswers(remembered, shared)
        self.semantic_cache = _semantic_cache(settings, self.redis, self.embedder)
        self.response_cache = _response_cache(settings, remembered, shared, self.semantic_cache)
        self.remembered = self.response_cache.before(self.upstreams, REPLAYS)
        self.street = Street(
            prompts=self.prompts,
            index=self.index,
            registry=self.registry,
            queue=self.queue,
            max_attempts=settings.server.max_attempts,
            responses=self.response_cache,
        )

    def web_app(self) -> web.Application:
        settings = self.settings
        return build_app(
            server=settings.server,
            leases=settings.leases,
            anthropic=settings.anthropic,
            gemini=settings.gemini,
            auth=settings.auth,
            tenants=settings.tenants,
            namespaces=settings.namespaces,
            embeddings=settings.embeddings,
            street=self.street,
            models=self.registry,
            decoders=self.prompts,
            upstreams=self.remembered,
            embedder=self.embedder,
            responses=self.responses,
            fingerprints=self._fingerprint_backend(),
            stored_responses=settings.stored_responses,
            contents=self.contents,
            files=self.files,
            upload_timeout_s=settings.files.upload_timeout_s,
            batches=settings.batches,
            jobs=self.batches.store,
            now=time.time,
            allowance=self.queue.allowance,
            ledger=self.ledger,
            answers=self.answers,
            rendered_bytes=settings.response_cache.max_rendered_bytes,
            limits=self.limits,
            sources=Sources(
                refresh=self.figures.refresh,
                engines=self._engine_statuses,
                queue=self.queue.status,
                prompts=self.prompts.stats,
                embeddings=self.embedder.figures,
                upstreams=self.upstreams.figures,
                responses=lambda: self.responses.outcomes,
                ledger=self.ledger,
                limits=self.limits.figures,
                response_cache=self.response_cache.stats,
                redis=lambda: {"up": self.index.redis_up, "outages": self.index.outages},
                batches=self.batches.figures,
                draining=lambda: self.draining,
                version=installed_version(),
            ),
        )

    def _response_backend(self) -> Backend:
        settings = self.settings
        if self.redis is None:
            return MemoryStore(settings.stored_responses)
        return RedisStore(self.redis, settings.stored_responses, timeout_s=settings.redis.timeout_s)

    def _fingerprint_backend(self) -> Backend:
        settings = self.settings
        if self.redis is None:
            return MemoryStore(settings.anthropic.fingerprints)
        limits, timeout_s = settings.anthropic.fingerprints, settings.redis.timeout_s
        return RedisStore(self.redis, limits, timeout_s=timeout_s, name="fingerprints")

    def _book(self) -> Book:
        if self.redis is None:
            return MemoryBook()
        return RedisBook(self.redis, timeout_s=self.settings.redis.timeout_s)

    def _connect(self, name: str, url: str) -> BundledEngine:
        return BundledEngine(
            name,
            url,
            self.settings.engines,
            secret=self.settings.engine.secret,
            on_tokenizer=self.prompts.load,
            on_blocks=self.memory.apply,
            on_lost=self._lost,
            on_load=self.queue.heard,
            prefix=self.memory.prefix,
        )

    def _lost(self, incarnation: str) -> None:
        self.memory.drop(incarnation)
        self.queue.forget(incarnation)

    def _engine_statuses(self) -> list[EngineStatus]:
        return [_status(engine, self.figures.of(engine.url)) for engine in self.registry.engines]


def _counters(settings: Settings, redis: Redis | None) -> SharedCounters:
    """What counts tenants' requests and tokens."""
    lease_s, retry_s = settings.limits.lease_s, settings.redis.retry_s
    memory = MemoryCounters(lease_s=lease_s)
    shared = None if redis is None else RedisCounters(redis, lease_s=lease_s, timeout_s=settings.redis.timeout_s)
    return SharedCounters(shared, memory, retry_s=retry_s)


def _shared_answers(settings: Settings, redis: Redis | None) -> RedisEntries | None:
    own = settings.response_cache
    if redis is None or not own.max_redis_bytes:
        return None
    return RedisEntries(redis, own, timeout_s=settings.redis.timeout_s, now=time.time)


def _response_cache(
    settings: Settings, memory: MemoryEntries, shared: RedisEntries | None, semantic: SemanticCache | None
) -> ResponseCache:
    """Steps 1 and 7 of the street."""
    own, retry_s = settings.response_cache, settings.redis.retry_s
    exact = ExactCache(memory, shared, memory_s=own.memory_s, retry_s=retry_s, clock=time.monotonic)
    modes = {tenant.name: tenant.response_cache for tenant in settings.tenants if tenant.response_cache is not None}
    return ResponseCache(own, modes, exact, semantic, time.time)


def _semantic_cache(settings: Settings, redis: Redis | None, embedder: Embedder) -> SemanticCache | None:
    """None where nobody may use it, or the extra is missing."""
    own = settings.semantic_cache
    modes = {tenant.name: tenant.semantic_cache for tenant in settings.tenants if tenant.semantic_cache is not None}
    if own.mode == "off" and all(mode == "off" for mode in modes.values()):
        return None
    if not embedder.models() or find_spec("usearch") is None:
        log.warning("the semantic cache needs the extra `semantic`, which is missing: only exact answers are found")
        return None
    shared = None
    if redis is not None and own.max_redis_bytes:
        shared = RedisQuestions(redis, own, timeout_s=settings.redis.timeout_s)
    return SemanticCache(
        own, modes, embedder, shared, random=random.random, now=time.time, retry_s=settings.redis.retry_s
    )


def _contents(settings: Settings, redis: Redis | None) -> MemoryContents | SharedContents:
    """The store of cached contents."""
    memory = MemoryContents(settings.gemini, time.time)
    if redis is None:
        return memory
    shared = RedisContents(redis, settings.gemini, time.time, timeout_s=settings.redis.timeout_s)
    return SharedContents(shared, memory, retry_s=settings.redis.retry_s, clock=time.monotonic)


def _status(engine: BundledEngine, stats: Mapping[str, Any]) -> EngineStatus:
    if engine.model is None:
        return EngineStatus(engine.name, engine.url, "connecting")
    hello, load = engine.hello, engine.load
    state: EngineState = "lost" if not engine.joined else "draining" if load.draining else "ready"
    return EngineStatus(
        name=engine.name,
        url=engine.url,
        state=state,
        model=hello.model,
        incarnation=hello.incarnation,
        num_blocks=hello.num_blocks,
        block_size=hello.namespace.block_size,
        load=load,
        stats=stats if engine.joined else {},
    )


async def serve(
    settings: Settings, *, environ: Mapping[str, str], own_engines: bool, say: Callable[[str], None]
) -> None:
    """Runs until SIGTERM or SIGINT, then lets what is in flight end.

    own_engines  start engines.count engines, and a Redis when none is configured
    say          prints a few lines about what was started
    Raises EngineStartError when an engine cannot work with its settings, OSError when the port is in use.
    """
    stop = _stop_at_signals()
    fatal: list[EngineStartError] = []

    def give_up(error: EngineStartError) -> None:
        fatal.append(error)
        stop.set()

    async with AsyncExitStack() as stack:
        # 1. Redis: the configured one, or an own one; without any the index is in memory.
        redis_url = settings.redis.url
        if redis_url is None and own_engines:
            redis_url = await _start_redis(settings, stack)
        redis = connect(redis_url, settings.redis.timeout_s) if redis_url else None
        if redis is not None:
            stack.push_async_callback(redis.aclose)
        # 2. The stages, and the port: whoever asks now is told that the server is starting.
        gateway = Gateway(settings, redis, redis_url, upstream_keys(settings, environ))
        stack.callback(gateway.prompts.close)
        stack.callback(gateway.embedder.close)
        if gateway.semantic_cache is not None:
            stack.push_async_callback(gateway.semantic_cache.close)
        stack.push_async_callback(gateway.index.close)
        stack.push_async_callback(gateway.figures.close)
        stack.push_async_callback(gateway.ledger.close)
        if gateway.batch_redis is not None:
            stack.push_async_callback(gateway.batch_redis.aclose)
        stack.push_async_callback(gateway.files.close)
        stack.push_async_callback(gateway.limits.close)
        stack.push_async_callback(gateway.upstreams.close)
        app = gateway.web_app()
        runner = app_runner(app, settings.server)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        port = await _listen(runner, settings)
        # 3. Engines: own ones, configured ones, and those that announce themselves.
        stack.push_async_callback(gateway.registry.stop)
        if own_engines and settings.engines.count:
            processes = EngineProcesses(
                _engine_settings(settings),
                count=settings.engines.count,
                folder=settings.server.data_dir / "engines",
                redis_url=redis_url,
                environ=environ,
                worked=gateway.registry.was_joined,
                on_fatal=give_up,
            )
            await stack.enter_async_context(processes)
            for name, url in processes.urls.items():
                gateway.registry.add(url, name)
        for url in settings.engines.urls:
            gateway.registry.add(url)
        gateway.files.start()
        gateway.upstreams.start()
        gateway.ledger.start()
        gateway.limits.start()
        gateway.index.start()
        gateway.registry.start()
        await _first_engines(gateway, stop)
        worker = gateway.batches.worker(app[RUNNER])
        stack.push_async_callback(worker.close)
        worker.start()
        # 4. Serve.
        if not stop.is_set():
            _introduce(gateway, port, own_engines, say)
        await stop.wait()
        gateway.draining = True
        await worker.close()
        log.info("shutting down: requests in flight get %.0f s", settings.server.shutdown_s)
        await runner.cleanup()
    if fatal:
        raise fatal[0]


def upstream_keys(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Upstream -> its key, of those that have one. Raises ConfigError for a variable that is not set."""
    keys: dict[str, str] = {}
    for upstream in settings.upstreams:
        key = upstream.key.get_secret_value() if upstream.key is not None else None
        if upstream.key_env is not None:
            key = environ.get(upstream.key_env, "").strip()
            if not key or not key.isprintable():
                raise ConfigError(f"upstreams: key_env of {upstream.name!r}: {upstream.key_env} is not set, or no key")
        if key:
            keys[upstream.name] = key
    return keys


async def _start_redis(settings: Settings, stack: AsyncExitStack) -> str | None:
    server = RedisServer(settings.server.data_dir / "redis", settings.redis)
    try:
        await stack.enter_async_context(server)
    except RedisStartError as error:
        log.warning("no Redis, the index is in this gateway's memory: %s", error)
        return None
    return server.url


def _engine_settings(settings: Settings) -> EngineSettings:
    """The engines of one machine share its cores, and the blocks on its disk."""
    threads = choose_threads(settings.engine.threads, usable_cores(), settings.engines.count)
    disk_dir = settings.engine.disk_dir or settings.server.data_dir / "blocks"
    return settings.engine.model_copy(update={"threads": threads, "disk_dir": disk_dir.absolute()})


async def _listen(runner: web.AppRunner, settings: Settings) -> int:
    site = web.TCPSite(runner, settings.server.host, settings.server.port, backlog=1024)
    await site.start()
    address = runner.addresses[0]
    return int(address[1])


async def _first_engines(gateway: Gateway, stop: asyncio.Event) -> None:
    """Returns when the engines that are known have joined, when that takes too long, or when it is time to stop."""
    joined = asyncio.ensure_future(gateway.registry.wait_joined())
    stopping = asyncio.ensure_future(stop.wait())
    timeout_s = gateway.settings.engines.start_timeout_s
    try:
        done, _ = await asyncio.wait({joined, stopping}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in (joined, stopping):
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await future
    if not done:
        log.warning("not every engine has joined after %.0f s (engines.start_timeout_s)", timeout_s)


def _introduce(gateway: Gateway, port: int, own_engines: bool, say: Callable[[str], None]) -> None:
    """A few lines: what runs, how to use it, where to look."""
    settings = gateway.settings
    host = settings.server.host
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104 - compared, not bound
    models = list(gateway.registry.models())
    engines = gateway.registry.engines
    lines = [f"Kvasir {installed_version()} on {url}"]
    if own_engines and settings.engines.count and settings.engine.model == "demo":
        lines.append(
            "  model    demo: a tiny bundled model that talks English-looking nonsense.\n"
            "           A real one: ./deploy/serve --model Qwen/Qwen3-0.6B   (a hub id or a folder)"
        )
    else:
        lines.append(f"  model    {', '.join(models) or 'none yet'}")
    tokens = sum(engine.hello.num_blocks * engine.hello.namespace.block_size for engine in engines if engine.joined)
    lines.append(f"  engines  {len(engines)}, with room for {tokens:,} tokens of KV blocks")
    own_redis = settings.redis.url is None
    where = f"own, in {settings.server.data_dir / 'redis'}" if own_redis else "as configured (redis.url)"
    lines.append(f"  redis    {where if gateway.redis_url else 'none: the index is in memory'}")
    if settings.upstreams:
        lines.append(f"  behind   {', '.join(upstream.name for upstream in settings.upstreams)} ([[upstreams]])")
    if settings.tenants:
        lines.append(f"  access   {len(settings.tenants)} tenants with keys")
    else:
        lines.append("  access   open: no tenants are configured, everybody shares one cache ([[tenants]])")
    lines += [
        f'  SDKs     OpenAI(base_url="{url}/v1", api_key="any"), model="{models[0] if models else "..."}"\n'
        f'           Anthropic(base_url="{url}", api_key="any")\n'
        f'           genai.Client(http_options={{"base_url": "{url}"}}, api_key="any")',
        f"  look     {url}/metrics  {url}/admin/stats",
        f"  docs     {url}/docs, and {url}/openapi.json; README.md and docs/ in the repository",
    ]
    say("\n".join(lines))


def _stop_at_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
