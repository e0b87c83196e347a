"""The gateway's own routes: /health, /metrics, /admin/stats and the front page. Reads the sources; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.protocol import LANES
from gateway.admin.ledger import grouped, totals_json
from gateway.admin.metrics import CONTENT_TYPE, Metrics
from gateway.admin.sources import EngineStatus, Ledger, Sources
from gateway.admin.sums import Snapshot, merged, snapshot
from gateway.api.dialect import UNLISTED, Route
from gateway.api.docs import base_url
from gateway.api.replies import reply_json
from gateway.errors import OverloadedError

_SHARING = ("prefilled_tokens", "shared_tokens", "shared_waits", "forks")
"""Of an engine's counters: how often a prompt was computed, and how often that was not necessary."""

FRONT_PAGE = """Kvasir {version}: a prompt-caching gateway.

Point the SDK of an app at this server:
  OpenAI     base_url="{base}/v1"
  Anthropic  base_url="{base}"
  Gemini     http_options={{"base_url": "{base}"}}
What it takes and answers: {base}/docs, and {base}/openapi.json for programs.

"""
PLAIN = "text/plain"


class Admin:
    """Holds what its handlers need."""

    def __init__(self, sources: Sources, metrics: Metrics) -> None:
        self._sources = sources
        self._metrics = metrics
        self._started_s = time.monotonic()

    def routes(self) -> list[Route]:
        exposition = CONTENT_TYPE.partition(";")[0]
        return [
            Route(
                "GET",
                "/",
                self.front_page,
                "A page of plain text with these routes; leads a browser to the dashboard.",
                media=(PLAIN,),
                key="none",
            ),
            Route("GET", "/health", self.health, "Readiness with a few details.", key="none"),
            Route("GET", "/health/liveness", self.liveness, "200 while the process runs.", key="none"),
            Route(
                "GET", "/health/readiness", self.readiness, "200 while requests can be answered, else 503.", key="none"
            ),
            Route("GET", "/metrics", self.prometheus, "Prometheus metrics.", media=(exposition,), key="none"),
            Route(
                "GET",
                "/admin/stats",
                self.stats,
                "Cache, engines, queues, prompts, Redis, limits and tenants as JSON.",
                key="admin",
            ),
        ]

    async def front_page(self, http: web.Request) -> web.Response:
        """GET /"""
        if "text/html" in http.headers.get("Accept", ""):
            return web.Response(status=303, headers={"Location": "dashboard", "Vary": "Accept"})
        lines = [
            f"{route.method:<7}{route.resource.canonical}"
            for route in http.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
            if route.resource.canonical not in http.app[UNLISTED]
        ]
        page = FRONT_PAGE.format(version=self._sources.version, base=base_url(http))
        return web.Response(text=page + "\n".join(lines) + "\n")

    async def liveness(self, http: web.Request) -> web.Response:
        """GET /health/liveness: the process turns its loop."""
        return reply_json({"status": "alive"})

    async def readiness(self, http: web.Request) -> web.Response:
        """GET /health/readiness: 200 when requests can be answered, else 503 and why."""
        reason = self._not_ready()
        return (
            reply_json({"status": "ready"})
            if reason is None
            else reply_json({"status": "not ready", "reason": reason}, status=503)
        )

    async def health(self, http: web.Request) -> web.Response:
        """GET /health: readiness with a few details."""
        reason, sources = self._not_ready(), self._sources
        with suppress(OverloadedError):
            sources, _ = await self.figures()
        body: dict[str, Any] = {
            "status": "ok",
            "version": sources.version,
            "engines": {engine.name: engine.state for engine in sources.engines()},
            "redis": "up" if sources.redis().get("up") else "down",
        }
        if workers := sources.workers():
            body["workers"] = dict(workers)
        if upstreams := sources.upstreams():
            body["upstreams"] = {
                name: "up" if one["breaker"] == "closed" else "down" for name, one in upstreams.items()
            }
        if reason is not None:
            return reply_json({**body, "status": "not ready", "reason": reason}, status=503)
        if degraded := _degraded(sources):
            body |= {"status": "degraded", "reason": ", ".join(degraded)}
        return reply_json(body)

    async def prometheus(self, http: web.Request) -> web.Response:
        """GET /metrics"""
        await self._sources.refresh()
        _, metrics = await self.figures()
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def stats(self, http: web.Request) -> web.Response:
        """GET /admin/stats: cache, engines, queues, prompts, upstreams, redis, limits and tenants."""
        await self._sources.refresh()
        sources, metrics = await self.figures()
        engines, totals = sources.engines(), metrics.totals
        queues = {lane: sources.queue(lane) for lane in LANES}
        body = {
            "version": sources.version,
            "uptime_s": round(self._uptime_s(), 1),
            **({"workers": workers} if (workers := sources.workers()) else {}),
            "requests_in_flight": metrics.in_flight,
            "cache": _cache(totals),
            "engines": [
                _engine(engine, sum(queue.in_flight.get(engine.name, 0) for queue in queues.values()))
                for engine in engines
            ],
            "queues": {lane: asdict(queue) for lane, queue in queues.items()},
            "prompts": sources.prompts(),
            "embeddings": sources.embeddings(),
            "ledger": _ledger(sources.ledger),
            "upstreams": sources.upstreams(),
            "aliases": sources.aliases(),
            "redis": sources.redis(),
            "limits": sources.limits(),
            "response_cache": sources.response_cache(),
            "batches": sources.batches(),
            "warm": self._sources.warming(),
            "tenants": {
                tenant: {**own, "cached_ratio": _ratio(own["cached_tokens"], own["prompt_tokens"])}
                for tenant, own in totals.items()
            },
        }
        return reply_json(body)

    def snapshot(self) -> Snapshot:
        """Of this process alone."""
        return snapshot(self._sources, self._metrics, self._uptime_s())

    async def figures(self) -> tuple[Sources, Metrics]:
        """Of this process, or of all workers that it is one of. Raises OverloadedError."""
        total = await self._sources.total(self.snapshot())
        return (self._sources, self._metrics) if total is None else merged(self._sources, total)

    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    def _not_ready(self) -> str | None:
        if self._sources.draining():
            return "the server is shutting down"
        ready = any(engine.state == "ready" for engine in self._sources.engines())
        if not ready and not self._sources.upstreams():
            return "no engine is ready"
        return self._sources.cold()


def _degraded(sources: Sources) -> list[str]:
    """What does not work, though requests can be answered."""
    engines, upstreams, redis, workers = sources.engines(), sources.upstreams(), sources.redis(), sources.workers()
    reasons = [f"engine {engine.name} is {engine.state}" for engine in engines if engine.state != "ready"]
    reasons += [f"upstream {name} is down" for name, one in upstreams.items() if one["breaker"] != "closed"]
    if missing := workers.get("configured", 0) - workers.get("running", 0):
        reasons.append(f"{missing} of {workers['configured']} workers are down")
    return [*reasons, "redis is down"] if redis.get("outages") and not redis.get("up") else reasons


def _cache(totals: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "tokenized_tokens")
    sums = {name: sum(own[name] for own in totals.values()) for name in names}
    return {**sums, "cached_ratio": _ratio(sums["cached_tokens"], sums["prompt_tokens"])}


def _ledger(ledger: Ledger) -> dict[str, Any]:
    everything = grouped(ledger.totals, ()).get((), {})
    return {**totals_json(everything), "pending_rows": ledger.pending, "dropped": ledger.dropped}


def _engine(engine: EngineStatus, in_flight: int) -> dict[str, Any]:
    load, stats = engine.load, engine.stats
    return {
        "name": engine.name,
        "url": engine.url,
        "state": engine.state,
        "model": engine.model,
        "incarnation": engine.incarnation,
        "in_flight": in_flight,
        "blocks": {
            "free": load.free_blocks,
            "cached": load.cached_blocks,
            "live": load.live_blocks,
            "leased": load.leased_blocks,
            "total": engine.num_blocks,
            "tokens_per_block": engine.block_size,
        },
        "waiting": load.waiting,
        "running": load.running,
        "prefill_backlog": load.prefill_backlog,
        "batch": {"waiting": load.batch_waiting, "running": load.batch_running, "backlog": load.batch_backlog},
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
        "decode_tokens_per_s": round(load.decode_tokens_per_s, 1),
        "utilisation": stats.get("utilisation"),
        "evictions": stats.get("evictions"),
        "sharing": {key: stats.get(key) for key in _SHARING},
        "receipts": engine.receipts,
        "leases": stats.get("leases"),
        "tiers": stats.get("tiers"),
        "replica": engine.replica or None,
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
