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
        held = self._held.get(incarnation)
        low, high = 0, len(digests) // DIGEST_BYTES if held else 0
        while held and low < high:  # blocks before `low` are held, block `high` is not
            middle = (low + high) // 2
            if digests[middle * DIGEST_BYTES : (middle + 1) * DIGEST_BYTES] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """See PrefixIndex. The model makes no difference: an incarnation serves one."""
        return {name: self.prefix(name, digests) for name in incarnations if name in self._held}
