"""What the batch lane gets of the steps, and when it is not in one."""

from __future__ import annotations

from array import array
from itertools import pairwise

from engine.planner import BATCH_TURN_STEPS
from tests.fakes.scheduler_bench import Bench, expected, make, prompt


def seqs(bench: Bench) -> list[set[int]]:
    """Whose tokens were computed in each step."""
    return [{seq for seq, *_ in step} for step in bench.runner.steps]


def test_the_batch_lane_leaves_the_step_while_the_online_lane_prefills() -> None:
    bench = make(num_blocks=300, step_tokens=32)
    bench.submit(1, prompt(20), lane="batch", max_tokens=40)
    bench.submit(2, prompt(150, 1), lane="batch", max_tokens=4)
    bench.step()
    bench.step()
    bench.submit(3, prompt(90, 2), max_tokens=10)
    bench.runner.steps.clear()
    while not bench.answer(3):
        bench.step()
    assert seqs(bench) == [{3}] * 3
    bench.step()
    assert seqs(bench)[-1] == {1, 2, 3}
    bench.finish()
    assert [len(bench.answer(seq)) for seq in (1, 2, 3)] == [40, 4, 10]


def test_decodes_of_the_batch_lane_get_a_turn_while_the_online_lane_prefills_without_end() -> None:
    bench = make(num_blocks=1000, step_tokens=33, context_tokens=4000)
    bench.submit(1, prompt(10), lane="batch", max_tokens=12)
    bench.step()
    for seq in range(2, 40):
        bench.submit(seq, prompt(100, seq), max_tokens=1)
    while not bench.of(1)[-1].finish:
        assert bench.step()
    with_batch = [number for number, step in enumerate(seqs(bench)) if 1 in step]
    turns = [later - earlier for earlier, later in pairwise(with_batch)]
    assert turns == [BATCH_TURN_STEPS + 1] + [BATCH_TURN_STEPS] * 10
    bench.finish()
    assert bench.answer(1) == expected(prompt(10), 12)


def test_what_prefills_for_the_online_lane_is_not_given_up_with_the_batch_lane_in_it() -> None:
    bench = make(num_blocks=1000, step_tokens=33, context_tokens=4000)
    bench.submit(1, prompt(10), lane="batch", max_tokens=12)
    bench.step()
    for seq in range(2, 40):
        bench.submit(seq, prompt(100, seq), max_tokens=1)
    together = 0
    while bench.scheduler.load().prefill_backlog:
        bench.gives_up = True
        assert bench.step()
        together += 1 in seqs(bench)[-1] and len(seqs(bench)[-1]) > 1
    assert together > 3
    assert bench.scheduler.counters.steps_given_up == 0


def test_prefills_of_the_batch_lane_are_cut_small() -> None:
    bench = make(num_blocks=300, step_tokens=256, batch_step_tokens=32)
    bench.submit(1, prompt(100), lane="batch", max_tokens=1)
    bench.submit(2, prompt(100, 1), lane="batch", max_tokens=1)
    bench.finish()
    assert max(sum(count for _, _, count, _ in step) for step in bench.runner.steps) <= 32
    bench.submit(3, prompt(100, 2), max_tokens=1)
    bench.runner.steps.clear()
    bench.finish()
    assert bench.runner.steps == [[(3, 0, 100, True)]]


def test_what_a_preempted_batch_sequence_leased_is_kept_and_read_by_it_again() -> None:
    bench = make(num_blocks=22, lease_tenant_share=1.0)
    batch = bench.submit(1, prompt(32), lane="batch", max_tokens=20, breakpoints=((32, 100.0),), tenant="t")
    assert batch is not None
    for _ in range(3):
        bench.step()
    bench.submit(2, prompt(50, 1), max_tokens=4)  # does not fit beside it
    bench.step()
    assert (bench.scheduler.counters.preemptions, batch.block_table) == (1, array("i"))
    while not bench.of(2)[-1].finish:
        bench.step()
    bench.runner.steps.clear()
    bench.finish()
    assert bench.runner.steps[0][0][:2] == (1, 28)  # goes on behind what the lease kept, but for four tokens at least
    assert bench.answer(1) == expected(prompt(32), 20)
    (lease,) = bench.scheduler.leases
    assert (lease.state, lease.tokens) == ("kept", 32)
