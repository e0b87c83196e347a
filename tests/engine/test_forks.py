"""Several answers to one prompt: computed once, shared block by block, copied when it is written, and freed once."""

from __future__ import annotations

from typing import Any

import pytest

from engine.sequence import MASK_LATE, Status, Step
from tests.fakes.scheduler_bench import SIZE, Bench, expected, make, prompt

GROUP = (1, 8)


def ask(bench: Bench, seqs: range, tokens: list[int], **options: Any) -> None:
    for seq in seqs:
        bench.submit(seq, tokens, **{"group": GROUP, **options})


def check(bench: Bench, seqs: range, tokens: list[int], max_tokens: int = 4, **options: Any) -> None:
    for seq in seqs:
        assert bench.answer(seq) == expected(tokens, max_tokens, **options), f"answer {seq}"


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 64, 100])
def test_the_prompt_of_eight_answers_is_computed_once(length: int) -> None:
    bench = make(200)
    ask(bench, range(8), prompt(length))
    bench.finish()
    check(bench, range(8), prompt(length))
    counters = bench.scheduler.counters
    assert (counters.prefilled_tokens, counters.decoded_tokens, counters.forks) == (length, 8 * 3, 7)
    assert (counters.prompt_tokens, counters.cached_tokens, counters.shared_tokens) == (8 * length, *(2 * [7 * length]))


def test_siblings_have_their_first_token_one_step_later() -> None:
    bench = make()
    ask(bench, range(8), prompt(15))
    bench.step()
    bench.step()
    assert [len(bench.answer(seq)) for seq in range(8)] == [2, *[1] * 7]


def test_a_partly_filled_block_is_copied() -> None:
    bench = make()
    ask(bench, range(3), prompt(6))
    bench.step()
    assert bench.pool.num_live == 2
    bench.step()
    assert bench.pool.num_live == 4
    assert bench.scheduler.counters.copied_blocks == 2
    bench.finish()
    check(bench, range(3), prompt(6))


def test_nothing_is_copied_where_the_prompt_ends_with_a_block() -> None:
    bench = make()
    ask(bench, range(4), prompt(8))
    bench.finish()
    assert (bench.scheduler.counters.forks, bench.scheduler.counters.copied_blocks) == (3, 0)
    check(bench, range(4), prompt(8))


def test_one_that_comes_later_forks_as_long_as_another_runs() -> None:
    bench = make()
    ask(bench, range(1), prompt(15), max_tokens=9)
    for _ in range(4):
        bench.step()
    ask(bench, range(1, 3), prompt(15), max_tokens=9)
    bench.finish()
    check(bench, range(3), prompt(15), 9)
    assert (bench.scheduler.counters.prefilled_tokens, bench.scheduler.counters.forks) == (15, 2)


def test_one_that_comes_when_all_others_have_ended_reuses_whole_blocks() -> None:
    bench = make()
    ask(bench, range(2), prompt(15))
    bench.finish()
    ask(bench, range(2, 3), prompt(15))
    bench.finish()
    check(bench, range(3), prompt(15))
    assert bench.of(2)[0].cached_tokens == 8
    assert bench.scheduler.counters.prefilled_tokens == 15 + 7


def test_answers_for_which_there_is_no_slot_fork_when_one_is_free() -> None:
    bench = make(max_sequences=3)
    ask(bench, range(8), prompt(15))
    bench.submit(20, prompt(15, start=1), max_tokens=9)
    bench.finish()
    check(bench, range(8), prompt(15))
    assert bench.answer(20) == expected(prompt(15, start=1), 9)
    assert bench.scheduler.counters.prefilled_tokens < 30 + 8 * SIZE


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("which", [0, 1, 7])
def test_whichever_is_cancelled_at_whatever_step_the_others_go_on(steps: int, which: int) -> None:
    bench = make()
    ask(bench, range(8), prompt(90), max_tokens=6)
    for _ in range(steps):
        bench.step()
    assert bench.scheduler.abort("g", which)
    assert not bench.scheduler.abort("g", which)
    bench.finish()
    for seq in set(range(8)) - {which}:
        assert bench.answer(seq) == expected(prompt(90), 6)


def test_when_the_first_is_cancelled_while_it_computes_another_goes_on_behind_its_blocks() -> None:
    bench = make()
    ask(bench, range(4), prompt(90))
    bench.step()
    assert bench.scheduler.num_running == 1
    bench.scheduler.abort("g", 0)
    bench.finish()
    check(bench, range(1, 4), prompt(90))
    assert bench.scheduler.counters.prefilled_tokens == 90


def test_all_of_them_go_when_their_gateway_goes() -> None:
    bench = make()
    ask(bench, range(8), prompt(15))
    bench.step()
    bench.step()
    assert bench.scheduler.abort_owner("g") == 8
    bench.finish()
    assert bench.pool.num_live == 0


def test_siblings_of_one_whose_numbers_are_not_finite_compute_the_prompt_anew() -> None:
    bench = make()
    ask(bench, range(3), prompt(15))
    bench.runner.poisoned.add(("g", 0))
    bench.runner.all_bad = True
    bench.finish()
    assert [bench.of(seq)[-1].finish for seq in range(3)] == ["error", "length", "length"]
    check(bench, range(1, 3), prompt(15))


def test_one_whose_own_numbers_are_not_finite_fails_alone() -> None:
    bench = make()
    ask(bench, range(3), prompt(15))
    bench.step()
    bench.runner.poisoned.add(("g", 0))
    bench.runner.all_bad = True
    bench.finish()
    assert [bench.of(seq)[-1].finish for seq in range(3)] == ["error", "length", "length"]
    check(bench, range(1, 3), prompt(15))


def test_a_fork_is_preempted_and_goes_on_as_if_it_were_alone() -> None:
    bench = make(12)
    ask(bench, range(4), prompt(15), max_tokens=20)
    bench.finish()
    check(bench, range(4), prompt(15), 20)
    assert bench.scheduler.counters.forks == 3
    assert bench.scheduler.counters.preemptions > 0


def test_no_more_fork_than_there_is_room_to_write_for() -> None:
    bench = make(8)
    ask(bench, range(8), prompt(15), max_tokens=2)
    bench.step()
    bench.step()
    assert bench.scheduler.counters.forks == 2  # six blocks, and room for each to grow
    bench.finish()
    check(bench, range(8), prompt(15), 2)
    assert bench.scheduler.counters.preemptions == 0


def test_a_fork_keeps_what_its_blocks_are_found_behind() -> None:
    """Its source computed the prompt's end at the same time as another, whose blocks are the ones that can be found."""
    bench = make(24, step_tokens=32)
    ask(bench, range(1), prompt(48), max_tokens=3, lane="batch")
    ask(bench, range(1, 2), prompt(48), max_tokens=12, lane="batch")
    bench.step()
    bench.submit(8, prompt(48), max_tokens=1)
    bench.step()
    bench.step()  # the batch lane was not in the step before
    bench.step()
    assert [len(bench.answer(seq)) for seq in (0, 1, 8)] == [2, 1, 1]
    bench.submit(9, prompt(36, start=1), max_tokens=1)  # would evict them
    bench.finish()
    check(bench, range(1, 2), prompt(48), 12)
    bench.submit(10, prompt(48) + bench.answer(1))
    bench.finish()
    assert bench.of(10)[0].cached_tokens == 56


def test_a_fork_of_one_that_may_not_register_any_more_does_not_either() -> None:
    bench = make()
    ask(bench, range(1), prompt(15), max_tokens=30)
    bench.step()
    bench.submit(8, [*prompt(12), 1, 2, 3, 4, 5])
    bench.runner.poisoned.add(("g", 8))  # which takes everything that it reused with it
    bench.runner.all_bad = True
    bench.step()
    bench.submit(9, prompt(15), max_tokens=1)
    bench.step()
    ask(bench, range(1, 2), prompt(15), max_tokens=9)
    bench.finish()
    check(bench, range(1, 2), prompt(15), 9)
    assert bench.scheduler.counters.forks == 1
    bench.submit(10, prompt(15) + bench.answer(1))
    bench.finish()
    assert bench.of(10)[0].cached_tokens == 12


def test_forks_take_nothing_of_the_budget() -> None:
    bench = make(step_tokens=16)
    ask(bench, range(4), prompt(16))
    bench.step()
    bench.submit(9, prompt(100, start=1))
    bench.step()
    assert [len(bench.answer(seq)) for seq in range(4)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": [*prompt(14), 49]},
        {"salt": "a"},
        {"use_cache": False},
        {"digests": b"\1" * 48},
        {"prompt_logprobs": 1},
        {"owner": "h"},
    ],
)
def test_who_only_says_that_it_belongs_to_others_stays_alone(other: dict[str, Any]) -> None:
    bench = make()
    ask(bench, range(1), prompt(15), use_cache="prompt_logprobs" not in other)
    options = {"tokens": prompt(15), "use_cache": "prompt_logprobs" not in other, **other}
    bench.submit(1, group=GROUP, **options)
    bench.finish()
    assert bench.scheduler.counters.forks == 0
    assert bench.answer(1, options.get("owner", "g")) == expected(options["tokens"], salt=options.get("salt", ""))


def test_answers_that_may_not_use_the_cache_fork_and_leave_nothing_behind() -> None:
    bench = make()
    ask(bench, range(3), prompt(15), use_cache=False)
    bench.finish()
    check(bench, range(3), prompt(15))
    assert bench.scheduler.counters.prefilled_tokens == 15
    assert bench.pool.num_cached == 0


def test_what_a_fork_writes_can_be_reused() -> None:
    bench = make()
    ask(bench, range(2), prompt(15), max_tokens=9)
    bench.finish()
    bench.submit(9, prompt(15) + bench.answer(1))
    bench.finish()
    assert bench.of(9)[0].cached_tokens == 20


def test_all_are_told_what_was_cached_before_any_of_them_came() -> None:
    bench = make()
    bench.submit(9, prompt(9))
    bench.finish()
    ask(bench, range(3), prompt(15))
    bench.finish()
    assert [bench.of(seq)[0].cached_tokens for seq in range(3)] == [8] * 3


def test_the_breakpoints_of_forks_are_granted_as_those_of_their_source() -> None:
    bench = make()
    ask(bench, range(3), prompt(15), breakpoints=((12, 50.0),))
    bench.step()
    bench.step()
    assert [bench.of(seq)[0].lease_write_tokens for seq in range(3)] == [12] * 3
    assert bench.scheduler.leases.num_blocks() == 3
    assert len(bench.scheduler.leases) == 1
    bench.finish()


def test_a_failed_step_ends_its_forks_and_frees_everything() -> None:
    bench = make()
    ask(bench, range(4), prompt(15))
    bench.step()
    bench.runner.fails = True
    bench.step()
    assert [bench.of(seq)[-1].finish for seq in range(4)] == ["error"] * 4
    bench.finish()


def test_logits_are_kept_no_longer_than_somebody_may_want_them() -> None:
    bench = make()
    sequences = [bench.submit(seq, prompt(15), group=(1, 3)) for seq in range(2)]
    bench.step()
    first = sequences[0]
    assert first is not None
    assert first.siblings is not None
    assert first.siblings.row is not None
    siblings = first.siblings
    bench.submit(2, prompt(15), group=(1, 3))
    bench.step()
    assert siblings.row is None
    bench.finish()
    assert first.status is Status.FINISHED


def test_a_fork_whose_mask_is_late_samples_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    ask(bench, range(2), prompt(15))
    run, late = bench.runner.run, iter([True])

    def run_late(step: Step) -> list[int | None]:
        results = run(step)
        return [*results[:-1], MASK_LATE] if step.forks and next(late, False) else results

    monkeypatch.setattr(bench.runner, "run", run_late)
    bench.finish()
    check(bench, range(2), prompt(15))
    assert bench.scheduler.counters.forks == 1
