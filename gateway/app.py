"""The composition root: builds every stage once from its section of the settings, and the pipeline.

Nothing else knows the implementations. Nothing runs yet: serving.py, or a test, opens the port and starts background
tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web
from pydantic import SecretStr
from redis.asyncio import Redis

from engine import tls
from engine.config import ConfigError
from gateway.admin.accounting import audit_entry
from gateway.admin.audit import AuditLog
from gateway.admin.nightly import DAYS
from gateway.admin.outcomes import COLUMNS as LATELY
from gateway.admin.requests import MOST
from gateway.admin.sources import EngineState, EngineStatus, Sources, Total, no_others, no_traces
from gateway.admin.spans import Spans
from gateway.api.descriptors import REFUSED
from gateway.api.gemini import content_store
from gateway.api.gemini.content_store import ContentStore
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.routes import REPLAYS, USE, WARMING, build_app
from gateway.api.warming import Warming
from gateway.config import (
    OtelSettings,
    PodSettings,
    Reloaded,
    ReplicaSettings,
    Settings,
    StoredResponseSettings,
    several_currencies,
)
from gateway.engines.bundled import BundledEngine
from gateway.engines.registry import Client, EngineFigures, Registry
from gateway.errors import BadRequestError
from gateway.files.folder import Folder
from gateway.files.store import FileStore
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.issued.directory import Directory
from gateway.issued.stores import FileIssued, IssuedStore, RedisIssued
from gateway.ledger.base import COLUMNS
from gateway.ledger.books import Book, MemoryBook, RedisBook
from gateway.ledger.history import SPANS, History
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import Prices
from gateway.limits.budgets import Budgets
from gateway.limits.counters import MemoryCounters, RedisCounters, SharedCounters
from gateway.limits.limits import TenantLimits
from gateway.logs import lost_lines
from gateway.pipeline import Pipeline
from gateway.prompt.stage import PromptStage
from gateway.queues.batch.store import BatchStore, open_stores
from gateway.queues.batch.worker import Worker
from gateway.queues.slots import SlotQueue
from gateway.receipts import Receipts
from gateway.replicas.fleet import Fleet
from gateway.replicas.kubernetes import Discovery
from gateway.replicas.secret import FleetSecret
from gateway.replicas.warming import HotPrefixes, Warmer
from gateway.responses.base import Mode
from gateway.responses.embedding.embedder import Embedder
from gateway.responses.entry_stores import MemoryEntries, RedisEntries, RemovalEpoch
from gateway.responses.semantic.cache import SemanticCache
from gateway.responses.semantic.questions import RedisQuestions
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.responses.upstream_answers import RememberedUpstreams
from gateway.storage.breaker import RedisBreaker
from gateway.storage.byte_store import ByteStore, Quota
from gateway.storage.claims import RedisClaims
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.presence import Presence
from gateway.storage.redis_bytes import RedisBytes
from gateway.storage.redis_calls import RedisCalls, connect, unreadable
from gateway.storage.ring import Ring
from gateway.types import Trace
from gateway.upstreams.cached_prefixes import ALONE, Shared
from gateway.upstreams.cached_prefixes import STORE as PREFIXES
from gateway.upstreams.connections import find_proxy
from gateway.upstreams.stage import Upstreams, UpstreamSet
from gateway.upstreams.translation.forms import FORMS
from gateway.upstreams.translation.stage import Translation
from gateway.version import installed_version

if TYPE_CHECKING:
    from gateway.admin.otel import Exporter
    from gateway.replicas.joining import Server

log = logging.getLogger(__name__)

REDIS_RETRY_S = 1.0
"""Seconds from a failure of Redis to the next probe."""

REPLICA_VARIABLES = "REPLICA_"
"""Beginning of the environment variables that keys of added replicas may be in: whoever adds one chooses where its key
is sent, and must not send other secrets there."""

RETRY_AFTER_S = 2.0
"""Retry-After while a model has no engine: about what one takes to start."""


async def no_reload() -> Reloaded:
    raise BadRequestError("The settings of this gateway did not come from a file that could be read again.")


@dataclass
class Gateway:
    """The stages, built and wired. Engines come to the registry, and leave it, while the gateway runs."""

    settings: Settings
    redis: Redis | None
    redis_url: str | None
    upstream_keys: Mapping[str, str] = field(default_factory=dict)
    upstream_proxies: Mapping[str, str] = field(default_factory=dict)
    replica_keys: Mapping[str, str] = field(default_factory=dict)
    replica_variables: Mapping[str, str] = field(default_factory=dict)  # that have keys of replicas added at run time
    cluster_url: str = ""  # of Kubernetes' API, where replicas are found there
    memory: MemoryIndex = field(default_factory=MemoryIndex)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # all workers of one gateway have the same
    draining: bool = False
    warming: Warming | None = None  # once the routes are there
    total: Total = no_others
    reload: Callable[[], Awaitable[Reloaded]] = no_reload  # once the process can

    def __post_init__(self) -> None:
        settings = self.settings
        self.prompts = PromptStage(settings.prompt)
        self.queue: SlotQueue[Client] = SlotQueue(settings.queue, workers=settings.server.workers)
        self.embedder = Embedder(settings.embeddings)
        self.breaker = RedisBreaker(retry_s=REDIS_RETRY_S)
        self.certificate = tls.between(settings.engine.tls_dir, serves=False)  # at engines
        self.index = PrefixIndex(self.memory, self._calls(), retry_s=REDIS_RETRY_S)
        calls, quota = self._calls(), content_store.quota_of(settings.gemini)
        shared_contents = None if calls is None else RedisBytes(calls, content_store.STORE, quota, time.time)
        self.contents = ContentStore(settings.gemini, time.time, shared_contents)
        folder = settings.files.folder or settings.server.data_dir / "files"
        self.files = FileStore(Folder(folder, settings.files, time.time), settings.files)
        jobs_folder = settings.batches.folder or settings.server.data_dir / "batches"
        # A connection of its own: calls for jobs may take longer than those that requests wait for.
        timeout_s = settings.batches.redis_timeout_s
        self.batch_redis = connect(self.redis_url, timeout_s) if self.redis_url and self.redis is not None else None
        batches = settings.batches
        stores = open_stores(self.batch_redis, jobs_folder, self.files, batches, time.time, self.breaker)
        self.batches = BatchStore(stores)
        self.batch_worker: Worker | None = None  # once the routes are there
        self.registry = Registry(
            self._connect,
            retry_after_s=RETRY_AFTER_S,
            start_timeout_s=settings.engines.start_timeout_s,
            on_unused=self.prompts.unload,
            redis=self.redis if settings.engines.discover else None,
            breaker=self.breaker,
        )
        self.presence = Presence(self.name, self._calls())
        self.secret = FleetSecret(settings.server.data_dir, self._calls())
        self.hot_prefixes = HotPrefixes()
        servers = [one for one in settings.replicas if one.service is None]
        configured = [self._server(one, self.replica_keys.get(one.name)) for one in servers]
        services = [one for one in settings.replicas if one.service is not None]
        self.discovery = Discovery(services, self.cluster_url, settings.kubernetes.account_dir)
        registry = self.registry
        self.fleet = Fleet(
            configured,
            self._added_server,
            registry.attach,
            registry.detach,
            self._calls(),
            worth=lambda name: self.receipts.of(name).get("recent_tokens", 0.0),
            pods=self.discovery.changes,
        )
        self.warmer = Warmer(
            self.hot_prefixes, lambda: self.fleet.replicas, lambda: self.queue.waiting, self.memory.prefix
        )
        self.exporter = _exporter(settings.otel)
        self.audit = AuditLog(settings.server.data_dir / "audit.jsonl", time.time)
        self.responses = ResponseStore(self._bytes("responses", settings.stored_responses))
        prices = self.prices = Prices(settings.prices, settings.batches.price, self._hosts())
        book = MemoryBook() if (calls := self._calls()) is None else RedisBook(calls)
        self.history = History({name: self._history_book(name) for name in SPANS}, time.time)
        self.requests = Ring("requests", MOST, self._calls())
        self.nightly = Ring("nightly", DAYS, self._calls())
        budgets = Budgets(settings.tenants, self._calls(), time.time, prices)
        self.ledger = Ledger(settings.ledger, prices, book, time.time, self.history.add_rows, budgets.spent)
        lease_s, calls = settings.limits.lease_s, self._calls()
        counters = SharedCounters(
            None if calls is None else RedisCounters(calls, lease_s=lease_s), MemoryCounters(lease_s=lease_s)
        )
        self.limits = TenantLimits(settings.limits, settings.tenants, counters, budgets=budgets)
        calls = self._calls()
        kept: IssuedStore = FileIssued(settings.server.data_dir) if calls is None else RedisIssued(calls)
        self.directory = Directory(kept, settings.tenants, time.time)
        self.directory.on_change = self._use_tenants
        self.upstreams = Upstreams(
            settings.upstreams,
            self.upstream_keys,
            proxies=self.upstream_proxies,
            queue=settings.queue,
            num_tenants=len(settings.tenants),
            shared=self._shared_prefixes(),
        )
        self._plan_upstreams: Callable[[int], UpstreamSet] = lambda num_tenants: self.upstreams.plan(
            settings.upstreams, self.upstream_keys, self.upstream_proxies, num_tenants
        )
        self.figures = EngineFigures(lambda: self.registry.engines)
        own = settings.response_cache
        calls = self._calls() if own.max_redis_bytes else None
        shared = None if calls is None else RedisEntries(calls, own, time.time)
        calls = self._calls() if settings.semantic_cache.max_redis_bytes else None
        questions = None if calls is None else RedisQuestions(calls, settings.semantic_cache)
        self.semantic_cache = _semantic_cache(settings, questions, self.embedder)
        self.answers = StoredAnswers(
            MemoryEntries(own.max_memory_bytes, time.time),
            shared,
            None if (calls := self._calls()) is None else RemovalEpoch(calls),
            self.semantic_cache,
            memory_s=own.memory_s,
            every_s=own.removals_s,
        )
        self.response_cache = ResponseCache(
            own, _modes(settings, "response_cache"), self.answers, self.semantic_cache, time.time, self._audited
        )
        self.remembered = RememberedUpstreams(self.upstreams, REPLAYS, self.response_cache)
        self.receipts = Receipts(on_distrust=self._distrust)
        self.pipeline = Pipeline(
            prompts=self.prompts,
            index=self.index,
            registry=self.registry,
            queue=self.queue,
            responses=self.response_cache,
            receipts=self.receipts,
            hosted=Translation(self.upstreams, FORMS),
        )

    def web_app(self) -> web.Application:
        """Raises ConfigError for prompts of [[warm]] that cannot be used."""
        exporter = self.exporter
        app = build_app(
            self.settings,
            pipeline=self.pipeline,
            models=self.registry,
            decoders=self.prompts,
            upstreams=self.remembered,
            embedder=self.embedder,
            responses=self.responses,
            fingerprints=self._bytes("fingerprints", self.settings.anthropic.fingerprints),
            contents=self.contents,
            files=self.files,
            jobs=self.batches,
            now=time.time,
            answers=self.answers,
            limits=self.limits,
            engines=lambda: self.registry.engines,
            fleet=self.fleet,
            cost=self.prices.estimate,
            history=self.history,
            requests=self.requests,
            nightly=self.nightly,
            secret=partial(self.secret.of_model, "digests of prompts"),
            audit=self.audit,
            directory=self.directory,
            reload=lambda: self.reload(),
            sources=Sources(
                refresh=self._refresh,
                engines=self._engine_statuses,
                prefill_tokens_per_s=self.registry.prefill_tokens_per_s,
                queue=self.queue.status,
                prompts=self.prompts.stats,
                embeddings=self.embedder.figures,
                upstreams=self.upstreams.figures,
                responses=lambda: self.responses.outcomes,
                ledger=self.ledger,
                limits=self.limits.figures,
                response_cache=self.response_cache.stats,
                redis=self._redis_figures,
                batches=lambda: self.batch_worker.figures() if self.batch_worker else {},
                lost_lines=lost_lines,
                malformed=lambda: REFUSED,
                draining=lambda: self.draining,
                version=installed_version(),
                total=self.total,
                traces=no_traces if exporter is None else exporter.figures,
                warming=lambda: self.warming.figures() if self.warming else {},
                gateways=lambda: self.presence.gateways,
                cold=lambda: self.warming.not_ready() if self.warming else None,
            ),
            claims=None if (calls := self._calls()) is None else RedisClaims(calls, "warm"),
            audited=self._audited,
            spans=None if exporter is None else Spans(self.settings.otel.sample, exporter.add),
        )
        self.warming, self._use = app[WARMING], app[USE]
        return app

    def plan(self, settings: Settings, environ: Mapping[str, str]) -> Callable[[], None]:
        """A function that makes what may change of the settings hold from then on, at once and without fail. Raises
        ConfigError."""
        keys, proxies = upstream_keys(settings, environ), upstream_proxies(settings, environ)

        def plan_upstreams(num_tenants: int) -> UpstreamSet:
            return self.upstreams.plan(settings.upstreams, keys, proxies, num_tenants)

        plan_upstreams(len(settings.tenants))  # raises what is wrong
        if (several := several_currencies(settings.prices)) and self.directory.has_budgets():
            raise ConfigError(f"prices: budgets of tenants or keys made at run time cannot add up {several}")

        def use() -> None:
            self.settings = settings
            self._plan_upstreams = plan_upstreams
            self.prices.replace(settings.prices, settings.batches.price, self._hosts())
            self.directory.replace(settings.tenants)
            self._use_tenants()

        return use

    def _use_tenants(self) -> None:
        """From now on there are the tenants of the directory."""
        settings = self.settings.model_copy(update={"tenants": self.directory.tenants()})
        self.upstreams.use(self._plan_upstreams(len(settings.tenants)))
        self.limits.replace(settings.limits, settings.tenants, self.directory.limited_keys())
        self.response_cache.modes = _modes(settings, "response_cache")
        if self.semantic_cache is not None:
            self.semantic_cache.replace(_modes(settings, "semantic_cache"), _semantic_namespaces(settings))
        self._use(settings)

    async def _refresh(self) -> None:
        await asyncio.gather(self.figures.refresh(), self.limits.refresh())

    def _calls(self) -> RedisCalls | None:
        """Of one store, so that none waits for a turn behind another. None without Redis."""
        return None if self.redis is None else RedisCalls(self.redis, self.settings.redis.timeout_s, self.breaker)

    def _bytes(self, name: str, limits: StoredResponseSettings) -> ByteStore:
        calls, quota = self._calls(), Quota.of(limits)
        return MemoryBytes(quota, time.time) if calls is None else RedisBytes(calls, name, quota, time.time)

    def _hosts(self) -> Callable[[str], Sequence[tuple[str, str]]] | None:
        """Where models are asked that may have a list price."""
        return (lambda model: self.upstreams.hosts(model)) if self.settings.ledger.list_prices else None

    def _history_book(self, span: str) -> Book:
        calls = self._calls()
        return MemoryBook() if calls is None else RedisBook(calls, f"history.{span}", {*COLUMNS, *LATELY})

    def _shared_prefixes(self) -> Shared:
        """What gateways know of prefixes at upstreams."""
        if (calls := self._calls()) is None:
            return ALONE
        return Shared(
            lambda quota: RedisBytes(calls, PREFIXES, quota, time.time), RedisClaims(calls, PREFIXES), time.time
        )

    def _redis_figures(self) -> dict[str, Any]:
        return {
            "configured": self.redis is not None,
            "up": self.redis is not None and self.breaker.up,
            "outages": self.breaker.outages,
            "unreadable": dict(unreadable),
        }

    def _connect(self, name: str, url: str) -> BundledEngine:
        return BundledEngine(
            name,
            url,
            secret=self.settings.engine.secret,
            certificate=self.certificate,
            on_tokenizer=self.prompts.load,
            on_blocks=self.memory.apply,
            on_lost=self._lost,
            on_load=self.queue.heard,
            prefix=self.memory.prefix,
        )

    def _server(self, one: ReplicaSettings, key: str | None) -> Server:
        """Of [[replicas]], or added at run time. Raises ConfigError without the extra."""
        try:
            from gateway.replicas.joining import Server
            from gateway.replicas.prefix_leases import LeaseBudget
        except ModuleNotFoundError as error:
            raise ConfigError(f"[[replicas]] needs {error.name}: install the extra `fleet`") from None
        engine = self.settings.engine
        return Server(
            one,
            key,
            secret=self.secret,
            calls=self._calls,
            needs_salt=bool(self.settings.tenants),
            prompts=self.prompts,
            on_tokenizer=self.prompts.load,
            on_blocks=self.memory.apply,
            on_lost=self._lost,
            on_load=self.queue.heard,
            on_rank=self.registry.attach,
            prefix=self.memory.prefix,
            on_computed=self.index.computed,
            hot=self.hot_prefixes,
            leases=LeaseBudget(engine.lease_share, engine.lease_tenant_share, engine.max_leases),
        )

    def _added_server(self, one: ReplicaSettings) -> Server:
        """Raises BadRequestError."""
        own, variable = isinstance(one, PodSettings), one.api_key_env
        if not own and variable is not None and not variable.startswith(REPLICA_VARIABLES):
            why = f"variables that have keys of added replicas begin with {REPLICA_VARIABLES}"
            raise BadRequestError(f"Invalid 'api_key_env': {why}.", param="api_key_env", code="invalid_value")
        try:
            if isinstance(one, PodSettings):
                return self._server(one, self.replica_keys.get(one.entry))
            return self._server(one, _key("api_key_env", None, variable, self.replica_variables) or None)
        except ConfigError as error:
            raise BadRequestError(f"This gateway cannot use it: {error}.") from None

    def attach_replicas(self) -> None:
        """Makes the servers of [[replicas]] known, and begins to ask them."""
        self.fleet.attach()

    def _audited(self, tenant: str, model: str, trace: Trace, total_ms: float) -> None:
        if (entry := audit_entry(tenant, model, trace, total_ms)) is not None:
            self.ledger.add(entry)

    def _distrust(self, incarnation: str) -> None:
        """What memory has of an engine is wrong. A replica's events are read again; a bundled engine's blocks are in
        Redis, and come back to memory when they are computed again, or with the next connection."""
        self.index.drop(incarnation)
        for replica in self.fleet.replicas:
            if replica.joined and replica.hello.incarnation == incarnation:
                replica.resync()

    def _lost(self, incarnation: str) -> None:
        self.index.drop(incarnation)
        self.queue.forget(incarnation)

    def _engine_statuses(self) -> list[EngineStatus]:
        replicas = self.fleet.figures()
        return [
            _status(engine, self.figures.of(engine.url), self.receipts.of(engine.name), replicas.get(engine.url, {}))
            for engine in self.registry.engines
        ]


def _exporter(settings: OtelSettings) -> Exporter | None:
    """Of spans. Raises ConfigError without the extra."""
    if not settings.endpoint:
        return None
    try:
        from gateway.admin.otel import Exporter
    except ModuleNotFoundError as error:
        raise ConfigError(f"[otel] needs {error.name}: install the extra `otel`") from None
    return Exporter(settings.endpoint, installed_version())


def _semantic_cache(settings: Settings, questions: RedisQuestions | None, embedder: Embedder) -> SemanticCache | None:
    """None where no tenant may use it, or the extra is missing."""
    own = settings.semantic_cache
    modes = _modes(settings, "semantic_cache")
    if own.mode == "off" and all(mode == "off" for mode in modes.values()):
        return None
    if not embedder.models():
        log.warning("the semantic cache needs the extra `semantic`, which is missing: only exact answers are found")
        return None
    return SemanticCache(
        own,
        modes,
        embedder,
        questions,
        random=random.random,
        now=time.time,
        namespaces=_semantic_namespaces(settings),
        shows_texts=settings.auth.admin_content,
    )


def _modes(settings: Settings, cache: Literal["response_cache", "semantic_cache"]) -> dict[str, Mode]:
    """Of tenants that have one of their own."""
    modes = {tenant.name: getattr(tenant, cache) for tenant in settings.tenants}
    return {name: mode for name, mode in modes.items() if mode is not None}


def _semantic_namespaces(settings: Settings) -> list[str]:
    return [namespace.name for namespace in settings.namespaces if namespace.semantic_cache]


def _status(
    engine: Client, stats: Mapping[str, Any], receipts: Mapping[str, float], replica: Mapping[str, Any]
) -> EngineStatus:
    if engine.model is None:
        return EngineStatus(engine.name, engine.url, "connecting", stats=stats, replica=replica)
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
        receipts=receipts,
        replica=replica,
    )


def upstream_keys(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Upstream -> its key, of those that have one. Raises ConfigError for a variable that is not set."""
    found = {
        one.name: _key(f"upstreams: key_env of {one.name!r}", one.key, one.key_env, environ)
        for one in settings.upstreams
    }
    return {name: key for name, key in found.items() if key}


def cluster_url(settings: Settings, environ: Mapping[str, str]) -> str:
    """Of Kubernetes' API; empty where no replica is a Service. Raises ConfigError outside of a cluster."""
    if settings.kubernetes.url is not None or not any(one.service for one in settings.replicas):
        return settings.kubernetes.url or ""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("replicas: outside of a cluster a URL k8s://... needs kubernetes.url, as https://host:6443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def replica_keys(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Replica -> its key, of those that have one. Raises ConfigError for a variable that is not set."""
    found = {
        one.name: _key(f"replicas: api_key_env of {one.name!r}", one.key, one.api_key_env, environ)
        for one in settings.replicas
    }
    return {name: key for name, key in found.items() if key}


def _key(where: str, key: SecretStr | None, variable: str | None, environ: Mapping[str, str]) -> str:
    """Empty without one."""
    if variable is None:
        return "" if key is None else key.get_secret_value()
    found = environ.get(variable, "").strip()
    if not found or not found.isprintable():
        raise ConfigError(f"{where}: {variable} is not set, or no key")
    return found


def upstream_proxies(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Upstream -> the URL of its proxy, of those that have one. Raises ConfigError for one that cannot be used."""
    try:
        found = {upstream.name: find_proxy(upstream.url, environ) for upstream in settings.upstreams}
    except ValueError as error:
        raise ConfigError(f"HTTPS_PROXY, HTTP_PROXY or ALL_PROXY of the environment: {error}") from None
    return {name: proxy for name, proxy in found.items() if proxy is not None}
