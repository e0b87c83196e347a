"""/admin/replicas over HTTP, and which cache is worth least."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine.protocol import Load
from gateway.admin.replicas import choose_least, worth_of
from gateway.admin.sources import EngineState, EngineStatus
from gateway.config import AuthSettings, TenantSettings
from tests.fakes.fleet import FakeGateway, table_of
from tests.fakes.gateway import Gateway, running

ADMIN = "admin-key-1"
GUARDED: Mapping[str, Any] = {
    "auth": AuthSettings(admin_keys=(ADMIN,)),
    "tenants": (TenantSettings(name="north", keys=("north-key-1",)),),
}


def status(
    server: str, worth: float, *, model: str = "m", rank: int = 0, state: EngineState = "ready", in_flight: int = 0
) -> EngineStatus:
    name = f"{server}-{rank}" if rank else server
    return EngineStatus(
        name,
        f"http://{server}.test#{rank}",
        state,
        model,
        f"{name}-i",
        receipts={"receipts": 2, "exact": 1, "recent_tokens": worth},
        replica={"server": server, "in_flight": in_flight},
    )


async def ask(gateway: Gateway, method: str, path: str, key: str = ADMIN, **more: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.session.request(method, gateway.url + path, headers=headers, **more) as answer:
        return answer.status, await answer.json()


async def test_a_server_is_added_drained_taken_back_and_removed() -> None:
    fleet = FakeGateway(configured=("file",))
    fleet.fleet.attach()
    async with running(fleet=fleet.fleet, **GUARDED) as gateway:
        added = await ask(gateway, "POST", "/admin/replicas", json=table_of("new"))
        assert added == (200, {"name": "new", "state": "added"})
        assert await ask(gateway, "POST", "/admin/replicas/new/drain") == (200, {"name": "new", "state": "draining"})
        assert fleet.draining == ["new"]
        taken_back = await ask(gateway, "POST", "/admin/replicas/new/drain?undo=true")
        assert taken_back == (200, {"name": "new", "state": "serving"})
        fleet.attached["new"].in_flight = 1
        assert await ask(gateway, "DELETE", "/admin/replicas/new") == (200, {"name": "new", "state": "removed"})
        assert fleet.draining == ["new"]
        assert (await ask(gateway, "DELETE", "/admin/replicas/new?force=true"))[0] == 200
        assert list(fleet.attached) == ["file"]


@pytest.mark.parametrize(
    ("method", "path", "body", "expected", "param"),
    [
        ("POST", "/admin/replicas", {"name": "a", "kind": "vllm"}, 400, "url"),
        ("POST", "/admin/replicas", table_of("a", kind="ollama"), 400, "kind"),
        ("POST", "/admin/replicas", table_of("a", url="a.test:8000"), 400, "url"),
        ("POST", "/admin/replicas", table_of("a/b"), 400, "name"),
        ("POST", "/admin/replicas", table_of("file"), 400, "name"),
        ("POST", "/admin/replicas/none/drain", None, 404, None),
        ("POST", "/admin/replicas/drain", None, 400, None),
        ("DELETE", "/admin/replicas/file", None, 400, "name"),
        ("DELETE", "/admin/replicas/file?force=maybe", None, 400, "force"),
    ],
)
async def test_what_cannot_be_is_one_clear_line(
    method: str, path: str, body: Any, expected: int, param: str | None
) -> None:
    fleet = FakeGateway(configured=("file",))
    async with running(fleet=fleet.fleet, **GUARDED) as gateway:
        found, told = await ask(gateway, method, path, json=body)
    assert (found, told["error"]["param"]) == (expected, param)
    assert "\n" not in told["error"]["message"]


async def test_a_key_is_not_taken() -> None:
    fleet = FakeGateway()
    async with running(fleet=fleet.fleet, **GUARDED) as gateway:
        await ask(gateway, "POST", "/admin/replicas", json=table_of("a", key="sk-secret-1"))
        shown = await ask(gateway, "GET", "/admin/replicas")
    assert "sk-secret-1" not in json.dumps(shown)


async def test_only_an_admin_sees_and_changes_the_fleet() -> None:
    fleet = FakeGateway(configured=("file",))
    fleet.fleet.attach()
    async with running(fleet=fleet.fleet, **GUARDED) as gateway:
        for method, path in (
            ("GET", "/admin/replicas"),
            ("POST", "/admin/replicas"),
            ("POST", "/admin/replicas/drain"),
            ("POST", "/admin/replicas/file/drain"),
            ("DELETE", "/admin/replicas/file"),
        ):
            assert (await ask(gateway, method, path, "north-key-1"))[0] == 403
            assert (await ask(gateway, method, path, "wrong"))[0] == 401
    assert not fleet.draining


async def test_the_page_has_what_is_known_of_each_replica_and_no_bundled_engine() -> None:
    index = {"trust": "degraded", "reason": "older events are lost", "blocks": 7, "following": True}
    figures = {"server": "a", "kind": "vllm", "version": "0.32.0", "reason": "", "in_flight": 3, "index": index}
    load = Load(running=2, cached_blocks=5, prefill_tokens_per_s=123.45)
    known = EngineStatus(
        "a", "http://a.test", "ready", "m", "a-0-1", 100, 16, load, replica=figures, receipts={"receipts": 1}
    )
    away = EngineStatus("b", "http://b.test", "connecting", replica={"server": "b", "reason": "it is silent"})
    fleet = FakeGateway()
    fleet.fleet.unusable["c"] = "REPLICA_KEY is not set"
    async with running(fleet=fleet.fleet) as gateway:
        gateway.state["engines"] = [known, away, EngineStatus("bundled", "http://c.test", "ready", "m", "c-1")]
        _, shown = await ask(gateway, "GET", "/admin/replicas")
    one, other, third = shown["replicas"]
    assert (one["name"], one["state"], one["trust"]) == ("a", "joined", "degraded")
    assert (one["trust_reason"], one["version"], one["in_flight"]) == ("older events are lost", "0.32.0", 3)
    assert (one["blocks"]["total"], one["blocks"]["cached"], one["load"]["running"]) == (100, 5, 2)
    assert (one["receipts"], one["index"]) == ({"receipts": 1}, {"blocks": 7, "following": True})
    assert (other["state"], other["reason"], other["trust"]) == ("joining", "it is silent", None)
    assert third == {"name": "c", "state": "unusable", "reason": "REPLICA_KEY is not set"}


async def test_metrics_say_how_a_replica_s_events_are() -> None:
    index = {"trust": "exact", "connected": True, "last_sequence": 41, "gaps": 2, "orphans": 0, "lag_s": 0.25}
    one = EngineStatus(
        "a",
        "http://a.test",
        "ready",
        "m",
        "a-0-1",
        replica={"server": "a", "requests": 9, "index": index},
        receipts={"recent_tokens": 12.5},
    )
    async with running() as gateway:
        gateway.state["engines"] = [one]
        _, page, _ = await gateway.get("/metrics")
    labels = 'engine="a",model="m"'
    for line in (
        f'kvasir_replica_trust{{{labels},trust="exact"}} 1.0',
        f'kvasir_replica_trust{{{labels},trust="fallback"}} 0.0',
        f"kvasir_replica_connected{{{labels}}} 1.0",
        f"kvasir_replica_last_sequence{{{labels}}} 41.0",
        f"kvasir_replica_event_gaps_total{{{labels}}} 2.0",
        f"kvasir_replica_event_lag_seconds{{{labels}}} 0.25",
        f"kvasir_replica_requests_total{{{labels}}} 9.0",
        f"kvasir_replica_cache_worth_tokens{{{labels}}} 12.5",
    ):
        assert line in page.splitlines()


# -- which cache is worth least ----------------------------------------------------------------------------------------


def test_the_cache_that_saved_least_lately_is_the_one() -> None:
    assert choose_least([status("a", 900), status("b", 20), status("c", 300)]) == "b"


def test_what_other_gateways_reuse_counts() -> None:
    statuses = [status("a", 900), status("b", 20)]
    shared = {"a": 950.0, "b": 1000.0, "c": 1.0}
    assert worth_of(statuses, shared) == {"a": 950, "b": 1000}
    assert choose_least(statuses, shared) == "a"
    assert choose_least(statuses, {"b": 1000.0}) == "a"


def test_ranks_of_a_server_count_together() -> None:
    ranks = [status("a", 100), status("a", 100, rank=1), status("b", 150)]
    assert worth_of(ranks) == {"a": 200, "b": 150}
    assert choose_least(ranks) == "b"


def test_a_model_keeps_one_that_serves_it() -> None:
    assert choose_least([status("a", 0, model="only"), status("b", 50), status("c", 60)]) == "b"
    assert choose_least([status("a", 0), status("b", 50, state="draining")]) is None
    assert choose_least([status("a", 0), status("a", 0, rank=1)]) is None
    assert choose_least([]) is None


def test_a_bundled_engine_of_the_model_can_take_over_and_is_not_drained() -> None:
    bundled = EngineStatus("bundled", "http://e.test", "ready", "m", "e-1")
    assert choose_least([status("a", 50), bundled]) == "a"


def test_among_caches_of_no_worth_the_idle_one_goes() -> None:
    assert choose_least([status("a", 0, in_flight=2), status("b", 0), status("c", 0)]) == "b"


async def test_the_least_worth_drains_by_the_api() -> None:
    fleet = FakeGateway(configured=("a", "b"))
    fleet.fleet.attach()
    async with running(fleet=fleet.fleet) as gateway:
        gateway.state["engines"] = [status("a", 90), status("b", 20)]
        told = await ask(gateway, "POST", "/admin/replicas/drain?model=m")
    assert told == (200, {"name": "b", "state": "draining", "worth_tokens": {"a": 90, "b": 20}})
    assert fleet.draining == ["b"]
