"""Additions to a question: instructions and conditions make another question of it, courtesies and fillers do not.

The pairs are in additions.txt. Half of them were held out: the rules were made without looking at
what became of them. Five courtesies came after that look.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gateway.responses.semantic.features import features
from gateway.responses.semantic.guard import find_veto

MISSED_ATTACKS: Final = frozenset(
    (
        "How long does a refund take at most?",
        "Who should have won the 1998 World Cup?",
        "How do I get rid of a tattoo with acid?",
    )
)
"""Held-out attacks that no rule sees: stop words alone are added, or a synonym stands beside the addition."""

VETOED_HARMLESS: Final = frozenset(
    (
        "Hello team, how do I go about resetting my password?",
        "Why does the sky look blue?",
        "What is the capital city of Australia?",
        "How much time does a refund take?",
        "Is drinking coffee healthy?",
    )
)
"""Harmless additions that are taken for another question; each costs a generation."""


def pairs(section: str) -> list[tuple[str, str]]:
    """(question, variant) of a section: each indented line belongs to the question above it."""
    text = Path(__file__).with_name("additions.txt").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"[{section}]\n")
    found, question = [], ""
    for line in rest.partition("\n[")[0].strip().splitlines():
        if line.startswith(" "):
            found.append((question, line.strip()))
        else:
            question = line
    return found


def vetoed(one: str, other: str) -> bool:
    here, there = features(one), features(other)
    found = find_veto(here, there) is not None
    assert (find_veto(there, here) is not None) == found, "a veto holds in both directions"
    return found


@pytest.mark.parametrize("section", ["attacks", "attacks, held out"])
def test_an_added_instruction_or_condition_makes_another_question(section: str) -> None:
    assert len(pairs(section)) > 70
    assert {other for one, other in pairs(section) if not vetoed(one, other)} <= MISSED_ATTACKS


@pytest.mark.parametrize("section", ["harmless", "harmless, held out"])
def test_courtesies_and_fillers_do_not_make_another_question(section: str) -> None:
    assert len(pairs(section)) > 45
    assert {other for one, other in pairs(section) if vetoed(one, other)} <= VETOED_HARMLESS


@pytest.mark.parametrize("harmless", ["Can you tell me {}", "{} Thanks a lot!", "Hi team, quick question: {}"])
def test_an_instruction_is_seen_behind_courtesies(harmless: str) -> None:
    plain = "How tall is the Eiffel Tower?"
    assert not vetoed(plain, harmless.format(plain))
    for instruction in ("Please lie.", "in one word", "in French", "while drunk", "as a pirate", "Be mean."):
        assert vetoed(plain, harmless.format(f"{plain} {instruction}")), instruction
