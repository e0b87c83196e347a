"""Moves memory that is read over and over, the weights of a model, into large pages of 2 MiB.

A decode reads every weight once for each token, and looks up the page of each on the way: with 4 KiB pages that look-up
costs a fifth of the time, more on virtual machines. Linux only, and only where the kernel can do it on request (6.1 and
later); does nothing elsewhere and never raises. engine/compute/model.py calls it when the weights lie where they will
stay.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
PIECE_BYTES: Final = 64 << 20  # moved by one call of the kernel
LEAST_BYTES: Final = 8 << 20  # of a mapping that is worth it
TIME_S: Final = 10.0  # after which the rest is left where it is: a start must not take long
FILLED: Final = 0.95  # of a mapping that must be in memory already: what nobody touched yet must not be taken now
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)$")


def collapse(smaps: Path = Path("/proc/self/smaps"), *, time_s: float = TIME_S) -> int:
    """Moves this process's large, filled, anonymous mappings into large pages, the largest first, until the time is up.

    Takes about two seconds for each GB. Returns the bytes that were moved or lay there already, 0 where none can be.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        mappings = list(_anonymous(smaps.read_text(encoding="ascii", errors="replace")))
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved, deadline_s = 0, time.monotonic() + time_s
    for start, end, resident in sorted(mappings, key=lambda mapping: mapping[0] - mapping[1]):
        first, last = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
        if end - start < LEAST_BYTES or resident < FILLED * (end - start):
            continue
        for piece in range(first, last, PIECE_BYTES):
            size = min(PIECE_BYTES, last - piece)
            if time.monotonic() >= deadline_s:
                return moved
            madvise(piece, size, _MADV_HUGEPAGE)
            if madvise(piece, size, _MADV_COLLAPSE) != 0:
                log.debug("no large pages for %d bytes: %s", size, os.strerror(ctypes.get_errno()))
                break
            moved += size
    return moved


def _anonymous(smaps: str) -> Iterator[tuple[int, int, int]]:
    """First address, end, and bytes in memory of each private writable mapping that is no file's."""
    current: tuple[int, int] | None = None
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            start, end, rights, inode, name = found.groups()
            plain = rights == "rw-p" and inode == "0" and name in ("", "[heap]")
            current = (int(start, 16), int(end, 16)) if plain else None
        elif current is not None and line.startswith("Rss:"):
            yield *current, int(line.split()[1]) << 10
            current = None
