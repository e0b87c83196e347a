"""Computes what constrained sequences may say next, on a thread beside the model.

A mask depends on the tokens that were sampled already and not on the step that is being computed. So the runner asks
for the masks before it computes, and takes them when it has the logits; a thread computes them meanwhile, if they take
long enough to be worth it. Numpy only; engine/sampling/grammar.py has the matchers
and engine/sampling/sampler.py applies the masks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from engine.sampling.grammar import Mask, Matcher
from engine.sequence import Sequence

LIMIT_S: Final = 30.0
"""Masks take microseconds; the compiler's own limits end those of the worst grammars after some 20 ms each."""

HANDOVER_S: Final = 0.0005
"""Masks that take less are quicker to compute after the step than to hand to a thread, which fights with the model's
Python for the interpreter's lock: eight of the demo's take 0.15 ms, and handing them over cost a step 1 ms."""

Masks = dict[int, Mask | None]
"""Row -> (vocab_size,) bool, which tokens may come next; None where the grammar has failed. Free rows are missing."""


class MaskThread:
    """One thread. `begin` and `take` in turn, from the thread that runs the model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._future: Future[Masks] | None = None
        self._work: list[tuple[int, Matcher, list[int]]] = []
        self._last_s = 0.0  # that the masks of the last step took

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Starts to compute the masks of those that have a grammar. Waits for nothing but the masks of a step that
        failed before it took them: a matcher is used by one thread at a time."""
        self._give_up()
        self._work = [
            (row, s.matcher, s.tokens[s.num_prompt + s.matcher.num_consumed :].tolist())
            for row, s in enumerate(sequences)
            if s.matcher is not None
        ]
        if self._work and self._last_s > HANDOVER_S:
            self._future = self._executor.submit(self._compute, self._work)

    def take(self) -> Masks:
        """The masks. Waits for the thread, LIMIT_S at most: then it raises TimeoutError. What was not worth handing
        over, and what the thread of a busy machine has not had its turn for, is computed here."""
        work, self._work = self._work, []
        future, self._future = self._future, None
        if not work:
            return {}
        return self._compute(work) if future is None or future.cancel() else future.result(LIMIT_S)

    def _give_up(self) -> None:
        future, self._future = self._future, None
        if future is not None and not future.cancel():
            wait([future], LIMIT_S)

    def _compute(self, work: list[tuple[int, Matcher, list[int]]]) -> Masks:
        masks: Masks = {}
        began_s = time.perf_counter()
        for row, matcher, tokens in work:
            matcher.consume(tokens)
            mask = np.empty(self._vocab_size, np.bool_)
            masks[row] = mask if matcher.mask(mask) else None
        self._last_s = time.perf_counter() - began_s
        return masks
