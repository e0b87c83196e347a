"""A lease, and how many blocks a group of leases keeps.

A lease keeps the block it ends in and everything that hangs above it, so leases of one conversation nest and those of
one system prompt meet: each block counts once, however many leases keep it. Knows nothing about budgets;
engine/leases/pins.py has one tree for each pool, and one for each tenant in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from engine.pool.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Lease:
    """The promise to keep the first `tokens` tokens of a prompt until `expires_s`.

    digest       of the last full block among them; without one, see book.last_digest
    tail         the tokens behind that block, TOKEN_BYTES each; they are recomputed by who reads the lease
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
    """Of a run of tokens, TOKEN_BYTES each; nobody can find two runs that have the same one."""
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
