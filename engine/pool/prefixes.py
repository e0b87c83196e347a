"""What the registered blocks of a pool hold: a forest in which each block names the one that it continues.

A registered block stores its token ids, its parent block and, at the root, its salt. `find` compares all of them, so a
digest is only ever a hint. That a parent is named by its block id is safe because a registered block's parent stays
registered for as long as the child is (eviction takes leaves only): an id in the parent's place cannot have been freed
and filled with something else in between.

Knows nothing about references, leases and eviction: engine/pool/blocks.py says when a block enters and leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from engine.protocol import TOKEN_BYTES, BlockEvents

ROOT = -1
"""In the parent's place: the block begins a prefix."""


class Prefixes:
    """The registered blocks among 0 .. num_blocks - 1, of block_size tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.digest: list[bytes | None] = [None] * num_blocks  # None: not registered
        self.parent = [ROOT] * num_blocks
        self.children = [0] * num_blocks  # registered blocks whose parent this is

        self._block_bytes = block_size * TOKEN_BYTES
        self._by_digest: dict[bytes, int] = {}  # registered blocks, parents before children
        self._tokens = [b""] * num_blocks
        self._salt = [""] * num_blocks  # of blocks without a parent; the others inherit their parent's

        self._stored: dict[bytes, None] = {}  # since the last take_events
        self._removed: dict[bytes, None] = {}

    # -- look up ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[int]:
        """Parents before children."""
        return iter(self._by_digest.values())

    def find(
        self, salt: str, tokens: bytes, digests: Sequence[bytes], *, start: int = 0, behind: int | None = None
    ) -> list[int]:
        """The blocks that hold the longest stored beginning of `tokens`. Changes nothing.

        tokens   token ids, TOKEN_BYTES each, at least as many as the digests cover
        digests  chain digests of the leading full blocks; where to look, never a proof
        start    goes on there: `behind`, which the caller keeps from being evicted, is the block before that one
        Empty when the first block is not there. Acquire the blocks before anything else is allocated.
        """
        found: list[int] = []
        parent, width = ROOT if behind is None else behind, self._block_bytes
        stored_parent, stored_tokens = self.parent, self._tokens
        if start:
            assert parent == ROOT or self.digest[parent] is not None, f"block {parent} is not registered"
            digests, start = digests[start:], start * width
        for digest in digests:
            block = self._by_digest.get(digest)
            if (
                block is None
                or stored_parent[block] != parent
                or stored_tokens[block] != tokens[start : start + width]
                or (parent == ROOT and self._salt[block] != salt)
            ):
                break
            found.append(block)
            parent = block
            start += width
        return found

    def find_block(self, digest: bytes) -> int | None:
        """The block that is registered under a digest, whatever it holds: `find` and `holds` are those that compare."""
        return self._by_digest.get(digest)

    def holds(self, block: int, parent: int, salt: str, tokens: bytes) -> bool:
        """Whether a registered block holds these tokens behind that parent, or, behind ROOT, under this salt."""
        same = self.parent[block] == parent and self._tokens[block] == tokens
        return same and (parent != ROOT or self._salt[block] == salt)

    def parent_of(self, block: int) -> int | None:
        """The block that a registered block hangs from; None for one that begins a prefix."""
        parent = self.parent[block]
        return None if parent == ROOT else parent

    def up_to(self, block: int) -> tuple[str, bytes]:
        """The salt and the tokens of a registered block and of all that it hangs from."""
        parts = [self._tokens[block]]
        while (above := self.parent_of(block)) is not None:
            block = above
            parts.append(self._tokens[block])
        return self._salt[block], b"".join(reversed(parts))

    def below(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are registered and everything that hangs from them, parents first. O(len(self))."""
        wanted = {block for block in blocks if self.digest[block] is not None}
        in_order: list[int] = []
        for block in self if wanted else ():
            if block in wanted or self.parent[block] in wanted:
                wanted.add(block)
                in_order.append(block)
        return in_order

    def roots(self, prefix: str) -> list[int]:
        """The blocks without a parent whose salt begins so. O(len(self))."""
        parent, salt = self.parent, self._salt
        return [block for block in self if parent[block] == ROOT and salt[block].startswith(prefix)]

    def count_findable(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are registered, by their digests alone: a figure, not a find. O(log n),
        because a registered block's parent is registered too."""
        return bisect_left(range(len(digests)), True, key=lambda index: digests[index] not in self._by_digest)

    # -- change -------------------------------------------------------------------------------------------------------

    def add(self, block: int, parent: int, salt: str, digest: bytes, tokens: bytes) -> None:
        """Registers a block under a digest that stands for nothing yet. `parent` is registered, or ROOT."""
        assert len(tokens) == self._block_bytes, f"{len(tokens)} bytes in a block of {self._block_bytes}"
        if parent != ROOT:
            self.children[parent] += 1
        self._by_digest[digest] = block
        self.digest[block] = digest
        self.parent[block] = parent
        self._tokens[block] = tokens
        self._salt[block] = salt if parent == ROOT else ""
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._stored[digest] = None

    def remove(self, block: int) -> int:
        """Unregisters a leaf. Returns the parent that it had, or ROOT."""
        assert not self.children[block], f"block {block} still has children"
        digest, parent = self.digest[block], self.parent[block]
        assert digest is not None, f"block {block} is not registered"
        del self._by_digest[digest]
        self.digest[block] = None
        self.parent[block] = ROOT
        self._tokens[block] = b""
        if digest in self._stored:
            del self._stored[digest]
        else:
            self._removed[digest] = None
        if parent != ROOT:
            self.children[parent] -= 1
        return parent

    # -- events for the index ----------------------------------------------------------------------------------------

    def take_events(self) -> BlockEvents:
        """What became findable and what ceased to be since the last call, net: a digest is in one run at most.

        A reader that takes `removed` out and then puts `stored` in has the truth, and a prefix-closed table at every
        moment in between: removed runs children first, stored parents first.
        """
        if not self._stored and not self._removed:
            return _NOTHING
        events = BlockEvents(stored=b"".join(self._stored), removed=b"".join(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def snapshot(self) -> BlockEvents:
        """Everything that is findable now, parents first, to start a table from. Events that are taken later apply on
        top of it, also those of changes that it has in it already."""
        return BlockEvents(stored=b"".join(self._by_digest), reset=True)

    def check_invariants(self) -> list[str]:
        """Counts everything anew. Returns what is wrong, in words; empty for a sound forest."""
        wrong: list[str] = []
        children = [0] * len(self.children)
        for block in self:
            parent = self.parent[block]
            if parent != ROOT:
                children[parent] += 1
                if self.digest[parent] is None:
                    wrong.append(f"block {block} is registered and its parent {parent} is not")
        for block, digest in enumerate(self.digest):
            if self.children[block] != children[block]:
                wrong.append(f"block {block}: {children[block]} children are counted as {self.children[block]}")
            if digest is not None and self._by_digest.get(digest) != block:
                wrong.append(f"block {block} is registered and cannot be found")
        return wrong


_NOTHING = BlockEvents()
