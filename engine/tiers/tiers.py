"""The tier below the model's own blocks: what is saved to disk, and what is brought back.

                 save, in the background
    device  ---------------------------->  disk
            <----------------------------
                 restore, before a sequence that needs it is admitted

Tiers are inclusive: a saved block stays where it was. The disk is a BlockPool that keeps the account of its slots (what
each holds, what is evicted next, verified when it is found) and a store that has the bytes. A copy holds references on
both sides meanwhile, so neither side can change, and a block becomes findable when it is whole.

    save     chain queued -> slots allocated, blocks referenced -> copied by the disk's thread -> registered, released
    restore  blocks allocated, slots referenced -> copied -> registered -> released, cached: admission finds them

Pure bookkeeping on the loop's thread: no torch, no I/O, no threads of its own; engine/tiers/copying.py does the copies.
Neighbours: engine/tiers/saving.py and engine/tiers/restoring.py are the two ways, engine/tiers/upkeep.py what outlives
the engine; engine/tables.py asks for restores and hands over chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from engine.leases.file import LeaseSaving
from engine.leases.leases import Leases
from engine.tiers.copying import CopyThread
from engine.tiers.restoring import Restoring
from engine.tiers.saving import Saving
from engine.tiers.tier import Account, Amount, Chain, PurgeReport, Tier
from engine.tiers.upkeep import MOST_PURGES, Upkeep, adopt

__all__ = ["Chain", "Tier", "Tiers"]


class Tiers:
    """The device's tier, and the disk's where there is one.

    pools     of the tiers, in their order
    """

    def __init__(self, device: Tier, disk: Tier | None = None, *, queue_bytes: int = 0, part_blocks: int = 64) -> None:
        """
        queue_bytes  of chains that wait to be saved, at most
        part_blocks  that one copy has in memory, and that become findable in one turn of the loop
        """
        self.disk = disk
        self.tiers = [device] if disk is None else [device, disk]
        self.pools = [tier.pool for tier in self.tiers]
        self._account = Account(self.tiers)
        self.residency = self._account.residency
        self._leases: Leases | None = None
        self._lease_saving: LeaseSaving | None = None
        self._saving: Saving | None = None
        self._restoring: Restoring | None = None
        self._upkeep: Upkeep | None = None
        if disk is not None:
            disk.number, disk.ready = 1, disk.scan is None
            self._saving = Saving(device, disk, self._account, queue_bytes=queue_bytes, part_blocks=part_blocks)
            self._restoring = Restoring(device, disk, self._account, part_blocks=part_blocks)
            if disk.lasting is not None:
                self._upkeep = Upkeep(disk, disk.lasting, self._account)
                self._saving.on_used = self._upkeep.used

    def listen(self, leases: Leases) -> None:
        """Leases follow what was saved and what was lost, and are kept on disk where there is a file for them."""
        self._leases = leases
        self._account.on_lost = leases.drop_lost
        if self._saving is not None:
            self._saving.on_saved = leases.saved
        if self.disk is not None and self.disk.leases is not None:
            self._lease_saving = LeaseSaving(self.disk, self.disk.leases, leases, self._account)
            if self._upkeep is not None:
                self._upkeep.leases = self._lease_saving

    # -- for the loop -------------------------------------------------------------------------------------------------

    def start(self, make_worker: Callable[[str], CopyThread], now: float = 0.0) -> None:
        """Gives the disk its thread, by name, and looks for what the last run left."""
        self._tell_time(now)
        if self.disk is not None:
            self.disk.worker = make_worker("copy-disk")
            if self.disk.scan is not None:
                self.disk.run_steps(adopt(self.disk, self._account, self._leases))

    def close(self) -> None:
        """Ends the thread after what it is doing; leases that have changed are written."""
        if self.disk is not None and self.disk.worker is not None:
            self.disk.worker.close(partial(self._close_store, self.disk))

    def _close_store(self, disk: Tier) -> None:
        """On the disk's thread."""
        if self._lease_saving is not None:
            self._lease_saving.write_last()
        if disk.close is not None:
            disk.close()

    @property
    def busy(self) -> bool:
        """Whether copies hold references, which come back without anybody's doing."""
        return self._saving is not None and (self._saving.busy or self._num_restoring > 0)

    @property
    def idle(self) -> bool:
        """Whether nothing is being copied or waits for that."""
        return self.saved and self.ready

    @property
    def saved(self) -> bool:
        """Whether nothing is lost that could be saved, and no purge is left undone, if the engine ends now."""
        waiting = 0 if self._saving is None else self._saving.num_waiting
        return not self.busy and not waiting and not self._num_purges

    @property
    def ready(self) -> bool:
        """Whether everything that the last run left can be found."""
        return self.disk is None or self.disk.ready

    @property
    def pump_wanted(self) -> bool:
        return self._saving is not None and self._saving.pump_wanted

    @property
    def next_s(self) -> float | None:
        """When `pump` has something to do, though nothing else happens until then; None when it has not."""
        times = [one.next_s for one in (self._upkeep, self._lease_saving) if one is not None]
        return min((at_s for at_s in times if at_s is not None), default=None)

    def pump(self, now: float, *, steps_run: bool = False) -> None:
        """Starts what can be saved now. Call it in each turn, while `pump_wanted`, and at `next_s`.

        steps_run  there was a step in this turn, and will be one in the next: saving takes its time
        """
        self._tell_time(now)
        if self._restoring is not None:
            self._restoring.end_overdue(now)
        if self._saving is not None:
            self._saving.pump(steps_run=steps_run)
        for one in (self._upkeep, self._lease_saving):
            if one is not None:
                one.pump()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Blocks, bytes and counters of each tier; values for JSON."""
        found: dict[str, dict[str, Any]] = {}
        for tier in self.tiers:
            blocks = len(tier.pool.prefixes)
            found[tier.name] = {
                "blocks": blocks,
                "bytes": blocks * tier.block_bytes,
                "capacity_bytes": tier.pool.num_blocks * tier.block_bytes,
                "evictions": tier.pool.evictions,
                **(asdict(tier.counters) if tier.number else {}),
            }
        return found

    def check_invariants(self) -> list[str]:
        """What is wrong with the disk's tier while nothing is copied, in words."""
        if self.disk is None or self._saving is None:
            return []
        wrong = self._saving.check_invariants()
        wrong += [f"disk: {line}" for line in self.disk.pool.check_invariants()]
        if self.disk.pool.num_live:
            wrong.append(f"disk: {self.disk.pool.num_live} slots are live and nothing is copied")
        return wrong

    # -- for the sequences --------------------------------------------------------------------------------------------

    def count_findable(self, digests: Sequence[bytes]) -> int:
        """Leading blocks that some tier has a digest of. A guess: nothing is compared."""
        return max(pool.prefixes.count_findable(digests) for pool in self.pools)

    def save(self, chain: Chain, *, urgent: bool = False) -> None:
        """Queues a prefix to be saved as far as it can be found then, or to count as used where it is saved already.

        urgent  before everything that waits
        When too much waits, what has waited longest is left out.
        """
        if self._saving is not None and chain.digests:
            self._saving.add(chain, urgent=urgent)

    def count_restoring(self, now: float) -> int:
        """Restores that sequences wait for: none whose time is up."""
        return 0 if self._restoring is None else sum(now < job.deadline_s for job in self._restoring.jobs)

    def is_restoring(self, digests: Sequence[bytes], now: float) -> bool:
        """Whether the next blocks of a prefix are on their way, for any sequence."""
        for job in () if self._restoring is None else self._restoring.jobs:
            if not job.over and job.index < len(digests) and digests[job.index] == job.chain.digests[job.index]:
                return now < job.deadline_s
        return False

    def restore(self, chain: Chain, room: int, now: float) -> list[int]:
        """Begins to bring back what the disk holds of a prefix beyond what can be found above.

        room  blocks that the sequence needs in all and those that must be left for others: with less than that
              nothing is begun, because the sequence could not be admitted either
        Returns the device blocks that are being written; empty when nothing was begun.
        """
        self._tell_time(now)
        return [] if self._restoring is None else self._restoring.begin(chain, room, now)

    def forget(self, chain: Chain, start: int = 0) -> None:
        """Makes a prefix from a block on unfindable on disk, with everything that hangs from it: it is not trusted."""
        if self.disk is not None:
            slots = self.disk.pool.prefixes.find(chain.salt, chain.tokens, chain.digests)
            self._account.forget(self.disk, slots[start:])

    # -- for operators ------------------------------------------------------------------------------------------------

    @property
    def can_purge(self) -> bool:
        """False while the start is not over, or as many purges wait as may."""
        return self.ready and self._num_purges < MOST_PURGES

    @property
    def owner(self) -> str | None:
        """Of the folder of blocks, as other engines that share it report it; None when nothing is on disk."""
        return None if self.disk is None or self.disk.lasting is None else self.disk.lasting.folder.owner

    def purge(self, prefix: str, report: PurgeReport, done: Callable[[PurgeReport], object]) -> None:
        """Makes everything unfindable at once, in all tiers, whose salt begins so; its leases are at an end already.
        Copies that are under way come to nothing.

        done  called when no file of it is left either, as far as that can be had; at once where nothing is on disk
        """
        if self._saving is not None:
            self._saving.forget(prefix)
        for tier in reversed(self.tiers):
            count = self._account.forget(tier, tier.pool.prefixes.roots(prefix))
            report.tiers[tier.name] = Amount(count, count * tier.block_bytes)
        if self._upkeep is None:
            done(report)
        else:
            self._upkeep.purge(report, done)

    @property
    def _num_purges(self) -> int:
        return 0 if self._upkeep is None else self._upkeep.num_purges

    @property
    def _num_restoring(self) -> int:
        return 0 if self._restoring is None else len(self._restoring.jobs)

    def _tell_time(self, now: float) -> None:
        self._account.now = now
        if self.disk is not None:
            self.disk.pool.policy.advance(now)
