"""Which leases there are: found by the tokens a prompt begins with, ended when their time is up, limited in number.

Knows nothing about blocks, pools or budgets: engine/leases/leases.py decides what is kept. No clock: `now` comes in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from engine.leases.tree import Lease, Ranking
from engine.protocol import TOKEN_BYTES

DEGRADED = 2.0
"""A degraded lease is worth so much less than a kept one: more than the whole of its time."""


class LeaseBook:
    """Leases that are remembered, degraded ones included.

    max_leases   of all tenants
    tenant_most  of one tenant
    """

    def __init__(self, block_size: int, *, max_leases: int, tenant_most: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_leases = max_leases
        self._tenant_most = tenant_most
        self._by_tenant: dict[str, dict[Lease, None]] = {}
        self._rankings: dict[str, Ranking[Lease]] = {}  # of the same tenants
        self._ranking: Ranking[Lease] = Ranking(lambda: self, self._value)  # of all
        self._by_digest: dict[bytes, dict[tuple[str, str, bytes], Lease]] = {}  # digest -> salt, tenant, tail
        self._salts: dict[str, int] = {}  # leases of each
        self._size = 0
        self._ends: list[tuple[float, int, Lease]] = []  # heap; its first entry is that of a lease, as it is now

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Lease]:
        """Over copies; from any thread."""
        return (lease for mine in self._by_tenant.copy().values() for lease in mine.copy())

    def has_tenant(self, tenant: str) -> bool:
        return tenant in self._by_tenant

    def has_salt(self, salt: str) -> bool:
        return salt in self._salts

    # -- look up ------------------------------------------------------------------------------------------------------

    def get(self, tenant: str, salt: str, tokens: bytes, digests: Sequence[bytes]) -> Lease | None:
        """A tenant's lease of exactly this prefix, or None."""
        return self._by_digest.get(last_digest(salt, digests), {}).get((salt, tenant, self.tail(tokens, digests)))

    def find_same(self, lease: Lease) -> Lease | None:
        """The lease that is in the place of this one."""
        return self._by_digest.get(lease.digest, {}).get((lease.salt, lease.tenant, lease.tail))

    def find(self, salt: str, tokens: bytes, digests: Sequence[bytes]) -> list[Lease]:
        """The leases whose tokens a prompt begins with, longest first, as far as digests can be trusted.

        tokens   token ids of the prompt, TOKEN_BYTES each
        digests  of its leading full blocks
        """
        if salt not in self._salts:
            return []
        by_digest = self._by_digest
        places = [(0, last_digest(salt, ()))]
        places += [(depth, digest) for depth, digest in enumerate(digests, 1) if digest in by_digest]
        found = [
            lease
            for depth, digest in places
            for lease in by_digest.get(digest, {}).values()
            if lease.depth == depth and lease.salt == salt and tokens.startswith(lease.tail, depth * self._block_bytes)
        ]
        return sorted(found, key=lambda lease: -lease.tokens)

    def find_ending_in(self, digest: bytes) -> list[Lease]:
        """The leases whose last full block has this digest."""
        return list(self._by_digest.get(digest, {}).values())

    def tail(self, tokens: bytes, digests: Sequence[bytes]) -> bytes:
        """The tokens of a prefix behind its full blocks."""
        return tokens[len(digests) * self._block_bytes :]

    # -- change -------------------------------------------------------------------------------------------------------

    def find_surplus(self, tenant: str, now: float) -> Lease | None:
        """The lease that has to go before one of this tenant is added: the least valuable, degraded ones before kept
        ones; the tenant's own when it has too many, or anybody's when there are too many; None when there is room."""
        if len(self._by_tenant.get(tenant, ())) >= self._tenant_most:
            return self._rankings[tenant].find_least(now)
        return self._ranking.find_least(now) if self._size >= self._max_leases else None

    def _value(self, lease: Lease, now: float) -> tuple[float, int] | None:
        if lease not in self._by_tenant.get(lease.tenant, ()):
            return None
        share, size = lease.value(now)
        return (share if lease.state == "kept" else share - DEGRADED), size

    def add(self, lease: Lease) -> None:
        tenant = lease.tenant
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = {}
            self._rankings[tenant] = Ranking(lambda: self._by_tenant[tenant], self._value)
        self._by_tenant[tenant][lease] = None
        self._by_digest.setdefault(lease.digest, {})[lease.salt, tenant, lease.tail] = lease
        self._salts[lease.salt] = self._salts.get(lease.salt, 0) + 1
        self._size += 1
        heapq.heappush(self._ends, (lease.expires_s, lease.number, lease))

    def remove(self, lease: Lease) -> None:
        """Before its time."""
        self._strike_out(lease)
        if len(self._ends) > 2 * self._size + 64:
            self._ends = [(lease.expires_s, lease.number, lease) for lease in self]
            heapq.heapify(self._ends)
        self._tidy()

    def pop_ended(self, now: float) -> Lease | None:
        """Takes out a lease whose time is up; None when there is none."""
        if not self._ends or self._ends[0][0] > now:
            return None
        self._tidy()
        if not self._ends or self._ends[0][0] > now:
            return None
        lease = heapq.heappop(self._ends)[2]
        self._strike_out(lease)
        self._tidy()
        return lease

    def next_end_s(self) -> float | None:
        """No lease ends before this time, unless one is added. None when there is none."""
        return self._ends[0][0] if self._ends else None

    def _tidy(self) -> None:
        """Until the first entry of the heap is that of a lease which is in the book and ends then."""
        while self._ends:
            end_s, number, lease = self._ends[0]
            if lease not in self._by_tenant.get(lease.tenant, ()):
                heapq.heappop(self._ends)
            elif lease.expires_s > end_s:
                heapq.heapreplace(self._ends, (lease.expires_s, number, lease))
            else:
                return

    def _strike_out(self, lease: Lease) -> None:
        mine, same = self._by_tenant[lease.tenant], self._by_digest[lease.digest]
        del mine[lease], same[lease.salt, lease.tenant, lease.tail]
        if not mine:
            del self._by_tenant[lease.tenant], self._rankings[lease.tenant]
        if not same:
            del self._by_digest[lease.digest]
        self._size -= 1
        self._salts[lease.salt] -= 1
        if not self._salts[lease.salt]:
            del self._salts[lease.salt]

    def check_invariants(self) -> list[str]:
        """Counts everything anew. Returns what is wrong, in words; empty for a sound book."""
        wrong: list[str] = []
        for name, counts in (
            ("tenants", [len(mine) for mine in self._by_tenant.values()]),
            ("digests", [len(same) for same in self._by_digest.values()]),
            ("salts", list(self._salts.values())),
        ):
            if sum(counts) != self._size or 0 in counts:
                wrong.append(f"{len(self)} leases are remembered, and {sum(counts)} by their {name}")
        if len(self) > self._max_leases or any(len(mine) > self._tenant_most for mine in self._by_tenant.values()):
            wrong.append(f"{len(self)} leases are remembered, more than the limits of all or of one tenant")
        return wrong


def last_digest(salt: str, digests: Sequence[bytes]) -> bytes:
    """Of the last full block of a prefix; without one, something in its place that no digest can be."""
    return digests[-1] if digests else b"no full block, salt " + salt.encode("utf-8", "surrogatepass")
