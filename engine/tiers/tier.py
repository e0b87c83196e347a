"""A tier, a chain of blocks on its way, and the account of what the tiers hold and gave up.

What engine/tiers/saving.py (down), engine/tiers/restoring.py (up) and engine/tiers/upkeep.py (what outlives the engine)
share. No policy. Used on the loop's thread only; a tier's thread makes the calls that `Tier.run` is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeVar

from engine.leases.file import LeaseFile
from engine.pool.blocks import BlockPool
from engine.pool.eviction import LeastRecentlyUsed
from engine.protocol import TOKEN_BYTES, BlockEvents, Taker, split_digests
from engine.protocol import Tier as TierName
from engine.tiers.copying import BlockKey, CopyThread, Store
from engine.tiers.disk_folders import Swept
from engine.tiers.disk_store import DiskStore, Scan

log = logging.getLogger(__name__)

PAUSE_S: Final = 30.0
"""Nothing is saved to a tier for so long after its store failed."""

COPY_LIMIT_S: Final = 30.0
"""What a copy holds where the model runs is given back after so long; a disk may hang."""

_DIGEST_COST: Final = 64  # bytes that a digest takes in a queue

T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]
"""A job on the loop's thread that yields calls for a tier's thread, and goes on with what each returned."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The leading full blocks of a prefix.

    tokens   token ids of all of them
    digests  one for each
    """

    salt: str
    tokens: bytes
    digests: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + _DIGEST_COST * len(self.digests)

    def keys(self, start: int, count: int, block_size: int) -> list[BlockKey]:
        width, digests = block_size * TOKEN_BYTES, self.digests
        return [
            BlockKey(digests[i], digests[i - 1] if i else None, i, self.salt, self.tokens[i * width : (i + 1) * width])
            for i in range(start, start + count)
        ]


@dataclass(slots=True)
class Counters:
    """Blocks, since the start."""

    saved: int = 0
    restored: int = 0
    dropped: int = 0  # not saved, because the queue was full or the store had just failed
    failed: int = 0  # not copied, because the store failed
    torn: int = 0  # lost, because they were not there or not sound any more
    collected: int = 0  # deleted for their age, or at the start because of the budget


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a tier has besides whose blocks outlive the engine.

    folder     its store
    order      the order of eviction of its pool
    max_age_s  after which an unused block goes
    """

    folder: DiskStore
    order: LeastRecentlyUsed
    max_age_s: float


@dataclass(slots=True, eq=False)
class Tier:
    """One tier; the first is where the model runs.

    store   needed as soon as there are two tiers
    scan    what the store holds at the start, called on the tier's thread with the digests that leases end in
    leases  on disk, beside the blocks of this tier
    close   ends the store, on the tier's thread, after everything else
    lasting where the blocks outlive the engine
    ready   everything that the start found is accounted for; nothing is saved before
    number  place among the tiers, 0 for the first
    late    copies that were given up and have not ended: while there are any, nothing is saved or restored here
    """

    name: TierName
    pool: BlockPool
    store: Store | None = None
    block_bytes: int = 0
    scan: Callable[[Collection[bytes]], Scan] | None = None
    leases: LeaseFile | None = None
    close: Callable[[], object] | None = None
    lasting: Lasting | None = None
    number: int = 0
    worker: CopyThread | None = None
    ready: bool = True
    pause_until_s: float = 0.0
    warned: bool = False
    late: int = 0
    counters: Counters = field(default_factory=Counters)

    def run(self, job: Callable[[], T], done: Callable[[T], object] = lambda result: None) -> None:
        """Has the tier's thread do a job; `done` is called on the loop's thread with what it returned."""
        assert self.worker is not None, f"the {self.name} tier was not started"
        self.worker.run(job, done)

    def run_steps(self, steps: Steps[object]) -> None:
        """Goes through the steps, one after the other; the first of them begins at once."""

        def go_on(result: Any = None) -> None:
            try:
                job = steps.send(result)
            except StopIteration:
                return
            self.run(job, go_on)

        go_on()

    def get_store(self) -> Store:
        assert self.store is not None, f"the {self.name} tier has no store"
        return self.store


@dataclass(slots=True)
class Amount:
    blocks: int = 0
    bytes: int = 0


@dataclass(slots=True)
class PurgeReport:
    """What a purge took away.

    tiers      blocks that could be found in each tier
    files      of engines that are gone, and strays: blocks, half-written ones and leases
    leases     of this engine
    sequences  that waited or ran: what they compute is not kept
    left       files and folders that could not be read or deleted, so that some of the scope may be left
    owner      of this engine's folder of blocks; None when it has none
    in_use     owners of other engines' folders that live beside it: only they can purge them
    """

    tiers: dict[TierName, Amount] = field(default_factory=dict)
    files: Amount = field(default_factory=Amount)
    leases: int = 0
    sequences: int = 0
    left: int = 0
    owner: str | None = None
    in_use: list[str] = field(default_factory=list)

    def add(self, swept: Swept) -> None:
        self.files.blocks += swept.files
        self.files.bytes += swept.num_bytes
        self.left += swept.left


class Account:
    """Reports what the pools do to the index, to the store and to the leases.

    on_lost  called with the number of a tier that was made to forget blocks
    now      monotonic second of the loop's present turn
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.residency = Residency([tier.pool for tier in tiers], [tier.name for tier in tiers])
        self.on_lost: Callable[[int], object] | None = None
        self.now = 0.0

    def note(self, tier: Tier) -> None:
        """After each change of a pool below: what it gave up is dropped before anything else can be written there."""
        gone = self.residency.note(tier.number)
        if gone:
            self.drop(tier, gone)

    def drop(self, tier: Tier, digests: list[bytes]) -> None:
        """The store need not keep these any longer."""
        tier.run(partial(tier.get_store().drop, digests))

    def forget(self, tier: Tier, slots: list[int]) -> int:
        """These, and what hangs from them, are not to be found any more. How many there were."""
        count = tier.pool.forget(slots)
        if count and self.on_lost is not None:
            self.on_lost(tier.number)
        if tier.number:  # the first tier has no store that keeps anything besides
            self.note(tier)
        return count

    def failed(self, tier: Tier, num_blocks: int, error: Exception) -> None:
        """The tier's store did not do what it should. One warning, until a save succeeds again."""
        tier.counters.failed += num_blocks
        tier.pause_until_s = self.now + PAUSE_S
        if not tier.warned:
            log.warning("the %s tier failed, the engine goes on without it: %s", tier.name, error)
        tier.warned = True


def overdue() -> TimeoutError:
    """Why a copy was given up."""
    return TimeoutError(f"a copy takes longer than {COPY_LIMIT_S:.0f} s")


class Residency:
    """Which blocks can be found, in any tier, and what of that has changed since the last `take`."""

    def __init__(self, pools: Sequence[BlockPool], names: Sequence[TierName]) -> None:
        """Both from the fastest tier to the slowest."""
        self._pools = pools
        self._names = names
        self._changed: list[dict[bytes, None]] = [{} for _ in pools]  # digests, in the order of their last change

    def note(self, tier: int) -> list[bytes]:
        """Takes the events of one tier's pool. Returns the digests that it gave up since the last call."""
        events = self._pools[tier].prefixes.take_events()
        changed, gone = self._changed[tier], split_digests(events.removed)
        for digest in [*gone, *split_digests(events.stored)]:
            changed.pop(digest, None)
            changed[digest] = None
        return gone

    def take(self) -> list[BlockEvents]:
        """What became findable, moved or ceased to be, at most one run for each tier; often empty.

        Applied one after the other they keep a table prefix-closed: what is gone is removed first, children before
        parents, then what is stored, the fastest tier first and parents before children within each. A block may be
        reported again though nothing has changed.
        """
        self.note(0)
        stored: list[list[bytes]] = [[] for _ in self._pools]
        removed: dict[bytes, None] = {}
        for tier, changed in enumerate(self._changed):
            for digest in changed:
                now = self._find_tier(digest)
                if now is None:
                    # Where a child left a tier, its parent was still there: the last of its places counts.
                    removed.pop(digest, None)
                    removed[digest] = None
                elif now == tier or (now > tier and digest not in self._changed[now]):  # one that moved keeps its place
                    stored[now].append(digest)
        for changed in self._changed:
            changed.clear()
        runs = [BlockEvents(b"".join(run), tier=name) for run, name in zip(stored, self._names, strict=True) if run]
        if removed:
            first = runs[0] if runs else BlockEvents()
            runs[:1] = [replace(first, removed=b"".join(removed), takers=self._takers(removed))]
        self._pools[0].taken.clear()
        return runs

    def _takers(self, removed: Iterable[bytes]) -> tuple[Taker, ...]:
        """Whose requests needed the places of these where the model runs; of other tiers it is not known."""
        taken = self._pools[0].taken
        if not taken:
            return ()
        runs = groupby(removed, key=lambda digest: taken.get(digest, ("", "")))
        return tuple(Taker(sum(1 for _ in run), *whose) for whose, run in runs)

    def _find_tier(self, digest: bytes) -> int | None:
        """The fastest that holds a block."""
        holders = (tier for tier, pool in enumerate(self._pools) if pool.prefixes.find_block(digest) is not None)
        return next(holders, None)
