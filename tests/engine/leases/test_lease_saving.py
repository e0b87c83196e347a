"""Leases and restarts: what an engine promised, the next one keeps, within its own budgets and until the same time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from engine.leases.file import WRITE_INTERVAL_S
from engine.protocol import split_digests
from engine.tiers.tier import PAUSE_S
from tests.fakes.scheduler_bench import SIZE, digests_of, expected, prompt
from tests.fakes.tier_bench import FakeDisk, TierBench, make


class Lives:
    """Engines one after the other over one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path / "namespace"
        self.files = FakeDisk()
        self.wall = 1.7e9
        self.benches: list[TierBench] = []

    def start(self, *, settle: bool = True, disk: int = 64, at: float = 5.0, **changes: object) -> TierBench:
        began = self.wall - at
        bench = make(
            disk=disk,
            files=self.files,
            leases=self.path,
            wall=lambda now: began + now,
            prefixes=self.benches[0].runner.prefixes if self.benches else None,
            **changes,  # type: ignore[arg-type]
        )
        bench.now = at
        self.benches.append(bench)
        if settle:
            bench.settle()
            assert bench.tiers.ready
        return bench

    def pass_time(self, bench: TierBench, seconds: float) -> None:
        """As an idle engine lives through it."""
        bench.now += seconds
        self.wall += seconds
        bench.scheduler.leases.expire(bench.now)
        bench.tiers.pump(bench.now)
        bench.settle()

    def kill(self, bench: TierBench) -> None:
        self.wall += bench.now  # more than passed


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path)


def flood(bench: TierBench) -> None:
    """Others want every block of every tier."""
    for tier in reversed(bench.tiers.tiers):
        tier.pool.release(tier.pool.allocate(tier.pool.available) or [])
        if tier.number:
            bench.tiers._account.note(tier)
    bench.settle()


def kept(bench: TierBench) -> list[tuple[int, int]]:
    """Tokens and tier of what is kept."""
    return sorted((lease.tokens, lease.tier) for lease in bench.scheduler.leases if lease.state == "kept")


def lease(bench: TierBench, length: int, kind: int = 0, ttl_s: float = 1000.0, tenant: str = "t") -> None:
    bench.ask(100 + kind, prompt(length, kind), breakpoints=((length, ttl_s),), tenant=tenant, max_tokens=1)
    bench.tiers.pump(bench.now)
    bench.settle()


def test_a_leased_prefix_is_read_after_a_restart_and_a_flood(lives: Lives) -> None:
    first = lives.start()
    lease(first, 42)
    first.ask(2, prompt(42, 1), max_tokens=1)
    lives.pass_time(first, WRITE_INTERVAL_S)
    lives.kill(first)

    second = lives.start(at=3.0)
    assert second.scheduler.leases.counters.restored == 1
    assert kept(second) == [(42, 1)]
    flood(second)
    assert second.ask(3, prompt(42) + [1] * 8) == 40
    assert second.of(3)[0].lease_read_tokens == 42
    assert second.ask(4, prompt(42, 1) + [1] * 8) == 0, "what was not leased is gone"
    assert second.answer(3) == expected(prompt(42) + [1] * 8)
    second.check_contents()


def test_a_lease_ends_when_it_would_have_ended_and_a_use_renews_it(lives: Lives) -> None:
    first = lives.start()
    lease(first, 12, 0, ttl_s=100.0)
    lease(first, 12, 1, ttl_s=100.0)
    lives.pass_time(first, 60.0)
    lives.wall += 10.0
    second = lives.start(at=7777.0)
    assert second.ask(5, prompt(12, 1) + [1] * 8) == 12
    assert second.scheduler.leases.counters.renewed == 1
    lives.pass_time(second, 40.0)
    assert (kept(second), second.scheduler.leases.counters.expired) == ([(12, 1)], 1)
    third = lives.start(at=0.0)
    (one,) = third.scheduler.leases
    assert 59.0 < one.expires_s < 61.0, "the renewal was written"


def test_what_is_over_at_the_start_is_forgotten(lives: Lives) -> None:
    first = lives.start()
    lease(first, 12, ttl_s=50.0)
    lives.wall += 51.0
    second = lives.start()
    assert len(second.scheduler.leases) == 0
    assert list(lives.path.iterdir()) == []


def test_a_prefix_shorter_than_a_block_is_promised_too(lives: Lives) -> None:
    first = lives.start()
    lease(first, 3)
    lives.pass_time(first, WRITE_INTERVAL_S)
    second = lives.start()
    second.ask(5, prompt(3) + [1] * 8)
    assert second.of(5)[0].lease_read_tokens == 3


def test_of_two_prefixes_that_end_in_one_block_both_are_kept_to_the_token(lives: Lives) -> None:
    first = lives.start()
    lease(first, 9)
    first.ask(2, prompt(10), breakpoints=((10, 1000.0),), tenant="u", max_tokens=1)
    lives.pass_time(first, WRITE_INTERVAL_S)
    second = lives.start()
    assert kept(second) == [(9, 1), (10, 1)]
    second.ask(5, [*prompt(9), 49, 48])
    assert second.of(5)[0].lease_read_tokens == 9


def test_a_lease_whose_blocks_are_gone_or_not_its_own_is_lost_and_the_start_goes_on(lives: Lives) -> None:
    first = lives.start()
    for kind in range(3):
        lease(first, 12, kind)
    lives.pass_time(first, WRITE_INTERVAL_S)
    del lives.files.files[split_digests(digests_of(prompt(12, 0)))[1]]
    second = lives.start()
    assert (len(kept(second)), second.scheduler.leases.counters.lost) == (2, 1)
    assert [one.tokens for one in second.scheduler.leases] == [12, 12]


def test_what_exceeds_the_budgets_of_the_new_engine_degrades_the_least_valuable_first(lives: Lives) -> None:
    first = lives.start(lease_share=1.0, lease_tenant_share=1.0)
    for kind in range(4):
        lease(first, 12, kind, ttl_s=1000.0, tenant="tu"[kind % 2])
        lives.pass_time(first, 50.0)
    second = lives.start(disk=24, lease_share=0.3, lease_tenant_share=0.15)  # 7 blocks, of one tenant 3
    assert second.scheduler.leases.num_blocks(1) == 6
    state = {one.digest: one.state for one in second.scheduler.leases}
    states = [state[split_digests(digests_of(prompt(12, kind)))[-1]] for kind in range(4)]
    assert states == ["degraded", "degraded", "kept", "kept"]
    counters = second.scheduler.leases.counters
    assert (counters.restored, counters.degraded) == (2, 2)
    assert second.scheduler.leases.check_invariants() == []


def test_no_more_leases_are_entered_than_the_new_engine_remembers(lives: Lives) -> None:
    first = lives.start(lease_share=1.0, lease_tenant_share=1.0)
    for kind in range(4):
        lease(first, 12, kind)
        lives.pass_time(first, 50.0)
    second = lives.start(max_leases=2, lease_share=1.0, lease_tenant_share=1.0)
    last = {split_digests(digests_of(prompt(12, kind)))[-1] for kind in (2, 3)}
    assert {one.digest for one in second.scheduler.leases} == last
    assert second.scheduler.leases.counters.dropped == 2


def test_nothing_is_evicted_or_written_before_the_leases_are_kept_again(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.tiers.upkeep.ADOPT_AT_ONCE", 3)
    monkeypatch.setattr("engine.tiers.upkeep.LEASES_AT_ONCE", 1)
    first = lives.start(disk=12, lease_share=1.0, lease_tenant_share=1.0)
    for kind in range(4):
        lease(first, 12, kind)
    lives.pass_time(first, WRITE_INTERVAL_S)
    (path,) = lives.path.iterdir()
    left = path.read_bytes()

    second = lives.start(settle=False, disk=12, lease_share=1.0, lease_tenant_share=1.0)
    worker, turns = second.workers["copy-disk"], 0
    second.submit(1, prompt(20, 30), breakpoints=((20, 100.0),), max_tokens=1)
    while not second.tiers.ready:
        second.step()
        assert path.read_bytes() == left
        assert second.tiers.pools[1].evictions == 0
        assert worker.work()
        assert worker.deliver()
        turns += 1
    assert turns == 1 + 3 + 3
    second.finish()
    assert len([one for one in kept(second) if one == (12, 1)]) >= 3
    lives.pass_time(second, WRITE_INTERVAL_S)
    assert path.read_bytes() != left


def test_a_lease_that_is_asked_for_again_while_the_start_goes_on_is_one(lives: Lives) -> None:
    first = lives.start()
    lease(first, 12, ttl_s=500.0)
    lives.pass_time(first, WRITE_INTERVAL_S)
    second = lives.start(settle=False)
    second.submit(1, prompt(12), breakpoints=((12, 50.0),), tenant="t", max_tokens=1)
    for _ in range(3):
        second.step()
    assert kept(second) == [(12, 0)]
    second.finish()
    (one,) = second.scheduler.leases
    assert (one.state, one.tier) == ("kept", 1)
    assert one.expires_s > second.now + 400.0
    assert second.scheduler.leases.check_invariants() == []


def test_changes_are_written_together_and_not_too_often(lives: Lives) -> None:
    bench = lives.start()
    written: list[float] = []
    file = bench.below.leases
    assert file is not None
    write = file.write
    file.write = lambda leases: (written.append(bench.now), write(leases))[1]  # type: ignore[method-assign]
    assert bench.tiers.next_s is None
    for number in range(200):
        bench.ask(number, prompt(12), breakpoints=((12, 1000.0),), max_tokens=1)
    assert len(written) >= 2
    assert all(later - sooner >= WRITE_INTERVAL_S for sooner, later in itertools.pairwise(written))
    due_s = bench.tiers.next_s
    assert due_s is not None
    bench.tiers.pump(due_s)
    bench.settle()
    assert bench.tiers.next_s is None, "nothing has changed since"


def test_what_changed_last_is_written_when_the_engine_stops(lives: Lives) -> None:
    first = lives.start()
    lease(first, 12, 0)
    lease(first, 16, 1)
    assert first.tiers.next_s is not None, "it is too early to write again"
    first.tiers.close()
    second = lives.start()
    assert kept(second) == [(12, 1), (16, 1)]


def test_an_engine_that_stops_before_its_start_is_over_leaves_what_it_found(lives: Lives) -> None:
    first = lives.start()
    lease(first, 12)
    first.tiers.close()
    second = lives.start(settle=False)
    assert second.workers["copy-disk"].work()
    second.tiers.close()
    assert kept(lives.start()) == [(12, 1)]


def test_a_folder_that_cannot_be_written_costs_a_warning_and_is_tried_again(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = lives.start()
    with monkeypatch.context() as patch:
        patch.setattr("engine.leases.file.write_file", lambda *values: 1 / 0)
        lease(bench, 12)
        assert bench.tiers.next_s is not None
        assert bench.tiers.next_s >= bench.now + PAUSE_S - 1
    bench.tiers.pump(bench.now + PAUSE_S - 1)
    bench.settle()
    assert not lives.path.exists()
    bench.tiers.pump(bench.now + PAUSE_S + 1)
    bench.settle()
    assert len(list(lives.path.iterdir())) == 1


def test_a_lease_that_is_only_above_is_not_written(lives: Lives) -> None:
    bench = lives.start(disk=16, lease_share=0.5, lease_tenant_share=0.5)
    lease(bench, 10 * SIZE)  # too much for the disk's share
    assert kept(bench) == [(10 * SIZE, 0)]
    lives.pass_time(bench, WRITE_INTERVAL_S)
    assert not lives.path.exists() or not list(lives.path.iterdir())
