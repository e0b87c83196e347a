"""The block side of a sequence: what it reuses, what it holds, what of it others may reuse, and what outlives it.

Keeps Sequence.block_table, num_computed, num_registered and digests right; a sequence has blocks only between `admit`
and `release`. engine/scheduler.py decides when; engine/pool/blocks.py owns the blocks, engine/tiers/tiers.py what is
below them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.pool.blocks import BlockPool
from engine.protocol import MIN_TAIL_TOKENS, Namespace, chain_digests, split_digests
from engine.sequence import Copy, Sequence
from engine.tiers.tiers import Chain, Tiers


@dataclass(slots=True)
class _Chain:
    """Where the next full block of a sequence is registered.

    tip     the registered block that holds the content of block num_registered - 1; None before the first
    lent    the tip is not in the sequence's own table: another sequence registered the same content first. It carries
            a reference of this sequence, so that it is still the parent when the next block comes
    broken  nothing more is registered: a digest stood for something else, or the client wants it so
    """

    tip: int | None = None
    lent: bool = False
    broken: bool = False


class BlockTables:
    """Gives blocks to sequences and takes them back. Every admitted sequence is released exactly once."""

    def __init__(self, pool: BlockPool, namespace: Namespace, tiers: Tiers) -> None:
        self.pool = pool
        self.tiers = tiers
        self.find_not_finite: Callable[[list[int]], list[int]] = list  # the loop's model is asked; else all are suspect
        self._namespace = namespace
        self._chains: dict[Sequence, _Chain] = {}

    def __len__(self) -> int:
        """Sequences that hold blocks."""
        return len(self._chains)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def chain(self, tokens: bytes, salt: str, parent: bytes | None = None) -> list[bytes]:
        """Digests of the full blocks of `tokens`, behind `parent` or at the beginning of a prefix."""
        if parent is None:
            parent = replace(self._namespace, salt=salt).root()
        return split_digests(chain_digests(parent, tokens, self.pool.block_size, self._namespace.hash_name))

    def restore(self, sequence: Sequence, headroom: int, now: float) -> list[int]:
        """Begins to bring back what the disk holds of a waiting sequence's prefix, once before each admission.
        Returns the blocks that are being written from now on; empty when there is nothing to wait for."""
        if sequence.restored or self.tiers.disk is None:
            return []
        room = self.blocks_for(sequence.num_tokens) + headroom
        blocks = self.tiers.restore(self._full(sequence, self.count_reusable(sequence)), room, now)
        sequence.restored = bool(blocks)
        return blocks

    def admit(self, sequence: Sequence, headroom: int) -> list[int] | None:
        """Gives a sequence blocks for all its tokens: reused ones first, new ones for the rest.

        headroom  blocks that must be left over for others to grow into
        Returns the new blocks, which are to be zeroed; num_computed says how many tokens need not be computed. At
        least MIN_TAIL_TOKENS are left to compute, the last one among them. Returns None, and changes nothing, when
        there are too few blocks.
        """
        size, reusable = self.pool.block_size, self.count_reusable(sequence)
        reused = self.pool.prefixes.find(sequence.salt, sequence.tokens.tobytes(), sequence.digests[:reusable])
        missing = self.blocks_for(sequence.num_tokens) - len(reused)
        if self.pool.available_beside(reused) < missing + headroom:
            return None
        self._introduce(sequence, reused)
        self.pool.acquire(reused)
        fresh = self.pool.allocate(missing, _taker(sequence))
        assert fresh is not None, "the pool gave fewer blocks than it said it has"
        self._chains[sequence] = _Chain(tip=reused[-1] if reused else None, broken=not sequence.use_cache)
        sequence.block_table = array("i", reused + fresh)
        sequence.num_computed = len(reused) * size
        sequence.num_registered = len(reused)
        sequence.restored = False
        return fresh

    def fork(self, sequence: Sequence, source: Sequence, headroom: int, copies: list[Copy]) -> list[int] | None:
        """Gives a sequence the blocks of another one's prompt, which is its own, too: nothing is left to compute. Whole
        blocks are shared; the last one, if it is not full, becomes a block of its own.

        headroom  blocks that must be left over for others to grow into
        copies    gets the copy of the last block, which the next step makes
        Returns the new blocks, which are to be zeroed; None, and changes nothing, when there is too little room.
        """
        full, rest = divmod(sequence.num_tokens, self.pool.block_size)
        if self.pool.available < headroom + bool(rest):
            return None
        shared = source.block_table[:full]
        self.pool.acquire(shared)
        fresh = self.pool.allocate(int(bool(rest)), _taker(sequence))
        assert fresh is not None, "the pool gave fewer blocks than it said it has"
        if rest:
            copies.append(Copy(source.block_table[full], fresh[0], rest))
        found = self.pool.prefixes.find(sequence.salt, sequence.tokens.tobytes(), sequence.digests[:full])
        self._introduce(sequence, found)
        broken = not sequence.use_cache or self._chains[source].broken or len(found) < full
        chain = self._chains[sequence] = _Chain(broken=broken)
        if found and not broken:  # the source may hold a private copy of what is found
            self._move_tip(chain, found[-1], lent=found[-1] != shared[-1])
        sequence.block_table = shared + array("i", fresh)
        sequence.num_computed = sequence.num_tokens
        sequence.num_registered = len(found)
        sequence.prompt_logprobs = source.prompt_logprobs
        return fresh

    def grow(self, sequence: Sequence, ahead: int = 0) -> list[int] | None:
        """Makes room for a sequence's next token, and for so many behind it. Returns the new blocks, often none; None
        when there are too few."""
        missing = self.blocks_for(sequence.num_tokens + ahead) - len(sequence.block_table)
        fresh = self.pool.allocate(max(0, missing), _taker(sequence))
        sequence.block_table.extend(fresh or ())
        return fresh

    def register(self, sequence: Sequence) -> None:
        """Makes the blocks that num_computed covers findable. Call it after the step that computed them succeeded."""
        chain, size = self._chains[sequence], self.pool.block_size
        full = sequence.num_computed // size
        if sequence.num_registered >= full or chain.broken:
            return
        if len(sequence.digests) < full:
            known = len(sequence.digests)
            parent = sequence.digests[-1] if known else None
            sequence.digests += self.chain(sequence.tokens[known * size : full * size].tobytes(), sequence.salt, parent)
        for index in range(sequence.num_registered, full):
            block = sequence.block_table[index]
            tokens = sequence.tokens[index * size : (index + 1) * size].tobytes()
            digest, origin = sequence.digests[index], sequence.origin
            holder = self.pool.register(block, chain.tip, sequence.salt, digest, tokens, origin)
            if holder is None:
                chain.broken = True
                return
            self._move_tip(chain, holder, lent=holder != block)
            sequence.num_registered = index + 1

    def save(self, sequence: Sequence) -> None:
        """Hands what is registered of a sequence to the disk, each block once."""
        if sequence.num_registered > sequence.num_queued and self.tiers.disk is not None:
            sequence.num_queued = sequence.num_registered
            urgent = bool(sequence.breakpoints)  # what is leased moves down, and leaves room above
            self.tiers.save(self._full(sequence, sequence.num_registered), urgent=urgent)

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks back. What was registered can be found until it is evicted, and longer below."""
        self.save(sequence)
        sequence.origin.output_tokens = sequence.num_generated
        chain = self._chains.pop(sequence)
        self.pool.release(sequence.block_table)
        if chain.lent and chain.tip is not None:
            self.pool.release([chain.tip])
        sequence.block_table = array("i")
        sequence.num_computed = sequence.num_registered = sequence.follow_start = sequence.follow_end = 0

    def quarantine(self, sequence: Sequence) -> int:
        """Numbers of a sequence are not finite: its findable blocks are looked through, and those that are not finite
        become unfindable in all tiers, with everything that hangs from them. What others share stays if it is sound:
        the prompt may have overflowed by itself. Other sequences that hold such blocks go on and register nothing more.
        Returns the number of blocks that were unregistered."""
        findable = [block for block in sequence.block_table if self.pool.is_registered(block)]
        bad = set(self.find_not_finite(findable))
        if not bad:
            return 0
        first = next(index for index, block in enumerate(sequence.block_table) if block in bad)
        count = self.pool.forget(bad)
        for chain in self._chains.values():
            if chain.tip is not None and not self.pool.is_registered(chain.tip):
                chain.broken = True
        if self.tiers.disk is not None:
            self.tiers.forget(self._full(sequence, len(sequence.digests)), start=first)
        return count

    def detach(self, sequence: Sequence) -> None:
        """From now on nothing is reused for a sequence and nothing of it can be found by others, whether it waits or
        runs. What is registered of it is the caller's to forget."""
        sequence.use_cache, sequence.digests = False, []
        if (chain := self._chains.get(sequence)) is not None:
            chain.broken = True

    def count_reusable(self, sequence: Sequence) -> int:
        """Leading blocks that need not be computed, if the pool has them."""
        return max(0, sequence.num_tokens - MIN_TAIL_TOKENS) // self.pool.block_size

    def _full(self, sequence: Sequence, num_blocks: int) -> Chain:
        """The sequence's first blocks, as the tiers name them."""
        num_blocks = min(num_blocks, len(sequence.digests))
        tokens = sequence.tokens[: num_blocks * self.pool.block_size].tobytes()
        return Chain(sequence.salt, tokens, sequence.digests[:num_blocks])

    def _introduce(self, sequence: Sequence, reused: list[int]) -> None:
        """Tells the eviction policy of a request."""
        sequence.origin.prompt_tokens = sequence.num_prompt
        self.pool.policy.begin(sequence.origin, reused, sequence.digests)

    def _move_tip(self, chain: _Chain, tip: int, *, lent: bool) -> None:
        if lent:
            self.pool.acquire([tip])
        if chain.lent and chain.tip is not None:
            self.pool.release([chain.tip])
        chain.tip, chain.lent = tip, lent


def _taker(sequence: Sequence) -> tuple[str, str]:
    return sequence.tenant, sequence.request_id
