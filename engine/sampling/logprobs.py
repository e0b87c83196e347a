"""Log probabilities of chosen tokens and of the likeliest ones, as gateways are told them.

They are those of the model's own distribution: before bias, penalties, temperature and filters. Knows tensors of
logits, nothing of sampling; engine/sampling/sampler.py asks for the rows whose sequences want them.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch import Tensor

from engine.compute.batch import scored_positions
from engine.protocol import TokenLogprobs
from engine.sequence import Sequence, Step

log = logging.getLogger(__name__)

LEAST: Final = -9999.0
"""In place of minus infinity, which JSON does not have; OpenAI's number for the same."""

_DIGITS: Final = 6  # behind the point: float32 knows no more of them


def find_logprobs(logits: Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """For each row the token's log probability, and those of the `counts` likeliest tokens.

    logits  (num_rows, vocab_size), any floating dtype; left as they are
    tokens  one id for each row, below vocab_size
    """
    found = logits.float().log_softmax(-1)
    chosen = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
    values, ids = found.topk(min(max(counts), found.shape[1]))
    rows = zip(chosen, counts, ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(_plain(own), tuple(zip(best[:count], map(_plain, highest[:count]), strict=True)))
        for own, count, best, highest in rows
    ]


def note_prompt_logprobs(logits: Tensor, step: Step) -> set[Sequence]:
    """Appends to the sequences' `prompt_logprobs`. Returns those for which that failed.

    logits  (num_scored, vocab_size), of the rows of engine/compute/batch.py's `scored`, in that order
    """
    row, failed = 0, set[Sequence]()
    for work in step.work:
        if positions := scored_positions(work):
            sequence, count = work.sequence, work.sequence.sampling.prompt_logprobs or 0
            tokens = list(sequence.tokens[positions.start + 1 : positions.stop + 1])
            rows = logits[row : row + len(positions)]
            try:
                sequence.prompt_logprobs += find_logprobs(rows, tokens, [count] * len(positions))
            except Exception:
                log.exception("log probabilities of a prompt failed (request %s)", sequence.request_id or "-")
                failed.add(sequence)
            row += len(positions)
    return failed


def _plain(logprob: float) -> float:
    return round(max(logprob, LEAST), _DIGITS)
