"""A lease, and how many blocks a group of leases keeps.

A lease keeps the block it ends in and everything that hangs above it, so leases of one conversation nest and those of
one system prompt meet: each block counts once, however many leases keep it. Knows nothing about budgets;
engine/leases.py has one tree for each pool, and one for each tenant in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Lease:
    """The promise to keep the first `tokens` tokens of a prompt until `expires_s`.

    digest  of the last full block among them; what stands for the salt when there is none (see root_digest)
    tail    the tokens behind that block, TOKEN_BYTES each; they are recomputed by who reads the lease
    state   kept; degraded to ordinary eviction; expired; or dropped, because there were too many
    tier    number of the pool in which `block` is pinned; block is None when nothing is
    """

    tenant: str
    salt: str
    digest: bytes
    tail: bytes
    tokens: int
    depth: int  # full blocks
    ttl_s: float
    expires_s: float
    number: int  # of leases granted before it
    uses: int = 0
    state: Literal["kept", "degraded", "expired", "dropped"] = "degraded"
    tier: int = 0
    block: int | None = None

    def value(self, now: float) -> tuple[float, int]:
        """Orders leases by what would be lost: the share of its time that is left, then the shorter one."""
        return (self.expires_s - now) / self.ttl_s, -self.tokens


class LeaseTree:
    """The leases of a group that are pinned in one pool. Adding and removing walk up to the first block that is
    counted in any case, so they cost no more than computing those blocks did."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._counts: dict[int, int] = {}  # leases that end in the block, plus counted blocks that hang from it
        self._leases: dict[int, list[Lease]] = {}  # by the block they end in

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
            here = self._pool.parent_of(here)
        return count, here

    def add(self, lease: Lease, block: int) -> None:
        self._leases.setdefault(block, []).append(lease)
        here: int | None = block
        while here is not None:
            self._counts[here] = self._counts.get(here, 0) + 1
            if self._counts[here] > 1:
                return
            here = self._pool.parent_of(here)

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
            here = self._pool.parent_of(here)

    def leases(self) -> list[Lease]:
        return [lease for group in self._leases.values() for lease in group]

    def find_weakest(self, now: float, beside: int | None = None) -> list[Lease]:
        """The leases whose end would free blocks at the least loss: those of one block that no lease hangs below,
        with the least value (of several that end in one block, the greatest counts). Empty when there are none.

        beside  a block that is to be kept in any case: ending its leases would free nothing
        """
        least, weakest = None, list[Lease]()
        for block, group in self._leases.items():
            if self._counts[block] > len(group) or block == beside:
                continue
            value = max(lease.value(now) for lease in group)
            if least is None or value < least:
                least, weakest = value, group
        return list(weakest)
