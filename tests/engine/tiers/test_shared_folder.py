"""Several engines over one folder of blocks: none loses what it keeps, whatever the others do, start or end."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.leases.file import WRITE_INTERVAL_S
from engine.protocol import Namespace, chain_digests, split_digests
from engine.tiers import disk_folders
from engine.tiers.copying import BlockKey
from engine.tiers.disk_store import DiskStore
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


@pytest.mark.slow
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


def test_engines_whose_folder_was_deleted_go_on_in_one_of_their_own(tmp_path: Path) -> None:
    with fleet(tmp_path / "blocks") as engines:
        for number in (0, 1):
            engines.start(number).settle()
            engines.ask(number, number, 24, ttl_s=9e3)
            engines.rest(number)
        shutil.rmtree(tmp_path / "blocks")
        for number in (0, 1):
            engines.ask(number, 10 + number, 24)
        engines.kill(1)
        engines.start(1).settle()
        for number in (0, 1):
            engines.flood(number)
            assert engines.ask(number, 10 + number, 24 + SIZE) == 24
        assert len({engine.disk.store._own for engine in engines.engines.values()}) == 2


SALTS = ("a", "b")


class Stores:
    """Three stores over one folder, and what must be in each engine's folder by now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stores: list[DiskStore | None] = [None] * 3
        self.files: dict[Path, set[bytes]] = {}

    def keys(self, salt: str, kind: int) -> list[BlockKey]:
        """Of three blocks."""
        packed, width = array("I", prompt(3 * SIZE, kind)).tobytes(), SIZE * 4
        namespace = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=SIZE, salt=salt)
        digests = split_digests(chain_digests(namespace.root(), packed, SIZE))
        parents = [None, *digests]
        tokens = [packed[start : start + width] for start in range(0, len(packed), width)]
        return [BlockKey(digests[i], parents[i], i, salt, tokens[i]) for i in range(3)]

    def own(self, store: DiskStore) -> set[bytes]:
        assert not disk_folders.is_abandoned(store._own)
        return self.files.setdefault(store._own, set())

    def start(self, number: int, most: int = 100) -> None:
        """Takes over what is whole."""
        self.stop(number)
        namespace = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=SIZE)
        store = self.stores[number] = DiskStore(self.path, namespace, "8", 8)
        found = {key.digest for key in store.scan(most, 1 << 30, 86400.0).found}
        own, whole = self.own(store), set[bytes]()
        for key in (key for salt in SALTS for kind in range(3) for key in self.keys(salt, kind)):
            if key.digest in own and (key.parent is None or key.parent in whole):
                whole.add(key.digest)
        assert found <= whole
        assert len(found) == min(most, len(whole))
        self.files[store._own] = found

    def stop(self, number: int) -> None:
        if (store := self.stores[number]) is not None:
            store.close()
        self.stores[number] = None

    def write(self, store: DiskStore, salt: str, kind: int) -> None:
        keys = self.keys(salt, kind)
        store.write([0] * 3, keys, self.rows(keys))
        self.own(store).update(key.digest for key in keys)

    def read(self, store: DiskStore, salt: str, kind: int) -> None:
        keys = self.keys(salt, kind)
        rows, there = store.read([0] * 3, keys), [key.digest in self.own(store) for key in keys]
        assert len(rows) == [*there, False].index(False)
        assert (rows == self.rows(keys)[: len(rows)]).all()

    def rows(self, keys: list[BlockKey]) -> np.ndarray:
        return np.array([list(key.digest[:8]) for key in keys], np.uint8)

    def drop(self, store: DiskStore, salt: str, kind: int) -> None:
        store.drop([self.keys(salt, kind)[2].digest])
        self.own(store).discard(self.keys(salt, kind)[2].digest)

    def purge(self, store: DiskStore, salt: str) -> None:
        """Of this engine's blocks, and everything of engines that are gone."""
        held = {other._claimed.path for other in self.stores if other and other._claimed and other._claimed.is_held}
        digests = {key.digest for kind in range(3) for key in self.keys(salt, kind)}
        assert set(store.find_own()) == self.own(store)
        store.remove(sorted(digests))
        self.own(store).difference_update(digests)
        for part in store.find_parts():
            assert (store.expire(part, float("-inf")).owner is not None) == (Path(part.folder) in held)
        for path in self.files.keys() - held:
            self.files[path].clear()

    def delete(self, store: DiskStore, what: str) -> None:
        """By somebody else."""
        own = store._own
        if what == "all":
            shutil.rmtree(self.path)
            self.files.clear()
        elif what == "own":
            shutil.rmtree(own)
            self.files.pop(own, None)
        elif what == "lock":
            (own / "lock").unlink()
        elif what == "choice":
            (self.path / "lock").unlink(missing_ok=True)
        else:
            for file in sorted(own.rglob("*.kv"))[:1]:
                file.unlink()
                self.files[own].remove(bytes.fromhex(file.stem))


KIND = (st.sampled_from(SALTS), st.integers(0, 2))
ACT = st.one_of(
    st.tuples(st.just("write"), *KIND),
    st.tuples(st.just("read"), *KIND),
    st.tuples(st.just("drop"), *KIND),
    st.tuples(st.just("purge"), KIND[0]),
    st.tuples(st.just("delete"), st.sampled_from(["all", "own", "lock", "choice", "file"])),
    st.tuples(st.just("start"), st.sampled_from([100, 2])),
    st.tuples(st.just("stop")),
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(st.tuples(st.integers(0, 2), ACT), min_size=5, max_size=40))
def test_whatever_others_do_or_delete_a_store_has_what_it_wrote_and_a_folder_of_its_own(
    tmp_path_factory: object, acts: list[tuple[int, tuple[object, ...]]]
) -> None:
    stores = Stores(tmp_path_factory.mktemp("blocks") / "shared")  # type: ignore[attr-defined]
    for number in range(3):
        stores.start(number)
    for number, (name, *values) in acts:
        store = stores.stores[number]
        if name in ("start", "stop"):
            getattr(stores, name)(number, *values)
        elif store is not None:
            getattr(stores, str(name))(store, *values)
    living = [store for store in stores.stores if store is not None]
    assert len({store._own for store in living}) == len(living)
    for store in living:
        for salt in SALTS:
            for kind in range(3):
                stores.read(store, salt, kind)
    for number in range(3):
        stores.stop(number)
