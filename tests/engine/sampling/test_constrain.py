"""The masks of a step, on the thread and after it."""

from __future__ import annotations

from array import array

import pytest

from engine.demo import MODEL_DIR
from engine.protocol import Grammar, Sampling
from engine.sampling import constrain
from engine.sampling.constrain import Masks, MaskThread
from engine.sampling.grammar import Grammars
from engine.sequence import Sequence

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars((MODEL_DIR / "tokenizer.json").read_text(), 4096, (2, 0), cache_entries=8)


def make(grammars: Grammars, pattern: str | None, *generated: int) -> Sequence:
    matcher = None if pattern is None else grammars.compile(Grammar("regex", pattern))
    return Sequence("", 0, array("I", [*PROMPT, *generated]), len(PROMPT), [], Sampling(9), matcher=matcher)


def plain(masks: Masks) -> dict[int, list[int] | None]:
    return {row: None if mask is None else mask.nonzero()[0].tolist() for row, mask in masks.items()}


@pytest.mark.parametrize("handover_s", [-1.0, 1e9])
def test_masks_are_the_same_whoever_computes_them(
    grammars: Grammars, handover_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constrain, "HANDOVER_S", handover_s)
    thread = MaskThread(4096)
    a, b = 35 + 32, 35 + 33  # "a" and "b" in the vocabulary, which has the printable characters in order
    sequences = [make(grammars, None), make(grammars, "ab*", a), make(grammars, "b", a), make(grammars, "ba", b)]
    for _ in range(3):  # masks that were taken change nothing: the same tokens, the same masks
        thread.begin(sequences)
        masks = plain(thread.take())
        assert set(masks) == {1, 2, 3}
        assert masks[1] is not None
        assert {0, 2, b} <= set(masks[1])
        assert a not in masks[1]
        assert masks[2] is None  # a token came that the grammar does not have
        assert masks[3] == [a]
    assert thread.take() == {}


def test_masks_of_a_step_that_failed_are_given_up(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrain, "HANDOVER_S", -1.0)
    thread = MaskThread(4096)
    sequence = make(grammars, "[ab]+")
    for _ in range(200):
        thread.begin([sequence])
    masks = plain(thread.take())
    assert masks[0]
    thread.begin([])
    assert thread.take() == {}
