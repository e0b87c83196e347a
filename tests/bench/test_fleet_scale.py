"""A small fleet of the simulation of large ones: every request is answered, the index is what the caches are, and a
decision looks at few engines."""

from __future__ import annotations

import pytest

from gateway.queues.router import LoadSnapshot
from tests.bench import fleet_scale
from tests.bench.fleet_scale import Fleet


def test_a_fleet_is_routed_by_an_index_that_is_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With caches so small that they lose blocks."""
    monkeypatch.setattr(fleet_scale, "CACHE_BLOCKS", 4_096)
    monkeypatch.setattr(fleet_scale, "SLOTS", 16)
    fleet = Fleet(20, seed=1, busy=0.6)
    figures = fleet.run(5_000)
    assert figures.requests == 5_000
    assert len(fleet.online) == 0
    assert not [slots for slots in fleet.online.engine_slots.values() if slots.taken]
    for engine in fleet.engines:
        assert fleet.memory._held[engine.hello.incarnation] == set(engine.cache.blocks)
    assert figures.hit_blocks > 4 * figures.round_robin_blocks
    busy_s = [engine.busy_s for engine in fleet.engines]
    assert max(busy_s) < 2 * sum(busy_s) / len(busy_s), "no engine does the work of two"


def test_a_seed_is_one_run() -> None:
    runs = [Fleet(4, seed=seed).run(300) for seed in (1, 1, 2)]
    assert runs[0].hit_blocks == runs[1].hit_blocks != runs[2].hit_blocks
    assert runs[0].span_s == runs[1].span_s


@pytest.mark.parametrize("busy", [0.6, 4.0])
def test_a_decision_ranks_few_engines_however_many_there_are(monkeypatch: pytest.MonkeyPatch, busy: float) -> None:
    """Idle ones are equal in all but what they were given; in an overload many requests are looked at for one slot."""
    counts = {"ranks": 0, "choices": 0}
    rank, choose = LoadSnapshot._rank, LoadSnapshot.choose

    def counted(name: str, call: object) -> object:
        def counting(*args: object) -> object:
            counts[name] += 1
            return call(*args)  # type: ignore[operator]

        return counting

    monkeypatch.setattr(LoadSnapshot, "_rank", counted("ranks", rank))
    monkeypatch.setattr(LoadSnapshot, "choose", counted("choices", choose))
    figures = Fleet(64, seed=1, busy=busy).run(1_000)
    assert figures.requests == 1_000
    assert counts["choices"] >= 1_000
    assert counts["ranks"] < 12 * counts["choices"]
