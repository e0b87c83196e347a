"""Which leases there are: found by the tokens a prompt begins with, ended when their time is up, limited in number.

Knows nothing about blocks, pools or budgets: engine/leases.py decides what is kept. No clock: `now` comes in.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence

from engine.lease_tree import Lease
from engine.protocol import TOKEN_BYTES


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
        self._by_digest: dict[bytes, dict[tuple[str, str, bytes], Lease]] = {}  # digest -> salt, tenant, tail
        self._salts: dict[str, int] = {}  # leases of each
        self._ends: list[tuple[float, int, Lease]] = []  # heap; one that was renewed is put back when its turn comes

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Lease]:
        """Over a copy; from any thread."""
        return (lease for _, _, lease in self._ends.copy())

    def has_tenant(self, tenant: str) -> bool:
        return tenant in self._by_tenant

    def has_salt(self, salt: str) -> bool:
        return salt in self._salts

    # -- look up ------------------------------------------------------------------------------------------------------

    def get(self, tenant: str, salt: str, tokens: bytes, digests: Sequence[bytes]) -> Lease | None:
        """A tenant's lease of exactly this prefix, or None."""
        return self._by_digest.get(last_digest(salt, digests), {}).get((salt, tenant, self.tail(tokens, digests)))

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
        crowd: Collection[Lease] = self._by_tenant.get(tenant, ())
        if len(crowd) < self._tenant_most:
            if len(self) < self._max_leases:
                return None
            crowd = list(self)
        return min(crowd, key=lambda lease: (lease.state == "kept", lease.value(now)))

    def add(self, lease: Lease) -> None:
        heapq.heappush(self._ends, (lease.expires_s, lease.number, lease))
        self._by_tenant.setdefault(lease.tenant, {})[lease] = None
        self._by_digest.setdefault(lease.digest, {})[lease.salt, lease.tenant, lease.tail] = lease
        self._salts[lease.salt] = self._salts.get(lease.salt, 0) + 1

    def remove(self, lease: Lease) -> None:
        """Before its time. O(leases)."""
        self._ends = [entry for entry in self._ends if entry[2] is not lease]
        heapq.heapify(self._ends)
        self._strike_out(lease)

    def pop_ended(self, now: float) -> Lease | None:
        """Takes out a lease whose time is up; None when there is none."""
        while self._ends and self._ends[0][0] <= now:
            lease = self._ends[0][2]
            if lease.expires_s <= now:
                heapq.heappop(self._ends)
                self._strike_out(lease)
                return lease
            heapq.heapreplace(self._ends, (lease.expires_s, lease.number, lease))
        return None

    def next_end_s(self) -> float | None:
        """No lease ends before this time, unless one is added. None when there is none."""
        return self._ends[0][0] if self._ends else None

    def _strike_out(self, lease: Lease) -> None:
        mine, same = self._by_tenant[lease.tenant], self._by_digest[lease.digest]
        del mine[lease], same[lease.salt, lease.tenant, lease.tail]
        if not mine:
            del self._by_tenant[lease.tenant]
        if not same:
            del self._by_digest[lease.digest]
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
            if sum(counts) != len(self) or 0 in counts:
                wrong.append(f"{len(self)} leases are remembered, and {sum(counts)} by their {name}")
        if len(self) > self._max_leases or any(len(mine) > self._tenant_most for mine in self._by_tenant.values()):
            wrong.append(f"{len(self)} leases are remembered, more than the limits of all or of one tenant")
        return wrong


def last_digest(salt: str, digests: Sequence[bytes]) -> bytes:
    """Of the last full block of a prefix; without one, something in its place that no digest can be."""
    return digests[-1] if digests else b"no full block, salt " + salt.encode("utf-8", "surrogatepass")
