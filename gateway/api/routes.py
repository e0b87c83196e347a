"""The web application: every route of the gateway, and how it is run.

app.py brings the stages; this file puts handlers on paths.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from aiohttp import web

from gateway import dashboard
from gateway.admin.accounting import Accounting
from gateway.admin.audit import AuditLog
from gateway.admin.batches import BatchPages
from gateway.admin.cache import CachePages
from gateway.admin.explain import ExplainPage
from gateway.admin.handlers import Admin
from gateway.admin.ledger import LedgerPage
from gateway.admin.me import MePage
from gateway.admin.metrics import Metrics
from gateway.admin.nightly import Nightly
from gateway.admin.overview import Overview, OverviewPages
from gateway.admin.purge import Engine, PurgePage
from gateway.admin.reload import ReloadPage
from gateway.admin.replicas import Fleet, ReplicaPages
from gateway.admin.requests import RequestLog, RequestPages
from gateway.admin.session import SessionPages
from gateway.admin.sources import Sources
from gateway.admin.spans import Spans
from gateway.admin.tallies import LoopLag
from gateway.admin.tenants import TenantPages
from gateway.api.aliases import Aliases
from gateway.api.answering import Answering
from gateway.api.anthropic.files import file_routes as anthropic_files
from gateway.api.anthropic.handlers import Anthropic
from gateway.api.anthropic.message_batches import ROWS, MessageBatches
from gateway.api.anthropic.replay import MessageReplay
from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.bodies import BODIES, Bodies
from gateway.api.body import MAX_DEPTH, expect_continue
from gateway.api.descriptors import count_malformed
from gateway.api.dialect import CHUNKED, SSE, UNLISTED, Route
from gateway.api.docs import Docs
from gateway.api.gemini.cached_contents import CachedContents
from gateway.api.gemini.content_store import ContentStore
from gateway.api.gemini.embeddings import embedding_routes
from gateway.api.gemini.files import GeminiFiles
from gateway.api.gemini.handlers import Gemini
from gateway.api.gemini.replay import GenerateReplay
from gateway.api.gemini.wire import GEMINI
from gateway.api.lines import BatchRunner
from gateway.api.middleware import DIALECTS, Cors, observed
from gateway.api.named_files import NamedFiles
from gateway.api.openai.batches.handlers import OpenAIBatches
from gateway.api.openai.batches.rows import RowLimits, row_format
from gateway.api.openai.embeddings import Embedder, Embeddings
from gateway.api.openai.files import file_routes as openai_files
from gateway.api.openai.handlers import OpenAI
from gateway.api.openai.replay import ChatReplay, CompletionReplay, EmbeddingReplay
from gateway.api.openai.responses.handlers import Responses
from gateway.api.openai.responses.keeping import Background
from gateway.api.openai.responses.replay import ResponseReplay
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.openai.wire import OPENAI
from gateway.api.openapi import OWN
from gateway.api.passthrough import Passthrough, Upstreams
from gateway.api.prologue import Prologue
from gateway.api.record import Observers
from gateway.api.resend import ResendCache
from gateway.api.router import Router
from gateway.api.tenants import Auth, Namespaces
from gateway.api.unknown_fields import RefusingTenants
from gateway.api.warming import Audited, Claims, Warming, warm_targets
from gateway.config import Reloaded, ServerSettings, Settings
from gateway.files.store import FileStore
from gateway.issued.directory import Directory
from gateway.ledger.history import History
from gateway.limits.limits import TenantLimits
from gateway.pipeline import Pipeline
from gateway.queues.batch.store import BatchStore
from gateway.responses.entries import Answers
from gateway.stages import Prompts, Registry
from gateway.storage.byte_store import ByteStore
from gateway.storage.ring import Ring
from gateway.types import ANONYMOUS, Replay

ROUTES: web.AppKey[Mapping[str, Sequence[Route]]] = web.AppKey("routes", Mapping)
"""What an application answers, by the name of the dialect; the gateway's own routes are under openapi.OWN."""

ADMIN: web.AppKey[Admin] = web.AppKey("admin", Admin)
"""Knows what the process has counted."""

RUNNER: web.AppKey[BatchRunner] = web.AppKey("runner", BatchRunner)
"""Runs the lines of batches, by the same stages."""

WARMING: web.AppKey[Warming] = web.AppKey("warming", Warming)
"""Computes the prompts of [[warm]], once it is started."""

USE: web.AppKey[Callable[[Settings], None]] = web.AppKey("use")
"""Uses changed tenants, keys, namespaces and aliases from now on. Never fails."""

LOG: web.AppKey[RequestLog] = web.AppKey("log", RequestLog)
"""Writes the latest requests down, once it is started."""

REPLAYS: Final[Mapping[str, Replay]] = {
    "/v1/chat/completions": ChatReplay(),
    "/v1/completions": CompletionReplay(),
    "/v1/embeddings": EmbeddingReplay(),
    "/v1/responses": ResponseReplay(),
    "/v1/messages": MessageReplay(),
    ":generateContent": GenerateReplay(),
}
"""Routes of upstreams whose answers can be sent again in both forms; the last one in every version of its API."""


def build_app(
    settings: Settings,
    *,
    pipeline: Pipeline,
    models: Registry,
    decoders: Prompts,
    upstreams: Upstreams,
    embedder: Embedder,
    responses: ResponseStore,
    fingerprints: ByteStore,
    contents: ContentStore,
    files: FileStore,
    jobs: BatchStore,
    now: Callable[[], float],
    limits: TenantLimits,
    answers: Answers,
    engines: Callable[[], Sequence[Engine]],
    fleet: Fleet,
    sources: Sources,
    history: History,
    requests: Ring,
    nightly: Ring,
    secret: Callable[[], Awaitable[str]],
    cost: Callable[[str, int, int], int | None],
    audit: AuditLog,
    directory: Directory,
    reload: Callable[[], Awaitable[Reloaded]],
    claims: Claims | None = None,
    audited: Audited = lambda *_: None,
    spans: Spans | None = None,
) -> web.Application:
    """The application, ready for `app_runner`.

    pipeline, models, decoders   the pipeline, the registry and the prompt stage
    upstreams      answer for the models that are theirs
    embedder       for /v1/embeddings
    responses      what /v1/responses stores
    fingerprints   stores hashes of prompts, for Anthropic's diagnostics
    files, jobs    of /v1/files, and of batches, whose runner is the application's `RUNNER`
    contents, now  the store of cached contents, and the clock that it goes by, in seconds since 1970
    limits         of tenants
    answers        what the response cache remembers, for /admin/cache
    engines        all that are known, for a purge of their blocks
    fleet          of /admin/replicas
    cost           of so many tokens of prompt and answer of a model, for aliases
    history, requests  what happened lately: figures by steps of time, and single requests
    nightly        lists of misses, one a day
    secret         of all gateways, for digests of prompts
    sources        what /health, /metrics, /admin/stats and /admin/ledger show
    audit          has the changes of admins
    directory      has the tenants and keys that admins made
    reload         reads the settings again, and uses them by `app[USE]` among others
    claims         of what one gateway of several does: lists of a day, prompts that it has cached by an upstream
    audited        counts what [[warm]] costs
    spans          makes traces
    Raises ConfigError for prompts of [[warm]] that cannot be used.
    """
    server, batches = settings.server, settings.batches
    keys = Auth(settings.auth, settings.tenants, directory, now)
    purge = PurgePage(settings.namespaces, engines)
    named = Namespaces(settings.namespaces, settings.tenants, settings.prompt.cache_key)
    aliases = Aliases(settings.aliases)
    passthrough = Passthrough(server, upstreams, models, embedder.models(), limits, named, responses, aliases)
    router = Router(aliases, passthrough, _tenants(settings), cost=cost, replays=REPLAYS)
    sources = replace(sources, aliases=router.figures)
    metrics = Metrics(sources, settings.slo)
    admin = Admin(sources, metrics)
    log = RequestLog(requests, history.add, sources.ledger.priced, now, secret)
    lists = Nightly(log, nightly, claims, sources.ledger.priced, now)
    accounting = Accounting(sources.ledger.add, sources.prefill_tokens_per_s)
    observer = Observers(metrics, router, accounting, log, *(() if spans is None else (spans,)))

    async def figures() -> tuple[Sources, Metrics]:
        await limits.refresh()
        return await admin.figures()

    overview = OverviewPages(Overview(history, sources.ledger, log, figures, now), log)
    refuses_unknown = RefusingTenants(settings.api, settings.tenants)
    resends = ResendCache(_resend_bytes(settings), models, passthrough.serves, limits)
    prologue = Prologue(server, keys, limits, resends, passthrough, router, refuses_unknown, audit, directory)
    answering = Answering(
        server,
        named,
        pipeline,
        models,
        decoders,
        embedder.models(),
        limits,
        passthrough,
        NamedFiles(server, files),
        line_timeout_s=batches.line_timeout_s,
    )
    timeout_s = settings.files.upload_timeout_s
    kept = GeminiFiles(files, answering.files, timeout_s)
    cached = CachedContents(settings.gemini, answering, kept, contents, now)
    background = Background(observer, most=settings.stored_responses.max_background, shutdown_s=server.shutdown_s)
    chats = OpenAI(settings.leases, answering)
    items = Responses(server, settings.leases, answering, responses, background)
    vectors = Embeddings(settings.embeddings, answering, embedder)
    messages = Anthropic(settings.leases, settings.anthropic, answering, fingerprints)
    endpoints = {**chats.endpoints(), **items.endpoints(), **vectors.endpoints(), **messages.endpoints()}
    by_dialect = {
        OPENAI.name: [
            *chats.routes(),
            *items.routes(),
            *vectors.routes(),
            *openai_files(files, timeout_s),
            *OpenAIBatches(named, files, jobs).routes(),
        ],
        ANTHROPIC.name: [
            *messages.routes(),
            *anthropic_files(files, timeout_s),
            *MessageBatches(server, batches, named, jobs, timeout_s).routes(),
        ],
        GEMINI.name: [
            *Gemini(answering, cached, kept).routes(),
            *embedding_routes(vectors),
            *cached.routes(),
            *kept.routes(),
        ],
        OWN: [
            *admin.routes(),
            *dashboard.routes(),
            *SessionPages(keys, directory.end_session, now).routes(),
            *LedgerPage(sources.ledger, now).routes(),
            *overview.routes(),
            *RequestPages(log).routes(),
            *ExplainPage(answering, endpoints, log, sources.ledger.priced).routes(),
            *lists.routes(),
            *CachePages(answers, now, content=settings.auth.admin_content).routes(),
            *purge.routes(),
            *ReplicaPages(fleet, admin.figures).routes(),
            *audit.routes(),
            *BatchPages(jobs).routes(),
            *ReloadPage(reload).routes(),
            *TenantPages(directory, limits, now).routes(),
            *MePage(directory, limits, sources.ledger, now).routes(),
        ],
    }
    docs = Docs(by_dialect, DIALECTS, sources.version)
    middleware = observed(observer, Cors(server.cors_origins), traces=spans is not None)
    # The limit is kept in body.py, before and while reading; aiohttp's own would answer in another shape.
    app = web.Application(middlewares=[middleware], client_max_size=0)
    app[ROUTES] = docs.routes
    app[ADMIN] = admin
    app[BODIES] = Bodies(server.max_bodies_bytes, server.max_body_bytes)
    app[UNLISTED] = frozenset(route.path for own in docs.routes.values() for route in own if route.refuses)
    row_limits = RowLimits(batches.max_lines, batches.max_embedding_inputs, server.max_body_bytes, MAX_DEPTH)
    formats = {OPENAI.name: row_format(row_limits), ANTHROPIC.name: ROWS}
    app[RUNNER] = BatchRunner(
        batches,
        endpoints,
        formats,
        observer,
        sources.all_joined,
        passthrough,
        upstreams,
        named,
        refuses_unknown,
        router,
        lambda tenant, model: directory.allows(tenant, None, model),
    )
    app[WARMING] = Warming(server, warm_targets(settings, answering, aliases), answering, audited, claims)

    def use(changed: Settings) -> None:
        keys.replace(changed.auth, changed.tenants)
        named.replace(changed.namespaces, changed.tenants)
        purge.replace(changed.namespaces)
        refuses_unknown.replace(changed.tenants)
        aliases.replace(changed.aliases)
        router.replace(_tenants(changed))
        resends.forget()

    app[USE] = use
    app.cleanup_ctx.append(LoopLag(metrics.lag, metrics.own_lag).running)
    app.cleanup_ctx.append(lists.running)
    app.on_shutdown.append(lambda _: background.shut_down())
    app.on_cleanup.append(lambda _: background.close())
    app.on_shutdown.append(lambda _: kept.close())
    app[LOG] = log
    app.on_shutdown.append(overview.close)
    # A download would also be sent for a HEAD, and events without an end would keep its connection.
    downloads = {
        route.path
        for own in docs.routes.values()
        for route in own
        if not CHUNKED.isdisjoint(route.media) or route.media == (SSE,)
    }
    for (method, path), handler in prologue.handlers(docs.routes).items():
        app.router.add_route(method, path, handler, expect_handler=expect_continue)
        if method == "GET" and path not in downloads:
            app.router.add_route("HEAD", path, handler)
    return app


def routes(app: web.Application) -> list[tuple[str, str]]:
    """Method and path of everything the application answers; HEAD is there where GET is."""
    every = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]
    return [one for one in every if one[0] != "HEAD"]


def app_runner(app: web.Application, server: ServerSettings) -> web.AppRunner:
    """Runs `app` with what its handlers rely on: they are cancelled when the client leaves, and get bodies as sent."""
    log = logging.getLogger("gateway.http")
    log.addFilter(count_malformed)
    return web.AppRunner(
        app,
        logger=log,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=server.keep_alive_s,
        shutdown_timeout=server.shutdown_s / 2,  # aiohttp waits twice: for the handler, and once more without its body
    )


def _tenants(settings: Settings) -> list[str]:
    return [tenant.name for tenant in settings.tenants] or [ANONYMOUS]


def _resend_bytes(settings: Settings) -> int:
    """None where the response cache answers no tenant: only its answers are sent again."""
    own, tenants = settings.response_cache, settings.tenants
    modes = {own.mode, *(tenant.response_cache for tenant in tenants if tenant.response_cache is not None)}
    return 0 if modes == {"off"} else own.max_rendered_bytes
