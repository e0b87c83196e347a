"""The HTTP side on a real port, over a fake pipeline."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import anthropic
import openai
from aiohttp import web

from gateway.admin.audit import AuditLog
from gateway.admin.nightly import DAYS
from gateway.admin.purge import Engine
from gateway.admin.requests import MOST
from gateway.admin.sources import EngineStatus, Sources
from gateway.admin.spans import Spans
from gateway.api.descriptors import REFUSED, Site
from gateway.api.gemini.content_store import ContentStore
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.routes import REPLAYS, RUNNER, USE, app_runner, build_app
from gateway.app import no_reload
from gateway.config import (
    AliasSettings,
    AnthropicSettings,
    ApiSettings,
    AuthSettings,
    BatchSettings,
    CacheKeyMode,
    FileSettings,
    GeminiSettings,
    LeaseSettings,
    LedgerSettings,
    LimitSettings,
    NamespaceSettings,
    PriceSettings,
    PromptSettings,
    QueueSettings,
    ReplicaSettings,
    ResponseCacheSettings,
    ServerSettings,
    Settings,
    SloSettings,
    StoredResponseSettings,
    TenantSettings,
    UpstreamSettings,
    WarmSettings,
)
from gateway.errors import BadRequestError
from gateway.files.folder import Folder
from gateway.files.store import FileStore
from gateway.issued.directory import Directory
from gateway.ledger.books import MemoryBook
from gateway.ledger.history import SPANS, History
from gateway.ledger.ledger import Ledger
from gateway.ledger.prices import Prices
from gateway.limits.budgets import Budgets
from gateway.limits.counters import MemoryCounters, SharedCounters
from gateway.limits.limits import TenantLimits
from gateway.queues.batch.store import BatchStore, open_stores
from gateway.queues.batch.worker import Worker
from gateway.queues.slots import SlotQueue
from gateway.replicas.fleet import Fleet
from gateway.responses.base import Audited
from gateway.responses.embedding.embedder import Embedder
from gateway.responses.entries import Answers
from gateway.responses.entry_stores import MemoryEntries, RedisEntries
from gateway.responses.semantic.cache import SemanticCache
from gateway.responses.stage import ResponseCache
from gateway.responses.stored_answers import StoredAnswers
from gateway.responses.upstream_answers import RememberedUpstreams
from gateway.storage.byte_store import ByteStore, Quota
from gateway.storage.memory_bytes import MemoryBytes
from gateway.storage.redis_calls import RedisCalls
from gateway.storage.ring import Ring
from gateway.upstreams.stage import Upstreams
from tests.fakes.answers import FakeAnswers
from tests.fakes.embedding import no_embedder
from tests.fakes.issued import MemoryIssued
from tests.fakes.pipeline import FakeDecoders, FakeModels, FakePipeline
from tests.fakes.purged import FakePurged
from tests.fakes.tuned import tuned

LIMIT_S = 30.0
SECTIONS = (
    *("server", "leases", "api", "anthropic", "gemini", "auth", "tenants", "namespaces"),
    *("stored_responses", "files", "batches", "aliases", "warm", "slo"),
)


@dataclass
class Gateway:
    """A running server and its fakes. `session` speaks to it as any HTTP client would."""

    url: str
    port: int
    pipeline: FakePipeline
    models: FakeModels
    state: dict[str, Any]
    app: web.Application
    limits: TenantLimits
    session: aiohttp.ClientSession
    worker: Worker  # of the batch lane; not started
    clients: list[openai.AsyncOpenAI | anthropic.AsyncAnthropic] = field(default_factory=list)
    """Closed with the server."""

    def sdk(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, timeout=LIMIT_S, **({"max_retries": 0} | options)
        )
        self.clients.append(client)
        return client

    def anthropic(self, key: str = "none", **options: Any) -> anthropic.AsyncAnthropic:
        client = anthropic.AsyncAnthropic(
            base_url=self.url, api_key=key, timeout=LIMIT_S, **({"max_retries": 0} | options)
        )
        self.clients.append(client)
        return client

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any, Mapping[str, str]]:
        async with self.session.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json(), answer.headers

    async def send(self, data: bytes, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        url = f"{self.url}/v1/chat/completions"
        async with self.session.post(url, data=data, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def transcript(self, path: str, body: object, **options: Any) -> str:
        async with self.session.post(self.url + path, json=body, **options) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            return await answer.text()

    async def get(self, path: str, key: str | None = None) -> tuple[int, str, Mapping[str, str]]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.get(aiohttp.client.URL(self.url + path, encoded=True), headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers


ENGINE = EngineStatus("engine-1", "http://127.0.0.1:1", "ready", "demo", "demo-1", 100, 16)


def idle_queue() -> SlotQueue[Any]:
    return SlotQueue(QueueSettings())


def response_cache(
    redis: RedisEntries | None = None,
    now: Callable[[], float] = time.time,
    memory: MemoryEntries | None = None,
    semantic: SemanticCache | None = None,
    audited: Audited | None = None,
    **settings: Any,
) -> ResponseCache:
    """Steps 1 and 7, to stand before the fake pipeline (FakePipeline.responses)."""
    own = tuned(ResponseCacheSettings, **{"upstreams": "on", **settings})
    memory = memory or MemoryEntries(own.max_memory_bytes, now)
    exact = StoredAnswers(memory, redis)
    return ResponseCache(own, {}, exact, semantic, now, audited)


@dataclass
class Options:
    server: ServerSettings = field(default_factory=ServerSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    queue: SlotQueue[Any] | None = None
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    anthropic: AnthropicSettings = field(default_factory=AnthropicSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    tenants: Sequence[TenantSettings] = ()
    namespaces: Sequence[NamespaceSettings] = ()
    cache_key: CacheKeyMode = "separate"
    batches: BatchSettings = field(default_factory=BatchSettings)
    gemini: GeminiSettings = field(default_factory=GeminiSettings)
    now: Callable[[], float] = time.time
    prices: Sequence[PriceSettings] = ()
    history: History | None = None
    requests: Ring | None = None
    spans: Spans | None = None
    rendered_bytes: int = 1 << 20
    answers: Answers = field(default_factory=FakeAnswers)
    engines: Sequence[Engine] = (FakePurged("engine-1"),)
    ledger: Ledger | None = None  # None is memory
    limited: LimitSettings = field(default_factory=LimitSettings)  # of every tenant
    limits: TenantLimits | None = None  # None is those of `limited` and the tenants, in memory
    embedder: Embedder = field(default_factory=no_embedder)
    fingerprints: ByteStore | None = None  # of prompts; None is memory
    stored_responses: StoredResponseSettings = field(default_factory=StoredResponseSettings)
    upstreams: Sequence[UpstreamSettings] = ()
    aliases: Sequence[AliasSettings] = ()
    warm: Sequence[WarmSettings] = ()
    waits: QueueSettings = field(default_factory=QueueSettings)  # for a slot at one of those
    response_store: ByteStore | None = None  # of stored responses; None is memory
    response_cache: ResponseCache = field(default_factory=lambda: response_cache(mode="off"))
    budget_calls: RedisCalls | None = None
    directory: Directory | None = None  # None is one of the tenants, that nothing was made in yet
    fleet: Fleet | None = None  # None is one without servers
    files: FileSettings = field(
        default_factory=FileSettings
    )  # without a folder, in one that is deleted with the server


def no_fleet() -> Fleet:
    """One that nothing can be added to."""

    def refuse(settings: ReplicaSettings) -> Any:
        raise BadRequestError("There is no extra `fleet` here.")

    return Fleet([], refuse, lambda _: None, lambda _: asyncio.sleep(0), None)


async def _secret() -> str:
    return "of these gateways"


async def _nothing_to_fetch() -> None:
    """The state is the test's own."""


def make_app(
    pipeline: FakePipeline | None = None,
    models: FakeModels | None = None,
    state: Mapping[str, Any] = MappingProxyType({}),
    given: Options | None = None,
    files: FileStore | None = None,
    upstreams: Upstreams | None = None,
    jobs: BatchStore | None = None,
    audit: Path | None = None,
) -> web.Application:
    """The application over fakes, not running. `state` is what its pages show."""
    given = given or Options()
    files = files or make_files(given.files, Path("/nowhere"), given.now)
    queue = given.queue or idle_queue()
    history = given.history or History({name: MemoryBook() for name in SPANS}, given.now)
    limits = given.limits = given.limits or limits_of(given)
    prices = Prices(given.prices, given.batches.price)
    if limits.budgets is None:
        limits.budgets = Budgets(given.tenants, given.budget_calls, given.now, prices)
    spent = limits.budgets.spent
    ledger = given.ledger or Ledger(LedgerSettings(), prices, MemoryBook(), given.now, history.add_rows, spent)
    upstreams = upstreams or Upstreams(given.upstreams, {})
    responses = ResponseStore(given.response_store or MemoryBytes(Quota.of(given.stored_responses), given.now))
    settings = Settings.model_construct(  # some tests have sections together that the whole refuses
        **{name: getattr(given, name) for name in SECTIONS},
        embeddings=given.embedder.settings,
        prompt=PromptSettings(cache_key=given.cache_key),
        response_cache=ResponseCacheSettings(max_rendered_bytes=given.rendered_bytes),
    )
    directory = given.directory or Directory(MemoryIssued(), given.tenants, given.now)
    app = build_app(
        settings,
        pipeline=pipeline or FakePipeline(),
        models=models or FakeModels(),
        decoders=FakeDecoders(),
        upstreams=RememberedUpstreams(upstreams, REPLAYS, given.response_cache),
        embedder=given.embedder,
        responses=responses,
        fingerprints=given.fingerprints or MemoryBytes(Quota.of(given.anthropic.fingerprints), given.now),
        contents=ContentStore(given.gemini, given.now),
        files=files,
        jobs=jobs or make_batches(given, Path("/nowhere"), files),
        now=given.now,
        limits=limits,
        answers=given.answers,
        engines=lambda: given.engines,
        fleet=given.fleet or no_fleet(),
        cost=Prices(given.prices, 1.0).estimate,
        reload=no_reload,
        history=history,
        requests=given.requests or Ring("requests", MOST, None),
        nightly=Ring("nightly", DAYS, None),
        secret=_secret,
        directory=directory,
        spans=given.spans,
        audit=AuditLog(audit or Path("/nowhere"), given.now),
        sources=Sources(
            refresh=_nothing_to_fetch,
            engines=lambda: state["engines"],
            prefill_tokens_per_s=lambda name: next(
                (one.load.prefill_tokens_per_s for one in state["engines"] if one.name == name), 0.0
            ),
            queue=queue.status,
            prompts=lambda: {"demo": {"segment_hits": 3, "tokenizer": "tiktoken"}},
            embeddings=given.embedder.figures,
            upstreams=upstreams.figures,
            responses=lambda: responses.outcomes,
            ledger=ledger,
            limits=limits.figures,
            redis=lambda: state["redis"],
            response_cache=given.response_cache.stats,
            batches=lambda: state.get("batches", {}),
            lost_lines=lambda: state.get("lost_lines", 0),
            malformed=lambda: REFUSED,
            draining=lambda: state["draining"],
            version="0.0.test",
            warming=lambda: {"entries": 0, "prompts": []},
            cold=lambda: state.get("cold"),
        ),
    )

    def use() -> None:
        tenants = directory.tenants()
        limits.replace(given.limited, tenants, directory.limited_keys())
        app[USE](settings.model_copy(update={"tenants": tenants}))

    directory.on_change = use
    return app


def limits_of(given: Options) -> TenantLimits:
    memory = MemoryCounters(lease_s=given.limited.lease_s)
    return TenantLimits(given.limited, given.tenants, SharedCounters(None, memory))


def make_files(settings: FileSettings, folder: Path, now: Callable[[], float]) -> FileStore:
    return FileStore(Folder(settings.folder or folder, settings, now), settings)


def make_upstreams(
    settings: Sequence[UpstreamSettings], waits: QueueSettings, tenants: Sequence[TenantSettings] = ()
) -> Upstreams:
    """With the keys of the settings, and retries that do not wait."""
    keys = {one.name: one.key.get_secret_value() for one in settings if one.key is not None}
    return Upstreams(settings, keys, queue=waits, num_tenants=len(tenants), backoff_s=0.0)


def make_batches(given: Options, folder: Path, files: FileStore) -> BatchStore:
    """In memory, and on disk."""
    return BatchStore(open_stores(None, folder / "batches", files, given.batches, given.now))


@asynccontextmanager
async def running(
    pipeline: FakePipeline | None = None, models: FakeModels | None = None, **options: Any
) -> AsyncIterator[Gateway]:
    """A server until the block is left. `options` are those of Options."""
    pipeline, models, given = pipeline or FakePipeline(), models or FakeModels(), Options(**options)
    state: dict[str, Any] = {"engines": [ENGINE], "redis": {"up": True}, "draining": False}
    folder = tempfile.TemporaryDirectory(prefix="kvasir-files-")
    files = make_files(given.files, Path(folder.name), given.now)
    limits = given.limits = given.limits or limits_of(given)
    upstreams = make_upstreams(given.upstreams, given.waits, given.tenants)
    batches = make_batches(given, Path(folder.name), files)
    app = make_app(pipeline, models, state, given, files, upstreams, batches, Path(folder.name, "audit.jsonl"))
    worker = Worker(batches.stores, app[RUNNER], batches.changed)
    runner = app_runner(app, given.server)
    upstreams.start()
    await runner.setup()
    site = Site(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
            gateway = Gateway(f"http://127.0.0.1:{port}", port, pipeline, models, state, app, limits, session, worker)
            try:
                yield gateway
            finally:
                for client in gateway.clients:
                    await client.close()
    finally:
        async with asyncio.timeout(LIMIT_S):
            await worker.close()
            await runner.cleanup()
            await files.close()
            await limits.close()
            await upstreams.close()
        folder.cleanup()
        given.embedder.close()
