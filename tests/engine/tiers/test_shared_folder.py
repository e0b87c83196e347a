"""Several engines over one folder of blocks: none loses what it keeps, whatever the others do, start or end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.leases.file import WRITE_INTERVAL_S
from engine.protocol import split_digests
from tests.fakes.life_bench import Folder, LifeBench, start
from tests.fakes.oracle_runner import Prefixes
from tests.fakes.scheduler_bench import SIZE, prompt
from tests.fakes.tier_bench import ManualWorker


class Fleet:
    """Engines of one model over one folder, by number."""

    def __init__(self, path: Path, disk: int) -> None:
        self.folder, self.prefixes, self.disk = Folder(path), Prefixes(), disk
        self.engines: dict[int, LifeBench] = {}
        self.seq = 0

    def start(self, number: int) -> LifeBench:
        engine = self.engines[number] = start(
            self.folder,
            self.prefixes,
            lambda bench: None,
            weights="w",
            layout="8",
            blocks=20,
            host=0,
            disk=self.disk,
            max_age_s=86400.0,
            context_tokens=60,
            eos_ids=(),
            queue_bytes=1 << 20,
            part_blocks=4,
            lease_share=1.0,
            lease_tenant_share=1.0,
        )
        return engine

    def ask(self, number: int, kind: int, length: int, ttl_s: float | None = None) -> int:
        """Returns the cached tokens."""
        engine, tokens = self.engines[number], prompt(length, kind)
        self.seq += 1
        points = () if ttl_s is None else ((length, ttl_s),)
        engine.submit(self.seq, tokens, digests=engine.digests(tokens, ""), breakpoints=points, max_tokens=1)
        engine.finish()
        return engine.of(self.seq)[0].cached_tokens or 0

    def flood(self, number: int) -> None:
        pool = self.engines[number].pool
        pool.release(pool.allocate(pool.available) or [])

    def rest(self, number: int) -> None:
        """So long that leases are on disk."""
        engine = self.engines[number]
        engine.now += 2 * WRITE_INTERVAL_S
        engine.tiers.pump(engine.now)
        engine.settle()

    def kill(self, number: int) -> None:
        self.engines.pop(number).kill(self.folder)

    def check(self) -> None:
        """Each engine has all that it says it has, and lost no lease."""
        own = [engine.disk.store._own for engine in self.engines.values()]
        assert len(set(own)) == len(own)
        for engine in self.engines.values():
            tier = engine.tiers.tiers[-1]
            for digest in split_digests(tier.pool.prefixes.snapshot().stored):
                assert Path(engine.disk.store._path(digest)).exists(), "a file of this engine was deleted"
            engine.check_contents()
            engine.check_counts()
            assert (tier.counters.torn, engine.scheduler.leases.counters.lost) == (0, 0)


@contextmanager
def fleet(path: Path, disk: int = 60) -> Iterator[Fleet]:
    fleet = Fleet(path, disk)
    yield fleet
    for number in list(fleet.engines):
        fleet.kill(number)


def test_an_engine_that_starts_takes_neither_blocks_nor_leases_from_one_that_lives(tmp_path: Path) -> None:
    with fleet(tmp_path, disk=60) as engines:
        engines.start(0).settle()
        for kind in range(10):
            engines.ask(0, kind, 24, ttl_s=9e3)
        engines.disk = 15
        engines.start(1).settle()
        for kind in range(20, 30):
            engines.ask(1, kind, 24)
        engines.check()
        assert len(engines.engines[0].tiers.pools[-1].prefixes) == 60
        for kind in range(10):
            engines.flood(0)
            assert engines.ask(0, kind, 24 + SIZE) == 24
        assert engines.engines[0].scheduler.leases.counters.lost == 0


def test_engines_that_start_at_the_same_time_find_what_their_predecessors_left(tmp_path: Path) -> None:
    with fleet(tmp_path) as engines:
        for number in (0, 1):
            engines.start(number).settle()
            engines.ask(number, number, 40, ttl_s=9e3)
            engines.rest(number)
        for number in (0, 1):
            engines.kill(number)
        for number in (1, 0):  # in another order
            engines.start(number)
        for number in (1, 0):
            engines.engines[number].settle()
        assert [len(engines.engines[n].tiers.pools[-1].prefixes) for n in (0, 1)] == [10, 10]
        assert [engines.engines[n].scheduler.leases.counters.restored for n in (0, 1)] == [1, 1]


COMMAND = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 4), st.integers(4, 48), st.sampled_from([None, 9e3])),
    st.tuples(st.just("flood"), st.integers(0, 1)),
    st.tuples(st.just("restart"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1), st.integers(0, 4), st.integers(4, 48)),
    st.tuples(st.just("copy"), st.integers(0, 1)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(commands=st.lists(COMMAND, min_size=5, max_size=30), disk=st.sampled_from([6, 20, 60]))
def test_two_engines_whatever_they_do_lose_nothing_to_each_other(
    tmp_path_factory: object, commands: list[tuple[object, ...]], disk: int
) -> None:
    with fleet(tmp_path_factory.mktemp("blocks"), disk) as engines:  # type: ignore[attr-defined]
        for number in (0, 1):
            engines.start(number)
        for name, number, *values in commands:
            assert isinstance(number, int)
            engine = engines.engines[number]
            if name == "ask":
                engine.settle()
                engines.ask(number, *values)  # type: ignore[arg-type]
            elif name == "flood":
                engines.flood(number)
            elif name == "restart":
                engines.kill(number)
                engines.start(number)
            elif name == "step":
                kind, length = values
                tokens = prompt(length, kind)  # type: ignore[arg-type]
                engines.seq += 1
                engine.submit(engines.seq, tokens, digests=engine.digests(tokens, ""), max_tokens=2)
                engine.step()
            else:
                worker: ManualWorker = engine.workers["copy-disk"]
                worker.work()
                worker.deliver()
        for engine in engines.engines.values():
            engine.finish()
        engines.check()
