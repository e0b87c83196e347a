"""The masks of a step, and those that come too late for it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

import pytest

from engine.protocol import Grammar, Sampling
from engine.sampling import grammar_worker
from engine.sampling.grammar_worker import LEAST_PENALTY, GrammarWorker, Masks, StepMasks
from engine.sequence import MASK_LATE, NO_TOKEN, Sequence
from tests.fakes.grammars import LIMIT_S, VOCABULARY, GrammarDesk

PROMPT = [5, 6, 7]
A, B = 35 + 32, 35 + 33  # "a" and "b" in the vocabulary, which has the printable characters in order


@pytest.fixture(scope="module")
def desk() -> Iterator[GrammarDesk]:
    with GrammarDesk() as desk:
        yield desk


def make(desk: GrammarDesk, pattern: str | None, *generated: int) -> Sequence:
    matcher = None if pattern is None else desk.compile(Grammar("regex", pattern))
    return Sequence("", 0, array("I", [*PROMPT, *generated]), len(PROMPT), [], Sampling(9), matcher=matcher)


def plain(masks: Masks) -> dict[int, list[int] | int]:
    return {row: mask if isinstance(mask, int) else mask.nonzero()[0].tolist() for row, mask in masks.items()}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_worker, "WAIT_S", LIMIT_S)


@pytest.mark.usefixtures("patient")
def test_each_sequence_gets_the_mask_of_its_own_tokens(desk: GrammarDesk) -> None:
    step = StepMasks(VOCABULARY)
    sequences = [make(desk, None), make(desk, "ab*", A), make(desk, "b", A), make(desk, "ba", B), make(desk, "ab*")]
    for _ in range(3):  # masks that were taken change nothing: the same tokens, the same masks
        step.begin(sequences)
        masks = plain(step.take())
        assert set(masks) == {1, 2, 3, 4}
        assert isinstance(masks[1], list)
        assert {0, 2, B} <= set(masks[1])
        assert A not in masks[1]
        assert masks[2] == NO_TOKEN  # a token came that the grammar does not have
        assert masks[3] == [A]
        assert isinstance(masks[4], list)
        assert A in masks[4]
    assert step.take() == {}


@pytest.mark.usefixtures("patient")
def test_masks_of_a_step_that_failed_are_there_for_the_next(desk: GrammarDesk) -> None:
    step, sequence = StepMasks(VOCABULARY), make(desk, "[ab]+", A)
    for _ in range(20):
        step.begin([sequence])
    assert isinstance(plain(step.take())[0], list)


def hold(monkeypatch: pytest.MonkeyPatch, *held: GrammarWorker) -> None:
    """What these workers answer is not read."""
    pump = GrammarWorker.pump
    monkeypatch.setattr(GrammarWorker, "pump", lambda self: None if self in held else pump(self))


def test_a_late_mask_keeps_its_sequence_out_of_the_step_and_no_other(
    desk: GrammarDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, late, other = StepMasks(VOCABULARY), make(desk, "a[ab]+", A), make(desk, "[ab]+")
    worker = late.matcher.worker  # type: ignore[union-attr]
    assert worker is not None
    with monkeypatch.context() as patch:
        hold(patch, worker)
        patch.setattr(grammar_worker, "WAIT_S", 0.0)
        step.begin([late, other])
        masks = plain(step.take())
        assert masks[0] == MASK_LATE
        assert isinstance(masks[1], list)
        assert worker.slow
        # Nothing waits for it again before its mask is here.
        assert not late.can_sample
        assert other.can_sample
        patch.setattr(grammar_worker, "WAIT_S", LIMIT_S)
        began_s = time.monotonic()
        step.begin([late])
        assert plain(step.take()) == {0: MASK_LATE}
        assert time.monotonic() - began_s < LIMIT_S / 2
    desk.run_until(lambda: late.can_sample)
    step.begin([late])
    assert isinstance(plain(step.take())[0], list)


def test_a_worker_that_was_late_is_waited_for_again_when_it_has_been_quick_for_some_time(
    desk: GrammarDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampling.grammar_worker.QUICK_MICROS", 1 << 32)
    sequence = make(desk, "b[ab]+", B)
    worker = sequence.matcher.worker  # type: ignore[union-attr]
    assert worker is not None
    worker.be_late()
    for _ in range(LEAST_PENALTY):
        assert worker.slow
        desk.run_until(lambda: sequence.can_sample)
        sequence.tokens.append(A)
    assert not worker.slow
    assert sequence.can_sample
