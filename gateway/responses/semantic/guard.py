"""Whether two texts that are near each other may still ask for different things. A table of rules; the first that
applies says why.

Pure, and fast: it is asked for every neighbour of every text. What each rule is worth is measured
(docs/lab-notebook.md); none knows anything of where a text comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

from gateway.responses.semantic.features import COURTESY_STEMS, FILLER_STEMS, Features, stem
from gateway.responses.semantic.lexicon import (
    EXCLUSIVE,
    INSTRUCTION_SYNONYMS,
    INSTRUCTIONS,
    OPPOSED_ROLES,
    OPPOSITES,
    PREFIXES,
    SWAPPED_ROLES,
    SYMMETRIC,
    UNITS,
)

Rule = Callable[[Features, Features], bool]
"""Whether these two differ in it. Symmetric."""


def find_veto(one: Features, other: Features, *, strict: bool = False, answers: bool = False) -> str | None:
    """Why an answer to the one may not serve the other: the name of a rule. None when no rule objects.

    strict   the same words in another order are another question
    answers  they are answers: one may say more than the other
    """
    for name, differs in RULES.items():
        if differs(one, other) and not (answers and name in OF_QUESTIONS):
            return name
    return "order" if strict and _reordered(one, other) else None


def _numbers(one: Features, other: Features) -> bool:
    if one.numbers == other.numbers:
        return False
    apart = one.numbers ^ other.numbers
    return apart != {"1"} or not (one.one if "1" in other.numbers else other.one)


def _counted(one: Features, other: Features) -> bool:
    """Two pens and three books are not three pens and two books."""
    if one.counted == other.counted or len(one.counted) < 2 or len(other.counted) < 2:
        return False
    here, there = set(one.counted.values()), set(other.counted.values())
    return any(
        noun != other.counted.get(number, noun) and noun in there and other.counted[number] in here
        for number, noun in one.counted.items()
    )


def _units(one: Features, other: Features) -> bool:
    if not one.units or not other.units or one.units == other.units:
        return False
    return any(unit != other.units.get(number, unit) for number, unit in one.units.items())


def _negation(one: Features, other: Features) -> bool:
    return one.negative != other.negative


def _times(one: Features, other: Features) -> bool:
    return one.times != other.times


def _literals(one: Features, other: Features) -> bool:
    """What is quoted in one has to be in the other, quoted or not."""
    if one.literals == other.literals:
        return False
    return _lacks(other, one.literals - other.literals) or _lacks(one, other.literals - one.literals)


def _lacks(features: Features, literals: Set[str]) -> bool:
    return any(
        literal not in (features.squashed if literal.isalnum() else features.lowered)
        if len(literal) != 2 or literal[0] != "-"
        else True
        for literal in literals
    )


def _opposites(one: Features, other: Features) -> bool:
    here, there = one.words - other.words, other.words - one.words
    if not here or not there:
        return False
    return (
        any(not others.isdisjoint(there) for word in here if (others := OPPOSITES.get(word)))
        or _prefixed(here, there)
        or _prefixed(there, here)
        or any(not here.isdisjoint(group) and not there.isdisjoint(group) for group in EXCLUSIVE)
    )


def _prefixed(words: Set[str], others: Set[str]) -> bool:
    """Whether an other is one of the words behind "un-" or the like."""
    return any(
        other[: len(prefix)] == prefix and other[len(prefix) :] in words
        for other in others
        if other[:2] in PREFIX_STARTS
        for prefix in PREFIXES
    )


PREFIX_STARTS: Final = frozenset(prefix[:2] for prefix in PREFIXES)


def _conjunctions(one: Features, other: Features) -> bool:
    """One has "or" where the other has "and"."""
    if ("or" in one.words) == ("or" in other.words):
        return False
    either, both = (one, other) if "or" in one.words else (other, one)
    return "and" in both.words and "and" not in either.words


def _names(one: Features, other: Features) -> bool:
    """One has a capitalised word that the other lacks, and says one of the other's less often; one may be left out."""
    if not one.names or not other.names:
        return False
    return _renames(one, other) or _renames(other, one)


def _renames(one: Features, other: Features) -> bool:
    return any(_missing(name, other) for name in one.names) and any(_rarer(name, other, one) for name in other.names)


def _missing(name: str, features: Features) -> bool:
    if name in features.words or stem(name) in features.words:
        return False
    return len(name) < 4 or name not in features.squashed


def _rarer(name: str, there: Features, here: Features) -> bool:
    if len(name) < 4:
        return name not in here.words
    root = stem(name)
    return here.squashed.count(root) < there.squashed.count(root)


def _roles(one: Features, other: Features) -> bool:
    """From here to there is not from there to here."""
    if not one.roles or not other.roles or one.roles == other.roles:
        return False
    nothing: frozenset[str] = frozenset()
    mutual = not SYMMETRIC.isdisjoint(one.words) and not SYMMETRIC.isdisjoint(other.words)
    for role in SWAPPED_ROLES:
        here, there = one.roles.get(role, nothing), other.roles.get(role, nothing)
        if here != there and here and there and not (mutual and role == "goal"):
            only_here, only_there = here - there, there - here
            if only_here and only_there and only_here <= other.words and only_there <= one.words:
                return True
    return any(
        not (one.roles[role] & other.roles[opposed]) <= other.roles.get(role, nothing)
        for role, opposed in OPPOSED_ROLES
        if role in one.roles and opposed in other.roles
    )


def _voices(one: Features, other: Features) -> bool:
    """Who is hated by him does not hate him: the same words in one order, passive in one alone."""
    return one.content == other.content and one.roles.get("agent") != other.roles.get("agent")


def _reordered(one: Features, other: Features) -> bool:
    return one.content != other.content and sorted(one.content) == sorted(other.content)


def _instructions(one: Features, other: Features) -> bool:
    """One says how to answer (wrongly, briefly, as JSON) in a word that the other lacks, with its synonyms."""
    here, there = (one.words - other.words) & INSTRUCTIONS, (other.words - one.words) & INSTRUCTIONS
    return any(_has_no_synonym(word, other) for word in here) or any(_has_no_synonym(word, one) for word in there)


def _has_no_synonym(word: str, other: Features) -> bool:
    return all(word not in group or group.isdisjoint(other.words) for group in INSTRUCTION_SYNONYMS)


def _conditions(one: Features, other: Features) -> bool:
    """One has a condition ("if", "while"), a persona ("as a") or a unit ("in feet") that the other lacks."""
    return _adds_condition(one, other) or _adds_condition(other, one)


def _adds_condition(one: Features, other: Features) -> bool:
    return any(
        not (one.roles[role] if objects is None else one.roles[role] & objects) <= other.words
        for role, objects in CONDITIONS
        if role in one.roles
    )


CONDITIONS: Final = (("condition", None), ("as", None), ("in", frozenset(map(stem, UNITS))))
"""Roles whose objects, all or these, make another question when the other text lacks them."""


def _additions(one: Features, other: Features) -> bool:
    """One contains the other's request and more, or a sentence of which no word is in the other: an instruction, a
    condition, another request."""
    here, there = _request_stems(one), _request_stems(other)
    return here < there or there < here or _adds_sentence(one, other) or _adds_sentence(other, one)


def _request_stems(features: Features) -> Set[str]:
    """Stems of what it says. Numbers have a rule of their own, and may be words."""
    return {word for word in features.content if not word[0].isdigit()} - COURTESY_STEMS - FILLER_STEMS


def _adds_sentence(one: Features, other: Features) -> bool:
    return len(one.parts) > 1 and any(part.isdisjoint(other.words) for part in one.parts)


RULES: Final[dict[str, Rule]] = {
    "numbers": _numbers,
    "negation": _negation,
    "times": _times,
    "opposites": _opposites,
    "names": _names,
    "literals": _literals,
    "roles": _roles,
    "conjunctions": _conjunctions,
    "voices": _voices,
    "counted": _counted,
    "units": _units,
    "instructions": _instructions,
    "conditions": _conditions,
    "additions": _additions,
}
"""Why a neighbour is not one -> whether it applies; what vetoes most comes first."""

OF_QUESTIONS: Final = frozenset(("instructions", "conditions", "additions"))
"""Rules that hold for questions alone."""
