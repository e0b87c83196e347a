"""Takes over what an earlier run left on disk: each block that was found at the start gets a slot and can be found, and
leases that are not over keep theirs again. Nothing is evicted meanwhile: a tier saves nothing before it is ready.

A part in each turn of the loop, so that a full disk holds up nobody who asks meanwhile. References are held until all
are in, and given back in the order of last use, because that is the order in which a pool evicts.

Pure bookkeeping on the loop's thread, but for the look through the disk, which the tier's thread does.
engine/tiers/tiers.py begins it; engine/tiers/disk_scan.py and engine/leases/file.py say what is there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.leases.leases import Leases
from engine.leases.tree import Lease
from engine.tiers.disk_scan import Scan
from engine.tiers.stores import BlockKey
from engine.tiers.tier import Account, Amount, PurgeReport, Tier, worker_of

log = logging.getLogger(__name__)

ADOPT_AT_ONCE: Final = 512
"""Blocks that become findable in one turn of the loop."""

LEASES_AT_ONCE: Final = 8
"""Leases that are kept again in one turn: each is compared with all its tokens."""

RELEASE_AT_ONCE: Final = 4096
"""Blocks whose reference is given back in one turn."""


@dataclass(slots=True)
class _Adoption:
    """found  parents before children; by_use  their digests and ages in seconds,
    longest ago first; slots  of those that are in, by digest;
    promised  leases of earlier runs, the most valuable first; leases  where they are entered"""

    found: list[BlockKey]
    by_use: list[tuple[bytes, float]]
    promised: list[Lease]
    leases: Leases | None
    slots: dict[bytes, int] = field(default_factory=dict)


def adopt(tier: Tier, account: Account, leases: Leases | None) -> None:
    """Begins. The tier is `ready` when it is done.

    leases  of this engine, which those of earlier runs join
    """
    worker_of(tier).run(partial(_look, tier), partial(_begin, tier, account, leases))


def _look(tier: Tier) -> tuple[Scan, list[tuple[bytes, float]], list[Lease]]:
    """On the tier's thread. Never raises."""
    try:
        promised = [] if tier.leases is None else tier.leases.read()
        leased = {lease.digest for lease in promised}
        scan = tier.scan(leased) if tier.scan is not None else Scan([], [], 0, 0)
    except Exception:
        log.exception("the %s tier could not be looked through at the start; it begins empty", tier.name)
        scan, promised = Scan([], [], 0, 0), []
    ages = zip((key.digest for key in scan.found), scan.ages_s, strict=True)
    return scan, sorted(ages, key=lambda entry: -entry[1]), promised


def _begin(
    tier: Tier,
    account: Account,
    leases: Leases | None,
    looked: tuple[Scan, list[tuple[bytes, float]], list[Lease]],
) -> None:
    scan, by_use, promised = looked
    tier.counters.torn += scan.torn
    tier.counters.collected += scan.collected
    _take_in(tier, account, _Adoption(scan.found, by_use, promised, leases), 0)


def _take_in(tier: Tier, account: Account, job: _Adoption, start: int, _: object = None) -> None:
    end = min(start + ADOPT_AT_ONCE, len(job.found))
    for key in job.found[start:end]:
        parent = None if key.parent is None else job.slots.get(key.parent)
        hangs = parent is not None and tier.pool.is_registered(parent)  # not if it turned out to be torn meanwhile
        purge = account.find_purge(key.salt)
        if purge is not None:
            _count(purge, tier)
        taken = tier.pool.allocate(1) if (key.parent is None or hangs) and purge is None else None
        if taken is None:
            account.drop(tier, [key.digest])
            continue
        job.slots[key.digest] = taken[0]
        registered = tier.pool.register(taken[0], parent, key.salt, key.digest, key.tokens)
        assert registered == taken[0], "the start found a block twice"
    account.note(tier)
    if end < len(job.found):
        worker_of(tier).run(_nothing, partial(_take_in, tier, account, job, end))
    else:
        _keep(tier, account, job, 0)


def _keep(tier: Tier, account: Account, job: _Adoption, start: int, _: object = None) -> None:
    end = start + LEASES_AT_ONCE
    if tier.leases is not None and job.leases is not None:
        promised = [lease for lease in job.promised[start:end] if account.find_purge(lease.salt) is None]
        job.leases.restore(tier.number, promised, tier.leases.clock())
    if end < len(job.promised):
        worker_of(tier).run(_nothing, partial(_keep, tier, account, job, end))
    else:
        _let_go(tier, account, job, 0)


def _let_go(tier: Tier, account: Account, job: _Adoption, start: int, _: object = None) -> None:
    end = start + RELEASE_AT_ONCE
    for digest, age_s in job.by_use[start:end]:
        if digest in job.slots:
            if tier.lasting is not None:
                tier.pool.advance(account.now - age_s)
            tier.pool.release([job.slots[digest]])
    if tier.lasting is not None:
        tier.pool.advance(account.now)
    if end < len(job.by_use):
        worker_of(tier).run(_nothing, partial(_let_go, tier, account, job, end))
        return
    tier.ready = True
    account.purging.clear()
    if job.found:
        log.info("the %s tier holds %d blocks of an earlier run", tier.name, len(job.slots))
    if job.promised:
        log.info("%d leases of earlier runs were not over", len(job.promised))


def _count(purge: PurgeReport, tier: Tier) -> None:
    amount = purge.tiers.setdefault(tier.name, Amount())
    amount.blocks += 1
    amount.bytes += tier.block_bytes


def _nothing() -> None:
    """A job that only takes its turn."""
