"""Blocks that a replica computed a moment ago, and that its KV events have not told yet: the next turn of a
conversation may come before them. Pure but for the clock.

Only what follows the blocks that the index knows is kept, and for seconds: then the events are there, or the blocks are
not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Final

from engine.protocol import DIGEST_BYTES, split_digests

TTL_S: Final = 3.0
"""Events take some hundredths of a second to the gateway that follows them."""

SHARED_TTL_S: Final = 10.0
"""To the others they come by way of Redis: in a second, or several where the gateway that follows is busy."""

MAX_BLOCKS: Final = 1 << 16
"""Of all engines together; the oldest go first."""


class RecentBlocks:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[tuple[str, bytes], float] = {}  # the oldest first

    def __bool__(self) -> bool:
        return bool(self._until_s)

    def add(self, incarnation: str, digests: bytes, held: int, ttl_s: float = TTL_S) -> None:
        """Blocks of a prompt from number `held` on were computed."""
        now_s = self._clock()
        for digest in split_digests(digests[held * DIGEST_BYTES :]):
            self._until_s.pop((incarnation, digest), None)
            self._until_s[incarnation, digest] = now_s + ttl_s
        for key in list(islice(self._until_s, max(0, len(self._until_s) - MAX_BLOCKS))):
            del self._until_s[key]
        while self._until_s and self._until_s[key := next(iter(self._until_s))] <= now_s:
            del self._until_s[key]

    def extend(self, incarnation: str, digests: bytes, held: int) -> int:
        """Leading blocks of `digests` that an engine holds, where the index says that it holds `held`."""
        if not self._until_s:
            return held
        now_s, most = self._clock(), len(digests) // DIGEST_BYTES
        while held < most:
            key = incarnation, digests[held * DIGEST_BYTES : (held + 1) * DIGEST_BYTES]
            if self._until_s.get(key, 0.0) <= now_s:
                break
            held += 1
        return held

    def drop(self, incarnation: str) -> None:
        """Its cache is gone, or was not what it seemed."""
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if key[0] != incarnation}
