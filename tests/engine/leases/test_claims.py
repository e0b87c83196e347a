"""Breakpoints of sequences: what becomes of them in the scheduler, and what the sequences are told."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import MAX_BREAKPOINTS
from tests.fakes.scheduler_bench import SIZE, Bench, digests_of, expected, make, prompt


def figures(bench: Bench, seq: int) -> tuple[int | None, int | None, int | None]:
    """Read, written, degraded: as the first update of a sequence says; no later one says anything."""
    first, *others = bench.of(seq)
    for update in others:
        assert (update.lease_read_tokens, update.lease_write_tokens, update.leases_degraded) == (None, None, None)
    return first.lease_read_tokens, first.lease_write_tokens, first.leases_degraded


def flood(bench: Bench, seq: int = 1000) -> None:
    """A request that wants every block it can get without anybody else's loss."""
    bench.scheduler.leases.expire(bench.now)
    length = (bench.pool.available - 2) * SIZE
    bench.submit(seq, [7, 7, 7, *prompt(length - 3, seq)], max_tokens=1)
    bench.finish()


def run(bench: Bench, seq: int, tokens: list[int], *breakpoints: tuple[int, float], **more: Any) -> None:
    bench.submit(seq, tokens, breakpoints=breakpoints, **more)
    bench.finish()


# -- what is told -----------------------------------------------------------------------------------------------------


def test_a_prefix_is_written_once_and_read_to_the_token() -> None:
    bench = make()
    run(bench, 1, prompt(50), (42, 60.0))
    run(bench, 2, [*prompt(42), 1, 2, 3], (42, 60.0))
    run(bench, 3, [*prompt(42), 9, 9, 9])
    run(bench, 4, [*prompt(41), 8, 9, 9])
    assert [figures(bench, seq) for seq in (1, 2, 3, 4)] == [(0, 42, 0), (42, 0, 0), (42, 0, 0), (None, None, None)]
    assert [bench.of(seq)[0].cached_tokens for seq in (2, 3, 4)] == [40, 40, 40]


def test_sequences_without_breakpoints_or_leases_are_told_nothing() -> None:
    bench = make()
    run(bench, 1, prompt(50))
    run(bench, 2, prompt(50))
    assert [figures(bench, seq) for seq in (1, 2)] == [(None, None, None)] * 2


def test_what_is_written_counts_from_what_was_read() -> None:
    bench = make(num_blocks=200)
    run(bench, 1, prompt(50), (22, 60.0), (42, 60.0))
    run(bench, 2, [*prompt(50), *prompt(30, 1)], (42, 60.0), (75, 60.0))
    run(bench, 3, [*prompt(22), *prompt(30, 3)], (50, 60.0))
    assert [figures(bench, seq) for seq in (1, 2, 3)] == [(0, 42, 0), (42, 33, 0), (22, 28, 0)]


def test_a_prefix_that_was_cached_without_a_lease_is_written_not_read() -> None:
    bench = make()
    run(bench, 1, prompt(50))
    run(bench, 2, prompt(50), (40, 60.0))
    assert (figures(bench, 2), bench.of(2)[0].cached_tokens) == ((0, 40, 0), 44)


@pytest.mark.parametrize("length", range(1, 30))
def test_the_whole_prompt_can_be_kept_and_read_although_its_tail_is_computed_again(length: int) -> None:
    bench = make()
    for seq in (1, 2):
        run(bench, seq, prompt(length), (length, 60.0))
    assert [figures(bench, seq) for seq in (1, 2)] == [(0, length, 0), (length, 0, 0)]
    assert bench.scheduler.leases.num_blocks() == length // SIZE


def test_breakpoints_come_in_any_order_and_the_last_one_counts() -> None:
    bench = make()
    run(bench, 1, prompt(50), (42, 60.0), (10, 90.0), (30, 60.0))
    assert figures(bench, 1) == (0, 42, 0)
    assert len(bench.scheduler.leases) == 3


def test_a_breakpoint_is_granted_before_the_whole_prompt_is_computed() -> None:
    bench = make(step_tokens=16)
    bench.submit(1, prompt(60), breakpoints=((20, 60.0), (50, 60.0)))
    for kept in (0, 5, 12):
        bench.step()
        assert bench.scheduler.leases.num_blocks() == kept
    assert bench.scheduler.load().leased_blocks == 12


def test_what_was_granted_stays_when_the_sequence_is_aborted() -> None:
    bench = make(step_tokens=16)
    bench.submit(1, prompt(60), breakpoints=((20, 60.0), (50, 60.0)))
    bench.step()
    bench.step()
    bench.scheduler.abort("g", 1)
    assert len(bench.scheduler.claims) == 0
    run(bench, 2, prompt(60))
    assert figures(bench, 2) == (20, 0, 0)


def test_a_prefix_behind_a_collision_is_not_kept_and_that_is_told() -> None:
    bench = make()
    run(bench, 1, prompt(40))
    run(bench, 2, prompt(40, 1), (20, 60.0), (30, 60.0), digests=digests_of(prompt(40)))
    assert figures(bench, 2) == (0, 0, 2)
    assert bench.scheduler.leases.num_blocks() == 0


def test_a_preempted_sequence_is_told_what_it_read_at_first() -> None:
    bench = make(max_sequences=1, step_tokens=16)
    run(bench, 1, prompt(40), (30, 600.0))
    bench.submit(2, [*prompt(40), *prompt(40, 5)], lane="batch", breakpoints=((60, 600.0),))
    bench.step()
    bench.submit(3, prompt(10, 3))
    bench.finish()
    assert bench.scheduler.counters.preemptions == 1
    assert figures(bench, 2) == (30, 30, 0)
    assert bench.scheduler.leases.counters.read_tokens == 30


# -- how long ---------------------------------------------------------------------------------------------------------


def test_a_lease_lasts_from_the_arrival_of_the_last_request_that_used_it() -> None:
    bench = make()
    bench.submit(1, prompt(50), breakpoints=((40, 60.0),))
    arrived = bench.now
    bench.finish()
    assert bench.scheduler.leases.next_end_s() == pytest.approx(arrived + 60.0)
    bench.now = 50.0
    run(bench, 2, prompt(50))
    bench.now = 100.0
    flood(bench)
    run(bench, 3, prompt(50))
    assert figures(bench, 3) == (40, 0, 0)
    bench.now = 170.0
    flood(bench, 1001)
    run(bench, 4, prompt(50))
    assert figures(bench, 4) == (None, None, None)
    assert (bench.of(4)[0].cached_tokens or 0) < 40


def test_who_arrives_in_time_finds_the_lease_however_long_it_waits() -> None:
    bench = make(max_sequences=1)
    run(bench, 1, prompt(50), (40, 60.0))
    bench.submit(2, prompt(8, 1), max_tokens=50)
    bench.step()
    bench.now = 59.0
    bench.submit(3, prompt(50))
    bench.now = 100.0
    bench.finish()
    assert figures(bench, 3) == (40, 0, 0)


def test_requests_that_wait_for_the_one_that_computes_their_prefix_read_its_lease() -> None:
    bench = make(num_blocks=200)
    for seq in range(5):
        bench.submit(seq, [*prompt(48), *prompt(9, seq)], breakpoints=((46, 60.0),))
    bench.finish()
    assert [figures(bench, seq) for seq in range(5)] == [(0, 46, 0)] + [(46, 0, 0)] * 4
    assert (len(bench.scheduler.leases), bench.scheduler.leases.counters.renewed) == (1, 4)


# -- budgets and room -------------------------------------------------------------------------------------------------


def test_a_request_is_told_which_of_its_breakpoints_there_is_no_room_for() -> None:
    bench = make(num_blocks=40, lease_tenant_share=0.25)
    run(bench, 1, prompt(60), (20, 60.0), (40, 60.0), (60, 60.0))
    assert figures(bench, 1) == (0, 40, 1)
    assert bench.scheduler.load().leased_blocks == 10
    assert bench.scheduler.leases.stats()["degraded"] == 1


def test_a_degraded_lease_that_is_used_again_is_kept_again() -> None:
    bench = make(num_blocks=40)
    run(bench, 1, prompt(40), (40, 1000.0))
    bench.now = 100.0
    run(bench, 2, prompt(20, 1), (20, 60.0))
    bench.now = 200.0
    flood(bench)
    assert bench.scheduler.leases.num_blocks() == 0
    run(bench, 3, prompt(44))
    assert figures(bench, 3) == (None, None, None)  # it was evicted: nothing is read
    assert bench.scheduler.leases.num_blocks() == 10
    run(bench, 4, prompt(44))
    assert figures(bench, 4) == (40, 0, 0)


@pytest.mark.parametrize("lane", ["online", "batch"])
def test_the_largest_request_that_fits_the_pool_runs_whatever_is_leased(lane: str) -> None:
    bench = make(num_blocks=20, context_tokens=80, lease_share=1.0, lease_tenant_share=1.0)
    run(bench, 1, prompt(36), (36, 1e4))
    run(bench, 2, prompt(36, 1), (36, 1e4))
    assert bench.scheduler.leases.num_blocks() == 18
    run(bench, 3, prompt(40, 2), max_tokens=40, lane=lane)
    assert bench.answer(3) == expected(prompt(40, 2), 40)
    assert bench.scheduler.leases.counters.degraded == 2


def test_a_sequence_that_grows_takes_the_blocks_of_the_least_valuable_lease_alone() -> None:
    bench = make(num_blocks=20, context_tokens=80, lease_share=1.0, lease_tenant_share=1.0)
    run(bench, 1, prompt(24), (24, 100.0))
    bench.now = 50.0
    run(bench, 2, prompt(24, 1), (24, 100.0))
    run(bench, 3, prompt(20, 2), max_tokens=30)
    assert bench.answer(3) == expected(prompt(20, 2), 30)
    assert bench.scheduler.counters.preemptions == 0
    leases = bench.scheduler.leases
    assert (leases.num_blocks(), leases.counters.degraded) == (6, 1)
    run(bench, 4, prompt(30, 1))
    assert figures(bench, 4) == (24, 0, 0)


def test_leases_do_not_give_way_while_somebody_else_will_end() -> None:
    bench = make(num_blocks=24, context_tokens=80, lease_share=0.5, lease_tenant_share=0.5)
    run(bench, 1, prompt(40), (40, 1e4))
    for seq in (2, 3, 4):
        bench.submit(seq, prompt(24, seq), max_tokens=4)
    bench.finish()
    assert bench.scheduler.leases.num_blocks() == 10
    assert bench.scheduler.leases.counters.degraded == 0


def test_a_poisoned_prefix_is_not_leased_any_more() -> None:
    bench = make()
    run(bench, 1, prompt(40), (16, 100.0), (40, 100.0))
    bench.submit(2, prompt(40))
    bench.runner.poisoned.add(("g", 2))
    bench.runner.all_bad = True
    bench.finish()
    assert (bench.scheduler.leases.num_blocks(), bench.scheduler.leases.counters.lost) == (0, 2)
    run(bench, 3, prompt(40))
    assert (bench.of(3)[0].cached_tokens, bench.scheduler.leases.num_blocks()) == (0, 10)


# -- without the cache ------------------------------------------------------------------------------------------------


def test_a_request_that_does_without_the_cache_reuses_leaves_and_keeps_nothing() -> None:
    bench = make()
    run(bench, 1, prompt(40), (40, 100.0))
    ends = bench.scheduler.leases.next_end_s()
    run(bench, 2, [*prompt(40), *prompt(20, 1)], (50, 100.0), use_cache=False)
    assert (figures(bench, 2), bench.of(2)[0].cached_tokens) == ((0, 0, 0), 0)
    assert bench.answer(2) == expected([*prompt(40), *prompt(20, 1)])
    assert (bench.pool.num_cached, bench.scheduler.leases.counters.renewed) == (10, 0)
    bench.scheduler.leases.expire(100.0)
    assert bench.scheduler.leases.next_end_s() == ends


def test_requests_without_the_cache_do_not_wait_for_each_other() -> None:
    bench = make(num_blocks=200, step_tokens=128)
    for seq in range(3):
        bench.submit(seq, prompt(30), use_cache=False)
    bench.step()
    assert len(bench.runner.steps[0]) == 3
    bench.finish()
    assert bench.scheduler.counters.shared_waits == 0
    assert bench.pool.num_cached == 0


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breakpoints", "reason"),
    [
        (((51, 60.0),), "a breakpoint is at token 51; it must be between 1 and the prompt's 50"),
        (((0, 60.0),), "a breakpoint is at token 0"),
        (((20, 60.0), (-4, 60.0)), "a breakpoint is at token -4"),
        (((20, 0.0),), "time to live is 0.0 s; it must be a number above 0"),
        (((20, float("nan")),), "time to live is nan s"),
        (((20, float("inf")),), "time to live is inf s"),
        (((20, 43201.0),), "time to live is 43201 s; the most is 43200 s (engine.lease_max_s)"),
        (((20, 60.0),) * (MAX_BREAKPOINTS + 1), "the prompt has 65 breakpoints; it may have 64"),
    ],
)
def test_breakpoints_that_cannot_be_granted_are_refused_with_the_reason(
    breakpoints: tuple[tuple[int, float], ...], reason: str
) -> None:
    bench = make()
    assert bench.submit(1, prompt(50), breakpoints=breakpoints) is None
    (update,) = bench.of(1)
    assert update.finish == "error"
    assert reason in (update.error or "")


# -- sharing in flight ------------------------------------------------------------------------------------------------


def test_64_requests_that_share_a_prefix_nobody_has_computed_compute_it_once() -> None:
    bench = make(num_blocks=1500, context_tokens=3000, step_tokens=512, max_sequences=64)
    for seq in range(64):
        bench.submit(seq, [*prompt(2048), seq % 50, seq // 50, *prompt(14, seq)], max_tokens=2)
    bench.finish()
    counters = bench.scheduler.counters
    assert counters.prefilled_tokens == 2048 + 64 * 16
    assert counters.shared_tokens == counters.cached_tokens == 63 * 2048
    assert all(bench.of(seq)[0].finish is None for seq in range(64))


def test_only_what_was_computed_while_one_waited_counts_as_shared_in_flight() -> None:
    bench = make(step_tokens=16)
    run(bench, 1, prompt(32))
    for seq in (2, 3):
        bench.submit(seq, [*prompt(32), *prompt(32, 5), seq, 1, 2, 3])
    bench.finish()
    run(bench, 4, prompt(32))
    assert bench.of(3)[0].cached_tokens == 64
    assert bench.scheduler.counters.shared_tokens == 32


# -- anything, in any order -------------------------------------------------------------------------------------------


def test_all_leases_that_a_marked_prompt_begins_with_are_told_longest_first() -> None:
    bench = make(num_blocks=200)
    run(bench, 1, prompt(50), (22, 60.0), (42, 60.0))
    run(bench, 2, [*prompt(50), *prompt(30, 1)], (60, 60.0))
    run(bench, 3, [*prompt(42), 1, 2, 3], (42, 60.0))
    run(bench, 4, prompt(50))
    assert [bench.of(seq)[0].lease_reads for seq in (1, 2, 3, 4)] == [None, [42, 22], [42, 22], None]
    assert bench.of(4)[0].lease_read_tokens == 42, "who marks nothing is told of the longest alone"
