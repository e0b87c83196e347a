"""How busy a server is: gauges of each rank, and rates made of counters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.config import ReplicaKind
from gateway.replicas.calls import ServerError, open_session
from gateway.replicas.load import LoadMeter, RankLoad, is_alive, parse
from tests.fakes.clock import Clock
from tests.fakes.replica_server import ReplicaServer, replica_server

VLLM = {"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.25}
SGLANG = {"sglang:num_running_reqs": 3, "sglang:num_queue_reqs": 2, "sglang:token_usage": 0.25}
TRT = {"trtllm_num_requests_running": 3, "trtllm_num_requests_waiting": 2, "trtllm_kv_cache_utilization": 0.25}


@asynccontextmanager
async def asked(kind: ReplicaKind, **more: Any) -> AsyncIterator[tuple[ReplicaServer, aiohttp.ClientSession]]:
    async with replica_server(kind, **more) as server, open_session(server.settings(), None) as session:
        yield server, session


@pytest.mark.parametrize(("kind", "values"), [("vllm", VLLM), ("sglang", SGLANG), ("tensorrt-llm", TRT)])
async def test_gauges_of_the_metrics_are_read(kind: ReplicaKind, values: dict[str, float]) -> None:
    async with asked(kind, ranks=[values], answers={"/v1/loads": 404}) as (server, session):
        assert await LoadMeter(server.settings()).read(session) == (RankLoad(3, 2, 0.25),)


async def test_each_rank_has_its_own_load_and_adapters_count_with_their_rank() -> None:
    lines = [
        'vllm:num_requests_running{engine="1",model_name="demo"} 1.0',
        'vllm:num_requests_running{engine="0",model_name="demo"} 4.0',
        'vllm:num_requests_running{engine="0",model_name="lora"} 2.0',
    ]
    async with asked("vllm", answers={"/metrics": "\n".join(lines)}) as (server, session):
        assert [load.running for load in await LoadMeter(server.settings()).read(session)] == [6, 1]


async def test_a_sglang_says_what_waits_and_how_long_its_prefills_took() -> None:
    first = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 900, "token_usage": 0.5}
    later = {**first, "total_prefill_uncached_tokens": 4000, "total_prefill_busy_us": 500_000, "gen_throughput": 70.0}
    clock = Clock()
    async with asked("sglang", ranks=[first]) as (server, session):
        meter = LoadMeter(server.settings(), clock)
        assert await meter.read(session) == (RankLoad(1, 2, 0.5, 900),)
        server.ranks = [later]
        clock.now_s += 2.0
        assert await meter.read(session) == (RankLoad(1, 2, 0.5, 900, 8000.0, 70.0),)


def counters(prompt: float, hits: float, decoded: float, computed: float = 0, prefill_s: float = 0) -> dict[str, float]:
    return VLLM | {
        "vllm:prompt_tokens_total": prompt,
        "vllm:prefix_cache_hits_total": hits,
        "vllm:generation_tokens_total": decoded,
        "vllm:request_prefill_kv_computed_tokens_sum": computed,
        "vllm:request_prefill_time_seconds_sum": prefill_s,
    }


async def test_rates_are_moving_averages_of_what_was_done() -> None:
    clock = Clock()
    async with asked("vllm", ranks=[counters(0, 0, 0)]) as (server, session):
        meter = LoadMeter(server.settings(), clock)
        rates = []
        # Cached tokens are not computed; a fast single request says more than a second that was mostly idle; idle
        # time and a restart change nothing.
        for values in (
            counters(0, 0, 0),
            counters(3000, 1000, 100),
            counters(4000, 1000, 100, 1000, 0.2),
            counters(4000, 1000, 100, 1000, 0.2),
            counters(10, 0, 1),
        ):
            server.ranks = [values]
            (load,) = await meter.read(session)
            rates.append((load.prefill_tokens_per_s, load.decode_tokens_per_s))
            clock.now_s += 1.0
    expected = [(0.0, 0.0), (2000.0, 100.0), (2900.0, 100.0), (2900.0, 100.0), (2900.0, 100.0)]
    assert rates == [pytest.approx(each) for each in expected]


async def test_a_server_that_is_mostly_idle_is_no_slower_for_it() -> None:
    """A decode rate of what was wanted in place of what it can would send a prompt away from the server that has it."""
    clock = Clock()

    def shown(decoded: float, steps: float, steps_s: float) -> dict[str, float]:
        latency = "vllm:inter_token_latency_seconds"
        return counters(0, 0, decoded) | {f"{latency}_count": steps, f"{latency}_sum": steps_s}

    async with asked("vllm", ranks=[shown(0, 0, 0)]) as (server, session):
        meter, rates = LoadMeter(server.settings(), clock), []
        # One answer of four tokens; one of one token, which says nothing; 16 sequences at a time.
        for values in (shown(0, 0, 0), shown(4, 3, 0.03), shown(5, 3, 0.03), shown(405, 378, 3.78)):
            server.ranks = [values]
            rates.append((await meter.read(session))[0].decode_tokens_per_s)
            clock.now_s += 1.0
    assert rates == [pytest.approx(rate) for rate in (0.0, 100.0, 100.0, 190.0)]


async def test_a_server_that_shows_nothing_has_no_load() -> None:
    async with asked("sglang", answers={"/v1/loads": 404, "/metrics": 404}) as (server, session):
        assert await LoadMeter(server.settings()).read(session) == ()


async def test_a_server_that_fails_is_an_error_and_not_alive() -> None:
    async with asked("vllm", answers={"/metrics": 500, "/health": 503}) as (server, session):
        with pytest.raises(ServerError, match="GET /metrics answered HTTP 500"):
            await LoadMeter(server.settings()).read(session)
        assert not await is_alive(session, server.settings())
        del server.answers["/health"]
        assert await is_alive(session, server.settings())


@pytest.mark.parametrize("text", ["a{b=", "a{", 'a{x="1"} y', "a 1 2 3 4", "\x00a 1", 'a{x="1\n"} 1'])
def test_what_is_no_metric_is_nothing(text: Any) -> None:
    assert parse(text.encode(), ("a",)) in ({}, {"a": [({}, 1.0)]})
