"""The scheduler, step by step, with a model that knows where every key came from."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner import MIN_TAIL_TOKENS
from engine.protocol import DIGEST_BYTES, Sampling, Submit
from engine.sequence import ROW_FAILED, Status
from tests.fakes.oracle_runner import choose_token
from tests.fakes.scheduler_bench import SIZE, VOCAB, digests_of, expected, make, prompt

# -- answers ----------------------------------------------------------------------------------------------------------


def test_one_sequence_runs_to_its_length() -> None:
    bench = make()
    bench.submit(1, prompt(10))
    bench.finish()
    assert bench.answer(1) == expected(prompt(10))
    updates = bench.of(1)
    assert len(updates) == 4
    assert [update.finish for update in updates] == [None, None, None, "length"]
    assert (updates[0].cached_tokens, updates[1].cached_tokens) == (0, None)
    assert updates[0].queue_ms == pytest.approx(10)
    assert updates[0].prefill_ms == pytest.approx(5)
    assert updates[1].queue_ms is None
    assert updates[1].prefill_ms is None


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    answer = expected(prompt(10), 6)
    bench = make()
    bench.submit(1, prompt(10), max_tokens=6, stop_ids=(answer[3],))
    bench.finish()
    first = answer.index(answer[3])
    assert bench.answer(1) == answer[:first]
    assert (bench.of(1)[-1].finish, bench.of(1)[-1].stop_id) == ("stop", answer[3])


def test_a_first_token_that_stops_still_says_what_was_cached() -> None:
    token = choose_token("", prompt(10), VOCAB)
    bench = make(eos_ids=(token,))
    bench.submit(1, prompt(10))
    bench.finish()
    (update,) = bench.of(1)
    assert (update.tokens, update.finish, update.stop_id, update.cached_tokens) == ([], "stop", token, 0)
    assert update.queue_ms is not None
    assert update.prefill_ms is not None


def test_eos_can_be_ignored() -> None:
    token = choose_token("", prompt(10), VOCAB)
    bench = make(eos_ids=(token,))
    bench.submit(1, prompt(10), ignore_eos=True)
    bench.finish()
    assert bench.answer(1) == expected(prompt(10))


def test_no_tokens_compute_the_prompt_and_nothing_more() -> None:
    bench = make()
    for seq in (1, 2):
        bench.submit(seq, prompt(30), max_tokens=0)
        bench.finish()
    updates = [*bench.of(1), *bench.of(2)]
    assert [(update.tokens, update.finish, update.cached_tokens) for update in updates] == [
        ([], "length", 0),
        ([], "length", 24),  # whole blocks, and four tokens at least are computed again
    ]
    assert bench.scheduler.counters.decoded_tokens == 0
    bench.submit(3, prompt(30))
    bench.finish()
    assert bench.answer(3) == expected(prompt(30))
    assert bench.of(3)[0].cached_tokens == 24


def test_many_sequences_get_the_answers_they_get_alone() -> None:
    bench = make(num_blocks=200)
    for seq in range(20):
        bench.submit(seq, prompt(5 + 3 * seq, seq), max_tokens=1 + seq)
    bench.finish()
    for seq in range(20):
        assert bench.answer(seq) == expected(prompt(5 + 3 * seq, seq), 1 + seq)
    assert max(len(step) for step in bench.runner.steps) == 8


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "changes", "reason"),
    [
        (0, {}, "empty"),
        (10, {"max_tokens": -1}, "max_tokens is -1"),
        (
            97,
            {"max_tokens": 4},
            "97 prompt tokens and max_tokens 4 are 101 tokens together; the model's context is 100",
        ),
        (80, {"max_tokens": 1}, "the engine has memory for 80 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(length: int, changes: dict[str, Any], reason: str) -> None:
    bench = make(num_blocks=20, context_tokens=100)
    assert bench.submit(1, prompt(length), **changes) is None
    (update,) = bench.of(1)
    assert update.finish == "error"
    assert reason in (update.error or "")
    assert not bench.step()


def test_what_just_fits_the_pool_runs_to_its_end() -> None:
    bench = make(num_blocks=20, context_tokens=80)
    bench.submit(1, prompt(40), max_tokens=40)
    bench.finish()
    assert bench.answer(1) == expected(prompt(40), 40)


def test_a_cut_token_is_refused() -> None:
    bench = make()
    bench.scheduler.submit("g", Submit(1, b"\1\2\3\4\5", b"", Sampling(4)), 0.0)
    assert "not whole token ids" in (bench.of(1)[0].error or "")


def test_a_number_in_use_is_refused_and_free_again_after_the_end() -> None:
    bench = make()
    bench.submit(1, prompt(10))
    assert bench.submit(1, prompt(10)) is None
    assert bench.submit(1, prompt(10), owner="other") is not None
    bench.finish()
    assert bench.submit(1, prompt(10)) is not None


def test_the_waiting_room_has_a_limit() -> None:
    bench = make(max_waiting=2)
    for seq in range(3):
        bench.submit(seq, prompt(10, seq))
    assert "2 sequences wait" in (bench.of(2)[0].error or "")
    bench.finish()
    assert bench.answer(1) == expected(prompt(10, 1))


# -- reuse ------------------------------------------------------------------------------------------------------------


def test_the_second_request_reuses_the_first_ones_prefix() -> None:
    bench = make()
    bench.submit(1, prompt(40))
    bench.finish()
    bench.submit(2, [*prompt(32), *prompt(10, 3)])
    bench.finish()
    assert bench.of(2)[0].cached_tokens == 32
    assert bench.answer(2) == expected([*prompt(32), *prompt(10, 3)])
    assert bench.scheduler.counters.cached_tokens == 32


def test_the_answer_is_reused_by_the_next_turn_of_the_conversation() -> None:
    bench = make()
    bench.submit(1, prompt(10), max_tokens=13)
    bench.finish()
    turn = [*prompt(10), *bench.answer(1), *prompt(7, 5)]
    bench.submit(2, turn)
    bench.finish()
    assert bench.of(2)[0].cached_tokens == 20  # 22 tokens were computed: the last one sampled was not
    assert bench.answer(2) == expected(turn)


@pytest.mark.parametrize("length", range(1, 30))
def test_a_full_hit_computes_a_tail_of_at_least_four(length: int) -> None:
    bench = make()
    bench.submit(1, prompt(length))
    bench.finish()
    bench.submit(2, prompt(length))
    bench.runner.steps.clear()
    bench.finish()
    cached = max(0, length - MIN_TAIL_TOKENS) // SIZE * SIZE
    assert bench.of(2)[0].cached_tokens == cached
    assert bench.runner.steps[0] == [(2, cached, length - cached, True)]
    assert bench.answer(2) == expected(prompt(length))


def test_another_salt_reuses_nothing() -> None:
    bench = make()
    bench.submit(1, prompt(40), salt="tenant:a")
    bench.finish()
    bench.submit(2, prompt(40), salt="tenant:b")
    bench.submit(3, prompt(40), salt="tenant:b", digests=digests_of(prompt(40), "tenant:a"))
    bench.finish()
    assert [bench.of(seq)[0].cached_tokens for seq in (2, 3)] == [0, 0]
    assert bench.answer(3) == expected(prompt(40), salt="tenant:b")


def test_a_collision_is_a_miss_and_stays_one() -> None:
    bench = make()
    bench.submit(1, prompt(40))
    bench.finish()
    other = prompt(40, 1)
    for seq in (2, 3):
        bench.submit(seq, other, digests=digests_of(prompt(40)))
        bench.finish()
        assert bench.of(seq)[0].cached_tokens == 0
        assert bench.answer(seq) == expected(other)
    assert bench.pool.num_cached == 10


def test_digests_of_the_wrong_number_are_computed_anew() -> None:
    bench = make()
    bench.submit(1, prompt(40))
    bench.finish()
    for seq, digests in ((2, b""), (3, digests_of(prompt(40))[:-DIGEST_BYTES]), (4, b"x" * 5)):
        bench.submit(seq, prompt(40), digests=digests)
        bench.finish()
        assert bench.of(seq)[0].cached_tokens == 36


def test_waiting_sequences_let_one_compute_their_common_prefix() -> None:
    bench = make(num_blocks=200)
    for seq in range(6):
        bench.submit(seq, [*prompt(48), *prompt(9, seq)])
    bench.finish()
    assert [bench.of(seq)[0].cached_tokens for seq in range(6)] == [0, 48, 48, 48, 48, 48]
    assert bench.scheduler.counters.shared_waits > 0


def test_nobody_waits_for_a_block_that_is_computed_in_any_case() -> None:
    """A prompt's last block is computed when less than a tail is behind it, so equal prompts run side by side."""
    bench = make(num_blocks=200)
    for seq in range(6):
        bench.submit(seq, prompt(49), max_tokens=3)
    for _ in range(5):
        bench.step()
    assert [bench.of(seq)[0].cached_tokens for seq in range(6)] == [0, *[44] * 5]


def test_nobody_waits_for_a_prefix_that_was_aborted() -> None:
    bench = make(step_tokens=16)
    bench.submit(1, [*prompt(48), 1, 2, 3, 4])
    bench.submit(2, [*prompt(48), 5, 6, 7, 8])
    bench.step()
    assert bench.scheduler.num_waiting == 1
    bench.scheduler.abort("g", 1)
    bench.finish()
    assert bench.answer(2) == expected([*prompt(48), 5, 6, 7, 8])
    assert bench.of(2)[0].cached_tokens == 16


def test_a_copy_computed_at_the_same_time_stays_private_and_what_follows_is_shared() -> None:
    """The online lane does not wait for batch prefills, so both compute the middle of the same prompt."""
    bench = make(num_blocks=40, step_tokens=16)
    batch = bench.submit(1, prompt(68), lane="batch", max_tokens=20)
    bench.step()
    bench.submit(2, prompt(48), max_tokens=1)
    bench.submit(3, prompt(60, 1), max_tokens=1)
    for _ in range(12):
        bench.step()
    assert batch is not None
    assert bench.of(2)[0].cached_tokens == 16
    assert batch.num_registered == batch.num_computed // SIZE >= 12
    private = [block for block in batch.block_table[: batch.num_registered] if not bench.pool.is_registered(block)]
    assert len(private) == 8
    bench.finish()
    assert bench.answer(1) == expected(prompt(68), 20)
    turn = [*prompt(68), *bench.answer(1)]
    bench.submit(4, turn)
    bench.finish()
    assert bench.of(4)[0].cached_tokens == 84


def test_the_parent_that_another_sequence_computed_is_not_evicted_under_a_child() -> None:
    """Online sequences flood the pool while batch's next block is to go under a block that only they registered."""
    bench = make(num_blocks=30, step_tokens=16)
    bench.submit(1, prompt(32), lane="batch", max_tokens=30)
    bench.step()
    bench.submit(2, prompt(32), max_tokens=1)
    for seq in range(3, 12):
        bench.submit(seq, prompt(16, seq), max_tokens=3)
        for _ in range(3):
            bench.step()
    bench.finish()
    assert bench.answer(1) == expected(prompt(32), 30)


# -- cuts -------------------------------------------------------------------------------------------------------------


@given(length=st.integers(1, 300), budget=st.integers(16, 90))
def test_a_prompt_is_computed_once_within_the_budget_and_leaves_no_crumbs(length: int, budget: int) -> None:
    bench = make(num_blocks=100, step_tokens=budget)
    bench.submit(1, prompt(length), max_tokens=1)
    bench.finish()
    chunks = [step[0][1:3] for step in bench.runner.steps]
    assert [start for start, _ in chunks] == [sum(count for _, count in chunks[:i]) for i in range(len(chunks))]
    assert sum(count for _, count in chunks) == length
    assert len(chunks) == max(1, -(-length // budget))
    assert all(min(length, MIN_TAIL_TOKENS) <= count <= budget for _, count in chunks)


def test_decodes_and_prefills_share_a_step() -> None:
    bench = make(step_tokens=40)
    bench.submit(1, prompt(10), max_tokens=20)
    bench.step()
    bench.submit(2, prompt(60, 1))
    bench.step()
    assert bench.runner.steps[-1] == [(1, 10, 1, True), (2, 0, 40, False)]


# -- lanes, room, preemption ------------------------------------------------------------------------------------------


def test_the_online_lane_goes_first() -> None:
    bench = make(max_sequences=1)
    bench.submit(1, prompt(10), lane="batch", max_tokens=1)
    bench.submit(2, prompt(10, 1), max_tokens=1)
    bench.submit(3, prompt(10, 2), max_tokens=1)
    bench.finish()
    assert [step[0][0] for step in bench.runner.steps] == [2, 3, 1]


def test_online_takes_the_place_of_batch_which_goes_on_later() -> None:
    bench = make(max_sequences=1)
    bench.submit(1, prompt(10), lane="batch", max_tokens=30)
    for _ in range(5):
        bench.step()
    bench.submit(2, prompt(10, 1), max_tokens=5)
    bench.finish()
    order = [step[0][0] for step in bench.runner.steps]
    assert order[:5] == [1] * 5
    assert order[5:10] == [2] * 5
    assert bench.answer(1) == expected(prompt(10), 30)
    assert bench.scheduler.counters.preemptions == 1


def test_admission_waits_for_blocks_and_keeps_the_order() -> None:
    bench = make(num_blocks=16)
    bench.submit(1, prompt(40), max_tokens=4)
    bench.submit(2, prompt(40, 1), max_tokens=4)
    bench.submit(3, prompt(40, 2), max_tokens=4)
    bench.step()
    assert bench.scheduler.num_running == 1
    bench.finish()
    firsts = [step[0] for step in bench.runner.steps if step[0][1] == 0]
    assert [first[0] for first in firsts] == [1, 2, 3]


def test_the_youngest_is_preempted_and_ends_with_the_same_answer() -> None:
    bench = make(num_blocks=12)
    for seq in (1, 2, 3):
        bench.submit(seq, prompt(10, seq), max_tokens=24)
    bench.finish()
    for seq in (1, 2, 3):
        assert bench.answer(seq) == expected(prompt(10, seq), 24)
        firsts = [update for update in bench.of(seq) if update.cached_tokens is not None]
        assert len(firsts) == 1
        assert firsts[0].cached_tokens == 0
    assert bench.scheduler.counters.preemptions >= 1
    assert len(bench.of(1)) == 24


def test_batch_is_preempted_before_an_older_or_younger_online_sequence() -> None:
    bench = make(num_blocks=12)
    old = bench.submit(1, prompt(10, 1), max_tokens=24)
    batch = bench.submit(2, prompt(10, 2), max_tokens=24, lane="batch")
    young = bench.submit(3, prompt(10, 3), max_tokens=24)
    assert old is not None
    assert batch is not None
    assert young is not None
    while not bench.scheduler.counters.preemptions:
        assert bench.step()
    assert bench.scheduler.counters.preemptions == 1
    assert [one.status for one in (old, batch, young)] == [Status.RUNNING, Status.WAITING, Status.RUNNING]
    bench.finish()
    assert bench.answer(2) == expected(prompt(10, 2), 24)


def test_a_preempted_sequence_reuses_its_own_blocks() -> None:
    bench = make(num_blocks=64, max_sequences=1)
    batch = bench.submit(1, prompt(30), lane="batch", max_tokens=30)
    assert batch is not None
    for _ in range(4):
        bench.step()
    bench.submit(2, prompt(4, 1), max_tokens=1)
    bench.step()
    assert (batch.num_computed, batch.block_table, batch.num_generated) == (0, array("i"), 4)
    bench.runner.steps.clear()
    bench.step()
    assert bench.runner.steps == [[(1, 28, 6, True)]]
    assert batch.cached_tokens == 0


def test_batch_does_not_take_the_blocks_that_online_waits_for() -> None:
    bench = make(num_blocks=16)
    bench.submit(1, prompt(30), max_tokens=10)
    bench.step()
    bench.submit(2, prompt(40, 1), max_tokens=1)
    bench.submit(3, prompt(8, 2), lane="batch", max_tokens=1)
    bench.finish()
    firsts = [item[0] for step in bench.runner.steps for item in step if item[1] == 0]
    assert firsts == [1, 2, 3]


# -- the end, whatever it is ------------------------------------------------------------------------------------------


def test_abort_frees_a_waiting_and_a_running_sequence_once() -> None:
    bench = make(max_sequences=1)
    bench.submit(1, prompt(10), max_tokens=30)
    bench.submit(2, prompt(10, 1))
    bench.step()
    assert bench.scheduler.abort("g", 1)
    assert bench.scheduler.abort("g", 2)
    assert not bench.scheduler.abort("g", 1)
    assert not bench.step()
    assert (bench.pool.num_live, bench.scheduler.load().prefill_backlog) == (0, 0)


def test_an_abort_between_a_step_and_its_result_frees_once() -> None:
    bench = make()
    bench.submit(1, prompt(10), max_tokens=3)
    bench.submit(2, prompt(10, 1), max_tokens=3)
    step = bench.scheduler.schedule(0.0)
    assert step is not None
    results = bench.runner.run(step)
    bench.scheduler.abort("g", 1)
    bench.scheduler.commit(step, results, 0.0)
    bench.finish()
    assert bench.of(1) == []
    assert bench.answer(2) == expected(prompt(10, 1), 3)


def test_a_gateway_that_leaves_takes_its_sequences_along() -> None:
    bench = make(max_sequences=2)
    for seq in range(4):
        bench.submit(seq, prompt(10, seq), owner="gone")
    bench.submit(9, prompt(10, 9))
    bench.step()
    assert bench.scheduler.abort_owner("gone") == 4
    assert bench.scheduler.abort_owner("gone") == 0
    bench.finish()
    assert bench.answer(9) == expected(prompt(10, 9))


def test_numbers_that_are_not_finite_end_one_sequence_and_are_never_shared() -> None:
    bench = make()
    bench.submit(1, prompt(40), max_tokens=8)
    bench.submit(2, prompt(40, 1), max_tokens=8)
    bench.step()
    bench.runner.poisoned.add(("g", 1))
    bench.runner.all_bad = True
    bench.finish()
    assert (bench.of(1)[-1].finish, bench.answer(2)) == ("error", expected(prompt(40, 1), 8))
    bench.submit(3, prompt(40))
    bench.finish()
    assert bench.of(3)[0].cached_tokens == 0
    assert bench.answer(3) == expected(prompt(40))


def test_a_poisoned_prefix_is_not_hit_again() -> None:
    bench = make()
    bench.submit(1, prompt(40))
    bench.finish()
    bench.submit(2, prompt(40))
    bench.runner.poisoned.add(("g", 2))
    bench.runner.all_bad = True
    bench.finish()
    assert bench.of(2)[0].cached_tokens == 36
    assert bench.of(2)[0].finish == "error"
    bench.submit(3, prompt(40))
    bench.finish()
    assert bench.of(3)[0].cached_tokens == 0


def test_who_shares_a_poisoned_prefix_goes_on_and_registers_nothing_under_it() -> None:
    bench = make()
    bench.submit(1, prompt(40), max_tokens=20)
    bench.step()
    bench.submit(2, prompt(40), max_tokens=20)
    bench.step()
    bench.runner.poisoned.add(("g", 1))
    bench.runner.all_bad = True
    bench.finish()
    assert bench.of(1)[-1].finish == "error"
    assert bench.answer(2) == expected(prompt(40), 20)
    assert bench.pool.num_cached == 0


def test_a_failed_step_ends_its_sequences_and_registers_nothing() -> None:
    bench = make(max_sequences=2)
    bench.submit(1, prompt(10))
    bench.submit(2, prompt(10, 1))
    bench.submit(3, prompt(10, 2))
    bench.runner.fails = True
    bench.step()
    assert [bench.of(seq)[0].finish for seq in (1, 2)] == ["error", "error"]
    assert bench.pool.num_free == bench.pool.num_blocks
    bench.finish()
    assert bench.answer(3) == expected(prompt(10, 2))


def test_an_error_with_one_row_ends_that_sequence_alone_and_registers_nothing_of_the_step() -> None:
    bench = make()
    bench.submit(1, prompt(12), max_tokens=4)
    bench.submit(2, prompt(12, 1), max_tokens=4)
    run = bench.runner.run
    bench.runner.run = lambda step: [ROW_FAILED, *run(step)[1:]]  # type: ignore[method-assign]
    bench.step()
    bench.runner.run = run  # type: ignore[method-assign]
    bench.finish()
    (update,) = bench.of(1)
    assert (update.finish, update.tokens) == ("error", [])
    assert bench.answer(2) == expected(prompt(12, 1))
    assert bench.scheduler.counters.failed_rows == 1
    bench.submit(3, prompt(12), max_tokens=4)
    bench.finish()
    assert bench.of(3)[0].cached_tokens == 0


@pytest.mark.parametrize("where", ["tables.register", "claims.register", "_sequences.describe_start"])
def test_an_error_in_the_bookkeeping_of_one_sequence_ends_that_one_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    first = bench.submit(1, prompt(12), max_tokens=4)
    bench.submit(2, prompt(12, 1), max_tokens=4)
    owner, _, name = where.rpartition(".")
    target = getattr(bench.scheduler, owner)
    usual, broken = getattr(target, name), [first]

    def fail(sequence: Any, *values: Any) -> Any:
        if sequence in broken:
            broken.clear()
            raise ValueError("a bug")
        return usual(sequence, *values)

    monkeypatch.setattr(target, name, fail)
    bench.finish()
    assert [bench.of(seq)[-1].finish for seq in (1, 2)] == ["error", "length"]
    assert bench.answer(2) == expected(prompt(12, 1))


def test_load_counts_what_is_left_to_prefill() -> None:
    bench = make(step_tokens=32, max_sequences=1)
    bench.submit(1, prompt(100))
    bench.submit(2, prompt(50, 1))
    bench.step()
    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.prefill_backlog) == (1, 1, 68 + 50)
    assert load.free_blocks + load.cached_blocks + load.live_blocks == bench.pool.num_blocks


def test_the_load_says_how_much_of_it_is_of_the_batch_lane() -> None:
    bench = make(num_blocks=200, max_sequences=2, step_tokens=16)
    bench.submit(1, prompt(40))
    bench.finish()
    for seq, lane in ((2, "online"), (3, "batch"), (4, "batch")):
        bench.submit(seq, prompt(40) + [seq] * 20, lane=lane)
    load = bench.scheduler.load()
    assert (load.waiting, load.batch_waiting) == (3, 2)
    assert (load.prefill_backlog, load.batch_backlog) == (60, 40)  # what is there when they arrive counts for nothing
    while bench.scheduler.load().batch_running == 0:
        assert bench.step()
    load = bench.scheduler.load()
    assert (load.running, load.batch_running, load.batch_waiting) == (2, 1, 1)
    bench.finish()
    assert bench.scheduler.load().prefill_backlog == bench.scheduler.load().batch_backlog == 0
