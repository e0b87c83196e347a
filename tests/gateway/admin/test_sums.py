"""Figures of several processes as those of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Load
from gateway.admin.sources import EngineStatus
from gateway.admin.sums import Snapshot, added, counters
from gateway.api.routes import ADMIN
from gateway.ledger.base import Row
from gateway.queues.slots import OverloadStatus, QueueStatus
from tests.fakes.gateway import running

ROW = Row("", "t", "m", "online", "")
QUEUE = QueueStatus(
    waiting=2,
    in_flight={"e": 1},
    waiting_by_tenant={"up": 2},
    admitted=5,
    refused=1,
    expired=0,
    abandoned=0,
    overload={"m": OverloadStatus(holds=True, share=0.5, held_back=1)},
)
READY = EngineStatus("e", "unix:e", "ready", "m", "inc", 10, 16, Load(free_blocks=4), {"evictions": 3})
SPACE = {"owner": "tenant:t", "model": "m", "entries": 7, "bytes": 10, "hits": 2, "audits": 1, "closed": False}
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def tree(**changes: Any) -> dict[str, Any]:
    return {
        "metrics": {"requests": {("/v1", "m"): 3.0}, "lag": {(): [1, 2, 0.5]}},
        "requests_in_flight": 1,
        "uptime_s": 5.0,
        "engines": {("e", "unix:e"): READY},
        "queues": {"online": QUEUE},
        "upstreams": {"up": {"requests": 2, "in_flight": 1, "breaker": "closed", "errors": {"timeout": 1}}},
        "ledger": {"totals": {ROW: {"requests": 1}}, "pending": 2, "dropped": 1, "capped": 0},
        "limits": {"tenants": {"up": {"requests": {"limit": 5, "remaining": 3, "reset_s": 1.0}, "refused": {"x": 1}}}},
        "redis": {"up": True, "outages": 1, "unreadable": {}},
        "batches": {"open_jobs": 4, "paused_models": 1, "in_flight": 2, "succeeded": 3},
        "response_cache": {
            "entries": 1,
            "outcomes": {"exact": 2},
            "semantic": {"spaces": [SPACE], "last_wrong": [{"at_s": 2.0}]},
        },
        "lost_lines": 0,
        **changes,
    }


def test_what_each_worker_counts_adds_up_and_what_all_share_does_not() -> None:
    total = added(tree(), tree(uptime_s=2.0, redis={"up": False, "outages": 0, "unreadable": {"s": 1}}))
    assert total["metrics"] == {"requests": {("/v1", "m"): 6.0}, "lag": {(): [2, 4, 1.0]}}
    assert total["queues"]["online"] == replace(
        QUEUE,
        waiting=4,
        in_flight={"e": 2},
        waiting_by_tenant={"up": 4},
        admitted=10,
        refused=2,
        overload={"m": OverloadStatus(holds=True, share=0.5, held_back=2)},
    )
    assert total["uptime_s"] == 5.0
    assert total["redis"] == {"up": False, "outages": 1, "unreadable": {"s": 1}}
    assert total["limits"]["tenants"]["up"] == {
        "requests": {"limit": 5, "remaining": 3, "reset_s": 1.0},
        "refused": {"x": 2},
    }
    assert total["batches"] == {"open_jobs": 4, "paused_models": 1, "in_flight": 4, "succeeded": 6}
    assert total["response_cache"]["semantic"]["spaces"] == [SPACE | {"bytes": 20, "hits": 4, "audits": 2}]
    assert total["response_cache"]["semantic"]["last_wrong"] == [{"at_s": 2.0}] * 2
    assert total["engines"] == {("e", "unix:e"): READY}


def test_an_engine_and_an_upstream_are_in_the_worst_state_that_a_worker_sees() -> None:
    lost = EngineStatus("e", "unix:e", "connecting")
    broken = {"up": {"requests": 1, "in_flight": 0, "breaker": "open", "errors": {}}}
    for total in (added(tree(), tree(upstreams=broken)), added(tree(upstreams=broken), tree())):
        assert total["upstreams"]["up"]["breaker"] == "open"
    assert added(tree(engines={("e", "unix:e"): lost}), tree())["engines"] == {
        ("e", "unix:e"): replace(READY, state="connecting")
    }
    draining = replace(READY, state="draining")
    for total in (added(tree(), tree(engines={})), added(tree(engines={}), tree())):  # not heard of by a worker yet
        assert total["engines"] == {("e", "unix:e"): replace(READY, state="connecting")}
    assert added(tree(engines={}), tree(engines={("e", "unix:e"): draining}))["engines"] == {("e", "unix:e"): draining}


def test_a_target_of_an_alias_is_as_the_worst_worker_sees_it() -> None:
    def aliases(**target: Any) -> Snapshot:
        return {"aliases": {"best": {"policy": "first", "targets": {"m": target}}}}

    one, other = aliases(up=True, requests=2, first_token_ms=5.0), aliases(up=False, requests=3, first_token_ms=7.0)
    assert added(one, other) == aliases(up=False, requests=5, first_token_ms=7.0)
    gone = counters(one)
    assert gone == {"aliases": {"best": {"targets": {"m": {"requests": 2}}}}}
    assert added(gone, other) == aliases(up=False, requests=5, first_token_ms=7.0)


def test_only_counters_are_left_of_a_worker_that_is_no_more() -> None:
    left = counters(tree())
    assert set(left) == {
        *("metrics", "queues", "upstreams", "ledger", "limits", "redis", "batches", "response_cache", "lost_lines")
    }
    assert left["queues"]["online"] == QueueStatus(0, {}, {}, 5, 1, 0, 0, {})
    assert left["upstreams"] == {"up": {"requests": 2, "errors": {"timeout": 1}}}
    assert left["ledger"] == {"totals": {ROW: {"requests": 1}}, "dropped": 1, "capped": 0}
    assert left["response_cache"] == {"outcomes": {"exact": 2}}
    assert left["redis"] == {"outages": 1, "unreadable": {}}
    total = added(left, tree())
    assert total["queues"]["online"].waiting == 2
    assert total["ledger"]["pending"] == 2
    assert total["redis"]["up"] is True


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=30))
def test_counters_never_fall_however_often_workers_end(steps: list[tuple[int, int]]) -> None:
    past: dict[str, Any] = {}
    workers: list[dict[str, Any] | None] = [None] * 3
    counted = last = 0.0
    for number, requests in steps:
        if requests == 9:  # it ends
            past = added(past, counters(workers[number])) if workers[number] is not None else past
            workers[number] = None
        else:
            workers[number] = added(workers[number], {"metrics": {"requests": {(): requests}}})
            counted += requests
        total = past
        for worker in workers:
            total = added(total, worker)
        found = total.get("metrics", {}).get("requests", {}).get((), 0)
        assert found == counted >= last
        last = found


async def test_a_gateway_shows_its_own_snapshot_as_it_shows_itself() -> None:
    async with running() as gateway:
        await gateway.post("/v1/chat/completions", BODY)
        own = (await gateway.get("/metrics"))[1]
        admin = gateway.app[ADMIN]

        async def total(given: dict[str, Any]) -> dict[str, Any]:
            return {**added({}, given), "workers": {}}

        object.__setattr__(admin._sources, "total", total)
        shown = (await gateway.get("/metrics"))[1]

    def steady(text: str) -> list[str]:  # that do not go on with the time, or with requests for metrics themselves
        return [line for line in text.splitlines() if "loop" not in line and 'endpoint="/metrics"' not in line]

    assert steady(shown) == steady(own)
