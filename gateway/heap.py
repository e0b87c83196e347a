"""How glibc keeps memory that was given back. By default every thread gets a heap of its own, and a buffer of megabytes
that was freed once makes it put later ones between the small objects, where they leave holes: a gateway that runs for
days grows, and what it holds does not.
"""

from __future__ import annotations

import ctypes
from typing import Final

HEAPS: Final = 2
"""Python's own objects are in none of them, so threads rarely wait for one."""

LARGE_BYTES: Final = 256 << 10
"""Of a buffer that goes back to the system when it is freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_small() -> None:
    """For this process, before it starts threads. Does nothing where the C library is another one."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    set_option(_M_ARENA_MAX, HEAPS)
    set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
    set_option(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)
