"""Blocks on disk that nobody used for `disk_max_age_s` go: while the engine runs, at its start, and those of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.tiers.upkeep import AGED_AT_ONCE, NOTES
from tests.fakes.disk_engine import AGE_S, Engine, make_older
from tests.fakes.scheduler_bench import SIZE


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.check()
    made.kill()


def test_a_running_engine_gives_up_its_own_blocks_on_disk_that_nobody_used_for_so_long(engine: Engine) -> None:
    engine.ask(1)
    engine.wait(AGE_S - 1)
    assert engine.disk_blocks == engine.files == 5
    engine.wait(2)
    assert engine.disk_blocks == engine.files == 0
    assert engine.bench.tiers.stats()["disk"]["collected"] == 5


def test_an_idle_engine_wakes_for_it_and_not_before(engine: Engine) -> None:
    engine.ask(1)
    engine.pump()
    due_s = engine.bench.tiers.next_s
    assert due_s is not None
    assert due_s <= engine.bench.now + AGE_S
    engine.wait(10 * AGE_S)
    assert engine.disk_blocks == 0


def test_a_use_counts_also_where_no_file_is_read(engine: Engine) -> None:
    engine.ask(1)
    engine.ask(2)
    for _ in range(4):
        engine.wait(0.6 * AGE_S)
        assert engine.ask(1) == 4 * SIZE, "from where the model runs"
    assert engine.disk_blocks == engine.files == 5
    engine.wait(0.6 * AGE_S)
    engine.flood()
    assert engine.ask(1) == 4 * SIZE, "from disk"
    engine.wait(0.6 * AGE_S)
    assert engine.disk_blocks == 5, "that was a use, too"


def test_a_beginning_that_others_use_outlives_what_hangs_from_it(engine: Engine) -> None:
    engine.ask(1, 10 * SIZE)
    engine.wait(0.9 * AGE_S)
    engine.ask(1, 4 * SIZE)
    engine.wait(0.2 * AGE_S)
    assert engine.disk_blocks == engine.files == 4


def test_a_lease_keeps_its_prefix_past_that_age_until_it_ends(engine: Engine) -> None:
    engine.ask(1, ttl_s=2.5 * AGE_S)
    engine.ask(2)
    engine.wait(2 * AGE_S)
    assert engine.disk_blocks == engine.files == 5
    engine.flood()
    assert engine.ask(3) == 0
    engine.wait(0.4 * AGE_S)
    assert engine.disk_blocks == 10
    engine.wait(0.2 * AGE_S)
    assert engine.disk_blocks == 5, "the lease is over, and nobody has used it since"


def test_one_turn_gives_up_a_bounded_number(engine: Engine) -> None:
    engine.ask(1, (AGED_AT_ONCE + 20) * SIZE)
    bench, before = engine.bench, engine.disk_blocks
    bench.now += 2 * AGE_S
    bench.tiers.pump(bench.now)
    assert engine.disk_blocks == before - AGED_AT_ONCE
    assert bench.tiers.next_s is not None
    assert bench.tiers.next_s <= bench.now, "the next turn goes on at once"
    engine.pump()
    assert engine.disk_blocks == 0
    bench.settle()


def test_a_start_deletes_its_own_blocks_that_are_too_old_and_knows_the_age_of_the_others(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.ask(1)
    first.kill()
    make_older(tmp_path, 0.7 * AGE_S)
    second = Engine(tmp_path)
    assert second.disk_blocks == 5
    second.wait(0.2 * AGE_S)
    second.ask(2)
    assert second.disk_blocks == 10
    second.wait(0.2 * AGE_S)
    assert second.disk_blocks == second.files == 5, "0.7 before the start and 0.4 since"
    second.kill()
    make_older(tmp_path, 1.1 * AGE_S)
    third = Engine(tmp_path)
    assert third.disk_blocks == third.files == 0
    assert third.bench.tiers.stats()["disk"]["collected"] == 5
    third.kill()


def test_a_start_keeps_what_a_lease_of_the_last_run_promises_whatever_its_age(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.ask(1, ttl_s=30 * AGE_S)
    first.ask(2)
    first.wait(10)
    first.kill()
    make_older(tmp_path, 2 * AGE_S)
    second = Engine(tmp_path)
    assert second.disk_blocks == second.files == 5
    second.wait(2 * AGE_S)
    assert second.disk_blocks == 5
    assert second.ask(1) == 4 * SIZE
    second.kill()


def test_a_prefix_that_was_used_in_memory_alone_is_young_for_the_next_start(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.ask(1)
    make_older(tmp_path, 0.9 * AGE_S)
    first.wait(AGE_S / NOTES + 1)
    assert first.ask(1) == 4 * SIZE
    first.kill()
    make_older(tmp_path, 0.5 * AGE_S)
    second = Engine(tmp_path)
    assert second.disk_blocks == 5
    second.kill()


def test_a_file_of_a_clock_that_was_ahead_is_new(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.ask(1)
    first.kill()
    make_older(tmp_path, -100 * AGE_S)
    second = Engine(tmp_path)
    second.wait(0.9 * AGE_S)
    assert second.disk_blocks == 5
    second.wait(0.2 * AGE_S)
    assert second.disk_blocks == 0
    second.kill()


def test_a_running_engine_deletes_what_engines_left_that_are_gone_and_nothing_of_those_that_live(
    tmp_path: Path,
) -> None:
    gone, lives, kin = Engine(tmp_path, weights="gone"), Engine(tmp_path, weights="lives"), Engine(tmp_path)
    own = Engine(tmp_path)
    for other in (gone, lives, kin):
        other.ask(1)
    left = [engine.bench.disk.store._own for engine in (gone, kin)]
    gone.kill()
    kin.kill()
    assert len(list(tmp_path.rglob("*.kv"))) == 15
    make_older(tmp_path, 1.1 * AGE_S)
    own.wait(0.2 * AGE_S)
    assert lives.files == lives.disk_blocks == 5
    assert len(list(tmp_path.rglob("*.kv"))) == 5, "of another model, and of another engine of this model"
    assert own.bench.tiers.stats()["disk"]["collected"] == 10
    assert not any(folder.exists() for folder in left), "empty folders go too"
    for engine in (own, lives):
        engine.check()
        engine.kill()
