"""A scheduler over a device and a disk with a fake model, driven by hand: every copy happens when a test says so.

The bytes of a block are what the oracle model remembers of it, the whole prefix of each slot, so whoever copies the
wrong block, too early or over somebody else's fails at the next read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EngineSettings
from engine.leases.file import LeaseFile
from engine.pool.blocks import BlockPool
from engine.protocol import split_digests
from engine.scheduler import Scheduler
from engine.sequence import Step
from engine.tiers.copying import BlockKey
from engine.tiers.disk_store import Scan
from engine.tiers.restoring import Restoring
from engine.tiers.tiers import Tier, Tiers
from tests.fakes.oracle_runner import OracleRunner, Prefixes
from tests.fakes.scheduler_bench import NAMESPACE, SIZE, VOCAB, Bench
from tests.fakes.tuned import PATIENT, tuned


class ManualWorker:
    """Does a job when told to, and tells of it when told to."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], object]]] = deque()
        self.done: deque[Callable[[], object]] = deque()

    def run(self, job: Callable[[], Any], done: Callable[[Any], object]) -> None:
        self.jobs.append((job, done))

    def close(self, last: Callable[[], object] | None = None) -> None:
        self.jobs.clear()
        self.done.clear()
        if last is not None:
            last()

    def work(self) -> bool:
        """Does the next job. False when there is none."""
        if not self.jobs:
            return False
        job, done = self.jobs.popleft()
        result = job()
        self.done.append(lambda: done(result))
        return True

    def deliver(self) -> bool:
        """Tells of the next job that was done."""
        if not self.done:
            return False
        self.done.popleft()()
        return True


def restoring(tiers: Tiers) -> Restoring:
    assert tiers._restoring is not None
    return tiers._restoring


@dataclass
class WatchedRunner(OracleRunner):
    """The oracle model, which also sees to it that no step touches what a copy is writing."""

    tiers: Tiers = None  # type: ignore[assignment]

    def run(self, step: Step) -> list[int | None]:
        written = {block for job in restoring(self.tiers).jobs for block in job.blocks}
        assert not written.intersection(step.fresh_blocks), "a block that is being restored would be zeroed"
        return super().run(step)


@dataclass
class FakeCache:
    """The store of the model's own blocks."""

    runner: OracleRunner

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Any:
        return [tuple(self.runner.slots.get((block, offset)) for offset in range(SIZE)) for block in slots]

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Any) -> None:
        for block, contents in zip(slots, payload, strict=True):  # whatever is there: the reader finds out
            for offset, content in enumerate(contents):
                self.runner.slots[block, offset] = content

    def drop(self, digests: Sequence[bytes]) -> None:
        raise AssertionError("the first tier drops nothing")


@dataclass
class FakeDisk:
    """Files by digest, which outlive the bench that wrote them. `fails` is also a disk that is full."""

    files: dict[bytes, tuple[BlockKey, Any]] = field(default_factory=dict)
    torn: set[bytes] = field(default_factory=set)  # by the test, and not written again since
    fails: bool = False

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Any:
        if self.fails:
            raise OSError("the fake disk fails")
        rows = []
        for key in keys:
            held, row = self.files.get(key.digest, (None, None))
            if held != key:
                self.files.pop(key.digest, None)
                break
            rows.append(row)
        return rows

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Any) -> None:
        for key, row in zip(keys, payload, strict=True):
            if self.fails:
                raise OSError("the fake disk fails")
            self.files[key.digest] = key, row
            self.torn.discard(key.digest)

    def drop(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.files.pop(digest, None)

    def scan(self, leased: Collection[bytes]) -> Scan:
        keys = sorted((key for key, _ in self.files.values()), key=lambda key: key.index)
        whole: dict[bytes, BlockKey] = {}
        for key in keys:
            if key.parent is None or key.parent in whole:
                whole[key.digest] = key
            else:
                del self.files[key.digest]
        return Scan([*whole.values()], [0.0] * len(whole), len(keys) - len(whole), 0)


@dataclass
class TieredBench(Bench):
    """A Bench whose engine has tiers below its pool, and copies that are made when somebody says so."""

    tiers: Tiers = None  # type: ignore[assignment]
    workers: Mapping[str, ManualWorker] = field(default_factory=dict)
    told: dict[bytes, str] = field(default_factory=dict)  # what a gateway believes: digest -> tier

    @property
    def below(self) -> Tier:
        assert self.tiers.disk is not None
        return self.tiers.disk

    def settle(self, limit: int = 5000) -> None:
        """Does and tells all copies, and whatever follows from them; computes nothing."""
        while any(worker.work() or worker.deliver() for worker in self.workers.values()) or self.tiers.pump_wanted:
            self.tiers.pump(self.now)
            limit -= 1
            assert limit, "the copies never end"
        assert self.tiers.idle
        assert self.tiers.check_invariants() == []

    def finish(self, limit: int = 5000) -> None:
        """Runs everything to its end, copies included."""
        while self.step() or self.scheduler.has_work or not self.tiers.idle:
            for worker in self.workers.values():
                worker.work()
                worker.deliver()
            limit -= 1
            assert limit, "the scheduler makes no progress"
        self.settle()
        assert (self.pool.num_live, len(self.scheduler.tables), self.scheduler.num_waiting) == (0, 0, 0)
        assert not len(self.scheduler.claims)

    def listen(self) -> None:
        """Applies events as a gateway does, and compares what it believes with what is there."""
        for events in self.tiers.residency.take():
            for digest in split_digests(events.removed):
                self.told.pop(digest, None)
            for digest in split_digests(events.stored):
                self.told[digest] = events.tier
        held: dict[bytes, str] = {}
        for tier in reversed(self.tiers.tiers):
            held |= dict.fromkeys(split_digests(tier.pool.prefixes.snapshot().stored), tier.name)
        wrong = {digest.hex()[:8]: (self.told.get(digest), held.get(digest)) for digest in self.told | held}
        wrong = {digest: pair for digest, pair in wrong.items() if pair[0] != pair[1]}
        assert not wrong, f"told and held: {wrong}"


@dataclass
class TierBench(TieredBench):
    """Over fake stores."""

    disk: FakeDisk = field(default_factory=FakeDisk)

    def step(self) -> bool:
        busy = super().step()
        self.tiers.pump(self.now)
        return busy

    def ask(self, seq: int, tokens: list[int], **options: Any) -> int:
        """One sequence from start to end; returns its cached tokens."""
        self.submit(seq, tokens, **options)
        self.finish()
        return self.of(seq)[0].cached_tokens or 0

    def forget_device(self) -> None:
        """Evicts everything that the first tier has cached."""
        blocks = self.pool.allocate(self.pool.available)
        assert blocks is not None
        self.pool.release(blocks)

    def check_contents(self) -> None:
        """Every block that can be found anywhere holds exactly its own prefix, torn files aside."""
        for tier in self.tiers.tiers:
            pool = tier.pool
            prefixes: dict[int, int | str] = {}
            for digest in split_digests(pool.prefixes.snapshot().stored):  # parents first
                block = pool.prefixes.find_block(digest)
                assert block is not None
                parent = pool.prefixes.parent_of(block)
                prefix: int | str = pool.prefixes._salt[block] if parent is None else prefixes[parent]
                expected = []
                for offset in range(SIZE):
                    token = int.from_bytes(pool.prefixes._tokens[block][4 * offset : 4 * offset + 4], "little")
                    prefix = self.runner.prefixes.next(prefix, token)
                    expected.append(prefix)
                prefixes[block] = prefix
                if tier.name != "disk" or digest not in self.disk.torn:
                    assert self._contents(tier, block, digest) == tuple(expected), f"{tier.name} {block}"

    def _contents(self, tier: Tier, block: int, digest: bytes) -> Any:
        if tier.name == "device":
            return FakeCache(self.runner).read([block], [])[0]
        held = self.disk.files.get(digest)
        return None if held is None else held[1]


def make(
    num_blocks: int = 64,
    *,
    disk: int = 64,
    files: FakeDisk | None = None,
    leases: Path | None = None,
    wall: Callable[[float], float] = lambda now: now,
    prefixes: Prefixes | None = None,
    context_tokens: int = 1000,
    eos_ids: tuple[int, ...] = (),
    queue_bytes: int = 1 << 20,
    part_blocks: int = 64,
    **changes: Any,
) -> TierBench:
    """A bench with so many slots in each tier. `files` and `prefixes` are what an earlier one left; such files have not
    been looked through yet.

    leases  folder of what is leased on disk
    wall    Unix second at a second of this bench
    """
    values: dict[str, Any] = {"block_size": SIZE, "step_tokens": 64, "max_sequences": 8, **PATIENT}
    config = tuned(EngineSettings, **(values | changes))
    pool = BlockPool(num_blocks, SIZE)
    runner = WatchedRunner(pool, VOCAB, config.step_tokens)
    runner.prefixes = prefixes or runner.prefixes
    store = files or FakeDisk()
    bench: TierBench
    file = leases and LeaseFile(lambda: leases, b"w", clock=lambda: bench.now, wall=lambda: wall(bench.now))
    below = Tier("disk", BlockPool(disk, SIZE), store, 1, store.scan, file)
    device = Tier("device", pool, FakeCache(runner), 1)
    tiers = Tiers(device, below, queue_bytes=queue_bytes, part_blocks=part_blocks)
    runner.tiers = tiers
    scheduler = Scheduler(
        pool, NAMESPACE, config, context_tokens=context_tokens, vocab_size=VOCAB, eos_ids=eos_ids, tiers=tiers
    )
    bench = TierBench(pool, scheduler, runner, tiers=tiers, disk=store)
    tiers.start(lambda name: bench.workers.setdefault(name, ManualWorker()))
    if files is None:
        bench.settle()
    return bench
