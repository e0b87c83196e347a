"""What this gateway sent to a replica: its index where the server publishes no KV events. Pure: time comes in.

A prompt that was sent is taken for cached until `ttl_s` after it was sent last. Two things end that belief too late:
other clients of the server, which push blocks out, and a restart or purge that is not noticed. The TTL bounds both; it
is Dynamo's for its approximate router, a few turns of a conversation. The blocks that this gateway itself pushes out go
by `max_blocks`, the size of the server's cache, oldest first, which is what a server with an LRU cache does.

Prefix-closed: each prompt renews all of its blocks, the last one first. So in the order of age a block comes before its
parent, whether it goes for its age or for want of space.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Final

from engine.protocol import DIGEST_BYTES, BlockEvents, split_digests

TTL_S: Final = 120.0
RENEW_S: Final = 1.0
"""A prompt that was sent so short a time ago is as young as can be."""

_NOTHING: Final = BlockEvents()


class History:
    """Digests by when they were sent last, the oldest first."""

    def __init__(self, ttl_s: float, max_blocks: int) -> None:
        """max_blocks  at least 1; of a longer prompt the first ones are remembered"""
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._sent_s: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._sent_s)

    def sent(self, digests: bytes, now_s: float) -> BlockEvents:
        """A prompt was sent whose full blocks have these digests, packed, the first block's first."""
        digests = digests[: self._max_blocks * DIGEST_BYTES]
        if now_s - self._sent_s.get(digests[-DIGEST_BYTES:], -math.inf) < RENEW_S:  # so were all before it
            return _NOTHING
        chain = split_digests(digests)
        new = [digest for digest in chain if digest not in self._sent_s]
        for digest in reversed(chain):
            self._sent_s.pop(digest, None)
            self._sent_s[digest] = now_s
        return BlockEvents(b"".join(new), self._forget(len(self._sent_s) - self._max_blocks))

    def expired(self, now_s: float) -> BlockEvents:
        """What is too old from now on."""
        count = 0
        for sent_s in self._sent_s.values():
            if sent_s + self._ttl_s > now_s:
                break
            count += 1
        return BlockEvents(removed=self._forget(count))

    def clear(self) -> None:
        self._sent_s.clear()

    def _forget(self, count: int) -> bytes:
        """Forgets so many of the oldest; their digests, children before parents."""
        oldest = list(islice(self._sent_s, max(0, count)))
        for digest in oldest:
            del self._sent_s[digest]
        return b"".join(oldest)
