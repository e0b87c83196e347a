"""Whether two answers say the same, as far as that can be told without asking a model. Off the path of requests.

It errs towards "no": what it takes for different is answered afresh next time, what it took for the same wrongly would
be counted as a right hit. How often it errs is measured (docs/lab-notebook.md). Its limits: what only one of the two
says passes; answers that say the same at very different length, or with one word for another, pass for different.

    equal      but for case, white space and punctuation: the same
    short      (up to SHORT_WORDS) and not equal: different
    otherwise  the same, if their vectors are near and the guard has nothing against it: against the whole of them, or
               of long answers, which hold negations and opposites in any case, against most of their numbers and
               literals; and against no sentence of the one beside the one of the other that is nearest in words
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from gateway.responses.semantic.features import Features, features
from gateway.responses.semantic.guard import find_veto

SHORT_WORDS: Final = 4
LONG_WORDS: Final = 40
ALIKE: Final = 0.5
"""Words of content that two sentences share, of all that they have, from which on they are about the same."""

EXCHANGED: Final = 0.6
"""From which on two sentences are one with something else in the place of something."""

_BETWEEN: Final = re.compile(r"(?<=[.!?])\s+|\n+")

NEAR: Final = 0.85
"""Cosine from which on two answers may say the same."""


def compare(one: str, other: str) -> bool | None:
    """Whether they are the same; None where it takes their vectors to tell."""
    here, there = features(one), features(other)
    if here.squashed == there.squashed != "":
        return True
    words = min(len(one.split()), len(other.split()))
    if words <= SHORT_WORDS:
        return False
    agree = _facts_agree(here, there) if words > LONG_WORDS else find_veto(here, there, answers=True) is None
    return None if agree and _sentences_agree(_sentences(one), _sentences(other)) else False


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


def _sentences(text: str) -> dict[str, Features]:
    """By their letters and digits."""
    found = (features(sentence) for sentence in _BETWEEN.split(text))
    return {one.squashed: one for one in found if one.squashed}


def _sentences_agree(one: dict[str, Features], other: dict[str, Features]) -> bool:
    """Of those that only one of the two has."""
    here = [sentence for squashed, sentence in one.items() if squashed not in other]
    there = [sentence for squashed, sentence in other.items() if squashed not in one]
    return not any(_denied(sentence, there) for sentence in here) and not any(
        _denied(sentence, here) for sentence in there
    )


def _denied(sentence: Features, others: Sequence[Features]) -> bool:
    """Whether the most similar one says something else."""
    words = set(sentence.content)
    shared, nearest = max(((_shared(words, set(one.content)), one) for one in others), key=_first, default=(0.0, None))
    if nearest is None or shared < ALIKE:
        return False
    exchanged = shared >= EXCHANGED and not words <= set(nearest.content) and not words >= set(nearest.content)
    return exchanged or find_veto(sentence, nearest, answers=True) is not None


def _shared(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(len(one | other), 1)


def _first(pair: tuple[float, Features | None]) -> float:
    return pair[0]
