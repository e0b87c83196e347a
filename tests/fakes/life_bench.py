"""An engine with all its tiers, from start to start, driven by hand: scheduler, leases, files.

The stores below are the real ones, the model is the oracle: the bytes of a block are what it remembers of each slot,
the whole prefix with namespace and salt. Copies are made when a test says so and can be interrupted at each block, so
that whatever the engine may do while a thread copies can be done there. A killed engine leaves its files behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineSettings
from engine.pool.blocks import BlockPool
from engine.pool.eviction import EvictionPolicy, LeastRecentlyUsed
from engine.protocol import TOKEN_BYTES, Namespace, chain_digests
from engine.scheduler import Scheduler
from engine.sequence import StepGivenUp
from engine.tiers.copying import BlockKey, Payload, Store
from engine.tiers.disk_store import DiskStore, Scan
from engine.tiers.tier import Lasting
from engine.tiers.tiers import Tier, Tiers
from tests.fakes.oracle_runner import GARBAGE, OracleRunner, Prefixes
from tests.fakes.scheduler_bench import SIZE, VOCAB, pack
from tests.fakes.tier_bench import ManualWorker, TieredBench
from tests.fakes.tuned import PATIENT, tuned

BLOCK_BYTES = SIZE * 8
Row = tuple[int | tuple[int, int] | None, ...]
"""What the slots of one block hold."""


class Killed(BaseException):
    """The process of a copy is gone."""


class Whim(LeastRecentlyUsed):
    """Evicts any leaf: what is sound under this policy is sound under all."""

    def __init__(self, num_blocks: int, rng: random.Random) -> None:
        super().__init__(num_blocks)
        self._rng = rng

    def pop(self) -> int:
        block = self._rng.choice([block for block, is_leaf in enumerate(self._candidate) if is_leaf])
        self.discard(block)
        return block


def encode(rows: Sequence[Row]) -> Payload:
    numbers = [[0 if slot is None else -1 if slot == GARBAGE else slot + 1 for slot in row] for row in rows]  # type: ignore[operator]
    return np.array(numbers, np.int64).reshape(len(rows), SIZE).view(np.uint8)


def decode(payload: Payload) -> list[Row]:
    numbers = np.ascontiguousarray(payload).view(np.int64).tolist()
    return [tuple(None if n == 0 else GARBAGE if n < 0 else n - 1 for n in row) for row in numbers]


@dataclass
class SlotStore:
    """The model's own blocks, as bytes."""

    runner: OracleRunner

    def rows(self, blocks: Sequence[int]) -> list[Row]:
        return [tuple(self.runner.slots.get((block, offset)) for offset in range(SIZE)) for block in blocks]

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        return encode(self.rows(slots))

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        for block, row in zip(slots, decode(payload), strict=True):  # whatever is there: the reader finds out
            for offset, slot in enumerate(row):
                if slot is None:
                    self.runner.slots.pop((block, offset), None)
                else:
                    self.runner.slots[block, offset] = slot

    def drop(self, digests: Sequence[bytes]) -> None:
        raise AssertionError("the first tier drops nothing")


@dataclass
class Slow:
    """A store during whose calls time passes, block by block, and which fails on demand."""

    inner: Store
    meanwhile: Callable[[], None]
    fails: bool = False

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        self._pass_time()
        rows = self.inner.read(slots, keys)
        self._pass_time()
        return rows

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        for number in range(len(slots)):
            self._pass_time()
            one = slice(number, number + 1)
            self.inner.write(slots[one], keys[one], payload[one])
            self.wrote(keys[number])

    def drop(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.meanwhile()
            self.inner.drop([digest])

    def wrote(self, key: BlockKey) -> None:
        """A block was written."""

    def _pass_time(self) -> None:
        self.meanwhile()
        if self.fails:
            raise OSError("the fake device fails")


@dataclass
class Folder:
    """The files, which outlive every engine.

    sound     path -> model and identity of what was written there, unless it was damaged since
    """

    path: Path
    sound: dict[str, tuple[str, BlockKey]] = field(default_factory=dict)
    wall: float = 1.7e9  # Unix second at which the present engine began

    def files(self) -> list[Path]:
        return sorted(self.path.rglob("*.kv"))


@dataclass
class SlowDisk(Slow):
    folder: Folder = field(kw_only=True)
    model: str = field(kw_only=True)
    store: DiskStore = field(kw_only=True)

    def wrote(self, key: BlockKey) -> None:
        self.folder.sound[self.store._path(key.digest)] = self.model, key

    def drop(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            super().drop([digest])
            self.folder.sound.pop(self.store._path(digest), None)

    def scan(self, most: int, budget_bytes: int, max_age_s: float, leased: Collection[bytes]) -> Scan:
        self.meanwhile()
        found = self.store.scan(most, budget_bytes, max_age_s, leased)
        own = self.store._own
        kin = [path for path in self.folder.path.glob(f"{own.name[:32]}*") if path != own]  # other engines of the model
        files = [path for path in self.folder.files() if not any(folder in path.parents for folder in kin)]
        taken = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
        assert taken <= budget_bytes, f"{taken} bytes are left on a disk that may have {budget_bytes}"
        self.folder.sound = {path: held for path, held in self.folder.sound.items() if Path(path).exists()}
        self.meanwhile()
        return found


class Hands(ManualWorker):
    """A worker that may be in the middle of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False

    @property
    def has_jobs(self) -> bool:
        return self.busy or bool(self.jobs or self.done)

    def work(self) -> bool:
        if self.busy:
            return False
        self.busy = True
        try:
            return super().work()
        except Killed:
            return False
        finally:
            self.busy = False


@dataclass
class LifeBench(TieredBench):
    """One life of an engine. `aside` is called while a step is computed: the copies go on then."""

    namespace: Namespace = None  # type: ignore[assignment]
    disk: SlowDisk = None  # type: ignore[assignment]
    workers: Mapping[str, Hands] = field(default_factory=dict)
    aside: Callable[[], None] = lambda: None

    def digests(self, tokens: list[int], salt: str) -> bytes:
        return chain_digests(replace(self.namespace, salt=salt).root(), pack(tokens), SIZE)

    def step(self) -> bool:
        """One turn of the loop, but for its commands. False when there was nothing to compute."""
        self.now += 0.010
        step = self.scheduler.schedule(self.now)
        if step is not None:
            self.aside()
            if self.gives_up and self.scheduler.can_give_up(step):
                step = replace(step, unwanted=lambda: True)
            try:
                results = self.runner.run(step)
            except StepGivenUp:
                self.aside()
                self.scheduler.give_up(step)
            except RuntimeError:
                self.scheduler.fail(step, "failed")
            else:
                self.aside()
                self.scheduler.commit(step, results, self.now + 0.005)
        self.tiers.pump(self.now, steps_run=step is not None and self.scheduler.has_work)
        if step is None and self.scheduler.has_work and self.tiers.busy:
            assert any(worker.has_jobs for worker in self.workers.values()), "nothing runs, and nothing is waited for"
        self.collect()
        return step is not None

    def kill(self, folder: Folder) -> None:
        """The system closes its files; nothing else happens."""
        folder.wall += self.now
        self.disk.store.close()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check_counts(self) -> None:
        for tier in self.tiers.tiers:
            pool = tier.pool
            assert pool.check_invariants() == [], tier.name
            assert pool.num_free + pool.num_cached + pool.num_live == pool.num_blocks
        assert self.scheduler.leases.check_invariants() == []

    def check_contents(self) -> None:
        """Every block that can be found anywhere holds exactly its own prefix, damaged files aside."""
        for tier in self.tiers.tiers:
            prefixes: dict[int, int | str] = {}
            for digest, block in tier.pool.prefixes._by_digest.items():  # parents first
                row, prefixes[block] = self._expect(tier.pool, block, prefixes)
                found = self._contents(tier, block, digest)
                assert found is None or found == row, f"{tier.name} {block} holds something else"

    def _expect(self, pool: BlockPool, block: int, prefixes: dict[int, int | str]) -> tuple[Row, int | str]:
        parent = pool.prefixes.parent_of(block)
        prefix = self.runner.model + pool.prefixes._salt[block] if parent is None else prefixes[parent]
        row: list[int] = []
        for start in range(0, SIZE * TOKEN_BYTES, TOKEN_BYTES):
            token = int.from_bytes(pool.prefixes._tokens[block][start : start + TOKEN_BYTES], "little")
            prefix = self.runner.prefixes.next(prefix, token)
            row.append(prefix)
        return tuple(row), prefix

    def _contents(self, tier: Tier, block: int, digest: bytes) -> Row | None:
        """None for a file that was damaged."""
        if not tier.number:
            return SlotStore(self.runner).rows([block])[0]
        path = self.disk.store._path(digest)
        if path not in self.disk.folder.sound:
            return None
        file = Path(path).read_bytes()
        return decode(np.frombuffer(file[-16 - BLOCK_BYTES : -16], np.uint8).reshape(1, -1))[0]


def start(
    folder: Folder,
    prefixes: Prefixes,
    meanwhile: Callable[[LifeBench], None],
    *,
    weights: str,
    layout: str,
    blocks: int,
    disk: int,
    max_age_s: float,
    context_tokens: int,
    eos_ids: tuple[int, ...],
    queue_bytes: int,
    part_blocks: int,
    policy: Callable[[int], EvictionPolicy] | None = None,
    **changes: Any,
) -> LifeBench:
    """An engine with so many slots in each tier, over the files that earlier ones left. It has not looked at them yet.

    meanwhile  called whenever a copy can be interrupted
    policy     makes one for each tier, for so many blocks
    """
    policy = policy or LeastRecentlyUsed
    values: dict[str, Any] = {"block_size": SIZE, "step_tokens": 64, "max_sequences": 8, **PATIENT}
    config = tuned(EngineSettings, **(values | changes))
    namespace = Namespace(weights=weights, dtype="float32", kv_dtype="float32", block_size=SIZE)
    model = f"{weights} {layout} "
    pool = BlockPool(blocks, SIZE, policy(blocks))
    runner = OracleRunner(pool, VOCAB, config.step_tokens, model)
    runner.prefixes = prefixes
    bench: LifeBench

    def pause() -> None:
        meanwhile(bench)

    device = Tier("device", pool, Slow(SlotStore(runner), pause), BLOCK_BYTES)
    files = DiskStore(folder.path, namespace, layout, BLOCK_BYTES)
    store = SlowDisk(files, pause, folder=folder, model=model, store=files)
    scan = partial(store.scan, disk, disk * files.file_bytes, max_age_s)
    began = folder.wall
    leases = files.lease_file(clock=lambda: bench.now, wall=lambda: began + bench.now)
    order = policy(disk)
    lasting = Lasting(files, order, max_age_s) if type(order) is LeastRecentlyUsed else None
    below = Tier("disk", BlockPool(disk, SIZE, order), store, files.file_bytes, scan, leases, lasting=lasting)
    tiers = Tiers(device, below, queue_bytes=queue_bytes, part_blocks=part_blocks)
    scheduler = Scheduler(
        pool, namespace, config, context_tokens=context_tokens, vocab_size=VOCAB, eos_ids=eos_ids, tiers=tiers
    )
    bench = LifeBench(pool, scheduler, runner, namespace=namespace, tiers=tiers, disk=store)
    tiers.start(lambda name: bench.workers.setdefault(name, Hands()))
    return bench
