"""Chooses the next token of many sequences at once.

Greedy rows of a step share one argmax. The others are continued with a random number that depends on nothing but their
own seed and position (a counter-based generator), so the same seed gives the same text whatever else is in the batch
and wherever the sequence was preempted. A request without a seed draws from the process's own generator.

Order of operations: logit bias, repetition penalty, penalties over generated tokens, what may not come yet
(min_tokens), what a grammar forbids, temperature, top-k, top-p, min-p; those that transformers has too are in its
order. Log probabilities are those of the model's own distribution, before all of these. Knows tensors of logits and
sequences; its neighbour is engine/compute/runner.py.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.compute.batch import scored_positions
from engine.protocol import Sampling, TokenLogprobs
from engine.sampling.grammar_worker import Mask, Masks
from engine.sequence import NOT_FINITE, ROW_FAILED, Sequence, Step

log = logging.getLogger(__name__)

_SEED_BITS: Final = (1 << 64) - 1
_STREAM: Final = 0x6B7661736972  # the generator's second key word: our own stream of every seed
_NUCLEUS_GUESS: Final = 1024  # candidates that are sorted first; a flatter distribution sorts them all


class Sampler:
    """Stateless but for the generator that serves requests without a seed."""

    def __init__(self) -> None:
        self._unseeded = np.random.default_rng()

    def choose(self, logits: Tensor, sequences: list[Sequence], masks: Masks | None = None) -> list[int]:
        """One token id for each row; NOT_FINITE where a row's logits are not finite, what stands in place of a mask,
        ROW_FAILED where an error is that row's alone. Sequences that ask for log probabilities get one more in their
        `logprobs`.

        logits  (num_rows, vocab_size), any floating dtype; left as they are
        """
        tokens, finite = highest(logits)
        masks = masks or {}
        found = {row: mask for row, mask in masks.items() if not isinstance(mask, int)}
        _choose_greedily(logits, tokens, {row: m for row, m in found.items() if is_plain_greedy(sequences[row])})
        for row, sequence in enumerate(sequences):
            if not finite[row]:
                tokens[row] = NOT_FINITE
            elif row in masks and row not in found:
                tokens[row] = int(masks[row])
            elif not is_plain_greedy(sequence):
                tokens[row] = self._try_one(logits[row], sequence, found.get(row))
        _note_logprobs(logits, tokens, sequences)
        return tokens

    def _try_one(self, logits: Tensor, sequence: Sequence, mask: Mask | None) -> int:
        try:
            return self._choose_one(logits.float(), sequence, mask)
        except Exception:
            log.exception("sampling failed (request %s)", sequence.request_id or "-")
            return ROW_FAILED

    def _choose_one(self, logits: Tensor, sequence: Sequence, mask: Mask | None = None) -> int:
        sampling = sequence.sampling
        adjusted = adjust(logits, sequence)
        logits = adjusted if mask is None else constrain(adjusted, logits, mask, may_not_end(sequence))
        if sampling.temperature <= 0:
            return int(logits.argmax())
        weights, ids = weigh(logits, sampling)
        return draw(weights, ids, self._uniform(sequence))

    def _uniform(self, sequence: Sequence) -> float:
        if sequence.sampling.seed is None:
            return float(self._unseeded.random())
        return uniform(sequence.sampling.seed, sequence.num_tokens)


def _note_logprobs(logits: Tensor, tokens: list[int], sequences: list[Sequence]) -> None:
    asked = {row: s.sampling.logprobs for row, s in enumerate(sequences) if s.sampling.logprobs is not None}
    asked = {row: count for row, count in asked.items() if tokens[row] >= 0}
    if not asked:
        return
    rows = list(asked)
    try:
        found = find_logprobs(logits[rows], [tokens[row] for row in rows], list(asked.values()))
    except Exception:
        if len(sequences) > 1:  # each for itself
            for row in rows:
                one = [tokens[row]]
                _note_logprobs(logits[row : row + 1], one, [sequences[row]])
                tokens[row] = one[0]
            return
        log.exception("log probabilities failed (request %s)", sequences[0].request_id or "-")
        tokens[0] = ROW_FAILED
        return
    for row, told in zip(rows, found, strict=True):
        sequences[row].logprobs.append(told)


def _choose_greedily(logits: Tensor, tokens: list[int], masks: dict[int, Mask]) -> None:
    """The highest of the allowed logits, for all rows with a mask at once."""
    if not masks:
        return
    allowed = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)
    found = highest(logits[list(masks)].where(allowed, -torch.inf))[0]
    for row, token in zip(masks, found, strict=True):
        tokens[row] = token


def constrain(adjusted: Tensor, logits: Tensor, mask: Mask, forbids_ends: bool) -> Tensor:
    """Logits of the tokens that a mask allows, minus infinity elsewhere. Where nothing is left, because what it allows
    may not come yet (min_tokens), the grammar wins: its text is complete.

    adjusted      (vocab_size,) float32; `logits` are those before bias and penalties
    forbids_ends  whether `adjusted` has minus infinity for what may not come yet
    """
    allowed = torch.from_numpy(mask).to(logits.device)
    left = adjusted.where(allowed, -torch.inf)
    if forbids_ends and left.max() == -torch.inf:
        return logits.where(allowed, -torch.inf)
    return left


def highest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The first token of the highest logit in each row, and whether that logit is finite: it is NaN where any is.

    logits  (num_rows, vocab_size), any floating dtype
    """
    if logits.device.type == "cpu":  # numpy's search is several times as quick as torch's there
        rows = logits.float().numpy()
        choice = rows.argmax(-1)
        return choice.tolist(), np.isfinite(rows[np.arange(len(rows)), choice]).tolist()
    values, indices = logits.max(-1)
    return indices.tolist(), values.isfinite().tolist()


def is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the highest logit as the model computed it is the answer."""
    sampling = sequence.sampling
    return (
        sampling.temperature <= 0
        and not sampling.logit_bias
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
        and not may_not_end(sequence)
    )


def may_not_end(sequence: Sequence) -> bool:
    """Whether the tokens that end the sequence are forbidden at its next position."""
    return sequence.num_generated < sequence.sampling.min_tokens and bool(sequence.end_ids)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position alone (Philox 4x64)."""
    key = np.array([seed & _SEED_BITS, _STREAM], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def adjust(logits: Tensor, sequence: Sequence) -> Tensor:
    """Logits with bias and penalties, and without the tokens that may not come yet.

    A token of prompt or answer has its logit divided by repetition_penalty, or multiplied when below 0 (Keskar et al.,
    2019). For those of the answer alone: - frequency * count - presence * (count > 0).

    logits  (vocab_size,) float32; not changed. Token ids beyond the vocabulary are left out.
    """
    sampling = sequence.sampling
    if sampling.logit_bias:
        logits = logits.clone()
        for token, bias in sampling.logit_bias:
            if 0 <= token < len(logits):
                logits[token] += bias
    if sampling.repetition_penalty != 1:
        logits = _penalise_repetition(logits, sequence)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.num_generated:
        generated = np.array(sequence.tokens[sequence.num_prompt :], np.int64)
        counts = torch.from_numpy(np.bincount(generated, minlength=len(logits))[: len(logits)])
        counts = counts.to(logits.device, logits.dtype)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return _forbid_ends(logits, sequence) if may_not_end(sequence) else logits


def _penalise_repetition(logits: Tensor, sequence: Sequence) -> Tensor:
    seen = torch.from_numpy(np.array(sequence.tokens, np.int64))  # a copy: the sequence's tokens grow
    seen = seen[seen < len(logits)].to(logits.device)
    penalty, values = sequence.sampling.repetition_penalty, logits[seen]
    # A token that comes twice is written twice, with the same value.
    return logits.index_put((seen,), torch.where(values < 0, values * penalty, values / penalty))


def _forbid_ends(logits: Tensor, sequence: Sequence) -> Tensor:
    """Unless nothing else can come: then the sequence ends early."""
    ends = torch.tensor([token for token in sequence.end_ids if token < len(logits)], device=logits.device)
    forbidden = logits.index_fill(0, ends.long(), -torch.inf)
    return forbidden if bool(forbidden.max() > -torch.inf) else logits


def weigh(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities after temperature, top-k, top-p and min-p.

    top-k keeps every token that is as likely as the k-th; top-p keeps the shortest run of most likely tokens that adds
    up to top_p, at least one; min-p keeps those that are at least min_p times as likely as the likeliest. Returns
    (weights, ids) of the kept tokens: float64, not normalised, the highest 1; ids None is 0, 1, ...
    """
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / sampling.temperature
    ids: Tensor | None = None
    if 0 < sampling.top_k < len(scaled):
        threshold = scaled.topk(sampling.top_k).values[-1]
        ids = (scaled >= threshold).nonzero().view(-1)
        scaled = scaled[ids]
    weights = scaled.exp()
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if sampling.min_p > 0:
        kept = (weights >= sampling.min_p).nonzero().view(-1)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return weights, ids


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Indices of the shortest run of largest weights that adds up to top_p of the whole. Stable: ties by index."""
    goal = top_p * float(weights.sum())
    guess = _NUCLEUS_GUESS
    if guess < len(weights):
        threshold = weights.topk(guess).values[-1]
        candidates = (weights >= threshold).nonzero().view(-1)
        if float(weights[candidates].sum()) < goal:
            candidates = torch.arange(len(weights), device=weights.device)
    else:
        candidates = torch.arange(len(weights), device=weights.device)
    order = weights[candidates].sort(descending=True, stable=True)
    reached = order.values.cumsum(0)
    keep = int((reached < goal).sum()) + 1
    return candidates[order.indices[:keep]]


def draw(weights: Tensor, ids: Tensor | None, u: float) -> int:
    """Inverse of the cumulative distribution at u in [0, 1). A token of weight zero is never drawn."""
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * u, right=True))
    if index >= len(weights):  # u so close to 1 that the product rounded up
        index = int(weights.nonzero()[-1])
    return index if ids is None else int(ids[index])


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
