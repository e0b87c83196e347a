"""What the routing replay's figures are made of, by hand; the tables themselves need traces and minutes."""

from __future__ import annotations

import math

import pytest

from tests.bench.routing_replay import Gateway, busy_stretch, fleet, hit_rate, size_for
from tests.bench.routing_rules import RULES, Lines, Pool
from tests.bench.traces import Request, Trace
from tests.bench.virtual_engines import Arrivals, Cache, ClosedLoop, prefill_s, replay


def trace_of(*requests: tuple[float, list[int], int, str], block_tokens: int = 100) -> Trace:
    made = [
        Request(arrived_s, len(blocks) * block_tokens, output, blocks, session, think_s=2.0)
        for arrived_s, blocks, output, session in requests
    ]
    return Trace("made up", block_tokens, 40, made)


def test_what_is_cached_is_not_prefilled_and_attention_grows_with_what_is_before() -> None:
    assert prefill_s(1000, 0) == pytest.approx(0.1 + 1e-9 * 1000 * 500)
    assert prefill_s(1000, 900) == pytest.approx(0.01 + 1e-9 * 100 * 950)


def test_a_cache_gives_up_the_end_of_what_was_used_longest_ago() -> None:
    cache = Cache(4)
    cache.use([1, 2, 3])
    cache.use([1, 8])
    assert (cache.match([1, 2, 3]), cache.match([1, 8])) == (3, 2)
    cache.use([1, 8, 9])
    assert (cache.match([1, 2, 3]), cache.match([1, 8, 9])) == (2, 3)
    cache.use([11, 12, 13, 14, 15])
    assert cache.match([11, 12, 13, 14, 15]) == 4


def test_one_engine_serves_in_order_and_the_second_turn_finds_the_first() -> None:
    trace = trace_of((0.0, [0, 1], 1000, ""), (0.5, [0, 1, 2], 0, ""))
    servers = fleet(trace, 1, 1.0)
    figures = replay(Arrivals(trace, 1.0), servers, Lines(servers, RULES["least work"]))
    first_s, own_s = prefill_s(200, 0), prefill_s(300, 200)
    assert figures.first_token_s == pytest.approx([first_s, first_s + 1.0 - 0.5 + own_s])
    assert (figures.hit_tokens, figures.prompt_tokens) == (200, 500)
    assert figures.span_s == pytest.approx(first_s + 1.0 + own_s)


def test_in_a_closed_loop_who_has_an_answer_thinks_before_the_next_question() -> None:
    trace = trace_of((0.0, [0], 1000, "a"), (0.0, [1], 0, "b"), (0.0, [0, 2], 0, "a"))
    servers = fleet(trace, 1, 1.0)
    figures = replay(ClosedLoop(trace, 1, math.inf), servers, Lines(servers, RULES["least work"]))
    assert figures.first_token_s == pytest.approx([prefill_s(100, 0), prefill_s(200, 100), prefill_s(100, 0)])
    assert figures.span_s == pytest.approx(sum(figures.first_token_s) + 1.0 + 2.0)


@pytest.mark.parametrize("name", [*RULES, "the gateway", "pool"])
def test_whatever_the_rule_everybody_is_served_once(name: str) -> None:
    trace = trace_of(*((0.1 * number, [number % 3, 10 + number % 7, 20 + number], 50, "") for number in range(20)))
    servers = fleet(trace, 3, 0.5, one_cache=name == "pool")
    policy = Pool(servers) if name == "pool" else Lines(servers, RULES[name]) if name in RULES else Gateway(servers)
    figures = replay(Arrivals(trace, 0.1), servers, policy)
    assert len(figures.first_token_s) == 20
    assert figures.prompt_tokens == 20 * 300
    assert figures.imbalance >= 1.0


def test_the_load_is_what_keeps_round_robin_busy() -> None:
    trace = trace_of(*((0.1 * number, [number], 100, "") for number in range(40)))
    stretch = busy_stretch(trace, 2, 1.0)
    cost_s = prefill_s(100, 0) + 0.1
    assert stretch * 3.9 == pytest.approx(40 * cost_s / 2 / 0.9)


def test_the_size_is_the_least_at_which_one_cache_finds_so_much() -> None:
    trace = trace_of(*((float(number), [number % 10], 1, "") for number in range(40)))  # needs 10 of 40 blocks
    assert hit_rate(trace, 0.249) < 1.0 < 74.0 < hit_rate(trace, 0.25)
    assert size_for(trace, 70.0) == 0.25
    assert size_for(trace, 80.0) is None
