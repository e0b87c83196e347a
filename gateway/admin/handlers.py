"""The gateway's own routes: /health, /metrics, /admin/stats and the front page. Reads the sources; changes nothing."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.protocol import LANES
from gateway.admin.ledger import grouped, totals_json
from gateway.admin.metrics import CONTENT_TYPE, Metrics
from gateway.admin.sources import EngineStatus, Sources
from gateway.api.dialect import UNLISTED, Route
from gateway.api.docs import base_url
from gateway.api.replies import reply_json

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
            Route("GET", "/", self.front_page, "A page of plain text with these routes.", media=(PLAIN,), key="none"),
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
        body: dict[str, Any] = {
            "status": "ok",
            "version": sources.version,
            "engines": {engine.name: engine.state for engine in sources.engines()},
            "redis": "up" if sources.redis().get("up") else "down",
        }
        if upstreams := sources.upstreams():
            body["upstreams"] = {
                name: "up" if one["breaker"] == "closed" else "down" for name, one in upstreams.items()
            }
        if reason is not None:
            return reply_json({**body, "status": "not ready", "reason": reason}, status=503)
        if degraded := self._degraded():
            body |= {"status": "degraded", "reason": ", ".join(degraded)}
        return reply_json(body)

    def _degraded(self) -> list[str]:
        """What does not work, though requests can be answered."""
        engines, upstreams, redis = self._sources.engines(), self._sources.upstreams(), self._sources.redis()
        reasons = [f"engine {engine.name} is {engine.state}" for engine in engines if engine.state != "ready"]
        reasons += [f"upstream {name} is down" for name, one in upstreams.items() if one["breaker"] != "closed"]
        return [*reasons, "redis is down"] if redis.get("outages") and not redis.get("up") else reasons

    async def prometheus(self, http: web.Request) -> web.Response:
        """GET /metrics"""
        await self._sources.refresh()
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def stats(self, http: web.Request) -> web.Response:
        """GET /admin/stats: cache, engines, queues, prompts, upstreams, redis, limits and tenants."""
        await self._sources.refresh()
        sources, engines = self._sources, self._sources.engines()
        queues = {lane: sources.queue(lane) for lane in LANES}
        body = {
            "version": sources.version,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "requests_in_flight": self._metrics.in_flight,
            "cache": self._cache(),
            "engines": [
                _engine(engine, sum(queue.in_flight.get(engine.name, 0) for queue in queues.values()))
                for engine in engines
            ],
            "queues": {lane: asdict(queue) for lane, queue in queues.items()},
            "prompts": sources.prompts(),
            "embeddings": sources.embeddings(),
            "ledger": self._ledger(),
            "upstreams": sources.upstreams(),
            "redis": sources.redis(),
            "limits": sources.limits(),
            "response_cache": sources.response_cache(),
            "batches": sources.batches(),
            "tenants": {
                tenant: {**totals, "cached_ratio": _ratio(totals["cached_tokens"], totals["prompt_tokens"])}
                for tenant, totals in self._metrics.totals.items()
            },
        }
        return reply_json(body)

    def _ledger(self) -> dict[str, Any]:
        ledger = self._sources.ledger
        everything = grouped(ledger.totals, ()).get((), {})
        return {**totals_json(everything), "pending_rows": ledger.pending, "dropped": ledger.dropped}

    def _not_ready(self) -> str | None:
        if self._sources.draining():
            return "the server is shutting down"
        ready = any(engine.state == "ready" for engine in self._sources.engines())
        if not ready and not self._sources.upstreams():
            return "no engine is ready"
        return None

    def _cache(self) -> dict[str, Any]:
        names = ("prompt_tokens", "cached_tokens", "tokenized_tokens")
        sums = {name: sum(totals[name] for totals in self._metrics.totals.values()) for name in names}
        return {**sums, "cached_ratio": _ratio(sums["cached_tokens"], sums["prompt_tokens"])}


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
        "evictions": stats.get("evictions"),
        "sharing": {key: stats.get(key) for key in _SHARING},
        "leases": stats.get("leases"),
        "tiers": stats.get("tiers"),
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
