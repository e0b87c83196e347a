"""Whether two answers say the same, as far as that can be told without asking a model. Off the path of requests.

It errs towards "no": what it takes for different is answered afresh next time, what it took for the same wrongly would
be counted as a right hit. Its limits: two long answers that differ in one fact, in the same words and without numbers
or names of their own, pass for the same; answers that say the same at very different length pass for different.

    equal      but for case, white space and punctuation: the same
    short      (up to SHORT_WORDS) and not equal: different
    otherwise  the same, if their vectors are near and the guard has nothing against it; of long answers, which hold
               negations and opposites in any case, it is their numbers and literals that have to agree
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gateway.responses.semantic.features import Features, features
from gateway.responses.semantic.guard import find_veto

SHORT_WORDS: Final = 4
LONG_WORDS: Final = 40
NEAR: Final = 0.85
"""Cosine from which on two answers may say the same."""


def same_words(one: str, other: str) -> bool:
    return features(one).squashed == features(other).squashed != ""


def may_agree(one: str, other: str) -> bool:
    """Whether it takes their vectors to tell; else they are different."""
    words = min(len(one.split()), len(other.split()))
    if words <= SHORT_WORDS:
        return False
    here, there = features(one), features(other)
    if words > LONG_WORDS:
        return _facts_agree(here, there)
    return find_veto(here, there) is None


def near(one: bytes, other: bytes) -> bool:
    """Vectors, little-endian float32 of length 1."""
    return float(np.frombuffer(one, dtype="<f4") @ np.frombuffer(other, dtype="<f4")) >= NEAR


def _facts_agree(one: Features, other: Features) -> bool:
    """Most numbers and literals of the one with fewer are in the other."""
    for here, there in ((one.numbers, other.numbers), (one.literals, other.literals)):
        fewer = min(len(here), len(there))
        if 2 * len(here & there) < fewer or (bool(here) != bool(there) and max(len(here), len(there)) > 1):
            return False
    return True
