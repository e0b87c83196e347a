"""Which tokens the constrained sequences of a step may say next.

A mask depends on the tokens that were sampled already and not on the step that is being computed. So the masks are
asked for before the model computes, and taken when the logits are there; the grammars' own processes compute them
meanwhile. A mask that is late keeps its sequence out of the step and no other. engine/sampling/grammar_worker.py has
the matchers and engine/sampling/sampler.py applies the masks.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.sampling.grammar_frames import MASKS
from engine.sampling.grammar_worker import GrammarWorker, Matcher
from engine.sequence import MASK_LATE, NO_TOKEN, Sequence

WAIT_S: Final = 0.01
"""A step waits so long for masks behind its logits, or as long as it took so far; and then for those of the same
grammar not again until they have been quick for some time."""

Mask = npt.NDArray[np.bool_]
Masks = dict[int, Mask | int]
"""Row -> (vocab_size,) bool, which tokens may come next; NO_TOKEN where the grammar has failed, MASK_LATE where the
mask is not here. Free rows are missing."""


class StepMasks:
    """`begin` and `take` in turn, from the thread that runs the model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[tuple[int, Matcher, int]] = []  # row, matcher, generated tokens
        self._began_s = 0.0

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Asks for the masks of those that have a grammar. Waits for nothing."""
        self._rows = []
        asked: dict[GrammarWorker, bytes] = {}
        for row, s in enumerate(sequences):
            matcher = s.matcher
            if matcher is None:
                continue
            self._rows.append((row, matcher, s.num_generated))
            worker = matcher.worker
            here = matcher.find(s.num_generated) is not None or matcher.failure is not None
            if worker is not None and not worker.ended and not here and not matcher.waits:
                asked[worker] = asked.get(worker, b"") + matcher.ask(s.tokens, s.num_prompt)
        for worker, rows in asked.items():
            worker.send(MASKS, rows)
        self._began_s = time.perf_counter()

    def take(self) -> Masks:
        """The masks. Waits WAIT_S for them, or as long as it is since `begin`."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        self._wait(rows)
        return {row: self._mask(matcher, count) for row, matcher, count in rows}

    def _wait(self, rows: list[tuple[int, Matcher, int]]) -> None:
        now_s = time.perf_counter()
        limit_s = now_s + max(WAIT_S, now_s - self._began_s)
        while waiting := _read(rows):
            left_s = limit_s - time.perf_counter()
            if left_s <= 0 or all(worker.slow for worker in waiting):
                break
            poll = select.poll()
            for worker in waiting:
                poll.register(worker.socket, select.POLLIN | (select.POLLOUT if worker.has_unsent else 0))
            poll.poll(left_s * 1000)
        for worker in waiting:
            worker.be_late()

    def _mask(self, matcher: Matcher, count: int) -> Mask | int:
        bits = matcher.find(count)
        if matcher.failure is not None:
            return NO_TOKEN
        if bits is None:
            return MASK_LATE
        found = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little")
        return found.view(np.bool_)


def _read(rows: list[tuple[int, Matcher, int]]) -> set[GrammarWorker]:
    """Takes the masks that are here. Returns the workers of those that are not."""
    for worker in _waited_for(rows):
        worker.pump()
    return _waited_for(rows)


def _waited_for(rows: list[tuple[int, Matcher, int]]) -> set[GrammarWorker]:
    return {one.worker for _, one, _ in rows if one.waits and one.worker is not None and not one.worker.ended}
