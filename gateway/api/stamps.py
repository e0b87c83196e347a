"""What is new in each answer though all else of it was there: its id, and the second in which it was made."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

_BITS: Final = random.Random(secrets.randbits(256)).getrandbits  # noqa: S311 - no secrets


class Stamp(NamedTuple):
    """Of one answer, as its dialect writes it: the same bytes wherever they are in it, and nowhere else, because the
    id was drawn at random after everything else was known.

    make  others of the same form, for the next answer
    """

    written: bytes
    make: Callable[[], bytes]


def new_id() -> str:
    """32 hexadecimal digits that were never there before. No secret: who has seen some may guess the next."""
    return f"{_BITS(128):032x}"
