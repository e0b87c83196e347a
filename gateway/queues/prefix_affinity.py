"""Which engine was sent a prefix a moment ago, before any index can know it. Pure: no I/O, no clock.

For the batch lane, whose lines come together and begin alike: without it the first lines of a document would go to all
engines at once, and each would compute it. A prompt is remembered by digests at a few positions, two per doubling
of its length, so what is found of a common prefix may be a third too short. It is a hint; engines look for themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from engine.protocol import DIGEST_BYTES

MAX_POSITIONS: Final = 16_384
"""Of all prompts that are remembered, the latest."""

AFFINITY_S: Final = 60.0
"""So long a prefix is taken to be where it was sent; every line that follows renews it."""


class PrefixAffinity:
    """Digest at a position -> which engine had a prompt with it last, and when."""

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def sent(self, digests: bytes, incarnation: str, now_s: float) -> None:
        for count in positions(len(digests) // DIGEST_BYTES):
            position = digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]
            self._sent[position] = incarnation, now_s
            self._sent.move_to_end(position)
        while len(self._sent) > MAX_POSITIONS:
            self._sent.popitem(last=False)

    def find(self, digests: bytes, now_s: float) -> Mapping[str, int]:
        """Incarnation -> leading blocks that it was sent within AFFINITY_S; engines without any are missing."""
        found: dict[str, int] = {}
        for count in positions(len(digests) // DIGEST_BYTES):
            position = digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]
            incarnation, sent_s = self._sent.get(position, ("", 0.0))
            if incarnation and now_s - sent_s <= AFFINITY_S:
                found[incarnation] = count
        return found


@lru_cache(maxsize=4096)
def positions(num_blocks: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the number of blocks."""
    counts, count = [], 1
    while count <= num_blocks:
        counts.append(count)
        if count > 1 and count + count // 2 <= num_blocks:
            counts.append(count + count // 2)
        count *= 2
    return tuple(counts)
