"""The index in this gateway's own memory, fed by the engines' streams. The naive twin of what Redis has.

Answers when Redis does not, and is always complete for the engines that this gateway is connected to. One set of
digests per incarnation, bounded by the number of blocks that the engine has. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.protocol import DIGEST_BYTES, BlockEvents, split_digests
from gateway.index.lost import LostBlocks


class MemoryIndex:
    """Blocks by incarnation. Never raises."""

    def __init__(self) -> None:
        self.lost = LostBlocks()
        self._held: dict[str, set[bytes]] = {}

    def apply(self, incarnation: str, events: BlockEvents | None) -> None:
        """Takes `removed` out, then puts `stored` in. From now on the incarnation is known; with None not any more,
        because this gateway stops following its events."""
        if events is None:
            self.drop(incarnation)
            return
        held = self._held.setdefault(incarnation, set())
        if events.reset:
            held.clear()
        if events.removed:
            held.difference_update(split_digests(events.removed))
            self.lost.add(incarnation, events)
        held.update(split_digests(events.stored))

    def drop(self, incarnation: str) -> None:
        """Forgets an incarnation. Nothing happens when it is not known."""
        self._held.pop(incarnation, None)

    def knows(self, incarnation: str) -> bool:
        """Whether it is fed with the incarnation's events, even if that holds nothing."""
        return incarnation in self._held

    def blocks(self, incarnation: str) -> int:
        """Blocks that the incarnation holds; 0 when it is not known."""
        return len(self._held.get(incarnation, ()))

    def prefix(self, incarnation: str, digests: bytes) -> int:
        """Leading blocks of `digests` that one incarnation holds; 0 when it is not known."""
        return self.find(digests, (incarnation,)).get(incarnation, 0)

    def find(self, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """See PrefixIndex. The model makes no difference: an incarnation serves one. As find.lua does it, what two in a
        row held is tried first."""
        found: dict[str, int] = {}
        blocks, usual, last = len(digests) // DIGEST_BYTES, 0, 0

        def digest(block: int) -> bytes:
            return digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]

        first, behind = b"", digest(0)  # the last block of what is usual, and the one behind it
        for name in incarnations:
            if (held := self._held.get(name)) is None:
                continue
            low, high = 0, blocks if held else 0  # blocks before `low` are held, block `high` is not
            if usual and first not in held:
                high = min(high, usual - 1)
            elif usual < high:
                low, high = (usual + 1, high) if behind in held else (usual, usual)
            else:
                low = high
            while low < high:
                middle = (low + high) // 2
                if digest(middle) in held:
                    low = middle + 1
                else:
                    high = middle
            if low == last != usual:
                usual, first, behind = low, digest(low - 1) if low else b"", digest(low)
            last = found[name] = low
        return found
