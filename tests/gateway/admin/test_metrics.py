from __future__ import annotations

import asyncio
import shutil
import subprocess
import weakref
from functools import partial
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import Load
from gateway.admin.metrics import Metrics
from gateway.admin.sources import EngineStatus, Sources
from gateway.api.openai.wire import OPENAI
from gateway.api.record import Record
from gateway.config import SloSettings, TenantSettings
from gateway.errors import QueueFullError
from gateway.types import Hit, Lookup, Trace
from tests.fakes.gateway import LIMIT_S, Gateway, running
from tests.fakes.pipeline import FakePipeline


class FakeRepeat:
    num_bytes = 1 << 20

    def again(self) -> Lookup | None:
        return None


ASK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


async def scrape(gateway: Gateway) -> dict[str, float]:
    """Samples as `name{label="value",...}` -> value, labels in the order of their names."""
    _, text, headers = await gateway.get("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


async def test_requests_and_tokens_are_counted_by_model_and_tenant() -> None:
    tenants = (TenantSettings(name="north", keys=("north-key-1",)),)
    async with running(tenants=tenants) as gateway:
        for body in (ASK, {**ASK, "stream": True}):
            async with gateway.session.post(
                gateway.url + CHAT, json=body, headers={"Authorization": "Bearer north-key-1"}
            ) as answer:
                await answer.read()
        samples = await scrape(gateway)
    labels = "{model=demo,tenant=north}"
    assert samples[f"kvasir_requests_total{{endpoint={CHAT},model=demo,status=200,tenant=north}}"] == 2
    assert samples[f"kvasir_prompt_tokens_total{labels}"] == 80
    assert samples[f"kvasir_cached_tokens_total{labels}"] == 64
    assert samples[f"kvasir_completion_tokens_total{labels}"] == 4
    assert samples[f"kvasir_tokenized_tokens_total{labels}"] == 0
    assert samples["kvasir_first_token_seconds_count{hit=prefix,model=demo}"] == 2
    assert samples["kvasir_overhead_seconds_sum{model=demo}"] == 0.001
    assert samples["kvasir_request_seconds_count{model=demo}"] == 2


def answered(
    total_ms: float, *traces: Trace, slo: SloSettings | None = None, status: int = 200, stream: bool = True
) -> dict[str, float]:
    """Samples behind one request with these answers."""
    metrics = Metrics(None, slo)  # type: ignore[arg-type]
    record = Record("req_1", CHAT, 0.0, OPENAI, tenant="north", model="demo", status=status, stream=stream)
    record.traces, record.total_ms = list(traces), total_ms
    metrics.started(record)
    metrics.finished(record)
    return {f"{name}{labels}": value for name, own in metrics.series().items() for labels, value in own.items()}


def test_first_tokens_are_told_apart_by_what_answered() -> None:
    """What is remembered is there at once, and would hide how long the rest takes."""
    hit = Hit("exact", 10, 2, 3.0)
    answers = {
        "miss": Trace(first_token_ms=100.0),
        "prefix": Trace(first_token_ms=100.0, cached_tokens=8),
        "exact": Trace(first_token_ms=1.0, hit=hit, lookup=Lookup("exact")),
        "semantic": Trace(first_token_ms=1.0, hit=hit, lookup=Lookup("semantic")),
    }
    for name, trace in answers.items():
        assert [key for key in answered(200.0, trace) if key.startswith("first_token_seconds")] == [
            f"first_token_seconds('demo', '{name}')"
        ]


def test_the_time_between_tokens_is_the_mean_of_the_longest_generated_answer() -> None:
    def each_s(*traces: Trace, **options: bool) -> float | None:
        sums = answered(500.0, *traces, **options).get("inter_token_seconds('demo',)")
        return None if sums is None else sums[-1]  # type: ignore[index]

    long, short = (Trace(first_token_ms=100.0, completion_tokens=tokens) for tokens in (5, 2))
    assert each_s(long) == each_s(short, long) == each_s(long, short) == 0.1
    assert each_s(Trace(first_token_ms=100.0, completion_tokens=1)) is None
    assert each_s(Trace(first_token_ms=100.0, completion_tokens=5, hit=Hit("exact", 1, 5, 1.0))) is None
    whole = Trace(first_token_ms=500.0, completion_tokens=5, by_upstream=True)
    assert each_s(whole, stream=False) is None  # all its tokens came at once


@pytest.mark.parametrize(
    ("first_token_ms", "inter_token_ms", "outcome"),
    [
        (100, 100, "met"),
        (99, 0, "first_token"),
        (99, 99, "first_token"),
        (0, 99, "inter_token"),
        (100, 99, "inter_token"),
        (0, 0, None),
    ],
)
def test_goodput_is_the_requests_that_meet_every_objective(
    first_token_ms: float, inter_token_ms: float, outcome: str | None
) -> None:
    slo = SloSettings(first_token_ms=first_token_ms, inter_token_ms=inter_token_ms)
    trace = Trace(first_token_ms=100.0, completion_tokens=5)
    found = {key for key in answered(500.0, trace, slo=slo) if key.startswith("slo_requests")}
    assert found == ({f"slo_requests('demo', '{outcome}')"} if outcome else set())
    failed = answered(500.0, trace, slo=slo, status=502)
    assert not [key for key in failed if key.startswith(("slo_requests", "inter_token"))]


async def test_objectives_come_from_the_settings() -> None:
    async with running(slo=SloSettings(first_token_ms=60_000)) as gateway:
        await gateway.post(CHAT, ASK)
        assert (await scrape(gateway))["kvasir_slo_requests_total{model=demo,outcome=met}"] == 1


@pytest.mark.parametrize("hit", [None, Hit("exact", 10, 2, 3.0)])
def test_a_request_is_counted_as_it_was_when_it_ended(hit: Hit | None) -> None:
    """What it asked for may be generated for others after it has left."""
    metrics = Metrics(cast("Sources", None))
    record = Record("req_1", CHAT, 0.0, OPENAI, tenant="north", model="demo", status=499)
    record.traces = [Trace(prompt_tokens=10, completion_tokens=2, hit=hit)]
    metrics.started(record)
    metrics.finished(record)
    if hit is None:
        record.traces[0].completion_tokens = 99
    assert metrics.totals["north"]["completion_tokens"] == (2 if hit is None else 0)
    assert metrics.totals["north"]["response_hits"] == (hit is not None)


def test_what_a_finished_request_found_in_the_cache_is_let_go() -> None:
    """However few were finished since somebody looked."""
    metrics = Metrics(cast("Sources", None))
    found, record = FakeRepeat(), Record("req_1", CHAT, 0.0, OPENAI, tenant="north", model="demo", status=200)
    record.traces = [Trace(repeat=found)]
    metrics.started(record)
    metrics.finished(record)
    gone = weakref.ref(found)
    del found, record
    assert gone() is None
    assert metrics.totals["north"]["requests"] == 1


async def test_what_clients_invent_makes_no_new_series() -> None:
    async with running() as gateway:
        before = len(await scrape(gateway))
        for number in range(3):
            await gateway.post(CHAT, {**ASK, "model": f"invented-{number}"})
            await gateway.get(f"/v1/models/invented-{number}")
            await gateway.get(f"/invented/{number}")
        samples = await scrape(gateway)
    assert not [name for name in samples if "invented" in name]
    assert samples[f"kvasir_requests_total{{endpoint={CHAT},model=unknown,status=404,tenant=anonymous}}"] == 3
    assert samples["kvasir_requests_total{endpoint=unknown,model=unknown,status=404,tenant=unknown}"] == 3
    assert len(samples) == before + 4  # those two, /v1/models/{model}, and /metrics itself


async def test_errors_and_clients_that_left_are_counted() -> None:
    pipeline = FakePipeline(fails_before=QueueFullError("full", retry_after_s=1))
    async with running(pipeline) as gateway:
        await gateway.post(CHAT, ASK)
        pipeline.fails_before, pipeline.hold_before = None, asyncio.Event()
        pipeline.closed.clear()
        asking = asyncio.create_task(gateway.post(CHAT, ASK))
        await asyncio.wait_for(pipeline.reached.wait(), LIMIT_S)
        assert (await scrape(gateway))["kvasir_requests_in_flight{}"] == 2  # that one, and the scrape
        asking.cancel()
        await asyncio.wait_for(pipeline.closed.wait(), LIMIT_S)
        samples = await scrape(gateway)
    counted = "kvasir_requests_total{{endpoint=/v1/chat/completions,model=demo,status={},tenant=anonymous}}"
    assert samples[counted.format(429)] == 1
    assert samples[counted.format(499)] == 1
    assert samples["kvasir_requests_in_flight{}"] == 1


async def test_engines_queue_memos_and_redis_are_read_at_every_scrape() -> None:
    async with running() as gateway:
        load = Load(
            waiting=1, running=2, prefill_backlog=3, free_blocks=4, cached_blocks=5, live_blocks=6, batch_running=1
        )
        gateway.state["engines"] = [
            EngineStatus("engine-1", "http://x", "ready", "demo", "i", 15, 16, load),
            EngineStatus("engine-2", "http://y", "connecting"),
        ]
        samples = await scrape(gateway)
        labels = "{engine=engine-1,model=demo}"
        for name, value in (("waiting", 1), ("running", 2), ("prefill_backlog", 3), ("batch_running", 1)):
            assert samples[f"kvasir_engine_{name}{labels}"] == value
        for name, value in (("free", 4), ("cached", 5), ("live", 6)):
            assert samples[f"kvasir_engine_{name}_blocks{labels}"] == value
        assert samples[f"kvasir_engine_up{labels}"] == 1
        assert samples["kvasir_engine_up{engine=engine-2,model=unknown}"] == 0
        assert samples["kvasir_redis_up{}"] == 1
        assert samples["kvasir_log_lost_lines_total{}"] == 0
        assert samples["kvasir_queue_waiting{lane=online}"] == 0
        assert samples["kvasir_queue_requests_total{lane=batch,outcome=refused}"] == 0
        assert samples["kvasir_prompt{figure=segment_hits,model=demo}"] == 3
        gateway.state["redis"] = {"up": False}
        gateway.state["lost_lines"] = 7
        gateway.state["engines"] = []
        samples = await scrape(gateway)
        assert samples["kvasir_redis_up{}"] == 0
        assert samples["kvasir_log_lost_lines_total{}"] == 7
        assert not [name for name in samples if "engine-1" in name]


STATS = {
    "evictions": 7,
    "shared_tokens": 96,
    "shared_waits": 2,
    "forks": 14,
    "copied_blocks": 13,
    "drafted_tokens": 40,
    "accepted_tokens": 30,
    "busy_s": 2.5,
    "utilisation": {
        "flops": 1e12,
        "read_bytes": 2e9,
        "peak_flops_per_s": 1e12,
        "peak_bytes_per_s": 1e10,
        "mfu": 0.4,
        "mbu": 0.08,
    },
    "leases": {
        "kept": 3,
        "degraded_now": 1,
        "granted": 9,
        "renewed": 8,
        "degraded": 4,
        "kept_again": 1,
        "expired": 5,
        "lost": 0,
        "restored": 6,
        "read_tokens": 1234,
        "blocks": {"device": 60, "disk": 2},
        "budget_blocks": {"device": 500},
        "tenants": {"north": {"blocks": 60}, "south": {"blocks": 2}},
    },
    "tiers": {
        "device": {"blocks": 10, "bytes": 1000, "capacity_bytes": 2000, "evictions": 7},
        "disk": {"blocks": 4, "bytes": 400, "capacity_bytes": 800, "saved": 6, "restored": 5, "torn": 1, "dropped": 2},
    },
}


def engine(stats: object, name: str = "engine-1") -> EngineStatus:
    return EngineStatus(name, "http://x", "ready", "demo", "i", stats=stats)  # type: ignore[arg-type]


async def test_an_engines_own_counters_are_shown() -> None:
    async with running() as gateway:
        gateway.state["engines"] = [engine(STATS)]
        samples = await scrape(gateway)
    labels = "engine=engine-1,model=demo"
    expected = {
        f"evictions_total{{{labels}}}": 7,
        f"shared_tokens_total{{{labels}}}": 96,
        f"shared_waits_total{{{labels}}}": 2,
        f"forks_total{{{labels}}}": 14,
        f"copied_blocks_total{{{labels}}}": 13,
        f"drafted_tokens_total{{{labels}}}": 40,
        f"accepted_tokens_total{{{labels}}}": 30,
        f"busy_seconds_total{{{labels}}}": 2.5,
        f"flops_total{{{labels}}}": 1e12,
        f"read_bytes_total{{{labels}}}": 2e9,
        f"peak_flops_per_second{{{labels}}}": 1e12,
        f"peak_bytes_per_second{{{labels}}}": 1e10,
        f"mfu_ratio{{{labels}}}": 0.4,
        f"mbu_ratio{{{labels}}}": 0.08,
        f"leases{{{labels},state=kept}}": 3,
        f"leases{{{labels},state=degraded}}": 1,
        f"leases_granted_total{{{labels}}}": 9,
        f"leases_renewed_total{{{labels}}}": 8,
        f"leases_degraded_total{{{labels}}}": 4,
        f"leases_kept_again_total{{{labels}}}": 1,
        f"leases_expired_total{{{labels}}}": 5,
        f"leases_lost_total{{{labels}}}": 0,
        f"leases_restored_total{{{labels}}}": 6,
        f"lease_blocks{{{labels},tier=device}}": 60,
        f"lease_blocks{{{labels},tier=disk}}": 2,
        f"lease_budget_blocks{{{labels},tier=device}}": 500,
        f"lease_read_tokens_total{{{labels}}}": 1234,
        f"tenant_leased_blocks{{{labels},tenant=north}}": 60,
        f"tenant_leased_blocks{{{labels},tenant=south}}": 2,
        f"tier_blocks{{{labels},tier=device}}": 10,
        f"tier_bytes{{{labels},tier=disk}}": 400,
        f"tier_capacity_bytes{{{labels},tier=disk}}": 800,
        f"tier_evictions_total{{{labels},tier=device}}": 7,
        f"tier_saved_blocks_total{{{labels},tier=disk}}": 6,
        f"tier_restored_blocks_total{{{labels},tier=disk}}": 5,
        f"tier_dropped_blocks_total{{{labels},tier=disk}}": 2,
        f"tier_torn_blocks_total{{{labels},tier=disk}}": 1,
    }
    assert expected.items() <= {name.removeprefix("kvasir_engine_"): value for name, value in samples.items()}.items()
    assert not [name for name in samples if "tier=host" in name or ("saved_blocks" in name and "tier=device" in name)]


NONSENSE: list[object] = [
    {},
    {"evictions": "many", "leases": 3, "tiers": None},
    {"leases": {"tenants": [], "kept": {}}, "tiers": {"device": 5, "disk": []}},
    {"leases": {"tenants": {"north": 7}}, "tiers": {"tape": {"blocks": 1}}},
]


async def test_figures_that_are_missing_or_no_numbers_are_left_out_and_break_nothing() -> None:
    async with running() as gateway:
        for stats in NONSENSE:
            gateway.state["engines"] = [engine(stats), engine(STATS, "engine-2")]
            samples = await scrape(gateway)
            assert samples["kvasir_engine_evictions_total{engine=engine-2,model=demo}"] == 7
            assert "kvasir_engine_evictions_total{engine=engine-1,model=demo}" not in samples
            assert not [name for name in samples if "tier=tape" in name]
            assert (await gateway.get("/admin/stats"))[0] == 200


async def test_only_the_tenants_that_keep_the_most_have_a_label() -> None:
    tenants = {f"tenant-{number}": {"blocks": number} for number in range(100)}
    async with running() as gateway:
        gateway.state["engines"] = [engine({"leases": {"tenants": tenants}})]
        samples = await scrape(gateway)
    shown = [value for name, value in samples.items() if "tenant_leased_blocks" in name]
    assert shown == list(range(99, 67, -1))


async def test_the_batch_lane_tells_what_became_of_its_lines() -> None:
    async with running() as gateway:
        assert (await scrape(gateway))["kvasir_batch_jobs_open{}"] == 0
        gateway.state["batches"] = {"in_flight": 3, "paused_models": 4, "open_jobs": 2, "succeeded": 7, "put_back": 1}
        samples = await scrape(gateway)
        _, stats, _ = await gateway.get("/admin/stats")
    assert samples["kvasir_batch_lines_in_flight{}"] == 3
    assert samples["kvasir_batch_models_paused{}"] == 4
    assert samples["kvasir_batch_jobs_open{}"] == 2
    assert samples["kvasir_batch_lines_total{outcome=succeeded}"] == 7
    assert samples["kvasir_batch_lines_total{outcome=put_back}"] == 1
    assert '"succeeded":7' in stats


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
async def test_names_follow_the_conventions_of_prometheus() -> None:
    async with running(FakePipeline()) as gateway:
        gateway.state["engines"] = [engine(STATS)]
        await gateway.post("/v1/chat/completions", ASK)
        _, text, _ = await gateway.get("/metrics")
    check = partial(subprocess.run, ["promtool", "check", "metrics"], input=text.encode(), capture_output=True)
    found = await asyncio.to_thread(check)
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")
