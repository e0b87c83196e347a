from __future__ import annotations

import json

from engine.protocol import Load
from gateway.admin.sources import EngineStatus
from gateway.api.dialect import UNLISTED
from gateway.api.routes import routes
from tests.fakes.gateway import running
from tests.fakes.upstream import CHAT, error, upstream

ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


async def test_health_follows_the_engines_and_the_end_of_the_server() -> None:
    async with running() as gateway:
        assert (await gateway.get("/health/readiness"))[0] == 200
        status, text, _ = await gateway.get("/health")
        assert (status, json.loads(text)) == (
            200,
            {"status": "ok", "version": "0.0.test", "engines": {"engine-1": "ready"}, "redis": "up"},
        )
        gateway.state["engines"] = [EngineStatus("engine-1", "http://x", "lost", "demo", "i")]
        gateway.state["redis"] = {"up": False}
        for path in ("/health", "/health/readiness"):
            status, text, _ = await gateway.get(path)
            assert (status, json.loads(text)["reason"]) == (503, "no engine is ready")
        gateway.state["draining"] = True
        assert json.loads((await gateway.get("/health"))[1])["reason"] == "the server is shutting down"
        assert (await gateway.get("/health/liveness"))[0] == 200


async def test_a_redis_that_is_down_does_not_make_the_server_unhealthy() -> None:
    async with running() as gateway:
        gateway.state["redis"] = {"up": False}
        status, text, _ = await gateway.get("/health")
        assert (status, json.loads(text)["redis"]) == (200, "down")


async def test_health_is_degraded_while_a_part_is_away_and_readiness_stays() -> None:
    async with upstream(error(500), error(500), CHAT) as stub:
        settings = stub.settings(retries=0, breaker_failures=2, breaker_open_s=0.001)
        async with running(upstreams=[settings]) as gateway:

            async def health() -> tuple[int, str, str | None]:
                status, text, _ = await gateway.get("/health")
                assert (await gateway.get("/health/readiness"))[0] == 200
                body = json.loads(text)
                return status, body["status"], body.get("reason")

            assert await health() == (200, "ok", None)
            for _ in range(2):
                await gateway.post("/v1/chat/completions", {**ASK, "model": "up-1"})
            assert await health() == (200, "degraded", "upstream up is down")
            gateway.state["engines"].append(EngineStatus("engine-2", "http://x", "lost", "demo", "i"))
            gateway.state["redis"] = {"up": False, "outages": 1}
            reason = "engine engine-2 is lost, upstream up is down, redis is down"
            assert await health() == (200, "degraded", reason)
            del gateway.state["engines"][1]
            gateway.state["redis"] = {"up": False, "outages": 0}  # none is configured
            assert await health() == (200, "degraded", "upstream up is down")
            assert json.loads((await gateway.get("/health"))[1])["upstreams"] == {"up": "down"}
            status, *_ = await gateway.post("/v1/chat/completions", {**ASK, "model": "up-1"})
            assert (status, await health()) == (200, (200, "ok", None))


async def test_stats_tell_what_was_reused_and_who_is_busy() -> None:
    async with running() as gateway:
        load = Load(
            running=1, free_blocks=90, cached_blocks=8, live_blocks=2, leased_blocks=3, prefill_tokens_per_s=1234.56
        )
        stats = {
            "evictions": 4,
            "prefilled_tokens": 9,
            "shared_tokens": 5,
            "shared_waits": 6,
            "forks": 7,
            "copied_blocks": 3,
            "leases": {"kept": 1},
            "tiers": {"disk": {}},
            "utilisation": {"mfu": 0.4},
        }
        gateway.state["engines"] = [
            EngineStatus(
                "engine-1", "http://x", "ready", "demo", "i", 100, 16, load, stats, {"exact": 3, "receipts": 4}
            )
        ]
        for _ in range(2):
            await gateway.post("/v1/chat/completions", ASK)
        await gateway.post("/v1/chat/completions", {})
        status, text, _ = await gateway.get("/admin/stats")
        stats = json.loads(text)
    assert status == 200
    assert stats["version"] == "0.0.test"
    assert stats["uptime_s"] >= 0
    assert stats["requests_in_flight"] == 1
    assert stats["cache"] == {"prompt_tokens": 80, "cached_tokens": 64, "cached_ratio": 0.8, "tokenized_tokens": 0}
    (engine,) = stats["engines"]
    assert engine == {
        "name": "engine-1",
        "url": "http://x",
        "state": "ready",
        "model": "demo",
        "incarnation": "i",
        "in_flight": 0,
        "blocks": {"free": 90, "cached": 8, "live": 2, "leased": 3, "total": 100, "tokens_per_block": 16},
        "waiting": 0,
        "running": 1,
        "prefill_backlog": 0,
        "batch": {"waiting": 0, "running": 0, "backlog": 0},
        "prefill_tokens_per_s": 1234.6,
        "decode_tokens_per_s": 0.0,
        "utilisation": {"mfu": 0.4},
        "evictions": 4,
        "sharing": {"prefilled_tokens": 9, "shared_tokens": 5, "shared_waits": 6, "forks": 7},
        "receipts": {"exact": 3, "receipts": 4},
        "leases": {"kept": 1},
        "tiers": {"disk": {}},
        "replica": None,
    }
    assert (
        stats["queues"]["online"]
        == stats["queues"]["batch"]
        == {
            "waiting": 0,
            "in_flight": {},
            "waiting_by_tenant": {},
            "admitted": 0,
            "refused": 0,
            "expired": 0,
            "abandoned": 0,
            "overload": {},
        }
    )
    assert stats["prompts"] == {"demo": {"segment_hits": 3, "tokenizer": "tiktoken"}}
    assert stats["redis"] == {"up": True}
    assert stats["tenants"]["anonymous"] | {"cached_ratio": 0.8} == {
        "requests": 3,
        "errors": 1,
        "clients_left": 0,
        "prompt_tokens": 80,
        "cached_tokens": 64,
        "lease_read_tokens": 0,
        "lease_write_tokens": 0,
        "completion_tokens": 4,
        "tokenized_tokens": 0,
        "embedded_tokens": 0,
        "response_hits": 0,
        "cached_ratio": 0.8,
    }


async def test_an_engine_that_never_said_hello_is_shown_as_it_is() -> None:
    async with running() as gateway:
        gateway.state["engines"] = [EngineStatus("engine-1", "http://x", "connecting")]
        (engine,) = json.loads((await gateway.get("/admin/stats"))[1])["engines"]
        assert (engine["state"], engine["model"], engine["incarnation"]) == ("connecting", None, None)
        assert (engine["leases"], engine["tiers"], engine["evictions"]) == (None, None, None)


async def test_the_front_page_names_every_route_and_how_to_point_an_sdk_at_it() -> None:
    async with running() as gateway:
        _, text, headers = await gateway.get("/")
        assert headers["content-type"].startswith("text/plain")
        for method, path in routes(gateway.app):
            assert (f"{method:<7}{path}\n" in text) is (path not in gateway.app[UNLISTED])
        assert f'base_url="{gateway.url}/v1"' in text
        assert f'base_url="{gateway.url}"' in text
