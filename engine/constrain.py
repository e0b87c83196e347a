"""Computes what constrained sequences may say next, on a thread beside the model.

A mask depends on the tokens that were sampled already and not on the step that is being computed. So the runner asks
for the masks before it computes, and takes them when it has the logits. Numpy only; engine/grammar.py has the matchers
and engine/sampler.py applies the masks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from engine.grammar import Mask, Matcher
from engine.sequence import Sequence

LIMIT_S: Final = 30.0
"""Masks take microseconds; the compiler's own limits end those of the worst grammars after some 20 ms each."""

Masks = dict[int, Mask | None]
"""Row -> (vocab_size,) bool, which tokens may come next; None where the grammar has failed. Free rows are missing."""


class MaskThread:
    """One thread. `begin` and `take` in turn, from the thread that runs the model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._future: Future[Masks] | None = None
        self._work: list[tuple[int, Matcher, list[int]]] = []

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Starts to compute the masks of those that have a grammar. Does not wait."""
        self._work = [
            (row, s.matcher, s.tokens[s.num_prompt + s.matcher.num_consumed :].tolist())
            for row, s in enumerate(sequences)
            if s.matcher is not None
        ]
        self._future = self._executor.submit(self._compute, self._work) if self._work else None

    def take(self) -> Masks:
        """What `begin` started. Waits for it, LIMIT_S at most: then it raises TimeoutError. On a machine so busy that
        the thread has not had its turn, this one does the work."""
        future, self._future = self._future, None
        if future is None:
            return {}
        return self._compute(self._work) if future.cancel() else future.result(LIMIT_S)

    def _compute(self, work: list[tuple[int, Matcher, list[int]]]) -> Masks:
        masks: Masks = {}
        for row, matcher, tokens in work:
            matcher.consume(tokens)
            mask = np.empty(self._vocab_size, np.bool_)
            masks[row] = mask if matcher.mask(mask) else None
        return masks
