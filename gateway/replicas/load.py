"""How busy the ranks of a server are, read once a second: /metrics, or /v1/loads of a SGLang.

Knows the metrics' names, and makes rates of the counters. Its neighbour servers.py asks the rest at join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import ReplicaSettings
from gateway.replicas.base import Kind
from gateway.replicas.calls import Caller, ServerError, mapping, number, whole

LOAD_TIMEOUT_S: Final = 5.0
ALIVE_TIMEOUT_S: Final = 2.0
MAX_RANKS: Final = 1024
LEAST_TOKENS: Final = 64
"""Prefilled in an interval that says something of the speed."""

NEWEST: Final = 0.3
"""Weight of the newest interval in a moving average."""

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]
"""Metric -> labels and value of each of its samples."""

METRICS: Final[Mapping[Kind, str]] = {"vllm": "metrics", "sglang": "metrics", "tensorrt-llm": "prometheus/metrics"}
RANK: Final[Mapping[Kind, str]] = {"vllm": "engine", "sglang": "dp_rank", "tensorrt-llm": "rank"}
"""The label that has the rank."""

_NAMES: Final[Mapping[Kind, Mapping[str, str]]] = {  # of several the first that is there; others are of older versions
    "vllm": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "used": "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc",  # 0..1
        "prompt": "vllm:prompt_tokens_total",
        "cached": "vllm:prefix_cache_hits_total",
        "decoded": "vllm:generation_tokens_total",
        "prefilled": "vllm:request_prefill_kv_computed_tokens_sum",  # of finished requests, as the next
        "prefill_s": "vllm:request_prefill_time_seconds_sum",
        # Of all sequences.
        "steps": "vllm:inter_token_latency_seconds_count vllm:time_per_output_token_seconds_count",
        "steps_s": "vllm:inter_token_latency_seconds_sum vllm:time_per_output_token_seconds_sum",
    },
    "sglang": {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "used": "sglang:token_usage",
        "prompt": "sglang:prompt_tokens_total",
        "cached": "sglang:cached_tokens_total",
        "decoded": "sglang:generation_tokens_total",
        "steps": "sglang:inter_token_latency_seconds_count",
        "steps_s": "sglang:inter_token_latency_seconds_sum",
    },
    "tensorrt-llm": {
        "running": "trtllm_num_requests_running",
        "waiting": "trtllm_num_requests_waiting",
        "used": "trtllm_kv_cache_utilization",
        "prompt": "trtllm_prompt_tokens_total",
        "cached": "trtllm_prompt_cached_tokens_total",
        "decoded": "trtllm_generation_tokens_total",
    },
}


class RankLoad(NamedTuple):
    """How busy one data-parallel rank is."""

    running: int
    waiting: int
    kv_used: float  # share of its blocks, 0..1
    waiting_tokens: int | None = None  # uncached ones of requests that wait; None where it does not say
    prefill_tokens_per_s: float = 0.0  # moving averages while it works; 0 before anything was measured
    decode_tokens_per_s: float = 0.0


class _Done(NamedTuple):
    """Counters of one rank since it started."""

    prefilled: float  # prompt tokens that were computed
    decoded: float
    timed: float  # prompt tokens that were computed in prefill_s, the requests' times added up
    prefill_s: float
    steps: float  # after the first token, of all sequences; `decoded` where it does not say
    steps_s: float  # of sequences, their times added up; 0 where it does not say


class LoadMeter:
    """Reads the load of all ranks of one server. Rates are of what was done between two readings."""

    def __init__(self, settings: ReplicaSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._done: list[_Done] = []
        self._read_s = 0.0
        self._rates: dict[tuple[int, str], float] = {}

    async def read(self, session: aiohttp.ClientSession) -> tuple[RankLoad, ...]:
        """Of each rank; empty where the server shows nothing (SGLang before 0.5.9 without --enable-metrics). Raises
        ServerError."""
        caller, kind = Caller(session, self._settings), self._settings.kind
        if kind == "sglang":
            loads = mapping(await caller.ask("v1/loads?include=core", LOAD_TIMEOUT_S, optional=True)).get("loads")
            if isinstance(loads, list):
                return self._measured([_from_load(mapping(one)) for one in loads[:MAX_RANKS]])
        lines = tuple(f"{metric}{end}" for names in _NAMES[kind].values() for metric in names.split() for end in "{ ")
        text = await caller.fetch(METRICS[kind], LOAD_TIMEOUT_S, optional=True)
        return self._measured(_from_metrics(kind, parse(text, lines)))

    def _measured(self, ranks: list[tuple[RankLoad, _Done]]) -> tuple[RankLoad, ...]:
        now_s, before = self._clock(), self._done if len(self._done) == len(ranks) else []
        for rank, (then, (_, now)) in enumerate(zip(before, ranks, strict=False)):
            since = _Done(*(late - early for late, early in zip(now, then, strict=True)))
            self._note(rank, now_s - self._read_s, since)
        self._done, self._read_s = [done for _, done in ranks], now_s
        return tuple(
            load._replace(
                prefill_tokens_per_s=self._rates.get((rank, "prefill"), 0.0),
                decode_tokens_per_s=self._rates.get((rank, "decode"), load.decode_tokens_per_s),
            )
            for rank, (load, _) in enumerate(ranks)
        )

    def _note(self, rank: int, passed_s: float, done: _Done) -> None:
        """Tokens per passed second are too few where the server was idle, and those per second of requests where
        several ran at a time: the larger one is nearer to what it can do."""
        if passed_s <= 0 or min(done) < 0:  # counters begin anew with the server
            return
        prefill = done.timed / done.prefill_s if done.prefill_s > 0 else 0.0
        decode = done.steps / done.steps_s if done.steps_s > 0 else 0.0
        for name, enough, measured in (
            ("prefill", done.prefilled >= LEAST_TOKENS, max(prefill, done.prefilled / passed_s)),
            ("decode", done.steps >= 1, max(decode, done.decoded / passed_s)),
        ):
            if enough:
                old = self._rates.get((rank, name), measured)
                self._rates[rank, name] = old + NEWEST * (measured - old)


def _from_load(load: Mapping[str, Any]) -> tuple[RankLoad, _Done]:
    """One rank of /v1/loads, which says the time that prefills took, and the throughput of decode steps."""
    tokens, busy_s = number(load.get("total_prefill_uncached_tokens")), number(load.get("total_prefill_busy_us")) / 1e6
    waiting = load.get("num_waiting_uncached_tokens")
    shown = RankLoad(
        running=whole(load.get("num_running_reqs")),
        waiting=whole(load.get("num_waiting_reqs")),
        kv_used=number(load.get("token_usage")),
        waiting_tokens=None if waiting is None else whole(waiting),
        decode_tokens_per_s=number(load.get("gen_throughput")),
    )
    return shown, _Done(tokens, 0.0, tokens, busy_s, 0.0, 0.0)


def _from_metrics(kind: Kind, metrics: Samples) -> list[tuple[RankLoad, _Done]]:
    def by_rank(name: str) -> dict[int, float]:
        """The sum over all other labels: the model and adapters of one rank."""
        names, sums = _NAMES[kind].get(name, "").split(), dict[int, float]()
        for labels, value in next((metrics[one] for one in names if one in metrics), ()):
            rank = whole(labels.get(RANK[kind]))
            sums[rank] = sums.get(rank, 0.0) + number(value)
        return sums

    running, waiting, used = by_rank("running"), by_rank("waiting"), by_rank("used")
    prompt, cached, decoded = by_rank("prompt"), by_rank("cached"), by_rank("decoded")
    prefilled, prefill_s = by_rank("prefilled"), by_rank("prefill_s")
    steps, steps_s = by_rank("steps"), by_rank("steps_s")
    found = []
    for rank in sorted(running)[:MAX_RANKS]:
        load = RankLoad(whole(running[rank]), whole(waiting.get(rank)), used.get(rank, 0.0))
        computed = max(0.0, prompt.get(rank, 0.0) - cached.get(rank, 0.0))
        tokens = decoded.get(rank, 0.0)
        timed = prefilled.get(rank, 0.0), prefill_s.get(rank, 0.0), steps.get(rank, tokens), steps_s.get(rank, 0.0)
        found.append((load, _Done(computed, tokens, *timed)))
    return found


async def is_alive(session: aiohttp.ClientSession, settings: ReplicaSettings) -> bool:
    """Whether its /health is well. Never raises."""
    try:
        await Caller(session, settings).fetch("health", ALIVE_TIMEOUT_S)
    except ServerError:
        return False
    return True


def parse(text: bytes | None, lines: tuple[str, ...]) -> Samples:
    """Of the lines that begin with one of `lines`. A page has several hundred, of which few are read: only those are
    parsed. Empty for what is no page of metrics."""
    wanted = [line for line in (text or b"").decode("utf-8", "replace").splitlines() if line.startswith(lines)]
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(wanted) + "\n"):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):
        return {}
    return found
