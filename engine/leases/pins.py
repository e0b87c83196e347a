"""Where each lease is pinned, and the budgets that this counts against.

Budgets count blocks, each once, in the pool where a lease is pinned: a share for all leases and a smaller one for each
tenant. One tree of each pool counts for all, one for each tenant in it. A lease that does not fit any more is degraded:
it keeps no block, and ordinary eviction may take what it kept.

A lease keeps the block it ends in and everything that hangs above it, so leases of one conversation nest and those of
one system prompt meet: each block counts once, however many leases keep it.

Knows nothing about requests and times to live, but that a lease has a value. engine/leases/leases.py says what is to be
kept and when it ends; engine/pool/blocks.py holds the blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from engine.pool.blocks import BlockPool
from engine.protocol import TOKEN_BYTES, Tier


@dataclass(slots=True)
class LeaseCounters:
    """What happened to leases since the engine started, in leases; the last one in tokens."""

    granted: int = 0  # new ones; those that degraded at once are among them
    renewed: int = 0  # uses by later requests
    degraded: int = 0
    kept_again: int = 0  # of those that had degraded
    expired: int = 0
    dropped: int = 0  # ended early: too many, another prefix took their digest, purged, or moved to another replica
    lost: int = 0  # their blocks turned out to hold numbers that are not finite, or could not be read
    restored: int = 0  # of an earlier run, and kept again at the start
    read_tokens: int = 0  # of the longest lease that each prompt began with


class Pins:
    """The pins of all leases.

    pools         of the tiers, from the fastest to the slowest
    share         of a pool's blocks that leases keep at most
    tenant_share  of a pool's blocks that those of one tenant keep at most
    """

    def __init__(
        self, pools: Mapping[Tier, BlockPool], counters: LeaseCounters, *, share: float, tenant_share: float
    ) -> None:
        self.pools = list(pools.values())
        self.revision = 0  # changes whenever a lease is pinned somewhere else, or nowhere
        self._counters = counters
        self._share = share
        self._tenant_share = tenant_share
        self._names = list(pools)
        self._trees = [LeaseTree(pool) for pool in self.pools]
        self._tenant_trees: dict[str, list[LeaseTree]] = {}  # of tenants that have leases

    def drop_tenant(self, tenant: str) -> None:
        """After its last lease has ended."""
        self._tenant_trees.pop(tenant, None)

    # -- pin and unpin ------------------------------------------------------------------------------------------------

    def keep(self, lease: Lease, tokens: bytes, digests: Sequence[bytes], now: float, *, displace: bool) -> bool:
        """Pins a lease in the lowest pool that holds its blocks and has room for it. False when there is none.

        displace  whether less valuable ones may be degraded for it
        """
        if not lease.depth:
            lease.state = "kept"  # fewer tokens than a block has: they are recomputed, and nothing is to be pinned
            return True
        for tier in reversed(range(len(self.pools))):
            run = self.pools[tier].prefixes.find(lease.salt, tokens, digests)
            if len(run) == lease.depth and self.pin(lease, tier, run[-1], now, displace=displace):
                return True
        return False

    def pin(self, lease: Lease, tier: int, block: int, now: float, *, displace: bool) -> bool:
        """Pins a lease, if need be at the cost of less valuable ones. One that fits no budget by itself costs none."""
        if lease.tenant not in self._tenant_trees:
            self._tenant_trees[lease.tenant] = [LeaseTree(pool) for pool in self.pools]
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
        self.pools[tier].lease(block)
        mine.add(lease, block)
        total.add(lease, block)
        lease.state, lease.tier, lease.block = "kept", tier, block
        self.revision += 1
        return True

    def unpin(self, lease: Lease) -> None:
        """Does nothing when it is not pinned."""
        if lease.block is not None:
            self._tenant_trees[lease.tenant][lease.tier].remove(lease, lease.block)
            self._trees[lease.tier].remove(lease, lease.block)
            self.pools[lease.tier].end_lease(lease.block)
            lease.block = None
            self.revision += 1

    def move(self, lease: Lease, tier: int, block: int, now: float) -> None:
        """To another pool, if it has room there; at the cost of less valuable ones."""
        above, before = lease.tier, lease.block
        assert before is not None, "a lease that keeps no block does not move"
        self.unpin(lease)
        fits = self.pin(lease, tier, block, now, displace=True) or self.pin(lease, above, before, now, displace=False)
        assert fits, "a lease does not fit where it was"

    def give_way(self, now: float) -> bool:
        """Degrades what is worth least in the first pool, so that blocks can be evicted there. False when no lease
        keeps any."""
        weakest = self._trees[0].find_weakest(now)
        for lease in weakest:
            self._degrade(lease)
        return bool(weakest)

    def drop_lost(self, tier: int) -> int:
        """Degrades the leases whose blocks one pool was made to forget. Call it right after BlockPool.forget. Returns
        how many there were."""
        pool, kept = self.pools[tier], self._trees[tier].leases()
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
        return len(lost)

    def _degrade(self, lease: Lease) -> None:
        self.unpin(lease)
        lease.state = "degraded"
        self._counters.degraded += 1

    def _budget(self, tier: int, share: float) -> int:
        return int(share * self.pools[tier].num_blocks)

    # -- look up ------------------------------------------------------------------------------------------------------

    def find_leaf(self, lease: Lease, tier: int) -> tuple[bool, int | None]:
        """Whether the very tokens of a lease are in a pool, and the block that they end in."""
        pool, tokens, block = self.pools[tier], b"", None
        if lease.depth:
            block = pool.prefixes.find_block(lease.digest)
            salt, tokens = (None, b"") if block is None else pool.prefixes.up_to(block)
            if salt != lease.salt or len(tokens) != lease.depth * pool.block_size * TOKEN_BYTES:
                return False, None
        whole = tokens + lease.tail
        return take_fingerprint(whole) == lease.fingerprint and len(whole) == lease.tokens * TOKEN_BYTES, block

    def num_blocks(self, tier: int) -> int:
        """Blocks of one pool that leases keep, each once."""
        return len(self._trees[tier])

    def blocks_by_tenant(self) -> dict[str, int]:
        """In all pools. May be called from any thread: what it looks at is copied first."""
        return {name: sum(map(len, trees)) for name, trees in self._tenant_trees.copy().items()}

    def blocks_by_tier(self) -> dict[Tier, int]:
        return {name: len(tree) for name, tree in zip(self._names, self._trees, strict=True)}

    def budgets(self) -> dict[Tier, int]:
        """Blocks that leases keep at most, in each pool."""
        return {name: self._budget(tier, self._share) for tier, name in enumerate(self._names)}

    def check_invariants(self, leases: Iterable[Lease]) -> list[str]:
        """Counts everything anew for all leases that there are. Returns what is wrong, in words; empty when nothing
        is."""
        leases, wrong = list(leases), list[str]()
        for tier in range(len(self.pools)):
            wrong += self._check_tier(tier, leases)
        wrong += [
            f"a lease is {lease.state} and ends in block {lease.block}"
            for lease in leases
            if (lease.block is not None) != (lease.state == "kept" and lease.depth > 0)
        ]
        return wrong

    def _check_tier(self, tier: int, leases: Sequence[Lease]) -> list[str]:
        pool, wrong = self.pools[tier], list[str]()
        kept: dict[str, set[int]] = {tenant: set() for tenant in self._tenant_trees}
        ends = 0
        for lease in leases:
            block = lease.block if lease.tier == tier else None
            if block is not None and not pool.is_leased(block):
                wrong.append(f"a lease ends in block {block} of tier {tier}, which is not leased")
            if block is not None and pool.prefixes.find_block(lease.digest) != block:
                wrong.append(f"a lease ends in block {block} of tier {tier}, which holds something else")
            ends += block is not None
            depth = 0
            while block is not None:
                kept[lease.tenant].add(block)
                block, depth = pool.prefixes.parent_of(block), depth + 1
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


@dataclass(slots=True, eq=False)
class Lease:
    """The promise to keep the first `tokens` tokens of a prompt until `expires_s`.

    digest       of the last full block among them; without one, see book.last_digest
    tail         the tokens behind that block, TOKEN_BYTES each; recomputed by each reader of the lease
    fingerprint  of all the tokens: a digest may be made to stand for others
    state        kept; degraded to ordinary eviction; expired; or dropped, because there were too many
    tier         number of the pool in which `block` is pinned; block is None when nothing is
    """

    tenant: str
    salt: str
    digest: bytes
    tail: bytes
    fingerprint: bytes
    tokens: int
    depth: int  # full blocks
    ttl_s: float
    expires_s: float
    number: int  # of leases granted before it
    state: Literal["kept", "degraded", "expired", "dropped"] = "degraded"
    tier: int = 0
    block: int | None = None

    def value(self, now: float) -> tuple[float, int]:
        """Orders leases by what would be lost: the share of its time that is left, then the shorter one."""
        return (self.expires_s - now) / self.ttl_s, -self.tokens


def take_fingerprint(tokens: bytes) -> bytes:
    """Of a run of tokens, TOKEN_BYTES each; collision-resistant."""
    return hashlib.blake2b(tokens, digest_size=32).digest()


_Item = TypeVar("_Item")


class Ranking(Generic[_Item]):
    """What is worth least among things whose worth falls with time, at different speeds. Sorted once for each moment
    that is asked about, not for each question: all sequences of a step ask about the same one.

    items  all things, whenever they have to be sorted
    value  what one is worth at a time; None when it does not count (any more)
    """

    def __init__(
        self,
        items: Callable[[], Iterable[_Item]],
        value: Callable[[_Item, float], tuple[float, int] | None],
    ) -> None:
        self._items = items
        self._value = value
        self._ranked: list[tuple[tuple[float, int], _Item]] = []  # the least last
        self._now: float | None = None

    def find_least(self, now: float, beside: _Item | None = None) -> _Item | None:
        """The least of them, but for `beside`; None when there is no other. What came after the first question about
        this moment counts when all that was there before does not count any more."""
        if self._now == now and (found := self._find_ranked(now, beside)) is not None:
            return found
        values = [(value, item) for item in self._items() if (value := self._value(item, now)) is not None]
        self._ranked, self._now = sorted(values, key=lambda entry: entry[0], reverse=True), now
        return self._find_ranked(now, beside)

    def _find_ranked(self, now: float, beside: _Item | None) -> _Item | None:
        for index in range(len(self._ranked) - 1, -1, -1):
            value, item = self._ranked[index]
            if item == beside:
                continue
            if self._value(item, now) == value:
                return item
            del self._ranked[index]  # gone, or worth something else now
        return None


class LeaseTree:
    """The leases of a group that are pinned in one pool. Adding and removing walk up to the first block that is
    counted in any case, so they cost no more than computing those blocks did."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._counts: dict[int, int] = {}  # leases that end in the block, plus counted blocks that hang from it
        self._leases: dict[int, list[Lease]] = {}  # by the block they end in
        self._ranking = Ranking(lambda: self._leases, self._value)

    def __len__(self) -> int:
        """Blocks that are kept, each once."""
        return len(self._counts)

    def missing(self, block: int) -> tuple[int, int | None]:
        """How many blocks a lease that ends in `block` would add, and the nearest one above that is counted already,
        or None."""
        count = 0
        here: int | None = block
        while here is not None and here not in self._counts:
            count += 1
            here = self._pool.prefixes.parent_of(here)
        return count, here

    def add(self, lease: Lease, block: int) -> None:
        self._leases.setdefault(block, []).append(lease)
        here: int | None = block
        while here is not None:
            self._counts[here] = self._counts.get(here, 0) + 1
            if self._counts[here] > 1:
                return
            here = self._pool.prefixes.parent_of(here)

    def remove(self, lease: Lease, block: int) -> None:
        group = self._leases[block]
        group.remove(lease)
        if not group:
            del self._leases[block]
        here: int | None = block
        while here is not None:
            self._counts[here] -= 1
            if self._counts[here]:
                return
            del self._counts[here]
            here = self._pool.prefixes.parent_of(here)

    def leases(self) -> list[Lease]:
        return [lease for group in self._leases.values() for lease in group]

    def find_weakest(self, now: float, beside: int | None = None) -> list[Lease]:
        """The leases whose end would free blocks at the least loss: those of one block that no lease hangs below,
        with the least value (of several that end in one block, the greatest counts). Empty when there are none.

        beside  a block that is to be kept in any case: ending its leases would free nothing
        """
        block = self._ranking.find_least(now, beside)
        return [] if block is None else list(self._leases[block])

    def _value(self, block: int, now: float) -> tuple[float, int] | None:
        group = self._leases.get(block)
        if group is None or self._counts[block] > len(group):
            return None
        return max(lease.value(now) for lease in group)
