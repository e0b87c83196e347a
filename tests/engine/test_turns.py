"""Tenants take turns in the prefills of a queue. Counted in steps."""

from __future__ import annotations

from collections import Counter

from engine.planner import LEAST_TOKENS
from tests.fakes.scheduler_bench import STEP_S, Bench, expected, make, prompt


def steps_until(bench: Bench, seq: int, limit: int = 400) -> int:
    """Steps until the first token of a sequence."""
    for number in range(1, limit):
        bench.step()
        if bench.answer(seq):
            return number
    raise AssertionError(f"no token in {limit} steps")


def test_a_short_prompt_is_in_the_next_step_whatever_another_tenant_sent_before() -> None:
    bench = make(num_blocks=4000, context_tokens=4000, max_sequences=64)
    for seq in range(1, 65):
        bench.submit(seq, prompt(800, seq), tenant="much", use_cache=False, max_tokens=1)
    for _ in range(3):
        bench.step()
    for seq in range(100, 105):
        bench.submit(seq, prompt(20, seq), tenant="little", max_tokens=3)
        assert steps_until(bench, seq) == 1
    for seq in range(200, 203):  # several at a time, and more than a step
        bench.submit(seq, prompt(60, seq), tenant="little", max_tokens=3)
    assert steps_until(bench, 202) <= 2 * 3 * 60 // 64 + 1
    bench.finish()
    assert len(bench.answer(64)) == 1


def test_tenants_with_long_prompts_share_the_steps_and_each_is_served_in_order() -> None:
    bench = make(num_blocks=4000, context_tokens=4000, step_tokens=64)
    tenants = {seq: "abc"[seq // 100] for seq in (*range(8), *range(100, 104), *range(200, 202))}
    for seq, tenant in tenants.items():
        bench.submit(seq, prompt(320, seq), tenant=tenant, use_cache=False, max_tokens=1)
    while not all(bench.answer(seq) for seq in (200, 201)):
        bench.step()
    computed = Counter(dict.fromkeys("abc", 0))
    for step in bench.runner.steps:
        for seq, _, count, _ in step:
            computed[tenants[seq]] += count
    assert max(computed.values()) - min(computed.values()) <= 64
    bench.finish()
    ends = [seq for step in bench.runner.steps for seq, _, _, samples in step if samples]
    assert [[seq for seq in ends if tenants[seq] == tenant] for tenant in "abc"] == [
        [seq for seq in tenants if tenants[seq] == tenant] for tenant in "abc"
    ]


def test_a_tenant_without_room_for_its_next_prompt_is_not_in_the_way_of_one_that_holds_less() -> None:
    bench = make(num_blocks=40)
    bench.submit(1, prompt(80), tenant="much", max_tokens=40)
    bench.step()
    bench.submit(2, prompt(80, 1), tenant="much", max_tokens=4)  # waits until the first has ended
    for seq in range(3, 6):
        bench.submit(seq, prompt(8, seq), tenant="little", max_tokens=4)
        assert steps_until(bench, seq) == 1
    bench.finish()
    assert bench.answer(2) == expected(prompt(80, 1))


def test_a_large_prompt_is_not_passed_for_ever_by_small_ones_of_other_tenants() -> None:
    bench = make(num_blocks=40)
    bench.submit(1, prompt(40), tenant="small", max_tokens=8)
    bench.step()
    bench.submit(2, prompt(130, 1), tenant="large", max_tokens=4)  # nearly the whole pool
    for seq in range(3, 60):
        bench.submit(seq, prompt(40, seq), tenant="small", max_tokens=8)
    assert steps_until(bench, 2) <= 20
    bench.finish()


def prefilled(bench: Bench) -> list[int]:
    """Of each step, the tokens that it prefilled."""
    return [sum(count for _, _, count, _ in step if count > 1) for step in bench.runner.steps]


def make_large() -> Bench:
    """Whose steps are cut to a fourth while others wait."""
    bench = make(num_blocks=8000, context_tokens=4000, step_tokens=1024, max_sequences=64, step_ms=STEP_S / 4 * 1000)
    bench.takes_s = lambda step: STEP_S * step.num_rows / 1024
    return bench


def test_a_step_prefills_less_while_several_tenants_are_in_the_online_queue() -> None:
    bench = make_large()
    for seq in range(1, 5):
        bench.submit(seq, prompt(2000, seq), tenant="much", use_cache=False, max_tokens=1)
    bench.step()
    assert prefilled(bench)[-1] == 1024  # alone
    bench.submit(100, prompt(20, 1), tenant="little", max_tokens=3)
    assert steps_until(bench, 100) == 1
    while len(bench.answer(100)) < 3:
        bench.step()
    shared = prefilled(bench)[1:]
    assert len(shared) == 3  # a step for each token
    assert LEAST_TOKENS < max(shared) <= 256
    assert sum(shared) > 2 * 128
    bench.step()
    assert prefilled(bench)[-1] > 700  # alone again
    bench.finish()


def test_prompts_of_one_tenant_keep_the_whole_step() -> None:
    bench = make_large()
    for seq in range(2, 6):
        bench.submit(seq, prompt(2000, seq), tenant="much", use_cache=False, max_tokens=1)
    for _ in range(3):
        bench.step()
        assert prefilled(bench)[-1] == 1024
    bench.finish()


def test_a_short_prompt_passes_long_ones_of_its_tenant_and_none_is_passed_for_ever() -> None:
    bench = make_large()
    bench.takes_s = lambda step: 0.5 * step.num_rows / 1024
    for seq in range(1, 4):
        bench.submit(seq, prompt(3000, seq), use_cache=False, max_tokens=1)
    bench.step()
    bench.submit(10, prompt(20), max_tokens=1)
    assert steps_until(bench, 10) == 1
    short = 100
    while not bench.answer(3):
        short += 1
        bench.submit(short, prompt(900, short), use_cache=False, max_tokens=1)
        bench.now += 0.5
        bench.step()
    assert 102 < short < 115  # 3 * 3000 tokens, and those of short ones that came at the same time
    assert bench.answer(101)
    bench.finish()


def test_tenants_of_the_batch_queue_do_not_make_the_steps_of_an_online_tenant_smaller() -> None:
    bench = make_large()
    for seq, tenant in enumerate("abc"):
        bench.submit(seq, prompt(20, seq), tenant=tenant, lane="batch", max_tokens=50)
    bench.step()
    bench.submit(9, prompt(2000, 9), tenant="much", max_tokens=1)
    bench.step()
    assert prefilled(bench)[-1] == 1024
    bench.finish()


def test_many_tenants_with_short_prompts_do_not_starve_one_with_a_long_prompt() -> None:
    bench = make_large()
    bench.submit(1, prompt(2000), tenant="long", max_tokens=1)
    bench.step()
    for seq in range(2, 202):
        bench.submit(seq, prompt(100, seq), tenant=f"short{seq % 7}", max_tokens=2, use_cache=False)
    # Each of the others may have as many tokens before it as it, in steps of two short prompts.
    assert steps_until(bench, 1) <= 7 * (2000 + 264) // 200 + 8
    bench.finish()
