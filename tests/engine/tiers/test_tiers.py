"""Tiers: what is saved, what comes back, what is lost, and that nobody waits for a copy who need not."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest

from engine.planner import COPY_WAIT_S
from engine.protocol import DIGEST_BYTES, split_digests
from engine.tiers.tier import COPY_LIMIT_S, PAUSE_S
from tests.fakes.scheduler_bench import SIZE, digests_of, expected, prompt
from tests.fakes.tier_bench import TierBench, make, restoring


def held(bench: TierBench, tier: str, tokens: list[int], salt: str = "") -> int:
    """Leading blocks of a prompt that a tier can find."""
    pool = next(level.pool for level in bench.tiers.tiers if level.name == tier)
    digests = split_digests(digests_of(tokens, salt))
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return len(pool.prefixes.find(salt, packed, digests))


def counters(bench: TierBench, tier: str = "disk") -> dict[str, int]:
    found: dict[str, int] = bench.tiers.stats()[tier]
    return found


def test_a_prompt_is_saved_in_every_tier_and_stays_where_it_was() -> None:
    bench = make()
    bench.ask(1, prompt(40), max_tokens=1)
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [10, 10]
    assert counters(bench)["saved"] == 10
    bench.check_contents()


def test_what_was_generated_is_saved_when_the_sequence_ends() -> None:
    bench = make()
    bench.ask(1, prompt(8), max_tokens=10)
    whole = prompt(8) + bench.answer(1)
    assert held(bench, "disk", whole) == held(bench, "device", whole) == 4
    assert counters(bench)["saved"] == 4


def test_a_prefix_that_was_evicted_comes_back_and_the_answer_is_the_same() -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    assert held(bench, "device", prompt(40)) == 0
    assert bench.ask(2, prompt(40)) == 36
    assert bench.answer(2) == bench.answer(1) == expected(prompt(40))
    assert counters(bench)["restored"] == 9
    bench.check_contents()


def test_after_a_restart_the_first_request_is_warm() -> None:
    first = make()
    first.ask(1, prompt(40))
    second = make(files=first.disk, prefixes=first.runner.prefixes)
    assert not second.tiers.ready
    second.settle()
    assert second.tiers.ready
    assert held(second, "disk", prompt(40)) == 10
    assert second.ask(1, prompt(40)) == 36
    assert second.answer(1) == expected(prompt(40))
    second.check_contents()


def test_a_block_that_turns_out_to_be_torn_while_the_rest_is_still_adopted_takes_its_descendants_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.tiers.upkeep.ADOPT_AT_ONCE", 3)
    monkeypatch.setattr("engine.tiers.upkeep.RELEASE_AT_ONCE", 3)
    first = make()
    first.ask(1, prompt(40), max_tokens=1)
    bench = make(files=first.disk, prefixes=first.runner.prefixes)
    disk = bench.workers["copy-disk"]
    assert disk.work()
    assert disk.deliver()
    assert held(bench, "disk", prompt(40)) == 3
    bench.listen()
    del bench.disk.files[split_digests(digests_of(prompt(40)))[1]]
    bench.submit(2, prompt(40))
    bench.finish()
    assert bench.answer(2) == expected(prompt(40))
    assert bench.of(2)[0].cached_tokens == 4
    assert (bench.tiers.ready, held(bench, "disk", prompt(40))) == (True, 10), "saved again"
    bench.listen()


def test_a_longer_prefix_below_is_fetched_behind_what_is_there() -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.ask(2, prompt(12))
    assert held(bench, "device", prompt(40)) == 3
    assert bench.ask(3, prompt(40)) == 36
    assert counters(bench)["restored"] == 2 + 6  # for the second prompt and for the third
    bench.check_contents()


def test_another_salt_finds_nothing_below() -> None:
    bench = make()
    bench.ask(1, prompt(40), salt="a")
    bench.forget_device()
    assert bench.ask(2, prompt(40), salt="b") == 0
    assert bench.ask(3, prompt(40), salt="b", digests=digests_of(prompt(40), "a")) < 40
    assert bench.answer(3) == expected(prompt(40), salt="b")
    assert counters(bench)["restored"] == 0


def test_the_others_run_while_one_waits_for_its_blocks() -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.submit(2, prompt(40))
    bench.submit(3, prompt(20, 1))
    while bench.step():
        pass
    assert bench.answer(3) == expected(prompt(20, 1))
    assert bench.answer(2) == []
    assert bench.scheduler.num_waiting == 1
    bench.finish()
    assert bench.of(2)[0].cached_tokens == 36
    assert bench.answer(2) == expected(prompt(40))


def test_sequences_that_need_the_same_blocks_wait_for_one_restore() -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    for seq in range(2, 6):
        bench.submit(seq, prompt(40) + [seq] * 5)
    bench.finish()
    assert [bench.of(seq)[0].cached_tokens for seq in range(2, 6)] == [40] * 4
    assert counters(bench)["restored"] == 10


def test_a_sequence_is_restored_once_even_when_it_fails() -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.disk.fails = True
    assert bench.ask(2, prompt(40)) == 0
    assert bench.answer(2) == expected(prompt(40))
    assert counters(bench)["failed"] == 9
    bench.check_contents()


@pytest.mark.parametrize("torn", range(9))
def test_a_torn_block_ends_the_restore_there_and_is_forgotten_with_its_descendants(torn: int) -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    digest = split_digests(digests_of(prompt(40)))[torn]
    key, row = bench.disk.files[digest]
    bench.disk.files[digest] = replace(key, tokens=b"torn"), row
    bench.submit(2, prompt(40), max_tokens=1)
    bench.step()
    for worker in bench.workers.values():
        assert worker.work()
        assert worker.deliver()
    assert held(bench, "disk", prompt(40)) == held(bench, "device", prompt(40)) == torn
    bench.finish()
    assert bench.of(2)[0].cached_tokens == SIZE * torn
    assert bench.answer(2) == expected(prompt(40), 1)
    assert counters(bench)["torn"] == 1
    assert held(bench, "disk", prompt(40)) == 10, "what was computed again is saved again"
    assert len(bench.disk.files) == 10
    bench.check_contents()


def test_a_restore_that_would_leave_too_little_room_is_not_begun() -> None:
    bench = make(num_blocks=12)
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.submit(2, prompt(16, 1), max_tokens=20)
    bench.step()
    bench.submit(3, prompt(40))
    for _ in range(5):
        assert bench.step()
    assert (bench.tiers.count_restoring(bench.now), bench.scheduler.num_waiting) == (0, 1)
    bench.finish()
    assert bench.of(3)[0].cached_tokens == 36
    assert bench.answer(2) == expected(prompt(16, 1), 20)


def test_an_online_sequence_takes_the_room_for_its_restore_from_the_batch_lane() -> None:
    bench = make(num_blocks=14)
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.submit(2, prompt(30, 1), lane="batch", max_tokens=12)
    bench.step()
    bench.submit(3, prompt(40))
    bench.finish()
    assert bench.of(3)[0].cached_tokens == 36
    assert bench.scheduler.counters.preemptions >= 1
    assert bench.answer(2) == expected(prompt(30, 1), 12)


def test_an_abort_while_blocks_are_on_their_way_leaves_them_cached() -> None:
    bench = make()
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.submit(2, prompt(40))
    bench.step()
    assert bench.tiers.count_restoring(bench.now) == 1
    assert bench.scheduler.abort("g", 2)
    bench.settle()
    assert held(bench, "device", prompt(40)) == 9
    assert bench.pool.num_live == 0


def test_a_disk_that_hangs_takes_no_place_of_a_sequence_for_good() -> None:
    bench = make(max_sequences=1)
    bench.ask(1, prompt(40))
    bench.forget_device()
    bench.submit(2, prompt(40))
    bench.submit(3, prompt(20, 1))
    assert not bench.step()
    bench.now += COPY_LIMIT_S
    while bench.step():
        pass
    assert bench.answer(2) == expected(prompt(40))
    assert bench.answer(3) == expected(prompt(20, 1))
    bench.finish()


def test_a_disk_that_hangs_keeps_no_block_of_the_model_and_what_it_reads_later_is_written_nowhere() -> None:
    """Each restore takes nine of 64 blocks. They come back when its time is up, and others compute in them; then the
    disk wakes up and goes on with all it was asked for."""
    bench = make(num_blocks=64, disk=200)
    for seq in range(8):
        bench.ask(seq, prompt(40, seq), max_tokens=1)
    bench.forget_device()
    (disk,) = bench.workers.values()
    for seq in range(8):
        bench.submit(10 + seq, prompt(40, seq), max_tokens=1)
        bench.step()
    assert len(disk.jobs) == 7, "no room for the eighth"
    assert (bench.pool.num_live, bench.scheduler.num_waiting) == (63, 8)
    bench.now += COPY_LIMIT_S
    assert not bench.step()
    while bench.step():
        pass
    assert bench.scheduler.num_waiting == bench.pool.num_live == 0
    for seq in range(8):
        assert bench.answer(10 + seq) == expected(prompt(40, seq), 1)
        assert bench.of(10 + seq)[0].cached_tokens == 0
    assert counters(bench)["failed"] == 7 * 9
    bench.forget_device()
    bench.submit(20, prompt(40, 0), max_tokens=1)
    assert bench.step(), "it is not asked again while a copy is overdue"
    bench.submit(21, prompt(200, 9), max_tokens=20)  # somebody has the very blocks
    assert bench.step()
    while disk.work() or disk.deliver():
        bench.step()
    bench.finish()
    assert bench.answer(21) == expected(prompt(200, 9), 20)
    bench.forget_device()
    assert bench.ask(30, prompt(40, 3), max_tokens=1) == 36, "it is asked again"
    bench.check_contents()


def test_a_save_that_hangs_keeps_no_block_of_the_model_either() -> None:
    bench = make(num_blocks=10, lease_share=1.0)
    bench.submit(1, prompt(36), max_tokens=1)
    assert bench.step()
    assert bench.pool.num_live == 9
    bench.submit(2, prompt(36, 1), max_tokens=1)
    bench.now += COPY_LIMIT_S
    assert not bench.step()
    assert bench.step()
    assert bench.answer(2) == expected(prompt(36, 1), 1)
    (disk,) = bench.workers.values()
    assert (counters(bench)["failed"], len(disk.jobs)) == (9, 1)
    bench.finish()
    assert (counters(bench)["saved"], bench.disk.files) == (0, {}), "others had the blocks by then"
    bench.now += PAUSE_S
    bench.ask(3, prompt(36, 1), max_tokens=1)
    assert held(bench, "disk", prompt(36, 1)) == 9
    bench.check_contents()


def live_with_a_hang(point: int) -> bool:
    """Saves, restores and evictions, where the disk hangs before or after one of its calls for longer than a copy may
    take, while others use every block of the model. False when there are fewer such points."""
    bench = make(num_blocks=16, disk=24)
    calls = itertools.count()
    answered: list[int] = []  # what is raised while a store is called is the store's failure

    def meanwhile() -> None:
        if next(calls) != point:
            return
        began_s = bench.now
        bench.now += COPY_LIMIT_S
        for seq, tokens in ((100, prompt(56, 7)), (101, prompt(40)), (102, prompt(56, 8))):
            bench.submit(seq, tokens, max_tokens=1)
            while not bench.answer(seq) and bench.now - began_s <= 2 * COPY_LIMIT_S:
                if not bench.step():
                    bench.now += 1.0
            bench.listen()
            answered.extend(bench.answer(seq))

    def slow(call: Any) -> Any:
        def hang(*arguments: Any) -> Any:
            meanwhile()
            result = call(*arguments)
            meanwhile()
            return result

        return hang

    for name in ("read", "write", "drop"):
        setattr(bench.disk, name, slow(getattr(bench.disk, name)))
    for seq, kind in enumerate((0, 1, 0, 1, 2, 0)):
        bench.ask(seq, prompt(40, kind), max_tokens=1)
        bench.forget_device()
    for seq in (10, 11):
        bench.submit(seq, prompt(32, seq % 2), max_tokens=1)
    bench.finish()
    if next(calls) <= point:
        return False
    assert answered == [*expected(prompt(56, 7), 1), *expected(prompt(40), 1), *expected(prompt(56, 8), 1)]
    bench.now += PAUSE_S
    bench.listen()
    bench.check_contents()
    bench.ask(20, prompt(40, 5), max_tokens=1)
    bench.forget_device()
    assert bench.ask(21, prompt(40, 5), max_tokens=1) == 36, "the disk is used again"
    for pool in bench.tiers.pools:
        assert pool.check_invariants() == []
        assert pool.allocate(pool.num_blocks) is not None, "a block leaked"
    return True


def test_a_disk_that_hangs_at_any_of_its_calls_holds_no_sequence_up_and_is_used_again() -> None:
    points = sum(1 for _ in itertools.takewhile(live_with_a_hang, itertools.count()))
    assert points > 20


def test_leases_wait_for_copies_to_make_room_and_not_for_a_disk_that_hangs() -> None:
    for hangs in (False, True):
        bench = make(num_blocks=16, lease_share=1.0, lease_tenant_share=1.0)
        bench.submit(1, prompt(40), max_tokens=1, breakpoints=((40, 600.0),))
        assert bench.step()
        bench.submit(2, prompt(36, 1), max_tokens=1)
        assert not bench.step(), "the copy may end, and the lease with it need not be kept here"
        if hangs:
            bench.now += COPY_WAIT_S
        else:
            bench.settle()
            assert bench.scheduler.leases.num_blocks() == 0
        assert bench.step() is not hangs  # the copy holds the very blocks
        bench.finish()
        assert bench.answer(2) == expected(prompt(36, 1), 1)
        assert bench.scheduler.leases.counters.degraded == hangs


def test_a_lease_that_was_saved_is_read_after_a_flood_above() -> None:
    """The first tier has no room for the lease by itself: its share is five blocks."""
    bench = make(num_blocks=20)
    bench.ask(1, prompt(40), breakpoints=((38, 600.0),), max_tokens=1)
    leases = bench.scheduler.leases
    assert bench.of(1)[0].leases_degraded == 1
    assert leases.stats()["blocks"] == {"device": 0, "disk": 9}
    for seq in range(2, 12):
        bench.ask(seq, prompt(60, seq), max_tokens=1)
    assert held(bench, "device", prompt(40)) == 0
    bench.ask(12, prompt(48))
    assert bench.of(12)[0].lease_read_tokens == 38
    assert (bench.of(12)[0].cached_tokens or 0) >= 36


def test_the_scheduler_waits_while_copies_hold_the_blocks_that_it_needs() -> None:
    bench = make(num_blocks=10)
    bench.submit(1, prompt(36), max_tokens=1)
    assert bench.step()
    assert bench.pool.num_live == 9, "the copy holds them"
    bench.submit(2, prompt(36, 1), max_tokens=1)
    assert not bench.step()
    assert bench.tiers.busy
    bench.finish()
    assert bench.answer(2) == expected(prompt(36, 1), 1)


def test_few_blocks_at_a_time_are_saved_and_all_in_the_end() -> None:
    bench = make(part_blocks=3)
    bench.submit(1, prompt(80), max_tokens=1)
    bench.step()
    bench.step()
    assert bench.pool.num_live == 3
    bench.finish()
    assert held(bench, "disk", prompt(80)) == 20


def test_while_steps_run_saving_takes_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    # A copy takes a millisecond.
    monkeypatch.setattr("engine.tiers.copying.time.monotonic", lambda: next(ticks) * 0.001)
    bench = make(part_blocks=2)
    (worker,) = bench.workers.values()
    bench.submit(1, prompt(40), max_tokens=1)
    bench.step()
    copies: list[int] = []
    for millisecond in range(8):
        bench.now += 0.001
        bench.tiers.pump(bench.now, steps_run=True)
        if worker.work():
            copies.append(millisecond)
            worker.deliver()
    assert copies == [0, 3, 6], "one of work, three of rest; what it was told of began in the turn before"
    assert bench.tiers.busy
    bench.tiers.pump(bench.now, steps_run=False)
    assert worker.work(), "an idle engine need not wait"
    bench.finish()
    assert held(bench, "disk", prompt(40)) == 10


def test_beyond_its_limit_the_queue_leaves_out_the_oldest() -> None:
    bench = make(queue_bytes=1000)
    for seq in range(4):
        bench.submit(seq, prompt(20, seq), max_tokens=1)
    while bench.step():  # without a single copy: one save is under way, two wait
        pass
    bench.settle()
    assert [held(bench, "disk", prompt(20, seq)) for seq in range(4)].count(5) == 3
    assert counters(bench)["dropped"] == 5


def test_a_full_tier_gives_up_what_was_used_longest_ago_and_its_files() -> None:
    bench = make(disk=10)
    bench.ask(1, prompt(20, 1), max_tokens=1)
    bench.ask(2, prompt(20, 2), max_tokens=1)
    bench.ask(3, prompt(20, 1), max_tokens=1)  # a hit above counts as a use below
    bench.ask(4, prompt(20, 3), max_tokens=1)
    assert [held(bench, "disk", prompt(20, seq)) for seq in (1, 2, 3)] == [5, 0, 5]
    assert len(bench.disk.files) == 10
    bench.check_contents()


def test_a_prefix_longer_than_its_tier_is_saved_as_far_as_it_fits() -> None:
    bench = make(disk=4)
    bench.ask(1, prompt(40))
    assert held(bench, "disk", prompt(40)) == 4
    assert len(bench.disk.files) == 4


def test_a_disk_that_is_full_costs_one_warning_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bench.disk.fails = True
    for seq in range(4):
        bench.ask(seq, prompt(20, seq), max_tokens=1)
        assert bench.answer(seq) == expected(prompt(20, seq), 1)
    assert (counters(bench)["saved"], counters(bench)["failed"], counters(bench)["dropped"]) == (0, 5, 15)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert bench.disk.files == {}
    bench.disk.fails = False
    bench.now += PAUSE_S
    bench.ask(5, prompt(20, 0), max_tokens=1)
    assert held(bench, "disk", prompt(20, 0)) == 5, "it is tried again after a while"


def test_what_is_not_trusted_any_more_is_forgotten_below_too() -> None:
    bench = make()
    bench.ask(1, prompt(40), max_tokens=1)
    bench.runner.poisoned.add(("g", 2))
    bench.runner.all_bad = True
    bench.ask(2, prompt(20) + prompt(10, 3), max_tokens=1)
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [0, 0]
    assert bench.disk.files == {}


def test_one_prompt_that_overflows_takes_nothing_that_others_share_and_that_is_sound() -> None:
    bench = make()
    bench.ask(1, prompt(40), max_tokens=1, breakpoints=((40, 600.0),))
    bench.runner.poisoned.add(("g", 2))
    bench.ask(2, prompt(20) + prompt(10, 3), max_tokens=1)
    assert bench.of(2)[0].finish == "error"
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [10, 10]
    assert bench.scheduler.leases.counters.lost == 0
    bench.listen()
    assert bench.ask(3, prompt(40)) == 36
    bench.check_contents()


def test_what_is_not_finite_among_it_is_forgotten_in_all_tiers_with_what_hangs_from_it_and_nothing_else() -> None:
    bench = make()
    bench.ask(1, prompt(40), max_tokens=1)
    bench.ask(2, prompt(8) + prompt(12, 5), max_tokens=1)
    third = bench.pool.prefixes.find_block(split_digests(digests_of(prompt(40)))[2])
    bench.scheduler.tables.find_not_finite = lambda blocks: [block for block in blocks if block == third]
    bench.runner.poisoned.add(("g", 3))
    bench.ask(3, prompt(20) + prompt(10, 3), max_tokens=1)
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [2, 2]
    assert [held(bench, tier, prompt(8) + prompt(12, 5)) for tier in ("device", "disk")] == [5, 5]
    assert len(bench.disk.files) == 5
    bench.listen()


def test_what_ceased_to_be_trusted_while_it_was_copied_is_not_saved() -> None:
    bench = make()
    bench.submit(1, prompt(40), max_tokens=3)
    bench.step()
    bench.runner.poisoned.add(("g", 1))
    bench.runner.all_bad = True
    bench.step()
    bench.finish()
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [0, 0]
    assert bench.disk.files == {}
    assert counters(bench)["saved"] == 0


def test_what_ceases_to_be_trusted_while_saving_has_a_rest_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("engine.tiers.copying.time.monotonic", lambda: next(ticks) * 0.001)
    bench = make(part_blocks=2)
    (worker,) = bench.workers.values()
    bench.submit(1, prompt(40), max_tokens=3)
    bench.step()
    bench.tiers.pump(bench.now, steps_run=True)
    assert worker.work()
    assert worker.deliver()
    assert held(bench, "disk", prompt(40)) == 2, "and the rest of it later"
    bench.runner.poisoned.add(("g", 1))
    bench.runner.all_bad = True
    bench.step()
    bench.finish()
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [0, 0]
    assert bench.disk.files == {}


def test_what_ceases_to_be_trusted_while_it_comes_back_is_not_restored() -> None:
    bench = make()
    bench.ask(1, prompt(40), max_tokens=1)
    bench.forget_device()
    bench.submit(2, prompt(40), max_tokens=1)
    bench.step()
    (job,) = restoring(bench.tiers).jobs
    bench.tiers.forget(job.chain)
    bench.settle()
    assert held(bench, "device", prompt(40)) == 0
    bench.finish()
    assert bench.answer(2) == expected(prompt(40), 1)


def test_a_lease_moves_down_with_its_blocks_and_is_there_when_asked_for() -> None:
    bench = make(num_blocks=24, disk=40, lease_share=0.5, lease_tenant_share=0.5)
    leases = bench.scheduler.leases
    bench.submit(1, prompt(40), max_tokens=1, breakpoints=((24, 600.0),))
    bench.step()
    assert [leases.num_blocks(tier) for tier in range(2)] == [6, 0]
    bench.finish()
    assert [leases.num_blocks(tier) for tier in range(2)] == [0, 6]
    for seq in range(2, 12):
        bench.ask(seq, prompt(40, seq), max_tokens=1)
    assert [held(bench, tier, prompt(40)) for tier in ("device", "disk")] == [0, 6]
    assert bench.ask(20, prompt(24) + prompt(10, 20), max_tokens=1) == 24
    assert bench.of(20)[0].lease_read_tokens == 24
    assert counters(bench)["restored"] == 6


def test_a_lease_whose_blocks_were_torn_is_lost_and_ends_nothing_else() -> None:
    bench = make()
    bench.ask(1, prompt(40), max_tokens=1, breakpoints=((24, 600.0),))
    bench.forget_device()
    assert bench.scheduler.leases.num_blocks(1) == 6
    del bench.disk.files[split_digests(digests_of(prompt(40)))[2]]
    assert bench.ask(2, prompt(40), max_tokens=1) == 8
    assert bench.answer(2) == expected(prompt(40), 1)
    assert bench.scheduler.leases.counters.lost == 1


def test_what_is_leased_is_saved_before_what_is_not() -> None:
    bench = make()
    said: list[bytes] = []
    assert bench.tiers._saving is not None
    bench.tiers._saving.on_saved = lambda tier, digests, now: said.append(digests[0])
    for seq in range(3):
        bench.submit(seq, prompt(20, seq), max_tokens=1, breakpoints=((20, 60.0),) if seq == 2 else ())
    while bench.step():
        pass
    bench.settle()
    firsts = [split_digests(digests_of(prompt(20, seq)))[0] for seq in range(3)]
    assert said.index(firsts[2]) < said.index(firsts[1])


def test_a_request_that_wants_no_cache_is_neither_saved_nor_restored() -> None:
    bench = make()
    bench.ask(1, prompt(40), use_cache=False)
    assert counters(bench)["saved"] == 0
    bench.ask(2, prompt(40))
    bench.forget_device()
    assert bench.ask(3, prompt(40), use_cache=False) == 0
    assert counters(bench)["restored"] == 0


def test_the_index_is_told_the_fastest_tier_and_hears_when_a_block_is_in_none() -> None:
    bench = make(num_blocks=16, disk=12)
    digests = split_digests(digests_of(prompt(40)))
    bench.ask(1, prompt(40), max_tokens=1)
    bench.listen()
    assert {bench.told[digest] for digest in digests} == {"device"}
    bench.forget_device()
    bench.listen()
    assert [bench.told[digest] for digest in digests] == ["disk"] * 10
    bench.ask(2, prompt(20), max_tokens=1)
    bench.listen()
    assert [bench.told[digest] for digest in digests] == ["device"] * 5 + ["disk"] * 5
    for seq in range(3, 8):
        bench.ask(seq, prompt(48, seq), max_tokens=1)
        bench.listen()
    assert not bench.told.keys() & set(digests[5:])


def test_a_colliding_digest_below_is_neither_overwritten_nor_read() -> None:
    bench = make()
    bench.ask(1, prompt(20))
    bench.forget_device()
    before = dict(bench.disk.files)
    forged = digests_of(prompt(20))[: DIGEST_BYTES * 5]
    assert bench.ask(2, prompt(20, 7), digests=forged) == 0
    assert bench.answer(2) == expected(prompt(20, 7))
    assert {digest: bench.disk.files[digest] for digest in before} == before
    bench.check_contents()
