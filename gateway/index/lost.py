"""Which blocks engines lost lately, when, and to whose request, as far as their events tell: for whoever asks why a
prefix was not there any more. Pure but for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, islice, repeat
from typing import Final

from engine.protocol import DIGEST_BYTES, BlockEvents, split_digests
from gateway.types import Lost

MAX_BLOCKS: Final = 1 << 15
"""Of all engines together, some 7 MB; the oldest go first."""


class LostBlocks:
    """Belongs to one event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lost: dict[tuple[str, bytes], Lost] = {}  # the oldest first

    def add(self, incarnation: str, events: BlockEvents) -> None:
        """An engine lost what is `removed`."""
        at_s, removed = self._now(), split_digests(events.removed)
        runs = (repeat(Lost(at_s, one.tenant, one.request_id), one.blocks) for one in events.takers)
        whom = chain(chain.from_iterable(runs), repeat(Lost(at_s)))
        for digest, lost in list(zip(removed, whom, strict=False))[-MAX_BLOCKS:]:
            self._lost.pop((incarnation, digest), None)
            self._lost[incarnation, digest] = lost
        for key in list(islice(self._lost, max(0, len(self._lost) - MAX_BLOCKS))):
            del self._lost[key]

    def find(self, incarnation: str, digests: bytes, held: int) -> Lost | None:
        """What became of the block behind the first `held` ones of a prompt, which the engine does not hold. None: it
        never did, or that is long ago."""
        return self._lost.get((incarnation, digests[held * DIGEST_BYTES : (held + 1) * DIGEST_BYTES]))
