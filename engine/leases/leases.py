"""Which prefixes are kept, for whom, and until when: what a client's breakpoint with a time to live becomes.

             grant                    time is up
    --------------> kept -----------------------------> ended
                    |  ^                                  ^
       past a budget|  | used again, and it fits          | time is up
                    v  |                                  |
                  degraded -------------------------------'

    kept      its last full block is pinned, which keeps the blocks above it too. Of the pools that hold it the lowest
              one counts: a prefix that is safe on disk need not be kept on the GPU as well
    degraded  ordinary eviction may take it. The least valuable lease degrades when a budget is exceeded, or when a
              sequence has no other way to get its blocks: a lease never stops an engine

Every later request that begins with a lease's tokens uses it, and renews it from its own arrival. Budgets count
blocks, each once, in the pool where a lease is pinned: a share for all leases and a smaller one for each tenant.

Pure bookkeeping: no clock (`now` comes in, on the clock of the arrivals), no sequences, no tensors.
engine/leases/claims.py says what sequences ask for and got; engine/pool/blocks.py keeps what is pinned. Used by the
engine's loop thread only, but for `stats`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.leases.book import LeaseBook, last_digest
from engine.leases.tree import Lease, LeaseTree, take_fingerprint
from engine.pool.blocks import BlockPool
from engine.protocol import TOKEN_BYTES, Tier

MAX_TENANTS_SHOWN = 32
"""Tenants in `stats`: those that keep the most blocks."""


@dataclass(slots=True)
class LeaseCounters:
    """What happened since the start, in leases; the last one in tokens."""

    granted: int = 0  # new ones; those that degraded at once are among them
    renewed: int = 0  # uses by later requests
    degraded: int = 0
    kept_again: int = 0  # of those that had degraded
    expired: int = 0
    dropped: int = 0  # ended early because there were too many, or another prefix took their digest
    lost: int = 0  # their blocks turned out to hold numbers that are not finite, or could not be read
    restored: int = 0  # of an earlier run, and kept again at the start
    read_tokens: int = 0  # of the longest lease that each prompt began with


class Leases:
    """All leases of an engine, over its pools from the fastest to the slowest.

    pool          the first of them, where the model reads and writes
    share         of a pool's blocks that leases keep at most
    tenant_share  of a pool's blocks, and of max_leases, that one tenant has at most
    max_leases    that are remembered, degraded ones included
    """

    def __init__(self, pool: BlockPool, *, share: float, tenant_share: float, max_leases: int) -> None:
        self.counters = LeaseCounters()
        self._share = share
        self._tenant_share = tenant_share
        self._book = LeaseBook(
            pool.block_size, max_leases=max_leases, tenant_most=max(1, int(max_leases * tenant_share))
        )
        self.last_number = 0  # of a lease, counted from 1
        self.revision = 0  # changes with what `kept_below` yields
        self._names: list[Tier] = []
        self._pools: list[BlockPool] = []
        self._trees: list[LeaseTree] = []
        self._tenant_trees: dict[str, list[LeaseTree]] = {}  # of tenants that have leases
        self.add_tier("gpu", pool)

    def add_tier(self, name: Tier, pool: BlockPool) -> None:
        """A slower tier below those that are there already. Before the first lease."""
        assert not self._book, "a tier comes before the first lease"
        self._names.append(name)
        self._pools.append(pool)
        self._trees.append(LeaseTree(pool))

    # -- numbers ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Leases that are remembered, degraded ones included."""
        return len(self._book)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._book)

    def num_blocks(self, tier: int = 0) -> int:
        """Blocks of one pool that leases keep, each once."""
        return len(self._trees[tier])

    def any_of(self, salt: str) -> bool:
        """Whether a prompt under this salt may begin with a lease's tokens."""
        return self._book.has_salt(salt)

    def kept_below(self) -> Iterator[Lease]:
        """The leases that are pinned in the slowest pool, and those too short for that: what there is to be said to an
        engine that finds the blocks of that pool. From any thread."""
        bottom = len(self._pools) - 1
        return (lease for lease in self._book if lease.state == "kept" and (lease.tier == bottom or not lease.depth))

    # -- use ----------------------------------------------------------------------------------------------------------

    def find(self, salt: str, tokens: bytes, digests: Sequence[bytes]) -> list[Lease]:
        """The leases whose tokens a prompt begins with, longest first, as far as its digests can be trusted: `read`
        is the one that compares. Changes nothing."""
        return self._book.find(salt, tokens, digests)

    def renew(self, leases: Iterable[Lease], arrived_s: float, after: int = 0) -> None:
        """A request that arrived then uses these leases; those up to number `after` it has renewed already."""
        for lease in leases:
            if lease.number > after:
                lease.expires_s = max(lease.expires_s, arrived_s + lease.ttl_s)
                lease.uses += 1
                self.counters.renewed += 1
                self.revision += 1

    def read(self, found: Sequence[Lease], salt: str, tokens: bytes, digests: Sequence[bytes]) -> int:
        """Tokens of the longest lease among `found` whose blocks are there and hold the very tokens of this prompt; 0
        when there is none."""
        if not found:
            return 0
        digests, runs = digests[: found[0].depth], dict[int, list[int]]()

        def find_run(tier: int) -> list[int]:
            if tier not in runs:
                runs[tier] = self._pools[tier].find_prefix(salt, tokens, digests)
            return runs[tier]

        for lease in found:
            if lease.block is not None:
                there = find_run(lease.tier)[lease.depth - 1 : lease.depth] == [lease.block]
            elif lease.state == "degraded":
                there = lease.fingerprint == take_fingerprint(tokens[: lease.tokens * TOKEN_BYTES])
                there = there and any(len(find_run(tier)) >= lease.depth for tier in range(len(self._pools)))
            else:
                there = True  # it keeps no block
            if there:
                self.counters.read_tokens += lease.tokens
                return lease.tokens
        return 0

    # -- grant --------------------------------------------------------------------------------------------------------

    def grant(
        self,
        tenant: str,
        salt: str,
        tokens: bytes,
        digests: Sequence[bytes],
        ttl_s: float,
        *,
        arrived_s: float,
        now: float,
    ) -> Lease:
        """Keeps a prefix for ttl_s from the arrival of the request that asks for it. Whoever asks for the same again
        prolongs the same lease, by the longer of the two times.

        tokens   of the prefix, to the token
        digests  of its full blocks, which are registered in the first pool and are not evicted during this call
        Returns the lease. Less valuable ones make way for it; its state says whether there was room.
        """
        lease = self._book.get(tenant, salt, tokens, digests)
        fingerprint = take_fingerprint(tokens)
        if lease is not None and lease.fingerprint != fingerprint:
            self._drop(lease)  # its blocks are gone, and its digest now stands for these tokens
            lease = None
        is_new = lease is None
        if lease is None:
            self.last_number += 1
            lease = Lease(
                tenant,
                salt,
                digest=last_digest(salt, digests),
                tail=self._book.tail(tokens, digests),
                fingerprint=fingerprint,
                tokens=len(tokens) // TOKEN_BYTES,
                depth=len(digests),
                ttl_s=ttl_s,
                expires_s=arrived_s + ttl_s,
                number=self.last_number,
            )
            self.counters.granted += 1
            if not self._remember(lease, now):
                return lease
        lease.ttl_s = max(lease.ttl_s, ttl_s)
        lease.expires_s = max(lease.expires_s, arrived_s + lease.ttl_s)
        self.revision += 1
        if lease.state != "kept":
            kept = self._keep(lease, tokens, digests, now, displace=True)
            self.counters.degraded += is_new and not kept
            self.counters.kept_again += kept and not is_new
        return lease

    def keep_again(self, lease: Lease, tokens: bytes, digests: Sequence[bytes], now: float) -> bool:
        """Keeps a degraded lease whose blocks are there again, under the same conditions as `grant`, but only if no
        other one has to make way. False when it does not fit."""
        if lease.state != "degraded" or lease.fingerprint != take_fingerprint(tokens):
            return False
        if not self._keep(lease, tokens, digests, now, displace=False):
            return False
        self.counters.kept_again += 1
        return True

    def _keep(self, lease: Lease, tokens: bytes, digests: Sequence[bytes], now: float, *, displace: bool) -> bool:
        """Pins a lease in the lowest pool that holds its blocks and has room for it."""
        if not lease.depth:
            lease.state = "kept"  # fewer tokens than a block has: they are recomputed, and nothing is to be pinned
            return True
        for tier in reversed(range(len(self._pools))):
            run = self._pools[tier].find_prefix(lease.salt, tokens, digests)
            if len(run) == lease.depth and self._pin(lease, tier, run[-1], now, displace=displace):
                return True
        return False

    def _pin(self, lease: Lease, tier: int, block: int, now: float, *, displace: bool) -> bool:
        """Pins a lease, if need be at the cost of less valuable ones. One that fits no budget by itself costs none."""
        mine, total = self._tenant_trees[lease.tenant][tier], self._trees[tier]
        budgets = ((mine, self._budget(tier, self._tenant_share)), (total, self._budget(tier, self._share)))
        if lease.depth > min(budget for _, budget in budgets):
            return False
        for tree, budget in budgets:
            while True:
                missing, above = tree.missing(block)
                if len(tree) + missing <= budget:
                    break
                weakest = tree.find_weakest(now, beside=above) if displace else []
                if not weakest or max(other.value(now) for other in weakest) >= lease.value(now):
                    return False
                for other in weakest:
                    self._degrade(other)
        self._pools[tier].lease(block)
        mine.add(lease, block)
        total.add(lease, block)
        lease.state, lease.tier, lease.block = "kept", tier, block
        self.revision += 1
        return True

    def _unpin(self, lease: Lease) -> None:
        if lease.block is not None:
            self._tenant_trees[lease.tenant][lease.tier].remove(lease, lease.block)
            self._trees[lease.tier].remove(lease, lease.block)
            self._pools[lease.tier].end_lease(lease.block)
            lease.block = None
            self.revision += 1

    def _degrade(self, lease: Lease) -> None:
        self._unpin(lease)
        lease.state = "degraded"
        self.counters.degraded += 1

    def _budget(self, tier: int, share: float) -> int:
        return int(share * self._pools[tier].num_blocks)

    # -- what makes leases move, degrade and end ----------------------------------------------------------------------

    def give_way(self, now: float) -> bool:
        """Degrades what is worth least in the first pool, so that blocks can be evicted there. False when no lease
        keeps any."""
        weakest = self._trees[0].find_weakest(now)
        for lease in weakest:
            self._degrade(lease)
        return bool(weakest)

    def saved(self, tier: int, digests: Iterable[bytes], now: float) -> None:
        """These blocks are in that slower pool now as well: leases that end in them are kept there, where there is
        room, and no longer above. One that had no room above may have it there."""
        pool = self._pools[tier]
        for digest in digests:
            leases = self._book.find_ending_in(digest)
            block = pool.find_block(digest) if leases else None
            if block is None:
                continue
            salt, tokens = pool.prefix_up_to(block)
            for lease in leases:
                if salt == lease.salt and take_fingerprint(tokens + lease.tail) == lease.fingerprint:
                    self._settle(lease, tier, block, now)  # else the digest stands for something else there

    def _settle(self, lease: Lease, tier: int, block: int, now: float) -> None:
        if lease.block is not None and lease.tier < tier:
            self._move(lease, tier, block, now)
        elif lease.state == "degraded" and lease.expires_s > now:
            self.counters.kept_again += self._pin(lease, tier, block, now, displace=True)

    def _move(self, lease: Lease, tier: int, block: int, now: float) -> None:
        above, before = lease.tier, lease.block
        assert before is not None, "a lease that keeps no block does not move"
        self._unpin(lease)
        fits = self._pin(lease, tier, block, now, displace=True) or self._pin(lease, above, before, now, displace=False)
        assert fits, "a lease does not fit where it was"

    def restore(self, tier: int, leases: Iterable[Lease], now: float) -> None:
        """Enters leases of an earlier run, whose blocks that pool has taken over. None makes way for another, so the
        most valuable come first. What does not fit is degraded, what is not there any more is lost."""
        for lease in leases:
            self.revision += 1
            if lease.expires_s <= now:
                continue
            there, block = self._find_leaf(lease, tier)
            same = self._book.find_same(lease)
            if not there:
                self.counters.lost += 1
            elif same is None:
                self._enter(lease, tier, block, now)
            elif same.fingerprint == lease.fingerprint:  # it was asked for again before the start was over
                same.ttl_s, same.expires_s = max(same.ttl_s, lease.ttl_s), max(same.expires_s, lease.expires_s)
                if block is not None:
                    self._settle(same, tier, block, now)

    def _find_leaf(self, lease: Lease, tier: int) -> tuple[bool, int | None]:
        """Whether the very tokens of a lease are in a pool, and the block that they end in."""
        pool, tokens, block = self._pools[tier], b"", None
        if lease.depth:
            block = pool.find_block(lease.digest)
            salt, tokens = (None, b"") if block is None else pool.prefix_up_to(block)
            if salt != lease.salt or len(tokens) != lease.depth * pool.block_size * TOKEN_BYTES:
                return False, None
        whole = tokens + lease.tail
        return take_fingerprint(whole) == lease.fingerprint and len(whole) == lease.tokens * TOKEN_BYTES, block

    def _enter(self, lease: Lease, tier: int, block: int | None, now: float) -> None:
        if self._book.find_surplus(lease.tenant, now) is not None:
            self.counters.dropped += 1
            return
        self.last_number += 1
        lease.number = self.last_number
        self._add(lease)
        if block is None:
            lease.state = "kept"
        fits = block is None or self._pin(lease, tier, block, now, displace=False)
        self.counters.restored += fits
        self.counters.degraded += not fits

    def drop_lost(self, tier: int = 0) -> int:
        """Degrades the leases whose blocks one pool was made to forget. Call it right after BlockPool.forget. Returns
        how many there were."""
        pool, kept = self._pools[tier], self._trees[tier].leases()
        lost = [lease for lease in kept if lease.block is None or not pool.is_leased(lease.block)]
        if not lost:
            return 0
        for lease in lost:
            lease.state, lease.block = "degraded", None
        self.revision += 1
        # The way up from a lost block is gone with it, so the trees are made anew.
        self._trees[tier] = LeaseTree(pool)
        for trees in self._tenant_trees.values():
            trees[tier] = LeaseTree(pool)
        for lease in kept:
            if lease.block is not None:
                self._trees[tier].add(lease, lease.block)
                self._tenant_trees[lease.tenant][tier].add(lease, lease.block)
        self.counters.lost += len(lost)
        return len(lost)

    def expire(self, now: float) -> int:
        """Ends the leases whose time is up. Returns how many there were. Requests that arrived before `now` come first:
        they may renew one."""
        count = 0
        while (lease := self._book.pop_ended(now)) is not None:
            self._end(lease, "expired")
            count += 1
        self.counters.expired += count
        return count

    def next_end_s(self) -> float | None:
        """When `expire` may have something to do next; None when there is no lease."""
        return self._book.next_end_s()

    def _remember(self, lease: Lease, now: float) -> bool:
        """Enters a new lease. False when there are too many that are worth as much, or when it came too late."""
        if lease.expires_s <= now:
            lease.state = "expired"
            self.counters.expired += 1
            return False
        surplus = self._book.find_surplus(lease.tenant, now)
        if surplus is not None:
            if surplus.state == "kept" and surplus.value(now) >= lease.value(now):
                self.counters.dropped += 1
                lease.state = "dropped"
                return False
            self._drop(surplus)
        self._add(lease)
        return True

    def _add(self, lease: Lease) -> None:
        self._book.add(lease)
        if lease.tenant not in self._tenant_trees:
            self._tenant_trees[lease.tenant] = [LeaseTree(pool) for pool in self._pools]

    def _drop(self, lease: Lease) -> None:
        self.counters.dropped += 1
        self._book.remove(lease)
        self._end(lease, "dropped")

    def _end(self, lease: Lease, state: Literal["expired", "dropped"]) -> None:
        """Of a lease that is out of the book."""
        self._unpin(lease)
        lease.state = state
        if not self._book.has_tenant(lease.tenant):
            del self._tenant_trees[lease.tenant]

    # -- what others want to know -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Values for JSON. May be called from any thread: what it looks at is copied first."""
        leases = list(self._book)
        kept = sum(lease.state == "kept" for lease in leases)
        blocks = {name: sum(map(len, trees)) for name, trees in self._tenant_trees.copy().items()}
        most = heapq.nlargest(MAX_TENANTS_SHOWN, blocks.items(), key=lambda item: item[1])
        return {
            "kept": kept,
            "degraded_now": len(leases) - kept,
            "blocks": {name: len(tree) for name, tree in zip(self._names, self._trees, strict=True)},
            "budget_blocks": {name: self._budget(tier, self._share) for tier, name in enumerate(self._names)},
            "tenants": {name: {"blocks": count} for name, count in most},
            **asdict(self.counters),
        }

    def check_invariants(self) -> list[str]:
        """Counts everything anew. Returns what is wrong, in words; empty for a sound book."""
        wrong = self._book.check_invariants()
        for tier in range(len(self._pools)):
            wrong += self._check_tier(tier)
        wrong += [
            f"a lease is {lease.state} and ends in block {lease.block}"
            for lease in self._book
            if (lease.block is not None) != (lease.state == "kept" and lease.depth > 0)
        ]
        return wrong

    def _check_tier(self, tier: int) -> list[str]:
        pool, wrong = self._pools[tier], list[str]()
        kept: dict[str, set[int]] = {tenant: set() for tenant in self._tenant_trees}
        ends = 0
        for lease in self._book:
            block = lease.block if lease.tier == tier else None
            if block is not None and not pool.is_leased(block):
                wrong.append(f"a lease ends in block {block} of tier {tier}, which is not leased")
            if block is not None and pool.find_block(lease.digest) != block:
                wrong.append(f"a lease ends in block {block} of tier {tier}, which holds something else")
            ends += block is not None
            depth = 0
            while block is not None:
                kept[lease.tenant].add(block)
                block, depth = pool.parent_of(block), depth + 1
            if depth not in (0, lease.depth):
                wrong.append(f"a lease of {lease.depth} blocks keeps {depth} of them in tier {tier}")
        counted = [(kept[tenant], trees[tier], self._tenant_share) for tenant, trees in self._tenant_trees.items()]
        counted.append((set().union(*kept.values()), self._trees[tier], self._share))
        for blocks, tree, share in counted:
            if len(blocks) != len(tree) or len(blocks) > self._budget(tier, share):
                wrong.append(f"leases keep {len(blocks)} blocks of tier {tier}, counted as {len(tree)}")
        if pool.count_leases() != ends:
            wrong.append(f"{ends} leases end in tier {tier}, and its blocks count {pool.count_leases()}")
        return wrong
