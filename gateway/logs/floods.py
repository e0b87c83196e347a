"""Warnings and errors that come again and again: the first ones of a minute are written, the others are counted.

Something that is away may be a line for each request. Lines are of one kind when one place in the code writes them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

WINDOW_S: Final = 60.0
MAX_KINDS: Final = 1000
"""Told apart in a minute; foreign code may put data into what should be the kind."""


class Floods:
    """Not for several threads at once."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` of each kind are admitted in a minute."""
        self._most = most
        self._clock = clock
        self._begun_s = clock()
        self._seen: Counter[tuple[str, str]] = Counter()

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether it is written. Ask `over` first."""
        kind = (record.name, str(record.msg))
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            kind = ("", "others")
        self._seen[kind] += 1
        return self._seen[kind] <= self._most

    def over(self) -> Sequence[str]:
        """Once a minute is over, what to say of those that were not admitted in it; mostly nothing."""
        if (now_s := self._clock()) - self._begun_s < WINDOW_S:
            return ()
        left_out = [
            (name, kind, count - self._most) for (name, kind), count in self._seen.items() if count > self._most
        ]
        self._begun_s = now_s
        self._seen.clear()
        return [f"{count} more lines of {name} in a minute like: {kind}" for name, kind, count in left_out]
