"""A second, small model that drafts what sequences may go on with, where their texts have nothing to copy.

Its keys and values lie in a cache of its own, paged by the blocks of the sequences: block n of the pool is block n
here, too. It is behind: what it has not computed of a sequence is caught up when it is to draft; drafts that were right
are computed already. Its drafts are verified like all others, so nothing that it computes, or that its cache holds,
changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.compute.attention import StepAttention
from engine.compute.batch import Batch, make_batch, make_rows
from engine.compute.kv_cache import KVCache
from engine.compute.model import LoadedModel
from engine.sampling.sampler import highest
from engine.sequence import Step, Work
from engine.speculation import CATCH_UP


class DraftModel:
    """Beside the model, with as many blocks."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._model, self._block_size = model, block_size
        self._cache = KVCache(model.cache_shape, num_blocks, block_size, model.device)

    def fill(self, step: Step) -> Step:
        """The step, with drafts for works that want some: the likeliest tokens, none of which ends a sequence. One of
        which too much is to be caught up gets none yet."""
        longest = self._model.context_tokens
        wanting = [w for w in step.work if w.wanted and w.sequence.num_tokens + w.wanted <= longest]
        if not wanting:
            return step
        # 1. Catch up; what is behind the last token of those that are there is the first draft.
        behind = [
            Work(w.sequence, at := w.sequence.num_followed, min(CATCH_UP, w.sequence.num_tokens - at), samples=True)
            for w in wanting
        ]
        found = self._find(make_batch(Step(behind), self._block_size), step.unwanted)
        drafts: dict[Work, list[int]] = {}
        for work, part, token in zip(wanting, behind, found, strict=True):
            work.sequence.num_followed = part.start + part.count
            if work.sequence.num_followed == work.sequence.num_tokens:
                drafts[work] = [token]
        # 2. Go on with the drafts, a token for each in a pass.
        for count in range(1, max((work.wanted for work in drafts), default=0)):
            going = [w for w, d in drafts.items() if len(d) == count < w.wanted and d[-1] not in w.sequence.end_ids]
            if not going:
                break
            rows = [(drafts[w][-1], w.sequence.num_tokens + count - 1, w.sequence.block_table) for w in going]
            for work, token in zip(going, self._find(make_rows(rows, self._block_size), step.unwanted), strict=True):
                drafts[work].append(token)
        works = []
        for work in step.work:
            tokens = drafts.get(work, [])
            if tokens and tokens[-1] in work.sequence.end_ids:
                tokens = tokens[:-1]
            works.append(replace(work, drafts=tuple(tokens)) if tokens else work)
        return replace(step, work=works)

    def _find(self, batch: Batch, unwanted: Callable[[], bool] | None) -> list[int]:
        """The likeliest token behind each sequence."""
        tokens, positions, rows = (
            torch.from_numpy(values).to(self._model.device) for values in (batch.tokens, batch.positions, batch.asked)
        )
        return highest(self._model.forward(tokens, positions, StepAttention(self._cache, batch, unwanted), rows))[0]
