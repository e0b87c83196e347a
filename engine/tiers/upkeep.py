"""What a tier needs whose blocks outlive the engine: taking over what the last run left, an end for what was not used
for `disk_max_age_s`, and purges of a tenant or a namespace.

There is one clock, that of the loop. A file's time becomes an age when the engine starts; from then on the pool knows
when each block was used last. A use that reads no file, because the prefix is still where the model runs, is noted in
the file's time as well, so that the next start knows of it: NOTES times in the longest age. What a lease promises is
not evictable, with all that it hangs from, so it stays until the lease ends.

Each of these jobs goes on in many turns of the loop, a part in each, so that a full disk holds up no request; files are
read and deleted by the tier's thread. Jobs of one tier are done in order, so whatever was being copied when a purged
scope was forgotten has been written, found to be forgotten and dropped before a purge looks at the first file.

Pure bookkeeping on the loop's thread. engine/tiers/tiers.py owns it; engine/tiers/disk_store.py has the files.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from engine.leases.file import LeaseSaving
from engine.leases.leases import Leases
from engine.leases.pins import Lease
from engine.tiers.copying import BlockKey
from engine.tiers.disk_folders import Swept
from engine.tiers.disk_store import Scan
from engine.tiers.tier import Account, Lasting, PurgeReport, Steps, Tier

log = logging.getLogger(__name__)

ADOPT_AT_ONCE: Final = 512
"""Blocks that become findable in one turn of the loop."""

LEASES_AT_ONCE: Final = 8
"""Leases that are kept again in one turn: each is compared with all its tokens."""

RELEASE_AT_ONCE: Final = 4096
"""Blocks whose reference is given back in one turn."""

AGED_AT_ONCE: Final = 64
"""Blocks that are too old and go in one turn."""

NOTES: Final = 16
"""In the longest age a block's use is noted so often; its file may look that much older than it is."""

LOOK_S: Final = 3600.0
"""Between two looks for what engines left that are gone, or NOTES of them in the longest age."""

MOST_PURGES: Final = 16
"""That are under way or wait; more are refused."""

Done = Callable[[PurgeReport], object]
T = TypeVar("T")


def adopt(tier: Tier, account: Account, leases: Leases | None) -> Steps[None]:
    """Gives each block that is found at the start a slot, and keeps leases again that are not over. The tier is `ready`
    when it is done. References are held until all blocks are in, and given back in the order of last use, because
    that is the order in which a pool evicts; a tier saves nothing before it is ready, so nothing is evicted meanwhile.

    leases  of this engine, which those of earlier runs join
    """
    scan, promised = yield partial(_look, tier)
    tier.counters.torn += scan.torn
    tier.counters.collected += scan.collected
    slots: dict[bytes, int] = {}  # of the blocks that are in

    def keep(some: Sequence[Lease]) -> None:
        if tier.leases is not None and leases is not None:
            leases.restore(tier.number, some, tier.leases.clock())

    def release(used: Sequence[tuple[float, bytes]]) -> None:
        for age_s, digest in used:
            if digest in slots:
                tier.pool.policy.advance(account.now - age_s)
                tier.pool.release([slots[digest]])
        tier.pool.policy.advance(account.now)

    yield from _in_turns(scan.found, ADOPT_AT_ONCE, partial(_take_in, tier, account, slots))
    yield from _in_turns(promised, LEASES_AT_ONCE, keep)
    by_use = sorted(zip(scan.ages_s, (key.digest for key in scan.found), strict=True), key=lambda entry: -entry[0])
    yield from _in_turns(by_use, RELEASE_AT_ONCE, release)
    tier.ready = True
    if scan.found or promised:
        log.info("the %s tier holds %d blocks and %d leases of an earlier run", tier.name, len(slots), len(promised))


def _in_turns(items: Sequence[T], size: int, take: Callable[[Sequence[T]], None]) -> Steps[None]:
    for start in range(0, len(items), size):
        if start:
            yield _take_turn
        take(items[start : start + size])


def _take_turn() -> None:
    """A job that only takes its turn."""


def _look(tier: Tier) -> tuple[Scan, list[Lease]]:
    """On the tier's thread. Never raises."""
    try:
        promised = [] if tier.leases is None else tier.leases.read()
        scan = Scan([], [], 0, 0) if tier.scan is None else tier.scan({lease.digest for lease in promised})
    except Exception:
        log.exception("the %s tier could not be looked through at the start; it begins empty", tier.name)
        return Scan([], [], 0, 0), []
    return scan, promised


def _take_in(tier: Tier, account: Account, slots: dict[bytes, int], keys: Sequence[BlockKey]) -> None:
    """Blocks whose parents are in already, or come before them."""
    for key in keys:
        parent = None if key.parent is None else slots.get(key.parent)
        hangs = parent is not None and tier.pool.is_registered(parent)  # not if it turned out to be torn meanwhile
        taken = tier.pool.allocate(1) if key.parent is None or hangs else None
        if taken is None:
            account.drop(tier, [key.digest])
            continue
        slots[key.digest] = taken[0]
        registered = tier.pool.register(taken[0], parent, key.salt, key.digest, key.tokens)
        assert registered == taken[0], "the start found a block twice"
    account.note(tier)


class Upkeep:
    """Ages and purges of one tier, while the engine runs."""

    def __init__(self, tier: Tier, lasting: Lasting, account: Account) -> None:
        self.leases: LeaseSaving | None = None
        self._tier, self._lasting, self._account = tier, lasting, account
        self._note_s = lasting.max_age_s / NOTES
        self._noted_s = [float("-inf")] * tier.pool.num_blocks  # by slot, when its file's time was set last
        self._look_s: float | None = None  # the next look; None before the first pump, and during a look
        self._looking = False
        self._waiting: deque[Steps[None]] = deque()  # purges
        self._purging = False

    @property
    def num_purges(self) -> int:
        """Those that are not done."""
        return len(self._waiting) + self._purging

    @property
    def next_s(self) -> float | None:
        """When `pump` has something to do; None before the tier is ready."""
        if not self._tier.ready or (self._look_s is None and not self._looking):
            return None
        oldest_s = self._lasting.order.oldest_s()
        end_s = None if oldest_s is None else oldest_s + self._lasting.max_age_s
        return min((at_s for at_s in (end_s, self._look_s) if at_s is not None), default=None)

    def used(self, slot: int) -> None:
        """A block that the tier holds was used, and with it what it hangs from."""
        now, digest = self._account.now, self._tier.pool.prefixes.digest[slot]
        if digest is not None and now - self._noted_s[slot] >= self._note_s:
            self._noted_s[slot] = now
            self._tier.run(partial(self._lasting.folder.note_use, digest))

    def pump(self) -> None:
        """Begins what is due. Call it in each turn, and at `next_s`."""
        if not self._tier.ready:
            return
        self._end_unused()
        if self._look_s is None and not self._looking:  # the start has just looked
            self._look_s = self._account.now + min(LOOK_S, self._note_s)
        elif self._look_s is not None and self._account.now >= self._look_s:
            self._look_s, self._looking = None, True
            self._tier.run_steps(self._look())
        if self._waiting and not self._purging:
            self._purging = True
            self._tier.run_steps(self._waiting.popleft())

    def purge(self, report: PurgeReport, done: Done) -> None:
        """Deletes files after the pool was made to forget a scope. `done` is called with the report when none of the
        scope is left, as far as that can be had."""
        self._waiting.append(self._purge(report, done))
        self.pump()

    def _end_unused(self) -> None:
        count, order = 0, self._lasting.order
        while count < AGED_AT_ONCE:
            used_s = order.oldest_s()
            if used_s is None or used_s + self._lasting.max_age_s > self._account.now:  # just as `next_s` adds them
                break
            self._tier.pool.evict()
            count += 1
        if count:
            self._tier.counters.collected += count
            self._account.note(self._tier)

    def _look(self) -> Steps[None]:
        found = yield from self._sweep(self._lasting.max_age_s)
        self._tier.counters.collected += sum(swept.files for swept in found)
        self._look_s, self._looking = self._account.now + min(LOOK_S, self._note_s), False

    def _purge(self, report: PurgeReport, done: Done) -> Steps[None]:
        """The leases are written anew without those of the scope; files go that the pool does not know (what a copy
        wrote while the pool forgot, or a start missed), and all that engines left that are gone. Folders of engines
        that live are named, because only their engines can purge them."""
        folder = self._lasting.folder
        if self.leases is not None:
            report.left += (yield from self.leases.write()) is not None
        digests = yield folder.find_own
        if strays := [digest for digest in digests if self._tier.pool.prefixes.find_block(digest) is None]:
            report.add((yield partial(folder.remove, strays)))
        for swept in (yield from self._sweep(max_age_s=float("-inf"))):
            report.add(swept)
            if swept.owner is not None:
                report.in_use.append(swept.owner)
        self._purging = False
        done(report)
        self.pump()

    def _sweep(self, max_age_s: float) -> Steps[list[Swept]]:
        """Walks through the folders of other engines; of one that lives each folder is met once."""
        found: list[Swept] = []
        in_use: set[str] = set()
        for part in (yield self._lasting.folder.find_parts):
            if part.folder not in in_use:
                found.append((yield partial(self._lasting.folder.expire, part, max_age_s)))
                if found[-1].owner is not None:
                    in_use.add(part.folder)
        return found
