"""A second, small model that drafts what sequences may go on with, where their texts have nothing to copy.

Its keys and values lie in a cache of its own, paged by the blocks of the sequences: block n of the pool is block n
here, too. What it has not computed of a sequence is caught up when it is to draft. Of a long text that is the end: what
comes next is seldom decided earlier, and prompt lookup finds what is copied from there. Drafts that were right are
computed already. Its drafts are verified like all others, so nothing that it computes, or that its cache holds, changes
an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.compute.attention import StepAttention
from engine.compute.batch import Batch, make_batch, make_rows
from engine.compute.kv_cache import KVCache
from engine.compute.model import LoadedModel
from engine.sampling.sampler import highest
from engine.sequence import Sequence, Step, Work
from engine.speculation import CATCH_UP


class DraftModel:
    """Beside the model, with as many blocks."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._model, self._block_size = model, block_size
        self._cache = KVCache(model.cache_shape, num_blocks, block_size, model.device)

    def fill(self, step: Step) -> Step:
        """The step, with drafts for works that want some: the likeliest tokens, none of which ends a sequence."""
        longest, began_s = self._model.context_tokens, time.monotonic()
        wanting = [w for w in step.work if w.wanted and w.sequence.num_tokens + w.wanted <= longest]
        if not wanting:
            return step
        # 1. Catch up; what is behind the last token is the first draft.
        sequences = [work.sequence for work in wanting]
        for s in sequences:
            if s.num_tokens - s.follow_end > CATCH_UP:
                s.follow_start = s.follow_end = (s.num_tokens - CATCH_UP) // self._block_size * self._block_size
        behind = [Work(s, s.follow_end, s.num_tokens - s.follow_end, samples=True) for s in sequences]
        found = self._find(make_batch(Step(behind), self._block_size), sequences, step.unwanted)
        drafts = {work: [token] for work, token in zip(wanting, found, strict=True)}
        for s in sequences:
            s.follow_end = s.num_tokens
        # 2. Go on with the drafts, a token for each in a pass.
        for count in range(1, max((work.wanted for work in drafts), default=0)):
            going = [w for w, d in drafts.items() if len(d) == count < w.wanted and d[-1] not in w.sequence.end_ids]
            if not going:
                break
            rows = [(drafts[w][-1], w.sequence.num_tokens + count - 1, w.sequence.block_table) for w in going]
            found = self._find(make_rows(rows, self._block_size), [w.sequence for w in going], step.unwanted)
            for work, token in zip(going, found, strict=True):
                drafts[work].append(token)
        works = []
        for work in step.work:
            tokens = drafts.get(work, [])
            if tokens and tokens[-1] in work.sequence.end_ids:
                tokens = tokens[:-1]
            works.append(replace(work, drafts=tuple(tokens)) if tokens else work)
        step.drafting.seconds = time.monotonic() - began_s
        return replace(step, work=works)

    def _find(self, batch: Batch, sequences: list[Sequence], unwanted: Callable[[], bool] | None) -> list[int]:
        """The likeliest token behind each sequence of the batch, which attends to tokens from its follow_start on."""
        size = self._block_size
        spans = [
            replace(span, start=span.start - s.follow_start, table=span.table[s.follow_start // size :])
            for span, s in zip(batch.spans, sequences, strict=True)
        ]
        batch = replace(batch, spans=spans)
        tokens, positions, rows = (
            torch.from_numpy(values).to(self._model.device) for values in (batch.tokens, batch.positions, batch.asked)
        )
        return highest(self._model.forward(tokens, positions, StepAttention(self._cache, batch, unwanted), rows))[0]
