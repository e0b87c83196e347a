"""What is new in each answer though all else of it was there: its id, and the second in which it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Stamp(NamedTuple):
    """Of one answer, as its dialect writes it: the same bytes wherever they are in it, and nowhere else, because the
    id was drawn at random after everything else was known.

    make  others of the same form, for the next answer
    """

    written: bytes
    make: Callable[[], bytes]
