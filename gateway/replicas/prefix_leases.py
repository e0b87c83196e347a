"""The leases of one replica: which prefixes its cache is asked to keep, for whom, until when. Pure: times come in.

The bundled engine's own rules and budgets (engine/leases/leases.py), over a pool of blocks that holds what leases keep
and nothing more: what a server really holds is the index's to say. A server of others knows no leases; touching.py
renews them in its cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from engine.leases.leases import Leases
from engine.leases.pins import Lease, take_fingerprint
from engine.pool.blocks import BlockPool
from engine.protocol import DIGEST_BYTES, TOKEN_BYTES, Breakpoint, Hello, SequenceUpdate, chain_digests, split_digests
from engine.protocol.frozen import dataclass
from gateway.digests import derived_salt
from gateway.types import EncodedPrompt, Request

MAX_POOL_BLOCKS: Final = 1 << 18
"""Of 16 tokens, about 100 bytes each, and 250 more for one that is leased: budgets are shares of so many at most."""

MAX_READS: Final = 256
"""As engine/leases/claims.py."""


class LeaseBudget(NamedTuple):
    """See engine/config.py."""

    share: float = 0.5
    tenant_share: float = 0.25
    max_leases: int = 4096


class Prefix(NamedTuple):
    """What a lease keeps and no other one goes beyond. Touched as a whole, it keeps all leases inside of it."""

    digests: bytes  # packed, up to the last full block of ours that ends where one of the server ends
    salt: str  # of the request
    tokens: bytes  # up to there, and one more: a server computes the last token of every prompt anew


@dataclass(slots=True)
class Claim:
    """The leases of one request.

    found   that its prompt begins with, longest first
    made    what its breakpoints became; None as long as its prompt is not computed
    """

    request: Request
    prompt: EncodedPrompt
    digests: Sequence[bytes]
    found: Sequence[Lease]
    pushed: float  # as TouchPlan.pushed, when it was sent
    predicted_tokens: int  # of its prompt, that will be reused
    made: list[Lease] | None = None
    is_told: bool = False  # the server has said what was reused


class PrefixLeases:
    """Belongs to one replica as long as its blocks have the same digests, over restarts of its server.

    pages  tokens of a block of the server
    """

    def __init__(self, hello: Hello, page_tokens: int, budget: LeaseBudget) -> None:
        self.namespace = hello.namespace
        self.block_size = hello.namespace.block_size
        self.page_tokens = math.lcm(max(1, page_tokens), self.block_size)
        self.pool = BlockPool(min(max(1, hello.num_blocks), MAX_POOL_BLOCKS), self.block_size)
        self.leases = Leases({"device": self.pool}, **budget._asdict())
        self._page_tokens = max(1, page_tokens)

    def fits(self, hello: Hello, page_tokens: int) -> bool:
        """Whether they are of such a replica, too."""
        blocks = min(max(1, hello.num_blocks), MAX_POOL_BLOCKS)
        same = self.namespace == hello.namespace and self.pool.num_blocks == blocks
        return same and self._page_tokens == max(1, page_tokens)

    @property
    def leased_tokens(self) -> int:
        return self.leases.num_blocks() * self.block_size

    # -- a request -----------------------------------------------------------------------------------------------------

    def open(
        self, prompt: EncodedPrompt, request: Request, now: float, pushed: float = 0.0, predicted_tokens: int = 0
    ) -> Claim | None:
        """A request is about to be sent: the leases that it begins with are renewed. None for one that has nothing to
        do with leases."""
        if not request.use_cache or not (prompt.breakpoints or self.leases.any_of(request.salt)):
            return None
        digests = split_digests(prompt.digests)
        found = self.find(request.salt, prompt.tokens, digests, now)
        self.leases.renew(found, request.received_s)
        if not found and not prompt.breakpoints:
            return None
        return Claim(request, prompt, digests, found, pushed, predicted_tokens)

    def find(self, salt: str, tokens: bytes, digests: Sequence[bytes], now: float) -> list[Lease]:
        """The leases whose tokens a prompt begins with, longest first."""
        self.leases.expire(now)
        found = self.leases.find(salt, tokens, digests)
        if found and found[0].fingerprint != take_fingerprint(tokens[: found[0].tokens * TOKEN_BYTES]):
            return []  # its digests stand for other tokens
        return found

    def grant(self, claim: Claim, now: float) -> None:
        """Its prompt is computed: its breakpoints become leases, and degraded ones that it uses are kept again."""
        request, tokens = claim.request, claim.prompt.tokens
        made: list[Lease] = []
        degraded = [lease for lease in claim.found if lease.state == "degraded"]
        wishes: list[Breakpoint | Lease] = sorted([*claim.prompt.breakpoints, *degraded], key=lambda one: one.tokens)
        if wishes:
            blocks = self._register(request.salt, tokens, claim.digests[: wishes[-1].tokens // self.block_size])
            for wish in wishes:
                own, digests = tokens[: wish.tokens * TOKEN_BYTES], claim.digests[: wish.tokens // self.block_size]
                if isinstance(wish, Lease):
                    self.leases.keep_again(wish, own, digests, now)
                else:
                    granted = (request.tenant.name, request.salt, own, digests, wish.ttl_s)
                    made.append(self.leases.grant(*granted, arrived_s=request.received_s, now=now))
            self.pool.release(blocks)
            self._tidy()
        claim.made = made

    def restore(self, tenant: str, salt: str, tokens: bytes, ttl_s: float, used_s: float, now: float) -> Lease:
        """A lease that another gateway granted or renewed, for a request that arrived at `used_s`."""
        root = replace(self.namespace, salt=derived_salt(self.namespace.salt, salt)).root()
        digests = split_digests(chain_digests(root, tokens, self.block_size, self.namespace.hash_name))
        blocks = self._register(salt, tokens, digests)
        lease = self.leases.grant(tenant, salt, tokens, digests, ttl_s, arrived_s=used_s, now=now)
        self.pool.release(blocks)
        self._tidy()
        return lease

    def describe(self, claim: Claim, update: SequenceUpdate, cached_tokens: int, elsewhere: Iterable[Lease]) -> None:
        """Fills in the figures of leases, of which those were read whose blocks were reused. `cached_tokens` as the
        server reports, or as the index predicts. `elsewhere`: what other replicas keep of the prompt, asked for where
        this one reused more than its own leases say."""
        points, made, most = claim.prompt.breakpoints, claim.made or (), claim.prompt.num_tokens - 1
        page = self._page_tokens

        def reused(leases: Iterable[Lease]) -> set[int]:
            return {one.tokens for one in leases if cached_tokens >= min(one.tokens, most) // page * page}

        reads = reused(claim.found)
        if points and cached_tokens >= max(reads, default=0) // page * page + page:
            reads |= reused(elsewhere)
        read, kept = max(reads, default=0), max((lease.tokens for lease in made if lease.state == "kept"), default=0)
        if not read and not points:
            return
        update.lease_read_tokens, update.lease_write_tokens = read, max(0, kept - read)
        update.leases_degraded = sum(lease.state in ("degraded", "dropped") for lease in made)
        if read and points:
            update.lease_reads = sorted(reads, reverse=True)[:MAX_READS]

    # -- what is to be touched -----------------------------------------------------------------------------------------

    def prefixes(self) -> Iterator[bytes]:
        """Names (`Lease.digest`) of the leases that are kept and that no other one goes beyond."""
        children, digest = self.pool.prefixes.children, self.pool.prefixes.digest
        blocks = {lease.block for lease in self.leases if lease.block is not None}
        return (name for block in blocks if not children[block] and (name := digest[block]) is not None)

    def is_whole(self, lease: Lease) -> bool:
        """Whether its digest is the name of one of these."""
        return lease.block is not None and not self.pool.prefixes.children[lease.block]

    def last_digest(self, name: bytes) -> bytes | None:
        """Of the last block of ours that ends where one of the server ends; None where there is none."""
        block = self.pool.prefixes.find_block(name)
        depth = 0 if block is None else self._depth(block)
        for _ in range(depth % (self.page_tokens // self.block_size)):
            assert block is not None
            block = self.pool.prefixes.parent_of(block)
        return None if block is None else self.pool.prefixes.digest[block]

    def get_prefix(self, name: bytes) -> Prefix | None:
        """None for one that is shorter than a block of the server."""
        digest = self.last_digest(name)
        if digest is None:
            return None
        block, leaf = self.pool.prefixes.find_block(digest), self.pool.prefixes.find_block(name)
        assert block is not None
        assert leaf is not None
        salt, tokens = self.pool.prefixes.up_to(leaf)
        digests = self.chain(block)
        size = len(digests) // DIGEST_BYTES * self.block_size * TOKEN_BYTES
        return Prefix(digests, salt, tokens[:size] + (tokens[size : size + TOKEN_BYTES] or tokens[:TOKEN_BYTES]))

    def chain(self, block: int) -> bytes:
        """Packed digests of the blocks up to one."""
        digests, here = [self.pool.prefixes.digest[block]], self.pool.prefixes.parent_of(block)
        while here is not None:
            digests.append(self.pool.prefixes.digest[here])
            here = self.pool.prefixes.parent_of(here)
        return b"".join(digest or b"" for digest in reversed(digests))

    def tokens_of(self, lease: Lease) -> bytes:
        """Of one that keeps a block."""
        assert lease.block is not None
        return self.pool.prefixes.up_to(lease.block)[1] + lease.tail

    def drop(self, lease: Lease) -> None:
        """Another replica keeps it."""
        self.leases.drop(lease)
        self._tidy()

    def _depth(self, block: int) -> int:
        depth, here = 0, self.pool.prefixes.parent_of(block)
        while here is not None:
            depth, here = depth + 1, self.pool.prefixes.parent_of(here)
        return depth + 1

    # -- the pool ------------------------------------------------------------------------------------------------------

    def _register(self, salt: str, tokens: bytes, digests: Sequence[bytes]) -> list[int]:
        """Puts the blocks of a prefix into the pool, as far as there is room. To be released."""
        pool, width = self.pool, self.block_size * TOKEN_BYTES
        blocks = pool.prefixes.find(salt, tokens, digests)
        pool.acquire(blocks)
        new = pool.allocate(len(digests) - len(blocks)) or []
        for count, block in enumerate(new):
            parent, place = blocks[-1] if blocks else None, len(blocks)
            own = tokens[place * width : (place + 1) * width]
            if pool.register(block, parent, salt, digests[place], own) != block:  # a digest that stands for another one
                pool.release(new[count:])
                break
            blocks.append(block)
        return blocks

    def _tidy(self) -> None:
        """Forgets blocks that no lease keeps."""
        while self.pool.available > self.pool.num_free:
            self.pool.evict()
        self.pool.prefixes.take_events()
