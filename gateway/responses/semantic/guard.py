"""Whether two texts that are near each other may still ask for different things. A table of rules; the first that
applies says why.

Pure, and fast: it runs for every neighbour of every text. What each rule is worth is measured (docs/lab-notebook.md);
none knows anything of where a text comes from.
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
"""Whether the first text says something that makes another question of the second. Each rule is tried in both
directions."""


def find_veto(one: Features, other: Features, *, strict: bool = False, answers: bool = False) -> str | None:
    """Why an answer to the one may not serve the other: the name of a rule. None when no rule objects.

    strict   the same words in another order are another question
    answers  they are answers: one may say more than the other
    """
    for name, differs in RULES.items():
        if not (answers and name in OF_QUESTIONS) and (differs(one, other) or differs(other, one)):
            return name
    reordered = one.content != other.content and sorted(one.content) == sorted(other.content)
    return "order" if strict and reordered else None


def _numbers(one: Features, other: Features) -> bool:
    """A number that the other lacks; "1" may be a word there."""
    missing = one.numbers - other.numbers
    return bool(missing) and (missing != {"1"} or not other.one)


def _counted(one: Features, other: Features) -> bool:
    """Two pens and three books are not three pens and two books."""
    here, there = set(one.counted.values()), set(other.counted.values())
    return any(
        noun != other.counted.get(number, noun) and noun in there and other.counted[number] in here
        for number, noun in one.counted.items()
    )


def _units(one: Features, other: Features) -> bool:
    return any(unit != other.units.get(number, unit) for number, unit in one.units.items())


def _literals(one: Features, other: Features) -> bool:
    """A quotation, path or flag that is not in the other, quoted or not."""
    return any(
        (len(literal) == 2 and literal[0] == "-")
        or literal not in (other.squashed if literal.isalnum() else other.lowered)
        for literal in one.literals - other.literals
    )


def _opposites(one: Features, other: Features) -> bool:
    here, there = one.words - other.words, other.words - one.words
    return (
        any(not others.isdisjoint(there) for word in here if (others := OPPOSITES.get(word)))
        or any(
            word[: len(prefix)] == prefix and word[len(prefix) :] in there
            for word in here
            if word[:2] in PREFIX_STARTS
            for prefix in PREFIXES
        )
        or any(not here.isdisjoint(group) and not there.isdisjoint(group) for group in EXCLUSIVE)
    )


PREFIX_STARTS: Final = frozenset(prefix[:2] for prefix in PREFIXES)


def _conjunctions(one: Features, other: Features) -> bool:
    """One has "or" where the other has "and"."""
    return {"or", "and"} & one.words == {"or"} and {"or", "and"} & other.words == {"and"}


def _names(one: Features, other: Features) -> bool:
    """One has a capitalised word that the other lacks, and says one of the other's less often; one may be left out."""
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


def _instructions(one: Features, other: Features) -> bool:
    """One says how to answer (wrongly, briefly, as JSON) in a word that the other lacks, with its synonyms."""
    return any(
        all(word not in group or group.isdisjoint(other.words) for group in INSTRUCTION_SYNONYMS)
        for word in (one.words - other.words) & INSTRUCTIONS
    )


def _conditions(one: Features, other: Features) -> bool:
    """One has a condition ("if", "while"), a persona ("as a") or a unit ("in feet") that the other lacks."""
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
    adds_sentence = len(one.parts) > 1 and any(part.isdisjoint(other.words) for part in one.parts)
    return adds_sentence or _request_stems(other) < _request_stems(one)


def _request_stems(features: Features) -> Set[str]:
    """Stems of the text. Numbers have a rule of their own, and may be words."""
    return {word for word in features.content if not word[0].isdigit()} - COURTESY_STEMS - FILLER_STEMS


RULES: Final[dict[str, Rule]] = {
    "numbers": _numbers,
    "negation": lambda one, other: one.negative != other.negative,
    "times": lambda one, other: one.times != other.times,
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
"""Why a neighbour is not one -> the rule; what vetoes most comes first."""

OF_QUESTIONS: Final = frozenset(("instructions", "conditions", "additions"))
"""Rules that hold for questions alone."""
